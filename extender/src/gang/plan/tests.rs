mod apart;
mod besides;
mod earmarked;
mod even;
mod level;
mod near;
mod oracle;
pub(in crate::gang) mod world;

use gantry_gang::needs::{Operator, PodTerm, Requirement};
use gantry_gang::protocol::{ShapeId, Sibling};
use gantry_gang::{Needs, Resources, Taint, TaintEffect};

use self::world::{World, gang, level, sibling, terms};
use super::*;
use crate::devices::DeviceSet;
use crate::fixtures::bridged;
use crate::gang::terrain::{Barred, Shape};

const ALL: &str = "0,1,2,3,4,5,6,7";

/// Two zones of two racks of three nodes, all free: `a` to `l`.
fn twelve() -> World {
    let mut world = World::new();
    for (rack, nodes) in [
        ("z1/r1", "abc"),
        ("z1/r2", "def"),
        ("z2/r3", "ghi"),
        ("z2/r4", "jkl"),
    ] {
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
    assert!(world.line(&gang(&[(3, eight)])).starts_with("rack r1: a["));
    assert!(
        world
            .line(&gang(&[(4, eight)]))
            .starts_with("2 racks of zone z1: ")
    );
    assert!(world.line(&gang(&[(7, eight)])).starts_with("2 zones: "));
}

#[test]
fn of_racks_that_hold_it_the_one_with_the_least_room_is_taken() {
    let mut world = twelve();
    world
        .node("z2/r9", "x", ALL)
        .node("z2/r9", "y", ALL)
        .node("z2/r9", "z", "0,1");
    let eight = world.shape(8);
    assert_eq!(
        world.line(&gang(&[(2, eight)])),
        "rack r9: x[0,1,2,3,4,5,6,7] y[0,1,2,3,4,5,6,7]"
    );
}

#[test]
fn of_zones_that_hold_it_the_one_where_it_lies_in_the_fewest_racks_is_taken() {
    let mut world = World::new();
    // Zone `y` has less room, in more racks.
    for (rack, nodes) in [
        ("x/r1", "abcd"),
        ("x/r2", "efgh"),
        ("y/r3", "ij"),
        ("y/r4", "kl"),
        ("y/r5", "m"),
    ] {
        for node in nodes.chars() {
            world.node(rack, &node.to_string(), ALL);
        }
    }
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
    assert!(
        placed
            .iter()
            .zip(0u32..)
            .all(|(place, rank)| place.rank == Some(rank))
    );
}

#[test]
fn a_required_level_is_kept_and_a_preferred_one_is_left_if_need_be() {
    let mut world = twelve();
    let eight = world.shape(8);
    let mut four = gang(&[(4, eight)]);
    level(&mut four, "rack", true);
    assert_eq!(
        world.line(&four),
        "4 members of 8 GPUs do not fit together within one rack even if it were empty"
    );
    level(&mut four, "rack", false);
    assert!(world.line(&four).starts_with("2 racks of zone z1: "));
    level(&mut four, "example.com/zone", true);
    assert!(world.line(&four).starts_with("2 racks of zone z1: "));
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
        .map(|tried| {
            format!(
                "{} of {}: {}, {}",
                tried.level, tried.domains, tried.best, tried.fits
            )
        })
        .collect();
    assert_eq!(
        tried,
        ["node of 6: a, 1", "rack of 4: r1, 2", "zone of 4: rack r1, 2"]
    );
    level(&mut three, "zone", false);
    assert!(world.line(&three).starts_with("2 zones: "));
}

#[test]
fn a_level_that_is_none_is_refused_by_name() {
    let mut world = twelve();
    let eight = world.shape(8);
    let mut four = gang(&[(4, eight)]);
    level(&mut four, "block", true);
    assert_eq!(
        world.line(&four),
        "block is no level of the fabric (levels: zone, rack)"
    );
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
    assert_eq!(
        placed.iter().map(|place| place.rank.unwrap()).collect::<Vec<_>>(),
        [0, 1, 2]
    );
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
    assert_eq!(
        placed.iter().map(|place| place.rank.unwrap()).collect::<Vec<_>>(),
        [0, 3]
    );
    assert_eq!(&*placed[1].role, "leader");
}

#[test]
fn slices_lie_in_one_rack_each() {
    let mut world = twelve();
    let eight = world.shape(8);
    let mut wanted = gang(&[(6, eight)]);
    level(&mut wanted, "rack", true);
    terms(&mut wanted, |terms| terms.slice = Some(2));
    let nodes: String = world
        .plan(&wanted)
        .unwrap()
        .places
        .iter()
        .map(|place| place.node.as_str())
        .collect();
    assert_eq!(nodes, "abdegh", "two of each rack, though three would fit");
    // The last slice may be smaller, and has the last ranks.
    let mut wanted = gang(&[(5, eight)]);
    level(&mut wanted, "rack", true);
    terms(&mut wanted, |terms| terms.slice = Some(2));
    let nodes: String = world
        .plan(&wanted)
        .unwrap()
        .places
        .iter()
        .map(|place| place.node.as_str())
        .collect();
    assert_eq!(nodes, "abdec");
}

#[test]
fn a_replacement_goes_to_the_rack_of_its_slice() {
    let mut world = twelve();
    let eight = world.shape(8);
    let mut wanted = gang(&[(1, eight)]);
    level(&mut wanted, "rack", true);
    terms(&mut wanted, |terms| {
        terms.slice = Some(2);
        terms.max = 4;
    });
    wanted.members[0].rank = Some(3);
    wanted.placed = vec![sibling("a", 0), sibling("b", 1), sibling("g", 2)];
    wanted.without = ["a", "b", "g"].map(Into::into).into();
    assert_eq!(world.plan(&wanted).unwrap().places[0].node.as_str(), "h");
    wanted.members[0].rank = Some(1);
    wanted.placed[1].rank = Some(3);
    assert_eq!(world.plan(&wanted).unwrap().places[0].node.as_str(), "c");
    wanted.without.push("c".into());
    assert!(world.plan(&wanted).is_err(), "its rack has no room");
}

/// The racks (by their first nodes) of the members of each slice of two, by ordinal.
fn sliced(world: &World, wanted: &Wanted) -> Vec<String> {
    let mut places = world.plan(wanted).unwrap().places;
    places.sort_by_key(|place| place.ordinal);
    let first = |node: &str| {
        "jgda"
            .chars()
            .find(|first| node.chars().all(|node| *first <= node))
    };
    let racks: Vec<char> = places
        .iter()
        .filter_map(|place| first(place.node.as_str()))
        .collect();
    racks.chunks(2).map(|slice| slice.iter().collect()).collect()
}

#[test]
fn slices_are_counted_by_position_where_ranks_have_gaps() {
    let mut world = twelve();
    let (eight, other) = (world.shape(8), world.shape_of(8, labelled()));
    // As of a JobSet of two jobs with three pods each, of two shapes.
    let mut wanted = gang(&[(3, eight), (3, other)]);
    level(&mut wanted, "rack", true);
    terms(&mut wanted, |terms| terms.slice = Some(2));
    let mut ranked = |ranks: [u32; 6]| {
        for (member, rank) in wanted.members.iter_mut().zip(ranks) {
            member.rank = Some(rank);
        }
        sliced(&world, &wanted)
    };
    assert_eq!(ranked([0, 1, 2, 100_000, 100_001, 100_002]), ["aa", "dd", "gg"]);
    // Two of the same rank, as of two tasks.
    assert_eq!(ranked([0, 0, 1, 1, 2, 2]), ["aa", "dd", "gg"]);
}

#[test]
fn a_replacement_takes_the_position_that_is_free_by_its_rank() {
    let mut world = twelve();
    let eight = world.shape(8);
    let mut wanted = gang(&[(1, eight)]);
    level(&mut wanted, "rack", true);
    terms(&mut wanted, |terms| {
        terms.slice = Some(2);
        terms.max = 6;
    });
    let at = |node: &str, rank: Option<u32>, ordinal: u32| Sibling {
        rank,
        ordinal: Some(ordinal),
        ..sibling(node, 0)
    };
    let mut place = |rank: Option<u32>, placed: Vec<Sibling>| {
        wanted.members[0].rank = rank;
        wanted.without = placed.iter().map(|sibling| sibling.node.clone()).collect();
        wanted.placed = placed;
        let placed = world.plan(&wanted).unwrap().places;
        (placed[0].node.to_string(), placed[0].ordinal)
    };
    // The first and the last are lost, and the last comes back first.
    let two = || vec![at("a", Some(100_001), 1), at("g", Some(200_000), 2)];
    assert_eq!(place(Some(200_001), two()), ("h".into(), Some(3)));
    assert_eq!(place(Some(100_000), two()), ("b".into(), Some(0)));
    // Ranks that are had twice.
    let twice = || vec![at("a", Some(0), 0), at("g", Some(1), 2), at("h", Some(1), 3)];
    assert_eq!(place(Some(0), twice()), ("b".into(), Some(1)));
    // Without ranks it is the position of the one that is lost.
    let none = || vec![at("a", None, 0), at("b", None, 1), at("g", None, 3)];
    assert_eq!(place(None, none()), ("h".into(), Some(2)));
}

#[test]
fn slices_of_several_shapes_lie_in_one_rack_each() {
    let mut world = twelve();
    let (four, eight) = (world.shape(4), world.shape(8));
    let mut wanted = gang(&[(1, four), (2, eight), (1, four), (2, eight)]);
    level(&mut wanted, "rack", true);
    terms(&mut wanted, |terms| terms.slice = Some(3));
    let placed = world.plan(&wanted).unwrap().places;
    let racks = |shape: ShapeId| -> Vec<&str> {
        let of_shape = placed.iter().filter(|place| place.shape == shape);
        let rack = |node: &str| if "abc".contains(node) { "r1" } else { "r2" };
        of_shape.map(|place| rack(place.node.as_str())).collect()
    };
    assert_eq!(placed.len(), 6);
    assert_eq!(racks(four), ["r1", "r2"]);
    assert_eq!(racks(eight), ["r1", "r1", "r2", "r2"]);
}

/// Given a gang of which all must be placed, of as many shapes as members, and one GPU too few: what else it could do with is not
/// looked for among the ways to do with fewer.
#[test]
fn a_gang_of_very_many_shapes_that_does_not_fit_is_refused_at_once() {
    let mut world = twelve();
    let members: Vec<(u32, ShapeId)> = (0..=96)
        .map(|milli_cpu| {
            let resources = Resources {
                milli_cpu,
                ..Resources::default()
            };
            let needs = Needs {
                resources,
                ..Needs::default()
            };
            (1, world.shape_of(1, needs))
        })
        .collect();
    assert!(world.plan(&gang(&members[..96])).is_ok());
    assert!(world.plan(&gang(&members)).is_err());
}

#[test]
fn several_shapes_share_nodes() {
    let mut world = World::new();
    world
        .node("z/r", "a", "0,1,2,3,4,5")
        .node("z/r", "b", "0,1,2,3,4");
    let (four, one) = (world.shape(4), world.shape(1));
    let placed = world.plan(&gang(&[(3, one), (2, four)])).unwrap();
    assert_eq!(placed.places.len(), 5);
    assert!(world.plan(&gang(&[(4, one), (2, four)])).is_err());
}

#[test]
fn cpu_and_taints_count() {
    let mut world = twelve();
    let needs = Needs {
        resources: Resources {
            milli_cpu: 40_000,
            pods: 1,
            ..Resources::default()
        },
        ..Needs::default()
    };
    let four = world.shape_of(4, needs);
    assert!(
        world.line(&gang(&[(2, four)])).starts_with("rack r1: a["),
        "one a node, for want of CPU"
    );
    for node in ["a", "b"] {
        world.room(node, |facts, _| {
            facts.taints.push(Taint {
                key: "maintenance".into(),
                value: "".into(),
                effect: TaintEffect::NoSchedule,
            });
        });
    }
    assert!(world.line(&gang(&[(2, four)])).starts_with("rack r2: d["));
}

#[test]
fn what_the_pods_there_forbid_and_nodes_not_offered_are_left_out() {
    let mut world = twelve();
    let eight = world.shape(8);
    let mut wanted = gang(&[(1, eight)]);
    wanted.without = vec!["a".into(), "b".into()];
    let barred = |_: &Shape| Barred {
        nodes: vec![NodeIx(2)],
        only: Some((2..5).map(NodeIx).collect()),
        ..Barred::default()
    };
    let placement = world
        .with_barred(&barred, |terrain| plan(terrain, &wanted))
        .unwrap();
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
        resources: Resources {
            pods: 1,
            ..Resources::default()
        },
        namespace: "ml".into(),
        labels: std::sync::Arc::new([("app".into(), "train".into())].into()),
        ..Needs::default()
    }
}

