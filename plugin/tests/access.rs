//! What containers are given, end to end but for NVML: specifications on disk hold to the rules of CDI whatever the node is like,
//! and what Allocate names is what they have, also while the configuration changes.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use gantry_api::DeviceHealth;
use gantry_plugin::allocate::{Access, Responder};
use gantry_plugin::cdi::{Channels, Class, Host, Kind, Writer, specs};
use gantry_plugin::config::{Config, DeviceIdStrategy, Imex, Strategy};
use gantry_plugin::inventory::{Device, Inventory, Slice, State};
use gantry_plugin::observe::Observed;
use gantry_topology::{Gpu, Host as MachineHost, Machine, MachineParts, PathClass, PathMatrix};
use proptest::prelude::{ProptestConfig, any, prop, prop_assert, proptest};
use proptest::strategy::Strategy as Generator;
use serde_json::Value;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

const VERSION: &str = "570.86.15";

fn gpu(index: u8) -> Device {
    Device {
        id: format!("GPU-{index}").into(),
        resource: "nvidia.com/gpu".into(),
        gpu: index,
        uuid: format!("GPU-{index}"),
        health: DeviceHealth {
            healthy: true,
            reason: None,
        },
        minor: Some(index.into()),
        numa: None,
        slice: None,
        replica: None,
    }
}

fn slice(gpu_index: u8, index: u8) -> Device {
    let cap = 100 * u32::from(gpu_index) + 10 * u32::from(index);
    let uuid = format!("MIG-{gpu_index}-{index}");
    Device {
        id: uuid.as_str().into(),
        resource: "nvidia.com/mig-1g.10gb".into(),
        uuid,
        slice: Some(Arc::new(Slice {
            index,
            gpu_instance: index.into(),
            compute_instance: 0,
            profile: "1g.10gb".into(),
            start: index,
            size: 1,
            caps: Some([cap, cap + 1]),
        })),
        ..gpu(gpu_index)
    }
}

fn machine(gpus: u8) -> Arc<Machine> {
    let parts = MachineParts {
        host: MachineHost {
            driver: Some(VERSION.into()),
            ..MachineHost::default()
        },
        gpus: (0..gpus)
            .map(|index| Gpu {
                index,
                minor: Some(index.into()),
                bus_id: Some(format!("0000:{index:02x}:00.0").parse().unwrap()),
                ..Gpu::default()
            })
            .collect(),
        paths: PathMatrix::from_fn(gpus.into(), |_, _| PathClass::Sys),
        ..MachineParts::default()
    };
    Arc::new(Machine::new(parts).unwrap())
}

fn touch(root: &Path, name: &str) {
    let path = root.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, "").unwrap();
}

/// The root of a Debian host whose driver is installed, with NVIDIA's toolkit or without it.
fn driver_root(toolkit: bool) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    let library = "usr/lib/x86_64-linux-gnu";
    for name in ["libcuda.so", "libnvidia-ml.so"] {
        touch(root.path(), &format!("{library}/{name}.{VERSION}"));
        let link = root.path().join(library).join(format!("{name}.1"));
        std::os::unix::fs::symlink(format!("{name}.{VERSION}"), link).unwrap();
    }
    let files = [
        "usr/bin/nvidia-smi",
        "usr/bin/nvidia-cuda-mps-control",
        "run/nvidia-persistenced/socket",
        &format!("lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin"),
    ];
    for file in files {
        touch(root.path(), file);
    }
    if toolkit {
        touch(root.path(), "usr/bin/nvidia-ctk");
    }
    root
}

fn cdi() -> Config {
    Config {
        device_list_strategy: vec![Strategy::CdiCri],
        ..Config::default()
    }
}

fn text(config: &Config, dev: &Path, sys: &Path, inventory: &Inventory) -> String {
    let host = Host::look(config, &inventory.machine, dev, sys);
    let specs = specs(&Kind::default(), config, inventory, &host);
    assert_eq!(specs.keys().collect::<Vec<_>>(), [&Class::Gpu]);
    specs[&Class::Gpu].text()
}

