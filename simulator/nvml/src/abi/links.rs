//! The links of a GPU: its place on PCIe and the rate there; of each NVLink whether it is up, its version, its far end and
//! its error counts.

use std::ffi::{c_char, c_uint, c_ulonglong};

use nvml_wrapper_sys::bindings as sys;

use super::args::{OutPointer, Status, fixed, struct_version};
use super::call::{Call, Target};
use super::handle::Device;
use crate::facts::pci_ids::{NVIDIA, NVSWITCH};
use crate::facts::{Address, GpuFacts, Remote};

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
fn info(address: Address, device_id: u16) -> sys::nvmlPciInfo_t {
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

fn old_info(address: Address, device_id: u16) -> PciInfoOld {
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
    match gpu.pcie_trained.generation {
        0 | 1 => 2_500,
        2 => 5_000,
        generation => 8_000 << (generation - 3).min(8),
    }
}

nvml_get! {
    nvmlDeviceGetMaxPcieLinkGeneration | nvmlDeviceGetGpuMaxPcieLinkGeneration: c_uint = |gpu|
        generation(gpu.facts);
    nvmlDeviceGetCurrPcieLinkGeneration: c_uint = |gpu| c_uint::from(gpu.facts.pcie_trained.generation);
    nvmlDeviceGetMaxPcieLinkWidth: c_uint = |gpu| c_uint::from(gpu.facts.pcie.width);
    nvmlDeviceGetCurrPcieLinkWidth: c_uint = |gpu| c_uint::from(gpu.facts.pcie_trained.width);
    nvmlDeviceGetPcieSpeed: c_uint = |gpu| lane_speed(gpu.facts);
    nvmlDeviceGetPcieLinkMaxSpeed: c_uint = |gpu|
        generation(gpu.facts).min(sys::NVML_PCIE_LINK_MAX_SPEED_64000MBPS);
    nvmlDeviceGetBusType: sys::nvmlBusType_t = |_| sys::NVML_BUS_TYPE_PCIE;
    nvmlDeviceGetPcieReplayCounter: c_uint = |gpu| gpu.pcie_replays();
    nvmlDeviceGetIrqNum: c_uint = |gpu| 64 + c_uint::from(gpu.key());
}

nvml! {
    fn nvmlDeviceGetPciInfo | nvmlDeviceGetPciInfo_v2(device: Device, pci: OutPointer<PciInfoOld>) |call| {
        let gpu = call.gpu(device)?.facts;
        pci.put(old_info(gpu.address, gpu.product.device_id))
    }

    fn nvmlDeviceGetPciInfo_v3(device: Device, pci: OutPointer<sys::nvmlPciInfo_t>) |call| {
        let gpu = call.gpu(device)?.facts;
        pci.put(info(gpu.address, gpu.product.device_id))
    }

    fn nvmlDeviceGetPciInfoExt(device: Device, pci: OutPointer<sys::nvmlPciInfoExt_t>) |call| {
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

    fn nvmlDeviceGetPcieThroughput(device: Device, counter: c_uint, out: OutPointer<c_uint>) |call| {
        let gpu = call.gpu(device)?;
        let mib = match counter {
            sys::nvmlPcieUtilCounter_enum_NVML_PCIE_UTIL_TX_BYTES => gpu.work(None).pcie_sent,
            sys::nvmlPcieUtilCounter_enum_NVML_PCIE_UTIL_RX_BYTES => gpu.work(None).pcie_received,
            _ => return Err(Status::INVALID_ARGUMENT),
        };
        // In KB/s.
        out.put((mib * 1_048.576) as c_uint)
    }
}

/// One link of one GPU.
#[derive(Clone, Copy)]
pub(super) struct Link<'a> {
    pub(super) gpu: Target<'a>,
    pub(super) number: u8,
}

/// The link `number` of a GPU: an error if the GPU has no NVLink, or none of this number.
pub(super) fn link(call: &Call, device: Device, number: c_uint) -> Result<Link<'_>, Status> {
    let gpu = call.gpu(device)?;
    link_of(gpu, number)
}

pub(super) fn link_of(gpu: Target<'_>, number: c_uint) -> Result<Link<'_>, Status> {
    if gpu.facts.nvlink_count == 0 {
        return Err(Status::NOT_SUPPORTED);
    }
    let number = u8::try_from(number).map_err(|_| Status::INVALID_ARGUMENT)?;
    if number < gpu.facts.nvlink_count { Ok(Link { gpu, number }) } else { Err(Status::INVALID_ARGUMENT) }
}

impl Link<'_> {
    pub(super) fn is_up(self, call: &Call) -> bool {
        call.link_up(self.gpu.facts.index, self.number)
    }

    /// The far end of a link that is up.
    fn remote(self, call: &Call) -> Result<Remote, Status> {
        let joined = self.gpu.facts.links.get(usize::from(self.number));
        joined.copied().filter(|_| self.is_up(call)).ok_or(Status::NOT_SUPPORTED)
    }

    pub(super) fn errors(self) -> u64 {
        let counts = self.gpu.unusual().map(|state| &state.link_errors);
        counts.and_then(|counts| counts.get(&self.number)).copied().unwrap_or(0)
    }
}

