//! The MIG layout of a GPU: the part of a machine file that changes while the machine runs. Checked are the rules of every GPU (no two
//! instances overlap); the placements of each product are in `crate::mig`.

use serde::{Deserialize, Serialize};

use super::MachineError;
use super::ids::MigUuid;

/// Memory units of the GPU with most of them: the width of a placement mask.
pub const MAX_MEMORY_UNITS: u8 = 16;

/// MIG of one GPU. A GPU without MIG support has none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Mig {
    /// Whether MIG mode is on. A GPU with MIG on is used through its instances only.
    pub enabled: bool,
    /// The GPU instances, sorted by where they start.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_MEMORY_UNITS))]
    pub instances: Vec<GpuInstance>,
}

/// A GPU instance: memory and engines of its own.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GpuInstance {
    /// NVML's GPU instance ID, unique on its GPU.
    pub id: u32,
    /// Profile as nvidia-smi prints it, e.g. `3g.20gb` or `1g.5gb+me`.
    pub profile: String,
    /// First memory unit it covers.
    pub start: u8,
    /// Memory units it covers.
    pub size: u8,
    /// Its compute instances, by ID. An undivided GPU instance has one, as large as itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_MEMORY_UNITS))]
    pub compute: Vec<ComputeInstance>,
}

/// A compute instance: what NVML and CUDA call a MIG device.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ComputeInstance {
    /// NVML's compute instance ID, unique in its GPU instance.
    pub id: u32,
    /// UUID of the MIG device.
    pub uuid: MigUuid,
    /// Profile of the MIG device: its GPU instance's (`3g.20gb`, `1g.5gb+me`), or `1c.3g.20gb` if it has less compute than
    /// that. The driver omits the suffix behind the size (`+me`). A file may omit it too; it is added again.
    pub profile: String,
    /// Its hardware, if NVML reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attributes: Option<MigAttributes>,
}

/// The hardware of a MIG device (NVML's `nvmlDeviceAttributes_t`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MigAttributes {
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Compute slices of its GPU instance.
    pub gpu_slices: u32,
    /// Compute slices of its own.
    pub compute_slices: u32,
    /// Copy engines.
    pub copy_engines: u32,
    /// Video decoders.
    pub decoders: u32,
    /// Video encoders.
    pub encoders: u32,
    /// JPEG decoders.
    pub jpeg: u32,
    /// Optical flow accelerators.
    pub ofa: u32,
    /// Memory in MiB.
    pub memory_mib: u64,
}

impl GpuInstance {
    /// The memory units it covers, as a mask.
    pub fn units(&self) -> u16 {
        unit_mask(self.start, self.size)
    }
}

/// A profile's name in two: up to the size (`1g.5gb`), and the suffix (`+me`, `+gfx`, `-me`, `+me.all`, or nothing),
/// which the driver uses in names of GPU instances but omits in names of MIG devices.
pub fn split_profile(profile: &str) -> (&str, &str) {
    match profile.find("gb") {
        Some(size) => profile.split_at(size + "gb".len()),
        None => (profile, ""),
    }
}

/// Memory units `start .. start + size` as a mask, without those over [`MAX_MEMORY_UNITS`].
pub(crate) fn unit_mask(start: u8, size: u8) -> u16 {
    let end = start.saturating_add(size).min(MAX_MEMORY_UNITS);
    (start..end).fold(0, |mask, unit| mask | 1 << unit)
}

/// Adds the suffix of an instance's profile to the names of its MIG devices that lack it. Other names are kept.
fn name_devices(instance: &mut GpuInstance) {
    let (plain, suffix) = split_profile(&instance.profile);
    for device in instance.compute.iter_mut().map(|compute| &mut compute.profile) {
        let part = device.strip_suffix(plain);
        if part.is_some_and(|part| part.is_empty() || part.ends_with("c.")) {
            device.push_str(suffix);
        }
    }
}

/// Sorts instances, completes the names of their devices, and refuses a layout that no GPU can have. `field` names the GPU.
pub(super) fn check(mig: &mut Mig, field: &str) -> Result<(), MachineError> {
    let refuse = |place: String, problem: String| {
        Err(MachineError::new(format!("{field}.mig.instances[{place}"), problem))
    };
    if !mig.enabled && !mig.instances.is_empty() {
        return Err(MachineError::new(
            format!("{field}.mig.instances"),
            "must be empty while enabled is false",
        ));
    }
    mig.instances.sort_by_key(|instance| (instance.start, instance.id));
    let mut taken = 0;
    for (position, instance) in mig.instances.iter_mut().enumerate() {
        let end = instance.start.checked_add(instance.size);
        if instance.size == 0 || end.is_none_or(|end| end > MAX_MEMORY_UNITS) {
            return refuse(
                format!("{position}]"),
                format!(
                    "must cover 1 to {MAX_MEMORY_UNITS} memory units, ending at {MAX_MEMORY_UNITS} at most"
                ),
            );
        }
        if taken & instance.units() != 0 {
            return refuse(format!("{position}].start"), "overlaps another instance".to_owned());
        }
        taken |= instance.units();
        name_devices(instance);
        instance.compute.sort_by_key(|compute| compute.id);
        if instance.compute.windows(2).any(|pair| pair[0].id == pair[1].id) {
            return refuse(format!("{position}].compute"), "two have the same id".to_owned());
        }
    }
    for (position, instance) in mig.instances.iter().enumerate() {
        let ids = mig.instances[..position].iter().map(|earlier| earlier.id);
        if ids.into_iter().any(|id| id == instance.id) {
            return refuse(format!("{position}].id"), format!("{} is another instance's too", instance.id));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The names of the MIG devices in one instance of `profile`, where the driver or a file calls them `names`.
    fn read(profile: &str, names: &[&str]) -> Vec<String> {
        let compute = names.iter().zip(0..).map(|(name, id)| ComputeInstance {
            id,
            uuid: format!("MIG-{id}").parse().unwrap(),
            profile: (*name).to_owned(),
            attributes: None,
        });
        let mut mig = Mig {
            enabled: true,
            instances: vec![GpuInstance {
                id: 1,
                profile: profile.to_owned(),
                start: 0,
                size: 1,
                compute: compute.collect(),
            }],
        };
        check(&mut mig, "gpus[0]").unwrap();
        let compute = mig.instances.remove(0).compute;
        compute.into_iter().map(|compute| compute.profile).collect()
    }

    #[test]
    fn device_gets_the_suffix_of_its_instance() {
        for name in ["1g.10gb", "1g.10gb+me"] {
            assert_eq!(read("1g.10gb+me", &[name]), ["1g.10gb+me"]);
        }
        assert_eq!(read("2g.48gb-me", &["1c.2g.48gb", "1c.2g.48gb-me"]), ["1c.2g.48gb-me"; 2]);
        assert_eq!(read("1g.24gb+me.all", &["1g.24gb"]), ["1g.24gb+me.all"]);
        // Another name than the instance's gets no suffix. Whether it is allowed depends on the product.
        assert_eq!(read("1g.10gb", &["1g.10gb"]), ["1g.10gb"]);
        assert_eq!(read("1g.10gb+me", &["1g.5gb", "1c.1g.5gb"]), ["1g.5gb", "1c.1g.5gb"]);
        assert_eq!(read("odd", &["odd"]), ["odd"]);
    }
}
