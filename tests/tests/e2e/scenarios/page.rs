//! The web page of the extender on the real cluster, in a real headless Chromium.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gantry_api::names::GPU_RESOURCE;
use gantry_api::{GangPhase, Reason};
use gantry_e2e::browser::{Browser, chromium};
use kube::api::DeleteParams;
use serde_json::json;

use super::gangs::restart_extender;
use super::modes::chosen;
use crate::bed::Bed;
use crate::gangs::{Crew, GANG_LIMIT, Scene};
use crate::pods;

/// Where the page is served, within the cluster's network.
const ADDRESS: &str = "127.0.0.1:8012";
/// Longest time for the page to show something.
const LIVE: Duration = Duration::from_secs(30);

/// A gang runs, another one waits, and a single pod runs. The page shows the GPUs of every node, the links of a node with the
/// holders, the gangs with the reason of the one that waits, and why the pod has its devices. Then the pod is deleted.
pub(super) async fn browser_follows_gangs_and_pods(bed: &Bed) -> Result<()> {
    bed.gpus().await?;
    restart_extender(bed, &[format!("--page-listen={ADDRESS}")]).await?;
    let outcome = play(bed).await;
    restart_extender(bed, &[]).await?;
    outcome
}

async fn play(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-page").await?;
    let runs = Crew::new("runs", 2, 4);
    scene.create(&runs).await?;
    let stays = scene.runs(&runs).await?;
    let member = stays.first().context("a member")?;
    let last = bed.cluster().nodes()[2].name();
    pods::run(&scene.pods, &chosen("single", GPU_RESOURCE, 1, last)?).await?;
    // Two nodes have eight GPUs, and none of them are free on both.
    let waits = Crew::new("waits", 2, 8);
    scene.create(&waits).await?;
    let status = scene.phase(&waits.name, GangPhase::Queued).await?;
    ensure!(status.reason == Some(Reason::InsufficientResources), "{:?}", status.reason);

    let mut browser = browser(bed)?;
    browser.open(&format!("http://{ADDRESS}/"))?;
    let totals = "(document.querySelector('#totals')?.textContent ?? '')";
    let held =
        |count: u32| format!("{totals}.startsWith('3 nodes, 20 GPUs') && {totals}.includes('{count} held')");
    browser.wait(&held(9), GANG_LIMIT)?;
    // Each GPU of each node with its state.
    let marked = |letter: &str| format!("document.querySelectorAll('#domains .gpu.{letter}').length");
    let cells = browser.evaluate("document.querySelectorAll('#domains .gpu').length")?;
    ensure!(cells == 20, "{cells} GPUs are drawn");
    let words = browser.evaluate(
        "[...document.querySelectorAll('#domains .gpus')].map((row) => row.ariaLabel).join('; ')",
    )?;
    ensure!(words.as_str().is_some_and(|words| words.contains("held") && words.contains("free")), "{words}");
    let rows = "document.querySelector('#gang-rows').textContent";
    browser.wait(&format!("{rows}.includes('e2e-page/runs') && {rows}.includes('Bound')"), LIVE)?;
    browser.wait(&format!("{rows}.includes({})", json!(status.message)), LIVE)?;

    let detail = "document.querySelector('#detail').textContent";
    browser.click(&format!("a[href='#node/{}']", member.node))?;
    browser.wait("document.querySelectorAll('#detail svg.graph line').length > 0", LIVE)?;
    browser.wait(&format!("{detail}.includes({})", json!(member.pod)), LIVE)?;
    let drawn = browser.evaluate("document.querySelector('#detail svg.graph').textContent")?;
    let drawn = drawn.as_str().context("no graph")?;
    ensure!(drawn.contains("GB/s") && drawn.contains(&member.pod), "{drawn}");

    browser.evaluate("location.hash = '#gang/e2e-page/waits'")?;
    browser.wait(
        &format!("{detail}.includes('waits-0') && {detail}.includes({})", json!(status.message)),
        LIVE,
    )?;
    browser.evaluate("location.hash = '#pod/e2e-page/single'")?;
    browser.wait(&format!("{detail}.includes('Why there') && {detail}.includes({})", json!(last)), LIVE)?;

    // The page that follows was not loaded again: it still has this mark.
    browser.evaluate(&format!("window.kept = true; location.hash = '#node/{last}'"))?;
    browser.wait(&format!("{detail}.includes('e2e-page/single')"), LIVE)?;
    let before = browser.evaluate(&marked("h"))?;
    scene.pods.delete("single", &DeleteParams::default().grace_period(1)).await?;
    browser.wait(&held(8), GANG_LIMIT)?;
    browser.wait(&format!("!{detail}.includes('e2e-page/single')"), LIVE)?;
    let after = browser.evaluate(&marked("h"))?;
    ensure!(before == 9 && after == 8, "{before} GPUs held, then {after}");
    ensure!(browser.evaluate("window.kept")? == true, "the page was loaded again");
    let complaints = browser.take_complaints();
    ensure!(complaints.is_empty(), "{complaints:?}");
    Ok(())
}

/// A browser within the cluster's network.
fn browser(bed: &Bed) -> Result<Browser> {
    let program = chromium().map_err(|why| anyhow::anyhow!("{why}"))?;
    let folder = bed.folder().join("browser");
    std::fs::create_dir_all(&folder)?;
    let wrapper = folder.join("chromium");
    std::fs::write(&wrapper, inside(&program, bed.cluster().control().init_pid()))?;
    std::fs::set_permissions(&wrapper, std::fs::Permissions::from_mode(0o755))?;
    Browser::start(&wrapper, &folder.join("profile"))
}

/// A script that starts a program in the network namespace of a process.
fn inside(program: &Path, process: i32) -> String {
    format!("#!/bin/sh\nexec nsenter --net=/proc/{process}/ns/net {} \"$@\"\n", program.display())
}
