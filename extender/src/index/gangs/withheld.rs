//! Reservations of decided gangs that keep devices from others. Without them a user would see devices taken and no pod
//! that has them.

use std::collections::BTreeMap;
use std::fmt;

use gantry_gang::GangKey;
use serde::Serialize;

use crate::index::Index;
use crate::index::node::Node;

/// Reservations of one decided gang that none of its bound pods has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PlacesKept {
    /// The gang: `namespace/name`.
    pub gang: String,
    /// How many.
    pub places: usize,
}

impl fmt::Display for PlacesKept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.places {
            1 => f.write_str("1 place is")?,
            places => write!(f, "{places} places are")?,
        }
        write!(f, " kept for gang {}", self.gang)
    }
}

impl Index {
    /// Reservations on all nodes for decided gangs other than `but`, by gang.
    pub(super) fn places_kept(&self, but: &GangKey) -> Vec<PlacesKept> {
        self.kept_among(self.nodes.iter().map(|(_, node)| node), Some(but))
    }

    /// The same on one node.
    pub(in crate::index) fn places_kept_on(&self, node: &Node, but: Option<&GangKey>) -> Vec<PlacesKept> {
        self.kept_among(std::iter::once(node), but)
    }

    fn kept_among<'n>(
        &self,
        nodes: impl Iterator<Item = &'n Node>,
        but: Option<&GangKey>,
    ) -> Vec<PlacesKept> {
        let mut places: BTreeMap<&GangKey, usize> = BTreeMap::new();
        for kept in nodes.flat_map(|node| node.occupancy().gang_reservations()) {
            *places.entry(&kept.gang).or_default() += 1;
        }
        let decided = |gang: &GangKey| {
            let view = self.gangs.core.view(gang);
            view.is_some_and(|view| view.is_decided() || view.is_awaiting())
        };
        let others = places.into_iter().filter(|(gang, _)| Some(*gang) != but && decided(gang));
        let named = others.map(|(gang, places)| PlacesKept { gang: gang.to_string(), places });
        named.collect()
    }
}
