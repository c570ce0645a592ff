//! The protocol by which a gang is bound, checked over every state it can reach: two gangs, devices for one of them, and whatever may
//! fail. A model of the protocol, with transitions of its own: so each safeguard can be left out, those of the API server and of the writer
//! included, which are not the state machine's. `refinement` plays the steps to the real state machine, and compares. The whole code is
//! played at random in the extender's `schedules`.
//!
//! Who there is and what may happen stands in `cluster` and `events`, what an extender does in `extender`; `graph` looks whether the good
//! end can be reached from everywhere. Each safeguard of the protocol is left out once to see that it is needed (and that the check can
//! fail). What that teaches beyond the obvious:
//!
//! - A resourceVersion that is checked when a decision is written fences an old leader only if the new one has *written* every gang's object
//!   before it plans. Otherwise the old one's last write finds its object as it was, and stands beside the new one's decision for
//!   another gang on the same devices.
//! - The mark that a leader writes there must be ordered (the Lease's `leaseTransitions`), and whoever finds a later mark than his own must stop
//!   leading, rather than read on and try again.
//! - A write of unknown outcome is repeated as it was until it succeeds. A refusal of the repetition does not end the doubt.
//! - Which pod has which place is part of the decision. A replacement is bound only once it is written there.
//! - A new leader binds by the decision it finds; requests of the former that are under way still then do no harm.
//!
//! Not modelled: several devices per member, single pods (their Bindings are fenced by nothing but the time a request may take),
//! kubelet, and extras beyond the minimum.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, missing_docs)]

mod cluster;
mod events;
mod extender;
mod graph;
mod refinement;

use stateright::{Checker, Expectation, HasDiscoveries, Model};

use cluster::{AS_DECIDED, Call, DECIDED_ONCE, Faults, GRANTED_ONCE, Protocol, Rules};

/// Lists of what may fail, each thing once, in any state and any order.
fn lists() -> Vec<(&'static str, Faults)> {
    let none = Faults::default();
    vec![
        (
            "crash, scheduler restart, lost request or answer",
            Faults { crashes: 1, scheduler_restarts: 1, lost: 1, ..none },
        ),
        ("leader change, lost request or answer", Faults { leader_changes: 1, lost: 1, ..none }),
        ("leader change, foreign write", Faults { leader_changes: 1, foreign_writes: 1, ..none }),
        ("crash, leader change", Faults { crashes: 1, leader_changes: 1, ..none }),
        (
            "pod deleted, lost request or answer, foreign write",
            Faults { deletions: 1, lost: 1, foreign_writes: 1, ..none },
        ),
        ("decision refused, leader change", Faults { refused: 1, leader_changes: 1, ..none }),
        ("decision refused, crash, pod deleted", Faults { refused: 1, crashes: 1, deletions: 1, ..none }),
        (
            "decision refused, lost request or answer, foreign write",
            Faults { refused: 1, lost: 1, foreign_writes: 1, ..none },
        ),
        ("pod deleted, crash", Faults { deletions: 1, crashes: 1, ..none }),
    ]
}

/// Everything that may fail, once, but for a refusal. Takes a while: `cargo test -p gantry-gang --test model --release -- --ignored`.
const ALL: Faults = Faults {
    crashes: 1,
    leader_changes: 1,
    scheduler_restarts: 1,
    lost: 1,
    refused: 0,
    foreign_writes: 1,
    deletions: 1,
};

fn check_safety(name: &str, faults: Faults) {
    let rules = Rules::default();
    let checker = Protocol { faults, rules }.checker().threads(2).spawn_bfs().join();
    println!("{name}: {} states", checker.unique_state_count());
    assert!(checker.is_done());
    checker.assert_properties();
}

fn check_progress(name: &str, faults: Faults) {
    let rules = Rules::default();
    if let Some((way, state)) = graph::stranded(&Protocol { faults, rules }) {
        let way: String = way.iter().map(|event| format!("  {event:?}\n")).collect();
        panic!("{name}: no way on from\n{state:?}\nreached by\n{way}");
    }
}

#[test]
fn no_device_is_granted_twice_and_nothing_is_bound_undecided() {
    for (name, faults) in lists() {
        check_safety(name, faults);
    }
}

#[test]
fn model_without_further_faults_always_runs_both_gangs() {
    // From every reachable state, both gangs run and no reservation is left once faults stop.
    for (name, faults) in lists() {
        check_progress(name, faults);
    }
}

#[test]
fn state_machine_follows_the_model() {
    let none = Faults::default();
    for faults in [
        Faults { crashes: 1, ..none },
        Faults { leader_changes: 1, ..none },
        Faults { deletions: 1, ..none },
        Faults { refused: 1, lost: 1, ..none },
    ] {
        match refinement::check(&Protocol { faults, rules: Rules::default() }) {
            Ok(steps) => println!("{faults:?}: {steps} steps"),
            Err(wrong) => panic!("{faults:?}: {wrong}"),
        }
    }
}

