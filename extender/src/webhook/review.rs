//! The decision of the webhook: a pure function of the API server's AdmissionReview. The rule is that of the policy
//! `gantry-scheduler-name` of the chart. The namespaces are chosen by the selector of the webhook's configuration, as by
//! the policy's: the API server does not send their labels.

use std::borrow::Cow;
use std::collections::BTreeMap;

use gantry_api::names::DEFAULT_SCHEDULER;
use k8s_openapi::ByteString;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::json;
use serde_json::value::RawValue;

use crate::bounded::{self, ReadError};
use crate::watched::WatchedResources;

/// The version of AdmissionReviews that is read and written.
const VERSION: &str = "admission.k8s.io/v1";
/// The kind of both.
const KIND: &str = "AdmissionReview";
/// Most bytes of memory that a pod may take here.
const MEMORY: usize = 8 * 1024 * 1024;

/// Assigns pods to a scheduler.
#[derive(Debug, Clone)]
pub struct Assignment {
    /// The resources of the pods.
    pub watched: WatchedResources,
    /// Their `schedulerName`.
    pub scheduler: String,
}

/// An answered AdmissionReview.
#[derive(Debug)]
pub struct Review {
    /// What was decided.
    pub outcome: Decision,
    /// The answer, in JSON.
    pub response: Vec<u8>,
}

/// What becomes of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// It gets the `schedulerName`.
    Assigned,
    /// It stays as it is.
    Unchanged,
}

impl Decision {
    /// The label of its metric.
    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::Assigned => "assigned",
            Self::Unchanged => "unchanged",
        }
    }
}

/// Why a body has no answer.
#[derive(Debug, thiserror::Error)]
pub enum ReviewError {
    /// It is something else.
    #[error("body is not an AdmissionReview: {0}")]
    Unreadable(#[from] serde_json::Error),
    /// It is of another kind or version.
    #[error(
        "body is {kind:?} of {version:?}, expected {KIND:?} of {VERSION:?}: set admissionReviewVersions: [v1]"
    )]
    Version {
        /// `kind`.
        kind: String,
        /// `apiVersion`.
        version: String,
    },
    /// It is an answer, or incomplete.
    #[error("request: missing in the AdmissionReview")]
    NoRequest,
    /// Its request creates a pod, and has none.
    #[error("request.object: missing in the creation of a pod")]
    NoObject,
    /// Its pod is none.
    #[error("request.object is not a pod: {0}")]
    Pod(ReadError),
}

/// What is read of an AdmissionReview.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ReviewRequest<'b> {
    #[serde(borrow, default)]
    api_version: Cow<'b, str>,
    #[serde(borrow, default)]
    kind: Cow<'b, str>,
    #[serde(borrow)]
    request: Option<AdmissionRequest<'b>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct AdmissionRequest<'b> {
    #[serde(borrow)]
    uid: Cow<'b, str>,
    resource: Resource,
    sub_resource: Option<String>,
    operation: String,
    #[serde(borrow)]
    object: Option<&'b RawValue>,
}

#[derive(Deserialize)]
struct Resource {
    #[serde(default)]
    group: String,
    version: String,
    resource: String,
}

impl AdmissionRequest<'_> {
    /// Whether it creates a pod.
    fn creates_pod(&self) -> bool {
        let Resource { group, version, resource } = &self.resource;
        (group.as_str(), version.as_str(), resource.as_str()) == ("", "v1", "pods")
            && self.sub_resource.as_deref().is_none_or(str::is_empty)
            && self.operation == "CREATE"
    }
}

/// What is read of a pod. A list of the API server may be null.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Pod {
    spec: PodSpec,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct PodSpec {
    containers: Option<Vec<Container>>,
    init_containers: Option<Vec<Container>>,
    scheduler_name: Option<String>,
    node_name: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Container {
    resources: Option<ContainerResources>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ContainerResources {
    limits: Option<BTreeMap<String, IgnoredAny>>,
}

impl PodSpec {
    /// Whether a limit of a container is a watched resource. Kubernetes refuses a device that is requested without a limit.
    fn asks_for(&self, watched: &WatchedResources) -> bool {
        let containers = self.containers.iter().chain(&self.init_containers).flatten();
        let limits = containers.filter_map(|container| container.resources.as_ref()?.limits.as_ref());
        limits.flat_map(BTreeMap::keys).any(|name| watched.covers(name))
    }

    /// Whether it names a scheduler. The API server writes its default into every pod.
    fn names_scheduler(&self) -> bool {
        self.scheduler_name.as_deref().is_some_and(|name| name != DEFAULT_SCHEDULER)
    }

    fn is_bound(&self) -> bool {
        self.node_name.as_deref().is_some_and(|name| !name.is_empty())
    }
}

impl Assignment {
    /// What becomes of a new pod.
    fn decide(&self, spec: &PodSpec) -> Decision {
        match spec.asks_for(&self.watched) && !spec.names_scheduler() && !spec.is_bound() {
            true => Decision::Assigned,
            false => Decision::Unchanged,
        }
    }

    /// Answers an AdmissionReview. Requests other than the creation of a pod are allowed as they are: a configuration that
    /// sends too much must not hinder them.
    ///
    /// # Errors
    /// See [`ReviewError`].
    pub fn review(&self, body: &[u8]) -> Result<Review, ReviewError> {
        let incoming: ReviewRequest<'_> = serde_json::from_slice(body)?;
        if (&*incoming.api_version, &*incoming.kind) != (VERSION, KIND) {
            let (kind, version) = (incoming.kind.into_owned(), incoming.api_version.into_owned());
            return Err(ReviewError::Version { kind, version });
        }
        let request = incoming.request.ok_or(ReviewError::NoRequest)?;
        let outcome = match request.creates_pod() {
            true => {
                let object = request.object.ok_or(ReviewError::NoObject)?;
                let read = bounded::read::<Pod>(object.get().as_bytes(), MEMORY);
                let (pod, _) = read.map_err(ReviewError::Pod)?;
                self.decide(&pod.spec)
            }
            false => Decision::Unchanged,
        };
        let patch = (outcome == Decision::Assigned).then(|| self.patch());
        let response = ReviewResponse {
            api_version: VERSION,
            kind: KIND,
            response: AdmissionResponse {
                uid: &request.uid,
                allowed: true,
                patch_type: patch.as_ref().map(|_| "JSONPatch"),
                patch,
            },
        };
        Ok(Review { outcome, response: serde_json::to_vec(&response)? })
    }

    /// The JSON patch that assigns a pod. `add` replaces a member that is there.
    fn patch(&self) -> ByteString {
        let patch = json!([{ "op": "add", "path": "/spec/schedulerName", "value": self.scheduler }]);
        ByteString(patch.to_string().into_bytes())
    }
}

/// The AdmissionReview that answers.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ReviewResponse<'a> {
    api_version: &'static str,
    kind: &'static str,
    response: AdmissionResponse<'a>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct AdmissionResponse<'a> {
    uid: &'a str,
    allowed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch_type: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch: Option<ByteString>,
}

#[cfg(test)]
mod tests;
