//! The topology files for NCCL, on simulated machines.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod sim;
mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::Arc;
use std::time::Duration;

use gantry_api::DeviceHealth;
use gantry_config::Config;
use gantry_plugin::allocate::{Access, Responder};
use gantry_plugin::discover;
use gantry_plugin::handover::{Holding, Listing};
use gantry_plugin::inventory::{Device, Inventory};
use gantry_plugin::nccl::{CONTAINER_FILE, RAILS, TOPO_FILE, Topology, TopologyFiles, maintain};
use gantry_topology::{Machine, NicSet, PathClass};
use sim::Sim;
use support::probes::a_moment;
use support::{Node, soon};
use tokio::sync::watch;
use tokio_stream::StreamExt;
use tokio_util::sync::CancellationToken;

fn topology(sim: &Sim) -> (Arc<Machine>, Topology) {
    let machine = Arc::new(discover::scan(&sim.options()).unwrap().machine);
    let layout = &sim.installed.layout;
    let topology = Topology::read(&machine, &layout.sys, &layout.proc);
    (machine, topology)
}

/// The elements above each PCIe device of a file, the outermost first; one element is one line.
fn above(text: &str) -> BTreeMap<String, Vec<String>> {
    let value = |line: &str, key: &str| {
        let (_, rest) = line.split_once(&format!("{key}=\""))?;
        Some(rest.split_once('"')?.0.to_owned())
    };
    let mut stack: Vec<String> = Vec::new();
    let mut found = BTreeMap::new();
    for line in text.lines().map(str::trim) {
        let is_open = !line.starts_with("</") && !line.ends_with("/>");
        if let Some(address) = value(line, "busid") {
            found.insert(address, stack.clone());
        }
        if is_open {
            let address = value(line, "busid").or_else(|| value(line, "numaid"));
            stack.push(address.unwrap_or_else(|| line.to_owned()));
        } else if line.starts_with("</") {
            stack.pop();
        }
    }
    assert!(stack.is_empty(), "{stack:?}");
    found
}

/// The class of a path as NCCL sees it: it knows no bridge between host bridges of one NUMA node.
fn class(a: &[String], b: &[String]) -> PathClass {
    let common = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    // The document and the NUMA node come first.
    match common {
        0 | 1 => PathClass::Sys,
        2 => PathClass::Phb,
        common if common == a.len() && common == b.len() => PathClass::Pix,
        _ => PathClass::Pxb,
    }
}

fn as_nccl(class: PathClass) -> PathClass {
    match class {
        PathClass::Node => PathClass::Phb,
        PathClass::Soc => PathClass::Sys,
        other => other,
    }
}

/// For every machine and several sets: exactly the GPUs of the set and their nearest NICs, as far apart as on the machine.
#[test]
fn file_has_exactly_its_gpus_at_their_places() {
    for name in ["hgx-h100", "dgx-a100", "dgx1-v100", "a40-8x-bridged", "dgx2-16x-v100", "workstation-2x"] {
        let sim = Sim::of(name);
        let (machine, topology) = topology(&sim);
        let count = u8::try_from(machine.gpus().len()).unwrap();
        for gpus in [vec![0], vec![0, 1], vec![1, count - 1], (0..count).collect()] {
            let gpus: BTreeSet<u8> = gpus.into_iter().filter(|gpu| *gpu < count).collect();
            let text = topology.xml(&gpus).unwrap();
            let found = above(&text);
            let mut expected: BTreeMap<String, usize> = BTreeMap::new();
            for gpu in gpus.iter().map(|gpu| usize::from(*gpu)) {
                let address = machine.gpus()[gpu].bus_id.as_ref().unwrap();
                expected.insert(address.to_string(), gpu);
                for nic in NicSet::nearest(&machine, gpu).iter() {
                    let address = machine.nics()[nic].bus_id.as_ref().unwrap();
                    expected.insert(address.to_string(), machine.gpus().len() + nic);
                    assert!(text.contains(&format!("<net name=\"{}\"/>", machine.nics()[nic].name)));
                }
            }
            for other in machine.gpus().iter().filter(|gpu| !gpus.contains(&gpu.index)) {
                assert!(!found.contains_key(&other.bus_id.as_ref().unwrap().to_string()), "{name}: {text}");
            }
            for (a, row) in &expected {
                for (b, column) in expected.iter().filter(|(b, _)| *b != a) {
                    // NCCL takes the functions of one device as one.
                    let slot = |address: &str| address.rsplit_once('.').map(|(slot, _)| slot.to_owned());
                    if slot(a) != slot(b) {
                        let on_machine = as_nccl(machine.paths().get(*row, *column));
                        assert_eq!(class(&found[a], &found[b]), on_machine, "{name}: {a} {b} in\n{text}");
                    }
                }
            }
        }
        assert_eq!(topology.xml(&BTreeSet::new()), None);
        assert_eq!(topology.xml(&[200].into()), None);
    }
}

#[test]
fn file_and_rails_of_two_gpus() {
    let sim = Sim::of("hgx-h100");
    fs::write(
        sim.installed.layout.proc.join("cpuinfo"),
        "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\n",
    )
    .unwrap();
    let (_, topology) = topology(&sim);
    insta::assert_snapshot!(topology.xml(&[0, 1].into()).unwrap());
    insta::assert_snapshot!(topology.rails(&[0, 1].into()).unwrap(), @"mlx5_0,mlx5_1");
}

