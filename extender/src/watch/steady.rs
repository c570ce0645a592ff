//! A watch that is never given up: after an error it pauses, longer each time until an event arrives.

use std::pin::Pin;
use std::time::Duration;

use futures::{Stream, StreamExt, stream};
use gantry_runtime::Backoff;
use kube::runtime::watcher::{Error, Event};

/// Pauses after errors: four watches of one process are no load that justifies a longer pause.
const RETRY: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(2));

/// These events and errors, with a pause after each error.
pub(super) fn steady<K: Send + 'static>(
    events: impl Stream<Item = Result<Event<K>, Error>> + Send + 'static,
) -> impl Stream<Item = Result<Event<K>, Error>> + Send + 'static {
    let steady = SteadyStream { events: Box::pin(events), backoff: RETRY, pause: None };
    stream::unfold(steady, |mut steady| async move {
        let event = steady.next().await?;
        Some((event, steady))
    })
}

struct SteadyStream<S> {
    events: Pin<Box<S>>,
    backoff: Backoff,
    /// Pause before the next event.
    pause: Option<Duration>,
}

impl<K, S: Stream<Item = Result<Event<K>, Error>>> SteadyStream<S> {
    async fn next(&mut self) -> Option<Result<Event<K>, Error>> {
        if let Some(pause) = self.pause.take() {
            tokio::time::sleep(pause).await;
        }
        let event = self.events.next().await?;
        match &event {
            // These come before every list, also before one that fails with its last page.
            Ok(Event::Init | Event::InitApply(_)) => {}
            Ok(Event::InitDone | Event::Apply(_) | Event::Delete(_)) => self.backoff.reset(),
            Err(_) => self.pause = Some(self.backoff.fail()),
        }
        Some(event)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    /// The pauses, in milliseconds, that what comes of a watch brings about.
    async fn pauses(events: Vec<Result<Event<()>, Error>>) -> Vec<u128> {
        let mut events = std::pin::pin!(steady(stream::iter(events)));
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
}
