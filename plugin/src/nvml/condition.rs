//! NVML's facts about the present condition of a GPU's links and clocks.

use std::ffi::c_ulonglong;

use gantry_topology::{PcieLink, PeerStatus, Throttle};
use nvml_wrapper_sys::bindings as sys;

use super::device::{check, symbol};
use super::{Device, NvmlError};
use crate::health::ClockSample;

impl Device<'_> {
    /// The PCIe link as it is trained now; `None` for a virtual GPU. The generation of an idle GPU may be lowered to save
    /// power.
    pub fn current_pcie(&self) -> Result<Option<PcieLink>, NvmlError> {
        let generation = self.get(symbol!(self.nvml, nvmlDeviceGetCurrPcieLinkGeneration)?, 0)?;
        let width = self.get(symbol!(self.nvml, nvmlDeviceGetCurrPcieLinkWidth)?, 0)?;
        let [generation, width] = [generation, width].map(|number| u8::try_from(number).unwrap_or(0));
        let exists = (1..=7).contains(&generation) && (1..=32).contains(&width);
        Ok(exists.then_some(PcieLink { generation, width }))
    }

    /// Whether the GPU is in its highest performance state, in which its PCIe link runs at the full generation.
    pub fn is_at_full_performance(&self) -> Result<bool, NvmlError> {
        let state = self.get(symbol!(self.nvml, nvmlDeviceGetPerformanceState)?, 0)?;
        Ok(state == sys::nvmlPStates_enum_NVML_PSTATE_0)
    }

    /// Why the clocks are held down, other than by load and settings.
    pub fn throttle(&self) -> Result<Option<Throttle>, NvmlError> {
        let reasons: c_ulonglong =
            self.get(symbol!(self.nvml, nvmlDeviceGetCurrentClocksThrottleReasons)?, 0)?;
        let has = |reason: u32| reasons & c_ulonglong::from(reason) != 0;
        Ok(if has(sys::nvmlClocksThrottleReasonHwThermalSlowdown) {
            Some(Throttle::Thermal)
        } else if has(sys::nvmlClocksThrottleReasonHwPowerBrakeSlowdown) {
            Some(Throttle::PowerBrake)
        } else if has(sys::nvmlClocksThrottleReasonHwSlowdown) {
            Some(Throttle::Hardware)
        } else {
            None
        })
    }

    /// The lowest of all power limits in milliwatts: that of the board, of the chassis, and the one that was set.
    fn enforced_power_limit(&self) -> Result<u32, NvmlError> {
        self.get(symbol!(self.nvml, nvmlDeviceGetEnforcedPowerLimit)?, 0)
    }

    /// How fast the GPU runs; `None` if nothing runs on it.
    pub fn clock_sample(&self) -> Result<Option<ClockSample>, NvmlError> {
        let reasons = self.clock_reasons()?;
        let has = |reason: u32| reasons & c_ulonglong::from(reason) != 0;
        if has(sys::nvmlClocksThrottleReasonGpuIdle) {
            return Ok(None);
        }
        let (clock, highest) = (self.sm_clock()?, self.max_sm_clock()?);
        let percent = |part: u32, whole: u32| {
            u8::try_from(u64::from(part) * 100 / u64::from(whole.max(1))).unwrap_or(100).min(100)
        };
        let power = self.milliwatts().and_then(|draw| Ok((draw, self.enforced_power_limit()?)));
        Ok(Some(ClockSample {
            sm_percent: percent(clock, highest),
            // Some GPUs, such as virtual ones, have no meter.
            power_percent: power
                .ok()
                .filter(|(_, limit)| *limit > 0)
                .map(|(draw, limit)| percent(draw, limit)),
            // In the order of `CLOCK_LIMITS`.
            limits: [
                sys::nvmlClocksThrottleReasonSwPowerCap,
                sys::nvmlClocksThrottleReasonSwThermalSlowdown,
                sys::nvmlClocksThrottleReasonHwThermalSlowdown,
                sys::nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
                sys::nvmlClocksThrottleReasonHwSlowdown,
            ]
            .map(has),
        }))
    }

    /// Why this GPU and `other` have no peer-to-peer access; `None` if they have, or if NVML does not know.
    pub fn peer_refusal(&self, other: Device<'_>) -> Result<Option<PeerStatus>, NvmlError> {
        let (name, function) = symbol!(self.nvml, nvmlDeviceGetP2PStatus)?;
        for access in [
            sys::nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_READ,
            sys::nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_WRITE,
        ] {
            let mut status = sys::nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_UNKNOWN;
            // SAFETY: both handles came from a live NVML; the out-pointer is a local of the declared type.
            check(name, Some(self.index), unsafe {
                function(self.handle, other.handle, access, &raw mut status)
            })?;
            let refusal = match status {
                sys::nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED => PeerStatus::Chipset,
                sys::nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_GPU_NOT_SUPPORTED => PeerStatus::Gpu,
                sys::nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_IOH_TOPOLOGY_NOT_SUPPORTED => PeerStatus::Topology,
                sys::nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_DISABLED_BY_REGKEY => PeerStatus::Disabled,
                sys::nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_NOT_SUPPORTED => PeerStatus::NotSupported,
                _ => continue,
            };
            return Ok(Some(refusal));
        }
        Ok(None)
    }
}
