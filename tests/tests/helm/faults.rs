//! `gantry doctor` on a real cluster: each of its checks against a fault that is planted there.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use gantry_e2e::hardware::FOLDER;
use gantry_e2e::{BUSYBOX_IMAGE, Cluster, Daemon, gantry, until};
use k8s_openapi::ByteString;
use serde_json::{Value, json};

use crate::NAMESPACE;
use crate::cluster::{LIMIT, on_cluster, own_shape, runs};

/// Checks with a fault in recorded answers only (`cli/src/doctor/checks/tests.rs`): no cluster of these tests is older
/// than what Gantry supports.
const RECORDED: [&str; 1] = ["kubernetes"];

/// What is not `ok` from the beginning: the daemons are processes here, and the chart has its defaults.
const FROM_THE_BEGINNING: [(&str, &str, &str); 5] = [
    ("plugin-pods", "failed", "kubectl label node NODE gantry.dev/gpu=true"),
    ("labels", "warning", "--set plugin.labels=node"),
    ("metrics", "warning", "kubectl label namespace NAMESPACE gantry.dev/metrics=true"),
    ("scheduler-calls", "unknown", "auth can-i get pods --subresource=proxy"),
    ("memory", "unknown", "auth can-i get pods --subresource=proxy"),
];

/// A cluster, and the checks that have had a fault on it.
struct Planted<'a> {
    cluster: &'a Cluster,
    binary: &'a Path,
    checks: BTreeSet<String>,
}

impl Planted<'_> {
    /// The reports of all checks.
    fn reports(&self) -> Result<Vec<Value>> {
        let (report, code) = self.cluster.doctor(self.binary, &[])?;
        ensure!(code == Some(1), "a check has failed, and the exit code is {code:?}");
        Ok(report["checks"].as_array().context("no checks")?.clone())
    }

    /// Waits until a check reports this outcome, names the object, and prints the command.
    async fn shows(&mut self, check: &str, outcome: &str, object: &str, fix: &str) -> Result<()> {
        until(format!("{check} is {outcome}"), LIMIT, async || {
            let reports = self.reports().map_err(|error| format!("{error:#}"))?;
            let report = reports.into_iter().find(|report| report["check"] == check).unwrap_or_default();
            let holds = |field: &str, text: &str| report[field].as_str().unwrap_or_default().contains(text);
            let is_found = report["outcome"] == outcome && holds("message", object) && holds("fix", fix);
            if is_found { Ok(()) } else { Err(format!("{report:#}, without {object:?} or {fix:?}")) }
        })
        .await?;
        self.checks.insert(check.to_owned());
        Ok(())
    }

    /// Waits until a check is `ok`.
    async fn passes(&mut self, check: &str) -> Result<()> {
        until(format!("{check} is ok"), LIMIT, async || {
            let reports = self.reports().map_err(|error| format!("{error:#}"))?;
            let report = reports.into_iter().find(|report| report["check"] == check).unwrap_or_default();
            if report["outcome"] == "ok" { Ok(()) } else { Err(format!("{report:#}")) }
        })
        .await?;
        Ok(())
    }

    async fn kubectl(&self, args: &[&str]) -> Result<String> {
        Ok(self.cluster.kubectl(args).await?)
    }

    async fn create(&self, object: &Value) -> Result<()> {
        self.cluster.kubectl_with_input(&["create", "-f", "-"], &object.to_string()).await?;
        Ok(())
    }
}

/// Each planted fault changes the outcome of its check, and the report names the object and the command that mends it.
pub(crate) fn doctor_finds_planted_faults() -> Result<()> {
    let binary = gantry::binary().context("no gantry beside this test: cargo build -p gantry")?;
    on_cluster(&["node-1"], async |cluster| {
        let [_scheduler, extender] = own_shape(cluster, &binary).await?;
        runs(cluster, "default", "named", Some("gantry"), 2).await?;
        let mut planted = Planted { cluster, binary: &binary, checks: BTreeSet::new() };
        let before = planted.reports()?;
        for report in &before {
            let known = FROM_THE_BEGINNING.iter().find(|(check, ..)| report["check"] == *check);
            let expected = known.map_or("ok", |(_, outcome, _)| outcome);
            ensure!(report["outcome"] == expected, "expected {expected}: {report:#}");
        }
        for (check, outcome, fix) in FROM_THE_BEGINNING {
            planted.shows(check, outcome, "", fix).await?;
        }
        plant_nodes(&mut planted).await?;
        plant_second_plugins(&mut planted).await?;
        plant_settings(&mut planted).await?;
        plant_metrics(&mut planted).await?;
        plant_extender(&mut planted, &extender).await?;
        plant_hardware(&mut planted).await?;
        plant_roles(&mut planted).await?;

        let all: BTreeSet<&str> = before.iter().filter_map(|report| report["check"].as_str()).collect();
        let planted = planted.checks.iter().map(String::as_str).chain(RECORDED).collect::<BTreeSet<_>>();
        let missing: Vec<&&str> = all.difference(&planted).collect();
        ensure!(missing.is_empty(), "checks without a planted fault: {missing:?}");
        Ok(())
    })
}

