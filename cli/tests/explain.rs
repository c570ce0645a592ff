//! `gantry explain` against an API server: what a person sees of a pod that waits, and of one that runs.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::path::Path;

use gantry_api::{Gang, GpuNode};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::{Client, core::NamespaceResourceScope};
use serde_json::{Value, json};
use support::cluster::Cluster;

/// A node with four GPUs to allocate.
async fn node(client: &Client, name: &str) {
    let nodes: Api<Node> = Api::all(client.clone());
    let gpus = json!({"nvidia.com/gpu": "4", "cpu": "64", "memory": "512Gi", "pods": "110"});
    let node = json!({
        "metadata": {"name": name},
        "status": {"capacity": gpus, "allocatable": gpus},
    });
    nodes.create(&PostParams::default(), &serde_json::from_value(node).unwrap()).await.unwrap();
}

async fn create<K>(api: &Api<K>, object: Value)
where
    K: kube::Resource<Scope = NamespaceResourceScope> + serde::Serialize + serde::de::DeserializeOwned,
    K: Clone + std::fmt::Debug,
{
    api.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
}

fn pod(name: &str, gpus: u32, node: Option<&str>) -> Value {
    let mut spec = json!({"containers": [{"name": "main", "image": "busybox", "resources": {
        "limits": {"nvidia.com/gpu": gpus.to_string()}}}]});
    if let Some(node) = node {
        spec["nodeName"] = node.into();
    }
    json!({"metadata": {"name": name, "namespace": "default"}, "spec": spec})
}

fn explain(kubeconfig: &Path, words: &[&str]) -> (Option<i32>, String) {
    let file = format!("--kubeconfig={}", kubeconfig.display());
    let mut line = vec!["explain"];
    line.extend(words);
    line.push(&file);
    let output = support::command(&line).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8(text).unwrap())
}

