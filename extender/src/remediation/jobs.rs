//! The Jobs that reset GPUs. The operator's `PodTemplate` has what a Job runs, `gantry reset gpu`; the leader adds the GPU
//! and the rule. Without the template, or the right to read it, no GPU is reset.

use gantry_api::{NodeName, names};
use gantry_topology::GpuUuid;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Pod, PodTemplate};
use kube::api::{ListParams, PostParams};
use kube::{Api, Client};
use serde_json::json;

/// Time limit of a Job: more than `gantry reset gpu` takes.
const DEADLINE: u32 = 600;
/// Seconds for which a Job that has ended is kept, with its log.
const KEPT: u32 = 24 * 3600;
/// Longest UUID that a name of a Job contains, without `GPU-`.
const MAX_UUID: usize = 36;

/// How a Job has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Result {
    /// The GPU was reset, and is healthy.
    Healthy,
    /// A GPU was not drained, and nothing was done.
    NotDrained,
    /// The driver's nvidia-smi did not reset the GPU.
    Refused,
    /// The GPU was reset, and is not healthy.
    Unhealthy,
    /// The command failed in another way, or did not end in time.
    Failed,
    /// The Job was deleted.
    Deleted,
    /// The Job could not be created.
    NotCreated,
}

impl Result {
    /// The label of metrics.
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::NotDrained => "not_drained",
            Self::Refused => "refused",
            Self::Unhealthy => "unhealthy",
            Self::Failed => "failed",
            Self::Deleted => "deleted",
            Self::NotCreated => "not_created",
        }
    }

    /// The result that an exit code of `gantry reset gpu` means.
    fn of_exit(code: i32) -> Self {
        match u8::try_from(code) {
            Ok(0) => Self::Healthy,
            Ok(names::RESET_NOT_DRAINED_EXIT) => Self::NotDrained,
            Ok(names::RESET_REFUSED_EXIT) => Self::Refused,
            Ok(names::RESET_UNHEALTHY_EXIT) => Self::Unhealthy,
            _ => Self::Failed,
        }
    }
}

/// How far a Job is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Progress {
    /// There is no such Job.
    Absent,
    /// It has not ended.
    Runs,
    /// It has ended: the result, and what the command printed last.
    Ended(Result, String),
}

/// What a Job is made for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Purpose<'a> {
    pub(super) node: &'a NodeName,
    pub(super) gpu: &'a GpuUuid,
    pub(super) rule: &'a str,
    /// When the reset was begun, in Unix seconds.
    pub(super) at: i64,
}

impl Purpose<'_> {
    /// The name of the Job, which is the same for every leader.
    pub(super) fn name(&self) -> String {
        let uuid = self.gpu.as_str().trim_start_matches("GPU-").to_lowercase();
        // NVML's are short enough. All are ASCII.
        let end = uuid.get(uuid.len().saturating_sub(MAX_UUID)..).unwrap_or_default();
        format!("{}-{end}-{}", names::RESET, self.at)
    }

    fn job(&self, template: PodTemplate) -> Option<serde_json::Value> {
        let template = template.template?;
        let labels = template.metadata.and_then(|metadata| metadata.labels).unwrap_or_default();
        Some(json!({
            "metadata": {"name": self.name(), "labels": labels},
            "spec": {
                "backoffLimit": 0,
                "activeDeadlineSeconds": DEADLINE,
                "ttlSecondsAfterFinished": KEPT,
                "template": {
                    "metadata": {
                        "labels": labels,
                        "annotations": {
                            names::RESET_GPU_ANNOTATION: format!("{}/{}", self.node, self.gpu),
                            names::RESET_RULE_ANNOTATION: self.rule,
                        },
                    },
                    "spec": template.spec,
                },
            },
        }))
    }
}

/// Creates and reads Jobs in Gantry's namespace.
#[derive(Clone)]
pub(super) struct ResetJobs {
    client: Client,
    namespace: String,
}

impl ResetJobs {
    pub(super) fn new(client: Client, namespace: String) -> Self {
        Self { client, namespace }
    }

    /// The namespace of the Jobs.
    pub(super) fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The operator's template; `None` if there is none, or it may not be read.
    pub(super) async fn template(&self) -> kube::Result<Option<PodTemplate>> {
        let api = Api::<PodTemplate>::namespaced(self.client.clone(), &self.namespace);
        match api.get_opt(names::RESET).await {
            Err(kube::Error::Api(status)) if status.code == 403 => Ok(None),
            found => found,
        }
    }

    /// Creates a Job unless it is there. Returns whether there is a template for it.
    pub(super) async fn create(&self, purpose: &Purpose<'_>) -> kube::Result<bool> {
        let Some(job) = self.template().await?.and_then(|template| purpose.job(template)) else {
            return Ok(false);
        };
        let job: Job = serde_json::from_value(job).map_err(kube::Error::SerdeError)?;
        match self.jobs().create(&PostParams::default(), &job).await {
            // The leader before created it, or the response to a first request was lost.
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(true),
            created => created.map(|_| true),
        }
    }

