//! The checks of the doctor: each is a function of the answers that the API server gave.

use std::collections::{BTreeMap, BTreeSet};

use gantry_api::names::{
    EXTENDER, EXTENDER_POLICIES, GPU_RESOURCE, GRANT_ANNOTATION, PLUGIN, PLUGIN_POLICIES, SETTINGS_ANNOTATION,
};
use gantry_extender::PublishedSettings;
use gantry_gang::protocol::MEMBERS_SLOW;
use k8s_openapi::ByteString;
use k8s_openapi::jiff::Timestamp;
use serde_json::Value;

use super::answers::{Answer, Answers, Shape, label, name};

/// What a check came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// All is well.
    Passed,
    /// It works, and something will surprise a user.
    Warning,
    /// It does not work.
    Failed,
    /// It cannot be determined.
    Unknown,
}

impl Outcome {
    /// Its name in JSON.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Passed => "ok",
            Self::Warning => "warning",
            Self::Failed => "failed",
            Self::Unknown => "unknown",
        }
    }
}

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Report {
    /// The name of the check.
    pub(crate) check: &'static str,
    /// The result.
    pub(crate) outcome: Outcome,
    /// What was found.
    pub(crate) message: String,
    /// Lines for a shell that mend it: commands, and comments that begin with `# `.
    pub(crate) fix: Option<String>,
}

/// A result other than "all is well".
struct Problem {
    outcome: Outcome,
    message: String,
    fix: String,
}

/// A message about what is well, or a problem.
type Finding = Result<String, Problem>;

/// What checks look at: the answers, and kube-scheduler's configuration if the operator gave it.
struct Facts<'a> {
    answers: &'a Answers,
    given: Option<&'a Value>,
}

/// A check: its name, and how it looks.
type Check = (&'static str, fn(&Facts<'_>) -> Finding);

/// Every check, in the order in which one problem explains the next.
const CHECKS: [Check; 23] = [
    ("kubernetes", kubernetes),
    ("crds", crds),
    ("policies", policies),
    ("rights", rights),
    ("plugin-pods", plugin_pods),
    ("kubelet-directory", kubelet_directory),
    ("gpu-nodes", gpu_nodes),
    ("driver", driver),
    ("registration", registration),
    ("versions", versions),
    ("other-plugin", other_plugin),
    ("dra", dra),
    ("mig", mig),
    ("labels", labels),
    ("extender", extender),
    ("scheduler-calls", scheduler_calls),
    ("scheduler-resources", scheduler_resources),
    ("certificates", certificates),
    ("webhook", webhook),
    ("clocks", clocks),
    ("metrics", metrics),
    ("memory", memory),
    ("slow-members", slow_members),
];

/// Kubernetes before this has no admission policies.
const OLDEST: u32 = 30;
/// Names of objects in a message at most.
const SHOWN: usize = 4;
/// Seconds after the last renewal of a Lease that has an alive owner.
const LEASE_AGE: i64 = 30;
/// Seconds by which clocks may differ: Leases and certificates tolerate that.
const CLOCK_SKEW: i64 = 10;
/// Seconds before its end when a certificate is reported.
const CERTIFICATE_WARNING: i64 = 14 * 24 * 3600;
/// The part of the extender's memory that one namespace may take, and the part of that which is reported.
const NAMESPACE_SHARE: f64 = 0.15;
const NEAR_LIMIT: f64 = 0.8;

/// Runs every check.
pub(crate) fn all(answers: &Answers, given: Option<&Value>) -> Vec<Report> {
    let facts = Facts { answers, given };
    let report = |(check, look): &Check| match look(&facts) {
        Ok(message) => Report { check, outcome: Outcome::Passed, message, fix: None },
        Err(Problem { outcome, message, fix }) => Report { check, outcome, message, fix: Some(fix) },
    };
    CHECKS.iter().map(report).collect()
}

fn fail<T>(message: impl Into<String>, fix: impl Into<String>) -> Result<T, Problem> {
    Err(Problem { outcome: Outcome::Failed, message: message.into(), fix: fix.into() })
}

fn warn<T>(message: impl Into<String>, fix: impl Into<String>) -> Result<T, Problem> {
    Err(Problem { outcome: Outcome::Warning, message: message.into(), fix: fix.into() })
}

fn unknown<T>(message: impl Into<String>, fix: impl Into<String>) -> Result<T, Problem> {
    Err(Problem { outcome: Outcome::Unknown, message: message.into(), fix: fix.into() })
}

/// Some names, and how many more there are.
fn listed<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let all: BTreeSet<&str> = names.into_iter().collect();
    let shown: Vec<&str> = all.iter().take(SHOWN).copied().collect();
    match all.len().saturating_sub(SHOWN) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

