//! The stories: one for each page with commands, in an order that changes the shape of the cluster seldom. A story runs
//! all commands of its page and checks what the page promises; it does by itself what the page leaves to the reader.

use anyhow::{Context, Result, ensure};
use futures::future::LocalBoxFuture;
use gantry_e2e::gantry;
use gantry_e2e::hardware::Hardware;

use crate::commands::root;
use crate::reader::Reader;
use crate::stage::{CONTROL_PLANE, GPUS, Shape, Stage};

type Play = for<'a> fn(&'a Stage, &'a mut Reader<'_>) -> LocalBoxFuture<'a, Result<()>>;

/// How a page is played.
pub(crate) struct Story {
    pub(crate) page: &'static str,
    /// What is installed when it begins.
    pub(crate) shape: Shape,
    /// What it leaves.
    pub(crate) after: Shape,
    pub(crate) play: Play,
}

macro_rules! story {
    ($page:literal, $shape:ident -> $after:ident, $play:expr) => {
        Story {
            page: $page,
            shape: Shape::$shape,
            after: Shape::$after,
            play: |stage, page| Box::pin($play(stage, page)),
        }
    };
}

pub(crate) static STORIES: [Story; 35] = [
    story!("docs/tutorials/demo.md", Nothing -> Nothing, demo),
    story!("docs/labels.md", Nothing -> Nothing, labels),
    story!("docs/how-to/fractions-and-mps.md", Nothing -> Changed, all),
    story!("docs/tutorials/one-node.md", Nothing -> Changed, one_node),
    story!("README.md", Nothing -> Changed, readme),
    story!("docs/install.md", Nothing -> Changed, install),
    story!("docs/how-to/install/managed-clouds.md", Nothing -> Changed, own_scheduler),
    story!("docs/how-to/install/openshift.md", Nothing -> Changed, own_scheduler),
    story!("docs/how-to/install/k3s-rke2.md", Nothing -> Changed, k3s),
    story!("docs/how-to/install/talos.md", Nothing -> Changed, talos),
    story!("docs/page.md", Own -> Changed, web_page),
    story!("docs/how-to/time-slicing.md", Alone -> Changed, time_slicing),
    story!("docs/how-to/install/kubeadm.md", Existing -> Existing, kubeadm),
    story!("docs/doctor.md", Existing -> Existing, doctor),
    story!("docs/map.md", Existing -> Existing, map),
    story!("docs/reference/command-line.md", Existing -> Existing, command_line),
    story!("docs/tutorials/first-gang.md", Existing -> Existing, first_gang),
    story!("docs/gangs.md", Existing -> Existing, gangs),
    story!("docs/how-to/workloads/job.md", Existing -> Existing, workload),
    story!("docs/how-to/workloads/jobset.md", Existing -> Existing, workload),
    story!("docs/how-to/workloads/leaderworkerset.md", Existing -> Existing, workload),
    story!("docs/how-to/workloads/pytorchjob.md", Existing -> Existing, workload),
    story!("docs/how-to/pending-pod.md", Existing -> Existing, pending_pod),
    story!("docs/operate.md", Existing -> Existing, operate),
    story!("docs/how-to/unhealthy-gpu.md", Existing -> Existing, unhealthy_gpu),
    story!("docs/health.md", Existing -> Existing, health),
    story!("docs/runbooks/gangs.md", Existing -> Existing, runbooks_of_gangs),
    story!("docs/runbooks/nodes.md", Existing -> Existing, runbooks_of_nodes),
    story!("docs/runbooks/pods.md", Existing -> Existing, runbooks_of_pods),
    story!("docs/runbooks.md", Existing -> Existing, runbooks),
    story!("docs/how-to/upgrade.md", Existing -> Existing, upgrade),
    story!("docs/how-to/mig-layouts.md", Existing -> Changed, all),
    story!("docs/how-to/remediation.md", Existing -> Changed, remediation),
    story!("docs/how-to/uninstall.md", Existing -> Changed, uninstall),
    // Its second node gets another machine.
    story!("docs/how-to/mig-tenants.md", Existing -> Changed, mig_tenants),
];

