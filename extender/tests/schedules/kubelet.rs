//! Nodes: kubelet admits pods in the order of their Bindings, gives them the devices of their grants, and frees them when their processes
//! have ended; the plugin publishes who has what, late by up to a second.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use gantry_topology::{Gpu, Machine, MachineParts, PathClass, PathMatrix};

use crate::api::{Change, Phase, Pod};
use crate::coverage::Played;
use crate::world::{Event, World};

/// The longest pause of a plugin whose writes fail.
const PLUGIN_PAUSES: u64 = 5_000;

/// A node with its kubelet and plugin.
#[derive(Debug)]
pub(crate) struct Kubelet {
    pub(crate) name: String,
    /// As JSON.
    machine: String,
    gpus: u32,
    up: bool,
    /// What its watch has brought and it has not looked at.
    inbox: VecDeque<Change>,
    /// Pods that it has let in or refused, by UID: it does so once, whatever its watch brings of them later.
    judged: BTreeSet<String>,
    processes: BTreeMap<String, Process>,
    sick: BTreeSet<usize>,
    /// Devices that its GpuNode does not list.
    hidden: BTreeSet<usize>,
    publishes: bool,
}

/// The containers of a pod.
#[derive(Debug)]
struct Process {
    pod: Arc<Pod>,
    devices: Vec<usize>,
    /// From when on an extender that is not asleep knows of it, because the plugin has told.
    told: Option<u64>,
    /// Kubelet counts its devices as given.
    counted: bool,
    dies: Option<u64>,
    /// By itself, and well.
    done: bool,
}

impl Process {
    /// Whether who sent something then could know what it has: from its grant, or by the plugin.
    fn was_known(&self, kubelet: &Kubelet, then: u64) -> bool {
        self.has_its_grant(kubelet) || self.was_told(then)
    }

    fn was_told(&self, then: u64) -> bool {
        self.told.is_some_and(|told| then >= told)
    }

    fn has_its_grant(&self, kubelet: &Kubelet) -> bool {
        let granted = self.pod.granted();
        self.devices.iter().all(|gpu| granted.contains(&kubelet.device(*gpu)))
    }
}

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct Kubelets {
    pub(crate) all: Vec<Kubelet>,
}

impl Kubelets {
    /// A kubelet lists its pods again. Returns the pods that it has processes of.
    pub(crate) fn resync(&mut self, node: usize) -> Vec<String> {
        let kubelet = &mut self.all[node];
        kubelet.inbox.clear();
        kubelet.judged.retain(|uid| kubelet.processes.contains_key(uid));
        kubelet.processes.keys().cloned().collect()
    }
}

impl Kubelet {
    pub(crate) fn is_up(&self) -> bool {
        self.up
    }

    pub(crate) fn gpus(&self) -> u32 {
        self.gpus
    }

    fn device(&self, gpu: usize) -> String {
        format!("GPU-{}-{gpu}", self.name)
    }

    fn number(&self, id: &str) -> Option<usize> {
        id.strip_prefix(&format!("GPU-{}-", self.name))?.parse().ok()
    }

