//! How a GPU is cut: mode, GPU instances with their places, MIG devices with the names that NVIDIA's plugin gives their
//! profiles. What NVML does not tell is derived from sizes, with a warning; nothing here fails a whole machine.

use std::collections::BTreeMap;

use gantry_topology::machine::MAX_MEMORY_UNITS;
use gantry_topology::mig::{Catalogue, Product};
use gantry_topology::{ComputeInstance, GpuInstance, Mig, MigAttributes};

use super::Warnings;
use crate::nvml::{Device, MigDevice, MigIds, NvmlError, Placement};

/// What is known of the GPU that is cut.
#[derive(Debug, Clone, Copy)]
pub(super) struct Parent<'a> {
    pub(super) model: Option<&'a str>,
    pub(super) memory_mib: Option<u64>,
}

impl Parent<'_> {
    fn product(self) -> Option<Product> {
        Catalogue::built_in().by_model(self.model?).cloned()
    }
}

/// One MIG device as NVML tells of it.
struct Found {
    ids: MigIds,
    compute: ComputeInstance,
}

/// Reads how a GPU is cut; `None` where it cannot be. With an error it is not known, or not whole: what was known of the GPU's MIG
/// devices may still hold.
pub(super) fn read(
    device: Device<'_>,
    gpu: Parent<'_>,
    warnings: &mut Warnings,
) -> (Option<Mig>, Option<NvmlError>) {
    let mode = match device.mig_mode() {
        Err(error) if error.is_unsupported() => return (None, None),
        Err(error) => return (None, Some(error)),
        Ok(mode) => mode,
    };
    if mode.current != mode.pending {
        let change = if mode.pending { "on" } else { "off" };
        warnings.add(format!(
            "MIG mode of GPU {} goes {change} when the GPU is reset; drain it and run nvidia-smi --gpu-reset",
            device.index()
        ));
    }
    if !mode.current {
        return (Some(Mig::default()), None);
    }
    let cut = |instances| {
        Some(Mig {
            enabled: true,
            instances,
        })
    };
    match devices(device, gpu, warnings) {
        Ok(instances) => (cut(instances), None),
        // No work can run on the GPU as a whole, whatever its devices are.
        Err(error) => (cut(Vec::new()), Some(error)),
    }
}

/// The MIG devices in their GPU instances.
fn devices(
    device: Device<'_>,
    gpu: Parent<'_>,
    warnings: &mut Warnings,
) -> Result<Vec<GpuInstance>, NvmlError> {
    let mut found = Vec::new();
    for mig in device.mig_devices()? {
        match read_one(mig, gpu.memory_mib, warnings) {
            Ok(one) => found.push(one),
            // Taken away between being listed and being asked: the next look sees it.
            Err(error) if error.is_nothing_there() => {}
            Err(error) => return Err(error),
        }
    }
    instances(device, found, gpu, warnings)
}

fn read_one(
    mig: MigDevice<'_>,
    memory_mib: Option<u64>,
    warnings: &mut Warnings,
) -> Result<Found, NvmlError> {
    let ids = mig.ids()?;
    let uuid = mig.uuid()?;
    let attributes = match mig.attributes() {
        Err(error) if error.is_gpu_lost() || error.is_driver_gone() => return Err(error),
        answer => warnings.known(answer),
    };
    let name = warnings.known(mig.name()).unwrap_or_default();
    let profile = profile_of_name(&name)
        .or_else(|| Some(profile_of_attributes(&attributes?, memory_mib?)))
        .unwrap_or_else(|| {
            warnings.add(format!("NVML tells no profile of MIG device {uuid} ({name:?})"));
            "unknown".to_owned()
        });
    Ok(Found {
        ids,
        compute: ComputeInstance {
            id: ids.compute_instance,
            uuid,
            profile,
            attributes,
        },
    })
}

/// Puts MIG devices into their GPU instances, and those where they lie.
fn instances(
    device: Device<'_>,
    found: Vec<Found>,
    gpu: Parent<'_>,
    warnings: &mut Warnings,
) -> Result<Vec<GpuInstance>, NvmlError> {
    let mut grouped: BTreeMap<u32, Vec<ComputeInstance>> = BTreeMap::new();
    for one in found {
        grouped.entry(one.ids.gpu_instance).or_default().push(one.compute);
    }
    let mut places = BTreeMap::new();
    for &id in grouped.keys() {
        match device.placement(id) {
            Ok(place) => {
                places.insert(id, place);
            }
            Err(error) if error.is_gpu_lost() || error.is_driver_gone() => return Err(error),
            Err(error) => {
                warnings.add(format!(
                    "where the MIG instances of GPU {} lie is worked out from their numbers and sizes: {error}",
                    device.index()
                ));
                places.clear();
                break;
            }
        }
    }
    if !fits(places.values()) {
        warnings.add(format!(
            "NVML lays MIG instances of GPU {} over each other; where they lie is worked out from their numbers and sizes",
            device.index()
        ));
        places.clear();
    }
    let sizes = grouped.iter().map(|(id, compute)| {
        let memory = compute
            .iter()
            .find_map(|one| one.attributes)
            .map(|a| a.memory_mib);
        (*id, units(memory, gpu.memory_mib))
    });
    let places = match places.is_empty() {
        true => {
            let product = gpu.product();
            by_numbers(product.as_ref(), &grouped).unwrap_or_else(|| lay_out(sizes))
        }
        false => places,
    };
    Ok(grouped
        .into_iter()
        .filter_map(|(id, compute)| {
            let Some(place) = places.get(&id) else {
                warnings.add(format!(
                    "MIG instance {id} of GPU {} is left out: there is no room for it beside the others",
                    device.index()
                ));
                return None;
            };
            Some(GpuInstance {
                id,
                profile: whole(&compute.first()?.profile).to_owned(),
                start: u8::try_from(place.start).ok()?,
                size: u8::try_from(place.size).ok()?,
                compute,
            })
        })
        .collect())
}

