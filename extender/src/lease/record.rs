//! What the Lease contains, and what to write into it: functions of what was observed and when, by the clock of the
//! reader. The times in the Lease are informative; nothing is decided by them.

use std::time::Duration;

use gantry_api::names::SETTINGS_ANNOTATION;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use tokio::time::Instant;

/// On the Lease: the extender that kube-scheduler calls although another one leads. The leader yields if it gets no
/// calls itself: with addresses like 127.0.0.1 each kube-scheduler calls the extender of its own machine.
const CALLED_ANNOTATION: &str = "gantry.dev/called";

/// The Lease, the identity of this process, and the durations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Namespace of the Lease.
    pub namespace: String,
    /// Name of the Lease.
    pub name: String,
    /// Distinguishes this process from every other one, current or past.
    pub identity: String,
    /// How long after the last renewal another replica may take the Lease.
    pub duration: Duration,
    /// How long a leader that cannot renew keeps leading; less than `duration`.
    pub renew_deadline: Duration,
    /// What the leader publishes on the Lease, as the annotation `gantry.dev/settings`.
    pub published: String,
}

/// The Lease as last read or written.
#[derive(Debug)]
pub(super) struct ObservedLease {
    lease: Lease,
    /// When the last write of its holder was observed.
    since: Instant,
}

/// What a standby replica does.
#[derive(Debug, PartialEq)]
pub(super) enum Intent {
    /// Read it again later.
    Wait,
    /// Write this to lead.
    Take(Lease),
    /// Write this to request the Lease.
    Ask(Lease),
}

/// What a leader does.
#[derive(Debug, PartialEq)]
pub(super) enum Renewal {
    /// Write this to keep leading.
    Renew(Lease),
    /// Stand down, then write this.
    Yield(Lease),
}

impl ObservedLease {
    /// `lease` as read or written now, after `before`.
    pub(super) fn new(lease: Lease, before: Option<Self>, now: Instant) -> Self {
        // A request of another replica changes the object, but is no renewal by its holder.
        let since = match before {
            Some(before) if before.lease.spec == lease.spec => before.since,
            _ => now,
        };
        Self { lease, since }
    }

    /// The holder; empty if there is none.
    pub(super) fn holder(&self) -> &str {
        let spec = self.lease.spec.as_ref();
        spec.and_then(|spec| spec.holder_identity.as_deref()).unwrap_or_default()
    }

    fn duration(&self) -> Option<Duration> {
        let seconds = self.lease.spec.as_ref()?.lease_duration_seconds?;
        u64::try_from(seconds).ok().map(Duration::from_secs)
    }

    fn called(&self) -> Option<&str> {
        let annotations = self.lease.metadata.annotations.as_ref()?;
        annotations.get(CALLED_ANNOTATION).map(String::as_str)
    }
}

impl Settings {
    /// Period of the reads of a standby replica, and pause between two attempts to renew.
    pub(super) fn look_every(&self) -> Duration {
        self.renew_deadline / 8
    }

    /// Period of the renewals.
    pub(super) fn renew_every(&self) -> Duration {
        self.renew_deadline / 4
    }

    /// Time limit of one request: it leaves time for a second one if the connection is dead.
    pub(super) fn attempt(&self) -> Duration {
        self.renew_deadline / 2
    }

    /// A new Lease.
    pub(super) fn fresh(&self) -> Lease {
        Lease {
            metadata: ObjectMeta {
                name: Some(self.name.clone()),
                namespace: Some(self.namespace.clone()),
                annotations: Some([(SETTINGS_ANNOTATION.to_owned(), self.published.clone())].into()),
                ..ObjectMeta::default()
            },
            spec: Some(self.held(&LeaseSpec::default())),
        }
    }

