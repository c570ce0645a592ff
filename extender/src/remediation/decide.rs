//! What the rules of remediation do now: a pure function of the rules, the health of all nodes and what was done before.
//!
//! 1. A rule is due for a GPU when as many faults that it matches began within its window as its rate states, one of them
//!    is still there, and the newest began after the rule's last action on the GPU. So every fault is acted on once.
//!    An Xid of an application is an event and leaves the GPU healthy. It is there as long as the window, at most an
//!    [`HOUR`], and a rule acts on the events of a GPU once in an hour.
//! 2. Rules act in the order of the file, nodes by name, GPUs by index. An action that a limit does not admit is held
//!    back, and is due until it is taken or the fault ends.
//! 3. Withheld are cordoned GPUs, whoever cordoned them, and all GPUs of a node that a rule has tainted or requested to
//!    reboot. A rule makes none more of them than the limits allow.
//! 4. What a rule set on a Node is taken back when none of its faults is left.
//! 5. On a node that another program marks, no rule does more than report: the action is held back until the mark is gone. A
//!    fault that begins and ends meanwhile counts for no rate, because that program may be its cause.
//! 6. A reset goes on until it has helped, or [`MAX_RESETS`] of the GPU were begun within a day; until then its rule acts on
//!    no further fault of the GPU. A reset after a failed one is an action that the limits must admit.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt;
use std::sync::Arc;

use gantry_api::NodeName;
use gantry_config::{RemediationAction, RemediationRule, RemediationRules};
use gantry_topology::GpuUuid;

use super::health::{GpuHealth, NodeHealth, Problem};
use super::record::{Entry, MAX_RESETS, Record, TakenAction};

/// Seconds for which an action counts as withholding its GPU before the watch shows it.
const SETTLES: i64 = 10;
/// Times of faults that are kept of a rule and a GPU.
const MAX_SEEN: usize = 16;
/// Most actions of one rule on one GPU within an hour.
const MAX_ACTIONS: usize = 16;
/// The time in which actions are limited.
const HOUR: i64 = 3600;
/// Seconds between a failed reset and the next.
const RESET_PAUSE: i64 = 300;

/// One thing to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) node: NodeName,
    pub(super) gpu: GpuUuid,
    /// Index of the GPU.
    pub(super) index: u8,
    /// Name of the rule.
    pub(super) rule: String,
    /// What the rule matches.
    pub(super) fault: String,
    /// When the newest fault began.
    pub(super) onset: i64,
    pub(super) what: StepKind,
    /// What is to be recorded once it is done.
    pub(super) entry: Entry,
}

/// What a step is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum StepKind {
    /// A fault is counted; the rate is not reached.
    Count,
    /// The action is taken.
    Act(RemediationAction),
    /// The GPU is to be reset again after a failed reset.
    ResetAgain,
    /// The action would be taken.
    DryRun(RemediationAction),
    /// A limit does not admit the action now.
    HoldBack(RemediationAction, Limit),
    /// What was set on the Node is taken back.
    Withdraw(RemediationAction),
}

/// A limit, with how much of it is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Limit {
    Nodes {
        used: usize,
        most: usize,
    },
    Gpus {
        used: usize,
        most: usize,
    },
    Actions {
        used: usize,
        most: usize,
    },
    /// The extender may not create the Jobs that reset GPUs.
    ResetRight,
    /// Another program marks the node: what it does.
    Marked(Arc<str>),
}

impl Limit {
    /// Which limit it is, whatever is used of it.
    pub(super) const fn key(&self) -> &'static str {
        match self {
            Self::Nodes { .. } => "nodes",
            Self::Gpus { .. } => "gpus",
            Self::Actions { .. } => "actions",
            Self::ResetRight => "right",
            Self::Marked(_) => "mark",
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nodes { used, most } => {
                write!(f, "limits.nodes: {used} of {most} nodes have withheld GPUs")
            }
            Self::Gpus { used, most } => write!(f, "limits.gpus: {used} of {most} GPUs are withheld"),
            Self::Actions { used, most } => {
                write!(f, "limits.actionsPerHour: {used} of {most} actions were taken")
            }
            Self::ResetRight => {
                f.write_str("the extender lacks the rights of remediation-reset.yaml; nothing was done")
            }
            Self::Marked(mark) => f.write_str(mark),
        }
    }
}

