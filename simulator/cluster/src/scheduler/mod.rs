//! A scheduler loop that stands in for kube-scheduler: one pod at a time through its own count, the extender's filter
//! and prioritize, then bind in a task of its own while the pod counts as assumed. It never chooses a device.

mod extender;
mod fit;
mod queue;
mod report;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hyper_util::client::legacy::connect::Connect;
use k8s_openapi::api::core::v1::{Binding, Node, ObjectReference, Pod};
use kube::api::{Api, ObjectMeta, PostParams};
use kube::runtime::watcher;
use kube::{Client, ResourceExt};
use rand::seq::IteratorRandom;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

pub use extender::{ExtenderConfig, ManagedResource};

use crate::mirror::{Delta, Mirror};
use extender::{BindingArgs, Extender};
use fit::Amounts;
use queue::Queue;
use report::Reporter;

/// The `schedulerName` it serves.
const NAME: &str = "default-scheduler";

/// Schedules pods until `stop` is cancelled.
pub async fn run(client: Client, extender: ExtenderConfig, stop: CancellationToken) {
    run_over(extender::tcp(), client, extender, stop).await;
}

/// As [`run`], with another way to connect to the extender.
pub async fn run_over<C: Connect + Clone + Send + Sync + 'static>(
    connector: C,
    client: Client,
    extender: ExtenderConfig,
    stop: CancellationToken,
) {
    let (bound, bind_results) = mpsc::unbounded_channel();
    let mut scheduler = Scheduler {
        pods: Mirror::new(Api::all(client.clone()), watcher::Config::default()),
        nodes: Mirror::new(Api::all(client.clone()), watcher::Config::default()),
        synced: [false, false],
        queue: Queue::default(),
        assumed: BTreeMap::new(),
        extender: Extender::new(extender, connector),
        reporter: Reporter::new(client.clone()),
        client,
        bound,
    };
    tokio::select! {
        () = scheduler.serve(bind_results) => {}
        () = stop.cancelled() => {}
    }
}

struct Scheduler<C> {
    pods: Mirror<Pod>,
    nodes: Mirror<Node>,
    /// Whether pods and nodes have been listed.
    synced: [bool; 2],
    queue: Queue,
    /// Pods whose bind is in progress or not yet observed, by UID: they count on their node.
    assumed: BTreeMap<String, String>,
    extender: Extender<C>,
    reporter: Reporter,
    client: Client,
    bound: mpsc::UnboundedSender<BindResult>,
}

/// How a bind ended.
struct BindResult {
    pod: Arc<Pod>,
    result: Result<(), String>,
}

/// How a try ended without a node.
enum Miss {
    /// Nothing fits: wait for a change.
    Unschedulable(String),
    /// Something broke: try again later.
    Error(String),
}

