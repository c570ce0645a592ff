//! What a pod asks for, in the order in which kubelet allocates it. Kubelet passes the devices of finished init
//! containers on. This module replays that with numbered devices, so that a plan is exact where kubelet is.

use std::collections::BTreeSet;
use std::sync::Arc;

use gantry_api::ResourceName;
use gantry_api::quantity::{self, QuantityError};

use crate::devices::DeviceSet;
use crate::placement::{PlacementError, PlacementRequest, SetTerms};

/// All resources that a pod asks for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Request {
    /// One per resource that is asked for at all, by name.
    pub asks: Vec<Ask>,
    /// The pod's containers in kubelet's order, where several resources are asked for.
    pub order: Vec<Arc<str>>,
    /// What it asks of the devices other than their number.
    pub placement: Arc<PlacementRequest>,
}

/// What a pod asks of one resource.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Ask {
    pub resource: ResourceName,
    /// How many devices the pod holds for its life: kubelet's count, which equals kube-scheduler's
    /// max(init containers, sidecars + app containers).
    pub devices: u32,
    /// Sizes of the blocks in which kubelet takes devices. Devices of one block are interchangeable.
    pub blocks: Vec<u32>,
    /// The containers that ask, init containers first, in kubelet's order.
    pub containers: Vec<ContainerAsk>,
    /// The containers of the pod that ask for devices of any resource, or that need CPUs or memory of certain NUMA
    /// nodes, in kubelet's order. Empty if the pod asks for one resource and needs neither.
    pub numa: Vec<NumaDemand>,
}

/// What kubelet's static CPU and memory managers take of certain NUMA nodes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct NumaNeeds {
    /// CPUs that a container has alone.
    pub cpus: u32,
    /// Bytes of memory.
    pub memory: u64,
}

/// What one container needs of certain NUMA nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NumaDemand {
    /// Its place in [`Ask::containers`]; `None` if it asks for no device of this resource.
    pub container: Option<usize>,
    /// It asks for devices, of this resource or another.
    pub has_devices: bool,
    /// When it runs.
    pub kind: ContainerKind,
    pub needs: NumaNeeds,
    /// It is the first container of its pod.
    pub is_first: bool,
}

/// What a container asks of CPU and memory, as written.
#[derive(Debug, Clone, Copy)]
pub struct CpuAndMemory<'a> {
    pub name: &'a str,
    /// When it runs.
    pub kind: ContainerKind,
    /// The limit and the request of CPU.
    pub cpu: (Option<&'a str>, Option<&'a str>),
    /// The limit and the request of memory.
    pub memory: (Option<&'a str>, Option<&'a str>),
}

/// What one container gets.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ContainerAsk {
    pub name: Arc<str>,
    /// Exactly the devices of these blocks (indices into [`Ask::blocks`]).
    pub blocks: Vec<usize>,
    /// Further devices from those that init containers held. Kubelet takes them without asking the plugin, so which
    /// ones is unknown.
    pub any_of_held: u32,
    /// What its devices must be.
    pub terms: SetTerms,
}

/// A container as the API has it, before its quantities are read.
#[derive(Debug, Clone, Copy)]
pub struct Container<'a> {
    pub name: &'a str,
    /// When it runs.
    pub kind: ContainerKind,
    /// Its limit or else request of the resource, as written.
    pub quantity: Option<&'a str>,
}

/// When a container runs, which decides what kubelet does with its devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ContainerKind {
    /// Ends before the next starts; its devices are passed on.
    Init,
    /// A restartable init container: lives as long as the pod and keeps its devices.
    Sidecar,
    /// Lives as long as the pod.
    App,
}

/// A pod asks for something that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// A quantity that is no count of devices.
    #[error("container {container} asks for {value} of {resource}, which {fault}")]
    Quantity {
        /// Name of the container.
        container: String,
        resource: ResourceName,
        /// What it asks, as written.
        value: String,
        /// What is wrong with it.
        #[source]
        fault: QuantityError,
    },
    /// An annotation that cannot be used.
    #[error(transparent)]
    Placement(#[from] PlacementError),
}

