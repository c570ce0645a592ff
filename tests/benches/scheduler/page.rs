//! What the web page and metrics cost the extender: its memory, and the times of filter and prioritize, of an extender without
//! page and of one whose page browsers look at while its metrics are scraped. The two take turns in one run.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use gantry_e2e::{Cluster, Daemon, Program};
use http::header::{CONTENT_TYPE, HOST};
use http::{Method, Request};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::net::TcpStream;

use crate::case::Case;
use crate::load;

/// Where the manifests have the extender listen, where its metrics are, and where this has the page.
const EXTENDER: &str = "127.0.0.1:8010";
const METRICS: &str = "127.0.0.1:8011";
const PAGE: &str = "127.0.0.1:8020";
/// Between two scrapes.
const SCRAPE: Duration = Duration::from_secs(5);
/// Until memory is read, with nothing asked but page and metrics.
const REST: Duration = Duration::from_secs(30);

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// How often each case is run.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Nodes, of 8 GPUs each.
    #[arg(long, default_value_t = 5000)]
    nodes: u32,
    /// Pods that run, of one GPU each.
    #[arg(long, default_value_t = 5000)]
    pods: u32,
    /// Calls of each verb.
    #[arg(long, default_value_t = 2000)]
    calls: usize,
    /// Browsers that look at the page.
    #[arg(long, default_value_t = 8)]
    viewers: usize,
}

/// Calls filter and prioritize in turn, and prints percentiles.
#[derive(Debug, clap::Args)]
pub(crate) struct Calls {
    /// Nodes in each call.
    #[arg(long)]
    nodes: u32,
    /// Calls of each verb.
    #[arg(long)]
    calls: usize,
}

/// Looks at the page as browsers do, and scrapes metrics, until killed.
#[derive(Debug, clap::Args)]
pub(crate) struct Viewers {
    /// Browsers.
    #[arg(long)]
    viewers: usize,
}

/// Fills the cluster and measures.
pub(crate) async fn rounds(args: &Args, cluster: &Cluster, gantry: &Path) -> Result<()> {
    load::create_nodes(cluster, args.nodes).await?;
    load::create_bound_pods(cluster, 0..args.pods, args.nodes).await?;
    println!("{} nodes, {} pods that run, {} browsers", args.nodes, args.pods, args.viewers);
    for round in 1..=args.rounds {
        for viewers in [0, args.viewers] {
            let extra = match viewers {
                0 => Vec::new(),
                _ => vec![format!("--page-listen={PAGE}")],
            };
            let extender =
                Case::Gantry.start_extender(cluster, gantry, &extra).await?.context("the extender")?;
            let browsers = look(cluster, viewers).await?;
            tokio::time::sleep(REST).await;
            let memory = memory(&extender)?;
            let times = calls(cluster, args).await?;
            let name = if viewers == 0 { "without page" } else { "with page and metrics" };
            println!("round {round}: {name:<22} at rest {memory}; {}", times.trim());
            if let Some(browsers) = browsers {
                browsers.kill().await?;
            }
            extender.stop().await?;
        }
    }
    Ok(())
}

/// Resident memory of a process.
fn memory(daemon: &Daemon) -> Result<String> {
    let path = format!("/proc/{}/status", daemon.pid());
    let status = fs::read_to_string(&path).context(path)?;
    let field = |name: &str| {
        let value = status.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next());
        let kb: f64 = value.with_context(|| name.to_owned())?.parse()?;
        Ok::<_, anyhow::Error>(kb / 1000.0)
    };
    Ok(format!("{:.1} MB, {:.1} MB of it RssAnon", field("VmRSS:")?, field("RssAnon:")?))
}

async fn look(cluster: &Cluster, viewers: usize) -> Result<Option<Daemon>> {
    if viewers == 0 {
        return Ok(None);
    }
    let program =
        Program::new("viewers", std::env::current_exe()?, ["viewers", "--viewers", &viewers.to_string()]);
    Ok(Some(cluster.control().run(program).await?))
}

