//! Keeps the labels written while the daemon runs: at once when they change, and again at an interval. A failure is retried with
//! back-off and logged once; it never ends the daemon. Labels stay at the end: a node does not lose its GPUs because its plugin is
//! replaced.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use gantry_api::NodeName;
use gantry_config::{Config, Gfd};
use gantry_runtime::{Backoff, chain};
use jiff::Timestamp;
use kube::Client;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::write::{self, WriteError};
use super::{Facts, Host, HostOptions, Labels, labels};
use crate::inventory::{self, Absence, Inventory};
use crate::observe::Observations;
use gantry_runtime::LogThrottle;

/// Shortest time between two writes. The first change after a pause is written at once.
const SHORTEST: Duration = Duration::from_secs(1);
/// Pause before another attempt to remove labels.
const AGAIN: Duration = Duration::from_secs(10);
/// Pauses after failures.
const RETRY: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
/// How long NVML must report no GPU before the node is labelled as one without GPUs: longer than a starting driver needs to find its
/// GPUs one by one.
const PATIENCE: Duration = Duration::from_secs(60);
/// Longest time a single write may take.
const DEADLINE: Duration = Duration::from_secs(10);

/// The task that keeps a node's labels. The daemon spawns [`Labeller::run`] beside its other tasks.
#[derive(Debug, Clone)]
pub struct Labeller {
    /// Where labels go; with [`Target::Off`] the task ends at once.
    pub target: Target,
    /// The node of the labels, and the pod that writes them.
    pub identity: Identity,
    /// Where `/sys` is read.
    pub sys_root: PathBuf,
    /// How the API server is reached, if the target needs it.
    pub access: Access,
    /// The devices.
    pub inventory: watch::Receiver<Arc<Inventory>>,
    /// How devices are shared and labels are computed.
    pub config: watch::Receiver<Arc<Config>>,
    /// Where it is published that labels cannot be written.
    pub observed: Arc<Observations>,
}

/// How the API server is reached.
#[derive(Clone)]
pub enum Access {
    /// With this client.
    Client(Client),
    /// With this kubeconfig; `None`: with the pod's service account.
    Kubeconfig(Option<PathBuf>),
}

impl std::fmt::Debug for Access {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Client(_) => f.write_str("Client"),
            Self::Kubeconfig(file) => f.debug_tuple("Kubeconfig").field(file).finish(),
        }
    }
}

/// A place where labels stay until they are removed. The Node is not one: no change of the configuration leaves it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum LabelPlace {
    /// The NodeFeature object.
    Object,
    File(PathBuf),
}

/// The labels written so far, and what failed.
#[derive(Debug, Default)]
struct State {
    written: Option<(Settings, Labels)>,
    /// Places with labels of this run. Labels of a former place would be published beside the current ones.
    places: BTreeSet<LabelPlace>,
    /// Whether labels of a former place could not be removed yet.
    left_behind: bool,
    /// Limits the log of that failure.
    former_stays: LogThrottle,
    failures: u32,
    /// The last logged failure.
    failure: String,
    /// Whether it was logged that `oneshot` has no effect.
    warned_of_oneshot: bool,
    /// Limits the log of a missing owner of the object, which every write detects.
    no_owner: LogThrottle,
    /// When NVML began to report no GPU.
    none_since: Option<Instant>,
    /// When that is accepted, until it is.
    accepted_at: Option<Instant>,
}

impl Labeller {
    /// Keeps labels written until `shutdown`, or until the inventory's sender is gone.
    pub async fn run(self, shutdown: CancellationToken) {
        self.run_with(shutdown, PATIENCE).await;
    }

