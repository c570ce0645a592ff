//! Remediation: what rules do about faults of GPUs. `decide` is pure; this carries its steps out while the process leads,
//! each with an Event on the Node and a metric. What was done is recorded on the GpuNode, so that the next leader
//! continues from it.

mod decide;
mod health;
mod jobs;
mod record;
mod reset;
mod rules_file;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use gantry_api::{Cordon, Cordons, GpuNode, NodeName, ObjectMessage, Reason, names};
use gantry_config::RemediationAction;
use gantry_runtime::chain;
use gantry_runtime::events::{self, EventRecorder};
use gantry_topology::GpuUuid;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Taint};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::event;
use crate::eviction::{self, EvictionOutcome, Group};
use crate::gpu_node::{self, Changes};
use crate::index::{HolderGroup, Index, Store};
use crate::metrics::{Metrics, RemediationStep};
use decide::{Limit, Step, StepKind, drains};
use health::NodeHealth;
use jobs::ResetJobs;
use record::{Entry, Record};
use reset::action_of;

pub(crate) use health::ClusterHealth;
use rules_file::{RulesChange, RulesFile, RulesFileError};

/// Pause between two looks at the rules.
const TICK: Duration = Duration::from_secs(2);
/// Pause after an action that failed.
const RETRY: Duration = Duration::from_secs(30);
/// Time limit of one step, and of one look at a GPU that is drained.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Seconds after which a drain of a GPU without a cordon ends: the operator returned the GPU.
const UNCORDONED: i64 = 15;
/// Most reports that are remembered as made.
const MAX_REPORTED: usize = 4096;
/// Writes of a Node that may be refused because it changed meanwhile.
const ATTEMPTS: usize = 10;

/// The rules, and what they look at.
#[derive(Debug, Clone)]
pub(crate) struct Remediation {
    /// The rules.
    file: RulesFile,
    /// The health of all nodes.
    pub(crate) health: Arc<ClusterHealth>,
    /// Gantry's namespace, for the Jobs that reset GPUs.
    namespace: String,
}

impl Remediation {
    /// Reads the rules of a file. `namespace`: Gantry's own.
    pub(crate) fn read(file: &Path, namespace: &str) -> Result<Self, RulesFileError> {
        let namespace = namespace.to_owned();
        let read = Self { file: RulesFile::open(file)?, health: Arc::default(), namespace };
        read.report();
        Ok(read)
    }

    fn report(&self) {
        let rules = &self.file.rules().rules;
        let real = rules.iter().filter(|rule| !rule.dry_run).count();
        tracing::info!(rules = rules.len(), real, "rules of remediation are in effect");
    }
}

/// Carries out what the rules decide.
pub(crate) struct Remediator {
    client: Client,
    store: Arc<Store>,
    remediation: Remediation,
    metrics: Arc<Metrics>,
    recorder: EventRecorder,
    /// The records that this process has changed: newer than what the watch shows.
    records: BTreeMap<NodeName, Record>,
    /// Reports that are made once.
    reported: HashSet<String>,
    /// When actions failed.
    failed: HashMap<(NodeName, GpuUuid, String), Instant>,
    /// The Jobs that reset GPUs.
    jobs: ResetJobs,
    /// Whether they may be created, and when that was read.
    may_reset: Option<(Instant, bool)>,
}

impl Remediator {
    pub(crate) fn new(
        client: Client,
        store: Arc<Store>,
        remediation: Remediation,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self {
            recorder: event::recorder(client.clone()),
            jobs: ResetJobs::new(client.clone(), remediation.namespace.clone()),
            may_reset: None,
            client,
            store,
            remediation,
            metrics,
            records: BTreeMap::new(),
            reported: HashSet::new(),
            failed: HashMap::new(),
        }
    }

    /// Acts until `until`.
    pub(crate) async fn run(mut self, until: CancellationToken) {
        let work = async {
            loop {
                tokio::time::sleep(TICK).await;
                self.reread_rules();
                // Shares of a cluster that is not listed yet would be too small.
                if self.store.snapshot().synced {
                    self.act().await;
                }
            }
        };
        until.run_until_cancelled(work).await;
        // The next leader reads the file.
        self.metrics.remediation_rules_invalid(false);
    }

