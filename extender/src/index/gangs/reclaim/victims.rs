//! Victim candidates on the nodes, by what is evicted together: gangs as a whole, other pods one by one; and pods that are terminating.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;

use gantry_api::PodUid;
use gantry_gang::protocol::{Devices, Gangs, MemberView, Placement, PlanRequest, Stage, View};
use gantry_gang::{GangKey, Resources};
use gantry_planner::input::Shape;
use gantry_planner::preempt::{CandidatePod, Surplus, VictimCandidate};
use gantry_planner::request::NumaDemand;

use super::releasable::ReleasableReservations;
use crate::index::affinity_index;
use crate::index::facts::Facts;
use crate::index::gangs::plan_input::PlanSource;
use crate::index::gangs::shapes::Shapes;
use crate::index::node_resources_table::PreemptiblePod;
use crate::pod::{PodFacts, PodProfile};
use gantry_planner::snapshot::NodeIx;

/// Seconds after its grace period from which a terminating pod is overdue: it may stay for ever, and so may the processes of a pod that is
/// gone.
pub(in crate::index::gangs) const OVERDUE: i64 = 60;

/// Which pods without devices are candidates. They are many, and most often none is in the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reach {
    /// Those that keep members off their node or domain, and those on nodes that lack other resources now.
    Short,
    /// Also those on nodes that would lack other resources once devices came free.
    Long,
}

/// What the planner compares first of the victims of two placements.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct EvictionCost {
    /// The highest priority of a victim; `None` without victims.
    priority: Option<i32>,
    devices: usize,
    pods: usize,
}

impl EvictionCost {
    fn of(placement: &Placement, candidates: &[VictimCandidate]) -> Self {
        let goes = |pod: &&CandidatePod| placement.victims.contains(&pod.uid);
        let victims = candidates.iter().flat_map(|unit| {
            let pods = unit.pods.iter().filter(goes);
            pods.map(move |pod| (unit.priority, count_devices(pod)))
        });
        let (priority, devices) =
            victims.fold((None, 0), |(priority, devices): (Option<i32>, usize), victim| {
                (priority.max(Some(victim.0)), devices + victim.1)
            });
        Self { priority, devices, pods: placement.victims.len() }
    }

    /// Whether pods without devices on nodes without free ones cannot help: only a pod with devices makes them useful.
    fn is_certainly_least(&self, candidates: &[VictimCandidate]) -> bool {
        let lowest = candidates.iter().map(|unit| unit.priority).min();
        let pods = candidates.iter().flat_map(|unit| &unit.pods);
        let fewest = pods.map(count_devices).filter(|count| *count > 0).min();
        let by_devices = self.devices == 0 || self.pods == 1 && fewest.is_some_and(|it| self.devices <= it);
        self.priority <= lowest && by_devices
    }
}

fn count_devices(pod: &CandidatePod) -> usize {
    pod.devices.iter().map(|(_, ids)| ids.len()).sum()
}

/// Finds victim candidates among pods and gangs.
#[derive(Debug, Clone, Copy)]
pub(in crate::index) struct VictimCandidates<'a> {
    gangs: &'a Gangs,
    facts: &'a Facts,
    shapes: &'a Shapes,
}

impl<'a> VictimCandidates<'a> {
    pub(in crate::index::gangs) fn new(gangs: &'a Gangs, source: PlanSource<'a>) -> Self {
        Self { gangs, facts: source.facts(), shapes: source.shapes() }
    }

    /// Whether a gang may preempt: all of its members may, and disruption budgets are known.
    pub(super) fn may_preempt(self, wanted: &PlanRequest) -> bool {
        let view = self.gangs.view(&wanted.gang);
        self.facts.budgets.are_known() && view.is_some_and(|view| view.may_preempt())
    }

    /// The placement with the least loss: at first with few of the pods without devices, and with the others too if less could be lost then.
    pub(in crate::index::gangs) fn least_loss(
        self,
        wanted: &PlanRequest,
        find: impl Fn(&[VictimCandidate]) -> Option<Placement>,
    ) -> Option<Placement> {
        let few = self.candidates(wanted, Reach::Short);
        let found = find(&few);
        let least = found.as_ref().map(|found| EvictionCost::of(found, &few));
        if least.as_ref().is_some_and(|least| least.is_certainly_least(&few)) {
            return found;
        }
        let more = self.candidates(wanted, Reach::Long);
        if more.len() == few.len() {
            return found;
        }
        let other = find(&more);
        let is_less = |other: &Placement| {
            let cost = EvictionCost::of(other, &more);
            least.as_ref().is_none_or(|least| cost < *least)
        };
        other.filter(is_less).or(found)
    }

