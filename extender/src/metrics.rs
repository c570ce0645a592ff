//! Metrics in the OpenMetrics text format. Counters and histograms are updated by events. Gauges and grant faults are
//! read from the index at each scrape. docs/metrics.md describes them.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use gantry_api::{GangPhase, GangStatus};
use gantry_topology::LinkClass;
use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::bind::Failure;
use crate::index::{GangTotals, GrantedSet, IdleTotals, Index, SET_SIZES, Totals};
use crate::ledger::FaultKind;
use crate::object_memory::{Largest, ObjectMemory};
use crate::tls::Expiry;

/// Upper bounds of the latency buckets, in seconds: fine around the goal of one millisecond.
const BUCKETS: [f64; 16] = [
    0.000_05, 0.000_1, 0.000_2, 0.000_35, 0.000_5, 0.000_75, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1,
    0.5, 2.0, 20.0,
];

/// Upper bounds of the buckets of plan times, in seconds: a plan of 1,000 members is to take less than 10 ms.
const PLANS: [f64; 12] = [0.000_1, 0.000_25, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0];
/// Upper bounds of the buckets of waiting times, in seconds: from a second to a day.
const WAITS: [f64; 14] =
    [1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 1800.0, 3600.0, 14_400.0, 43_200.0, 86_400.0];

/// Namespaces that have gauges of their own.
const NAMESPACES: usize = 10;
/// GPU models that have counters of their own.
const MODELS: usize = 16;
/// Longest time for which the state found by one scrape counts. What happened in a longer one is unknown.
const LONGEST_STEP: Duration = Duration::from_secs(300);

/// A call of kube-scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Call {
    /// `filter`, `prioritize`, `bind`, `preempt`, or `other`.
    pub verb: &'static str,
    /// HTTP status.
    pub code: u16,
}

/// Label of a verb.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Verb {
    /// `filter`, `prioritize`, `bind` or `preempt`.
    pub verb: &'static str,
}

/// Label of an outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Outcome {
    /// The outcome.
    pub outcome: &'static str,
}

/// A decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Decision {
    /// `filter`, `prioritize` or `preempt`.
    pub verb: &'static str,
    /// Filter and preempt: `some`, `none`, `ignored`. Prioritize: `winner`, `none`.
    pub outcome: &'static str,
}

/// A write to a pod for its gang.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Write {
    /// `ungate`, `evict` or `delete`.
    pub verb: &'static str,
    /// `done`, `obsolete`, `budget`, `forbidden` or `failed`.
    pub outcome: &'static str,
}

/// Label of a phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Phase {
    phase: &'static str,
}

/// Label of a reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Cause {
    reason: &'static str,
}

/// Label of what stands out of a slow member of a gang.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Sign {
    sign: &'static str,
}

/// A step of a rule of remediation.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RemediationStep {
    /// The name of the rule.
    pub rule: String,
    /// `event`, `cordon`, `drain`, `reset`, `taint`, `condition`, `reboot`, or `count` for a rate that is not reached.
    pub action: &'static str,
    /// `done`, `dry_run`, `held_back`, `withdrawn` or `failed`.
    pub outcome: &'static str,
}

/// A reset of a GPU by a rule of remediation.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RemediationReset {
    rule: String,
    /// `healthy`, `not_drained`, `refused`, `unhealthy`, `failed`, `deleted` or `not_created`.
    result: &'static str,
}

/// A question of `gantry explain`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ExplainRequest {
    /// HTTP status.
    pub code: u16,
}

/// The result of an attempt to drain a GPU for a MIG layout.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MigDrainOutcome {
    /// `evicted` or `held_back`.
    outcome: &'static str,
}

/// A request of the web page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct PageRequest {
    /// HTTP status.
    pub code: u16,
}

/// Label of a namespace.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Namespace {
    namespace: String,
}

/// Labels of idle GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct IdleLabels {
    cause: &'static str,
    namespace: String,
    model: String,
}

/// Labels of free sets of devices.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FreeSet {
    resource: String,
    devices: u32,
}

/// Labels of the largest gang that fits.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LargestGang {
    resource: String,
    level: String,
    devices: u32,
}

/// Names with series of their own; further ones are counted as `other`. Series of counters do not end, so it is those that come
/// first.
#[derive(Debug, Default)]
struct SeriesNames(BTreeSet<String>);