/// A pod that holds GPUs until it is deleted.
fn holder(name: &str, gpus: usize, more: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\n  annotations: {{{more}}}\nspec:\n  {}",
        container(gpus).replace('\n', "\n  ")
    )
}

/// The spec of such a pod.
fn container(gpus: usize) -> String {
    format!(
        "restartPolicy: Never\nterminationGracePeriodSeconds: 1\ncontainers:\n- name: main\n  image: busybox:1.36\n  \
         command: [sh, -c, \"trap 'exit 0' TERM; sleep 600 & wait\"]\n  resources: {{limits: {{nvidia.com/gpu: {gpus}}}}}"
    )
}

/// Applies objects.
fn apply(stage: &Stage, namespace: &str, objects: &str) -> Result<String> {
    stage.sh(&format!("kubectl -n {namespace} apply -f - <<'END'\n{objects}\nEND"))
}

/// What a reader does on a cluster without the GPU operator.
fn label_nodes(stage: &Stage) -> Result<String> {
    stage.sh("kubectl label node --all gantry.dev/gpu=true")
}

/// Objects that an installation has made, by kind.
fn remains(stage: &Stage, kinds: &str) -> Result<String> {
    stage.sh(&format!("kubectl get {kinds} -A -o name | grep -E 'gantry|gpunode' || true"))
}

const KINDS: &str = "clusterroles,clusterrolebindings,flowschemas,validatingadmissionpolicies,\
                     validatingadmissionpolicybindings,mutatingadmissionpolicies,daemonsets,deployments,services,\
                     serviceaccounts,roles,rolebindings,networkpolicies,pdb,configmaps,secrets,resourcequotas";

async fn all(_: &Stage, page: &mut Reader<'_>) -> Result<()> {
    page.rest().await
}

async fn demo(_: &Stage, page: &mut Reader<'_>) -> Result<()> {
    let played = page.run("cargo run -- demo").await?;
    ensure!(played.contains("checks passed"), "{played}");
    let mut demo = page.watch("cargo run -- demo --watch", "kubectl create -f").await?;
    let introduced = demo.until("export KUBECONFIG=").await?;
    let named = introduced.split("export KUBECONFIG=").nth(1).and_then(|rest| rest.lines().next());
    page.fill("<the file that the demo names>", named.context("no kubeconfig")?.trim());
    page.shows("kubectl get gpunodes", &["hgx"]).await?;
    page.shows("kubectl describe pod two-gpus", &["GpusAssigned"]).await?;
    page.shows("cargo run -- explain pod two-gpus", &["two-gpus"]).await?;
    page.run("nvidia-smi topo -m | cargo run -- topo").await?;
    page.run("nvidia-smi topo -m | cargo run -- choose").await?;
    Ok(())
}

/// The first command reads the driver of the node that it runs on.
async fn labels(stage: &Stage, page: &mut Reader<'_>) -> Result<()> {
    let driver = stage.cluster().nodes()[0].sandbox().folder().join("hardware");
    page.export("LD_LIBRARY_PATH", &driver)?;
    page.export("GANTRY_SIM_MACHINE", &driver.join(gantry_nvml_sim::MACHINE_FILE))?;
    let labels = page.run("gantry labels").await?;
    ensure!(labels.contains("nvidia.com/gpu.count=16"), "{labels}");
    let labels = page.run("gantry labels --from").await?;
    ensure!(labels.contains("nvidia.com/gpu.count=8") && !labels.contains("timestamp"), "{labels}");
    Ok(())
}

async fn one_node(stage: &Stage, page: &mut Reader<'_>) -> Result<()> {
    let nodes = page.shows("kubectl get gpunodes", &["node-1"]).await?;
    ensure!(!nodes.contains("node-2"), "{nodes}");
    page.shows("gantry doctor", &[]).await?;
    let log = page.shows("kubectl logs first", &["my GPUs: GPU-"]).await?;
    ensure!(log.matches("GPU-").count() == 2, "{log}");
    page.shows("gantry map --node <node>", &["first"]).await?;
    page.run("helm uninstall").await?;
    page.rest().await?;
    let phase = stage.sh("kubectl get pod first -o jsonpath='{.status.phase}'")?;
    ensure!(["Running", "Succeeded"].contains(&phase.as_str()), "the pod is {phase}");
    let left = remains(stage, KINDS)?;
    ensure!(left.is_empty(), "{left}");
    let labels = stage.sh("kubectl get nodes --show-labels")?;
    ensure!(!labels.contains("gantry.dev/gpu") && !labels.contains("deploy.device-plugin"), "{labels}");
    Ok(())
}

