use proptest::prelude::*;
use serde_json::json;

use super::*;

const NEW: Reset = Reset { at: 100, created: false, failed: None };
const CREATED: Reset = Reset { created: true, ..NEW };

fn ended(result: Result) -> Progress {
    Progress::Ended(result, "why".to_owned())
}

/// A leader that ends between any two writes leaves a record from which the next continues with the same Job.
#[test]
fn reset_continues_from_every_record() {
    assert_eq!(follow(&NEW, Progress::Absent, (true, false), 101), ResetFollowUp::Create);
    assert_eq!(
        follow(&NEW, Progress::Runs, (true, false), 101),
        ResetFollowUp::Created,
        "the leader before created it"
    );
    assert_eq!(follow(&CREATED, Progress::Runs, (true, false), 5000), ResetFollowUp::Wait);
    for reset in [NEW, CREATED] {
        let healthy = ResetFollowUp::Ended(Result::Healthy, "why".to_owned());
        assert_eq!(follow(&reset, ended(Result::Healthy), (true, false), 101), healthy);
    }
}

/// A Job that runs is not interrupted. One that was not created yet is not.
#[test]
fn rule_that_is_gone_ends_only_what_has_not_begun() {
    assert_eq!(follow(&NEW, Progress::Absent, (false, false), 101), ResetFollowUp::Withdraw);
    assert_eq!(follow(&CREATED, Progress::Runs, (false, false), 101), ResetFollowUp::Wait);
    assert_eq!(follow(&NEW, Progress::Runs, (false, false), 101), ResetFollowUp::Created);
}

/// A driver upgrade began after the reset was recorded and before its Job existed.
#[test]
fn job_is_not_created_on_a_marked_node() {
    assert_eq!(follow(&NEW, Progress::Absent, (true, true), 101), ResetFollowUp::HoldBack);
    assert_eq!(follow(&NEW, Progress::Absent, (false, true), 101), ResetFollowUp::Withdraw);
    assert_eq!(follow(&CREATED, Progress::Runs, (true, true), 101), ResetFollowUp::Wait);
    let healthy = ResetFollowUp::Ended(Result::Healthy, "why".to_owned());
    assert_eq!(follow(&CREATED, ended(Result::Healthy), (true, true), 101), healthy);
}

#[test]
fn job_that_is_gone_or_never_there_is_a_failure() {
    let result = |reset, now| match follow(&reset, Progress::Absent, (true, false), now) {
        ResetFollowUp::Ended(result, _) => Some(result),
        _ => None,
    };
    assert_eq!(result(CREATED, 101), Some(Result::Deleted));
    assert_eq!(result(NEW, 100 + CREATION_LIMIT), None);
    assert_eq!(result(NEW, 101 + CREATION_LIMIT), Some(Result::NotCreated));
}

#[test]
fn gpu_is_reset_once_nothing_is_in_the_way() {
    let free = DrainState { is_wanted: true, ..DrainState::default() };
    assert_eq!(begin(&free), ResetStart::Reset);
    assert_eq!(begin(&DrainState { is_wanted: false, is_held: true, ..free }), ResetStart::Withdraw);
    assert_eq!(begin(&DrainState { is_held: true, resets: 9, ..free }), ResetStart::Evict);
    assert_eq!(begin(&DrainState { resets: MAX_RESETS, is_pausing: true, ..free }), ResetStart::GiveUp);
    assert_eq!(begin(&DrainState { is_pausing: true, ..free }), ResetStart::Wait);
    assert_eq!(begin(&DrainState { is_node_busy: true, is_group_in_use: true, ..free }), ResetStart::Wait);
    assert_eq!(begin(&DrainState { is_group_in_use: true, ..free }), ResetStart::HoldBack);
    assert_eq!(
        begin(&DrainState { is_marked: true, is_held: true, resets: 9, ..free }),
        ResetStart::HoldBack
    );
    assert_eq!(begin(&DrainState { is_marked: true, is_wanted: false, ..free }), ResetStart::Withdraw);
}

proptest! {
    /// Whatever is seen: a held GPU, one without a cordon or a rule, and one of a busy node is never reset, and no GPU is
    /// reset a fourth time.
    #[test]
    fn reset_begins_only_if_it_may(
        is_wanted: bool, is_held: bool, resets in 0..6usize, is_pausing: bool, is_node_busy: bool, is_group_in_use: bool,
        is_marked: bool,
    ) {
        let seen = DrainState { is_wanted, is_held, resets, is_pausing, is_node_busy, is_group_in_use, is_marked };
        let may = is_wanted && !is_marked && !is_held && resets < MAX_RESETS && !is_pausing && !is_node_busy && !is_group_in_use;
        prop_assert_eq!(begin(&seen) == ResetStart::Reset, may);
    }
}

/// GPUs of a machine before Ampere are joined by NVLinks: a rule for one of them waits for the others.
#[test]
fn group_before_ampere_waits_for_all_of_it() {
    let machine = json!({
        "gpus": [
            {"index": 0, "uuid": "GPU-a", "computeCapability": "7.0"},
            {"index": 1, "uuid": "GPU-b", "computeCapability": "7.0"},
        ],
        "nvlinks": [{"gpus": [0, 1], "links": 2}],
        "paths": ["X SYS", "SYS X"],
    });
    let of = |cordoned: &[&str], machine: &serde_json::Value| {
        let annotations: serde_json::Map<_, _> =
            cordoned.iter().map(|gpu| (format!("gantry.dev/cordon-{gpu}"), "x".into())).collect();
        let node: GpuNode = serde_json::from_value(json!({
            "apiVersion": "gantry.dev/v1alpha1", "kind": "GpuNode",
            "metadata": {"name": "n", "annotations": annotations}, "spec": {"machine": machine},
        }))
        .unwrap();
        let gpu =
            GpuHealth { index: 0, uuid: "GPU-a".parse().unwrap(), cordoned: true, problems: Vec::new() };
        in_use(&node, &gpu)
    };
    assert_eq!(of(&["GPU-a", "GPU-b"], &machine), None);
    let waits = of(&["GPU-a"], &machine).unwrap();
    insta::assert_snapshot!(waits, @"the reset waits: GPU 1 is not cordoned, and before Ampere the driver resets GPUs with NVLinks together; `gantry drain gpu n/1` first");
    let mut ampere = machine;
    for gpu in ampere["gpus"].as_array_mut().unwrap() {
        gpu["computeCapability"] = "8.0".into();
    }
    assert_eq!(of(&["GPU-a"], &ampere), None);
}
