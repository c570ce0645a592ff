//! Preemption: who may be stopped, for whom, and how often; and that what comes free is for whom it was freed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gantry_api::{NodeName, PodUid};
use gantry_extender::index::MemberStage;

use crate::api::Pod;
use crate::coverage::Played;
use crate::world::World;

/// More evictions in one schedule are a storm.
const STORM: u32 = 30;
/// Milliseconds between evictions of pods that bypass the scheduler and take the same devices again. The extender evicts them as often as
/// its back-off allows.
const RETAKEN: u64 = 20_000;

/// What is left of a gang.
struct Left {
    priority: i32,
    bound: usize,
    /// Bound, or ended well.
    settled: usize,
    min: usize,
}

/// What was stopped for others.
#[derive(Debug, Default)]
pub(crate) struct Evictions {
    count: u32,
    /// Those of pods that bypass the scheduler.
    retaken: u32,
    /// Pods, and until when a budget spares each that the extenders have not heard of.
    spared: BTreeMap<String, u64>,
}

impl World {
    /// An extender has pods evicted for a gang: of lower priority, gangs as a whole or members beyond their minimum, and only pods that
    /// make room where the gang goes.
    pub(crate) fn check_victims(&mut self, run: u32, victims: &[PodUid], by: &str) {
        self.played(Played::GangPreempts);
        self.note(format_args!("{run} has {victims:?} go for gang {by}"));
        let Some(job) = self.jobs.of_gang(by) else {
            return;
        };
        let is_victim = |pod: &Pod| victims.iter().any(|uid| uid.as_str() == pod.uid);
        let pods: Vec<&Arc<Pod>> = self.api.pods.values().filter(|pod| is_victim(pod)).collect();
        let mut wrong = Vec::new();
        if !job.preempts {
            wrong.push(format!("gang {by} may have nobody stopped, and {victims:?} are"));
        }
        if let Some(pod) = pods.iter().find(|pod| pod.priority >= job.priority) {
            wrong.push(format!("pod {} is stopped for gang {by}, of no higher priority", pod.uid));
        }
        let jobs: BTreeSet<usize> = pods.iter().filter(|pod| pod.gang.is_some()).map(|pod| pod.job).collect();
        let mut surplus = false;
        for victim in jobs.iter().map(|job| &self.jobs.all[*job]) {
            let Some(left) = self.left_of(run, &victim.gang, victims) else { continue };
            if left.priority >= job.priority {
                wrong.push(format!("gang {} is stopped for gang {by}, of no higher priority", victim.name));
            }
            let (bound, settled, min) = (left.bound, left.settled, left.min);
            if bound > 0 && settled < min {
                let name = &victim.name;
                wrong.push(format!("{settled} of {min} members of gang {name} are left by gang {by}"));
            }
            surplus |= bound > 0;
        }
        // Each single pod and each gang has to be in the way somewhere.
        let reserved = self.extenders.running.get(&run).and_then(|process| process.view(by));
        let reserved = reserved.iter().flat_map(|view| &view.places);
        let nodes: BTreeSet<&str> = reserved.map(|place| place.node.as_str()).collect();
        let is_used = |node: Option<&str>| node.is_some_and(|node| nodes.contains(node));
        // A bind may have been answered or not: until that is known its devices are taken.
        let node_of = |pod: &Pod| match &pod.node {
            Some(node) => Some(node.clone()),
            None => self.extenders.bind_node(run, &pod.uid).map(ToString::to_string),
        };
        // Some of a gang may be gone already, and the process does not know it yet.
        let is_gang_used = |gang: &str| {
            let view = self.extenders.running.get(&run).and_then(|process| process.view(gang));
            let mut members = view.iter().flat_map(|view| &view.members);
            members.any(|member| {
                victims.contains(&member.uid) && is_used(member.node.as_ref().map(NodeName::as_str))
            })
        };
        let needless = pods.iter().find(|pod| match &pod.gang {
            None => !is_used(node_of(pod).as_deref()),
            Some(claim) => !is_gang_used(&claim.gang),
        });
        if let Some(pod) = needless.filter(|_| !nodes.is_empty()) {
            wrong.push(format!("pod {} is stopped for gang {by}, which goes to {nodes:?}", pod.uid));
        }
        if surplus {
            self.played(Played::SurplusEvicted);
        }
        for wrong in wrong {
            self.wrong(wrong);
        }
    }

