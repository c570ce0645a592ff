//! The NodeFeature object of node-feature-discovery, with the name and form of NVIDIA's gpu-feature-discovery: a plugin that replaces
//! that program takes over its object.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{ApiResource, DeleteParams, DynamicObject, GroupVersionKind, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use tracing::debug;

use super::super::{Identity, Labels};
use super::WriteError;

/// The label by which node-feature-discovery finds the node of an object.
const NODE_NAME: &str = "nfd.node.kubernetes.io/node-name";

/// The owners of the object; it is deleted with them.
pub type Owners = Vec<OwnerReference>;

/// Why the object has no owner, and stays when the plugin is uninstalled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoOwner {
    /// The pod does not exist.
    #[error("POD_NAME and NAMESPACE name no pod ({namespace}/{pod}): the NodeFeature has no owner")]
    NoPod {
        /// Namespace of the pod.
        namespace: String,
        pod: String,
    },
    /// The pod cannot be read.
    #[error("the pod {namespace}/{pod} cannot be read ({answer}): the NodeFeature has no owner")]
    Unreadable {
        /// Namespace of the pod.
        namespace: String,
        pod: String,
        /// The message of the API server.
        answer: String,
    },
}

/// The object of the node with these labels.
pub fn node_feature(identity: &Identity, labels: &Labels, owners: Owners) -> DynamicObject {
    let mut object = DynamicObject::new(&name(identity), &resource());
    object.metadata.labels = Some([(NODE_NAME.to_owned(), identity.node.to_string())].into());
    object.metadata.owner_references = (!owners.is_empty()).then_some(owners);
    object.data = json!({"spec": spec(labels)});
    object
}

/// Reads the object and replaces it as a whole if it changed, so that no label of an earlier writer is left. Returns why it has no
/// owner, if it should have one.
pub(super) async fn write(
    client: &Client,
    identity: &Identity,
    labels: &Labels,
) -> Result<Option<NoOwner>, WriteError> {
    let namespace = namespace(client, identity);
    let api = objects(client, namespace);
    let name = name(identity);
    let (owners, no_owner) = match owners(client, identity, namespace).await? {
        Ok(owners) => (owners, None),
        Err(reason) => (Owners::new(), Some(reason)),
    };
    let mut object = node_feature(identity, labels, owners);
    let refused = |error| match error {
        // A missing object is no error; a missing kind or namespace is.
        kube::Error::Api(answer) if answer.code == 404 => WriteError::NoNodeFeature {
            namespace: namespace.to_owned(),
            name: name.clone(),
            answer: answer.message.trim().to_owned(),
        },
        error => error.into(),
    };
    match api.get_opt(&name).await.map_err(refused)? {
        Some(known) if is_current(&known, &object) => return Ok(no_owner),
        Some(known) => {
            object.metadata.resource_version = known.metadata.resource_version;
            let replaced = api.replace(&name, &PostParams::default(), &object).await;
            replaced.map_err(refused)?;
        }
        None => {
            let created = api.create(&PostParams::default(), &object).await;
            created.map_err(refused)?;
        }
    }
    debug!(namespace, name, labels = labels.len(), "NodeFeature written");
    Ok(no_owner)
}

/// Deletes the object, if it and its kind exist.
pub(super) async fn delete(client: &Client, identity: &Identity) -> Result<(), WriteError> {
    let name = name(identity);
    let api = objects(client, namespace(client, identity));
    match api.delete(&name, &DeleteParams::default()).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(answer)) if answer.code == 404 => Ok(()),
        Err(error) => Err(WriteError::Delete { name, problem: Box::new(error.into()) }),
    }
}

fn namespace<'a>(client: &'a Client, identity: &'a Identity) -> &'a str {
    let namespace = identity.namespace.as_deref();
    namespace.unwrap_or_else(|| client.default_namespace())
}

fn objects(client: &Client, namespace: &str) -> Api<DynamicObject> {
    Api::namespaced_with(client.clone(), namespace, &resource())
}

fn resource() -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk("nfd.k8s-sigs.io", "v1alpha1", "NodeFeature"))
}

fn name(identity: &Identity) -> String {
    format!("nvidia-features-for-{}", identity.node)
}

/// The CRD requires the three empty maps.
fn spec(labels: &Labels) -> Value {
    let labels: BTreeMap<&str, &str> =
        labels.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    json!({
        "features": {"attributes": {}, "flags": {}, "instances": {}},
        "labels": labels,
    })
}

/// Whether the object is up to date. The API server may leave out empty maps.
fn is_current(known: &DynamicObject, object: &DynamicObject) -> bool {
    known.metadata.labels == object.metadata.labels
        && known.metadata.owner_references.as_deref().unwrap_or_default()
            == object.metadata.owner_references.as_deref().unwrap_or_default()
        && known.data["spec"]["labels"] == object.data["spec"]["labels"]
}

/// The DaemonSet of this pod and the pod, so that labels are removed when the plugin is uninstalled, and not before. A pod of another
/// controller, such as a Job, owns nothing, because its labels must outlive it. A pod that cannot be read at the moment is an error:
/// the object is replaced as a whole, and would lose its owners.
async fn owners(
    client: &Client,
    identity: &Identity,
    namespace: &str,
) -> Result<Result<Owners, NoOwner>, WriteError> {
    let Some(name) = &identity.pod else {
        return Ok(Ok(Owners::new()));
    };
    let pods = Api::<Pod>::namespaced(client.clone(), namespace);
    let pod = match pods.get_metadata_opt(name).await {
        Ok(Some(pod)) => pod.metadata,
        Ok(None) => {
            return Ok(Err(NoOwner::NoPod { namespace: namespace.to_owned(), pod: name.clone() }));
        }
        Err(kube::Error::Api(answer)) if matches!(answer.code, 403 | 404) => {
            return Ok(Err(NoOwner::Unreadable {
                namespace: namespace.to_owned(),
                pod: name.clone(),
                answer: answer.message.clone(),
            }));
        }
        Err(error) => return Err(error.into()),
    };
    let set = pod.owner_references.into_iter().flatten().find(|owner| owner.kind == "DaemonSet");
    let (Some(set), Some(uid)) = (set, pod.uid) else {
        return Ok(Ok(Owners::new()));
    };
    let set = OwnerReference { controller: Some(true), block_owner_deletion: None, ..set };
    let pod = OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Pod".to_owned(),
        name: name.clone(),
        uid,
        ..OwnerReference::default()
    };
    Ok(Ok(vec![set, pod]))
}
