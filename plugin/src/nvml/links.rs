//! NVLinks of one GPU, link by link: whether it is up, its generation, and its far end, as NVML returns it.
//! Discovery turns this into links of the machine.

use gantry_topology::PcieAddress;
use nvml_wrapper_sys::bindings as sys;

use super::call::symbol;
use super::{Device, NvmlError};

/// The far end of an NVLink.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Remote {
    /// Another GPU.
    Gpu,
    /// An NVSwitch.
    Switch,
    /// The CPU, on POWER9.
    Processor,
    /// Unknown to NVML, or newer than this build.
    Unknown,
}

impl Device<'_> {
    /// Whether link `link` is up. NVML returns `InvalidArgument` for a link that the GPU does not have.
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn nvlink_active(&self, link: u8) -> Result<bool, NvmlError> {
        self.call("nvmlDeviceGetNvLinkState", |device| device.link_wrapper_for(link.into()).is_active())
    }

    /// NVLink generation of `link`, 1 to 5; `None` for one unknown to this build.
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn nvlink_version(&self, link: u8) -> Result<Option<u8>, NvmlError> {
        let version =
            self.call("nvmlDeviceGetNvLinkVersion", |device| device.link_wrapper_for(link.into()).version())?;
        // NVML has its own list of versions, in which 2.2 and 3.1 are separate entries.
        Ok(match version {
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

    /// The type of the far end of `link`.
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn nvlink_remote(&self, link: u8) -> Result<Remote, NvmlError> {
        // Raw: nvml-wrapper writes the type into a temporary and always returns Unknown.
        let symbol = symbol!(self.nvml, nvmlDeviceGetNvLinkRemoteDeviceType)?;
        let unknown = sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_UNKNOWN;
        Ok(match self.get_link(symbol, link, unknown)? {
            sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_GPU => Remote::Gpu,
            sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH => Remote::Switch,
            sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_IBMNPU => Remote::Processor,
            _ => Remote::Unknown,
        })
    }

    /// PCIe address of the far end of `link`; `None` if NVML has none (such as a switch that is invisible to a
    /// VM).
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn nvlink_remote_bus_id(&self, link: u8) -> Result<Option<PcieAddress>, NvmlError> {
        let remote = self.call("nvmlDeviceGetNvLinkRemotePciInfo_v2", |device| {
            device.link_wrapper_for(link.into()).remote_pci_info()
        })?;
        Ok(remote.bus_id.parse().ok())
    }
}
