//! Running gangs that their owner creates again as a whole, by the real controllers of JobSet and LeaderWorkerSet: they
//! keep their devices, though a single pod waits for one of them.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use gantry_api::{GangPhase, Reason};
use gantry_e2e::until;
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::Api;
use kube::api::ListParams;
use serde_json::{Value, json};

use super::gangs_integrations::apply;
use crate::bed::Bed;
use crate::gangs::{self, GANG_LIMIT, Scene, name_of};
use crate::{pods, records};

const INDEX: &str = "batch.kubernetes.io/job-completion-index";
const ATTEMPT: &str = "jobset.sigs.k8s.io/restart-attempt";
/// The file for which the member that fails waits.
const FAIL: &str = "fail";
const REVISION: &str = "leaderworkerset.sigs.k8s.io/template-revision-hash";

/// Node and devices of each running member, by a label or by its name.
type Places = BTreeMap<String, (String, Vec<String>)>;

pub(super) async fn restarted_job_set_keeps_its_devices(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-restart").await?;
    bed.cluster().install_controllers().await?;
    bed.cluster().start_controllers(&scene.namespace).await?;
    fill_node_3(&scene).await?;
    apply(bed, &scene, &job_set()?).await?;
    let of_attempt = |attempt: &'static str| {
        move |pod: &Pod| label(pod, ATTEMPT) == attempt && !label(pod, INDEX).is_empty()
    };
    let index = |pod: &Pod| label(pod, INDEX).to_owned();
    let before = places(&scene, 4, of_attempt("0"), index).await?;
    // Every other GPU is taken, so it waits for one of the JobSet's.
    scene.create_all([pods::sleeper("single", 1)?]).await?;
    let (node, _) = before.get("1").context("the member that is to fail")?;
    records::signal(bed.cluster(), node, FAIL)?;
    let after = places(&scene, 4, of_attempt("1"), index).await?;
    ensure!(before == after, "{before:?} before the restart, {after:?} after it");
    let single = scene.pods.get("single").await?;
    ensure!(pods::node(&single).is_empty(), "a single pod got a GPU of the JobSet");
    reservation_was_kept(bed, &scene, "JobSet train").await?;
    bed.cluster().stop_controllers().await?;
    records::ensure_no_device_twice(&records::read(bed.cluster())?)
}

pub(super) async fn updated_leader_worker_set_keeps_its_devices(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-rollout").await?;
    bed.cluster().install_controllers().await?;
    bed.cluster().start_controllers(&scene.namespace).await?;
    fill_node_3(&scene).await?;
    apply(bed, &scene, &leader_worker_set()?).await?;
    let name = |pod: &Pod| name_of(pod).to_owned();
    let before = places(&scene, 4, |pod| !label(pod, REVISION).is_empty(), name).await?;
    let pods = scene.pods.list(&ListParams::default()).await?;
    let first = pods.iter().map(|pod| label(pod, REVISION).to_owned()).max().unwrap_or_default();
    scene.create_all([pods::sleeper("single", 1)?]).await?;
    let change = r#"[{"op": "add", "path": "/spec/leaderWorkerTemplate/workerTemplate/spec/containers/0/env",
        "value": [{"name": "REV", "value": "2"}]}]"#;
    let args = ["-n", &scene.namespace, "patch", "leaderworkerset", "serve", "--type=json", "-p", change];
    bed.cluster().kubectl(&args).await?;
    let is_next = |pod: &Pod| !label(pod, REVISION).is_empty() && label(pod, REVISION) != first;
    let after = places(&scene, 4, is_next, name).await?;
    ensure!(before == after, "{before:?} before the update, {after:?} after it");
    let single = scene.pods.get("single").await?;
    ensure!(pods::node(&single).is_empty(), "a single pod got a GPU of the LeaderWorkerSet");
    reservation_was_kept(bed, &scene, "LeaderWorkerSet serve").await?;
    bed.cluster().stop_controllers().await?;
    records::ensure_no_device_twice(&records::read(bed.cluster())?)
}

/// A pod on all GPUs of node-3.
async fn fill_node_3(scene: &Scene<'_>) -> Result<()> {
    let mut pod = pods::sleeper("fill", 4)?;
    let spec = pod.spec.as_mut().context("a pod has a spec")?;
    spec.node_selector = Some([("kubernetes.io/hostname".to_owned(), "node-3".to_owned())].into());
    pods::run(&scene.pods, &pod).await?;
    Ok(())
}

