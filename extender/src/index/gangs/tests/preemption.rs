//! Whom a gang has stopped, as the cluster changes.

use proptest::prelude::*;

use super::*;
use crate::fixtures::{holder, quarantined};

/// A node of eight GPUs that a pod of a priority has, `node-0` its name.
fn full(cluster: &Cluster, node: &str, priority: i32) {
    cluster.add(node, &bridged());
    low(cluster, node, priority);
}

fn low(cluster: &Cluster, node: &str, priority: i32) -> Value {
    let mut pod = bound(pod(&format!("{node}-0"), 8), node, 1, Some("0-7"));
    pod["spec"]["priority"] = priority.into();
    cluster.pod(&pod);
    pod
}

/// A gang whose members have a priority.
fn gang(cluster: &Cluster, name: &str, count: u32, priority: i32) -> Vec<Value> {
    let mut pods = members(name, count, 8);
    for pod in &mut pods {
        pod["spec"]["priority"] = priority.into();
    }
    create(cluster, &pods);
    pods
}

/// The pods that were to be evicted since the last look.
fn evicted(cluster: &Cluster) -> Vec<PodUid> {
    let work = cluster.store.update(|index| index.take_work());
    let evicted = work.into_iter().filter_map(|work| match work {
        Work::Evict { pods, .. } => Some(pods),
        _ => None,
    });
    evicted.flatten().collect()
}

fn reason(cluster: &Cluster, gang: &str) -> Reason {
    let view = cluster.store.read(|index| index.gang_view("default", gang));
    view.unwrap().reason
}

/// Each NUMA node lacks CPUs that one of the pods has.
#[test]
fn gang_preempts_pods_that_have_its_cpus() {
    let cluster = Cluster::new(Options::default());
    cluster.node("n", 8).inventory(&numa_node("n", [0, 0]));
    for (name, priority, set) in [("high", 20, "0-1"), ("low", 0, "4-5")] {
        for mut pod in guaranteed(vec![bound(pod(name, 2), "n", 1, Some(set))]) {
            pod["spec"]["priority"] = priority.into();
            cluster.pod(&pod);
        }
    }
    let mut pods = guaranteed(members("g", 1, 2));
    pods[0]["spec"]["priority"] = 10.into();
    create(&cluster, &pods);
    assert_eq!(evicted(&cluster), ["low".into()]);
}

#[test]
fn gang_preempts_once_the_cluster_is_large_enough() {
    let cluster = Cluster::new(Options::default());
    full(&cluster, "n1", 0);
    gang(&cluster, "g", 2, 10);
    assert_eq!(reason(&cluster, "g"), Reason::CannotFit);
    // Fewer devices are free than it asks for, as before.
    cluster.add("n2", &bridged());
    assert_eq!(evicted(&cluster), ["n1-0".into()]);
}

#[test]
fn a_gang_is_told_when_the_cluster_has_become_too_small_for_it() {
    let sick = |cluster: &Cluster| {
        let mut node = gpu_node("n2", &bridged());
        node["status"]["devices"][3]["healthy"] = false.into();
        cluster.inventory(&node);
    };
    let gone = |cluster: &Cluster| cluster.store.update(|index| index.node_deleted("n2"));
    let bare = |cluster: &Cluster| cluster.store.update(|index| index.inventory_deleted("n2"));
    let losses: [&dyn Fn(&Cluster); 3] = [&sick, &gone, &bare];
    for loss in losses {
        let cluster = Cluster::new(Options::default());
        full(&cluster, "n1", 10);
        full(&cluster, "n2", 10);
        gang(&cluster, "g", 2, 10);
        assert_ne!(reason(&cluster, "g"), Reason::CannotFit);
        loss(&cluster);
        assert_eq!(reason(&cluster, "g"), Reason::CannotFit);
    }
}

/// Makes a gang of a name.
type Front<'f> = &'f dyn Fn(&Cluster, &str);

