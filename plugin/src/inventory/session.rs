//! One life of a loaded NVML: read, publish, wait for events, look round, read again. Ends when told to stop or when NVML
//! fails as a whole.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use gantry_api::FaultEvidence;
use gantry_topology::GpuUuid;
use jiff::Timestamp;

use super::doubts::Duty;
use super::owner::Keeper;
use crate::discover::{self, Cut, DiscoverError, Found};
use crate::health::{Class, Extent, Fault, Vitals};
use crate::nvml::{Code, Event, EventKind, EventSet, Nvml, NvmlError};

/// Why a session is over.
pub(super) enum End {
    /// The owner was told to stop.
    Stop,
    /// NVML is to be loaded anew: it has not noticed which GPUs there are.
    Reload,
    /// NVML fails as a whole.
    Failed(DiscoverError),
}

/// Why watching is over.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Turn {
    Stop,
    /// It is time, or links may have changed: read the machine again.
    Read,
    /// Which GPUs can be reached or how they are cut has changed, or waiting failed as it does when one is lost: listen anew, and read
    /// again.
    Listen,
    /// The kernel has other GPUs than NVML: load it anew.
    Reload,
}

/// Loads of NVML after the kernel has got another GPU, beyond the first.
const MOST_RELOADS: u8 = 3;

/// Events taken in between two looks at anything else.
const MOST_DRAINED: u32 = 512;

/// A loaded NVML at work.
pub(super) struct Session<'nvml> {
    pub(super) nvml: &'nvml Nvml,
}

/// The GPUs listened to.
#[derive(Default)]
struct Listener<'nvml> {
    /// `None` if no Xid is to be watched, or no GPU raises any.
    events: Option<EventSet<'nvml>>,
    /// Indices registered, or found to raise no events.
    asked: BTreeSet<u32>,
    /// Indices that could not be registered though the GPU is there, with the reason.
    refused: BTreeMap<u32, NvmlError>,
}

/// What the last reading said, to see a change cheaply.
struct Seen {
    /// By index, which means the same GPU for as long as NVML is loaded: also those that could be read once and cannot be now, whose
    /// events still come.
    gpus: BTreeMap<u32, GpuUuid>,
    unreachable: BTreeSet<u32>,
    count: u32,
    driver: Option<String>,
    /// How each GPU is cut; `None` where it could not be asked.
    cuts: BTreeMap<u32, Option<Cut>>,
}

impl<'nvml> Session<'nvml> {
    /// Works until the end. `failures` is set to 0 once NVML has proved to work: it was read, and waited for without an error.
    pub(super) fn run(&self, keeper: &mut Keeper, failures: &mut u32) -> End {
        match self.live(keeper, failures) {
            Ok(end) => end,
            Err(error) => End::Failed(error),
        }
    }

