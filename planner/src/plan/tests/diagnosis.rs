//! What a plan that fails, or fits, says of itself.

use gantry_gang::protocol::DeviceShortage;

use super::*;

/// Given a gang of which all must be placed, of as many shapes as members, and one GPU too few: what else it could do with is not
/// looked for among the ways to do with fewer.
#[test]
fn gang_of_very_many_shapes_is_refused_at_once() {
    let mut world = twelve();
    let members: Vec<(u32, ShapeId)> = (0..=96)
        .map(|milli_cpu| {
            let resources = Resources { milli_cpu, ..Resources::default() };
            let needs = Needs { resources, ..Needs::default() };
            (1, world.shape_of(1, needs))
        })
        .collect();
    assert!(world.plan(&gang(&members[..96])).is_ok());
    assert!(world.plan(&gang(&members)).is_err());
}

#[test]
fn refusal_of_surplus_members_counts_them_correctly() {
    let mut world = World::new();
    world.node("z/r1", "a", "0,1").node("z/r2", "b", ALL);
    let four = world.shape(4);
    for members in [1, 3] {
        let mut more = gang(&[(members, four)]);
        more.must = 0;
        more.placed = vec![sibling("a", 0)];
        level(&mut more, "rack", true);
        terms(&mut more, |terms| terms.max = 8);
        let shortage = world.shortage(&more);
        assert_eq!((shortage.must, shortage.fits, shortage.hopeless), (0, 0, false));
        assert_eq!(
            (shortage.members[0].count, shortage.within),
            (members, ReasonScope::OneOf("rack".into()))
        );
    }
}

#[test]
fn a_refusal_says_what_was_tried_and_what_is_missing() {
    let mut world = World::new();
    world.node("z1/r1", "a", "0,1,2,3,4,5").node("z1/r1", "b", ALL);
    world.node("z1/r2", "c", "").node_with(
        "z1/r2",
        "d",
        &"0,1".split(',').map(|gpu| gpu.parse::<usize>().unwrap()).collect(),
        5,
    );
    world.room("b", |_, left| left.milli_cpu = 1000);
    let needs = Needs {
        resources: Resources { milli_cpu: 8000, pods: 1, ..Resources::default() },
        ..Needs::default()
    };
    let four = world.shape_of(4, needs);
    let mut wanted = gang(&[(4, four)]);
    level(&mut wanted, "rack", true);
    let refused = world.plan(&wanted).unwrap_err();
    assert!(!refused.is_hopeless());
    insta::assert_snapshot!(format!("{}\n{:#?}", refused.message(), world.explain(&wanted).levels));
}

#[test]
fn a_gang_that_is_too_large_for_the_empty_cluster_is_hopeless() {
    let mut world = World::new();
    world.node("z1/r1", "a", "0").node_with("z1/r1", "b", &DeviceSet::EMPTY, 5);
    let four = world.shape(4);
    let refused = world.plan(&gang(&[(2, four)])).unwrap_err();
    assert!(!refused.is_hopeless(), "when the pods on a have ended it fits there");
    let mut wanted = gang(&[(5, four)]);
    wanted.must = 3;
    let refused = world.plan(&wanted).unwrap_err();
    assert!(refused.is_hopeless());
    insta::assert_snapshot!(refused.message());
}

#[test]
fn what_fits_is_explained_too() {
    let mut world = twelve();
    let (eight, one) = (world.shape(8), world.shape(1));
    let explanation = world.explain(&gang(&[(1, one), (4, eight)]));
    assert_eq!(explanation.members, "1 member of 1 GPU and 4 of 8 GPUs");
    assert_eq!(
        explanation.levels.iter().map(|level| (&*level.level, level.domains, level.fits)).collect::<Vec<_>>(),
        [("node", 12, 1), ("rack", 4, 3), ("zone", 2, 5), ("cluster", 1, 5)]
    );
    assert!(!explanation.hopeless);
}

#[test]
fn missing_members_do_not_make_the_others_hopeless() {
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
    let shortage = world.shortage(&wanted);
    assert_eq!((shortage.must, shortage.fits, shortage.empty), (2, 1, 2));
    let of = |free, healthy, total, requested| DeviceShortage {
        unit: "GPUs".into(),
        free,
        reserved: 0,
        healthy,
        total,
        requested,
    };
    assert_eq!(shortage.devices, Some(of(8, 16, 16, 16)));
    // Of members beyond the minimum one would do.
    let mut world = World::new();
    world.node("z1/r1", "b", "0,1");
    let mut wanted = gang(&[(3, world.shape(8))]);
    wanted.must = 0;
    let shortage = world.shortage(&wanted);
    assert_eq!((shortage.must, shortage.fits, shortage.empty), (0, 0, 1));
    assert_eq!(shortage.devices, Some(of(2, 8, 8, 8)));
}
