//! What admission keeps true: a grant comes from the extender alone, whichever way into a pod's annotations somebody tries.

use anyhow::{Result, ensure};
use gantry_api::names::GRANT_ANNOTATION;
use k8s_openapi::api::core::v1::{Binding, Pod};
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::bed::Bed;
use crate::pods;

pub(super) async fn lets_nobody_but_the_extender_write_a_grant(bed: &Bed) -> Result<()> {
    let pods = bed.namespace("e2e-guard").await?;
    forge(&pods, bed.cluster().nodes()[0].name()).await
}

/// Tries every way there is, with all rights.
async fn forge(pods: &Api<Pod>, node: &str) -> Result<()> {
    let mut born = pods::sleeper("born", 0)?;
    born.metadata.annotations = Some([(GRANT_ANNOTATION.to_owned(), "{}".to_owned())].into());
    refused("a new pod", pods.create(&PostParams::default(), &born).await)?;

    let mut pod = pods::sleeper("target", 0)?;
    if let Some(spec) = pod.spec.as_mut() {
        // Nobody binds it but this scenario.
        spec.scheduler_name = Some("nobody".to_owned());
    }
    pods.create(&PostParams::default(), &pod).await?;
    let (to, how) = ("target", PatchParams::default());
    let patch = json!({ "metadata": { "annotations": { GRANT_ANNOTATION: "{}" } } });
    let patch = Patch::Merge(&patch);
    refused("a pod", pods.patch(to, &how, &patch).await)?;
    refused("a pod's status", pods.patch_status(to, &how, &patch).await)?;
    // Of these Kubernetes itself keeps the annotations; whether it says so or not, nothing may come of it.
    for subresource in ["ephemeralcontainers", "resize"] {
        let _ = pods.patch_subresource(subresource, to, &how, &patch).await;
        ensure!(granted(pods).await?.is_none(), "forged through {subresource}");
    }

    let binding = |annotations: Value| -> Result<Binding> {
        Ok(serde_json::from_value(json!({
            "metadata": { "name": to, "annotations": annotations },
            "target": { "kind": "Node", "name": node },
        }))?)
    };
    let forged = binding(json!({ GRANT_ANNOTATION: "{}" }))?;
    refused("a Binding", bind(pods, to, &forged).await)?;
    let namespace = pods.namespace().unwrap_or_default();
    let legacy: Api<Binding> = Api::namespaced(pods.clone().into_client(), namespace);
    refused(
        "a Binding by the older way",
        legacy.create(&PostParams::default(), &forged).await,
    )?;

    // Whoever binds without a grant, and writes a status without one, is not in the way.
    bind(pods, to, &binding(json!({ "example.com/by": "somebody" }))?).await?;
    let patch = json!({ "status": { "message": "bound by hand" } });
    pods.patch_status(to, &how, &Patch::Merge(&patch)).await?;
    ensure!(granted(pods).await?.is_none(), "a pod bound by hand has a grant");
    Ok(())
}

async fn bind(pods: &Api<Pod>, to: &str, binding: &Binding) -> Result<()> {
    let answer: kube::Result<Value> = pods
        .create_subresource("binding", to, &PostParams::default(), binding)
        .await;
    answer?;
    Ok(())
}

async fn granted(pods: &Api<Pod>) -> Result<Option<String>> {
    let annotations = pods.get("target").await?.metadata.annotations;
    Ok(annotations.and_then(|mut all| all.remove(GRANT_ANNOTATION)))
}

fn refused<T>(what: &str, answer: Result<T, impl ToString>) -> Result<()> {
    match answer {
        Ok(_) => anyhow::bail!("{what} with a forged grant was let in"),
        Err(error) => {
            let error = error.to_string();
            ensure!(error.contains(GRANT_ANNOTATION), "{what}: {error}");
            Ok(())
        }
    }
}
