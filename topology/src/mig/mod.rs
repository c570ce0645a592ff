//! MIG: the profiles of a product, their placements, and the placements that a layout leaves possible. The present
//! layout of a GPU is in [`crate::machine::Mig`].

mod layout;
mod plan;
mod table;

use std::cmp::Reverse;
use std::sync::LazyLock;

use crate::machine::{Gpu, MigAttributes, unit_mask};

pub use layout::{MigLayout, MigLayoutError, check_machine};
pub use plan::{MigPlan, MigPlanError, NewInstance, PresentInstance, plan};
pub use table::{TableError, suffix_of};

/// The tolerated deviation of a board's memory from its product's: one part in so many. Drivers reserve some memory,
/// and ECC up to a sixteenth.
const MEMORY_TOLERANCE: u64 = 12;

const BUILT_IN: &str = include_str!("../../data/mig_profiles.csv");

/// The built-in table, read once for all machines of a cluster.
static KNOWN: LazyLock<Catalogue> = LazyLock::new(Catalogue::built_in);

/// The placements ([`Product::placements`]) of every product of eight memory units so far, used for an unknown GPU.
pub(crate) const OF_EIGHT_UNITS: &[u16] = &[
    0x01, 0x02, 0x03, 0x03, 0x04, 0x08, 0x0c, 0x0c, 0x0f, 0x0f, 0x10, 0x20, 0x30, 0x30, 0x40, 0xc0, 0xf0,
    0xff,
];

/// The same for products of twelve units.
pub(crate) const OF_TWELVE_UNITS: &[u16] = &[0x007, 0x038, 0x03f, 0x1c0, 0xe00, 0xfc0, 0xfff];

/// Every product with known MIG profiles.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Catalogue {
    products: Vec<Product>,
}

/// One product: a GPU with its memory size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Product {
    /// The name in the table, e.g. `A100-40GB`.
    pub name: String,
    /// PCI device ids, without the vendor's.
    pub device_ids: Vec<u16>,
    /// Words of product names: the name contains all words of one alternative.
    models: Vec<Vec<String>>,
    /// Total memory of a board in MiB, as NVML reports it.
    pub memory_mib: u64,
    /// Profiles, in the table's order: the smallest first.
    pub profiles: Vec<Profile>,
}

/// One GPU instance profile of a product.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Profile {
    /// Name as nvidia-smi prints it, e.g. `1g.5gb+me`.
    pub name: String,
    /// Profile id, unique for the product: what `nvidia-smi mig -cgi` takes and `nvmlGpuInstanceProfileInfo_t.id`
    /// holds.
    pub id: u32,
    /// NVML's `NVML_GPU_INSTANCE_PROFILE_*`, by which profiles are asked for.
    pub nvml: u32,
    /// Compute slices.
    pub compute: u8,
    /// Memory units it covers.
    pub size: u8,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Streaming multiprocessors, where known.
    pub multiprocessors: Option<u32>,
    /// Engines other than the multiprocessors.
    pub engines: Engines,
    /// The most instances of it on one GPU.
    pub max_instances: u8,
    /// Memory units it may start at.
    pub starts: Vec<u8>,
}

/// Engines of an instance, or of a whole GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Engines {
    /// Copy engines.
    pub copy: u32,
    /// Video decoders.
    pub decoders: u32,
    /// Video encoders.
    pub encoders: u32,
    /// JPEG decoders.
    pub jpeg: u32,
    /// Optical flow accelerators.
    pub ofa: u32,
}

impl Catalogue {
    /// The table that comes with this crate.
    pub fn built_in() -> Self {
        // The table is part of the source, and a test reads it: it cannot be wrong here.
        Self::parse(BUILT_IN).unwrap_or_default()
    }

    /// Reads a table of the form of `data/mig_profiles.csv`.
    ///
    /// # Errors
    /// The first row that is wrong, with its line and column.
    pub fn parse(text: &str) -> Result<Self, TableError> {
        table::parse(text).map(|products| Self { products })
    }

    /// The products, in the table's order.
    pub fn products(&self) -> &[Product] {
        &self.products
    }

    /// The product with this PCI device id (the vendor's left out).
    pub fn by_device_id(&self, device_id: u16) -> Option<&Product> {
        self.products.iter().find(|product| product.device_ids.contains(&device_id))
    }

