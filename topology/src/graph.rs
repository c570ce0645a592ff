//! The graph of a machine: devices, and the links between them with class and bandwidth. The one source for NVLink
//! islands, PCIe groups and pictures. Ratings of many sets of GPUs use bit masks instead ([`crate::collective`]).

use petgraph::graph::{NodeIndex, UnGraph};
use petgraph::unionfind::UnionFind;
use petgraph::visit::EdgeRef;

use crate::bandwidth::{LinkRate, Rates};
use crate::machine::{Link, Machine, PathClass};
use crate::set::GpuSet;

/// A node of the graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    /// A GPU, by index.
    Gpu(usize),
    /// A NIC, by its position in the machine.
    Nic(usize),
    /// All joined NVSwitches of one group.
    NvSwitch(u8),
}

/// An edge of the graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Connection {
    /// NVLinks or a PCIe path.
    pub link: Link,
    /// Its rate in one direction; `None` between two NICs.
    pub rate: Option<LinkRate>,
}

impl Connection {
    fn is_nvlink(&self) -> bool {
        matches!(self.link, Link::NvLink(_))
    }

    fn is_path_within(&self, farthest: PathClass) -> bool {
        matches!(self.link, Link::Pcie(class) if class <= farthest)
    }
}

/// The undirected graph of one machine. Nodes count GPUs first, then NICs, as [`Machine::paths`] does, then groups of
/// NVSwitches. There is an edge for the PCIe path of every pair of GPUs and NICs, for every direct NVLink bundle, and
/// for the links of a GPU into its NVSwitches.
#[derive(Debug, Clone)]
pub struct MachineGraph {
    graph: UnGraph<Device, Connection>,
    gpus: usize,
}

impl MachineGraph {
    /// The graph of a machine's devices and links.
    pub fn of(machine: &Machine) -> Self {
        let rates = Rates::of(machine);
        let gpus = machine.gpus().len();
        let mut graph = UnGraph::default();
        let devices = (0..gpus).map(Device::Gpu).chain((0..machine.nics().len()).map(Device::Nic));
        let nodes: Vec<NodeIndex> = devices.map(|device| graph.add_node(device)).collect();
        let nvlink = |links: u8, rate: LinkRate| Connection {
            link: Link::NvLink(links),
            rate: Some(rate.times(u32::from(links))),
        };
        for (b, second) in nodes.iter().enumerate() {
            for (a, first) in nodes.iter().enumerate().take(b) {
                let class = machine.paths().get(a, b);
                let rate = (a < gpus).then(|| rates.pcie_path(a, if b < gpus { b } else { a }, class));
                let link = Link::Pcie(class);
                graph.add_edge(*first, *second, Connection { link, rate });
            }
        }
        for bundle in machine.nvlinks() {
            let [a, b] = bundle.gpus.map(usize::from);
            if let (Some(first), Some(second)) = (nodes.get(a), nodes.get(b)) {
                let rate = rates.nvlink_of(a).min(rates.nvlink_of(b));
                graph.add_edge(*first, *second, nvlink(bundle.links, rate));
            }
        }
        let mut switches: Vec<(u8, NodeIndex)> = Vec::new();
        for (gpu, node) in nodes.iter().enumerate().take(gpus) {
            let links = machine.switch_links(gpu);
            if links == 0 {
                continue;
            }
            let island = machine.switch_island(gpu);
            let known = switches.iter().find(|(known, _)| *known == island);
            let switch = known.map(|(_, switch)| *switch).unwrap_or_else(|| {
                let switch = graph.add_node(Device::NvSwitch(island));
                switches.push((island, switch));
                switch
            });
            graph.add_edge(*node, switch, nvlink(links, rates.nvlink_of(gpu)));
        }
        Self { graph, gpus }
    }

    /// The graph in petgraph's form.
    pub fn as_petgraph(&self) -> &UnGraph<Device, Connection> {
        &self.graph
    }

