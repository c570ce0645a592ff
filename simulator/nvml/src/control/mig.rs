//! What a change of MIG does to one GPU: a pure function from one layout to the next.

use std::str::FromStr;

use gantry_topology::mig::{
    MigLayout, MigLayoutError, Product as Profiles, Profile, compute_placements, legal_compute,
};
use gantry_topology::{ComputeInstance, GpuInstance, Mig};

use crate::facts::{self, GpuFacts};

/// A change of the MIG layout of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MigChange {
    /// MIG mode on or off. Off is refused while there are instances.
    Mode(bool),
    /// Makes a GPU instance without compute instances, at the lowest start that is free if none is given.
    CreateGpu {
        /// The profile's id.
        profile: u32,
        /// The first memory unit.
        start: Option<u8>,
    },
    /// Ends a GPU instance; refused while it has compute instances.
    DestroyGpu { id: u32 },
    /// Makes a compute instance.
    CreateCompute {
        /// Id of the GPU instance.
        gpu_instance: u32,
        /// Compute slices.
        slices: u8,
        /// The first compute slice.
        start: Option<u8>,
    },
    /// Ends a compute instance.
    DestroyCompute {
        /// Id of the GPU instance.
        gpu_instance: u32,
        id: u32,
    },
    /// Turns MIG on and divides the whole GPU again. Instances that stay where and what they were keep their UUIDs.
    Recut(Vec<Piece>),
    /// Ends every instance, and turns MIG off.
    Off,
    /// Ends every instance, and keeps the mode.
    Reset,
}

/// One GPU instance of a new layout. As text: `3g.20gb`, `3g.20gb@4` with the unit it starts at, `3g.20gb@4=1c,2c` with compute
/// instances of one and two slices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The profile, e.g. `3g.20gb`.
    pub profile: String,
    /// The first memory unit; anywhere it fits if absent.
    pub start: Option<u8>,
    /// Slices of each compute instance; one with all of them if empty.
    pub compute: Vec<u8>,
}

/// A text that is no piece of a layout.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?}: write a profile, with @ and the unit it starts at, with = and its compute instances, as in 3g.20gb@4=1c,2c"
)]
pub struct PieceError(String);

impl FromStr for Piece {
    type Err = PieceError;

    fn from_str(text: &str) -> Result<Self, PieceError> {
        let wrong = || PieceError(text.to_owned());
        let (rest, compute) = text.split_once('=').unwrap_or((text, ""));
        let (profile, start) = match rest.split_once('@') {
            Some((profile, start)) => (profile, Some(start.parse().map_err(|_| wrong())?)),
            None => (rest, None),
        };
        let slices = |part: &str| part.strip_suffix('c').and_then(|count| count.parse().ok());
        let compute = compute
            .split(',')
            .filter(|part| !part.is_empty())
            .map(|part| slices(part).ok_or_else(wrong))
            .collect::<Result<Vec<u8>, PieceError>>()?;
        if profile.is_empty() {
            return Err(wrong());
        }
        Ok(Self { profile: profile.to_owned(), start, compute })
    }
}

/// Why a change is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MigRefusal {
    /// The GPU does not support MIG.
    #[error("{0} cannot be cut")]
    NotSupported(String),
    /// MIG mode is off.
    #[error("MIG mode is off")]
    Disabled,
    /// There are instances that stand in the way.
    #[error("{0} is in use")]
    InUse(String),
    /// There is no such instance.
    #[error("there is no {0}")]
    NotFound(String),
    /// A profile or placement that the product does not have.
    #[error("{0}")]
    Invalid(String),
    /// What is asked for does not fit beside the others.
    #[error("{0}")]
    NoRoom(String),
}

/// The layout after a change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AppliedLayout {
    /// The layout.
    pub mig: Mig,
    /// Ids of the GPU instance that was made or changed, and of the compute instance made in it.
    pub made: Option<(u32, Option<u32>)>,
}

