//! Links, paths, fabric and MIG mode called as C calls them: what nvml-wrapper gets wrong or leaves out.
#![allow(
    unsafe_code,
    clippy::macro_metavars_in_unsafe,
    clippy::unwrap_used,
    clippy::panic,
    reason = "the C functions are called as C calls them, each block says why it is sound; a test stops at what is wrong"
)]

use std::ffi::c_int;

use gantry_nvml_sim::facts::Remote;
use nvml_wrapper_sys::bindings as sys;
use sys::field_id as field;

mod common;
use common::*;

#[test]
fn each_link_tells_what_kind_of_device_it_ends_in() {
    for name in MACHINES {
        let simulated = Simulated::new(name);
        let raw = simulated.start();
        for gpu in &simulated.installed.facts.gpus {
            let device = raw.device(gpu.index as u32).unwrap();
            for (number, remote) in gpu.links.iter().enumerate() {
                let mut kind = 99;
                let code =
                    call!(raw, nvmlDeviceGetNvLinkRemoteDeviceType(device, number as u32, &raw mut kind));
                let expected = match remote {
                    Remote::Gpu { .. } => sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_GPU,
                    Remote::Switch { .. } => sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH,
                };
                assert_eq!((code, kind), (OK, expected), "{name}");
            }
        }
    }
}

#[test]
fn nvlink_versions_are_counted_with_their_half_steps() {
    for (name, expected) in [("dgx1-v100", 2), ("dgx-a100", 4), ("a40-8x-bridged", 5), ("hgx-h100", 6)] {
        let raw = Simulated::new(name).start();
        let mut found = 0;
        assert_eq!(call!(raw, nvmlDeviceGetNvLinkVersion(raw.device(0).unwrap(), 0, &raw mut found)), OK);
        assert_eq!(found, expected, "{name}");
    }
}

#[test]
fn common_ancestor_equals_the_path_class_of_the_file() {
    use gantry_topology::PathClass;
    for name in MACHINES {
        let simulated = Simulated::new(name);
        let raw = simulated.start();
        let gpus = simulated.installed.facts.gpus.len();
        for (a, b) in (0..gpus).flat_map(|a| (0..gpus).map(move |b| (a, b))).filter(|(a, b)| a != b) {
            let mut level = 99;
            let (first, second) = (raw.device(a as u32).unwrap(), raw.device(b as u32).unwrap());
            let code = call!(raw, nvmlDeviceGetTopologyCommonAncestor(first, second, &raw mut level));
            let expected = match simulated.installed.facts.machine().paths().get(a, b) {
                PathClass::Pix => 10,
                PathClass::Pxb => 20,
                PathClass::Phb => 30,
                PathClass::Node => 40,
                PathClass::Sys | PathClass::Soc => 50,
            };
            assert_eq!((code, level), (OK, expected), "{name}: {a} and {b}");
        }
    }
}

#[test]
fn nvlink_peers_can_reach_each_other_and_others_cannot() {
    let simulated = Simulated::new("dgx1-v100");
    let raw = simulated.start();
    for (a, b) in (0..8_usize).flat_map(|a| (0..8).map(move |b| (a, b))).filter(|(a, b)| a != b) {
        let mut status = 99;
        let (first, second) = (raw.device(a as u32).unwrap(), raw.device(b as u32).unwrap());
        let index = sys::nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_NVLINK;
        assert_eq!(call!(raw, nvmlDeviceGetP2PStatus(first, second, index, &raw mut status)), OK);
        let joined = simulated.installed.facts.machine().nvlinks_between(a, b) > 0;
        assert_eq!(status == sys::nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_OK, joined, "{a} and {b}");
    }
}

fn field_value(raw: &Raw, index: u32, id: u32, scope: u32) -> Result<u64, u32> {
    // SAFETY: plain C data, for which zero is valid.
    let mut value: sys::nvmlFieldValue_t = unsafe { std::mem::zeroed() };
    (value.fieldId, value.scopeId) = (id, scope);
    let device = raw.device(index).unwrap();
    assert_eq!(call!(raw, nvmlDeviceGetFieldValues(device, 1 as c_int, &raw mut value)), OK);
    // SAFETY: the library fills all eight bytes.
    result(value.nvmlReturn, unsafe { value.value.ullVal })
}

