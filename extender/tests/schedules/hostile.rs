//! Other actors of a cluster, and bad luck: a second scheduler that binds pods by its own count, pods that are created on a node, nodes whose
//! GpuNode is wrong for a while, an API server whose watch cache is behind, and etcd that is restored from a backup.

use std::sync::Arc;

use gantry_extender::index::Source;

use crate::api::{Change, Etcd, Phase, Pod};
use crate::coverage::Played;
use crate::dice::Dice;
use crate::jobs::Job;
use crate::world::{Event, World};

/// Which of them there are in a schedule.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Hostile {
    /// A second scheduler.
    pub(crate) rival: bool,
    /// Some jobs create their pods with a node.
    pub(crate) brought: bool,
    /// Some gangs have members of different priorities.
    pub(crate) mixed: bool,
    /// GpuNodes lack devices or are missing for a while.
    pub(crate) lies: bool,
    /// Watch caches fall behind.
    pub(crate) behind: bool,
    /// etcd is restored.
    pub(crate) restore: bool,
}

impl Hostile {
    pub(crate) fn draw(dice: &mut Dice) -> Self {
        if !dice.mille(400) {
            return Self::default();
        }
        Self {
            rival: dice.mille(400),
            brought: dice.mille(400),
            mixed: dice.mille(400),
            lies: dice.mille(400),
            behind: dice.mille(400),
            restore: dice.mille(300),
        }
    }

    /// Milliseconds after which an extender that does not sleep knows what was published.
    pub(crate) fn news_take(self) -> u64 {
        if self.behind { 3_000 + BEHIND } else { 3_000 }
    }
}

/// The longest time by which a watch cache is behind.
const BEHIND: u64 = 8_000;

/// A backup of etcd.
#[derive(Debug)]
pub(crate) struct Snapshot {
    etcd: Etcd,
    taken: u64,
}

impl World {
    /// What the hostile actors do now and then.
    pub(crate) fn hostile_acts(&mut self) {
        let Hostile { rival, lies, behind, .. } = self.plan.hostile;
        if rival && self.dice.mille(400) {
            self.rival_binds();
        }
        if lies && self.dice.mille(400) {
            match self.dice.mille(700) {
                true => self.hide_device(),
                false => self.lose_inventory(),
            }
        }
        if behind && self.dice.mille(250) {
            self.fall_behind();
        }
    }

    /// A second scheduler binds a pod that waits to any node, without a grant.
    fn rival_binds(&mut self) {
        let waits =
            |pod: &&Arc<Pod>| pod.node.is_none() && pod.is_live() && !pod.leaving && pod.gates.is_empty();
        let waiting: Vec<Arc<Pod>> = self.api.pods.values().filter(waits).cloned().collect();
        let nodes: Vec<String> = self.api.nodes.keys().cloned().collect();
        if waiting.is_empty() || nodes.is_empty() || self.now < self.stalled {
            return;
        }
        let pod = &waiting[self.dice.index(waiting.len())];
        let node = &nodes[self.dice.index(nodes.len())];
        self.played(match pod.gang {
            Some(_) => Played::RivalBoundInGang,
            None => Played::RivalBound,
        });
        self.note(format_args!("another scheduler binds pod {} to {node}", pod.uid));
        self.bound_unlisted.insert(pod.uid.clone());
        self.jobs.all[pod.job].helped = true;
        self.api.bind(&pod.name, &pod.uid, node, None, (self.now, self.now));
    }

    /// The second scheduler gives up gangs that it has bound in part.
    pub(crate) fn rival_gives_up(&mut self) {
        let is_partial = |pod: &&Arc<Pod>| {
            let job = &self.jobs.all[pod.job];
            let runs = job.numbers(|member| {
                let pod = member.pod.as_ref().and_then(|(name, uid)| self.api.pod(name, uid));
                member.done || pod.is_some_and(|pod| pod.node.is_some() && pod.is_live() && !pod.leaving)
            });
            let is_whole = job.needs.missing(runs) == 0;
            pod.node.is_some() && pod.grant.is_none() && pod.gang.is_some() && !is_whole
        };
        let pods: Vec<Arc<Pod>> = self.api.pods.values().filter(is_partial).cloned().collect();
        for pod in pods {
            self.note(format_args!("another scheduler gives up pod {}", pod.uid));
            self.delete_pod(&pod.name, &pod.uid, false);
        }
        self.give_up_helped();
    }

    /// Users delete gangs that do not fit on the cluster and were decided because the second scheduler had bound members of them: what they
    /// have would never come free.
    fn give_up_helped(&mut self) {
        let is_bound = |job: &Job| {
            job.members
                .iter()
                .filter_map(|member| member.pod.as_ref())
                .any(|(name, uid)| self.api.pod(name, uid).is_some_and(|pod| pod.node.is_some()))
        };
        let jobs = self.jobs.all.iter().enumerate();
        let helped = jobs.filter(|(_, job)| job.helped && !job.fits && !job.is_done() && is_bound(job));
        for job in helped.map(|(number, _)| number).collect::<Vec<_>>() {
            self.delete_job(job);
        }
    }

