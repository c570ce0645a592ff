//! `gantry migrate`: the values of Gantry's chart for an installation of NVIDIA's plugin: values of its chart or of the GPU
//! operator's, a ClusterPolicy, a DaemonSet or the ConfigMap of its configurations. Everything that is not carried over is
//! listed.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};
use clap::Args;
use gantry_config::settings::{Kind, SETTINGS, Setting, boolean};
use gantry_config::{Strictness, load};
use serde_json::{Map, Value, json};

use crate::runtime::{BadInput, print};
use crate::visible::Visible;

/// Options of `gantry migrate`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  helm -n nvidia get values nvdp -o yaml | gantry migrate - > values.yaml
  kubectl get clusterpolicy -o yaml | gantry migrate - > values.yaml
  kubectl -n kube-system get daemonset nvidia-device-plugin-daemonset -o yaml | gantry migrate -

Exit codes: 0 migrated, 1 a configuration cannot be served, 2 no file of NVIDIA's plugin.")]
pub(crate) struct MigrateArgs {
    /// Files with values or manifests; - is standard input
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
}

/// Keys of values that only the GPU operator's chart has.
const OF_THE_OPERATOR: [&str; 8] =
    ["operator", "driver", "toolkit", "dcgm", "dcgmExporter", "migManager", "validator", "daemonsets"];
/// Keys of values that only the chart of NVIDIA's plugin has.
const OF_THE_PLUGIN: [&str; 9] = [
    "migStrategy",
    "failOnInitError",
    "deviceListStrategy",
    "deviceIDStrategy",
    "config",
    "gfd",
    "compatWithCPUManager",
    "nvidiaDriverRoot",
    "mps",
];
/// Names of values and their settings in the config file.
const SETTINGS_OF_VALUES: [(&str, &str); 13] = [
    ("migStrategy", "flags.migStrategy"),
    ("failOnInitError", "flags.failOnInitError"),
    ("deviceListStrategy", "flags.plugin.deviceListStrategy"),
    ("deviceIDStrategy", "flags.plugin.deviceIDStrategy"),
    ("nvidiaDevRoot", "flags.nvidiaDevRoot"),
    // With the static CPU manager kubelet must know the device nodes.
    ("compatWithCPUManager", "flags.plugin.passDeviceSpecs"),
    ("gdrcopyEnabled", "flags.gdrcopyEnabled"),
    ("gdsEnabled", "flags.gdsEnabled"),
    ("mofedEnabled", "flags.mofedEnabled"),
    ("deviceDiscoveryStrategy", "flags.deviceDiscoveryStrategy"),
    ("cdi.nvidiaHookPath", "flags.plugin.nvidiaCTKPath"),
    ("gfd.noTimestamp", "flags.gfd.noTimestamp"),
    ("gfd.sleepInterval", "flags.gfd.sleepInterval"),
];
/// Values with the same meaning in both charts: theirs and ours.
const SAME_VALUES: [(&str, &str); 9] = [
    ("config.default", "plugin.defaultConfig"),
    ("config.name", "plugin.existingConfigMap"),
    ("nvidiaDriverRoot", "plugin.driverRoot"),
    ("runtimeClassName", "plugin.runtimeClassName"),
    ("nodeSelector", "plugin.nodeSelector"),
    ("tolerations", "plugin.tolerations"),
    ("podAnnotations", "plugin.podAnnotations"),
    ("resources", "plugin.resources"),
    ("imagePullSecrets", "image.pullSecrets"),
];
/// Why values are left out, by the beginning of their path. An empty reason: they belong to NVIDIA's own objects.
const REASONS: [(&str, &str); 28] = [
    ("mps", "MPS is not served"),
    ("daemonsets.priorityClassName", "the plugin has system-node-critical; see plugin.priorityClassName"),
    ("daemonsets.updateStrategy", "see plugin.maxUnavailable"),
    ("hostNetwork", "the plugin needs no network of the host"),
    ("hostPID", "the plugin needs no processes of the host"),
    ("initContainers", "the chart sets the containers"),
    ("lifecycle", "the chart sets it"),
    ("livenessProbe", "the chart sets it"),
    ("readinessProbe", "the chart sets it"),
    ("startupProbe", "the chart sets it"),
    ("affinity", "the plugin selects nodes by their labels; see plugin.nodeSelector"),
    ("securityContext", "the chart sets it; see plugin.seLinuxOptions"),
    ("podSecurityContext", "the chart sets it; see plugin.seLinuxOptions"),
    ("updateStrategy", "see plugin.maxUnavailable"),
    ("priorityClassName", "the plugin has system-node-critical; see plugin.priorityClassName"),
    ("nfd", "node-feature-discovery is not part of the chart; it may stay"),
    ("config.fallbackStrategies", "write plugin.extraArgs: [--fallback-strategies=...]"),
    ("gfd", "labels are written by the plugin itself"),
    ("image", ""),
    ("nameOverride", ""),
    ("fullnameOverride", ""),
    ("namespaceOverride", ""),
    ("selectorLabelsOverride", ""),
    ("allowDefaultNamespace", ""),
    ("legacyDaemonsetAPI", ""),
    ("devicePlugin", ""),
    ("labelOverrides", ""),
    ("global", ""),
];
/// Variables that the chart sets itself, or that NVIDIA's runtime reads.
const SET_BY_THE_CHART: [&str; 9] = [
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    "NVIDIA_MIG_MONITOR_DEVICES",
    "NODE_NAME",
    "NAMESPACE",
    "POD_NAME",
    "NODE_LABEL",
    "SEND_SIGNAL",
    "SIGNAL",
];

