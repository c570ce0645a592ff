//! Discovery against the simulated library: the result equals the machine file.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod sim;

use std::path::Path;

use gantry_plugin::discover::{self, DiscoverError, NvmlOptions};
use gantry_plugin::nvml::{Code, Nvml, NvmlError};
use gantry_topology::{
    IdList, Machine, MachineParts, NvLinkPorts, PathClass, PathMatrix, PcieLink, PeerRefusal, PeerStatus,
    Throttle,
};
use sim::Sim;

/// A machine in the form that discovery can produce: no name, NICs by device name, current names of path classes,
/// NVLink ports only with a link up, lists of numbers in one form.
fn normalised(machine: &Machine) -> MachineParts {
    let mut parts = machine.clone().into_parts();
    parts.name = None;
    for nic in &mut parts.nics {
        nic.name = nic.device.take().unwrap_or_else(|| nic.name.clone());
    }
    let devices = parts.gpus.len() + parts.nics.len();
    parts.paths = PathMatrix::from_fn(devices, |a, b| match machine.paths().get(a, b) {
        PathClass::Soc => PathClass::Sys,
        class => class,
    });
    for (index, gpu) in parts.gpus.iter_mut().enumerate() {
        let linked = (0..machine.gpus().len()).any(|other| machine.direct_nvlinks(index, other) > 0);
        gpu.nvlink = gpu.nvlink.filter(|ports: &NvLinkPorts| linked || ports.switch_links > 0);
    }
    parts
}

/// Compared part by part for readable differences.
fn assert_same(found: &MachineParts, expected: &MachineParts, what: &str) {
    assert_eq!(found.host, expected.host, "{what}");
    for (found, expected) in found.gpus.iter().zip(&expected.gpus) {
        assert_eq!(found, expected, "{what}");
    }
    assert_eq!(found.nics, expected.nics, "{what}");
    assert_eq!(found.nvlinks, expected.nvlinks, "{what}");
    assert_eq!(found.paths, expected.paths, "{what}");
    assert_eq!(found, expected, "{what}");
}

fn discovered(sim: &Sim) -> Machine {
    let nvml = Nvml::load(&sim.options().library).unwrap();
    let found = discover::read(&nvml, &sim.options()).unwrap();
    assert_eq!(found.warnings, [""; 0]);
    assert_eq!(found.unreachable, []);
    found.machine
}

#[test]
fn discovery_equals_machine_file() {
    let mut files: Vec<_> = std::fs::read_dir(sim::machines())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "yaml"))
        .collect();
    files.sort();
    assert!(files.len() >= 7, "{files:?}");
    for file in files {
        let sim = Sim::of_file(&file);
        assert_eq!(sim.installed.layout.misfits, [], "{}", file.display());
        let expected = normalised(sim.installed.facts.machine());
        let found = normalised(&discovered(&sim));
        assert_same(&found, &expected, &file.display().to_string());
    }
}

#[test]
fn degraded_links_and_clocks_are_read() {
    let text = std::fs::read_to_string(sim::machines().join("dgx1-v100.yaml")).unwrap();
    let mut parts = gantry_topology::read(&text).unwrap().into_parts();
    parts.gpus[1].pcie_trained = Some(PcieLink { generation: 3, width: 8 });
    parts.gpus[2].pcie_trained = Some(PcieLink { generation: 1, width: 16 });
    parts.gpus[3].throttle = Some(Throttle::PowerBrake);
    parts.no_peer_access = vec![PeerRefusal { gpus: [4, 6], status: PeerStatus::Topology }];
    let sim = Sim::of_machine(&Machine::new(parts).unwrap(), "degraded");
    let expected = normalised(sim.installed.facts.machine());
    assert_eq!(expected.no_peer_access.len(), 1);
    assert_same(&normalised(&discovered(&sim)), &expected, "degraded");
}

