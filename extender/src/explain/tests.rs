use serde_json::{Value, json};

use gantry_api::names;

use super::*;
use crate::answers;
use crate::fixtures::{Cluster, bound, bridged, cut_node, member, pod, request, request_of};
use gantry_planner::decide::Options;

fn short(name: &str, gpus: u32) -> Value {
    let mut pod = pod(name, gpus);
    pod["status"]["conditions"] = json!([{
        "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
        "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
    }]);
    pod
}

fn cluster() -> Cluster {
    let cluster = Cluster::new(Options::default());
    for (node, taken) in [("node-1", "0-7"), ("node-2", "0-7"), ("node-3", "0-4")] {
        cluster.add(node, &bridged());
        let gpus = crate::fixtures::set(taken).len();
        let holder = pod(&format!("on-{node}"), u32::try_from(gpus).unwrap());
        cluster.pod(&bound(holder, node, 1, Some(taken)));
    }
    cluster
}

/// The note on a pod that may go to every node.
fn noted(cluster: &Cluster, gpus: u32) -> Option<String> {
    note(&cluster.store.snapshot(), &request(gpus), &[], &|_| None)
}

#[test]
fn note_names_ruled_out_nodes_whatever_is_free_there() {
    // Pinned to a full node: that another one has free GPUs helps nothing.
    let cluster = cluster();
    let mut pinned = short("a", 4);
    pinned["spec"]["nodeSelector"] = json!({"disk": "nvme"});
    cluster.pod(&pinned);
    let mut told = PublishedNotes::default();
    let due = due(&cluster.store, &mut told, Instant::now());
    let [Notice { message, .. }] = &due[..] else { panic!("{due:?}") };
    assert_eq!(message.reason, Reason::GpusUnavailable);
    let nodes = answers::pod(&cluster.store, &["nvidia.com/gpu"], "default", "a").unwrap().nodes;
    assert!(nodes.iter().all(|node| node.lack == Some(FitFailure::NodeAffinity)), "{nodes:?}");
    insta::assert_snapshot!(message.note, @"node-1, node-2, node-3: the pod's node selector or affinity does not match");
}

/// No pod holds these devices, and they are not free.
#[test]
fn note_names_the_gangs_that_have_reserved_devices() {
    let cluster = cluster();
    cluster.pod(&member("g-0", 1, "g", 2)).pod(&member("g-1", 1, "g", 2)).wait(2);
    cluster.pod(&short("a", 4));
    let due = due(&cluster.store, &mut PublishedNotes::default(), Instant::now());
    let note = due.iter().find(|notice| &*notice.pod.name == "a").map(|notice| &*notice.message.note);
    // Without the time at its end.
    insta::assert_snapshot!(note.unwrap().rsplit_once(' ').unwrap().0, @"node-3: 1 of 8 GPUs free, 4 asked, 2 idle and reserved; node-1, node-2: 0 of 8 GPUs free, 4 asked; reserved: 2 for gang default/g until");
}

