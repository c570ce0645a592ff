//! A machine's GPUs as the site of one pool's devices: the best free set of a size, its bandwidth, and what is lost by
//! taking it. Whole GPUs go through the choice table, parts of GPUs through the choice among devices.

use std::collections::BTreeMap;
use std::sync::Arc;

use gantry_topology::{GpuSet, LinkClass, Purpose};

use crate::devices::DeviceSet;
use crate::kind::{Kind, Spot};
use crate::numa::Alignment;
use crate::placement::{SetTerms, is_of_model};
use crate::shape::{Parts, Shape};

/// A kind of machine and where a pool's devices lie on it.
#[derive(Debug, Clone, Copy)]
pub struct Site<'a> {
    /// The kind of machine.
    pub kind: &'a Kind,
    /// Where the devices are.
    pub shape: &'a Shape,
    /// MIG devices of other resources in use: such a GPU is partitioned already.
    pub cut: &'a [Spot],
    /// The purpose of the devices.
    pub purpose: Purpose,
    /// The models of its GPUs, by index.
    pub models: &'a [Arc<str>],
    /// How kubelet aligns the devices, if it does.
    pub alignment: Option<&'a Alignment>,
}

impl Site<'_> {
    /// The same for members of a gang that spans nodes.
    #[must_use]
    pub fn for_gangs(self) -> Self {
        Self { purpose: Purpose::GangMember, ..self }
    }

    /// The best `size` devices of `free`; `None` if there are fewer.
    pub fn best(self, free: &DeviceSet, size: usize) -> Option<DeviceSet> {
        match self.shape {
            Shape::Whole => self.kind.best_for(free.gpus(), size, self.purpose).map(DeviceSet::from),
            Shape::Parts(parts) => self.kind.best_parts(parts, self.cut, free, size),
        }
    }

    /// The best `size` devices of `free` that meet terms, and that kubelet admits; `None` if there are none.
    pub fn best_meeting(self, free: &DeviceSet, size: usize, terms: &SetTerms) -> Option<DeviceSet> {
        let aligned = match self.alignment {
            Some(alignment) => &alignment.aligned(free, size)?,
            None => free,
        };
        if terms.models.is_empty() {
            return self.best_linked(aligned, size, terms);
        }
        let of_model = |model: &Arc<str>| -> DeviceSet {
            aligned.iter().filter(|device| self.is_of_model(*device, model)).collect()
        };
        terms.models.iter().find_map(|model| self.best_linked(&of_model(model), size, terms))
    }

    fn best_linked(self, free: &DeviceSet, size: usize, terms: &SetTerms) -> Option<DeviceSet> {
        match self.shape {
            Shape::Whole => {
                let best = self.kind.best_meeting(free.gpus(), size, self.purpose, terms);
                best.map(DeviceSet::from)
            }
            Shape::Parts(_) => self.best(free, size).filter(|devices| self.meets(devices, terms)),
        }
    }

    /// Whether the links of a set meet terms. MIG devices have no links to each other.
    pub fn meets(self, devices: &DeviceSet, terms: &SetTerms) -> bool {
        if devices.len() < 2 || !terms.are_of_links() {
            return true;
        }
        self.bandwidth(devices).is_some_and(|gbs| terms.are_met(self.class(devices), gbs))
    }

    /// Whether a set meets terms: those of its links, and one of the models.
    pub fn meets_all(self, devices: &DeviceSet, terms: &SetTerms) -> bool {
        let is_of = |model: &Arc<str>| devices.iter().all(|device| self.is_of_model(device, model));
        self.meets(devices, terms) && (terms.models.is_empty() || terms.models.iter().any(is_of))
    }

    /// What carries a collective over devices; the least where two are on one GPU.
    pub fn class(self, devices: &DeviceSet) -> LinkClass {
        self.gpus(devices).map_or(LinkClass::Any, |gpus| self.kind.class(gpus))
    }

    /// The links of a set and their bandwidth, such as `PIX, 24 GB/s`; `None` for MIG devices.
    pub fn described(self, devices: &DeviceSet) -> Option<String> {
        let gbs = self.bandwidth(devices)?;
        Some(match self.gpus(devices) {
            Some(gpus) => format!("{}, {gbs} GB/s", self.kind.link_name(gpus)),
            None => "on one GPU".to_owned(),
        })
    }

    /// Whether a device is on a GPU of a model.
    pub fn is_of_model(self, device: usize, model: &str) -> bool {
        let name = self.gpu(device).and_then(|gpu| self.models.get(gpu));
        name.is_some_and(|name| is_of_model(name, model))
    }

    /// The GPU of a device.
    fn gpu(self, device: usize) -> Option<usize> {
        match self.shape {
            Shape::Whole => Some(device),
            Shape::Parts(parts) => parts.spots().get(device).map(|spot| usize::from(spot.gpu)),
        }
    }

    /// The GPUs of devices; `None` where two are on one GPU.
    fn gpus(self, devices: &DeviceSet) -> Option<GpuSet> {
        let gpus: GpuSet = devices.iter().filter_map(|device| self.gpu(device)).collect();
        (gpus.len() == devices.len()).then_some(gpus)
    }

    /// Bandwidth in GB/s of a collective over two devices or more. 0 where two are on one GPU: any set over several
    /// GPUs is better. `None` for MIG devices, which have no links to each other.
    pub fn bandwidth(self, devices: &DeviceSet) -> Option<f64> {
        match self.shape {
            Shape::Whole => Some(self.kind.bandwidth(devices.gpus())),
            Shape::Parts(parts) => {
                let spots: Vec<&Spot> =
                    devices.iter().filter_map(|device| parts.spots().get(device)).collect();
                if spots.iter().any(|spot| spot.slice.is_some()) {
                    return None;
                }
                let gpus: GpuSet = spots.iter().map(|spot| usize::from(spot.gpu)).collect();
                Some(if gpus.len() == spots.len() { self.kind.bandwidth(gpus) } else { 0.0 })
            }
        }
    }

    /// Why `devices` were chosen out of `free`, as one sentence.
    pub fn explain(self, free: &DeviceSet, devices: &DeviceSet) -> String {
        match self.shape {
            Shape::Whole => self.kind.explain(free.gpus(), devices.gpus(), self.purpose),
            Shape::Parts(parts) => {
                let left = free.len().saturating_sub(devices.len());
                format!("{}; leaves {left} free", named(parts, devices))
            }
        }
    }

    /// How much of what `free` is good for is lost when `devices` are taken, from 0 to 1.
    pub fn stranded(self, free: &DeviceSet, devices: &DeviceSet) -> f64 {
        match self.shape {
            Shape::Whole => self.kind.stranded(free.gpus(), devices.gpus()),
            Shape::Parts(parts) => worth(parts, self.cut, free) - worth(parts, self.cut, &(free - devices)),
        }
    }
}

