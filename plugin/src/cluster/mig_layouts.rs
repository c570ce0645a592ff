//! Brings the node's GPUs to the MIG layout that a label of the node chooses, and reports the state in another label. The
//! file with the layouts and the labels are those of NVIDIA's mig-parted and MIG manager.
//!
//! A GPU that must change is closed first: its devices are unhealthy to kubelet. Once nothing holds it, the NVML thread
//! changes it. Where another label allows it, the GpuNode lists the closed GPUs that pods hold, and the extender's leader
//! drains them. All state is in the labels, the file and the hardware, so a new process goes on where an earlier one ended.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use gantry_api::{HolderState, MigDrain, ObjectMessage, Reason, names};
use gantry_config::{MigLayouts, NamedLayout};
use gantry_runtime::events::Message;
use gantry_runtime::{LogThrottle, chain};
use gantry_topology::GpuUuid;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Patch, PatchParams};
use kube::core::PartialObjectMeta;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::Cluster;
use super::events::NodeEventRecorder;
use crate::inventory::{LayoutOutcome, LayoutOutcomes, LayoutRequest};

/// Seconds after which a watch is renewed, well before [`super::READ_TIMEOUT`].
const RENEW: u32 = 30;
/// Longest file that is read.
const MAX_BYTES: u64 = 1 << 20;
/// Interval of comparisons while every GPU has its layout: the file may change, a reset ends MIG instances, and a client
/// may change them.
const CALM_INTERVAL: Duration = Duration::from_secs(30);
/// Interval while a GPU waits.
const WAIT_INTERVAL: Duration = Duration::from_secs(2);
/// How long a GPU must be closed before it is changed. An Allocate that kubelet decided on before is served, and listed
/// by kubelet, within that time.
const SETTLE_TIME: Duration = Duration::from_secs(5);
/// Pause before a GPU that waited for something other than pods is tried again: the attempt may destroy and restore its
/// instances.
const RETRY_INTERVAL: Duration = Duration::from_secs(10);
/// Longest wait for the NVML thread. A mode change takes some seconds for each GPU.
const NVML_TIMEOUT: Duration = Duration::from_secs(120);
/// Shortest interval of two Events about one layout.
const EVENT_INTERVAL: Duration = Duration::from_secs(30);
/// Pods, or GPUs with different texts, that an Event describes.
const MOST_DESCRIBED: usize = 3;

/// Most bytes of a label's value that a message quotes: as many as a label may have.
const MAX_QUOTED: usize = 63;

/// Applies layouts of `file` until `shutdown`. `drains` receives the GPUs that are to be drained.
pub(super) async fn follow(
    client: Client,
    cluster: Cluster,
    (file, drains): (PathBuf, watch::Sender<Option<MigDrain>>),
    shutdown: CancellationToken,
) {
    tokio::select! {
        () = shutdown.cancelled() => {}
        () = run(client, cluster, file, drains) => {}
    }
}