#[test]
fn gangs_that_never_preempt_do_not_block_later_ones() {
    let never = |cluster: &Cluster, name: &str| {
        let mut pods = members(name, 1, 8);
        pods[0]["spec"]["priority"] = 20.into();
        pods[0]["spec"]["preemptionPolicy"] = "Never".into();
        create(cluster, &pods);
    };
    // There is no such node.
    let hopeless = |cluster: &Cluster, name: &str| drop(gang(cluster, name, 3, 20));
    // They would need what is of their own priority, too.
    let in_vain = |cluster: &Cluster, name: &str| drop(gang(cluster, name, 2, 20));
    let fronts: [Front<'_>; 3] = [&never, &hopeless, &in_vain];
    for front in fronts {
        let cluster = Cluster::new(Options::default());
        full(&cluster, "n1", 0);
        full(&cluster, "n2", 20);
        for number in 0..6 {
            front(&cluster, &format!("front{number}"));
        }
        gang(&cluster, "behind", 1, 10);
        assert_eq!(evicted(&cluster), ["n1-0".into()]);
    }
}

/// A node with labels, of eight GPUs.
fn labelled(cluster: &Cluster, node: &str, zone: &str) {
    cluster.add(node, &bridged());
    let labels = [("kubernetes.io/hostname", node), ("zone", zone)];
    cluster.store.update(|index| {
        let number = index.snapshot().find(node).unwrap();
        let mut facts = gantry_gang::NodeFacts::clone(
            index.facts.resources.nodes()[number.0 as usize].facts.as_ref().unwrap(),
        );
        facts.labels = labels.map(|(key, value)| (key.into(), value.into())).into();
        index.node_described(facts.into());
    });
}

#[test]
fn what_keeps_a_gang_off_a_node_goes_with_those_who_are_stopped() {
    let app = json!({"matchLabels": {"app": "train"}});
    let ports = json!([{"containerPort": 80, "hostPort": 80}]);
    let apart = json!({"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
        {"topologyKey": "kubernetes.io/hostname", "labelSelector": app},
    ]}});
    let spread = json!([{
        "topologyKey": "zone", "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule", "labelSelector": app,
    }]);
    for (field, written) in [("ports", ports), ("affinity", apart), ("topologySpreadConstraints", spread)] {
        let like_all = |mut pod: Value| {
            pod["metadata"]["labels"] = json!({"app": "train"});
            match field {
                "ports" => pod["spec"]["containers"][0][field] = written.clone(),
                _ => pod["spec"][field] = written.clone(),
            }
            pod
        };
        let cluster = Cluster::new(Options::default());
        labelled(&cluster, "n1", "a");
        labelled(&cluster, "n2", "b");
        cluster.pod(&like_all(bound(pod("n1-0", 8), "n1", 1, Some("0-7"))));
        low(&cluster, "n2", 10);
        let mut high = like_all(members("high", 1, 8).remove(0));
        high["spec"]["priority"] = 10.into();
        create(&cluster, &[high]);
        assert_eq!(evicted(&cluster), ["n1-0".into()], "{field}");
    }
}

/// A node of so many GPUs, on which a bound gang has a member of one GPU each; so many of them are needed.
fn elastic(cluster: &Cluster, node: &str, gpus: u32, min: u32) -> Vec<Value> {
    cluster.add(node, &plain(gpus as usize));
    let pods: Vec<Value> = (0..gpus).map(|number| member(&format!("el-{number}"), 1, "el", min)).collect();
    let facts: Vec<_> = pods.iter().map(crate::fixtures::facts).collect();
    cluster.store.update(|index| facts.into_iter().for_each(|pod| index.pod_applied(pod)));
    cluster.wait(2);
    let (needed, surplus) = pods.split_at(min as usize);
    bind_all(cluster, needed);
    for pod in surplus {
        let uid = pod["metadata"]["uid"].as_str().unwrap();
        admit(cluster, uid, node).unwrap();
        write_down(cluster);
        let admitted = admit(cluster, uid, node).unwrap();
        let now = cluster.now();
        cluster.store.update(|index| {
            index.finish(now, &target(uid, node), Outcome::Bound);
            index.bind_ended(&PodUid::from(uid), BindEnd::Bound);
        });
        show(cluster, pod, node, &admitted);
    }
    assert_eq!(cluster.free(node), "");
    evicted(cluster);
    pods
}

