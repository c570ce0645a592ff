use std::time::Duration;

use gantry_config::{RemediationLimits, Share};
use proptest::prelude::*;

use super::*;

type Nodes = BTreeMap<NodeName, Arc<NodeHealth>>;

fn uuid(node: usize, gpu: usize) -> GpuUuid {
    format!("GPU-{node}-{gpu}").parse().unwrap()
}

fn cluster(nodes: usize, gpus: usize) -> Nodes {
    let gpu = |node, index: usize| GpuHealth {
        index: u8::try_from(index).unwrap(),
        uuid: uuid(node, index),
        cordoned: false,
        problems: Vec::new(),
    };
    let node = |node| NodeHealth {
        gpus: (0..gpus).map(|index| gpu(node, index)).collect(),
        record: Record::default(),
        mark: None,
    };
    (0..nodes).map(|at| (NodeName::from(format!("n{at}").as_str()), Arc::new(node(at)))).collect()
}

fn node_mut(nodes: &mut Nodes, node: usize) -> &mut NodeHealth {
    Arc::make_mut(nodes.get_mut(&NodeName::from(format!("n{node}").as_str())).unwrap())
}

fn fail(nodes: &mut Nodes, node: usize, gpu: usize, xid: u64, since: i64) {
    let problem = Problem { cause: "xid-fatal".to_owned(), xid: Some(xid), since, is_event: false };
    node_mut(nodes, node).gpus[gpu].problems.push(problem);
}

fn rule(action: RemediationAction) -> RemediationRule {
    RemediationRule {
        name: "r".to_owned(),
        xids: [79].into(),
        causes: BTreeSet::new(),
        count: 1,
        window: Duration::from_secs(1000),
        action,
        dry_run: false,
    }
}

fn rules(limits: RemediationLimits, rules: Vec<RemediationRule>) -> RemediationRules {
    RemediationRules { limits, rules }
}

fn limits(nodes: u32, gpus: u32, actions_per_hour: u32) -> RemediationLimits {
    RemediationLimits { nodes: Share::Count(nodes), gpus: Share::Count(gpus), actions_per_hour }
}

/// What the executor does with a step, as the watch shows it later.
fn apply(nodes: &mut Nodes, step: &Step) {
    let node = Arc::make_mut(nodes.get_mut(&step.node).unwrap());
    if let StepKind::Act(action) = step.what
        && (action == RemediationAction::Cordon || drains(action))
    {
        node.gpus.iter_mut().filter(|gpu| gpu.uuid == step.gpu).for_each(|gpu| gpu.cordoned = true);
    }
    node.record.set(step.entry.clone());
}

/// Decides and acts; what was done.
fn run(rules: &RemediationRules, nodes: &mut Nodes, now: i64) -> Vec<StepKind> {
    let steps = decide(rules, nodes, true, now);
    steps.iter().for_each(|step| apply(nodes, step));
    steps.into_iter().map(|step| step.what).collect()
}

#[test]
fn fault_is_acted_on_once() {
    use RemediationAction::Cordon;
    let mut nodes = cluster(2, 2);
    let rules = rules(limits(9, 9, 9), vec![rule(Cordon)]);
    fail(&mut nodes, 0, 1, 79, 50);
    fail(&mut nodes, 1, 0, 31, 50);
    let steps = decide(&rules, &nodes, true, 100);
    assert_eq!(steps.len(), 1);
    assert_eq!((steps[0].node.as_str(), steps[0].index, steps[0].fault.as_str()), ("n0", 1, "Xid 79"));
    assert_eq!(run(&rules, &mut nodes, 100), [StepKind::Act(Cordon)]);
    assert_eq!(run(&rules, &mut nodes, 101), []);
    // The operator returns the GPU with the same fault: that is a decision.
    node_mut(&mut nodes, 0).gpus[1].cordoned = false;
    assert_eq!(run(&rules, &mut nodes, 5000), []);
    fail(&mut nodes, 0, 1, 79, 4000);
    assert_eq!(run(&rules, &mut nodes, 5000), [StepKind::Act(Cordon)]);
}