impl SeriesNames {
    fn name(&mut self, name: &str, most: usize) -> String {
        if name.is_empty() || self.0.contains(name) {
            return name.to_owned();
        }
        if self.0.len() >= most {
            return "other".to_owned();
        }
        self.0.insert(name.to_owned());
        name.to_owned()
    }
}

/// What a page goes on from.
#[derive(Debug, Default)]
struct LastPage {
    at: Option<Instant>,
    namespaces: SeriesNames,
    models: SeriesNames,
}

/// Label of a file of certificates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CertificateFile {
    file: &'static str,
}

/// Label of a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
struct State {
    state: &'static str,
}

/// Labels of granted sets of devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
struct GrantLabels {
    link: &'static str,
    preference: &'static str,
}

impl From<GrantedSet> for GrantLabels {
    fn from(set: GrantedSet) -> Self {
        let preference = match set.is_preferred {
            None => "none",
            Some(true) => "met",
            Some(false) => "unmet",
        };
        Self { link: set.link.map_or("single", LinkClass::as_str), preference }
    }
}

/// Label of a grant fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Fault {
    fault: &'static str,
}

/// The values of the gauges, copied from the index so that the index is not locked while the page is written.
#[derive(Debug)]
pub struct GaugeReading {
    pods: usize,
    totals: Totals,
    gangs: GangTotals,
    idle: IdleTotals,
    memory: Largest,
    memory_limit: usize,
    refused: u64,
    granted: BTreeMap<GrantedSet, u64>,
    /// In the order of [`FAULTS`].
    faults: [u64; FAULTS.len()],
}

impl GaugeReading {
    /// The values of `index` now, and of the memory of its objects.
    pub fn of(index: &Index, memory: &ObjectMemory) -> Self {
        let (pods, totals) = index.totals();
        let count = |(kind, _)| index.faults().get(&kind).copied().unwrap_or_default();
        let (memory_limit, refused) = memory.limit_and_refusals();
        Self {
            pods,
            totals,
            gangs: index.gang_totals(),
            idle: index.idle_totals(),
            memory: memory.largest(NAMESPACES),
            memory_limit,
            refused,
            granted: index.granted().clone(),
            faults: FAULTS.map(count),
        }
    }
}