    /// The product of an NVML name, e.g. `NVIDIA A100-SXM4-40GB`. The most specific match wins: `H100 NVL` before
    /// `H100`. Boards of one name have several memory sizes (`NVIDIA GB300`): the nearest wins, and a size that none of
    /// them has is a product that is not known. If the size is unknown too, the first product of the table.
    pub fn by_model(&self, model: &str, memory_mib: Option<u64>) -> Option<&Product> {
        let upper = model.to_ascii_uppercase();
        let words: Vec<&str> =
            upper.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty()).collect();
        let matched = |product: &Product| {
            let alternatives = product.models.iter();
            alternatives
                .filter(|needed| needed.iter().all(|word| words.contains(&word.as_str())))
                .map(Vec::len)
                .max()
        };
        let off = |product: &Product| memory_mib.map_or(0, |mib| mib.abs_diff(product.memory_mib));
        let near = |product: &&Product| off(product) <= product.memory_mib / MEMORY_TOLERANCE;
        let candidates = self.products.iter().filter(near);
        let ranked = candidates.filter_map(|product| Some((matched(product)?, product)));
        // The first of equals.
        ranked
            .rev()
            .max_by_key(|(words, product)| (*words, Reverse(off(product))))
            .map(|(_, product)| product)
    }

    /// The product of a GPU of a machine, if it supports MIG and its model is known.
    pub fn of(&self, gpu: &Gpu) -> Option<&Product> {
        self.by_model(gpu.model.as_deref()?, gpu.memory_mib)
    }
}

impl Product {
    /// The product of a GPU by what its driver reports, whether or not the table has it.
    pub fn of_driver(name: String, memory_mib: u64, profiles: Vec<Profile>) -> Self {
        Self { name, device_ids: Vec::new(), models: Vec::new(), memory_mib, profiles }
    }

    /// The profile of this name, e.g. `3g.20gb`.
    pub fn profile(&self, name: &str) -> Option<&Profile> {
        self.profiles.iter().find(|profile| profile.name == name)
    }

    /// The profile with this id, e.g. 19.
    pub fn profile_by_id(&self, id: u32) -> Option<&Profile> {
        self.profiles.iter().find(|profile| profile.id == id)
    }

    /// The profile of an `NVML_GPU_INSTANCE_PROFILE_*`.
    pub fn profile_by_nvml(&self, nvml: u32) -> Option<&Profile> {
        self.profiles.iter().find(|profile| profile.nvml == nvml)
    }

    /// The profile that is the whole GPU.
    pub fn whole(&self) -> Option<&Profile> {
        self.profiles.iter().max_by_key(|profile| (profile.size, Reverse(profile.id)))
    }

    /// Memory units of the GPU: 4 on an A30, 12 on an RTX PRO 6000, else 8.
    pub fn memory_units(&self) -> u8 {
        self.whole().map_or(0, |whole| whole.size)
    }

    /// Compute slices of the GPU: 4 on an A30 and an RTX PRO 6000, else 7.
    pub fn compute_slices(&self) -> u8 {
        self.whole().map_or(0, |whole| whole.compute)
    }

    /// The places of instances as masks of memory units, ascending: one for each place and number of compute slices, so
    /// that `3g` and `4g` at unit 0 are two, and variants of one profile (`1g.5gb+me`) are one. [`MigLayout`] counts
    /// compute slices and engines, which also limit a layout.
    pub(crate) fn placements(&self) -> Vec<u16> {
        let places = self.profiles.iter().flat_map(|profile| {
            let starts = profile.starts.iter();
            starts.map(|start| (unit_mask(*start, profile.size), profile.compute))
        });
        let mut places: Vec<(u16, u8)> = places.collect();
        places.sort_unstable();
        places.dedup();
        places.into_iter().map(|(units, _)| units).collect()
    }

    /// The hardware of a compute instance of `compute` slices in a GPU instance of `profile`. Copy engines and the
    /// like are shared by all compute instances of one GPU instance. Multiprocessors are 0 if the table has none.
    pub fn attributes(&self, profile: &Profile, compute: u8) -> MigAttributes {
        let alone = self
            .profiles
            .iter()
            .find(|other| other.compute == compute && other.nvml <= NVML_8_SLICE)
            .and_then(|other| other.multiprocessors);
        let multiprocessors = if compute >= profile.compute {
            profile.multiprocessors
        } else {
            alone.min(profile.multiprocessors)
        };
        MigAttributes {
            multiprocessors: multiprocessors.unwrap_or(0),
            gpu_slices: u32::from(profile.compute),
            compute_slices: u32::from(compute.min(profile.compute)),
            copy_engines: profile.engines.copy,
            decoders: profile.engines.decoders,
            encoders: profile.engines.encoders,
            jpeg: profile.engines.jpeg,
            ofa: profile.engines.ofa,
            memory_mib: profile.memory_mib,
        }
    }

    /// The id the driver gives an instance that covers these units: instances are numbered like the nodes of a tree,
    /// the whole GPU 0, its halves 1 and 2, and so on.
    pub fn instance_id(&self, profile: &Profile, start: u8) -> u32 {
        let size = profile.size.max(1);
        u32::from(self.memory_units() / size).saturating_sub(1) + u32::from(start / size)
    }
}