#[test]
fn a_node_with_driver_and_toolkit_has_this_specification() {
    let (root, dev, sys) = (
        driver_root(true),
        tempfile::tempdir().unwrap(),
        tempfile::tempdir().unwrap(),
    );
    for name in [
        "nvidiactl",
        "nvidia-uvm",
        "nvidia0",
        "dri/card1",
        "dri/renderD128",
    ] {
        touch(dev.path(), name);
    }
    for name in ["card1", "renderD128", "card7"] {
        touch(
            sys.path(),
            &format!("bus/pci/devices/0000:00:00.0/drm/{name}/dev"),
        );
    }
    let config = Config {
        container_driver_root: root.path().into(),
        ..cdi()
    };
    let inventory = Inventory::ready(machine(2), vec![gpu(0), slice(1, 0)]);
    insta::assert_snapshot!(text(&config, dev.path(), sys.path(), &inventory));
}

#[test]
fn a_driver_elsewhere_and_no_toolkit_move_the_hosts_paths_and_mount_what_links_would_lead_to() {
    let (root, dev) = (driver_root(false), tempfile::tempdir().unwrap());
    touch(dev.path(), "nvidiactl");
    let config = Config {
        container_driver_root: root.path().into(),
        driver_root: "/run/nvidia/driver".into(),
        dev_root: "/run/nvidia/driver".into(),
        cdi_hook_path: "/usr/local/nowhere/nvidia-cdi-hook".into(),
        device_id_strategy: DeviceIdStrategy::Index,
        ..cdi()
    };
    let inventory = Inventory::ready(machine(1), vec![gpu(0)]);
    insta::assert_snapshot!(text(&config, dev.path(), Path::new("/nowhere"), &inventory));
}

#[test]
fn a_node_that_is_seen_has_its_numbers_and_a_group_that_it_is_closed_to_others_for() {
    use gantry_plugin::allocate::{Facts, Nodes};
    use gantry_plugin::config::CdiFeature;
    let facts = |minor, mode, gid| Facts {
        numbers: Some((195, minor)),
        mode,
        gid,
    };
    let nodes: Nodes = [
        ("nvidia0".to_owned(), facts(0, 0o666, 7)),
        ("nvidia1".to_owned(), facts(1, 0o660, 44)),
    ]
    .into_iter()
    .collect();
    let host = Host {
        nodes,
        ..Host::default()
    };
    let inventory = Inventory::ready(machine(3), vec![gpu(0), gpu(1), gpu(2)]);
    let written = |flags: &[CdiFeature]| -> Value {
        let config = Config {
            cdi_feature_flags: flags.to_vec(),
            ..cdi()
        };
        let text = specs(&Kind::default(), &config, &inventory, &host)[&Class::Gpu].text();
        check(&text);
        serde_json::from_str(&text).unwrap()
    };
    let spec = written(&[]);
    let edits = |device: usize| spec["devices"][device]["containerEdits"].clone();
    let node = |minor, mode, gid| {
        serde_json::json!({
            "path": format!("/dev/nvidia{minor}"), "type": "c", "major": 195, "minor": minor,
            "fileMode": mode, "permissions": "rwm", "gid": gid
        })
    };
    assert_eq!(edits(0)["deviceNodes"][0], node(0, 0o666, 7));
    assert!(edits(0)["additionalGids"].is_null());
    assert_eq!(edits(1)["deviceNodes"][0], node(1, 0o660, 44));
    assert_eq!(edits(1)["additionalGids"], serde_json::json!([44]));
    let unseen = serde_json::json!({"path": "/dev/nvidia2", "permissions": "rwm"});
    assert_eq!(edits(2)["deviceNodes"][0], unseen);
    let without = written(&[CdiFeature::NoAdditionalGidsForDeviceNodes]);
    assert_eq!(without["cdiVersion"], "0.3.0");
}

