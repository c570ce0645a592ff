//! MIG layout of a GPU: mode, GPU instances with their placements, MIG devices with the profile names of
//! NVIDIA's plugin. What NVML does not return is derived from sizes, with a warning. A failure here never fails
//! the whole machine.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use gantry_topology::machine::{MAX_MEMORY_UNITS, split_profile};
use gantry_topology::mig::{Catalogue, Product, suffix_of};
use gantry_topology::{ComputeInstance, GpuInstance, Mig, MigAttributes};

use super::{InstanceAt, Warnings};
use crate::nvml::{Device, InstanceInfo, MigDevice, MigIds, NvmlError, Placement};

/// What is known of the physical GPU.
#[derive(Debug, Clone, Copy)]
pub(super) struct Parent<'a> {
    pub(super) model: Option<&'a str>,
    pub(super) memory_mib: Option<u64>,
}

impl Parent<'_> {
    fn product(self) -> Option<Product> {
        Catalogue::built_in().by_model(self.model?, self.memory_mib).cloned()
    }
}

/// One MIG device as NVML returns it.
struct FoundMigDevice {
    ids: MigIds,
    compute: ComputeInstance,
}

/// The MIG layout, as far as it could be read.
#[derive(Debug, Default)]
pub(super) struct Read {
    /// `None` if the GPU does not support MIG.
    pub(super) mig: Option<Mig>,
    /// Why the layout is unknown or incomplete; the last known MIG devices may still exist.
    pub(super) error: Option<NvmlError>,
    /// Placements or profiles were derived, because a call failed.
    pub(super) is_guessed: bool,
}

/// Reads the MIG layout of a GPU.
pub(super) fn read(device: Device<'_>, gpu: Parent<'_>, warnings: &mut Warnings) -> Read {
    let mode = match device.mig().mode() {
        Err(error) if error.is_unsupported() => return Read::default(),
        Err(error) => {
            return Read { error: Some(error), ..Read::default() };
        }
        Ok(mode) => mode,
    };
    if mode.current != mode.pending {
        let change = if mode.pending { "on" } else { "off" };
        warnings.add(format!(
            "MIG mode of GPU {} will be {change} after the next reset: drain it and run nvidia-smi --gpu-reset",
            device.index()
        ));
    }
    if !mode.current {
        return Read { mig: Some(Mig::default()), ..Read::default() };
    }
    let mut is_guessed = false;
    let (instances, error) = match devices(device, gpu, warnings, &mut is_guessed) {
        Ok(instances) => (instances, None),
        // In MIG mode no work can run on the whole GPU, even without MIG devices.
        Err(error) => (Vec::new(), Some(error)),
    };
    Read { mig: Some(Mig { enabled: true, instances }), error, is_guessed }
}

/// The MIG devices grouped by GPU instance.
fn devices(
    device: Device<'_>,
    gpu: Parent<'_>,
    warnings: &mut Warnings,
    is_guessed: &mut bool,
) -> Result<Vec<GpuInstance>, NvmlError> {
    let mut found = Vec::new();
    for mig in device.mig().devices()? {
        match read_one(mig, gpu.memory_mib, warnings, is_guessed) {
            Ok(one) => found.push(one),
            // Removed between the list and the query: the next check detects it.
            Err(error) if error.is_nothing_there() => {}
            Err(error) => return Err(error),
        }
    }
    instances(device, found, gpu, warnings, is_guessed)
}

/// As [`Warnings::known`]; sets `is_guessed` if the call failed.
fn known<T>(answer: Result<T, NvmlError>, warnings: &mut Warnings, is_guessed: &mut bool) -> Option<T> {
    *is_guessed |= answer.as_ref().is_err_and(|error| !error.is_unsupported());
    warnings.known(answer)
}

