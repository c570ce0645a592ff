//! One pod on the node: its admission, and its worker from the first status to the end of its processes. Kubelet admits
//! container by container, init containers first, GetPreferredAllocation where there is a choice, Allocate always. An
//! error of the plugin fails the pod for good. A worker is a task of its own; admission does not wait for it.

use std::collections::BTreeSet;
use std::sync::Arc;

use gantry_api::quantity;
use gantry_proto::deviceplugin::{
    AllocateRequest, ContainerAllocateRequest, ContainerAllocateResponse,
    ContainerPreferredAllocationRequest, PreferredAllocationRequest,
};
use k8s_openapi::api::core::v1::{Container, Pod};
use kube::api::{Api, DeleteParams, Patch, PatchParams, Preconditions};
use kube::{Client, ResourceExt};
use rand::seq::SliceRandom;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::containers::{Cgroup, MOMENT, OUTLIVE, Process, RUN_FOR, Stage, duration, status};
use super::devices::{DeviceDemand, Devices, Offer, Role};
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
            let want =
                DeviceDemand { uid: &uid, container: &container.name, role, resource: &resource, count };
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
    want: DeviceDemand<'_>,
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

/// The pod in the API, as far as kubelet uses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DesiredState {
    /// It shall run.
    Run,
    /// It was deleted and shall end in good order.
    End,
    /// It is gone from the API.
    Gone,
}

/// An admitted pod.
pub(super) struct PodWorker {
    pub(super) client: Client,
    pub(super) plugins: Arc<Plugins>,
    pub(super) pod: Arc<Pod>,
    pub(super) processes: Vec<Process>,
    pub(super) cgroup: Option<Cgroup>,
    pub(super) desired: watch::Receiver<DesiredState>,
    /// Ends processes that outlive their pod.
    pub(super) killed: CancellationToken,
}

impl PodWorker {
    /// Runs the pod to the end of its processes.
    pub(super) async fn run(mut self) {
        let uid = self.pod.uid().unwrap_or_default();
        if !self.live().await {
            return;
        }
        let desired = *self.desired.borrow();
        match desired {
            // The processes have exited by themselves.
            DesiredState::Run => {
                self.leave();
                self.plugins.with_devices(|devices| devices.release(&uid));
                self.report(Stage::Succeeded).await;
            }
            DesiredState::End => {
                self.outlive().await;
                self.leave();
                self.plugins.with_devices(|devices| devices.release(&uid));
                // As kubelet does: a pod that it ended is seen to have ended before it goes.
                self.report(Stage::Succeeded).await;
                self.confirm_deletion(&uid).await;
            }
            // Kubelet has freed the devices already; the processes take their time.
            DesiredState::Gone => {
                self.outlive().await;
                self.leave();
            }
        }
    }

    /// Until the processes exit or the pod is deleted; `false` if kubelet has stopped, which ends no process.
    async fn live(&mut self) -> bool {
        self.report(Stage::Starting).await;
        for _ in self.processes.iter().filter(|process| process.role() == Role::Init) {
            sleep(MOMENT).await;
        }
        self.report(Stage::Running).await;
        let spec = self.pod.spec.as_ref();
        let restarts = spec.and_then(|spec| spec.restart_policy.as_deref()) == Some("Always");
        let run_for = duration(&self.pod, RUN_FOR).filter(|_| !restarts);
        let mut desired = self.desired.clone();
        let ended = desired.wait_for(|desired| *desired != DesiredState::Run);
        match run_for {
            Some(time) => tokio::select! {
                () = sleep(time) => true,
                desired = ended => desired.is_ok(),
            },
            None => ended.await.is_ok(),
        }
    }

    /// Until the processes of a deleted pod are gone.
    async fn outlive(&self) {
        tokio::select! {
            () = sleep(duration(&self.pod, OUTLIVE).unwrap_or(MOMENT)) => {}
            () = self.killed.cancelled() => {}
        }
    }

    async fn report(&self, stage: Stage) {
        let healthy =
            |resource: &str, id: &str| self.plugins.with_devices(|devices| devices.is_healthy(resource, id));
        let status = status(&self.processes, stage, healthy);
        write_status(&self.client, &self.pod, status).await;
    }

    fn leave(&self) {
        if let Some(cgroup) = &self.cgroup {
            cgroup.remove();
        }
    }

    async fn confirm_deletion(&self, uid: &str) {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &self.pod.namespace().unwrap_or_default());
        let only_this = DeleteParams::default()
            .grace_period(0)
            .preconditions(Preconditions { uid: Some(uid.to_owned()), resource_version: None });
        if let Err(error) = pods.delete(&self.pod.name_any(), &only_this).await {
            tracing::debug!(%error, pod = self.pod.name_any(), "pod already gone");
        }
    }
}

/// Fails a pod that is not admitted.
pub(super) async fn refuse(client: &Client, pod: &Pod, refusal: &Refusal) {
    let status = json!({"phase": "Failed", "reason": refusal.reason, "message": refusal.message});
    write_status(client, pod, status).await;
}

async fn write_status(client: &Client, pod: &Pod, status: serde_json::Value) {
    let pods: Api<Pod> = Api::namespaced(client.clone(), &pod.namespace().unwrap_or_default());
    // The UID guards against a new pod of the same name.
    let patch = json!({"metadata": {"uid": pod.uid()}, "status": status});
    let written = pods.patch_status(&pod.name_any(), &PatchParams::default(), &Patch::Strategic(patch)).await;
    if let Err(error) = written {
        tracing::debug!(%error, pod = pod.name_any(), "status not written");
    }
}