/// A gang of one member of so many GPUs, of priority 10.
fn of_one(cluster: &Cluster, name: &str, gpus: u32) {
    let mut pods = members(name, 1, gpus);
    pods[0]["spec"]["priority"] = 10.into();
    create(cluster, &pods);
}

#[test]
fn surplus_member_is_evicted_rather_than_its_gang() {
    let cluster = Cluster::new(Options::default());
    elastic(&cluster, "n1", 4, 1);
    of_one(&cluster, "high", 1);
    let gone = evicted(&cluster);
    assert_eq!(gone.len(), 1, "{gone:?}");
    // Another takes the next, and not the first again, though that is not seen to terminate yet.
    of_one(&cluster, "more", 2);
    let more = evicted(&cluster);
    assert_eq!(more.len(), 2, "{more:?}");
    assert!(!more.contains(&gone[0]));
    // Only the member that is needed is left: it goes as the last of its gang.
    of_one(&cluster, "last", 1);
    assert_eq!(evicted(&cluster).len(), 1);
}

#[test]
fn gang_at_its_minimum_is_evicted_as_a_whole() {
    let cluster = Cluster::new(Options::default());
    elastic(&cluster, "n1", 4, 3);
    of_one(&cluster, "high", 2);
    assert_eq!(evicted(&cluster).len(), 4);
}

#[test]
fn gang_goes_on_after_its_surplus_member_is_evicted() {
    let cluster = Cluster::new(Options::default());
    let pods = elastic(&cluster, "n1", 4, 2);
    of_one(&cluster, "high", 1);
    let gone = evicted(&cluster);
    let gone = gone.first().unwrap().as_str();
    cluster.gone(pods.iter().find(|pod| pod["metadata"]["uid"] == gone).unwrap());
    assert_eq!(phase(&cluster, "el"), GangPhase::Bound);
    assert_eq!(phase(&cluster, "high"), GangPhase::Reserved);
}

/// kube-scheduler tries a PodGroup with its victims removed in memory only, which a filter call does not show.
#[test]
fn native_group_is_refused_until_its_victims_are_gone() {
    let cluster = Cluster::new(Options::default());
    full(&cluster, "n1", 0);
    let pods = ["g-0", "g-1"].map(|name| {
        let mut pod = pod(name, 4);
        pod["spec"]["schedulingGroup"] = json!({"podGroupName": "g"});
        pod["spec"]["priority"] = 10.into();
        pod
    });
    let kind = OwnerKind::PodGroup;
    let owner = OwnerRef { kind, namespace: "default".into(), name: "g".into(), part: "".into() };
    let group = json!({"spec": {"schedulingPolicy": {"gang": {"minCount": 2}}}});
    let group = integrations::read(kind, "", &group);
    for pod in &pods {
        cluster.pod(pod);
    }
    let refused = |pod: &str| matches!(answer(&cluster, pod), Answer::Wait(_));
    assert!(refused("g-0") && refused("g-1"), "its size is not known");
    cluster.store.update(|index| index.owner_seen(&owner, Some(group.into())));
    cluster.wait(2);
    assert_eq!(evicted(&cluster), ["n1-0".into()]);
    assert!(refused("g-0") && refused("g-1"), "the devices are in use");
    // Neither may kube-scheduler stop pods for one member.
    let offers =
        vec![crate::wire::Offer { node: "n1".into(), victims: vec!["n1-0".into()], budgets_broken: 0 }];
    let asks = crate::fixtures::request(4);
    let offered = cluster.store.update(|index| index.preemptable(&"g-0".into(), &asks, 10, offers));
    assert_eq!(offered, []);
    cluster.gone(&bound(self::pod("n1-0", 8), "n1", 1, Some("0-7")));
    cluster.wait(2);
    assert_eq!([node(&cluster, "g-0"), node(&cluster, "g-1")], ["n1", "n1"]);
}

