//! Metrics, liveness and readiness for operators. Counts and texts only; nothing here changes what the daemon does.

mod metrics;
mod unhealthy;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use gantry_api::{NodeName, Reason, ResourceName};
use gantry_config::Config;
use gantry_config::source::Report;
use gantry_runtime::http::{self, Endpoints};
use gantry_runtime::listen;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::handover::Listing;
use crate::health::XidCounts;
use crate::inventory::{Diagnoses, Inventory, State};
use crate::telemetry::Samples;

pub use metrics::{AllocationOutcome, Metrics, PreferenceOutcome};
pub use unhealthy::UnhealthyGpus;

pub(crate) use unhealthy::follow_health;

/// All counters and readiness, shared by the tasks.
#[derive(Debug, Default)]
pub struct Observations {
    metrics: Metrics,
    readiness: watch::Sender<Readiness>,
}

/// Conditions of readiness, and degradations.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Readiness {
    /// Why there is no device to serve; `None` if there are some.
    pub devices: Option<String>,
    /// Why NVML cannot be used; `None` while it works, and before it was loaded.
    pub nvml: Option<String>,
    /// Whether the driver is missing, which can appear for this process as well as for a new one.
    pub driverless: bool,
    /// Whether a restart of the process may help.
    pub dead: bool,
    /// Why containers could not use the devices; `None` if they can.
    pub cdi: Option<String>,
    /// What containers lack on this node.
    pub lacks: Vec<String>,
    /// What is wrong with GPUs that are allocated nevertheless.
    pub notices: Vec<String>,
    /// GPUs that are not allocated because of a fault. Conditions and Events of the Node name them.
    pub unhealthy: UnhealthyGpus,
    /// What is missing before resources can be registered with kubelet.
    pub kubelet: Option<String>,
    /// Why a resource is not registered, where that is known.
    pub registration_problems: BTreeMap<ResourceName, String>,
    /// Registration of each resource at kubelet.
    pub registered: BTreeMap<ResourceName, Registration>,
    /// Resources with a socket that another program replaced.
    pub contended_sockets: BTreeSet<ResourceName>,
    /// Whether grants are known; `None` without a cluster.
    pub cluster: Option<bool>,
    /// Why the API server refuses to list the pods of this node, if it responds.
    pub pods_refused: Option<String>,
    /// Whether PodResources can be read; `None` before the first read.
    pub pod_resources: Option<bool>,
    /// Why they cannot be read.
    pub pod_resources_problem: Option<String>,
    /// Whether the node labels are written; `None` if they are disabled, and before the first attempt.
    pub labels: Option<bool>,
    /// State of the configuration.
    pub config: Configuration,
}

/// Registration of a resource at kubelet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Registration {
    /// Kubelet has not accepted it, or the resource was withdrawn.
    Unregistered,
    /// Kubelet accepted it, and reads its device list or is about to.
    Accepted,
    /// Kubelet accepted it, but does not read its device list.
    Unread,
}

/// State of the configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Configuration {
    /// The present configuration is in effect.
    #[default]
    InEffect,
    /// The present configuration is invalid for this reason; the last valid one is in effect.
    Refused(Arc<str>),
    /// No configuration is in effect yet, for this reason, if one is known.
    Awaited(Option<Arc<str>>),
}

impl From<&Report> for Configuration {
    fn from(report: &Report) -> Self {
        match (&report.problem, report.loads) {
            (problem, 0) => Self::Awaited(problem.clone()),
            (Some(problem), _) => Self::Refused(Arc::clone(problem)),
            (None, _) => Self::InEffect,
        }
    }
}

impl Readiness {
    /// What the plugin lacks to be ready; empty if it is ready.
    pub fn missing(&self) -> Vec<String> {
        let mut missing = Vec::new();
        if let Configuration::Awaited(reason) = &self.config {
            missing.push(format!(
                "no configuration yet, nothing is served: {}",
                reason.as_deref().unwrap_or("waiting for the API server")
            ));
            return missing;
        }
        if let Some(reason) = &self.nvml {
            missing.push(reason.clone());
        } else if let Some(reason) = &self.devices {
            missing.push(format!("no devices: {reason}"));
        } else if let Some(problem) = &self.cdi {
            missing.push(problem.clone());
        } else if let Some(problem) = &self.kubelet {
            missing.push(problem.clone());
        } else if self.registered.is_empty() && self.registration_problems.is_empty() {
            missing.push("no resource is served yet".to_owned());
        }
        for (resource, registration) in &self.registered {
            match registration {
                Registration::Accepted => {}
                Registration::Unregistered => {
                    let why = self.registration_problems.get(resource);
                    let why = why.map(|why| format!(": {why}")).unwrap_or_default();
                    missing.push(format!("{resource} is not registered with kubelet{why}"));
                }
                Registration::Unread => missing
                    .push(format!("{resource} is registered, but kubelet does not read its device list")),
            }
        }
        missing
    }