fn read_one(
    mig: MigDevice<'_>,
    memory_mib: Option<u64>,
    warnings: &mut Warnings,
    is_guessed: &mut bool,
) -> Result<FoundMigDevice, NvmlError> {
    let ids = mig.ids()?;
    let uuid = mig.uuid()?;
    let attributes = match mig.attributes() {
        Err(error) if error.is_gpu_lost() || error.is_driver_gone() => return Err(error),
        answer => known(answer, warnings, is_guessed),
    };
    let name = known(mig.name(), warnings, is_guessed).unwrap_or_default();
    let profile = profile_of_name(&name)
        .or_else(|| Some(profile_of_attributes(&attributes?, memory_mib?)))
        .unwrap_or_else(|| {
            warnings.add(format!("NVML returned no profile for MIG device {uuid} ({name:?})"));
            "unknown".to_owned()
        });
    Ok(FoundMigDevice {
        ids,
        compute: ComputeInstance { id: ids.compute_instance, uuid, profile, attributes },
    })
}

/// Groups MIG devices by GPU instance and assigns placements.
fn instances(
    device: Device<'_>,
    found: Vec<FoundMigDevice>,
    gpu: Parent<'_>,
    warnings: &mut Warnings,
    is_guessed: &mut bool,
) -> Result<Vec<GpuInstance>, NvmlError> {
    let mut grouped: BTreeMap<u32, Vec<ComputeInstance>> = BTreeMap::new();
    for one in found {
        grouped.entry(one.ids.gpu_instance).or_default().push(one.compute);
    }
    let infos = match instance_infos(device, grouped.keys()) {
        Err(error) if error.is_gpu_lost() || error.is_driver_gone() => return Err(error),
        Err(error) => {
            *is_guessed = true;
            warnings.add(format!(
                "placements of MIG instances of GPU {} are derived from instance ids and sizes, and none is assumed to have a \
                 profile with +me, +gfx or the like: {error}",
                device.index()
            ));
            BTreeMap::new()
        }
        Ok(infos) => infos,
    };
    let suffixes = suffixes(device, &infos, warnings, is_guessed)?;
    let mut places: BTreeMap<u32, Placement> = infos.iter().map(|(id, info)| (*id, info.placement)).collect();
    if !fits(places.values()) {
        warnings.add(format!(
            "NVML returned overlapping MIG instances for GPU {}; placements are derived from instance ids and sizes",
            device.index()
        ));
        places.clear();
    }
    let sizes = grouped.iter().map(|(id, compute)| {
        let memory = compute.iter().find_map(|one| one.attributes).map(|a| a.memory_mib);
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
                    "MIG instance {id} of GPU {} is left out: no free placement is known for it",
                    device.index()
                ));
                return None;
            };
            Some(GpuInstance {
                id,
                profile: profile_of_instance(&compute.first()?.profile, suffixes.get(&id).copied()),
                start: u8::try_from(place.start).ok()?,
                size: u8::try_from(place.size).ok()?,
                compute,
            })
        })
        .collect())
}

/// NVML's data on each of these GPU instances, or the first error.
fn instance_infos<'a>(
    device: Device<'_>,
    ids: impl Iterator<Item = &'a u32>,
) -> Result<BTreeMap<u32, InstanceInfo>, NvmlError> {
    ids.map(|id| Ok((*id, device.mig().gpu_instance(*id)?))).collect()
}

/// The profile suffix of each instance (`+me`). Names of MIG devices do not contain it: the driver names a
/// device after its compute instance, which is `1g.10gb` in a GPU instance of `1g.10gb+me`.
fn suffixes(
    device: Device<'_>,
    infos: &BTreeMap<u32, InstanceInfo>,
    warnings: &mut Warnings,
    is_guessed: &mut bool,
) -> Result<BTreeMap<u32, &'static str>, NvmlError> {
    if infos.is_empty() {
        return Ok(BTreeMap::new());
    }
    let numbers = match device.mig().profile_numbers() {
        Err(error) if error.is_gpu_lost() || error.is_driver_gone() => return Err(error),
        answer => known(answer, warnings, is_guessed).unwrap_or_default(),
    };
    // The call failed only for this instance, or its profile has no known number.
    *is_guessed |= infos.values().any(|info| !numbers.contains_key(&info.profile));
    let of = |info: &InstanceInfo| numbers.get(&info.profile).map(|number| suffix_of(*number));
    Ok(infos.iter().filter_map(|(id, info)| Some((*id, of(info)?))).collect())
}

