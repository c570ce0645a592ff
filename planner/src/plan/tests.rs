mod apart;
mod backfill;
mod causes;
mod compare;
mod diagnosis;
mod even;
mod level;
mod near;
mod oracle;
mod rails;
mod slices;
mod spares;
mod terms;
mod trees;
mod truth;
pub(crate) mod world;

use gantry_gang::needs::{Operator, PodTerm, Requirement};
use gantry_gang::protocol::{Obstacle, ReasonScope, ShapeId, Sibling};
use gantry_gang::{Needs, Resources, Taint, TaintEffect};

use self::world::{World, gang, level, sibling, terms};
use super::*;
use crate::devices::DeviceSet;
use crate::fixtures::bridged;
use crate::input::{PlacementRules, Shape};

const ALL: &str = "0,1,2,3,4,5,6,7";

/// Two zones of two racks of three nodes, all free: `a` to `l`.
fn twelve() -> World {
    let mut world = World::new();
    for (rack, nodes) in [("z1/r1", "abc"), ("z1/r2", "def"), ("z2/r3", "ghi"), ("z2/r4", "jkl")] {
        for node in nodes.chars() {
            world.node(rack, &node.to_string(), ALL);
        }
    }
    world
}

/// Zone `y` has less room than zone `x`, in more racks.
fn uneven_zones() -> World {
    let mut world = World::new();
    for (rack, nodes) in [("x/r1", "abcd"), ("x/r2", "efgh"), ("y/r3", "ij"), ("y/r4", "kl"), ("y/r5", "m")] {
        for node in nodes.chars() {
            world.node(rack, &node.to_string(), ALL);
        }
    }
    world
}

#[test]
fn a_gang_that_fits_on_one_node_lies_on_one_node() {
    let mut world = twelve();
    let four = world.shape(4);
    assert_eq!(world.line(&gang(&[(2, four)])), "node a: a[0,1,2,3 4,5,6,7]");
}

#[test]
fn the_fullest_node_that_holds_it_goes_first() {
    let mut world = twelve();
    world.node("z2/r4", "m", "2,3,4,5");
    let two = world.shape(2);
    assert_eq!(world.line(&gang(&[(2, two)])), "node m: m[2,3 4,5]");
}

#[test]
fn a_gang_lies_in_the_smallest_domain_that_holds_it() {
    let mut world = twelve();
    let eight = world.shape(8);
    insta::assert_snapshot!(world.line(&gang(&[(3, eight)])), @"rack r1: a[0,1,2,3,4,5,6,7] b[0,1,2,3,4,5,6,7] c[0,1,2,3,4,5,6,7]");
    insta::assert_snapshot!(world.line(&gang(&[(4, eight)])), @"2 racks of zone z1: a[0,1,2,3,4,5,6,7] b[0,1,2,3,4,5,6,7] d[0,1,2,3,4,5,6,7] e[0,1,2,3,4,5,6,7]");
    insta::assert_snapshot!(world.line(&gang(&[(7, eight)])), @"2 zones: a[0,1,2,3,4,5,6,7] b[0,1,2,3,4,5,6,7] c[0,1,2,3,4,5,6,7] d[0,1,2,3,4,5,6,7] e[0,1,2,3,4,5,6,7] g[0,1,2,3,4,5,6,7] h[0,1,2,3,4,5,6,7]");
}

#[test]
fn of_racks_that_hold_it_the_one_with_the_least_room_is_taken() {
    let mut world = twelve();
    world.node("z2/r9", "x", ALL).node("z2/r9", "y", ALL).node("z2/r9", "z", "0,1");
    let eight = world.shape(8);
    assert_eq!(world.line(&gang(&[(2, eight)])), "rack r9: x[0,1,2,3,4,5,6,7] y[0,1,2,3,4,5,6,7]");
}

#[test]
fn zone_with_the_fewest_racks_is_taken() {
    let mut world = uneven_zones();
    let eight = world.shape(8);
    let placed = world.plan(&gang(&[(5, eight)])).unwrap();
    assert_eq!(&*placed.domain, "2 racks of zone x");
}

#[test]
fn a_gang_of_one_node_lies_where_a_rack_is_broken_already() {
    let mut world = twelve();
    let eight = world.shape(8);
    world.node("z2/r9", "y", ALL).node("z2/r9", "z", "");
    assert_eq!(world.line(&gang(&[(1, eight)])), "node y: y[0,1,2,3,4,5,6,7]");
}

#[test]
fn several_racks_are_filled_so_that_no_further_one_is_broken() {
    let mut world = World::new();
    for (rack, nodes) in [("z/r1", "abc"), ("z/r2", "def"), ("z/r3", "g"), ("z/r4", "hi")] {
        for node in nodes.chars() {
            world.node(rack, &node.to_string(), ALL);
        }
    }
    let eight = world.shape(8);
    let nodes = |members| -> String {
        let placed = world.plan(&gang(&[(members, eight)])).unwrap().places;
        placed.iter().map(|place| place.node.as_str()).collect()
    };
    assert_eq!(nodes(4), "abcg", "3 + 1 exactly, no rack of two broken");
    assert_eq!(nodes(5), "abchi");
}

