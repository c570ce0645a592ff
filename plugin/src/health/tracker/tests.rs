use gantry_api::{Cordon, FaultEvidence};
use gantry_topology::{ComputeInstance, GpuInstance};
use jiff::Timestamp;

use super::*;

fn gpu(name: &str) -> GpuUuid {
    format!("GPU-{name}").parse().unwrap()
}

fn fault(class: Class, reason: &str) -> Fault {
    fault_in(Extent::Gpu, class, reason)
}

fn fault_in(extent: Extent, class: Class, reason: &str) -> Fault {
    Fault {
        extent,
        xid: 46,
        class,
        reason: reason.to_owned(),
        since: Timestamp::UNIX_EPOCH,
        mig_device: None,
        driver: None,
        evidence: FaultEvidence::default(),
    }
}

fn lost(off_bus: bool) -> Loss {
    Loss { reason: "lost".to_owned(), off_bus }
}

fn outage(reason: &str, kind: OutageKind) -> Outage {
    Outage { reason: reason.to_owned(), kind }
}

fn reason(tracker: &HealthTracker, name: &str) -> Option<String> {
    reason_in(tracker, name, None)
}

fn reason_in(tracker: &HealthTracker, name: &str, part: Part) -> Option<String> {
    let health = tracker.health(&gpu(name), part);
    assert_eq!(health.healthy, health.reason.is_none());
    health.reason
}

fn proofs(tracker: &mut HealthTracker) -> Vec<Proof> {
    tracker.take_ended().into_iter().map(|ended| ended.proof).collect()
}

fn cut(instances: &[(u32, &str)]) -> Mig {
    Mig {
        enabled: true,
        instances: instances
            .iter()
            .map(|(id, uuid)| GpuInstance {
                id: *id,
                profile: "1g.5gb".to_owned(),
                start: u8::try_from(*id).unwrap(),
                size: 1,
                compute: vec![ComputeInstance {
                    id: 0,
                    uuid: uuid.parse().unwrap(),
                    profile: "1g.5gb".to_owned(),
                    attributes: None,
                }],
            })
            .collect(),
    }
}

#[test]
fn fault_affects_only_its_gpu() {
    let mut tracker = HealthTracker::default();
    tracker.record_fault(&gpu("a"), fault(Class::Fatal, "Xid 79"));
    assert_eq!(reason(&tracker, "a").as_deref(), Some("Xid 79"));
    assert_eq!(reason(&tracker, "b"), None);
}

#[test]
fn worst_then_first_fault_gives_reason() {
    let mut tracker = HealthTracker::default();
    tracker.record_fault(&gpu("a"), fault(Class::Resettable, "first"));
    tracker.record_fault(&gpu("a"), fault(Class::Resettable, "second"));
    assert_eq!(reason(&tracker, "a").as_deref(), Some("first"));
    tracker.record_fault(&gpu("a"), fault(Class::Fatal, "worse"));
    tracker.record_loss(&gpu("a"), lost(true));
    assert_eq!(reason(&tracker, "a").as_deref(), Some("worse"));
}

#[test]
fn instance_fault_spares_others_gpu_fault_spares_none() {
    let mut tracker = HealthTracker::default();
    tracker.record_fault(&gpu("a"), fault_in(Extent::GpuInstance(1), Class::MigInstance, "one"));
    assert_eq!(reason_in(&tracker, "a", Some((1, 0))).as_deref(), Some("one"));
    assert_eq!(reason_in(&tracker, "a", Some((2, 0))), None);
    tracker.record_fault(&gpu("a"), fault(Class::Fatal, "all"));
    for part in [None, Some((1, 0)), Some((2, 0))] {
        assert_eq!(reason_in(&tracker, "a", part).as_deref(), Some("all"));
    }
}

#[test]
fn fault_survives_responding_gpu() {
    let mut tracker = HealthTracker::default();
    let vitals = Vitals { binding: Some(1), uncorrected: Some(0), ..Vitals::default() };
    tracker.record_vitals(&gpu("a"), vitals, &HealthChecks::default());
    tracker.record_fault(&gpu("a"), fault(Class::Resettable, "Xid 46"));
    tracker.record_response(&gpu("a"));
    tracker.record_vitals(&gpu("a"), vitals, &HealthChecks::default());
    assert_eq!(reason(&tracker, "a").as_deref(), Some("Xid 46"));
    assert_eq!(proofs(&mut tracker), []);
}

