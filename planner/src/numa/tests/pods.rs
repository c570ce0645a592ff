//! Pods with devices of two resources, against a model of kubelet.

use std::sync::Arc;

use gantry_api::ResourceName;
use gantry_topology::Purpose;

use super::*;
use crate::fixtures::{bridged, kind};
use crate::kind::{Sharing, Spot};
use crate::layout::{Layout, Offer};
use crate::shape::{Parts, Shape};
use crate::site::Site;

/// A container's kind, devices of each resource, and CPUs.
type Asked = (ContainerKind, [usize; 2], u32);

const RESOURCES: [&str; 2] = ["nvidia.com/gpu", "nvidia.com/mig-1g.10gb"];

fn request(containers: &[Asked]) -> Request {
    let resources = RESOURCES.map(ResourceName::from);
    let names: Vec<String> = (0..containers.len()).map(|number| format!("c{number}")).collect();
    let texts: Vec<([String; 2], String)> = containers
        .iter()
        .map(|(_, devices, cpus)| {
            let cpus = if *cpus == 0 { "500m".to_owned() } else { cpus.to_string() };
            (devices.map(|count| count.to_string()), cpus)
        })
        .collect();
    let asking = |resource: &str| {
        let at = usize::from(resource == RESOURCES[1]);
        let each = names.iter().zip(containers).zip(&texts);
        each.map(move |((name, (kind, ..)), (devices, _))| Container {
            name,
            kind: *kind,
            quantity: Some(devices[at].as_str()),
        })
    };
    let each = names.iter().zip(containers).zip(&texts).map(|((name, (kind, ..)), (_, cpus))| CpuAndMemory {
        name,
        kind: *kind,
        cpu: (Some(cpus.as_str()), None),
        memory: (Some("1Gi"), None),
    });
    Request::read(&resources, asking).unwrap().with_numa(&each)
}

/// A node with devices of both resources, each on a GPU of its own kind.
#[derive(Debug, Clone)]
struct TestNode {
    policy: TopologyManagerPolicy,
    scope: TopologyManagerScope,
    /// The NUMA node of each device, by resource.
    numa: [Vec<u32>; 2],
    free: [DeviceSet; 2],
    /// Empty if the CPU manager is not static.
    cpus: Vec<NumaNode>,
}

impl TestNode {
    fn alignment(&self, resource: usize) -> Option<Alignment> {
        let known: Vec<Option<u32>> = self.numa[resource].iter().copied().map(Some).collect();
        Some(Alignment::new(&kubelet(self.policy, self.scope), &known)?.counting(&self.cpus))
    }

    fn layouts(&self, request: &Request) -> Option<Vec<Layout>> {
        let kind = kind(&bridged());
        let shapes = [0, 1].map(|resource: usize| {
            let spots = (0..self.numa[resource].len())
                .map(|gpu| Spot { gpu: u8::try_from(gpu % 8).unwrap(), slice: None });
            Shape::Parts(Arc::new(Parts::new(spots.collect(), Sharing::Distributed)))
        });
        let alignments = [0, 1].map(|resource| self.alignment(resource));
        let offers = request.asks.iter().map(|ask| {
            let at = usize::from(ask.resource.as_str() == RESOURCES[1]);
            let site = Site {
                kind: &kind,
                shape: &shapes[at],
                cut: &[],
                purpose: Purpose::Local,
                models: &[],
                alignment: alignments[at].as_ref(),
            };
            Offer { site, free: &self.free[at], ask }
        });
        Layout::best_of_all(&offers.collect::<Vec<_>>())
    }

    /// Whether kubelet admits a pod and can be steered to these blocks of each ask. It runs the containers one after
    /// the other.
    fn admits(&self, containers: &[Asked], request: &Request, blocks: &[Vec<DeviceSet>]) -> bool {
        let machine = 3;
        let all_cpus = by_node(&self.cpus, |cpus| cpus.total);
        let mut cpus = by_node(&self.cpus, |cpus| cpus.free);
        let mut reusable_cpus: Vec<u32> = Vec::new();
        let mut available = [0, 1].map(|at: usize| self.free[at].iter().collect::<Vec<usize>>());
        let mut reusable: [Vec<usize>; 2] = [vec![], vec![]];
        let of_devices = |at: usize, count: usize, available: &[usize], reusable: &[usize]| {
            (count > 0).then(|| hints(&self.numa[at], available, reusable, count, machine))
        };
        let counts_cpus = !self.cpus.is_empty();
        let of_cpus = |count: u32, free: &[u32], reusable: &[u32]| {
            (counts_cpus && count > 0).then(|| cpu_hints(&all_cpus, free, reusable, count, machine))
        };
        let devices_of_pod = |at: usize| request.devices(RESOURCES[at]) as usize;
        let whole = match self.scope {
            TopologyManagerScope::Container => None,
            TopologyManagerScope::Pod => {
                let needs = NumaDemand::of_pod(request.numa());
                let nodes = merged(
                    self.policy,
                    &[
                        of_devices(0, devices_of_pod(0), &available[0], &[]),
                        of_devices(1, devices_of_pod(1), &available[1], &[]),
                        of_cpus(needs.cpus, &cpus, &[]),
                    ],
                );
                let Some(nodes) = nodes else {
                    return false;
                };
                Some(nodes)
            }
        };
        for (number, (kind, counts, count)) in containers.iter().enumerate() {
            let is_counted = counts_cpus && *count > 0;
            if counts.iter().sum::<usize>() == 0 && !is_counted {
                continue;
            }
            let nodes = whole.clone().or_else(|| {
                merged(
                    self.policy,
                    &[
                        of_devices(0, counts[0], &available[0], &reusable[0]),
                        of_devices(1, counts[1], &available[1], &reusable[1]),
                        of_cpus(*count, &cpus, &reusable_cpus),
                    ],
                )
            });
            let Some(nodes) = nodes else {
                return false;
            };
            if is_counted {
                let (taken, reused) = take(*count, &nodes, &all_cpus, &mut cpus, &mut reusable_cpus);
                if taken.len() + reused.len() < *count as usize {
                    return false;
                }
                if *kind == Init {
                    reusable_cpus.extend(taken.iter().chain(&reused));
                }
            }
            for (ask, blocks) in request.asks.iter().zip(blocks) {
                let at = usize::from(ask.resource.as_str() == RESOURCES[1]);
                let name = format!("c{number}");
                let Some(container) = ask.containers.iter().find(|container| *container.name == *name) else {
                    continue;
                };
                let granted: Vec<usize> = container.devices_of(blocks).iter().collect();
                if !granted.iter().all(|device| nodes.contains(&self.numa[at][*device])) {
                    return false;
                }
                available[at].retain(|device| !granted.contains(device));
                reusable[at] = if *kind == Init { granted } else { Vec::new() };
            }
        }
        true
    }

