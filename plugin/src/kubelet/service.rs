//! The device plugin service of one resource, as kubelet calls it. Translates; the hand-over decides, the responder words the
//! answer. Never fails a call that can be served: any error here fails a pod for good.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::Pin;
use std::sync::Arc;

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
use tokio_stream::wrappers::WatchStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};
use tracing::{debug, warn};

use super::register::OPTIONS;
use crate::allocate::Responder;
use crate::handover::{Desk, Request as Ask};
use crate::inventory::{self, Inventory};

/// The devices of one resource in kubelet's words. Shared, so that a stream holds no copy.
pub(super) type DeviceList = Arc<[Device]>;

/// Serves one resource.
#[derive(Debug)]
pub(super) struct DevicePluginService {
    /// The resource.
    pub(super) resource: ResourceName,
    /// What ListAndWatch sends.
    pub(super) lists: watch::Receiver<DeviceList>,
    /// The devices behind the IDs.
    pub(super) inventory: watch::Receiver<Arc<Inventory>>,
    /// Who gets which.
    pub(super) desk: Arc<Desk>,
    /// What a container needs to use them.
    pub(super) responder: Arc<Responder>,
    /// Ends the streams.
    pub(super) stop: CancellationToken,
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
        // The watch channel holds the latest list only: a burst of changes becomes one message, no change becomes none.
        let lists = WatchStream::new(self.lists.clone()).map(|list| {
            Ok(ListAndWatchResponse {
                devices: list.to_vec(),
            })
        });
        Ok(Response::new(Box::pin(
            lists.take_until(self.stop.clone().cancelled_owned()),
        )))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let asks: Vec<Ask> = request
            .into_inner()
            .container_requests
            .into_iter()
            .map(|container| Ask {
                resource: self.resource.clone(),
                offered: ids(container.available_device_ids),
                must: ids(container.must_include_device_ids),
                size: usize::try_from(container.allocation_size).unwrap_or(0),
            })
            .collect();
        let answers = self.desk.prefer(asks).await;
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
            container_responses.push(self.responder.respond(&devices));
            sets.push(devices.iter().map(|device| device.id.clone()).collect());
        }
        for set in sets {
            self.desk.allocated(&self.resource, set);
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
    /// The devices of these IDs, in inventory order. An ID that is not there is the one thing that cannot be served.
    fn resolve<'i>(
        &self,
        inventory: &'i Inventory,
        asked: &[String],
    ) -> Result<Vec<&'i inventory::Device>, Status> {
        let wanted: BTreeSet<&str> = asked.iter().map(String::as_str).collect();
        let devices: Vec<_> = inventory
            .devices
            .iter()
            .filter(|device| device.resource == self.resource && wanted.contains(device.id.as_str()))
            .collect();
        if devices.len() < wanted.len() {
            let unknown: Vec<&str> = wanted
                .into_iter()
                .filter(|id| devices.iter().all(|device| device.id.as_str() != *id))
                .collect();
            warn!(resource = %self.resource, ?unknown, "kubelet asked for devices that are not here");
            return Err(Status::invalid_argument(format!(
                "{} has no device {} on this node; it may have been removed or renamed since kubelet was told of it",
                self.resource,
                unknown.join(", ")
            )));
        }
        for device in devices.iter().filter(|device| !device.health.healthy) {
            warn!(device = %device.id, reason = device.health.reason.as_deref().unwrap_or("unknown"), "kubelet allocates an unhealthy device");
        }
        debug!(resource = %self.resource, count = devices.len(), "allocate");
        Ok(devices)
    }
}

fn ids(texts: Vec<String>) -> BTreeSet<DeviceId> {
    texts.into_iter().map(DeviceId::from).collect()
}

/// The device list of every resource in the inventory, and an empty one for each of `known` that it no longer has.
pub(super) fn lists<'k>(
    inventory: &Inventory,
    known: impl Iterator<Item = &'k ResourceName>,
) -> BTreeMap<ResourceName, DeviceList> {
    let mut devices: BTreeMap<ResourceName, Vec<Device>> =
        known.map(|resource| (resource.clone(), Vec::new())).collect();
    for device in &inventory.devices {
        devices.entry(device.resource.clone()).or_default().push(Device {
            id: device.id.to_string(),
            health: if device.health.healthy { HEALTHY } else { UNHEALTHY }.to_owned(),
            topology: device.numa.map(|node| TopologyInfo {
                nodes: vec![NumaNode { id: node.into() }],
            }),
        });
    }
    devices
        .into_iter()
        .map(|(resource, list)| (resource, list.into()))
        .collect()
}
