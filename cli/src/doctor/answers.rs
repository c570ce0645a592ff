//! What the API server answers to the reads of the doctor: values that checks look at, without a client.

use std::collections::{BTreeMap, BTreeSet};

use futures::{StreamExt as _, stream};
use gantry_api::names;
use http::{Method, Request};
use k8s_openapi::jiff::Timestamp;
use k8s_openapi::jiff::fmt::rfc2822;
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};

use super::rights::{self, Right};

/// Objects per request.
const PAGE: usize = 500;
/// Requests for one list at most: a cluster of 10,000 pods has a diagnosis, of its first ones.
const PAGES: usize = 20;
/// Reviews of rights at the same time.
const REVIEWS: usize = 8;
/// Makes the API server send the metadata of objects only.
const METADATA: &str = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io";
const JSON: &str = "application/json";

/// The answer to one read.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Answer {
    /// An object; of a list, its items.
    Found(Value),
    /// There is no such object, or the API server does not serve the kind.
    Absent,
    /// Why it cannot be read.
    Unreadable(String),
}

/// The reads of every run: a name, and the path below which the object or list is. `{}` is the namespace of Gantry.
const READS: [(&str, &str); 23] = [
    ("version", "/version"),
    ("crd-gpunodes", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/gpunodes.gantry.dev"),
    ("crd-gangs", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/gangs.gantry.dev"),
    ("policies", "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"),
    ("bindings", "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings"),
    ("daemonsets", "/apis/apps/v1/daemonsets"),
    ("deployments", "/apis/apps/v1/namespaces/{}/deployments"),
    ("nodes", "/api/v1/nodes"),
    ("gpunodes", "/apis/gantry.dev/v1alpha1/gpunodes"),
    ("gangs", "/apis/gantry.dev/v1alpha1/gangs"),
    ("own-pods", "/api/v1/namespaces/{}/pods"),
    ("mount-events", "/api/v1/namespaces/{}/events?fieldSelector=reason%3DFailedMount"),
    ("leases", "/apis/coordination.k8s.io/v1/namespaces/{}/leases"),
    ("node-leases", "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"),
    ("slices", "/apis/resource.k8s.io/v1/resourceslices"),
    ("scheduler-map", "/api/v1/namespaces/{}/configmaps/gantry-scheduler"),
    ("runtime-classes", "/apis/node.k8s.io/v1/runtimeclasses"),
    ("kube-schedulers", "/api/v1/namespaces/kube-system/pods?labelSelector=component%3Dkube-scheduler"),
    ("pod-monitors", "/apis/monitoring.coreos.com/v1/podmonitors"),
    ("service-monitors", "/apis/monitoring.coreos.com/v1/servicemonitors"),
    ("namespaces", "/api/v1/namespaces"),
    ("webhook", "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/gantry-scheduler-name"),
    (
        "webhook-endpoints",
        "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices?labelSelector=kubernetes.io%2Fservice-name%3Dgantry-webhook",
    ),
];
/// Of the pods of all namespaces the metadata is enough.
const PODS: (&str, &str) = ("pods", "/api/v1/pods");

/// All answers of a run.
#[derive(Debug, Clone)]
pub(crate) struct Answers {
    read: BTreeMap<String, Answer>,
    /// The namespace of Gantry.
    pub(crate) namespace: String,
    /// The API server's time.
    pub(crate) now: Timestamp,
    /// Seconds by which this machine's clock is ahead of it.
    pub(crate) ahead: i64,
}

impl Answers {
    /// Reads a cluster. An unreadable part is an answer of its own.
    ///
    /// # Errors
    /// The API server does not respond at all.
    pub(crate) async fn read(client: &Client, namespace: &str) -> anyhow::Result<Self> {
        let (now, ahead) = clock(client).await?;
        let mut all = Self { read: BTreeMap::new(), namespace: namespace.to_owned(), now, ahead };
        for (name, path) in READS {
            let answer = get(client, &path.replace("{}", namespace), JSON).await;
            all.read.insert(name.to_owned(), answer);
        }
        all.read.insert(PODS.0.to_owned(), get(client, PODS.1, METADATA).await);
        all.read_daemons(client).await;
        all.read_rights(client).await;
        Ok(all)
    }

    /// Metrics and certificates of the extenders, configurations of kube-schedulers, and pods of other plugins, each by the name of its
    /// pod or DaemonSet.
    async fn read_daemons(&mut self, client: &Client) {
        for pod in self.items("own-pods").to_vec() {
            if label(&pod, "app.kubernetes.io/name") == Some(names::EXTENDER) {
                let name = name(&pod);
                let path = format!("/api/v1/namespaces/{}/pods/{name}:8011/proxy/metrics", self.namespace);
                self.read.insert(format!("metrics/{name}"), text(client, &path).await);
            }
        }
        for volume in ["tls", "webhook"] {
            let deployments = self.items("deployments").iter();
            let secrets: Vec<String> = deployments.filter_map(|set| mounted_secret(set, volume)).collect();
            for secret in secrets {
                let path = format!("/api/v1/namespaces/{}/secrets/{secret}", self.namespace);
                self.read.insert(format!("secret/{volume}"), get(client, &path, JSON).await);
            }
        }
        for pod in self.items("kube-schedulers").to_vec() {
            let name = name(&pod);
            let path = format!("/api/v1/namespaces/kube-system/pods/https:{name}:10259/proxy/configz");
            self.read.insert(format!("configz/{name}"), get(client, &path, JSON).await);
        }
        for set in self.rivals().into_iter().cloned().collect::<Vec<_>>() {
            let labels = set["spec"]["selector"]["matchLabels"].as_object().into_iter().flatten();
            let selector: Vec<String> = labels
                .map(|(key, value)| format!("{key}%3D{}", value.as_str().unwrap_or_default()))
                .collect();
            let space = set["metadata"]["namespace"].as_str().unwrap_or_default();
            let path = format!("/api/v1/namespaces/{space}/pods?labelSelector={}", selector.join(","));
            let answer = get(client, &path, JSON).await;
            self.read.insert(format!("rival/{space}/{}", name(&set)), answer);
        }
    }

    /// Whether the daemons have their rights.
    async fn read_rights(&mut self, client: &Client) {
        let answer = match rights::required(self) {
            Ok(rights) => self.lacking(client, rights).await,
            Err(error) => Answer::Unreadable(format!("{error:#}")),
        };
        self.read.insert("rights".to_owned(), answer);
    }

    /// The rights among these that the daemons lack.
    async fn lacking(&self, client: &Client, rights: BTreeSet<Right>) -> Answer {
        let mut reviews = stream::iter(rights)
            .map(|right| async move { (self.review(client, &right).await, right) })
            .buffered(REVIEWS);
        let mut lacking = Vec::new();
        while let Some((answer, right)) = reviews.next().await {
            match answer {
                Answer::Found(answer) if answer["status"]["allowed"] == true => {}
                Answer::Found(_) => {
                    let part = if right.part.is_empty() { String::new() } else { format!("/{}", right.part) };
                    let name = if right.name.is_empty() { String::new() } else { format!(" {}", right.name) };
                    let text = format!("{} {}{part}{name}", right.verb, right.resource);
                    lacking.push(json!({"account": right.account, "right": text}));
                }
                other => return other,
            }
        }
        Answer::Found(Value::Array(lacking))
    }

    /// Whether an account has a right.
    async fn review(&self, client: &Client, right: &Right) -> Answer {
        let mut attributes = json!({
            "group": right.group,
            "resource": right.resource,
            "subresource": right.part,
            "verb": right.verb,
            "name": right.name,
        });
        if right.is_local {
            attributes["namespace"] = json!(self.namespace);
        }
        let user = format!("system:serviceaccount:{}:{}", self.namespace, right.account);
        let review = json!({
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": user, "resourceAttributes": attributes},
        });
        post(client, "/apis/authorization.k8s.io/v1/subjectaccessreviews", &review).await
    }

    /// The answer of that name.
    pub(crate) fn get(&self, name: &str) -> &Answer {
        self.read.get(name).unwrap_or(&Answer::Absent)
    }

    /// The items of a list that was read; none if it could not be.
    pub(crate) fn items(&self, name: &str) -> &[Value] {
        match self.get(name) {
            Answer::Found(Value::Array(items)) => items,
            _ => &[],
        }
    }

    /// The answers whose name begins with this, and the rest of their names.
    pub(crate) fn beginning(&self, prefix: &str) -> impl Iterator<Item = (&str, &Answer)> {
        self.read.iter().filter_map(move |(name, answer)| Some((name.strip_prefix(prefix)?, answer)))
    }

    /// How Gantry is installed.
    pub(crate) fn shape(&self) -> Shape {
        let has = |list: &str, wanted: &str| {
            self.items(list)
                .iter()
                .any(|set| name(set) == wanted && set["metadata"]["namespace"] == self.namespace.as_str())
        };
        if has("deployments", "gantry-scheduler") {
            Shape::Own
        } else if has("deployments", names::EXTENDER) || has("daemonsets", names::EXTENDER) {
            Shape::Existing
        } else {
            Shape::PluginAlone
        }
    }

    /// DaemonSets of other device plugins for NVIDIA's GPUs, by their images.
    pub(crate) fn rivals(&self) -> Vec<&Value> {
        let is_rival = |set: &&Value| {
            let containers = set["spec"]["template"]["spec"]["containers"].as_array().into_iter().flatten();
            let mut images = containers.filter_map(|container| container["image"].as_str());
            images.any(|image| {
                ["k8s-device-plugin", "nvidia-gpu-device-plugin", "nvidia-device-plugin"]
                    .iter()
                    .any(|name| image.contains(name))
            })
        };
        self.items("daemonsets").iter().filter(is_rival).collect()
    }

    #[cfg(test)]
    pub(crate) fn recorded(read: BTreeMap<String, Answer>, now: Timestamp) -> Self {
        Self { read, namespace: "gantry-system".to_owned(), now, ahead: 0 }
    }

    #[cfg(test)]
    pub(crate) fn answer(&mut self, name: &str) -> &mut Answer {
        self.read.entry(name.to_owned()).or_insert(Answer::Absent)
    }
}

/// The shapes of an installation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shape {
    /// No scheduler calls an extender.
    PluginAlone,
    /// With a kube-scheduler of Gantry's own.
    Own,
    /// With the cluster's kube-scheduler.
    Existing,
}

/// The Secret that a Deployment mounts as this volume.
fn mounted_secret(deployment: &Value, volume: &str) -> Option<String> {
    let mut volumes = deployment["spec"]["template"]["spec"]["volumes"].as_array()?.iter();
    let mounted = volumes.find(|known| known["name"] == volume)?;
    mounted["secret"]["secretName"].as_str().map(str::to_owned)
}

/// The name of an object.
pub(crate) fn name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap_or_default()
}

