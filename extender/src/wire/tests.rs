use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use gantry_planner::decide::FilterVerdict;

/// A filter body as kube-scheduler sends it: whole pod, explicit nulls.
const FILTER: &str = include_str!("testdata/filter.json");

fn names<'a>(names: &[&'a str]) -> CandidateNodes<'a> {
    CandidateNodes::Names(names.iter().map(|name| Text::from(*name)).collect())
}

fn value(answer: &[u8]) -> Value {
    serde_json::from_slice(answer).unwrap()
}

#[test]
fn a_body_of_kube_scheduler_is_read() {
    let args: ExtenderArgs<'_> = serde_json::from_str(FILTER).unwrap();
    assert!(args.nodes.is_none());
    let names: Vec<&str> = args.node_names.as_ref().unwrap().iter().map(Text::as_str).collect();
    assert_eq!(names, ["node-1", "node-2", "node-3"]);
    assert_eq!(args.pod.metadata.uid.as_ref().unwrap().as_str(), "7bd4b3a0-5d5c-4f0c-9f0e-0a2f6e1f7c11");
    let spec = args.pod.spec.unwrap();
    let asks: Vec<_> = spec
        .containers_asking("nvidia.com/gpu")
        .map(|container| (container.name.to_owned(), container.kind, container.quantity.map(str::to_owned)))
        .collect();
    assert_eq!(
        asks,
        [
            ("fetch".to_owned(), ContainerKind::Init, Some("1".to_owned())),
            ("monitor".to_owned(), ContainerKind::Sidecar, None),
            ("train".to_owned(), ContainerKind::App, Some("2".to_owned())),
        ]
    );
}

#[test]
fn nulls_and_absent_fields_are_the_same() {
    for body in [
        r#"{"Pod":{"metadata":{}},"Nodes":null,"NodeNames":null}"#,
        r#"{"Pod":{"metadata":{"name":null},"spec":null}}"#,
        r#"{"Pod":{"metadata":{},"spec":{"containers":null,"initContainers":[{"resources":null}]}},"NodeNames":[]}"#,
        r#"{"Pod":{"metadata":{},"spec":{"containers":[{"resources":{"limits":null,"requests":{"nvidia.com/gpu":1}}}]}}}"#,
    ] {
        serde_json::from_str::<ExtenderArgs<'_>>(body).unwrap();
    }
}

#[test]
fn a_name_with_escapes_is_read_too() {
    let args: ExtenderArgs<'_> =
        serde_json::from_str(r#"{"Pod":{"metadata":{}},"NodeNames":["a\u002db"]}"#).unwrap();
    assert_eq!(args.node_names.unwrap()[0].as_str(), "a-b");
}

#[test]
fn what_is_wrong_is_said_with_its_place() {
    let error =
        serde_json::from_str::<ExtenderArgs<'_>>("{\n \"Pod\": {\"metadata\": {}},\n \"NodeNames\": [3]}")
            .unwrap_err();
    assert_eq!(error.to_string(), "invalid type: integer `3`, expected a string at line 3 column 16");
    let error = serde_json::from_str::<ExtenderArgs<'_>>("{}").unwrap_err();
    assert_eq!(error.to_string(), "missing field `Pod` at line 1 column 2");
}

#[test]
fn a_filter_answer_has_every_field_that_go_would_write() {
    let filtered = FilterVerdict {
        passed: vec![0, 2],
        refused: vec![(1, 0)],
        reasons: vec!["node(s) with 3 of 8 GPUs free, 4 asked, 1 unhealthy (GPU 3: \"Xid 79\")".to_owned()],
        reserved: Vec::new(),
        simulated: false,
    };
    assert_eq!(
        value(&filter_answer(&names(&["a", "b", "c"]), &filtered)),
        json!({
            "Nodes": null, "NodeNames": ["a", "c"], "FailedNodes": {},
            "FailedAndUnresolvableNodes": {"b": "node(s) with 3 of 8 GPUs free, 4 asked, 1 unhealthy (GPU 3: \"Xid 79\")"},
            "Error": "",
        })
    );
}

#[test]
fn nodes_that_came_as_objects_go_back_as_they_came() {
    let raw = r#"{"metadata":{"name":"a","labels":{"x":"y"}},"spec":{"odd": 1}}"#;
    let nodes = CandidateNodes::Objects(vec![NodeObject { raw, node: serde_json::from_str(raw).unwrap() }]);
    let filtered = FilterVerdict::all_passed(1);
    assert_eq!(
        value(&filter_answer(&nodes, &filtered)),
        json!({
            "Nodes": {"metadata": {}, "items": [serde_json::from_str::<Value>(raw).unwrap()]},
            "NodeNames": null, "FailedNodes": {}, "FailedAndUnresolvableNodes": {}, "Error": "",
        })
    );
}

#[test]
fn one_wins_and_the_others_get_nothing() {
    assert_eq!(
        priorities_answer(&names(&["a", "b"]), Some(1)),
        br#"[{"Host":"a","Score":0},{"Host":"b","Score":10}]"#
    );
    assert_eq!(priorities_answer(&names(&[]), None), b"[]");
}

#[test]
fn priorities_above_5000_nodes_list_the_winner_only() {
    // Kubernetes is tested with up to 5,000 nodes. For larger lists the answer holds only the node that wins.
    let all: Vec<String> = (0..5_001).map(|node| format!("node-{node}")).collect();
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    assert_eq!(
        value(&priorities_answer(&names(&all), Some(4_000))),
        json!([{ "Host": "node-4000", "Score": 10 }])
    );
    assert_eq!(priorities_answer(&names(&all), None), b"[]");
    let listed = value(&priorities_answer(&names(&all[..5_000]), Some(1)));
    assert_eq!(listed.as_array().unwrap().len(), 5_000);
}

#[test]
fn a_bind_answer_is_an_error_or_nothing() {
    assert_eq!(bind_answer(None), br#"{"Error":""}"#);
    assert_eq!(value(&bind_answer(Some("line\n\"x\""))), json!({"Error": "line\\n\"x\""}));
    assert_eq!(value(&filter_error("no"))["Error"], "no");
}

proptest! {
    #[test]
    fn any_name_and_reason_is_written_as_json(name in ".{0,20}", reason in ".{0,40}") {
        let candidates = names(&[&name, "other", &name]);
        let filtered = FilterVerdict {
            passed: vec![1, 2],
            refused: vec![(0, 0)],
            reasons: vec![reason.clone()],
            ..FilterVerdict::default()
        };
        let answer = value(&filter_answer(&candidates, &filtered));
        prop_assert_eq!(&answer["FailedAndUnresolvableNodes"][&name], &Value::from(&*gantry_api::one_line(&reason)));
        prop_assert_eq!(&answer["NodeNames"], &json!(["other", &name]));
        for winner in 0..3 {
            let scores = value(&priorities_answer(&candidates, Some(winner)));
            for (position, host) in [&name, "other", &name].into_iter().enumerate() {
                let score = if winner as usize == position { 10 } else { 0 };
                prop_assert_eq!(&scores[position], &json!({"Host": host, "Score": score}));
            }
        }
    }

    #[test]
    fn no_body_makes_the_reader_panic(body in "[\\[\\]{}\":,a-zA-Z0-9 \\\\]{0,80}") {
        let _ = serde_json::from_str::<ExtenderArgs<'_>>(&body);
        let _ = serde_json::from_str::<ExtenderBindingArgs<'_>>(&body);
    }
}
