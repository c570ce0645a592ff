use super::*;
use gantry_topology::{Gpu, MachineParts, Nic, NvLinkBundle, NvLinkPorts, PathMatrix};

fn parts(gpus: u8, nics: u8) -> MachineParts {
    let devices = usize::from(gpus) + usize::from(nics);
    MachineParts {
        gpus: (0..gpus).map(|index| Gpu { index, ..Gpu::default() }).collect(),
        nics: (0..nics).map(|index| Nic { name: format!("mlx5_{index}"), ..Nic::default() }).collect(),
        paths: PathMatrix::from_fn(devices, |_, _| PathClass::Node),
        ..MachineParts::default()
    }
}

fn facts(parts: MachineParts) -> Facts {
    Facts::of(&Machine::new(parts).unwrap()).unwrap()
}

#[test]
fn a_bare_file_is_completed_the_same_way_each_time_and_uniquely() {
    let first = facts(parts(8, 2));
    assert_eq!(first, facts(parts(8, 2)));
    for gpu in &first.gpus {
        let others = || first.gpus.iter().filter(|other| other.index != gpu.index);
        assert!(others().all(|other| other.uuid != gpu.uuid && other.serial != gpu.serial));
        assert!(others().all(|other| other.address != gpu.address));
        assert!(first.nics.iter().all(|nic| nic.address != gpu.address));
    }
    let again = Facts::of(first.machine()).unwrap();
    assert!(again.gpus == first.gpus, "completing twice changes nothing");
}

#[test]
fn what_the_file_says_is_kept() {
    let mut given = parts(2, 0);
    given.gpus[1].bus_id = Some("0000:10:00.0".parse().unwrap());
    given.gpus[1].model = Some("NVIDIA L4".to_owned());
    given.gpus[1].memory_mib = Some(7);
    let facts = facts(given);
    assert_eq!(facts.gpus[1].address.to_string(), "0000:10:00.0");
    assert_eq!(facts.gpus[1].memory_mib, 7);
    assert_eq!(facts.gpus[1].compute_capability, (8, 9));
    assert_ne!(facts.gpus[0].address, facts.gpus[1].address);
}

#[test]
fn each_direct_link_is_seen_from_both_ends() {
    let mut given = parts(3, 0);
    for (gpus, links) in [([0, 1], 2), ([1, 2], 1)] {
        given.nvlinks.push(NvLinkBundle { gpus, links });
    }
    let facts = facts(given);
    assert_eq!(facts.gpus[1].links.len(), 3);
    for gpu in &facts.gpus {
        for (link, remote) in gpu.links.iter().enumerate() {
            let Remote::Gpu { index, link: back } = *remote else { panic!("no switch was given") };
            assert_eq!(
                facts.gpus[index].links[usize::from(back)],
                Remote::Gpu { index: gpu.index, link: link as u8 }
            );
        }
    }
}

#[test]
fn switch_links_are_dealt_over_all_switches() {
    let mut given = parts(8, 0);
    for gpu in &mut given.gpus {
        gpu.nvlink = Some(NvLinkPorts { version: Some(3), switch_links: 12, ..NvLinkPorts::default() });
    }
    let facts = facts(given);
    assert_eq!(facts.switches.len(), 6);
    for switch in 0..6 {
        let joined =
            facts.gpus[0].links.iter().filter(|remote| **remote == Remote::Switch { index: switch }).count();
        assert_eq!(joined, 2);
    }
}

#[test]
fn cuda_versions_are_counted_as_nvml_does() {
    assert_eq!(cuda_number("12.8"), 12_080);
    assert_eq!(cuda_number("13.0"), 13_000);
}
