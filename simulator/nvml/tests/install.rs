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
        let device = installed
            .layout
            .sys
            .join("class/infiniband")
            .join(&nic.device)
            .join("device");
        let uevent = fs::read_to_string(device.join("uevent")).unwrap();
        assert!(uevent.contains(&format!("PCI_SLOT_NAME={}\n", nic.address)));
    }
}

#[test]
fn installing_again_changes_the_machine_for_who_initialises_anew() {
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
        let error = install_text(text, Path::new("mine.yaml"), folder.path())
            .err()
            .unwrap();
        assert!(matches!(error, InstallError::Machine { .. }));
        error.to_string()
    };
    let error = refused("gpus: [{index: 1}]\npaths: [X]\n");
    assert!(
        error.starts_with("mine.yaml: ") && error.contains("gpus[0].index"),
        "{error}"
    );
    let error = refused("gpus: [{index: 0, colour: green}]\npaths: [X]\n");
    assert!(error.contains("colour"), "{error}");
    let missing = install(Path::new("/nowhere/mine.yaml"), folder.path())
        .err()
        .unwrap();
    assert_eq!(missing.to_string(), "cannot read /nowhere/mine.yaml");
}
