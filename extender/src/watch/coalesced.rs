//! Limits how often one object may change: changes that come faster are coalesced, and the latest is passed on. The
//! credential of one node may write its GpuNode as often as the API server accepts, and each change costs the leader a new
//! snapshot.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt, stream};
use gantry_runtime::LogThrottle;
use kube::ResourceExt;
use kube::runtime::watcher::{Error, Event};
use tokio::time::Instant;

use super::stream::{ReceivedObject, StreamedObject};
use crate::metrics::Metrics;

/// Changes of one object that are passed on at once. A node that starts a pod on each of its GPUs has fewer.
const BURST: u32 = 20;
/// Time in which one more change is passed on.
const PERIOD: Duration = Duration::from_secs(1);

/// The events of a watch, of which the changes of one object are limited. A list is passed on as it is.
pub(super) fn coalesced<K: StreamedObject>(
    events: impl Stream<Item = Result<Event<ReceivedObject<K>>, Error>> + Send + 'static,
    metrics: Arc<Metrics>,
) -> impl Stream<Item = Result<Event<ReceivedObject<K>>, Error>> + Send + 'static {
    let coalesced = CoalescedStream {
        events: Box::pin(events),
        changes: ObjectChanges::default(),
        due: VecDeque::new(),
        metrics,
        throttle: LogThrottle::default(),
    };
    stream::unfold(coalesced, |mut coalesced| async move {
        let event = coalesced.next().await?;
        Some((event, coalesced))
    })
}

struct CoalescedStream<K, S> {
    events: Pin<Box<S>>,
    changes: ObjectChanges<ReceivedObject<K>>,
    /// Held back changes that may be passed on now.
    due: VecDeque<ReceivedObject<K>>,
    metrics: Arc<Metrics>,
    throttle: LogThrottle,
}

impl<K: StreamedObject, S: Stream<Item = Result<Event<ReceivedObject<K>>, Error>>> CoalescedStream<K, S> {
    async fn next(&mut self) -> Option<Result<Event<ReceivedObject<K>>, Error>> {
        loop {
            if let Some(change) = self.due.pop_front() {
                return Some(Ok(Event::Apply(change)));
            }
            let due = self.changes.due();
            let event = tokio::select! {
                // What may be passed on goes first: a fast watch does not hold it back.
                biased;
                () = tokio::time::sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                    self.due.extend(self.changes.take_due(Instant::now()));
                    continue;
                }
                event = self.events.next() => event?,
            };
            match event {
                Ok(Event::Apply(object)) => {
                    let name = object.object.name_any();
                    if let Some(object) = self.pass(&name, object) {
                        return Some(Ok(Event::Apply(object)));
                    }
                }
                Ok(Event::Delete(object)) => {
                    self.changes.forget(&object.object.name_any());
                    return Some(Ok(Event::Delete(object)));
                }
                Ok(Event::Init) => {
                    // The list has the latest state of all.
                    self.changes.drop_held();
                    return Some(Ok(Event::Init));
                }
                other => return Some(other),
            }
        }
    }

    fn pass(&mut self, name: &str, object: ReceivedObject<K>) -> Option<ReceivedObject<K>> {
        let now = Instant::now();
        let replaced = match self.changes.change(now, name, object) {
            Disposition::Now(object) => return Some(object),
            Disposition::Later { replaced } => replaced,
        };
        self.metrics.coalesced_changes.inc_by(replaced.into());
        if self.throttle.should_log(name, now.into_std()) {
            tracing::warn!(
                object = name,
                "changes faster than once a second; only the latest state of each second is applied"
            );
        }
        None
    }
}

/// What becomes of a change.
#[derive(Debug, PartialEq, Eq)]
enum Disposition<T> {
    Now(T),
    /// It is held back. It may have `replaced` an earlier one.
    Later {
        replaced: bool,
    },
}

/// The changes of each object: [`BURST`] at once, then one each [`PERIOD`].
#[derive(Debug)]
struct ObjectChanges<T> {
    /// By the object's name: up to when its changes are accounted for, and the change that is held back.
    objects: HashMap<String, (Instant, Option<T>)>,
    /// When each of those may be passed on.
    held: BTreeSet<(Instant, String)>,
}

impl<T> Default for ObjectChanges<T> {
    fn default() -> Self {
        Self { objects: HashMap::new(), held: BTreeSet::new() }
    }
}

impl<T> ObjectChanges<T> {
    fn change(&mut self, now: Instant, name: &str, change: T) -> Disposition<T> {
        let Some((until, held)) = self.objects.get_mut(name) else {
            self.objects.insert(name.to_owned(), (now + PERIOD, None));
            return Disposition::Now(change);
        };
        if held.is_none() && *until <= now + PERIOD * (BURST - 1) {
            *until = now.max(*until) + PERIOD;
            return Disposition::Now(change);
        }
        let replaced = held.replace(change).is_some();
        if !replaced {
            self.held.insert((*until - PERIOD * (BURST - 1), name.to_owned()));
        }
        Disposition::Later { replaced }
    }

    /// When the next change may be passed on.
    fn due(&self) -> Option<Instant> {
        self.held.first().map(|(due, _)| *due)
    }

    fn take_due(&mut self, now: Instant) -> Vec<T> {
        let mut changes = Vec::new();
        while let Some((due, name)) = self.held.pop_first() {
            if due > now {
                self.held.insert((due, name));
                break;
            }
            if let Some((until, held)) = self.objects.get_mut(&name) {
                *until = now.max(*until) + PERIOD;
                changes.extend(held.take());
            }
        }
        changes
    }

    /// The object is gone.
    fn forget(&mut self, name: &str) {
        if let Some((until, Some(_))) = self.objects.remove(name) {
            self.held.remove(&(until - PERIOD * (BURST - 1), name.to_owned()));
        }
    }

