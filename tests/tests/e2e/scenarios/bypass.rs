//! Pods that name their node and so pass kube-scheduler by: they take what nobody was granted.

use anyhow::{Result, ensure};
use kube::api::PostParams;

use crate::bed::Bed;
use crate::pods;

pub(super) async fn a_pod_that_names_its_node_is_kept_off_reserved_devices(bed: &Bed) -> Result<()> {
    bed.gpus().await?;
    let api = bed.namespace("e2e-bypass").await?;
    let node = bed.cluster().nodes()[0].name();
    // Side by side, so that some are admitted while grants of others wait on the same node.
    let names = [
        "scheduled-0",
        "pinned-0",
        "scheduled-1",
        "pinned-1",
        "scheduled-2",
    ];
    for name in names {
        let pod = if name.starts_with("pinned") {
            pods::pinned(name, 1, node)?
        } else {
            let mut pod = pods::sleeper(name, 2)?;
            if let Some(spec) = pod.spec.as_mut() {
                spec.node_selector = Some([("kubernetes.io/hostname".to_owned(), node.to_owned())].into());
            }
            pod
        };
        api.create(&PostParams::default(), &pod).await?;
    }
    let mut taken = std::collections::BTreeSet::new();
    for name in names {
        let pod = pods::running(&api, name).await?;
        let seen = pods::seen(bed.cluster(), &pod, "main").await?;
        ensure!(
            seen.is_disjoint(&taken),
            "{name} sees {seen:?}, of which others hold some"
        );
        if name.starts_with("scheduled") {
            ensure!(
                seen == pods::granted(&pod)?,
                "{name} sees {seen:?}, granted {:?}",
                pods::granted(&pod)?
            );
        }
        taken.extend(seen);
    }
    Ok(())
}
