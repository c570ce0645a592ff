//! Two clusters in memory, an extender on each, and the browser.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use futures::{StreamExt as _, TryStreamExt as _};
use gantry_api::{Gang, GpuNode, names};
use gantry_e2e::browser::Browser;
use gantry_e2e::gantry;
use gantry_sim_cluster::api::{ApiOptions, ApiServer};
use gantry_topology::Machine;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// A fault that is markup, on a GPU and in an annotation.
pub(crate) const FAULT: &str = "<img src=x onerror=\"window.hacked=1\"><script>window.hacked=1</script>";
/// The value of a label that is markup.
pub(crate) const RACK: &str = "<b onclick=window.hacked=1>";

/// Nodes of the small and the large cluster, and of one rack.
const SMALL: usize = 40;
const LARGE: usize = 5000;
const IN_RACK: usize = 50;
/// Longest time for an extender to serve and list.
const READY: Duration = Duration::from_secs(60);
/// Objects that are written at once.
const WRITES: usize = 32;

pub(crate) struct Bed {
    pub(crate) browser: Browser,
    small: Cluster,
    large: Large,
    pictures: PathBuf,
    folder: TempDir,
    runtime: Runtime,
}

/// The large cluster.
enum Large {
    /// It is being started, while the tests of the small one run.
    Starts(JoinHandle<Result<Cluster>>),
    Runs(Cluster),
    Failed,
}

/// An API server with an extender.
struct Cluster {
    client: Client,
    extender: Extender,
    stop: CancellationToken,
}

/// A running `gantry extender`.
pub(crate) struct Extender {
    /// The address of the verbs, and that of the page if it has one.
    verbs: String,
    page: Option<String>,
    child: Child,
}

impl Bed {
    /// Starts the small cluster and the browser.
    pub(crate) fn up(chromium: &Path) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let profile = folder.path().join("profile");
        std::fs::create_dir(&profile)?;
        let pictures = std::env::var_os("GANTRY_SCREENSHOTS").map_or_else(
            || {
                let own = std::env::current_exe().unwrap_or_default();
                own.ancestors().nth(3).unwrap_or(Path::new(".")).join("page-screenshots")
            },
            PathBuf::from,
        );
        std::fs::create_dir_all(&pictures).with_context(|| format!("creating {}", pictures.display()))?;
        let runtime = Runtime::new()?;
        let small = runtime.block_on(Cluster::start(folder.path().into(), "small", small_objects()?))?;
        let large = Cluster::start(folder.path().into(), "large", large_objects()?);
        let large = Large::Starts(runtime.spawn(large));
        let browser = Browser::start(chromium, &profile)?;
        Ok(Self { browser, small, large, pictures, folder, runtime })
    }

    /// Opens the page of the small cluster at a fragment, and waits for the map.
    pub(crate) fn open_small(&mut self, fragment: &str) -> Result<()> {
        self.browser.open(&self.small.extender.url(fragment)?)?;
        self.browser
            .wait("document.querySelector('#totals')?.textContent.startsWith('40 nodes')", READY)
            .map(drop)
    }

    /// The address of the page of the large cluster, once that runs.
    pub(crate) fn large_url(&mut self) -> Result<String> {
        if let Large::Starts(task) = &mut self.large {
            let started = self.runtime.block_on(task);
            self.large = Large::Failed;
            self.large = Large::Runs(started??);
        }
        self.large()?.extender.url("")
    }

    /// A further extender of the large cluster, with or without a page.
    pub(crate) fn extender_of_large(&mut self, has_page: bool) -> Result<Extender> {
        self.large_url()?;
        Extender::start(&self.folder.path().join("large.kubeconfig"), has_page)
    }

    fn large(&self) -> Result<&Cluster> {
        match &self.large {
            Large::Runs(cluster) => Ok(cluster),
            Large::Starts(_) | Large::Failed => bail!("the large cluster does not run"),
        }
    }

    /// A pod gets GPUs of a node of the small cluster.
    pub(crate) fn hold(&self, node: &str, pod: &str, gpus: &[usize]) -> Result<()> {
        self.runtime.block_on(self.small.hold(node, pod, gpus))
    }

    /// The same on the large one.
    pub(crate) fn hold_on_large(&self, node: &str, pod: &str, gpus: &[usize]) -> Result<()> {
        self.runtime.block_on(self.large()?.hold(node, pod, gpus))
    }

    /// An extender whose API server does not respond.
    pub(crate) fn cold_extender(&self) -> Result<Extender> {
        let silent = self.folder.path().join("silent.kubeconfig");
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "silent",
            "clusters": [{"name": "silent", "cluster": {"server": "http://127.0.0.1:9"}}],
            "users": [{"name": "anyone", "user": {}}],
            "contexts": [{"name": "silent", "context": {"cluster": "silent", "user": "anyone"}}],
        });
        std::fs::write(&silent, config.to_string())?;
        Extender::start(&silent, true)
    }

    pub(crate) fn screenshot(&mut self, name: &str) -> Result<()> {
        self.browser.screenshot(&self.pictures.join(format!("{name}.png")))
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.small.stop.cancel();
        match &self.large {
            Large::Starts(task) => task.abort(),
            Large::Runs(large) => large.stop.cancel(),
            Large::Failed => {}
        }
    }
}

