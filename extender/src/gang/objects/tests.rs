use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use gantry_api::{DecidedReservation, GangPhase};
use gantry_gang::protocol::Work;
use http::{Method, Request, Response};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use tower_test::mock;

use super::requests::{self, Failure};
use super::*;
use crate::metrics::{Metrics, Outcome};

const PATH: &str = "/apis/gantry.dev/v1alpha1/namespaces/ml/gangs";

/// An API server with Gangs of one namespace.
#[derive(Default)]
struct Api {
    gangs: Mutex<BTreeMap<String, Value>>,
    version: Mutex<u64>,
    seen: Mutex<Vec<String>>,
    /// The next writes of a status end so.
    ends: Mutex<Vec<Odd>>,
    /// Writes of a status are not answered, and not done, meanwhile.
    holds: AtomicBool,
    /// There is one.
    held: AtomicBool,
}

/// How a write ends other than well.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Odd {
    /// It is done, and answered with an error.
    DoneAndBroken,
    /// It is not done, and answered with an error.
    Broken,
    /// Somebody else writes first.
    Overtaken,
    /// What it does not know is left out.
    Pruned,
    /// It is not done: it may not be, or cannot be as it is.
    Refused(u16),
    /// The same, in these words.
    TooLarge(u16, &'static str),
}

impl Api {
    fn answer(&self, method: &Method, path: &str, body: &[u8]) -> (u16, Value) {
        self.seen.lock().unwrap().push(format!("{method} {}", path.trim_start_matches(PATH)));
        let mut gangs = self.gangs.lock().unwrap();
        let body: Value = serde_json::from_slice(body).unwrap_or_default();
        if method == Method::POST {
            let name = body["metadata"]["name"].as_str().unwrap().to_owned();
            if gangs.contains_key(&name) {
                return refused(409);
            }
            let mut made = body;
            made["metadata"]["uid"] = format!("uid-{name}").into();
            made["metadata"]["resourceVersion"] = self.next().into();
            made.as_object_mut().unwrap().remove("status");
            gangs.insert(name, made.clone());
            return (201, made);
        }
        let name = path.trim_start_matches(PATH).trim_start_matches('/');
        let name = name.trim_end_matches("/status").to_owned();
        let Some(known) = gangs.get_mut(&name) else {
            return refused(404);
        };
        match *method {
            Method::GET => (200, known.clone()),
            Method::DELETE => {
                if body["preconditions"]["uid"] != known["metadata"]["uid"] {
                    return refused(409);
                }
                gangs.remove(&name);
                (200, json!({"kind": "Status", "status": "Success"}))
            }
            _ => {
                let odd = {
                    let mut ends = self.ends.lock().unwrap();
                    (!ends.is_empty()).then(|| ends.remove(0))
                };
                match odd {
                    Some(Odd::Broken) => return refused(500),
                    Some(Odd::Refused(code)) => return refused(code),
                    Some(Odd::TooLarge(code, words)) => return failed(code, words),
                    _ => {}
                }
                if odd == Some(Odd::Overtaken) {
                    known["metadata"]["resourceVersion"] = self.next().into();
                }
                let told = &body["metadata"];
                let fits = |field: &str| told[field] == known["metadata"][field];
                if !fits("uid") || !fits("resourceVersion") {
                    return refused(409);
                }
                known["status"] = body["status"].clone();
                if odd == Some(Odd::Pruned) {
                    known["status"].as_object_mut().unwrap().remove("decision");
                }
                known["metadata"]["resourceVersion"] = self.next().into();
                match odd {
                    Some(Odd::DoneAndBroken) => refused(500),
                    _ => (200, known.clone()),
                }
            }
        }
    }

    fn next(&self) -> String {
        let mut version = self.version.lock().unwrap();
        *version += 1;
        version.to_string()
    }