impl Request {
    /// Reads what `containers` (init containers first, in the order written) ask of each resource.
    ///
    /// A quantity of zero is legal in Kubernetes and asks for nothing.
    ///
    /// # Errors
    /// The first quantity that is no count of devices.
    pub fn read<'a, C>(
        resources: &'a [ResourceName],
        containers: impl Fn(&'a str) -> C,
    ) -> Result<Self, RequestError>
    where
        C: Iterator<Item = Container<'a>>,
    {
        let mut asks = Vec::new();
        for resource in resources {
            let mut counts = Vec::new();
            for container in containers(resource.as_str()) {
                let Some(written) = container.quantity else {
                    continue;
                };
                let count = quantity::count(written).map_err(|fault| RequestError::Quantity {
                    container: container.name.to_owned(),
                    resource: resource.clone(),
                    value: written.to_owned(),
                    fault,
                })?;
                if count > 0 {
                    counts.push((container.name, container.kind, count));
                }
            }
            if !counts.is_empty() {
                asks.push(Ask::replay(resource.clone(), &counts));
            }
        }
        let mut request = Self { asks, ..Self::default() };
        if let Some(resource) = resources.first() {
            request.list_containers(containers(resource.as_str()));
        }
        Ok(request)
    }

    /// Lists the containers in each ask where several resources are asked for: kubelet aligns the devices of a
    /// container together.
    fn list_containers<'a>(&mut self, containers: impl Iterator<Item = Container<'a>>) {
        if self.asks.len() < 2 {
            return;
        }
        let (names, kinds): (Vec<Arc<str>>, Vec<ContainerKind>) =
            containers.map(|container| (container.name.into(), container.kind)).unzip();
        let none = NumaNeeds::default();
        let listed = names.iter().zip(kinds).map(|(name, kind)| (&**name, kind, none));
        self.list_needs(&listed);
        self.order = names;
    }

    /// Lists containers, in kubelet's order, in each ask: those that ask for devices or have needs.
    fn list_needs<'a>(
        &mut self,
        containers: &(impl Iterator<Item = (&'a str, ContainerKind, NumaNeeds)> + Clone),
    ) {
        let with_devices = self.asks.iter().flat_map(|ask| &ask.containers);
        let with_devices: BTreeSet<Arc<str>> =
            with_devices.map(|container| Arc::clone(&container.name)).collect();
        for ask in &mut self.asks {
            let asking = &ask.containers;
            let listed = containers.clone().map(|(name, kind, needs)| NumaDemand {
                container: asking.iter().position(|asking| *asking.name == *name),
                has_devices: with_devices.contains(name),
                kind,
                needs,
                is_first: false,
            });
            ask.numa = listed.filter(|listed| listed.has_devices || !listed.needs.is_none()).collect();
            if let Some(first) = ask.numa.first_mut() {
                first.is_first = true;
            }
        }
        self.drop_idle_list();
    }

    /// The list of containers means nothing where one resource is asked for, and neither CPUs nor memory.
    fn drop_idle_list(&mut self) {
        if let [ask] = &mut self.asks[..]
            && ask.numa.iter().all(|container| container.needs.is_none())
        {
            ask.numa.clear();
        }
    }

    /// The same, without resources of which a quantity cannot be read: such a resource counts something else than
    /// devices, and the others are valid.
    ///
    /// # Errors
    /// The first quantity that is no count of devices, if no resource can be read.
    pub fn read_what_can_be<'a, C>(
        resources: &'a [ResourceName],
        containers: impl Fn(&'a str) -> C,
    ) -> Result<Self, RequestError>
    where
        C: Iterator<Item = Container<'a>>,
    {
        let mut whole = Self::default();
        let mut failed = None;
        for resource in resources {
            match Self::read(std::slice::from_ref(resource), &containers) {
                Ok(one) => whole.asks.extend(one.asks),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        if let Some(error) = failed.filter(|_| whole.is_empty()) {
            return Err(error);
        }
        if let Some(resource) = resources.first() {
            whole.list_containers(containers(resource.as_str()));
        }
        Ok(whole)
    }

    /// The same with the terms of a pod's annotations, and of `defaults` where they leave them open.
    ///
    /// # Errors
    /// The first annotation that cannot be used.
    pub fn placed_by<'a>(
        self,
        annotations: impl Iterator<Item = (&'a str, &'a str)>,
        defaults: &PlacementRequest,
    ) -> Result<Self, RequestError> {
        let placement = PlacementRequest::read(annotations, defaults)?;
        Ok(if self.is_empty() || placement.is_empty() { self } else { self.placed(placement) })
    }

    /// The same with terms of the devices.
    #[must_use]
    pub fn placed(mut self, placement: PlacementRequest) -> Self {
        for container in self.asks.iter_mut().flat_map(|ask| &mut ask.containers) {
            container.terms.clone_from(&placement.required);
        }
        self.placement = Arc::new(placement);
        self
    }

    /// The same with what each container of a Guaranteed pod needs of certain NUMA nodes: kubelet's static CPU manager gives
    /// a container that asks for whole CPUs these CPUs alone, and the static memory manager gives each its memory.
    /// `containers` are all of the pod, in kubelet's order.
    #[must_use]
    pub fn with_numa<'a>(mut self, containers: &(impl Iterator<Item = CpuAndMemory<'a>> + Clone)) -> Self {
        if self.is_empty() || !containers.clone().all(|container| container.is_guaranteed()) {
            return self;
        }
        let needs = containers.clone().map(|container| {
            let needs = NumaNeeds { cpus: container.exclusive_cpus(), memory: container.memory() };
            (container.name, container.kind, needs)
        });
        self.list_needs(&needs);
        self
    }

    /// The part of it that asks for resources of `managed`.
    ///
    /// The NUMA nodes of other devices are not known, so neither are those of the CPUs and the memory of a container that has
    /// only such devices: if it has exclusive CPUs, nothing is counted, otherwise no memory.
    #[must_use]
    pub fn of(self: &Arc<Self>, managed: &BTreeSet<ResourceName>) -> Arc<Self> {
        if self.asks.iter().all(|ask| managed.contains(&ask.resource)) {
            return Arc::clone(self);
        }
        let asks = self.asks.iter().filter(|ask| managed.contains(&ask.resource));
        let mut part = Self { asks: asks.cloned().collect(), ..Self::clone(self) };
        part.forget_other_devices();
        part.drop_idle_list();
        Arc::new(part)
    }

    /// Drops containers from the lists that have only devices of resources that are not asked for.
    fn forget_other_devices(&mut self) {
        let listed = self.asks.iter().map(|ask| ask.numa.len()).min().unwrap_or(0);
        let has_others = |at: &usize| {
            let mut listed = self.asks.iter().filter_map(|ask| ask.numa.get(*at));
            listed.all(|container| container.has_devices && container.container.is_none())
        };
        let others: Vec<usize> = (0..listed).filter(has_others).collect();
        for ask in &mut self.asks {
            let mut needs = others.iter().filter_map(|at| ask.numa.get(*at)).map(|container| container.needs);
            let counts_cpus = needs.all(|needs| needs.cpus == 0);
            let mut is_first = false;
            let mut left = Vec::with_capacity(ask.numa.len());
            for (at, container) in ask.numa.iter().enumerate() {
                is_first |= container.is_first;
                let mut needs = container.needs;
                if !others.is_empty() {
                    needs = NumaNeeds { cpus: if counts_cpus { needs.cpus } else { 0 }, memory: 0 };
                }
                if !others.contains(&at) && (container.has_devices || !needs.is_none()) {
                    left.push(NumaDemand { needs, is_first: std::mem::take(&mut is_first), ..*container });
                }
            }
            ask.numa = left;
        }
    }

    /// What the pod's containers need of certain NUMA nodes; empty if nothing is counted.
    pub fn numa(&self) -> &[NumaDemand] {
        self.asks.iter().map(|ask| &ask.numa[..]).find(|numa| !numa.is_empty()).unwrap_or_default()
    }

    /// Whether nothing is asked for.
    pub fn is_empty(&self) -> bool {
        self.asks.is_empty()
    }

    /// Devices asked of `resource` for the life of the pod; 0 if none.
    pub fn devices(&self, resource: &str) -> u32 {
        self.asks.iter().find(|ask| ask.resource.as_str() == resource).map_or(0, |ask| ask.devices)
    }
}

