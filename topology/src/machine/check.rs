//! The checks of a machine's parts: sizes, names and links must not contradict each other. Sorts NVLink bundles and MIG instances; repairs
//! nothing.

use std::collections::BTreeSet;

use super::{Gpu, MAX_GPUS, MAX_LINKS_PER_GPU, MAX_NICS, MachineParts, Nic, mig};

/// An error in a machine file. `field` is the place in the file, e.g. `nvlinks[3].gpus`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct MachineError {
    /// Path of the offending field.
    pub field: String,
    /// The defect, and the allowed values.
    pub problem: String,
}

impl MachineError {
    pub(super) fn new(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { field: field.into(), problem: problem.into() }
    }
}

/// Checks everything, and puts bundles in order, lower index first.
pub(super) fn parts(parts: &mut MachineParts) -> Result<(), MachineError> {
    check_sizes(parts)?;
    check_gpus(&mut parts.gpus)?;
    check_nics(&parts.nics)?;
    normalise_bundles(parts)
}

fn check_sizes(parts: &MachineParts) -> Result<(), MachineError> {
    if parts.gpus.len() > MAX_GPUS {
        return Err(MachineError::new(
            "gpus",
            format!("{} GPUs, at most {MAX_GPUS} are allowed", parts.gpus.len()),
        ));
    }
    if parts.nics.len() > MAX_NICS {
        return Err(MachineError::new(
            "nics",
            format!("{} NICs, at most {MAX_NICS} are allowed", parts.nics.len()),
        ));
    }
    let devices = parts.gpus.len() + parts.nics.len();
    if parts.paths.len() != devices {
        return Err(MachineError::new(
            "paths",
            format!(
                "{} rows for {} GPUs and {} NICs, {devices} are needed",
                parts.paths.len(),
                parts.gpus.len(),
                parts.nics.len()
            ),
        ));
    }
    Ok(())
}

fn check_gpus(gpus: &mut [Gpu]) -> Result<(), MachineError> {
    for (position, gpu) in gpus.iter_mut().enumerate() {
        if let Some(mig) = &mut gpu.mig {
            mig::check(mig, &format!("gpus[{position}]"))?;
        }
    }
    check_mig_uuids(gpus)?;
    for (position, gpu) in gpus.iter().enumerate() {
        let field = |name: &str| format!("gpus[{position}].{name}");
        if usize::from(gpu.index) != position {
            return Err(MachineError::new(field("index"), format!("is {}, must be {position}", gpu.index)));
        }
        if let Some(pcie) = gpu.pcie
            && !((1..=7).contains(&pcie.generation) && (1..=32).contains(&pcie.width))
        {
            return Err(MachineError::new(field("pcie"), "generation must be 1 to 7 and width 1 to 32"));
        }
        if let Some(ports) = gpu.nvlink
            && ports.switch_links > MAX_LINKS_PER_GPU
        {
            return Err(MachineError::new(
                field("nvlink.switchLinks"),
                format!("is {}, at most {MAX_LINKS_PER_GPU} are allowed", ports.switch_links),
            ));
        }
        if let Some(version) = gpu.nvlink.and_then(|ports| ports.version)
            && !(1..=5).contains(&version)
        {
            return Err(MachineError::new(field("nvlink.version"), format!("is {version}, must be 1 to 5")));
        }
        for (other, earlier) in gpus[..position].iter().enumerate() {
            if gpu.uuid.is_some() && gpu.uuid == earlier.uuid {
                return Err(MachineError::new(field("uuid"), format!("the same as gpus[{other}].uuid")));
            }
            if gpu.bus_id.is_some() && gpu.bus_id == earlier.bus_id {
                return Err(MachineError::new(field("busId"), format!("the same as gpus[{other}].busId")));
            }
        }
    }
    Ok(())
}

fn check_mig_uuids(gpus: &[Gpu]) -> Result<(), MachineError> {
    let mut seen = BTreeSet::new();
    for (position, gpu) in gpus.iter().enumerate() {
        let instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
        for compute in instances.flat_map(|instance| &instance.compute) {
            if !seen.insert(&compute.uuid) {
                return Err(MachineError::new(
                    format!("gpus[{position}].mig"),
                    format!("{} is the UUID of another MIG device too", compute.uuid),
                ));
            }
        }
    }
    Ok(())
}

fn check_nics(nics: &[Nic]) -> Result<(), MachineError> {
    for (position, nic) in nics.iter().enumerate() {
        let field = format!("nics[{position}].name");
        if nic.name.is_empty() {
            return Err(MachineError::new(field, "must not be empty"));
        }
        if let Some(other) = nics[..position].iter().position(|earlier| earlier.name == nic.name) {
            return Err(MachineError::new(field, format!("{:?} is the name of nics[{other}] too", nic.name)));
        }
    }
    Ok(())
}

fn normalise_bundles(parts: &mut MachineParts) -> Result<(), MachineError> {
    let gpus = parts.gpus.len();
    let mut total = vec![0u32; gpus];
    for (position, bundle) in parts.nvlinks.iter_mut().enumerate() {
        bundle.gpus.sort_unstable();
        let [a, b] = bundle.gpus.map(usize::from);
        let field = format!("nvlinks[{position}]");
        if b >= gpus {
            return Err(MachineError::new(
                format!("{field}.gpus"),
                format!("GPU {b} does not exist, there are {gpus}"),
            ));
        }
        if a == b {
            return Err(MachineError::new(format!("{field}.gpus"), format!("GPU {a} is linked to itself")));
        }
        if bundle.links == 0 || bundle.links > MAX_LINKS_PER_GPU {
            return Err(MachineError::new(
                format!("{field}.links"),
                format!("is {}, must be 1 to {MAX_LINKS_PER_GPU}", bundle.links),
            ));
        }
        total[a] += u32::from(bundle.links);
        total[b] += u32::from(bundle.links);
    }
    parts.nvlinks.sort_unstable_by_key(|bundle| bundle.gpus);
    if let Some(pair) = parts.nvlinks.windows(2).find(|pair| pair[0].gpus == pair[1].gpus) {
        return Err(MachineError::new("nvlinks", format!("GPUs {:?} are named twice", pair[0].gpus)));
    }
    for (index, gpu) in parts.gpus.iter().enumerate() {
        let links = total[index] + u32::from(gpu.nvlink.map_or(0, |ports| ports.switch_links));
        if links > u32::from(MAX_LINKS_PER_GPU) {
            return Err(MachineError::new(
                format!("gpus[{index}]"),
                format!("has {links} NVLinks, at most {MAX_LINKS_PER_GPU} are allowed"),
            ));
        }
    }
    Ok(())
}