#[test]
fn gang_with_an_unread_group_is_no_victim() {
    // The extender has just started. The group may belong to a tree of groups, which goes as a whole.
    let cluster = Cluster::new(Options::default());
    cluster.add("n1", &bridged());
    let mut low = pod("g-0", 8);
    low["spec"]["schedulingGroup"] = json!({"podGroupName": "g"});
    cluster.pod(&bound(low, "n1", 1, Some("0-7")));
    of_one(&cluster, "high", 8);
    assert_eq!(evicted(&cluster), Vec::<PodUid>::new());
    let kind = OwnerKind::PodGroup;
    let owner = OwnerRef { kind, namespace: "default".into(), name: "g".into(), part: "".into() };
    let group =
        integrations::read(kind, "", &json!({"spec": {"schedulingPolicy": {"gang": {"minCount": 1}}}}));
    cluster.store.update(|index| index.owner_seen(&owner, Some(group.into())));
    cluster.wait(2);
    assert_eq!(evicted(&cluster), ["g-0".into()]);
}

#[test]
fn native_group_is_evicted_as_its_disruption_mode_states() {
    // Four members with two of eight GPUs each, all of which are needed. Two GPUs are asked for.
    for (mode, count) in [(Value::Null, 1), (json!({"single": {}}), 1), (json!({"all": {}}), 4)] {
        let cluster = Cluster::new(Options::default());
        cluster.add("n1", &bridged());
        let group = json!({"spec": {"schedulingPolicy": {"gang": {"minCount": 4}}, "disruptionMode": mode}});
        let group = integrations::read(OwnerKind::PodGroup, "", &group);
        let kind = OwnerKind::PodGroup;
        let owner = OwnerRef { kind, namespace: "default".into(), name: "g".into(), part: "".into() };
        let pods: Vec<Value> = (0..4).map(|number| pod(&format!("g-{number}"), 2)).collect();
        let in_group = |mut pod: Value| {
            pod["spec"]["schedulingGroup"] = json!({"podGroupName": "g"});
            pod
        };
        let pods: Vec<Value> = pods.into_iter().map(in_group).collect();
        create(&cluster, &pods);
        cluster.store.update(|index| index.owner_seen(&owner, Some(group.into())));
        cluster.wait(2);
        bind_all(&cluster, &pods);
        evicted(&cluster);
        of_one(&cluster, "high", 2);
        let gone = evicted(&cluster);
        assert_eq!(gone.len(), count, "{mode}: {gone:?}");
        if count == 1 {
            cluster.gone(pods.iter().find(|pod| pod["metadata"]["uid"] == gone[0].as_str()).unwrap());
            cluster.wait(2);
            assert_eq!(phase(&cluster, "high"), GangPhase::Reserved);
            assert_eq!(phase(&cluster, "g"), GangPhase::Degraded, "the others stay");
            let view = cluster.store.read(|index| index.gang_view("default", "g")).unwrap();
            assert_eq!(view.places.len(), 3, "nothing is reserved for the one that was evicted");
        }
    }
}

/// A pod without devices on a node.
fn other_pod(cluster: &Cluster, name: &str, cpu: u32, change: impl FnOnce(&mut Value)) {
    let mut pod = bound(pod(name, 0), "n1", 1, None);
    pod["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": cpu.to_string()}});
    pod["metadata"]["labels"] = json!({"app": name});
    pod["status"]["phase"] = "Running".into();
    change(&mut pod);
    cluster.other_pod(&pod);
}

fn nothing(_: &mut Value) {}

/// Changes a pod.
type Change<'c> = &'c dyn Fn(&mut Value);

/// A gang of one member of eight GPUs and so many cores.
fn with_cores(cluster: &Cluster, name: &str, cores: u32) {
    with_gpus_and_cores(cluster, name, 8, cores);
}

#[test]
fn pods_without_devices_are_evicted_for_their_resources() {
    let cluster = Cluster::new(Options::default());
    // 64 cores.
    cluster.add("n1", &bridged());
    other_pod(&cluster, "web", 20, nothing);
    other_pod(&cluster, "batch", 20, |pod| pod["spec"]["priority"] = (-5).into());
    other_pod(&cluster, "more", 20, nothing);
    with_cores(&cluster, "high", 20);
    assert_eq!(evicted(&cluster), ["batch".into()]);
    let address = |index: &crate::index::Index| index.pod_address(&"batch".into());
    assert_eq!(cluster.store.read(address), Some(("default".into(), "batch".into())));
    // It has ended by itself before it was evicted.
    other_pod(&cluster, "batch", 20, |pod| {
        pod["status"]["phase"] = "Succeeded".into();
    });
    assert_eq!(phase(&cluster, "high"), GangPhase::Reserved);
}