#[test]
fn rate_counts_faults_within_the_window() {
    use RemediationAction::Drain;
    let mut nodes = cluster(1, 1);
    let rules = rules(limits(9, 9, 9), vec![RemediationRule { count: 2, ..rule(Drain) }]);
    fail(&mut nodes, 0, 0, 79, 50);
    assert_eq!(run(&rules, &mut nodes, 50), [StepKind::Count]);
    assert_eq!(run(&rules, &mut nodes, 51), []);
    // The first is over, and counts for as long as the window.
    node_mut(&mut nodes, 0).gpus[0].problems.clear();
    fail(&mut nodes, 0, 0, 79, 2000);
    assert_eq!(run(&rules, &mut nodes, 2000), [StepKind::Count]);
    node_mut(&mut nodes, 0).gpus[0].problems.clear();
    fail(&mut nodes, 0, 0, 79, 2500);
    assert_eq!(run(&rules, &mut nodes, 2500), [StepKind::Act(Drain)]);
}

#[test]
fn dry_run_reports_once_and_is_due_when_real() {
    use RemediationAction::Cordon;
    let mut nodes = cluster(1, 1);
    fail(&mut nodes, 0, 0, 79, 50);
    let dry = rules(limits(9, 9, 9), vec![RemediationRule { dry_run: true, ..rule(Cordon) }]);
    assert_eq!(run(&dry, &mut nodes, 60), [StepKind::DryRun(Cordon)]);
    assert_eq!(run(&dry, &mut nodes, 61), []);
    assert_eq!(nodes.values().next().unwrap().record.written(), None);
    assert_eq!(run(&rules(limits(9, 9, 9), vec![rule(Cordon)]), &mut nodes, 62), [StepKind::Act(Cordon)]);
}

#[test]
fn mark_of_node_is_withdrawn_with_the_last_fault() {
    use RemediationAction::Taint;
    let mut nodes = cluster(1, 2);
    let rules = rules(limits(9, 9, 9), vec![rule(Taint)]);
    fail(&mut nodes, 0, 0, 79, 50);
    assert_eq!(run(&rules, &mut nodes, 60), [StepKind::Act(Taint)]);
    assert_eq!(run(&rules, &mut nodes, 70), []);
    node_mut(&mut nodes, 0).gpus[0].problems.clear();
    assert_eq!(run(&rules, &mut nodes, 80), [StepKind::Withdraw(Taint)]);
    assert_eq!(run(&rules, &mut nodes, 90), []);
}

#[test]
fn limit_that_holds_back_is_named() {
    use RemediationAction::{Cordon, Reboot};
    let mut nodes = cluster(3, 4);
    (0..3).for_each(|node| fail(&mut nodes, node, 0, 79, 50));
    let held = |limits, action| {
        let steps = decide(&rules(limits, vec![rule(action)]), &nodes, true, 60);
        let held = steps.iter().filter_map(|step| match &step.what {
            StepKind::HoldBack(_, limit) => Some(limit.to_string()),
            _ => None,
        });
        held.collect::<Vec<_>>()
    };
    assert_eq!(held(limits(2, 9, 9), Cordon), ["limits.nodes: 2 of 2 nodes have withheld GPUs"]);
    assert_eq!(held(limits(9, 2, 9), Cordon), ["limits.gpus: 2 of 2 GPUs are withheld"]);
    assert_eq!(held(limits(9, 9, 2), Cordon), ["limits.actionsPerHour: 2 of 2 actions were taken"]);
    // A whole node at once.
    assert_eq!(held(limits(9, 5, 9), Reboot).len(), 2);
    assert_eq!(held(limits(9, 9, 9), Cordon), [""; 0]);
}

/// Begins a reset of a GPU that is being reset, as the executor does once the GPU is drained, or ends it.
fn reset(nodes: &mut Nodes, (node, gpu): (usize, usize), now: i64, end: Option<bool>) {
    let record = &mut node_mut(nodes, node).record;
    let entries: Vec<Entry> = record.iter().filter(|entry| entry.gpu == uuid(node, gpu)).cloned().collect();
    for mut entry in entries.into_iter().filter(Entry::is_resetting) {
        match end {
            None if record.resets(&entry.gpu, now) < MAX_RESETS
                && entry.acted.as_ref().is_some_and(|acted| acted.reset.is_none()) =>
            {
                entry.begin_reset(None, now);
            }
            Some(true) if entry.reset_in_flight().is_some() => entry.end(),
            Some(false) if entry.reset_in_flight().is_some() => {
                entry.change_reset(|reset| reset.failed = Some(now));
            }
            _ => {}
        }
        record.set(entry);
    }
}

