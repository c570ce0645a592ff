//! Preemption: who may be stopped, for whom, and how often; and that what comes free is for whom it was freed.

use std::collections::BTreeMap;
use std::sync::Arc;

use gantry_api::PodUid;

use crate::api::Pod;
use crate::coverage::Played;
use crate::world::World;

/// More evictions in one schedule are a storm.
const STORM: u32 = 30;

/// What was stopped for others.
#[derive(Debug, Default)]
pub(crate) struct Evictions {
    count: u32,
    /// Pods, and until when a budget spares each that the extenders have not heard of.
    spared: BTreeMap<String, u64>,
}

impl World {
    /// An extender has pods evicted for a gang: of lower priority, and gangs as a whole.
    pub(crate) fn check_victims(&mut self, run: u32, victims: &[PodUid], by: &str) {
        self.played(Played::GangPreempts);
        self.note(format_args!("{run} has {victims:?} go for gang {by}"));
        let Some(job) = self.jobs.all.iter().find(|job| job.name == by) else {
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
        let left = self.api.pods.values().find(|pod| {
            let of_gang = pods.iter().any(|victim| victim.gang.is_some() && victim.job == pod.job);
            let runs = pod.is_live() && !pod.leaving && pod.node.is_some();
            of_gang && runs && self.extenders.knew(run, &pod.uid) && !is_victim(pod)
        });
        if let Some(pod) = left {
            wrong.push(format!("a part of a gang is stopped for gang {by}, and pod {} is not", pod.uid));
        }
        for wrong in wrong {
            self.wrong(wrong);
        }
    }

    /// A gang goes as a whole so that another is whole, which is short of its minimum too.
    pub(crate) fn check_way(&mut self, run: u32, of: &str, to: &str) {
        self.played(Played::GaveWay);
        self.note(format_args!("{run} has gang {of} give way to gang {to}"));
        let job = |name: &str| self.jobs.all.iter().find(|job| job.name == name);
        let Some((of, to)) = job(of).zip(job(to)) else {
            return;
        };
        if of.priority > to.priority {
            let wrong = format!("gang {} gives way to {}, of lower priority", of.name, to.name);
            self.wrong(wrong);
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
        self.evictions.count += 1;
        if self.evictions.count > STORM {
            self.wrong(format!("{STORM} pods were stopped for others, and now {}", pod.uid));
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
        self.count_evicted(pod);
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
        let others = self.jobs.all.iter().filter(|job| job.is_gang && Some(job.name.as_str()) != own);
        others.into_iter().find_map(|job| {
            let view = self.extenders.running.get(&run)?.view(&job.name)?;
            let places = view.places.iter().filter(|place| !place.bound);
            let mut kept = places.flat_map(|place| &place.devices).map(ToString::to_string);
            Some((kept.find(|id| devices.contains(id))?, job.name.clone()))
        })
    }
}
