//! The image in use: a cluster whose plugin, kube-scheduler and extender are pods of the chart, in containerd, on
//! simulated GPUs. Each test continues where the one before it ended, so that they run in their order.
#![allow(clippy::print_stderr, reason = "a test program talks on the terminal")]

#[path = "e2e/pods.rs"]
#[allow(dead_code, reason = "shared with the scenarios, which use all of it")]
mod pods;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use gantry_api::names::{GPU_RESOURCE, GRANT_ANNOTATION};
use gantry_e2e::gantry::{EXTENDER, NAMESPACE, PLUGIN};
use gantry_e2e::hardware::Hardware;
use gantry_e2e::helm::{Helm, chart};
use gantry_e2e::{
    BUSYBOX_IMAGE, Cluster, ClusterOptions, NodeOptions, SCHEDULER_IMAGE, gantry, podresources, until,
};
use gantry_nvml_sim::control::Controller;
use k8s_openapi::api::core::v1::{ContainerStateTerminated, Node, Pod};
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};
use libtest_mimic::{Arguments, Failed, Trial};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(90);
/// How long a restart by kubelet may take, after a hang of five minutes too.
const RESTART_LIMIT: Duration = Duration::from_secs(480);
/// The user of `securityContext`, and of the image.
const USER: &str = "65532";

type Story = fn(&Bed) -> Result<()>;

