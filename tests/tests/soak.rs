//! Random failures of everything around the plugin: kubelet, the plugin itself, its configuration, GPUs and their MIG
//! layout, the driver, single NVML calls. Meanwhile pods of whole GPUs, shared GPUs and MIG devices start and end.
//! `GANTRY_SOAK_SECONDS` is the duration (20), and makes the test fail if it cannot run; `GANTRY_SOAK_SEED` repeats the
//! choices of a run.
#![allow(clippy::print_stderr, reason = "a test program talks on the terminal")]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::process::ExitCode;
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use gantry_e2e::peer::{self, Kubelet, List, Mig, Node, Plugin, Process, Served, Setting, Sharing};
use libtest_mimic::{Arguments, Failed, Trial};
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, IteratorRandom};
use rand::{Rng, SeedableRng};
use rustix::process::Signal;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// The plugin's longest pause after failures of NVML is 30 s; this is for a machine under load.
const EVENTUALLY: Duration = Duration::from_secs(120);
/// Between two times at which everything must settle as it should.
const UNREST: Duration = Duration::from_secs(6);
/// More than an unoptimised plugin ever needs.
const MEMORY: u64 = 96 << 20;
/// The GPU is off the bus.
const FATAL: u64 = 79;
/// A program's page fault, no fault of the GPU.
const HARMLESS: u64 = 31;
/// NVML's code for an unknown error.
const UNKNOWN_ERROR: u32 = 999;
/// Calls that a plugin makes while it runs.
const CALLS: [&str; 4] =
    ["nvmlDeviceGetCount_v2", "nvmlEventSetWait_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID"];
/// The name of the action that has calls of NVML fail.
const FAILING_CALLS: &str = "failing calls";
/// After so long the plugin has tried again to register GPUs for events: it does at each check, every 5 s.
const REGISTERED_AGAIN: Duration = Duration::from_secs(7);

/// For how long; set, it means that nothing may be left out.
const SECONDS: &str = "GANTRY_SOAK_SECONDS";
const SEED: &str = "GANTRY_SOAK_SEED";
/// A configuration that is refused.
const SLIP: &str = "version: v1\nflags:\n  migStratgy: mixed\n";

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let unsupported = peer::supported().err();
    if let Some(why) = &unsupported {
        eprintln!("the soak test is skipped: {why:#}");
        if std::env::var_os(SECONDS).is_some() {
            eprintln!("{SECONDS} is set: it was to be played");
            return ExitCode::FAILURE;
        }
    }
    let trial = |offer: Offer, name: &str| {
        let run = move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .map_err(|error| Failed::from(error.to_string()))?;
            runtime.block_on(soak(offer)).map_err(|error| Failed::from(format!("{error:#}")))
        };
        Trial::test(name, run).with_ignored_flag(unsupported.is_some())
    };
    let trials = vec![
        trial(Offer::Whole, "pods_are_served_whole_gpus_whatever_fails_around_the_plugin"),
        trial(Offer::Shared, "pods_are_served_shared_gpus_whatever_fails_around_the_plugin"),
        trial(Offer::Slices, "pods_are_served_slices_whatever_fails_around_the_plugin"),
    ];
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// The value of a variable, if it is set.
fn told<T: FromStr>(name: &str) -> Result<Option<T>> {
    let Ok(text) = std::env::var(name) else {
        return Ok(None);
    };
    match text.parse() {
        Ok(value) => Ok(Some(value)),
        Err(_) => bail!("{name} is no number: {text:?}"),
    }
}

async fn soak(offer: Offer) -> Result<()> {
    let seed = told(SEED)?.unwrap_or_else(|| rand::rng().random());
    let time = Duration::from_secs(told(SECONDS)?.unwrap_or(20));
    let mut world = World::begin(offer, seed).await?;
    let outcome = world.live(time).await;
    let done: Vec<String> = world.counts.iter().map(|(what, times)| format!("{what} {times}")).collect();
    eprintln!("{offer:?}, seed {seed}: {}", done.join(", "));
    outcome.with_context(|| {
        let log = world.process.log();
        let lines: Vec<&str> = log.lines().rev().take(40).collect();
        let lines: Vec<&str> = lines.into_iter().rev().collect();
        let last: Vec<&str> = world.last.iter().copied().collect();
        format!("seed {seed}, after {last:?}; the plugin's log ends:\n{}\n", lines.join("\n"))
    })
}

