//! The commands of one GPU at a time against an API server: cordon, uncordon, drain, reset, evidence.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use gantry_api::{Cordon, Cordons, GpuNode, names};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use serde_json::json;
use support::cluster::Cluster;

/// A cluster in which `research/train-0` holds GPU 1 of each node.
struct Stage(Cluster);

impl Stage {
    async fn start() -> Self {
        let holders = |node: &str| {
            json!([{"namespace": "research", "pod": "train-0", "resource": "nvidia.com/gpu",
                "devices": [format!("GPU-{node}-1")], "provenance": "PodResources"}])
        };
        Self(Cluster::start(holders).await)
    }

    /// Runs the program: exit code, and what it prints.
    async fn run(&self, words: &[&str]) -> (i32, String) {
        let kubeconfig = format!("--kubeconfig={}", self.0.kubeconfig().display());
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).chain([kubeconfig]).collect();
        tokio::task::spawn_blocking(move || {
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            let output = support::command(&words).output().unwrap();
            let text = [output.stdout, output.stderr].concat();
            (output.status.code().unwrap(), String::from_utf8(text).unwrap())
        })
        .await
        .unwrap()
    }

    /// A pod that holds GPU `gpu` of node `a` by the plugin's report.
    async fn holder(&self, name: &str, gpu: usize) {
        let pods = Api::<Pod>::default_namespaced(self.0.client.clone());
        let pod = json!({"metadata": {"name": name}, "spec": {"nodeName": "a", "containers": [{"name": "main",
            "image": "busybox", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]}});
        let made = pods.create(&PostParams::default(), &serde_json::from_value(pod).unwrap()).await.unwrap();
        let holder = json!({"namespace": "default", "pod": name, "uid": made.metadata.uid,
            "resource": "nvidia.com/gpu", "devices": [format!("GPU-a-{gpu}")], "provenance": "PodResources"});
        let status = json!({"status": {"holders": [holder]}});
        let gpu_nodes = Api::<GpuNode>::all(self.0.client.clone());
        gpu_nodes.patch_status("a", &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    }

    /// A pod of the plugin on node `a`.
    async fn install(&self) {
        let pods = Api::<Pod>::namespaced(self.0.client.clone(), "gantry-system");
        let pod = json!({"metadata": {"name": "gantry-plugin-x", "labels": {"app.kubernetes.io/part-of": "gantry"}},
            "spec": {"nodeName": "a", "containers": [{"name": "plugin", "image": "gantry:test",
                "env": [{"name": "NVIDIA_DRIVER_ROOT", "value": "/run/nvidia/driver"}]}]}});
        pods.create(&PostParams::default(), &serde_json::from_value(pod).unwrap()).await.unwrap();
    }

    /// Acts as the plugin and as kubelet of node `a`, until dropped: a pod that resets ends in this phase. Returns the pods that
    /// it saw.
    async fn serve(&self, phase: &str, seen: &std::sync::Mutex<Vec<Pod>>) {
        let gpu_nodes = Api::<GpuNode>::all(self.0.client.clone());
        let pods = Api::<Pod>::namespaced(self.0.client.clone(), "gantry-system");
        let params = PatchParams::default();
        let condition = |name: &str| {
            json!({"type": name, "status": "True", "reason": "Serving", "message": "",
                "lastTransitionTime": "2026-11-02T10:00:00Z"})
        };
        let open = json!([condition("Ready")]);
        let closed = json!([condition("Ready"), condition(names::NVML_CLOSED_CONDITION)]);
        loop {
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            let annotations = gpu_nodes.get("a").await.unwrap().metadata.annotations.unwrap_or_default();
            let is_closed = annotations.contains_key(names::NVML_CLOSED_ANNOTATION);
            let mut status = json!({"conditions": if is_closed { &closed } else { &open }});
            if annotations.contains_key(names::LIFT_QUARANTINE_ANNOTATION) {
                status["faults"] = json!([]);
                let lifted = json!({"metadata": {"annotations": {names::LIFT_QUARANTINE_ANNOTATION: null}}});
                gpu_nodes.patch_metadata("a", &params, &Patch::Merge(lifted)).await.unwrap();
            }
            gpu_nodes.patch_status("a", &params, &Patch::Merge(json!({"status": status}))).await.unwrap();
            let of_reset = ListParams::default().labels("app.kubernetes.io/name=gantry-reset");
            for pod in pods.list(&of_reset).await.unwrap() {
                let ended = json!([{"name": "reset", "image": "", "imageID": "", "ready": false, "restartCount": 0,
                    "state": {"terminated": {"exitCode": 1, "message": "GPU is in use by another process"}}}]);
                let status = json!({"status": {"phase": phase, "containerStatuses": ended}});
                let name = pod.metadata.name.as_deref().unwrap();
                let _ = pods.patch_status(name, &params, &Patch::Merge(status)).await;
                seen.lock().unwrap().push(pod);
            }
        }
    }

    /// What a reset must not leave behind: its pod, and NVML closed.
    async fn is_clean(&self) {
        let pods = Api::<Pod>::namespaced(self.0.client.clone(), "gantry-system");
        let params = ListParams::default().labels("app.kubernetes.io/name=gantry-reset");
        assert_eq!(pods.list(&params).await.unwrap().items, []);
        let node = Api::<GpuNode>::all(self.0.client.clone()).get_metadata("a").await.unwrap();
        assert!(!node.metadata.annotations.unwrap_or_default().contains_key(names::NVML_CLOSED_ANNOTATION));
    }

    async fn cordon(&self, node: &str, gpu: &str) -> Option<Cordon> {
        let node = Api::<GpuNode>::all(self.0.client.clone()).get_metadata(node).await.unwrap();
        Cordons::of(node.metadata.annotations.as_ref()).get(&gpu.parse().unwrap()).cloned()
    }
}

/// A text in which `TIME` stands for each time and duration.
fn timeless(text: &str) -> String {
    let is_time = |word: &str| word.parse::<k8s_openapi::jiff::Timestamp>().is_ok();
    let words = text.split_inclusive([' ', '\n', ';', ')']).map(|word| {
        let bare = word.trim_end_matches([' ', '\n', ';', ')', ',', '.']);
        if is_time(bare) { word.replace(bare, "TIME") } else { word.to_owned() }
    });
    let text: String = words.collect();
    match text.rsplit_once('(') {
        Some((before, after)) if after.trim_end().ends_with(" s)") => format!("{before}(TIME)"),
        _ => text,
    }
}

/// The first cordon stands with its reason, however often it is repeated, and others are not touched.
#[tokio::test(flavor = "multi_thread")]
async fn cordon_is_kept_until_uncordoned() {
    let stage = Stage::start().await;
    let (code, text) = stage.run(&["cordon", "gpu", "a/1", "b/GPU-b-2", "--reason", "the fan fails"]).await;
    assert_eq!(code, 0, "{text}");
    insta::assert_snapshot!(text, @r"
    a GPU 1 (GPU-a-1) cordoned: the fan fails; research/train-0 holds it and goes on
    b GPU 2 (GPU-b-2) cordoned: the fan fails
    ");
    let first = stage.cordon("a", "GPU-a-1").await.unwrap();
    assert_eq!(first.reason, "the fan fails");
    assert!(first.since.is_some());

    let (code, text) = stage.run(&["cordon", "gpu", "GPU-a-1", "--reason", "another"]).await;
    assert_eq!(code, 0, "{text}");
    insta::assert_snapshot!(timeless(&text), @"a GPU 1 (GPU-a-1) is already cordoned: the fan fails, since TIME");
    assert_eq!(stage.cordon("a", "GPU-a-1").await, Some(first));

    let (code, text) = stage.run(&["uncordon", "gpu", "a/1"]).await;
    assert_eq!(code, 0, "{text}");
    assert_eq!(stage.cordon("a", "GPU-a-1").await, None);
    assert!(stage.cordon("b", "GPU-b-2").await.is_some());
    let (code, text) = stage.run(&["uncordon", "gpu", "a/1"]).await;
    assert_eq!((code, text.as_str()), (0, "a GPU 1 (GPU-a-1) is not cordoned\n"));
}

/// Bad input exits with 2 and names the nearest GPU; none of the others named is cordoned.
#[tokio::test(flavor = "multi_thread")]
async fn wrong_gpu_changes_nothing() {
    let stage = Stage::start().await;
    let mut texts = String::new();
    for word in ["a/4", "GPU-a-9", "GPU-a", "c/0"] {
        let (code, text) = stage.run(&["cordon", "gpu", "a/0", word]).await;
        assert_eq!(code, 2, "{word}: {text}");
        texts.push_str(&text);
        assert_eq!(stage.cordon("a", "GPU-a-0").await, None);
    }
    insta::assert_snapshot!(texts, @r"
    gantry: no GPU 4: a has the GPUs 0 to 3
    gantry: no GPU has the UUID GPU-a-9; did you mean GPU-a-0?
    gantry: 4 GPUs have GPU-a: a/0, a/1, a/2, a/3; name one of them
    gantry: no node with GPUs is called c; did you mean a?
    ");
}

/// What the plugin keeps is found by the serial number of a board that is no longer there, for people and for programs.
#[tokio::test(flavor = "multi_thread")]
async fn evidence_is_found_by_serial_number() {
    let stage = Stage::start().await;
    let (code, text) = stage.run(&["evidence", "gpu"]).await;
    assert_eq!((code, text.as_str()), (0, "no GPU has raised an Xid, remapped memory or needed a reset\n"));
    let then = "2026-11-02T10:00:00Z";
    let status = json!({"status": {"evidence": [{"gpu": "GPU-gone", "serial": "777777", "since": then,
        "xids": [{"xid": 79, "count": 3, "last": then}]}]}});
    let gpu_nodes = Api::<GpuNode>::all(stage.0.client.clone());
    gpu_nodes.patch_status("b", &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    let (code, text) = stage.run(&["evidence", "gpu", "777777"]).await;
    assert_eq!(code, 0, "{text}");
    insta::assert_snapshot!(text, @r"
    b (GPU-gone, no longer in the node), serial number 777777, since 2026-11-02T10:00:00Z:
      Xid 79: GPU has fallen off the bus; 3 times, last 2026-11-02T10:00:00Z
    ");
    let (code, text) = stage.run(&["evidence", "gpu", "777777", "-o", "json"]).await;
    assert_eq!(code, 0, "{text}");
    let records: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(records[0]["evidence"]["xids"][0], json!({"xid": 79, "count": 3, "last": then}));
    let (code, text) = stage.run(&["evidence", "gpu", "777778"]).await;
    assert_eq!(code, 2, "{text}");
    insta::assert_snapshot!(text, @"gantry: no board has the serial number 777778");
}

/// NVML does not show that the GPU was reset: the command confirms it. The pod has the privileges that it needs, and is
/// deleted afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn drained_gpu_is_reset_and_returned() {
    let stage = Stage::start().await;
    stage.install().await;
    assert_eq!(stage.run(&["cordon", "gpu", "a/3"]).await.0, 0);
    let fault = json!({"gpu": "GPU-a-3", "xid": 95, "class": "resettable", "reason": "Xid 95: broken",
        "since": "2026-11-02T10:00:00Z"});
    let status = json!({"status": {"faults": [fault]}});
    let gpu_nodes = Api::<GpuNode>::all(stage.0.client.clone());
    gpu_nodes.patch_status("a", &PatchParams::default(), &Patch::Merge(status)).await.unwrap();

    let (code, text) = stage.run(&["reset", "gpu", "a/3", "--dry-run"]).await;
    assert_eq!((code, text.as_str()), (0, "a GPU 3 (GPU-a-3) would be reset; nothing was changed\n"));
    stage.is_clean().await;

    let seen = std::sync::Mutex::new(Vec::new());
    let (code, text) = tokio::select! {
        ended = stage.run(&["reset", "gpu", "a/3", "--uncordon"]) => ended,
        () = stage.serve("Succeeded", &seen) => unreachable!(),
    };
    assert_eq!(code, 0, "{text}");
    insta::assert_snapshot!(text, @r"
    waiting for the plugin on a to close NVML
    pod gantry-system/gantry-reset-a-3 resets a GPU 3 (GPU-a-3)
    a GPU 3 (GPU-a-3) was reset by nvidia-smi
    a GPU 3 (GPU-a-3) is healthy and uncordoned
    ");
    stage.is_clean().await;
    assert_eq!(stage.cordon("a", "GPU-a-3").await, None);
    assert_eq!(gpu_nodes.get("a").await.unwrap().status.unwrap().faults, []);
    let seen = seen.into_inner().unwrap();
    let spec = seen[0].spec.as_ref().unwrap();
    assert_eq!((spec.node_name.as_deref(), spec.automount_service_account_token), (Some("a"), Some(false)));
    let container = &spec.containers[0];
    assert_eq!(container.image.as_deref(), Some("gantry:test"));
    let args: Vec<&str> = container.args.iter().flatten().map(String::as_str).collect();
    assert_eq!(args, ["reset-device", "--driver-root", "/driver-root", "GPU-a-3"]);
    let root = spec.volumes.as_ref().unwrap()[0].host_path.as_ref().unwrap();
    assert_eq!(root.path, "/run/nvidia/driver");
}

/// For a rule of remediation the command returns the GPU only if the cordon is the rule's own.
#[tokio::test(flavor = "multi_thread")]
async fn reset_of_a_rule_lifts_the_cordon_of_the_rule() {
    let stage = Stage::start().await;
    stage.install().await;
    let cordon = async |value: Option<String>| {
        let annotations = json!({"metadata": {"annotations": {"gantry.dev/cordon-GPU-a-3": value}}});
        let gpu_nodes = Api::<GpuNode>::all(stage.0.client.clone());
        gpu_nodes.patch_metadata("a", &PatchParams::default(), &Patch::Merge(annotations)).await.unwrap();
    };
    let since = "2026-11-02T10:00:00Z".parse().unwrap();
    let of_rule = |rule| Some(Cordon::of_rule(rule, "Xid 95", since).written());
    let mut texts = Vec::new();
    for (value, is_uncordoned) in
        [(of_rule("other"), false), (Some("the fan fails".to_owned()), false), (of_rule("own"), true)]
    {
        cordon(None).await;
        cordon(value).await;
        let seen = std::sync::Mutex::new(Vec::new());
        let (code, text) = tokio::select! {
            ended = stage.run(&["reset", "gpu", "a/GPU-a-3", "--uncordon-of-rule=own"]) => ended,
            () = stage.serve("Succeeded", &seen) => unreachable!(),
        };
        assert_eq!(code, 0, "{text}");
        assert_eq!(stage.cordon("a", "GPU-a-3").await.is_none(), is_uncordoned, "{text}");
        texts.push(text);
        stage.is_clean().await;
    }
    insta::assert_snapshot!(texts.join("\n"), @r"
    waiting for the plugin on a to close NVML
    pod gantry-system/gantry-reset-a-3 resets a GPU 3 (GPU-a-3)
    a GPU 3 (GPU-a-3) was reset by nvidia-smi
    a GPU 3 (GPU-a-3) stays cordoned by gantry-extender: rule other: Xid 95: the rule own did not set this cordon
    a GPU 3 (GPU-a-3) is healthy; `gantry uncordon gpu` returns it

    waiting for the plugin on a to close NVML
    pod gantry-system/gantry-reset-a-3 resets a GPU 3 (GPU-a-3)
    a GPU 3 (GPU-a-3) was reset by nvidia-smi
    a GPU 3 (GPU-a-3) stays cordoned: the fan fails: the rule own did not set this cordon
    a GPU 3 (GPU-a-3) is healthy; `gantry uncordon gpu` returns it

    waiting for the plugin on a to close NVML
    pod gantry-system/gantry-reset-a-3 resets a GPU 3 (GPU-a-3)
    a GPU 3 (GPU-a-3) was reset by nvidia-smi
    a GPU 3 (GPU-a-3) is healthy and uncordoned
    ");
    let (code, text) = stage.run(&["reset", "gpu", "a/3", "--uncordon", "--uncordon-of-rule=own"]).await;
    assert_eq!(code, 2, "{text}");
}

/// A command that was killed has left its pod.
#[tokio::test(flavor = "multi_thread")]
async fn reset_replaces_a_pod_that_has_ended() {
    let stage = Stage::start().await;
    stage.install().await;
    assert_eq!(stage.run(&["cordon", "gpu", "a/3"]).await.0, 0);
    let pods = Api::<Pod>::namespaced(stage.0.client.clone(), "gantry-system");
    let labels = json!({"app.kubernetes.io/name": "gantry-reset"});
    let left = json!({"metadata": {"name": "gantry-reset-a-3", "labels": labels},
        "spec": {"nodeName": "a", "containers": [{"name": "reset", "image": "gantry:old"}]}});
    pods.create(&PostParams::default(), &serde_json::from_value(left).unwrap()).await.unwrap();
    let seen = std::sync::Mutex::new(Vec::new());
    let (code, text) = tokio::select! {
        ended = stage.run(&["reset", "gpu", "a/3"]) => ended,
        () = stage.serve("Succeeded", &seen) => unreachable!(),
    };
    assert_eq!(code, 0, "{text}");
    insta::assert_snapshot!(text, @r"
    waiting for the plugin on a to close NVML
    pod gantry-system/gantry-reset-a-3 resets a GPU 3 (GPU-a-3)
    a GPU 3 (GPU-a-3) was reset by nvidia-smi
    a GPU 3 (GPU-a-3) is healthy; `gantry uncordon gpu` returns it
    ");
    let seen = seen.into_inner().unwrap();
    let images = seen.iter().map(|pod| pod.spec.as_ref().unwrap().containers[0].image.as_deref());
    let images: std::collections::BTreeSet<_> = images.flatten().collect();
    assert_eq!(images.into_iter().collect::<Vec<_>>(), ["gantry:old", "gantry:test"]);
    stage.is_clean().await;
}

/// A process has the GPU open: the driver refuses, and everything is as before.
#[tokio::test(flavor = "multi_thread")]
async fn reset_that_the_driver_refuses_is_undone() {
    let stage = Stage::start().await;
    stage.install().await;
    assert_eq!(stage.run(&["cordon", "gpu", "a/3"]).await.0, 0);
    let seen = std::sync::Mutex::new(Vec::new());
    let (code, text) = tokio::select! {
        ended = stage.run(&["reset", "gpu", "a/3", "--uncordon"]) => ended,
        () = stage.serve("Failed", &seen) => unreachable!(),
    };
    assert_eq!(code, 4, "{text}");
    insta::assert_snapshot!(text, @r"
    waiting for the plugin on a to close NVML
    pod gantry-system/gantry-reset-a-3 resets a GPU 3 (GPU-a-3)
    gantry: a GPU 3 (GPU-a-3) was not reset: GPU is in use by another process; the GPU stays cordoned
    ");
    stage.is_clean().await;
    assert!(stage.cordon("a", "GPU-a-3").await.is_some());
}

/// What is not drained, not there or without a plugin is not reset; nothing is changed.
#[tokio::test(flavor = "multi_thread")]
async fn reset_refuses_what_is_not_drained() {
    let stage = Stage::start().await;
    assert_eq!(stage.run(&["cordon", "gpu", "a/1", "a/2"]).await.0, 0);
    let mut texts = String::new();
    for (gpu, expected) in [("a/3", 3), ("a/1", 3), ("a/2", 1), ("a/7", 2), ("GPU-a-9", 2)] {
        let (code, text) = stage.run(&["reset", "gpu", gpu]).await;
        assert_eq!(code, expected, "{gpu}: {text}");
        texts.push_str(&text);
        stage.is_clean().await;
    }
    insta::assert_snapshot!(texts, @r"
    gantry: a GPU 3 (GPU-a-3) is not cordoned; nothing was done: `gantry drain gpu a/3` first
    gantry: a GPU 1 (GPU-a-1) is held by research/train-0; nothing was done: `gantry drain gpu a/1` first
    gantry: no pod of the plugin runs on a in the namespace gantry-system: install it, or name the namespace by --system-namespace
    gantry: no GPU 7: a has the GPUs 0 to 3
    gantry: no GPU has the UUID GPU-a-9; did you mean GPU-a-0?
    ");
    // A second reset on the node waits for the first.
    stage.install().await;
    let until = json!({"metadata": {"annotations": {names::NVML_CLOSED_ANNOTATION: "2126-11-02T10:00:00Z"}}});
    let gpu_nodes = Api::<GpuNode>::all(stage.0.client.clone());
    gpu_nodes.patch_metadata("a", &PatchParams::default(), &Patch::Merge(until)).await.unwrap();
    let (code, text) = stage.run(&["reset", "gpu", "a/2"]).await;
    assert_eq!(code, 1, "{text}");
    insta::assert_snapshot!(text, @"gantry: another reset of a GPU of a is under way, at most until 2126-11-02T10:00:00Z; `kubectl annotate gpunode a gantry.dev/nvml-closed-until-` ends one that was given up");
}

/// On the node: a driver's root that is not there is named.
#[test]
fn reset_device_names_what_it_cannot_enter() {
    let output = support::command(&["reset-device", "--driver-root=/nowhere", "GPU-a-3"]).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    insta::assert_snapshot!(text, @"gantry: cannot enter the driver's root /nowhere: No such file or directory (os error 2)");
}

#[tokio::test(flavor = "multi_thread")]
async fn reset_names_an_api_server_that_is_away() {
    let stage = Stage::start().await;
    stage.install().await;
    assert_eq!(stage.run(&["cordon", "gpu", "a/3"]).await.0, 0);
    let reset = stage.run(&["reset", "gpu", "a/3"]);
    let away = async {
        let gpu_nodes = Api::<GpuNode>::all(stage.0.client.clone());
        let is_asked = async || {
            let annotations = gpu_nodes.get_metadata("a").await.unwrap().metadata.annotations;
            annotations.unwrap_or_default().contains_key(names::NVML_CLOSED_ANNOTATION)
        };
        while !is_asked().await {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        stage.0.stop();
    };
    let ((code, text), ()) = tokio::join!(reset, away);
    assert_eq!(code, 1, "{text}");
    // Without the errors of the client, before and after.
    let (_, rest) = text.split_once("; ").unwrap();
    insta::assert_snapshot!(rest.split(": ").next().unwrap(), @"the GPU stays cordoned; the annotation gantry.dev/nvml-closed-until of a could not be removed; it expires");
}

#[tokio::test(flavor = "multi_thread")]
async fn drain_of_a_free_gpu_cordons_it() {
    let stage = Stage::start().await;
    let (code, text) = stage.run(&["drain", "gpu", "a/3"]).await;
    assert_eq!(code, 0, "{text}");
    insta::assert_snapshot!(timeless(&text), @r"
    a GPU 3 (GPU-a-3) cordoned: to be drained
    a GPU 3 (GPU-a-3) is drained: no pod holds it (TIME)
    ");
    assert_eq!(stage.cordon("a", "GPU-a-3").await.unwrap().reason, "to be drained");
    let (code, text) = stage.run(&["drain", "gpu", "a/7"]).await;
    assert_eq!(code, 2, "{text}");
}

/// The plugin reports processes of a pod that the API server no longer has: the GPU is not empty.
#[tokio::test(flavor = "multi_thread")]
async fn drain_waits_for_processes_of_deleted_pods() {
    let stage = Stage::start().await;
    let (code, text) = stage.run(&["drain", "gpu", "a/1", "--timeout=1"]).await;
    assert_eq!(code, 1, "{text}");
    insta::assert_snapshot!(text, @r"
    a GPU 1 (GPU-a-1) cordoned: to be drained
    waiting for the processes of research/train-0
    gantry: a GPU 1 (GPU-a-1) is not drained after 1 s: waiting for the processes of research/train-0; nothing was evicted; nothing more is evicted, and the GPU stays as it is
    ");
}

/// Nothing replaces a pod without a controller: it is not evicted unless the operator insists.
#[tokio::test(flavor = "multi_thread")]
async fn drain_refuses_pods_without_controller() {
    let stage = Stage::start().await;
    stage.holder("alone", 0).await;
    let (code, text) = stage.run(&["drain", "gpu", "a/0"]).await;
    assert_eq!(code, 1, "{text}");
    insta::assert_snapshot!(text, @r"
    a GPU 0 (GPU-a-0) cordoned: to be drained
    gantry: no controller replaces default/alone: add --force to evict it nevertheless; nothing was evicted; nothing more is evicted, and the GPU stays as it is
    ");
}

/// Another operator returns the GPU, or its node goes: the drain ends and evicts nothing more.
#[tokio::test(flavor = "multi_thread")]
async fn drain_ends_when_gpu_is_uncordoned_or_gone() {
    let gpu_nodes = |stage: &Stage| Api::<GpuNode>::all(stage.0.client.clone());
    let mut texts = Vec::new();
    for gone in [false, true] {
        let stage = Stage::start().await;
        let drain = stage.run(&["drain", "gpu", "a/1", "--timeout=60"]);
        let interrupt = async {
            while stage.cordon("a", "GPU-a-1").await.is_none() {
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
            if gone {
                gpu_nodes(&stage).delete("a", &Default::default()).await.unwrap();
            } else {
                assert_eq!(stage.run(&["uncordon", "gpu", "a/1"]).await.0, 0);
            }
        };
        let ((code, text), ()) = tokio::join!(drain, interrupt);
        assert_eq!(code, 1, "{text}");
        texts.push(text.lines().last().unwrap().to_owned());
    }
    insta::assert_snapshot!(texts.join("\n"), @r"
    gantry: a GPU 1 (GPU-a-1) was uncordoned meanwhile, and may get new pods; nothing was evicted; nothing more is evicted, and the GPU stays as it is
    gantry: the GpuNode a is gone; nothing was evicted; nothing more is evicted, and the GPU stays as it is
    ");
}

/// Another GPU leaves the node, so that the indices of those after it change: the drain stays with its GPU.
#[tokio::test(flavor = "multi_thread")]
async fn drain_follows_gpu_to_another_index() {
    let stage = Stage::start().await;
    let drain = stage.run(&["drain", "gpu", "a/1", "--timeout=60"]);
    let leave = async {
        while stage.cordon("a", "GPU-a-1").await.is_none() {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        let gpu_nodes = Api::<GpuNode>::all(stage.0.client.clone());
        let machine = std::fs::read_to_string(support::machine("workstation-2x.yaml")).unwrap();
        let mut machine: serde_json::Value = serde_saphyr::from_str(&machine).unwrap();
        (machine["gpus"][0]["uuid"], machine["gpus"][1]["uuid"]) = ("GPU-a-1".into(), "GPU-a-2".into());
        machine["nics"] = serde_json::Value::Null;
        let spec = json!({"spec": {"machine": machine}});
        gpu_nodes.patch("a", &PatchParams::default(), &Patch::Merge(spec)).await.unwrap();
        // Of GPU 1 now, which was GPU 2.
        stage.holder("beside", 2).await;
    };
    let ((code, text), ()) = tokio::join!(drain, leave);
    assert_eq!(code, 0, "{text}");
    insta::assert_snapshot!(timeless(text.lines().last().unwrap()), @"a GPU 0 (GPU-a-1) is drained: no pod holds it (TIME)");
}

#[tokio::test(flavor = "multi_thread")]
async fn drain_names_an_api_server_that_is_away() {
    let stage = Stage::start().await;
    let drain = stage.run(&["drain", "gpu", "a/1", "--timeout=60"]);
    let away = async {
        while stage.cordon("a", "GPU-a-1").await.is_none() {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        stage.0.stop();
        std::time::Instant::now()
    };
    let ((code, text), stopped) = tokio::join!(drain, away);
    assert_eq!(code, 1, "{text}");
    let seconds = stopped.elapsed().as_secs();
    assert!(seconds < 25, "{seconds} s: {text}");
    insta::assert_snapshot!(text.split_once("; ").unwrap().1, @"nothing was evicted; nothing more is evicted, and the GPU stays as it is");
}
