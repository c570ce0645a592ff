//! What the end of pods costs.

use std::iter::Sum;
use std::ops::{Add, AddAssign};

/// The loss by the end of some pods, the first field first. Adds up over pods, but for `gangs` and `needed`, which grow
/// when a gang ends as a whole.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Loss {
    pub(super) devices: u32,
    pub(super) pods: u32,
    /// Gangs that end as a whole.
    pub(super) gangs: u32,
    /// Pods that are not beyond the minimum of their gang.
    pub(super) needed: u32,
    /// Pods without a checkpoint.
    pub(super) unsaved: u32,
    /// Positions in the order in which pods go.
    pub(super) order: u64,
}

impl Add for Loss {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            devices: self.devices.saturating_add(other.devices),
            pods: self.pods.saturating_add(other.pods),
            gangs: self.gangs.saturating_add(other.gangs),
            needed: self.needed.saturating_add(other.needed),
            unsaved: self.unsaved.saturating_add(other.unsaved),
            order: self.order.saturating_add(other.order),
        }
    }
}

impl AddAssign for Loss {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sum for Loss {
    fn sum<I: Iterator<Item = Self>>(losses: I) -> Self {
        losses.fold(Self::default(), Add::add)
    }
}
