//! What people run: gangs and single pods with an end, and the controllers that make their pods anew when they are lost. A gang's members
//! run on only when enough of them are there, as those of a real one do; so a gang that is half bound never ends.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gantry_gang::{OwnerKind, OwnerRef};
use serde_json::{Value, json};

use crate::api::{Claim, Gate, Phase, Pod, Read};
use crate::coverage::Played;
use crate::world::{Event, World};

/// Milliseconds that a pod which is deleted has to be gone in. Some take longer.
const GRACE: u64 = 15_000;

/// Which members are needed together: of each group so many, and so many of the groups. All groups but those of a tree are one.
#[derive(Debug, Clone)]
pub(crate) struct Needs {
    /// The minimum of each group. The members take turns to be in them.
    groups: Vec<u32>,
    /// How many groups are needed.
    count: usize,
}

impl Needs {
    fn members(min: u32) -> Self {
        Self { groups: vec![min], count: 1 }
    }

    fn group_of(&self, member: usize) -> usize {
        member % self.groups.len()
    }

    /// How many members each group lacks, if these are there.
    fn lacks(&self, there: impl IntoIterator<Item = usize>) -> Vec<u32> {
        let mut lacks = self.groups.clone();
        for member in there {
            let lack = &mut lacks[self.group_of(member)];
            *lack = lack.saturating_sub(1);
        }
        lacks
    }

    /// How many members are missing, if these are there: in the groups that lack the fewest.
    pub(crate) fn missing(&self, there: impl IntoIterator<Item = usize>) -> u32 {
        let mut lacks = self.lacks(there);
        lacks.sort_unstable();
        lacks.iter().take(self.count).sum()
    }

    /// How many are needed at least.
    pub(crate) fn least(&self) -> u32 {
        self.missing([])
    }
}

/// A job: pods that are a gang, or one that is none.
#[derive(Debug, Clone)]
pub(crate) struct Job {
    pub(crate) name: String,
    /// The name of its gang.
    pub(crate) gang: String,
    pub(crate) needs: Needs,
    /// Its pods are in PodGroups of a CompositePodGroup.
    pub(crate) is_tree: bool,
    pub(crate) is_gang: bool,
    max: Option<u32>,
    pub(crate) gpus: u32,
    pub(crate) priority: i32,
    /// Whether others may be stopped for it.
    pub(crate) preempts: bool,
    repair: Option<&'static str>,
    /// Whether a pod made anew has the name of the one before.
    keeps_names: bool,
    /// Milliseconds that it computes.
    length: u64,
    begins: u64,
    pub(crate) members: Vec<Member>,
    /// All members that are needed have run at once.
    pub(crate) began: Option<u64>,
    /// It may be on the cluster with nothing else there.
    pub(crate) fits: bool,
    deleted: bool,
    /// It is a Job with a success policy: when one of its pods has ended well, its controller removes the others and makes none anew.
    ends_with_first: bool,
    /// Since when it says that it is over.
    over: Option<u64>,
    gating: Option<Gating>,
    /// Its pods are created with a node, so that no scheduler looks at them.
    pub(crate) brought: bool,
    /// Every other member has priority 0.
    mixed: bool,
    /// Another scheduler has bound a pod of it.
    pub(crate) helped: bool,
    /// Its controller creates all of its pods again: the devices that they had, until one of the new ones is bound.
    had: BTreeSet<String>,
}

/// Its pods are made with the extender's scheduling gate.
#[derive(Debug, Clone)]
struct Gating {
    /// They have another, which goes by itself after so many milliseconds.
    quota: Option<u64>,
}

/// One of its pods.
#[derive(Debug, Clone, Default)]
pub(crate) struct Member {
    pub(crate) attempts: u32,
    pub(crate) pod: Option<(String, String)>,
    pub(crate) done: bool,
    ends: Option<u64>,
    /// When its next pod is made.
    again: Option<u64>,
}

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct Jobs {
    pub(crate) all: Vec<Job>,
    /// No more pods are made.
    pub(crate) closed: bool,
}

