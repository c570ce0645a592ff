//! A whole GPU cut anew: what the pieces are, where each may lie beside the others, which instances stay what they were.

use std::str::FromStr;

use gantry_topology::mig::{MigLayout, Product as Profiles, Profile};
use gantry_topology::{GpuInstance, Mig};

use super::{MigRefusal, create_compute, create_gpu, instance};
use crate::facts::GpuFacts;

/// `pieces` in place of what `before` has.
pub(super) fn recut(
    gpu: &GpuFacts,
    profiles: &Profiles,
    before: &Mig,
    pieces: &[Piece],
) -> Result<Mig, MigRefusal> {
    let mut fresh = Mig { enabled: true, instances: Vec::new() };
    let starts = arrange(profiles, pieces)?;
    for (piece, start) in pieces.iter().zip(starts) {
        let profile = named(profiles, &piece.profile)?;
        let id = create_gpu(profiles, &mut fresh, profile.id, Some(start))?;
        let whole = [profile.compute];
        let compute = if piece.compute.is_empty() { &whole[..] } else { &piece.compute };
        let made = instance(&mut fresh, id)?;
        for slices in compute {
            create_compute(gpu, profiles, made, *slices, None)?;
        }
        let names = |instance: &GpuInstance| -> Vec<String> {
            let compute = instance.compute.iter();
            compute.map(|compute| compute.profile.clone()).collect()
        };
        let same = |old: &&GpuInstance| {
            old.id == made.id
                && old.profile == made.profile
                && old.start == made.start
                && names(old) == names(made)
        };
        if let Some(old) = before.instances.iter().find(same) {
            made.clone_from(old);
        }
    }
    Ok(fresh)
}

/// Where each piece starts: where it says, else anywhere that leaves room for the others.
fn arrange(profiles: &Profiles, pieces: &[Piece]) -> Result<Vec<u8>, MigRefusal> {
    let mut cut = MigLayout::empty(profiles);
    let mut open: Vec<(usize, &Profile)> = Vec::new();
    let mut starts = vec![0; pieces.len()];
    for (position, piece) in pieces.iter().enumerate() {
        let profile = named(profiles, &piece.profile)?;
        match piece.start {
            Some(start) => {
                cut.add(profile, start)?;
                if let Some(place) = starts.get_mut(position) {
                    *place = start;
                }
            }
            None => open.push((position, profile)),
        }
    }
    // The largest have the fewest places to go.
    open.sort_by_key(|(_, profile)| std::cmp::Reverse(profile.size));
    if place(&cut, &open, &mut starts) {
        return Ok(starts);
    }
    let names: Vec<&str> = pieces.iter().map(|piece| piece.profile.as_str()).collect();
    Err(MigRefusal::NoRoom(format!("{} cannot be cut into {}", profiles.name, names.join(", "))))
}

fn place(cut: &MigLayout<'_>, open: &[(usize, &Profile)], starts: &mut [u8]) -> bool {
    let Some(((position, profile), rest)) = open.split_first() else {
        return true;
    };
    cut.possible(profile).into_iter().any(|start| {
        let mut next = cut.clone();
        let fits = next.add(profile, start).is_ok() && place(&next, rest, starts);
        if fits && let Some(place) = starts.get_mut(*position) {
            *place = start;
        }
        fits
    })
}

fn named<'p>(profiles: &'p Profiles, name: &str) -> Result<&'p Profile, MigRefusal> {
    profiles.profile(name).ok_or_else(|| {
        let known: Vec<&str> = profiles.profiles.iter().map(|profile| profile.name.as_str()).collect();
        MigRefusal::Invalid(format!("{} has no profile {name:?}; it has {}", profiles.name, known.join(", ")))
    })
}

/// One GPU instance of a new cut. As text: `3g.20gb`, `3g.20gb@4` with the unit it starts at, `3g.20gb@4=1c,2c` with compute
/// instances of one and two slices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The profile, e.g. `3g.20gb`.
    pub profile: String,
    /// The first memory unit; anywhere it fits if absent.
    pub start: Option<u8>,
    /// Slices of each compute instance; one with all of them if empty.
    pub compute: Vec<u8>,
}

/// A text that is no piece of a cut.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?}: write a profile, with @ and the unit it starts at, with = and its compute instances, as in 3g.20gb@4=1c,2c"
)]
pub struct PieceError(String);

impl FromStr for Piece {
    type Err = PieceError;

    fn from_str(text: &str) -> Result<Self, PieceError> {
        let wrong = || PieceError(text.to_owned());
        let (rest, compute) = text.split_once('=').unwrap_or((text, ""));
        let (profile, start) = match rest.split_once('@') {
            Some((profile, start)) => (profile, Some(start.parse().map_err(|_| wrong())?)),
            None => (rest, None),
        };
        let slices = |part: &str| part.strip_suffix('c').and_then(|count| count.parse().ok());
        let compute = compute
            .split(',')
            .filter(|part| !part.is_empty())
            .map(|part| slices(part).ok_or_else(wrong))
            .collect::<Result<Vec<u8>, PieceError>>()?;
        if profile.is_empty() {
            return Err(wrong());
        }
        Ok(Self { profile: profile.to_owned(), start, compute })
    }
}