    /// What a standby replica does. `called`: kube-scheduler keeps calling it.
    pub(super) fn intent(&self, seen: &ObservedLease, called: bool, now: Instant) -> Intent {
        let quiet = now.saturating_duration_since(seen.since);
        let duration = seen.duration().unwrap_or(self.duration).max(self.duration);
        let holder = seen.holder();
        // A leader that yields names the next one: the other replicas wait for that one for a while.
        let free = holder.is_empty() && seen.called().is_none_or(|next| next == self.identity);
        if free || holder == self.identity || quiet >= duration {
            Intent::Take(self.kept(seen))
        } else if called && seen.called() != Some(&self.identity) {
            Intent::Ask(self.with(seen, |_| {}, Some(self.identity.clone())))
        } else {
            Intent::Wait
        }
    }

    /// What the leader does. `called`: kube-scheduler calls it.
    pub(super) fn renewal(&self, seen: &ObservedLease, called: bool) -> Renewal {
        match seen.called().filter(|other| *other != self.identity) {
            Some(other) if !called => Renewal::Yield(self.with(seen, released, Some(other.to_owned()))),
            _ => Renewal::Renew(self.kept(seen)),
        }
    }

    /// The Lease, released.
    pub(super) fn released(&self, seen: &ObservedLease) -> Lease {
        self.with(seen, released, None)
    }

    /// The spec of a Lease that this process takes or keeps.
    fn held(&self, before: &LeaseSpec) -> LeaseSpec {
        let now = MicroTime(jiff::Timestamp::now());
        let still = before.holder_identity.as_deref() == Some(&self.identity);
        let transitions = before.lease_transitions.unwrap_or_default();
        let made = before.holder_identity.is_none() && before.lease_transitions.is_none();
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: Some(i32::try_from(self.duration.as_secs()).unwrap_or(i32::MAX)),
            acquire_time: before.acquire_time.clone().filter(|_| still).or(Some(now.clone())),
            renew_time: Some(now),
            lease_transitions: Some(if still || made { transitions } else { transitions.saturating_add(1) }),
            ..before.clone()
        }
    }

    /// The Lease as this process takes or keeps it.
    fn kept(&self, seen: &ObservedLease) -> Lease {
        let mut lease = self.with(seen, |spec| *spec = self.held(spec), None);
        let annotations = lease.metadata.annotations.get_or_insert_default();
        annotations.insert(SETTINGS_ANNOTATION.to_owned(), self.published.clone());
        lease
    }

    /// The Lease as observed, with another spec. Its version makes the write fail if it has changed since.
    fn with(
        &self,
        seen: &ObservedLease,
        change: impl FnOnce(&mut LeaseSpec),
        called: Option<String>,
    ) -> Lease {
        let mut lease = seen.lease.clone();
        change(lease.spec.get_or_insert_default());
        let annotations = lease.metadata.annotations.get_or_insert_default();
        match called {
            Some(called) => annotations.insert(CALLED_ANNOTATION.to_owned(), called),
            None => annotations.remove(CALLED_ANNOTATION),
        };
        lease.metadata.managed_fields = None;
        lease
    }
}

