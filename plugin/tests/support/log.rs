//! Captures log lines of a test, to count how often one appears.

#![allow(dead_code, unreachable_pub, missing_docs)]

use std::sync::{Arc, Mutex, PoisonError};

use tracing::field::{Field, Visit};
use tracing::subscriber::DefaultGuard;
use tracing::{Dispatch, Event, Level, Metadata, Subscriber, span};

/// Captures every line from `info` up, as one text each.
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

/// While it lives, log lines of this thread are captured.
#[must_use]
pub struct Listening {
    _here: DefaultGuard,
    _besides: Dispatch,
}

impl Log {
    /// Starts to capture log lines of this thread.
    pub fn listen(&self) -> Listening {
        Listening {
            _here: tracing::subscriber::set_default(self.clone()),
            // With only one subscriber alive, a line that another thread logs first would be cached as disabled for all
            // threads.
            _besides: Dispatch::new(Self::default()),
        }
    }

    /// Number of lines that contain `part`.
    pub fn of(&self, part: &str) -> usize {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter(|text| text.contains(part)).count()
    }
}
