//! `gantry plugin --check-config`: prints the effective configuration of a config file, or all its problems. The manifest of a ConfigMap is
//! read as one config file per key; a file may contain several manifests.

mod manifest;

use std::io::{self, Write as _};

use anyhow::Context as _;
use gantry_config::Problems;
use gantry_plugin::Args;

use manifest::{ConfigMap, config_maps};

/// Prints the configuration that the options make as a config file in YAML; warnings go to standard error.
///
/// # Errors
/// All problems, one per line.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let (file, text) = args.config_text()?;
    let maps = config_maps(&text).map_err(|problem| anyhow::anyhow!("{file}: {problem}"))?;
    let printed = if maps.is_empty() { served(args, &file, &text)? } else { all_served(args, &file, &maps)? };
    match io::stdout().lock().write_all(printed.as_bytes()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("cannot write to standard output"),
    }
}

/// The configurations of all ConfigMaps as [`served`] returns them, as one text, or all their problems.
fn all_served(args: &Args, file: &str, maps: &[ConfigMap]) -> anyhow::Result<String> {
    anyhow::ensure!(
        maps.iter().any(|map| !map.data.is_empty()),
        "{file}: the ConfigMap has no configuration in data"
    );
    // ConfigMaps of other programs are left out, unless none can be a configuration.
    let any = maps.iter().any(ConfigMap::may_configure);
    let (mut printed, mut wrong) = (String::new(), Vec::new());
    for map in maps {
        if any && !map.may_configure() {
            let name = map.name.as_deref().unwrap_or("without a name");
            warn(file, &format!("the ConfigMap {name} has no configuration and is left out"));
            continue;
        }
        for (key, text) in &map.data {
            let source = match &map.name {
                Some(name) => format!("{file}, {name}/{key}"),
                None => format!("{file}, {key}"),
            };
            let Some(text) = text.as_str() else {
                wrong.push(format!("{source}: not served: a ConfigMap's data are texts; put it in quotes"));
                continue;
            };
            match served(args, &source, text) {
                Ok(text) => printed.push_str(&format!("---\n# {source}\n{text}")),
                Err(error) => wrong.push(gantry_runtime::chain(error.as_ref())),
            }
        }
    }
    anyhow::ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(printed)
}

/// The effective configuration of `text`, called `source`, as a config file in YAML; warnings go to standard error.
fn served(args: &Args, source: &str, text: &str) -> anyhow::Result<String> {
    let loaded = args.config_of(source, text).map_err(|problems| listed(&problems))?;
    for warning in &loaded.warnings {
        warn(source, warning);
    }
    loaded.config.to_yaml().context("cannot write the configuration")
}

fn warn(source: &str, warning: &dyn std::fmt::Display) {
    // A closed standard error cannot be reported.
    let _ = writeln!(io::stderr(), "gantry: warning: {source}: {warning}");
}

fn listed(problems: &Problems) -> anyhow::Error {
    let list: Vec<String> = problems.list.iter().map(|problem| format!("\n  {problem}")).collect();
    anyhow::anyhow!("{}: not served:{}", problems.source, list.concat())
}