async fn calls(cluster: &Cluster, args: &Args) -> Result<String> {
    let own = std::env::current_exe()?.display().to_string();
    let (nodes, calls) = (args.nodes.to_string(), args.calls.to_string());
    Ok(cluster.control().exec(&[&own, "calls", "--nodes", &nodes, "--calls", &calls]).await?)
}

/// The role that calls.
pub(crate) async fn call(args: &Calls) -> Result<()> {
    let names: Vec<String> = (0..args.nodes).map(|number| format!("fake-{number}")).collect();
    let mut sender = connect(EXTENDER).await?;
    let mut times = [Vec::new(), Vec::new()];
    for number in 0..args.calls {
        let limits = json!({ "cpu": "1", "memory": "1Gi", "nvidia.com/gpu": "2" });
        let body = json!({
            "Pod": {
                "metadata": { "name": format!("ask-{number}"), "namespace": "default", "uid": format!("7bd4b3a0-5d5c-4f0c-9f0e-{number:012}") },
                "spec": { "containers": [{ "name": "main", "image": "none", "resources": { "limits": limits, "requests": limits } }] },
                "status": { "phase": "Pending" },
            },
            "Nodes": null,
            "NodeNames": names,
        });
        let body = Bytes::from(serde_json::to_vec(&body)?);
        for (verb, times) in ["/filter", "/prioritize"].into_iter().zip(&mut times) {
            let request = Request::builder().method(Method::POST).uri(verb).header(HOST, EXTENDER);
            let request = request.header(CONTENT_TYPE, "application/json").body(Full::new(body.clone()))?;
            let start = Instant::now();
            sender.ready().await?;
            let response = sender.send_request(request).await?;
            let status = response.status();
            let answer = response.into_body().collect().await?.to_bytes();
            ensure!(status.is_success(), "{verb}: {status}: {}", String::from_utf8_lossy(&answer));
            times.push(start.elapsed());
        }
    }
    let [filter, prioritize] = times.map(percentiles);
    println!("filter {filter}, prioritize {prioritize}");
    Ok(())
}

fn percentiles(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let at = |percent: usize| {
        times.get(times.len() * percent / 100).map_or(f64::NAN, |time| time.as_secs_f64() * 1e6)
    };
    format!("{:.0} / {:.0} us", at(50), at(99))
}

/// The role that looks.
pub(crate) async fn view(args: &Viewers) -> Result<()> {
    tokio::try_join!(try_join_all((0..args.viewers).map(|_| browse())), scrape())?;
    Ok(())
}

async fn scrape() -> Result<()> {
    loop {
        fetch(METRICS, "/metrics").await?.into_body().collect().await?;
        tokio::time::sleep(SCRAPE).await;
    }
}

/// One page: the map after each message of the stream.
async fn browse() -> Result<()> {
    let mut events = fetch(PAGE, "/events").await?.into_body();
    loop {
        for part in ["/api/v1/cluster", "/api/v1/gangs"] {
            fetch(PAGE, part).await?.into_body().collect().await?;
        }
        events.frame().await.context("the stream has ended")??;
    }
}

async fn fetch(address: &str, path: &str) -> Result<hyper::Response<Incoming>> {
    let mut sender = connect(address).await?;
    let request = Request::builder().uri(path).header(HOST, address).body(Full::default())?;
    let response = sender.send_request(request).await?;
    ensure!(response.status().is_success(), "{path}: {}", response.status());
    Ok(response)
}

async fn connect(address: &str) -> Result<SendRequest<Full<Bytes>>> {
    let stream = TcpStream::connect(address).await.with_context(|| address.to_owned())?;
    stream.set_nodelay(true)?;
    let (sender, connection) = handshake(TokioIo::new(stream)).await?;
    // Its errors are those of the requests.
    tokio::spawn(async move { connection.await.ok() });
    Ok(sender)
}
