use axum::body::Body;
use gantry_planner::decide::Options;
use http_body_util::BodyExt as _;
use serde::de::DeserializeOwned;
use tower::ServiceExt as _;

use super::*;
use crate::answers;
use crate::fixtures::{Cluster, bound, bridged, member, plain, pod};

fn answers(cluster: &Cluster, leadership: Leadership) -> Router {
    AnswersServer::router(Answers {
        store: Arc::clone(&cluster.store),
        resources: vec!["nvidia.com/gpu".to_owned()],
        leadership: Arc::new(leadership),
        metrics: Arc::default(),
    })
}

fn leading(cluster: &Cluster) -> Router {
    let leadership = Leadership::always();
    leadership.enter(leadership.term().unwrap());
    answers(cluster, leadership)
}

async fn get_as(router: &Router, path: &str, host: &str) -> (u16, String) {
    let request = Request::get(path).header("host", host).body(Body::empty()).unwrap();
    let response = router.clone().oneshot(request).await.unwrap();
    let status = response.status().as_u16();
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8(bytes.to_vec()).unwrap())
}

async fn get(router: &Router, path: &str) -> (u16, String) {
    get_as(router, path, "localhost").await
}

async fn read<T: DeserializeOwned>(router: &Router, path: &str) -> T {
    let (status, text) = get(router, path).await;
    assert_eq!(status, 200, "{path}: {text}");
    serde_json::from_str(&text).unwrap()
}

/// Pods that run and that wait, a gang that runs and one that waits.
fn busy() -> Cluster {
    let cluster = Cluster::new(Options::default());
    cluster.add("a", &bridged()).add("b", &plain(4));
    cluster.pod(&bound(pod("runs", 3), "a", 1, Some("0-2")));
    cluster.pod(&pod("waits", 4)).pod(&pod("never", 16));
    for number in 0..3 {
        cluster.pod(&member(&format!("train-{number}"), 4, "train", 3));
    }
    cluster
}

#[tokio::test]
async fn reports_are_read_as_they_were_made() {
    let cluster = busy();
    let router = leading(&cluster);
    let resources = ["nvidia.com/gpu"];
    for name in ["runs", "waits", "never", "train-1"] {
        let report: PodReport = read(&router, &pod_path("default", name)).await;
        assert_eq!(Ok(report), answers::pod(&cluster.store, &resources, "default", name), "{name}");
    }
    let queue = cluster.store.read(Index::gangs_in_line);
    assert_eq!(queue.len(), 1);
    let report: GangReport = read(&router, &gang_path("default", "train")).await;
    assert!(report.tried.is_some() && report.gang.members.len() == 3, "{report:?}");
    assert_eq!(Ok(report), answers::gang(&cluster.store, &queue, "default", "train"));
    let gangs: Vec<GangState> = read(&router, QUEUE_PATH).await;
    assert_eq!(gangs, answers::queue(&cluster.store, &queue));
    assert_eq!(gangs.len(), 1);
}

#[tokio::test]
async fn unknown_names_are_answered_with_a_suggestion() {
    let router = leading(&busy());
    let mut texts = Vec::new();
    for path in [
        pod_path("default", "wait"),
        pod_path("other", "waits"),
        pod_path("other", "none"),
        gang_path("default", "trein"),
        gang_path("other", "train"),
    ] {
        let (status, text) = get(&router, &path).await;
        let UnknownObject { unknown } = serde_json::from_str(&text).unwrap();
        assert_eq!(status, 404, "{path}: {unknown}");
        texts.push(unknown);
    }
    insta::assert_snapshot!(texts.join("\n"), @r"
    no pod wait in namespace default that requests nvidia.com/gpu or another managed resource; did you mean waits?
    no pod waits in namespace other that requests nvidia.com/gpu or another managed resource; there is one in namespace default: add -n default
    no pod none in namespace other that requests nvidia.com/gpu or another managed resource; there is none at all in namespace other
    no gang trein in namespace default; did you mean train?
    no gang train in namespace other; there is one in namespace default: add -n default
    ");
    // Of a path that is not served, a program reads no such answer.
    let (status, text) = get(&router, "/api/v1/explain/nodes").await;
    assert!(status == 404 && serde_json::from_str::<UnknownObject>(&text).is_err(), "{text}");
}

#[tokio::test]
async fn only_a_leader_that_knows_the_cluster_answers() {
    let cold = Cluster::cold(Options::default());
    let (status, text) = get(&leading(&cold), QUEUE_PATH).await;
    assert_eq!(status, 503);
    insta::assert_snapshot!(text, @"the cluster's pods, nodes and GpuNodes are not all listed yet; try again");
    let (status, text) = get(&answers(&busy(), Leadership::follower()), QUEUE_PATH).await;
    assert_eq!(status, 503);
    insta::assert_snapshot!(text, @"no extender leads yet; try again");
}

#[tokio::test]
async fn other_sites_and_too_many_questions_are_refused() {
    let router = leading(&busy());
    let (status, _) = get_as(&router, QUEUE_PATH, "evil.example.com").await;
    assert_eq!(status, 403);
    let mut codes = Vec::new();
    for _ in 0..40 {
        codes.push(get(&router, QUEUE_PATH).await.0);
    }
    assert!(codes[..15].iter().all(|code| *code == 200) && codes.contains(&429), "{codes:?}");
}
