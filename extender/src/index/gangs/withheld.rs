//! Reservations of decided gangs that keep devices from others. Without them a user would see devices taken and no pod
//! that has them.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use gantry_api::ResourceName;
use gantry_gang::GangKey;
use gantry_gang::protocol::{Holder, PlanRequest, Refusal, Reserved};
use serde::{Deserialize, Serialize};

use crate::index::Index;
use crate::index::node::Node;

/// Reservations of one decided gang that none of its bound pods has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
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
    /// Adds to a refusal because of reserved devices the gangs that have them.
    pub(super) fn with_holders(&self, refused: Refusal, wanted: &PlanRequest) -> Refusal {
        let Refusal::DoesNotFit(mut shortage) = refused else {
            return refused;
        };
        if shortage.reserved.is_some() {
            let holders = self.holders(wanted);
            // Its own reservations are for its own members.
            let is_others = !holders.is_empty() || self.reservations.are_any();
            shortage.reserved = is_others.then_some(Reserved { holders });
        }
        Refusal::DoesNotFit(shortage)
    }

    /// Gangs other than the one that is planned with reservations of devices that it asks for, the most first.
    fn holders(&self, wanted: &PlanRequest) -> Vec<Holder> {
        let shapes = self.gangs.shapes.list();
        let members = wanted.members.iter().filter_map(|member| shapes.get(member.shape.0 as usize));
        let asked = members.flat_map(|shape| &shape.request.asks).map(|ask| &ask.resource).collect();
        self.holders_of(&asked, Some(&wanted.gang))
    }

    /// Gangs other than `but` with reservations of devices of these resources, the most first.
    pub(crate) fn holders_of(&self, asked: &BTreeSet<&ResourceName>, but: Option<&GangKey>) -> Vec<Holder> {
        let mut devices: BTreeMap<&GangKey, usize> = BTreeMap::new();
        for kept in self.nodes.iter().flat_map(|(_, node)| node.occupancy().gang_reservations()) {
            let of_asked = kept.devices.iter().filter(|(resource, _)| asked.contains(resource));
            let count: usize = of_asked.map(|(_, devices)| devices.len()).sum();
            if count > 0 && Some(&*kept.gang) != but {
                *devices.entry(&kept.gang).or_default() += count;
            }
        }
        let holder = |(gang, devices): (&GangKey, usize)| Holder {
            gang: gang.to_string().into(),
            devices,
            until: self.gangs.core.reserved_until(gang, self.now).filter(|_| !self.gangs.only_looks),
        };
        let mut holders: Vec<Holder> = devices.into_iter().map(holder).collect();
        holders.sort_by(|a, b| (Reverse(a.devices), &a.gang).cmp(&(Reverse(b.devices), &b.gang)));
        holders
    }

    /// Refused gangs are planned again where the gangs that their refusal names have no reservation any more.
    pub(super) fn check_holders(&mut self) {
        let named = |refusal: &Refusal| match refusal {
            Refusal::DoesNotFit(shortage) => shortage.reserved.as_ref().map(|of| of.holders.clone()),
            _ => None,
        };
        let refusals = self.gangs.core.views().filter_map(|view| named(view.refusal()?));
        let refusals: Vec<Vec<Holder>> = refusals.collect();
        if refusals.is_empty() {
            return;
        }
        let reserved: BTreeSet<String> = self
            .nodes
            .iter()
            .flat_map(|(_, node)| node.occupancy().gang_reservations())
            .map(|kept| kept.gang.to_string())
            .collect();
        let is_outdated = |holders: &Vec<Holder>| {
            holders.is_empty() || holders.iter().any(|holder| !reserved.contains(&*holder.gang))
        };
        if refusals.iter().any(is_outdated) {
            self.gangs.reshaped();
        }
    }

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
