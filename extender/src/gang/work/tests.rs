use std::sync::Mutex;

use gantry_api::Reason;
use gantry_gang::protocol::Blocker;
use http::Response;
use kube::client::Body;
use serde_json::{Value, json};
use tokio::sync::mpsc::UnboundedSender;
use tower_test::mock;

use super::*;
use crate::fixtures::{Cluster, bound, bridged, member, pod};
use gantry_planner::decide::Options;

/// What was asked, and what is to be answered, one after the other; then all goes well.
#[derive(Default)]
struct Api {
    asked: Mutex<Vec<(String, Value)>>,
    answers: Mutex<Vec<(u16, Value)>>,
}

struct Stage {
    api: Arc<Api>,
    orders: UnboundedSender<Work>,
    metrics: Arc<Metrics>,
    cluster: Cluster,
    mailbox: super::super::events::Mailbox,
}

impl Stage {
    fn start(answers: Vec<(u16, Value)>) -> Self {
        let cluster = Cluster::new(Options::default());
        cluster.pod(&pod("a", 1)).pod(&pod("b", 1));
        let (service, mut requests) = mock::pair::<http::Request<Body>, Response<Body>>();
        let api = Arc::new(Api { answers: Mutex::new(answers), ..Api::default() });
        let played = Arc::clone(&api);
        tokio::spawn(async move {
            while let Some((request, send)) = requests.next_request().await {
                let (head, body) = request.into_parts();
                let body = body.collect_bytes().await.unwrap();
                let line = format!("{} {}", head.method, head.uri.path());
                let body = serde_json::from_slice(&body).unwrap_or_default();
                played.asked.lock().unwrap().push((line, body));
                let (code, answer) = {
                    let mut answers = played.answers.lock().unwrap();
                    if answers.is_empty() { (200, json!({})) } else { answers.remove(0) }
                };
                let body = Body::from(answer.to_string().into_bytes());
                send.send_response(Response::builder().status(code).body(body).unwrap());
            }
        });
        let (events, mailbox) = Events::new();
        let (orders, taken) = tokio::sync::mpsc::unbounded_channel();
        let metrics = Arc::new(Metrics::new());
        tokio::spawn(run(
            Client::new(service, "default"),
            Arc::clone(&cluster.store),
            events,
            Arc::clone(&metrics),
            Orders { taken, gates: true },
            CancellationToken::new(),
        ));
        Self { api, orders, metrics, cluster, mailbox }
    }

    async fn until(&self, verb: &'static str, outcome: &'static str) {
        let write = Write { verb, outcome };
        let look = async {
            while self.metrics.gang_writes.get_or_create(&write).get() == 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(600), look).await.expect("it never happens");
    }

    /// A gang on whose way pods `a` and `b` are.
    fn preempting(&self) -> Arc<GangKey> {
        let cluster = &self.cluster;
        cluster.add("n", &bridged());
        for (name, gpus) in [("a", "0-3"), ("b", "4-7")] {
            cluster.pod(&bound(pod(name, 4), "n", 1, Some(gpus)));
        }
        let mut high = member("high-0", 8, "high", 1);
        high["spec"]["priority"] = 10.into();
        cluster.pod(&high).wait(2);
        let work = cluster.store.update(crate::index::Index::take_work);
        let mut evictions = work.into_iter().filter_map(|work| match work {
            Work::Evict { pods, by } => Some((pods, by)),
            _ => None,
        });
        let (pods, by) = evictions.next().expect("nobody has to go");
        assert_eq!(pods, ["a".into(), "b".into()]);
        by
    }

    fn asked(&self) -> Vec<(String, Value)> {
        self.api.asked.lock().unwrap().clone()
    }
}

fn refused(code: u16) -> (u16, Value) {
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "no", "reason": "X", "code": code});
    (code, status)
}

