//! What is measured of a plugin, each by the same client in the same way for every program.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use gantry_e2e::peer::{Kubelet, Mig, Node, Plugin, Process, Served, Setting, Sharing};
use gantry_proto::deviceplugin::ListAndWatchResponse;
use tonic::Streaming;

use crate::caller::{Call, Caller};
use crate::row::{Mode, Row, Sample};

/// The machine: eight A100 on NVSwitch.
const MACHINE: &str = "dgx-a100";
const STARTS: usize = 10;
const RESTARTS: usize = 10;
const CALLS: usize = 400;
const WARM_UP: usize = 100;
const CALLERS: usize = 8;
const CALLS_EACH: usize = 250;
/// NVIDIA's never recovers a GPU, so each of a process's GPUs serves once; one stays.
const XIDS: u8 = 7;
const FATAL: u64 = 79;
const APART: Duration = Duration::from_millis(150);

/// A plugin that is registered.
pub(crate) struct Running {
    pub(crate) caller: Caller,
    served: Served,
    pub(crate) ids: Vec<String>,
    /// Held open, as kubelet does.
    lists: Streaming<ListAndWatchResponse>,
    kubelet: Kubelet,
    pub(crate) process: Process,
    node: Node,
}

impl Mode {
    /// A node for it, and its plugin's settings. The minimal plugin gets the number of devices to simulate.
    fn lay_out(self) -> Result<(Node, Setting)> {
        let node = match self {
            Self::Slices => Node::cut(MACHINE, &["1g.5gb"; 7])?,
            Self::Whole | Self::Replicas => Node::of(MACHINE)?,
        };
        let setting = match self {
            Self::Whole => Setting::default(),
            Self::Slices => {
                Setting { mig: Some(Mig::Single), env: &[("BARE_DEVICES", "56")], ..Setting::default() }
            }
            Self::Replicas => Setting {
                sharing: Some(Sharing { replicas: 10, rename: false, one_only: false }),
                env: &[("BARE_DEVICES", "80")],
                ..Setting::default()
            },
        };
        Ok((node, setting))
    }

    const fn devices(self) -> usize {
        match self {
            Self::Whole => 8,
            Self::Slices => 56,
            Self::Replicas => 80,
        }
    }
}

/// A registered plugin on a node of its own.
pub(crate) async fn running(plugin: &Plugin, mode: Mode) -> Result<Running> {
    let (node, setting) = mode.lay_out()?;
    let run = run(node, plugin, &setting).await?;
    ensure!(run.ids.len() == mode.devices(), "{} devices", run.ids.len());
    Ok(run)
}

async fn run(node: Node, plugin: &Plugin, setting: &Setting) -> Result<Running> {
    let mut kubelet = Kubelet::start_unread(&node.plugins())?;
    let process = node.start(plugin, setting)?;
    let served = kubelet.served().await.with_context(|| process.log())?;
    let mut lists = served.watch().await?;
    let ids = Served::list_until(&mut lists, |_| true).await?.into_keys().collect();
    Ok(Running { caller: Caller::dial(&served.socket).await?, served, lists, ids, kubelet, process, node })
}

/// Everything but memory, once.
pub(crate) async fn round(plugin: &Plugin, take: &mut impl FnMut(Row, Vec<Sample>)) -> Result<()> {
    let run = running(plugin, Mode::Whole).await?;
    take(Row::Floor, repeated(&run, &Call::options()?).await?);
    take(Row::AllocateOne, allocate(&run, 1).await?);
    take(Row::AllocateEight, allocate(&run, 8).await?);
    let (rate, times) = callers(&run).await?;
    take(Row::Callers, vec![rate]);
    take(Row::CallersTime, times);
    take(Row::Preferred, preferred(&run, 4).await?);
    if !matches!(plugin, Plugin::Bare(_)) {
        let (again, mut run) = restarts(run).await?;
        take(Row::RegisterAgain, again);
        take(Row::Xid(Mode::Whole), xids(&mut run, Mode::Whole).await?);
    }
    let nodes = Setting { pass_device_specs: true, ..Setting::default() };
    let run = self::run(Node::of(MACHINE)?, plugin, &nodes).await?;
    take(Row::AllocateNodes, allocate(&run, 8).await?);
    let mut run = running(plugin, Mode::Replicas).await?;
    take(Row::PreferredReplicas, preferred(&run, 2).await?);
    take(Row::SharedOne, allocate(&run, 1).await?);
    take(Row::SharedAll, allocate(&run, 32).await?);
    // NVIDIA's program reports one replica of the GPU, and waiting for the others has no end.
    let reports_all = matches!(plugin, Plugin::Gantry(_));
    if reports_all {
        take(Row::Xid(Mode::Replicas), xids(&mut run, Mode::Replicas).await?);
    }
    let mut run = running(plugin, Mode::Slices).await?;
    take(Row::PreferredSlices, preferred(&run, 2).await?);
    if reports_all {
        take(Row::Xid(Mode::Slices), xids(&mut run, Mode::Slices).await?);
    }
    drop(run);
    take(Row::Register, starts(plugin, Mode::Whole).await?);
    take(Row::RegisterMig, starts(plugin, Mode::Slices).await?);
    Ok(())
}