/// The layout of `gpu` after `change`, where `now` is the one before it.
///
/// # Errors
/// Why the change cannot be made.
pub fn apply(gpu: &GpuFacts, now: Option<&Mig>, change: &MigChange) -> Result<AppliedLayout, MigRefusal> {
    let profiles = gpu.profiles.as_ref().ok_or_else(|| MigRefusal::NotSupported(gpu.model.clone()))?;
    let mut mig = now.cloned().unwrap_or_default();
    let alone = |mig| Ok(AppliedLayout { mig, made: None });
    match change {
        MigChange::Mode(enable) => {
            if !enable && !mig.instances.is_empty() {
                return Err(MigRefusal::InUse("a GPU instance".to_owned()));
            }
            mig.enabled = *enable;
            return alone(mig);
        }
        MigChange::Off => return alone(Mig::default()),
        MigChange::Reset => return alone(Mig { instances: Vec::new(), ..mig }),
        MigChange::Recut(pieces) => return alone(recut(gpu, profiles, &mig, pieces)?),
        _ => {}
    }
    if !mig.enabled {
        return Err(MigRefusal::Disabled);
    }
    match change {
        MigChange::CreateGpu { profile, start } => {
            let id = create_gpu(profiles, &mut mig, *profile, *start)?;
            Ok(AppliedLayout { mig, made: Some((id, None)) })
        }
        MigChange::DestroyGpu { id } => {
            if !instance(&mut mig, *id)?.compute.is_empty() {
                return Err(MigRefusal::InUse(format!("GPU instance {id}")));
            }
            mig.instances.retain(|instance| instance.id != *id);
            alone(mig)
        }
        MigChange::CreateCompute { gpu_instance, slices, start } => {
            let instance = instance(&mut mig, *gpu_instance)?;
            let id = create_compute(gpu, profiles, instance, *slices, *start)?;
            Ok(AppliedLayout { mig, made: Some((*gpu_instance, Some(id))) })
        }
        MigChange::DestroyCompute { gpu_instance, id } => {
            let instance = instance(&mut mig, *gpu_instance)?;
            let before = instance.compute.len();
            instance.compute.retain(|compute| compute.id != *id);
            if instance.compute.len() == before {
                return Err(MigRefusal::NotFound(format!(
                    "compute instance {id} in GPU instance {gpu_instance}"
                )));
            }
            alone(mig)
        }
        MigChange::Mode(_) | MigChange::Off | MigChange::Reset | MigChange::Recut(_) => alone(mig),
    }
}

/// `pieces` in place of what `before` has.
fn recut(gpu: &GpuFacts, profiles: &Profiles, before: &Mig, pieces: &[Piece]) -> Result<Mig, MigRefusal> {
    let mut fresh = Mig { enabled: true, instances: Vec::new() };
    let starts = arrange(profiles, pieces)?;
    for (piece, start) in pieces.iter().zip(starts) {
        let profile = named(profiles, &piece.profile)?;
        let id = create_gpu(profiles, &mut fresh, profile.id, Some(start))?;
        let whole = [profile.compute];
        let compute = if piece.compute.is_empty() { &whole[..] } else { &piece.compute };
        let made = instance(&mut fresh, id)?;
        for slices in compute {
            create_compute(gpu, profiles, made, *slices, None)?;
        }
        let names = |instance: &GpuInstance| -> Vec<String> {
            let compute = instance.compute.iter();
            compute.map(|compute| compute.profile.clone()).collect()
        };
        let same = |old: &&GpuInstance| {
            old.id == made.id
                && old.profile == made.profile
                && old.start == made.start
                && names(old) == names(made)
        };
        if let Some(old) = before.instances.iter().find(same) {
            made.clone_from(old);
        }
    }
    Ok(fresh)
}

/// Where each piece starts: at its stated start, else anywhere that leaves room for the others.
fn arrange(profiles: &Profiles, pieces: &[Piece]) -> Result<Vec<u8>, MigRefusal> {
    let mut layout = MigLayout::empty(profiles);
    let mut open: Vec<(usize, &Profile)> = Vec::new();
    let mut starts = vec![0; pieces.len()];
    for (position, piece) in pieces.iter().enumerate() {
        let profile = named(profiles, &piece.profile)?;
        match piece.start {
            Some(start) => {
                layout.add(profile, start)?;
                if let Some(place) = starts.get_mut(position) {
                    *place = start;
                }
            }
            None => open.push((position, profile)),
        }
    }
    // The largest have the fewest places to go.
    open.sort_by_key(|(_, profile)| std::cmp::Reverse(profile.size));
    if place(&layout, &open, &mut starts) {
        return Ok(starts);
    }
    let names: Vec<&str> = pieces.iter().map(|piece| piece.profile.as_str()).collect();
    Err(MigRefusal::NoRoom(format!("{} cannot be cut into {}", profiles.name, names.join(", "))))
}

fn place(layout: &MigLayout<'_>, open: &[(usize, &Profile)], starts: &mut [u8]) -> bool {
    let Some(((position, profile), rest)) = open.split_first() else {
        return true;
    };
    layout.possible(profile).into_iter().any(|start| {
        let mut next = layout.clone();
        let fits = next.add(profile, start).is_ok() && place(&next, rest, starts);
        if fits && let Some(place) = starts.get_mut(*position) {
            *place = start;
        }
        fits
    })
}

fn named<'p>(profiles: &'p Profiles, name: &str) -> Result<&'p Profile, MigRefusal> {
    profiles.profile(name).ok_or_else(|| {
        let known: Vec<&str> = profiles.profiles.iter().map(|profile| profile.name.as_str()).collect();
        MigRefusal::Invalid(format!("{} has no profile {name:?}; it has {}", profiles.name, known.join(", ")))
    })
}

/// The compute instances of `instance`, each with its id, first slice and number of slices: in the order of their ids, each at
/// the lowest start that leaves room for the rest.
pub(crate) fn placements_of(profile: &Profile, instance: &GpuInstance) -> Vec<(u32, u8, u8)> {
    let compute = instance.compute.iter();
    let slices: Vec<u8> = compute.map(|compute| slices_of(profile, &compute.profile)).collect();
    let starts = compute_placements(profile.compute, &slices).unwrap_or_default();
    let ids = instance.compute.iter().map(|compute| compute.id);
    let places = starts.into_iter().zip(slices);
    ids.zip(places).map(|(id, (start, slices))| (id, start, slices)).collect()
}

