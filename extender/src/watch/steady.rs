//! A watch that is never given up. After an error it pauses, longer each time until an event arrives; where an object
//! was lost it begins again.

use std::time::Duration;

use futures::stream::BoxStream;
use futures::{Stream, StreamExt, stream};
use gantry_runtime::Backoff;
use kube::runtime::watcher::{Error, Event};

/// Pauses after errors: four watches of one process are no load that justifies a longer pause.
const RETRY: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(2));

/// The events and errors of a watch that `begin` starts.
pub(super) fn steady<K, S>(
    mut begin: impl FnMut() -> S + Send + 'static,
) -> impl Stream<Item = Result<Event<K>, Error>> + Send + 'static
where
    K: Send + 'static,
    S: Stream<Item = Result<Event<K>, Error>> + Send + 'static,
{
    let steady = Steady {
        events: begin().boxed(),
        begin: Box::new(move || begin().boxed()),
        backoff: RETRY,
        pause: None,
    };
    stream::unfold(steady, |mut steady| async move {
        let event = steady.next().await?;
        Some((event, steady))
    })
}

type Events<K> = BoxStream<'static, Result<Event<K>, Error>>;

struct Steady<K> {
    events: Events<K>,
    begin: Box<dyn FnMut() -> Events<K> + Send>,
    backoff: Backoff,
    /// Pause before the next event.
    pause: Option<Duration>,
}

impl<K> Steady<K> {
    async fn next(&mut self) -> Option<Result<Event<K>, Error>> {
        if let Some(pause) = self.pause.take() {
            tokio::time::sleep(pause).await;
        }
        let event = self.events.next().await?;
        match &event {
            // These come before every list, also before one that fails with its last page.
            Ok(Event::Init | Event::InitApply(_)) => {}
            Ok(Event::InitDone | Event::Apply(_) | Event::Delete(_)) => self.backoff.reset(),
            Err(error) => {
                if has_lost(error) {
                    self.events = (self.begin)();
                }
                self.pause = Some(self.backoff.fail());
            }
        }
        Some(event)
    }
}

/// Whether an object could not be parsed. The watch would go on after it, and it would be missing until the next list.
/// The client parses an unreadable event as a `Status`, which succeeds for any object; a broken connection is no such
/// loss.
fn has_lost(error: &Error) -> bool {
    matches!(error, Error::WatchFailed(cause) if !matches!(cause, kube::Error::ReadEvents(_)))
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    /// The pauses, in milliseconds, that what comes of a watch brings about.
    async fn pauses(events: Vec<Result<Event<()>, Error>>) -> Vec<u128> {
        let mut events = Some(events);
        let mut events = std::pin::pin!(steady(move || stream::iter(events.take().unwrap())));
        let mut pauses = Vec::new();
        let mut asked = Instant::now();
        while events.next().await.is_some() {
            pauses.push(asked.elapsed().as_millis());
            asked = Instant::now();
        }
        pauses
    }

    #[tokio::test(start_paused = true)]
    async fn a_list_that_goes_on_failing_is_tried_ever_more_rarely() {
        // A missing right, or a kind that is not defined: each list begins, and fails.
        let mut events = Vec::new();
        for _ in 0..7 {
            events.push(Ok(Event::Init));
            events.push(Err(Error::NoResourceVersion));
        }
        // One that fails midway is no better.
        events.extend([Ok(Event::Init), Ok(Event::InitApply(())), Err(Error::NoResourceVersion)]);
        events.push(Ok(Event::Init));
        let expected = [0, 0, 100, 0, 200, 0, 400, 0, 800, 0, 1600, 0, 2000, 0, 2000, 0, 0, 2000];
        assert_eq!(pauses(events).await, expected);
    }

    #[tokio::test(start_paused = true)]
    async fn whatever_comes_of_a_watch_makes_the_next_pause_a_short_one() {
        for good in [Event::InitDone, Event::Apply(()), Event::Delete(())] {
            let failed = || Err(Error::NoResourceVersion);
            let events = vec![failed(), failed(), failed(), Ok(good), failed(), Ok(Event::Init)];
            assert_eq!(pauses(events).await, [0, 100, 200, 400, 0, 100]);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn where_something_was_lost_the_watch_is_begun_anew() {
        let io = || std::io::Error::other("broken off");
        let unreadable = || serde_json::from_str::<()>("{}").unwrap_err();
        let status = || Box::new(serde_json::from_str(r#"{"type": "ADDED", "object": {}}"#).unwrap());
        let mut begins = vec![
            // Another list, and the watch after it.
            vec![Ok(Event::InitDone), Ok(Event::Apply(4))],
            vec![
                Ok(Event::Apply(2)),
                Err(Error::WatchFailed(kube::Error::Api(status()))),
                Ok(Event::Apply(3)),
            ],
            vec![
                Err(Error::WatchFailed(kube::Error::ReadEvents(io()))),
                Ok(Event::Apply(1)),
                Err(Error::WatchFailed(kube::Error::SerdeError(unreadable()))),
                Ok(Event::Apply(3)),
            ],
        ];
        let begun = Instant::now();
        let events: Vec<_> = steady(move || stream::iter(begins.pop().unwrap()))
            .filter_map(async |event| event.ok())
            .collect()
            .await;
        let applied: Vec<i32> = events
            .iter()
            .filter_map(|event| match event {
                Event::Apply(number) => Some(*number),
                _ => None,
            })
            .collect();
        assert_eq!(applied, [1, 2, 4]);
        assert_eq!(begun.elapsed(), Duration::from_millis(300), "a pause before each");
    }
}
