//! What stands behind the C functions: one library per copy of the shared object, its session between initialisation and
//! shutdown, and its view of the control state. No C types here.

use std::collections::BTreeMap;
use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::control::{self, Block, ControlError, Event, EventKind, GpuState, State};
use crate::facts::{Facts, FactsError};
use crate::install::MACHINE_FILE;

/// Environment variable that names the machine file, for clients that load the library from a place of their own.
pub(crate) const MACHINE_VARIABLE: &str = "GANTRY_SIM_MACHINE";

/// One loaded copy of the shared object.
pub(crate) struct Library {
    machine: PathBuf,
    pub(crate) block: Block,
    control: Mutex<Control>,
    session: Mutex<Option<Arc<Session>>>,
}

/// The control state as last read.
struct Control {
    changes: Option<u32>,
    state: Arc<State>,
}

/// From the first initialisation to the last shutdown.
pub(crate) struct Session {
    pub(crate) facts: Facts,
    /// The GPUs that were in the machine when the session began, by their index in the machine file: NVML's indices.
    pub(crate) present: Vec<usize>,
    /// The driver's departures when the session began: a session does not survive one.
    departures: u64,
    users: Mutex<u32>,
    pub(crate) events: Events,
    pub(crate) meters: Meters,
    pub(crate) profiles: Profiles,
    closed: AtomicBool,
}

/// Why a session cannot begin.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    #[error("the driver is not loaded")]
    DriverGone,
    /// The machine file cannot be read, or is wrong.
    #[error(transparent)]
    Machine(#[from] FactsError),
}

impl Library {
    /// This copy of the shared object. A process that has loaded several copies has several of these.
    pub(crate) fn this() -> &'static Self {
        static THIS: OnceLock<Library> = OnceLock::new();
        THIS.get_or_init(|| Self::for_machine(machine_path()))
    }

    fn for_machine(machine: PathBuf) -> Self {
        let folder = machine.parent().unwrap_or(Path::new(".")).to_owned();
        // A folder that cannot be written has no controls; everything else works.
        let block = Block::open(&folder.join(control::BLOCK_FILE))
            .or_else(|_| Block::private())
            .unwrap_or_else(|error| {
                complain(&format!("no memory for the call counters: {error}"));
                std::process::abort()
            });
        Self {
            machine,
            block,
            control: Mutex::new(Control { changes: None, state: Arc::default() }),
            session: Mutex::new(None),
        }
    }

    /// The control state, read again if it has changed.
    pub(crate) fn state(&self) -> Arc<State> {
        let mut control = held(&self.control);
        let changes = self.block.changes();
        if control.changes != Some(changes) {
            match control::read_state(self.folder()) {
                Ok(state) => control.state = Arc::new(state),
                Err(error) => complain(&format!("the control state stays as it was: {error}")),
            }
            control.changes = Some(changes);
        }
        Arc::clone(&control.state)
    }

    fn folder(&self) -> &Path {
        self.machine.parent().unwrap_or(Path::new("."))
    }

    /// Changes the control state on behalf of a client.
    pub(crate) fn update<T>(
        &self,
        change: impl FnOnce(&mut State) -> Result<T, ControlError>,
    ) -> Result<T, ControlError> {
        control::update(&self.machine, &self.block, change).inspect_err(|error| {
            if !matches!(error, ControlError::Mig { .. }) {
                complain(&error.to_string());
            }
        })
    }

    /// The session, if there is one.
    pub(crate) fn session(&self) -> Option<Arc<Session>> {
        held(&self.session).clone()
    }

    /// Begins a session, or joins the one there is.
    pub(crate) fn start(&self, state: &State) -> Result<(), StartError> {
        if state.driver.gone {
            return Err(StartError::DriverGone);
        }
        let mut session = held(&self.session);
        match &*session {
            Some(running) => *held(&running.users) += 1,
            None => {
                let facts = Facts::read(&self.machine).inspect_err(|error| complain(&error.to_string()))?;
                *session = Some(Arc::new(Session {
                    present: present(&facts, state),
                    facts,
                    departures: state.driver.departures,
                    users: Mutex::new(1),
                    events: Events::default(),
                    meters: Meters::default(),
                    profiles: Profiles::default(),
                    closed: AtomicBool::new(false),
                }));
            }
        }
        Ok(())
    }

    /// Leaves the session, which ends with its last user. `false` if there is none.
    pub(crate) fn stop(&self) -> bool {
        let mut session = held(&self.session);
        let Some(running) = session.clone() else {
            return false;
        };
        let mut users = held(&running.users);
        *users -= 1;
        if *users == 0 {
            running.closed.store(true, Ordering::Release);
            *session = None;
            // A blocked event wait wakes up and finds the session closed.
            self.block.announce_change();
        }
        true
    }

    /// Blocks until the set receives an event, for `timeout` at most.
    pub(crate) fn wait(&self, session: &Session, set: u64, timeout: Duration) -> WaitOutcome {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            // Read before looking, so that a change between the look and the sleep ends the sleep at once.
            let seen = self.block.changes();
            let state = self.state();
            if session.closed() {
                return WaitOutcome::ShutDown;
            }
            if session.cut_off(&state) {
                return WaitOutcome::DriverGone;
            }
            if let Some(outcome) = session.events.next(set, &state) {
                return outcome;
            }
            let left =
                deadline.map_or(timeout, |deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return WaitOutcome::TimedOut;
            }
            self.block.wait_for_change(seen, left);
        }
    }
}

