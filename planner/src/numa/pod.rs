//! The alignment of all resources of a pod: kubelet merges the hints of all that a container asks for.

use std::borrow::Cow;

use gantry_api::TopologyManagerScope;

use super::{
    Admission, Alignment, ContainerDemand, MAX_NODES, NO_DEVICES, Nodes, NumaNode, NumaState, named,
};
use crate::devices::DeviceSet;
use crate::request::{Ask, ContainerAsk, ContainerKind, NumaDemand, NumaNeeds};

/// How kubelet aligns the devices of each resource that a pod asks for, with each other and with its CPUs and memory.
#[derive(Debug, Clone)]
pub struct PodAlignment<'a> {
    /// All with the same numbers of nodes.
    pub(super) resources: Vec<(Cow<'a, Alignment>, &'a Ask)>,
    /// The containers that kubelet aligns, in its order.
    pub(super) steps: Vec<Step>,
    /// The one of `resources` that has the CPUs and the memory, if one has.
    common: usize,
}

/// A container that kubelet aligns.
#[derive(Debug, Clone)]
pub(super) struct Step {
    /// Its place in the ask of each resource.
    pub(super) containers: Vec<Option<usize>>,
    pub(super) kind: ContainerKind,
    pub(super) needs: NumaNeeds,
    /// It is the first container of its pod.
    pub(super) is_first: bool,
}

impl<'a> PodAlignment<'a> {
    /// That of a pod, or a part of it, with one resource.
    pub fn single(alignment: &'a Alignment, ask: &'a Ask) -> Self {
        let counted = alignment.counted(&ask.numa);
        let step = |demand: NumaDemand| Step {
            containers: vec![demand.container],
            kind: demand.kind,
            needs: demand.needs,
            is_first: demand.is_first,
        };
        let steps = match counted.is_empty() {
            true => (0..ask.containers.len()).map(NumaDemand::none).map(step).collect(),
            false => counted.into_iter().map(step).collect(),
        };
        Self { resources: vec![(Cow::Borrowed(alignment), ask)], steps, common: 0 }
    }

    /// That of a pod with several resources; `None` if its containers are not known ([`Ask::numa`]), or the devices
    /// have too many NUMA nodes.
    pub fn joint(resources: &[(&'a Alignment, &'a Ask)]) -> Option<Self> {
        let mut nodes: Vec<u32> = resources.iter().flat_map(|(of, _)| of.nodes.iter().copied()).collect();
        nodes.sort_unstable();
        nodes.dedup();
        let listed = resources.first()?.1.numa.len();
        if nodes.len() > MAX_NODES || listed == 0 || resources.iter().any(|(_, ask)| ask.numa.len() != listed)
        {
            return None;
        }
        let common = resources.iter().position(|(alignment, _)| alignment.counts_numa()).unwrap_or(0);
        let (counting, of_common) = resources.get(common)?;
        let needs = counting.counted_needs();
        let mut steps: Vec<Step> = Vec::with_capacity(listed);
        let mut is_first = false;
        for (at, demand) in of_common.numa.iter().enumerate() {
            let each = resources.iter().map(|(_, ask)| ask.numa.get(at).and_then(|demand| demand.container));
            let (containers, needs) = (each.collect::<Vec<_>>(), needs(demand));
            is_first |= demand.is_first;
            if containers.iter().any(Option::is_some) || !needs.is_none() {
                steps.push(Step {
                    containers,
                    kind: demand.kind,
                    needs,
                    is_first: std::mem::take(&mut is_first),
                });
            }
        }
        let resources = resources.iter().map(|(alignment, ask)| (alignment.numbered(&nodes), *ask));
        Some(Self { resources: resources.collect(), steps, common })
    }

    /// The alignment with the policy, the CPUs and the memory.
    pub(super) fn common(&self) -> &Alignment {
        // There is one at least.
        &self.resources[self.common].0
    }

