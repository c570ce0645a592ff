//! Runs a daemon or the demo: the async runtime, signals for shutdown, the exit code.

use std::future::Future;
use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Context;
use gantry_runtime::chain;
use tokio::io::AsyncReadExt;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Worker threads of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Threads {
    /// For the plugin, which has little work and should be small.
    One,
    /// One per core.
    Many,
}

/// Input that is wrong, as opposed to work that failed: exit code 2.
#[derive(Debug)]
pub(crate) struct BadInput(pub(crate) anyhow::Error);

impl std::fmt::Display for BadInput {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&chain(self.0.as_ref()))
    }
}

impl std::error::Error for BadInput {}

/// Runs `work` until it ends. SIGTERM, SIGINT or, if asked, the end of standard input cancel its token; a second signal
/// ends the process at once.
///
/// # Errors
/// Those of `work`, or no runtime could be made.
pub(crate) fn serve<W, F>(threads: Threads, end_with_stdin: bool, work: W) -> anyhow::Result<()>
where
    W: FnOnce(CancellationToken) -> F,
    F: Future<Output = anyhow::Result<()>>,
{
    let mut builder = match threads {
        Threads::One => tokio::runtime::Builder::new_current_thread(),
        Threads::Many => tokio::runtime::Builder::new_multi_thread(),
    };
    let runtime = builder.enable_all().build().context("starting the async runtime")?;
    let result = runtime.block_on(async {
        let shutdown = CancellationToken::new();
        watch_signals(shutdown.clone())?;
        if end_with_stdin {
            tokio::spawn(watch_stdin(shutdown.clone()));
        }
        work(shutdown).await
    });
    // A read of standard input that never ends must not hold the process.
    runtime.shutdown_background();
    result
}

/// Handles both signals from now on and cancels on the first.
fn watch_signals(shutdown: CancellationToken) -> anyhow::Result<()> {
    let mut term = signal(SignalKind::terminate()).context("catching SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("catching SIGINT")?;
    tokio::spawn(async move {
        let mut next = async || {
            tokio::select! {
                _ = term.recv() => {}
                _ = interrupt.recv() => {}
            }
        };
        next().await;
        shutdown.cancel();
        tracing::info!("stopping");
        next().await;
        std::process::exit(130);
    });
    Ok(())
}

async fn watch_stdin(shutdown: CancellationToken) {
    let mut rest = [0; 64];
    let mut stdin = tokio::io::stdin();
    while stdin.read(&mut rest).await.is_ok_and(|bytes| bytes > 0) {}
    shutdown.cancel();
}

/// Prints the error of a command and returns its exit code.
pub(crate) fn exit_code(result: anyhow::Result<()>) -> ExitCode {
    let Err(error) = result else {
        return ExitCode::SUCCESS;
    };
    // There is no other place to report a closed standard error.
    let _ = writeln!(std::io::stderr(), "gantry: {}", chain(error.as_ref()));
    if error.is::<BadInput>() { ExitCode::from(2) } else { ExitCode::FAILURE }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Many errors print their source themselves: anyhow's own form prints it once more.
    #[test]
    fn cause_is_printed_once() {
        let unreadable = std::io::Error::other("permission denied");
        let error = anyhow::Error::new(unreadable).context("cannot read a.yaml: permission denied");
        assert_eq!(format!("{error:#}"), "cannot read a.yaml: permission denied: permission denied");
        assert_eq!(BadInput(error).to_string(), "cannot read a.yaml: permission denied");
    }
}
