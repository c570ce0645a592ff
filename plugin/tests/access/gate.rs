//! When specifications are written and removed, and which devices are published meanwhile.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use gantry_api::DeviceHealth;
use gantry_config::{Config, Strategy};
use gantry_plugin::allocate::{Access, Responder};
use gantry_plugin::cdi::{Channels, Class, Kind, Writer};
use gantry_plugin::inventory::{Device, Inventory, State};
use gantry_plugin::nccl::TopologyFiles;
use gantry_plugin::observe::Observations;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::rules::names;
use super::{cdi, gpu, machine, slice, touch};

/// A running gate and its inputs.
pub(super) struct Gate {
    pub(super) root: tempfile::TempDir,
    pub(super) inventory: watch::Sender<Arc<Inventory>>,
    pub(super) config: watch::Sender<Arc<Config>>,
    passed: watch::Receiver<Arc<Inventory>>,
    pub(super) access: watch::Receiver<Arc<Access>>,
    observed: Arc<Observations>,
    shutdown: CancellationToken,
    task: JoinHandle<()>,
}

impl Gate {
    /// `before` may create obstacles.
    fn start(config: Config, devices: Vec<Device>, before: impl FnOnce(&Path)) -> Self {
        Self::start_with(config, Inventory::ready(machine(4), devices), before)
    }

    pub(super) fn start_with(config: Config, inventory: Inventory, before: impl FnOnce(&Path)) -> Self {
        let root = tempfile::tempdir().unwrap();
        lay_down_nodes(&root.path().join("dev"));
        before(root.path());
        let config = Arc::new(Config { container_driver_root: root.path().join("driver"), ..config });
        let inventory = watch::Sender::new(Arc::new(inventory));
        let (pass, passed) = Inventory::channel();
        let at_start = Access::at_start(&config, &root.path().join("dev")).unwrap();
        let (access_sender, access) = watch::channel(Arc::new(at_start));
        let config = watch::Sender::new(config);
        let (observed, shutdown) = (Arc::new(Observations::default()), CancellationToken::new());
        let channels = Channels {
            inventory: inventory.subscribe(),
            config: config.subscribe(),
            passed: pass,
            access: access_sender,
        };
        let task = tokio::spawn(writer(root.path()).gate(channels, Arc::clone(&observed), shutdown.clone()));
        Self { root, inventory, config, passed, access, observed, shutdown, task }
    }

    pub(super) fn path(&self, class: Class) -> std::path::PathBuf {
        writer(self.root.path()).path(class)
    }

    pub(super) fn responder(&self) -> Responder {
        Responder::new(self.access.clone(), writer(self.root.path()).nccl)
    }

    pub(super) async fn passes(&mut self, wanted: impl FnMut(&Arc<Inventory>) -> bool) -> Arc<Inventory> {
        let passed = soon(self.passed.wait_for(wanted)).await.unwrap();
        Arc::clone(&passed)
    }

    /// What containers lack on this node, once they lack something.
    async fn lacks(&self) -> String {
        let mut changes = self.observed.changes();
        let readiness = soon(changes.wait_for(|readiness| !readiness.lacks.is_empty())).await.unwrap();
        self.relative(&readiness.lacks.join("\n"))
    }

    /// Waits until the reason of a device is what containers lack on this node too.
    async fn lacks_too(&self, reason: &str) {
        let mut changes = self.observed.changes();
        let has = |line: &String| line == reason;
        soon(changes.wait_for(|readiness| readiness.lacks.iter().any(has))).await.unwrap();
    }

    async fn problem(&self) -> String {
        let mut changes = self.observed.changes();
        let readiness = soon(changes.wait_for(|readiness| readiness.cdi.is_some())).await.unwrap();
        self.relative(readiness.cdi.as_ref().unwrap())
    }

    /// A text without the path of the test's folder.
    fn relative(&self, text: &str) -> String {
        text.replace(self.root.path().to_str().unwrap(), "")
    }
}

