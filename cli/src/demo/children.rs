//! The daemons as child processes of the demo: this same binary with other arguments. They end when their standard input closes,
//! so nothing outlives the demo, however it ends.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context;
use tokio::process::{Child, Command};

/// How long a daemon may take to end in order.
const PATIENCE: Duration = Duration::from_secs(4);
/// Lines of a daemon's log that are shown when it fails.
const TAIL: usize = 12;

/// A running daemon.
#[derive(Debug)]
pub(super) struct Daemon {
    name: String,
    log: PathBuf,
    child: Child,
}

impl Daemon {
    /// Starts `gantry` with `arguments`, its log in `logs`.
    pub(super) fn start(name: &str, arguments: &[String], logs: &Path) -> anyhow::Result<Self> {
        let executable = std::env::current_exe().context("finding the gantry binary")?;
        let log = logs.join(format!("{name}.log"));
        let stderr = File::create(&log).with_context(|| format!("creating {}", log.display()))?;
        let child = Command::new(&executable)
            .arg("--end-with-stdin")
            .args(arguments)
            // What is set for the person's own cluster must not reach the demo's daemons.
            .env_remove("KUBECONFIG")
            .env_remove("NODE_NAME")
            .env_remove("LOG_FORMAT")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(stderr)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("starting {} {}", executable.display(), arguments.join(" ")))?;
        Ok(Self {
            name: name.to_owned(),
            log,
            child,
        })
    }

    /// An error with the end of its log if it has ended.
    pub(super) fn check(&mut self) -> anyhow::Result<()> {
        match self.child.try_wait().context("asking after a child process")? {
            None => Ok(()),
            Some(status) => anyhow::bail!(
                "{} ended with {status}; its log says:\n{}",
                self.name,
                self.tail()
            ),
        }
    }

    /// The last lines of its log.
    pub(super) fn tail(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        let from = lines.len().saturating_sub(TAIL);
        lines.get(from..).unwrap_or_default().join("\n")
    }

    /// Its name in messages and of its log.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Asks it to end and waits until it has.
    ///
    /// # Errors
    /// It had to be killed, or ended with a failure.
    pub(super) async fn stop(mut self) -> anyhow::Result<()> {
        drop(self.child.stdin.take());
        match tokio::time::timeout(PATIENCE, self.child.wait()).await {
            Ok(Ok(status)) if status.success() => Ok(()),
            Ok(Ok(status)) => anyhow::bail!(
                "{} ended with {status}; its log says:\n{}",
                self.name,
                self.tail()
            ),
            Ok(Err(error)) => Err(error).with_context(|| format!("waiting for {}", self.name)),
            Err(_) => {
                self.child
                    .kill()
                    .await
                    .with_context(|| format!("killing {}", self.name))?;
                anyhow::bail!(
                    "{} did not end within {} s and was killed",
                    self.name,
                    PATIENCE.as_secs()
                )
            }
        }
    }
}

/// An address of this process's own among those of loopback. Another program's connection may take a port of 127.0.0.1 between its
/// choice and the daemon's start; here nobody else looks for one.
pub(super) fn own_address() -> anyhow::Result<SocketAddr> {
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    let own = Ipv4Addr::new(127, 1 + (high & 0x7f), middle, low);
    let listener =
        TcpListener::bind((own, 0)).with_context(|| format!("looking for a free port of {own}"))?;
    Ok(listener.local_addr()?)
}
