//! NVLinks of one GPU, link by link: whether it is up, which generation, what is at its far end. Only what NVML says; what it
//! means for the machine is worked out by discovery.

use gantry_topology::PcieAddress;
use nvml_wrapper_sys::bindings as sys;

use super::call::{symbol, text};
use super::device::BLANK_PCI;
use super::{Device, NvmlError};

/// What NVML says is at the far end of an NVLink.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Remote {
    /// Another GPU.
    Gpu,
    /// An NVSwitch.
    Switch,
    /// The CPU, on POWER9.
    Processor,
    /// NVML does not know, or calls it something newer than this build.
    Unknown,
}

impl Device<'_> {
    /// Whether link `link` is up. A link that the GPU does not have answers `InvalidArgument`.
    ///
    /// # Errors
    /// The code NVML answered with.
    pub fn nvlink_active(&self, link: u8) -> Result<bool, NvmlError> {
        let symbol = symbol!(self.nvml.table, nvmlDeviceGetNvLinkState)?;
        Ok(self.get_link(symbol, link, 0)? != 0)
    }

    /// NVLink generation of `link`, 1 to 5; `None` for one this build does not know.
    ///
    /// # Errors
    /// The code NVML answered with.
    pub fn nvlink_version(&self, link: u8) -> Result<Option<u8>, NvmlError> {
        let symbol = symbol!(self.nvml.table, nvmlDeviceGetNvLinkVersion)?;
        // NVML counts its own list of versions, in which 2.2 and 3.1 are entries of their own.
        Ok(match self.get_link(symbol, link, 0)? {
            sys::nvmlNvlinkVersion_enum_NVML_NVLINK_VERSION_1_0 => Some(1),
            sys::nvmlNvlinkVersion_enum_NVML_NVLINK_VERSION_2_0
            | sys::nvmlNvlinkVersion_enum_NVML_NVLINK_VERSION_2_2 => Some(2),
            sys::nvmlNvlinkVersion_enum_NVML_NVLINK_VERSION_3_0
            | sys::nvmlNvlinkVersion_enum_NVML_NVLINK_VERSION_3_1 => Some(3),
            sys::nvmlNvlinkVersion_enum_NVML_NVLINK_VERSION_4_0 => Some(4),
            sys::nvmlNvlinkVersion_enum_NVML_NVLINK_VERSION_5_0 => Some(5),
            _ => None,
        })
    }

    /// What is at the far end of `link`.
    ///
    /// # Errors
    /// The code NVML answered with.
    pub fn nvlink_remote(&self, link: u8) -> Result<Remote, NvmlError> {
        let symbol = symbol!(self.nvml.table, nvmlDeviceGetNvLinkRemoteDeviceType)?;
        let unknown = sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_UNKNOWN;
        Ok(match self.get_link(symbol, link, unknown)? {
            sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_GPU => Remote::Gpu,
            sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH => Remote::Switch,
            sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_IBMNPU => Remote::Processor,
            _ => Remote::Unknown,
        })
    }

    /// PCIe address of what is at the far end of `link`; `None` if NVML names none (as for a switch that a VM does not see).
    ///
    /// # Errors
    /// The code NVML answered with.
    pub fn nvlink_remote_bus_id(&self, link: u8) -> Result<Option<PcieAddress>, NvmlError> {
        let symbol = symbol!(self.nvml.table, nvmlDeviceGetNvLinkRemotePciInfo_v2)?;
        Ok(text(&self.get_link(symbol, link, BLANK_PCI)?.busId).parse().ok())
    }
}