async fn readme(stage: &Stage, page: &mut Reader<'_>) -> Result<()> {
    label_nodes(stage)?;
    let played = page.run("cargo run -- demo").await?;
    ensure!(played.contains("checks passed"), "{played}");
    let other_shape = || stage.sh("helm uninstall gantry -n gantry-system --wait");
    page.shows("kubectl get gpunodes", &["node-1", "node-2"]).await?;
    other_shape()?;
    page.shows("gantry doctor", &[]).await?;
    other_shape()?;
    page.run("helm install").await?;
    stage.serves(&[("node-1", GPUS), ("node-2", GPUS)]).await?;
    page.run("gantry scheduler-config").await?;
    stage.call_extender(&page.file("kube-scheduler-config.yaml")?).await?;
    page.shows("kubectl get gpunodes", &["node-1", "node-2"]).await?;
    page.shows("kubectl describe pod two-gpus", &["GpusAssigned"]).await?;
    // For the shape `own`: here no scheduler takes the pod.
    page.run("kubectl patch --local").await?;
    stage.empty()?;
    page.run("kubectl apply -f manifests/samples/gang-job.yaml").await?;
    page.shows("kubectl get gangs", &["train", "Bound"]).await?;
    page.shows("gantry explain gang train", &["node-1", "node-2"]).await?;
    Ok(())
}

async fn install(stage: &Stage, page: &mut Reader<'_>) -> Result<()> {
    // What a cluster with NVIDIA's plugin has: a release with values, and the operator's ClusterPolicy.
    let samples = root().join("cli/src/migrate/samples").canonicalize()?;
    let samples = samples.display();
    stage.sh(&format!(
        "mkdir -p nvdp\nprintf 'apiVersion: v2\\nname: nvdp\\nversion: 0.17.1\\n' > nvdp/Chart.yaml\n\
         helm upgrade --install nvdp nvdp -n nvidia --values {samples}/plugin-values.yaml\n\
         kubectl apply -f - <<'END'\n{CLUSTER_POLICIES}\nEND\n\
         kubectl wait --for=condition=Established crd/clusterpolicies.nvidia.com\n\
         kubectl apply -f {samples}/cluster-policy.yaml"
    ))?;
    for source in ["helm -n nvidia get values nvdp", "kubectl get clusterpolicy"] {
        page.run(source).await?;
        let values = page.file("values.yaml")?;
        ensure!(values.contains("plugin:"), "{source}: {values}");
    }
    page.shows("kubectl get gpunodes", &["node-1"]).await?;
    page.run("helm upgrade").await?;
    page.shows("kubectl -n gantry-system get pods", &["gantry-scheduler"]).await?;
    // With the webhook, and without.
    page.run("helm upgrade").await?;
    page.run("helm upgrade").await?;
    stage.serves(&[("node-1", GPUS)]).await?;
    page.run("gantry scheduler-config").await?;
    stage.call_extender(&page.file("kube-scheduler-config.yaml")?).await?;
    page.shows("gantry doctor", &[]).await?;
    page.shows("kubectl get pod two-gpus", &["GPU-"]).await?;
    let log = page.shows("kubectl logs two-gpus", &["my GPUs: GPU-"]).await?;
    ensure!(log.matches("GPU-").count() == 2, "{log}");
    page.rest().await
}

/// The definition of the GPU operator's ClusterPolicy, without its schema.
const CLUSTER_POLICIES: &str = "
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  name: clusterpolicies.nvidia.com
spec:
  group: nvidia.com
  scope: Cluster
  names: {kind: ClusterPolicy, plural: clusterpolicies, singular: clusterpolicy}
  versions:
    - name: v1
      served: true
      storage: true
      schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}";