impl Session {
    /// Whether the driver has gone since the session began.
    pub(crate) fn cut_off(&self, state: &State) -> bool {
        state.driver.gone || state.driver.departures != self.departures
    }

    /// Whether the last user has shut down.
    pub(crate) fn closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }
}

/// A count that only grows, at a rate that changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Meter {
    /// In millijoules.
    Energy,
    /// In KiB.
    NvLinkSent,
    NvLinkReceived,
}

/// The meters of all GPUs, from 0 at their first reading.
#[derive(Default)]
pub(crate) struct Meters(Mutex<BTreeMap<(usize, Meter), (Instant, f64)>>);

impl Meters {
    /// The count now, with `rate` per second since the last reading.
    pub(crate) fn read(&self, gpu: usize, meter: Meter, rate: f64) -> u64 {
        let mut meters = held(&self.0);
        let (read, count) = meters.entry((gpu, meter)).or_insert_with(|| (Instant::now(), 0.0));
        *count += rate * read.elapsed().as_secs_f64();
        *read = Instant::now();
        *count as u64
    }
}

/// The values of a profiling sample, by NVML's number of the metric; empty until it is taken.
pub(crate) type Profile = BTreeMap<u32, f64>;

/// The profiling samples that clients hold.
#[derive(Default)]
pub(crate) struct Profiles(Mutex<(u64, BTreeMap<u64, Profile>)>);

impl Profiles {
    /// Makes a sample; returns its number, which is never 0 and never used again.
    pub(crate) fn create(&self) -> u64 {
        let mut profiles = held(&self.0);
        profiles.0 += 1;
        let number = profiles.0;
        profiles.1.insert(number, Profile::new());
        number
    }

    /// Ends a sample; `false` if there is none of this number.
    pub(crate) fn free(&self, number: u64) -> bool {
        held(&self.0).1.remove(&number).is_some()
    }

    /// Takes a sample; `false` if there is none of this number.
    pub(crate) fn fill(&self, number: u64, profile: Profile) -> bool {
        held(&self.0).1.get_mut(&number).map(|place| *place = profile).is_some()
    }

    /// A sample that was taken.
    pub(crate) fn get(&self, number: u64) -> Option<Profile> {
        held(&self.0).1.get(&number).filter(|profile| !profile.is_empty()).cloned()
    }
}

#[derive(Default)]
pub(crate) struct Events(Mutex<Sets>);

#[derive(Default)]
struct Sets {
    made: u64,
    sets: BTreeMap<u64, Set>,
}

#[derive(Default)]
struct Set {
    filters: Vec<Filter>,
    /// The first event not yet looked at.
    next: u64,
}

/// What a set listens to on one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Filter {
    /// Index of the GPU.
    pub(crate) gpu: u8,
    /// NVML's mask of event types.
    pub(crate) types: u64,
    /// Events before this number happened before the set listened.
    pub(crate) since: u64,
}

/// How a wait ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaitOutcome {
    /// Something happened.
    Event(Event),
    /// Nothing happened in time.
    TimedOut,
    /// No such set, or it was freed meanwhile.
    NoSuchSet,
    /// A GPU that the set listens to has fallen off the bus.
    GpuLost,
    DriverGone,
    /// The library was shut down.
    ShutDown,
}

