//! From the MIG instances that a GPU has to those that it is to have: which instances to destroy, and which to create
//! where. Pure.
//!
//! Every legal arrangement of the wanted instances is considered. The one that keeps the most present instances is
//! chosen, so that a GPU that already has them is left alone. Every part of a legal layout is legal, so instances that
//! are created one by one at these places never lack room.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::{
    MigLayout, MigLayoutError, Product, Profile, compute_placements, compute_slices_of, legal_compute,
};

/// A GPU instance that a GPU has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PresentInstance {
    /// The driver's id of it.
    pub id: u32,
    /// Id of its profile.
    pub profile: u32,
    /// First memory unit.
    pub start: u8,
    /// Slices of each of its compute instances.
    pub compute: Vec<u8>,
    /// Whether something runs in it: it is never destroyed.
    pub held: bool,
}

/// A GPU instance to create.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewInstance {
    /// Name of its profile.
    pub name: String,
    /// Id of its profile.
    pub profile: u32,
    /// First memory unit.
    pub start: u8,
    /// Memory units.
    pub size: u8,
    /// Slices of each compute instance, the largest first.
    pub compute: Vec<u8>,
}

/// The way from the present instances to the wanted ones: first destroy, then create, in this order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MigPlan {
    /// Ids of the instances to destroy.
    pub destroy: Vec<u32>,
    /// The instances to create.
    pub create: Vec<NewInstance>,
}

impl MigPlan {
    /// Whether the GPU already has what it is to have.
    pub fn is_empty(&self) -> bool {
        self.destroy.is_empty() && self.create.is_empty()
    }
}

/// Why a GPU cannot get the wanted MIG devices.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MigPlanError {
    /// The product has no such profile.
    #[error("{error}; it has {}", .there.join(", "))]
    NoSuchProfile {
        /// The profile and the product.
        error: MigLayoutError,
        /// Names of all profiles.
        there: Vec<String>,
    },
    /// GPU instances of the profile have no such compute instances.
    #[error("{profile} has no compute instances of {slices} slices: write {}", .allowed.join(", "))]
    NoSuchPart {
        /// The profile.
        profile: String,
        /// The slices that are not possible.
        slices: String,
        /// The names of the possible MIG devices.
        allowed: Vec<String>,
    },
    /// The wanted instances do not fit on one GPU.
    #[error(
        "{product} cannot hold {wanted}: beside {beside}, no placement is left for {profile}, which may start at {}; \
         alone, a GPU holds {most} of it", list(.starts)
    )]
    Impossible {
        /// The product.
        product: String,
        /// What is wanted.
        wanted: String,
        /// The most that could be placed, with the placements.
        beside: String,
        /// The first profile without a placement.
        profile: String,
        /// Where its instances may start.
        starts: Vec<u8>,
        /// The most instances of it on an empty GPU.
        most: u8,
    },
    /// The instances in use leave no room.
    #[error("{} must stay, because it is in use, and leaves no room for {wanted}", .held.join(", "))]
    Held {
        /// The instances that stay, with their placements.
        held: Vec<String>,
        /// What is wanted.
        wanted: String,
    },
}

fn list(starts: &[u8]) -> String {
    let starts: Vec<String> = starts.iter().map(u8::to_string).collect();
    starts.join(", ")
}

/// A wanted GPU instance.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Piece {
    /// The largest first: they have the fewest places.
    size: Reverse<u8>,
    /// Position of its profile.
    profile: usize,
    compute: Vec<u8>,
}