    /// What an extender believes to be left of a gang once some pods are gone, and those that it has evicted before.
    fn left_of(&self, run: u32, gang: &str, victims: &[PodUid]) -> Option<Left> {
        let process = self.extenders.running.get(&run)?;
        let view = process.view(gang)?;
        let goes = |uid: &PodUid| victims.contains(uid) || process.evicts(uid.as_str());
        let count = |stage: MemberStage| {
            let members = view.members.iter().filter(|member| member.stage == stage && !goes(&member.uid));
            members.count()
        };
        let bound = count(MemberStage::Bound);
        // What had ended before the process started is only counted.
        let is_seen = |uid: &str| view.members.iter().any(|member| member.uid.as_str() == uid);
        let ended = self.jobs.of_gang(gang).into_iter().flat_map(|job| &job.members);
        let ended =
            ended.filter(|member| member.done && member.pod.as_ref().is_some_and(|(_, uid)| !is_seen(uid)));
        let settled = bound + count(MemberStage::Succeeded) + ended.count();
        Some(Left { priority: view.priority, bound, settled, min: view.min as usize })
    }

    /// A gang goes as a whole so that another is whole, which is short of its minimum too.
    pub(crate) fn check_way(&mut self, run: u32, of: &str, to: &str) {
        self.played(Played::GaveWay);
        self.note(format_args!("{run} has gang {of} give way to gang {to}"));
        let Some((of, to)) = self.jobs.of_gang(of).zip(self.jobs.of_gang(to)) else {
            return;
        };
        if of.priority > to.priority {
            let wrong = format!("gang {} gives way to {}, of lower priority", of.name, to.name);
            self.wrong(wrong);
        }
    }

    /// At the end: gangs that were in a deadlock have yielded. Where a gang is restarted after a loss, its pods are deleted instead.
    pub(crate) fn check_yielded(&mut self) {
        let restarts = self.jobs.all.iter().any(|job| job.is_restarted());
        if !restarts && self.coverage.has_deadlock_unresolved() {
            self.wrong("gangs were in a deadlock, and none has yielded".to_owned());
        }
    }

    /// Whether a budget spares a pod now.
    pub(crate) fn is_spared(&mut self, pod: &Pod) -> bool {
        if self.is_restless() && !self.evictions.spared.contains_key(&pod.uid) {
            let long = match self.dice.mille(100) {
                true => self.dice.range(1_000, 150_000),
                false => 0,
            };
            self.evictions.spared.insert(pod.uid.clone(), self.now + long);
        }
        self.evictions.spared.get(&pod.uid).is_some_and(|until| self.now < *until)
    }

    /// A pod is evicted.
    pub(crate) fn note_evicted(&mut self, pod: &Pod) {
        if !pod.is_live() || pod.leaving {
            return;
        }
        self.played(match pod.gang {
            Some(_) => Played::EvictedInGang,
            None => Played::Evicted,
        });
        self.count_evicted(pod);
    }

    fn count_evicted(&mut self, pod: &Pod) {
        let (count, most) = if self.jobs.all[pod.job].brought {
            let more = u32::try_from(self.now / RETAKEN).unwrap_or(u32::MAX);
            (&mut self.evictions.retaken, STORM.saturating_add(more))
        } else {
            (&mut self.evictions.count, STORM)
        };
        *count += 1;
        if *count > most {
            self.wrong(format!("{most} pods were stopped for others, and now {}", pod.uid));
        }
    }

    /// kube-scheduler stops a pod for another.
    pub(crate) fn note_preempted(&mut self, pod: &Pod) {
        if !pod.is_live() || pod.leaving {
            return;
        }
        self.played(match pod.gang {
            Some(_) => Played::PreemptedInGang,
            None => Played::Preempted,
        });
        // kube-scheduler does not know that it preempts in vain for pods that take the devices again.
        if !self.jobs.all[pod.job].brought {
            self.count_evicted(pod);
        }
    }

    /// A device that whoever sent a Binding, and leads, keeps for a gang that is not the pod's.
    pub(crate) fn kept_for_another(
        &self,
        pod: &Pod,
        devices: &[String],
        run: u32,
    ) -> Option<(String, String)> {
        if self.leader() != Some(run) {
            return None;
        }
        let own = pod.gang.as_ref().map(|claim| claim.gang.as_str());
        let others = self.jobs.all.iter().filter(|job| job.is_gang && Some(job.gang.as_str()) != own);
        others.into_iter().find_map(|job| {
            let view = self.extenders.running.get(&run)?.view(&job.gang)?;
            // A spare one is lent.
            let may_borrow = own.is_none() && pod.priority < view.priority;
            let places = view.places.iter().filter(|place| !(place.bound || place.spare && may_borrow));
            let mut kept = places.flat_map(|place| &place.devices).map(ToString::to_string);
            Some((kept.find(|id| devices.contains(id))?, job.name.clone()))
        })
    }
}
