//! Follows the configuration: a good one is published, a bad one is reported while the last good one stays in effect. Nothing here ends the
//! program once it serves.

mod cluster;
mod files;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::{NodeName, ResourceName};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{error, info, warn};

pub use cluster::{Choice, ChoiceError, Fallback};
use files::Pipes;

use super::read::load_naming;
use super::{Config, Layer, LoadedConfig, Problems, ResourcePattern, Strictness};

/// The text of a file that is read again while the program runs.
///
/// # Errors
/// It cannot be read, is longer than a configuration may be, or is a pipe or a device: reading one could block.
pub fn text_of(path: &Path) -> io::Result<String> {
    files::text(path, Pipes::Refused)
}

/// The sources of the configuration.
#[derive(Clone)]
pub struct Source {
    /// The config file, if there is one.
    pub place: ConfigLocation,
    /// Environment and flags, which override the file; the last one has the highest precedence.
    pub layers: Vec<Layer>,
    /// How unknown keys are treated.
    pub strictness: Strictness,
    /// Name of the GPUs that no pattern of the file matches; `None`: the default.
    pub gpu_resource: Option<ResourceName>,
}

/// Where the config file is.
#[derive(Clone)]
pub enum ConfigLocation {
    /// Nowhere: flags and environment alone.
    Flags,
    /// A file, watched.
    File(PathBuf),
    /// One of several, chosen by a label of the node, watched.
    PerNode(Box<PerNode>),
}

/// Several configurations, and the node that gets one of them.
#[derive(Clone)]
pub struct PerNode {
    /// The configurations.
    pub configs: Configs,
    pub node: NodeName,
    /// Label of the node that names its configuration.
    pub label: String,
    /// The choice without the label.
    pub choice: Choice,
    /// The client of the API server.
    pub client: kube::Client,
}

/// Where several configurations are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Configs {
    /// Files of a folder, such as a mounted ConfigMap.
    Folder(PathBuf),
    /// Keys of a ConfigMap, read from the API server.
    ConfigMap { namespace: String, name: String },
}

/// The state of the configuration, for readiness, metrics and Events.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// The source of the configuration in effect.
    pub source: Arc<str>,
    /// The problem of the current configuration, while the last valid one stays in effect.
    pub problem: Option<Arc<str>>,
    /// Configurations put into effect, the first included.
    pub loads: u64,
    /// Configurations refused.
    pub failures: u64,
}

/// Why there is no configuration to start with.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The file or the flags are wrong.
    #[error(transparent)]
    Wrong(#[from] Problems),
    /// The file does not exist or cannot be read.
    #[error("{}: cannot be read: {reason}", path.display())]
    Unreadable { path: PathBuf, reason: String },
}

/// The current content of the config file, or why there is none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sighting {
    /// Its name in problems.
    pub(super) source: String,
    pub(super) text: Result<String, String>,
}

impl Sighting {
    /// Whether the content is empty.
    fn is_empty(&self) -> bool {
        self.text.as_ref().is_ok_and(|text| text.trim().is_empty())
    }
}

/// Interval for another attempt with a configuration that lacks something on this host.
const RETRY: Duration = Duration::from_secs(2);

/// Why a configuration does not take effect.
enum Refusal {
    /// The configuration is wrong.
    Wrong(Problems),
    /// The configuration is good, but this host lacks something.
    Unfit(Problems),
}

impl Refusal {
    fn problems(self) -> Problems {
        match self {
            Self::Wrong(problems) | Self::Unfit(problems) => problems,
        }
    }
}

/// The sightings of the configuration, each once.
struct Inbox {
    sightings: mpsc::Receiver<Sighting>,
    /// The last one that was read.
    last: Option<Sighting>,
    /// Whether to read it again.
    unfit: bool,
}

impl Inbox {
    /// The next one to read; `None`: no other will come.
    async fn next(&mut self) -> Option<Sighting> {
        loop {
            tokio::select! {
                sighting = self.sightings.recv() => match sighting {
                    Some(sighting) if self.last.as_ref() == Some(&sighting) => {}
                    other => return other,
                },
                () = files::over(self.unfit.then_some(RETRY)) => return self.last.clone(),
            }
        }
    }

