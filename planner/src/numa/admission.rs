//! Kubelet's admission of a pod.

use gantry_api::TopologyManagerScope;

use super::{Alignment, Nodes, NumaNode, NumaState, State};
use crate::devices::DeviceSet;
use crate::request::{Ask, ContainerAsk, NumaDemand, NumaNeeds};

/// Kubelet's admission of a pod, one container after the other. Containers without devices count for their CPUs and memory.
#[derive(Debug, Clone)]
pub struct Admission<'a> {
    alignment: &'a Alignment,
    ask: &'a Ask,
    /// The number of containers that are admitted, of those that kubelet aligns.
    admitted: usize,
    available: DeviceSet,
    /// Devices that finished init containers left.
    reusable: DeviceSet,
    /// What the containers need of the NUMA nodes; empty if that is not counted.
    demands: Vec<NumaDemand>,
    numa: NumaState,
    /// The nodes of all containers, in the scope `pod`.
    whole: Option<Nodes>,
}

impl<'a> Admission<'a> {
    /// The admission of a pod on a node with these free devices; `None` if kubelet refuses the pod before a container
    /// with devices.
    pub fn new(alignment: &'a Alignment, free: &DeviceSet, ask: &'a Ask) -> Option<Self> {
        let demands = alignment.counted(&ask.numa);
        let numa = if demands.is_empty() { NumaState::default() } else { NumaState::of(alignment) };
        let (available, reusable) = (free.clone(), DeviceSet::EMPTY);
        let mut admission =
            Self { alignment, ask, admitted: 0, available, reusable, demands, numa, whole: None };
        if alignment.scope == TopologyManagerScope::Pod {
            let needs = NumaDemand::of_pod(&admission.demands);
            admission.whole = Some(admission.best_hint(ask.devices, needs)?);
        }
        admission.pass_containers_without_devices().then_some(admission)
    }

    /// The next container with devices.
    pub fn container(&self) -> Option<&'a ContainerAsk> {
        self.ask.containers.get(self.next()?.container?)
    }

    /// The next container that kubelet aligns.
    fn next(&self) -> Option<NumaDemand> {
        match self.demands.is_empty() {
            true if self.admitted < self.ask.containers.len() => Some(NumaDemand::none(self.admitted)),
            true => None,
            false => self.demands.get(self.admitted).copied(),
        }
    }

    /// The available devices of each NUMA node that the next container is aligned with; `None` if kubelet refuses it.
    pub fn offered(&self) -> Option<Vec<DeviceSet>> {
        let nodes = self.nodes()?;
        let each = (0..self.alignment.nodes.len()).map(|node| 1 << node).filter(|node| nodes & node != 0);
        let of_node = |node| self.available.iter().filter(move |device| self.alignment.is_in(*device, node));
        Some(each.map(|node| of_node(node).collect()).collect())
    }

    /// The NUMA nodes that the next container is aligned with; `None` if kubelet refuses it.
    pub(super) fn nodes(&self) -> Option<Nodes> {
        let size = self.container().map_or(0, |container| container.devices(&self.ask.blocks));
        let needs = self.next()?.needs;
        self.whole.or_else(|| self.best_hint(size, needs))
    }

    fn best_hint(&self, size: u32, needs: NumaNeeds) -> Option<Nodes> {
        let state = State { available: &self.available, reusable: &self.reusable, numa: &self.numa };
        self.alignment.best_hint(state, size as usize, needs)
    }

    /// Admits the next container with the devices of its blocks, and those without devices that follow it; whether
    /// kubelet does. Which of the devices left by init containers it has in addition is unknown.
    pub fn admit(&mut self, devices: &DeviceSet) -> bool {
        let Some((next, container)) = self.next().zip(self.container()) else {
            return true;
        };
        if !self.take(next) {
            return false;
        }
        self.available.remove(devices);
        // Only an init container returns its devices, to the containers after it.
        let after = next.container.map_or(0, |index| index + 1);
        let mut later = self.ask.containers.iter().skip(after);
        let is_left = later.any(|later| {
            later.any_of_held > 0 || container.blocks.iter().any(|block| later.blocks.contains(block))
        });
        if container.any_of_held == 0 {
            self.reusable = if is_left { devices.clone() } else { DeviceSet::EMPTY };
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
        while let Some(next) = self.next().filter(|next| next.container.is_none()) {
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
    fn take(&mut self, container: NumaDemand) -> bool {
        if container.needs.is_none() {
            return true;
        }
        let NumaNeeds { cpus, memory } = container.needs;
        if self.alignment.splits_core(cpus) {
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