impl Facts<'_> {
    /// A list that a check cannot do without; empty where the kind is not served.
    fn list(&self, name: &str) -> Result<&[Value], Problem> {
        match self.answers.get(name) {
            Answer::Unreadable(why) => unknown(
                format!("{name} cannot be read: {why}"),
                format!("# run it with a role that may read {name}"),
            ),
            _ => Ok(self.answers.items(name)),
        }
    }

    fn namespace(&self) -> &str {
        &self.answers.namespace
    }

    fn own(&self, list: &str, wanted: &str) -> Option<&Value> {
        let is_own = |set: &&Value| name(set) == wanted && set["metadata"]["namespace"] == self.namespace();
        self.answers.items(list).iter().find(is_own)
    }

    /// The workloads of Gantry.
    fn workloads(&self) -> impl Iterator<Item = &Value> {
        let all = ["daemonsets", "deployments"].map(|list| self.answers.items(list)).into_iter().flatten();
        all.filter(|set| set["metadata"]["namespace"] == self.namespace() && name(set).starts_with("gantry-"))
    }

    /// The command that gives an installation by the chart these values, or the lines for one by the manifests.
    fn upgrade(&self, values: &[&str], manifests: &str) -> String {
        let space = self.namespace();
        let release = self
            .workloads()
            .find_map(|set| set["metadata"]["annotations"]["meta.helm.sh/release-name"].as_str());
        let set = match values.is_empty() {
            true => String::new(),
            false => format!(" --set {}", values.join(",")),
        };
        match release {
            Some(release) => format!("helm upgrade {release} charts/gantry -n {space} --reuse-values{set}"),
            None if self.workloads().next().is_none() => format!(
                "helm upgrade --install gantry charts/gantry -n {space} --create-namespace{}",
                match values.is_empty() {
                    true => " --set image.repository=REGISTRY/gantry".to_owned(),
                    false => format!("{set},image.repository=REGISTRY/gantry"),
                }
            ),
            None => manifests.to_owned(),
        }
    }

    /// The version that the leading extender publishes.
    fn extender_version(&self) -> Option<String> {
        let lease = self.answers.items("leases").iter().find(|lease| name(lease) == EXTENDER)?;
        let text = lease["metadata"]["annotations"][SETTINGS_ANNOTATION].as_str()?;
        let settings: PublishedSettings = serde_json::from_str(text).ok()?;
        Some(settings.version).filter(|version| !version.is_empty())
    }

    /// Pods of Gantry with this app name.
    fn pods_of(&self, app: &str) -> impl Iterator<Item = &Value> {
        let pods = self.answers.items("own-pods").iter();
        pods.filter(move |pod| label(pod, "app.kubernetes.io/name") == Some(app))
    }

    fn plugin_pods(&self) -> impl Iterator<Item = &Value> {
        self.pods_of(PLUGIN).chain(self.pods_of("gantry-plugin-mig"))
    }

    /// The GpuNodes whose condition Ready has one of these reasons, with its message.
    fn with_reason(&self, reasons: &[&str]) -> Result<Vec<(&str, &str)>, Problem> {
        let nodes = self.list("gpunodes")?.iter();
        let found = nodes.filter_map(|node| {
            let mut conditions = node["status"]["conditions"].as_array()?.iter();
            let ready = conditions.find(|condition| condition["type"] == "Ready")?;
            let is_wanted = reasons.iter().any(|reason| ready["reason"] == *reason);
            is_wanted.then(|| (name(node), ready["message"].as_str().unwrap_or_default()))
        });
        Ok(found.collect())
    }

    /// Values of a metric of all extenders, with its labels as text.
    fn metric<'a>(&'a self, metric: &'a str) -> impl Iterator<Item = (&'a str, f64)> {
        let pages = self.answers.beginning("metrics/").filter_map(|(_, answer)| match answer {
            Answer::Found(Value::String(page)) => Some(page.as_str()),
            _ => None,
        });
        pages.flat_map(str::lines).filter_map(move |line| {
            let rest = line.strip_prefix(metric)?;
            let (labels, value) = match rest.strip_prefix('{') {
                Some(rest) => rest.split_once("} ")?,
                None => ("", rest.strip_prefix(' ')?),
            };
            Some((labels, value.split(' ').next()?.parse().ok()?))
        })
    }

    /// A value of a label in the labels of [`Self::metric`].
    fn labelled<'a>(labels: &'a str, key: &str) -> &'a str {
        let rest = labels.split(&format!("{key}=\"")).nth(1).unwrap_or_default();
        rest.split('"').next().unwrap_or_default()
    }

    /// Why the metrics of an extender cannot be read.
    fn unread_metrics(&self) -> Option<&str> {
        self.answers.beginning("metrics/").find_map(|(_, answer)| match answer {
            Answer::Unreadable(why) => Some(why.as_str()),
            _ => None,
        })
    }
}

fn kubernetes(facts: &Facts<'_>) -> Finding {
    let Answer::Found(version) = facts.answers.get("version") else {
        return unknown("the version of Kubernetes cannot be read", "kubectl auth can-i get /version");
    };
    let text = version["gitVersion"].as_str().unwrap_or_default();
    let minor = version["minor"].as_str().unwrap_or_default();
    let digits: String = minor.chars().take_while(char::is_ascii_digit).collect();
    match digits.parse::<u32>() {
        Ok(minor) if minor < OLDEST => fail(
            format!("Kubernetes {text} is older than 1.{OLDEST}"),
            format!("# upgrade the cluster to 1.{OLDEST} or later (docs/project/support.md)"),
        ),
        _ => Ok(format!("Kubernetes {text}")),
    }
}

fn crds(facts: &Facts<'_>) -> Finding {
    let fix = || facts.upgrade(&["crds.install=true"], "kubectl apply --server-side -f manifests/crds.yaml");
    for kind in ["gpunodes", "gangs"] {
        let crd = match facts.answers.get(&format!("crd-{kind}")) {
            Answer::Found(crd) => crd,
            Answer::Absent => return fail(format!("{kind}.gantry.dev is not installed"), fix()),
            Answer::Unreadable(why) => {
                return unknown(
                    format!("{kind}.gantry.dev cannot be read: {why}"),
                    "kubectl auth can-i get customresourcedefinitions",
                );
            }
        };
        let conditions = crd["status"]["conditions"].as_array();
        let mut conditions = conditions.into_iter().flatten();
        if !conditions.any(|condition| condition["type"] == "Established" && condition["status"] == "True") {
            return fail(format!("{kind}.gantry.dev is not established"), fix());
        }
        let mut versions = crd["spec"]["versions"].as_array().into_iter().flatten();
        if !versions.any(|version| version["name"] == "v1alpha1" && version["served"] == true) {
            return fail(format!("{kind}.gantry.dev does not serve v1alpha1"), fix());
        }
    }
    Ok("gpunodes and gangs are served".to_owned())
}

