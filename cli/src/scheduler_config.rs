//! `gantry scheduler-config`: the configuration that kube-scheduler needs to call the extender, with the resources that
//! the nodes of a cluster offer.

use std::collections::BTreeSet;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};
use clap::Args;
use gantry_api::GpuNode;
use gantry_api::names::{self, GPU_RESOURCE, RESOURCE_DOMAIN};
use gantry_topology::mig::{Catalogue, legal_compute};
use k8s_openapi::api::core::v1::Node;
use kube::api::ListParams;
use kube::{Api, Client};
use serde_json::{Map, Value, json};

use crate::cluster::ClusterArgs;
use crate::runtime::{BadInput, print};
use crate::visible::Visible;

/// The configuration for one resource; what depends on the options is replaced in it.
const TEMPLATE: &str = include_str!("../../manifests/kube-scheduler-config.yaml");
const URL: &str = "http://127.0.0.1:8010";
const SCHEDULER_KUBECONFIG: &str = "/etc/kubernetes/scheduler.conf";
const LIST: &str = "    managedResources:\n";
const IGNORED: &str = "ignoredByScheduler: false";

/// Profiles of RTX PRO 4500, by the supported profiles of NVIDIA's MIG user guide. The table of profiles does not have
/// them, because their placements are not published.
const WITHOUT_PLACEMENTS: [(&str, u8); 6] = [
    ("1g.16gb", 1),
    ("1g.16gb+gfx", 1),
    ("1g.16gb+me.all", 1),
    ("1g.16gb-me", 1),
    ("2g.32gb", 2),
    ("2g.32gb+gfx", 2),
];

/// Options of `gantry scheduler-config`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Without --resource the resources of the cluster's nodes are listed, and nvidia.com/gpu.

Examples:
  gantry scheduler-config > kube-scheduler-config.yaml
  gantry scheduler-config --resource nvidia.com/gpu,nvidia.com/mig-1g.10gb
  gantry scheduler-config --base /etc/kubernetes/my-scheduler-config.yaml

Exit codes: 0 printed, 1 the cluster cannot be read, 2 bad command line or bad base.")]
pub(crate) struct SchedulerConfigArgs {
    #[command(flatten)]
    cluster: ClusterArgs,

    /// List these resources; the cluster is not read
    #[arg(long = "resource", value_name = "NAME", value_delimiter = ',', value_parser = resource)]
    resources: Vec<String>,

    /// List every MIG profile in addition, so that a new MIG layout needs no change of kube-scheduler
    #[arg(long)]
    mig_profiles: bool,

    /// Where kube-scheduler reaches the extender
    #[arg(long, value_name = "URL", default_value = URL, value_parser = url)]
    url: String,

    /// kube-scheduler's kubeconfig on its machine
    #[arg(long, value_name = "FILE", default_value = SCHEDULER_KUBECONFIG)]
    scheduler_kubeconfig: String,

    /// Merge into this configuration (- is standard input) and keep everything else of it, but comments
    #[arg(long, value_name = "FILE")]
    base: Option<PathBuf>,

    /// Files of kube-scheduler for an https URL
    #[arg(long, value_name = "CA,CERT,KEY", value_parser = tls)]
    tls: Option<Tls>,
}

/// Files of kube-scheduler for TLS.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Tls {
    ca: String,
    certificate: String,
    key: String,
}

/// Runs `gantry scheduler-config`.
///
/// # Errors
/// The cluster cannot be read, or the base is no configuration of kube-scheduler.
pub(crate) async fn run(args: SchedulerConfigArgs) -> anyhow::Result<()> {
    let is_https = args.url.starts_with("https://");
    if is_https != args.tls.is_some() {
        let wrong = anyhow!(
            "--url {} and --tls belong together: an https URL needs the files, http has none",
            args.url
        );
        return Err(BadInput(wrong).into());
    }
    let base = args.base.as_deref().map(read).transpose()?;
    let mut resources: BTreeSet<String> = args.resources.iter().cloned().collect();
    if resources.is_empty() {
        resources = offered(&args.cluster.connect().await?).await?;
        resources.insert(GPU_RESOURCE.to_owned());
    }
    if args.mig_profiles {
        resources.extend(mig_resources());
    }
    let text = configuration(&args, &resources);
    let Some((mut base, source)) = base else {
        return print(&Visible::new(&text));
    };
    let own: Value = serde_saphyr::from_str(&text).context("the template is no YAML")?;
    merge(&mut base, &own).map_err(|wrong| BadInput(anyhow!("{source}: {wrong}")))?;
    print(&Visible::new(&serde_saphyr::to_string(&base).context("writing YAML")?))
}