#[test]
fn ranks_run_along_the_tree() {
    let mut world = twelve();
    let eight = world.shape(8);
    let placed = world.plan(&gang(&[(12, eight)])).unwrap().places;
    let nodes: String = placed.iter().map(|place| place.node.as_str()).collect();
    assert_eq!(nodes, "abcdefghijkl");
    assert!(placed.iter().zip(0u32..).all(|(place, rank)| place.rank == Some(rank)));
}

#[test]
fn required_level_binds_and_preferred_level_does_not() {
    let mut world = twelve();
    let eight = world.shape(8);
    let mut four = gang(&[(4, eight)]);
    level(&mut four, "rack", true);
    assert_eq!(world.shortage(&four).within, ReasonScope::OneOf("rack".into()));
    assert_eq!(world.line(&four), "CannotFit");
    level(&mut four, "rack", false);
    insta::assert_snapshot!(world.line(&four), @"2 racks of zone z1: a[0,1,2,3,4,5,6,7] b[0,1,2,3,4,5,6,7] d[0,1,2,3,4,5,6,7] e[0,1,2,3,4,5,6,7]");
    level(&mut four, "example.com/zone", true);
    insta::assert_snapshot!(world.line(&four), @"2 racks of zone z1: a[0,1,2,3,4,5,6,7] b[0,1,2,3,4,5,6,7] d[0,1,2,3,4,5,6,7] e[0,1,2,3,4,5,6,7]");
}

#[test]
fn a_rack_holds_a_gang_also_where_nobody_says_its_zone() {
    let mut world = World::new();
    world.node("z1/r1", "a", ALL).node("z1/r1", "b", "0");
    world.node("/r1", "m", ALL).node("/r1", "n", ALL);
    world.node("/r2", "o", ALL).node("", "p", ALL);
    let eight = world.shape(8);
    let mut two = gang(&[(2, eight)]);
    for scope in ["rack", "zone"] {
        level(&mut two, scope, true);
        assert_eq!(world.line(&two), "rack r1: m[0,1,2,3,4,5,6,7] n[0,1,2,3,4,5,6,7]");
    }
    let mut three = gang(&[(3, eight)]);
    level(&mut three, "zone", true);
    let tried = world.explain(&three).levels.into_iter();
    let tried: Vec<String> = tried
        .map(|tried| format!("{} of {}: {}, {}", tried.level, tried.domains, tried.best, tried.fits))
        .collect();
    assert_eq!(tried, ["node of 6: a, 1", "rack of 4: r1, 2", "zone of 4: rack r1, 2"]);
    level(&mut three, "zone", false);
    insta::assert_snapshot!(world.line(&three), @"2 zones: p[0,1,2,3,4,5,6,7] m[0,1,2,3,4,5,6,7] n[0,1,2,3,4,5,6,7]");
}

#[test]
fn a_level_that_is_none_is_refused_by_name() {
    let mut world = twelve();
    let eight = world.shape(8);
    let mut four = gang(&[(4, eight)]);
    level(&mut four, "block", true);
    let known = vec!["zone".into(), "rack".into()];
    assert_eq!(world.plan(&four), Err(Refusal::UnknownLevel { level: "block".into(), known }));
    level(&mut four, "block", false);
    assert!(world.plan(&four).is_ok());
}

#[test]
fn extras_come_as_far_as_they_fit_and_the_lowest_ranks_first() {
    let mut world = twelve();
    let eight = world.shape(8);
    let mut wanted = gang(&[(5, eight)]);
    wanted.must = 2;
    level(&mut wanted, "rack", true);
    let placed = world.plan(&wanted).unwrap().places;
    assert_eq!(placed.iter().map(|place| place.rank.unwrap()).collect::<Vec<_>>(), [0, 1, 2]);
    terms(&mut wanted, |terms| terms.max = 2);
    assert_eq!(world.plan(&wanted).unwrap().places.len(), 2);
    wanted.must = 4;
    assert!(world.plan(&wanted).is_err());
}

#[test]
fn roles_get_their_least_before_ranks_count() {
    let mut world = World::new();
    world.node("z/r", "a", ALL).node("z/r", "b", ALL);
    let eight = world.shape(8);
    let mut wanted = gang(&[(4, eight)]);
    wanted.must = 2;
    wanted.members[3].role = "leader".into();
    terms(&mut wanted, |terms| terms.by_role = vec![("leader".into(), 1)]);
    let placed = world.plan(&wanted).unwrap().places;
    assert_eq!(placed.iter().map(|place| place.rank.unwrap()).collect::<Vec<_>>(), [0, 3]);
    assert_eq!(&*placed[1].role, "leader");
}

#[test]
fn several_shapes_share_nodes() {
    let mut world = World::new();
    world.node("z/r", "a", "0,1,2,3,4,5").node("z/r", "b", "0,1,2,3,4");
    let (four, one) = (world.shape(4), world.shape(1));
    let placed = world.plan(&gang(&[(3, one), (2, four)])).unwrap();
    assert_eq!(placed.places.len(), 5);
    assert!(world.plan(&gang(&[(4, one), (2, four)])).is_err());
}

