//! CDI names stay with their device, because kubelet restarts the containers of running pods with their names.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;

use gantry_config::{Config, DeviceIdStrategy};
use gantry_plugin::cdi::Class;
use gantry_plugin::inventory::{Device, Inventory};
use gantry_topology::Machine;
use serde_json::Value;

use super::gate::{Gate, is_ready, soon, with};
use super::rules::check;
use super::{cdi, gpu, machine, machine_of, slice};

fn by_index() -> Config {
    Config { device_id_strategy: DeviceIdStrategy::Index, ..cdi() }
}

/// A GPU of this name, with a node that belongs to the name and not to the place.
fn named(uuid: &str, index: u8, minor: u32) -> Device {
    Device { id: uuid.into(), uuid: uuid.to_owned(), minor: Some(minor), ..gpu(index) }
}

/// A MIG device in a GPU instance of GPU 0, with NVML's current `index`.
fn part(instance: u8, index: u8, uuid: &str) -> Device {
    let mut device = slice(0, instance);
    Arc::make_mut(device.slice.as_mut().unwrap()).index = index;
    Device { id: uuid.into(), uuid: uuid.to_owned(), ..device }
}

/// GPU 0 with these MIG devices.
fn cut(parts: &[Device]) -> Inventory {
    Inventory::ready(machine_of(&[gpu(0)], parts), parts.to_vec())
}

/// The device nodes of each name in the specification on disk.
fn written(gate: &Gate) -> BTreeMap<String, Vec<String>> {
    let text = fs::read_to_string(gate.path(Class::Gpu)).unwrap();
    check(&text);
    let spec: Value = serde_json::from_str(&text).unwrap();
    let devices = spec["devices"].as_array().unwrap().iter();
    let nodes = |device: &Value| -> Vec<String> {
        let nodes = device["containerEdits"]["deviceNodes"].as_array().unwrap().iter();
        let path = |node: &Value| node["path"].as_str().unwrap().trim_start_matches("/dev/").to_owned();
        nodes.map(path).collect()
    };
    devices.map(|device| (device["name"].as_str().unwrap().to_owned(), nodes(device))).collect()
}

/// The names of these devices in the response to Allocate.
fn given(gate: &Gate, devices: &[Device]) -> Vec<String> {
    let devices: Vec<&Device> = devices.iter().collect();
    let answer = gate.responder().respond(&devices);
    let names = answer.cdi_devices.into_iter().map(|device| device.name);
    names.map(|name| name.split_once('=').unwrap().1.to_owned()).collect()
}

async fn offer(gate: &mut Gate, inventory: Inventory) {
    let inventory = Arc::new(inventory);
    gate.inventory.send_replace(Arc::clone(&inventory));
    gate.passes(|passed| *passed == inventory).await;
}

#[tokio::test]
async fn changed_mig_layout_moves_no_name() {
    let before = [part(1, 0, "MIG-a"), part(2, 1, "MIG-b"), part(3, 2, "MIG-c")];
    let mut gate = Gate::start_with(by_index(), cut(&before), |_| {});
    gate.passes(is_ready).await;
    assert_eq!(given(&gate, &before), ["0:0", "0:1", "0:2"], "as NVIDIA's plugin names them");
    let first = written(&gate);

    let without = [part(2, 0, "MIG-b"), part(3, 1, "MIG-c")];
    offer(&mut gate, cut(&without)).await;
    assert_eq!(given(&gate, &without), ["0:1", "0:2"]);
    let now = written(&gate);
    assert_eq!(now.keys().collect::<Vec<_>>(), ["0:1", "0:2", "all"]);
    assert_eq!((&now["0:1"], &now["0:2"]), (&first["0:1"], &first["0:2"]));

    let again = [part(1, 0, "MIG-d"), part(2, 1, "MIG-b"), part(3, 2, "MIG-c")];
    offer(&mut gate, cut(&again)).await;
    assert_eq!(given(&gate, &again), ["MIG-d", "0:1", "0:2"], "a name that was another's is not given again");
}

#[tokio::test]
async fn gpu_added_before_others_moves_no_name() {
    let before = [named("GPU-a", 0, 4), named("GPU-b", 1, 5)];
    let mut gate =
        Gate::start_with(by_index(), Inventory::ready(machine_of(&before, &[]), before.to_vec()), |_| {});
    gate.passes(is_ready).await;
    let first = written(&gate);
    assert_eq!(first["0"], ["nvidia4"]);

    let after = [named("GPU-ee", 0, 6), named("GPU-a", 1, 4), named("GPU-b", 2, 5)];
    offer(&mut gate, Inventory::ready(machine_of(&after, &[]), after.to_vec())).await;
    assert_eq!(given(&gate, &after), ["GPU-ee", "0", "1"]);
    let now = written(&gate);
    assert_eq!((&now["0"], &now["1"]), (&first["0"], &first["1"]));
    assert_eq!(now["GPU-ee"], ["nvidia6"]);
}

#[tokio::test]
async fn unoffered_device_keeps_entry_while_present() {
    let parts = [part(1, 0, "MIG-a"), part(2, 1, "MIG-b")];
    let whole = [gpu(1), gpu(2)];
    let machine: Arc<Machine> = machine_of(&[gpu(0), gpu(1), gpu(2)], &parts);
    let all: Vec<Device> = parts.iter().chain(&whole).cloned().collect();
    let mut gate = Gate::start_with(cdi(), Inventory::ready(Arc::clone(&machine), all), |_| {});
    gate.passes(is_ready).await;
    let first = written(&gate);

    // Denied, or of a kind that the MIG strategy does not serve.
    offer(&mut gate, Inventory::ready(machine, vec![gpu(1)])).await;
    let now = written(&gate);
    for name in ["MIG-a", "MIG-b", "GPU-1", "GPU-2"] {
        assert_eq!(now[name], first[name], "{name}");
    }
    assert_eq!(now["all"], ["nvidia1"], "all that is offered");

    // GPUs after a new one have other places, and keep their entries.
    let moved = machine_of(&[named("GPU-ee", 0, 7), named("GPU-1", 1, 1), named("GPU-2", 2, 2)], &[]);
    offer(&mut gate, Inventory::ready(moved, vec![gpu(1)])).await;
    let now = written(&gate);
    assert_eq!(now["GPU-2"], ["nvidia2"]);
    assert!(!now.contains_key("MIG-a"), "it is gone");
}

#[tokio::test]
async fn names_of_both_id_strategies_stay() {
    let devices = [gpu(0), gpu(1)];
    let mut gate = Gate::start_with(cdi(), Inventory::ready(machine(2), devices.to_vec()), |_| {});
    gate.passes(is_ready).await;
    assert_eq!(given(&gate, &devices), ["GPU-0", "GPU-1"]);
    let first = written(&gate);
    for (config, names) in [(by_index(), ["0", "1"]), (cdi(), ["GPU-0", "GPU-1"])] {
        let wanted = config.device_id_strategy;
        gate.config.send_modify(|current| *current = with(current, config));
        let changed = gate.access.wait_for(|access| access.config.device_id_strategy == wanted);
        drop(soon(changed).await.unwrap());
        assert_eq!(given(&gate, &devices), names);
        let now = written(&gate);
        for (index, uuid) in [("0", "GPU-0"), ("1", "GPU-1")] {
            assert_eq!((&now[uuid], &now[index]), (&first[uuid], &first[uuid]));
        }
    }
}