/// Takes more than six minutes: it runs nightly, and if a filter names it.
const HANG: &str = "hanging_nvml_restarts_the_plugin";

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let unsupported = if arguments.list { None } else { gantry_e2e::supported().err() };
    if let Some(why) = &unsupported {
        eprintln!("tests of the image are skipped: {why}");
    }
    let bed = Arc::new(Mutex::new(None));
    let stories: [(&str, Story); 15] = [
        ("daemons_become_ready_as_pods", |bed| bed.on(become_ready(bed))),
        ("containers_have_no_more_than_they_need", |bed| bed.on(confined(bed))),
        ("gpu_pod_gets_its_grant", |bed| bed.on(granted(bed))),
        ("explain_asks_the_extender_in_its_pod", |bed| bed.on(explained(bed))),
        ("killed_plugin_comes_back_and_serves", |bed| bed.on(plugin_killed(bed))),
        ("overwritten_library_restarts_the_plugin", |bed| bed.on(library_overwritten(bed))),
        (HANG, |bed| bed.on(nvml_hangs(bed))),
        ("kubelet_restart_keeps_pods_and_devices", |bed| bed.on(kubelet_restarted(bed))),
        ("rollout_of_the_plugin_keeps_devices", |bed| bed.on(plugin_rolled_out(bed))),
        ("extender_over_its_memory_limit_restarts", |bed| bed.on(memory_exceeded(bed))),
        ("deleted_scheduler_pods_are_replaced", |bed| bed.on(scheduler_deleted(bed))),
        ("own_scheduler_runs_every_sample", |bed| bed.on(own_runs_samples(bed))),
        ("webhook_assigns_pods_of_labelled_namespaces", |bed| bed.on(webhook_assigns_pods(bed))),
        ("plugin_alone_runs_the_first_sample", |bed| bed.on(alone_runs_sample(bed))),
        ("clusters_scheduler_runs_every_sample", |bed| bed.on(existing_runs_samples(bed))),
    ];
    let is_filtered = arguments.filter.is_some();
    let trials = stories.map(|(name, story)| {
        let bed = Arc::clone(&bed);
        let test = move || {
            let mut place = bed.lock().unwrap_or_else(PoisonError::into_inner);
            let bed = match place.take() {
                Some(bed) => place.insert(bed),
                None => place.insert(Bed::up().map_err(|error| Failed::from(format!("{error:#}")))?),
            };
            let start = Instant::now();
            let outcome = story(bed);
            eprint!("{:.1} s, ", start.elapsed().as_secs_f64());
            outcome.map_err(|error| Failed::from(format!("{error:#}\n{}", bed.on(bed.state()))))
        };
        let waits = name == HANG && !is_filtered;
        let trial = Trial::test(name, test).with_ignored_flag(unsupported.is_some() || waits);
        if waits { trial.with_kind("nightly") } else { trial }
    });
    let conclusion = libtest_mimic::run(&arguments, trials.into());
    let bed = bed.lock().unwrap_or_else(PoisonError::into_inner).take();
    match bed.map_or(Ok(()), Bed::down) {
        Ok(()) => conclusion.exit_code(),
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// A cluster with the chart.
struct Bed {
    runtime: tokio::runtime::Runtime,
    cluster: Cluster,
    binary: PathBuf,
    hardware: Hardware,
}

impl Bed {
    fn up() -> Result<Self> {
        let runtime = tokio::runtime::Runtime::new()?;
        let binary = gantry::binary().context("no gantry beside this test: cargo build -p gantry")?;
        let (cluster, hardware) = runtime.block_on(async {
            let mut options = ClusterOptions::new(env!("CARGO_BIN_EXE_gantry-cluster"));
            options.folder = std::env::temp_dir().join("gantry-image");
            options.port = 16448;
            let labels = vec![("gantry.dev/gpu".to_owned(), "true".to_owned())];
            options.nodes = vec![NodeOptions { labels, ..NodeOptions::new("node-1") }];
            options.pods = Some(binary.clone());
            let cluster = Cluster::up(options).await?;
            let hardware = Hardware::install(&cluster.nodes()[0], &gantry::machine_file("dgx1-v100"))?;
            anyhow::Ok((cluster, hardware))
        })?;
        let bed = Self { runtime, cluster, binary, hardware };
        bed.upgrade(&["scheduler.mode=own"])?;
        Ok(bed)
    }

    /// Installs the release, or upgrades it to these values.
    fn upgrade(&self, values: &[&str]) -> Result<()> {
        let helm = Helm::locate_or_build(3)?;
        let (repository, tag) = SCHEDULER_IMAGE.rsplit_once(':').context("an image has a tag")?;
        let repository = format!("scheduler.own.image.repository={repository}");
        let tag = format!("scheduler.own.image.tag={tag}");
        let values = [&[repository.as_str(), &tag], values].concat();
        helm.upgrade(&self.cluster.kubeconfig(), &chart(), ("gantry", NAMESPACE), &values)?;
        Ok(())
    }

    /// Applies a sample in a namespace, with an image that is there, and deletes it when it has started: the number of
    /// devices that each of its pods was granted, in the order of their names.
    async fn sample(&self, namespace: &str, sample: &str, pods: usize) -> Result<Vec<usize>> {
        let path = gantry::manifests().join("samples").join(sample);
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let replaced = text
            .replace("busybox:1.36", BUSYBOX_IMAGE)
            .replace("nvidia/cuda:12.8.0-base-ubuntu24.04", BUSYBOX_IMAGE);
        self.cluster.kubectl_with_input(&["-n", namespace, "apply", "-f", "-"], &replaced).await?;
        let api = self.pods(namespace);
        let found = until(format!("the pods of {sample} started"), LIMIT, async || {
            let found = api.list(&ListParams::default()).await.map_err(|error| error.to_string())?.items;
            let has_started = |pod: &&Pod| matches!(pods::phase(pod), "Running" | "Succeeded");
            if found.len() == pods && found.iter().filter(has_started).count() == pods {
                return Ok(found);
            }
            Err(found
                .iter()
                .map(|pod| format!("{}: {}; ", pods::phase(pod), pods::said(pod)))
                .collect::<String>())
        })
        .await?;
        let has_grant =
            |pod: &Pod| pod.metadata.annotations.iter().flatten().any(|(key, _)| key == GRANT_ANNOTATION);
        let grants = found
            .iter()
            .map(|pod| if has_grant(pod) { pods::granted(pod).map(|devices| devices.len()) } else { Ok(0) });
        let grants = grants.collect::<Result<Vec<_>>>()?;
        self.cluster
            .kubectl_with_input(&["-n", namespace, "delete", "--now", "--wait", "-f", "-"], &replaced)
            .await?;
        until(format!("{sample} gone"), LIMIT, async || {
            let left = api.list(&ListParams::default()).await.map_err(|error| error.to_string())?.items;
            if left.is_empty() { Ok(()) } else { Err(format!("{} pods", left.len())) }
        })
        .await?;
        Ok(grants)
    }

    /// Waits until every check of `gantry doctor`, with further arguments, is `ok`.
    async fn healthy(&self, more: &[&str]) -> Result<()> {
        until("gantry doctor finds nothing to mend", LIMIT, async || {
            let (report, code) =
                self.cluster.doctor(&self.binary, more).map_err(|error| error.to_string())?;
            let checks = report["checks"].as_array().ok_or("no checks")?.iter();
            let others: Vec<&Value> = checks.filter(|check| check["outcome"] != "ok").collect();
            if others.is_empty() && code == Some(0) { Ok(()) } else { Err(format!("{others:#?}")) }
        })
        .await?;
        Ok(())
    }

    fn down(self) -> Result<()> {
        if std::env::var_os("GANTRY_E2E_KEEP").is_some() {
            eprintln!("cluster left up: KUBECONFIG={}", self.cluster.kubeconfig().display());
            return Ok(());
        }
        Ok(self.runtime.block_on(self.cluster.down())?)
    }

    fn on<T>(&self, story: impl Future<Output = T>) -> T {
        self.runtime.block_on(story)
    }

    fn pods(&self, namespace: &str) -> Api<Pod> {
        Api::namespaced(self.cluster.client(), namespace)
    }

    /// What an operator would look at after a failure.
    async fn state(&self) -> String {
        let mut text = String::new();
        for args in [
            &["get", "pods", "-A", "-o", "wide"][..],
            &["describe", "pods", "-n", NAMESPACE],
            &[
                "logs",
                "-n",
                NAMESPACE,
                "-l",
                "app.kubernetes.io/part-of=gantry",
                "--all-containers",
                "--tail=20",
            ],
        ] {
            text += &self.cluster.kubectl(args).await.unwrap_or_else(|error| error.to_string());
        }
        text
    }

    /// The daemon's pods that run and are not being deleted.
    async fn daemons(&self, name: &str) -> Result<Vec<Pod>> {
        let chosen = ListParams::default().labels(&format!("app.kubernetes.io/name={name}"));
        let pods = self.pods(NAMESPACE).list(&chosen).await?;
        Ok(pods.into_iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()).collect())
    }

    /// Waits until so many pods of a daemon are ready, and returns them.
    async fn ready(&self, name: &str, count: usize) -> Result<Vec<Pod>> {
        let ready = until(format!("{count} pods of {name} ready"), LIMIT, async || {
            let pods = self.daemons(name).await.map_err(|error| error.to_string())?;
            if pods.len() == count && pods.iter().all(is_ready) {
                return Ok(pods);
            }
            let statuses = pods.iter().filter_map(|pod| pod.status.as_ref());
            Err(format!("{:?}", statuses.map(|status| &status.container_statuses).collect::<Vec<_>>()))
        });
        Ok(ready.await?)
    }

    /// Waits until a container of a daemon was restarted since there were so many restarts, and returns how it ended.
    async fn restarted(&self, name: &str, container: &str, before: i32) -> Result<ContainerStateTerminated> {
        let ended = until(format!("{container} restarted"), RESTART_LIMIT, async || {
            let pods = self.daemons(name).await.map_err(|error| error.to_string())?;
            if restarts(&pods) <= before {
                return Err(format!("{} restarts", restarts(&pods)));
            }
            let statuses = pods.iter().filter_map(|pod| pod.status.as_ref()?.container_statuses.as_ref());
            let states = statuses.flatten().filter(|status| status.name == container);
            let mut ends = states.filter_map(|status| status.last_state.as_ref()?.terminated.clone());
            ends.next().ok_or_else(|| "another container was restarted".to_owned())
        });
        Ok(ended.await?)
    }

    /// Waits until a probe of the only pod of a daemon returns this code, with these words in its text.
    async fn probe(&self, name: &str, path: &str, code: u16, words: &str) -> Result<()> {
        let found = until(format!("{path} is {code} with {words:?}"), RESTART_LIMIT, async || {
            let pods = self.daemons(name).await.map_err(|error| error.to_string())?;
            let address = pods.first().and_then(|pod| pod.status.as_ref()?.pod_ip.clone());
            let address = address.ok_or("no address")?;
            let ask = format!(
                "exec 3<>/dev/tcp/{address}/9410; printf 'GET {path} HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3"
            );
            let text = self.cluster.nodes()[0].exec(&["bash", "-c", &ask]).await;
            let text = text.map_err(|error| error.to_string())?;
            let is_code = text.split(' ').nth(1) == Some(&code.to_string());
            if is_code && text.contains(words) { Ok(()) } else { Err(text) }
        });
        Ok(found.await?)
    }

    /// Waits until kubelet reports every GPU to the API server.
    async fn offered(&self, count: &str) -> Result<()> {
        let nodes: Api<Node> = Api::all(self.cluster.client());
        until(format!("{count} GPUs offered"), LIMIT, async || {
            let node = nodes.get("node-1").await.map_err(|error| error.to_string())?;
            let allocatable = node.status.and_then(|status| status.allocatable).unwrap_or_default();
            let offered = allocatable.get(GPU_RESOURCE).map_or("none", |quantity| quantity.0.as_str());
            // The API server keeps the number of a kubelet that is gone.
            let kubelets = podresources::allocatable(&self.cluster.nodes()[0], GPU_RESOURCE).await;
            let kubelets = kubelets.map_err(|error| error.to_string())?.len().to_string();
            if offered == count && kubelets == count {
                return Ok(());
            }
            Err(format!("{kubelets} with kubelet, {offered} in the API"))
        })
        .await?;
        Ok(())
    }

    /// Runs a pod with GPUs, and checks that its container has exactly its grant.
    async fn run(&self, name: &str, gpus: usize) -> Result<BTreeSet<String>> {
        let mut pod = pods::sleeper(name, gpus)?;
        if let Some(spec) = &mut pod.spec {
            spec.scheduler_name = Some("gantry".to_owned());
        }
        pods::run(&self.pods("default"), &pod).await?;
        let devices = self.devices(name).await?;
        ensure!(devices.len() == gpus, "{name} asked for {gpus} GPUs and has {devices:?}");
        Ok(devices)
    }

    /// The devices of a running pod: by its grant, its container and kubelet, which must agree.
    async fn devices(&self, name: &str) -> Result<BTreeSet<String>> {
        let pod = self.pods("default").get(name).await?;
        let granted = pods::granted(&pod)?;
        let seen = pods::seen(&self.cluster, &pod, "main").await?;
        ensure!(seen == granted, "{name} sees {seen:?}, and was granted {granted:?}");
        let held = pods::held(&self.cluster, &pod, "main").await?;
        ensure!(held == granted, "kubelet lists {held:?}, and {name} was granted {granted:?}");
        Ok(granted)
    }

    async fn delete(&self, name: &str) -> Result<()> {
        let api = self.pods("default");
        api.delete(name, &DeleteParams::default()).await?;
        until(format!("{name} gone"), LIMIT, async || {
            let found = api.get_opt(name).await.map_err(|error| error.to_string())?;
            found.map_or(Ok(()), |_| Err("it is still there".to_owned()))
        })
        .await?;
        Ok(())
    }
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// Restarts of all containers.
fn restarts(pods: &[Pod]) -> i32 {
    let statuses = pods.iter().filter_map(|pod| pod.status.as_ref()?.container_statuses.as_ref());
    statuses.flatten().map(|container| container.restart_count).sum()
}

fn names(pods: &[Pod]) -> Vec<&str> {
    pods.iter().filter_map(|pod| pod.metadata.name.as_deref()).collect()
}

/// The processes of the image's program with that subcommand, on this machine.
fn processes(subcommand: &str) -> Vec<PathBuf> {
    let line = format!("/usr/bin/gantry\0{subcommand}\0");
    let all = fs::read_dir("/proc").into_iter().flatten().flatten().map(|entry| entry.path());
    all.filter(|process| {
        fs::read_to_string(process.join("cmdline")).is_ok_and(|found| found.starts_with(&line))
    })
    .collect()
}

async fn become_ready(bed: &Bed) -> Result<()> {
    let plugins = bed.ready(PLUGIN, 1).await?;
    let schedulers = bed.ready(EXTENDER, 2).await?;
    bed.offered("8").await?;
    ensure!(restarts(&plugins) == 0, "the plugin was restarted");
    ensure!(processes("plugin").len() == 1 && processes("extender").len() == 2);
    let images: Vec<&str> = schedulers
        .iter()
        .flat_map(|pod| pod.spec.iter().flat_map(|spec| &spec.containers))
        .filter_map(|container| container.image.as_deref())
        .collect();
    ensure!(images.contains(&SCHEDULER_IMAGE) && images.iter().any(|image| image.starts_with("gantry:")));
    Ok(())
}

/// Read from the kernel: what the pods ask for is one thing, what they get is another.
async fn confined(_: &Bed) -> Result<()> {
    for (subcommand, user) in [("plugin", "0"), ("extender", USER)] {
        let found = processes(subcommand);
        ensure!(!found.is_empty(), "no {subcommand} runs");
        for process in found {
            let status = fs::read_to_string(process.join("status"))?;
            let fields: BTreeMap<&str, &str> =
                status.lines().filter_map(|line| line.split_once(":\t")).collect();
            let field = |name: &str| fields.get(name).copied().unwrap_or_default();
            ensure!(field("Uid").split('\t').all(|id| id == user), "{subcommand}: user {}", field("Uid"));
            for capabilities in ["CapEff", "CapPrm", "CapBnd"] {
                let value = field(capabilities);
                ensure!(
                    !value.is_empty() && value.bytes().all(|digit| digit == b'0'),
                    "{subcommand}: {value}"
                );
            }
            ensure!(field("NoNewPrivs") == "1" && field("Seccomp") == "2", "{subcommand}: {status}");
            let mounts = fs::read_to_string(process.join("mountinfo"))?;
            let root =
                mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>()).find(|line| line[4] == "/");
            let options = root.context("no root is mounted")?[5];
            ensure!(options.split(',').any(|option| option == "ro"), "{subcommand}: the root is {options}");
            for absent in ["bin/sh", "usr/bin/sh", "bin/busybox", "usr/bin/dash"] {
                ensure!(!process.join("root").join(absent).exists(), "{subcommand} has {absent}");
            }
        }
    }
    Ok(())
}