    /// Records the outcome, and reports a refusal that was not reported already.
    fn record(
        &mut self,
        at: Sighting,
        outcome: &Result<LoadedConfig, Refusal>,
        reports: &watch::Sender<Report>,
    ) {
        let again = self.last.as_ref() == Some(&at);
        self.last = Some(at);
        self.unfit = matches!(outcome, Err(Refusal::Unfit(_)));
        if let Err(Refusal::Wrong(problems) | Refusal::Unfit(problems)) = outcome {
            let text: Arc<str> = problems.to_string().into();
            if !(again && reports.borrow().problem.as_ref() == Some(&text)) {
                refuse(reports, text);
            }
        }
    }
}

/// Reads the configuration and follows it until `shutdown`, in tasks of `tasks`; SIGHUP makes it read files again. Returns when the first
/// configuration is in effect: at once for flags and a file, after the API server's response if a label of the node decides. Returns
/// `None` if `shutdown` came before. Problems are published through `reports`. A configuration that `fits` refuses is refused like a wrong
/// one, and tried again at an interval.
///
/// # Errors
/// When flags and file are wrong at the start. With a label it waits for a good configuration instead.
pub async fn follow(
    source: Source,
    fits: impl Fn(&Config) -> Result<(), String> + Send + Sync + 'static,
    reports: watch::Sender<Report>,
    tasks: &TaskTracker,
    shutdown: CancellationToken,
) -> Result<Option<watch::Receiver<Arc<Config>>>, SourceError> {
    // Without this a SIGHUP, which is how NVIDIA's config-manager asks for a reload, would end the program.
    if let Err(error) = signal(SignalKind::hangup()) {
        warn!(%error, "SIGHUP will end this program");
    }
    let (sender, sightings) = mpsc::channel(4);
    let mut last = None;
    match &source.place {
        ConfigLocation::Flags => last = Some(flags_alone()),
        ConfigLocation::File(path) => {
            // Created before the first read, so that no signal is missed.
            let mut changes = files::PathChanges::new(path.clone());
            let Some(first) = source.first_written(path, &mut changes, &shutdown).await? else {
                return Ok(None);
            };
            last = Some(first);
            tasks.spawn(files::follow(changes, last.clone(), sender.clone(), shutdown.clone()));
        }
        ConfigLocation::PerNode(per_node) => {
            tasks.spawn(cluster::follow(*per_node.clone(), sender.clone(), shutdown.clone()));
        }
    }
    let judge = move |sighting: &Sighting| {
        let loaded = source.load(sighting).map_err(Refusal::Wrong)?;
        match fits(&loaded.config) {
            Ok(()) => Ok(loaded),
            Err(reason) => Err(Refusal::Unfit(Problems::one(&sighting.source, &reason))),
        }
    };
    let mut inbox = Inbox { sightings, last, unfit: false };
    let first = match &inbox.last {
        Some(sighting) => judge(sighting).map_err(Refusal::problems)?,
        None => loop {
            let sighting = tokio::select! {
                () = shutdown.cancelled() => return Ok(None),
                sighting = inbox.next() => match sighting {
                    Some(sighting) => sighting,
                    None => return Ok(None),
                },
            };
            let outcome = judge(&sighting);
            inbox.record(sighting, &outcome, &reports);
            if let Ok(loaded) = outcome {
                break loaded;
            }
        },
    };
    let name = inbox.last.as_ref().map_or(String::new(), |sighting| sighting.source.clone());
    accept(&reports, &name, &first);
    let (configs, receiver) = watch::channel(Arc::new(first.config));
    tasks.spawn(async move {
        // Keeping this sender would keep the channel open, and flags alone have nothing to follow.
        drop(sender);
        loop {
            let sighting = tokio::select! {
                () = shutdown.cancelled() => return,
                () = configs.closed() => return,
                sighting = inbox.next() => match sighting {
                    Some(sighting) => sighting,
                    None => {
                        // The configuration stays for as long as it has a receiver.
                        configs.closed().await;
                        return;
                    }
                },
            };
            let outcome = judge(&sighting);
            let name = sighting.source.clone();
            inbox.record(sighting, &outcome, &reports);
            let Ok(loaded) = outcome else { continue };
            if *configs.borrow().as_ref() == loaded.config {
                reports.send_if_modified(|report| report.problem.take().is_some());
            } else {
                accept(&reports, &name, &loaded);
                configs.send_replace(Arc::new(loaded.config));
            }
        }
    });
    Ok(Some(receiver))
}

