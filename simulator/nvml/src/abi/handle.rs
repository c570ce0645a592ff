//! Handles: numbers that look like pointers and are never followed, so that a stale or forged one is an error, not a crash.
//!
//! A device handle holds a mark, the GPU's index, and room for the ids of a GPU instance and a compute instance.

/// What `nvmlDevice_t` is here.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device(u64);

/// What `nvmlEventSet_t` is here.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventSet(u64);

const DEVICE_MARK: u64 = 0x6e76_6d6c_0000_0000;
const SET_MARK: u64 = 0x6e76_6573_0000_0000;
const MARK_MASK: u64 = 0xffff_ffff_0000_0000;

impl Device {
    /// The handle of a whole GPU.
    pub(crate) fn whole(index: usize) -> Self {
        // Bits 0 to 15 are for instances; a whole GPU has none. A machine has far fewer GPUs than 16 bits count.
        Self(DEVICE_MARK | (index as u64 & 0x7fff) << 16)
    }

    /// The index of the GPU, if this is the handle of a whole one.
    pub(crate) fn gpu(self) -> Option<usize> {
        let valid = self.0 & MARK_MASK == DEVICE_MARK && self.0 & 0xffff == 0;
        valid.then_some((self.0 >> 16 & 0x7fff) as usize)
    }
}

impl EventSet {
    /// The handle of set `number`.
    pub(crate) fn of(number: u64) -> Self {
        Self(SET_MARK | (number & !MARK_MASK))
    }

    /// The number of the set; 0, which no set has, for anything that is no handle of a set.
    pub(crate) fn number(self) -> u64 {
        if self.0 & MARK_MASK == SET_MARK {
            self.0 & !MARK_MASK
        } else {
            0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_handles_made_here_are_taken() {
        for index in [0, 1, 31] {
            assert_eq!(Device::whole(index).gpu(), Some(index));
        }
        assert_eq!(EventSet::of(7).number(), 7);
        for forged in [0, 1, 0x7f00_dead_beef, DEVICE_MARK | 1, SET_MARK | 7] {
            assert_eq!(Device(forged).gpu(), None);
        }
        assert_eq!(EventSet(DEVICE_MARK | 7).number(), 0);
    }
}