    /// Its GpuNode.
    fn object(&self) -> String {
        let Self { name, machine, .. } = self;
        let mut text = format!(
            r#"{{"metadata":{{"name":"{name}"}},"spec":{{"machine":{machine}}},"status":{{"devices":["#
        );
        for (number, gpu) in (0..self.gpus as usize).filter(|gpu| !self.hidden.contains(gpu)).enumerate() {
            let comma = if number > 0 { "," } else { "" };
            let id = self.device(gpu);
            let health = match self.sick.contains(&gpu) {
                true => r#""healthy":false,"reason":"Xid 79""#,
                false => r#""healthy":true"#,
            };
            text += &format!(r#"{comma}{{"id":"{id}","resource":"nvidia.com/gpu","gpu":{gpu},{health}}}"#);
        }
        text += r#"],"holders":["#;
        let holders = self.processes.values().filter(|process| !process.devices.is_empty());
        for (number, process) in holders.enumerate() {
            let comma = if number > 0 { "," } else { "" };
            let ids: Vec<String> = process.devices.iter().map(|gpu| self.device(*gpu)).collect();
            let state = if process.counted { "Live" } else { "Quarantined" };
            let (pod, uid) = (&process.pod.name, &process.pod.uid);
            text += &format!(
                r#"{comma}{{"namespace":"default","pod":"{pod}","uid":"{uid}","resource":"nvidia.com/gpu","devices":{ids:?},"provenance":"PodResources","state":"{state}"}}"#
            );
        }
        text += "]}}";
        text
    }
}

/// GPUs joined by nothing but PCIe.
fn machine(gpus: usize) -> String {
    let parts = MachineParts {
        gpus: (0..gpus).map(|index| Gpu { index: u8::try_from(index).unwrap(), ..Gpu::default() }).collect(),
        paths: PathMatrix::from_fn(gpus, |_, _| PathClass::Node),
        ..MachineParts::default()
    };
    serde_json::to_string(&Machine::new(parts).unwrap()).unwrap()
}

impl World {
    pub(crate) fn draw_nodes(&mut self) {
        let count = self.dice.range(1, 3);
        for number in 0..count {
            let gpus = [2, 4, 4][self.dice.index(3)];
            let kubelet = Kubelet {
                name: format!("n{number}"),
                machine: machine(gpus as usize),
                gpus,
                up: true,
                inbox: VecDeque::new(),
                judged: BTreeSet::new(),
                processes: BTreeMap::new(),
                sick: BTreeSet::new(),
                hidden: BTreeSet::new(),
                publishes: false,
            };
            self.api.write_node(&kubelet.name, gpus);
            self.api.write_gpu_node(&kubelet.name, kubelet.object());
            self.kubelets.all.push(kubelet);
        }
    }

    pub(crate) fn tell_kubelets(&mut self, change: &Change) {
        let (Change::Pod(pod) | Change::PodGone(pod)) = change else {
            return;
        };
        let Some(node) = pod.node.as_ref() else {
            return;
        };
        let Some(number) = self.kubelets.all.iter().position(|kubelet| kubelet.name == *node) else {
            return;
        };
        if !self.kubelets.all[number].up {
            if matches!(change, Change::Pod(_)) {
                // Pods on a node that is gone are removed after a while.
                self.soon(1_000, 5_000, Event::Collect { node: number });
            }
            return;
        }
        self.kubelets.all[number].inbox.push_back(change.clone());
        self.soon(1, 20, Event::Kubelet { node: number });
    }

    /// Kubelet looks at the next thing that its watch has brought.
    pub(crate) fn kubelet(&mut self, node: usize) {
        let Some(change) = self.kubelets.all[node].inbox.pop_front() else {
            return;
        };
        match change {
            Change::Pod(pod) => match self.kubelets.all[node].processes.contains_key(&pod.uid) {
                false if pod.is_live() && !pod.leaving => self.let_in(node, &pod),
                false if pod.leaving => {
                    self.api.remove_pod(&pod.name, &pod.uid);
                }
                true if pod.leaving => self.stop(node, &pod.uid, false),
                _ => {}
            },
            Change::PodGone(pod) => self.stop(node, &pod.uid, true),
            _ => {}
        }
    }