/// Nodes as other plugins, other kubelets and other versions would report them.
async fn plant_nodes(planted: &mut Planted<'_>) -> Result<()> {
    let ghost = json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": { "name": "ghost", "labels": { "nvidia.com/gpu.present": "true" } },
    });
    planted.create(&ghost).await?;
    planted.shows("gpu-nodes", "failed", "ghost", "spec.nodeName=ghost").await?;
    planted.kubectl(&["delete", "node", "ghost"]).await?;
    planted.passes("gpu-nodes").await?;

    // A GpuNode of a plugin of the release before, on a node with a wrong clock.
    let real: Value =
        serde_json::from_str(&planted.kubectl(&["get", "gpunode", "node-1", "-o", "json"]).await?)?;
    let mut old = json!({
        "apiVersion": real["apiVersion"],
        "kind": "GpuNode",
        "metadata": { "name": "old" },
        "spec": real["spec"],
    });
    planted.create(&old).await?;
    let created = planted.kubectl(&["get", "gpunode", "old", "-o", "json"]).await?;
    let created: Value = serde_json::from_str(&created)?;
    old["metadata"] = created["metadata"].clone();
    old["status"] = json!({ "pluginVersion": "0.0.1", "conditions": real["status"]["conditions"] });
    let replace = ["replace", "--subresource=status", "-f", "-"];
    planted.cluster.kubectl_with_input(&replace, &old.to_string()).await?;
    planted.shows("versions", "warning", "the plugin of old is 0.0.1", "helm upgrade gantry ").await?;

    let mig = json!([{ "op": "add", "path": "/spec/machine/gpus/0/mig", "value": { "enabled": true } }]);
    planted.kubectl(&["patch", "gpunode", "old", "--type=json", "-p", &mig.to_string()]).await?;
    planted.shows("mig", "failed", "old", "kubectl label node old gantry.dev/mig=true").await?;

    let lease = json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": { "name": "old", "namespace": "kube-node-lease" },
        "spec": { "holderIdentity": "old", "renewTime": "2020-01-01T00:00:00.000000Z" },
    });
    planted.create(&lease).await?;
    planted.shows("clocks", "failed", "behind the API server's", "timedatectl set-ntp true").await?;
    let ahead = json!({ "spec": { "renewTime": "2099-01-01T00:00:00.000000Z" } }).to_string();
    planted
        .kubectl(&["-n", "kube-node-lease", "patch", "lease", "old", "--type=merge", "-p", &ahead])
        .await?;
    planted.shows("clocks", "failed", "ahead of the API server's", "on old,").await?;
    planted.kubectl(&["-n", "kube-node-lease", "delete", "lease", "old"]).await?;
    planted.kubectl(&["delete", "gpunode", "old"]).await?;
    for check in ["versions", "mig", "clocks"] {
        planted.passes(check).await?;
    }
    Ok(())
}

/// NVIDIA's plugin and DRA driver on the node of Gantry's.
async fn plant_second_plugins(planted: &mut Planted<'_>) -> Result<()> {
    let labels = json!({ "app": "nvdp" });
    let set = json!({
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": { "name": "nvdp", "namespace": "default" },
        "spec": {
            "selector": { "matchLabels": labels },
            "template": {
                "metadata": { "labels": labels },
                "spec": {
                    "terminationGracePeriodSeconds": 1,
                    "containers": [{ "name": "main", "image": "example.com/k8s-device-plugin:1", "imagePullPolicy": "Never" }],
                },
            },
        },
    });
    planted.create(&set).await?;
    planted.kubectl(&["label", "node", "node-1", "gantry.dev/gpu=true"]).await?;
    planted
        .shows("other-plugin", "failed", "default/nvdp", "kubectl -n default delete daemonset nvdp")
        .await?;
    planted.kubectl(&["label", "node", "node-1", "gantry.dev/gpu-"]).await?;
    planted.kubectl(&["-n", "default", "delete", "daemonset", "nvdp"]).await?;
    planted.passes("other-plugin").await?;

    let slice = json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": { "name": "node-1-gpus" },
        "spec": {
            "driver": "gpu.nvidia.com",
            "nodeName": "node-1",
            "pool": { "name": "node-1", "generation": 1, "resourceSliceCount": 1 },
            "devices": [{ "name": "gpu-0" }],
        },
    });
    planted.create(&slice).await?;
    planted.shows("dra", "failed", "node-1", "kubectl label node node-1 gantry.dev/gpu=false").await
}

