//! Reads the values of one GPU and its GPU instances. Rates need two readings, so the first has none.

use std::collections::BTreeMap;
use std::time::Instant;

use gantry_topology::GpuUuid;

use super::field::{Field, Values};
use crate::nvml::{Device, EccSpan, FieldValue, MemoryUse, Nvml, NvmlError, ProfileSample, ProfilingMetric};

const MIB: f64 = 1_048_576.0;

/// The values of one GPU at one time.
#[derive(Debug, Clone)]
pub struct GpuSample {
    /// NVML's index.
    pub index: u32,
    pub uuid: GpuUuid,
    pub taken: Instant,
    pub gpu: Values,
    /// By id of the GPU instance; empty without MIG.
    pub instances: BTreeMap<u32, Values>,
}

/// Reads the GPUs of a loaded NVML, and keeps what the next rates start from.
pub(super) struct Reader<'nvml> {
    nvml: &'nvml Nvml,
    /// The last profiling counters, by NVML index and GPU instance.
    profiles: BTreeMap<(u32, Option<u32>), ProfileSample<'nvml>>,
    /// KiB sent and received over NVLink, by NVML index.
    links: BTreeMap<u32, (Instant, [Option<f64>; 2])>,
}

/// The result of a call that a GPU may lack or refuse: no value. An error that makes further calls useless ends the reading.
fn optional<T>(result: Result<T, NvmlError>) -> Result<Option<T>, NvmlError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.is_gpu_lost() || error.is_driver_gone() => Err(error),
        Err(_) => Ok(None),
    }
}

impl<'nvml> Reader<'nvml> {
    pub(super) fn new(nvml: &'nvml Nvml) -> Self {
        Self { nvml, profiles: BTreeMap::new(), links: BTreeMap::new() }
    }

    /// Reads the GPU at NVML's index.
    ///
    /// # Errors
    /// The GPU is lost, has no UUID, or the driver is gone.
    pub(super) fn read(&mut self, index: u32) -> Result<GpuSample, NvmlError> {
        let device = self.nvml.device(index)?;
        let uuid = device.uuid()?;
        let mut gpu = Values::default();
        self.read_board(device, &mut gpu)?;
        let telemetry = device.telemetry();
        let is_profiled = optional(telemetry.is_profiled())?.unwrap_or(false);
        let is_mig = optional(device.mig().mode())?.is_some_and(|mode| mode.current);
        if is_profiled {
            self.read_profile(device, None, &mut gpu)?;
        }
        // Before Hopper, in the first reading, and where MIG mode has profiling counters of GPU instances only.
        if gpu.get(Field::PcieSent).is_none()
            && let Some((sent, received)) = optional(telemetry.pcie_traffic())?
        {
            gpu.set(Field::PcieSent, f64::from(sent) * 1000.0);
            gpu.set(Field::PcieReceived, f64::from(received) * 1000.0);
        }
        set_device_traffic(&mut gpu);
        let mut instances: BTreeMap<u32, Values> = BTreeMap::new();
        for slice in if is_mig { optional(device.mig().devices())?.unwrap_or_default() } else { Vec::new() } {
            let Some(ids) = optional(slice.ids())? else { continue };
            // The compute instances of a GPU instance share its memory and its counters.
            if instances.contains_key(&ids.gpu_instance) {
                continue;
            }
            let mut values = Values::default();
            set_memory(&mut values, optional(slice.memory_use())?);
            if is_profiled {
                self.read_profile(device, Some(ids.gpu_instance), &mut values)?;
            }
            instances.insert(ids.gpu_instance, values);
        }
        self.profiles.retain(|(of, instance), _| {
            *of != index || instance.is_none_or(|instance| instances.contains_key(&instance))
        });
        Ok(GpuSample { index, uuid, taken: Instant::now(), gpu, instances })
    }

    fn read_board(&mut self, device: Device<'_>, values: &mut Values) -> Result<(), NvmlError> {
        let telemetry = device.telemetry();
        if let Some((gpu, memory)) = optional(telemetry.load())? {
            values.set(Field::GpuLoad, f64::from(gpu));
            values.set(Field::MemoryLoad, f64::from(memory));
        }
        values.set(Field::EncoderLoad, optional(telemetry.encoder_load())?.map(f64::from));
        values.set(Field::DecoderLoad, optional(telemetry.decoder_load())?.map(f64::from));
        set_memory(values, optional(telemetry.memory_use())?);
        values.set(Field::Celsius, optional(telemetry.celsius())?.map(f64::from));
        values.set(Field::Watts, optional(telemetry.milliwatts())?.map(|power| f64::from(power) / 1000.0));
        let limit = optional(telemetry.milliwatt_limit())?;
        values.set(Field::WattLimit, limit.map(|limit| f64::from(limit) / 1000.0));
        values.set(Field::Millijoules, optional(telemetry.millijoules())?.map(|energy| energy as f64));
        values.set(Field::SmClock, optional(telemetry.sm_clock())?.map(f64::from));
        values.set(Field::MemoryClock, optional(telemetry.memory_clock())?.map(f64::from));
        values.set(Field::ClockReasons, optional(telemetry.clock_reasons())?.map(|bits| bits as f64));
        values.set(Field::PcieReplays, optional(telemetry.pcie_replays())?.map(f64::from));
        for (span, corrected, uncorrected) in [
            (EccSpan::Volatile, Field::CorrectedVolatile, Field::UncorrectedVolatile),
            (EccSpan::Aggregate, Field::CorrectedAggregate, Field::UncorrectedAggregate),
        ] {
            let errors = optional(telemetry.ecc_errors(span))?;
            values.set(corrected, errors.map(|(count, _)| count as f64));
            values.set(uncorrected, errors.map(|(_, count)| count as f64));
        }
        if let Some(rows) = optional(device.remapped_rows())? {
            values.set(Field::RemappedCorrected, f64::from(rows.corrected));
            values.set(Field::RemappedUncorrected, f64::from(rows.uncorrected));
            values.set(Field::RemapFailure, f64::from(u8::from(rows.failed)));
        } else if let Some((corrected, uncorrected, pending)) = optional(telemetry.retired_pages())? {
            values.set(Field::RetiredCorrected, corrected as f64);
            values.set(Field::RetiredUncorrected, uncorrected as f64);
            values.set(Field::RetirementPending, f64::from(u8::from(pending)));
        }
        if let Some(fields) = optional(telemetry.field_values())? {
            self.set_fields(device.index(), fields, values);
        }
        Ok(())
    }

