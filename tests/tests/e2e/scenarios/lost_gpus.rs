//! What goes away in the middle of a drain, under the real kubelet: another GPU of the node, the GPU itself, the API server.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use gantry_api::names::GPU_RESOURCE;
use gantry_api::{Cordon, Cordons, GpuNode};
use gantry_e2e::cluster::Node as NodeSandbox;
use gantry_e2e::hardware::Hardware;
use gantry_e2e::{Program, gantry, until};
use gantry_topology::GpuUuid;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::Api;
use kube::api::DeleteParams;
use serde_json::json;

use super::modes::chosen;
use super::operate::{succeeds, uuids_in};
use crate::bed::Bed;
use crate::gangs::GANG_LIMIT;
use crate::{pods, views};

const NAMESPACE: &str = "e2e-lost";
/// The budget that holds a drain in its middle, and the label of its pod.
const BUDGET: &str = "held";

/// Each of four pods holds a GPU. Three GPUs are drained one after the other, and only their own pods are evicted.
pub(super) async fn drain_evicts_holders_of_its_gpu_only(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let cluster = bed.cluster();
    let node = &cluster.nodes()[2];
    let mut hardware = Hardware::install_in(node, &gantry::machine_file("l4-4x-pcie"), "leaving")?;
    gpus.serve(cluster, node.name(), Some(&hardware), &[], &[(GPU_RESOURCE, 4)]).await?;
    let stage = Stage::set(bed, node, &hardware).await?;
    let outcome = async {
        another_gpu_leaves(&stage, &mut hardware).await?;
        gpu_itself_leaves(&stage, &mut hardware).await?;
        api_server_is_away(&stage, &mut hardware).await
    }
    .await;
    bed.revive().await?;
    // The node's own GPUs have the same UUIDs.
    for gpu in &stage.uuids {
        cluster.kubectl(&["annotate", "gpunode", node.name(), &format!("{}-", annotation(gpu)?)]).await?;
    }
    outcome
}

/// The indices of the GPUs behind it change.
async fn another_gpu_leaves(stage: &Stage<'_>, hardware: &mut Hardware) -> Result<()> {
    let drained = &*stage.uuids[1];
    let leaves = async {
        hardware.controller().remove_gpu(0)?;
        stage.node.restart(gantry::PLUGIN).await?;
        // Two are left, and the one that is drained.
        let gpus = stage.bed.gpus().await?;
        gpus.counts(stage.bed.cluster(), stage.node.name(), &[(GPU_RESOURCE, 2)]).await?;
        views::gpu_node(stage.bed, stage.node.name(), "three GPUs", |node| {
            node.spec.machine.gpus().len() == 3
        })
        .await?;
        stage.release().await
    };
    let text = stage.during_drain(drained, leaves).await?;
    let end = format!("{} GPU 0 ({drained}) is drained: no pod holds it", stage.node.name());
    ensure!(text.contains(&end), "{text}");
    stage.only_is_gone(&[1]).await
}

async fn gpu_itself_leaves(stage: &Stage<'_>, hardware: &mut Hardware) -> Result<()> {
    let drained = &*stage.uuids[2];
    let leaves = async {
        hardware.controller().remove_gpu(2)?;
        stage.node.restart(gantry::PLUGIN).await.map(drop)?;
        Ok(())
    };
    let text = stage.during_drain(drained, leaves).await?;
    let end = format!(
        "{} has no GPU {drained} any more; nothing was evicted; nothing more is evicted",
        stage.node.name()
    );
    ensure!(text.contains(&end), "{text}");
    stage.release().await?;
    stage.only_is_gone(&[1]).await
}

/// The GPU falls off the bus meanwhile. That does not end a drain: its pod is to go.
async fn api_server_is_away(stage: &Stage<'_>, hardware: &mut Hardware) -> Result<()> {
    let cluster = stage.bed.cluster();
    let drained = &*stage.uuids[3];
    let away = async {
        cluster.program("kube-apiserver")?.kill().await?;
        Ok(hardware.controller().lose_gpu(3)?)
    };
    let text = stage.during_drain(drained, away).await?;
    let end = "the API server does not respond";
    ensure!(text.contains(end) && text.contains("nothing was evicted; nothing more is evicted"), "{text}");
    cluster.start_again("kube-apiserver").await?;
    stage.bed.revive().await?;
    stage.only_is_gone(&[1]).await?;
    ensure!(stage.cordon(drained).await?.is_some(), "the cordon is gone");
    views::gpu_node(stage.bed, stage.node.name(), "a lost GPU", |node| {
        let problems = node.status.iter().flat_map(|status| &status.problems);
        problems.into_iter().any(|problem| problem.gpu == drained && problem.cause == "lost")
    })
    .await?;
    stage.release().await?;
    let text = succeeds(stage.bed, &["drain", "gpu", drained, "--force"]).await?;
    ensure!(text.contains("is already cordoned") && text.contains("is drained: no pod holds it"), "{text}");
    stage.only_is_gone(&[1, 3]).await
}

