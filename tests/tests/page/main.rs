//! The web page of the real extender in a real headless Chromium. The extender reads an in-memory API server with 40 and
//! with 5,000 nodes; nothing of the page is replaced.
//!
//! Where no Chromium can be installed, the tests count as ignored, never as passed. Pictures are written to
//! `$GANTRY_SCREENSHOTS`, or to `page-screenshots` in cargo's target folder. `-- --ignored cost` measures what the page costs.
#![allow(clippy::print_stderr, reason = "a test program talks on the terminal")]

mod bed;
mod cost;

use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use gantry_e2e::browser::chromium;
use libtest_mimic::{Arguments, Failed, Trial};
use serde_json::json;

use bed::{Bed, FAULT, RACK};

/// Longest time for a change to appear: a second each for the index, the stream and the page, on a loaded machine.
const LIVE: Duration = Duration::from_secs(15);

/// Longest time for an extender to list 5,000 nodes.
const LISTED: Duration = Duration::from_secs(90);

type Story = fn(&mut Bed) -> Result<()>;

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let program = if arguments.list { Ok(Default::default()) } else { chromium() };
    if let Err(why) = &program {
        eprintln!("tests of the page are skipped: {why}");
    }
    let stories: [(&str, Story); 9] = [
        ("forty_nodes_are_a_map_of_racks", forty_nodes),
        ("click_opens_a_node_with_its_links", click),
        ("change_appears_by_itself_and_is_announced", live_update),
        ("keyboard_alone_reaches_node_gang_and_pod", keyboard),
        ("screen_reader_finds_names_and_landmarks", accessibility),
        ("contrast_is_enough_in_light_and_dark", contrast),
        ("hostile_names_are_text", hostile_names),
        ("cold_index_is_stated", cold_index),
        ("five_thousand_nodes_stay_usable", five_thousand_nodes),
    ];
    let bed = Arc::new(Mutex::new(None));
    let is_ignored = program.is_err();
    let program = program.unwrap_or_default();
    let (tests, measurement) = (stories.into_iter(), [("page_costs_the_verbs_nothing", cost::cost as Story)]);
    let all = tests.map(|story| (story, is_ignored)).chain(measurement.map(|story| (story, true)));
    let trials = all.map(|((name, story), is_ignored)| {
        let (bed, program) = (Arc::clone(&bed), program.clone());
        let test = move || {
            let mut place = bed.lock().unwrap_or_else(PoisonError::into_inner);
            let bed = match place.take() {
                Some(bed) => place.insert(bed),
                None => place.insert(Bed::up(&program).map_err(|error| Failed::from(format!("{error:#}")))?),
            };
            story(bed).map_err(|error| Failed::from(format!("{error:#}")))
        };
        Trial::test(name, test).with_ignored_flag(is_ignored)
    });
    let conclusion = libtest_mimic::run(&arguments, trials.collect());
    // Ends browser and daemons before the program does.
    drop(bed.lock().unwrap_or_else(PoisonError::into_inner).take());
    conclusion.exit_code()
}

/// The text of an element.
fn text(bed: &mut Bed, selector: &str) -> Result<String> {
    let selector = serde_json::to_string(selector)?;
    let text = bed.browser.evaluate(&format!("document.querySelector({selector})?.textContent ?? null"))?;
    text.as_str().map(str::to_owned).with_context(|| format!("no {selector}"))
}

fn forty_nodes(bed: &mut Bed) -> Result<()> {
    bed.open_small("")?;
    let totals = text(bed, "#totals")?;
    ensure!(totals.starts_with("40 nodes, 320 GPUs: "), "{totals}");
    let domains = bed
        .browser
        .evaluate("[...document.querySelectorAll('#domains h3')].map((title) => title.textContent)")?;
    ensure!(domains.as_array().is_some_and(|domains| domains.len() == 4), "{domains}");
    // Nine alike nodes of each rack are one row; their names are shown on request.
    let rows = bed.browser.evaluate("document.querySelectorAll('#domains li').length")?;
    ensure!(rows.as_u64().is_some_and(|rows| (4..=14).contains(&rows)), "{rows} rows");
    bed.browser.click("#domains li button[aria-expanded=false]")?;
    let names =
        bed.browser.evaluate("document.querySelectorAll('#domains li .alike:not([hidden]) a').length")?;
    ensure!(names.as_u64().is_some_and(|names| names >= 5), "{names} names");
    let state = text(bed, "#state")?;
    ensure!(state == "Live", "{state}");
    bed.screenshot("map-40-nodes")?;
    no_complaints(bed)
}

