//! NICs of one machine as a bit mask.

use std::fmt;
use std::ops::BitOr;

use crate::machine::{MAX_NICS, Machine, PathClass};

/// NICs of one machine by index: bit `i` is NIC `i`. Written `0-3,8`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NicSet(u128);

impl NicSet {
    /// The set of a bit mask.
    pub const fn from_bits(bits: u128) -> Self {
        Self(bits)
    }

    /// The NICs nearest to a GPU; none if all are on the other side of the link between sockets.
    pub fn nearest(machine: &Machine, gpu: usize) -> Self {
        let nics = machine.nics().len().min(MAX_NICS);
        let to = |nic: usize| machine.paths().get(gpu, machine.gpus().len() + nic);
        let least = (0..nics).map(to).min().filter(|least| *least < PathClass::Sys);
        let near = (0..nics).filter(|nic| Some(to(*nic)) == least);
        Self(near.fold(0, |set, nic| set | 1 << nic))
    }

    /// Whether no NIC is in it.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether every NIC of it is in `other` too.
    pub const fn is_subset(self, other: Self) -> bool {
        self.0 & !other.0 == 0
    }

    /// The number of NICs.
    pub const fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// The indices in it, ascending.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        (0..128).filter(move |nic| self.0 >> nic & 1 == 1)
    }
}

impl BitOr for NicSet {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl fmt::Display for NicSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut nics = self.iter().peekable();
        let mut runs: Vec<String> = Vec::new();
        while let Some(first) = nics.next() {
            let mut last = first;
            while let Some(next) = nics.next_if_eq(&(last + 1)) {
                last = next;
            }
            runs.push(if first == last { first.to_string() } else { format!("{first}-{last}") });
        }
        f.pad(&runs.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::NicSet;

    #[test]
    fn runs_of_indices_are_written_as_ranges() {
        let text = |bits| NicSet::from_bits(bits).to_string();
        assert_eq!(text(0), "");
        assert_eq!(text(0b1_0000_1111), "0-3,8");
        assert_eq!(text(0b110), "1-2");
        assert_eq!(text(1 << 127 | 1), "0,127");
    }
}