/// `3 replicas on GPUs 0 (2),1`, `MIG device on GPU 4`.
fn named(parts: &Parts, devices: &DeviceSet) -> String {
    let mut gpus: BTreeMap<u8, usize> = BTreeMap::new();
    for spot in devices.iter().filter_map(|device| parts.spots().get(device)) {
        *gpus.entry(spot.gpu).or_default() += 1;
    }
    let what = if parts.are_slices() { "MIG device" } else { "replica" };
    let what = match devices.len() {
        1 => what.to_owned(),
        count => format!("{count} {what}s"),
    };
    let noun = if gpus.len() == 1 { "GPU" } else { "GPUs" };
    let gpus = gpus.iter().map(|(gpu, count)| match count {
        1 => gpu.to_string(),
        count if gpus.len() > 1 => format!("{gpu} ({count})"),
        _ => gpu.to_string(),
    });
    format!("{what} on {noun} {}", gpus.collect::<Vec<_>>().join(","))
}

/// The least weight: how full a shared GPU in use is.
const REST: f64 = 1.0 / 1024.0;

/// What free parts of GPUs are good for, from 0 to 1: the mean over the partitioned or shared GPUs. A GPU that another
/// resource uses in part (`cut`) is worth less.
///
/// First the memory that could be returned whole: the free runs, squared, so that one large run is worth more than its
/// pieces, and an unused GPU most. Then, with much less weight, the free replicas, squared likewise: of two shared GPUs
/// in use the fuller one loses less.
fn worth(parts: &Parts, cut: &[Spot], free: &DeviceSet) -> f64 {
    let mut total = 0.0;
    let mut gpus = 0;
    let mut runs = parts.alike().iter().peekable();
    while let Some(first) = runs.peek() {
        let gpu = parts.spots()[first.start].gpu;
        let elsewhere = cut.iter().filter(|spot| spot.gpu == gpu);
        let mut units: u32 = elsewhere.map(|spot| units_of(spot).1).sum();
        let (mut whole, mut rest, mut pieces) = (0u32, 0.0, 0u32);
        // The current run of free memory: its end and length.
        let mut growing = (0u32, 0u32);
        while let Some(range) = runs.next_if(|range| parts.spots()[range.start].gpu == gpu) {
            let (start, size) = units_of(&parts.spots()[range.start]);
            let left = parts.count(free, range);
            units += size;
            pieces += 1;
            rest += square(left, range.len());
            if left < range.len() {
                continue;
            }
            let length = if start == growing.0 { growing.1 + size } else { size };
            // (a + b)^2 in place of a^2.
            whole += length * length - (length - size) * (length - size);
            growing = (start + size, length);
        }
        total +=
            f64::from(whole) / f64::from(units * units).max(1.0) + REST * rest / f64::from(pieces.max(1));
        gpus += 1;
    }
    total / (f64::from(gpus.max(1)) * (1.0 + REST))
}