impl Jobs {
    /// The job that a gang is.
    pub(crate) fn of_gang(&self, gang: &str) -> Option<&Job> {
        self.all.iter().find(|job| job.is_gang && job.gang == gang)
    }

    /// The member of a job that is not over for which a pod was made.
    pub(crate) fn member_of(&mut self, pod: &Pod) -> Option<&mut Member> {
        let job = self.all.get_mut(pod.job).filter(|job| !job.deleted)?;
        let number = job.number_of(&pod.name)?;
        job.members.get_mut(number)
    }
}

impl Job {
    /// Since when it is over and nothing of it runs, if its pods are these.
    pub(crate) fn is_over(&self, pods: &BTreeMap<String, Arc<Pod>>) -> Option<u64> {
        let mut members = self.members.iter().filter_map(|member| member.pod.as_ref());
        let runs = members.any(|(name, uid)| {
            let pod = pods.get(name).filter(|pod| pod.uid == *uid);
            pod.is_some_and(|pod| pod.is_live())
        });
        self.over.filter(|_| !runs)
    }

    /// Pods that were made for it so far.
    pub(crate) fn made(&self) -> u32 {
        self.members.iter().map(|member| member.attempts).sum()
    }

    /// All of its members are deleted when one is lost.
    pub(crate) fn is_restarted(&self) -> bool {
        self.repair == Some("restart")
    }

    /// It may have more members than it needs.
    pub(crate) fn is_elastic(&self) -> bool {
        self.max.is_some()
    }

    pub(crate) fn is_done(&self) -> bool {
        self.deleted || self.members.iter().all(|member| member.done)
    }

    /// The number of the member of which a pod was made.
    pub(crate) fn number_of(&self, pod: &str) -> Option<usize> {
        pod.strip_prefix(&self.name)?.strip_prefix('-')?.split('-').next()?.parse().ok()
    }

    /// The members for which `is` holds.
    pub(crate) fn numbers(&self, is: impl Fn(&Member) -> bool) -> Vec<usize> {
        let numbers = self.members.iter().enumerate();
        numbers.filter(|(_, member)| is(member)).map(|(number, _)| number).collect()
    }

    fn pod_group(&self, group: usize) -> String {
        format!("{}-group-{group}", self.name)
    }
}

