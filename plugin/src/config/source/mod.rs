//! Where the configuration comes from, and what happens when it changes: a good one is handed on, a bad one is reported while the
//! last good one stays. Nothing here ends the program once it serves.

mod choice;
mod cluster;
mod files;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use gantry_api::{NodeName, ResourceName};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{error, info, warn};

pub use choice::{Choice, ChoiceError, Fallback};
use files::Pipes;

use super::{Config, Layer, Loaded, Problems, ResourcePattern, Strictness, load};

/// Everything that makes the configuration.
#[derive(Clone)]
pub struct Source {
    /// The config file, if there is one.
    pub place: Place,
    /// Environment and flags, which go over it; the last one is topmost.
    pub layers: Vec<Layer>,
    /// What an unknown key means.
    pub strictness: Strictness,
    /// Name of the GPUs that no pattern of the file matches; `None`: the default.
    pub gpu_resource: Option<ResourceName>,
}

/// Where the config file is.
#[derive(Clone)]
pub enum Place {
    /// Nowhere: flags and environment say it all.
    Flags,
    /// A file, watched.
    File(PathBuf),
    /// One of several, by a label of the node, watched.
    PerNode(Box<PerNode>),
}

/// Several configurations and the node that one of them is for.
#[derive(Clone)]
pub struct PerNode {
    /// The configurations.
    pub configs: Configs,
    /// This node.
    pub node: NodeName,
    /// Label of the node that names its configuration.
    pub label: String,
    /// What counts where the label is absent.
    pub choice: Choice,
    /// Way to the API server.
    pub client: kube::Client,
}

/// Where several configurations are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Configs {
    /// Files of a folder, such as a mounted ConfigMap.
    Folder(PathBuf),
    /// Keys of a ConfigMap, read from the API server.
    ConfigMap {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
    },
}

/// How the configuration stands, for readiness, metrics and Events.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// What the configuration in effect was read from.
    pub source: Arc<str>,
    /// What is wrong with what is there now; the last good configuration stays in effect. `None`: nothing.
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
    /// There is no such file, or it cannot be read.
    #[error("{}: cannot be read: {reason}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the operating system says.
        reason: String,
    },
}

/// What stands in the config file now, or why there is none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sighting {
    /// What to call it in problems.
    pub(super) source: String,
    pub(super) text: Result<String, String>,
}

impl Sighting {
    /// Whether there is something to read, and nothing in it.
    fn is_empty(&self) -> bool {
        self.text.as_ref().is_ok_and(|text| text.trim().is_empty())
    }
}

/// Finds the configuration and follows it until `shutdown`, in tasks of `tasks`; SIGHUP has files read again. Returns when the
/// first one is in effect: at once for flags and a file, after the API server's answer where a label of the node decides.
/// `None` when `shutdown` came before. What goes wrong on the way, and later, is told by `reports`.
///
/// # Errors
/// When flags and file together are wrong at the start. A configuration by label that is wrong is waited for instead.
pub async fn follow(
    source: Source,
    reports: watch::Sender<Report>,
    tasks: &TaskTracker,
    shutdown: CancellationToken,
) -> Result<Option<watch::Receiver<Arc<Config>>>, SourceError> {
    // Without this a SIGHUP, which is how NVIDIA's config-manager asks for a reload, would end the program.
    if let Err(error) = signal(SignalKind::hangup()) {
        warn!(%error, "SIGHUP will end this program");
    }
    let (sender, mut sightings) = mpsc::channel(4);
    let mut last = None;
    match &source.place {
        Place::Flags => last = Some(flags_alone()),
        Place::File(path) => {
            // Before it is read, so that no signal falls between.
            let mut changes = files::Changes::new(path.clone());
            let Some(first) = source.first_written(path, &mut changes, &shutdown).await? else {
                return Ok(None);
            };
            last = Some(first);
            tasks.spawn(files::follow(
                changes,
                last.clone(),
                sender.clone(),
                shutdown.clone(),
            ));
        }
        Place::PerNode(per_node) => {
            tasks.spawn(cluster::follow(
                *per_node.clone(),
                sender.clone(),
                shutdown.clone(),
            ));
        }
    }
    let first = match &last {
        Some(sighting) => source.load(sighting)?,
        None => loop {
            let sighting = tokio::select! {
                () = shutdown.cancelled() => return Ok(None),
                sighting = sightings.recv() => match sighting {
                    Some(sighting) => sighting,
                    None => return Ok(None),
                },
            };
            if last.as_ref() == Some(&sighting) {
                continue;
            }
            let loaded = source.load(&sighting);
            last = Some(sighting);
            match loaded {
                Ok(loaded) => break loaded,
                Err(problems) => refuse(&reports, &problems),
            }
        },
    };
    let name = last
        .as_ref()
        .map_or(String::new(), |sighting| sighting.source.clone());
    accept(&reports, &name, &first);
    let (configs, receiver) = watch::channel(Arc::new(first.config));
    tasks.spawn(async move {
        // A sender of our own would keep the channel open, and flags alone have nothing to follow.
        drop(sender);
        loop {
            let sighting = tokio::select! {
                () = shutdown.cancelled() => return,
                () = configs.closed() => return,
                sighting = sightings.recv() => match sighting {
                    Some(sighting) => sighting,
                    None => {
                        // The configuration stays what it is for as long as anybody reads it.
                        configs.closed().await;
                        return;
                    }
                },
            };
            if last.as_ref() == Some(&sighting) {
                continue;
            }
            match source.load(&sighting) {
                Ok(loaded) => {
                    let changed = *configs.borrow().as_ref() != loaded.config;
                    if changed {
                        accept(&reports, &sighting.source, &loaded);
                        configs.send_replace(Arc::new(loaded.config));
                    } else {
                        reports.send_if_modified(|report| report.problem.take().is_some());
                    }
                }
                Err(problems) => refuse(&reports, &problems),
            }
            last = Some(sighting);
        }
    });
    Ok(Some(receiver))
}

