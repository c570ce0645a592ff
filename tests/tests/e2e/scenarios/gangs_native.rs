//! Gangs by Kubernetes' own PodGroup, which pods name in `spec.schedulingGroup`: with kube-scheduler as it comes, to
//! which they are pods like any other, and with the feature by which it tries all pods of a group in one go
//! (`GenericWorkload`, off by default in 1.37). In 1.35 a group is part of a Workload, which pods name in
//! `spec.workloadRef`.

use anyhow::{Context, Result, ensure};
use gantry_api::names::GANG_MIN_ANNOTATION;
use gantry_api::{Gang, GangPhase, Reason};
use gantry_e2e::{COMPOSITE_GATES, Feature, Kubernetes, Program};
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use serde_json::{Value, json};

use super::gangs_integrations::{Expected, apply, phase, stand};
use super::gangs_preempt::{IMPORTANT, make_class};
use crate::bed::Bed;
use crate::gangs::{self, Scene};
use crate::{pods, records};

const SCHEDULER: &str = "kube-scheduler";
const CONTROLLERS: &str = "kube-controller-manager";

pub(super) async fn kubernetes_groups_are_gangs(bed: &Bed) -> Result<()> {
    let condition = two_groups(bed, "e2e-gangs-native").await?;
    ensure!(condition.is_empty(), "kube-scheduler as it comes knows of groups: {condition}");
    Ok(())
}

pub(super) async fn pod_groups_are_gangs_with_feature_gate(bed: &Bed) -> Result<()> {
    let groups = ["GenericWorkload=true"];
    let condition =
        with_feature_gates(bed, &[SCHEDULER], &groups, two_groups(bed, "e2e-gangs-cycle")).await?;
    ensure!(condition == "True", "kube-scheduler did not try the group as a whole: {condition}");
    Ok(())
}

/// kube-scheduler's preemption for groups counts the victims as gone in its memory only, and gets no node from the
/// extender. What makes room is Gantry's preemption.
pub(super) async fn only_gantry_preempts_for_a_pod_group(bed: &Bed) -> Result<()> {
    let groups = ["GenericWorkload=true"];
    with_feature_gates(bed, &[SCHEDULER], &groups, preempting_group(bed, "e2e-gangs-native-preempt")).await
}

/// A group that has to be on one node: kube-scheduler tries each node as a placement, in any order, and calls the
/// extender with that node alone. Two of four members are needed, so that it calls for several in each placement.
pub(super) async fn pod_group_with_many_placements_is_bound(bed: &Bed) -> Result<()> {
    let gates = ["GenericWorkload=true", "TopologyAwareWorkloadScheduling=true"];
    with_feature_gates(bed, &[SCHEDULER], &gates, group_on_one_node(bed, "e2e-gangs-placements")).await
}

async fn group_on_one_node(bed: &Bed, namespace: &str) -> Result<()> {
    let scene = Scene::set(bed, namespace).await?;
    let groups = Groups::of_cluster()?;
    let mut group = groups.group("near", 2);
    group["spec"]["schedulingConstraints"] = json!({ "topology": [{ "key": "kubernetes.io/hostname" }] });
    apply(bed, &scene, &group).await?;
    for number in 0..4 {
        apply(bed, &scene, &groups.member("near", number, 2)?).await?;
    }
    let near = groups.expected("near", 2);
    stand(&scene, &[near], |gang| {
        let status = gang.status.clone().unwrap_or_default();
        status.phase == GangPhase::Bound && status.bound == 4
    })
    .await?;
    let names: Vec<String> = (0..4).map(|number| format!("near-{number}")).collect();
    scene.run_on_grants(&names).await?;
    let mut nodes = Vec::new();
    for name in &names {
        nodes.push(pods::node(&scene.pods.get(name).await?).to_owned());
    }
    nodes.dedup();
    ensure!(nodes.len() == 1, "the group is on {nodes:?}");
    let condition = groups.condition(bed, namespace, "near").await?;
    ensure!(condition == "True", "kube-scheduler did not try the group as a whole: {condition}");
    records::ensure_no_device_twice(&records::read(bed.cluster())?)
}

/// To kube-scheduler as it comes pods of a CompositePodGroup are pods like any other.
pub(super) async fn composite_pod_group_is_one_gang(bed: &Bed) -> Result<()> {
    tree_of_groups(bed, "e2e-gangs-tree").await
}

