//! A machine installed as a whole: library, machine file, controls, and the entries beside NVML, all telling the same.
#![allow(
    unsafe_code,
    clippy::macro_metavars_in_unsafe,
    clippy::unwrap_used,
    clippy::panic,
    reason = "the C functions are called as C calls them, each block says why it is sound; a test stops at what is wrong"
)]

use std::fs;
use std::path::Path;

use gantry_nvml_sim::{InstallError, install, install_text};

mod common;
use common::*;

#[test]
fn nvml_proc_and_sysfs_tell_the_same_of_a_machine() {
    let folder = tempfile::tempdir().unwrap();
    let installed = install(&machines_folder().join("dgx-a100.yaml"), folder.path()).unwrap();
    assert_eq!(installed.layout.misfits, []);
    let raw = Raw::load(&installed.library);
    assert_eq!(raw.init(), OK);
    for index in 0..raw.count().unwrap() {
        let uuid = raw.uuid(raw.device(index).unwrap()).unwrap();
        let gpu = &installed.facts.gpus[index as usize];
        let address = gpu.address.to_string();
        let information = installed.layout.proc.join("driver/nvidia/gpus").join(&address);
        let information = fs::read_to_string(information.join("information")).unwrap();
        assert!(information.contains(&uuid));
        let device = installed.layout.sys.join("bus/pci/devices").join(&address);
        let numa = fs::read_to_string(device.join("numa_node")).unwrap();
        assert_eq!(numa.trim(), gpu.numa.unwrap().to_string());
        assert!(installed.layout.dev.join(format!("nvidia{}", gpu.minor)).exists());
    }
    for nic in &installed.facts.nics {
        let device = installed.layout.sys.join("class/infiniband").join(&nic.device).join("device");
        let uevent = fs::read_to_string(device.join("uevent")).unwrap();
        assert!(uevent.contains(&format!("PCI_SLOT_NAME={}\n", nic.address)));
    }
}

#[test]
fn reinstalled_machine_applies_to_new_sessions() {
    let folder = tempfile::tempdir().unwrap();
    let first = install(&machines_folder().join("l4-4x-pcie.yaml"), folder.path()).unwrap();
    let raw = Raw::load(&first.library);
    assert_eq!(raw.init(), OK);
    let second = install(&machines_folder().join("workstation-2x.yaml"), folder.path()).unwrap();
    assert_eq!(raw.count(), Ok(4), "who is at it keeps the machine he began with");
    assert_eq!((raw.shutdown(), raw.init()), (OK, OK));
    assert_eq!(raw.count(), Ok(2));
    assert!(!second.layout.dev.join("nvidia2").exists());
}

#[test]
fn a_wrong_machine_file_is_refused_with_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |text: &str| {
        let error = install_text(text, Path::new("mine.yaml"), folder.path()).err().unwrap();
        assert!(matches!(error, InstallError::Machine { .. }));
        error.to_string()
    };
    let error = refused("gpus: [{index: 1}]\npaths: [X]\n");
    assert!(error.starts_with("mine.yaml: ") && error.contains("gpus[0].index"), "{error}");
    let error = refused("gpus: [{index: 0, colour: green}]\npaths: [X]\n");
    assert!(error.contains("colour"), "{error}");
    let missing = install(Path::new("/nowhere/mine.yaml"), folder.path()).err().unwrap();
    assert_eq!(missing.to_string(), "cannot read /nowhere/mine.yaml");
}

