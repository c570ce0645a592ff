//! Decisions and statuses that are written, land late or never, and are read; and processes that take over.

use gantry_api::Decision;

use super::{Cluster, GANGS, Stored, Write};
use crate::key::GangKey;
use crate::protocol::GangEvent;
use crate::protocol::{CommitFailure, Gangs, Object, Settings};

impl Cluster {
    pub(super) fn was_written(&self, id: Option<&str>) -> bool {
        id.is_some_and(|id| self.log.iter().any(|line| line == &format!("written {id}")))
    }

    pub(super) fn commit(&mut self, outcome: Write) {
        if self.commits.is_empty() {
            return;
        }
        let (gang, decision, version) = self.commits.remove(0);
        let result = match outcome {
            Write::Done => {
                if self.write(&gang, &decision, version) {
                    Ok(())
                } else {
                    Err(CommitFailure::Conflict)
                }
            }
            Write::Conflict => {
                // Somebody else has written.
                if let Some(stored) = self.stored.get_mut(&*gang.name) {
                    stored.version += 1;
                }
                Err(CommitFailure::Conflict)
            }
            Write::Refused => Err(CommitFailure::Refused("gangs is forbidden".into())),
            Write::Unknown => {
                self.in_flight.push((gang.clone(), decision.clone(), version));
                Err(CommitFailure::Unknown)
            }
        };
        self.handle(GangEvent::Committed { gang: &gang, decision: &decision.id, result });
    }

    /// Writes a decision if the object is still of that version.
    pub(super) fn write(&mut self, gang: &GangKey, decision: &Decision, version: u64) -> bool {
        let Some(stored) = self.stored.get_mut(&*gang.name) else {
            return false;
        };
        if stored.version != version {
            return false;
        }
        stored.exists = true;
        stored.version += 1;
        stored.status.name = gang.name.to_string();
        stored.status.integration = gang.integration.as_str().to_owned();
        stored.status.decision = Some(decision.clone());
        self.log.push(format!("written {}", decision.id));
        true
    }

    /// Deletes an object. No version comes again, so that no write for the deleted object succeeds.
    pub(super) fn drop_object(&mut self, namespace: &str, name: &str) {
        if let Some(stored) = self.stored.get_mut(name) {
            *stored = Stored { version: stored.version + 1, ..Stored::default() };
        }
        self.handle(GangEvent::ObjectGone { namespace, name });
    }

    pub(super) fn read(&mut self, name: &str) {
        let stored = self.stored[name].clone();
        if stored.exists {
            let object = object(&stored);
            self.handle(GangEvent::ObjectSeen { namespace: "default", name, object: Box::new(object) });
        } else {
            self.handle(GangEvent::ObjectGone { namespace: "default", name });
        }
    }

    pub(super) fn statuses(&mut self) {
        for (gang, status) in self.gangs.take_statuses() {
            self.log.push(format!("{gang} {status:?}"));
            let Some(stored) = self.stored.get_mut(&*gang.name) else {
                continue;
            };
            if let Some(decision) = &status.decision {
                self.log.push(format!("written {}", decision.id));
            }
            stored.exists = true;
            stored.version += 1;
            stored.status = status;
        }
    }

    pub(super) fn restart(&mut self, landed: bool) {
        for (gang, decision, version) in std::mem::take(&mut self.in_flight) {
            if landed {
                self.write(&gang, &decision, version);
            }
        }
        self.commits.clear();
        self.processes += 1;
        self.gangs = Gangs::new(Settings {
            identity: format!("process{}", self.processes).into(),
            max_gangs: self.max_gangs,
            ..Settings::default()
        });
        self.reserved.clear();
        for pod in &mut self.pods {
            pod.waits = false;
            pod.going = None;
            pod.sent = None;
        }
        for name in GANGS {
            if self.stored[name].exists {
                self.read(name);
            }
        }
        for at in 0..self.pods.len() {
            self.see(at);
        }
        assert_eq!(self.gangs.next(self.now(), self.room), None, "nothing is decided before all is known");
        self.handle(GangEvent::Synced);
    }
}

fn object(stored: &Stored) -> Object {
    Object {
        uid: "object".into(),
        resource_version: stored.version.to_string().into(),
        ours: true,
        spec: Ok(gantry_api::GangSpec::default()),
        status: stored.status.clone(),
    }
}