/// The device nodes of eight GPUs with eight MIG devices each.
fn lay_down_nodes(dev: &Path) {
    for name in ["nvidiactl", "nvidia-uvm"] {
        touch(dev, name);
    }
    for gpu in 0..8 {
        touch(dev, &format!("nvidia{gpu}"));
        for slice in 0..8 {
            let cap = 100 * gpu + 10 * slice;
            touch(dev, &format!("nvidia-caps/nvidia-cap{cap}"));
            touch(dev, &format!("nvidia-caps/nvidia-cap{}", cap + 1));
        }
    }
}

pub(super) async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), future).await.expect("it did not come about")
}

fn writer(root: &Path) -> Writer {
    Writer {
        root: root.join("cdi"),
        kind: Kind::default(),
        dev_root: root.join("dev"),
        sys_root: root.join("sys"),
        proc_root: root.join("proc"),
        nccl: TopologyFiles::at(&root.join("nccl")),
    }
}

pub(super) fn is_ready(inventory: &Arc<Inventory>) -> bool {
    inventory.state == State::Ready
}

fn obstruct(root: &Path) {
    fs::write(root.join("cdi"), "a file where the directory should be").unwrap();
}

#[tokio::test]
async fn spec_is_written_before_offer_and_removed_at_end() {
    let mut gate = Gate::start(cdi(), vec![gpu(0), gpu(1)], |_| {});
    gate.passes(is_ready).await;
    let path = gate.path(Class::Gpu);
    assert_eq!(path.file_name().unwrap(), "k8s.device-plugin.nvidia.com-gpu.json");
    assert_eq!(names(&fs::read_to_string(&path).unwrap()), ["GPU-0", "GPU-1", "all"]);
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o644);
    gate.shutdown.cancel();
    soon(gate.task).await.unwrap();
    assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 0);
}

#[tokio::test]
async fn unresolvable_devices_are_held_back_and_not_ready() {
    let gate = Gate::start(cdi(), vec![gpu(0)], obstruct);
    insta::assert_snapshot!(gate.problem().await, @"the CDI specification /cdi/k8s.device-plugin.nvidia.com-gpu.json cannot be written: File exists (os error 17)");
    assert_eq!(gate.passed.borrow().state, State::Starting);
}

#[tokio::test]
async fn later_write_failure_affects_new_devices_only() {
    let mut gate = Gate::start(cdi(), vec![gpu(0)], |_| {});
    gate.passes(is_ready).await;
    fs::remove_dir_all(gate.root.path().join("cdi")).unwrap();
    obstruct(gate.root.path());
    gate.inventory.send_replace(Arc::new(Inventory::ready(machine(4), vec![gpu(0), gpu(1)])));
    let inventory = gate.passes(|inventory| inventory.devices.len() == 2).await;
    assert!(inventory.devices[0].health.healthy);
    insta::assert_snapshot!(gate.relative(inventory.devices[1].health.reason.as_deref().unwrap()), @"its CDI specification is not written yet");
}

/// The host is read on a thread of the runtime's pool, which has one here, and that one is busy.
#[test]
fn health_does_not_wait_for_reading_the_host() {
    for config in [cdi(), Config::default()] {
        health_goes_before_the_look(config);
    }
}

