//! Gangs for scenarios: their pods, their Gang objects, and checks that hold for every gang. The pods and the devices
//! in their containers are the evidence; the Gang objects are compared with them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gantry_api::names::{GANG_ANNOTATION, GANG_MIN_ANNOTATION, GPU_RESOURCE};
use gantry_api::{Gang, GangPhase, GangStatus, Reason};
use gantry_e2e::until;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};
use serde_json::{Value, json};

use crate::bed::Bed;
use crate::records::Stay;
use crate::{pods, records};

/// How long a gang may take to be where it should be; far beyond what it takes, for machines under load.
pub(crate) const GANG_LIMIT: Duration = Duration::from_secs(180);

/// The label of a pod that does not exist until [`Scene::let_in`]. Affinity to it, in namespaces selected by labels,
/// keeps a pod off its planned node, because the extender does not model that selector.
const DOORMAN: &str = "e2e.gantry.dev/doorman";

/// Pods that the annotation makes one gang.
#[derive(Debug, Clone)]
pub(crate) struct Crew {
    /// The gang's name; its pods are called after it.
    pub(crate) name: String,
    members: usize,
    gpus: usize,
    seconds: f64,
    annotations: BTreeMap<String, String>,
    labels: BTreeMap<String, String>,
    class: Option<String>,
    scheduler: Option<String>,
}

impl Crew {
    /// A gang that needs all of its members, which run until they are deleted.
    pub(crate) fn new(name: &str, members: usize, gpus: usize) -> Self {
        let annotations = [
            (GANG_ANNOTATION.to_owned(), name.to_owned()),
            (GANG_MIN_ANNOTATION.to_owned(), members.to_string()),
        ];
        Self {
            name: name.to_owned(),
            members,
            gpus,
            seconds: 100_000.0,
            annotations: annotations.into(),
            labels: BTreeMap::new(),
            class: None,
            scheduler: None,
        }
    }

    /// The same with another annotation on every pod.
    pub(crate) fn with(mut self, annotation: &str, value: &str) -> Self {
        self.annotations.insert(annotation.to_owned(), value.to_owned());
        self
    }

    /// The same with a label on every pod.
    pub(crate) fn labelled(mut self, label: &str, value: &str) -> Self {
        self.labels.insert(label.to_owned(), value.to_owned());
        self
    }

    /// The same, of a priority class.
    pub(crate) fn of_class(mut self, class: &str) -> Self {
        self.class = Some(class.to_owned());
        self
    }

    /// The same, for a scheduler of that name.
    pub(crate) fn placed_by(mut self, scheduler: &str) -> Self {
        self.scheduler = Some(scheduler.to_owned());
        self
    }

    /// The same, with members that end by themselves.
    pub(crate) fn lasting(mut self, seconds: f64) -> Self {
        self.seconds = seconds;
        self
    }

    /// One member.
    pub(crate) fn pod(&self, number: usize) -> Result<Pod> {
        let pod = pods::sleeper(&self.pod_name(number), self.gpus)?;
        let mut pod = records::recording(pod, self.seconds)?;
        pod.metadata.annotations = Some(self.annotations.clone());
        pod.metadata.labels = Some(self.labels.clone());
        let spec = pod.spec.as_mut().context("a pod has a spec")?;
        spec.priority_class_name.clone_from(&self.class);
        spec.scheduler_name.clone_from(&self.scheduler);
        Ok(pod)
    }