    fn let_in(&mut self, node: usize, pod: &Arc<Pod>) {
        if !self.kubelets.all[node].judged.insert(pod.uid.clone()) {
            return;
        }
        let kubelet = &self.kubelets.all[node];
        let given: BTreeSet<usize> = kubelet
            .processes
            .values()
            .filter(|process| process.counted)
            .flat_map(|process| process.devices.iter().copied())
            .collect();
        let free: BTreeSet<usize> = (0..kubelet.gpus as usize)
            .filter(|gpu| !given.contains(gpu) && !kubelet.sick.contains(gpu))
            .collect();
        let grant = pod.granted();
        let wanted: Option<Vec<usize>> = grant.iter().map(|id| kubelet.number(id)).collect();
        let wanted = wanted.unwrap_or_default();
        let name = kubelet.name.clone();
        let holders = kubelet.processes.values().filter(|process| {
            // What was taken in place of something sick a moment ago nobody could know of.
            process.counted && process.was_known(kubelet, pod.sent)
        });
        let taken = holders.flat_map(|process| process.devices.iter().map(move |gpu| (gpu, process)));
        if let Some((gpu, process)) = taken.into_iter().find(|(gpu, _)| wanted.contains(gpu)) {
            let holder = process.pod.uid.clone();
            self.wrong(format!(
                "pod {} is granted GPU {gpu} of {name}, which kubelet has given to {holder:?}",
                pod.uid
            ));
            return;
        }
        let obtainable = wanted.len() == pod.gpus as usize && wanted.iter().all(|gpu| free.contains(gpu));
        let devices: Vec<usize> = if obtainable {
            wanted
        } else {
            // What no live grant names.
            let named: BTreeSet<String> = self
                .api
                .pods
                .values()
                .filter(|other| other.is_live() && other.uid != pod.uid)
                .flat_map(|other| other.granted().iter().cloned())
                .collect();
            let kubelet = &self.kubelets.all[node];
            let open = free.iter().copied().filter(|gpu| !named.contains(&kubelet.device(*gpu)));
            open.take(pod.gpus as usize).collect()
        };
        if devices.len() < pod.gpus as usize {
            self.played(Played::Rejected);
            self.note(format_args!("pod {} is rejected by kubelet of {name}", pod.uid));
            self.api.change_pod(&pod.name, &pod.uid, |pod| pod.phase = Phase::Failed);
            return;
        }
        self.played(if obtainable { Played::Admitted } else { Played::OtherDevices });
        self.note(format_args!("pod {} is admitted on {name} with {devices:?}", pod.uid));
        let process =
            Process { pod: Arc::clone(pod), devices, told: None, counted: true, dies: None, done: false };
        self.kubelets.all[node].processes.insert(pod.uid.clone(), process);
        let uid = pod.uid.clone();
        self.soon(20, 1_500, Event::Running { node, uid });
        self.will_publish(node);
    }

    /// Its containers run, and its status says with which devices.
    pub(crate) fn running(&mut self, node: usize, uid: &str) {
        let kubelet = &self.kubelets.all[node];
        let Some(process) = kubelet.processes.get(uid).filter(|process| process.dies.is_none()) else {
            return;
        };
        if self.now < self.stalled {
            let uid = uid.to_owned();
            self.at(self.stalled + 50, Event::Running { node, uid });
            return;
        }
        let ids = process.devices.iter().map(|gpu| kubelet.device(*gpu)).collect();
        let name = process.pod.name.clone();
        self.api.change_pod(&name, uid, |pod| {
            pod.phase = Phase::Running;
            pod.allocated = ids;
        });
    }

    /// A pod is being deleted, or was by force: its processes end in a while.
    pub(crate) fn stop(&mut self, node: usize, uid: &str, gone: bool) {
        let slow = self.plan.preemption && self.dice.mille(150);
        let lives = self.dice.range(0, if slow { 20_000 } else { 2_500 });
        let now = self.now;
        let Some(process) = self.kubelets.all[node].processes.get_mut(uid) else {
            return;
        };
        // Kubelet counts the devices of a pod that is gone as free at once.
        process.counted &= !gone;
        process.dies.get_or_insert(now + lives);
        self.after(lives, Event::Collect { node });
        self.will_publish(node);
    }

    /// A process has done what it was to do.
    pub(crate) fn finish_process(&mut self, uid: &str) {
        let late = self.dice.range(1, 1_000);
        let now = self.now;
        for (node, kubelet) in self.kubelets.all.iter_mut().enumerate() {
            if let Some(process) = kubelet.processes.get_mut(uid)
                && process.dies.is_none()
            {
                process.dies = Some(now + late);
                process.done = true;
                self.after(late, Event::Collect { node });
                return;
            }
        }
    }

