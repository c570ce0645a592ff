//! The record that each container writes on its node: its GPUs, and when it ran from and to. Records are evaluated
//! afterwards, so that no result depends on the speed of the API or a test.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result, bail};
pub(crate) use gantry_e2e::history::Stay;
use gantry_e2e::{Cluster, history};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

/// Where containers write, as the node sees it and as the test sees it in the node's folder.
const ON_NODE: &str = "/var/log/gantry-records";
const IN_FOLDER: &str = "varlog/gantry-records";

/// Runs until a signal or the end of its time, and records start and end. /proc/uptime is one clock for all nodes here.
/// Writing starts no process, because that can take too long on a busy machine. A signal ends it with exit code
/// `TOLD_TO_END`, or 0.
const SCRIPT: &str = r#"
end() { read -r NOW REST < /proc/uptime; echo "end $NOW" >> "$FILE"; exit "$1"; }
FILE="/records/$POD"
read -r NOW REST < /proc/uptime
echo "start $NOW $NVIDIA_VISIBLE_DEVICES" > "$FILE"
trap 'end "${TOLD_TO_END:-0}"' TERM
sleep "$SECONDS_TO_RUN" & wait
end 0
"#;

/// The same, but asked to end it stays, and writes down again and again that it still lives, until it is killed.
const STUBBORN: &str = r#"
now() { cut -d ' ' -f 1 /proc/uptime; }
FILE="/records/$POD"
trap '' TERM
echo "start $(now) $NVIDIA_VISIBLE_DEVICES" > "$FILE"
while :; do echo "end $(now)" >> "$FILE"; sleep 0.05; done
"#;

/// How long a container that was asked to end may take to write it down before it is killed. It takes no time on a
/// machine at rest; a container killed before it wrote would count as never ended.
const GRACE: i64 = 30;

/// Makes the pod's containers write records; `seconds` is how long they run.
pub(crate) fn recording(mut pod: Pod, seconds: f64) -> Result<Pod> {
    if let Some(spec) = &mut pod.spec {
        spec.termination_grace_period_seconds = Some(GRACE);
    }
    with_script(pod, SCRIPT, seconds)
}

/// Makes the pod's containers write records until they are killed, however they are asked to end.
pub(crate) fn stubborn(pod: Pod) -> Result<Pod> {
    with_script(pod, STUBBORN, 0.0)
}

fn with_script(mut pod: Pod, script: &str, seconds: f64) -> Result<Pod> {
    let spec = pod.spec.as_mut().context("a pod has a spec")?;
    spec.restart_policy = Some("Never".into());
    let volume = json!({ "name": "records", "hostPath": { "path": ON_NODE, "type": "DirectoryOrCreate" } });
    spec.volumes.get_or_insert_default().push(serde_json::from_value(volume)?);
    for container in &mut spec.containers {
        container.command = Some(["sh", "-c", script].map(str::to_owned).to_vec());
        let mount = json!({ "name": "records", "mountPath": "/records" });
        container.volume_mounts.get_or_insert_default().push(serde_json::from_value(mount)?);
        let name = json!({ "name": "POD", "valueFrom": { "fieldRef": { "fieldPath": "metadata.name" } } });
        let time = json!({ "name": "SECONDS_TO_RUN", "value": seconds.to_string() });
        let env = container.env.get_or_insert_default();
        env.extend([serde_json::from_value(name)?, serde_json::from_value(time)?]);
    }
    Ok(pod)
}

/// All stays written so far, by pod.
pub(crate) fn read(cluster: &Cluster) -> Result<BTreeMap<String, Stay>> {
    let mut stays = BTreeMap::new();
    for node in cluster.nodes() {
        let Ok(entries) = fs::read_dir(node.sandbox().folder().join(IN_FOLDER)) else {
            continue;
        };
        for entry in entries {
            let entry = entry?;
            let pod = entry.file_name().to_string_lossy().into_owned();
            let text = fs::read_to_string(entry.path())?;
            // A file is made before its first line is written.
            let Some(stay) = parse(&pod, node.name(), &text) else {
                continue;
            };
            stays.insert(pod, stay);
        }
    }
    Ok(stays)
}

/// Mounts the folder of the node's records into the containers of a pod template.
pub(crate) fn mount(template: &mut Value) {
    template["spec"]["volumes"] =
        json!([{ "name": "records", "hostPath": { "path": ON_NODE, "type": "DirectoryOrCreate" } }]);
    template["spec"]["containers"][0]["volumeMounts"] =
        json!([{ "name": "records", "mountPath": "/records" }]);
}

/// Makes an empty file in the folder of a node's records, for which a container waits.
pub(crate) fn signal(cluster: &Cluster, node: &str, name: &str) -> Result<()> {
    let path = cluster.node(node)?.sandbox().folder().join(IN_FOLDER).join(name);
    fs::write(&path, "").with_context(|| format!("cannot write {}", path.display()))
}

/// How much a stubborn container has written by now.
pub(crate) fn written(cluster: &Cluster, node: &str, pod: &str) -> Result<u64> {
    let path = cluster.node(node)?.sandbox().folder().join(IN_FOLDER).join(pod);
    Ok(fs::metadata(&path).with_context(|| format!("no record {}", path.display()))?.len())
}

/// Forgets all stays.
pub(crate) fn clear(cluster: &Cluster) {
    for node in cluster.nodes() {
        let _ = fs::remove_dir_all(node.sandbox().folder().join(IN_FOLDER));
    }
}

/// Forgets one stay, so that another pod of the name can leave its own.
pub(crate) fn forget(cluster: &Cluster, stay: &Stay) {
    if let Ok(node) = cluster.node(&stay.node) {
        let _ = fs::remove_file(node.sandbox().folder().join(IN_FOLDER).join(&stay.pod));
    }
}

/// No device was in two containers at once. A stay without an end lasts for ever.
pub(crate) fn ensure_no_device_twice(stays: &BTreeMap<String, Stay>) -> Result<()> {
    match history::device_twice(stays.values()) {
        None => Ok(()),
        Some(twice) => bail!(twice),
    }
}

fn parse(pod: &str, node: &str, text: &str) -> Option<Stay> {
    let mut lines = text.lines();
    let mut first = lines.next()?.strip_prefix("start ")?.split(' ');
    let from = first.next()?.parse().ok()?;
    let devices = first.next().unwrap_or_default();
    let devices = devices.split(',').filter(|device| !device.is_empty()).map(str::to_owned).collect();
    let to = lines.next().and_then(|line| line.strip_prefix("end ")?.parse().ok());
    Some(Stay { pod: pod.to_owned(), node: node.to_owned(), devices, from, to })
}
