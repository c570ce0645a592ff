//! The API server as kube-rs, an independent client, sees it.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use gantry_sim_cluster::api::ApiOptions;
use k8s_openapi::api::core::v1::{Binding, Event, Node, Pod};
use k8s_openapi::api::events::v1::Event as NewEvent;
use kube::ResourceExt;
use kube::api::{
    Api, DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions, WatchEvent, WatchParams,
};
use kube::core::{ObjectMeta, PartialObjectMeta};
use kube::runtime::watcher::{self, Event as Seen};
use serde_json::json;
use support::Cluster;

fn pod(name: &str) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": name, "annotations": {"own": "kept", "both": "pod"}},
        "spec": {"containers": [{"name": "main", "image": "x", "resources": {"limits": {"nvidia.com/gpu": "2"}}}]},
    }))
    .unwrap()
}

fn binding(name: &str, uid: Option<&str>, node: &str) -> Binding {
    serde_json::from_value(json!({
        "metadata": {"name": name, "uid": uid, "annotations": {"gantry.dev/grant": "g", "both": "binding"}},
        "target": {"kind": "Node", "name": node},
    }))
    .unwrap()
}

async fn bind(pods: &Api<Pod>, binding: &Binding) -> Result<serde_json::Value, kube::Error> {
    let name = binding.name_any();

    pods.create_subresource("binding", &name, &PostParams::default(), binding).await
}

fn code(error: &kube::Error) -> u16 {
    match error {
        kube::Error::Api(status) => status.code,
        other => panic!("no answer of the server: {other:?}"),
    }
}

#[tokio::test]
async fn created_pod_has_defaults() {
    let cluster = Cluster::start().await;
    let pods = cluster.pods();
    let created = pods.create(&PostParams::default(), &pod("a")).await.unwrap();
    assert!(created.uid().is_some() && created.creation_timestamp().is_some());
    assert_eq!(created.status.as_ref().unwrap().phase.as_deref(), Some("Pending"));
    let requests = created.spec.unwrap().containers[0].resources.clone().unwrap().requests.unwrap();
    assert_eq!(requests["nvidia.com/gpu"].0, "2", "limits are requests where none is given");
    let again = pods.create(&PostParams::default(), &pod("a")).await.unwrap_err();
    assert_eq!(code(&again), 409);
}

#[tokio::test]
async fn an_overcommitted_extended_resource_is_refused() {
    let cluster = Cluster::start().await;
    let mut wrong = pod("a");
    let resources = wrong.spec.as_mut().unwrap().containers[0].resources.as_mut().unwrap();
    resources.requests =
        Some([("nvidia.com/gpu".to_owned(), serde_json::from_value(json!("1")).unwrap())].into());
    let refused = cluster.pods().create(&PostParams::default(), &wrong).await.unwrap_err();
    assert_eq!(code(&refused), 422);
}

#[tokio::test]
async fn missing_namespace_refuses_pods() {
    let cluster = Cluster::start().await;
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), "nowhere");
    let refused = pods.create(&PostParams::default(), &pod("a")).await.unwrap_err();
    assert_eq!(code(&refused), 404);
}

#[tokio::test]
async fn binding_merges_annotations_in_one_write() {
    let cluster = Cluster::start().await;
    let pods = cluster.pods();
    let created = pods.create(&PostParams::default(), &pod("a")).await.unwrap();
    let before = cluster.api.revision();
    bind(&pods, &binding("a", created.metadata.uid.as_deref(), "n1")).await.unwrap();
    assert_eq!(cluster.api.revision(), before + 1);
    let bound = pods.get("a").await.unwrap();
    assert_eq!(bound.spec.as_ref().unwrap().node_name.as_deref(), Some("n1"));
    let annotations = bound.annotations();
    assert_eq!(annotations["gantry.dev/grant"], "g");
    assert_eq!(annotations["own"], "kept");
    assert_eq!(annotations["both"], "binding");
}

#[tokio::test]
async fn one_of_sixteen_racing_bindings_wins() {
    let cluster = Cluster::start().await;
    let pods = cluster.pods();
    let uid = pods.create(&PostParams::default(), &pod("a")).await.unwrap().uid();
    let attempts = (0..16).map(|n| {
        let (pods, binding) = (pods.clone(), binding("a", uid.as_deref(), &format!("n{n}")));
        async move { (n, bind(&pods, &binding).await) }
    });
    let results = futures::future::join_all(attempts).await;
    let won: Vec<i32> = results.iter().filter(|(_, result)| result.is_ok()).map(|(n, _)| *n).collect();
    assert_eq!(won.len(), 1);
    assert!(results.iter().filter_map(|(_, result)| result.as_ref().err()).all(|error| code(error) == 409));
    let node = pods.get("a").await.unwrap().spec.unwrap().node_name.unwrap();
    assert_eq!(node, format!("n{}", won[0]));
}

