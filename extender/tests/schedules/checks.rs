//! What must always hold, and what must hold in the end.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gantry_api::{Decision, DeviceId, GangStatus, Grant, PodUid};
use gantry_extender::index::{MemberStage, Target};
use gantry_gang::protocol::Work;

use crate::api::{Gang, Pod};
use crate::coverage::Played;
use crate::jobs::{Job, Member};
use crate::world::World;

/// Milliseconds after which an extender knows that a job is over, whatever fails: a stall, a pause or a change of the leader is shorter.
const OVER: u64 = 120_000;
/// Milliseconds after which an extender knows that a restored etcd has lost a decision of which the answer came after the lists: it has
/// written a status over the version of the answer.
const REREAD: u64 = 3_000;

impl World {
    /// What was done at that time may be about objects that were lost with a restore of etcd just before.
    fn is_lost_to_restore(&self, at: u64) -> bool {
        self.restored.is_some_and(|restored| at <= restored + REREAD)
    }

    /// A Binding is about to be carried out: its devices are nobody else's, and a member's gang is decided.
    pub(crate) fn check_binding(
        &mut self,
        target: &Target,
        grant: Option<&Arc<str>>,
        member: bool,
        (run, sent): (u32, u64),
    ) {
        let pod = self.api.pod(&target.name, target.uid.as_str()).cloned();
        let Some(pod) = pod.filter(|pod| pod.node.is_none() && !pod.leaving && pod.is_live()) else {
            // It will be refused.
            return;
        };
        // A Binding that was sent before etcd was restored, and is sent again, is refused.
        if !pod.gates.is_empty() && !self.is_lost_to_restore(sent) {
            self.wrong(format!("pod {} is bound behind its gates", pod.uid));
        }
        if pod.gang.is_some() != member {
            self.wrong(format!("pod {} of {:?} is bound as if that were otherwise", pod.uid, pod.gang));
        }
        let Some(grant) = grant.and_then(|text| serde_json::from_str::<Grant>(text).ok()) else {
            return;
        };
        let devices: Vec<String> = grant.held("nvidia.com/gpu").iter().map(ToString::to_string).collect();
        if devices.len() != pod.gpus as usize {
            self.wrong(format!("pod {} asks for {} GPUs and is granted {devices:?}", pod.uid, pod.gpus));
        }
        if let Some((device, gang)) = self.kept_for_another(&pod, &devices, run) {
            self.wrong(format!("pod {} is granted {device}, which is kept for gang {gang}", pod.uid));
        }
        let used = self.used_by_others(target.node.as_str(), &pod.uid, run, sent);
        if let Some((device, other)) = used.iter().find(|(device, _)| devices.contains(device)) {
            self.wrong(format!("pod {} is granted {device}, which {other} has", pod.uid));
        }
        let Some(claim) = &pod.gang else {
            return;
        };
        let object = self.api.gangs.values().find(|gang| gang.status.name == claim.gang).cloned();
        let Some(decision) = object.and_then(|gang| gang.status.decision.clone()) else {
            if self.is_lost_to_restore(sent) {
                return;
            }
            self.wrong(format!(
                "pod {} of gang {} is bound, and no decision is written",
                pod.uid, claim.gang
            ));
            return;
        };
        if let Some(other) = decision.reservations.iter().find(|slot| {
            let ids = slot.devices.iter().flat_map(|devices| &devices.ids);
            let others = slot.pod.as_ref().filter(|uid| **uid != target.uid);
            let waits = others.is_some_and(|uid| {
                let pod = self.api.pods.values().find(|pod| pod.uid == uid.as_str());
                // What a bound pod has is told by itself and by kubelet.
                pod.is_some_and(|pod| pod.is_live() && pod.node.is_none())
            });
            waits && slot.node == target.node && ids.into_iter().any(|id| devices.contains(&id.to_string()))
        }) {
            let other = other.pod.clone();
            self.wrong(format!("pod {} is bound to a place that is written down for {other:?}", pod.uid));
        }
    }

