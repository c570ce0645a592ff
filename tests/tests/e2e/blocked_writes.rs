//! Blocks writes at the API server: it refuses some Bindings, or does not respond when a gang's decision is written.
//! This holds a gang in phases that otherwise last milliseconds. It affects the whole cluster, so each block must be
//! undone by its scenario.

use anyhow::Result;
use gantry_e2e::{Program, until};
use serde_json::{Value, json};

use crate::gangs::{GANG_LIMIT, Scene};

/// The name of the policy and the webhook, and of an object that the policy refuses as well.
const BLOCK: &str = "e2e-blocked-writes";

/// The name and port of a server that accepts connections and never responds.
const SILENT: &str = "silent";
const SILENT_PORT: &str = "9444";
const BUSYBOX: &str = "/bin/busybox";

/// Has the API server refuse Bindings of these pods, and waits until it does.
pub(crate) async fn block_bindings(scene: &Scene<'_>, names: &[String]) -> Result<()> {
    let names = json!([names, &[BLOCK.to_owned()]].concat());
    let ours =
        format!("request.namespace == '{}' && object.metadata.?name.orValue('') in {names}", scene.namespace);
    let policy = json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": { "name": BLOCK },
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
        "metadata": { "name": BLOCK },
        "spec": { "policyName": BLOCK, "validationActions": ["Deny"] },
    });
    for object in [policy, binding] {
        let args = ["apply", "-f", "-"];
        let cluster = scene.bed.cluster();
        cluster.kubectl_with_input(&args, &object.to_string()).await?;
    }
    is_blocked(scene, "in the way", true).await
}

/// Undoes [`block_bindings`].
pub(crate) async fn allow_bindings(scene: &Scene<'_>) -> Result<()> {
    for kind in ["validatingadmissionpolicybinding", "validatingadmissionpolicy"] {
        let args = ["delete", kind, BLOCK, "--ignore-not-found"];
        scene.bed.cluster().kubectl(&args).await?;
    }
    is_blocked(scene, "in the way", false).await
}

/// Makes the API server call a webhook that never responds before it stores a gang's decision. Waits until the webhook
/// is active, which a second webhook shows at once.
pub(crate) async fn delay_decisions(scene: &Scene<'_>) -> Result<()> {
    let argv = ["nc", "-ll", "-p", SILENT_PORT, "-e", BUSYBOX, "sleep", "100000"];
    let control = scene.bed.cluster().control();
    control.run(Program::new(SILENT, BUSYBOX, argv)).await?;
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
    let probe = format!("object.metadata.?name.orValue('') == '{BLOCK}'");
    let configuration = json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": { "name": BLOCK },
        "webhooks": [
            webhook("decisions", SILENT_PORT, 30, decisions, decided),
            webhook("probes", "9445", 1, probes, &probe),
        ],
    });
    let args = ["apply", "-f", "-"];
    let cluster = scene.bed.cluster();
    cluster.kubectl_with_input(&args, &configuration.to_string()).await?;
    is_blocked(scene, "failed calling webhook", true).await
}

/// Undoes [`delay_decisions`].
pub(crate) async fn allow_decisions(scene: &Scene<'_>) -> Result<()> {
    let args = ["delete", "validatingwebhookconfiguration", BLOCK, "--ignore-not-found"];
    scene.bed.cluster().kubectl(&args).await?;
    let control = scene.bed.cluster().control();
    control.daemon(SILENT)?.kill().await?;
    control.forget(SILENT)?;
    is_blocked(scene, "failed calling webhook", false).await
}

/// Waits until the API server has taken up what refuses with these words, or has given it up.
async fn is_blocked(scene: &Scene<'_>, words: &str, wanted: bool) -> Result<()> {
    let probe: Value = json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": { "name": BLOCK, "namespace": scene.namespace },
    });
    let args = ["create", "--dry-run=server", "-f", "-"];
    until(format!("policy in effect: {wanted}"), GANG_LIMIT, async || {
        let cluster = scene.bed.cluster();
        let answer = cluster.kubectl_with_input(&args, &probe.to_string()).await;
        let refused = answer.as_ref().is_err_and(|error| error.to_string().contains(words));
        match refused == wanted {
            true => Ok(()),
            false => Err(format!("{answer:?}")),
        }
    })
    .await?;
    Ok(())
}
