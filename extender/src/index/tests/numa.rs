//! Exclusive CPUs and memory under a Topology Manager that refuses pods: granted sets have theirs on the same NUMA node.

use gantry_topology::Machine;
use serde_json::Value;

use super::*;
use crate::fixtures::{bound, facts, switched};

/// Two NUMA nodes with four GPUs and four allocatable CPUs each, of which some are held.
fn numa_node(held: [u32; 2], holders: &[Value]) -> Value {
    let mut parts = switched().into_parts();
    for gpu in &mut parts.gpus {
        gpu.numa = Some(if gpu.index < 4 { "0" } else { "1" }.parse().unwrap());
    }
    let mut node = gpu_node("n", &Machine::new(parts).unwrap());
    node["spec"]["kubelet"] = json!({"policy": "single-numa-node"});
    node["status"]["holders"] = json!(holders);
    node["status"]["cpus"] = json!([
        {"node": 0, "total": 5, "allocatable": 4, "held": held[0]},
        {"node": 1, "total": 5, "allocatable": 4, "held": held[1]},
    ]);
    node
}

fn cluster() -> Cluster {
    let cluster = Cluster::new(Options::default());
    cluster.node("n", 8).inventory(&numa_node([0, 0], &[]));
    cluster
}

/// A Guaranteed pod.
fn guaranteed(name: &str, gpus: u32, cpus: &str) -> Value {
    let mut pod = pod(name, gpus);
    let limits = &mut pod["spec"]["containers"][0]["resources"]["limits"];
    limits["cpu"] = cpus.into();
    limits["memory"] = "1Gi".into();
    pod
}

/// The NUMA node of a grant of one GPU.
fn numa_of(reserved: Result<BindGrant, BindError>) -> u32 {
    granted(&reserved.unwrap()).parse::<u32>().unwrap() / 4
}

fn refusal(cluster: &Cluster, pod: &str) -> String {
    reserve(cluster, pod).unwrap_err().to_string()
}

/// Kubelet reports the CPUs of a pod up to seconds after its grant.
#[test]
fn pods_in_a_row_take_cpus_of_different_nodes() {
    let cluster = cluster();
    for name in ["a", "b", "c"] {
        cluster.pod(&guaranteed(name, 1, "3"));
    }
    assert_eq!(numa_of(reserve(&cluster, "a")), 0);
    assert_eq!(numa_of(reserve(&cluster, "b")), 1);
    let text = "node n: the Topology Manager (single-numa-node) would refuse 1 devices with 3 exclusive CPUs: \
                3 + 3 devices and 1 + 1 CPUs are free by NUMA node";
    assert_eq!(refusal(&cluster, "c"), text);
    // Bound pods count as before, until kubelet's list has them.
    finish(&cluster, "a", Outcome::Bound);
    cluster.pod(&bound(guaranteed("a", 1, "3"), "n", 1, Some("0")));
    assert_eq!(refusal(&cluster, "c"), text);
    cluster.inventory(&numa_node([3, 0], &[holder("n", "a", Some("a"), "0")]));
    assert_eq!(refusal(&cluster, "c"), text);
    // The list of CPUs that it has in spite of its end.
    cluster.gone(&bound(guaranteed("a", 1, "3"), "n", 1, Some("0")));
    assert_eq!(refusal(&cluster, "c"), text);
    cluster.inventory(&numa_node([0, 0], &[]));
    assert_eq!(numa_of(reserve(&cluster, "c")), 0);
}

/// Kubelet's list has the CPUs of such a pod, but never its GPU.
#[test]
fn cpus_of_pod_with_gpu_in_init_container_count_once() {
    let cluster = cluster();
    let mut pod = guaranteed("a", 1, "1");
    pod["spec"]["initContainers"] = pod["spec"]["containers"].clone();
    pod["spec"]["initContainers"][0]["name"] = "init".into();
    pod["spec"]["containers"][0]["resources"]["limits"] = json!({"cpu": "2", "memory": "1Gi"});
    cluster.pod(&bound(pod, "n", 1, Some("0")));
    let mut holder = holder("n", "a", Some("a"), "0");
    holder["provenance"] = "Allocated".into();
    cluster.inventory(&numa_node([2, 4], &[holder])).pod(&guaranteed("b", 1, "2"));
    assert_eq!(numa_of(reserve(&cluster, "b")), 0);
}