    /// The reason and message of the condition Ready.
    pub fn summary(&self) -> (Reason, String) {
        let (missing, degraded) = (self.missing(), self.degraded());
        if let Some(problem) = &self.devices {
            (Reason::NoDevices, problem.clone())
        } else if !missing.is_empty() {
            (Reason::NotRegistered, missing.join("; "))
        } else if !degraded.is_empty() {
            (Reason::Degraded, degraded.join("; "))
        } else {
            (Reason::Serving, Reason::Serving.text().to_owned())
        }
    }

    /// Whether this process has nothing left to do: it is ready, or its node has nothing to serve for lack of a driver
    /// or an offered GPU. A rollout that waits for readiness instead would be blocked by one such node.
    pub fn is_settled(&self) -> bool {
        let in_effect = !matches!(self.config, Configuration::Awaited(_));
        let nothing = self.driverless || self.nvml.is_none() && self.devices.is_some();
        self.missing().is_empty() || in_effect && nothing
    }

    /// What is degraded while the plugin serves.
    pub fn degraded(&self) -> Vec<Cow<'static, str>> {
        let mut degraded: Vec<Cow<'static, str>> = Vec::new();
        if let Configuration::Refused(reason) = &self.config {
            degraded.push(
                format!("the configuration is invalid, the last valid one stays in effect: {reason}").into(),
            );
        }
        degraded.extend(self.lacks.iter().chain(&self.notices).map(|line| Cow::from(line.clone())));
        if !self.contended_sockets.is_empty() {
            let resources: Vec<&str> = self.contended_sockets.iter().map(ResourceName::as_str).collect();
            degraded.push(
                format!(
                    "another program has registered {} on this node after this one: kubelet uses the one that registered last",
                    resources.join(", ")
                )
                .into(),
            );
        }
        if self.cluster == Some(false) {
            let problem = match &self.pods_refused {
                Some(why) => format!("the pods of this node cannot be listed ({why})"),
                None => "the API server does not respond".to_owned(),
            };
            degraded.push(format!("{problem}: devices are chosen by topology only").into());
        }
        if self.pod_resources == Some(false) {
            let why = self.pod_resources_problem.as_ref().map(|why| format!(" ({why})")).unwrap_or_default();
            degraded.push(
                format!("kubelet's pod resources cannot be read{why}: holders are derived from grants and allocations only")
                    .into(),
            );
        }
        if self.labels == Some(false) {
            degraded.push("the node labels cannot be written: they may be outdated".into());
        }
        degraded
    }
}

impl Observations {
    /// Sets the Xid counts; called once before anything is served.
    pub fn count_xids(&self, counts: XidCounts) {
        self.metrics.xids(counts);
    }

    /// Sets the source of GPU problems; called once before anything is served.
    pub fn diagnoses(&self, diagnoses: Diagnoses) {
        self.metrics.diagnoses(diagnoses);
    }

    /// Sets the source of configuration reports; called once before anything is served.
    pub fn count_configurations(&self, reports: watch::Receiver<Report>) {
        self.metrics.configurations(reports);
    }

    /// Sets the configuration; called once before anything is served.
    pub fn configured_by(&self, config: watch::Receiver<Arc<Config>>) {
        self.metrics.config(config);
    }

    /// Sets the samples of the GPUs and the node's name; called once, before `/metrics/dcgm` is served.
    pub fn sampled_by(&self, samples: Samples, node: &NodeName) {
        self.metrics.sampled_by(samples, node);
    }

    /// Records the state of the configuration.
    pub fn config(&self, report: &Report) {
        self.change(|readiness| readiness.config = report.into());
    }

    /// Readiness as a watch channel.
    pub fn changes(&self) -> watch::Receiver<Readiness> {
        self.readiness.subscribe()
    }

    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// The current readiness.
    pub fn readiness(&self) -> Readiness {
        self.readiness.borrow().clone()
    }

    /// Whether the API server was tried and does not respond.
    pub fn is_cluster_lost(&self) -> bool {
        self.readiness.borrow().cluster == Some(false)
    }

    /// Waits until [`Observations::is_cluster_lost`].
    pub async fn cluster_lost(&self) {
        // It ends with its sender, which is in `self`.
        let _ = self.changes().wait_for(|now| now.cluster == Some(false)).await;
    }

    /// Records that kubelet accepted a resource.
    pub fn registered(&self, resource: &ResourceName) {
        self.metrics.registration(resource, true);
        self.served(resource);
    }

