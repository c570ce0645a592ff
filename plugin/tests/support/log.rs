//! What is told in the log while a test runs: a subscriber that keeps lines, to see how often one comes.

#![allow(dead_code, unreachable_pub, missing_docs)]

use std::sync::{Arc, Mutex, PoisonError};

use tracing::field::{Field, Visit};
use tracing::subscriber::DefaultGuard;
use tracing::{Dispatch, Event, Level, Metadata, Subscriber, span};

/// Keeps the fields of every line from `info` up, each as one text.
#[derive(Debug, Clone, Default)]
pub struct Log(Arc<Mutex<Vec<String>>>);

struct Fields<'a>(&'a mut String);

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        *self.0 += &format!("{field}={value:?} ");
    }
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO
    }

    fn event(&self, event: &Event<'_>) {
        let mut text = String::new();
        event.record(&mut Fields(&mut text));
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(text);
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

/// While it lives the log keeps what is told on this thread.
#[must_use]
pub struct Listening {
    _here: DefaultGuard,
    _besides: Dispatch,
}

impl Log {
    /// Keeps what is told on this thread from now on.
    pub fn listen(&self) -> Listening {
        Listening {
            _here: tracing::subscriber::set_default(self.clone()),
            // With a single subscriber alive, a line that another test's thread comes to first would be asked about there, where nobody
            // listens, and be silent for all.
            _besides: Dispatch::new(Self::default()),
        }
    }

    /// How many of them have `part` in them.
    pub fn of(&self, part: &str) -> usize {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter(|text| text.contains(part)).count()
    }
}