#[test]
fn a_hook_that_is_switched_off_is_left_out_and_so_are_sockets_on_request() {
    use gantry_plugin::config::{CdiFeature, CdiHook};
    let root = driver_root(true);
    let config = |hooks: &[CdiHook]| Config {
        container_driver_root: root.path().into(),
        cdi_disabled_hooks: hooks.to_vec(),
        cdi_feature_flags: vec![CdiFeature::DisableIpcDiscoverer],
        ..cdi()
    };
    let inventory = Inventory::ready(machine(1), vec![gpu(0)]);
    let written = |hooks: &[CdiHook]| {
        text(
            &config(hooks),
            Path::new("/nowhere"),
            Path::new("/nowhere"),
            &inventory,
        )
    };
    let some = written(&[CdiHook::EnableCudaCompat]);
    assert!(some.contains("update-ldcache") && !some.contains("enable-cuda-compat"));
    assert!(!some.contains("persistenced/socket"));
    assert!(!written(&[CdiHook::All]).contains("hooks"));
}

/// A gate that runs, and what it is fed.
struct Gate {
    root: tempfile::TempDir,
    inventory: watch::Sender<Arc<Inventory>>,
    config: watch::Sender<Arc<Config>>,
    passed: watch::Receiver<Arc<Inventory>>,
    access: watch::Receiver<Arc<Access>>,
    observed: Arc<Observed>,
    shutdown: CancellationToken,
    task: JoinHandle<()>,
}

impl Gate {
    /// `before` may put things in the way.
    fn start(config: Config, devices: Vec<Device>, before: impl FnOnce(&Path)) -> Self {
        let root = tempfile::tempdir().unwrap();
        before(root.path());
        let config = Arc::new(Config {
            container_driver_root: root.path().join("driver"),
            ..config
        });
        let inventory = watch::Sender::new(Arc::new(Inventory::ready(machine(4), devices)));
        let (pass, passed) = Inventory::channel();
        let at_start = Access::at_start(&config, &root.path().join("dev")).unwrap();
        let (access_sender, access) = watch::channel(Arc::new(at_start));
        let config = watch::Sender::new(config);
        let (observed, shutdown) = (Arc::new(Observed::default()), CancellationToken::new());
        let channels = Channels {
            inventory: inventory.subscribe(),
            config: config.subscribe(),
            passed: pass,
            access: access_sender,
        };
        let task = tokio::spawn(writer(root.path()).gate(channels, Arc::clone(&observed), shutdown.clone()));
        Self {
            root,
            inventory,
            config,
            passed,
            access,
            observed,
            shutdown,
            task,
        }
    }

    fn path(&self, class: Class) -> std::path::PathBuf {
        writer(self.root.path()).path(class)
    }

    async fn passes(&mut self, wanted: impl FnMut(&Arc<Inventory>) -> bool) -> Arc<Inventory> {
        let passed = soon(self.passed.wait_for(wanted)).await.unwrap();
        Arc::clone(&passed)
    }

    async fn problem(&self) -> String {
        let mut changes = self.observed.changes();
        let readiness = soon(changes.wait_for(|readiness| readiness.cdi.is_some()))
            .await
            .unwrap();
        readiness.cdi.clone().unwrap()
    }
}

async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), future)
        .await
        .expect("it did not come about")
}

fn writer(root: &Path) -> Writer {
    Writer {
        root: root.join("cdi"),
        kind: Kind::default(),
        dev_root: root.join("dev"),
        sys_root: root.join("sys"),
    }
}

fn is_ready(inventory: &Arc<Inventory>) -> bool {
    inventory.state == State::Ready
}

fn obstruct(root: &Path) {
    fs::write(root.join("cdi"), "a file where the directory should be").unwrap();
}

#[tokio::test]
async fn a_specification_is_there_before_its_devices_are_offered_and_gone_at_the_end() {
    let mut gate = Gate::start(cdi(), vec![gpu(0), gpu(1)], |_| {});
    gate.passes(is_ready).await;
    let path = gate.path(Class::Gpu);
    assert_eq!(path.file_name().unwrap(), "k8s.device-plugin.nvidia.com-gpu.json");
    assert_eq!(
        names(&fs::read_to_string(&path).unwrap()),
        ["GPU-0", "GPU-1", "all"]
    );
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o644);
    gate.shutdown.cancel();
    soon(gate.task).await.unwrap();
    assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 0);
}

