//! Refusals held against a judge that tries everything, on small clusters: each fact of a refusal must be true.

use std::collections::{BTreeMap, BTreeSet};

use gantry_api::Reason;
use gantry_gang::protocol::{PlanRequest, Refusal, ShapeId, Shortage, WithheldReason};
use gantry_gang::{Needs, Resources, Taint, TaintEffect};
use proptest::prelude::*;

use super::world::{World, gang, level, terms};
use crate::devices::DeviceSet;

#[derive(Debug, Clone)]
struct NodeCase {
    rack: u8,
    /// GPUs that are free, reserved, unhealthy. The rest of eight is held.
    gpus: [usize; 3],
    /// CPU in all, and taken.
    cpu: (i64, i64),
    /// The value of its label `pool`.
    pool: u8,
    tainted: bool,
    serves: bool,
}

#[derive(Debug, Clone)]
struct RoleCase {
    gpus: u32,
    cpu: i64,
    /// The node selector.
    pool: Option<u8>,
    exist: u32,
    /// The minimum of the role.
    least: u32,
}

#[derive(Debug, Clone)]
struct Case {
    nodes: Vec<NodeCase>,
    roles: Vec<RoleCase>,
    /// Members in addition to the minimums of roles.
    more: u32,
    in_one_rack: bool,
}

/// What counts as there.
#[derive(Debug, Clone, Copy)]
enum View {
    Now,
    /// As if devices that are idle and reserved were free.
    Unreserved,
    /// As if every plugin served.
    Served,
    Empty,
}

prop_compose! {
    fn node()(
        rack in 0u8..2,
        free in 0usize..=8,
        reserved in 0usize..=8,
        unhealthy in 0usize..=8,
        cpu in (4i64..12, 0i64..12),
        pool in 0u8..2,
        tainted in prop::bool::weighted(0.15),
        serves in prop::bool::weighted(0.8),
    ) -> NodeCase {
        let reserved = reserved.min(8 - free);
        let unhealthy = unhealthy.min(8 - free - reserved);
        let taken = cpu.1.min(cpu.0);
        NodeCase { rack, gpus: [free, reserved, unhealthy], cpu: (cpu.0, taken), pool, tainted, serves }
    }
}

prop_compose! {
    fn role()(
        gpus in 1u32..10,
        cpu in 0i64..5,
        pool in prop::option::weighted(0.3, 0u8..2),
        exist in 1u32..4,
        least in 0u32..4,
    ) -> RoleCase {
        RoleCase { gpus, cpu, pool, exist, least: least.min(exist) }
    }
}

prop_compose! {
    fn case()(
        nodes in prop::collection::vec(node(), 1..5),
        roles in prop::collection::vec(role(), 1..4),
        more in 0u32..4,
        in_one_rack in prop::bool::weighted(0.3),
    ) -> Case {
        let (exist, least) = roles.iter().fold((0, 0), |(exist, least), role| (exist + role.exist, least + role.least));
        let more = more.min(exist - least).max(u32::from(least == 0));
        Case { nodes, roles, more, in_one_rack }
    }
}

impl NodeCase {
    /// GPUs and CPU that count as there.
    fn has(&self, view: View) -> (usize, i64) {
        let [free, reserved, unhealthy] = self.gpus;
        let left = self.cpu.0 - self.cpu.1;
        match view {
            View::Empty => (8 - unhealthy, self.cpu.0),
            View::Served => (free, left),
            View::Now | View::Unreserved if !self.serves => (0, left),
            View::Now => (free, left),
            View::Unreserved => (free + reserved, left),
        }
    }

    fn admits(&self, role: &RoleCase) -> bool {
        !self.tainted && role.pool.is_none_or(|pool| pool == self.pool)
    }
}

