//! Trees of groups: PodGroups of a CompositePodGroup are one gang, of which so many groups are needed, each as a whole.

use std::sync::Arc;

use gantry_api::{GangPhase, GangStatus, PodUid, Reason};

use super::world::{World, bound, forget, key, member, membership, place, refused, uid};
use crate::membership::{Disruption, Membership, OwnerFacts, OwnerKind, OwnerRef, Size};
use crate::protocol::{GangEvent, Member, Placement, PlanRequest, Reservation, Settings, Stage};
use crate::terms::TopologyRequest;

const TREE: &str = "CompositePodGroup/tree";

fn group(kind: OwnerKind, name: &str) -> OwnerRef {
    OwnerRef { kind, namespace: "default".into(), name: name.into(), part: "".into() }
}

fn facts(min: u32, parent: Option<&str>) -> OwnerFacts {
    OwnerFacts {
        min: Some(min),
        parent: parent.map(Into::into),
        source: "spec.schedulingPolicy.gang.minCount".into(),
        disruption: Some(Disruption::Single),
        ..OwnerFacts::default()
    }
}

fn says(world: &mut World, kind: OwnerKind, name: &str, facts: OwnerFacts) {
    let owner = group(kind, name);
    world.handle(GangEvent::OwnerSeen { owner: &owner, facts: Some(Arc::new(facts)) });
}

/// PodGroup `name` that needs `min` pods, below `parent`.
fn pod_group(world: &mut World, name: &str, min: u32, parent: &str) {
    says(world, OwnerKind::PodGroup, name, facts(min, Some(parent)));
}

/// CompositePodGroup `name` that needs `min` groups.
fn composite(world: &mut World, name: &str, min: u32, parent: Option<&str>) {
    says(world, OwnerKind::CompositePodGroup, name, facts(min, parent));
}

fn in_group(name: &str) -> Membership {
    let owner = Some(group(OwnerKind::PodGroup, name));
    Membership { size: Size::Undeclared, size_source: "", owner, ..membership(name, 1) }
}

/// The first `count` pods of a PodGroup.
fn pods(world: &mut World, name: &str, count: u32) {
    for number in 0..count {
        world.see(member(&format!("{name}{number}"), in_group(name)));
    }
}

/// PodGroups of so many pods each below CompositePodGroup `tree`, which needs `min` of them.
fn tree(min: u32, groups: &[(&str, u32)]) -> World {
    let mut world = World::new();
    grow(&mut world, min, groups);
    world
}

fn grow(world: &mut World, min: u32, groups: &[(&str, u32)]) {
    for (name, count) in groups {
        pods(world, name, *count);
        pod_group(world, name, *count, "tree");
    }
    composite(world, "tree", min, None);
}

/// A pod of the PodGroup that its first letter names, in a gang that asks for a spare reservation.
fn with_spare(pod: &str) -> Member {
    let mut membership = in_group(&pod[..1]);
    membership.options.spares = Some(1);
    member(pod, membership)
}

/// A tree that asks for a spare reservation and needs one of two PodGroups: `a` of one pod, or `b` of two.
fn tree_with_spares() -> World {
    let mut world = World::new();
    ["a0", "b0", "b1"].iter().for_each(|pod| world.see(with_spare(pod)));
    pod_group(&mut world, "a", 1, "tree");
    pod_group(&mut world, "b", 2, "tree");
    composite(&mut world, "tree", 1, None);
    world
}

fn roles(request: &PlanRequest) -> Vec<&str> {
    let mut roles: Vec<&str> = request.members.iter().map(|member| &*member.role).collect();
    roles.dedup();
    roles
}

/// A placement of a request: each member on a node of its own name.
fn placement(request: &PlanRequest) -> Placement {
    let places = request.members.iter().map(|member| Reservation {
        role: member.role.clone(),
        ..place(&format!("n-{}", member.uid), &format!("g-{}", member.uid))
    });
    Placement { places: places.collect(), ..Placement::default() }
}

fn take(world: &mut World, request: &PlanRequest) {
    world.handle(GangEvent::Planned { gang: &request.gang, result: Ok(placement(request)) });
}

/// A tree of which these groups are bound.
fn bind(world: &mut World, request: &PlanRequest) {
    take(world, request);
    let uids: Vec<PodUid> = request.members.iter().map(|member| member.uid.clone()).collect();
    for uid in &uids {
        world.come(uid.as_str());
    }
    world.write();
    for uid in &uids {
        world.bind(uid.as_str());
    }
}

