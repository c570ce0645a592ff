//! Parts of the cluster are killed, stopped, cut off and put back to an earlier state at random while jobs come and go.
//! What was seen meanwhile is a history, which [`history::judge`] judges afterwards.
//!
//! `GANTRY_STORM_SECONDS` is how long parts fail, and `GANTRY_STORM_SEED` repeats the choices of a run. What the cluster
//! makes of them depends on its timing too.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use gantry_api::names::{GANG_ANNOTATION, GANG_MIN_ANNOTATION};
use gantry_e2e::gantry::{EXTENDER, PLUGIN};
use gantry_e2e::history::{self, Fault, History, Look, Members};
use gantry_e2e::{Cluster, Daemon};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{ListParams, PostParams};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tokio::time::sleep;

use super::churn::nothing_is_left;
use crate::bed::Bed;
use crate::gangs::name_of;
use crate::{pods, records};

/// Seconds in which parts fail.
const SECONDS: u64 = 120;
/// How long the jobs may take after that. A controller waits for minutes before it makes a pod again that failed often.
const SETTLES: Duration = Duration::from_secs(900);
const BETWEEN_LOOKS: Duration = Duration::from_millis(500);
/// Where etcd keeps its data, in the folder of the control plane, and a copy of it.
const ETCD: &str = "etcd";
const BACKUP: &str = "etcd-backup";
const SCHEDULER: &str = "kube-scheduler";
const CONTROLLERS: &str = "kube-controller-manager";
const API_SERVER: &str = "kube-apiserver";

pub(super) async fn random_faults_leave_nothing_wrong(bed: &Bed) -> Result<()> {
    bed.gpus().await?;
    let seed: u64 =
        pods::number("GANTRY_STORM_SEED")?.unwrap_or_else(|| rand::rng().random_range(0..1_000_000));
    let lasts = Duration::from_secs(pods::number("GANTRY_STORM_SECONDS")?.unwrap_or(SECONDS));
    let pods = bed.namespace("e2e-storm").await?;
    let storm =
        Storm { bed, until: Instant::now() + lasts, jobs: Api::namespaced(bed.client(), "e2e-storm"), pods };
    let of = |part: u64| StdRng::seed_from_u64(seed.wrapping_mul(4) + part);
    // The looks go on after the last fault, until the jobs have ended.
    let broken = async {
        let (made, control, nodes) =
            tokio::join!(storm.make_jobs(of(0)), storm.break_control(of(1)), storm.break_nodes(of(2)));
        made?;
        let mut faults = control?;
        faults.extend(nodes?);
        faults.sort_by(|a, b| a.at.total_cmp(&b.at));
        bed.revive().await?;
        anyhow::Ok(faults)
    };
    let (faults, seen) = tokio::join!(broken, storm.look());
    let (looks, unfinished) = seen?;
    let stays = records::read(bed.cluster())?.into_values().collect();
    let history = History { seed, faults: faults?, looks, stays, unfinished };
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("storm.json");
    fs::write(&path, serde_json::to_vec_pretty(&history)?)?;
    let ran = history.stays.len();
    eprintln!(
        "seed {seed}: {} faults, {ran} containers, history in {}",
        history.faults.len(),
        path.display()
    );
    ensure!(!history.faults.is_empty() && ran > 0, "nothing happened");
    let wrong = history::judge(&history);
    ensure!(wrong.is_empty(), "seed {seed}, {}: {}", path.display(), wrong.join("\n"));
    bed.gpus().await?.wait_until_ready(bed.cluster()).await?;
    nothing_is_left(bed).await
}

/// Seconds of the machine's uptime, as containers write them down.
fn uptime() -> Result<f64> {
    let text = fs::read_to_string("/proc/uptime")?;
    let first = text.split(' ').next().unwrap_or_default();
    first.parse().with_context(|| format!("no time in /proc/uptime: {text}"))
}

/// Stops a program for a while.
async fn pause(daemon: &Daemon, time: Duration) -> Result<()> {
    let pid = Pid::from_raw(daemon.pid()).context("a program has a process")?;
    // It may have ended by itself.
    let _ = kill_process(pid, Signal::STOP);
    sleep(time).await;
    let _ = kill_process(pid, Signal::CONT);
    Ok(())
}

