//! Releases of the chart in a real cluster.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gantry_api::names::GRANT_ANNOTATION;
use gantry_e2e::hardware::Hardware;
use gantry_e2e::helm::{Helm, chart};
use gantry_e2e::{BUSYBOX_IMAGE, Cluster, ClusterOptions, Daemon, NodeOptions, gantry, until};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::PostParams;
use serde_json::{Value, json};

use crate::{NAMESPACE, RELEASE, helms};

pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// Brings a cluster up, runs a story on it, and takes it down.
pub(crate) fn on_cluster(nodes: &[&str], story: impl AsyncFnOnce(&Cluster) -> Result<()>) -> Result<()> {
    tokio::runtime::Runtime::new()?.block_on(async {
        let mut options = ClusterOptions::new(env!("CARGO_BIN_EXE_gantry-cluster"));
        options.folder = std::env::temp_dir().join("gantry-helm");
        options.port = 16446;
        options.nodes = nodes.iter().map(|name| NodeOptions::new(name)).collect();
        let cluster = Cluster::up(options).await?;
        let outcome = story(&cluster).await;
        if std::env::var_os("GANTRY_E2E_KEEP").is_none() {
            cluster.down().await?;
        }
        outcome
    })
}

/// Installs or upgrades the release.
fn upgrade(helm: &Helm, cluster: &Cluster, chart: &Path, values: &[&str]) -> gantry_e2e::Result<String> {
    helm.upgrade(&cluster.kubeconfig(), chart, (RELEASE, NAMESPACE), values)
}

/// Every object of Gantry, by the names of its kind; those of its namespace, which a user deletes, only as far as helm
/// or the user made them.
async fn remains(cluster: &Cluster) -> Result<String> {
    let cluster_wide = "clusterroles,clusterrolebindings,crd,flowschemas,validatingadmissionpolicies,\
                        validatingadmissionpolicybindings,mutatingadmissionpolicies,mutatingadmissionpolicybindings,\
                        mutatingwebhookconfigurations";
    let in_namespaces = "daemonsets,deployments,services,serviceaccounts,roles,rolebindings,networkpolicies,pdb,\
                         configmaps,secrets,resourcequotas,podtemplates";
    let mut all = cluster.kubectl(&["get", cluster_wide, "-o", "name"]).await?;
    all += &cluster.kubectl(&["get", in_namespaces, "-A", "-o", "name"]).await?;
    let ours = |line: &&str| line.contains("gantry") || line.contains("gpunode");
    Ok(all.lines().filter(ours).collect::<Vec<_>>().join(" "))
}

/// A copy of the chart as an older version of it.
fn older(folder: &Path) -> Result<()> {
    let copied = std::process::Command::new("cp").arg("-r").arg(chart()).arg(folder).status()?;
    ensure!(copied.success());
    let path = folder.join("Chart.yaml");
    let text = fs::read_to_string(&path)?;
    let old = text.lines().map(|line| if line.starts_with("version:") { "version: 0.0.9" } else { line });
    Ok(fs::write(&path, old.collect::<Vec<_>>().join("\n"))?)
}

/// The API server accepts every object of each shape; a release changes its shape; nothing but the CRDs stays.
pub(crate) fn release_comes_and_goes_without_remains() -> Result<()> {
    let shapes: [&[&str]; 5] = [
        &[
            "scheduler.mode=own",
            "scheduler.own.assign.enabled=true",
            "extender.gates=true",
            "extender.restart=true",
            "extender.remediationRules=gantry-remediation",
            "extender.remediationReset=true",
            "extender.migDrain=true",
        ],
        &["scheduler.mode=own", "scheduler.webhook.enabled=true"],
        &["scheduler.mode=existing", "plugin.labels=node", "plugin.configs.default.flags.migStrategy=mixed"],
        &[
            "scheduler.mode=existing",
            "scheduler.existing.placement=service",
            "scheduler.existing.service.controlPlaneCIDR=192.0.2.0/24",
            "priorityQuota.enabled=true",
        ],
        &["scheduler.mode=none"],
    ];
    let folder = tempfile::tempdir()?;
    let old = folder.path().join("old");
    older(&old)?;
    on_cluster(&["node-1"], async |cluster| {
        ensure!(remains(cluster).await?.is_empty(), "the cluster is new");
        let kubeconfig = cluster.kubeconfig();
        for helm in helms()? {
            let notes = upgrade(&helm, cluster, &old, &[])?;
            ensure!(notes.contains("Shape: the plugin alone"), "{notes}");
            let quarantine = json!({
                "apiVersion": "gantry.dev/v1alpha1",
                "kind": "Gang",
                "metadata": { "name": "kept", "namespace": "default" },
                "spec": {},
            });
            cluster.kubectl_with_input(&["apply", "-f", "-"], &quarantine.to_string()).await?;
            for values in shapes {
                let notes =
                    upgrade(&helm, cluster, &chart(), values).with_context(|| format!("{values:?}"))?;
                let is_assigned = values.contains(&"scheduler.webhook.enabled=true");
                let words = "Pods that request GPUs get it by the webhook of the extenders in namespaces with gantry.dev/scheduler=true";
                ensure!(notes.contains(words) == is_assigned, "{values:?}: {notes}");
            }
            let policies = cluster.kubectl(&["get", "validatingadmissionpolicies", "-o", "json"]).await?;
            let policies: Value = serde_json::from_str(&policies)?;
            for policy in policies["items"].as_array().into_iter().flatten() {
                let warnings = &policy["status"]["typeChecking"]["expressionWarnings"];
                ensure!(warnings.is_null(), "{}: {warnings:#}", policy["metadata"]["name"]);
            }
            helm.output(Some(&kubeconfig), &["uninstall", RELEASE, "--namespace", NAMESPACE, "--wait"])?;
            let crds = "customresourcedefinition.apiextensions.k8s.io/gangs.gantry.dev \
                        customresourcedefinition.apiextensions.k8s.io/gpunodes.gantry.dev";
            let left = remains(cluster).await?;
            ensure!(left == crds, "after uninstalling: {left}");
            cluster.kubectl(&["get", "gang", "kept"]).await?;
            // With the data of the last release, and then without.
            upgrade(&helm, cluster, &chart(), &["crds.keep=false"])?;
            cluster.kubectl(&["get", "gang", "kept"]).await?;
            helm.output(Some(&kubeconfig), &["uninstall", RELEASE, "--namespace", NAMESPACE, "--wait"])?;
            let left = remains(cluster).await?;
            ensure!(left.is_empty(), "after uninstalling with the CRDs: {left}");
        }
        Ok(())
    })
}