/// The plan for a GPU of `product` that has the instances `present`, and is to have the MIG devices `wanted`: numbers by
/// profile, such as `1g.5gb`, or `1c.3g.20gb` for compute instances that share GPU instances.
///
/// # Errors
/// The wanted devices are not possible, or not beside the instances in use.
pub fn plan(
    product: &Product,
    present: &[PresentInstance],
    wanted: &BTreeMap<String, u8>,
) -> Result<MigPlan, MigPlanError> {
    let pieces = pieces(product, wanted)?;
    let mut search =
        Search { product, present, pieces: &pieces, starts: Vec::new(), furthest: Vec::new(), best: None };
    search.place(&MigLayout::empty(product), 0);
    let described = describe(wanted);
    let Some((_, starts)) = search.best else {
        let is_possible = search.furthest.len() == pieces.len();
        if is_possible {
            let held =
                present.iter().filter(|instance| instance.held).map(|instance| name_of(product, instance));
            return Err(MigPlanError::Held { held: held.collect(), wanted: described });
        }
        return Err(impossible(product, &pieces, &search.furthest, described));
    };
    let kept = kept(product, present, &pieces, &starts);
    let destroy = present.iter().filter(|instance| !kept.iter().any(|(_, id)| *id == instance.id));
    let create = pieces.iter().zip(&starts).enumerate();
    let create = create.filter(|(at, _)| !kept.iter().any(|(piece, _)| piece == at));
    Ok(MigPlan {
        destroy: destroy.map(|instance| instance.id).collect(),
        create: create
            .filter_map(|(_, (piece, start))| {
                let profile = product.profiles.get(piece.profile)?;
                Some(NewInstance {
                    name: profile.name.clone(),
                    profile: profile.id,
                    start: *start,
                    size: profile.size,
                    compute: piece.compute.clone(),
                })
            })
            .collect(),
    })
}

/// The GPU instances for the wanted devices. Compute instances of one profile share as few instances as hold them.
fn pieces(product: &Product, wanted: &BTreeMap<String, u8>) -> Result<Vec<Piece>, MigPlanError> {
    let mut pieces = Vec::new();
    let mut parts: BTreeMap<usize, Vec<u8>> = BTreeMap::new();
    for (name, count) in wanted {
        let instance = name.split_once("c.").map_or(name.as_str(), |(_, instance)| instance);
        let found = product.profiles.iter().position(|profile| profile.name == instance);
        let Some((at, profile)) = found.and_then(|at| Some((at, product.profiles.get(at)?))) else {
            return Err(MigPlanError::NoSuchProfile {
                error: super::layout::no_such(product, instance),
                there: product.profiles.iter().map(|profile| profile.name.clone()).collect(),
            });
        };
        let slices = compute_slices_of(name, &profile.name, profile.compute)
            .ok_or_else(|| no_such_part(profile, name))?;
        let all = std::iter::repeat_n(slices, usize::from(*count));
        if slices == profile.compute {
            pieces.extend(all.map(|slices| Piece {
                size: Reverse(profile.size),
                profile: at,
                compute: vec![slices],
            }));
        } else {
            parts.entry(at).or_default().extend(all);
        }
    }
    for (at, mut slices) in parts {
        let Some(profile) = product.profiles.get(at) else { continue };
        slices.sort_unstable_by_key(|slices| Reverse(*slices));
        let mut shared: Vec<Vec<u8>> = Vec::new();
        for slices in slices {
            let fits = |compute: &&mut Vec<u8>| {
                let with: Vec<u8> = compute.iter().copied().chain([slices]).collect();
                compute_placements(profile.compute, &with).is_some()
            };
            match shared.iter_mut().find(fits) {
                Some(compute) => compute.push(slices),
                None => shared.push(vec![slices]),
            }
        }
        let size = Reverse(profile.size);
        pieces.extend(shared.into_iter().map(|compute| Piece { size, profile: at, compute }));
    }
    pieces.sort();
    Ok(pieces)
}

fn no_such_part(profile: &Profile, name: &str) -> MigPlanError {
    let slices = legal_compute(profile.compute).filter(|slices| *slices < profile.compute);
    let parts = slices.map(|slices| format!("{slices}c.{}", profile.name));
    MigPlanError::NoSuchPart {
        profile: profile.name.clone(),
        slices: name.split_once("c.").map_or_else(String::new, |(slices, _)| slices.to_owned()),
        allowed: std::iter::once(profile.name.clone()).chain(parts).collect(),
    }
}

