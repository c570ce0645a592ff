//! Writes labels to a file, into a NodeFeature object or onto the Node. Each write replaces all labels, so that outdated ones are
//! removed.

mod node_feature;

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
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
        "the API server forbids it ({answer}): apply manifests/{manifest}, which grants the permissions for labels"
    )]
    Forbidden {
        /// The manifest that grants it.
        manifest: &'static str,
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
                Self::Forbidden { manifest: "labels.yaml", answer: answer.message.clone() }
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
    let written = Api::<Node>::all(client.clone())
        .patch_metadata(identity.node.as_str(), &parameters, &Patch::Apply(&applied(identity, labels)))
        .await;
    match written.map_err(WriteError::from) {
        Err(WriteError::Forbidden { answer, .. }) => {
            Err(WriteError::Forbidden { manifest: "labels-node.yaml", answer })
        }
        written => written.map(drop),
    }
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

/// The text of the file.
pub fn features(labels: &Labels) -> String {
    labels.iter().map(|(name, value)| format!("{name}={value}\n")).collect()
}

/// Replaces the file in one step, or writes to standard output without a path. Missing folders are created. The temporary file is in
/// a folder `.gantry-tmp`, because a file beside the features would be read as features.
///
/// # Errors
/// The operating system's error, with the path.
pub fn to_file(labels: &Labels, path: Option<&Path>) -> Result<(), WriteError> {
    let text = features(labels);
    let Some(path) = path else {
        return io::stdout().lock().write_all(text.as_bytes()).map_err(WriteError::Output);
    };
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |problem| WriteError::File { path, problem }
    };
    let name =
        path.file_name().ok_or_else(|| failed(path)(io::Error::from(io::ErrorKind::InvalidFilename)))?;
    let beside = path.with_file_name(".gantry-tmp");
    fs::create_dir_all(&beside).map_err(failed(&beside))?;
    let new = beside.join(name);
    let written = fs::write(&new, text)
        .and_then(|()| fs::set_permissions(&new, fs::Permissions::from_mode(0o644)))
        .and_then(|()| fs::rename(&new, path))
        .map_err(failed(path));
    // After a failure the next success removes it.
    let _ = fs::remove_dir(&beside);
    written
}

/// Removes the file `path`, if it exists, unless it is the file `new` by another name.
///
/// # Errors
/// The operating system's error, with the path.
pub fn remove_file(path: &Path, new: Option<&Path>) -> Result<(), WriteError> {
    let identity = |path: &Path| fs::metadata(path).ok().map(|file| (file.dev(), file.ino()));
    let there = identity(path);
    if there.is_some() && new.is_some_and(|new| identity(new) == there) {
        return Ok(());
    }
    match fs::remove_file(path) {
        Err(problem) if problem.kind() != io::ErrorKind::NotFound => {
            Err(WriteError::Remove { path: path.to_owned(), problem })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::labels::LabelName;

    fn labels(entries: &[(&str, &str)]) -> Labels {
        entries
            .iter()
            .map(|(name, value)| (LabelName::new("nvidia.com", name), (*value).to_owned()))
            .collect()
    }

    #[test]
    fn labels_file_is_replaced_and_leaves_nothing_beside() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("features.d/gfd");
        to_file(&labels(&[("gpu.count", "8"), ("cuda.driver.rev", "")]), Some(&path)).unwrap();
        assert_eq!(
            fs::read_to_string(&path).unwrap(),
            "nvidia.com/cuda.driver.rev=\nnvidia.com/gpu.count=8\n"
        );
        to_file(&labels(&[("gpu.count", "7")]), Some(&path)).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "nvidia.com/gpu.count=7\n");
        let names: Vec<_> = fs::read_dir(path.parent().unwrap()).unwrap().collect();
        assert_eq!(names.len(), 1, "{names:?}");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o644);
    }

    #[test]
    fn former_file_is_removed_unless_it_is_the_new_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gfd");
        let twin = folder.path().join("../").join(folder.path().file_name().unwrap()).join("gfd");
        to_file(&labels(&[("gpu.count", "8")]), Some(&path)).unwrap();
        remove_file(&path, Some(&twin)).unwrap();
        assert!(path.exists());
        remove_file(&path, Some(&folder.path().join("other"))).unwrap();
        assert!(!path.exists());
        remove_file(&path, None).unwrap();
        let error = remove_file(folder.path(), None).unwrap_err();
        insta::assert_snapshot!(error.to_string().replace(folder.path().to_str().unwrap(), "F"), @"cannot remove F, where labels were written before; its labels are still published");
    }

    #[test]
    fn unwritable_file_is_named_and_old_one_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gfd");
        fs::create_dir_all(path.join("inside")).unwrap();
        let error = to_file(&labels(&[("gpu.count", "7")]), Some(&path)).unwrap_err();
        assert!(error.to_string().contains("/gfd"), "{error}");
        assert!(path.join("inside").exists());
        assert!(to_file(&labels(&[]), Some(Path::new("/"))).is_err());
    }
}
