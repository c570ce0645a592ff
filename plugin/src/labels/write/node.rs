//! Labels on the Node itself, by server-side apply under a name of their own: the API server takes away those that were applied
//! before and are applied no longer.

use gantry_api::names;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, Resource};
use serde_json::{Value, json};

use super::super::{Identity, Labels};
use super::WriteError;

pub(super) async fn write(client: &Client, identity: &Identity, labels: &Labels) -> Result<(), WriteError> {
    // Whoever had put one of them there before has it no longer: the plugin knows better.
    let parameters = PatchParams::apply(names::LABELLER).force();
    Api::<Node>::all(client.clone())
        .patch_metadata(
            identity.node.as_str(),
            &parameters,
            &Patch::Apply(&applied(identity, labels)),
        )
        .await?;
    Ok(())
}

/// What is applied: labels and nothing else.
fn applied(identity: &Identity, labels: &Labels) -> Value {
    let labels: serde_json::Map<String, Value> = labels
        .iter()
        .map(|(name, value)| (name.to_string(), value.as_str().into()))
        .collect();
    json!({
        "apiVersion": Node::api_version(&()),
        "kind": Node::kind(&()),
        "metadata": {"name": identity.node, "labels": labels},
    })
}
