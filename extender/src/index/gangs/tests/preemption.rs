//! Whom a gang has stopped, as the cluster changes.

use super::*;

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

fn reason(cluster: &Cluster, gang: &str) -> std::sync::Arc<str> {
    let view = cluster.store.read(|index| index.gang_view("default", gang));
    view.unwrap().reason
}

#[test]
fn a_gang_for_which_the_cluster_was_too_small_has_others_stopped_once_it_is_large_enough() {
    let cluster = Cluster::new(Options::default());
    full(&cluster, "n1", 0);
    gang(&cluster, "g", 2, 10);
    assert!(reason(&cluster, "g").contains("even if it were empty"));
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
        assert!(!reason(&cluster, "g").contains("even if it were empty"));
        loss(&cluster);
        assert!(reason(&cluster, "g").contains("even if it were empty"));
    }
}

#[test]
fn gangs_that_may_have_nobody_stopped_do_not_keep_others_behind_them_from_it() {
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
    let fronts: [&dyn Fn(&Cluster, &str); 3] = [&never, &hopeless, &in_vain];
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
