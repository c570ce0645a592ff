//! The shell of the extender in simulation: two whole daemons (Lease, watches, bind, writers, HTTP server and client), an API server,
//! a scheduler that calls them as kube-scheduler does, kubelets, and jobs that come and go. All of it runs in one thread
//! on a paused clock, which advances when nothing else is to be done, so that minutes take seconds. Faults are below
//! HTTP: connections that end in the middle of a message, bytes that arrive late or not at all, replicas that are killed.
//! While faults happen nothing may be wrong; afterwards every job runs to its end, and no device is lost.
//!
//! `GANTRY_SCHEDULES=100` runs more, `GANTRY_FIRST=500` others, `GANTRY_SEED=7` one. A seed determines what happens to the network, the replicas and
//! the jobs; the scheduler's choice among equal nodes and the jitter of back-offs differ from run to run.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, missing_docs)]

mod cluster;
#[path = "../schedules/dice.rs"]
mod dice;
mod net;
mod process;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cluster::{Cluster, GPU, GPUS};
use dice::Dice;
use gantry_api::names;
use gantry_sim_cluster::api::{ApiOptions, ApiServer};
use gantry_sim_cluster::scheduler::{self, ExtenderConfig, ManagedResource};
use kube::ResourceExt as _;
use kube::api::{DeleteParams, PostParams};
use net::Link;
use process::{Endpoint, Process};
use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

const NODES: usize = 3;
const JOBS: u32 = 16;
/// How long faults happen.
const FAULTS: Duration = Duration::from_secs(120);
/// After the last fault, all jobs have ended by then.
const CALM: Duration = Duration::from_secs(900);
const SCHEDULES: u64 = 4;
/// After a longer silence the bytes that waited are lost: a Binding that is carried out later than this may name devices that were granted
/// again, which is accepted (`../schedules/README.md`, "Guaranteed by time only").
const LATEST: Duration = Duration::from_secs(3);

/// What is done to the extenders.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    Kill,
    Stop,
    CutFromApi,
    CutFromScheduler,
    SilentApi,
    SilentScheduler,
    SlowApi,
}

const ALL: [Fault; 7] = [
    Fault::Kill,
    Fault::Stop,
    Fault::CutFromApi,
    Fault::CutFromScheduler,
    Fault::SilentApi,
    Fault::SilentScheduler,
    Fault::SlowApi,
];

#[test]
fn jobs_run_and_nothing_is_granted_twice_whatever_fails() {
    let number = |name| std::env::var(name).ok().map(|text: String| text.parse::<u64>().unwrap());
    let seed = number("GANTRY_SEED");
    let first = seed.or_else(|| number("GANTRY_FIRST")).unwrap_or(0);
    let end = first + if seed.is_some() { 1 } else { number("GANTRY_SCHEDULES").unwrap_or(SCHEDULES) };
    let next = AtomicU64::new(first);
    let work = || {
        let mut happened = BTreeMap::new();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= end {
                return happened;
            }
            for (fault, times) in schedule(seed) {
                *happened.entry(fault).or_insert(0) += times;
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let happened = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let mut all = BTreeMap::new();
        for worker in workers {
            for (fault, times) in worker.join().unwrap() {
                *all.entry(fault).or_insert(0) += times;
            }
        }
        all
    });
    eprintln!("{happened:?}");
    if seed.is_none() {
        let missing: Vec<Fault> = ALL.into_iter().filter(|fault| !happened.contains_key(fault)).collect();
        assert!(missing.is_empty(), "these never happened: {missing:?}");
    }
}

/// Runs one schedule, and returns how often each fault happened.
fn schedule(seed: u64) -> BTreeMap<Fault, u32> {
    let began = std::time::Instant::now();
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    let (happened, lasted) = runtime.block_on(async {
        let start = Instant::now();
        (play(seed).await, start.elapsed())
    });
    eprintln!("seed {seed}: {} s in {:.1} s", lasted.as_secs(), began.elapsed().as_secs_f64());
    happened
}

