//! Brings GPUs to a MIG layout, on the NVML thread. What a GPU has is always read from the driver, so a layout that an
//! earlier process left half made is completed. A change that the driver refuses is undone.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use gantry_config::NamedLayout;
use gantry_config::mig_layouts::PciId;
use gantry_topology::GpuUuid;
use gantry_topology::mig::{Catalogue, NewInstance, PresentInstance, Product, plan};
use tokio::sync::oneshot;

use crate::nvml::{Code, Device, GpuInstance, Nvml, NvmlError, Placement};

/// A request to bring the GPUs of the node to a layout.
#[derive(Debug)]
pub struct LayoutRequest {
    pub layout: Arc<NamedLayout>,
    /// The GPUs that may be changed: no pod holds one, and no pod can get one. The others are compared only.
    pub idle: BTreeSet<GpuUuid>,
    /// Receives the outcomes, after the machine was read again.
    pub reply: oneshot::Sender<LayoutOutcomes>,
}

/// The outcome for every GPU that NVML lists, by UUID.
pub type LayoutOutcomes = BTreeMap<GpuUuid, (u8, LayoutOutcome)>;

/// How a GPU stands to a layout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LayoutOutcome {
    /// The layout does not mention it.
    Unmentioned,
    /// It has what it is to have; true: since now.
    InPlace { changed: bool },
    /// It must be changed, and was not idle.
    Differs,
    /// Something other than a pod uses it, or the driver needs a reset first.
    Waits(String),
    /// It cannot have what it is to have, whatever is done; nothing was changed.
    Impossible(String),
    /// The driver refused a step. The text states whether the former instances are back.
    Refused(String),
}

/// Carries out a request. True: some GPU was changed, so the machine must be read again.
pub(super) fn carry_out(nvml: &Nvml, request: &LayoutRequest) -> (LayoutOutcomes, bool) {
    let mut outcomes = LayoutOutcomes::new();
    let mut touched = false;
    // A failure to count the GPUs is found by the next check of the session.
    for index in 0..nvml.device_count().unwrap_or(0) {
        let Ok(device) = nvml.device(index) else { continue };
        let (Ok(uuid), Ok(position)) = (device.uuid(), u8::try_from(index)) else { continue };
        let is_idle = request.idle.contains(&uuid);
        let mut gpu = Gpu { device, is_touched: false };
        let outcome = gpu.bring_to(&request.layout, position, is_idle).unwrap_or_else(LayoutOutcome::from);
        touched |= gpu.is_touched;
        if gpu.is_touched {
            tracing::info!(gpu = index, %outcome, "MIG layout changed");
        }
        outcomes.insert(uuid, (position, outcome));
    }
    (outcomes, touched)
}

impl fmt::Display for LayoutOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unmentioned => f.write_str("not mentioned"),
            Self::InPlace { .. } => f.write_str("in place"),
            Self::Differs => f.write_str("differs"),
            Self::Waits(text) | Self::Impossible(text) | Self::Refused(text) => f.write_str(text),
        }
    }
}

/// What the driver answers to a change that may be possible later, or never.
impl From<NvmlError> for LayoutOutcome {
    fn from(error: NvmlError) -> Self {
        match error.code() {
            Some(Code::InUse | Code::ResetRequired | Code::NotReady) => Self::Waits(error.to_string()),
            _ => Self::Refused(error.to_string()),
        }
    }
}

/// A GPU that is brought to a layout.
struct Gpu<'nvml> {
    device: Device<'nvml>,
    /// Whether the driver was called to change something.
    is_touched: bool,
}

/// A GPU instance with the slices of its compute instances.
struct Instance<'nvml> {
    handle: GpuInstance<'nvml>,
    compute: Vec<u8>,
}

impl<'nvml> Gpu<'nvml> {
    fn bring_to(
        &mut self,
        layout: &NamedLayout,
        position: u8,
        is_idle: bool,
    ) -> Result<LayoutOutcome, NvmlError> {
        let pci_id = PciId(self.device.pci_id()?);
        let Some(entry) = layout.entry(position, pci_id) else {
            return Ok(LayoutOutcome::Unmentioned);
        };
        let mode = match self.device.mig().mode() {
            Ok(mode) => mode.current,
            // It is as it is to be: without MIG.
            Err(error) if error.is_unsupported() && entry.devices.is_none() => {
                return Ok(LayoutOutcome::InPlace { changed: false });
            }
            Err(error) if error.is_unsupported() => {
                let name = self.device.name()?;
                return Ok(LayoutOutcome::Impossible(format!("{name} does not support MIG")));
            }
            Err(error) => return Err(error),
        };
        match &entry.devices {
            None if !mode => Ok(LayoutOutcome::InPlace { changed: false }),
            None if !is_idle => Ok(LayoutOutcome::Differs),
            None => self.disable(),
            Some(wanted) => self.divide(wanted, mode, is_idle),
        }
    }