/// A second fault does not begin a second reset, and a failed one is repeated after a pause, as another action.
#[test]
fn failed_reset_is_repeated_within_limits() {
    use RemediationAction::Reset;
    let mut nodes = cluster(1, 1);
    let all = rules(limits(9, 9, 2), vec![rule(Reset)]);
    fail(&mut nodes, 0, 0, 79, 50);
    assert_eq!(run(&all, &mut nodes, 60), [StepKind::Act(Reset)]);
    assert!(node_mut(&mut nodes, 0).gpus[0].cordoned);
    reset(&mut nodes, (0, 0), 70, None);
    fail(&mut nodes, 0, 0, 79, 75);
    assert_eq!(run(&all, &mut nodes, 80), [], "the reset is under way");
    reset(&mut nodes, (0, 0), 90, Some(false));
    assert_eq!(run(&all, &mut nodes, 90 + RESET_PAUSE - 1), []);
    assert_eq!(run(&all, &mut nodes, 90 + RESET_PAUSE), [StepKind::ResetAgain]);
    reset(&mut nodes, (0, 0), 400, None);
    reset(&mut nodes, (0, 0), 410, Some(false));
    let held = StepKind::HoldBack(Reset, Limit::Actions { used: 2, most: 2 });
    assert_eq!(run(&all, &mut nodes, 1000), [held]);
    assert_eq!(run(&all, &mut nodes, 60 + HOUR), [StepKind::ResetAgain]);
    reset(&mut nodes, (0, 0), 4000, None);
    reset(&mut nodes, (0, 0), 4010, Some(false));
    assert_eq!(run(&all, &mut nodes, 20_000), [], "three resets in a day");
}

/// A GPU that fails again after a reset that helped is drained again.
#[test]
fn fault_after_a_reset_is_acted_on() {
    use RemediationAction::Reset;
    let mut nodes = cluster(1, 1);
    let all = rules(limits(9, 9, 9), vec![rule(Reset)]);
    fail(&mut nodes, 0, 0, 79, 50);
    assert_eq!(run(&all, &mut nodes, 60), [StepKind::Act(Reset)]);
    reset(&mut nodes, (0, 0), 70, None);
    reset(&mut nodes, (0, 0), 90, Some(true));
    assert_eq!(run(&all, &mut nodes, 91), [], "the watch still shows the fault");
    node_mut(&mut nodes, 0).gpus[0].problems.clear();
    assert_eq!(run(&all, &mut nodes, 92), []);
    fail(&mut nodes, 0, 0, 79, 100);
    assert_eq!(run(&all, &mut nodes, 100), [StepKind::Act(Reset)]);
}

/// Without the manifest that permits resets nothing is done about the fault, and that is reported.
#[test]
fn reset_without_the_right_does_nothing() {
    use RemediationAction::Reset;
    let mut nodes = cluster(1, 1);
    let all = rules(limits(9, 9, 9), vec![rule(Reset)]);
    fail(&mut nodes, 0, 0, 79, 50);
    let steps = decide(&all, &nodes, false, 60);
    let [step] = &steps[..] else { panic!("{steps:?}") };
    assert_eq!(step.what, StepKind::HoldBack(Reset, Limit::ResetRight));
    assert!(step.entry.acted.is_none() && step.entry.actions.is_empty());
    let dry = rules(limits(9, 9, 9), vec![RemediationRule { dry_run: true, ..rule(Reset) }]);
    assert_eq!(decide(&dry, &nodes, false, 60)[0].what, StepKind::DryRun(Reset));
    assert_eq!(run(&all, &mut nodes, 60), [StepKind::Act(Reset)], "the manifest was applied");
}

/// An Xid of an application, as the plugin publishes the last of it.
fn raise(nodes: &mut Nodes, xid: u64, last: i64) {
    let event = Problem { cause: "xid-application".to_owned(), xid: Some(xid), since: last, is_event: true };
    node_mut(nodes, 0).gpus[0].problems = vec![event];
}

