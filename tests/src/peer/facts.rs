//! What a plugin does towards kubelet, written down as plain facts, so that two plugins can be held side by side: what
//! may differ from run to run (order, random parts of names) is taken out. It judges nothing but equality.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use gantry_proto::deviceplugin::{ContainerAllocateResponse, DevicePluginOptions};
use serde_json::Value;

use super::kubelet::{Kubelet, Served};
use super::node::{Node, Plugin};
use super::setting::Setting;

/// How long a registration may take. It takes milliseconds; this is for a machine under load.
const REGISTRATION: Duration = Duration::from_secs(20);

/// Item and value, e.g. `nvidia.com/gpu socket` and `nvidia-gpu.sock`.
pub type Facts = BTreeMap<String, String>;

/// One item on which two plugins differ; `None` where one has no such item.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The item.
    pub item: String,
    /// What Gantry's plugin does.
    pub ours: Option<String>,
    /// What NVIDIA's does.
    pub theirs: Option<String>,
}

/// A difference that is meant to be.
#[derive(Debug, Clone, Copy)]
pub struct Deliberate {
    /// The case it is about; `*` stands for anything, as in the other patterns.
    pub case: &'static str,
    /// The item.
    pub item: &'static str,
    /// Ours. `None`: no such item.
    pub ours: Option<&'static str>,
    /// Why.
    pub reason: &'static str,
}

/// What they differ in, by item.
pub fn differences(ours: &Facts, theirs: &Facts) -> Vec<Difference> {
    let items = ours.keys().chain(theirs.keys());
    let items: BTreeSet<&String> = items.collect();
    let difference = |item: &String| {
        let (our, their) = (ours.get(item), theirs.get(item));
        (our != their).then(|| Difference { item: item.clone(), ours: our.cloned(), theirs: their.cloned() })
    };
    items.into_iter().filter_map(difference).collect()
}

/// The differences of a case that no row explains, and the numbers of the rows that explain one.
pub fn unexplained(
    case: &str,
    differences: Vec<Difference>,
    rows: &[Deliberate],
) -> (Vec<Difference>, Vec<usize>) {
    let mut used = Vec::new();
    let mut left = Vec::new();
    for difference in differences {
        match rows.iter().position(|row| row.explains(case, &difference)) {
            Some(row) => used.push(row),
            None => left.push(difference),
        }
    }
    used.sort_unstable();
    used.dedup();
    (left, used)
}

impl Deliberate {
    fn explains(&self, case: &str, difference: &Difference) -> bool {
        let value = match (self.ours, &difference.ours) {
            (None, None) => true,
            (Some(pattern), Some(value)) => matches(pattern, value),
            _ => false,
        };
        value && matches(self.item, &difference.item) && matches(self.case, case)
    }
}

/// Whether a text is of a pattern in which `*` stands for anything.
fn matches(pattern: &str, text: &str) -> bool {
    let Some((head, tail)) = pattern.split_once('*') else {
        return pattern == text;
    };
    text.strip_prefix(head).is_some_and(|rest| {
        let starts = rest.char_indices().map(|(at, _)| at).chain([rest.len()]);
        starts.into_iter().any(|at| matches(tail, &rest[at..]))
    })
}