#[tokio::test]
async fn binding_of_another_uid_or_missing_pod_is_refused() {
    let cluster = Cluster::start().await;
    let pods = cluster.pods();
    pods.create(&PostParams::default(), &pod("a")).await.unwrap();
    let before = cluster.api.revision();
    let other = bind(&pods, &binding("a", Some("another"), "n1")).await.unwrap_err();
    assert_eq!(code(&other), 409);
    let missing = bind(&pods, &binding("b", None, "n1")).await.unwrap_err();
    assert_eq!(code(&missing), 404);
    assert_eq!(cluster.api.revision(), before);
}

#[tokio::test]
async fn a_dry_run_changes_nothing() {
    let cluster = Cluster::start().await;
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    let before = cluster.api.revision();
    cluster.pods().create(&dry, &pod("a")).await.unwrap();
    assert_eq!(cluster.api.revision(), before);
}

#[tokio::test]
async fn metadata_watch_shows_pod_with_grant_until_its_end() {
    let cluster = Cluster::start().await;
    let pods = cluster.pods();
    let config =
        watcher::Config::default().fields("spec.nodeName=n1,status.phase!=Succeeded,status.phase!=Failed");
    let metadata: Api<PartialObjectMeta<Pod>> = Api::namespaced(cluster.client.clone(), "default");
    let mut seen = watcher::watcher(metadata, config).boxed();
    while !matches!(seen.try_next().await.unwrap(), Some(Seen::InitDone)) {}

    pods.create(&PostParams::default(), &pod("a")).await.unwrap();
    bind(&pods, &binding("a", None, "n1")).await.unwrap();
    match seen.try_next().await.unwrap() {
        Some(Seen::Apply(PartialObjectMeta { metadata, .. })) => {
            assert_eq!(metadata.annotations.unwrap()["gantry.dev/grant"], "g");
        }
        other => panic!("{other:?}"),
    }
    let ended = json!({"status": {"phase": "Succeeded"}});
    pods.patch_status("a", &PatchParams::default(), &Patch::Merge(ended)).await.unwrap();
    match seen.try_next().await.unwrap() {
        Some(Seen::Delete(last)) => {
            assert_eq!(last.metadata.annotations.unwrap()["gantry.dev/grant"], "g");
            assert_eq!(last.metadata.deletion_timestamp, None, "it finished, nobody deleted it");
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn watch_from_a_forgotten_revision_gets_410() {
    let options = ApiOptions { history: 4, ..ApiOptions::default() };
    let cluster = Cluster::with(&options).await;
    let pods = cluster.pods();
    for n in 0..6 {
        pods.create(&PostParams::default(), &pod(&format!("p{n}"))).await.unwrap();
    }
    let mut seen = pods.watch(&WatchParams::default(), "2").await.unwrap().boxed();
    match seen.try_next().await.unwrap() {
        Some(WatchEvent::Error(status)) => {
            assert_eq!((status.code, status.reason.as_str()), (410, "Expired"));
        }
        other => panic!("{other:?}"),
    }
    assert!(seen.try_next().await.unwrap().is_none(), "the watch ends");
}

#[tokio::test]
async fn a_quiet_watch_gets_bookmarks() {
    let options = ApiOptions { bookmark_every: Duration::from_millis(5), ..ApiOptions::default() };
    let cluster = Cluster::with(&options).await;
    let pods = cluster.pods();
    let from = pods.list(&ListParams::default()).await.unwrap().metadata.resource_version.unwrap();
    let mut seen = pods.watch(&WatchParams::default(), &from).await.unwrap().boxed();
    match seen.try_next().await.unwrap() {
        Some(WatchEvent::Bookmark(bookmark)) => assert_eq!(bookmark.metadata.resource_version, from),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn streaming_list_ends_with_a_bookmark() {
    let cluster = Cluster::start().await;
    let pods = cluster.pods();
    pods.create(&PostParams::default(), &pod("a")).await.unwrap();
    let seen: Vec<Seen<Pod>> = watcher::watcher(pods.clone(), watcher::Config::default().streaming_lists())
        .take(3)
        .try_collect()
        .await
        .unwrap();
    assert!(matches!(&seen[..], [Seen::Init, Seen::InitApply(pod), Seen::InitDone] if pod.name_any() == "a"));
}

#[tokio::test]
async fn bound_pod_gets_grace_period_unless_forced() {
    let cluster = Cluster::start().await;
    let pods = cluster.pods();
    pods.create(&PostParams::default(), &pod("a")).await.unwrap();
    bind(&pods, &binding("a", None, "n1")).await.unwrap();
    pods.delete("a", &DeleteParams::default()).await.unwrap();
    let ending = pods.get("a").await.unwrap();
    assert!(ending.metadata.deletion_timestamp.is_some());
    assert_eq!(ending.metadata.deletion_grace_period_seconds, Some(30));
    let late = bind(&pods, &binding("a", None, "n1")).await.unwrap_err();
    assert_eq!(code(&late), 409);
    let other = DeleteParams::default()
        .grace_period(0)
        .preconditions(Preconditions { uid: Some("another".into()), resource_version: None });
    assert_eq!(code(&pods.delete("a", &other).await.unwrap_err()), 409);
    pods.delete("a", &DeleteParams::default().grace_period(0)).await.unwrap();
    assert!(pods.get_opt("a").await.unwrap().is_none());
}

#[tokio::test]
async fn a_replacement_of_an_older_revision_is_a_conflict() {
    let cluster = Cluster::start().await;
    let pods = cluster.pods();
    let first = pods.create(&PostParams::default(), &pod("a")).await.unwrap();
    let label = json!({"metadata": {"labels": {"x": "y"}}});
    pods.patch("a", &PatchParams::default(), &Patch::Merge(label)).await.unwrap();
    let stale = pods.replace("a", &PostParams::default(), &first).await.unwrap_err();
    assert_eq!(code(&stale), 409);
}

#[tokio::test]
async fn status_is_written_through_its_subresource_only() {
    let cluster = Cluster::start().await;
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    let node =
        Node { metadata: ObjectMeta { name: Some("n1".into()), ..ObjectMeta::default() }, ..Node::default() };
    nodes.create(&PostParams::default(), &node).await.unwrap();
    let both =
        json!({"metadata": {"labels": {"a": "b"}}, "status": {"allocatable": {"nvidia.com/gpu": "8"}}});
    let main = nodes.patch("n1", &PatchParams::default(), &Patch::Merge(&both)).await.unwrap();
    assert_eq!(main.status.and_then(|status| status.allocatable), None);
    assert_eq!(main.metadata.labels.unwrap()["a"], "b");
    let status = nodes.patch_status("n1", &PatchParams::default(), &Patch::Merge(&both)).await.unwrap();
    assert_eq!(status.status.unwrap().allocatable.unwrap()["nvidia.com/gpu"].0, "8");
}

#[tokio::test]
async fn apply_makes_an_object_and_then_replaces_its_spec() {
    let cluster = Cluster::start().await;
    let api: Api<gantry_api::GpuNode> = Api::all(cluster.client.clone());
    let apply = PatchParams::apply("test").force();
    let wanted = |gpus: u8| {
        let rows: Vec<String> = (0..gpus)
            .map(|row| {
                (0..gpus).map(|column| if row == column { "X" } else { "SYS" }).collect::<Vec<_>>().join(" ")
            })
            .collect();
        let gpus: Vec<_> = (0..gpus).map(|index| json!({"index": index})).collect();
        json!({"apiVersion": "gantry.dev/v1alpha1", "kind": "GpuNode", "metadata": {"name": "n1"},
               "spec": {"machine": {"gpus": gpus, "paths": rows}}})
    };
    let first = api.patch("n1", &apply, &Patch::Apply(wanted(2))).await.unwrap();
    let status = json!({"apiVersion": "gantry.dev/v1alpha1", "kind": "GpuNode", "metadata": {"name": "n1"},
                        "status": {"pluginVersion": "1"}});
    api.patch_status("n1", &apply, &Patch::Apply(status)).await.unwrap();
    let second = api.patch("n1", &apply, &Patch::Apply(wanted(1))).await.unwrap();
    assert_eq!(first.uid(), second.uid());
    assert_eq!(second.spec.machine.gpus().len(), 1);
    assert_eq!(second.status.unwrap().plugin_version, "1", "the status outlives an apply of the spec");
    assert_eq!(second.metadata.generation, Some(2));
}

#[tokio::test]
async fn an_event_written_in_the_new_group_reads_in_the_old_one() {
    let cluster = Cluster::start().await;
    let new: Api<NewEvent> = Api::namespaced(cluster.client.clone(), "default");
    let event: NewEvent = serde_json::from_value(json!({
        "metadata": {"name": "e"}, "eventTime": null, "action": "Filter", "reason": "NoFit", "type": "Warning",
        "note": "3 of 8 GPUs free", "regarding": {"kind": "Pod", "name": "a"}, "reportingController": "gantry-extender",
    }))
    .unwrap();
    new.create(&PostParams::default(), &event).await.unwrap();
    let old: Api<Event> = Api::namespaced(cluster.client.clone(), "default");
    let about_a = old.list(&ListParams::default().fields("involvedObject.name=a")).await.unwrap();
    assert_eq!(about_a.items[0].message.as_deref(), Some("3 of 8 GPUs free"));
    assert_eq!(new.get("e").await.unwrap().note.as_deref(), Some("3 of 8 GPUs free"));
}

#[tokio::test]
async fn bad_input_is_refused_and_changes_nothing() {
    let cluster = Cluster::start().await;
    let before = cluster.api.revision();
    let refuse = async |method: &str, path: &str, content_type: &str, body: Vec<u8>| {
        let request = http::Request::builder()
            .method(method)
            .uri(path)
            .header("content-type", content_type)
            .body(body)
            .unwrap();
        code(&cluster.client.request::<serde_json::Value>(request).await.unwrap_err())
    };
    let pods = "/api/v1/namespaces/default/pods";
    assert_eq!(refuse("POST", pods, "application/json", b"{".to_vec()).await, 400);
    assert_eq!(refuse("POST", pods, "application/json", b"[]".to_vec()).await, 400);
    assert_eq!(refuse("POST", pods, "application/json", br#"{"kind":"Node"}"#.to_vec()).await, 400);
    assert_eq!(refuse("POST", pods, "application/json", vec![b' '; 4 << 20]).await, 413);
    assert_eq!(refuse("PATCH", &format!("{pods}/a"), "application/json", b"{}".to_vec()).await, 415);
    assert_eq!(refuse("PATCH", pods, "application/json", b"{}".to_vec()).await, 405);
    assert_eq!(refuse("GET", "/api/v1/secrets", "", Vec::new()).await, 404);
    assert_eq!(refuse("GET", "/api/v1/pods?fieldSelector=spec.x=1", "", Vec::new()).await, 400);
    assert_eq!(cluster.api.revision(), before);
}

#[tokio::test]
async fn watch_shows_deletion_timestamp_before_removal() {
    let cluster = Cluster::start().await;
    let pods = cluster.pods();
    pods.create(&PostParams::default(), &pod("a")).await.unwrap();
    bind(&pods, &binding("a", None, "n1")).await.unwrap();
    let from = pods.get("a").await.unwrap().resource_version().unwrap();
    let mut seen = pods.watch(&WatchParams::default(), &from).await.unwrap().boxed();
    pods.delete("a", &DeleteParams::default().grace_period(0)).await.unwrap();
    match (seen.try_next().await.unwrap(), seen.try_next().await.unwrap()) {
        (Some(WatchEvent::Modified(marked)), Some(WatchEvent::Deleted(last))) => {
            assert!(marked.metadata.deletion_timestamp.is_some());
            assert_eq!(last.metadata.deletion_timestamp, marked.metadata.deletion_timestamp);
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn object_is_deleted_with_its_last_finalizer() {
    let cluster = Cluster::start().await;
    let pods = cluster.pods();
    let mut held = pod("a");
    held.metadata.finalizers = Some(vec!["test/hold".into()]);
    pods.create(&PostParams::default(), &held).await.unwrap();
    pods.delete("a", &DeleteParams::default()).await.unwrap();
    assert!(pods.get("a").await.unwrap().metadata.deletion_timestamp.is_some());
    let off = json!({"metadata": {"finalizers": null}});
    pods.patch("a", &PatchParams::default(), &Patch::Merge(off)).await.unwrap();
    assert!(pods.get_opt("a").await.unwrap().is_none());
}

#[tokio::test]
async fn discovery_lists_resources_and_server_validation() {
    let cluster = Cluster::start().await;
    let get = async |path: &str| {
        let request = http::Request::get(path).body(Vec::new()).unwrap();
        cluster.client.request::<serde_json::Value>(request).await
    };
    let version = cluster.client.apiserver_version().await.unwrap();
    assert_eq!((version.major.as_str(), version.minor.as_str()), ("1", "36"));
    let groups = cluster.client.list_api_groups().await.unwrap();
    assert!(groups.groups.iter().any(|group| group.name == "gantry.dev"));
    let core = cluster.client.list_core_api_resources("v1").await.unwrap();
    assert!(core.resources.iter().any(|resource| resource.name == "pods/binding"));
    let index = get("/openapi/v3").await.unwrap();
    let gantry = index["paths"]["apis/gantry.dev/v1alpha1"]["serverRelativeURL"].as_str().unwrap().to_owned();
    let document = get(&gantry).await.unwrap();
    let patch = &document["paths"]["/apis/gantry.dev/v1alpha1/gpunodes/{name}"]["patch"];
    assert_eq!(patch["parameters"][0]["name"], "fieldValidation");
    assert_eq!(code(&get("/openapi/v3/apis/apps/v1").await.unwrap_err()), 404);
}
