//! The counters behind /metrics. Labels have few values: resources, outcomes, this node's GPUs, and the pods that hold
//! some.

use std::sync::OnceLock;
use std::time::Duration;

use gantry_api::ResourceName;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

use super::holders::Holders;
use crate::handover::Listing;
use crate::health::XidCounts;
use crate::inventory::{Diagnoses, Inventory};
use gantry_config::source::Report;

/// How an Allocate related to grants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AllocationOutcome {
    /// The set granted to a pod.
    Granted,
    /// The set that the plugin preferred, for a pod without a grant.
    Unplanned,
    /// Another set, chosen by kubelet.
    Deviation,
}

/// The result of a GetPreferredAllocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PreferenceOutcome {
    /// The pod's grant.
    Granted,
    /// The best set outside all grants, for a pod without one.
    Unplanned,
    /// The best set outside all grants, because no known pod matched.
    Unknown,
    /// Devices of a live grant or a quarantine, because no others were left.
    Forced,
}

impl AllocationOutcome {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Granted => "granted",
            Self::Unplanned => "unplanned",
            Self::Deviation => "deviation",
        }
    }
}

impl PreferenceOutcome {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Granted => "granted",
            Self::Unplanned => "unplanned",
            Self::Unknown => "unknown",
            Self::Forced => "forced",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    resource: String,
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByResource {
    resource: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByState {
    resource: String,
    state: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByXid {
    gpu: String,
    xid: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByCause {
    gpu: String,
    cause: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByPeer {
    peer: &'static str,
}

/// All metrics of the plugin.
#[derive(Debug)]
pub struct Metrics {
    allocations: Family<Outcome, Counter>,
    preferences: Family<Outcome, Counter>,
    deviations: Counter,
    swaps: Counter,
    refused_grants: Counter,
    grant_wait: Histogram,
    quarantined: Gauge,
    devices: Family<ByState, Gauge>,
    registrations: Family<Outcome, Counter>,
    list_streams: Family<ByResource, Gauge>,
    reachable: Family<ByPeer, Gauge>,
    holders: Holders,
    /// Counted by the NVML thread.
    xids: OnceLock<XidCounts>,
    /// Published by the NVML thread.
    diagnoses: OnceLock<Diagnoses>,
    /// Reported by the configuration source.
    configurations: OnceLock<watch::Receiver<Report>>,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            allocations: Family::default(),
            preferences: Family::default(),
            deviations: Counter::default(),
            swaps: Counter::default(),
            refused_grants: Counter::default(),
            // From an immediate result to the longest wait of a second.
            grant_wait: Histogram::new([
                0.0001, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0,
            ]),
            quarantined: Gauge::default(),
            devices: Family::default(),
            registrations: Family::default(),
            list_streams: Family::default(),
            reachable: Family::default(),
            holders: Holders::default(),
            xids: OnceLock::new(),
            diagnoses: OnceLock::new(),
            configurations: OnceLock::new(),
        }
    }
}

impl Metrics {
    /// All metrics in the Prometheus text format.
    pub fn text(&self) -> Result<String, std::fmt::Error> {
        let mut registry = Registry::with_prefix("gantry_plugin");
        let Self {
            allocations,
            preferences,
            deviations,
            swaps,
            refused_grants,
            grant_wait,
            quarantined,
            devices,
            registrations,
            list_streams,
            reachable,
            holders,
            xids,
            diagnoses,
            configurations,
        } = self;
        registry.register(
            "allocations",
            "Allocate calls, by relation of the set to grants",
            allocations.clone(),
        );
        registry.register(
            "preferred_allocations",
            "GetPreferredAllocation calls, by result",
            preferences.clone(),
        );
        registry.register(
            "deviations",
            "Sets that kubelet chose instead of the granted one",
            deviations.clone(),
        );
        registry.register("swaps", "Pairs of pods found to hold each other's grant", swaps.clone());
        registry.register("refused_grants", "Invalid grant annotations", refused_grants.clone());
        registry.register(
            "grant_wait_seconds",
            "How long GetPreferredAllocation waited for a grant",
            grant_wait.clone(),
        );
        registry.register(
            "quarantined_devices",
            "Devices of deleted pods with possibly running processes",
            quarantined.clone(),
        );
        registry.register("devices", "Devices offered to kubelet, by health", devices.clone());
        registry.register("registrations", "Registrations with kubelet, by result", registrations.clone());
        registry.register(
            "list_streams",
            "ListAndWatch streams from which kubelet reads a resource's devices",
            list_streams.clone(),
        );
        registry.register("reachable", "1 if the peer responded to the last request", reachable.clone());
        registry.register(
            "allocated_devices",
            "Devices, replicas and MIG devices held by a container, by physical GPU",
            holders.family(),
        );
        let counted: Family<ByXid, Counter> = Family::default();
        for (gpu, xid, count) in xids.get().map(XidCounts::all).unwrap_or_default() {
            let labels = ByXid { gpu: gpu.to_string(), xid };
            counted.get_or_create(&labels).inc_by(count);
        }
        registry.register("xids", "Xids raised by the driver, including those without consequences", counted);
        let unhealthy: Family<ByCause, Gauge> = Family::default();
        let diagnosis = diagnoses.get().map(Diagnoses::now).unwrap_or_default();
        for trouble in &diagnosis.troubles {
            let labels = ByCause { gpu: trouble.gpu.to_string(), cause: trouble.cause.to_string() };
            unhealthy.get_or_create(&labels).set(1);
        }
        registry.register(
            "gpu_unhealthy",
            "1 for each cause that makes a GPU, or a MIG device of it, unhealthy now",
            unhealthy,
        );
        if let Some(reports) = configurations.get() {
            register_configurations(&mut registry, &reports.borrow());
        }
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry)?;
        Ok(text)
    }

    /// Counts a deviation.
    pub fn deviation(&self) {
        self.deviations.inc();
    }

    /// Counts an exchange of grants.
    pub fn swap(&self) {
        self.swaps.inc();
    }

    /// Counts an invalid grant.
    pub fn refused_grant(&self) {
        self.refused_grants.inc();
    }

    /// Sets how many devices are in quarantine.
    pub fn quarantined(&self, devices: usize) {
        self.quarantined.set(i64::try_from(devices).unwrap_or(i64::MAX));
    }

    pub(super) fn allocated(&self, resource: &ResourceName, outcome: AllocationOutcome) {
        self.allocations.get_or_create(&labels(resource, outcome.as_str())).inc();
    }

    pub(super) fn preferred(&self, resource: &ResourceName, outcome: PreferenceOutcome, waited: Duration) {
        self.preferences.get_or_create(&labels(resource, outcome.as_str())).inc();
        self.grant_wait.observe(waited.as_secs_f64());
    }

    pub(super) fn registration(&self, resource: &ResourceName, accepted: bool) {
        let outcome = if accepted { "accepted" } else { "failed" };
        self.registrations.get_or_create(&labels(resource, outcome)).inc();
    }

    pub(super) fn streams(&self, resource: &ResourceName, open: usize) {
        let labels = ByResource { resource: resource.to_string() };
        self.list_streams.get_or_create(&labels).set(i64::try_from(open).unwrap_or(i64::MAX));
    }

    pub(super) fn cluster(&self, reachable: bool) {
        self.peer("apiserver", reachable);
    }

    pub(super) fn pod_resources(&self, reachable: bool) {
        self.peer("pod-resources", reachable);
    }

    pub(super) fn labels(&self, written: bool) {
        self.peer("labels", written);
    }

    pub(super) fn xids(&self, counts: XidCounts) {
        if self.xids.set(counts).is_err() {
            tracing::debug!("the source of Xid counts was already set");
        }
    }

    pub(super) fn diagnoses(&self, diagnoses: Diagnoses) {
        if self.diagnoses.set(diagnoses).is_err() {
            tracing::debug!("the source of the diagnosis was already set");
        }
    }

    pub(super) fn configurations(&self, reports: watch::Receiver<Report>) {
        if self.configurations.set(reports).is_err() {
            tracing::debug!("the source of configuration reports was already set");
        }
    }

    pub(super) fn holders(&self, listing: Listing) {
        self.holders.listed(listing);
    }

    pub(super) fn devices(&self, inventory: &Inventory) {
        self.holders.inventory(inventory);
        self.devices.clear();
        for device in &inventory.devices {
            for (state, present) in
                [("healthy", device.health.healthy), ("unhealthy", !device.health.healthy)]
            {
                let labels = ByState { resource: device.resource.to_string(), state };
                self.devices.get_or_create(&labels).inc_by(i64::from(present));
            }
        }
    }

    fn peer(&self, peer: &'static str, reachable: bool) {
        self.reachable.get_or_create(&ByPeer { peer }).set(i64::from(reachable));
    }
}

fn register_configurations(registry: &mut Registry, report: &Report) {
    let counted = |count: u64| {
        let counter: Counter = Counter::default();
        counter.inc_by(count);
        counter
    };
    registry.register("config_loads", "Configurations applied, including the first", counted(report.loads));
    registry.register(
        "config_failures",
        "Configurations that were invalid or could not be read",
        counted(report.failures),
    );
    let refused: Gauge = Gauge::default();
    refused.set(i64::from(report.problem.is_some()));
    registry.register(
        "config_refused",
        "1 if the present configuration is invalid; the last valid one, if any, stays in effect",
        refused,
    );
}

fn labels(resource: &ResourceName, outcome: &'static str) -> Outcome {
    Outcome { resource: resource.to_string(), outcome }
}
