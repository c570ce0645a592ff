//! Permissions of the node daemon in the manifests: the minimum, and more only on nodes labelled for it.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeSet;
use std::path::Path;

use gantry_config::Config;
use gantry_plugin::cdi::Driver;
use k8s_openapi::api::core::v1::{NodeStatus, PodStatus};
use serde::de::value::Error;
use serde::de::{Deserialize, Deserializer, Error as _, Visitor};
use serde_json::{Value, json};

const MIG: &str = "gantry.dev/mig";

/// The DaemonSet of a file.
fn daemon_set(yaml: &str) -> Value {
    let objects: Vec<Value> = serde_saphyr::from_multiple(yaml).unwrap();
    let mut found = objects.into_iter().filter(|object| object["kind"] == "DaemonSet");
    let daemon_set = found.next().unwrap();
    assert!(found.next().is_none());
    daemon_set
}

fn plain() -> Value {
    daemon_set(include_str!("../../manifests/plugin.yaml"))
}

fn mig() -> Value {
    daemon_set(include_str!("../../manifests/plugin-mig.yaml"))
}

#[test]
fn mig_manifest_differs_only_in_mig_access() {
    let mut expected = plain();
    let labels =
        json!({"app.kubernetes.io/name": "gantry-plugin-mig", "app.kubernetes.io/part-of": "gantry"});
    expected["metadata"]["name"] = json!("gantry-plugin-mig");
    for place in ["/metadata/labels", "/spec/selector/matchLabels", "/spec/template/metadata/labels"] {
        *expected.pointer_mut(place).unwrap() = labels.clone();
    }
    let pod = expected.pointer_mut("/spec/template/spec").unwrap();
    // The nodes they select are compared below.
    pod.as_object_mut().unwrap().remove("affinity").unwrap();
    pod["nodeSelector"] = json!({MIG: "true"});
    let container = &mut pod["containers"][0];
    let env = container["env"].as_array_mut().unwrap();
    env.push(json!({"name": "NVIDIA_MIG_MONITOR_DEVICES", "value": "all"}));
    let rights = container["securityContext"].as_object_mut().unwrap();
    // CAP_SYS_ADMIN implies it.
    assert_eq!(rights.remove("allowPrivilegeEscalation"), Some(json!(false)));
    rights["capabilities"]["add"] = json!(["SYS_ADMIN"]);
    let mut there = mig();
    let pod = there.pointer_mut("/spec/template/spec").unwrap();
    pod.as_object_mut().unwrap().remove("affinity").unwrap();
    assert_eq!(there, expected);
}

#[test]
fn default_manifest_has_no_capability() {
    let daemon_set = plain();
    let rights = &daemon_set["spec"]["template"]["spec"]["containers"][0]["securityContext"];
    assert_eq!(rights["capabilities"], json!({"drop": ["ALL"]}));
    assert_eq!(rights["allowPrivilegeEscalation"], json!(false));
    assert_eq!(rights.get("privileged"), None);
}

/// Whether the DaemonSet has a pod on a node with these labels.
fn runs_on(daemon_set: &Value, labels: &[(&str, &str)]) -> bool {
    let pod = &daemon_set["spec"]["template"]["spec"];
    let label = |key: &str| {
        let mut found = labels.iter().filter(|(name, _)| *name == key);
        found.next().map(|(_, value)| *value)
    };
    let selector = pod["nodeSelector"].as_object().into_iter().flatten();
    let is_selected = |(key, value): (&String, &Value)| label(key) == value.as_str();
    let holds = |expression: &Value| {
        let value = label(expression["key"].as_str().unwrap());
        let mut values = expression["values"].as_array().into_iter().flatten();
        let is_in = value.is_some_and(|value| values.any(|known| known == value));
        match expression["operator"].as_str().unwrap() {
            "In" => is_in,
            "NotIn" => !is_in,
            "Exists" => value.is_some(),
            operator => panic!("{operator}"),
        }
    };
    let terms = pod
        .pointer("/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms");
    let mut terms = terms.and_then(Value::as_array).unwrap().iter();
    let is_wanted = terms.any(|term| term["matchExpressions"].as_array().unwrap().iter().all(holds));
    is_wanted && selector.into_iter().all(is_selected)
}

/// Labels that mark a node with GPUs, each sufficient by itself.
const FOUND: [(&str, &str); 3] = [
    ("gantry.dev/gpu", "true"),
    ("nvidia.com/gpu.present", "true"),
    ("feature.node.kubernetes.io/pci-10de.present", "true"),
];

#[test]
fn daemon_runs_on_nvidia_and_labelled_nodes() {
    for found in FOUND {
        assert!(runs_on(&plain(), &[found]), "{found:?}");
        let (key, _) = found;
        assert!(!runs_on(&plain(), &[(key, "false")]), "{key}=false");
    }
    assert!(!runs_on(&plain(), &[]));
}