    /// A gang is decided: as many members as it needs have arrived, or run or have ended well as far as the process knows.
    pub(crate) fn check_arrived(&mut self, run: u32, gang: &str, decision: &Decision) {
        // It may be written already, and is written again whatever has become of its members.
        if self.extenders.doubted.contains(&(run, decision.id.clone())) {
            return;
        }
        let Some(process) = self.extenders.running.get(&run) else {
            return;
        };
        let Some((job, view)) = self.jobs.of_gang(gang).zip(process.view(gang)) else {
            return;
        };
        let slots = decision.reservations.iter();
        let named: BTreeSet<&PodUid> = slots.filter_map(|slot| slot.pod.as_ref()).collect();
        let settled = view
            .members
            .iter()
            .filter(|member| matches!(member.stage, MemberStage::Bound | MemberStage::Succeeded));
        let mut counted: BTreeSet<&str> = settled.map(|member| member.uid.as_str()).collect();
        // One that had arrived may be gone by the end of the same change, too.
        let named = named.into_iter().map(PodUid::as_str);
        counted.extend(named.filter(|uid| self.extenders.has_arrived(run, uid)));
        // What it knew to be bound may be gone by the end of the same change, and what had ended before it started is only counted.
        counted.extend(self.extenders.gone.iter().map(|(_, uid)| uid.as_str()));
        let is_left = |uid: &str| view.members.iter().any(|member| member.uid.as_str() == uid);
        let ended = job.members.iter().filter(|member| member.done);
        let ended = ended.filter_map(|member| member.pod.as_ref().map(|(_, uid)| uid.as_str()));
        counted.extend(ended.filter(|uid| !is_left(uid)));
        let missing = job.needs.missing(counted.iter().filter_map(|uid| job.number_of(uid)));
        if job.is_tree {
            self.coverage.add(Played::TreeDecided);
        }
        if missing > 0 {
            let wrong =
                format!("gang {gang} is decided when {missing} members have not arrived: {counted:?}");
            self.wrong(wrong);
        }
    }

    /// Something is done for a gang: by a process that has listed everything since its term began.
    pub(crate) fn check_listed(&mut self, run: u32, work: &Work) {
        if !matches!(work, Work::Commit { .. } | Work::Evict { .. } | Work::Delete { .. }) {
            return;
        }
        let process = self.extenders.running.get(&run);
        if process.is_some_and(|process| !process.has_listed()) {
            self.wrong(format!("{run} has not listed everything, and does {work:?}"));
        }
    }

    /// A decision is written where another stood: not while all pods that the first names are there and some run, for a decision is only
    /// completed. A restored etcd may show pods again that an extender has seen end.
    pub(crate) fn check_kept(&mut self, before: Option<&Gang>, now: &GangStatus) {
        if self.is_lost_to_restore(self.now) {
            return;
        }
        let id = now.decision.as_ref().map(|decision| &decision.id);
        let Some(before) = before.and_then(|gang| gang.status.decision.as_ref()) else {
            return;
        };
        let named: Vec<&PodUid> = before.pods().collect();
        let pods = self.api.pods.values().filter(|pod| {
            let stays = pod.is_live() && !pod.leaving;
            stays && named.iter().any(|uid| uid.as_str() == pod.uid)
        });
        let pods: Vec<&Arc<Pod>> = pods.collect();
        let is_whole = !named.is_empty() && pods.len() == named.len();
        if id != Some(&before.id) && is_whole && pods.iter().any(|pod| pod.node.is_some()) {
            let wrong = format!("gang {} is decided again though all of its decision is there", now.name);
            self.wrong(wrong);
        }
    }

    /// A member's Binding is about to be sent: the place is written down.
    pub(crate) fn check_written(&mut self, target: &Target) {
        // What was written may be gone with a restored etcd, or with an object that somebody has deleted.
        let pod = self.api.pod(&target.name, target.uid.as_str());
        let gang = pod.and_then(|pod| pod.gang.as_ref()).map(|claim| claim.gang.clone());
        let mut gangs = self.api.gangs.values();
        let is_there =
            gangs.any(|known| Some(&known.status.name) == gang.as_ref() && known.status.decision.is_some());
        if is_there && !self.is_lost_to_restore(self.now) && !self.is_written_down(target) {
            let wrong = format!("pod {} is bound to {}, which is not written down", target.uid, target.node);
            self.wrong(wrong);
        }
    }

    /// Whether the place of a Binding is written down for its pod.
    pub(crate) fn is_written_down(&self, target: &Target) -> bool {
        let mut slots = self
            .api
            .gangs
            .values()
            .filter_map(|gang| gang.status.decision.as_ref())
            .flat_map(|decision| &decision.reservations);
        slots.any(|slot| slot.node == target.node && slot.pod.as_ref() == Some(&target.uid))
    }