/// What the node offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Offer {
    Whole,
    /// Replicas of GPUs.
    Shared,
    /// MIG devices of one size.
    Slices,
}

/// The size of the MIG devices, and the most that a GPU is cut into.
const SLICE: &str = "1g.5gb";
const MOST_SLICES: usize = 7;

impl Offer {
    /// The plugin's config file, which it follows.
    fn setting(self, replicas: u16, pass_device_specs: bool) -> Setting {
        let sharing = Sharing { replicas, rename: false, one_only: false };
        Setting {
            in_file: true,
            pass_device_specs,
            sharing: (self == Self::Shared).then_some(sharing),
            mig: (self == Self::Slices).then_some(Mig::Single),
            ..Setting::default()
        }
    }

    /// How often an action is taken, where it can be.
    fn weight(self, (action, _, weight): &(Action, &'static str, u32)) -> u32 {
        match action {
            Action::Recut if self != Self::Slices => 0,
            _ => *weight,
        }
    }
}

/// An Xid on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Xid {
    /// None.
    No,
    /// One that the plugin must detect.
    Yes,
    /// One that it may have missed or may take for repaired.
    Unsure,
}

/// The required entry of a GPU in a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Truth {
    Healthy,
    Unhealthy,
    /// Unhealthy, or not in the list: a plugin that starts while a GPU is off the bus cannot learn its UUID.
    Lost,
    Either,
}

/// What happens.
#[derive(Debug, Clone, Copy)]
enum Action {
    Admit,
    Delete,
    RestartKubelet,
    HangUp,
    KillPlugin,
    StopPlugin,
    Lose,
    Restore,
    Xid,
    HarmlessXid,
    ReloadDriver,
    FailCall,
    SlowCall,
    Recut,
    Reconfigure,
    SlipInConfig,
}

impl Action {
    /// Each with its name and how often it happens.
    const ALL: [(Self, &'static str, u32); 16] = [
        (Self::Admit, "pods admitted", 400),
        (Self::Delete, "pods deleted", 350),
        (Self::RestartKubelet, "kubelet restarts", 30),
        (Self::HangUp, "streams ended", 4),
        (Self::KillPlugin, "plugin kills", 12),
        (Self::StopPlugin, "plugin stops", 12),
        (Self::Lose, "GPUs lost", 20),
        (Self::Restore, "GPUs restored", 25),
        (Self::Xid, "Xids", 8),
        (Self::HarmlessXid, "harmless Xids", 20),
        (Self::ReloadDriver, "driver reloads", 3),
        (Self::FailCall, FAILING_CALLS, 8),
        (Self::SlowCall, "slow calls", 8),
        (Self::Recut, "GPUs cut anew", 12),
        (Self::Reconfigure, "configurations", 10),
        (Self::SlipInConfig, "wrong configurations", 4),
    ];
}

/// A node, and the expected state of it.
struct World {
    random: StdRng,
    offer: Offer,
    setting: Setting,
    program: Plugin,
    process: Process,
    kubelet: Kubelet,
    served: Served,
    list: watch::Receiver<List>,
    reader: JoinHandle<()>,
    xids: Vec<Xid>,
    lost: BTreeSet<u8>,
    /// Kubelet's account: devices by pod.
    held: BTreeMap<usize, Vec<String>>,
    pods: usize,
    counts: BTreeMap<&'static str, usize>,
    last: VecDeque<&'static str>,
    node: Node,
}

impl World {
    async fn begin(offer: Offer, seed: u64) -> Result<Self> {
        let node = Node::of("dgx-a100")?;
        if offer == Offer::Slices {
            for gpu in 0..8 {
                node.controller().recut(gpu, &[SLICE; MOST_SLICES])?;
            }
        }
        let setting = offer.setting(4, false);
        let program = Plugin::gantry()?;
        let mut kubelet = Kubelet::start(&node.plugins())?;
        let process = node.start(&program, &setting)?;
        let served = kubelet.served().await.with_context(|| process.log())?;
        let (list, reader) = follow(&served).await?;
        Ok(Self {
            random: StdRng::seed_from_u64(seed),
            offer,
            setting,
            xids: vec![Xid::No; node.hardware().gpus.len()],
            program,
            process,
            kubelet,
            served,
            list,
            reader,
            lost: BTreeSet::new(),
            held: BTreeMap::new(),
            pods: 0,
            counts: BTreeMap::new(),
            last: VecDeque::new(),
            node,
        })
    }

