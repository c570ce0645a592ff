//! What gangs and pods are refused for, as facts: reserved devices, the members that are missing, the nodes that are ruled out.

use std::collections::BTreeMap;

use gantry_gang::protocol::{Holder, Refusal, Shortage, WithheldReason};
use gantry_gang::{NodeFacts, Taint, TaintEffect};
use proptest::prelude::*;

use super::*;
use crate::fixtures::allocatable;
use crate::index::FitFailure;

fn shortage(cluster: &Cluster, gang: &str) -> Shortage {
    let refusal = cluster.store.read(|index| {
        let view = index.gangs().named("default", gang).into_iter().next();
        view.and_then(|view| view.refusal().cloned())
    });
    match refusal {
        Some(Refusal::DoesNotFit(shortage)) => *shortage,
        other => panic!("{other:?}"),
    }
}

fn reason(cluster: &Cluster, pod: &str) -> Reason {
    match answer(cluster, pod) {
        Answer::Wait(why) => why.reason,
        other => panic!("{other:?}"),
    }
}

fn lacks(cluster: &Cluster, pod: &str) -> Vec<Option<FitFailure>> {
    cluster.store.read(|index| {
        let pod = index.find_pod("default", pod).unwrap();
        index.inspect(pod).unwrap().nodes.into_iter().map(|node| node.lack).collect()
    })
}

/// Gang `a` has reserved both nodes and no member has arrived: nothing is held, and nothing is free.
#[test]
fn refusal_names_the_gang_that_has_reserved() {
    let cluster = two_nodes();
    let pods = members("a", 2, 8);
    create(&cluster, &pods);
    create(&cluster, &members("b", 2, 8));
    assert_eq!(reason(&cluster, "b-0"), Reason::GpusReserved);
    let shortage = shortage(&cluster, "b");
    let devices = shortage.devices.unwrap();
    assert_eq!((devices.free, devices.reserved, devices.total), (0, 16, 16));
    let [holder] = &shortage.reserved.unwrap().holders[..] else { panic!("one gang has reservations") };
    assert_eq!((&*holder.gang, holder.devices), ("default/a", 16));
    let now = cluster.store.read(|index| index.now().unix);
    assert!(holder.until.is_some_and(|until| (now..now + 61).contains(&until)), "{holder:?} at {now}");
    cluster.pod(&pod("single", 1));
    let reserved =
        |lack: &Option<FitFailure>| matches!(lack, Some(FitFailure::Devices { free: 0, reserved: 8, .. }));
    assert!(lacks(&cluster, "single").iter().all(reserved));
}

/// Once the members run, the same devices are held and no longer reserved.
#[test]
fn refusal_changes_once_reserved_devices_are_held() {
    let cluster = two_nodes();
    let pods = members("a", 2, 8);
    create(&cluster, &pods);
    create(&cluster, &members("b", 2, 8));
    let nodes: Vec<String> = (0..2).map(|number| node(&cluster, &format!("a-{number}"))).collect();
    for (pod, node) in ["a-0", "a-1"].into_iter().zip(&nodes) {
        let _ = admit(&cluster, pod, node).unwrap();
    }
    commit(&cluster);
    write_down(&cluster);
    for ((pod, value), node) in ["a-0", "a-1"].into_iter().zip(&pods).zip(&nodes) {
        let admitted = admit(&cluster, pod, node).unwrap();
        cluster.store.update(|index| index.bind_ended(&PodUid::from(pod), BindEnd::Bound));
        show(&cluster, value, node, &admitted);
    }
    cluster.wait(2);
    assert_eq!(reason(&cluster, "b-0"), Reason::InsufficientResources);
    let shortage = shortage(&cluster, "b");
    assert_eq!(shortage.reserved, None);
    assert_eq!(shortage.devices.unwrap().reserved, 0);
}

/// Neither pods that come nor pods that end make the gang fit.
#[test]
fn refusal_tells_what_is_free_some_seconds_later() {
    let cluster = two_nodes();
    let first = bound(pod("first", 6), "m", 1, Some("0-5"));
    cluster.pod(&first);
    create(&cluster, &members("a", 2, 8));
    let free = || shortage(&cluster, "a").devices.unwrap().free;
    assert_eq!(free(), 10);
    cluster.pod(&bound(pod("second", 4), "n", 1, Some("0-3")));
    cluster.wait(20);
    assert_eq!(free(), 6);
    cluster.gone(&first);
    cluster.wait(20);
    assert_eq!(free(), 12);
}