#[tokio::test]
async fn devices_that_no_runtime_could_resolve_are_held_back_and_readiness_says_why() {
    let gate = Gate::start(cdi(), vec![gpu(0)], obstruct);
    assert!(
        gate.problem()
            .await
            .contains("k8s.device-plugin.nvidia.com-gpu.json cannot be written")
    );
    assert_eq!(gate.passed.borrow().state, State::Starting);
}

#[tokio::test]
async fn after_the_first_time_a_failure_makes_only_the_new_devices_unhealthy() {
    let mut gate = Gate::start(cdi(), vec![gpu(0)], |_| {});
    gate.passes(is_ready).await;
    fs::remove_dir_all(gate.root.path().join("cdi")).unwrap();
    obstruct(gate.root.path());
    gate.inventory
        .send_replace(Arc::new(Inventory::ready(machine(4), vec![gpu(0), gpu(1)])));
    let inventory = gate.passes(|inventory| inventory.devices.len() == 2).await;
    assert!(inventory.devices[0].health.healthy);
    let reason = inventory.devices[1].health.reason.as_deref().unwrap();
    assert!(reason.contains("not written yet"), "{reason}");
}

#[tokio::test]
async fn a_device_whose_node_is_unknown_is_unhealthy_where_cdi_is_the_only_way() {
    let unknown = Device {
        minor: None,
        ..gpu(1)
    };
    for (ways, healthy) in [
        (vec![Strategy::CdiCri], false),
        (vec![Strategy::Envvar, Strategy::CdiCri], true),
        (vec![Strategy::Envvar], true),
    ] {
        let config = Config {
            device_list_strategy: ways.clone(),
            ..Config::default()
        };
        let mut gate = Gate::start(config, vec![gpu(0), unknown.clone()], |_| {});
        let inventory = gate.passes(is_ready).await;
        assert!(inventory.devices[0].health.healthy);
        assert_eq!(inventory.devices[1].health.healthy, healthy, "{ways:?}");
        let response = Responder::new(gate.access.clone()).respond(&[&unknown]);
        assert!(response.cdi_devices.is_empty());
    }
}

#[tokio::test]
async fn a_configuration_comes_into_force_once_its_specifications_are_there() {
    let mut gate = Gate::start(Config::default(), vec![gpu(0)], obstruct);
    gate.passes(is_ready).await;
    let responder = Responder::new(gate.access.clone());
    gate.config.send_modify(|config| *config = with(config, cdi()));
    gate.problem().await;
    assert_eq!(
        responder.respond(&[&gpu(0)]).envs["NVIDIA_VISIBLE_DEVICES"],
        "GPU-0"
    );

    fs::remove_file(gate.root.path().join("cdi")).unwrap();
    // Not because of the change, but because it looks again.
    let changed = gate
        .access
        .wait_for(|access| access.config.device_list_strategy == [Strategy::CdiCri]);
    drop(soon(changed).await.unwrap());
    assert!(gate.path(Class::Gpu).exists());
    let response = responder.respond(&[&gpu(0)]);
    assert_eq!(
        response.cdi_devices[0].name,
        "k8s.device-plugin.nvidia.com/gpu=GPU-0"
    );
    assert!(response.envs.is_empty());
}

#[tokio::test]
async fn files_of_classes_that_are_switched_off_are_removed_also_those_of_an_earlier_run() {
    let on = || Config {
        gdrcopy: true,
        ..cdi()
    };
    let before = |root: &Path| {
        touch(root, "dev/gdrdrv");
        touch(root, "cdi/k8s.device-plugin.nvidia.com-mofed.json");
        touch(root, "cdi/nvidia.com-gpu.json");
    };
    let mut gate = Gate::start(on(), vec![gpu(0)], before);
    gate.passes(is_ready).await;
    assert!(gate.path(Class::Gdrcopy).exists() && !gate.path(Class::Mofed).exists());
    gate.config.send_modify(|config| *config = with(config, cdi()));
    drop(
        soon(gate.access.wait_for(|access| !access.config.gdrcopy))
            .await
            .unwrap(),
    );
    assert!(!gate.path(Class::Gdrcopy).exists() && gate.path(Class::Gpu).exists());
    let others = gate.root.path().join("cdi/nvidia.com-gpu.json");
    assert!(others.exists(), "a file of somebody else's");
}