/// Compute slices of a compute instance by the name of its device.
pub(crate) fn slices_of(profile: &Profile, device: &str) -> u8 {
    gantry_topology::mig::compute_slices_of(device, &profile.name, profile.compute).unwrap_or(profile.compute)
}

/// How many more compute instances of `slices` an instance has room for.
pub(crate) fn compute_room(profile: &Profile, instance: &GpuInstance, slices: u8) -> usize {
    let compute = instance.compute.iter();
    let mut all: Vec<u8> = compute.map(|compute| slices_of(profile, &compute.profile)).collect();
    let fits = std::iter::from_fn(|| {
        all.push(slices);
        compute_placements(profile.compute, &all)
    });
    fits.count()
}

fn instance(mig: &mut Mig, id: u32) -> Result<&mut GpuInstance, MigRefusal> {
    mig.instances
        .iter_mut()
        .find(|instance| instance.id == id)
        .ok_or_else(|| MigRefusal::NotFound(format!("GPU instance {id}")))
}

fn create_gpu(profiles: &Profiles, mig: &mut Mig, id: u32, start: Option<u8>) -> Result<u32, MigRefusal> {
    let profile = profiles
        .profile_by_id(id)
        .ok_or_else(|| MigRefusal::Invalid(format!("{} has no profile {id}", profiles.name)))?;
    let mut layout = layout_of(profiles, mig)?;
    let start = match start {
        Some(start) => start,
        None => *layout
            .possible(profile)
            .first()
            .ok_or_else(|| MigRefusal::NoRoom(format!("no room is left for {}", profile.name)))?,
    };
    layout.add(profile, start)?;
    let id = free_id(profiles, mig, profile, start);
    mig.instances.push(GpuInstance {
        id,
        profile: profile.name.clone(),
        start,
        size: profile.size,
        compute: Vec::new(),
    });
    mig.instances.sort_by_key(|instance| (instance.start, instance.id));
    Ok(id)
}

/// The id the driver gives; another where a machine file has used that one for something else.
fn free_id(profiles: &Profiles, mig: &Mig, profile: &Profile, start: u8) -> u32 {
    let free = |id: &u32| mig.instances.iter().all(|instance| instance.id != *id);
    let usual = profiles.instance_id(profile, start);
    std::iter::once(usual).chain(0..).find(free).unwrap_or(usual)
}

fn create_compute(
    gpu: &GpuFacts,
    profiles: &Profiles,
    instance: &mut GpuInstance,
    slices: u8,
    start: Option<u8>,
) -> Result<u32, MigRefusal> {
    let profile = profiles.profile(&instance.profile).ok_or_else(|| {
        MigRefusal::Invalid(format!("{} has no profile {}", profiles.name, instance.profile))
    })?;
    if !legal_compute(profile.compute).any(|legal| legal == slices) {
        return Err(MigRefusal::Invalid(format!(
            "{} has no compute instances of {slices} slices",
            profile.name
        )));
    }
    let no_room =
        || MigRefusal::NoRoom(format!("{} has no {slices} compute slices left there", profile.name));
    if compute_room(profile, instance, slices) == 0 {
        return Err(no_room());
    }
    let id = (0..).find(|id| instance.compute.iter().all(|compute| compute.id != *id)).unwrap_or(0);
    let device =
        if slices == profile.compute { profile.name.clone() } else { format!("{slices}c.{}", profile.name) };
    let uuid =
        facts::mig_uuid(&gpu.uuid, instance, id).map_err(|error| MigRefusal::Invalid(error.to_string()))?;
    instance.compute.push(ComputeInstance {
        id,
        uuid,
        attributes: facts::attributes(profiles, &gpu.product, &profile.name, &device),
        profile: device,
    });
    instance.compute.sort_by_key(|compute| compute.id);
    // Where it lies follows from the others.
    let mut places = placements_of(profile, instance).into_iter();
    let given = places.find(|(of, ..)| *of == id).map(|(_, start, _)| start);
    if start.is_some() && start != given {
        return Err(no_room());
    }
    Ok(id)
}

fn layout_of<'p>(profiles: &'p Profiles, mig: &Mig) -> Result<MigLayout<'p>, MigRefusal> {
    MigLayout::of(profiles, mig, "mig").map_err(|error| MigRefusal::Invalid(error.to_string()))
}

impl From<MigLayoutError> for MigRefusal {
    fn from(refusal: MigLayoutError) -> Self {
        match refusal {
            MigLayoutError::NoSuchProfile { .. } | MigLayoutError::NoSuchPlacement { .. } => {
                Self::Invalid(refusal.to_string())
            }
            MigLayoutError::Overlaps { .. }
            | MigLayoutError::TooMany { .. }
            | MigLayoutError::Exhausted { .. } => Self::NoRoom(refusal.to_string()),
        }
    }
}

#[cfg(test)]
mod tests;