async fn run(client: Client, cluster: Cluster, file: PathBuf, drains: watch::Sender<Option<MigDrain>>) {
    let api = Api::<PartialObjectMeta<Node>>::all(client.clone());
    let config = watcher::Config::default().fields(&format!("metadata.name={}", cluster.node)).timeout(RENEW);
    let mut stream = watcher(api, config).default_backoff().boxed();
    let mut applier = LayoutApplier {
        nodes: Api::all(client.clone()),
        recorder: NodeEventRecorder::new(client, &cluster.node),
        cluster,
        file,
        drains,
        drain: DrainChoice::Off,
        chosen: None,
        state_label: None,
        closed: BTreeMap::new(),
        closed_for: String::new(),
        tried: None,
        refused: BTreeMap::new(),
        attempts: BTreeMap::new(),
        reported: None,
    };
    let mut failures = LogThrottle::default();
    let mut next: Option<Instant> = None;
    loop {
        tokio::select! {
            event = stream.next() => match event {
                Some(Ok(Event::InitApply(node) | Event::Apply(node))) => {
                    failures.reset();
                    let label = |name| node.labels().get(name).cloned();
                    applier.state_label = label(names::MIG_LAYOUT_STATE_LABEL);
                    let chosen = label(names::MIG_LAYOUT_LABEL).filter(|name| !name.is_empty());
                    let drain = DrainChoice::of(label(names::MIG_DRAIN_LABEL).as_deref());
                    // The node's metadata changes with every label; the choice seldom does.
                    if next.is_none() || applier.chosen != chosen || applier.drain != drain {
                        (applier.chosen, applier.drain) = (chosen, drain);
                        next = Some(Instant::now());
                    }
                }
                Some(Ok(Event::Init | Event::InitDone | Event::Delete(_))) => {}
                Some(Err(error)) => {
                    let error = chain(&error);
                    if failures.should_log(&error, Instant::now().into_std()) {
                        warn!(%error, "cannot watch the labels of this node; the MIG layout stays as it was chosen last");
                    }
                }
                None => return,
            },
            () = sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => {
                next = Some(Instant::now() + applier.round().await);
            }
        }
    }
}

/// The state of a layout, as the label names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LayoutState {
    /// Some GPUs wait.
    Pending,
    /// Every GPU has what it is to have.
    Success,
    /// Some GPU cannot get it, or there is no such layout.
    Failed,
}

impl LayoutState {
    /// The value of the label.
    const fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Success => "success",
            Self::Failed => "failed",
        }
    }

    const fn reason(self) -> Reason {
        match self {
            Self::Pending => Reason::MigLayoutWaits,
            Self::Success => Reason::MigLayoutApplied,
            Self::Failed => Reason::MigLayoutFailed,
        }
    }
}

/// Whether GPUs may be drained for a layout, by the node's label.
#[derive(Debug, Clone, PartialEq, Eq)]
enum DrainChoice {
    /// Pods end by themselves.
    Off,
    /// The extender evicts them.
    On,
    /// The label has another value. Nothing is drained.
    Invalid(String),
}

impl DrainChoice {
    fn of(label: Option<&str>) -> Self {
        match label {
            None | Some("" | "false") => Self::Off,
            Some("true") => Self::On,
            Some(value) => Self::Invalid(value.chars().take(MAX_QUOTED).collect()),
        }
    }

    /// What a message about waiting GPUs adds.
    fn note(&self) -> String {
        match self {
            Self::Off | Self::On => String::new(),
            Self::Invalid(value) => {
                format!(
                    "{} is {value:?}, allowed: \"true\", \"false\"; no pod is evicted; ",
                    names::MIG_DRAIN_LABEL
                )
            }
        }
    }
}

/// Names of the pods that hold a GPU, or a part of it.
type PodsByGpu = BTreeMap<GpuUuid, BTreeSet<String>>;

/// The result of a round.
struct Round {
    state: LayoutState,
    text: String,
    /// GPUs in each state.
    counts: [usize; 3],
}

impl Round {
    fn failed(text: String) -> Self {
        Self { state: LayoutState::Failed, text, counts: [0, 0, 0] }
    }
}

struct LayoutApplier {
    nodes: Api<Node>,
    recorder: NodeEventRecorder,
    cluster: Cluster,
    file: PathBuf,
    /// Publishes the GPUs that are to be drained.
    drains: watch::Sender<Option<MigDrain>>,
    /// Whether GPUs may be drained.
    drain: DrainChoice,
    /// The layout that the node's label names.
    chosen: Option<String>,
    /// The state that the node's label has.
    state_label: Option<String>,
    /// GPUs that pods cannot get, and since when.
    closed: BTreeMap<GpuUuid, Instant>,
    /// The name of the layout that they wait for.
    closed_for: String,
    /// The layout that was compared last.
    tried: Option<Arc<NamedLayout>>,
    /// GPUs for which the driver refused that layout. It is not tried again on them: its answer would be the same.
    refused: BTreeMap<GpuUuid, String>,
    /// GPUs that nothing holds and that could not be changed yet: when they were tried, and why.
    attempts: BTreeMap<GpuUuid, (Instant, String)>,
    /// What was reported last: the layout, its state, the text, and when.
    reported: Option<(String, LayoutState, String, Instant)>,
}