/// kubelet's root directory unless it is configured.
const KUBELET_ROOT: &str = "/var/lib/kubelet";
/// Folders of the node that the chart mounts where it needs them.
const VOLUMES_OF_THE_CHART: [&str; 9] = [
    "",
    "/dev",
    "/dev/shm",
    "/etc/kubernetes/node-feature-discovery/features.d",
    "/run/nvidia",
    "/run/nvidia/mps",
    "/sys",
    "/var/run/cdi",
    "/run/nvidia/validations",
];

/// Runs `gantry migrate`.
///
/// # Errors
/// A file is not one of NVIDIA's plugin, or a configuration in it cannot be served.
pub(crate) fn run(args: &MigrateArgs) -> anyhow::Result<()> {
    let mut migration = Migration::default();
    for path in &args.files {
        let (text, source) = read(path)?;
        let documents: Vec<Value> = serde_saphyr::from_multiple(&text)
            .map_err(|error| BadInput(anyhow!("{source}: no YAML: {}", error.without_snippet())))?;
        for document in documents.iter().filter(|document| !document.is_null()) {
            migration.add(document).map_err(|wrong| BadInput(anyhow!("{source}: {wrong}")))?;
        }
    }
    print(&Visible::new(&migration.finish()?))
}

fn read(path: &Path) -> anyhow::Result<(String, String)> {
    if path.as_os_str() == "-" {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).context("cannot read standard input")?;
        return Ok((text, "standard input".to_owned()));
    }
    let text = std::fs::read_to_string(path)
        .map_err(|error| BadInput(anyhow!("cannot read {}: {error}", path.display())))?;
    Ok((text, path.display().to_string()))
}

