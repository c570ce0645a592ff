//! Containers without processes: their environment and devices, their lifetime, and their traces on the node (a control
//! group) and in the pod's status. Annotations on the pod determine the behaviour of its processes.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use gantry_proto::deviceplugin::ContainerAllocateResponse;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::{Value, json};

use super::devices::Role;
use crate::api::meta::now;

/// Annotation: the pod's app containers exit with 0 after this time (`5s`, `300ms`); without it they run until deleted.
pub const RUN_FOR: &str = "sim.gantry.dev/run-for";
/// Annotation: the pod's processes run for this time after the end of the grace period or a forced deletion.
pub const OUTLIVE: &str = "sim.gantry.dev/outlive";

/// How long an init container runs, and how long a well-behaved process takes to end.
pub(super) const MOMENT: Duration = Duration::from_millis(30);

/// What a container was given: what its process would see.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Process {
    /// Name of the container.
    pub container: String,
    /// Devices kubelet allocated, by resource.
    pub devices: BTreeMap<String, BTreeSet<String>>,
    /// Environment from the plugin.
    pub env: BTreeMap<String, String>,
    /// Annotations from the plugin.
    pub annotations: BTreeMap<String, String>,
    /// Device nodes on the host.
    pub device_nodes: BTreeSet<String>,
    /// CDI device names.
    pub cdi_devices: BTreeSet<String>,
    role: Role,
}

impl Process {
    pub(super) fn new(container: &str, role: Role) -> Self {
        Self { container: container.to_owned(), role, ..Self::default() }
    }

    pub(super) fn role(&self) -> Role {
        self.role
    }

    pub(super) fn receive(
        &mut self,
        resource: &str,
        ids: BTreeSet<String>,
        answer: ContainerAllocateResponse,
    ) {
        self.devices.insert(resource.to_owned(), ids);
        self.env.extend(answer.envs);
        self.annotations.extend(answer.annotations);
        self.device_nodes.extend(answer.devices.into_iter().map(|device| device.host_path));
        self.cdi_devices.extend(answer.cdi_devices.into_iter().map(|device| device.name));
    }
}

/// The state of a pod's containers, for its status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Admitted; init containers run.
    Starting,
    /// Apps run.
    Running,
    /// Apps have exited with 0.
    Succeeded,
}

/// The status of an admitted pod. Devices of app containers stand in it from admission on; those of init containers and
/// sidecars never do, as with the real kubelet.
pub(super) fn status(processes: &[Process], stage: Stage, healthy: impl Fn(&str, &str) -> bool) -> Value {
    let one = |process: &Process| {
        let over = stage == Stage::Succeeded || (process.role() == Role::Init && stage != Stage::Starting);
        let up = stage == Stage::Running && !over;
        let state = match (over, up) {
            (true, _) => json!({
                "terminated": {"exitCode": 0, "reason": "Completed", "finishedAt": now()}, "waiting": null, "running": null,
            }),
            (_, true) => json!({"running": {"startedAt": now()}, "waiting": null}),
            _ => json!({"waiting": {"reason": "ContainerCreating"}}),
        };
        let mut status = json!({
            "name": process.container, "image": "sim", "imageID": "", "restartCount": 0,
            "ready": up, "started": up, "state": state,
        });
        if process.role() == Role::App && !process.devices.is_empty() {
            let resources: Vec<Value> = process
                .devices
                .iter()
                .map(|(name, ids)| {
                    let ids: Vec<Value> = ids
                        .iter()
                        .map(|id| json!({"resourceID": id, "health": if healthy(name, id) { "Healthy" } else { "Unhealthy" }}))
                        .collect();
                    json!({"name": name, "resources": ids})
                })
                .collect();
            status["allocatedResourcesStatus"] = resources.into();
        }
        status
    };
    let is_app = |process: &&Process| process.role() == Role::App;
    let apps: Vec<Value> = processes.iter().filter(is_app).map(one).collect();
    let init: Vec<Value> = processes.iter().filter(|process| !is_app(process)).map(one).collect();
    let phase = match stage {
        Stage::Starting => "Pending",
        Stage::Running => "Running",
        Stage::Succeeded => "Succeeded",
    };
    let ready = if stage == Stage::Running { "True" } else { "False" };
    json!({
        "phase": phase,
        "containerStatuses": apps,
        "initContainerStatuses": init,
        "conditions": [{"type": "Ready", "status": ready}, {"type": "ContainersReady", "status": ready}],
    })
}

