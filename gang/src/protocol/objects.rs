//! Objects come in: what a person wants of a gang, what another process decided. Finds the gang; what it makes of that is its own affair.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Instant;

use gantry_api::{DeviceId, NodeName};

use super::Gangs;
use super::gang::{Env, Expects, Gang};
use super::recovery::Known;
use super::standing::after;
use super::types::{Now, Object, Work};
use crate::key::GangKey;
use crate::terms::Fault;

/// Namespace and name of an object.
pub(super) type ObjectName = (Arc<str>, Arc<str>);

impl Gangs {
    /// A `Gang` object, as it is now.
    pub fn object_seen(&mut self, now: Now, namespace: &str, name: &str, object: Object) {
        self.clock = Some(now);
        let name: ObjectName = (namespace.into(), name.into());
        let known = Known::new(&name.0, object);
        if let Some(of) = known.of.clone().filter(|of| known.has_decided(of)) {
            // Its pods may be among those that are one too many, but what is decided is brought to its end.
            self.beyond.may_have_room(&Arc::new(of));
        }
        self.objects.insert(name.clone(), known);
        self.follow_object(now, &name);
        self.note_stray(&name, after(now.at, self.settings.linger));
    }

    /// There is no such object any more.
    pub fn object_gone(&mut self, now: Now, namespace: &str, name: &str) {
        self.clock = Some(now);
        let name: ObjectName = (namespace.into(), name.into());
        self.objects.remove(&name);
        self.strays.remove(&name);
        for key in self.named.get(&name).cloned().unwrap_or_default() {
            self.with(now, &key, |gang, env| {
                gang.told.forget();
                gang.not_committed_if_asked(env);
            });
        }
        self.follow_object(now, &name);
    }

    /// Lets the gangs of one object name follow it: one of them has it, the others are told that they cannot.
    pub(super) fn follow_object(&mut self, now: Now, name: &ObjectName) {
        let keys = self.named.get(name).cloned().unwrap_or_default();
        let known = self.objects.get(name).cloned();
        let of_status = known
            .as_ref()
            .and_then(|known| keys.iter().find(|key| known.is_about(key)).cloned());
        let has_it = of_status.or_else(|| keys.first().cloned());
        for key in keys {
            if Some(&key) != has_it.as_ref() {
                if let Some(gang) = self.gangs.get_mut(&key) {
                    gang.reagree = true;
                    gang.object_fault = has_it.as_ref().map(|other| Fault {
                        place: format!("Gang {}", name.1).into(),
                        words: format!(
                            "its name is that of gang {other} ({}); give one of them another name",
                            other.integration
                        )
                        .into(),
                    });
                }
            } else {
                if let Some(gang) = self.gangs.get_mut(&key) {
                    gang.reagree = true;
                    gang.follow_spec(known.as_ref());
                }
                // What is to be agreed on comes first: a decision is taken up by its terms.
                self.agree_on(&key);
                if let Some(known) = &known {
                    self.follow_decision(now, &key, known);
                }
            }
            self.finish(now, &key);
        }
    }

    fn follow_decision(&mut self, now: Now, key: &Arc<GangKey>, known: &Known) {
        let Some(gang) = self.gangs.get_mut(key) else {
            return;
        };
        let taken = &self.taken;
        let free = |node: &NodeName, device: &DeviceId| {
            let holder = taken.get(node).and_then(|devices| devices.get(device));
            holder.is_none_or(|holder| holder == key)
        };
        let mut env = Env {
            now,
            settings: &self.settings,
            synced: self.synced,
            taken: &self.taken,
            decisions: &mut self.decisions,
            work: &mut self.work,
        };
        gang.follow_decision(&mut env, known, &free);
    }

    /// Every list was complete once: from here on decisions may be made. Decisions of the process before are taken up.
    pub fn synced(&mut self, now: Now) {
        self.clock = Some(now);
        if self.synced {
            return;
        }
        // Before anything is planned: a decision keeps its places only once its gang is there.
        while self.let_in(now) {}
        self.synced = true;
        // The youngest first: of a place that two of them name the older one had let go, or the younger had not been made, and could not
        // say so any more.
        let mut names: Vec<_> = self.named.keys().cloned().collect();
        names.sort_by_key(|name| Reverse(self.objects.get(name).and_then(Known::made_at)));
        for name in names {
            self.follow_object(now, &name);
        }
        for name in self.objects.keys().cloned().collect::<Vec<_>>() {
            self.note_stray(&name, now.at);
        }
        self.drop_strays(now);
    }
}

impl Gangs {
    /// An object of ours that is no gang's goes at that time: its gang was over before its status was written, or its removal was lost.
    pub(super) fn note_stray(&mut self, name: &ObjectName, due: Instant) {
        let ours = self.objects.get(name).is_some_and(|known| known.ours);
        if ours && !self.named.contains_key(name) {
            let stray = self.strays.entry(name.clone()).or_insert(due);
            *stray = due.min(*stray);
        } else {
            self.strays.remove(name);
        }
    }

    /// Has objects removed that are nobody's. One that is still there later is asked for again.
    pub(super) fn drop_strays(&mut self, now: Now) {
        if !self.synced {
            return;
        }
        let due: Vec<ObjectName> = self
            .strays
            .iter()
            .filter(|(_, due)| **due <= now.at)
            .map(|(name, _)| name.clone())
            .collect();
        for name in due {
            self.strays.remove(&name);
            self.note_stray(&name, after(now.at, self.settings.linger.saturating_mul(6)));
            if self.strays.contains_key(&name) {
                let (namespace, name) = name;
                self.work.push(Work::DeleteObject { namespace, name });
            }
        }
    }
}

impl Gang {
    fn not_committed_if_asked(&mut self, env: &mut Env<'_>) {
        if self.expects() == Some(Expects::Object) {
            self.not_committed(env);
        }
    }
}
