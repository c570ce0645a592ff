//! Preferences, and attribution of allocated sets.

use gantry_api::{HolderState, Provenance};

use super::*;

#[test]
fn oldest_grant_of_size_is_preferred() {
    let mut node = node();
    node.observe(simple("a", [0, 1]));
    node.observe(simple("b", [2, 3, 4, 5]));
    node.observe(simple("c", [6, 7]));
    assert_eq!(node.admit(0..8, 4), set(2..6));
    assert_eq!(node.admit([0, 1, 6, 7], 2), set([0, 1]));
    assert_eq!(node.admit([6, 7], 2), set([6, 7]));
    assert!(node.notes().is_empty());
}

#[test]
fn pending_pod_is_awaited() {
    let mut node = node();
    let patient = WaitFor { pods: true, table: true };
    let ask = [request(&set(0..8), &set([]), 2)];
    assert_eq!(node.prefer(&ask, patient), None);
    node.observe(simple("a", [4, 5]));
    let answers = node.prefer(&ask, patient).unwrap();
    assert_eq!((answers[0].devices.clone(), answers[0].basis), (set([4, 5]), Basis::Granted));
}

#[test]
fn unplanned_pod_does_not_wait_and_avoids_grants() {
    let mut node = node();
    node.observe(simple("planned", [0, 1]));
    node.observe(simple("younger", [2, 3]));
    node.observe(stray("stray", 1));
    let patient = WaitFor { pods: true, table: true };
    let answer = node.prefer(&[request(&set(0..8), &set([]), 1)], patient).unwrap().remove(0);
    assert_eq!(answer.basis, Basis::Unplanned);
    assert!(answer.devices.is_disjoint(&set(0..4)), "{answer:?}");
}

#[test]
fn unplanned_pod_of_equal_size_is_identified_by_order() {
    let mut node = node();
    node.observe(stray("stray", 2));
    node.observe(simple("planned", [0, 1]));
    let strays = node.admit(0..8, 2);
    assert!(strays.is_disjoint(&set([0, 1])), "{strays:?}");
    let rest = &set(0..8) - &strays;
    let ask = node.prefer(&[request(&rest, &set([]), 2)], WaitFor::default()).unwrap();
    assert_eq!(ask[0].devices, set([0, 1]));
}

#[test]
fn unknown_pod_avoids_grants_and_quarantine() {
    let mut node = node();
    node.observe(simple("planned", [0, 1]));
    node.observe(simple("removed", [2, 3]));
    node.admit(0..8, 2);
    node.admit(2..8, 2);
    node.remove_pod(&"removed".into(), false);
    // Kubelet offers the devices of the removed pod.
    let answer = node.ask(2..8, 2);
    assert_eq!(answer.basis, Basis::Unknown);
    assert!(answer.devices == set([4, 5]) || answer.devices == set([6, 7]), "{answer:?}");
}

#[test]
fn quarantine_is_used_before_youngest_grant() {
    let mut node = node();
    node.observe(simple("removed", [0, 1]));
    node.admit(0..8, 2);
    node.remove_pod(&"removed".into(), false);
    node.observe(simple("older", [2, 3]));
    node.observe(simple("younger", [4, 5]));
    let answer = node.ask([0, 1, 2, 3, 4, 5], 1);
    assert_eq!(answer.basis, Basis::Forced);
    assert!(answer.devices.is_subset(&set([0, 1])), "{answer:?}");
    let answer = node.ask([2, 3, 4, 5], 1);
    assert!(answer.devices.is_subset(&set([4, 5])), "{answer:?}");
}

#[test]
fn containers_are_served_in_order_before_next_pod() {
    let mut node = node();
    node.observe(pod("a", &[granted("one", [0]), granted("two", [3])]));
    node.observe(pod("b", &[granted("one", [5])]));
    assert_eq!(node.admit(0..8, 1), set([0]));
    assert_eq!(node.admit(1..8, 1), set([3]));
    assert_eq!(node.admit([1, 2, 4, 5, 6, 7], 1), set([5]));
}

#[test]
fn app_gets_init_devices_and_more() {
    let mut node = node();
    node.observe(pod("a", &[granted("init", [2]), granted("app", [2, 3])]));
    assert_eq!(node.admit(0..8, 1), set([2]));
    let answer = node.ask_with(0..8, [2], 2);
    assert_eq!((answer.devices, answer.basis), (set([2, 3]), Basis::Granted));
    assert_eq!(node.serve([2, 3]), PlanMatch::Granted);
    assert_eq!(node.held_by("a"), set([2, 3]));
}

#[test]
fn allocated_set_identifies_pod_without_preference() {
    let mut node = node();
    node.observe(pod("other", &[granted("app", [0, 1])]));
    node.observe(pod("a", &[granted("init", [4, 5]), granted("app", [4, 5])]));
    assert_eq!(node.serve([4, 5]), PlanMatch::Granted);
    assert_eq!(node.serve([4, 5]), PlanMatch::Granted);
    assert_eq!(node.admit(0..4, 2), set([0, 1]));
}

#[test]
fn any_init_devices_match_grant_rest_stays_held() {
    let mut node = node();
    node.observe(pod("a", &[granted("init", [1, 2, 3]), of_held("app", 2)]));
    node.admit(0..8, 3);
    assert_eq!(node.serve([1, 3]), PlanMatch::Granted);
    node.list(&[("a", "app", set([1, 3]))]);
    let holders = node.holders();
    let known: Vec<_> = holders.iter().map(|holder| (holder.devices.clone(), holder.provenance)).collect();
    assert_eq!(known, [(vec![id(1), id(3)], Provenance::PodResources), (vec![id(2)], Provenance::Allocated)]);
}