/// All metrics of the extender.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// Calls by verb and status.
    pub calls: Family<Call, Counter>,
    /// Time from a whole request to its answer, by verb.
    pub seconds: Family<Verb, Histogram, fn() -> Histogram>,
    /// Decisions.
    pub decisions: Family<Decision, Counter>,
    /// Binds by outcome.
    pub binds: Family<Outcome, Counter>,
    /// Unschedulable pods activated, by outcome.
    pub activations: Family<Outcome, Counter>,
    /// Events published, by outcome.
    pub events: Family<Outcome, Counter>,
    /// Steps of gangs.
    pub gang_steps: Family<Outcome, Counter>,
    /// Decisions about gangs written, by outcome.
    pub commits: Family<Outcome, Counter>,
    /// Writes to pods for their gangs.
    pub gang_writes: Family<Write, Counter>,
    /// How long gangs waited until they were bound.
    pub gang_waits: Histogram,
    /// How long plans of gangs took.
    pub plans: Histogram,
    gangs: Family<Phase, Gauge>,
    waiting_gangs: Family<Cause, Gauge>,
    places: Gauge,
    place_devices: Gauge,
    spares: Family<State, Gauge>,
    idle_devices: Family<Namespace, Gauge>,
    slow_members: Family<Namespace, Gauge>,
    slow_member_signs: Family<Sign, Gauge>,
    kept_nodes: Gauge,
    idle_seconds: Family<IdleLabels, Counter<f64, AtomicU64>>,
    waiting_seconds: Family<Namespace, Counter<f64, AtomicU64>>,
    waiting_devices: Family<Namespace, Gauge>,
    free_sets: Family<FreeSet, Gauge>,
    largest_gangs: Family<LargestGang, Gauge>,
    awaiting_restart: Gauge,
    continuations: Family<Outcome, Counter>,
    leader: Gauge,
    missing_policies: Gauge,
    certificate_expiry: Family<CertificateFile, Gauge>,
    /// Changes of GpuNodes that were replaced by later ones before they were applied.
    pub coalesced_changes: Counter,
    devices: Family<State, Gauge>,
    nodes: Family<State, Gauge>,
    marked_nodes: Gauge,
    remediation_steps: Family<RemediationStep, Counter>,
    remediation_resets: Family<RemediationReset, Counter>,
    remediation_rules_invalid: Gauge,
    pods: Gauge,
    granted: Family<GrantLabels, Counter>,
    faults: Family<Fault, Counter>,
    object_bytes: Family<Namespace, Gauge>,
    refused_objects: Family<Namespace, Gauge>,
    object_limit: Gauge,
    refusals: Counter,
    /// Questions of `gantry explain`, by status.
    pub explain_requests: Family<ExplainRequest, Counter>,
    /// Requests of the webhook, by outcome.
    pub webhook_reviews: Family<Outcome, Counter>,
    /// Requests of the web page, by status.
    pub page_requests: Family<PageRequest, Counter>,
    /// Streams of the web page that are open.
    pub page_streams: Gauge,
    /// How long computations of the web page took.
    pub page_refreshes: Histogram,
    contact: Gauge<f64, AtomicU64>,
    mig_drains: Family<MigDrainOutcome, Counter>,
    last_page: Mutex<LastPage>,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// All metrics at zero.
    pub fn new() -> Self {
        let mut registry = Registry::with_prefix("gantry_extender");
        let metrics = Self {
            calls: Family::default(),
            seconds: Family::new_with_constructor(|| Histogram::new(BUCKETS)),
            decisions: Family::default(),
            binds: Family::default(),
            activations: Family::default(),
            events: Family::default(),
            gang_steps: Family::default(),
            commits: Family::default(),
            gang_writes: Family::default(),
            gang_waits: Histogram::new(WAITS),
            plans: Histogram::new(PLANS),
            gangs: Family::default(),
            waiting_gangs: Family::default(),
            places: Gauge::default(),
            place_devices: Gauge::default(),
            spares: Family::default(),
            idle_devices: Family::default(),
            slow_members: Family::default(),
            slow_member_signs: Family::default(),
            kept_nodes: Gauge::default(),
            idle_seconds: Family::default(),
            waiting_seconds: Family::default(),
            waiting_devices: Family::default(),
            free_sets: Family::default(),
            largest_gangs: Family::default(),
            awaiting_restart: Gauge::default(),
            continuations: Family::default(),
            leader: Gauge::default(),
            missing_policies: Gauge::default(),
            certificate_expiry: Family::default(),
            coalesced_changes: Counter::default(),
            devices: Family::default(),
            nodes: Family::default(),
            marked_nodes: Gauge::default(),
            remediation_steps: Family::default(),
            remediation_resets: Family::default(),
            remediation_rules_invalid: Gauge::default(),
            pods: Gauge::default(),
            granted: Family::default(),
            faults: Family::default(),
            object_bytes: Family::default(),
            refused_objects: Family::default(),
            object_limit: Gauge::default(),
            refusals: Counter::default(),
            explain_requests: Family::default(),
            webhook_reviews: Family::default(),
            page_requests: Family::default(),
            page_streams: Gauge::default(),
            page_refreshes: Histogram::new(PLANS),
            contact: Gauge::default(),
            mig_drains: Family::default(),
            last_page: Mutex::default(),
            registry: Registry::default(),
        };
        registry.register("requests", "Calls by verb and HTTP status", metrics.calls.clone());
        registry.register(
            "request_duration_seconds",
            "Time from a whole request to its answer",
            metrics.seconds.clone(),
        );
        registry.register("decisions", "Filter, prioritize and preempt answers", metrics.decisions.clone());
        registry.register("binds", "Binds by outcome", metrics.binds.clone());
        registry.register(
            "pod_activations",
            "Unschedulable pods activated after GPUs came free",
            metrics.activations.clone(),
        );
        registry.register("events", "Events published on waiting pods", metrics.events.clone());
        metrics.register_gangs(&mut registry);
        registry.register("devices", "Devices by state", metrics.devices.clone());
        registry.register(
            "idle_gpu_seconds",
            "Time in which GPUs were idle, by cause, namespace of the reservation and GPU model",
            metrics.idle_seconds.clone(),
        );
        registry.register(
            "waiting_device_seconds",
            "Devices that pods waited for, times the seconds of waiting",
            metrics.waiting_seconds.clone(),
        );
        registry.register("waiting_devices", "Devices that pods wait for", metrics.waiting_devices.clone());
        registry.register(
            "free_sets",
            "Disjoint sets of that many free devices, each on one node",
            metrics.free_sets.clone(),
        );
        registry.register(
            "largest_gang_members",
            "Members of that many devices of the largest gang that fits within a domain of a level",
            metrics.largest_gangs.clone(),
        );
        registry.register("nodes", "Nodes by state", metrics.nodes.clone());
        registry.register(
            "remediation_actions",
            "Actions of rules of remediation by outcome",
            metrics.remediation_steps.clone(),
        );
        registry.register(
            "remediation_resets",
            "Resets of GPUs by rules of remediation by result",
            metrics.remediation_resets.clone(),
        );
        registry.register(
            "remediation_rules_invalid",
            "1 while the file of remediation rules cannot be used, and the rules before its change are in effect",
            metrics.remediation_rules_invalid.clone(),
        );
        registry.register(
            "marked_nodes",
            "Nodes with a Gantry plugin whose GPUs are withheld by marks of other programs",
            metrics.marked_nodes.clone(),
        );
        registry.register("pods", "Pods that ask for managed resources", metrics.pods.clone());
        registry.register(
            "granted_sets",
            "Sets of devices granted to pods, by their links and by what the pods prefer",
            metrics.granted.clone(),
        );
        registry.register(
            "grant_faults",
            "Grants that could not be followed, by fault",
            metrics.faults.clone(),
        );
        registry.register(
            "api_last_response_age_seconds",
            "Time since the API server last answered, -1 if never",
            metrics.contact.clone(),
        );
        registry.register(
            "mig_drains",
            "Pods and gangs evicted for MIG layouts, and obstacles to it, by outcome",
            metrics.mig_drains.clone(),
        );
        registry.register(
            "missing_policies",
            "Admission policies that are missing or do not deny",
            metrics.missing_policies.clone(),
        );
        registry.register(
            "gpunode_changes_coalesced",
            "Changes of GpuNodes that came too fast and were replaced by later ones",
            metrics.coalesced_changes.clone(),
        );
        registry.register(
            "certificate_expiry_timestamp_seconds",
            "When the first certificate of a file expires",
            metrics.certificate_expiry.clone(),
        );
        // Not checked yet.
        metrics.missing_policies.set(-1);
        registry.register(
            "explain_requests",
            "Questions of gantry explain by HTTP status",
            metrics.explain_requests.clone(),
        );
        registry.register(
            "webhook_reviews",
            "Requests of the mutating admission webhook by outcome",
            metrics.webhook_reviews.clone(),
        );
        registry.register(
            "page_requests",
            "Requests of the web page by HTTP status",
            metrics.page_requests.clone(),
        );
        registry.register(
            "page_streams",
            "Streams of the web page that are open",
            metrics.page_streams.clone(),
        );
        registry.register(
            "page_refresh_seconds",
            "Time of one computation of the web page",
            metrics.page_refreshes.clone(),
        );
        metrics.register_memory(&mut registry);
        metrics.slow_members(&BTreeMap::new(), &BTreeMap::new());
        Self { registry, ..metrics }
    }

    fn register_memory(&self, registry: &mut Registry) {
        registry.register(
            "object_bytes",
            "Bytes kept of watched objects, by namespace: the largest ones, cluster, other",
            self.object_bytes.clone(),
        );
        registry.register(
            "refused_objects",
            "Objects that are not kept because of a limit, by namespace",
            self.refused_objects.clone(),
        );
        registry.register(
            "object_bytes_limit",
            "Most bytes kept of watched objects",
            self.object_limit.clone(),
        );
        registry.register("object_refusals", "Objects refused because of a limit", self.refusals.clone());
    }

    fn register_gangs(&self, registry: &mut Registry) {
        registry.register(
            "gang_steps",
            "Steps of gangs: reserved, bound, queued, backoff, preempting, degraded, invalid, finished",
            self.gang_steps.clone(),
        );
        registry.register("gang_commits", "Decisions about gangs written, by outcome", self.commits.clone());
        registry.register(
            "gang_pod_writes",
            "Writes to pods for their gangs, by verb and outcome",
            self.gang_writes.clone(),
        );
        registry.register(
            "gang_wait_seconds",
            "Time from a gang's first member to the binding of its minimum",
            self.gang_waits.clone(),
        );
        registry.register("gang_plan_seconds", "Time of one plan of a gang", self.plans.clone());
        registry.register("gangs", "Gangs by phase", self.gangs.clone());
        registry.register("waiting_gangs", "Gangs that wait, by reason", self.waiting_gangs.clone());
        registry.register(
            "gang_reservations",
            "Reservations of members of gangs that are not bound yet",
            self.places.clone(),
        );
        registry.register(
            "gang_spares",
            "Spare reservations of gangs by state: idle, lent",
            self.spares.clone(),
        );
        registry.register(
            "gang_reserved_devices",
            "Devices of those reservations, and of idle spare ones",
            self.place_devices.clone(),
        );
        registry.register(
            "idle_reserved_devices",
            "The same by namespace of the gang: the largest ones, other",
            self.idle_devices.clone(),
        );
        registry.register(
            "backfill_reserved_nodes",
            "Nodes in the backfill reservation of the first gang of the queue",
            self.kept_nodes.clone(),
        );
        registry.register(
            "gang_slow_members",
            "Members of gangs with GPUs that run slower than the rest, by namespace: the largest ones, other",
            self.slow_members.clone(),
        );
        registry.register(
            "gang_slow_member_signs",
            "The same by what stands out most: clock, throttle, power",
            self.slow_member_signs.clone(),
        );
        registry.register(
            "gangs_awaiting_restart",
            "Gangs with reservations that are kept while their owners create all members again",
            self.awaiting_restart.clone(),
        );
        registry.register(
            "gang_continuations",
            "Reservations kept over a restart of a gang, by how they ended",
            self.continuations.clone(),
        );
        registry.register("leader", "1 if this extender leads, 0 if it stands by", self.leader.clone());
    }

    /// Shows whether the file of remediation rules cannot be used.
    pub fn remediation_rules_invalid(&self, invalid: bool) {
        self.remediation_rules_invalid.set(invalid.into());
    }

    /// Counts a reset of a GPU by a rule of remediation.
    pub fn remediation_reset(&self, rule: &str, result: &'static str) {
        let reset = RemediationReset { rule: rule.to_owned(), result };
        self.remediation_resets.get_or_create(&reset).inc();
    }

    /// Counts a step of a rule of remediation.
    pub fn remediation_step(&self, step: &RemediationStep) {
        self.remediation_steps.get_or_create(step).inc();
    }

    /// Records the members of gangs that are named as slow, by namespace.
    pub fn slow_members(&self, members: &BTreeMap<Arc<str>, usize>, signs: &BTreeMap<&'static str, usize>) {
        set_namespaces(&self.slow_members, members);
        for sign in ["clock", "throttle", "power"] {
            let count = signs.get(sign).copied().unwrap_or_default();
            self.slow_member_signs.get_or_create(&Sign { sign }).set(signed(count as u64));
        }
    }

    /// Records how many admission policies are missing.
    pub fn missing_policies(&self, count: usize) {
        self.missing_policies.set(signed(count as u64));
    }

    /// Records when certificates expire.
    pub fn certificates(&self, expiries: &[Expiry]) {
        for Expiry { option, at } in expiries {
            self.certificate_expiry.get_or_create(&CertificateFile { file: option }).set(*at);
        }
    }

    /// Counts a bind.
    pub fn bind_ended(&self, result: &Result<(), Failure>) {
        let outcome = result.as_ref().map_or_else(|failure| failure.label(), |()| "bound");
        self.binds.get_or_create(&Outcome { outcome }).inc();
    }

    /// Counts a pod or gang that was evicted for a MIG layout, or an obstacle to that.
    pub fn mig_drain(&self, outcome: &'static str) {
        self.mig_drains.get_or_create(&MigDrainOutcome { outcome }).inc();
    }

    /// Counts a gang's change of phase.
    pub fn gang_moved(&self, before: Option<&GangStatus>, now: &GangStatus) {
        if before.is_some_and(|before| before.phase == now.phase) {
            return;
        }
        let first_bound = before.is_some_and(|before| before.phase < GangPhase::Bound);
        let outcome = match now.phase {
            GangPhase::Reserved => "reserved",
            GangPhase::Bound if first_bound => "bound",
            GangPhase::Queued => "queued",
            GangPhase::Backoff => "backoff",
            GangPhase::Preempting => "preempting",
            GangPhase::Degraded => "degraded",
            GangPhase::Invalid => "invalid",
            GangPhase::Finished => "finished",
            _ => return,
        };
        self.gang_steps.get_or_create(&Outcome { outcome }).inc();
        let since = before.and_then(|before| before.waiting_since.as_ref());
        if let ("bound", Some(since), Some(at)) = (outcome, since, &now.bound_at) {
            let waited = at.0.as_second().saturating_sub(since.0.as_second()).max(0);
            self.gang_waits.observe(waited as f64);
        }
    }

    /// The page, with gauges from `reading`.
    pub fn page_of(&self, reading: &GaugeReading, contact: Option<Duration>, leads: bool) -> String {
        self.page_at(Instant::now(), reading, contact, leads)
    }

    /// As [`Metrics::page_of`], at `now`.
    fn page_at(
        &self,
        now: Instant,
        reading: &GaugeReading,
        contact: Option<Duration>,
        leads: bool,
    ) -> String {
        // Serialised: each call sets the gauges and advances the counters.
        let mut last = self.last_page.lock().unwrap_or_else(PoisonError::into_inner);
        let passed = last.at.replace(now).map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        // A standby has no complete ledger.
        let passed = if leads { passed.min(LONGEST_STEP) } else { Duration::ZERO };
        self.set_idle(&reading.idle, passed, &mut last);
        self.set_totals(reading.pods, reading.totals);
        self.set_gangs(&reading.gangs);
        self.set_memory(reading);
        self.leader.set(i64::from(leads));
        for (&set, &count) in &reading.granted {
            let counter = self.granted.get_or_create(&set.into());
            counter.inc_by(count.saturating_sub(counter.get()));
        }
        for ((_, fault), count) in FAULTS.into_iter().zip(reading.faults) {
            let counter = self.faults.get_or_create(&Fault { fault });
            counter.inc_by(count.saturating_sub(counter.get()));
        }
        self.contact.set(contact.map_or(-1.0, |age| age.as_secs_f64()));
        let mut page = String::new();
        // Writing into a String cannot fail.
        let _ = text::encode(&mut page, &self.registry);
        page
    }

    fn set_gangs(&self, totals: &GangTotals) {
        for (phase, name) in PHASES {
            let count = totals.phases.get(&phase).copied().unwrap_or_default();
            let gauge = self.gangs.get_or_create(&Phase { phase: name });
            gauge.set(signed(count as u64));
        }
        // A reason without gangs has no series.
        self.waiting_gangs.clear();
        for (reason, count) in &totals.waiting {
            let labels = Cause { reason: reason.as_str() };
            self.waiting_gangs.get_or_create(&labels).set(signed(*count as u64));
        }
        self.places.set(signed(totals.places as u64));
        for (state, count) in ["idle", "lent"].into_iter().zip(totals.spares) {
            self.spares.get_or_create(&State { state }).set(signed(count as u64));
        }
        self.place_devices.set(signed(totals.devices as u64));
        self.kept_nodes.set(signed(totals.kept_nodes as u64));
        self.awaiting_restart.set(signed(totals.awaiting_restart as u64));
        let ended = &totals.continuations;
        for (outcome, count) in [
            ("kept", ended.kept),
            ("continued", ended.continued),
            ("expired", ended.expired),
            ("ended", ended.ended),
            ("lost", ended.lost),
            ("unsuitable", ended.unsuitable),
        ] {
            let counter = self.continuations.get_or_create(&Outcome { outcome });
            counter.inc_by(count.saturating_sub(counter.get()));
        }
        set_namespaces(&self.idle_devices, &totals.devices_of);
    }

    /// Advances the counters of time by `passed`, in which the totals count as unchanged, and sets the gauges.
    fn set_idle(&self, totals: &IdleTotals, passed: Duration, last: &mut LastPage) {
        for (key, gpus) in &totals.gpus {
            let labels = IdleLabels {
                cause: key.cause.as_str(),
                namespace: last.namespaces.name(&key.namespace, NAMESPACES),
                model: last.models.name(&key.model, MODELS),
            };
            self.idle_seconds.get_or_create(&labels).inc_by(gpus * passed.as_secs_f64());
        }
        self.waiting_devices.clear();
        for (namespace, devices) in &totals.waiting {
            let labels = Namespace { namespace: last.namespaces.name(namespace, NAMESPACES) };
            self.waiting_devices.get_or_create(&labels).inc_by(signed(*devices));
            self.waiting_seconds.get_or_create(&labels).inc_by(*devices as f64 * passed.as_secs_f64());
        }
        self.free_sets.clear();
        for (resource, sets) in &totals.free_sets {
            for (size, sets) in SET_SIZES.into_iter().zip(sets) {
                let labels = FreeSet { resource: resource.to_string(), devices: size as u32 };
                self.free_sets.get_or_create(&labels).set(signed(*sets as u64));
            }
        }
        self.largest_gangs.clear();
        for ((resource, level), members) in &totals.largest_gangs {
            for (size, members) in SET_SIZES.into_iter().zip(members) {
                let labels = LargestGang {
                    resource: resource.to_string(),
                    level: level.to_string(),
                    devices: size as u32,
                };
                self.largest_gangs.get_or_create(&labels).set(signed(*members as u64));
            }
        }
    }

    fn set_memory(&self, reading: &GaugeReading) {
        // A namespace that is no longer among the largest must not keep its old value.
        self.object_bytes.clear();
        self.refused_objects.clear();
        for (namespace, usage) in &reading.memory {
            let label = Namespace { namespace: namespace.clone() };
            self.object_bytes.get_or_create(&label).set(signed(usage.bytes as u64));
            self.refused_objects.get_or_create(&label).set(signed(usage.refused as u64));
        }
        self.object_limit.set(signed(reading.memory_limit as u64));
        self.refusals.inc_by(reading.refused.saturating_sub(self.refusals.get()));
    }

    fn set_totals(&self, pods: usize, totals: Totals) {
        let set = |family: &Family<State, Gauge>, state, count: usize| {
            family.get_or_create(&State { state }).set(signed(count as u64));
        };
        set(&self.devices, "free", totals.free);
        set(&self.devices, "held", totals.held);
        set(&self.devices, "reserved", totals.reserved);
        set(&self.devices, "leaving", totals.leaving);
        set(&self.devices, "unhealthy", totals.unhealthy);
        set(&self.nodes, "gantry", totals.nodes);
        self.marked_nodes.set(signed(totals.marked as u64));
        set(&self.nodes, "foreign", totals.foreign);
        self.pods.set(signed(pods as u64));
    }
}