fn policies(facts: &Facts<'_>) -> Finding {
    let policies = facts.list("policies")?;
    let bindings = facts.list("bindings")?;
    let denies = |wanted: &&str| {
        let actions = |binding: &Value| {
            binding["spec"]["validationActions"]
                .as_array()
                .is_some_and(|actions| actions.iter().any(|action| action == "Deny"))
        };
        policies.iter().any(|policy| name(policy) == *wanted)
            && bindings.iter().any(|binding| binding["spec"]["policyName"] == **wanted && actions(binding))
    };
    let mut wanted: BTreeSet<&str> =
        PLUGIN_POLICIES.into_iter().chain(["gantry-grant", "gantry-binding"]).collect();
    if facts.answers.shape() != Shape::PluginAlone {
        wanted.extend(EXTENDER_POLICIES);
        wanted.insert("gantry-gang-annotations");
    }
    let missing: Vec<&str> = wanted.iter().filter(|name| !denies(name)).copied().collect();
    match missing.is_empty() {
        true => Ok(format!("{} admission policies deny", wanted.len())),
        false => fail(
            format!("missing, or without a binding that denies: {}", listed(missing)),
            facts.upgrade(&["guard.enabled=true"], "kubectl apply -f manifests/guard.yaml"),
        ),
    }
}

fn rights(facts: &Facts<'_>) -> Finding {
    let lacking = match facts.answers.get("rights") {
        Answer::Found(Value::Array(lacking)) => lacking,
        Answer::Unreadable(why) => {
            return unknown(
                format!("access cannot be reviewed: {why}"),
                "kubectl auth can-i create subjectaccessreviews",
            );
        }
        _ => {
            return unknown("access cannot be reviewed", "kubectl auth can-i create subjectaccessreviews");
        }
    };
    let texts: Vec<String> = lacking
        .iter()
        .map(|one| {
            format!(
                "{} may not {}",
                one["account"].as_str().unwrap_or_default(),
                one["right"].as_str().unwrap_or_default()
            )
        })
        .collect();
    match texts.is_empty() {
        true => Ok("the daemons have their rights".to_owned()),
        false => {
            fail(listed(texts.iter().map(String::as_str)), facts.upgrade(&[], "kubectl apply -k manifests"))
        }
    }
}

fn plugin_pods(facts: &Facts<'_>) -> Finding {
    facts.list("daemonsets")?;
    let space = facts.namespace();
    let Some(plain) = facts.own("daemonsets", PLUGIN) else {
        return fail(
            format!("there is no DaemonSet {PLUGIN} in namespace {space}"),
            format!(
                "# if Gantry is in another namespace: gantry doctor --system-namespace NAMESPACE\n{}",
                facts.upgrade(&[], "kubectl apply -k manifests")
            ),
        );
    };
    let count = |set: &Value, field: &str| set["status"][field].as_u64().unwrap_or_default();
    let sets = || std::iter::once(plain).chain(facts.own("daemonsets", "gantry-plugin-mig"));
    let wanted: u64 = sets().map(|set| count(set, "desiredNumberScheduled")).sum();
    let ready: u64 = sets().map(|set| count(set, "numberReady")).sum();
    if wanted == 0 {
        return fail("no node is selected for the plugin", "kubectl label node NODE gantry.dev/gpu=true");
    }
    if ready < wanted {
        let is_late = |pod: &&Value| {
            let mut conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
            !conditions.any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
        };
        let late: Vec<&str> = facts.plugin_pods().filter(is_late).map(name).collect();
        let fix = match late.first() {
            Some(pod) => format!("kubectl -n {space} describe pod {pod}\nkubectl -n {space} logs {pod}"),
            None => format!("kubectl -n {space} describe daemonset {PLUGIN}"),
        };
        let late = listed(late.iter().copied());
        return fail(format!("{ready} of {wanted} pods of the plugin are ready; not {late}"), fix);
    }
    Ok(format!("{ready} of {wanted} are ready"))
}

/// The plugin's pod cannot start where kubelet's directory is another one.
fn kubelet_directory(facts: &Facts<'_>) -> Finding {
    let pods: BTreeSet<&str> = facts.plugin_pods().map(name).collect();
    let mut events = facts.list("mount-events")?.iter();
    let found = events.find(|event| {
        let message = event["message"].as_str().unwrap_or_default();
        let about = event["involvedObject"]["name"].as_str().unwrap_or_default();
        pods.contains(about) && message.contains("hostPath type check failed")
    });
    match found {
        None => Ok("kubelet's directory is mounted".to_owned()),
        Some(event) => fail(
            format!(
                "pod {}: {}",
                event["involvedObject"]["name"].as_str().unwrap_or_default(),
                event["message"].as_str().unwrap_or_default()
            ),
            format!(
                "# DIRECTORY is kubelet's --root-dir (docs/install.md#nodes-that-differ)\n{}",
                facts.upgrade(
                    &["plugin.kubeletRoot=DIRECTORY"],
                    "sed -i s,/var/lib/kubelet/,DIRECTORY/, manifests/plugin.yaml\nkubectl apply -f manifests/plugin.yaml"
                )
            ),
        ),
    }
}

/// Labels of the nodes that the plugin selects, as in `manifests/plugin.yaml`: all labels of one entry, each with its
/// value or any.
const GPU_NODES: [&[(&str, Option<&str>)]; 7] = [
    &[("gantry.dev/gpu", Some("true"))],
    &[("nvidia.com/gpu.present", Some("true"))],
    &[("feature.node.kubernetes.io/pci-10de.present", Some("true"))],
    &[("gke-no-default-nvidia-gpu-device-plugin", Some("true")), ("cloud.google.com/gke-accelerator", None)],
    &[("kubernetes.azure.com/accelerator", Some("nvidia"))],
    &[("karpenter.k8s.aws/instance-gpu-manufacturer", Some("nvidia"))],
    &[("k8s.amazonaws.com/accelerator", None)],
];

/// Whether the plugin's DaemonSets select a node.
fn is_selected(node: &Value) -> bool {
    let has = |(key, wanted): &(&str, Option<&str>)| {
        label(node, key).is_some_and(|value| wanted.is_none_or(|wanted| value == wanted))
    };
    label(node, "gantry.dev/gpu") != Some("false") && GPU_NODES.iter().any(|marks| marks.iter().all(has))
}