/// Labels that clouds, or what makes nodes there, give to a node with GPUs of NVIDIA and no device plugin.
const CLOUDS: [&[(&str, &str)]; 4] = [
    &[("cloud.google.com/gke-accelerator", "nvidia-l4"), ("gke-no-default-nvidia-gpu-device-plugin", "true")],
    &[("kubernetes.azure.com/accelerator", "nvidia")],
    &[("karpenter.k8s.aws/instance-gpu-manufacturer", "nvidia")],
    &[("k8s.amazonaws.com/accelerator", "nvidia-tesla-t4")],
];

/// "First pod after two commands": no label by hand on managed clouds.
#[test]
fn daemon_runs_on_gpu_nodes_of_clouds() {
    for labels in CLOUDS {
        assert!(runs_on(&plain(), labels), "{labels:?}");
        for out in [
            ("gantry.dev/gpu", "false"),
            (MIG, "true"),
            ("nvidia.com/gpu.deploy.client", "paused-for-driver-upgrade"),
            ("nvidia.com/gpu.deploy.device-plugin", "paused-for-mig-change"),
        ] {
            assert!(!runs_on(&plain(), &[labels, &[out]].concat()), "{labels:?} {out:?}");
        }
    }
}

/// Two plugins for one resource break a node: the cloud's own stays alone.
#[test]
fn daemon_stays_off_nodes_with_a_plugin_of_the_cloud() {
    for labels in [
        &[("cloud.google.com/gke-accelerator", "nvidia-l4")][..],
        &[("eks.amazonaws.com/instance-gpu-name", "l4"), ("eks.amazonaws.com/compute-type", "auto")],
        // GPUs of another vendor, and nodes without any.
        &[("karpenter.k8s.aws/instance-gpu-manufacturer", "amd")],
        &[("gke-no-default-nvidia-gpu-device-plugin", "true")],
    ] {
        assert!(!runs_on(&plain(), labels), "{labels:?}");
    }
}

#[test]
fn no_node_runs_both_daemonsets() {
    for found in FOUND {
        assert!(!runs_on(&plain(), &[found, (MIG, "true")]), "{found:?}");
        assert!(runs_on(&mig(), &[found, (MIG, "true")]), "{found:?}");
        assert!(!runs_on(&mig(), &[found]), "{found:?}");
        assert!(runs_on(&plain(), &[found, (MIG, "false")]), "{found:?}");
    }
    assert!(runs_on(&mig(), &[(MIG, "true")]));
}

#[test]
fn label_keeps_daemon_off_node() {
    let out = ("gantry.dev/gpu", "false");
    for found in &FOUND[1..] {
        assert!(!runs_on(&plain(), &[*found, out]), "{found:?}");
        assert!(!runs_on(&mig(), &[*found, out, (MIG, "true")]), "{found:?}");
    }
}

/// The GPU operator's driver manager and MIG manager set one of these on a node before they unload the driver or reset
/// GPUs, and remove it afterwards: NVML must not be in use meanwhile.
#[test]
fn daemon_leaves_during_driver_or_mig_changes() {
    for label in ["nvidia.com/gpu.deploy.client", "nvidia.com/gpu.deploy.device-plugin"] {
        for found in FOUND {
            for why in ["driver-upgrade", "mig-change", "vgpu-change"] {
                let paused = format!("paused-for-{why}");
                assert!(!runs_on(&plain(), &[found, (label, &paused)]), "{label}={paused}");
                let cut = [found, (MIG, "true"), (label, &paused)];
                assert!(!runs_on(&mig(), &cut), "{label}={paused}");
            }
            // "false" removes NVIDIA's plugin from a node, which is how this one gets there.
            for works in ["true", "false"] {
                assert!(runs_on(&plain(), &[found, (label, works)]), "{label}={works}");
                assert!(runs_on(&mig(), &[found, (MIG, "true"), (label, works)]));
            }
        }
    }
}

/// Searched, but not mounted into the daemon: in the host's /tmp any user may create files, and MPS is not supported;
/// root folders of some systems would be created on all others by a volume. Operators of those systems mount them.
const NOT_SHOWN: [&str; 6] = [
    "tmp/nvidia-mps",
    "",
    "glibc/lib",
    "x86_64-bottlerocket-linux-gnu/sys-root/usr/lib",
    "aarch64-bottlerocket-linux-gnu/sys-root/usr/lib",
    "home/kubernetes/bin/nvidia/lib64",
];