/// Runs a plugin on a node under a setting and writes down what it does, until `resources` are registered or it ends.
///
/// # Errors
/// It neither registers that many resources nor ends, or a call fails in a way that is no answer.
pub async fn observe(node: &Node, plugin: &Plugin, setting: &Setting, resources: usize) -> Result<Facts> {
    let mut kubelet = Kubelet::start(&node.plugins())?;
    let mut process = node.start(plugin, setting)?;
    let mut facts = Facts::new();
    let mut registered = 0;
    loop {
        if registered == resources.max(1) {
            break;
        }
        let end = Instant::now() + REGISTRATION;
        while !kubelet.is_called() && process.lives()? && Instant::now() < end {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        if !kubelet.is_called() && process.lives()? {
            // What has not come by now shows as missing.
            break;
        }
        if !process.lives()? {
            let status = process.wait()?;
            facts.insert("exit".to_owned(), status.success().to_string());
            return Ok(facts);
        }
        let registration = kubelet.registration().await.with_context(|| process.log())?;
        let request = &registration.request;
        let name = &request.resource_name;
        facts.insert(format!("{name} version"), request.version.clone());
        facts.insert(format!("{name} socket"), request.endpoint.clone());
        facts.insert(format!("{name} options"), options(request.options.as_ref()));
        let served = kubelet.dial(request).await.with_context(|| process.log())?;
        resource(&mut facts, &served).await.with_context(|| process.log())?;
        registered += 1;
    }
    specifications(&mut facts, &node.cdi())?;
    Ok(facts)
}

fn options(options: Option<&DevicePluginOptions>) -> String {
    let Some(options) = options else {
        return "none".to_owned();
    };
    let (start, preferred) = (options.pre_start_required, options.get_preferred_allocation_available);
    format!("pre-start {start}, preferred {preferred}")
}

/// What one resource shows: options, list, and the answers for one device, two, all and an unknown one.
async fn resource(facts: &mut Facts, served: &Served) -> Result<()> {
    let name = &served.resource;
    facts.insert(format!("{name} options, asked"), options(Some(&served.options().await?)));
    let list = served.list().await?;
    for (id, (healthy, numa)) in &list {
        facts.insert(format!("{name} device {id}"), format!("healthy {healthy}, numa {numa:?}"));
    }
    let ids: Vec<String> = list.into_keys().collect();
    let unknown = ["GPU-unknown".to_owned()];
    let two = &ids[..ids.len().min(2)];
    for (label, some) in [("one", &ids[..1]), ("two", two), ("all", &ids), ("unknown", &unknown)] {
        let item = format!("{name} allocate {label}");
        match served.allocate(some).await {
            Ok(answer) => allocated(facts, &item, answer),
            Err(status) => drop(facts.insert(format!("{item}: refused"), status.message().to_owned())),
        }
    }
    for size in 1..=ids.len().min(2) {
        let preferred = served.prefer(&ids, &ids[..1], size).await?;
        let kept = preferred.contains(&ids[0]);
        facts.insert(
            format!("{name} prefer {size}"),
            format!("{} devices, the one that must be among them: {kept}", preferred.len()),
        );
    }
    Ok(())
}

fn allocated(facts: &mut Facts, item: &str, answer: ContainerAllocateResponse) {
    for (key, value) in answer.envs {
        facts.insert(format!("{item}: env {key}"), sorted(value.split(',')));
    }
    for (key, value) in answer.annotations {
        // What follows is random or counted.
        let prefix = key.split('_').next().unwrap_or_default();
        facts.insert(format!("{item}: annotation key"), prefix.to_owned());
        let names = unqualified(facts, value.split(','));
        facts.insert(format!("{item}: annotation"), names);
    }
    let names = answer.cdi_devices.iter().map(|device| device.name.as_str());
    let names = unqualified(facts, names);
    let mounts = answer.mounts.iter().map(|mount| {
        format!("{} on {}, read-only {}", mount.host_path, mount.container_path, mount.read_only)
    });
    let nodes = answer
        .devices
        .iter()
        .map(|node| format!("{} as {} {}", node.host_path, node.container_path, node.permissions));
    let nodes: BTreeSet<String> = nodes.collect();
    if nodes.len() < answer.devices.len() {
        facts.insert(format!("{item}: device nodes repeated"), "true".to_owned());
    }
    for (what, list) in [("CDI names", names), ("mounts", sorted(mounts)), ("device nodes", sorted(nodes))] {
        if !list.is_empty() {
            facts.insert(format!("{item}: {what}"), list);
        }
    }
}

/// The CDI specifications in a directory: kinds, devices and their nodes.
fn specifications(facts: &mut Facts, directory: &Path) -> Result<()> {
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let text = std::fs::read_to_string(&path)?;
        let spec: Value = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        let kind = spec["kind"].as_str().unwrap_or("?");
        facts.insert("CDI kind".to_owned(), kind.to_owned());
        facts.insert("CDI file".to_owned(), file.into_owned());
        let nodes = |edits: &Value| {
            let nodes = edits["deviceNodes"].as_array().into_iter().flatten();
            sorted(nodes.filter_map(|node| node["path"].as_str()))
        };
        let env = spec["containerEdits"]["env"].as_array().into_iter().flatten();
        for variable in env.filter_map(Value::as_str).filter_map(|text| text.split_once('=')) {
            facts.insert(format!("CDI env {}", variable.0), variable.1.to_owned());
        }
        facts.insert("CDI common device nodes".to_owned(), nodes(&spec["containerEdits"]));
        for device in spec["devices"].as_array().into_iter().flatten() {
            let name = device["name"].as_str().unwrap_or("?");
            facts.insert(format!("CDI device {name}"), nodes(&device["containerEdits"]));
        }
    }
    Ok(())
}

