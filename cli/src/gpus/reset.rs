//! `gantry reset gpu`: resets a drained GPU by the driver's nvidia-smi, in a privileged pod on its node, while the plugin
//! keeps NVML closed. What the plugin reads afterwards decides whether the reset has helped.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use gantry_api::{Cordons, GpuFault, GpuNode, names};
use gantry_extender::gpu_node::{self, Changes};
use gantry_extender::gpu_reset::{Obstacle, group, obstacle};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::json;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::request::tried;
use super::target::{self, Target};
use super::{ResetArgs, ResetCommand, ResetOptions, TIMEOUT, cordon};
use crate::runtime::{ExitWith, print};
use crate::visible::Visible;

/// Pause between two looks at the cluster.
const PAUSE: Duration = Duration::from_secs(1);
/// How long the plugin may take to close NVML, to open it again, and until the GPUs are healthy.
const PLUGIN_LIMIT: Duration = Duration::from_secs(60);
/// How long the pod of an earlier attempt may take to be deleted.
const TERMINATION_LIMIT: Duration = Duration::from_secs(30);
/// How long a deleted pod may take to end before NVML is opened: its grace period and some seconds.
const GONE_LIMIT: Duration = Duration::from_secs(15);
/// The exit code of a failure that has no other.
const FAILED: u8 = 1;
/// Container of the plugin's pods.
const PLUGIN_CONTAINER: &str = "plugin";
/// Where the driver's root is in the pod.
const ROOT: &str = "/driver-root";

/// Runs `gantry reset`.
///
/// # Errors
/// The cluster has no such GPU, the GPU is not drained, or the reset has not helped.
pub(crate) async fn reset(args: ResetArgs, shutdown: CancellationToken) -> anyhow::Result<()> {
    let ResetCommand::Gpu(options) = args.what;
    let words = std::slice::from_ref(&options.one.gpu);
    let (client, _, found) = cordon::read(&options.one.cluster, words).await?;
    let target = found.into_iter().next().context("one GPU is named")?;
    let mut reset = Reset {
        client,
        options,
        target,
        pod: None,
        has_begun: false,
        is_closed: false,
        is_done: false,
        failure: FAILED,
    };
    let ended = shutdown.run_until_cancelled(reset.run()).await;
    let ended = ended.unwrap_or_else(|| Err(anyhow!("interrupted")));
    let cleaned = reset.clean_up().await;
    let error = match (ended, cleaned) {
        (Ok(()), cleaned) => return cleaned,
        (Err(error), _) if !reset.has_begun => error,
        (Err(error), Ok(())) => anyhow!("{error:#}; {}", reset.left()),
        (Err(error), Err(cleaned)) => anyhow!("{error:#}; {}; {cleaned:#}", reset.left()),
    };
    let code = if reset.is_done { names::RESET_UNHEALTHY_EXIT } else { reset.failure };
    Err(match code {
        FAILED => error,
        code => ExitWith { code, error }.into(),
    })
}

/// The work on one GPU, and those that are reset with it.
struct Reset {
    client: Client,
    options: ResetOptions,
    target: Target,
    /// The pod that resets, while it exists.
    pod: Option<String>,
    /// Whether anything was changed.
    has_begun: bool,
    /// Whether the plugin is requested to keep NVML closed.
    is_closed: bool,
    /// Whether nvidia-smi has reported success.
    is_done: bool,
    /// The exit code of a failure before that.
    failure: u8,
}

/// What is known of the plugin on the node.
#[derive(Debug, Clone, PartialEq)]
struct InstalledPlugin {
    image: String,
    pull_secrets: serde_json::Value,
    /// Root of the driver on the node.
    driver_root: String,
}