async fn play(seed: u64) -> BTreeMap<Fault, u32> {
    let mut dice = Dice::new(seed);
    let stop = CancellationToken::new();
    let _stopped = stop.clone().drop_guard();
    let api = Arc::new(ApiServer::start(&ApiOptions::default(), stop.clone()).await.unwrap());
    let sound = process::client(&api, &Link::sound());
    let cluster = Arc::new(Cluster::start(sound.clone(), NODES, dice.next()).await);
    let endpoint = Endpoint::default();
    tokio::spawn(scheduler::run_over(endpoint.connector(), sound, extender_entry(), stop.clone()));

    let mut jobs = JoinSet::new();
    for number in 0..JOBS {
        for job in Job::draw(number, &mut dice).parts() {
            jobs.spawn(run(Arc::clone(&cluster), job, dice.next()));
        }
    }
    let happened = Replicas::new(&api, &endpoint, seed).suffer(&mut dice, &cluster).await;
    let rest =
        tokio::time::timeout(CALM, async { while jobs.join_next().await.transpose().unwrap().is_some() {} });
    assert!(rest.await.is_ok(), "seed {seed}: these wait for ever:\n{}", cluster.record.state());

    // Every device is free again.
    let everything =
        Job { name: "everything".into(), members: 3, is_gang: true, gpus: GPUS, runs: 1, loses: false };
    let last = tokio::time::timeout(CALM, run(Arc::clone(&cluster), everything, 0)).await;
    assert!(last.is_ok(), "seed {seed}: devices are lost:\n{}", cluster.record.state());
    let faults = cluster.record.faults();
    assert!(faults.is_empty(), "seed {seed}: {}", faults.join("\n"));
    happened
}

fn extender_entry() -> ExtenderConfig {
    ExtenderConfig {
        url_prefix: "http://extender".into(),
        filter_verb: "filter".into(),
        prioritize_verb: "prioritize".into(),
        bind_verb: "bind".into(),
        weight: 1,
        http_timeout: "15s".into(),
        managed_resources: vec![ManagedResource { name: GPU.into() }],
    }
}

/// The two extenders; one that has ended comes back.
struct Replicas<'a> {
    api: &'a Arc<ApiServer>,
    endpoint: &'a Endpoint,
    running: [Option<Process>; 2],
    started: u64,
    seed: u64,
}

impl<'a> Replicas<'a> {
    fn new(api: &'a Arc<ApiServer>, endpoint: &'a Endpoint, seed: u64) -> Self {
        let mut replicas = Self { api, endpoint, running: [None, None], started: 0, seed };
        replicas.start_missing();
        replicas
    }

    fn start_missing(&mut self) {
        for place in &mut self.running {
            if place.is_none() {
                self.started += 1;
                let process = Process::start(
                    self.api,
                    format!("extender {}", self.started),
                    1_000 * self.seed + self.started,
                );
                self.endpoint.probe(&process);
                *place = Some(process);
            }
        }
    }

    /// Faults happen, one after the other, until their time is over; then all is well.
    async fn suffer(mut self, dice: &mut Dice, cluster: &Cluster) -> BTreeMap<Fault, u32> {
        let end = Instant::now() + FAULTS;
        let mut happened = BTreeMap::new();
        while Instant::now() < end {
            tokio::time::sleep(Duration::from_millis(dice.range(200, 12_000))).await;
            let fault = ALL[dice.index(ALL.len())];
            if self.cause(fault, dice).await {
                *happened.entry(fault).or_insert(0) += 1;
            }
            let faults = cluster.record.faults();
            assert!(faults.is_empty(), "seed {}: {}", self.seed, faults.join("\n"));
        }
        self.start_missing();
        for process in self.running.iter().flatten() {
            process.to_api.heal();
            process.from_scheduler.heal();
        }
        happened
    }

    /// Whether there was a replica to do it to.
    async fn cause(&mut self, fault: Fault, dice: &mut Dice) -> bool {
        if dice.mille(500) {
            self.start_missing();
        }
        let place = dice.index(2);
        let Some(process) = &self.running[place] else { return false };
        assert!(!process.has_ended(), "{} has ended by itself", process.name);
        let last = Duration::from_millis(dice.range(100, 30_000));
        let later = |link: &Link| {
            let link = link.clone();
            tokio::spawn(async move {
                tokio::time::sleep(last).await;
                if last > LATEST {
                    link.cut();
                }
                link.heal();
            });
        };
        match fault {
            Fault::Kill => {
                if let Some(process) = self.running[place].take() {
                    process.kill();
                }
            }
            Fault::Stop => {
                if let Some(process) = self.running[place].take() {
                    process.stop().await;
                }
            }
            Fault::CutFromApi => process.to_api.cut(),
            Fault::CutFromScheduler => process.from_scheduler.cut(),
            Fault::SilentApi => {
                process.to_api.set_silent(true);
                later(&process.to_api);
            }
            Fault::SilentScheduler => {
                process.from_scheduler.set_silent(true);
                later(&process.from_scheduler);
            }
            Fault::SlowApi => {
                process.to_api.set_latency(Duration::from_millis(dice.range(20, 900)));
                later(&process.to_api);
            }
        }
        true
    }
}