/// Another replica may take it at once.
fn released(spec: &mut LeaseSpec) {
    spec.holder_identity = Some(String::new());
    spec.lease_duration_seconds = Some(1);
    spec.renew_time = Some(MicroTime(jiff::Timestamp::now()));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(identity: &str) -> Settings {
        Settings {
            namespace: "gantry-system".into(),
            name: "gantry-extender".into(),
            identity: identity.into(),
            duration: Duration::from_secs(6),
            renew_deadline: Duration::from_secs(4),
            published: format!("of {identity}"),
        }
    }

    fn after(began: Instant, seconds: u64) -> Instant {
        began + Duration::from_secs(seconds)
    }

    #[test]
    fn lease_is_taken_after_its_duration_by_the_own_clock() {
        let began = Instant::now();
        let (a, b) = (settings("a"), settings("b"));
        let mut lease = a.fresh();
        // Its clock is hours ahead: that is nothing to us.
        let ahead = jiff::Timestamp::now() + jiff::SignedDuration::from_hours(5);
        lease.spec.as_mut().unwrap().renew_time = Some(MicroTime(ahead));
        let seen = ObservedLease::new(lease.clone(), None, began);
        assert_eq!(b.intent(&seen, false, after(began, 5)), Intent::Wait);
        // A question of a third is no sign of life.
        let mut asked = lease.clone();
        asked.metadata.resource_version = Some("2".into());
        let seen = ObservedLease::new(asked, Some(seen), after(began, 3));
        let Intent::Take(taken) = b.intent(&seen, false, after(began, 6)) else {
            panic!("it is free");
        };
        let spec = taken.spec.unwrap();
        assert_eq!(spec.holder_identity.as_deref(), Some("b"));
        assert_eq!(spec.lease_transitions, Some(1));
        assert_eq!(taken.metadata.resource_version.as_deref(), Some("2"));
        // A renewal is.
        let mut renewed = lease;
        renewed.spec.as_mut().unwrap().renew_time = Some(MicroTime(jiff::Timestamp::now()));
        let seen = ObservedLease::new(renewed, Some(seen), after(began, 5));
        assert_eq!(b.intent(&seen, false, after(began, 6)), Intent::Wait);
    }

    #[test]
    fn only_the_leader_publishes_its_settings() {
        let began = Instant::now();
        let (a, b) = (settings("a"), settings("b"));
        let published =
            |lease: &Lease| lease.metadata.annotations.as_ref().unwrap()[SETTINGS_ANNOTATION].clone();
        let seen = ObservedLease::new(a.fresh(), None, began);
        assert_eq!(published(&seen.lease), "of a");
        let Intent::Ask(asked) = b.intent(&seen, true, began) else {
            panic!("it is called");
        };
        assert_eq!(published(&asked), "of a", "another leads");
        let Intent::Take(taken) = b.intent(&seen, false, after(began, 6)) else {
            panic!("it is free");
        };
        assert_eq!(published(&taken), "of b");
        // Of an older release, which publishes nothing.
        let mut bare = a.fresh();
        bare.metadata.annotations = None;
        let Renewal::Renew(renewed) = a.renewal(&ObservedLease::new(bare, None, began), false) else {
            panic!("it leads");
        };
        assert_eq!(published(&renewed), "of a");
    }

    #[test]
    fn a_holder_that_asks_for_a_longer_lease_is_waited_for() {
        let began = Instant::now();
        let slow = Settings { duration: Duration::from_secs(60), ..settings("a") };
        let seen = ObservedLease::new(slow.fresh(), None, began);
        assert_eq!(settings("b").intent(&seen, false, after(began, 59)), Intent::Wait);
        let taken = settings("b").intent(&seen, false, after(began, 60));
        assert!(matches!(taken, Intent::Take(_)));
    }

    #[test]
    fn leadership_goes_where_kube_scheduler_calls() {
        let began = Instant::now();
        let (a, b, c) = (settings("a"), settings("b"), settings("c"));
        let seen = ObservedLease::new(a.fresh(), None, began);
        assert_eq!(b.intent(&seen, false, began), Intent::Wait);
        let Intent::Ask(asked) = b.intent(&seen, true, began) else {
            panic!("it is called");
        };
        let asked = ObservedLease::new(asked, Some(seen), began);
        assert_eq!(asked.holder(), "a");
        assert_eq!(b.intent(&asked, true, began), Intent::Wait, "it asks once");
        // The leader is called too: it stays, and the question is answered.
        let Renewal::Renew(renewed) = a.renewal(&asked, true) else {
            panic!("it is called itself");
        };
        assert_eq!(ObservedLease::new(renewed, None, began).called(), None);
        let Renewal::Yield(yielded) = a.renewal(&asked, false) else {
            panic!("it is not called");
        };
        let yielded = ObservedLease::new(yielded, Some(asked), began);
        assert_eq!(a.intent(&yielded, false, began), Intent::Wait, "it is for b");
        assert_eq!(c.intent(&yielded, false, began), Intent::Wait, "it is for b");
        let Intent::Take(taken) = b.intent(&yielded, true, began) else {
            panic!("it is for b");
        };
        assert_eq!(ObservedLease::new(taken, None, began).called(), None);
        // If b has died meanwhile, the others do not wait for it for ever.
        assert!(matches!(c.intent(&yielded, false, after(began, 6)), Intent::Take(_)));
    }
}