fn gpu_nodes(facts: &Facts<'_>) -> Finding {
    let published: BTreeSet<&str> = facts.list("gpunodes")?.iter().map(name).collect();
    let nodes = facts.list("nodes")?.iter();
    let silent: Vec<&str> =
        nodes.filter(|node| is_selected(node)).map(name).filter(|node| !published.contains(node)).collect();
    if !silent.is_empty() {
        return fail(
            format!("marked as GPU nodes, and no plugin reports them: {}", listed(silent.iter().copied())),
            format!(
                "kubectl -n {} get pods -o wide --field-selector spec.nodeName={}",
                facts.namespace(),
                silent[0]
            ),
        );
    }
    match published.len() {
        0 => fail("no plugin has published a GpuNode", "kubectl label node NODE gantry.dev/gpu=true"),
        count => Ok(format!("{count} nodes publish their GPUs")),
    }
}

fn driver(facts: &Facts<'_>) -> Finding {
    let without = facts.with_reason(&["NoDevices"])?;
    let Some((node, why)) = without.first() else {
        let hosts = facts.answers.items("gpunodes").iter();
        let versions = hosts.filter_map(|node| node["spec"]["machine"]["host"]["driver"].as_str());
        return Ok(match listed(versions).as_str() {
            "" => "no node reports one".to_owned(),
            versions => format!("driver {versions}"),
        });
    };
    let classes = facts.answers.items("runtime-classes").iter();
    let has_class = classes.map(name).any(|class| class == "nvidia");
    let set = facts.own("daemonsets", PLUGIN);
    let names_class = set.is_some_and(|set| set["spec"]["template"]["spec"]["runtimeClassName"].is_string());
    let fix = match has_class && !names_class {
        true => facts.upgrade(
            &["plugin.runtimeClassName=nvidia"],
            &format!(
                "kubectl -n {} patch daemonset {PLUGIN} -p '{{\"spec\":{{\"template\":{{\"spec\":{{\"runtimeClassName\":\"nvidia\"}}}}}}}}'",
                facts.namespace()
            ),
        ),
        false => format!(
            "# install the NVIDIA driver and container toolkit on {node}; the driver of the GPU operator needs \
             plugin.driverRoot=/run/nvidia/driver (docs/install.md#4-the-nodes)\nkubectl describe gpunode {node}"
        ),
    };
    fail(format!("{} nodes serve no GPU; {node}: {why}", without.len()), fix)
}

fn registration(facts: &Facts<'_>) -> Finding {
    let wrong = facts.with_reason(&["NotRegistered", "Stopped", "PodsUnknown"])?;
    if let Some((node, why)) = wrong.first() {
        return fail(
            format!("{} plugins do not serve; {node}: {why}", wrong.len()),
            format!(
                "kubectl -n {} logs {}",
                facts.namespace(),
                facts
                    .plugin_pods()
                    .find(|pod| pod["spec"]["nodeName"] == *node)
                    .map_or_else(|| format!("daemonset/{PLUGIN}"), |pod| name(pod).to_owned())
            ),
        );
    }
    match facts.with_reason(&["Degraded"])?.first() {
        Some((node, why)) => {
            warn(format!("{node} is degraded: {why}"), format!("kubectl describe gpunode {node}"))
        }
        None => Ok("kubelet lists the devices of every plugin".to_owned()),
    }
}