#[test]
fn members_that_keep_apart_do_not_share_what_they_must_not() {
    let mut world = twelve();
    let apart = |key| Needs {
        apart_from: vec![own_term(key)],
        ..labelled()
    };
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
    let together = Needs {
        together_with: vec![own_term("example.com/rack")],
        ..labelled()
    };
    let eight = world.shape_of(8, together);
    assert!(world.line(&gang(&[(3, eight)])).starts_with("rack r2: d["));
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
    assert!(world.line(&wanted).starts_with("rack r4: j["));
    let mut more = gang(&[(4, eight)]);
    more.placed = vec![sibling("k", 0)];
    more.without = vec!["k".into()];
    terms(&mut more, |terms| terms.max = 8);
    let nodes: String = world
        .plan(&more)
        .unwrap()
        .places
        .iter()
        .map(|place| place.node.as_str())
        .collect();
    assert_eq!(nodes, "ghjl", "its rack first, then its zone");
    level(&mut more, "rack", true);
    assert!(world.plan(&more).is_err());
    more.must = 1;
    assert_eq!(world.plan(&more).unwrap().places.len(), 2);
}

#[test]
fn members_beyond_the_minimum_that_find_no_room_are_not_called_none_of_one() {
    let mut world = World::new();
    world.node("z/r1", "a", "0,1").node("z/r2", "b", ALL);
    let four = world.shape(4);
    for (members, words) in [
        (1, "1 member of 4 GPUs does not fit within one rack"),
        (3, "none of 3 members of 4 GPUs fits within one rack"),
    ] {
        let mut more = gang(&[(members, four)]);
        more.must = 0;
        more.placed = vec![sibling("a", 0)];
        level(&mut more, "rack", true);
        terms(&mut more, |terms| terms.max = 8);
        assert_eq!(world.line(&more), words);
    }
}