/// Real machines, as printed by `nvidia-smi topo -m`: the simulated machines show the same.
#[test]
fn discovery_equals_printed_matrix() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../topology/fixtures/topologies");
    let mut read = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        let Ok(printed) = gantry_smi::read_machine(&text) else {
            // Except truncated files and the folder's README.
            continue;
        };
        read += 1;
        let sim = Sim::of_machine(&printed, &path.display().to_string());
        let found = discovered(&sim);
        let misfits = &sim.installed.layout.misfits;
        // Adapters are ordered by name.
        let place = |device: usize| match device.checked_sub(printed.gpus().len()) {
            None => device,
            Some(nic) => {
                let nic = &printed.nics()[nic];
                let name = nic.device.as_ref().unwrap_or(&nic.name);
                let nics = found.nics().iter().position(|found| &found.name == name);
                found.gpus().len() + nics.unwrap_or_else(|| panic!("{}: no {name}", path.display()))
            }
        };
        for a in 0..printed.paths().len() {
            for b in 0..a {
                if misfits.iter().any(|misfit| (misfit.first, misfit.second) == (b, a))
                    && a >= printed.gpus().len()
                {
                    continue;
                }
                let expected = printed.link(a, b).to_string().replace("SOC", "SYS");
                let link = found.link(place(a), place(b)).to_string();
                assert_eq!(link, expected, "{}: {a} {b}", path.display());
            }
        }
    }
    assert!(read >= 30, "only {read} could be read");
}

#[test]
fn missing_nvml_gives_advice() {
    let options = NvmlOptions { library: "/nonexistent/libnvidia-ml.so.1".into(), ..NvmlOptions::default() };
    insta::assert_snapshot!(discover::scan(&options).unwrap_err(), @"NVML library /nonexistent/libnvidia-ml.so.1 cannot be loaded (/nonexistent/libnvidia-ml.so.1: cannot open shared object file: No such file or directory); install NVIDIA's driver on this node, or set its path with --nvml-library");
}

#[test]
fn other_library_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("libnvidia-ml.so.1");
    std::fs::write(&library, "not an ELF file").unwrap();
    let options = NvmlOptions { library, ..NvmlOptions::default() };
    assert!(matches!(discover::scan(&options), Err(DiscoverError::Nvml(NvmlError::Load { .. }))));
}

#[test]
fn unloaded_driver_differs_from_no_gpu() {
    let sim = Sim::of("workstation-2x");
    sim.installed.controller.unload_driver().unwrap();
    let error = discover::scan(&sim.options()).unwrap_err();
    let DiscoverError::Nvml(error) = error else {
        panic!("{error}");
    };
    assert!(error.is_driver_gone(), "{error}");
    insta::assert_snapshot!(error, @"nvmlInit_v2 failed: the NVIDIA driver is not loaded; load the kernel module (modprobe nvidia); if it does not stay loaded, see dmesg");

    let none = Machine::new(MachineParts::default()).unwrap();
    let sim = Sim::of_machine(&none, "none");
    assert!(matches!(discover::scan(&sim.options()), Err(DiscoverError::NoGpu)));
}

#[test]
fn inactive_nvlink_is_left_out() {
    let sim = Sim::of("workstation-2x");
    assert_eq!(discovered(&sim).direct_nvlinks(0, 1), 4);
    sim.installed.controller.set_nvlink(0, 2, false).unwrap();
    assert_eq!(discovered(&sim).direct_nvlinks(0, 1), 3);
    for link in 0..4 {
        sim.installed.controller.set_nvlink(0, link, false).unwrap();
    }
    let machine = discovered(&sim);
    assert_eq!(machine.direct_nvlinks(0, 1), 0);
    assert_eq!(machine.link(0, 1).to_string(), "PHB", "what is left is PCIe");
}

#[test]
fn inactive_switch_link_narrows_one_gpu() {
    let sim = Sim::of("dgx-a100");
    sim.installed.controller.set_nvlink(3, 5, false).unwrap();
    let machine = discovered(&sim);
    assert_eq!(machine.switch_links(3), 11);
    assert_eq!(machine.link(0, 3).to_string(), "NV11");
    assert_eq!(machine.link(0, 1).to_string(), "NV12");
}

