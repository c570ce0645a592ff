//! The tools of a scene: submit a pod, see where it went and why, check it against what the cluster and its container say, draw.

use std::collections::BTreeSet;

use anyhow::Context;
use gantry_api::names::{EXTENDER, GANG_ANNOTATION, GANG_MIN_ANNOTATION, GPU_RESOURCE};
use gantry_topology::{GpuSet, Purpose};
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::ResourceExt;
use kube::api::{Api, ListParams, PostParams};
use serde_json::json;

use super::screen::{Look, Screen};
use super::sight::{Hold, NodeSight, Sight, grant};
use super::stage::{PATIENCE, Stage};
use super::strip::{Letters, strips};

/// A pod for a scene.
#[derive(Debug, Clone, Default)]
pub(super) struct Actor {
    pub(super) name: String,
    pub(super) gpus: usize,
    /// Only on this node, by selector.
    pub(super) only_on: Option<String>,
    /// Bound to this node from the start: no scheduler sees it.
    pub(super) bypass: Option<String>,
    /// How long its processes outlive it.
    pub(super) outlive: Option<String>,
    /// The gang it belongs to, and how many members that needs.
    pub(super) gang: Option<(String, usize)>,
}

/// Where a pod went.
#[derive(Debug, Clone)]
pub(super) struct Placed {
    pub(super) name: String,
    pub(super) pod: Pod,
    pub(super) node: String,
    pub(super) gpus: GpuSet,
}

/// A demo in progress.
pub(super) struct Play<'a> {
    pub(super) stage: &'a Stage,
    pub(super) screen: Screen,
    pub(super) letters: Letters,
    pub(super) checks: Checks,
    /// Who got what, for the summary.
    pub(super) placed: Vec<Placed>,
}

/// What was verified.
#[derive(Debug, Default)]
pub(super) struct Checks {
    pub(super) passed: usize,
    pub(super) failed: Vec<String>,
}