async fn granted(bed: &Bed) -> Result<()> {
    let first = bed.run("first", 2).await?;
    let second = bed.run("second", 4).await?;
    let both = first.iter().find(|device| second.contains(*device));
    ensure!(both.is_none(), "{both:?} is given to two pods");
    Ok(())
}

/// `gantry explain` asks the leader over a forwarded port. A user that may read, and may forward no ports there, gets the
/// same answer from the cluster.
async fn explained(bed: &Bed) -> Result<()> {
    let mut large = pods::sleeper("large", 8)?;
    if let Some(spec) = &mut large.spec {
        spec.scheduler_name = Some("gantry".to_owned());
    }
    bed.pods("default").create(&PostParams::default(), &large).await?;
    let admin = bed.cluster.kubeconfig();
    let asked = until("the extender explains the pod", LIMIT, async || {
        let before = answered(bed).await.map_err(|error| error.to_string())?;
        let asked = explain(bed, &admin, &[]).map_err(|error| error.to_string())?;
        // One pod of the scheduler leads, and the other one does not answer.
        let count = answered(bed).await.map_err(|error| error.to_string())? - before;
        if count == 1 { Ok(asked) } else { Err(format!("{count} answers to a question; {asked}")) }
    })
    .await?;
    ensure!(asked["nodes"][0]["lack"]["kind"] == "Devices", "{asked}");
    let before = answered(bed).await?;
    let read = explain(bed, &admin, &["--read-cluster"])?;
    ensure!(read == asked, "the cluster says {read}, and the extender {asked}");
    bed.cluster
        .kubectl(&["create", "clusterrole", "reader", "--verb=get,list,watch", "--resource=*.*"])
        .await?;
    bed.cluster
        .kubectl(&["create", "clusterrolebinding", "reader", "--clusterrole=reader", "--user=reader"])
        .await?;
    let reader = std::env::temp_dir().join("gantry-image-reader");
    let mut config: Value = serde_saphyr::from_str(&fs::read_to_string(&admin)?)?;
    config["users"][0]["user"]["as"] = "reader".into();
    fs::write(&reader, config.to_string())?;
    let read = until("a reader gets an answer", LIMIT, async || {
        explain(bed, &reader, &[]).map_err(|error| error.to_string())
    })
    .await?;
    ensure!(read == asked && answered(bed).await? == before, "{read}");
    bed.delete("large").await
}

