//! The states of gangs that pass by themselves where nothing holds them up: a lost member, victims that take their time, what cannot be followed. The
//! extender, kube-scheduler and every kubelet die meanwhile, and each gang is afterwards what it was, and comes to its end.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use gantry_api::GangPhase;
use gantry_api::names::GANG_MIN_ANNOTATION;
use gantry_e2e::gantry::EXTENDER;
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use super::churn::nothing_is_left;
use super::gangs_failures::kill_kubelets;
use super::gangs_preempt::{IMPORTANT, is_gone, make_class};
use crate::bed::Bed;
use crate::gangs::{Crew, Scene, brief};
use crate::{pods, records};

/// The file in a container that it waits for before it ends.
const MAY_END: &str = "/may-end";

/// A node, and devices of it.
type Place = (String, BTreeSet<String>);

/// What the cluster is full with: twenty GPUs.
struct Gangs {
    /// Bound, and a member lost.
    torn: Crew,
    /// Bound, and asked to end for the next.
    slow: Crew,
    urgent: Crew,
    invalid: Crew,
}

impl Gangs {
    fn new() -> Self {
        Self {
            torn: Crew::new("torn", 2, 4).of_class(IMPORTANT),
            slow: Crew::new("slow", 2, 4),
            urgent: Crew::new("urgent", 2, 4).of_class(IMPORTANT),
            invalid: Crew::new("invalid", 2, 4),
        }
    }

    /// Brings each to its state. Gives the place of the member that is lost.
    async fn form(&self, scene: &Scene<'_>) -> Result<Place> {
        scene.create(&self.torn).await?;
        scene.runs(&self.torn).await?;
        let slow = self.slow.pods()?.into_iter().map(slow_to_end);
        scene.create_all(slow.collect::<Result<Vec<_>>>()?).await?;
        scene.runs(&self.slow).await?;
        // Four GPUs are left, and whoever has them is too little a victim.
        let single = records::recording(pods::sleeper("single", 4)?, 100_000.0)?;
        scene.create_all([single]).await?;
        scene.run_on_grants(&["single".to_owned()]).await?;
        // This waits for longer than the gang for which others go, and must not profit by it, nor by a place that is kept.
        scene.create_all([pods::sleeper("vulture", 4)?]).await?;

        let lost = self.torn.pod_name(1);
        let kept = place(&scene.pods.get(&lost).await?)?;
        scene.delete(&lost).await?;
        scene.phase("torn", GangPhase::Repairing).await?;
        scene.create(&self.urgent).await?;
        scene.phase("urgent", GangPhase::Preempting).await?;
        let mut other = self.invalid.pod(1)?;
        let annotations = other.metadata.annotations.get_or_insert_default();
        annotations.insert(GANG_MIN_ANNOTATION.to_owned(), "3".to_owned());
        scene.create_all([self.invalid.pod(0)?, other]).await?;
        scene.phase("invalid", GangPhase::Invalid).await?;
        Ok(kept)
    }

    /// All are again, or still, what they were.
    async fn stand(&self, scene: &Scene<'_>) -> Result<()> {
        let torn = scene.phase("torn", GangPhase::Repairing).await?;
        ensure!(torn.bound == 1, "{}", brief(&torn));
        scene.phase("urgent", GangPhase::Preempting).await?;
        scene.phase("invalid", GangPhase::Invalid).await?;
        for crew in [&self.urgent, &self.invalid] {
            scene.holds_nothing(crew).await?;
        }
        for name in self.slow.pod_names() {
            ensure!(is_going(scene, &name).await?, "{name} is not asked to end");
        }
        ensure!(!is_going(scene, "single").await?, "more has to go than it takes");
        gets_nothing(scene, "vulture").await
    }