impl CpuAndMemory<'_> {
    /// Whether it may be in a pod of the class Guaranteed: it has limits, and the requests equal them.
    fn is_guaranteed(&self) -> bool {
        let equal = |(limit, request): (Option<&str>, Option<&str>)| {
            let limit = limit.and_then(|limit| quantity::thousandths(limit).ok()).filter(|limit| *limit > 0);
            let request = request.map(|request| quantity::thousandths(request).ok());
            limit.is_some() && request.is_none_or(|request| request == limit)
        };
        equal(self.cpu) && equal(self.memory)
    }

    /// The CPUs that it has for itself alone in such a pod: kubelet shares the others, of which a part is asked for.
    fn exclusive_cpus(&self) -> u32 {
        self.cpu.0.and_then(|limit| quantity::count(limit).ok()).unwrap_or(0)
    }

    /// The bytes of memory that it has in such a pod.
    fn memory(&self) -> u64 {
        let bytes = self.memory.0.and_then(|limit| quantity::units(limit).ok());
        bytes.and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(0)
    }
}

impl NumaNeeds {
    pub fn is_none(self) -> bool {
        self == Self::default()
    }

    fn plus(self, other: Self) -> Self {
        Self { cpus: self.cpus.saturating_add(other.cpus), memory: self.memory.saturating_add(other.memory) }
    }

