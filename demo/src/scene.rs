//! What a scene does: submit a pod, find its node and GPUs and the reason, check them against the cluster and its
//! container, draw.

use std::collections::BTreeSet;

use anyhow::Context;
use gantry_api::names::{EXTENDER, GANG_ANNOTATION, GANG_MIN_ANNOTATION, GPU_RESOURCE};
use gantry_map::{ClusterMap, Hold, Letters, NodeMap};
use gantry_topology::{GpuSet, Purpose};
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::ResourceExt;
use kube::api::{Api, ListParams, PostParams};
use serde_json::json;

use crate::cluster::{Cluster, PATIENCE};
use crate::screen::{Screen, Style};
use crate::view::grant;
use crate::watch::strips;

/// A pod for a scene.
#[derive(Debug, Clone, Default)]
pub(crate) struct DemoPod {
    pub(crate) name: String,
    pub(crate) gpus: usize,
    /// Only on this node, by selector.
    pub(crate) only_on: Option<String>,
    /// Bound to this node at its creation, without a scheduler.
    pub(crate) bypass: Option<String>,
    /// For how long its processes outlive it.
    pub(crate) outlive: Option<String>,
    /// The gang it belongs to, and how many members that needs.
    pub(crate) gang: Option<(String, usize)>,
}

/// A running pod, with its node and GPUs.
#[derive(Debug, Clone)]
pub(crate) struct RunningPod {
    pub(crate) name: String,
    pub(crate) pod: Pod,
    pub(crate) node: String,
    pub(crate) gpus: GpuSet,
}

/// A demo in progress.
pub(crate) struct Scene<'a> {
    pub(crate) cluster: &'a Cluster,
    pub(crate) screen: Screen,
    pub(crate) letters: Letters,
    pub(crate) checks: Checks,
    /// The pods so far, for the summary.
    pub(crate) placed: Vec<RunningPod>,
}

/// What was verified.
#[derive(Debug, Default)]
pub(crate) struct Checks {
    pub(crate) passed: usize,
    pub(crate) failed: Vec<String>,
}