impl Case {
    fn build(&self) -> (World, PlanRequest) {
        let mut world = World::new();
        for (index, node) in self.nodes.iter().enumerate() {
            let name = format!("n{index}");
            let [free, reserved, unhealthy] = node.gpus;
            world.node_of(&format!("z/r{}", node.rack), &name, |class| {
                let pool = &mut class.pools[0];
                let there = if node.serves { DeviceSet::range(0, free) } else { DeviceSet::EMPTY };
                (pool.free, pool.open) = (there.clone(), there);
                (pool.reserved, pool.unhealthy) = (reserved, unhealthy);
                pool.unserved = if node.serves { 0 } else { free };
                class.withheld = (!node.serves).then(|| WithheldReason::ByPlugin("NotRegistered".into()));
            });
            world.room(&name, |facts, left| {
                facts.labels.insert("pool".into(), node.pool.to_string().into());
                facts.allocatable.milli_cpu = node.cpu.0;
                left.milli_cpu = node.cpu.0 - node.cpu.1;
                if node.tainted {
                    let (key, effect) = ("dedicated".into(), TaintEffect::NoSchedule);
                    facts.taints.push(Taint { key, value: "".into(), effect });
                }
            });
        }
        let needs = |role: &RoleCase| Needs {
            resources: Resources { milli_cpu: role.cpu, pods: 1, ..Resources::default() },
            namespace: "ml".into(),
            selector: role.pool.iter().map(|pool| ("pool".into(), pool.to_string().into())).collect(),
            ..Needs::default()
        };
        let shapes: Vec<ShapeId> =
            self.roles.iter().map(|role| world.shape_of(role.gpus, needs(role))).collect();
        let members: Vec<(u32, ShapeId)> =
            self.roles.iter().map(|role| role.exist).zip(shapes.clone()).collect();
        let mut wanted = gang(&members);
        for member in &mut wanted.members {
            let role = shapes.iter().position(|shape| *shape == member.shape).unwrap();
            member.role = format!("r{role}").into();
        }
        wanted.must = self.must();
        let roles = self.roles.iter().enumerate().filter(|(_, role)| role.least > 0);
        let roles = roles.map(|(index, role)| (format!("r{index}").into(), role.least)).collect();
        terms(&mut wanted, |terms| terms.by_role = roles);
        if self.in_one_rack {
            level(&mut wanted, "rack", true);
        }
        (world, wanted)
    }

    fn must(&self) -> u32 {
        self.more + self.roles.iter().map(|role| role.least).sum::<u32>()
    }

    /// The parts of the cluster that may hold the gang.
    fn places(&self) -> Vec<Vec<&NodeCase>> {
        if !self.in_one_rack {
            return vec![self.nodes.iter().collect()];
        }
        let mut racks: BTreeMap<u8, Vec<&NodeCase>> = BTreeMap::new();
        self.nodes.iter().for_each(|node| racks.entry(node.rack).or_default().push(node));
        racks.into_values().collect()
    }

    /// Every combination of members of each role that fits together.
    fn fitting(&self, view: View) -> BTreeSet<Vec<u32>> {
        let mut all = BTreeSet::new();
        for place in self.places() {
            let mut reached: BTreeSet<Vec<u32>> = [vec![0; self.roles.len()]].into();
            for node in place {
                let mut next = BTreeSet::new();
                for counts in &reached {
                    self.on_node(node, view, counts, &mut vec![0; counts.len()], 0, &mut next);
                }
                reached = next;
            }
            all.extend(reached);
        }
        all
    }

    fn on_node(
        &self,
        node: &NodeCase,
        view: View,
        before: &[u32],
        on: &mut Vec<u32>,
        at: usize,
        into: &mut BTreeSet<Vec<u32>>,
    ) {
        let (gpus, cpu) = node.has(view);
        let used = on.iter().zip(&self.roles).fold((0, 0), |(gpus, cpu), (on, role)| {
            (gpus + (*on * role.gpus) as usize, cpu + i64::from(*on) * role.cpu)
        });
        if used.0 > gpus || used.1 > cpu {
            return;
        }
        if at == on.len() {
            into.insert(before.iter().zip(on.iter()).map(|(a, b)| a + b).collect());
            return;
        }
        let most = if node.admits(&self.roles[at]) { self.roles[at].exist - before[at] } else { 0 };
        for count in 0..=most {
            on[at] = count;
            self.on_node(node, view, before, on, at + 1, into);
        }
        on[at] = 0;
    }

    /// How many members of a combination count towards the minimum.
    fn progress(&self, counts: &[u32]) -> u32 {
        let of_roles = counts.iter().zip(&self.roles);
        let (needed, rest) = of_roles.fold((0, 0), |(needed, rest), (count, role)| {
            (needed + count.min(&role.least), rest + count.saturating_sub(role.least))
        });
        needed + rest.min(self.more)
    }

    fn most(&self, view: View) -> u32 {
        self.fitting(view).iter().map(|counts| self.progress(counts)).max().unwrap_or(0)
    }

    fn fits(&self, view: View) -> bool {
        self.most(view) == self.must()
    }

    /// The same gang, and of it only what a role needs.
    fn of_role(&self, role: usize) -> Self {
        let mut alone = self.clone();
        let needed = self.needed(role);
        alone.roles = vec![RoleCase { exist: needed, least: needed, ..self.roles[role].clone() }];
        alone.more = 0;
        alone
    }

    /// What a shortage is about: all of the gang, or one role.
    fn subject(&self, shortage: &Shortage) -> Self {
        match named(shortage) {
            Some(role) => self.of_role(role),
            None => self.clone(),
        }
    }