    fn live(&self, keeper: &mut Keeper, failures: &mut u32) -> Result<End, DiscoverError> {
        let bound = discover::bound(&keeper.options);
        // Before reading, here and below: an Xid that falls between the two is heard then.
        let mut listener = self.listen(keeper)?;
        // And of faults of an earlier run that are known by now, the first snapshot tells already.
        keeper.obey();
        let mut seen = Self::read(self.nvml, keeper, None)?;
        let mut deaf = 0;
        let mut unread = 0;
        loop {
            let pause = match unread {
                0 => keeper.timing.read,
                failures => keeper.timing.pause(failures),
            };
            let watched = self.watch(keeper, &mut listener, &seen, &bound, &mut deaf, pause);
            if deaf == 0 {
                *failures = 0;
                if unread == 0 && watched.is_ok() {
                    keeper.works();
                }
            }
            let turn = match watched? {
                Turn::Stop => return Ok(End::Stop),
                Turn::Reload => {
                    // What was heard and not told yet goes with this NVML.
                    if let Some(events) = &listener.events {
                        self.drain(keeper, &seen, events);
                    }
                    return Ok(End::Reload);
                }
                turn => turn,
            };
            // A reading that fails is tried again; the GPUs are listened to meanwhile.
            match self.again(keeper, &mut listener, &mut seen, turn) {
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
        listener: &mut Listener<'nvml>,
        seen: &mut Seen,
        turn: Turn,
    ) -> Result<(), DiscoverError> {
        if turn == Turn::Listen {
            let old = std::mem::replace(listener, self.listen(keeper)?);
            // What the old listener has heard and not told. An Xid that both heard is counted twice, which harms nobody.
            if let Some(old) = old.events {
                self.drain(keeper, seen, &old);
            }
        } else {
            self.listen_to_new(keeper, listener)?;
        }
        *seen = Self::read(self.nvml, keeper, Some(seen))?;
        Ok(())
    }

    /// Takes in what was heard and not told yet.
    fn drain(&self, keeper: &mut Keeper, seen: &Seen, events: &EventSet<'_>) {
        for _ in 0..MOST_DRAINED {
            let Ok(Some(event)) = events.wait(Duration::ZERO) else {
                return;
            };
            self.note(keeper, seen, event);
            keeper.obey();
        }
    }

    fn read(nvml: &Nvml, keeper: &mut Keeper, before: Option<&Seen>) -> Result<Seen, DiscoverError> {
        // Before reading: a GPU that is cut anew in between is seen at the next look.
        let cuts = cuts(nvml, nvml.device_count()?);
        let found = discover::read(nvml, &keeper.options)?;
        let seen = Seen::of(&found, cuts, before);
        keeper.found(found)?;
        Ok(seen)
    }

    /// Registers every GPU.
    fn listen(&self, keeper: &mut Keeper) -> Result<Listener<'nvml>, NvmlError> {
        let mut listener = Listener::default();
        if !keeper.checks.is_off() {
            listener.events = Some(self.nvml.event_set()?);
            self.listen_to_new(keeper, &mut listener)?;
        }
        Ok(listener)
    }

    /// Registers every GPU that is not registered yet.
    fn listen_to_new(&self, keeper: &mut Keeper, listener: &mut Listener<'nvml>) -> Result<(), NvmlError> {
        listener.refused.clear();
        let Some(events) = &mut listener.events else {
            return Ok(());
        };
        for index in 0..self.nvml.device_count()? {
            if listener.asked.contains(&index) {
                continue;
            }
            match self.nvml.device(index).and_then(|device| events.register(device)) {
                Ok(()) => {
                    listener.asked.insert(index);
                    keeper.deaf.remove(&index);
                }
                Err(error) if error.is_driver_gone() => return Err(error),
                // Tried again too; the reading tells of it.
                Err(error) if error.is_gpu_lost() => {
                    tracing::debug!(gpu = index, "cannot be listened to: {error}");
                }
                Err(error) if error.is_unsupported() => {
                    tracing::warn!(gpu = index, "raises no events, its Xids go unseen: {error}");
                    listener.asked.insert(index);
                }
                // Tried again at the next look.
                Err(error) => {
                    let told = keeper.deaf.entry(index).or_default();
                    if told.tells(&error.to_string(), Instant::now()) {
                        tracing::warn!(gpu = index, "cannot be listened to, its Xids go unheard: {error}");
                    }
                    listener.refused.insert(index, error);
                }
            }
        }
        Ok(())
    }

    /// Waits for events and looks round until something must be done again, after `pause` at the latest. `deaf`: so many waits
    /// in a row have failed. A second failure is NVML's own, unless it is of a lost GPU: each may be lost just when it has been registered.
    fn watch(
        &self,
        keeper: &mut Keeper,
        listener: &mut Listener<'nvml>,
        seen: &Seen,
        bound: &BTreeSet<String>,
        deaf: &mut u32,
        pause: Duration,
    ) -> Result<Turn, NvmlError> {
        let start = Instant::now();
        let mut looked = start;
        loop {
            let waiting = Instant::now();
            let event = match &listener.events {
                Some(events) if !events.is_empty() => {
                    let heard = events.wait(keeper.wait());
                    keeper.heard(heard.is_ok());
                    match heard {
                        Err(error) if !error.is_driver_gone() && *deaf < patience(&error, seen) => {
                            if keeper.unheard.tells(&error.to_string(), Instant::now()) {
                                tracing::warn!("waiting for events failed, listening anew: {error}");
                            }
                            *deaf += 1;
                            return Ok(Turn::Listen);
                        }
                        event => event?,
                    }
                }
                _ => None,
            };
            *deaf = 0;
            keeper.obey();
            let rest = match event {
                Some(event) if self.note(keeper, seen, event) => {
                    // One reading for all that is there: Xids of links come by the hundred, and another GPU's does not wait for as many.
                    if let Some(events) = &listener.events {
                        self.drain(keeper, seen, events);
                    }
                    return Ok(Turn::Read);
                }
                Some(_) => Duration::ZERO,
                // Nothing where nothing is listened to, and no loop where NVML does not wait as long as it was told.
                None => keeper.wait().saturating_sub(waiting.elapsed()),
            };
            if !keeper.pause.go_on_after(rest) {
                return Ok(Turn::Stop);
            }
            if start.elapsed() >= pause {
                return Ok(Turn::Read);
            }
            if looked.elapsed() >= keeper.timing.look {
                looked = Instant::now();
                if self.is_behind(keeper, seen, bound) {
                    return Ok(Turn::Reload);
                }
                let heard = self.hear_all(keeper, listener, seen);
                match heard.and_then(|()| self.has_changed(keeper, seen)) {
                    Ok(false) => {}
                    Ok(true) => return Ok(Turn::Listen),
                    Err(error) if error.is_driver_gone() => return Err(error),
                    // The reading will say what is wrong.
                    Err(_) => return Ok(Turn::Read),
                }
            }
        }
    }

    /// Listens to the GPUs that could not be listened to before. One that still cannot be must not be given out: its Xids go unheard.
    fn hear_all(
        &self,
        keeper: &mut Keeper,
        listener: &mut Listener<'nvml>,
        seen: &Seen,
    ) -> Result<(), NvmlError> {
        self.listen_to_new(keeper, listener)?;
        for (index, uuid) in &seen.gpus {
            if !seen.unreachable.contains(index) {
                let refused = listener.refused.get(index);
                let failure = refused.map(|error| format!("its Xids cannot be heard: {error}"));
                keeper.look(uuid, Duty::BeHeard, failure);
            }
        }
        Ok(())
    }

    /// Whether NVML, which counted when it was loaded, does not know of GPUs that the kernel has. It may take a driver a moment to make
    /// a GPU known to it, so that one change is worth a few loads.
    fn is_behind(&self, keeper: &mut Keeper, seen: &Seen, bound: &BTreeSet<String>) -> bool {
        let now = discover::bound(&keeper.options);
        if now != *bound {
            tracing::info!(
                before = bound.len(),
                now = now.len(),
                "the kernel has other GPUs, loading NVML anew"
            );
            keeper.reloads = MOST_RELOADS;
            return true;
        }
        if now.len() <= seen.count as usize {
            keeper.reloads = 0;
            return false;
        }
        let behind = keeper.reloads > 0;
        keeper.reloads = keeper.reloads.saturating_sub(1);
        behind
    }

    /// Whether GPUs, their reach, how they are cut or the driver are others than at the last reading. What each GPU says of its state
    /// is taken in on the way.
    fn has_changed(&self, keeper: &mut Keeper, seen: &Seen) -> Result<bool, NvmlError> {
        if self.nvml.device_count()? != seen.count {
            return Ok(true);
        }
        match self.nvml.driver_version() {
            Err(error) if error.is_driver_gone() => return Err(error),
            Ok(driver) if seen.driver.is_some() && seen.driver.as_ref() != Some(&driver) => return Ok(true),
            _ => {}
        }
        for index in 0..seen.count {
            if seen.unreachable.contains(&index) {
                if !self.is_out_of_reach(keeper, index)? {
                    return Ok(true);
                }
                continue;
            }
            let failure = match self.nvml.device(index).and_then(|device| device.memory()) {
                Err(error) if error.is_driver_gone() => return Err(error),
                Err(error) if error.is_gpu_lost() => return Ok(true),
                answer => answer.err().filter(is_silence),
            };
            if let Some(uuid) = seen.gpus.get(&index) {
                let failure = failure.map(|error| format!("GPU lost: {error}"));
                keeper.look(uuid, Duty::Answer, failure);
                self.ask_state(keeper, index, uuid)?;
            }
        }
        keeper.publish();
        let now = cuts(self.nvml, seen.count);
        // Only where it is known now: a question that fails is no change.
        Ok(now
            .iter()
            .any(|(index, cut)| cut.is_some() && seen.cuts.get(index) != Some(cut)))
    }

    /// Whether a GPU that could not be read last time still cannot be, whatever the reason: another reading would tell nothing new.
    fn is_out_of_reach(&self, keeper: &Keeper, index: u32) -> Result<bool, NvmlError> {
        match discover::reach(self.nvml, &keeper.options, index) {
            Err(error) if error.is_driver_gone() => Err(error),
            answer => Ok(answer.is_err()),
        }
    }

    /// Takes in what the GPU at `index` of NVML's count says of its state. A GPU that is lost is noticed elsewhere.
    fn ask_state(&self, keeper: &mut Keeper, index: u32, uuid: &GpuUuid) -> Result<(), NvmlError> {
        if let Some(vitals) = self.state(keeper, index, uuid)? {
            keeper.vitals(uuid, vitals);
        }
        Ok(())
    }

    /// What a GPU says of its state; `None` where it does not answer.
    fn state(&self, keeper: &Keeper, index: u32, uuid: &GpuUuid) -> Result<Option<Vitals>, NvmlError> {
        let Some(gpu) = keeper.gpu(uuid) else {
            return Ok(None);
        };
        match discover::vitals(self.nvml, &keeper.options, index, gpu) {
            Ok(vitals) => Ok(Some(vitals)),
            Err(error) if error.is_driver_gone() => Err(error),
            Err(_) => Ok(None),
        }
    }

    /// Takes in an event. True: the machine must be read again.
    fn note(&self, keeper: &mut Keeper, seen: &Seen, event: Event) -> bool {
        let EventKind::Xid(xid) = event.kind else {
            return true;
        };
        let known = event.gpu.and_then(|index| Some((index, seen.gpus.get(&index)?)));
        let Some((index, uuid)) = known else {
            tracing::warn!(xid, "an Xid of a GPU that is not known");
            return true;
        };
        let class = keeper.table.class(xid);
        let judged = keeper.checks.judge(xid, class);
        let extent = extent(keeper, uuid, xid, event);
        let reason = match extent {
            Extent::Gpu => keeper.table.describe(xid),
            Extent::GpuInstance(gi) => format!("{} (GPU instance {gi})", keeper.table.describe(xid)),
            Extent::ComputeInstance(gi, ci) => {
                format!(
                    "{} (GPU instance {gi}, compute instance {ci})",
                    keeper.table.describe(xid)
                )
            }
        };
        let count = keeper.xids.count(uuid, xid);
        let fault = |class| {
            let mig = keeper.gpu(uuid).and_then(|gpu| gpu.mig.as_ref());
            Fault {
                extent,
                xid,
                class,
                reason: reason.clone(),
                since: Timestamp::now(),
                mig_device: extent.mig_device(mig),
                driver: keeper.driver(),
                evidence: FaultEvidence::default(),
            }
        };
        let mut fault = match judged {
            Some(Class::Link { reset: false }) => {
                let fault = fault(Class::Link { reset: true });
                // A driver that says what it asks for will say if this one needs a reset; the links show the rest.
                if keeper.book.tells_wishes(uuid) {
                    keeper.book.suspect(uuid, fault);
                    None
                } else {
                    Some(fault)
                }
            }
            judged => judged.filter(|class| class.is_unhealthy()).map(fault),
        };
        let mut stands = false;
        if let Some(fault) = &fault {
            stands = keeper.book.fault(uuid, fault.clone());
            keeper.publish();
        }
        // One broken application raises thousands: the first of each kind is told, the rest is counted. After publishing: kubelet does not
        // wait for the log.
        if count == 1 {
            tracing::warn!(gpu = index, uuid = %uuid, %class, watched = judged.is_some(), "{reason}");
        }
        // After publishing, here and below: an Xid waits for no further question. A driver that is gone is met at the next wait.
        let recut = fault
            .as_mut()
            .is_some_and(|fault| self.find_anew(keeper, seen, (index, uuid), fault));
        if keeper.table.has_state(xid) || fault.is_some() {
            match self.state(keeper, index, uuid) {
                Err(_) => return false,
                Ok(None) => {}
                Ok(Some(vitals)) => {
                    if stands {
                        keeper.book.begins(uuid, extent, &vitals);
                    }
                    keeper.vitals(uuid, vitals);
                }
            }
            // A reset may be proved just now that ends a fault like this one, and not this one.
            if let Some(fault) = fault {
                keeper.book.fault(uuid, fault);
            }
            keeper.publish();
        }
        recut || judged.is_some_and(Class::touches_links)
    }

    /// An instance that an Xid names may be another one than was read last: then it is of the one that has that number now, and the
    /// reading to come must not take it for gone. True: the GPU was cut anew.
    fn find_anew(
        &self,
        keeper: &mut Keeper,
        seen: &Seen,
        (index, uuid): (u32, &GpuUuid),
        fault: &mut Fault,
    ) -> bool {
        let Some((gpu_instance, compute_instance)) = fault.extent.instance() else {
            return false;
        };
        let Some(cut) = discover::cut(self.nvml, index) else {
            return false;
        };
        if seen.cuts.get(&index).and_then(Option::as_ref) == Some(&cut) {
            return false;
        }
        if let Some(device) = cut.device(gpu_instance, compute_instance) {
            fault.mig_device = Some(device.to_string());
            keeper.book.is_in(uuid, fault.extent, device.as_str());
        }
        true
    }
}

/// Whether a GPU that fails like this may not answer anything. One that says that it does not know, or may not tell, answers: of a GPU
/// that is cut not everybody is told how much memory it has.
fn is_silence(error: &NvmlError) -> bool {
    let refusals = [Code::NoPermission, Code::InvalidArgument];
    !error.is_unsupported() && !error.code().is_some_and(|code| refusals.contains(&code))
}

/// Failures of waiting in a row after which the GPUs are listened to anew.
fn patience(error: &NvmlError, seen: &Seen) -> u32 {
    if error.is_gpu_lost() { seen.count.max(1) } else { 1 }
}

/// How much of its GPU an event touches: the instance that it names, if Xids of this kind are confined to it.
fn extent(keeper: &Keeper, uuid: &GpuUuid, xid: u64, event: Event) -> Extent {
    let gpu = keeper.gpu(uuid);
    let is_cut = gpu
        .and_then(|gpu| gpu.mig.as_ref())
        .is_some_and(|mig| mig.enabled);
    match (event.gpu_instance, event.compute_instance) {
        (Some(gi), ci) if is_cut && keeper.table.is_contained(xid) => match ci {
            Some(ci) if !keeper.table.is_shared(xid) => Extent::ComputeInstance(gi, ci),
            _ => Extent::GpuInstance(gi),
        },
        _ => Extent::Gpu,
    }
}

/// How each GPU is cut.
fn cuts(nvml: &Nvml, count: u32) -> BTreeMap<u32, Option<Cut>> {
    (0..count)
        .map(|index| (index, discover::cut(nvml, index)))
        .collect()
}

impl Seen {
    fn of(found: &Found, cuts: BTreeMap<u32, Option<Cut>>, before: Option<&Self>) -> Self {
        let gpus = found.machine.gpus().iter();
        let mut gpus: BTreeMap<u32, GpuUuid> = gpus
            .filter_map(|gpu| Some((u32::from(gpu.index), gpu.uuid.clone()?)))
            .collect();
        let unreachable: BTreeSet<u32> = found
            .unreachable
            .iter()
            .map(|(index, _)| u32::from(*index))
            .collect();
        for index in &unreachable {
            if let Some(gpu) = before.and_then(|before| before.gpus.get(index)) {
                gpus.entry(*index).or_insert_with(|| gpu.clone());
            }
        }
        Self {
            gpus,
            unreachable,
            count: u32::try_from(found.machine.gpus().len()).unwrap_or(u32::MAX),
            driver: found.machine.host().driver.clone(),
            cuts,
        }
    }
}