/// Profile of the GPU instance that contains MIG device profile `device`, with NVML's suffix. Without one, a
/// suffix in the device name counts.
fn profile_of_instance(device: &str, suffix: Option<&str>) -> String {
    let (plain, named) = split_profile(whole(device));
    format!("{plain}{}", suffix.filter(|suffix| !suffix.is_empty()).unwrap_or(named))
}

/// The profile at the end of a MIG device name: `NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb`.
fn profile_of_name(name: &str) -> Option<String> {
    let profile = name.rsplit_once("MIG ")?.1.trim();
    let (compute, memory) = whole(profile).split_once("g.")?;
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let (size, _suffix) = memory.split_once("gb")?;
    (number(compute) && number(size)).then(|| profile.to_owned())
}

/// The profile derived from attributes: compute slices, and the memory in eighths of the GPU's, rounded as
/// NVIDIA does. Attributes do not show media extensions.
fn profile_of_attributes(attributes: &MigAttributes, gpu_mib: u64) -> String {
    let eighths = u64::from(units(Some(attributes.memory_mib), Some(gpu_mib)));
    let gpu_gib = gpu_mib.div_ceil(1024);
    // Rounded to the nearest whole number.
    let gib = (gpu_gib * eighths + EIGHTHS / 2) / EIGHTHS;
    let whole = format!("{}g.{gib}gb", attributes.gpu_slices);
    match attributes.compute_slices == attributes.gpu_slices {
        true => whole,
        false => format!("{}c.{whole}", attributes.compute_slices),
    }
}

/// The profile of the GPU instance that contains a MIG device of this profile: `3g.20gb` of `1c.3g.20gb`.
fn whole(profile: &str) -> &str {
    match profile.split_once("c.") {
        Some((compute, rest)) if compute.bytes().all(|byte| byte.is_ascii_digit()) => rest,
        _ => profile,
    }
}

/// Placements derived from the driver's instance ids, on a product with known profiles; `None` if they are
/// inconsistent.
fn by_numbers(
    product: Option<&Product>,
    instances: &BTreeMap<u32, Vec<ComputeInstance>>,
) -> Option<BTreeMap<u32, Placement>> {
    let product = product?;
    let place = |id: u32, compute: &[ComputeInstance]| {
        let profile = product.profile(whole(&compute.first()?.profile))?;
        let mut starts = profile.starts.iter();
        let start = starts.find(|start| product.instance_id(profile, **start) == id)?;
        Some(Placement { start: u32::from(*start), size: u32::from(profile.size) })
    };
    let places: BTreeMap<u32, Placement> =
        instances.iter().map(|(id, compute)| Some((*id, place(*id, compute)?))).collect::<Option<_>>()?;
    fits(places.values()).then_some(places)
}

/// Whether all placements are on the GPU and do not overlap.
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

/// Memory units of most GPUs with MIG. On GPUs with fewer (4 on an A30) a guess in eighths keeps the
/// proportions.
const EIGHTHS: u64 = 8;

/// Memory of an instance in eighths of the GPU's, rounded up, because the driver reserves a little of each.
fn units(instance_mib: Option<u64>, gpu_mib: Option<u64>) -> u32 {
    match (instance_mib, gpu_mib) {
        (Some(instance), Some(gpu)) if gpu > 0 => {
            u32::try_from((instance * EIGHTHS).div_ceil(gpu).clamp(1, EIGHTHS)).unwrap_or(1)
        }
        _ => 1,
    }
}

