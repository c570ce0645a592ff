//! The checks of the doctor: each is a function of the answers that the API server gave.

use std::collections::{BTreeMap, BTreeSet};

use gantry_api::names::{
    EXTENDER, EXTENDER_POLICIES, GPU_RESOURCE, GRANT_ANNOTATION, PLUGIN, PLUGIN_POLICIES,
};
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
    /// The command or change that mends it.
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
const CHECKS: [Check; 22] = [
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
            Answer::Unreadable(why) => {
                unknown(format!("{name} cannot be read: {why}"), "run it with a role that may read them")
            }
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
        return unknown("the version of Kubernetes cannot be read", "allow GET /version");
    };
    let text = version["gitVersion"].as_str().unwrap_or_default();
    let minor = version["minor"].as_str().unwrap_or_default();
    let digits: String = minor.chars().take_while(char::is_ascii_digit).collect();
    match digits.parse::<u32>() {
        Ok(minor) if minor < OLDEST => fail(
            format!("Kubernetes {text} is older than 1.{OLDEST}"),
            "upgrade the cluster: admission policies protect the grants",
        ),
        _ => Ok(format!("Kubernetes {text}")),
    }
}

fn crds(facts: &Facts<'_>) -> Finding {
    const FIX: &str = "helm upgrade --install gantry ... (crds.install=true), or kubectl apply --server-side -f manifests/crds.yaml";
    for kind in ["gpunodes", "gangs"] {
        let crd = match facts.answers.get(&format!("crd-{kind}")) {
            Answer::Found(crd) => crd,
            Answer::Absent => return fail(format!("{kind}.gantry.dev is not installed"), FIX),
            Answer::Unreadable(why) => {
                return unknown(
                    format!("{kind}.gantry.dev cannot be read: {why}"),
                    "allow get of customresourcedefinitions",
                );
            }
        };
        let conditions = crd["status"]["conditions"].as_array();
        let mut conditions = conditions.into_iter().flatten();
        if !conditions.any(|condition| condition["type"] == "Established" && condition["status"] == "True") {
            return fail(format!("{kind}.gantry.dev is not established"), FIX);
        }
        let mut versions = crd["spec"]["versions"].as_array().into_iter().flatten();
        if !versions.any(|version| version["name"] == "v1alpha1" && version["served"] == true) {
            return fail(format!("{kind}.gantry.dev does not serve v1alpha1"), FIX);
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
    }
    let missing: Vec<&str> = wanted.iter().filter(|name| !denies(name)).copied().collect();
    match missing.is_empty() {
        true => Ok(format!("{} admission policies deny", wanted.len())),
        false => fail(
            format!("missing, or without a binding that denies: {}", listed(missing)),
            "helm upgrade ... --set guard.enabled=true, or kubectl apply -f manifests/guard.yaml",
        ),
    }
}

fn rights(facts: &Facts<'_>) -> Finding {
    let lacking = match facts.answers.get("rights") {
        Answer::Found(Value::Array(lacking)) => lacking,
        Answer::Unreadable(why) => {
            return unknown(
                format!("access cannot be reviewed: {why}"),
                "run it with a role that may create subjectaccessreviews",
            );
        }
        _ => {
            return unknown(
                "access cannot be reviewed",
                "run it with a role that may create subjectaccessreviews",
            );
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
        false => fail(
            listed(texts.iter().map(String::as_str)),
            "helm upgrade ..., or kubectl apply -k manifests: the roles of the chart or the manifests are not complete",
        ),
    }
}

fn plugin_pods(facts: &Facts<'_>) -> Finding {
    facts.list("daemonsets")?;
    let space = facts.namespace();
    let Some(plain) = facts.own("daemonsets", PLUGIN) else {
        return fail(
            format!("there is no DaemonSet {PLUGIN} in namespace {space}"),
            "helm install gantry charts/gantry --namespace gantry-system --create-namespace (or --system-namespace NAMESPACE)",
        );
    };
    let count = |set: &Value, field: &str| set["status"][field].as_u64().unwrap_or_default();
    let sets = || std::iter::once(plain).chain(facts.own("daemonsets", "gantry-plugin-mig"));
    let wanted: u64 = sets().map(|set| count(set, "desiredNumberScheduled")).sum();
    let ready: u64 = sets().map(|set| count(set, "numberReady")).sum();
    if wanted == 0 {
        return fail("no node is selected for the plugin", "kubectl label node <node> gantry.dev/gpu=true");
    }
    if ready < wanted {
        let is_ready = |pod: &&Value| {
            let mut conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
            !conditions.any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
        };
        let late = facts.plugin_pods().filter(is_ready).map(name);
        return fail(
            format!("{ready} of {wanted} pods of the plugin are ready; not {}", listed(late)),
            format!("kubectl -n {space} describe pod, and kubectl -n {space} logs daemonset/{PLUGIN}"),
        );
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
            "helm upgrade ... --set plugin.kubeletRoot=<--root-dir of kubelet> (k0s: /var/lib/k0s/kubelet)",
        ),
    }
}

fn gpu_nodes(facts: &Facts<'_>) -> Finding {
    let published: BTreeSet<&str> = facts.list("gpunodes")?.iter().map(name).collect();
    let marks = ["gantry.dev/gpu", "nvidia.com/gpu.present", "feature.node.kubernetes.io/pci-10de.present"];
    let nodes = facts.list("nodes")?.iter();
    let has_gpus = |node: &&Value| {
        label(node, "gantry.dev/gpu") != Some("false")
            && marks.iter().any(|mark| label(node, mark) == Some("true"))
    };
    let silent: Vec<&str> =
        nodes.filter(has_gpus).map(name).filter(|node| !published.contains(node)).collect();
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
        0 => fail("no plugin has published a GpuNode", "kubectl label node <node> gantry.dev/gpu=true"),
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
        true => "helm upgrade ... --set plugin.runtimeClassName=nvidia".to_owned(),
        false => format!(
            "install the NVIDIA driver and container toolkit on {node}; with the driver of the GPU operator --set plugin.driverRoot=/run/nvidia/driver"
        ),
    };
    fail(format!("{} nodes serve no GPU; {node}: {why}", without.len()), fix)
}

