//! NVML's readings of what a GPU is doing: load, memory, heat, power, clocks, links, errors and traffic.

use std::ffi::{c_int, c_uint, c_ulonglong};

use gantry_topology::{PcieLink, Throttle};
use nvml_wrapper::GpmSample;
use nvml_wrapper::enum_wrappers::device::{
    Clock, EccCounter, MemoryError, PcieUtilCounter, RetirementCause, TemperatureSensor,
};
use nvml_wrapper::enums::gpm::GpmMetricId;
use nvml_wrapper::gpm::gpm_metrics_get;
use nvml_wrapper_sys::bindings as sys;
use sys::field_id as field;

use super::device::{check, symbol};
use super::{Device, MigDevice, Nvml, NvmlError};
use crate::health::ClockSample;

/// Memory of a GPU or a GPU instance in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryUse {
    pub total: u64,
    /// Used by processes.
    pub used: u64,
    pub free: u64,
    /// Kept by the driver; `None` from drivers before 510, which count it as used.
    pub reserved: Option<u64>,
}

/// ECC errors, corrected and uncorrected, since the driver was loaded or over the life of the board.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EccSpan {
    Volatile,
    Aggregate,
}

/// A number that NVML reports by the number of its field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FieldValue {
    MemoryCelsius,
    NvLinkFlitErrors,
    NvLinkDataErrors,
    NvLinkReplays,
    NvLinkRecoveries,
    /// KiB of data that all NVLinks sent since the driver was loaded.
    NvLinkSentKib,
    NvLinkReceivedKib,
}

impl FieldValue {
    /// All fields, in the order of [`Telemetry::field_values`].
    pub const ALL: [Self; 7] = [
        Self::MemoryCelsius,
        Self::NvLinkFlitErrors,
        Self::NvLinkDataErrors,
        Self::NvLinkReplays,
        Self::NvLinkRecoveries,
        Self::NvLinkSentKib,
        Self::NvLinkReceivedKib,
    ];

    /// NVML's number of the field, and its scope: all links, or none.
    const fn id(self) -> (c_uint, c_uint) {
        match self {
            Self::MemoryCelsius => (field::NVML_FI_DEV_MEMORY_TEMP, 0),
            Self::NvLinkFlitErrors => (field::NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL, 0),
            Self::NvLinkDataErrors => (field::NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL, 0),
            Self::NvLinkReplays => (field::NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL, 0),
            Self::NvLinkRecoveries => (field::NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL, 0),
            Self::NvLinkSentKib => (field::NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, c_uint::MAX),
            Self::NvLinkReceivedKib => (field::NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, c_uint::MAX),
        }
    }
}

/// A profiling metric of NVML's GPU performance monitoring (GPM), in percent or MiB/s.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProfilingMetric {
    GraphicsActive,
    SmActive,
    SmOccupancy,
    TensorActive,
    DramActive,
    Fp64Active,
    Fp32Active,
    Fp16Active,
    PcieSent,
    PcieReceived,
    NvLinkSent,
    NvLinkReceived,
}

impl ProfilingMetric {
    /// All metrics, in the order of [`ProfileSample::since`].
    pub const ALL: [Self; 12] = [
        Self::GraphicsActive,
        Self::SmActive,
        Self::SmOccupancy,
        Self::TensorActive,
        Self::DramActive,
        Self::Fp64Active,
        Self::Fp32Active,
        Self::Fp16Active,
        Self::PcieSent,
        Self::PcieReceived,
        Self::NvLinkSent,
        Self::NvLinkReceived,
    ];