    /// Destroys every instance and turns MIG mode off.
    fn disable(&mut self) -> Result<LayoutOutcome, NvmlError> {
        if let Some(waits) = self.in_use()? {
            return Ok(waits);
        }
        let product = self.product()?;
        let before = self.present(&product)?;
        let destroyed = before.iter().map(|instance| (instance.handle, self.as_new(&product, instance)));
        let mut journal = Journal { destroy: destroyed.collect(), ..Journal::default() };
        let done = journal.run(self).and_then(|()| self.set_mode(false));
        match done {
            Ok(true) => Ok(LayoutOutcome::InPlace { changed: true }),
            // The instances are gone, and no pod may get the GPU before the reset.
            Ok(false) => Ok(LayoutOutcome::Waits(needs_reset("off"))),
            Err(error) => Ok(self.undo(journal, error)),
        }
    }

    /// Turns MIG mode on, and makes the wanted devices.
    fn divide(
        &mut self,
        wanted: &BTreeMap<String, u8>,
        mode: bool,
        is_idle: bool,
    ) -> Result<LayoutOutcome, NvmlError> {
        if !mode {
            // The driver names its profiles once MIG mode is on. What the table of profiles rules out is not tried.
            let product = self.known_product()?;
            if let Some(error) = product.and_then(|product| plan(&product, &[], wanted).err()) {
                return Ok(LayoutOutcome::Impossible(error.to_string()));
            }
            if !is_idle {
                return Ok(LayoutOutcome::Differs);
            }
            if let Some(waits) = self.in_use()? {
                return Ok(waits);
            }
            if !self.set_mode(true)? {
                return Ok(LayoutOutcome::Waits(needs_reset("on")));
            }
        }
        let divided = self.divide_enabled(wanted, !mode, is_idle);
        if !mode && !matches!(divided, Ok(LayoutOutcome::InPlace { .. })) {
            // The mode is part of what is undone.
            let back = self.set_mode(false);
            let failed = divided.unwrap_or_else(LayoutOutcome::from);
            return Ok(match back {
                Ok(_) => failed,
                Err(error) => LayoutOutcome::Refused(format!("{failed}; MIG mode stays on: {error}")),
            });
        }
        divided
    }

    fn divide_enabled(
        &mut self,
        wanted: &BTreeMap<String, u8>,
        mode_changed: bool,
        is_idle: bool,
    ) -> Result<LayoutOutcome, NvmlError> {
        let product = self.product()?;
        let before = self.present(&product)?;
        let present: Vec<PresentInstance> = before.iter().map(Instance::present).collect();
        let steps = match plan(&product, &present, wanted) {
            Ok(steps) => steps,
            Err(error) => return Ok(LayoutOutcome::Impossible(error.to_string())),
        };
        if steps.is_empty() {
            return Ok(LayoutOutcome::InPlace { changed: mode_changed });
        }
        if !is_idle {
            return Ok(LayoutOutcome::Differs);
        }
        if let Some(waits) = self.in_use()? {
            return Ok(waits);
        }
        let destroy = before.iter().filter(|instance| steps.destroy.contains(&instance.handle.id));
        let mut journal = Journal {
            destroy: destroy.map(|instance| (instance.handle, self.as_new(&product, instance))).collect(),
            create: steps.create,
            ..Journal::default()
        };
        match journal.run(self) {
            Ok(()) => Ok(LayoutOutcome::InPlace { changed: true }),
            Err(error) => Ok(self.undo(journal, error)),
        }
    }

    fn set_mode(&mut self, enable: bool) -> Result<bool, NvmlError> {
        self.is_touched = true;
        let is_active = self.device.mig().set_mode(enable)?;
        Ok(is_active && self.device.mig().mode()?.current == enable)
    }

    /// Undoes what was done, after `error`.
    fn undo(&mut self, journal: Journal<'nvml>, error: NvmlError) -> LayoutOutcome {
        match journal.undo(self) {
            Ok(()) => match LayoutOutcome::from(error) {
                LayoutOutcome::Refused(text) => {
                    LayoutOutcome::Refused(format!("{text}; the former MIG instances are in place again"))
                }
                outcome => outcome,
            },
            Err(undoing) => LayoutOutcome::Refused(format!(
                "{error}; and the former MIG instances could not be restored: {undoing}"
            )),
        }
    }

    /// That processes run on the GPU.
    fn in_use(&self) -> Result<Option<LayoutOutcome>, NvmlError> {
        let processes = match self.device.compute_processes() {
            Err(error) if error.is_unsupported() => Vec::new(),
            answer => answer?,
        };
        let waits = |first: &crate::nvml::Process| {
            let count = processes.len();
            LayoutOutcome::Waits(format!(
                "{count} processes of no known pod run on it, such as PID {}",
                first.pid
            ))
        };
        Ok(processes.first().map(waits))
    }

    /// The product by the profiles that its driver offers.
    fn product(&self) -> Result<Product, NvmlError> {
        let memory = self.device.memory().map_or(0, |bytes| bytes >> 20);
        Ok(Product::of_driver(self.device.name()?, memory, self.device.mig().instance_profiles()?))
    }