#[test]
fn tree_is_placed_as_a_whole_or_not_at_all() {
    let mut world = tree(2, &[("a", 2), ("b", 1)]);
    let wanted = world.next().expect("the tree is whole");
    assert_eq!((wanted.must, wanted.members.len(), wanted.others.len()), (3, 3, 0));
    assert_eq!(wanted.terms.by_role, [("a".into(), 2), ("b".into(), 1)]);
    world.handle(GangEvent::Planned { gang: &wanted.gang, result: Err(refused()) });
    assert_eq!(world.reserved(), Vec::<String>::new());
    world.room += 1;
    let wanted = world.next().unwrap();
    bind(&mut world, &wanted);
    assert_eq!(world.phase(TREE), GangPhase::Bound);
}

#[test]
fn order_in_which_groups_are_read_makes_no_difference() {
    let groups = [("a", 2_u32), ("b", 1)];
    for composite_at in 0..=2 {
        for pods_first in [true, false] {
            let mut world = World::new();
            if pods_first {
                groups.iter().for_each(|(name, count)| pods(&mut world, name, *count));
            }
            for (at, (name, count)) in groups.iter().enumerate() {
                if at == composite_at {
                    composite(&mut world, "tree", 2, None);
                }
                pod_group(&mut world, name, *count, "tree");
            }
            if composite_at == 2 {
                composite(&mut world, "tree", 2, None);
            }
            if !pods_first {
                groups.iter().for_each(|(name, count)| pods(&mut world, name, *count));
            }
            let wanted = world.next().unwrap_or_else(|| panic!("{composite_at} {pods_first}"));
            assert_eq!((&*wanted.gang.name, wanted.must), (TREE, 3));
            assert_eq!(world.next(), None, "one gang");
        }
    }
}

#[test]
fn tree_waits_for_the_pods_of_each_group_it_needs() {
    let mut world = tree(2, &[("a", 2)]);
    assert_eq!(world.next(), None);
    insta::assert_snapshot!(world.text(TREE), @"gang default/CompositePodGroup/tree: UnknownSize: CompositePodGroup tree needs 2 groups (spec.schedulingPolicy.gang.minGroupCount), and 1 have pods");
    pod_group(&mut world, "b", 2, "tree");
    pods(&mut world, "b", 1);
    assert_eq!((world.next(), world.reason(TREE)), (None, Reason::WaitingForMembers));
    insta::assert_snapshot!(world.text(TREE), @"gang default/CompositePodGroup/tree: WaitingForMembers: 3 of 4 members exist");
    pods(&mut world, "b", 2);
    assert_eq!(world.next().unwrap().must, 4);
}

#[test]
fn any_groups_do_of_which_enough_fit() {
    let mut world = tree(1, &[("a", 3), ("b", 2), ("c", 2)]);
    let wanted = world.next().unwrap();
    let all: Vec<Vec<&str>> = std::iter::once(&wanted).chain(&wanted.others).map(roles).collect();
    // c is as b, and needs no try of its own.
    assert_eq!(all, [["b"], ["a"]]);
    let other = wanted.others[0].clone();
    bind(&mut world, &other);
    let status = world.status(TREE);
    assert_eq!((status.phase, status.min, status.bound), (GangPhase::Bound, 3, 3));
    assert_eq!(&*status.conditions[0].reason, "Valid");
}

#[test]
fn further_groups_are_placed_each_as_a_whole() {
    let mut world = tree(1, &[("a", 1), ("b", 2), ("c", 2)]);
    let first = world.next().unwrap();
    assert_eq!((roles(&first), first.must), (vec!["a"], 1));
    bind(&mut world, &first);
    let wanted = world.next().unwrap();
    assert_eq!((roles(&wanted), wanted.must), (vec!["b"], 2));
    assert_eq!((roles(&wanted.others[0]), wanted.others[0].must), (vec!["c"], 2));
    // Half of a group is not taken.
    let mut half = placement(&wanted);
    half.places.truncate(1);
    world.handle(GangEvent::Planned { gang: &wanted.gang, result: Ok(half) });
    assert_eq!(world.reserved(), Vec::<String>::new());
    world.room += 1;
    let wanted = world.next().unwrap();
    take(&mut world, &wanted.others[0]);
    assert_eq!(world.reserved(), ["g-c0", "g-c1"]);
    // A group that is not there in full waits: the planner refuses fewer members than must be placed, and says how many there are.
    world.gone("b1");
    world.room += 1;
    let wanted = world.next().unwrap();
    assert_eq!((roles(&wanted), wanted.must, wanted.members.len()), (vec!["b"], 2, 1));
}

