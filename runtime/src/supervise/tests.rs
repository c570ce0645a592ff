use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;

/// Ends in order at `shutdown`, and notes that it did.
fn in_order(shutdown: &CancellationToken) -> (Arc<AtomicBool>, impl Future<Output = ()> + use<>) {
    let ended = Arc::new(AtomicBool::new(false));
    let (noted, shutdown) = (Arc::clone(&ended), shutdown.clone());
    (ended, async move {
        shutdown.cancelled().await;
        tokio::task::yield_now().await;
        noted.store(true, Ordering::Relaxed);
    })
}

#[tokio::test]
async fn a_task_that_panics_ends_the_others_in_order_and_is_told() {
    let shutdown = CancellationToken::new();
    let mut tasks = Tasks::new(shutdown.clone());
    let (ended, serving) = in_order(&shutdown);
    tasks.spawn(serving);
    tasks.spawn(async { panic!("a bug") });
    let error = tasks.end().await.unwrap_err();
    assert_eq!(error.to_string(), "a task of the daemon panicked");
    assert!(crate::chain(&error).contains("a bug"), "{error:?}");
    assert!(ended.load(Ordering::Relaxed) && shutdown.is_cancelled());
}

#[tokio::test]
async fn the_fall_of_a_crew_is_the_fall_of_all() {
    let shutdown = CancellationToken::new();
    let mut tasks = Tasks::new(shutdown.clone());
    let mut crew = Tasks::new(shutdown.clone());
    crew.spawn(async { panic!("a bug") });
    tasks.spawn_group(crew.end());
    let (ended, serving) = in_order(&shutdown);
    tasks.spawn(serving);
    tasks.fall().await;
    assert!(tasks.end().await.is_err());
    assert!(ended.load(Ordering::Relaxed));
}

#[tokio::test]
async fn a_task_that_ends_by_itself_is_no_fall() {
    let shutdown = CancellationToken::new();
    let mut tasks = Tasks::new(shutdown.clone());
    tasks.spawn(async {});
    let fall = tokio::time::timeout(std::time::Duration::from_millis(50), tasks.fall());
    assert!(fall.await.is_err() && !shutdown.is_cancelled());
    // Nor is there one where nothing runs.
    let (_, serving) = in_order(&shutdown);
    tasks.spawn(serving);
    shutdown.cancel();
    tasks.end().await.unwrap();
}

#[tokio::test]
async fn all_ends_when_a_task_beside_it_does_and_says_so() {
    for (panics, words) in [
        (true, "a task of the daemon panicked"),
        (false, "a task of the daemon ended by itself"),
    ] {
        let (shutdown, release) = (CancellationToken::new(), CancellationToken::new());
        let mut tasks = JoinSet::new();
        tasks.spawn(async move { assert!(!panics, "a bug") });
        tasks.spawn(release.clone().cancelled_owned());
        let serving = async {
            shutdown.cancelled().await;
            Ok(())
        };
        let error: Fallen = beside(serving, tasks, &shutdown, &release).await.unwrap_err();
        assert_eq!(error.to_string(), words);
    }
    let (shutdown, release) = (CancellationToken::new(), CancellationToken::new());
    let mut tasks = JoinSet::new();
    tasks.spawn(shutdown.clone().cancelled_owned());
    tasks.spawn(release.clone().cancelled_owned());
    shutdown.cancel();
    let ended: Result<(), Fallen> = beside(async { Ok(()) }, tasks, &shutdown, &release).await;
    ended.unwrap();
}
