//! Pages of the reference that follow from tables of the code: Xids, and the reasons of Events and conditions.

use std::fmt::Write as _;
use std::process::Command;

use anyhow::{Context as _, Result};
use gantry_api::{ConditionType, Reason};
use gantry_plugin::health::{Class, Table, Xid};
use serde_json::{Value, json};

use crate::ci;
use crate::run::{output, root, target};
use crate::runbooks::Sections;

/// docs/reference/cli.md, by the program.
pub(crate) fn command_line() -> Result<String> {
    ci::build()?;
    // Help shows the values of variables.
    output(Command::new(target()?.join("debug/gantry")).env_clear().args(["man", "--markdown"]))
}

/// Nodes of the picture: name, machine file of the simulator, and pods with the GPUs that they hold.
type PictureNode = (&'static str, &'static str, &'static [(&'static str, &'static [usize])]);
const PICTURE: [PictureNode; 3] = [
    ("dgx1", "dgx1-v100.yaml", &[("quad", &[0, 1, 2, 3]), ("single", &[4])]),
    ("hgx", "hgx-h100.yaml", &[("train-0", &[0, 1, 2, 3, 4, 5, 6, 7])]),
    ("desk", "workstation-2x.yaml", &[("pair", &[0, 1])]),
];

/// docs/pictures/map.svg: `gantry map -o svg` of a cluster of three simulated machines.
pub(crate) fn picture() -> Result<String> {
    let mut items = Vec::new();
    for (name, machine, pods) in PICTURE {
        let path = root().join("simulator/machines").join(machine);
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let machine: Value = serde_saphyr::from_str(&text).with_context(|| path.display().to_string())?;
        let holders: Vec<Value> = pods
            .iter()
            .map(|(pod, gpus)| {
                let ids: Vec<&Value> = gpus.iter().map(|gpu| &machine["gpus"][*gpu]["uuid"]).collect();
                json!({"namespace": "default", "pod": pod, "resource": "nvidia.com/gpu", "devices": ids,
                    "provenance": "PodResources"})
            })
            .collect();
        items
            .push(json!({"apiVersion": "gantry.dev/v1alpha1", "kind": "GpuNode", "metadata": {"name": name},
            "spec": {"machine": machine}, "status": {"holders": holders}}));
    }
    let file = target()?.join("picture.json");
    std::fs::write(&file, json!({"kind": "List", "items": items}).to_string()).context("picture.json")?;
    let program = target()?.join("debug/gantry");
    output(Command::new(program).env_clear().args(["map", "-o", "svg", "--from"]).arg(file))
}

/// docs/xids.md.
pub(crate) fn xids() -> String {
    let table = Table::built_in();
    let mut page = "\
# Xids

Made by `cargo xtask generate` from `api/data/xid.csv`. Do not edit.

An Xid is an error that the NVIDIA driver reports of a GPU. The class decides what Gantry does ([health.md](health.md));
the response is the operator's, by the immediate action of NVIDIA's catalog. `gantry_plugin_xids_total` counts every Xid,
also those without effect. Xids that the catalog lists as unused, and those that are unknown here, count as `resettable`.

| class | what Gantry does |
|---|---|
| `application` | counts it; the GPU stays healthy |
| `link` | the links that went down decide; with a reset as the response the GPU is unhealthy until then |
| `mig-instance` | the MIG devices of the instance that the event names are unhealthy; without one, the GPU |
| `resettable` | the GPU is unhealthy until a reset is proved |
| `fatal` | the GPU is unhealthy until a reset or a reboot is proved |

| Xid | meaning | class | response |
|---|---|---|---|
"
    .to_owned();
    let known = |xid: &&Xid| !xid.meaning.starts_with("unexpected");
    for xid in table.all().iter().filter(known) {
        let class = match xid.class {
            Class::Link { reset: true } => "link, needs a reset".to_owned(),
            class => class.to_string(),
        };
        // Writing into a String cannot fail.
        let _ = writeln!(page, "| {} | {} | {class} | {} |", xid.code, cell(xid.meaning), xid.response);
    }
    page
}

/// docs/reasons.md.
pub(crate) fn reasons() -> Result<String> {
    let sections = Sections::read()?;
    let mut page = "\
# Reasons and conditions

Made by `cargo xtask generate` from `api/src/reason.rs` and `api/src/condition.rs`. Do not edit.

Events and conditions of Gantry, and the status of a `Gang`, have one of these reasons. A reason is stable: scripts and
alerts may compare it. The message beside it is for people and changes. Each name leads to its runbook: what it means,
what to look at, and what to do. [explain.md](explain.md) describes the sources of reasons.

## Reasons

| reason | meaning |
|---|---|
"
    .to_owned();
    for reason in Reason::ALL {
        let section = sections.of_reason(*reason);
        let _ = writeln!(page, "| [`{reason}`]({section}) | {} |", cell(reason.text()));
    }
    page.push_str("\n## Conditions\n\n| condition | of a | meaning while it is `True` |\n|---|---|---|\n");
    for condition in ConditionType::ALL {
        let (section, kind) = (sections.of_condition(*condition), condition.kind());
        let _ = writeln!(page, "| [`{condition}`]({section}) | {kind} | {} |", cell(condition.text()));
    }
    Ok(page)
}

/// docs/reference/annotations.md: the constants of `api/src/names.rs` that are annotations, with their comments.
pub(crate) fn annotations() -> Result<String> {
    let path = root().join("api/src/names.rs");
    let source = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let mut page = "\
# Annotations

Made by `cargo xtask generate` from `api/src/names.rs`. Do not edit. [gangs.md](../gangs.md#annotations) and
[requests.md](../requests.md) have the allowed values. On a pod they are read from its own metadata: write them into the
pod template of its controller.

| annotation | meaning |
|---|---|
"
    .to_owned();
    let mut comment = String::new();
    for line in source.lines().map(str::trim) {
        if let Some(text) = line.strip_prefix("///") {
            comment.push_str(text);
            continue;
        }
        let name = line.split_once("_ANNOTATION: &str = \"").and_then(|(_, rest)| rest.split('"').next());
        if let Some(name) = name {
            let _ = writeln!(page, "| `{name}` | {} |", cell(linked(comment.trim()).as_str()));
        }
        comment.clear();
    }
    Ok(page)
}

/// A comment without links to items: [`NAME`](path) and [`NAME`] are `NAME`.
fn linked(comment: &str) -> String {
    let mut text = String::new();
    for part in comment.split("[`") {
        match part.split_once("`]") {
            Some((name, rest)) => {
                let rest =
                    rest.strip_prefix('(').and_then(|rest| rest.split_once(')')).map_or(rest, |it| it.1);
                let name = name.trim_end_matches("_ANNOTATION").to_lowercase().replace('_', "-");
                text.push_str(&format!("`{name}`{rest}"));
            }
            None => text.push_str(part),
        }
    }
    text
}

/// docs/reference/crds.md: the fields of a custom resource's schema, with their descriptions.
pub(crate) fn custom_resources(definitions: &[Value]) -> String {
    let mut page = "\
# Custom resources

Made by `cargo xtask generate` from `api/src`. Do not edit. `kubectl explain gpunodes.spec` shows the same. Both kinds are
of `gantry.dev/v1alpha1`.
"
    .to_owned();
    for definition in definitions {
        let kind = definition["spec"]["names"]["kind"].as_str().unwrap_or_default();
        let schema = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
        let _ = writeln!(page, "\n## {kind}");
        page.push_str("\n| field | type | meaning |\n|---|---|---|\n");
        for part in ["spec", "status"] {
            fields(&mut page, part, &schema["properties"][part]);
        }
    }
    page
}

fn fields(page: &mut String, path: &str, schema: &Value) {
    let kind = schema["type"].as_str().unwrap_or("any");
    let allowed = schema["enum"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let allowed: Vec<String> = allowed.map(|word| format!("`{word}`")).collect();
    let allowed = if allowed.is_empty() { String::new() } else { format!(" One of {}.", allowed.join(", ")) };
    let _ = writeln!(page, "| `{path}` | {kind} | {}{} |", one_line(&schema["description"]), cell(&allowed));
    let parts = [("", schema), ("[]", &schema["items"]), (".*", &schema["additionalProperties"])];
    for (suffix, part) in parts {
        for (name, schema) in part["properties"].as_object().into_iter().flatten() {
            fields(page, &format!("{path}{suffix}.{name}"), schema);
        }
    }
}

/// A description as a table's cell.
fn one_line(description: &Value) -> String {
    cell(&description.as_str().unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" "))
}

/// Text of a table's cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_and_condition_leads_to_its_section() {
        let page = reasons().unwrap();
        for reason in Reason::ALL {
            assert!(page.contains(&format!("\n| [`{reason}`](runbooks/")), "{reason}");
        }
        for condition in ConditionType::ALL {
            let row = format!("| {} | {} |\n", condition.kind(), condition.text());
            assert!(page.contains(&row), "{condition}");
        }
        assert!(page.contains("| [`Spares`](runbooks/gangs.md#condition-spares"), "{page}");
    }

    #[test]
    fn every_annotation_has_a_row_without_links() {
        let page = annotations().unwrap();
        for name in ["gang-min", "grant", "lift-quarantine", "required-link"] {
            assert!(page.contains(&format!("| `gantry.dev/{name}` | ")), "{name}");
        }
        assert!(!page.contains("[`") && !page.contains("ANNOTATION"), "{page}");
    }

    #[test]
    fn fields_of_lists_and_maps_have_rows() {
        let schema = serde_json::json!({"type": "object", "description": "all", "properties": {
            "list": {"type": "array", "items": {"properties": {"name": {"type": "string", "enum": ["a", "b"]}}}},
            "map": {"type": "object", "additionalProperties": {"properties": {"size": {"type": "integer"}}}},
        }});
        let mut page = String::new();
        fields(&mut page, "spec", &schema);
        assert_eq!(
            page,
            "| `spec` | object | all |\n| `spec.list` | array |  |\n\
             | `spec.list[].name` | string |  One of `a`, `b`. |\n\
             | `spec.map` | object |  |\n| `spec.map.*.size` | integer |  |\n"
        );
    }

    #[test]
    fn every_known_xid_has_a_row_with_a_response() {
        let page = xids();
        for (xid, class, response) in [
            (79, "fatal", "reboot"),
            (13, "application", "none"),
            (48, "mig-instance", "reset"),
            (74, "link", "links"),
        ] {
            let row = page.lines().find(|line| line.starts_with(&format!("| {xid} |"))).expect("a row");
            assert!(row.contains(&format!("| {class} |")) && row.contains(response), "{row}");
        }
        assert!(Table::built_in().all().iter().all(|xid| !xid.response.is_empty()));
    }
}
