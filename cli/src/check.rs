//! `gantry plugin --check-config`: prints the effective configuration of a config file, or all its problems. The manifest of a ConfigMap is
//! read as one config file per key; a file may contain several manifests.

use std::io::{self, Write as _};

use anyhow::Context as _;
use gantry_config::{MIG_MANAGERS, Problems, line_of};
use gantry_plugin::Args;
use serde_json::{Map, Value};

use crate::runtime::print;
use crate::visible::Visible;

/// Prints the configuration that the options make as a config file in YAML; warnings go to standard error.
///
/// # Errors
/// All problems, one per line.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let (file, text) = args.config_text()?;
    let maps = config_maps(&text).map_err(|problem| anyhow::anyhow!("{file}: {problem}"))?;
    let printed = if maps.is_empty() { served(args, &file, &text)? } else { all_served(args, &file, &maps)? };
    print(&Visible::new(&printed))
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
    let _ = writeln!(io::stderr(), "gantry: warning: {}", Visible::new(&format!("{source}: {warning}")));
}

fn listed(problems: &Problems) -> anyhow::Error {
    let list: Vec<String> = problems.list.iter().map(|problem| format!("\n  {problem}")).collect();
    anyhow::anyhow!("{}: not served:{}", problems.source, list.concat())
}

/// One ConfigMap of a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ConfigMap {
    name: Option<String>,
    /// The data in the order of keys. The API server accepts only texts.
    data: Vec<(String, Value)>,
}

impl ConfigMap {
    /// Whether one of its texts may be a configuration, possibly a wrong one: anything but a number, a list or a word, and not the
    /// configuration of NVIDIA's MIG manager.
    fn may_configure(&self) -> bool {
        self.data.iter().any(|(_, value)| {
            let read = value.as_str().map(serde_saphyr::from_str::<Value>);
            let of_the_mig_manager = matches!(&read, Some(Ok(read)) if read.get(MIG_MANAGERS).is_some());
            matches!(read, Some(Err(_) | Ok(Value::Object(_) | Value::Null))) && !of_the_mig_manager
        })
    }
}

/// The ConfigMaps in `text`, also in a List; none if it may be a config file.
///
/// # Errors
/// The text is a manifest that cannot be read, or one of another kind.
fn config_maps(text: &str) -> Result<Vec<ConfigMap>, String> {
    let documents: Vec<Value> = match serde_saphyr::from_multiple(text) {
        Ok(documents) => documents,
        Err(error) if has_kind(text) => {
            let line = line_of(&error);
            let place = line.map(|line| format!("line {line}: ")).unwrap_or_default();
            let message = error.without_snippet().to_string();
            // Without the line, which is in front, and without advice for programmers.
            let message = message.split(" at line ").next().unwrap_or_default();
            let message = message.split(", set ").next().unwrap_or_default();
            return Err(format!("{place}the manifest is no YAML: {message}"));
        }
        // The reader of config files reports the problem.
        Err(_) => return Ok(Vec::new()),
    };
    let objects: Vec<&Value> = documents.iter().flat_map(with_items).collect();
    let maps: Vec<ConfigMap> = objects.iter().filter_map(|object| config_map(object)).collect();
    let first = objects.first().and_then(|object| what_else(object));
    if let (true, Some(first)) = (maps.is_empty(), first) {
        let holder = objects.iter().find(|object| text_in(object).is_some());
        return Err(holder.and_then(|object| what_else(object)).unwrap_or(first));
    }
    Ok(maps)
}

/// The objects of a List, or the object itself.
fn with_items(document: &Value) -> Vec<&Value> {
    let items = document["items"].as_array().filter(|items| !items.is_empty());
    let is_list = document["kind"].as_str().is_some_and(|kind| kind.ends_with("List"));
    match items {
        Some(items) if is_list => items.iter().collect(),
        _ => vec![document],
    }
}

