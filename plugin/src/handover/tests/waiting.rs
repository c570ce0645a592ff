//! The wait for a pod that kubelet has before the watch shows it, on a clock that moves only when all tasks wait.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};

use super::*;
use crate::observe::Observations;

/// A hand-over of eight GPUs in NVLink pairs, in a cluster, after the pod list.
fn shared() -> (Arc<SharedHandover>, Arc<Observations>) {
    let observed = Arc::<Observations>::default();
    observed.cluster(true);
    let (notes, _) = mpsc::channel(1);
    let handover = SharedHandover::new(node(), Arc::clone(&observed), Some(notes));
    (Arc::new(handover), observed)
}

async fn ask(handover: &SharedHandover, size: usize) -> (Devices, Duration) {
    let began = Instant::now();
    let mut answers = handover.prefer(vec![request(&set(0..8), &set([]), size)]).await;
    assert_eq!(answers.len(), 1);
    (answers.remove(0), began.elapsed())
}

fn show_later(handover: &Arc<SharedHandover>, pod: ObservedPod, delay: Duration) {
    let handover = Arc::clone(handover);
    tokio::spawn(async move {
        sleep(delay).await;
        handover.observe(pod);
    });
}

#[tokio::test(start_paused = true)]
async fn late_pod_gets_its_grant() {
    let (handover, _) = shared();
    let late = Duration::from_millis(400);
    show_later(&handover, simple("late", [5]), late);
    assert_eq!(ask(&handover, 1).await, (set([5]), late));
}

#[tokio::test(start_paused = true)]
async fn unrelated_changes_do_not_end_the_wait() {
    let (handover, _) = shared();
    handover.observe(simple("other", [0, 1]));
    show_later(&handover, simple("another", [2, 3]), Duration::from_millis(50));
    let late = Duration::from_millis(300);
    show_later(&handover, simple("late", [5]), late);
    assert_eq!(ask(&handover, 1).await, (set([5]), late));
}

#[tokio::test(start_paused = true)]
async fn unseen_pod_avoids_grants_after_one_second() {
    let (handover, _) = shared();
    handover.observe(simple("other", [0, 1, 2, 3, 4, 5, 6]));
    assert_eq!(ask(&handover, 1).await, (set([7]), Duration::from_secs(1)));
}

#[tokio::test(start_paused = true)]
async fn broken_watch_shortens_wait() {
    let (handover, observed) = shared();
    observed.cluster(false);
    let (_, waited) = ask(&handover, 1).await;
    assert_eq!(waited, Duration::from_millis(100));
}

#[tokio::test(start_paused = true)]
async fn watch_breaking_during_wait_shortens_it() {
    let (handover, observed) = shared();
    let breaks = Duration::from_millis(300);
    tokio::spawn(async move {
        sleep(breaks).await;
        observed.cluster(false);
    });
    let (_, waited) = ask(&handover, 1).await;
    assert_eq!(waited, breaks);
}

#[tokio::test(start_paused = true)]
async fn pod_without_grant_waits_only_for_table() {
    let (handover, _) = shared();
    handover.observe(stray("stray", 2));
    assert_eq!(ask(&handover, 2).await, (set([0, 1]), Duration::ZERO));
    handover.table(None);
    let (_, waited) = ask(&handover, 2).await;
    assert_eq!(waited, Duration::from_millis(100));
}

#[tokio::test(start_paused = true)]
async fn no_cluster_never_waits() {
    let handover = SharedHandover::new(node(), Arc::default(), None);
    assert_eq!(ask(&handover, 2).await, (set([0, 1]), Duration::ZERO));
}

#[tokio::test(start_paused = true)]
async fn many_deleted_pods_cost_one_long_wait() {
    let (handover, _) = shared();
    for pod in ["a", "b", "c"] {
        handover.observe(simple(pod, [0]));
        handover.remove_pod(&pod.into(), false);
    }
    let began = Instant::now();
    for _ in 0..11 {
        ask(&handover, 1).await;
    }
    assert_eq!(began.elapsed(), Duration::from_secs(2));
    sleep(Duration::from_secs(30)).await;
    let late = Duration::from_millis(400);
    show_later(&handover, simple("late", [5]), late);
    assert_eq!(ask(&handover, 1).await, (set([5]), late));
}