#[test]
fn a_host_port_of_a_pod_without_devices_comes_free_with_it() {
    let cluster = Cluster::new(Options::default());
    cluster.add("n1", &bridged());
    let ports = json!([{"containerPort": 80, "hostPort": 80}]);
    other_pod(&cluster, "web", 1, |pod| {
        pod["spec"]["containers"][0]["ports"] = ports.clone();
    });
    other_pod(&cluster, "other", 1, nothing);
    let mut pods = members("high", 1, 8);
    pods[0]["spec"]["priority"] = 10.into();
    pods[0]["spec"]["containers"][0]["ports"] = ports;
    create(&cluster, &pods);
    assert_eq!(evicted(&cluster), ["web".into()]);
}

#[test]
fn pods_without_devices_go_only_if_others_do_not_suffice() {
    for (cores, gone) in [(20, vec!["n1-0"]), (50, vec!["n1-0", "web"])] {
        let cluster = Cluster::new(Options::default());
        full(&cluster, "n1", 0);
        other_pod(&cluster, "web", 40, nothing);
        with_cores(&cluster, "high", cores);
        let gone: Vec<PodUid> = gone.into_iter().map(PodUid::from).collect();
        assert_eq!(evicted(&cluster), gone);
    }
}

/// A pod of so many devices of a node, from `first` on.
fn holds(cluster: &Cluster, name: &str, node: &str, devices: (u32, u32), priority: i32) {
    let (first, count) = devices;
    let set = match count {
        1 => first.to_string(),
        _ => format!("{first}-{}", first + count - 1),
    };
    let mut pod = bound(pod(name, count), node, 1, Some(&set));
    pod["spec"]["priority"] = priority.into();
    cluster.pod(&pod);
}

/// A gang of one member of so many GPUs and cores, of priority 10.
fn with_gpus_and_cores(cluster: &Cluster, name: &str, gpus: u32, cores: u32) {
    let mut pods = members(name, 1, gpus);
    pods[0]["spec"]["priority"] = 10.into();
    pods[0]["spec"]["containers"][0]["resources"]["requests"] = json!({"cpu": cores.to_string()});
    create(cluster, &pods);
}

/// On n1 a pod of two GPUs has to go with one without; on n2 one of eight GPUs suffices.
#[test]
fn pod_without_devices_goes_if_that_spares_devices() {
    let cluster = Cluster::new(Options::default());
    cluster.add("n1", &bridged());
    holds(&cluster, "two", "n1", (0, 2), 0);
    holds(&cluster, "rest", "n1", (2, 6), 10);
    other_pod(&cluster, "web", 60, nothing);
    full(&cluster, "n2", 0);
    with_gpus_and_cores(&cluster, "high", 2, 20);
    assert_eq!(evicted(&cluster), ["two".into(), "web".into()]);
}

/// What is on a node of eight GPUs and 64 cores: devices of pods, and cores of pods without devices.
type NodeLoad = (Vec<u32>, Vec<u32>);

/// The fewest devices, then pods, that must go for a pod of so many GPUs and cores to fit on one of the nodes.
fn least_loss(nodes: &[NodeLoad], gpus: u32, cores: u32) -> Option<(u32, usize)> {
    let of_node = |(devices, others): &NodeLoad| {
        let count = devices.len() + others.len();
        let sets = (0_u32..1 << count).filter_map(|gone| {
            let goes = |at: usize| (gone >> at) & 1 == 1;
            let lost: u32 = devices.iter().enumerate().filter(|(at, _)| goes(*at)).map(|(_, of)| of).sum();
            let used: u32 = devices.iter().sum::<u32>() - lost;
            let left = others.iter().enumerate().filter(|(at, _)| !goes(devices.len() + at));
            let busy: u32 = left.map(|(_, cores)| cores).sum();
            (used + gpus <= 8 && busy + cores <= 64).then_some((lost, gone.count_ones() as usize))
        });
        sets.min()
    };
    nodes.iter().filter_map(of_node).min()
}