/// The configuration with comments.
fn configuration(args: &SchedulerConfigArgs, resources: &BTreeSet<String>) -> String {
    let (head, list) = TEMPLATE.split_once(LIST).unwrap_or((TEMPLATE, ""));
    let mut head = head.replace(SCHEDULER_KUBECONFIG, &args.scheduler_kubeconfig);
    let mut url = format!("urlPrefix: {}\n", args.url);
    if let Some(Tls { ca, certificate, key }) = &args.tls {
        url += &format!(
            "    enableHTTPS: true\n    tlsConfig: {}\n",
            json!({"caFile": ca, "certFile": certificate, "keyFile": key, "serverName": host(&args.url)})
        );
    }
    head = head.replace(&format!("urlPrefix: {URL}\n"), &url);
    let comments: String = list
        .lines()
        .take_while(|line| line.trim_start().starts_with('#'))
        .fold(String::new(), |text, line| text + line + "\n");
    let names = resources.iter().map(|name| format!("      - {{name: {name}, {IGNORED}}}\n"));
    format!("{head}{LIST}{comments}{}", names.collect::<String>())
}

/// The host of a URL, without the port.
fn host(url: &str) -> &str {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let host = rest.split('/').next().unwrap_or_default();
    host.rsplit_once(':').map_or(host, |(host, _)| host)
}

/// Puts the extender of `own` into `base` in place of an earlier one, and sends it every node.
fn merge(base: &mut Value, own: &Value) -> Result<(), String> {
    let kind = base["kind"].as_str().unwrap_or("no kind");
    if kind != "KubeSchedulerConfiguration" {
        return Err(format!("this is {kind}, expected KubeSchedulerConfiguration"));
    }
    let version = base["apiVersion"].as_str().unwrap_or_default();
    if version != "kubescheduler.config.k8s.io/v1" {
        return Err(format!("apiVersion is {version:?}, expected kubescheduler.config.k8s.io/v1"));
    }
    let Some(extender) = own["extenders"].get(0) else {
        return Err("the template has no extender".to_owned());
    };
    let is_ours = |known: &Value| {
        let manages = known["managedResources"].as_array().into_iter().flatten();
        known["urlPrefix"] == extender["urlPrefix"]
            || known["bindVerb"] == "bind" && manages.into_iter().any(|one| one["name"] == GPU_RESOURCE)
    };
    let extenders = match base.get_mut("extenders") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(known)) => std::mem::take(known),
        Some(_) => return Err("extenders is no list".to_owned()),
    };
    let mut extenders: Vec<Value> = extenders.into_iter().filter(|known| !is_ours(known)).collect();
    if let Some(other) = extenders.iter().find(|known| !known["bindVerb"].is_null()) {
        return Err(format!(
            "the extender {} has a bindVerb as well; kube-scheduler accepts one",
            other["urlPrefix"]
        ));
    }
    extenders.push(extender.clone());
    base["extenders"] = Value::Array(extenders);
    base["percentageOfNodesToScore"] = own["percentageOfNodesToScore"].clone();
    for profile in base["profiles"].as_array_mut().into_iter().flatten() {
        profile
            .as_object_mut()
            .map(|profile: &mut Map<String, Value>| profile.remove("percentageOfNodesToScore"));
    }
    if base["clientConnection"]["kubeconfig"].is_null() {
        base["clientConnection"]["kubeconfig"] = own["clientConnection"]["kubeconfig"].clone();
    }
    Ok(())
}

/// The base and its name in messages.
fn read(path: &Path) -> anyhow::Result<(Value, String)> {
    let (text, source) = match path.as_os_str() == "-" {
        true => {
            let mut text = String::new();
            std::io::stdin().read_to_string(&mut text).context("cannot read standard input")?;
            (text, "standard input".to_owned())
        }
        false => {
            let text = std::fs::read_to_string(path)
                .map_err(|error| BadInput(anyhow!("cannot read {}: {error}", path.display())))?;
            (text, path.display().to_string())
        }
    };
    let value = serde_saphyr::from_str(&text)
        .map_err(|error| BadInput(anyhow!("{source}: no YAML: {}", error.without_snippet())))?;
    Ok((value, source))
}

/// The resources that nodes offer: those of Gantry's plugins, and those of NVIDIA's domain that another plugin or a former
/// configuration left on a node.
pub(crate) async fn offered(client: &Client) -> anyhow::Result<BTreeSet<String>> {
    let all = ListParams::default();
    let nodes = Api::<Node>::all(client.clone()).list(&all).await.context("nodes cannot be listed")?;
    let gpu_nodes = Api::<GpuNode>::all(client.clone())
        .list(&all)
        .await
        .context("gpunodes.gantry.dev cannot be listed; is Gantry installed in this cluster?")?;
    Ok(resources_of(&nodes.items, &gpu_nodes.items))
}

