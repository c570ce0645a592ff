//! What kubelet's own list corrects.

use gantry_api::Provenance;

use super::*;

#[test]
fn two_pods_that_got_each_others_sets_are_exchanged() {
    let mut node = node();
    node.seen(simple("a", [0, 1]));
    node.seen(simple("b", [2, 3]));
    // Kubelet admitted b first: the sets went to the other pod each.
    node.admit(0..8, 2);
    node.admit(2..8, 2);
    node.list(&[("a", "app", set([2, 3])), ("b", "app", set([0, 1]))]);
    assert_eq!(node.held_by("a"), set([2, 3]));
    assert_eq!(node.held_by("b"), set([0, 1]));
    let swaps = node
        .notes()
        .into_iter()
        .filter(|note| matches!(note, Note::Swapped { .. }))
        .count();
    assert_eq!(swaps, 2);
    assert_eq!(node.deviations_total(), 0);
    node.list(&[("a", "app", set([2, 3])), ("b", "app", set([0, 1]))]);
    assert!(node.notes().is_empty());
}

#[test]
fn a_pod_whose_set_another_took_gets_the_other_ones() {
    let mut node = node();
    node.seen(simple("rejected", [0, 1]));
    node.seen(simple("b", [2, 3]));
    node.seen(simple("c", [4, 5]));
    // Kubelet rejected the first pod, which the watch has not reported yet: b gets its set.
    assert_eq!(node.admit(0..8, 2), set([0, 1]));
    node.list(&[("b", "app", set([0, 1]))]);
    node.gone(&"rejected".into(), true);
    // b's own set lies free now; c gets its own.
    assert_eq!(node.admit(2..8, 2), set([4, 5]));
    assert_eq!(node.held_by("b"), set([0, 1]));
    assert_eq!(node.held_by("c"), set([4, 5]));
}

#[test]
fn a_displaced_pod_is_given_the_equal_set_that_its_displacer_left() {
    let mut node = node();
    node.seen(simple("a", [0, 1]));
    node.seen(simple("b", [2, 3]));
    // b came first and got a's set.
    node.admit(0..8, 2);
    node.list(&[("b", "app", set([0, 1]))]);
    assert_eq!(node.held_by("a"), set([2, 3]));
    let answer = node.ask(2..8, 2);
    assert_eq!((answer.devices, answer.basis), (set([2, 3]), Basis::Granted));
}

#[test]
fn a_late_grant_whose_pod_got_something_else_is_not_offered_to_others() {
    let mut node = node();
    // The watch was too late: the pod was served by topology.
    let taken = node.admit(0..8, 2);
    node.seen(simple("late", [6, 7]));
    node.list(&[("late", "app", taken.clone())]);
    assert_eq!(node.held_by("late"), taken);
    assert_eq!(node.deviations_total(), 1);
    let left = &set(0..8) - &taken;
    let answer = node
        .prefer(&[request(&left, &set([]), 2)], WaitFor::default())
        .unwrap()
        .remove(0);
    assert_eq!(answer.basis, Basis::Unknown);
}

#[test]
fn a_pod_that_the_watch_does_not_show_holds_what_kubelet_lists() {
    let mut node = node();
    node.list(&[("static", "app", set([3]))]);
    let holders = node.holders();
    assert_eq!(holders.len(), 1);
    assert_eq!((holders[0].pod.as_str(), &holders[0].uid), ("static", &None));
    node.list(&[]);
    assert!(node.holders().is_empty());
}

#[test]
fn holders_become_known_by_the_truth() {
    let mut node = node();
    node.seen(simple("a", [0, 1]));
    assert_eq!(node.holders()[0].provenance, Provenance::Granted);
    node.admit(0..8, 2);
    assert_eq!(node.holders()[0].provenance, Provenance::Allocated);
    node.list(&[("a", "app", set([0, 1]))]);
    assert_eq!(node.holders()[0].provenance, Provenance::PodResources);
    assert_eq!(node.holders().len(), 1);
}

