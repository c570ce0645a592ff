//! What operators see: metrics, liveness, and a readiness that says what is missing. Only counts and words; nothing here
//! changes what the daemon does.

mod holders;
mod http;
mod metrics;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use gantry_api::ResourceName;
use tokio::sync::watch;
use tracing::info;

pub use http::serve;
pub use metrics::{AllocationOutcome, Metrics, PreferenceOutcome};

use crate::handover::Listing;
use crate::health::XidCounts;
use crate::inventory::{Diagnoses, Inventory, State};
use gantry_config::source::Report;

/// Counters and readiness in one place, shared by everything that runs.
#[derive(Debug, Default)]
pub struct Observed {
    metrics: Metrics,
    readiness: watch::Sender<Readiness>,
}

/// What must be so for the plugin to be ready, and what is worth saying besides.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Readiness {
    /// Why there is no device to serve; `None` if there are some.
    pub devices: Option<String>,
    /// Why NVML cannot be asked; `None` while it answers, and before it was loaded.
    pub nvml: Option<String>,
    /// Whether that is for the want of a driver, which comes to this process as to any other.
    pub driverless: bool,
    /// Whether a new process would be worth a try.
    pub dead: bool,
    /// Why containers could not be given the devices; `None` if they can.
    pub cdi: Option<String>,
    /// Whether CDI gives containers the driver's libraries; `None` before that was looked at.
    pub driver_files: Option<bool>,
    /// How the resources stand with kubelet.
    pub registered: BTreeMap<ResourceName, Registration>,
    /// Resources whose socket another program has replaced by its own.
    pub rivals: BTreeSet<ResourceName>,
    /// Whether grants are known; `None` where no cluster is to be asked.
    pub cluster: Option<bool>,
    /// Whether kubelet says who holds what; `None` before the first answer.
    pub pod_resources: Option<bool>,
    /// Whether the node's labels are written; `None` where they are not to be, and before the first attempt.
    pub labels: Option<bool>,
    /// How the configuration stands.
    pub config: Configuration,
}

/// How a resource stands with kubelet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Registration {
    /// Kubelet has not accepted it, or was told that it is no more.
    Unregistered,
    /// Kubelet has accepted it, and reads its device list or is about to.
    Accepted,
    /// Kubelet has accepted it, and does not read its device list.
    Unread,
}

/// How the configuration stands.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Configuration {
    /// What is there now is in effect.
    #[default]
    InEffect,
    /// What is there now is refused, for this reason; the last good one is in effect.
    Refused(Arc<str>),
    /// None is in effect yet, for this reason; without one nobody has answered.
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
    /// What keeps the plugin from being ready, in words; nothing if it is.
    pub fn missing(&self) -> Vec<String> {
        let mut missing = Vec::new();
        if let Configuration::Awaited(reason) = &self.config {
            missing.push(format!(
                "no configuration yet, nothing is served: {}",
                reason.as_deref().unwrap_or("the API server is asked for it")
            ));
            return missing;
        }
        if let Some(reason) = &self.nvml {
            missing.push(reason.clone());
        } else if let Some(reason) = &self.devices {
            missing.push(format!("no devices: {reason}"));
        } else if let Some(problem) = &self.cdi {
            missing.push(problem.clone());
        } else if self.registered.is_empty() {
            missing.push("no resource is served yet".to_owned());
        }
        for (resource, registration) in &self.registered {
            match registration {
                Registration::Accepted => {}
                Registration::Unregistered => {
                    missing.push(format!("{resource} is not registered with kubelet"));
                }
                Registration::Unread => missing.push(format!(
                    "{resource} is registered, but kubelet does not read its device list"
                )),
            }
        }
        missing
    }

    /// Whether all is done that this process can do: it is ready, or its node has nothing to serve, for want of a driver or of a GPU that
    /// may be served. Where a rollout waits for readiness instead, one such node keeps all others at the old version.
    pub fn is_settled(&self) -> bool {
        let in_effect = !matches!(self.config, Configuration::Awaited(_));
        let nothing = self.driverless || self.nvml.is_none() && self.devices.is_some();
        self.missing().is_empty() || in_effect && nothing
    }

    /// What is degraded though the plugin serves.
    pub fn degraded(&self) -> Vec<Cow<'static, str>> {
        let mut degraded: Vec<Cow<'static, str>> = Vec::new();
        if let Configuration::Refused(reason) = &self.config {
            degraded.push(
                format!("the configuration is wrong, the last good one stays in effect: {reason}").into(),
            );
        }
        if self.driver_files == Some(false) {
            degraded.push(
                "no driver library is found under the container driver root: CDI gives containers device nodes only".into(),
            );
        }
        if !self.rivals.is_empty() {
            let resources: Vec<&str> = self.rivals.iter().map(ResourceName::as_str).collect();
            degraded.push(
                format!(
                    "another program has served {} on this node since this one began: kubelet asks the one that registered last",
                    resources.join(", ")
                )
                .into(),
            );
        }
        if self.cluster == Some(false) {
            degraded.push("the API server does not answer: pods get devices by topology alone".into());
        }
        if self.pod_resources == Some(false) {
            degraded.push(
                "kubelet's pod resources cannot be read: holders are known from grants and allocations alone"
                    .into(),
            );
        }
        if self.labels == Some(false) {
            degraded.push("the node's labels cannot be written: they may be out of date".into());
        }
        degraded
    }
}