    /// The candidates. Without the gang itself, terminating pods, and gangs that are being bound, of which not all pods show yet.
    fn candidates(self, wanted: &PlanRequest, reach: Reach) -> Vec<VictimCandidate> {
        let mut gangs: BTreeMap<&Arc<GangKey>, VictimCandidate> = BTreeMap::new();
        let mut singles: Vec<VictimCandidate> = Vec::new();
        for pod in self.facts.pods.iter().filter(|pod| pod.is_live() && !pod.leaving) {
            let Some(node) = self.facts.node_of(pod) else {
                continue;
            };
            let devices = self.devices_of(pod, node);
            match self.gangs.goes_with(&pod.uid) {
                // Its end returns no devices.
                None if devices.is_none() => {}
                // The gang itself is to be completed.
                Some(gang) if *gang == wanted.gang => {}
                Some(gang) => {
                    let unit = gangs.entry(gang).or_insert_with(|| self.unit_of(gang));
                    unit.pods.push(on_its_node(pod, node, devices));
                    unit.priority = unit.priority.max(pod.priority);
                }
                None => singles.push(VictimCandidate {
                    pods: vec![on_its_node(pod, node, devices)],
                    priority: pod.priority,
                    since: pod.created(),
                    ..VictimCandidate::default()
                }),
            }
        }
        gangs.retain(|gang, unit| {
            unit.pods.sort_by(|a, b| a.uid.cmp(&b.uid));
            let Some(view) = self.gangs.view(gang) else {
                return true;
            };
            set_surplus(unit, &view);
            // Of a group that may belong to a tree it is not known yet what would have to go with it.
            !view.is_being_bound() && !self.gangs.awaits_owner(gang)
        });
        let other_pods = self.other_pods(wanted, reach);
        let mut units: Vec<VictimCandidate> = gangs.into_values().chain(singles).chain(other_pods).collect();
        let mut covers = self.facts.budgets.coverage(&self.facts.resources);
        for unit in &mut units {
            unit.budgets = covers.need(unit);
        }
        // Sorted: equal input gives equal decisions.
        units.sort_by(|a, b| first(a).cmp(&first(b)));
        units
    }

