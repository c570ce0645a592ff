//! State after a restart of the plugin or kubelet.

use super::*;

/// A restarted plugin on this node.
fn restarted(pods: Vec<ObservedPod>, holdings: &[(&str, &str, Devices)], published: &[Holder]) -> Handover {
    let mut handover = Handover::new(NODE.into());
    let inventory = inventory(8);
    handover.inventory(&inventory);
    handover.sync(pods);
    handover.adopt(published);
    handover.list(holdings);
    handover
}

#[test]
fn unlisted_init_devices_come_from_grant() {
    let pods = vec![started(pod("a", &[granted("init", [1, 2, 3]), of_held("app", 2)]))];
    let node = restarted(pods, &[("a", "app", set([1, 3]))], &[]);
    assert_eq!(node.held_by("a"), set([1, 2, 3]));
}

#[test]
fn pods_bound_during_gap_are_in_binding_order() {
    let mut first = simple("first", [6, 7]);
    first.revision = 10;
    let mut second = simple("second", [0, 1]);
    second.revision = 11;
    let mut node = restarted(vec![second, first], &[], &[]);
    assert_eq!(node.admit(0..8, 2), set([6, 7]));
    assert_eq!(node.admit(0..6, 2), set([0, 1]));
}

#[test]
fn new_kubelet_admits_by_creation_time() {
    let mut old = simple("created-first", [6, 7]);
    (old.created, old.revision) = (1, 11);
    let mut young = simple("bound-first", [0, 1]);
    (young.created, young.revision) = (2, 10);
    let mut node = node();
    node.observe(young);
    node.observe(old);
    node.kubelet_restarted();
    assert_eq!(node.admit(0..8, 2), set([6, 7]));
    assert_eq!(node.admit(0..6, 2), set([0, 1]));
    // Pods bound later are in watch order again.
    node.observe(simple("later", [2, 3]));
    node.observe(simple("last", [4, 5]));
    assert_eq!(node.admit(2..6, 2), set([2, 3]));
}

#[test]
fn kubelet_without_checkpoint_gets_same_set_again() {
    let mut node = node();
    node.observe(simple("a", [0, 1]));
    node.admit(0..8, 2);
    node.observe(started(simple("a", [0, 1])));
    node.list(&[("a", "app", set([0, 1]))]);
    node.kubelet_restarted();
    node.list(&[]);
    let answer = node.ask(0..8, 2);
    assert_eq!((answer.devices, answer.basis), (set([0, 1]), Basis::Granted));
}

/// Kubelet requests nothing for running containers, whatever its checkpoint contains.
#[test]
fn forgotten_running_pod_keeps_its_gpus() {
    for (new, expected) in [
        (simple("b", [2, 3]), (Some(set([2, 3])), Basis::Granted)),
        (stray("b", 2), (None, Basis::Unplanned)),
    ] {
        let mut node = node();
        node.observe(simple("a", [0, 1]));
        node.admit(0..8, 2);
        node.observe(started(simple("a", [0, 1])));
        node.list(&[("a", "app", set([0, 1]))]);
        node.kubelet_restarted();
        node.list(&[]);
        node.observe(new);
        let answer = node.ask(0..8, 2);
        assert_eq!(answer.basis, expected.1);
        assert!(answer.devices.is_disjoint(&set([0, 1])), "{answer:?}");
        assert!(expected.0.is_none_or(|grant| answer.devices == grant));
    }
}

#[test]
fn restarted_kubelet_skips_running_pods() {
    let mut node = node();
    node.observe(simple("a", [0, 1]));
    node.admit(0..8, 2);
    node.kubelet_restarted();
    node.list(&[("a", "app", set([0, 1]))]);
    node.observe(simple("b", [2, 3]));
    assert_eq!(node.ask(0..8, 2).devices, set([2, 3]));
}

#[test]
fn quarantine_survives_plugin_restart() {
    let mut before = node();
    before.observe(simple("removed", [0, 1]));
    before.observe(simple("stays", [2, 3]));
    before.admit(0..8, 2);
    before.admit(2..8, 2);
    before.remove_pod(&"removed".into(), false);
    let stays = started(simple("stays", [2, 3]));
    let after = restarted(vec![stays], &[("stays", "app", set([2, 3]))], &before.holders());
    assert_eq!(after.quarantined(), [PodUid::from("removed")]);
    assert_eq!(after.held_by("removed"), set([0, 1]));
}

#[test]
fn pod_deleted_unseen_goes_to_quarantine() {
    let mut before = node();
    before.observe(simple("a", [0, 1]));
    before.admit(0..8, 2);
    let after = restarted(vec![], &[], &before.holders());
    assert_eq!(after.quarantined(), [PodUid::from("a")]);
}

#[test]
fn started_init_containers_cause_no_deviation() {
    let mut node = node();
    let running = pod("running", &[granted("init", [0]), granted("app", [0, 1])]);
    node.observe(running.clone());
    node.serve([0]);
    node.serve([0, 1]);
    node.observe(started(running));
    node.kubelet_restarted();
    // PodResources does not list ordinary init containers.
    node.list(&[("running", "app", set([0, 1]))]);
    // A pod that the watch shows too late.
    assert_eq!(node.serve([7]), PlanMatch::Unplanned);
    assert_eq!(node.held_by("running"), set([0, 1]));
    assert_eq!(node.held_by(""), set([7]));
    assert_eq!(node.deviations_total(), 0);
}

#[test]
fn list_after_watch_gap_keeps_order_and_finds_deleted() {
    let mut node = node();
    let mut a = simple("a", [0, 1]);
    a.revision = 5;
    let mut b = simple("b", [2, 3]);
    b.revision = 6;
    node.observe(a);
    node.observe(b.clone());
    node.admit(0..8, 2);
    // a was deleted in the gap; c was bound, and b's status was written later.
    b.revision = 9;
    let mut c = simple("c", [4, 5]);
    c.revision = 8;
    node.sync(vec![b, c]);
    assert_eq!(node.quarantined(), [PodUid::from("a")]);
    assert_eq!(node.admit(2..8, 2), set([2, 3]));
    assert_eq!(node.admit(4..8, 2), set([4, 5]));
}
