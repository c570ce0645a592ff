use gantry_api::FaultEvidence;
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
    Loss {
        reason: "lost".to_owned(),
        off_bus,
    }
}

fn outage(reason: &str, kind: OutageKind) -> Outage {
    Outage {
        reason: reason.to_owned(),
        kind,
    }
}

fn reason(book: &Book, name: &str) -> Option<String> {
    reason_in(book, name, None)
}

fn reason_in(book: &Book, name: &str, part: Part) -> Option<String> {
    let health = book.health(&gpu(name), part);
    assert_eq!(health.healthy, health.reason.is_none());
    health.reason
}

fn proofs(book: &mut Book) -> Vec<Proof> {
    book.ended().into_iter().map(|ended| ended.proof).collect()
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
fn a_fault_is_its_own_gpus_alone() {
    let mut book = Book::default();
    book.fault(&gpu("a"), fault(Class::Fatal, "Xid 79"));
    assert_eq!(reason(&book, "a").as_deref(), Some("Xid 79"));
    assert_eq!(reason(&book, "b"), None);
}

#[test]
fn the_worst_fault_gives_the_reason_and_of_equals_the_first() {
    let mut book = Book::default();
    book.fault(&gpu("a"), fault(Class::Resettable, "first"));
    book.fault(&gpu("a"), fault(Class::Resettable, "second"));
    assert_eq!(reason(&book, "a").as_deref(), Some("first"));
    book.fault(&gpu("a"), fault(Class::Fatal, "worse"));
    book.lost(&gpu("a"), lost(true));
    assert_eq!(reason(&book, "a").as_deref(), Some("worse"));
}

#[test]
fn a_fault_of_an_instance_leaves_the_others_alone_and_one_of_the_gpu_none() {
    let mut book = Book::default();
    book.fault(
        &gpu("a"),
        fault_in(Extent::GpuInstance(1), Class::MigInstance, "one"),
    );
    assert_eq!(reason_in(&book, "a", Some((1, 0))).as_deref(), Some("one"));
    assert_eq!(reason_in(&book, "a", Some((2, 0))), None);
    book.fault(&gpu("a"), fault(Class::Fatal, "all"));
    for part in [None, Some((1, 0)), Some((2, 0))] {
        assert_eq!(reason_in(&book, "a", part).as_deref(), Some("all"));
    }
}

#[test]
fn a_fault_survives_a_gpu_that_only_goes_on_answering() {
    let mut book = Book::default();
    let vitals = Vitals {
        binding: Some(1),
        uncorrected: Some(0),
        ..Vitals::default()
    };
    book.vitals(&gpu("a"), vitals, &HealthChecks::default());
    book.fault(&gpu("a"), fault(Class::Resettable, "Xid 46"));
    book.answers(&gpu("a"));
    book.vitals(&gpu("a"), vitals, &HealthChecks::default());
    assert_eq!(reason(&book, "a").as_deref(), Some("Xid 46"));
    assert_eq!(proofs(&mut book), []);
}

#[test]
fn a_gpu_that_was_off_the_bus_and_answers_again_has_been_reset() {
    let mut book = Book::default();
    book.fault(&gpu("a"), fault(Class::Fatal, "Xid 79"));
    book.lost(&gpu("a"), lost(true));
    book.answers(&gpu("a"));
    assert_eq!(reason(&book, "a"), None);
    assert_eq!(proofs(&mut book), [Proof::Answers]);
}

#[test]
fn a_gpu_that_failed_a_question_and_answers_again_has_not() {
    let mut book = Book::default();
    book.fault(&gpu("a"), fault(Class::Fatal, "Xid 79"));
    book.lost(&gpu("a"), lost(false));
    book.answers(&gpu("a"));
    assert_eq!(reason(&book, "a").as_deref(), Some("Xid 79"));
}

#[test]
fn a_reloaded_driver_ends_faults_and_an_nvml_that_fails_or_is_missing_does_not() {
    let mut book = Book::default();
    book.fault(&gpu("a"), fault(Class::Resettable, "Xid 46"));
    book.outage(outage("NVML fails", OutageKind::Failing));
    assert_eq!(reason(&book, "b").as_deref(), Some("NVML fails"));
    assert!(!book.works(false));
    assert_eq!(
        reason(&book, "b").as_deref(),
        Some("NVML fails"),
        "it answers and cannot be waited for"
    );
    assert!(!book.works(true));
    assert_eq!(reason(&book, "a").as_deref(), Some("Xid 46"));
    assert_eq!(reason(&book, "b"), None);

    book.outage(outage("no library", OutageKind::LibraryMissing));
    assert_eq!(reason(&book, "b").as_deref(), Some("no library"));
    assert!(!book.works(true));
    assert_eq!(reason(&book, "a").as_deref(), Some("Xid 46"));

    book.outage(outage("NVML fails", OutageKind::Failing));
    book.outage(outage("driver gone", OutageKind::DriverGone));
    book.outage(outage("NVML fails", OutageKind::Failing));
    book.outage(outage("no library", OutageKind::LibraryMissing));
    assert_eq!(reason(&book, "b").as_deref(), Some("no library"));
    assert!(book.works(false));
    assert_eq!(reason(&book, "a"), None);
    assert_eq!(proofs(&mut book), [Proof::DriverReloaded]);
}

#[test]
fn a_mig_instance_that_is_made_anew_is_healthy_and_the_gpus_own_fault_is_not() {
    let mut book = Book::default();
    let before = cut(&[(1, "MIG-a"), (2, "MIG-b")]);
    for (gi, uuid) in [(1, "MIG-a"), (2, "MIG-b")] {
        let mut one = fault_in(Extent::GpuInstance(gi), Class::MigInstance, "Xid 48");
        one.mig_device = Some(uuid.to_owned());
        book.fault(&gpu("a"), one);
    }
    book.fault(&gpu("a"), fault(Class::Resettable, "Xid 46"));
    book.cut(&gpu("a"), Some(&before));
    assert_eq!(proofs(&mut book), []);
    book.cut(&gpu("a"), Some(&cut(&[(1, "MIG-c"), (2, "MIG-b")])));
    assert_eq!(proofs(&mut book), [Proof::InstanceGone]);
    book.cut(&gpu("a"), Some(&Mig::default()));
    assert_eq!(proofs(&mut book), [Proof::InstanceGone]);
    assert_eq!(reason(&book, "a").as_deref(), Some("Xid 46"));
}

#[test]
fn a_links_fault_ends_when_as_many_links_are_up_as_before() {
    let mut book = Book::default();
    book.links(&gpu("a"), 6);
    book.fault(&gpu("a"), fault(Class::Link { reset: true }, "Xid 155"));
    book.links(&gpu("a"), 6);
    assert_eq!(
        reason(&book, "a").as_deref(),
        Some("Xid 155"),
        "the links never went down"
    );
    book.links(&gpu("a"), 4);
    book.links(&gpu("a"), 5);
    assert_eq!(
        reason(&book, "a").as_deref(),
        Some("Xid 155; 1 of 6 NVLinks down")
    );
    book.links(&gpu("a"), 6);
    assert_eq!(reason(&book, "a"), None);
    assert_eq!(proofs(&mut book), [Proof::LinksUp]);
}

#[test]
fn a_links_xid_that_the_driver_asks_nothing_for_is_a_fault_if_links_went_down_with_it() {
    let suspicion = || fault(Class::Link { reset: true }, "Xid 149");
    let mut book = Book::default();
    book.links(&gpu("a"), 18);
    book.suspect(&gpu("a"), suspicion());
    book.links(&gpu("a"), 18);
    book.links(&gpu("a"), 18);
    book.links(&gpu("a"), 17);
    assert_eq!(
        reason(&book, "a"),
        None,
        "the link went down by itself, long after"
    );
    book.links(&gpu("a"), 18);

    book.suspect(&gpu("a"), suspicion());
    book.links(&gpu("a"), 18);
    assert_eq!(reason(&book, "a"), None);
    book.links(&gpu("a"), 16);
    let told = Some("Xid 149; 2 of 18 NVLinks down");
    assert_eq!(reason(&book, "a").as_deref(), told, "NVML was late to show it");
    assert_eq!(
        book.faults("boot")[0].reason,
        "Xid 149",
        "how many is not for storing"
    );
    book.links(&gpu("a"), 18);
    assert_eq!(
        (reason(&book, "a"), proofs(&mut book)),
        (None, vec![Proof::LinksUp])
    );

    book.suspect(&gpu("a"), suspicion());
    book.links(&gpu("a"), 17);
    book.lift(|_| true);
    book.suspect(&gpu("a"), suspicion());
    book.links(&gpu("a"), 17);
    assert_eq!(reason(&book, "a"), None, "it may go on with 17");
    book.suspect(&gpu("a"), suspicion());
    book.links(&gpu("a"), 16);
    assert_eq!(
        reason(&book, "a").as_deref(),
        Some("Xid 149; 1 of 17 NVLinks down")
    );
}

#[test]
fn a_links_fault_outlives_a_restart_though_its_xid_alone_is_none() {
    let mut before = Book::default();
    let fault = Fault {
        xid: 74,
        ..fault(Class::Link { reset: true }, "Xid 74")
    };
    before.links(&gpu("a"), 6);
    before.suspect(&gpu("a"), fault);
    before.links(&gpu("a"), 5);
    let stored = before.faults("boot");
    let adopted = |disabled: &str| {
        let checks = HealthChecks {
            disabled: disabled.parse().unwrap(),
            ..HealthChecks::default()
        };
        let mut after = Book::default();
        after.adopt(stored.clone(), "boot", &Table::built_in(), &checks);
        after.links(&gpu("a"), 5);
        after
    };
    let mut after = adopted("");
    assert_eq!(
        reason(&after, "a").as_deref(),
        Some("Xid 74; 1 of 6 NVLinks down")
    );
    after.links(&gpu("a"), 6);
    assert_eq!(reason(&after, "a"), None);
    assert_eq!(reason(&adopted("74"), "a"), None);
}

#[test]
fn a_person_lifts_the_quarantine_of_the_gpus_named() {
    let mut book = Book::default();
    for name in ["a", "b"] {
        book.fault(&gpu(name), fault(Class::Fatal, "Xid 79"));
    }
    book.lift(|uuid| *uuid == gpu("a"));
    assert_eq!(reason(&book, "a"), None);
    assert_eq!(reason(&book, "b").as_deref(), Some("Xid 79"));
    assert_eq!(book.faulty().collect::<Vec<_>>(), [&gpu("b")]);
}

#[test]
fn a_quarantine_survives_a_restart_and_ends_with_what_ended_meanwhile() {
    let seen = |binding, uncorrected| Vitals {
        binding: Some(binding),
        uncorrected: Some(uncorrected),
        ..Vitals::default()
    };
    let (table, checks) = (Table::built_in(), HealthChecks::default());
    let mut before = Book::default();
    for name in ["a", "b"] {
        before.vitals(&gpu(name), seen(1, 0), &checks);
        before.fault(&gpu(name), fault(Class::Resettable, "Xid 46"));
    }
    let stored = before.faults("boot-1");

    // The same boot: the fault stands where the GPU only went on, whichever of the two is known first.
    for adopt_first in [true, false] {
        let mut after = Book::default();
        if adopt_first {
            after.adopt(stored.clone(), "boot-1", &table, &checks);
        }
        after.vitals(&gpu("a"), seen(1, 0), &checks);
        after.vitals(&gpu("b"), seen(2, 0), &checks);
        if !adopt_first {
            after.adopt(stored.clone(), "boot-1", &table, &checks);
        }
        assert_eq!(reason(&after, "a").as_deref(), Some("Xid 46"));
        assert_eq!(reason(&after, "b"), None);
        assert_eq!(proofs(&mut after), [Proof::BoundAnew]);
        assert_eq!(after.faults("boot-1"), stored[..1]);
    }

    let mut rebooted = Book::default();
    rebooted.adopt(stored.clone(), "boot-2", &table, &checks);
    assert_eq!(reason(&rebooted, "a"), None);
    assert_eq!(proofs(&mut rebooted), [Proof::Rebooted; 2]);

    let mut disabled = Book::default();
    let checks = HealthChecks {
        disabled: "46".parse().unwrap(),
        ..HealthChecks::default()
    };
    disabled.adopt(stored, "boot-1", &table, &checks);
    assert_eq!(reason(&disabled, "a"), None);
}

#[test]
fn a_stored_fault_that_is_over_does_not_take_a_new_one_with_it() {
    let seen = |binding| Vitals {
        binding: Some(binding),
        ..Vitals::default()
    };
    let (table, checks) = (Table::built_in(), HealthChecks::default());
    for (stored_xid, stored_class) in [(46, Class::Resettable), (79, Class::Fatal)] {
        let mut before = Book::default();
        before.vitals(&gpu("a"), seen(1), &checks);
        let stored = Fault {
            xid: stored_xid,
            ..fault(stored_class, "before")
        };
        before.fault(&gpu("a"), stored);
        let stored = before.faults("boot");
        // Bound anew while nobody looked, and sick again before the API server answered; or lost since, so that it says nothing now.
        for answers in [true, false] {
            let mut after = Book::default();
            after.vitals(&gpu("a"), seen(2), &checks);
            after.fault(&gpu("a"), fault(Class::Resettable, "since"));
            if !answers {
                let loss = Loss {
                    reason: "lost".to_owned(),
                    off_bus: false,
                };
                after.lost(&gpu("a"), loss);
            }
            after.adopt(stored.clone(), "boot", &table, &checks);
            after.answers(&gpu("a"));
            after.vitals(&gpu("a"), seen(2), &checks);
            assert!(reason(&after, "a").is_some(), "{stored_xid}, answers: {answers}");
            let told = match answers {
                true => vec![Proof::BoundAnew],
                false => vec![],
            };
            assert_eq!(proofs(&mut after), told, "{stored_xid}");
            after.vitals(&gpu("a"), seen(3), &checks);
            assert_eq!(reason(&after, "a"), None);
        }
    }
}

#[test]
fn a_stored_fault_counts_as_its_xid_does_now() {
    let table = Table::built_in();
    // With 31, an application's, enabled: stored as what it was made to count as. 4711 is in no table.
    let mut before = Book::default();
    for (name, xid, class) in [
        ("a", 31, Class::Resettable),
        ("b", 79, Class::Application),
        ("c", 4711, Class::Fatal),
    ] {
        before.fault(
            &gpu(name),
            Fault {
                xid,
                ..fault(class, name)
            },
        );
    }
    let stored = before.faults("boot");
    let sick = |enabled: &str| {
        let checks = HealthChecks {
            enabled: enabled.parse().unwrap(),
            ..HealthChecks::default()
        };
        let mut after = Book::default();
        after.adopt(stored.clone(), "boot", &table, &checks);
        let sick: Vec<&str> = ["a", "b", "c"]
            .into_iter()
            .filter(|name| reason(&after, name).is_some())
            .collect();
        (sick, proofs(&mut after))
    };
    assert_eq!(sick("31"), (vec!["a", "b", "c"], vec![]));
    assert_eq!(sick(""), (vec!["b", "c"], vec![Proof::Lifted]));
}

#[test]
fn what_a_gpu_complains_of_lasts_as_long_as_it_does() {
    let mut book = Book::default();
    let checks = HealthChecks::default();
    let failed = Vitals {
        remaps_rows: true,
        repair_failed: Some(true),
        ..Vitals::default()
    };
    book.vitals(&gpu("a"), failed, &checks);
    let troubles = book.troubles([gpu("a"), gpu("b")].iter());
    assert_eq!(troubles.len(), 1);
    assert_eq!(troubles[0].cause.to_string(), "memory-repair-failed");
    assert!(reason(&book, "a").unwrap().contains("replace the board"));
    // No quarantine: nothing to store, nothing to lift.
    assert_eq!(book.faults("boot"), []);
    book.lift(|_| true);
    assert!(reason(&book, "a").is_some());
    book.vitals(&gpu("a"), Vitals::default(), &checks);
    assert_eq!(reason(&book, "a"), None);
}