#[test]
fn lost_gpu_keeps_index_and_other_links() {
    let sim = Sim::of("dgx1-v100");
    let whole = discovered(&sim);
    sim.installed.controller.lose_gpu(2).unwrap();
    let nvml = Nvml::load(&sim.options().library).unwrap();
    let found = discover::read(&nvml, &sim.options()).unwrap();
    assert_eq!(found.machine.gpus().len(), 8);
    assert_eq!(found.machine.gpus()[2].uuid, None);
    let [(2, error)] = &found.unreachable[..] else {
        panic!("{:?}", found.unreachable);
    };
    assert_eq!(error.code(), Some(Code::GpuIsLost));
    for a in 0..8 {
        for b in (0..a).filter(|b| a != 2 && *b != 2) {
            assert_eq!(found.machine.link(a, b), whole.link(a, b), "{a} {b}");
        }
    }
}

/// Every call that discovery makes for a single fact; each may fail without failing the machine.
const DISPENSABLE: &[&str] = &[
    "nvmlSystemGetDriverVersion",
    "nvmlSystemGetCudaDriverVersion_v2",
    "nvmlDeviceGetName",
    "nvmlDeviceGetSerial",
    "nvmlDeviceGetMinorNumber",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetCudaComputeCapability",
    "nvmlDeviceGetMaxPcieLinkGeneration",
    "nvmlDeviceGetMaxPcieLinkWidth",
    "nvmlDeviceGetCpuAffinity",
    "nvmlDeviceGetMemoryAffinity",
    "nvmlDeviceGetNumaNodeId",
    "nvmlDeviceGetTopologyCommonAncestor",
    "nvmlDeviceGetGpuFabricInfoV",
    "nvmlDeviceGetGpuFabricInfo",
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetNvLinkVersion",
    "nvmlDeviceGetNvLinkRemoteDeviceType",
    "nvmlDeviceGetNvLinkRemotePciInfo_v2",
];

#[test]
fn any_single_failing_call_keeps_the_machine() {
    let sim = Sim::of("dgx1-v100");
    let nvml = Nvml::load(&sim.options().library).unwrap();
    for call in DISPENSABLE {
        for code in [3, 999] {
            sim.installed.controller.fail_call(call, code, None).unwrap();
            let found = discover::read(&nvml, &sim.options())
                .unwrap_or_else(|error| panic!("without {call} ({code}): {error}"));
            assert_eq!(found.machine.gpus().len(), 8, "{call}");
            assert_eq!(found.unreachable, [], "{call}");
            assert!(found.machine.gpus().iter().all(|gpu| gpu.uuid.is_some()), "{call}");
            sim.installed.controller.clear_rule(call).unwrap();
        }
    }
    // The failures leave no trace.
    let expected = normalised(sim.installed.facts.machine());
    assert_same(&normalised(&discovered(&sim)), &expected, "at the end");
}

#[test]
fn failed_fact_gives_warning_with_its_name() {
    let sim = Sim::of("workstation-2x");
    sim.installed.controller.fail_call("nvmlDeviceGetMinorNumber", 999, None).unwrap();
    let nvml = Nvml::load(&sim.options().library).unwrap();
    let found = discover::read(&nvml, &sim.options()).unwrap();
    let named =
        |gpu| format!("nvmlDeviceGetMinorNumber on GPU {gpu} failed: the driver reports an internal error");
    assert_eq!(found.warnings.len(), 2, "{:?}", found.warnings);
    for (gpu, warning) in found.warnings.iter().enumerate() {
        assert!(warning.starts_with(&named(gpu)), "{warning}");
    }
    assert_eq!(found.machine.gpus()[0].minor, None);
}