/// Address and PCI device id of the far end.
fn remote_pci(call: &Call, device: Device, number: c_uint) -> Result<(Address, u16), Status> {
    match link(call, device, number)?.remote(call)? {
        Remote::Gpu { index, .. } => {
            let peer = call.facts().gpus.get(index).ok_or(Status::UNKNOWN)?;
            Ok((peer.address, peer.product.device_id))
        }
        Remote::Switch { index } => {
            let switch = call.facts().switches.get(index).ok_or(Status::UNKNOWN)?;
            Ok((*switch, NVSWITCH))
        }
    }
}

/// NVML's number for an NVLink generation: it counts the half steps too. GA102's is 3.1.
fn version_number(generation: u8, product_capability: (u8, u8)) -> sys::nvmlNvlinkVersion_enum {
    match generation {
        1 => sys::nvmlNvlinkVersion_enum_NVML_NVLINK_VERSION_1_0,
        2 => sys::nvmlNvlinkVersion_enum_NVML_NVLINK_VERSION_2_0,
        3 if product_capability == (8, 6) => sys::nvmlNvlinkVersion_enum_NVML_NVLINK_VERSION_3_1,
        3 => sys::nvmlNvlinkVersion_enum_NVML_NVLINK_VERSION_3_0,
        4 => sys::nvmlNvlinkVersion_enum_NVML_NVLINK_VERSION_4_0,
        5 => sys::nvmlNvlinkVersion_enum_NVML_NVLINK_VERSION_5_0,
        _ => sys::nvmlNvlinkVersion_enum_NVML_NVLINK_VERSION_INVALID,
    }
}

pub(super) fn version_of(gpu: Target<'_>) -> c_uint {
    version_number(gpu.facts.nvlink_version.unwrap_or(0), gpu.facts.compute_capability)
}

nvml! {
    fn nvmlDeviceGetNvLinkState(device: Device, number: c_uint, state: OutPointer<sys::nvmlEnableState_t>) |call| {
        let up = link(call, device, number)?.is_up(call);
        state.put(if up {
            sys::nvmlEnableState_enum_NVML_FEATURE_ENABLED
        } else {
            sys::nvmlEnableState_enum_NVML_FEATURE_DISABLED
        })
    }

    fn nvmlDeviceGetNvLinkVersion(device: Device, number: c_uint, version: OutPointer<c_uint>) |call| {
        version.put(version_of(link(call, device, number)?.gpu))
    }

    fn nvmlDeviceGetNvLinkCapability(
        device: Device,
        number: c_uint,
        capability: sys::nvmlNvLinkCapability_t,
        out: OutPointer<c_uint>,
    ) |call| {
        let link = link(call, device, number)?;
        let has = match capability {
            sys::nvmlNvLinkCapability_enum_NVML_NVLINK_CAP_P2P_SUPPORTED
            | sys::nvmlNvLinkCapability_enum_NVML_NVLINK_CAP_P2P_ATOMICS
            | sys::nvmlNvLinkCapability_enum_NVML_NVLINK_CAP_VALID => link.is_up(call),
            sys::nvmlNvLinkCapability_enum_NVML_NVLINK_CAP_SYSMEM_ACCESS
            | sys::nvmlNvLinkCapability_enum_NVML_NVLINK_CAP_SYSMEM_ATOMICS => true,
            sys::nvmlNvLinkCapability_enum_NVML_NVLINK_CAP_SLI_BRIDGE => {
                // The bridges of cards that drive displays are SLI's.
                link.gpu.facts.product.display
            }
            _ => return Err(Status::INVALID_ARGUMENT),
        };
        out.put(c_uint::from(has))
    }

    fn nvmlDeviceGetNvLinkRemotePciInfo(device: Device, number: c_uint, pci: OutPointer<PciInfoOld>) |call| {
        let (address, id) = remote_pci(call, device, number)?;
        pci.put(old_info(address, id))
    }

    fn nvmlDeviceGetNvLinkRemotePciInfo_v2(device: Device, number: c_uint, pci: OutPointer<sys::nvmlPciInfo_t>) |call| {
        let (address, id) = remote_pci(call, device, number)?;
        pci.put(info(address, id))
    }

    fn nvmlDeviceGetNvLinkRemoteDeviceType(
        device: Device,
        number: c_uint,
        kind: OutPointer<sys::nvmlIntNvLinkDeviceType_t>,
    ) |call| {
        kind.put(match link(call, device, number)?.remote(call)? {
            Remote::Gpu { .. } => sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_GPU,
            Remote::Switch { .. } => sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH,
        })
    }

    fn nvmlDeviceGetNvLinkErrorCounter(
        device: Device,
        number: c_uint,
        counter: sys::nvmlNvLinkErrorCounter_t,
        value: OutPointer<c_ulonglong>,
    ) |call| {
        let link = link(call, device, number)?;
        if counter >= sys::nvmlNvLinkErrorCounter_enum_NVML_NVLINK_ERROR_COUNT {
            return Err(Status::INVALID_ARGUMENT);
        }
        value.put(link.errors())
    }
}