/// Where instances lie by the numbers that the driver gives them, on a product whose profiles are known; `None` if that does not
/// make sense.
fn by_numbers(
    product: Option<&Product>,
    instances: &BTreeMap<u32, Vec<ComputeInstance>>,
) -> Option<BTreeMap<u32, Placement>> {
    let product = product?;
    let place = |id: u32, compute: &[ComputeInstance]| {
        let profile = product.profile(whole(&compute.first()?.profile))?;
        let mut starts = profile.starts.iter();
        let start = starts.find(|start| product.instance_id(profile, **start) == id)?;
        Some(Placement {
            start: u32::from(*start),
            size: u32::from(profile.size),
        })
    };
    let places: BTreeMap<u32, Placement> = instances
        .iter()
        .map(|(id, compute)| Some((*id, place(*id, compute)?)))
        .collect::<Option<_>>()?;
    fits(places.values()).then_some(places)
}

/// Whether instances lie on the GPU and beside each other.
fn fits<'a>(places: impl Iterator<Item = &'a Placement>) -> bool {
    let mut taken = [false; MAX_MEMORY_UNITS as usize];
    for place in places {
        let range = place.start as usize..place.start.saturating_add(place.size) as usize;
        match taken.get_mut(range) {
            Some(units) if !units.is_empty() && units.iter().all(|unit| !unit) => units.fill(true),
            _ => return false,
        }
    }
    true
}

/// Memory units on most GPUs that can be cut. Where there are fewer (4 on an A30) a guess in eighths keeps the proportions.
const EIGHTHS: u64 = 8;

/// How many eighths of the GPU's memory an instance has, rounded up, for the driver keeps a little of each for itself.
fn units(instance_mib: Option<u64>, gpu_mib: Option<u64>) -> u32 {
    match (instance_mib, gpu_mib) {
        (Some(instance), Some(gpu)) if gpu > 0 => {
            u32::try_from((instance * EIGHTHS).div_ceil(gpu).clamp(1, EIGHTHS)).unwrap_or(1)
        }
        _ => 1,
    }
}

/// Lays instances beside each other, the largest first and each at a multiple of its size, as the driver does. An instance for
/// which there is no room gets no place.
fn lay_out(sizes: impl Iterator<Item = (u32, u32)>) -> BTreeMap<u32, Placement> {
    let mut sizes: Vec<(u32, u32)> = sizes.collect();
    sizes.sort_by_key(|(id, size)| (std::cmp::Reverse(*size), *id));
    let mut places: BTreeMap<u32, Placement> = BTreeMap::new();
    for (id, size) in sizes {
        let starts = (0..u32::from(MAX_MEMORY_UNITS)).step_by(size.max(1) as usize);
        let place = starts
            .map(|start| Placement { start, size })
            .find(|place| fits(places.values().chain([place])));
        if let Some(place) = place {
            places.insert(id, place);
        }
    }
    places
}

/// The profile at the end of a MIG device's name: `NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb`.
fn profile_of_name(name: &str) -> Option<String> {
    let profile = name.rsplit_once("MIG ")?.1.trim();
    let (compute, memory) = whole(profile).split_once("g.")?;
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let (size, _suffix) = memory.split_once("gb")?;
    (number(compute) && number(size)).then(|| profile.to_owned())
}

/// The profile that attributes amount to: compute slices, and the memory as people count it, in eighths of the GPU's.
/// Attributes do not tell of media extensions.
fn profile_of_attributes(attributes: &MigAttributes, gpu_mib: u64) -> String {
    let eighths = u64::from(units(Some(attributes.memory_mib), Some(gpu_mib)));
    let gpu_gib = gpu_mib.div_ceil(1024);
    // To the nearest whole number.
    let gib = (gpu_gib * eighths + EIGHTHS / 2) / EIGHTHS;
    let whole = format!("{}g.{gib}gb", attributes.gpu_slices);
    match attributes.compute_slices == attributes.gpu_slices {
        true => whole,
        false => format!("{}c.{whole}", attributes.compute_slices),
    }
}