/// A pod without GPUs has CPUs of the first NUMA node.
#[test]
fn cpus_of_other_pods_are_not_granted() {
    let cluster = cluster();
    cluster.inventory(&numa_node([2, 0], &[]));
    cluster.pod(&guaranteed("a", 1, "3")).pod(&guaranteed("b", 1, "2500m")).pod(&pod("c", 1));
    assert_eq!(numa_of(reserve(&cluster, "a")), 1);
    // Shared CPUs are no concern of the Topology Manager.
    assert_eq!(numa_of(reserve(&cluster, "b")), 0);
    assert_eq!(numa_of(reserve(&cluster, "c")), 0);
}

/// Both pods are held on the first NUMA node, where only one has its CPUs.
#[test]
fn hold_without_cpus_is_not_granted() {
    let cluster = cluster();
    let now = cluster.now();
    for name in ["a", "b"] {
        let pod = guaranteed(name, 1, "3");
        let request = facts(&pod).request.unwrap();
        cluster.pod(&pod);
        cluster.store.update(|index| index.hold(now, &name.into(), &request, "n"));
    }
    assert_eq!(numa_of(reserve(&cluster, "a")), 0);
    assert_eq!(numa_of(reserve(&cluster, "b")), 1);
}

/// GPUs are free on both NUMA nodes. Only the end of a pod with CPUs helps.
#[test]
fn preemption_counts_the_cpus_of_victims() {
    let cluster = cluster();
    cluster.pod(&guaranteed("asks", 1, "4"));
    let add = |mut pod: Value, gpu: &str, priority: i32| {
        pod["spec"]["priority"] = priority.into();
        cluster.pod(&bound(pod, "n", 1, Some(gpu)));
    };
    let victims = |cpus: &str| {
        let request = facts(&guaranteed("asks", 1, cpus)).request.unwrap();
        let offer = crate::wire::Offer { node: "n".to_owned(), victims: Vec::new(), budgets_broken: 0 };
        let found =
            cluster.store.update(|index| index.preemptable(&"asks".into(), &request, 10, vec![offer]));
        found.into_iter().flat_map(|offer| offer.victims).collect::<Vec<_>>()
    };
    add(guaranteed("high", 1, "3"), "0", 20);
    add(guaranteed("higher", 1, "1"), "4", 20);
    add(pod("without", 1), "5", 0);
    assert_eq!(victims("4"), [""; 0]);
    add(guaranteed("low", 1, "1"), "1", 5);
    assert_eq!(victims("4"), [""; 0]);
    add(guaranteed("lower", 1, "3"), "6", 0);
    assert_eq!(victims("4"), [""; 0]);
    assert_eq!(victims("3"), ["lower"]);
}

/// The devices are free all the time.
#[test]
fn freed_cpus_activate_pods() {
    let cluster = cluster();
    cluster.inventory(&numa_node([4, 4], &[]));
    let pod = guaranteed("a", 1, "3");
    cluster.pod(&pod).park("a", facts(&pod).request.unwrap());
    let taken = || cluster.store.update(|index| index.take_activatable(10)).len();
    assert_eq!(taken(), 0);
    cluster.inventory(&numa_node([1, 4], &[]));
    assert_eq!(taken(), 1);
}

/// GpuNodes of plugins that do not publish CPUs.
#[test]
fn devices_alone_count_without_published_cpus() {
    let cluster = cluster();
    let mut node = numa_node([4, 4], &[]);
    node["status"].as_object_mut().unwrap().remove("cpus");
    cluster.inventory(&node);
    cluster.pod(&guaranteed("a", 1, "3"));
    assert_eq!(numa_of(reserve(&cluster, "a")), 0);
}

/// The same node where kubelet gives memory by NUMA node, 4 GiB of each, and no CPUs.
fn memory_node(held: [u64; 2], holders: &[Value]) -> Value {
    let mut node = numa_node([0, 0], holders);
    let of_node = |number: usize| {
        let group = if held[number] > 0 { json!([number]) } else { json!([]) };
        json!({"node": number, "allocatableBytes": 4u64 << 30, "heldBytes": held[number] << 30, "group": group})
    };
    node["status"].as_object_mut().unwrap().remove("cpus");
    node["status"]["memory"] = json!([of_node(0), of_node(1)]);
    node
}

/// A Guaranteed pod that shares its CPU.
fn with_memory(name: &str, memory: &str) -> Value {
    let mut pod = guaranteed(name, 1, "500m");
    pod["spec"]["containers"][0]["resources"]["limits"]["memory"] = memory.into();
    pod
}