/// The search for the arrangement that keeps the most.
struct Search<'a> {
    product: &'a Product,
    present: &'a [PresentInstance],
    pieces: &'a [Piece],
    /// Starts of the first pieces.
    starts: Vec<u8>,
    /// The longest `starts` so far, whatever is held.
    furthest: Vec<u8>,
    /// The best arrangement, and how many instances it keeps.
    best: Option<(usize, Vec<u8>)>,
}

impl Search<'_> {
    /// Whether nothing can be better than what was found.
    fn is_done(&self) -> bool {
        self.best.as_ref().is_some_and(|(kept, _)| *kept == self.pieces.len().min(self.present.len()))
    }

    fn place(&mut self, layout: &MigLayout<'_>, at: usize) {
        if self.starts.len() > self.furthest.len() {
            self.furthest.clone_from(&self.starts);
        }
        let (product, pieces) = (self.product, self.pieces);
        let Some(piece) = pieces.get(at) else {
            let kept = kept(product, self.present, pieces, &self.starts);
            let mut held = self.present.iter().filter(|instance| instance.held);
            let keeps_held = held.all(|instance| kept.iter().any(|(_, id)| *id == instance.id));
            if keeps_held && self.best.as_ref().is_none_or(|(most, _)| kept.len() > *most) {
                self.best = Some((kept.len(), self.starts.clone()));
            }
            return;
        };
        let Some(profile) = product.profiles.get(piece.profile) else { return };
        // Equal pieces are interchangeable: they lie in the order of their starts.
        let before = at.checked_sub(1).filter(|before| pieces.get(*before) == Some(piece));
        let from = before.and_then(|before| self.starts.get(before)).map_or(0, |start| start + 1);
        for start in layout.possible(profile).into_iter().filter(|start| *start >= from) {
            let mut next = layout.clone();
            if next.add(profile, start).is_ok() {
                self.starts.push(start);
                self.place(&next, at + 1);
                self.starts.pop();
            }
            if self.is_done() {
                return;
            }
        }
    }
}

/// The pieces that are there already, each with the id of the instance.
fn kept(
    product: &Product,
    present: &[PresentInstance],
    pieces: &[Piece],
    starts: &[u8],
) -> Vec<(usize, u32)> {
    let mut kept = Vec::new();
    for (at, (piece, start)) in pieces.iter().zip(starts).enumerate() {
        let profile = product.profiles.get(piece.profile).map(|profile| profile.id);
        let same = |instance: &&PresentInstance| {
            let mut compute = instance.compute.clone();
            compute.sort_unstable_by_key(|slices| Reverse(*slices));
            instance.start == *start && Some(instance.profile) == profile && compute == piece.compute
        };
        if let Some(instance) = present.iter().find(same) {
            kept.push((at, instance.id));
        }
    }
    kept
}

fn impossible(product: &Product, pieces: &[Piece], placed: &[u8], wanted: String) -> MigPlanError {
    let profile = |piece: &Piece| product.profiles.get(piece.profile);
    let beside: Vec<String> = pieces
        .iter()
        .zip(placed)
        .filter_map(|(piece, start)| Some(format!("{} at {start}", profile(piece)?.name)))
        .collect();
    let missing = pieces.get(placed.len()).and_then(profile);
    MigPlanError::Impossible {
        product: product.name.clone(),
        wanted,
        beside: if beside.is_empty() { "nothing".to_owned() } else { beside.join(", ") },
        profile: missing.map_or_else(String::new, |profile| profile.name.clone()),
        starts: missing.map_or_else(Vec::new, |profile| profile.starts.clone()),
        most: missing.map_or(0, |profile| MigLayout::empty(product).remaining(profile)),
    }
}

/// Such as `2x 1g.5gb, 1x 3g.20gb`.
fn describe(wanted: &BTreeMap<String, u8>) -> String {
    let all: Vec<String> = wanted.iter().map(|(name, count)| format!("{count}x {name}")).collect();
    if all.is_empty() { "no MIG device".to_owned() } else { all.join(", ") }
}

fn name_of(product: &Product, instance: &PresentInstance) -> String {
    let name = product.profile_by_id(instance.profile).map_or("an instance", |profile| profile.name.as_str());
    format!("{name} at {}", instance.start)
}

#[cfg(test)]
mod tests;
