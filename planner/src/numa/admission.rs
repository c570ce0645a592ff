//! Kubelet's admission of a pod.

use gantry_api::TopologyManagerScope;

use super::pod::Step;
use super::{Nodes, NumaNode, NumaState, PodAlignment};
use crate::devices::DeviceSet;
use crate::request::{ContainerAsk, NumaNeeds};

/// Kubelet's admission of a pod, one container after the other. Containers without devices count for their CPUs and memory.
#[derive(Debug, Clone)]
pub struct Admission<'a> {
    pod: &'a PodAlignment<'a>,
    /// The number of containers that are admitted, of those that kubelet aligns.
    admitted: usize,
    /// By resource.
    available: Vec<DeviceSet>,
    /// Devices that finished init containers left, by resource.
    reusable: Vec<DeviceSet>,
    numa: NumaState,
    /// The nodes of all containers, in the scope `pod`.
    whole: Option<Nodes>,
}

impl<'a> Admission<'a> {
    /// The admission of a pod on a node with these free devices of each resource; `None` if kubelet refuses the pod
    /// before a container with devices.
    pub(super) fn new(pod: &'a PodAlignment<'a>, free: &[&DeviceSet]) -> Option<Self> {
        let common = pod.common();
        let counts_numa = pod.steps.iter().any(|step| !step.needs.is_none());
        let mut admission = Self {
            pod,
            admitted: 0,
            available: free.iter().copied().cloned().collect(),
            reusable: vec![DeviceSet::EMPTY; free.len()],
            numa: if counts_numa { NumaState::of(common) } else { NumaState::default() },
            whole: None,
        };
        if common.scope == TopologyManagerScope::Pod {
            admission.whole = Some(admission.best_hint(&pod.all_sizes(), pod.needs())?);
        }
        admission.pass_containers_without_devices().then_some(admission)
    }

    /// The next container that kubelet aligns.
    fn next(&self) -> Option<&'a Step> {
        self.pod.steps.get(self.admitted)
    }

    /// The next container with devices, in the ask of each resource; empty after the last one.
    pub fn containers(&self) -> Vec<Option<&'a ContainerAsk>> {
        self.next().map_or_else(Vec::new, |step| self.pod.containers_of(step))
    }

    /// The available devices of a resource on each NUMA node that the next container is aligned with; `None` if kubelet
    /// refuses it.
    pub fn offered(&self, resource: usize) -> Option<Vec<DeviceSet>> {
        let nodes = self.nodes()?;
        let (alignment, _) = self.pod.resources.get(resource)?;
        let available = self.available.get(resource)?;
        let each = (0..alignment.nodes.len()).map(|node| 1 << node).filter(|node| nodes & node != 0);
        let of_node = |node| available.iter().filter(move |device| alignment.is_in(*device, node));
        Some(each.map(|node| of_node(node).collect()).collect())
    }

    /// The NUMA nodes that the next container is aligned with; `None` if kubelet refuses it.
    pub(super) fn nodes(&self) -> Option<Nodes> {
        let step = self.next()?;
        self.whole.or_else(|| self.best_hint(&self.pod.sizes_of(step), step.needs))
    }

    /// `sizes`: the devices of each resource.
    fn best_hint(&self, sizes: &[u32], needs: NumaNeeds) -> Option<Nodes> {
        self.pod.best_hint(self.available.iter().zip(&self.reusable), sizes, &self.numa, needs)
    }

    /// Admits the next container with these devices of each resource, and those without devices that follow it; whether
    /// kubelet does. Which of the devices left by init containers it has in addition is unknown.
    pub fn admit(&mut self, devices: &[DeviceSet]) -> bool {
        let Some(next) = self.next() else {
            return true;
        };
        if !self.take(next) {
            return false;
        }
        for (resource, (ask, index)) in self.pod.asks().zip(&next.containers).enumerate() {
            let container = index.and_then(|index| Some((index, ask.containers.get(index)?)));
            let (Some((index, container)), Some(devices)) = (container, devices.get(resource)) else {
                continue;
            };
            if let Some(available) = self.available.get_mut(resource) {
                available.remove(devices);
            }
            // Only an init container returns its devices, to the containers after it.
            let mut later = ask.containers.iter().skip(index + 1);
            let is_left = later.any(|later| {
                later.any_of_held > 0 || container.blocks.iter().any(|block| later.blocks.contains(block))
            });
            if let Some(reusable) = self.reusable.get_mut(resource).filter(|_| container.any_of_held == 0) {
                *reusable = if is_left { devices.clone() } else { DeviceSet::EMPTY };
            }
        }
        self.advance();
        self.pass_containers_without_devices()
    }

    fn advance(&mut self) {
        self.admitted += 1;
        if self.next().is_some_and(|next| next.is_first) {
            self.numa.forget_reusable();
        }
    }

    fn pass_containers_without_devices(&mut self) -> bool {
        while let Some(next) = self.next().filter(|next| next.containers.iter().all(Option::is_none)) {
            if !self.take(next) {
                return false;
            }
            self.advance();
        }
        true
    }

    /// What is left of the NUMA nodes; empty if that is not counted.
    pub(super) fn left(self) -> Vec<NumaNode> {
        self.numa.nodes
    }

    /// Takes what a container needs of the NUMA nodes; whether it can.
    fn take(&mut self, container: &Step) -> bool {
        if container.needs.is_none() {
            return true;
        }
        let NumaNeeds { cpus, memory } = container.needs;
        if self.pod.common().splits_core(cpus) {
            return false;
        }
        let Some(nodes) = self.nodes() else {
            return false;
        };
        if cpus > 0 {
            self.numa.take_cpus(nodes, container.kind, cpus);
        }
        if memory > 0 {
            self.numa.take_memory(nodes, container.kind, memory);
        }
        true
    }
}