    /// A member that kube-scheduler keeps off its planned node until [`Scene::let_in`], for a reason that the extender
    /// does not model.
    pub(crate) fn pod_kept_out(&self, number: usize) -> Result<Pod> {
        let mut pod = self.pod(number)?;
        let near = json!({
            "podAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": [{
                "topologyKey": "kubernetes.io/os",
                "labelSelector": { "matchLabels": { DOORMAN: "here" } },
                // Any namespace, but not by its name.
                "namespaceSelector": { "matchExpressions": [{ "key": DOORMAN, "operator": "DoesNotExist" }] },
            }] },
        });
        let spec = pod.spec.as_mut().context("a pod has a spec")?;
        spec.affinity = Some(serde_json::from_value(near)?);
        Ok(pod)
    }

    /// All members.
    pub(crate) fn pods(&self) -> Result<Vec<Pod>> {
        (0..self.members).map(|number| self.pod(number)).collect()
    }

    /// The names of all members.
    pub(crate) fn pod_names(&self) -> Vec<String> {
        (0..self.members).map(|number| self.pod_name(number)).collect()
    }

    /// The name of one member.
    pub(crate) fn pod_name(&self, number: usize) -> String {
        format!("{}-{number}", self.name)
    }
}

/// A namespace in which gangs live.
pub(crate) struct Scene<'a> {
    pub(crate) bed: &'a Bed,
    pub(crate) namespace: String,
    pub(crate) pods: Api<Pod>,
    pub(crate) gangs: Api<Gang>,
}

impl<'a> Scene<'a> {
    /// Makes the namespace; the simulated GPUs and the daemons are there from now on.
    pub(crate) async fn set(bed: &'a Bed, namespace: &str) -> Result<Self> {
        bed.gpus().await?;
        let pods = bed.namespace(namespace).await?;
        Ok(Self {
            bed,
            namespace: namespace.to_owned(),
            pods,
            gangs: Api::namespaced(bed.client(), namespace),
        })
    }

    /// Makes all members of a gang.
    pub(crate) async fn create(&self, crew: &Crew) -> Result<()> {
        self.create_all(crew.pods()?).await
    }

    /// Makes pods.
    pub(crate) async fn create_all(&self, pods: impl IntoIterator<Item = Pod>) -> Result<()> {
        for pod in pods {
            self.pods.create(&PostParams::default(), &pod).await?;
        }
        Ok(())
    }

    /// Deletes a pod and waits until it is gone.
    pub(crate) async fn delete(&self, pod: &str) -> Result<()> {
        self.pods.delete(pod, &DeleteParams::default().grace_period(1)).await?;
        until(format!("{pod} gone"), pods::RUN_LIMIT, async || match self.pods.get_opt(pod).await {
            Ok(None) => Ok(()),
            Ok(Some(pod)) => Err(pods::said(&pod)),
            Err(error) => Err(error.to_string()),
        })
        .await?;
        Ok(())
    }

    /// Deletes all members of a gang and waits until they are gone.
    pub(crate) async fn disband(&self, crew: &Crew) -> Result<()> {
        for name in crew.pod_names() {
            let deleted = self.pods.delete(&name, &DeleteParams::default().grace_period(1)).await;
            ensure!(deleted.is_ok() || self.pods.get_opt(&name).await?.is_none(), "{name} cannot be deleted");
        }
        for name in crew.pod_names() {
            until(format!("{name} gone"), pods::RUN_LIMIT, async || match self.pods.get_opt(&name).await {
                Ok(None) => Ok(()),
                Ok(Some(pod)) => Err(pods::said(&pod)),
                Err(error) => Err(error.to_string()),
            })
            .await?;
        }
        Ok(())
    }

    /// The status of the gang of that name. With Gantry's annotation the object has the gang's name.
    pub(crate) async fn status(&self, gang: &str) -> Result<GangStatus> {
        let object = self.gangs.get_opt(gang).await?;
        let object = object.with_context(|| format!("no Gang {gang}"))?;
        object.status.with_context(|| format!("Gang {gang} has no status"))
    }