    fn client(self: &Arc<Self>) -> Client {
        let (service, mut requests) = mock::pair::<Request<Body>, Response<Body>>();
        let api = Arc::clone(self);
        tokio::spawn(async move {
            while let Some((request, send)) = requests.next_request().await {
                let (head, body) = request.into_parts();
                let body = body.collect_bytes().await.unwrap();
                while head.uri.path().ends_with("/status") && api.holds.load(Ordering::Relaxed) {
                    api.held.store(true, Ordering::Relaxed);
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                let (code, answer) = api.answer(&head.method, head.uri.path(), &body);
                let body = Body::from(answer.to_string().into_bytes());
                send.send_response(Response::builder().status(code).body(body).unwrap());
            }
        });
        Client::new(service, "default")
    }

    fn gang(&self, name: &str) -> Option<Value> {
        self.gangs.lock().unwrap().get(name).cloned()
    }

    fn take_seen(&self) -> Vec<String> {
        std::mem::take(&mut self.seen.lock().unwrap())
    }
}

fn refused(code: u16) -> (u16, Value) {
    failed(code, "no")
}

fn failed(code: u16, words: &str) -> (u16, Value) {
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": words, "reason": "X", "code": code});
    (code, status)
}

fn name() -> Name {
    Name { namespace: "ml".into(), name: "train".into() }
}

fn decided(id: &str) -> GangStatus {
    GangStatus {
        phase: GangPhase::Committing,
        decision: Some(Decision {
            revision: 0,
            id: id.into(),
            min: 1,
            domain: String::new(),
            reservations: vec![DecidedReservation {
                node: "n".into(),
                devices: Vec::new(),
                ordinal: None,
                rank: None,
                role: String::new(),
                spare: false,
                pod: None,
                pod_name: String::new(),
            }],
        }),
        ..GangStatus::default()
    }
}

#[tokio::test]
async fn status_write_applies_only_to_the_version_it_was_made_for() {
    let api = Arc::new(Api::default());
    let client = api.client();
    let made = requests::create(&client, &name()).await.unwrap();
    assert!(made.ours);
    assert_eq!(
        api.gang("train").unwrap()["metadata"]["labels"]["app.kubernetes.io/managed-by"],
        "gantry-extender"
    );
    let written = requests::write_status(&client, &name(), &made, &decided("a")).await.unwrap();
    assert_eq!(written.status.decision.as_ref().unwrap().id, "a");
    let late = requests::write_status(&client, &name(), &made, &decided("b")).await;
    assert_eq!(late, Err(Failure::Conflict));
    // Made again: what is there is taken as it is.
    assert_eq!(requests::create(&client, &name()).await.unwrap(), written);
    assert_eq!(requests::delete(&client, &name(), "another").await, Err(Failure::Conflict));
    requests::delete(&client, &name(), &written.uid).await.unwrap();
    assert_eq!(requests::read(&client, &name()).await, Err(Failure::Missing));
}

#[tokio::test]
async fn a_decision_counts_as_written_only_if_the_api_server_shows_it() {
    let api = Arc::new(Api::default());
    let client = api.client();
    for (odd, wanted) in [
        (Odd::DoneAndBroken, Failure::Unknown("no".into())),
        (Odd::Broken, Failure::Unknown("no".into())),
        (Odd::Overtaken, Failure::Conflict),
        (Odd::Refused(400), Failure::Refused("no".into())),
        (Odd::Refused(403), Failure::Refused("no".into())),
        (Odd::Refused(422), Failure::Refused("no".into())),
        (Odd::Refused(429), Failure::Unknown("no".into())),
    ] {
        let known = requests::create(&client, &name()).await.unwrap();
        api.ends.lock().unwrap().push(odd);
        let ended = requests::write_status(&client, &name(), &known, &decided("a")).await;
        assert_eq!(ended, Err(wanted), "{odd:?}");
    }
    let known = requests::create(&client, &name()).await.unwrap();
    api.ends.lock().unwrap().push(Odd::Pruned);
    let ended = requests::write_status(&client, &name(), &known, &decided("a")).await;
    assert!(matches!(ended, Err(Failure::Refused(_))), "{ended:?}");
}

#[tokio::test]
async fn object_too_large_is_refused_permanently_for_every_error_code() {
    // API server, gRPC and etcd report an object that is too large with different codes. None of them is
    // worth another attempt.
    let api = Arc::new(Api::default());
    let client = api.client();
    for (code, words) in [
        (500, "etcdserver: request is too large"),
        (
            500,
            "rpc error: code = ResourceExhausted desc = trying to send message larger than max (2804163 vs. 2097152)",
        ),
        (413, "Request entity too large: limit is 3145728"),
    ] {
        let known = requests::create(&client, &name()).await.unwrap();
        api.ends.lock().unwrap().push(Odd::TooLarge(code, words));
        let ended = requests::write_status(&client, &name(), &known, &decided("a")).await;
        let why = format!("the object is too large for the API server or its etcd: {words}");
        assert_eq!(ended, Err(Failure::Refused(why)));
    }
}

#[test]
fn what_comes_late_does_not_undo_what_is_known() {
    let objects = Objects::default();
    let version = |version: &str, uid: &str, phase: GangPhase| Object {
        uid: uid.into(),
        resource_version: version.into(),
        ours: true,
        spec: Ok(GangSpec::default()),
        status: GangStatus { phase, ..GangStatus::default() },
    };
    objects.saw(&name(), version("10", "a", GangPhase::Bound));
    let newest = objects.saw(&name(), version("9", "a", GangPhase::Reserved));
    assert_eq!(newest.status.phase, GangPhase::Bound);
    // Another object of the name: numbers of two objects are not compared.
    let newest = objects.saw(&name(), version("8", "b", GangPhase::Pending));
    assert_eq!(newest.status.phase, GangPhase::Pending);
    assert!(!objects.gone(&name(), "a"), "that was the one before");
    assert!(objects.gone(&name(), "b"));
    assert_eq!(objects.get(&name()), None);
}

#[test]
fn a_status_that_cannot_be_read_keeps_its_decision() {
    let mut status = serde_json::to_value(decided("a")).unwrap();
    status["phase"] = "Dancing".into();
    let gang = PartialGang {
        metadata: ObjectMeta {
            name: Some("train".into()),
            namespace: Some("ml".into()),
            ..ObjectMeta::default()
        },
        spec: json!({"minMember": 2}),
        status: Some(status),
        ..PartialGang::default()
    };
    let (_, object) = gang.read().unwrap();
    assert_eq!(object.status.decision.unwrap().id, "a");
    assert!(!object.ours);
}

/// The writer over a store whose gangs are fed by hand.
struct Stage {
    api: Arc<Api>,
    cluster: crate::fixtures::Cluster,
    metrics: Arc<Metrics>,
    told: crate::gang::events::Mailbox,
    shutdown: tokio_util::sync::CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl Stage {
    fn start() -> Self {
        let cluster = crate::fixtures::Cluster::new(gantry_planner::decide::Options::default());
        let api = Arc::new(Api::default());
        let (events, told) = crate::gang::events::Events::new();
        let metrics = Arc::<Metrics>::default();
        let (orders, _) = tokio::sync::mpsc::unbounded_channel::<Work>();
        let shutdown = tokio_util::sync::CancellationToken::new();
        let task = tokio::spawn(run(
            api.client(),
            Arc::clone(&cluster.store),
            Arc::default(),
            events,
            Arc::clone(&metrics),
            orders,
            shutdown.clone(),
        ));
        Self { api, cluster, metrics, told, shutdown, task }
    }

    async fn until(&self, seen: impl Fn(&Value) -> bool) -> Value {
        let look = async {
            loop {
                if let Some(gang) = self.api.gang("train").filter(|gang| seen(gang)) {
                    return gang;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), look).await.expect("the Gang never gets there")
    }
}

fn member(name: &str, min: u32) -> Value {
    let mut pod = crate::fixtures::pod(name, 2);
    pod["metadata"]["namespace"] = "ml".into();
    pod["metadata"]["annotations"] =
        json!({"gantry.dev/gang": "train", "gantry.dev/gang-min": min.to_string()});
    pod
}

#[tokio::test]
async fn gang_object_is_created_once_and_updated_for_each_member() {
    // The object is created when the first member is observed. Later members only update its status.
    let stage = Stage::start();
    stage.cluster.pod(&member("a", 3));
    stage.until(|gang| gang["status"]["members"] == 1).await;
    stage.cluster.pod(&member("b", 3));
    let gang = stage.until(|gang| gang["status"]["members"] == 2).await;
    assert_eq!(gang["status"]["phase"], "Pending");
    assert_eq!(gang["status"]["min"], 3);
    let seen = stage.api.take_seen();
    assert_eq!(seen.iter().filter(|line| line.starts_with("POST")).count(), 1);
    stage.shutdown.cancel();
    stage.task.await.unwrap();
}

/// The gang changes again while its status is written. A step that was already reported is not reported again.
#[tokio::test(start_paused = true)]
async fn gang_step_during_a_slow_write_is_recorded_once() {
    let mut stage = Stage::start();
    stage.cluster.pod(&member("a", 3));
    stage.until(|gang| gang["status"]["members"] == 1).await;
    stage.api.holds.store(true, Ordering::Relaxed);
    stage.cluster.pod(&member("b", 2));
    while !stage.api.held.load(Ordering::Relaxed) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    stage.cluster.pod(&member("c", 3));
    tokio::time::sleep(Duration::from_secs(1)).await;
    stage.api.holds.store(false, Ordering::Relaxed);
    let gang = stage.until(|gang| gang["status"]["members"] == 3).await;
    assert_eq!(gang["status"]["phase"], "Invalid");
    let invalid = stage.metrics.gang_steps.get_or_create(&Outcome { outcome: "invalid" });
    assert_eq!(invalid.get(), 1);
    let told = stage.told.taken();
    let reasons: Vec<&str> = told.iter().map(|(reason, _)| *reason).collect();
    assert_eq!(reasons, ["GangInvalid"], "{told:?}");
    stage.shutdown.cancel();
    stage.task.await.unwrap();
}

#[tokio::test]
async fn a_status_that_meets_another_version_is_written_after_a_look() {
    let stage = Stage::start();
    stage.api.ends.lock().unwrap().extend([Odd::Overtaken, Odd::Broken, Odd::DoneAndBroken]);
    stage.cluster.pod(&member("a", 3));
    stage.until(|gang| gang["status"]["members"] == 1).await;
    stage.shutdown.cancel();
    stage.task.await.unwrap();
}

#[tokio::test]
async fn refused_decision_releases_reservations_and_reports_reason() {
    let stage = Stage::start();
    stage.cluster.add("n", &crate::fixtures::bridged());
    stage.cluster.pod(&member("a", 1));
    stage.until(|gang| gang["status"]["members"] == 1).await;
    stage.cluster.wait(2);
    stage.until(|gang| gang["status"]["phase"] == "Reserved").await;
    stage.api.ends.lock().unwrap().push(Odd::Refused(422));
    let target = crate::index::Target { namespace: "ml".into(), ..crate::fixtures::target("a", "n") };
    stage.cluster.store.bind(&target, None).unwrap();
    let gang = stage.until(|gang| gang["status"]["failedAttempts"] == 1).await;
    assert_eq!(gang["status"]["phase"], "Backoff");
    assert_eq!(gang["status"]["reason"], "Backoff");
    assert_eq!(gang["status"]["decision"], Value::Null);
    // What was wrong is mended: it goes through.
    stage.cluster.wait(3);
    stage.cluster.store.bind(&target, None).unwrap();
    stage.until(|gang| gang["status"]["decision"]["id"].is_string()).await;
    stage.shutdown.cancel();
    stage.task.await.unwrap();
}

/// For example, a right was revoked for a while, or an admission webhook was wrong.
#[tokio::test(start_paused = true)]
async fn bound_status_is_written_after_repeated_refusals() {
    let stage = Stage::start();
    stage.cluster.add("n", &crate::fixtures::bridged());
    stage.cluster.pod(&member("a", 1));
    stage.cluster.wait(2);
    stage.until(|gang| gang["status"]["phase"] == "Reserved").await;
    let target = crate::index::Target { namespace: "ml".into(), ..crate::fixtures::target("a", "n") };
    let store = &stage.cluster.store;
    store.bind(&target, None).unwrap();
    stage.until(|gang| gang["status"]["phase"] == "Binding").await;
    stage.api.ends.lock().unwrap().extend([Odd::Refused(403); 8]);
    store.bind(&target, None).unwrap();
    let bound = crate::fixtures::bound(member("a", 1), "n", 1, None);
    stage.cluster.pod(&bound);
    // Longer than all that is refused takes.
    tokio::time::sleep(Duration::from_secs(60)).await;
    stage.until(|gang| gang["status"]["phase"] == "Bound").await;
    stage.shutdown.cancel();
    stage.task.await.unwrap();
}

#[tokio::test]
async fn where_gangs_cannot_be_made_a_decision_is_refused() {
    let (service, mut requests) = mock::pair::<Request<Body>, Response<Body>>();
    tokio::spawn(async move {
        while let Some((_, send)) = requests.next_request().await {
            let body = Body::from(refused(404).1.to_string().into_bytes());
            send.send_response(Response::builder().status(404).body(body).unwrap());
        }
    });
    let made = requests::create(&Client::new(service, "default"), &name()).await;
    let Err(Failure::Refused(why)) = made else { panic!("{made:?}") };
    insta::assert_snapshot!(why, @"the API server has no namespace ml, or no Gangs; apply manifests/crds.yaml");
}
