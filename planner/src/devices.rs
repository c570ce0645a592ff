//! A set of devices of one pool as bits: bit `i` is the pool's device `i`. Set arithmetic and text form only. Up to 64
//! devices need no heap memory.

use std::fmt;
use std::ops::{BitAnd, BitOr, Sub};

use gantry_topology::GpuSet;

/// Bits of a word.
const WORD: usize = 64;

/// Devices of one pool.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct DeviceSet {
    /// Devices 0 to 63.
    low: u64,
    /// Devices from 64 on, 64 to a word. The last word is never 0, so that equal sets are equal values.
    high: Vec<u64>,
}

impl DeviceSet {
    /// No device.
    pub const EMPTY: Self = Self { low: 0, high: Vec::new() };

    /// The devices `0..count`.
    pub fn first(count: usize) -> Self {
        Self::range(0, count)
    }

    /// The devices `from..to`.
    pub fn range(from: usize, to: usize) -> Self {
        (from..to).collect()
    }

    /// How many are in it.
    pub fn len(&self) -> usize {
        let high: u32 = self.high.iter().map(|word| word.count_ones()).sum();
        (self.low.count_ones() + high) as usize
    }

    /// Whether none is in it.
    pub fn is_empty(&self) -> bool {
        self.low == 0 && self.high.is_empty()
    }

    /// Whether device `index` is in it.
    pub fn contains(&self, index: usize) -> bool {
        self.word(index / WORD) & (1 << (index % WORD)) != 0
    }

    /// Whether all of it is in `other` too.
    pub fn is_subset(&self, other: &Self) -> bool {
        self.low & !other.low == 0
            && self.high.iter().enumerate().all(|(at, word)| word & !other.word(at + 1) == 0)
    }

    /// Puts device `index` in.
    pub fn insert(&mut self, index: usize) {
        let bit = 1 << (index % WORD);
        match (index / WORD).checked_sub(1) {
            None => self.low |= bit,
            Some(at) => {
                if self.high.len() <= at {
                    self.high.resize(at + 1, 0);
                }
                self.high[at] |= bit;
            }
        }
    }

    /// Puts all of `other` in.
    pub fn add(&mut self, other: &Self) {
        self.low |= other.low;
        if self.high.len() < other.high.len() {
            self.high.resize(other.high.len(), 0);
        }
        for (word, more) in self.high.iter_mut().zip(&other.high) {
            *word |= more;
        }
    }

    /// Takes all of `other` out.
    pub fn remove(&mut self, other: &Self) {
        self.low &= !other.low;
        for (word, less) in self.high.iter_mut().zip(&other.high) {
            *word &= !less;
        }
        self.trim();
    }

    /// The devices, ascending.
    pub fn iter(&self) -> impl Iterator<Item = usize> {
        let words = std::iter::once(self.low).chain(self.high.iter().copied());
        words.enumerate().flat_map(|(at, word)| Bits(word).map(move |bit| at * WORD + bit))
    }

    /// The set as GPUs, where device `i` is that of GPU `i`.
    pub fn gpus(&self) -> GpuSet {
        let [low, _] = halves(self.low);
        GpuSet::from_bits(low)
    }

    fn word(&self, at: usize) -> u64 {
        match at.checked_sub(1) {
            None => self.low,
            Some(at) => self.high.get(at).copied().unwrap_or(0),
        }
    }

    fn trim(&mut self) {
        while self.high.last() == Some(&0) {
            self.high.pop();
        }
    }
}

/// The lower and the upper half of a word.
fn halves(word: u64) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = word.to_le_bytes();
    [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h])]
}

/// The set bits of a word, ascending.
struct Bits(u64);

impl Iterator for Bits {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        let bit = (self.0 != 0).then(|| self.0.trailing_zeros() as usize)?;
        self.0 &= self.0 - 1;
        Some(bit)
    }
}

impl From<GpuSet> for DeviceSet {
    fn from(gpus: GpuSet) -> Self {
        Self { low: u64::from(gpus.bits()), high: Vec::new() }
    }
}

impl FromIterator<usize> for DeviceSet {
    fn from_iter<T: IntoIterator<Item = usize>>(indices: T) -> Self {
        let mut set = Self::EMPTY;
        indices.into_iter().for_each(|index| set.insert(index));
        set
    }
}

impl BitAnd for &DeviceSet {
    type Output = DeviceSet;

    fn bitand(self, other: Self) -> DeviceSet {
        let high = self.high.iter().zip(&other.high).map(|(a, b)| a & b);
        let mut set = DeviceSet { low: self.low & other.low, high: high.collect() };
        set.trim();
        set
    }
}

impl BitOr for &DeviceSet {
    type Output = DeviceSet;

    fn bitor(self, other: Self) -> DeviceSet {
        let mut set = self.clone();
        set.add(other);
        set
    }
}

/// The devices of the left set that are not in the right one.
impl Sub for &DeviceSet {
    type Output = DeviceSet;

    fn sub(self, other: Self) -> DeviceSet {
        let mut set = self.clone();
        set.remove(other);
        set
    }
}

impl fmt::Display for DeviceSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let indices: Vec<String> = self.iter().map(|index| index.to_string()).collect();
        f.pad(&indices.join(","))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn indices() -> impl Strategy<Value = BTreeSet<usize>> {
        let index = prop_oneof![0usize..64, 0usize..2048];
        prop::collection::btree_set(index, 0..40)
    }

    fn bits(indices: &BTreeSet<usize>) -> DeviceSet {
        indices.iter().copied().collect()
    }

    proptest! {
        /// The standard library's sets are the oracle.
        #[test]
        fn the_arithmetic_is_that_of_sets(a in indices(), b in indices(), index in 0usize..2048) {
            let (x, y) = (bits(&a), bits(&b));
            prop_assert_eq!(&x | &y, bits(&(&a | &b)));
            prop_assert_eq!(&x & &y, bits(&(&a & &b)));
            prop_assert_eq!(&x - &y, bits(&(&a - &b)));
            prop_assert_eq!(x.is_subset(&y), a.is_subset(&b));
            prop_assert_eq!((x.len(), x.is_empty()), (a.len(), a.is_empty()));
            prop_assert_eq!(x.contains(index), a.contains(&index));
            prop_assert_eq!(x.iter().collect::<Vec<_>>(), a.iter().copied().collect::<Vec<_>>());
        }
    }

    #[test]
    fn gpus_are_the_first_devices() {
        let gpus: GpuSet = "0,3,31".parse().unwrap();
        assert_eq!(DeviceSet::from(gpus).gpus(), gpus);
        assert_eq!(DeviceSet::from(gpus).to_string(), "0,3,31");
        assert_eq!(DeviceSet::range(62, 66).to_string(), "62,63,64,65");
    }
}
