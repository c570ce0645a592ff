use http::{Request, Response};
use kube::client::Body;
use serde_json::Value;
use tower_test::mock;

use super::*;
use crate::fixtures::{Cluster, bound, bridged, member, pod, request};
use gantry_planner::decide::Options;

#[tokio::test]
async fn a_parked_pod_gets_a_condition_when_gpus_come_free_for_it() {
    let cluster = Cluster::new(Options::default());
    let holder = bound(pod("a", 8), "n", 1, Some("0-7"));
    cluster.add("n", &bridged()).pod(&holder);
    let parked = UnschedulablePod {
        namespace: "ml".into(),
        name: "waits".into(),
        request: request(4),
        generation: cluster.store.snapshot().generation,
    };
    cluster.store.update(|index| index.add_unschedulable("uid-1".into(), parked));

    let (service, mut api) = mock::pair::<Request<Body>, Response<Body>>();
    let (metrics, shutdown) = (Arc::new(Metrics::new()), CancellationToken::new());
    let client = Client::new(service, "default");
    let task = tokio::spawn(run(client, Arc::clone(&cluster.store), Arc::clone(&metrics), shutdown.clone()));

    let mut ended = holder;
    ended["status"]["phase"] = "Succeeded".into();
    cluster.pod(&ended);

    let (request, send) = api.next_request().await.unwrap();
    assert_eq!(request.method(), "PATCH");
    assert_eq!(request.uri().path(), "/api/v1/namespaces/ml/pods/waits/status");
    let body: Value = serde_json::from_slice(&request.into_body().collect_bytes().await.unwrap()).unwrap();
    assert_eq!(body["metadata"]["uid"], "uid-1");
    // kube-scheduler before 1.32 retries a pod for its metadata only.
    assert_eq!(
        body["metadata"]["annotations"]["gantry.dev/activated-at"],
        body["status"]["conditions"][0]["lastTransitionTime"]
    );
    assert_eq!(body["status"]["conditions"][0]["type"], "gantry.dev/GpusFreed");
    send.send_response(Response::new(Body::from(pod("waits", 4).to_string().into_bytes())));

    let woken = Outcome { outcome: "activated" };
    while metrics.activations.get_or_create(&woken).get() == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(!cluster.store.read(|index| index.is_unschedulable("uid-1")));
    shutdown.cancel();
    task.await.unwrap();
}

#[tokio::test]
async fn failed_activation_is_retried() {
    let cluster = Cluster::new(Options::default());
    let holder = bound(pod("a", 8), "n", 1, Some("0-7"));
    cluster.add("n", &bridged()).pod(&holder).pod(&pod("waits", 4));
    cluster.park("waits", request(4));
    let (service, mut api) = mock::pair::<Request<Body>, Response<Body>>();
    let (metrics, shutdown) = (Arc::new(Metrics::new()), CancellationToken::new());
    let task = tokio::spawn(run(
        Client::new(service, "default"),
        Arc::clone(&cluster.store),
        Arc::clone(&metrics),
        shutdown.clone(),
    ));
    let mut ended = holder;
    ended["status"]["phase"] = "Succeeded".into();
    cluster.pod(&ended);

    let (_, send) = api.next_request().await.unwrap();
    let broken = Response::builder().status(500).body(Body::from(b"broken".to_vec()));
    send.send_response(broken.unwrap());
    let (request, _unanswered) = api.next_request().await.unwrap();
    assert_eq!(request.uri().path(), "/api/v1/namespaces/default/pods/waits/status");
    assert_eq!(metrics.activations.get_or_create(&Outcome { outcome: "failed" }).get(), 1);
    shutdown.cancel();
    task.await.unwrap();
}

#[tokio::test]
async fn members_are_activated_when_their_gang_is_reserved() {
    for nominate in [false, true] {
        let cluster = Cluster::new(Options { nominate, ..Options::default() });
        cluster.pod(&member("a-0", 4, "a", 2)).pod(&member("a-1", 4, "a", 2));
        cluster.wait(2);
        for uid in ["a-0", "a-1"] {
            cluster.store.update(|index| index.answer(&uid.into(), &|_| true));
        }
        let (service, mut api) = mock::pair::<Request<Body>, Response<Body>>();
        let (metrics, shutdown) = (Arc::new(Metrics::new()), CancellationToken::new());
        let task = tokio::spawn(run(
            Client::new(service, "default"),
            Arc::clone(&cluster.store),
            Arc::clone(&metrics),
            shutdown.clone(),
        ));
        cluster.add("n", &bridged());
        let mut woken = Vec::new();
        for _ in 0..2 {
            let (request, send) = api.next_request().await.unwrap();
            woken.push(request.uri().path().to_owned());
            let body: Value =
                serde_json::from_slice(&request.into_body().collect_bytes().await.unwrap()).unwrap();
            assert_eq!(body["status"]["conditions"][0]["reason"], "ReservationChanged");
            let told = if nominate { Value::from("n") } else { Value::Null };
            assert_eq!(body["status"]["nominatedNodeName"], told);
            send.send_response(Response::new(Body::from(pod("a", 4).to_string().into_bytes())));
        }
        woken.sort();
        assert_eq!(
            woken,
            ["/api/v1/namespaces/default/pods/a-0/status", "/api/v1/namespaces/default/pods/a-1/status"]
        );
        shutdown.cancel();
        task.await.unwrap();
    }
}
