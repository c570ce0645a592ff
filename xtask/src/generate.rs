//! Generated files: the custom resource definitions, the schema and the reference of the plugin's configuration, the
//! schema of the chart's values, and `manifests/`, which the real helm renders from the chart. They are checked in, so
//! that operators need no Rust and no helm; CI checks that they are up to date.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};
use gantry_api::{Gang, GpuNode};
use kube::CustomResourceExt;
use serde_json::Value;

use crate::run::{output, root};

const NOTE: &str = "# Made by `cargo xtask generate` from api/src. Do not edit.\n";
const OF_THE_CHART: &str = "# Made by `cargo xtask generate` from charts/gantry. Do not edit.\n";

/// A network that stands for one in the values below, and the word that the manifests have in its place.
const NETWORK: (&str, &str) = ("192.0.2.0/24", "CONTROL-PLANE-CIDR");

/// The version of Kubernetes that the manifests are rendered for.
const KUBERNETES: &str = "1.37.1";

/// Values of the chart, and the templates that are rendered with them as files of `manifests/`.
const MANIFESTS: [(&str, &[&str]); 9] = [
    (
        "scheduler.mode=existing,extender.restart=true",
        &[
            "guard.yaml",
            "plugin.yaml",
            "plugin-mig.yaml",
            "plugin-pods.yaml",
            "labels.yaml",
            "extender.yaml",
            "extender-node.yaml",
            "extender-owners.yaml",
            "extender-preempt.yaml",
            "extender-restart.yaml",
            "network-policies.yaml",
            "operator.yaml",
        ],
    ),
    (
        "scheduler.mode=existing,scheduler.existing.placement=service,\
         scheduler.existing.service.controlPlaneCIDR=192.0.2.0/24",
        &["extender-service.yaml", "extender-service-network.yaml"],
    ),
    ("scheduler.mode=existing,extender.gates=true", &["gates.yaml"]),
    (
        "scheduler.mode=existing,extender.remediationRules=gantry-remediation,extender.remediationReset=true",
        &["extender-remediation.yaml", "remediation-reset.yaml"],
    ),
    ("scheduler.mode=existing,extender.migDrain=true", &["extender-mig-drain.yaml"]),
    ("scheduler.mode=own", &["scheduler.yaml"]),
    ("plugin.labels=node", &["labels-node.yaml"]),
    ("plugin.migLayouts=gantry-mig-layouts", &["mig-layouts.yaml"]),
    ("plugin.existingConfigMap=gantry-plugin-config", &["plugin-config.yaml"]),
];

/// Folders of `manifests/overlays`, and the `scheduler.mode` of each. The objects of the first are in all shapes.
const OVERLAYS: [(&str, &str); 3] = [("plugin-alone", "none"), ("own", "own"), ("existing", "existing")];

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
    let definitions = [serde_json::to_value(GpuNode::crd())?, serde_json::to_value(Gang::crd())?];
    for (number, definition) in definitions.iter().enumerate() {
        if number > 0 {
            crds.push_str("---\n");
        }
        let text = serde_saphyr::to_string(definition);
        crds.push_str(&text.context("cannot write the CRD")?);
    }
    let config = serde_json::to_value(gantry_config::json_schema())
        .context("cannot write the schema of the plugin's configuration")?;
    let command_line = crate::reference::command_line()?;
    let schema = values_schema(config.clone(), &command_line)?;
    let mut files = vec![
        (root().join("manifests/crds.yaml"), crds.clone()),
        (root().join("charts/gantry/files/crds.yaml"), crds),
        (root().join("docs/plugin-config.schema.json"), format!("{config:#}\n")),
        (root().join("docs/plugin-config.md"), gantry_plugin::args::reference()),
        (root().join("docs/reasons.md"), crate::reference::reasons()?),
        (root().join("docs/xids.md"), crate::reference::xids()),
        (root().join("docs/reference/crds.md"), crate::reference::custom_resources(&definitions)),
        (root().join("docs/reference/annotations.md"), crate::reference::annotations()?),
        (root().join("docs/reference/cli.md"), command_line),
        (root().join("docs/pictures/map.svg"), crate::reference::picture()?),
        schema,
    ];
    for (values, templates) in MANIFESTS {
        let rendered = rendered(values, templates)?;
        for name in templates {
            let text = rendered.get(*name).with_context(|| format!("the chart renders no {name}"))?;
            let text = text.replace(NETWORK.0, NETWORK.1);
            files.push((root().join("manifests").join(name), format!("{OF_THE_CHART}{text}")));
        }
    }
    files.extend(overlays()?);
    Ok(files)
}

