//! Admission of one pod, as kubelet does it: container by container, init containers first, GetPreferredAllocation
//! where there is a choice, Allocate always. An error of the plugin fails the pod for good.

use std::collections::BTreeSet;

use gantry_api::quantity;
use gantry_proto::deviceplugin::{
    AllocateRequest, ContainerAllocateRequest, ContainerAllocateResponse,
    ContainerPreferredAllocationRequest, PreferredAllocationRequest,
};
use k8s_openapi::api::core::v1::{Container, Pod};
use kube::ResourceExt;
use rand::seq::SliceRandom;

use super::containers::Process;
use super::devices::{Devices, Offer, Role, Want};
use super::plugins::{Plugin, Plugins};

/// Why a pod is not admitted: `reason` and `message` of its status.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) reason: String,
    pub(super) message: String,
}

/// Gives every container of a pod its devices.
///
/// # Errors
/// The first shortage or plugin error; devices given so far are to be released.
pub(super) async fn admit(plugins: &Plugins, pod: &Pod) -> Result<Vec<Process>, Refusal> {
    let uid = pod.uid().unwrap_or_default();
    let namespace = pod.namespace().unwrap_or_default();
    plugins.with_devices(|devices| devices.begin(&uid, &namespace, &pod.name_any()));
    let mut processes = Vec::new();
    for (container, role) in containers(pod) {
        let mut process = Process::new(&container.name, role);
        for (resource, count) in extended_requests(container) {
            let want = Want { uid: &uid, container: &container.name, role, resource: &resource, count };
            let (ids, answer) = allocate(plugins, want).await?;
            process.receive(&resource, ids, answer);
        }
        processes.push(process);
    }
    Ok(processes)
}

/// Containers in the order kubelet allocates for them.
fn containers(pod: &Pod) -> impl Iterator<Item = (&Container, Role)> {
    pod.spec.iter().flat_map(|spec| {
        let init = spec.init_containers.iter().flatten().map(|container| {
            let stays = container.restart_policy.as_deref() == Some("Always");
            (container, if stays { Role::Sidecar } else { Role::Init })
        });
        init.chain(spec.containers.iter().map(|container| (container, Role::App)))
    })
}

fn extended_requests(container: &Container) -> Vec<(String, usize)> {
    let limits = container.resources.as_ref().and_then(|resources| resources.limits.as_ref());
    limits
        .into_iter()
        .flatten()
        .filter(|(name, _)| name.contains('/'))
        .map(|(name, asked)| (name.clone(), quantity::count(&asked.0).unwrap_or(0) as usize))
        .filter(|(_, count)| *count > 0)
        .collect()
}

async fn allocate(
    plugins: &Plugins,
    want: Want<'_>,
) -> Result<(BTreeSet<String>, ContainerAllocateResponse), Refusal> {
    if !plugins.with_devices(|devices| devices.serves(want.resource)) {
        return Err(Refusal {
            reason: format!("OutOf{}", want.resource),
            message: format!(
                "Pod was rejected: Node didn't have enough resource: {}, requested: {}, used: 0, capacity: 0",
                want.resource, want.count
            ),
        });
    }
    let unexpected = |problem: String| Refusal {
        reason: "UnexpectedAdmissionError".into(),
        message: format!("Pod was rejected: Allocate failed due to {problem}, which is unexpected"),
    };
    let offer = plugins
        .with_devices(|devices| devices.offer(want))
        .map_err(|shortage| unexpected(shortage.to_string()))?;
    let Some(mut plugin) = plugins.get(want.resource) else {
        return Err(unexpected(format!("no healthy devices present; plugin of {} is gone", want.resource)));
    };
    let ids = match offer {
        Offer::Reuse(ids) => ids,
        Offer::Choose { available, must } => {
            let preferred =
                preferred(&mut plugin, &available, &must, want.count).await.map_err(|status| {
                    unexpected(format!("device plugin GetPreferredAllocation rpc failed with err: {status}"))
                })?;
            Devices::settle(&available, &must, &preferred, want.count)
        }
    };
    let mut device_ids: Vec<String> = ids.iter().cloned().collect();
    device_ids.shuffle(&mut rand::rng());
    let request = AllocateRequest { container_requests: vec![ContainerAllocateRequest { device_ids }] };
    let answer = plugin
        .client
        .allocate(request)
        .await
        .map_err(|status| unexpected(format!("rpc error: {status}")))?
        .into_inner();
    let container = answer.container_responses.into_iter().next();
    let container =
        container.ok_or_else(|| unexpected("no containers return in allocation response".into()))?;
    plugins.with_devices(|devices| devices.take(want, &ids));
    Ok((ids, container))
}

/// The devices that the plugin prefers, if it registered for GetPreferredAllocation.
async fn preferred(
    plugin: &mut Plugin,
    available: &[String],
    must: &[String],
    count: usize,
) -> Result<Vec<String>, tonic::Status> {
    if !plugin.options.get_preferred_allocation_available {
        return Ok(Vec::new());
    }
    let request = PreferredAllocationRequest {
        container_requests: vec![ContainerPreferredAllocationRequest {
            available_device_ids: available.to_vec(),
            must_include_device_ids: must.to_vec(),
            allocation_size: i32::try_from(count).unwrap_or(i32::MAX),
        }],
    };
    let answer = plugin.client.get_preferred_allocation(request).await?.into_inner();
    let container = answer.container_responses.into_iter().next();
    Ok(container.map(|container| container.device_ids).unwrap_or_default())
}
