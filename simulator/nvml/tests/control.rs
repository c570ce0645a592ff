//! A machine changed while clients run on it: events, lost GPUs, a driver that is unloaded and loaded, calls that fail
//! or are slow, and the counters of calls.
#![allow(
    unsafe_code,
    clippy::macro_metavars_in_unsafe,
    clippy::unwrap_used,
    clippy::panic,
    reason = "the C functions are called as C calls them, each block says why it is sound; a test stops at what is wrong"
)]

use std::time::{Duration, Instant};

use gantry_nvml_sim::control::{Controller, Ecc, EventKind, Recovery, RowRemapping, Rule};
use nvml_wrapper_sys::bindings as sys;

mod common;
use common::*;

/// Longer than any test takes: a wait that ends earlier was ended by what the test did.
const LONG_MS: u32 = 120_000;

#[test]
fn an_xid_reaches_a_wait_that_is_already_blocked() {
    let simulated = Simulated::new("hgx-h100");
    let raw = simulated.start();
    let set = raw.listening();
    let controller = &simulated.installed.controller;
    let before = controller.calls();
    let set_address = set.addr();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let set = std::ptr::without_provenance_mut(set_address);
            let heard = raw.wait(set, LONG_MS).unwrap();
            (
                heard.device.addr(),
                heard.eventType,
                heard.eventData,
                heard.gpuInstanceId,
                heard.computeInstanceId,
            )
        });
        while controller.calls().since(&before).of("nvmlEventSetWait_v2") == 0 {
            std::thread::yield_now();
        }
        controller.raise_xid_in(3, 94, 2, 5).unwrap();
        let device = raw.device(3).unwrap().addr();
        let expected = (device, u64::from(sys::nvmlEventTypeXidCriticalError), 94, 2, 5);
        assert_eq!(waiting.join().unwrap(), expected);
    });
}

#[test]
fn an_xid_of_a_whole_gpu_names_no_instance() {
    let simulated = Simulated::new("workstation-2x");
    let raw = simulated.start();
    let set = raw.listening();
    simulated.installed.controller.raise_xid(1, 31).unwrap();
    let heard = raw.wait(set, LONG_MS).unwrap();
    assert_eq!((heard.gpuInstanceId, heard.computeInstanceId), (u32::MAX, u32::MAX));
}

#[test]
fn event_set_receives_registered_events_once_in_order() {
    let simulated = Simulated::new("hgx-h100");
    let raw = simulated.start();
    let controller = &simulated.installed.controller;
    let early = raw.event_set();
    controller.raise_xid(0, 1).unwrap();
    let set = raw.listening();
    for (gpu, xid) in [(4, 13), (0, 31), (4, 43)] {
        controller.raise_xid(gpu, xid).unwrap();
        controller.raise(gpu, EventKind::DoubleBitEcc, 0, None).unwrap();
    }
    let heard: Vec<u64> = (0..3).map(|_| raw.wait(set, LONG_MS).unwrap().eventData).collect();
    assert_eq!(heard, [13, 31, 43], "nothing from before it listened, no other kinds");
    assert_eq!(raw.wait(set, 0).map(|_| ()), Err(TIMEOUT));
    assert_eq!(raw.wait(early, 0).map(|_| ()), Err(TIMEOUT), "a set without devices hears nothing");
}

#[test]
fn every_set_receives_an_event() {
    let simulated = Simulated::new("workstation-2x");
    let raw = simulated.start();
    let sets = [raw.listening(), raw.listening()];
    simulated.installed.controller.raise_xid(0, 79).unwrap();
    for set in sets {
        assert_eq!(raw.wait(set, LONG_MS).unwrap().eventData, 79);
    }
}

#[test]
fn a_wait_takes_its_time_and_then_says_so() {
    let raw = Simulated::new("workstation-2x").start();
    let set = raw.listening();
    let began = Instant::now();
    assert_eq!(raw.wait(set, 60).map(|_| ()), Err(TIMEOUT));
    assert!(began.elapsed() >= Duration::from_millis(60));
}

#[test]
fn other_changes_do_not_end_a_wait() {
    let simulated = Simulated::new("workstation-2x");
    let raw = simulated.start();
    let controller = &simulated.installed.controller;
    let set = raw.listening().addr();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let set = std::ptr::without_provenance_mut(set);
            raw.wait(set, LONG_MS).map(|heard| heard.eventData)
        });
        for celsius in 40..60 {
            controller.set_temperature(0, celsius).unwrap();
        }
        controller.raise(0, EventKind::Clock, 0, None).unwrap();
        controller.raise_xid(0, 48).unwrap();
        assert_eq!(waiting.join().unwrap(), Ok(48));
    });
}

