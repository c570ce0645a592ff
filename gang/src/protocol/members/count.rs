//! How many members there are of each standing, and what those numbers come to.

use super::kept::Class;

const CLASSES: usize = 13;

/// How many members there are of each class.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::protocol) struct Count([u32; CLASSES]);

impl Count {
    pub(super) fn add(&mut self, class: Class) {
        self.0[class as usize] += 1;
    }

    pub(super) fn remove(&mut self, class: Class) {
        let count = &mut self.0[class as usize];
        *count = count.saturating_sub(1);
    }

    pub(in crate::protocol) fn of(&self, class: Class) -> u32 {
        self.0[class as usize]
    }

    /// Members that exist and do not count, for a reason that may pass.
    pub(in crate::protocol) fn kept_back(&self) -> u32 {
        self.of(Class::Faulty) + self.of(Class::Foreign) + self.of(Class::Elsewhere)
    }

    /// Members that count towards the quorum by their existence.
    pub(in crate::protocol) fn exist(&self) -> u32 {
        self.of(Class::Waiting) + self.placed()
    }

    /// Members that have a place or need none.
    pub(in crate::protocol) fn placed(&self) -> u32 {
        self.of(Class::Coming) + self.ready()
    }

    /// Members that nobody has to wait for at the barrier.
    pub(in crate::protocol) fn ready(&self) -> u32 {
        self.of(Class::Arrived) + self.of(Class::Following) + self.settled()
    }

    /// Members that are as good as bound.
    pub(in crate::protocol) fn settled(&self) -> u32 {
        self.of(Class::Light) + self.of(Class::LightBound) + self.of(Class::Bound) + self.of(Class::Completed)
    }

    /// Members that are bound, or have ended well.
    pub(in crate::protocol) fn began(&self) -> u32 {
        self.bound() + self.of(Class::Completed)
    }

    /// Members that are bound.
    pub(in crate::protocol) fn bound(&self) -> u32 {
        self.of(Class::LightBound) + self.of(Class::Bound)
    }

    /// Members of this life that have not ended and are not being deleted.
    pub(in crate::protocol) fn alive(&self) -> u32 {
        self.0.iter().sum::<u32>() - self.of(Class::Old) - self.of(Class::Lost) - self.of(Class::Completed)
    }
}
