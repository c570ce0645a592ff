//! Reservations of decided gangs that keep devices from others. Without them a user would see devices taken and no pod
//! that has them.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::Arc;

use gantry_api::ResourceName;
use gantry_gang::protocol::{Gangs, Holder, IdleReservations, PlanRequest, Refusal};
use gantry_gang::{GangKey, Needs};
use gantry_planner::decide::FilterVerdict;
use gantry_planner::input::{PlacementRules, Shape};
use gantry_planner::request::{Ask, Request};
use gantry_planner::snapshot::NodeIx;
use serde::{Deserialize, Serialize};

use super::plan_input::PlanSource;
use super::reservation_tracker::ReservationTracker;
use crate::index::facts::Facts;
use crate::index::node::Node;
use crate::index::node_resources_table::NodeResourcesTable;

/// Gangs that one refusal of a single pod names.
const NAMED: usize = 2;

/// Reservations of one decided gang that none of its bound pods has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GangReservations {
    /// The gang: `namespace/name`.
    pub gang: String,
    /// How many.
    pub reservations: usize,
    /// When they end at the latest if its members do not arrive, in seconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<i64>,
}

impl fmt::Display for GangReservations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { gang, reservations, until } = self;
        let of = Holder { gang: gang.as_str().into(), devices: 0, until: *until };
        let plural = if *reservations == 1 { "" } else { "s" };
        write!(f, "{reservations} reservation{plural} of {}", of.gang_and_limit())
    }
}

/// What one pod, or one shape of members, asks for, and the nodes that it may go to.
struct Demand<'d> {
    request: &'d Request,
    needs: &'d Needs,
    rules: PlacementRules,
}

impl Demand<'_> {
    /// Whether a node could take the pod if all of its devices were free.
    fn may_go_to(&self, resources: &NodeResourcesTable, number: NodeIx, node: &Node) -> bool {
        let is_excluded = self.rules.nodes.binary_search(&number).is_ok()
            || self.rules.only.as_ref().is_some_and(|only| only.binary_search(&number).is_err());
        let has_devices = |ask: &Ask| {
            let mut pools = node.pools().map(|(pool, _)| pool).filter(|pool| pool.resource == ask.resource);
            pools.any(|pool| pool.healthy.len() >= ask.devices as usize)
        };
        !is_excluded
            && node.withheld().is_none()
            && self.request.asks.iter().all(has_devices)
            && resources.admits(number, self.needs)
    }
}

/// Finds the gangs that have reservations.
#[derive(Debug, Clone, Copy)]
pub(in crate::index) struct ReservationHolders<'a> {
    gangs: &'a Gangs,
    facts: &'a Facts,
    /// The limits of reservations are known to the extender alone.
    only_looks: bool,
}

impl<'a> ReservationHolders<'a> {
    pub(super) fn new(gangs: &'a Gangs, facts: &'a Facts, only_looks: bool) -> Self {
        Self { gangs, facts, only_looks }
    }

    /// Adds to a refusal because of reserved devices the gangs that have them.
    pub(super) fn complete(self, refused: Refusal, wanted: &PlanRequest, source: PlanSource<'_>) -> Refusal {
        let Refusal::DoesNotFit(mut shortage) = refused else {
            return refused;
        };
        if shortage.reserved.is_some() {
            let demands = demands(wanted, source);
            let holders = self.among(&demands, Some(&wanted.gang));
            // Its own reservations are for its own members.
            let is_others = !holders.is_empty() || self.has_binds_among(&demands);
            shortage.reserved = is_others.then_some(IdleReservations { holders });
        }
        Refusal::DoesNotFit(shortage)
    }

    /// Gangs with reservations of idle devices that a pod asks for, on nodes that may take the pod, the most first.
    pub(in crate::index) fn of_request(self, request: &Request, needs: &Needs) -> Vec<Holder> {
        let demand = Demand { request, needs, rules: self.facts.resources.barred(needs, &[]) };
        self.among(&[demand], None)
    }

