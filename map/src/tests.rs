use gantry_api::GpuNode;
use serde_json::json;

use crate::fixtures::{gang, gpu_node, holder};
use crate::*;

const DGX1: &str = include_str!("../../simulator/machines/dgx1-v100.yaml");
const A40: &str = include_str!("../../simulator/machines/a40-8x-bridged.yaml");

fn drawn(map: &ClusterMap, columns: usize) -> String {
    let mut letters = Letters::default();
    letters.learn(map);
    text(map, &letters, Page { columns, color: false, wide: false })
}

fn ids(node: &GpuNode, gpus: &[usize]) -> Vec<String> {
    let machine = &node.spec.machine;
    gpus.iter()
        .filter_map(|gpu| machine.gpus()[*gpu].uuid.as_ref())
        .map(|uuid| uuid.as_str().to_owned())
        .collect()
}

#[test]
fn map_shows_links_holders_reservations_and_faults() {
    let a40 = gpu_node("a40", A40, &[("pair", &[0, 1])], &[3]);
    let mut dgx1 = gpu_node("dgx1", DGX1, &[("train-0", &[0, 1])], &[]);
    let train =
        gang("train", &[("train-0", "dgx1", ids(&dgx1, &[0, 1])), ("train-1", "dgx1", ids(&dgx1, &[2, 3]))]);
    let status = dgx1.status.as_mut().unwrap();
    let leaving = serde_json::from_value({
        let mut leaving = holder("old", &[status.devices[7].id.to_string()]);
        leaving["state"] = "Quarantined".into();
        leaving
    });
    status.holders.push(leaving.unwrap());
    let granted = serde_json::from_value({
        let mut granted = holder("new", &[status.devices[4].id.to_string()]);
        granted["provenance"] = "Granted".into();
        granted
    });
    status.holders.push(granted.unwrap());
    let map = ClusterMap::of(&[dgx1, a40], &[train], |_| String::new());
    insta::assert_snapshot!(drawn(&map, 100));
    assert_eq!(map.node("dgx1").unwrap().free_gpus, 2);
    insta::assert_snapshot!("map.json", serde_json::to_string_pretty(map.node("dgx1").unwrap()).unwrap());
}

/// 500 nodes are a page: alike nodes of one rack are one line, and one with a fault stands by itself.
#[test]
fn alike_nodes_are_one_line_of_their_domain() {
    let free = gpu_node("", DGX1, &[], &[]);
    let held = gpu_node("", DGX1, &[("", &[0, 1, 2, 3, 4, 5, 6, 7])], &[]);
    let unhealthy = gpu_node("", DGX1, &[], &[5]);
    let nodes: Vec<GpuNode> = (0..500)
        .map(|node| {
            let mut object = match node {
                42 => unhealthy.clone(),
                node if node % 10 < 5 => free.clone(),
                _ => held.clone(),
            };
            object.metadata.name = Some(format!("n{node:03}"));
            for holder in &mut object.status.as_mut().unwrap().holders {
                holder.pod = format!("big-{node}");
            }
            object
        })
        .collect();
    let pods: Vec<String> = (0..500).map(|node| format!("big-{node}")).collect();
    let members: Vec<(&str, &str, Vec<String>)> =
        pods.iter().map(|pod| (pod.as_str(), "elsewhere", Vec::new())).collect();
    let map = ClusterMap::of(&nodes, &[gang("big", &members)], |node| format!("rack r{}", &node[1..2]));
    insta::assert_snapshot!(drawn(&map, 80));
}