/// Waits until so many pods run for which `is` holds. Returns where each is.
async fn places(
    scene: &Scene<'_>,
    count: usize,
    is: impl Fn(&Pod) -> bool,
    by: impl Fn(&Pod) -> String,
) -> Result<Places> {
    let found = until(format!("{count} running members"), 2 * GANG_LIMIT, async || {
        let all = scene.pods.list(&ListParams::default()).await.map_err(|error| error.to_string())?;
        let is_running = |pod: &&Pod| {
            pods::phase(pod) == "Running" && pod.metadata.deletion_timestamp.is_none() && is(pod)
        };
        let running: Vec<&Pod> = all.iter().filter(is_running).collect();
        if running.len() != count {
            let said = all.iter().map(|pod| format!("{}: {}", name_of(pod), pods::said(pod)));
            return Err(said.collect::<Vec<_>>().join(" | "));
        }
        let place = |pod: &&Pod| {
            let devices = pods::granted(pod).map_err(|error| error.to_string())?;
            Ok((by(pod), (pods::node(pod).to_owned(), devices.into_iter().collect())))
        };
        running.iter().map(place).collect::<Result<Places, String>>()
    });
    Ok(found.await?)
}

/// An Event of a Gang reports that its reservations were kept, and why.
async fn reservation_was_kept(bed: &Bed, scene: &Scene<'_>, owner: &str) -> Result<()> {
    let events: Api<Event> = Api::namespaced(bed.cluster().client(), &scene.namespace);
    until("the Event of the kept reservation", GANG_LIMIT, async || {
        let all = events.list(&ListParams::default()).await.map_err(|error| error.to_string())?;
        let kept = Reason::ReservationKept.as_str();
        let mut notes = all.iter().filter(|event| event.reason.as_deref() == Some(kept));
        match notes.any(|event| event.message.as_deref().is_some_and(|note| note.contains(owner))) {
            true => Ok(()),
            false => Err(format!("no Event {kept} among {}", all.items.len())),
        }
    })
    .await?;
    // The status of a Gang follows its pods.
    until("a bound gang", GANG_LIMIT, async || {
        let gangs = scene.gangs.list(&ListParams::default()).await.map_err(|error| error.to_string())?;
        let phases: Vec<_> =
            gangs.iter().map(|gang| gang.status.as_ref().map(|status| status.phase)).collect();
        match phases.contains(&Some(GangPhase::Bound)) {
            true => Ok(()),
            false => Err(format!("{phases:?}")),
        }
    })
    .await?;
    Ok(())
}

fn label<'a>(pod: &'a Pod, name: &str) -> &'a str {
    let labels = pod.metadata.labels.as_ref();
    labels.and_then(|labels| labels.get(name)).map(String::as_str).unwrap_or_default()
}

/// A template of four GPUs that runs `script`.
fn template(script: &str) -> Result<Value> {
    let mut template = gangs::template(4, &json!({}))?;
    template["spec"]["terminationGracePeriodSeconds"] = json!(1);
    template["spec"]["containers"][0]["command"] = json!(["sh", "-c", script]);
    Ok(template)
}

/// Four workers, of which one fails in the first attempt once it is told to.
fn job_set() -> Result<Value> {
    let script = r#"trap "exit 1" TERM
        while [ "$JOB_COMPLETION_INDEX" = 1 ] && [ "$ATTEMPT" = 0 ]; do
            if [ -e "/records/$FAIL" ]; then exit 3; fi
            sleep 0.2
        done
        sleep 100000 & wait"#;
    let mut template = template(&script.replace("$FAIL", FAIL))?;
    records::mount(&mut template);
    let attempt = format!("metadata.labels['{ATTEMPT}']");
    template["spec"]["containers"][0]["env"] =
        json!([{ "name": "ATTEMPT", "valueFrom": { "fieldRef": { "fieldPath": attempt } } }]);
    Ok(json!({
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": { "name": "train" },
        "spec": {
            "failurePolicy": { "maxRestarts": 3 },
            "replicatedJobs": [{
                "name": "w",
                "replicas": 1,
                "template": { "spec": {
                    "parallelism": 4, "completions": 4, "backoffLimit": 0, "template": template,
                } },
            }],
        },
    }))
}

/// Two groups of a leader and a worker.
fn leader_worker_set() -> Result<Value> {
    let mut template = template("trap \"exit 0\" TERM; sleep 100000 & wait")?;
    template["spec"]["restartPolicy"] = json!("Always");
    Ok(json!({
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": { "name": "serve" },
        "spec": {
            "replicas": 2,
            "leaderWorkerTemplate": {
                "size": 2, "restartPolicy": "RecreateGroupOnPodRestart", "workerTemplate": template,
            },
        },
    }))
}