    /// What the pod asks for of each resource.
    pub fn asks(&self) -> impl Iterator<Item = &'a Ask> {
        self.resources.iter().map(|(_, ask)| *ask)
    }

    pub(super) fn containers_of(&self, step: &Step) -> Vec<Option<&'a ContainerAsk>> {
        self.asks().zip(&step.containers).map(|(ask, index)| ask.containers.get((*index)?)).collect()
    }

    /// The devices of each resource that a container asks for.
    pub(super) fn sizes_of(&self, step: &Step) -> Vec<u32> {
        let each = self.containers_of(step).into_iter().zip(self.asks());
        each.map(|(container, ask)| container.map_or(0, |container| container.devices(&ask.blocks))).collect()
    }

    /// The CPUs and the memory of the whole pod.
    pub(super) fn needs(&self) -> NumaNeeds {
        NumaDemand::needs_of(self.steps.iter().map(|step| (step.kind, step.needs)))
    }

    /// Whether kubelet fails pods that it cannot align.
    pub fn refuses(&self) -> bool {
        self.common().refuses()
    }

    /// The admission of the pod on a node with these free devices of each resource; `None` if kubelet refuses the pod
    /// before a container with devices.
    pub fn admission(&self, free: &[&DeviceSet]) -> Option<Admission<'_>> {
        Admission::new(self, free)
    }

    /// Whether kubelet admits the pod with these devices of each block of each ask, and can be steered to them.
    pub fn admits(&self, free: &[&DeviceSet], blocks: &[&[DeviceSet]]) -> bool {
        self.admitted(free, blocks).is_some()
    }

    /// What is left of the NUMA nodes once kubelet has admitted the pod; `None` if it does not, see
    /// [`PodAlignment::admits`].
    pub fn left(&self, free: &[&DeviceSet], blocks: &[&[DeviceSet]]) -> Option<Vec<NumaNode>> {
        self.admitted(free, blocks).map(Admission::left)
    }

    fn admitted(&self, free: &[&DeviceSet], blocks: &[&[DeviceSet]]) -> Option<Admission<'_>> {
        let mut admission = self.admission(free)?;
        loop {
            let containers = admission.containers();
            if containers.is_empty() {
                return Some(admission);
            }
            let devices = containers.iter().zip(blocks).map(|(container, blocks)| {
                container.map_or(DeviceSet::EMPTY, |container| container.devices_of(blocks))
            });
            let devices: Vec<DeviceSet> = devices.collect();
            let nodes = admission.nodes()?;
            let mut each = self.resources.iter().zip(&devices);
            if !each.all(|((of, _), devices)| devices.iter().all(|device| of.is_in(device, nodes)))
                || !admission.admit(&devices)
            {
                return None;
            }
        }
    }

    /// The nodes that kubelet aligns a container with that asks for `sizes` devices of the resources; `None` if it
    /// refuses the container. `left`: the available devices of each resource, and those that finished init containers
    /// left.
    pub(super) fn best_hint<'d>(
        &self,
        left: impl Iterator<Item = (&'d DeviceSet, &'d DeviceSet)>,
        sizes: &[u32],
        numa: &NumaState,
        needs: NumaNeeds,
    ) -> Option<Nodes> {
        let each = self.resources.iter().zip(left).zip(sizes);
        let wanted = each.map(|(((alignment, _), (available, reusable)), size)| ContainerDemand {
            alignment,
            available,
            reusable,
            size: *size as usize,
        });
        self.common().best_hint(&wanted.collect::<Vec<_>>(), numa, needs)
    }

    /// What kubelet refuses to align on a node with these free devices: one container in the scope `container`, else
    /// all of the pod. `None` if it aligns each.
    fn refused(&self, free: &[&DeviceSet], counts_needs: bool) -> Option<(Vec<u32>, NumaNeeds)> {
        let numa = NumaState::of(self.common());
        let is_refused = |(sizes, needs): &(Vec<u32>, NumaNeeds)| {
            let left = free.iter().map(|free| (*free, &NO_DEVICES));
            self.best_hint(left, sizes, &numa, *needs).is_none()
        };
        let counted = |needs| if counts_needs { needs } else { NumaNeeds::default() };
        match self.common().scope {
            TopologyManagerScope::Container => {
                let mut each = self.steps.iter().map(|step| (self.sizes_of(step), counted(step.needs)));
                each.find(is_refused)
            }
            TopologyManagerScope::Pod => Some((self.all_sizes(), counted(self.needs()))).filter(is_refused),
        }
    }

    /// The devices of each resource that the pod asks for.
    pub(super) fn all_sizes(&self) -> Vec<u32> {
        self.asks().map(|ask| ask.devices).collect()
    }

    /// Why kubelet would refuse the pod for the NUMA nodes of the free devices of its resources, each of which it would
    /// admit by itself.
    pub fn refusal(&self, free: &[&DeviceSet]) -> String {
        let (sizes, fewest) = match self.refused(free, false) {
            Some((sizes, _)) => {
                let fewest = self.resources.iter().zip(&sizes).filter(|(_, size)| **size > 0);
                let fewest = fewest.filter_map(|((of, _), size)| of.fewest_nodes(*size as usize));
                let fewest = fewest.collect::<Vec<u32>>();
                (sizes, fewest)
            }
            None => (self.all_sizes(), Vec::new()),
        };
        let mut asked = Vec::new();
        let mut by_node = Vec::new();
        for (((of, ask), free), size) in self.resources.iter().zip(free).zip(&sizes) {
            if *size > 0 {
                asked.push(format!("{size} {}", ask.resource));
                by_node.push(of.by_node(free));
            }
        }
        let refusal = format!(
            "the Topology Manager ({}) would refuse {} together",
            self.common().policy(),
            asked.join(" and ")
        );
        match fewest.iter().any(|count| Some(count) != fewest.first()) {
            true => {
                let fewest: Vec<String> = fewest.iter().map(ToString::to_string).collect();
                format!("{refusal}: they need {} NUMA nodes, not the same ones", fewest.join(" and "))
            }
            false => format!("{refusal}: {} are free by NUMA node", by_node.join(" and ")),
        }
    }

    /// The same where only CPUs or memory are missing. What is free of them differs on every node, so the text does not
    /// have their numbers: see [`PodAlignment::free_by_node`].
    pub fn refusal_by_numa(&self, free: &[&DeviceSet]) -> String {
        let (sizes, needs) = self.refused(free, true).unwrap_or_else(|| (self.all_sizes(), self.needs()));
        let devices = self.asks().zip(sizes).filter(|(_, size)| *size > 0);
        let devices = devices.map(|(ask, size)| format!("{size} {}", ask.resource));
        let asked: Vec<String> = devices.chain(named(needs)).collect();
        format!(
            "the Topology Manager ({}) would refuse {} together",
            self.common().policy(),
            asked.join(" and ")
        )
    }

    /// How many devices of each resource, CPUs and MiB of memory are free on each NUMA node.
    pub fn free_by_node(&self, free: &[&DeviceSet]) -> String {
        let each = self.resources.iter().zip(free);
        let devices = each.map(|((of, ask), free)| format!("{} {}", of.by_node(free), ask.resource));
        self.common().with_free_numa(devices.collect())
    }
}
