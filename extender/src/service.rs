//! The verbs of the extender API as functions of a body: read it, decide, answer. HTTP is in `server`; this can be called by a test or
//! a benchmark without a socket.

use std::sync::Arc;

use gantry_api::{ResourceName, names};
use serde::Deserialize;

use crate::bind::Binder;
use crate::bounded::{self, ReadError};
use crate::index::{CalledPod, SchedulingCall, Store, Target, UnavailableReason};
use crate::metrics::{Decision, Metrics};
use crate::object_memory::{Kind, ObjectMemory, ObjectRef};
use crate::pod::{ParsedPod, Reader, SlimPod};
use crate::watched::WatchedResources;
use crate::wire::{
    self, CandidateNodes, ExtenderArgs, ExtenderBindingArgs, ExtenderPreemptionArgs, Node, NodeObject, Pod,
    Quantities, Text,
};
use gantry_planner::decide::{Candidates as _, FilterVerdict};
use gantry_planner::request::{Request, RequestError};
use gantry_planner::snapshot::Snapshot;

/// What the server serves.
pub struct Service {
    /// The cluster.
    pub store: Arc<Store>,
    /// Writes Bindings.
    pub binder: Binder,
    /// Resources looked at.
    pub watched: WatchedResources,
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
    /// No decisions are made now: 503, kube-scheduler tries again.
    #[error(transparent)]
    Unavailable(#[from] UnavailableReason),
}

impl Service {
    /// `POST /filter`.
    ///
    /// # Errors
    /// See [`Refusal`].
    pub fn filter(&self, body: &[u8]) -> Result<Vec<u8>, Refusal> {
        let args: ExtenderArgs<'_> = read("filter", body)?;
        let candidates = candidates("filter", args.nodes, args.node_names)?;
        let snapshot = self.store.snapshot();
        let (answer, outcome) = match self.request(&args.pod, &snapshot)? {
            // The pod asks for no managed resource: it passes in every state of the cluster.
            Ok(request) if request.is_empty() => (FilterVerdict::all_passed(candidates.len()), "ignored"),
            Err(error) => {
                let reason = format!("node(s) not looked at: {error}");
                (FilterVerdict::all_refused(candidates.len(), reason), "none")
            }
            Ok(request) => {
                let read_pod = || self.read_pod(&args.pod, body);
                let call = call(&args.pod, request, &snapshot, &read_pod);
                // What the watch refused. A pod that it has not shown is read from the call.
                let answer = match self.store.memory().refusal_of_pod(call.uid) {
                    Some(refusal) => FilterVerdict::all_refused(candidates.len(), refusal.to_string()),
                    None => self.store.filter(&call, &candidates)?,
                };
                let outcome = if answer.passed.is_empty() { "none" } else { "some" };
                (answer, outcome)
            }
        };
        self.count("filter", outcome);
        Ok(wire::filter_answer(&candidates, &answer))
    }

    /// `POST /prioritize`.
    ///
    /// # Errors
    /// See [`Refusal`].
    pub fn prioritize(&self, body: &[u8]) -> Result<Vec<u8>, Refusal> {
        let args: ExtenderArgs<'_> = read("prioritize", body)?;
        let candidates = candidates("prioritize", args.nodes, args.node_names)?;
        let snapshot = self.store.snapshot();
        let request = self.request(&args.pod, &snapshot)?.unwrap_or_default();
        let mut winner = None;
        if !request.is_empty() {
            let read_pod = || self.read_pod(&args.pod, body);
            let call = call(&args.pod, request, &snapshot, &read_pod);
            winner = self.store.prioritize(&call, &candidates)?;
        }
        self.count("prioritize", if winner.is_some() { "winner" } else { "none" });
        Ok(wire::priorities_answer(&candidates, winner))
    }

    /// `POST /preempt`.
    ///
    /// # Errors
    /// See [`Refusal`].
    pub fn preempt(&self, body: &[u8]) -> Result<Vec<u8>, Refusal> {
        let mut args: ExtenderPreemptionArgs<'_> = read("preempt", body)?;
        let mut offers = args.offers();
        let snapshot = self.store.snapshot();
        let mut outcome = "ignored";
        match self.request(&args.pod, &snapshot)? {
            Ok(request) if request.is_empty() => {}
            Ok(request) => {
                let read_pod = || self.read_pod(&args.pod, body);
                let call = call(&args.pod, request, &snapshot, &read_pod);
                offers = self.store.preempt(&call, offers)?;
                outcome = if offers.is_empty() { "none" } else { "some" };
            }
            // Filter refuses it on every node; no end of other pods changes what it asks for.
            Err(_) => {
                offers.clear();
                outcome = "none";
            }
        }
        self.count("preempt", outcome);
        wire::preemption_answer(offers).map_err(|error| malformed("preempt", &error))
    }

    fn count(&self, verb: &'static str, outcome: &'static str) {
        let decision = Decision { verb, outcome };
        self.metrics.decisions.get_or_create(&decision).inc();
    }