/// The process before had seen it wait, and had not written that it belongs to the tree.
#[test]
fn group_is_completed_beside_a_pod_bound_past_the_extender() {
    let mut world = World::new();
    pods(&mut world, "a", 1);
    let elsewhere = Some("another-scheduler".into());
    world.see(Member { elsewhere, ..bound(member("b0", in_group("b")), "n9") });
    world.see(member("b1", in_group("b")));
    pod_group(&mut world, "a", 1, "tree");
    pod_group(&mut world, "b", 2, "tree");
    composite(&mut world, "tree", 1, None);
    let first = world.next().unwrap();
    assert_eq!((roles(&first), first.must), (vec!["a"], 1));
    bind(&mut world, &first);
    let wanted = world.next().unwrap();
    assert_eq!((roles(&wanted), wanted.members.len(), wanted.must), (vec!["b"], 1, 1));
}

#[test]
fn spare_of_a_group_that_has_ended_is_released() {
    // A further group needs the devices, and no member of the first can be lost any more.
    let mut world = tree_with_spares();
    let wanted = world.next().unwrap();
    let spare = Reservation { role: "a".into(), ..place("n-s", "g-s") };
    let found = Placement { spares: vec![spare], ..placement(&wanted) };
    world.handle(GangEvent::Planned { gang: &wanted.gang, result: Ok(found) });
    world.come("a0");
    world.write();
    world.bind("a0");
    assert_eq!((roles(&wanted), world.reserved()), (vec!["a"], vec!["g-s".to_owned()]));
    world.see(Member { stage: Stage::Succeeded, ..with_spare("a0") });
    assert_eq!(world.reserved(), Vec::<String>::new());
}

#[test]
fn spare_is_for_a_further_group_while_that_is_placed() {
    let mut world = tree_with_spares();
    let first = world.next().unwrap();
    bind(&mut world, &first);
    let wanted = world.next().unwrap();
    assert_eq!(roles(&wanted), ["b"]);
    let spare = Reservation { role: "b".into(), ..place("n-s", "g-s") };
    let found = Placement { spares: vec![spare], ..placement(&wanted) };
    world.handle(GangEvent::Planned { gang: &wanted.gang, result: Ok(found) });
    for pod in ["b0", "b1"] {
        world.come(pod);
        world.bind(pod);
    }
    assert_eq!(world.reserved(), ["g-s"]);
    world.gone("b0");
    world.see(with_spare("b2"));
    assert_eq!(world.node("b2"), "n-s", "half of a group is of no use");
    world.gone("b2");
    world.gone("b1");
    assert_eq!(world.reserved(), Vec::<String>::new(), "nothing of it can be lost any more");
}

#[test]
fn inner_groups_have_minimums_of_their_own() {
    let mut world = World::new();
    for (name, parent) in [("a", "left"), ("b", "left"), ("c", "right")] {
        pods(&mut world, name, 1);
        pod_group(&mut world, name, 1, parent);
    }
    composite(&mut world, "left", 2, Some("tree"));
    composite(&mut world, "right", 1, Some("tree"));
    composite(&mut world, "tree", 1, None);
    let wanted = world.next().unwrap();
    let all: Vec<Vec<&str>> = std::iter::once(&wanted).chain(&wanted.others).map(roles).collect();
    assert_eq!(all, [vec!["c"], vec!["a", "b"]]);
}