/// Settings of the installation: kubelet's directory, kube-scheduler's configuration, certificates; and labels, which
/// mend what is wrong from the beginning.
async fn plant_settings(planted: &mut Planted<'_>) -> Result<()> {
    planted.kubectl(&["label", "node", "node-1", "nvidia.com/gpu.product=V100"]).await?;
    planted.passes("labels").await?;
    planted.kubectl(&["label", "namespace", "default", "gantry.dev/metrics=true"]).await?;
    planted.passes("metrics").await?;

    let mount = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "gantry-plugin-x",
            "namespace": NAMESPACE,
            "labels": { "app.kubernetes.io/name": "gantry-plugin" },
        },
        "spec": {
            "nodeName": "node-1",
            "terminationGracePeriodSeconds": 1,
            "containers": [{
                "name": "main",
                "image": BUSYBOX_IMAGE,
                "imagePullPolicy": "Never",
                "volumeMounts": [{ "name": "plugins", "mountPath": "/plugins" }],
            }],
            "volumes": [
                { "name": "plugins", "hostPath": { "path": "/no/device-plugins", "type": "Directory" } },
            ],
        },
    });
    planted.create(&mount).await?;
    planted.shows("kubelet-directory", "failed", "gantry-plugin-x", "--set plugin.kubeletRoot=").await?;

    let config =
        "data: {config.yaml: 'extenders: [{bindVerb: bind, managedResources: [{name: nvidia.com/x}]}]'}";
    planted
        .kubectl(&["-n", NAMESPACE, "patch", "configmap", "gantry-scheduler", "--type=merge", "-p", config])
        .await?;
    planted.shows("scheduler-resources", "failed", "nvidia.com/gpu", "helm upgrade gantry ").await?;

    // The extender of another placement, with a certificate that has ended.
    let labels = json!({ "app": "tls" });
    let volumes = ["tls", "webhook"].map(|name| json!({ "name": name, "secret": { "secretName": "ended" } }));
    let deployment = json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": { "name": "gantry-extender", "namespace": NAMESPACE },
        "spec": {
            "replicas": 0,
            "selector": { "matchLabels": labels },
            "template": {
                "metadata": { "labels": labels },
                "spec": {
                    "containers": [{ "name": "main", "image": BUSYBOX_IMAGE }],
                    "volumes": volumes,
                },
            },
        },
    });
    let key = rcgen::KeyPair::generate()?;
    let mut params = rcgen::CertificateParams::default();
    params.not_before = rcgen::date_time_ymd(2019, 1, 1);
    params.not_after = rcgen::date_time_ymd(2020, 1, 1);
    let certificate = params.self_signed(&key)?.pem();
    let secret = json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": { "name": "ended", "namespace": NAMESPACE },
        "stringData": { "tls.crt": certificate, "tls.key": key.serialize_pem(), "ca.crt": certificate },
    });
    planted.create(&secret).await?;
    planted.create(&deployment).await?;
    planted
        .shows("certificates", "failed", "the Secret ended has expired", "create secret generic ended ")
        .await?;
    // The webhook of this shape, with the same certificate.
    let webhook = json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": { "name": "gantry-scheduler-name" },
        "webhooks": [{
            "name": "scheduler-name.gantry.dev",
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
            "failurePolicy": "Ignore",
            "clientConfig": {
                "service": { "namespace": NAMESPACE, "name": "gantry-webhook" },
                "caBundle": ByteString(certificate.into_bytes()),
            },
        }],
    });
    planted.create(&webhook).await?;
    planted
        .shows("webhook", "failed", "the Secret ended has expired", "delete secret gantry-webhook-tls")
        .await?;
    planted.kubectl(&["delete", "mutatingwebhookconfiguration", "gantry-scheduler-name"]).await?;
    planted.passes("webhook").await?;
    planted.kubectl(&["-n", NAMESPACE, "delete", "deployment", "gantry-extender"]).await?;
    planted.passes("certificates").await
}