impl World {
    pub(crate) fn draw_jobs(&mut self) {
        let preemption = u64::from(self.plan.preemption);
        // Gangs that run long, on a cluster that is full, are short of what others hold when nodes are lost.
        let crowd = u64::from(self.plan.is_short_of_patience());
        let count = self.dice.range(2, 5) + preemption + 2 * crowd;
        let restless = self.plan.restless;
        for number in 0..count {
            let is_gang = self.dice.mille(750 - 250 * preemption);
            let size = if is_gang { self.dice.range(1, 4) } else { 1 };
            let gpus = u32::try_from([1, 1, 2, 2, 3, 4][self.dice.index(6)]).unwrap();
            let elastic = is_gang && size > 2 && self.dice.mille(300 + 300 * preemption);
            let min = match elastic {
                true if self.plan.preemption => self.dice.range(1, size - 1),
                true => size - 1,
                false => size,
            };
            let min = u32::try_from(min).unwrap();
            let repair = match self.dice.below(6) {
                0 if crowd == 0 => Some("restart"),
                1 if crowd == 0 => Some("ignore"),
                2 => Some("hold"),
                _ => None,
            };
            let gating = (self.plan.gates && is_gang && self.dice.mille(700))
                .then(|| Gating { quota: self.dice.mille(250).then(|| self.dice.range(100, 8_000)) });
            let mut job = Job {
                name: format!("j{number}"),
                gang: format!("j{number}"),
                needs: Needs::members(min),
                is_tree: false,
                is_gang,
                max: elastic.then_some(u32::try_from(size).unwrap()),
                gpus,
                priority: i32::try_from(self.dice.below(2) * 10).unwrap(),
                preempts: false,
                repair,
                keeps_names: self.dice.mille(500),
                length: self.dice.range(1_000, 20_000),
                begins: self.dice.range(0, restless / 2),
                members: vec![Member::default(); usize::try_from(size).unwrap()],
                began: None,
                fits: self.fits(u64::from(min), gpus),
                deleted: false,
                ends_with_first: is_gang && !elastic && self.dice.mille(200),
                over: None,
                gating,
                brought: false,
                mixed: false,
                helped: false,
                had: BTreeSet::new(),
            };
            job.length += crowd * restless;
            if self.plan.preemption {
                // The most important come last, and the others compute long enough to be stopped for them.
                let class = self.dice.index(4);
                job.priority = [0, 0, 10, 100][class];
                job.preempts = job.priority > 0 && self.dice.mille(900);
                job.begins = (job.begins + class as u64 * restless / 3) / 2;
                job.length += restless * u64::from(class < 3) / 2;
            }
            if self.plan.hostile.brought && !is_gang {
                job.brought = self.dice.mille(500);
            }
            if (self.plan.hostile.mixed || self.plan.preemption) && is_gang && size > 1 {
                job.mixed = self.dice.mille(500);
            }
            if job.mixed {
                self.played(Played::MixedGang);
            }
            self.note(format_args!(
                "job {}: {} of {} x {} GPUs, gang {}, priority {}, repair {:?}, fits {}, ends with the first {}, {:?}",
                job.name,
                min,
                size,
                job.gpus,
                job.is_gang,
                job.priority,
                job.repair,
                job.fits,
                job.ends_with_first,
                job.gating
            ));
            self.jobs.all.push(job);
        }
        if self.plan.trees {
            (0..self.jobs.all.len()).for_each(|job| self.plant(job));
        }
    }

    /// The members of a gang are in two PodGroups, of which both are needed, or where it is elastic one.
    fn plant(&mut self, job: usize) {
        let all = &self.jobs.all[job];
        let size = all.members.len();
        let groups = [size.div_ceil(2), size / 2].map(|count| u32::try_from(count).unwrap());
        let fit = groups.map(|count| self.fits(u64::from(count), all.gpus));
        let count = if all.max.is_some() { 1 } else { 2 };
        if !all.is_gang || all.ends_with_first || size < 2 || count == 1 && fit[0] != fit[1] {
            return;
        }
        let all = &mut self.jobs.all[job];
        if count == 1 {
            all.fits = fit[0];
        }
        all.gang = format!("CompositePodGroup/{}", all.name);
        all.needs = Needs { groups: groups.to_vec(), count };
        all.is_tree = true;
        let words = format!("job {} is a tree of {:?}", all.name, all.needs);
        self.note(format_args!("{words}"));
    }

    /// Whether so many members fit on the cluster with nothing else there.
    fn fits(&self, members: u64, gpus: u32) -> bool {
        let places: u32 = self.kubelets.all.iter().map(|node| node.gpus() / gpus).sum();
        u64::from(places) >= members
    }

    /// Controllers make pods, notice lost ones, and see who has computed enough.
    pub(crate) fn control(&mut self) {
        self.soon(100, 400, Event::Control);
        if self.now < self.stalled {
            return;
        }
        for job in 0..self.jobs.all.len() {
            self.control_job(job);
        }
        if !self.is_restless() {
            self.rival_gives_up();
        }
        self.check_over();
        self.check_waiting();
    }

    /// A pod has done its work: its controller keeps that in mind, whatever becomes of the pod.
    pub(crate) fn note_done(&mut self, uid: &str) {
        let members = self.jobs.all.iter_mut().flat_map(|job| &mut job.members);
        for member in members {
            member.done |= member.pod.as_ref().is_some_and(|(_, own)| own == uid);
        }
    }

