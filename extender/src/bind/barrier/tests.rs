use std::collections::BTreeSet;

use gantry_api::{Grant, PodUid};
use gantry_gang::protocol::{Answer, Work};
use http::{Request, Response, StatusCode};
use kube::client::Body;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tower_test::mock::{self, Handle};

use super::*;
use crate::fixtures::{Cluster, bridged, gpu_node, member, target, watched};
use crate::index::MemberStage;
use gantry_planner::decide::Options;

type Api = Handle<Request<Body>, Response<Body>>;

/// A node of eight GPUs, a gang of four members that ask for two each, and an API server played by hand. Bind ends
/// after `timeout`.
fn setup(timeout: Duration) -> (Cluster, Binder, Api) {
    let cluster = Cluster::new(Options::default());
    cluster.add("n", &bridged());
    for number in 0..4 {
        cluster.pod(&member(&name(number), 2, "a", 4));
    }
    cluster.wait(2);
    for number in 0..4 {
        // kube-scheduler filters before it binds.
        let uid = PodUid::from(name(number).as_str());
        let answer = cluster.store.update(|index| index.answer(&uid, &|_| true));
        assert_eq!(answer, Answer::Node("n".into()));
    }
    let (service, api) = mock::pair();
    let client = kube::Client::new(service, "default");
    let binder = Binder::new(client, Arc::clone(&cluster.store), watched(), timeout);
    (cluster, binder, api)
}

fn name(number: u32) -> String {
    format!("a-{number}")
}

fn bind(binder: &Binder, number: u32) -> JoinHandle<Result<(), String>> {
    let (binder, target) = (binder.clone(), target(&name(number), "n"));
    tokio::spawn(async move { binder.bind(&target).await.map_err(|failure| failure.to_string()) })
}

