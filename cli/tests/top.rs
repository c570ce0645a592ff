//! `gantry top` against an API server.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use serde_json::json;
use support::cluster::Cluster;

#[tokio::test(flavor = "multi_thread")]
async fn once_prints_one_picture_and_pipes_need_it() {
    let cluster = Cluster::empty().await;
    let holders = json!([{"namespace": "ml", "pod": "train", "resource": "nvidia.com/gpu",
        "devices": ["GPU-d1-3"], "provenance": "PodResources"}]);
    cluster.add_gpu_node("dgx1", "dgx1-v100.yaml", holders).await;

    let run = |words: &[&str]| {
        let file = format!("--kubeconfig={}", cluster.kubeconfig().display());
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
