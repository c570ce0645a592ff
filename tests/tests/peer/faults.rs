//! The faults of NVIDIA's k8s-device-plugin 0.20.0 that make people look for another one, each as a story that Gantry's
//! plugin must end well. What NVIDIA's does instead stands with each.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use gantry_e2e::peer::{Kubelet, List, Node, Plugin, Process, Served, Setting, Strategy};
use rustix::process::Signal;

/// How a story ends.
type Outcome = Pin<Box<dyn Future<Output = Result<()>>>>;

/// A fault, and what a plugin must do in it. It runs in a runtime of its own.
pub(crate) struct Story {
    pub(crate) name: &'static str,
    /// What NVIDIA's program does.
    pub(crate) nvidia: Nvidia,
    pub(crate) play: fn(Plugin) -> Outcome,
}

/// What NVIDIA's program does in a story.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Nvidia {
    /// It fails it.
    Fails,
    /// It ends it as Gantry's plugin does.
    Passes,
}

impl Story {
    /// Plays it with NVIDIA's program, and compares the outcome with what is said of it.
    pub(crate) async fn with_nvidias_program(&self, program: Plugin) -> Result<()> {
        match (self.nvidia, (self.play)(program).await) {
            (Nvidia::Passes, Ok(())) => Ok(()),
            (Nvidia::Fails, Err(error)) => {
                eprintln!("{}: {error:#}", self.name);
                Ok(())
            }
            (Nvidia::Passes, Err(error)) => Err(error.context("NVIDIA's program is said to pass this story")),
            (Nvidia::Fails, Ok(())) => bail!("NVIDIA's program passes this story, and is said to fail it"),
        }
    }
}

/// The page for users that has a row for each story.
const PAGE: &str = include_str!("../../../docs/project/faults-side-by-side.md");

/// Checks that the page names the same stories, and those that NVIDIA's program passes as `same`.
pub(crate) fn in_page(stories: impl Iterator<Item = Story>) -> Result<()> {
    let rows = PAGE.lines().filter_map(|line| {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let name = cells.last()?.strip_prefix('`')?.strip_suffix('`')?;
        Some((name, *cells.get(2)?))
    });
    let mut rows: BTreeMap<&str, &str> = rows.collect();
    for story in stories {
        let cell = rows.remove(story.name).with_context(|| format!("no row for {}", story.name))?;
        let passes = story.nvidia == Nvidia::Passes;
        ensure!(passes == (cell == "same"), "{}: the page says {cell:?} of NVIDIA's program", story.name);
    }
    ensure!(rows.is_empty(), "rows without a story: {rows:?}");
    Ok(())
}

/// NVML's answer for a GPU that fell off the bus goes with this Xid.
pub(crate) const OFF_THE_BUS: u64 = 79;

/// Stories, each with what NVIDIA's program does.
macro_rules! stories {
    ($($story:ident: $nvidia:ident),* $(,)?) => {
        vec![$(crate::faults::Story {
            name: stringify!($story),
            nvidia: crate::faults::Nvidia::$nvidia,
            play: |subject| Box::pin($story(subject)),
        }),*]
    };
}
pub(crate) use stories;

/// Every story of whole GPUs.
pub(crate) fn all() -> Vec<Story> {
    stories![
        a_gpu_with_an_xid_stays_unhealthy_when_kubelet_restarts: Fails,
        a_gpu_that_was_reset_is_healthy_again: Fails,
        every_stream_hears_of_an_xid: Fails,
        a_lost_gpu_leaves_the_others_to_be_preferred: Fails,
        a_driver_that_goes_is_told_once: Fails,
        no_free_set_makes_the_choice_fail: Passes,
        preferring_asks_nvml_nothing: Fails,
        a_wiped_socket_is_served_again: Fails,
        a_stream_that_kubelet_ends_makes_the_plugin_register_again: Fails,
        a_plugin_that_was_first_registers_with_a_kubelet_that_wipes_its_directory: Passes,
        a_driver_that_comes_late_is_waited_for: Fails,
        a_cdi_specification_goes_with_the_plugin: Fails,
        an_unknown_device_is_the_callers_mistake: Fails,
    ]
}

