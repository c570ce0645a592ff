//! Requests for one Gang object, and what their answers mean. A write counts as done only if the API server said so and shows it.

use std::time::Duration;

use gantry_api::{GangStatus, names};
use gantry_gang::protocol::Object;
use gantry_runtime::chain;
use http::{Method, Request};
use kube::Client;
use serde_json::{Value, json};

use super::{LooseGang, MANAGED_BY, Name};

/// Time limit of one request.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Why a request has not done what it was for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Failure {
    /// The object is another version, or another object, by now.
    Conflict,
    /// There is no such object.
    Missing,
    /// It was refused; nothing was done.
    Refused(String),
    /// Perhaps done, perhaps not, perhaps yet to be done.
    Unknown(String),
}

/// Makes the object; what is there of the name is taken as it is. What cannot be made anywhere is refused, not missing.
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

/// Replaces the status of that very version of the object.
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
        // Not looked at in a write of the status, but there must be one.
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

/// Deletes that very object.
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
    let answer = match tokio::time::timeout(TIMEOUT, client.request::<LooseGang>(request)).await {
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
            // Too many requests, or too slow a one: before anything was done, but worth another try like what nobody knows.
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

/// Whether etcd refuses an object for its size, or the API server will not even send it there. Of both it speaks as of errors of its own
/// (500), but nothing was done, and no other try would be.
fn is_too_large(words: &str) -> bool {
    let said = [
        "etcdserver: request is too large",
        "trying to send message larger than max",
    ];
    said.iter().any(|said| words.contains(said))
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
