//! Requests for one Gang object and their results. A write is done only if the response confirms it and contains it.

use std::time::Duration;

use gantry_api::{GangStatus, names};
use gantry_gang::protocol::Object;
use gantry_runtime::chain;
use http::{Method, Request};
use kube::Client;
use serde_json::{Value, json};

use super::{MANAGED_BY, Name, PartialGang};

/// Time limit of one request.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Failure {
    /// The object has changed, or is a new object of the same name.
    Conflict,
    /// The object does not exist.
    Missing,
    /// The API server refused the request.
    Refused(String),
    /// Unknown: the request may have been applied, or may still be.
    Unknown(String),
}

/// Creates the object, or returns the existing one of that name. A namespace that is gone counts as a refusal.
pub(super) async fn create(client: &Client, name: &Name) -> Result<Object, Failure> {
    let body = json!({
        "apiVersion": api_version(), "kind": "Gang",
        "metadata": {"name": &*name.name, "namespace": &*name.namespace, "labels": {MANAGED_BY: names::EXTENDER}},
        "spec": {},
    });
    match send(client, Method::POST, &folder(name), Some(&body)).await {
        Err(Failure::Conflict) => read(client, name).await,
        Err(Failure::Missing) => {
            let words = format!(
                "the API server has no namespace {}, or no Gangs; apply manifests/crds.yaml",
                name.namespace
            );
            Err(Failure::Refused(words))
        }
        made => made,
    }
}

/// Reads the object.
pub(super) async fn read(client: &Client, name: &Name) -> Result<Object, Failure> {
    send(client, Method::GET, &path(name), None).await
}

/// Replaces the status of exactly this version of the object.
pub(super) async fn write_status(
    client: &Client,
    name: &Name,
    known: &Object,
    status: &GangStatus,
) -> Result<Object, Failure> {
    let body = json!({
        "apiVersion": api_version(), "kind": "Gang",
        "metadata": {
            "name": &*name.name, "namespace": &*name.namespace,
            "uid": &*known.uid, "resourceVersion": &*known.resource_version,
        },
        // Required by the schema, and ignored in a write of the status.
        "spec": {},
        "status": status,
    });
    let path = format!("{}/status", path(name));
    let written = send(client, Method::PUT, &path, Some(&body)).await?;
    if written.status.decision != status.decision {
        let words = "the API server does not keep decisions; apply manifests/crds.yaml of this version";
        return Err(Failure::Refused(words.to_owned()));
    }
    Ok(written)
}

/// Deletes exactly this object.
pub(super) async fn delete(client: &Client, name: &Name, uid: &str) -> Result<(), Failure> {
    let body = json!({"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}});
    let request = request(Method::DELETE, &path(name), Some(&body))?;
    match tokio::time::timeout(TIMEOUT, client.request::<Value>(request)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(failure(&error)),
        Err(_) => Err(Failure::Unknown("no answer in time".to_owned())),
    }
}

async fn send(client: &Client, method: Method, path: &str, body: Option<&Value>) -> Result<Object, Failure> {
    let request = request(method, path, body)?;
    let answer = match tokio::time::timeout(TIMEOUT, client.request::<PartialGang>(request)).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(error)) => return Err(failure(&error)),
        Err(_) => return Err(Failure::Unknown("no answer in time".to_owned())),
    };
    match answer.read() {
        Some((_, object)) => Ok(object),
        None => Err(Failure::Unknown("answered with what is no Gang".to_owned())),
    }
}

fn request(method: Method, path: &str, body: Option<&Value>) -> Result<Request<Vec<u8>>, Failure> {
    let body = body.map(Value::to_string).unwrap_or_default().into_bytes();
    Request::builder()
        .method(method)
        .uri(path)
        .header(http::header::CONTENT_TYPE, "application/json")
        .body(body)
        .map_err(|error| Failure::Refused(error.to_string()))
}

fn failure(error: &kube::Error) -> Failure {
    match error {
        kube::Error::Api(status) => match status.code {
            409 => Failure::Conflict,
            404 => Failure::Missing,
            // The API server is overloaded: nothing was done, and the request is retried like one with an unknown
            // result.
            408 | 429 => Failure::Unknown(status.message.clone()),
            code if code == 413 || is_too_large(&status.message) => Failure::Refused(format!(
                "the object is too large for the API server or its etcd: {}",
                status.message
            )),
            400..=499 => Failure::Refused(status.message.clone()),
            _ => Failure::Unknown(status.message.clone()),
        },
        other => Failure::Unknown(chain(other)),
    }
}

/// Whether etcd or the API server refuses an object for its size. Both are reported as internal errors (500), but
/// nothing was done, and a retry would fail again.
fn is_too_large(words: &str) -> bool {
    let known = ["etcdserver: request is too large", "trying to send message larger than max"];
    known.iter().any(|text| words.contains(text))
}

fn folder(name: &Name) -> String {
    format!("/apis/{}/namespaces/{}/gangs", api_version(), name.namespace)
}

fn path(name: &Name) -> String {
    format!("{}/{}", folder(name), name.name)
}

fn api_version() -> String {
    format!("{}/v1alpha1", names::GROUP)
}
