//! nvml-wrapper, unchanged, as a client: what it reads of each machine is what the machine file says.
#![allow(
    unsafe_code,
    clippy::macro_metavars_in_unsafe,
    clippy::unwrap_used,
    clippy::panic,
    reason = "the C functions are called as C calls them, each block says why it is sound; a test stops at what is wrong"
)]

use std::collections::BTreeSet;

use gantry_nvml_sim::facts::{GpuFacts, Remote};
use nvml_wrapper::enum_wrappers::device::{TemperatureSensor, TopologyLevel};
use nvml_wrapper::{Device, Nvml};

mod common;
use common::{MACHINES, Simulated};

fn open(simulated: &Simulated) -> Nvml {
    Nvml::builder().lib_path(simulated.installed.library.as_os_str()).init().unwrap()
}

#[test]
fn it_reads_the_identity_of_every_gpu_of_every_machine() {
    for name in MACHINES {
        let simulated = Simulated::new(name);
        let nvml = open(&simulated);
        let facts = &simulated.installed.facts;
        assert_eq!(nvml.device_count().unwrap() as usize, facts.gpus.len());
        assert_eq!(nvml.sys_driver_version().unwrap(), facts.driver);
        assert_eq!(nvml.sys_cuda_driver_version().unwrap(), facts.cuda);
        for gpu in &facts.gpus {
            let device = nvml.device_by_index(gpu.index as u32).unwrap();
            assert_identity(&device, gpu);
            let by_uuid = nvml.device_by_uuid(gpu.uuid.as_str()).unwrap();
            assert_eq!(by_uuid.index().unwrap() as usize, gpu.index);
            let by_bus = nvml.device_by_pci_bus_id(gpu.address.to_string()).unwrap();
            assert_eq!(by_bus.index().unwrap() as usize, gpu.index);
        }
        assert!(nvml.device_by_index(facts.gpus.len() as u32).is_err());
    }
}

fn assert_identity(device: &Device<'_>, gpu: &GpuFacts) {
    assert_eq!(device.uuid().unwrap(), gpu.uuid);
    assert_eq!(device.name().unwrap(), gpu.model);
    assert_eq!(device.index().unwrap() as usize, gpu.index);
    assert_eq!(device.minor_number().unwrap(), gpu.minor);
    assert_eq!(device.serial().unwrap(), gpu.serial);
    assert!(device.brand().is_ok());
    assert_eq!(device.architecture().unwrap().as_c(), gpu.product.architecture);
    let capability = device.cuda_compute_capability().unwrap();
    assert_eq!(
        (capability.major, capability.minor),
        (i32::from(gpu.compute_capability.0), i32::from(gpu.compute_capability.1))
    );
    let pci = device.pci_info().unwrap();
    assert_eq!(pci.bus_id, gpu.address.nvml());
    assert_eq!(pci.pci_device_id, u32::from(gpu.product.device_id) << 16 | 0x10de);
    let memory = device.memory_info().unwrap();
    assert_eq!(memory.total, gpu.memory_mib << 20);
    assert_eq!(memory.total, memory.free + memory.used + memory.reserved);
    assert_eq!(device.max_pcie_link_gen().unwrap(), u32::from(gpu.pcie.generation));
    assert_eq!(device.current_pcie_link_width().unwrap(), u32::from(gpu.pcie.width));
    assert_eq!(device.temperature(TemperatureSensor::Gpu).unwrap(), 35);
    assert!(device.running_compute_processes().unwrap().is_empty());
}

#[test]
fn it_reads_cpu_and_memory_affinity() {
    for name in MACHINES {
        let simulated = Simulated::new(name);
        let nvml = open(&simulated);
        for gpu in &simulated.installed.facts.gpus {
            let device = nvml.device_by_index(gpu.index as u32).unwrap();
            let words = device.cpu_affinity(8).unwrap();
            let cpus: Vec<u32> =
                (0..512).filter(|cpu| words[cpu / 64] >> (cpu % 64) & 1 == 1).map(|cpu| cpu as u32).collect();
            let expected: BTreeSet<u32> = gpu.cpus.iter().copied().collect();
            assert_eq!(cpus, Vec::from_iter(expected));
        }
    }
}

#[test]
fn it_finds_the_nearest_gpus_at_each_level() {
    let simulated = Simulated::new("dgx1-v100");
    let nvml = open(&simulated);
    let device = nvml.device_by_index(0).unwrap();
    let nearest = |level| -> Vec<u32> {
        let near = device.topology_nearest_gpus(level).unwrap();
        near.iter().map(|device| device.index().unwrap()).collect()
    };
    assert_eq!(nearest(TopologyLevel::Single), [1]);
    assert_eq!(nearest(TopologyLevel::HostBridge), [2, 3]);
    assert_eq!(nearest(TopologyLevel::System), [4, 5, 6, 7]);
    assert_eq!(nearest(TopologyLevel::Multiple), [] as [u32; 0]);
}