/// kube-scheduler tries all pods of the tree in one go.
pub(super) async fn composite_pod_group_is_one_gang_with_gates(bed: &Bed) -> Result<()> {
    let gates = [["GenericWorkload=true"].as_slice(), &COMPOSITE_GATES].concat();
    with_feature_gates(bed, &[SCHEDULER], &gates, tree_of_groups(bed, "e2e-gangs-tree-cycle")).await
}

/// Nodes of eight, eight and four GPUs, of which a pod has eight. A CompositePodGroup needs both of its PodGroups: two
/// pods of four GPUs, and one of eight. Either would fit, and no pod of them is bound until both do. Of another one
/// any of two groups is needed, and the one that fits is bound.
async fn tree_of_groups(bed: &Bed, namespace: &str) -> Result<()> {
    const TREE: &str = "CompositePodGroup/";
    const DECIDED_BY: &str = "spec.schedulingPolicy.gang.minGroupCount of CompositePodGroup";
    let scene = Scene::set(bed, namespace).await?;
    let groups = Groups::of_cluster()?;
    // Nothing reads the Workload.
    let of_workload = |name: &str| json!({ "workloadName": "none", "templateName": name });
    let child = |name: &str, min: u32, parent: &str| {
        let mut group = groups.group(name, min);
        group["spec"]["parentCompositePodGroupName"] = parent.into();
        group["spec"]["workloadRef"] = of_workload(name);
        group
    };
    let tree = |name: &str, min: u32| {
        json!({
            "apiVersion": "scheduling.k8s.io/v1alpha3",
            "kind": "CompositePodGroup",
            "metadata": { "name": name },
            "spec": {
                "schedulingPolicy": { "gang": { "minGroupCount": min } },
                "workloadRef": of_workload(name),
            },
        })
    };
    pods::run(&scene.pods, &pods::sleeper("holder", 8)?).await?;
    apply(bed, &scene, &tree("both", 2)).await?;
    for (name, min, gpus) in [("half", 2, 4), ("whole", 1, 8)] {
        apply(bed, &scene, &child(name, min, "both")).await?;
        for number in 0..usize::try_from(min)? {
            apply(bed, &scene, &groups.member(name, number, gpus)?).await?;
        }
    }
    let both: Expected = ("PodGroup", "CompositePodGroup/both", 3, DECIDED_BY);
    stand(&scene, &[both], |gang| phase(gang) == GangPhase::Queued).await?;
    let names = ["half-0", "half-1", "whole-0"].map(str::to_owned);
    for name in &names {
        ensure!(pods::node(&scene.pods.get(name).await?).is_empty(), "{name} runs without the rest");
    }
    scene.delete("holder").await?;
    stand(&scene, &[both], |gang| phase(gang) == GangPhase::Bound).await?;
    scene.run_on_grants(&names).await?;
    // 4 GPUs are left.
    apply(bed, &scene, &tree("any", 1)).await?;
    for (name, min, gpus) in [("large", 1, 8), ("small", 2, 2)] {
        apply(bed, &scene, &child(name, min, "any")).await?;
        for number in 0..usize::try_from(min)? {
            apply(bed, &scene, &groups.member(name, number, gpus)?).await?;
        }
    }
    let any: Expected = ("PodGroup", "CompositePodGroup/any", 2, DECIDED_BY);
    let is_so = |gang: &Gang| {
        let status = gang.status.clone().unwrap_or_default();
        status.phase == GangPhase::Bound && status.bound == status.min && status.name.starts_with(TREE)
    };
    stand(&scene, &[both, any], is_so).await?;
    scene.run_on_grants(&["small-0".to_owned(), "small-1".to_owned()]).await?;
    ensure!(pods::node(&scene.pods.get("large-0").await?).is_empty(), "large-0 has GPUs that others hold");
    records::ensure_no_device_twice(&records::read(bed.cluster())?)
}

/// Without a mode in the PodGroup the API server writes `single`.
pub(super) async fn pod_group_members_are_evicted_singly(bed: &Bed) -> Result<()> {
    let groups = Groups::of_cluster()?;
    let scene = Scene::set(bed, "e2e-gangs-native-single").await?;
    evict_from(bed, &scene, &groups.group("low", 2), 1).await?;
    let is_so = |gang: &Gang| match gang.status.as_ref() {
        Some(status) if status.name == "low" => status.phase == GangPhase::Degraded && status.bound == 1,
        _ => phase(gang) == GangPhase::Bound,
    };
    stand(&scene, &[groups.expected("low", 2), groups.expected("urgent", 1)], is_so).await
}