    /// Waits until the gang's status is as it should be.
    pub(crate) async fn status_where(
        &self,
        gang: &str,
        what: &str,
        is_so: impl Fn(&GangStatus) -> bool,
    ) -> Result<GangStatus> {
        let status = until(format!("gang {gang} {what}"), GANG_LIMIT, async || {
            let status = self.status(gang).await.map_err(|error| format!("{error:#}"))?;
            if is_so(&status) {
                return Ok(status);
            }
            let seen = brief(&status);
            Err(format!("{seen}; pods: {}", self.pods_said(gang).await))
        });
        Ok(status.await?)
    }

    /// Waits until the gang is in a phase.
    pub(crate) async fn phase(&self, gang: &str, phase: GangPhase) -> Result<GangStatus> {
        self.status_where(gang, &format!("{phase:?}"), |status| status.phase == phase).await
    }

    /// Waits until all members of a gang run, and checks that each container got what was granted, as the Gang had it
    /// decided.
    pub(crate) async fn runs(&self, crew: &Crew) -> Result<Vec<Stay>> {
        let status = self.phase(&crew.name, GangPhase::Bound).await?;
        let stays = self.run_on_grants(&crew.pod_names()).await?;
        let decision =
            status.decision.with_context(|| format!("gang {} is bound without a decision", crew.name))?;
        for name in crew.pod_names() {
            let pod = self.pods.get(&name).await?;
            let uid = pod.metadata.uid.clone().unwrap_or_default();
            let slot = decision
                .reservations
                .iter()
                .find(|slot| slot.pod.as_ref().is_some_and(|pod| pod.to_string() == uid));
            let slot = slot.with_context(|| format!("no place in the decision for {name}"))?;
            let ids = slot.devices.iter().flat_map(|devices| &devices.ids);
            let decided: BTreeSet<String> = ids.map(ToString::to_string).collect();
            ensure!(
                slot.node.to_string() == pods::node(&pod) && decided == pods::granted(&pod)?,
                "{name} was decided to get {decided:?} on {}, granted {:?} on {}",
                slot.node,
                pods::granted(&pod)?,
                pods::node(&pod)
            );
        }
        Ok(stays)
    }

    /// Waits until these pods run, and checks that each container got its pod's grant. It may have swapped grants with
    /// a pod of the same size, because kubelet does not say which pod it allocates for.
    pub(crate) async fn run_on_grants(&self, names: &[String]) -> Result<Vec<Stay>> {
        let mut granted = BTreeMap::new();
        for name in names {
            let pod = pods::running(&self.pods, name).await?;
            granted.insert(name.clone(), pods::granted(&pod)?);
        }
        let stays = until("records of all members", pods::RUN_LIMIT, async || {
            let all = records::read(self.bed.cluster()).map_err(|error| error.to_string())?;
            names
                .iter()
                .map(|name| all.get(name).cloned().ok_or_else(|| format!("none of {name}")))
                .collect::<Result<Vec<Stay>, String>>()
        })
        .await?;
        for stay in &stays {
            let traded = || {
                let others = stays.iter().filter(|other| other.node == stay.node);
                others.filter_map(|other| granted.get(&other.pod)).any(|theirs| *theirs == stay.devices)
            };
            let own = granted.get(&stay.pod);
            ensure!(
                own == Some(&stay.devices) || traded(),
                "{} got {:?} of {}, granted {own:?}",
                stay.pod,
                stay.devices,
                stay.node
            );
        }
        Ok(stays)
    }

    /// The number of pods with this name prefix that have a node.
    pub(crate) async fn bound(&self, prefix: &str) -> Result<usize> {
        let all = self.pods.list(&ListParams::default()).await?;
        let named = all.iter().filter(|pod| name_of(pod).starts_with(prefix));
        Ok(named.filter(|pod| !pods::node(pod).is_empty()).count())
    }

    /// Nothing of the gang has a node, and no pod carries a grant.
    pub(crate) async fn holds_nothing(&self, crew: &Crew) -> Result<()> {
        for name in crew.pod_names() {
            let Some(pod) = self.pods.get_opt(&name).await? else {
                continue;
            };
            ensure!(
                pods::node(&pod).is_empty() && pods::granted(&pod).is_err(),
                "{name} is on {}",
                pods::node(&pod)
            );
        }
        Ok(())
    }