/// The values so far, and what is not in them.
#[derive(Debug, Default)]
struct Migration {
    values: Map<String, Value>,
    /// Settings that are flags or variables with NVIDIA's plugin, by their key in the config file.
    settings: Vec<(&'static Setting, Value)>,
    /// What is left out, with the reason.
    left_out: Vec<(String, String)>,
    /// Steps in addition to the installation of the chart.
    steps: BTreeSet<&'static str>,
}

impl Migration {
    /// Adds a manifest or the values of a chart.
    fn add(&mut self, document: &Value) -> Result<(), String> {
        match document["kind"].as_str() {
            Some(kind) if kind.ends_with("List") || document["items"].is_array() => {
                document["items"].as_array().into_iter().flatten().try_for_each(|item| self.add(item))
            }
            Some("ClusterPolicy") => self.operator(document["spec"].clone()),
            Some("DaemonSet") => self.daemon_set(document),
            Some("ConfigMap") => self.config_texts(&document["data"], "data"),
            Some(kind) => Err(format!(
                "{kind} is not migrated; give values of a chart, a ClusterPolicy, a DaemonSet or a ConfigMap"
            )),
            None => {
                let has = |keys: &[&str]| keys.iter().any(|key| document.get(key).is_some());
                if has(&OF_THE_OPERATOR) {
                    self.operator(document.clone())
                } else if has(&OF_THE_PLUGIN) || has(&["tolerations", "nodeSelector", "devicePlugin"]) {
                    self.plugin(document.clone())
                } else {
                    Err(format!(
                        "these are no values of NVIDIA's plugin or of the GPU operator; expected one of {}",
                        [&OF_THE_PLUGIN[..], &OF_THE_OPERATOR[..]].concat().join(", ")
                    ))
                }
            }
        }
    }

    /// Values of the chart of NVIDIA's plugin, or of gpu-feature-discovery.
    fn plugin(&mut self, mut values: Value) -> Result<(), String> {
        self.steps.insert("helm uninstall NVIDIA's plugin: two plugins cannot serve one node");
        if let Some(texts) = take(&mut values, "config.map") {
            self.config_texts(&texts, "config.map")?;
        }
        if take(&mut values, "gfd.enabled").is_some_and(|on| on == true) {
            self.set("plugin.labels", json!("gfd"));
        }
        self.common(&mut values);
        self.leave_rest("", &values);
        Ok(())
    }

    /// The spec of a ClusterPolicy, or values of the GPU operator's chart, which have the same form.
    fn operator(&mut self, mut spec: Value) -> Result<(), String> {
        self.steps.insert(
            "set devicePlugin.enabled=false and gfd.enabled=false in the GPU operator; its other parts stay as they are",
        );
        if take(&mut spec, "driver.enabled") != Some(json!(false)) {
            let folder = take(&mut spec, "hostPaths.driverInstallDir").filter(is_set);
            self.set("plugin.driverRoot", folder.unwrap_or_else(|| json!("/run/nvidia/driver")));
        }
        let class = take(&mut spec, "operator.runtimeClass").unwrap_or_else(|| json!("nvidia"));
        if take(&mut spec, "toolkit.enabled") != Some(json!(false)) {
            self.set("plugin.runtimeClassName", class);
        }
        if let Some(strategy) = take(&mut spec, "mig.strategy") {
            self.setting("flags.migStrategy", &strategy, "mig.strategy");
        }
        if take(&mut spec, "gfd.enabled") != Some(json!(false)) {
            self.set("plugin.labels", json!("gfd"));
        }
        if let Some(texts) = take(&mut spec, "devicePlugin.config.data").filter(Value::is_object) {
            self.config_texts(&texts, "devicePlugin.config.data")?;
            take(&mut spec, "devicePlugin.config.name");
        }
        for (theirs, ours) in [
            ("daemonsets.tolerations", "plugin.tolerations"),
            ("daemonsets.rollingUpdate.maxUnavailable", "plugin.maxUnavailable"),
            ("devicePlugin.config.name", "plugin.existingConfigMap"),
            ("devicePlugin.config.default", "plugin.defaultConfig"),
            ("devicePlugin.resources", "plugin.resources"),
        ] {
            if let Some(value) = take(&mut spec, theirs).filter(|value| *value != "") {
                // The operator writes a number of nodes as a text.
                let number = value.as_str().and_then(|text| text.parse::<u32>().ok());
                self.set(ours, number.map_or(value, Value::from));
            }
        }
        for part in ["devicePlugin", "gfd"] {
            let variables = take(&mut spec, &format!("{part}.env"));
            self.variables(variables.as_ref(), part);
            if let Some(args) = take(&mut spec, &format!("{part}.args")) {
                self.leave(&format!("{part}.args"), &format!("{args}; see plugin.extraArgs"));
            }
        }
        if take(&mut spec, "devicePlugin.mps").is_some() {
            self.leave("devicePlugin.mps", "MPS is not served");
        }
        self.leave_effects_of_the_operator(&mut spec);
        Ok(())
    }

