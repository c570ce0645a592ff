//! A kubelet whose Topology Manager refuses pods, on a node of two NUMA nodes.

use anyhow::Result;
use gantry_e2e::until;
use kube::api::PostParams;

use super::modes::chosen;
use crate::bed::Bed;
use crate::pods;

const GPU: &str = "nvidia.com/gpu";

/// Without the policy in its `GpuNode` a set across both NUMA nodes is granted, and kubelet refuses the pod.
pub(super) async fn kubelet_refuses_sets_of_unpublished_policy(bed: &Bed) -> Result<()> {
    let outcome = refused_by_kubelet(bed).await;
    bed.cluster().nodes()[0].reconfigure_kubelet(&[("topologyManagerPolicy", "none")]).await?;
    outcome
}

async fn refused_by_kubelet(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let api = bed.namespace("e2e-unpublished").await?;
    let node = &bed.cluster().nodes()[0];
    node.reconfigure_kubelet(&[("topologyManagerPolicy", "single-numa-node")]).await?;
    bed.cluster().wait_until_ready().await?;
    gpus.counts(bed.cluster(), node.name(), &[(GPU, 8)]).await?;
    api.create(&PostParams::default(), &chosen("five", GPU, 5, node.name())?).await?;
    until("the refusal of kubelet", pods::RUN_LIMIT, async || {
        let pod = api.get("five").await.map_err(|error| error.to_string())?;
        match pods::said(&pod) {
            said if said.contains("TopologyAffinityError") => Ok(()),
            said => Err(format!("{}: {said}", pods::phase(&pod))),
        }
    })
    .await?;
    Ok(())
}
