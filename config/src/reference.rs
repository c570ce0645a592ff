//! The reference for people, made from the table of settings and the file's schema.

use std::fmt::Write;

use serde_json::Value;

use super::settings::{Kind, SETTINGS, Setting};
use super::{schema, tree};

/// What a flag outside the file is, for the reference.
#[derive(Debug, Clone)]
pub struct Flag {
    /// The flag with its dashes.
    pub name: String,
    /// Its variable.
    pub env: Option<String>,
    /// Its default.
    pub default: Option<String>,
    /// What it means.
    pub help: String,
}

/// The reference as Markdown. `flags` are those that are no key of the file.
pub fn reference(flags: &[Flag]) -> String {
    let schema = schema::json_schema();
    let mut text = String::from(HEAD);
    text.push_str("\n## Settings with a flag\n\n");
    text.push_str("| key | flag | environment | default | allowed | meaning |\n|---|---|---|---|---|---|\n");
    for setting in SETTINGS {
        row(
            &mut text,
            &[
                code(setting.key),
                setting
                    .flags
                    .iter()
                    .map(|flag| code(&format!("--{flag}")))
                    .chain(setting.short.map(|short| code(&format!("-{short}"))))
                    .collect::<Vec<_>>()
                    .join(", "),
                setting
                    .env
                    .iter()
                    .map(|name| code(name))
                    .collect::<Vec<_>>()
                    .join(", "),
                setting.default.to_owned(),
                allowed(setting, &schema),
                setting.help.to_owned(),
            ],
        );
    }
    text.push_str("\n## Keys of the file alone\n\n| key | allowed | meaning |\n|---|---|---|\n");
    file_only(&mut text, "", &schema);
    text.push_str("\n## Flags that are no key of the file\n\n");
    text.push_str("| flag | environment | default | meaning |\n|---|---|---|---|\n");
    for flag in flags {
        row(
            &mut text,
            &[
                code(&flag.name),
                flag.env.as_deref().map_or(String::new(), code),
                flag.default.clone().unwrap_or_default(),
                flag.help.clone(),
            ],
        );
    }
    text
}

const HEAD: &str = "\
# Configuration of `gantry plugin`

Made by `cargo xtask generate` from config/src. Do not edit.

Everything NVIDIA's k8s-device-plugin v0.20.0 and its GPU feature discovery read is read here, under the same names: flags,
environment, and the config file (`--config-file`, YAML or JSON, version v1). A flag goes over a variable, a variable over the file,
the file over the default. The file's JSON schema is `plugin-config.schema.json`.

The file is read strictly: a key that nobody knows is an error which names the nearest one. `--lenient-config` makes it a warning, as
with NVIDIA's plugin. `gantry plugin --check-config FILE` prints the configuration in effect, or everything that is wrong;
the file may be a ConfigMap's manifest, each key of which is read.
";

/// Adds the leaves of `schema` that have no flag.
fn file_only(text: &mut String, at: &str, schema: &Value) {
    let Some(properties) = schema::properties(schema) else {
        return;
    };
    for (key, schema) in properties {
        let at = tree::below(at, key);
        if SETTINGS.iter().any(|setting| setting.key == at) {
            continue;
        }
        let items = schema::items(schema).filter(|items| schema::properties(items).is_some());
        let inner = items.unwrap_or(schema);
        let is_section = schema::properties(inner).is_some();
        let at = if items.is_some() { format!("{at}[]") } else { at };
        if !is_section || items.is_some() {
            let meaning = schema
                .get("description")
                .and_then(Value::as_str)
                .unwrap_or_default();
            row(text, &[code(&at), form(schema), meaning.replace('\n', " ")]);
        }
        if is_section {
            file_only(text, &at, inner);
        }
    }
}

fn allowed(setting: &Setting, schema: &Value) -> String {
    match setting.kind {
        Kind::Bool => "true, false".to_owned(),
        _ => form(find(schema, setting.key)),
    }
}

fn find<'a>(schema: &'a Value, key: &str) -> &'a Value {
    key.split('.').fold(schema, |schema, name| {
        schema::properties(schema)
            .and_then(|properties| properties.get(name))
            .unwrap_or(&Value::Null)
    })
}

/// What a schema allows, in a few words.
fn form(schema: &Value) -> String {
    let words = schema::words(schema, &[]);
    if !words.is_empty() {
        return words.join(", ");
    }
    if let Some(alternatives) = schema.get("anyOf").and_then(Value::as_array) {
        let forms: Vec<String> = alternatives
            .iter()
            .filter(|schema| schema.get("type").and_then(Value::as_str) != Some("null"))
            .map(form)
            .collect();
        return forms.join("; or ");
    }
    if let Some(only) = schema.get("const") {
        return only.to_string();
    }
    let types = match schema.get("type") {
        Some(Value::Array(types)) => types.iter().filter_map(Value::as_str).collect(),
        Some(Value::String(only)) => vec![only.as_str()],
        _ => Vec::new(),
    };
    match types.first().copied() {
        Some("array") => match schema.get("items") {
            Some(items) if schema::properties(items).is_none() => format!("list of: {}", form(items)),
            _ => "list".to_owned(),
        },
        Some("integer") => {
            let bound = |name: &str| schema.get(name).and_then(Value::as_u64);
            match (bound("minimum"), bound("maximum")) {
                (Some(least), Some(most)) => format!("{least} to {most}"),
                (Some(least), None) => format!("{least} or more"),
                _ => "whole number".to_owned(),
            }
        }
        Some("boolean") => "true, false".to_owned(),
        Some("string") => "text".to_owned(),
        _ => "keys".to_owned(),
    }
}

fn code(text: &str) -> String {
    format!("`{text}`")
}

fn row(text: &mut String, cells: &[String]) {
    for cell in cells {
        // Writing to a String cannot fail.
        let _ = write!(text, "| {} ", cell.replace('|', "\\|"));
    }
    text.push_str("|\n");
}