/// The pods on the GPUs of a node.
struct Stage<'a> {
    bed: &'a Bed,
    node: &'a NodeSandbox,
    api: Api<Pod>,
    /// UUIDs of the GPUs, in the order of their first indices.
    uuids: Vec<String>,
    /// The pod on each GPU.
    pods: BTreeMap<String, Pod>,
}

impl<'a> Stage<'a> {
    async fn set(bed: &'a Bed, node: &'a NodeSandbox, hardware: &Hardware) -> Result<Self> {
        let api = bed.namespace(NAMESPACE).await?;
        let uuids = uuids_in(hardware);
        let names: Vec<String> = (0..uuids.len()).map(|number| format!("holder-{number}")).collect();
        for name in &names {
            api.create(&Default::default(), &chosen(name, GPU_RESOURCE, 1, node.name())?).await?;
        }
        let mut pods = BTreeMap::new();
        for name in &names {
            let pod = pods::running(&api, name).await?;
            let held = pods::seen(bed.cluster(), &pod, "main").await?;
            pods.insert(held.into_iter().next().context("a GPU")?, pod);
        }
        ensure!(pods.len() == uuids.len(), "{} pods hold {} GPUs", pods.len(), uuids.len());
        Ok(Self { bed, node, api, uuids, pods })
    }

    /// Drains a GPU, which a budget holds back, and has `event` happen meanwhile. Returns what the command prints.
    async fn during_drain(&self, gpu: &str, event: impl Future<Output = Result<()>>) -> Result<String> {
        let cluster = self.bed.cluster();
        let pod = self.pods.get(gpu).and_then(|pod| pod.metadata.name.as_deref()).context("a pod")?;
        cluster.kubectl(&["-n", NAMESPACE, "label", "pod", pod, &format!("app={BUDGET}")]).await?;
        let budget = json!({
            "metadata": {"name": BUDGET},
            "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": BUDGET}}},
        });
        self.budgets().create(&Default::default(), &serde_json::from_value(budget)?).await?;
        let name = format!("drain-{gpu}");
        let binary = gantry::binary().context("no gantry beside this test")?;
        let kubeconfig = format!("--kubeconfig={}", cluster.kubeconfig().display());
        let drain = ["drain", "gpu", gpu, "--force", "--timeout=60", &kubeconfig];
        let drain = cluster.control().run(Program::new(&name, binary, drain)).await?;
        let printed = || std::fs::read_to_string(drain.log()).unwrap_or_default();
        let outcome = async {
            until(format!("the budget of {pod} holds the drain back"), GANG_LIMIT, async || {
                let text = printed();
                if text.contains("the disruption budget") { Ok(()) } else { Err(text) }
            })
            .await?;
            event.await?;
            until("the end of the drain", GANG_LIMIT, async || {
                if drain.is_running() { Err(printed()) } else { Ok(()) }
            })
            .await?;
            Ok(printed())
        }
        .await;
        drain.kill().await?;
        cluster.control().forget(&name)?;
        outcome
    }

    /// Lets the drain evict the pod.
    async fn release(&self) -> Result<()> {
        self.budgets().delete(BUDGET, &DeleteParams::default()).await?;
        let label = ["-n", NAMESPACE, "label", "pod", "--all", "app-"];
        self.bed.cluster().kubectl(&label).await.map(drop)?;
        Ok(())
    }

    /// Checks that the pods that held these GPUs at first are gone, and that the others run undisturbed.
    async fn only_is_gone(&self, gpus: &[usize]) -> Result<()> {
        for (at, gpu) in self.uuids.iter().enumerate() {
            let before = self.pods.get(gpu).context("a pod")?;
            let name = before.metadata.name.as_deref().unwrap_or_default();
            let now = self.api.get_opt(name).await?;
            let runs = now.is_some_and(|pod| {
                let is_same = pod.metadata.uid == before.metadata.uid;
                is_same && pod.metadata.deletion_timestamp.is_none() && pods::phase(&pod) == "Running"
            });
            ensure!(runs != gpus.contains(&at), "{name} of GPU {at} ({gpu}) runs: {runs}");
        }
        Ok(())
    }

    async fn cordon(&self, gpu: &str) -> Result<Option<Cordon>> {
        let node = Api::<GpuNode>::all(self.bed.client()).get_metadata(self.node.name()).await?;
        Ok(Cordons::of(node.metadata.annotations.as_ref()).get(&gpu.parse()?).cloned())
    }

    fn budgets(&self) -> Api<PodDisruptionBudget> {
        Api::namespaced(self.bed.client(), NAMESPACE)
    }
}

/// The annotation that cordons a GPU.
fn annotation(gpu: &str) -> Result<String> {
    Ok(Cordon::annotation(&gpu.parse::<GpuUuid>()?))
}
