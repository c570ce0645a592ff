//! A daemon as a child process of the demo: this same binary with other arguments. It ends when its standard input
//! closes, so that no process outlives the demo.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context;
use tokio::process::{Child, Command};

/// How long a daemon may take to shut down.
const PATIENCE: Duration = Duration::from_secs(4);
/// Lines of a daemon's log that are shown when it fails.
const TAIL: usize = 12;

/// A running daemon.
#[derive(Debug)]
pub(crate) struct Daemon {
    name: String,
    log: PathBuf,
    child: Child,
}

impl Daemon {
    /// Starts `gantry` with `arguments`, its log in `logs`.
    pub(crate) fn start(name: &str, arguments: &[String], logs: &Path) -> anyhow::Result<Self> {
        let executable = std::env::current_exe().context("finding the gantry binary")?;
        let log = logs.join(format!("{name}.log"));
        let stderr = File::create(&log).with_context(|| format!("creating {}", log.display()))?;
        let child = Command::new(&executable)
            .arg("--end-with-stdin")
            .args(arguments)
            // Settings for the user's own cluster must not reach the demo's daemons.
            .env_remove("KUBECONFIG")
            .env_remove("NODE_NAME")
            .env_remove("LOG_FORMAT")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(stderr)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("starting {} {}", executable.display(), arguments.join(" ")))?;
        Ok(Self { name: name.to_owned(), log, child })
    }

    /// An error with the end of its log if it has ended.
    pub(crate) fn check(&mut self) -> anyhow::Result<()> {
        match self.child.try_wait().context("checking a child process")? {
            None => Ok(()),
            Some(status) => {
                anyhow::bail!("{} ended with {status}; its log ends with:\n{}", self.name, self.tail())
            }
        }
    }

    /// The last lines of its log.
    pub(crate) fn tail(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        let from = lines.len().saturating_sub(TAIL);
        lines.get(from..).unwrap_or_default().join("\n")
    }

    /// Its name in messages and of its log.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Stops it and waits until it has ended.
    ///
    /// # Errors
    /// It had to be killed, or ended with a failure.
    pub(crate) async fn stop(mut self) -> anyhow::Result<()> {
        drop(self.child.stdin.take());
        match tokio::time::timeout(PATIENCE, self.child.wait()).await {
            Ok(Ok(status)) if status.success() => Ok(()),
            Ok(Ok(status)) => {
                anyhow::bail!("{} ended with {status}; its log ends with:\n{}", self.name, self.tail())
            }
            Ok(Err(error)) => Err(error).with_context(|| format!("waiting for {}", self.name)),
            Err(_) => {
                self.child.kill().await.with_context(|| format!("killing {}", self.name))?;
                anyhow::bail!("{} did not end within {} s and was killed", self.name, PATIENCE.as_secs())
            }
        }
    }
}

/// A free port of a loopback address that belongs to this process. Another program may take a port of 127.0.0.1 before
/// the daemon binds it; no other program uses this address.
pub(crate) fn own_address() -> anyhow::Result<SocketAddr> {
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    let own = Ipv4Addr::new(127, 1 + (high & 0x7f), middle, low);
    let listener =
        TcpListener::bind((own, 0)).with_context(|| format!("looking for a free port of {own}"))?;
    Ok(listener.local_addr()?)
}