impl Events {
    /// Makes a set; returns its number, which is never 0 and never used again.
    pub(crate) fn create(&self, state: &State) -> u64 {
        let mut sets = held(&self.0);
        sets.made += 1;
        let number = sets.made;
        sets.sets.insert(number, Set { filters: Vec::new(), next: state.next_event });
        number
    }

    /// Ends a set; `false` if there is none of this number.
    pub(crate) fn free(&self, set: u64) -> bool {
        held(&self.0).sets.remove(&set).is_some()
    }

    /// Makes a set listen to more; `false` if there is none of this number.
    pub(crate) fn listen(&self, set: u64, filter: Filter) -> bool {
        let mut sets = held(&self.0);
        let Some(set) = sets.sets.get_mut(&set) else {
            return false;
        };
        set.filters.push(filter);
        true
    }

    /// The set's next event, if one is there; else why there can be none, if so.
    fn next(&self, set: u64, state: &State) -> Option<WaitOutcome> {
        let mut sets = held(&self.0);
        let Some(set) = sets.sets.get_mut(&set) else {
            return Some(WaitOutcome::NoSuchSet);
        };
        let selected = |event: &&Event| set.filters.iter().any(|filter| filter.selects(event));
        let fresh = state.events.iter().filter(|event| event.number >= set.next);
        if let Some(event) = fresh.clone().find(selected) {
            set.next = event.number + 1;
            return Some(WaitOutcome::Event(*event));
        }
        set.next = set.next.max(state.next_event);
        let lost = |filter: &Filter| state.gpus.get(&filter.gpu).is_some_and(GpuState::unreachable);
        set.filters.iter().any(lost).then_some(WaitOutcome::GpuLost)
    }
}

impl Filter {
    fn selects(&self, event: &Event) -> bool {
        self.gpu == event.gpu && event.number >= self.since && self.types & event.kind.nvml_type() != 0
    }
}

impl EventKind {
    /// NVML's bit for this kind.
    pub(crate) fn nvml_type(self) -> u64 {
        use nvml_wrapper_sys::bindings as sys;
        u64::from(match self {
            Self::SingleBitEcc => sys::nvmlEventTypeSingleBitEccError,
            Self::DoubleBitEcc => sys::nvmlEventTypeDoubleBitEccError,
            Self::PState => sys::nvmlEventTypePState,
            Self::Xid => sys::nvmlEventTypeXidCriticalError,
            Self::Clock => sys::nvmlEventTypeClock,
            Self::MigConfig => sys::nvmlEventMigConfigChange,
        })
    }
}

/// The GPUs that are in the machine.
fn present(facts: &Facts, state: &State) -> Vec<usize> {
    let removed = |index: &usize| {
        let index = u8::try_from(*index).unwrap_or(u8::MAX);
        state.gpus.get(&index).is_some_and(|gpu| gpu.removed)
    };
    (0..facts.gpus.len()).filter(|index| !removed(index)).collect()
}

/// A lock's content, whatever became of other threads: every change behind these locks is a single assignment.
pub(crate) fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where the machine file is: named by the environment, else beside the shared object.
fn machine_path() -> PathBuf {
    match std::env::var_os(MACHINE_VARIABLE) {
        Some(path) if !path.is_empty() => PathBuf::from(path),
        _ => own_path()
            .and_then(|path| path.parent().map(Path::to_owned))
            .unwrap_or_default()
            .join(MACHINE_FILE),
    }
}

/// The file this code was loaded from, links resolved.
fn own_path() -> Option<PathBuf> {
    let anchor: fn() -> &'static Library = Library::this;
    // SAFETY: `Dl_info` is plain data for which zero is valid; `dladdr` writes it and only looks up the address.
    let name = unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        if libc::dladdr(anchor as *const libc::c_void, &raw mut info) == 0 || info.dli_fname.is_null() {
            return None;
        }
        CStr::from_ptr(info.dli_fname)
    };
    let path = Path::new(OsStr::from_bytes(name.to_bytes()));
    std::fs::canonicalize(path).ok()
}

/// Prints what a return code cannot express: NVML has no other way to report it.
#[expect(clippy::print_stderr, reason = "a C library has no logger, and NVML's codes carry no text")]
fn complain(problem: &str) {
    eprintln!("simulated libnvidia-ml: {problem}");
}
