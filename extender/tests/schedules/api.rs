//! The API server: objects with resourceVersions, preconditions and conflicts, and a watch log per kind. Everything is done in the order in
//! which it arrives.

mod pod;

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use gantry_api::{GangSpec, GangStatus};
use gantry_extender::index::Source;
use gantry_planner::inventory::Inventory;

pub(crate) use pod::{Claim, Gate, Phase, Pod, Read};

/// A Gang object.
#[derive(Debug, Clone)]
pub(crate) struct Gang {
    pub(crate) uid: String,
    pub(crate) name: String,
    pub(crate) rv: u64,
    pub(crate) ours: bool,
    pub(crate) spec: GangSpec,
    pub(crate) status: Arc<GangStatus>,
}

/// A GpuNode, as it is sent and as the extender reads it.
#[derive(Debug)]
pub(crate) struct GpuNode {
    pub(crate) text: String,
    inventory: OnceLock<Inventory>,
}

impl GpuNode {
    pub(crate) fn inventory(&self) -> &Inventory {
        let read = || crate::extender::read_gpu_node(&self.text);
        self.inventory.get_or_init(read)
    }
}

/// Something a watch brings.
#[derive(Debug, Clone)]
pub(crate) enum Change {
    Pod(Arc<Pod>),
    PodGone(Arc<Pod>),
    Node(String, u32),
    NodeGone(String),
    GpuNode(String, Arc<GpuNode>),
    GpuNodeGone(String),
    Gang(Arc<Gang>),
    GangGone(String),
}

impl Change {
    pub(crate) fn source(&self) -> Source {
        match self {
            Self::Pod(_) | Self::PodGone(_) => Source::Pods,
            Self::Node(..) | Self::NodeGone(_) => Source::Nodes,
            Self::GpuNode(..) | Self::GpuNodeGone(_) => Source::GpuNodes,
            Self::Gang(_) | Self::GangGone(_) => Source::Gangs,
        }
    }
}

/// What etcd keeps.
#[derive(Debug)]
pub(crate) struct Etcd {
    pods: BTreeMap<String, Arc<Pod>>,
    nodes: BTreeMap<String, u32>,
    gpu_nodes: BTreeMap<String, Arc<GpuNode>>,
    gangs: BTreeMap<String, Arc<Gang>>,
}

/// How a request ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Status {
    Done,
    Conflict,
    Missing,
    /// Not now, for no fault of the request: a disruption budget, or the server has too much to do.
    Refused,
}

/// The objects. What changes is noted for the watches.
#[derive(Debug, Default)]
pub(crate) struct Api {
    pub(crate) pods: BTreeMap<String, Arc<Pod>>,
    pub(crate) nodes: BTreeMap<String, u32>,
    pub(crate) gpu_nodes: BTreeMap<String, Arc<GpuNode>>,
    pub(crate) gangs: BTreeMap<String, Arc<Gang>>,
    pub(crate) changes: Vec<Change>,
    rv: u64,
    uids: u64,
}

impl Api {
    pub(crate) fn backup(&self) -> Etcd {
        Etcd {
            pods: self.pods.clone(),
            nodes: self.nodes.clone(),
            gpu_nodes: self.gpu_nodes.clone(),
            gangs: self.gangs.clone(),
        }
    }

    /// The objects are as they were; no watch shows it, and versions are not given twice.
    pub(crate) fn restore(&mut self, etcd: Etcd) {
        let Etcd { pods, nodes, gpu_nodes, gangs } = etcd;
        (self.pods, self.nodes, self.gpu_nodes, self.gangs) = (pods, nodes, gpu_nodes, gangs);
    }

    pub(crate) fn version(&mut self) -> u64 {
        self.rv += 1;
        self.rv
    }

    pub(crate) fn uid(&mut self, of: &str) -> String {
        self.uids += 1;
        format!("{of}-{}", self.uids)
    }

    /// The pod of a UID.
    pub(crate) fn pod(&self, name: &str, uid: &str) -> Option<&Arc<Pod>> {
        self.pods.get(name).filter(|pod| pod.uid == uid)
    }

    /// Changes a pod, if it is there.
    pub(crate) fn change_pod(&mut self, name: &str, uid: &str, change: impl FnOnce(&mut Pod)) -> Status {
        if self.pod(name, uid).is_none() {
            return Status::Missing;
        }
        let rv = self.version();
        let Some(pod) = self.pods.get_mut(name) else {
            return Status::Missing;
        };
        let new = Arc::make_mut(pod);
        new.read = new.read.next();
        change(new);
        new.rv = rv;
        self.changes.push(Change::Pod(Arc::clone(pod)));
        Status::Done
    }

    pub(crate) fn create_pod(&mut self, mut pod: Pod) -> Status {
        if self.pods.contains_key(&pod.name) {
            return Status::Conflict;
        }
        pod.rv = self.version();
        let pod = Arc::new(pod);
        self.pods.insert(pod.name.clone(), Arc::clone(&pod));
        self.changes.push(Change::Pod(pod));
        Status::Done
    }

