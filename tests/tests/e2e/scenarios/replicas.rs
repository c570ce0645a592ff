//! Extenders that were started without an election, each of which decides.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use gantry_api::names::GPU_RESOURCE;
use gantry_e2e::{gantry, until};
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};

use super::churn::nothing_is_left;
use super::gangs_failures::with_other_extenders;
use super::scheduler_settings::with_setting;
use crate::bed::Bed;
use crate::gangs::GANG_LIMIT;
use crate::{pods, records};

/// A second kube-scheduler, and the name that its pods have.
const SECOND: &str = "second";
const REPLICAS: [(&str, &str); 2] =
    [("gantry-extender-a", "127.0.0.1:8031"), ("gantry-extender-b", "127.0.0.1:8032")];
const USUAL: &str = "http://127.0.0.1:8010";
const NAMESPACE: &str = "e2e-unelected";
/// Pods of each kube-scheduler, of which all together take one node.
const PODS: usize = 4;
/// Decisions at the same time are made by the same state, and thus for the same devices. More than one round is rare.
const ROUNDS: usize = 10;

/// Two kube-schedulers call an extender each, at the same time. The extenders grant the same devices. The plugin refuses
/// the later grant, so that kubelet gives each device to one pod, and the extenders count the difference.
pub(super) async fn unelected_extenders_grant_devices_twice(bed: &Bed) -> Result<()> {
    bed.gpus().await?;
    let api = bed.namespace(NAMESPACE).await?;
    let control = bed.cluster().control();
    let binary = gantry::binary().context("no gantry beside this test")?;
    let schedulers = format!("--scheduler-name=default-scheduler,{SECOND}");
    let programs = REPLICAS.map(|(name, _)| name).into_iter().chain([SECOND]);
    with_other_extenders(bed, programs, async || {
        for (name, listen) in REPLICAS {
            bed.cluster()
                .start_replica(&binary, name, Some(listen), std::slice::from_ref(&schedulers))
                .await?;
            let mut program = control.program(name)?;
            control.daemon(name)?.stop().await?;
            program.args.retain(|arg| arg != "--leader-elect");
            control.run(program).await?;
        }
        let own = format!("http://{}", REPLICAS[0].1);
        with_setting(bed, (USUAL, &own), async || {
            start_second_scheduler(bed).await?;
            for (_, listen) in REPLICAS {
                let url = format!("http://{listen}/readyz");
                let ask = ["busybox", "wget", "-q", "-O", "-", &url];
                until(format!("{listen} is ready"), GANG_LIMIT, async || control.exec(&ask).await).await?;
            }
            overlap(bed, &api).await
        })
        .await
    })
    .await?;
    nothing_is_left(bed).await
}

/// Starts another kube-scheduler, which calls the second extender.
async fn start_second_scheduler(bed: &Bed) -> Result<()> {
    let control = bed.cluster().control();
    let mut program = control.program("kube-scheduler")?;
    let config = program.args.first().and_then(|arg| arg.strip_prefix("--config="));
    let config = std::fs::read_to_string(config.context("its first argument is its configuration")?)?;
    let config = config
        .replace(REPLICAS[0].1, REPLICAS[1].1)
        .replace("leaderElection: {", "leaderElection: {leaderElect: false, ");
    let path = bed.cluster().folder().join("second-scheduler.yaml");
    std::fs::write(&path, format!("{config}profiles: [{{schedulerName: {SECOND}}}]\n"))?;
    SECOND.clone_into(&mut program.name);
    program.args[0] = format!("--config={}", path.display());
    program.args.push("--secure-port=10261".to_owned());
    control.run(program).await?;
    Ok(())
}

/// Creates pods for both kube-schedulers at once until two of them have the same device in their grants.
async fn overlap(bed: &Bed, api: &Api<Pod>) -> Result<()> {
    let node = bed.cluster().nodes()[0].name();
    for round in 0..ROUNDS {
        let mut names = Vec::new();
        for number in 0..PODS {
            for scheduler in ["default-scheduler", SECOND] {
                let name = format!("{scheduler}-{round}-{number}");
                let mut pod = records::recording(pods::sleeper(&name, 1)?, 100_000.0)?;
                let spec = pod.spec.as_mut().context("a pod has a spec")?;
                spec.scheduler_name = Some(scheduler.to_owned());
                spec.node_selector = Some([("kubernetes.io/hostname".to_owned(), node.to_owned())].into());
                api.create(&PostParams::default(), &pod).await?;
                names.push(name);
            }
        }
        let mut granted = BTreeSet::new();
        let mut held = BTreeSet::new();
        for name in &names {
            let pod = pods::running(api, name).await?;
            granted.extend(pods::granted(&pod)?);
            held.extend(pods::held_of(bed.cluster(), &pod, "main", GPU_RESOURCE).await?);
        }
        ensure!(held.len() == names.len(), "{} pods have {held:?}", names.len());
        let is_overlap = granted.len() < names.len();
        if is_overlap {
            is_reported(bed).await?;
        }
        for name in &names {
            api.delete(name, &DeleteParams::default()).await?;
        }
        for name in &names {
            until(format!("{name} gone"), pods::RUN_LIMIT, async || match api.get_opt(name).await {
                Ok(None) => Ok(()),
                other => Err(format!("{other:?}")),
            })
            .await?;
        }
        if is_overlap {
            return Ok(());
        }
    }
    anyhow::bail!("no device was granted twice in {ROUNDS} rounds")
}

/// Waits until an Event and both extenders report what was granted twice.
async fn is_reported(bed: &Bed) -> Result<()> {
    let events: Api<Event> = Api::namespaced(bed.client(), NAMESPACE);
    until("an Event GrantRefused", GANG_LIMIT, async || {
        let about = ListParams::default().fields("reason=GrantRefused");
        let found = events.list(&about).await.map_err(|error| error.to_string())?.items;
        let mut messages = found.iter().filter_map(|event| event.message.as_deref());
        match messages.any(|message| message.contains("belongs to the grant of pod")) {
            true => Ok(()),
            false => Err(format!("{} others", found.len())),
        }
    })
    .await?;
    for (_, listen) in REPLICAS {
        let url = format!("http://{listen}/metrics");
        let ask = ["busybox", "wget", "-q", "-O", "-", &url];
        until(format!("{listen} counts grants that another pod displaced"), GANG_LIMIT, async || {
            let page = bed.cluster().control().exec(&ask).await.map_err(|error| error.to_string())?;
            let line = "gantry_extender_grant_faults_total{fault=\"displaced\"}";
            let found = page.lines().find(|found| found.starts_with(line)).unwrap_or_default().to_owned();
            match found.rsplit(' ').next() {
                Some(count) if count.parse().is_ok_and(|count: f64| count > 0.0) => Ok(()),
                _ => Err(found),
            }
        })
        .await?;
    }
    records::ensure_no_device_twice(&records::read(bed.cluster())?)
}
