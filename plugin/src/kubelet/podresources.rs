//! Reads from kubelet which containers hold which devices: after each Allocate, and every few seconds. Kubelet
//! limits the rate of this call, so bursts are combined.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use gantry_api::{DeviceId, ResourceName};
use gantry_proto::podresources::pod_resources_lister_client::PodResourcesListerClient;
use gantry_proto::podresources::{
    AllocatableResourcesRequest, ListPodResourcesRequest, ListPodResourcesResponse,
};
use gantry_runtime::chain;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};
use tracing::{debug, info, warn};

use super::access;
use crate::handover::{CpuListing, Holding, Listing, SharedHandover};
use crate::observe::Observed;

/// Delay of a read after an Allocate: kubelet lists a pod after its admission, shortly after the call.
const SETTLE_DELAY: Duration = Duration::from_millis(100);
/// Interval of reads without Allocate: devices are freed without notice to the plugin.
const PERIOD: Duration = Duration::from_secs(3);
/// Shortest interval of two reads, far below kubelet's limit of 100 per second.
const MIN_INTERVAL: Duration = Duration::from_millis(100);
/// Time limit; kubelet returns within milliseconds, also while it admits pods.
const DEADLINE: Duration = Duration::from_secs(5);

/// Reads the list until `shutdown`, passes it to the hand-over and publishes it. `reads_cpus`: with the CPUs that kubelet
/// may give to containers alone.
pub async fn poll(
    (socket, reads_cpus): (PathBuf, bool),
    handover: Arc<SharedHandover>,
    observed: Arc<Observed>,
    listings: watch::Sender<Listing>,
    shutdown: CancellationToken,
) {
    let mut client: Option<PodResourcesListerClient<Channel>> = None;
    let mut reachable = None;
    let mut before = Listing::default();
    let mut allocatable_cpus = AllocatableCpus::default();
    loop {
        let ticket = handover.listing_begins();
        let listed = tokio::select! {
            () = shutdown.cancelled() => return,
            listed = tokio::time::timeout(DEADLINE, list(&mut client, &socket, reads_cpus)) =>
                listed.unwrap_or_else(|_| Err(format!("no response within {DEADLINE:?}"))),
        };
        observed.pod_resources(listed.as_ref().err().map(|error| format!("{}: {error}", socket.display())));
        match listed {
            Ok((response, allocatable)) => {
                if reachable != Some(true) {
                    info!(socket = %socket.display(), "kubelet's pod resources are readable");
                }
                reachable = Some(true);
                let allocatable = allocatable_cpus.update(allocatable);
                let cpus = CpuListing { allocatable, held: held_cpus(&response) };
                let now = listing(response);
                let freed = frees(&before, &now);
                before = now.clone();
                observed.holders(now.clone());
                listings.send_replace(now.clone());
                handover.listed(ticket, now, cpus);
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

/// The allocatable CPUs that kubelet returned last. They are kept while kubelet returns errors: a GpuNode without them
/// would have the extender grant devices regardless of CPUs.
#[derive(Debug, Default)]
struct AllocatableCpus {
    last: BTreeSet<u32>,
    fails: bool,
}

impl AllocatableCpus {
    /// Records the result of a call, and returns the CPUs to publish.
    fn update(&mut self, returned: Result<Vec<i64>, Status>) -> BTreeSet<u32> {
        let fails = returned.is_err();
        match returned {
            Ok(cpus) => self.last = numbers(cpus),
            Err(status) => {
                let kept = status.code() != Code::Unimplemented;
                if !kept {
                    self.last.clear();
                }
                if !self.fails {
                    warn!(code = %status.code(), error = status.message(), kept, "cannot read kubelet's allocatable CPUs");
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

/// Reads once: the list, and the allocatable CPUs if asked. A working connection is kept for the next read.
async fn list(
    client: &mut Option<PodResourcesListerClient<Channel>>,
    socket: &Path,
    reads_cpus: bool,
) -> Result<(ListPodResourcesResponse, Result<Vec<i64>, Status>), String> {
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
    let allocatable = match reads_cpus {
        true => {
            let returned = connected.get_allocatable_resources(AllocatableResourcesRequest {}).await;
            returned.map(|allocatable| allocatable.into_inner().cpu_ids)
        }
        false => Ok(Vec::new()),
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

    use super::*;
    use crate::handover::Handover;

    #[test]
    fn allocatable_cpus_outlast_a_failed_call() {
        let mut cpus = AllocatableCpus::default();
        assert_eq!(cpus.update(Err(Status::unavailable("starting"))), [].into());
        assert_eq!(cpus.update(Ok(vec![1, 2])), [1, 2].into());
        for code in [Code::ResourceExhausted, Code::Internal, Code::DeadlineExceeded] {
            assert_eq!(cpus.update(Err(Status::new(code, ""))), [1, 2].into());
        }
        assert_eq!(cpus.update(Ok(Vec::new())), [].into());
        assert_eq!(cpus.update(Ok(vec![3])), [3].into());
        assert_eq!(cpus.update(Err(Status::unimplemented("too old"))), [].into());
    }

    #[tokio::test]
    async fn silent_kubelet_does_not_delay_shutdown() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("kubelet.sock");
        let silent = tokio::net::UnixListener::bind(&socket).unwrap();
        let observed = Arc::new(Observed::default());
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