    fn set_fields(&mut self, index: u32, fields: [Option<f64>; FieldValue::ALL.len()], values: &mut Values) {
        let now = Instant::now();
        let before = self.links.get(&index).copied();
        let mut links = [None; 2];
        // Bytes per second since the last reading; `None` if the counter was reset meanwhile.
        let rate = |now_kib: f64, position: usize| {
            let (then, counts) = before?;
            let seconds = now.duration_since(then).as_secs_f64();
            let kib = now_kib - counts.get(position).copied().flatten()?;
            (kib >= 0.0 && seconds > 0.0).then(|| kib * 1024.0 / seconds)
        };
        for (field, value) in FieldValue::ALL.into_iter().zip(fields) {
            match field {
                FieldValue::MemoryCelsius => values.set(Field::MemoryCelsius, value),
                FieldValue::NvLinkFlitErrors => values.set(Field::NvLinkFlitErrors, value),
                FieldValue::NvLinkDataErrors => values.set(Field::NvLinkDataErrors, value),
                FieldValue::NvLinkReplays => values.set(Field::NvLinkReplays, value),
                FieldValue::NvLinkRecoveries => values.set(Field::NvLinkRecoveries, value),
                FieldValue::NvLinkSentKib => {
                    links[0] = value;
                    values.set(Field::NvLinkSent, value.and_then(|kib| rate(kib, 0)));
                }
                FieldValue::NvLinkReceivedKib => {
                    links[1] = value;
                    values.set(Field::NvLinkReceived, value.and_then(|kib| rate(kib, 1)));
                }
            }
        }
        self.links.insert(index, (now, links));
    }

    /// Sets the metrics between the last counters and the present ones.
    fn read_profile(
        &mut self,
        device: Device<'nvml>,
        instance: Option<u32>,
        values: &mut Values,
    ) -> Result<(), NvmlError> {
        let key = (device.index(), instance);
        // A GPU in MIG mode may have counters of its instances only.
        let Some(sample) = optional(device.telemetry().profile(instance))? else {
            self.profiles.remove(&key);
            return Ok(());
        };
        let metrics = match self.profiles.get(&key) {
            Some(earlier) => optional(sample.since(earlier))?,
            None => None,
        };
        self.profiles.insert(key, sample);
        for (metric, value) in ProfilingMetric::ALL.into_iter().zip(metrics.into_iter().flatten()) {
            let Some(value) = value else { continue };
            let (field, value) = match metric {
                ProfilingMetric::GraphicsActive => (Field::GraphicsActive, value / 100.0),
                ProfilingMetric::SmActive => (Field::SmActive, value / 100.0),
                ProfilingMetric::SmOccupancy => (Field::SmOccupancy, value / 100.0),
                ProfilingMetric::TensorActive => (Field::TensorActive, value / 100.0),
                ProfilingMetric::DramActive => (Field::DramActive, value / 100.0),
                ProfilingMetric::Fp64Active => (Field::Fp64Active, value / 100.0),
                ProfilingMetric::Fp32Active => (Field::Fp32Active, value / 100.0),
                ProfilingMetric::Fp16Active => (Field::Fp16Active, value / 100.0),
                ProfilingMetric::PcieSent => (Field::PcieSent, value * MIB),
                ProfilingMetric::PcieReceived => (Field::PcieReceived, value * MIB),
                ProfilingMetric::NvLinkSent => (Field::NvLinkSent, value * MIB),
                ProfilingMetric::NvLinkReceived => (Field::NvLinkReceived, value * MIB),
            };
            values.set(field, value);
        }
        Ok(())
    }
}

/// The traffic under the names of DCGM's device fields, in their units: KB and MiB per second.
fn set_device_traffic(values: &mut Values) {
    values.set(Field::PcieSentKb, values.get(Field::PcieSent).map(|bytes| (bytes / 1000.0).round()));
    values.set(Field::PcieReceivedKb, values.get(Field::PcieReceived).map(|bytes| (bytes / 1000.0).round()));
    let links = values.get(Field::NvLinkSent).zip(values.get(Field::NvLinkReceived));
    values.set(Field::NvLinkMib, links.map(|(sent, received)| ((sent + received) / MIB).round()));
}

fn set_memory(values: &mut Values, memory: Option<MemoryUse>) {
    let Some(memory) = memory else { return };
    let mib = |bytes: u64| (bytes >> 20) as f64;
    values.set(Field::MemoryTotal, mib(memory.total));
    values.set(Field::MemoryFree, mib(memory.free));
    values.set(Field::MemoryUsed, mib(memory.used));
    values.set(Field::MemoryReserved, memory.reserved.map(mib));
}