#[tokio::test]
async fn a_slice_that_is_made_at_run_time_is_written_before_it_is_offered() {
    let mut gate = Gate::start(cdi(), vec![gpu(0)], |_| {});
    gate.passes(is_ready).await;
    let devices = vec![gpu(0), slice(1, 0)];
    gate.inventory
        .send_replace(Arc::new(Inventory::ready(machine(4), devices)));
    let inventory = gate.passes(|inventory| inventory.devices.len() == 2).await;
    assert!(inventory.devices.iter().all(|device| device.health.healthy));
    let text = fs::read_to_string(gate.path(Class::Gpu)).unwrap();
    assert_eq!(names(&text), ["GPU-0", "MIG-1-0", "all"]);
}

#[tokio::test]
async fn a_driver_that_is_not_mounted_degrades_and_does_not_hold_back() {
    let mut gate = Gate::start(cdi(), vec![gpu(0)], |_| {});
    gate.passes(is_ready).await;
    let degraded = gate.observed.changes().borrow().degraded();
    assert!(
        degraded.iter().any(|text| text.contains("no driver library")),
        "{degraded:?}"
    );
}

fn with(current: &Config, config: Config) -> Arc<Config> {
    Arc::new(Config {
        container_driver_root: current.container_driver_root.clone(),
        ..config
    })
}

fn names(text: &str) -> Vec<String> {
    let spec: Value = serde_json::from_str(text).unwrap();
    let devices = spec["devices"].as_array().unwrap().iter();
    devices
        .map(|device| device["name"].as_str().unwrap().to_owned())
        .collect()
}

/// What the CDI specification demands of a file, as its reference implementation checks it.
fn check(text: &str) {
    let spec: Value = serde_json::from_str(text).unwrap();
    keys(&spec, &["cdiVersion", "kind", "containerEdits", "devices"]);
    let (vendor, class) = spec["kind"].as_str().unwrap().split_once('/').unwrap();
    assert!(
        is_word(vendor, "-_.", false) && is_word(class, "-_", false),
        "{vendor} {class}"
    );
    let devices = spec["devices"].as_array().unwrap();
    assert!(!devices.is_empty(), "a specification needs a device");
    let mut seen = BTreeSet::new();
    let mut newest = edits_version(&spec["containerEdits"]);
    for device in devices {
        keys(device, &["name", "containerEdits"]);
        let name = device["name"].as_str().unwrap();
        assert!(is_word(name, "-_.:", true), "{name}");
        assert!(seen.insert(name), "{name} twice");
        let edits = &device["containerEdits"];
        assert!(!edits.as_object().unwrap().is_empty(), "{name} adds nothing");
        newest = newest.max(edits_version(edits));
        if name.starts_with(|first: char| first.is_ascii_digit()) {
            newest = newest.max("0.5.0");
        }
    }
    assert_eq!(
        spec["cdiVersion"], newest,
        "the oldest version that knows the content"
    );
}