impl Reset {
    async fn run(&mut self) -> anyhow::Result<()> {
        let node = self.node().await?;
        let group = self.group(&node)?;
        self.check_drained(&node, &group)?;
        let installed = self.installed().await?;
        for other in group.iter().filter(|gpu| **gpu != self.target) {
            report(&format!(
                "{other} is reset too: NVLinks join it, and before Ampere the driver resets such GPUs together"
            ))?;
        }
        for gpu in group.iter().filter(|gpu| has_instances(&node, gpu)) {
            report(&format!("{gpu} loses its MIG instances by the reset"))?;
        }
        if self.options.dry_run {
            return report(&format!("{} would be reset; nothing was changed", self.target));
        }
        self.close_nvml().await?;
        // Another client may have changed it while the plugin closed NVML.
        let node = self.node().await?;
        self.check_drained(&node, &group)?;
        let before: Vec<GpuFault> = faults(&node, &group).cloned().collect();
        self.make_pod(&installed, &group).await?;
        self.follow_pod().await?;
        self.is_done = true;
        report(&format!("{} was reset by nvidia-smi", some(&group)))?;
        // By its own clock, or on behalf of another client.
        if !is_nvml_closed(&self.node().await?) {
            bail!("the plugin on {} opened NVML during the reset", self.target.node);
        }
        self.clean_up().await?;
        self.wait_for("open NVML and read the GPUs again", |node| !is_nvml_closed(node)).await?;
        self.lift(&group, &before).await?;
        self.wait_until_healthy(&group).await?;
        if !self.uncordon().await? {
            return report(&format!("{} is healthy; `gantry uncordon gpu` returns it", some(&group)));
        }
        report(&format!("{} is healthy and uncordoned", self.target))?;
        // They may be cordoned for another reason.
        for other in group.iter().filter(|gpu| **gpu != self.target) {
            report(&format!("{other} is healthy and stays cordoned"))?;
        }
        Ok(())
    }

    async fn node(&self) -> anyhow::Result<GpuNode> {
        let node = &self.target.node;
        let api = Api::<GpuNode>::all(self.client.clone());
        let found = tried(async || api.get_opt(node).await).await?;
        let found = found.with_context(|| format!("the GpuNode {node} is gone"))?;
        self.target.located(&found)?;
        Ok(found)
    }

    /// The GPU with those that the driver resets together with it.
    fn group(&self, node: &GpuNode) -> anyhow::Result<Vec<Target>> {
        let gpus = group(&node.spec.machine, self.target.index);
        gpus.into_iter().map(|gpu| target::target(node, gpu).map_err(Into::into)).collect()
    }

    /// Checks that the GPUs are drained.
    fn check_drained(&mut self, node: &GpuNode, group: &[Target]) -> anyhow::Result<()> {
        let Some(refusal) = refusal(node, &located(node, group)?, &self.target.located(node)?) else {
            return Ok(());
        };
        self.failure = names::RESET_NOT_DRAINED_EXIT;
        bail!(refusal)
    }

    /// Uncordons the GPU if the options request it. Returns whether it is uncordoned.
    async fn uncordon(&self) -> anyhow::Result<bool> {
        let Some(rule) = &self.options.uncordon_of_rule else {
            if self.options.uncordon {
                cordon::set(&self.client, &self.target, None).await?;
            }
            return Ok(self.options.uncordon);
        };
        match cordon::lift_of_rule(&self.client, &self.target, rule).await? {
            None => Ok(true),
            Some(cordon) => {
                report(&format!("{} stays {cordon}: the rule {rule} did not set this cordon", self.target))?;
                Ok(false)
            }
        }
    }

    /// The plugin's pod on the node: the pod that resets uses its image.
    async fn installed(&self) -> anyhow::Result<InstalledPlugin> {
        let namespace = &self.options.one.system.system_namespace;
        let pods = Api::<Pod>::namespaced(self.client.clone(), namespace);
        let params = ListParams::default()
            .labels("app.kubernetes.io/part-of=gantry")
            .fields(&format!("spec.nodeName={}", self.target.node));
        let found = tried(async || pods.list(&params).await).await?;
        found.items.iter().find_map(installed).with_context(|| {
            format!(
                "no pod of the plugin runs on {} in the namespace {namespace}: install it, or name the namespace by \
                 --system-namespace",
                self.target.node
            )
        })
    }

