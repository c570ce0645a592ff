//! Resets: what becomes of a GPU that a rule resets. It is drained, a Job resets it, and the Job's result ends it or admits
//! another reset. [`follow`] and [`begin`] decide, and are pure; the leader carries out one step at a time and records it
//! first, so that the next leader continues.

use gantry_api::{Cordons, GpuNode, NodeName, Reason};
use gantry_config::RemediationAction;
use jiff::Timestamp;
use kube::Api;
use tokio::time::Instant;

use super::decide::Limit;
use super::health::{GpuHealth, NodeHealth};
use super::jobs::{Progress, Purpose, Result};
use super::record::{Entry, MAX_RESETS, Reset};
use super::{RETRY, Remediator, TIMEOUT, UNCORDONED, describe};
use crate::eviction;
use crate::gpu_reset::{self, Obstacle};

/// Seconds after which a Job that cannot be created counts as a failed reset.
const CREATION_LIMIT: i64 = 600;
/// Pause between two looks at the template of the Jobs.
const TEMPLATE_PAUSE: std::time::Duration = std::time::Duration::from_secs(30);

/// What becomes of a reset that was begun.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ResetFollowUp {
    /// Its Job is to be created.
    Create,
    /// Its Job was created, which is to be recorded.
    Created,
    Wait,
    /// It was not begun, and is not needed any more.
    Withdraw,
    /// Its Job is to be created once no other program marks the node.
    HoldBack,
    Ended(Result, String),
}

/// What becomes of a reset. A Job that runs is never interrupted. `is_wanted`: the rule and the cordon are there.
/// `is_marked`: another program marks the node.
pub(super) fn follow(
    reset: &Reset,
    job: Progress,
    (is_wanted, is_marked): (bool, bool),
    now: i64,
) -> ResetFollowUp {
    match (job, reset.created) {
        (Progress::Ended(result, text), _) => ResetFollowUp::Ended(result, text),
        (Progress::Runs, true) => ResetFollowUp::Wait,
        (Progress::Runs, false) => ResetFollowUp::Created,
        (Progress::Absent, true) => ResetFollowUp::Ended(Result::Deleted, "its Job was deleted".to_owned()),
        (Progress::Absent, false) if !is_wanted => ResetFollowUp::Withdraw,
        (Progress::Absent, false) if is_marked => ResetFollowUp::HoldBack,
        (Progress::Absent, false) if now.saturating_sub(reset.at) > CREATION_LIMIT => {
            ResetFollowUp::Ended(Result::NotCreated, "its Job could not be created".to_owned())
        }
        (Progress::Absent, false) => ResetFollowUp::Create,
    }
}

/// What is known of a GPU that is to be reset.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct DrainState {
    /// The rule and the cordon are there.
    pub(super) is_wanted: bool,
    /// A pod holds it.
    pub(super) is_held: bool,
    /// Resets of the GPU within a day.
    pub(super) resets: usize,
    /// The last one failed, and the next is not admitted yet.
    pub(super) is_pausing: bool,
    /// A GPU of the node is being reset: the plugin keeps NVML closed for one reset at a time.
    pub(super) is_node_busy: bool,
    /// GPUs that the driver resets together are not drained.
    pub(super) is_group_in_use: bool,
    /// Another program marks the node.
    pub(super) is_marked: bool,
}

/// What is to be done with a GPU that is to be reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ResetStart {
    Withdraw,
    Evict,
    GiveUp,
    Wait,
    /// The node is marked, or GPUs that are reset together are in use.
    HoldBack,
    Reset,
}

/// Whether a reset may begin.
pub(super) fn begin(seen: &DrainState) -> ResetStart {
    match seen {
        DrainState { is_wanted: false, .. } => ResetStart::Withdraw,
        DrainState { is_marked: true, .. } => ResetStart::HoldBack,
        DrainState { is_held: true, .. } => ResetStart::Evict,
        DrainState { resets: MAX_RESETS.., .. } => ResetStart::GiveUp,
        DrainState { is_pausing: true, .. } | DrainState { is_node_busy: true, .. } => ResetStart::Wait,
        DrainState { is_group_in_use: true, .. } => ResetStart::HoldBack,
        _ => ResetStart::Reset,
    }
}

impl Remediator {
    /// Whether the extender may create the Jobs that reset GPUs; `None` while that is not known. Asked only where a rule
    /// resets.
    pub(super) async fn may_reset(&mut self) -> Option<bool> {
        let rules = &self.remediation.file.rules().rules;
        if !rules.iter().any(|rule| rule.action == RemediationAction::Reset && !rule.dry_run) {
            return None;
        }
        if let Some((at, known)) = self.may_reset
            && at.elapsed() < TEMPLATE_PAUSE
        {
            return Some(known);
        }
        let Ok(Ok(found)) = tokio::time::timeout(TIMEOUT, self.jobs.template()).await else {
            return self.may_reset.map(|(_, known)| known);
        };
        self.may_reset = Some((Instant::now(), found.is_some()));
        Some(found.is_some())
    }