    fn max(self, other: Self) -> Self {
        Self { cpus: self.cpus.max(other.cpus), memory: self.memory.max(other.memory) }
    }
}

impl NumaDemand {
    /// Those of pods that are gone. Their numbers are unknown, so they are as many as their NUMA nodes have.
    pub const UNKNOWN: [Self; 1] = [Self {
        container: Some(0),
        has_devices: true,
        kind: ContainerKind::App,
        needs: NumaNeeds { cpus: u32::MAX, memory: u64::MAX },
        is_first: true,
    }];

    /// What a pod of these containers needs.
    pub fn of_pod(containers: &[Self]) -> NumaNeeds {
        Self::needs_of(containers.iter().map(|container| (container.kind, container.needs)))
    }

    /// What a pod needs, by the kinds and needs of its containers.
    pub fn needs_of(containers: impl Iterator<Item = (ContainerKind, NumaNeeds)>) -> NumaNeeds {
        let (mut lasting, mut peak) = (NumaNeeds::default(), NumaNeeds::default());
        for (kind, needs) in containers {
            let while_it_runs = lasting.plus(needs);
            match kind {
                ContainerKind::Init => peak = peak.max(while_it_runs),
                ContainerKind::Sidecar | ContainerKind::App => lasting = while_it_runs,
            }
        }
        lasting.max(peak)
    }

    /// A container that asks for devices only.
    pub fn none(container: usize) -> Self {
        Self {
            container: Some(container),
            has_devices: true,
            kind: ContainerKind::App,
            needs: NumaNeeds::default(),
            is_first: container == 0,
        }
    }
}

impl ContainerAsk {
    /// The devices of its blocks, out of those of each block of the ask.
    pub fn devices_of(&self, blocks: &[DeviceSet]) -> DeviceSet {
        let mut devices = DeviceSet::EMPTY;
        self.blocks.iter().filter_map(|&block| blocks.get(block)).for_each(|block| devices.add(block));
        devices
    }

    /// Devices it is given.
    pub fn devices(&self, blocks: &[u32]) -> u32 {
        let exact = self.blocks.iter().filter_map(|&block| blocks.get(block));
        exact.fold(self.any_of_held, |all, block| all.saturating_add(*block))
    }
}

impl Ask {
    /// The container that asks for most, the first of several, and its number.
    pub fn most(&self) -> Option<(&str, u32)> {
        let mut most: Option<(&str, u32)> = None;
        for container in &self.containers {
            let devices = container.devices(&self.blocks);
            if most.is_none_or(|(_, known)| devices > known) {
                most = Some((&container.name, devices));
            }
        }
        most
    }

    /// Containers without names, for tests.
    #[cfg(test)]
    pub(crate) fn of_containers(resource: ResourceName, counts: &[(ContainerKind, u32)]) -> Self {
        let named: Vec<_> = counts.iter().map(|&(kind, count)| ("c", kind, count)).collect();
        Self::replay(resource, &named)
    }

    /// One app container that asks for `devices`.
    pub fn single(resource: ResourceName, devices: u32) -> Self {
        Self::replay(resource, &[("main", ContainerKind::App, devices)])
    }