/// A pod of the same name as `name`, with another UID.
fn successor(name: &str, gpus: impl IntoIterator<Item = u8>) -> ObservedPod {
    let mut pod = simple(name, gpus);
    let uid = format!("{name}-2");
    pod.grant = pod
        .grant
        .map(|grant| grant.replace(&format!(r#""pod":"{name}""#), &format!(r#""pod":"{uid}""#)));
    pod.uid = uid.as_str().into();
    pod
}

#[test]
fn a_list_by_a_kubelet_that_has_not_heard_of_a_deletion_says_nothing_of_the_pods_successor() {
    for listed_first in [true, false] {
        let mut node = node();
        node.seen(simple("a", [0, 1]));
        node.admit(0..8, 2);
        node.gone(&"a".into(), true);
        if listed_first {
            node.list(&[("a", "app", set([0, 1]))]);
            assert_eq!(node.held_by("a"), set([0, 1]), "what it lists is not free");
        }
        node.seen(successor("a", [2, 3]));
        if !listed_first {
            node.list(&[("a", "app", set([0, 1]))]);
        }
        assert_eq!(node.held_by("a"), set([2, 3]));
        assert_eq!(node.admit(0..8, 2), set([2, 3]));
        node.list(&[("a", "app", set([2, 3]))]);
        assert_eq!(node.held_by("a"), set([2, 3]));
    }
}

#[test]
fn what_kubelet_goes_on_listing_is_true() {
    let mut node = node();
    node.seen(simple("a", [0, 1]));
    node.admit(0..8, 2);
    node.gone(&"a".into(), true);
    node.seen(successor("a", [2, 3]));
    for _ in 0..2 {
        node.list(&[("a", "app", set([0, 1]))]);
    }
    assert_eq!(
        node.held_by("a"),
        set([0, 1]),
        "it took the successor's devices from its choice"
    );
}

#[test]
fn a_list_that_began_before_a_deletion_says_nothing_of_the_pods_successor() {
    let mut node = node();
    node.seen(simple("a", [0, 1]));
    node.admit(0..8, 2);
    let ticket = node.listing_begins();
    node.gone(&"a".into(), true);
    node.seen(successor("a", [2, 3]));
    let holding = Holding {
        namespace: "default".into(),
        pod: "a".into(),
        container: "app".into(),
        resource: GPU.into(),
    };
    node.listed(ticket, Listing([(holding, set([0, 1]))].into()), NOW);
    assert_eq!(node.held_by("a"), set([2, 3]));
    assert_eq!(node.admit(0..8, 2), set([2, 3]));
}

#[test]
fn a_pod_that_kubelet_no_longer_lists_keeps_its_devices_while_it_lives() {
    let mut node = node();
    node.seen(simple("a", [0, 1]));
    node.admit(0..8, 2);
    node.list(&[("a", "app", set([0, 1]))]);
    node.list(&[]);
    assert_eq!(node.held_by("a"), set([0, 1]));
}

#[test]
fn a_list_that_comes_before_the_devices_are_known_is_kept_until_then() {
    let mut node = Handover::new(NODE.into());
    node.sync(vec![started(simple("a", [0, 1]))]);
    node.list(&[("a", "app", set([2, 3])), ("static", "app", set([4]))]);
    assert!(!node.has_listing());
    node.inventory(&inventory(8));
    assert!(node.has_listing());
    assert_eq!(node.held_by("a"), set([2, 3]));
    assert_eq!(node.held_by("static"), set([4]));
}

#[test]
fn devices_alone_tell_nothing_of_holders() {
    let mut node = node();
    assert!(!node.has_listing());
    node.list(&[]);
    assert!(node.has_listing());
}

#[test]
fn without_a_list_the_set_of_nobody_known_ends_when_its_devices_are_given_out_again() {
    let mut node = node();
    let first = node.admit(0..4, 4);
    assert_eq!(node.held_by(""), first);
    let second = node.admit(0..4, 2);
    assert_eq!(node.held_by(""), second);
}

#[test]
fn devices_handed_on_within_a_pod_of_nobody_known_stay_with_it() {
    let mut node = node();
    let init = node.admit(0..8, 4);
    // Kubelet takes an app's devices from its init container without a question.
    node.serve([0]);
    assert!(init.contains(&id(0)));
    assert_eq!(node.held_by(""), init);
}

#[test]
fn without_a_list_nothing_grows() {
    let mut node = node();
    for round in 0..1000 {
        node.listing_begins();
        let name = format!("pod-{round}");
        node.seen(simple(&name, [0, 1]));
        node.admit(0..8, 2);
        node.gone(&name.as_str().into(), true);
        node.admit(0..8, 2);
    }
    assert!(node.unattributed.len() <= 8, "{}", node.unattributed.len());
    assert!(node.truth.deleted.len() <= 3);
}

#[test]
fn other_plugins_devices_are_not_ours() {
    let mut node = node();
    let ticket = node.listing_begins();
    let holding = Holding {
        namespace: "default".into(),
        pod: "p".into(),
        container: "c".into(),
        resource: "vendor.com/nic".into(),
    };
    node.listed(
        ticket,
        Listing([(holding, [DeviceId::from("n")].into())].into()),
        NOW,
    );
    assert!(node.holders().is_empty());
}

#[test]
fn of_no_device_there_is_no_holder() {
    let mut node = node();
    assert_eq!(
        node.allocate(&GPU.into(), &Devices::new(), NOW),
        Served::Unplanned
    );
    assert_eq!(node.holders(), []);
}
