//! Kubelets with a Topology Manager that refuses pods, on nodes of two NUMA nodes: whole GPUs on the first node, whole GPUs and
//! MIG devices on the second, replicas on the third. The CPUs and the memory of Guaranteed pods count on the first node.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gantry_api::{GpuNode, NumaNodeCpus, NumaNodeMemory, TopologyManagerPolicy, TopologyManagerScope};
use gantry_e2e::cluster::Node;
use gantry_e2e::hardware::Hardware;
use gantry_e2e::{gantry, until};
use gantry_topology::Machine;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

use super::gangs::restart_extender;
use super::modes::{chosen, refused, write_config};
use crate::bed::Bed;
use crate::pods;

const GPU: &str = "nvidia.com/gpu";
const MIG: &str = "nvidia.com/mig-1g.10gb";
/// The reason with which kubelet fails a pod that its Topology Manager refuses.
const REFUSED: &str = "TopologyAffinityError";

/// Pods in all, unless `GANTRY_PODS` says otherwise: few enough for every commit.
const PODS: usize = 24;
/// Pods of a node that have not ended.
const AT_ONCE: usize = 2;
const END_LIMIT: Duration = Duration::from_secs(300);

const TWICE: &str = "
version: v1
sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}
";

const REFUSING: [TopologyManagerPolicy; 2] =
    [TopologyManagerPolicy::SingleNumaNode, TopologyManagerPolicy::Restricted];
const SCOPES: [TopologyManagerScope; 2] = [TopologyManagerScope::Container, TopologyManagerScope::Pod];

/// Pods that come and go on three kinds of devices, under both policies in both scopes: kubelet admits each.
pub(super) async fn granted_pods_are_never_refused(bed: &Bed) -> Result<()> {
    let outcome = pods_come_and_go(bed).await;
    restore_kubelets(bed).await?;
    outcome
}

async fn pods_come_and_go(bed: &Bed) -> Result<()> {
    let count = pods::count(PODS)?;
    let served = serve(bed).await?;
    let mut random = StdRng::seed_from_u64(3);
    let mut round = 0;
    for policy in REFUSING {
        for scope in SCOPES {
            align(bed, &served, policy, scope).await?;
            let namespace = format!("e2e-{}-{}", policy.as_str(), scope_name(scope));
            let api = bed.namespace(&namespace).await?;
            list_is_read(&api, &served).await?;
            if policy == TopologyManagerPolicy::SingleNumaNode {
                larger_set_waits(bed, &api, &namespace, &served).await?;
                if scope == TopologyManagerScope::Container {
                    resources_on_two_numa_nodes_wait(bed, &api, &namespace, served[1].node).await?;
                }
            }
            // The remainder goes to the first rounds.
            let pods = (count + 3 - round) / 4;
            let mut left: Vec<usize> =
                (0..served.len()).map(|place| (pods + served.len() - 1 - place) / served.len()).collect();
            let waves = served.iter().zip(&mut left).map(|(node, left)| {
                let seed = random.random();
                node.wave(&api, *left, (policy, scope), StdRng::seed_from_u64(seed))
            });
            futures::future::try_join_all(waves).await?;
            clear(&api).await?;
            round += 1;
        }
    }
    Ok(())
}