async fn own_scheduler(stage: &Stage, page: &mut Reader<'_>) -> Result<()> {
    label_nodes(stage)?;
    page.shows("gantry doctor", &[]).await?;
    page.shows("kubectl get pod first", &["GPU-"]).await?;
    let log = page.shows("kubectl logs first", &["my GPUs: GPU-"]).await?;
    ensure!(log.matches("GPU-").count() == 2, "{log}");
    Ok(())
}

/// A runtime class that is not the default runtime, as these distributions have it.
fn runtime_class(stage: &Stage) -> Result<String> {
    stage.sh("kubectl apply -f - <<'END'\napiVersion: node.k8s.io/v1\nkind: RuntimeClass\nmetadata: {name: nvidia}\n\
              handler: runc\nEND")
}

async fn talos(stage: &Stage, page: &mut Reader<'_>) -> Result<()> {
    runtime_class(stage)?;
    page.shows("kubectl get gpunodes", &["node-1"]).await?;
    Ok(())
}

async fn k3s(stage: &Stage, page: &mut Reader<'_>) -> Result<()> {
    runtime_class(stage)?;
    label_nodes(stage)?;
    stage.sh(&format!("kubectl label node node-1 --overwrite {CONTROL_PLANE}=true"))?;
    page.run("helm upgrade").await?;
    stage.serves(&[("node-1", GPUS)]).await?;
    page.run("gantry scheduler-config").await?;
    let config = page.file("etc/rancher/k3s/kube-scheduler-config.yaml")?;
    ensure!(config.contains("/var/lib/rancher/k3s/server/cred/scheduler.kubeconfig"), "{config}");
    let ready =
        "kubectl -n gantry-system get daemonset gantry-extender -o jsonpath='[{.status.numberReady}]'";
    stage.prints(ready, "[1]").await?;
    Ok(())
}

async fn web_page(stage: &Stage, page: &mut Reader<'_>) -> Result<()> {
    page.run("helm upgrade").await?;
    stage.sh("kubectl -n gantry-system rollout status deployment gantry-scheduler --timeout=90s")?;
    // The last leader's pod counts until it is gone.
    let pods = "kubectl -n gantry-system get pods -l app.kubernetes.io/name=gantry-extender -o name";
    stage.prints(&format!("echo [$({pods} | wc -l)]"), "[2]").await?;
    let leader = "holder=$(kubectl -n gantry-system get lease gantry-extender -o jsonpath='{.spec.holderIdentity}')\n\
                  for pod in $(kubectl -n gantry-system get pods -l app.kubernetes.io/name=gantry-extender -o name); do\n\
                  case $holder in ${pod#pod/}*) echo \"leader: ${pod#pod/}\";; esac; done";
    let found = stage.prints(leader, "leader: ").await?;
    page.fill("<leader>", found.trim().trim_start_matches("leader: "));
    let forward = page.watch("kubectl -n gantry-system port-forward", "Forwarding from 127.0.0.1").await?;
    stage.prints("busybox wget -q -O - http://localhost:8012/api/v1/cluster", "\"ready\"").await?;
    drop(forward);
    page.rest().await
}

async fn time_slicing(stage: &Stage, page: &mut Reader<'_>) -> Result<()> {
    page.run("helm upgrade").await?;
    page.shows("kubectl get node <node>", &[&(4 * GPUS).to_string()]).await?;
    stage.serves(&[("node-2", 4 * GPUS)]).await
}

async fn kubeadm(_: &Stage, page: &mut Reader<'_>) -> Result<()> {
    page.run("gantry scheduler-config").await?;
    let config = page.file("kube-scheduler-config.yaml")?;
    ensure!(config.contains("nvidia.com/gpu") && config.contains("extenders:"), "{config}");
    page.shows("gantry doctor", &[]).await?;
    Ok(())
}

async fn doctor(stage: &Stage, page: &mut Reader<'_>) -> Result<()> {
    page.shows("gantry doctor", &["scheduler-calls"]).await?;
    page.shows("gantry doctor --scheduler-config", &["scheduler-resources"]).await?;
    let report = page.shows("gantry doctor -o json", &["\"checks\""]).await?;
    let report: serde_json::Value = serde_json::from_str(&report)?;
    ensure!(report["failed"] == 0, "{report:#}");
    page.run("kubectl -n gantry-system create secret").await?;
    ensure!(page.file("tls.crt")?.contains("BEGIN CERTIFICATE"), "no certificate");
    stage.sh("kubectl -n gantry-system delete secret gantry-extender-tls")?;
    Ok(())
}

