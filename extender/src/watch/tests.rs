use std::collections::HashMap;

use http::{Request, Response};
use kube::client::Body;
use serde_json::{Value, json};
use tower_test::mock;

use super::*;
use crate::fixtures::{bound, bridged, gpu_node, pod, set, watched};
use gantry_planner::decide::Options;
use gantry_planner::snapshot::NodeState;

/// An API server that lists `objects` by path, then sends `events` on the first watch of a path and nothing on later
/// ones.
#[derive(Default)]
struct Played {
    objects: HashMap<&'static str, Vec<Value>>,
    events: HashMap<&'static str, Vec<Value>>,
    /// What is listed once the events of a path were sent.
    later: HashMap<&'static str, Vec<Value>>,
    /// Lists of these paths fail so many times before they succeed.
    failures: HashMap<&'static str, u32>,
    /// Gangs are not defined.
    before_gangs: bool,
    /// How much is read of it; a daemon's if that is not said.
    extent: Option<Extent>,
    /// The lists that were asked for.
    lists: Arc<Mutex<Vec<String>>>,
}

const PODS: &str = "/api/v1/pods";
const NODES: &str = "/api/v1/nodes";
const GANGS: &str = "/apis/gantry.dev/v1alpha1/gangs";
const GPU_NODES: &str = "/apis/gantry.dev/v1alpha1/gpunodes";

impl Played {
    fn start(mut self) -> Client {
        let (service, mut api) = mock::pair::<Request<Body>, Response<Body>>();
        tokio::spawn(async move {
            let mut unanswered = Vec::new();
            while let Some((request, send)) = api.next_request().await {
                match self.answer(&request) {
                    Some(answer) => send.send_response(answer),
                    None => unanswered.push(send),
                }
            }
        });
        Client::new(service, "default")
    }

    fn answer(&mut self, request: &Request<Body>) -> Option<Response<Body>> {
        let path = request.uri().path();
        if path == "/version" {
            let version = [
                "major",
                "minor",
                "gitVersion",
                "gitCommit",
                "gitTreeState",
                "buildDate",
                "goVersion",
                "compiler",
                "platform",
            ];
            let version: Value =
                version.into_iter().map(|field| (field.to_owned(), Value::from("1"))).collect();
            return Some(Response::new(Body::from(version.to_string().into_bytes())));
        }
        let path = [PODS, NODES, GPU_NODES, GANGS].into_iter().find(|known| *known == path)?;
        if path == GANGS && self.before_gangs {
            let body = Body::from(b"404 page not found".to_vec());
            return Response::builder().status(404).body(body).ok();
        }
        if request.uri().query().unwrap_or_default().contains("watch=true") {
            let events = self.events.remove(path)?;
            if let Some(objects) = self.later.remove(path) {
                self.objects.insert(path, objects);
            }
            let lines: Vec<String> = events.iter().map(|event| format!("{event}\n")).collect();
            return Some(Response::new(Body::from(lines.concat().into_bytes())));
        }
        self.lists.lock().unwrap().push(request.uri().to_string());
        if let Some(left) = self.failures.get_mut(path).filter(|left| **left > 0) {
            *left -= 1;
            return Response::builder().status(500).body(Body::from(b"broken".to_vec())).ok();
        }
        let list = json!({
            "kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "10"},
            "items": self.objects.get(path).cloned().unwrap_or_default(),
        });
        Some(Response::new(Body::from(list.to_string().into_bytes())))
    }
}

fn versioned(mut object: Value) -> Value {
    object["metadata"]["resourceVersion"] = "11".into();
    object
}

fn node(name: &str) -> Value {
    json!({"metadata": {"name": name}, "status": {"allocatable": {"nvidia.com/gpu": "8", "cpu": "4"}}})
}

fn watches(store: &Arc<Store>, health: &Arc<ApiHealth>) -> Watches {
    Watches {
        gpu_health: None,
        gpu_clocks: None,
        mig_drains: Arc::default(),
        extent: Extent::Paged,
        watched: watched(),
        store: Arc::clone(store),
        health: Arc::clone(health),
        objects: Arc::default(),
        leadership: Arc::new(Leadership::always()),
        metrics: Arc::default(),
    }
}