    /// Pods without devices, of lower priority, that may be in the way of a gang.
    fn other_pods(self, wanted: &PlanRequest, reach: Reach) -> Vec<VictimCandidate> {
        let shapes: BTreeSet<_> = wanted.members.iter().map(|member| member.shape).collect();
        let known = self.shapes.list();
        let shapes: Vec<&Shape> =
            shapes.into_iter().filter_map(|shape| known.get(shape.0 as usize)).collect();
        let mut lacking: HashMap<NodeIx, bool> = HashMap::new();
        let mut concerned: HashMap<*const PodProfile, bool> = HashMap::new();
        let mut helps = |pod: &PreemptiblePod<'_>| {
            let lacks = lacking.entry(pod.node);
            let lacks = *lacks.or_insert_with(|| self.lacks_other_resources(pod.node, &shapes, reach));
            lacks
                || *concerned.entry(Arc::as_ptr(pod.profile)).or_insert_with(|| {
                    let mut needs = shapes.iter().map(|shape| &shape.needs);
                    needs.any(|needs| affinity_index::concerns(needs, pod.profile))
                })
        };
        let has_devices = |node: NodeIx| self.facts.nodes.has_inventory(node);
        let lower = self.facts.resources.below(wanted.priority);
        lower
            .filter(|pod| has_devices(pod.node) && helps(pod))
            .map(|pod| VictimCandidate {
                pods: vec![CandidatePod {
                    uid: pod.uid.clone(),
                    node: pod.node,
                    devices: Devices::new(),
                    numa: Vec::new(),
                    resources: pod.load.clone(),
                    role: 0,
                }],
                priority: pod.pod.priority,
                since: pod.pod.created,
                ..VictimCandidate::default()
            })
            .collect()
    }

    /// Whether a node has devices for more members of some shape than its other resources allow.
    fn lacks_other_resources(self, node: NodeIx, shapes: &[&Shape], reach: Reach) -> bool {
        let entry = self.facts.nodes.get(node);
        let room = self.facts.resources.get(node);
        let Some((entry, room)) = entry.zip(room) else {
            return false;
        };
        let devices = |resource: &str| {
            let (index, pool) = entry.inventory()?.pool(resource)?;
            Some(match reach {
                Reach::Short => entry.pool(index)?.free.len(),
                Reach::Long => pool.healthy.len(),
            })
        };
        shapes.iter().any(|shape| {
            let asks = shape.request.asks.iter().filter(|ask| ask.devices > 0);
            let by_devices =
                asks.map(|ask| devices(ask.resource.as_str()).unwrap_or(0) / ask.devices as usize).min();
            (room.left.times(&shape.needs.resources) as usize) < by_devices.unwrap_or(0)
        })
    }

    /// A gang as a unit, with its members that have no devices or have not arrived. The others are added by the caller.
    fn unit_of(self, gang: &GangKey) -> VictimCandidate {
        let mut unit = VictimCandidate { priority: i32::MIN, is_gang: true, ..VictimCandidate::default() };
        let Some(view) = self.gangs.view(gang) else {
            return unit;
        };
        unit.since = view.bound_at().unwrap_or_else(|| view.waiting_since());
        unit.checkpointed = view.terms().is_some_and(|terms| terms.checkpointed);
        unit.priority = view.priority();
        for member in view.members() {
            let is_bound = matches!(member.stage, Stage::Bound(_));
            let has_place = !is_bound && view.node_of(member.uid).is_some();
            if !member.leaving
                && (has_place || is_bound && !self.facts.pods.contains(member.uid))
                && let Some(node) = member.node.and_then(|node| self.facts.nodes.find(node.as_str()))
            {
                let load = self.facts.resources.member(member.uid).map(|pod| &pod.load);
                unit.pods.push(CandidatePod {
                    uid: member.uid.clone(),
                    node,
                    devices: Devices::new(),
                    numa: Vec::new(),
                    resources: load.map_or_else(Default::default, |load| (**load).clone()),
                    role: 0,
                });
            }
        }
        unit
    }

    /// All of a gang that is on the nodes, as a unit.
    pub(in crate::index::gangs) fn whole(self, gang: &View<'_>) -> VictimCandidate {
        let mut unit = self.unit_of(gang.key());
        for member in gang.members().filter(|member| !member.leaving) {
            if let Some(pod) = self.facts.pods.get(member.uid).filter(|pod| pod.is_live())
                && let Some(node) = self.facts.node_of(pod)
            {
                let devices = self.devices_of(pod, node);
                unit.pods.push(on_its_node(pod, node, devices));
            }
        }
        unit
    }

    /// Terminating pods that are not overdue, as one unit, and when the first and the last of them is overdue, in seconds since 1970. With
    /// devices that pods which are gone return soon, unreserved or of reservations that are orphaned for this priority.
    pub(super) fn ending(self, priority: i32) -> Option<(VictimCandidate, Range<i64>)> {
        let now = self.facts.clock.now();
        let mut pods: Vec<CandidatePod> = Vec::new();
        let mut overdue: Option<Range<i64>> = None;
        let mut goes = |ends: i64| {
            let until = ends.saturating_add(OVERDUE);
            let goes = now.unix < until;
            if goes {
                let known = overdue.take().unwrap_or(until..until);
                overdue = Some(known.start.min(until)..known.end.max(until));
            }
            goes
        };
        for pod in self.facts.pods.iter().filter(|pod| pod.is_live()) {
            if let Some(node) = self.facts.node_of(pod)
                && pod.ends.is_some_and(&mut goes)
            {
                pods.push(on_its_node(pod, node, self.devices_of(pod, node)));
            }
        }
        for pod in self.facts.resources.preemptible_pods() {
            if pod.pod.ends.is_some_and(&mut goes) {
                pods.push(CandidatePod {
                    uid: pod.uid.clone(),
                    node: pod.node,
                    devices: Devices::new(),
                    numa: Vec::new(),
                    resources: pod.load.clone(),
                    role: 0,
                });
            }
        }
        for (node, entry) in self.facts.nodes.iter() {
            let returning = entry.returning(|since| {
                let passed = now.at.saturating_duration_since(since).as_secs();
                goes(now.unix.saturating_sub_unsigned(passed))
            });
            let devices = entry.pools().zip(returning).filter(|(_, ids)| !ids.is_empty());
            let devices: Devices = devices.map(|((pool, _), ids)| (pool.resource.clone(), ids)).collect();
            if !devices.is_empty() {
                pods.push(CandidatePod {
                    // The pod does not matter any more.
                    uid: "".into(),
                    node,
                    devices,
                    numa: NumaDemand::UNKNOWN.into(),
                    resources: Resources::default(),
                    role: 0,
                });
            }
        }
        pods.extend(ReleasableReservations::new(self.gangs, self.facts, self.shapes).ending(priority, goes));
        let ending = VictimCandidate { pods, priority: i32::MIN, ..VictimCandidate::default() };
        overdue.map(|overdue| (ending, overdue))
    }

    /// The same pods, one by one, without returned devices.
    pub(super) fn each_ending(self) -> impl Iterator<Item = VictimCandidate> + use<> {
        let ending = self.ending(i32::MIN).into_iter().flat_map(|(ending, _)| ending.pods);
        let pods = ending.filter(|pod| !pod.uid.as_str().is_empty());
        pods.map(|pod| VictimCandidate { pods: vec![pod], priority: i32::MIN, ..VictimCandidate::default() })
    }

    /// When a terminating pod should be gone, in seconds since 1970.
    pub(super) fn ends_by(self, uid: &PodUid) -> Option<i64> {
        match self.facts.pods.get(uid) {
            Some(pod) => pod.ends,
            None => self.facts.resources.preemptible(uid)?.pod.ends,
        }
    }

    /// The devices that a pod's end returns, if the node has an inventory.
    fn devices_of(self, pod: &PodFacts, node: NodeIx) -> Option<Devices> {
        self.facts.nodes.get(node)?.released_by(&pod.uid, self.gangs.goes_with(&pod.uid))
    }
}