fn click(bed: &mut Bed) -> Result<()> {
    bed.open_small("")?;
    bed.browser.click("a[href='#node/node-00']")?;
    bed.browser.wait("document.querySelectorAll('#detail svg.graph line').length > 0", LIVE)?;
    let title = text(bed, "#detail-title")?;
    ensure!(title == "Node node-00", "{title}");
    let focused = bed.browser.evaluate("document.activeElement.id")?;
    ensure!(focused == "detail-title", "the focus is on {focused}");
    // A DGX-1: 16 pairs with NVLinks, of one or two links.
    let lines = bed.browser.evaluate("document.querySelectorAll('#detail line.nv').length")?;
    ensure!(lines == 16, "{lines} NVLinks are drawn");
    let first = text(bed, "#detail line.nv title")?;
    ensure!(first.contains("NV") && first.contains("GB/s"), "{first}");
    let holder = text(bed, "#detail td a[href^='#pod/']")?;
    ensure!(holder == "research/train-0", "{holder}");
    bed.screenshot("node")?;
    // From the node to the pod that has its GPUs, and why it has them.
    bed.browser.click("#detail td a[href^='#pod/']")?;
    let why = "document.querySelector('#detail-body')?.textContent.includes('80 GB/s, the most that 4 GPUs')";
    bed.browser.wait(why, LIVE)?;
    bed.screenshot("pod")?;
    bed.browser.click("#close")?;
    bed.browser.wait("document.querySelector('#detail').hidden", LIVE)?;
    no_complaints(bed)
}

fn live_update(bed: &mut Bed) -> Result<()> {
    bed.open_small("#node/node-20")?;
    bed.browser.wait("document.querySelectorAll('#detail tbody tr').length >= 8", LIVE)?;
    let held = "Number(/(\\d+) held/.exec(document.querySelector('#totals').textContent)?.[1] ?? 0)";
    let before = bed.browser.evaluate(held)?.as_u64().context("no number")?;
    // Nothing of the page is drawn again but what changed.
    bed.browser.evaluate("window.kept = document.querySelector(\"a[href='#node/node-00']\")")?;
    bed.hold("node-20", "live", &[0, 1, 2])?;
    bed.browser.wait(&format!("{held} === {}", before + 3), LIVE)?;
    let spoken = text(bed, "#changes")?;
    ensure!(spoken.contains(&format!("{} held, before {before}", before + 3)), "{spoken}");
    bed.browser.wait("document.querySelector('#detail').textContent.includes('research/live')", LIVE)?;
    let is_kept = bed.browser.evaluate("window.kept.isConnected")?;
    ensure!(is_kept == true, "rows without a change were drawn again");
    no_complaints(bed)
}

/// Tabs on until an expression about the focused element, `it`, is true. Each stop must show its focus.
fn tab_to(bed: &mut Bed, wanted: &str) -> Result<()> {
    let mut stops = Vec::new();
    for _ in 0..80 {
        bed.browser.press("Tab")?;
        let stop = bed.browser.evaluate(&format!(
            "(() => {{ const it = document.activeElement; const look = getComputedStyle(it);
              return {{name: it.outerHTML.slice(0, 80), found: Boolean({wanted}), outline: look.outlineStyle, width: look.outlineWidth}}; }})()"
        ))?;
        let is_visible = stop["outline"] != "none" && stop["width"] != "0px";
        ensure!(is_visible, "the focus does not show: {stop}");
        if stop["found"] == true {
            return Ok(());
        }
        stops.push(stop["name"].to_string());
    }
    anyhow::bail!("{wanted} is not reached by the keyboard: {stops:#?}")
}