fn config_map(object: &Value) -> Option<ConfigMap> {
    (object["kind"] == "ConfigMap").then(|| ConfigMap {
        name: object["metadata"]["name"].as_str().map(str::to_owned),
        data: object["data"].as_object().into_iter().flat_map(pairs).collect(),
    })
}

fn pairs(data: &Map<String, Value>) -> impl Iterator<Item = (String, Value)> {
    data.iter().map(|(key, value)| (key.clone(), value.clone()))
}

/// A description of an object that is no config file; `None` if it may be one.
fn what_else(object: &Value) -> Option<String> {
    let text = text_in(object).map(|place| format!("; give the text under {place}"));
    let map = || named_in(object).map(|name| format!("; give the manifest of the ConfigMap {name}"));
    let advice = text.or_else(map);
    if let Some(kind) = object["kind"].as_str() {
        let advice = advice.unwrap_or_default();
        let article = if kind.starts_with(['A', 'E', 'I', 'O']) { "an" } else { "a" };
        return Some(format!("this is {article} {kind}, no configuration and no ConfigMap{advice}"));
    }
    if object.get("apiVersion").is_some() {
        return Some(
            "this has apiVersion, as Kubernetes' objects do, and no kind; the manifest of a ConfigMap says kind: ConfigMap"
                .to_owned(),
        );
    }
    (advice.is_some() || is_of_a_chart(object)).then(|| {
        let advice = advice.unwrap_or_default();
        format!("these are values of a Helm chart, no configuration{advice}")
    })
}

/// The path of the first configuration text in values of a Helm chart: under `config.map` (NVIDIA's plugin) or `config.data` (the GPU
/// operator), at any depth, also in values that are a text in the object for a chart.
fn text_in(object: &Value) -> Option<String> {
    let here = ["map", "data"].into_iter().find_map(|name| {
        let texts = object["config"][name].as_object()?;
        let (key, _) = texts.iter().find(|(_, text)| text.is_string())?;
        Some(format!("config.{name}.{key}"))
    });
    here.or_else(|| {
        object.as_object()?.iter().find_map(|(key, value)| {
            let values = value.as_str().filter(|_| VALUES.contains(&key.as_str()));
            let values: Option<Value> = values.and_then(|text| serde_saphyr::from_str(text).ok());
            match values {
                Some(values) => Some(format!("{key}, and there under {}", text_in(&values)?)),
                None => Some(format!("{key}.{}", text_in(value)?)),
            }
        })
    })
}

/// Keys of objects for a chart (k3s, Argo CD) with its values as a text.
const VALUES: [&str; 2] = ["valuesContent", "values"];

/// The name of the ConfigMap in values of a chart or in a ClusterPolicy, at any depth.
fn named_in(object: &Value) -> Option<&str> {
    let name =
        object["config"]["name"].as_str().filter(|name| has_the_plugins_config(object) && !name.is_empty());
    name.or_else(|| object.as_object()?.values().find_map(named_in))
}

/// Whether it has a key of NVIDIA's charts that config files do not have.
fn is_of_a_chart(object: &Value) -> bool {
    let keys = ["compatWithCPUManager", "devicePlugin", "nodeSelector", "tolerations", "migManager"];
    has_the_plugins_config(object) || keys.into_iter().any(|key| object.get(key).is_some())
}

/// Whether its `config` has keys of the chart of NVIDIA's plugin.
fn has_the_plugins_config(object: &Value) -> bool {
    let keys = ["map", "default", "fallbackStrategies"];
    keys.into_iter().any(|key| object["config"].get(key).is_some())
}

/// Whether a text that is no YAML looks like a manifest, in YAML or JSON: a config file has no `kind`.
fn has_kind(text: &str) -> bool {
    let is_json = text.trim_start().starts_with('{');
    text.lines().any(|line| line.starts_with("kind:")) || (is_json && text.contains("\"kind\""))
}