/// The device parts of CDI names. Their kind is the same for all, and a fact of its own.
fn unqualified<'a>(facts: &mut Facts, names: impl IntoIterator<Item = &'a str>) -> String {
    let devices = names.into_iter().map(|name| match name.split_once('=') {
        Some((kind, device)) => {
            facts.insert("CDI kind".to_owned(), kind.to_owned());
            device
        }
        None => name,
    });
    sorted(devices.collect::<Vec<_>>())
}

/// A list as one text, in an order of its own.
fn sorted(texts: impl IntoIterator<Item = impl Into<String>>) -> String {
    let mut texts: Vec<String> = texts.into_iter().map(Into::into).collect();
    texts.sort_unstable();
    texts.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(pairs: &[(&str, &str)]) -> Facts {
        let owned = |(item, value): &(&str, &str)| ((*item).to_owned(), (*value).to_owned());
        pairs.iter().map(owned).collect()
    }

    #[test]
    fn missing_and_unequal_items_are_differences() {
        let ours = facts(&[("a", "1"), ("b", "2"), ("c", "3")]);
        let theirs = facts(&[("a", "1"), ("b", "x"), ("d", "4")]);
        let found = differences(&ours, &theirs);
        let items: Vec<&str> = found.iter().map(|one| one.item.as_str()).collect();
        assert_eq!(items, ["b", "c", "d"]);
        assert_eq!((found[1].theirs.as_deref(), found[2].ours.as_deref()), (None, None));
    }

    #[test]
    fn row_explains_only_its_items_and_value() {
        let rows = [
            Deliberate { case: "*", item: "* socket", ours: Some("ours-*.sock"), reason: "" },
            Deliberate { case: "a*", item: "* mounts", ours: None, reason: "" },
        ];
        let ours = facts(&[("gpu socket", "ours-gpu.sock"), ("mig socket", "other.sock")]);
        let theirs = facts(&[("gpu socket", "gpu.sock"), ("mig socket", "mig.sock"), ("x mounts", "1")]);
        let (left, used) = unexplained("ab", differences(&ours, &theirs), &rows);
        assert_eq!(left.len(), 1);
        assert_eq!(left[0].item, "mig socket");
        assert_eq!(used, [0, 1]);
        let (left, used) = unexplained("b", differences(&ours, &theirs), &rows);
        assert_eq!((left.len(), used), (2, vec![0]));
    }

    #[test]
    fn star_matches_anything() {
        for (pattern, text, expected) in [
            ("a*c", "ac", true),
            ("a*c", "abbc", true),
            ("a*c", "abcd", false),
            ("*", "", true),
            ("a*b*c", "a-b-b-c", true),
        ] {
            assert_eq!(matches(pattern, text), expected, "{pattern} {text}");
        }
    }
}