fn keyboard(bed: &mut Bed) -> Result<()> {
    bed.open_small("")?;
    tab_to(bed, "it.className === 'skip'")?;
    bed.browser.press("Enter")?;
    bed.browser.wait("document.activeElement.id === 'map'", LIVE)?;
    // A domain closes and opens.
    tab_to(bed, "it.localName === 'summary'")?;
    bed.browser.press("Enter")?;
    bed.browser.wait("!document.activeElement.parentElement.open", LIVE)?;
    bed.browser.press(" ")?;
    bed.browser.wait("document.activeElement.parentElement.open", LIVE)?;
    tab_to(bed, "it.matches('a[href^=\"#node/\"]')")?;
    let node = bed.browser.evaluate("document.activeElement.hash")?;
    bed.browser.press("Enter")?;
    bed.browser.wait("document.activeElement.id === 'detail-title'", LIVE)?;
    bed.browser.wait("document.querySelectorAll('#detail tbody tr').length >= 8", LIVE)?;
    bed.browser.press("Escape")?;
    bed.browser.wait(&format!("document.activeElement.hash === {node}"), LIVE)?;
    // The focus stays where it is while the page is drawn again.
    bed.hold("node-21", "keyboard", &[5])?;
    bed.browser.wait("document.querySelector('#changes').textContent !== ''", LIVE)?;
    let focused = bed.browser.evaluate("document.activeElement.hash")?;
    ensure!(focused == node, "the focus moved to {focused}");
    // A gang, and a pod by its name.
    tab_to(bed, "it.matches('a[href^=\"#gang/\"]')")?;
    bed.browser.press("Enter")?;
    bed.browser.wait("document.querySelector('#detail').textContent.includes('wide-0')", LIVE)?;
    bed.browser.press("Escape")?;
    // The page returns the focus to the link; a focus set before that would move.
    bed.browser.wait("document.activeElement.hash?.startsWith('#gang/')", LIVE)?;
    bed.browser.evaluate("document.querySelector('#pod').focus()")?;
    bed.browser.write("research/train-0")?;
    bed.browser.press("Enter")?;
    bed.browser
        .wait("document.querySelector('#detail-title').textContent === 'Pod research/train-0'", LIVE)?;
    no_complaints(bed)
}

fn accessibility(bed: &mut Bed) -> Result<()> {
    bed.open_small("#node/node-00")?;
    bed.browser.wait("document.querySelectorAll('#detail svg.graph line').length > 0", LIVE)?;
    let tree = bed.browser.command("Accessibility.getFullAXTree", &json!({}))?;
    let nodes = tree["nodes"].as_array().context("no tree")?;
    let shown: Vec<(&str, &str)> = nodes
        .iter()
        .filter(|node| node["ignored"] != true)
        .map(|node| {
            let of = |field: &str| node[field]["value"].as_str().unwrap_or_default();
            (of("role"), of("name"))
        })
        .collect();
    for role in ["banner", "main", "navigation", "status"] {
        ensure!(shown.iter().any(|(known, _)| *known == role), "no {role}");
    }
    for name in ["Cluster", "Gangs", "Node node-00"] {
        ensure!(shown.contains(&("region", name)), "no region {name}");
        ensure!(shown.contains(&("heading", name)), "no heading {name}");
    }
    const NAMED: [&str; 10] =
        ["link", "button", "textbox", "searchbox", "combobox", "image", "img", "table", "form", "region"];
    let nameless: Vec<&(&str, &str)> =
        shown.iter().filter(|(role, name)| NAMED.contains(role) && name.trim().is_empty()).collect();
    ensure!(nameless.is_empty(), "without a name: {nameless:?}");
    let images = shown.iter().filter(|(role, _)| matches!(*role, "image" | "img"));
    let images: Vec<&str> = images.map(|(_, name)| *name).collect();
    ensure!(images.iter().any(|name| name.contains("GPU 0 to 3 held")), "{images:?}");
    ensure!(
        images.iter().any(|name| name.starts_with("Links between 8 GPUs. ") && name.contains("GB/s")),
        "{images:?}"
    );
    // Every state has a mark of its own: color is not alone.
    let marks = bed.browser.evaluate(
        "new Set([...document.querySelectorAll('#legend .gpu')].map((cell) => cell.textContent)).size",
    )?;
    ensure!(marks == 7, "{marks} marks of 7 states");
    let order = bed.browser.evaluate("[...document.querySelectorAll('h1,h2,h3')].filter((title) => title.checkVisibility()).map((title) => title.localName).join()")?;
    ensure!(order.as_str().is_some_and(|order| order.starts_with("h1,h2,h2,h3")), "{order}");
    let polite = bed.browser.evaluate("document.querySelector('#changes').ariaLive")?;
    ensure!(polite == "polite", "{polite}");
    Ok(())
}

