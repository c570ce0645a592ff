use std::fs;

use gantry_topology::{Gpu, Machine, MachineParts, Nic, PathClass, PathMatrix};
use proptest::prelude::*;

use super::*;

fn facts(gpus: u8, numa: &[Option<u32>], class: impl FnMut(usize, usize) -> PathClass) -> Facts {
    let devices = numa.len();
    let machine = Machine::new(MachineParts {
        gpus: (0..gpus)
            .map(|index| Gpu {
                index,
                numa: numa[usize::from(index)].map(|node| node.to_string().parse().unwrap()),
                cpus: numa[usize::from(index)]
                    .map(|node| format!("{}-{}", node * 8, node * 8 + 7).parse().unwrap()),
                ..Gpu::default()
            })
            .collect(),
        nics: (usize::from(gpus)..devices)
            .map(|device| Nic {
                name: format!("mlx5_{}", device - usize::from(gpus)),
                numa: numa[device].map(|node| u16::try_from(node).unwrap()),
                ..Nic::default()
            })
            .collect(),
        paths: PathMatrix::from_fn(devices, class),
        ..MachineParts::default()
    });
    Facts::of(&machine.unwrap()).unwrap()
}

/// Two GPUs on a switch, a third behind another switch of the same port, a NIC on the other socket.
fn small() -> Facts {
    facts(3, &[Some(0), Some(0), Some(0), Some(1)], |row, column| match (row, column) {
        (1, 0) => PathClass::Pix,
        (2, _) => PathClass::Pxb,
        _ => PathClass::Sys,
    })
}

/// A place in the hierarchy: NUMA node, host bridge, root port, switch. Pairs of places give classes that are ultrametric.
fn class_of_places(a: [u8; 4], b: [u8; 4]) -> PathClass {
    let shared = a.iter().zip(b).take_while(|(a, b)| **a == *b).count();
    [PathClass::Sys, PathClass::Node, PathClass::Phb, PathClass::Pxb, PathClass::Pix][shared]
}

proptest! {
    #[test]
    fn a_reader_of_sysfs_finds_the_classes_of_the_file(
        places in proptest::collection::vec(prop::array::uniform4(0u8..3), 2..24)
    ) {
        let numa: Vec<_> = places.iter().map(|place| Some(u32::from(place[0]))).collect();
        let gpus = (places.len() as u8).min(16) / 2 + 1;
        let facts = facts(gpus, &numa, |row, column| class_of_places(places[row], places[column]));
        prop_assert_eq!(Tree::of(&facts).misfits, vec![]);
    }

    #[test]
    fn tree_names_every_pair_that_it_cannot_show(
        classes in proptest::collection::vec(0usize..6, 28),
        numa in proptest::collection::vec(proptest::option::of(0u32..3), 8),
    ) {
        let facts = facts(5, &numa, |row, column| PathClass::ALL[classes[row * (row - 1) / 2 + column]]);
        let tree = Tree::of(&facts);
        prop_assert_eq!(tree.endpoints.len(), 8);
        for second in 0..8 {
            for first in 0..second {
                let given = facts.machine().paths().get(first, second);
                let shown = class_between(&tree.endpoints[first], &tree.endpoints[second]);
                let named = tree.misfits.iter().any(|misfit| (misfit.first, misfit.second) == (first, second));
                let same = given == shown || (given == PathClass::Soc && shown == PathClass::Sys);
                prop_assert_eq!(named, !same);
            }
        }
    }
}

#[test]
fn bridges_take_addresses_that_no_device_has() {
    let facts = small();
    let tree = Tree::of(&facts);
    let mut folders: Vec<(usize, &str)> = Vec::new();
    for endpoint in &tree.endpoints {
        for (depth, part) in endpoint.path.iter().enumerate() {
            folders.push((depth, part));
        }
    }
    folders.sort_unstable();
    folders.dedup();
    let mut names: Vec<&str> = folders.iter().map(|(_, name)| *name).collect();
    names.sort_unstable();
    let before = names.len();
    names.dedup();
    assert_eq!(names.len(), before, "one address stands at two places of the tree");
}

#[test]
fn contradicting_class_is_named_and_the_rest_fits() {
    // 0 and 1 on one switch, 1 and 2 on one switch, yet 0 and 2 far apart.
    let facts =
        facts(
            3,
            &[Some(0); 3],
            |row, column| {
                if (row, column) == (2, 0) { PathClass::Node } else { PathClass::Pix }
            },
        );
    let misfits = Tree::of(&facts).misfits;
    assert_eq!(misfits.len(), 1);
    assert_eq!(
        misfits[0].to_string(),
        "devices 0 and 2: the file says NODE, but no PCI tree with its other paths shows more than PIX"
    );
}