    /// Puts changed rules into effect.
    fn reread_rules(&mut self) {
        match self.remediation.file.reread() {
            RulesChange::Unchanged => {}
            RulesChange::Changed => {
                self.metrics.remediation_rules_invalid(false);
                self.remediation.report();
            }
            RulesChange::Failed(error) => {
                self.metrics.remediation_rules_invalid(true);
                tracing::error!(error = %chain(&error), "the rules of remediation before this change stay in effect");
            }
        }
    }

    async fn act(&mut self) {
        let mut nodes = self.remediation.health.all();
        self.records.retain(|name, _| nodes.contains_key(name));
        self.failed.retain(|_, at| at.elapsed() < RETRY);
        if self.reported.len() > MAX_REPORTED {
            self.reported.clear();
        }
        for (name, record) in &self.records {
            if let Some(node) = nodes.get_mut(name)
                && node.record != *record
            {
                Arc::make_mut(node).record = record.clone();
            }
        }
        for (name, mark) in self.store.read(Index::marks) {
            if let Some(node) = nodes.get_mut(&name) {
                Arc::make_mut(node).mark = Some(mark);
            }
        }
        let rules = Arc::clone(self.remediation.file.rules());
        let may_reset = self.may_reset().await;
        for step in decide::decide(&rules, &nodes, may_reset == Some(true), Timestamp::now().as_second()) {
            let is_unknown =
                may_reset.is_none() && matches!(step.what, StepKind::HoldBack(_, Limit::ResetRight));
            if let Some(node) = nodes.get(&step.node)
                && !is_unknown
            {
                self.take(&step, &node.record).await;
            }
        }
        for (name, node) in &nodes {
            let record = self.records.get(name).unwrap_or(&node.record).clone();
            let is_draining = |entry: &&Entry| {
                entry.acted.as_ref().is_some_and(|acted| acted.active && drains(acted.action))
            };
            for entry in record.iter().filter(is_draining) {
                match action_of(entry) {
                    RemediationAction::Reset => self.reset(name, node, entry).await,
                    _ => self.drain(name, node, entry).await,
                }
            }
        }
    }

    /// Carries out one step. `seen`: the record as it was decided by.
    async fn take(&mut self, step: &Step, seen: &Record) {
        let key = (step.node.clone(), step.gpu.clone(), step.rule.clone());
        if self.failed.contains_key(&key) {
            return;
        }
        let before = self.records.get(&step.node).unwrap_or(seen).clone();
        let mut record = before.clone();
        record.set(step.entry.clone());
        let done = tokio::time::timeout(TIMEOUT, self.carry_out(step, &before, &record)).await;
        let error = match done {
            Ok(Ok(())) => {
                if !matches!(step.what, StepKind::HoldBack(..)) {
                    self.records.insert(step.node.clone(), record);
                }
                return self.report(step).await;
            }
            // The node is gone, and with it what was to be done.
            Ok(Err(kube::Error::Api(status))) if status.code == 404 => return,
            Ok(Err(error)) => describe(&error),
            Err(_) => format!("the API server does not respond within {} s", TIMEOUT.as_secs()),
        };
        self.failed.insert(key, Instant::now());
        self.count(&step.rule, step.action(), "failed");
        let text = format!("{} failed and is tried again: {error}", step.action());
        tracing::warn!(node = %step.node, gpu = %step.gpu, rule = step.rule, "{text}");
        self.record(step, Reason::RemediationFailed, true, &text).await;
    }

    async fn carry_out(&self, step: &Step, before: &Record, record: &Record) -> kube::Result<()> {
        let is_last = |action| {
            let mut entries = record.iter().filter_map(|entry| entry.acted.as_ref());
            !entries.any(|acted| acted.active && acted.action == action)
        };
        match step.what {
            StepKind::HoldBack(..) | StepKind::DryRun(_) => return Ok(()),
            StepKind::Count
            | StepKind::ResetAgain
            | StepKind::Act(
                RemediationAction::Event
                | RemediationAction::Cordon
                | RemediationAction::Drain
                | RemediationAction::Reset,
            ) => {}
            StepKind::Act(RemediationAction::Taint) => self.set_taint(&step.node, Some(&step.rule)).await?,
            StepKind::Act(action) => self.set_condition(step, action, true).await?,
            StepKind::Withdraw(action) if !is_last(action) => {}
            StepKind::Withdraw(RemediationAction::Taint) => self.set_taint(&step.node, None).await?,
            StepKind::Withdraw(action) => self.set_condition(step, action, false).await?,
        }
        if record.written() == before.written() {
            return Ok(());
        }
        let cordons = matches!(step.what, StepKind::Act(action) if action == RemediationAction::Cordon || drains(action));
        let cordon = cordons.then(|| Cordon::of_rule(&step.rule, &step.fault, Timestamp::now()));
        self.write_record(&step.node, record, cordon.map(|cordon| (&step.gpu, cordon))).await
    }

