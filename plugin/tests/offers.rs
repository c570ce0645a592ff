//! The offer of shared GPUs and MIG devices to kubelet: simulated hardware, the real inventory and offer, the daemon, and a kubelet.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod sim;
mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gantry_config::{Config, MigStrategy, ReplicatedDevices, ReplicatedResource, SharedDevices, TimeSlicing};
use gantry_plugin::health::HealthChecks;
use gantry_plugin::inventory::{Hardware, NvmlThread, Settings, Timing};
use gantry_plugin::offer;
use gantry_topology::Machine;
use sim::Sim;
use support::{FakeKubelet, Node, Plugin, soon};
use tokio::sync::watch;
use tokio_stream::StreamExt;
use tonic::Code;

/// A node of simulated GPUs with its kubelet.
struct Scene {
    _sim: Sim,
    config: watch::Sender<Arc<Config>>,
    kubelet: FakeKubelet,
    plugins: BTreeMap<String, Plugin>,
    node: Node,
    _nvml_thread: NvmlThread,
}

impl Scene {
    fn of(machine: &str, config: Config) -> Self {
        let sim = Sim::of(machine);
        let (config, configs) = watch::channel(Arc::new(config));
        let settings = Settings {
            nvml_library: sim.options().library,
            config: configs.clone(),
            proc_root: sim.installed.layout.proc.clone(),
            sys_root: sim.installed.layout.sys.clone(),
            dev_root: sim.installed.layout.dev.clone(),
            fabric_mode: None,
        };
        let (found, hardware) = Hardware::channel();
        let nvml_thread =
            NvmlThread::start(&settings, HealthChecks::default(), Timing::default(), found).unwrap();
        let mut node = Node::new(0);
        let kubelet = node.kubelet();
        node.boot();
        let stop = node.shutdown.clone();
        tokio::spawn(offer::follow(hardware, configs, node.inventory.clone(), stop));
        Self { _sim: sim, config, kubelet, plugins: BTreeMap::new(), node, _nvml_thread: nvml_thread }
    }

    /// The plugin of a resource, once it is registered.
    async fn plugin(&mut self, resource: &str) -> &mut Plugin {
        while !self.plugins.contains_key(resource) {
            let registration = self.kubelet.registration().await;
            let plugin = Plugin::dial(&self.node.plugins().join(registration.endpoint)).await;
            self.plugins.insert(registration.resource_name, plugin);
        }
        self.plugins.get_mut(resource).unwrap()
    }

    /// The IDs in the first list of each of these resources.
    async fn ids(&mut self, resources: &[&str]) -> BTreeMap<String, BTreeSet<String>> {
        let mut ids = BTreeMap::new();
        for resource in resources {
            let mut stream = self.plugin(resource).await.watch().await;
            let list = soon("a list", stream.next()).await.unwrap().unwrap();
            let of_list: BTreeSet<String> = list.devices.iter().map(|device| device.id.clone()).collect();
            assert_eq!(of_list.len(), list.devices.len(), "no ID twice");
            ids.insert((*resource).to_owned(), of_list);
        }
        let known: BTreeSet<&str> = self.plugins.keys().map(String::as_str).collect();
        assert_eq!(known, resources.iter().copied().collect(), "and no other resource");
        ids
    }
}

fn with(strategy: MigStrategy) -> Config {
    Config { mig_strategy: strategy, ..Config::default() }
}

fn shared(resource: &str, replicas: u16, fail_requests_greater_than_one: bool) -> Config {
    Config {
        time_slicing: Some(TimeSlicing {
            rename_by_default: true,
            fail_requests_greater_than_one,
            resources: vec![ReplicatedResource {
                name: resource.into(),
                rename: None,
                devices: ReplicatedDevices::All,
                replicas,
            }],
        }),
        ..with(MigStrategy::Mixed)
    }
}

/// Whole GPUs and MIG devices of a machine by their resources with the strategy `mixed`.
fn by_profile(machine: &Machine) -> BTreeMap<String, BTreeSet<String>> {
    let mut expected: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for gpu in machine.gpus() {
        match gpu.mig.as_ref().filter(|mig| mig.enabled) {
            None => {
                let ids = expected.entry("nvidia.com/gpu".to_owned()).or_default();
                ids.insert(gpu.uuid.as_ref().unwrap().to_string());
            }
            Some(mig) => {
                for device in mig.instances.iter().flat_map(|instance| &instance.compute) {
                    let name = format!("nvidia.com/mig-{}", device.profile.replace('+', "."));
                    expected.entry(name).or_default().insert(device.uuid.to_string());
                }
            }
        }
    }
    expected
}