#[test]
fn capabilities_follow_mig_layout() {
    let folder = tempfile::tempdir().unwrap();
    let installed = install(&machines_folder().join("dgx-a100-mig.yaml"), folder.path()).unwrap();
    let proc = &installed.layout.proc;
    let access = |path: &str| {
        let path = proc.join("driver/nvidia/capabilities").join(path).join("access");
        std::fs::read_to_string(path).ok()
    };
    let node = |number: u32| installed.layout.dev.join(format!("nvidia-caps/nvidia-cap{number}")).exists();
    let minors = std::fs::read_to_string(proc.join("driver/nvidia-caps/mig-minors")).unwrap();
    let minor = |name: &str| -> u32 {
        let line = minors.lines().find_map(|line| line.strip_prefix(&format!("{name} ")));
        line.unwrap().parse().unwrap()
    };
    assert_eq!((minor("config"), minor("monitor"), minor("gpu0/gi7/access")), (1, 2, 66));
    assert!(node(1) && node(2));
    let (left, right) = (minor("gpu5/gi1/access"), minor("gpu5/gi2/access"));
    let text = |number: u32| format!("DeviceFileMinor: {number}\nDeviceFileMode: 292\nDeviceFileModify: 1\n");
    assert_eq!(access("gpu5/mig/gi1"), Some(text(left)));
    assert_eq!(access("gpu5/mig/gi1/ci0"), Some(text(left + 1)));
    assert!(node(left) && node(left + 1) && node(right));
    assert_eq!(access("gpu0/mig/gi0"), None, "MIG is off there");

    installed.controller.recut(5, &["3g.20gb@4", "2g.10gb@0"]).unwrap();
    assert_eq!(access("gpu5/mig/gi1"), None);
    assert_eq!(access("gpu5/mig/gi2"), Some(text(right)));
    assert_eq!(access("gpu5/mig/gi3"), Some(text(minor("gpu5/gi3/access"))));
    assert!(!node(left) && node(right) && node(minor("gpu5/gi3/ci0/access")));

    let again = install(&machines_folder().join("dgx-a100-mig.yaml"), folder.path()).unwrap();
    assert_eq!(access("gpu5/mig/gi1"), None, "installed again, it is cut as before");
    again.controller.uncut(5).unwrap();
    assert!(!proc.join("driver/nvidia/capabilities/gpu5").exists());
    assert!(proc.join("driver/nvidia/capabilities/gpu4/mig/gi7/ci0/access").exists());
    installed.controller.reset().unwrap();
    assert_eq!(access("gpu5/mig/gi1"), Some(text(left)));

    let devices = std::fs::read_to_string(proc.join("devices")).unwrap();
    assert!(devices.contains(" nvidia-caps\n") && devices.contains(" nvidia-caps-imex-channels\n"));
    assert!(installed.layout.dev.join("nvidia-caps-imex-channels/channel0").exists());
    installed.layout.remove().unwrap();
    assert_eq!(std::fs::read_dir(&installed.layout.root).unwrap().count(), 0);
}

#[test]
fn capabilities_follow_a_client_that_makes_an_instance() {
    use nvml_wrapper_sys::bindings as sys;
    let folder = tempfile::tempdir().unwrap();
    let installed = install(&machines_folder().join("dgx-a100.yaml"), folder.path()).unwrap();
    let raw = Raw::load(&installed.library);
    assert_eq!(raw.init(), OK);
    let device = raw.device(0).unwrap();
    let mut activation = 0;
    assert_eq!(call!(raw, nvmlDeviceSetMigMode(device, 1, &raw mut activation)), OK);
    let (mut instance, mut compute) = (std::ptr::null_mut(), std::ptr::null_mut());
    let profile = sys::NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE;
    assert_eq!(call!(raw, nvmlDeviceCreateGpuInstance(device, 19, &raw mut instance)), OK);
    let gi = installed.layout.proc.join("driver/nvidia/capabilities/gpu0/mig/gi7");
    assert!(gi.join("access").exists() && !gi.join("ci0").exists());
    let code = call!(raw, nvmlGpuInstanceCreateComputeInstance(instance, profile, &raw mut compute));
    assert_eq!(code, OK);
    assert!(gi.join("ci0/access").exists());
    assert_eq!(call!(raw, nvmlComputeInstanceDestroy(compute)), OK);
    assert!(!gi.join("ci0").exists());
}