fn node_load() -> impl Strategy<Value = NodeLoad> {
    let devices = proptest::collection::vec(prop_oneof![Just(1_u32), Just(2), Just(4), Just(8)], 0..5);
    let devices = devices.prop_map(|counts| {
        let mut left = 8;
        let fits = |count: &u32| {
            let fits = *count <= left;
            left -= if fits { *count } else { 0 };
            fits
        };
        counts.into_iter().filter(fits).collect::<Vec<_>>()
    });
    (devices, proptest::collection::vec(prop_oneof![Just(10_u32), Just(20), Just(30)], 0..3))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn victims_with_and_without_devices_are_the_fewest(
        nodes in proptest::collection::vec(node_load(), 1..4),
        gpus in prop_oneof![Just(1_u32), Just(2), Just(4), Just(8)],
        cores in prop_oneof![Just(1_u32), Just(20), Just(40)],
    ) {
        let cluster = Cluster::new(Options::default());
        let mut counts: std::collections::BTreeMap<PodUid, u32> = std::collections::BTreeMap::new();
        for (at, (devices, others)) in nodes.iter().enumerate() {
            let node = format!("n{at}");
            cluster.add(&node, &bridged());
            let mut first = 0;
            for (number, count) in devices.iter().enumerate() {
                let name = format!("{node}-d{number}");
                holds(&cluster, &name, &node, (first, *count), 0);
                counts.insert(name.as_str().into(), *count);
                first += count;
            }
            for (number, cores) in others.iter().enumerate() {
                other_pod(&cluster, &format!("{node}-c{number}"), *cores, |pod| {
                    pod["spec"]["nodeName"] = node.as_str().into();
                });
            }
        }
        with_gpus_and_cores(&cluster, "high", gpus, cores);
        let gone = evicted(&cluster);
        let devices: u32 = gone.iter().filter_map(|uid| counts.get(uid)).sum();
        prop_assert_eq!(Some((devices, gone.len())), least_loss(&nodes, gpus, cores), "{:?}", gone);
    }
}

#[test]
fn static_protected_and_equal_priority_pods_stay() {
    let owned = |kind: &'static str| {
        move |pod: &mut Value| {
            pod["metadata"]["ownerReferences"] =
                json!([{"apiVersion": "apps/v1", "kind": kind, "name": "o", "uid": "o", "controller": true}]);
        }
    };
    let mirror =
        |pod: &mut Value| pod["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": "x"});
    let equal = |pod: &mut Value| pod["spec"]["priority"] = 10.into();
    let leaving = |pod: &mut Value| pod["metadata"]["deletionTimestamp"] = "2025-12-31T00:00:00Z".into();
    let (daemon, node, job) = (owned("DaemonSet"), owned("Node"), owned("Job"));
    let stays: [(&str, Change<'_>); 6] = [
        ("daemon", &daemon),
        ("static", &node),
        ("mirror", &mirror),
        ("equal", &equal),
        ("leaving", &leaving),
        ("protected", &nothing),
    ];
    for (name, stays) in stays {
        let cluster = Cluster::new(Options::default());
        cluster.add("n1", &bridged());
        budgets(&cluster, &[("b", "protected", 0)]);
        other_pod(&cluster, name, 30, stays);
        other_pod(&cluster, "of-a-job", 4, job);
        with_cores(&cluster, "large", 35);
        assert_eq!(evicted(&cluster), [], "{name}");
        // Beside it others do.
        other_pod(&cluster, "of-a-job-too", 26, job);
        with_cores(&cluster, "small", 30);
        assert_eq!(evicted(&cluster), ["of-a-job-too".into()], "{name}");
    }
}

/// Disruption budgets: the name, of pods of which app, and how many more of them it allows to be stopped.
fn budgets(cluster: &Cluster, all: &[(&str, &str, i32)]) {
    let read = |(name, app, allowed): &(&str, &str, i32)| {
        let object = json!({
            "metadata": {"namespace": "default", "name": name},
            "spec": {"selector": {"matchLabels": {"app": app}}},
            "status": {"disruptionsAllowed": allowed, "currentHealthy": 1, "desiredHealthy": 1, "expectedPods": 1},
        });
        crate::index::Disruptions::read(&serde_json::from_value(object).unwrap())
    };
    let budgets = all.iter().map(read).collect();
    cluster.store.update(|index| index.budgets_seen(Some(budgets)));
}