    /// The pod of a call that the index does not know, and why it is refused if it is too large.
    fn read_pod(&self, pod: &Pod<'_>, body: &[u8]) -> CalledPod {
        let Some(json) = wire::pod_text(body) else {
            return CalledPod::default();
        };
        let uid = text(pod.metadata.uid.as_ref());
        let about = ObjectRef {
            kind: Kind::Pod,
            api: None,
            namespace: text(pod.metadata.namespace.as_ref()).into(),
            name: text(pod.metadata.name.as_ref()).into(),
            uid: uid.into(),
        };
        match bounded::read::<SlimPod>(json.as_bytes(), Kind::Pod.read_limit()) {
            Ok((pod, _)) => {
                let Some(seen) = Reader::new(self.watched.clone()).read(pod) else {
                    return CalledPod::default();
                };
                let refusal = self.store.memory().would_refuse(&about, seen.weight());
                let facts = match seen {
                    ParsedPod::Facts(facts) => Some(*facts),
                    ParsedPod::OtherPod(_) => None,
                };
                CalledPod { facts, refusal }
            }
            Err(ReadError::TooLarge(_)) => {
                CalledPod { facts: None, refusal: Some(ObjectMemory::too_large(&about)) }
            }
            // Filter reports it as such.
            Err(ReadError::Malformed(_)) => CalledPod::default(),
        }
    }

    /// `POST /bind`.
    ///
    /// # Errors
    /// See [`Refusal`]. A bind that fails is an answer with an error in it.
    pub async fn bind(&self, body: &[u8]) -> Result<Vec<u8>, Refusal> {
        let args: ExtenderBindingArgs<'_> = read("bind", body)?;
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
            return Err(UnavailableReason::Cold.into());
        }
        let target = Target {
            uid: args.pod_uid.as_str().into(),
            namespace: args.pod_namespace.as_str().to_owned(),
            name: args.pod_name.as_str().to_owned(),
            node: args.node.as_str().into(),
        };
        let result = self.binder.bind(&target).await;
        self.metrics.bind_ended(&result);
        let error = result.err().map(|failure| failure.to_string());
        if let Some(error) = &error {
            tracing::warn!(pod = %target.name, namespace = %target.namespace, node = %target.node, %error, "bind failed");
        }
        Ok(wire::bind_answer(error.as_deref()))
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
            return Err(UnavailableReason::Cold.into());
        }
        asked.retain(|resource| snapshot.managed.contains(resource));
        let request = Request::read(&asked, |resource| spec.containers_asking(resource));
        let request = request.map(|request| request.with_numa(&spec.cpu_and_memory()));
        let annotations = pod.metadata.annotations.iter().flat_map(Quantities::iter);
        let defaults = self.watched.placement(text(pod.metadata.namespace.as_ref()));
        Ok(request.and_then(|request| request.placed_by(annotations, defaults)))
    }
}

fn call<'c>(
    pod: &'c Pod<'_>,
    request: Request,
    snapshot: &'c Snapshot,
    read_pod: &'c dyn Fn() -> CalledPod,
) -> SchedulingCall<'c> {
    let spec = pod.spec.as_ref();
    let scheduler = spec.and_then(|spec| spec.scheduler_name.as_ref());
    SchedulingCall {
        uid: text(pod.metadata.uid.as_ref()),
        namespace: text(pod.metadata.namespace.as_ref()),
        name: text(pod.metadata.name.as_ref()),
        scheduler: scheduler.map_or(names::DEFAULT_SCHEDULER, Text::as_str),
        priority: spec.and_then(|spec| spec.priority).unwrap_or_default(),
        request: Arc::new(request),
        snapshot,
        read_pod,
    }
}

/// Reads a call's body. Its text is looked through once as a whole, and not each of thousands of names by itself.
fn read<'a, T: Deserialize<'a>>(verb: &'static str, body: &'a [u8]) -> Result<T, Refusal> {
    let body = std::str::from_utf8(body).map_err(|error| malformed(verb, &error))?;
    serde_json::from_str(body).map_err(|error| malformed(verb, &error))
}

fn malformed(verb: &'static str, error: &dyn std::error::Error) -> Refusal {
    Refusal::Malformed { verb, error: error.to_string() }
}

/// Names win over objects, as kube-scheduler sends one or the other.
fn candidates<'a>(
    verb: &'static str,
    nodes: Option<wire::NodeList<'a>>,
    names: Option<Vec<Text<'a>>>,
) -> Result<CandidateNodes<'a>, Refusal> {
    if let Some(names) = names {
        return Ok(CandidateNodes::Names(names));
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
    Ok(CandidateNodes::Objects(objects))
}

fn text<'a>(text: Option<&'a Text<'_>>) -> &'a str {
    text.map_or("", Text::as_str)
}

/// Names and UIDs go into the path of a request to the API server: letters, digits, dashes and dots, as it allows.
fn is_name(text: &str) -> bool {
    (1..=253).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b':'))
        && text != "."
        && text != ".."
}

#[cfg(test)]
pub(crate) mod tests;
