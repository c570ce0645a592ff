//! Corrections by PodResources.

use gantry_api::Provenance;

use super::*;

#[test]
fn exchanged_sets_of_two_pods_are_corrected() {
    let mut node = node();
    node.observe(simple("a", [0, 1]));
    node.observe(simple("b", [2, 3]));
    // Kubelet admitted b first: each pod got the other's set.
    node.admit(0..8, 2);
    node.admit(2..8, 2);
    node.list(&[("a", "app", set([2, 3])), ("b", "app", set([0, 1]))]);
    assert_eq!(node.held_by("a"), set([2, 3]));
    assert_eq!(node.held_by("b"), set([0, 1]));
    let swaps = node.notes().into_iter().filter(|note| matches!(note, Note::Swapped { .. })).count();
    assert_eq!(swaps, 2);
    assert_eq!(node.deviations_total(), 0);
    node.list(&[("a", "app", set([2, 3])), ("b", "app", set([0, 1]))]);
    assert!(node.notes().is_empty());
}

#[test]
fn pod_with_taken_set_gets_the_other_set() {
    let mut node = node();
    node.observe(simple("rejected", [0, 1]));
    node.observe(simple("b", [2, 3]));
    node.observe(simple("c", [4, 5]));
    // Kubelet rejected the first pod, which the watch has not reported yet: b gets its set.
    assert_eq!(node.admit(0..8, 2), set([0, 1]));
    node.list(&[("b", "app", set([0, 1]))]);
    node.remove_pod(&"rejected".into(), true);
    // b's own set is free now; c gets its own.
    assert_eq!(node.admit(2..8, 2), set([4, 5]));
    assert_eq!(node.held_by("b"), set([0, 1]));
    assert_eq!(node.held_by("c"), set([4, 5]));
}

#[test]
fn displaced_pod_gets_equal_free_set() {
    let mut node = node();
    node.observe(simple("a", [0, 1]));
    node.observe(simple("b", [2, 3]));
    // b came first and got a's set.
    node.admit(0..8, 2);
    node.list(&[("b", "app", set([0, 1]))]);
    assert_eq!(node.held_by("a"), set([2, 3]));
    let answer = node.ask(2..8, 2);
    assert_eq!((answer.devices, answer.basis), (set([2, 3]), Basis::Granted));
}

#[test]
fn late_grant_of_deviating_pod_stays_reserved() {
    let mut node = node();
    // The watch was too late: the pod was served by topology.
    let taken = node.admit(0..8, 2);
    node.observe(simple("late", [6, 7]));
    node.list(&[("late", "app", taken.clone())]);
    assert_eq!(node.held_by("late"), taken);
    assert_eq!(node.deviations_total(), 1);
    let left = &set(0..8) - &taken;
    let answer = node.prefer(&[request(&left, &set([]), 2)], WaitFor::default()).unwrap().remove(0);
    assert_eq!(answer.basis, Basis::Unknown);
}

#[test]
fn unwatched_pod_holds_listed_devices() {
    let mut node = node();
    node.list(&[("static", "app", set([3]))]);
    let holders = node.holders();
    assert_eq!(holders.len(), 1);
    assert_eq!((holders[0].pod.as_str(), &holders[0].uid), ("static", &None));
    node.list(&[]);
    assert!(node.holders().is_empty());
}

#[test]
fn pod_resources_reveal_holders() {
    let mut node = node();
    node.observe(simple("a", [0, 1]));
    assert_eq!(node.holders()[0].provenance, Provenance::Granted);
    node.admit(0..8, 2);
    assert_eq!(node.holders()[0].provenance, Provenance::Allocated);
    node.list(&[("a", "app", set([0, 1]))]);
    assert_eq!(node.holders()[0].provenance, Provenance::PodResources);
    assert_eq!(node.holders().len(), 1);
}