    /// Records that a resource is served: kubelet accepted it, or no registration is wanted.
    pub fn served(&self, resource: &ResourceName) {
        self.change(|readiness| {
            let registration = readiness.registered.entry(resource.clone()).or_insert(Registration::Accepted);
            // It was accepted before: only the stream is missing.
            if *registration != Registration::Unread {
                *registration = Registration::Accepted;
            }
            readiness.registration_problems.remove(resource);
        });
    }

    /// Records that kubelet did not accept a resource, and why.
    pub fn registration_failed(&self, resource: &ResourceName, problem: String) {
        self.metrics.registration(resource, false);
        self.not_registered(resource, problem);
    }

    /// Records that a resource cannot be registered, and why.
    pub fn not_registered(&self, resource: &ResourceName, problem: String) {
        self.change(|readiness| {
            readiness.registered.insert(resource.clone(), Registration::Unregistered);
            readiness.registration_problems.insert(resource.clone(), problem);
        });
    }

    /// Records what is missing before resources can be registered with kubelet.
    pub fn kubelet(&self, missing: Option<String>) {
        self.change(|readiness| readiness.kubelet = missing);
    }

    /// Records what is wrong with GPUs that are allocated nevertheless.
    pub fn notices(&self, notices: Vec<String>) {
        self.change(|readiness| readiness.notices = notices);
    }

    /// Records the GPUs with unhealthy devices.
    pub fn unhealthy(&self, unhealthy: UnhealthyGpus) {
        self.change(|readiness| readiness.unhealthy = unhealthy);
    }

    /// Records that kubelet accepted a resource but does not read its device list.
    pub fn list_unread(&self, resource: &ResourceName) {
        self.set_registration(resource, Registration::Unread);
    }

    /// Records the number of open streams of a resource's device list.
    pub fn streams(&self, resource: &ResourceName, open: usize) {
        self.metrics.streams(resource, open);
        let unread = self.readiness.borrow().registered.get(resource) == Some(&Registration::Unread);
        if unread && open > 0 {
            self.set_registration(resource, Registration::Accepted);
            info!(%resource, "kubelet reads the device list again");
        }
    }

    /// Records the state of NVML: why it cannot be used, whether the driver is missing, and whether a restart of the
    /// process may help.
    pub fn nvml(&self, problem: Option<String>, driverless: bool, dead: bool) {
        self.change(|readiness| {
            readiness.nvml = problem;
            readiness.driverless = driverless;
            readiness.dead = dead;
        });
    }

    /// Records that a resource is not served any more.
    pub fn unregistered(&self, resource: &ResourceName) {
        self.set_registration(resource, Registration::Unregistered);
    }

    /// Records that another program replaced the socket of this resource.
    pub fn socket_contended(&self, resource: &ResourceName) {
        self.change(|readiness| {
            readiness.contended_sockets.insert(resource.clone());
        });
    }

    /// Records whether the API server responds.
    pub fn cluster(&self, reachable: bool) {
        self.metrics.cluster(reachable);
        self.change(|readiness| {
            readiness.cluster = Some(reachable);
            readiness.pods_refused = None;
        });
    }

    /// Records that the API server responds, and refuses to list the pods of this node.
    pub fn pods_refused(&self, why: String) {
        self.metrics.cluster(false);
        self.change(|readiness| {
            readiness.cluster = Some(false);
            readiness.pods_refused = Some(why);
        });
    }

    /// Records how many admission policies are missing.
    pub fn missing_policies(&self, count: usize) {
        self.metrics.missing_policies(count);
    }

    /// Records whether the condition of the Node could be written.
    pub fn node_status(&self, written: bool) {
        self.metrics.node_status(written);
    }

    /// Records whether an Event could be written.
    pub fn events(&self, written: bool) {
        self.metrics.events(written);
    }

    /// Records whether PodResources responds, and why not.
    pub fn pod_resources(&self, problem: Option<String>) {
        self.metrics.pod_resources(problem.is_none());
        self.change(|readiness| {
            readiness.pod_resources = Some(problem.is_none());
            readiness.pod_resources_problem = problem;
        });
    }

    /// Records the holders by PodResources; empty if it cannot be read.
    pub fn holders(&self, listing: Listing) {
        self.metrics.holders(listing);
    }

    /// Records whether the node labels were written.
    pub fn labels(&self, written: bool) {
        self.metrics.labels(written);
        self.change(|readiness| readiness.labels = Some(written));
    }

    /// Records what containers lack on this node.
    pub fn lacks(&self, lacks: Vec<String>) {
        self.change(|readiness| readiness.lacks = lacks);
    }

    /// Records whether the CDI specification was written.
    pub fn cdi(&self, problem: Option<String>) {
        self.change(|readiness| readiness.cdi = problem);
    }