/// The objects of each shape for kustomize: all of the first, and what each of the others adds to it.
fn overlays() -> Result<Vec<(PathBuf, String)>> {
    let namespace = root().join("manifests/namespace.yaml");
    let namespace = std::fs::read_to_string(&namespace).with_context(|| namespace.display().to_string())?;
    let mut first: Vec<String> = Vec::new();
    let mut files = Vec::new();
    for (folder, mode) in OVERLAYS {
        // The policy of keeping CRDs is an annotation for helm.
        let rendered = documents(&format!("crds.keep=false,scheduler.mode={mode}"), &[])?;
        let own: Vec<String> =
            rendered.into_iter().map(|(_, text)| text).filter(|text| !first.contains(text)).collect();
        let before = if first.is_empty() { format!("{namespace}---\n") } else { String::new() };
        let path = root().join("manifests/overlays").join(folder).join("gantry.yaml");
        files.push((path, format!("{OF_THE_CHART}{before}{}", own.join("---\n"))));
        if first.is_empty() {
            first = own;
        }
    }
    Ok(files)
}

/// The schema of the chart's values, which is written by hand, with that of the plugin's configuration and with the names
/// of both daemons' options, because a daemon does not start with an option that it does not have.
fn values_schema(mut config: Value, command_line: &str) -> Result<(PathBuf, String)> {
    let path = root().join("charts/gantry/values.schema.json");
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut schema: Value = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
    if let Some(config) = config.as_object_mut() {
        config.remove("$schema");
    }
    schema["$defs"]["pluginConfig"] = config;
    for daemon in ["plugin", "extender"] {
        let items = &mut schema["properties"][daemon]["properties"]["extraArgs"]["items"];
        items["pattern"] = options(command_line, daemon)?.into();
    }
    Ok((path, format!("{schema:#}\n")))
}

/// The pattern of the options of a daemon, as the reference lists them: each with a value after `=`, or without.
fn options(command_line: &str, daemon: &str) -> Result<String> {
    let section = command_line.split(&format!("\n## gantry {daemon}\n")).nth(1);
    let section = section.and_then(|text| text.split("\n## ").next()).context("a command is not listed")?;
    let lines = section.lines().filter_map(|line| match line.strip_prefix("      --") {
        Some(option) => Some(option),
        // `  -o, --name`.
        None => Some(line.strip_prefix("  -")?.split_once(", --")?.1),
    });
    // The name ends where its value begins: `--name <VALUE>`, `--name[=<true|false>]`.
    let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let names = lines.map(|line| line.split(|c| !is_name(c)).next().unwrap_or_default());
    let names: BTreeSet<&str> = names.filter(|name| *name != "help").collect();
    anyhow::ensure!(!names.is_empty(), "gantry {daemon} has no options");
    Ok(format!("^--({})(=.*)?$", Vec::from_iter(names).join("|")))
}

/// The text of each template with these values, by helm. Comments are kept; objects are in helm's order of
/// installation.
fn rendered(values: &str, templates: &[&str]) -> Result<BTreeMap<String, String>> {
    let mut files: BTreeMap<String, String> = BTreeMap::new();
    for (name, text) in documents(values, templates)? {
        let file = files.entry(name).or_default();
        if !file.is_empty() {
            file.push_str("---\n");
        }
        file.push_str(&text);
    }
    Ok(files)
}

/// The objects that helm renders from these templates, or from all: each with the name of its template.
fn documents(values: &str, templates: &[&str]) -> Result<Vec<(String, String)>> {
    let chart = root().join("charts/gantry");
    let mut helm = Command::new("go");
    helm.args(["tool", "helm.sh/helm/v3/cmd/helm", "template", "gantry"])
        .arg(&chart)
        .args(["--namespace", "gantry-system", "--kube-version", KUBERNETES, "--set", values])
        .current_dir(root().join("tests/components/helm"))
        // As the end-to-end tests build it, so that it is built once.
        .envs([("GOEXPERIMENT", "nojsonv2"), ("GOTOOLCHAIN", "local"), ("CGO_ENABLED", "0")]);
    for name in templates {
        helm.args(["--show-only", &format!("templates/{name}")]);
    }
    let text = output(&mut helm).context("manifests/ is rendered by helm, which needs Go")?;
    let documents = text.split("---\n# Source: gantry/templates/").skip(1);
    let named = documents.map(|document| {
        let (name, text) = document.split_once('\n').context("a rendered document has no text")?;
        Ok((name.to_owned(), format!("{}\n", text.trim_end())))
    });
    named.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_those_of_the_section() {
        let reference = "# x\n\n## gantry a\n\n```text\nOptions:\n      --two <B>\n          Text, --not-one\n      \
                         --one\n      --switch[=<true|false>]\n  -f, --file <C>\n  -h, --help\n```\n\n## gantry b\n\n```text\n      --three\n```\n";
        assert_eq!(options(reference, "a").unwrap(), "^--(file|one|switch|two)(=.*)?$");
        assert!(options(reference, "c").is_err());
    }
}