    /// Writes the record of a node, and cordons a GPU that is not cordoned.
    async fn write_record(
        &self,
        node: &NodeName,
        record: &Record,
        cordon: Option<(&GpuUuid, Cordon)>,
    ) -> kube::Result<()> {
        let written = record.written();
        gpu_node::annotate(&self.client, node.as_str(), |known| {
            let mut changes = Changes::new();
            if known.get(names::REMEDIATION_ANNOTATION) != written.as_ref() {
                changes.insert(names::REMEDIATION_ANNOTATION.to_owned(), written.clone());
            }
            if let Some((gpu, cordon)) = &cordon
                && Cordons::of(Some(known)).get(gpu).is_none()
            {
                changes.insert(Cordon::annotation(gpu), Some(cordon.written()));
            }
            (changes, ())
        })
        .await
    }

    /// Taints a Node for a rule, or removes that taint.
    async fn set_taint(&self, node: &NodeName, rule: Option<&str>) -> kube::Result<()> {
        let api = Api::<Node>::all(self.client.clone());
        let mut attempts = 0;
        loop {
            let found = api.get(node.as_str()).await?;
            let before = found.spec.and_then(|spec| spec.taints).unwrap_or_default();
            let mut taints = before.clone();
            taints.retain(|taint| taint.key != names::REMEDIATION_TAINT);
            taints.extend(rule.map(|rule| Taint {
                key: names::REMEDIATION_TAINT.to_owned(),
                value: Some(rule.to_owned()),
                effect: "NoSchedule".to_owned(),
                time_added: None,
            }));
            if taints == before {
                return Ok(());
            }
            let patch = json!({
                "metadata": {"resourceVersion": found.metadata.resource_version},
                "spec": {"taints": taints},
            });
            attempts += 1;
            match api.patch(node.as_str(), &PatchParams::default(), &Patch::Merge(patch)).await {
                Ok(_) => return Ok(()),
                Err(kube::Error::Api(answer)) if answer.code == 409 && attempts < ATTEMPTS => {}
                Err(error) => return Err(error),
            }
        }
    }

    async fn set_condition(&self, step: &Step, action: RemediationAction, holds: bool) -> kube::Result<()> {
        let (reason, message) = match holds {
            true => (Reason::RemediationApplied, step.subject()),
            false => (Reason::RemediationWithdrawn, Reason::RemediationWithdrawn.text().to_owned()),
        };
        let now = Timestamp::now().to_string();
        let condition = json!({
            "type": condition_of(action),
            "status": if holds { "True" } else { "False" },
            "reason": reason,
            "message": ObjectMessage::new(message).to_string(),
            "lastHeartbeatTime": now,
            "lastTransitionTime": now,
        });
        let patch = Patch::Strategic(json!({"status": {"conditions": [condition]}}));
        let api = Api::<Node>::all(self.client.clone());
        api.patch_status(step.node.as_str(), &PatchParams::default(), &patch).await.map(drop)
    }

    /// Reports a step that is done.
    async fn report(&mut self, step: &Step) {
        match &step.what {
            StepKind::Count => {}
            StepKind::Act(RemediationAction::Event) => {
                self.count(&step.rule, RemediationAction::Event.as_str(), "done");
                self.record(step, Reason::RemediationMatched, true, "reported").await;
            }
            &StepKind::Act(action) => {
                self.count(&step.rule, action.as_str(), "done");
                self.record(step, Reason::RemediationApplied, true, &did(action)).await;
            }
            StepKind::DryRun(action) => {
                self.count(&step.rule, action.as_str(), "dry_run");
                let text = format!("dry run of {}: nothing is changed", action.as_str());
                self.record(step, Reason::RemediationMatched, true, &text).await;
            }
            StepKind::ResetAgain => {
                self.count(&step.rule, RemediationAction::Reset.as_str(), "done");
                self.record(step, Reason::RemediationApplied, true, "the GPU is reset again").await;
            }
            StepKind::HoldBack(action, limit) => {
                let once = format!("{} {} {} {} {}", step.node, step.gpu, step.rule, step.onset, limit.key());
                if self.reported.insert(once) {
                    self.count(&step.rule, action.as_str(), "held_back");
                    let text = format!("{} is held back: {limit}", action.as_str());
                    self.record(step, Reason::RemediationHeldBack, true, &text).await;
                }
            }
            StepKind::Withdraw(action) => {
                self.count(&step.rule, action.as_str(), "withdrawn");
                let text = format!("{} taken back: the fault is gone", action.as_str());
                self.record(step, Reason::RemediationWithdrawn, false, &text).await;
            }
        }
    }