#[tokio::test(start_paused = true)]
async fn an_eviction_that_a_budget_forbids_is_tried_again() {
    let mut stage = Stage::start(vec![refused(429), refused(500)]);
    let by = stage.preempting();
    let evict = Work::Evict { pods: vec!["a".into()], by };
    stage.orders.send(evict).unwrap();
    stage.until("evict", "done").await;
    let asked = stage.asked();
    assert_eq!(asked.len(), 3);
    for (line, body) in asked {
        assert_eq!(line, "POST /api/v1/namespaces/default/pods/a/eviction");
        assert_eq!(body["deleteOptions"]["preconditions"]["uid"], "a");
    }
    let told = stage.mailbox.taken();
    assert_eq!(told[0].0, "Blocked", "{told:?}");
    assert_eq!(told[1].0, "Preempted", "{told:?}");
}

/// As the API server answers an eviction that a budget forbids.
fn budget_refuses() -> (u16, Value) {
    let cause = json!({"reason": "DisruptionBudget", "message": "The disruption budget web needs 2 healthy pods and has 2 currently"});
    let message = "Cannot evict pod as it would violate the pod's disruption budget.";
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "reason": "TooManyRequests", "code": 429,
        "details": {"causes": [cause]},
    });
    (429, status)
}

#[tokio::test(start_paused = true)]
async fn gang_status_names_the_blocking_budget_while_it_blocks() {
    let mut stage = Stage::start(vec![budget_refuses(), budget_refuses(), budget_refuses()]);
    let by = stage.preempting();
    let status = |stage: &Stage| {
        let statuses = stage.cluster.store.update(crate::index::Index::take_statuses);
        let (_, status) = statuses.into_iter().next_back().unwrap();
        let mut conditions = status.conditions.into_iter();
        let hindered = conditions.find(|condition| condition.type_ == "Blocked");
        (status.reason, hindered.map(|condition| condition.reason))
    };
    let why = "pod a: it cannot be evicted yet: Cannot evict pod as it would violate the pod's disruption budget. \
               The disruption budget web needs 2 healthy pods and has 2 currently";
    let evict = Work::Evict { pods: vec!["a".into()], by };
    stage.orders.send(evict).unwrap();
    stage.until("evict", "budget").await;
    assert_eq!(status(&stage), (Some(Reason::WaitingForVictims), Some("DisruptionBudget".to_owned())));
    stage.until("evict", "done").await;
    assert_eq!(status(&stage), (Some(Reason::WaitingForVictims), None));
    let told = stage.mailbox.taken();
    let hindered: Vec<&str> =
        told.iter().filter(|(reason, _)| *reason == "Blocked").map(|(_, note)| note.as_str()).collect();
    assert_eq!(hindered, [why], "one Event, however often it is tried");
}

#[tokio::test(start_paused = true)]
async fn budget_block_ends_with_the_eviction_whatever_failed_last() {
    let stage = Stage::start(vec![budget_refuses(), refused(500)]);
    let by = stage.preempting();
    let hindered = || {
        let store = &stage.cluster.store;
        store.read(|index| index.gangs().is_blocked(&by, Blocker::Budget))
    };
    let evict = Work::Evict { pods: vec!["a".into()], by: Arc::clone(&by) };
    stage.orders.send(evict).unwrap();
    stage.until("evict", "failed").await;
    assert!(hindered());
    stage.until("evict", "done").await;
    assert!(!hindered());
}