/// What a cluster has.
#[derive(Default)]
struct Objects {
    nodes: Vec<Value>,
    gpu_nodes: Vec<Value>,
    pods: Vec<Value>,
    gangs: Vec<Value>,
}

impl Cluster {
    /// Writes the objects, then starts the extender and waits until it has listed them.
    async fn start(folder: PathBuf, name: &str, objects: Objects) -> Result<Self> {
        let begin = Instant::now();
        let nodes = objects.nodes.len();
        let stop = CancellationToken::new();
        let server = ApiServer::start(&ApiOptions::default(), stop.clone()).await?;
        let client = server.client()?;
        let kubeconfig = folder.join(format!("{name}.kubeconfig"));
        std::fs::write(&kubeconfig, server.kubeconfig())?;
        let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "research"}});
        let namespaces: Api<k8s_openapi::api::core::v1::Namespace> = Api::all(client.clone());
        namespaces.create(&PostParams::default(), &serde_json::from_value(namespace)?).await?;
        write::<Node>(Api::all(client.clone()), objects.nodes, false).await?;
        write::<GpuNode>(Api::all(client.clone()), objects.gpu_nodes, true).await?;
        write::<Pod>(Api::namespaced(client.clone(), "research"), objects.pods, true).await?;
        write::<Gang>(Api::namespaced(client.clone(), "research"), objects.gangs, true).await?;
        // It blocks until the extender serves.
        let extender = tokio::task::spawn_blocking(move || Extender::start(&kubeconfig, true)).await??;
        eprintln!("{nodes} nodes: cluster and extender after {:?}", begin.elapsed());
        Ok(Self { client, extender, stop })
    }

    /// A pod is bound, and the plugin reports it.
    async fn hold(&self, node: &str, pod: &str, gpus: &[usize]) -> Result<()> {
        let gpu_nodes: Api<GpuNode> = Api::all(self.client.clone());
        let object = gpu_nodes.get(node).await?;
        let status = serde_json::to_value(object.status.unwrap_or_default())?;
        let ids: Vec<Value> = gpus.iter().map(|gpu| status["devices"][*gpu]["id"].clone()).collect();
        let mut holders = status["holders"].as_array().cloned().unwrap_or_default();
        holders
            .push(json!({"namespace": "research", "pod": pod, "uid": null, "resource": names::GPU_RESOURCE,
            "devices": ids, "provenance": "PodResources", "state": "Live"}));
        write::<Pod>(
            Api::namespaced(self.client.clone(), "research"),
            vec![self::pod(pod, Some(node), gpus.len())],
            true,
        )
        .await?;
        let patch = Patch::Merge(json!({"status": {"holders": holders}}));
        gpu_nodes.patch_status(node, &PatchParams::default(), &patch).await?;
        Ok(())
    }
}

