//! What a place consists of once its member is bound: what its grant says, if that can be what the member asks for.

use super::*;

/// A member of two of gang `a` that asks for four GPUs in a way in which no grant can tell its containers apart.
fn mixed(name: &str) -> Value {
    let mut pod = member(name, 2, "a", 2);
    let container = |name: &str, gpus: &str| {
        let limits = json!({"nvidia.com/gpu": gpus});
        json!({"name": name, "resources": {"limits": limits}})
    };
    pod["spec"]["initContainers"] = json!([container("fetch", "3")]);
    pod["spec"]["containers"] = json!([container("a", "2"), container("b", "2")]);
    pod
}

/// A member is lost and its replacement comes: it has the place that was kept, as a whole.
fn assert_replaced(cluster: &Cluster, lost: &Value, replacement: Value, node: &str) {
    let uid = replacement["metadata"]["uid"].as_str().unwrap().to_owned();
    cluster.gone(&bound(lost.clone(), node, 1, None));
    cluster.wait(7);
    create(cluster, &[replacement]);
    let (own, kept) = (super::node(cluster, &uid), cluster.free(node));
    assert_eq!(own, node);
    assert_eq!(kept, "", "nobody else gets what is kept");
    write_down(cluster);
    let admitted = admit(cluster, &uid, node);
    assert!(matches!(admitted, Ok(BindStep::Member(_))), "{admitted:?}");
}

#[test]
fn reservation_without_granted_devices_is_kept() {
    let cluster = Cluster::new(Options::default());
    cluster.add("n", &bridged());
    let pods = [mixed("a-0"), mixed("a-1")];
    create(&cluster, &pods);
    bind_all(&cluster, &pods);
    assert_eq!(phase(&cluster, "a"), GangPhase::Bound);
    assert_replaced(&cluster, &pods[1], mixed("a-1b"), "n");
}

#[test]
fn edited_grant_does_not_change_the_reservation() {
    let cluster = Cluster::new(Options::default());
    cluster.add("n", &bridged());
    let pods = members("a", 2, 4);
    create(&cluster, &pods);
    bind_all(&cluster, &pods);
    let mut edited = bound(pods[1].clone(), "n", 1, None);
    let two = crate::fixtures::grant(&"a-1".into(), "n", crate::fixtures::set("4,5"));
    edited["metadata"]["annotations"]["gantry.dev/grant"] = two.into();
    cluster.pod(&edited);
    assert_replaced(&cluster, &edited, member("a-1b", 4, "a", 2), "n");
}

#[test]
fn reservation_with_too_few_devices_is_planned_again() {
    let before = two_nodes();
    let pods = members("a", 2, 8);
    create(&before, &pods);
    for pod in ["a-0", "a-1"] {
        admit(&before, pod, &node(&before, pod)).unwrap();
    }
    commit(&before);
    let statuses = before.store.update(|index| index.take_statuses());
    let (key, mut status) = statuses.into_iter().next_back().unwrap();
    status.decision.as_mut().unwrap().reservations[1].devices[0].ids.truncate(3);

    let after = two_nodes();
    after.store.update(|index| index.stand_down());
    let object = Object {
        uid: "g".into(),
        resource_version: "1".into(),
        ours: true,
        spec: Ok(GangSpec::default()),
        status,
    };
    after.store.update(|index| index.gang_object_seen("default", &key.object_name(), object));
    create(&after, &pods);
    after.store.update(|index| index.lead());
    after.wait(2);
    let nodes = [node(&after, "a-0"), node(&after, "a-1")];
    for (uid, node) in ["a-0", "a-1"].iter().zip(&nodes) {
        admit(&after, uid, node).unwrap();
    }
    write_down(&after);
    for (uid, node) in ["a-0", "a-1"].iter().zip(&nodes) {
        assert_eq!(granted(&admit(&after, uid, node).unwrap()).len(), 8);
    }
}
