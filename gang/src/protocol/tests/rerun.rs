//! The next run comes under the name of one that is done and whose pods are still there.

use gantry_api::{GangPhase, GangSpec, GangStatus, Reason};

use super::world::{World, bound, in_pod_group, key, member, membership, wants};
use crate::membership::{JobRef, Membership};
use crate::protocol::GangEvent;
use crate::protocol::{Answer, Arrival, Member, Object, Settings, Stage};

/// What a pod of a Job says that names a PodGroup.
fn in_group(job: &str) -> Membership {
    Membership { made_by: Some(job.into()), ..in_pod_group() }
}

/// What a pod of a Job says whose template names the gang.
fn named(job: &str, min: u32) -> Membership {
    Membership {
        maker: Some(JobRef { kind: "Job".into(), name: job.into(), uid: job.into() }),
        made_by: Some(job.into()),
        ..membership("a", min)
    }
}

fn with_group(world: &mut World, min: u32) {
    world.group_says(wants(min));
}

fn succeeded(pod: &str, membership: &Membership) -> Member {
    let mut done = bound(member(pod, membership.clone()), "n0");
    done.stage = Stage::Succeeded;
    done
}

fn end(world: &mut World, pods: &[&str], membership: &Membership) {
    for pod in pods {
        world.see(succeeded(pod, membership));
    }
}

/// A run of four is done, and its pods are kept.
fn done(world: &mut World, membership: &Membership) {
    world.bound_gang_of("a", 4, membership);
    end(world, &["a0", "a1", "a2", "a3"], membership);
    assert_eq!(world.phase("a"), GangPhase::Finished);
}

/// Four more come, and are planned together or not at all.
fn all_or_none(world: &mut World, membership: &Membership) {
    for (number, pod) in ["b0", "b1", "b2", "b3"].into_iter().enumerate() {
        world.see(member(pod, membership.clone()));
        if number < 3 {
            assert_eq!(world.next(), None, "{} of 4 are no gang", number + 1);
            assert_eq!(world.phase("a"), GangPhase::Pending);
        }
    }
    assert_eq!(world.plan().must, 4);
    for pod in ["b0", "b1", "b2"] {
        assert_eq!(world.come(pod), Arrival::Wait, "the last is not there yet");
    }
    world.come("b3");
    world.write();
    for pod in ["b0", "b1", "b2", "b3"] {
        world.bind(pod);
    }
    assert_eq!(world.phase("a"), GangPhase::Bound);
}

#[test]
fn next_job_of_a_pod_group_is_bound_all_or_none() {
    let mut world = World::new();
    with_group(&mut world, 4);
    done(&mut world, &in_group("first"));
    all_or_none(&mut world, &in_group("second"));
    let status = world.status("a");
    assert_eq!((status.members, status.completed), (4, 0));
}

#[test]
fn next_pods_without_controller_are_bound_all_or_none() {
    let mut world = World::new();
    done(&mut world, &membership("a", 4));
    all_or_none(&mut world, &membership("a", 4));
}

#[test]
fn next_job_with_the_gang_name_in_its_template_is_no_rival() {
    // The pods of the next job belong to the next incarnation. They are not taken for a second gang of the
    // same name.
    let mut world = World::new();
    done(&mut world, &named("first", 4));
    all_or_none(&mut world, &named("second", 4));
}

#[test]
fn the_next_job_may_want_another_number() {
    let mut world = World::new();
    done(&mut world, &named("first", 4));
    for pod in ["b0", "b1"] {
        world.see(member(pod, named("second", 2)));
    }
    assert_eq!(world.plan().must, 2);
}

#[test]
fn next_job_is_another_incarnation_if_object_has_the_minimum() {
    let mut world = World::new();
    let spec = GangSpec { min_member: Some(4), ..GangSpec::default() };
    let object = Object { ours: false, spec: Ok(spec), ..world.object(GangStatus::default()) };
    world.handle(GangEvent::ObjectSeen { namespace: "default", name: "a", object: Box::new(object) });
    done(&mut world, &named("first", 1));
    all_or_none(&mut world, &named("second", 1));
}

#[test]
fn what_the_same_job_makes_next_is_no_other_run() {
    let mut world = World::new();
    with_group(&mut world, 4);
    let membership = in_group("first");
    done(&mut world, &membership);
    world.see(member("b0", membership));
    assert_eq!(world.plan().must, 0, "the job has more to do than it does at a time");
    world.bind("b0");
    let status = world.status("a");
    assert_eq!((status.bound, status.completed), (1, 4));
}

#[test]
fn pod_without_controller_replaces_lost_member_of_ended_gang() {
    // A pod without a controller replaces a lost member, although the other members have completed.
    // One beyond the minimum is lost, and made anew when the others have ended.
    let mut world = World::new();
    world.bound_gang("a", 3, 2);
    world.gone("a2");
    end(&mut world, &["a0", "a1"], &membership("a", 2));
    world.see(member("b2", membership("a", 2)));
    assert_eq!(world.plan().must, 0);
    assert_eq!(world.bind("b2"), "n0");

    // One beyond the minimum comes late: so many there may be.
    let mut elastic = membership("a", 2);
    elastic.options.max = Some(3);
    let mut world = World::new();
    world.bound_gang_of("a", 2, &elastic);
    end(&mut world, &["a0", "a1"], &elastic);
    world.see(member("b2", elastic.clone()));
    world.plan();
    world.bind("b2");
    end(&mut world, &["b2"], &elastic);
    world.see(member("c0", elastic));
    assert_eq!(world.reason("a"), Reason::WaitingForMembers);
}

