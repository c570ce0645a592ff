//! The devices of each container from kubelet's pod resources socket: the reference of the tests. Read from outside,
//! like a monitoring agent does; ordinary init containers are never included.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use gantry_proto::podresources::pod_resources_lister_client::PodResourcesListerClient;
use gantry_proto::podresources::{AllocatableResourcesRequest, ListPodResourcesRequest};
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

use crate::cluster::Node;
use crate::{Error, Result};

const SOCKET: &str = "/var/lib/kubelet/pod-resources/kubelet.sock";
/// Kubelet answers this call ten times a second at most.
const AFTER_REFUSAL: Duration = Duration::from_millis(200);

/// Names a container: namespace, pod, container.
pub type ContainerName = (String, String, String);

/// The devices of one resource that kubelet could give out, held or not: those its plugin now calls healthy.
///
/// # Errors
/// Kubelet's socket does not answer.
pub async fn allocatable(node: &Node, resource: &str) -> Result<BTreeSet<String>> {
    let mut client = connect(node).await?;
    let answer = client.get_allocatable_resources(AllocatableResourcesRequest {}).await;
    let devices = answer.map_err(|status| failed(node, status))?.into_inner().devices;
    let ours = devices.into_iter().filter(|devices| devices.resource_name == resource);
    Ok(ours.flat_map(|devices| devices.device_ids).collect())
}

/// The devices of one resource that each container on a node holds.
///
/// # Errors
/// Kubelet's socket does not answer.
pub async fn held(node: &Node, resource: &str) -> Result<BTreeMap<ContainerName, BTreeSet<String>>> {
    let mut client = connect(node).await?;
    let answer = loop {
        match client.list(ListPodResourcesRequest {}).await {
            Ok(answer) => break answer.into_inner(),
            Err(status) if status.code() == Code::ResourceExhausted => {
                tokio::time::sleep(AFTER_REFUSAL).await;
            }
            Err(status) => return Err(failed(node, status)),
        }
    };
    let mut held = BTreeMap::new();
    for pod in answer.pod_resources {
        for container in pod.containers {
            let devices: BTreeSet<String> = container
                .devices
                .into_iter()
                .filter(|devices| devices.resource_name == resource)
                .flat_map(|devices| devices.device_ids)
                .collect();
            if !devices.is_empty() {
                held.insert((pod.namespace.clone(), pod.name.clone(), container.name), devices);
            }
        }
    }
    Ok(held)
}

async fn connect(node: &Node) -> Result<PodResourcesListerClient<Channel>> {
    // Under /proc, for the socket lies on the node's own mount; a plain path there would be too long for a socket.
    let path = node.sandbox().file(SOCKET);
    let endpoint = Endpoint::try_from(format!("unix://{}", path.display()));
    let endpoint = endpoint.map_err(|error| failed(node, error))?;
    let channel = endpoint.connect().await.map_err(|error| failed(node, error))?;
    Ok(PodResourcesListerClient::new(channel))
}

fn failed(node: &Node, source: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::PodResources { node: node.name().to_owned(), source: Box::new(source) }
}