async fn timed(run: &Running, call: &Call) -> Result<Sample> {
    let began = Instant::now();
    run.caller.call(call).await?;
    Ok(Sample::Time(began.elapsed()))
}

/// One call after the other.
async fn repeated(run: &Running, call: &Call) -> Result<Vec<Sample>> {
    let mut times = Vec::new();
    for _ in 0..WARM_UP + CALLS {
        times.push(timed(run, call).await?);
    }
    Ok(times.split_off(WARM_UP))
}

async fn allocate(run: &Running, size: usize) -> Result<Vec<Sample>> {
    let ids = &run.ids[..size];
    run.served.allocate(ids).await?;
    repeated(run, &Call::allocate(ids)?).await
}

async fn preferred(run: &Running, size: usize) -> Result<Vec<Sample>> {
    let chosen = run.served.prefer(&run.ids, &[], size).await?;
    ensure!(chosen.len() == size, "{} of {size}", chosen.len());
    repeated(run, &Call::prefer(&run.ids, size)?).await
}

async fn starts(plugin: &Plugin, mode: Mode) -> Result<Vec<Sample>> {
    let (node, setting) = mode.lay_out()?;
    let mut times = Vec::new();
    for _ in 0..STARTS {
        let mut kubelet = Kubelet::start_unread(&node.plugins())?;
        let mut process = node.prepare(plugin, &setting)?;
        let began = Instant::now();
        process.go()?;
        let registered = kubelet.registration().await.with_context(|| process.log())?;
        times.push(Sample::Time(registered.at - began));
    }
    Ok(times)
}

async fn restarts(mut run: Running) -> Result<(Vec<Sample>, Running)> {
    let mut times = Vec::new();
    for _ in 0..RESTARTS {
        let began = Instant::now();
        run.kubelet = Kubelet::start_unread(&run.node.plugins())?;
        times.push(Sample::Time(run.kubelet.registration().await?.at - began));
        // A kubelet that is replaced in the middle of a handshake is another matter.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    run.kubelet = Kubelet::start_unread(&run.node.plugins())?;
    run.served = run.kubelet.served().await?;
    run.lists = run.served.watch().await?;
    run.caller = Caller::dial(&run.served.socket).await?;
    Ok((times, run))
}

/// Allocate by several callers at once, each with its next call as soon as the last is answered: calls per second, and
/// each call.
async fn callers(run: &Running) -> Result<(Sample, Vec<Sample>)> {
    let call = Call::allocate(&run.ids[..1])?;
    let began = Instant::now();
    let calls = (0..CALLERS).map(async |_| {
        let mut times = Vec::with_capacity(CALLS_EACH);
        for _ in 0..CALLS_EACH {
            times.push(timed(run, &call).await?);
        }
        anyhow::Ok(times)
    });
    let times = futures::future::try_join_all(calls).await?;
    let rate = (CALLERS * CALLS_EACH) as f64 / began.elapsed().as_secs_f64();
    Ok((Sample::Rate(rate), times.concat()))
}

/// From an Xid until all devices of its GPU are unhealthy.
async fn xids(run: &mut Running, mode: Mode) -> Result<Vec<Sample>> {
    let of_each = mode.devices() / run.node.hardware().gpus.len();
    let mut times = Vec::new();
    for gpu in 0..XIDS {
        let sick = of_each * (usize::from(gpu) + 1);
        // Lists in quick succession are paced; here each Xid comes alone.
        tokio::time::sleep(APART).await;
        run.node.controller().raise_xid(gpu, FATAL)?;
        // Waking the listeners is the last step of raising an Xid; the simulator's writes before it are not measured.
        let began = Instant::now();
        Served::list_until(&mut run.lists, |list| {
            list.values().filter(|(healthy, _)| !healthy).count() == sick
        })
        .await?;
        times.push(Sample::Time(began.elapsed()));
    }
    Ok(times)
}
