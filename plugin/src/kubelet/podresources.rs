//! Reads from kubelet which containers hold which devices: after each Allocate, and every few seconds. Kubelet
//! limits the rate of this call, so bursts are combined.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use gantry_api::{DeviceId, ResourceName};
use gantry_proto::podresources::pod_resources_lister_client::PodResourcesListerClient;
use gantry_proto::podresources::{
    AllocatableResourcesRequest, AllocatableResourcesResponse, ContainerMemory, ListPodResourcesRequest,
    ListPodResourcesResponse,
};
use gantry_runtime::chain;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};
use tracing::{debug, info, warn};

use super::access;
use crate::handover::{Allocatable, Holding, Listing, NumaListing, SharedHandover};
use crate::observe::Observations;

/// Delay of a read after an Allocate: kubelet lists a pod after its admission, shortly after the call.
const SETTLE_DELAY: Duration = Duration::from_millis(100);
/// Interval of reads without Allocate: devices are freed without notice to the plugin.
const PERIOD: Duration = Duration::from_secs(3);
/// Shortest interval of two reads, far below kubelet's limit of 100 per second.
const MIN_INTERVAL: Duration = Duration::from_millis(100);
/// Time limit; kubelet returns within milliseconds, also while it admits pods.
const DEADLINE: Duration = Duration::from_secs(5);

/// Reads the list until `shutdown`, passes it to the hand-over and publishes it. `reads_numa`: with the CPUs and
/// the memory that kubelet may give to containers.
pub async fn poll(
    (socket, reads_numa): (PathBuf, bool),
    handover: Arc<SharedHandover>,
    observed: Arc<Observations>,
    listings: watch::Sender<Listing>,
    shutdown: CancellationToken,
) {
    let mut client: Option<PodResourcesListerClient<Channel>> = None;
    let mut reachable = None;
    let mut before = Listing::default();
    let mut known_allocatable = KnownAllocatable::default();
    loop {
        let ticket = handover.listing_begins();
        let listed = tokio::select! {
            () = shutdown.cancelled() => return,
            listed = tokio::time::timeout(DEADLINE, list(&mut client, &socket, reads_numa)) =>
                listed.unwrap_or_else(|_| Err(format!("no response within {DEADLINE:?}"))),
        };
        observed.pod_resources(listed.as_ref().err().map(|error| format!("{}: {error}", socket.display())));
        match listed {
            Ok((response, allocatable)) => {
                if reachable != Some(true) {
                    info!(socket = %socket.display(), "kubelet's pod resources are readable");
                }
                reachable = Some(true);
                let numa = NumaListing {
                    allocatable: known_allocatable.update(allocatable),
                    held_cpus: held_cpus(&response),
                    held_memory: held_memory(&response),
                };
                let now = listing(response);
                let freed = frees(&before, &now);
                before = now.clone();
                observed.holders(now.clone());
                listings.send_replace(now.clone());
                handover.listed(ticket, now, numa);
                if freed {
                    handover.devices_freed();
                }
            }
            Err(error) => {
                if reachable != Some(false) {
                    warn!(socket = %socket.display(), %error, "cannot read kubelet's pod resources; holders are derived from grants only");
                }
                reachable = Some(false);
                observed.holders(Listing::default());
            }
        }
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(PERIOD) => {}
            () = handover.allocation_served() => {
                debug!("reading pod resources after an allocation");
                tokio::select! {
                    () = shutdown.cancelled() => return,
                    () = tokio::time::sleep(SETTLE_DELAY.max(MIN_INTERVAL)) => {}
                }
            }
        }
    }
}

/// The allocatable CPUs and memory that kubelet returned last. They are kept while kubelet returns errors: a GpuNode
/// without them would have the extender grant devices regardless of them.
#[derive(Debug, Default)]
struct KnownAllocatable {
    last: Allocatable,
    fails: bool,
}