    /// Replays kubelet's device manager on containers that each ask for at least one device.
    ///
    /// Kubelet keeps a pool of devices that finished init containers held. A container that asks for at least the whole
    /// pool takes it and new devices. One that asks for less takes any part of it, in an unknown order. An init
    /// container returns all it had to the pool; a sidecar or app container keeps its devices.
    fn replay(resource: ResourceName, counts: &[(&str, ContainerKind, u32)]) -> Self {
        let mut ask =
            Self { resource, devices: 0, blocks: Vec::new(), containers: Vec::new(), numa: Vec::new() };
        let mut pool = Pool::default();
        for &(name, kind, count) in counts {
            let mut container = ContainerAsk {
                name: name.into(),
                blocks: Vec::new(),
                any_of_held: 0,
                terms: SetTerms::default(),
            };
            let pooled = pool.len(&ask.blocks);
            if pooled > count {
                container.any_of_held = count;
                if kind != ContainerKind::Init {
                    pool.lose_any(count, pooled);
                }
            } else {
                container.blocks.clone_from(&pool.blocks);
                container.any_of_held = pool.unknown;
                if count > pooled {
                    container.blocks.push(ask.blocks.len());
                    ask.blocks.push(count - pooled);
                    ask.devices = ask.devices.saturating_add(count - pooled);
                }
                if kind == ContainerKind::Init {
                    pool.blocks.clone_from(&container.blocks);
                } else {
                    pool = Pool::default();
                }
            }
            ask.containers.push(container);
        }
        ask
    }
}

/// Devices that finished init containers held. The next container takes them first.
#[derive(Debug, Default)]
struct Pool {
    /// Blocks that are in it whole.
    blocks: Vec<usize>,
    /// Devices of which only the number is known.
    unknown: u32,
}

impl Pool {
    fn len(&self, sizes: &[u32]) -> u32 {
        let whole: u32 = self.blocks.iter().filter_map(|&block| sizes.get(block)).sum();
        whole.saturating_add(self.unknown)
    }