    async fn live(&mut self, time: Duration) -> Result<()> {
        let end = Instant::now() + time;
        self.settle().await?;
        while Instant::now() < end {
            let calm = Instant::now() + UNREST;
            while Instant::now() < calm.min(end) {
                let offer = self.offer;
                let choice = Action::ALL.choose_weighted(&mut self.random, |action| offer.weight(action));
                let Ok((action, name, _)) = choice else {
                    bail!("no action");
                };
                self.last.push_back(name);
                if self.last.len() > 20 {
                    self.last.pop_front();
                }
                if self.act(*action).await.with_context(|| (*name).to_owned())? {
                    *self.counts.entry(name).or_default() += 1;
                }
                ensure!(self.process.lives()?, "the plugin has ended");
                let pause = self.random.random_range(0..20);
                tokio::time::sleep(Duration::from_millis(pause)).await;
            }
            self.settle().await.context("once all is calm")?;
        }
        Ok(())
    }

    /// Does it, if it can be done now.
    async fn act(&mut self, action: Action) -> Result<bool> {
        let gpus = u8::try_from(self.xids.len())?;
        let present = (0..gpus).filter(|gpu| !self.lost.contains(gpu));
        match action {
            Action::Admit => return self.admit().await,
            Action::Delete => {
                let Some(pod) = self.held.keys().copied().choose(&mut self.random) else {
                    return Ok(false);
                };
                self.held.remove(&pod);
            }
            Action::RestartKubelet => {
                // Its end breaks the connections; starting wipes the directory.
                self.kubelet = Kubelet::start(&self.node.plugins())?;
                self.registered().await?;
            }
            Action::HangUp => {
                // Both of its streams: a registration comes when none is left.
                self.reader.abort();
                self.kubelet.forget();
                self.kubelet.hang_up();
                self.registered().await?;
            }
            Action::KillPlugin | Action::StopPlugin => {
                let killed = matches!(action, Action::KillPlugin);
                self.process.signal(if killed { Signal::KILL } else { Signal::TERM })?;
                let status = self.process.wait()?;
                ensure!(killed || status.success(), "asked to stop, it ended with {status}");
                self.kubelet.forget();
                self.process = self.node.start(&self.program, &self.setting)?;
                self.registered().await?;
                // The new process receives no earlier event.
                for xid in &mut self.xids {
                    if *xid == Xid::Yes {
                        *xid = Xid::Unsure;
                    }
                }
            }
            Action::Lose => {
                // Two at least stay.
                let Some(gpu) = present.choose(&mut self.random).filter(|_| self.lost.len() < 6) else {
                    return Ok(false);
                };
                self.node.controller().lose_gpu(gpu)?;
                self.lost.insert(gpu);
            }
            Action::Restore => {
                let Some(gpu) = self.lost.iter().copied().choose(&mut self.random) else {
                    return Ok(false);
                };
                self.node.controller().restore_gpu(gpu)?;
                self.lost.remove(&gpu);
                // Seen off the bus, it counts as reset; back before anyone looked, it does not.
                self.unsure(gpu);
            }
            Action::Xid => {
                let Some(gpu) = present.choose(&mut self.random) else {
                    return Ok(false);
                };
                self.node.controller().raise_xid(gpu, FATAL)?;
                // In the middle of other failures the plugin may be deaf for a moment.
                if self.xids[usize::from(gpu)] == Xid::No {
                    self.xids[usize::from(gpu)] = Xid::Unsure;
                }
            }
            Action::HarmlessXid => {
                let Some(gpu) = present.choose(&mut self.random) else {
                    return Ok(false);
                };
                self.node.controller().raise_xid(gpu, HARMLESS)?;
            }
            Action::ReloadDriver => self.reload_driver().await?,
            Action::FailCall => {
                let call = CALLS.choose(&mut self.random).copied().unwrap_or(CALLS[0]);
                let times = self.random.random_range(1..3);
                self.node.controller().fail_call(call, UNKNOWN_ERROR, Some(times))?;
            }
            Action::SlowCall => {
                let call = CALLS.choose(&mut self.random).copied().unwrap_or(CALLS[0]);
                let time = Duration::from_millis(self.random.random_range(1..200));
                self.node.controller().slow_call(call, time)?;
            }
            Action::Recut => {
                let Some(gpu) = present.choose(&mut self.random) else {
                    return Ok(false);
                };
                self.recut(gpu).await?;
            }
            Action::Reconfigure => {
                let replicas = self.random.random_range(2..6);
                self.setting = self.offer.setting(replicas, self.random.random());
                let text = self.setting.config_file().context("no config file")?;
                self.node.write_config(&text)?;
                self.offered().await?;
            }
            // What was there last stays in effect.
            Action::SlipInConfig => self.node.write_config(SLIP)?,
        }
        Ok(true)
    }