    /// The product by the table of profiles.
    fn known_product(&self) -> Result<Option<Product>, NvmlError> {
        let memory = self.device.memory().ok().map(|bytes| bytes >> 20);
        Ok(Catalogue::built_in().by_model(&self.device.name()?, memory).cloned())
    }

    fn present(&self, product: &Product) -> Result<Vec<Instance<'nvml>>, NvmlError> {
        let instances = self.device.mig().gpu_instances(&product.profiles)?.into_iter();
        let with_compute = |handle: GpuInstance<'nvml>| {
            let compute = handle.compute_instances()?.iter().map(|compute| compute.slices).collect();
            Ok(Instance { handle, compute })
        };
        instances.map(with_compute).collect()
    }

    /// What would make an instance again.
    fn as_new(&self, product: &Product, instance: &Instance<'_>) -> NewInstance {
        let GpuInstance { profile, placement, .. } = instance.handle;
        let name =
            product.profile_by_id(profile).map_or_else(|| profile.to_string(), |known| known.name.clone());
        let unit = |units: u32| u8::try_from(units).unwrap_or(u8::MAX);
        let compute = instance.compute.clone();
        NewInstance { name, profile, start: unit(placement.start), size: unit(placement.size), compute }
    }

    fn create(&mut self, new: &NewInstance) -> Result<GpuInstance<'nvml>, NvmlError> {
        self.is_touched = true;
        let place = Placement { start: new.start.into(), size: new.size.into() };
        let made = self.device.mig().create_gpu_instance(new.profile, place)?;
        for slices in &new.compute {
            if let Err(error) = made.create_compute_instance(*slices) {
                // Without a compute instance it is no MIG device, and would only take room.
                if let Err(left) = self.destroy(made) {
                    tracing::warn!(gpu = self.device.index(), "an incomplete MIG instance is left: {left}");
                }
                return Err(error);
            }
        }
        Ok(made)
    }

    fn destroy(&mut self, instance: GpuInstance<'nvml>) -> Result<(), NvmlError> {
        self.is_touched = true;
        for compute in instance.compute_instances()? {
            compute.destroy()?;
        }
        instance.destroy()
    }
}

impl Instance<'_> {
    fn present(&self) -> PresentInstance {
        PresentInstance {
            id: self.handle.id,
            profile: self.handle.profile,
            start: u8::try_from(self.handle.placement.start).unwrap_or(u8::MAX),
            compute: self.compute.clone(),
            // A GPU is changed only while nothing holds it.
            held: false,
        }
    }
}

/// The steps of a change, and those done so far.
#[derive(Default)]
struct Journal<'nvml> {
    /// Instances to destroy, with what makes them again.
    destroy: Vec<(GpuInstance<'nvml>, NewInstance)>,
    create: Vec<NewInstance>,
    destroyed: Vec<NewInstance>,
    created: Vec<GpuInstance<'nvml>>,
}

impl<'nvml> Journal<'nvml> {
    /// Carries out the steps, up to the first that the driver refuses.
    fn run(&mut self, gpu: &mut Gpu<'nvml>) -> Result<(), NvmlError> {
        for (instance, again) in std::mem::take(&mut self.destroy) {
            // Its compute instances may be gone even if it stays.
            self.destroyed.push(again);
            gpu.destroy(instance)?;
        }
        for new in std::mem::take(&mut self.create) {
            self.created.push(gpu.create(&new)?);
        }
        Ok(())
    }

    /// Destroys what was created, and creates what was destroyed. Goes on after a failure; returns the first one.
    fn undo(self, gpu: &mut Gpu<'nvml>) -> Result<(), NvmlError> {
        let mut result = Ok(());
        for instance in self.created {
            result = result.and(gpu.destroy(instance));
        }
        for former in &self.destroyed {
            result = result.and(gpu.restore(former));
        }
        result
    }
}

impl Gpu<'_> {
    /// Makes a former instance again, or the compute instances of one that is still there.
    fn restore(&mut self, former: &NewInstance) -> Result<(), NvmlError> {
        let profiles = self.device.mig().instance_profiles()?;
        let there = self.device.mig().gpu_instances(&profiles)?.into_iter().find(|instance| {
            instance.profile == former.profile && instance.placement.start == u32::from(former.start)
        });
        let Some(there) = there else {
            return self.create(former).map(drop);
        };
        let mut missing = former.compute.clone();
        for compute in there.compute_instances()? {
            if let Some(at) = missing.iter().position(|slices| *slices == compute.slices) {
                missing.remove(at);
            }
        }
        missing.into_iter().try_for_each(|slices| there.create_compute_instance(slices))
    }
}

fn needs_reset(mode: &str) -> String {
    format!(
        "MIG mode will be {mode} after the next reset of the GPU: run nvidia-smi --gpu-reset on the node, or reboot it"
    )
}