pub(super) async fn pod_group_is_evicted_whole_on_request(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-native-all").await?;
    let mut group = Groups::of_cluster()?.group("low", 2);
    group["spec"]["disruptionMode"] = json!({ "all": {} });
    evict_from(bed, &scene, &group, 0).await
}

/// Group `low` has both nodes of eight GPUs. An important pod of eight has members evicted; so many are left.
async fn evict_from(bed: &Bed, scene: &Scene<'_>, low: &Value, left: usize) -> Result<()> {
    let groups = Groups::of_cluster()?;
    make_class(bed).await?;
    apply(bed, scene, low).await?;
    for number in 0..2 {
        apply(bed, scene, &groups.member("low", number, 8)?).await?;
    }
    let names = ["low-0".to_owned(), "low-1".to_owned()];
    scene.run_on_grants(&names).await?;
    let mut group = groups.group("urgent", 1);
    group["spec"]["priorityClassName"] = IMPORTANT.into();
    apply(bed, scene, &group).await?;
    let mut pod = groups.member("urgent", 0, 8)?;
    pod["spec"]["priorityClassName"] = IMPORTANT.into();
    apply(bed, scene, &pod).await?;
    scene.run_on_grants(&["urgent-0".to_owned()]).await?;
    let mut found = Vec::new();
    for name in &names {
        // The pods of one eviction end at different times.
        let pod = scene.pods.get_opt(name).await?;
        found.extend(pod.filter(|pod| pod.metadata.deletion_timestamp.is_none()));
    }
    ensure!(found.len() == left, "{left} of {names:?} should be left: {found:?}");
    records::ensure_no_device_twice(&records::read(bed.cluster())?)
}

/// kube-controller-manager makes a PodGroup for every Job. One of `spec.scheduling` is a gang; that of any other Job is
/// basic: its pods are single, or a gang by the Job's own annotations.
pub(super) async fn job_with_spec_scheduling_is_a_gang(bed: &Bed) -> Result<()> {
    let gates = ["GenericWorkload=true", "WorkloadWithJob=true"];
    let scenario = jobs_with_pod_groups(bed, "e2e-gangs-native-jobs");
    with_feature_gates(bed, &[SCHEDULER, CONTROLLERS], &gates, scenario).await
}

/// Nodes of eight, eight and four GPUs, of which a pod has eight: three of four pods of four GPUs fit.
async fn jobs_with_pod_groups(bed: &Bed, namespace: &str) -> Result<()> {
    let scene = Scene::set(bed, namespace).await?;
    pods::run(&scene.pods, &pods::sleeper("holder", 8)?).await?;
    let job = |name: &str, pods: u32, template: Value| {
        json!({
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": { "name": name },
            "spec": {
                "completionMode": "Indexed", "completions": pods, "parallelism": pods,
                "template": template,
            },
        })
    };
    let mut scheduled = job("train", 4, gangs::template(4, &json!({}))?);
    scheduled["spec"]["scheduling"] = json!({ "schedulingPolicy": { "gang": { "minCount": 4 } } });
    apply(bed, &scene, &scheduled).await?;
    let train: Expected = ("PodGroup", "train-", 4, "PodGroup");
    stand(&scene, &[train], |gang| phase(gang) == GangPhase::Queued).await?;
    let of_job = async |name: &str| -> Result<Vec<Pod>> {
        let of = ListParams::default().labels(&format!("batch.kubernetes.io/job-name={name}"));
        Ok(scene.pods.list(&of).await?.items)
    };
    ensure!(
        of_job("train").await?.iter().all(|pod| pods::node(pod).is_empty()),
        "a pod of train runs without the rest"
    );
    scene.delete("holder").await?;
    stand(&scene, &[train], |gang| phase(gang) == GangPhase::Bound).await?;
    apply(bed, &scene, &job("single", 2, gangs::template(1, &json!({}))?)).await?;
    let annotated = gangs::template(1, &json!({ (GANG_MIN_ANNOTATION): "2" }))?;
    apply(bed, &scene, &job("annotated", 2, annotated)).await?;
    let annotated: Expected = ("PodGroup", "annotated-", 2, GANG_MIN_ANNOTATION);
    let single: Expected = ("PodGroup", "single-", 1, "basic");
    stand(&scene, &[train, annotated, single], |gang| {
        let status = gang.status.clone().unwrap_or_default();
        let is_single = status.name.starts_with("single-");
        status.phase == GangPhase::Bound && (status.reason == Some(Reason::NotAGang)) == is_single
    })
    .await?;
    let mut names = Vec::new();
    for (job, expected) in [("train", 4), ("single", 2), ("annotated", 2)] {
        let pods = of_job(job).await?;
        ensure!(pods.len() == expected, "{job} has {} pods", pods.len());
        names.extend(pods.iter().map(|pod| gangs::name_of(pod).to_owned()));
    }
    let path = "jsonpath={.items[*].spec.schedulingGroup.podGroupName}";
    let of_single = ["-n", namespace, "get", "pods", "-l", "batch.kubernetes.io/job-name=single", "-o", path];
    let groups = bed.cluster().kubectl(&of_single).await?;
    ensure!(groups.split_whitespace().count() == 2, "pods of single are in no PodGroup: {groups}");
    scene.run_on_grants(&names).await?;
    records::ensure_no_device_twice(&records::read(bed.cluster())?)
}

