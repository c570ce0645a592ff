//! What the page costs: times of the verbs and resident memory of three extenders of the same 5,000 nodes: without a page,
//! with one that no browser opens, and with one that is open. They are called in turn, so that other work of the machine
//! concerns all of them.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use crate::bed::{Bed, Extender, pod};

/// Calls of each verb of each extender.
const CALLS: usize = 300;
/// Calls between two changes of the cluster.
const CALLS_PER_CHANGE: usize = 5;
/// Longest time for an extender to list.
const LISTED: Duration = Duration::from_secs(120);
/// Longest time for one call.
const CALL: Duration = Duration::from_secs(10);
/// Time for memory to settle.
const REST: Duration = Duration::from_secs(5);
/// A page may not make a verb slower than this, in shares of the time without it.
const LIMIT: f64 = 1.5;

pub(crate) fn cost(bed: &mut Bed) -> Result<()> {
    let names = (0..5000).map(|number| format!("node-{number:04}")).collect::<Vec<_>>();
    let mut asking = pod("asks", None, 2);
    asking["metadata"]["uid"] = "asks".into();
    let body = serde_json::to_vec(&json!({"Pod": asking, "Nodes": null, "NodeNames": names}))?;
    let [off, closed, open] =
        [bed.extender_of_large(false)?, bed.extender_of_large(true)?, bed.extender_of_large(true)?];
    for extender in [&off, &closed, &open] {
        ready(extender, &body)?;
    }
    std::thread::sleep(REST);
    let at_rest = [resident(&off)?, resident(&closed)?, resident(&open)?];
    let url = open.url("#node/node-4321")?;
    bed.browser.open(&url)?;
    bed.browser.wait("document.querySelectorAll('#detail tbody tr').length >= 8", LISTED)?;
    let mut times: [[Vec<Duration>; 2]; 3] = Default::default();
    for call in 0..CALLS {
        if call % CALLS_PER_CHANGE == 0 {
            bed.hold_on_large(&format!("node-{:04}", 4000 + call), &format!("cost-{call}"), &[7])?;
        }
        for (extender, times) in [&off, &closed, &open].into_iter().zip(&mut times) {
            for (verb, times) in ["/filter", "/prioritize"].into_iter().zip(times) {
                let begin = Instant::now();
                let code = post(extender, verb, &body)?;
                ensure!(code == 200, "{verb} of {:?}: {code}", extender.verbs());
                times.push(begin.elapsed());
            }
        }
    }
    // The page followed.
    let last = CALLS - CALLS_PER_CHANGE;
    bed.browser.evaluate(&format!("location.hash = '#node/node-{:04}'", 4000 + last))?;
    bed.browser
        .wait(&format!("document.querySelector('#detail').textContent.includes('cost-{last}')"), LISTED)?;
    let after = [resident(&off)?, resident(&closed)?, resident(&open)?];
    eprintln!(
        "page                 filter p50/p99 us  prioritize p50/p99 us  resident at rest, after {CALLS} calls in MB"
    );
    for (index, name) in ["off", "on, not open", "on, open in a browser"].into_iter().enumerate() {
        let [filter, prioritize] = &mut times[index];
        eprintln!(
            "{name:<22} {:>7}/{:<9} {:>9}/{:<12} {:.1}, {:.1}",
            quantile(filter, 0.5).as_micros(),
            quantile(filter, 0.99).as_micros(),
            quantile(prioritize, 0.5).as_micros(),
            quantile(prioritize, 0.99).as_micros(),
            at_rest[index],
            after[index],
        );
    }
    let [without, ..] = &mut times;
    let without = without.each_mut().map(|times| quantile(times, 0.5).as_secs_f64());
    for with in &mut times[1..] {
        for (verb, times) in with.iter_mut().enumerate() {
            let with = quantile(times, 0.5).as_secs_f64();
            ensure!(
                with <= without[verb] * LIMIT,
                "a page makes a verb slower: {with} s, without {without:?}"
            );
        }
    }
    Ok(())
}

fn quantile(times: &mut [Duration], share: f64) -> Duration {
    times.sort_unstable();
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "few"
    )]
    let at = (share * times.len() as f64) as usize;
    times.get(at.min(times.len() - 1)).copied().unwrap_or_default()
}

/// Waits until the extender has listed the cluster.
fn ready(extender: &Extender, body: &[u8]) -> Result<()> {
    let begin = Instant::now();
    while post(extender, "/filter", body)? != 200 {
        ensure!(begin.elapsed() < LISTED, "the extender lists for more than {LISTED:?}");
        std::thread::sleep(Duration::from_millis(200));
    }
    Ok(())
}

/// Resident memory in MB.
fn resident(extender: &Extender) -> Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", extender.id()))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
    let kb: f64 = line.trim().trim_end_matches(" kB").parse()?;
    Ok(kb / 1000.0)
}

/// Calls a verb on a connection of its own; the HTTP status.
fn post(extender: &Extender, path: &str, body: &[u8]) -> Result<u16> {
    let mut stream = TcpStream::connect(extender.verbs())?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(CALL))?;
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body)?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    let text = String::from_utf8_lossy(&answer);
    text.split(' ').nth(1).context("no status")?.parse().context("the status")
}