async fn map(stage: &Stage, page: &mut Reader<'_>) -> Result<()> {
    apply(stage, "default", &holder("drawn", 3, ""))?;
    page.shows("gantry map", &["node-", "drawn", "3 held"]).await?;
    Ok(())
}

async fn command_line(_: &Stage, page: &mut Reader<'_>) -> Result<()> {
    let versions = page.run("kubectl gantry version").await?;
    ensure!(versions.contains(env!("CARGO_PKG_VERSION")), "{versions}");
    page.rest().await
}

async fn first_gang(stage: &Stage, page: &mut Reader<'_>) -> Result<()> {
    page.run("kubectl apply -f first-gang.yaml").await?;
    drop(page.watch("kubectl get gangs -w", "Bound").await?);
    for rank in ["rank 0: GPU-", "rank 1: GPU-"] {
        stage.prints("kubectl logs -l job-name=first-gang", rank).await?;
    }
    page.shows("kubectl get gangs", &["first-gang", "100"]).await?;
    page.shows("gantry explain gang first-gang", &["100"]).await?;
    // Pods of the first one may still end.
    let waiting = "kubectl get pods -l job-name=first-gang --field-selector=status.phase=Pending -o jsonpath=\
                   '{range .items[*]}[{.spec.nodeName}]{end}'";
    stage.prints(waiting, &"[]".repeat(100)).await?;
    page.rest().await
}

async fn gangs(stage: &Stage, page: &mut Reader<'_>) -> Result<()> {
    let member = |rank: usize| {
        holder(&format!("tune-{rank}"), GPUS, "gantry.dev/gang: tune, gantry.dev/gang-min: \"2\"") + "\n---\n"
    };
    apply(stage, "default", &holder("other", 1, ""))?;
    stage.sh("kubectl wait --for=condition=Ready pod/other --timeout=90s")?;
    apply(stage, "default", &(0..2).map(member).collect::<String>())?;
    page.shows("kubectl get gangs", &["tune", "Queued", "InsufficientResources"]).await?;
    page.shows("kubectl get gang tune", &["needs 32 GPUs as 2x16; 31 are free"]).await?;
    Ok(())
}

async fn workload(stage: &Stage, page: &mut Reader<'_>) -> Result<()> {
    stage.start_controllers().await?;
    page.run("kubectl apply").await?;
    page.shows("kubectl get gangs", &["Bound"]).await?;
    Ok(())
}

async fn pending_pod(stage: &Stage, page: &mut Reader<'_>) -> Result<()> {
    for node in ["node-1", "node-2"] {
        apply(
            stage,
            "default",
            &format!("{}\n  nodeSelector: {{kubernetes.io/hostname: {node}}}", holder(node, 1, "")),
        )?;
    }
    stage.sh("kubectl wait --for=condition=Ready pod/node-1 pod/node-2 --timeout=90s")?;
    apply(stage, "default", &holder("stuck", GPUS, ""))?;
    page.shows("kubectl describe pod <pod>", &["15 of 16 GPUs free, 16 asked"]).await?;
    page.shows("gantry explain pod <pod>", &["15 of 16 GPUs free", "default/node-1"]).await?;
    page.shows("gantry doctor", &[]).await?;
    let mut explained = page.watch("gantry explain pod <pod> -w", "15 of 16 GPUs free").await?;
    stage.sh("kubectl delete pod node-1 --now")?;
    explained.until("NVSwitch").await?;
    Ok(())
}