/// Watches a played API server until `seen` of the store holds.
async fn until(played: Played, seen: impl Fn(&Store) -> bool) -> (Arc<Store>, Arc<ApiHealth>) {
    let store = Arc::new(Store::new(Index::new(Options::default(), &watched(), "run".into())));
    let health = ApiHealth::new();
    let shutdown = CancellationToken::new();
    let extent = played.extent.clone().unwrap_or(Extent::Paged);
    let watches = Watches { extent, ..watches(&store, &health) };
    let task = tokio::spawn(run(played.start(), watches, shutdown.clone()));
    let waited = async {
        while !seen(&store) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), waited).await.expect("the index never got there");
    shutdown.cancel();
    task.await.unwrap();
    (store, health)
}

fn free(store: &Store, node: &str) -> Option<String> {
    let snapshot = store.snapshot();
    match snapshot.node_state(snapshot.find(node)?) {
        NodeState::Ours(class) => class.pools.first().map(|pool| pool.free.to_string()),
        _ => None,
    }
}

#[tokio::test]
async fn lists_fill_the_index_and_events_change_it() {
    let ended = {
        let mut pod = bound(pod("a", 2), "n", 1, Some("0,1"));
        pod["status"]["phase"] = "Succeeded".into();
        versioned(pod)
    };
    let played = Played {
        objects: HashMap::from([
            (
                PODS,
                vec![
                    bound(pod("a", 2), "n", 1, Some("0,1")),
                    bound(pod("b", 2), "n", 1, Some("2,3")),
                    json!({"metadata": {"name": "web", "uid": "web"}, "spec": {"containers": [{"name": "web"}]}}),
                ],
            ),
            (NODES, vec![node("n")]),
            (GPU_NODES, vec![gpu_node("n", &bridged())]),
        ]),
        events: HashMap::from([(
            PODS,
            vec![
                json!({"type": "MODIFIED", "object": ended}),
                json!({"type": "ADDED", "object": versioned(bound(pod("c", 1), "n", 2, Some("7")))}),
            ],
        )]),
        ..Played::default()
    };
    let (store, health) = until(played, |store| free(store, "n").as_deref() == Some("0,1,4,5,6")).await;
    assert!(store.snapshot().synced);
    assert!(store.read(|index| index.pod("web").is_none()));
    assert!(health.last().is_some());
}

#[tokio::test]
async fn no_more_is_listed_than_the_extent_says() {
    let one_node = Extent::OfNode("n".into());
    let whole = [NODES, PODS, GANGS, GPU_NODES].map(|path| format!("{path}?&fieldSelector="));
    let of_node = [
        format!("{NODES}?&fieldSelector=metadata.name%3Dn"),
        format!("{PODS}?&fieldSelector=spec.nodeName%3Dn"),
        format!("{GANGS}?&fieldSelector="),
        format!("{GPU_NODES}?&fieldSelector=metadata.name%3Dn"),
    ];
    let paged = whole.each_ref().map(|list| format!("{list}&limit=500"));
    for (extent, lists) in [(Extent::Paged, paged), (Extent::AtOnce, whole), (one_node, of_node)] {
        let played = Played {
            objects: HashMap::from([
                (PODS, vec![bound(pod("a", 2), "n", 1, Some("0,1"))]),
                (NODES, vec![node("n")]),
                (GPU_NODES, vec![gpu_node("n", &bridged())]),
            ]),
            extent: Some(extent),
            ..Played::default()
        };
        let asked = Arc::clone(&played.lists);
        let (store, _) = until(played, |store| store.snapshot().synced).await;
        assert_eq!(free(&store, "n").as_deref(), Some("2,3,4,5,6,7"));
        let mut asked = asked.lock().unwrap().clone();
        asked.sort_unstable();
        assert_eq!(asked, lists);
    }
}

#[tokio::test]
async fn what_nodes_say_and_what_other_pods_take_of_them_is_kept() {
    let web = |name: &str, node: &str| {
        json!({
            "metadata": {"name": name, "namespace": "web", "uid": name, "labels": {"app": "web"}},
            "spec": {"nodeName": node, "containers": [{"name": "web", "resources": {"requests": {"cpu": "1500m"}}}]},
            "status": {"phase": "Running"},
        })
    };
    let mut racked = node("n");
    racked["metadata"]["labels"] = json!({"rack": "r7"});
    racked["spec"] = json!({"taints": [{"key": "gpu", "effect": "NoSchedule"}]});
    let played = Played {
        objects: HashMap::from([
            (PODS, vec![web("a", "n"), web("b", "n"), bound(pod("gpu", 2), "n", 1, Some("0,1"))]),
            (NODES, vec![racked]),
        ]),
        events: HashMap::from([(PODS, vec![json!({"type": "DELETED", "object": versioned(web("a", "n"))})])]),
        ..Played::default()
    };
    let left = |store: &Store| {
        let node = store.snapshot().find("n")?;
        store.read(|index| Some(index.node_resources(node)?.clone()))
    };
    let (store, _) = until(played, |store| left(store).is_some_and(|room| room.left.milli_cpu == 2500)).await;
    let room = left(&store).unwrap();
    let facts = room.facts.unwrap();
    assert_eq!(facts.labels["rack"], "r7".into());
    assert_eq!(facts.taints.len(), 1);
    assert!(room.left.others.is_empty(), "devices are accounted elsewhere");
}