#[tokio::test(start_paused = true)]
async fn eviction_stops_when_its_gang_is_gone() {
    // The preempting gang is deleted while a disruption budget delays the eviction. The victim is not evicted
    // for it later.
    let stage = Stage::start(vec![refused(429)]);
    let by = stage.preempting();
    let evict = Work::Evict { pods: vec!["a".into()], by };
    stage.orders.send(evict).unwrap();
    stage.until("evict", "budget").await;
    stage.cluster.gone(&member("high-0", 8, "high", 1));
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(stage.asked().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn removal_of_missing_pod_ends_and_forbidden_one_names_right() {
    // A pod that no longer exists needs no further attempt. If a removal is forbidden, the event names the
    // manifest that grants the right.
    let mut stage = Stage::start(vec![refused(404), refused(403)]);
    let delete =
        |pod: &str| Work::Delete { pods: vec![pod.into()], why: "gang ml/train is restarted".into() };
    stage.orders.send(delete("a")).unwrap();
    stage.until("delete", "obsolete").await;
    let by = stage.preempting();
    stage.orders.send(Work::Evict { pods: vec!["b".into()], by }).unwrap();
    stage.until("evict", "done").await;
    let told = stage.mailbox.taken();
    insta::assert_snapshot!(told[0].1, @"pod b: it cannot be evicted yet: no; manifests/extender-preempt.yaml gives that right");
    // A pod that nobody knows is not asked about at all.
    let before = stage.asked().len();
    stage.orders.send(delete("nobody")).unwrap();
    stage.orders.send(delete("b")).unwrap();
    stage.until("delete", "done").await;
    assert_eq!(stage.asked().len(), before + 2);
}

#[tokio::test(start_paused = true)]
async fn forbidden_restart_is_reported_once_and_resumes_when_allowed() {
    // Each pod is marked and then deleted: that is refused for both, and once more for both; then it may be done.
    let (fine, refused) = ((200, json!({})), refused(403));
    let answers = [&fine, &fine, &refused, &refused, &refused, &refused];
    let mut stage = Stage::start(answers.into_iter().cloned().collect());
    for name in ["m-0", "m-1"] {
        stage.cluster.pod(&member(name, 1, "train", 2));
    }
    let delete = Work::Delete {
        pods: vec!["m-0".into(), "m-1".into()],
        why: "gang default/train has lost a member and is restarted".into(),
    };
    stage.orders.send(delete).unwrap();
    stage.until("delete", "forbidden").await;
    let hindered = |stage: &Stage| {
        let statuses = stage.cluster.store.update(crate::index::Index::take_statuses);
        let (_, status) = statuses.into_iter().next().unwrap();
        let mut conditions = status.conditions.into_iter();
        let found = conditions.find(|condition| condition.type_ == "Blocked");
        found.map(|condition| condition.message)
    };
    insta::assert_snapshot!(hindered(&stage).unwrap(), @"pod m-0: it cannot be deleted: no; manifests/extender-restart.yaml gives that right");
    stage.until("delete", "done").await;
    assert_eq!(hindered(&stage), None);
    tokio::time::sleep(Duration::from_secs(60)).await;
    let told: Vec<&str> = stage.mailbox.taken().into_iter().map(|(reason, _)| reason).collect();
    assert_eq!(told, ["Blocked", "GangRestarting", "GangRestarting"]);
}

/// A gang that is made again under its name knows nothing of what was forbidden before; the log and the Events do.
#[tokio::test(start_paused = true)]
async fn a_gang_made_again_is_hindered_again() {
    let mut stage = Stage::start(vec![refused(403); 64]);
    stage.cluster.pod(&member("m-0", 1, "train", 1));
    let store = Arc::clone(&stage.cluster.store);
    let gang = store.read(|index| index.gangs().of_pod(&"m-0".into()).cloned()).unwrap();
    let hindered = || store.read(|index| index.gangs().is_blocked(&gang, Blocker::Gates));
    let ungate = || stage.orders.send(Work::Ungate(vec!["m-0".into()])).unwrap();
    let again = async {
        while !hindered() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    assert!(!hindered());
    ungate();
    stage.until("ungate", "forbidden").await;
    assert!(hindered());
    store.update(|index| index.hindered(&gang, Blocker::Gates, None));
    tokio::time::sleep(Duration::from_secs(600)).await;
    store.update(|index| index.hindered(&gang, Blocker::Gates, None));
    ungate();
    tokio::time::timeout(Duration::from_secs(600), again).await.expect("it is not said again");
    assert_eq!(stage.mailbox.taken().len(), 1, "one Event");
}

#[tokio::test(start_paused = true)]
async fn pod_deleted_for_restart_is_marked_as_disruption_target() {
    // The mark is written before the deletion. It shows the pod's controller that the pod did not fail by
    // itself.
    let stage = Stage::start(Vec::new());
    let delete = Work::Delete { pods: vec!["a".into()], why: "gang ml/train is restarted".into() };
    stage.orders.send(delete).unwrap();
    stage.until("delete", "done").await;
    let asked = stage.asked();
    let lines: Vec<&str> = asked.iter().map(|(line, _)| line.as_str()).collect();
    let path = "/api/v1/namespaces/default/pods/a";
    assert_eq!(lines, [format!("PATCH {path}/status"), format!("DELETE {path}")]);
    let (mark, options) = (&asked[0].1, &asked[1].1);
    assert_eq!(mark["metadata"]["uid"], "a");
    let condition = &mark["status"]["conditions"][0];
    assert_eq!(condition["type"], "DisruptionTarget");
    assert_eq!(condition["status"], "True");
    assert_eq!(condition["message"], "gang ml/train is restarted");
    assert_eq!(options["preconditions"]["uid"], "a");
}

/// What is asked until a pod is deleted, if that is answered first.
async fn deleted(answers: &[u16]) -> Vec<String> {
    let stage = Stage::start(answers.iter().copied().map(refused).collect());
    let delete = Work::Delete { pods: vec!["a".into()], why: "gang ml/train is restarted".into() };
    stage.orders.send(delete).unwrap();
    stage.until("delete", "done").await;
    let verb = |(line, _): (String, Value)| line.split(' ').next().unwrap().to_owned();
    stage.asked().into_iter().map(verb).collect()
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_cannot_be_marked_is_deleted_all_the_same() {
    for code in [401, 403, 422] {
        assert_eq!(deleted(&[code]).await, ["PATCH", "DELETE"], "{code}");
    }
}

#[tokio::test(start_paused = true)]
async fn mark_refused_by_busy_api_server_is_retried_before_deletion() {
    for code in [408, 429, 500, 503, 504] {
        let asked = deleted(&[code, code]).await;
        assert_eq!(asked, ["PATCH", "PATCH", "PATCH", "DELETE"], "{code}");
    }
    // Marked once is enough, however often it has to be deleted.
    let asked = deleted(&[429, 200, 500]).await;
    assert_eq!(asked, ["PATCH", "PATCH", "DELETE", "DELETE"]);
}

#[tokio::test(start_paused = true)]
async fn restart_deletes_pods_when_the_mark_keeps_failing() {
    // After three failed attempts to mark a pod, it is deleted without the mark. A failing API server does
    // not prevent the restart.
    let asked = deleted(&[503; 3]).await;
    assert_eq!(asked, ["PATCH", "PATCH", "PATCH", "DELETE"]);
}

#[tokio::test(start_paused = true)]
async fn a_gate_is_removed_wherever_it_stands_and_only_from_that_pod() {
    let read = |uid: &str| {
        let gates = json!([{"name": "quota"}, {"name": names::GANG_GATE}]);
        (200, json!({"metadata": {"uid": uid}, "spec": {"schedulingGates": gates}}))
    };
    let stage = Stage::start(vec![refused(422), read("a")]);
    stage.orders.send(Work::Ungate(vec!["a".into()])).unwrap();
    stage.until("ungate", "done").await;
    let asked = stage.asked();
    let lines: Vec<&str> = asked.iter().map(|(line, _)| line.as_str()).collect();
    let path = "/api/v1/namespaces/default/pods/a";
    let wanted = [format!("PATCH {path}"), format!("GET {path}"), format!("PATCH {path}")];
    assert_eq!(lines, wanted);
    assert_eq!(
        asked[2].1,
        json!([
            {"op": "test", "path": "/metadata/uid", "value": "a"},
            {"op": "test", "path": "/spec/schedulingGates/1/name", "value": names::GANG_GATE},
            {"op": "remove", "path": "/spec/schedulingGates/1"},
        ])
    );
    let stage = Stage::start(vec![refused(422), read("another")]);
    stage.orders.send(Work::Ungate(vec!["a".into()])).unwrap();
    stage.until("ungate", "obsolete").await;
    assert_eq!(stage.asked().len(), 2);
}