/// A label of an object.
pub(crate) fn label<'a>(object: &'a Value, key: &str) -> Option<&'a str> {
    object["metadata"]["labels"][key].as_str()
}

/// The API server's time, and how far this machine's is ahead.
async fn clock(client: &Client) -> anyhow::Result<(Timestamp, i64)> {
    let request = Request::get("/version").body(Body::empty())?;
    let response = client.send(request).await?;
    let own = Timestamp::now();
    let date = response.headers().get("date").and_then(|date| date.to_str().ok());
    let there = date.and_then(|date| rfc2822::parse(date).ok()).map(|date| date.timestamp());
    // The header has whole seconds.
    Ok(there.map_or((own, 0), |there| (there, own.as_second() - there.as_second())))
}

async fn get(client: &Client, path: &str, accept: &str) -> Answer {
    let mut all: Option<Vec<Value>> = None;
    let mut next = String::new();
    for _ in 0..PAGES {
        let separator = if path.contains('?') { '&' } else { '?' };
        let uri = format!("{path}{separator}limit={PAGE}{next}");
        let request = Request::builder().uri(uri).header("accept", accept).body(Vec::new());
        let page: Value = match request.map_err(|error| error.to_string()) {
            Ok(request) => match client.request(request).await {
                Ok(page) => page,
                Err(error) => return failed(&error),
            },
            Err(error) => return Answer::Unreadable(error),
        };
        let Some(items) = page["items"].as_array() else {
            return Answer::Found(page);
        };
        all.get_or_insert_default().extend(items.iter().cloned());
        match page["metadata"]["continue"].as_str() {
            Some(token) if !token.is_empty() => next = format!("&continue={token}"),
            _ => break,
        }
    }
    Answer::Found(Value::Array(all.unwrap_or_default()))
}

