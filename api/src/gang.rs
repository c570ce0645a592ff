//! `Gang`: pods that are useful only together. Namespaced, one object per gang. The extender creates it with the first
//! member.
//!
//! `status` has the gang's state and, once it is decided, the decision: after a fail-over the new leader continues from
//! there. `spec` has what the operator may set. The operator may also create the object before the pods exist.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::CustomResource;
use schemars::JsonSchema;
use schemars::transform::RecursiveTransform;
use serde::{Deserialize, Serialize};

use crate::ids::{DeviceId, NodeName, PodUid, ResourceName};
use crate::placement::ComparedFabric;
use crate::reason::{Reason, known};
use crate::schema::known_formats;

/// What the operator may set. It takes precedence over the annotations of the pods and over their owner.
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
    printcolumn = r#"{"name":"Message","type":"string","jsonPath":".status.message","priority":1}"#,
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
    /// Most members that are bound. More members wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub max_member: Option<u32>,
    /// The level of the fabric that should hold the gang.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<GangLevel>,
    /// Members per slice. Each slice is placed in one domain of the level.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub slice_size: Option<u32>,
    /// Whether the members take the same NIC indices on every node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rails: Option<GangRails>,
    /// Further reservations for replacements of members; of a gang with roles so many for each. Pods of lower priority
    /// may use their devices meanwhile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 64))]
    pub spares: Option<u32>,
    /// What to do when a member of the bound gang is lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repair: Option<GangRepair>,
    /// Seconds that the members may take to arrive once devices are reserved for them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 3600))]
    pub arrival_seconds: Option<u32>,
    /// Seconds that the reservations are kept while the owner creates all members again. 0: not at all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 3600))]
    pub restart_hold_seconds: Option<u32>,
}

/// A level of the fabric.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GangLevel {
    /// Name of the level, or the node label that makes it.
    #[schemars(length(min = 1))]
    pub name: String,
    /// If true, the gang waits until one domain of this level holds it.
    #[serde(default)]
    pub required: bool,
}

/// Whether the members of a gang take the same rails (NIC indices) on every node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum GangRails {
    /// No rails are preferred.
    Any,
    /// The same rails, where they are free. The default.
    Same,
    /// The gang waits until the same rails are free.
    RequireSame,
}

/// What to do when a member of a bound gang is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum GangRepair {
    /// Keep the member's reservation for a replacement.
    Hold,
    /// Delete all pods of the gang, so that their controller creates them again.
    Restart,
    /// Release the member's reservation.
    Ignore,
}

/// The state of a gang.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
pub enum GangPhase {
    /// Fewer members exist than the gang needs.
    #[default]
    Pending,
    /// What the pods, the owner or the spec ask for is contradictory or cannot be followed. The gang waits until it is
    /// corrected.
    Invalid,
    /// The gang waits for free devices, or for the gangs before it in the queue.
    Queued,
    /// The last attempt failed. The gang is planned again later.
    Backoff,
    /// Pods of lower priority are evicted for the gang. Their devices are reserved for it.
    Preempting,
    /// Devices are reserved for every member. The members have not all arrived.
    Reserved,
    /// Enough members have arrived; the decision is being written.
    Committing,
    /// The decision is written, and the members are being bound.
    Binding,
    /// The minimum of members is bound, or more.
    Bound,
    /// A bound member was lost. Its reservation is kept for a replacement, or the gang is being restarted.
    Degraded,
    /// The members have ended.
    Finished,
}