    /// Drops what is held back, and objects that have not changed lately.
    fn drop_held(&mut self) {
        self.held.clear();
        let now = Instant::now();
        self.objects.retain(|_, (until, _)| *until > now);
        self.objects.values_mut().for_each(|(_, held)| *held = None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::PartialGpuNode;

    /// The changes that are passed on, and when, in milliseconds; `changes` are times and values of object `n`.
    async fn passed(changes: &[(u64, u32)]) -> Vec<(u64, u32)> {
        let (start, mut limited, mut passed) = (Instant::now(), ObjectChanges::default(), Vec::new());
        for (at, value) in changes {
            while limited.due().is_some_and(|due| due <= start + Duration::from_millis(*at)) {
                tokio::time::sleep_until(limited.due().unwrap()).await;
                let now = Instant::now();
                passed.extend(
                    limited.take_due(now).into_iter().map(|value| ((now - start).as_millis() as u64, value)),
                );
            }
            tokio::time::sleep_until(start + Duration::from_millis(*at)).await;
            if let Disposition::Now(value) = limited.change(Instant::now(), "n", *value) {
                passed.push((*at, value));
            }
        }
        while let Some(due) = limited.due() {
            tokio::time::sleep_until(due).await;
            let now = Instant::now();
            passed.extend(
                limited.take_due(now).into_iter().map(|value| ((now - start).as_millis() as u64, value)),
            );
        }
        passed
    }

    #[tokio::test(start_paused = true)]
    async fn honest_changes_are_passed_on_at_once() {
        // A pod on each of eight GPUs, kubelet's reports, and a fault.
        let mut changes: Vec<(u64, u32)> = (0..20).map(|number| (u64::from(number) * 10, number)).collect();
        changes.extend((0..60).map(|second| (30_000 + second * 1_000, 100)));
        assert_eq!(passed(&changes).await, changes);
    }

    #[tokio::test(start_paused = true)]
    async fn fast_changes_are_coalesced_and_the_latest_is_passed_on() {
        let changes: Vec<(u64, u32)> = (0..10_000).map(|number| (u64::from(number) * 2, number)).collect();
        let passed = passed(&changes).await;
        assert_eq!(passed[..20], changes[..20]);
        // One a second, each as late as that, and the last one too.
        assert!((38..=42).contains(&passed.len()), "{}", passed.len());
        assert!(passed[20..].windows(2).all(|pair| pair[1].0 - pair[0].0 == 1_000), "{passed:?}");
        for (at, value) in &passed {
            assert!(at - u64::from(*value) * 2 <= 1_000, "{at}: {value}");
        }
        assert_eq!(passed.last().unwrap().1, 9_999);
    }

    #[tokio::test(start_paused = true)]
    async fn one_object_does_not_hold_another_back() {
        let (now, mut limited) = (Instant::now(), ObjectChanges::default());
        for number in 0..100 {
            limited.change(now, "fast", number);
        }
        assert_eq!(limited.change(now, "slow", 7), Disposition::Now(7));
        assert_eq!(limited.change(now, "fast", 8), Disposition::Later { replaced: true });
        limited.forget("fast");
        assert_eq!(limited.due(), None);
        // It is recreated.
        assert_eq!(limited.change(now, "fast", 9), Disposition::Now(9));
    }

    /// The events of a watch as they come out: the value of an applied object, or the first letter of the event.
    async fn come(events: Vec<Event<u32>>) -> (Vec<String>, u64) {
        let read = |value: u32| ReceivedObject {
            object: serde_json::from_value::<PartialGpuNode>(serde_json::json!({
                "metadata": {"name": "n", "resourceVersion": value.to_string()}, "spec": {},
            }))
            .unwrap(),
            bytes: Some(1),
        };
        let events = events.into_iter().map(move |event| {
            Ok(match event {
                Event::Apply(value) => Event::Apply(read(value)),
                Event::InitApply(value) => Event::InitApply(read(value)),
                Event::Delete(value) => Event::Delete(read(value)),
                Event::Init => Event::Init,
                Event::InitDone => Event::InitDone,
            })
        });
        let metrics = Arc::new(Metrics::new());
        // The watch stays open.
        let events = stream::iter(events).chain(stream::pending());
        let mut passed = std::pin::pin!(coalesced(events, Arc::clone(&metrics)));
        let mut seen = Vec::new();
        while let Ok(Some(event)) = tokio::time::timeout(Duration::from_secs(60), passed.next()).await {
            seen.push(match event.unwrap() {
                Event::Apply(node) => node.object.metadata.resource_version.unwrap(),
                Event::Delete(_) => "gone".to_owned(),
                Event::Init => "list".to_owned(),
                Event::InitApply(_) => "listed".to_owned(),
                Event::InitDone => "end".to_owned(),
            });
        }
        (seen, metrics.coalesced_changes.get())
    }

    #[tokio::test(start_paused = true)]
    async fn held_change_follows_in_time_unless_it_is_outdated() {
        let changes = || (0..30).map(Event::Apply);
        let first: Vec<String> = (0..20).map(|number| number.to_string()).collect();
        let (seen, coalesced) = come(changes().collect()).await;
        assert_eq!((seen, coalesced), ([first.clone(), vec!["29".to_owned()]].concat(), 9));
        let (seen, _) = come(changes().chain([Event::Delete(30)]).collect()).await;
        assert_eq!(seen, [first.clone(), vec!["gone".to_owned()]].concat());
        let listed = [Event::Init, Event::InitApply(31), Event::InitDone];
        let (seen, _) = come(changes().chain(listed).collect()).await;
        let list = ["list", "listed", "end"].map(str::to_owned);
        assert_eq!(seen, [first, list.to_vec()].concat());
    }
}