    /// Decisions that stand have no device in common.
    pub(crate) fn check_decisions(&mut self) {
        let mut taken: BTreeMap<&DeviceId, &str> = BTreeMap::new();
        let mut both = Vec::new();
        for gang in self.api.gangs.values() {
            let Some(decision) = &gang.status.decision else {
                continue;
            };
            if gang.status.bound_at.is_some() {
                // A replacement's place may be given up; the object says so a moment later. Nobody is bound by what it says before.
                continue;
            }
            for slot in &decision.reservations {
                // A place counts as long as somebody who may still come has it.
                let waits = slot.pod.as_ref().is_some_and(|uid| {
                    let pod = self.api.pods.values().find(|pod| pod.uid == uid.as_str());
                    pod.is_some_and(|pod| pod.is_live() && pod.node.is_none())
                });
                if !waits {
                    continue;
                }
                for id in slot.devices.iter().flat_map(|devices| &devices.ids) {
                    if let Some(other) = taken.insert(id, &gang.name) {
                        both.push((id, other, gang.name.as_str()));
                    }
                }
            }
        }
        // A place that cannot be had any more (a device is sick, the node was gone) is given up by whoever leads, and the object says so a
        // moment later. Should it crash before, the next gives up one of the two.
        let stand = |(id, one, other): &(&DeviceId, &str, &str)| self.keeps(one, id) && self.keeps(other, id);
        if let Some((id, one, other)) = both.into_iter().find(stand) {
            let words = format!("{id} is in the decisions of {one} and {other}");
            self.wrong(words);
        }
    }

    /// Whether who leads keeps a device for a gang.
    fn keeps(&self, gang: &str, device: &DeviceId) -> bool {
        let process = self.leader().and_then(|run| self.extenders.running.get(&run));
        let view = process.and_then(|process| process.view(gang));
        let places = view.iter().flat_map(|view| &view.places);
        places.filter(|place| !place.bound).any(|place| place.devices.contains(device))
    }

    /// Once nothing of a job that is over runs, no place is kept for it.
    pub(crate) fn check_over(&mut self) {
        let calm = if self.plan.troubled { self.plan.restless } else { 0 };
        let kept = self.kept_for_over();
        if let Some((_, words)) = kept.filter(|(since, _)| self.now > calm.max(*since) + OVER) {
            self.wrong(words);
        }
    }

    /// A place that the leader keeps for a job that is over and of which nothing runs: since when it is over, and words.
    fn kept_for_over(&self) -> Option<(u64, String)> {
        let process = self.leader().and_then(|run| self.extenders.running.get(&run))?;
        self.jobs.all.iter().find_map(|job| {
            let since = job.is_over(&self.api.pods)?;
            let view = process.view(&job.gang)?;
            let words = || format!("places are kept for job {}, which is over: {view:?}", job.name);
            (!view.places.is_empty()).then(|| (since, words()))
        })
    }

    /// After everything has settled: what fits has run, as a whole.
    pub(crate) fn check_settled(&mut self) {
        if let Some(uid) = self.believed() {
            self.wrong(format!("kube-scheduler believes for ever that pod {uid} is bound"));
        }
        // Such a job may keep devices from all others.
        let mut jobs = self.jobs.all.iter();
        let are_kept = jobs.any(|job| !job.is_done() && self.is_excused(job) && self.is_bound_in_part(job));
        for job in self.jobs.all.clone() {
            if job.fits && !job.is_done() && !self.is_excused(&job) && !are_kept {
                let views = self.views();
                self.wrong(format!("job {} has not come to its end: {:?}\n{views}", job.name, job.members));
            }
            if let Some(pod) = self.left_behind(&job) {
                self.wrong(format!("pod {} of a gang that is complete is left behind its gates", pod.uid));
            }
            if !job.fits && job.began.is_some() {
                self.wrong(format!("job {} has run where it does not fit", job.name));
            }
        }
    }

    /// Whatever fits has run, no gate is to be removed, and no place is kept for what is over.
    pub(crate) fn is_settled(&self) -> bool {
        let jobs = &self.jobs.all;
        jobs.iter().all(|job| !job.fits || job.is_done())
            && jobs.iter().all(|job| self.left_behind(job).is_none())
            && self.kept_for_over().is_none()
    }

    /// A pod of a gang that is complete and has gates all the same.
    fn left_behind(&self, job: &Job) -> Option<&Arc<Pod>> {
        let pods = job.members.iter().filter_map(|member| {
            let (name, uid) = member.pod.as_ref()?;
            self.api.pod(name, uid).filter(|pod| pod.is_live() && !pod.leaving)
        });
        let pods: Vec<&Arc<Pod>> = pods.collect();
        let there = pods.iter().filter_map(|pod| job.number_of(&pod.name));
        let complete = !job.is_done() && job.needs.missing(there) == 0;
        let mut gated = pods.into_iter().filter(|pod| !pod.gates.is_empty());
        gated.next().filter(|_| complete)
    }