#[test]
fn gpu_back_on_bus_counts_as_reset() {
    let mut tracker = HealthTracker::default();
    tracker.record_fault(&gpu("a"), fault(Class::Fatal, "Xid 79"));
    tracker.record_loss(&gpu("a"), lost(true));
    tracker.record_response(&gpu("a"));
    assert_eq!(reason(&tracker, "a"), None);
    assert_eq!(proofs(&mut tracker), [Proof::Responds]);
}

#[test]
fn recovered_query_is_no_reset() {
    let mut tracker = HealthTracker::default();
    tracker.record_fault(&gpu("a"), fault(Class::Fatal, "Xid 79"));
    tracker.record_loss(&gpu("a"), lost(false));
    tracker.record_response(&gpu("a"));
    assert_eq!(reason(&tracker, "a").as_deref(), Some("Xid 79"));
}

#[test]
fn driver_reload_clears_faults_nvml_failure_does_not() {
    let mut tracker = HealthTracker::default();
    tracker.record_fault(&gpu("a"), fault(Class::Resettable, "Xid 46"));
    tracker.record_outage(outage("NVML fails", OutageKind::Failing));
    assert_eq!(reason(&tracker, "b").as_deref(), Some("NVML fails"));
    assert!(!tracker.record_recovery(false));
    assert_eq!(reason(&tracker, "b").as_deref(), Some("NVML fails"), "it responds, but cannot be waited for");
    assert!(!tracker.record_recovery(true));
    assert_eq!(reason(&tracker, "a").as_deref(), Some("Xid 46"));
    assert_eq!(reason(&tracker, "b"), None);

    tracker.record_outage(outage("no library", OutageKind::LibraryMissing));
    assert_eq!(reason(&tracker, "b").as_deref(), Some("no library"));
    assert!(!tracker.record_recovery(true));
    assert_eq!(reason(&tracker, "a").as_deref(), Some("Xid 46"));

    tracker.record_outage(outage("NVML fails", OutageKind::Failing));
    tracker.record_outage(outage("driver gone", OutageKind::DriverGone));
    tracker.record_outage(outage("NVML fails", OutageKind::Failing));
    tracker.record_outage(outage("no library", OutageKind::LibraryMissing));
    assert_eq!(reason(&tracker, "b").as_deref(), Some("no library"));
    assert!(tracker.record_recovery(false));
    assert_eq!(reason(&tracker, "a"), None);
    assert_eq!(proofs(&mut tracker), [Proof::DriverReloaded]);
}

#[test]
fn replaced_instance_clears_only_its_fault() {
    let mut tracker = HealthTracker::default();
    let before = cut(&[(1, "MIG-a"), (2, "MIG-b")]);
    for (gi, uuid) in [(1, "MIG-a"), (2, "MIG-b")] {
        let mut one = fault_in(Extent::GpuInstance(gi), Class::MigInstance, "Xid 48");
        one.mig_device = Some(uuid.to_owned());
        tracker.record_fault(&gpu("a"), one);
    }
    tracker.record_fault(&gpu("a"), fault(Class::Resettable, "Xid 46"));
    tracker.record_mig_layout(&gpu("a"), Some(&before));
    assert_eq!(proofs(&mut tracker), []);
    tracker.record_mig_layout(&gpu("a"), Some(&cut(&[(1, "MIG-c"), (2, "MIG-b")])));
    assert_eq!(proofs(&mut tracker), [Proof::InstanceGone]);
    tracker.record_mig_layout(&gpu("a"), Some(&Mig::default()));
    assert_eq!(proofs(&mut tracker), [Proof::InstanceGone]);
    assert_eq!(reason(&tracker, "a").as_deref(), Some("Xid 46"));
}

#[test]
fn link_fault_ends_with_all_links_up() {
    let mut tracker = HealthTracker::default();
    tracker.record_links(&gpu("a"), 6);
    tracker.record_fault(&gpu("a"), fault(Class::Link { reset: true }, "Xid 155"));
    tracker.record_links(&gpu("a"), 6);
    assert_eq!(reason(&tracker, "a").as_deref(), Some("Xid 155"), "no link went down");
    tracker.record_links(&gpu("a"), 4);
    tracker.record_links(&gpu("a"), 5);
    assert_eq!(reason(&tracker, "a").as_deref(), Some("Xid 155; 1 of 6 NVLinks down"));
    tracker.record_links(&gpu("a"), 6);
    assert_eq!(reason(&tracker, "a"), None);
    assert_eq!(proofs(&mut tracker), [Proof::LinksUp]);
}