impl Observed {
    /// Where Xids are counted; to be told once, before anything is served.
    pub fn count_xids(&self, counts: XidCounts) {
        self.metrics.xids(counts);
    }

    /// Where it is known what is wrong with the GPUs; to be told once, before anything is served.
    pub fn diagnoses(&self, diagnoses: Diagnoses) {
        self.metrics.diagnoses(diagnoses);
    }

    /// Where it is told how the configuration stands; to be told once, before anything is served.
    pub fn count_configurations(&self, reports: watch::Receiver<Report>) {
        self.metrics.configurations(reports);
    }

    /// How the configuration stands.
    pub fn config(&self, report: &Report) {
        self.change(|readiness| readiness.config = report.into());
    }

    /// Tells when readiness changes.
    pub fn changes(&self) -> watch::Receiver<Readiness> {
        self.readiness.subscribe()
    }

    /// The counters.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// What is missing now.
    pub fn readiness(&self) -> Readiness {
        self.readiness.borrow().clone()
    }

    /// Whether the API server was tried and does not answer.
    pub fn is_cluster_lost(&self) -> bool {
        self.readiness.borrow().cluster == Some(false)
    }

    /// Waits until [`Observed::is_cluster_lost`].
    pub async fn cluster_lost(&self) {
        // It ends with its sender, which is here.
        let _ = self.changes().wait_for(|now| now.cluster == Some(false)).await;
    }

    /// Kubelet has accepted a resource.
    pub fn registered(&self, resource: &ResourceName) {
        self.metrics.registration(resource, true);
        self.change(|readiness| {
            let standing = readiness
                .registered
                .entry(resource.clone())
                .or_insert(Registration::Accepted);
            // It was accepted before: what lacks is the stream.
            if *standing != Registration::Unread {
                *standing = Registration::Accepted;
            }
        });
    }

    /// Kubelet has not accepted a resource.
    pub fn registration_failed(&self, resource: &ResourceName) {
        self.metrics.registration(resource, false);
        self.stands(resource, Registration::Unregistered);
    }

    /// Kubelet has accepted a resource, and does not read its device list.
    pub fn unread(&self, resource: &ResourceName) {
        self.stands(resource, Registration::Unread);
    }

    /// So many streams of a resource's device list are open.
    pub fn streams(&self, resource: &ResourceName, open: usize) {
        self.metrics.streams(resource, open);
        let unread = self.readiness.borrow().registered.get(resource) == Some(&Registration::Unread);
        if unread && open > 0 {
            self.stands(resource, Registration::Accepted);
            info!(%resource, "kubelet reads the device list again");
        }
    }

    /// How NVML stands: why it cannot be asked, whether that is for want of a driver, and whether it has gone on for so long that a new
    /// process is worth a try.
    pub fn nvml(&self, problem: Option<String>, driverless: bool, dead: bool) {
        self.change(|readiness| {
            readiness.nvml = problem;
            readiness.driverless = driverless;
            readiness.dead = dead;
        });
    }

    /// A resource is served no longer.
    pub fn unregistered(&self, resource: &ResourceName) {
        self.stands(resource, Registration::Unregistered);
    }

    /// Another program has put its socket in the place of this resource's.
    pub fn rival(&self, resource: &ResourceName) {
        self.change(|readiness| {
            readiness.rivals.insert(resource.clone());
        });
    }

    /// The API server answers, or not.
    pub fn cluster(&self, reachable: bool) {
        self.metrics.cluster(reachable);
        self.change(|readiness| readiness.cluster = Some(reachable));
    }

    /// Kubelet's pod resources answer, or not.
    pub fn pod_resources(&self, reachable: bool) {
        self.metrics.pod_resources(reachable);
        self.change(|readiness| readiness.pod_resources = Some(reachable));
    }

    /// Who holds what, by kubelet's account; nothing if it gives none.
    pub fn holders(&self, listing: Listing) {
        self.metrics.holders(listing);
    }

    /// The node's labels are written, or cannot be.
    pub fn labels(&self, written: bool) {
        self.metrics.labels(written);
        self.change(|readiness| readiness.labels = Some(written));
    }

    /// The driver's libraries are found where CDI needs them, or not.
    pub fn driver_files(&self, found: bool) {
        self.change(|readiness| readiness.driver_files = Some(found));
    }

    /// The CDI specification is on disk, or cannot be written.
    pub fn cdi(&self, problem: Option<String>) {
        self.change(|readiness| readiness.cdi = problem);
    }

    /// The inventory changed.
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

    /// A GetPreferredAllocation was answered after `waited`.
    pub fn preferred(&self, resource: &ResourceName, outcome: PreferenceOutcome, waited: Duration) {
        self.metrics.preferred(resource, outcome, waited);
    }

    /// An Allocate was answered.
    pub fn allocated(&self, resource: &ResourceName, outcome: AllocationOutcome) {
        self.metrics.allocated(resource, outcome);
    }

    fn stands(&self, resource: &ResourceName, standing: Registration) {
        self.change(|readiness| {
            readiness.registered.insert(resource.clone(), standing);
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

/// Why an inventory without devices has none. Which GPU is left out for which reason is told elsewhere.
fn nothing_served(inventory: &Inventory) -> String {
    let Some(first) = inventory.left_out.first() else {
        return "this node has no GPU".to_owned();
    };
    match inventory.machine.gpus().len() {
        1 => format!("the GPU of this node is not served: {}", first.reason),
        gpus => format!("none of the {gpus} GPUs is served: {}", first.reason),
    }
}

#[cfg(test)]
mod tests;