/// What `gantry explain` prints of the pod `large`, and nothing on standard error.
fn explain(bed: &Bed, kubeconfig: &Path, more: &[&str]) -> Result<Value> {
    let mut command = std::process::Command::new(&bed.binary);
    command.args(["explain", "pod", "large", "-n", "default", "-o", "json"]).args(more);
    let output = command.arg("--kubeconfig").arg(kubeconfig).output()?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success() && errors.is_empty(), "{}: {errors}", output.status);
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Questions that the extenders have answered.
async fn answered(bed: &Bed) -> Result<u64> {
    let mut count = 0;
    for pod in bed.daemons(EXTENDER).await? {
        let address = pod.status.and_then(|status| status.pod_ip).context("no address")?;
        let url = format!("http://{address}:8011/metrics");
        let page = bed.cluster.nodes()[0].exec(&["busybox", "wget", "-q", "-O", "-", &url]).await?;
        let mut lines = page.lines();
        let series = "gantry_extender_explain_requests_total{code=\"200\"} ";
        count += lines.find_map(|line| line.strip_prefix(series)?.parse().ok()).unwrap_or(0);
    }
    Ok(count)
}

async fn plugin_killed(bed: &Bed) -> Result<()> {
    let before = restarts(&bed.daemons(PLUGIN).await?);
    let [process] = &processes("plugin")[..] else { anyhow::bail!("there is not one plugin") };
    let pid = process.file_name().and_then(|name| name.to_str()?.parse().ok()).and_then(Pid::from_raw);
    kill_process(pid.context("no process id")?, Signal::KILL)?;
    until("the plugin restarted", LIMIT, async || {
        let pods = bed.daemons(PLUGIN).await.map_err(|error| error.to_string())?;
        let now = restarts(&pods);
        if now == before + 1 && pods.iter().all(is_ready) { Ok(()) } else { Err(format!("{now} restarts")) }
    })
    .await?;
    bed.offered("8").await?;
    bed.run("after-kill", 1).await?;
    // Another pod of the DaemonSet takes over as well.
    let old = bed.daemons(PLUGIN).await?;
    bed.pods(NAMESPACE).delete(names(&old)[0], &DeleteParams::default()).await?;
    until("another pod of the plugin", LIMIT, async || {
        let now = bed.daemons(PLUGIN).await.map_err(|error| error.to_string())?;
        let is_new = names(&now) != names(&old) && now.len() == 1 && is_ready(&now[0]);
        if is_new { Ok(()) } else { Err(format!("{:?}", names(&now))) }
    })
    .await?;
    bed.offered("8").await?;
    bed.run("after-delete", 1).await?;
    bed.delete("after-kill").await?;
    bed.delete("after-delete").await
}