    /// The nodes that may take any of this, each with the resources that are asked for there.
    fn nodes_for<'d>(
        self,
        demands: &'d [Demand<'d>],
        is_of_interest: impl Fn(&Node) -> bool + 'd,
    ) -> impl Iterator<Item = (&'a Node, BTreeSet<&'d ResourceName>)>
    where
        'a: 'd,
    {
        self.facts.nodes.iter().filter(move |(_, node)| is_of_interest(node)).filter_map(
            move |(number, node)| {
                let here =
                    demands.iter().filter(|demand| demand.may_go_to(&self.facts.resources, number, node));
                let asked: BTreeSet<&ResourceName> =
                    here.flat_map(|demand| &demand.request.asks).map(|ask| &ask.resource).collect();
                (!asked.is_empty()).then_some((node, asked))
            },
        )
    }

    /// Gangs other than `but` with reservations of idle devices among what is asked for, the most first.
    fn among(self, demands: &[Demand<'_>], but: Option<&GangKey>) -> Vec<Holder> {
        let mut devices: BTreeMap<&GangKey, usize> = BTreeMap::new();
        let has_reservations = |node: &Node| !node.occupancy().gang_reservations().is_empty();
        for (node, asked) in self.nodes_for(demands, has_reservations) {
            for kept in node.occupancy().gang_reservations().iter().filter(|kept| Some(&*kept.gang) != but) {
                let count = node.idle_among(&kept.devices, &asked);
                if count > 0 {
                    *devices.entry(&kept.gang).or_default() += count;
                }
            }
        }
        let holder = |(gang, devices): (&GangKey, usize)| Holder {
            gang: gang.to_string().into(),
            devices,
            until: self.reserved_until(gang),
        };
        let mut holders: Vec<Holder> = devices.into_iter().map(holder).collect();
        holders.sort_by(|a, b| (Reverse(a.devices), &a.gang).cmp(&(Reverse(b.devices), &b.gang)));
        holders
    }

    /// Adds to the refusal of a single pod the gangs that have reserved idle devices on nodes without enough free ones. At most
    /// [`NAMED`] are named, those with the earliest end of a reservation.
    pub(in crate::index) fn name_in(
        self,
        answer: &mut FilterVerdict,
        nodes: &[Option<NodeIx>],
        reservations: &ReservationTracker,
    ) {
        let short: HashMap<NodeIx, (usize, &ResourceName)> = answer
            .short_of_reserved(nodes)
            .map(|(refusal, node, resource)| (node, (refusal, resource)))
            .collect();
        if short.is_empty() {
            return;
        }
        let mut gangs: BTreeMap<&Arc<GangKey>, BTreeSet<NodeIx>> = BTreeMap::new();
        for (gang, node) in reservations.iter().filter(|(_, node)| short.contains_key(node)) {
            gangs.entry(gang).or_default().insert(node);
        }
        let mut gangs: Vec<_> =
            gangs.into_iter().map(|(gang, nodes)| (self.reserved_until(gang), gang, nodes)).collect();
        gangs.sort_by_key(|(until, gang, _)| (until.is_none(), *until, *gang));
        let mut holders: BTreeMap<usize, Vec<Holder>> = BTreeMap::new();
        let mut named = 0;
        for (until, gang, nodes) in gangs {
            let mut has_any = false;
            for node in nodes {
                let (Some((refusal, resource)), Some(entry)) = (short.get(&node), self.facts.nodes.get(node))
                else {
                    continue;
                };
                let kept = entry.occupancy().gang_reservations().iter().filter(|kept| kept.gang == *gang);
                let idle = kept.map(|kept| entry.idle_among(&kept.devices, &BTreeSet::from([*resource])));
                let devices: usize = idle.sum();
                if devices > 0 {
                    let holder = Holder { gang: gang.to_string().into(), devices, until };
                    holders.entry(*refusal).or_default().push(holder);
                    has_any = true;
                }
            }
            named += usize::from(has_any);
            if named == NAMED {
                break;
            }
        }
        answer.name_holders(&holders);
    }

    /// Whether devices among what is asked for are reserved for pods that are being bound.
    fn has_binds_among(self, demands: &[Demand<'_>]) -> bool {
        let mut nodes = self.nodes_for(demands, |node| !node.occupancy().binds().is_empty());
        nodes.any(|(node, asked)| {
            let mut binds = node.occupancy().binds().iter();
            binds.any(|bind| bind.devices().iter().any(|(resource, _)| asked.contains(resource)))
        })
    }

    /// Until when reservations of a gang last if its members do not arrive, in seconds since 1970. Stable while the limit is:
    /// refusals name it.
    fn reserved_until(self, gang: &GangKey) -> Option<i64> {
        self.gangs.reserved_until(gang, self.facts.clock.epoch()).filter(|_| !self.only_looks)
    }

    /// Whether gangs that refusals of gangs name have no reservation any more.
    pub(super) fn are_outdated(self) -> bool {
        let named = |refusal: &Refusal| match refusal {
            Refusal::DoesNotFit(shortage) => shortage.reserved.as_ref().map(|of| of.holders.clone()),
            _ => None,
        };
        let refusals = self.gangs.views().filter_map(|view| named(view.refusal()?));
        let refusals: Vec<Vec<Holder>> = refusals.collect();
        if refusals.is_empty() {
            return false;
        }
        let reserved: BTreeSet<String> = self
            .facts
            .nodes
            .iter()
            .flat_map(|(_, node)| node.occupancy().gang_reservations())
            .map(|kept| kept.gang.to_string())
            .collect();
        let is_outdated = |holders: &Vec<Holder>| {
            holders.is_empty() || holders.iter().any(|holder| !reserved.contains(&*holder.gang))
        };
        refusals.iter().any(is_outdated)
    }

    /// Reservations on all nodes for decided gangs other than `but`, by gang.
    pub(super) fn decided(self, but: &GangKey) -> Vec<GangReservations> {
        self.kept_among(self.facts.nodes.iter().map(|(_, node)| node), Some(but))
    }

    /// The same on one node.
    pub(in crate::index) fn decided_on(self, node: &Node, but: Option<&GangKey>) -> Vec<GangReservations> {
        self.kept_among(std::iter::once(node), but)
    }

    fn kept_among<'n>(
        self,
        nodes: impl Iterator<Item = &'n Node>,
        but: Option<&GangKey>,
    ) -> Vec<GangReservations> {
        let mut places: BTreeMap<&GangKey, usize> = BTreeMap::new();
        for kept in nodes.flat_map(|node| node.occupancy().gang_reservations()) {
            *places.entry(&kept.gang).or_default() += 1;
        }
        let decided = |gang: &GangKey| {
            let view = self.gangs.view(gang);
            view.is_some_and(|view| view.is_decided() || view.is_awaiting())
        };
        let others = places.into_iter().filter(|(gang, _)| Some(*gang) != but && decided(gang));
        let named = others.map(|(gang, reservations)| GangReservations {
            gang: gang.to_string(),
            reservations,
            until: self.reserved_until(gang),
        });
        named.collect()
    }
}

/// What the members of a gang ask for, by shape.
fn demands<'a>(wanted: &PlanRequest, source: PlanSource<'a>) -> Vec<Demand<'a>> {
    let shapes = source.shapes().list();
    let requests = std::iter::once(wanted).chain(&wanted.others);
    let members = requests.flat_map(|request| &request.members);
    let numbers: BTreeSet<u32> = members.map(|member| member.shape.0).collect();
    let mut demands = Vec::with_capacity(numbers.len());
    for shape in numbers.into_iter().filter_map(|shape| shapes.get(shape as usize)) {
        let Shape { request, needs } = shape;
        demands.push(Demand { request, needs, rules: source.rules(Some(wanted), shape, &[]) });
    }
    demands
}