/// A node of eight GPUs that a pod of an app has.
fn full_of(cluster: &Cluster, node: &str, app: &str, priority: i32) {
    cluster.add(node, &bridged());
    let mut pod = low(cluster, node, priority);
    pod["metadata"]["labels"] = json!({"app": app});
    cluster.pod(&pod);
}

#[test]
fn gangs_blocked_by_budgets_do_not_block_later_ones() {
    let cluster = Cluster::new(Options::default());
    budgets(&cluster, &[("b", "protected", 0)]);
    full_of(&cluster, "n1", "protected", 0);
    full_of(&cluster, "n2", "protected", 0);
    full_of(&cluster, "n3", "batch", 0);
    for number in 0..6 {
        gang(&cluster, &format!("front{number}"), 2, 20);
    }
    gang(&cluster, "behind", 1, 10);
    for node in ["s1", "s2", "s3", "s4"] {
        cluster.add(node, &plain(1)).wait(6);
    }
    assert_eq!(evicted(&cluster), ["n3-0".into()]);
}

#[test]
fn pod_under_two_budgets_is_never_a_victim() {
    let cluster = Cluster::new(Options::default());
    full_of(&cluster, "n1", "twice", 0);
    full_of(&cluster, "n2", "once", 1);
    budgets(&cluster, &[("a", "twice", 1), ("b", "twice", 1), ("c", "once", 1)]);
    gang(&cluster, "g", 1, 10);
    assert_eq!(evicted(&cluster), ["n2-0".into()]);
}

#[test]
fn member_without_devices_can_forbid_preemption() {
    for (policy, gone) in [("Never", vec![]), ("PreemptLowerPriority", vec!["n1-0".into()])] {
        let cluster = Cluster::new(Options::default());
        full(&cluster, "n1", 0);
        let mut pods = members("g", 2, 8);
        for pod in &mut pods {
            pod["spec"]["priority"] = 10.into();
        }
        let launcher = &mut pods[0]["spec"];
        launcher["containers"][0]["resources"] = json!({});
        launcher["preemptionPolicy"] = policy.into();
        cluster.other_pod(&pods[0]);
        create(&cluster, &pods[1..]);
        assert_eq!(evicted(&cluster), gone, "{policy}");
    }
}

/// A pod being deleted, that has to be gone by this second.
fn leaving(mut pod: Value, second: u32) -> Value {
    let (minute, second) = (second / 60, second % 60);
    pod["metadata"]["deletionTimestamp"] = format!("2026-01-01T00:{minute:02}:{second:02}Z").into();
    pod
}

#[test]
fn gang_waits_for_terminating_pods_before_preempting() {
    let cluster = Cluster::new(Options::default());
    full(&cluster, "n2", 0);
    cluster.add("n1", &bridged());
    // Whoever it is: it goes anyway.
    let ending = leaving(low(&cluster, "n1", 50), 32);
    cluster.pod(&ending);
    gang(&cluster, "g", 1, 10);
    assert_eq!(evicted(&cluster), []);
    assert_eq!(reason(&cluster, "g"), Reason::WaitingForTerminatingPods);
    // It is gone, its processes perhaps are not.
    cluster.wait(30).gone(&ending);
    assert_eq!(evicted(&cluster), []);
    assert_eq!(phase(&cluster, "g"), GangPhase::Queued);
    cluster.wait(6);
    assert_eq!(node(&cluster, "g-0"), "n1");
    assert_eq!(evicted(&cluster), []);
}

#[test]
fn a_pod_that_does_not_end_in_its_time_is_not_waited_for() {
    let cluster = Cluster::new(Options::default());
    full(&cluster, "n2", 0);
    cluster.add("n1", &bridged());
    cluster.pod(&leaving(low(&cluster, "n1", 0), 32));
    gang(&cluster, "g", 1, 10);
    cluster.wait(80);
    assert_eq!(evicted(&cluster), []);
    cluster.wait(20);
    assert_eq!(evicted(&cluster), ["n2-0".into()]);
}

