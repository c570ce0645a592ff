//! How old the facts are: when the API server last answered, and whether each watch works. A watch that fails while the
//! API server answers leaves the facts as old as its last event.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use http::Request;
use kube::Client;
use kube::client::Body;

use super::SILENCE;
use crate::index::Source;

/// How old the facts are. Readable from every task.
#[derive(Debug)]
pub struct ApiHealth(Mutex<Times>);

#[derive(Debug, Default)]
struct Times {
    answered: Option<Instant>,
    watches: [Watch; Source::ALL.len()],
}

#[derive(Debug, Default, Clone, Copy)]
struct Watch {
    /// When it last began or sent an event.
    good: Option<Instant>,
    failing: bool,
}

impl ApiHealth {
    /// Before the first answer.
    pub fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::default()))
    }

    /// Up to when the facts are complete: the last answer of the API server, or the last event of the watch that has
    /// been failing or silent for longest.
    pub fn last(&self) -> Option<Instant> {
        let times = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut last = times.answered?;
        for watch in times.watches {
            // A working watch begins again before that, even without events.
            let silent = watch.good.is_some_and(|good| last.saturating_duration_since(good) > SILENCE);
            if watch.failing || silent {
                last = last.min(watch.good?);
            }
        }
        Some(last)
    }

    /// How long ago that was.
    pub fn age(&self) -> Option<Duration> {
        self.last().map(|last| gantry_runtime::now().saturating_duration_since(last))
    }

    /// The API server answered.
    pub fn answered(&self, now: Instant) {
        self.change(|times| times.answered = Some(now));
    }

    /// A watch began, or sent an event.
    pub(super) fn watch_works(&self, source: Source, now: Instant) {
        self.change(|times| {
            times.watches[source as usize] = Watch { good: Some(now), failing: false };
        });
    }

    /// A list or watch failed.
    pub(super) fn watch_failed(&self, source: Source) {
        self.change(|times| times.watches[source as usize].failing = true);
    }

    #[cfg(test)]
    pub(super) fn is_failing(&self, source: Source) -> bool {
        self.0.lock().unwrap().watches[source as usize].failing
    }

    fn change(&self, change: impl FnOnce(&mut Times)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// A client for one source that records when its watches begin: a quiet watch sends nothing else.
    pub(super) fn observing(self: &Arc<Self>, client: &Client, source: Source) -> Client {
        let (health, inner) = (Arc::clone(self), client.clone());
        let service = tower::service_fn(move |request: Request<Body>| {
            let (health, inner) = (Arc::clone(&health), inner.clone());
            async move {
                let watches = request
                    .uri()
                    .query()
                    .is_some_and(|query| query.split('&').any(|part| part == "watch=true"));
                let response = inner.send(request).await?;
                if watches && response.status().is_success() {
                    health.watch_works(source, gantry_runtime::now());
                }
                Ok::<_, kube::Error>(response)
            }
        });
        Client::new(service, client.default_namespace())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_are_as_old_as_the_oldest_failing_watch() {
        let health = ApiHealth::new();
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        assert_eq!(health.last(), None);
        health.answered(at(1));
        for source in Source::ALL {
            health.watch_works(source, at(1));
        }
        // A quiet watch is as good as the API server's answers.
        health.answered(at(31));
        assert_eq!(health.last(), Some(at(31)));
        health.watch_failed(Source::Nodes);
        assert_eq!(health.last(), Some(at(1)));
        health.watch_works(Source::Nodes, at(40));
        health.watch_works(Source::Pods, at(41));
        health.answered(at(42));
        assert_eq!(health.last(), Some(at(42)));
        // The watch of GpuNodes has not begun again since 1.
        health.answered(at(50));
        assert_eq!(health.last(), Some(at(1)));
    }

    #[test]
    fn a_watch_that_has_never_worked_leaves_no_facts_at_all() {
        let health = ApiHealth::new();
        health.answered(Instant::now());
        health.watch_failed(Source::GpuNodes);
        assert_eq!(health.last(), None);
    }
}