async fn operate(stage: &Stage, page: &mut Reader<'_>) -> Result<()> {
    let uuid = stage.sh("kubectl get gpunode node-1 -o jsonpath='{.spec.machine.gpus[3].uuid}'")?;
    page.fill("<uuid>", uuid.trim());
    let template = container(GPUS).replace('\n', "\n      ");
    let job = format!(
        "apiVersion: batch/v1\nkind: Job\nmetadata:\n  name: train\nspec:\n  completions: 2\n  parallelism: 2\n  \
         completionMode: Indexed\n  template:\n    metadata:\n      annotations: {{gantry.dev/gang-min: all}}\n    \
         spec:\n      {template}"
    );
    apply(stage, "research", &job)?;
    stage.prints("kubectl -n research get gangs", "Bound").await?;
    let cordoned = page.shows("gantry cordon gpu node-1/3", &["the fan fails"]).await?;
    ensure!(cordoned.contains("holds it and goes on"), "{cordoned}");
    page.run("gantry uncordon").await?;
    page.run("kubectl annotate").await?;
    stage.prints("gantry map", "the fan fails").await?;
    page.run("kubectl annotate").await?;
    let drained = page.run("gantry drain").await?;
    let gang = drained.matches("of gang research/train").count();
    ensure!(gang == 2 && drained.contains("is drained: no pod holds it"), "{drained}");
    reset_of_a_board(stage).await?;
    let evidence = page.run("gantry evidence").await?;
    ensure!(evidence.contains("Xid 79") && evidence.contains("reset after a fault; once"), "{evidence}");
    page.run("kubectl create clusterrolebinding").await?;
    stage.prints("kubectl auth can-i list gpunodes --as=alice --as-group=gpu-operators", "yes").await?;
    page.run("kubectl -n gantry-system create role ").await?;
    page.run("kubectl -n gantry-system create rolebinding").await?;
    stage
        .prints("kubectl -n gantry-system auth can-i create pods --as=bob --as-group=gpu-resetters", "yes")
        .await?;
    stage.sh("gantry uncordon gpu node-1/3; kubectl delete clusterrolebinding gpu-operators")?;
    Ok(())
}

/// Resets GPU 3 of the first node, which is drained. Its GPUs are older than Ampere, and NVSwitches join them.
async fn reset_of_a_board(stage: &Stage) -> Result<()> {
    stage.hardware(0).controller().raise_xid(3, OFF_THE_BUS)?;
    stage.prints("gantry map", "Xid 79").await?;
    let refused = stage.sh("gantry reset gpu node-1/3 || true")?;
    let why = "is not cordoned, and the driver resets it together with GPU 3";
    ensure!(refused.contains(why), "{refused}");
    stage.sh("gantry cordon gpu node-1/{0..15}")?;
    let failed = stage.sh("gantry reset gpu node-1/3 || true")?;
    ensure!(failed.contains("cannot run nvidia-smi of the driver"), "{failed}");
    // A driver that has one.
    let node = &stage.cluster().nodes()[0];
    node.exec(&["mount", "-t", "tmpfs", "tmpfs", "/usr/local/sbin"]).await?;
    let smi = "printf '#!/bin/sh\\necho \"$@\"\\n' > /usr/local/sbin/nvidia-smi; chmod 755 /usr/local/sbin/nvidia-smi";
    node.exec(&["sh", "-c", smi]).await?;
    let reset = stage.sh("gantry reset gpu node-1/3 --uncordon")?;
    let with = reset.matches("is reset too").count();
    ensure!(with == GPUS - 1 && reset.matches("is healthy and uncordoned").count() == 1, "{reset}");
    ensure!(reset.matches("is healthy and stays cordoned").count() == GPUS - 1, "{reset}");
    stage.sh("gantry uncordon gpu node-1/{0..15}")?;
    stage.serves(&[("node-1", GPUS)]).await?;
    let pods = stage.sh("kubectl -n gantry-system get pods")?;
    ensure!(!pods.contains("gantry-reset"), "{pods}");
    Ok(())
}

/// An Xid after which a GPU is gone.
const OFF_THE_BUS: u64 = 79;

async fn unhealthy_gpu(stage: &Stage, page: &mut Reader<'_>) -> Result<()> {
    stage.hardware(0).controller().raise_xid(3, OFF_THE_BUS)?;
    page.shows("gantry map", &["node-1 GPU 3: Xid 79"]).await?;
    page.shows("kubectl describe node <node>", &["GpuUnhealthy", "Xid 79"]).await?;
    page.shows("kubectl get gpunode <node> -o yaml | gantry topo", &["Xid 79"]).await?;
    page.run("kubectl cordon").await?;
    // Until the Node shows the fault, its count of GPUs does not tell whether the quarantine was lifted.
    stage.serves(&[("node-1", GPUS - 1)]).await?;
    stage.sh("kubectl annotate gpunode node-1 gantry.dev/lift-quarantine=all")?;
    stage.serves(&[("node-1", GPUS)]).await?;
    let map = page.run("gantry map --node <node>").await?;
    ensure!(map.contains("node-1") && !map.contains("Xid 79"), "{map}");
    page.rest().await
}