/// Places instances side by side, the largest first and each at a multiple of its size, like the driver. An
/// instance that does not fit gets no placement.
fn lay_out(sizes: impl Iterator<Item = (u32, u32)>) -> BTreeMap<u32, Placement> {
    let mut sizes: Vec<(u32, u32)> = sizes.collect();
    sizes.sort_by_key(|(id, size)| (std::cmp::Reverse(*size), *id));
    let mut places: BTreeMap<u32, Placement> = BTreeMap::new();
    for (id, size) in sizes {
        let starts = (0..u32::from(MAX_MEMORY_UNITS)).step_by(size.max(1) as usize);
        let place =
            starts.map(|start| Placement { start, size }).find(|place| fits(places.values().chain([place])));
        if let Some(place) = place {
            places.insert(id, place);
        }
    }
    places
}

/// Minor numbers of capability nodes.
#[derive(Debug, Default)]
pub(super) struct Caps {
    /// By access file as in `mig-minors`, e.g. `gpu0/gi2/ci0/access`.
    minors: BTreeMap<String, u32>,
    /// `/proc/driver/nvidia/capabilities`.
    folder: PathBuf,
}

impl Caps {
    pub(super) fn at(proc_root: &Path) -> Self {
        let driver = proc_root.join("driver");
        let listed = fs::read_to_string(driver.join("nvidia-caps/mig-minors")).unwrap_or_default();
        Self { minors: parse_list(&listed), folder: driver.join("nvidia/capabilities") }
    }

    /// The minor numbers of a GPU instance and one of its compute instances; `None` unless both are known.
    pub(super) fn of(&self, at: InstanceAt) -> Option<[u32; 2]> {
        let InstanceAt { gpu_minor: gpu, gpu_instance: gi, compute_instance: ci } = at;
        let of_gi = self.minor(&format!("gpu{gpu}/gi{gi}/access"), &format!("gpu{gpu}/mig/gi{gi}/access"))?;
        let of_ci = self.minor(
            &format!("gpu{gpu}/gi{gi}/ci{ci}/access"),
            &format!("gpu{gpu}/mig/gi{gi}/ci{ci}/access"),
        )?;
        Some([of_gi, of_ci])
    }

    fn minor(&self, name: &str, file: &str) -> Option<u32> {
        let own = || {
            let text = fs::read_to_string(self.folder.join(file)).ok()?;
            parse_own(&text)
        };
        self.minors.get(name).copied().or_else(own)
    }
}

/// `mig-minors`: a name and a number per line.
fn parse_list(text: &str) -> BTreeMap<String, u32> {
    text.lines()
        .filter_map(|line| {
            let (name, minor) = line.trim().rsplit_once(' ')?;
            Some((name.trim().to_owned(), minor.parse().ok()?))
        })
        .collect()
}

