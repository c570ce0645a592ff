//! Logging: to standard error, as text for people or as JSON for collectors.

use std::io::IsTerminal;

use clap::ValueEnum;
use tracing_subscriber::EnvFilter;

/// How logs are written.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(crate) struct Args {
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
    log_format: Option<Format>,
}

/// The variable for the log format, if the option is not given.
const FORMAT: &str = "LOG_FORMAT";

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// For people.
    Text,
    /// One JSON object per line, for log collectors.
    Json,
}

impl Args {
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

    fn start_at(self, level: &str) {
        let wanted = std::env::var(EnvFilter::DEFAULT_ENV).ok().filter(|text| !text.is_empty());
        let (filter, refused) = match wanted.as_deref().map(EnvFilter::try_new) {
            Some(Ok(filter)) => (filter, None),
            Some(Err(error)) => (EnvFilter::new(level), Some(error)),
            None => (EnvFilter::new(level), None),
        };
        let logs = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_ansi(std::io::stderr().is_terminal())
            // The internal report of a failed write uses a macro that panics if standard error is closed. A daemon must
            // go on without a reader of its log.
            .log_internal_errors(false)
            .with_writer(std::io::stderr);
        let said = std::env::var(FORMAT).ok().filter(|text| !text.is_empty());
        let said = said.filter(|_| self.log_format.is_none());
        let format = said.as_deref().map(|text| Format::from_str(text, false));
        let unknown = format.as_ref().is_some_and(Result::is_err);
        let format = self.log_format.or(format.and_then(Result::ok));
        // A second start in one process would be refused; there is none.
        let started = match format.unwrap_or(Format::Text) {
            Format::Text => logs.try_init(),
            Format::Json => logs.json().flatten_event(true).try_init(),
        };
        debug_assert!(started.is_ok(), "logging is started once");
        if let Some(error) = refused {
            tracing::warn!(%error, value = wanted, using = level, "RUST_LOG is not understood");
        }
        if unknown {
            tracing::warn!(value = said, using = "text", "LOG_FORMAT is not understood; it is text or json");
        }
    }
}