/// Creates objects, with their status where there is one.
async fn write<K>(api: Api<K>, objects: Vec<Value>, has_status: bool) -> Result<()>
where
    K: kube::Resource + Clone + std::fmt::Debug + serde::Serialize + serde::de::DeserializeOwned,
{
    let writes = objects.into_iter().map(|object| {
        let api = api.clone();
        async move {
            let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
            let status = object["status"].clone();
            api.create(&PostParams::default(), &serde_json::from_value(object)?).await?;
            if has_status && !status.is_null() {
                let patch = Patch::Merge(json!({"status": status}));
                api.patch_status(&name, &PatchParams::default(), &patch).await?;
            }
            Ok::<_, anyhow::Error>(())
        }
    });
    futures::stream::iter(writes).buffer_unordered(WRITES).try_collect().await
}

impl Extender {
    fn start(kubeconfig: &Path, has_page: bool) -> Result<Self> {
        let binary =
            gantry::binary().context("no gantry program; run cargo build first, or set GANTRY_BINARY")?;
        let mut child = Command::new(binary)
            .args(["--end-with-stdin", "extender", "--listen=127.0.0.1:0"])
            .args(has_page.then_some("--page-listen=127.0.0.1:0"))
            // 5,000 GpuNodes of HGX boards are more than the default.
            .args([
                "--object-memory=256",
                "--fabric=rack=example.com/rack",
                &format!("--kubeconfig={}", kubeconfig.display()),
            ])
            .env_remove("LOG_FORMAT")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        let log = child.stderr.take().context("no log")?;
        let (send, lines) = channel();
        // Read to its end, so that the daemon never waits for the pipe.
        thread::spawn(move || {
            for line in BufReader::new(log).lines().map_while(Result::ok) {
                let _ = send.send(line);
            }
        });
        let begin = Instant::now();
        let address = |line: &str| {
            let address = line.split("address=").nth(1)?.split_whitespace().next()?;
            Some(address.trim_matches('"').to_owned())
        };
        let (mut seen, mut verbs) = (Vec::new(), None);
        while let Ok(line) = lines.recv_timeout(READY.saturating_sub(begin.elapsed())) {
            if line.contains("gantry extender serves") {
                verbs = address(&line);
            }
            let page = address(&line).filter(|_| line.contains("the web page is served"));
            match verbs.clone() {
                Some(verbs) if page.is_some() || !has_page => return Ok(Self { verbs, page, child }),
                _ => seen.push(line),
            }
        }
        let _ = child.kill();
        bail!("the extender does not serve: {seen:#?}")
    }

    /// The address of the verbs.
    pub(crate) fn verbs(&self) -> &str {
        &self.verbs
    }

    /// The ID of its process.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// The address of its page at a fragment.
    pub(crate) fn url(&self, fragment: &str) -> Result<String> {
        let page = self.page.as_ref().context("it has no page")?;
        Ok(format!("http://{page}/{fragment}"))
    }
}