    /// [`Labeller::run`] that accepts after `patience` that a node has no GPU.
    pub async fn run_with(mut self, shutdown: CancellationToken, patience: Duration) {
        let mut state = State::default();
        let mut since = Timestamp::now();
        let mut known = Arc::clone(&self.config.borrow());
        let mut written_at = Instant::now();
        let mut settled = false;
        loop {
            let inventory = Arc::clone(&self.inventory.borrow_and_update());
            let config = Arc::clone(&self.config.borrow_and_update());
            // A round that is due for another reason, such as a failure, takes the new configuration as well.
            if !Arc::ptr_eq(&known, &config) {
                since = Timestamp::now();
                known = Arc::clone(&config);
            }
            let Some(settings) = Settings::of(self.target, &config.gfd) else {
                return;
            };
            if config.gfd.oneshot && !state.warned_of_oneshot {
                state.warned_of_oneshot = true;
                warn!(
                    "oneshot has no effect: the daemon goes on labelling; use gantry labels to compute labels once"
                );
            }
            let mut interval = settings.interval;
            if state.knows(&inventory.state, patience) {
                let round = self.round(&mut state, settings, &inventory, &config, since);
                tokio::select! {
                    () = shutdown.cancelled() => return,
                    () = round => {}
                }
            }
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = tokio::time::sleep(state.pause()) => {}
            }
            if state.failures > 0 {
                continue;
            }
            if state.left_behind {
                interval = Some(interval.map_or(AGAIN, |interval| interval.min(AGAIN)));
            }
            tokio::select! {
                () = shutdown.cancelled() => return,
                changed = self.inventory.changed() => if changed.is_err() { return },
                changed = self.config.changed(), if !settled => settled = changed.is_err(),
                () = until(state.accepted_at) => {}
                () = passed(written_at, interval) => {
                    written_at = Instant::now();
                    state.written = None;
                }
            }
        }
    }

    /// Writes the labels if they changed.
    async fn round(
        &mut self,
        state: &mut State,
        settings: Settings,
        inventory: &Inventory,
        config: &Config,
        since: Timestamp,
    ) {
        let host = read(HostOptions {
            machine_type_file: settings.machine_type_file.clone(),
            sys_root: self.sys_root.clone(),
        });
        let labels = labels(&Facts {
            inventory,
            config,
            host: &host.await,
            watched: true,
            timestamp: settings.timestamp.then(|| since.as_second()),
        });
        let wanted = Some((settings, labels));
        if state.written == wanted {
            return;
        }
        let Some((settings, labels)) = &wanted else { return };
        let wrote = in_time(self.write(state, settings, labels)).await;
        let withdrawn = match &wrote {
            Ok(()) => in_time(self.withdraw(&mut state.places, settings)).await,
            Err(_) => Ok(()),
        };
        self.observed.labels(wrote.is_ok() && withdrawn.is_ok());
        // The labels are written nevertheless, and later ones must not wait for it.
        state.left_behind = withdrawn.is_err();
        match withdrawn {
            Ok(()) => state.former_stays.reset(),
            Err(error) => {
                let reason = chain(error.as_ref());
                if state.former_stays.should_log(&reason, Instant::now().into_std()) {
                    warn!("labels of a former place cannot be removed yet: {reason}");
                }
            }
        }
        match wrote {
            Ok(()) => {
                debug!(labels = labels.len(), place = ?settings.place, "labels written");
                if state.failures > 0 {
                    info!(failures = state.failures, "labels are written again");
                }
                state.written = wanted;
                state.failures = 0;
                state.failure.clear();
            }
            Err(error) => {
                state.failures += 1;
                let failure = chain(error.as_ref());
                if state.failure != failure {
                    warn!(pause = ?state.pause(), "labels may be out of date: {failure}");
                    state.failure = failure;
                }
            }
        }
    }

    async fn write(&mut self, state: &mut State, settings: &Settings, labels: &Labels) -> anyhow::Result<()> {
        let places = &mut state.places;
        match settings.place {
            Place::File => write::to_file(labels, settings.output_file.as_deref())?,
            Place::NodeFeature => {
                let client = self.client().await?;
                // Recorded before the request: a request without a response may have arrived. A refused one has not.
                let is_new = places.insert(LabelPlace::Object);
                let wrote = write::to_node_feature(&client, &self.identity, labels).await;
                let refused =
                    matches!(wrote, Err(WriteError::Forbidden { .. } | WriteError::NoNodeFeature { .. }));
                if is_new && refused {
                    places.remove(&LabelPlace::Object);
                }
                let now = Instant::now().into_std();
                match wrote? {
                    Some(reason) if state.no_owner.should_log(&reason.to_string(), now) => warn!("{reason}"),
                    Some(_) => {}
                    None => state.no_owner.reset(),
                }
            }
            Place::Node => write::to_node(&self.client().await?, &self.identity, labels).await?,
        }
        places.extend(LabelPlace::of(settings));
        Ok(())
    }

    /// Removes labels from places where they are written no longer.
    async fn withdraw(
        &mut self,
        places: &mut BTreeSet<LabelPlace>,
        settings: &Settings,
    ) -> anyhow::Result<()> {
        let here = LabelPlace::of(settings);
        while let Some(former) = places.iter().find(|at| Some(*at) != here.as_ref()).cloned() {
            match &former {
                LabelPlace::Object => write::withdraw(&self.client().await?, &self.identity).await?,
                LabelPlace::File(path) => {
                    let new = settings.output_file.as_deref();
                    write::remove_file(path, new.filter(|_| settings.place == Place::File))?;
                }
            }
            info!(?former, place = ?settings.place, "labels moved to another place; those of the former one are removed");
            places.remove(&former);
        }
        Ok(())
    }

    /// The client, created once.
    async fn client(&mut self) -> anyhow::Result<Client> {
        let client = match &self.access {
            Access::Client(client) => return Ok(client.clone()),
            Access::Kubeconfig(file) => write::connect(file.as_deref()).await?,
        };
        self.access = Access::Client(client.clone());
        Ok(client)
    }
}