impl<C: Connect + Clone + Send + Sync + 'static> Scheduler<C> {
    async fn serve(&mut self, mut bind_results: mpsc::UnboundedReceiver<BindResult>) {
        loop {
            tokio::select! {
                biased;
                delta = self.pods.next() => self.pod_changed(delta),
                delta = self.nodes.next() => self.node_changed(&delta),
                Some(bound) = bind_results.recv() => self.bind_ended(bound).await,
                // With nothing new, there is time for a try.
                () = std::future::ready(()), if self.ready() => self.schedule_one().await,
                () = until(self.queue.next_due()) => {}
            }
        }
    }

    fn ready(&mut self) -> bool {
        self.synced == [true, true] && self.queue.has_due(Instant::now())
    }

    fn pod_changed(&mut self, delta: Delta<Pod>) {
        match delta {
            Delta::Synced => self.synced[0] = true,
            Delta::Gone(pod) => {
                let uid = pod.uid().unwrap_or_default();
                self.queue.remove(&uid);
                let held_a_node = self.assumed.remove(&uid).is_some() || node_of(&pod).is_some();
                if held_a_node {
                    self.queue.activate_all();
                }
            }
            Delta::Set { before, now } => {
                let uid = now.uid().unwrap_or_default();
                if node_of(&now).is_some() || !fit::is_live(&now) {
                    self.queue.remove(&uid);
                    self.assumed.remove(&uid);
                    let touched = before.is_none_or(|before| {
                        before.metadata.labels != now.metadata.labels
                            || before.metadata.annotations != now.metadata.annotations
                            || node_of(&before) != node_of(&now)
                            || fit::is_live(&before) != fit::is_live(&now)
                    });
                    if touched {
                        self.queue.activate_all();
                    }
                } else if is_ours(&now) && !self.assumed.contains_key(&uid) {
                    self.queue.add(&uid);
                    self.queue.activate(&uid);
                } else if !is_ours(&now) {
                    self.queue.remove(&uid);
                }
            }
        }
    }

    fn node_changed(&mut self, delta: &Delta<Node>) {
        match delta {
            Delta::Synced => self.synced[1] = true,
            Delta::Gone(_) => {}
            Delta::Set { before, now } => {
                let allocatable =
                    |node: &Node| node.status.as_ref().and_then(|status| status.allocatable.clone());
                // A heartbeat activates no pod.
                let touched = before.as_ref().is_none_or(|before| {
                    before.spec != now.spec
                        || before.metadata.labels != now.metadata.labels
                        || before.metadata.annotations != now.metadata.annotations
                        || allocatable(before) != allocatable(now)
                });
                if touched {
                    self.queue.activate_all();
                }
            }
        }
    }

    async fn bind_ended(&mut self, BindResult { pod, result }: BindResult) {
        let uid = pod.uid().unwrap_or_default();
        let Err(problem) = result else { return };
        let bound_meanwhile = self.pods.objects().get(&uid).is_some_and(|pod| node_of(pod).is_some());
        if self.assumed.remove(&uid).is_none() || bound_meanwhile {
            return;
        }
        self.queue.add(&uid);
        self.queue.back_off(&uid, Instant::now());
        self.queue.activate_all();
        self.reporter.failed(&pod, "SchedulerError", &format!("running Bind plugin: {problem}")).await;
    }

    async fn schedule_one(&mut self) {
        let Some(uid) = self.queue.pop(Instant::now()) else {
            return;
        };
        let Some(pod) = self.pods.objects().get(&uid).cloned() else {
            self.queue.remove(&uid);
            return;
        };
        match self.choose(&pod).await {
            Ok(node) => {
                self.queue.remove(&uid);
                self.assumed.insert(uid, node.clone());
                self.start_bind(pod, node);
            }
            Err(Miss::Unschedulable(message)) => {
                self.queue.mark_unschedulable(&uid);
                self.reporter.failed(&pod, "Unschedulable", &message).await;
            }
            Err(Miss::Error(message)) => {
                self.queue.back_off(&uid, Instant::now());
                self.reporter.failed(&pod, "SchedulerError", &message).await;
            }
        }
    }

    /// One scheduling cycle.
    async fn choose(&mut self, pod: &Pod) -> Result<String, Miss> {
        let spec = pod.spec.clone().unwrap_or_default();
        let asked = fit::requests(&spec);
        let used = self.used();
        let none = Amounts::new();
        let mut reasons = Vec::new();
        let mut fitting: BTreeMap<String, u128> = BTreeMap::new();
        for node in self.nodes.objects().values() {
            let name = node.name_any();
            let used = used.get(&name).unwrap_or(&none);
            let refused = fit::refusals(&spec, &asked, node, used);
            if refused.is_empty() {
                fitting.insert(name, fit::emptiness(&asked, node, used));
            }
            reasons.extend(refused);
        }
        // Where nothing is left the extender is not asked.
        if !fitting.is_empty() && self.extender.interested(&spec) {
            self.ask(pod, &mut fitting, &mut reasons).await?;
        }
        let best = fitting.values().max().copied();
        let winners = fitting.iter().filter(|(_, score)| Some(**score) == best);
        // Ties are broken at random, as kube-scheduler does.
        match winners.choose(&mut rand::rng()) {
            Some((name, _)) => Ok(name.clone()),
            None => Err(Miss::Unschedulable(report::message(self.nodes.objects().len(), reasons))),
        }
    }

    /// Lets the extender filter and score the nodes that fit.
    async fn ask(
        &mut self,
        pod: &Pod,
        fitting: &mut BTreeMap<String, u128>,
        reasons: &mut Vec<String>,
    ) -> Result<(), Miss> {
        let names: Vec<String> = fitting.keys().cloned().collect();
        let answer = self.extender.filter(pod, &names).await.map_err(Miss::Error)?;
        if let Some(problem) = answer.error.filter(|problem| !problem.is_empty()) {
            return Err(Miss::Error(problem));
        }
        let kept: BTreeSet<String> = answer.node_names.unwrap_or_default().into_iter().collect();
        if let Some(unknown) = kept.iter().find(|name| !fitting.contains_key(*name)) {
            return Err(Miss::Error(format!(
                "extender's answer names node {unknown:?}, which was not asked about"
            )));
        }
        fitting.retain(|name, _| kept.contains(name));
        let failed = answer.failed_nodes.into_iter().flatten();
        reasons.extend(
            failed.chain(answer.failed_and_unresolvable_nodes.into_iter().flatten()).map(|(_, text)| text),
        );
        if fitting.len() < 2 {
            return Ok(());
        }
        let names: Vec<String> = fitting.keys().cloned().collect();
        match self.extender.prioritize(pod, &names).await {
            Ok(points) => {
                for (name, score) in fitting.iter_mut() {
                    *score += points.get(name).and_then(|points| u128::try_from(*points).ok()).unwrap_or(0);
                }
            }
            // Errors of prioritize are swallowed.
            Err(error) => tracing::warn!(%error, "prioritize failed"),
        }
        Ok(())
    }

    /// What live pods take of each node, assumed ones counted.
    fn used(&self) -> BTreeMap<String, Amounts> {
        let mut used: BTreeMap<String, Amounts> = BTreeMap::new();
        for (uid, pod) in self.pods.objects() {
            let node = node_of(pod).or_else(|| self.assumed.get(uid).map(String::as_str));
            if let (Some(node), Some(spec), true) = (node, &pod.spec, fit::is_live(pod)) {
                fit::add(used.entry(node.to_owned()).or_default(), &fit::requests(spec));
            }
        }
        used
    }

    /// Binds in a task of its own: it may take as long as the extender likes.
    fn start_bind(&self, pod: Arc<Pod>, node: String) {
        let spec = pod.spec.clone().unwrap_or_default();
        let extender = self.extender.interested(&spec).then(|| self.extender.clone());
        let (client, reporter, bound) = (self.client.clone(), self.reporter.clone(), self.bound.clone());
        tokio::spawn(async move {
            let result = match extender {
                Some(extender) => {
                    let args = BindingArgs {
                        pod_name: pod.name_any(),
                        pod_namespace: pod.namespace().unwrap_or_default(),
                        pod_uid: pod.uid().unwrap_or_default(),
                        node: node.clone(),
                    };
                    extender.bind(&args).await
                }
                None => default_bind(&client, &pod, &node).await,
            };
            if result.is_ok() {
                reporter.scheduled(&pod, &node).await;
            }
            // The receiver is closed only after the scheduler has ended.
            let _ = bound.send(BindResult { pod, result });
        });
    }
}

