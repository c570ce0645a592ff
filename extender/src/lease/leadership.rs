//! Whether this process leads, readable from anywhere at no cost. Leading is bounded in time: it ends by itself when nobody extends it.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

/// Calls so far apart are no series.
const SERIES: Duration = Duration::from_secs(15);
/// A series of calls so long is no stray one: kube-scheduler tries again after a second or two.
const INSISTS: Duration = Duration::from_secs(1);
/// Called so shortly ago, a leader is in use.
const IN_USE: Duration = Duration::from_secs(5);
/// Called so shortly ago, a follower asks to be let in: sooner than a leader counts as out of use, so that one that is called as often
/// stays.
const FRESH: Duration = Duration::from_secs(2);

/// Number of a term of leadership, from 1. No two of one process are alike.
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
    /// The last or present term of leadership.
    term: u64,
    /// It leads.
    held: bool,
    /// Until when; for ever without an election.
    until: Option<Instant>,
    /// What was known from before is forgotten, and everything is being read anew.
    entered: bool,
    /// Who leads, as far as is known.
    holder: String,
    /// Why the Lease cannot be read or written.
    trouble: Option<String>,
}

/// When kube-scheduler called.
#[derive(Debug, Default)]
struct Calls {
    first: Option<Instant>,
    last: Option<Instant>,
    /// Those that are not answered yet.
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
    /// Without an election: it leads, from now on and for ever.
    pub fn always() -> Self {
        Self::with(TermState {
            term: 1,
            held: true,
            ..TermState::default()
        })
    }

    /// It follows until [`Self::win`].
    pub fn follower() -> Self {
        Self::with(TermState::default())
    }

    fn with(state: TermState) -> Self {
        Self {
            state: watch::Sender::new(state),
            calls: Mutex::default(),
        }
    }

    /// It leads now, and what it knows is from since then or is being read.
    pub fn leads(&self) -> bool {
        let state = self.state.borrow();
        state.entered && state.is_held(Instant::now())
    }

    /// The term of leadership, if it is in one.
    pub fn term(&self) -> Option<Term> {
        let state = self.state.borrow();
        state.is_held(Instant::now()).then_some(Term(state.term))
    }

    /// How long its term of leadership lasts at least; `None` if it ends never. Nothing if it is in none.
    pub fn lasts(&self) -> Option<Duration> {
        let state = self.state.borrow();
        let now = Instant::now();
        match state.until {
            _ if !state.is_held(now) => Some(Duration::ZERO),
            until => until.map(|until| until.saturating_duration_since(now)),
        }
    }

    /// Why it does not answer, for people.
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

    /// What was known before `term` is forgotten: from now on it leads in earnest.
    pub fn enter(&self, term: Term) {
        self.state.send_if_modified(|state| {
            let enters = state.held && state.term == term.0 && !state.entered;
            state.entered |= enters;
            enters
        });
    }

    /// Waits until the term of leadership is another than `known`: a new one, or none.
    pub async fn changed(&self, known: Option<Term>) -> Option<Term> {
        let mut state = self.state.subscribe();
        loop {
            let until = {
                let state = state.borrow_and_update();
                let now = state.is_held(Instant::now()).then_some(Term(state.term));
                if now != known {
                    return now;
                }
                // One that is over already is waited for no more: somebody has yet to say so.
                state.until.filter(|_| now.is_some())
            };
            tokio::select! {
                // The sender lives as long as `self`.
                _ = state.changed() => {}
                () = sleep_until(until) => {}
            }
        }
    }

    /// Waits until it leads in earnest.
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

    /// kube-scheduler called; what is given back is kept until it is answered.
    pub fn called(&self) -> Call<'_> {
        let now = Instant::now();
        let mut calls = self.calls();
        calls.open += 1;
        let goes_on = calls
            .last
            .is_some_and(|last| now.saturating_duration_since(last) < SERIES);
        if !goes_on {
            calls.first = Some(now);
        }
        calls.last = Some(now);
        Call(self)
    }

    /// kube-scheduler goes on calling, though it is refused.
    pub(super) fn is_called_though_it_follows(&self, now: Instant) -> bool {
        let calls = self.calls();
        calls.first.zip(calls.last).is_some_and(|(first, last)| {
            last.saturating_duration_since(first) >= INSISTS && now.saturating_duration_since(last) < FRESH
        })
    }

    /// kube-scheduler called a moment ago, or is being answered: a Binding that is on its way must not arrive when another leads.
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
        // Whoever called before called a leader.
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
    async fn a_leader_is_called_as_long_as_one_of_its_answers_is_under_way() {
        let leadership = Leadership::always();
        let bind = leadership.called();
        tokio::time::advance(IN_USE * 3).await;
        assert!(leadership.is_called(Instant::now()));
        drop(bind);
        assert!(!leadership.is_called(Instant::now()));
    }
}
