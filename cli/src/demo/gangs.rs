//! The scene of the gangs: one that gets all of its places at once, and one that waits, holds nothing, and gets all of its own when there
//! is room. As real as the other scenes: members come one by one through the scheduler, and wait for each other in the extender's bind.

use std::collections::BTreeSet;

use anyhow::Context;
use gantry_api::names::GPU_RESOURCE;
use gantry_api::{Gang, GangPhase, GangStatus};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams};
use kube::core::Request;
use kube::core::params::ListParams;
use serde_json::Value;

use super::play::{Actor, Placed, Play};
use super::screen::Look;
use super::sight::{Hold, grant};

/// Members of each gang, all of which are needed.
const MEMBERS: usize = 4;

/// A gang of pods that are alike.
struct Crew {
    name: &'static str,
    /// GPUs of each member.
    gpus: usize,
}

impl Crew {
    fn pods(&self) -> impl Iterator<Item = String> + use<> {
        let name = self.name;
        (0..MEMBERS).map(move |number| format!("{name}-{number}"))
    }

    fn actors(&self) -> Vec<Actor> {
        self.pods()
            .map(|name| Actor {
                name,
                gpus: self.gpus,
                gang: Some((self.name.to_owned(), MEMBERS)),
                ..Actor::default()
            })
            .collect()
    }

    fn asks(&self) -> String {
        format!("{MEMBERS} pods of {} GPUs", self.gpus)
    }
}

/// Plays the scene.
pub(super) async fn play(play: &mut Play<'_>) -> anyhow::Result<()> {
    play.screen.heading("6. Gangs: all of a job, or none of it");
    let intro = "whole and patient end. Two jobs want what they leave, each useful only as a whole (gantry.dev/gang, gantry.dev/gang-min): \
                 bind holds the members of the first back until all are there, and the second holds nothing while it waits.";
    play.screen.paragraph("", Look::FAINT, intro);
    end(play, ["whole", "patient"].map(str::to_owned)).await?;
    let (train, tune) = (
        Crew {
            name: "train",
            gpus: 2,
        },
        Crew {
            name: "tune",
            gpus: 3,
        },
    );

    for crew in [&train, &tune] {
        play.screen
            .line(format!("  {}: {}, all or none", crew.name, crew.asks()));
    }
    start(play, &train).await?;
    together(play, &train).await?;
    start(play, &tune).await?;
    holds_nothing(play, &tune).await?;
    table(play).await?;
    play.draw().await?;

    play.screen.line("  train ends, and nobody touches tune");
    end(play, train.pods()).await?;
    together(play, &tune).await?;
    table(play).await?;
    play.draw().await
}

/// Submits all members at once.
async fn start(play: &Play<'_>, crew: &Crew) -> anyhow::Result<()> {
    let actors = crew.actors();
    let submitted = futures::future::join_all(actors.iter().map(|actor| play.submit(actor))).await;
    submitted
        .into_iter()
        .collect::<anyhow::Result<Vec<_>>>()
        .map(drop)
}

/// Checks that all members come to run, each with exactly its grant, by one decision.
async fn together(play: &mut Play<'_>, crew: &Crew) -> anyhow::Result<()> {
    let mut placed: Vec<Placed> = Vec::new();
    for name in crew.pods() {
        match play.running(&name).await? {
            Some(member) => placed.push(member),
            None => return Ok(()),
        }
    }
    let mut taken = BTreeSet::new();
    let mut exact = true;
    for member in &placed {
        let seen = play.visible(&member.pod, &member.node);
        let granted: BTreeSet<String> = grant(&member.pod)
            .map(|grant| grant.held(GPU_RESOURCE).iter().map(ToString::to_string).collect())
            .unwrap_or_default();
        exact &= seen == granted && seen.len() == crew.gpus;
        taken.extend(seen);
    }
    let nodes: BTreeSet<&str> = placed.iter().map(|member| member.node.as_str()).collect();
    let nodes: Vec<&str> = nodes.into_iter().collect();
    play.check(
        exact && taken.len() == MEMBERS * crew.gpus,
        &format!(
            "all {MEMBERS} of {} run on {}; each sees exactly its grant, and no two see the same GPU",
            crew.name,
            nodes.join(" and ")
        ),
    );
    let status = status(play, crew.name, |status| status.phase == GangPhase::Bound).await?;
    let decided = status.as_ref().and_then(|status| status.decision.as_ref());
    let as_decided = decided.is_some_and(|decision| {
        placed.iter().all(|member| {
            let mut slots = decision.reservations.iter();
            slots.any(|slot| slot.pod_name == member.name && slot.node.as_str() == member.node)
        })
    });
    play.check(
        as_decided,
        &format!(
            "where Gang {} says: it was decided and written down before the first was bound",
            crew.name
        ),
    );
    play.placed.extend(placed);
    Ok(())
}