/// What the extender reports of a gang.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(transform = RecursiveTransform(known_formats))]
pub struct GangStatus {
    /// The state of the gang.
    #[serde(default)]
    pub phase: GangPhase,
    /// Why the gang is in this phase, such as `InsufficientResources`.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "known")]
    #[schemars(with = "Option<String>")]
    pub reason: Option<Reason>,
    /// The reason with its facts, in at most two sentences. `gantry explain gang` has the details.
    #[serde(default)]
    pub message: String,
    /// The integration that recognised the gang, such as `JobSet` or `Annotation`.
    #[serde(default)]
    pub integration: String,
    /// Distinguishes the gang from an earlier one of the same name.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub incarnation: String,
    /// Name of the gang as its pods give it.
    #[serde(default)]
    pub name: String,
    /// Source of the gang's size, such as an annotation or an owner.
    #[serde(default)]
    pub decided_by: String,
    /// Members that are useful only together. 0 while that is not known.
    #[serde(default)]
    pub min: u32,
    /// Members that exist.
    #[serde(default)]
    pub members: u32,
    /// Members that are bound.
    #[serde(default)]
    pub bound: u32,
    /// Members that have succeeded. They count as bound.
    #[serde(default)]
    pub completed: u32,
    /// Of them, how many of each role, or of each group in a tree of groups. Members without a role are not among them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub completed_by_role: BTreeMap<String, u32>,
    /// The part of the fabric that holds the gang, such as `rack r7`.
    #[serde(default)]
    pub domain: String,
    /// The rails (NIC indices) that the gang uses, such as `NICs 0-3 on all 4 nodes`. Absent for a gang on one node, on
    /// nodes without known NICs, and if it takes any rails.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub rails: String,
    /// Why there: the domains that were compared when the gang was planned, by level of the fabric. Absent for a gang
    /// without reservations, and where no domains were compared.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "ComparedFabric::readable")]
    pub compared: Option<Arc<ComparedFabric>>,
    /// Start of the current wait. Absent once the gang is bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting_since: Option<Time>,
    /// When the last member of the minimum was bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bound_at: Option<Time>,
    /// Whether the members are being deleted so that their controller creates them again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub restarting: bool,
    /// Set while no member is left and the owner creates all of them again: the reservations of the decision are kept for
    /// the new members.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub continuation: Option<Continuation>,
    /// Failed attempts since the gang was last bound.
    #[serde(default)]
    pub failed_attempts: u32,
    /// UIDs of members that were bound without a reservation and a grant, by a client that does not call the extender. The
    /// next process recognises them by this list.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unreserved: Vec<PodUid>,
    /// Where each member goes. Absent before the gang is decided. A decision only moves forward.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decision: Option<Decision>,
    /// `Valid`, `Reserved` and `Bound`. `Spares` if the gang asks for any. `AmbiguousMembership` if several integrations name the pods. `Blocked` while a
    /// permission is missing, or a disruption budget protects pods that have to be evicted. `MembersSlow` while members
    /// run slower than the rest.
    #[serde(default)]
    pub conditions: Vec<Condition>,
}

/// Why, and until when, reservations are kept for members that the owner creates again.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(transform = RecursiveTransform(known_formats))]
pub struct Continuation {
    /// Kind of the owner, such as `JobSet`.
    pub owner_kind: String,
    /// Name of the owner.
    pub owner_name: String,
    /// UID of the owner, if it is known: an owner that is created again under the same name does not continue the gang.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub owner_uid: String,
    /// The reservations are released at this time. Absent while pods of the gang are still terminating.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<Time>,
    /// Priority of the members that are gone: gangs of a higher one may take the reservations.
    #[serde(default)]
    pub priority: i32,
}

/// Where every member goes. Once it is written, the gang is completed and never undone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Decision {
    /// Unique per decision.
    pub id: String,
    /// Increases when a reservation gets another member.
    #[serde(default, skip_serializing_if = "is_first")]
    pub revision: u64,
    /// The minimum of the decision, or a lower one that the owner or the spec has set since.
    pub min: u32,
    /// The part of the fabric, as in the status.
    #[serde(default)]
    pub domain: String,
    /// The reservations, one per member, and the spare ones.
    pub reservations: Vec<DecidedReservation>,
}

impl Decision {
    /// The pods that hold a reservation or are to get it.
    pub fn pods(&self) -> impl Iterator<Item = &PodUid> + Clone {
        self.reservations.iter().filter_map(|reservation| reservation.pod.as_ref())
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
fn is_first(revision: &u64) -> bool {
    *revision == 0
}

/// The reservation of one member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DecidedReservation {
    /// The node.
    pub node: NodeName,
    /// The devices on that node.
    pub devices: Vec<ReservedDevices>,
    /// Rank of the member, if members have ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// Position among all reservations in the order of ranks, from 0. Set for a gang in slices where it differs from
    /// the rank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ordinal: Option<u32>,
    /// Whether it was planned as a spare one. It has no pod until a replacement takes it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub spare: bool,
    /// Role of the member, if the gang has several roles.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub role: String,
    /// UID of the member. Absent while the reservation waits for a replacement.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodUid>,
    /// Name of the member.
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
