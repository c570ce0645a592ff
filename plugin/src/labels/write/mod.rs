//! Writes labels to a file, into a NodeFeature object or onto the Node. Each write replaces all labels, so that outdated ones are
//! removed.

pub mod file;
mod node_feature;

use std::path::{Path, PathBuf};

use gantry_api::names;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, Resource};
use serde_json::{Value, json};

use super::{Identity, Labels};

pub use node_feature::{NoOwner, Owners, node_feature};

/// Why labels could not be written, and what the operator can do.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The file cannot be written.
    #[error("cannot write labels to {}", path.display())]
    File {
        /// The file, or the folder that could not be created for it.
        path: PathBuf,
        /// The operating system's error.
        #[source]
        problem: std::io::Error,
    },
    /// The former file cannot be removed.
    #[error(
        "cannot remove {}, where labels were written before; its labels are still published",
        path.display()
    )]
    Remove {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        #[source]
        problem: std::io::Error,
    },
    /// The former object cannot be deleted.
    #[error(
        "cannot delete NodeFeature {name}, where labels were written before; its labels are still published"
    )]
    Delete {
        /// Name of the object.
        name: String,
        /// The API server's error.
        #[source]
        problem: Box<WriteError>,
    },
    /// Standard output is closed.
    #[error("cannot write labels to standard output")]
    Output(#[source] std::io::Error),
    /// The API server has no NodeFeature, or not in this namespace.
    #[error(
        "the API server refuses the NodeFeature {namespace}/{name} ({answer}): is node-feature-discovery installed? \
         --labels=node and --labels=file need none of its objects"
    )]
    NoNodeFeature {
        /// Namespace of the object.
        namespace: String,
        /// Name of the object.
        name: String,
        /// The message of the server.
        answer: String,
    },
    /// The permission is missing.
    #[error(
        "the API server forbids it ({answer}): apply manifests/labels.yaml, which grants the permissions for labels"
    )]
    Forbidden {
        /// The message of the server.
        answer: String,
    },
    /// The API server refuses the labels, or does not respond.
    #[error("the API server does not accept the labels")]
    Api(#[source] Box<kube::Error>),
}

impl From<kube::Error> for WriteError {
    fn from(error: kube::Error) -> Self {
        match error {
            kube::Error::Api(answer) if answer.code == 403 => {
                Self::Forbidden { answer: answer.message.clone() }
            }
            error => Self::Api(Box::new(error)),
        }
    }
}

/// A client with this kubeconfig; `None`: with the pod's service account.
///
/// # Errors
/// The kubeconfig or service account cannot be used.
pub async fn connect(kubeconfig: Option<&Path>) -> anyhow::Result<Client> {
    Ok(crate::cluster::connect(kubeconfig).await?)
}

/// Writes the NodeFeature object if it changed. Returns why the object has no owner, which is worth a warning.
///
/// # Errors
/// The API server's error, with what to do.
pub async fn to_node_feature(
    client: &Client,
    identity: &Identity,
    labels: &Labels,
) -> Result<Option<NoOwner>, WriteError> {
    node_feature::write(client, identity, labels).await
}

/// Deletes the NodeFeature object, if there is one.
///
/// # Errors
/// The API server's error, with what to do.
pub async fn withdraw(client: &Client, identity: &Identity) -> Result<(), WriteError> {
    node_feature::delete(client, identity).await
}

/// Writes the labels onto the Node itself, by server-side apply with a field manager of their own: the API server removes those that are
/// applied no longer.
///
/// # Errors
/// The API server's error, with what to do.
pub async fn to_node(client: &Client, identity: &Identity, labels: &Labels) -> Result<(), WriteError> {
    // Takes over labels of other field managers: the plugin has the true values.
    let parameters = PatchParams::apply(names::LABELLER).force();
    Api::<Node>::all(client.clone())
        .patch_metadata(identity.node.as_str(), &parameters, &Patch::Apply(&applied(identity, labels)))
        .await?;
    Ok(())
}

/// The applied object: labels and nothing else.
fn applied(identity: &Identity, labels: &Labels) -> Value {
    let labels: serde_json::Map<String, Value> =
        labels.iter().map(|(name, value)| (name.to_string(), value.as_str().into())).collect();
    json!({
        "apiVersion": Node::api_version(&()),
        "kind": Node::kind(&()),
        "metadata": {"name": identity.node, "labels": labels},
    })
}