/// The plugins of both nodes are not registered with kubelet: every GPU is idle, and that is the cause.
#[test]
fn plugin_that_does_not_serve_is_the_first_cause() {
    let cluster = two_nodes();
    for name in ["m", "n"] {
        let mut node = gpu_node(name, &bridged());
        node["status"]["conditions"] = json!([{
            "type": "Ready", "status": "False", "reason": "NotRegistered", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }]);
        cluster.inventory(&node);
    }
    create(&cluster, &members("a", 2, 8));
    assert_eq!(reason(&cluster, "a-0"), Reason::PluginNotReady);
    let withheld = shortage(&cluster, "a").withheld.unwrap();
    assert_eq!((withheld.cause, withheld.nodes), (WithheldReason::ByPlugin("NotRegistered".into()), 2));
    cluster.inventory(&gpu_node("m", &bridged()));
    cluster.inventory(&gpu_node("n", &bridged()));
    cluster.wait(2);
    assert_ne!(node(&cluster, "a-0"), node(&cluster, "a-1"));
}

fn rejected(mut pod: Value, message: &str) -> Value {
    pod["status"]["conditions"] = json!([{
        "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message,
    }]);
    pod
}

const NO_CLAIM: &str = "0/2 nodes are available: persistentvolumeclaim \"data\" not found. preemption: 0/2 nodes are \
    available: 2 Preemption is not helpful for scheduling.";

/// A member names a claim that does not exist. Nothing is reserved for its gang, until kube-scheduler calls for it.
#[test]
fn rejected_member_keeps_nothing_reserved() {
    let cluster = two_nodes();
    let pods = members("a", 2, 8);
    create(&cluster, &[pods[0].clone(), rejected(pods[1].clone(), NO_CLAIM)]);
    assert_eq!((cluster.free("m").len(), cluster.free("n").len()), (15, 15));
    assert_eq!(reason(&cluster, "a-0"), Reason::MembersRejected);
    // It is rejected only after the gang has its reservation.
    cluster.pod(&pods[1]);
    cluster.wait(2);
    assert_eq!(phase(&cluster, "a"), GangPhase::Reserved);
    cluster.pod(&rejected(pods[1].clone(), NO_CLAIM));
    assert_eq!((cluster.free("m").len(), cluster.free("n").len()), (15, 15));
    let status = cluster.store.update(|index| index.take_statuses()).pop().unwrap().1;
    assert_eq!(
        (status.reason, status.members, status.failed_attempts),
        (Some(Reason::MembersRejected), 2, 0)
    );
    // The claim exists now: kube-scheduler calls filter, while the pod still shows the old condition.
    assert!(matches!(answer(&cluster, "a-1"), Answer::Wait(_)));
    cluster.pod(&rejected(pods[1].clone(), NO_CLAIM));
    cluster.wait(2);
    assert_eq!(phase(&cluster, "a"), GangPhase::Reserved);
    assert_ne!(node(&cluster, "a-0"), node(&cluster, "a-1"));
}

/// Members with a gate of somebody else's exist; what keeps the gang is the gate.
#[test]
fn gated_members_exist_and_are_named_with_their_gate() {
    let cluster = two_nodes();
    let mut pods = members("a", 2, 8);
    pods[1]["spec"]["schedulingGates"] = json!([{"name": "example.com/quota"}]);
    create(&cluster, &pods);
    let Answer::Wait(why) = answer(&cluster, "a-0") else { panic!("a member is gated") };
    assert_eq!(why.reason, Reason::MembersGated);
    assert_eq!(
        &*why.message,
        "gang default/a: MembersGated: 2 of 2 members exist; kept back by scheduling gate example.com/quota: 1"
    );
}

/// A node of four GPUs.
#[derive(Debug, Clone)]
struct NodeCase {
    pool: u8,
    tainted: bool,
}

/// A pod: alone, or the only member of a gang.
#[derive(Debug, Clone)]
struct PodCase {
    gpus: u32,
    pool: Option<u8>,
    tolerates: bool,
}