#[test]
fn field_values_count_links_and_switch_links() {
    let raw = Simulated::new("hgx-h100").start();
    assert_eq!(field_value(&raw, 0, field::NVML_FI_DEV_NVLINK_LINK_COUNT, 0), Ok(18));
    assert_eq!(field_value(&raw, 0, field::NVML_FI_DEV_NVSWITCH_CONNECTED_LINK_COUNT, 0), Ok(18));
    assert_eq!(field_value(&raw, 0, field::NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON, 0), Ok(26_562));
    assert_eq!(field_value(&raw, 0, field::NVML_FI_DEV_NVLINK_SPEED_MBPS_L11, 0), Ok(26_562));
    assert_eq!(field_value(&raw, 0, field::NVML_FI_DEV_NVLINK_GET_STATE, 17), Ok(1));
    assert_eq!(field_value(&raw, 0, field::NVML_FI_DEV_NVLINK_GET_STATE, 18), Err(INVALID_ARGUMENT));
    let raw = Simulated::new("l4-4x-pcie").start();
    assert_eq!(field_value(&raw, 0, field::NVML_FI_DEV_NVLINK_LINK_COUNT, 0), Err(NOT_SUPPORTED));
    let raw = Simulated::new("dgx1-v100").start();
    assert_eq!(field_value(&raw, 0, field::NVML_FI_DEV_NVSWITCH_CONNECTED_LINK_COUNT, 0), Ok(0));
}

#[test]
fn fabric_info_comes_in_three_versions() {
    let raw = Simulated::new("hgx-h100").start();
    let device = raw.device(0).unwrap();
    // SAFETY: plain C data, for which zero is valid.
    let (mut plain, mut third): (sys::nvmlGpuFabricInfo_t, sys::nvmlGpuFabricInfo_v3_t) =
        unsafe { std::mem::zeroed() };
    assert_eq!(call!(raw, nvmlDeviceGetGpuFabricInfo(device, &raw mut plain)), OK);
    assert_eq!(u32::from(plain.state), sys::NVML_GPU_FABRIC_STATE_COMPLETED);
    assert_eq!(plain.clusterUuid, [0; 16], "no domain beyond the node");
    third.healthSummary = 77;
    third.version = version::<sys::nvmlGpuFabricInfo_v2_t>(2);
    assert_eq!(call!(raw, nvmlDeviceGetGpuFabricInfoV(device, &raw mut third)), OK);
    assert_eq!(third.healthSummary, 77, "version 2 ends before it");
    third.version = version::<sys::nvmlGpuFabricInfo_v3_t>(3);
    assert_eq!(call!(raw, nvmlDeviceGetGpuFabricInfoV(device, &raw mut third)), OK);
    assert_eq!(u32::from(third.healthSummary), sys::NVML_GPU_FABRIC_HEALTH_SUMMARY_HEALTHY);
    let raw = Simulated::new("dgx-a100").start();
    let device = raw.device(0).unwrap();
    assert_eq!(call!(raw, nvmlDeviceGetGpuFabricInfo(device, &raw mut plain)), NOT_SUPPORTED);
}

#[test]
fn mig_is_off_if_supported() {
    let (mut current, mut pending) = (9, 9);
    let raw = Simulated::new("dgx-a100").start();
    let device = raw.device(0).unwrap();
    assert_eq!(call!(raw, nvmlDeviceGetMigMode(device, &raw mut current, &raw mut pending)), OK);
    assert_eq!((current, pending), (0, 0));
    let mut mig = std::ptr::null_mut();
    assert_eq!(call!(raw, nvmlDeviceGetMigDeviceHandleByIndex(device, 0, &raw mut mig)), NOT_FOUND);
    let mut is_mig = 9;
    assert_eq!(call!(raw, nvmlDeviceIsMigDeviceHandle(device, &raw mut is_mig)), OK);
    assert_eq!(is_mig, 0);
    let raw = Simulated::new("l4-4x-pcie").start();
    let device = raw.device(0).unwrap();
    assert_eq!(call!(raw, nvmlDeviceGetMigMode(device, &raw mut current, &raw mut pending)), NOT_SUPPORTED);
}