/// Annotations without effect: on a pod without devices, on a member of a gang, and changed while the pod is bound. Once each; the edit does not
/// change what the pod holds.
#[test]
fn request_annotations_without_effect_have_events() {
    let cluster = cluster();
    let mut web = pod("web", 1);
    web["spec"]["containers"][0]["resources"] = json!({});
    web["metadata"]["annotations"] = json!({"gantry.dev/required-link": "nvlnk"});
    cluster.other_pod(&web);
    cluster.other_pod(&web);
    let mut told = PublishedNotes::default();
    let notes = |told: &mut PublishedNotes| -> Vec<String> {
        let due = due(&cluster.store, told, Instant::now()).into_iter();
        let due = due.filter(|notice| notice.message.reason == Reason::RequestIgnored);
        due.map(|notice| format!("{}: {}", notice.pod.name, notice.message.note)).collect()
    };
    insta::assert_snapshot!(notes(&mut told).join("\n"), @r#"web: annotation gantry.dev/required-link ("nvlnk") has no effect, because the pod requests no devices of Gantry: request nvidia.com/gpu or remove it; "nvlnk" is none of nvlink, pcie-switch, numa, any; did you mean `nvlink`?"#);

    let mut member = member("member", 1, "g", 2);
    member["metadata"]["annotations"]["gantry.dev/node-policy"] = "spread".into();
    cluster.pod(&member);
    cluster.pod(&member);
    insta::assert_snapshot!(notes(&mut told).join("\n"), @r#"member: annotation gantry.dev/node-policy ("spread") has no effect, because the pod is a member of a gang, and gangs are packed: remove it, and keep members apart by topologySpreadConstraints"#);

    let mut job = bound(pod("job", 3), "node-3", 2, Some("5-7"));
    job["metadata"]["annotations"]["gantry.dev/required-link"] = "any".into();
    cluster.pod(&job);
    assert_eq!(notes(&mut told), [""; 0]);
    let free = noted(&cluster, 4);
    job["metadata"]["annotations"]["gantry.dev/required-link"] = "fast".into();
    cluster.pod(&job);
    insta::assert_snapshot!(notes(&mut told).join("\n"), @r#"job: annotation gantry.dev/required-link ("fast") has no effect, because the pod is bound and keeps its devices: create the pod again to apply it; "fast" is none of nvlink, pcie-switch, numa, any"#);
    assert_eq!(noted(&cluster, 4), free);
    let devices =
        cluster.store.read(|index| index.find_pod("default", "job").unwrap().devices("nvidia.com/gpu"));
    assert_eq!(devices, 3, "it is still known what it asks for");
}

#[test]
fn the_nearest_miss_comes_first_and_alike_nodes_together() {
    let note = noted(&cluster(), 4);
    assert_eq!(note.unwrap(), "node-3: 3 of 8 GPUs free, 4 asked; node-1, node-2: 0 of 8 GPUs free, 4 asked");
}

#[test]
fn where_we_see_enough_the_note_says_what_kubelet_advertises() {
    let cluster = Cluster::new(Options::default());
    cluster.add("node-1", &bridged()).node("node-1", 0);
    assert_eq!(noted(&cluster, 4).unwrap(), "node-1: 8 of 8 GPUs free, 4 asked, kubelet advertises 0");
}

#[test]
fn where_the_plugin_does_not_serve_the_note_says_so() {
    let cluster = Cluster::new(Options::default());
    cluster.add("node-1", &bridged());
    let mut node = crate::fixtures::gpu_node("node-1", &bridged());
    node["status"]["conditions"] = json!([{
        "type": "Ready", "status": "False", "reason": "Stopped", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z",
    }]);
    cluster.inventory(&node);
    let words = "node-1: GPU plugin is not ready: Stopped";
    assert_eq!(noted(&cluster, 4).unwrap(), words);
    // One that has nothing to serve any more is still a node with a plugin.
    node["status"]["devices"] = json!([]);
    cluster.inventory(&node);
    assert_eq!(noted(&cluster, 4).unwrap(), words);
}

#[test]
fn a_resource_that_no_node_offers_is_named_with_those_that_are() {
    let cluster = Cluster::new(Options::default());
    let wanted = |resource: &str| note(&cluster.store.snapshot(), &request_of(resource, 1), &[], &|_| None);
    assert_eq!(
        wanted("nvidia.com/mig-1g.5gb").unwrap(),
        "no node offers nvidia.com/mig-1g.5gb; offered are: none of NVIDIA's"
    );
    cluster.node("node-1", 6);
    cluster.inventory(&cut_node("node-1", &bridged(), "nvidia.com/mig-1g.10gb", 1, &[(6, 0), (7, 0)]));
    assert_eq!(
        wanted("nvidia.com/mig-2g.20gb").unwrap(),
        "no node offers nvidia.com/mig-2g.20gb (nearest name: nvidia.com/mig-1g.10gb); offered are: nvidia.com/gpu, \
         nvidia.com/mig-1g.10gb"
    );
    assert_eq!(
        wanted("nvidia.com/gpu-a100").unwrap(),
        "no node offers nvidia.com/gpu-a100; offered are: nvidia.com/gpu, nvidia.com/mig-1g.10gb"
    );
    // What others serve is theirs to explain.
    let advertised = [("nvidia.com/hostdev".into(), 4), ("nvidia.com/gpu".into(), 8)];
    cluster.store.update(|index| index.node_applied(&"node-2".into(), advertised.to_vec()));
    assert_eq!(wanted("nvidia.com/hostdev"), None);
}

#[test]
fn slices_go_by_the_name_of_their_resource() {
    let cluster = Cluster::new(Options::default());
    cluster.node("node-1", 6);
    let resource = "nvidia.com/mig-1g.10gb";
    let cut = cut_node("node-1", &bridged(), resource, 1, &[(6, 0), (6, 1), (7, 0)]);
    cluster.inventory(&cut);
    assert_eq!(
        note(&cluster.store.snapshot(), &request_of(resource, 4), &[], &|_| None).unwrap(),
        "node-1: 3 of 3 nvidia.com/mig-1g.10gb free, 4 asked"
    );
}

#[test]
fn a_large_clusters_note_stays_within_the_limit() {
    let cluster = Cluster::new(Options::default());
    for number in 0..300 {
        let name = format!("a-node-with-quite-a-long-name-{number:03}.example.internal");
        cluster.add(&name, &bridged());
        let gpus = 1 + number % 8;
        let taken = format!("0-{}", gpus - 1);
        cluster.pod(&bound(pod(&format!("p{number}"), gpus), &name, 1, Some(&taken)));
    }
    let note = noted(&cluster, 8).unwrap();
    assert!(note.len() <= MAX_MESSAGE, "{} bytes", note.len());
    insta::assert_snapshot!(note, @"a-node-with-quite-a-long-name-000.example.internal, a-node-with-quite-a-long-name-008.example.internal, a-node-with-quite-a-long-name-016.example.internal and 35 more: 7 of 8 GPUs free, 8 asked; ...");
}

#[test]
fn event_is_repeated_only_for_a_changed_reason() {
    let cluster = cluster();
    cluster.pod(&short("a", 4));
    let mut told = PublishedNotes::default();
    let began = Instant::now();
    let notes = |told: &mut _, seconds| {
        let due = due(&cluster.store, told, began + Duration::from_secs(seconds));
        due.into_iter()
            .map(|notice| format!("{}: {}", notice.pod.name, notice.message.note))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        notes(&mut told, 0),
        ["a: node-3: 3 of 8 GPUs free, 4 asked; node-1, node-2: 0 of 8 GPUs free, 4 asked"]
    );
    assert_eq!(notes(&mut told, 100), [""; 0]);
    cluster.pod(&bound(pod("b", 1), "node-3", 2, Some("5")));
    assert_eq!(notes(&mut told, 10), [""; 0]);
    // It was looked at a second ago and nothing was new then.
    assert_eq!(notes(&mut told, 101), [""; 0]);
    assert_eq!(
        notes(&mut told, 160),
        ["a: node-3: 2 of 8 GPUs free, 4 asked; node-1, node-2: 0 of 8 GPUs free, 4 asked"]
    );
    // Once it is placed nothing is left of it.
    cluster.pod(&bound(short("a", 4), "node-3", 3, None));
    assert_eq!(notes(&mut told, 500), [""; 0]);
    assert!(told.pods.is_empty());
}

#[test]
fn alike_pods_share_one_note_until_the_cluster_changes() {
    let cluster = cluster();
    for number in 0..5 {
        cluster.pod(&short(&format!("p{number}"), 4));
    }
    cluster.pod(&short("other", 5));
    let mut told = PublishedNotes::default();
    assert_eq!(due(&cluster.store, &mut told, Instant::now()).len(), 6);
    assert_eq!(told.notes.len(), 2);
    cluster.pod(&bound(pod("b", 1), "node-3", 2, Some("5")));
    cluster.pod(&short("late", 4));
    let due = due(&cluster.store, &mut told, Instant::now());
    assert_eq!(due.len(), 1);
    insta::assert_snapshot!(due[0].message.note, @"node-3: 2 of 8 GPUs free, 4 asked; node-1, node-2: 0 of 8 GPUs free, 4 asked");
    assert_eq!(told.notes.len(), 1);
}

#[test]
fn pod_with_sufficient_count_gets_no_event() {
    let cluster = cluster();
    cluster.pod(&pod("a", 4));
    assert!(due(&cluster.store, &mut PublishedNotes::default(), Instant::now()).is_empty());
}

/// A member of a gang that kube-scheduler has refused by its own count.
fn short_member(name: &str, gang: &str, min: u32) -> Value {
    let mut pod = member(name, 4, gang, min);
    pod["status"] = short(name, 4)["status"].clone();
    pod
}

/// A member of a gang that our gate keeps from kube-scheduler.
fn gated_member(name: &str, gang: &str, min: &str) -> Value {
    let mut pod = member(name, 4, gang, 2);
    pod["metadata"]["annotations"][names::GANG_MIN_ANNOTATION] = min.into();
    pod["spec"]["schedulingGates"] = json!([{"name": names::GANG_GATE}]);
    pod
}

/// What pods are told at each of some seconds: whom, the reason and the note.
fn notices(cluster: &Cluster, told: &mut PublishedNotes, began: Instant, seconds: u64) -> Vec<String> {
    let due = due(&cluster.store, told, began + Duration::from_secs(seconds));
    let mut notices: Vec<String> =
        due.into_iter().map(|notice| format!("{} {}", notice.pod.name, notice.message.reason)).collect();
    notices.sort();
    notices
}

#[test]
fn insufficient_member_gets_the_reason_of_its_gang() {
    let cluster = cluster();
    cluster.pod(&short_member("a-0", "a", 2));
    let (mut told, began) = (PublishedNotes::default(), Instant::now());
    let mut at = |cluster: &Cluster, seconds| notices(cluster, &mut told, began, seconds);
    // Most often the others come in a moment.
    assert_eq!(at(&cluster, 0), [""; 0]);
    assert_eq!(at(&cluster, 5), ["a-0 GangWaiting"]);
    assert_eq!(at(&cluster, 100), [""; 0]);
    // A contradiction is the true reason, whatever is free.
    cluster.pod(&short_member("a-1", "a", 3));
    assert_eq!(at(&cluster, 160), [""; 0]);
    assert_eq!(at(&cluster, 165), ["a-0 GangInvalid", "a-1 GangInvalid"]);
    assert_eq!(at(&cluster, 300), [""; 0]);
    // It is mended, and waits for room.
    cluster.pod(&short_member("a-1", "a", 2)).wait(2);
    at(&cluster, 400);
    assert_eq!(at(&cluster, 405), ["a-0 GangWaiting", "a-1 GangWaiting"]);
}

#[test]
fn a_member_that_our_gate_keeps_back_is_told_why_it_stays() {
    let cluster = Cluster::new(Options::default());
    cluster.store.update(|index| {
        index.set_gangs(gantry_gang::protocol::Settings {
            gates: true,
            ..gantry_gang::protocol::Settings::default()
        });
    });
    cluster.add("node-1", &bridged());
    cluster.pod(&gated_member("a-0", "a", "two"));
    cluster.pod(&gated_member("b-0", "b", "2"));
    let mut launcher = gated_member("c-0", "c", "3");
    launcher["spec"]["containers"][0]["resources"] = json!({});
    cluster.other_pod(&launcher);
    let mut others = gated_member("d-0", "d", "2");
    others["spec"]["schedulingGates"] = json!([{"name": names::GANG_GATE}, {"name": "example.com/quota"}]);
    cluster.pod(&others);
    let (mut told, began) = (PublishedNotes::default(), Instant::now());
    notices(&cluster, &mut told, began, 0);
    let told_now = notices(&cluster, &mut told, began, 5);
    assert_eq!(told_now, ["a-0 GangInvalid", "b-0 GangWaiting", "c-0 GangWaiting"]);
    // Nothing is left of one that has its place.
    cluster.pod(&gated_member("b-1", "b", "2")).wait(2);
    assert_eq!(notices(&cluster, &mut told, began, 100), [""; 0]);
    assert!(!told.pods.contains_key("b-0"));
}

#[test]
fn what_a_gang_counts_is_no_news() {
    let cluster = cluster();
    cluster.pod(&short_member("a-0", "a", 9));
    let (mut told, began) = (PublishedNotes::default(), Instant::now());
    notices(&cluster, &mut told, began, 0);
    assert_eq!(notices(&cluster, &mut told, began, 5).len(), 1);
    for number in 1..5 {
        cluster.pod(&member(&format!("a-{number}"), 4, "a", 9));
        let seconds = 100 * number;
        assert_eq!(notices(&cluster, &mut told, began, seconds), [""; 0]);
        assert_eq!(notices(&cluster, &mut told, began, seconds + 10), [""; 0]);
    }
}

#[test]
fn a_member_that_has_its_place_is_told_no_lack() {
    let cluster = Cluster::new(Options::default());
    cluster.add("node-1", &bridged()).add("node-2", &bridged());
    cluster.pod(&bound(pod("b", 6), "node-2", 1, Some("0-5")));
    // Its condition says what was so before.
    cluster.pod(&short_member("a-0", "a", 1)).wait(2);
    let (mut told, began) = (PublishedNotes::default(), Instant::now());
    assert_eq!(notices(&cluster, &mut told, began, 0), [""; 0]);
    assert_eq!(notices(&cluster, &mut told, began, 100), [""; 0]);
}

#[test]
fn member_is_told_that_its_node_advertises_too_few_devices() {
    let cluster = Cluster::new(Options::default());
    cluster.add("node-1", &bridged());
    cluster.pod(&short_member("a-0", "a", 1)).wait(2);
    // One of those that nobody has: it is enough for who has a place.
    cluster.node("node-1", 7);
    let (mut told, began) = (PublishedNotes::default(), Instant::now());
    notices(&cluster, &mut told, began, 0);
    assert_eq!(notices(&cluster, &mut told, began, 5), [""; 0]);
    cluster.node("node-1", 2);
    assert_eq!(notices(&cluster, &mut told, began, 6), [""; 0]);
    assert_eq!(notices(&cluster, &mut told, began, 11), ["a-0 GpusUnavailable"]);
}

#[tokio::test]
async fn the_event_names_the_pod_by_uid_and_says_the_note() {
    use http::{Request, Response};
    use kube::client::Body;

    let (service, mut api) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
    let client = Client::new(service, "default");
    let pod = Address { uid: "a".into(), namespace: "default".into(), name: "a".into() };
    let Notice { pod, message, .. } =
        notice(pod, &Cause::Devices(request(4), Arc::default()), "3 of 8".to_owned());
    let mut recorder = event::recorder(client);
    let event = recorder.event(event::pod(&pod.namespace, &pod.name, pod.uid.as_str()), message);
    let written = tokio::spawn(async move { recorder.attempt(&event, false).await });
    let (request, send) = api.next_request().await.unwrap();
    assert_eq!(request.uri().path(), "/apis/events.k8s.io/v1/namespaces/default/events");
    let body = request.into_body().collect_bytes().await.unwrap();
    let event: Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(event["regarding"]["uid"], "a");
    assert_eq!(event["reason"], "GpusUnavailable");
    assert_eq!(event["note"], "3 of 8");
    assert_eq!(event["reportingController"], "gantry-extender");
    assert!(event["eventTime"].is_string());
    send.send_response(Response::new(Body::from(body.to_vec())));
    assert_eq!(written.await.unwrap(), Attempt::Written);
}

#[tokio::test]
async fn a_pod_that_could_not_be_told_is_told_again_but_not_at_once() {
    use http::{Request, Response};
    use kube::client::Body;

    let (service, mut api) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
    let client = Client::new(service, "default");
    // The API server takes the second Event.
    let answers = tokio::spawn(async move {
        for code in [503, 201] {
            let (request, send) = api.next_request().await.unwrap();
            let body = request.into_body().collect_bytes().await.unwrap().to_vec();
            send.send_response(Response::builder().status(code).body(Body::from(body)).unwrap());
        }
        api
    });
    let cluster = cluster();
    cluster.pod(&short("a", 4));
    let (metrics, mut told, began) = (Metrics::new(), PublishedNotes::default(), Instant::now());
    let mut recorder = event::recorder(client);
    for seconds in [0, 1, 59, 60, 61, 120] {
        let now = began + Duration::from_secs(seconds);
        publish_due(&mut recorder, &cluster.store, &metrics, &mut told, now).await;
        let count = |outcome| metrics.events.get_or_create(&Outcome { outcome }).get();
        let expected = (1, u64::from(seconds >= 60));
        assert_eq!((count("failed"), count("published")), expected, "after {seconds} s");
    }
    drop(answers.await.unwrap());
}
