//! Connections to the API server that are silent, as behind a firewall that has forgotten them: no packet arrives, and
//! nothing refuses one.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use gantry_e2e::gantry::EXTENDER;
use gantry_e2e::until;
use kube::api::{DeleteParams, PostParams};

use super::churn::nothing_is_left;
use super::gangs_preempt::on_node;
use crate::bed::Bed;
use crate::daemon_logs::Log;
use crate::pods;
use crate::views::probe;

/// Longer than two renewals of the Lease: a connection on which the extender sent nothing for that long is a watch.
const RENEWALS: Duration = Duration::from_secs(6);
/// A working watch begins again after 30 s at most, and one that was silent for 45 s is opened again. The last byte came
/// before the cut.
const NOTICED: Duration = Duration::from_secs(25);
/// When everything works again, on a slow machine too.
const REPAIRED: Duration = Duration::from_secs(70);

/// All watches of the extender become silent at once, and its other requests go on. It decides by what it knows, and does
/// not see that devices come free until it opens the watches again.
pub(super) async fn silent_watches_are_opened_again(bed: &Bed) -> Result<()> {
    bed.gpus().await?;
    let api = bed.namespace("e2e-silent").await?;
    let [first, second, ..] = bed.cluster().nodes() else { anyhow::bail!("no two nodes") };
    pods::run(&api, &on_node(pods::sleeper("leaves", 8)?, first.name())?).await?;
    let before = sent(bed).await?;
    tokio::time::sleep(RENEWALS).await;
    let now = sent(bed).await?;
    let watches = before.iter().filter(|(port, sent)| now.get(port) == Some(sent)).map(|(port, _)| *port);
    let server = bed.cluster().port();
    let dropped: Vec<_> = watches.flat_map(|port| [rule(server, port), rule(port, server)]).collect();
    ensure!(dropped.len() > 6 && dropped.len() < 2 * now.len(), "{before:?}, then {now:?}");
    let log = Log::of(&bed.cluster().control().daemon(EXTENDER)?);
    let cut = Instant::now();
    for rule in &dropped {
        firewall(bed, "-I", rule).await?;
    }
    let outcome = async {
        api.delete("leaves", &DeleteParams::default()).await?;
        until("leaves gone", pods::RUN_LIMIT, async || match api.get_opt("leaves").await {
            Ok(None) => Ok(()),
            other => Err(format!("{other:?}")),
        })
        .await?;
        api.create(&PostParams::default(), &on_node(pods::sleeper("next", 8)?, first.name())?).await?;
        pods::run(&api, &on_node(pods::sleeper("elsewhere", 2)?, second.name())?).await?;
        let next = api.get("next").await?;
        ensure!(pods::node(&next).is_empty(), "it was scheduled after {:?}", cut.elapsed());
        // Silence alone is no failure: a watch without events is silent as well.
        probe(bed.cluster().control(), 8011, "/readyz", 200, "").await?;
        ensure!(!log.text()?.contains("watch failed"), "noticed after {:?}: {}", cut.elapsed(), log.text()?);
        log.has("watch failed, trying again").await?;
        let noticed = cut.elapsed();
        pods::running(&api, "next").await?;
        probe(bed.cluster().control(), 8011, "/readyz", 200, "").await?;
        let repaired = cut.elapsed();
        ensure!(
            noticed > NOTICED && repaired < REPAIRED,
            "noticed after {noticed:?}, repaired after {repaired:?}"
        );
        anyhow::Ok(())
    }
    .await;
    for rule in &dropped {
        firewall(bed, "-D", rule).await?;
    }
    outcome?;
    for name in ["next", "elsewhere"] {
        api.delete(name, &DeleteParams::default()).await?;
    }
    nothing_is_left(bed).await
}

/// The bytes that the extender has sent over each of its connections to the API server, by its own port.
async fn sent(bed: &Bed) -> Result<BTreeMap<u16, u64>> {
    let port = format!(":{}", bed.cluster().port());
    let argv = ["ss", "-OHtnpi", "state", "established", "dport", "=", &port];
    let text = bed.cluster().control().exec(&argv).await?;
    let mut all = BTreeMap::new();
    for line in text.lines().filter(|line| line.contains("\"gantry\"")) {
        let mut fields = line.split_whitespace();
        let local = fields.nth(2).and_then(|address| address.rsplit(':').next()?.parse().ok());
        let bytes = fields.find_map(|field| field.strip_prefix("bytes_sent:")?.parse().ok());
        all.insert(local.with_context(|| line.to_owned())?, bytes.with_context(|| line.to_owned())?);
    }
    Ok(all)
}

/// Drops what arrives from one port for another.
fn rule(from: u16, to: u16) -> Vec<String> {
    let (from, to) = (from.to_string(), to.to_string());
    ["-p", "tcp", "--sport", &from, "--dport", &to, "-j", "DROP"].map(str::to_owned).to_vec()
}

/// Adds a rule to what the control plane accepts, or removes it.
async fn firewall(bed: &Bed, action: &str, rule: &[String]) -> Result<()> {
    let mut argv = vec!["iptables", "-w", action, "INPUT"];
    argv.extend(rule.iter().map(String::as_str));
    bed.cluster().control().exec(&argv).await?;
    Ok(())
}
