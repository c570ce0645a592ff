use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;
use std::time::Instant;

use http::{Request, Response};
use kube::client::Body;
use serde_json::json;
use tower_test::mock;

use super::{
    Arc, CancellationToken, Client, Duration, OwnerFacts, OwnerKey, OwnerKind, OwnerRef, OwnerTable, Value,
    WatchedOwner, run,
};

/// An API server that serves what its test has put into it; it can be changed while it runs.
#[derive(Default)]
struct Played {
    /// Groups with version, and the plurals served there.
    served: BTreeMap<&'static str, Vec<&'static str>>,
    /// Objects by the path of their list.
    lists: HashMap<&'static str, Vec<Value>>,
    /// Events that the next watch of a path brings.
    events: HashMap<&'static str, Vec<Value>>,
    /// Paths that may not be read.
    forbidden: Vec<&'static str>,
    /// Paths that fail so many times.
    broken: HashMap<&'static str, u32>,
    /// What begins the names of objects about which questions are never answered.
    silent: Option<char>,
    /// Every path that was asked for.
    asked: Vec<String>,
}

const JOBSETS: &str = "/apis/jobset.x-k8s.io/v1alpha2/jobsets";
const PODGROUPS: &str = "/apis/scheduling.x-k8s.io/v1alpha1/podgroups";

impl Played {
    fn with(version: &'static str, plural: &'static str, path: &'static str, objects: Vec<Value>) -> Self {
        Self {
            served: BTreeMap::from([(version, vec![plural])]),
            lists: HashMap::from([(path, objects)]),
            ..Self::default()
        }
    }

