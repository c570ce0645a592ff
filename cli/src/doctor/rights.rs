//! The rights that the daemons' accounts need: those of the roles that the manifests bind to them.

use std::collections::BTreeSet;

use gantry_api::names;
use serde_json::Value;

use super::answers::{Answers, Shape};

/// A right of an account.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Right {
    pub(crate) account: String,
    pub(crate) group: String,
    pub(crate) resource: String,
    /// The part of the resource, such as `status`; empty for the object itself.
    pub(crate) part: String,
    pub(crate) verb: String,
    /// The only object that the right covers; empty for all.
    pub(crate) name: String,
    /// Whether it is one of the namespace of Gantry.
    pub(crate) is_local: bool,
}

/// A manifest with roles, and whether this installation needs them.
type Manifest = (&'static str, fn(&Answers) -> bool);

/// The manifests with rights that can be required. Other files are for features that the cluster does not show, and that
/// the daemons do without.
const MANIFESTS: [Manifest; 8] = [
    (include_str!("../../../manifests/plugin.yaml"), |_| true),
    (include_str!("../../../manifests/plugin-pods.yaml"), |answers| {
        !has_variable(answers, names::PLUGIN, "GANTRY_POD_KUBECONFIG")
    }),
    (include_str!("../../../manifests/labels-node.yaml"), |answers| {
        has_option(answers, names::PLUGIN, "--labels=node") || migrates(answers)
    }),
    (include_str!("../../../manifests/mig-layouts.yaml"), migrates),
    (include_str!("../../../manifests/extender.yaml"), |answers| answers.shape() != Shape::PluginAlone),
    (include_str!("../../../manifests/extender-service.yaml"), |answers| {
        has_option(answers, names::EXTENDER, "--leader-service=")
    }),
    (include_str!("../../../manifests/gates.yaml"), |answers| {
        has_option(answers, names::EXTENDER, "--gates")
    }),
    (include_str!("../../../manifests/scheduler.yaml"), |answers| answers.shape() == Shape::Own),
];

fn migrates(answers: &Answers) -> bool {
    has_option(answers, names::PLUGIN, "--mig-layouts")
}

/// The containers of Gantry's workloads that run this daemon.
fn containers<'a>(answers: &'a Answers, daemon: &str) -> impl Iterator<Item = &'a Value> {
    let command = daemon.trim_start_matches("gantry-").to_owned();
    let sets = answers.items("daemonsets").iter().chain(answers.items("deployments"));
    let own = sets.filter(|set| set["metadata"]["namespace"] == answers.namespace.as_str());
    let all =
        own.flat_map(|set| set["spec"]["template"]["spec"]["containers"].as_array().into_iter().flatten());
    all.filter(move |container| container["args"][0] == command.as_str())
}

/// Whether a daemon has an option that begins with this.
fn has_option(answers: &Answers, daemon: &str, option: &str) -> bool {
    containers(answers, daemon).any(|container| {
        let mut args = container["args"].as_array().into_iter().flatten().filter_map(Value::as_str);
        args.any(|arg| arg.starts_with(option))
    })
}

/// Whether a daemon has an environment variable.
fn has_variable(answers: &Answers, daemon: &str, name: &str) -> bool {
    containers(answers, daemon).any(|container| {
        container["env"].as_array().into_iter().flatten().any(|variable| variable["name"] == name)
    })
}

/// The rights that this installation needs.
///
/// # Errors
/// A manifest of this program cannot be read.
pub(crate) fn required(answers: &Answers) -> anyhow::Result<BTreeSet<Right>> {
    let mut all = BTreeSet::new();
    for (manifest, _) in MANIFESTS.iter().filter(|(_, is_needed)| is_needed(answers)) {
        all.extend(bound(manifest)?);
    }
    Ok(all)
}

/// The rights that the bindings of a manifest give by its roles.
fn bound(manifest: &str) -> anyhow::Result<BTreeSet<Right>> {
    let objects: Vec<Value> = serde_saphyr::from_multiple(manifest)?;
    let mut all = BTreeSet::new();
    let is_binding =
        |object: &&Value| object["kind"].as_str().is_some_and(|kind| kind.ends_with("RoleBinding"));
    for binding in objects.iter().filter(is_binding) {
        let reference = &binding["roleRef"];
        let is_role = |object: &&Value| {
            object["kind"] == reference["kind"] && object["metadata"]["name"] == reference["name"]
        };
        // Kubernetes' own roles are not in a manifest.
        let Some(role) = objects.iter().find(is_role) else {
            continue;
        };
        for subject in texts_of(&binding["subjects"], "name") {
            for rule in role["rules"].as_array().into_iter().flatten() {
                all.extend(of_rule(subject, rule, reference["kind"] == "Role"));
            }
        }
    }
    Ok(all)
}