async fn health(stage: &Stage, page: &mut Reader<'_>) -> Result<()> {
    stage.hardware(0).controller().raise_xid(5, OFF_THE_BUS)?;
    stage.serves(&[("node-1", GPUS - 1)]).await?;
    let uuid = stage.sh("kubectl get gpunode node-1 -o jsonpath='{.spec.machine.gpus[5].uuid}'")?;
    page.fill("<uuid>", uuid.trim());
    page.run("kubectl annotate").await?;
    stage.prints("kubectl get events --field-selector reason=GpuQuarantineLifted", uuid.trim()).await?;
    stage.serves(&[("node-1", GPUS)]).await
}

async fn runbooks_of_gangs(stage: &Stage, page: &mut Reader<'_>) -> Result<()> {
    stage.sh("kubectl apply -f manifests/samples/gang-pods.yaml")?;
    stage.prints("kubectl get gangs", "Bound").await?;
    page.fill("NAMESPACE", "default");
    page.fill("NAME", "pair");
    page.shows("kubectl get gangs", &["pair"]).await?;
    page.shows("kubectl describe gang", &["GangBound"]).await?;
    page.shows("gantry explain gang", &["pair"]).await?;
    page.rest().await?;
    stage.sh("kubectl delete --now -f manifests/samples/gang-pods.yaml")?;
    Ok(())
}

async fn runbooks_of_nodes(stage: &Stage, page: &mut Reader<'_>) -> Result<()> {
    let plugin = "kubectl -n gantry-system get pods -l app.kubernetes.io/name=gantry-plugin \
                  --field-selector spec.nodeName=node-1 -o jsonpath='{.items[0].metadata.name}'";
    let plugin = stage.sh(plugin)?;
    page.fill("NODE", "node-1");
    page.fill("POD", plugin.trim());
    page.shows("kubectl describe node", &["GPUHealthy"]).await?;
    page.shows("kubectl get gpunode", &["kind: GpuNode"]).await?;
    page.shows("gantry map", &["node-1"]).await?;
    page.shows("kubectl -n gantry-system get pods", &[plugin.trim()]).await?;
    // A job that a rule would make.
    stage.sh("kubectl -n gantry-system create job gantry-reset-1 --image=busybox:1.36 -- echo done")?;
    stage.sh("kubectl -n gantry-system wait job/gantry-reset-1 --for=condition=Complete --timeout=90s")?;
    page.fill("NAME", "gantry-reset-1");
    page.rest().await?;
    stage.sh("kubectl -n gantry-system delete job gantry-reset-1")?;
    Ok(())
}

async fn runbooks_of_pods(stage: &Stage, page: &mut Reader<'_>) -> Result<()> {
    apply(stage, "default", &holder("told", 1, ""))?;
    stage.sh("kubectl wait --for=condition=Ready pod/told --timeout=90s")?;
    page.fill("NAMESPACE", "default");
    page.fill("POD", "told");
    page.shows("kubectl describe pod", &["GpusAssigned"]).await?;
    page.shows("gantry explain pod", &["told"]).await?;
    stage.sh("kubectl delete pod told --now")?;
    Ok(())
}

async fn runbooks(stage: &Stage, page: &mut Reader<'_>) -> Result<()> {
    page.shows("kubectl -n gantry-system get pods", &["gantry-extender", "gantry-plugin"]).await?;
    page.shows("kubectl -n gantry-system get lease", &["holderIdentity"]).await?;
    page.shows("kubectl -n gantry-system logs", &["leads"]).await?;
    stage.sh("kubectl apply -f manifests/samples/gang-pods.yaml")?;
    stage.prints("kubectl get gangs", "Bound").await?;
    stage.sh("kubectl delete pod pair-1 --now")?;
    page.fill("NAMESPACE", "default");
    page.fill("NAME", "pair");
    page.shows("kubectl get gangs -A | grep Degraded", &["pair"]).await?;
    page.shows("kubectl describe gang NAME", &["Degraded"]).await?;
    page.shows("gantry explain gang NAME", &["pair"]).await?;
    page.rest().await
}