/// Sets a gauge of the [`NAMESPACES`] largest namespaces, and of the others together.
fn set_namespaces<'c>(
    gauges: &Family<Namespace, Gauge>,
    counts: impl IntoIterator<Item = (&'c Arc<str>, &'c usize)>,
) {
    let mut counts: Vec<(&str, usize)> =
        counts.into_iter().map(|(namespace, count)| (&**namespace, *count)).collect();
    counts.sort_by_key(|(namespace, count)| (Reverse(*count), *namespace));
    let other = counts.split_off(NAMESPACES.min(counts.len()));
    counts.push(("other", other.iter().map(|(_, count)| count).sum()));
    gauges.clear();
    for (namespace, count) in counts {
        let label = Namespace { namespace: namespace.to_owned() };
        gauges.get_or_create(&label).set(signed(count as u64));
    }
}

/// Every phase with its label. A phase without gangs is exported as 0.
const PHASES: [(GangPhase, &str); 11] = [
    (GangPhase::Pending, "pending"),
    (GangPhase::Invalid, "invalid"),
    (GangPhase::Queued, "queued"),
    (GangPhase::Backoff, "backoff"),
    (GangPhase::Preempting, "preempting"),
    (GangPhase::Reserved, "reserved"),
    (GangPhase::Committing, "committing"),
    (GangPhase::Binding, "binding"),
    (GangPhase::Bound, "bound"),
    (GangPhase::Degraded, "degraded"),
    (GangPhase::Finished, "finished"),
];

/// Every fault with its label. A fault without occurrences is exported as 0.
const FAULTS: [(FaultKind, &str); 4] = [
    (FaultKind::Void, "void"),
    (FaultKind::UnknownDevices, "unknown_devices"),
    (FaultKind::Size, "size"),
    (FaultKind::Displaced, "displaced"),
];

fn signed(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