impl LayoutApplier {
    /// Compares the GPUs with their layout, changes those that are idle, and reports. Returns when to do so again.
    async fn round(&mut self) -> Duration {
        let Some(name) = self.chosen.clone() else {
            self.close(BTreeMap::new(), "");
            self.publish_drain(None);
            self.cluster.observed.metrics().mig_layout([0; 3]);
            if self.reported.take().is_some() {
                self.write_state(None).await;
            }
            return CALM_INTERVAL;
        };
        let Some(round) = self.apply(&name).await else {
            // Nothing is known of the GPUs: NVML does not answer.
            self.publish_drain(None);
            return WAIT_INTERVAL;
        };
        self.cluster.observed.metrics().mig_layout(round.counts);
        self.report(&name, &round).await;
        // A GPU may wait beside one that failed.
        if self.closed.is_empty() { CALM_INTERVAL } else { WAIT_INTERVAL }
    }

    /// `None` while NVML does not answer.
    async fn apply(&mut self, name: &str) -> Option<Round> {
        let layout = match self.layout(name).await {
            Ok(layout) => layout,
            Err(problem) => {
                self.close(BTreeMap::new(), name);
                self.publish_drain(None);
                return Some(Round::failed(problem));
            }
        };
        if self.tried.as_ref() != Some(&layout) {
            self.tried = Some(Arc::clone(&layout));
            self.refused.clear();
            self.attempts.clear();
        }
        let holders = self.holders();
        let idle = self.idle(holders.as_ref());
        let (reply, outcomes) = oneshot::channel();
        let request = LayoutRequest { layout: Arc::clone(&layout), idle, reply };
        self.cluster.diagnoses.request_layout(request);
        let outcomes = tokio::time::timeout(NVML_TIMEOUT, outcomes).await.ok()?.ok()?;
        Some(self.conclude(name, &layout, outcomes, holders.as_ref()))
    }

    async fn layout(&self, name: &str) -> Result<Arc<NamedLayout>, String> {
        let source = self.file.display();
        let found = tokio::fs::metadata(&self.file)
            .await
            .map_err(|error| format!("{source} cannot be read: {error}"))?;
        if found.len() > MAX_BYTES {
            return Err(format!("{source} has {} bytes; {MAX_BYTES} are read", found.len()));
        }
        let text = tokio::fs::read_to_string(&self.file).await;
        let text = text.map_err(|error| format!("{source} cannot be read: {error}"))?;
        let layouts =
            MigLayouts::read(&source.to_string(), &text).map_err(|problems| problems.to_string())?;
        layouts.get(name).cloned().map(Arc::new).map_err(|error| error.to_string())
    }

    /// The pods that hold each GPU or a part of it, or that were granted one. `None` while the pods are not known.
    fn holders(&self) -> Option<PodsByGpu> {
        let handover = &self.cluster.handover;
        if !handover.is_synced() || !handover.has_listing() {
            return None;
        }
        let inventory = Arc::clone(&self.cluster.inventory.borrow());
        let whereabouts = inventory.whereabouts();
        let mut pods = PodsByGpu::new();
        for holder in handover.status_snapshot().0 {
            let deleted = if holder.state == HolderState::Quarantined { " (deleted)" } else { "" };
            for device in &holder.devices {
                let index = whereabouts.get(device.unit());
                let gpu =
                    index.and_then(|index| inventory.machine.gpus().iter().find(|gpu| gpu.index == *index));
                if let Some(gpu) = gpu.and_then(|gpu| gpu.uuid.clone()) {
                    pods.entry(gpu)
                        .or_default()
                        .insert(format!("{}/{}{deleted}", holder.namespace, holder.pod));
                }
            }
        }
        Some(pods)
    }

