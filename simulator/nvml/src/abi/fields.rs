//! Field values: the many small facts that NVML gives by number, some of them per link.

use std::ffi::{c_int, c_uint, c_ulonglong};
use std::time::{SystemTime, UNIX_EPOCH};

use nvml_wrapper_sys::bindings as sys;
use sys::field_id as field;

use super::args::{OutPointer, Status};
use super::call::{Call, Target};
use super::handle::Device;
use super::links::{link_of, version_of};
use crate::facts::Remote;
use crate::library::Meter;

/// The value of a field, by the type NVML gives it in.
enum Value {
    Small(c_uint),
    Large(c_ulonglong),
}

/// Fields of which each link of the first twelve has its own number, in two runs: links 0 to 5, and 6 to 11.
struct PerLink {
    low: c_uint,
    high: c_uint,
}

impl PerLink {
    const SPEED: Self =
        Self { low: field::NVML_FI_DEV_NVLINK_SPEED_MBPS_L0, high: field::NVML_FI_DEV_NVLINK_SPEED_MBPS_L6 };
    const FLIT_ERRORS: Self = Self {
        low: field::NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_L0,
        high: field::NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_L6,
    };
    const DATA_ERRORS: Self = Self {
        low: field::NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_L0,
        high: field::NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_L6,
    };
    const REPLAYS: Self = Self {
        low: field::NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_L0,
        high: field::NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_L6,
    };
    const RECOVERIES: Self = Self {
        low: field::NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_L0,
        high: field::NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_L6,
    };

    /// The link that the field `id` belongs to.
    fn link(&self, id: c_uint) -> Option<c_uint> {
        let run = |first: c_uint| id.checked_sub(first).filter(|offset| *offset < 6);
        run(self.low).or_else(|| run(self.high).map(|offset| offset + 6))
    }
}

/// The value of field `id`; `scope` is the link where the field is one of a link.
fn value(call: &Call, gpu: Target<'_>, id: c_uint, scope: c_uint) -> Result<Value, Status> {
    if let Some(link) = PerLink::SPEED.link(id) {
        return speed(call, gpu, link);
    }
    let errors = [PerLink::FLIT_ERRORS, PerLink::DATA_ERRORS, PerLink::REPLAYS, PerLink::RECOVERIES];
    if let Some(link) = errors.iter().find_map(|fields| fields.link(id)) {
        return Ok(Value::Large(link_of(gpu, link)?.errors()));
    }
    nvlink_value(call, gpu, id, scope)
        .or_else(|| memory_value(gpu, id))
        .or_else(|| power_value(gpu, id))
        .unwrap_or(Err(Status::NOT_SUPPORTED))
}

fn nvlink_value(call: &Call, gpu: Target<'_>, id: c_uint, scope: c_uint) -> Option<Result<Value, Status>> {
    let has_links = gpu.facts.nvlink_count > 0;
    let if_any = |value: Value| {
        if has_links { Ok(value) } else { Err(Status::NOT_SUPPORTED) }
    };
    Some(match id {
        field::NVML_FI_DEV_NVLINK_LINK_COUNT => if_any(Value::Small(c_uint::from(gpu.facts.nvlink_count))),
        field::NVML_FI_DEV_NVSWITCH_CONNECTED_LINK_COUNT => if_any(Value::Small(switched_links(call, gpu))),
        field::NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON => if_any(Value::Small(gpu.facts.product.nvlink_mbps)),
        field::NVML_FI_DEV_NVLINK_GET_SPEED => speed(call, gpu, scope),
        field::NVML_FI_DEV_NVLINK_GET_STATE => {
            link_of(gpu, scope).map(|link| Value::Small(c_uint::from(link.is_up(call))))
        }
        field::NVML_FI_DEV_NVLINK_GET_VERSION => link_of(gpu, scope).map(|_| Value::Small(version_of(gpu))),
        field::NVML_FI_DEV_NVLINK_REMOTE_NVLINK_ID => {
            link_of(gpu, scope).and_then(|link| match gpu.facts.links.get(usize::from(link.number)) {
                Some(Remote::Gpu { link, .. }) => Ok(Value::Small(c_uint::from(*link))),
                Some(Remote::Switch { .. }) => Ok(Value::Small(scope)),
                None => Err(Status::NOT_SUPPORTED),
            })
        }
        field::NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY
        | field::NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY
        | field::NVML_FI_DEV_NVLINK_ERROR_DL_CRC => {
            link_of(gpu, scope).map(|link| Value::Large(link.errors()))
        }
        field::NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL
        | field::NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL
        | field::NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL
        | field::NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL => {
            let links = (0..c_uint::from(gpu.facts.nvlink_count)).filter_map(|link| link_of(gpu, link).ok());
            if_any(Value::Large(links.map(|link| link.errors()).sum()))
        }
        // All links together only.
        field::NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX if scope == c_uint::MAX => {
            if_any(Value::Large(metered(call, gpu, Meter::NvLinkSent, gpu.work(None).nvlink_sent)))
        }
        field::NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX if scope == c_uint::MAX => {
            if_any(Value::Large(metered(call, gpu, Meter::NvLinkReceived, gpu.work(None).nvlink_received)))
        }
        field::NVML_FI_DEV_C2C_LINK_COUNT => Ok(Value::Small(if gpu.facts.product.c2c { 10 } else { 0 })),
        _ => return None,
    })
}

