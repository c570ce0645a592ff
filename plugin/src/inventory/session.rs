//! One life of a loaded NVML: read, publish, wait for events, look round, read again. Ends when told to stop or when NVML
//! fails as a whole.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use gantry_topology::GpuUuid;

use super::owner::Keeper;
use crate::discover::{self, DiscoverError, Found};
use crate::health::{Fault, HealthChecks};
use crate::nvml::{Event, EventSet, Nvml, NvmlError};

/// Why a session is over.
pub(super) enum End {
    /// The owner was told to stop.
    Stop,
    /// NVML fails as a whole.
    Failed(DiscoverError),
}

/// Why watching is over.
enum Turn {
    Stop,
    /// Something changed, or it is time: read the machine again.
    Read,
    /// Which GPUs can be reached has changed, or waiting failed as it does when one is lost: listen anew, and read again.
    Listen,
}

/// A loaded NVML at work.
pub(super) struct Session<'nvml> {
    pub(super) nvml: &'nvml Nvml,
}

/// The GPUs listened to.
#[derive(Default)]
struct Ears<'nvml> {
    events: Option<EventSet<'nvml>>,
    /// Indices registered, or found to raise no events.
    asked: BTreeSet<u32>,
    /// Whether any is registered: a set without GPUs is not worth waiting for.
    any: bool,
}

/// What the last reading said, to see a change cheaply.
struct Seen {
    gpus: BTreeMap<u32, GpuUuid>,
    unreachable: BTreeSet<u32>,
    count: u32,
    driver: Option<String>,
}

impl<'nvml> Session<'nvml> {
    /// Works until the end. `failures` is set to 0 once NVML has proved to work: it was read, and waited for without an error.
    pub(super) fn run(&self, keeper: &mut Keeper, failures: &mut u32) -> End {
        let mut ears = Ears::default();
        loop {
            match self.turn(keeper, &mut ears, failures) {
                Ok(Turn::Stop) => return End::Stop,
                Ok(Turn::Read) => {}
                Ok(Turn::Listen) => ears = Ears::default(),
                Err(error) => return End::Failed(error),
            }
        }
    }

    /// Listens, reads, publishes, and watches until something must be done again.
    fn turn(
        &self,
        keeper: &mut Keeper,
        ears: &mut Ears<'nvml>,
        failures: &mut u32,
    ) -> Result<Turn, DiscoverError> {
        // Before reading: an Xid that falls between the two is heard then.
        if keeper.checks != HealthChecks::Off {
            self.listen(ears)?;
        }
        let found = discover::read(self.nvml, &keeper.options)?;
        let seen = Seen::of(&found, keeper);
        keeper.found(found)?;
        Ok(self.watch(keeper, ears, &seen, failures)?)
    }

    /// Registers every GPU that is not registered yet.
    fn listen(&self, ears: &mut Ears<'nvml>) -> Result<(), NvmlError> {
        let count = self.nvml.device_count()?;
        let events = match &mut ears.events {
            Some(events) => events,
            none => none.insert(self.nvml.event_set()?),
        };
        for index in 0..count {
            if ears.asked.contains(&index) {
                continue;
            }
            match self.nvml.device(index).and_then(|device| events.register(device)) {
                Ok(()) => {
                    ears.any = true;
                    ears.asked.insert(index);
                }
                Err(error) if error.is_driver_gone() => return Err(error),
                Err(error) if error.is_unsupported() => {
                    tracing::warn!(gpu = index, "raises no events, its Xids go unseen: {error}");
                    ears.asked.insert(index);
                }
                // Tried again at the next reading; a GPU that is lost is told of there.
                Err(error) => tracing::debug!(gpu = index, "cannot be listened to: {error}"),
            }
        }
        Ok(())
    }

    /// Waits for events and looks round until something must be done again.
    fn watch(
        &self,
        keeper: &mut Keeper,
        ears: &Ears<'nvml>,
        seen: &Seen,
        failures: &mut u32,
    ) -> Result<Turn, NvmlError> {
        let start = Instant::now();
        let mut looked = start;
        loop {
            let waited = Instant::now();
            let event = match &ears.events {
                Some(events) if ears.any => match events.wait(keeper.timing.wait) {
                    Err(error) if !error.is_driver_gone() && *failures == 0 => {
                        tracing::warn!("waiting for events failed, listening anew: {error}");
                        *failures = 1;
                        return Ok(Turn::Listen);
                    }
                    event => event?,
                },
                _ => None,
            };
            *failures = 0;
            let pause = match event {
                Some(event) if note(keeper, seen, event) => return Ok(Turn::Read),
                Some(_) => Duration::ZERO,
                // Nothing where nothing is listened to, and no loop where NVML does not wait as long as it was told.
                None => keeper.timing.wait.saturating_sub(waited.elapsed()),
            };
            if !keeper.pause.go_on_after(pause) {
                return Ok(Turn::Stop);
            }
            if looked.elapsed() >= keeper.timing.look {
                looked = Instant::now();
                if self.has_changed(seen)? {
                    return Ok(Turn::Listen);
                }
                if start.elapsed() >= keeper.timing.read {
                    return Ok(Turn::Read);
                }
            }
        }
    }

    /// Whether GPUs, their reach or the driver are others than at the last reading.
    fn has_changed(&self, seen: &Seen) -> Result<bool, NvmlError> {
        if self.nvml.device_count()? != seen.count {
            return Ok(true);
        }
        match self.nvml.driver_version() {
            Err(error) if error.is_driver_gone() => return Err(error),
            Ok(driver) if seen.driver.is_some() && seen.driver.as_ref() != Some(&driver) => return Ok(true),
            _ => {}
        }
        for index in 0..seen.count {
            let answer = self.nvml.device(index).and_then(|device| device.memory());
            let lost = match answer {
                Err(error) if error.is_driver_gone() => return Err(error),
                Err(error) => error.is_gpu_lost(),
                Ok(_) => false,
            };
            if lost != seen.unreachable.contains(&index) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

impl Seen {
    fn of(found: &Found, keeper: &Keeper) -> Self {
        Self {
            gpus: keeper.name_gpus(found),
            unreachable: found
                .unreachable
                .iter()
                .map(|(index, _)| u32::from(*index))
                .collect(),
            count: u32::try_from(found.machine.gpus().len()).unwrap_or(u32::MAX),
            driver: found.machine.host().driver.clone(),
        }
    }
}

/// Takes in an Xid. True: the machine must be read again.
fn note(keeper: &mut Keeper, seen: &Seen, event: Event) -> bool {
    let Some(uuid) = event.gpu.and_then(|index| seen.gpus.get(&index)) else {
        tracing::warn!(xid = event.xid, "an Xid of a GPU that is not known");
        return true;
    };
    let class = keeper.table.class(event.xid);
    let mut reason = keeper.table.describe(event.xid);
    if let Some(instance) = event.gpu_instance {
        reason = format!("{reason} (GPU instance {instance})");
    }
    let watched = keeper.checks.watches(event.xid);
    let count = keeper.xids.count(uuid, event.xid);
    // One broken application raises thousands: the first of each kind is told, the rest is counted.
    if count == 1 {
        tracing::warn!(gpu = event.gpu, uuid = %uuid, %class, watched, "{reason}");
    }
    if !watched {
        return false;
    }
    if class.is_unhealthy() {
        let uuid = uuid.clone();
        keeper.book.fault(&uuid, Fault { class, reason });
        keeper.publish();
    }
    class.touches_links()
}