/// The mounts below the container driver root: each path, and the type of its volume.
fn shown(daemon_set: &Value) -> Vec<(String, String)> {
    let pod = &daemon_set["spec"]["template"]["spec"];
    let root = Config::default().container_driver_root;
    let mounts = pod["containers"][0]["volumeMounts"].as_array().unwrap().iter();
    mounts
        .filter_map(|mount| {
            let place = Path::new(mount["mountPath"].as_str().unwrap());
            let place = place.strip_prefix(&root).ok()?.to_str().unwrap().to_owned();
            assert_eq!(mount["readOnly"], json!(true), "{place}");
            let mut volumes = pod["volumes"].as_array().unwrap().iter();
            let host = &volumes.find(|volume| volume["name"] == mount["name"]).unwrap()["hostPath"];
            assert_eq!(host["path"], json!(format!("/{place}")));
            Some((place, host["type"].as_str().unwrap().to_owned()))
        })
        .collect()
}

#[test]
fn mounts_equal_searched_driver_folders() {
    let looked_for: BTreeSet<&str> = Driver::looked_for().collect();
    assert!(NOT_SHOWN.iter().all(|path| looked_for.contains(path)));
    let places = shown(&plain());
    let is_shown = |path: &str| {
        let mut places = places.iter();
        places.any(|(place, _)| Path::new(path).starts_with(place))
    };
    for path in looked_for.iter().filter(|path| !NOT_SHOWN.contains(path)) {
        // Targets of the host's root links: /lib to /usr/lib, /var/run to /run.
        let real = format!("usr/{path}");
        let real = path.strip_prefix("var/").unwrap_or(&real);
        let seen = is_shown(path) || looked_for.contains(real) && is_shown(real);
        assert!(seen, "/{path} of the host is looked for, and no volume shows it");
    }
    for (place, _) in &places {
        let mut paths = looked_for.iter();
        let used = place == "dev" || paths.any(|path| Path::new(path).starts_with(place));
        assert!(used, "/{place} of the host is shown, and nothing is looked for in it");
    }
}

#[test]
fn optional_host_folders_are_never_created_or_required() {
    for (place, kind) in shown(&plain()) {
        let expected = match place.as_str() {
            // They exist on every host.
            "usr" | "dev" | "etc" => "Directory",
            // Removed at the next boot.
            path if path.starts_with("run/") => "DirectoryOrCreate",
            path => panic!("a host may lack /{path}, or keep it if it is made"),
        };
        assert_eq!(kind, expected, "/{place}");
    }
}

/// The fields of a type, as its deserializer requests them.
struct Fields<'a>(&'a mut &'static [&'static str]);

impl<'de> Deserializer<'de> for Fields<'_> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
        Err(Error::custom("no fields"))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, Error> {
        *self.0 = fields;
        Err(Error::custom("the fields are known"))
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit unit_struct newtype_struct seq tuple
        tuple_struct map enum identifier ignored_any
    }
}

/// The expressions of a policy.
fn validations(yaml: &str, name: &str) -> String {
    let objects: Vec<Value> = serde_saphyr::from_multiple(yaml).unwrap();
    let mut found = objects
        .into_iter()
        .filter(|object| object["kind"] == "ValidatingAdmissionPolicy" && object["metadata"]["name"] == name);
    let policy = found.next().unwrap();
    let validations = policy["spec"]["validations"].as_array().unwrap();
    let expressions = validations.iter().map(|one| one["expression"].as_str().unwrap());
    expressions.collect::<Vec<_>>().join(" && ")
}

/// The fields of a Kubernetes type, as the client knows them.
fn fields<T: for<'de> Deserialize<'de>>() -> &'static [&'static str] {
    let mut known: &[&str] = &[];
    let _ = T::deserialize(Fields(&mut known));
    known
}

const GUARD: &str = include_str!("../../manifests/guard.yaml");

/// A policy that does not list a field would let the extender write it.
#[test]
fn policy_allows_only_the_written_pod_status_fields() {
    let known = fields::<PodStatus>();
    assert!(known.contains(&"nominatedNodeName"), "{known:?}");
    let status = validations(GUARD, "gantry-extender-status");
    // Since Kubernetes 1.34 to 1.37.
    let newer = [
        "observedGeneration",
        "extendedResourceClaimStatus",
        "allocatedResources",
        "resources",
        "nodeAllocatableResourceClaimStatuses",
        "volumeHealth",
    ];
    for field in known.iter().chain(&newer) {
        let same = format!("object.status.?{field} == oldObject.status.?{field}");
        let is_same = status.split(" && ").any(|part| part == same);
        assert_eq!(is_same, !["conditions", "nominatedNodeName"].contains(field), "{field}");
    }
}

/// The text of a variable of a policy.
fn variable(yaml: &str, policy: &str, name: &str) -> String {
    let objects: Vec<Value> = serde_saphyr::from_multiple(yaml).unwrap();
    let policy = objects
        .iter()
        .find(|object| object["kind"] == "ValidatingAdmissionPolicy" && object["metadata"]["name"] == policy)
        .unwrap();
    let mut variables = policy["spec"]["variables"].as_array().unwrap().iter();
    let variable = variables.find(|variable| variable["name"] == name).unwrap();
    variable["expression"].as_str().unwrap().to_owned()
}

