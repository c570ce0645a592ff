//! Members in slices: so many together in one domain of a level, whole slices over as few domains as can be. Of one shape.

use gantry_gang::DomainIx;

use super::fill::Filler;
use super::split::{Part, split};

/// Slices of a gang.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slices {
    /// Members of a slice.
    pub(super) size: u32,
    /// The level of which one domain holds a slice.
    pub(super) level: usize,
}

impl Filler<'_, '_> {
    /// The most members that fit in a domain above the slices' level, no slice broken: whole slices, and perhaps a last one that is smaller.
    pub(super) fn takes_sliced(&self, domain: DomainIx, slices: Slices, members: u32) -> u32 {
        let blocks = self.blocks(domain, slices.level);
        if let [(_, room)] = blocks[..] {
            return room.min(members);
        }
        let whole: u32 = blocks
            .iter()
            .fold(0, |sum, (_, room)| sum.saturating_add(room / slices.size));
        let wanted = members / slices.size;
        if whole > wanted {
            return members;
        }
        let rest = blocks
            .iter()
            .map(|(_, room)| room % slices.size)
            .max()
            .unwrap_or(0);
        let last = if whole == wanted { members % slices.size } else { 0 };
        whole * slices.size + if rest >= last { last } else { 0 }
    }

    /// Lays members in slices on the nodes of a domain; `None` if they do not fit so.
    pub(super) fn fill_sliced(&mut self, domain: DomainIx, slices: Slices, members: u32) -> Option<()> {
        let blocks = self.blocks(domain, slices.level);
        if let [(block, _)] = blocks[..] {
            return self.fill(block, members);
        }
        self.fill_slices(domain, slices, members / slices.size)?;
        let rest = members % slices.size;
        if rest == 0 {
            return Some(());
        }
        // What is left of the members goes where the gang is, or else where it leaves least.
        let blocks = self.blocks(domain, slices.level);
        let fitting = blocks.into_iter().filter(|(_, room)| *room >= rest);
        let (block, _) = fitting.min_by_key(|(block, room)| (!self.begun.are_in(*block), *room, *block))?;
        self.fill(block, rest)
    }

    fn fill_slices(&mut self, domain: DomainIx, slices: Slices, count: u32) -> Option<()> {
        if count == 0 {
            return Some(());
        }
        let of = self.survey.domain(domain)?;
        if of.level.is_some_and(|level| level >= slices.level) || of.children.is_empty() {
            return self.fill(domain, count * slices.size);
        }
        let parts: Vec<Part> = of
            .children
            .iter()
            .map(|child| {
                let blocks = self.blocks(*child, slices.level);
                let room = blocks
                    .iter()
                    .fold(0, |sum: u32, (_, room)| sum.saturating_add(room / slices.size));
                Part { room, fresh: false }
            })
            .collect();
        for (child, count) in of.children.iter().zip(split(&parts, count)?) {
            self.fill_slices(*child, slices, count)?;
        }
        Some(())
    }

    /// The domains of a level within a domain, and how many members each takes. One that lies below the level by itself, for want of labels,
    /// is one too.
    fn blocks(&self, domain: DomainIx, level: usize) -> Vec<(DomainIx, u32)> {
        let room = |domain: DomainIx| self.sums.get(domain.0 as usize).copied().unwrap_or(0);
        let mut blocks = Vec::new();
        let mut open = vec![domain];
        while let Some(next) = open.pop() {
            match self.survey.domain(next) {
                Some(of) if of.level.is_none_or(|own| own < level) && !of.children.is_empty() => {
                    open.extend(of.children.iter().rev());
                }
                Some(_) => blocks.push((next, room(next))),
                None => {}
            }
        }
        blocks
    }
}