/// What is to be done, in this order. `may_reset`: whether the extender may create the Jobs that reset GPUs.
pub(super) fn decide(
    rules: &RemediationRules,
    nodes: &BTreeMap<NodeName, Arc<NodeHealth>>,
    may_reset: bool,
    now: i64,
) -> Vec<Step> {
    let mut use_now = LimitUse { may_reset, ..LimitUse::of(rules, nodes, now) };
    let mut steps = Vec::new();
    for rule in &rules.rules {
        for (name, node) in nodes {
            for gpu in &node.gpus {
                steps.extend(step(rule, (name, node), gpu, &mut use_now, now));
            }
        }
    }
    for (name, node) in nodes {
        steps.extend(node.record.iter().filter_map(|entry| withdrawal(rules, (name, node), entry, now)));
    }
    steps
}

/// Whether an action sets something on the Node that is taken back later.
fn marks_node(action: RemediationAction) -> bool {
    use RemediationAction::{Condition, Cordon, Drain, Event, Reboot, Reset, Taint};
    match action {
        Taint | Condition | Reboot => true,
        Event | Cordon | Drain | Reset => false,
    }
}

/// Whether an action goes on after it was taken: the GPU is drained.
pub(super) fn drains(action: RemediationAction) -> bool {
    matches!(action, RemediationAction::Drain | RemediationAction::Reset)
}

/// The beginning of a rule's window.
fn window_start(rule: &RemediationRule, now: i64) -> i64 {
    now.saturating_sub(i64::try_from(rule.window.as_secs()).unwrap_or(i64::MAX))
}

fn matching<'g>(rule: &RemediationRule, gpu: &'g GpuHealth, now: i64) -> Vec<&'g Problem> {
    let oldest_event = window_start(rule, now).max(now.saturating_sub(HOUR));
    let matches = |problem: &&Problem| {
        rule.causes.contains(&problem.cause) || problem.xid.is_some_and(|xid| rule.xids.contains(&xid))
    };
    let is_there = |problem: &&Problem| !problem.is_event || problem.since > oldest_event;
    gpu.problems.iter().filter(is_there).filter(matches).collect()
}

/// What a rule does about a GPU.
fn step(
    rule: &RemediationRule,
    (name, node): (&NodeName, &NodeHealth),
    gpu: &GpuHealth,
    use_now: &mut LimitUse,
    now: i64,
) -> Option<Step> {
    let known = node.record.get(&rule.name, &gpu.uuid);
    if let Some(entry) = known.filter(|entry| entry.is_resetting()) {
        return reset_again(rule, (name, node), gpu, entry, use_now, now);
    }
    let problems = matching(rule, gpu, now);
    let mut entry = known.cloned().unwrap_or_else(|| Entry::new(rule.name.clone(), gpu.uuid.clone()));
    let handled = entry.acted.as_ref().map(|acted| acted.onset);
    let handled = if rule.dry_run { handled.max(entry.dry_run.reported) } else { handled };
    let is_new = |problem: &&&Problem| {
        // A broken job raises the same Xid again and again.
        let pause = if problem.is_event { HOUR } else { 1 };
        handled.is_none_or(|handled| problem.since.saturating_sub(handled) >= pause)
    };
    let newest = problems.iter().filter(is_new).max_by_key(|problem| problem.since)?;
    let (fault, onset) = (newest.to_string(), newest.since);
    let since = window_start(rule, now);
    let before = if rule.dry_run { &entry.dry_run.seen } else { &entry.seen };
    let mut seen: BTreeSet<i64> = before.iter().copied().filter(|at| *at > since).collect();
    // A fault that lasts counts, however long ago it began.
    seen.extend(problems.iter().map(|problem| problem.since));
    while seen.len() > MAX_SEEN {
        seen.pop_first();
    }
    let seen: Vec<i64> = seen.into_iter().collect();
    let (is_due, is_known) = (seen.len() >= rule.count, *before == seen);
    entry.actions.retain(|at| now - at < HOUR);
    let mark = node.mark.as_ref().filter(|_| rule.action != RemediationAction::Event);
    let what = match (rule.action, mark) {
        (_, mark) if !is_due && (is_known || mark.is_some()) => return None,
        _ if !is_due => StepKind::Count,
        (action, Some(mark)) => StepKind::HoldBack(action, Limit::Marked(Arc::clone(mark))),
        (action, None) if rule.dry_run => StepKind::DryRun(action),
        (RemediationAction::Event, None) => StepKind::Act(RemediationAction::Event),
        (action, None) if entry.actions.len() >= MAX_ACTIONS => {
            StepKind::HoldBack(action, Limit::Actions { used: entry.actions.len(), most: MAX_ACTIONS })
        }
        (action, None) => match use_now.admit(name, node, gpu, action) {
            Ok(()) => {
                entry.actions.push(now);
                StepKind::Act(action)
            }
            Err(limit) => StepKind::HoldBack(action, limit),
        },
    };
    match &what {
        &StepKind::Act(action) => {
            let active = marks_node(action) || drains(action);
            entry.acted = Some(TakenAction { action, at: now, onset, active, reset: None });
        }
        StepKind::DryRun(_) => entry.dry_run.reported = Some(onset),
        StepKind::Count | StepKind::HoldBack(..) | StepKind::Withdraw(_) | StepKind::ResetAgain => {}
    }
    match rule.dry_run {
        true => entry.dry_run.seen = seen,
        false => entry.seen = seen,
    }
    Some(Step {
        node: name.clone(),
        gpu: gpu.uuid.clone(),
        index: gpu.index,
        rule: rule.name.clone(),
        fault,
        onset,
        what,
        entry,
    })
}

