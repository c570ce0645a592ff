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
#[derive(Clone, Copy, PartialEq, Eq)]
enum Turn {
    Stop,
    /// It is time, or links may have changed: read the machine again.
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
    /// `None` if no Xid is to be watched, or no GPU raises any.
    events: Option<EventSet<'nvml>>,
    /// Indices registered, or found to raise no events.
    asked: BTreeSet<u32>,
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
        match self.live(keeper, failures) {
            Ok(()) => End::Stop,
            Err(error) => End::Failed(error),
        }
    }

    fn live(&self, keeper: &mut Keeper, failures: &mut u32) -> Result<(), DiscoverError> {
        // Before reading, here and below: an Xid that falls between the two is heard then.
        let mut ears = self.listen(keeper)?;
        let mut seen = Self::read(self.nvml, keeper)?;
        let mut deaf = false;
        let mut unread = 0;
        loop {
            let pause = match unread {
                0 => keeper.timing.read,
                failures => keeper.timing.pause(failures),
            };
            let watched = self.watch(keeper, &ears, &seen, &mut deaf, pause);
            if !deaf {
                *failures = 0;
            }
            let turn = watched?;
            if turn == Turn::Stop {
                return Ok(());
            }
            // A reading that fails is tried again; the GPUs are listened to meanwhile.
            match self.again(keeper, &mut ears, &mut seen, turn) {
                Ok(()) => unread = 0,
                Err(error) if error.is_gone() => return Err(error),
                Err(error) => {
                    unread += 1;
                    keeper.failed(&error, unread);
                }
            }
        }
    }

    fn again(
        &self,
        keeper: &mut Keeper,
        ears: &mut Ears<'nvml>,
        seen: &mut Seen,
        turn: Turn,
    ) -> Result<(), DiscoverError> {
        if turn == Turn::Listen {
            let old = std::mem::replace(ears, self.listen(keeper)?);
            // What the old ears have heard and not told. An Xid that both heard is counted twice, which harms nobody.
            if let Some(old) = old.events {
                while let Ok(Some(event)) = old.wait(Duration::ZERO) {
                    note(keeper, seen, event);
                }
            }
        } else {
            self.listen_to_new(ears)?;
        }
        *seen = Self::read(self.nvml, keeper)?;
        Ok(())
    }

    fn read(nvml: &Nvml, keeper: &mut Keeper) -> Result<Seen, DiscoverError> {
        let found = discover::read(nvml, &keeper.options)?;
        let seen = Seen::of(&found);
        keeper.found(found)?;
        Ok(seen)
    }

    /// Registers every GPU.
    fn listen(&self, keeper: &Keeper) -> Result<Ears<'nvml>, NvmlError> {
        let mut ears = Ears::default();
        if keeper.checks != HealthChecks::Off {
            ears.events = Some(self.nvml.event_set()?);
            self.listen_to_new(&mut ears)?;
        }
        Ok(ears)
    }

    /// Registers every GPU that is not registered yet.
    fn listen_to_new(&self, ears: &mut Ears<'nvml>) -> Result<(), NvmlError> {
        let Some(events) = &mut ears.events else {
            return Ok(());
        };
        for index in 0..self.nvml.device_count()? {
            if ears.asked.contains(&index) {
                continue;
            }
            match self.nvml.device(index).and_then(|device| events.register(device)) {
                Ok(()) => {
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

    /// Waits for events and looks round until something must be done again, after `pause` at the latest. `deaf`: the last wait
    /// failed; a second failure in a row is NVML's own.
    fn watch(
        &self,
        keeper: &mut Keeper,
        ears: &Ears<'nvml>,
        seen: &Seen,
        deaf: &mut bool,
        pause: Duration,
    ) -> Result<Turn, NvmlError> {
        let start = Instant::now();
        let mut looked = start;
        loop {
            let waiting = Instant::now();
            let event = match &ears.events {
                Some(events) if !events.is_empty() => match events.wait(keeper.timing.wait) {
                    Err(error) if !error.is_driver_gone() && !*deaf => {
                        tracing::warn!("waiting for events failed, listening anew: {error}");
                        *deaf = true;
                        return Ok(Turn::Listen);
                    }
                    event => event?,
                },
                _ => None,
            };
            *deaf = false;
            let rest = match event {
                Some(event) if note(keeper, seen, event) => return Ok(Turn::Read),
                Some(_) => Duration::ZERO,
                // Nothing where nothing is listened to, and no loop where NVML does not wait as long as it was told.
                None => keeper.timing.wait.saturating_sub(waiting.elapsed()),
            };
            if !keeper.pause.go_on_after(rest) {
                return Ok(Turn::Stop);
            }
            if start.elapsed() >= pause {
                return Ok(Turn::Read);
            }
            if looked.elapsed() >= keeper.timing.look {
                looked = Instant::now();
                match self.has_changed(seen) {
                    Ok(false) => {}
                    Ok(true) => return Ok(Turn::Listen),
                    Err(error) if error.is_driver_gone() => return Err(error),
                    // The reading will say what is wrong.
                    Err(_) => return Ok(Turn::Read),
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
    fn of(found: &Found) -> Self {
        let gpus = found.machine.gpus().iter();
        Self {
            gpus: gpus
                .filter_map(|gpu| Some((u32::from(gpu.index), gpu.uuid.clone()?)))
                .collect(),
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