    /// A sidecar or app container took `count` of `pooled`, and which is unknown: from now on only the number of the
    /// rest is known.
    fn lose_any(&mut self, count: u32, pooled: u32) {
        self.blocks.clear();
        self.unknown = pooled - count;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::ContainerKind::{App, Init, Sidecar};
    use super::*;

    fn ask(counts: &[(ContainerKind, u32)]) -> Ask {
        let named: Vec<_> = counts.iter().map(|&(kind, count)| ("c", kind, count)).collect();
        Ask::replay("nvidia.com/gpu".into(), &named)
    }

    /// What a container gets: its blocks and how many unknown ones.
    fn shares(ask: &Ask) -> Vec<(Vec<usize>, u32)> {
        ask.containers.iter().map(|container| (container.blocks.clone(), container.any_of_held)).collect()
    }

    #[test]
    fn one_container_gets_one_block() {
        let ask = ask(&[(App, 4)]);
        assert_eq!(ask.blocks, [4]);
        assert_eq!(shares(&ask), [(vec![0], 0)]);
    }

    #[test]
    fn app_container_keeps_init_devices_and_gets_more() {
        let ask = ask(&[(Init, 1), (App, 4)]);
        assert_eq!(ask.devices, 4);
        assert_eq!(ask.blocks, [1, 3]);
        assert_eq!(shares(&ask), [(vec![0], 0), (vec![0, 1], 0)]);
    }

    #[test]
    fn a_sidecar_keeps_its_devices_from_everyone() {
        let ask = ask(&[(Sidecar, 1), (Init, 2), (App, 2)]);
        assert_eq!(ask.devices, 3);
        assert_eq!(shares(&ask), [(vec![0], 0), (vec![1], 0), (vec![1], 0)]);
    }

    #[test]
    fn larger_init_container_leaves_the_choice_to_kubelet() {
        let ask = ask(&[(Init, 3), (App, 2)]);
        assert_eq!(ask.devices, 3);
        assert_eq!(shares(&ask), [(vec![0], 0), (vec![], 2)]);
    }

    #[test]
    fn two_apps_share_devices_of_a_larger_init_container() {
        let ask = ask(&[(Init, 3), (App, 2), (App, 2)]);
        assert_eq!(ask.devices, 4);
        assert_eq!(ask.blocks, [3, 1]);
        assert_eq!(shares(&ask), [(vec![0], 0), (vec![], 2), (vec![1], 1)]);
    }

    #[test]
    fn zero_asks_for_nothing_and_half_a_device_is_refused() {
        let container = |quantity| Container { name: "train", kind: App, quantity: Some(quantity) };
        let resources = ["nvidia.com/gpu".into()];
        assert!(Request::read(&resources, |_| [container("0")].into_iter()).unwrap().is_empty());
        assert_eq!(
            Request::read(&resources, |_| [container("500m")].into_iter()).unwrap_err().to_string(),
            "container train asks for 500m of nvidia.com/gpu, which is not a whole number of devices"
        );
    }

    /// kube-scheduler's own count of an extended resource.
    fn scheduler_count(counts: &[(ContainerKind, u32)]) -> u32 {
        let mut sidecars = 0;
        let mut peak = 0;
        let mut apps = 0;
        for &(kind, count) in counts {
            match kind {
                Init => peak = peak.max(sidecars + count),
                Sidecar => {
                    sidecars += count;
                    peak = peak.max(sidecars);
                }
                App => apps += count,
            }
        }
        peak.max(sidecars + apps)
    }

    prop_compose! {
        fn containers()(
            inits in prop::collection::vec((any::<bool>(), 1u32..5), 0..4),
            apps in prop::collection::vec(1u32..5, 0..4),
        ) -> Vec<(ContainerKind, u32)> {
            inits.into_iter()
                .map(|(sidecar, count)| (if sidecar { Sidecar } else { Init }, count))
                .chain(apps.into_iter().map(|count| (App, count)))
                .collect()
        }
    }

    proptest! {
        #[test]
        fn kubelet_holds_as_many_as_kube_scheduler_counts(counts in containers()) {
            let ask = ask(&counts);
            prop_assert_eq!(ask.devices, scheduler_count(&counts));
            prop_assert_eq!(ask.blocks.iter().sum::<u32>(), ask.devices);
        }

        #[test]
        fn every_container_gets_what_it_asks_for(counts in containers()) {
            let ask = ask(&counts);
            for (container, &(_, count)) in ask.containers.iter().zip(&counts) {
                let exact: u32 = container.blocks.iter().map(|&block| ask.blocks[block]).sum();
                prop_assert_eq!(exact + container.any_of_held, count);
            }
        }

        #[test]
        fn containers_that_know_their_devices_are_nested_or_apart(counts in containers()) {
            let ask = ask(&counts);
            for a in &ask.containers {
                for b in &ask.containers {
                    let common = a.blocks.iter().filter(|block| b.blocks.contains(block)).count();
                    prop_assert!(common == 0 || common == a.blocks.len() || common == b.blocks.len());
                }
            }
        }
    }

    fn with_numa(containers: &[(&str, ContainerKind, [Option<&str>; 4])]) -> Vec<(Option<usize>, u32, u64)> {
        let resources = [ResourceName::from("nvidia.com/gpu")];
        let asking = |_| {
            // The first container asks for no device.
            containers.iter().skip(1).map(|(name, kind, _)| Container {
                name,
                kind: *kind,
                quantity: Some("1"),
            })
        };
        let each = containers.iter().map(|(name, kind, [cpu, requested, memory, requested_memory])| {
            CpuAndMemory { name, kind: *kind, cpu: (*cpu, *requested), memory: (*memory, *requested_memory) }
        });
        let request = Request::read(&resources, asking).unwrap().with_numa(&each);
        let demands = request.asks[0].numa.iter();
        demands.map(|one| (one.container, one.needs.cpus, one.needs.memory >> 30)).collect()
    }

    /// Kubelet's static CPU manager: whole CPUs of Guaranteed pods. Its static memory manager: memory of all their
    /// containers.
    #[test]
    fn guaranteed_pods_need_whole_cpus_and_memory_of_numa_nodes() {
        let whole = [Some("2"), Some("2000m"), Some("1Gi"), Some("1024Mi")];
        let part = [Some("1500m"), None, Some("1Gi"), None];
        assert_eq!(with_numa(&[("a", Init, whole), ("b", App, part)]), [(None, 2, 1), (Some(0), 0, 1)]);
        assert_eq!(with_numa(&[("a", App, part), ("b", App, whole)]), [(None, 0, 1), (Some(0), 2, 1)]);
        assert_eq!(with_numa(&[("a", App, part), ("b", App, part)]), [(None, 0, 1), (Some(0), 0, 1)]);
        for not_guaranteed in [
            [Some("2"), Some("1"), Some("1Gi"), None],
            [None, Some("2"), Some("1Gi"), None],
            [Some("2"), None, Some("1Gi"), Some("1")],
            [Some("2"), None, None, Some("1Gi")],
            [Some("0"), None, Some("1Gi"), None],
            [Some("two"), None, Some("1Gi"), None],
        ] {
            assert_eq!(with_numa(&[("a", App, whole), ("b", App, not_guaranteed)]), [], "{not_guaranteed:?}");
        }
    }

    /// The containers `a` and `b` ask for so many GPUs and MIG devices, and so many CPUs.
    fn of_two_resources(wanted: [[&'static str; 2]; 2], cpus: [&'static str; 2]) -> Arc<Request> {
        let resources = [ResourceName::from("nvidia.com/gpu"), ResourceName::from("nvidia.com/mig-1g.10gb")];
        let asking = |resource: &str| {
            let at = usize::from(resource != "nvidia.com/gpu");
            let each = ["a", "b"].into_iter().zip(wanted);
            each.map(move |(name, counts)| Container { name, kind: App, quantity: Some(counts[at]) })
        };
        let each = ["a", "b"].into_iter().zip(cpus).map(|(name, cpus)| CpuAndMemory {
            name,
            kind: App,
            cpu: (Some(cpus), None),
            memory: (Some("1Gi"), None),
        });
        Arc::new(Request::read(&resources, asking).unwrap().with_numa(&each))
    }

    /// The CPUs and the GiB of memory of each ask.
    fn needs_of_asks(request: &Request) -> Vec<(u32, u64)> {
        let needs = request.asks.iter().map(|ask| NumaDemand::of_pod(&ask.numa));
        needs.map(|needs| (needs.cpus, needs.memory >> 30)).collect()
    }

    #[test]
    fn needs_are_counted_with_devices_of_two_resources() {
        let request = of_two_resources([["0", "1"], ["1", "0"]], ["2", "3"]);
        assert_eq!(needs_of_asks(&request), [(5, 2), (5, 2)]);
        let containers = |ask: &Ask| ask.numa.iter().map(|listed| listed.container).collect::<Vec<_>>();
        let listed: Vec<_> = request.asks.iter().map(containers).collect();
        assert_eq!(listed, [[None, Some(0)], [Some(0), None]]);
        assert!(request.asks.iter().flat_map(|ask| &ask.numa).all(|listed| listed.has_devices));
    }

    /// The CPUs and the memory of the first container are on the NUMA node of its MIG device, which is not known with the
    /// GPUs.
    #[test]
    fn needs_with_unmanaged_devices_are_not_counted() {
        let managed = BTreeSet::from([ResourceName::from("nvidia.com/gpu")]);
        let counted = |wanted, cpus| {
            let managed = of_two_resources(wanted, cpus).of(&managed);
            assert!(managed.asks.iter().all(|ask| ask.numa.first().is_none_or(|first| first.is_first)));
            needs_of_asks(&managed)
        };
        assert_eq!(counted([["0", "1"], ["1", "0"]], ["2", "3"]), [(0, 0)]);
        assert_eq!(counted([["0", "1"], ["1", "0"]], ["500m", "3"]), [(3, 0)]);
        assert_eq!(counted([["1", "1"], ["0", "1"]], ["2", "3"]), [(0, 0)]);
        assert_eq!(counted([["1", "1"], ["1", "0"]], ["2", "3"]), [(5, 2)]);
        assert_eq!(counted([["1", "1"], ["0", "0"]], ["2", "3"]), [(5, 2)]);
    }

    /// Kubelet's `podGuaranteedCPUs` and `getPodRequestedResources`.
    #[test]
    fn needs_of_pod_count_init_containers_by_their_peak() {
        let cpus = |kinds: &[(ContainerKind, u32)]| {
            let mut ask = Ask::single("nvidia.com/gpu".into(), 1);
            let each = kinds.iter().map(|(kind, cpus)| NumaDemand {
                kind: *kind,
                needs: NumaNeeds { cpus: *cpus, memory: u64::from(*cpus) << 30 },
                ..NumaDemand::none(0)
            });
            ask.numa = each.collect();
            let needs = NumaDemand::of_pod(&ask.numa);
            assert_eq!(needs.memory >> 30, u64::from(needs.cpus));
            needs.cpus
        };
        assert_eq!(cpus(&[(Init, 4), (App, 2), (App, 1)]), 4);
        assert_eq!(cpus(&[(Sidecar, 1), (Init, 4), (App, 2)]), 5);
        assert_eq!(cpus(&[(Init, 2), (Sidecar, 1), (App, 2), (App, 1)]), 4);
    }
}