/// Runs a scenario with these feature gates of programs of the control plane.
async fn with_feature_gates<T>(
    bed: &Bed,
    programs: &[&str],
    gates: &[&str],
    scenario: impl Future<Output = Result<T>>,
) -> Result<T> {
    let control = bed.cluster().control();
    let mut as_they_come = Vec::new();
    for name in programs {
        let as_it_comes = control.program(name)?;
        let mut with_gates: Program = as_it_comes.clone();
        with_gates.args.push(format!("--feature-gates={}", gates.join(",")));
        control.daemon(name)?.kill().await?;
        control.run(with_gates).await?;
        as_they_come.push((name, as_it_comes));
    }
    let outcome = scenario.await;
    for (name, as_it_comes) in as_they_come {
        control.daemon(name)?.kill().await?;
        control.run(as_it_comes).await?;
    }
    outcome
}

/// Nodes of eight, eight and four GPUs are full. A group of two members of four GPUs has one pod of eight evicted, and
/// no other.
async fn preempting_group(bed: &Bed, namespace: &str) -> Result<()> {
    let scene = Scene::set(bed, namespace).await?;
    make_class(bed).await?;
    let holders = [("holder-0", 8), ("holder-1", 8), ("holder-2", 4)];
    for (name, gpus) in holders {
        // One after the other: a pod of four on a node of eight would leave no room for the next.
        pods::run(&scene.pods, &records::recording(pods::sleeper(name, gpus)?, 100_000.0)?).await?;
    }
    let names: Vec<String> = holders.iter().map(|(name, _)| (*name).to_owned()).collect();
    scene.run_on_grants(&names).await?;
    let groups = Groups::of_cluster()?;
    let mut group = groups.group("urgent", 2);
    group["spec"]["priorityClassName"] = IMPORTANT.into();
    apply(bed, &scene, &group).await?;
    for number in 0..2 {
        let mut pod = groups.member("urgent", number, 4)?;
        pod["spec"]["priorityClassName"] = IMPORTANT.into();
        apply(bed, &scene, &pod).await?;
    }
    stand(&scene, &[groups.expected("urgent", 2)], |gang| phase(gang) == GangPhase::Bound).await?;
    scene.run_on_grants(&["urgent-0".to_owned(), "urgent-1".to_owned()]).await?;
    let mut left = Vec::new();
    for name in &names {
        // Kubelet reports devices as free before it deletes the pod.
        let pod = scene.pods.get_opt(name).await?;
        left.extend(pod.filter(|pod| pod.metadata.deletion_timestamp.is_none()));
    }
    ensure!(left.len() == 2, "not one pod went: {left:?}");
    let select = "reason=Preempted,involvedObject.kind=Pod";
    let message = "jsonpath={range .items[*]}{.message}{'\\n'}{end}";
    let args = ["-n", namespace, "get", "events", "--field-selector", select, "-o", message];
    let events = bed.cluster().kubectl(&args).await?;
    let foreign: Vec<&str> = events.lines().filter(|line| !line.starts_with("evicted: gang ")).collect();
    ensure!(!events.trim().is_empty() && foreign.is_empty(), "not Gantry alone evicts: {events}");
    records::ensure_no_device_twice(&records::read(bed.cluster())?)
}

