//! The device plugin service of one resource. Translates calls; the hand-over decides, the responder builds the
//! response. Never fails a call that can be served, because an error fails the pod permanently.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt};
use gantry_api::{DeviceId, ResourceName};
use gantry_proto::deviceplugin::device_plugin_server::DevicePlugin;
use gantry_proto::deviceplugin::{
    AllocateRequest, AllocateResponse, ContainerPreferredAllocationResponse, Device, DevicePluginOptions,
    Empty, ListAndWatchResponse, NumaNode, PreStartContainerRequest, PreStartContainerResponse,
    PreferredAllocationRequest, PreferredAllocationResponse, TopologyInfo,
};
use gantry_proto::{HEALTHY, UNHEALTHY};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};
use tracing::{debug, warn};

use super::endpoint::OPTIONS;
use crate::allocate::Responder;
use crate::handover::{Request as PreferenceRequest, SharedHandover};
use crate::inventory::{self, Inventory};

/// The shortest interval of two lists to one kubelet: each list makes kubelet write its node status.
const MIN_INTERVAL: Duration = Duration::from_millis(100);

/// The devices of one resource. Shared, so that a stream holds no copy; kubelet's form of them, seven times as large, is
/// made for each message.
pub type DeviceList = Arc<[ListedDevice]>;

/// A device as kubelet lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedDevice {
    id: DeviceId,
    is_healthy: bool,
    numa: Option<u32>,
}

impl From<&ListedDevice> for Device {
    fn from(device: &ListedDevice) -> Self {
        Self {
            id: device.id.to_string(),
            health: if device.is_healthy { HEALTHY } else { UNHEALTHY }.to_owned(),
            topology: device.numa.map(|node| TopologyInfo { nodes: vec![NumaNode { id: node.into() }] }),
        }
    }
}

/// Serves one resource. Made by [`super::Kubelet::service`].
#[derive(Debug)]
pub struct DevicePluginService {
    pub(super) resource: ResourceName,
    /// The lists that ListAndWatch sends.
    pub(super) lists: watch::Receiver<DeviceList>,
    /// The devices behind the IDs.
    pub(super) inventory: watch::Receiver<Arc<Inventory>>,
    /// Selects the devices of each pod.
    pub(super) handover: Arc<SharedHandover>,
    /// What a container needs to use them.
    pub(super) responder: Arc<Responder>,
    /// Ends the streams.
    pub(super) stop: CancellationToken,
    /// Number of open streams.
    pub(super) streams: watch::Sender<usize>,
}

/// Counts a stream while it lives: tonic drops it when the caller or its connection ends it.
struct OpenStream(watch::Sender<usize>);

impl OpenStream {
    fn new(streams: &watch::Sender<usize>) -> Self {
        streams.send_modify(|open| *open = open.saturating_add(1));
        Self(streams.clone())
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.0.send_modify(|open| *open = open.saturating_sub(1));
    }
}

#[tonic::async_trait]
impl DevicePlugin for DevicePluginService {
    type ListAndWatchStream = Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(OPTIONS))
    }

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let open = OpenStream::new(&self.streams);
        let lists = paced(self.lists.clone()).map(move |list| {
            let _lives_with_the_stream = &open;
            Ok(ListAndWatchResponse { devices: list.iter().map(Device::from).collect() })
        });
        Ok(Response::new(Box::pin(lists.take_until(self.stop.clone().cancelled_owned()))))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let requests: Vec<PreferenceRequest> = request
            .into_inner()
            .container_requests
            .into_iter()
            .map(|container| PreferenceRequest {
                resource: self.resource.clone(),
                offered: ids(container.available_device_ids),
                must: ids(container.must_include_device_ids),
                size: usize::try_from(container.allocation_size).unwrap_or(0),
            })
            .collect();
        let answers = self.handover.prefer(requests).await;
        let container_responses = answers
            .into_iter()
            .map(|devices| ContainerPreferredAllocationResponse {
                device_ids: devices.iter().map(ToString::to_string).collect(),
            })
            .collect();
        Ok(Response::new(PreferredAllocationResponse { container_responses }))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let inventory = Arc::clone(&self.inventory.borrow());
        let mut container_responses = Vec::new();
        let mut sets = Vec::new();
        for container in request.into_inner().container_requests {
            let devices = self.resolve(&inventory, &container.device_ids)?;
            self.check_size(&inventory, &devices)?;
            sets.push(devices.iter().map(|device| device.id.clone()).collect());
            let devices: Vec<&inventory::Device> = devices.iter().map(AsRef::as_ref).collect();
            container_responses.push(self.responder.respond(&devices));
        }
        for set in sets {
            self.handover.allocated(&self.resource, set);
        }
        Ok(Response::new(AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        _: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        Ok(Response::new(PreStartContainerResponse {}))
    }
}