/// The metrics of an extender that no kube-scheduler calls and that has little memory left, from a pod in its place.
async fn plant_metrics(planted: &mut Planted<'_>) -> Result<()> {
    // Its pods do not run here, and their metrics cannot be read.
    planted.kubectl(&["-n", NAMESPACE, "scale", "deployment", "gantry-scheduler", "--replicas=0"]).await?;
    let page = "gantry_extender_requests_total{verb=\"filter\",code=\"200\"} 0\n\
                gantry_extender_object_bytes_limit 1000000\n\
                gantry_extender_object_bytes{namespace=\"full\"} 140000\n";
    let serve = format!("printf '%s' '{page}' > /tmp/metrics; exec busybox httpd -f -p 8011 -h /tmp");
    let pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "gantry-extender-x",
            "namespace": NAMESPACE,
            "labels": { "app.kubernetes.io/name": "gantry-extender" },
        },
        "spec": {
            "nodeName": "node-1",
            "dnsPolicy": "Default",
            "terminationGracePeriodSeconds": 1,
            "containers": [{
                "name": "main",
                "image": BUSYBOX_IMAGE,
                "imagePullPolicy": "Never",
                "command": ["sh", "-c", serve],
            }],
        },
    });
    planted.create(&pod).await?;
    planted.shows("memory", "warning", "namespace full", "--object-memory=").await?;
    planted.shows("scheduler-calls", "warning", "no kube-scheduler", "kubectl patch --local").await
}

/// The extender ends. Then a Gang has a slow member, in the words that the extender writes.
async fn plant_extender(planted: &mut Planted<'_>, extender: &Daemon) -> Result<()> {
    extender.stop().await?;
    let logs = format!("kubectl -n {NAMESPACE} logs -l app.kubernetes.io/name=gantry-extender");
    planted.shows("extender", "failed", "no extender leads", &logs).await?;

    let gang = json!({
        "apiVersion": "gantry.dev/v1alpha1",
        "kind": "Gang",
        "metadata": { "name": "slow", "namespace": "default" },
        "spec": {},
    });
    planted.create(&gang).await?;
    let condition = json!({
        "type": "MembersSlow",
        "status": "True",
        "reason": "MembersSlow",
        "message": "slow-1: GPU 4 of node-1 runs at 60 % of its highest clock, the other members at 90 %",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    });
    let created = planted.kubectl(&["get", "gang", "slow", "-o", "json"]).await?;
    let mut gang: Value = serde_json::from_str(&created)?;
    gang["status"] = json!({ "conditions": [condition] });
    let account = format!("--as=system:serviceaccount:{NAMESPACE}:gantry-extender");
    let replace = [account.as_str(), "replace", "--subresource=status", "-f", "-"];
    planted.cluster.kubectl_with_input(&replace, &gang.to_string()).await?;
    planted.shows("slow-members", "warning", "default/slow", "kubectl -n default describe gang slow").await
}

/// The plugin starts without the driver's library, and then without kubelet.
async fn plant_hardware(planted: &mut Planted<'_>) -> Result<()> {
    let node = &planted.cluster.nodes()[0];
    node.program(gantry::PLUGIN)?.stop().await?;
    let library = node.sandbox().folder().join(FOLDER).join(gantry_nvml_sim::LIBRARY_NAME);
    let away = library.with_extension("away");
    fs::rename(&library, &away).with_context(|| library.display().to_string())?;
    node.sandbox().run_again(gantry::PLUGIN).await?;
    planted.shows("driver", "failed", "node-1", "kubectl describe gpunode node-1").await?;
    node.program(gantry::PLUGIN)?.stop().await?;
    fs::rename(&away, &library)?;
    node.program("kubelet")?.stop().await?;
    node.sandbox().run_again(gantry::PLUGIN).await?;
    planted.shows("registration", "failed", "node-1", &format!("kubectl -n {NAMESPACE} logs ")).await?;
    planted.passes("driver").await?;
    node.sandbox().run_again("kubelet").await?;
    planted.passes("registration").await
}

/// What the API server protects the installation by.
async fn plant_roles(planted: &mut Planted<'_>) -> Result<()> {
    planted.kubectl(&["delete", "validatingadmissionpolicybinding", "gantry-gang-annotations"]).await?;
    planted.shows("policies", "failed", "gantry-gang-annotations", "--set guard.enabled=true").await?;
    planted.kubectl(&["delete", "clusterrolebinding", "gantry-extender"]).await?;
    planted.shows("rights", "failed", "gantry-extender may not", "helm upgrade gantry ").await?;
    planted.kubectl(&["delete", "crd", "gangs.gantry.dev"]).await?;
    planted.shows("crds", "failed", "gangs.gantry.dev", "--set crds.install=true").await
}