    /// How many members of a role must be placed in any case.
    fn needed(&self, role: usize) -> u32 {
        let any = self.roles.iter().any(|role| role.least > 0);
        let all: u32 = self.roles.iter().map(|role| role.exist).sum();
        if !any && self.must() == all { self.roles[role].exist } else { self.roles[role].least }
    }

    /// GPUs on nodes that any member may go to: free, reserved, healthy, in all.
    fn devices(&self) -> [usize; 4] {
        let admitting = self.nodes.iter().filter(|node| self.roles.iter().any(|role| node.admits(role)));
        admitting.fold([0; 4], |[free, reserved, healthy, all], node| {
            let [_, idle, unhealthy] = node.gpus;
            [free + node.has(View::Now).0, reserved + idle, healthy + 8 - unhealthy, all + 8]
        })
    }
}

/// The role that a shortage is about.
fn named(shortage: &Shortage) -> Option<usize> {
    shortage.part.as_ref().map(|role| role.strip_prefix('r').unwrap().parse().unwrap())
}

fn judge(case: &Case, refused: &Refusal) -> Result<(), TestCaseError> {
    let Refusal::DoesNotFit(shortage) = refused else {
        return Err(TestCaseError::fail(format!("{refused:?}")));
    };
    prop_assert_eq!(shortage.hopeless, !case.fits(View::Empty), "hopeless");
    let view = if shortage.hopeless { View::Empty } else { View::Now };
    // A role that does not fit by itself is named; one that does is not.
    let alone: Vec<usize> = (0..case.roles.len())
        .filter(|role| (1..case.all()).contains(&case.needed(*role)))
        .filter(|role| !case.of_role(*role).fits(view))
        .collect();
    let named = named(shortage);
    prop_assert!(
        named.map_or(alone.is_empty(), |named| alone.contains(&named)),
        "{:?} of {:?}",
        named,
        alone
    );
    let subject = case.subject(shortage);
    prop_assert_eq!(shortage.must, subject.must());
    prop_assert_eq!(shortage.fits, subject.most(View::Now), "fits");
    prop_assert!(shortage.fits < shortage.must, "as many fit as must");
    if shortage.hopeless {
        prop_assert_eq!(shortage.empty, subject.most(View::Empty), "empty");
    }
    if let Some(largest) = &shortage.largest {
        let most = case.nodes.iter().map(|node| node.has(View::Empty).0).max().unwrap();
        prop_assert_eq!(largest.healthy, most);
        prop_assert!(
            subject.roles.iter().any(|role| role.gpus == largest.requested && role.gpus as usize > most)
        );
    } else if shortage.hopeless {
        let most = case.nodes.iter().map(|node| node.has(View::Empty).0).max().unwrap();
        prop_assert!(subject.roles.iter().all(|role| role.least == 0 || role.gpus as usize <= most));
    }
    if !shortage.hopeless {
        prop_assert_eq!(shortage.withheld.is_some(), subject.fits(View::Served), "not ready");
        prop_assert_eq!(shortage.reserved.is_some(), subject.fits(View::Unreserved), "reserved");
    }
    let devices = shortage.devices.as_ref().unwrap();
    if !case.in_one_rack {
        let found = [devices.free, devices.reserved, devices.healthy, devices.total];
        prop_assert_eq!(found, subject.devices());
    }
    let expected = match shortage {
        _ if shortage.hopeless => Reason::CannotFit,
        _ if shortage.withheld.is_some() => Reason::PluginNotReady,
        _ if shortage.reserved.is_some() => Reason::GpusReserved,
        _ => Reason::InsufficientResources,
    };
    prop_assert_eq!(refused.reason(), expected);
    Ok(())
}

impl Case {
    fn all(&self) -> u32 {
        self.roles.iter().map(|role| role.exist).sum()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn refusal_states_only_what_is_true(case in case()) {
        let (world, wanted) = case.build();
        match world.plan(&wanted) {
            Ok(_) => prop_assert!(case.fits(View::Now)),
            Err(refused) => {
                prop_assert!(!case.fits(View::Now));
                judge(&case, &refused)?;
            }
        }
    }

    #[test]
    fn explanation_counts_members_that_fit_together(case in case()) {
        let (world, wanted) = case.build();
        let explained = world.explain(&wanted);
        prop_assert_eq!(explained.hopeless, !case.fits(View::Empty));
        let widest = explained.levels.last().unwrap();
        if case.fits(View::Now) {
            prop_assert!(widest.fits >= widest.must);
        } else {
            prop_assert_eq!(widest.fits, case.most(View::Now));
        }
        if !case.fits(View::Empty) {
            prop_assert_eq!(widest.empty, case.most(View::Empty));
        }
    }
}