    /// Takes the next step with a GPU that a rule resets.
    pub(super) async fn reset(&mut self, name: &NodeName, node: &NodeHealth, entry: &Entry) {
        let done = tokio::time::timeout(TIMEOUT, self.advance(name, node, entry)).await;
        let text = match done {
            Ok(Ok(())) => return,
            Ok(Err(error)) => describe(&error),
            Err(_) => format!("the API server does not respond within {} s", TIMEOUT.as_secs()),
        };
        self.hold(name, entry, &format!("the reset goes on later: {text}")).await;
    }

    async fn advance(&mut self, name: &NodeName, node: &NodeHealth, entry: &Entry) -> kube::Result<()> {
        let Some(reset) = entry.reset_in_flight() else {
            return self.begin(name, node, entry).await;
        };
        let purpose = Purpose { node: name, gpu: &entry.gpu, rule: &entry.rule, at: reset.at };
        let job = self.jobs.progress(&purpose).await?;
        let is_wanted = self.drained_gpu(node, entry).is_some();
        let decided = (is_wanted, node.mark.is_some());
        match follow(reset, job, decided, Timestamp::now().as_second()) {
            ResetFollowUp::Wait => Ok(()),
            ResetFollowUp::Create => self.create_job(name, entry, &purpose).await,
            ResetFollowUp::Created => self.record_job(name, entry, &purpose).await,
            ResetFollowUp::Withdraw => self.withdraw_drain(name, entry).await,
            ResetFollowUp::HoldBack => {
                self.hold_for_mark(name, node, entry).await;
                Ok(())
            }
            ResetFollowUp::Ended(result, text) => self.end_reset(name, entry, (result, &text)).await,
        }
    }

    /// Drains the GPU, and begins a reset when nothing is in its way.
    async fn begin(&mut self, name: &NodeName, node: &NodeHealth, entry: &Entry) -> kube::Result<()> {
        let Some(gpu) = self.drained_gpu(node, entry) else {
            return self.withdraw_drain(name, entry).await;
        };
        let Some(found) = Api::<GpuNode>::all(self.client.clone()).get_opt(name.as_str()).await? else {
            return Ok(());
        };
        let now = Timestamp::now().as_second();
        let units = eviction::units(&found, &gpu.uuid);
        if units.is_empty() {
            // It has left the node, and the watch will bring that.
            return Ok(());
        }
        let known = self.store.read(|index| index.holder_groups(name.as_str(), &units));
        let reported = eviction::reported_holders(&found, &gpu.uuid);
        let record = self.records.get(name).unwrap_or(&node.record);
        let in_use = in_use(&found, gpu);
        let own = gpu_reset::obstacle(&found, &gpu.uuid);
        let seen = DrainState {
            is_wanted: true,
            is_held: !known.is_empty() || !reported.is_empty(),
            resets: record.resets(&gpu.uuid, now),
            is_pausing: entry.acted.as_ref().is_some_and(|acted| acted.reset.is_some())
                // The watch is ahead of the object, or behind it.
                || own == Some(Obstacle::NotCordoned),
            is_node_busy: record.iter().any(|other| other.reset_in_flight().is_some()),
            is_group_in_use: in_use.is_some(),
            is_marked: node.mark.is_some(),
        };
        match begin(&seen) {
            ResetStart::Withdraw | ResetStart::Wait => Ok(()),
            ResetStart::Evict => self.evict_holders(name, entry, (&known, &reported)).await,
            ResetStart::HoldBack if seen.is_marked => {
                self.hold_for_mark(name, node, entry).await;
                Ok(())
            }
            ResetStart::HoldBack => {
                self.hold(name, entry, &in_use.unwrap_or_default()).await;
                Ok(())
            }
            ResetStart::GiveUp => {
                let text = format!(
                    "not reset: rules have reset the GPU {} times within 24 h; it stays cordoned",
                    seen.resets
                );
                self.change(name, entry, Entry::end).await?;
                self.note(name, entry, Reason::RemediationResetFailed, &text).await;
                Ok(())
            }
            ResetStart::Reset => {
                let newest = gpu.problems.iter().map(|problem| problem.since).max();
                self.change(name, entry, |entry| entry.begin_reset(newest, now)).await?;
                self.note(name, entry, Reason::GpuDrained, "no pod holds it").await;
                let purpose = Purpose { node: name, gpu: &entry.gpu, rule: &entry.rule, at: now };
                self.create_job(name, entry, &purpose).await
            }
        }
    }

