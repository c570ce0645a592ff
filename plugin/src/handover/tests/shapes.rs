//! Replicas and MIG devices: several devices on one GPU.

use super::*;
use crate::inventory::Slice;

/// A device: resource, ID, GPU, and the units of a slice.
type Shape<'r> = (&'r str, String, u8, Option<(u8, u8)>);

/// The same GPUs offered as these devices.
fn offered_as(devices: &[Shape<'_>]) -> Inventory {
    let whole = inventory(8);
    let devices = devices
        .iter()
        .map(|(resource, device, gpu, slice)| Device {
            id: device.as_str().into(),
            resource: (*resource).into(),
            uuid: device.split("::").next().unwrap_or_default().to_owned(),
            replica: device.split_once("::").map(|(_, k)| k.parse().unwrap()),
            slice: slice.map(|(start, size)| {
                Arc::new(Slice {
                    index: start,
                    gpu_instance: start.into(),
                    compute_instance: 0,
                    profile: format!("{size}g"),
                    start,
                    size,
                    caps: None,
                })
            }),
            ..whole.devices[usize::from(*gpu)].clone()
        })
        .collect();
    Inventory::ready(whole.machine, devices)
}

/// Every GPU as four devices of one resource.
fn in_fours(resource: &'static str) -> Inventory {
    let devices: Vec<_> = (0..8)
        .flat_map(|gpu| (0..4).map(move |k| (resource, format!("{}::{k}", id(gpu)), gpu, None)))
        .collect();
    offered_as(&devices)
}

fn asking_for(resource: &str, devices: &Devices, size: usize) -> Request {
    Request { resource: resource.into(), offered: devices.clone(), must: Devices::new(), size }
}

fn all(inventory: &Inventory, resource: &str) -> Devices {
    let devices = inventory.devices.iter();
    let of_resource = devices.filter(|device| device.resource.as_str() == resource);
    of_resource.map(|device| device.id.clone()).collect()
}

fn names(devices: &[&str]) -> Devices {
    devices.iter().map(|device| DeviceId::from(*device)).collect()
}

fn answer(node: &mut Handover, request: Request) -> Devices {
    node.prefer(&[request], WaitFor::default()).unwrap().remove(0).devices
}

#[test]
fn replicas_are_separate_devices_in_grants() {
    let mut node = node();
    let fours = in_fours(GPU);
    node.inventory(&fours);
    let granted = |name: &str, device: &str| {
        let devices = ContainerShare::Devices(vec![device.into()]);
        let container = Container { name: "app".into(), count: 1, share: Some(devices) };
        pod(name, &[container])
    };
    node.observe(granted("a", "GPU-3::0"));
    node.observe(granted("b", "GPU-3::1"));
    assert!(node.notes().is_empty(), "neither is refused");
    let offered = all(&fours, GPU);
    let first = answer(&mut node, asking_for(GPU, &offered, 1));
    assert_eq!(first, names(&["GPU-3::0"]));
    assert_eq!(node.allocate(&GPU.into(), &first, NOW), PlanMatch::Granted);
    let second = answer(&mut node, asking_for(GPU, &(&offered - &first), 1));
    assert_eq!(second, names(&["GPU-3::1"]));
    assert_eq!(node.allocate(&GPU.into(), &second, NOW), PlanMatch::Granted);
    assert_eq!(node.held_by("a"), first);
    // Others go to the GPU with an already split pair.
    let stray = answer(&mut node, asking_for(GPU, &(&(&offered - &first) - &second), 1));
    assert_eq!(stray, names(&["GPU-2::0"]));
}

#[test]
fn gpus_allocated_before_sharing_are_shared_last() {
    let mut node = node();
    node.observe(simple("a", [0]));
    assert_eq!(node.admit(0..8, 1), set([0]));
    let fours = in_fours("nvidia.com/gpu.shared");
    node.inventory(&fours);
    let offered = all(&fours, "nvidia.com/gpu.shared");
    let chosen = answer(&mut node, asking_for("nvidia.com/gpu.shared", &offered, 7));
    assert!(chosen.iter().all(|device| !device.as_str().starts_with("GPU-0::")), "{chosen:?}");
}

#[test]
fn gpu_held_whole_is_shared_last() {
    let mut node = node();
    node.observe(simple("a", [0]));
    assert_eq!(node.admit(0..8, 1), set([0]));
    let fours = in_fours("nvidia.com/gpu.shared");
    node.inventory(&fours);
    let mut offered = all(&fours, "nvidia.com/gpu.shared");
    // One pod after the other, in any order, because no grant decides.
    for pod in 0..28 {
        let chosen = answer(&mut node, asking_for("nvidia.com/gpu.shared", &offered, 1));
        assert!(chosen.iter().all(|device| device.unit() != "GPU-0"), "{pod}: {chosen:?}");
        offered.retain(|device| !chosen.contains(device));
    }
    let last = answer(&mut node, asking_for("nvidia.com/gpu.shared", &offered, 1));
    assert_eq!(last.len(), 1, "kubelet would fail the pod");
}

/// Kubelet's list of one pod with these devices of the whole-GPU resource.
fn listed_by_the_old_name(node: &mut Handover, pod: &str, gpus: impl IntoIterator<Item = u8>) {
    let holding = Holding {
        namespace: "default".into(),
        pod: pod.into(),
        container: "app".into(),
        resource: GPU.into(),
    };
    let ticket = node.listing_begins();
    node.listed(ticket, Listing([(holding, set(gpus))].into()), NOW);
}

#[test]
fn listed_former_name_is_in_use() {
    let fours = in_fours("nvidia.com/gpu.shared");
    let offered = all(&fours, "nvidia.com/gpu.shared");
    // A restarted plugin with another configuration, and one without pods.
    let mut node = node();
    node.inventory(&fours);
    listed_by_the_old_name(&mut node, "a", [0, 1]);
    let chosen = answer(&mut node, asking_for("nvidia.com/gpu.shared", &offered, 6));
    assert!(
        chosen
            .iter()
            .all(|device| !device.as_str().starts_with("GPU-0::") && !device.as_str().starts_with("GPU-1::")),
        "{chosen:?}"
    );
    assert_eq!(node.holders().len(), 1, "and it is in the status");
}

#[test]
fn running_pod_with_former_names_is_not_refused() {
    let mut node = node();
    node.observe(simple("a", [0]));
    node.admit(0..8, 1);
    node.observe(started(simple("a", [0])));
    node.inventory(&in_fours("nvidia.com/gpu.shared"));
    assert_eq!(node.notes(), []);
    assert_eq!(node.held_by("a"), set([0]));
}

#[test]
fn slices_are_packed_beside_used_profiles() {
    let mut node = node();
    let cut: Vec<_> = (0..2)
        .flat_map(|gpu| {
            [
                ("nvidia.com/mig-small", format!("MIG-{gpu}0"), gpu, Some((0, 1))),
                ("nvidia.com/mig-large", format!("MIG-{gpu}4"), gpu, Some((4, 4))),
            ]
        })
        .collect();
    let cut = offered_as(&cut);
    node.inventory(&cut);
    let small = all(&cut, "nvidia.com/mig-small");
    let ask = || asking_for("nvidia.com/mig-small", &small, 1);
    assert_eq!(answer(&mut node, ask()), names(&["MIG-00"]));
    node.allocate(&"nvidia.com/mig-large".into(), &names(&["MIG-14"]), NOW);
    assert_eq!(answer(&mut node, ask()), names(&["MIG-10"]), "GPU 0 stays whole");
}

/// A user may set the node of pods with very many requests: what the plugin keeps of them is bounded, and freed.
#[test]
fn pods_over_the_limit_are_refused_until_others_end() {
    let mut node = node();
    let large = |name: &str| {
        let containers: Vec<_> = (0..900).map(|index| asking(&format!("{name}-{index:060}"), 1)).collect();
        pod(name, &containers)
    };
    let size = large("a").bytes();
    assert!(size < ObservedPod::MAX_BYTES && large("a").check_size(Handover::MAX_BYTES).is_ok());
    let fitting = Handover::MAX_BYTES / size;
    let mut names: Vec<String> = (0..fitting + 10).map(|index| format!("pod-{index}")).collect();
    for name in &names {
        node.observe(large(name));
    }
    let refused = |node: &mut Handover| {
        let notes = node.notes();
        let over =
            |note: &&Note| matches!(note, Note::Refused { refusal: GrantRefusal::OverLimit { .. }, .. });
        notes.iter().filter(over).count()
    };
    assert!(node.pods.len() < names.len() && node.bytes <= Handover::MAX_BYTES);
    assert_eq!(refused(&mut node), names.len() - node.pods.len());
    node.observe(simple("small", [0]));
    assert_eq!(refused(&mut node), 0, "a small pod fits");
    names.push("small".to_owned());
    for name in &names {
        node.remove_pod(&name.as_str().into(), true);
    }
    assert_eq!(node.bytes, 0);
    node.observe(large("later"));
    assert_eq!((node.pods.len(), refused(&mut node)), (1, 0));
}
