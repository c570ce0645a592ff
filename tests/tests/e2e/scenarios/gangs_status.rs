//! The status of gangs in `kubectl get gangs`, Events on gangs and pods, `gantry explain` and metrics, while one gang
//! waits, another is preempting, is bound, loses a member and gets it back. All four must agree with each other and
//! with the cluster.

use anyhow::{Context, Result, ensure};
use gantry_api::GangPhase;
use serde_json::Value;

use super::churn::nothing_is_left;
use super::gangs_phases::{let_end, slow_to_end};
use super::gangs_preempt::{IMPORTANT, is_gone, make_class};
use crate::bed::Bed;
use crate::gangs::{Crew, Scene};
use crate::views::{self, Metrics, Table};

/// The columns of `kubectl get gangs -o wide`.
const COLUMNS: [&str; 11] = [
    "NAME",
    "PHASE",
    "MIN",
    "MEMBERS",
    "BOUND",
    "DOMAIN",
    "WAITING",
    "REASON",
    "MESSAGE",
    "DECIDED BY",
    "AGE",
];

/// Sixteen of twenty GPUs each, and a small one that has to wait.
struct Gangs {
    slow: Crew,
    waits: Crew,
    urgent: Crew,
}

pub(super) async fn gang_progress_is_reported_everywhere(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-told").await?;
    make_class(bed).await?;
    let gangs = Gangs {
        slow: Crew::new("slow", 2, 8),
        waits: Crew::new("waits", 2, 4),
        urgent: Crew::new("urgent", 2, 8).of_class(IMPORTANT),
    };
    let outcome = gangs.are_told(&scene).await;
    // Whatever came of it: they would stay for minutes.
    let mut ended = Ok(());
    for name in gangs.slow.pod_names() {
        ended = ended.and(let_end(&scene, &name).await);
    }
    outcome.and(ended)?;
    for crew in [&gangs.urgent, &gangs.waits] {
        scene.disband(crew).await?;
    }
    nothing_is_left(bed).await
}

impl Gangs {
    async fn are_told(&self, scene: &Scene<'_>) -> Result<()> {
        let slow = self.slow.pods()?.into_iter().map(slow_to_end);
        scene.create_all(slow.collect::<Result<Vec<_>>>()?).await?;
        scene.runs(&self.slow).await?;
        self.one_waits(scene).await?;
        self.one_preempts(scene).await?;
        self.it_is_bound(scene).await?;
        self.it_loses_a_member(scene).await
    }