/// The pods of a group arrive one by one, and the group is bound as a whole. Of another group, for which one GPU set is
/// missing, no pod is bound until all fit. Returns the final message of kube-scheduler about that group, if there is
/// one.
async fn two_groups(bed: &Bed, namespace: &str) -> Result<String> {
    let scene = Scene::set(bed, namespace).await?;
    let groups = Groups::of_cluster()?;
    for (name, min) in [("small", 2), ("large", 3)] {
        apply(bed, &scene, &groups.group(name, min)).await?;
    }
    apply(bed, &scene, &groups.member("small", 0, 1)?).await?;
    let small = groups.expected("small", 2);
    stand(&scene, &[small], |gang| {
        gang.status.as_ref().is_some_and(|status| {
            status.reason == Some(Reason::WaitingForMembers) && (status.members, status.min) == (1, 2)
        })
    })
    .await?;
    apply(bed, &scene, &groups.member("small", 1, 1)?).await?;
    stand(&scene, &[small], |gang| phase(gang) == GangPhase::Bound).await?;
    scene.run_on_grants(&["small-0".to_owned(), "small-1".to_owned()]).await?;
    // Nodes of eight, eight and four GPUs: while this one is there, two of three have room at most.
    pods::run(&scene.pods, &pods::sleeper("holder", 8)?).await?;
    for number in 0..3 {
        apply(bed, &scene, &groups.member("large", number, 4)?).await?;
    }
    let large = groups.expected("large", 3);
    let both = [small, large];
    stand(&scene, &both, |gang| {
        let status = gang.status.clone().unwrap_or_default();
        status.name.starts_with("small") || status.phase == GangPhase::Queued && status.bound == 0
    })
    .await?;
    for number in 0..3 {
        let pod = scene.pods.get(&format!("large-{number}")).await?;
        ensure!(pods::node(&pod).is_empty(), "large-{number} runs without the rest");
    }
    scene.delete("holder").await?;
    stand(&scene, &both, |gang| phase(gang) == GangPhase::Bound).await?;
    let names: Vec<String> = (0..3).map(|number| format!("large-{number}")).collect();
    scene.run_on_grants(&names).await?;
    records::ensure_no_device_twice(&records::read(bed.cluster())?)?;
    groups.condition(bed, namespace, "large").await
}

/// The groups of the cluster's Kubernetes.
struct Groups {
    api_version: &'static str,
    /// `PodGroup`, or `Workload`, of which each group is a part.
    kind: &'static str,
    /// kube-scheduler's condition on a group.
    condition: &'static str,
}

impl Groups {
    fn of_cluster() -> Result<Self> {
        let kubernetes = Kubernetes::selected()?;
        let api_version = kubernetes.native_groups().context("this Kubernetes has no groups")?;
        let kind = if kubernetes.has(Feature::PodGroups) { "PodGroup" } else { "Workload" };
        let beta = kubernetes.has(Feature::BetaPodGroups);
        let condition = if beta { "PodGroupInitiallyScheduled" } else { "PodGroupScheduled" };
        Ok(Self { api_version, kind, condition })
    }

    fn group(&self, name: &str, min: u32) -> Value {
        let policy = json!({ "gang": { "minCount": min } });
        let spec = match self.kind {
            "Workload" => json!({ "podGroups": [{ "name": "workers", "policy": policy }] }),
            _ => json!({ "schedulingPolicy": policy }),
        };
        json!({
            "apiVersion": self.api_version,
            "kind": self.kind,
            "metadata": { "name": name },
            "spec": spec,
        })
    }

    fn member(&self, group: &str, number: usize, gpus: usize) -> Result<Value> {
        let pod = records::recording(pods::sleeper(&format!("{group}-{number}"), gpus)?, 100_000.0)?;
        let mut pod = serde_json::to_value(&pod)?;
        match self.kind {
            "Workload" => pod["spec"]["workloadRef"] = json!({ "name": group, "podGroup": "workers" }),
            _ => pod["spec"]["schedulingGroup"] = json!({ "podGroupName": group }),
        }
        Ok(pod)
    }

    fn expected(&self, group: &'static str, min: u32) -> Expected {
        (self.kind, group, min, self.kind)
    }

    /// The status of kube-scheduler's condition on a group; empty if there is none.
    async fn condition(&self, bed: &Bed, namespace: &str, group: &str) -> Result<String> {
        let path = format!("jsonpath={{.status.conditions[?(@.type=='{}')].status}}", self.condition);
        let resource = format!("{}s.scheduling.k8s.io", self.kind.to_lowercase());
        let args = ["-n", namespace, "get", &resource, group, "-o", &path];
        Ok(bed.cluster().kubectl(&args).await?.trim().to_owned())
    }
}