    /// Processes that have ended are cleared away; of a node that is gone, its pods.
    pub(crate) fn collect(&mut self, node: usize) {
        if self.now < self.stalled {
            self.at(self.stalled + 20, Event::Collect { node });
            return;
        }
        let now = self.now;
        let kubelet = &mut self.kubelets.all[node];
        if !kubelet.up {
            let name = kubelet.name.clone();
            let pods: Vec<Arc<Pod>> =
                self.api.pods.values().filter(|pod| pod.node.as_deref() == Some(&name)).cloned().collect();
            for pod in pods {
                self.api.remove_pod(&pod.name, &pod.uid);
            }
            return;
        }
        let ended: Vec<String> = kubelet
            .processes
            .iter()
            .filter(|(_, process)| process.dies.is_some_and(|dies| dies <= now))
            .map(|(uid, _)| uid.clone())
            .collect();
        for uid in ended {
            let Some(process) = self.kubelets.all[node].processes.remove(&uid) else {
                continue;
            };
            let name = process.pod.name.clone();
            let leaving = self.api.pod(&name, &uid).is_some_and(|pod| pod.leaving);
            // Of others it may write no status.
            let own = &self.kubelets.all[node].name;
            let is_own = self.api.pod(&name, &uid).is_none_or(|pod| pod.node.as_ref() == Some(own));
            if leaving {
                self.api.remove_pod(&name, &uid);
            } else if process.done && is_own {
                self.api.change_pod(&name, &uid, |pod| pod.phase = Phase::Succeeded);
                self.note_done(&uid);
            } else if let Some(pod) = self.api.pod(&name, &uid).cloned()
                && pod.is_live()
            {
                // Its Binding is gone, because etcd was restored. It may be bound here again.
                self.kubelets.all[node].judged.remove(&uid);
                if pod.node.as_ref() == Some(&self.kubelets.all[node].name) {
                    self.let_in(node, &pod);
                }
            }
            self.will_publish(node);
        }
    }

    pub(crate) fn will_publish(&mut self, node: usize) {
        if !std::mem::replace(&mut self.kubelets.all[node].publishes, true) {
            self.soon(10, 1_000, Event::Publish { node });
        }
    }

    /// The plugin writes what is true.
    pub(crate) fn publish(&mut self, node: usize) {
        if self.now < self.stalled {
            let again = self.stalled + self.dice.range(30, PLUGIN_PAUSES);
            self.at(again, Event::Publish { node });
            return;
        }
        let now = self.now;
        let kubelet = &mut self.kubelets.all[node];
        kubelet.publishes = false;
        if !kubelet.up {
            return;
        }
        let healthy = kubelet.gpus - u32::try_from(kubelet.sick.len()).unwrap();
        let (name, object) = (kubelet.name.clone(), kubelet.object());
        let known = now + self.plan.hostile.news_take();
        for process in kubelet.processes.values_mut() {
            process.told.get_or_insert(known);
        }
        self.api.write_gpu_node(&name, object);
        self.api.write_node(&name, healthy);
    }

    /// A node is lost: its processes are dead.
    pub(crate) fn lose_node(&mut self) {
        let node = self.dice.index(self.kubelets.all.len());
        let kubelet = &mut self.kubelets.all[node];
        if !kubelet.up {
            return;
        }
        kubelet.up = false;
        kubelet.processes.clear();
        kubelet.inbox.clear();
        // It starts anew: pods that a restored etcd has unbound come again under the same UID.
        kubelet.judged.clear();
        let name = kubelet.name.clone();
        self.played(Played::NodeLost);
        self.note(format_args!("node {name} is lost"));
        self.api.remove_node(&name);
        self.api.remove_gpu_node(&name);
        self.soon(1_000, 5_000, Event::Collect { node });
        let long = if self.plan.is_short_of_patience() { 120_000 } else { 40_000 };
        self.soon(8_000, long, Event::NodeIsBack { node });
    }

    pub(crate) fn node_is_back(&mut self, node: usize) {
        if self.kubelets.all[node].up {
            return;
        }
        if self.now < self.stalled {
            self.at(self.stalled + 10, Event::NodeIsBack { node });
            return;
        }
        self.collect(node);
        let kubelet = &mut self.kubelets.all[node];
        kubelet.up = true;
        kubelet.sick.clear();
        let (name, gpus, object) = (kubelet.name.clone(), kubelet.gpus, kubelet.object());
        self.note(format_args!("node {name} is back"));
        self.api.write_node(&name, gpus);
        self.api.write_gpu_node(&name, object);
    }

