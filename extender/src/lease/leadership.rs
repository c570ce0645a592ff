//! Whether this process leads, cheap to read from every task. A term is bounded in time: it ends unless it is extended.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

/// Calls further apart belong to different series.
const SERIES: Duration = Duration::from_secs(15);
/// Shortest series of calls that counts: kube-scheduler retries after a second or two.
const INSISTS: Duration = Duration::from_secs(1);
/// How long a leader counts as in use after a call.
const IN_USE: Duration = Duration::from_secs(5);
/// How long a standby replica requests the Lease after a call: shorter than a leader counts as in use, so that a leader
/// which is called as often stays.
const FRESH: Duration = Duration::from_secs(2);

/// Number of a term of leadership, from 1, unique in one process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Term(pub u64);

/// Whether this process leads.
#[derive(Debug)]
pub struct Leadership {
    state: watch::Sender<TermState>,
    calls: Mutex<Calls>,
}

#[derive(Debug, Clone, Default)]
struct TermState {
    /// The current or last term of leadership.
    term: u64,
    /// The term is current.
    held: bool,
    /// End of the term; `None` without an election.
    until: Option<Instant>,
    /// Facts from before the term are discarded, and everything is being listed again.
    entered: bool,
    /// The leader, if known.
    holder: String,
    /// Why the Lease cannot be read or written.
    trouble: Option<String>,
}

/// When kube-scheduler called.
#[derive(Debug, Default)]
struct Calls {
    first: Option<Instant>,
    last: Option<Instant>,
    /// Calls that are not answered yet.
    open: usize,
}

/// A call of kube-scheduler that is being answered, until it is dropped.
#[must_use]
#[derive(Debug)]
pub struct Call<'a>(&'a Leadership);

impl Drop for Call<'_> {
    fn drop(&mut self) {
        let mut calls = self.0.calls();
        calls.open = calls.open.saturating_sub(1);
    }
}

impl Leadership {
    /// Without an election: this process leads from now on.
    pub fn always() -> Self {
        Self::with(TermState { term: 1, held: true, ..TermState::default() })
    }

    /// A standby replica until [`Self::win`].
    pub fn follower() -> Self {
        Self::with(TermState::default())
    }

    fn with(state: TermState) -> Self {
        Self { state: watch::Sender::new(state), calls: Mutex::default() }
    }

    /// Whether this process leads, with facts from this term.
    pub fn leads(&self) -> bool {
        let state = self.state.borrow();
        state.entered && state.is_held(Instant::now())
    }

    /// The current term of leadership.
    pub fn term(&self) -> Option<Term> {
        let state = self.state.borrow();
        state.is_held(Instant::now()).then_some(Term(state.term))
    }

    /// How long the current term lasts at least; `None` without an end, zero without a term.
    pub fn lasts(&self) -> Option<Duration> {
        let state = self.state.borrow();
        let now = Instant::now();
        match state.until {
            _ if !state.is_held(now) => Some(Duration::ZERO),
            until => until.map(|until| until.saturating_duration_since(now)),
        }
    }

    /// Why this process does not answer, for messages.
    pub fn why_not(&self) -> String {
        let state = self.state.borrow();
        if let Some(trouble) = &state.trouble {
            return trouble.clone();
        }
        match state.holder.as_str() {
            "" => "no extender leads yet; try again".to_owned(),
            holder => format!("this extender does not lead, {holder} does"),
        }
    }

    /// Facts from before `term` are discarded: from now on this process decides.
    pub fn enter(&self, term: Term) {
        self.state.send_if_modified(|state| {
            let enters = state.held && state.term == term.0 && !state.entered;
            state.entered |= enters;
            enters
        });
    }

    /// Waits until the current term is another than `known`: a new one, or none.
    pub async fn changed(&self, known: Option<Term>) -> Option<Term> {
        let mut state = self.state.subscribe();
        loop {
            let until = {
                let state = state.borrow_and_update();
                let now = state.is_held(Instant::now()).then_some(Term(state.term));
                if now != known {
                    return now;
                }
                // The end of a term that is over already is not waited for: it only has to be recorded.
                state.until.filter(|_| now.is_some())
            };
            tokio::select! {
                // The sender lives as long as `self`.
                _ = state.changed() => {}
                () = sleep_until(until) => {}
            }
        }
    }

    /// Waits until this process decides.
    pub async fn entered(&self) -> Term {
        let mut state = self.state.subscribe();
        loop {
            {
                let state = state.borrow_and_update();
                if state.entered && state.is_held(Instant::now()) {
                    return Term(state.term);
                }
            }
            let _ = state.changed().await;
        }
    }

    /// Waits until `term` is over.
    pub async fn ended(&self, term: Term) {
        self.changed(Some(term)).await;
    }

    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// kube-scheduler called; the returned value is kept until the answer is sent.
    pub fn called(&self) -> Call<'_> {
        let now = Instant::now();
        let mut calls = self.calls();
        calls.open += 1;
        let goes_on = calls.last.is_some_and(|last| now.saturating_duration_since(last) < SERIES);
        if !goes_on {
            calls.first = Some(now);
        }
        calls.last = Some(now);
        Call(self)
    }

    /// Whether kube-scheduler keeps calling although it is refused.
    pub(super) fn is_called_though_it_follows(&self, now: Instant) -> bool {
        let calls = self.calls();
        calls.first.zip(calls.last).is_some_and(|(first, last)| {
            last.saturating_duration_since(first) >= INSISTS && now.saturating_duration_since(last) < FRESH
        })
    }

    /// Whether kube-scheduler called recently or waits for an answer: a Binding in flight must not arrive under another
    /// leader.
    pub(super) fn is_called(&self, now: Instant) -> bool {
        let calls = self.calls();
        let lately = |last| now.saturating_duration_since(last) < IN_USE;
        calls.open > 0 || calls.last.is_some_and(lately)
    }

    pub(crate) fn win(&self, identity: &str, until: Instant) {
        self.state.send_modify(|state| {
            *state = TermState {
                term: state.term + 1,
                held: true,
                until: Some(until),
                entered: false,
                holder: identity.to_owned(),
                trouble: None,
            };
        });
    }

    pub(super) fn extend(&self, until: Instant) {
        self.state.send_modify(|state| {
            state.until = Some(until);
            state.trouble = None;
        });
    }

    /// Stands down: nothing is answered or written from here on.
    pub(crate) fn lose(&self, holder: String) {
        self.state.send_modify(|state| {
            state.held = false;
            state.entered = false;
            state.until = None;
            state.holder = holder;
        });
        // Earlier calls went to a leader.
        let mut calls = self.calls();
        (calls.first, calls.last) = (None, None);
    }

    pub(super) fn follow(&self, holder: &str) {
        self.state.send_if_modified(|state| {
            let news = state.holder != holder || state.trouble.is_some();
            if news {
                state.holder = holder.to_owned();
                state.trouble = None;
            }
            news
        });
    }

    pub(super) fn trouble(&self, trouble: String) {
        self.state.send_modify(|state| state.trouble = Some(trouble));
    }
}

impl TermState {
    fn is_held(&self, now: Instant) -> bool {
        self.held && self.until.is_none_or(|until| now < until)
    }
}

async fn sleep_until(until: Option<Instant>) {
    match until {
        Some(until) => tokio::time::sleep_until(until).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn leader_is_in_use_while_an_answer_is_pending() {
        let leadership = Leadership::always();
        let bind = leadership.called();
        tokio::time::advance(IN_USE * 3).await;
        assert!(leadership.is_called(Instant::now()));
        drop(bind);
        assert!(!leadership.is_called(Instant::now()));
    }
}