/// The same of objects that were read.
pub(crate) fn resources_of(nodes: &[Node], gpu_nodes: &[GpuNode]) -> BTreeSet<String> {
    let published = gpu_nodes.iter().filter_map(|node| node.status.as_ref()).flat_map(|status| {
        let named = status.resources.iter().map(|resource| resource.name.as_str());
        named.chain(status.devices.iter().map(|device| device.resource.as_str()))
    });
    let counted = nodes.iter().filter_map(|node| node.status.as_ref()?.allocatable.as_ref());
    let counted = counted.flatten().filter(|(name, count)| {
        let rest = name.strip_prefix(RESOURCE_DOMAIN);
        rest.is_some_and(|rest| rest.starts_with('/')) && count.0 != "0"
    });
    published.chain(counted.map(|(name, _)| name.as_str())).map(str::to_owned).collect()
}

/// The name of every MIG profile of the mixed strategy in NVIDIA's guides, with its compute slices.
fn mig_resources() -> BTreeSet<String> {
    let catalogue = Catalogue::built_in();
    let profiles = catalogue.products().iter().flat_map(|product| &product.profiles);
    let placed = profiles.map(|profile| (profile.name.as_str(), profile.compute));
    let mut names = BTreeSet::new();
    for (name, compute) in placed.chain(WITHOUT_PLACEMENTS) {
        let name = name.replace('+', ".");
        for slices in legal_compute(compute).filter(|slices| *slices < compute) {
            names.insert(format!("{RESOURCE_DOMAIN}/mig-{slices}c.{name}"));
        }
        names.insert(format!("{RESOURCE_DOMAIN}/mig-{name}"));
    }
    names
}

/// The name of an extended resource.
fn resource(text: &str) -> Result<String, String> {
    let is_name = |name: &str| {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let mut ends = name.bytes().next().into_iter().chain(name.bytes().last());
        (1..=63).contains(&name.len())
            && name.bytes().all(allowed)
            && ends.all(|byte| byte.is_ascii_alphanumeric())
    };
    match text.split_once('/') {
        Some((domain, name)) if names::is_subdomain(domain) && is_name(name) => Ok(text.to_owned()),
        _ => Err("write DOMAIN/NAME, such as nvidia.com/gpu".to_owned()),
    }
}

fn tls(text: &str) -> Result<Tls, String> {
    match text.split(',').collect::<Vec<_>>()[..] {
        [ca, certificate, key] if ![ca, certificate, key].contains(&"") => {
            Ok(Tls { ca: ca.to_owned(), certificate: certificate.to_owned(), key: key.to_owned() })
        }
        _ => Err("write three files with commas: CA,CERT,KEY".to_owned()),
    }
}