#[test]
fn trees_that_are_none_are_named() {
    let mut world = World::new();
    pods(&mut world, "a", 1);
    pod_group(&mut world, "a", 1, "one");
    insta::assert_snapshot!(world.text("a"), @"gang default/a: UnknownSize: CompositePodGroup one was not read yet");
    let owner = group(OwnerKind::CompositePodGroup, "one");
    world.handle(GangEvent::OwnerSeen { owner: &owner, facts: None });
    insta::assert_snapshot!(world.text("a"), @"gang default/a: UnknownSize: CompositePodGroup one, which says what is needed together, does not exist or may not be read (it is read as scheduling.k8s.io/v1, v1beta1, v1alpha3)");

    composite(&mut world, "one", 1, Some("two"));
    composite(&mut world, "two", 1, Some("one"));
    insta::assert_snapshot!(world.text("a"), @"gang default/a: Invalid: spec.parentCompositePodGroupName of CompositePodGroup two: a parent is its own ancestor (a, one, two); one of them must have no parent");
    assert_eq!((world.reason("a"), world.next()), (Reason::Invalid, None));

    for (name, parent) in [("two", "three"), ("three", "four")] {
        composite(&mut world, name, 1, Some(parent));
    }
    insta::assert_snapshot!(world.text("a"), @"gang default/a: Invalid: spec.parentCompositePodGroupName of CompositePodGroup three: the tree is deeper than the 4 groups that are allowed (a, one, two, three, ...)");
    composite(&mut world, "three", 1, None);
    assert_eq!(&*world.next().unwrap().gang.name, "CompositePodGroup/three");
}

#[test]
fn what_groups_ask_for_holds_for_the_tree() {
    let level = |name: &str| Some(TopologyRequest { level: name.into(), required: true });
    let of = |root: Option<&str>, child: Option<&str>| {
        let mut world = World::new();
        pods(&mut world, "a", 1);
        let mut group = facts(1, Some("tree"));
        group.options.level = child.and_then(level);
        group.level_source = "spec.schedulingConstraints.topology[0].key of PodGroup a".into();
        group.disruption = Some(Disruption::All);
        says(&mut world, OwnerKind::PodGroup, "a", group);
        let mut tree = facts(1, None);
        tree.options.level = root.and_then(level);
        tree.never_preempts = true;
        says(&mut world, OwnerKind::CompositePodGroup, "tree", tree);
        world
    };
    let mut world = of(Some("node"), None);
    assert_eq!(world.next().unwrap().terms.level, level("node"));
    let view = world.gangs.view(&key(TREE)).unwrap();
    assert!(!view.may_preempt(), "preemptionPolicy of the root");
    assert!(!view.may_lose_members(), "disruptionMode of PodGroup a");
    assert_eq!(view.surplus_members(), 0);
    assert!(of(Some("node"), Some("node")).next().is_some());
    let mut world = of(None, Some("node"));
    assert_eq!((world.reason(TREE), world.next()), (Reason::Invalid, None));
    insta::assert_snapshot!(world.text(TREE), @"gang default/CompositePodGroup/tree: Invalid: spec.schedulingConstraints.topology[0].key of PodGroup a: a group below the root of a tree cannot have a constraint of its own; CompositePodGroup tree may have it");
}

/// Kubernetes 1.37 has the mode at PodGroups only, and the policy at both kinds.
#[test]
fn tree_is_evicted_and_preempts_as_its_strictest_group() {
    let of = |change: fn(&mut OwnerFacts)| {
        let mut world = tree(2, &[("a", 2), ("b", 2)]);
        let wanted = world.next().unwrap();
        bind(&mut world, &wanted);
        let mut group = facts(2, Some("tree"));
        change(&mut group);
        says(&mut world, OwnerKind::PodGroup, "b", group);
        let view = world.gangs.view(&key(TREE)).unwrap();
        (view.may_lose_members(), view.surplus_members(), view.surplus_of("a"), view.may_preempt())
    };
    assert_eq!(of(|_| {}), (true, 4, 2, true));
    let (may_lose, surplus, _, _) = of(|group| group.disruption = Some(Disruption::All));
    assert_eq!((may_lose, surplus), (false, 0), "no group is evicted in part");
    let (.., may_preempt) = of(|group| group.never_preempts = true);
    assert!(!may_preempt);
}

/// kube-scheduler writes its condition to the group that it refuses, which need not be the root.
#[test]
fn refusal_of_any_group_is_shown_on_the_tree() {
    let mut world = tree(2, &[("a", 2), ("b", 2)]);
    let group = OwnerFacts { unscheduled: Some("no quota".into()), ..facts(2, Some("tree")) };
    says(&mut world, OwnerKind::PodGroup, "b", group);
    let status = world.status(TREE);
    let found = status.conditions.iter().find(|condition| condition.type_ == "PodGroupScheduled").unwrap();
    assert_eq!(found.status, "False");
    insta::assert_snapshot!(found.message, @"kube-scheduler reports of PodGroup b (scheduling.k8s.io): no quota");
    insta::assert_snapshot!(status.message, @"other gangs are planned first; kube-scheduler reports of PodGroup b (scheduling.k8s.io): no quota");
}