#[test]
fn freeing_a_set_or_shutting_down_ends_its_waits() {
    let simulated = Simulated::new("workstation-2x");
    let raw = simulated.start();
    let controller = &simulated.installed.controller;
    let waits = |set: usize, end: &dyn Fn()| {
        std::thread::scope(|scope| {
            let before = controller.calls();
            let waiting =
                scope.spawn(|| raw.wait(std::ptr::without_provenance_mut(set), LONG_MS).map(|_| ()));
            while controller.calls().since(&before).of("nvmlEventSetWait_v2") == 0 {
                std::thread::yield_now();
            }
            end();
            waiting.join().unwrap()
        })
    };
    let set = raw.listening().addr();
    let free = || {
        assert_eq!(call!(raw, nvmlEventSetFree(std::ptr::without_provenance_mut(set))), OK);
    };
    assert_eq!(waits(set, &free), Err(INVALID_ARGUMENT));
    let set = raw.listening().addr();
    let outcome = waits(set, &|| assert_eq!(raw.shutdown(), OK));
    assert_eq!(outcome, Err(UNINITIALIZED));
}

#[test]
fn a_lost_gpu_fails_every_call_on_it_and_no_other() {
    let simulated = Simulated::new("dgx-a100");
    let raw = simulated.start();
    let set = raw.listening();
    let (lost, well) = (raw.device(2).unwrap(), raw.device(3).unwrap());
    let controller = &simulated.installed.controller;
    controller.raise_xid(2, 79).unwrap();
    controller.lose_gpu(2).unwrap();
    assert_eq!(raw.uuid(lost), Err(GPU_IS_LOST));
    assert_eq!(raw.device(2), Err(GPU_IS_LOST));
    assert!(raw.uuid(well).is_ok());
    assert_eq!(raw.count(), Ok(8), "it is still counted");
    assert_eq!(raw.wait(set, LONG_MS).unwrap().eventData, 79, "what happened before is still told");
    assert_eq!(raw.wait(set, LONG_MS).map(|_| ()), Err(GPU_IS_LOST));
    controller.restore_gpu(2).unwrap();
    assert!(raw.uuid(lost).is_ok());
}

#[test]
fn driver_unload_ends_old_sessions_and_serves_new_ones() {
    let simulated = Simulated::new("workstation-2x");
    let raw = simulated.start();
    let set = raw.listening();
    let controller = &simulated.installed.controller;
    controller.unload_driver().unwrap();
    assert_eq!(raw.count(), Err(DRIVER_NOT_LOADED));
    assert_eq!(raw.wait(set, LONG_MS).map(|_| ()), Err(DRIVER_NOT_LOADED));
    assert_eq!(raw.init(), DRIVER_NOT_LOADED);
    controller.load_driver().unwrap();
    assert_eq!(raw.count(), Err(DRIVER_NOT_LOADED), "the old session does not come back to life");
    assert_eq!(raw.shutdown(), OK);
    assert_eq!(raw.init(), OK);
    assert_eq!(raw.count(), Ok(2));
}

#[test]
fn a_call_fails_as_often_as_told() {
    let simulated = Simulated::new("workstation-2x");
    let raw = simulated.start();
    let device = raw.device(0).unwrap();
    let controller = &simulated.installed.controller;
    assert!(raw.uuid(device).is_ok());
    controller.fail_call("nvmlDeviceGetUUID", UNKNOWN, Some(2)).unwrap();
    assert_eq!(raw.uuid(device), Err(UNKNOWN));
    assert_eq!(raw.uuid(device), Err(UNKNOWN));
    assert!(raw.uuid(device).is_ok());
    controller.fail_call("nvmlInit_v2", DRIVER_NOT_LOADED, None).unwrap();
    assert_eq!((raw.init(), raw.init()), (DRIVER_NOT_LOADED, DRIVER_NOT_LOADED));
    controller.clear_rule("nvmlInit_v2").unwrap();
    assert_eq!(raw.init(), OK);
}

#[test]
fn a_call_can_fail_later_and_without_support() {
    let simulated = Simulated::new("workstation-2x");
    let raw = simulated.start();
    let controller = &simulated.installed.controller;
    let rule = Rule {
        fail: Some(NOT_SUPPORTED),
        from_call: controller.calls().of("nvmlDeviceGetCount_v2") + 1,
        ..Rule::default()
    };
    controller
        .update(|state| {
            state.calls.insert("nvmlDeviceGetCount_v2".to_owned(), rule);
        })
        .unwrap();
    assert_eq!(raw.count(), Ok(2));
    assert_eq!(raw.count(), Err(NOT_SUPPORTED));
}