    const fn id(self) -> GpmMetricId {
        match self {
            Self::GraphicsActive => GpmMetricId::GraphicsUtil,
            Self::SmActive => GpmMetricId::SmUtil,
            Self::SmOccupancy => GpmMetricId::SmOccupancy,
            Self::TensorActive => GpmMetricId::AnyTensorUtil,
            Self::DramActive => GpmMetricId::DramBwUtil,
            Self::Fp64Active => GpmMetricId::Fp64Util,
            Self::Fp32Active => GpmMetricId::Fp32Util,
            Self::Fp16Active => GpmMetricId::Fp16Util,
            Self::PcieSent => GpmMetricId::PcieTxPerSec,
            Self::PcieReceived => GpmMetricId::PcieRxPerSec,
            Self::NvLinkSent => GpmMetricId::NvlinkTotalTxPerSec,
            Self::NvLinkReceived => GpmMetricId::NvlinkTotalRxPerSec,
        }
    }
}

/// The counters of a GPU or GPU instance at one moment. Two of them, 0.1 s apart or more, give the metrics between.
pub struct ProfileSample<'nvml> {
    sample: GpmSample<'nvml>,
    nvml: &'nvml Nvml,
    index: u32,
}

impl ProfileSample<'_> {
    /// The metrics between `earlier` and this one, in the order of [`ProfilingMetric::ALL`]; `None` for one that the GPU lacks.
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn since(&self, earlier: &Self) -> Result<[Option<f64>; ProfilingMetric::ALL.len()], NvmlError> {
        let ids = ProfilingMetric::ALL.map(ProfilingMetric::id);
        let results = self.nvml.call("nvmlGpmMetricsGet", Some(self.index), |nvml| {
            gpm_metrics_get(nvml, &earlier.sample, &self.sample, &ids)
        })?;
        let mut values = [None; ProfilingMetric::ALL.len()];
        for (value, result) in values.iter_mut().zip(results) {
            *value = result.ok().map(|metric| metric.value).filter(|value| value.is_finite());
        }
        Ok(values)
    }
}

/// The readings of one GPU.
#[derive(Clone, Copy)]
pub struct Telemetry<'nvml>(pub(super) Device<'nvml>);

impl<'nvml> Telemetry<'nvml> {
    /// Shares of time, in percent, in which a kernel ran and in which memory was read or written. GPUs in MIG mode return
    /// `NotSupported`.
    ///
    /// # Errors
    /// As for every call here: the code that NVML returned.
    pub fn load(&self) -> Result<(u32, u32), NvmlError> {
        let load = self.0.call("nvmlDeviceGetUtilizationRates", |device| device.utilization_rates())?;
        Ok((load.gpu, load.memory))
    }

    /// Load of the video encoder in percent.
    pub fn encoder_load(&self) -> Result<u32, NvmlError> {
        Ok(self.0.call("nvmlDeviceGetEncoderUtilization", |device| device.encoder_utilization())?.utilization)
    }

    /// Load of the video decoder in percent.
    pub fn decoder_load(&self) -> Result<u32, NvmlError> {
        Ok(self.0.call("nvmlDeviceGetDecoderUtilization", |device| device.decoder_utilization())?.utilization)
    }

    pub fn memory_use(&self) -> Result<MemoryUse, NvmlError> {
        match self.0.call("nvmlDeviceGetMemoryInfo_v2", |device| device.memory_info()) {
            // Drivers before 510.
            Err(error) if error.is_unsupported() => {
                let blank = sys::nvmlMemory_t { total: 0, free: 0, used: 0 };
                let memory = self.0.get(symbol!(self.0.nvml, nvmlDeviceGetMemoryInfo)?, blank)?;
                Ok(MemoryUse { total: memory.total, used: memory.used, free: memory.free, reserved: None })
            }
            memory => memory.map(|memory| MemoryUse {
                total: memory.total,
                used: memory.used,
                free: memory.free,
                reserved: Some(memory.reserved),
            }),
        }
    }

    /// Degrees Celsius.
    pub fn celsius(&self) -> Result<u32, NvmlError> {
        self.0.call("nvmlDeviceGetTemperature", |device| device.temperature(TemperatureSensor::Gpu))
    }

    pub fn milliwatts(&self) -> Result<u32, NvmlError> {
        self.0.call("nvmlDeviceGetPowerUsage", |device| device.power_usage())
    }

