//! Labels written: to a file, into a NodeFeature object, onto the Node. Decides nothing about them; each write is whole, so that
//! labels no longer true are gone.

pub mod file;
mod node;
mod node_feature;

use std::path::{Path, PathBuf};

use kube::Client;

use super::{Identity, Labels};

pub use node_feature::{NoOwner, Owners, node_feature};

/// Why labels could not be written, and what a person can do.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The file cannot be written.
    #[error("cannot write labels to {}", path.display())]
    File {
        /// The file, or the folder that was to be made for it.
        path: PathBuf,
        /// What the operating system says.
        #[source]
        problem: std::io::Error,
    },
    /// A file that labels are written to no longer cannot be removed.
    #[error(
        "cannot remove {}, where labels were written before; what it says is published still",
        path.display()
    )]
    Remove {
        /// The file.
        path: PathBuf,
        /// What the operating system says.
        #[source]
        problem: std::io::Error,
    },
    /// The object that labels are written to no longer cannot be deleted.
    #[error(
        "cannot delete NodeFeature {name}, where labels were written before; what it says is published still"
    )]
    Delete {
        /// Name of the object.
        name: String,
        /// The API server's.
        #[source]
        problem: Box<WriteError>,
    },
    /// Standard output is closed.
    #[error("cannot write labels to standard output")]
    Output(#[source] std::io::Error),
    /// The API server has no NodeFeature, or not in this namespace.
    #[error(
        "the API server takes no NodeFeature {namespace}/{name} ({answer}): is node-feature-discovery installed? \
         --labels=node and --labels=file need none of its objects"
    )]
    NoNodeFeature {
        /// Namespace of the object.
        namespace: String,
        /// Name of the object.
        name: String,
        /// The server's own words.
        answer: String,
    },
    /// The right to do it is missing.
    #[error(
        "the API server forbids it ({answer}): apply manifests/labels.yaml, which grants what labels need"
    )]
    Forbidden {
        /// The server's own words.
        answer: String,
    },
    /// The API server refuses, or does not answer.
    #[error("the API server does not take the labels")]
    Api(#[source] Box<kube::Error>),
}

impl From<kube::Error> for WriteError {
    fn from(error: kube::Error) -> Self {
        match error {
            kube::Error::Api(answer) if answer.code == 403 => Self::Forbidden {
                answer: answer.message.clone(),
            },
            error => Self::Api(Box::new(error)),
        }
    }
}

/// A client by this kubeconfig; `None`: by the pod's service account.
///
/// # Errors
/// What is wrong with either.
pub async fn connect(kubeconfig: Option<&Path>) -> anyhow::Result<Client> {
    Ok(crate::cluster::connect(kubeconfig).await?)
}

/// Writes the NodeFeature object, if it is not so already. What comes back is worth a warning: why the object has no owner.
///
/// # Errors
/// The API server's, with what to do.
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
/// The API server's, with what to do.
pub async fn withdraw(client: &Client, identity: &Identity) -> Result<(), WriteError> {
    node_feature::delete(client, identity).await
}

/// Puts the labels on the Node itself.
///
/// # Errors
/// The API server's, with what to do.
pub async fn to_node(client: &Client, identity: &Identity, labels: &Labels) -> Result<(), WriteError> {
    node::write(client, identity, labels).await
}
