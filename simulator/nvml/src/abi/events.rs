//! Event sets as C sees them.

use std::ffi::{c_uint, c_ulonglong};
use std::time::Duration;

use nvml_wrapper_sys::bindings as sys;

use super::args::{OutPointer, Status};
use super::call::{Call, Target};
use super::handle::{Device, EventSet};
use crate::control::EventKind;
use crate::library::{Filter, WaitOutcome};

/// What NVML writes where an event is not confined to an instance.
const WHOLE_GPU: c_uint = c_uint::MAX;

/// The event as C sees it; the same layout as `nvmlEventData_t`, its handle a number.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct EventData {
    device: Device,
    kind: c_ulonglong,
    data: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

const _: () = assert!(size_of::<EventData>() == size_of::<sys::nvmlEventData_t>());

/// The event types a GPU can report.
fn supported(gpu: Target<'_>) -> u64 {
    let mut kinds = vec![EventKind::PState, EventKind::Xid, EventKind::Clock];
    if gpu.facts.product.ecc {
        kinds.extend([EventKind::SingleBitEcc, EventKind::DoubleBitEcc]);
    }
    if gpu.facts.product.mig {
        kinds.push(EventKind::MigConfig);
    }
    kinds.into_iter().fold(0, |types, kind| types | kind.nvml_type())
}

fn wait(call: &Call, set: EventSet, data: OutPointer<EventData>, timeout: c_uint) -> Result<(), Status> {
    data.check()?;
    let timeout = Duration::from_millis(u64::from(timeout));
    match call.library.wait(&call.session, set.number(), timeout) {
        WaitOutcome::Event(event) => data.put(EventData {
            device: Device::whole(usize::from(event.gpu)),
            kind: event.kind.nvml_type(),
            data: event.data,
            gpu_instance: event.gpu_instance.unwrap_or(WHOLE_GPU),
            compute_instance: event.compute_instance.unwrap_or(WHOLE_GPU),
        }),
        WaitOutcome::TimedOut => Err(Status::TIMEOUT),
        WaitOutcome::NoSuchSet => Err(Status::INVALID_ARGUMENT),
        WaitOutcome::GpuLost => Err(Status::GPU_IS_LOST),
        WaitOutcome::DriverGone => Err(Status::DRIVER_NOT_LOADED),
        WaitOutcome::ShutDown => Err(Status::UNINITIALIZED),
    }
}

nvml_get! {
    nvmlDeviceGetSupportedEventTypes: c_ulonglong = |gpu| supported(gpu);
}

nvml! {
    fn nvmlEventSetCreate(set: OutPointer<EventSet>) |call| {
        set.check()?;
        set.put(EventSet::of(call.session.events.create(&call.state)))
    }

    fn nvmlEventSetFree(set: EventSet) |call| {
        if !call.session.events.free(set.number()) {
            return Err(Status::INVALID_ARGUMENT);
        }
        // A wait that is blocked on this set looks up and finds it gone.
        call.library.block.announce_change();
        Ok(())
    }

    fn nvmlDeviceRegisterEvents(device: Device, types: c_ulonglong, set: EventSet) |call| {
        let gpu = call.gpu(device)?;
        if types & !supported(gpu) != 0 {
            return Err(Status::NOT_SUPPORTED);
        }
        let filter = Filter {
            gpu: gpu.key(),
            types,
            since: call.state.next_event,
        };
        if call.session.events.listen(set.number(), filter) {
            Ok(())
        } else {
            Err(Status::INVALID_ARGUMENT)
        }
    }

    fn nvmlEventSetWait | nvmlEventSetWait_v2(set: EventSet, data: OutPointer<EventData>, timeout: c_uint) |call| {
        wait(call, set, data, timeout)
    }
}