/// A program writes into NVML's library while the plugin runs, as `cp` and `rsync --inplace` do, and is slow about it.
async fn library_overwritten(bed: &Bed) -> Result<()> {
    let devices = bed.devices("first").await?;
    let before = bed.daemons(PLUGIN).await?;
    let library = bed.hardware.folder().join(gantry_nvml_sim::LIBRARY_NAME);
    let whole = fs::read(&library)?;
    let (begin, rest) = whole.split_at(8192);
    fs::write(&library, begin)?;
    let outcome = async {
        let ended = bed.restarted(PLUGIN, "plugin", restarts(&before)).await?;
        ensure!(ended.exit_code == 135, "{ended:?}");
        bed.probe(PLUGIN, "/readyz", 503, "the file is incomplete").await?;
        ensure!(bed.devices("first").await? == devices, "a running pod lost its devices");
        anyhow::Ok(())
    }
    .await;
    OpenOptions::new().append(true).open(&library)?.write_all(rest)?;
    outcome?;
    bed.probe(PLUGIN, "/readyz", 200, "").await?;
    let after = bed.ready(PLUGIN, 1).await?;
    ensure!(names(&before) == names(&after), "the pod was replaced");
    bed.offered("8").await?;
    bed.run("after-overwrite", 2).await?;
    bed.delete("after-overwrite").await
}

