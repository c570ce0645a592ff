//! `gantry top` against an API server.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use gantry_api::GpuNode;
use gantry_sim_cluster::api::{ApiOptions, ApiServer};
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

#[tokio::test(flavor = "multi_thread")]
async fn once_prints_one_picture_and_pipes_need_it() {
    let server = ApiServer::start(&ApiOptions::default(), CancellationToken::new()).await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let kubeconfig = folder.path().join("kubeconfig");
    std::fs::write(&kubeconfig, server.kubeconfig()).unwrap();
    let machine = std::fs::read_to_string(support::machine("dgx1-v100.yaml")).unwrap();
    let machine: Value = serde_saphyr::from_str(&machine).unwrap();
    let id = machine["gpus"][3]["uuid"].clone();
    let object = json!({
        "apiVersion": "gantry.dev/v1alpha1", "kind": "GpuNode", "metadata": {"name": "dgx1"}, "spec": {"machine": machine},
    });
    let gpu_nodes: Api<GpuNode> = Api::all(server.client().unwrap());
    gpu_nodes.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
    let holder = json!({"namespace": "ml", "pod": "train", "resource": "nvidia.com/gpu", "devices": [id],
        "provenance": "PodResources"});
    let status = Patch::Merge(json!({"status": {"holders": [holder]}}));
    gpu_nodes.patch_status("dgx1", &PatchParams::default(), &status).await.unwrap();

    let run = |words: &[&str]| {
        let file = format!("--kubeconfig={}", kubeconfig.display());
        let mut command = support::command(&[&["top", &file], words].concat());
        let output = command.env("COLUMNS", "90").output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8(text).unwrap())
    };
    let (code, text) = run(&["--once"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.starts_with("gantry top  1 node, 8 GPUs: 7 free, 1 held\n"), "{text}");
    assert!(text.contains("[3 a]") && text.contains("a ml/train"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 90), "{text}");
    let (code, text) = run(&[]);
    assert!(
        code == Some(2) && text.contains("standard output is no terminal: use --once"),
        "{code:?} {text}"
    );
    let (code, text) = run(&["--once", "--node", "dgx2"]);
    assert!(
        code == Some(2) && text.contains("no node with GPUs is called dgx2; did you mean dgx1?"),
        "{text}"
    );
}
