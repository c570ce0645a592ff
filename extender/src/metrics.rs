//! Metrics, in the OpenMetrics text form. Counters and histograms are kept as things happen; gauges are read from the index when
//! somebody asks.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::index::{Index, Totals};
use crate::ledger::FaultKind;

/// Upper bounds of the latency buckets, in seconds: fine where the promise of a millisecond is kept or broken.
const BUCKETS: [f64; 16] = [
    0.000_05, 0.000_1, 0.000_2, 0.000_35, 0.000_5, 0.000_75, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1,
    0.5, 2.0, 20.0,
];

/// A call of kube-scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Call {
    /// `filter`, `prioritize`, `bind`, or `other`.
    pub verb: &'static str,
    /// HTTP status.
    pub code: u16,
}

/// Something by its verb.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Verb {
    /// `filter`, `prioritize` or `bind`.
    pub verb: &'static str,
}

/// Something by how it went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Outcome {
    /// How it went.
    pub outcome: &'static str,
}

/// A decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Decision {
    /// `filter` or `prioritize`.
    pub verb: &'static str,
    /// Filter: `some`, `none`, `untouched`. Prioritize: `winner`, `none`.
    pub outcome: &'static str,
}

/// Devices by what keeps them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
struct State {
    state: &'static str,
}

/// An intent that cannot be followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Fault {
    fault: &'static str,
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
    /// Parked pods woken, by outcome.
    pub wakes: Family<Outcome, Counter>,
    /// Events published, by outcome.
    pub events: Family<Outcome, Counter>,
    devices: Family<State, Gauge>,
    nodes: Family<State, Gauge>,
    pods: Gauge,
    faults: Family<Fault, Gauge>,
    contact: Gauge<f64, AtomicU64>,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Everything at zero.
    pub fn new() -> Self {
        let mut registry = Registry::with_prefix("gantry_extender");
        let metrics = Self {
            calls: Family::default(),
            seconds: Family::new_with_constructor(|| Histogram::new(BUCKETS)),
            decisions: Family::default(),
            binds: Family::default(),
            wakes: Family::default(),
            events: Family::default(),
            devices: Family::default(),
            nodes: Family::default(),
            pods: Gauge::default(),
            faults: Family::default(),
            contact: Gauge::default(),
            registry: Registry::default(),
        };
        registry.register("requests", "Calls by verb and HTTP status", metrics.calls.clone());
        registry.register(
            "request_duration_seconds",
            "Time from a whole request to its answer",
            metrics.seconds.clone(),
        );
        registry.register(
            "decisions",
            "Filter and prioritize answers",
            metrics.decisions.clone(),
        );
        registry.register("binds", "Binds by outcome", metrics.binds.clone());
        registry.register(
            "wakes",
            "Parked pods woken after GPUs came free",
            metrics.wakes.clone(),
        );
        registry.register(
            "events",
            "Events published on waiting pods",
            metrics.events.clone(),
        );
        registry.register("devices", "Devices by what keeps them", metrics.devices.clone());
        registry.register("nodes", "Nodes by standing", metrics.nodes.clone());
        registry.register(
            "pods",
            "Pods that ask for managed resources",
            metrics.pods.clone(),
        );
        registry.register(
            "grant_faults_seen",
            "Grants that could not be followed since the start, by fault",
            metrics.faults.clone(),
        );
        registry.register(
            "api_contact_age_seconds",
            "Time since the API server last answered, -1 if never",
            metrics.contact.clone(),
        );
        Self { registry, ..metrics }
    }

    /// The page, with gauges read from `index` now.
    pub fn page(&self, index: &Index, contact: Option<Duration>) -> String {
        let (pods, totals) = index.totals();
        self.set_totals(pods, totals);
        for (kind, count) in index.faults() {
            let fault = match kind {
                FaultKind::Void => "void",
                FaultKind::UnknownDevices => "unknown_devices",
                FaultKind::Size => "size",
                FaultKind::Displaced => "displaced",
            };
            self.faults.get_or_create(&Fault { fault }).set(signed(*count));
        }
        self.contact.set(contact.map_or(-1.0, |age| age.as_secs_f64()));
        let mut page = String::new();
        // Writing into a String cannot fail.
        let _ = text::encode(&mut page, &self.registry);
        page
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
        set(&self.nodes, "ours", totals.nodes);
        set(&self.nodes, "foreign", totals.foreign);
        self.pods.set(signed(pods as u64));
    }
}

fn signed(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