    fn count(&self, rule: &str, action: &'static str, outcome: &'static str) {
        self.metrics.remediation_step(&RemediationStep { rule: rule.to_owned(), action, outcome });
    }

    /// Records an Event on the Node, and logs it.
    async fn record(&mut self, step: &Step, reason: Reason, warning: bool, text: &str) {
        let note = format!("{}: {text}", step.subject());
        tracing::info!(node = %step.node, %reason, "{note}");
        self.publish(&step.node, reason, warning, note).await;
    }

    /// Publishes an Event on a Node.
    async fn publish(&mut self, node: &NodeName, reason: Reason, warning: bool, note: String) {
        let about = events::cluster_object(("v1", "Node"), node.as_str(), node.as_str());
        self.recorder.record(about, event::message(reason, warning, note)).await;
    }

    /// Evicts what may be evicted now from a GPU that a rule drains.
    async fn drain(&mut self, name: &NodeName, node: &NodeHealth, entry: &Entry) {
        let drained = tokio::time::timeout(TIMEOUT, self.evict(name, node, entry)).await;
        let text = match drained {
            Ok(Ok(())) => return,
            Ok(Err(error)) => describe(&error),
            Err(_) => format!("the API server does not respond within {} s", TIMEOUT.as_secs()),
        };
        self.hold(name, entry, &format!("the drain goes on later: {text}")).await;
    }

    async fn evict(&mut self, name: &NodeName, node: &NodeHealth, entry: &Entry) -> kube::Result<()> {
        let Some(gpu) = self.drained_gpu(node, entry) else {
            return self.withdraw_drain(name, entry).await;
        };
        if node.mark.is_some() {
            self.hold_for_mark(name, node, entry).await;
            return Ok(());
        }
        let Some(found) = Api::<GpuNode>::all(self.client.clone()).get_opt(name.as_str()).await? else {
            return Ok(());
        };
        let reported = eviction::reported_holders(&found, &gpu.uuid);
        let units = eviction::units(&found, &gpu.uuid);
        if units.is_empty() {
            // It has left the node, and the watch will bring that.
            return Ok(());
        }
        let known = self.store.read(|index| index.holder_groups(name.as_str(), &units));
        if known.is_empty() && reported.is_empty() {
            self.change(name, entry, Entry::end).await?;
            self.note(name, entry, Reason::GpuDrained, "no pod holds it").await;
            return Ok(());
        }
        self.evict_holders(name, entry, (&known, &reported)).await
    }

    /// Evicts the pods that hold a GPU, as far as they may be evicted now.
    async fn evict_holders(
        &mut self,
        name: &NodeName,
        entry: &Entry,
        (known, reported): (&[HolderGroup], &BTreeSet<(String, String)>),
    ) -> kube::Result<()> {
        let groups = eviction::groups(&self.client, known, reported).await?;
        let budgets = eviction::budgets(&self.client, &groups).await?;
        for group in &groups {
            let refused = eviction::refused([group], false).err().map(|refusal| refusal.text);
            match refused.or_else(|| eviction::blocked(group, &budgets)) {
                Some(why) => self.hold(name, entry, &format!("{group} stays: {why}")).await,
                None => self.evict_group(name, entry, group).await?,
            }
        }
        Ok(())
    }