/// Admits another reset of a GPU after a failed one, once its pause is over.
fn reset_again(
    rule: &RemediationRule,
    (name, node): (&NodeName, &NodeHealth),
    gpu: &GpuHealth,
    entry: &Entry,
    use_now: &mut LimitUse,
    now: i64,
) -> Option<Step> {
    let acted = entry.acted.as_ref()?;
    let failed = acted.reset.as_ref()?.failed?;
    let is_due = now.saturating_sub(failed) >= RESET_PAUSE && node.record.resets(&gpu.uuid, now) < MAX_RESETS;
    let is_ruled = rule.action == RemediationAction::Reset && !rule.dry_run && gpu.cordoned;
    if !is_due || !is_ruled {
        return None;
    }
    let mut entry = entry.clone();
    entry.actions.retain(|at| now - at < HOUR);
    let what = match use_now.admit(name, node, gpu, RemediationAction::Reset) {
        Ok(()) => {
            entry.actions.push(now);
            entry.acted = Some(TakenAction { reset: None, ..acted.clone() });
            StepKind::ResetAgain
        }
        Err(limit) => StepKind::HoldBack(RemediationAction::Reset, limit),
    };
    Some(Step {
        node: name.clone(),
        gpu: gpu.uuid.clone(),
        index: gpu.index,
        rule: rule.name.clone(),
        fault: String::new(),
        onset: acted.onset,
        what,
        entry,
    })
}

/// What an entry has set on the Node and no fault holds any more.
fn withdrawal(
    rules: &RemediationRules,
    (name, node): (&NodeName, &NodeHealth),
    entry: &Entry,
    now: i64,
) -> Option<Step> {
    let acted = entry.acted.as_ref().filter(|acted| acted.active && marks_node(acted.action))?;
    let rule = rules.rules.iter().find(|rule| rule.name == entry.rule && !rule.dry_run);
    let gpu = node.gpus.iter().find(|gpu| gpu.uuid == entry.gpu);
    let lasts = rule.zip(gpu).is_some_and(|(rule, gpu)| !matching(rule, gpu, now).is_empty());
    if lasts {
        return None;
    }
    let ended = TakenAction { active: false, ..acted.clone() };
    Some(Step {
        node: name.clone(),
        gpu: entry.gpu.clone(),
        index: gpu.map_or(0, |gpu| gpu.index),
        rule: entry.rule.clone(),
        fault: String::new(),
        onset: acted.onset,
        what: StepKind::Withdraw(acted.action),
        entry: Entry { acted: Some(ended), ..entry.clone() },
    })
}