/// A call of NVML does not return. kubelet restarts the container when the liveness probe has failed for a minute.
async fn nvml_hangs(bed: &Bed) -> Result<()> {
    const CALL: &str = "nvmlEventSetWait_v2";
    let before = bed.ready(PLUGIN, 1).await?;
    let driver = Controller::attach(bed.hardware.folder())?;
    driver.hang_call(CALL)?;
    let start = Instant::now();
    let outcome = async {
        bed.probe(PLUGIN, "/readyz", 503, "NVML hangs").await?;
        bed.probe(PLUGIN, "/healthz", 503, "").await?;
        let given_up = start.elapsed();
        let ended = bed.restarted(PLUGIN, "plugin", restarts(&before)).await?;
        ensure!(given_up >= Duration::from_secs(300), "given up after {given_up:?}, ended {ended:?}");
        anyhow::Ok(())
    }
    .await;
    driver.clear_rule(CALL)?;
    outcome?;
    bed.probe(PLUGIN, "/readyz", 200, "").await?;
    bed.ready(PLUGIN, 1).await?;
    bed.offered("8").await?;
    bed.run("after-hang", 2).await?;
    bed.delete("after-hang").await
}

/// A new template of the DaemonSet replaces the pod of the plugin.
async fn plugin_rolled_out(bed: &Bed) -> Result<()> {
    let devices = bed.devices("first").await?;
    let before = bed.daemons(PLUGIN).await?;
    bed.upgrade(&["scheduler.mode=own", "plugin.podAnnotations.rollout=another"])?;
    until("another pod of the plugin", LIMIT, async || {
        let now = bed.daemons(PLUGIN).await.map_err(|error| error.to_string())?;
        let is_new = now.len() == 1 && names(&now) != names(&before) && is_ready(&now[0]);
        if is_new { Ok(()) } else { Err(format!("{:?}", names(&now))) }
    })
    .await?;
    // 10 % of one node is one node: the DaemonSet waits for no other pod.
    let strategy = ["-n", NAMESPACE, "get", "daemonset", PLUGIN, "-o", "jsonpath={.spec.updateStrategy}"];
    let strategy: Value = serde_json::from_str(&bed.cluster.kubectl(&strategy).await?)?;
    ensure!(strategy["rollingUpdate"]["maxUnavailable"] == "10%", "{strategy}");
    bed.offered("8").await?;
    ensure!(bed.devices("first").await? == devices, "a running pod lost its devices");
    bed.run("after-rollout", 2).await?;
    bed.delete("after-rollout").await
}

/// Requests that wait for their last byte take more memory than the extender may have.
async fn memory_exceeded(bed: &Bed) -> Result<()> {
    const MEMORY: &str = "24Mi";
    // Below --body-limit, and so many as the extender reads at once.
    const BODY: usize = 15 * 1024 * 1024;
    const REQUESTS: usize = 2;
    let before = bed.ready(EXTENDER, 2).await?;
    let pod = names(&before)[0];
    let uid = before[0].metadata.uid.as_deref().context("a UID")?;
    let resources = json!({ "requests": { "memory": MEMORY }, "limits": { "memory": MEMORY } });
    let patch =
        json!({ "spec": { "containers": [{ "name": "extender", "resources": resources }] } }).to_string();
    bed.cluster
        .kubectl(&["-n", NAMESPACE, "patch", "pod", pod, "--subresource=resize", "-p", &patch])
        .await?;
    let (groups, process) = processes("extender")
        .into_iter()
        .filter_map(|process| Some((fs::read_to_string(process.join("cgroup")).ok()?, process)))
        .find(|(groups, _)| groups.contains(uid))
        .context("no extender of the pod")?;
    let group = groups.lines().find_map(|line| line.split_once(":memory:")).context("no group of memory")?.1;
    let limit = format!("/sys/fs/cgroup/memory{group}/memory.limit_in_bytes");
    until("kubelet applies the limit", RESTART_LIMIT, async || {
        let limit = fs::read_to_string(&limit).map_err(|error| error.to_string())?;
        if limit.trim() == (24 << 20).to_string() { Ok(()) } else { Err(limit) }
    })
    .await?;

    let pid = process.file_name().and_then(|name| name.to_str()).context("a process ID")?;
    let head = format!(
        "POST /filter HTTP/1.1\\r\\nHost: e\\r\\nContent-Type: application/json\\r\\nContent-Length: {BODY}"
    );
    let send = format!(
        "exec 3<>/dev/tcp/127.0.0.1/8010; printf '{head}\\r\\n\\r\\n' >&3; head -c {} /dev/zero >&3; cat <&3",
        BODY - 1
    );
    let mut clients = Vec::new();
    for _ in 0..REQUESTS {
        let mut client = tokio::process::Command::new("nsenter");
        client
            .args(["--target", pid, "--net", "--", "bash", "-c", &send])
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        clients.push(client.kill_on_drop(true).spawn()?);
    }
    let ended = bed.restarted(EXTENDER, "extender", restarts(&before)).await?;
    ensure!(ended.reason.as_deref() == Some("OOMKilled") && ended.exit_code == 137, "{ended:?}");
    drop(clients);
    let after = bed.ready(EXTENDER, 2).await?;
    ensure!(names(&after) == names(&before), "a pod was replaced");
    bed.run("after-memory", 2).await?;
    bed.delete("after-memory").await
}

