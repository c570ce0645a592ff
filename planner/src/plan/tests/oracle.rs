//! Plans held against trying everything, on small clusters.

use std::collections::{BTreeSet, HashMap};

use gantry_gang::needs::{Operator, PodTerm, Requirement};
use gantry_gang::protocol::{Placement, PlanRequest, ShapeId};
use gantry_gang::{Needs, Resources};
use proptest::prelude::*;

use super::world::{World, gang, level, terms};
use crate::devices::DeviceSet;

#[derive(Debug, Clone)]
struct Case {
    /// Zone, rack (each without a label above its last), free GPUs as bits, CPU left.
    nodes: Vec<(u8, u8, u8, i64)>,
    /// GPUs, CPU, kept apart by node.
    shapes: Vec<(u32, i64, bool)>,
    /// Members of each shape.
    members: Vec<u32>,
    must: u32,
    level: Option<(usize, bool)>,
}

prop_compose! {
    fn case()(
        nodes in prop::collection::vec((0u8..=ZONES, 0u8..=RACKS, any::<u8>(), 0i64..5), 1..6),
        shapes in prop::collection::vec((1u32..6, 0i64..3, prop::bool::weighted(0.2)), 1..3),
        first in 1u32..6,
        second in 0u32..4,
        must in 1u32..8,
        level in prop::option::of((0usize..3, any::<bool>())),
    ) -> Case {
        let members = if shapes.len() == 1 { vec![first] } else { vec![first, second] };
        Case { nodes, shapes, must: must.min(members.iter().sum()), members, level }
    }
}

/// Zones and racks with a label. One more is none.
const ZONES: u8 = 2;
const RACKS: u8 = 3;

const LEVELS: [&str; 3] = ["zone", "rack", "node"];

fn needs(cpu: i64, apart: bool) -> Needs {
    let term = PodTerm {
        selector: vec![Requirement { key: "app".into(), operator: Operator::Exists, values: Vec::new() }],
        namespaces: Some(Vec::new()),
        topology_key: "kubernetes.io/hostname".into(),
    };
    Needs {
        resources: Resources { milli_cpu: cpu, pods: 1, ..Resources::default() },
        namespace: "ml".into(),
        labels: std::sync::Arc::new([("app".into(), "x".into())].into()),
        apart_from: if apart { vec![term] } else { Vec::new() },
        ..Needs::default()
    }
}

impl Case {
    fn build(&self, order: &[usize]) -> (World, PlanRequest) {
        let mut world = World::new();
        for index in order {
            let (zone, rack, bits, cpu) = self.nodes[*index];
            let free: DeviceSet = (0..8).filter(|gpu| bits >> gpu & 1 == 1).collect();
            let name = format!("n{index}");
            let zone = if zone < ZONES { format!("z{zone}") } else { String::new() };
            let rack = if rack < RACKS { format!("r{rack}") } else { String::new() };
            world.node_with(&format!("{zone}/{rack}"), &name, &free, 0);
            world.room(&name, |_, left| left.milli_cpu = cpu);
        }
        let shapes: Vec<ShapeId> =
            self.shapes.iter().map(|(gpus, cpu, apart)| world.shape_of(*gpus, needs(*cpu, *apart))).collect();
        let members: Vec<(u32, ShapeId)> = self.members.iter().copied().zip(shapes).collect();
        let mut wanted = gang(&members);
        wanted.must = self.must;
        if let Some((at, required)) = self.level {
            level(&mut wanted, LEVELS[at], required);
        }
        (world, wanted)
    }

    /// The domain of each node at a width: 0 the node, 1 the rack, 2 the zone, 3 the cluster.
    fn domain(&self, node: usize, width: usize) -> usize {
        let (zone, rack, ..) = self.nodes[node];
        let (zoned, racked) = (zone < ZONES, rack < RACKS);
        let alone = 1000 + node;
        let in_rack = 100 + usize::from(zone) * 10 + usize::from(rack);
        match width {
            0 => node,
            1 if racked => in_rack,
            // Where no node has the label there is no such level: every node is by itself.
            2 if !self.nodes.iter().any(|node| node.0 < ZONES) => alone,
            2 if zoned => usize::from(zone),
            // In whichever zone: in one, as it is one rack.
            2 if racked => in_rack,
            1 | 2 => alone,
            _ => 0,
        }
    }

    fn widest(&self) -> usize {
        match self.level {
            Some((at, true)) => 2 - at,
            _ => 3,
        }
    }

    /// Every combination of members of each shape that fits within some nodes.
    fn fitting(&self, nodes: &[usize]) -> BTreeSet<Vec<u32>> {
        let mut reached: BTreeSet<Vec<u32>> = [vec![0; self.members.len()]].into();
        for node in nodes {
            let mut next = reached.clone();
            for counts in &reached {
                self.on_node(*node, counts, &mut vec![0; counts.len()], 0, &mut next);
            }
            reached = next;
        }
        reached
    }