impl KnownAllocatable {
    /// Records the result of a call, and returns what to publish.
    fn update(&mut self, returned: Result<AllocatableResourcesResponse, Status>) -> Allocatable {
        let fails = returned.is_err();
        match returned {
            Ok(response) => self.last = allocatable(response),
            Err(status) => {
                let kept = status.code() != Code::Unimplemented;
                if !kept {
                    self.last = Allocatable::default();
                }
                if !self.fails {
                    warn!(code = %status.code(), error = status.message(), kept, "cannot read kubelet's allocatable CPUs and memory");
                }
            }
        }
        self.fails = fails;
        self.last.clone()
    }
}

/// Whether a container of `before` no longer holds a device.
fn frees(before: &Listing, now: &Listing) -> bool {
    before.0.iter().any(|(holding, set)| now.0.get(holding) != Some(set))
}

/// Reads once: the list, and the allocatable CPUs and memory if asked. A working connection is kept for the next read.
async fn list(
    client: &mut Option<PodResourcesListerClient<Channel>>,
    socket: &Path,
    reads_numa: bool,
) -> Result<(ListPodResourcesResponse, Result<AllocatableResourcesResponse, Status>), String> {
    let mut connected = match client.take() {
        Some(connected) => connected,
        // Checked first, because a failing client would be most of an idle plugin's work.
        None if !socket.exists() => {
            return Err(
                "the socket does not exist; start kubelet, or name its socket by --pod-resources-socket"
                    .to_owned(),
            );
        }
        None => connect(socket)
            .await
            .map_err(|error| format!("{}{}", chain(&error), access::remedy_of(&error)))?,
    };
    let allocatable = match reads_numa {
        true => {
            let returned = connected.get_allocatable_resources(AllocatableResourcesRequest {}).await;
            returned.map(tonic::Response::into_inner)
        }
        false => Ok(AllocatableResourcesResponse::default()),
    };
    let listed = connected
        .list(ListPodResourcesRequest {})
        .await
        .map_err(|status| format!("{}: {}", status.code(), status.message()))?;
    *client = Some(connected);
    Ok((listed.into_inner(), allocatable))
}

async fn connect(socket: &Path) -> Result<PodResourcesListerClient<Channel>, tonic::transport::Error> {
    let channel = Endpoint::try_from(format!("unix://{}", socket.display()))?.connect().await?;
    // The list of a busy node is long; kubelet sets no limit either.
    Ok(PodResourcesListerClient::new(channel).max_decoding_message_size(64 << 20))
}

/// The CPUs that containers have alone.
fn held_cpus(response: &ListPodResourcesResponse) -> BTreeSet<u32> {
    let containers = response.pod_resources.iter().flat_map(|pod| &pod.containers);
    numbers(containers.flat_map(|container| container.cpu_ids.iter().copied()))
}

/// The memory that containers have of certain NUMA nodes.
fn held_memory(response: &ListPodResourcesResponse) -> Vec<(BTreeSet<u32>, u64)> {
    let containers = response.pod_resources.iter().flat_map(|pod| &pod.containers);
    containers.flat_map(|container| &container.memory).filter_map(memory).collect()
}

/// The NUMA nodes and the size of plain memory; `None` for huge pages.
fn memory(entry: &ContainerMemory) -> Option<(BTreeSet<u32>, u64)> {
    let nodes = entry.topology.iter().flat_map(|topology| &topology.nodes);
    (entry.memory_type == "memory").then(|| (numbers(nodes.map(|node| node.id)), entry.size))
}

fn allocatable(response: AllocatableResourcesResponse) -> Allocatable {
    let mut by_node: BTreeMap<u32, u64> = BTreeMap::new();
    for (nodes, size) in response.memory.iter().filter_map(memory) {
        // Kubelet has one entry per NUMA node.
        if let Some(node) = nodes.first() {
            let known = by_node.entry(*node).or_default();
            *known = known.saturating_add(size);
        }
    }
    Allocatable { cpus: numbers(response.cpu_ids), memory: by_node }
}

