//! The errors of the test bed: one variant per operation, with what was being done.
//! A failed cluster is debugged from these texts and the log files they name.

use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use crate::host::Unsupported;

/// What went wrong while a cluster was brought up, used or taken down.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file operation failed.
    #[error("cannot {action} {}: {source}", path.display())]
    File {
        /// The operation, as a verb.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A program could not be started.
    #[error("cannot start {program}: {source}")]
    Start {
        /// The program's name or path.
        program: String,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A program ran and failed.
    #[error("{command} ended with {status}: {stderr}")]
    Command {
        /// The command line.
        command: String,
        /// How it ended.
        status: ExitStatus,
        /// The end of what it wrote to standard error.
        stderr: String,
    },
    /// A long-running program ended although it was needed.
    #[error("{name} ended; the end of its log {}:\n{tail}", log.display())]
    Ended {
        /// The program's name.
        name: String,
        /// Its log file.
        log: PathBuf,
        /// The log's last lines.
        tail: String,
    },
    /// A condition did not come true in time.
    #[error("{what}: not within {limit:?}; last seen: {last}")]
    Timeout {
        /// The condition.
        what: String,
        /// How long it was waited for.
        limit: Duration,
        /// What was seen at the last look.
        last: String,
    },
    /// No such program was started in that sandbox.
    #[error("no program {name} in {sandbox}; there are: {known}")]
    UnknownProgram {
        /// The name asked for.
        name: String,
        /// The sandbox's name.
        sandbox: String,
        /// The names there are.
        known: String,
    },
    /// No release of Kubernetes is known by that version.
    #[error("GANTRY_KUBERNETES: unknown version {value:?}; known: {known}")]
    UnknownKubernetes {
        /// The version that was named.
        value: String,
        /// The known ones.
        known: String,
    },
    /// No cluster stands in the folder.
    #[error("no cluster in {}; bring one up first", .0.display())]
    NoCluster(PathBuf),
    /// The machine cannot run pods.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// A certificate could not be made.
    #[error("certificate of {subject}: {source}")]
    Certificate {
        /// The subject of the certificate.
        subject: String,
        /// The library's reason.
        source: rcgen::Error,
    },
    /// A file of ours did not hold what it should.
    #[error("{}: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's reason.
        source: serde_json::Error,
    },
    /// YAML of another project could not be read.
    #[error("{what}: {reason}")]
    Unreadable {
        /// What it is.
        what: String,
        /// The parser's reason.
        reason: String,
    },
    /// The images of the nodes could not be made.
    #[error("images of the nodes: {0:#}")]
    Image(anyhow::Error),
    /// A node's simulated GPUs could not be put in place.
    #[error("simulated GPUs of {node}: {source}")]
    Hardware {
        /// The node.
        node: String,
        /// The simulator's reason.
        source: gantry_nvml_sim::InstallError,
    },
    /// kubelet's pod resources could not be read.
    #[error("pod resources of {node}: {source}")]
    PodResources {
        /// The node.
        node: String,
        /// What went wrong.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The Kubernetes API refused or was not reached.
    #[error("Kubernetes API: {0}")]
    Kube(#[from] kube::Error),
    /// The kubeconfig could not be read.
    #[error("kubeconfig: {0}")]
    Kubeconfig(#[from] kube::config::KubeconfigError),
}

/// The result of a test bed operation.
pub type Result<T> = std::result::Result<T, Error>;

/// Names the operation and the path of a failed file operation.
pub(crate) fn file(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_path_buf();
    move |source| Error::File { action, path, source }
}