    /// The GPU, as long as the rule and the cordon are there.
    pub(super) fn drained_gpu<'n>(&self, node: &'n NodeHealth, entry: &Entry) -> Option<&'n GpuHealth> {
        let acted = entry.acted.as_ref()?;
        let rules = &self.remediation.file.rules().rules;
        let is_ruled =
            rules.iter().any(|rule| rule.name == entry.rule && rule.action == acted.action && !rule.dry_run);
        let is_new = Timestamp::now().as_second() - acted.at < UNCORDONED;
        let gpu = node.gpus.iter().find(|gpu| gpu.uuid == entry.gpu)?;
        (is_ruled && (gpu.cordoned || is_new)).then_some(gpu)
    }

    async fn create_job(
        &mut self,
        name: &NodeName,
        entry: &Entry,
        purpose: &Purpose<'_>,
    ) -> kube::Result<()> {
        let key = (name.clone(), entry.gpu.clone(), entry.rule.clone());
        if self.failed.contains_key(&key) {
            return Ok(());
        }
        let error = match self.jobs.create(purpose).await {
            Ok(true) => return self.record_job(name, entry, purpose).await,
            Ok(false) => Limit::ResetRight.to_string(),
            Err(error) => describe(&error),
        };
        self.failed.insert(key, Instant::now());
        self.count(&entry.rule, RemediationAction::Reset.as_str(), "failed");
        let text = format!(
            "the Job that resets it cannot be created, and is tried again after {} s: {error}",
            RETRY.as_secs()
        );
        self.note(name, entry, Reason::RemediationFailed, &text).await;
        Ok(())
    }

    async fn record_job(
        &mut self,
        name: &NodeName,
        entry: &Entry,
        purpose: &Purpose<'_>,
    ) -> kube::Result<()> {
        self.change(name, entry, |entry| entry.change_reset(|reset| reset.created = true)).await?;
        let text = format!("the Job {}/{} resets it", self.jobs.namespace(), purpose.name());
        self.note(name, entry, Reason::RemediationApplied, &text).await;
        Ok(())
    }

    async fn end_reset(
        &mut self,
        name: &NodeName,
        entry: &Entry,
        (result, text): (Result, &str),
    ) -> kube::Result<()> {
        let now = Timestamp::now().as_second();
        let is_healthy = result == Result::Healthy;
        let changed = self.change(name, entry, |entry| match is_healthy {
            true => entry.end(),
            false => entry.change_reset(|reset| reset.failed = Some(now)),
        });
        changed.await?;
        self.metrics.remediation_reset(&entry.rule, result.as_str());
        if !is_healthy {
            self.note(name, entry, Reason::RemediationResetFailed, text).await;
            return Ok(());
        }
        let object = Api::<GpuNode>::all(self.client.clone()).get_metadata_opt(name.as_str()).await?;
        let annotations = object.and_then(|object| object.metadata.annotations);
        let text = match Cordons::of(annotations.as_ref()).get(&entry.gpu) {
            Some(cordon) => format!("reset, and healthy; it stays {cordon}"),
            None => "reset, healthy and uncordoned".to_owned(),
        };
        self.note(name, entry, Reason::RemediationReset, &text).await;
        Ok(())
    }

    pub(super) async fn withdraw_drain(&mut self, name: &NodeName, entry: &Entry) -> kube::Result<()> {
        let text = format!("the {} ends: the rule, the cordon or the GPU is gone", action_of(entry).as_str());
        self.change(name, entry, Entry::end).await?;
        self.note(name, entry, Reason::RemediationWithdrawn, &text).await;
        Ok(())
    }
}

/// The action of an entry that acted.
pub(super) fn action_of(entry: &Entry) -> RemediationAction {
    entry.acted.as_ref().map_or(RemediationAction::Drain, |acted| acted.action)
}

/// The first other GPU that the driver resets together with this one and that is not drained, as a sentence.
fn in_use(node: &GpuNode, gpu: &GpuHealth) -> Option<String> {
    let name = node.metadata.name.as_deref().unwrap_or_default();
    let own = node.spec.machine.gpus().iter().find(|known| known.uuid.as_ref() == Some(&gpu.uuid))?;
    gpu_reset::group(&node.spec.machine, own.index).into_iter().find_map(|other| {
        let uuid = other.uuid.as_ref().filter(|uuid| **uuid != gpu.uuid)?;
        let obstacle = gpu_reset::obstacle(node, uuid)?;
        Some(format!(
            "the reset waits: GPU {} {obstacle}, and before Ampere the driver resets GPUs with NVLinks together; `gantry \
             drain gpu {name}/{}` first",
            other.index, other.index
        ))
    })
}

#[cfg(test)]
mod tests;