    /// Lists what the operator derives settings of its plugin from. Its other parts stay.
    fn leave_effects_of_the_operator(&mut self, spec: &mut Value) {
        for (path, why) in [
            (
                "cdi.enabled",
                "the operator has its plugin use CDI; set flags.plugin.deviceListStrategy in plugin.configs",
            ),
            ("gds.enabled", "to give containers GPUDirect Storage set flags.gdsEnabled in plugin.configs"),
            ("gdrcopy.enabled", "to give containers GDRCopy set flags.gdrcopyEnabled in plugin.configs"),
            (
                "sandboxWorkloads.enabled",
                "nodes of virtual machines have another plugin; exclude them by plugin.nodeSelector",
            ),
        ] {
            if take(spec, path) == Some(json!(true)) {
                self.leave(path, why);
            }
        }
        for (path, default) in [
            ("daemonsets.priorityClassName", "system-node-critical"),
            ("daemonsets.updateStrategy", "RollingUpdate"),
        ] {
            let value = take(spec, path).filter(|value| *value != default);
            self.leave_rest(path, &value.unwrap_or_default());
        }
        for of_its_own in ["enabled", "image", "imagePullPolicy", "imagePullSecrets", "repository", "version"]
        {
            take(spec, &format!("devicePlugin.{of_its_own}"));
            take(spec, &format!("gfd.{of_its_own}"));
        }
        // Without a name the operator makes no ConfigMap.
        take(spec, "devicePlugin.config.create");
        for part in ["devicePlugin.config", "devicePlugin", "gfd", "daemonsets"] {
            for (key, value) in take(spec, part).as_ref().and_then(Value::as_object).into_iter().flatten() {
                if is_set(value) {
                    self.leave(&format!("{part}.{key}"), "the chart has no such value");
                }
            }
        }
    }

