//! What a GPU is doing: temperature, power, clocks, load, modes, processes.

use std::ffi::{c_int, c_uint, c_ulonglong};

use gantry_topology::Throttle;
use nvml_wrapper_sys::bindings as sys;

use super::args::{OutPointer, Status};
use super::call::{Subject, Target};
use super::handle::Device;
use crate::control::ComputeMode;
use crate::library::Meter;

/// Temperature of a GPU on which nothing was set, in degrees Celsius.
const IDLE_CELSIUS: u32 = 35;
/// Highest temperature the GPU may reach, where it slows down, and where it shuts down.
const LIMITS_CELSIUS: (u32, u32, u32) = (87, 89, 92);
/// How long the driver measures the load of encoder and decoder.
const SAMPLING_MICROSECONDS: c_uint = 167_000;
/// "No instance" in a process entry.
const NO_INSTANCE: c_uint = c_uint::MAX;

impl Target<'_> {
    pub(super) fn celsius(self) -> u32 {
        self.unusual().and_then(|state| state.temperature).unwrap_or(IDLE_CELSIUS)
    }

    fn compute_mode(self) -> sys::nvmlComputeMode_t {
        match self.unusual().map(|state| state.compute_mode).unwrap_or_default() {
            ComputeMode::Default => sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_DEFAULT,
            ComputeMode::Prohibited => sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_PROHIBITED,
            ComputeMode::ExclusiveProcess => sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_EXCLUSIVE_PROCESS,
        }
    }

    /// The slowdown of the machine file, or that of a temperature set above the limit.
    fn throttle(self) -> Option<Throttle> {
        let is_hot = self.celsius() >= LIMITS_CELSIUS.1;
        self.facts.throttle.or(is_hot.then_some(Throttle::Thermal))
    }

    pub(super) fn pcie_replays(self) -> c_uint {
        self.unusual().map_or(0, |state| state.pcie_replays)
    }

    pub(super) fn utilization(self) -> u32 {
        self.unusual().and_then(|state| state.utilization).unwrap_or(0)
    }

    /// Draw in milliwatts: a tenth of the limit at rest, the whole of it at full load.
    pub(super) fn milliwatts(self) -> u32 {
        let limit = self.power_limit();
        limit / 10 + limit / 10 * 9 * self.utilization().min(100) / 100
    }

    /// Power limit in milliwatts.
    pub(super) fn power_limit(self) -> u32 {
        self.facts.product.power_watts * 1000
    }

    /// Clock in MHz at full speed.
    fn clock(self, kind: sys::nvmlClockType_t) -> Result<u32, Status> {
        let (sm, memory) = self.facts.product.clocks;
        match kind {
            sys::nvmlClockType_enum_NVML_CLOCK_GRAPHICS
            | sys::nvmlClockType_enum_NVML_CLOCK_SM
            | sys::nvmlClockType_enum_NVML_CLOCK_VIDEO => Ok(sm),
            sys::nvmlClockType_enum_NVML_CLOCK_MEM => Ok(memory),
            _ => Err(Status::INVALID_ARGUMENT),
        }
    }
}

/// The processes on a GPU, or those in a MIG device.
fn process_entries(subject: Subject<'_>) -> Vec<sys::nvmlProcessInfo_v2_t> {
    let entries = subject.processes().map(|process| sys::nvmlProcessInfo_v2_t {
        pid: process.pid,
        usedGpuMemory: process.memory_mib << 20,
        gpuInstanceId: process.gpu_instance.unwrap_or(NO_INSTANCE),
        computeInstanceId: process.compute_instance.unwrap_or(NO_INSTANCE),
    });
    entries.collect()
}

fn without_instances(entries: &[sys::nvmlProcessInfo_v2_t]) -> Vec<sys::nvmlProcessInfo_v1_t> {
    let entries = entries
        .iter()
        .map(|entry| sys::nvmlProcessInfo_v1_t { pid: entry.pid, usedGpuMemory: entry.usedGpuMemory });
    entries.collect()
}

/// NVML's bits for the cause of a slowdown.
fn slowdown(throttle: Throttle) -> c_ulonglong {
    let cause = match throttle {
        Throttle::Thermal => sys::nvmlClocksThrottleReasonHwThermalSlowdown,
        Throttle::PowerBrake => sys::nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
        Throttle::Hardware => 0,
    };
    c_ulonglong::from(cause | sys::nvmlClocksThrottleReasonHwSlowdown)
}

nvml_get! {
    nvmlDeviceGetPowerUsage: c_uint = |gpu| gpu.milliwatts();
    nvmlDeviceGetPowerManagementMode | nvmlDeviceGetPersistenceMode: sys::nvmlEnableState_t = |_|
        sys::nvmlEnableState_enum_NVML_FEATURE_ENABLED;
    nvmlDeviceGetPowerManagementLimit
        | nvmlDeviceGetPowerManagementDefaultLimit
        | nvmlDeviceGetEnforcedPowerLimit: c_uint = |gpu| gpu.power_limit();
    nvmlDeviceGetPerformanceState | nvmlDeviceGetPowerState: sys::nvmlPstates_t = |_|
        sys::nvmlPStates_enum_NVML_PSTATE_0;
    nvmlDeviceGetCurrentClocksEventReasons | nvmlDeviceGetCurrentClocksThrottleReasons: c_ulonglong = |gpu|
        gpu.throttle().map_or(0, slowdown);
    nvmlDeviceGetComputeMode: sys::nvmlComputeMode_t = |gpu| gpu.compute_mode();
}