/// Waits until the decision is to be written, and says that it was.
async fn commit(cluster: &Cluster) {
    loop {
        for work in cluster.store.update(|index| index.take_work()) {
            if let Work::Commit { gang, decision } = work {
                cluster.store.update(|index| index.committed(&gang, &decision.id, Ok(())));
                return;
            }
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

async fn until(cluster: &Cluster, arrived: usize) {
    let count = || {
        let view = cluster.store.read(|index| index.gang_view("default", "a")).unwrap();
        view.members.iter().filter(|member| member.stage == MemberStage::Arrived).count()
    };
    while count() != arrived {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

fn status(code: u16) -> Response<Body> {
    let body =
        json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "code": code, "status": "Success"});
    Response::builder()
        .status(StatusCode::from_u16(code).unwrap())
        .body(Body::from(serde_json::to_vec(&body).unwrap()))
        .unwrap()
}

/// Takes so many Bindings; the devices each pod is granted.
async fn take(mut api: Api, bindings: usize) -> Vec<BTreeSet<String>> {
    let mut granted = Vec::new();
    for _ in 0..bindings {
        let (request, send) = api.next_request().await.unwrap();
        assert_eq!(request.method(), "POST");
        let body = request.into_body().collect_bytes().await.unwrap();
        let body: Value = serde_json::from_slice(&body).unwrap();
        let grant: Grant =
            serde_json::from_str(body["metadata"]["annotations"]["gantry.dev/grant"].as_str().unwrap())
                .unwrap();
        assert_eq!(grant.pod.as_str(), body["metadata"]["uid"]);
        let held = grant.held("nvidia.com/gpu");
        granted.push(held.iter().map(ToString::to_string).collect());
        send.send_response(status(201));
    }
    granted
}

#[tokio::test]
async fn who_leads_no_more_sends_no_binding_of_what_it_has_decided() {
    let (cluster, binder, mut api) = setup(Duration::from_secs(60));
    let leadership = Arc::new(crate::lease::Leadership::follower());
    let far = tokio::time::Instant::now() + Duration::from_secs(3600);
    leadership.win("me", far);
    let binder = binder.led(Arc::clone(&leadership));
    let binds: Vec<_> = (0..4).map(|number| bind(&binder, number)).collect();
    until(&cluster, 4).await;
    commit(&cluster).await;
    let (_request, _unanswered) = api.next_request().await.unwrap();
    leadership.lose("another".to_owned());
    let mut reasons = BTreeSet::new();
    for bind in binds {
        reasons.insert(bind.await.unwrap().unwrap_err());
    }
    insta::assert_snapshot!(reasons.into_iter().collect::<Vec<_>>().join("\n"), @"the API server does not answer: this extender is no longer the leader; the next one binds the pod");
}

#[tokio::test]
async fn no_member_is_bound_before_the_decision_is_written() {
    let (cluster, binder, api) = setup(Duration::from_secs(60));
    let server = tokio::spawn(take(api, 4));
    let mut binds: Vec<_> = (0..3).map(|number| bind(&binder, number)).collect();
    until(&cluster, 3).await;
    assert!(cluster.store.update(|index| index.take_work()).is_empty());
    binds.push(bind(&binder, 3));
    commit(&cluster).await;
    for bind in binds {
        assert_eq!(bind.await.unwrap(), Ok(()));
    }
    let granted = server.await.unwrap();
    let all: BTreeSet<&String> = granted.iter().flatten().collect();
    assert_eq!((all.len(), granted.len()), (8, 4));
}

#[tokio::test]
async fn whoever_hangs_up_before_the_decision_has_not_arrived() {
    let (cluster, binder, api) = setup(Duration::from_secs(60));
    drop(api);
    let waiting = bind(&binder, 0);
    until(&cluster, 1).await;
    waiting.abort();
    until(&cluster, 0).await;
}

#[tokio::test]
async fn whoever_hangs_up_after_the_decision_is_bound_all_the_same() {
    let (cluster, binder, mut api) = setup(Duration::from_secs(60));
    let binds: Vec<_> = (0..4).map(|number| bind(&binder, number)).collect();
    until(&cluster, 4).await;
    commit(&cluster).await;
    // The first Binding is on its way.
    let (_, send) = api.next_request().await.unwrap();
    for bind in binds {
        bind.abort();
    }
    send.send_response(status(201));
    assert_eq!(take(api, 3).await.len(), 3);
}

#[tokio::test]
async fn a_gang_whose_members_do_not_all_come_is_told_so_in_time() {
    let (cluster, binder, api) = setup(Duration::from_secs(1));
    drop(api);
    let error = bind(&binder, 0).await.unwrap().unwrap_err();
    assert_eq!(
        error,
        "gang default/a: timed out after 1 s waiting for the remaining members; the reservation is kept and this pod is bound once they arrive"
    );
    // It counts all the same, and its place is kept.
    until(&cluster, 1).await;
    assert_eq!(cluster.free("n"), "");
}

/// How long a bind of member 0 took by the clock of the runtime, and what it heard.
async fn answered(binder: &Binder) -> (Duration, Result<(), String>) {
    let began = tokio::time::Instant::now();
    let said = bind(binder, 0).await.unwrap();
    (began.elapsed(), said)
}

#[tokio::test(start_paused = true)]
async fn bind_answers_within_its_time_limit() {
    let limit = Duration::from_secs(20);
    // Others do not come.
    let (_cluster, binder, _api) = setup(limit);
    let (took, said) = answered(&binder).await;
    assert!(said.is_err() && took <= limit, "{took:?}");
    // They come late, and then the API server does not answer.
    let mut reasons = Vec::new();
    for late in [13, 19] {
        let (cluster, binder, mut api) = setup(limit);
        let deciding = async {
            tokio::time::sleep(Duration::from_secs(late)).await;
            let others: Vec<_> = (1..4).map(|number| bind(&binder, number)).collect();
            commit(&cluster).await;
            let mut hanging = Vec::new();
            while hanging.len() < 3 {
                hanging.push(api.next_request().await.unwrap());
            }
            for other in others {
                other.await.unwrap().unwrap_err();
            }
        };
        let ((took, said), ()) = tokio::join!(answered(&binder), deciding);
        assert!(took <= limit, "{late}: {took:?}");
        reasons.push(said.unwrap_err());
    }
    insta::assert_snapshot!(reasons.join("\n"), @r"
    the API server does not answer: no answer in time
    gang default/a: timed out after 13 s waiting for the remaining members; the reservation is kept and this pod is bound once they arrive
    ");
}

/// A gang of which two members have come and left, and the others come; how many Bindings the extender made by itself.
async fn bound_deferred(cluster: &Cluster, binder: &Binder) -> u64 {
    for number in [0, 1] {
        bind(binder, number).await.unwrap().unwrap_err();
    }
    let (events, mailbox) = crate::gang::events::Events::new();
    let metrics = Arc::new(crate::metrics::Metrics::new());
    let shutdown = tokio_util::sync::CancellationToken::new();
    let own = tokio::spawn(crate::bind::deferred::run(
        binder.clone(),
        events,
        Arc::clone(&metrics),
        shutdown.clone(),
    ));
    let binds = [bind(binder, 2), bind(binder, 3)];
    commit(cluster).await;
    for bind in binds {
        // Not answered in time, if it was the first: it is bound all the same.
        let _ = bind.await.unwrap();
    }
    let bound = crate::metrics::Outcome { outcome: "bound" };
    let count = || metrics.binds.get_or_create(&bound).get();
    while count() < 2 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    shutdown.cancel();
    own.await.unwrap();
    drop(mailbox);
    count()
}

#[tokio::test]
async fn timed_out_member_is_bound_with_the_others() {
    let (cluster, binder, api) = setup(Duration::from_secs(1));
    let server = tokio::spawn(take(api, 4));
    assert_eq!(bound_deferred(&cluster, &binder).await, 2);
    let granted = server.await.unwrap();
    let all: BTreeSet<&String> = granted.iter().flatten().collect();
    assert_eq!((all.len(), granted.len()), (8, 4));
}

#[tokio::test]
async fn deferred_binding_without_answer_is_retried() {
    let (cluster, binder, mut api) = setup(Duration::from_secs(1));
    let server = tokio::spawn(async move {
        // Those of all four hang.
        let mut hanging = Vec::new();
        for _ in 0..4 {
            hanging.push(api.next_request().await.unwrap());
        }
        let granted = take(api, 2).await;
        drop(hanging);
        granted
    });
    assert_eq!(bound_deferred(&cluster, &binder).await, 2);
    assert_eq!(server.await.unwrap().len(), 2);
}

#[tokio::test]
async fn a_binding_that_is_not_answered_is_tried_again() {
    let (cluster, binder, mut api) = setup(Duration::from_secs(60));
    let binds: Vec<_> = (0..4).map(|number| bind(&binder, number)).collect();
    commit(&cluster).await;
    let (request, send) = api.next_request().await.unwrap();
    assert_eq!(request.method(), "POST");
    send.send_response(status(500));
    let mut bound = 0;
    while bound < 4 {
        let (request, send) = api.next_request().await.unwrap();
        let pod = request.uri().path().rsplit('/').next().unwrap().to_owned();
        if request.method() == "GET" {
            let pod = member(&pod, 2, "a", 4);
            let body = Body::from(serde_json::to_vec(&pod).unwrap());
            send.send_response(Response::new(body));
        } else {
            bound += 1;
            send.send_response(status(201));
        }
    }
    for bind in binds {
        assert_eq!(bind.await.unwrap(), Ok(()));
    }
}

/// Four members are bound by an API server that refuses the first so many Bindings by `code`; what they hear.
async fn put_off(code: u16, refusals: usize) -> Vec<Result<(), String>> {
    let (cluster, binder, mut api) = setup(Duration::from_secs(60));
    let binds: Vec<_> = (0..4).map(|number| bind(&binder, number)).collect();
    commit(&cluster).await;
    let server = tokio::spawn(async move {
        let mut left = refusals;
        while let Some((request, send)) = api.next_request().await {
            assert_eq!(request.method(), "POST");
            send.send_response(status(if left > 0 { code } else { 201 }));
            left = left.saturating_sub(1);
        }
    });
    let mut said = Vec::new();
    for bind in binds {
        said.push(bind.await.unwrap());
    }
    server.abort();
    said
}

#[tokio::test]
async fn postponed_binding_of_decided_member_is_retried() {
    for code in [408, 429] {
        let said = put_off(code, 6).await;
        assert_eq!(said, vec![Ok(()); 4], "{code}");
    }
}

#[tokio::test]
async fn a_binding_that_is_refused_for_good_is_not_tried_again() {
    let said = put_off(403, 1).await;
    let refused = said.iter().filter(|said| said.is_err()).count();
    assert_eq!(refused, 1, "{said:?}");
}

#[tokio::test]
async fn hundreds_of_members_wait_at_once_and_all_are_bound() {
    const MEMBERS: u32 = 256;
    let cluster = Cluster::new(Options::default());
    for node in 0..32 {
        cluster.add(&format!("n-{node}"), &bridged());
    }
    for number in 0..MEMBERS {
        cluster.pod(&member(&name(number), 1, "a", MEMBERS));
    }
    cluster.wait(2);
    let (service, api) = mock::pair();
    let client = kube::Client::new(service, "default");
    let binder = Binder::new(client, Arc::clone(&cluster.store), watched(), Duration::from_secs(120));
    let server = tokio::spawn(take(api, MEMBERS as usize));
    let mut binds = Vec::new();
    for number in 0..MEMBERS {
        let uid = PodUid::from(name(number).as_str());
        let Answer::Node(node) = cluster.store.update(|index| index.answer(&uid, &|_| true)) else {
            panic!("{uid} has no place");
        };
        let (binder, target) = (binder.clone(), target(uid.as_str(), node.as_str()));
        binds.push(tokio::spawn(async move { binder.bind(&target).await }));
    }
    commit(&cluster).await;
    for bind in binds {
        bind.await.unwrap().unwrap();
    }
    let granted = server.await.unwrap();
    let all: BTreeSet<&String> = granted.iter().flatten().collect();
    assert_eq!(all.len(), MEMBERS as usize);
}

#[tokio::test]
async fn unwritten_decision_is_not_reported_as_timeout() {
    let (cluster, binder, _api) = setup(Duration::from_millis(300));
    let calls: Vec<_> = (0..4).map(|number| bind(&binder, number)).collect();
    for call in calls {
        let said = call.await.unwrap().unwrap_err();
        assert_eq!(
            said,
            "gang default/a: WritingDecision: the decision is being written; the reservation is kept and this pod is bound after that"
        );
    }
    drop(cluster);
}

#[tokio::test]
async fn decided_member_without_devices_gets_the_reason() {
    let (cluster, binder, api) = setup(Duration::from_millis(300));
    drop(api);
    for number in 0..4 {
        cluster.store.bind(&target(&name(number), "n"), None).unwrap();
    }
    commit(&cluster).await;
    let mut node = gpu_node("n", &bridged());
    node["status"]["conditions"] = json!([{
        "type": "Ready", "status": "False", "reason": "NotRegistered", "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }]);
    cluster.inventory(&node);
    let said = bind(&binder, 0).await.unwrap().unwrap_err();
    assert_eq!(
        said,
        "gang default/a is decided, but the devices reserved for this pod are not available: node n: GPU plugin is not ready: NotRegistered"
    );
}
