//! The worker of one admitted pod: from its first status to the end of its processes. One task per pod; admission does
//! not wait for it.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, Patch, PatchParams, Preconditions};
use kube::{Client, ResourceExt};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::admission::Refusal;
use super::containers::{Cgroup, MOMENT, OUTLIVE, Process, RUN_FOR, Stage, duration, status};
use super::devices::Role;
use super::plugins::Plugins;

/// The pod in the API, as far as kubelet uses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Desired {
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
    pub(super) desired: watch::Receiver<Desired>,
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
            Desired::Run => {
                self.leave();
                self.plugins.with_devices(|devices| devices.release(&uid));
                self.report(Stage::Succeeded).await;
            }
            Desired::End => {
                self.outlive().await;
                self.leave();
                self.plugins.with_devices(|devices| devices.release(&uid));
                // As kubelet does: a pod that it ended is seen to have ended before it goes.
                self.report(Stage::Succeeded).await;
                self.confirm_deletion(&uid).await;
            }
            // Kubelet has freed the devices already; the processes take their time.
            Desired::Gone => {
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
        let ended = desired.wait_for(|desired| *desired != Desired::Run);
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