/// The release of a version: its major and minor number.
fn release(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.split('.').map(|number| number.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

/// Whether an extender of one version reads the GpuNodes of a plugin of the other: releases next to each other do
/// (`docs/project/support.md`).
fn work_together(plugin: &str, extender: &str) -> bool {
    match (release(plugin), release(extender)) {
        (Some(plugin), Some(extender)) => plugin.0 == extender.0 && plugin.1.abs_diff(extender.1) <= 1,
        _ => plugin == extender,
    }
}

fn versions(facts: &Facts<'_>) -> Finding {
    let own = env!("CARGO_PKG_VERSION");
    let nodes = facts.list("gpunodes")?.iter();
    let plugins: BTreeMap<&str, &str> = nodes
        .filter_map(|node| {
            let version = node["status"]["pluginVersion"].as_str().filter(|version| !version.is_empty())?;
            Some((version, name(node)))
        })
        .collect();
    let extender = match facts.answers.shape() {
        Shape::PluginAlone => None,
        Shape::Own | Shape::Existing => facts.extender_version(),
    };
    let fix = || {
        format!(
            "# the CRDs first, then the extender, then the plugin: docs/how-to/upgrade.md\n{}",
            facts.upgrade(
                &[],
                "kubectl apply --server-side -f manifests/crds.yaml\nkubectl apply -k manifests"
            )
        )
    };
    if let Some(extender) = &extender {
        if let Some((plugin, node)) = plugins.iter().find(|(plugin, _)| !work_together(plugin, extender)) {
            return fail(
                format!(
                    "the plugin of {node} is {plugin} and the extender {extender}: they may be one release apart"
                ),
                fix(),
            );
        }
        if let Some((plugin, node)) = plugins.iter().find(|(plugin, _)| release(plugin) > release(extender)) {
            return warn(
                format!("the plugin of {node} is {plugin}, newer than the extender, which is {extender}"),
                fix(),
            );
        }
        if extender != own {
            return warn(format!("the extender is {extender}, this command is {own}"), fix());
        }
    }
    match plugins.iter().find(|(version, _)| **version != own) {
        None => Ok(format!("all daemons and this command are {own}")),
        Some((version, node)) => {
            warn(format!("the plugin of {node} is {version}, this command is {own}"), fix())
        }
    }
}

/// Another plugin on the nodes that have Gantry's pods or that Gantry's DaemonSet selects; before the installation on
/// every node that is not excluded.
fn other_plugin(facts: &Facts<'_>) -> Finding {
    let served: BTreeSet<&str> =
        facts.plugin_pods().filter_map(|pod| pod["spec"]["nodeName"].as_str()).collect();
    facts.list("daemonsets")?;
    let is_installed = facts.own("daemonsets", PLUGIN).is_some();
    let nodes = facts.list("nodes")?.iter();
    let chosen: BTreeSet<&str> = nodes
        .filter(|node| is_selected(node) || (!is_installed && label(node, "gantry.dev/gpu") != Some("false")))
        .map(name)
        .collect();
    for (set, answer) in facts.answers.beginning("rival/") {
        let Answer::Found(Value::Array(pods)) = answer else {
            return unknown(
                format!("the pods of the DaemonSet {set} cannot be read"),
                "kubectl auth can-i list pods -A",
            );
        };
        let rivals: BTreeSet<&str> = pods.iter().filter_map(|pod| pod["spec"]["nodeName"].as_str()).collect();
        let (space, set) = set.split_once('/').unwrap_or((set, ""));
        let fix = || {
            format!(
                "# with the GPU operator: devicePlugin.enabled=false in its chart\n\
                 kubectl -n {space} delete daemonset {set}"
            )
        };
        let shared = listed(rivals.intersection(&served).copied());
        if !shared.is_empty() {
            return fail(format!("the DaemonSet {space}/{set} serves the same GPUs on {shared}"), fix());
        }
        let selected = listed(rivals.intersection(&chosen).copied());
        if !selected.is_empty() {
            let message =
                format!("the DaemonSet {space}/{set} serves the GPUs of {selected}, where Gantry is to run");
            return fail(message, fix());
        }
    }
    Ok("no other device plugin is on these nodes".to_owned())
}

fn dra(facts: &Facts<'_>) -> Finding {
    let published: BTreeSet<&str> = facts.list("gpunodes")?.iter().map(name).collect();
    let slices = facts.list("slices")?.iter();
    let offered = slices.filter_map(|slice| {
        let spec = &slice["spec"];
        let node = spec["nodeName"].as_str()?;
        (spec["driver"] == "gpu.nvidia.com" && published.contains(node)).then_some(node)
    });
    let both: BTreeSet<&str> = offered.collect();
    match both.first() {
        None => Ok("no DRA driver offers the same GPUs".to_owned()),
        Some(node) => fail(
            format!(
                "NVIDIA's DRA driver offers the GPUs of {} as well: a GPU may be given twice",
                listed(both.iter().copied())
            ),
            format!(
                "# to leave these GPUs to Gantry: resources.gpus.enabled=false in the chart of the DRA driver; to leave \
                 them to DRA:\nkubectl label node {node} gantry.dev/gpu=false --overwrite"
            ),
        ),
    }
}

fn mig(facts: &Facts<'_>) -> Finding {
    let labelled: BTreeSet<&str> = facts
        .list("nodes")?
        .iter()
        .filter(|node| label(node, "gantry.dev/mig") == Some("true"))
        .map(name)
        .collect();
    let is_on = |node: &&Value| {
        let mut gpus = node["spec"]["machine"]["gpus"].as_array().into_iter().flatten();
        gpus.any(|gpu| gpu["mig"]["enabled"] == true)
    };
    let with_mig: Vec<&str> = facts.list("gpunodes")?.iter().filter(is_on).map(name).collect();
    let unlabelled: Vec<&str> = with_mig.iter().filter(|node| !labelled.contains(*node)).copied().collect();
    if let Some(node) = unlabelled.first() {
        return fail(
            format!(
                "MIG is on, and the plugin has no capability to see MIG devices: {}",
                listed(unlabelled.iter().copied())
            ),
            format!("kubectl label node {node} gantry.dev/mig=true --overwrite"),
        );
    }
    if !labelled.is_empty() && facts.own("daemonsets", "gantry-plugin-mig").is_none() {
        return fail(
            "nodes are labelled gantry.dev/mig=true, and there is no DaemonSet for them",
            facts.upgrade(&["plugin.mig.enabled=true"], "kubectl apply -f manifests/plugin-mig.yaml"),
        );
    }
    Ok(format!("{} nodes with MIG", with_mig.len()))
}

/// Adds the option that writes labels onto the Node.
const LABELS_PATCH: &str =
    r#"[{"op":"add","path":"/spec/template/spec/containers/0/args/-","value":"--labels=node"}]"#;

fn labels(facts: &Facts<'_>) -> Finding {
    const PRODUCT: &str = "nvidia.com/gpu.product";
    let published: BTreeSet<&str> = facts.list("gpunodes")?.iter().map(name).collect();
    let nodes = facts.list("nodes")?.iter().filter(|node| published.contains(name(node)));
    let without = listed(nodes.filter(|node| label(node, PRODUCT).is_none()).map(name));
    match without.is_empty() {
        true => Ok(format!("every GPU node has {PRODUCT}")),
        false => warn(
            format!("{without} without the label {PRODUCT}: pods that select nodes by it find none"),
            format!(
                "# with node-feature-discovery: gfd in place of node (docs/labels.md)\n{}",
                facts.upgrade(
                    &["plugin.labels=node"],
                    &format!(
                        "kubectl apply -f manifests/labels-node.yaml\n\
                         kubectl -n {} patch daemonset {PLUGIN} --type=json -p '{LABELS_PATCH}'",
                        facts.namespace()
                    )
                )
            ),
        ),
    }
}

fn extender(facts: &Facts<'_>) -> Finding {
    if facts.answers.shape() == Shape::PluginAlone {
        return Ok("not installed: the plugin alone".to_owned());
    }
    let space = facts.namespace();
    let leases = facts.list("leases")?;
    let Some(lease) = leases.iter().find(|lease| name(lease) == EXTENDER) else {
        return fail(
            "no extender has led yet",
            format!("kubectl -n {space} get pods -l app.kubernetes.io/name={EXTENDER}"),
        );
    };
    let holder = lease["spec"]["holderIdentity"].as_str().unwrap_or_default();
    let age = age(&lease["spec"]["renewTime"], facts.answers.now);
    match age {
        Some(age) if age <= LEASE_AGE && !holder.is_empty() => Ok(format!("{holder} leads")),
        _ => fail(
            format!(
                "no extender leads: the Lease {EXTENDER} was last renewed {} s ago",
                age.unwrap_or_default()
            ),
            format!("kubectl -n {space} logs -l app.kubernetes.io/name={EXTENDER} --all-containers"),
        ),
    }
}

/// A time, in seconds since 1970.
fn second(time: &Value) -> Option<i64> {
    let time: Timestamp = time.as_str()?.parse().ok()?;
    Some(time.as_second())
}

/// Seconds since a time.
fn age(time: &Value, now: Timestamp) -> Option<i64> {
    Some(now.as_second() - second(time)?)
}

/// How kube-scheduler gets its configuration.
const SCHEDULER_CONFIG: &str = "gantry scheduler-config > kube-scheduler-config.yaml\n\
    # give that file to kube-scheduler on every control-plane node: docs/install.md#7-the-shape-existing";

fn scheduler_calls(facts: &Facts<'_>) -> Finding {
    let fix = match facts.answers.shape() {
        Shape::PluginAlone => return Ok("no scheduler is to call an extender".to_owned()),
        Shape::Own => concat!(
            "# this pod calls it; then run gantry doctor again\n",
            "kubectl patch --local -f manifests/samples/two-gpus.yaml -p '{\"spec\":{\"schedulerName\":\"gantry\"}}' ",
            "-o yaml | kubectl apply -f -"
        ),
        Shape::Existing => SCHEDULER_CONFIG,
    };
    let calls: f64 = facts
        .metric("gantry_extender_requests_total")
        .filter(|(labels, _)| ["filter", "bind"].contains(&Facts::labelled(labels, "verb")))
        .map(|(_, count)| count)
        .sum();
    if calls > 0.0 {
        return Ok(format!("{calls} calls of kube-scheduler"));
    }
    match facts.unread_metrics() {
        Some(why) => unknown(
            format!("the metrics of the extender cannot be read: {why}"),
            format!("kubectl -n {} auth can-i get pods --subresource=proxy", facts.namespace()),
        ),
        None => warn("no kube-scheduler has called the extender since its start", fix),
    }
}

/// The names that kube-scheduler's configuration manages; `None` where it manages every pod.
fn managed(config: &Value) -> Option<Option<BTreeSet<&str>>> {
    let mut extenders = config["extenders"].as_array()?.iter();
    let ours = extenders.find(|extender| extender["bindVerb"] == "bind")?;
    let names = ours["managedResources"].as_array().filter(|names| !names.is_empty());
    Some(names.map(|names| names.iter().filter_map(|one| one["name"].as_str()).collect()))
}

fn scheduler_resources(facts: &Facts<'_>) -> Finding {
    if facts.answers.shape() == Shape::PluginAlone {
        return Ok("no scheduler is to call an extender".to_owned());
    }
    let published: BTreeSet<&str> = facts
        .list("gpunodes")?
        .iter()
        .flat_map(|node| node["status"]["resources"].as_array().into_iter().flatten())
        .filter_map(|resource| resource["name"].as_str())
        .collect();
    let own: Option<Value> = match facts.answers.get("scheduler-map") {
        Answer::Found(map) => {
            map["data"]["config.yaml"].as_str().and_then(|text| serde_saphyr::from_str(text).ok())
        }
        _ => None,
    };
    let running = facts.answers.beginning("configz/").find_map(|(_, answer)| match answer {
        Answer::Found(config) => Some(&config["kubescheduler.config.k8s.io"]),
        _ => None,
    });
    let config = facts.given.or(own.as_ref()).or(running);
    let fix = match facts.given.is_none() && own.is_some() {
        true => facts.upgrade(&[], "kubectl apply -f manifests/scheduler.yaml"),
        false => SCHEDULER_CONFIG.to_owned(),
    };
    if let Some(config) = config {
        return match managed(config) {
            None => fail("kube-scheduler's configuration has no extender that binds", fix),
            Some(None) => Ok("kube-scheduler calls the extender for every pod of its profile".to_owned()),
            Some(Some(names)) => {
                let lacking: Vec<&str> = published.difference(&names).copied().collect();
                match lacking.is_empty() {
                    true => {
                        Ok(format!("kube-scheduler manages all {} resources of the nodes", published.len()))
                    }
                    false => fail(
                        format!(
                            "nodes offer resources that kube-scheduler does not manage: {}",
                            listed(lacking)
                        ),
                        fix,
                    ),
                }
            }
        };
    }
    // A pod that was bound without the extender has devices and no grant.
    let metadata = facts.list("pods")?.iter();
    let granted: BTreeSet<(&str, &str)> = metadata
        .filter(|pod| pod["metadata"]["annotations"][GRANT_ANNOTATION].is_string())
        .map(|pod| (pod["metadata"]["namespace"].as_str().unwrap_or_default(), name(pod)))
        .collect();
    let known: BTreeSet<(&str, &str)> = facts
        .answers
        .items("pods")
        .iter()
        .map(|pod| (pod["metadata"]["namespace"].as_str().unwrap_or_default(), name(pod)))
        .collect();
    let holders = facts
        .answers
        .items("gpunodes")
        .iter()
        .flat_map(|node| node["status"]["holders"].as_array().into_iter().flatten());
    let mut bypassed: BTreeMap<&str, String> = BTreeMap::new();
    for holder in holders {
        let pod =
            (holder["namespace"].as_str().unwrap_or_default(), holder["pod"].as_str().unwrap_or_default());
        if known.contains(&pod) && !granted.contains(&pod) {
            let resource = holder["resource"].as_str().unwrap_or(GPU_RESOURCE);
            bypassed.entry(resource).or_insert_with(|| format!("{resource} by {}/{}", pod.0, pod.1));
        }
    }
    match bypassed.is_empty() {
        true => unknown(
            "kube-scheduler's configuration cannot be read from the cluster; every pod with devices has a grant",
            "# FILE is kube-scheduler's configuration, on a control-plane node\n\
             gantry doctor --scheduler-config FILE",
        ),
        false => fail(
            format!(
                "held without a grant, so bound without the extender: {}",
                listed(bypassed.values().map(String::as_str))
            ),
            fix,
        ),
    }
}

fn certificates(facts: &Facts<'_>) -> Finding {
    let Some(secret) = secret(facts, "secret/tls", "the extender's certificates")? else {
        return Ok("none is used".to_owned());
    };
    let fix = || {
        format!(
            "# new files, which the extender reads without a restart: docs/doctor.md#certificates-of-the-extender\n\
             kubectl -n {} create secret generic {} --from-file=tls.crt --from-file=tls.key --from-file=ca.crt \
             --dry-run=client -o yaml | kubectl apply -f -",
            facts.namespace(),
            name(secret)
        )
    };
    for file in ["tls.crt", "ca.crt"] {
        valid(facts, secret, file, fix)?;
    }
    Ok("the certificates of the extender are valid".to_owned())
}

/// A Secret that was read, if there is one.
fn secret<'a>(facts: &Facts<'a>, read: &str, of: &str) -> Result<Option<&'a Value>, Problem> {
    match facts.answers.get(read) {
        Answer::Found(secret) => Ok(Some(secret)),
        Answer::Absent => Ok(None),
        Answer::Unreadable(why) => unknown(
            format!("the Secret of {of} cannot be read: {why}"),
            format!("kubectl -n {} auth can-i get secrets", facts.namespace()),
        ),
    }
}