#[test]
fn suspect_link_xid_is_fault_if_links_go_down() {
    let suspicion = || fault(Class::Link { reset: true }, "Xid 149");
    let mut tracker = HealthTracker::default();
    tracker.record_links(&gpu("a"), 18);
    tracker.record_suspect(&gpu("a"), suspicion());
    tracker.record_links(&gpu("a"), 18);
    tracker.record_links(&gpu("a"), 18);
    tracker.record_links(&gpu("a"), 17);
    assert_eq!(reason(&tracker, "a"), None, "the link went down by itself, much later");
    tracker.record_links(&gpu("a"), 18);

    tracker.record_suspect(&gpu("a"), suspicion());
    tracker.record_links(&gpu("a"), 18);
    assert_eq!(reason(&tracker, "a"), None);
    tracker.record_links(&gpu("a"), 16);
    let down = Some("Xid 149; 2 of 18 NVLinks down");
    assert_eq!(reason(&tracker, "a").as_deref(), down, "NVML reported it late");
    assert_eq!(tracker.faults("boot")[0].reason, "Xid 149", "the number is not stored");
    tracker.record_links(&gpu("a"), 18);
    assert_eq!((reason(&tracker, "a"), proofs(&mut tracker)), (None, vec![Proof::LinksUp]));

    tracker.record_suspect(&gpu("a"), suspicion());
    tracker.record_links(&gpu("a"), 17);
    tracker.lift(|_| true);
    tracker.record_suspect(&gpu("a"), suspicion());
    tracker.record_links(&gpu("a"), 17);
    assert_eq!(reason(&tracker, "a"), None, "17 links are accepted");
    tracker.record_suspect(&gpu("a"), suspicion());
    tracker.record_links(&gpu("a"), 16);
    assert_eq!(reason(&tracker, "a").as_deref(), Some("Xid 149; 1 of 17 NVLinks down"));
}

#[test]
fn link_fault_survives_restart() {
    let mut before = HealthTracker::default();
    let fault = Fault { xid: 74, ..fault(Class::Link { reset: true }, "Xid 74") };
    before.record_links(&gpu("a"), 6);
    before.record_suspect(&gpu("a"), fault);
    before.record_links(&gpu("a"), 5);
    let stored = before.faults("boot");
    let adopted = |disabled: &str| {
        let checks = HealthChecks { disabled: disabled.parse().unwrap(), ..HealthChecks::default() };
        let mut after = HealthTracker::default();
        after.adopt(stored.clone(), "boot", &Table::built_in(), &checks);
        after.record_links(&gpu("a"), 5);
        after
    };
    let mut after = adopted("");
    assert_eq!(reason(&after, "a").as_deref(), Some("Xid 74; 1 of 6 NVLinks down"));
    after.record_links(&gpu("a"), 6);
    assert_eq!(reason(&after, "a"), None);
    assert_eq!(reason(&adopted("74"), "a"), None);
}

#[test]
fn lift_ends_quarantine_of_named_gpus() {
    let mut tracker = HealthTracker::default();
    for name in ["a", "b"] {
        tracker.record_fault(&gpu(name), fault(Class::Fatal, "Xid 79"));
    }
    tracker.lift(|uuid| *uuid == gpu("a"));
    assert_eq!(reason(&tracker, "a"), None);
    assert_eq!(reason(&tracker, "b").as_deref(), Some("Xid 79"));
    assert_eq!(tracker.faulty().collect::<Vec<_>>(), [&gpu("b")]);
}

/// A reset confirms that the GPU was reset, not that its links are up: the operator has accepted nothing.
#[test]
fn reset_keeps_faults_whose_links_are_down() {
    let mut tracker = HealthTracker::default();
    for name in ["a", "b"] {
        tracker.record_links(&gpu(name), 6);
        tracker.record_peer_links(&gpu(name), Some(6));
        tracker.record_fault(&gpu(name), fault(Class::Link { reset: true }, "Xid 74"));
        tracker.record_links(&gpu(name), 5);
    }
    tracker.record_fault(&gpu("a"), fault_in(Extent::GpuInstance(1), Class::Resettable, "Xid 95"));
    tracker.lift_after_reset(Timestamp::now(), |uuid| *uuid == gpu("a"));
    assert_eq!(reason(&tracker, "a").as_deref(), Some("Xid 74; 1 of 6 NVLinks down"));
    assert_eq!(proofs(&mut tracker), [Proof::Lifted], "that of the instance");
    tracker.record_links(&gpu("a"), 6);
    assert_eq!(reason(&tracker, "a"), None);
    assert_eq!(proofs(&mut tracker), [Proof::LinksUp]);

    // Links that go down again are reported.
    tracker.record_links(&gpu("a"), 5);
    let (a, b) = (gpu("a"), gpu("b"));
    assert_eq!(tracker.notices([&a].into_iter()).len(), 1);
    // The operator accepts the missing link.
    tracker.lift(|uuid| *uuid == b);
    assert_eq!(reason(&tracker, "b"), None);
    assert_eq!(tracker.notices([&b].into_iter()), []);
}

