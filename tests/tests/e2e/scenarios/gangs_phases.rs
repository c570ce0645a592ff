//! The states of gangs that pass by themselves where nothing holds them up: a lost member, victims that take their
//! time, a decision of which not all is bound, a try that has failed, what cannot be followed. The extender,
//! kube-scheduler and every kubelet die meanwhile, or one extender follows another, and each gang is afterwards what it
//! was, and comes to its end.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use gantry_api::names::{GANG_ARRIVAL_ANNOTATION, GANG_MIN_ANNOTATION};
use gantry_api::{Decision, GangPhase};
use gantry_e2e::gantry::EXTENDER;
use gantry_e2e::until;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ListParams};
use serde_json::json;

use super::churn::nothing_is_left;
use super::gangs_deletion::binding;
use super::gangs_failures::{kill_kubelets, leader, with_two_extenders};
use super::gangs_preempt::{IMPORTANT, is_gone, make_class};
use crate::bed::Bed;
use crate::gangs::{Crew, GANG_LIMIT, Scene, brief};
use crate::{blocked_writes, pods, records};

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
    /// Decided, and one of its two Bindings is refused.
    half: Crew,
    /// One of its two members never comes to its place.
    late: Crew,
    invalid: Crew,
}

/// The state that must survive every kill.
struct Before {
    /// The place of the member that is lost.
    kept: Place,
    decided: Decision,
}

impl Gangs {
    fn new() -> Self {
        Self {
            torn: Crew::new("torn", 2, 4).of_class(IMPORTANT),
            slow: Crew::new("slow", 2, 4),
            urgent: Crew::new("urgent", 2, 4).of_class(IMPORTANT),
            half: Crew::new("half", 2, 1),
            late: Crew::new("late", 2, 1).with(GANG_ARRIVAL_ANNOTATION, "1"),
            invalid: Crew::new("invalid", 2, 4),
        }
    }

    /// Brings each to its state.
    async fn form(&self, scene: &Scene<'_>) -> Result<Before> {
        scene.create(&self.torn).await?;
        scene.runs(&self.torn).await?;
        let slow = self.slow.pods()?.into_iter().map(slow_to_end);
        scene.create_all(slow.collect::<Result<Vec<_>>>()?).await?;
        scene.runs(&self.slow).await?;
        // Four GPUs are left. Two of them belong to this pod, which is too small a victim; the others are free while
        // the late gang backs off.
        scene.create(&self.half).await?;
        let decided = binding(scene, "half", 1).await?;
        // This waits for longer than the gang for which others go, and must not profit by it, nor by a place that is
        // kept.
        scene.create_all([pods::sleeper("vulture", 4)?]).await?;

        let lost = self.torn.pod_name(1);
        let kept = place(&scene.pods.get(&lost).await?)?;
        scene.delete(&lost).await?;
        scene.phase("torn", GangPhase::Degraded).await?;
        scene.create(&self.urgent).await?;
        scene.phase("urgent", GangPhase::Preempting).await?;
        let mut other = self.invalid.pod(1)?;
        let annotations = other.metadata.annotations.get_or_insert_default();
        annotations.insert(GANG_MIN_ANNOTATION.to_owned(), "3".to_owned());
        scene.create_all([self.invalid.pod(0)?, other]).await?;
        scene.phase("invalid", GangPhase::Invalid).await?;
        scene.create_all([self.late.pod(0)?, self.late.pod_kept_out(1)?]).await?;
        Ok(Before { kept, decided })
    }

    /// All but the late one are again, or still, what they were.
    async fn stand(&self, scene: &Scene<'_>, before: &Before) -> Result<()> {
        let torn = scene.phase("torn", GangPhase::Degraded).await?;
        ensure!(torn.bound == 1, "{}", brief(&torn));
        scene.phase("urgent", GangPhase::Preempting).await?;
        scene.phase("invalid", GangPhase::Invalid).await?;
        for crew in [&self.urgent, &self.invalid] {
            scene.holds_nothing(crew).await?;
        }
        for name in self.slow.pod_names() {
            ensure!(is_going(scene, &name).await?, "{name} is not asked to end");
        }
        let decided = binding(scene, "half", 1).await?;
        ensure!(decided == before.decided, "{decided:?} instead of {:?}", before.decided);
        for name in self.half.pod_names() {
            ensure!(!is_going(scene, &name).await?, "more has to go than it takes");
        }
        gets_nothing(scene, "vulture").await
    }

    /// The late gang backs off for some seconds, and the next kill happens meanwhile. Failed attempts stay counted.
    async fn backs_off(&self, scene: &Scene<'_>, failed_attempts: u32) -> Result<u32> {
        let late = scene.phase("late", GangPhase::Backoff).await?;
        ensure!(
            late.bound == 0 && late.failed_attempts >= failed_attempts.max(1),
            "{failed_attempts} tries had failed: {}",
            brief(&late)
        );
        scene.holds_nothing(&self.late).await?;
        Ok(late.failed_attempts)
    }