fn numbers(cpus: impl IntoIterator<Item = i64>) -> BTreeSet<u32> {
    cpus.into_iter().filter_map(|cpu| cpu.try_into().ok()).collect()
}

/// Kubelet's list by container and resource, merged from kubelet's entries.
fn listing(response: ListPodResourcesResponse) -> Listing {
    let mut holdings = BTreeMap::new();
    for pod in response.pod_resources {
        for container in pod.containers {
            for entry in container.devices {
                let key = Holding {
                    namespace: pod.namespace.clone(),
                    pod: pod.name.clone(),
                    container: container.name.clone(),
                    resource: ResourceName::from(entry.resource_name),
                };
                holdings
                    .entry(key)
                    .or_insert_with(BTreeSet::new)
                    .extend(entry.device_ids.into_iter().map(DeviceId::from));
            }
        }
    }
    Listing(holdings)
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use gantry_proto::podresources::{ContainerResources, NumaNode, PodResources, TopologyInfo};

    use super::*;
    use crate::handover::Handover;

    #[test]
    fn allocatable_cpus_outlast_a_failed_call() {
        let mut known = KnownAllocatable::default();
        let mut cpus = |returned: Result<&[i64], Status>| {
            let response = |cpus: &[i64]| AllocatableResourcesResponse {
                cpu_ids: cpus.to_vec(),
                ..AllocatableResourcesResponse::default()
            };
            known.update(returned.map(response)).cpus
        };
        assert_eq!(cpus(Err(Status::unavailable("starting"))), [].into());
        assert_eq!(cpus(Ok(&[1, 2])), [1, 2].into());
        for code in [Code::ResourceExhausted, Code::Internal, Code::DeadlineExceeded] {
            assert_eq!(cpus(Err(Status::new(code, ""))), [1, 2].into());
        }
        assert_eq!(cpus(Ok(&[])), [].into());
        assert_eq!(cpus(Ok(&[3])), [3].into());
        assert_eq!(cpus(Err(Status::unimplemented("too old"))), [].into());
    }

    /// Kubelet lists memory and huge pages, allocatable by NUMA node and held also of several.
    #[test]
    fn memory_is_read_without_huge_pages() {
        let entry = |memory_type: &str, size, nodes: &[i64]| ContainerMemory {
            memory_type: memory_type.to_owned(),
            size,
            topology: Some(TopologyInfo { nodes: nodes.iter().map(|id| NumaNode { id: *id }).collect() }),
        };
        let response = AllocatableResourcesResponse {
            memory: vec![entry("memory", 8, &[0]), entry("hugepages-1Gi", 4, &[0]), entry("memory", 6, &[1])],
            ..AllocatableResourcesResponse::default()
        };
        assert_eq!(allocatable(response).memory, [(0, 8), (1, 6)].into());
        let memory = vec![entry("memory", 9, &[0, 1]), entry("hugepages-1Gi", 4, &[0])];
        let container = ContainerResources { memory, ..ContainerResources::default() };
        let pod = PodResources { containers: vec![container], ..PodResources::default() };
        let listed = ListPodResourcesResponse { pod_resources: vec![pod] };
        assert_eq!(held_memory(&listed), [([0, 1].into(), 9)]);
    }

    #[tokio::test]
    async fn silent_kubelet_does_not_delay_shutdown() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("kubelet.sock");
        let silent = tokio::net::UnixListener::bind(&socket).unwrap();
        let observed = Arc::new(Observations::default());
        let handover = SharedHandover::new(Handover::new("node-1".into()), Arc::clone(&observed), None);
        let shutdown = CancellationToken::new();
        let mut polling = Box::pin(poll(
            (socket, true),
            Arc::new(handover),
            observed,
            watch::channel(Listing::default()).0,
            shutdown.clone(),
        ));
        let _connection = tokio::select! {
            () = &mut polling => panic!("ended by itself"),
            connection = silent.accept() => connection.unwrap(),
        };
        shutdown.cancel();
        assert!(polling.now_or_never().is_some());
    }
}