    async fn evict_group(&mut self, name: &NodeName, entry: &Entry, group: &Group) -> kube::Result<()> {
        for pod in group.pods.iter().filter(|pod| !pod.leaving) {
            match eviction::evict(&self.client, pod, false).await? {
                EvictionOutcome::Done => {
                    let about = event::pod(&pod.namespace, &pod.name, &pod.uid);
                    let text = format!("rule {} drains GPU {} of {name}", entry.rule, entry.gpu);
                    self.recorder.record(about, event::message(Reason::GpuDrained, true, text)).await;
                }
                EvictionOutcome::Gone => {}
                EvictionOutcome::Blocked(why) => self.hold(name, entry, &format!("{pod} stays: {why}")).await,
            }
        }
        Ok(())
    }

    /// Reports once why a drain or a reset does not go on.
    async fn hold(&mut self, name: &NodeName, entry: &Entry, text: &str) {
        if self.reported.insert(format!("{name} {} {} {text}", entry.gpu, entry.rule)) {
            self.count(&entry.rule, action_of(entry).as_str(), "held_back");
            self.note(name, entry, Reason::RemediationHeldBack, text).await;
        }
    }

    /// Reports that a drain or a reset waits until no other program marks the node.
    async fn hold_for_mark(&mut self, name: &NodeName, node: &NodeHealth, entry: &Entry) {
        if let Some(mark) = &node.mark {
            let text = format!("{} is held back: {mark}", action_of(entry).as_str());
            self.hold(name, entry, &text).await;
        }
    }

    /// Changes what is recorded of a rule and a GPU.
    async fn change(
        &mut self,
        name: &NodeName,
        entry: &Entry,
        change: impl FnOnce(&mut Entry),
    ) -> kube::Result<()> {
        let known = self.records.get(name).cloned();
        let watched = || self.remediation.health.all().get(name).map(|node| node.record.clone());
        let Some(mut record) = known.or_else(watched) else {
            return Ok(());
        };
        let mut changed = record.get(&entry.rule, &entry.gpu).unwrap_or(entry).clone();
        change(&mut changed);
        record.set(changed);
        self.write_record(name, &record, None).await?;
        self.records.insert(name.clone(), record);
        Ok(())
    }

    /// Records an Event on the Node about a drain or a reset.
    async fn note(&mut self, name: &NodeName, entry: &Entry, reason: Reason, text: &str) {
        let note = format!("rule {}: {}: {text}", entry.rule, entry.gpu);
        tracing::info!(node = %name, %reason, "{note}");
        let is_good = [Reason::GpuDrained, Reason::RemediationWithdrawn, Reason::RemediationReset];
        self.publish(name, reason, !is_good.contains(&reason), note).await;
    }
}

impl Step {
    /// Its action, for metrics and messages.
    fn action(&self) -> &'static str {
        match self.what {
            StepKind::Count => "count",
            StepKind::ResetAgain => RemediationAction::Reset.as_str(),
            StepKind::Act(action)
            | StepKind::DryRun(action)
            | StepKind::HoldBack(action, _)
            | StepKind::Withdraw(action) => action.as_str(),
        }
    }

    /// The rule, the fault and the GPU, for messages.
    fn subject(&self) -> String {
        let Self { rule, fault, index, gpu, .. } = self;
        match fault.is_empty() {
            true => format!("rule {rule}: GPU {index} ({gpu})"),
            false => format!("rule {rule}: {fault} on GPU {index} ({gpu})"),
        }
    }
}

/// An error as a text for Events, which are short.
fn describe(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => status.message.clone(),
        error => chain(error),
    }
}

/// The type of the condition that an action sets.
fn condition_of(action: RemediationAction) -> &'static str {
    match action {
        RemediationAction::Reboot => names::REBOOT_REQUESTED_CONDITION,
        _ => names::REMEDIATION_CONDITION,
    }
}

/// What an action did, as the end of a sentence.
fn did(action: RemediationAction) -> String {
    match action {
        RemediationAction::Event => "reported".to_owned(),
        RemediationAction::Cordon => "the GPU is cordoned".to_owned(),
        RemediationAction::Drain => "the GPU is cordoned, and its pods are evicted".to_owned(),
        RemediationAction::Reset => {
            "the GPU is cordoned, its pods are evicted, and it is reset then".to_owned()
        }
        RemediationAction::Taint => format!("the node is tainted with {}", names::REMEDIATION_TAINT),
        RemediationAction::Condition | RemediationAction::Reboot => {
            format!("the condition {} of the node is True", condition_of(action))
        }
    }
}
