//! The MIG layouts of a machine file, made complete: compute instances, UUIDs and attributes that it leaves out.

use gantry_topology::mig::{MigLayout, Product as Profiles, compute_slices_of};
use gantry_topology::{ComputeInstance, Gpu, GpuInstance, MachineError, Mig, MigAttributes, MigUuid};

use super::{Product, uuid_text};

/// The MIG layout of `gpu` with nothing left out. A GPU instance without compute instances gets one as large as itself.
pub(super) fn complete(
    gpu: &Gpu,
    uuid: &str,
    profiles: Option<&Profiles>,
    product: &Product,
) -> Result<Option<Mig>, MachineError> {
    let Some(mig) = &gpu.mig else {
        // A GPU that supports MIG and has no layout in the file has MIG off.
        return Ok(profiles.map(|_| Mig::default()));
    };
    let field = format!("gpus[{}].mig", gpu.index);
    let Some(profiles) = profiles else {
        return Err(MachineError {
            field,
            problem: format!("{} cannot be cut", gpu.model.as_deref().unwrap_or(product.name)),
        });
    };
    MigLayout::of(profiles, mig, &field)?;
    let mut mig = mig.clone();
    for instance in &mut mig.instances {
        if instance.compute.is_empty() {
            instance.compute = vec![ComputeInstance {
                id: 0,
                uuid: mig_uuid(uuid, instance, 0).map_err(|problem| MachineError {
                    field: format!("{field}.instances"),
                    problem: problem.to_string(),
                })?,
                profile: instance.profile.clone(),
                attributes: None,
            }];
        }
        let (profile, instance_compute) = (instance.profile.clone(), &mut instance.compute);
        for compute in instance_compute {
            if compute.attributes.is_none() {
                compute.attributes = attributes(profiles, product, &profile, &compute.profile);
            }
        }
    }
    Ok(Some(mig))
}

/// What a MIG device called `device` in a GPU instance of `profile` has. Multiprocessors that no source states are an eighth of
/// the board's for each slice, all of them for the whole GPU.
pub fn attributes(
    profiles: &Profiles,
    product: &Product,
    profile: &str,
    device: &str,
) -> Option<MigAttributes> {
    let profile = profiles.profile(profile)?;
    let compute = compute_slices_of(device, &profile.name, profile.compute)?;
    let mut attributes = profiles.attributes(profile, compute);
    let (board, _) = product.cores;
    if attributes.multiprocessors == 0 {
        attributes.multiprocessors =
            if compute == profiles.compute_slices() { board } else { board * u32::from(compute) / 8 / 2 * 2 };
    }
    attributes.multiprocessors = attributes.multiprocessors.min(board);
    Some(attributes)
}

/// The UUID of the MIG device of compute instance `compute` in `instance`: as with the real driver, the same GPU with
/// the same layout has the same ones again.
///
/// # Errors
/// Never, in practice: the text made here is a MIG UUID.
pub fn mig_uuid(
    gpu: &str,
    instance: &GpuInstance,
    compute: u32,
) -> Result<MigUuid, gantry_topology::machine::IdError> {
    let salt = u64::from(instance.id) << 32 | u64::from(compute);
    let text = format!("{gpu} {} {}", instance.profile, instance.start);
    format!("MIG-{}", uuid_text(&text, salt, 5)).parse()
}