    /// The DaemonSet of NVIDIA's plugin or of gpu-feature-discovery.
    fn daemon_set(&mut self, set: &Value) -> Result<(), String> {
        let name = set["metadata"]["name"].as_str().unwrap_or_default();
        let mut pod = set["spec"]["template"]["spec"].clone();
        let containers = take(&mut pod, "containers").unwrap_or_default();
        let containers = containers.as_array().cloned().unwrap_or_default();
        let image = |container: &Value| container["image"].as_str().unwrap_or_default().to_owned();
        let is_theirs = |container: &&Value| {
            ["device-plugin", "gpu-feature-discovery"].iter().any(|name| image(container).contains(name))
        };
        let Some(container) = containers.iter().find(is_theirs) else {
            return Err(format!(
                "the DaemonSet {name} has no container of NVIDIA's plugin or gpu-feature-discovery"
            ));
        };
        self.steps.insert("kubectl delete the DaemonSets of NVIDIA's plugin and gpu-feature-discovery");
        let runs_gfd = image(container).contains("gpu-feature-discovery")
            || container["command"].to_string().contains("gpu-feature-discovery");
        if runs_gfd {
            self.set("plugin.labels", json!("gfd"));
        }
        self.variables(container.get("env"), name);
        for source in container["envFrom"].as_array().into_iter().flatten() {
            let of =
                ["configMapRef", "secretRef"].into_iter().find(|of| !source[*of].is_null()).unwrap_or("?");
            let object = source[of]["name"].as_str().unwrap_or_default();
            self.leave(
                &format!("{name}, envFrom {of} {object}"),
                "the variables in it are unknown here; write those that Gantry reads into plugin.extraEnv",
            );
        }
        let words = |key: &str| -> Vec<String> {
            let words = container[key].as_array().into_iter().flatten();
            words.map(|word| word.as_str().map_or_else(|| word.to_string(), str::to_owned)).collect()
        };
        self.command_line(&words("command"), &words("args"), name);
        let mut same =
            json!({"resources": container["resources"], "imagePullSecrets": pod["imagePullSecrets"]});
        for key in ["tolerations", "nodeSelector", "runtimeClassName"] {
            if let Some(value) = take(&mut pod, key) {
                same[key] = value;
            }
        }
        self.common(&mut same);
        for volume in take(&mut pod, "volumes").as_ref().and_then(Value::as_array).into_iter().flatten() {
            self.volume(volume, name);
        }
        self.leave_rest_of_pod(pod, container.clone());
        let strategy = &set["spec"]["updateStrategy"];
        match &strategy["rollingUpdate"]["maxUnavailable"] {
            Value::Null if strategy["type"] == "OnDelete" => {
                self.leave("updateStrategy", "see plugin.maxUnavailable");
            }
            // The default of the API server.
            Value::Null => {}
            one if *one == 1 => {}
            several => self.set("plugin.maxUnavailable", several.clone()),
        }
        let annotations = set["spec"]["template"]["metadata"]["annotations"].as_object();
        for key in annotations.into_iter().flat_map(Map::keys) {
            if !["kubectl.kubernetes.io/", "checksum/", "scheduler.alpha.kubernetes.io/"]
                .iter()
                .any(|own| key.starts_with(own))
            {
                self.leave(&format!("annotation {key} of the pod"), "see plugin.podAnnotations");
            }
        }
        Ok(())
    }

    /// A volume of the DaemonSet: the ConfigMap of configurations, or a folder of the node.
    fn volume(&mut self, volume: &Value, place: &str) {
        if let Some(map) = volume["configMap"]["name"].as_str() {
            self.set("plugin.existingConfigMap", json!(map));
        }
        let Some(path) = volume["hostPath"]["path"].as_str() else {
            return;
        };
        let path = path.trim_end_matches('/');
        let kubelet = path.strip_suffix("/device-plugins").or_else(|| path.strip_suffix("/pod-resources"));
        match (kubelet, path) {
            (Some(KUBELET_ROOT), _) => {}
            (Some(root), _) => self.set("plugin.kubeletRoot", json!(root)),
            (None, _) if VOLUMES_OF_THE_CHART.contains(&path) => {}
            (None, "/run/nvidia/driver") => self.set("plugin.driverRoot", json!(path)),
            (None, _) => self.leave(
                &format!("{place}, hostPath {path}"),
                "the chart has no such volume; see plugin.kubeletRoot and plugin.driverRoot",
            ),
        }
    }

    /// Lists what the chart does not have of the pod and its container. Left are the keys that the API server adds.
    fn leave_rest_of_pod(&mut self, mut pod: Value, mut container: Value) {
        for key in [
            "dnsPolicy",
            "enableServiceLinks",
            "imagePullSecrets",
            "restartPolicy",
            "schedulerName",
            "serviceAccount",
            "serviceAccountName",
            "automountServiceAccountToken",
            "terminationGracePeriodSeconds",
        ] {
            take(&mut pod, key);
        }
        if pod["priorityClassName"] == "system-node-critical" {
            take(&mut pod, "priorityClassName");
        }
        for key in [
            "args",
            "command",
            "env",
            "envFrom",
            "image",
            "imagePullPolicy",
            "name",
            "resources",
            "securityContext",
            "terminationMessagePath",
            "terminationMessagePolicy",
            "volumeMounts",
        ] {
            take(&mut container, key);
        }
        for rest in [pod, container] {
            for (key, _) in rest.as_object().into_iter().flatten().filter(|(_, value)| is_set(value)) {
                self.leave(key, reason(key).unwrap_or("the chart has no such value"));
            }
        }
    }