#[test]
fn a_client_finds_each_device_through_the_bus_and_back() {
    let root = tempfile::tempdir().unwrap();
    let facts = small();
    let layout = lay_down(&facts, root.path()).unwrap();
    for gpu in &facts.gpus {
        let device = layout.sys.join("bus/pci/devices").join(gpu.address.to_string());
        assert_eq!(fs::read_to_string(device.join("vendor")).unwrap(), "0x10de\n");
        assert_eq!(fs::read_to_string(device.join("numa_node")).unwrap(), "0\n");
        assert_eq!(fs::read_to_string(device.join("local_cpulist")).unwrap(), "0-7\n");
        assert_eq!(fs::read_to_string(device.join("current_link_speed")).unwrap(), "16.0 GT/s PCIe\n");
        let real = fs::canonicalize(&device).unwrap();
        assert!(real.starts_with(fs::canonicalize(layout.sys.join("devices")).unwrap()));
        assert!(fs::canonicalize(device.join("driver")).unwrap().ends_with("bus/pci/drivers/nvidia"));
        let information = layout.proc.join("driver/nvidia/gpus").join(gpu.address.to_string());
        let information = fs::read_to_string(information.join("information")).unwrap();
        assert!(information.contains(&gpu.uuid) && information.contains("Device Minor: \t "));
    }
    let nic = &facts.nics[0];
    let rdma = layout.sys.join("class/infiniband/mlx5_0");
    assert_eq!(
        fs::canonicalize(rdma.join("device")).unwrap(),
        fs::canonicalize(layout.sys.join("bus/pci/devices").join(nic.address.to_string())).unwrap()
    );
    assert_eq!(fs::read_to_string(rdma.join("device/numa_node")).unwrap(), "1\n");
    assert_eq!(fs::read_to_string(layout.sys.join("devices/system/node/online")).unwrap(), "0-1\n");
    assert_eq!(fs::read_to_string(layout.sys.join("devices/system/node/node0/cpulist")).unwrap(), "0-7\n");
}

#[test]
fn device_files_are_nodes_or_describe_themselves() {
    use std::os::unix::fs::{FileTypeExt, MetadataExt};
    let root = tempfile::tempdir().unwrap();
    let layout = lay_down(&small(), root.path()).unwrap();
    for (name, minor) in [("nvidia0", 0), ("nvidia2", 2), ("nvidiactl", 255)] {
        let path = layout.dev.join(name);
        let found = fs::metadata(&path).unwrap();
        if layout.device_nodes {
            assert!(found.file_type().is_char_device());
            assert_eq!(found.rdev(), libc::makedev(195, minor));
        } else {
            assert_eq!(fs::read_to_string(path).unwrap(), format!("{MARK} 195:{minor}\n"));
        }
    }
}

#[test]
fn rewriting_replaces_and_removal_keeps_foreign_files() {
    let root = tempfile::tempdir().unwrap();
    let count = |path: &std::path::Path| fs::read_dir(path).unwrap().count();
    lay_down(&small(), root.path()).unwrap();
    fs::write(root.path().join("dev/mine"), "kept").unwrap();
    let fewer = facts(1, &[Some(0)], |_, _| PathClass::Sys);
    let layout = lay_down(&fewer, root.path()).unwrap();
    assert!(!layout.sys.join("class").exists(), "the NIC is gone");
    assert_eq!(count(&layout.proc.join("driver/nvidia/gpus")), 1);
    layout.remove().unwrap();
    assert_eq!(count(root.path()), 1);
    assert_eq!(fs::read_to_string(root.path().join("dev/mine")).unwrap(), "kept");
    layout.remove().unwrap();
}

#[test]
fn a_list_that_leads_out_of_the_root_removes_nothing_there() {
    let outer = tempfile::tempdir().unwrap();
    let victim = outer.path().join("victim");
    fs::write(&victim, "kept").unwrap();
    let root = outer.path().join("root");
    fs::create_dir(&root).unwrap();
    fs::write(root.join(".gantry-companion"), format!("../victim\n{}\n", victim.display())).unwrap();
    remove(&root).unwrap();
    assert_eq!(fs::read_to_string(victim).unwrap(), "kept");
}

#[test]
fn capabilities_are_numbered_as_on_a_real_machine() {
    // From the mig-minors of a DGX A100.
    assert_eq!(minor(0, 0, None), 3);
    assert_eq!(minor(0, 0, Some(0)), 4);
    assert_eq!(minor(0, 7, None), 66);
    assert_eq!(minor(0, 7, Some(0)), 67);
    assert_eq!(minor(1, 0, None), 138);
}