impl Play<'_> {
    /// Notes whether something is as it should be, and says so.
    pub(super) fn check(&mut self, holds: bool, what: &str) {
        if holds {
            self.checks.passed += 1;
            self.screen
                .line(format!("  {} {what}", self.screen.styled(Look::GOOD, "✓")));
        } else {
            self.checks.failed.push(what.to_owned());
            self.screen
                .line(format!("  {} {what}", self.screen.styled(Look::BAD, "✗ NOT SO:")));
        }
    }

    /// Draws all nodes as they are now.
    pub(super) async fn draw(&mut self) -> anyhow::Result<()> {
        let sight = self.stage.sight().await?;
        self.letters.learn(&sight);
        for strip in strips(&sight, &self.letters, self.screen) {
            self.screen.line(strip);
        }
        Ok(())
    }

    /// The node with the most free GPUs.
    pub(super) async fn roomiest(&self) -> anyhow::Result<String> {
        let sight = self.stage.sight().await?;
        let nodes = sight.nodes.iter().rev();
        let roomiest = nodes.max_by_key(|node| node.free().len());
        roomiest.map(|node| node.name.clone()).context("no node")
    }

    /// Submits a pod.
    pub(super) async fn submit(&self, actor: &Actor) -> anyhow::Result<Pod> {
        let pod = serde_json::from_value(manifest(actor)).context("the demo's own pod")?;
        let created = self.stage.pods().create(&PostParams::default(), &pod).await;
        created.with_context(|| format!("submitting pod {}", actor.name))
    }

    /// Submits a pod, waits until it runs, tells where and why, and checks everything that can be checked of it.
    pub(super) async fn place(&mut self, actor: &Actor) -> anyhow::Result<Option<Placed>> {
        let before = self.stage.sight().await?;
        self.submit(actor).await?;
        self.follow(actor, &before).await
    }

    /// As [`Play::place`] for a pod already submitted, with the sight before it could be placed.
    pub(super) async fn follow(&mut self, actor: &Actor, before: &Sight) -> anyhow::Result<Option<Placed>> {
        let Some(placed) = self.running(&actor.name).await? else {
            return Ok(None);
        };
        let (Some(stage_node), Some(seen)) = (self.stage.nodes.get(&placed.node), before.node(&placed.node))
        else {
            self.check(
                false,
                &format!("{} is on a node of the demo ({})", actor.name, placed.node),
            );
            return Ok(None);
        };
        let free = seen.free();
        let choice = stage_node.table.rate(placed.gpus, free, Purpose::Local);
        let reason = choice.reason(&stage_node.table);
        let node = self.screen.styled(Look::STRONG, &placed.node);
        self.screen.line(format!("  {} -> {node}", actor.name));
        self.screen.paragraph("     ", Look::PLAIN, &reason);
        self.placed.push(placed.clone());
        self.verify(actor, &placed, seen).await?;
        self.remember().await?;
        let best = stage_node.table.best(free, actor.gpus, Purpose::Local);
        self.check(
            best.is_some_and(|best| best.bandwidth_gbs <= choice.bandwidth_gbs),
            &format!(
                "no other choice of {} on {} is better connected",
                gpus(actor.gpus),
                placed.node
            ),
        );
        Ok(Some(placed))
    }

    /// Keeps what is seen now, so that pods get their letters in the order they came.
    async fn remember(&mut self) -> anyhow::Result<()> {
        let sight = self.stage.sight().await?;
        self.letters.learn(&sight);
        Ok(())
    }

    /// The pod once it runs, with the GPUs its container sees.
    pub(super) async fn running(&mut self, name: &str) -> anyhow::Result<Option<Placed>> {
        let pods = self.stage.pods();
        let pod = self.stage.wait(async || {
            let pod = pods
                .get(name)
                .await
                .with_context(|| format!("reading pod {name}"))?;
            let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
            Ok(matches!(phase, Some("Running" | "Failed")).then_some(pod))
        });
        let pod = pod.await?;
        let running = pod.as_ref().filter(|pod| {
            let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
            phase == Some("Running")
        });
        let Some(pod) = running.cloned() else {
            let why = match &pod {
                Some(pod) => pod
                    .status
                    .as_ref()
                    .and_then(|status| status.message.clone())
                    .unwrap_or_default(),
                None => format!(
                    "still waits after {} s: {}",
                    PATIENCE.as_secs(),
                    self.words(name).await?
                ),
            };
            self.check(false, &format!("{name} runs ({why})"));
            return Ok(None);
        };
        let node = pod
            .spec
            .as_ref()
            .and_then(|spec| spec.node_name.clone())
            .unwrap_or_default();
        let sight = self.stage.sight().await?;
        let visible = self.visible(&pod, &node);
        let gpus = sight
            .node(&node)
            .map(|node| node.of_ids(visible.iter().map(String::as_str)))
            .unwrap_or_default();
        Ok(Some(Placed {
            name: name.to_owned(),
            pod,
            node,
            gpus,
        }))
    }

    /// What `NVIDIA_VISIBLE_DEVICES` says in the pod's container.
    pub(super) fn visible(&self, pod: &Pod, node: &str) -> BTreeSet<String> {
        let processes = self
            .stage
            .nodes
            .get(node)
            .map(|node| node.kubelet.processes(&pod.uid().unwrap_or_default()))
            .unwrap_or_default();
        let values = processes
            .iter()
            .filter_map(|process| process.env.get("NVIDIA_VISIBLE_DEVICES"));
        values
            .flat_map(|value| value.split(',').map(str::to_owned))
            .collect()
    }

    async fn verify(&mut self, actor: &Actor, placed: &Placed, before: &NodeSight) -> anyhow::Result<()> {
        let name = actor.name.as_str();
        let visible = self.visible(&placed.pod, &placed.node);
        if actor.bypass.is_none() {
            let granted: BTreeSet<String> = grant(&placed.pod)
                .map(|grant| grant.held(GPU_RESOURCE))
                .unwrap_or_default()
                .iter()
                .map(ToString::to_string)
                .collect();
            self.check(
                granted == visible && visible.len() == actor.gpus,
                &format!(
                    "the container of {name} sees exactly its grant, {}",
                    gpus(actor.gpus)
                ),
            );
        } else {
            self.check(
                visible.len() == actor.gpus,
                &format!("the container of {name} sees {}", gpus(actor.gpus)),
            );
        }
        self.check(
            placed.gpus.is_subset(before.free()),
            &format!(
                "they were free and healthy before{}",
                others(before.free() - placed.gpus)
            ),
        );
        let published = self.published(name, placed).await?;
        self.check(
            published,
            &format!("GpuNode {} names {name} as their holder", placed.node),
        );
        Ok(())
    }

    /// Whether the node's GpuNode comes to say that the pod holds exactly its GPUs.
    async fn published(&self, name: &str, placed: &Placed) -> anyhow::Result<bool> {
        let seen = self.stage.wait(async || {
            let sight = self.stage.sight().await?;
            let held = sight
                .node(&placed.node)
                .map(|node| node.set(|gpu| gpu.hold == Hold::Held && gpu.pod.as_deref() == Some(name)));
            Ok((held == Some(placed.gpus)).then_some(()))
        });
        Ok(seen.await?.is_some())
    }

    /// Checks that a pod waits and that its user is told why in terms of GPUs, where the user looks.
    pub(super) async fn waits(&mut self, name: &str) -> anyhow::Result<()> {
        let told = self.stage.wait(async || {
            let words = self.words(name).await?;
            Ok(words.contains("GPU").then_some(words))
        });
        let told = told.await?;
        let pod = self
            .stage
            .pods()
            .get(name)
            .await
            .with_context(|| format!("reading pod {name}"))?;
        let bound = pod.spec.and_then(|spec| spec.node_name).is_some();
        self.check(!bound, &format!("{name} waits"));
        match told {
            Some(words) => {
                self.check(true, "and its user reads why, in GPU words:");
                for line in words.lines() {
                    self.screen.paragraph("     ", Look::WARN, line);
                }
            }
            None => {
                let words = self.words(name).await?;
                self.check(
                    false,
                    &format!("its user reads why, in GPU words (only this: {words})"),
                );
            }
        }
        Ok(())
    }

    /// What a user finds out about a waiting pod: its condition and the extender's events, one per line.
    pub(super) async fn words(&self, name: &str) -> anyhow::Result<String> {
        let pod = self
            .stage
            .pods()
            .get(name)
            .await
            .with_context(|| format!("reading pod {name}"))?;
        let conditions = pod
            .status
            .iter()
            .flat_map(|status| status.conditions.iter().flatten());
        let condition = conditions
            .filter(|condition| condition.type_ == "PodScheduled" && condition.status == "False")
            .filter_map(|condition| condition.message.clone());
        let mut lines: Vec<String> = condition.collect();
        let events: Api<Event> = Api::namespaced(self.stage.client.clone(), "default");
        let about = ListParams::default().fields(&format!("involvedObject.name={name}"));
        let events = events.list(&about).await.context("listing events")?;
        let ours = events
            .items
            .into_iter()
            .filter(|event| event.reporting_component.as_deref() == Some(EXTENDER));
        lines.extend(ours.filter_map(|event| event.message));
        lines.dedup();
        Ok(lines.join("\n"))
    }
}

