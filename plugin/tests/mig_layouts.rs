//! MIG layouts against the simulated library: the NVML thread brings GPUs to the layouts that NVIDIA ships, undoes what
//! the driver refuses, and completes what an earlier process began.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod sim;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use gantry_config::mig_layouts::PciId;
use gantry_config::{MigLayouts, NamedLayout};
use gantry_nvml_sim::control::{Controller, MigChange, Process};
use gantry_plugin::health::HealthChecks;
use gantry_plugin::inventory::{
    Hardware, LayoutOutcome, LayoutOutcomes, LayoutRequest, NvmlThread, Settings, State, Timing,
};
use gantry_topology::GpuUuid;
use sim::Sim;
use tokio::sync::{oneshot, watch};

const SHIPPED: &str = include_str!("../../config/tests/data/mig-layouts.yaml");

/// Every simulated machine whose GPUs support MIG.
const MACHINES: [&str; 8] = [
    "a100-1x-mig",
    "a30-4x-mig",
    "b200-8x-mig",
    "dgx-a100",
    "dgx-a100-mig",
    "h200-8x-mig",
    "hgx-h100",
    "rtx-pro-6000-4x-mig",
];

/// Error codes of NVML.
const NO_PERMISSION: u32 = 4;
const INSUFFICIENT_RESOURCES: u32 = 23;

/// Far above all waits, so only a failing test takes this long.
const PATIENCE: Duration = Duration::from_secs(60);

const QUICK: Timing = Timing {
    wait: Duration::from_millis(10),
    check: Duration::from_secs(3600),
    read: Duration::from_secs(3600),
    retry_from: Duration::from_millis(10),
    retry_to: Duration::from_millis(50),
};

struct Node {
    sim: Sim,
    controller: Controller,
    nvml_thread: NvmlThread,
    snapshots: watch::Receiver<Arc<Hardware>>,
}

impl Node {
    async fn start(sim: Sim) -> Self {
        let (_, config) = watch::channel(Arc::default());
        let settings = Settings {
            nvml_library: sim.options().library,
            config,
            proc_root: sim.installed.layout.proc.clone(),
            sys_root: sim.installed.layout.sys.clone(),
            dev_root: sim.installed.layout.dev.clone(),
            fabric_mode: None,
        };
        let (publish, mut snapshots) = Hardware::channel();
        let checks = HealthChecks::default();
        let nvml_thread = NvmlThread::start(&settings, checks, QUICK, publish).unwrap();
        // Otherwise the thread waits briefly only, for faults of an earlier run.
        nvml_thread.diagnoses().adopt(Vec::new(), gantry_api::Cordons::default(), Vec::new());
        let read = snapshots.wait_for(|hardware| hardware.state == State::Ready);
        tokio::time::timeout(PATIENCE, read).await.unwrap().unwrap();
        let controller = Controller::attach(sim.installed.library.parent().unwrap()).unwrap();
        Self { sim, controller, nvml_thread, snapshots }
    }

    async fn of(machine: &str) -> Self {
        Self::start(Sim::of(machine)).await
    }

    async fn request(&self, layout: &NamedLayout, idle: BTreeSet<GpuUuid>) -> LayoutOutcomes {
        let (reply, outcomes) = oneshot::channel();
        let request = LayoutRequest { layout: Arc::new(layout.clone()), idle, reply };
        self.nvml_thread.diagnoses().request_layout(request);
        tokio::time::timeout(PATIENCE, outcomes).await.unwrap().unwrap()
    }

    /// The outcome on GPU 0, which alone is idle.
    async fn apply(&self, layout: &NamedLayout) -> LayoutOutcome {
        let outcomes = self.request(layout, [self.sim.uuid(0).parse().unwrap()].into()).await;
        outcomes.into_values().find(|(index, _)| *index == 0).unwrap().1
    }

    /// MIG devices of GPU 0 by profile, as the inventory has them; `None` if MIG mode is off.
    fn devices(&self) -> Option<BTreeMap<String, u8>> {
        let hardware = Arc::clone(&self.snapshots.borrow());
        let mig = hardware.machine.gpus()[0].mig.as_ref().filter(|mig| mig.enabled)?;
        let mut devices = BTreeMap::new();
        for instance in &mig.instances {
            for compute in &instance.compute {
                *devices.entry(compute.profile.clone()).or_default() += 1;
            }
        }
        Some(devices)
    }
}

