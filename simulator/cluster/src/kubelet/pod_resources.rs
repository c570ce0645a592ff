//! The pod resources service: devices by container, as the device manager records them. Ordinary init containers are
//! never listed, as with the real kubelet.

use std::collections::BTreeMap;
use std::sync::Arc;

use gantry_proto::podresources::pod_resources_lister_server::PodResourcesLister;
use gantry_proto::podresources::{
    AllocatableResourcesRequest, AllocatableResourcesResponse, ContainerDevices, ContainerResources,
    GetPodResourcesRequest, GetPodResourcesResponse, ListPodResourcesRequest, ListPodResourcesResponse,
    PodResources,
};
use tonic::{Request, Response, Status};

use super::devices::{PodDevices, Role};
use super::plugins::Plugins;

/// The service on pod-resources/kubelet.sock.
#[derive(Debug, Clone)]
pub(super) struct PodResourcesService(pub(super) Arc<Plugins>);

#[tonic::async_trait]
impl PodResourcesLister for PodResourcesService {
    async fn list(
        &self,
        _: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        let pod_resources = self.0.with_devices(|devices| devices.pods().values().map(listed).collect());
        Ok(Response::new(ListPodResourcesResponse { pod_resources }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<AllocatableResourcesRequest>,
    ) -> Result<Response<AllocatableResourcesResponse>, Status> {
        let devices =
            self.0.with_devices(|devices| devices.all().map(|(resource, id)| one(resource, id)).collect());
        Ok(Response::new(AllocatableResourcesResponse { devices }))
    }

    async fn get(
        &self,
        request: Request<GetPodResourcesRequest>,
    ) -> Result<Response<GetPodResourcesResponse>, Status> {
        let wanted = request.into_inner();
        let found = self.0.with_devices(|devices| {
            let mut pods = devices.pods().values();
            pods.find(|pod| pod.name == wanted.pod_name && pod.namespace == wanted.pod_namespace).map(listed)
        });
        match found {
            Some(pod) => Ok(Response::new(GetPodResourcesResponse { pod_resources: Some(pod) })),
            None => Err(Status::unknown(format!(
                "pod {} in namespace {} not found",
                wanted.pod_name, wanted.pod_namespace
            ))),
        }
    }
}

fn listed(pod: &PodDevices) -> PodResources {
    let mut containers: BTreeMap<&str, Vec<ContainerDevices>> = BTreeMap::new();
    for held in pod.containers.iter().filter(|held| held.role != Role::Init) {
        let devices = held.ids.iter().map(|id| one(&held.resource, id));
        containers.entry(&held.container).or_default().extend(devices);
    }
    PodResources {
        name: pod.name.clone(),
        namespace: pod.namespace.clone(),
        containers: containers
            .into_iter()
            .map(|(name, devices)| ContainerResources { name: name.to_owned(), devices })
            .collect(),
    }
}

/// One entry per device, as kubelet writes it.
fn one(resource: &str, id: &str) -> ContainerDevices {
    ContainerDevices { resource_name: resource.to_owned(), device_ids: vec![id.to_owned()], topology: None }
}