    /// Four GPUs are free, and the gang needs eight.
    async fn one_waits(&self, scene: &Scene<'_>) -> Result<()> {
        let before = Metrics::read(scene.bed).await?;
        scene.create(&self.waits).await?;
        scene.phase("waits", GangPhase::Queued).await?;
        let table = Table::get(scene.bed, &scene.namespace, "gangs").await?;
        ensure!(table.columns() == COLUMNS, "{:?}", table.columns());
        row(
            &table,
            "waits",
            &[("PHASE", "Queued"), ("MIN", "2"), ("MEMBERS", "2"), ("BOUND", "0"), ("DOMAIN", "")],
        )?;
        row(
            &table,
            "slow",
            &[("PHASE", "Bound"), ("MIN", "2"), ("MEMBERS", "2"), ("BOUND", "2"), ("WAITING", "")],
        )?;
        let reason = table.cell("waits", "REASON")?;
        ensure!(reason == "InsufficientResources", "{table:?}");
        ensure!(!table.cell("waits", "WAITING")?.is_empty(), "{table:?}");
        let by = table.cell("waits", "DECIDED BY")?;
        ensure!(by.contains("gantry.dev/gang-min"), "{table:?}");
        told(scene, "waits", "GangWaiting", &[]).await?;
        let of_gang = report(scene, "gang", "waits").await?;
        let widest = of_gang["tried"]["levels"].as_array().and_then(|levels| levels.last());
        let widest = widest.with_context(|| format!("no level in {of_gang}"))?;
        ensure!(of_gang["status"]["reason"] == "InsufficientResources", "{of_gang}");
        ensure!(widest["fits"] == 1 && widest["must"] == 2, "{of_gang}");
        let of_pod = report(scene, "pod", "waits-0").await?;
        ensure!(of_pod["gang_reason"] == "InsufficientResources", "{of_pod}");
        let nodes = of_pod["nodes"].as_array().context("no nodes")?;
        ensure!(nodes.iter().filter(|node| node["lack"].is_null()).count() == 1, "{of_pod}");
        let now = Metrics::settled(
            scene.bed,
            &[
                (r#"gangs{phase="queued"}"#, 1.0),
                (r#"gangs{phase="bound"}"#, 1.0),
                ("gang_reservations", 0.0),
                (r#"devices{state="held"}"#, 16.0),
                (r#"devices{state="free"}"#, 4.0),
            ],
        )
        .await?;
        grew(&before, &now, r#"gang_steps_total{outcome="queued"}"#, 1.0)?;
        grew(&before, &now, r#"gang_steps_total{outcome="reserved"}"#, 0.0)
    }

    /// The more important one has the other evicted, which takes its time.
    async fn one_preempts(&self, scene: &Scene<'_>) -> Result<()> {
        let before = Metrics::read(scene.bed).await?;
        scene.create(&self.urgent).await?;
        scene.phase("urgent", GangPhase::Preempting).await?;
        let table = Table::get(scene.bed, &scene.namespace, "gangs").await?;
        row(&table, "urgent", &[("PHASE", "Preempting"), ("MEMBERS", "2"), ("BOUND", "0")])?;
        told(scene, "urgent", "Preempting", &[]).await?;
        for name in self.slow.pod_names() {
            let pod = scene.pods.get(&name).await?;
            let about = ("Pod", &*name, pod.metadata.uid.as_deref());
            views::event(scene.bed, &scene.namespace, about, "Preempted", &["urgent"]).await?;
        }
        let of_gang = explain(scene, "gang", "urgent").await?;
        ensure!(of_gang.contains("Preempting"), "{of_gang}");
        let now = Metrics::settled(
            scene.bed,
            &[
                (r#"gangs{phase="preempting"}"#, 1.0),
                (r#"gangs{phase="queued"}"#, 1.0),
                ("gang_reservations", 2.0),
                ("gang_reserved_devices", 16.0),
            ],
        )
        .await?;
        grew(&before, &now, r#"gang_steps_total{outcome="preempting"}"#, 1.0)?;
        grew(&before, &now, r#"gang_pod_writes_total{verb="evict",outcome="done"}"#, 2.0)
    }

    /// What was freed goes to it.
    async fn it_is_bound(&self, scene: &Scene<'_>) -> Result<()> {
        let before = Metrics::read(scene.bed).await?;
        for name in self.slow.pod_names() {
            let_end(scene, &name).await?;
            is_gone(scene, &name).await?;
        }
        scene.runs(&self.urgent).await?;
        let table = Table::get(scene.bed, &scene.namespace, "gangs").await?;
        row(
            &table,
            "urgent",
            &[("PHASE", "Bound"), ("MIN", "2"), ("MEMBERS", "2"), ("BOUND", "2"), ("WAITING", "")],
        )?;
        let status = scene.status("urgent").await?;
        ensure!(!status.domain.is_empty() && table.cell("urgent", "DOMAIN")? == status.domain, "{table:?}");
        told(scene, "urgent", "GangReserved", &[&status.domain]).await?;
        told(scene, "urgent", "GangBound", &[&status.domain]).await?;
        let of_pod = explain(scene, "pod", "urgent-0").await?;
        let pod = scene.pods.get("urgent-0").await?;
        let node = crate::pods::node(&pod);
        ensure!(of_pod.contains(&format!("bound to {node}: GPU 0,1,2,3,4,5,6,7")), "{of_pod}");
        for device in crate::pods::granted(&pod)? {
            ensure!(of_pod.contains(&device), "no {device} in\n{of_pod}");
        }
        let now = Metrics::settled(
            scene.bed,
            &[
                (r#"gangs{phase="bound"}"#, 1.0),
                (r#"gangs{phase="preempting"}"#, 0.0),
                ("gang_reservations", 0.0),
                ("gang_reserved_devices", 0.0),
                (r#"devices{state="held"}"#, 16.0),
            ],
        )
        .await?;
        for series in [
            r#"gang_steps_total{outcome="reserved"}"#,
            r#"gang_steps_total{outcome="bound"}"#,
            r#"gang_commits_total{outcome="done"}"#,
            "gang_wait_seconds_count",
        ] {
            grew(&before, &now, series, 1.0)?;
        }
        grew(&before, &now, r#"binds_total{outcome="bound"}"#, 2.0)?;
        let plans = now.of("gang_plan_seconds_count") - before.of("gang_plan_seconds_count");
        ensure!(plans >= 1.0, "{plans} plans were timed");
        // Its waiting time counts from the eviction, not from the start of the machine.
        let waited = now.of("gang_wait_seconds_sum") - before.of("gang_wait_seconds_sum");
        ensure!((0.0..3600.0).contains(&waited), "waited {waited} s");
        Ok(())
    }

    /// The reservation of the lost member is held, also against the gang that waited longest, and the gang is complete
    /// again.
    async fn it_loses_a_member(&self, scene: &Scene<'_>) -> Result<()> {
        let before = Metrics::read(scene.bed).await?;
        let lost = scene.pods.get("urgent-1").await?;
        let node = crate::pods::node(&lost).to_owned();
        scene.delete("urgent-1").await?;
        scene.phase("urgent", GangPhase::Degraded).await?;
        let table = Table::get(scene.bed, &scene.namespace, "gangs").await?;
        row(&table, "urgent", &[("PHASE", "Degraded"), ("MIN", "2"), ("BOUND", "1")])?;
        told(scene, "urgent", "MemberLost", &[]).await?;
        let of_gang = explain(scene, "gang", "urgent").await?;
        ensure!(of_gang.contains("Degraded"), "{of_gang}");
        let of_pod = explain(scene, "pod", "waits-0").await?;
        let kept = format!("has 1 reservation of gang {}/urgent", scene.namespace);
        let line = of_pod.lines().find(|line| line.contains(&kept));
        ensure!(line.is_some_and(|line| line.contains(&node)), "no {kept:?} of {node} in\n{of_pod}");
        let now = Metrics::settled(
            scene.bed,
            &[
                (r#"gangs{phase="degraded"}"#, 1.0),
                (r#"gangs{phase="queued"}"#, 1.0),
                ("gang_reservations", 1.0),
                ("gang_reserved_devices", 8.0),
                (r#"devices{state="held"}"#, 8.0),
            ],
        )
        .await?;
        grew(&before, &now, r#"gang_steps_total{outcome="degraded"}"#, 1.0)?;
        scene.create_all([self.urgent.pod(1)?]).await?;
        scene.runs(&self.urgent).await?;
        told(scene, "urgent", "GangBound", &["whole again: 2 of 2 members are bound in"]).await?;
        Metrics::settled(scene.bed, &[(r#"gangs{phase="degraded"}"#, 0.0), ("gang_reservations", 0.0)])
            .await?;
        Ok(())
    }
}

/// The row of a gang in the table.
fn row(table: &Table, gang: &str, expected: &[(&str, &str)]) -> Result<()> {
    for (column, cell) in expected {
        let seen = table.cell(gang, column)?;
        ensure!(seen == *cell, "{column} of {gang} is {seen:?}, not {cell:?}: {table:?}");
    }
    Ok(())
}

/// Waits for an Event on a gang.
async fn told(scene: &Scene<'_>, gang: &str, reason: &str, words: &[&str]) -> Result<()> {
    let object = scene.gangs.get(gang).await?;
    let uid = object.metadata.uid.context("an object has a UID")?;
    let about = ("Gang", gang, Some(&*uid));
    views::event(scene.bed, &scene.namespace, about, reason, words).await?;
    Ok(())
}

/// The JSON report of `gantry explain`.
async fn report(scene: &Scene<'_>, kind: &str, name: &str) -> Result<Value> {
    let text = views::explained(scene.bed, &[kind, name, "-n", &scene.namespace, "--json"]).await?;
    serde_json::from_str(&text).with_context(|| text.clone())
}

async fn explain(scene: &Scene<'_>, kind: &str, name: &str) -> Result<String> {
    views::explained(scene.bed, &[kind, name, "-n", &scene.namespace]).await
}

/// A counter is by so much higher than before.
fn grew(before: &Metrics, now: &Metrics, series: &str, by: f64) -> Result<()> {
    let grown = now.of(series) - before.of(series);
    ensure!((grown - by).abs() < 0.1, "{series} grew by {grown}, not by {by}");
    Ok(())
}
