//! Pods of several containers, init containers and sidecars: kubelet hands devices from one to the next by rules of its
//! own.

use anyhow::{Result, ensure};
use gantry_e2e::BUSYBOX_IMAGE;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use crate::bed::Bed;
use crate::pods;

pub(super) async fn containers_share_the_grant_of_their_pod(bed: &Bed) -> Result<()> {
    bed.gpus().await?;
    let api = bed.namespace("e2e-shapes").await?;
    let cases = [
        ("two-apps", vec![], vec![container("a", 2), container("b", 1)], vec![("a", 2), ("b", 1)]),
        ("init-like-app", vec![ends("i", 2)], vec![container("a", 2)], vec![("a", 2)]),
        ("init-less-than-app", vec![ends("i", 1)], vec![container("a", 2)], vec![("a", 2)]),
        ("init-more-than-app", vec![ends("i", 3)], vec![container("a", 2)], vec![("a", 2)]),
        ("sidecar", vec![sidecar("s", 1)], vec![container("a", 2)], vec![("s", 1), ("a", 2)]),
        ("app-without", vec![], vec![container("a", 2), container("b", 0)], vec![("a", 2), ("b", 0)]),
    ];
    for (name, init, containers, expected) in cases {
        let pod = pods::run(&api, &pod(name, &init, &containers)?).await?;
        let granted = pods::granted(&pod)?;
        let mut together = std::collections::BTreeSet::new();
        for (container, count) in expected {
            let seen = pods::seen(bed.cluster(), &pod, container).await?;
            ensure!(seen.len() == count, "{name}/{container}: asked {count}, sees {seen:?}");
            ensure!(seen.is_subset(&granted), "{name}/{container} sees {seen:?} of the grant {granted:?}");
            ensure!(seen.is_disjoint(&together), "{name}/{container} shares devices with its neighbour");
            ensure!(
                pods::held(bed.cluster(), &pod, container).await? == seen,
                "{name}/{container}: kubelet differs"
            );
            together.extend(seen);
        }
        api.delete(name, &kube::api::DeleteParams::default()).await?;
    }
    Ok(())
}

fn pod(name: &str, init: &[Value], containers: &[Value]) -> Result<Pod> {
    Ok(serde_json::from_value(json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name },
        "spec": {
            "dnsPolicy": "Default",
            "terminationGracePeriodSeconds": 1,
            "initContainers": init,
            "containers": containers,
        },
    }))?)
}

fn container(name: &str, gpus: usize) -> Value {
    let resources = if gpus == 0 { json!({}) } else { json!({ "limits": { "nvidia.com/gpu": gpus } }) };
    json!({
        "name": name,
        "image": BUSYBOX_IMAGE,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", "trap 'exit 0' TERM; sleep 100000 & wait"],
        "resources": resources,
    })
}

fn ends(name: &str, gpus: usize) -> Value {
    let mut container = container(name, gpus);
    container["command"] = json!(["true"]);
    container
}

fn sidecar(name: &str, gpus: usize) -> Value {
    let mut container = container(name, gpus);
    container["restartPolicy"] = json!("Always");
    container
}
