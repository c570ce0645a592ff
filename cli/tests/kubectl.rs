//! The commands as kubectl's users expect them: contexts, namespaces, forms of output, completion, the name of a plugin.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;

use gantry_api::{Gang, GpuNode, names};
use gantry_sim_cluster::api::{ApiOptions, ApiServer};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::core::NamespaceResourceScope;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

/// A cluster of one node, with a pod and a gang in the namespace `ml`, and a kubeconfig with two contexts: `lab` of
/// that namespace, and the current one, of no server.
struct Cluster {
    folder: tempfile::TempDir,
    leases: Api<Lease>,
    stop: CancellationToken,
}

async fn create<K>(api: &Api<K>, object: Value)
where
    K: kube::Resource<Scope = NamespaceResourceScope> + serde::Serialize + serde::de::DeserializeOwned,
    K: Clone + std::fmt::Debug,
{
    api.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
}

impl Cluster {
    async fn start() -> Self {
        let stop = CancellationToken::new();
        let server = ApiServer::start(&ApiOptions::default(), stop.clone()).await.unwrap();
        let client = server.client().unwrap();
        let namespaces: Api<Namespace> = Api::all(client.clone());
        let ml = serde_json::from_value(json!({"metadata": {"name": "ml"}})).unwrap();
        namespaces.create(&PostParams::default(), &ml).await.unwrap();
        let node = json!({"metadata": {"name": "a"}, "status": {"allocatable": {"nvidia.com/gpu": "8", "pods": "9"}}});
        let nodes: Api<Node> = Api::all(client.clone());
        nodes.create(&PostParams::default(), &serde_json::from_value(node).unwrap()).await.unwrap();
        let machine = std::fs::read_to_string(support::machine("dgx1-v100.yaml")).unwrap();
        let machine: Value = serde_saphyr::from_str(&machine).unwrap();
        let gpu_node = json!({"apiVersion": "gantry.dev/v1alpha1", "kind": "GpuNode", "metadata": {"name": "a"},
            "spec": {"machine": machine}});
        let gpu_nodes: Api<GpuNode> = Api::all(client.clone());
        gpu_nodes.create(&PostParams::default(), &serde_json::from_value(gpu_node).unwrap()).await.unwrap();
        let status = json!({"status": {"pluginVersion": "0.0.9"}});
        gpu_nodes.patch_status("a", &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
        let pods: Api<Pod> = Api::namespaced(client.clone(), "ml");
        for (name, gpus, gang) in
            [("trainer-0", "1", "train"), ("trainer-1", "1", "train"), ("other", "1", "")]
        {
            let mut annotations = json!({});
            if !gang.is_empty() {
                annotations = json!({names::GANG_ANNOTATION: gang, names::GANG_MIN_ANNOTATION: "2"});
            }
            let pod = json!({"metadata": {"name": name, "annotations": annotations},
                "spec": {"schedulerName": "gantry", "containers": [{"name": "main", "image": "busybox",
                    "resources": {"limits": {"nvidia.com/gpu": gpus}}}]}});
            create(&pods, pod).await;
        }
        let gang = json!({"apiVersion": "gantry.dev/v1alpha1", "kind": "Gang", "metadata": {"name": "train"}, "spec": {}});
        create(&Api::<Gang>::namespaced(client.clone(), "ml"), gang).await;
        let config: Value = serde_saphyr::from_str(&server.kubeconfig()).unwrap();
        let context = &config["contexts"][0]["context"];
        let (cluster, user) = (&context["cluster"], &context["user"]);
        let mut config = config.clone();
        config["contexts"] = json!([
            {"name": "lab", "context": {"cluster": cluster, "user": user, "namespace": "ml"}},
            {"name": "nowhere", "context": {"cluster": "nowhere", "user": user}},
        ]);
        let nowhere = json!({"name": "nowhere", "cluster": {"server": "http://127.0.0.1:1"}});
        config["clusters"].as_array_mut().unwrap().push(nowhere);
        config["current-context"] = "nowhere".into();
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config"), serde_json::to_string(&config).unwrap()).unwrap();
        Self { folder, leases: Api::namespaced(client, "gantry-system"), stop }
    }

    /// The leader publishes these settings.
    async fn publish(&self, settings: Value) {
        let lease = json!({"metadata": {"name": "gantry-extender",
            "annotations": {names::SETTINGS_ANNOTATION: settings.to_string()}}, "spec": {}});
        create(&self.leases, lease).await;
    }

    /// Runs the program with this kubeconfig as the variable: code, standard output and standard error.
    async fn run(&self, words: &'static str) -> (i32, String, String) {
        let kubeconfig = self.folder.path().join("config").display().to_string();
        tokio::task::spawn_blocking(move || {
            let words: Vec<&str> = words.split(' ').collect();
            let run = support::with(&words, &[("KUBECONFIG", &kubeconfig)]);
            (run.code, run.stdout, run.stderr)
        })
        .await
        .unwrap()
    }

    /// The candidates for the last word of a command line, as bash asks for them.
    async fn complete(&self, words: &'static str) -> Vec<String> {
        let kubeconfig = self.folder.path().join("config");
        tokio::task::spawn_blocking(move || complete(&kubeconfig, words)).await.unwrap()
    }
}

fn complete(kubeconfig: &std::path::Path, words: &str) -> Vec<String> {
    let words: Vec<&str> = words.split(' ').collect();
    let index = (words.len() - 1).to_string();
    let mut line = vec!["--"];
    line.extend(&words);
    let mut command = support::command(&line);
    command.env("KUBECONFIG", kubeconfig).envs([
        ("COMPLETE", "bash"),
        ("_CLAP_COMPLETE_INDEX", &index),
        ("_CLAP_COMPLETE_COMP_TYPE", "9"),
        ("_CLAP_COMPLETE_SPACE", "true"),
        ("_CLAP_IFS", "\n"),
    ]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn context_names_cluster_and_namespace() {
    let cluster = Cluster::start().await;
    let (code, text, _) = cluster.run("explain pod other --context lab").await;
    assert_eq!(code, 0);
    insta::assert_snapshot!(text, @r"
    pod ml/other requests 1 nvidia.com/gpu
    scheduled by gantry; no pod shows that this scheduler calls Gantry: see --scheduler-name
    does not fit now on 1 of 1 nodes:
      a: does not serve nvidia.com/gpu
    ");
    let (code, _, error) = cluster.run("explain pod other --context lab -n default").await;
    assert_eq!(code, 2);
    insta::assert_snapshot!(error, @"gantry: no pod other in namespace default that requests nvidia.com/gpu or another managed resource; there is one in namespace ml: add -n ml");
    let (code, _, error) = cluster.run("map --context lba").await;
    assert_eq!(code, 2);
    insta::assert_snapshot!(error.replace(cluster.folder.path().to_str().unwrap(), ""), @r#"gantry: kubeconfig /config has no context "lba"; it has lab, nowhere"#);
    let (code, _, error) = cluster.run("map").await;
    assert_eq!(code, 1, "the current context has no server");
    assert_eq!(error.matches("refused").count(), 1, "{error}");
}

/// The pods name the scheduler `gantry`, and the extender is called by it.
#[tokio::test(flavor = "multi_thread")]
async fn published_settings_are_used() {
    let cluster = Cluster::start().await;
    let (_, text, error) = cluster.run("explain pod other --context lab").await;
    insta::assert_snapshot!(text, @r"
    pod ml/other requests 1 nvidia.com/gpu
    scheduled by gantry; no pod shows that this scheduler calls Gantry: see --scheduler-name
    does not fit now on 1 of 1 nodes:
      a: does not serve nvidia.com/gpu
    ");
    assert_eq!(error, "", "no Lease is no fault");
    cluster
        .publish(
            json!({"version": "0.0.8", "commit": "abc", "schedulerNames": ["gantry"], "policy": "spread"}),
        )
        .await;
    let (_, text, _) = cluster.run("explain pod other --context lab").await;
    insta::assert_snapshot!(text, @r"
    pod ml/other requests 1 nvidia.com/gpu
    does not fit now on 1 of 1 nodes:
      a: does not serve nvidia.com/gpu
    ");
    let (_, text, _) =
        cluster.run("explain pod other --context lab --scheduler-name default-scheduler").await;
    // The option precedes.
    insta::assert_snapshot!(text, @r"
    pod ml/other requests 1 nvidia.com/gpu
    scheduled by gantry; no pod shows that this scheduler calls Gantry: see --scheduler-name
    does not fit now on 1 of 1 nodes:
      a: does not serve nvidia.com/gpu
    ");
    let (code, text, _) = cluster.run("version --context lab -o json").await;
    assert_eq!(code, 0);
    let versions: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(versions["client"]["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(versions["cluster"]["extender"], json!({"version": "0.0.8", "commit": "abc"}));
    assert_eq!(versions["cluster"]["plugins"], json!([{"version": "0.0.9", "nodes": 1}]));
}

#[tokio::test(flavor = "multi_thread")]
async fn unreadable_settings_are_reported_and_replaced() {
    let cluster = Cluster::start().await;
    cluster.publish(json!({"version": "0.0.8", "gates": "perhaps"})).await;
    let (code, text, error) = cluster.run("explain queue --context lab").await;
    assert_eq!((code, text.is_empty()), (0, false));
    insta::assert_snapshot!(error, @r#"gantry: the settings of the extender cannot be read, its defaults are used: annotation gantry.dev/settings: invalid type: string "perhaps", expected a boolean at line 1 column 18"#);
    let (code, text, error) = cluster.run("version --context lab").await;
    assert_eq!(code, 1);
    assert!(text.starts_with("gantry      "), "{text}");
    insta::assert_snapshot!(error, @r#"gantry: annotation gantry.dev/settings: invalid type: string "perhaps", expected a boolean at line 1 column 18"#);
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_are_listed_as_documents_and_names() {
    let cluster = Cluster::start().await;
    cluster.publish(json!({"schedulerNames": ["gantry"]})).await;
    let (_, json, _) = cluster.run("explain gang train --context lab -o json").await;
    let (_, yaml, _) = cluster.run("explain gang train --context lab -o yaml").await;
    let json: Value = serde_json::from_str(&json).unwrap();
    let yaml: Value = serde_saphyr::from_str(&yaml).unwrap();
    assert_eq!(json["name"], "train");
    assert_eq!(json["name"], yaml["name"]);
    let (_, name, _) = cluster.run("explain pod other --context lab -o name").await;
    assert_eq!(name, "pod/other\n");
    let (_, names, _) = cluster.run("map --context lab -o name").await;
    assert_eq!(names, "gpunode.gantry.dev/a\n");
    let (_, yaml, _) = cluster.run("map --context lab -o yaml").await;
    let map: Value = serde_saphyr::from_str(&yaml).unwrap();
    assert_eq!(map["nodes"][0]["freeGpus"], 8);
    for queue in ["explain queue --context lab -A -o name", "explain queue --context lab -n ml -o name"] {
        let (code, names, error) = cluster.run(queue).await;
        assert_eq!((code, names.as_str()), (0, "gang.gantry.dev/train\n"), "{error}");
    }
    let (_, names, _) = cluster.run("explain queue --context lab -n default -o name").await;
    assert_eq!(names, "");
    let (code, _, error) = cluster.run("explain queue --context lab -n ml -A").await;
    assert_eq!(code, 2);
    assert!(error.contains("cannot be used with"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn words_are_completed_with_names_of_the_cluster() {
    let cluster = Cluster::start().await;
    for (words, names) in [
        ("gantry explain --context lab pod tr", &["trainer-0", "trainer-1"][..]),
        ("gantry explain gang --context lab tr", &["train"]),
        ("gantry map --context lab --node ", &["a"]),
        ("gantry map --context l", &["lab"]),
        ("gantry expl", &["explain"]),
        // The current context has no server.
        ("gantry explain pod tr", &[]),
    ] {
        assert_eq!(cluster.complete(words).await, names, "{words}");
    }
}

#[test]
fn plugin_of_kubectl_speaks_of_itself_by_that_name() {
    let mut command = support::command(&["explain", "--help"]);
    let output = command.arg0("/usr/local/bin/kubectl-gantry").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("Usage: kubectl gantry explain"), "{text}");
}

#[test]
fn every_shell_gets_a_script() {
    for shell in ["bash", "zsh", "fish"] {
        let run = support::gantry(&["completion", shell]);
        assert_eq!(run.code, 0);
        assert!(run.stdout.contains("COMPLETE") && run.stdout.contains("gantry"), "{shell}: {}", run.stdout);
    }
    let script = support::gantry(&["completion", "bash"]).stdout;
    let checked = Command::new("bash").args(["-n", "-c", &script]).status().unwrap();
    assert!(checked.success());
}

#[test]
fn every_command_has_a_manual_page() {
    let folder = tempfile::tempdir().unwrap();
    let run = support::gantry(&["man", folder.path().to_str().unwrap()]);
    assert_eq!((run.code, run.stderr.as_str()), (0, ""));
    for (page, words) in
        [("gantry", "explain"), ("gantry-map", "watch"), ("gantry-explain-queue", "all\\-namespaces")]
    {
        let text = std::fs::read_to_string(folder.path().join(format!("{page}.1"))).unwrap();
        assert!(text.contains(".TH") && text.contains(words), "{page}: {text}");
    }
}

#[test]
fn map_is_drawn_from_a_file_of_kubectl() {
    let machine = std::fs::read_to_string(support::machine("dgx1-v100.yaml")).unwrap();
    let machine: Value = serde_saphyr::from_str(&machine).unwrap();
    let node = json!({"apiVersion": "gantry.dev/v1alpha1", "kind": "GpuNode", "metadata": {"name": "a"},
        "spec": {"machine": machine}});
    let list = json!({"apiVersion": "v1", "kind": "List", "items": [node]}).to_string();
    let run = support::piped(&["map", "--from", "-", "-o", "json"], &list);
    assert_eq!(run.stderr, "");
    let map: Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!(map["nodes"][0]["name"], "a");
    let run = support::piped(&["map", "--from", "-"], "kind: Pod\nmetadata: {name: x}\n");
    assert_eq!(run.code, 2);
    assert_eq!(
        run.stderr,
        "gantry: standard input: kind \"Pod\"; allowed are GpuNode, Gang, and lists of them\n"
    );
    let missing: PathBuf = "/nosuch.yaml".into();
    let run = support::gantry(&["map", "--from", missing.to_str().unwrap()]);
    assert_eq!(run.code, 2);
    assert_eq!(run.stderr.matches("No such file").count(), 1, "{}", run.stderr);
}
