use serde_json::Value;

use super::*;

fn assignment() -> Assignment {
    Assignment { watched: WatchedResources::new(["example.com/a100".into()]), scheduler: "gantry".to_owned() }
}

/// A container with these limits and requests.
fn container(limits: &Value, requests: &Value) -> Value {
    json!({"name": "main", "image": "i", "resources": {"limits": limits, "requests": requests}})
}

/// The review of the API server for the creation of a pod.
fn creation(spec: &Value) -> Value {
    json!({
        "apiVersion": VERSION,
        "kind": KIND,
        "request": {
            "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "requestKind": {"group": "", "version": "v1", "kind": "Pod"},
            "name": "p",
            "namespace": "ml",
            "operation": "CREATE",
            "userInfo": {"username": "u", "groups": ["system:authenticated"]},
            "object": {"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "p"}, "spec": spec},
            "oldObject": null,
            "dryRun": false,
            "options": {"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"},
        },
    })
}

fn answered(review: &Value) -> (Decision, Value) {
    let Review { outcome, response } = assignment().review(review.to_string().as_bytes()).unwrap();
    (outcome, serde_json::from_slice(&response).unwrap())
}

#[test]
fn pods_are_decided_on_as_by_the_policy() {
    let one = |name: &str| container(&json!({ name: "1" }), &json!({ name: "1" }));
    let (gpu, cpu) = (one("nvidia.com/gpu"), one("cpu"));
    let default = "default-scheduler";
    let cases = [
        ("a GPU", json!({"containers": [gpu], "schedulerName": default}), true),
        ("no schedulerName at all", json!({"containers": [gpu]}), true),
        ("the second container", json!({"containers": [cpu, gpu], "schedulerName": default}), true),
        ("an init container", json!({"containers": [cpu], "initContainers": [gpu]}), true),
        ("a MIG device", json!({"containers": [one("nvidia.com/mig-1g.10gb")]}), true),
        ("a shared GPU", json!({"containers": [one("nvidia.com/gpu.shared")]}), true),
        ("a resource that is named", json!({"containers": [one("example.com/a100")]}), true),
        ("an empty nodeName", json!({"containers": [gpu], "nodeName": ""}), true),
        ("a number", json!({"containers": [container(&json!({"nvidia.com/gpu": 2}), &json!(null))]}), true),
        (
            "requests only",
            json!({"containers": [container(&json!(null), &json!({"nvidia.com/gpu": "1"}))]}),
            false,
        ),
        ("another scheduler", json!({"containers": [gpu], "schedulerName": "volcano"}), false),
        ("the same scheduler", json!({"containers": [gpu], "schedulerName": "gantry"}), false),
        ("a node", json!({"containers": [gpu], "schedulerName": default, "nodeName": "n"}), false),
        ("no devices", json!({"containers": [cpu], "schedulerName": default}), false),
        ("another resource", json!({"containers": [one("example.com/other")]}), false),
        ("another domain", json!({"containers": [one("nvidia.community/gpu")]}), false),
        ("no resources", json!({"containers": [{"name": "main"}]}), false),
        ("null lists", json!({"containers": null, "initContainers": null}), false),
        ("no containers", json!({}), false),
    ];
    for (name, spec, is_assigned) in cases {
        let (outcome, answer) = answered(&creation(&spec));
        let expected = if is_assigned { Decision::Assigned } else { Decision::Unchanged };
        assert_eq!(outcome, expected, "{name}");
        assert_eq!(answer["response"]["allowed"], true, "{name}");
        assert_eq!(answer["response"]["patch"].is_string(), is_assigned, "{name}");
    }
}

#[test]
fn answer_has_the_uid_and_the_patch() {
    let spec = json!({"containers": [container(&json!({"nvidia.com/gpu": "1"}), &json!({}))]});
    let (_, answer) = answered(&creation(&spec));
    let patch: ByteString = serde_json::from_value(answer["response"]["patch"].clone()).unwrap();
    let patch: Value = serde_json::from_slice(&patch.0).unwrap();
    assert_eq!(patch, json!([{"op": "add", "path": "/spec/schedulerName", "value": "gantry"}]));
    let expected = json!({
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "response": {
            "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
            "allowed": true,
            "patchType": "JSONPatch",
            "patch": answer["response"]["patch"],
        },
    });
    assert_eq!(answer, expected);
    let (_, unchanged) = answered(&creation(&json!({})));
    let expected = json!({"uid": "705ab4f5-6393-11e8-b7cc-42010a800002", "allowed": true});
    assert_eq!(unchanged["response"], expected);
}

#[test]
fn other_requests_are_allowed_unchanged() {
    let spec = json!({"containers": [container(&json!({"nvidia.com/gpu": "1"}), &json!({}))]});
    let changes: [(&str, Value); 5] = [
        ("operation", json!("UPDATE")),
        ("operation", json!("DELETE")),
        ("subResource", json!("ephemeralcontainers")),
        ("resource", json!({"group": "apps", "version": "v1", "resource": "deployments"})),
        ("resource", json!({"group": "", "version": "v1", "resource": "services"})),
    ];
    for (field, value) in changes {
        let mut review = creation(&spec);
        review["request"][field] = value;
        review["request"]["object"]["spec"]["containers"] = json!("no list");
        let (outcome, answer) = answered(&review);
        assert_eq!(outcome, Decision::Unchanged, "{field}");
        assert_eq!(answer["response"]["allowed"], true);
    }
}

#[test]
fn malformed_reviews_are_refused_with_the_reason() {
    let refused = |body: &str| assignment().review(body.as_bytes()).unwrap_err().to_string();
    let changed = |change: fn(&mut Value)| {
        let mut review = creation(&json!({"containers": []}));
        change(&mut review);
        refused(&review.to_string())
    };
    insta::assert_snapshot!(refused(""), @"body is not an AdmissionReview: EOF while parsing a value at line 1 column 0");
    insta::assert_snapshot!(refused("[1, 2]"), @"body is not an AdmissionReview: invalid type: integer `1`, expected a string at line 1 column 2");
    assert_eq!(
        changed(|review| review["apiVersion"] = json!("admission.k8s.io/v1beta1")),
        "body is \"AdmissionReview\" of \"admission.k8s.io/v1beta1\", expected \"AdmissionReview\" of \
         \"admission.k8s.io/v1\": set admissionReviewVersions: [v1]"
    );
    insta::assert_snapshot!(refused("{}"), @r#"body is "" of "", expected "AdmissionReview" of "admission.k8s.io/v1": set admissionReviewVersions: [v1]"#);
    assert_eq!(changed(|review| review["request"] = json!(null)), "request: missing in the AdmissionReview");
    let no_uid = changed(|review| drop(review["request"].as_object_mut().unwrap().remove("uid")));
    insta::assert_snapshot!(no_uid, @"body is not an AdmissionReview: missing field `uid` at line 1 column 531");
    assert_eq!(
        changed(|review| review["request"]["object"] = json!(null)),
        "request.object: missing in the creation of a pod"
    );
    let list = changed(|review| review["request"]["object"]["spec"]["containers"] = json!({"a": 1}));
    insta::assert_snapshot!(list, @"request.object is not a pod: invalid type: map, expected a sequence at line 1 column 77");
}

/// Three bytes of JSON each, and more of memory.
#[test]
fn pod_of_too_many_containers_is_refused() {
    let spec = format!("{{\"containers\":[{}{{}}]}}", "{},".repeat(1_000_000));
    let review = creation(&json!("SPEC")).to_string().replace("\"SPEC\"", &spec);
    let error = assignment().review(review.as_bytes()).unwrap_err();
    assert!(matches!(error, ReviewError::Pod(ReadError::TooLarge(_))), "{error}");
}