    /// Notes something that is not carried over.
    fn leave(&mut self, what: &str, why: &str) {
        let line = (what.to_owned(), why.to_owned());
        if !self.left_out.contains(&line) {
            self.left_out.push(line);
        }
    }

    /// Values that both charts have.
    fn common(&mut self, values: &mut Value) {
        for (theirs, ours) in SAME_VALUES {
            if let Some(value) = take(values, theirs).filter(is_set) {
                self.set(ours, value);
            }
        }
        for (theirs, key) in SETTINGS_OF_VALUES {
            if let Some(value) = take(values, theirs) {
                self.setting(key, &value, theirs);
            }
        }
    }

    /// Configurations by name, as texts.
    fn config_texts(&mut self, texts: &Value, place: &str) -> Result<(), String> {
        for (name, text) in texts.as_object().into_iter().flatten() {
            let text = text.as_str().ok_or_else(|| format!("{place}.{name} is no text"))?;
            let config: Value = serde_saphyr::from_str(text)
                .map_err(|error| format!("{place}.{name}: no YAML: {}", error.without_snippet()))?;
            if !config.is_object() {
                self.left_out.push((format!("{place}.{name}"), "no configuration".to_owned()));
                continue;
            }
            self.set("plugin.configs", json!({}));
            self.values["plugin"]["configs"][name] = config;
        }
        Ok(())
    }

    /// Variables of a container.
    fn variables(&mut self, list: Option<&Value>, place: &str) {
        for variable in list.and_then(Value::as_array).into_iter().flatten() {
            let name = variable["name"].as_str().unwrap_or_default();
            if !variable["valueFrom"].is_null() && !SET_BY_THE_CHART.contains(&name) {
                self.leave(
                    &format!("{place}, variable {name}"),
                    &format!(
                        "its value comes from {}; if Gantry reads it, write it into plugin.extraEnv",
                        variable["valueFrom"]
                    ),
                );
                continue;
            }
            let Some(text) = variable["value"].as_str().filter(|text| !text.is_empty()) else {
                continue;
            };
            let setting = SETTINGS.iter().find(|setting| setting.env.contains(&name));
            match name {
                _ if SET_BY_THE_CHART.contains(&name) => {}
                "NVIDIA_DRIVER_ROOT" => self.set("plugin.driverRoot", json!(text)),
                "DEFAULT_CONFIG" => self.set("plugin.defaultConfig", json!(text)),
                _ if setting.is_some() => {
                    self.setting(setting.map_or("", |setting| setting.key), &json!(text), name);
                }
                "FALLBACK_STRATEGIES" | "DP_DISABLE_HEALTHCHECKS" | "DP_ENABLE_HEALTHCHECKS" => {
                    self.extra("extraEnv", json!({"name": name, "value": text}));
                }
                _ => {
                    self.left_out
                        .push((format!("{place}, variable {name}"), "not read by Gantry".to_owned()));
                }
            }
        }
    }

