//! A MIG layout under construction: the instances of one GPU, the possible additions, and the check of a machine file's
//! layouts.

use super::{Catalogue, Engines, Product, Profile, compute_slices_of, legal_compute};
use crate::machine::{GpuInstance, Machine, MachineError, Mig, unit_mask};

/// The MIG instances of one GPU of a product, all legal together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MigLayout<'p> {
    product: &'p Product,
    /// Memory units taken, a bit each.
    units: u16,
    compute: u8,
    engines: Engines,
    /// Instances of each profile, by its position.
    counts: Vec<u8>,
}

/// The reason why an instance cannot be added to a layout.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MigLayoutError {
    /// The product has no such profile.
    #[error("{product} has no profile {name:?}{}", nearest(.near.as_deref()))]
    NoSuchProfile {
        /// The product.
        product: String,
        /// The requested name.
        name: String,
        /// The nearest name.
        near: Option<String>,
    },
    /// Instances of the profile may not start there.
    #[error("{profile} may start at {}, not at {start}", list(.allowed))]
    NoSuchPlacement {
        /// The profile.
        profile: String,
        /// The requested start.
        start: u8,
        /// The allowed starts.
        allowed: Vec<u8>,
    },
    /// Another instance has some of its units.
    #[error("{profile} at {start} overlaps another instance; beside the others it may start at {}", list(.free))]
    Overlaps {
        /// The profile.
        profile: String,
        /// The requested start.
        start: u8,
        /// The free starts.
        free: Vec<u8>,
    },
    /// The limit of instances is reached.
    #[error("a GPU has at most {max} of {profile}")]
    TooMany {
        /// The profile.
        profile: String,
        /// The limit.
        max: u8,
    },
    /// Compute slices or engines do not suffice.
    #[error("not enough {what} are left for {profile}")]
    Exhausted {
        /// The profile.
        profile: String,
        /// The exhausted resource.
        what: &'static str,
    },
}

impl<'p> MigLayout<'p> {
    /// A GPU of `product` without instances.
    pub fn empty(product: &'p Product) -> Self {
        Self {
            product,
            units: 0,
            compute: 0,
            engines: Engines::default(),
            counts: vec![0; product.profiles.len()],
        }
    }

    /// The layout of a GPU in a machine file. `field` names its `mig` in errors, e.g. `gpus[3].mig`.
    ///
    /// # Errors
    /// The first instance that the product does not allow there.
    pub fn of(product: &'p Product, mig: &Mig, field: &str) -> Result<Self, MachineError> {
        let mut layout = Self::empty(product);
        for (position, instance) in mig.instances.iter().enumerate() {
            let field = format!("{field}.instances[{position}]");
            layout.add_checked(instance, &field)?;
        }
        Ok(layout)
    }