#[test]
fn pods_in_a_row_take_memory_of_different_nodes() {
    let cluster = cluster();
    cluster.inventory(&memory_node([0, 0], &[]));
    for name in ["a", "b", "c"] {
        cluster.pod(&with_memory(name, "3Gi"));
    }
    assert_eq!(numa_of(reserve(&cluster, "a")), 0);
    assert_eq!(numa_of(reserve(&cluster, "b")), 1);
    let text = "node n: the Topology Manager (single-numa-node) would refuse 1 devices with 3072 MiB of memory: \
                3 + 3 devices and 1024 + 1024 MiB of memory are free by NUMA node";
    assert_eq!(refusal(&cluster, "c"), text);
    cluster.pod(&with_memory("d", "1Gi"));
    assert_eq!(numa_of(reserve(&cluster, "d")), 0);
}

#[test]
fn freed_memory_activates_pods() {
    let cluster = cluster();
    cluster.inventory(&memory_node([4, 4], &[]));
    let pod = with_memory("a", "3Gi");
    cluster.pod(&pod).park("a", facts(&pod).request.unwrap());
    let taken = || cluster.store.update(|index| index.take_activatable(10)).len();
    assert_eq!(taken(), 0);
    cluster.inventory(&memory_node([1, 4], &[]));
    assert_eq!(taken(), 1);
}

/// Kubelet gives no memory of a single node of the two from which a container has its memory.
#[test]
fn memory_of_a_group_is_given_to_the_whole_group_only() {
    let cluster = cluster();
    let mut node = memory_node([3, 0], &[]);
    node["spec"]["kubelet"] = json!({"policy": "restricted"});
    for number in 0..2 {
        node["status"]["memory"][number]["group"] = json!([0, 1]);
    }
    cluster.inventory(&node).pod(&with_memory("a", "1Gi"));
    insta::assert_snapshot!(refusal(&cluster, "a"), @"node n: the Topology Manager (restricted) would refuse 1 devices with 1024 MiB of memory: 4 + 4 devices and 1024 + 4096 MiB of memory are free by NUMA node");
    cluster.inventory(&memory_node([3, 0], &[]));
    assert_eq!(numa_of(reserve(&cluster, "a")), 0);
}

#[test]
fn parts_of_cores_are_refused_where_kubelet_gives_whole_ones() {
    let cluster = cluster();
    let mut node = numa_node([0, 0], &[]);
    for number in 0..2 {
        node["status"]["cpus"][number]["core"] = 2.into();
    }
    cluster.inventory(&node).pod(&guaranteed("a", 1, "3")).pod(&guaranteed("b", 1, "2"));
    let text = "node n: the CPU manager (full-pcpus-only) would refuse 3 exclusive CPUs: it gives whole cores, of 2 \
                CPUs each";
    assert_eq!(refusal(&cluster, "a"), text);
    assert_eq!(numa_of(reserve(&cluster, "b")), 0);
}

/// Without kubelet's configuration nothing is known of its Topology Manager until it refuses a pod. From then on sets across NUMA
/// nodes are not granted there, so that a controller does not make refused pods for ever.
#[test]
fn refused_pod_aligns_node_of_unknown_policy() {
    let cluster = Cluster::new(Options::default());
    let mut node = numa_node([0, 0], &[]);
    node["spec"].as_object_mut().unwrap().remove("kubelet");
    node["status"].as_object_mut().unwrap().remove("cpus");
    cluster.node("n", 8).inventory(&node);
    cluster.pod(&pod("five", 5));
    granted(&reserve(&cluster, "five").unwrap());
    let mut failed = bound(pod("five", 5), "n", 1, None);
    failed["status"]["phase"] = "Failed".into();
    failed["status"]["reason"] = "TopologyAffinityError".into();
    cluster.pod(&failed);
    cluster.pod(&pod("again", 5));
    let text = "node n: the Topology Manager (single-numa-node, assumed after a TopologyAffinityError) would refuse 5 devices: 4 + 4 \
                are free by NUMA node";
    assert_eq!(refusal(&cluster, "again"), text);
    // The plugin publishes the same again.
    cluster.inventory(&node);
    assert_eq!(refusal(&cluster, "again"), text);
    cluster.pod(&pod("four", 4));
    granted(&reserve(&cluster, "four").unwrap());
    // Kubelet's configuration is known from here on.
    node["spec"]["kubelet"] = json!({"policy": "none"});
    cluster.inventory(&node);
    cluster.pod(&pod("all", 4));
    granted(&reserve(&cluster, "all").unwrap());
}
