//! The faults of NVIDIA's k8s-device-plugin 0.20.0 that make people look for another one, each as a story that Gantry's
//! plugin must end well. What NVIDIA's does instead stands with each.

use std::pin::Pin;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gantry_e2e::peer::{Kubelet, List, Node, Plugin, Process, Served, Setting, Strategy};
use rustix::process::Signal;

/// A story, to be run in a runtime of its own.
pub(crate) type Story = fn() -> Pin<Box<dyn Future<Output = Result<()>>>>;

/// NVML's answer for a GPU that fell off the bus goes with this Xid.
pub(crate) const OFF_THE_BUS: u64 = 79;

/// Stories with their names.
macro_rules! stories {
    ($($story:ident),* $(,)?) => {
        vec![$((stringify!($story), (|| Box::pin($story())) as crate::faults::Story)),*]
    };
}
pub(crate) use stories;

/// Every story by its name.
pub(crate) fn all() -> Vec<(&'static str, Story)> {
    stories![
        a_gpu_with_an_xid_stays_unhealthy_when_kubelet_restarts,
        a_gpu_that_was_reset_is_healthy_again,
        every_stream_hears_of_an_xid,
        a_lost_gpu_leaves_the_others_to_be_preferred,
        a_driver_that_goes_is_told_once,
        no_free_set_makes_the_choice_fail,
        preferring_asks_nvml_nothing,
        a_wiped_socket_is_served_again,
        a_stream_that_kubelet_ends_makes_the_plugin_register_again,
        a_plugin_that_was_first_registers_with_a_kubelet_that_wipes_its_directory,
        a_driver_that_comes_late_is_waited_for,
        a_cdi_specification_goes_with_the_plugin,
        an_unknown_device_is_the_callers_mistake,
    ]
}

/// A node whose plugin is registered with kubelet.
pub(crate) struct Running {
    pub(crate) served: Served,
    pub(crate) kubelet: Kubelet,
    pub(crate) process: Process,
    pub(crate) node: Node,
}

async fn running(machine: &str, setting: &Setting) -> Result<Running> {
    running_on(Node::of(machine)?, setting).await
}

/// The plugin that the stories are about: Gantry's, or NVIDIA's program where `GANTRY_PEER_SUBJECT` is `nvidia`.
pub(crate) fn subject() -> Result<Plugin> {
    match std::env::var("GANTRY_PEER_SUBJECT").as_deref() {
        Ok("nvidia") => Plugin::nvidia().context("GANTRY_NVIDIA_BIN names no folder with NVIDIA's program"),
        _ => Plugin::gantry(),
    }
}