#[test]
fn shared_gpu_shows_that_part_of_it_is_free() {
    let mut node = gpu_node("n", DGX1, &[], &[]);
    let status = node.status.as_mut().unwrap();
    status.devices = (0..16u16)
        .map(|device| {
            serde_json::from_value(json!({
                "id": format!("gpu-{}::{}", device / 2, device % 2), "resource": "nvidia.com/gpu", "gpu": device / 2,
                "replica": device % 2, "healthy": true,
            }))
            .unwrap()
        })
        .collect();
    let held = |pod, devices: &[&str]| {
        serde_json::from_value(holder(pod, &devices.iter().map(|id| (*id).to_owned()).collect::<Vec<_>>()))
            .unwrap()
    };
    status.holders = vec![held("a", &["gpu-0::0", "gpu-0::1"]), held("b", &["gpu-1::1"])];
    let map = ClusterMap::of(&[node], &[], |_| String::new());
    let states: Vec<GpuState> = map.nodes[0].gpus.iter().take(3).map(|gpu| gpu.state).collect();
    assert_eq!(states, [GpuState::Held, GpuState::PartlyHeld, GpuState::Free]);
    insta::assert_snapshot!(drawn(&map, 80), @r"
      n  [0 a]─[1+b]═[2 ·]═[3 ·] │ [4 ·]─[5 ·]═[6 ·]═[7 ·]  a a, b b

    1 node, 8 GPUs: 6 free, 1 held, 1 partly held
    [0 a] held by a   [1?a] granted to a   [2+a] shared, part is free   [3 ·] free
    [4~a] reserved for gang a   [5!a] a is deleted, its processes may still run   [6 x] unhealthy   [7 /] cordoned
    ═ several NVLinks to the neighbour   ─ one   │ another NUMA node
    ");
}

/// The tooltips of a picture, one a line.
fn tooltips(picture: &str) -> String {
    let titles = picture.split("<title>").skip(1).filter_map(|rest| rest.split("</title>").next());
    titles.collect::<Vec<_>>().join("\n")
}

/// Names of others must not control the terminal or the page.
#[test]
fn hostile_names_are_escaped() {
    let mut node = gpu_node("n", DGX1, &[("<script>\u{1b}[2J", &[0])], &[]);
    node.metadata.name = Some("evil\u{1b}[31m<b>".to_owned());
    node.status.as_mut().unwrap().devices[3].health =
        gantry_api::DeviceHealth { healthy: false, reason: Some("\u{1b}]0;x\u{7}\n".to_owned()) };
    let map = ClusterMap::of(&[node], &[], |_| "rack \u{1b}[7m".to_owned());
    assert!(!drawn(&map, 80).contains('\u{1b}'), "{:?}", drawn(&map, 80));
    let picture = svg(&map);
    assert!(
        !picture.contains('\u{1b}') && !picture.contains("<script>") && !picture.contains("<b>"),
        "{picture}"
    );
}

#[test]
fn svg_has_a_box_and_a_tooltip_per_gpu() {
    let map = ClusterMap::of(&[gpu_node("dgx1", DGX1, &[("train", &[0, 1])], &[3])], &[], |_| String::new());
    insta::assert_snapshot!(tooltips(&svg(&map)), @r"
    dgx1 GPU 0: held, default/train
    dgx1 GPU 1: held, default/train
    dgx1 GPU 2: free
    dgx1 GPU 3: unhealthy; Xid 79: GPU has fallen off the bus
    dgx1 GPU 4: free
    dgx1 GPU 5: free
    dgx1 GPU 6: free
    dgx1 GPU 7: free
    ");
}

/// Pods that hold a cordoned GPU go on, and a fault of it is still shown.
#[test]
fn cordoned_gpus_are_shown_with_reason_and_holder() {
    let mut node = gpu_node("n", DGX1, &[("train", &[1])], &[2]);
    for gpu in [0, 1, 2] {
        let uuid = node.spec.machine.gpus()[gpu].uuid.clone().unwrap();
        let annotations = node.metadata.annotations.get_or_insert_default();
        annotations.insert(gantry_api::Cordon::annotation(&uuid), "fan".to_owned());
    }
    // As the plugin publishes it once it has read the annotation.
    node.status.as_mut().unwrap().devices[0].health =
        gantry_api::DeviceHealth { healthy: false, reason: Some("cordoned: fan".to_owned()) };
    let map = ClusterMap::of(&[node], &[], |_| String::new());
    let states: Vec<GpuState> = map.nodes[0].gpus.iter().take(4).map(|gpu| gpu.state).collect();
    assert_eq!(states, [GpuState::Cordoned, GpuState::Cordoned, GpuState::Unhealthy, GpuState::Free]);
    insta::assert_snapshot!(drawn(&map, 100), @r"
      n  [0 /]─[1/a]═[2 x]═[3 ·] │ [4 ·]─[5 ·]═[6 ·]═[7 ·]  a train

    n GPU 0: cordoned: fan
    n GPU 1: cordoned: fan
    n GPU 2: Xid 79: GPU has fallen off the bus
    n GPU 2: cordoned: fan

    1 node, 8 GPUs: 5 free, 2 cordoned, 1 unhealthy
    [0 a] held by a   [1?a] granted to a   [2+a] shared, part is free   [3 ·] free
    [4~a] reserved for gang a   [5!a] a is deleted, its processes may still run   [6 x] unhealthy   [7 /] cordoned
    ═ several NVLinks to the neighbour   ─ one   │ another NUMA node
    ");
    insta::assert_snapshot!(tooltips(&svg(&map)), @r"
    n GPU 0: cordoned; cordoned: fan
    n GPU 1: cordoned, default/train; cordoned: fan
    n GPU 2: unhealthy; Xid 79: GPU has fallen off the bus; cordoned: fan
    n GPU 3: free
    n GPU 4: free
    n GPU 5: free
    n GPU 6: free
    n GPU 7: free
    ");
}