fn health_goes_before_the_look(config: Config) {
    let runtime =
        tokio::runtime::Builder::new_current_thread().max_blocking_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        let mut gate = Gate::start(config, vec![gpu(0), gpu(1)], |_| {});
        gate.passes(is_ready).await;
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let busy = tokio::task::spawn_blocking(move || ended.recv());
        let mut unhealthy = gpu(1);
        unhealthy.health = DeviceHealth { healthy: false, reason: Some("Xid 79".to_owned()) };
        let inventory = |devices| Arc::new(Inventory::ready(machine(4), devices));
        gate.inventory.send_replace(inventory(vec![gpu(0), unhealthy.clone()]));
        let passed =
            gate.passes(|inventory| inventory.devices.iter().any(|device| !device.health.healthy)).await;
        assert_eq!(passed.devices[1].health, unhealthy.health);
        gate.inventory.send_replace(inventory(vec![gpu(0), unhealthy, gpu(2)]));
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        assert_eq!(gate.passed.borrow().devices.len(), 2, "the host has not been looked at yet");
        drop(end);
        gate.passes(|inventory| inventory.devices.len() == 3).await;
        assert!(busy.await.unwrap().is_err());
    });
}

#[tokio::test]
async fn device_without_node_is_unhealthy_with_cdi_alone() {
    let unknown = Device { minor: None, ..gpu(1) };
    for (ways, healthy) in [
        (vec![Strategy::CdiCri], false),
        (vec![Strategy::Envvar, Strategy::CdiCri], true),
        (vec![Strategy::Envvar], true),
    ] {
        let config = Config { device_list_strategy: ways.clone(), ..Config::default() };
        let mut gate = Gate::start(config, vec![gpu(0), unknown.clone()], |_| {});
        let inventory = gate.passes(is_ready).await;
        assert!(inventory.devices[0].health.healthy);
        assert_eq!(inventory.devices[1].health.healthy, healthy, "{ways:?}");
        let response = gate.responder().respond(&[&unknown]);
        assert!(response.cdi_devices.is_empty());
    }
}

/// The sysfs of this machine has no PCIe devices: the node says so, and the container is served without the file.
#[tokio::test]
async fn unknown_pcie_positions_give_no_nccl_topology() {
    let config = Config { nccl_topology: true, ..Config::default() };
    let mut gate = Gate::start(config, vec![gpu(0)], |_| {});
    gate.passes(is_ready).await;
    insta::assert_snapshot!(gate.lacks().await, @"containers get no NCCL topology file: the PCIe position of a GPU is unknown");
    let response = gate.responder().respond(&[&gpu(0)]);
    assert!(response.mounts.is_empty() && !response.envs.contains_key("NCCL_TOPO_FILE"));
    assert_eq!(response.envs["NVIDIA_VISIBLE_DEVICES"], "GPU-0");
}

#[tokio::test]
async fn config_takes_effect_once_specs_are_written() {
    let mut gate = Gate::start(Config::default(), vec![gpu(0)], obstruct);
    gate.passes(is_ready).await;
    let responder = gate.responder();
    gate.config.send_modify(|config| *config = with(config, cdi()));
    gate.problem().await;
    assert_eq!(responder.respond(&[&gpu(0)]).envs["NVIDIA_VISIBLE_DEVICES"], "GPU-0");

    fs::remove_file(gate.root.path().join("cdi")).unwrap();
    // Not because of the change, but at the next interval.
    let changed = gate.access.wait_for(|access| access.config.device_list_strategy == [Strategy::CdiCri]);
    drop(soon(changed).await.unwrap());
    assert!(gate.path(Class::Gpu).exists());
    let response = responder.respond(&[&gpu(0)]);
    assert_eq!(response.cdi_devices[0].name, "k8s.device-plugin.nvidia.com/gpu=GPU-0");
    assert!(response.envs.is_empty());
}

#[tokio::test]
async fn specs_of_an_earlier_run_are_removed() {
    let before = |root: &Path| {
        touch(root, "cdi/k8s.device-plugin.nvidia.com-mofed.json");
        touch(root, "cdi/nvidia.com-gpu.json");
    };
    let mut gate = Gate::start(cdi(), vec![gpu(0)], before);
    gate.passes(is_ready).await;
    assert!(gate.path(Class::Gpu).exists() && !gate.path(Class::Mofed).exists());
    let others = gate.root.path().join("cdi/nvidia.com-gpu.json");
    assert!(others.exists(), "a file of somebody else's");
}