#[tokio::test]
async fn a_list_that_fails_is_tried_again() {
    let played = Played {
        objects: HashMap::from([(NODES, vec![node("n")]), (GPU_NODES, vec![gpu_node("n", &bridged())])]),
        failures: HashMap::from([(PODS, 2), (GPU_NODES, 1)]),
        ..Played::default()
    };
    let (store, _) = until(played, |store| store.snapshot().synced).await;
    assert_eq!(free(&store, "n").as_deref(), Some("0,1,2,3,4,5,6,7"));
}

#[tokio::test]
async fn one_unreadable_gpu_node_does_not_stop_the_others() {
    let mut broken = gpu_node("broken", &bridged());
    broken["spec"] = json!({"machine": "nonsense"});
    let played = Played {
        objects: HashMap::from([
            (NODES, vec![node("broken"), node("n")]),
            (GPU_NODES, vec![broken, gpu_node("n", &bridged())]),
        ]),
        ..Played::default()
    };
    let (store, _) = until(played, |store| store.snapshot().synced).await;
    assert_eq!(set(&free(&store, "n").unwrap()).len(), 8);
    assert_eq!(free(&store, "broken"), None);
    let snapshot = store.snapshot();
    assert!(matches!(snapshot.node_state(snapshot.find("broken").unwrap()), NodeState::Ours(_)));
}

/// Adds a field to every object within a value.
fn add_unknown_fields(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.values_mut().for_each(add_unknown_fields);
            fields.insert("fieldOfTheNextRelease".to_owned(), json!([{ "a": 1 }]));
        }
        Value::Array(values) => values.iter_mut().for_each(add_unknown_fields),
        _ => {}
    }
}

/// The plugin may be of the next release.
#[tokio::test]
async fn unknown_fields_of_gpu_node_are_left_out() {
    let with_unknown = |name: &str, part: &str| {
        let mut object = gpu_node(name, &bridged());
        add_unknown_fields(&mut object[part]);
        object
    };
    let gpu_nodes = vec![with_unknown("n", "status"), with_unknown("machine", "spec")];
    let played = Played {
        objects: HashMap::from([(NODES, vec![node("n"), node("machine")]), (GPU_NODES, gpu_nodes)]),
        ..Played::default()
    };
    let (store, _) = until(played, |store| store.snapshot().synced).await;
    assert_eq!(free(&store, "n").as_deref(), Some("0,1,2,3,4,5,6,7"));
    assert_eq!(free(&store, "machine").as_deref(), Some("0,1,2,3,4,5,6,7"));
}

#[tokio::test]
async fn what_a_watch_brings_and_cannot_be_read_is_listed_instead() {
    let played = Played {
        objects: HashMap::from([(NODES, vec![node("n")]), (GPU_NODES, vec![gpu_node("n", &bridged())])]),
        events: HashMap::from([(
            PODS,
            vec![
                json!({"type": "ADDED", "object": {"metadata": {"name": "a", "resourceVersion": "11"}, "spec": "nonsense"}}),
                json!({"type": "ADDED", "object": versioned(bound(pod("c", 1), "n", 2, Some("7")))}),
            ],
        )]),
        // By then it can be.
        later: HashMap::from([(
            PODS,
            vec![bound(pod("a", 2), "n", 1, Some("0,1")), bound(pod("c", 1), "n", 2, Some("7"))],
        )]),
        ..Played::default()
    };
    let (store, health) = until(played, |store| free(store, "n").as_deref() == Some("2,3,4,5,6")).await;
    assert!(store.snapshot().synced);
    assert!(health.last().is_some());
}