    /// The power limit in milliwatts, above which the driver lowers the clocks.
    pub fn milliwatt_limit(&self) -> Result<u32, NvmlError> {
        self.0.call("nvmlDeviceGetPowerManagementLimit", |device| device.power_management_limit())
    }

    /// Energy in millijoules since the driver was loaded.
    pub fn millijoules(&self) -> Result<u64, NvmlError> {
        self.0.call("nvmlDeviceGetTotalEnergyConsumption", |device| device.total_energy_consumption())
    }

    /// Clock of the multiprocessors in MHz.
    pub fn sm_clock(&self) -> Result<u32, NvmlError> {
        self.0.call("nvmlDeviceGetClockInfo", |device| device.clock_info(Clock::SM))
    }

    /// The highest clock of the multiprocessors in MHz.
    pub fn max_sm_clock(&self) -> Result<u32, NvmlError> {
        self.0.call("nvmlDeviceGetMaxClockInfo", |device| device.max_clock_info(Clock::SM))
    }

    /// Clock of the memory in MHz.
    pub fn memory_clock(&self) -> Result<u32, NvmlError> {
        self.0.call("nvmlDeviceGetClockInfo", |device| device.clock_info(Clock::Memory))
    }

    /// Why the clocks are what they are: NVML's bits.
    pub fn clock_reasons(&self) -> Result<u64, NvmlError> {
        // The older of the two names, which every driver has.
        self.0.get(symbol!(self.0.nvml, nvmlDeviceGetCurrentClocksThrottleReasons)?, 0)
    }

    /// Corrected and uncorrected memory errors.
    pub fn ecc_errors(&self, span: EccSpan) -> Result<(u64, u64), NvmlError> {
        let counter = match span {
            EccSpan::Volatile => EccCounter::Volatile,
            EccSpan::Aggregate => EccCounter::Aggregate,
        };
        let count = |error: MemoryError| {
            self.0.call("nvmlDeviceGetTotalEccErrors", |device| device.total_ecc_errors(error, counter))
        };
        Ok((count(MemoryError::Corrected)?, count(MemoryError::Uncorrected)?))
    }

    /// Memory pages retired for single-bit errors, for double-bit errors, and whether some wait (before Ampere).
    pub fn retired_pages(&self) -> Result<(usize, usize, bool), NvmlError> {
        let count = |cause| {
            let pages = self.0.call("nvmlDeviceGetRetiredPages_v2", |device| device.retired_pages(cause))?;
            Ok(pages.len())
        };
        Ok((
            count(RetirementCause::MultipleSingleBitEccErrors)?,
            count(RetirementCause::DoubleBitEccError)?,
            self.0.retirement_pending()?,
        ))
    }

    pub fn pcie_replays(&self) -> Result<u32, NvmlError> {
        self.0.call("nvmlDeviceGetPcieReplayCounter", |device| device.pcie_replay_counter())
    }

    /// PCIe traffic in KB/s, sent and received. The driver measures each for 20 ms.
    pub fn pcie_traffic(&self) -> Result<(u32, u32), NvmlError> {
        let rate =
            |counter| self.0.call("nvmlDeviceGetPcieThroughput", |device| device.pcie_throughput(counter));
        Ok((rate(PcieUtilCounter::Send)?, rate(PcieUtilCounter::Receive)?))
    }

