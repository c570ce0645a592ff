use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;

/// A task that ends at `shutdown`, and a flag that is set then.
fn orderly(shutdown: &CancellationToken) -> (Arc<AtomicBool>, impl Future<Output = ()> + use<>) {
    let ended = Arc::new(AtomicBool::new(false));
    let (set, shutdown) = (Arc::clone(&ended), shutdown.clone());
    (ended, async move {
        shutdown.cancelled().await;
        tokio::task::yield_now().await;
        set.store(true, Ordering::Relaxed);
    })
}

#[tokio::test]
async fn panic_shuts_the_others_down_and_is_returned() {
    let shutdown = CancellationToken::new();
    let mut tasks = Tasks::new(shutdown.clone());
    let (ended, serving) = orderly(&shutdown);
    tasks.spawn(serving);
    tasks.spawn(async { panic!("a bug") });
    let error = tasks.join_all().await.unwrap_err();
    assert_eq!(error.to_string(), "a task of the daemon panicked");
    assert!(crate::chain(&error).contains("a bug"), "{error:?}");
    assert!(ended.load(Ordering::Relaxed) && shutdown.is_cancelled());
}

#[tokio::test]
async fn panic_in_a_group_shuts_all_down() {
    let shutdown = CancellationToken::new();
    let mut tasks = Tasks::new(shutdown.clone());
    let mut group = Tasks::new(shutdown.clone());
    group.spawn(async { panic!("a bug") });
    tasks.spawn_group(group.join_all());
    let (ended, serving) = orderly(&shutdown);
    tasks.spawn(serving);
    tasks.join_failed().await;
    assert!(tasks.join_all().await.is_err());
    assert!(ended.load(Ordering::Relaxed));
}

#[tokio::test]
async fn task_that_ends_is_not_a_failure() {
    let shutdown = CancellationToken::new();
    let mut tasks = Tasks::new(shutdown.clone());
    tasks.spawn(async {});
    let failed = tokio::time::timeout(std::time::Duration::from_millis(50), tasks.join_failed());
    assert!(failed.await.is_err() && !shutdown.is_cancelled());
    // Neither is an empty set of tasks.
    let (_, serving) = orderly(&shutdown);
    tasks.spawn(serving);
    shutdown.cancel();
    tasks.join_all().await.unwrap();
}

#[tokio::test]
async fn early_end_of_a_needed_task_ends_serving() {
    for (panics, text) in
        [(true, "a task of the daemon panicked"), (false, "a task of the daemon ended by itself")]
    {
        let (shutdown, release) = (CancellationToken::new(), CancellationToken::new());
        let mut tasks = JoinSet::new();
        tasks.spawn(async move { assert!(!panics, "a bug") });
        tasks.spawn(release.clone().cancelled_owned());
        let serving = async {
            shutdown.cancelled().await;
            Ok(())
        };
        let error: TaskFailure = serve_with_tasks(serving, tasks, &shutdown, &release).await.unwrap_err();
        assert_eq!(error.to_string(), text);
    }
    let (shutdown, release) = (CancellationToken::new(), CancellationToken::new());
    let mut tasks = JoinSet::new();
    tasks.spawn(shutdown.clone().cancelled_owned());
    tasks.spawn(release.clone().cancelled_owned());
    shutdown.cancel();
    let ended: Result<(), TaskFailure> = serve_with_tasks(async { Ok(()) }, tasks, &shutdown, &release).await;
    ended.unwrap();
}