fn written(machine: &str) -> Machine {
    let text = std::fs::read_to_string(sim::machines().join(format!("{machine}.yaml"))).unwrap();
    gantry_topology::read(&text).unwrap()
}

#[tokio::test]
async fn mixed_registers_every_profile_and_whole_gpus() {
    for machine in ["dgx-a100-mig", "h200-8x-mig", "rtx-pro-6000-4x-mig"] {
        let expected = by_profile(&written(machine));
        let mut scene = Scene::of(machine, with(MigStrategy::Mixed));
        let resources: Vec<&str> = expected.keys().map(String::as_str).collect();
        assert_eq!(scene.ids(&resources).await, expected, "{machine}");
    }
    let h200 = by_profile(&written("h200-8x-mig"));
    assert!(h200.contains_key("nvidia.com/mig-1c.3g.71gb"), "compute sub-slices too");
}

#[tokio::test]
async fn single_registers_slices_as_gpus() {
    let mut scene = Scene::of("hgx-h100-mig", with(MigStrategy::Single));
    let ids = scene.ids(&["nvidia.com/gpu"]).await;
    assert_eq!(ids["nvidia.com/gpu"], by_profile(&written("hgx-h100-mig"))["nvidia.com/mig-1g.10gb"]);
    assert_eq!(ids["nvidia.com/gpu"].len(), 56);
}

#[tokio::test]
async fn strategy_none_serves_whole_gpus_only() {
    let mut scene = Scene::of("dgx-a100-mig", Config::default());
    let ids = scene.ids(&["nvidia.com/gpu"]).await;
    assert_eq!(ids["nvidia.com/gpu"], by_profile(&written("dgx-a100-mig"))["nvidia.com/gpu"]);
    let excluded = scene.node.inventory.borrow().excluded.clone();
    assert_eq!(excluded.iter().map(|excluded| excluded.gpu).collect::<Vec<_>>(), [4, 5, 6, 7]);
}

#[tokio::test]
async fn slices_of_gpus_in_use_are_preferred() {
    let mut scene = Scene::of("hgx-h100-mig", with(MigStrategy::Mixed));
    let resource = "nvidia.com/mig-1g.10gb";
    scene.plugin(resource).await;
    let devices = scene.node.inventory.borrow().devices.clone();
    let on = |gpu: u8| {
        let of_gpu = devices.iter().filter(move |device| device.gpu == gpu);
        of_gpu.map(|device| device.id.as_str()).collect::<Vec<_>>()
    };
    // All devices are free except two slices of GPU 5.
    let (used, rest) = (&on(5)[..2], &on(5)[2..]);
    let offered: Vec<&str> =
        devices.iter().map(|device| device.id.as_str()).filter(|id| !used.contains(id)).collect();
    let chosen = scene.plugin(resource).await.prefer(&offered, &[], 5).await;
    assert_eq!(chosen, rest.iter().map(ToString::to_string).collect());
    let one = scene.plugin(resource).await.prefer(&offered, &[], 1).await;
    assert_eq!(one, [rest[0].to_owned()].into(), "the half that is broken already");
}

#[tokio::test]
async fn distributed_policy_spreads_slices() {
    let config = Config { shared_devices: Some(SharedDevices::Distributed), ..with(MigStrategy::Mixed) };
    let mut scene = Scene::of("hgx-h100-mig", config);
    let resource = "nvidia.com/mig-1g.10gb";
    scene.plugin(resource).await;
    let devices = scene.node.inventory.borrow().devices.clone();
    let of_resource = || devices.iter().filter(|device| device.resource.as_str() == resource);
    let gpu_of = |id: &str| of_resource().find(|device| device.id.as_str() == id).unwrap().gpu;
    let gpus: BTreeSet<u8> = of_resource().map(|device| device.gpu).collect();
    // All devices are free except one slice of the first GPU.
    let offered: Vec<&str> = of_resource().skip(1).map(|device| device.id.as_str()).collect();
    let one = scene.plugin(resource).await.prefer(&offered, &[], 1).await;
    assert_ne!(gpu_of(one.first().unwrap()), *gpus.first().unwrap());
    let all = i32::try_from(gpus.len()).unwrap();
    let chosen = scene.plugin(resource).await.prefer(&offered, &[], all).await;
    assert_eq!(chosen.iter().map(|id| gpu_of(id)).collect::<BTreeSet<u8>>(), gpus);
}

