//! Pods of the cluster: made, seen, deleted and ended.

use std::collections::{BTreeMap, BTreeSet};

use gantry_api::PodUid;

use super::super::world::{member, membership, with_rank, with_repair};
use super::{Cluster, GANGS, Pod};
use crate::protocol::GangEvent;
use crate::protocol::{BindEnd, Member, Stage};

impl Cluster {
    pub(super) fn ended(&self, at: usize) -> bool {
        matches!(self.pods[at].stage, Stage::Succeeded | Stage::Failed)
    }

    pub(super) fn create(&mut self, gang: usize, gated: bool, gpus: bool) {
        let name = GANGS[gang];
        let of_gang = self.pods.iter().filter(|pod| *pod.membership.key.name == *name);
        if of_gang.clone().count() >= 6 {
            return;
        }
        let mut membership = with_repair(membership(name, self.mins[gang]), self.repairs[gang]);
        membership.options.spares = Some(self.spares[gang]);
        if self.ranked[gang] {
            let taken: BTreeSet<u32> = of_gang
                .filter(|pod| !matches!(pod.stage, Stage::Failed))
                .filter_map(|pod| pod.membership.rank)
                .collect();
            let rank = (0..).find(|rank| !taken.contains(rank)).unwrap();
            membership = with_rank(membership, rank);
        }
        self.made += 1;
        self.pods.push(Pod {
            uid: format!("{name}{}", self.made),
            membership,
            gpus,
            stage: if gated { Stage::Gated { by: None } } else { Stage::Pending },
            leaving: false,
            holds: Vec::new(),
            sent: None,
            waits: false,
            going: None,
        });
        self.see(self.pods.len() - 1);
    }

    fn member(&self, at: usize) -> Member {
        let pod = &self.pods[at];
        let mut member = member(&pod.uid, pod.membership.clone());
        member.stage = pod.stage.clone();
        member.leaving = pod.leaving;
        member.holds = pod.holds.clone();
        member.created = 1_000 + i64::try_from(at).unwrap();
        if !pod.gpus {
            member.shape = None;
            member.asks = [].into();
        }
        member
    }

    pub(super) fn see(&mut self, at: usize) {
        self.handle(GangEvent::MemberSeen(self.member(at)));
    }

    pub(super) fn delete(&mut self, at: usize) {
        if matches!(self.pods[at].stage, Stage::Bound(_)) {
            self.pods[at].leaving = true;
            self.see(at);
        } else {
            self.remove(at);
        }
    }

    pub(super) fn remove(&mut self, at: usize) {
        let pod = self.pods.remove(at);
        let uid: PodUid = pod.uid.as_str().into();
        if pod.going.is_some() {
            self.handle(GangEvent::BindEnded { pod: &uid, outcome: BindEnd::Gone });
        }
        self.handle(GangEvent::MemberGone { pod: &uid });
        self.handle(GangEvent::VictimGone { pod: &uid });
        self.room += 1;
    }

    pub(super) fn end(&mut self, at: usize, stage: Stage) {
        if matches!(self.pods[at].stage, Stage::Bound(_)) {
            self.pods[at].stage = stage;
            self.pods[at].holds.clear();
            self.see(at);
            let uid = self.uid(at);
            self.handle(GangEvent::VictimGone { pod: &uid });
            self.room += 1;
        }
    }

    /// Devices that pods hold.
    pub(super) fn held(&self) -> BTreeMap<String, String> {
        let mut held = BTreeMap::new();
        for pod in &self.pods {
            for id in pod.holds.iter().flat_map(|(_, ids)| ids) {
                let before = held.insert(id.to_string(), pod.uid.clone());
                assert_eq!(before, None, "GPU {id} is granted twice: to {} too", pod.uid);
            }
        }
        held
    }
}
