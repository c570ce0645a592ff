//! What scenarios put in the API server's way: it refuses some Bindings, or does not come to an answer when a gang's decision is written.
//! So a gang stays in states that otherwise pass in milliseconds. All of it holds for the whole cluster, so whoever begins with it has to
//! end it.

use anyhow::Result;
use gantry_e2e::{Program, until};
use serde_json::{Value, json};

use crate::gangs::{GANG_LIMIT, Scene};

/// The name of what is in the API server's way by [`hinder`] and [`delay`], and of an object that it refuses as well.
const HINDRANCE: &str = "e2e-hindrance";

/// The name of a server that takes connections and never says anything, and where it does.
const DEAF: &str = "deaf";
const DEAF_PORT: &str = "9444";
const BUSYBOX: &str = "/bin/busybox";

/// Has the API server refuse Bindings of these pods, and waits until it does.
pub(crate) async fn hinder(scene: &Scene<'_>, names: &[String]) -> Result<()> {
    let names = json!([names, &[HINDRANCE.to_owned()]].concat());
    let ours = format!(
        "request.namespace == '{}' && object.metadata.?name.orValue('') in {names}",
        scene.namespace
    );
    let policy = json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": { "name": HINDRANCE },
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": { "resourceRules": [{
                "apiGroups": [""],
                "apiVersions": ["v1"],
                "operations": ["CREATE"],
                "resources": ["pods/binding", "configmaps"],
            }] },
            "matchConditions": [{ "name": "ours", "expression": ours }],
            "validations": [{ "expression": "false", "message": "a scenario is in the way" }],
        },
    });
    let binding = json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": { "name": HINDRANCE },
        "spec": { "policyName": HINDRANCE, "validationActions": ["Deny"] },
    });
    for object in [policy, binding] {
        let args = ["apply", "-f", "-"];
        let cluster = scene.bed.cluster();
        cluster.kubectl_with_input(&args, &object.to_string()).await?;
    }
    hinders(scene, "in the way", true).await
}

/// Undoes [`hinder`].
pub(crate) async fn stop_hindering(scene: &Scene<'_>) -> Result<()> {
    for kind in ["validatingadmissionpolicybinding", "validatingadmissionpolicy"] {
        let args = ["delete", kind, HINDRANCE, "--ignore-not-found"];
        scene.bed.cluster().kubectl(&args).await?;
    }
    hinders(scene, "in the way", false).await
}

/// Has the API server ask the server that never answers before it takes a gang's decision. Waits until it does: there is another webhook
/// beside that one, of which it is known at once.
pub(crate) async fn delay(scene: &Scene<'_>) -> Result<()> {
    let argv = ["nc", "-ll", "-p", DEAF_PORT, "-e", BUSYBOX, "sleep", "100000"];
    let control = scene.bed.cluster().control();
    control.run(Program::new(DEAF, BUSYBOX, argv)).await?;
    let webhook = |name: &str, port: &str, seconds: u32, rule: Value, condition: &str| {
        json!({
            "name": format!("{name}.gantry.dev"),
            "clientConfig": { "url": format!("https://127.0.0.1:{port}/") },
            "rules": [rule],
            "matchConditions": [{ "name": "ours", "expression": condition }],
            "namespaceSelector": { "matchLabels": { "kubernetes.io/metadata.name": scene.namespace } },
            "failurePolicy": "Fail",
            "timeoutSeconds": seconds,
            "sideEffects": "None",
            "admissionReviewVersions": ["v1"],
        })
    };
    let decisions = json!({
        "apiGroups": ["gantry.dev"],
        "apiVersions": ["*"],
        "operations": ["UPDATE"],
        "resources": ["gangs/status"],
    });
    let probes = json!({
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "operations": ["CREATE"],
        "resources": ["configmaps"],
    });
    let decided = "has(object.status) && has(object.status.decision)";
    let probe = format!("object.metadata.?name.orValue('') == '{HINDRANCE}'");
    let configuration = json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": { "name": HINDRANCE },
        "webhooks": [
            webhook("decisions", DEAF_PORT, 30, decisions, decided),
            webhook("probes", "9445", 1, probes, &probe),
        ],
    });
    let args = ["apply", "-f", "-"];
    let cluster = scene.bed.cluster();
    cluster
        .kubectl_with_input(&args, &configuration.to_string())
        .await?;
    hinders(scene, "failed calling webhook", true).await
}

/// Undoes [`delay`].
pub(crate) async fn stop_delaying(scene: &Scene<'_>) -> Result<()> {
    let args = [
        "delete",
        "validatingwebhookconfiguration",
        HINDRANCE,
        "--ignore-not-found",
    ];
    scene.bed.cluster().kubectl(&args).await?;
    let control = scene.bed.cluster().control();
    control.daemon(DEAF)?.kill().await?;
    control.forget(DEAF)?;
    hinders(scene, "failed calling webhook", false).await
}

/// Waits until the API server has taken up what refuses with these words, or has given it up.
async fn hinders(scene: &Scene<'_>, words: &str, wanted: bool) -> Result<()> {
    let probe: Value = json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": { "name": HINDRANCE, "namespace": scene.namespace },
    });
    let args = ["create", "--dry-run=server", "-f", "-"];
    until(format!("policy in effect: {wanted}"), GANG_LIMIT, async || {
        let cluster = scene.bed.cluster();
        let answer = cluster.kubectl_with_input(&args, &probe.to_string()).await;
        let refused = answer
            .as_ref()
            .is_err_and(|error| error.to_string().contains(words));
        match refused == wanted {
            true => Ok(()),
            false => Err(format!("{answer:?}")),
        }
    })
    .await?;
    Ok(())
}