/// Whether a file of a Secret is a certificate that does not expire soon.
fn valid(facts: &Facts<'_>, secret: &Value, file: &str, fix: impl Fn() -> String) -> Result<(), Problem> {
    let pem = serde_json::from_value::<ByteString>(secret["data"][file].clone()).unwrap_or_default();
    let parsed = x509_parser::pem::parse_x509_pem(&pem.0).ok();
    let end =
        parsed.as_ref().and_then(|(_, pem)| Some(pem.parse_x509().ok()?.validity().not_after.timestamp()));
    let Some(end) = end else {
        return fail(format!("{file} of the Secret {} is no certificate", name(secret)), fix());
    };
    let left = end - facts.answers.now.as_second();
    if left < 0 {
        return fail(format!("{file} of the Secret {} has expired", name(secret)), fix());
    }
    if left < CERTIFICATE_WARNING {
        return warn(
            format!("{file} of the Secret {} expires in {} days", name(secret), left / 86_400),
            fix(),
        );
    }
    Ok(())
}

fn webhook(facts: &Facts<'_>) -> Finding {
    let configuration = match facts.answers.get("webhook") {
        Answer::Found(configuration) => configuration,
        Answer::Absent => return Ok("none is used".to_owned()),
        Answer::Unreadable(why) => {
            return unknown(
                format!("the MutatingWebhookConfiguration gantry-scheduler-name cannot be read: {why}"),
                "kubectl auth can-i get mutatingwebhookconfigurations",
            );
        }
    };
    let space = facts.namespace();
    let fix = || {
        format!(
            "# a new certificate: docs/doctor.md#certificate-of-the-webhook\n\
             kubectl -n {space} delete secret gantry-webhook-tls --ignore-not-found\n{}",
            facts.upgrade(
                &["scheduler.webhook.enabled=true"],
                "# or write a new one into the Secret of the webhook"
            )
        )
    };
    let bundle = configuration["webhooks"][0]["clientConfig"]["caBundle"].as_str().unwrap_or_default();
    if bundle.is_empty() {
        return fail("the webhook's configuration has no caBundle: the API server trusts no extender", fix());
    }
    let Some(secret) = secret(facts, "secret/webhook", "the webhook's certificate")? else {
        return fail("the Secret of the webhook's certificate does not exist", fix());
    };
    valid(facts, secret, "tls.crt", fix)?;
    let slices = facts.list("webhook-endpoints")?.iter();
    let endpoints = slices.flat_map(|slice| slice["endpoints"].as_array().into_iter().flatten());
    match endpoints.filter(|endpoint| endpoint["conditions"]["ready"] != false).count() {
        0 => fail(
            "the Service gantry-webhook has no ready endpoint: pods are not assigned to the scheduler",
            format!("kubectl -n {space} get pods -l app.kubernetes.io/name={EXTENDER}"),
        ),
        ready => Ok(format!("extenders that assign pods to the scheduler: {ready}")),
    }
}