prop_compose! {
    fn node_case()(pool in 0u8..2, tainted in prop::bool::weighted(0.2)) -> NodeCase {
        NodeCase { pool, tainted }
    }
}

prop_compose! {
    fn pod_case()(
        gpus in 1u32..6,
        pool in prop::option::weighted(0.7, 0u8..2),
        tolerates in any::<bool>(),
    ) -> PodCase {
        PodCase { gpus, pool, tolerates }
    }
}

impl NodeCase {
    fn build(&self, cluster: &Cluster, name: &str) {
        cluster.add(name, &plain(4));
        let taint = Taint { key: "dedicated".into(), value: "".into(), effect: TaintEffect::NoSchedule };
        let facts = NodeFacts {
            name: name.into(),
            labels: [("pool".into(), self.pool.to_string().into())].into(),
            allocatable: allocatable(),
            unschedulable: false,
            taints: self.tainted.then_some(taint).into_iter().collect(),
        };
        cluster.store.update(|index| index.node_described(facts.into()));
    }
}

impl PodCase {
    fn build(&self, mut pod: Value) -> Value {
        if let Some(pool) = self.pool {
            pod["spec"]["nodeSelector"] = json!({"pool": pool.to_string()});
        }
        if self.tolerates {
            pod["spec"]["tolerations"] = json!([{"key": "dedicated", "operator": "Exists"}]);
        }
        pod
    }

    fn may_go_to(&self, node: &NodeCase) -> bool {
        self.gpus <= 4 && self.pool.is_none_or(|pool| pool == node.pool) && (self.tolerates || !node.tainted)
    }
}

fn holders(cluster: &Cluster, pod: &str) -> Vec<Holder> {
    cluster.store.read(|index| {
        let pod = index.find_pod("default", pod).unwrap();
        index.holders_for(pod.request.as_ref().unwrap(), &pod.needs)
    })
}

fn counts(holders: &[Holder]) -> BTreeMap<String, usize> {
    holders.iter().map(|holder| (holder.gang.to_string(), holder.devices)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Only reservations on nodes that admit the pod keep it waiting: a refusal names these gangs, with their devices there, and
    /// no other.
    #[test]
    fn refusals_name_holders_on_admitted_nodes_only(
        nodes in prop::collection::vec(node_case(), 1..5),
        gangs in prop::collection::vec(pod_case(), 0..5),
        waits in pod_case(),
    ) {
        let cluster = Cluster::new(Options::default());
        let name = |number: usize| format!("n{number}");
        for (number, node) in nodes.iter().enumerate() {
            node.build(&cluster, &name(number));
        }
        for (number, gang) in gangs.iter().enumerate() {
            let key = format!("g{number}");
            create(&cluster, &[gang.build(member(&format!("{key}-0"), gang.gpus, &key, 1))]);
        }
        create(&cluster, &[waits.build(member("w-0", waits.gpus, "w", 1))]);
        create(&cluster, &[waits.build(pod("single", waits.gpus))]);
        let mut expected = BTreeMap::new();
        for number in 0..gangs.len() {
            let view = cluster.store.read(|index| index.gang_view("default", &format!("g{number}"))).unwrap();
            for place in view.places {
                let node = &nodes[place.node.as_str()[1..].parse::<usize>().unwrap()];
                if waits.may_go_to(node) {
                    *expected.entry(format!("default/g{number}")).or_insert(0) += place.devices.len();
                }
            }
        }
        let of_gang = cluster.store.read(|index| {
            let view = index.gangs().named("default", "w").into_iter().next().unwrap();
            match view.refusal() {
                Some(Refusal::DoesNotFit(shortage)) => shortage.reserved.clone(),
                _ => None,
            }
        });
        if let Some(reserved) = of_gang {
            prop_assert!(!reserved.holders.is_empty());
            prop_assert_eq!(counts(&reserved.holders), expected.clone());
        }
        if phase(&cluster, "w") == GangPhase::Reserved {
            expected.insert("default/w".to_owned(), waits.gpus as usize);
        }
        let holders = holders(&cluster, "single");
        prop_assert!(holders.iter().all(|holder| holder.until.is_some()));
        prop_assert_eq!(counts(&holders), expected);
    }
}
