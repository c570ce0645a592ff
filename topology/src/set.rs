//! A set of GPUs of one machine as a bit mask. Set arithmetic and the text form; ratings of sets are in
//! [`crate::choice`].

use std::fmt;
use std::ops::{BitAnd, BitOr, Sub};
use std::str::FromStr;

use crate::machine::{MAX_GPUS, Machine};

/// GPUs of one machine by index: bit `i` is GPU `i`. Written `0,2,3`; the empty set is written as nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuSet(u32);

impl GpuSet {
    /// No GPU.
    pub const EMPTY: Self = Self(0);

    /// The set of a bit mask.
    pub const fn from_bits(bits: u32) -> Self {
        Self(bits)
    }

    /// The bit mask.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// The GPUs `0..count`; a count beyond [`MAX_GPUS`] gives them all.
    pub const fn first(count: usize) -> Self {
        if count >= MAX_GPUS { Self(u32::MAX) } else { Self((1 << count) - 1) }
    }

    /// Every GPU of a machine.
    pub fn all(machine: &Machine) -> Self {
        Self::first(machine.gpus().len())
    }

    /// One GPU; none if the index is beyond what a set can hold.
    pub const fn single(index: usize) -> Self {
        if index < MAX_GPUS { Self(1 << index) } else { Self(0) }
    }

    /// The number of GPUs.
    pub const fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Whether no GPU is in it.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether GPU `index` is in it.
    pub const fn contains(self, index: usize) -> bool {
        self.0 & Self::single(index).0 != 0
    }

    /// Whether every GPU of it is in `other` too.
    pub const fn is_subset(self, other: Self) -> bool {
        self.0 & !other.0 == 0
    }

    /// The same set with GPU `index` in it.
    #[must_use]
    pub const fn with(self, index: usize) -> Self {
        Self(self.0 | Self::single(index).0)
    }

    /// The lowest index in it.
    pub fn lowest(self) -> Option<usize> {
        (!self.is_empty()).then(|| self.0.trailing_zeros() as usize)
    }

    /// The indices in it, ascending.
    pub fn iter(self) -> Indices {
        Indices(self.0)
    }

    /// Every subset of `size` GPUs, by ascending bit mask. One empty set for size 0, nothing for a size beyond the
    /// set's own.
    pub fn subsets(self, size: usize) -> Subsets {
        Subsets::new(self, size)
    }
}

/// The indices of a set, ascending.
#[derive(Debug, Clone)]
pub struct Indices(u32);

impl Iterator for Indices {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        let index = GpuSet(self.0).lowest()?;
        self.0 &= self.0 - 1;
        Some(index)
    }
}

/// The subsets of one size of a set, by ascending bit mask.
#[derive(Debug, Clone)]
pub struct Subsets {
    of: u32,
    next: Option<u32>,
}

impl Subsets {
    fn new(set: GpuSet, size: usize) -> Self {
        let lowest: GpuSet = set.iter().take(size).collect();
        Self { of: set.0, next: (size <= set.len()).then_some(lowest.0) }
    }
}

impl Iterator for Subsets {
    type Item = GpuSet;

    fn next(&mut self) -> Option<GpuSet> {
        let current = self.next?;
        self.next = following(current, self.of);
        Some(GpuSet(current))
    }
}

/// The next larger submask of `of` with as many bits: the lowest bit that can move up moves to the next place of `of`,
/// and the bits below it fall to the bottom.
fn following(current: u32, of: u32) -> Option<u32> {
    let mut passed = 0;
    let mut places = of;
    while places != 0 {
        let place = places & places.wrapping_neg();
        places &= places - 1;
        let above = places & places.wrapping_neg();
        if current & place == 0 {
            continue;
        }
        if above != 0 && current & above == 0 {
            let below = GpuSet(of & (place - 1)).iter().take(passed).collect::<GpuSet>();
            return Some(current & !(above - 1) & !(below.0 | place) | above | below.0);
        }
        passed += 1;
    }
    None
}

impl FromIterator<usize> for GpuSet {
    fn from_iter<T: IntoIterator<Item = usize>>(indices: T) -> Self {
        indices.into_iter().fold(Self::EMPTY, Self::with)
    }
}

impl IntoIterator for GpuSet {
    type Item = usize;
    type IntoIter = Indices;