#[test]
fn inside_the_nodes_bandwidth_goes_before_what_is_left_over() {
    let mut world = World::of(&bridged());
    // Loose GPUs of broken pairs would fit exactly; whole pairs are faster.
    world
        .node("z/r", "a", "0,2")
        .node("z/r", "b", "4,6")
        .node("z/r", "c", ALL);
    let two = world.shape(2);
    assert_eq!(world.line(&gang(&[(2, two)])), "node c: c[0,1 2,3]");
    world.node("z/r", "d", "4,5,6,7");
    assert_eq!(world.line(&gang(&[(2, two)])), "node d: d[4,5 6,7]");
}

#[test]
fn a_refusal_says_what_was_tried_and_what_is_missing() {
    let mut world = World::new();
    world.node("z1/r1", "a", "0,1,2,3,4,5").node("z1/r1", "b", ALL);
    world.node("z1/r2", "c", "").node_with(
        "z1/r2",
        "d",
        &"0,1"
            .split(',')
            .map(|gpu| gpu.parse::<usize>().unwrap())
            .collect(),
        5,
    );
    world.room("b", |_, left| left.milli_cpu = 1000);
    let needs = Needs {
        resources: Resources {
            milli_cpu: 8000,
            pods: 1,
            ..Resources::default()
        },
        ..Needs::default()
    };
    let four = world.shape_of(4, needs);
    let mut wanted = gang(&[(4, four)]);
    level(&mut wanted, "rack", true);
    let refused = world.plan(&wanted).unwrap_err();
    assert!(!refused.hopeless);
    insta::assert_snapshot!(format!("{}\n{}", refused.reason, refused.message));
}