#[test]
fn missing_nvml_paths_come_from_sysfs() {
    let mut warnings = Vec::new();
    for name in ["dgx1-v100", "l4-4x-pcie", "hgx-h100"] {
        let sim = Sim::of(name);
        sim.installed.controller.fail_call("nvmlDeviceGetTopologyCommonAncestor", 3, None).unwrap();
        let nvml = Nvml::load(&sim.options().library).unwrap();
        let found = discover::read(&nvml, &sim.options()).unwrap();
        let expected = normalised(sim.installed.facts.machine());
        assert_eq!(found.machine.paths(), &expected.paths, "{name}");
        warnings.push(found.warnings[0].clone());
    }
    insta::assert_snapshot!(warnings.join("\n"), @r"
    NVML has no path between GPU 0 and GPU 1 (nvmlDeviceGetTopologyCommonAncestor on GPU 0 failed: not supported; the driver, the GPU or the virtual machine does not offer this: check the versions in docs/install.md); using sysfs: PIX
    NVML has no path between GPU 0 and GPU 1 (nvmlDeviceGetTopologyCommonAncestor on GPU 0 failed: not supported; the driver, the GPU or the virtual machine does not offer this: check the versions in docs/install.md); using sysfs: NODE
    NVML has no path between GPU 0 and GPU 1 (nvmlDeviceGetTopologyCommonAncestor on GPU 0 failed: not supported; the driver, the GPU or the virtual machine does not offer this: check the versions in docs/install.md); using sysfs: NODE
    ");
}

#[test]
fn missing_sysfs_finds_gpus_without_nics() {
    let sim = Sim::of("hgx-h100");
    let options = NvmlOptions { sys_root: "/nonexistent".into(), ..sim.options() };
    let machine = discover::scan(&options).unwrap().machine;
    assert_eq!(machine.gpus().len(), 8);
    assert_eq!(machine.nics().len(), 0);
    assert_eq!(machine.link(0, 7).to_string(), "NV18");
    assert_eq!(
        machine.gpus()[0].numa,
        sim.installed.facts.machine().gpus()[0].numa,
        "NVML knows the NUMA node too"
    );
}

/// Virtual machines of one node have -1 for every device.
#[test]
fn unknown_numa_node_is_the_only_one() {
    let sim = Sim::of("h200-1x-vm");
    let devices = sim.installed.layout.sys.join("bus/pci/devices");
    let address = sim.installed.facts.machine().gpus()[0].bus_id.clone().unwrap();
    std::fs::write(devices.join(address.as_str()).join("numa_node"), "-1\n").unwrap();
    let nvml = Nvml::load(&sim.options().library).unwrap();
    let found = discover::read(&nvml, &sim.options()).unwrap();
    assert_eq!(found.machine.gpus()[0].numa.as_ref().map(IdList::as_str), Some("0"));
    assert!(found.warnings.is_empty(), "{:?}", found.warnings);
}

#[test]
fn unknown_numa_node_gives_none_and_a_warning() {
    let sim = Sim::of("hgx-h100");
    let gpus = sim.installed.facts.machine().gpus();
    let address = gpus[6].bus_id.as_ref().unwrap();
    let devices = sim.installed.layout.sys.join("bus/pci/devices");
    std::fs::write(devices.join(address.as_str()).join("numa_node"), "-1\n").unwrap();
    let nvml = Nvml::load(&sim.options().library).unwrap();
    let found = discover::read(&nvml, &sim.options()).unwrap();
    assert_eq!(found.machine.gpus()[5].numa, gpus[5].numa);
    assert_eq!(found.machine.gpus()[6].numa, None);
    insta::assert_snapshot!(found.warnings.join("\n"), @"the kernel has no NUMA node for the GPU at 0000:d1:00.0: kubelet gets none, and its Topology Manager does not align this GPU");
}

#[test]
fn all_gpu_processes_are_listed() {
    let sim = Sim::of("workstation-2x");
    let processes: Vec<_> = (1..=300)
        .map(|pid| gantry_nvml_sim::control::Process { pid, memory_mib: 1, ..Default::default() })
        .collect();
    sim.installed.controller.set_processes(1, processes).unwrap();
    let nvml = Nvml::load(&sim.options().library).unwrap();
    let pids = |gpu| -> Vec<u32> {
        let processes = nvml.device(gpu).unwrap().compute_processes().unwrap();
        processes.iter().map(|process| process.pid).collect()
    };
    assert_eq!(pids(0), [0; 0]);
    assert_eq!(pids(1), (1..=300).collect::<Vec<_>>());
}