    /// Records a change of the inventory.
    pub fn inventory(&self, inventory: &Inventory) {
        self.metrics.devices(inventory);
        let missing = match &inventory.state {
            State::Starting => Some("looking for GPUs".to_owned()),
            State::Absent(reason) => Some(reason.to_string()),
            State::Ready if inventory.devices.is_empty() => Some(nothing_served(inventory)),
            State::Ready => None,
        };
        self.change(|readiness| readiness.devices = missing);
    }

    /// Records that a GetPreferredAllocation returned after `waited`.
    pub fn preferred(&self, resource: &ResourceName, outcome: PreferenceOutcome, waited: Duration) {
        self.metrics.preferred(resource, outcome, waited);
    }

    /// Records that an Allocate returned.
    pub fn allocated(&self, resource: &ResourceName, outcome: AllocationOutcome) {
        self.metrics.allocated(resource, outcome);
    }

    fn set_registration(&self, resource: &ResourceName, registration: Registration) {
        self.change(|readiness| {
            readiness.registered.insert(resource.clone(), registration);
        });
    }

    fn change(&self, change: impl FnOnce(&mut Readiness)) {
        self.readiness.send_if_modified(|readiness| {
            let before = readiness.clone();
            change(readiness);
            *readiness != before
        });
    }
}

/// Why an inventory without devices has none. The reason of each GPU is reported elsewhere.
fn nothing_served(inventory: &Inventory) -> String {
    let Some(first) = inventory.excluded.first() else {
        return "this node has no GPU".to_owned();
    };
    match inventory.machine.gpus().len() {
        1 => format!("the GPU of this node is not served: {}", first.reason),
        gpus => format!("none of the {gpus} GPUs is served: {}", first.reason),
    }
}

/// Pause between attempts to listen, for instance while an older process still has the port.
const RETRY: Duration = Duration::from_secs(1);

/// Serves on `address` until `shutdown`. An address that is in use is tried again: serving GPUs matters more than metrics.
pub async fn serve(address: SocketAddr, observed: Arc<Observations>, shutdown: CancellationToken) {
    let mut warned = false;
    let listener = loop {
        match listen::bind(address) {
            Ok(listener) => break listener,
            Err(error) if !warned => {
                warn!(%address, %error, "cannot serve metrics and probes, trying again");
                warned = true;
            }
            Err(_) => {}
        }
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(RETRY) => {}
        }
    };
    info!(address = %listener.local_addr().unwrap_or(address), "serving /metrics, /healthz, /readyz and /settledz");
    http::serve(listener, router(&observed), &shutdown).await;
}

fn router(observed: &Arc<Observations>) -> Router {
    let probe = |report: fn(&Readiness) -> Result<String, String>| {
        let observed = Arc::clone(observed);
        move || report(&observed.readiness())
    };
    let metrics = Arc::clone(observed);
    let endpoints = Endpoints::default()
        .probe("/healthz", probe(liveness))
        .probe("/readyz", probe(|readiness| report(readiness, readiness.missing().is_empty())))
        .probe("/settledz", probe(|readiness| report(readiness, readiness.is_settled())))
        .metrics(move || metrics.metrics().text());
    if !observed.metrics.is_sampled() {
        return endpoints.into_router();
    }
    let metrics = Arc::clone(observed);
    endpoints.prometheus_text("/metrics/dcgm", move || metrics.metrics().dcgm_text()).into_router()
}

/// The runtime has one thread, so a response proves that it is alive. The thread that owns NVML is what remains to check.
fn liveness(readiness: &Readiness) -> Result<String, String> {
    if !readiness.dead {
        return Ok("ok".to_owned());
    }
    let reason = readiness.nvml.as_deref().unwrap_or("NVML does not respond");
    Err(format!("a restart may help: {reason}"))
}

/// What is missing and what is degraded, one line each.
fn report(readiness: &Readiness, succeeds: bool) -> Result<String, String> {
    let missing = readiness.missing();
    let mut lines: Vec<String> = missing.iter().map(|line| format!("not ready: {line}")).collect();
    if missing.is_empty() {
        lines.push("ready".to_owned());
    }
    let degraded = readiness.degraded();
    // A reason that holds for all GPUs has a line of its own.
    let has_line = |reason: &str| {
        readiness.nvml.as_deref() == Some(reason) || degraded.iter().any(|line| line.as_ref() == reason)
    };
    let unhealthy = readiness.unhealthy.line(has_line).map(Cow::from);
    lines.extend(degraded.iter().chain(&unhealthy).map(|line| format!("degraded: {line}")));
    let text = lines.join("\n");
    if succeeds { Ok(text) } else { Err(text) }
}

#[cfg(test)]
mod tests;