#[test]
fn cpu_and_taints_count() {
    let mut world = twelve();
    let needs = Needs {
        resources: Resources { milli_cpu: 40_000, pods: 1, ..Resources::default() },
        ..Needs::default()
    };
    let four = world.shape_of(4, needs);
    // One a node, for want of CPU.
    insta::assert_snapshot!(world.line(&gang(&[(2, four)])), @"rack r1: a[0,1,2,3] b[0,1,2,3]");
    for node in ["a", "b"] {
        world.room(node, |facts, _| {
            facts.taints.push(Taint {
                key: "maintenance".into(),
                value: "".into(),
                effect: TaintEffect::NoSchedule,
            });
        });
    }
    insta::assert_snapshot!(world.line(&gang(&[(2, four)])), @"rack r2: d[0,1,2,3] e[0,1,2,3]");
}

#[test]
fn forbidden_and_unoffered_nodes_are_left_out() {
    let mut world = twelve();
    let eight = world.shape(8);
    let mut wanted = gang(&[(1, eight)]);
    wanted.without = vec!["a".into(), "b".into()];
    let barred = |_: &Shape| PlacementRules {
        nodes: vec![NodeIx(2)],
        only: Some((2..5).map(NodeIx).collect()),
        ..PlacementRules::default()
    };
    let placement = world.with_barred(&barred, |input| plan(input, &wanted)).unwrap();
    assert_eq!(placement.places[0].node.as_str(), "d");
}

fn own_term(key: &str) -> PodTerm {
    PodTerm {
        selector: vec![Requirement {
            key: "app".into(),
            operator: Operator::In,
            values: vec!["train".into()],
        }],
        namespaces: Some(Vec::new()),
        topology_key: key.into(),
    }
}

fn labelled() -> Needs {
    Needs {
        resources: Resources { pods: 1, ..Resources::default() },
        namespace: "ml".into(),
        labels: std::sync::Arc::new([("app".into(), "train".into())].into()),
        ..Needs::default()
    }
}

#[test]
fn members_that_keep_apart_do_not_share_what_they_must_not() {
    let mut world = twelve();
    let apart = |key| Needs { apart_from: vec![own_term(key)], ..labelled() };
    let node = world.shape_of(1, apart("kubernetes.io/hostname"));
    let rack = world.shape_of(1, apart("example.com/rack"));
    let nodes = |shape, members| -> Option<String> {
        let placed = world.plan(&gang(&[(members, shape)])).ok()?.places;
        Some(placed.iter().map(|place| place.node.as_str()).collect())
    };
    assert_eq!(nodes(node, 3).as_deref(), Some("abc"));
    assert_eq!(nodes(rack, 3).as_deref(), Some("adg"));
    assert_eq!(nodes(rack, 5), None);
}

#[test]
fn members_that_must_be_together_are() {
    let mut world = twelve();
    world.room("a", |facts, _| {
        facts.labels.remove("example.com/rack");
    });
    let together = Needs { together_with: vec![own_term("example.com/rack")], ..labelled() };
    let eight = world.shape_of(8, together);
    insta::assert_snapshot!(world.line(&gang(&[(3, eight)])), @"rack r2: d[0,1,2,3,4,5,6,7] e[0,1,2,3,4,5,6,7] f[0,1,2,3,4,5,6,7]");
    assert!(world.plan(&gang(&[(4, eight)])).is_err());
}

#[test]
fn replacements_and_extras_stay_near_the_others() {
    let mut world = twelve();
    let eight = world.shape(8);
    let mut wanted = gang(&[(1, eight)]);
    wanted.placed = vec![sibling("k", 0)];
    wanted.without = vec!["k".into()];
    terms(&mut wanted, |terms| terms.max = 8);
    insta::assert_snapshot!(world.line(&wanted), @"rack r4: j[0,1,2,3,4,5,6,7]");
    let mut more = gang(&[(4, eight)]);
    more.placed = vec![sibling("k", 0)];
    more.without = vec!["k".into()];
    terms(&mut more, |terms| terms.max = 8);
    assert_eq!(world.nodes(&more), "ghjl", "its rack first, then its zone");
    level(&mut more, "rack", true);
    assert!(world.plan(&more).is_err());
    more.must = 1;
    assert_eq!(world.plan(&more).unwrap().places.len(), 2);
}

#[test]
fn inside_the_nodes_bandwidth_goes_before_what_is_left_over() {
    let mut world = World::of(&bridged());
    // Loose GPUs of broken pairs would fit exactly; whole pairs are faster.
    world.node("z/r", "a", "0,2").node("z/r", "b", "4,6").node("z/r", "c", ALL);
    let two = world.shape(2);
    assert_eq!(world.line(&gang(&[(2, two)])), "node c: c[0,1 2,3]");
    world.node("z/r", "d", "4,5,6,7");
    assert_eq!(world.line(&gang(&[(2, two)])), "node d: d[4,5 6,7]");
}