#[test]
fn gang_waits_for_devices_that_are_still_returned() {
    let cluster = Cluster::new(Options::default());
    cluster.add("n1", &bridged());
    let mut node = gpu_node("n1", &bridged());
    node["status"]["holders"] = json!([quarantined(holder("n1", "stuck", None, "7"))]);
    cluster.inventory(&node);
    let most = bound(pod("most", 4), "n1", 1, Some("0-3"));
    cluster.pod(&most);
    full(&cluster, "n2", 0);
    cluster.wait(80);
    cluster.gone(&most);
    let mut pods = members("g", 1, 7);
    pods[0]["spec"]["priority"] = 10.into();
    create(&cluster, &pods);
    assert_eq!(evicted(&cluster), []);
    cluster.wait(6);
    assert_eq!(super::node(&cluster, "g-0"), "n1");
}

#[test]
fn a_gang_does_not_wait_for_ever_new_pods_that_are_ending() {
    let cluster = Cluster::new(Options::default());
    full(&cluster, "n2", 0);
    cluster.add("n1", &bridged()).add("n3", &bridged());
    cluster.pod(&leaving(low(&cluster, "n1", 0), 32));
    let next = low(&cluster, "n3", 50);
    gang(&cluster, "g", 1, 10);
    cluster.wait(80).pod(&leaving(next, 180));
    assert_eq!(evicted(&cluster), []);
    cluster.wait(20);
    assert_eq!(evicted(&cluster), ["n2-0".into()]);
}

#[test]
fn what_ending_pods_leave_to_a_gang_before_it_is_not_waited_for() {
    let cluster = Cluster::new(Options::default());
    full(&cluster, "n1", 0);
    let first = low(&cluster, "n1", 0);
    gang(&cluster, "first", 1, 20);
    assert_eq!(evicted(&cluster), ["n1-0".into()]);
    full(&cluster, "n2", 0);
    cluster.pod(&leaving(first, 40));
    gang(&cluster, "second", 1, 10);
    assert_eq!(evicted(&cluster), ["n2-0".into()]);
}

/// A node of which one half may come free for a gang, and the other may not.
fn half(cluster: &Cluster, node: &str) {
    cluster.add(node, &bridged());
    for (name, gpus, priority) in [("low", "0-3", 0), ("high", "4-7", 50)] {
        let mut pod = bound(pod(&format!("{node}-{name}"), 4), node, 1, Some(gpus));
        pod["spec"]["priority"] = priority.into();
        cluster.pod(&pod);
    }
}

#[test]
fn gang_waits_again_after_an_overdue_termination() {
    let cluster = Cluster::new(Options::default());
    half(&cluster, "n2");
    half(&cluster, "n3");
    cluster.add("n1", &bridged());
    let first = leaving(low(&cluster, "n1", 50), 32);
    cluster.pod(&first);
    gang(&cluster, "g", 1, 10);
    assert_eq!(reason(&cluster, "g"), Reason::WaitingForTerminatingPods);
    // Another gets what it leaves.
    let mut next = bound(pod("next", 8), "n1", 1, Some("0-7"));
    next["spec"]["priority"] = 50.into();
    cluster.gone(&first).pod(&next);
    cluster.wait(100);
    full(&cluster, "n4", 50);
    cluster.wait(1);
    cluster.pod(&leaving(next, 140));
    full(&cluster, "n5", 0);
    cluster.wait(1);
    assert_eq!(evicted(&cluster), []);
    assert_eq!(reason(&cluster, "g"), Reason::WaitingForTerminatingPods);
}

#[test]
fn pod_orphaned_by_its_daemon_set_counts_once() {
    let cluster = Cluster::new(Options::default());
    cluster.add("n1", &bridged());
    other_pod(&cluster, "batch", 20, nothing);
    let owner =
        json!([{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "d", "controller": true}]);
    other_pod(&cluster, "agent", 1, |pod| {
        pod["metadata"]["ownerReferences"] = owner;
    });
    other_pod(&cluster, "agent", 1, nothing);
    cluster.store.update(|index| index.other_pod_gone(&"agent".into()));
    with_cores(&cluster, "high", 60);
    assert_eq!(evicted(&cluster), ["batch".into()]);
}