/// A node whose plugin is registered with kubelet.
pub(crate) struct Running {
    pub(crate) served: Served,
    pub(crate) kubelet: Kubelet,
    pub(crate) process: Process,
    pub(crate) node: Node,
}

async fn running(subject: &Plugin, machine: &str, setting: &Setting) -> Result<Running> {
    running_on(subject, Node::of(machine)?, setting).await
}

/// Starts the plugin on a node that is as the story wants it, and returns when it waits for events of NVML. The story alone
/// reads device lists: NVIDIA's plugin sends each change to one of its streams.
pub(crate) async fn running_on(subject: &Plugin, node: Node, setting: &Setting) -> Result<Running> {
    let mut kubelet = Kubelet::start_unread(&node.plugins())?;
    let process = node.start(subject, setting)?;
    let served = kubelet.served().await.with_context(|| process.log())?;
    called(&node, "nvmlEventSetWait_v2", 0).await.with_context(|| process.log())?;
    Ok(Running { served, kubelet, process, node })
}

/// Waits until an NVML function was called more often than `before`.
async fn called(node: &Node, function: &str, before: u64) -> Result<()> {
    let calling = async {
        while node.controller().calls().of(function) <= before {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let limit = Duration::from_secs(30);
    tokio::time::timeout(limit, calling).await.with_context(|| format!("no call of {function} in {limit:?}"))
}

impl Running {
    pub(crate) fn uuid(&self, gpu: usize) -> &str {
        &self.node.hardware().gpus[gpu].uuid
    }

    /// The IDs of these GPUs.
    fn ids(&self, gpus: &[usize]) -> Vec<String> {
        gpus.iter().map(|gpu| self.uuid(*gpu).to_owned()).collect()
    }
}

pub(crate) fn healthy(list: &List) -> usize {
    list.values().filter(|(healthy, _)| *healthy).count()
}

/// NVIDIA's plugin builds its list again on every restart of kubelet, all healthy.
async fn a_gpu_with_an_xid_stays_unhealthy_when_kubelet_restarts(subject: Plugin) -> Result<()> {
    let run = running(&subject, "l4-4x-pcie", &Setting::default()).await?;
    let mut stream = run.served.watch().await?;
    run.node.controller().raise_xid(1, OFF_THE_BUS)?;
    Served::list_until(&mut stream, |list| healthy(list) == 3).await?;
    drop(run.kubelet);
    let mut kubelet = Kubelet::start(&run.node.plugins())?;
    let list = kubelet.served().await?.list().await?;
    let uuid = &run.node.hardware().gpus[1].uuid;
    ensure!(healthy(&list) == 3 && !list[uuid].0, "{list:?}");
    Ok(())
}

/// NVIDIA's never recovers a device.
async fn a_gpu_that_was_reset_is_healthy_again(subject: Plugin) -> Result<()> {
    let run = running(&subject, "l4-4x-pcie", &Setting::default()).await?;
    let mut stream = run.served.watch().await?;
    run.node.controller().lose_gpu(2)?;
    run.node.controller().raise_xid(2, OFF_THE_BUS)?;
    Served::list_until(&mut stream, |list| healthy(list) == 3).await?;
    run.node.controller().restore_gpu(2)?;
    Served::list_until(&mut stream, |list| healthy(list) == 4).await?;
    Ok(())
}

/// NVIDIA's gives each event to one of the streams.
async fn every_stream_hears_of_an_xid(subject: Plugin) -> Result<()> {
    let run = running(&subject, "l4-4x-pcie", &Setting::default()).await?;
    let (mut one, mut other) = (run.served.watch().await?, run.served.watch().await?);
    for stream in [&mut one, &mut other] {
        Served::list_until(stream, |list| healthy(list) == 4).await?;
    }
    run.node.controller().raise_xid(0, OFF_THE_BUS)?;
    for stream in [&mut one, &mut other] {
        Served::list_until(stream, |list| healthy(list) == 3).await?;
    }
    Ok(())
}

/// NVIDIA's reads the links of all GPUs, offered or not, and fails every pod of the node while one is off the bus.
async fn a_lost_gpu_leaves_the_others_to_be_preferred(subject: Plugin) -> Result<()> {
    let run = running(&subject, "dgx-a100", &Setting::default()).await?;
    let mut stream = run.served.watch().await?;
    run.node.controller().lose_gpu(5)?;
    Served::list_until(&mut stream, |list| healthy(list) == 7).await?;
    let offered = run.ids(&[0, 1, 2, 3, 4, 6, 7]);
    for size in 1..=offered.len() {
        let chosen = run.served.prefer(&offered, &[], size).await?;
        ensure!(chosen.len() == size && chosen.iter().all(|id| offered.contains(id)), "{size}: {chosen:?}");
    }
    Ok(())
}

/// NVIDIA's marks all devices unhealthy in a loop without a pause: tens of thousands of lists a second, for ever.
async fn a_driver_that_goes_is_told_once(subject: Plugin) -> Result<()> {
    let run = running(&subject, "l4-4x-pcie", &Setting::default()).await?;
    let mut stream = run.served.watch().await?;
    run.node.controller().unload_driver()?;
    let mut lists = vec![Served::list_until(&mut stream, |_| true).await?];
    let mut read_until = async |count: usize| {
        while lists.last().is_some_and(|list| healthy(list) != count) {
            lists.push(Served::list_until(&mut stream, |_| true).await?);
            ensure!(lists.len() < 100, "{} lists", lists.len());
        }
        Ok(())
    };
    read_until(0).await?;
    // Only now may anything change again: an earlier change would be reported twice.
    run.node.controller().load_driver()?;
    read_until(4).await?;
    ensure!(lists.windows(2).all(|pair| pair[0] != pair[1]), "told the same twice: {lists:?}");
    Ok(())
}

/// By the source of go-gpuallocator NVIDIA's may choose a padded group, as on four NVLink pairs; it does not here.
async fn no_free_set_makes_the_choice_fail(subject: Plugin) -> Result<()> {
    let mut run = running(&subject, "a40-8x-bridged", &Setting::default()).await?;
    for mask in 1_usize..1 << 8 {
        let free: Vec<usize> = (0..8).filter(|gpu| mask >> gpu & 1 == 1).collect();
        let offered = run.ids(&free);
        for size in 1..=offered.len() {
            let chosen = run.served.prefer(&offered, &[], size).await?;
            ensure!(
                chosen.len() == size && chosen.iter().all(|id| offered.contains(id)),
                "{size} of {free:?}: {chosen:?}"
            );
        }
    }
    ensure!(run.process.lives()?, "{}", run.process.log());
    Ok(())
}

/// Everything that a plugin at rest asks NVML: it waits for events, and looks round every five seconds.
const AT_REST: [&str; 17] = [
    "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetComputeMode",
    "nvmlDeviceGetCount_v2",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetEnforcedPowerLimit",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetGpuFabricInfoV",
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetMaxClockInfo",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlEventSetWait_v2",
    "nvmlSystemGetDriverVersion",
];

/// NVIDIA's makes some 3,170 NVML calls for each question on eight GPUs. Health is looked after meanwhile here, and the
/// less of it the more questions: not one call of any function is a question's.
async fn preferring_asks_nvml_nothing(subject: Plugin) -> Result<()> {
    const QUESTIONS: u64 = 300;
    let run = running(&subject, "dgx-a100", &Setting::default()).await?;
    let offered = run.ids(&[0, 1, 2, 3, 4, 5, 6, 7]);
    run.served.prefer(&offered, &[], 4).await?;
    let calls = || run.node.controller().calls();
    // What is read once after the start is read when a look around begins. A plugin that never looks around reads no more.
    let looked = calls().of("nvmlDeviceGetCount_v2");
    let _ = called(&run.node, "nvmlDeviceGetCount_v2", looked).await;
    let before = calls();
    for _ in 0..QUESTIONS {
        run.served.prefer(&offered, &[], 4).await?;
    }
    let made = calls().since(&before);
    for (name, times) in made.by_name() {
        ensure!(AT_REST.contains(&name), "{name}: {:?}", made.by_name());
        ensure!(times < QUESTIONS, "{name}: {:?}", made.by_name());
    }
    Ok(())
}

/// NVIDIA's does not notice that its own socket is gone.
async fn a_wiped_socket_is_served_again(subject: Plugin) -> Result<()> {
    let mut run = running(&subject, "l4-4x-pcie", &Setting::default()).await?;
    for entry in std::fs::read_dir(run.node.plugins())? {
        let path = entry?.path();
        if path.file_name().is_some_and(|name| name != "kubelet.sock") {
            std::fs::remove_file(path)?;
        }
    }
    let served = run.kubelet.served().await?;
    ensure!(healthy(&served.list().await?) == 4);
    Ok(())
}

/// NVIDIA's plugin does not notice: kubelet counts all devices as gone until the plugin is restarted.
async fn a_stream_that_kubelet_ends_makes_the_plugin_register_again(subject: Plugin) -> Result<()> {
    let node = Node::of("l4-4x-pcie")?;
    let mut kubelet = Kubelet::start(&node.plugins())?;
    let process = node.start(&subject, &Setting::default())?;
    kubelet.served().await.with_context(|| process.log())?.list().await?;
    kubelet.hang_up();
    let served = kubelet.served().await.with_context(|| process.log())?;
    ensure!(healthy(&served.list().await?) == 4);
    Ok(())
}

/// NVIDIA's dials the wiped socket for 10 s, starts again at 11 s and, by a stale timer, at 41 s.
async fn a_plugin_that_was_first_registers_with_a_kubelet_that_wipes_its_directory(
    subject: Plugin,
) -> Result<()> {
    let node = Node::of("l4-4x-pcie")?;
    // What a kubelet that was killed leaves.
    drop(Kubelet::start(&node.plugins())?);
    let process = node.start(&subject, &Setting::default())?;
    let socket = async {
        while std::fs::read_dir(node.plugins())?.count() < 2 {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(std::time::Duration::from_secs(30), socket)
        .await
        .with_context(|| process.log())??;
    let mut kubelet = Kubelet::start(&node.plugins())?;
    ensure!(healthy(&kubelet.served().await?.list().await?) == 4);
    Ok(())
}

/// NVIDIA's plugin exits, or waits for ever without retrying if it is set not to fail.
async fn a_driver_that_comes_late_is_waited_for(subject: Plugin) -> Result<()> {
    let node = Node::of("l4-4x-pcie")?;
    node.controller().unload_driver()?;
    let mut kubelet = Kubelet::start(&node.plugins())?;
    let setting = Setting { env: &[("FAIL_ON_INIT_ERROR", "false")], ..Setting::default() };
    let process = node.start(&subject, &setting)?;
    let before = node.controller().calls().of("nvmlInit_v2");
    called(&node, "nvmlInit_v2", before).await.with_context(|| process.log())?;
    node.controller().load_driver()?;
    let served = kubelet.served().await.with_context(|| process.log())?;
    ensure!(healthy(&served.list().await?) == 4);
    Ok(())
}

/// NVIDIA's leaves its specifications behind.
async fn a_cdi_specification_goes_with_the_plugin(subject: Plugin) -> Result<()> {
    let setting = Setting { strategies: vec![Strategy::CdiCri], ..Setting::default() };
    let mut run = running(&subject, "l4-4x-pcie", &setting).await?;
    let files = || anyhow::Ok(std::fs::read_dir(run.node.cdi())?.count());
    ensure!(files()? == 1, "{} files", files()?);
    run.process.signal(Signal::TERM)?;
    let status = run.process.wait()?;
    ensure!(status.success() && files()? == 0, "{status}, {} files", files()?);
    Ok(())
}

/// NVIDIA's flattens every error to Unknown.
async fn an_unknown_device_is_the_callers_mistake(subject: Plugin) -> Result<()> {
    let run = running(&subject, "l4-4x-pcie", &Setting::default()).await?;
    let Err(status) = run.served.allocate(&["GPU-unknown".to_owned()]).await else {
        anyhow::bail!("an unknown device was given");
    };
    ensure!(format!("{:?}", status.code()) == "InvalidArgument", "{status}");
    Ok(())
}