/// Contrast of every visible text by the formula of WCAG, of the colors that the browser computed.
const CONTRAST: &str = "(() => {
  const parse = (text) => { const found = text.match(/[\\d.]+/g).map(Number); return {rgb: found.slice(0, 3), alpha: found[3] ?? 1}; };
  const light = ({rgb}) => { const [r, g, b] = rgb.map((value) => { const part = value / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = (element) => {
    if (element.closest('svg') && element.classList.contains('mark')) return parse(getComputedStyle(element.parentElement.querySelector('circle')).fill);
    for (let at = element; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color.alpha === 1) return color;
      if (color.alpha > 0) return null;
    }
    return parse('rgb(255, 255, 255)');
  };
  let least = 99; let count = 0; const bad = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !element.checkVisibility() || ['SCRIPT', 'NOSCRIPT', 'title', 'OPTION'].includes(element.nodeName)) continue;
    const look = getComputedStyle(element);
    const [text, back] = [parse(element.closest('svg') ? look.fill : look.color), ground(element)];
    const [high, low] = back ? [light(text), light(back)].sort((a, b) => b - a) : [0, 1];
    const ratio = (high + 0.05) / (low + 0.05);
    count += 1; least = Math.min(least, ratio);
    if (ratio < 4.5) bad.push(`${element.nodeName}.${element.getAttribute('class')} ${walker.currentNode.textContent.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return {least, count, bad};
})()";

fn contrast(bed: &mut Bed) -> Result<()> {
    for scheme in ["light", "dark"] {
        let media = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        bed.browser.command("Emulation.setEmulatedMedia", &media)?;
        bed.open_small("#node/node-00")?;
        bed.browser.wait("document.querySelectorAll('#detail svg.graph line').length > 0", LIVE)?;
        let found = bed.browser.evaluate(CONTRAST)?;
        ensure!(found["bad"] == json!([]), "{scheme}: {}", found["bad"]);
        ensure!(found["count"].as_u64().is_some_and(|count| count > 100), "{scheme}: {found}");
        eprintln!(
            "{scheme}: least contrast {:.2} of {} texts",
            found["least"].as_f64().unwrap_or_default(),
            found["count"]
        );
        bed.screenshot(&format!("contrast-{scheme}"))?;
    }
    bed.browser.command("Emulation.setEmulatedMedia", &json!({"features": []}))?;
    Ok(())
}

/// No text of the cluster ran as a script, or became markup.
fn unharmed(bed: &mut Bed) -> Result<()> {
    ensure!(
        bed.browser.evaluate("window.hacked ?? null")?.is_null(),
        "a text of the cluster ran as a script"
    );
    let markup = bed.browser.evaluate("document.querySelectorAll('img, b, body script').length")?;
    ensure!(markup == 0, "a text of the cluster became markup");
    Ok(())
}

/// A rack, a fault and a pod's annotation that are markup must be seen as what they are.
fn hostile_names(bed: &mut Bed) -> Result<()> {
    bed.open_small("#node/node-39")?;
    bed.browser.wait("document.querySelectorAll('#detail tbody tr').length >= 8", LIVE)?;
    let shown = bed.browser.evaluate("document.body.textContent")?;
    let shown = shown.as_str().context("no text")?;
    ensure!(shown.contains(FAULT), "the fault is not shown");
    ensure!(shown.contains(RACK), "the rack is not shown");
    unharmed(bed)?;
    bed.open_small("#pod/research/hostile")?;
    bed.browser
        .wait(&format!("document.querySelector('#detail').textContent.includes({})", json!(FAULT)), LIVE)?;
    unharmed(bed)?;
    bed.open_small("#node/%3Cimg%20src%3Dx%20onerror%3D%22window.hacked%3D1%22%3E")?;
    bed.browser.wait("document.querySelector('#detail [role=alert]')", LIVE)?;
    unharmed(bed)?;
    for bad in ["#node/%", "#pod/a", "#nothing/else", "#gang/%00/x"] {
        bed.open_small(bad)?;
        unharmed(bed)?;
    }
    // The lookup of what does not exist is a failed request, which the browser reports.
    let complaints = bed.browser.take_complaints();
    ensure!(complaints.iter().all(|complaint| complaint.contains("404")), "{complaints:?}");
    Ok(())
}

fn cold_index(bed: &mut Bed) -> Result<()> {
    let extender = bed.cold_extender()?;
    bed.browser.open(&extender.url("")?)?;
    bed.browser.wait("document.querySelector('#state')?.dataset.state === 'cold'", LIVE)?;
    let state = text(bed, "#state")?;
    ensure!(state.contains("still being listed"), "{state}");
    bed.screenshot("cold")?;
    // And one that is gone: the page stays, and states it.
    drop(extender);
    bed.browser.wait("document.querySelector('#state').dataset.state === 'lost'", LIVE)?;
    bed.browser.open("about:blank")?;
    bed.browser.take_complaints();
    Ok(())
}

fn five_thousand_nodes(bed: &mut Bed) -> Result<()> {
    let url = bed.large_url()?;
    let begin = Instant::now();
    bed.browser.open(&url)?;
    bed.browser.wait(
        "document.querySelector('#totals')?.textContent.startsWith('5000 nodes, 40000 GPUs')",
        LISTED,
    )?;
    let shown = begin.elapsed();
    let elements =
        bed.browser.evaluate("document.querySelectorAll('*').length")?.as_u64().context("no count")?;
    ensure!(elements < 20_000, "{elements} elements");
    bed.screenshot("map-5000-nodes")?;
    let filtered = bed.browser.evaluate(
        "(async () => { const began = performance.now(); const field = document.querySelector('#name'); field.value = 'node-4321';
          field.dispatchEvent(new Event('input', {bubbles: true}));
          await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
          return performance.now() - began; })()",
    )?;
    let filtered = filtered.as_f64().context("no time")?;
    ensure!(filtered < 2000.0, "the filter takes {filtered} ms");
    let left = bed.browser.evaluate(
        "[...document.querySelectorAll('#domains details')].filter((domain) => !domain.hidden).length",
    )?;
    ensure!(left == 1, "{left} domains match");
    bed.browser.click("#domains details:not([hidden]) summary")?;
    // The rows of a domain are drawn once it is open.
    bed.browser.wait("document.querySelector(\"a[href='#node/node-4321']\")?.checkVisibility()", LIVE)?;
    bed.browser.click("a[href='#node/node-4321']")?;
    bed.browser.wait("document.querySelectorAll('#detail tbody tr').length >= 8", LIVE)?;
    let before = text(bed, "#totals")?;
    bed.hold_on_large("node-4321", "late", &[6, 7])?;
    bed.browser
        .wait(&format!("document.querySelector('#totals').textContent !== {}", json!(before)), LIVE)?;
    bed.browser.wait("document.querySelector('#detail').textContent.includes('research/late')", LIVE)?;
    eprintln!("5,000 nodes: shown after {shown:?}, filtered in {filtered:.0} ms, {elements} elements");
    no_complaints(bed)
}

/// The page had no exception, no failed request and no violation of its policy.
fn no_complaints(bed: &mut Bed) -> Result<()> {
    let complaints = bed.browser.take_complaints();
    ensure!(complaints.is_empty(), "{complaints:?}");
    Ok(())
}
