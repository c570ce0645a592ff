//! `gantry plugin --check-config`: what a config file means, or everything that is wrong with it, before a node sees it. A ConfigMap's
//! manifest, which is what repositories hold, is as many config files as it has keys.

use std::collections::BTreeMap;
use std::io::{self, Write as _};

use anyhow::Context as _;
use gantry_plugin::Args;
use gantry_plugin::config::Problems;
use serde::Deserialize;

/// Prints the configuration that the options make as a config file in YAML; warnings go to standard error.
///
/// # Errors
/// Everything that is wrong, one problem per line.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let (file, text) = args.config_text()?;
    let printed = match configs(&text) {
        None => served(args, &file, &text)?,
        Some(configs) => all_served(args, &file, &configs)?,
    };
    match io::stdout().lock().write_all(printed.as_bytes()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("cannot write to standard output"),
    }
}

/// Each of several configurations as [`served`] gives it, as one text, or everything that is wrong with any of them.
fn all_served(args: &Args, file: &str, configs: &BTreeMap<String, String>) -> anyhow::Result<String> {
    anyhow::ensure!(
        !configs.is_empty(),
        "{file}: the ConfigMap has no configuration in data"
    );
    let (mut printed, mut wrong) = (String::new(), Vec::new());
    for (key, text) in configs {
        let source = format!("{file}, {key}");
        match served(args, &source, text) {
            Ok(text) => printed.push_str(&format!("---\n# {source}\n{text}")),
            Err(error) => wrong.push(format!("{error:#}")),
        }
    }
    anyhow::ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(printed)
}

/// What `text`, called `source`, means, as a config file in YAML; warnings go to standard error.
fn served(args: &Args, source: &str, text: &str) -> anyhow::Result<String> {
    let loaded = args.config_of(source, text).map_err(|problems| told(&problems))?;
    for warning in &loaded.warnings {
        // Nowhere is left to tell that standard error is closed.
        let _ = writeln!(io::stderr(), "gantry: warning: {source}: {warning}");
    }
    loaded.config.to_yaml().context("cannot write the configuration")
}

fn told(problems: &Problems) -> anyhow::Error {
    let list: Vec<String> = problems
        .list
        .iter()
        .map(|problem| format!("\n  {problem}"))
        .collect();
    anyhow::anyhow!("{}: not served:{}", problems.source, list.concat())
}

/// What makes a document a ConfigMap's manifest.
#[derive(Deserialize)]
struct Manifest {
    #[serde(default)]
    kind: Option<String>,
    #[serde(default)]
    data: Option<BTreeMap<String, String>>,
}

/// The configurations by their keys, if this is the manifest of a ConfigMap, alone or among others; a config file has no `kind`.
fn configs(text: &str) -> Option<BTreeMap<String, String>> {
    let manifests: Vec<Manifest> = serde_saphyr::from_multiple(text).ok()?;
    let mut maps = manifests
        .into_iter()
        .filter(|manifest| manifest.kind.as_deref() == Some("ConfigMap"))
        .peekable();
    maps.peek()?;
    Some(maps.filter_map(|map| map.data).flatten().collect())
}