    /// How far a Job is.
    pub(super) async fn progress(&self, purpose: &Purpose<'_>) -> kube::Result<Progress> {
        let name = purpose.name();
        let found = match self.jobs().get_opt(&name).await {
            // The manifest with the right was deleted, and maybe the Job with it.
            Err(kube::Error::Api(status)) if status.code == 403 => None,
            found => found?,
        };
        let Some(job) = found else { return Ok(Progress::Absent) };
        let conditions = job.status.and_then(|status| status.conditions).unwrap_or_default();
        let held = |type_: &str| {
            conditions.iter().find(|condition| condition.type_ == type_ && condition.status == "True")
        };
        if held("Complete").is_some() {
            return Ok(Progress::Ended(Result::Healthy, String::new()));
        }
        let Some(failed) = held("Failed") else { return Ok(Progress::Runs) };
        let params = ListParams::default().labels(&format!("batch.kubernetes.io/job-name={name}"));
        let pods = Api::<Pod>::namespaced(self.client.clone(), &self.namespace).list(&params).await?;
        let ended = pods.items.iter().find_map(printed);
        let why = || failed.message.clone().or_else(|| failed.reason.clone()).unwrap_or_default();
        let (result, text) = ended.unwrap_or_else(|| (Result::Failed, why()));
        Ok(Progress::Ended(result, text))
    }

    fn jobs(&self) -> Api<Job> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }
}

/// How the command has ended in a pod, with the last line that it printed: its error.
fn printed(pod: &Pod) -> Option<(Result, String)> {
    let status = pod.status.as_ref()?.container_statuses.as_ref()?.first()?;
    let ended = status.state.as_ref()?.terminated.as_ref()?;
    let message = ended.message.as_deref().unwrap_or_default();
    let line = message.lines().rev().map(str::trim).find(|line| !line.is_empty());
    let line = line.or(ended.reason.as_deref()).unwrap_or_default();
    Some((Result::of_exit(ended.exit_code), line.trim_start_matches("gantry: ").to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn purpose<'a>(node: &'a NodeName, gpu: &'a GpuUuid) -> Purpose<'a> {
        Purpose { node, gpu, rule: "off-the-bus", at: 1_795_000_000 }
    }

    /// The job controller writes the name into a label of the pod, which has 63 characters at most.
    #[test]
    fn name_of_job_is_a_label_for_every_uuid() {
        let node = NodeName::from("n");
        let long = "0".repeat(80);
        for uuid in ["00112233-4455-6677-8899-AABBCCDDEEFF", "a", "-a", &long] {
            let gpu = format!("GPU-{uuid}").parse().unwrap();
            let name = purpose(&node, &gpu).name();
            assert!(name.len() <= 63, "{name}");
            assert!(
                name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-'),
                "{name}"
            );
        }
        let gpu = "GPU-00112233-4455-6677-8899-AABBCCDDEEFF".parse().unwrap();
        assert_eq!(
            purpose(&node, &gpu).name(),
            "gantry-reset-00112233-4455-6677-8899-aabbccddeeff-1795000000"
        );
    }

    /// A Job adds the GPU and the rule to the template, and nothing else: the policy compares the rest.
    #[test]
    fn job_has_the_spec_of_the_template() {
        let template: PodTemplate = serde_json::from_value(json!({
            "metadata": {"name": "gantry-reset"},
            "template": {
                "metadata": {"labels": {"a": "b"}, "annotations": {"dropped": "x"}},
                "spec": {"containers": [{"name": "reset", "image": "gantry:1"}], "restartPolicy": "Never"},
            },
        }))
        .unwrap();
        let (node, gpu) = (NodeName::from("n"), "GPU-a".parse().unwrap());
        let job = purpose(&node, &gpu).job(template).unwrap();
        let pod = &job["spec"]["template"];
        assert_eq!(
            pod["spec"],
            json!({"containers": [{"name": "reset", "image": "gantry:1"}], "restartPolicy": "Never"})
        );
        let annotations = json!({"gantry.dev/reset-gpu": "n/GPU-a", "gantry.dev/reset-rule": "off-the-bus"});
        assert_eq!(pod["metadata"], json!({"labels": {"a": "b"}, "annotations": annotations}));
        assert_eq!(job["spec"]["backoffLimit"], 0);
        assert_eq!(purpose(&node, &gpu).job(PodTemplate::default()), None);
    }

    #[test]
    fn result_is_the_exit_code_of_the_command() {
        let of = |terminated: serde_json::Value| {
            let status = json!([{"name": "reset", "image": "", "imageID": "", "ready": false, "restartCount": 0,
                "state": {"terminated": terminated}}]);
            let pod = json!({"metadata": {}, "status": {"containerStatuses": status}});
            printed(&serde_json::from_value(pod).unwrap()).unwrap()
        };
        let message =
            "waiting for the plugin on n to close NVML\ngantry: n GPU 3 (GPU-a) was not reset: in use\n\n";
        let refused = (Result::Refused, "n GPU 3 (GPU-a) was not reset: in use".to_owned());
        assert_eq!(of(json!({"exitCode": 4, "message": message})), refused);
        assert_eq!(of(json!({"exitCode": 3})).0, Result::NotDrained);
        assert_eq!(of(json!({"exitCode": 5})).0, Result::Unhealthy);
        assert_eq!(
            of(json!({"exitCode": 137, "reason": "OOMKilled"})),
            (Result::Failed, "OOMKilled".to_owned())
        );
        assert_eq!(of(json!({"exitCode": -1})).0, Result::Failed);
        assert_eq!(printed(&Pod::default()), None);
    }
}