/// Pods that run together, or beside each other.
#[derive(Debug, Clone)]
struct Job {
    name: String,
    members: u32,
    is_gang: bool,
    /// Of each member.
    gpus: u32,
    /// Seconds.
    runs: u64,
    /// A user deletes a member while the job waits; its controller makes another.
    loses: bool,
}

impl Job {
    fn draw(number: u32, dice: &mut Dice) -> Self {
        let members = [1, 1, 2, 3, 4, 6][dice.index(6)];
        let gpus = [1, 2, 4][dice.index(if members > 4 { 2 } else { 3 })];
        let is_gang = members > 1 && dice.mille(600);
        Self {
            name: format!("job-{number}"),
            members,
            is_gang,
            gpus,
            runs: dice.range(2, 40),
            loses: dice.mille(400),
        }
    }

    /// What runs as a whole: a gang, or each pod of another job. Pods of other jobs that waited for one another while they hold
    /// GPUs could be in a deadlock, which nothing but a gang prevents.
    fn parts(self) -> Vec<Self> {
        if self.is_gang {
            return vec![self];
        }
        let part = |number| Self { name: format!("{}-{number}", self.name), members: 1, ..self.clone() };
        (0..self.members).map(part).collect()
    }

    fn pod(&self, number: u32, generation: u32) -> serde_json::Value {
        let mut annotations = json!({});
        if self.is_gang {
            annotations = json!({
                names::GANG_ANNOTATION: self.name, names::GANG_MIN_ANNOTATION: self.members.to_string(),
            });
        }
        json!({
            "metadata": {"name": format!("{}-{number}-{generation}", self.name), "annotations": annotations},
            "spec": {"containers": [{
                "name": "main", "image": "x", "resources": {"limits": {GPU: self.gpus.to_string()}},
            }]},
        })
    }
}

/// A job from its first pod until the last is gone.
async fn run(cluster: Arc<Cluster>, job: Job, seed: u64) {
    let mut dice = Dice::new(seed);
    let pods = cluster.pods();
    let create = async |number: u32, generation: u32| {
        let pod = serde_json::from_value(job.pod(number, generation)).unwrap();
        let pod = pods.create(&PostParams::default(), &pod).await.unwrap();
        (pod.name_any(), pod.uid().unwrap())
    };
    // Many begin at once.
    tokio::time::sleep(Duration::from_millis(dice.range(0, 4) * 20_000 + dice.range(0, 500))).await;
    let pause = [0, 100, 2_000][dice.index(3)];
    let mut members = Vec::new();
    for number in 0..job.members {
        members.push(create(number, 0).await);
        tokio::time::sleep(Duration::from_millis(dice.range(0, pause))).await;
    }
    let lost_at = Instant::now() + Duration::from_secs(dice.range(1, 30));
    let mut may_lose = job.loses;
    loop {
        let uids: BTreeSet<String> = members.iter().map(|(_, uid)| uid.clone()).collect();
        if cluster.record.count(&uids).1 == members.len() {
            break;
        }
        if may_lose && Instant::now() >= lost_at {
            may_lose = false;
            let number = dice.index(members.len());
            pods.delete(&members[number].0, &DeleteParams::default()).await.unwrap();
            tokio::time::sleep(Duration::from_millis(dice.range(1, 3_000))).await;
            members[number] = create(u32::try_from(number).unwrap(), 1).await;
        }
        cluster.record.changed().await;
    }
    tokio::time::sleep(Duration::from_secs(job.runs)).await;
    for (name, _) in &members {
        pods.delete(name, &DeleteParams::default()).await.unwrap();
    }
    let uids: BTreeSet<String> = members.into_iter().map(|(_, uid)| uid).collect();
    while cluster.record.count(&uids).0 > 0 {
        cluster.record.changed().await;
    }
}