    /// Has the plugin close NVML.
    async fn close_nvml(&mut self) -> anyhow::Result<()> {
        let limit = PLUGIN_LIMIT * 2 + Duration::from_secs(self.options.timeout.into());
        let now = Timestamp::now();
        let until = now + SignedDuration::try_from(limit).unwrap_or(SignedDuration::from_mins(5));
        let written = gpu_node::annotate(&self.client, &self.target.node, |annotations| {
            let known = annotations.get(names::NVML_CLOSED_ANNOTATION);
            let known =
                known.filter(|known| known.parse::<Timestamp>().is_ok_and(|until| until > now)).cloned();
            let mut changes = Changes::new();
            if known.is_none() {
                changes.insert(names::NVML_CLOSED_ANNOTATION.to_owned(), Some(format!("{until:.0}")));
            }
            (changes, known)
        });
        let written = limited(written).await;
        // A request without a response may have been carried out.
        self.is_closed = !matches!(written, Ok(Some(_)) | Err(kube::Error::Api(_)));
        self.has_begun = self.is_closed;
        if let Some(until) = written.map_err(|error| self.denied(error))? {
            bail!(
                "another reset of a GPU of {} is under way, at most until {until}; \
                 `kubectl annotate gpunode {} {}-` ends one that was given up",
                self.target.node,
                self.target.node,
                names::NVML_CLOSED_ANNOTATION
            );
        }
        report(&format!("waiting for the plugin on {} to close NVML", self.target.node))?;
        self.wait_for("close NVML", is_nvml_closed).await
    }

