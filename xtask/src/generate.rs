//! Generated files: the custom resource definitions, the schema and the reference of the plugin's configuration. They
//! are checked in, so that operators need no Rust; CI checks that they are up to date.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use gantry_api::{Gang, GpuNode};
use kube::CustomResourceExt;

use crate::run::root;

const NOTE: &str = "# Made by `cargo xtask generate` from api/src. Do not edit.\n";

/// Writes every generated file; with `check`, changes nothing and fails if one differs.
pub(crate) fn run(check: bool) -> Result<()> {
    let mut stale = Vec::new();
    for (path, content) in files()? {
        let found = std::fs::read_to_string(&path).unwrap_or_default();
        if found == content {
            continue;
        }
        if check {
            stale.push(path.display().to_string());
        } else {
            std::fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))?;
            println!("wrote {}", path.display());
        }
    }
    if !stale.is_empty() {
        bail!("{} is not what the code says; run `cargo xtask generate` and commit", stale.join(", "));
    }
    println!("generated files are up to date");
    Ok(())
}

fn files() -> Result<Vec<(PathBuf, String)>> {
    let mut crds = NOTE.to_owned();
    for (number, definition) in [GpuNode::crd(), Gang::crd()].iter().enumerate() {
        if number > 0 {
            crds.push_str("---\n");
        }
        let text = serde_saphyr::to_string(&serde_json::to_value(definition)?);
        crds.push_str(&text.context("cannot write the CRD")?);
    }
    let schema = serde_json::to_string_pretty(&gantry_config::json_schema())
        .context("cannot write the schema of the plugin's configuration")?;
    Ok(vec![
        (root().join("manifests/crds.yaml"), crds),
        (root().join("docs/plugin-config.schema.json"), format!("{schema}\n")),
        (root().join("docs/plugin-config.md"), gantry_plugin::args::reference()),
    ])
}