async fn upgrade(stage: &Stage, page: &mut Reader<'_>) -> Result<()> {
    page.shows("gantry doctor", &[]).await?;
    page.shows("gantry version", &[env!("CARGO_PKG_VERSION"), "on 2 node"]).await?;
    stage.serves(&[("node-1", GPUS), ("node-2", GPUS)]).await
}

/// The extender is ready with the rules that it has read.
async fn remediation(stage: &Stage, page: &mut Reader<'_>) -> Result<()> {
    page.run("helm upgrade").await?;
    stage.sh("kubectl -n gantry-system rollout status daemonset gantry-extender --timeout=90s")?;
    page.shows("kubectl -n gantry-system get podtemplate", &["registry.example/gantry"]).await?;
    let may = "kubectl -n gantry-system auth can-i create jobs --as=system:serviceaccount:gantry-system:gantry-extender";
    stage.prints(may, "yes").await?;
    page.rest().await
}

async fn mig_tenants(stage: &Stage, page: &mut Reader<'_>) -> Result<()> {
    stage.sh("kubectl label node node-2 gantry.dev/gpu=false --overwrite")?;
    let plugins =
        "kubectl -n gantry-system get daemonset gantry-plugin -o jsonpath='[{.status.numberReady}]'";
    stage.prints(plugins, "[1]").await?;
    let machine = gantry::machine_file("hgx-h100-mig");
    *stage.hardware(1) = Hardware::install(&stage.cluster().nodes()[1], &machine)?;
    stage.sh("kubectl label node node-2 gantry.dev/gpu-")?;
    page.run("helm upgrade").await?;
    let offered = "kubectl get node node-2 -o jsonpath='{.status.allocatable}'";
    stage.prints(offered, "nvidia.com/mig-1g.10gb").await?;
    page.run("gantry scheduler-config").await?;
    let config = page.file("kube-scheduler-config.yaml")?;
    ensure!(config.contains("nvidia.com/mig-1g.10gb"), "{config}");
    stage.call_extender(&config).await?;
    page.run("kubectl create namespace team-a").await?;
    page.run("kubectl apply -f quota.yaml").await?;
    let account = "kubectl -n team-a get serviceaccount default";
    stage.prints(account, "default").await?;
    page.shows("kubectl -n team-a logs small", &["MIG-"]).await?;
    page.shows("kubectl -n team-a describe quota", &["requests.nvidia.com/mig-1g.10gb"]).await?;
    stage.sh("kubectl -n team-a delete pods --all --now\nkubectl delete namespace team-a --wait=false")?;
    Ok(())
}

async fn uninstall(stage: &Stage, page: &mut Reader<'_>) -> Result<()> {
    // The first step is the operator's.
    stage.restore_scheduler().await?;
    page.run("helm upgrade").await?;
    apply(stage, "default", &holder("next", 2, ""))?;
    stage.sh("kubectl wait --for=condition=Ready pod/next --timeout=90s")?;
    page.run("helm uninstall").await?;
    page.rest().await?;
    let phase = stage.sh("kubectl get pod next -o jsonpath='{.status.phase}'")?;
    ensure!(phase == "Running", "the pod is {phase}");
    let left = remains(stage, &format!("{KINDS},crd,namespaces"))?;
    ensure!(left.is_empty(), "{left}");
    let labels = stage.sh("kubectl get nodes --show-labels")?;
    ensure!(!labels.contains("gantry.dev"), "{labels}");
    let conditions = stage.sh("kubectl get nodes -o jsonpath='{.items[*].status.conditions[*].type}'")?;
    ensure!(conditions.contains("Ready") && !conditions.contains("GPUHealthy"), "{conditions}");
    let annotations = stage.sh("kubectl get pods -A -o jsonpath='{.items[*].metadata.annotations}'")?;
    ensure!(!annotations.contains("gantry.dev/grant"), "{annotations}");
    Ok(())
}