/// The first memory unit of a device and how many it has; a whole GPU is one.
fn units_of(spot: &Spot) -> (u32, u32) {
    spot.slice.map_or((0, 1), |slice| (u32::from(slice.start), u32::from(slice.size)))
}

fn square(part: usize, of: usize) -> f64 {
    let count = |number: usize| f64::from(u32::try_from(number).unwrap_or(u32::MAX));
    (count(part) / count(of).max(1.0)).powi(2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{bridged, kind, replicas, slices};

    fn lost(shape: &Shape, free: &[usize], taken: &[usize]) -> f64 {
        let kind = kind(&bridged());
        let site =
            Site { kind: &kind, shape, cut: &[], purpose: Purpose::Local, models: &[], alignment: None };
        site.stranded(&free.iter().copied().collect(), &taken.iter().copied().collect())
    }

    #[test]
    fn parts_are_named_with_their_gpus() {
        let explained = |shape: &Shape, free: usize, taken: &[usize]| {
            let kind = kind(&bridged());
            let site =
                Site { kind: &kind, shape, cut: &[], purpose: Purpose::Local, models: &[], alignment: None };
            site.explain(&(0..free).collect(), &taken.iter().copied().collect())
        };
        let shared = replicas(2, 4);
        assert_eq!(explained(&shared, 8, &[0]), "replica on GPU 0; leaves 7 free");
        assert_eq!(explained(&shared, 8, &[0, 1]), "2 replicas on GPU 0; leaves 6 free");
        assert_eq!(explained(&shared, 8, &[0, 1, 4]), "3 replicas on GPUs 0 (2),1; leaves 5 free");
        let cut = slices(&[(0, 0, 4), (1, 4, 4)]);
        assert_eq!(explained(&cut, 2, &[1]), "MIG device on GPU 1; leaves 1 free");
    }

    #[test]
    fn taking_all_loses_all() {
        assert!((lost(&replicas(2, 2), &[0, 1, 2, 3], &[0, 1, 2, 3]) - 1.0).abs() < 1e-9);
        let cut = slices(&[(0, 0, 4), (0, 4, 4)]);
        assert!((lost(&cut, &[0, 1], &[0, 1]) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn the_first_replica_of_a_gpu_costs_more_than_any_further_one() {
        let shared = replicas(2, 4);
        let fresh = lost(&shared, &[0, 1, 2, 3, 4, 5, 6], &[0]);
        let second = lost(&shared, &[0, 1, 2, 3, 4, 5, 6], &[4]);
        let last = lost(&shared, &[0, 1, 2, 3, 4], &[4]);
        assert!(fresh > 100.0 * second, "{fresh} {second}");
        assert!(second > last, "{second} {last}");
    }

    #[test]
    fn slice_at_the_end_of_free_memory_costs_least() {
        let cut = slices(&[(0, 0, 1), (0, 1, 1), (0, 2, 1), (0, 3, 1)]);
        let all = [0, 1, 2, 3];
        assert!(lost(&cut, &all, &[0]) < lost(&cut, &all, &[1]));
        assert!((lost(&cut, &all, &[0]) - lost(&cut, &all, &[3])).abs() < 1e-12);
    }

    #[test]
    fn replicas_reach_what_their_gpus_do_and_slices_nothing() {
        let kind = kind(&bridged());
        let shared = replicas(8, 2);
        let site = Site {
            kind: &kind,
            shape: &shared,
            cut: &[],
            purpose: Purpose::Local,
            models: &[],
            alignment: None,
        };
        let reach = |devices: &[usize]| site.bandwidth(&devices.iter().copied().collect());
        assert_eq!(reach(&[0, 2]), Some(kind.bandwidth("0,1".parse().unwrap())));
        assert_eq!(reach(&[0, 1]), Some(0.0));
        let cut = slices(&[(0, 0, 4), (1, 0, 4)]);
        let site = Site {
            kind: &kind,
            shape: &cut,
            cut: &[],
            purpose: Purpose::Local,
            models: &[],
            alignment: None,
        };
        assert_eq!(site.bandwidth(&[0, 1].into_iter().collect()), None);
    }
}