/// Seconds by which the clock that renewed a Lease is ahead of the API server's; negative if it is behind. The API
/// server records the time of every write by its own clock. Without that record only a time in the future is evidence.
fn skew(lease: &Value, now: Timestamp) -> Option<i64> {
    let renewed = second(&lease["spec"]["renewTime"])?;
    let entries = lease["metadata"]["managedFields"].as_array().into_iter().flatten();
    let writes = entries.filter(|entry| entry["fieldsV1"]["f:spec"]["f:renewTime"].is_object());
    match writes.filter_map(|entry| second(&entry["time"])).max() {
        Some(written) => Some(renewed - written),
        None => Some(renewed - now.as_second()).filter(|ahead| *ahead > 0),
    }
}

fn clocks(facts: &Facts<'_>) -> Finding {
    let now = facts.answers.now;
    let published: BTreeSet<&str> = facts.list("gpunodes")?.iter().map(name).collect();
    let nodes = facts.list("node-leases")?.iter().filter(|lease| published.contains(name(lease)));
    let nodes = nodes.filter_map(|lease| Some((name(lease), skew(lease, now)?)));
    let leases = facts.answers.items("leases").iter().filter(|lease| name(lease) == EXTENDER);
    let extenders =
        leases.filter_map(|lease| Some((lease["spec"]["holderIdentity"].as_str()?, skew(lease, now)?)));
    let wrong = nodes.chain(extenders).find(|(_, skew)| skew.abs() > CLOCK_SKEW);
    if let Some((host, skew)) = wrong {
        let side = if skew > 0 { "ahead of" } else { "behind" };
        return fail(
            format!("the clock of {host} is {} s {side} the API server's", skew.abs()),
            format!("# as root on {host}, or on its node; chrony does as well\ntimedatectl set-ntp true"),
        );
    }
    match facts.answers.ahead {
        ahead if ahead.abs() > CLOCK_SKEW => warn(
            format!("this machine's clock differs from the API server's by {ahead} s"),
            "# as root on this machine; chrony does as well\ntimedatectl set-ntp true",
        ),
        _ => Ok("the clocks of GPU nodes agree with the API server's".to_owned()),
    }
}

