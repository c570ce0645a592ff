//! GPU performance monitoring (GPM): samples of the profiling counters, and the metrics between two of them. Hopper and later
//! have it.

use std::ffi::c_uint;
use std::time::{SystemTime, UNIX_EPOCH};

use nvml_wrapper_sys::bindings as sys;

use super::args::{OutPointer, Status};
use super::call::{Call, Target};
use super::handle::{Device, GpmSample};
use crate::control::Activity;
use crate::library::Profile;

/// What a GPU or GPU instance does, nothing left out: shares in percent, traffic in MiB/s.
pub(super) struct Work {
    sm_active: f64,
    sm_occupancy: f64,
    tensor_active: f64,
    dram_active: f64,
    pub(super) pcie_sent: f64,
    pub(super) pcie_received: f64,
    pub(super) nvlink_sent: f64,
    pub(super) nvlink_received: f64,
}

impl Target<'_> {
    /// What was set for the whole GPU.
    pub(super) fn activity(self) -> Activity {
        self.unusual().map(|state| state.activity).unwrap_or_default()
    }

    /// What the GPU does, or its GPU instance with this id.
    pub(super) fn work(self, instance: Option<u32>) -> Work {
        let set = match instance {
            None => self.activity(),
            Some(id) => {
                let all = self.unusual().map(|state| &state.instance_activity);
                all.and_then(|all| all.get(&id)).copied().unwrap_or_default()
            }
        };
        let load = if instance.is_none() { f64::from(self.utilization().min(100)) } else { 0.0 };
        let value = |set: Option<u32>, share: f64| set.map_or_else(|| load * share * swing(), f64::from);
        let links =
            f64::from(self.facts.nvlink_count) * f64::from(self.facts.product.nvlink_mbps) / 1.048_576;
        Work {
            sm_active: value(set.sm_active, 0.9),
            sm_occupancy: value(set.sm_occupancy, 0.5),
            tensor_active: value(set.tensor_active, 0.4),
            dram_active: value(set.dram_active, 0.6),
            pcie_sent: value(set.pcie_sent, 40.0),
            pcie_received: value(set.pcie_received, 80.0),
            nvlink_sent: value(set.nvlink_sent, links / 400.0),
            nvlink_received: value(set.nvlink_received, links / 400.0),
        }
    }

    fn is_profiled(self) -> bool {
        self.facts.compute_capability >= (9, 0)
    }
}

/// Between 0.95 and 1.05, once around in a minute.
fn swing() -> f64 {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    1.0 + 0.05 * (seconds * std::f64::consts::TAU / 60.0).sin()
}

impl Work {
    fn profile(&self) -> Profile {
        [
            (sys::nvmlGpmMetricId_t_NVML_GPM_METRIC_GRAPHICS_UTIL, self.sm_active),
            (sys::nvmlGpmMetricId_t_NVML_GPM_METRIC_SM_UTIL, self.sm_active),
            (sys::nvmlGpmMetricId_t_NVML_GPM_METRIC_SM_OCCUPANCY, self.sm_occupancy),
            (sys::nvmlGpmMetricId_t_NVML_GPM_METRIC_ANY_TENSOR_UTIL, self.tensor_active),
            (sys::nvmlGpmMetricId_t_NVML_GPM_METRIC_DRAM_BW_UTIL, self.dram_active),
            (sys::nvmlGpmMetricId_t_NVML_GPM_METRIC_FP64_UTIL, 0.0),
            (sys::nvmlGpmMetricId_t_NVML_GPM_METRIC_FP32_UTIL, self.sm_active / 4.0),
            (sys::nvmlGpmMetricId_t_NVML_GPM_METRIC_FP16_UTIL, 0.0),
            (sys::nvmlGpmMetricId_t_NVML_GPM_METRIC_PCIE_TX_PER_SEC, self.pcie_sent),
            (sys::nvmlGpmMetricId_t_NVML_GPM_METRIC_PCIE_RX_PER_SEC, self.pcie_received),
            (sys::nvmlGpmMetricId_t_NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC, self.nvlink_sent),
            (sys::nvmlGpmMetricId_t_NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC, self.nvlink_received),
        ]
        .into()
    }
}

/// The head of `nvmlGpmMetricsGet_t`; the metrics follow, as many as it states.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MetricsGetHead {
    version: c_uint,
    count: c_uint,
    earlier: GpmSample,
    later: GpmSample,
}

fn take(call: &Call, gpu: Target<'_>, instance: Option<u32>, sample: GpmSample) -> Result<(), Status> {
    if !gpu.is_profiled() {
        return Err(Status::NOT_SUPPORTED);
    }
    let profile = gpu.work(instance).profile();
    if call.session.profiles.fill(sample.number(), profile) { Ok(()) } else { Err(Status::INVALID_ARGUMENT) }
}

nvml! {
    fn nvmlGpmQueryDeviceSupport(device: Device, out: OutPointer<sys::nvmlGpmSupport_t>) |call| {
        let gpu = call.gpu(device)?;
        // Not the usual version word: the number alone.
        let mut support = out.get()?;
        if support.version != sys::NVML_GPM_SUPPORT_VERSION {
            return Err(Status::VERSION_MISMATCH);
        }
        support.isSupportedDevice = c_uint::from(gpu.is_profiled());
        out.put(support)
    }

    fn nvmlGpmSampleAlloc(out: OutPointer<GpmSample>) |call| {
        out.check()?;
        out.put(GpmSample::of(call.session.profiles.create()))
    }

    fn nvmlGpmSampleFree(sample: GpmSample) |call| {
        if call.session.profiles.free(sample.number()) { Ok(()) } else { Err(Status::INVALID_ARGUMENT) }
    }

    fn nvmlGpmSampleGet(device: Device, sample: GpmSample) |call| {
        let gpu = call.gpu(device)?;
        take(call, gpu, None, sample)
    }

    fn nvmlGpmMigSampleGet(device: Device, instance: c_uint, sample: GpmSample) |call| {
        let gpu = call.gpu(device)?;
        if !gpu.gpu_instances().iter().any(|known| known.id == instance) {
            return Err(Status::INVALID_ARGUMENT);
        }
        take(call, gpu, Some(instance), sample)
    }

    fn nvmlGpmMetricsGet(out: OutPointer<MetricsGetHead>) |call| {
        let head = out.get()?;
        if head.version != sys::NVML_GPM_METRICS_GET_VERSION {
            return Err(Status::VERSION_MISMATCH);
        }
        let taken = |sample: GpmSample| call.session.profiles.get(sample.number()).ok_or(Status::INVALID_ARGUMENT);
        let (earlier, later) = (taken(head.earlier)?, taken(head.later)?);
        for place in out.behind::<sys::nvmlGpmMetric_t>()?.each(head.count as usize)? {
            let mut metric = place.get()?;
            match (earlier.get(&metric.metricId), later.get(&metric.metricId)) {
                (Some(earlier), Some(later)) => {
                    metric.nvmlReturn = sys::nvmlReturn_enum_NVML_SUCCESS;
                    metric.value = f64::midpoint(*earlier, *later);
                }
                _ => metric.nvmlReturn = sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED,
            }
            place.put(metric)?;
        }
        Ok(())
    }
}
