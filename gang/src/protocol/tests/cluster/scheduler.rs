//! What a scheduler does: it plans, filters and binds, and Bindings end well or not.

use std::collections::BTreeSet;

use gantry_api::{NodeName, PodUid};

use super::{Cluster, End, GANGS, GPUS, NODES};
use crate::protocol::tests::world::{answer, arrival};
use crate::protocol::{Answer, Arrival, BindEnd, Placement, Reservation, Stage};
use crate::protocol::{GangEvent, OfferedNodes};

impl Cluster {
    pub(super) fn plan(&mut self, room: bool, preempt: bool) {
        let Some(wanted) = self.gangs.next(self.now(), self.room) else {
            return;
        };
        self.log.push(format!("{wanted:?}"));
        let reserved: BTreeSet<String> = self.reserved.values().map(|(_, gpu)| gpu.clone()).collect();
        let held = self.held();
        let mut victims: Vec<PodUid> = Vec::new();
        if preempt && wanted.must > 0 {
            let other = self.pods.iter().find(|pod| {
                pod.membership.key != *wanted.gang
                    && !pod.leaving
                    && matches!(pod.stage, Stage::Bound(_))
                    && pod.gpus
            });
            if let Some(gang) = other.map(|pod| pod.membership.key.clone()) {
                let all = self.pods.iter().filter(|pod| pod.membership.key == gang && pod.gpus);
                victims.extend(
                    all.filter(|pod| matches!(pod.stage, Stage::Bound(_)) && !pod.leaving)
                        .map(|pod| PodUid::from(pod.uid.as_str())),
                );
            }
        }
        let mut free = Vec::new();
        for node in (0..NODES).map(|node| format!("n{node}")) {
            let excluded =
                self.lost_nodes.contains(&node) || wanted.without.iter().any(|n| *n.as_str() == *node);
            for gpu in (0..GPUS).map(|gpu| format!("{node}-g{gpu}")) {
                let by_victim =
                    held.get(&gpu).is_some_and(|uid| victims.iter().any(|victim| victim.as_str() == uid));
                let going = self.pods.iter().any(|pod| {
                    let placed = pod.going.as_ref();
                    placed.is_some_and(|placed| placed.devices[0].1[0].as_str() == gpu)
                });
                let open = !held.contains_key(&gpu) && !going || by_victim;
                if !excluded && open && !reserved.contains(&gpu) && !self.lent.contains(&gpu) {
                    free.push((node.clone(), gpu));
                }
            }
        }
        let count = wanted.members.len().min(free.len());
        let spares = if room { wanted.spares.len().min(free.len() - count) } else { 0 };
        let only_spares = wanted.members.is_empty() && spares > 0;
        let enough = count >= wanted.must.max(1) as usize || only_spares;
        let result = if room && enough {
            let spare = wanted.spares.iter().zip(&free[count..]).map(|(member, (node, gpu))| Reservation {
                shape: member.shape,
                node: node.as_str().into(),
                devices: vec![("nvidia.com/gpu".into(), vec![gpu.as_str().into()])],
                rank: None,
                role: member.role.clone(),
                ordinal: None,
                follows: false,
            });
            let places = wanted.members.iter().zip(&free).map(|(member, (node, gpu))| Reservation {
                shape: member.shape,
                node: node.as_str().into(),
                devices: vec![("nvidia.com/gpu".into(), vec![gpu.as_str().into()])],
                rank: member.rank,
                role: member.role.clone(),
                ordinal: None,
                follows: false,
            });
            Ok(Placement {
                places: places.collect(),
                spares: spare.collect(),
                domain: "cluster".into(),
                victims,
                ..Placement::default()
            })
        } else {
            Err(super::super::world::refused())
        };
        self.handle(GangEvent::Planned { gang: &wanted.gang, result });
    }

    pub(super) fn filter(&mut self, at: usize, offered: u8) {
        if self.pods[at].stage != Stage::Pending || self.pods[at].waits || self.pods[at].going.is_some() {
            return;
        }
        let offers = |node: &NodeName| {
            let number: u32 = node.as_str()[1..].parse().unwrap();
            offered & (1 << number) != 0
        };
        let answer =
            answer(self.handle(GangEvent::Filter { pod: &self.uid(at), offered: OfferedNodes(&offers) }));
        self.log.push(format!("{answer:?}"));
        if let Answer::Node(node) = answer {
            assert!(offers(&node), "{node} was not offered");
            self.pods[at].sent = Some(node);
        }
    }

    pub(super) fn bind(&mut self, at: usize) {
        let pod = &self.pods[at];
        if pod.stage != Stage::Pending || pod.going.is_some() {
            return;
        }
        let Some(node) = pod.sent.clone() else { return };
        let arrival = arrival(self.handle(GangEvent::Arrive { pod: &self.uid(at), node: &node }));
        self.log.push(format!("{arrival:?}"));
        self.pods[at].waits = arrival == Arrival::Wait;
        match arrival {
            // The pod that was lent them has them still.
            Arrival::Go(placed) if self.lent.contains(placed.devices[0].1[0].as_str()) => {
                self.handle(GangEvent::BindEnded { pod: &self.uid(at), outcome: BindEnd::Failed });
            }
            Arrival::Go(placed) => {
                let name = GANGS.iter().find(|name| **name == &*placed.gang.name).unwrap();
                let written = self.stored[name].status.decision.as_ref().map(|decision| &*decision.id);
                let view = self.gangs.view(&placed.gang).unwrap();
                let object = &self.stored[name];
                // An object that somebody has deleted is written again from what is known.
                assert!(
                    !object.exists || written == view.decision_id() || self.was_written(view.decision_id()),
                    "{} goes, but {:?} is not written: {written:?}",
                    self.pods[at].uid,
                    view.decision_id(),
                );
                assert_eq!(placed.node, node);
                let decision = object.status.decision.as_ref().filter(|_| object.exists);
                let told = decision.and_then(|decision| {
                    let uid = &*self.pods[at].uid;
                    let slots = decision.reservations.iter();
                    slots.clone().find(|slot| slot.pod.as_ref().is_some_and(|pod| pod.as_str() == uid))
                });
                // Whoever takes over must know of the place, or nobody has it by the object.
                assert!(
                    told.is_none_or(|slot| slot.node == node && slot.devices[0].ids == placed.devices[0].1)
                        && (told.is_some() || decision.is_none()),
                    "{} goes to {node}, and the object says {told:?}",
                    self.pods[at].uid,
                );
                self.pods[at].going = Some(placed);
            }
            Arrival::Refuse(_) => self.pods[at].sent = None,
            Arrival::Wait => {}
            Arrival::Single => assert!(!self.pods[at].gpus, "{} is no single pod", self.pods[at].uid),
        }
    }

    pub(super) fn end_bind(&mut self, at: usize, end: End) {
        let uid = self.uid(at);
        let Some(placed) = self.pods[at].going.take() else {
            return;
        };
        self.pods[at].sent = None;
        let bound = matches!(end, End::Bound | End::UnsureBound);
        if bound {
            self.pods[at].stage = Stage::Bound(placed.node.clone());
            self.pods[at].holds = placed.devices;
            self.held();
        }
        let outcome = match end {
            End::Bound => BindEnd::Bound,
            End::Failed => BindEnd::Failed,
            End::UnsureBound | End::UnsureNot => BindEnd::Unsure,
        };
        self.handle(GangEvent::BindEnded { pod: &uid, outcome });
        if bound {
            self.see(at);
        }
    }
}