impl LabelPlace {
    /// The place where labels written with these settings stay.
    fn of(settings: &Settings) -> Option<Self> {
        match settings.place {
            Place::NodeFeature => Some(Self::Object),
            Place::File => settings.output_file.clone().map(Self::File),
            Place::Node => None,
        }
    }
}

impl State {
    /// Whether the GPUs of the node are known. Until then, the labels of an earlier run stay. A driver that is away reports nothing about
    /// GPUs; one that works and finds none is trusted only after `patience`.
    fn knows(&mut self, state: &inventory::State, patience: Duration) -> bool {
        self.accepted_at = None;
        if *state != inventory::State::Absent(Absence::NoGpu) {
            self.none_since = None;
            return *state == inventory::State::Ready;
        }
        let since = *self.none_since.get_or_insert_with(Instant::now);
        let accepted = since.elapsed() >= patience;
        self.accepted_at = (!accepted).then(|| since + patience);
        accepted
    }

    /// The pause before the next write.
    fn pause(&self) -> Duration {
        match self.failures {
            0 => SHORTEST,
            failures => RETRY.after(failures),
        }
    }
}

async fn in_time(done: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    tokio::time::timeout(DEADLINE, done)
        .await
        .unwrap_or_else(|_| anyhow::bail!("the API server does not respond within {DEADLINE:?}"))
}

/// Reads the facts on a thread of their own: a PCI configuration space may wait for a device, and kubelet must not.
async fn read(options: HostOptions) -> Host {
    let read = tokio::task::spawn_blocking(move || Host::read(&options)).await;
    read.unwrap_or_default()
}

/// Waits until this moment, or forever without one.
async fn until(moment: Option<Instant>) {
    match moment {
        Some(moment) => tokio::time::sleep_until(moment).await,
        None => std::future::pending().await,
    }
}

/// Waits until `interval` has passed since `moment`, or forever without one.
async fn passed(moment: Instant, interval: Option<Duration>) {
    until(interval.map(|interval| moment + interval.max(SHORTEST))).await;
}