/// Contained memory errors end a process and leave the GPU healthy. Three of them within a quarter of an hour are no
/// coincidence.
#[test]
fn application_xids_are_counted_by_rate() {
    use RemediationAction::Cordon;
    let mut nodes = cluster(1, 1);
    let window = Duration::from_secs(900);
    let one = RemediationRule { xids: [94].into(), count: 3, window, ..rule(Cordon) };
    let all = rules(limits(9, 9, 9), vec![one]);
    for (at, expected) in [
        (1000, vec![StepKind::Count]),
        (1300, vec![StepKind::Count]),
        // The first is out of the window.
        (1950, vec![StepKind::Count]),
        (2100, vec![StepKind::Act(Cordon)]),
        // Once in an hour.
        (2200, vec![]),
        (2100 + HOUR - 1, vec![]),
    ] {
        raise(&mut nodes, 94, at);
        assert_eq!(run(&all, &mut nodes, at + 1), expected, "{at}");
        assert_eq!(run(&all, &mut nodes, at + 2), [], "{at}: counted once");
    }
    raise(&mut nodes, 43, 9000);
    assert_eq!(run(&all, &mut nodes, 9000), [], "another Xid");
}

/// A rule that is new does not act on what jobs did last week, and a mark of a node does not outlast the events.
#[test]
fn application_xid_is_present_for_an_hour() {
    use RemediationAction::{Event, Taint};
    let mut nodes = cluster(1, 1);
    let all = |action| {
        let one =
            RemediationRule { xids: BTreeSet::new(), window: Duration::from_secs(1_000_000), ..rule(action) };
        rules(limits(9, 9, 9), vec![RemediationRule { causes: ["xid-application".to_owned()].into(), ..one }])
    };
    raise(&mut nodes, 13, 50_000);
    assert_eq!(run(&all(Event), &mut nodes, 50_000 + HOUR), []);
    assert_eq!(run(&all(Taint), &mut nodes, 50_010), [StepKind::Act(Taint)]);
    assert_eq!(run(&all(Taint), &mut nodes, 49_999 + HOUR), []);
    assert_eq!(run(&all(Taint), &mut nodes, 50_000 + HOUR), [StepKind::Withdraw(Taint)]);
}

/// A driver upgrade by NVIDIA's operator takes NVML away: that is no fault to act on, and a reset would race the upgrade.
#[test]
fn action_waits_while_another_program_marks_node() {
    use RemediationAction::{Condition, Cordon, Drain, Event, Reboot, Reset, Taint};
    let mark: Arc<str> = "the driver is upgraded (label nvidia.com/gpu-driver-upgrade-state)".into();
    for action in [Cordon, Drain, Reset, Taint, Condition, Reboot] {
        for dry_run in [false, true] {
            let mut nodes = cluster(1, 1);
            let all = rules(limits(9, 9, 9), vec![RemediationRule { dry_run, ..rule(action) }]);
            fail(&mut nodes, 0, 0, 79, 50);
            node_mut(&mut nodes, 0).mark = Some(Arc::clone(&mark));
            let held = StepKind::HoldBack(action, Limit::Marked(Arc::clone(&mark)));
            assert_eq!(run(&all, &mut nodes, 60), [held]);
            node_mut(&mut nodes, 0).mark = None;
            let due = if dry_run { StepKind::DryRun(action) } else { StepKind::Act(action) };
            assert_eq!(run(&all, &mut nodes, 70), [due], "the fault outlasts the upgrade");
        }
    }
    let mut nodes = cluster(1, 1);
    fail(&mut nodes, 0, 0, 79, 50);
    node_mut(&mut nodes, 0).mark = Some(mark);
    let report = rules(limits(9, 9, 9), vec![rule(Event)]);
    assert_eq!(run(&report, &mut nodes, 60), [StepKind::Act(Event)], "a report changes nothing");
}