#[test]
fn a_slow_call_takes_its_time_and_holds_up_no_other() {
    let simulated = Simulated::new("workstation-2x");
    let raw = &simulated.start();
    let controller = &simulated.installed.controller;
    controller.slow_call("nvmlDeviceGetCount_v2", Duration::from_millis(150)).unwrap();
    let before = controller.calls();
    std::thread::scope(|scope| {
        let began = Instant::now();
        let slow = scope.spawn(move || (raw.count(), began.elapsed()));
        while controller.calls().since(&before).of("nvmlDeviceGetCount_v2") == 0 {
            std::thread::yield_now();
        }
        assert!(raw.device(0).is_ok());
        let (count, took) = slow.join().unwrap();
        assert_eq!(count, Ok(2));
        assert!(took >= Duration::from_millis(150));
    });
}

#[test]
fn a_link_that_goes_down_is_down_at_both_ends() {
    let simulated = Simulated::new("workstation-2x");
    let raw = simulated.start();
    let state = |gpu: u32, link: u32| {
        let mut active = 9;
        assert_eq!(call!(raw, nvmlDeviceGetNvLinkState(raw.device(gpu).unwrap(), link, &raw mut active)), OK);
        active == 1
    };
    let controller = &simulated.installed.controller;
    controller.set_nvlink(0, 2, false).unwrap();
    assert_eq!([state(0, 2), state(1, 2), state(0, 1), state(1, 1)], [false, false, true, true]);
    controller.set_nvlink(0, 2, true).unwrap();
    assert_eq!([state(0, 2), state(1, 2)], [true, true]);
    controller.lose_gpu(1).unwrap();
    assert!(!state(0, 0), "a lost GPU's links are down for its peers");
}

#[test]
fn health_counters_show_what_was_set() {
    let simulated = Simulated::new("hgx-h100");
    let raw = simulated.start();
    let device = raw.device(1).unwrap();
    simulated
        .installed
        .controller
        .update_gpu(1, |gpu| {
            gpu.ecc = Ecc { volatile_uncorrected: 3, aggregate_corrected: 9, ..Ecc::default() };
            gpu.remapped = RowRemapping { uncorrected: 1, pending: true, ..RowRemapping::default() };
            gpu.temperature = Some(88);
        })
        .unwrap();
    let ecc = |error, counter| {
        let mut count = 99;
        let code = call!(raw, nvmlDeviceGetTotalEccErrors(device, error, counter, &raw mut count));
        (code, count)
    };
    assert_eq!([ecc(0, 0), ecc(1, 0), ecc(0, 1), ecc(1, 1)], [(OK, 0), (OK, 3), (OK, 9), (OK, 0)]);
    let (mut corrected, mut uncorrected, mut pending, mut failed) = (9, 9, 9, 9);
    let code = call!(
        raw,
        nvmlDeviceGetRemappedRows(
            device,
            &raw mut corrected,
            &raw mut uncorrected,
            &raw mut pending,
            &raw mut failed
        )
    );
    assert_eq!((code, corrected, uncorrected, pending, failed), (OK, 0, 1, 1, 0));
    let mut celsius = 0;
    assert_eq!(call!(raw, nvmlDeviceGetTemperature(device, 0, &raw mut celsius)), OK);
    assert_eq!(celsius, 88);
}

#[test]
fn calls_are_counted_for_every_process() {
    let simulated = Simulated::new("workstation-2x");
    let raw = simulated.start();
    let elsewhere = Controller::attach(simulated.folder()).unwrap();
    let before = elsewhere.calls();
    let device = raw.device(0).unwrap();
    let _ = (raw.uuid(device), raw.uuid(device));
    let made = elsewhere.calls().since(&before);
    assert_eq!(made.total(), 3);
    assert_eq!(
        made.by_name().into_iter().collect::<Vec<_>>(),
        [("nvmlDeviceGetHandleByIndex_v2", 1), ("nvmlDeviceGetUUID", 2)]
    );
}

#[test]
fn broken_state_file_changes_nothing() {
    let simulated = Simulated::new("workstation-2x");
    let raw = simulated.start();
    let controller = &simulated.installed.controller;
    controller.lose_gpu(0).unwrap();
    assert_eq!(raw.device(0), Err(GPU_IS_LOST));
    std::fs::write(simulated.folder().join("control.yaml"), "gpus: {0: {lost: maybe}}\n").unwrap();
    controller.announce();
    assert_eq!(raw.device(0), Err(GPU_IS_LOST));
    std::fs::write(simulated.folder().join("control.yaml"), "gpus: {1: {lost: true}}\n").unwrap();
    controller.announce();
    assert_eq!(raw.device(0).map(|_| ()), Ok(()));
    assert_eq!(raw.device(1), Err(GPU_IS_LOST));
}