fn url(text: &str) -> Result<String, String> {
    let is_url = ["http://", "https://"]
        .iter()
        .any(|scheme| text.strip_prefix(scheme).is_some_and(|rest| !rest.is_empty()));
    match is_url && !text.contains(char::is_whitespace) {
        true => Ok(text.trim_end_matches('/').to_owned()),
        false => Err(format!("write http://HOST:PORT or https://HOST:PORT, such as {URL}")),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: SchedulerConfigArgs,
    }

    fn printed(words: &[&str], resources: &[&str]) -> String {
        let line = Line::try_parse_from(std::iter::once("gantry").chain(words.iter().copied())).unwrap();
        configuration(&line.args, &resources.iter().map(|name| (*name).to_owned()).collect())
    }

    /// The manifest is what the command prints.
    #[test]
    fn default_configuration_is_the_manifest() {
        assert_eq!(printed(&[], &[GPU_RESOURCE]), TEMPLATE);
    }

    #[test]
    fn options_replace_their_values_only() {
        let words = ["--url=https://10.0.0.1:8010", "--tls=/ca,/crt,/key", "--scheduler-kubeconfig=/s.conf"];
        let text = printed(&words, &["nvidia.com/gpu", "nvidia.com/mig-1g.5gb"]);
        let mut expected: Value = serde_saphyr::from_str(TEMPLATE).unwrap();
        expected["clientConnection"]["kubeconfig"] = json!("/s.conf");
        let extender = &mut expected["extenders"][0];
        extender["urlPrefix"] = json!("https://10.0.0.1:8010");
        extender["enableHTTPS"] = json!(true);
        extender["tlsConfig"] =
            json!({"caFile": "/ca", "certFile": "/crt", "keyFile": "/key", "serverName": "10.0.0.1"});
        let managed = extender["managedResources"].as_array_mut().unwrap();
        managed.push(json!({"name": "nvidia.com/mig-1g.5gb", "ignoredByScheduler": false}));
        assert_eq!(serde_saphyr::from_str::<Value>(&text).unwrap(), expected);
    }

    #[test]
    fn base_keeps_everything_else() {
        let own: Value = serde_saphyr::from_str(TEMPLATE).unwrap();
        let mut base = json!({
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "leaderElection": {"leaderElect": true},
            "clientConnection": {"kubeconfig": "/var/lib/rancher/k3s/server/cred/scheduler.kubeconfig"},
            "profiles": [{"schedulerName": "gpu", "percentageOfNodesToScore": 10}],
            "extenders": [
                {"urlPrefix": "http://other", "filterVerb": "filter"},
                {"urlPrefix": "http://old:8010", "bindVerb": "bind", "managedResources": [{"name": "nvidia.com/gpu"}]},
            ],
        });
        let mut expected = base.clone();
        expected["extenders"][1] = own["extenders"][0].clone();
        expected["percentageOfNodesToScore"] = json!(100);
        expected["profiles"] = json!([{"schedulerName": "gpu"}]);
        merge(&mut base, &own).unwrap();
        assert_eq!(base, expected);
        merge(&mut base, &own).unwrap();
        assert_eq!(base, expected, "a second time");
    }

    #[test]
    fn wrong_base_is_named() {
        let own: Value = serde_saphyr::from_str(TEMPLATE).unwrap();
        let config = |extenders: Value| {
            json!({"apiVersion": "kubescheduler.config.k8s.io/v1", "kind": "KubeSchedulerConfiguration",
                "extenders": extenders})
        };
        let wrong = [
            json!({}),
            json!({"kind": "KubeSchedulerConfiguration", "apiVersion": "v1beta3"}),
            config(json!("x")),
            config(json!([{"urlPrefix": "http://x", "bindVerb": "bind"}])),
        ];
        insta::assert_snapshot!(wrong.map(|mut base| merge(&mut base, &own).unwrap_err()).join("\n"), @r#"
        this is no kind, expected KubeSchedulerConfiguration
        apiVersion is "v1beta3", expected kubescheduler.config.k8s.io/v1
        extenders is no list
        the extender "http://x" has a bindVerb as well; kube-scheduler accepts one
        "#);
    }

    #[test]
    fn mig_names_have_profiles_and_compute_slices() {
        let names = mig_resources();
        for name in ["mig-1g.5gb", "mig-1g.10gb.me", "mig-1c.3g.20gb", "mig-7g.80gb", "mig-1g.16gb-me"] {
            assert!(names.contains(&format!("nvidia.com/{name}")), "{name}");
        }
        assert!(names.iter().all(|name| resource(name).is_ok()), "{names:?}");
        assert!(names.len() > 200, "{}", names.len());
    }

    #[test]
    fn resource_names_are_checked() {
        for name in ["nvidia.com/gpu", "example.com/A100_80.x"] {
            assert_eq!(resource(name).as_deref(), Ok(name));
        }
        for name in ["", "gpu", "nvidia.com/", "/gpu", "nvidia.com/-x", "a b/c", "nvidia.com/gpu/x"] {
            assert!(resource(name).unwrap_err().contains("nvidia.com/gpu"), "{name}");
        }
    }

    #[test]
    fn offered_resources_are_read_from_both_objects() {
        let node = json!({"metadata": {"name": "a"}, "status": {"allocatable": {
            "cpu": "4", "nvidia.com/gpu": "8", "nvidia.com/mig-1g.5gb": "0", "nvidia.community/x": "1"}}});
        let machine: Value =
            serde_saphyr::from_str(include_str!("../../simulator/machines/l4-4x-pcie.yaml")).unwrap();
        let gpu_node = json!({"apiVersion": "gantry.dev/v1alpha1", "kind": "GpuNode", "metadata": {"name": "a"},
            "spec": {"machine": machine}, "status": {
                "resources": [{"name": "example.com/a100", "kind": "Gpu"}],
                "devices": [{"id": "x", "resource": "nvidia.com/gpu.shared", "gpu": 0, "healthy": true}]}});
        let nodes = [serde_json::from_value(node).unwrap()];
        let gpu_nodes: Vec<GpuNode> = serde_json::from_value(json!([gpu_node])).unwrap();
        let names = resources_of(&nodes, &gpu_nodes);
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        assert_eq!(names, ["example.com/a100", "nvidia.com/gpu", "nvidia.com/gpu.shared"]);
    }
}