pub(super) async fn copy(from: &Path, to: &Path) -> Result<()> {
    if to.exists() {
        fs::remove_dir_all(to)?;
    }
    let status = tokio::process::Command::new("cp").arg("-a").args([from, to]).status().await?;
    ensure!(status.success(), "cannot copy {} to {}", from.display(), to.display());
    Ok(())
}

struct Storm<'a> {
    bed: &'a Bed,
    /// When the last part fails.
    until: Instant,
    jobs: Api<Job>,
    pods: Api<Pod>,
}

impl Storm<'_> {
    fn is_over(&self) -> bool {
        Instant::now() >= self.until
    }

    fn cluster(&self) -> &Cluster {
        self.bed.cluster()
    }

    /// Makes jobs, of which those with several members are gangs. While the API server is away none is made.
    async fn make_jobs(&self, mut random: StdRng) -> Result<()> {
        for number in 0.. {
            sleep(Duration::from_millis(random.random_range(500..4_000))).await;
            if self.is_over() {
                break;
            }
            let (members, gpus) = (random.random_range(1..=4_u32), [1, 1, 2, 4][random.random_range(0..4)]);
            let name = format!("s{number}");
            let pod = pods::sleeper(&name, gpus)?;
            let pod = records::recording(pod, f64::from(random.random_range(5..60_u32)) / 10.0)?;
            let annotations = match members {
                1 => json!({}),
                _ => json!({ GANG_ANNOTATION: name, GANG_MIN_ANNOTATION: members.to_string() }),
            };
            let job = serde_json::from_value(json!({
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": { "name": name },
                "spec": {
                    "completionMode": "Indexed",
                    "completions": members,
                    "parallelism": members,
                    "backoffLimit": 1000,
                    "template": { "metadata": { "annotations": annotations }, "spec": pod.spec },
                },
            }))?;
            let _ = self.jobs.create(&PostParams::default(), &job).await;
        }
        Ok(())
    }

    /// Breaks parts of the control plane, one after the other. Returns what it did.
    async fn break_control(&self, mut random: StdRng) -> Result<Vec<Fault>> {
        let control = self.cluster().control();
        let (data, backup) = (control.folder().join(ETCD), control.folder().join(BACKUP));
        let mut faults = Vec::new();
        while !self.is_over() {
            sleep(Duration::from_millis(random.random_range(500..6_000))).await;
            let at = uptime()?;
            let time = Duration::from_millis(random.random_range(0..8_000));
            let kill = async |name: &str| anyhow::Ok(self.cluster().program(name)?.kill().await?);
            let what = match random.random_range(0..9) {
                0 => kill(EXTENDER).await.map(|()| "the extender is killed".to_owned())?,
                1 => {
                    pause(&self.cluster().program(EXTENDER)?, time).await?;
                    format!("the extender stands still for {time:?}")
                }
                2 => kill(SCHEDULER).await.map(|()| "kube-scheduler is killed".to_owned())?,
                3 => kill(CONTROLLERS).await.map(|()| "kube-controller-manager is killed".to_owned())?,
                4 => {
                    kill(API_SERVER).await?;
                    sleep(time).await;
                    format!("the API server is away for {time:?}")
                }
                5 => {
                    pause(&self.cluster().program(API_SERVER)?, time).await?;
                    format!("the API server stands still for {time:?}")
                }
                6 => {
                    kill(ETCD).await?;
                    sleep(time / 2).await;
                    format!("etcd is away for {:?}", time / 2)
                }
                7 => {
                    kill(API_SERVER).await?;
                    kill(ETCD).await?;
                    copy(&data, &backup).await?;
                    "etcd is backed up".to_owned()
                }
                _ if !backup.exists() => continue,
                // The clients in the control plane start anew, as etcd's documentation advises. Gantry's daemons and kubelets
                // keep running.
                _ => {
                    for name in [API_SERVER, ETCD, SCHEDULER, CONTROLLERS] {
                        kill(name).await?;
                    }
                    copy(&backup, &data).await?;
                    "etcd is restored".to_owned()
                }
            };
            faults.push(Fault { at, what });
            self.bed.revive_control().await?;
        }
        if backup.exists() {
            fs::remove_dir_all(&backup)?;
        }
        Ok(faults)
    }

    /// Breaks parts of the nodes, one after the other. Returns what it did.
    async fn break_nodes(&self, mut random: StdRng) -> Result<Vec<Fault>> {
        let nodes = self.cluster().nodes();
        let mut faults = Vec::new();
        while !self.is_over() {
            sleep(Duration::from_millis(random.random_range(500..6_000))).await;
            let at = uptime()?;
            let node = &nodes[random.random_range(0..nodes.len())];
            let time = Duration::from_millis(random.random_range(0..10_000));
            let name = node.name();
            let what = match random.random_range(0..5) {
                0 => node.restart(PLUGIN).await.map(|_| "the plugin is killed".to_owned())?,
                1 => node.restart("kubelet").await.map(|_| "kubelet is killed".to_owned())?,
                2 => {
                    pause(&node.program(PLUGIN)?, time).await?;
                    format!("the plugin stands still for {time:?}")
                }
                3 => {
                    pause(&node.program("kubelet")?, time).await?;
                    format!("kubelet stands still for {time:?}")
                }
                _ => {
                    let link = ["ip", "link", "set", name];
                    self.cluster().control().exec(&[&link[..], &["down"]].concat()).await?;
                    sleep(time).await;
                    self.cluster().control().exec(&[&link[..], &["up"]].concat()).await?;
                    format!("the network is cut for {time:?}")
                }
            };
            faults.push(Fault { at, what: format!("{name}: {what}") });
        }
        Ok(faults)
    }

    /// Looks at the jobs until all have ended after the last fault, or too long. Returns the looks, and the jobs that have not
    /// ended.
    async fn look(&self) -> Result<(Vec<Look>, BTreeMap<String, String>)> {
        let mut looks = Vec::new();
        loop {
            sleep(BETWEEN_LOOKS).await;
            let late = self.until.elapsed() > SETTLES;
            let Ok((look, unfinished)) = self.glance().await else {
                ensure!(!late, "the API server does not answer");
                continue;
            };
            looks.push(look);
            if late || self.is_over() && unfinished.is_empty() {
                return Ok((looks, unfinished));
            }
        }
    }

    async fn glance(&self) -> Result<(Look, BTreeMap<String, String>)> {
        let all = ListParams::default();
        let (jobs, pods) = (self.jobs.list(&all).await?, self.pods.list(&all).await?);
        let mut look = Look { at: uptime()?, jobs: BTreeMap::new() };
        let mut unfinished = BTreeMap::new();
        for job in &jobs {
            let name = job.metadata.name.clone().unwrap_or_default();
            let prefix = format!("{name}-");
            let ours: Vec<&Pod> = pods.iter().filter(|pod| name_of(pod).starts_with(&prefix)).collect();
            let stays = |pod: &&&Pod| {
                pod.metadata.deletion_timestamp.is_none()
                    && !matches!(pods::phase(pod), "Succeeded" | "Failed")
            };
            let (bound, waiting): (Vec<&Pod>, Vec<&Pod>) =
                ours.iter().filter(stays).partition(|pod| !pods::node(pod).is_empty());
            let succeeded = ours.iter().filter(|pod| pods::phase(pod) == "Succeeded").count();
            let status = job.status.clone().unwrap_or_default();
            let counted = usize::try_from(status.succeeded.unwrap_or_default())?;
            let min = job.spec.as_ref().and_then(|spec| spec.completions).unwrap_or(1);
            let members = Members {
                min: usize::try_from(min)?,
                bound: bound.len(),
                done: succeeded.max(counted),
                waiting: waiting.len(),
            };
            let ended = status.conditions.iter().flatten();
            if !ended.into_iter().any(|is| is.type_ == "Complete" && is.status == "True") {
                let said: Vec<String> = waiting.iter().chain(&bound).map(|pod| pods::said(pod)).collect();
                unfinished.insert(name.clone(), format!("{members:?}: {}", said.join(" | ")));
            }
            look.jobs.insert(name, members);
        }
        Ok((look, unfinished))
    }
}