#[tokio::test]
async fn malformed_time_on_one_object_does_not_fail_its_list() {
    let odd = |mut object: Value| {
        object["metadata"]["managedFields"] = json!([{"manager": "m", "time": "9999-12-31T23:59:59Z"}]);
        object["metadata"]["creationTimestamp"] = "9999-12-31T23:59:59Z".into();
        object
    };
    let mut dated = bound(pod("a", 2), "n", 1, Some("0,1"));
    dated["status"]["conditions"][0]["lastTransitionTime"] = "9999-12-31T23:59:59Z".into();
    let played = Played {
        objects: HashMap::from([
            (PODS, vec![odd(dated)]),
            (NODES, vec![odd(node("n"))]),
            (GPU_NODES, vec![odd(gpu_node("n", &bridged()))]),
        ]),
        ..Played::default()
    };
    let (store, _) = until(played, |store| store.snapshot().synced).await;
    assert_eq!(free(&store, "n").as_deref(), Some("2,3,4,5,6,7"));
}

#[tokio::test]
async fn a_watch_that_fails_ages_the_facts_until_it_is_begun_anew() {
    // The API server answers all the while; the watch of pods brings an error, and the next one is not answered.
    let gone = json!({"type": "ERROR", "object": {
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": "odd", "reason": "InternalError", "code": 500,
    }});
    let played = Played {
        objects: HashMap::from([(NODES, vec![node("n")])]),
        events: HashMap::from([(PODS, vec![gone])]),
        ..Played::default()
    };
    let health = ApiHealth::new();
    let store = Arc::new(Store::new(Index::new(Options::default(), &watched(), "run".into())));
    let shutdown = CancellationToken::new();
    let watches = watches(&store, &health);
    let task = tokio::spawn(run(played.start(), watches, shutdown.clone()));
    let failing = async {
        while !health.is_failing(Source::Pods) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), failing).await.unwrap();
    health.answered(Instant::now() + Duration::from_secs(20));
    assert!(health.last().unwrap() <= Instant::now());
    shutdown.cancel();
    task.await.unwrap();
}

#[tokio::test]
async fn a_quiet_watch_that_begins_anew_is_good_again() {
    let played = Played { events: HashMap::from([(NODES, vec![])]), ..Played::default() };
    let health = ApiHealth::new();
    health.answered(Instant::now());
    health.watch_failed(Source::Nodes);
    let nodes: Api<SlimNode> = Api::all(health.observing(&played.start(), Source::Nodes));
    let _quiet = nodes.watch(&kube::api::WatchParams::default(), "1").await.unwrap();
    assert!(!health.is_failing(Source::Nodes));
    assert!(health.last().is_some());
}

#[tokio::test]
async fn malformed_gang_does_not_block_the_others() {
    let gang = |name: &str, spec: Value, status: Value| json!({"metadata": {"name": name, "namespace": "ml", "uid": name, "resourceVersion": "3"}, "spec": spec, "status": status});
    let played = Played {
        objects: HashMap::from([(
            GANGS,
            vec![
                gang("odd", json!({"minMembers": 3}), json!({"phase": "Dancing"})),
                gang("good", json!({"minMember": 3}), json!({"phase": "Bound"})),
            ],
        )]),
        ..Played::default()
    };
    let (store, health) =
        (Arc::new(Store::new(Index::new(Options::default(), &watched(), "run".into()))), ApiHealth::new());
    let shutdown = CancellationToken::new();
    let watches = watches(&store, &health);
    let objects = Arc::clone(&watches.objects);
    let task = tokio::spawn(run(played.start(), watches, shutdown.clone()));
    let listed = async {
        while !store.snapshot().synced {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), listed).await.unwrap();
    let get = |name: &str| {
        let name = Name { namespace: "ml".into(), name: name.into() };
        objects.get(&name).unwrap()
    };
    assert_eq!(get("good").spec.unwrap().min_member, Some(3));
    insta::assert_snapshot!(get("odd").spec.unwrap_err(), @"spec.minMembers of Gang odd: there is no such field (nearest name: minMember); there are minMember, maxMember, level, sliceSize, rails, spares, repair, arrivalSeconds, restartHoldSeconds");
    shutdown.cancel();
    task.await.unwrap();
}