/// Where labels go.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Target {
    /// Nowhere: no labels are made
    #[default]
    Off,
    /// Where NVIDIA's gpu-feature-discovery, so configured, writes them: node-feature, or file where useNodeFeatureAPI is false
    Gfd,
    /// A NodeFeature object, which node-feature-discovery makes labels of
    NodeFeature,
    /// A file in node-feature-discovery's features.d, or standard output
    File,
    /// The Node itself, without node-feature-discovery
    Node,
}

impl Target {
    /// The place with this configuration; `None` for [`Target::Off`].
    pub const fn place(self, gfd: &Gfd) -> Option<Place> {
        match self {
            Self::Off => None,
            Self::Gfd if gfd.use_node_feature_api => Some(Place::NodeFeature),
            Self::Gfd | Self::File => Some(Place::File),
            Self::NodeFeature => Some(Place::NodeFeature),
            Self::Node => Some(Place::Node),
        }
    }
}

/// A place that labels are written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// A NodeFeature object.
    NodeFeature,
    /// A file, or standard output.
    File,
    /// The Node itself.
    Node,
}

impl Place {
    /// Whether an API server is needed.
    pub const fn needs_cluster(self) -> bool {
        matches!(self, Self::NodeFeature | Self::Node)
    }
}

/// The options of the daemon about labels that gpu-feature-discovery does not have.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
pub struct LabelsArgs {
    /// Where the labels of the node go
    #[arg(long, value_enum, value_name = "WHERE", default_value_t)]
    pub labels: Target,

    /// Namespace of the pod this runs in, and of the NodeFeature object [default: that of the service account or kubeconfig]
    #[arg(long, env = "NAMESPACE", value_name = "NAME")]
    pub namespace: Option<String>,

    /// Name of the pod this runs in: its DaemonSet owns the NodeFeature object
    #[arg(long, env = "POD_NAME", value_name = "NAME")]
    pub pod_name: Option<String>,
}

/// How labels are computed and where they go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Where they go.
    pub place: Place,
    /// The file of [`Place::File`]; `None`: standard output.
    pub output_file: Option<PathBuf>,
    /// Whether a label has the time at which this configuration took effect.
    pub timestamp: bool,
    /// Interval at which unchanged labels are written again; `None`: never.
    pub interval: Option<Duration>,
    /// File that names the machine's type; an empty path: none.
    pub machine_type_file: PathBuf,
}

impl Settings {
    /// From the option `--labels` and `flags.gfd` of the configuration, which may change while the daemon runs. `None` if no
    /// labels are written.
    pub fn of(target: Target, gfd: &Gfd) -> Option<Self> {
        Some(Self {
            place: target.place(gfd)?,
            output_file: gfd.output_file.clone(),
            timestamp: !gfd.no_timestamp,
            interval: gfd.sleep_interval,
            machine_type_file: gfd.machine_type_file.clone(),
        })
    }
}

/// The node of the labels, and the pod that writes them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    pub node: NodeName,
    /// Namespace of the pod this runs in, and of the NodeFeature object (`NAMESPACE`); `None`: that of the service account or
    /// kubeconfig.
    pub namespace: Option<String>,
    /// The pod this runs in (`POD_NAME`); `None` if unknown: the object then has no owner.
    pub pod: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_place_follows_gfd_unless_named() {
        let place = |target: Target, use_node_feature_api| {
            target.place(&Gfd { use_node_feature_api, ..Gfd::default() })
        };
        assert_eq!(place(Target::Gfd, true), Some(Place::NodeFeature));
        assert_eq!(place(Target::Gfd, false), Some(Place::File));
        for use_node_feature_api in [true, false] {
            assert_eq!(place(Target::Off, use_node_feature_api), None);
            assert_eq!(place(Target::NodeFeature, use_node_feature_api), Some(Place::NodeFeature));
            assert_eq!(place(Target::File, use_node_feature_api), Some(Place::File));
            assert_eq!(place(Target::Node, use_node_feature_api), Some(Place::Node));
        }
    }
}