    /// The GPUs that NVLinks join, directly or through NVSwitches. A GPU without NVLinks is an island of one.
    pub fn nvlink_islands(&self) -> Vec<Vec<usize>> {
        let mut islands = self.components(|_| true, Connection::is_nvlink);
        for island in &mut islands {
            island.retain(|device| *device < self.gpus);
        }
        islands.retain(|island| !island.is_empty());
        islands
    }

    /// The GPUs at each group of joined NVSwitches.
    pub fn switch_islands(&self) -> Vec<Vec<usize>> {
        let switches = self.graph.node_indices();
        let switches =
            switches.filter(|node| matches!(self.graph.node_weight(*node), Some(Device::NvSwitch(_))));
        let mut islands: Vec<Vec<usize>> = switches
            .map(|switch| {
                let mut gpus: Vec<usize> = self.graph.neighbors(switch).map(NodeIndex::index).collect();
                gpus.sort_unstable();
                gpus
            })
            .collect();
        islands.sort_unstable();
        islands
    }

    /// The parts of `devices` that PCIe paths of class `farthest` or nearer connect, over devices of the same list
    /// only.
    pub fn pcie_groups(&self, devices: &[usize], farthest: PathClass) -> Vec<Vec<usize>> {
        let mut groups = self
            .components(|device| devices.contains(&device), |connection| connection.is_path_within(farthest));
        groups.retain(|group| group.iter().all(|device| devices.contains(device)));
        groups
    }

    /// [`MachineGraph::pcie_groups`] of all GPUs, as sets.
    pub(crate) fn gpu_groups(&self, farthest: PathClass) -> Vec<GpuSet> {
        let gpus: Vec<usize> = (0..self.gpus).collect();
        let groups = self.pcie_groups(&gpus, farthest);
        groups.into_iter().map(GpuSet::from_iter).collect()
    }

    /// The edges of a picture: all NVLinks, and of the PCIe paths a spanning tree of the nearest ones. In a tree of
    /// PCIe switches, the farthest step between two devices of the spanning tree has the class of their path, so the
    /// tree shows every pair.
    pub fn outline(&self) -> UnGraph<Device, Connection> {
        let mut paths: Vec<_> = self.graph.edge_references().collect();
        paths.retain(|edge| !edge.weight().is_nvlink());
        paths.sort_by_key(|edge| {
            let class = match edge.weight().link {
                Link::Pcie(class) => Some(class),
                Link::NvLink(_) | Link::Itself => None,
            };
            (class, edge.source(), edge.target())
        });
        let mut connected = UnionFind::new(self.graph.node_count());
        paths.retain(|edge| connected.union(edge.source().index(), edge.target().index()));
        let tree: Vec<_> = paths.iter().map(|edge| edge.id()).collect();
        self.graph.filter_map(
            |_, device| Some(*device),
            |edge, connection| (connection.is_nvlink() || tree.contains(&edge)).then_some(*connection),
        )
    }

    /// The connected components over the edges with both ends among `members` that `joins` accepts: each in order,
    /// ordered by their first device.
    fn components(
        &self,
        members: impl Fn(usize) -> bool,
        joins: impl Fn(&Connection) -> bool,
    ) -> Vec<Vec<usize>> {
        let mut connected = UnionFind::new(self.graph.node_count());
        for edge in self.graph.edge_references() {
            let (a, b) = (edge.source().index(), edge.target().index());
            if joins(edge.weight()) && members(a) && members(b) {
                connected.union(a, b);
            }
        }
        let mut components: Vec<(usize, Vec<usize>)> = Vec::new();
        for (device, label) in connected.into_labeling().into_iter().enumerate() {
            match components.iter_mut().find(|(known, _)| *known == label) {
                Some((_, component)) => component.push(device),
                None => components.push((label, vec![device])),
            }
        }
        components.into_iter().map(|(_, component)| component).collect()
    }
}