/// The placements of each GPU that supports MIG and is of a known product.
pub(crate) fn placements_of(gpus: &[Gpu]) -> Vec<Option<Vec<u16>>> {
    let mut all: Vec<Option<Vec<u16>>> = Vec::with_capacity(gpus.len());
    for (index, gpu) in gpus.iter().enumerate() {
        let alike = gpus[..index].iter().position(|other| {
            (&other.model, other.memory_mib) == (&gpu.model, gpu.memory_mib)
                && other.mig.is_some() == gpu.mig.is_some()
        });
        all.push(match alike {
            Some(alike) => all[alike].clone(),
            None => gpu.mig.as_ref().and_then(|_| KNOWN.of(gpu)).map(Product::placements),
        });
    }
    all
}

/// The last of NVML's profiles that are plain runs of compute slices.
const NVML_8_SLICE: u32 = 5;

/// Slice counts a compute instance may have in a GPU instance of `gpu_slices`: those of the grid (1, 2, 3, 4, 7) up to
/// its own. An instance of 3 has 1, 2, 3; one of 4 has 1, 2, 4; one of 7 has 1, 2, 3, 4, 7.
pub fn legal_compute(gpu_slices: u8) -> impl Iterator<Item = u8> {
    [1, 2, 3, 4, 7]
        .into_iter()
        .filter(move |slices| *slices <= gpu_slices && !(gpu_slices == 4 && *slices == 3))
}

/// Compute slices that a compute instance of `slices` may start at within a GPU instance of `gpu_slices`, as
/// `nvidia-smi mig -lcipp` prints them: every `slices`-th, three taking the room of four.
pub fn compute_starts(gpu_slices: u8, slices: u8) -> Vec<u8> {
    let step = if slices == 3 { 4 } else { slices.max(1) };
    (0..gpu_slices).step_by(usize::from(step)).filter(|start| start + slices <= gpu_slices).collect()
}

/// Where compute instances of so many slices lie side by side in a GPU instance of `gpu_slices`: each at the lowest start
/// with which the ones after it still find one. `None` if they do not fit.
pub fn compute_placements(gpu_slices: u8, slices: &[u8]) -> Option<Vec<u8>> {
    fn place(gpu_slices: u8, taken: u16, slices: &[u8]) -> Option<Vec<u8>> {
        let Some((first, rest)) = slices.split_first() else {
            return Some(Vec::new());
        };
        compute_starts(gpu_slices, *first).into_iter().find_map(|start| {
            let run = unit_mask(start, *first);
            let mut all = (taken & run == 0).then(|| place(gpu_slices, taken | run, rest)).flatten()?;
            all.insert(0, start);
            Some(all)
        })
    }
    place(gpu_slices, 0, slices)
}

/// Compute slices of a MIG device named `device` in a GPU instance of profile `instance` with `gpu_slices`: all of them
/// if the names are equal, fewer for `1c.3g.20gb`. `None` for any other name.
pub fn compute_slices_of(device: &str, instance: &str, gpu_slices: u8) -> Option<u8> {
    if device == instance {
        return Some(gpu_slices);
    }
    let (slices, rest) = device.split_once("c.")?;
    let slices = slices.parse().ok()?;
    let known = legal_compute(gpu_slices).any(|legal| legal == slices && slices < gpu_slices);
    (rest == instance && known).then_some(slices)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compute_starts_match_nvidia_smi() {
        assert_eq!(compute_starts(7, 1), [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(compute_starts(7, 2), [0, 2, 4]);
        assert_eq!(compute_starts(7, 3), [0, 4]);
        assert_eq!(compute_starts(7, 4), [0]);
        assert_eq!(compute_starts(3, 2), [0]);
        assert_eq!(compute_starts(4, 2), [0, 2]);
        assert_eq!(legal_compute(4).collect::<Vec<_>>(), [1, 2, 4]);
        assert_eq!(legal_compute(3).collect::<Vec<_>>(), [1, 2, 3]);
    }

    #[test]
    fn device_name_has_its_compute_slices() {
        assert_eq!(compute_slices_of("3g.20gb", "3g.20gb", 3), Some(3));
        assert_eq!(compute_slices_of("1c.3g.20gb", "3g.20gb", 3), Some(1));
        for wrong in ["3c.3g.20gb", "4c.3g.20gb", "1c.2g.10gb", "2g.10gb", "xc.3g.20gb", ""] {
            assert_eq!(compute_slices_of(wrong, "3g.20gb", 3), None, "{wrong}");
        }
    }

    #[test]
    fn products_of_equal_units_have_equal_placements() {
        let mut seen = [0; 3];
        for product in KNOWN.products() {
            let places = product.placements();
            match product.memory_units() {
                4 => {
                    assert_eq!(places, [0x1, 0x2, 0x3, 0x4, 0x8, 0xc, 0xf], "{}", product.name);
                    seen[0] += 1;
                }
                8 => {
                    assert_eq!(places, OF_EIGHT_UNITS, "{}", product.name);
                    seen[1] += 1;
                }
                12 => {
                    assert_eq!(places, OF_TWELVE_UNITS, "{}", product.name);
                    seen[2] += 1;
                }
                units => panic!("{}: a rule for {units} units is missing", product.name),
            }
        }
        assert!(seen.iter().all(|seen| *seen > 0), "{seen:?}");
    }
}
