//! What must hold at any time, once all has settled, and when all pods are gone.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gantry_api::GangPhase;

use super::{Cluster, End, GANGS, GPUS, NODES, Op, Write};
use crate::key::GangKey;
use crate::protocol::Stage;

impl Cluster {
    /// What must hold at any time.
    pub(super) fn check(&self) {
        let held = self.held();
        let mut gpus: BTreeMap<&str, &(Arc<GangKey>, u32)> = BTreeMap::new();
        for (id, (_, gpu)) in &self.reserved {
            let other = gpus.insert(gpu, id);
            assert_eq!(other, None, "GPU {gpu} is in two slots, one of them {id:?}");
        }
        for view in self.gangs.views() {
            let mut pods = BTreeSet::new();
            let spares = view.slots().filter(|slot| slot.spare && slot.pod.is_none()).count();
            let gang = GANGS.iter().position(|name| **name == *view.key().name).unwrap();
            assert!(spares <= self.spares[gang] as usize, "{} has {spares} spare slots", view.key());
            for slot in view.slots() {
                let Some(pod) = slot.pod else { continue };
                assert!(pods.insert(pod), "{pod} has two slots");
                let gpu = slot.devices[0].1[0].as_str();
                if let Some(holder) = held.get(gpu) {
                    let own = holder == pod.as_str();
                    let victim = view.phase() == GangPhase::Preempting
                        || self.pods.iter().any(|pod| pod.uid == *holder && pod.leaving);
                    assert!(own || victim, "{gpu} of {pod} is held by {holder}");
                }
            }
            let decided = view.is_decided();
            let bound_by_us =
                self.pods.iter().any(|pod| pod.going.is_some() && pod.membership.key == **view.key());
            let restarting = view.phase() == GangPhase::Degraded || view.phase() == GangPhase::Finished;
            assert!(decided || !bound_by_us || restarting, "{} goes, undecided", view.key());
        }
        for (gang, _) in self.reserved.keys() {
            assert!(self.gangs.view(gang).is_some(), "{gang} is gone and has slots");
        }
    }

    /// From here on nothing fails, and every gang gets room in turn: gangs that have enough members must get bound.
    pub(crate) fn settle(&mut self) {
        self.lost_nodes.clear();
        self.lent.clear();
        while let Some(at) = (0..self.pods.len()).find(|at| self.pods[*at].leaving || self.failed(*at)) {
            self.remove(at);
            self.collect();
        }
        for _ in 0..60 {
            for _ in 0..4 {
                self.room += 1;
                self.step(&Op::Plan { room: true, preempt: false });
            }
            for at in 0..self.pods.len() {
                if at >= self.pods.len() {
                    break;
                }
                self.step(&Op::Filter { pod: at, offered: 0xff });
                self.step(&Op::Bind(at));
            }
            while !self.commits.is_empty() {
                self.step(&Op::Commit(Write::Done));
            }
            for gang in 0..3 {
                self.step(&Op::Read(gang));
            }
            while !self.in_flight.is_empty() {
                self.step(&Op::Land(0));
            }
            for at in 0..self.pods.len() {
                self.step(&Op::Bind(at));
                self.step(&Op::EndBind { pod: at, end: End::Bound });
            }
            self.step(&Op::Statuses);
            while let Some(at) = (0..self.pods.len()).find(|at| self.pods[*at].leaving) {
                self.step(&Op::Remove(at));
            }
            self.step(&Op::Pass(10));
        }
    }

    fn failed(&self, at: usize) -> bool {
        self.pods[at].stage == Stage::Failed
    }

    /// Gangs have what they need, or it is not there.
    pub(crate) fn check_settled(&self) {
        for view in self.gangs.views() {
            let gang = GANGS.iter().position(|name| **name == *view.key().name).unwrap();
            let free = NODES * GPUS - self.held().len() - self.reserved.len();
            // Nobody here binds members that ask for no devices.
            let needs_none = view.phase() == GangPhase::Binding && !view.is_decided();
            let done = needs_none || matches!(view.phase(), GangPhase::Bound | GangPhase::Finished);
            let short = view.exist() < self.mins[gang];
            let no_room = free < view.unplaced();
            let over_limit =
                view.phase() == GangPhase::Invalid && self.gangs.views().count() > self.max_gangs;
            assert!(
                done || short || no_room || over_limit,
                "{} is stuck: {:?}, {} ({} of {}), {free} GPUs are free",
                view.key(),
                view.phase(),
                view.waits().message,
                view.settled(),
                view.min(),
            );
        }
    }

    /// All pods go, and time passes: nothing may be left.
    pub(crate) fn clear(&mut self) {
        while !self.pods.is_empty() {
            self.remove(0);
            self.collect();
        }
        for _ in 0..40 {
            self.step(&Op::Pass(30));
        }
        assert_eq!(self.reserved, BTreeMap::new());
        self.gangs.assert_empty();
    }

    pub(crate) fn compare(&mut self, other: &mut Self) {
        self.statuses();
        other.statuses();
        assert_eq!(self.log, other.log);
    }
}