    /// The values of [`FieldValue::ALL`]; `None` for one that the GPU lacks.
    pub fn field_values(&self) -> Result<[Option<f64>; FieldValue::ALL.len()], NvmlError> {
        // Raw: nvml-wrapper asks for no scope, such as all links.
        let (name, function) = symbol!(self.0.nvml, nvmlDeviceGetFieldValues)?;
        let mut fields = FieldValue::ALL.map(|field| {
            let (id, scope) = field.id();
            sys::nvmlFieldValue_t {
                fieldId: id,
                scopeId: scope,
                timestamp: 0,
                latencyUsec: 0,
                valueType: sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG_LONG,
                // A field that the library does not write has no value.
                nvmlReturn: sys::nvmlReturn_enum_NVML_ERROR_UNKNOWN,
                value: sys::nvmlValue_t { ullVal: 0 },
            }
        });
        let count = FieldValue::ALL.len() as c_int;
        let _call = self.0.nvml.trace.begin(name, Some(self.0.index));
        // SAFETY: the handle came from the NVML that `self` borrows; `fields` holds `count` entries.
        check(name, Some(self.0.index), unsafe { function(self.0.handle, count, fields.as_mut_ptr()) })?;
        Ok(fields.map(|field| {
            if field.nvmlReturn != sys::nvmlReturn_enum_NVML_SUCCESS {
                return None;
            }
            let (value, kind) = (field.value, field.valueType);
            // SAFETY: the type states which member NVML wrote; all members are numbers, for which any bits are valid.
            let number = unsafe {
                match kind {
                    sys::nvmlValueType_enum_NVML_VALUE_TYPE_DOUBLE => value.dVal,
                    sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT => f64::from(value.uiVal),
                    sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG => value.ulVal as f64,
                    sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG_LONG => value.ullVal as f64,
                    sys::nvmlValueType_enum_NVML_VALUE_TYPE_SIGNED_LONG_LONG => value.sllVal as f64,
                    sys::nvmlValueType_enum_NVML_VALUE_TYPE_SIGNED_INT => f64::from(value.siVal),
                    _ => return None,
                }
            };
            number.is_finite().then_some(number)
        }))
    }

    /// Whether the GPU has profiling metrics: Hopper and later.
    pub fn is_profiled(&self) -> Result<bool, NvmlError> {
        self.0.call("nvmlGpmQueryDeviceSupport", |device| device.gpm_support())
    }

    /// The profiling counters of the GPU, or of the GPU instance with this id.
    pub fn profile(&self, gpu_instance: Option<u32>) -> Result<ProfileSample<'nvml>, NvmlError> {
        let sample = match gpu_instance {
            None => self.0.call("nvmlGpmSampleGet", |device| device.gpm_sample()),
            Some(id) => self.0.call("nvmlGpmMigSampleGet", |device| device.gpm_mig_sample(id)),
        }?;
        Ok(ProfileSample { sample, nvml: self.0.nvml, index: self.0.index })
    }

    /// The PCIe link as it is trained now; `None` for a virtual GPU. The generation of an idle GPU may be lowered to save
    /// power.
    pub fn current_pcie(&self) -> Result<Option<PcieLink>, NvmlError> {
        let generation = self.0.get(symbol!(self.0.nvml, nvmlDeviceGetCurrPcieLinkGeneration)?, 0)?;
        let width = self.0.get(symbol!(self.0.nvml, nvmlDeviceGetCurrPcieLinkWidth)?, 0)?;
        let [generation, width] = [generation, width].map(|number| u8::try_from(number).unwrap_or(0));
        let exists = (1..=7).contains(&generation) && (1..=32).contains(&width);
        Ok(exists.then_some(PcieLink { generation, width }))
    }

    /// Whether the GPU is in its highest performance state, in which its PCIe link runs at the full generation.
    pub fn is_at_full_performance(&self) -> Result<bool, NvmlError> {
        let state = self.0.get(symbol!(self.0.nvml, nvmlDeviceGetPerformanceState)?, 0)?;
        Ok(state == sys::nvmlPStates_enum_NVML_PSTATE_0)
    }

    /// Why the clocks are held down, other than by load and settings.
    pub fn throttle(&self) -> Result<Option<Throttle>, NvmlError> {
        let reasons: c_ulonglong =
            self.0.get(symbol!(self.0.nvml, nvmlDeviceGetCurrentClocksThrottleReasons)?, 0)?;
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
        self.0.get(symbol!(self.0.nvml, nvmlDeviceGetEnforcedPowerLimit)?, 0)
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
}

impl MigDevice<'_> {
    /// Memory of its GPU instance, which its compute instances share.
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn memory_use(&self) -> Result<MemoryUse, NvmlError> {
        self.0.telemetry().memory_use()
    }
}
