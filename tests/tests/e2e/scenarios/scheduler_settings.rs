//! Settings of kube-scheduler that leave the extender out: pods run on devices of kubelet's choice, without a grant, and
//! the devices count as held.

use anyhow::{Context, Result, ensure};
use gantry_api::names::{GPU_RESOURCE, GRANT_ANNOTATION};
use gantry_e2e::gantry::EXTENDER;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::DeleteParams;

use super::churn::nothing_is_left;
use super::modes::run_on;
use crate::bed::Bed;
use crate::pods;
use crate::views::gpu_node;

const SCHEDULER: &str = "kube-scheduler";

/// With `ignorable: true` kube-scheduler binds GPU pods itself while no extender responds.
pub(super) async fn ignorable_extender_is_left_out(bed: &Bed) -> Result<()> {
    bed.gpus().await?;
    let api = bed.namespace("e2e-ignorable").await?;
    let extender = bed.cluster().control().daemon(EXTENDER)?;
    let outcome = with_setting(bed, ("ignorable: false", "ignorable: true"), async || {
        extender.stop().await?;
        runs_without_grant(bed, &api).await
    })
    .await;
    if !bed.cluster().control().daemon(EXTENDER)?.is_running() {
        bed.cluster().control().run_again(EXTENDER).await?;
    }
    outcome?;
    nothing_is_left(bed).await
}

/// A resource that is not in `managedResources` is bound without the extender.
pub(super) async fn unmanaged_resource_gets_no_grant(bed: &Bed) -> Result<()> {
    bed.gpus().await?;
    let api = bed.namespace("e2e-unmanaged").await?;
    with_setting(bed, ("{name: nvidia.com/gpu,", "{name: nvidia.com/another,"), async || {
        runs_without_grant(bed, &api).await
    })
    .await?;
    nothing_is_left(bed).await
}

/// Plays a story with another setting of kube-scheduler.
pub(super) async fn with_setting(
    bed: &Bed,
    (setting, other): (&str, &str),
    story: impl AsyncFnOnce() -> Result<()>,
) -> Result<()> {
    let control = bed.cluster().control();
    let usual = control.program(SCHEDULER)?;
    let config = usual.args.first().and_then(|arg| arg.strip_prefix("--config="));
    let config = std::fs::read_to_string(config.context("its first argument is its configuration")?)?;
    ensure!(config.contains(setting), "no {setting} in {config}");
    let path = bed.cluster().folder().join("other-scheduler.yaml");
    std::fs::write(&path, config.replace(setting, other))?;
    let mut changed = usual.clone();
    changed.args[0] = format!("--config={}", path.display());
    control.daemon(SCHEDULER)?.stop().await?;
    control.run(changed).await?;
    let outcome = story().await;
    control.daemon(SCHEDULER)?.stop().await?;
    control.run(usual).await?;
    outcome
}

/// A pod gets GPUs without a grant, and its plugin reports that it holds them.
async fn runs_without_grant(bed: &Bed, api: &Api<Pod>) -> Result<()> {
    let node = bed.cluster().nodes()[2].name();
    let pod = run_on(api, "ungranted", GPU_RESOURCE, 2, node).await?;
    let annotations = pod.metadata.annotations.clone().unwrap_or_default();
    ensure!(!annotations.contains_key(GRANT_ANNOTATION), "{annotations:?}");
    let seen = pods::seen(bed.cluster(), &pod, "main").await?;
    ensure!(seen.len() == 2, "it has {seen:?}");
    gpu_node(bed, node, "has the holder", |object| {
        let holders = object.status.iter().flat_map(|status| &status.holders);
        holders.into_iter().any(|holder| holder.pod == "ungranted" && holder.devices.len() == 2)
    })
    .await?;
    api.delete("ungranted", &DeleteParams::default()).await?;
    Ok(())
}