#[test]
fn size_on_pods_contradicts_a_tree() {
    let mut world = tree(1, &[("a", 1)]);
    let own = Membership { size: Size::Stated { min: 3, total: None }, ..in_group("a") };
    world.see(member("a1", own));
    assert_eq!(world.reason(TREE), Reason::Invalid);
    insta::assert_snapshot!(world.text(TREE), @"gang default/CompositePodGroup/tree: Invalid: size: CompositePodGroup tree states how many groups are needed: remove gantry.dev/gang-min of its pods, and minMember of its Gang");
    world.gone("a1");
    assert!(world.next().is_some());
}

#[test]
fn lost_member_of_a_chosen_group_is_replaced_in_it() {
    let mut world = tree(1, &[("a", 2), ("b", 3)]);
    let wanted = world.next().unwrap();
    bind(&mut world, &wanted);
    assert_eq!(world.phase(TREE), GangPhase::Bound);
    world.gone("a1");
    assert_eq!(world.phase(TREE), GangPhase::Degraded);
    world.gone("a0");
    assert_eq!(world.reserved(), ["g-a0", "g-a1"], "kept for the same group");
    world.see(member("a2", in_group("a")));
    pod_group(&mut world, "a", 2, "tree");
    composite(&mut world, "tree", 1, None);
    assert_eq!(world.gangs.gang_of(&uid("a2")).map(|key| &*key.name), Some(TREE));
    assert_eq!(world.node("a2"), "n-a0");
}

#[test]
fn tree_is_whole_once_other_groups_are_bound() {
    let mut world = tree(1, &[("a", 2), ("b", 3)]);
    let wanted = world.next().unwrap();
    bind(&mut world, &wanted);
    let surplus = world.next().unwrap();
    assert_eq!(roles(&surplus), ["b"]);
    take(&mut world, &surplus);
    for pod in ["b0", "b1"] {
        world.come(pod);
        world.bind(pod);
    }
    world.gone("a1");
    assert_eq!(world.phase(TREE), GangPhase::Degraded, "two of three and one of two are bound");
    world.come("b2");
    world.bind("b2");
    let status = world.status(TREE);
    assert_eq!((status.phase, status.min), (GangPhase::Bound, 3));
    assert_eq!(status.decision.map(|decision| decision.min), Some(3), "the next process knows as well");
    world.pass(3600);
    assert_eq!(world.reserved(), Vec::<String>::new(), "nothing is kept for a group that is not needed");
}

/// The next process: it sees these pods, bound on the nodes of [`placement`], and the status that the process before wrote.
fn next_process(status: &GangStatus, min: u32, groups: &[(&str, u32)], alive: &[&str]) -> World {
    let mut next = World::with(Settings { identity: "second".into(), ..Settings::default() });
    for pod in alive {
        let pod_of = bound(member(pod, in_group(&pod[..1])), &format!("n-{pod}"));
        next.see(Member { holds: place("", &format!("g-{pod}")).devices, ..pod_of });
    }
    groups.iter().for_each(|(name, count)| pod_group(&mut next, name, *count, "tree"));
    composite(&mut next, "tree", min, None);
    next.show(TREE, status.clone());
    next.handle(GangEvent::Synced);
    next
}

#[test]
fn decision_stays_until_the_groups_of_its_pods_are_read() {
    let mut world = tree(2, &[("a", 1), ("b", 1)]);
    let wanted = world.next().unwrap();
    bind(&mut world, &wanted);
    let status = world.status(TREE);
    let name = key(TREE).object_name();

    let mut next = World::with(Settings { identity: "second".into(), ..Settings::default() });
    for pod in ["a0", "b0"] {
        let pod_of = bound(member(pod, in_group(&pod[..1])), &format!("n-{pod}"));
        next.see(Member { holds: place("", &format!("g-{pod}")).devices, ..pod_of });
    }
    next.show(TREE, status.clone());
    next.handle(GangEvent::Synced);
    next.pass(3600);
    assert!(!next.take_work().contains(&forget(&name)), "the API server may be slow");
    pod_group(&mut next, "a", 1, "tree");
    pod_group(&mut next, "b", 1, "tree");
    composite(&mut next, "tree", 2, None);
    let after = next.status(TREE);
    assert_eq!((after.phase, after.bound), (GangPhase::Bound, 2));
    assert_eq!(after.decision.map(|decision| decision.id), status.decision.map(|decision| decision.id));
}