#[tokio::test]
async fn gang_list_after_etcd_restore_replaces_newer_versions() {
    // After a restore of etcd the watch ends, and the list shows the same object in an older version.
    let gang = |version: &str, min: u32| json!({"metadata": {"name": "a", "namespace": "ml", "uid": "a", "resourceVersion": version}, "spec": {"minMember": min}});
    let ended = json!({"type": "ERROR", "object": {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": "too old resource version", "reason": "Expired", "code": 410}});
    let played = Played {
        objects: HashMap::from([(GANGS, vec![gang("20", 3)])]),
        events: HashMap::from([(GANGS, vec![ended])]),
        later: HashMap::from([(GANGS, vec![gang("5", 2)])]),
        ..Played::default()
    };
    let store = Arc::new(Store::new(Index::new(Options::default(), &watched(), "run".into())));
    let shutdown = CancellationToken::new();
    let watches = watches(&store, &ApiHealth::new());
    let objects = Arc::clone(&watches.objects);
    let task = tokio::spawn(run(played.start(), watches, shutdown.clone()));
    let name = Name { namespace: "ml".into(), name: "a".into() };
    let min = || objects.get(&name).and_then(|object| object.spec.ok()?.min_member);
    let restored = async {
        while min() != Some(2) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), restored).await.unwrap();
    shutdown.cancel();
    task.await.unwrap();
}

#[tokio::test]
async fn a_cluster_without_the_definition_of_gangs_has_none() {
    let played = Played {
        objects: HashMap::from([(NODES, vec![node("n")]), (GPU_NODES, vec![gpu_node("n", &bridged())])]),
        before_gangs: true,
        ..Played::default()
    };
    let (store, health) = until(played, |store| store.snapshot().synced).await;
    assert_eq!(free(&store, "n").as_deref(), Some("0,1,2,3,4,5,6,7"));
    assert!(health.last().is_some());
}

#[tokio::test]
async fn new_leader_decides_only_after_new_lists() {
    let played = Played {
        objects: HashMap::from([(NODES, vec![node("n")]), (GPU_NODES, vec![gpu_node("n", &bridged())])]),
        failures: HashMap::from([(PODS, 0)]),
        ..Played::default()
    };
    let (store, health) =
        (Arc::new(Store::new(Index::new(Options::default(), &watched(), "run".into()))), ApiHealth::new());
    let leadership = Arc::new(Leadership::follower());
    let watches = Watches { leadership: Arc::clone(&leadership), ..watches(&store, &health) };
    let shutdown = CancellationToken::new();
    let task = tokio::spawn(run(played.start(), watches, shutdown.clone()));
    let wait = |wanted: bool| {
        let store = Arc::clone(&store);
        async move {
            while store.snapshot().synced != wanted {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    };
    let limit = Duration::from_secs(30);
    // A follower is kept up to date, and keeps no places.
    tokio::time::timeout(limit, wait(true)).await.unwrap();
    assert!(!store.read(Index::is_leading));
    let before = store.snapshot().generation;
    leadership.win("a", tokio::time::Instant::now() + limit);
    tokio::time::timeout(limit, leadership.entered()).await.unwrap();
    assert!(store.read(Index::is_leading));
    tokio::time::timeout(limit, wait(true)).await.unwrap();
    assert!(store.snapshot().generation >= before + 2, "it was not synced in between");
    leadership.lose(String::new());
    let stands_by = async {
        while store.read(Index::is_leading) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(limit, stands_by).await.unwrap();
    shutdown.cancel();
    task.await.unwrap();
}

#[test]
fn terminating_namespace_differs_from_missing_permission() {
    let refused = |code: u16, message: &str| {
        let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Forbidden", "message": message, "code": code});
        kube::Error::Api(Box::new(serde_json::from_value(status).unwrap()))
    };
    let ending = "events.events.k8s.io \"a\" is forbidden: unable to create new content in namespace ml because it is being terminated";
    assert!(is_ending(&refused(403, ending)));
    let missing = "events.events.k8s.io is forbidden: User \"x\" cannot create resource \"events\"";
    assert!(!is_ending(&refused(403, missing)));
    assert!(!is_ending(&refused(409, ending)));
}

#[test]
fn pods_that_are_read_and_not_kept_lead_to_a_sweep() {
    // Their needs are interned until then, and no byte that was kept is released.
    let memory = ObjectMemory::new(10_000_000);
    let mut reader = Reader::new(watched());
    for number in 0..100 {
        let tolerations: Vec<Value> =
            (0..1_500).map(|key| json!({"key": format!("k{number}-{key}"), "operator": "Exists"})).collect();
        let mut fat = pod(&format!("p{number}"), 1);
        fat["spec"]["tolerations"] = tolerations.into();
        let received = ReceivedObject { object: serde_json::from_value(fat).unwrap(), bytes: Some(100_000) };
        let event = pod_event(&mut reader, &memory, received, false);
        assert!(matches!(event, Some(WatchEvent::PodRefused(_) | WatchEvent::Pod(_))));
    }
    assert!(memory.take_worth_a_sweep());
}