impl DevicePluginService {
    /// The devices with these IDs, in request order, without duplicates. An ID of an earlier list is served if
    /// its GPU or MIG device is still offered in another form, because kubelet chose before it read the new
    /// list. Any other unknown ID is an error.
    fn resolve<'i>(
        &self,
        inventory: &'i Inventory,
        asked: &[String],
    ) -> Result<Vec<Cow<'i, inventory::Device>>, Status> {
        let mut positions: HashMap<&str, usize> = HashMap::with_capacity(asked.len());
        for id in asked {
            let next = positions.len();
            positions.entry(id.as_str()).or_insert(next);
        }
        let mut devices: Vec<Option<Cow<'_, inventory::Device>>> = vec![None; positions.len()];
        for device in &inventory.devices {
            if device.resource == self.resource
                && let Some(position) = positions.get(device.id.as_str())
            {
                devices[*position] = Some(Cow::Borrowed(device));
            }
        }
        let mut unknown: Vec<(usize, &str)> = Vec::new();
        for (id, position) in &positions {
            if devices[*position].is_none() {
                devices[*position] = self.former(inventory, id).map(Cow::Owned);
            }
            if devices[*position].is_none() {
                unknown.push((*position, id));
            }
        }
        if !unknown.is_empty() {
            unknown.sort_unstable();
            let unknown = unknown.into_iter().map(|(_, id)| id).collect::<Vec<_>>().join(", ");
            warn!(resource = %self.resource, unknown, "kubelet requested unknown devices");
            return Err(self.refuse(&format!(
                "unknown device: {unknown}; it may have been removed or renamed since kubelet received the device list"
            )));
        }
        let devices: Vec<Cow<'_, inventory::Device>> = devices.into_iter().flatten().collect();
        for device in devices.iter().filter(|device| !device.health.healthy) {
            warn!(device = %device.id, reason = device.health.reason.as_deref().unwrap_or("unknown"), "kubelet allocates an unhealthy device");
        }
        debug!(resource = %self.resource, count = devices.len(), "allocate");
        Ok(devices)
    }

    /// The device of an earlier list with this ID, if its GPU or MIG device is still offered in another form.
    fn former(&self, inventory: &Inventory, id: &str) -> Option<inventory::Device> {
        let (uuid, replica) = match id.split_once("::") {
            Some((uuid, replica)) => (uuid, Some(replica.parse().ok()?)),
            None => (id, None),
        };
        let now = inventory.devices.iter().find(|device| device.uuid == uuid)?;
        warn!(resource = %self.resource, device = id, now = %now.resource, "kubelet allocated from an outdated device list; serving the request");
        Some(inventory::Device { id: id.into(), resource: self.resource.clone(), replica, ..now.clone() })
    }

    /// Refuses several replicas at once if configured so.
    fn check_size(
        &self,
        inventory: &Inventory,
        devices: &[Cow<'_, inventory::Device>],
    ) -> Result<(), Status> {
        let terms = inventory.resources.get(&self.resource).copied().unwrap_or_default();
        let shared = devices.iter().any(|device| device.replica.is_some());
        if !terms.fail_requests_greater_than_one || !shared || devices.len() < 2 {
            return Ok(());
        }
        Err(self.refuse(&format!(
            "maximum request size for shared resources is 1; found {}: request 1 of {}, or whole GPUs; more replicas give no more of a GPU (failRequestsGreaterThanOne)",
            devices.len(),
            self.resource
        )))
    }

    /// A refusal that starts with the text of NVIDIA's plugin, which operators search for.
    fn refuse(&self, what: &str) -> Status {
        Status::invalid_argument(format!(
            "invalid allocation request for {:?}: invalid request: {what}",
            self.resource.as_str()
        ))
    }
}