fn edits_version(edits: &Value) -> &'static str {
    let mut version = "0.3.0";
    if edits.is_null() {
        return version;
    }
    keys(
        edits,
        &["env", "deviceNodes", "mounts", "hooks", "additionalGids"],
    );
    let list = |name: &str| edits[name].as_array().cloned().unwrap_or_default();
    for variable in list("env") {
        assert!(variable.as_str().unwrap().find('=').unwrap() > 0);
    }
    for node in list("deviceNodes") {
        keys(
            &node,
            &[
                "path",
                "hostPath",
                "type",
                "major",
                "minor",
                "fileMode",
                "permissions",
                "gid",
            ],
        );
        assert!(node["path"].as_str().unwrap().starts_with("/dev/"));
        assert!(
            node["permissions"]
                .as_str()
                .unwrap()
                .bytes()
                .all(|byte| b"rwm".contains(&byte))
        );
        assert_eq!(node["type"].is_null(), node["major"].is_null());
        if !node["hostPath"].is_null() {
            version = "0.5.0";
        }
    }
    for mount in list("mounts") {
        keys(&mount, &["hostPath", "containerPath", "options"]);
        for end in ["hostPath", "containerPath"] {
            assert!(mount[end].as_str().unwrap().starts_with('/'), "{mount}");
        }
    }
    for hook in list("hooks") {
        keys(&hook, &["hookName", "path", "args"]);
        assert_eq!(hook["hookName"], "createContainer");
        assert!(hook["path"].as_str().unwrap().starts_with('/'));
    }
    if list("additionalGids").is_empty() {
        return version;
    }
    assert!(list("additionalGids").iter().all(|gid| *gid != 0));
    "0.7.0"
}

fn keys(value: &Value, known: &[&str]) {
    for key in value.as_object().unwrap().keys() {
        assert!(known.contains(&key.as_str()), "CDI knows no {key} here");
    }
}

fn is_word(text: &str, more: &str, digit_first: bool) -> bool {
    let first = text.chars().next().unwrap();
    (first.is_ascii_alphabetic() || digit_first && first.is_ascii_digit())
        && text.ends_with(|last: char| last.is_ascii_alphanumeric())
        && text
            .chars()
            .all(|char| char.is_ascii_alphanumeric() || more.contains(char))
}

fn any_device() -> impl Generator<Value = Device> {
    let any_uuid = prop::option::of("MIG-GPU-[0-9a-f]{4}/[0-9]/[0-9]|[ -~]{1,12}");
    (
        0..4_u8,
        prop::option::of(0..3_u8),
        any_uuid,
        any::<bool>(),
        any::<bool>(),
    )
        .prop_map(|(index, part, uuid, known, caps)| {
            let mut device = part.map_or_else(|| gpu(index), |part| slice(index, part));
            if let Some(uuid) = uuid {
                device.uuid = uuid;
            }
            if !known {
                device.minor = None;
            }
            if let Some(slice) = device.slice.as_mut().filter(|_| !caps) {
                Arc::make_mut(slice).caps = None;
            }
            device
        })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_specification_holds_to_the_rules_of_cdi(
        devices in prop::collection::vec(any_device(), 0..8),
        there in prop::sample::subsequence(vec!["nvidiactl", "nvidia-uvm", "gdrdrv", "nvidia-fs0", "infiniband/uverbs0", "nvidia-caps-imex-channels/channel0"], 0..=6),
        [index, elsewhere, toolkit, driver] in any::<[bool; 4]>(),
    ) {
        let (root, dev) = (driver_root(toolkit), tempfile::tempdir().unwrap());
        for name in there {
            touch(dev.path(), name);
        }
        let moved = if elsewhere { "/run/nvidia/driver" } else { "/" };
        let config = Config {
            device_id_strategy: if index { DeviceIdStrategy::Index } else { DeviceIdStrategy::Uuid },
            container_driver_root: if driver { root.path().into() } else { "/nowhere".into() },
            driver_root: moved.into(),
            dev_root: moved.into(),
            gdrcopy: true,
            gds: true,
            mofed: true,
            imex: Imex { channel: true, required: false },
            ..cdi()
        };
        let inventory = Inventory::ready(machine(4), devices);
        let host = Host::look(&config, &inventory.machine, dev.path(), Path::new("/nowhere"));
        let written: BTreeMap<Class, _> = specs(&Kind::default(), &config, &inventory, &host);
        for spec in written.values() {
            check(&spec.text());
        }
        let given = inventory.devices.iter().any(|device| device.minor.is_some());
        prop_assert!(written.contains_key(&Class::Gpu) == given);
    }
}
