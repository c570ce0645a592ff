//! Labels on the Node itself, by server-side apply with a field manager of their own: the API server removes those that are applied no
//! longer.

use gantry_api::names;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, Resource};
use serde_json::{Value, json};

use super::super::{Identity, Labels};
use super::WriteError;

pub(super) async fn write(client: &Client, identity: &Identity, labels: &Labels) -> Result<(), WriteError> {
    // Takes over labels of other field managers: the plugin has the true values.
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

/// The applied object: labels and nothing else.
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