    /// A gang has none of its members bound, or enough.
    pub(crate) async fn is_whole(&self, crew: &Crew, min: usize) -> Result<()> {
        let bound = self.bound(&format!("{}-", crew.name)).await?;
        ensure!(
            bound == 0 || bound >= min,
            "gang {} has {bound} of {min} members bound: {}",
            crew.name,
            self.pods_said(&crew.name).await
        );
        Ok(())
    }

    /// Waits until a pod's condition has this reason of its gang.
    pub(crate) async fn pod_waits(&self, pod: &str, reason: Reason) -> Result<()> {
        let waits = until(format!("{pod} waits: {reason}"), GANG_LIMIT, async || {
            let pod = self.pods.get(pod).await.map_err(|error| error.to_string())?;
            let said = pods::said(&pod);
            // kube-scheduler writes `3 gang NAMESPACE/NAME: REASON: MESSAGE`.
            match said.split(": ").any(|part| part == reason.as_str()) {
                true => Ok(()),
                false => Err(format!("{said:?} on {:?}", pods::node(&pod))),
            }
        });
        Ok(waits.await?)
    }

    /// Waits until kube-scheduler has refused a pod.
    pub(crate) async fn pod_is_refused(&self, pod: &str) -> Result<()> {
        let refused = until(format!("{pod} is refused"), GANG_LIMIT, async || {
            let pod = self.pods.get(pod).await.map_err(|error| error.to_string())?;
            let mut conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
            match conditions.any(|condition| condition.reason.as_deref() == Some("Unschedulable")) {
                true => Ok(()),
                false => Err(format!("{:?} on {:?}", pods::said(&pod), pods::node(&pod))),
            }
        });
        Ok(refused.await?)
    }

    /// Lets pods in that were kept out, until [`Scene::close`].
    pub(crate) async fn let_in(&self) -> Result<()> {
        let mut doorman = pods::sleeper("doorman", 0)?;
        doorman.metadata.labels = Some([(DOORMAN.to_owned(), "here".to_owned())].into());
        self.create_all([doorman]).await
    }

    /// Undoes [`Scene::let_in`].
    pub(crate) async fn close(&self) -> Result<()> {
        self.delete("doorman").await
    }

    async fn pods_said(&self, prefix: &str) -> String {
        let Ok(all) = self.pods.list(&ListParams::default()).await else {
            return "not listed".to_owned();
        };
        let named = all.iter().filter(|pod| name_of(pod).starts_with(prefix));
        let lines = named.map(|pod| {
            format!("{} {} on {:?}: {}", name_of(pod), pods::phase(pod), pods::node(pod), pods::said(pod))
        });
        lines.collect::<Vec<_>>().join(" | ")
    }
}

/// A pod's name.
pub(crate) fn name_of(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().unwrap_or_default()
}

/// A gang's status in one line, for errors.
pub(crate) fn brief(status: &GangStatus) -> String {
    format!(
        "{:?}, {} of {} members, {} bound, {} failed_attempts, by {} ({}): {:?}: {}",
        status.phase,
        status.members,
        status.min,
        status.bound,
        status.failed_attempts,
        status.integration,
        status.decided_by,
        status.reason,
        status.message
    )
}

/// A controller's pod template: one container that writes records and asks for so many GPUs.
pub(crate) fn template(gpus: usize, annotations: &Value) -> Result<Value> {
    let pod = records::recording(pods::sleeper("template", gpus)?, 100_000.0)?;
    let mut spec = serde_json::to_value(pod.spec)?;
    spec["containers"][0]["resources"] = json!({ "limits": { GPU_RESOURCE: gpus } });
    Ok(json!({ "metadata": { "annotations": annotations }, "spec": spec }))
}
