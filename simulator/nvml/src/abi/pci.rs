//! Where a GPU sits on PCIe, and how fast its link there is.

use std::ffi::{c_char, c_uint};

use nvml_wrapper_sys::bindings as sys;

use super::args::{Out, fixed, struct_version};
use super::handle::Device;
use super::status::Status;
use crate::facts::pci_ids::NVIDIA;
use crate::facts::{Address, GpuFacts};

/// The PCI info that versions 1 and 2 of the function fill: a short bus id, and reserved words instead of the long one.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PciInfoOld {
    bus_id: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    pci_device_id: c_uint,
    pci_subsystem_id: c_uint,
    reserved: [c_uint; 4],
}

fn ids(device: u16) -> (c_uint, c_uint) {
    let vendor = c_uint::from(NVIDIA);
    (c_uint::from(device) << 16 | vendor, c_uint::from(device ^ 0x0b00) << 16 | vendor)
}

/// NVML's description of the PCI device `device_id` at `address`.
pub(super) fn info(address: Address, device_id: u16) -> sys::nvmlPciInfo_t {
    let (device, subsystem) = ids(device_id);
    sys::nvmlPciInfo_t {
        busIdLegacy: fixed(&address.nvml_legacy()),
        domain: address.domain,
        bus: c_uint::from(address.bus),
        device: c_uint::from(address.device),
        pciDeviceId: device,
        pciSubSystemId: subsystem,
        busId: fixed(&address.nvml()),
    }
}

pub(super) fn old_info(address: Address, device_id: u16) -> PciInfoOld {
    let (device, subsystem) = ids(device_id);
    PciInfoOld {
        bus_id: fixed(&address.nvml_legacy()),
        domain: address.domain,
        bus: c_uint::from(address.bus),
        device: c_uint::from(address.device),
        pci_device_id: device,
        pci_subsystem_id: subsystem,
        reserved: [0; 4],
    }
}

fn generation(gpu: &GpuFacts) -> c_uint {
    c_uint::from(gpu.pcie.generation)
}

/// Rate of one lane in MB/s as NVML counts it (2500 for generation 1).
fn lane_speed(gpu: &GpuFacts) -> c_uint {
    match gpu.pcie.generation {
        0 | 1 => 2_500,
        2 => 5_000,
        generation => 8_000 << (generation - 3).min(8),
    }
}

nvml! {
    fn nvmlDeviceGetPciInfo(device: Device, pci: Out<PciInfoOld>) |call| {
        let gpu = call.gpu(device)?.facts;
        pci.put(old_info(gpu.address, gpu.product.device_id))
    }

    fn nvmlDeviceGetPciInfo_v2(device: Device, pci: Out<PciInfoOld>) |call| {
        let gpu = call.gpu(device)?.facts;
        pci.put(old_info(gpu.address, gpu.product.device_id))
    }

    fn nvmlDeviceGetPciInfo_v3(device: Device, pci: Out<sys::nvmlPciInfo_t>) |call| {
        let gpu = call.gpu(device)?.facts;
        pci.put(info(gpu.address, gpu.product.device_id))
    }

    fn nvmlDeviceGetPciInfoExt(device: Device, pci: Out<sys::nvmlPciInfoExt_t>) |call| {
        pci.check_version(1)?;
        let gpu = call.gpu(device)?.facts;
        let (device_id, subsystem) = ids(gpu.product.device_id);
        pci.put(sys::nvmlPciInfoExt_t {
            version: struct_version::<sys::nvmlPciInfoExt_t>(1),
            domain: gpu.address.domain,
            bus: c_uint::from(gpu.address.bus),
            device: c_uint::from(gpu.address.device),
            pciDeviceId: device_id,
            pciSubSystemId: subsystem,
            baseClass: 0x03,
            subClass: if gpu.product.display { 0x00 } else { 0x02 },
            busId: fixed(&gpu.address.nvml()),
        })
    }

    fn nvmlDeviceGetMaxPcieLinkGeneration(device: Device, out: Out<c_uint>) |call| {
        out.put(generation(call.gpu(device)?.facts))
    }

    fn nvmlDeviceGetGpuMaxPcieLinkGeneration(device: Device, out: Out<c_uint>) |call| {
        out.put(generation(call.gpu(device)?.facts))
    }

    fn nvmlDeviceGetCurrPcieLinkGeneration(device: Device, out: Out<c_uint>) |call| {
        out.put(generation(call.gpu(device)?.facts))
    }

    fn nvmlDeviceGetMaxPcieLinkWidth(device: Device, out: Out<c_uint>) |call| {
        out.put(c_uint::from(call.gpu(device)?.facts.pcie.width))
    }

    fn nvmlDeviceGetCurrPcieLinkWidth(device: Device, out: Out<c_uint>) |call| {
        out.put(c_uint::from(call.gpu(device)?.facts.pcie.width))
    }

    fn nvmlDeviceGetPcieSpeed(device: Device, out: Out<c_uint>) |call| {
        out.put(lane_speed(call.gpu(device)?.facts))
    }

    fn nvmlDeviceGetPcieLinkMaxSpeed(device: Device, out: Out<c_uint>) |call| {
        out.put(generation(call.gpu(device)?.facts).min(sys::NVML_PCIE_LINK_MAX_SPEED_64000MBPS))
    }

    fn nvmlDeviceGetBusType(device: Device, out: Out<sys::nvmlBusType_t>) |call| {
        call.gpu(device)?;
        out.put(sys::NVML_BUS_TYPE_PCIE)
    }

    fn nvmlDeviceGetPcieReplayCounter(device: Device, out: Out<c_uint>) |call| {
        call.gpu(device)?;
        out.put(0)
    }

    fn nvmlDeviceGetPcieThroughput(device: Device, counter: c_uint, out: Out<c_uint>) |call| {
        call.gpu(device)?;
        if counter > 1 {
            return Err(Status::INVALID_ARGUMENT);
        }
        out.put(0)
    }

    fn nvmlDeviceGetIrqNum(device: Device, out: Out<c_uint>) |call| {
        out.put(64 + c_uint::from(call.gpu(device)?.key()))
    }
}