#[test]
fn other_set_is_deviation_with_both_sets() {
    let mut node = node();
    node.observe(simple("a", [0, 1]));
    node.ask(0..8, 2);
    assert_eq!(node.serve([4, 6]), PlanMatch::Deviation);
    let deviations = node.deviations();
    assert_eq!(deviations.len(), 1);
    assert_eq!(deviations[0].allocated, [id(4), id(6)]);
    assert_eq!(deviations[0].granted, [id(0), id(1)]);
    assert_eq!(deviations[0].pod, Some("a".into()));
    assert_eq!(node.held_by("a"), set([4, 6]));
    // Reported once.
    node.list(&[("a", "app", set([4, 6]))]);
    assert_eq!(node.deviations_total(), 1);
}

#[test]
fn repeated_set_is_no_deviation() {
    let mut node = node();
    node.observe(simple("a", [0, 1]));
    node.admit(0..8, 2);
    assert_eq!(node.serve([0, 1]), PlanMatch::Granted);
    assert_eq!(node.deviations_total(), 0);
}

#[test]
fn unavailable_granted_device_keeps_the_others() {
    let mut node = node();
    node.observe(simple("other", [4, 5]));
    node.observe(simple("a", [0, 1, 2]));
    // Device 1 became unhealthy between binding and admission.
    let answer = node.ask([0, 2, 3, 4, 5, 6, 7], 3);
    assert!(answer.devices.is_disjoint(&set([4, 5])), "{answer:?}");
    assert_eq!(answer.devices.len(), 3);
}

#[test]
fn forged_grants_are_refused_and_avoid_real_ones() {
    let mut node = node();
    node.observe(simple("real", [0, 1]));
    node.observe(simple("overlapping", [1, 2]));
    node.observe(simple("imagined", [9, 10]));
    let mut foreign = simple("foreign", [3, 4]);
    foreign.grant = simple("someone", [3, 4]).grant;
    node.observe(foreign);
    let mut wide = simple("wide", [3, 4]);
    wide.requests[0].count = 1;
    node.observe(wide);
    let mut garbage = simple("garbage", [5, 6]);
    garbage.grant = Some("{".into());
    node.observe(garbage);
    let refused: Vec<String> = node
        .notes()
        .into_iter()
        .map(|note| match note {
            Note::Refused { pod, refusal } => format!("{}: {refusal}", pod.name),
            other => panic!("{other:?}"),
        })
        .collect();
    insta::assert_snapshot!(refused.join("\n"), @r#"
    overlapping: device GPU-1 belongs to the grant of pod real
    imagined: device GPU-10 of nvidia.com/gpu is not on this node
    foreign: grant was decided for pod someone, this is foreign
    wide: the grant does not match container "app": 2 of nvidia.com/gpu granted, 1 requested
    garbage: grant is not readable: EOF while parsing an object at line 1 column 1
    "#);
    node.list(&[]);
    assert!(node.notes().is_empty());
    assert_eq!(node.admit(0..8, 2), set([0, 1]));
    let next = node.admit(2..8, 2);
    assert!(next.is_disjoint(&set([0, 1])));
}

#[test]
fn conflicting_grant_is_valid_after_first_pod_ends() {
    let mut node = node();
    node.observe(simple("first", [0, 1]));
    node.observe(simple("second", [1, 2]));
    node.remove_pod(&"first".into(), true);
    assert_eq!(node.ask(0..8, 2).devices, set([1, 2]));
}

#[test]
fn force_deleted_devices_are_quarantined_until_processes_end() {
    let mut node = node();
    node.observe(simple("a", [0, 1]));
    node.admit(0..8, 2);
    node.observe(started(simple("a", [0, 1])));
    node.remove_pod(&"a".into(), false);
    let holders = node.holders();
    assert_eq!(holders[0].state, HolderState::Quarantined);
    assert_eq!(node.quarantined(), [PodUid::from("a")]);
    node.processes_gone(&"a".into());
    assert!(node.holders().is_empty() && node.quarantined().is_empty());
}

#[test]
fn finished_pod_frees_devices_at_once() {
    let mut node = node();
    node.observe(simple("a", [0, 1]));
    node.admit(0..8, 2);
    node.observe(started(simple("a", [0, 1])));
    node.remove_pod(&"a".into(), true);
    assert!(node.holders().is_empty());
}

#[test]
fn pod_deleted_before_admission_leaves_nothing() {
    let mut node = node();
    node.observe(simple("a", [0, 1]));
    node.remove_pod(&"a".into(), false);
    assert!(node.holders().is_empty() && node.quarantined().is_empty());
}

#[test]
fn pod_deleted_during_request_is_served_and_dropped() {
    let mut node = node();
    node.observe(simple("a", [0, 1]));
    node.ask(0..8, 2);
    node.remove_pod(&"a".into(), false);
    assert_eq!(node.serve([0, 1]), PlanMatch::Unplanned);
    assert_eq!(node.holders().len(), 1);
    node.list(&[]);
    node.list(&[]);
    assert!(node.holders().is_empty());
    assert_eq!(node.deviations_total(), 0);
}

#[test]
fn preferences_without_table_are_valid() {
    let mut node = node();
    node.table(None);
    assert_eq!(node.ask(2..8, 3).devices.len(), 3);
    assert_eq!(node.ask_with(2..8, [7], 2).devices, set([2, 7]));
}

#[test]
fn impossible_requests_get_available_devices() {
    let mut node = node();
    assert_eq!(node.ask(0..2, 5).devices, set(0..2));
    assert_eq!(node.ask(0..2, 0).devices, set([]));
    assert_eq!(node.ask_with(0..4, [1, 2, 3], 2).devices.len(), 2);
    assert!(node.ask([20, 21], 1).devices.is_empty());
}
