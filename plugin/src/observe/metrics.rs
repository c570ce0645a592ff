//! The counters behind /metrics. Labels have few values: resources, outcomes, this node's GPUs, and the pods that hold
//! some.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use gantry_api::{NodeName, ResourceName};
use gantry_config::Config;
use gantry_config::source::Report;
use gantry_topology::Machine;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

use crate::handover::{Holding, Listing};
use crate::health::{Table, XidCounts};
use crate::inventory::{Diagnoses, Inventory};
use crate::telemetry::{Labels, Samples, exposition};

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
struct ByLayoutState {
    state: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByXid {
    gpu: String,
    xid: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByUuid {
    gpu: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByCause {
    gpu: String,
    cause: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BySampledGpu {
    gpu: String,
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
    missing_policies: Gauge,
    mig_layouts: Family<ByLayoutState, Gauge>,
    holders: Holders,
    /// Counted by the NVML thread.
    xids: OnceLock<XidCounts>,
    /// Published by the NVML thread.
    diagnoses: OnceLock<Diagnoses>,
    /// Reported by the configuration source.
    configurations: OnceLock<watch::Receiver<Report>>,
    config: OnceLock<watch::Receiver<Arc<Config>>>,
    /// The samples of the GPUs, and the node's name.
    samples: OnceLock<(Samples, String)>,
}

impl Default for Metrics {
    fn default() -> Self {
        let missing_policies = Gauge::default();
        // Not checked yet.
        missing_policies.set(-1);
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
            missing_policies,
            mig_layouts: Family::default(),
            holders: Holders::default(),
            xids: OnceLock::new(),
            diagnoses: OnceLock::new(),
            configurations: OnceLock::new(),
            config: OnceLock::new(),
            samples: OnceLock::new(),
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
            missing_policies,
            mig_layouts,
            holders,
            xids,
            diagnoses,
            configurations,
            config,
            samples,
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
            "missing_policies",
            "Admission policies that are missing or do not deny",
            missing_policies.clone(),
        );
        registry.register(
            "mig_layout_gpus",
            "GPUs that a MIG layout mentions, by what became of it",
            mig_layouts.clone(),
        );
        let help = "Devices, replicas and MIG devices held by containers, by physical GPU";
        match config.get().is_some_and(|config| config.borrow().pod_metrics) {
            true => registry.register("allocated_devices", help, holders.by_container()),
            false => registry.register("allocated_devices", help, holders.by_gpu()),
        }
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
        let degraded: Family<ByCause, Gauge> = Family::default();
        for notice in &diagnosis.notices {
            let labels = ByCause { gpu: notice.gpu.to_string(), cause: notice.cause.to_string() };
            degraded.get_or_create(&labels).set(1);
        }
        registry.register(
            "gpu_degraded",
            "1 for each cause that degrades a GPU that is allocated nevertheless",
            degraded,
        );
        let cordoned: Family<ByUuid, Gauge> = Family::default();
        for gpu in diagnosis.cordoned.keys() {
            cordoned.get_or_create(&ByUuid { gpu: gpu.to_string() }).set(1);
        }
        registry.register("gpu_cordoned", "1 for each GPU that the operator cordoned", cordoned);
        if let Some(reports) = configurations.get() {
            register_configurations(&mut registry, &reports.borrow());
        }
        let ages: Family<BySampledGpu, Gauge<f64, AtomicU64>> = Family::default();
        for (gpu, age) in samples.get().map(|(samples, _)| samples.ages()).unwrap_or_default() {
            ages.get_or_create(&BySampledGpu { gpu: gpu.to_string() }).set(age.as_secs_f64());
        }
        registry.register("gpu_sample_age_seconds", "Age of the values of a GPU on /metrics/dcgm", ages);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry)?;
        Ok(text)
    }

    /// Whether `/metrics/dcgm` is served.
    pub(super) fn is_sampled(&self) -> bool {
        self.samples.get().is_some()
    }

    /// The samples of the GPUs in the Prometheus text format; pods are named if the configuration allows it.
    pub fn dcgm_text(&self) -> String {
        let Some((samples, host)) = self.samples.get() else {
            return String::new();
        };
        let known = self.holders.known();
        let names_pods = self.config.get().is_some_and(|config| config.borrow().pod_metrics);
        let labels = Labels { host, machine: &known.machine, holders: names_pods.then_some(&*known.listing) };
        let table = Table::built_in();
        let xids = self.xids.get().map(|counts| {
            let last = counts.last().into_iter();
            last.map(|(gpu, xid)| (gpu, (xid, table.describe(xid)))).collect()
        });
        exposition(&samples.now(), &labels, xids.as_ref())
    }

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

    pub(super) fn missing_policies(&self, count: usize) {
        self.missing_policies.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// Sets how many GPUs have their MIG layout, wait for it, and cannot get it.
    pub fn mig_layout(&self, [applied, waiting, failed]: [usize; 3]) {
        for (state, gpus) in [("applied", applied), ("waiting", waiting), ("failed", failed)] {
            let gpus = i64::try_from(gpus).unwrap_or(i64::MAX);
            self.mig_layouts.get_or_create(&ByLayoutState { state }).set(gpus);
        }
    }

    pub(super) fn node_status(&self, written: bool) {
        self.peer("node-status", written);
    }

    pub(super) fn events(&self, written: bool) {
        self.peer("events", written);
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

    pub(super) fn config(&self, config: watch::Receiver<Arc<Config>>) {
        if self.config.set(config).is_err() {
            tracing::debug!("the source of the configuration was already set");
        }
    }

    pub(super) fn sampled_by(&self, samples: Samples, node: &NodeName) {
        if self.samples.set((samples, node.to_string())).is_err() {
            tracing::debug!("the source of samples was already set");
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

/// The devices that containers hold, from PodResources: at most as many series as devices; series of a pod end with it.
#[derive(Debug, Default)]
struct Holders(Mutex<HolderFacts>);

#[derive(Debug, Clone)]
struct HolderFacts {
    listing: Arc<Listing>,
    machine: Arc<Machine>,
    /// UUID of the physical GPU of each GPU and MIG device, by its own UUID.
    gpus: Arc<BTreeMap<String, String>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByGpu {
    resource: String,
    gpu: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByContainer {
    resource: String,
    gpu: String,
    namespace: String,
    pod: String,
    container: String,
}

impl Default for HolderFacts {
    fn default() -> Self {
        Self { listing: Arc::default(), machine: Inventory::starting().machine, gpus: Arc::default() }
    }
}

impl HolderFacts {
    /// Calls `found` with the number of devices of each holding on each GPU.
    fn count(&self, mut found: impl FnMut(&Holding, &str, i64)) {
        for (holding, devices) in &self.listing.0 {
            let mut counts: BTreeMap<&str, i64> = BTreeMap::new();
            // By unit: pods from before a configuration change hold IDs that are not offered any more.
            for gpu in devices.iter().filter_map(|device| self.gpus.get(device.unit())) {
                *counts.entry(gpu).or_default() += 1;
            }
            counts.into_iter().for_each(|(gpu, count)| found(holding, gpu, count));
        }
    }
}

impl Holders {
    /// Sets the list of PodResources; empty if it cannot be read.
    fn listed(&self, listing: Listing) {
        self.lock().listing = Arc::new(listing);
    }

    /// Sets the node's devices.
    fn inventory(&self, inventory: &Inventory) {
        let gpu = |index| {
            let gpu = inventory.machine.gpus().iter().find(|gpu| gpu.index == index)?;
            Some(gpu.uuid.as_ref()?.to_string())
        };
        let places = inventory.whereabouts().into_iter();
        let gpus = places.filter_map(|(uuid, place)| Some((uuid.to_owned(), gpu(place)?))).collect();
        let mut known = self.lock();
        known.gpus = Arc::new(gpus);
        known.machine = Arc::clone(&inventory.machine);
    }

    /// Devices, replicas and MIG devices that containers hold, by GPU. Devices of other plugins are left out.
    fn by_gpu(&self) -> Family<ByGpu, Gauge> {
        let family: Family<ByGpu, Gauge> = Family::default();
        self.known().count(|holding, gpu, count| {
            let labels = ByGpu { resource: holding.resource.to_string(), gpu: gpu.to_owned() };
            family.get_or_create(&labels).inc_by(count);
        });
        family
    }

    /// The same by GPU and container.
    fn by_container(&self) -> Family<ByContainer, Gauge> {
        let family: Family<ByContainer, Gauge> = Family::default();
        self.known().count(|holding, gpu, count| {
            let labels = ByContainer {
                resource: holding.resource.to_string(),
                gpu: gpu.to_owned(),
                namespace: holding.namespace.clone(),
                pod: holding.pod.clone(),
                container: holding.container.clone(),
            };
            family.get_or_create(&labels).set(count);
        });
        family
    }

    /// Locked only to be copied: a scrape must not delay the responses to kubelet.
    fn known(&self) -> HolderFacts {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, HolderFacts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use gantry_config::{Config, ReplicatedDevices, ReplicatedResource, Selector, TimeSlicing};
    use gantry_topology::{Gpu, Machine, MachineParts, PathClass, PathMatrix};
    use tokio::sync::watch;

    use crate::handover::{Holding, Listing};
    use crate::inventory::{Hardware, Inventory};
    use crate::observe::Observations;
    use crate::offer::offer;

    #[test]
    fn replicas_are_counted_by_gpu_and_end_with_container() {
        let gpu = |index| Gpu {
            index,
            uuid: format!("GPU-{index}").parse().ok(),
            minor: Some(u32::from(index)),
            ..Gpu::default()
        };
        let parts = MachineParts {
            gpus: vec![gpu(0), gpu(1)],
            paths: PathMatrix::from_fn(2, |_, _| PathClass::Sys),
            ..MachineParts::default()
        };
        let hardware = Hardware::of(Arc::new(Machine::new(parts).unwrap()));
        let observed = Observations::default();
        observed.inventory(&shared(&hardware));
        let holding = |resource: &str| Holding {
            namespace: "ml".into(),
            pod: "notebook-0".into(),
            container: "main".into(),
            resource: resource.into(),
        };
        let ids = |ids: &[&str]| ids.iter().map(|id| (*id).into()).collect();
        observed.holders(Listing(
            [
                (holding("nvidia.com/gpu.shared"), ids(&["GPU-0::0", "GPU-0::1", "GPU-1::3"])),
                (holding("example.com/nic"), ids(&["eth1"])),
            ]
            .into(),
        ));
        let lines = |observed: &Observations| {
            let text = observed.metrics().text().unwrap();
            let lines = text.lines();
            let mut lines: Vec<String> = lines
                .filter_map(|line| line.strip_prefix("gantry_plugin_allocated_devices{"))
                .map(str::to_owned)
                .collect();
            lines.sort();
            lines
        };
        let labels = |gpu| format!(r#"resource="nvidia.com/gpu.shared",gpu="{gpu}""#);
        assert_eq!(
            lines(&observed),
            [format!("{}}} 2", labels("GPU-0")), format!("{}}} 1", labels("GPU-1"))],
            "no pod is named by default"
        );
        let (configure, config) = watch::channel(Arc::new(Config::default()));
        observed.configured_by(config);
        configure.send_replace(Arc::new(Config { pod_metrics: true, ..Config::default() }));
        let labels = |gpu| format!(r#"{},namespace="ml",pod="notebook-0",container="main""#, labels(gpu));
        assert_eq!(
            lines(&observed),
            [format!("{}}} 2", labels("GPU-0")), format!("{}}} 1", labels("GPU-1"))]
        );
        observed.inventory(&offer(&hardware, &Config::default()));
        assert_eq!(lines(&observed).len(), 2, "a container runs on when sharing ends");
        let denied = Config { deny: vec![Selector::Index(0)], ..Config::default() };
        observed.inventory(&offer(&hardware, &denied));
        assert_eq!(lines(&observed).len(), 2, "and when its GPU is offered no more");
        observed.holders(Listing::default());
        assert!(lines(&observed).is_empty(), "the pod is gone");
    }

    fn shared(hardware: &Hardware) -> Inventory {
        let replicated = ReplicatedResource {
            name: "nvidia.com/gpu".into(),
            rename: Some("nvidia.com/gpu.shared".into()),
            devices: ReplicatedDevices::All,
            replicas: 4,
        };
        let config = Config {
            time_slicing: Some(TimeSlicing {
                rename_by_default: false,
                fail_requests_greater_than_one: false,
                resources: vec![replicated],
            }),
            ..Config::default()
        };
        offer(hardware, &config)
    }
}