    /// They survive every kill.
    async fn outlive(&self, scene: &Scene<'_>) -> Result<Before> {
        let before = self.form(scene).await?;
        self.stand(scene, &before).await?;
        let failed_attempts = self.backs_off(scene, 0).await?;
        let control = scene.bed.cluster().control();
        let restart = async |program: &str| {
            control.daemon(program)?.kill().await?;
            control.run_again(program).await?;
            is_at_work_again(scene, program).await
        };
        restart("kube-scheduler").await?;
        self.stand(scene, &before).await?;
        let failed_attempts = self.backs_off(scene, failed_attempts).await?;
        kill_kubelets(scene).await?;
        self.stand(scene, &before).await?;
        self.backs_off(scene, failed_attempts).await?;
        // The end of the back-off is lost with the extender.
        scene.let_in().await?;
        restart(EXTENDER).await?;
        self.stand(scene, &before).await?;
        Ok(before)
    }

    /// Each of two extenders is replaced in turn, the leader first, as an update does; they stand.
    async fn outlive_an_update(&self, scene: &Scene<'_>) -> Result<Before> {
        let control = scene.bed.cluster().control();
        leader(scene).await?;
        let before = self.form(scene).await?;
        let mut failed_attempts = 0;
        for is_last in [false, true] {
            self.stand(scene, &before).await?;
            let name = leader(scene).await?;
            failed_attempts = self.backs_off(scene, failed_attempts).await?;
            if is_last {
                scene.let_in().await?;
            }
            control.daemon(name)?.stop().await?;
            let next = leader(scene).await?;
            ensure!(next != name, "{name} answers after its end");
            control.run_again(name).await?;
            is_at_work_again(scene, EXTENDER).await?;
        }
        self.stand(scene, &before).await?;
        Ok(before)
    }

    /// At the end the lost member is replaced in its reservation, the preemptor gets the freed GPUs, and the blocked
    /// gang runs.
    async fn end(&self, scene: &Scene<'_>, before: &Before) -> Result<()> {
        scene.runs(&self.late).await?;
        scene.runs(&self.half).await?;
        let bound = scene.status("half").await?.decision;
        ensure!(bound.as_ref() == Some(&before.decided), "{bound:?} instead of {:?}", before.decided);
        scene.create_all([self.torn.pod(1)?]).await?;
        scene.runs(&self.torn).await?;
        let back = place(&scene.pods.get(&self.torn.pod_name(1)).await?)?;
        ensure!(back == before.kept, "{back:?} instead of {:?}", before.kept);
        for name in self.slow.pod_names() {
            let_end(scene, &name).await?;
        }
        scene.runs(&self.urgent).await?;
        for name in self.slow.pod_names() {
            is_gone(scene, &name).await?;
        }
        gets_nothing(scene, "vulture").await?;
        records::ensure_no_device_twice(&records::read(scene.bed.cluster())?)?;
        // All at once, for one after the other takes longer than all before.
        let soon = DeleteParams::default().grace_period(1);
        scene.pods.delete_collection(&soon, &ListParams::default()).await?;
        Ok(())
    }

    /// Plays what they outlive, and their end.
    async fn play(&self, scene: &Scene<'_>, outlive: impl AsyncFnOnce() -> Result<Before>) -> Result<()> {
        blocked_writes::block_bindings(scene, &[self.half.pod_name(1)]).await?;
        let outlived = outlive().await;
        // Whatever came of it: it holds for the whole cluster.
        blocked_writes::allow_bindings(scene).await?;
        let outcome = match outlived {
            Ok(before) => self.end(scene, &before).await,
            Err(error) => Err(error),
        };
        // Whatever came of it: they would stay for minutes.
        let mut ended = Ok(());
        for name in self.slow.pod_names() {
            ended = ended.and(let_end(scene, &name).await);
        }
        outcome.and(ended)
    }
}

/// Waits until a program does its part, without which every gang would stay in its phase.
pub(super) async fn is_at_work_again(scene: &Scene<'_>, program: &str) -> Result<()> {
    if program == EXTENDER {
        let witness = Crew::new("witness", 2, 1);
        scene.create_all([witness.pod(0)?]).await?;
        scene.phase("witness", GangPhase::Pending).await?;
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

/// Ends a pod that is [`slow_to_end`], unless it is gone. A kubelet that has just restarted may not have read its pods
/// yet.
pub(super) async fn let_end(scene: &Scene<'_>, name: &str) -> Result<()> {
    let argv = ["-n", &scene.namespace, "exec", name, "--", "touch", MAY_END];
    until(format!("{name} is told that it may end"), GANG_LIMIT, async || {
        let told = scene.bed.cluster().kubectl(&argv).await;
        match scene.pods.get_opt(name).await {
            Ok(None) => Ok(()),
            Ok(Some(_)) => told.map(drop).map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        }
    })
    .await
    .map_err(Into::into)
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

pub(super) async fn short_phases_survive_kills(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-states").await?;
    make_class(bed).await?;
    let gangs = Gangs::new();
    gangs.play(&scene, async || gangs.outlive(&scene).await).await?;
    nothing_is_left(bed).await
}

pub(super) async fn short_phases_survive_extender_update(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-update").await?;
    make_class(bed).await?;
    let gangs = Gangs::new();
    let story = async || gangs.play(&scene, async || gangs.outlive_an_update(&scene).await).await;
    with_two_extenders(bed, story).await?;
    nothing_is_left(bed).await
}
