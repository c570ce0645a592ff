//! Runs a command: logging to standard error, the async runtime, signals for shutdown, the exit code.

use std::future::Future;
use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;

use anyhow::Context;
use clap::ValueEnum;
use gantry_runtime::chain;
use tokio::io::AsyncReadExt;
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;

use crate::visible::{LogWriter, Visible};

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

/// Work that failed in a way that callers distinguish by an exit code of its own.
#[derive(Debug)]
pub(crate) struct ExitWith {
    pub(crate) code: u8,
    pub(crate) error: anyhow::Error,
}

impl std::fmt::Display for ExitWith {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#}", self.error)
    }
}

impl std::error::Error for ExitWith {}

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

/// Runs a command that reads and prints. The first signal ends it, with the exit code of a command that was interrupted.
///
/// # Errors
/// Those of `work`, or no runtime could be made.
pub(crate) fn query<F>(threads: Threads, work: F) -> anyhow::Result<()>
where
    F: Future<Output = anyhow::Result<()>>,
{
    serve(threads, false, |shutdown| async move {
        match shutdown.run_until_cancelled(work).await {
            Some(result) => result,
            None => std::process::exit(INTERRUPTED),
        }
    })
}

/// Exit code of an interrupted command.
const INTERRUPTED: i32 = 130;

/// Handles both signals from now on and cancels on the first.
fn watch_signals(shutdown: CancellationToken) -> anyhow::Result<()> {
    #[cfg(unix)]
    let mut next = {
        use tokio::signal::unix::{SignalKind, signal};
        let mut term = signal(SignalKind::terminate()).context("catching SIGTERM")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("catching SIGINT")?;
        async move || {
            tokio::select! {
                _ = term.recv() => {}
                _ = interrupt.recv() => {}
            }
        }
    };
    #[cfg(windows)]
    let mut next = {
        let mut interrupt = tokio::signal::windows::ctrl_c().context("catching Ctrl-C")?;
        async move || {
            interrupt.recv().await;
        }
    };
    tokio::spawn(async move {
        next().await;
        shutdown.cancel();
        tracing::info!("stopping");
        next().await;
        std::process::exit(INTERRUPTED);
    });
    Ok(())
}

async fn watch_stdin(shutdown: CancellationToken) {
    let mut rest = [0; 64];
    let mut stdin = tokio::io::stdin();
    while stdin.read(&mut rest).await.is_ok_and(|bytes| bytes > 0) {}
    shutdown.cancel();
}

/// Prints the output of a command. A reader that closes the pipe early (`gantry topo | head`) is no failure.
///
/// # Errors
/// Standard output cannot be written.
pub(crate) fn print(output: &Visible) -> anyhow::Result<()> {
    match std::io::stdout().lock().write_all(output.as_bytes()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("cannot write to standard output"),
    }
}

/// Prints the error of a command and returns its exit code.
pub(crate) fn exit_code(result: anyhow::Result<()>) -> ExitCode {
    let Err(error) = result else {
        return ExitCode::SUCCESS;
    };
    // There is no other place to report a closed standard error.
    let _ = writeln!(std::io::stderr(), "gantry: {}", Visible::new(&chain(error.as_ref())));
    match error.downcast_ref::<ExitWith>() {
        Some(with) => ExitCode::from(with.code),
        None if error.is::<BadInput>() => ExitCode::from(2),
        None => ExitCode::FAILURE,
    }
}

/// How logs are written.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(crate) struct LogArgs {
    /// How logs are written to standard error: text for people, json for collectors [env: LOG_FORMAT] [default: text]
    // Not clap's variable: a misspelled value in a manifest must not stop a node's plugin.
    #[arg(
        long,
        global = true,
        value_enum,
        value_name = "FORMAT",
        hide_possible_values = true,
        display_order = 900
    )]
    log_format: Option<LogFormat>,
}

/// The variable for the log format, if the option is not given.
const LOG_FORMAT: &str = "LOG_FORMAT";

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LogFormat {
    /// For people.
    Text,
    /// One JSON object per line, for log collectors.
    Json,
}

impl LogArgs {
    /// Logs from level info on, or by `RUST_LOG`.
    pub(crate) fn start(self) {
        // kube logs an error for every lost connection and a warning for every refused request; Gantry reports these
        // once, with the purpose of the request.
        self.start_at("info,kube_client::client::builder=off,kube_runtime::watcher=error");
    }

    /// Logs warnings only, or by `RUST_LOG`: for commands with output for people.
    pub(crate) fn start_quiet(self) {
        self.start_at("warn,kube_client=off");
    }

    /// Logs nothing but by `RUST_LOG`: the terminal has a picture.
    pub(crate) fn start_silent(self) {
        self.start_at("off");
    }

    fn start_at(self, level: &str) {
        let wanted = std::env::var(EnvFilter::DEFAULT_ENV).ok().filter(|text| !text.is_empty());
        let (filter, refused) = match wanted.as_deref().map(EnvFilter::try_new) {
            Some(Ok(filter)) => (filter, None),
            Some(Err(error)) => (EnvFilter::new(level), Some(error)),
            None => (EnvFilter::new(level), None),
        };
        let colors = std::io::stderr().is_terminal();
        let logs = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_ansi(colors)
            // The internal report of a failed write uses a macro that panics if standard error is closed. A daemon must
            // go on without a reader of its log.
            .log_internal_errors(false)
            .with_writer(LogWriter { colors });
        let given = std::env::var(LOG_FORMAT).ok().filter(|text| !text.is_empty());
        let given = given.filter(|_| self.log_format.is_none());
        let format = given.as_deref().map(|text| LogFormat::from_str(text, false));
        let unknown = format.as_ref().is_some_and(Result::is_err);
        let format = self.log_format.or(format.and_then(Result::ok));
        // A second start in one process would be refused; there is none.
        let started = match format.unwrap_or(LogFormat::Text) {
            LogFormat::Text => logs.try_init(),
            LogFormat::Json => logs.json().flatten_event(true).try_init(),
        };
        debug_assert!(started.is_ok(), "logging is started once");
        if let Some(error) = refused {
            tracing::warn!(%error, value = wanted, using = level, "RUST_LOG is not understood");
        }
        if unknown {
            tracing::warn!(value = given, using = "text", "LOG_FORMAT is not understood; it is text or json");
        }
    }
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