async fn kubelet_restarted(bed: &Bed) -> Result<()> {
    let devices = bed.devices("first").await?;
    let (plugins, extenders) = (bed.daemons(PLUGIN).await?, bed.daemons(EXTENDER).await?);
    bed.cluster.nodes()[0].restart("kubelet").await?;
    bed.cluster.wait_until_ready().await?;
    bed.offered("8").await?;
    until("the devices of a running pod", LIMIT, async || {
        let now = bed.devices("first").await.map_err(|error| format!("{error:#}"))?;
        if now == devices { Ok(()) } else { Err(format!("{now:?}, before {devices:?}")) }
    })
    .await?;
    let now = (bed.ready(PLUGIN, 1).await?, bed.ready(EXTENDER, 2).await?);
    ensure!(
        names(&now.0) == names(&plugins) && names(&now.1) == names(&extenders),
        "a daemon's pod was replaced"
    );
    ensure!(restarts(&now.0) == restarts(&plugins), "the plugin was restarted");
    bed.run("after-kubelet", 2).await?;
    bed.delete("after-kubelet").await
}

/// The samples of manifests/samples that one node of eight GPUs can run, with their pods and the sizes of their grants.
const SAMPLES: [(&str, &[usize]); 5] = [
    ("two-gpus.yaml", &[2]),
    ("nvlink-pair.yaml", &[2]),
    ("init-and-sidecar.yaml", &[3]),
    ("whole-machine.yaml", &[8]),
    ("gang-pods.yaml", &[1, 1]),
];

/// A namespace whose pods the chart's scheduler gets, if that shape is there.
const ASSIGNED: &str = "assigned";

/// Without labels of GPUs `gantry doctor` would warn.
const LABELS: &str = "plugin.labels=node";

async fn own_runs_samples(bed: &Bed) -> Result<()> {
    for pod in ["first", "second"] {
        bed.delete(pod).await?;
    }
    bed.upgrade(&["scheduler.mode=own", "scheduler.own.assign.enabled=true", LABELS])?;
    assigned_namespace(bed, ASSIGNED).await?;
    bed.ready(PLUGIN, 1).await?;
    bed.ready(EXTENDER, 2).await?;
    bed.offered("8").await?;
    for (sample, expected) in SAMPLES {
        let grants = bed.sample(ASSIGNED, sample, expected.len()).await?;
        ensure!(grants == expected, "{sample}: {grants:?}");
    }
    bed.healthy(&[]).await
}

/// Creates a namespace with the label by which the policy and the webhook choose it, and with the one that `gantry doctor`
/// looks for.
async fn assigned_namespace(bed: &Bed, name: &str) -> Result<()> {
    bed.cluster.kubectl(&["create", "namespace", name]).await?;
    let labels = ["gantry.dev/scheduler=true", "gantry.dev/metrics=true"];
    bed.cluster.kubectl(&["label", "namespace", name, labels[0], labels[1]]).await?;
    until("service account", LIMIT, async || {
        bed.cluster.kubectl(&["-n", name, "get", "serviceaccount", "default"]).await
    })
    .await?;
    Ok(())
}

