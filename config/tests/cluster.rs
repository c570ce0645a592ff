//! A configuration chosen by a label of the node, from a ConfigMap or a folder, and changes of either.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::Arc;
use std::time::Duration;

use gantry_config::source::{Choice, ConfigLocation, Configs, Fallback, PerNode, Report, Source, follow};
use gantry_config::{Config, MigStrategy, Strictness};
use gantry_sim_cluster::api::{ApiOptions, ApiServer};
use k8s_openapi::api::core::v1::{ConfigMap, Node};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

const NODE: &str = "node-1";
const LABEL: &str = "nvidia.com/device-plugin.config";
/// A long limit for a machine under load; events come in a moment.
const SOON: Duration = Duration::from_secs(30);

struct Scene {
    client: Client,
    stop: CancellationToken,
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Scene {
    async fn new() -> Self {
        let stop = CancellationToken::new();
        let api = ApiServer::start(&ApiOptions::default(), stop.clone()).await.unwrap();
        let scene = Self { client: api.client().unwrap(), stop };
        let node = serde_json::from_value(json!({"metadata": {"name": NODE}})).unwrap();
        scene.nodes().create(&PostParams::default(), &node).await.unwrap();
        scene
    }

    fn nodes(&self) -> Api<Node> {
        Api::all(self.client.clone())
    }

    fn maps(&self) -> Api<ConfigMap> {
        Api::namespaced(self.client.clone(), "default")
    }

    async fn label(&self, value: Option<&str>) {
        let patch = json!({"metadata": {"labels": {LABEL: value}}});
        self.nodes().patch(NODE, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
    }

    async fn map(&self, data: serde_json::Value) {
        let map = json!({"metadata": {"name": "configs"}, "data": data});
        let map = serde_json::from_value(map).unwrap();
        self.maps().create(&PostParams::default(), &map).await.unwrap();
    }

    async fn write(&self, key: &str, strategy: &str) {
        let patch = json!({"data": {key: format!("flags: {{migStrategy: {strategy}}}")}});
        self.maps().patch("configs", &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
    }

    /// Follows; the configuration comes by itself, so that a scene can go on before there is one.
    fn follow(&self, configs: Configs) -> (Followed, watch::Receiver<Report>) {
        let (reporter, reports) = watch::channel(Report::default());
        let source = Source {
            place: ConfigLocation::PerNode(Box::new(PerNode {
                configs,
                node: NODE.into(),
                label: LABEL.into(),
                choice: Choice { default: None, fallbacks: vec![Fallback::Named, Fallback::Single] },
                client: self.client.clone(),
            })),
            layers: Vec::new(),
            strictness: Strictness::Strict,
            gpu_resource: None,
        };
        let stop = self.stop.clone();
        let following = tokio::spawn(async move {
            let tasks = TaskTracker::new();
            follow(source, |_: &Config| Ok(()), reporter, &tasks, stop).await.unwrap().unwrap()
        });
        (Followed(following), reports)
    }
}

struct Followed(tokio::task::JoinHandle<watch::Receiver<Arc<Config>>>);

impl Followed {
    async fn configs(self) -> watch::Receiver<Arc<Config>> {
        tokio::time::timeout(SOON, self.0).await.unwrap().unwrap()
    }
}

async fn becomes(configs: &mut watch::Receiver<Arc<Config>>, wanted: MigStrategy) {
    let found = configs.wait_for(|config| config.mig_strategy == wanted);
    tokio::time::timeout(SOON, found).await.unwrap().unwrap();
}

/// The problem for which a configuration is refused for the time `failures`.
async fn problem(reports: &mut watch::Receiver<Report>, failures: u64) -> Arc<str> {
    let found = reports.wait_for(|report| report.failures == failures && report.problem.is_some());
    let found = tokio::time::timeout(SOON, found).await.ok();
    let problem = found.map(|report| report.unwrap().problem.clone().unwrap());
    problem.unwrap_or_else(|| panic!("no failure {failures}, but {:?}", reports.borrow()))
}

#[tokio::test]
async fn config_map_label_and_content_are_followed() {
    let scene = Scene::new().await;
    scene
        .map(json!({"default": "", "a100": "flags: {migStrategy: single}", "h100": "flags: {migStrategy: mixed}"}))
        .await;
    let (followed, mut reports) =
        scene.follow(Configs::ConfigMap { namespace: "default".into(), name: "configs".into() });
    let mut configs = followed.configs().await;
    becomes(&mut configs, MigStrategy::None).await;
    scene.label(Some("a100")).await;
    becomes(&mut configs, MigStrategy::Single).await;
    scene.label(Some("h100")).await;
    becomes(&mut configs, MigStrategy::Mixed).await;
    // The same key with another content: NVIDIA's config-manager does not notice.
    scene.write("h100", "single").await;
    becomes(&mut configs, MigStrategy::Single).await;

    scene.write("h100", "singel").await;
    insta::assert_snapshot!(problem(&mut reports, 1).await, @r#"ConfigMap default/configs, h100: line 1: flags.migStrategy: "singel" is not allowed; allowed: none, single, mixed; did you mean "single"?"#);
    scene.label(Some("h10")).await;
    insta::assert_snapshot!(problem(&mut reports, 2).await, @r#"ConfigMap default/configs: the node's label names the configuration "h10", which is not there; there are: a100, default, h100; did you mean "h100"? (label nvidia.com/device-plugin.config)"#);
    scene.maps().delete("configs", &DeleteParams::default()).await.unwrap();
    insta::assert_snapshot!(problem(&mut reports, 3).await, @"ConfigMap default/configs: there is no such ConfigMap");
    assert_eq!(configs.borrow().mig_strategy, MigStrategy::Single, "the last good one stays");

    scene.map(json!({"h10": "flags: {migStrategy: mixed}"})).await;
    becomes(&mut configs, MigStrategy::Mixed).await;
    assert_eq!(reports.borrow().problem, None);
}

#[tokio::test]
async fn wrong_config_at_start_waits_for_a_good_one() {
    let scene = Scene::new().await;
    let (followed, mut reports) =
        scene.follow(Configs::ConfigMap { namespace: "default".into(), name: "configs".into() });
    insta::assert_snapshot!(problem(&mut reports, 1).await, @"ConfigMap default/configs: there is no such ConfigMap");
    scene.map(json!({"default": "flags: {migStrategy: 1}"})).await;
    insta::assert_snapshot!(problem(&mut reports, 2).await, @"ConfigMap default/configs, default: line 1: flags.migStrategy: integer 1 is no text; allowed: none, single, mixed");
    scene.write("default", "mixed").await;
    becomes(&mut followed.configs().await, MigStrategy::Mixed).await;
}

#[tokio::test]
async fn folder_file_is_chosen_by_label() {
    let scene = Scene::new().await;
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("a"), "flags: {migStrategy: single}").unwrap();
    std::fs::write(folder.path().join("b"), "").unwrap();
    scene.label(Some("a")).await;
    let (followed, _reports) = scene.follow(Configs::Folder(folder.path().into()));
    let mut configs = followed.configs().await;
    becomes(&mut configs, MigStrategy::Single).await;
    scene.label(Some("b")).await;
    becomes(&mut configs, MigStrategy::None).await;
    std::fs::write(folder.path().join("b"), "flags: {migStrategy: mixed}").unwrap();
    becomes(&mut configs, MigStrategy::Mixed).await;
    // Writers empty a file before they write it.
    let emptied = std::time::Instant::now();
    std::fs::write(folder.path().join("b"), "").unwrap();
    becomes(&mut configs, MigStrategy::None).await;
    assert!(
        emptied.elapsed() >= std::time::Duration::from_secs(1),
        "a bound from below, which no load can break"
    );
}

#[tokio::test]
async fn unreadable_file_affects_only_nodes_that_choose_it() {
    let scene = Scene::new().await;
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("a"), "flags: {migStrategy: single}").unwrap();
    let logo = folder.path().join("logo.png");
    std::fs::write(&logo, b"\x89PNG\r\n\x1a\n").unwrap();
    scene.label(Some("a")).await;
    let (followed, mut reports) = scene.follow(Configs::Folder(folder.path().into()));
    let mut configs = followed.configs().await;
    becomes(&mut configs, MigStrategy::Single).await;
    assert_eq!(reports.borrow().problem, None);

    scene.label(Some("logo.png")).await;
    let reported = problem(&mut reports, 1).await;
    insta::assert_snapshot!(reported.replace(folder.path().to_str().unwrap(), ""), @"/logo.png: cannot be read: it is not UTF-8");
    std::fs::write(&logo, "flags: {migStrategy: mixed}").unwrap();
    becomes(&mut configs, MigStrategy::Mixed).await;
}