fn on_its_node(pod: &PodFacts, node: NodeIx, devices: Option<Devices>) -> CandidatePod {
    CandidatePod {
        uid: pod.uid.clone(),
        node,
        devices: devices.unwrap_or_default(),
        numa: pod.numa().to_vec(),
        resources: pod.needs.resources.clone(),
        role: 0,
    }
}

/// Which members of a gang may go while others stay: bound ones beyond its minimum and those of its roles; none of a gang in slices. The
/// owner may allow that of each, or of none. The last ranks go first. Members that another gang has evicted go anyway.
fn set_surplus(unit: &mut VictimCandidate, view: &View<'_>) {
    let members: HashMap<&PodUid, MemberView<'_>> =
        view.members().map(|member| (member.uid, member)).collect();
    unit.pods.retain(|pod| members.get(&pod.uid).is_none_or(|member| !member.evicted));
    let mut left = view.surplus_members();
    if left == 0 || !view.may_lose_members() {
        return;
    }
    let mut roles: Vec<&str> = members.values().map(|member| member.role).collect();
    roles.sort_unstable();
    roles.dedup();
    let mut by_role: Vec<u32> = roles.iter().map(|role| view.surplus_of(role)).collect();
    let role_of = |member: &MemberView<'_>| roles.binary_search(&member.role).unwrap_or(0);
    for member in members.values().filter(|member| member.evicted && !member.leaving) {
        left = left.saturating_sub(1);
        let of_role = &mut by_role[role_of(member)];
        *of_role = of_role.saturating_sub(1);
    }
    // A role of its own for those that may not go alone.
    by_role.push(0);
    for pod in &mut unit.pods {
        let member = members.get(&pod.uid);
        let member = member.filter(|member| matches!(member.stage, Stage::Bound(_)));
        pod.role = member.map_or(roles.len(), role_of);
    }
    unit.surplus = Surplus { pods: left, by_role };
    unit.pods.sort_by(|a, b| {
        let rank = |pod: &CandidatePod| members.get(&pod.uid).and_then(|member| member.rank);
        rank(b).cmp(&rank(a)).then_with(|| b.uid.cmp(&a.uid))
    });
}

fn first(unit: &VictimCandidate) -> Option<&PodUid> {
    unit.pods.iter().map(|pod| &pod.uid).min()
}
