//! Changes a simulated machine for tests and tools: writes the state file, announces the change and reads the counters.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{
    Activity, BLOCK_FILE, Block, ComputeMode, ControlError, EventKind, FabricState, GpuState, MigChange,
    MigRefusal, Piece, Process, Rule, State, read_state, update,
};
use crate::facts::Facts;
use crate::install::MACHINE_FILE;
use crate::names::{NAMES, slot};

/// Controls every simulated library that reads the machine file of one folder.
pub struct Controller {
    folder: PathBuf,
    pub(super) block: Block,
}

impl Controller {
    /// Opens the controls of the machine with the file `machine.yaml` in `folder`. The library need not be loaded yet.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn attach(folder: &Path) -> Result<Self, ControlError> {
        let path = folder.join(BLOCK_FILE);
        let block = Block::open(&path).map_err(|source| ControlError::Open { path, source })?;
        Ok(Self { folder: folder.to_owned(), block })
    }

    /// The state as it stands.
    ///
    /// # Errors
    /// When the state file cannot be read.
    pub fn state(&self) -> Result<State, ControlError> {
        read_state(&self.folder)
    }

    /// Changes the state as a whole; other controllers wait meanwhile. Once it returns, the next NVML call sees the change.
    ///
    /// # Errors
    /// When the state file cannot be read or written; then nothing has changed.
    pub fn update(&self, change: impl FnOnce(&mut State)) -> Result<(), ControlError> {
        update(&self.machine(), &self.block, |state| {
            change(state);
            Ok(())
        })
    }

    /// Changes the MIG layout of a GPU, as far as the product allows.
    ///
    /// # Errors
    /// When there is no such GPU, it cannot have this layout, and as [`Controller::update`].
    pub fn change_mig(&self, gpu: u8, change: &MigChange) -> Result<(), ControlError> {
        let machine = self.machine();
        let facts = Facts::read(&machine)
            .map_err(|error| ControlError::Parse { path: machine.clone(), problem: error.to_string() })?;
        let gpus = facts.gpus.len();
        let known = facts.gpus.get(usize::from(gpu)).ok_or(ControlError::NoSuchGpu { gpu, gpus })?;
        update(&machine, &self.block, |state| {
            let changed = state.change_mig(known, change);
            changed.map_err(|source| ControlError::Mig { gpu, source })?;
            Ok(())
        })
    }

    /// Turns MIG on and divides a GPU into `pieces` (`1g.5gb`, `3g.20gb@4`, `3g.20gb@4=1c,2c`), whatever it was before. Instances
    /// that stay keep their UUIDs; a GPU with an earlier layout has the UUIDs it had then.
    ///
    /// # Errors
    /// When a piece cannot be read or does not fit, and as [`Controller::change_mig`].
    pub fn recut(&self, gpu: u8, pieces: &[&str]) -> Result<(), ControlError> {
        let pieces: Result<Vec<Piece>, _> = pieces.iter().map(|piece| piece.parse()).collect();
        let pieces = pieces.map_err(|error: super::PieceError| ControlError::Mig {
            gpu,
            source: MigRefusal::Invalid(error.to_string()),
        })?;
        self.change_mig(gpu, &MigChange::Recut(pieces))
    }

    /// Ends every instance of a GPU and turns MIG off.
    pub fn uncut(&self, gpu: u8) -> Result<(), ControlError> {
        self.change_mig(gpu, &MigChange::Off)
    }

    /// Resets a GPU: its MIG instances end, and a MIG mode that waits takes effect.
    pub fn reset_gpu(&self, gpu: u8) -> Result<(), ControlError> {
        self.change_mig(gpu, &MigChange::Reset)
    }

    fn machine(&self) -> PathBuf {
        self.folder.join(MACHINE_FILE)
    }

    /// Makes libraries read the state file again, after it was edited by hand.
    pub fn announce(&self) {
        self.block.announce_change();
    }

    /// Undoes everything that was changed, but forgets neither event numbers nor departures of the driver.
    pub fn reset(&self) -> Result<(), ControlError> {
        self.update(|state| {
            state.driver.gone = false;
            state.driver.count = None;
            state.driver.version = None;
            state.gpus.clear();
            state.calls.clear();
        })
    }

    /// Raises an Xid that touches a whole GPU.
    pub fn raise_xid(&self, gpu: u8, xid: u64) -> Result<(), ControlError> {
        self.raise(gpu, EventKind::Xid, xid, None)
    }

    /// Raises an Xid confined to a GPU instance and a compute instance; `u32::MAX` for either means all of them.
    pub fn raise_xid_in(
        &self,
        gpu: u8,
        xid: u64,
        gpu_instance: u32,
        compute_instance: u32,
    ) -> Result<(), ControlError> {
        let instance = Some((gpu_instance, compute_instance));
        self.raise(gpu, EventKind::Xid, xid, instance)
    }

    /// Raises any event. `instance` holds the ids of the GPU instance and compute instance it is confined to.
    pub fn raise(
        &self,
        gpu: u8,
        kind: EventKind,
        data: u64,
        instance: Option<(u32, u32)>,
    ) -> Result<(), ControlError> {
        self.update(|state| {
            state.raise(gpu, kind, data, instance);
        })
    }

    /// Drops a GPU off the bus. The Xid 79 that goes with it on real machines is the caller's to raise, before or after.
    pub fn lose_gpu(&self, gpu: u8) -> Result<(), ControlError> {
        self.update_gpu(gpu, |gpu| gpu.lost = true)
    }

    /// Brings a lost GPU back.
    pub fn restore_gpu(&self, gpu: u8) -> Result<(), ControlError> {
        self.update_gpu(gpu, |gpu| gpu.lost = false)
    }

    /// Removes a GPU from the machine. Sessions that exist see it as lost; later sessions see one GPU less, and lower
    /// indices for those after it.
    pub fn remove_gpu(&self, gpu: u8) -> Result<(), ControlError> {
        self.update_gpu(gpu, |gpu| gpu.removed = true)
    }

    /// Puts a removed GPU back. Later sessions see it.
    pub fn add_gpu(&self, gpu: u8) -> Result<(), ControlError> {
        self.update_gpu(gpu, |gpu| gpu.removed = false)
    }

    /// Changes what is out of the ordinary on one GPU.
    pub fn update_gpu(&self, gpu: u8, change: impl FnOnce(&mut GpuState)) -> Result<(), ControlError> {
        self.update(|state| change(state.gpus.entry(gpu).or_default()))
    }

    /// Unloads the kernel driver: no call succeeds, none can initialise.
    pub fn unload_driver(&self) -> Result<(), ControlError> {
        self.update(|state| {
            if !state.driver.gone {
                state.driver.gone = true;
                state.driver.departures += 1;
            }
        })
    }

    /// Loads the kernel driver again. Clients must shut down and initialise to see it.
    pub fn load_driver(&self) -> Result<(), ControlError> {
        self.update(|state| state.driver.gone = false)
    }

    /// Makes the next `times` calls of a function answer `code` (an `nvmlReturn_t`); for ever if `times` is `None`.
    ///
    /// # Errors
    /// When NVML has no such function, and as [`Controller::update`].
    pub fn fail_call(&self, name: &str, code: u32, times: Option<u64>) -> Result<(), ControlError> {
        let made = self.made(name)?;
        self.update(|state| {
            let rule = state.calls.entry(name.to_owned()).or_default();
            rule.fail = Some(code);
            rule.from_call = made;
            rule.until_call = times.map(|times| made + times);
        })
    }

    /// Makes every call of a function take `time` longer.
    ///
    /// # Errors
    /// When NVML has no such function, and as [`Controller::update`].
    pub fn slow_call(&self, name: &str, time: Duration) -> Result<(), ControlError> {
        self.made(name)?;
        self.update(|state| {
            let rule = state.calls.entry(name.to_owned()).or_default();
            rule.slow_ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        })
    }

    /// Makes every call of a function hang until the rule is cleared.
    ///
    /// # Errors
    /// When NVML has no such function, and as [`Controller::update`].
    pub fn hang_call(&self, name: &str) -> Result<(), ControlError> {
        self.made(name)?;
        self.update(|state| state.calls.entry(name.to_owned()).or_default().hang = true)
    }

    /// Lets every call of a function succeed again, at its usual speed.
    pub fn clear_rule(&self, name: &str) -> Result<(), ControlError> {
        self.update(|state| {
            state.calls.remove(name);
            state.gpus.values_mut().for_each(|gpu| {
                gpu.calls.remove(name);
            });
        })
    }

    /// Makes calls of a function on one GPU answer `code` (an `nvmlReturn_t`).
    ///
    /// # Errors
    /// When NVML has no such function, and as [`Controller::update`].
    pub fn fail_call_on(&self, gpu: u8, name: &str, code: u32) -> Result<(), ControlError> {
        self.rule_on(gpu, name, |rule| rule.fail = Some(code))
    }

    /// Makes calls of a function on one GPU hang until the rule is cleared.
    ///
    /// # Errors
    /// When NVML has no such function, and as [`Controller::update`].
    pub fn hang_call_on(&self, gpu: u8, name: &str) -> Result<(), ControlError> {
        self.rule_on(gpu, name, |rule| rule.hang = true)
    }

    fn rule_on(&self, gpu: u8, name: &str, change: impl FnOnce(&mut Rule)) -> Result<(), ControlError> {
        self.made(name)?;
        self.update_gpu(gpu, |gpu| change(gpu.calls.entry(name.to_owned()).or_default()))
    }

    /// Sets a GPU's registration with the NVLink fabric; `None` for that of the machine file.
    pub fn set_fabric(&self, gpu: u8, fabric: Option<FabricState>) -> Result<(), ControlError> {
        self.update_gpu(gpu, |gpu| gpu.fabric = fabric)
    }

    /// Sets which processes may compute on a GPU.
    pub fn set_compute_mode(&self, gpu: u8, mode: ComputeMode) -> Result<(), ControlError> {
        self.update_gpu(gpu, |gpu| gpu.compute_mode = mode)
    }

    /// Sets the number of GPUs that NVML reports; `None` for the true one.
    pub fn set_count(&self, count: Option<u32>) -> Result<(), ControlError> {
        self.update(|state| state.driver.count = count)
    }

    /// Takes an NVLink of a GPU down or up; for a direct link this holds for the peer's end too.
    pub fn set_nvlink(&self, gpu: u8, link: u8, up: bool) -> Result<(), ControlError> {
        self.update_gpu(gpu, |gpu| {
            if up {
                gpu.links_down.remove(&link);
            } else {
                gpu.links_down.insert(link);
            }
        })
    }

    /// Sets a GPU's temperature in degrees Celsius.
    pub fn set_temperature(&self, gpu: u8, celsius: u32) -> Result<(), ControlError> {
        self.update_gpu(gpu, |gpu| gpu.temperature = Some(celsius))
    }

    /// Sets the share of time in which a GPU computes, in percent.
    pub fn set_utilization(&self, gpu: u8, percent: u32) -> Result<(), ControlError> {
        self.update_gpu(gpu, |gpu| gpu.utilization = Some(percent))
    }

    /// Sets what a GPU, or one of its GPU instances, does in detail.
    pub fn set_activity(
        &self,
        gpu: u8,
        instance: Option<u32>,
        activity: Activity,
    ) -> Result<(), ControlError> {
        self.update_gpu(gpu, |gpu| match instance {
            None => gpu.activity = activity,
            Some(id) => _ = gpu.instance_activity.insert(id, activity),
        })
    }

    /// Sets the compute processes that run on a GPU.
    pub fn set_processes(&self, gpu: u8, processes: Vec<Process>) -> Result<(), ControlError> {
        self.update_gpu(gpu, |gpu| gpu.processes = processes)
    }

    /// How often each NVML function has been called so far, by any process.
    pub fn calls(&self) -> Calls {
        Calls(self.block.calls())
    }

    fn made(&self, name: &str) -> Result<u64, ControlError> {
        slot(name)
            .and_then(|slot| self.block.calls().get(slot).copied())
            .ok_or_else(|| ControlError::NoSuchFunction { name: name.to_owned() })
    }
}

/// How often each NVML function has been called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Calls(Vec<u64>);

impl Calls {
    /// Calls of one function; 0 for a name NVML does not have.
    pub fn of(&self, name: &str) -> u64 {
        slot(name).and_then(|slot| self.0.get(slot)).copied().unwrap_or(0)
    }

    /// All calls together.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// The calls made after `earlier` was read.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let pairs = self.0.iter().zip(&earlier.0);
        Self(pairs.map(|(now, before)| now.saturating_sub(*before)).collect())
    }

    /// The functions called, with how often.
    pub fn by_name(&self) -> BTreeMap<&'static str, u64> {
        let pairs = NAMES.iter().copied().zip(self.0.iter().copied());
        pairs.filter(|(_, calls)| *calls > 0).collect()
    }
}