/// A report in which ages are `N`, without blanks at the ends of lines.
fn ageless(report: &str) -> String {
    let words: Vec<&str> = report.split(' ').collect();
    let is_unit = |word: &&str| ["s", "min", "h", "d"].contains(&word.trim_end_matches([',', '\n']));
    let is_age = |at: usize| {
        words[at].parse::<u64>().is_ok()
            && words.get(at + 1).is_some_and(|next| is_unit(&next.split('\n').next().unwrap_or_default()))
    };
    let shown = words.iter().enumerate().map(|(at, word)| if is_age(at) { "N" } else { word });
    let text = shown.collect::<Vec<_>>().join(" ");
    text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

/// An API server with two nodes, `a` and `b`.
struct Stage {
    pods: Api<Pod>,
    gangs: Api<Gang>,
    cluster: Cluster,
}

impl Stage {
    async fn start() -> Self {
        let cluster = Cluster::start(|_| json!([])).await;
        for name in ["a", "b"] {
            node(&cluster.client, name).await;
        }
        Self {
            pods: Api::default_namespaced(cluster.client.clone()),
            gangs: Api::default_namespaced(cluster.client.clone()),
            cluster,
        }
    }

    /// The extender says something of a gang.
    async fn says(&self, gang: &str, phase: &str, words: Value) {
        let object = json!({"apiVersion": "gantry.dev/v1alpha1", "kind": "Gang",
            "metadata": {"name": gang, "namespace": "default"}, "spec": {}});
        create(&self.gangs, object).await;
        // Of an age that is the same as long as a test may run.
        let since = Timestamp::from_second(Timestamp::now().as_second() - 185 * 60).unwrap();
        let mut status = json!({"phase": phase, "name": gang, "integration": "Annotation", "min": 2, "members": 2,
            "decidedBy": "annotation gantry.dev/gang-min of its pods", "waitingSince": since.to_string()});
        for (field, value) in words.as_object().unwrap() {
            status[field] = value.clone();
        }
        let status = Patch::Merge(json!({"status": status}));
        self.gangs.patch_status(gang, &PatchParams::default(), &status).await.unwrap();
    }

    /// What `gantry explain` says.
    async fn see(&self, words: &'static [&'static str]) -> (Option<i32>, String) {
        let kubeconfig = self.cluster.kubeconfig();
        tokio::task::spawn_blocking(move || explain(&kubeconfig, words)).await.unwrap()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pod_report_describes_nodes_and_grant() {
    let stage = Stage::start().await;
    let pods = &stage.pods;
    create(pods, pod("three", 3, Some("a"))).await;
    create(pods, pod("one", 1, Some("b"))).await;
    create(pods, pod("four", 4, None)).await;

    let (code, text) = stage.see(&["pod", "four"]).await;
    insta::assert_snapshot!(text, @r"
    pod default/four requests 4 nvidia.com/gpu
    does not fit now on 2 of 2 nodes:
      a: 1 of 4 GPUs free, 4 asked; fits when default/three ends
      b: 3 of 4 GPUs free, 4 asked; fits when default/one ends
    ");
    assert_eq!(code, Some(0));
    let (code, text) = stage.see(&["pod", "one", "--json"]).await;
    assert_eq!(code, Some(0));
    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(report["bound"]["node"], "b");
    assert_eq!(report["bound"]["devices"].as_array().unwrap().len(), 1);
    let (code, text) = stage.see(&["pod", "five"]).await;
    assert_eq!(code, Some(2));
    insta::assert_snapshot!(text, @"gantry: no pod five in namespace default that requests nvidia.com/gpu or another managed resource; there are four, one, three");
}

/// The report names the Xids of unhealthy GPUs and what to do about them, of a pod that waits and of one that has such a GPU.
#[tokio::test(flavor = "multi_thread")]
async fn pod_report_has_responses_to_xids() {
    let stage = Stage::start().await;
    let device = |gpu: usize, reason: Option<&str>| {
        let id = format!("GPU-a-{gpu}");
        json!({"id": id, "resource": "nvidia.com/gpu", "gpu": gpu, "healthy": reason.is_none(), "reason": reason})
    };
    let off = "Xid 79: GPU has fallen off the bus";
    let fault = |gpu: &str| json!({"gpu": gpu, "xid": 79, "class": "fatal", "reason": off, "since": "2026-11-02T10:00:00Z"});
    let status = json!({"status": {
        "devices": [device(0, Some(off)), device(1, Some(off)), device(2, Some("GPU lost")), device(3, None)],
        "faults": [fault("GPU-a-1"), fault("GPU-a-0")],
        "holders": [{"namespace": "default", "pod": "broken", "resource": "nvidia.com/gpu",
            "devices": ["GPU-a-1", "GPU-a-3"], "provenance": "PodResources"}],
    }});
    let nodes = Api::<GpuNode>::all(stage.cluster.client.clone());
    nodes.patch_status("a", &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    create(&stage.pods, pod("broken", 2, Some("a"))).await;
    create(&stage.pods, pod("four", 4, None)).await;
    create(&stage.pods, pod("one", 1, Some("b"))).await;

    let (_, text) = stage.see(&["pod", "four"]).await;
    insta::assert_snapshot!(text, @r"
    pod default/four requests 4 nvidia.com/gpu
    does not fit now on 2 of 2 nodes:
      b: 3 of 4 GPUs free, 4 asked; fits when default/one ends
      a: 0 of 4 GPUs free, 4 asked, 3 unhealthy (GPU 0: Xid 79: GPU has fallen off the bus; GPU 1: Xid 79: GPU has fallen off the bus; GPU 2: GPU lost)
        response to Xid 79 of GPU 0,1: drain the node and reboot it; replace the board if it repeats
    ");
    let (_, text) = stage.see(&["pod", "four", "-o", "json"]).await;
    let report: Value = serde_json::from_str(&text).unwrap();
    let node = report["nodes"].as_array().unwrap().iter().find(|node| node["node"] == "a").unwrap();
    let response = "drain the node and reboot it; replace the board if it repeats";
    assert_eq!(
        node["unhealthy"],
        json!([
            {"gpu": 0, "reason": off, "xids": [{"xid": 79, "response": response}]},
            {"gpu": 1, "reason": off, "xids": [{"xid": 79, "response": response}]},
            {"gpu": 2, "reason": "GPU lost"},
        ])
    );
    let (_, text) = stage.see(&["pod", "broken"]).await;
    insta::assert_snapshot!(text, @r"
    pod default/broken requests 2 nvidia.com/gpu
    bound to a: GPU 1,3
      GPU-a-1
      GPU-a-3
    GPU 1 is unhealthy: Xid 79: GPU has fallen off the bus
    response to Xid 79 of GPU 1: drain the node and reboot it; replace the board if it repeats
    ");
    let (_, text) = stage.see(&["pod", "broken", "-o", "json"]).await;
    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        report["bound"]["unhealthy"],
        json!([{"gpu": 1, "reason": off, "xids": [{"xid": 79, "response": response}]}])
    );
    // A GPU that the operator withholds is not unhealthy.
    let cordons = (0..4).map(|gpu| (format!("gantry.dev/cordon-GPU-b-{gpu}"), json!("the fan fails")));
    let cordons = json!({"metadata": {"annotations": cordons.collect::<serde_json::Map<_, _>>()}});
    nodes.patch_metadata("b", &PatchParams::default(), &Patch::Merge(cordons)).await.unwrap();
    let (_, text) = stage.see(&["pod", "one", "-o", "json"]).await;
    assert!(!text.contains("unhealthy"), "{text}");
}

fn member(name: &str, gpus: u32, node: Option<&str>, gang: &str, min: u32) -> Value {
    let mut pod = pod(name, gpus, node);
    pod["metadata"]["annotations"] = json!({"gantry.dev/gang": gang, "gantry.dev/gang-min": min.to_string()});
    pod
}

#[tokio::test(flavor = "multi_thread")]
async fn gang_report_lists_trials_and_pods_that_must_end() {
    let stage = Stage::start().await;
    let pods = &stage.pods;
    create(pods, pod("three", 3, Some("a"))).await;
    for rank in 0..2 {
        create(pods, member(&format!("train-{rank}"), 4, None, "train", 2)).await;
    }
    create(pods, member("small-0", 1, None, "small", 2)).await;

    let (code, text) = stage.see(&["gang", "train"]).await;
    assert_eq!(code, Some(0), "{text}");
    insta::assert_snapshot!(ageless(&text), @r"
    gang default/train: no status from the extender yet
    size: 2 of 2 members exist; source: annotation gantry.dev/gang-min of its pods
    integration: Annotation; Gang object: train
    waits: N s, priority 0
    position in the queue: 1
    if planned now: Queued: InsufficientResources: needs 8 GPUs as 2x4; 5 are free and only 1 member fits; 3 more GPUs must come free
      tried for 2 members of 4 GPUs, of which 2 must fit:
        node, best b of 2: 1 of 2 that must fit; 4 of 4 GPUs free, 8 asked
        cluster, best cluster of 1: 1 of 2 that must fit, 2 if it were empty; 5 of 8 GPUs free, 8 asked
          1 node(s): fewer than 4 GPUs free
      fits when default/three ended
    members:
      rank 0  train-0  Pending
      rank 1  train-1  Pending
    ");
    let (_, text) = stage.see(&["gang", "small", "-o", "json"]).await;
    let report: Value = serde_json::from_str(&text).unwrap();
    let planned = &report["if_planned_now"];
    assert_eq!((&planned["phase"], &planned["reason"]), (&json!("Pending"), &json!("WaitingForMembers")));
    let (_, text) = stage.see(&["queue"]).await;
    insta::assert_snapshot!(ageless(&text), @"  1  default/train  priority 0  waits N s  if planned now: Queued: InsufficientResources: needs 8 GPUs as 2x4; 5 are free and only 1 member fits; 3 more GPUs must come free");
    let (code, text) = stage.see(&["gang", "tarin"]).await;
    assert_eq!(code, Some(2));
    insta::assert_snapshot!(text, @"gantry: no gang tarin in namespace default; did you mean train?");
    let (_, text) = stage.see(&["gang", "other"]).await;
    insta::assert_snapshot!(text, @"gantry: no gang other in namespace default; there are small, train");
    let mut texts = String::new();
    for words in [&["gang", "train", "-n", "ml"], &["pod", "three", "-n", "ml"]] {
        let (code, text) = stage.see(words).await;
        assert_eq!(code, Some(2));
        texts.push_str(&text);
    }
    insta::assert_snapshot!(texts, @r"
    gantry: no gang train in namespace ml; there is one in namespace default: add -n default
    gantry: no pod three in namespace ml that requests nvidia.com/gpu or another managed resource; there is one in namespace default: add -n default
    ");
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_gang_lists_gangs_ahead() {
    let stage = Stage::start().await;
    let pods = &stage.pods;
    create(pods, pod("three", 3, Some("a"))).await;
    for (gang, priority) in [("q1", 0), ("q2", 0), ("urgent", 10)] {
        for rank in 0..2 {
            let mut member = member(&format!("{gang}-{rank}"), 4, None, gang, 2);
            member["spec"]["priority"] = priority.into();
            create(pods, member).await;
        }
    }
    let (_, text) = stage.see(&["gang", "q2"]).await;
    insta::assert_snapshot!(ageless(&text), @r"
    gang default/q2: no status from the extender yet
    size: 2 of 2 members exist; source: annotation gantry.dev/gang-min of its pods
    integration: Annotation; Gang object: q2
    waits: N s, priority 0
    position in the queue: 3, behind default/urgent, default/q1
    if planned now: Queued: InsufficientResources: needs 8 GPUs as 2x4; 5 are free and only 1 member fits; 3 more GPUs must come free
      tried for 2 members of 4 GPUs, of which 2 must fit:
        node, best b of 2: 1 of 2 that must fit; 4 of 4 GPUs free, 8 asked
        cluster, best cluster of 1: 1 of 2 that must fit, 2 if it were empty; 5 of 8 GPUs free, 8 asked
          1 node(s): fewer than 4 GPUs free
      fits when default/three ended
    members:
      rank 0  q2-0  Pending
      rank 1  q2-1  Pending
    ");
    for (words, position, ahead) in [
        (&["gang", "urgent", "--json"], 1, json!([])),
        (&["gang", "q1", "--json"], 2, json!(["default/urgent"])),
        (&["gang", "q2", "--json"], 3, json!(["default/urgent", "default/q1"])),
    ] {
        let (_, text) = stage.see(words).await;
        let report: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&report["position"], &report["ahead"]), (&json!(position), &ahead), "{words:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn surplus_members_do_not_change_the_minimum() {
    let stage = Stage::start().await;
    for rank in 0..3 {
        create(&stage.pods, member(&format!("train-{rank}"), 1, None, "train", 2)).await;
    }
    let (_, text) = stage.see(&["gang", "train"]).await;
    insta::assert_snapshot!(text.lines().nth(1).unwrap(), @"size: 3 members exist, minimum 2; source: annotation gantry.dev/gang-min of its pods");
}

/// What became of a gang whose members do not come to their places.
fn backs_off() -> Value {
    json!({
        "reason": "Backoff",
        "message": "0 of 2 members arrived in time; kube-scheduler reports: 2 node(s) had untolerated taint(s); the gang is planned again after a pause",
        "failedAttempts": 3,
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn gang_in_backoff_reports_the_extenders_status() {
    let stage = Stage::start().await;
    for rank in 0..2 {
        create(&stage.pods, member(&format!("train-{rank}"), 4, None, "train", 2)).await;
    }
    stage.says("train", "Backoff", backs_off()).await;

    let (_, text) = stage.see(&["gang", "train"]).await;
    insta::assert_snapshot!(text, @r"
    gang default/train: Backoff
    the extender reports: Backoff: 0 of 2 members arrived in time; kube-scheduler reports: 2 node(s) had untolerated taint(s); the gang is planned again after a pause
      3 failed attempts
    size: 2 of 2 members exist; source: annotation gantry.dev/gang-min of its pods
    integration: Annotation; Gang object: train
    waits: 3 h, priority 0
    position in the queue: 1
    if planned now: Reserved, cluster, NIC 0 on all 2 nodes: it would get its reservations
    members:
      rank 0  train-0  Pending  would go to a GPU 0,1,2,3
      rank 1  train-1  Pending  would go to b GPU 0,1,2,3
    ");
    let (_, text) = stage.see(&["queue"]).await;
    assert_eq!(
        text,
        "  1  default/train  priority 0  waits 3 h  Backoff: 0 of 2 members arrived in time; kube-scheduler reports: 2 node(s) had untolerated taint(s); the gang is planned again after a pause\n"
    );
    let (_, text) = stage.see(&["pod", "train-0"]).await;
    insta::assert_snapshot!(text, @r"
    pod default/train-0 requests 4 nvidia.com/gpu
    member of gang default/train: Backoff: 0 of 2 members arrived in time; kube-scheduler reports: 2 node(s) had untolerated taint(s); the gang is planned again after a pause
    fits now on 2 of 2 nodes:
      a: 22 GB/s among them
      b: 22 GB/s among them
    it is placed with its gang as a whole: see `gantry explain gang`
    ");
    let (_, text) = stage.see(&["gang", "train", "--json"]).await;
    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(report["status"]["phase"], "Backoff");
    assert_eq!(report["status"]["failed_attempts"], 3);
    assert_eq!(report["if_planned_now"]["phase"], "Reserved");
    assert_eq!(report["position"], 1);
    assert_eq!(report["reservations"][0]["decided"], false);
    assert_eq!(report["members"][0]["node"], Value::Null);
}

#[tokio::test(flavor = "multi_thread")]
async fn reserved_gang_is_not_in_the_queue() {
    let stage = Stage::start().await;
    for node in ["a", "b"] {
        create(&stage.pods, pod(&format!("low-{node}"), 4, Some(node))).await;
    }
    for rank in 0..2 {
        for (gang, gpus) in [("train", 4), ("small", 1)] {
            create(&stage.pods, member(&format!("{gang}-{rank}"), gpus, None, gang, 2)).await;
        }
    }
    let message = "pods of lower priority are evicted for the gang; their devices are reserved for the gang";
    let words = json!({"reason": "WaitingForVictims", "message": message, "domain": "cluster"});
    stage.says("train", "Preempting", words).await;
    stage.says("small", "Reserved", json!({"reason": "WaitingForArrival", "domain": "node a"})).await;

    let (_, text) = stage.see(&["gang", "train"]).await;
    insta::assert_snapshot!(text, @r"
    gang default/train: Preempting, cluster
    the extender reports: WaitingForVictims: pods of lower priority are evicted for the gang; their devices are reserved for the gang
    size: 2 of 2 members exist; source: annotation gantry.dev/gang-min of its pods
    integration: Annotation; Gang object: train
    waits: 3 h, priority 0
    if planned now: Queued: InsufficientResources: needs 8 GPUs as 2x4; 0 are free and no member fits; 8 more GPUs must come free
      tried for 2 members of 4 GPUs, of which 2 must fit:
        node, best a of 2: 0 of 2 that must fit, 1 if it were empty; 0 of 4 GPUs free, 8 asked
          1 node(s): fewer than 4 GPUs free
        cluster, best cluster of 1: 0 of 2 that must fit, 2 if it were empty; 0 of 8 GPUs free, 8 asked
          2 node(s): fewer than 4 GPUs free
      fits when default/low-a, default/low-b ended
    members:
      rank 0  train-0  Pending
      rank 1  train-1  Pending
    ");
    let (_, text) = stage.see(&["gang", "small", "-o", "json"]).await;
    let report: Value = serde_json::from_str(&text).unwrap();
    let status = &report["status"];
    assert_eq!((&status["phase"], &status["domain"]), (&json!("Reserved"), &json!("node a")));
    let (_, text) = stage.see(&["queue"]).await;
    assert_eq!(text, "no gang waits for GPUs\n");
    let (_, text) = stage.see(&["pod", "small-0"]).await;
    insta::assert_snapshot!(ageless(&text), @r"
    pod default/small-0 requests 1 nvidia.com/gpu
    member of gang default/small: Reserved:
    reservations not shown here are held for gang(s) default/train
    does not fit now on 2 of 2 nodes:
      a: 0 of 4 GPUs free, 1 asked; fits when default/low-a ends
      b: 0 of 4 GPUs free, 1 asked; fits when default/low-b ends
    ");
}

/// The training is slow because one member is: the Gang object says which, also while no extender runs.
#[tokio::test(flavor = "multi_thread")]
async fn gang_report_names_slow_members() {
    let stage = Stage::start().await;
    for rank in 0..2 {
        create(&stage.pods, member(&format!("train-{rank}"), 2, Some(["a", "b"][rank]), "train", 2)).await;
    }
    let message = "train-1: GPU 4 of b runs at 60 % of its highest clock, the other members at 90 %; limited by thermal";
    let condition = |status: &str| {
        json!([{"type": "MembersSlow", "status": status, "reason": "MemberSlow", "message": message,
            "lastTransitionTime": "2026-11-02T10:00:00Z"}])
    };
    let words =
        json!({"reason": "Bound", "message": "2 of 2 members are bound", "conditions": condition("True")});
    stage.says("train", "Bound", words).await;
    let (_, text) = stage.see(&["gang", "train"]).await;
    let head: Vec<&str> = text.lines().take(3).collect();
    insta::assert_snapshot!(head.join("\n"), @r"
    gang default/train: Bound
    the extender reports: Bound: 2 of 2 members are bound
      slow: train-1: GPU 4 of b runs at 60 % of its highest clock, the other members at 90 %; limited by thermal
    ");
    let (_, json) = stage.see(&["gang", "train", "-o", "json"]).await;
    let report: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(report["status"]["slow_members"], message, "{json}");
    let words = json!({"conditions": condition("False")});
    let status = Patch::Merge(json!({"status": words}));
    stage.gangs.patch_status("train", &PatchParams::default(), &status).await.unwrap();
    let (_, text) = stage.see(&["gang", "train"]).await;
    assert!(!text.contains("slow"), "{text}");
}

/// A place in a decision: GPUs of a node, and the pod that has it.
fn slot(node: &str, gpus: std::ops::Range<u32>, pod: Option<&Pod>) -> Value {
    let ids: Vec<String> = gpus.map(|index| format!("GPU-{node}-{index}")).collect();
    let mut slot = json!({"node": node, "devices": [{"resource": "nvidia.com/gpu", "ids": ids}]});
    if let Some(pod) = pod {
        slot["pod"] = json!(pod.metadata.uid);
    }
    slot
}

fn decided(min: u32, slots: &[Value]) -> Value {
    let decision = json!({"id": "d", "min": min, "reservations": slots});
    json!({"reason": "", "message": "", "min": min, "decision": decision, "boundAt": "2026-01-01T00:00:00Z"})
}

#[tokio::test(flavor = "multi_thread")]
async fn held_reservations_are_named_to_blocked_pods() {
    let stage = Stage::start().await;
    let pods = &stage.pods;
    create(pods, member("mpi-0", 2, Some("b"), "mpi", 2)).await;
    let bound = pods.get("mpi-0").await.unwrap();
    let slots = [slot("b", 0..2, Some(&bound)), slot("a", 0..2, None)];
    stage.says("mpi", "Degraded", decided(2, &slots)).await;
    create(pods, pod("plain", 4, None)).await;
    for rank in 0..2 {
        create(pods, member(&format!("high-{rank}"), 4, None, "high", 2)).await;
    }

    let (_, text) = stage.see(&["pod", "plain"]).await;
    insta::assert_snapshot!(text, @r"
    pod default/plain requests 4 nvidia.com/gpu
    does not fit now on 2 of 2 nodes:
      b: 2 of 4 GPUs free, 4 asked; fits when default/mpi-0 ends
      a: 2 of 4 GPUs free, 4 asked, 2 idle and reserved; has 1 reservation of gang default/mpi
    ");
    let (_, text) = stage.see(&["gang", "high"]).await;
    insta::assert_snapshot!(ageless(&text), @r"
    gang default/high: no status from the extender yet
    size: 2 of 2 members exist; source: annotation gantry.dev/gang-min of its pods
    integration: Annotation; Gang object: high
    waits: N s, priority 0
    position in the queue: 1
    if planned now: Queued: InsufficientResources: needs 8 GPUs as 2x4; 4 are free, 2 idle and reserved and no member fits; 4 more GPUs must come free
      tried for 2 members of 4 GPUs, of which 2 must fit:
        node, best a of 2: 0 of 2 that must fit, 1 if it were empty; 2 of 4 GPUs free, 2 idle and reserved, 8 asked
          1 node(s): fewer than 4 GPUs free
        cluster, best cluster of 1: 0 of 2 that must fit, 2 if it were empty; 4 of 8 GPUs free, 2 idle and reserved, 8 asked
          2 node(s): fewer than 4 GPUs free
      1 reservation of gang default/mpi
    members:
      rank 0  high-0  Pending
      rank 1  high-1  Pending
    ");
    let (_, text) = stage.see(&["pod", "plain", "--json"]).await;
    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(report["nodes"][1]["reserved_for_gangs"], json!([{"gang": "default/mpi", "reservations": 1}]));
    // Its own reservations are no news.
    let (_, text) = stage.see(&["gang", "mpi"]).await;
    insta::assert_snapshot!(ageless(&text), @r"
    gang default/mpi: Degraded
    the extender reports:
    size: 1 of 2 members exist; source: annotation gantry.dev/gang-min of its pods
    integration: Annotation; Gang object: mpi
    bound: N h ago
    waits: N h, priority 0
    members:
      rank 0  mpi-0  Bound  b GPU 0,1
    1 reservations are held for future members
    ");
}

#[tokio::test(flavor = "multi_thread")]
async fn decided_gang_lists_pods_that_must_end_for_one_more() {
    let stage = Stage::start().await;
    let pods = &stage.pods;
    create(pods, member("el-0", 4, Some("a"), "el", 1)).await;
    let bound = pods.get("el-0").await.unwrap();
    stage.says("el", "Bound", decided(1, &[slot("a", 0..4, Some(&bound))])).await;
    create(pods, pod("plain", 4, Some("b"))).await;
    create(pods, member("el-1", 4, None, "el", 1)).await;

    let (_, text) = stage.see(&["gang", "el"]).await;
    insta::assert_snapshot!(ageless(&text), @r"
    gang default/el: Bound
    the extender reports:
    size: 2 members exist, minimum 1; source: annotation gantry.dev/gang-min of its pods
    integration: Annotation; Gang object: el
    bound: N h ago
    waits: N h, priority 0
    if planned now: members without a reservation would still have none
      tried for 1 member of 4 GPUs, of which 0 must fit:
        node, best a of 1: 0 of 1 fit, 1 if it were empty; 0 of 4 GPUs free, 4 asked
          1 node(s): fewer than 4 GPUs free
        cluster, best cluster of 1: 0 of 1 fit, 1 if it were empty; 0 of 8 GPUs free, 4 asked
          2 node(s): fewer than 4 GPUs free
      fits when default/plain ended
    members:
      rank 0  el-0  Bound  a GPU 0,1,2,3
      rank 1  el-1  Pending
    ");
}

#[tokio::test(flavor = "multi_thread")]
async fn gang_status_without_extender_options() {
    let stage = Stage::start().await;
    let gated = |mut pod: Value| {
        pod["spec"]["schedulingGates"] = json!([{"name": "gantry.dev/gang"}]);
        pod
    };
    let leveled = |mut pod: Value| {
        pod["metadata"]["annotations"]["gantry.dev/gang-required-level"] = "rack".into();
        pod
    };
    for rank in 0..2 {
        let name = |gang: &str| format!("{gang}-{rank}");
        create(&stage.pods, gated(member(&name("gated"), 1, None, "gated", 2))).await;
        create(&stage.pods, leveled(member(&name("leveled"), 1, None, "leveled", 2))).await;
    }
    let room = json!({"reason": "InsufficientResources", "message": "needs 2 GPUs as 2x1 within one rack"});
    stage.says("leveled", "Queued", room).await;

    let (_, text) = stage.see(&["gang", "gated", "-o", "json"]).await;
    let report: Value = serde_json::from_str(&text).unwrap();
    let planned = &report["if_planned_now"];
    assert_eq!((&planned["phase"], &planned["reason"]), (&json!("Pending"), &json!("MembersGated")));
    let (_, text) = stage.see(&["gang", "gated", "--gates", "-o", "json"]).await;
    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(report["if_planned_now"]["phase"], "Reserved");
    let (_, text) = stage.see(&["gang", "leveled"]).await;
    insta::assert_snapshot!(text, @r#"
    gang default/leveled: Queued
    the extender reports: InsufficientResources: needs 2 GPUs as 2x1 within one rack
    size: 2 of 2 members exist; source: annotation gantry.dev/gang-min of its pods
    integration: Annotation; Gang object: leveled
    waits: 3 h, priority 0
    if planned now: Invalid: Invalid: annotation gantry.dev/gang-required-level: "rack" is not among the levels given with --fabric; there is node alone
    members:
      rank 0  leveled-0  Pending
      rank 1  leveled-1  Pending
    "#);
    let (_, text) = stage.see(&["queue"]).await;
    assert_eq!(
        text,
        "  -  default/leveled  priority 0  waits 3 h  Queued: needs 2 GPUs as 2x1 within one rack\n"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn unreadable_cluster_fails_at_once() {
    let stage = Stage::start().await;
    let file = stage.cluster.kubeconfig();
    let text = std::fs::read_to_string(&file).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    // Nobody listens there.
    config["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:1".into();
    std::fs::write(&file, config.to_string()).unwrap();
    let (code, text) = stage.see(&["queue"]).await;
    assert_eq!(code, Some(1));
    assert_eq!(text.lines().count(), 1, "{text}");
    insta::assert_snapshot!(text.splitn(3, ": ").take(2).collect::<Vec<_>>().join(": "), @"gantry: the API server cannot be reached");
    std::fs::remove_file(&file).unwrap();
    let (code, text) = stage.see(&["queue"]).await;
    assert_eq!(code, Some(2));
    insta::assert_snapshot!(text.replace(file.to_str().unwrap(), "FILE"), @"gantry: there is no kubeconfig FILE");
    std::fs::create_dir(&file).unwrap();
    let (code, text) = stage.see(&["queue"]).await;
    assert_eq!(code, Some(2));
    insta::assert_snapshot!(text.replace(file.to_str().unwrap(), "FILE"), @"gantry: FILE is a folder; name the kubeconfig file in it");
}