fn metrics(facts: &Facts<'_>) -> Finding {
    let monitors = ["pod-monitors", "service-monitors"].map(|kind| facts.answers.items(kind));
    let selects = |monitor: &&Value| monitor["spec"]["selector"].to_string().contains("gantry-");
    let monitors = monitors.into_iter().flatten().filter(selects).count();
    let namespaces = facts.list("namespaces")?.iter();
    let allowed = namespaces.filter(|space| label(space, "gantry.dev/metrics") == Some("true")).count();
    match (monitors, allowed) {
        (_, 0) => warn(
            "no namespace may read the plugin's metrics where NetworkPolicies are enforced",
            "# NAMESPACE is that of the collector, such as Prometheus\n\
             kubectl label namespace NAMESPACE gantry.dev/metrics=true",
        ),
        (0, _) if matches!(facts.answers.get("pod-monitors"), Answer::Found(_)) => warn(
            "the Prometheus operator is installed, and no monitor selects Gantry",
            facts.upgrade(
                &["monitoring.podMonitor.enabled=true", "monitoring.serviceMonitor.enabled=true"],
                "# monitors as in docs/metrics.md",
            ),
        ),
        _ => Ok(format!("{monitors} monitors; {allowed} namespaces may read metrics")),
    }
}

/// Members of gangs that run slower than the rest, as the conditions of Gangs have them.
fn slow_members(facts: &Facts<'_>) -> Finding {
    fn condition(gang: &Value) -> Option<(&str, &str, &str)> {
        let conditions = gang["status"]["conditions"].as_array()?;
        let holds = |known: &&Value| known["type"] == MEMBERS_SLOW && known["status"] == "True";
        let found = conditions.iter().find(holds)?;
        let space = gang["metadata"]["namespace"].as_str().unwrap_or_default();
        let message = found["message"].as_str().unwrap_or_default();
        Some((space, name(gang), message))
    }
    let slow: Vec<(&str, &str, &str)> = facts.list("gangs")?.iter().filter_map(condition).collect();
    let Some((space, gang, message)) = slow.first() else {
        return Ok("no member of a gang runs slower than the rest".to_owned());
    };
    let more = match slow.len() {
        1 => String::new(),
        2 => "; and 1 more gang".to_owned(),
        all => format!("; and {} more gangs", all - 1),
    };
    warn(
        format!("gang {space}/{gang} has a slow member: {message}{more}"),
        format!(
            "# docs/gangs-operations.md#what-to-do-about-a-slow-member\nkubectl -n {space} describe gang {gang}"
        ),
    )
}

/// The command that doubles the memory for objects.
fn more_memory(facts: &Facts<'_>, limit: Option<f64>) -> String {
    let mib = limit.map_or(320.0, |bytes| (bytes * 2.0 / f64::from(1 << 20)).ceil().clamp(16.0, 65_536.0));
    let options = format!("'extender.extraArgs={{--object-memory={mib:.0}}}'");
    let memory = format!("extender.resourceRequirements.limits.memory={:.0}Mi", mib * 3.0);
    let manifests =
        "# in the manifest of the extender: --object-memory, and three times as much for the container";
    format!(
        "# with the other extraArgs, if there are any (docs/install.md#memory-of-the-extender)\n{}",
        facts.upgrade(&[&memory, &options], manifests)
    )
}

fn memory(facts: &Facts<'_>) -> Finding {
    if facts.answers.shape() == Shape::PluginAlone {
        return Ok("no extender keeps objects".to_owned());
    }
    let limit = facts.metric("gantry_extender_object_bytes_limit").next().map(|(_, limit)| limit);
    let more_memory = || more_memory(facts, limit);
    let refused = facts.metric("gantry_extender_refused_objects").find(|(_, count)| *count > 0.0);
    if let Some((labels, count)) = refused {
        return fail(
            format!(
                "{count} objects of namespace {} are not kept: they take too much memory",
                Facts::labelled(labels, "namespace")
            ),
            format!("kubectl get events -A --field-selector reason=NamespaceTooLarge\n{}", more_memory()),
        );
    }
    let Some(limit) = limit else {
        return unknown(
            "the metrics of the extender cannot be read",
            format!("kubectl -n {} auth can-i get pods --subresource=proxy", facts.namespace()),
        );
    };
    let share = limit * NAMESPACE_SHARE;
    let largest = facts
        .metric("gantry_extender_object_bytes")
        .map(|(labels, bytes)| (Facts::labelled(labels, "namespace"), bytes))
        .filter(|(space, _)| !["cluster", "other", ""].contains(space))
        .max_by(|a, b| a.1.total_cmp(&b.1));
    match largest {
        Some((space, bytes)) if bytes > share * NEAR_LIMIT => warn(
            format!(
                "the objects of namespace {space} take {:.0} % of what one namespace may take",
                bytes / share * 100.0
            ),
            more_memory(),
        ),
        _ => Ok(format!("no namespace takes {:.0} % of its share", NEAR_LIMIT * 100.0)),
    }
}

#[cfg(test)]
mod tests;
