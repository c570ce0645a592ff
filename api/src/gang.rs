//! `Gang`: pods that are useful only together. Namespaced, one per gang, written by the extender when it sees the first member.
//!
//! `status` is what became of it and, once decided, the decision itself: the extender that takes over finishes from there. `spec` is what a person
//! may set; a person may also write the object before the pods exist.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::CustomResource;
use schemars::JsonSchema;
use schemars::transform::RecursiveTransform;
use serde::{Deserialize, Serialize};

use crate::ids::{DeviceId, NodeName, PodUid, ResourceName};
use crate::schema::known_formats;

/// What a person may set; it goes before what the pods and their owner say.
#[derive(CustomResource, Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "gantry.dev",
    version = "v1alpha1",
    kind = "Gang",
    plural = "gangs",
    singular = "gang",
    namespaced,
    category = "gantry",
    status = "GangStatus",
    derive = "PartialEq",
    derive = "Default",
    printcolumn = r#"{"name":"Phase","type":"string","jsonPath":".status.phase"}"#,
    printcolumn = r#"{"name":"Min","type":"integer","jsonPath":".status.min"}"#,
    printcolumn = r#"{"name":"Members","type":"integer","jsonPath":".status.members"}"#,
    printcolumn = r#"{"name":"Bound","type":"integer","jsonPath":".status.bound"}"#,
    printcolumn = r#"{"name":"Domain","type":"string","jsonPath":".status.domain"}"#,
    printcolumn = r#"{"name":"Waiting","type":"date","jsonPath":".status.waitingSince"}"#,
    printcolumn = r#"{"name":"Reason","type":"string","jsonPath":".status.reason"}"#,
    printcolumn = r#"{"name":"Decided by","type":"string","jsonPath":".status.decidedBy","priority":1}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(
    transform = RecursiveTransform(known_formats),
    extend("x-kubernetes-validations" = [
        {
            "rule": "!has(self.minMember) || !has(self.maxMember) || self.minMember <= self.maxMember",
            "message": "minMember is more than maxMember"
        }
    ])
)]
pub struct GangSpec {
    /// Members that are useful only together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub min_member: Option<u32>,
    /// Members at most; those beyond wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub max_member: Option<u32>,
    /// The level of the fabric that should hold it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<GangLevel>,
    /// Members that come in slices of this size, each in one domain of the level.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub slice_size: Option<u32>,
    /// What to do when a member of the bound gang is lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repair: Option<GangRepair>,
    /// Seconds its members may take to arrive once it has a place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 3600))]
    pub arrival_seconds: Option<u32>,
}

/// A level of the fabric.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GangLevel {
    /// Name of the level, or the node label that makes it.
    #[schemars(length(min = 1))]
    pub name: String,
    /// Rather wait than go beyond it.
    #[serde(default)]
    pub required: bool,
}

/// What to do when a member of a bound gang is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum GangRepair {
    /// Keep its place for a replacement.
    Hold,
    /// Delete the gang's pods, so that their controller starts all of it anew.
    Restart,
    /// Give its place up.
    Ignore,
}

/// How far a gang is.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
pub enum GangPhase {
    /// Fewer members exist than are needed.
    #[default]
    Pending,
    /// What is said of it contradicts itself or cannot be followed; it waits until that is mended.
    Invalid,
    /// It waits for room, or for its turn.
    Queued,
    /// Its last try failed; it is tried again later.
    Backoff,
    /// Others are being stopped for it; their devices are kept for it.
    Preempting,
    /// It has a place, kept for it as a whole; its members are on their way there.
    Reserved,
    /// Enough members have arrived; the decision is being written.
    Committing,
    /// It is decided, and its members are being bound.
    Binding,
    /// As many members are bound as are needed, or more.
    Bound,
    /// A member of the bound gang was lost, and its place is kept, or the gang is being restarted.
    Degraded,
    /// Its members have ended.
    Finished,
}

/// What became of a gang.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(transform = RecursiveTransform(known_formats))]
pub struct GangStatus {
    /// How far it is.
    #[serde(default)]
    pub phase: GangPhase,
    /// Why it is no further, in a few words.
    #[serde(default)]
    pub reason: String,
    /// The same at length: what was tried, what is missing.
    #[serde(default)]
    pub message: String,
    /// By which convention its pods say that they are a gang.
    #[serde(default)]
    pub integration: String,
    /// What tells it from a gang of the same name before it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub incarnation: String,
    /// What its pods call it.
    #[serde(default)]
    pub name: String,
    /// Who decided its size.
    #[serde(default)]
    pub decided_by: String,
    /// Members that are useful only together; 0 while that is not known.
    #[serde(default)]
    pub min: u32,
    /// Members that exist.
    #[serde(default)]
    pub members: u32,
    /// Members that are bound.
    #[serde(default)]
    pub bound: u32,
    /// Members that have ended well; they count as bound.
    #[serde(default)]
    pub completed: u32,
    /// The part of the fabric that holds it, e.g. `rack r7`.
    #[serde(default)]
    pub domain: String,
    /// Since when it waits; absent once it is bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting_since: Option<Time>,
    /// When the last member of the minimum was bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bound_at: Option<Time>,
    /// Whether its members are being deleted, to be made anew.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub restarting: bool,
    /// Tries that have failed since it last was bound.
    #[serde(default)]
    pub failed_attempts: u32,
    /// What was decided; absent before. Never changed but to go forward.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decision: Option<Decision>,
    /// `Valid`, `Reserved`, `Bound`; `AmbiguousMembership` where other conventions name its pods too; `Blocked` while a right is missing,
    /// or a disruption budget keeps pods that have to go.
    #[serde(default)]
    pub conditions: Vec<Condition>,
}

/// Where every member goes. From its writing on the gang is only ever completed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Decision {
    /// Tells it from every other.
    pub id: String,
    /// Grows with every change of who has which place.
    #[serde(default, skip_serializing_if = "is_first")]
    pub revision: u64,
    /// The minimum it was decided for, or to which an owner or the Gang has lowered it since.
    pub min: u32,
    /// The part of the fabric, as in the status.
    #[serde(default)]
    pub domain: String,
    /// The places, one per member, in their order.
    pub reservations: Vec<DecidedReservation>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
fn is_first(revision: &u64) -> bool {
    *revision == 0
}

/// The place of one member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DecidedReservation {
    /// The node.
    pub node: NodeName,
    /// Its devices there.
    pub devices: Vec<ReservedDevices>,
    /// The member's rank, if members have ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// Its position among all places in the order of ranks, from 0, if the gang is in slices and it is not the rank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ordinal: Option<u32>,
    /// The member's role, if there are several.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub role: String,
    /// The member that has it; absent while it is kept for one to come.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodUid>,
    /// Name of that member.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub pod_name: String,
}

/// Devices of one resource.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReservedDevices {
    /// The resource.
    pub resource: ResourceName,
    /// The devices, sorted.
    pub ids: Vec<DeviceId>,
}
