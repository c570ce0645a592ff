//! Resources that nobody has named and whose last plugin is gone: who asked for them as a gang does so still.

use super::*;
use crate::fixtures::{cut_node, pod_of};

const MIG: &str = "nvidia.com/mig-3g.40gb";

/// A node of four slices of a resource that the operator has not named, and a gang whose four members ask for one each.
fn sliced(advertised: u32) -> (Cluster, Vec<Value>) {
    let cluster = Cluster::new(Options::default());
    cluster.node("n", 0);
    advertise(&cluster, advertised);
    publish(&cluster);
    let pods: Vec<Value> = (0..4)
        .map(|number| {
            let mut pod = pod_of(&format!("a-{number}"), MIG, 1);
            pod["metadata"]["annotations"] =
                json!({names::GANG_ANNOTATION: "a", names::GANG_MIN_ANNOTATION: "4"});
            pod
        })
        .collect();
    create(&cluster, &pods);
    (cluster, pods)
}

fn publish(cluster: &Cluster) {
    let slices = [(0, 0), (0, 4), (1, 0), (1, 4)];
    cluster.inventory(&cut_node("n", &bridged(), MIG, 4, &slices));
}

fn advertise(cluster: &Cluster, slices: u32) {
    cluster.store.update(|index| index.node_applied(&"n".into(), vec![(MIG.into(), slices)]));
}

fn manages(cluster: &Cluster) -> bool {
    cluster.store.snapshot().managed.contains(MIG)
}

#[test]
fn members_stay_a_gang_when_their_resource_vanishes() {
    for advertised in [0, 4] {
        let (cluster, _) = sliced(advertised);
        for pod in ["a-0", "a-1"] {
            assert_eq!(node(&cluster, pod), "n");
            assert!(matches!(admit(&cluster, pod, "n"), Ok(BindStep::Wait(_))));
        }
        cluster.store.update(|index| index.inventory_deleted("n"));
        for pod in ["a-0", "a-1", "a-2"] {
            let admitted = admit(&cluster, pod, "n");
            assert!(!matches!(admitted, Ok(BindStep::Single(_))), "{pod}: {admitted:?}");
            assert!(matches!(answer(&cluster, pod), Answer::Wait(_)), "{pod}");
        }
        // It comes back, and with it the place of all.
        publish(&cluster);
        cluster.wait(2);
        assert_eq!(node(&cluster, "a-0"), "n", "{advertised}");
    }
}

#[test]
fn resource_is_managed_while_advertised_or_requested() {
    let (cluster, pods) = sliced(4);
    cluster.store.update(|index| index.inventory_deleted("n"));
    assert!(manages(&cluster));
    advertise(&cluster, 0);
    assert!(manages(&cluster), "pods ask for it");
    for pod in &pods {
        assert!(manages(&cluster));
        cluster.gone(pod);
    }
    cluster.wait(1);
    assert!(!manages(&cluster));
    // What is only advertised is nobody's of ours.
    advertise(&cluster, 4);
    assert!(!manages(&cluster));
}