/// A pod with the name of `name` and another UID.
fn successor(name: &str, gpus: impl IntoIterator<Item = u8>) -> ObservedPod {
    let mut pod = simple(name, gpus);
    let uid = format!("{name}-2");
    pod.grant =
        pod.grant.map(|grant| grant.replace(&format!(r#""pod":"{name}""#), &format!(r#""pod":"{uid}""#)));
    pod.uid = uid.as_str().into();
    pod
}

#[test]
fn list_before_kubelet_saw_deletion_skips_successor() {
    for listed_first in [true, false] {
        let mut node = node();
        node.observe(simple("a", [0, 1]));
        node.admit(0..8, 2);
        node.remove_pod(&"a".into(), true);
        if listed_first {
            node.list(&[("a", "app", set([0, 1]))]);
            assert_eq!(node.held_by("a"), set([0, 1]), "what it lists is not free");
        }
        node.observe(successor("a", [2, 3]));
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
fn repeatedly_listed_devices_are_held() {
    let mut node = node();
    node.observe(simple("a", [0, 1]));
    node.admit(0..8, 2);
    node.remove_pod(&"a".into(), true);
    node.observe(successor("a", [2, 3]));
    for _ in 0..2 {
        node.list(&[("a", "app", set([0, 1]))]);
    }
    assert_eq!(node.held_by("a"), set([0, 1]), "it took the successor's devices from its choice");
}

#[test]
fn list_begun_before_deletion_skips_successor() {
    let mut node = node();
    node.observe(simple("a", [0, 1]));
    node.admit(0..8, 2);
    let ticket = node.listing_begins();
    node.remove_pod(&"a".into(), true);
    node.observe(successor("a", [2, 3]));
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
fn unlisted_living_pod_keeps_devices() {
    let mut node = node();
    node.observe(simple("a", [0, 1]));
    node.admit(0..8, 2);
    node.list(&[("a", "app", set([0, 1]))]);
    node.list(&[]);
    assert_eq!(node.held_by("a"), set([0, 1]));
}

#[test]
fn list_before_inventory_is_kept() {
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
fn devices_without_list_give_no_holders() {
    let mut node = node();
    assert!(!node.has_listing());
    node.list(&[]);
    assert!(node.has_listing());
}

#[test]
fn unattributed_set_ends_with_new_allocation() {
    let mut node = node();
    let first = node.admit(0..4, 4);
    assert_eq!(node.held_by(""), first);
    let second = node.admit(0..4, 2);
    assert_eq!(node.held_by(""), second);
}

#[test]
fn devices_reused_in_unknown_pod_stay_with_it() {
    let mut node = node();
    let init = node.admit(0..8, 4);
    // Kubelet reuses init devices for an app without a question.
    node.serve([0]);
    assert!(init.contains(&id(0)));
    assert_eq!(node.held_by(""), init);
}

#[test]
fn unattributed_sets_are_bounded_without_list() {
    let mut node = node();
    for round in 0..1000 {
        node.listing_begins();
        let name = format!("pod-{round}");
        node.observe(simple(&name, [0, 1]));
        node.admit(0..8, 2);
        node.remove_pod(&name.as_str().into(), true);
        node.admit(0..8, 2);
    }
    assert!(node.unattributed.len() <= 8, "{}", node.unattributed.len());
    assert!(node.truth.remembered_deletions() <= 3);
}

#[test]
fn devices_of_other_plugins_are_ignored() {
    let mut node = node();
    let ticket = node.listing_begins();
    let holding = Holding {
        namespace: "default".into(),
        pod: "p".into(),
        container: "c".into(),
        resource: "vendor.com/nic".into(),
    };
    node.listed(ticket, Listing([(holding, [DeviceId::from("n")].into())].into()), NOW);
    assert!(node.holders().is_empty());
}

#[test]
fn empty_set_has_no_holder() {
    let mut node = node();
    assert_eq!(node.allocate(&GPU.into(), &Devices::new(), NOW), PlanMatch::Unplanned);
    assert_eq!(node.holders(), []);
}