    /// Cuts a GPU into another number of slices, once no pod is on it.
    async fn recut(&mut self, gpu: u8) -> Result<()> {
        let before = self.ids(gpu)?;
        self.held.retain(|_, held| !held.iter().any(|id| before.contains(id)));
        let count = self.random.random_range(2..=MOST_SLICES);
        self.node.controller().recut(gpu, &vec![SLICE; count])?;
        self.unsure(gpu);
        self.offered().await
    }

    /// The devices that a GPU is offered as.
    fn ids(&self, gpu: u8) -> Result<BTreeSet<String>> {
        let hardware = &self.node.hardware().gpus[usize::from(gpu)];
        let replicas = self.setting.sharing.map_or(0, |sharing| sharing.replicas);
        Ok(match self.offer {
            Offer::Whole => [hardware.uuid.clone()].into(),
            Offer::Shared => (0..replicas).map(|replica| format!("{}::{replica}", hardware.uuid)).collect(),
            Offer::Slices => {
                let state = self.node.controller().state()?;
                let cut = state.layout(hardware).context("not cut")?;
                let compute = cut.instances.iter().flat_map(|instance| &instance.compute);
                compute.map(|compute| compute.uuid.to_string()).collect()
            }
        })
    }

    /// Waits until kubelet lists exactly the existing devices.
    async fn offered(&mut self) -> Result<()> {
        let gpus = u8::try_from(self.xids.len())?;
        let all: Vec<(bool, BTreeSet<String>)> =
            (0..gpus).map(|gpu| Ok((self.lost.contains(&gpu), self.ids(gpu)?))).collect::<Result<_>>()?;
        self.list_is(&format!("{all:?}"), |list| {
            let known = |id: &String| all.iter().any(|(_, ids)| ids.contains(id));
            let there =
                |(lost, ids): &(bool, BTreeSet<String>)| *lost || ids.iter().all(|id| list.contains_key(id));
            list.keys().all(known) && all.iter().all(there)
        })
        .await
    }

    fn unsure(&mut self, gpu: u8) {
        let xid = &mut self.xids[usize::from(gpu)];
        if *xid == Xid::Yes {
            *xid = Xid::Unsure;
        }
    }

    /// Kubelet's way with a pod: what is healthy and free is offered, and what is preferred is asked for, mostly.
    async fn admit(&mut self) -> Result<bool> {
        let held: BTreeSet<&String> = self.held.values().flatten().collect();
        let free: Vec<String> = self
            .list
            .borrow()
            .iter()
            .filter(|(id, (healthy, _))| *healthy && !held.contains(id))
            .map(|(id, _)| id.clone())
            .collect();
        if free.is_empty() {
            return Ok(false);
        }
        let size = self.random.random_range(1..=free.len().min(4));
        let chosen = self.served.prefer(&free, &[], size).await?;
        let distinct: BTreeSet<&String> = chosen.iter().collect();
        ensure!(
            distinct.len() == size && chosen.iter().all(|id| free.contains(id)),
            "asked for {size} of {free:?}, it prefers {chosen:?}"
        );
        // Kubelet need not follow.
        let chosen = if self.random.random_ratio(1, 4) {
            free.into_iter().choose_multiple(&mut self.random, size)
        } else {
            chosen
        };
        let answer = self.served.allocate(&chosen).await?;
        let visible = answer.envs.get("NVIDIA_VISIBLE_DEVICES").map(String::as_str);
        let visible: BTreeSet<&str> = visible.unwrap_or_default().split(',').collect();
        // Of a replica the container sees the GPU.
        let wanted = chosen.iter().map(|id| id.split("::").next().unwrap_or(id));
        ensure!(visible == wanted.collect(), "asked for {chosen:?}, the container sees {visible:?}");
        self.pods += 1;
        self.held.insert(self.pods, chosen);
        Ok(true)
    }