    fn answer(&mut self, path: &str, query: &str) -> Option<(u16, Value)> {
        self.asked.push(path.to_owned());
        let none = (
            404,
            json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": 404, "reason": "NotFound"}),
        );
        if self.forbidden.contains(&path) {
            return Some((
                403,
                json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": 403, "reason": "Forbidden"}),
            ));
        }
        if let Some(left) = self.broken.get_mut(path).filter(|left| **left > 0) {
            *left -= 1;
            return Some((
                500,
                json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": 500}),
            ));
        }
        if let Some(plurals) = path.strip_prefix("/apis/").and_then(|version| self.served.get(version)) {
            let resources: Vec<Value> = plurals
                .iter()
                .map(|name| json!({"name": name, "singularName": "", "namespaced": true, "kind": "X", "verbs": ["get", "list", "watch"]}))
                .collect();
            return Some((
                200,
                json!({"kind": "APIResourceList", "groupVersion": "x", "resources": resources}),
            ));
        }
        if let Some((list, objects)) = self.lists.get_key_value(path) {
            if query.contains("watch=true") {
                let lines: Vec<Value> = self.events.remove(*list)?;
                return Some((200, Value::Array(lines)));
            }
            return Some((
                200,
                json!({"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "10"}, "items": objects}),
            ));
        }
        let name = path.rsplit('/').next().unwrap_or_default();
        if self.silent.is_some_and(|silent| name.starts_with(silent)) {
            return None;
        }
        // One object: `/apis/group/version/namespaces/ml/plural/name`.
        let found = self.lists.iter().find_map(|(list, objects)| {
            let (version, plural) = list.rsplit_once('/')?;
            let name = path.strip_prefix(&format!("{version}/namespaces/ml/{plural}/"))?;
            objects.iter().find(|object| object["metadata"]["name"] == name)
        });
        Some(found.map_or(none, |object| (200, object.clone())))
    }
}

fn object(name: &str, spec: impl Into<Value>) -> Value {
    let spec = spec.into();
    json!({"metadata": {"name": name, "namespace": "ml", "resourceVersion": "5",
        "managedFields": [{"manager": "m", "time": "9999-12-31T23:59:59Z"}]}, "spec": spec})
}

fn job_set(name: &str, pods: u32) -> Value {
    object(
        name,
        json!({"replicatedJobs": [{"name": "w", "template": {"spec": {"parallelism": pods, "completions": pods}}}]}),
    )
}

fn wanted(kind: OwnerKind, name: &str, part: &str) -> OwnerRef {
    OwnerRef { kind, namespace: "ml".into(), name: name.into(), part: part.into() }
}

/// A run against a played API server.
struct World {
    api: Arc<Mutex<Played>>,
    wanted: Arc<Mutex<Vec<OwnerRef>>>,
    told: Arc<Mutex<HashMap<OwnerRef, Option<Arc<OwnerFacts>>>>>,
    shutdown: CancellationToken,
}

impl World {
    fn start(played: Played, owners: &[OwnerRef]) -> Self {
        let (service, mut handle) = mock::pair::<Request<Body>, Response<Body>>();
        let world = Self {
            api: Arc::new(Mutex::new(played)),
            wanted: Arc::new(Mutex::new(owners.to_vec())),
            told: Arc::default(),
            shutdown: CancellationToken::new(),
        };
        let api = Arc::clone(&world.api);
        tokio::spawn(async move {
            let mut unanswered = Vec::new();
            while let Some((request, send)) = handle.next_request().await {
                let uri = request.uri();
                let answer = api.lock().unwrap().answer(uri.path(), uri.query().unwrap_or_default());
                match answer {
                    Some((status, Value::Array(lines))) => {
                        let lines: Vec<String> = lines.iter().map(|line| format!("{line}\n")).collect();
                        let body = Body::from(lines.concat().into_bytes());
                        send.send_response(Response::builder().status(status).body(body).unwrap());
                    }
                    Some((status, answer)) => {
                        let body = Body::from(answer.to_string().into_bytes());
                        send.send_response(Response::builder().status(status).body(body).unwrap());
                    }
                    // A watch on which nothing happens, or a question that hangs.
                    None => unanswered.push(send),
                }
            }
        });
        let (wanted, told) = (Arc::clone(&world.wanted), Arc::clone(&world.told));
        let known = Arc::clone(&world.told);
        tokio::spawn(run(
            Client::new(service, "default"),
            move || {
                let wanted = wanted.lock().unwrap().clone().into_iter();
                let known = known.lock().unwrap();
                let unread = |owner| WatchedOwner { unread: !known.contains_key(&owner), owner };
                wanted.map(unread).collect()
            },
            move |owner, facts| {
                told.lock().unwrap().insert(owner.clone(), facts);
            },
            Arc::default(),
            world.shutdown.clone(),
        ));
        world
    }

    /// Waits until this is the last minimum that was told of an owner.
    async fn until(&self, owner: &OwnerRef, min: Option<u32>) {
        self.until_reported(owner, |told| told.and_then(|facts| facts.min) == min).await;
    }

    /// Waits until that can be said of the last that was told of an owner.
    async fn until_reported(&self, owner: &OwnerRef, holds: impl Fn(Option<&OwnerFacts>) -> bool) {
        let there = async {
            while !self.told.lock().unwrap().get(owner).is_some_and(|told| holds(told.as_deref())) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        if tokio::time::timeout(Duration::from_secs(30), there).await.is_err() {
            panic!("{owner} is {:?}", self.told.lock().unwrap().get(owner));
        }
    }

    fn asked(&self, path: &str) -> usize {
        self.api.lock().unwrap().asked.iter().filter(|asked| *asked == path).count()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

#[tokio::test]
async fn an_owner_is_read_at_the_version_that_is_served_and_followed() {
    let mut played = Played::with(
        "jobset.x-k8s.io/v1alpha2",
        "jobsets",
        JOBSETS,
        vec![job_set("train", 4), job_set("other", 9)],
    );
    played.events.insert(JOBSETS, vec![json!({"type": "MODIFIED", "object": job_set("train", 6)})]);
    let train = wanted(OwnerKind::JobSet, "train", "");
    let world = World::start(played, std::slice::from_ref(&train));
    world.until(&train, Some(6)).await;
    assert_eq!(world.told.lock().unwrap().len(), 1, "of others nothing is told");
}

#[tokio::test]
async fn an_owner_that_is_over_is_told_so() {
    let mut ended = job_set("train", 4);
    ended["status"] = json!({"restarts": 1, "conditions": [{"type": "Completed", "status": "True"}]});
    let mut played = Played::with("jobset.x-k8s.io/v1alpha2", "jobsets", JOBSETS, vec![job_set("train", 4)]);
    played.events.insert(JOBSETS, vec![json!({"type": "MODIFIED", "object": ended})]);
    let train = wanted(OwnerKind::JobSet, "train", "");
    let world = World::start(played, std::slice::from_ref(&train));
    world.until_reported(&train, |told| told.is_some_and(|facts| facts.over)).await;
}

#[tokio::test]
async fn all_of_a_status_is_there_that_tells_whether_an_owner_is_over() {
    let mut failed = object("train", json!({"mpiReplicaSpecs": {"Worker": {"replicas": 2}}}));
    failed["status"] = json!({"completionTime": "2026-01-02T03:04:05Z", "conditions": [{"type": "Failed", "status": "True"}]});
    let list = "/apis/kubeflow.org/v2beta1/mpijobs";
    let played = Played::with("kubeflow.org/v2beta1", "mpijobs", list, vec![failed]);
    let train = wanted(OwnerKind::MpiJob, "train", "");
    let world = World::start(played, std::slice::from_ref(&train));
    world.until(&train, Some(2)).await;
    world.until_reported(&train, |told| told.is_some_and(|facts| facts.over)).await;
}

#[tokio::test]
async fn an_owner_that_is_wanted_later_is_asked_for() {
    let played =
        Played::with("jobset.x-k8s.io/v1alpha2", "jobsets", JOBSETS, vec![job_set("a", 4), job_set("b", 5)]);
    let (a, b, none) = (
        wanted(OwnerKind::JobSet, "a", ""),
        wanted(OwnerKind::JobSet, "b", ""),
        wanted(OwnerKind::JobSet, "none", ""),
    );
    let world = World::start(played, std::slice::from_ref(&a));
    world.until(&a, Some(4)).await;
    let followers = wanted(OwnerKind::JobSet, "a", "w/followers");
    *world.wanted.lock().unwrap() = vec![a, b.clone(), none.clone(), followers.clone()];
    world.until(&b, Some(5)).await;
    world.until(&none, None).await;
    world.until(&followers, Some(3)).await;
    assert_eq!(world.asked("/apis/jobset.x-k8s.io/v1alpha2/namespaces/ml/jobsets/b"), 1);
}

#[tokio::test]
async fn an_owner_that_ends_is_told() {
    let mut played = Played::with("jobset.x-k8s.io/v1alpha2", "jobsets", JOBSETS, vec![job_set("a", 4)]);
    played.events.insert(JOBSETS, vec![json!({"type": "DELETED", "object": job_set("a", 4)})]);
    let a = wanted(OwnerKind::JobSet, "a", "");
    let world = World::start(played, std::slice::from_ref(&a));
    world.until(&a, None).await;
}

#[tokio::test]
async fn a_kind_that_is_not_served_or_may_not_be_read_is_missing() {
    let mut played = Played::with(
        "scheduling.x-k8s.io/v1alpha1",
        "podgroups",
        PODGROUPS,
        vec![object("g", json!({"minMember": 3}))],
    );
    played.forbidden.push(PODGROUPS);
    let (group, set) = (wanted(OwnerKind::CoschedulingPodGroup, "g", ""), wanted(OwnerKind::JobSet, "a", ""));
    let world = World::start(played, &[group.clone(), set.clone()]);
    world.until(&group, None).await;
    world.until(&set, None).await;
    assert!(world.asked("/apis/jobset.x-k8s.io/v1") > 0 && world.asked("/apis/jobset.x-k8s.io/v1alpha2") > 0);
}

#[tokio::test(start_paused = true)]
async fn a_kind_that_is_installed_later_is_found() {
    let set = wanted(OwnerKind::JobSet, "a", "");
    let world = World::start(Played::default(), std::slice::from_ref(&set));
    world.until(&set, None).await;
    *world.api.lock().unwrap() =
        Played::with("jobset.x-k8s.io/v1alpha2", "jobsets", JOBSETS, vec![job_set("a", 4)]);
    world.until(&set, Some(4)).await;
}

#[tokio::test(start_paused = true)]
async fn owner_read_after_api_errors_is_retried() {
    // While the API server fails, no owner facts are published.
    let mut played =
        Played::with("jobset.x-k8s.io/v1alpha2", "jobsets", JOBSETS, vec![job_set("a", 4), job_set("b", 5)]);
    played.broken = HashMap::from([
        ("/apis/jobset.x-k8s.io/v1alpha2", 2),
        (JOBSETS, 2),
        ("/apis/jobset.x-k8s.io/v1alpha2/namespaces/ml/jobsets/b", 2),
    ]);
    let (a, b) = (wanted(OwnerKind::JobSet, "a", ""), wanted(OwnerKind::JobSet, "b", ""));
    let world = World::start(played, std::slice::from_ref(&a));
    world.until(&a, Some(4)).await;
    world.wanted.lock().unwrap().push(b.clone());
    world.until(&b, Some(5)).await;
}

#[tokio::test]
async fn owner_with_invalid_name_is_absent_without_a_request() {
    let played = Played::with(
        "scheduling.x-k8s.io/v1alpha1",
        "podgroups",
        PODGROUPS,
        vec![object("g", json!({"minMember": 3}))],
    );
    let forged =
        ["?watch=true&x=1", "../../../../../../api/v1/namespaces/kube-system/secrets/x", "a b", "A", ""];
    let forged = forged.map(|name| wanted(OwnerKind::CoschedulingPodGroup, name, ""));
    let good = wanted(OwnerKind::CoschedulingPodGroup, "g", "");
    let mut all = forged.to_vec();
    all.push(good.clone());
    let world = World::start(played, &all);
    world.until(&good, Some(3)).await;
    for owner in &forged {
        world.until(owner, None).await;
    }
    let asked = world.api.lock().unwrap().asked.clone();
    assert!(asked.iter().all(|path| path == PODGROUPS || !path.contains("namespaces")), "{asked:?}");
}

#[tokio::test(start_paused = true)]
async fn questions_that_are_not_answered_hold_up_no_other() {
    let played = Played {
        silent: Some('s'),
        ..Played::with("jobset.x-k8s.io/v1alpha2", "jobsets", JOBSETS, vec![job_set("a", 4)])
    };
    let set = |name: &str| wanted(OwnerKind::JobSet, name, "");
    let (a, none) = (set("a"), set("none"));
    let world = World::start(played, std::slice::from_ref(&a));
    world.until(&a, Some(4)).await;
    let mut all: Vec<OwnerRef> = (0..20).map(|number| set(&format!("s{number}"))).collect();
    all.push(a);
    *world.wanted.lock().unwrap() = all.clone();
    tokio::time::sleep(Duration::from_secs(1)).await;
    all.push(none.clone());
    *world.wanted.lock().unwrap() = all;
    world.until(&none, None).await;
}

/// A JobSet of which nothing is known.
fn unread(name: &str) -> WatchedOwner {
    WatchedOwner { owner: wanted(OwnerKind::JobSet, name, ""), unread: true }
}

#[test]
fn what_a_watch_brings_while_the_api_server_is_asked_is_newer() {
    let now = Instant::now();
    let mut table = OwnerTable::default();
    let (changes, _) = table.want(now, vec![unread("a")]);
    assert_eq!(changes.begin, [OwnerKind::JobSet]);
    assert!(table.take_unread(now).is_empty(), "the list may bring it");
    table.list_ends(OwnerKind::JobSet);
    let place: OwnerKey = (OwnerKind::JobSet, "ml".into(), "a".into());
    assert_eq!(table.take_unread(now), std::slice::from_ref(&place));
    assert!(table.take_unread(now).is_empty(), "once");
    assert_eq!(table.seen(&place, &job_set("a", 6)).len(), 1);
    assert!(table.read_ended(now, &place, Ok(Some(job_set("a", 4)))).is_empty());
}

/// The last gang of the owner has ended, and the next one appears before the owner is read again.
#[test]
fn owner_forgotten_after_its_gang_ended_is_read_again() {
    let now = Instant::now();
    let mut table = OwnerTable::default();
    let place: OwnerKey = (OwnerKind::JobSet, "ml".into(), "a".into());
    table.want(now, vec![unread("a")]);
    table.list_ends(OwnerKind::JobSet);
    assert_eq!(table.seen(&place, &job_set("a", 4)).len(), 1);
    let read = WatchedOwner { unread: false, ..unread("a") };
    table.want(now, vec![read]);
    assert!(table.take_unread(now).is_empty());
    table.want(now, vec![unread("a")]);
    assert_eq!(table.take_unread(now), std::slice::from_ref(&place));
    assert_eq!(table.read_ended(now, &place, Ok(Some(job_set("a", 8)))).len(), 1);
    table.absent(OwnerKind::JobSet);
    assert_eq!(table.want(now, vec![unread("a")]).1.len(), 1, "there is none, and that is said again");
}

#[test]
fn owner_already_read_survives_a_short_loss_of_access() {
    // If its kind cannot be read for a moment, an owner that was read still exists. An owner that was never
    // read is reported as absent.
    let now = Instant::now();
    let mut table = OwnerTable::default();
    let place: OwnerKey = (OwnerKind::JobSet, "ml".into(), "a".into());
    table.want(now, vec![unread("a"), unread("b")]);
    assert_eq!(table.seen(&place, &job_set("a", 4)).len(), 1);
    table.list_begins(OwnerKind::JobSet);
    let told = table.absent(OwnerKind::JobSet);
    assert_eq!(told, [(unread("b").owner, None)]);
    table.list_begins(OwnerKind::JobSet);
    table.list_ends(OwnerKind::JobSet);
    assert!(table.take_unread(now).contains(&place), "what the next list does not bring is asked for");
    assert_eq!(table.read_ended(now, &place, Ok(None)), [(unread("a").owner, None)]);
}

#[test]
fn a_kind_is_watched_on_for_a_while_when_no_gang_needs_it() {
    let now = Instant::now();
    let mut table = OwnerTable::default();
    let one = vec![unread("a")];
    table.want(now, one.clone());
    assert!(table.want(now, Vec::new()).0.end.is_empty());
    assert!(table.want(now + Duration::from_secs(200), one).0.begin.is_empty(), "it is still watched");
    table.want(now + Duration::from_secs(210), Vec::new());
    assert!(table.want(now + Duration::from_secs(500), Vec::new()).0.end.is_empty());
    assert_eq!(table.want(now + Duration::from_secs(510), Vec::new()).0.end, [OwnerKind::JobSet]);
}