/// The time an annotation of a pod names.
pub(super) fn duration(pod: &Pod, annotation: &str) -> Option<Duration> {
    let text = pod.annotations().get(annotation)?;
    let read = |number: &str| number.parse::<u64>().ok();
    let duration = match text.strip_suffix("ms") {
        Some(number) => read(number).map(Duration::from_millis),
        None => text.strip_suffix('s').and_then(read).map(Duration::from_secs),
    };
    if duration.is_none() {
        tracing::warn!(pod = pod.name_any(), annotation, text, "no time; write 5s or 300ms");
    }
    duration
}

/// The control group of a pod on a node, as kubelet's cgroupfs driver names it.
#[derive(Debug)]
pub(super) struct Cgroup(PathBuf);

impl Cgroup {
    /// Makes the hierarchy (version 2) that pods' groups lie in.
    pub(super) fn lay_out(root: &Path) -> io::Result<()> {
        std::fs::create_dir_all(root.join("kubepods/besteffort"))?;
        std::fs::write(root.join("cgroup.controllers"), "cpu memory pids\n")
    }

    /// Makes the pod's group and one per container, each with a process in it.
    pub(super) fn create(root: &Path, uid: &str, processes: &[Process]) -> io::Result<Self> {
        let pod = root.join("kubepods/besteffort").join(format!("pod{uid}"));
        for process in processes {
            let container = pod.join(&process.container);
            std::fs::create_dir_all(&container)?;
            std::fs::write(container.join("cgroup.procs"), "1\n")?;
            std::fs::write(container.join("cgroup.events"), "populated 1\nfrozen 0\n")?;
        }
        std::fs::write(pod.join("cgroup.procs"), "")?;
        std::fs::write(pod.join("cgroup.events"), "populated 1\nfrozen 0\n")?;
        Ok(Self(pod))
    }

    /// The processes are gone, and the groups with them.
    pub(super) fn remove(&self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            tracing::warn!(%error, path = %self.0.display(), "control group not removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(name: &str, role: Role) -> Process {
        let mut process = Process::new(name, role);
        let ids = BTreeSet::from(["GPU-a".to_owned()]);
        process.receive("nvidia.com/gpu", ids, ContainerAllocateResponse::default());
        process
    }

    #[test]
    fn app_containers_show_devices_from_admission_on() {
        let processes =
            [process("init", Role::Init), process("side", Role::Sidecar), process("app", Role::App)];
        let status = status(&processes, Stage::Starting, |_, _| true);
        assert_eq!(status["phase"], "Pending");
        assert_eq!(
            status["containerStatuses"][0]["allocatedResourcesStatus"],
            json!([{"name": "nvidia.com/gpu", "resources": [{"resourceID": "GPU-a", "health": "Healthy"}]}])
        );
        for other in [0, 1] {
            assert_eq!(status["initContainerStatuses"][other].get("allocatedResourcesStatus"), None);
        }
    }

    #[test]
    fn control_group_exists_while_processes_run() {
        let root = tempfile::tempdir().unwrap();
        let group = Cgroup::create(root.path(), "u1", &[process("app", Role::App)]).unwrap();
        let events = root.path().join("kubepods/besteffort/podu1/app/cgroup.events");
        assert_eq!(std::fs::read_to_string(&events).unwrap(), "populated 1\nfrozen 0\n");
        group.remove();
        assert!(!root.path().join("kubepods/besteffort/podu1").exists());
    }
}