    pub(crate) fn break_gpu(&mut self) {
        let node = self.dice.index(self.kubelets.all.len());
        let gpu = self.dice.index(self.kubelets.all[node].gpus as usize);
        if !self.kubelets.all[node].up {
            return;
        }
        self.kubelets.all[node].sick.insert(gpu);
        let name = self.kubelets.all[node].name.clone();
        self.played(Played::GpuSick);
        self.note(format_args!("GPU {gpu} of {name} is sick"));
        self.will_publish(node);
        self.soon(3_000, 40_000, Event::Heal { node, gpu });
    }

    pub(crate) fn heal(&mut self, node: usize, gpu: usize) {
        self.kubelets.all[node].sick.remove(&gpu);
        self.will_publish(node);
    }

    /// The GpuNode of a node lacks a device for a while, which kubelet has all the same.
    pub(crate) fn hide_device(&mut self) {
        let node = self.dice.index(self.kubelets.all.len());
        let kubelet = &mut self.kubelets.all[node];
        let gpu = self.dice.index(kubelet.gpus as usize);
        kubelet.hidden.insert(gpu);
        let name = kubelet.name.clone();
        self.played(Played::DeviceHidden);
        self.note(format_args!("GpuNode {name} does not list GPU {gpu}"));
        self.will_publish(node);
        self.soon(1_000, 40_000, Event::Unhide { node, gpu });
    }

    pub(crate) fn unhide(&mut self, node: usize, gpu: usize) {
        self.kubelets.all[node].hidden.remove(&gpu);
        self.will_publish(node);
    }

    /// Another client deletes a GpuNode; the plugin writes it again.
    pub(crate) fn lose_inventory(&mut self) {
        let node = self.dice.index(self.kubelets.all.len());
        let name = self.kubelets.all[node].name.clone();
        self.played(Played::InventoryGone);
        self.note(format_args!("GpuNode {name} is deleted"));
        self.api.remove_gpu_node(&name);
        self.will_publish(node);
    }

    pub(crate) fn calm_nodes(&mut self) {
        for node in 0..self.kubelets.all.len() {
            self.node_is_back(node);
            self.kubelets.all[node].sick.clear();
            self.kubelets.all[node].hidden.clear();
            self.will_publish(node);
        }
    }

    /// Devices of a node that a process or a live grant of another pod has, as far as `run` could know when it `sent` its Binding.
    pub(crate) fn used_by_others(&self, node: &str, uid: &str, run: u32, sent: u64) -> Vec<(String, String)> {
        let mut used = Vec::new();
        let Some(kubelet) = self.kubelets.all.iter().find(|kubelet| kubelet.name == node) else {
            return used;
        };
        for process in kubelet.processes.values() {
            // The process of one that has done its work is gone; only its phase is not written yet.
            let lives = !process.done && process.dies.is_none_or(|dies| dies > self.now);
            if process.pod.uid == uid || !lives || self.was_nobodys_news(process, run, sent) {
                continue;
            }
            // What kubelet has taken in place of what was granted, for that had fallen sick, nobody else knows at once.
            let told = process.was_told(sent);
            let granted = process.pod.granted();
            let devices = process.devices.iter().map(|gpu| kubelet.device(*gpu));
            let known = devices.filter(|device| told || granted.contains(device));
            used.extend(known.map(|device| (device, process.pod.uid.clone())));
        }
        for pod in self.api.pods.values() {
            // Once it is told what a pod has, by itself or by the plugin, its grant is but what it was to have.
            let process = kubelet.processes.get(&pod.uid);
            let deviates = process.is_some_and(|process| {
                let told = process.told.is_some() || !pod.allocated.is_empty();
                told && !process.has_its_grant(kubelet)
            });
            // Of a node that is gone only the pod tells.
            let deviates = deviates || process.is_none() && pod.was_given_others();
            if pod.uid != uid && pod.is_live() && pod.node.as_deref() == Some(node) && !deviates {
                used.extend(pod.granted().iter().map(|id| (id.clone(), pod.uid.clone())));
            }
        }
        used
    }

    /// Whether nothing in the cluster told `run` of a process: its pod was deleted by force before `run` had seen it bound, and the plugin
    /// could not write yet that the process is still there.
    fn was_nobodys_news(&self, process: &Process, run: u32, sent: u64) -> bool {
        let Pod { name, uid, .. } = &*process.pod;
        self.api.pod(name, uid).is_none() && !process.was_told(sent) && !self.extenders.knew(run, uid)
    }
}