/// Installs the shape `own` on a cluster of one node, and starts its daemons.
pub(crate) async fn own_shape(cluster: &Cluster, binary: &Path) -> Result<[Daemon; 2]> {
    let [helm, _] = helms()?;
    upgrade(&helm, cluster, &chart(), &["scheduler.mode=own", "scheduler.own.assign.enabled=true"])?;
    let node = &cluster.nodes()[0];
    let hardware = Hardware::install(node, &gantry::machine_file("dgx1-v100"))?;
    cluster.start_plugin(node, binary, &hardware.plugin_args()).await?;
    let daemons = cluster.start_own_scheduler(binary).await?;
    until("GPUs counted", LIMIT, async || {
        let path = "jsonpath={.status.allocatable.nvidia\\.com/gpu}";
        let count = cluster.kubectl(&["get", "node", "node-1", "-o", path]).await;
        let count = count.map_err(|error| error.to_string())?;
        (count == "8").then_some(()).ok_or(count)
    })
    .await?;
    until("service account", LIMIT, async || cluster.kubectl(&["get", "serviceaccount", "default"]).await)
        .await?;
    Ok(daemons)
}

/// The chart's kube-scheduler and extender place the pods that name them, and the cluster's own is left alone.
pub(crate) fn own_scheduler_grants_devices() -> Result<()> {
    let binary = gantry::binary().context("no gantry beside this test: cargo build -p gantry")?;
    on_cluster(&["node-1"], async |cluster| {
        let daemons = own_shape(cluster, &binary).await?;
        cluster.kubectl(&["create", "namespace", "assigned"]).await?;
        cluster.kubectl(&["label", "namespace", "assigned", "gantry.dev/scheduler=true"]).await?;
        until("service account", LIMIT, async || {
            cluster.kubectl(&["-n", "assigned", "get", "serviceaccount", "default"]).await
        })
        .await?;

        let named = runs(cluster, "default", "named", Some("gantry"), 2).await?;
        ensure!(granted(&named) == 2, "{named:#?}");
        let cpu = runs(cluster, "default", "cpu", Some("gantry"), 0).await?;
        ensure!(granted(&cpu) == 0, "a pod without GPUs has a grant");
        let assigned = runs(cluster, "assigned", "assigned", None, 4).await?;
        ensure!(granted(&assigned) == 4, "{assigned:#?}");
        let scheduler = assigned.spec.as_ref().and_then(|spec| spec.scheduler_name.as_deref());
        ensure!(scheduler == Some("gantry"), "{scheduler:?}");
        // The cluster's own scheduler places what is not Gantry's, also GPUs.
        let other = runs(cluster, "default", "other", None, 1).await?;
        ensure!(granted(&other) == 0, "the cluster's kube-scheduler calls the extender");
        for daemon in &daemons {
            daemon.check()?;
        }
        Ok(())
    })
}

/// Creates a pod and waits until it runs.
pub(crate) async fn runs(
    cluster: &Cluster,
    namespace: &str,
    name: &str,
    scheduler: Option<&str>,
    gpus: usize,
) -> Result<Pod> {
    let mut pod = json!({
        "metadata": { "name": name },
        "spec": {
            "dnsPolicy": "Default",
            "terminationGracePeriodSeconds": 1,
            "containers": [{
                "name": "main",
                "image": BUSYBOX_IMAGE,
                "imagePullPolicy": "Never",
                "command": ["sh", "-c", "sleep 100000"],
            }],
        },
    });
    if gpus > 0 {
        pod["spec"]["containers"][0]["resources"] =
            json!({ "limits": { "nvidia.com/gpu": gpus.to_string() } });
    }
    if let Some(scheduler) = scheduler {
        pod["spec"]["schedulerName"] = scheduler.into();
    }
    let api: Api<Pod> = Api::namespaced(cluster.client(), namespace);
    api.create(&PostParams::default(), &serde_json::from_value(pod)?).await?;
    let running = until(format!("{name} runs"), LIMIT, async || {
        let pod = api.get(name).await.map_err(|error| error.to_string())?;
        let status = pod.status.clone().unwrap_or_default();
        match status.phase.as_deref() {
            Some("Running") => Ok(pod),
            _ => Err(format!("{status:?}")),
        }
    });
    Ok(running.await?)
}

/// The number of devices in a pod's grant.
fn granted(pod: &Pod) -> usize {
    let annotations = pod.metadata.annotations.as_ref();
    let grant = annotations.and_then(|annotations| annotations.get(GRANT_ANNOTATION));
    grant.map_or(0, |grant| grant.matches("GPU-").count())
}