    fn into_iter(self) -> Indices {
        self.iter()
    }
}

impl BitAnd for GpuSet {
    type Output = Self;

    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

impl BitOr for GpuSet {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// The GPUs of the left set that are not in the right one.
impl Sub for GpuSet {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

impl fmt::Display for GpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let indices: Vec<String> = self.iter().map(|index| index.to_string()).collect();
        f.pad(&indices.join(","))
    }
}

/// An error in a written set of GPUs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GpuSetError {
    /// Something between the commas is no GPU index.
    #[error("{word:?} is no GPU index; write indices and ranges with commas, such as 0,2,3 or 0-3")]
    Word {
        /// The text found.
        word: String,
    },
    /// An index beyond what any machine may have.
    #[error("GPU {index} is beyond the most a machine may have, {MAX_GPUS}")]
    TooLarge {
        /// The index.
        index: u32,
    },
    /// An index written twice.
    #[error("GPU {index} is named twice")]
    Twice {
        /// The index.
        index: usize,
    },
}

impl FromStr for GpuSet {
    type Err = GpuSetError;

    /// Reads `0,2,3`, ranges `0-3` and mixtures, spaces allowed. Nothing at all is the empty set.
    fn from_str(text: &str) -> Result<Self, GpuSetError> {
        if text.trim().is_empty() {
            return Ok(Self::EMPTY);
        }
        let mut set = Self::EMPTY;
        for part in text.split(',') {
            let (from, to) = range(part.trim())?;
            for index in from..=to {
                if set.contains(index) {
                    return Err(GpuSetError::Twice { index });
                }
                set = set.with(index);
            }
        }
        Ok(set)
    }
}

fn range(part: &str) -> Result<(usize, usize), GpuSetError> {
    let refused = || GpuSetError::Word { word: part.to_owned() };
    let index = |word: &str| {
        let digits = !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
        let index: u32 = digits.then(|| word.parse().ok()).flatten().ok_or_else(refused)?;
        match usize::try_from(index) {
            Ok(index) if index < MAX_GPUS => Ok(index),
            _ => Err(GpuSetError::TooLarge { index }),
        }
    };
    match part.split_once('-') {
        None => index(part).map(|index| (index, index)),
        Some((from, to)) => {
            let (from, to) = (index(from.trim())?, index(to.trim())?);
            if from <= to { Ok((from, to)) } else { Err(refused()) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn set_written_and_read_is_the_same() {
        for (text, written) in [("0,2,3", "0,2,3"), (" 3 , 0", "0,3"), ("0-2,31", "0,1,2,31"), ("", "")] {
            assert_eq!(text.parse::<GpuSet>().unwrap().to_string(), written);
        }
    }

    #[test]
    fn bad_list_is_refused_with_allowed_form() {
        let refused = |text: &str| text.parse::<GpuSet>().unwrap_err().to_string();
        assert_eq!(
            refused("0,x"),
            "\"x\" is no GPU index; write indices and ranges with commas, such as 0,2,3 or 0-3"
        );
        assert_eq!(refused("32"), "GPU 32 is beyond the most a machine may have, 32");
        assert_eq!(refused("0,1,0"), "GPU 0 is named twice");
        for text in [",", "3-1", "-1", "+1", "1,", "99999999999", "0-"] {
            assert!(text.parse::<GpuSet>().is_err(), "{text}");
        }
    }

    #[test]
    fn subsets_are_complete_and_ascending() {
        for bits in [0b0, 0b1, 0b1011_0110, 0b1111_1111, 0x8000_0001] {
            let set = GpuSet::from_bits(bits);
            for size in 0..=set.len() + 1 {
                let listed: Vec<GpuSet> = set.subsets(size).collect();
                let naive: Vec<GpuSet> = if bits < 256 {
                    (0..=bits)
                        .map(GpuSet::from_bits)
                        .filter(|subset| subset.len() == size && subset.is_subset(set))
                        .collect()
                } else {
                    [0, 1, 0x8000_0000, 0x8000_0001]
                        .map(GpuSet::from_bits)
                        .into_iter()
                        .filter(|subset| subset.len() == size)
                        .collect()
                };
                assert_eq!(listed, naive, "{set}, size {size}");
            }
        }
    }
}