impl Drop for Extender {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn machine(name: &str) -> Result<Machine> {
    let path = gantry::machine_file(name);
    let text = std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    serde_saphyr::from_str(&text).map_err(|error| anyhow::anyhow!("{}: {error}", path.display()))
}

/// Four racks of ten nodes: most are free and alike, some are held, one has a fault, one waits for its plugin, one is
/// cordoned. The last rack is called by markup.
fn small_objects() -> Result<Objects> {
    let machine = machine("dgx1-v100")?;
    let mut objects = Objects::default();
    for number in 0..SMALL {
        let name = format!("node-{number:02}");
        let rack = if number / 10 == 3 { RACK.to_owned() } else { format!("r{}", number / 10) };
        objects.nodes.push(node(&name, &rack));
        objects.gpu_nodes.push(gpu_node(&name, &machine, &[]));
    }
    objects.nodes[12]["spec"] = json!({"unschedulable": true});
    objects.gpu_nodes[0] = gpu_node("node-00", &machine, &[("train-0", &[0, 1, 2, 3])]);
    let fault = |node: &mut Value, reason: &str| {
        node["status"]["devices"][5]["healthy"] = false.into();
        node["status"]["devices"][5]["reason"] = reason.into();
    };
    fault(&mut objects.gpu_nodes[5], "Xid 79: GPU has fallen off the bus");
    fault(&mut objects.gpu_nodes[39], FAULT);
    objects.gpu_nodes[15]["status"]["conditions"] = json!([{"type": "Ready", "status": "False", "reason": "NoDriver",
        "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}]);
    objects.pods.push(explained(
        pod("train-0", Some("node-00"), 4),
        "GPUs 0-3 of node-00: NVLink ring, 80 GB/s, the most that 4 GPUs of this machine reach",
    ));
    objects.pods.push(explained(pod("hostile", Some("node-39"), 1), FAULT));
    // A gang that does not fit.
    for member in 0..3 {
        let mut pod = pod(&format!("wide-{member}"), None, 128);
        pod["metadata"]["annotations"] =
            json!({names::GANG_ANNOTATION: "wide", names::GANG_MIN_ANNOTATION: "3"});
        objects.pods.push(pod);
    }
    Ok(objects)
}

/// A hundred racks. Every fourth node has a pod, on other GPUs than the one before it.
fn large_objects() -> Result<Objects> {
    let machine = machine("hgx-h100")?;
    let mut objects = Objects::default();
    for number in 0..LARGE {
        let name = format!("node-{number:04}");
        objects.nodes.push(node(&name, &format!("r{:02}", number / IN_RACK)));
        let held: Vec<usize> = (0..6).filter(|gpu| number % 4 == 0 && (number / 4) >> gpu & 1 == 1).collect();
        let pod = format!("pod-{number}");
        let mut gpu_node = gpu_node(&name, &machine, &[(&pod, &held)]);
        if number % 500 == 7 {
            gpu_node["status"]["devices"][7]["healthy"] = false.into();
            gpu_node["status"]["devices"][7]["reason"] = "Xid 94".into();
        }
        objects.gpu_nodes.push(gpu_node);
        if !held.is_empty() {
            objects.pods.push(self::pod(&pod, Some(&name), held.len()));
        }
    }
    // Their state does not matter.
    objects.pods.iter_mut().for_each(|pod| pod["status"] = Value::Null);
    Ok(objects)
}

fn node(name: &str, rack: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"example.com/rack": rack}}})
}

fn gpu_node(name: &str, machine: &Machine, holders: &[(&str, &[usize])]) -> Value {
    let id = |gpu: usize| machine.gpus()[gpu].uuid.as_ref().map(|uuid| uuid.as_str().to_owned());
    let devices: Vec<Value> = (0..machine.gpus().len())
        .map(|gpu| json!({"id": id(gpu), "resource": names::GPU_RESOURCE, "gpu": gpu, "healthy": true}))
        .collect();
    let holders: Vec<Value> = holders
        .iter()
        .filter(|(_, gpus)| !gpus.is_empty())
        .map(|(pod, gpus)| {
            let ids: Vec<_> = gpus.iter().map(|gpu| id(*gpu)).collect();
            json!({"namespace": "research", "pod": pod, "uid": null, "resource": names::GPU_RESOURCE, "devices": ids,
                "provenance": "PodResources", "state": "Live"})
        })
        .collect();
    json!({
        "apiVersion": "gantry.dev/v1alpha1", "kind": "GpuNode", "metadata": {"name": name},
        "spec": {"machine": machine}, "status": {"devices": devices, "holders": holders},
    })
}

pub(crate) fn pod(name: &str, node: Option<&str>, gpus: usize) -> Value {
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "research"},
        "spec": {"containers": [{"name": "main", "image": "x", "resources": {"limits": {names::GPU_RESOURCE: gpus.to_string()}}}]},
        "status": {"phase": if node.is_some() { "Running" } else { "Pending" }},
    });
    if let Some(node) = node {
        pod["spec"]["nodeName"] = node.into();
    }
    pod
}

fn explained(mut pod: Value, sentence: &str) -> Value {
    let placement = json!({"devices": [sentence], "compared": {"nodes": 1}});
    pod["metadata"]["annotations"] = json!({names::PLACEMENT_ANNOTATION: placement.to_string()});
    pod
}