async fn text(client: &Client, path: &str) -> Answer {
    match Request::get(path).body(Vec::new()) {
        Ok(request) => match client.request_text(request).await {
            Ok(text) => Answer::Found(Value::String(text)),
            Err(error) => failed(&error),
        },
        Err(error) => Answer::Unreadable(error.to_string()),
    }
}

async fn post(client: &Client, path: &str, body: &Value) -> Answer {
    let request = Request::builder()
        .method(Method::POST)
        .uri(path)
        .header("content-type", JSON)
        .body(body.to_string().into_bytes());
    match request {
        Ok(request) => match client.request(request).await {
            Ok(answer) => Answer::Found(answer),
            Err(error) => failed(&error),
        },
        Err(error) => Answer::Unreadable(error.to_string()),
    }
}

fn failed(error: &kube::Error) -> Answer {
    match error {
        kube::Error::Api(status) if status.code == 404 => Answer::Absent,
        kube::Error::Api(status) => Answer::Unreadable(status.message.clone()),
        error => Answer::Unreadable(gantry_runtime::chain(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The chart lets the operator name the Secret.
    #[test]
    fn secret_is_the_one_that_the_deployment_mounts() {
        let with = |volumes: Value| json!({"spec": {"template": {"spec": {"volumes": volumes}}}});
        let mounted = with(json!([{"name": "x"}, {"name": "tls", "secret": {"secretName": "mine"}}]));
        assert_eq!(mounted_secret(&mounted, "tls").as_deref(), Some("mine"));
        assert_eq!(mounted_secret(&mounted, "webhook"), None);
        assert_eq!(mounted_secret(&with(json!([{"name": "x"}])), "tls"), None);
        assert_eq!(mounted_secret(&json!({}), "tls"), None);
    }
}