/// Each upgrade of a driver would otherwise bring its nodes closer to a drain.
#[test]
fn fault_on_a_marked_node_counts_for_no_rate() {
    use RemediationAction::Drain;
    let mut nodes = cluster(1, 1);
    let all = rules(limits(9, 9, 9), vec![RemediationRule { count: 2, ..rule(Drain) }]);
    node_mut(&mut nodes, 0).mark = Some("NVSentinel repairs the node".into());
    fail(&mut nodes, 0, 0, 79, 50);
    assert_eq!(run(&all, &mut nodes, 60), []);
    node_mut(&mut nodes, 0).gpus[0].problems.clear();
    node_mut(&mut nodes, 0).mark = None;
    fail(&mut nodes, 0, 0, 79, 70);
    assert_eq!(run(&all, &mut nodes, 80), [StepKind::Count]);
    fail(&mut nodes, 0, 0, 79, 90);
    assert_eq!(run(&all, &mut nodes, 90), [StepKind::Act(Drain)]);
}

/// Something that happens between two decisions.
#[derive(Debug, Clone)]
enum Change {
    Begin(usize, usize),
    End(usize, usize, bool),
    Fail(usize, usize, u64),
    Recover(usize, usize),
    Cordon(usize, usize),
    Uncordon(usize, usize),
    Mark(usize, bool),
    Raise(usize, usize, u64),
    Wait(i64),
}

fn change() -> impl Strategy<Value = Change> {
    let gpu = || (0..4usize, 0..3usize);
    prop_oneof![
        4 => (gpu(), 78..81u64).prop_map(|((node, gpu), xid)| Change::Fail(node, gpu, xid)),
        1 => gpu().prop_map(|(node, gpu)| Change::Recover(node, gpu)),
        1 => gpu().prop_map(|(node, gpu)| Change::Cordon(node, gpu)),
        1 => gpu().prop_map(|(node, gpu)| Change::Uncordon(node, gpu)),
        2 => gpu().prop_map(|(node, gpu)| Change::Begin(node, gpu)),
        2 => (gpu(), any::<bool>()).prop_map(|((node, gpu), helps)| Change::End(node, gpu, helps)),
        1 => (0..4usize, any::<bool>()).prop_map(|(node, is_marked)| Change::Mark(node, is_marked)),
        2 => (gpu(), 78..81u64).prop_map(|((node, gpu), xid)| Change::Raise(node, gpu, xid)),
        2 => (1..2000i64).prop_map(Change::Wait),
    ]
}

fn any_rule() -> impl Strategy<Value = RemediationRule> {
    use RemediationAction::{Condition, Cordon, Drain, Event, Reboot, Reset, Taint};
    let action = prop_oneof![
        1 => Just(Event),
        1 => Just(Cordon),
        1 => Just(Drain),
        2 => Just(Reset),
        1 => Just(Taint),
        1 => Just(Condition),
        1 => Just(Reboot)
    ];
    (action, proptest::collection::btree_set(78..81u64, 1..3), 1..3usize, any::<bool>())
        .prop_map(|(action, xids, count, dry_run)| RemediationRule { xids, count, dry_run, ..rule(action) })
}

/// The GPUs that new pods do not get: cordoned ones, and those of nodes that a real action has marked.
fn withheld_gpus(nodes: &Nodes) -> BTreeSet<(String, String)> {
    use RemediationAction::{Reboot, Taint};
    let mut all = BTreeSet::new();
    for (name, node) in nodes {
        let acted = node.record.iter().filter_map(|entry| entry.acted.as_ref());
        let whole = acted.into_iter().any(|one| one.active && matches!(one.action, Taint | Reboot));
        let gpus = node.gpus.iter().filter(|gpu| whole || gpu.cordoned);
        all.extend(gpus.map(|gpu| (name.to_string(), gpu.uuid.to_string())));
    }
    all
}