#[test]
fn job_created_before_the_previous_ends_is_a_new_incarnation() {
    // The second job waits while the first runs. It becomes the next incarnation when the first is done.
    let mut world = World::new();
    with_group(&mut world, 4);
    let first = in_group("first");
    world.bound_gang_of("a", 4, &first);
    end(&mut world, &["a0", "a1", "a2"], &first);
    for pod in ["b0", "b1"] {
        world.see(member(pod, in_group("second")));
    }
    world.refuse();
    end(&mut world, &["a3"], &first);
    assert_eq!(world.reason("a"), Reason::WaitingForMembers);
}

#[test]
fn later_job_of_an_elastic_gang_joins_its_incarnation() {
    let mut world = World::new();
    let of = |job: &str| {
        let mut of = membership("a", 2);
        of.options.max = Some(3);
        of.made_by = Some(job.into());
        of
    };
    for (pod, job) in [("a0", "one"), ("a1", "two")] {
        world.see(member(pod, of(job)));
    }
    world.plan();
    world.come_all("a", 2);
    world.write();
    world.bind("a0");
    world.bind("a1");
    world.see(member("a2", of("three")));
    world.refuse();
    end(&mut world, &["a0"], &of("one"));
    end(&mut world, &["a1"], &of("two"));
    world.room += 1;
    assert_eq!(world.next().unwrap().must, 0, "it joins the two");
}

#[test]
fn a_run_that_is_not_done_goes_on_with_whoever_takes_its_place() {
    let mut world = World::new();
    with_group(&mut world, 4);
    let first = in_group("first");
    world.bound_gang_of("a", 4, &first);
    end(&mut world, &["a0", "a1", "a2"], &first);
    world.gone("a3");
    world.see(member("b0", in_group("second")));
    assert_eq!(world.node("b0"), "n3", "three are done, and the fourth was lost");
}

/// What another process finds.
fn after(world: &World, status: GangStatus, pods: &[Member]) -> World {
    let mut next = World::with(Settings { identity: "second".into(), ..Settings::default() });
    next.passed = world.passed;
    with_group(&mut next, 4);
    next.show("a", status);
    for pod in pods {
        next.see(pod.clone());
    }
    next.handle(GangEvent::Synced);
    next
}

/// The pods of a run that is done, and of the next of which so many are bound.
fn both(first: &Membership, second: &Membership, bound_to: usize) -> Vec<Member> {
    let old = ["a0", "a1", "a2", "a3"].map(|pod| succeeded(pod, first));
    let new = ["b0", "b1", "b2", "b3"].iter().enumerate().map(|(number, pod)| {
        let mut seen = member(pod, second.clone());
        seen.created = 2_000;
        if number < bound_to {
            seen = bound(seen, &format!("n{number}"));
            seen.holds = super::world::place(&format!("n{number}"), &format!("a-g{number}")).devices;
        }
        seen
    });
    old.into_iter().chain(new).collect()
}

#[test]
fn new_leader_distinguishes_next_incarnation_from_finished() {
    let memberships = [
        (in_group("first"), in_group("second")),
        (named("first", 4), named("second", 4)),
        (membership("a", 4), membership("a", 4)),
    ];
    for (first, second) in memberships {
        // The process before saw the first run done, and no more.
        let mut world = World::new();
        with_group(&mut world, 4);
        done(&mut world, &first);
        let status = world.status("a");
        assert_eq!(status.phase, GangPhase::Finished);
        let mut next = after(&world, status, &both(&first, &second, 0));
        assert_eq!(next.plan().must, 4, "{first:?}");

        // It waited for room for the second.
        for pod in ["b0", "b1", "b2", "b3"] {
            world.see(member(pod, second.clone()));
        }
        world.refuse();
        let status = world.status("a");
        let mut next = after(&world, status, &both(&first, &second, 0));
        assert_eq!(next.plan().must, 4, "{first:?}");

        // It had bound two of the second.
        world.room += 1;
        world.plan();
        for pod in ["b0", "b1", "b2", "b3"] {
            world.come(pod);
        }
        world.write();
        world.bind("b0");
        world.bind("b1");
        let status = world.status("a");
        let mut next = after(&world, status, &both(&first, &second, 2));
        assert_eq!(next.phase("a"), GangPhase::Binding);
        assert_eq!(next.reserved(), ["a-g2", "a-g3"]);
        assert_eq!(next.gangs.view(&key("a")).unwrap().completed(), 0);
        next.gone("b2");
        assert_eq!(next.reserved(), ["a-g2", "a-g3"], "nobody else does its part");
        assert!(matches!(next.answer("b3"), Answer::Node(_)));
    }
}
