//! `gantry plugin --check-config`: what a config file means, or everything that is wrong with it, before a node sees it.

use std::io::{self, Write as _};

use anyhow::Context as _;
use gantry_plugin::Args;
use gantry_plugin::config::source::SourceError;

/// Prints the configuration that the options make as a config file in YAML; warnings go to standard error.
///
/// # Errors
/// Everything that is wrong, one problem per line.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let loaded = match args.config_now() {
        Ok(loaded) => loaded,
        Err(SourceError::Wrong(problems)) => {
            let list: Vec<String> = problems
                .list
                .iter()
                .map(|problem| format!("\n  {problem}"))
                .collect();
            anyhow::bail!("{}: not served:{}", problems.source, list.concat());
        }
        Err(error) => return Err(error.into()),
    };
    for warning in &loaded.warnings {
        // Nowhere is left to tell that standard error is closed.
        let _ = writeln!(io::stderr(), "gantry: warning: {warning}");
    }
    let text = loaded
        .config
        .to_yaml()
        .context("cannot write the configuration")?;
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("cannot write to standard output"),
    }
}
