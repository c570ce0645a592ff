//! Invalid settings: the Gang and the pods name the setting and the reason, nothing is half done, and a running gang
//! continues.

use anyhow::{Result, ensure};
use gantry_api::names::{GANG_MIN_ANNOTATION, GANG_REQUIRED_LEVEL_ANNOTATION};
use gantry_api::{Gang, GangPhase, GangSpec, GangStatus, Reason};
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::json;

use super::churn::nothing_is_left;
use crate::bed::Bed;
use crate::gangs::{Crew, Scene, brief};
use crate::{pods, records};

pub(super) async fn invalid_settings_are_reported_on_gang_and_pods(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-bad").await?;
    let torn = Crew::new("torn", 2, 1);
    let mut other = torn.pod(1)?;
    if let Some(annotations) = other.metadata.annotations.as_mut() {
        annotations.insert(GANG_MIN_ANNOTATION.to_owned(), "3".to_owned());
    }
    scene.create_all([torn.pod(0)?, other]).await?;
    let moon = Crew::new("moon", 2, 1).with(GANG_REQUIRED_LEVEL_ANNOTATION, "moon");
    scene.create(&moon).await?;
    let words = Crew::new("words", 2, 1).with(GANG_MIN_ANNOTATION, "two");
    scene.create(&words).await?;
    let both = Crew::new("both", 2, 1);
    let mut members = both.pods()?;
    for pod in &mut members {
        let label = ("scheduling.x-k8s.io/pod-group".to_owned(), "another".to_owned());
        pod.metadata.labels = Some([label].into());
    }
    scene.create_all(members).await?;

    for crew in [&torn, &moon, &words] {
        let status = scene.phase(&crew.name, GangPhase::Invalid).await?;
        ensure!(
            status.reason == Some(Reason::Invalid) && condition(&status, "Valid") == Some("False"),
            "{} {:?}",
            brief(&status),
            status.conditions
        );
        // The last member to arrive: earlier ones may have another reason, and pods that can never run are not woken.
        let reason = if crew.name == words.name { Reason::InvalidMember } else { Reason::Invalid };
        scene.pod_waits(&crew.pod_name(1), reason).await?;
        scene.holds_nothing(crew).await?;
    }
    // Of two conventions the first in order is followed, and the other is not forgotten.
    let status = scene.phase("both", GangPhase::Bound).await?;
    ensure!(status.integration == "Annotation", "{}", brief(&status));
    let contested = status.conditions.iter().find(|condition| condition.type_ == "AmbiguousMembership");
    ensure!(
        contested.is_some_and(|condition| condition.reason == Reason::SeveralIntegrations.as_str()),
        "{:?}",
        status.conditions
    );
    scene.runs(&both).await?;

    // A mended gang goes on.
    for pod in words.pod_names() {
        let patch = json!({ "metadata": { "annotations": { GANG_MIN_ANNOTATION: "2" } } });
        scene.pods.patch(&pod, &PatchParams::default(), &Patch::Merge(&patch)).await?;
    }
    scene.runs(&words).await?;
    for crew in [&torn, &moon, &words, &both] {
        scene.disband(crew).await?;
    }
    nothing_is_left(bed).await
}

pub(super) async fn gang_spec_takes_precedence_until_bound(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-forged").await?;
    // The user creates the Gang object before the pods: its spec takes precedence over their annotations.
    let spec = GangSpec { min_member: Some(3), ..GangSpec::default() };
    let ahead = Gang::new("ahead", spec);
    scene.gangs.create(&PostParams::default(), &ahead).await?;
    let crew = Crew::new("ahead", 3, 2).with(GANG_MIN_ANNOTATION, "2");
    scene.create_all([crew.pod(0)?, crew.pod(1)?]).await?;
    scene.pod_waits(&crew.pod_name(1), Reason::WaitingForMembers).await?;
    scene.holds_nothing(&crew).await?;
    scene.create_all([crew.pod(2)?]).await?;
    scene.runs(&crew).await?;

    // The minimum is raised while the gang runs: it continues and reports the difference.
    let patch = json!({ "spec": { "minMember": 5 } });
    scene.gangs.patch("ahead", &PatchParams::default(), &Patch::Merge(&patch)).await?;
    scene
        .status_where("ahead", "says that the minimum was changed", |status| {
            let mut conditions = status.conditions.iter();
            status.bound == 3
                && conditions.any(|condition| condition.reason == Reason::MinimumChanged.as_str())
        })
        .await?;
    for name in crew.pod_names() {
        let pod = scene.pods.get(&name).await?;
        ensure!(pods::phase(&pod) == "Running", "{name} was disturbed");
    }

    // A forged decision.
    let status = json!({ "status": { "phase": "Bound", "bound": 99 } });
    let refused = scene.gangs.patch_status("ahead", &PatchParams::default(), &Patch::Merge(&status)).await;
    ensure!(
        refused.is_err_and(|error| error.to_string().contains("gantry-extender")),
        "somebody else wrote what became of a gang"
    );
    records::ensure_no_device_twice(&records::read(bed.cluster())?)?;
    scene.disband(&crew).await?;
    nothing_is_left(bed).await
}

fn condition<'a>(status: &'a GangStatus, name: &str) -> Option<&'a str> {
    let found = status.conditions.iter().find(|condition| condition.type_ == name);
    found.map(|condition| condition.status.as_str())
}
