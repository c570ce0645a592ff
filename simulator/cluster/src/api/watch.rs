//! One watch: an endless body of events from a revision on. It reads the store's history, so that a slow client costs
//! nothing. A client that is behind the history gets 410 and lists again.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use hyper::body::{Bytes, Frame};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::kinds::Kind;
use super::objects::Objects;
use super::selector::Selector;
use super::store::Change;
use super::view::Form;
use super::{meta, request::ApiError};

/// What a watch asks for.
#[derive(Debug)]
pub(super) struct Watch {
    pub kind: &'static Kind,
    /// One namespace, or all.
    pub namespace: Option<String>,
    /// Which objects.
    pub selector: Selector,
    /// How they are shown.
    pub form: Form,
    /// The client's revision; `None` begins with the whole state.
    pub from: Option<u64>,
    /// Whether a bookmark closes the state it begins with.
    pub mark_initial: bool,
    /// How often a bookmark is sent, if at all.
    pub bookmarks: Option<Duration>,
    /// When it ends.
    pub timeout: Duration,
}

struct Running {
    ask: Watch,
    objects: Arc<Objects>,
    revisions: watch::Receiver<u64>,
    last: u64,
    queue: VecDeque<Value>,
    ended: bool,
    deadline: Instant,
    next_bookmark: Option<Instant>,
    stop: CancellationToken,
}

/// The body of a watch.
pub(super) fn stream(
    ask: Watch,
    objects: Arc<Objects>,
    stop: CancellationToken,
) -> impl Stream<Item = Result<Frame<Bytes>, Infallible>> + Send {
    let mut running = Running {
        revisions: objects.store.revisions(),
        last: 0,
        queue: VecDeque::new(),
        ended: false,
        deadline: Instant::now() + ask.timeout,
        next_bookmark: ask.bookmarks.map(|every| Instant::now() + every),
        ask,
        objects,
        stop,
    };
    running.begin();
    futures::stream::unfold(running, |mut running| async move {
        let line = running.next().await?;
        Some((Ok(Frame::data(line)), running))
    })
}

impl Running {
    fn begin(&mut self) {
        match self.ask.from {
            Some(from) => self.last = from,
            None => {
                let (objects, revision) =
                    self.objects.store.list(self.ask.kind.storage, self.ask.namespace.as_deref());
                for (_, object) in &objects {
                    if self.ask.selector.matches(object) {
                        self.push("ADDED", object);
                    }
                }
                if self.ask.mark_initial {
                    let bookmark = self.ask.form.bookmark(self.ask.kind, revision, true);
                    self.queue.push_back(json!({"type": "BOOKMARK", "object": bookmark}));
                }
                self.last = revision;
            }
        }
    }

    /// The next event as a line; `None` when the watch is over.
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(event) = self.queue.pop_front() {
                return Some(Bytes::from(format!("{event}\n")));
            }
            if self.ended {
                return None;
            }
            // Mark before reading: a write in between wakes the wait below at once.
            self.revisions.borrow_and_update();
            self.catch_up();
            if !self.queue.is_empty() || self.ended {
                continue;
            }
            let bookmark = self.next_bookmark.unwrap_or(self.deadline);
            tokio::select! {
                changed = self.revisions.changed() => self.ended = changed.is_err(),
                () = sleep_until(bookmark.min(self.deadline)) => self.time_passed(),
                () = self.stop.cancelled() => self.ended = true,
            }
        }
    }

    fn catch_up(&mut self) {
        match self.objects.store.since(self.ask.kind.storage, self.last) {
            Ok((changes, revision)) => {
                for change in &changes {
                    self.show(change);
                }
                self.last = revision;
            }
            Err(gone) => self.fail(&gone),
        }
    }

    fn time_passed(&mut self) {
        let now = Instant::now();
        if let (Some(due), Some(every)) = (self.next_bookmark, self.ask.bookmarks)
            && now >= due
        {
            let bookmark = self.ask.form.bookmark(self.ask.kind, self.last, false);
            self.queue.push_back(json!({"type": "BOOKMARK", "object": bookmark}));
            self.next_bookmark = Some(now + every);
        }
        self.ended = now >= self.deadline;
    }

    /// An object that begins or ceases to be selected is ADDED or DELETED to this watch, whatever happened to it.
    fn show(&mut self, change: &Change) {
        if self.ask.namespace.as_ref().is_some_and(|wanted| change.key.namespace != *wanted) {
            return;
        }
        let was = change.before.as_ref().filter(|before| self.ask.selector.matches(before));
        let is = !change.removed && self.ask.selector.matches(&change.object);
        match (was, is) {
            (None, false) => {}
            (None, true) => self.push("ADDED", &change.object),
            (Some(_), true) => self.push("MODIFIED", &change.object),
            (Some(_), false) if change.removed => self.push("DELETED", &change.object),
            (Some(before), false) => {
                let mut last = Value::clone(before);
                meta::set_text(&mut last, "resourceVersion", change.revision.to_string());
                self.push("DELETED", &last);
            }
        }
    }

    fn push(&mut self, event: &str, object: &Value) {
        let object = self.ask.form.object(self.ask.kind, object);
        self.queue.push_back(json!({"type": event, "object": object}));
    }

    fn fail(&mut self, error: &ApiError) {
        self.queue.push_back(json!({"type": "ERROR", "object": error.status()}));
        self.ended = true;
    }
}
