//! Where the devices of a pool are on the GPUs of its machine: one on each GPU, or several (MIG devices, replicas); and
//! which of them are alike. What a choice is worth is [`crate::site`]'s matter.

use std::hash::{BuildHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

use crate::devices::DeviceSet;
use crate::kind::{Sharing, Spot};

/// Where the devices of a pool are.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Shape {
    /// Device `i` is the whole of GPU `i`.
    Whole,
    /// Parts of GPUs.
    Parts(Arc<Parts>),
}

/// Devices of which several may lie on one GPU: MIG devices, replicas of GPUs or of MIG devices.
#[derive(Debug)]
pub struct Parts {
    /// By device; ascending, so that equal pools of two nodes are equal values whatever their devices are called.
    spots: Vec<Spot>,
    sharing: Sharing,
    /// Devices at the same spot, which are interchangeable.
    alike: Vec<Range<usize>>,
    hash: u64,
}

impl Parts {
    /// Devices at these spots, put in order.
    pub fn new(mut spots: Vec<Spot>, sharing: Sharing) -> Self {
        spots.sort_unstable_by_key(order);
        let mut alike: Vec<Range<usize>> = Vec::new();
        for (index, spot) in spots.iter().enumerate() {
            match alike.last_mut() {
                Some(range) if spots[range.start] == *spot => range.end = index + 1,
                _ => alike.push(index..index + 1),
            }
        }
        let mut hasher = foldhash::quality::FixedState::default().build_hasher();
        for spot in &spots {
            order(spot).hash(&mut hasher);
        }
        Self { hash: hasher.finish(), spots, sharing, alike }
    }

    /// Where each device lies.
    pub fn spots(&self) -> &[Spot] {
        &self.spots
    }

    /// Whether they are MIG devices or replicas of such, not of whole GPUs.
    pub fn are_slices(&self) -> bool {
        self.spots.iter().any(|spot| spot.slice.is_some())
    }

    /// The policy for several devices on one GPU.
    pub fn sharing(&self) -> Sharing {
        self.sharing
    }

    /// The runs of devices that are alike.
    pub fn alike(&self) -> &[Range<usize>] {
        &self.alike
    }

    /// The canonical set: of alike devices the first ones. Sets that are equal for every decision become equal values.
    #[must_use]
    pub fn canonical(&self, set: &DeviceSet) -> DeviceSet {
        if self.alike.len() == self.spots.len() {
            return set.clone();
        }
        self.alike.iter().flat_map(|range| range.clone().take(self.count(set, range))).collect()
    }

    /// How many of a run are in a set.
    pub fn count(&self, set: &DeviceSet, range: &Range<usize>) -> usize {
        range.clone().filter(|&device| set.contains(device)).count()
    }
}

/// The order of devices in a pool.
pub fn order(spot: &Spot) -> (u8, Option<(u8, u8)>) {
    (spot.gpu, spot.slice.map(|units| (units.start, units.size)))
}

impl PartialEq for Parts {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
            || (self.hash == other.hash && self.sharing == other.sharing && self.spots == other.spots)
    }
}

impl Eq for Parts {}

impl Hash for Parts {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.hash.hash(state);
    }
}

impl Shape {
    /// The canonical set, see [`Parts::canonical`].
    #[must_use]
    pub fn canonical(&self, set: &DeviceSet) -> DeviceSet {
        match self {
            Self::Whole => set.clone(),
            Self::Parts(parts) => parts.canonical(set),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::fixtures::{replicas, slices};

    #[test]
    fn replicas_of_one_gpu_are_alike_and_slices_are_not() {
        let shared = replicas(2, 4);
        let canonical = |set: &[usize]| shared.canonical(&set.iter().copied().collect()).to_string();
        assert_eq!(canonical(&[1, 3, 6]), "0,1,4");
        let cut = slices(&[(0, 0, 1), (0, 1, 1), (1, 0, 1)]);
        assert_eq!(cut.canonical(&[1, 2].into_iter().collect()).to_string(), "1,2");
    }

    #[test]
    fn pools_are_equal_whatever_order_their_devices_are_listed_in() {
        assert_eq!(slices(&[(1, 4, 4), (0, 0, 4), (0, 4, 4)]), slices(&[(0, 0, 4), (0, 4, 4), (1, 4, 4)]));
        assert_ne!(slices(&[(0, 0, 4)]), slices(&[(0, 4, 4)]));
    }
}