    fn fall_behind(&mut self) {
        let runs: Vec<u32> = self.extenders.running.keys().copied().collect();
        if runs.is_empty() {
            return;
        }
        let run = runs[self.dice.index(runs.len())];
        let source = Source::ALL[self.dice.index(Source::ALL.len())];
        let (by, long) = (self.dice.range(500, BEHIND), self.dice.range(1_000, 30_000));
        self.played(Played::WatchBehind);
        self.note(format_args!("the watch of {} of extender {run} is {by} ms behind", source.as_str()));
        let until = self.now + long;
        self.extenders.fall_behind(run, source, by, until);
    }

    /// Decides whether and when etcd is restored.
    pub(crate) fn plan_restore(&mut self) {
        if self.plan.hostile.restore {
            let taken = self.dice.range(1_000, self.plan.restless);
            let restored = taken + self.dice.range(500, 15_000);
            self.at(taken, Event::Snapshot);
            self.at(restored, Event::Restore);
        }
    }

    pub(crate) fn take_snapshot(&mut self) {
        self.snapshot = Some(Snapshot { etcd: self.api.backup(), taken: self.now });
    }

    /// etcd is put back to the snapshot, as its documentation advises: the revision goes on from where it was and every watch cache ends, so
    /// that everybody lists again. Requests that are under way are lost with the API servers. The Lease stays.
    pub(crate) fn restore(&mut self) {
        let Some(Snapshot { etcd, taken }) = self.snapshot.take() else {
            return;
        };
        if !self.is_restless() {
            return;
        }
        self.played(Played::Restored);
        self.restored = Some(self.now);
        self.note(format_args!("etcd is restored to {taken}"));
        let listed = self.api.gangs.values().flat_map(|gang| &gang.status.unreserved);
        self.bound_unlisted.extend(listed.map(ToString::to_string));
        self.api.restore(etcd);
        self.stalled = self.stalled.min(self.now);
        self.lose_requests();
        self.relist_all();
        self.kill_scheduler();
        self.adopt_pods();
        self.soon(500, 3_000, Event::CollectOrphans);
        for node in 0..self.kubelets.all.len() {
            self.resync_kubelet(node);
        }
    }

    /// Controllers take over the pods that are back.
    fn adopt_pods(&mut self) {
        let pods: Vec<Arc<Pod>> = self.api.pods.values().cloned().collect();
        for pod in pods {
            let known = self.jobs.member_of(&pod).and_then(|member| member.pod.clone());
            let lives = known.is_some_and(|(name, uid)| self.api.pod(&name, &uid).is_some());
            if !lives && let Some(member) = self.jobs.member_of(&pod) {
                member.pod = Some((pod.name.clone(), pod.uid.clone()));
            }
        }
    }

    /// Pods are deleted that their controller has replaced, or does not need any more.
    pub(crate) fn collect_orphans(&mut self) {
        let pods: Vec<Arc<Pod>> = self.api.pods.values().cloned().collect();
        for pod in pods {
            let is_own = |member: &mut crate::jobs::Member| {
                let own = member.pod.as_ref().is_some_and(|(_, uid)| *uid == pod.uid);
                own && (!member.done || pod.phase == Phase::Succeeded)
            };
            if !self.jobs.member_of(&pod).is_some_and(is_own) {
                self.played(Played::Orphaned);
                self.note(format_args!("pod {} is an orphan", pod.uid));
                self.delete_pod(&pod.name, &pod.uid, false);
            }
        }
    }

    /// Kubelet lists its pods: it stops what is not its own any more, and admits what it does not run.
    fn resync_kubelet(&mut self, node: usize) {
        let pods = self.kubelets.resync(node);
        let name = self.kubelets.all[node].name.clone();
        if !self.kubelets.all[node].is_up() {
            self.api.remove_node(&name);
            self.api.remove_gpu_node(&name);
            self.soon(1_000, 5_000, Event::Collect { node });
            return;
        }
        for uid in pods {
            let pod = self.api.pods.values().find(|pod| pod.uid == uid).cloned();
            match pod.filter(|pod| pod.node.as_ref() == Some(&name)) {
                Some(pod) if pod.phase == Phase::Pending => {
                    self.soon(20, 1_500, Event::Running { node, uid });
                }
                Some(_) => {}
                None => self.stop(node, &uid, true),
            }
        }
        let own = self.api.pods.values().filter(|pod| pod.node.as_ref() == Some(&name));
        let own: Vec<Arc<Pod>> = own.cloned().collect();
        for pod in own {
            self.tell_kubelets(&Change::Pod(pod));
        }
        self.will_publish(node);
    }
}