    /// The closed GPUs that nothing holds.
    fn idle(&self, holders: Option<&PodsByGpu>) -> BTreeSet<GpuUuid> {
        let Some(holders) = holders else { return BTreeSet::new() };
        let closed = self.closed.iter();
        let is_paused = |gpu| self.attempts.get(gpu).is_some_and(|(at, _)| at.elapsed() < RETRY_INTERVAL);
        closed
            .filter(|(gpu, since)| since.elapsed() >= SETTLE_TIME && !holders.contains_key(*gpu))
            .map(|(gpu, _)| gpu)
            .filter(|gpu| !is_paused(*gpu))
            .cloned()
            .collect()
    }

    /// Closes the GPUs that still have to change, opens the others, and sums up.
    fn conclude(
        &mut self,
        name: &str,
        layout: &NamedLayout,
        outcomes: LayoutOutcomes,
        holders: Option<&PodsByGpu>,
    ) -> Round {
        let is_missing = |index: &u8| !outcomes.values().any(|(known, _)| known == index);
        let missing = layout.listed().into_iter().filter(is_missing);
        let missing = missing.map(|index| (index, "the node does not have it".to_owned()));
        let (mut done, mut waits, mut failed) = (0, GpuTexts::default(), GpuTexts(missing.collect()));
        let (mut closed, mut drained) = (BTreeMap::new(), BTreeSet::new());
        for (gpu, (index, outcome)) in outcomes {
            match outcome {
                LayoutOutcome::Unmentioned => continue,
                LayoutOutcome::InPlace { .. } => {
                    self.refused.remove(&gpu);
                    self.attempts.remove(&gpu);
                    done += 1;
                    continue;
                }
                LayoutOutcome::Impossible(text) => {
                    failed.0.insert(index, text);
                    continue;
                }
                LayoutOutcome::Refused(text) => {
                    warn!(gpu = index, layout = name, "the driver refused a MIG layout: {text}");
                    failed.0.insert(index, text.clone());
                    self.refused.insert(gpu, text);
                    continue;
                }
                LayoutOutcome::Differs if self.refused.contains_key(&gpu) => {
                    failed.0.insert(index, self.refused.get(&gpu).cloned().unwrap_or_default());
                    continue;
                }
                LayoutOutcome::Differs => {
                    let pods = holders.map(|holders| holders.get(&gpu));
                    let text = match (pods, self.attempts.get(&gpu)) {
                        (None, _) => "the pods of the node are not known yet".to_owned(),
                        (Some(Some(pods)), _) => {
                            let pods = first_of(pods.iter().map(String::as_str), ", ");
                            match self.drain {
                                DrainChoice::On => {
                                    drained.insert(gpu.to_string());
                                    format!("being drained; held by {pods}")
                                }
                                _ => format!("held by {pods}"),
                            }
                        }
                        (Some(None), Some((_, why))) => why.clone(),
                        (Some(None), None) => "about to be changed".to_owned(),
                    };
                    waits.0.insert(index, text);
                }
                LayoutOutcome::Waits(text) => {
                    waits.0.insert(index, text.clone());
                    self.attempts.insert(gpu.clone(), (Instant::now(), text));
                }
            }
            let since = self.closed.get(&gpu).copied().unwrap_or_else(Instant::now);
            closed.insert(gpu, since);
        }
        let counts = [done, waits.0.len(), failed.0.len()];
        let waiting = format!("{}{waits}", self.drain.note());
        let (state, text) = match (failed.0.is_empty(), waits.0.is_empty()) {
            (true, true) => (LayoutState::Success, format!("in place on {done} GPUs")),
            (true, false) => (LayoutState::Pending, waiting),
            (false, true) => (LayoutState::Failed, failed.to_string()),
            (false, false) => (LayoutState::Failed, format!("{failed}; {waiting}")),
        };
        self.close(closed, name);
        let gpus: Vec<String> = drained.into_iter().collect();
        self.publish_drain((!gpus.is_empty()).then(|| MigDrain { layout: name.to_owned(), gpus }));
        Round { state, text, counts }
    }