async fn default_bind(client: &Client, pod: &Pod, node: &str) -> Result<(), String> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), &pod.namespace().unwrap_or_default());
    let binding = Binding {
        metadata: ObjectMeta { name: Some(pod.name_any()), uid: pod.uid(), ..ObjectMeta::default() },
        target: ObjectReference {
            kind: Some("Node".into()),
            name: Some(node.to_owned()),
            ..ObjectReference::default()
        },
    };
    pods.create_subresource::<Binding, serde_json::Value>(
        "binding",
        &pod.name_any(),
        &PostParams::default(),
        &binding,
    )
    .await
    .map(drop)
    .map_err(|error| error.to_string())
}

fn node_of(pod: &Pod) -> Option<&str> {
    let spec = pod.spec.as_ref()?;
    spec.node_name.as_deref().filter(|name| !name.is_empty())
}

fn is_ours(pod: &Pod) -> bool {
    let Some(spec) = &pod.spec else { return false };
    let gated = spec.scheduling_gates.as_ref().is_some_and(|gates| !gates.is_empty());
    spec.scheduler_name.as_deref().unwrap_or(NAME) == NAME
        && !gated
        && node_of(pod).is_none()
        && pod.metadata.deletion_timestamp.is_none()
}

async fn until(due: Option<Instant>) {
    match due {
        Some(due) => sleep_until(due).await,
        None => std::future::pending().await,
    }
}