    fn control_job(&mut self, job: usize) {
        if self.jobs.all[job].begins > self.now || self.jobs.all[job].deleted {
            return;
        }
        let mut running = Vec::new();
        for number in 0..self.jobs.all[job].members.len() {
            if self.jobs.all[job].members[number].done {
                running.push(number);
                continue;
            }
            match self.pod_of(job, number) {
                Some(pod) if pod.phase == Phase::Running && !pod.leaving => running.push(number),
                Some(pod) if pod.phase == Phase::Succeeded => {
                    self.jobs.all[job].members[number].done = true;
                    running.push(number);
                }
                Some(pod) if pod.phase == Phase::Failed && !pod.leaving => {
                    // A controller removes what has failed and makes it anew.
                    self.api.remove_pod(&pod.name, &pod.uid);
                }
                Some(pod) => self.lift_quota(&pod),
                None => self.make_pod(job, number),
            }
        }
        let all = &mut self.jobs.all[job];
        let (whole, lacks) = (all.needs.missing(running.iter().copied()) == 0, all.needs.lacks(running));
        if whole && all.began.is_none() {
            all.began = Some(self.now);
        }
        if all.ends_with_first && all.members.iter().any(|member| member.done) {
            self.end_job(job);
            return;
        }
        if !whole {
            return;
        }
        for number in 0..self.jobs.all[job].members.len() {
            let all = &self.jobs.all[job];
            let length = all.length;
            if lacks[all.needs.group_of(number)] > 0 {
                // Its group computes nothing.
                continue;
            }
            let Some(pod) = self.pod_of(job, number) else {
                continue;
            };
            let now = self.now;
            let member = &mut self.jobs.all[job].members[number];
            if pod.phase != Phase::Running || member.done {
                continue;
            }
            let dice = &mut self.dice;
            let ends = *member.ends.get_or_insert_with(|| now + length + dice.below(500));
            if now >= ends {
                self.finish_process(&pod.uid);
            }
        }
    }

    /// A Job's controller removes what is left of it, before or after the Job says that it is over.
    fn end_job(&mut self, job: usize) {
        let all = &mut self.jobs.all[job];
        all.over = Some(self.now);
        all.deleted = true;
        let pods = all.members.iter().filter_map(|member| member.pod.clone());
        let pods: Vec<(String, String)> = pods.collect();
        self.played(Played::JobEndedEarly);
        self.note(format_args!("job j{job} ends with its first pod"));
        for (name, uid) in pods {
            if self.api.pod(&name, &uid).is_some_and(|pod| pod.is_live()) {
                self.delete_pod(&name, &uid, false);
            }
        }
    }

    /// A Job with all of its pods running fails as a whole: its controller removes all pods and creates all of them again.
    pub(crate) fn restart_some_job(&mut self) {
        let jobs: Vec<usize> = (0..self.jobs.all.len()).filter(|job| self.runs_whole(*job)).collect();
        if jobs.is_empty() {
            return;
        }
        let job = jobs[self.dice.index(jobs.len())];
        self.played(Played::OwnerRestarts);
        self.note(format_args!("job j{job} is restarted by its owner"));
        let members = self.jobs.all[job].members.iter();
        let pods: Vec<(String, String)> = members.filter_map(|member| member.pod.clone()).collect();
        let mut had = BTreeSet::new();
        for (name, uid) in pods {
            if let Some(pod) = self.api.pod(&name, &uid) {
                had.extend(pod.granted().iter().cloned());
            }
            self.delete_pod(&name, &uid, false);
        }
        self.jobs.all[job].had = had;
    }

    /// Whether it is a Job that states how many pods it has, and all of them run.
    fn runs_whole(&self, job: usize) -> bool {
        let all = &self.jobs.all[job];
        let runs = |number: usize| {
            let pod = self.pod_of(job, number);
            pod.is_some_and(|pod| pod.phase == Phase::Running && !pod.leaving)
        };
        all.ends_with_first && !all.deleted && (0..all.members.len()).all(runs)
    }