proptest! {
    /// Rules withhold no more than the limits allow beyond what others withhold, and take no more actions in an hour. A
    /// second decision at the same time does nothing. Dry runs change nothing that anyone but the extender sees.
    #[test]
    fn limits_hold_whatever_happens(
        of in (0..4u32, 0..8u32, 0..6u32),
        mut all in proptest::collection::vec(any_rule(), 1..4),
        may_reset in proptest::bool::weighted(0.8),
        changes in proptest::collection::vec(change(), 1..40),
    ) {
        for (at, rule) in all.iter_mut().enumerate() {
            rule.name = format!("r{at}");
        }
        let rules = rules(limits(of.0, of.1, of.2), all);
        let mut nodes = cluster(4, 3);
        let (mut now, mut taken) = (10_000i64, Vec::new());
        let mut begun: BTreeMap<(usize, usize), Vec<i64>> = BTreeMap::new();
        for change in changes {
            match change {
                Change::Fail(node, gpu, xid) => fail(&mut nodes, node, gpu, xid, now),
                Change::Recover(node, gpu) => node_mut(&mut nodes, node).gpus[gpu].problems.clear(),
                Change::Cordon(node, gpu) => node_mut(&mut nodes, node).gpus[gpu].cordoned = true,
                Change::Uncordon(node, gpu) => node_mut(&mut nodes, node).gpus[gpu].cordoned = false,
                Change::Mark(node, is_marked) => {
                    node_mut(&mut nodes, node).mark = is_marked.then(|| "the driver is upgraded".into());
                }
                Change::Raise(node, gpu, xid) => {
                    let problems = &mut node_mut(&mut nodes, node).gpus[gpu].problems;
                    problems.retain(|known| !known.is_event || known.xid != Some(xid));
                    let cause = "xid-application".to_owned();
                    problems.push(Problem { cause, xid: Some(xid), since: now, is_event: true });
                }
                Change::Wait(seconds) => now += seconds,
                Change::Begin(node, gpu) => {
                    let count = |nodes: &mut Nodes| node_mut(nodes, node).record.resets(&uuid(node, gpu), now);
                    let before = count(&mut nodes);
                    reset(&mut nodes, (node, gpu), now, None);
                    let more = count(&mut nodes) - before;
                    begun.entry((node, gpu)).or_default().extend(std::iter::repeat_n(now, more));
                }
                Change::End(node, gpu, helps) => {
                    reset(&mut nodes, (node, gpu), now, Some(helps));
                }
            }
            let before = withheld_gpus(&nodes);
            let steps = decide(&rules, &nodes, may_reset, now);
            for step in &steps {
                let real = match step.what {
                    StepKind::Act(action) => action != RemediationAction::Event,
                    StepKind::ResetAgain => true,
                    _ => false,
                };
                let resets = matches!(step.what, StepKind::Act(RemediationAction::Reset) | StepKind::ResetAgain);
                prop_assert!(may_reset || !resets, "{step:?}");
                prop_assert!(!real || nodes[&step.node].mark.is_none(), "{step:?}");
                // What is under way is neither begun again nor forgotten.
                let known = nodes[&step.node].record.get(&step.rule, &step.gpu);
                let in_flight = known.and_then(Entry::reset_in_flight);
                prop_assert!(in_flight.is_none() || step.entry.reset_in_flight() == in_flight, "{step:?}");
                let written = nodes[&step.node].record.written();
                apply(&mut nodes, step);
                if real {
                    taken.push(now);
                }
                if let StepKind::DryRun(_) = step.what {
                    prop_assert_eq!(nodes[&step.node].record.written(), written);
                }
            }
            let after = withheld_gpus(&nodes);
            if after.difference(&before).next().is_some() {
                let of_nodes = |gpus: &BTreeSet<(String, String)>| {
                    gpus.iter().map(|(node, _)| node.clone()).collect::<BTreeSet<_>>().len()
                };
                prop_assert!(after.len() <= of.1 as usize, "{} GPUs", after.len());
                prop_assert!(
                    of_nodes(&after) <= (of.0 as usize).max(of_nodes(&before)),
                    "{} nodes", of_nodes(&after)
                );
            }
            let hour = taken.iter().filter(|at| now - **at < HOUR).count();
            prop_assert!(hour <= of.2 as usize, "{hour} actions");
            for times in begun.values() {
                let day = times.iter().filter(|at| now - **at < 24 * HOUR).count();
                prop_assert!(day <= MAX_RESETS, "{day} resets of a GPU");
            }
            let again = decide(&rules, &nodes, may_reset, now);
            let again: Vec<_> = again.iter().filter(|step| !matches!(step.what, StepKind::HoldBack(..))).collect();
            // What is taken back makes room.
            let withdrawn = steps.iter().any(|step| matches!(step.what, StepKind::Withdraw(_)));
            prop_assert!(withdrawn || again.is_empty(), "{again:?}");
        }
    }
}