    /// Whoever is killed, they stand, and in the end the lost member is replaced in its place, and what is freed goes to whom it was freed for.
    async fn outlive(&self, scene: &Scene<'_>) -> Result<()> {
        let kept = self.form(scene).await?;
        let cluster = scene.bed.cluster();
        for program in [EXTENDER, "kube-scheduler"] {
            cluster.control().daemon(program)?.kill().await?;
            cluster.control().run_again(program).await?;
            is_at_work_again(scene, program).await?;
            self.stand(scene).await?;
        }
        kill_kubelets(scene).await?;
        self.stand(scene).await?;

        scene.create_all([self.torn.pod(1)?]).await?;
        scene.runs(&self.torn).await?;
        let back = place(&scene.pods.get(&self.torn.pod_name(1)).await?)?;
        ensure!(back == kept, "{back:?} instead of {kept:?}");
        for name in self.slow.pod_names() {
            let_end(scene, &name).await?;
            is_gone(scene, &name).await?;
        }
        scene.runs(&self.urgent).await?;
        gets_nothing(scene, "vulture").await?;
        records::ensure_no_device_twice(&records::read(cluster)?)?;
        for crew in [&self.torn, &self.urgent, &self.invalid] {
            scene.disband(crew).await?;
        }
        for pod in ["single", "vulture"] {
            scene.delete(pod).await?;
        }
        nothing_is_left(scene.bed).await
    }
}

/// Waits until a program does what nobody else does: until then all would stand, for nobody is there to change it.
pub(super) async fn is_at_work_again(scene: &Scene<'_>, program: &str) -> Result<()> {
    if program == EXTENDER {
        let witness = Crew::new("witness", 2, 1);
        scene.create_all([witness.pod(0)?]).await?;
        scene.phase("witness", GangPhase::Collecting).await?;
        scene.disband(&witness).await
    } else {
        pods::run(&scene.pods, &pods::sleeper("comes", 0)?).await?;
        Ok(())
    }
}

/// A pod that goes on when it is asked to end, until [`let_end`].
pub(super) fn slow_to_end(pod: Pod) -> Result<Pod> {
    let mut pod = serde_json::to_value(pod)?;
    let wait = format!("until [ -e {MAY_END} ]; do sleep 0.1; done");
    pod["spec"]["terminationGracePeriodSeconds"] = json!(600);
    pod["spec"]["containers"][0]["lifecycle"] = json!({"preStop": {"exec": {"command": ["sh", "-c", wait]}}});
    Ok(serde_json::from_value(pod)?)
}

/// Lets a pod end that is [`slow_to_end`]; one that is not there any more has.
pub(super) async fn let_end(scene: &Scene<'_>, name: &str) -> Result<()> {
    let argv = ["-n", &scene.namespace, "exec", name, "--", "touch", MAY_END];
    let told = scene.bed.cluster().kubectl(&argv).await;
    ensure!(
        told.is_ok() || scene.pods.get_opt(name).await?.is_none(),
        "{name} cannot be told that it may end: {told:?}"
    );
    Ok(())
}

async fn gets_nothing(scene: &Scene<'_>, name: &str) -> Result<()> {
    let pod = scene.pods.get(name).await?;
    ensure!(pods::node(&pod).is_empty(), "{name} is on {}", pods::node(&pod));
    Ok(())
}

/// Whether a pod is there that is asked to end.
pub(super) async fn is_going(scene: &Scene<'_>, name: &str) -> Result<bool> {
    let pod = scene.pods.get(name).await?;
    Ok(pod.metadata.deletion_timestamp.is_some())
}

fn place(pod: &Pod) -> Result<Place> {
    Ok((pods::node(pod).to_owned(), pods::granted(pod)?))
}

pub(super) async fn a_lost_member_slow_victims_and_what_is_invalid_outlive_whoever_is_killed(
    bed: &Bed,
) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-states").await?;
    make_class(bed).await?;
    let gangs = Gangs::new();
    let outcome = gangs.outlive(&scene).await;
    // Whatever came of it: they would stay for minutes.
    let mut ended = Ok(());
    for name in gangs.slow.pod_names() {
        ended = ended.and(let_end(&scene, &name).await);
    }
    outcome.and(ended)
}