    /// The command of a container and its arguments: `--flag=value` or `--flag value`, with one dash or two. A boolean flag takes
    /// no second word.
    fn command_line(&mut self, command: &[String], args: &[String], place: &str) {
        let is_program = |word: &str| {
            let name = word.rsplit('/').next().unwrap_or_default();
            ["nvidia-device-plugin", "gpu-feature-discovery"].contains(&name)
        };
        let mut words = command.iter().chain(args).map(String::as_str).peekable();
        // A list may be several flags.
        let mut lists: BTreeMap<&str, String> = BTreeMap::new();
        while let Some(word) = words.next() {
            let Some(flag) = word.strip_prefix("--").or_else(|| word.strip_prefix('-')) else {
                if !is_program(word) {
                    self.leave(
                        &format!("{place}, {word:?} in the command"),
                        "only flags of NVIDIA's plugin are read",
                    );
                }
                continue;
            };
            let (name, own) = flag.split_once('=').map_or((flag, None), |(name, text)| (name, Some(text)));
            let has_name = |setting: &&Setting| {
                let is_short = setting.short.is_some_and(|short| name.len() == 1 && name.starts_with(short));
                setting.flags.contains(&name) || is_short
            };
            let setting = SETTINGS.iter().find(has_name);
            let takes_word = own.is_none() && setting.is_none_or(|setting| setting.kind != Kind::Bool);
            let next = words.next_if(|next| takes_word && (setting.is_some() || !next.starts_with('-')));
            let Some(setting) = setting else {
                let text = next.map(|next| format!(" {next}")).unwrap_or_default();
                self.leave(&format!("{place}, {word}{text}"), "see plugin.extraArgs");
                continue;
            };
            match (own.or(next), setting.kind) {
                (Some(text), _) if setting.key == "flags.nvidiaDriverRoot" => {
                    self.replace("plugin.driverRoot", json!(text));
                }
                (Some(text), Kind::List | Kind::Numbers) => {
                    let known = lists.entry(setting.key).or_default();
                    let between = if known.is_empty() { "" } else { "," };
                    known.push_str(&format!("{between}{text}"));
                }
                (Some(text), _) => self.setting(setting.key, &json!(text), word),
                (None, Kind::Bool) => self.setting(setting.key, &json!("true"), word),
                (None, _) => self.leave(&format!("{place}, {word}"), "it has no value"),
            }
        }
        for (key, text) in lists {
            self.setting(key, &json!(text), key);
        }
    }

    /// A setting that is a flag or variable with NVIDIA's plugin.
    fn setting(&mut self, key: &str, value: &Value, place: &str) {
        let Some(setting) = SETTINGS.iter().find(|setting| setting.key == key) else {
            return;
        };
        let typed = match (value, setting.kind) {
            (Value::String(text), Kind::Bool) => boolean(text).map(Value::Bool),
            (Value::String(text), Kind::List) => Some(text.split(',').map(str::trim).collect()),
            (Value::String(text), Kind::Numbers) => text
                .split(',')
                .map(|number| number.trim().parse::<u32>().ok())
                .collect::<Option<Vec<_>>>()
                .map(Value::from),
            _ => Some(value.clone()),
        };
        match typed {
            Some(typed) => {
                // The last one counts: flags come after variables.
                self.settings.retain(|(known, _)| known.key != key);
                self.settings.push((setting, typed));
            }
            None => self.left_out.push((place.to_owned(), format!("{value} is not allowed"))),
        }
    }

    /// Sets a value of the chart; a first one stays.
    fn set(&mut self, path: &str, value: Value) {
        let Some((section, name)) = path.split_once('.') else {
            return;
        };
        let section = self.values.entry(section).or_insert_with(|| json!({}));
        if section[name].is_null() {
            section[name] = value;
        }
    }

    /// Sets a value of the chart over a first one.
    fn replace(&mut self, path: &str, value: Value) {
        if let Some((section, name)) = path.split_once('.') {
            self.values.entry(section).or_insert_with(|| json!({}))[name] = value;
        }
    }

    /// Adds to a list of the plugin's.
    fn extra(&mut self, name: &str, value: Value) {
        self.set(&format!("plugin.{name}"), json!([]));
        if let Some(list) = self.values["plugin"][name].as_array_mut()
            && !list.contains(&value)
        {
            list.push(value);
        }
    }

    /// Lists the leaves that nothing took.
    fn leave_rest(&mut self, path: &str, rest: &Value) {
        match rest {
            Value::Object(map) => {
                for (key, value) in map {
                    let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                    self.leave_rest(&path, value);
                }
            }
            Value::Null => {}
            Value::Array(list) if list.is_empty() => {}
            Value::String(text) if text.is_empty() => {}
            _ => match reason(path) {
                Some("") => {}
                Some(why) => self.left_out.push((path.to_owned(), why.to_owned())),
                None => self.left_out.push((path.to_owned(), "the chart has no such value".to_owned())),
            },
        }
    }

