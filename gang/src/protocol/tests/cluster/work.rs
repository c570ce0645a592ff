//! What the state machine wants done, and which places it takes.

use gantry_api::{NodeName, PodUid};

use super::Cluster;
use crate::protocol::{SlotChange, Stage, Work};

impl Cluster {
    /// Does what is to be done, but for what a step does.
    pub(super) fn collect(&mut self) {
        for work in std::mem::take(&mut self.effects.work) {
            self.log.push(format!("{work:?}"));
            match work {
                Work::Commit { gang, decision } => {
                    let view = self.gangs.view(&gang).unwrap();
                    let resent = self.in_flight.iter().any(|(_, other, _)| other.id == decision.id);
                    let enough = view.ready() >= decision.min;
                    assert!(enough || resent || self.was_sent(&decision.id), "{gang} is decided too early");
                    self.log.push(format!("sent {}", decision.id));
                    let version = self.stored[&*gang.name].version;
                    self.commits.push((gang, decision, version));
                }
                Work::Ungate(pods) => {
                    for uid in pods {
                        let found = self.pods.iter().position(|pod| *pod.uid == *uid.as_str());
                        if let Some(at) = found {
                            self.pods[at].stage = Stage::Pending;
                            self.see(at);
                        }
                    }
                }
                Work::Evict { pods, .. } | Work::EvictRest { pods, .. } | Work::Delete { pods, .. } => {
                    for uid in pods {
                        let found = self.pods.iter().position(|pod| *pod.uid == *uid.as_str());
                        if let Some(at) = found {
                            self.delete(at);
                        } else if let Some(gpu) = uid.as_str().strip_prefix("borrower-") {
                            assert!(self.lent.contains(gpu), "{gpu} is not lent");
                        }
                    }
                }
                Work::DeleteObject { namespace, name } => self.drop_object(&namespace, &name),
                Work::Activate(_) => {}
                Work::Bind(pods) => {
                    for uid in pods {
                        let node = self.place_of(&uid).expect("a place");
                        let at = self.pods.iter().position(|pod| *pod.uid == *uid.as_str());
                        let at = at.expect("a pod");
                        self.pods[at].sent = Some(node);
                        self.bind(at);
                    }
                }
            }
        }
        for change in std::mem::take(&mut self.effects.slot_changes) {
            self.apply(&change);
        }
    }

    fn place_of(&self, uid: &PodUid) -> Option<NodeName> {
        let view = self.gangs.view(self.gangs.gang_of(uid)?)?;
        view.node_of(uid).cloned()
    }

    fn was_sent(&self, id: &str) -> bool {
        self.log.iter().any(|line| line == &format!("sent {id}"))
    }

    fn apply(&mut self, change: &SlotChange) {
        let id = (change.gang.clone(), change.slot);
        match &change.place {
            Some(place) => {
                let gpu = place.devices[0].1[0].to_string();
                self.reserved.insert(id, (place.node.clone(), gpu));
            }
            None => {
                self.reserved.remove(&id);
                self.room += u64::from(!change.bound);
            }
        }
    }
}
