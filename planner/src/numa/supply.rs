//! The CPUs and the memory of a NUMA node.

use crate::request::NumaNeeds;

/// What a NUMA node has under kubelet's static CPU and memory managers. Of a manager that does not run all is 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct NumaNode {
    /// The kernel's number of the node.
    pub node: u32,
    pub cpus: NumaCpus,
    pub memory: NumaMemory,
}

/// The CPUs of a NUMA node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct NumaCpus {
    /// CPUs that it has.
    pub total: u32,
    /// CPUs that kubelet may give to one container alone.
    pub allocatable: u32,
    /// Those that no container has alone.
    pub free: u32,
    /// CPUs of a core, if kubelet gives whole cores only; otherwise 0.
    pub core: u32,
}

/// The memory of a NUMA node, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct NumaMemory {
    /// What kubelet may give to containers.
    pub allocatable: u64,
    /// What no container has.
    pub free: u64,
    /// The NUMA nodes that each container with memory of this one has its memory of; none if there is no such container.
    pub group: NodeNumbers,
}

/// NUMA nodes by the kernel's numbers, of those below 64: kubelet knows no others.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct NodeNumbers(u64);

impl FromIterator<u32> for NodeNumbers {
    fn from_iter<T: IntoIterator<Item = u32>>(nodes: T) -> Self {
        Self(nodes.into_iter().filter_map(|node| 1u64.checked_shl(node)).fold(0, |all, bit| all | bit))
    }
}

impl NodeNumbers {
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Both together.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl NumaNode {
    /// The same with all free that kubelet may give to containers.
    #[must_use]
    pub fn unoccupied(mut self) -> Self {
        self.cpus.free = self.cpus.allocatable;
        self.memory.free = self.memory.allocatable;
        self.memory.group = NodeNumbers::default();
        self
    }

    /// Takes what a pod needs that has memory of a group of nodes.
    pub fn take(&mut self, needs: NumaNeeds, group: NodeNumbers) {
        self.cpus.free = self.cpus.free.saturating_sub(needs.cpus);
        if needs.memory > 0 {
            self.memory.free = self.memory.free.saturating_sub(needs.memory);
            self.memory.group = self.memory.group.and(group);
        }
    }

    /// Gives back what a pod had. Whether other containers are left in a group is not known.
    pub fn release(&mut self, needs: NumaNeeds) {
        let (cpus, memory) = (&mut self.cpus, &mut self.memory);
        cpus.free = cpus.free.saturating_add(needs.cpus).min(cpus.allocatable.max(cpus.free));
        memory.free = memory.free.saturating_add(needs.memory).min(memory.allocatable.max(memory.free));
    }

    /// Whether a container may fit that did not before.
    pub fn gained_since(&self, before: &Self) -> bool {
        let was_grouped = !before.memory.group.is_empty() && self.memory.group != before.memory.group;
        self.cpus.free > before.cpus.free || self.memory.free > before.memory.free || was_grouped
    }
}