fn others(set: GpuSet) -> String {
    match set.len() {
        0 => ", and no others were".into(),
        1 => format!(", and so was GPU {set}"),
        _ => format!(", and so were GPUs {set}"),
    }
}

fn gpus(count: usize) -> String {
    if count == 1 {
        "1 GPU".into()
    } else {
        format!("{count} GPUs")
    }
}

fn manifest(actor: &Actor) -> serde_json::Value {
    let mut annotations = json!({});
    if let Some(time) = &actor.outlive {
        annotations[gantry_sim_cluster::kubelet::OUTLIVE] = json!(time);
    }
    if let Some((gang, min)) = &actor.gang {
        annotations[GANG_ANNOTATION] = json!(gang);
        annotations[GANG_MIN_ANNOTATION] = json!(min.to_string());
    }
    let selector = actor
        .only_on
        .as_ref()
        .map(|node| json!({"kubernetes.io/hostname": node}));
    json!({
        "metadata": {"name": actor.name, "annotations": annotations},
        "spec": {
            "nodeName": actor.bypass,
            "nodeSelector": selector,
            "restartPolicy": "Never",
            "containers": [{
                "name": "main", "image": "sim",
                "resources": {"limits": {GPU_RESOURCE: actor.gpus.to_string(), "cpu": "1"}},
            }],
        },
    })
}