fn device(sim: &Sim, gpu: u8) -> Device {
    Device {
        id: sim.uuid(usize::from(gpu)).into(),
        resource: "nvidia.com/gpu".into(),
        gpu,
        nvml_index: Some(gpu),
        uuid: sim.uuid(usize::from(gpu)).to_owned(),
        health: DeviceHealth { healthy: true, reason: None },
        minor: Some(u32::from(gpu)),
        numa: None,
        slice: None,
        replica: None,
    }
}

/// The container gets the file and the variables; with another configuration it does not.
#[tokio::test]
async fn container_gets_the_file_if_configured() {
    let sim = Sim::of("hgx-h100");
    let (_, topology) = topology(&sim);
    let folder = tempfile::tempdir().unwrap();
    let files = TopologyFiles::at(&folder.path().join("nccl"));
    let config = Arc::new(Config { nccl_topology: true, ..Config::default() });
    let without = Access { config, ..Access::default() };
    let with = Access { topology: Some(Arc::new(topology.clone())), ..without.clone() };
    let (publish, access) = watch::channel(Arc::new(with));
    let responder = Responder::new(access, files);
    let devices = [device(&sim, 2), device(&sim, 0)];
    let response = responder.respond(&devices.iter().collect::<Vec<_>>());
    let [mount] = &response.mounts[..] else { panic!("{:?}", response.mounts) };
    assert_eq!((mount.container_path.as_str(), mount.read_only), (CONTAINER_FILE, true));
    assert_eq!(response.envs[TOPO_FILE], CONTAINER_FILE);
    assert_eq!(response.envs[RAILS], topology.rails(&[0, 2].into()).unwrap());
    assert_eq!(fs::read_to_string(&mount.host_path).unwrap(), topology.xml(&[0, 2].into()).unwrap());

    publish.send_replace(Arc::new(without));
    let response = responder.respond(&[&devices[0]]);
    assert!(response.mounts.is_empty() && response.envs.len() == 1, "{response:?}");
}

/// After a restart of the node the files of running containers are gone, and kubelet mounts them when it starts the
/// containers again.
#[tokio::test]
async fn files_of_listed_containers_are_written_again() {
    let sim = Sim::of("hgx-h100");
    let (machine, topology) = topology(&sim);
    let folder = tempfile::tempdir().unwrap();
    let files = TopologyFiles::at(&folder.path().join("nccl"));
    let inventory = Inventory::ready(machine, (0..8).map(|gpu| device(&sim, gpu)).collect());
    let (_keep, inventory) = watch::channel(Arc::new(inventory));
    let access = Access { topology: Some(Arc::new(topology)), ..Access::default() };
    let (_access, access) = watch::channel(Arc::new(access));
    let (list, listings) = watch::channel(Listing::default());
    let shutdown = CancellationToken::new();
    let task = tokio::spawn(maintain(files.clone(), listings, inventory, access, shutdown.clone()));
    let holding = Holding {
        namespace: "ml".into(),
        pod: "train-0".into(),
        container: "main".into(),
        resource: "nvidia.com/gpu".into(),
    };
    let held = [4, 5].map(|gpu| sim.uuid(gpu).into()).into();
    list.send_replace(Listing([(holding, held)].into()));
    let path = files.path(&[4, 5].into());
    tokio::time::timeout(Duration::from_secs(60), async {
        while !path.exists() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .expect("the file was not written again");
    shutdown.cancel();
    task.await.unwrap();
}

/// The whole daemon: its container gets the file, and a file of a running container comes back when it is lost.
#[tokio::test(flavor = "multi_thread")]
async fn daemon_hands_out_the_file_and_restores_it() {
    let sim = Sim::of("hgx-h100");
    let node = Node::new(0);
    let config = node.directory.path().join("config.yaml");
    fs::write(&config, "version: v1\nflags: {plugin: {ncclTopology: true}}\n").unwrap();
    let node = node.with(|args| {
        sim.use_in(args);
        args.config.config_file = Some(config.display().to_string());
    });
    let (truth, mut kubelet) = (node.truth(), node.kubelet());
    let shutdown = CancellationToken::new();
    let daemon = tokio::spawn(gantry_plugin::run(node.args().clone(), shutdown.clone()));
    let mut plugin = kubelet.plugin().await;
    let mut lists = plugin.watch().await;
    let all_listed = async { while lists.next().await.unwrap().unwrap().devices.len() < 8 {} };
    soon("the devices", all_listed).await;

    let ids = [sim.uuid(2), sim.uuid(3)];
    let container = plugin.allocate(&ids).await.unwrap();
    assert_eq!(container.envs[TOPO_FILE], CONTAINER_FILE);
    assert_eq!(container.envs[RAILS], "mlx5_2,mlx5_3");
    let path = std::path::PathBuf::from(&container.mounts[0].host_path);
    assert!(path.starts_with(&node.args().nccl_root));
    let text = fs::read_to_string(&path).unwrap();
    let machine = sim.installed.facts.machine();
    for gpu in machine.gpus() {
        let address = gpu.bus_id.as_ref().unwrap().as_str();
        assert_eq!(text.contains(address), [2, 3].contains(&gpu.index), "{text}");
    }

    truth.set("train-0", "main", ids.map(str::to_owned));
    fs::remove_dir_all(&node.args().nccl_root).unwrap();
    soon("the file", async {
        while !path.exists() {
            a_moment().await;
        }
    })
    .await;
    assert_eq!(fs::read_to_string(&path).unwrap(), text);
    shutdown.cancel();
    soon("the daemon's end", daemon).await.unwrap().unwrap();
}
