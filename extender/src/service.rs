//! The verbs of the extender API as functions of a body: read it, decide, answer. HTTP is in `server`; this can be called by a test or
//! a benchmark without a socket.

use std::sync::Arc;

use gantry_api::{NodeName, PodUid, ResourceName, names};
use gantry_gang::protocol::Answer;
use serde::Deserialize;

use crate::bind::Binder;
use crate::decide::{self, Candidates as _, Filtered, Options};
use crate::index::{Belongs, Parked, Store, Target};
use crate::metrics::{Decision, Metrics};
use crate::pod::{PodFacts, SlimPod};
use crate::request::{Request, RequestError};
use crate::snapshot::{NodeIx, Snapshot};
use crate::watched::Watched;
use crate::wire::{
    self, CandidateNodes, ExtenderArgs, ExtenderBindingArgs, ExtenderPreemptionArgs, Node, NodeObject, Pod,
    Text,
};

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
        let args: ExtenderArgs<'_> = read("filter", body)?;
        let candidates = candidates("filter", args.nodes, args.node_names)?;
        let snapshot = self.store.snapshot();
        let outcome;
        let answer = match self.request(&args.pod, &snapshot)? {
            // Not ours to say anything about, whatever state we are in.
            Ok(request) if request.is_empty() => {
                outcome = "ignored";
                Filtered::all_passed(candidates.len())
            }
            Err(error) => {
                outcome = "none";
                Filtered::all_refused(candidates.len(), format!("node(s) not looked at: {error}"))
            }
            Ok(request) => {
                self.meet(&args.pod, &snapshot);
                let answer = self.decide(body, &args.pod, request, &candidates, &snapshot);
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
        body: &[u8],
        pod: &Pod<'_>,
        request: Request,
        candidates: &CandidateNodes<'_>,
        snapshot: &Snapshot,
    ) -> Filtered {
        let nodes = decide::locate(snapshot, candidates);
        let uid = uid(pod);
        let simulated = decide::is_simulation(candidates, &nodes);
        if !simulated && !uid.is_empty() {
            match self.gang(body, uid, candidates, &nodes) {
                Answer::Single => {}
                Answer::Node(node) => return only(candidates, &node),
                Answer::Wait(why) => return Filtered::all_refused(candidates.len(), why.to_string()),
            }
        }
        let mut answer = decide::filter(snapshot, self.options, &request, candidates, &nodes);
        let priority = pod.spec.as_ref().and_then(|spec| spec.priority).unwrap_or(0);
        if let Some(kept) = &snapshot.kept
            && priority <= kept.priority
        {
            answer.keep_off(kept, &nodes);
        }
        if let Some(promised) = &snapshot.promised {
            answer.leave_promised(promised, snapshot, &nodes, (priority, &request));
        }
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
                self.store.note(|index| index.park(uid, parked));
            }
        } else if let [only] = answer.passed[..] {
            // kube-scheduler asks no further: it goes there.
            let name = candidates.name(only as usize);
            self.hold(&uid, request, name);
        } else if self.store.read(|index| index.is_parked(uid.as_str())) {
            self.store.note(|index| index.unpark(&uid));
        }
        answer
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
            let nodes = decide::locate(&snapshot, &candidates);
            let uid = uid(&args.pod);
            let known = nodes.iter().all(Option::is_some) && !uid.is_empty();
            let gang = match known {
                true => self.gang(body, uid, &candidates, &nodes),
                false => Answer::Single,
            };
            winner = match &gang {
                Answer::Single => {
                    decide::prioritize(&snapshot, self.options, uid, &request, &candidates, &nodes)
                        .map(|winner| winner.position)
                }
                Answer::Node(node) => position(&candidates, node),
                Answer::Wait(_) => None,
            };
            if let Some(winner) = winner
                && known
                && gang == Answer::Single
            {
                self.hold(&PodUid::from(uid), request, candidates.name(winner as usize));
            }
        }
        let decision = Decision {
            verb: "prioritize",
            outcome: if winner.is_some() { "winner" } else { "none" },
        };
        self.metrics.decisions.get_or_create(&decision).inc();
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
        let request = self.request(&args.pod, &snapshot)?;
        if request.as_ref().is_ok_and(|request| !request.is_empty()) {
            self.meet(&args.pod, &snapshot);
        }
        match request {
            Ok(request) if request.is_empty() => {}
            // It may be called as soon as the pod is made, and before filter.
            Ok(_) if self.is_member(body, uid(&args.pod)) => {
                offers.clear();
                outcome = "none";
            }
            Ok(request) => {
                let spec = args.pod.spec.as_ref();
                let priority = spec.and_then(|spec| spec.priority).unwrap_or_default();
                let uid = PodUid::from(uid(&args.pod));
                offers = self
                    .store
                    .update(|index| index.preemptable(&uid, &request, priority, offers));
                outcome = if offers.is_empty() { "none" } else { "some" };
            }
            // Filter has refused it everywhere; no end of others mends what it asks for.
            Err(_) => {
                offers.clear();
                outcome = "none";
            }
        }
        let decision = Decision {
            verb: "preempt",
            outcome,
        };
        self.metrics.decisions.get_or_create(&decision).inc();
        wire::preemption_answer(offers).map_err(|error| malformed("preempt", &error))
    }

    /// Who asks about a pod brings those of its scheduler.
    fn meet(&self, pod: &Pod<'_>, snapshot: &Snapshot) {
        let name = pod.spec.as_ref().and_then(|spec| spec.scheduler_name.as_ref());
        let name = name.map_or(names::DEFAULT_SCHEDULER, Text::as_str);
        if !snapshot.schedulers.contains(name) {
            self.store.note(|index| index.scheduler_asks(name));
        }
    }

    /// Whether a pod belongs to a gang. One that the watch has not shown yet is read from the body.
    fn is_member(&self, body: &[u8], uid: &str) -> bool {
        match self.store.read(|index| index.belongs(uid)) {
            Belongs::Single => false,
            Belongs::Gang => true,
            Belongs::Unknown => {
                let pod = serde_json::from_slice::<OnlyPod>(body).ok();
                let pod = pod.and_then(|body| PodFacts::read(&self.watched, body.pod));
                let member = pod.filter(|pod| pod.claim.is_some());
                let is_member = member.is_some();
                if let Some(pod) = member {
                    self.store.update(|index| index.hear(pod));
                }
                is_member
            }
        }
    }

    /// What a pod's gang says, if it belongs to one.
    fn gang(
        &self,
        body: &[u8],
        uid: &str,
        candidates: &CandidateNodes<'_>,
        nodes: &[Option<NodeIx>],
    ) -> Answer {
        if !self.is_member(body, uid) {
            return Answer::Single;
        }
        let offered = |node: &NodeName| position(candidates, node).is_some();
        let uid = PodUid::from(uid);
        self.store.update(|index| {
            let answer = index.answer(&uid, &offered);
            if matches!(answer, Answer::Wait(_)) {
                index.offered(&uid, nodes.iter().flatten().copied());
            }
            answer
        })
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
            return Err(Refusal::Cold);
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

    fn hold(&self, uid: &PodUid, request: Request, node: &str) {
        let request = Arc::new(request);
        self.store.note(|index| {
            index.unpark(uid);
            index.hold(index.now().at, uid, &request, node);
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

/// Of the body of filter, prioritize and preempt, the pod.
#[derive(Deserialize)]
struct OnlyPod {
    #[serde(rename = "Pod", alias = "pod")]
    pod: SlimPod,
}

/// One node and no other. Why the others are refused need not be said: kube-scheduler asks no further.
fn only(candidates: &CandidateNodes<'_>, node: &NodeName) -> Filtered {
    match position(candidates, node) {
        Some(position) => Filtered {
            passed: vec![position],
            ..Filtered::default()
        },
        None => Filtered::all_refused(
            candidates.len(),
            "its gang's place is on a node that was not offered".to_owned(),
        ),
    }
}

fn position(candidates: &CandidateNodes<'_>, node: &NodeName) -> Option<u32> {
    let found = (0..candidates.len()).find(|position| candidates.name(*position) == node.as_str());
    found.and_then(|position| u32::try_from(position).ok())
}

/// Reads a call's body. Its text is looked through once as a whole, and not each of thousands of names by itself.
fn read<'a, T: Deserialize<'a>>(verb: &'static str, body: &'a [u8]) -> Result<T, Refusal> {
    let body = std::str::from_utf8(body).map_err(|error| malformed(verb, &error))?;
    serde_json::from_str(body).map_err(|error| malformed(verb, &error))
}

fn malformed(verb: &'static str, error: &dyn std::error::Error) -> Refusal {
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