    /// A pod of a job is bound: whether the devices that it had before its owner restarted it are its again.
    pub(crate) fn note_continued(&mut self, job: usize, devices: &[String]) {
        let had = std::mem::take(&mut self.jobs.all[job].had);
        if !had.is_empty() && devices.iter().all(|device| had.contains(device)) {
            self.played(Played::Continued);
        }
    }

    /// What an owner of pods says, as the API server has it; `None` if it is not there any more.
    pub(crate) fn owner_object(&self, owner: &OwnerRef) -> Option<Value> {
        let name = &*owner.name;
        match owner.kind {
            OwnerKind::PodGroup => self.pod_group(name),
            OwnerKind::CompositePodGroup => self.composite_pod_group(name),
            _ => self.job_object(name),
        }
    }

    fn pod_group(&self, name: &str) -> Option<Value> {
        let mut trees = self.jobs.all.iter().filter(|job| job.is_tree && !job.deleted);
        let (job, min) = trees.find_map(|job| {
            let mut groups = job.needs.groups.iter().enumerate();
            let (_, min) = groups.find(|(group, _)| job.pod_group(*group) == name)?;
            Some((&job.name, min))
        })?;
        Some(json!({"metadata": {"name": name}, "spec": {"parentCompositePodGroupName": job,
            "disruptionMode": {"all": {}}, "schedulingPolicy": {"gang": {"minCount": min}}}}))
    }

    fn composite_pod_group(&self, name: &str) -> Option<Value> {
        let mut trees = self.jobs.all.iter().filter(|job| job.is_tree && !job.deleted);
        let job = trees.find(|job| job.name == name)?;
        Some(json!({"metadata": {"name": name}, "spec": {"disruptionMode": {"all": {}},
            "schedulingPolicy": {"gang": {"minGroupCount": job.needs.count}}}}))
    }

    fn job_object(&self, name: &str) -> Option<Value> {
        let mut jobs = self.jobs.all.iter();
        let job = jobs.find(|job| job.name == name && (job.over.is_some() || !job.deleted))?;
        let (pods, over) = (job.members.len(), job.over.is_some());
        let over = if over { "True" } else { "False" };
        Some(json!({"metadata": {"name": name}, "spec": {"parallelism": pods, "completions": pods},
            "status": {"conditions": [{"type": "SuccessCriteriaMet", "status": over}]}}))
    }

    /// Somebody else removes his gate.
    fn lift_quota(&mut self, pod: &Pod) {
        let gating = self.jobs.all[pod.job].gating.as_ref();
        let after = gating.and_then(|gating| gating.quota).unwrap_or_default();
        if pod.gates.contains(&Gate::Quota) && self.now >= pod.created + after {
            self.api.remove_gate(&pod.name, &pod.uid, Gate::Quota);
        }
    }

    /// The pod that a member has now.
    fn pod_of(&self, job: usize, member: usize) -> Option<Arc<Pod>> {
        let (name, uid) = self.jobs.all[job].members[member].pod.as_ref()?;
        self.api.pod(name, uid).cloned()
    }

