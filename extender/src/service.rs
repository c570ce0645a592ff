//! The verbs of the extender API as functions of a body: read it, decide, answer. HTTP is in `server`; this can be called by a test or
//! a benchmark without a socket.

use std::sync::Arc;
use std::time::Instant;

use gantry_api::{PodUid, ResourceName};

use crate::bind::Binder;
use crate::decide::{self, Candidates, Filtered, NodeObject, Options};
use crate::index::{Parked, Store, Target};
use crate::metrics::{Decision, Metrics, Outcome};
use crate::request::{Request, RequestError};
use crate::snapshot::Snapshot;
use crate::watched::Watched;
use crate::wire::{self, ExtenderArgs, ExtenderBindingArgs, Node, Pod, Text};

/// What the server serves.
pub struct Service {
    /// The cluster.
    pub store: Arc<Store>,
    /// Writes Bindings.
    pub binder: Binder,
    /// Resources looked at.
    pub watched: Watched,
    /// What the operator chose.
    pub options: Options,
    /// Metrics.
    pub metrics: Arc<Metrics>,
}

/// Why a body is not answered.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// It is no JSON of the shape asked for: 400.
    #[error("{verb}: {error}")]
    Malformed {
        /// What was asked for.
        verb: &'static str,
        /// What is wrong, with line and column.
        error: String,
    },
    /// The caches are not filled yet: 503, kube-scheduler tries again.
    #[error("the cluster's pods, nodes and GpuNodes are not all listed yet; try again")]
    Cold,
}

impl Service {
    /// `POST /filter`.
    ///
    /// # Errors
    /// See [`Refusal`].
    pub fn filter(&self, body: &[u8]) -> Result<Vec<u8>, Refusal> {
        let args = read_args("filter", body)?;
        let candidates = candidates("filter", args.nodes, args.node_names)?;
        let snapshot = self.store.snapshot();
        let outcome;
        let answer = match self.request(&args.pod, &snapshot)? {
            // Not ours to say anything about, whatever state we are in.
            Ok(request) if request.is_empty() => {
                outcome = "untouched";
                Filtered::all_passed(candidates.len())
            }
            Err(error) => {
                outcome = "none";
                Filtered::all_refused(candidates.len(), format!("node(s) not looked at: {error}"))
            }
            Ok(request) => {
                let answer = self.decide(&args.pod, request, &candidates, &snapshot);
                outcome = if answer.passed.is_empty() { "none" } else { "some" };
                answer
            }
        };
        let decision = Decision {
            verb: "filter",
            outcome,
        };
        self.metrics.decisions.get_or_create(&decision).inc();
        Ok(wire::filter_answer(&candidates, &answer))
    }

    fn decide(
        &self,
        pod: &Pod<'_>,
        request: Request,
        candidates: &Candidates<'_>,
        snapshot: &Snapshot,
    ) -> Filtered {
        let nodes = decide::locate(snapshot, candidates);
        let answer = decide::filter(snapshot, self.options, &request, candidates, &nodes);
        let uid = uid(pod);
        if answer.simulated || uid.is_empty() {
            return answer;
        }
        let uid = PodUid::from(uid);
        if answer.passed.is_empty() {
            if !answer.refused.is_empty() {
                let parked = Parked {
                    namespace: text(pod.metadata.namespace.as_ref()).into(),
                    name: text(pod.metadata.name.as_ref()).into(),
                    request: Arc::new(request),
                    generation: snapshot.generation,
                };
                self.store.update(|index| index.park(uid, parked));
            }
        } else if let [only] = answer.passed[..] {
            // kube-scheduler asks no further: it goes there.
            let name = candidates.name(only as usize);
            self.hold(&uid, request, name);
        } else if self.store.read(|index| index.is_parked(uid.as_str())) {
            self.store.update(|index| index.unpark(&uid));
        }
        answer
    }

    /// `POST /prioritize`.
    ///
    /// # Errors
    /// See [`Refusal`].
    pub fn prioritize(&self, body: &[u8]) -> Result<Vec<u8>, Refusal> {
        let args = read_args("prioritize", body)?;
        let candidates = candidates("prioritize", args.nodes, args.node_names)?;
        let snapshot = self.store.snapshot();
        let request = self.request(&args.pod, &snapshot)?.unwrap_or_default();
        let mut winner = None;
        if !request.is_empty() {
            let nodes = decide::locate(&snapshot, &candidates);
            let uid = uid(&args.pod);
            winner = decide::prioritize(&snapshot, self.options, uid, &request, &candidates, &nodes);
            if let Some(winner) = &winner
                && !uid.is_empty()
                && nodes.iter().all(Option::is_some)
            {
                self.hold(
                    &PodUid::from(uid),
                    request,
                    candidates.name(winner.position as usize),
                );
            }
        }
        let decision = Decision {
            verb: "prioritize",
            outcome: if winner.is_some() { "winner" } else { "none" },
        };
        self.metrics.decisions.get_or_create(&decision).inc();
        Ok(wire::priorities_answer(
            &candidates,
            winner.map(|winner| winner.position),
        ))
    }

