use super::*;

fn controller() -> (tempfile::TempDir, Controller) {
    let folder = tempfile::tempdir().unwrap();
    let controller = Controller::attach(folder.path()).unwrap();
    (folder, controller)
}

#[test]
fn what_one_controller_writes_another_reads() {
    let (folder, first) = controller();
    let second = Controller::attach(folder.path()).unwrap();
    first.lose_gpu(3).unwrap();
    second.set_temperature(3, 91).unwrap();
    first.raise_xid_in(3, 94, 2, 0).unwrap();
    let state = second.state().unwrap();
    assert!(state.gpus[&3].lost);
    assert_eq!(state.gpus[&3].temperature, Some(91));
    assert_eq!(state.events.len(), 1);
    assert_eq!(state.events[0].gpu_instance, Some(2));
    assert_eq!(state.next_event, 1);
}

#[test]
fn concurrent_changes_are_all_kept() {
    let (folder, controller) = controller();
    std::thread::scope(|scope| {
        for gpu in 0..8 {
            let folder = folder.path();
            scope.spawn(move || {
                let controller = Controller::attach(folder).unwrap();
                for _ in 0..10 {
                    controller.raise_xid(gpu, 31).unwrap();
                }
            });
        }
    });
    let state = controller.state().unwrap();
    assert_eq!(state.next_event, 80);
    for gpu in 0..8 {
        assert_eq!(state.events.iter().filter(|event| event.gpu == gpu).count(), 10);
    }
}

#[test]
fn events_are_bounded_and_their_numbers_go_on() {
    let (_folder, controller) = controller();
    controller
        .update(|state| {
            state.next_event = 10_000;
            state.events = vec![
                Event {
                    number: 1,
                    gpu: 0,
                    kind: EventKind::Clock,
                    data: 0,
                    gpu_instance: None,
                    compute_instance: None
                };
                MAX_EVENTS
            ];
        })
        .unwrap();
    controller.raise_xid(0, 79).unwrap();
    let state = controller.state().unwrap();
    assert_eq!(state.events.len(), MAX_EVENTS);
    assert_eq!(state.events.last().unwrap().number, 10_000);
}

#[test]
fn a_rule_counts_from_the_calls_made_so_far() {
    let (_folder, controller) = controller();
    let uuid = crate::names::slot("nvmlDeviceGetUUID").unwrap();
    for _ in 0..5 {
        controller.block.count_call(uuid);
    }
    controller.fail_call("nvmlDeviceGetUUID", 999, Some(2)).unwrap();
    let rule = controller.state().unwrap().calls["nvmlDeviceGetUUID"].clone();
    assert_eq!([4, 5, 6, 7].map(|call| rule.holds_for(call)), [false, true, true, false]);
    assert_eq!(controller.calls().of("nvmlDeviceGetUUID"), 5);
    assert_eq!(controller.calls().by_name().len(), 1);
}

#[test]
fn a_mistyped_function_is_refused_with_what_is_near() {
    let (_folder, controller) = controller();
    let error = controller.fail_call("nvmldevicegetuuid", 999, None).unwrap_err();
    assert_eq!(
        error.to_string(),
        "NVML has no function \"nvmldevicegetuuid\"; near it are nvmlDeviceGetUUID"
    );
    assert_eq!(controller.state().unwrap(), State::default());
}

#[test]
fn an_edited_state_file_that_is_wrong_says_where() {
    let (folder, controller) = controller();
    std::fs::write(folder.path().join(STATE_FILE), "driver: {gone: true}\nengine: off\n").unwrap();
    let error = controller.state().unwrap_err().to_string();
    assert!(error.contains("control.yaml") && error.contains("engine"), "{error}");
}

#[test]
fn counters_left_by_another_build_are_made_anew() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(BLOCK_FILE), [7; 64]).unwrap();
    let controller = Controller::attach(folder.path()).unwrap();
    assert_eq!(controller.calls().total(), 0);
    controller.lose_gpu(0).unwrap();
}
