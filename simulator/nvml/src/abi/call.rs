//! What every NVML call goes through before it does anything of its own: it is counted, obeys the control state, and needs a
//! session whose driver is still there.

use std::sync::Arc;
use std::time::Duration;

use nvml_wrapper_sys::bindings::{nvmlReturn_enum_NVML_SUCCESS as SUCCESS, nvmlReturn_t};

use super::handle::Device;
use super::status::Status;
use crate::control::{GpuState, State};
use crate::facts::{Facts, GpuFacts, Remote};
use crate::library::{Library, Session};

/// One call within a session.
pub(crate) struct Call {
    pub(crate) library: &'static Library,
    pub(crate) session: Arc<Session>,
    pub(crate) state: Arc<State>,
}

/// One GPU that a call is about: not lost.
#[derive(Clone, Copy)]
pub(crate) struct Target<'a> {
    pub(crate) facts: &'a GpuFacts,
    state: Option<&'a GpuState>,
}

/// Runs `body` as the call of slot `slot`.
pub(crate) fn run(slot: usize, body: impl FnOnce(&Call) -> Result<(), Status>) -> nvmlReturn_t {
    code(admit(slot).and_then(|(library, state)| {
        let session = library.session().ok_or(Status::UNINITIALIZED)?;
        if session.cut_off(&state) {
            return Err(Status::DRIVER_NOT_LOADED);
        }
        body(&Call {
            library,
            session,
            state,
        })
    }))
}

/// Runs `body` as a call that needs no session.
pub(crate) fn run_outside(
    slot: usize,
    body: impl FnOnce(&'static Library, &State) -> Result<(), Status>,
) -> nvmlReturn_t {
    code(admit(slot).and_then(|(library, state)| body(library, &state)))
}

/// The whole of a function that is not simulated.
pub(crate) fn not_simulated(slot: usize) -> nvmlReturn_t {
    run(slot, |_| Err(Status::NOT_SUPPORTED))
}

/// Counts the call and applies the rule for its function, if one holds.
fn admit(slot: usize) -> Result<(&'static Library, Arc<State>), Status> {
    let library = Library::this();
    let earlier = library.block.count_call(slot);
    let state = library.state();
    let name = crate::names::NAMES.get(slot).copied().unwrap_or_default();
    let rule = state.calls.get(name).filter(|rule| rule.holds_for(earlier));
    if let Some(rule) = rule {
        if rule.slow_ms > 0 {
            std::thread::sleep(Duration::from_millis(rule.slow_ms));
        }
        if let Some(code) = rule.fail {
            return Err(Status(code));
        }
    }
    Ok((library, state))
}

fn code(result: Result<(), Status>) -> nvmlReturn_t {
    match result {
        Ok(()) => SUCCESS,
        Err(Status(code)) => code,
    }
}

impl Call {
    pub(crate) fn facts(&self) -> &Facts {
        &self.session.facts
    }

    /// The GPU behind a handle.
    pub(crate) fn gpu(&self, device: Device) -> Result<Target<'_>, Status> {
        let index = device.gpu().ok_or(Status::INVALID_ARGUMENT)?;
        self.gpu_at(index).ok_or(Status::INVALID_ARGUMENT)?
    }

    /// The GPU of an index: `None` if there is none, an error if it is lost.
    pub(crate) fn gpu_at(&self, index: usize) -> Option<Result<Target<'_>, Status>> {
        let facts = self.facts().gpus.get(index)?;
        let state = u8::try_from(index)
            .ok()
            .and_then(|index| self.state.gpus.get(&index));
        if state.is_some_and(|state| state.lost) {
            return Some(Err(Status::GPU_IS_LOST));
        }
        Some(Ok(Target { facts, state }))
    }

    /// Whether an NVLink is up: joined, not taken down at either end, the peer on the bus.
    pub(crate) fn link_up(&self, gpu: usize, link: u8) -> bool {
        let down = |gpu: usize, link: u8| {
            u8::try_from(gpu)
                .ok()
                .and_then(|gpu| self.state.gpus.get(&gpu))
                .is_some_and(|state| state.links_down.contains(&link) || state.lost)
        };
        let remote = self
            .facts()
            .gpus
            .get(gpu)
            .and_then(|gpu| gpu.links.get(usize::from(link)));
        match remote {
            None => false,
            Some(Remote::Switch { .. }) => !down(gpu, link),
            Some(Remote::Gpu { index, link: back }) => !down(gpu, link) && !down(*index, *back),
        }
    }
}

impl<'a> Target<'a> {
    /// What is out of the ordinary on the GPU, if anything.
    pub(crate) fn unusual(self) -> Option<&'a GpuState> {
        self.state
    }

    /// The index as the control state counts it.
    pub(crate) fn key(self) -> u8 {
        u8::try_from(self.facts.index).unwrap_or(u8::MAX)
    }
}
