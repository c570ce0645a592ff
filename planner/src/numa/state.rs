//! What is free of the CPUs and the memory of a node's NUMA nodes while kubelet admits a pod.

use super::{Alignment, NodeNumbers, Nodes, NumaNode};
use crate::request::ContainerKind;

/// The CPUs and the memory that a container may be given, by NUMA node.
#[derive(Debug, Clone, Default)]
pub(super) struct NumaState {
    pub(super) nodes: Vec<NumaNode>,
    /// CPUs that finished init containers of the pod left, by node.
    reusable_cpus: Vec<u32>,
    /// Memory that they left, by the nodes that it is of.
    reusable_memory: Vec<(Nodes, u64)>,
}

impl NumaState {
    pub(super) fn of(alignment: &Alignment) -> Self {
        let nodes = alignment.numa.clone();
        Self { reusable_cpus: vec![0; nodes.len()], nodes, reusable_memory: Vec::new() }
    }

    /// What is free of a node, and what init containers left of it.
    fn cpus(&self) -> impl Iterator<Item = (u32, u32)> {
        self.nodes.iter().map(|node| node.cpus.free).zip(self.reusable_cpus.iter().copied())
    }

    pub(super) fn has_cpus(&self, nodes: Nodes, needed: u32) -> bool {
        let (mut available, mut is_left_elsewhere) = (0, false);
        for (index, (free, reusable)) in self.cpus().enumerate() {
            match nodes & (1 << index) != 0 {
                true => available += u64::from(free) + u64::from(reusable),
                false => is_left_elsewhere |= reusable > 0,
            }
        }
        available >= u64::from(needed) && !is_left_elsewhere
    }

    pub(super) fn has_memory(&self, nodes: Nodes, needed: u64) -> bool {
        let inside = self.nodes.iter().enumerate().filter(|(index, _)| nodes & (1 << index) != 0);
        let inside: Vec<&NumaNode> = inside.map(|(_, node)| node).collect();
        let group: NodeNumbers = inside.iter().map(|node| node.node).collect();
        let free = inside.iter().fold(0u64, |sum, node| sum.saturating_add(node.memory.free));
        // A node without memory is in no hint.
        inside
            .iter()
            .map(|node| node.memory)
            .all(|memory| memory.allocatable > 0 && (memory.group.is_empty() || memory.group == group))
            && free.saturating_add(self.reusable_memory(nodes)) >= needed
    }

    fn reusable_memory(&self, nodes: Nodes) -> u64 {
        self.reusable_memory.iter().find(|(of, _)| *of == nodes).map_or(0, |(_, memory)| *memory)
    }

    /// What init containers left goes to containers of the same pod.
    pub(super) fn forget_reusable(&mut self) {
        self.reusable_cpus.fill(0);
        self.reusable_memory.clear();
    }

    /// Takes the CPUs of a container as kubelet does, as far as their NUMA nodes are concerned: whole nodes first, then of
    /// those with the fewest available. Those that init containers left are taken first.
    pub(super) fn take_cpus(&mut self, nodes: Nodes, kind: ContainerKind, needed: u32) {
        let available: Vec<u32> = self.cpus().map(|(free, reusable)| free.saturating_add(reusable)).collect();
        let mut by_available: Vec<usize> =
            (0..available.len()).filter(|node| nodes & (1 << node) != 0).collect();
        by_available.sort_by_key(|node| available.get(*node));
        let mut missing = needed;
        let mut taken = vec![0; available.len()];
        for whole in [true, false] {
            for node in &by_available {
                let total = self.nodes.get(*node).map_or(0, |node| node.cpus.total);
                let (Some(available), Some(taken)) = (available.get(*node), taken.get_mut(*node)) else {
                    continue;
                };
                let left = available - *taken;
                if whole && (left < total || missing < total) {
                    continue;
                }
                let more = missing.min(left);
                *taken += more;
                missing -= more;
            }
        }
        for ((node, reusable), taken) in self.nodes.iter_mut().zip(&mut self.reusable_cpus).zip(taken) {
            let reused = taken.min(*reusable);
            node.cpus.free -= taken - reused;
            match kind {
                ContainerKind::Init => *reusable += taken - reused,
                ContainerKind::Sidecar | ContainerKind::App => *reusable -= reused,
            }
        }
    }

    /// Takes the memory of a container as kubelet does: what init containers left on the same nodes first, then of the lowest
    /// nodes.
    pub(super) fn take_memory(&mut self, nodes: Nodes, kind: ContainerKind, needed: u64) {
        let reusable = self.reusable_memory(nodes);
        let mut missing = needed.saturating_sub(reusable);
        let is_in = |index: usize| nodes & (1 << index) != 0;
        let numbers = self.nodes.iter().enumerate().filter(|(index, _)| is_in(*index));
        let group: NodeNumbers = numbers.map(|(_, node)| node.node).collect();
        for (_, node) in self.nodes.iter_mut().enumerate().filter(|(index, _)| is_in(*index)) {
            let taken = missing.min(node.memory.free);
            node.memory.free -= taken;
            node.memory.group = group;
            missing -= taken;
        }
        self.reusable_memory.retain(|(of, _)| *of != nodes);
        self.reusable_memory.push(match kind {
            ContainerKind::Init => (nodes, reusable.max(needed)),
            ContainerKind::Sidecar | ContainerKind::App => (nodes, reusable.saturating_sub(needed)),
        });
    }
}