    /// A driver that was gone has reset all GPUs, provided that its absence was seen.
    async fn reload_driver(&mut self) -> Result<()> {
        self.node.controller().unload_driver()?;
        self.list_is("every device unhealthy, for the driver is gone", |list| {
            list.values().all(|(healthy, _)| !healthy)
        })
        .await?;
        self.node.controller().load_driver()?;
        // One more failure of NVML that was arranged before may have been what was seen.
        for xid in &mut self.xids {
            *xid = if *xid == Xid::No { Xid::No } else { Xid::Unsure };
        }
        Ok(())
    }

    /// Waits until the plugin's list is true, and checks the invariants.
    async fn settle(&mut self) -> Result<()> {
        for call in CALLS {
            self.node.controller().clear_rule(call)?;
        }
        self.offered().await?;
        let mut expected: Vec<(String, Truth)> = Vec::new();
        for (gpu, xid) in (0..).zip(&self.xids) {
            let truth = match xid {
                _ if self.lost.contains(&gpu) => Truth::Lost,
                Xid::No => Truth::Healthy,
                Xid::Yes => Truth::Unhealthy,
                Xid::Unsure => Truth::Either,
            };
            expected.extend(self.ids(gpu)?.into_iter().map(|id| (id, truth)));
        }
        self.list_is(&format!("{expected:?}"), |list| {
            expected.iter().all(|(id, truth)| {
                let told = list.get(id).map(|(healthy, _)| *healthy);
                match truth {
                    Truth::Healthy => told == Some(true),
                    Truth::Unhealthy => told == Some(false),
                    Truth::Lost => told != Some(true),
                    Truth::Either => told.is_some(),
                }
            })
        })
        .await?;
        let resident = self.process.resident()?;
        ensure!(resident < MEMORY, "it holds {resident} bytes");
        // Now that nothing else goes on, an Xid cannot be missed, once all GPUs are registered for events.
        if self.random.random_ratio(1, 2) {
            if self.last.contains(&FAILING_CALLS) {
                tokio::time::sleep(REGISTERED_AGAIN).await;
            }
            let gpus = u8::try_from(self.xids.len())?;
            let sure =
                (0..gpus).filter(|gpu| !self.lost.contains(gpu) && self.xids[usize::from(*gpu)] == Xid::No);
            if let Some(gpu) = sure.choose(&mut self.random) {
                let ids = self.ids(gpu)?;
                self.node.controller().raise_xid(gpu, FATAL)?;
                self.xids[usize::from(gpu)] = Xid::Yes;
                self.list_is("every device of an Xid's GPU unhealthy", |list| {
                    ids.iter().all(|id| list.get(id).is_some_and(|(healthy, _)| !healthy))
                })
                .await?;
            }
        }
        Ok(())
    }

    async fn list_is(&mut self, what: &str, wanted: impl Fn(&List) -> bool) -> Result<()> {
        let end = Instant::now() + EVENTUALLY;
        loop {
            if wanted(&self.list.borrow()) {
                return Ok(());
            }
            ensure!(self.process.lives()?, "the plugin has ended, waiting for {what}");
            if Instant::now() > end {
                bail!("waited {EVENTUALLY:?} for {what}; the list is {:?}", *self.list.borrow());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Takes the next registration and follows its lists.
    async fn registered(&mut self) -> Result<()> {
        self.served = self.kubelet.served().await?;
        self.reader.abort();
        (self.list, self.reader) = follow(&self.served).await?;
        Ok(())
    }
}

/// The latest list of a resource, kept up to date on the side.
async fn follow(served: &Served) -> Result<(watch::Receiver<List>, JoinHandle<()>)> {
    let mut stream = served.watch().await?;
    let first = Served::list_until(&mut stream, |_| true).await?;
    let (sender, lists) = watch::channel(first);
    let reader = tokio::spawn(async move {
        // It ends with the stream: then another registration follows.
        while let Some(list) = Served::next_list(&mut stream).await {
            if sender.send(list).is_err() {
                break;
            }
        }
    });
    Ok((lists, reader))
}