/// An `access` file: contains the line `DeviceFileMinor: 30`.
fn parse_own(text: &str) -> Option<u32> {
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(key, _)| key.trim() == "DeviceFileMinor")
        .and_then(|(_, minor)| minor.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attributes(compute_slices: u32, gpu_slices: u32, memory_mib: u64) -> MigAttributes {
        MigAttributes { compute_slices, gpu_slices, memory_mib, ..MigAttributes::default() }
    }

    #[test]
    fn profile_is_end_of_name() {
        let profile = |name: &str| profile_of_name(name);
        for suffix in ["1g.5gb", "1g.10gb+me", "1c.3g.20gb", "7g.80gb", "1g.12gb.gfx", "1g.10gb-me"] {
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
    fn instance_suffix_comes_from_nvml_then_name() {
        for device in ["1c.2g.12gb", "1c.2g.12gb+me"] {
            assert_eq!(profile_of_instance(device, Some("+me")), "2g.12gb+me");
        }
        assert_eq!(profile_of_instance("1g.24gb", Some("-me")), "1g.24gb-me");
        assert_eq!(profile_of_instance("1g.24gb", Some("")), "1g.24gb");
        assert_eq!(profile_of_instance("1g.24gb", None), "1g.24gb");
        assert_eq!(profile_of_instance("1g.24gb+gfx", None), "1g.24gb+gfx");
        assert_eq!(profile_of_instance("unknown", None), "unknown");
    }

    #[test]
    fn attributes_give_nvidia_profile_names() {
        // From boards: A100 40 GB, A100 80 GB, H100 80 GB, A30.
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
    fn unknown_placements_are_side_by_side() {
        // 3g, 2g and two 1g of an A100, placed as the driver does.
        let places = lay_out([(1, 4), (5, 2), (9, 1), (10, 1)].into_iter());
        let starts: Vec<(u32, u32)> = places.iter().map(|(id, place)| (*id, place.start)).collect();
        assert_eq!(starts, [(1, 0), (5, 4), (9, 6), (10, 7)]);
        assert!(fits(places.values()));
        let many = lay_out((0..20).map(|id| (id, 1)));
        assert_eq!(many.len(), 16, "no more than there is room for");
    }

    #[test]
    fn instance_ids_give_placements() {
        // From nvidia-smi mig -lgi on an A100 40 GB: a 3g at the end, a 2g at the start, a 1g between them.
        let instance = |id: u32, profile: &str| {
            let compute = ComputeInstance {
                id: 0,
                uuid: format!("MIG-{id}").parse().unwrap(),
                profile: profile.to_owned(),
                attributes: None,
            };
            (id, vec![compute])
        };
        let layout =
            BTreeMap::from([instance(2, "1c.3g.20gb"), instance(3, "2g.10gb"), instance(9, "1g.5gb")]);
        let a100 = Parent { model: Some("NVIDIA A100-SXM4-40GB"), memory_mib: Some(40_960) };
        let places = by_numbers(a100.product().as_ref(), &layout).unwrap();
        let places: Vec<_> = places.values().map(|place| (place.start, place.size)).collect();
        assert_eq!(places, [(4, 4), (0, 2), (2, 1)]);
        let odd = BTreeMap::from([instance(40, "1g.5gb")]);
        assert_eq!(by_numbers(a100.product().as_ref(), &odd), None);
        assert_eq!(by_numbers(None, &layout), None);
    }

    #[test]
    fn overlapping_or_outside_placements_do_not_fit() {
        let place = |start, size| Placement { start, size };
        assert!(fits([place(0, 4), place(4, 4)].iter()));
        for wrong in [[place(0, 4), place(3, 1)], [place(0, 4), place(15, 2)], [place(0, 4), place(4, 0)]] {
            assert!(!fits(wrong.iter()), "{wrong:?}");
        }
    }

    fn at(gpu_minor: u32, gpu_instance: u32, compute_instance: u32) -> InstanceAt {
        InstanceAt { gpu_minor, gpu_instance, compute_instance }
    }

    fn write(root: &Path, file: &str, text: &str) {
        let path = root.join("driver").join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn minors_are_read_from_list() {
        let root = tempfile::tempdir().unwrap();
        let list = "config 1\nmonitor 2\ngpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\ngpu3/gi1/access 417\n";
        write(root.path(), "nvidia-caps/mig-minors", list);
        let caps = Caps::at(root.path());
        assert_eq!(caps.of(at(0, 1, 0)), Some([12, 13]));
        assert_eq!(caps.of(at(0, 1, 1)), None, "no such compute instance");
        assert_eq!(caps.of(at(3, 1, 0)), None, "half a pair opens nothing");
    }

    #[test]
    fn minors_are_read_per_instance_without_list() {
        let root = tempfile::tempdir().unwrap();
        let access =
            |minor: u32| format!("DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n");
        write(root.path(), "nvidia/capabilities/gpu2/mig/gi7/access", &access(66));
        write(root.path(), "nvidia/capabilities/gpu2/mig/gi7/ci0/access", &access(67));
        let caps = Caps::at(root.path());
        assert_eq!(caps.of(at(2, 7, 0)), Some([66, 67]));
        assert_eq!(Caps::at(Path::new("/nonexistent")).of(at(2, 7, 0)), None);
    }
}