fn registration(facts: &Facts<'_>) -> Finding {
    let wrong = facts.with_reason(&["NotRegistered", "Stopped", "PodsUnknown"])?;
    if let Some((node, why)) = wrong.first() {
        return fail(
            format!("{} plugins do not serve; {node}: {why}", wrong.len()),
            format!("kubectl -n {} logs daemonset/{PLUGIN}", facts.namespace()),
        );
    }
    match facts.with_reason(&["Degraded"])?.first() {
        Some((node, why)) => {
            warn(format!("{node} is degraded: {why}"), format!("kubectl describe gpunode {node}"))
        }
        None => Ok("kubelet lists the devices of every plugin".to_owned()),
    }
}

fn versions(facts: &Facts<'_>) -> Finding {
    let own = env!("CARGO_PKG_VERSION");
    let nodes = facts.list("gpunodes")?.iter();
    let others: BTreeMap<&str, &str> = nodes
        .filter_map(|node| {
            let version = node["status"]["pluginVersion"].as_str().filter(|version| !version.is_empty())?;
            (version != own).then_some((version, name(node)))
        })
        .collect();
    match others.first_key_value() {
        None => Ok(format!("all plugins and this command are {own}")),
        Some((version, node)) => warn(
            format!("the plugin of {node} is {version}, this command is {own}"),
            "upgrade the CRDs first, then the extender, then the plugin (docs/install.md)",
        ),
    }
}

