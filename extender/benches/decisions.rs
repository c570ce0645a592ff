//! Filter and prioritize by size of the cluster, with the JSON parsing alone beside them. `cargo bench -p gantry-extender --bench decisions`

#![allow(missing_docs, reason = "benchmarks")]

mod common;

use divan::Bencher;
use divan::counter::BytesCount;
use gantry_extender::wire::ExtenderArgs;

const NODES: [usize; 4] = [100, 1_000, 5_000, 50_000];

fn main() -> std::io::Result<()> {
    // The API client wants to be made in a runtime.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let _guard = runtime.enter();
    divan::main();
    Ok(())
}

/// Reading the request into borrowed structs: the floor.
#[divan::bench(args = NODES)]
fn parse(bencher: Bencher<'_, '_>, nodes: usize) {
    let body = common::body(nodes, 2, 1);
    bencher.counter(BytesCount::of_slice(&body)).bench(|| {
        let args: Option<ExtenderArgs<'_>> = serde_json::from_slice(divan::black_box(&body)).ok();
        args.and_then(|args| args.node_names).map(|names| names.len())
    });
}

/// The whole of filter, from body to answer.
#[divan::bench(args = NODES)]
fn filter(bencher: Bencher<'_, '_>, nodes: usize) {
    let service = common::service(nodes);
    let body = common::body(nodes, 2, 1);
    bencher.bench(|| service.filter(divan::black_box(&body)).map(|answer| answer.len()));
}

/// The same where every node refuses.
#[divan::bench(args = NODES)]
fn filter_refusing_all(bencher: Bencher<'_, '_>, nodes: usize) {
    let service = common::service(nodes);
    let body = common::body(nodes, 9, 1);
    bencher.bench(|| service.filter(divan::black_box(&body)).map(|answer| answer.len()));
}

/// The whole of prioritize, from body to answer, the hold for the winner included.
#[divan::bench(args = NODES)]
fn prioritize(bencher: Bencher<'_, '_>, nodes: usize) {
    let service = common::service(nodes);
    let body = common::body(nodes, 2, 1);
    bencher.bench(|| {
        service
            .prioritize(divan::black_box(&body))
            .map(|answer| answer.len())
    });
}