    /// A gate is removed: that of a gang of which enough pods were there once.
    pub(crate) fn check_lifted(&mut self, pod: &Pod) {
        let job = &self.jobs.all[pod.job];
        let missing = job.needs.missing(job.numbers(|member| member.attempts > 0));
        if missing > 0 {
            let words =
                format!("the gate of pod {} goes, and {missing} of its gang were never there", pod.uid);
            self.wrong(words);
        }
    }

    /// Whether a job waits for members that have ended well, which another scheduler bound before any extender saw them wait, or was able
    /// to list them in the Gang: nothing shows that they were not created with a node.
    fn was_bound_unseen(&self, job: &Job) -> bool {
        let unlisted = |member: &Member| {
            let uid = member.pod.as_ref().map(|(_, uid)| uid);
            member.done && uid.is_some_and(|uid| self.bound_unlisted.contains(uid))
        };
        job.is_gang && job.members.iter().any(unlisted)
    }

    /// Whether a job may wait for ever: the accepted failures in README.md.
    fn is_excused(&self, job: &Job) -> bool {
        self.has_lost_its_past(job) || self.was_bound_unseen(job) || self.was_finished(job)
    }

    /// Whether the gang of a job was finished when a member was gone and all others had ended: its replacement is taken for the first pod
    /// of a new job.
    fn was_finished(&self, job: &Job) -> bool {
        let waits = |member: &Member| self.present_pod(member).is_some_and(|pod| pod.node.is_none());
        let mut members = job.members.iter();
        self.finished_early.contains(&job.gang) && members.all(|member| member.done || waits(member))
    }

    /// The pod of a member, as long as it exists.
    fn present_pod(&self, member: &Member) -> Option<&Arc<Pod>> {
        let (name, _) = member.pod.as_ref()?;
        self.api.pods.get(name)
    }

    /// Whether some pod of a job is on a node.
    fn is_bound_in_part(&self, job: &Job) -> bool {
        let mut pods = job.members.iter().filter_map(|member| member.pod.as_ref());
        pods.any(|(name, uid)| self.api.pod(name, uid).is_some_and(|pod| pod.node.is_some() && pod.is_live()))
    }

    /// Whether a job waits for members that have ended well long ago: their pods are gone with their nodes, and an extender that has
    /// started since knows of none that the decision names. Those that come now are then a gang of their own, as pods of a new job of that
    /// name would be, and wait to be enough, also beside one that another scheduler has bound since.
    fn has_lost_its_past(&self, job: &Job) -> bool {
        let is_gone = |member: &Member| member.done && self.present_pod(member).is_none();
        let waits = |member: &Member| self.present_pod(member).is_some_and(|pod| pod.grant.is_none());
        let mut members = job.members.iter();
        let all = members.clone().all(|member| member.done || waits(member));
        job.is_gang && all && members.any(is_gone)
    }

    /// How the leader sees the gangs that are not done.
    pub(crate) fn views(&self) -> String {
        let Some(process) = self.leader().and_then(|run| self.extenders.running.get(&run)) else {
            return "nobody leads".to_owned();
        };
        let open = self.jobs.all.iter().filter(|job| !job.is_done());
        let views = open.map(|job| format!("{:?}\n", process.view(&job.gang)));
        views.collect()
    }

    /// After everything was deleted: nothing is kept from anybody.
    pub(crate) fn check_empty(&mut self) {
        let Some(run) = self.leader() else {
            self.wrong("nobody leads".to_owned());
            return;
        };
        let all: u32 = self.kubelets.all.iter().map(|kubelet| kubelet.gpus()).sum();
        let Some(process) = self.extenders.running.get(&run) else {
            return;
        };
        let (totals, places, phases) = process.totals();
        if totals.free != all as usize || totals.reserved + totals.held + totals.leaving > 0 || places > 0 {
            self.wrong(format!(
                "of {all} GPUs not all are free: {totals:?}, {places} places are kept, {phases}"
            ));
        }
        let gangs: Vec<&String> = self.api.gangs.keys().collect();
        if !gangs.is_empty() {
            self.wrong(format!("Gang objects are left: {gangs:?}"));
        }
    }
}