/// The webhook in place of the policy: the extenders set the scheduler of new pods that ask for GPUs, in namespaces with the
/// label. While none answers, pods go to the cluster's scheduler.
async fn webhook_assigns_pods(bed: &Bed) -> Result<()> {
    const WATCHED: &str = "webhook";
    bed.upgrade(&["scheduler.mode=own", "scheduler.webhook.enabled=true", LABELS])?;
    assigned_namespace(bed, WATCHED).await?;
    bed.ready(PLUGIN, 1).await?;
    let rolled_out =
        ["-n", NAMESPACE, "rollout", "status", "deployment", "gantry-scheduler", "--timeout=90s"];
    bed.cluster.kubectl(&rolled_out).await?;
    bed.ready(EXTENDER, 2).await?;
    bed.offered("8").await?;
    let scheduler = async |namespace: &str, name: &str, gpus: usize| -> Result<String> {
        let pod = bed.pods(namespace).create(&PostParams::default(), &pods::sleeper(name, gpus)?).await?;
        pod.spec.and_then(|spec| spec.scheduler_name).context("the API server names a scheduler")
    };
    let delete = async |namespace: &str, name: &str| {
        bed.cluster.kubectl(&["-n", namespace, "delete", "pod", name, "--now"]).await
    };
    // The API server takes a moment to read configuration and endpoints.
    until("the webhook assigns a pod", LIMIT, async || {
        let named = scheduler(WATCHED, "first", 1).await.map_err(|error| format!("{error:#}"))?;
        if named == "gantry" {
            return Ok(());
        }
        delete(WATCHED, "first").await.map_err(|error| error.to_string())?;
        Err(named)
    })
    .await?;
    let assigned = pods::running(&bed.pods(WATCHED), "first").await?;
    ensure!(pods::granted(&assigned)?.len() == 1, "{assigned:#?}");
    ensure!(scheduler(WATCHED, "cpu", 0).await? == "default-scheduler", "a pod without GPUs is assigned");
    ensure!(scheduler("default", "other", 1).await? == "default-scheduler", "its namespace has no label");
    let other = pods::running(&bed.pods("default"), "other").await?;
    ensure!(other.metadata.annotations.iter().flatten().all(|(key, _)| key != GRANT_ANNOTATION));
    bed.healthy(&[]).await?;

    // The certificate and its authority are those of before, also after an upgrade.
    let secret = ["-n", NAMESPACE, "get", "secret", "gantry-webhook-tls", "-o", "jsonpath={.data}"];
    let before = bed.cluster.kubectl(&secret).await?;
    bed.upgrade(&["scheduler.mode=own", "scheduler.webhook.enabled=true", LABELS, "extender.policy=pack"])?;
    ensure!(!before.is_empty() && bed.cluster.kubectl(&secret).await? == before, "another certificate");

    bed.cluster
        .kubectl(&["-n", NAMESPACE, "scale", "deployment", "gantry-scheduler", "--replicas=0"])
        .await?;
    // Also those that end: the API server keeps a connection, on which these still answer.
    let label = format!("app.kubernetes.io/name={EXTENDER}");
    let gone = ["-n", NAMESPACE, "wait", "--for=delete", "pod", "-l", &label, "--timeout=90s"];
    bed.cluster.kubectl(&gone).await?;
    let report = until("doctor reports the webhook", LIMIT, async || {
        let (report, _) = bed.cluster.doctor(&bed.binary, &[]).map_err(|error| error.to_string())?;
        let mut checks = report["checks"].as_array().into_iter().flatten();
        let found = checks.find(|check| check["check"] == "webhook").cloned().unwrap_or_default();
        if found["outcome"] == "failed" { Ok(found) } else { Err(found.to_string()) }
    })
    .await?;
    ensure!(report["message"].to_string().contains("no ready endpoint"), "{report}");
    ensure!(scheduler(WATCHED, "ignored", 1).await? == "default-scheduler", "an extender is left");
    pods::running(&bed.pods(WATCHED), "ignored").await?;
    for (namespace, name) in
        [(WATCHED, "first"), (WATCHED, "cpu"), (WATCHED, "ignored"), ("default", "other")]
    {
        delete(namespace, name).await?;
    }
    Ok(())
}

/// Without an extender kubelet chooses, by the preference of the plugin.
async fn alone_runs_sample(bed: &Bed) -> Result<()> {
    bed.upgrade(&["scheduler.mode=none", LABELS])?;
    bed.ready(PLUGIN, 1).await?;
    bed.ready(EXTENDER, 0).await?;
    bed.offered("8").await?;
    let grants = bed.sample("default", "two-gpus.yaml", 1).await?;
    ensure!(grants == [0], "{grants:?}");
    bed.healthy(&[]).await
}

async fn existing_runs_samples(bed: &Bed) -> Result<()> {
    bed.cluster.kubectl(&["label", "node", "node-1", "node-role.kubernetes.io/control-plane="]).await?;
    bed.upgrade(&["scheduler.mode=existing", LABELS])?;
    bed.ready(PLUGIN, 1).await?;
    bed.ready(EXTENDER, 1).await?;
    bed.offered("8").await?;
    let kubeconfig = format!("--kubeconfig={}", bed.cluster.kubeconfig().display());
    let output = std::process::Command::new(&bed.binary).args(["scheduler-config", &kubeconfig]).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let config = String::from_utf8(output.stdout)?;
    let scheduler = bed.cluster.move_scheduler(&bed.cluster.nodes()[0], &config).await?;
    for (sample, expected) in SAMPLES {
        let grants = bed.sample("default", sample, expected.len()).await?;
        ensure!(grants == expected, "{sample}: {grants:?}");
    }
    scheduler.check()?;
    // The configuration is a file of the node, which the cluster does not show.
    let file = tempfile::NamedTempFile::new()?;
    fs::write(file.path(), &config)?;
    bed.healthy(&["--scheduler-config", &file.path().display().to_string()]).await
}

async fn scheduler_deleted(bed: &Bed) -> Result<()> {
    let old = bed.daemons(EXTENDER).await?;
    for name in names(&old) {
        bed.pods(NAMESPACE).delete(name, &DeleteParams::default()).await?;
    }
    bed.ready(EXTENDER, 2).await?;
    bed.run("after-scheduler", 2).await?;
    bed.delete("after-scheduler").await
}
