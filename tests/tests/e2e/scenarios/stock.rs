//! Pods that ask for none of our resources: they must be scheduled as if we were not there.

use anyhow::{Result, ensure};

use crate::bed::Bed;
use crate::pods;

pub(super) async fn pod_without_gpus_runs_while_extender_is_down(bed: &Bed) -> Result<()> {
    let api = bed.namespace("e2e-stock-down").await?;
    let extender = bed.cluster().control().daemon(gantry_e2e::gantry::EXTENDER);
    if let Ok(extender) = extender {
        extender.stop().await?;
    }
    let pod = pods::run(&api, &pods::sleeper("stock", 0)?).await?;
    ensure!(pod.metadata.annotations.is_none(), "annotated: {:?}", pod.metadata.annotations);
    Ok(())
}

pub(super) async fn pod_without_gpus_is_never_changed(bed: &Bed) -> Result<()> {
    bed.gpus().await?;
    let api = bed.namespace("e2e-stock").await?;
    let pod = pods::run(&api, &pods::sleeper("stock", 0)?).await?;
    ensure!(pod.metadata.annotations.is_none(), "annotated: {:?}", pod.metadata.annotations);
    let seen = pods::seen(bed.cluster(), &pod, "main").await?;
    ensure!(seen.is_empty(), "sees GPUs: {seen:?}");
    Ok(())
}