    /// Publishes the GPUs that are to be drained, where they changed.
    fn publish_drain(&self, drain: Option<MigDrain>) {
        self.drains.send_if_modified(|known| {
            let is_new = *known != drain;
            *known = drain;
            is_new
        });
    }

    /// Sets the closed GPUs.
    fn close(&mut self, closed: BTreeMap<GpuUuid, Instant>, name: &str) {
        if self.closed.keys().ne(closed.keys()) || self.closed_for != name {
            let reason = format!("waits for the MIG layout {name}");
            let gpus = closed.keys().map(|gpu| (gpu.clone(), reason.clone())).collect();
            self.cluster.diagnoses.close(gpus);
        }
        self.closed = closed;
        name.clone_into(&mut self.closed_for);
    }

    /// Writes the label and an Event, where they differ from what is there.
    async fn report(&mut self, name: &str, round: &Round) {
        let state = round.state;
        let text = ObjectMessage::new(format!("MIG layout {name}: {}", round.text)).to_string();
        let is_due = match &self.reported {
            None => true,
            Some((of, before, _, _)) if of != name || *before != state => true,
            Some((_, _, before, at)) => *before != text && at.elapsed() >= EVENT_INTERVAL,
        };
        if is_due {
            info!(layout = name, state = state.as_str(), "{text}");
            let warning = state == LayoutState::Failed;
            let note = ObjectMessage::new(&text);
            let message = Message { reason: state.reason(), action: "ApplyMigLayout", warning, note };
            // A node that has its layout since an earlier run is no news.
            let is_old = self.reported.is_none()
                && state == LayoutState::Success
                && self.state_label.as_deref() == Some(state.as_str());
            if is_old || self.recorder.record(message).await {
                self.reported = Some((name.to_owned(), state, text, Instant::now()));
            }
        }
        if self.state_label.as_deref() != Some(state.as_str()) {
            self.write_state(Some(state)).await;
        }
    }

    async fn write_state(&mut self, state: Option<LayoutState>) {
        let value = state.map(LayoutState::as_str);
        let patch = json!({"metadata": {"labels": {names::MIG_LAYOUT_STATE_LABEL: value}}});
        let name = self.cluster.node.as_str();
        match self.nodes.patch_metadata(name, &PatchParams::default(), &Patch::Merge(patch)).await {
            Ok(_) => self.state_label = value.map(str::to_owned),
            // Written in the next round.
            Err(error) => {
                warn!(error = %chain(&error), "cannot write the label {}", names::MIG_LAYOUT_STATE_LABEL);
            }
        }
    }
}

/// A text about each of some GPUs, by index.
#[derive(Default)]
struct GpuTexts(BTreeMap<u8, String>);

impl fmt::Display for GpuTexts {
    /// Such as `GPUs 0, 2: held by a/b; GPU 3: ...`: GPUs with equal texts together.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut groups: Vec<(&str, Vec<String>)> = Vec::new();
        for (index, text) in &self.0 {
            match groups.iter_mut().find(|(known, _)| known == text) {
                Some((_, gpus)) => gpus.push(index.to_string()),
                None => groups.push((text, vec![index.to_string()])),
            }
        }
        let groups: Vec<String> = groups
            .into_iter()
            .map(|(text, gpus)| {
                format!("GPU{} {}: {text}", if gpus.len() > 1 { "s" } else { "" }, gpus.join(", "))
            })
            .collect();
        f.write_str(&first_of(groups.iter().map(String::as_str), "; "))
    }
}

/// The first of these texts, and how many more there are.
fn first_of<'a>(texts: impl Iterator<Item = &'a str>, separator: &str) -> String {
    let all: Vec<&str> = texts.collect();
    let shown = all.iter().take(MOST_DESCRIBED).copied().collect::<Vec<_>>().join(separator);
    match all.len().saturating_sub(MOST_DESCRIBED) {
        0 => shown,
        more => format!("{shown}{separator}and {more} more"),
    }
}
