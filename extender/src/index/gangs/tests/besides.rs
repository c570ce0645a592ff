//! Gangs for which something else than devices decides where they go, from their pods' own words.

use gantry_gang::InsufficientResource;
use gantry_gang::protocol::{Obstacle, Refusal};

use super::*;

/// Two nodes of eight GPUs; `n` has an adapter, fast disks and a label that says so, `m` neither.
fn unlike() -> Cluster {
    let cluster = two_nodes();
    for (name, adapters, disk) in [("m", 0, "hdd"), ("n", 2, "nvme")] {
        cluster.store.update(|index| {
            let number = index.snapshot().find(name).unwrap();
            let facts = index.facts.resources.nodes()[number.0 as usize].facts.as_deref();
            let mut facts = facts.unwrap().clone();
            facts.labels.insert("disk".into(), disk.into());
            facts.labels.insert("kubernetes.io/hostname".into(), name.into());
            if adapters > 0 {
                facts.allocatable.others.insert("example.com/rdma".into(), adapters);
            }
            index.node_described(facts.into());
        });
    }
    cluster
}

/// A gang of two members of a GPU each, changed.
fn two(cluster: &Cluster, gang: &str, change: impl Fn(&mut Value)) {
    let mut pods = members(gang, 2, 1);
    pods.iter_mut().for_each(change);
    create(cluster, &pods);
}

/// What keeps members of a gang off nodes that have the devices.
fn obstacles(cluster: &Cluster, gang: &str) -> Vec<Obstacle> {
    let refusal = cluster.store.read(|index| {
        let view = index.gangs().named("default", gang).into_iter().next();
        view.and_then(|view| view.refusal().cloned())
    });
    let Some(Refusal::DoesNotFit(shortage)) = refusal else {
        panic!("{refusal:?}");
    };
    let found = shortage.obstacles.map(|obstacles| obstacles.found).unwrap_or_default();
    found.into_iter().map(|(obstacle, _)| obstacle).collect()
}

fn requests(pod: &mut Value, resource: &str, amount: &str) {
    pod["spec"]["containers"][0]["resources"]["requests"][resource] = amount.into();
}

/// A node has 1 TiB of each.
#[test]
fn memory_and_ephemeral_storage_are_counted_and_named() {
    for (resource, lack) in [
        ("memory", InsufficientResource::Memory),
        ("ephemeral-storage", InsufficientResource::EphemeralStorage),
    ] {
        let cluster = two_nodes();
        two(&cluster, "a", |pod| requests(pod, resource, "600Gi"));
        assert_ne!(node(&cluster, "a-0"), node(&cluster, "a-1"), "{resource}");
        two(&cluster, "b", |pod| requests(pod, resource, "600Gi"));
        assert_eq!(phase(&cluster, "b"), GangPhase::Queued);
        assert_eq!(obstacles(&cluster, "b"), [Obstacle::Resource(lack)]);
        // What is left is enough for smaller ones.
        two(&cluster, "c", |pod| requests(pod, resource, "200Gi"));
        assert_eq!(phase(&cluster, "c"), GangPhase::Reserved);
    }
}

#[test]
fn extended_resource_is_counted_and_reserved() {
    let cluster = unlike();
    let adapter = |pod: &mut Value| {
        pod["spec"]["containers"][0]["resources"]["limits"]["example.com/rdma"] = "1".into();
        requests(pod, "example.com/rdma", "1");
    };
    two(&cluster, "a", adapter);
    assert_eq!([node(&cluster, "a-0"), node(&cluster, "a-1")], ["n", "n"]);
    two(&cluster, "b", adapter);
    assert_eq!(phase(&cluster, "b"), GangPhase::Queued);
    let rdma = InsufficientResource::Other("example.com/rdma".into());
    assert_eq!(obstacles(&cluster, "b"), [Obstacle::Resource(rdma)]);
    for number in 0..2 {
        cluster.gone(&member(&format!("a-{number}"), 1, "a", 2));
    }
    cluster.wait(2);
    assert_eq!([node(&cluster, "b-0"), node(&cluster, "b-1")], ["n", "n"]);
}

#[test]
fn node_selector_and_required_node_affinity_count() {
    let affinity = |expression: Value| {
        json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": [expression]}],
        }}})
    };
    let cases = [
        ("nodeSelector", json!({"disk": "nvme"})),
        ("affinity", affinity(json!({"key": "disk", "operator": "In", "values": ["nvme"]}))),
        ("affinity", affinity(json!({"key": "disk", "operator": "NotIn", "values": ["hdd"]}))),
    ];
    for (field, written) in cases {
        let cluster = unlike();
        let mut pods = members("a", 2, 4);
        pods.iter_mut().for_each(|pod| pod["spec"][field] = written.clone());
        create(&cluster, &pods);
        assert_eq!([node(&cluster, "a-0"), node(&cluster, "a-1")], ["n", "n"]);
        // A second one would have to go to the other node.
        let mut pods = members("b", 2, 4);
        pods.iter_mut().for_each(|pod| pod["spec"][field] = written.clone());
        create(&cluster, &pods);
        assert_eq!(phase(&cluster, "b"), GangPhase::Queued, "{field}");
        create(&cluster, &members("c", 2, 4));
        assert_eq!([node(&cluster, "c-0"), node(&cluster, "c-1")], ["m", "m"]);
    }
}