/// The profile of the GPU instance that a MIG device of this profile is in: `3g.20gb` of `1c.3g.20gb`.
fn whole(profile: &str) -> &str {
    match profile.split_once("c.") {
        Some((compute, rest)) if compute.bytes().all(|byte| byte.is_ascii_digit()) => rest,
        _ => profile,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attributes(compute_slices: u32, gpu_slices: u32, memory_mib: u64) -> MigAttributes {
        MigAttributes {
            compute_slices,
            gpu_slices,
            memory_mib,
            ..MigAttributes::default()
        }
    }

    #[test]
    fn a_name_ends_with_the_profile() {
        let profile = |name: &str| profile_of_name(name);
        for suffix in [
            "1g.5gb",
            "1g.10gb+me",
            "1c.3g.20gb",
            "7g.80gb",
            "1g.12gb.gfx",
            "1g.10gb-me",
        ] {
            let name = format!("NVIDIA A100-SXM4-40GB MIG {suffix}");
            assert_eq!(profile(&name).as_deref(), Some(suffix));
            assert_eq!(profile(&format!("MIG {suffix}")).as_deref(), Some(suffix));
        }
        for name in ["NVIDIA A100-SXM4-40GB", "MIG device", "MIG xg.5gb", "MIG 1g.5"] {
            assert_eq!(profile(name), None, "{name}");
        }
        assert_eq!(whole("1c.3g.20gb"), "3g.20gb");
        assert_eq!(whole("3g.20gb+me"), "3g.20gb+me");
    }

    #[test]
    fn attributes_amount_to_the_names_that_nvidia_gives() {
        // From boards: an A100 of 40 GB, one of 80 GB, an H100 of 80 GB, an A30.
        for (gpu_mib, attributes, profile) in [
            (40_960, attributes(1, 1, 4_864), "1g.5gb"),
            (40_960, attributes(1, 1, 9_856), "1g.10gb"),
            (40_960, attributes(2, 2, 9_856), "2g.10gb"),
            (40_960, attributes(3, 3, 19_968), "3g.20gb"),
            (40_960, attributes(1, 3, 19_968), "1c.3g.20gb"),
            (40_960, attributes(7, 7, 40_192), "7g.40gb"),
            (81_920, attributes(1, 1, 9_728), "1g.10gb"),
            (81_559, attributes(3, 3, 40_448), "3g.40gb"),
            (24_576, attributes(1, 1, 5_836), "1g.6gb"),
            (24_576, attributes(2, 4, 23_344), "2c.4g.24gb"),
        ] {
            assert_eq!(profile_of_attributes(&attributes, gpu_mib), profile);
        }
    }

    #[test]
    fn instances_of_unknown_place_are_laid_beside_each_other() {
        // 3g, 2g and two 1g of an A100, as the driver would lay them for these sizes.
        let places = lay_out([(1, 4), (5, 2), (9, 1), (10, 1)].into_iter());
        let starts: Vec<(u32, u32)> = places.iter().map(|(id, place)| (*id, place.start)).collect();
        assert_eq!(starts, [(1, 0), (5, 4), (9, 6), (10, 7)]);
        assert!(fits(places.values()));
        let many = lay_out((0..20).map(|id| (id, 1)));
        assert_eq!(many.len(), 16, "no more than there is room for");
    }

    #[test]
    fn the_drivers_numbers_tell_where_instances_lie() {
        // From nvidia-smi mig -lgi on an A100 of 40 GB: a 3g at the end, a 2g at the start, a 1g beside it.
        let instance = |id: u32, profile: &str| {
            let compute = ComputeInstance {
                id: 0,
                uuid: format!("MIG-{id}").parse().unwrap(),
                profile: profile.to_owned(),
                attributes: None,
            };
            (id, vec![compute])
        };
        let cut = BTreeMap::from([
            instance(2, "1c.3g.20gb"),
            instance(3, "2g.10gb"),
            instance(9, "1g.5gb"),
        ]);
        let a100 = Parent {
            model: Some("NVIDIA A100-SXM4-40GB"),
            memory_mib: Some(40_960),
        };
        let places = by_numbers(a100.product().as_ref(), &cut).unwrap();
        let places: Vec<_> = places.values().map(|place| (place.start, place.size)).collect();
        assert_eq!(places, [(4, 4), (0, 2), (2, 1)]);
        let odd = BTreeMap::from([instance(40, "1g.5gb")]);
        assert_eq!(by_numbers(a100.product().as_ref(), &odd), None);
        assert_eq!(by_numbers(None, &cut), None);
    }

    #[test]
    fn places_that_overlap_or_leave_the_gpu_do_not_fit() {
        let place = |start, size| Placement { start, size };
        assert!(fits([place(0, 4), place(4, 4)].iter()));
        for wrong in [
            [place(0, 4), place(3, 1)],
            [place(0, 4), place(15, 2)],
            [place(0, 4), place(4, 0)],
        ] {
            assert!(!fits(wrong.iter()), "{wrong:?}");
        }
    }
}