#[test]
fn a_gang_that_is_too_large_for_the_empty_cluster_is_hopeless() {
    let mut world = World::new();
    world
        .node("z1/r1", "a", "0")
        .node_with("z1/r1", "b", &DeviceSet::EMPTY, 5);
    let four = world.shape(4);
    let refused = world.plan(&gang(&[(2, four)])).unwrap_err();
    assert!(!refused.hopeless, "when the pods on a have ended it fits there");
    let mut wanted = gang(&[(5, four)]);
    wanted.must = 3;
    let refused = world.plan(&wanted).unwrap_err();
    assert!(refused.hopeless);
    insta::assert_snapshot!(format!("{}\n{}", refused.reason, refused.message));
}

#[test]
fn what_fits_is_explained_too() {
    let mut world = twelve();
    let (eight, one) = (world.shape(8), world.shape(1));
    let explanation = world.explain(&gang(&[(1, one), (4, eight)]));
    assert_eq!(explanation.members, "1 member of 1 GPU and 4 of 8 GPUs");
    assert_eq!(
        explanation
            .levels
            .iter()
            .map(|level| (&*level.level, level.domains, level.fits))
            .collect::<Vec<_>>(),
        [("node", 12, 2), ("rack", 4, 4), ("zone", 2, 5), ("cluster", 1, 5)]
    );
    assert!(!explanation.hopeless);
}