/// The first of equal faults stands with its time, as if it was from before the reset.
#[test]
fn reset_keeps_faults_of_gpu_that_fails_again() {
    let at = |second| Timestamp::from_second(second).unwrap();
    let mut tracker = HealthTracker::default();
    let raised = |second| Fault { since: at(second), ..fault(Class::Resettable, "Xid 95") };
    for name in ["a", "b"] {
        tracker.record_fault(&gpu(name), raised(1));
    }
    assert!(!tracker.record_fault(&gpu("a"), raised(3)), "the first stands");
    tracker.lift_after_reset(at(2), |_| true);
    assert_eq!(tracker.faulty().collect::<Vec<_>>(), [&gpu("a")]);
    assert_eq!(tracker.faults("boot")[0].since.0, at(1));
}

#[test]
fn adopted_fault_ends_with_later_evidence() {
    let seen = |binding, uncorrected| Vitals {
        binding: Some(binding),
        uncorrected: Some(uncorrected),
        ..Vitals::default()
    };
    let (table, checks) = (Table::built_in(), HealthChecks::default());
    let mut before = HealthTracker::default();
    for name in ["a", "b"] {
        before.record_vitals(&gpu(name), seen(1, 0), &checks);
        before.record_fault(&gpu(name), fault(Class::Resettable, "Xid 46"));
    }
    let stored = before.faults("boot-1");

    // The same boot: the fault stands if the GPU only kept running, whatever was recorded first.
    for adopt_first in [true, false] {
        let mut after = HealthTracker::default();
        if adopt_first {
            after.adopt(stored.clone(), "boot-1", &table, &checks);
        }
        after.record_vitals(&gpu("a"), seen(1, 0), &checks);
        after.record_vitals(&gpu("b"), seen(2, 0), &checks);
        if !adopt_first {
            after.adopt(stored.clone(), "boot-1", &table, &checks);
        }
        assert_eq!(reason(&after, "a").as_deref(), Some("Xid 46"));
        assert_eq!(reason(&after, "b"), None);
        assert_eq!(proofs(&mut after), [Proof::Rebound]);
        assert_eq!(after.faults("boot-1"), stored[..1]);
    }

    let mut rebooted = HealthTracker::default();
    rebooted.adopt(stored.clone(), "boot-2", &table, &checks);
    assert_eq!(reason(&rebooted, "a"), None);
    assert_eq!(proofs(&mut rebooted), [Proof::Rebooted; 2]);

    let mut disabled = HealthTracker::default();
    let checks = HealthChecks { disabled: "46".parse().unwrap(), ..HealthChecks::default() };
    disabled.adopt(stored, "boot-1", &table, &checks);
    assert_eq!(reason(&disabled, "a"), None);
}

#[test]
fn cleared_stored_fault_keeps_new_fault() {
    let seen = |binding| Vitals { binding: Some(binding), ..Vitals::default() };
    let (table, checks) = (Table::built_in(), HealthChecks::default());
    for (stored_xid, stored_class) in [(46, Class::Resettable), (79, Class::Fatal)] {
        let mut before = HealthTracker::default();
        before.record_vitals(&gpu("a"), seen(1), &checks);
        let stored = Fault { xid: stored_xid, ..fault(stored_class, "before") };
        before.record_fault(&gpu("a"), stored);
        let stored = before.faults("boot");
        // The GPU was bound again unnoticed, and then became unhealthy again before the API server responded;
        // or it has been lost since, so it has no vitals.
        for answers in [true, false] {
            let mut after = HealthTracker::default();
            after.record_vitals(&gpu("a"), seen(2), &checks);
            after.record_fault(&gpu("a"), fault(Class::Resettable, "since"));
            if !answers {
                let loss = Loss { reason: "lost".to_owned(), off_bus: false };
                after.record_loss(&gpu("a"), loss);
            }
            after.adopt(stored.clone(), "boot", &table, &checks);
            after.record_response(&gpu("a"));
            after.record_vitals(&gpu("a"), seen(2), &checks);
            assert!(reason(&after, "a").is_some(), "{stored_xid}, answers: {answers}");
            let reported = match answers {
                true => vec![Proof::Rebound],
                false => vec![],
            };
            assert_eq!(proofs(&mut after), reported, "{stored_xid}");
            after.record_vitals(&gpu("a"), seen(3), &checks);
            assert_eq!(reason(&after, "a"), None);
        }
    }
}