    /// The product of the GPU.
    pub fn product(&self) -> &'p Product {
        self.product
    }

    /// Memory units taken, a bit each.
    pub fn units(&self) -> u16 {
        self.units
    }

    /// Compute slices taken.
    pub fn compute(&self) -> u8 {
        self.compute
    }

    /// Units at which an instance of `profile` may be added, lowest first.
    pub fn possible(&self, profile: &Profile) -> Vec<u8> {
        let starts = profile.starts.iter().copied();
        starts.filter(|start| self.check(profile, *start).is_ok()).collect()
    }

    /// The number of instances of `profile` alone that can be added.
    pub fn remaining(&self, profile: &Profile) -> u8 {
        // Instances of one profile are equally long, so taking the lowest place first loses none.
        let mut layout = self.clone();
        let added = profile.starts.iter().filter(|start| layout.add(profile, **start).is_ok());
        u8::try_from(added.count()).unwrap_or(u8::MAX)
    }

    /// Adds an instance of `profile` that starts at `start`.
    ///
    /// # Errors
    /// The instance is not possible there. The layout is unchanged.
    pub fn add(&mut self, profile: &Profile, start: u8) -> Result<(), MigLayoutError> {
        let position = self.check(profile, start)?;
        self.units |= unit_mask(start, profile.size);
        self.compute += profile.compute;
        self.engines = self.engines.plus(profile.engines);
        if let Some(count) = self.counts.get_mut(position) {
            *count += 1;
        }
        Ok(())
    }

    /// Whether an instance may be added; the profile's position if so.
    fn check(&self, profile: &Profile, start: u8) -> Result<usize, MigLayoutError> {
        let name = || profile.name.clone();
        let position = self
            .product
            .profiles
            .iter()
            .position(|known| known.id == profile.id)
            .ok_or_else(|| no_such(self.product, &profile.name))?;
        if !profile.starts.contains(&start) {
            return Err(MigLayoutError::NoSuchPlacement {
                profile: name(),
                start,
                allowed: profile.starts.clone(),
            });
        }
        if self.units & unit_mask(start, profile.size) != 0 {
            let free = |start: &u8| self.units & unit_mask(*start, profile.size) == 0;
            return Err(MigLayoutError::Overlaps {
                profile: name(),
                start,
                free: profile.starts.iter().copied().filter(free).collect(),
            });
        }
        let max = profile.max_instances;
        if self.counts.get(position).is_some_and(|count| *count >= max) {
            return Err(MigLayoutError::TooMany { profile: name(), max });
        }
        let exhausted = |what| Err(MigLayoutError::Exhausted { profile: name(), what });
        if self.compute + profile.compute > self.product.compute_slices() {
            return exhausted("compute slices");
        }
        let whole = self.product.whole().map(|whole| whole.engines);
        match whole.and_then(|whole| self.engines.plus(profile.engines).over_limit(whole)) {
            Some(what) => exhausted(what),
            None => Ok(position),
        }
    }

    fn add_checked(&mut self, instance: &GpuInstance, field: &str) -> Result<(), MachineError> {
        let wrong = |name: &str, problem: String| MachineError { field: format!("{field}.{name}"), problem };
        let profile = self
            .product
            .profile(&instance.profile)
            .ok_or_else(|| wrong("profile", no_such(self.product, &instance.profile).to_string()))?;
        if instance.size != profile.size {
            return Err(wrong(
                "size",
                format!("is {}, {} covers {}", instance.size, profile.name, profile.size),
            ));
        }
        self.add(profile, instance.start).map_err(|refusal| wrong("start", refusal.to_string()))?;
        let mut left = profile.compute;
        for (position, compute) in instance.compute.iter().enumerate() {
            let name = format!("compute[{position}].profile");
            let slices =
                compute_slices_of(&compute.profile, &profile.name, profile.compute).ok_or_else(|| {
                    let parts = legal_compute(profile.compute).filter(|slices| *slices < profile.compute);
                    let parts = parts.map(|slices| format!(", {slices}c.{}", profile.name));
                    let allowed = parts.fold(profile.name.clone(), |all, part| all + &part);
                    wrong(&name, format!("{:?}, allowed is {allowed}", compute.profile))
                })?;
            left = left.checked_sub(slices).ok_or_else(|| {
                wrong(&name, format!("the compute instances have more than {} slices", profile.compute))
            })?;
        }
        Ok(())
    }
}

/// Checks the layouts of all GPUs of known products. Only the driver knows the layouts of other products.
///
/// # Errors
/// The first instance that its GPU's product does not allow.
pub fn check_machine(catalogue: &Catalogue, machine: &Machine) -> Result<(), MachineError> {
    for (position, gpu) in machine.gpus().iter().enumerate() {
        let Some(mig) = gpu.mig.as_ref().filter(|mig| mig.enabled) else {
            continue;
        };
        if let Some(product) = catalogue.of(gpu) {
            MigLayout::of(product, mig, &format!("gpus[{position}].mig"))?;
        }
    }
    Ok(())
}

impl Engines {
    fn plus(self, other: Self) -> Self {
        Self {
            copy: self.copy + other.copy,
            decoders: self.decoders + other.decoders,
            encoders: self.encoders + other.encoders,
            jpeg: self.jpeg + other.jpeg,
            ofa: self.ofa + other.ofa,
        }
    }

    /// The first kind of engine with more units than in `whole`. The driver shares copy engines, so they do not limit a
    /// layout.
    fn over_limit(self, whole: Self) -> Option<&'static str> {
        [
            (self.decoders > whole.decoders, "video decoders"),
            (self.encoders > whole.encoders, "video encoders"),
            (self.jpeg > whole.jpeg, "JPEG decoders"),
            (self.ofa > whole.ofa, "optical flow accelerators"),
        ]
        .into_iter()
        .find_map(|(is_over, what)| is_over.then_some(what))
    }
}

pub(super) fn no_such(product: &Product, name: &str) -> MigLayoutError {
    let near = product
        .profiles
        .iter()
        .max_by(|a, b| strsim::jaro(&a.name, name).total_cmp(&strsim::jaro(&b.name, name)));
    MigLayoutError::NoSuchProfile {
        product: product.name.clone(),
        name: name.to_owned(),
        near: near.map(|profile| profile.name.clone()),
    }
}

fn nearest(near: Option<&str>) -> String {
    near.map(|near| format!("; the nearest is {near}")).unwrap_or_default()
}

fn list(starts: &[u8]) -> String {
    if starts.is_empty() {
        return "none".to_owned();
    }
    let starts: Vec<String> = starts.iter().map(u8::to_string).collect();
    starts.join(", ")
}
