//! What is measured of a plugin, each by the same client in the same way for either program.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use gantry_e2e::peer::{Kubelet, Mig, Node, Plugin, Process, Served, Setting, Sharing};

/// The machine: eight A100 on NVSwitch.
const MACHINE: &str = "dgx-a100";
const STARTS: usize = 10;
const RESTARTS: usize = 10;
const CALLS: usize = 400;
const WARM_UP: usize = 100;
const PREFERRED: usize = 100;
const CALLERS: usize = 8;
const CALLS_EACH: usize = 500;
/// NVIDIA's never recovers a GPU, so each of a process's GPUs serves once; one stays.
const XIDS: u8 = 7;
const FATAL: u64 = 79;
const APART: Duration = Duration::from_millis(500);
const REST: Duration = Duration::from_secs(30);
const MANY_CALLS: usize = 13_000;

/// One line of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Row {
    Register,
    RegisterMig,
    RegisterAgain,
    AllocateOne,
    AllocateEight,
    Callers,
    Preferred,
    SharedOne,
    SharedAll,
    Xid,
    AtRest,
    AfterCalls,
}

/// One measurement.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Sample {
    Time(Duration),
    /// Calls per second.
    Rate(f64),
    Bytes(u64),
}

impl Row {
    pub(crate) const ALL: [Self; 12] = [
        Self::Register,
        Self::RegisterMig,
        Self::RegisterAgain,
        Self::AllocateOne,
        Self::AllocateEight,
        Self::Callers,
        Self::Preferred,
        Self::SharedOne,
        Self::SharedAll,
        Self::Xid,
        Self::AtRest,
        Self::AfterCalls,
    ];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Register => "exec to Register, 8 GPUs",
            Self::RegisterMig => "exec to Register, 56 MIG devices",
            Self::RegisterAgain => "kubelet.sock recreated to Register",
            Self::AllocateOne => "Allocate, 1 id",
            Self::AllocateEight => "Allocate, 8 ids",
            Self::Callers => "Allocate, 8 callers at once",
            Self::Preferred => "GetPreferredAllocation, 4 of 8",
            Self::SharedOne => "Allocate, time slicing x4, 1 id",
            Self::SharedAll => "Allocate, time slicing x4, 32 ids",
            Self::Xid => "Xid to unhealthy on ListAndWatch",
            Self::AtRest => "resident at rest, 30 s after start",
            Self::AfterCalls => "resident after 13,000 calls",
        }
    }
}

/// A plugin that is registered.
struct Running {
    served: Served,
    ids: Vec<String>,
    kubelet: Kubelet,
    process: Process,
    node: Node,
}

async fn running(plugin: &Plugin, setting: &Setting) -> Result<Running> {
    let node = Node::of(MACHINE)?;
    let mut kubelet = Kubelet::start(&node.plugins())?;
    let process = node.start(plugin, setting)?;
    let served = kubelet.served().await.with_context(|| process.log())?;
    let ids = served.list().await?.into_keys().collect();
    Ok(Running {
        served,
        ids,
        kubelet,
        process,
        node,
    })
}

/// Everything but memory, once.
pub(crate) async fn round(plugin: &Plugin, take: &mut impl FnMut(Row, Vec<Sample>)) -> Result<()> {
    let node = Node::of(MACHINE)?;
    take(Row::Register, starts(&node, plugin, &Setting::default()).await?);
    for gpu in 0..8 {
        node.controller().recut(gpu, &["1g.5gb"; 7])?;
    }
    let cut = Setting {
        mig: Some(Mig::Single),
        ..Setting::default()
    };
    take(Row::RegisterMig, starts(&node, plugin, &cut).await?);
    let mut run = running(plugin, &Setting::default()).await?;
    take(Row::AllocateOne, allocate(&run, 1).await?);
    take(Row::AllocateEight, allocate(&run, 8).await?);
    take(Row::Callers, callers(&run).await?);
    take(Row::Preferred, preferred(&run).await?);
    take(Row::RegisterAgain, restarts(&mut run).await?);
    take(Row::Xid, xids(&run).await?);
    drop(run);
    let shared = Setting {
        sharing: Some(Sharing {
            replicas: 4,
            rename: false,
            one_only: false,
        }),
        ..Setting::default()
    };
    let run = running(plugin, &shared).await?;
    ensure!(run.ids.len() == 32, "{} replicas", run.ids.len());
    take(Row::SharedOne, allocate(&run, 1).await?);
    take(Row::SharedAll, allocate(&run, 32).await?);
    Ok(())
}