#[test]
fn it_reads_every_nvlink_of_every_machine() {
    for name in MACHINES {
        let simulated = Simulated::new(name);
        let nvml = open(&simulated);
        let facts = &simulated.installed.facts;
        for gpu in &facts.gpus {
            let device = nvml.device_by_index(gpu.index as u32).unwrap();
            for number in 0..18 {
                let link = device.link_wrapper_for(number);
                let remote = gpu.links.get(number as usize);
                if number >= u32::from(gpu.nvlink_count) {
                    assert!(link.is_active().is_err(), "{name}: GPU {} link {number}", gpu.index);
                    continue;
                }
                assert_eq!(link.is_active().unwrap(), remote.is_some());
                let address = match remote {
                    None => {
                        assert!(link.remote_pci_info().is_err());
                        continue;
                    }
                    Some(Remote::Gpu { index, .. }) => facts.gpus[*index].address,
                    Some(Remote::Switch { index }) => facts.switches[*index],
                };
                assert_eq!(link.remote_pci_info().unwrap().bus_id, address.nvml());
            }
        }
    }
}

#[test]
fn several_machines_live_in_one_process() {
    let (small, large) = (Simulated::new("workstation-2x"), Simulated::new("dgx2-16x-v100"));
    let (first, second) = (open(&small), open(&large));
    assert_eq!(first.device_count().unwrap(), 2);
    assert_eq!(second.device_count().unwrap(), 16);
    small.installed.controller.lose_gpu(0).unwrap();
    assert!(first.device_by_index(0).is_err());
    assert!(second.device_by_index(0).is_ok());
}

#[test]
fn xid_ends_a_blocked_wait() {
    use nvml_wrapper::bitmasks::event::EventTypes;
    let simulated = Simulated::new("l4-4x-pcie");
    let nvml = open(&simulated);
    let mut set = nvml.create_event_set().unwrap();
    for index in 0..4 {
        let device = nvml.device_by_index(index).unwrap();
        set = device.register_events(EventTypes::CRITICAL_XID_ERROR, set).unwrap();
    }
    // Its event set may not be shared between threads: the controller goes to the other one.
    std::thread::scope(|scope| {
        scope.spawn(|| simulated.installed.controller.raise_xid(2, 79).unwrap());
        assert_eq!(set.wait(60_000).unwrap().device.index().unwrap(), 2);
    });
}

#[test]
fn it_reads_every_mig_device_of_every_machine() {
    for name in MACHINES {
        let simulated = Simulated::new(name);
        let nvml = open(&simulated);
        for (index, gpu) in (0..).zip(simulated.installed.facts.machine().gpus()) {
            let device = nvml.device_by_index(index).unwrap();
            let Some(mig) = &gpu.mig else {
                assert!(device.mig_mode().is_err(), "{name}");
                continue;
            };
            assert_eq!(device.mig_mode().unwrap().current != 0, mig.enabled, "{name}");
            let most = device.mig_device_count().unwrap();
            let found: BTreeSet<String> = (0..most)
                .filter_map(|index| device.mig_device_by_index(index).ok())
                .map(|mig| {
                    assert!(mig.mig_is_mig_device_handle().unwrap());
                    assert_eq!(mig.mig_parent_device().unwrap().index().unwrap(), index);
                    mig.uuid().unwrap()
                })
                .collect();
            let compute = mig.instances.iter().flat_map(|instance| &instance.compute);
            let written: BTreeSet<String> = compute.map(|compute| compute.uuid.to_string()).collect();
            assert_eq!(found, written, "{name} GPU {index}");
            for uuid in written {
                let by_uuid = nvml.device_by_uuid(uuid.as_str()).unwrap();
                assert_eq!(by_uuid.uuid().unwrap(), uuid);
            }
        }
    }
}

#[test]
fn layout_change_is_seen_with_open_handles() {
    let simulated = Simulated::new("a30-4x-mig");
    let nvml = open(&simulated);
    let device = nvml.device_by_index(0).unwrap();
    let first = device.mig_device_by_index(0).unwrap();
    let memory = first.memory_info().unwrap().total;
    simulated.installed.controller.recut(0, &["4g.24gb"]).unwrap();
    assert!(first.uuid().is_err());
    let whole = device.mig_device_by_index(0).unwrap();
    assert_eq!(whole.memory_info().unwrap().total, 4 * memory);
    assert!(device.mig_device_by_index(1).is_err());
}