    /// Whether there are blocks that kubelet admits: every number of free devices of each NUMA node, for each block.
    fn admits_any(&self, containers: &[Asked], request: &Request, found: &mut Vec<Vec<DeviceSet>>) -> bool {
        let next = request.asks.iter().zip(&*found).position(|(ask, blocks)| blocks.len() < ask.blocks.len());
        let Some(at) = next else {
            return self.admits(containers, request, found);
        };
        let ask = &request.asks[at];
        let resource = usize::from(ask.resource.as_str() == RESOURCES[1]);
        let mut by_node: [Vec<usize>; 3] = [vec![], vec![], vec![]];
        let is_taken = |device: &usize| found[at].iter().any(|block| block.contains(*device));
        for device in self.free[resource].iter().filter(|device| !is_taken(device)) {
            by_node[self.numa[resource][device] as usize].push(device);
        }
        let size = ask.blocks[found[at].len()] as usize;
        for first in 0..=size {
            for second in 0..=size - first {
                let counts = [first, second, size - first - second];
                if by_node.iter().zip(counts).any(|(devices, count)| devices.len() < count) {
                    continue;
                }
                let block = by_node.iter().zip(counts).flat_map(|(devices, count)| &devices[..count]);
                found[at].push(block.copied().collect());
                if self.admits_any(containers, request, found) {
                    return true;
                }
                found[at].pop();
            }
        }
        false
    }
}

prop_compose! {
    fn nodes()(
        numa in prop::array::uniform2(prop::collection::vec(0..3u32, 1..6)),
        free in prop::array::uniform2(any::<u8>()),
        totals in prop::option::of(prop::array::uniform3(0..5u32)),
        held in prop::array::uniform3(0..3u32),
        restricted in any::<bool>(),
        pod_scope in any::<bool>(),
    ) -> TestNode {
        let free = [0, 1].map(|at: usize| {
            (0..numa[at].len()).filter(|device| free[at] >> device & 1 == 1).collect::<DeviceSet>()
        });
        let cpus = totals.filter(|totals| totals.iter().sum::<u32>() > 0);
        TestNode {
            policy: POLICIES[if restricted { 1 } else { 2 }],
            scope: if pod_scope { TopologyManagerScope::Pod } else { TopologyManagerScope::Container },
            numa,
            free,
            cpus: cpus.map_or_else(Vec::new, |totals| machine(totals, [0; 3], held)),
        }
    }
}

prop_compose! {
    fn pods()(
        containers in prop::collection::vec((0..3usize, prop::array::uniform2(0..4usize), 0..4u32), 1..4),
    ) -> Vec<Asked> {
        let kinds = [Init, Sidecar, App];
        let mut containers: Vec<Asked> =
            containers.into_iter().map(|(kind, devices, cpus)| (kinds[kind], devices, cpus)).collect();
        containers.sort_by_key(|(kind, ..)| *kind == App);
        containers
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2048))]

    /// Devices are found if kubelet admits any, and kubelet admits those that are found.
    #[test]
    fn sets_of_two_resources_exist_if_kubelet_admits_any(node in nodes(), containers in pods()) {
        let request = request(&containers);
        let is_unknown = |ask: &Ask| ask.containers.iter().any(|container| container.any_of_held > 0);
        if request.asks.len() < 2 || request.asks.iter().any(is_unknown) {
            return Ok(());
        }
        let layouts = node.layouts(&request);
        let mut blocks = vec![Vec::new(); 2];
        let exists = node.admits_any(&containers, &request, &mut blocks);
        prop_assert_eq!(layouts.is_some(), exists, "{:?}", blocks);
        if let Some(layouts) = layouts {
            let blocks: Vec<Vec<DeviceSet>> = layouts.into_iter().map(|layout| layout.blocks).collect();
            prop_assert!(node.admits(&containers, &request, &blocks), "refused: {:?}", blocks);
        }
    }
}