/// Resident memory, at rest and after many calls.
pub(crate) async fn memory(plugin: &Plugin, take: &mut impl FnMut(Row, Vec<Sample>)) -> Result<()> {
    let run = running(plugin, &Setting::default()).await?;
    // As kubelet does, somebody listens.
    let _stream = run.served.watch().await?;
    tokio::time::sleep(REST).await;
    take(Row::AtRest, vec![Sample::Bytes(run.process.resident()?)]);
    for call in 0..MANY_CALLS {
        let size = 1 + call % run.ids.len();
        if call % 2 == 0 {
            run.served.allocate(&run.ids[..size]).await?;
        } else {
            run.served.prefer(&run.ids, &[], size).await?;
        }
    }
    take(Row::AfterCalls, vec![Sample::Bytes(run.process.resident()?)]);
    Ok(())
}

async fn starts(node: &Node, plugin: &Plugin, setting: &Setting) -> Result<Vec<Sample>> {
    let mut times = Vec::new();
    for _ in 0..STARTS {
        let mut kubelet = Kubelet::start(&node.plugins())?;
        let mut process = node.prepare(plugin, setting)?;
        let began = Instant::now();
        process.go()?;
        let registered = kubelet.registration().await.with_context(|| process.log())?;
        times.push(Sample::Time(registered.at - began));
    }
    Ok(times)
}

async fn restarts(run: &mut Running) -> Result<Vec<Sample>> {
    let mut times = Vec::new();
    for _ in 0..RESTARTS {
        let began = Instant::now();
        run.kubelet = Kubelet::start(&run.node.plugins())?;
        times.push(Sample::Time(run.kubelet.registration().await?.at - began));
        // A kubelet that is replaced in the middle of a handshake is another matter.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    run.kubelet = Kubelet::start(&run.node.plugins())?;
    run.served = run.kubelet.served().await?;
    Ok(times)
}

async fn allocate(run: &Running, size: usize) -> Result<Vec<Sample>> {
    let mut times = Vec::new();
    for call in 0..WARM_UP + CALLS {
        let began = Instant::now();
        run.served.allocate(&run.ids[..size]).await?;
        if call >= WARM_UP {
            times.push(Sample::Time(began.elapsed()));
        }
    }
    Ok(times)
}

async fn callers(run: &Running) -> Result<Vec<Sample>> {
    let began = Instant::now();
    let calls = (0..CALLERS).map(async |_| {
        for _ in 0..CALLS_EACH {
            run.served.allocate(&run.ids[..1]).await?;
        }
        anyhow::Ok(())
    });
    futures::future::try_join_all(calls).await?;
    let rate = (CALLERS * CALLS_EACH) as f64 / began.elapsed().as_secs_f64();
    Ok(vec![Sample::Rate(rate)])
}

async fn preferred(run: &Running) -> Result<Vec<Sample>> {
    let mut times = Vec::new();
    for _ in 0..PREFERRED {
        let began = Instant::now();
        run.served.prefer(&run.ids, &[], 4).await?;
        times.push(Sample::Time(began.elapsed()));
    }
    Ok(times)
}

async fn xids(run: &Running) -> Result<Vec<Sample>> {
    let mut stream = run.served.watch().await?;
    Served::list_until(&mut stream, |list| list.values().all(|(healthy, _)| *healthy)).await?;
    let mut times = Vec::new();
    for gpu in 0..XIDS {
        let uuid = run.node.hardware().gpus[usize::from(gpu)].uuid.clone();
        let began = Instant::now();
        run.node.controller().raise_xid(gpu, FATAL)?;
        Served::list_until(&mut stream, |list| !list[&uuid].0).await?;
        times.push(Sample::Time(began.elapsed()));
        // Lists in quick succession are paced; here each Xid comes alone.
        tokio::time::sleep(APART).await;
    }
    Ok(times)
}