/// Runs a pod without devices on each node. To pods of its first list after a restart kubelet applies the devices of pods that
/// have gone since; it drops these only when it has read that list.
async fn list_is_read(api: &Api<Pod>, served: &[Served<'_>]) -> Result<()> {
    for Served { node, .. } in served {
        let name = format!("first-{}", node.name());
        pods::run(api, &pods::pinned(&name, 0, node.name())?).await?;
        api.delete(&name, &DeleteParams::default().grace_period(0)).await?;
    }
    Ok(())
}

/// Removes the pods of a round.
async fn clear(api: &Api<Pod>) -> Result<()> {
    api.delete_collection(&DeleteParams::default(), &ListParams::default()).await?;
    until("the pods of the round gone", END_LIMIT, async || {
        match api.list(&ListParams::default()).await.map_err(|error| error.to_string())?.items.len() {
            0 => Ok(()),
            some => Err(format!("{some} are there")),
        }
    })
    .await?;
    Ok(())
}

/// Without the policy in its `GpuNode` a set across both NUMA nodes is granted once, and kubelet refuses the pod. The next such pod
/// waits.
pub(super) async fn refused_pod_aligns_node_of_unknown_policy(bed: &Bed) -> Result<()> {
    let outcome = refused_by_kubelet(bed).await;
    restore_kubelets(bed).await?;
    // The extender's assumption about the node ends with its process.
    restart_extender(bed, &[]).await?;
    outcome
}

async fn refused_by_kubelet(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let api = bed.namespace("e2e-unpublished").await?;
    let node = &bed.cluster().nodes()[0];
    node.reconfigure_kubelet(&[("topologyManagerPolicy", TopologyManagerPolicy::SingleNumaNode.as_str())])
        .await?;
    bed.cluster().wait_until_ready().await?;
    gpus.counts(bed.cluster(), node.name(), &[(GPU, 8)]).await?;
    api.create(&PostParams::default(), &chosen("five", GPU, 5, node.name())?).await?;
    until("the refusal of kubelet", pods::RUN_LIMIT, async || {
        let pod = api.get("five").await.map_err(|error| error.to_string())?;
        match pods::said(&pod) {
            said if said.contains(REFUSED) => Ok(()),
            said => Err(format!("{}: {said}", pods::phase(&pod))),
        }
    })
    .await?;
    let again = chosen("again", GPU, 5, node.name())?;
    refused(bed, &api, "e2e-unpublished", &again, "assumed after a TopologyAffinityError").await?;
    pods::run(&api, &chosen("four", GPU, 4, node.name())?).await?;
    clear(&api).await
}

/// Kubelet's record of exclusive CPUs. Kubelet does not start with a record of another policy.
const CPU_STATE: &str = "/var/lib/kubelet/cpu_manager_state";
/// Kubelet's record of the memory of containers. Kubelet does not start with a record of another policy.
const MEMORY_STATE: &str = "/var/lib/kubelet/memory_manager_state";

/// All CPUs of the first NUMA node are reserved for the system: a Guaranteed pod has its CPU on the second one, and kubelet
/// refuses it with GPUs of the first.
pub(super) async fn gpus_are_granted_near_exclusive_cpus(bed: &Bed) -> Result<()> {
    let outcome = near_exclusive_cpus(bed).await;
    let fields = [("cpuManagerPolicy", json!("none")), ("reservedSystemCPUs", json!(""))];
    reconfigure(bed, CPU_STATE, &fields).await?;
    restore_kubelets(bed).await?;
    outcome
}

async fn near_exclusive_cpus(bed: &Bed) -> Result<()> {
    let namespace = "e2e-exclusive-cpus";
    let api = bed.namespace(namespace).await?;
    let node = &bed.cluster().nodes()[0];
    let [first, second] = [cpus_of(node, 0).await?, cpus_of(node, 1).await?];
    ensure!(!second.is_empty(), "NUMA node 1 has no CPU: the machine has only {first:?}");
    // Kubelet sees the CPUs of this machine, and the plugin those of the simulated one.
    for (numa, cpus) in [(0, &first), (1, &second)] {
        let list = format!("hardware/root/sys/devices/system/node/node{numa}/cpulist");
        std::fs::write(node.sandbox().folder().join(list), cpus.join(","))?;
    }
    let fields = [
        ("cpuManagerPolicy", json!("static")),
        ("reservedSystemCPUs", json!(first.join(","))),
        ("topologyManagerPolicy", json!(TopologyManagerPolicy::SingleNumaNode.as_str())),
    ];
    serve_under(bed, CPU_STATE, &fields).await?;
    let held = async |held: u32| {
        let count = |cpus: &[String]| u32::try_from(cpus.len()).unwrap_or(u32::MAX);
        let expected = [
            NumaNodeCpus { node: 0, total: count(&first), ..NumaNodeCpus::default() },
            NumaNodeCpus { node: 1, total: count(&second), allocatable: count(&second), held, core: None },
        ];
        until(format!("{held} exclusive CPUs published"), pods::RUN_LIMIT, async || {
            let node = Api::<GpuNode>::all(bed.client()).get(node.name()).await;
            match node.map_err(|error| error.to_string())?.status.unwrap_or_default().cpus {
                cpus if cpus == expected => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await
    };
    held(0).await?;
    pods::run(&api, &pods::pinned("first", 0, node.name())?).await?;
    let one = guaranteed("one", 2, node.name())?;
    let one = pods::run(&api, &one).await?;
    on_numa_node(bed, &one, 1).await?;
    held(1).await?;
    api.delete("one", &DeleteParams::default()).await?;
    held(0).await?;
    // The GPUs of the first NUMA node are free, and those of the second are not.
    for (name, numa) in [("lower", 0), ("upper", 1)] {
        let pod = pods::run(&api, &chosen(name, GPU, 4, node.name())?).await?;
        on_numa_node(bed, &pod, numa).await?;
    }
    api.delete("lower", &DeleteParams::default()).await?;
    until("the lower GPUs free", END_LIMIT, async || match api.get_opt("lower").await {
        Ok(None) => Ok(()),
        other => Err(format!("{:?}", other.map(|pod| pod.is_some()))),
    })
    .await?;
    let reason =
        "(single-numa-node) would refuse 1 devices with 1 exclusive CPUs: no NUMA nodes have all free";
    refused(bed, &api, namespace, &guaranteed("two", 1, node.name())?, reason).await?;
    api.delete("upper", &DeleteParams::default()).await?;
    let two = pods::running(&api, "two").await?;
    on_numa_node(bed, &two, 1).await?;
    clear(&api).await
}

/// A pod without GPUs has most of the memory of the first NUMA node. A pod with GPUs that needs as much gets those of the
/// second, and the next one waits.
pub(super) async fn gpus_are_granted_near_memory(bed: &Bed) -> Result<()> {
    let outcome = near_memory(bed).await;
    let fields = [("memoryManagerPolicy", json!("None")), ("reservedMemory", json!([]))];
    reconfigure(bed, MEMORY_STATE, &fields).await?;
    restore_kubelets(bed).await?;
    outcome
}

async fn near_memory(bed: &Bed) -> Result<()> {
    let namespace = "e2e-numa-memory";
    let api = bed.namespace(namespace).await?;
    let node = &bed.cluster().nodes()[0];
    let fields = [
        ("memoryManagerPolicy", json!("Static")),
        // As much as kubelet evicts for.
        ("reservedMemory", json!([{ "numaNode": 0, "limits": { "memory": "1Mi" } }])),
        ("topologyManagerPolicy", json!(TopologyManagerPolicy::SingleNumaNode.as_str())),
    ];
    serve_under(bed, MEMORY_STATE, &fields).await?;
    let held = async |held: [u64; 2]| {
        until(format!("{held:?} MiB of memory published"), pods::RUN_LIMIT, async || {
            let node = Api::<GpuNode>::all(bed.client()).get(node.name()).await;
            let memory = node.map_err(|error| error.to_string())?.status.unwrap_or_default().memory;
            let is_so = |(number, bytes): (u32, u64)| {
                let used = if bytes > 0 { vec![number] } else { Vec::new() };
                let is_of = |node: &NumaNodeMemory| (node.node, node.held_bytes) == (number, bytes << 20);
                memory.iter().any(|node| is_of(node) && node.group == used)
            };
            match memory.len() == 2 && (0..).zip(held).all(is_so) {
                true => Ok(memory),
                false => Err(format!("{memory:?}")),
            }
        })
        .await
    };
    let known = held([0, 0]).await?;
    let least = known.iter().map(|node| node.allocatable_bytes >> 20).min().unwrap_or_default();
    let most = least * 2 / 3;
    let pod = |name: &str, gpus: usize| {
        let mut pod = guaranteed(name, gpus, node.name())?;
        let containers = pod.spec.iter_mut().flat_map(|spec| &mut spec.containers);
        for limits in containers.filter_map(|container| container.resources.as_mut()?.limits.as_mut()) {
            limits.insert("memory".to_owned(), Quantity(format!("{most}Mi")));
            limits.insert("cpu".to_owned(), Quantity("100m".to_owned()));
        }
        anyhow::Ok(pod)
    };
    pods::run(&api, &pod("other", 0)?).await?;
    held([most, 0]).await?;
    let one = pods::run(&api, &pod("one", 2)?).await?;
    on_numa_node(bed, &one, 1).await?;
    held([most, most]).await?;
    let reason = format!(
        "(single-numa-node) would refuse 1 devices with {most} MiB of memory: no NUMA nodes have all free"
    );
    refused(bed, &api, namespace, &pod("two", 1)?, &reason).await?;
    api.delete("other", &DeleteParams::default()).await?;
    let two = pods::running(&api, "two").await?;
    on_numa_node(bed, &two, 0).await?;
    clear(&api).await
}

/// Serves the GPUs of the first node, whose plugin reads kubelet's configuration, under a kubelet with these fields.
async fn serve_under(bed: &Bed, state: &str, fields: &[(&str, Value)]) -> Result<()> {
    let gpus = bed.gpus().await?;
    let node = &bed.cluster().nodes()[0];
    let reads = format!("--kubelet-config={}", node.kubelet_config().display());
    gpus.serve(bed.cluster(), node.name(), None, &[reads], &[(GPU, 8)]).await?;
    reconfigure(bed, state, fields).await?;
    bed.cluster().wait_until_ready().await?;
    gpus.counts(bed.cluster(), node.name(), &[(GPU, 8)]).await
}

/// Restarts kubelet of the first node with other fields, and without the record of a manager.
async fn reconfigure(bed: &Bed, state: &str, fields: &[(&str, Value)]) -> Result<()> {
    let node = &bed.cluster().nodes()[0];
    node.exec(&["rm", "-f", state]).await?;
    Ok(node.reconfigure_kubelet(fields).await?)
}

/// The CPUs of a NUMA node.
async fn cpus_of(node: &Node, numa: u32) -> Result<Vec<String>> {
    let names = node.exec(&["ls", &format!("/sys/devices/system/node/node{numa}")]).await?;
    let numbers = names.split_whitespace().filter_map(|name| name.strip_prefix("cpu"));
    Ok(numbers.filter(|number| number.parse::<u32>().is_ok()).map(str::to_owned).collect())
}

/// A Guaranteed pod with GPUs and one CPU, on a node.
fn guaranteed(name: &str, gpus: usize, node: &str) -> Result<Pod> {
    let mut pod = chosen(name, GPU, gpus, node)?;
    let spec = pod.spec.as_mut().context("a pod has a spec")?;
    for container in &mut spec.containers {
        let limits = container.resources.get_or_insert_default().limits.get_or_insert_default();
        for (resource, amount) in [("cpu", "1"), ("memory", "64Mi")] {
            limits.insert(resource.to_owned(), serde_json::from_value(amount.into())?);
        }
    }
    Ok(pod)
}

/// Checks that a pod has GPUs of one NUMA node: four each, in the order of the GPUs.
async fn on_numa_node(bed: &Bed, pod: &Pod, numa: u8) -> Result<()> {
    let published = Api::<GpuNode>::all(bed.client()).get(pods::node(pod)).await?;
    let devices = published.status.unwrap_or_default().devices;
    let (granted, held) = (pods::granted(pod)?, pods::held(bed.cluster(), pod, "main").await?);
    ensure!(granted == held, "granted {granted:?}, held {held:?}");
    let mut of_pod = devices.iter().filter(|device| granted.contains(device.id.as_str()));
    ensure!(of_pod.all(|device| device.gpu / 4 == numa), "{granted:?} are not of NUMA node {numa}");
    Ok(())
}

/// A node and what it serves.
struct Served<'a> {
    node: &'a Node,
    /// Devices of each resource on each of its two NUMA nodes.
    halves: &'static [(&'static str, usize)],
}

/// The devices of each container, by resource as in [`Served::halves`].
type Sizes = Vec<Vec<usize>>;

/// Starts the plugins with whole GPUs, MIG devices beside them, and replicas, and with kubelet's configuration file.
async fn serve(bed: &Bed) -> Result<[Served<'_>; 3]> {
    let gpus = bed.gpus().await?;
    let cluster = bed.cluster();
    let [whole, mig, shared] = cluster.nodes() else {
        anyhow::bail!("{} nodes", cluster.nodes().len());
    };
    let reads = |node: &Node| format!("--kubelet-config={}", node.kubelet_config().display());
    gpus.serve(cluster, whole.name(), None, &[reads(whole)], &[(GPU, 8)]).await?;
    let hardware = Hardware::install_in(mig, &half_partitioned(mig)?, "aligned")?;
    let args = [reads(mig), "--mig-strategy=mixed".to_owned()];
    gpus.serve(cluster, mig.name(), Some(&hardware), &args, &[(GPU, 4), (MIG, 28)]).await?;
    let config = write_config(cluster, shared.name(), TWICE)?;
    let args = [reads(shared), format!("--config-file={}", config.display())];
    gpus.serve(cluster, shared.name(), None, &args, &[(GPU, 8)]).await?;
    Ok([
        Served { node: whole, halves: &[(GPU, 4)] },
        Served { node: mig, halves: &[(GPU, 2), (MIG, 14)] },
        Served { node: shared, halves: &[(GPU, 4)] },
    ])
}

/// The file of a machine with two whole GPUs and two in MIG devices on each NUMA node.
fn half_partitioned(node: &Node) -> Result<PathBuf> {
    let text = std::fs::read_to_string(gantry::machine_file("hgx-h100-mig"))?;
    let mut parts = gantry_topology::read(&text)?.into_parts();
    for gpu in parts.gpus.iter_mut().filter(|gpu| gpu.index % 4 < 2) {
        if let Some(mig) = &mut gpu.mig {
            mig.enabled = false;
            mig.instances.clear();
        }
    }
    let text = gantry_topology::read::to_yaml(&Machine::new(parts)?)?;
    let file = node.sandbox().folder().join("half-partitioned.yaml");
    std::fs::write(&file, text)?;
    Ok(file)
}

/// Restarts the kubelets with a policy and a scope, which their running plugins find and publish.
async fn align(
    bed: &Bed,
    served: &[Served<'_>],
    policy: TopologyManagerPolicy,
    scope: TopologyManagerScope,
) -> Result<()> {
    let fields = [("topologyManagerPolicy", policy.as_str()), ("topologyManagerScope", scope_name(scope))];
    let restarts = served.iter().map(|served| served.node.reconfigure_kubelet(&fields));
    futures::future::try_join_all(restarts).await?;
    bed.cluster().wait_until_ready().await?;
    let gpus = bed.gpus().await?;
    let published: Api<GpuNode> = Api::all(bed.client());
    for Served { node, halves } in served {
        let offered: Vec<(&str, usize)> =
            halves.iter().map(|(resource, half)| (*resource, 2 * half)).collect();
        gpus.counts(bed.cluster(), node.name(), &offered).await?;
        until(format!("{} published by {}", policy.as_str(), node.name()), pods::RUN_LIMIT, async || {
            let kubelet = published.get(node.name()).await.map_err(|error| error.to_string())?.spec.kubelet;
            match &kubelet {
                Some(known) if known.policy == policy && known.scope == scope => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await?;
    }
    Ok(())
}

async fn restore_kubelets(bed: &Bed) -> Result<()> {
    let fields = [
        ("topologyManagerPolicy", TopologyManagerPolicy::None.as_str()),
        ("topologyManagerScope", scope_name(TopologyManagerScope::Container)),
    ];
    let nodes = bed.cluster().nodes().iter();
    futures::future::try_join_all(nodes.map(|node| node.reconfigure_kubelet(&fields))).await?;
    Ok(())
}

/// A container of more devices than a NUMA node has is not bound, and the reason names the policy.
async fn larger_set_waits(bed: &Bed, api: &Api<Pod>, namespace: &str, served: &[Served<'_>]) -> Result<()> {
    for Served { node, halves } in served {
        let (_, half) = halves[0];
        let name = format!("larger-{}", node.name());
        let pod = chosen(&name, GPU, half + 1, node.name())?;
        let reason =
            format!("(single-numa-node) would refuse {} devices: {half} + {half} are free", half + 1);
        refused(bed, api, namespace, &pod, &reason).await?;
        api.delete(&name, &DeleteParams::default()).await?;
    }
    Ok(())
}

/// GPUs are free on the second NUMA node only, and MIG devices on the first: a container of both waits, and the reason names
/// both.
async fn resources_on_two_numa_nodes_wait(
    bed: &Bed,
    api: &Api<Pod>,
    namespace: &str,
    node: &Node,
) -> Result<()> {
    // Kubelet takes the lowest NUMA node.
    for (name, resource, count) in [("gpus", GPU, 2), ("lower", MIG, 14), ("upper", MIG, 14)] {
        pods::run(api, &chosen(name, resource, count, node.name())?).await?;
    }
    api.delete("lower", &DeleteParams::default().grace_period(0)).await?;
    let mut both = chosen("both", GPU, 1, node.name())?;
    for container in both.spec.iter_mut().flat_map(|spec| &mut spec.containers) {
        let limits = container.resources.get_or_insert_default().limits.get_or_insert_default();
        limits.insert(MIG.to_owned(), Quantity("1".to_owned()));
    }
    let reason = format!(
        "(single-numa-node) would refuse 1 {GPU} and 1 {MIG} together: 0 + 2 and 14 + 0 are free by NUMA node"
    );
    refused(bed, api, namespace, &both, &reason).await?;
    api.delete("gpus", &DeleteParams::default().grace_period(0)).await?;
    pods::running(api, "both").await?;
    clear(api).await
}

impl Served<'_> {
    /// Runs so many pods on the node, some at a time, and checks that kubelet admitted each.
    async fn wave(
        &self,
        api: &Api<Pod>,
        pods: usize,
        (policy, scope): (TopologyManagerPolicy, TopologyManagerScope),
        mut random: StdRng,
    ) -> Result<()> {
        let of_node = ListParams::default().labels(&format!("node={}", self.node.name()));
        let alive = async || -> Result<usize, String> {
            let all = api.list(&of_node).await.map_err(|error| error.to_string())?;
            Ok(all.iter().filter(|pod| !matches!(pods::phase(pod), "Succeeded" | "Failed")).count())
        };
        for number in 0..pods {
            let sizes = self.sizes(&mut random, policy, scope);
            let tenths = random.random_range(1..15);
            let pod = self.pod(number, &sizes, f64::from(tenths) / 10.0)?;
            until("fewer pods at once", END_LIMIT, async || match alive().await? {
                some if some < AT_ONCE => Ok(()),
                some => Err(format!("{some} on {}", self.node.name())),
            })
            .await?;
            api.create(&PostParams::default(), &pod).await?;
        }
        until(format!("pods of {} ended", self.node.name()), END_LIMIT, async || match alive().await? {
            0 => Ok(()),
            some => Err(format!("{some} are there")),
        })
        .await?;
        let all = api.list(&of_node).await?.items;
        ensure!(all.len() == pods, "{} of {pods} pods are there", all.len());
        for pod in &all {
            let name = pod.metadata.name.as_deref().unwrap_or_default();
            let said = pods::said(pod);
            let is_admitted = pods::phase(pod) == "Succeeded" && !said.contains(REFUSED);
            ensure!(is_admitted, "{name}: {said}; pods of the node:\n{}", story(&all));
            ensure!(pods::granted(pod).is_ok(), "{name} ran without a grant");
        }
        Ok(())
    }

    /// Devices of one or two containers: as many as the policy can admit on an empty node. Devices of several resources that
    /// are aligned together need one NUMA node each, or two each.
    fn sizes(
        &self,
        random: &mut StdRng,
        policy: TopologyManagerPolicy,
        scope: TopologyManagerScope,
    ) -> Sizes {
        let is_wide = policy == TopologyManagerPolicy::Restricted && random.random_ratio(1, 3);
        let sure = random.random_range(0..self.halves.len());
        let mut all: Vec<usize> = Vec::new();
        for (place, (_, half)) in self.halves.iter().enumerate() {
            all.push(match (place == sure || random.random_ratio(2, 3), is_wide) {
                (false, _) => 0,
                (true, false) => random.random_range(1..=*half),
                (true, true) => random.random_range(half + 1..=2 * half),
            });
        }
        if !random.random_ratio(1, 3) {
            return vec![all];
        }
        let mut second: Vec<usize> = Vec::new();
        for ((_, half), first) in self.halves.iter().zip(&mut all) {
            second.push(match scope {
                TopologyManagerScope::Container => random.random_range(0..=(*half).min(2 * half - *first)),
                TopologyManagerScope::Pod => random.random_range(0..=*first),
            });
            if scope == TopologyManagerScope::Pod {
                *first -= second.last().copied().unwrap_or(0);
            }
        }
        let with_devices = |sizes: &Vec<usize>| sizes.iter().sum::<usize>() > 0;
        [all, second].into_iter().filter(with_devices).collect()
    }

    /// A pod of the node with a container for each size, which ends by itself.
    fn pod(&self, number: usize, sizes: &[Vec<usize>], seconds: f64) -> Result<Pod> {
        let mut pod = chosen(&format!("{}-{number}", self.node.name()), GPU, 0, self.node.name())?;
        pod.metadata.labels = Some([("node".to_owned(), self.node.name().to_owned())].into());
        let spec = pod.spec.as_mut().context("a pod has a spec")?;
        spec.restart_policy = Some("Never".to_owned());
        let first = spec.containers.pop().context("a pod has a container")?;
        for (place, sizes) in sizes.iter().enumerate() {
            let mut container = first.clone();
            container.name = format!("c{place}");
            container.command = Some(vec!["sleep".to_owned(), seconds.to_string()]);
            let asked = self.halves.iter().zip(sizes).filter(|(_, size)| **size > 0);
            let limits =
                asked.map(|((resource, _), size)| ((*resource).to_owned(), Quantity(size.to_string())));
            container.resources.get_or_insert_default().limits = Some(limits.collect());
            spec.containers.push(container);
        }
        Ok(pod)
    }
}

/// The pods by the time of their start, with what each asked for and was granted.
fn story(pods: &[Pod]) -> String {
    let mut lines: Vec<String> = pods
        .iter()
        .map(|pod| {
            let status = pod.status.as_ref();
            let start = status.and_then(|status| status.start_time.as_ref()).map(|time| time.0.to_string());
            let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
            let limits = containers.filter_map(|container| container.resources.as_ref()?.limits.clone());
            let size = |limits: BTreeMap<String, Quantity>| {
                [GPU, MIG]
                    .map(|resource| limits.get(resource).map_or_else(String::new, |size| size.0.clone()))
            };
            let sizes: Vec<[String; 2]> = limits.map(size).collect();
            let name = pod.metadata.name.as_deref().unwrap_or_default();
            let granted = pods::granted(pod).unwrap_or_default();
            format!("{} {name} {sizes:?} {} {granted:?}", start.unwrap_or_default(), pods::phase(pod))
        })
        .collect();
    lines.sort();
    lines.join("\n")
}

fn scope_name(scope: TopologyManagerScope) -> &'static str {
    match scope {
        TopologyManagerScope::Container => "container",
        TopologyManagerScope::Pod => "pod",
    }
}