#[test]
fn tree_waits_no_longer_for_a_pod_that_is_gone() {
    let mut world = tree(2, &[("a", 1), ("b", 1)]);
    let wanted = world.next().unwrap();
    take(&mut world, &wanted);
    ["a0", "b0"].iter().for_each(|pod| drop(world.come(pod)));
    world.write();
    let status = world.status(TREE);

    let mut next = World::with(Settings { identity: "second".into(), ..Settings::default() });
    for pod in ["a1", "b0"] {
        next.see(member(pod, in_group(&pod[..1])));
    }
    next.show(TREE, status);
    next.handle(GangEvent::Synced);
    pod_group(&mut next, "a", 1, "tree");
    composite(&mut next, "tree", 2, None);
    assert_eq!(next.reason(TREE), Reason::Invalid, "the decision may be about b0");
    next.gone("b0");
    next.pass(1);
    assert_ne!(next.reason(TREE), Reason::Invalid);
}

#[test]
fn decision_about_no_pod_of_a_tree_is_forgotten() {
    let mut world = tree(1, &[("a", 1)]);
    let wanted = world.next().unwrap();
    bind(&mut world, &wanted);
    let status = world.status(TREE);
    let mut next = World::with(Settings { identity: "second".into(), ..Settings::default() });
    pods(&mut next, "b", 1);
    next.show(TREE, status);
    next.handle(GangEvent::Synced);
    let forgotten = forget(&key(TREE).object_name());
    next.pass(3600);
    assert!(!next.take_work().contains(&forgotten), "b0 may be of this tree");
    pod_group(&mut next, "b", 1, "other");
    composite(&mut next, "other", 1, None);
    next.pass(3600);
    assert!(next.take_work().contains(&forgotten));
}

#[test]
fn next_process_counts_ended_members_of_groups_read_late() {
    let groups = [("a", 2), ("b", 2)];
    let mut world = tree(1, &groups);
    let wanted = world.next().unwrap();
    bind(&mut world, &wanted);
    let ended = if roles(&wanted).contains(&"a") { "a" } else { "b" };
    for pod in [0, 1].map(|number| format!("{ended}{number}")) {
        world.see(Member { stage: Stage::Succeeded, ..member(&pod, in_group(ended)) });
        world.gone(&pod);
    }
    let status = world.status(TREE);
    assert_eq!(status.completed, 2);

    let mut next = World::with(Settings { identity: "second".into(), ..Settings::default() });
    pods(&mut next, if ended == "a" { "b" } else { "a" }, 2);
    next.show(TREE, status.clone());
    next.handle(GangEvent::Synced);
    next.pass(3600);
    assert!(!next.take_work().contains(&forget(&key(TREE).object_name())));
    groups.iter().for_each(|(name, count)| pod_group(&mut next, name, *count, "tree"));
    composite(&mut next, "tree", 1, None);
    assert_eq!(next.status(TREE).completed_by_role, status.completed_by_role);
}

#[test]
fn placed_group_goes_on_in_the_next_process_beside_an_ended_one() {
    let groups = [("a", 2), ("b", 2)];
    let mut world = tree(1, &groups[1..]);
    let wanted = world.next().unwrap();
    bind(&mut world, &wanted);
    let mut status = world.status(TREE);
    // One member of each group is known: one that has ended, and one that is bound.
    status.completed = 1;
    status.completed_by_role = [("a".to_owned(), 1)].into();
    let decision = status.decision.as_mut().unwrap();
    decision
        .reservations
        .retain(|reservation| reservation.pod.as_ref().is_some_and(|pod| pod.as_str() == "b1"));
    let mut next = next_process(&status, 1, &groups, &["b1"]);
    next.see(member("b2", in_group("b")));
    assert_eq!(roles(&next.next().unwrap()), ["b"], "its replacement is placed");
}