nvml! {
    fn nvmlDeviceGetTemperature(device: Device, sensor: c_uint, out: OutPointer<c_uint>) |call| {
        let gpu = call.gpu(device)?;
        if sensor != sys::nvmlTemperatureSensors_enum_NVML_TEMPERATURE_GPU {
            return Err(Status::INVALID_ARGUMENT);
        }
        out.put(gpu.celsius())
    }

    fn nvmlDeviceGetTemperatureV(device: Device, out: OutPointer<sys::nvmlTemperature_t>) |call| {
        out.check_version(1)?;
        let gpu = call.gpu(device)?;
        let mut answer = out.get()?;
        if answer.sensorType != sys::nvmlTemperatureSensors_enum_NVML_TEMPERATURE_GPU {
            return Err(Status::INVALID_ARGUMENT);
        }
        answer.temperature = c_int::try_from(gpu.celsius()).unwrap_or(c_int::MAX);
        out.put(answer)
    }

    fn nvmlDeviceGetTemperatureThreshold(device: Device, kind: c_uint, out: OutPointer<c_uint>) |call| {
        call.gpu(device)?;
        let (highest, slowdown, shutdown) = LIMITS_CELSIUS;
        match kind {
            sys::nvmlTemperatureThresholds_enum_NVML_TEMPERATURE_THRESHOLD_SHUTDOWN => out.put(shutdown),
            sys::nvmlTemperatureThresholds_enum_NVML_TEMPERATURE_THRESHOLD_SLOWDOWN => out.put(slowdown),
            sys::nvmlTemperatureThresholds_enum_NVML_TEMPERATURE_THRESHOLD_GPU_MAX => out.put(highest),
            other if other < sys::nvmlTemperatureThresholds_enum_NVML_TEMPERATURE_THRESHOLD_COUNT => {
                Err(Status::NOT_SUPPORTED)
            }
            _ => Err(Status::INVALID_ARGUMENT),
        }
    }

    fn nvmlDeviceGetPowerManagementLimitConstraints(device: Device, low: OutPointer<c_uint>, high: OutPointer<c_uint>) |call| {
        let limit = call.gpu(device)?.power_limit();
        high.check()?;
        low.put(limit / 2)?;
        high.put(limit)
    }

    fn nvmlDeviceGetUtilizationRates(device: Device, out: OutPointer<sys::nvmlUtilization_t>) |call| {
        let gpu = call.gpu(device)?;
        if gpu.mig_enabled() {
            return Err(Status::NOT_SUPPORTED);
        }
        let gpu = gpu.utilization();
        out.put(sys::nvmlUtilization_t { gpu, memory: gpu / 2 })
    }

    fn nvmlDeviceGetEncoderUtilization(device: Device, percent: OutPointer<c_uint>, period: OutPointer<c_uint>) |call| {
        let gpu = call.gpu(device)?;
        period.check()?;
        percent.put(gpu.activity().encoder.unwrap_or(0))?;
        period.put(SAMPLING_MICROSECONDS)
    }

    fn nvmlDeviceGetDecoderUtilization(device: Device, percent: OutPointer<c_uint>, period: OutPointer<c_uint>) |call| {
        let gpu = call.gpu(device)?;
        period.check()?;
        percent.put(gpu.activity().decoder.unwrap_or(0))?;
        period.put(SAMPLING_MICROSECONDS)
    }

    fn nvmlDeviceGetTotalEnergyConsumption(device: Device, millijoules: OutPointer<c_ulonglong>) |call| {
        let gpu = call.gpu(device)?;
        let rate = f64::from(gpu.milliwatts());
        millijoules.put(call.session.meters.read(gpu.facts.index, Meter::Energy, rate))
    }

    fn nvmlDeviceGetClockInfo(device: Device, kind: sys::nvmlClockType_t, out: OutPointer<c_uint>) |call| {
        let gpu = call.gpu(device)?;
        let full = gpu.clock(kind)?;
        let is_sm = kind == sys::nvmlClockType_enum_NVML_CLOCK_SM;
        out.put(gpu.unusual().and_then(|state| state.sm_clock).filter(|_| is_sm).unwrap_or(full))
    }

    fn nvmlDeviceGetMaxClockInfo(device: Device, kind: sys::nvmlClockType_t, out: OutPointer<c_uint>) |call| {
        out.put(call.gpu(device)?.clock(kind)?)
    }

    fn nvmlDeviceGetComputeRunningProcesses(
        device: Device,
        count: OutPointer<c_uint>,
        out: OutPointer<sys::nvmlProcessInfo_v1_t>,
    ) |call| {
        out.put_list(count, &without_instances(&process_entries(call.subject(device)?)))
    }

    fn nvmlDeviceGetComputeRunningProcesses_v2
    | nvmlDeviceGetComputeRunningProcesses_v3(
        device: Device,
        count: OutPointer<c_uint>,
        out: OutPointer<sys::nvmlProcessInfo_v2_t>,
    ) |call| {
        out.put_list(count, &process_entries(call.subject(device)?))
    }

    fn nvmlDeviceGetGraphicsRunningProcesses_v3(
        device: Device,
        count: OutPointer<c_uint>,
        out: OutPointer<sys::nvmlProcessInfo_v2_t>,
    ) |call| {
        // Nothing draws on a simulated machine.
        call.subject(device)?;
        out.put_list(count, &[])
    }

    fn nvmlDeviceGetMPSComputeRunningProcesses_v3(
        device: Device,
        count: OutPointer<c_uint>,
        out: OutPointer<sys::nvmlProcessInfo_v2_t>,
    ) |call| {
        call.subject(device)?;
        out.put_list(count, &[])
    }
}