    /// Removes a pod at once.
    pub(crate) fn remove_pod(&mut self, name: &str, uid: &str) -> Status {
        if self.pod(name, uid).is_none() {
            return Status::Missing;
        }
        self.version();
        if let Some(pod) = self.pods.remove(name) {
            self.changes.push(Change::PodGone(pod));
        }
        Status::Done
    }

    /// A Binding with a UID as precondition, its annotation merged in the same write. Neither node nor annotation are checked.
    pub(crate) fn bind(
        &mut self,
        name: &str,
        uid: &str,
        node: &str,
        grant: Option<&Arc<str>>,
        (sent, now): (u64, u64),
    ) -> Status {
        let Some(pod) = self.pods.get(name) else {
            return Status::Missing;
        };
        let kept_back = pod.leaving || !pod.is_live() || !pod.gates.is_empty();
        if pod.uid != uid || pod.node.is_some() || kept_back {
            return Status::Conflict;
        }
        self.change_pod(name, uid, |pod| {
            pod.node = Some(node.to_owned());
            pod.grant = grant.cloned();
            (pod.sent, pod.bound) = (sent, now);
        })
    }

    /// Removes a scheduling gate; from no other pod of the name.
    pub(crate) fn remove_gate(&mut self, name: &str, uid: &str, gate: Gate) -> Status {
        match self.pod(name, uid) {
            None => Status::Missing,
            Some(pod) if !pod.gates.contains(&gate) => Status::Conflict,
            Some(_) => self.change_pod(name, uid, |pod| pod.gates.retain(|other| *other != gate)),
        }
    }

    pub(crate) fn write_node(&mut self, name: &str, gpus: u32) {
        if self.nodes.insert(name.to_owned(), gpus) != Some(gpus) {
            self.changes.push(Change::Node(name.to_owned(), gpus));
        }
    }

    pub(crate) fn remove_node(&mut self, name: &str) {
        if self.nodes.remove(name).is_some() {
            self.changes.push(Change::NodeGone(name.to_owned()));
        }
    }

    pub(crate) fn write_gpu_node(&mut self, name: &str, text: String) {
        if self.gpu_nodes.get(name).is_some_and(|known| known.text == text) {
            return;
        }
        let object = Arc::new(GpuNode { text, inventory: OnceLock::new() });
        self.gpu_nodes.insert(name.to_owned(), Arc::clone(&object));
        self.changes.push(Change::GpuNode(name.to_owned(), object));
    }

    pub(crate) fn remove_gpu_node(&mut self, name: &str) {
        if self.gpu_nodes.remove(name).is_some() {
            self.changes.push(Change::GpuNodeGone(name.to_owned()));
        }
    }

    pub(crate) fn create_gang(&mut self, name: &str) -> Status {
        if self.gangs.contains_key(name) {
            return Status::Conflict;
        }
        let gang = Gang {
            uid: self.uid("gang"),
            name: name.to_owned(),
            rv: self.version(),
            ours: true,
            spec: GangSpec::default(),
            status: Arc::default(),
        };
        self.put_gang(gang);
        Status::Done
    }

    /// Writes a status over a version.
    pub(crate) fn write_status(
        &mut self,
        name: &str,
        uid: &str,
        over: u64,
        status: &Arc<GangStatus>,
    ) -> Status {
        let Some(gang) = self.gangs.get(name) else {
            return Status::Missing;
        };
        if gang.uid != uid || gang.rv != over {
            return Status::Conflict;
        }
        if gang.status == *status {
            // Nothing changes, not even the version.
            return Status::Done;
        }
        let mut gang = Gang::clone(gang);
        gang.status = Arc::clone(status);
        gang.rv = self.version();
        self.put_gang(gang);
        Status::Done
    }

    /// Somebody writes a Gang object who is no extender: a person's label, say.
    pub(crate) fn touch_gang(&mut self, name: &str) {
        if let Some(gang) = self.gangs.get(name) {
            let mut gang = Gang::clone(gang);
            gang.rv = self.version();
            self.put_gang(gang);
        }
    }

    pub(crate) fn remove_gang(&mut self, name: &str, uid: &str) -> Status {
        match self.gangs.get(name) {
            None => Status::Missing,
            Some(gang) if gang.uid != uid => Status::Conflict,
            Some(_) => {
                self.gangs.remove(name);
                self.changes.push(Change::GangGone(name.to_owned()));
                Status::Done
            }
        }
    }

    fn put_gang(&mut self, gang: Gang) {
        let gang = Arc::new(gang);
        self.gangs.insert(gang.name.clone(), Arc::clone(&gang));
        self.changes.push(Change::Gang(gang));
    }

    /// All objects of a kind, as a list shows them.
    pub(crate) fn list(&self, source: Source) -> Vec<Change> {
        match source {
            Source::Pods => self.pods.values().cloned().map(Change::Pod).collect(),
            Source::Nodes => {
                self.nodes.iter().map(|(name, gpus)| Change::Node(name.clone(), *gpus)).collect()
            }
            Source::GpuNodes => self
                .gpu_nodes
                .iter()
                .map(|(name, object)| Change::GpuNode(name.clone(), Arc::clone(object)))
                .collect(),
            Source::Gangs => self.gangs.values().cloned().map(Change::Gang).collect(),
        }
    }
}