/// Checks that a gang waits as a whole, and that its people read why.
async fn holds_nothing(play: &mut Play<'_>, crew: &Crew) -> anyhow::Result<()> {
    let told = status(play, crew.name, |status| {
        status.phase == GangPhase::Queued && status.reason.contains("room")
    })
    .await?;
    let Some(told) = told else {
        play.check(false, &format!("Gang {} says that it waits for room", crew.name));
        return Ok(());
    };
    let sight = play.stage.sight().await?;
    let pods: Vec<String> = crew.pods().collect();
    let holds = sight
        .nodes
        .iter()
        .flat_map(|node| &node.gpus)
        .any(|gpu| gpu.hold != Hold::None && gpu.pod.as_ref().is_some_and(|pod| pods.contains(pod)));
    let mut bound = false;
    for name in &pods {
        let pod = play.stage.pods().get(name).await;
        let pod = pod.with_context(|| format!("reading pod {name}"))?;
        bound |= pod.spec.is_some_and(|spec| spec.node_name.is_some());
    }
    let free: usize = sight.nodes.iter().map(|node| node.free().len()).sum();
    play.check(
        !holds && !bound,
        &format!(
            "{} waits and holds nothing; {free} GPUs are free for others",
            crew.name
        ),
    );
    let text = format!("gang default/{} ", crew.name);
    let stage = play.stage;
    let words = stage.wait(async || {
        let words = play.words(&pods[0]).await?;
        Ok(words.contains(&text).then_some(()))
    });
    let words = words.await?;
    play.check(
        words.is_some(),
        "its people read why, on the Gang and on each pod:",
    );
    play.screen.paragraph("     ", Look::WARN, &told.message);
    Ok(())
}

/// The status of a gang once it is so; `None` if that takes too long.
async fn status(
    play: &Play<'_>,
    name: &str,
    is_so: impl Fn(&GangStatus) -> bool,
) -> anyhow::Result<Option<GangStatus>> {
    let gangs: Api<Gang> = Api::namespaced(play.stage.client.clone(), "default");
    let stage = play.stage;
    let found = stage.wait(async || {
        let gang = gangs.get_opt(name).await;
        let gang = gang.with_context(|| format!("reading Gang {name}"))?;
        Ok(gang.and_then(|gang| gang.status).filter(|status| is_so(status)))
    });
    found.await
}

/// Deletes pods that have done their work, and waits until they and their hold are gone.
async fn end(play: &Play<'_>, names: impl IntoIterator<Item = String>) -> anyhow::Result<()> {
    let names: Vec<String> = names.into_iter().collect();
    let pods = play.stage.pods();
    for name in &names {
        let deleted = pods.delete(name, &DeleteParams::default()).await;
        deleted.with_context(|| format!("deleting pod {name}"))?;
    }
    let stage = play.stage;
    let gone = stage.wait(async || {
        let left = pods.list(&ListParams::default()).await.context("listing pods")?;
        let left = left.items.iter().any(|pod| names.contains(&pod.name_any()));
        let sight = stage.sight().await?;
        let mut held = sight
            .nodes
            .iter()
            .flat_map(|node| &node.gpus)
            .filter_map(|gpu| gpu.pod.as_ref());
        // Kubelet's word of a pod that is gone has no name any more.
        let holds = held.any(|pod| pod.is_empty() || names.contains(pod));
        Ok((!left && !holds && stage.extender_agrees(&sight).await).then_some(()))
    });
    gone.await?
        .with_context(|| format!("{} do not end", names.join(", ")))
}

/// Prints what `kubectl get gangs` shows.
async fn table(play: &Play<'_>) -> anyhow::Result<()> {
    let path = "/apis/gantry.dev/v1alpha1/namespaces/default/gangs";
    let mut request = Request::new(path).list(&ListParams::default())?;
    let form = "application/json;as=Table;v=v1;g=meta.k8s.io".parse()?;
    request.headers_mut().insert("accept", form);
    let table: Value = play
        .stage
        .client
        .request(request)
        .await
        .context("listing Gangs")?;
    play.screen.line("  $ kubectl get gangs");
    for line in lines(&table) {
        let cut: String = line.chars().take(play.screen.columns.saturating_sub(2)).collect();
        play.screen
            .line(format!("  {}", play.screen.styled(Look::STRONG, cut.trim_end())));
    }
    Ok(())
}

/// A server's table as kubectl lays it out.
fn lines(table: &Value) -> Vec<String> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let columns = list(&table["columnDefinitions"]);
    let shown: Vec<usize> = (0..columns.len())
        .filter(|at| columns[*at]["priority"] == 0)
        .collect();
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let head = shown
        .iter()
        .map(|at| text(&columns[*at]["name"]).to_uppercase())
        .collect();
    let mut rows: Vec<Vec<String>> = vec![head];
    for row in list(&table["rows"]) {
        rows.push(shown.iter().map(|at| text(&row["cells"][*at])).collect());
    }
    let width = |at: usize| rows.iter().map(|row| row[at].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..shown.len()).map(width).collect();
    rows.iter()
        .map(|row| {
            let cells = row
                .iter()
                .zip(&widths)
                .map(|(cell, width)| format!("{cell:width$}"));
            cells.collect::<Vec<_>>().join("   ").trim_end().to_owned()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_table_reads_as_kubectl_lays_it_out() {
        let table = json!({
            "columnDefinitions": [
                {"name": "Name", "priority": 0}, {"name": "Min", "priority": 0}, {"name": "Decided by", "priority": 1},
                {"name": "Reason", "priority": 0},
            ],
            "rows": [{"cells": ["train", 4, "x", "is bound"]}, {"cells": ["a", 12, "y", ""]}],
        });
        insta::assert_snapshot!(lines(&table).join("\n"), @r"
        NAME    MIN   REASON
        train   4     is bound
        a       12
        ");
    }
}