#[tokio::test]
async fn replicas_are_taken_from_distinct_gpus() {
    let mut scene = Scene::of("dgx1-v100", shared("nvidia.com/gpu", 10, false));
    let ids = scene.ids(&["nvidia.com/gpu.shared"]).await;
    let all: Vec<&str> = ids["nvidia.com/gpu.shared"].iter().map(String::as_str).collect();
    assert_eq!(all.len(), 80);
    let plugin = scene.plugin("nvidia.com/gpu.shared").await;
    let chosen = plugin.prefer(&all, &[], 4).await;
    let gpus: BTreeSet<&str> = chosen.iter().filter_map(|id| id.split("::").next()).collect();
    assert_eq!(gpus.len(), 4);
    let uuid = all[0].split("::").next().unwrap();
    let answer = plugin.allocate(&[&format!("{uuid}::7"), &format!("{uuid}::2")]).await.unwrap();
    assert_eq!(answer.envs["NVIDIA_VISIBLE_DEVICES"], uuid);
}

#[tokio::test]
async fn several_replicas_are_refused_if_configured() {
    let mut scene = Scene::of("workstation-2x", shared("nvidia.com/gpu", 2, true));
    let ids = scene.ids(&["nvidia.com/gpu.shared"]).await;
    let all: Vec<&str> = ids["nvidia.com/gpu.shared"].iter().map(String::as_str).collect();
    let plugin = scene.plugin("nvidia.com/gpu.shared").await;
    assert!(plugin.allocate(&all[..1]).await.is_ok());
    let refused = plugin.allocate(&[all[0], all[3]]).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert!(
        refused.message().starts_with(
            "invalid allocation request for \"nvidia.com/gpu.shared\": invalid request: maximum request size for shared resources is 1; found 2"
        ),
        "{}",
        refused.message()
    );
    let unknown = plugin.allocate(&["GPU-none::0"]).await.unwrap_err();
    assert!(
        unknown.message().starts_with(
            "invalid allocation request for \"nvidia.com/gpu.shared\": invalid request: unknown device: GPU-none::0"
        ),
        "{}",
        unknown.message()
    );
}

#[tokio::test]
async fn changed_config_is_offered_without_restart() {
    let mut scene = Scene::of("workstation-2x", Config::default());
    let mut stream = scene.plugin("nvidia.com/gpu").await.watch().await;
    let before = soon("the first list", stream.next()).await.unwrap().unwrap();
    assert_eq!(before.devices.len(), 2);
    scene.config.send_replace(Arc::new(shared("nvidia.com/gpu", 3, false)));
    let after = soon("the empty list", stream.next()).await.unwrap().unwrap();
    assert!(after.devices.is_empty());
    let mut renamed = scene.plugin("nvidia.com/gpu.shared").await.watch().await;
    let list = soon("the new list", renamed.next()).await.unwrap().unwrap();
    assert_eq!(list.devices.len(), 6);
    scene.config.send_replace(Arc::new(Config::default()));
    let back = soon("the old list", stream.next()).await.unwrap().unwrap();
    assert_eq!(back.devices, before.devices);
}

#[tokio::test]
async fn set_chosen_from_previous_list_is_served() {
    let mut scene = Scene::of("workstation-2x", Config::default());
    let ids = scene.ids(&["nvidia.com/gpu"]).await;
    let all: Vec<&str> = ids["nvidia.com/gpu"].iter().map(String::as_str).collect();
    let mut stream = scene.plugin("nvidia.com/gpu").await.watch().await;
    soon("the first list", stream.next()).await.unwrap().unwrap();
    scene.config.send_replace(Arc::new(shared("nvidia.com/gpu", 3, true)));
    // The new list is on its way while kubelet allocates: an error would fail the pod for good.
    assert!(soon("the empty list", stream.next()).await.unwrap().unwrap().devices.is_empty());
    let answer = scene.plugin("nvidia.com/gpu").await.allocate(&all).await.unwrap();
    assert_eq!(answer.envs["NVIDIA_VISIBLE_DEVICES"], all.join(","));
    // And a replica beyond the new number of them.
    let plugin = scene.plugin("nvidia.com/gpu.shared").await;
    let former = format!("{}::5", all[1]);
    let answer = plugin.allocate(&[&former]).await.unwrap();
    assert_eq!(answer.envs["NVIDIA_VISIBLE_DEVICES"], all[1]);
    let denied = Config { deny: vec![gantry_config::Selector::Uuid(all[1].to_owned())], ..Config::default() };
    scene.config.send_replace(Arc::new(denied));
    soon("the list of one", stream.next()).await.unwrap().unwrap();
    let refused = scene.plugin("nvidia.com/gpu").await.allocate(&[all[1]]).await;
    assert!(refused.is_err(), "what may not be served is not");
}
