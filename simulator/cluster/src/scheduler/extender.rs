//! The extender protocol as kube-scheduler speaks it: the entry of its configuration, the messages (Go's names,
//! PascalCase), one POST per verb, one time limit for all.

use std::collections::BTreeMap;
use std::time::Duration;

use http::{Request, StatusCode, header};
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::{Connect, HttpConnector};
use hyper_util::rt::TokioExecutor;
use k8s_openapi::api::core::v1::{Pod, PodSpec};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// One entry of `extenders:` in a `KubeSchedulerConfiguration`, as far as this scheduler goes by it.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExtenderConfig {
    /// Where it listens.
    pub url_prefix: String,
    /// Path of filter.
    pub filter_verb: String,
    /// Path of prioritize.
    pub prioritize_verb: String,
    /// Path of bind.
    pub bind_verb: String,
    /// What its scores weigh.
    pub weight: i64,
    /// Time limit of each call, in whole seconds: `30s`.
    pub http_timeout: String,
    /// Pods that ask for one of these are its business.
    pub managed_resources: Vec<ManagedResource>,
}

/// A resource that makes a pod the extender's business.
#[derive(Debug, Clone, Deserialize)]
pub struct ManagedResource {
    pub name: String,
}

#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct Args<'a> {
    pod: &'a Pod,
    /// Always null: the extender caches the nodes.
    nodes: Option<()>,
    node_names: &'a [String],
}

/// What filter answers.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct FilterResponse {
    pub(super) node_names: Option<Vec<String>>,
    pub(super) failed_nodes: Option<BTreeMap<String, String>>,
    pub(super) failed_and_unresolvable_nodes: Option<BTreeMap<String, String>>,
    pub(super) error: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct HostPriority {
    host: String,
    score: i64,
}

/// What bind is asked.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct BindingArgs {
    pub(super) pod_name: String,
    pub(super) pod_namespace: String,
    #[serde(rename = "PodUID")]
    pub(super) pod_uid: String,
    pub(super) node: String,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct BindingResult {
    error: Option<String>,
}

/// The client of one extender.
#[derive(Debug, Clone)]
pub(super) struct Extender<C> {
    config: ExtenderConfig,
    client: Client<C, Full<Bytes>>,
}

/// Connects by TCP.
pub(super) fn tcp() -> HttpConnector {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    connector
}

impl<C: Connect + Clone + Send + Sync + 'static> Extender<C> {
    pub(super) fn new(config: ExtenderConfig, connector: C) -> Self {
        Self { config, client: Client::builder(TokioExecutor::new()).build(connector) }
    }

    /// Whether a pod is its business.
    pub(super) fn interested(&self, pod: &PodSpec) -> bool {
        let containers = pod.containers.iter().chain(pod.init_containers.iter().flatten());
        let mut names = containers
            .filter_map(|container| container.resources.as_ref())
            .flat_map(|resources| resources.requests.iter().chain(resources.limits.iter()))
            .flat_map(|amounts| amounts.keys());
        names.any(|name| self.config.managed_resources.iter().any(|managed| managed.name == *name))
    }

    /// The nodes that fit, or why not.
    pub(super) async fn filter(&self, pod: &Pod, node_names: &[String]) -> Result<FilterResponse, String> {
        let args = Args { pod, nodes: None, node_names };
        self.call(&self.config.filter_verb, &args).await
    }

    /// Points per node, already weighed.
    pub(super) async fn prioritize(
        &self,
        pod: &Pod,
        node_names: &[String],
    ) -> Result<BTreeMap<String, i64>, String> {
        let args = Args { pod, nodes: None, node_names };
        let scores: Vec<HostPriority> = self.call(&self.config.prioritize_verb, &args).await?;
        // Extenders score 0 to 10, plugins 0 to 100.
        let weigh = |score: i64| score.saturating_mul(self.config.weight).saturating_mul(10);
        Ok(scores.into_iter().map(|entry| (entry.host, weigh(entry.score))).collect())
    }

    /// Binds; `Err` carries the text for the pod.
    pub(super) async fn bind(&self, args: &BindingArgs) -> Result<(), String> {
        let result: BindingResult = self.call(&self.config.bind_verb, args).await?;
        match result.error {
            Some(error) if !error.is_empty() => Err(error),
            _ => Ok(()),
        }
    }

    /// Calls a verb. Errors have kube-scheduler's texts; the body of any status but 200 is not read.
    async fn call<A: DeserializeOwned>(&self, verb: &str, args: &impl Serialize) -> Result<A, String> {
        let url = format!("{}/{verb}", self.config.url_prefix.trim_end_matches('/'));
        let transport = |problem: String| format!("Post {url:?}: {problem}");
        let body = serde_json::to_vec(args).map_err(|error| transport(error.to_string()))?;
        let request = Request::post(&url)
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body)))
            .map_err(|error| transport(error.to_string()))?;
        let exchange = async {
            let response = self.client.request(request).await.map_err(|error| transport(chain(&error)))?;
            let code = response.status();
            if code != StatusCode::OK {
                return Err(format!("failed {verb} with extender at URL {url}, code {}", code.as_u16()));
            }
            let body = response.into_body().collect().await;
            Ok(body.map_err(|error| transport(chain(&error)))?.to_bytes())
        };
        let body = tokio::time::timeout(self.timeout(), exchange)
            .await
            .map_err(|_| transport("context deadline exceeded".to_owned()))??;
        serde_json::from_slice(&body).map_err(|error| format!("extender's answer at {url}: {error}"))
    }

    fn timeout(&self) -> Duration {
        let seconds = self.config.http_timeout.trim_end_matches('s').parse();
        // What kube-scheduler takes where nothing is set.
        Duration::from_secs(seconds.unwrap_or(5))
    }
}

/// An error with its causes in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