    fn on_node(
        &self,
        node: usize,
        counts: &[u32],
        on: &mut Vec<u32>,
        slot: usize,
        next: &mut BTreeSet<Vec<u32>>,
    ) {
        let (_, _, bits, cpu) = self.nodes[node];
        let gpus: u32 = on.iter().zip(&self.shapes).map(|(on, shape)| on * shape.0).sum();
        let used: i64 = on.iter().zip(&self.shapes).map(|(on, shape)| i64::from(*on) * shape.1).sum();
        let lonely =
            on.iter().zip(&self.shapes).any(|(on, shape)| *on > 0 && shape.2) && on.iter().sum::<u32>() > 1;
        if gpus > bits.count_ones() || used > cpu || lonely {
            return;
        }
        if slot == on.len() {
            next.insert(counts.iter().zip(on).map(|(a, b)| a + *b).collect());
            return;
        }
        for count in 0..=self.members[slot] - counts[slot] {
            on[slot] = count;
            self.on_node(node, counts, on, slot + 1, next);
        }
        on[slot] = 0;
    }

    /// The most members that fit within one domain of a width.
    fn most(&self, width: usize) -> u32 {
        let mut domains: HashMap<usize, Vec<usize>> = HashMap::new();
        for node in 0..self.nodes.len() {
            domains.entry(self.domain(node, width)).or_default().push(node);
        }
        let fitting = domains.values().flat_map(|nodes| self.fitting(nodes));
        fitting.map(|counts| counts.iter().sum()).max().unwrap_or(0)
    }

    fn width(&self, placement: &Placement) -> usize {
        let nodes: Vec<usize> =
            placement.places.iter().map(|place| place.node.as_str()[1..].parse().unwrap()).collect();
        (0..4)
            .find(|width| {
                nodes.iter().all(|node| self.domain(*node, *width) == self.domain(nodes[0], *width))
            })
            .unwrap()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    #[test]
    fn it_fits_exactly_when_trying_everything_finds_a_way(case in case()) {
        let (world, wanted) = case.build(&(0..case.nodes.len()).collect::<Vec<_>>());
        let most = case.most(case.widest());
        match world.plan(&wanted) {
            Err(refused) => {
                prop_assert!(most < case.must, "{refused:?}");
            }
            Ok(placement) => {
                let placed = u32::try_from(placement.places.len()).unwrap();
                prop_assert!(placed >= case.must && placed <= most);
                let preferred = matches!(case.level, Some((_, false)));
                if case.shapes.len() == 1 && !preferred {
                    prop_assert_eq!(placed, most, "as many as fit");
                }
                // No narrower part of the fabric holds as many of the same shapes.
                let width = case.width(&placement);
                prop_assert!(width <= case.widest());
                if case.shapes.len() == 1 {
                    prop_assert!((0..width).all(|narrower| case.most(narrower) < placed), "a narrower part would do");
                }
            }
        }
    }

    #[test]
    fn plan_uses_free_devices_and_respects_node_resources(case in case()) {
        let (world, wanted) = case.build(&(0..case.nodes.len()).collect::<Vec<_>>());
        let Ok(placement) = world.plan(&wanted) else { return Ok(()) };
        let mut taken = BTreeSet::new();
        let mut cpu: HashMap<usize, i64> = HashMap::new();
        for place in &placement.places {
            let node: usize = place.node.as_str()[1..].parse().unwrap();
            let (gpus, each, _) = case.shapes[place.shape.0 as usize];
            *cpu.entry(node).or_default() += each;
            let [(_, ids)] = &place.devices[..] else { panic!("{place:?}") };
            prop_assert_eq!(ids.len(), gpus as usize);
            for id in ids {
                prop_assert!(taken.insert(id.clone()), "given out twice: {id}");
                let gpu: usize = id.as_str().rsplit('-').next().unwrap().parse().unwrap();
                prop_assert!(id.as_str().contains(place.node.as_str()));
                prop_assert!(case.nodes[node].2 >> gpu & 1 == 1, "not free: {id}");
            }
        }
        for (node, cpu) in cpu {
            prop_assert!(cpu <= case.nodes[node].3);
        }
        let ranks: Vec<u32> = placement.places.iter().map(|place| place.rank.unwrap()).collect();
        prop_assert_eq!(ranks.iter().collect::<BTreeSet<_>>().len(), ranks.len());
    }

    #[test]
    fn the_order_in_which_nodes_became_known_does_not_matter(
        (case, order) in case().prop_flat_map(|case| {
            let order = Just((0..case.nodes.len()).collect::<Vec<_>>()).prop_shuffle();
            (Just(case), order)
        }),
    ) {
        let (world, wanted) = case.build(&(0..case.nodes.len()).collect::<Vec<_>>());
        let (other, same) = case.build(&order);
        prop_assert_eq!(world.plan(&wanted), other.plan(&same));
    }

    #[test]
    fn members_beyond_the_most_get_no_place(case in case(), max in 1u32..8) {
        let (world, mut wanted) = case.build(&(0..case.nodes.len()).collect::<Vec<_>>());
        let max = max.max(case.must);
        terms(&mut wanted, |terms| terms.max = max);
        if let Ok(placement) = world.plan(&wanted) {
            prop_assert!(placement.places.len() <= max as usize);
        }
    }
}