/// Reasons of conditions, which no Event has.
const OF_CONDITIONS: [&str; 5] = ["GpuDegraded", "GpusHealthy", "NvmlClosed", "PodsUnknown", "Stopped"];

#[test]
fn policy_allows_the_reasons_of_the_plugins_events() {
    fn sources(folder: &Path, all: &mut String) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => sources(&path, all),
                false if path.extension().is_some_and(|end| end == "rs") => {
                    all.push_str(&std::fs::read_to_string(path).unwrap());
                }
                false => {}
            }
        }
    }
    let mut all = String::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut all);
    let reason = regex_lite::Regex::new(r"\bReason::([A-Z][A-Za-z]+)").unwrap();
    let used: BTreeSet<String> = reason.captures_iter(&all).map(|found| found[1].to_owned()).collect();
    let allowed = variable(GUARD, "gantry-plugin-events", "reasons");
    let allowed: BTreeSet<String> = allowed
        .trim_matches(['[', ']'])
        .split(", ")
        .map(|reason| reason.trim_matches('\'').to_owned())
        .collect();
    let unused: Vec<_> = allowed.difference(&used).collect();
    let refused: Vec<&str> = used.difference(&allowed).map(String::as_str).collect();
    assert_eq!((unused, refused), (Vec::new(), OF_CONDITIONS.to_vec()));
}

/// Labels that Gantry does not write drive other programs.
#[test]
fn policies_allow_only_gantrys_labels() {
    let labels = include_str!("../../manifests/labels.yaml");
    let known = variable(labels, "gantry-node-features", "known");
    let node = include_str!("../../manifests/labels-node.yaml");
    // The state of MIG layouts is a label of the Node alone.
    let of_node = variable(node, "gantry-node-labels", "known");
    assert_eq!(of_node.replace("mig[.]config[.]state|", ""), known);
    let of_node = regex_lite::Regex::new(of_node.trim_matches('\'')).unwrap();
    assert!(of_node.is_match("nvidia.com/mig.config.state") && !of_node.is_match("nvidia.com/mig.config"));
    let known = regex_lite::Regex::new(known.trim_matches('\'')).unwrap();
    for machines in [
        include_str!("labels/snapshots/labels__machines__simulated_machines_have_labels.snap"),
        include_str!(
            "labels/snapshots/labels__machines__simulated_mig_machines_have_labels_of_each_strategy.snap"
        ),
    ] {
        let keys = machines.lines().filter_map(|line| line.split_once('=')).map(|(key, _)| key.trim());
        let keys: Vec<&str> = keys.filter(|key| key.contains('/')).collect();
        assert!(keys.len() > 20, "{keys:?}");
        for key in keys {
            assert!(known.is_match(key), "{key}");
        }
    }
    for key in [
        "gantry.dev/mig",
        "gantry.dev/gpu",
        "nvidia.com/gpu.present",
        "nvidia.com/gpu.deploy.driver",
        "nvidia.com/mig.config",
        "nvidia.com/device-plugin.config",
        "node-role.kubernetes.io/control-plane",
        "xnvidia.com/gpu.count",
        "nvidia.com/gpu.count.x",
    ] {
        assert!(!known.is_match(key), "{key}");
    }
}

#[test]
fn policies_allow_only_the_written_node_fields() {
    let known = fields::<NodeStatus>();
    assert!(known.contains(&"conditions"), "{known:?}");
    let status = validations(GUARD, "gantry-node-status");
    // Since Kubernetes 1.35.
    for field in known.iter().chain(&["declaredFeatures"]) {
        let same = match *field {
            "conditions" => "object.status.?conditions.orValue([]).filter(c, c.type != 'GPUHealthy') == oldObject.status.?conditions.orValue([]).filter(c, c.type != 'GPUHealthy')".to_owned(),
            field => format!("object.status.?{field} == oldObject.status.?{field}"),
        };
        assert!(status.split(" && ").any(|part| part == same), "{field}: {status}");
    }
    for field in ["labels", "annotations", "finalizers", "ownerReferences"] {
        let same = format!("object.metadata.?{field} == oldObject.metadata.?{field}");
        assert!(status.split(" && ").any(|part| part == same), "{field}: {status}");
    }
    let labels = validations(include_str!("../../manifests/labels-node.yaml"), "gantry-node-labels");
    for field in [
        "object.spec",
        "object.metadata.?annotations",
        "object.metadata.?finalizers",
        "object.metadata.?ownerReferences",
    ] {
        let old = field.replace("object", "oldObject");
        let same = labels.split(" && ").any(|part| part.starts_with(field) && part.contains(&old));
        assert!(same, "{field}: {labels}");
    }
}
