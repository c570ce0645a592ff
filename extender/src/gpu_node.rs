//! Changes annotations of a GpuNode: the operator's commands and the rules of remediation write nothing else of it.

use std::collections::BTreeMap;

use gantry_api::GpuNode;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;

/// Writes that may be refused because the object changed meanwhile.
const ATTEMPTS: usize = 10;

/// Annotations by name; `None` removes one.
pub type Changes = BTreeMap<String, Option<String>>;

/// Changes annotations of a GpuNode by what they are now. Nothing is written without a change.
///
/// # Errors
/// The GpuNode cannot be read or written.
pub async fn annotate<T>(
    client: &Client,
    node: &str,
    mut change: impl FnMut(&BTreeMap<String, String>) -> (Changes, T),
) -> kube::Result<T> {
    let api = Api::<GpuNode>::all(client.clone());
    let mut attempts = 0;
    loop {
        let found = api.get_metadata(node).await?;
        let (changes, result) = change(&found.metadata.annotations.unwrap_or_default());
        if changes.is_empty() {
            return Ok(result);
        }
        let patch = json!({"metadata": {
            "resourceVersion": found.metadata.resource_version,
            "annotations": changes,
        }});
        attempts += 1;
        match api.patch_metadata(node, &PatchParams::default(), &Patch::Merge(patch)).await {
            Ok(_) => return Ok(result),
            // The plugin writes its status into the same object.
            Err(kube::Error::Api(answer)) if answer.code == 409 && attempts < ATTEMPTS => {}
            Err(error) => return Err(error),
        }
    }
}