    /// `POST /bind`.
    ///
    /// # Errors
    /// See [`Refusal`]. A bind that fails is an answer with an error in it.
    pub async fn bind(&self, body: &[u8]) -> Result<Vec<u8>, Refusal> {
        let args: ExtenderBindingArgs<'_> =
            serde_json::from_slice(body).map_err(|error| malformed("bind", &error))?;
        for (field, text) in [
            ("PodName", &args.pod_name),
            ("PodNamespace", &args.pod_namespace),
            ("PodUID", &args.pod_uid),
            ("Node", &args.node),
        ] {
            if !is_name(text.as_str()) {
                let error = format!("{field} is {text:?}, which is no name");
                return Err(Refusal::Malformed { verb: "bind", error });
            }
        }
        if !self.store.snapshot().synced {
            return Err(Refusal::Cold);
        }
        let target = Target {
            uid: args.pod_uid.as_str().into(),
            namespace: args.pod_namespace.as_str().to_owned(),
            name: args.pod_name.as_str().to_owned(),
            node: args.node.as_str().into(),
        };
        let result = self.binder.bind(&target).await;
        let outcome = result
            .as_ref()
            .map_or_else(|failure| failure.label(), |()| "bound");
        self.metrics.binds.get_or_create(&Outcome { outcome }).inc();
        let error = result.err().map(|failure| failure.to_string());
        if let Some(error) = &error {
            tracing::warn!(pod = %target.name, namespace = %target.namespace, node = %target.node, %error, "bind failed");
        }
        Ok(wire::bind_answer(error.as_deref()))
    }

    fn hold(&self, uid: &PodUid, request: Request, node: &str) {
        let now = Instant::now();
        let request = Arc::new(request);
        self.store.update(|index| {
            index.unpark(uid);
            index.hold(now, uid, &request, node);
        });
    }

    /// What a pod asks of the managed resources. Nothing if it asks for none that is watched, whatever is known of the cluster.
    fn request(&self, pod: &Pod<'_>, snapshot: &Snapshot) -> Result<Result<Request, RequestError>, Refusal> {
        let Some(spec) = &pod.spec else {
            return Ok(Ok(Request::default()));
        };
        let mut asked: Vec<ResourceName> = self.watched.among(spec.resources());
        if asked.is_empty() {
            return Ok(Ok(Request::default()));
        }
        if !snapshot.synced {
            return Err(Refusal::Cold);
        }
        asked.retain(|resource| snapshot.managed.contains(resource));
        Ok(Request::read(&asked, |resource| spec.containers_asking(resource)))
    }
}

fn read_args<'a>(verb: &'static str, body: &'a [u8]) -> Result<ExtenderArgs<'a>, Refusal> {
    serde_json::from_slice(body).map_err(|error| malformed(verb, &error))
}

fn malformed(verb: &'static str, error: &serde_json::Error) -> Refusal {
    Refusal::Malformed {
        verb,
        error: error.to_string(),
    }
}

/// Names win over objects, as kube-scheduler sends one or the other.
fn candidates<'a>(
    verb: &'static str,
    nodes: Option<wire::NodeList<'a>>,
    names: Option<Vec<Text<'a>>>,
) -> Result<Candidates<'a>, Refusal> {
    if let Some(names) = names {
        return Ok(Candidates::Names(names));
    }
    let items = nodes.and_then(|nodes| nodes.items).unwrap_or_default();
    let objects = items
        .into_iter()
        .enumerate()
        .map(|(position, raw)| {
            let node: Node<'a> = serde_json::from_str(raw.get()).map_err(|error| Refusal::Malformed {
                verb,
                error: format!("Nodes.items[{position}]: {error}"),
            })?;
            Ok(NodeObject { raw: raw.get(), node })
        })
        .collect::<Result<_, Refusal>>()?;
    Ok(Candidates::Nodes(objects))
}

fn uid<'a>(pod: &'a Pod<'_>) -> &'a str {
    text(pod.metadata.uid.as_ref())
}

fn text<'a>(text: Option<&'a Text<'_>>) -> &'a str {
    text.map_or("", Text::as_str)
}

/// Names and UIDs go into the path of a request to the API server: letters, digits, dashes and dots, as it allows.
fn is_name(text: &str) -> bool {
    (1..=253).contains(&text.len())
        && text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b':'))
        && text != "."
        && text != ".."
}

#[cfg(test)]
pub(crate) mod tests;