    fn make_pod(&mut self, job: usize, number: usize) {
        let closed = self.jobs.closed;
        let now = self.now;
        let member = &self.jobs.all[job].members[number];
        let wait = match member.again {
            None if !closed => self.replaces_after(member.attempts > 0),
            _ => self.dice.range(0, 1_500),
        };
        // Once nothing fails any more, a job whose pod was lost leaves the next one to the scheduler: otherwise a pod of higher priority could
        // preempt it, and it could take the devices again, without end.
        let learns = self.now >= self.plan.restless && self.jobs.all[job].members[number].attempts > 0;
        let node = match self.jobs.all[job].brought && !learns {
            true => match self.some_node() {
                Some(node) => Some(node),
                None => return,
            },
            false => None,
        };
        let all = &mut self.jobs.all[job];
        // A pod that its node rejects is tried again later.
        let wait = if all.brought { 3 * wait } else { wait };
        let member = &mut all.members[number];
        if closed {
            return;
        }
        if *member.again.get_or_insert(now + wait) > now {
            return;
        }
        member.again = None;
        member.ends = None;
        member.attempts += 1;
        let name = if all.keeps_names {
            format!("{}-{number}", all.name)
        } else {
            format!("{}-{number}-{}", all.name, member.attempts)
        };
        let claim = all.is_gang.then(|| Claim {
            gang: all.gang.clone(),
            group: all.is_tree.then(|| all.pod_group(all.needs.group_of(number))),
            min: (!all.ends_with_first).then_some(all.needs.least()),
            max: all.max,
            // Where nothing is repaired, they would be a contradiction.
            spares: (self.plan.spares && all.repair != Some("ignore")).then_some(1),
            repair: all.repair,
        });
        let priority = if all.mixed && number % 2 == 1 { 0 } else { all.priority };
        let (gpus, preempts) = (all.gpus, all.preempts);
        let gates = match &all.gating {
            None => Vec::new(),
            Some(Gating { quota: None }) => vec![Gate::Ours],
            Some(Gating { quota: Some(_) }) => vec![Gate::Quota, Gate::Ours],
        };
        let uid = self.api.uid(&name);
        self.jobs.all[job].members[number].pod = Some((name.clone(), uid.clone()));
        self.played(Played::PodMade);
        if !gates.is_empty() {
            self.played(Played::PodGated);
        }
        if node.is_some() {
            self.played(Played::Brought);
        }
        self.note(format_args!("pod {uid} is made"));
        self.api.create_pod(Pod {
            uid,
            name,
            rv: 0,
            gpus,
            gang: claim,
            priority,
            preempts,
            created: now,
            node,
            bound: now,
            sent: now,
            grant: None,
            phase: Phase::Pending,
            message: String::new(),
            pokes: 0,
            allocated: Vec::new(),
            leaving: false,
            ends: 0,
            preempted: false,
            nominated: None,
            was_gated: !gates.is_empty(),
            gates,
            job,
            read: Read::default(),
        });
    }

    /// A node that is there, by chance.
    fn some_node(&mut self) -> Option<String> {
        let at = self.dice.index(self.api.nodes.len());
        self.api.nodes.keys().nth(at).cloned()
    }

    /// Somebody deletes a pod, in whatever state it is.
    pub(crate) fn delete_some_pod(&mut self) {
        let live: Vec<Arc<Pod>> = self.api.pods.values().filter(|pod| pod.is_live()).cloned().collect();
        if live.is_empty() {
            return;
        }
        if self.dice.mille(80) {
            // The whole job.
            let job = live[self.dice.index(live.len())].job;
            self.played(Played::JobDeleted);
            self.delete_job(job);
            return;
        }
        let pod = &live[self.dice.index(live.len())];
        let force = self.dice.mille(200);
        self.played(if force { Played::PodForced } else { Played::PodDeleted });
        self.note(format_args!("pod {} is deleted, force {force}", pod.uid));
        self.delete_pod(&pod.name, &pod.uid, force);
    }

    /// A job is deleted with all of its pods.
    pub(crate) fn delete_job(&mut self, job: usize) {
        self.note(format_args!("job j{job} is deleted"));
        self.jobs.all[job].deleted = true;
        let pods: Vec<Arc<Pod>> = self.api.pods.values().filter(|pod| pod.job == job).cloned().collect();
        for pod in pods.into_iter().filter(|pod| pod.is_live()) {
            self.delete_pod(&pod.name, &pod.uid, false);
        }
    }

    /// A pod is deleted: at once if it is not bound or by force, else by its kubelet when its process is gone.
    pub(crate) fn delete_pod(&mut self, name: &str, uid: &str, force: bool) {
        let Some(pod) = self.api.pod(name, uid).cloned() else {
            return;
        };
        if force || pod.node.is_none() || !pod.is_live() {
            self.api.remove_pod(name, uid);
        } else if !pod.leaving {
            let ends = self.now + GRACE;
            self.api.change_pod(name, uid, |pod| {
                pod.leaving = true;
                pod.ends = ends;
            });
        }
    }
}