/// How much of the limits is used.
#[derive(Debug)]
struct LimitUse {
    most: [usize; 3],
    nodes: BTreeSet<NodeName>,
    gpus: HashSet<GpuUuid>,
    actions: usize,
    may_reset: bool,
}

impl LimitUse {
    fn of(rules: &RemediationRules, nodes: &BTreeMap<NodeName, Arc<NodeHealth>>, now: i64) -> Self {
        let gpus = nodes.values().map(|node| node.gpus.len()).sum();
        let with_gpus = nodes.values().filter(|node| !node.gpus.is_empty()).count();
        let limits = rules.limits;
        let mut used = Self {
            most: [limits.nodes.of(with_gpus), limits.gpus.of(gpus), limits.actions_per_hour as usize],
            nodes: BTreeSet::new(),
            gpus: HashSet::new(),
            actions: 0,
            may_reset: false,
        };
        for (name, node) in nodes {
            let withheld: HashSet<GpuUuid> = withheld(node, now).map(|gpu| gpu.uuid.clone()).collect();
            if !withheld.is_empty() {
                used.nodes.insert(name.clone());
            }
            used.gpus.extend(withheld);
            used.actions += actions_within_hour(&node.record, now);
        }
        used
    }

    /// Whether the limits admit an action. Then it is counted.
    fn admit(
        &mut self,
        name: &NodeName,
        node: &NodeHealth,
        gpu: &GpuHealth,
        action: RemediationAction,
    ) -> Result<(), Limit> {
        use RemediationAction::{Condition, Cordon, Drain, Event, Reboot, Reset, Taint};
        if let Some(mark) = &node.mark {
            return Err(Limit::Marked(Arc::clone(mark)));
        }
        if action == Reset && !self.may_reset {
            return Err(Limit::ResetRight);
        }
        let [most_nodes, most_gpus, most_actions] = self.most;
        if self.actions >= most_actions {
            return Err(Limit::Actions { used: self.actions, most: most_actions });
        }
        let all = match action {
            Taint | Reboot => node.gpus.as_slice(),
            Cordon | Drain | Reset => std::slice::from_ref(gpu),
            Event | Condition => &[],
        };
        let more: Vec<&GpuUuid> =
            all.iter().map(|gpu| &gpu.uuid).filter(|uuid| !self.gpus.contains(*uuid)).collect();
        if !more.is_empty() {
            let is_new = !self.nodes.contains(name);
            if is_new && self.nodes.len() >= most_nodes {
                return Err(Limit::Nodes { used: self.nodes.len(), most: most_nodes });
            }
            if self.gpus.len() + more.len() > most_gpus {
                return Err(Limit::Gpus { used: self.gpus.len(), most: most_gpus });
            }
        }
        self.actions += 1;
        self.gpus.extend(more.into_iter().cloned());
        if !all.is_empty() {
            self.nodes.insert(name.clone());
        }
        Ok(())
    }
}

/// The GPUs of a node that new pods do not get, by cordons and by what rules have set.
fn withheld(node: &NodeHealth, now: i64) -> impl Iterator<Item = &GpuHealth> {
    use RemediationAction::{Cordon, Drain, Reboot, Reset, Taint};
    let mut all = node.record.iter().filter_map(|entry| entry.acted.as_ref());
    let whole = all.any(|acted| acted.active && matches!(acted.action, Taint | Reboot));
    node.gpus.iter().filter(move |gpu| {
        let own = node.record.iter().filter(|entry| entry.gpu == gpu.uuid);
        let mut own = own.filter_map(|entry| entry.acted.as_ref());
        whole
            || gpu.cordoned
            || own.any(|acted| matches!(acted.action, Cordon | Drain | Reset) && now - acted.at < SETTLES)
    })
}

/// The actions of the last hour on a node.
fn actions_within_hour(record: &Record, now: i64) -> usize {
    record.iter().flat_map(|entry| &entry.actions).filter(|at| now - **at < HOUR).count()
}

#[cfg(test)]
mod tests;