/// The lists as sent to kubelet: the first at once, each change at once unless a list was sent less than
/// [`MIN_INTERVAL`] ago. The watch channel holds only the latest list: a burst of changes becomes two messages, no
/// change none.
fn paced(lists: watch::Receiver<DeviceList>) -> impl Stream<Item = DeviceList> + Send {
    futures::stream::unfold((lists, None), |(mut lists, sent)| async move {
        if let Some(sent) = sent {
            lists.changed().await.ok()?;
            tokio::time::sleep_until(sent + MIN_INTERVAL).await;
        }
        let list = Arc::clone(&lists.borrow_and_update());
        Some((list, (lists, Some(Instant::now()))))
    })
}

fn ids(texts: Vec<String>) -> BTreeSet<DeviceId> {
    texts.into_iter().map(DeviceId::from).collect()
}

/// The device list of every resource of the inventory, and an empty list for each of `known` without devices.
pub(super) fn lists<'k>(
    inventory: &Inventory,
    known: impl Iterator<Item = &'k ResourceName>,
) -> BTreeMap<ResourceName, DeviceList> {
    let mut devices: BTreeMap<ResourceName, Vec<ListedDevice>> =
        known.map(|resource| (resource.clone(), Vec::new())).collect();
    for device in &inventory.devices {
        devices.entry(device.resource.clone()).or_default().push(ListedDevice {
            id: device.id.clone(),
            is_healthy: device.health.healthy,
            numa: device.numa,
        });
    }
    devices.into_iter().map(|(resource, list)| (resource, list.into())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(ids: &[&str]) -> DeviceList {
        ids.iter().map(|id| ListedDevice { id: (*id).into(), is_healthy: true, numa: None }).collect()
    }

    #[tokio::test]
    async fn burst_of_changes_gives_last_list() {
        let (publish, lists) = watch::channel(list(&["a"]));
        let mut stream = Box::pin(paced(lists));
        assert_eq!(stream.next().await.unwrap().len(), 1);
        for _ in 0..1000 {
            publish.send_replace(list(&[]));
        }
        publish.send_replace(list(&["c", "d", "e"]));
        assert_eq!(stream.next().await.unwrap().len(), 3);
        drop(publish);
        assert!(stream.next().await.is_none(), "no list without a change");
    }

    #[tokio::test]
    async fn lists_have_minimum_interval() {
        let (publish, lists) = watch::channel(list(&[]));
        let mut stream = Box::pin(paced(lists));
        let began = Instant::now();
        for _ in 0..4 {
            publish.send_replace(list(&["a"]));
            stream.next().await.unwrap();
        }
        assert!(began.elapsed() >= 3 * MIN_INTERVAL, "a bound from below, which no load can break");
    }

    #[tokio::test]
    async fn all_streams_get_all_changes() {
        let (publish, lists) = watch::channel(list(&[]));
        let mut streams = [Box::pin(paced(lists.clone())), Box::pin(paced(lists))];
        for ids in [&[][..], &["a"], &["a", "b"]] {
            publish.send_replace(list(ids));
            for stream in &mut streams {
                assert_eq!(stream.next().await.unwrap().len(), ids.len());
            }
        }
    }
}
