//! Members that come in slices, each in one domain.

use super::*;

#[test]
fn slices_lie_in_one_rack_each() {
    let mut world = twelve();
    let eight = world.shape(8);
    let mut wanted = gang(&[(6, eight)]);
    level(&mut wanted, "rack", true);
    terms(&mut wanted, |terms| terms.slice = Some(2));
    assert_eq!(world.nodes(&wanted), "abdegh", "two of each rack, though three would fit");
    // The last slice may be smaller, and has the last ranks.
    let mut wanted = gang(&[(5, eight)]);
    level(&mut wanted, "rack", true);
    terms(&mut wanted, |terms| terms.slice = Some(2));
    assert_eq!(world.nodes(&wanted), "abdec");
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
fn sliced(world: &World, wanted: &PlanRequest) -> Vec<String> {
    let mut places = world.plan(wanted).unwrap().places;
    places.sort_by_key(|place| place.ordinal);
    let first = |node: &str| "jgda".chars().find(|first| node.chars().all(|node| *first <= node));
    let racks: Vec<char> = places.iter().filter_map(|place| first(place.node.as_str())).collect();
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