#[test]
fn removed_gpu_is_lost_to_old_and_absent_in_new_sessions() {
    let simulated = Simulated::new("l4-4x-pcie");
    let raw = simulated.start();
    let controller = &simulated.installed.controller;
    let (removed, last) = (raw.device(1).unwrap(), raw.uuid(raw.device(3).unwrap()).unwrap());
    controller.remove_gpu(1).unwrap();
    assert_eq!((raw.count(), raw.uuid(removed)), (Ok(4), Err(GPU_IS_LOST)));
    assert_eq!(raw.device(1), Err(GPU_IS_LOST));
    assert_eq!((raw.shutdown(), raw.init()), (OK, OK));
    assert_eq!(raw.count(), Ok(3));
    assert_eq!(raw.uuid(removed), Err(INVALID_ARGUMENT));
    let third = raw.device(2).unwrap();
    assert_eq!(raw.uuid(third), Ok(last));
    let mut index = 9;
    assert_eq!(call!(raw, nvmlDeviceGetIndex(third, &raw mut index)), OK);
    assert_eq!((index, raw.device(3)), (2, Err(INVALID_ARGUMENT)));
    controller.add_gpu(1).unwrap();
    assert_eq!(raw.count(), Ok(3), "NVML looks for GPUs when it is initialised");
    assert_eq!((raw.shutdown(), raw.init()), (OK, OK));
    assert_eq!(raw.count(), Ok(4));
    assert!(raw.uuid(removed).is_ok());
}

#[test]
fn what_to_do_about_a_gpu_is_told_as_a_field() {
    let simulated = Simulated::new("hgx-h100");
    let raw = simulated.start();
    let device = raw.device(4).unwrap();
    let action = || {
        // SAFETY: plain numbers, for which zero is valid.
        let mut field: sys::nvmlFieldValue_t = unsafe { std::mem::zeroed() };
        field.fieldId = sys::field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION;
        assert_eq!(call!(raw, nvmlDeviceGetFieldValues(device, 1, &raw mut field)), OK);
        assert_eq!(field.nvmlReturn, OK);
        // SAFETY: the simulator fills the widest member.
        unsafe { field.value.ullVal }
    };
    assert_eq!(action(), 0);
    let controller = &simulated.installed.controller;
    controller.update_gpu(4, |gpu| gpu.recovery = Recovery::DrainAndReset).unwrap();
    assert_eq!(action(), 4);
}

#[test]
fn an_xid_can_name_a_gpu_instance_alone() {
    let simulated = Simulated::new("hgx-h100-mig");
    let raw = simulated.start();
    let set = raw.listening();
    simulated.installed.controller.raise_xid_in(3, 94, 9, u32::MAX).unwrap();
    let heard = raw.wait(set, LONG_MS).unwrap();
    assert_eq!(heard.device, raw.device(3).unwrap());
    assert_eq!((heard.gpuInstanceId, heard.computeInstanceId), (9, u32::MAX));
}

/// One GPU that fails, hangs or lies, as the real driver does for one of eight.
#[test]
fn single_gpu_fails_hangs_and_lies() {
    let simulated = Simulated::new("l4-4x-pcie");
    let controller = &simulated.installed.controller;
    let raw = simulated.start();
    let codes = || (0..4).map(|gpu| raw.device(gpu).err()).collect::<Vec<_>>();
    controller.fail_call_on(2, "nvmlDeviceGetHandleByIndex_v2", 999).unwrap();
    assert_eq!(codes(), [None, None, Some(999), None]);
    controller.clear_rule("nvmlDeviceGetHandleByIndex_v2").unwrap();
    assert_eq!(codes(), [None; 4]);
    assert!(controller.fail_call_on(2, "nvmlDeviceGetHandelByIndex_v2", 999).is_err());

    controller.hang_call_on(1, "nvmlDeviceGetHandleByIndex_v2").unwrap();
    std::thread::scope(|scope| {
        let hanging = scope.spawn(|| raw.device(1).err());
        assert_eq!(raw.device(0).err(), None);
        std::thread::sleep(Duration::from_millis(50));
        assert!(!hanging.is_finished());
        controller.clear_rule("nvmlDeviceGetHandleByIndex_v2").unwrap();
        assert_eq!(hanging.join().unwrap(), None);
    });

    let minors = || {
        let minor = |gpu| {
            let mut minor = 99;
            let device = raw.device(gpu).unwrap();
            assert_eq!(call!(raw, nvmlDeviceGetMinorNumber(device, &raw mut minor)), OK);
            minor
        };
        [minor(0), minor(3)]
    };
    assert_eq!(minors(), [0, 3]);
    controller.update_gpu(3, |gpu| gpu.reported.minor = Some(0)).unwrap();
    assert_eq!(minors(), [0, 0]);
    controller.reset().unwrap();
    assert_eq!(minors(), [0, 3]);
}