#[test]
fn members_that_do_not_exist_yet_are_no_reason_why_the_others_would_not_fit() {
    let mut world = twelve();
    let (one, eight) = (world.shape(1), world.shape(8));
    for members in [gang(&[(3, eight)]), gang(&[(1, one), (2, eight)])] {
        let mut wanted = members;
        wanted.must = 4;
        let explanation = world.explain(&wanted);
        assert_eq!((explanation.hopeless, explanation.must), (false, 3));
    }
    let mut wanted = gang(&[(20, eight)]);
    wanted.must = 24;
    assert!(world.explain(&wanted).hopeless);
}

#[test]
fn what_is_missing_is_counted_for_those_that_must_be_placed() {
    let mut world = World::new();
    world.node("z1/r1", "a", ALL).node("z1/r1", "b", "");
    let eight = world.shape(8);
    let mut wanted = gang(&[(5, eight)]);
    wanted.must = 2;
    let refused = world.plan(&wanted).unwrap_err();
    assert_eq!(
        &*refused.reason,
        "2 of 5 members of 8 GPUs do not fit together in the cluster"
    );
    let tried = "cluster: 1 of 5 fit, 2 needed, 2 if nothing else were there, 16 GPUs asked for those needed, 8 free, \
                 16 healthy of 16, 8 more would have to come free";
    assert!(refused.message.contains(tried), "{}", refused.message);
    // Of members beyond the minimum one would do.
    let mut world = World::new();
    world.node("z1/r1", "b", "0,1");
    let mut wanted = gang(&[(3, world.shape(8))]);
    wanted.must = 0;
    let refused = world.plan(&wanted).unwrap_err();
    let tried = "cluster: 0 of 3 fit, 1 if nothing else were there, 8 GPUs asked for one, 2 free, 8 healthy of 8, \
                 6 more would have to come free";
    assert!(refused.message.contains(tried), "{}", refused.message);
}

#[test]
fn of_one_member_and_one_device_is_said_so() {
    let mut world = World::new();
    world.node("z1/r1", "a", "");
    let one = world.shape(1);
    let mut wanted = gang(&[(9, one)]);
    wanted.must = 1;
    let refused = world.plan(&wanted).unwrap_err();
    assert_eq!(&*refused.reason, "none of 9 members of 1 GPU fits in the cluster");
    assert!(
        refused.message.contains("(nodes: 1 no GPU free)"),
        "{}",
        refused.message
    );
}