fn shipped() -> MigLayouts {
    MigLayouts::read("mig-layouts.yaml", SHIPPED).unwrap()
}

/// A layout with these MIG devices on every GPU.
fn all(devices: &str) -> NamedLayout {
    let text = format!(
        "version: v1\nmig-configs:\n  x:\n    - {{devices: all, mig-enabled: true, mig-devices: {{{devices}}}}}\n"
    );
    MigLayouts::read("test", &text).unwrap().get("x").unwrap().clone()
}

/// Each layout that NVIDIA ships is applied exactly if the product has its profiles; one that is not changes nothing.
#[tokio::test(flavor = "multi_thread")]
async fn shipped_layouts_apply_on_every_simulated_product() {
    for machine in MACHINES {
        let node = Node::of(machine).await;
        let gpu = &node.sim.installed.facts.gpus[0];
        let product = gpu.profiles.as_ref().unwrap();
        let id = PciId(u32::from(gpu.product.device_id) << 16 | 0x10DE);
        let mut applied = 0;
        for (name, layout) in shipped().iter() {
            let before = node.devices();
            let outcome = node.apply(layout).await;
            let context = format!("{machine}: {name}: {outcome:?}");
            let Some(entry) = layout.entry(0, id) else {
                assert_eq!(outcome, LayoutOutcome::Unmentioned, "{context}");
                continue;
            };
            let mut profiles = entry.devices.iter().flat_map(BTreeMap::keys);
            match profiles.find(|profile| product.profile(profile).is_none()) {
                Some(missing) => {
                    let LayoutOutcome::Impossible(text) = &outcome else { panic!("{context}") };
                    assert!(text.contains(&format!("has no profile {missing:?}")), "{context}");
                    assert_eq!(node.devices(), before, "{context}");
                }
                None => {
                    assert!(matches!(outcome, LayoutOutcome::InPlace { .. }), "{context}");
                    assert_eq!(node.devices(), entry.devices, "{context}");
                    applied += 1;
                    let again = node.apply(layout).await;
                    assert_eq!(again, LayoutOutcome::InPlace { changed: false }, "{context}");
                }
            }
        }
        assert!(applied >= 8, "{machine}: {applied} layouts");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn gpus_that_are_not_idle_are_compared_only() {
    let node = Node::of("dgx-a100").await;
    let second: GpuUuid = node.sim.uuid(1).parse().unwrap();
    let outcomes = node.request(&all("1g.5gb: 7"), [second.clone()].into()).await;
    for (gpu, (_, outcome)) in &outcomes {
        let expected =
            if *gpu == second { LayoutOutcome::InPlace { changed: true } } else { LayoutOutcome::Differs };
        assert_eq!(*outcome, expected);
    }
    assert_eq!((outcomes.len(), node.devices()), (8, None));
}

/// A refusal half way leaves what was there before, the mode included.
#[tokio::test(flavor = "multi_thread")]
async fn refused_step_is_undone() {
    let node = Node::of("dgx-a100").await;
    node.controller.recut(0, &["3g.20gb@0=1c,2c", "3g.20gb@4"]).unwrap();
    let whole = all("2c.3g.20gb: 1, 1c.3g.20gb: 1, 3g.20gb: 1");
    assert_eq!(node.apply(&whole).await, LayoutOutcome::InPlace { changed: false }, "GPU 0 has it");
    // Nothing was changed, so the new layout is offered at the plugin's own next reading only.
    let read = async {
        while node.devices().is_none() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), read)
        .await
        .expect("the MIG devices of GPU 0 were not read");
    let before = node.devices();
    // Each of seven instances is refused in turn.
    let mut texts = Vec::new();
    let create = "nvmlDeviceCreateGpuInstanceWithPlacement";
    for step in 0..7 {
        let made = node.controller.calls().of(create);
        node.controller
            .update(|state| {
                let rule = state.calls.entry(create.to_owned()).or_default();
                rule.fail = Some(INSUFFICIENT_RESOURCES);
                (rule.from_call, rule.until_call) = (made + step, Some(made + step + 1));
            })
            .unwrap();
        let idle = [node.sim.uuid(0).parse().unwrap()].into();
        let outcomes = node.request(&all("1g.5gb: 7"), idle).await;
        let (_, outcome) = outcomes.into_values().find(|(index, _)| *index == 0).unwrap();
        let LayoutOutcome::Refused(text) = outcome else { panic!("{outcome:?}") };
        texts.push(text);
        assert_eq!(node.devices(), before, "step {step}");
    }
    texts.dedup();
    insta::assert_snapshot!(texts.join("\n"), @"nvmlDeviceCreateGpuInstanceWithPlacement on GPU 0 failed: the driver is out of a resource other than memory; see dmesg, free memory on the node, and reboot it if this lasts; the former MIG instances are in place again");
    node.controller.clear_rule(create).unwrap();
    let idle: BTreeSet<GpuUuid> = [node.sim.uuid(0).parse().unwrap()].into();
    node.request(&all("1g.5gb: 7"), idle).await;
    assert_eq!(node.devices(), Some([("1g.5gb".to_owned(), 7)].into()));
}

#[tokio::test(flavor = "multi_thread")]
async fn mode_is_restored_where_instances_are_refused() {
    let node = Node::of("hgx-h100").await;
    let create = "nvmlGpuInstanceCreateComputeInstance";
    node.controller.fail_call(create, NO_PERMISSION, None).unwrap();
    let outcome = node.apply(&all("1g.10gb: 7")).await;
    let LayoutOutcome::Refused(text) = outcome else { panic!("{outcome:?}") };
    insta::assert_snapshot!(text, @"nvmlGpuInstanceCreateComputeInstance on GPU 0 failed: no permission; MIG needs CAP_SYS_ADMIN and NVIDIA_MIG_MONITOR_DEVICES=all in a container: label the node gantry.dev/mig=true (manifests/plugin-mig.yaml); the former MIG instances are in place again");
    assert_eq!(node.devices(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn mode_change_waits_for_reset() {
    let node = Node::of("a100-1x-mig").await;
    node.controller.recut(0, &["7g.40gb"]).unwrap();
    node.controller.update_gpu(0, |gpu| gpu.mig_mode_needs_reset = true).unwrap();
    let off = shipped().get("all-disabled").unwrap().clone();
    let mut texts = Vec::new();
    for _ in 0..2 {
        let outcome = node.apply(&off).await;
        let LayoutOutcome::Waits(text) = outcome else { panic!("{outcome:?}") };
        texts.push(text);
    }
    texts.dedup();
    insta::assert_snapshot!(texts.join("\n"), @"MIG mode will be off after the next reset of the GPU: run nvidia-smi --gpu-reset on the node, or reboot it");
    assert_eq!(node.devices(), Some(BTreeMap::new()));
    node.controller.reset_gpu(0).unwrap();
    assert_eq!(node.apply(&off).await, LayoutOutcome::InPlace { changed: false });
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_keep_a_gpu_from_changing() {
    let node = Node::of("dgx-a100").await;
    let process = Process { pid: 4711, ..Process::default() };
    node.controller.set_processes(0, vec![process]).unwrap();
    let outcome = node.apply(&all("1g.5gb: 7")).await;
    let LayoutOutcome::Waits(text) = outcome else { panic!("{outcome:?}") };
    insta::assert_snapshot!(text, @"1 processes of no known pod run on it, such as PID 4711");
    assert_eq!(node.devices(), None);
}

/// What a killed process left: a GPU instance without compute instances, which is no MIG device, beside finished ones.
#[tokio::test(flavor = "multi_thread")]
async fn half_made_layout_is_completed() {
    let node = Node::of("dgx-a100").await;
    node.controller.recut(0, &["1g.5gb@0", "1g.5gb@1"]).unwrap();
    let change = MigChange::CreateGpu { profile: 19, start: Some(2) };
    node.controller.change_mig(0, &change).unwrap();
    assert_eq!(node.apply(&all("1g.5gb: 7")).await, LayoutOutcome::InPlace { changed: true });
    assert_eq!(node.devices(), Some([("1g.5gb".to_owned(), 7)].into()));
}

#[tokio::test(flavor = "multi_thread")]
async fn gpu_without_mig_is_named() {
    let node = Node::of("l4-4x-pcie").await;
    let off = shipped().get("all-disabled").unwrap().clone();
    assert_eq!(node.apply(&off).await, LayoutOutcome::InPlace { changed: false });
    let outcome = node.apply(&all("")).await;
    let LayoutOutcome::Impossible(text) = outcome else { panic!("{outcome:?}") };
    insta::assert_snapshot!(text, @"NVIDIA L4 does not support MIG");
}