impl Scene<'_> {
    /// Records and prints whether a check holds.
    pub(crate) fn check(&mut self, holds: bool, what: &str) {
        if holds {
            self.checks.passed += 1;
            self.screen.line(format!("  {} {what}", self.screen.styled(Style::GOOD, "✓")));
        } else {
            self.checks.failed.push(what.to_owned());
            self.screen.line(format!("  {} {what}", self.screen.styled(Style::BAD, "✗ FAILED:")));
        }
    }

    /// Draws all nodes as they are now.
    pub(crate) async fn draw(&mut self) -> anyhow::Result<()> {
        let view = self.cluster.view().await?;
        self.letters.learn(&view);
        for strip in strips(&view, &self.letters, self.screen) {
            self.screen.line(strip);
        }
        Ok(())
    }

    /// The node with the most free GPUs.
    pub(crate) async fn freest_node(&self) -> anyhow::Result<String> {
        let view = self.cluster.view().await?;
        let nodes = view.nodes.iter().rev();
        let freest = nodes.max_by_key(|node| node.free().len());
        freest.map(|node| node.name.clone()).context("no node")
    }

    pub(crate) async fn submit(&self, pod: &DemoPod) -> anyhow::Result<Pod> {
        let object = serde_json::from_value(manifest(pod)).context("the demo's own pod")?;
        let created = self.cluster.pods().create(&PostParams::default(), &object).await;
        created.with_context(|| format!("submitting pod {}", pod.name))
    }

    /// Submits a pod, waits until it runs, prints its node and the reason, and checks the placement.
    pub(crate) async fn place(&mut self, pod: &DemoPod) -> anyhow::Result<Option<RunningPod>> {
        let before = self.cluster.view().await?;
        self.submit(pod).await?;
        self.follow(pod, &before).await
    }

    /// As [`Scene::place`] for a submitted pod; `before` is the view from before it could be placed.
    pub(crate) async fn follow(
        &mut self,
        pod: &DemoPod,
        before: &ClusterMap,
    ) -> anyhow::Result<Option<RunningPod>> {
        let Some(placed) = self.running(&pod.name).await? else {
            return Ok(None);
        };
        let (Some(demo_node), Some(seen)) = (self.cluster.nodes.get(&placed.node), before.node(&placed.node))
        else {
            self.check(false, &format!("{} is on a node of the demo ({})", pod.name, placed.node));
            return Ok(None);
        };
        let free = seen.free();
        let choice = demo_node.table.rate(placed.gpus, free, Purpose::Local);
        let reason = choice.reason(&demo_node.table);
        let node = self.screen.styled(Style::STRONG, &placed.node);
        self.screen.line(format!("  {} -> {node}", pod.name));
        self.screen.paragraph("     ", Style::PLAIN, &reason);
        self.placed.push(placed.clone());
        self.verify(pod, &placed, seen).await?;
        self.remember().await?;
        let best = demo_node.table.best(free, pod.gpus, Purpose::Local);
        self.check(
            best.is_some_and(|best| best.bandwidth_gbs <= choice.bandwidth_gbs),
            &format!("no other choice of {} on {} is better connected", gpus(pod.gpus), placed.node),
        );
        Ok(Some(placed))
    }

    /// Assigns letters to pods in the order of their arrival.
    async fn remember(&mut self) -> anyhow::Result<()> {
        let view = self.cluster.view().await?;
        self.letters.learn(&view);
        Ok(())
    }

    /// The pod once it runs, with the GPUs its container sees.
    pub(crate) async fn running(&mut self, name: &str) -> anyhow::Result<Option<RunningPod>> {
        let pods = self.cluster.pods();
        let pod = self.cluster.wait(async || {
            let pod = pods.get(name).await.with_context(|| format!("reading pod {name}"))?;
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
                Some(pod) => {
                    pod.status.as_ref().and_then(|status| status.message.clone()).unwrap_or_default()
                }
                None => format!("still waits after {} s: {}", PATIENCE.as_secs(), self.words(name).await?),
            };
            self.check(false, &format!("{name} runs ({why})"));
            return Ok(None);
        };
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_default();
        let view = self.cluster.view().await?;
        let visible = self.visible(&pod, &node);
        let gpus =
            view.node(&node).map(|node| node.of_ids(visible.iter().map(String::as_str))).unwrap_or_default();
        Ok(Some(RunningPod { name: name.to_owned(), pod, node, gpus }))
    }

    /// The device ids in `NVIDIA_VISIBLE_DEVICES` of the pod's container.
    pub(crate) fn visible(&self, pod: &Pod, node: &str) -> BTreeSet<String> {
        let processes = self
            .cluster
            .nodes
            .get(node)
            .map(|node| node.kubelet.processes(&pod.uid().unwrap_or_default()))
            .unwrap_or_default();
        let values = processes.iter().filter_map(|process| process.env.get("NVIDIA_VISIBLE_DEVICES"));
        values.flat_map(|value| value.split(',').map(str::to_owned)).collect()
    }

    async fn verify(&mut self, pod: &DemoPod, placed: &RunningPod, before: &NodeMap) -> anyhow::Result<()> {
        let name = pod.name.as_str();
        let visible = self.visible(&placed.pod, &placed.node);
        if pod.bypass.is_none() {
            let granted: BTreeSet<String> = grant(&placed.pod)
                .map(|grant| grant.held(GPU_RESOURCE))
                .unwrap_or_default()
                .iter()
                .map(ToString::to_string)
                .collect();
            self.check(
                granted == visible && visible.len() == pod.gpus,
                &format!("the container of {name} sees exactly its grant, {}", gpus(pod.gpus)),
            );
        } else {
            self.check(
                visible.len() == pod.gpus,
                &format!("the container of {name} sees {}", gpus(pod.gpus)),
            );
        }
        self.check(
            placed.gpus.is_subset(before.free()),
            &format!("they were free and healthy before{}", others(before.free() - placed.gpus)),
        );
        let published = self.published(name, placed).await?;
        self.check(published, &format!("GpuNode {} names {name} as their holder", placed.node));
        Ok(())
    }

    /// Whether the node's GpuNode reports, within the timeout, that the pod holds exactly its GPUs.
    async fn published(&self, name: &str, placed: &RunningPod) -> anyhow::Result<bool> {
        let seen = self.cluster.wait(async || {
            let view = self.cluster.view().await?;
            let held = view.node(&placed.node).map(|node| node.set(|gpu| gpu.has(name, Hold::Held)));
            Ok((held == Some(placed.gpus)).then_some(()))
        });
        Ok(seen.await?.is_some())
    }

    /// Checks that a pod waits, and that its condition and Events give the reason in terms of GPUs.
    pub(crate) async fn waits(&mut self, name: &str) -> anyhow::Result<()> {
        let reason = self.cluster.wait(async || {
            let pod = self.cluster.pods().get(name).await.with_context(|| format!("reading pod {name}"))?;
            let mut conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
            let refused = conditions.any(|condition| condition.reason.as_deref() == Some("Unschedulable"));
            Ok(if refused { Some(self.words(name).await?) } else { None })
        });
        let reason = reason.await?;
        let pod = self.cluster.pods().get(name).await.with_context(|| format!("reading pod {name}"))?;
        let bound = pod.spec.and_then(|spec| spec.node_name).is_some();
        self.check(!bound, &format!("{name} waits"));
        match reason {
            Some(words) => {
                self.check(true, "and its condition and Events give the reason in GPUs:");
                for line in words.lines() {
                    self.screen.paragraph("     ", Style::WARN, line);
                }
            }
            None => {
                let words = self.words(name).await?;
                self.check(
                    false,
                    &format!("its condition and Events give the reason in GPUs (found: {words})"),
                );
            }
        }
        Ok(())
    }

    /// The texts that a user finds about a waiting pod: its condition and the extender's Events, one per line.
    pub(crate) async fn words(&self, name: &str) -> anyhow::Result<String> {
        let pod = self.cluster.pods().get(name).await.with_context(|| format!("reading pod {name}"))?;
        let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
        let condition = conditions
            .filter(|condition| condition.type_ == "PodScheduled" && condition.status == "False")
            .filter_map(|condition| condition.message.clone());
        let mut lines: Vec<String> = condition.collect();
        let events: Api<Event> = Api::namespaced(self.cluster.client.clone(), "default");
        let about = ListParams::default().fields(&format!("involvedObject.name={name}"));
        let events = events.list(&about).await.context("listing events")?;
        let ours =
            events.items.into_iter().filter(|event| event.reporting_component.as_deref() == Some(EXTENDER));
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
    if count == 1 { "1 GPU".into() } else { format!("{count} GPUs") }
}

fn manifest(pod: &DemoPod) -> serde_json::Value {
    let mut annotations = json!({});
    if let Some(time) = &pod.outlive {
        annotations[gantry_sim_cluster::kubelet::OUTLIVE] = json!(time);
    }
    if let Some((gang, min)) = &pod.gang {
        annotations[GANG_ANNOTATION] = json!(gang);
        annotations[GANG_MIN_ANNOTATION] = json!(min.to_string());
    }
    let selector = pod.only_on.as_ref().map(|node| json!({"kubernetes.io/hostname": node}));
    json!({
        "metadata": {"name": pod.name, "annotations": annotations},
        "spec": {
            "nodeName": pod.bypass,
            "nodeSelector": selector,
            "restartPolicy": "Never",
            "containers": [{
                "name": "main", "image": "sim",
                "resources": {"limits": {GPU_RESOURCE: pod.gpus.to_string(), "cpu": "1"}},
            }],
        },
    })
}