#[test]
fn next_process_counts_ended_members_for_their_group() {
    let groups = [("a", 2), ("b", 1)];
    let pods = ["a0", "a1", "b0"];
    // So many of them have ended well, and their pods are gone.
    for ended in 0..=2 {
        let mut world = tree(2, &groups);
        let wanted = world.next().unwrap();
        bind(&mut world, &wanted);
        for pod in &pods[..ended] {
            world.see(Member { stage: Stage::Succeeded, ..member(pod, in_group(&pod[..1])) });
            world.gone(pod);
        }
        let status = world.status(TREE);
        assert_eq!((status.phase, status.completed as usize), (GangPhase::Bound, ended));
        let mut next = next_process(&status, 2, &groups, &pods[ended..]);
        let after = next.status(TREE);
        assert_eq!((after.phase, after.min, after.bound), (GangPhase::Bound, 3, status.bound), "{ended}");
        assert_eq!(after.completed_by_role, status.completed_by_role, "{ended}");
        // The group that has ended needs no pod any more; the other one's is replaced.
        next.see(member("b1", in_group("b")));
        next.gone("b0");
        assert_eq!(next.node("b1"), "n-b0", "{ended}");
    }
}

#[test]
fn decided_tree_is_finished_by_the_next_process() {
    let groups = [("a", 2), ("b", 3)];
    let mut world = tree(1, &groups);
    let wanted = world.next().unwrap().others[0].clone();
    take(&mut world, &wanted);
    wanted.members.iter().for_each(|member| drop(world.come(member.uid.as_str())));
    world.write();
    let node = world.bind("b1");
    let status = world.status(TREE);
    assert_eq!(status.decision.as_ref().map(|decision| decision.min), Some(3));

    let mut next = World::with(Settings { identity: "second".into(), ..Settings::default() });
    let mut of_b1: Member = bound(member("b1", in_group("b")), &node);
    of_b1.holds = place(&node, "g-b1").devices;
    pods(&mut next, "a", 2);
    for pod in ["b0", "b2"] {
        next.see(member(pod, in_group("b")));
    }
    next.see(of_b1);
    next.show(TREE, status);
    next.handle(GangEvent::Synced);
    assert_eq!(next.next(), None, "nothing is planned before the groups are known");
    // The group that was decided is read last.
    pod_group(&mut next, "a", 2, "tree");
    composite(&mut next, "tree", 1, None);
    assert_eq!(next.next(), None, "the decision may be about pods of a group that is not known");
    assert_eq!(next.gangs.take_statuses().iter().filter(|(key, _)| &*key.name == TREE).count(), 0);
    pod_group(&mut next, "b", 3, "tree");
    assert_eq!(next.reserved(), ["g-b0", "g-b2"]);
    next.bind("b0");
    next.bind("b2");
    let status = next.status(TREE);
    assert_eq!((status.phase, status.min, status.bound), (GangPhase::Bound, 3, 3));
}

/// Taken over with its first member alone, the decision would find the devices of the others held.
#[test]
fn decision_waits_for_members_whose_groups_are_read_later() {
    let mut world = tree(2, &[("a", 1), ("b", 1)]);
    let wanted = world.next().unwrap();
    take(&mut world, &wanted);
    ["a0", "b0"].iter().for_each(|pod| drop(world.come(pod)));
    world.write();
    let node = world.bind("b0");
    let status = world.status(TREE);

    let mut next = World::with(Settings { identity: "second".into(), ..Settings::default() });
    next.see(member("a0", in_group("a")));
    let b0 = bound(member("b0", in_group("b")), &node);
    next.see(Member { holds: place(&node, "g-b0").devices, ..b0 });
    next.show(TREE, status);
    next.handle(GangEvent::Synced);
    pod_group(&mut next, "a", 1, "tree");
    composite(&mut next, "tree", 2, None);
    assert_eq!((next.reason(TREE), next.next()), (Reason::Invalid, None), "b0 may belong to it");
    pod_group(&mut next, "b", 1, "tree");
    assert_eq!(next.reserved(), ["g-a0"]);
    assert_eq!(next.node("a0"), "n-a0");
}

/// Two groups are read with their tree, and their pods join it one after the other.
#[test]
fn decision_is_taken_over_with_all_members_of_a_tree() {
    let mut world = tree(1, &[("a", 1), ("b", 1)]);
    let wanted = world.next().unwrap();
    bind(&mut world, &wanted);
    let wanted = world.next().unwrap();
    take(&mut world, &wanted);
    let status = world.status(TREE);
    assert_eq!(status.decision.as_ref().map(|decision| decision.reservations.len()), Some(2));

    let mut next = World::with(Settings { identity: "second".into(), ..Settings::default() });
    let a0 = bound(member("a0", in_group("a")), "n-a0");
    next.see(Member { holds: place("", "g-a0").devices, ..a0 });
    next.see(member("b0", in_group("b")));
    next.show(TREE, status);
    next.handle(GangEvent::Synced);
    pod_group(&mut next, "b", 1, "tree");
    pod_group(&mut next, "a", 1, "tree");
    composite(&mut next, "tree", 1, None);
    assert_eq!(next.reserved(), ["g-b0"]);
    let after = next.status(TREE);
    assert_eq!((after.phase, after.bound), (GangPhase::Bound, 1));
}