fn flags_alone() -> Sighting {
    Sighting {
        source: "command line".to_owned(),
        text: Ok(String::new()),
    }
}

impl Source {
    /// The configuration that a text makes, with everything that goes over it.
    fn load(&self, sighting: &Sighting) -> Result<Loaded, Problems> {
        match &sighting.text {
            Ok(text) => self.read(&sighting.source, text),
            Err(reason) => Err(Problems::one(&sighting.source, reason)),
        }
    }

    /// The configuration as it stands, without following it: the file may be a pipe. Where a label decides, what flags and environment
    /// say alone.
    ///
    /// # Errors
    /// The file cannot be read, or everything that is wrong with it.
    pub fn now(&self) -> Result<Loaded, SourceError> {
        Ok(self.load(&self.first(Pipes::Read)?)?)
    }

    /// What stands in the file at the start.
    fn first(&self, pipes: Pipes) -> Result<Sighting, SourceError> {
        let Place::File(path) = &self.place else {
            return Ok(flags_alone());
        };
        let sighting = files::see(path, pipes);
        match &sighting.text {
            Err(reason) => Err(SourceError::Unreadable {
                path: path.clone(),
                reason: reason.clone(),
            }),
            Ok(_) => Ok(sighting),
        }
    }

    /// What stands in a file at the start; one that is empty is about to be written, unless it stays so. `None`: `shutdown` came first.
    async fn first_written(
        &self,
        path: &Path,
        changes: &mut files::Changes,
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

    /// Reads `text`, called `source` in problems, with everything that goes over it.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn read(&self, source: &str, text: &str) -> Result<Loaded, Problems> {
        let mut loaded = load(source, text, &self.layers, self.strictness)?;
        if let Some(name) = &self.gpu_resource {
            loaded.config.gpu_patterns.push(ResourcePattern {
                pattern: "*".to_owned(),
                name: name.clone(),
            });
        }
        Ok(loaded)
    }
}

fn accept(reports: &watch::Sender<Report>, source: &str, loaded: &Loaded) {
    for warning in &loaded.warnings {
        warn!(source, "{warning}");
    }
    info!(
        source,
        config = loaded.config.to_json(),
        "configuration in effect"
    );
    reports.send_modify(|report| {
        report.source = source.into();
        report.problem = None;
        report.loads += 1;
    });
}

fn refuse(reports: &watch::Sender<Report>, problems: &Problems) {
    error!(%problems, "configuration refused; the last good one stays in effect");
    reports.send_modify(|report| {
        report.problem = Some(problems.to_string().into());
        report.failures += 1;
    });
}

#[cfg(test)]
mod tests;