fn flags_alone() -> Sighting {
    Sighting { source: "command line".to_owned(), text: Ok(String::new()) }
}

impl Source {
    /// The configuration of a sighting with all overrides.
    fn load(&self, sighting: &Sighting) -> Result<LoadedConfig, Problems> {
        match &sighting.text {
            Ok(text) => self.read(&sighting.source, text),
            Err(reason) => Err(Problems::one(&sighting.source, reason)),
        }
    }

    /// The current configuration, without following it: the file may be a pipe. If a label decides, that of flags and environment alone.
    ///
    /// # Errors
    /// The file cannot be read, or all problems of it.
    pub fn now(&self) -> Result<LoadedConfig, SourceError> {
        let (source, text) = self.text_now()?;
        Ok(self.read(&source, &text)?)
    }

    /// The name of the source in problems, and its text. A file `-` is standard input.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn text_now(&self) -> Result<(String, String), SourceError> {
        let Sighting { source, text } = match &self.place {
            ConfigLocation::File(path) if path.as_os_str() == "-" => {
                let there = Self { place: ConfigLocation::File("/dev/stdin".into()), ..self.clone() };
                Sighting { source: "standard input".to_owned(), ..there.first(Pipes::Read)? }
            }
            _ => self.first(Pipes::Read)?,
        };
        // A file that cannot be read was an error before.
        Ok((source, text.unwrap_or_default()))
    }

    /// The content of the file at the start.
    fn first(&self, pipes: Pipes) -> Result<Sighting, SourceError> {
        let ConfigLocation::File(path) = &self.place else {
            return Ok(flags_alone());
        };
        let sighting = files::see(path, pipes);
        match &sighting.text {
            Err(reason) => Err(SourceError::Unreadable { path: path.clone(), reason: reason.clone() }),
            Ok(_) => Ok(sighting),
        }
    }

    /// The content of a file at the start; an empty one may be about to be written. `None`: `shutdown` came first.
    async fn first_written(
        &self,
        path: &Path,
        changes: &mut files::PathChanges,
        shutdown: &CancellationToken,
    ) -> Result<Option<Sighting>, SourceError> {
        let mut doubt = files::Doubt::default();
        loop {
            changes.arm();
            let sighting = self.first(Pipes::Refused)?;
            let wait = doubt.about(&sighting, None, Instant::now());
            if wait.is_none() || files::stays_empty(path) {
                return Ok(Some(sighting));
            }
            tokio::select! {
                () = shutdown.cancelled() => return Ok(None),
                () = changes.next() => {}
                () = files::over(wait) => {}
            }
        }
    }

    /// Reads `text`, called `source` in problems, with all overrides.
    ///
    /// # Errors
    /// All problems.
    pub fn read(&self, source: &str, text: &str) -> Result<LoadedConfig, Problems> {
        let mut loaded =
            load_naming(source, text, &self.layers, self.strictness, self.gpu_resource.as_ref())?;
        // After a pattern that matches every GPU, another never counts.
        let matches_all = |entry: &ResourcePattern| entry.pattern == "*";
        let named = loaded.config.gpu_patterns.iter().any(matches_all);
        if let Some(name) = self.gpu_resource.as_ref().filter(|_| !named) {
            loaded.config.gpu_patterns.push(ResourcePattern { pattern: "*".to_owned(), name: name.clone() });
        }
        Ok(loaded)
    }
}

fn accept(reports: &watch::Sender<Report>, source: &str, loaded: &LoadedConfig) {
    for warning in &loaded.warnings {
        warn!(source, "{warning}");
    }
    info!(
        source,
        config = %loaded.config.to_json(),
        "configuration in effect"
    );
    reports.send_modify(|report| {
        report.source = source.into();
        report.problem = None;
        report.loads += 1;
    });
}

fn refuse(reports: &watch::Sender<Report>, problems: Arc<str>) {
    error!(%problems, "configuration refused; the last good one stays in effect");
    reports.send_modify(|report| {
        report.problem = Some(problems);
        report.failures += 1;
    });
}

#[cfg(test)]
#[path = "../../../plugin/tests/support/log.rs"]
mod log;
#[cfg(test)]
mod tests;