/// Starts the plugin on a node that is as the story wants it.
pub(crate) async fn running_on(node: Node, setting: &Setting) -> Result<Running> {
    let mut kubelet = Kubelet::start(&node.plugins())?;
    let process = node.start(&subject()?, setting)?;
    let served = kubelet.served().await.with_context(|| process.log())?;
    Ok(Running { served, kubelet, process, node })
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
async fn a_gpu_with_an_xid_stays_unhealthy_when_kubelet_restarts() -> Result<()> {
    let run = running("l4-4x-pcie", &Setting::default()).await?;
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
async fn a_gpu_that_was_reset_is_healthy_again() -> Result<()> {
    let run = running("l4-4x-pcie", &Setting::default()).await?;
    let mut stream = run.served.watch().await?;
    run.node.controller().lose_gpu(2)?;
    run.node.controller().raise_xid(2, OFF_THE_BUS)?;
    Served::list_until(&mut stream, |list| healthy(list) == 3).await?;
    run.node.controller().restore_gpu(2)?;
    Served::list_until(&mut stream, |list| healthy(list) == 4).await?;
    Ok(())
}

/// NVIDIA's gives each event to one of the streams.
async fn every_stream_hears_of_an_xid() -> Result<()> {
    let run = running("l4-4x-pcie", &Setting::default()).await?;
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
async fn a_lost_gpu_leaves_the_others_to_be_preferred() -> Result<()> {
    let run = running("dgx-a100", &Setting::default()).await?;
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
async fn a_driver_that_goes_is_told_once() -> Result<()> {
    let run = running("l4-4x-pcie", &Setting::default()).await?;
    let mut stream = run.served.watch().await?;
    run.node.controller().unload_driver()?;
    let mut lists = vec![Served::list_until(&mut stream, |_| true).await?];
    while lists.last().is_some_and(|list| healthy(list) > 0) {
        lists.push(Served::list_until(&mut stream, |_| true).await?);
    }
    // Only now may anything change again: an earlier change would be reported twice.
    run.node.controller().load_driver()?;
    while lists.last().is_some_and(|list| healthy(list) < 4) {
        lists.push(Served::list_until(&mut stream, |_| true).await?);
    }
    ensure!(lists.windows(2).all(|pair| pair[0] != pair[1]), "told the same twice: {lists:?}");
    Ok(())
}

/// NVIDIA's dies of a null device where a padded group wins, as on four NVLink pairs with these five free.
async fn no_free_set_makes_the_choice_fail() -> Result<()> {
    let mut run = running("a40-8x-bridged", &Setting::default()).await?;
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
const AT_REST: [&str; 12] = [
    "nvmlDeviceGetComputeMode",
    "nvmlDeviceGetCount_v2",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetGpuFabricInfoV",
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlEventSetWait_v2",
    "nvmlSystemGetDriverVersion",
];

/// NVIDIA's makes some 3,170 NVML calls for each question on eight GPUs. Health is looked after meanwhile here, and the
/// less of it the more questions: not one call of any function is a question's.
async fn preferring_asks_nvml_nothing() -> Result<()> {
    const QUESTIONS: u64 = 300;
    let run = running("dgx-a100", &Setting::default()).await?;
    let offered = run.ids(&[0, 1, 2, 3, 4, 5, 6, 7]);
    run.served.prefer(&offered, &[], 4).await?;
    let calls = || run.node.controller().calls();
    // What is read once after the start is read.
    let looked = calls();
    while calls().since(&looked).of("nvmlDeviceGetCount_v2") == 0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
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
async fn a_wiped_socket_is_served_again() -> Result<()> {
    let mut run = running("l4-4x-pcie", &Setting::default()).await?;
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
async fn a_stream_that_kubelet_ends_makes_the_plugin_register_again() -> Result<()> {
    let mut run = running("l4-4x-pcie", &Setting::default()).await?;
    run.kubelet.hang_up();
    let served = run.kubelet.served().await.with_context(|| run.process.log())?;
    ensure!(healthy(&served.list().await?) == 4);
    Ok(())
}

/// NVIDIA's dials the wiped socket for 10 s, starts again at 11 s and, by a stale timer, at 41 s.
async fn a_plugin_that_was_first_registers_with_a_kubelet_that_wipes_its_directory() -> Result<()> {
    let node = Node::of("l4-4x-pcie")?;
    // What a kubelet that was killed leaves.
    drop(Kubelet::start(&node.plugins())?);
    let process = node.start(&subject()?, &Setting::default())?;
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
async fn a_driver_that_comes_late_is_waited_for() -> Result<()> {
    let node = Node::of("l4-4x-pcie")?;
    node.controller().unload_driver()?;
    let mut kubelet = Kubelet::start(&node.plugins())?;
    let setting = Setting { env: &[("FAIL_ON_INIT_ERROR", "false")], ..Setting::default() };
    let process = node.start(&subject()?, &setting)?;
    let before = node.controller().calls().of("nvmlInit_v2");
    let asked = async {
        while node.controller().calls().of("nvmlInit_v2") == before {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(30), asked).await.with_context(|| process.log())?;
    node.controller().load_driver()?;
    let served = kubelet.served().await.with_context(|| process.log())?;
    ensure!(healthy(&served.list().await?) == 4);
    Ok(())
}

/// NVIDIA's leaves its specifications behind.
async fn a_cdi_specification_goes_with_the_plugin() -> Result<()> {
    let setting = Setting { strategies: vec![Strategy::CdiCri], ..Setting::default() };
    let mut run = running("l4-4x-pcie", &setting).await?;
    let files = || anyhow::Ok(std::fs::read_dir(run.node.cdi())?.count());
    ensure!(files()? == 1, "{} files", files()?);
    run.process.signal(Signal::TERM)?;
    let status = run.process.wait()?;
    ensure!(status.success() && files()? == 0, "{status}, {} files", files()?);
    Ok(())
}

/// NVIDIA's flattens every error to Unknown.
async fn an_unknown_device_is_the_callers_mistake() -> Result<()> {
    let run = running("l4-4x-pcie", &Setting::default()).await?;
    let Err(status) = run.served.allocate(&["GPU-unknown".to_owned()]).await else {
        anyhow::bail!("an unknown device was given");
    };
    ensure!(format!("{:?}", status.code()) == "InvalidArgument", "{status}");
    Ok(())
}