#[test]
fn stored_fault_is_judged_by_current_checks() {
    let table = Table::built_in();
    // Xid 31, an application Xid, is enabled: stored with the class of that setting. 4711 is in no table.
    let mut before = HealthTracker::default();
    for (name, xid, class) in
        [("a", 31, Class::Resettable), ("b", 79, Class::Application), ("c", 4711, Class::Fatal)]
    {
        before.record_fault(&gpu(name), Fault { xid, ..fault(class, name) });
    }
    let stored = before.faults("boot");
    let unhealthy = |enabled: &str| {
        let checks = HealthChecks { enabled: enabled.parse().unwrap(), ..HealthChecks::default() };
        let mut after = HealthTracker::default();
        after.adopt(stored.clone(), "boot", &table, &checks);
        let unhealthy: Vec<&str> =
            ["a", "b", "c"].into_iter().filter(|name| reason(&after, name).is_some()).collect();
        (unhealthy, proofs(&mut after))
    };
    assert_eq!(unhealthy("31"), (vec!["a", "b", "c"], vec![]));
    assert_eq!(unhealthy(""), (vec!["b", "c"], vec![Proof::Lifted]));
}

#[test]
fn problem_lasts_while_gpu_reports_it() {
    let mut tracker = HealthTracker::default();
    let checks = HealthChecks::default();
    let failed = Vitals { remaps_rows: true, repair_failed: Some(true), ..Vitals::default() };
    tracker.record_vitals(&gpu("a"), failed, &checks);
    let troubles = tracker.troubles([gpu("a"), gpu("b")].iter());
    assert_eq!(troubles.len(), 1);
    assert_eq!(troubles[0].cause.to_string(), "memory-repair-failed");
    insta::assert_snapshot!(reason(&tracker, "a").unwrap(), @"memory: remapping a row failed; run NVIDIA's field diagnostics and replace the board");
    // No quarantine: nothing to store, nothing to lift.
    assert_eq!(tracker.faults("boot"), []);
    tracker.lift(|_| true);
    assert!(reason(&tracker, "a").is_some());
    tracker.record_vitals(&gpu("a"), Vitals::default(), &checks);
    assert_eq!(reason(&tracker, "a"), None);
}

/// A cordon is no fault: it withholds the GPU, and what is wrong with the GPU is reported in its place.
#[test]
fn cordoned_gpu_is_withheld_until_uncordoned() {
    let cordons = |names: &[&str]| {
        let annotations =
            names.iter().map(|name| (Cordon::annotation(&gpu(name)), "the fan fails".to_owned()));
        Cordons::of(Some(&annotations.collect()))
    };
    let mut tracker = HealthTracker::default();
    tracker.set_cordons(cordons(&["a"]));
    assert_eq!(reason(&tracker, "a").as_deref(), Some("cordoned: the fan fails"));
    assert!(!tracker.health(&gpu("a"), Some((1, 0))).healthy, "its MIG devices too");
    assert_eq!(reason(&tracker, "b"), None);
    assert_eq!(tracker.troubles([gpu("a")].iter()), []);
    assert_eq!(tracker.cordoned([gpu("a"), gpu("b")].iter()).into_keys().collect::<Vec<_>>(), [gpu("a")]);
    tracker.record_fault(&gpu("a"), fault(Class::Fatal, "Xid 79"));
    assert_eq!(reason(&tracker, "a").as_deref(), Some("Xid 79"));
    // The end of a quarantine does not uncordon.
    tracker.lift(|_| true);
    assert_eq!(reason(&tracker, "a").as_deref(), Some("cordoned: the fan fails"));
    tracker.set_cordons(cordons(&[]));
    assert_eq!(reason(&tracker, "a"), None);
}
