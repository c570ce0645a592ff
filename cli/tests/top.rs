//! `gantry top` against an API server.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use gantry_api::GpuNode;
use kube::api::{Api, Patch, PatchParams};
use serde_json::json;
use support::cluster::Cluster;
use support::terminal::Terminal;

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
    insta::assert_snapshot!(text.lines().take(6).collect::<Vec<_>>().join("\n"), @r"
    gantry top  1 node, 8 GPUs: 7 free, 1 held
      dgx1  [0 ·]─[1 ·]═[2 ·]═[3 a] │ [4 ·]─[5 ·]═[6 ·]═[7 ·]  a ml/train

    1 node, 8 GPUs: 7 free, 1 held
    [0 a] held by a   [1?a] granted to a   [2+a] shared, part is free   [3 ·] free
    [4~a] reserved for gang a   [5!a] a is deleted, its processes may still run   [6 x] unheal
    ");
    assert!(text.lines().all(|line| line.chars().count() <= 90), "{text}");
    let (code, text) = run(&[]);
    assert_eq!(code, Some(2));
    insta::assert_snapshot!(text, @"gantry: standard output is no terminal: use --once, or gantry map");
    let (code, text) = run(&["--once", "--node", "dgx2"]);
    assert_eq!(code, Some(2));
    insta::assert_snapshot!(text, @"gantry: no node with GPUs is called dgx2; did you mean dgx1?");
}

/// The program in a terminal: it draws, follows the cluster, keys and the size of the window.
#[tokio::test(flavor = "multi_thread")]
async fn terminal_shows_changes_keys_and_sizes() {
    let cluster = Cluster::start(|_| json!([])).await;
    let kubeconfig = format!("--kubeconfig={}", cluster.kubeconfig().display());
    let top = Terminal::run(&["top", &kubeconfig], (20, 80));
    top.shows("the first picture", |lines| {
        lines.len() == 20
            && lines[0].starts_with("gantry top  2 nodes, 8 GPUs: 8 free")
            && lines[19].starts_with("q quit  arrows scroll  f only free  / filter")
    });
    assert!(top.is_full_screen());

    let holders = json!([{"namespace": "ml", "pod": "train", "resource": "nvidia.com/gpu",
        "devices": (0..4).map(|gpu| format!("GPU-b-{gpu}")).collect::<Vec<_>>(), "provenance": "PodResources"}]);
    let nodes = Api::<GpuNode>::all(cluster.client.clone());
    let status = Patch::Merge(json!({"status": {"holders": holders}}));
    nodes.patch_status("b", &PatchParams::default(), &status).await.unwrap();
    top.shows("the holder", |lines| {
        lines[0].contains("4 free, 4 held") && lines.iter().any(|line| line.contains("ml/train"))
    });

    top.press("f");
    let has_b = |lines: &[String]| lines.iter().any(|line| line.contains("ml/train"));
    top.shows("nodes with free GPUs only", |lines| lines[19].contains("f all nodes") && !has_b(lines));
    top.press("/b");
    top.shows("a filter that is typed", |lines| lines[19] == "node name contains: b_");
    top.press("\r");
    top.shows("a filter", |lines| lines[19].contains("escape removes /b"));

    top.resize((31, 110));
    top.shows("a larger window", |lines| {
        lines.len() == 31 && lines[30].starts_with("q quit") && !lines[19].contains("quit")
    });
    // The one that is larger than the picture has no rest of the smaller ones.
    top.resize((8, 30));
    top.shows("a small window", |lines| lines.len() == 8 && lines[7].starts_with("q quit"));

    top.press("q");
    top.ends_in_order();
}

/// What the terminal was is there again after SIGTERM, also before the cluster is read.
#[tokio::test(flavor = "multi_thread")]
async fn terminal_is_restored_at_sigterm() {
    let cluster = Cluster::start(|_| json!([])).await;
    let kubeconfig = format!("--kubeconfig={}", cluster.kubeconfig().display());
    let top = Terminal::run(&["top", &kubeconfig], (20, 80));
    top.shows("the picture", |lines| lines[0].contains("8 GPUs"));
    top.terminate();
    top.ends_in_order();

    // A server that accepts connections and never responds.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut config: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(cluster.kubeconfig()).unwrap()).unwrap();
    config["clusters"][0]["cluster"]["server"] = format!("http://{}", silent.local_addr().unwrap()).into();
    std::fs::write(cluster.kubeconfig(), config.to_string()).unwrap();
    let top = Terminal::run(&["top", &kubeconfig], (20, 80));
    silent.accept().unwrap();
    top.terminate();
    top.ends_in_order();
}
