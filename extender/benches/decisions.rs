//! Filter and prioritize by size of the cluster, with the JSON parsing alone beside them. `cargo bench -p gantry-extender --bench
//! decisions`

#![allow(missing_docs, reason = "benchmarks")]

mod common;

use common::Fleet;
use divan::Bencher;
use divan::counter::BytesCount;
use gantry_extender::watched::WatchedResources;
use gantry_extender::webhook::review::Assignment;
use gantry_extender::wire::ExtenderArgs;
use gantry_planner::decide::{Policy, score};
use gantry_planner::request::{Ask, Request};
use gantry_planner::snapshot::NodeState;
use serde_json::json;

const NODES: [usize; 4] = [100, 1_000, 5_000, 50_000];

fn main() -> std::io::Result<()> {
    // The API client wants to be made in a runtime.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let _guard = runtime.enter();
    divan::main();
    Ok(())
}

/// Reading the request into borrowed structs: the floor.
#[divan::bench(args = NODES)]
fn parse(bencher: Bencher<'_, '_>, nodes: usize) {
    let body = common::body(Fleet::Whole, nodes, 2, 1);
    bencher.counter(BytesCount::of_slice(&body)).bench(|| {
        let args: Option<ExtenderArgs<'_>> = serde_json::from_slice(divan::black_box(&body)).ok();
        args.and_then(|args| args.node_names).map(|names| names.len())
    });
}

/// The whole of filter, from body to answer.
#[divan::bench(args = NODES)]
fn filter(bencher: Bencher<'_, '_>, nodes: usize) {
    let service = common::service(Fleet::Whole, nodes);
    let body = common::body(Fleet::Whole, nodes, 2, 1);
    bencher.bench(|| service.filter(divan::black_box(&body)).map(|answer| answer.len()));
}

/// The same where every node refuses.
#[divan::bench(args = NODES)]
fn filter_refusing_all(bencher: Bencher<'_, '_>, nodes: usize) {
    let service = common::service(Fleet::Whole, nodes);
    let body = common::body(Fleet::Whole, nodes, 9, 1);
    bencher.bench(|| service.filter(divan::black_box(&body)).map(|answer| answer.len()));
}

/// Filter where GPUs are cut in seven.
#[divan::bench(args = NODES)]
fn filter_mig(bencher: Bencher<'_, '_>, nodes: usize) {
    let service = common::service(Fleet::Mig, nodes);
    let body = common::body(Fleet::Mig, nodes, 1, 1);
    bencher.bench(|| service.filter(divan::black_box(&body)).map(|answer| answer.len()));
}

/// Filter where kubelet gives CPUs and memory of each NUMA node.
#[divan::bench(args = NODES)]
fn filter_aligned(bencher: Bencher<'_, '_>, nodes: usize) {
    let service = common::service(Fleet::Aligned, nodes);
    let body = common::body(Fleet::Aligned, nodes, 2, 1);
    bencher.bench(|| service.filter(divan::black_box(&body)).map(|answer| answer.len()));
}

/// Prioritize where GPUs are cut in seven.
#[divan::bench(args = NODES)]
fn prioritize_mig(bencher: Bencher<'_, '_>, nodes: usize) {
    prioritize_parts(bencher, Fleet::Mig, nodes);
}

/// Prioritize where GPUs are shared by four.
#[divan::bench(args = NODES)]
fn prioritize_shared(bencher: Bencher<'_, '_>, nodes: usize) {
    prioritize_parts(bencher, Fleet::Shared, nodes);
}

fn prioritize_parts(bencher: Bencher<'_, '_>, fleet: Fleet, nodes: usize) {
    let service = common::service(fleet, nodes);
    let body = common::body(fleet, nodes, 1, 1);
    bencher.bench(|| service.prioritize(divan::black_box(&body)).map(|answer| answer.len()));
}

/// The choice and the score of one node of 56 MIG devices, nothing remembered.
#[divan::bench(args = [1, 4])]
fn score_one_mig_node(bencher: Bencher<'_, '_>, devices: u32) {
    let service = common::service(Fleet::Mig, 1);
    let snapshot = service.store.snapshot();
    let request = Request {
        asks: vec![Ask::single(Fleet::Mig.resource().into(), devices)],
        order: Vec::new(),
        placement: std::sync::Arc::default(),
    };
    let class = snapshot.classes.iter().find_map(|state| match &**state {
        NodeState::Ours(class) => Some(class),
        NodeState::Foreign { .. } | NodeState::Gone => None,
    });
    bencher.bench(|| class.and_then(|class| score(divan::black_box(class), &request, &[], Policy::Pack)));
}

/// The whole of prioritize, from body to answer, the hold for the winner included.
#[divan::bench(args = NODES)]
fn prioritize(bencher: Bencher<'_, '_>, nodes: usize) {
    let service = common::service(Fleet::Whole, nodes);
    let body = common::body(Fleet::Whole, nodes, 2, 1);
    bencher.bench(|| service.prioritize(divan::black_box(&body)).map(|answer| answer.len()));
}

/// A review by the webhook, from body to answer, of a pod with so many bytes of environment.
#[divan::bench(args = [1_000, 100_000])]
fn assign(bencher: Bencher<'_, '_>, bytes: usize) {
    let assignment =
        Assignment { watched: WatchedResources::new([]), scheduler: "gantry-scheduler".to_owned() };
    let limits = json!({"nvidia.com/gpu": "1"});
    let container = json!({
        "name": "train",
        "image": "train:1",
        "env": [{"name": "CONFIG", "value": "x".repeat(bytes)}],
        "resources": {"limits": limits, "requests": limits},
    });
    let body = json!({
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "operation": "CREATE",
            "namespace": "ml",
            "object": {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "train"},
                "spec": {"containers": [container], "schedulerName": "default-scheduler"},
            },
        },
    });
    let body = serde_json::to_vec(&body).unwrap_or_default();
    bencher
        .counter(BytesCount::of_slice(&body))
        .bench(|| assignment.review(divan::black_box(&body)).map(|review| review.response.len()));
}