/// KiB of a traffic in MiB/s so far.
fn metered(call: &Call, gpu: Target<'_>, meter: Meter, mib: f64) -> u64 {
    call.session.meters.read(gpu.facts.index, meter, mib * 1024.0)
}

fn memory_value(gpu: Target<'_>, id: c_uint) -> Option<Result<Value, Status>> {
    Some(match id {
        field::NVML_FI_DEV_ECC_CURRENT | field::NVML_FI_DEV_ECC_PENDING => gpu.ecc().map(|_| Value::Small(1)),
        field::NVML_FI_DEV_ECC_SBE_VOL_TOTAL => gpu.ecc().map(|ecc| Value::Large(ecc.volatile_corrected)),
        field::NVML_FI_DEV_ECC_DBE_VOL_TOTAL => gpu.ecc().map(|ecc| Value::Large(ecc.volatile_uncorrected)),
        field::NVML_FI_DEV_ECC_SBE_AGG_TOTAL => gpu.ecc().map(|ecc| Value::Large(ecc.aggregate_corrected)),
        field::NVML_FI_DEV_ECC_DBE_AGG_TOTAL => gpu.ecc().map(|ecc| Value::Large(ecc.aggregate_uncorrected)),
        field::NVML_FI_DEV_RETIRED_SBE => {
            gpu.retired().map(|pages| Value::Large(pages.single_bit.len() as u64))
        }
        field::NVML_FI_DEV_RETIRED_DBE => {
            gpu.retired().map(|pages| Value::Large(pages.double_bit.len() as u64))
        }
        field::NVML_FI_DEV_RETIRED_PENDING => {
            gpu.retired().map(|pages| Value::Small(c_uint::from(pages.pending)))
        }
        field::NVML_FI_DEV_REMAPPED_COR => gpu.remapped().map(|rows| Value::Small(rows.corrected)),
        field::NVML_FI_DEV_REMAPPED_UNC => gpu.remapped().map(|rows| Value::Small(rows.uncorrected)),
        field::NVML_FI_DEV_REMAPPED_PENDING => {
            gpu.remapped().map(|rows| Value::Small(c_uint::from(rows.pending)))
        }
        field::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION => Ok(Value::Small(gpu.recovery())),
        field::NVML_FI_DEV_REMAPPED_FAILURE => {
            gpu.remapped().map(|rows| Value::Small(c_uint::from(rows.failed)))
        }
        _ => return None,
    })
}

fn power_value(gpu: Target<'_>, id: c_uint) -> Option<Result<Value, Status>> {
    Some(Ok(Value::Small(match id {
        field::NVML_FI_DEV_POWER_AVERAGE | field::NVML_FI_DEV_POWER_INSTANT => gpu.milliwatts(),
        field::NVML_FI_DEV_POWER_MIN_LIMIT => gpu.power_limit() / 2,
        field::NVML_FI_DEV_POWER_MAX_LIMIT
        | field::NVML_FI_DEV_POWER_DEFAULT_LIMIT
        | field::NVML_FI_DEV_POWER_CURRENT_LIMIT => gpu.power_limit(),
        field::NVML_FI_DEV_MEMORY_TEMP => gpu.celsius(),
        field::NVML_FI_DEV_PCIE_REPLAY_COUNTER => gpu.pcie_replays(),
        _ => return None,
    })))
}

/// Rate of one link in MB/s; 0 while it is down.
fn speed(call: &Call, gpu: Target<'_>, number: c_uint) -> Result<Value, Status> {
    let up = link_of(gpu, number)?.is_up(call);
    Ok(Value::Small(if up { gpu.facts.product.nvlink_mbps } else { 0 }))
}

/// How many of a GPU's links end in an NVSwitch and are up.
fn switched_links(call: &Call, gpu: Target<'_>) -> c_uint {
    let links = (0_u8..).zip(&gpu.facts.links);
    let switched = links.filter(|(number, remote)| {
        matches!(remote, Remote::Switch { .. }) && call.link_up(gpu.facts.index, *number)
    });
    c_uint::try_from(switched.count()).unwrap_or(c_uint::MAX)
}

nvml! {
    fn nvmlDeviceGetFieldValues(device: Device, count: c_int, values: OutPointer<sys::nvmlFieldValue_t>) |call| {
        let gpu = call.gpu(device)?;
        let count = usize::try_from(count).ok().filter(|count| *count > 0).ok_or(Status::INVALID_ARGUMENT)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        for place in values.each(count)? {
            let mut answer = place.get()?;
            answer.timestamp = i64::try_from(now.as_micros()).unwrap_or(i64::MAX);
            answer.latencyUsec = 0;
            answer.nvmlReturn = sys::nvmlReturn_enum_NVML_SUCCESS;
            match value(call, gpu, answer.fieldId, answer.scopeId) {
                Ok(Value::Small(number)) => {
                    answer.valueType = sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT;
                    answer.value = sys::nvmlValue_t { ullVal: u64::from(number) };
                }
                Ok(Value::Large(number)) => {
                    answer.valueType = sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
                    answer.value = sys::nvmlValue_t { ullVal: number };
                }
                Err(Status(code)) => answer.nvmlReturn = code,
            }
            place.put(answer)?;
        }
        Ok(())
    }
}