#[test]
#[ignore = "some minutes in a release build"]
fn the_same_of_everything_that_may_fail_at_once() {
    check_safety("everything", ALL);
    check_progress("everything", ALL);
}

/// The first thing that goes wrong without a rule.
fn first_failure(faults: Faults, rules: Rules) -> Option<&'static str> {
    let checker =
        Protocol { faults, rules }.checker().finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    let properties = checker.model().properties();
    let mut failed = properties.iter().filter(|property| matches!(property.expectation, Expectation::Always));
    failed.find(|property| checker.discovery(property.name).is_some()).map(|property| property.name)
}

/// Whether a property fails somewhere, if one looks beyond what fails first.
fn fails_in_the_end(faults: Faults, rules: Rules, property: &'static str) -> bool {
    let checker = Protocol { faults, rules }
        .checker()
        .finish_when(HasDiscoveries::AllOf([property].into()))
        .spawn_bfs()
        .join();
    checker.discovery(property).is_some()
}

#[test]
fn a_binding_before_the_decision_is_written_is_found() {
    let rules = Rules { persist_first: false, ..Rules::default() };
    assert_eq!(first_failure(Faults::default(), rules), Some(AS_DECIDED));
}

#[test]
fn a_decision_written_over_another_leaders_is_found() {
    let rules = Rules { version_checked: false, ..Rules::default() };
    let faults = Faults { leader_changes: 1, ..Faults::default() };
    assert_eq!(first_failure(faults, rules), Some(DECIDED_ONCE));
}

#[test]
fn a_new_leader_that_only_reads_is_found() {
    let rules = Rules { leader_marks: false, ..Rules::default() };
    let faults = Faults { leader_changes: 1, ..Faults::default() };
    assert_eq!(first_failure(faults, rules), Some(DECIDED_ONCE));
    assert!(fails_in_the_end(faults, rules, GRANTED_ONCE));
    // So it is of a single extender that is killed and started.
    let faults = Faults { crashes: 1, ..Faults::default() };
    assert_eq!(first_failure(faults, rules), Some(DECIDED_ONCE));
}

#[test]
fn an_old_leader_that_reads_on_is_found() {
    let faults = Faults { leader_changes: 1, ..Faults::default() };
    let disobedient = Rules { marks_obeyed: false, ..Rules::default() };
    assert_eq!(first_failure(faults, disobedient), Some(DECIDED_ONCE));
    let unordered = Rules { marks_ordered: false, ..Rules::default() };
    assert_eq!(first_failure(faults, unordered), Some(DECIDED_ONCE));
}

#[test]
fn a_binding_for_a_name_instead_of_a_pod_is_found() {
    let rules = Rules { uid_checked: false, ..Rules::default() };
    let faults = Faults { deletions: 1, ..Faults::default() };
    assert_eq!(first_failure(faults, rules), Some(AS_DECIDED));
}

#[test]
fn places_given_up_while_their_decision_is_under_way_are_found() {
    let rules = Rules { unknown_repeated: false, ..Rules::default() };
    let faults = Faults { lost: 1, ..Faults::default() };
    assert_eq!(first_failure(faults, rules), Some(DECIDED_ONCE));
}

#[test]
fn refused_repetition_that_ends_the_doubt_is_found() {
    // The first write may still succeed: a refusal of the second says nothing about it.
    let rules = Rules { doubt_kept: false, ..Rules::default() };
    let faults = Faults { lost: 1, refused: 1, ..Faults::default() };
    assert_eq!(first_failure(faults, rules), Some(DECIDED_ONCE));
}

#[test]
fn a_decision_that_is_not_taken_up_is_found() {
    let rules = Rules { decisions_taken_up: false, ..Rules::default() };
    let faults = Faults { crashes: 1, ..Faults::default() };
    assert_eq!(first_failure(faults, rules), Some(DECIDED_ONCE));
}

#[test]
fn replacement_bound_before_it_is_written_is_found() {
    // The model finds the violation if replacements are bound before the status records them.
    let rules = Rules { replacements_written: false, ..Rules::default() };
    let faults = Faults { deletions: 1, ..Faults::default() };
    assert_eq!(first_failure(faults, rules), Some(AS_DECIDED));
}

#[test]
fn falsely_reported_bind_is_found_as_waiting_forever() {
    // If kube-scheduler receives a success for a bind that did not happen, the pod waits forever. The model
    // finds this.
    let rules = Rules { honest: false, ..Rules::default() };
    let faults = Faults { crashes: 1, lost: 1, ..Faults::default() };
    assert_eq!(first_failure(faults, rules), None);
    let (_, state) = graph::stranded(&Protocol { faults, rules }).unwrap();
    assert!(state.calls.contains(&Call::Believed), "{state:?}");
}
