//! Pods that name their node and bypass kube-scheduler get only devices that are not granted.

use anyhow::{Result, ensure};
use gantry_e2e::until;
use kube::api::PostParams;

use crate::bed::Bed;
use crate::pods;

pub(super) async fn pod_with_node_name_avoids_reserved_devices(bed: &Bed) -> Result<()> {
    bed.gpus().await?;
    let api = bed.namespace("e2e-bypass").await?;
    let node = bed.cluster().nodes()[0].name();
    // The grants come first: a pod that took a device before it was granted to another would have done no wrong.
    // Kubelet admits them while the others arrive.
    let scheduled = ["scheduled-0", "scheduled-1", "scheduled-2"];
    for name in scheduled {
        let mut pod = pods::sleeper(name, 2)?;
        if let Some(spec) = pod.spec.as_mut() {
            spec.node_selector = Some([("kubernetes.io/hostname".to_owned(), node.to_owned())].into());
        }
        api.create(&PostParams::default(), &pod).await?;
    }
    for name in scheduled {
        until(format!("{name} bound"), pods::RUN_LIMIT, async || {
            let pod = api.get(name).await.map_err(|error| error.to_string())?;
            match pods::node(&pod) {
                "" => Err(pods::said(&pod)),
                _ => Ok(()),
            }
        })
        .await?;
    }
    let pinned = ["pinned-0", "pinned-1"];
    for name in pinned {
        api.create(&PostParams::default(), &pods::pinned(name, 1, node)?).await?;
    }
    let mut taken = std::collections::BTreeSet::new();
    for name in pinned.into_iter().chain(scheduled) {
        let pod = pods::running(&api, name).await?;
        let seen = pods::seen(bed.cluster(), &pod, "main").await?;
        ensure!(seen.is_disjoint(&taken), "{name} sees {seen:?}, of which others hold some");
        if name.starts_with("scheduled") {
            ensure!(seen == pods::granted(&pod)?, "{name} sees {seen:?}, granted {:?}", pods::granted(&pod)?);
        }
        taken.extend(seen);
    }
    Ok(())
}