    /// Waits for the plugin.
    async fn wait_for(&self, what: &str, holds: impl Fn(&GpuNode) -> bool) -> anyhow::Result<()> {
        let deadline = Instant::now() + PLUGIN_LIMIT;
        while !holds(&self.node().await?) {
            if Instant::now() >= deadline {
                let seconds = PLUGIN_LIMIT.as_secs();
                bail!(
                    "the plugin on {} did not {what} within {seconds} s, or is older than this command; see its log",
                    self.target.node
                );
            }
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    }

    async fn make_pod(&mut self, installed: &InstalledPlugin, group: &[Target]) -> anyhow::Result<()> {
        let pod = pod(installed, &self.target, group, self.options.timeout);
        let pod: Pod = serde_json::from_value(pod).context("the pod that resets")?;
        let name = pod.name_any();
        let deadline = Instant::now() + TERMINATION_LIMIT;
        loop {
            // A request without a response may have been carried out.
            self.pod = Some(name.clone());
            let Err(error) = limited(self.pods().create(&PostParams::default(), &pod)).await else {
                break;
            };
            if matches!(error, kube::Error::Api(_)) {
                self.pod = None;
            }
            // That of an earlier attempt: it has ended, or is being deleted.
            if !matches!(&error, kube::Error::Api(status) if status.code == 409 && Instant::now() < deadline)
            {
                return Err(self.denied(error));
            }
            let known = tried(async || self.pods().get_opt(&name).await).await?;
            if known.is_some_and(|known| has_ended(&known)) {
                self.delete_pod(Some(&name)).await?;
            }
            tokio::time::sleep(PAUSE).await;
        }
        report(&format!("pod {}/{name} resets {}", self.options.one.system.system_namespace, some(group)))
    }

    /// Waits for the end of the pod.
    async fn follow_pod(&mut self) -> anyhow::Result<()> {
        let name = self.pod.clone().context("a pod was made")?;
        let name = name.as_str();
        // kubelet ends the pod at its deadline; this one is for a kubelet that is away.
        let deadline = Instant::now() + Duration::from_secs(self.options.timeout.into()) + PAUSE * 10;
        loop {
            let found = tried(async || self.pods().get_opt(name).await).await?;
            let found = found.with_context(|| format!("the pod {name} that resets was deleted"))?;
            match outcome(&found) {
                Outcome::Succeeded => return Ok(()),
                Outcome::Failed(why) => {
                    self.failure = names::RESET_REFUSED_EXIT;
                    bail!("{} was not reset: {why}", self.target)
                }
                Outcome::Waits(why) if Instant::now() >= deadline => {
                    bail!("{} is not reset after {} s: {why}", self.target, self.options.timeout)
                }
                Outcome::Waits(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    /// Ends the quarantine of faults from before the reset, where NVML does not show the reset.
    async fn lift(&self, group: &[Target], before: &[GpuFault]) -> anyhow::Result<()> {
        let node = self.node().await?;
        if let Some(fault) = faults(&node, group).find(|fault| !is_among(fault, before)) {
            bail!("{} has a new fault since the reset: {}", fault.gpu, fault.reason);
        }
        let gpus: BTreeSet<&str> = faults(&node, group).map(|fault| fault.gpu.as_str()).collect();
        if gpus.is_empty() {
            return Ok(());
        }
        let value = gpus.iter().copied().collect::<Vec<_>>().join(",");
        let written = gpu_node::annotate(&self.client, &self.target.node, |_| {
            let name = names::LIFT_QUARANTINE_ANNOTATION.to_owned();
            (Changes::from([(name, Some(value.clone()))]), ())
        });
        limited(written).await.map_err(|error| self.denied(error))
    }

    /// Waits until nothing is wrong with the GPUs. Just after a reset links and the fabric are not up yet.
    async fn wait_until_healthy(&self, group: &[Target]) -> anyhow::Result<()> {
        let deadline = Instant::now() + PLUGIN_LIMIT;
        loop {
            let node = self.node().await?;
            let Some(problem) = problem(&node, &located(&node, group)?) else {
                return Ok(());
            };
            if Instant::now() >= deadline {
                bail!(
                    "{problem}: leave it cordoned, and see `gantry evidence gpu {}/{}` for a replacement",
                    self.target.node,
                    self.target.uuid
                );
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Removes the pod and the request to keep NVML closed.
    async fn clean_up(&mut self) -> anyhow::Result<()> {
        let pod = self.pod.take();
        let mut deleted = self.delete_pod(pod.as_deref()).await;
        if let Some(name) = pod.filter(|_| deleted.is_ok() && !self.is_done) {
            deleted = self.wait_until_gone(&name).await;
        }
        if std::mem::take(&mut self.is_closed) {
            self.open_nvml().await?;
        }
        deleted
    }

    async fn delete_pod(&self, name: Option<&str>) -> anyhow::Result<()> {
        let Some(name) = name else {
            return Ok(());
        };
        let deleted = tried(async || match self.pods().delete(name, &DeleteParams::default()).await {
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            deleted => deleted.map(drop),
        });
        deleted.await.with_context(|| format!("the pod {name} could not be deleted"))
    }

    /// Waits until a deleted pod has ended: nvidia-smi may still run in it.
    async fn wait_until_gone(&self, name: &str) -> anyhow::Result<()> {
        let deadline = Instant::now() + GONE_LIMIT;
        while tried(async || self.pods().get_opt(name).await).await?.is_some() && Instant::now() < deadline {
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    }

    /// Ends the request to keep NVML closed.
    async fn open_nvml(&self) -> anyhow::Result<()> {
        let (node, name) = (&self.target.node, names::NVML_CLOSED_ANNOTATION);
        let opened = tried(async || {
            let opened = gpu_node::annotate(&self.client, node, |annotations| {
                let mut changes = Changes::new();
                if annotations.contains_key(name) {
                    changes.insert(name.to_owned(), None);
                }
                (changes, ())
            });
            opened.await
        });
        opened
            .await
            .with_context(|| format!("the annotation {name} of {node} could not be removed; it expires"))
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.options.one.system.system_namespace)
    }

    fn denied(&self, error: kube::Error) -> anyhow::Error {
        match error {
            kube::Error::Api(status) if status.code == 403 => anyhow!(
                "{}; docs/operate.md#reset has the rights, and the namespace {} must admit privileged pods",
                status.message,
                self.options.one.system.system_namespace
            ),
            error => anyhow!("{}", gantry_runtime::chain(&error)),
        }
    }

    /// What a reset that ends early leaves behind.
    fn left(&self) -> &'static str {
        if self.is_done { "the GPU was reset, and stays cordoned" } else { "the GPU stays cordoned" }
    }
}

/// The response to a request that must not be sent twice.
async fn limited<T>(request: impl Future<Output = kube::Result<T>>) -> kube::Result<T> {
    let response = tokio::time::timeout(TIMEOUT, request).await;
    response.unwrap_or_else(|_| {
        Err(kube::Error::Service(format!("no response within {} s", TIMEOUT.as_secs()).into()))
    })
}

/// These GPUs at their present indices.
fn located(node: &GpuNode, gpus: &[Target]) -> anyhow::Result<Vec<Target>> {
    gpus.iter().map(|gpu| gpu.located(node)).collect()
}

/// Whether a GPU has MIG instances. They are not kept over a reset, unlike the MIG mode.
fn has_instances(node: &GpuNode, target: &Target) -> bool {
    let gpu = node.spec.machine.gpus().iter().find(|gpu| gpu.index == target.index);
    let mig = gpu.and_then(|gpu| gpu.mig.as_ref());
    mig.is_some_and(|mig| mig.enabled && !mig.instances.is_empty())
}

/// Why these GPUs may not be reset now: one is not cordoned, or held.
fn refusal(node: &GpuNode, group: &[Target], named: &Target) -> Option<String> {
    group.iter().find_map(|gpu| {
        let obstacle: Obstacle = obstacle(node, &gpu.uuid)?;
        let with = match gpu == named {
            true => String::new(),
            false => {
                format!(", and the driver resets it together with GPU {}, which NVLinks join", named.index)
            }
        };
        Some(format!(
            "{gpu} {obstacle}{with}; nothing was done: `gantry drain gpu {}/{}` first",
            gpu.node, gpu.index
        ))
    })
}

/// The faults of these GPUs.
fn faults<'a>(node: &'a GpuNode, group: &'a [Target]) -> impl Iterator<Item = &'a GpuFault> {
    let faults = node.status.iter().flat_map(|status| &status.faults);
    faults.filter(|fault| group.iter().any(|gpu| gpu.uuid.as_str() == fault.gpu))
}

/// Whether a fault is one of `before`. Times are compared with one another only: the clock of the node is another one.
fn is_among(fault: &GpuFault, before: &[GpuFault]) -> bool {
    before.iter().any(|known| (&known.gpu, known.xid, &known.since) == (&fault.gpu, fault.xid, &fault.since))
}

/// What is wrong with these GPUs apart from the cordon. What is not known is a problem too.
fn problem(node: &GpuNode, group: &[Target]) -> Option<String> {
    let name = node.name_any();
    let Some(status) = &node.status else {
        return Some(format!("the plugin on {name} reports nothing after the reset"));
    };
    let ready = status.conditions.iter().find(|condition| condition.type_ == "Ready");
    let unready = || match ready {
        Some(ready) if ready.status == "True" => None,
        Some(ready) => {
            Some(format!("the plugin on {name} does not serve after the reset: {}", ready.message))
        }
        None => Some(format!("the plugin on {name} does not serve after the reset")),
    };
    let cordons = Cordons::of(node.metadata.annotations.as_ref());
    let found = group.iter().find_map(|gpu| {
        let uuid = gpu.uuid.as_str();
        let fault = status.faults.iter().find(|fault| fault.gpu == uuid).map(|fault| fault.reason.clone());
        // A cordoned GPU without another problem has its cordon as reason.
        let cordon = cordons.get(&gpu.uuid).map_or_else(String::new, ToString::to_string);
        let device = || {
            let devices = status.devices.iter().filter(|device| device.gpu == gpu.index);
            let mut unhealthy = devices.filter(|device| !device.health.healthy);
            unhealthy.find_map(|device| device.health.reason.clone().filter(|reason| *reason != cordon))
        };
        let problem = || {
            let found = status.problems.iter().find(|problem| problem.gpu == uuid && problem.unhealthy)?;
            Some(found.cause.clone())
        };
        let reason = fault.or_else(device).or_else(problem)?;
        Some(format!("{gpu} is not healthy after the reset: {reason}"))
    });
    found.or_else(unready)
}

/// Whether the plugin keeps NVML closed.
fn is_nvml_closed(node: &GpuNode) -> bool {
    let conditions = node.status.iter().flat_map(|status| &status.conditions);
    conditions.into_iter().any(|known| known.type_ == names::NVML_CLOSED_CONDITION && known.status == "True")
}

/// What the pod of a plugin is made of; `None` for another pod.
fn installed(pod: &Pod) -> Option<InstalledPlugin> {
    let spec = pod.spec.as_ref()?;
    let container = spec.containers.iter().find(|container| container.name == PLUGIN_CONTAINER)?;
    let root = container.env.iter().flatten().find(|variable| variable.name == "NVIDIA_DRIVER_ROOT");
    let root = root.and_then(|variable| variable.value.clone()).filter(|root| !root.is_empty());
    Some(InstalledPlugin {
        image: container.image.clone()?,
        pull_secrets: json!(spec.image_pull_secrets),
        driver_root: root.unwrap_or_else(|| "/".to_owned()),
    })
}

/// The pod that resets. It runs the driver's own nvidia-smi in the driver's root, and has no token of the API server.
fn pod(installed: &InstalledPlugin, target: &Target, group: &[Target], timeout: u32) -> serde_json::Value {
    let gpus = group.iter().map(|gpu| gpu.uuid.as_str());
    let args: Vec<&str> = ["reset-device", "--driver-root", ROOT].into_iter().chain(gpus).collect();
    json!({
        "metadata": {
            "name": format!("gantry-reset-{}", target.uuid.as_str().trim_start_matches("GPU-").to_lowercase()),
            "labels": {"app.kubernetes.io/name": "gantry-reset", "app.kubernetes.io/part-of": "gantry"},
        },
        "spec": {
            "nodeName": target.node,
            "restartPolicy": "Never",
            "activeDeadlineSeconds": timeout,
            "terminationGracePeriodSeconds": 10,
            "automountServiceAccountToken": false,
            "imagePullSecrets": installed.pull_secrets,
            "tolerations": [{"operator": "Exists"}],
            "containers": [{
                "name": "reset",
                "image": installed.image,
                "args": args,
                // What nvidia-smi prints is read from the pod's status.
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "securityContext": {"privileged": true, "runAsUser": 0},
                "volumeMounts": [{
                    "name": "driver-root", "mountPath": ROOT, "mountPropagation": "HostToContainer",
                }],
            }],
            "volumes": [{"name": "driver-root", "hostPath": {"path": installed.driver_root}}],
        },
    })
}

/// How far the pod is.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Succeeded,
    /// The reason, or what nvidia-smi printed.
    Failed(String),
    /// What it waits for.
    Waits(String),
}

fn outcome(pod: &Pod) -> Outcome {
    let status = pod.status.as_ref();
    let container = status.and_then(|status| status.container_statuses.as_ref()?.first()?.state.as_ref());
    let waiting = container.and_then(|state| state.waiting.as_ref());
    let waiting = waiting.and_then(|waiting| waiting.message.clone().or_else(|| waiting.reason.clone()));
    match status.and_then(|status| status.phase.as_deref()).unwrap_or_default() {
        "Succeeded" => Outcome::Succeeded,
        "Failed" => {
            let printed = container.and_then(|state| state.terminated.as_ref()?.message.clone());
            let why = printed.or_else(|| status?.message.clone()).or_else(|| status?.reason.clone());
            let why = why.unwrap_or_else(|| "nvidia-smi failed".to_owned());
            Outcome::Failed(why.split_whitespace().collect::<Vec<_>>().join(" "))
        }
        "Running" => Outcome::Waits("nvidia-smi has not ended".to_owned()),
        _ => Outcome::Waits(waiting.unwrap_or_else(|| "the pod has not started".to_owned())),
    }
}

/// Whether the pod resets nothing any more.
fn has_ended(pod: &Pod) -> bool {
    !matches!(outcome(pod), Outcome::Waits(_))
}

/// The GPUs in words.
fn some(group: &[Target]) -> String {
    group.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn report(line: &str) -> anyhow::Result<()> {
    print(&Visible::new(&format!("{line}\n")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A node of a machine file of the simulator, with cordoned GPUs and a holder of one GPU.
    fn node(machine: &str, cordoned: &[u8], held: Option<u8>) -> GpuNode {
        let mut machine: serde_json::Value = serde_saphyr::from_str(machine).unwrap();
        for (index, gpu) in machine["gpus"].as_array_mut().unwrap().iter_mut().enumerate() {
            gpu["uuid"] = format!("GPU-{index}").into();
        }
        let annotations: serde_json::Map<_, _> = cordoned
            .iter()
            .map(|gpu| (format!("gantry.dev/cordon-GPU-{gpu}"), "to be drained".into()))
            .collect();
        let gpus = machine["gpus"].as_array().unwrap().len();
        let devices: Vec<_> = (0..gpus)
            .map(|gpu| json!({"id": format!("GPU-{gpu}"), "resource": "nvidia.com/gpu", "gpu": gpu, "healthy": true}))
            .collect();
        let holders: Vec<_> = held
            .iter()
            .map(|gpu| {
                json!({"namespace": "research", "pod": "train-0", "resource": "nvidia.com/gpu",
                    "devices": [format!("GPU-{gpu}")], "provenance": "PodResources"})
            })
            .collect();
        serde_json::from_value(json!({
            "apiVersion": "gantry.dev/v1alpha1", "kind": "GpuNode",
            "metadata": {"name": "a", "annotations": annotations},
            "spec": {"machine": machine}, "status": {"devices": devices, "holders": holders},
        }))
        .unwrap()
    }

    fn targets(node: &GpuNode, index: u8) -> Vec<Target> {
        group(&node.spec.machine, index).into_iter().map(|gpu| target::target(node, gpu).unwrap()).collect()
    }

    fn indices(machine: &str, index: u8) -> Vec<u8> {
        group(&node(machine, &[], None).spec.machine, index).iter().map(|gpu| gpu.index).collect()
    }

    const H100: &str = include_str!("../../../simulator/machines/hgx-h100.yaml");
    const A100: &str = include_str!("../../../simulator/machines/dgx-a100.yaml");
    const L4: &str = include_str!("../../../simulator/machines/l4-4x-pcie.yaml");

    /// The driver resets the GPUs of an Ampere board alone. Before, and where the architecture is unknown, it does not.
    #[test]
    fn gpus_before_ampere_are_reset_with_their_nvlinks() {
        assert_eq!(indices(H100, 3), [3]);
        assert_eq!(indices(A100, 3), [3]);
        assert_eq!(indices(L4, 3), [3]);
        let switched = indices(include_str!("../../../simulator/machines/dgx2-16x-v100.yaml"), 3);
        assert_eq!(switched, (0..16).collect::<Vec<_>>(), "NVSwitches join all");
        let meshed = indices(include_str!("../../../simulator/machines/dgx1-v100.yaml"), 3);
        assert_eq!(meshed, (0..8).collect::<Vec<_>>(), "each is joined to some");
        assert_eq!(indices(&L4.replace("computeCapability: \"8.9\"", ""), 3), [3], "no NVLinks");
        let pairs = include_str!("../../../simulator/machines/a40-8x-bridged.yaml");
        assert_eq!(
            indices(&pairs.replace("computeCapability: \"8.6\"", ""), 3),
            [2, 3],
            "a bridge joins two"
        );
    }

    #[test]
    fn gpu_that_is_not_drained_is_refused() {
        let of = |cordoned: &[u8], held| {
            let node = node(H100, cordoned, held);
            let group = targets(&node, 3);
            refusal(&node, &group, &group[0])
        };
        assert_eq!(of(&[3], None), None);
        assert_eq!(of(&[3], Some(2)), None, "another GPU is held");
        assert_eq!(
            of(&[2], None).unwrap(),
            "a GPU 3 (GPU-3) is not cordoned; nothing was done: `gantry drain gpu a/3` first"
        );
        assert_eq!(
            of(&[3], Some(3)).unwrap(),
            "a GPU 3 (GPU-3) is held by research/train-0; nothing was done: `gantry drain gpu a/3` first"
        );
    }

    /// One GPU of a pair that the driver resets together is still in use.
    #[test]
    fn gpu_whose_peer_is_held_is_refused() {
        let machine = include_str!("../../../simulator/machines/a40-8x-bridged.yaml");
        let machine = machine.replace("computeCapability: \"8.6\"", "computeCapability: \"7.5\"");
        let of = |cordoned: &[u8], held| {
            let node = node(&machine, cordoned, held);
            let group = targets(&node, 3);
            assert_eq!(group.len(), 2);
            refusal(&node, &group, &group[1])
        };
        assert_eq!(of(&[2, 3], None), None);
        insta::assert_snapshot!(of(&[3], None).unwrap(), @"a GPU 2 (GPU-2) is not cordoned, and the driver resets it together with GPU 3, which NVLinks join; nothing was done: `gantry drain gpu a/2` first");
        insta::assert_snapshot!(of(&[2, 3], Some(2)).unwrap(), @"a GPU 2 (GPU-2) is held by research/train-0, and the driver resets it together with GPU 3, which NVLinks join; nothing was done: `gantry drain gpu a/2` first");
    }

    /// The clock of the node is an hour behind that of the operator.
    #[test]
    fn fault_is_new_if_it_was_not_there_before() {
        let fault = |gpu: &str, xid: u64, since: &str| -> GpuFault {
            let fault =
                json!({"gpu": gpu, "xid": xid, "class": "resettable", "reason": "Xid", "since": since});
            serde_json::from_value(fault).unwrap()
        };
        let first = fault("GPU-3", 95, "2026-11-02T10:00:00Z");
        let before = [first.clone()];
        assert!(is_among(&first, &before));
        for new in [
            fault("GPU-3", 95, "2026-11-02T10:00:01Z"),
            fault("GPU-3", 79, "2026-11-02T10:00:00Z"),
            fault("GPU-2", 95, "2026-11-02T10:00:00Z"),
        ] {
            assert!(!is_among(&new, &before), "{new:?}");
        }
        let mut node = node(H100, &[3], None);
        node.status.as_mut().unwrap().faults =
            vec![fault("GPU-2", 79, "2026-11-02T10:00:00Z"), first.clone()];
        assert_eq!(faults(&node, &targets(&node, 3)).collect::<Vec<_>>(), [&first]);
    }

    /// Only a plugin that serves and reports the GPU with nothing but its cordon shows that the reset has helped.
    #[test]
    fn gpu_is_healthy_only_if_the_plugin_reports_it() {
        let of = |change: fn(&mut serde_json::Value)| {
            let mut node = serde_json::to_value(node(H100, &[3], None)).unwrap();
            node["status"]["conditions"] = json!([{"type": "Ready", "status": "True", "reason": "Serving",
                "message": "", "lastTransitionTime": "2026-11-02T10:00:00Z"}]);
            let devices = &mut node["status"]["devices"];
            devices[3]["healthy"] = false.into();
            devices[3]["reason"] = "cordoned: to be drained".into();
            devices[2]["healthy"] = false.into();
            devices[2]["reason"] = "Xid 79".into();
            change(&mut node);
            let node: GpuNode = serde_json::from_value(node).unwrap();
            problem(&node, &targets(&node, 3)).unwrap_or_default()
        };
        assert_eq!(of(|_| ()), "");
        let unreported = of(|node| node["status"] = serde_json::Value::Null);
        assert_eq!(unreported, "the plugin on a reports nothing after the reset");
        let unready = of(|node| {
            node["status"]["conditions"][0]["status"] = "False".into();
            node["status"]["conditions"][0]["message"] = "NVML fails".into();
        });
        assert_eq!(unready, "the plugin on a does not serve after the reset: NVML fails");
        let unknown = of(|node| node["status"]["conditions"] = json!([]));
        assert_eq!(unknown, "the plugin on a does not serve after the reset");
        let closed = of(|node| node["status"]["devices"][3]["reason"] = "no device node".into());
        assert_eq!(closed, "a GPU 3 (GPU-3) is not healthy after the reset: no device node");
        let fabric = of(|node| {
            node["status"]["problems"] = json!([{"gpu": "GPU-3", "cause": "fabric", "unhealthy": true,
                "since": "2026-11-02T10:00:00Z"}]);
            node["status"]["devices"][3]["reason"] = "the fabric is not up".into();
        });
        assert_eq!(fabric, "a GPU 3 (GPU-3) is not healthy after the reset: the fabric is not up");
    }

    #[test]
    fn failed_pod_reports_what_nvidia_smi_printed() {
        let of = |status: serde_json::Value| {
            outcome(&serde_json::from_value(json!({"metadata": {"name": "x"}, "status": status})).unwrap())
        };
        let printed = "GPU 00000000:07:00.0 is currently in use by another process.\n\n1 device is ...";
        let terminated = json!([{"name": "reset", "image": "", "imageID": "", "ready": false, "restartCount": 0,
            "state": {"terminated": {"exitCode": 1, "message": printed}}}]);
        assert_eq!(
            of(json!({"phase": "Failed", "containerStatuses": terminated})),
            Outcome::Failed(
                "GPU 00000000:07:00.0 is currently in use by another process. 1 device is ...".to_owned()
            )
        );
        assert_eq!(
            of(json!({"phase": "Failed", "reason": "DeadlineExceeded"})),
            Outcome::Failed("DeadlineExceeded".to_owned())
        );
        assert_eq!(of(json!({"phase": "Succeeded"})), Outcome::Succeeded);
        let waiting = json!([{"name": "reset", "image": "", "imageID": "", "ready": false, "restartCount": 0,
            "state": {"waiting": {"reason": "ImagePullBackOff"}}}]);
        assert_eq!(
            of(json!({"phase": "Pending", "containerStatuses": waiting})),
            Outcome::Waits("ImagePullBackOff".to_owned())
        );
    }
}