    /// The values with their comments.
    fn finish(mut self) -> anyhow::Result<String> {
        let has_configs = |values: &Map<String, Value>| {
            let plugin = values.get("plugin");
            let is_set = |name: &str| plugin.is_some_and(|plugin| !plugin[name].is_null());
            is_set("configs") || is_set("existingConfigMap")
        };
        if self.values.get("plugin").is_some_and(|plugin| !plugin["existingConfigMap"].is_null()) {
            self.steps.insert("copy the ConfigMap of the configurations into Gantry's namespace");
        }
        // NVIDIA's flags take precedence over every configuration, and so do Gantry's.
        let over_configs = has_configs(&self.values);
        for (setting, value) in std::mem::take(&mut self.settings) {
            if over_configs {
                let text = match &value {
                    Value::String(text) => text.clone(),
                    Value::Array(list) => list
                        .iter()
                        .map(|one| one.as_str().map_or_else(|| one.to_string(), str::to_owned))
                        .collect::<Vec<_>>()
                        .join(","),
                    other => other.to_string(),
                };
                let name = setting.env.first().copied().unwrap_or_default();
                self.extra("extraEnv", json!({"name": name, "value": text}));
            } else {
                self.set("plugin.configs", json!({"default": {"version": "v1"}}));
                let mut place = &mut self.values["plugin"]["configs"]["default"];
                for part in setting.key.split('.') {
                    place = &mut place[part];
                }
                *place = value;
            }
        }
        let configs = self.values.get("plugin").map(|plugin| plugin["configs"].clone()).unwrap_or_default();
        for (name, config) in configs.as_object().into_iter().flatten() {
            let text = serde_saphyr::to_string(config).context("writing YAML")?;
            load(name, &text, &[], Strictness::Strict).map_err(|problems| {
                let list: Vec<String> =
                    problems.list.iter().map(|problem| format!("\n  {problem}")).collect();
                anyhow!("the configuration {name} cannot be served:{}", list.concat())
            })?;
        }
        let mut text = "# Values of charts/gantry, made by `gantry migrate`.\n".to_owned();
        let mut section = |title: &str, lines: Vec<String>| {
            if !lines.is_empty() {
                // A String takes every write.
                let _ = writeln!(text, "#\n# {title}:");
                for line in lines {
                    let _ = writeln!(text, "#   {}", line.replace('\n', " "));
                }
            }
        };
        section("Before you install", self.steps.iter().map(|step| (*step).to_owned()).collect());
        let left_out = self.left_out.iter().map(|(path, why)| format!("{path}: {why}"));
        section("Not carried over", left_out.collect());
        match self.values.is_empty() {
            true => text.push_str("{}\n"),
            false => text.push_str(&serde_saphyr::to_string(&self.values).context("writing YAML")?),
        }
        Ok(text)
    }
}

/// Whether a value is more than an empty one.
fn is_set(value: &Value) -> bool {
    !value.is_null() && *value != "" && *value != false && *value != json!({}) && *value != json!([])
}

/// Takes a value out of a tree; nothing where it is missing or null.
fn take(tree: &mut Value, path: &str) -> Option<Value> {
    match path.split_once('.') {
        Some((head, rest)) => take(tree.get_mut(head)?, rest),
        None => tree.as_object_mut()?.remove(path).filter(|value| !value.is_null()),
    }
}

/// The reason for leaving a value out.
fn reason(path: &str) -> Option<&'static str> {
    let is_below =
        |name: &str| path.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
    REASONS.iter().find(|(name, _)| is_below(name)).map(|(_, why)| *why)
}

#[cfg(test)]
mod tests;