/// The pod of one group has ended well, that of the other was lost: its replacement waits.
#[test]
fn tree_with_an_ended_group_goes_on_in_the_next_process() {
    for first in ["a", "b"] {
        let mut world = tree(2, &[("a", 1), ("b", 1)]);
        let wanted = world.next().unwrap();
        bind(&mut world, &wanted);
        world.gone("b0");
        let mut status = world.status(TREE);
        // While a pod terminates its reservation is not written.
        let decision = status.decision.as_mut().unwrap();
        decision.reservations.retain(|slot| slot.pod.is_some());
        assert_eq!(decision.reservations.len(), 1);

        let mut next = World::with(Settings { identity: "second".into(), ..Settings::default() });
        next.see(Member { stage: Stage::Succeeded, ..member("a0", in_group("a")) });
        next.see(member("b1", in_group("b")));
        next.show(TREE, status);
        next.handle(GangEvent::Synced);
        pod_group(&mut next, first, 1, "tree");
        composite(&mut next, "tree", 2, None);
        pod_group(&mut next, if first == "a" { "b" } else { "a" }, 1, "tree");
        let wanted = next.next().unwrap_or_else(|| panic!("{first}: {}", next.text(TREE)));
        assert_eq!(wanted.must, 1, "{first} is read first");
    }
}

/// A process knows no decision of a tree of which one group has done its work: the other one does not wait for members of the first.
#[test]
fn group_is_placed_beside_one_that_has_ended() {
    let mut world = World::new();
    world.see(Member { stage: Stage::Succeeded, ..member("a0", in_group("a")) });
    pods(&mut world, "b", 2);
    pod_group(&mut world, "a", 1, "tree");
    pod_group(&mut world, "b", 2, "tree");
    composite(&mut world, "tree", 1, None);
    let wanted = world.next().unwrap();
    assert_eq!((roles(&wanted), wanted.must), (vec!["b"], 2));
    // Half of a group is not taken.
    let mut half = placement(&wanted);
    half.places.truncate(1);
    world.handle(GangEvent::Planned { gang: &wanted.gang, result: Ok(half) });
    assert_eq!(world.reserved(), Vec::<String>::new());
    world.room += 1;
    let wanted = world.next().unwrap();
    bind(&mut world, &wanted);
    let status = world.status(TREE);
    assert_eq!((status.phase, status.bound, status.completed), (GangPhase::Bound, 2, 1));
}

#[test]
fn condition_names_the_groups_of_a_tree() {
    let mut world = tree(2, &[("a", 2), ("b", 1), ("c", 1), ("d", 1), ("e", 1)]);
    pod_group(&mut world, "a", 3, "tree");
    let status = world.status(TREE);
    let shown = status.conditions.iter().find(|condition| condition.type_ == "CompositePodGroup").unwrap();
    assert_eq!((shown.status.as_str(), shown.reason.as_str()), ("True", "PlacedTogether"));
    let message = "CompositePodGroup tree needs 2 of its groups, each as a whole: a has 2 of 3 pods, b has 1 of 1 pods, c has 1 of 1 pods, d has 1 of 1 pods, 1 more";
    assert_eq!(shown.message, message);
}

#[test]
fn changed_minimums_are_followed() {
    let mut world = tree(2, &[("a", 2), ("b", 2)]);
    let wanted = world.next().unwrap();
    take(&mut world, &wanted);
    assert_eq!(world.reserved().len(), 4);
    pod_group(&mut world, "b", 1, "tree");
    assert_eq!(world.reserved(), Vec::<String>::new(), "it is planned again");
    let wanted = world.next().unwrap();
    assert_eq!(wanted.must, 3);
    bind(&mut world, &wanted);
    pod_group(&mut world, "a", 1, "tree");
    let status = world.status(TREE);
    assert_eq!((status.min, &*status.conditions[0].reason), (2, "Valid"));
}