#[tokio::test]
async fn overwritten_spec_is_written_again() {
    let mut gate = Gate::start(cdi(), vec![gpu(0)], |_| {});
    gate.passes(is_ready).await;
    let path = gate.path(Class::Gpu);
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, "{}").unwrap();
    // It reads the host every few seconds, and after every change.
    let unhealthy =
        Device { health: DeviceHealth { healthy: false, reason: Some("Xid 79".into()) }, ..gpu(0) };
    gate.inventory.send_replace(Arc::new(Inventory::ready(machine(4), vec![unhealthy])));
    soon(async {
        while fs::read_to_string(&path).unwrap() != text {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn specs_of_a_successor_stay_at_end() {
    let mut gate = Gate::start(cdi(), vec![gpu(0)], |_| {});
    gate.passes(is_ready).await;
    let path = gate.path(Class::Gpu);
    let text = fs::read_to_string(&path).unwrap();
    let beside = path.with_extension("successor");
    fs::write(&beside, &text).unwrap();
    fs::rename(&beside, &path).unwrap();
    gate.shutdown.cancel();
    soon(gate.task).await.unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), text);
}

#[tokio::test]
async fn disabled_spec_stays_on_disk_for_restarts() {
    let on = || Config { gdrcopy: true, ..cdi() };
    let mut gate = Gate::start(on(), vec![gpu(0)], |root| touch(root, "dev/gdrdrv"));
    gate.passes(is_ready).await;
    let responder = gate.responder();
    // Kubelet keeps the names of a pod's container and does not allocate again.
    gate.config.send_modify(|config| *config = with(config, Config::default()));
    drop(soon(gate.access.wait_for(|access| !access.config.gdrcopy)).await.unwrap());
    assert!(gate.path(Class::Gdrcopy).exists() && gate.path(Class::Gpu).exists());
    assert!(responder.respond(&[&gpu(0)]).cdi_devices.is_empty(), "and new ones are given none");
    gate.config.send_modify(|config| *config = with(config, on()));
    drop(soon(gate.access.wait_for(|access| access.config.gdrcopy)).await.unwrap());
    assert_eq!(responder.respond(&[&gpu(0)]).cdi_devices.len(), 2);
    gate.shutdown.cancel();
    soon(gate.task).await.unwrap();
    assert_eq!(fs::read_dir(gate.root.path().join("cdi")).unwrap().count(), 0);
}

#[tokio::test]
async fn new_slice_is_written_before_it_is_offered() {
    let mut gate = Gate::start(cdi(), vec![gpu(0)], |_| {});
    gate.passes(is_ready).await;
    let devices = vec![gpu(0), slice(1, 0)];
    gate.inventory.send_replace(Arc::new(Inventory::ready(machine(4), devices)));
    let inventory = gate.passes(|inventory| inventory.devices.len() == 2).await;
    assert!(inventory.devices.iter().all(|device| device.health.healthy));
    let text = fs::read_to_string(gate.path(Class::Gpu)).unwrap();
    assert_eq!(names(&text), ["GPU-0", "MIG-1-0", "all"]);
}

#[tokio::test]
async fn missing_driver_files_degrade_but_devices_are_offered() {
    let mut gate = Gate::start(cdi(), vec![gpu(0)], |_| {});
    gate.passes(is_ready).await;
    insta::assert_snapshot!(gate.lacks().await, @"no driver library was found under the container driver root (--container-driver-root): containers get device nodes by CDI and no library");
}

/// Nothing loads nvidia_uvm on a host that runs CUDA in containers only.
#[tokio::test]
async fn missing_control_node_makes_devices_unhealthy() {
    let specs = || Config { pass_device_specs: true, ..Config::default() };
    let mut texts = Vec::new();
    for config in [cdi(), specs()] {
        let mut gate = Gate::start(config, vec![gpu(0), gpu(1)], |root| {
            fs::remove_file(root.join("dev/nvidia-uvm")).unwrap();
        });
        let passed = gate.passes(is_ready).await;
        let reasons: Vec<_> =
            passed.devices.iter().filter_map(|device| device.health.reason.as_deref()).collect();
        assert_eq!(reasons.len(), 2);
        gate.lacks_too(reasons[0]).await;
        texts.push(gate.relative(reasons[0]));
        touch(&gate.root.path().join("dev"), "nvidia-uvm");
        gate.passes(|inventory| inventory.devices.iter().all(|device| device.health.healthy)).await;
    }
    insta::assert_snapshot!(texts.join("\n"), @r"
    /dev/nvidia-uvm is missing on the node, and containers cannot use CUDA; load the module (modprobe nvidia_uvm; nvidia-modprobe -u -c 0)
    /dev/nvidia-uvm is missing on the node, and containers cannot use CUDA; load the module (modprobe nvidia_uvm; nvidia-modprobe -u -c 0)
    ");
}

#[tokio::test]
async fn missing_node_of_one_gpu_is_its_own() {
    let mut gate = Gate::start(cdi(), vec![gpu(0), gpu(1)], |root| {
        fs::remove_file(root.join("dev/nvidia1")).unwrap();
    });
    let passed = gate.passes(is_ready).await;
    assert!(passed.devices[0].health.healthy);
    insta::assert_snapshot!(gate.relative(passed.devices[1].health.reason.as_deref().unwrap()), @"/dev/nvidia1 is missing on the node; run nvidia-modprobe -c 1 there");
}

/// The driver's package was updated, and the kernel still runs the old module. Then it is removed.
#[tokio::test]
async fn replaced_driver_files_make_devices_unhealthy() {
    let mut texts = Vec::new();
    for config in [Config::default(), cdi()] {
        let library = |version: &str| format!("driver/usr/lib64/libcuda.so.{version}");
        let put = |root: &Path, version: &str| {
            touch(root, &library(version));
            fs::write(root.join(library(version)), "not empty").unwrap();
        };
        let mut gate = Gate::start(config, vec![gpu(0)], |root| put(root, "570.86.15"));
        let healthy =
            |inventory: &Arc<Inventory>| inventory.devices.iter().all(|device| device.health.healthy);
        gate.passes(|inventory| is_ready(inventory) && healthy(inventory)).await;
        put(gate.root.path(), "570.124.06");
        fs::remove_file(gate.root.path().join(library("570.86.15"))).unwrap();
        let passed = gate.passes(|inventory| !healthy(inventory)).await;
        let reason = passed.devices[0].health.reason.as_deref().unwrap();
        gate.lacks_too(reason).await;
        texts.push(gate.relative(reason));
        put(gate.root.path(), "570.86.15");
        gate.passes(|inventory| healthy(inventory)).await;
        for version in ["570.124.06", "570.86.15"] {
            fs::remove_file(gate.root.path().join(library(version))).unwrap();
        }
        let passed = gate.passes(|inventory| !healthy(inventory)).await;
        texts.push(gate.relative(passed.devices[0].health.reason.as_deref().unwrap()));
    }
    insta::assert_snapshot!(texts.join("\n"), @r"
    the driver's libraries are of 570.124.06, the kernel driver is 570.86.15: drain the node and reload the kernel module, or reboot
    the driver's libraries were removed, the kernel driver is 570.86.15: install the libraries of 570.86.15 again
    the driver's libraries are of 570.124.06, the kernel driver is 570.86.15: drain the node and reload the kernel module, or reboot
    the driver's libraries were removed, the kernel driver is 570.86.15: install the libraries of 570.86.15 again
    ");
}

pub(super) fn with(current: &Config, config: Config) -> Arc<Config> {
    Arc::new(Config { container_driver_root: current.container_driver_root.clone(), ..config })
}
