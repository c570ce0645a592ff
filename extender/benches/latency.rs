//! Percentiles of filter and prioritize, in the server and through HTTP on loopback, with the JSON parsing alone beside them.
//! `cargo bench -p gantry-extender --bench latency`

#![allow(missing_docs, clippy::print_stdout, reason = "a benchmark that prints its table")]

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::Fleet;
use gantry_extender::lease::Leadership;
use gantry_extender::server::{Bodies, Listeners, Server};
use gantry_extender::watch::ApiHealth;
use gantry_extender::wire::ExtenderArgs;
use tokio_util::sync::CancellationToken;

const NODES: [usize; 4] = [100, 1_000, 5_000, 50_000];
/// Requests prepared: each of another pod.
const BODIES: usize = 64;

fn main() -> std::io::Result<()> {
    // The API client wants to be made in a runtime.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let _guard = runtime.enter();
    for (fleet, devices, words) in [
        (Fleet::Whole, 2, "request of 2 GPUs, nodes of 8 GPUs"),
        (Fleet::Mig, 1, "request of 1 MIG device, nodes of 8 GPUs in 7 each"),
        (Fleet::Shared, 1, "request of 1 replica, nodes of 8 GPUs shared by 4"),
        (Fleet::Aligned, 2, "request of 2 GPUs, 8 CPUs and 64 GiB of one NUMA node, nodes of 8 GPUs"),
    ] {
        println!("us: p50 / p99 of each, {words}, names only");
        table(&runtime, fleet, devices)?;
    }
    Ok(())
}

fn table(runtime: &tokio::runtime::Runtime, fleet: Fleet, devices: u32) -> std::io::Result<()> {
    println!(
        "{:>7} {:>18} {:>18} {:>18} {:>22} {:>18} {:>18}",
        "nodes", "parse", "filter", "prioritize", "filter+prioritize", "HTTP filter", "HTTP prioritize"
    );
    for nodes in NODES {
        let rounds = if nodes > 10_000 { 400 } else { 3_000 };
        let bodies: Vec<Vec<u8>> = (0..BODIES).map(|pod| common::body(fleet, nodes, devices, pod)).collect();
        let service = common::service(fleet, nodes);
        let parse = times(rounds, |round| {
            let args: Option<ExtenderArgs<'_>> = serde_json::from_slice(&bodies[round % BODIES]).ok();
            args.is_some()
        });
        let filter = times(rounds, |round| service.filter(&bodies[round % BODIES]).is_ok());
        let prioritize = times(rounds, |round| service.prioritize(&bodies[round % BODIES]).is_ok());
        let both = times(rounds, |round| {
            let body = &bodies[round % BODIES];
            service.filter(body).is_ok() && service.prioritize(body).is_ok()
        });
        let (http_filter, http_prioritize) = through_http(runtime, service, &bodies, rounds)?;
        println!(
            "{nodes:>7} {parse:>18} {filter:>18} {prioritize:>18} {both:>22} {http_filter:>18} {http_prioritize:>18}"
        );
    }
    Ok(())
}

fn through_http(
    runtime: &tokio::runtime::Runtime,
    service: gantry_extender::service::Service,
    bodies: &[Vec<u8>],
    rounds: usize,
) -> std::io::Result<(String, String)> {
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0"))?;
    let address = listener.local_addr()?;
    let shutdown = CancellationToken::new();
    let leadership = Arc::new(Leadership::always());
    if let Some(term) = leadership.term() {
        leadership.enter(term);
    }
    let server = Server {
        service,
        health: ApiHealth::new(),
        leadership,
        tls: None,
        webhook_tls: None,
        bodies: Bodies::new(64 * 1024 * 1024),
        stale_after: Duration::from_secs(15),
        drain: Duration::from_secs(1),
    };
    let listeners = Listeners { all: listener, metrics: None };
    runtime.spawn(server.run(listeners, shutdown.clone()));
    let mut client = TcpStream::connect(address)?;
    client.set_nodelay(true)?;
    let mut call =
        |path: &str| times(rounds, |round| post(&mut client, path, &bodies[round % BODIES]).is_ok());
    let result = (call("/filter"), call("/prioritize"));
    shutdown.cancel();
    Ok(result)
}

/// One request on a connection that stays open, and its whole answer.
fn post(client: &mut TcpStream, path: &str, body: &[u8]) -> std::io::Result<()> {
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    client.write_all(head.as_bytes())?;
    client.write_all(body)?;
    let mut answer = Vec::with_capacity(body.len() * 2);
    let mut buffer = vec![0; 256 * 1024];
    let whole = loop {
        let read = client.read(&mut buffer)?;
        if read == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        answer.extend_from_slice(&buffer[..read]);
        if let Some(whole) = whole_length(&answer) {
            break whole;
        }
    };
    while answer.len() < whole {
        let read = client.read(&mut buffer)?;
        if read == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        answer.extend_from_slice(&buffer[..read]);
    }
    if answer.starts_with(b"HTTP/1.1 200") { Ok(()) } else { Err(std::io::ErrorKind::InvalidData.into()) }
}

/// Length of head and body, once the head is there.
fn whole_length(answer: &[u8]) -> Option<usize> {
    let head = answer.windows(4).position(|four| four == b"\r\n\r\n")? + 4;
    let text = std::str::from_utf8(&answer[..head]).ok()?;
    let length = text.lines().find_map(|line| line.strip_prefix("content-length: "))?;
    Some(head + length.trim().parse::<usize>().ok()?)
}

/// p50 and p99 in microseconds.
fn times(rounds: usize, mut work: impl FnMut(usize) -> bool) -> String {
    for round in 0..rounds / 10 {
        assert!(work(round));
    }
    let mut taken: Vec<Duration> = (0..rounds)
        .map(|round| {
            let began = Instant::now();
            assert!(work(round));
            began.elapsed()
        })
        .collect();
    taken.sort_unstable();
    let at = |percent: usize| taken[taken.len() * percent / 100].as_secs_f64() * 1e6;
    format!("{:.0} / {:.0}", at(50), at(99))
}