/// The rights of a rule of a role.
fn of_rule(account: &str, rule: &Value, is_local: bool) -> Vec<Right> {
    let mut objects = texts(&rule["resourceNames"]);
    if objects.is_empty() {
        objects.push("");
    }
    let mut all = Vec::new();
    for group in texts(&rule["apiGroups"]) {
        for resource in texts(&rule["resources"]) {
            let (resource, part) = resource.split_once('/').unwrap_or((resource, ""));
            for verb in texts(&rule["verbs"]) {
                all.extend(objects.iter().map(|name| Right {
                    account: account.to_owned(),
                    group: group.to_owned(),
                    resource: resource.to_owned(),
                    part: part.to_owned(),
                    verb: verb.to_owned(),
                    name: (*name).to_owned(),
                    is_local,
                }));
            }
        }
    }
    all
}

fn texts(list: &Value) -> Vec<&str> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}

fn texts_of<'a>(list: &'a Value, field: &'a str) -> impl Iterator<Item = &'a str> {
    list.as_array().into_iter().flatten().filter_map(move |item| item[field].as_str())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::super::answers::Answer;
    use super::*;

    /// The rights of an installation with these workloads, as `account verb resource`.
    fn rights(daemonsets: Value, deployments: Value) -> BTreeSet<String> {
        let read = [("daemonsets", daemonsets), ("deployments", deployments)];
        let read = read.map(|(name, list)| (name.to_owned(), Answer::Found(list)));
        let answers = Answers::recorded(BTreeMap::from(read), "2026-11-25T12:00:00Z".parse().unwrap());
        let all = required(&answers).unwrap();
        all.iter()
            .map(|right| {
                let part = if right.part.is_empty() { String::new() } else { format!("/{}", right.part) };
                format!("{} {} {}{part}", right.account, right.verb, right.resource)
            })
            .collect()
    }

    fn set(name: &str, container: &Value) -> Value {
        json!({"metadata": {"name": name, "namespace": "gantry-system"},
            "spec": {"template": {"spec": {"containers": [container]}}}})
    }

    #[test]
    fn plugin_alone_needs_rights_of_plugin_only() {
        let plain = rights(json!([set("gantry-plugin", &json!({"args": ["plugin"]}))]), json!([]));
        for right in [
            "gantry-plugin create gpunodes",
            "gantry-plugin patch gpunodes/status",
            "gantry-plugin patch events",
            "gantry-plugin list pods",
            "gantry-plugin watch pods",
        ] {
            assert!(plain.contains(right), "{right}: {plain:#?}");
        }
        assert!(plain.iter().all(|right| right.starts_with("gantry-plugin ")), "{plain:#?}");
        assert!(!plain.contains("gantry-plugin patch nodes"));
        let env = json!([{"name": "GANTRY_POD_KUBECONFIG", "value": "x"}]);
        let kubelet = set("gantry-plugin", &json!({"args": ["plugin"], "env": env}));
        assert!(!rights(json!([kubelet]), json!([])).contains("gantry-plugin list pods"));
        let labels = set("gantry-plugin", &json!({"args": ["plugin", "--labels=node"]}));
        assert!(rights(json!([labels]), json!([])).contains("gantry-plugin patch nodes"));
    }

    #[test]
    fn each_shape_needs_the_rights_of_its_extender() {
        let own = rights(json!([]), json!([set("gantry-scheduler", &json!({"args": ["extender"]}))]));
        for right in [
            "gantry-extender watch nodes",
            "gantry-extender list persistentvolumeclaims",
            "gantry-extender list persistentvolumes",
            "gantry-extender patch events",
            "gantry-extender update leases",
            "gantry-extender watch gangs",
            "gantry-extender update gangs/status",
            "gantry-extender list gpunodes",
            "gantry-extender impersonate serviceaccounts",
            "gantry-scheduler update leases",
        ] {
            assert!(own.contains(right), "{right}: {own:#?}");
        }
        let args = json!({"args": ["extender", "--gates", "--leader-service=gantry-extender-leader"]});
        let existing = rights(json!([]), json!([set("gantry-extender", &args)]));
        assert!(existing.contains("gantry-extender patch pods"), "{existing:#?}");
        assert!(existing.contains("gantry-extender create endpointslices"), "{existing:#?}");
        assert!(!existing.contains("gantry-extender impersonate serviceaccounts"), "{existing:#?}");
        assert!(!own.contains("gantry-extender patch pods"), "{own:#?}");
    }
}