fn other_plugin(facts: &Facts<'_>) -> Finding {
    let nodes: BTreeSet<&str> =
        facts.plugin_pods().filter_map(|pod| pod["spec"]["nodeName"].as_str()).collect();
    facts.list("daemonsets")?;
    for (set, answer) in facts.answers.beginning("rival/") {
        let Answer::Found(Value::Array(pods)) = answer else {
            return unknown(
                format!("the pods of the DaemonSet {set} cannot be read"),
                "run it with a role that may list pods",
            );
        };
        let shared = pods
            .iter()
            .filter_map(|pod| pod["spec"]["nodeName"].as_str())
            .filter(|node| nodes.contains(node));
        let shared: Vec<&str> = shared.collect();
        if !shared.is_empty() {
            let (space, set) = set.split_once('/').unwrap_or((set, ""));
            return fail(
                format!("the DaemonSet {space}/{set} serves the same GPUs on {}", listed(shared)),
                format!(
                    "kubectl -n {space} delete daemonset {set} (GPU operator: devicePlugin.enabled=false)"
                ),
            );
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
    let both = listed(offered);
    match both.is_empty() {
        true => Ok("no DRA driver offers the same GPUs".to_owned()),
        false => fail(
            format!("NVIDIA's DRA driver offers the GPUs of {both} as well: a GPU may be given twice"),
            "set resources.gpus.enabled=false in the chart of the DRA driver, or kubectl label node <node> gantry.dev/gpu=false",
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
            format!("kubectl label node {node} gantry.dev/mig=true"),
        );
    }
    if !labelled.is_empty() && facts.own("daemonsets", "gantry-plugin-mig").is_none() {
        return fail(
            "nodes are labelled gantry.dev/mig=true, and there is no DaemonSet for them",
            "helm upgrade ... --set plugin.mig.enabled=true",
        );
    }
    Ok(format!("{} nodes with MIG", with_mig.len()))
}

fn labels(facts: &Facts<'_>) -> Finding {
    const PRODUCT: &str = "nvidia.com/gpu.product";
    let published: BTreeSet<&str> = facts.list("gpunodes")?.iter().map(name).collect();
    let nodes = facts.list("nodes")?.iter().filter(|node| published.contains(name(node)));
    let without = listed(nodes.filter(|node| label(node, PRODUCT).is_none()).map(name));
    match without.is_empty() {
        true => Ok(format!("every GPU node has {PRODUCT}")),
        false => warn(
            format!("{without} without the label {PRODUCT}: pods that select nodes by it find none"),
            "helm upgrade ... --set plugin.labels=gfd (with node-feature-discovery) or plugin.labels=node",
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

/// Seconds since a time.
fn age(time: &Value, now: Timestamp) -> Option<i64> {
    let time: Timestamp = time.as_str()?.parse().ok()?;
    Some(now.as_second() - time.as_second())
}

fn scheduler_calls(facts: &Facts<'_>) -> Finding {
    let fix = match facts.answers.shape() {
        Shape::PluginAlone => return Ok("no scheduler is to call an extender".to_owned()),
        Shape::Own => "create a pod with schedulerName: gantry and nvidia.com/gpu: 1, then run this again".to_owned(),
        Shape::Existing => "gantry scheduler-config > kube-scheduler-config.yaml, and give it to kube-scheduler (docs/install.md)".to_owned(),
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
            "run it with a role that may get pods/proxy",
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
    const FIX: &str = "gantry scheduler-config > kube-scheduler-config.yaml, and give it to kube-scheduler";
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
    if let Some(config) = config {
        return match managed(config) {
            None => fail("kube-scheduler's configuration has no extender that binds", FIX),
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
                        FIX,
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
            "gantry doctor --scheduler-config <file of kube-scheduler>",
        ),
        false => fail(
            format!(
                "held without a grant, so bound without the extender: {}",
                listed(bypassed.values().map(String::as_str))
            ),
            FIX,
        ),
    }
}

fn certificates(facts: &Facts<'_>) -> Finding {
    let secret = match facts.answers.get("tls") {
        Answer::Found(secret) => secret,
        Answer::Absent => return Ok("none is used".to_owned()),
        Answer::Unreadable(why) => {
            return unknown(
                format!("the Secret of the extender's certificates cannot be read: {why}"),
                "allow get of this Secret",
            );
        }
    };
    for file in ["tls.crt", "ca.crt"] {
        let pem = serde_json::from_value::<ByteString>(secret["data"][file].clone()).unwrap_or_default();
        let parsed = x509_parser::pem::parse_x509_pem(&pem.0).ok();
        let end = parsed
            .as_ref()
            .and_then(|(_, pem)| Some(pem.parse_x509().ok()?.validity().not_after.timestamp()));
        let Some(end) = end else {
            return fail(
                format!("{file} of the extender's Secret is no certificate"),
                "issue the certificate again (docs/install.md)",
            );
        };
        let left = end - facts.answers.now.as_second();
        if left < 0 {
            return fail(
                format!("{file} of the extender's Secret has expired"),
                "issue the certificate again; the extender reads it without a restart",
            );
        }
        if left < CERTIFICATE_WARNING {
            return warn(
                format!("{file} of the extender's Secret expires in {} days", left / 86_400),
                "issue the certificate again; the extender reads it without a restart",
            );
        }
    }
    Ok("the certificates of the extender are valid".to_owned())
}

fn clocks(facts: &Facts<'_>) -> Finding {
    let published: BTreeSet<&str> = facts.list("gpunodes")?.iter().map(name).collect();
    let leases = facts.list("node-leases")?.iter().filter(|lease| published.contains(name(lease)));
    let ahead: Vec<(&str, i64)> = leases
        .filter_map(|lease| Some((name(lease), -age(&lease["spec"]["renewTime"], facts.answers.now)?)))
        .filter(|(_, ahead)| *ahead > CLOCK_SKEW)
        .collect();
    if let Some((node, seconds)) = ahead.first() {
        return fail(
            format!("the clock of {node} is {seconds} s ahead of the API server's"),
            format!("start time synchronisation on {node}, such as chrony"),
        );
    }
    match facts.answers.ahead {
        ahead if ahead.abs() > CLOCK_SKEW => warn(
            format!("this machine's clock differs from the API server's by {ahead} s"),
            "start time synchronisation on this machine",
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
            "kubectl label namespace <namespace of the collector> gantry.dev/metrics=true",
        ),
        (0, _) if matches!(facts.answers.get("pod-monitors"), Answer::Found(_)) => warn(
            "the Prometheus operator is installed, and no monitor selects Gantry",
            "helm upgrade ... --set monitoring.podMonitor.enabled=true,monitoring.serviceMonitor.enabled=true",
        ),
        _ => Ok(format!("{monitors} monitors; {allowed} namespaces may read metrics")),
    }
}

/// Members of gangs that run slower than the rest, as the conditions of Gangs have them.
fn slow_members(facts: &Facts<'_>) -> Finding {
    let condition = |gang: &Value| {
        let conditions = gang["status"]["conditions"].as_array()?;
        let holds = |known: &&Value| known["type"] == MEMBERS_SLOW && known["status"] == "True";
        let found = conditions.iter().find(holds)?;
        let space = gang["metadata"]["namespace"].as_str().unwrap_or_default();
        let message = found["message"].as_str().unwrap_or_default();
        Some((format!("{space}/{}", name(gang)), message.to_owned()))
    };
    let slow: Vec<(String, String)> = facts.list("gangs")?.iter().filter_map(condition).collect();
    let Some((gang, message)) = slow.first() else {
        return Ok("no member of a gang runs slower than the rest".to_owned());
    };
    let more = match slow.len() {
        1 => String::new(),
        2 => "; and 1 more gang".to_owned(),
        all => format!("; and {} more gangs", all - 1),
    };
    warn(
        format!("gang {gang} has a slow member: {message}{more}"),
        "kubectl get gangs -A; see docs/gangs-operations.md#what-to-do-about-a-slow-member",
    )
}

fn memory(facts: &Facts<'_>) -> Finding {
    if facts.answers.shape() == Shape::PluginAlone {
        return Ok("no extender keeps objects".to_owned());
    }
    let refused = facts.metric("gantry_extender_refused_objects").find(|(_, count)| *count > 0.0);
    if let Some((labels, count)) = refused {
        return fail(
            format!(
                "{count} objects of namespace {} are not kept: they take too much memory",
                Facts::labelled(labels, "namespace")
            ),
            "kubectl get events -A --field-selector reason=NamespaceTooLarge, or raise --object-memory (docs/install.md)",
        );
    }
    let Some((_, limit)) = facts.metric("gantry_extender_object_bytes_limit").next() else {
        return unknown(
            "the metrics of the extender cannot be read",
            "run it with a role that may get pods/proxy",
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
            "raise --object-memory, and the container's memory to three times as much (docs/install.md)",
        ),
        _ => Ok(format!("no namespace takes {:.0} % of its share", NEAR_LIMIT * 100.0)),
    }
}

#[cfg(test)]
mod tests;
