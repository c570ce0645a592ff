//! Why an object is as it is, or what happened to it: the `reason` of Events, conditions and `Gang`s.
//!
//! A reason is stable and for programs; the message beside it is for people. No program reads a message.

use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::described::described;

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident => $text:literal,)*) => {
        described! {
            /// A CamelCase reason, with one sentence about it.
            Reason { $($(#[$doc])* $name, stringify!($name), $text;)* }
        }
    };
}

impl Reason {
    /// Whether a gang waits because not all of its members exist, or are known.
    pub const fn is_of_missing_members(self) -> bool {
        use Reason::{UnknownSize, WaitingForMembers, WaitingForMoreMembers, WaitingForRole};
        matches!(self, UnknownSize | WaitingForMembers | WaitingForMoreMembers | WaitingForRole)
    }
}

reasons! {
    // A gang that has no reservation.
    UnknownSize => "the size of the gang, or what a member requests, is not known yet",
    WaitingForMembers => "fewer members exist than the gang needs",
    WaitingForMoreMembers => "enough members exist, and more are expected",
    WaitingForRole => "fewer members of a role exist than the role needs",
    MembersGated => "enough members exist, and scheduling gates keep some back",
    MembersRejected => "enough members exist, and kube-scheduler rejects some before it calls the extender",
    WaitingForTurn => "other gangs are planned first",
    InsufficientResources => "the free resources do not hold the gang",
    PluginNotReady => "the gang fits once the GPU plugins of some nodes serve",
    NodesWithheld => "the gang fits once other programs release nodes that they mark",
    GpusReserved => "the gang would fit on devices that are idle and reserved for others",
    CannotFit => "no node, or no part of the cluster, can ever hold the gang",
    WaitingForTerminatingPods => "the gang fits once pods that are being deleted are gone",
    NodesReserved => "the nodes that would hold the gang are reserved for a gang before it",
    Backoff => "the last attempt failed; the gang is planned again later",
    Invalid => "what the gang's pods, owner or Gang object ask for cannot be followed",
    NotAGang => "the pods of the group are scheduled one by one",
    // A gang that has a reservation.
    WaitingForVictims => "pods of lower priority are evicted for the gang",
    VictimsTerminating => "the evicted pods are terminating",
    WaitingForArrival => "reserved members have not all arrived at the barrier",
    WritingDecision => "the decision is being written",
    DecisionRejected => "the API server rejected the decision; it is written again",
    // A gang that is decided.
    Binding => "the members are being bound",
    Bound => "the minimum is bound",
    BelowMinimum => "fewer members than the minimum run, and none is replaced",
    WaitingForSurplus => "the minimum is bound, and more members wait for resources",
    MembersLost => "bound members were lost and are not replaced yet",
    Restarting => "all members are deleted so that their controller creates them again",
    OwnerRestarts => "no member is left; its reservations are kept while its owner creates all members again",
    Finished => "the members have ended",
    // Conditions of a Gang.
    Valid => "what the gang asks for is consistent",
    RequestLowered => "a limit of the operator lowers what the gang asks for",
    InvalidMember => "a member asks for something that cannot be followed",
    MinimumChanged => "the minimum has changed since the gang was decided",
    RepairChanged => "the repair policy has changed since the gang was decided",
    SparesReserved => "every spare reservation that the gang asks for is there",
    SparesMissing => "the free resources do not hold every spare reservation that the gang asks for",
    GroupNotScheduled => "kube-scheduler does not schedule the PodGroup as a whole",
    PlacedTogether => "the gang is a tree of groups: PodGroups of a CompositePodGroup that are placed together",
    RevisionWaits => "members of the next revision of a template wait for devices together",
    SeveralIntegrations => "several integrations name the gang's pods",
    DisruptionBudget => "a disruption budget protects pods that have to be evicted",
    MissingPermission => "the extender lacks a permission that the gang needs",
    // Events of gangs and their pods.
    GangReserved => "devices are reserved for every member of the gang",
    GangBound => "the gang's minimum is bound",
    GangWaiting => "the gang waits",
    GangInvalid => "what the gang asks for cannot be followed",
    GangRestarting => "the gang's members are deleted so that their controller creates them again",
    AmbiguousMembership => "several integrations name the gang's pods",
    Blocked => "an action on a pod of the gang is not allowed",
    MemberLost => "a bound member was lost",
    MemberSlow => "the GPUs of a member run slower than those of the rest of its gang",
    ReservationKept => "the gang's reservations are kept while its owner creates all members again",
    ReservationReleased => "the reservations that were kept for the gang's next members are released",
    Preempting => "pods of lower priority are evicted for the gang",
    Scheduled => "the pod was bound with its gang",
    Preempted => "the pod was evicted for a gang of higher priority",
    DeadlockResolved => "the pod was evicted because its gang and another each held what the other lacked",
    // Members and single pods.
    GpusAssigned => "the pod is bound, and these devices are granted to it",
    PodTerminating => "the pod is being deleted",
    NodeNotOffered => "kube-scheduler does not offer the node where the pod has its reservation",
    RequestIgnored => "an annotation that requests something of the pod's devices has no effect",
    GpusUnavailable => "no node can give the pod the devices that it requests",
    GpusFreed => "devices came free after the pod was refused",
    ReservationChanged => "the reservation of the pod's gang has changed",
    // Events of objects that the extender does not keep.
    ObjectTooLarge => "the object takes more memory than the extender allows for one",
    NamespaceTooLarge => "the objects of the namespace take the memory that the extender allows for one namespace",
    ObjectMemoryFull => "all objects take the memory that the extender allows for them",
    // Events and conditions of nodes.
    GpusHealthy => "every GPU is healthy",
    GpuUnhealthy => "a GPU is unhealthy",
    GpuDegraded => "a GPU works, with something wrong",
    GpuRecovered => "a GPU has recovered",
    GpuQuarantineLifted => "the operator lifted the quarantine of a GPU",
    QuarantineLiftInvalid => "the annotation that lifts a quarantine cannot be read",
    QuarantineLiftOutdated => "the annotation names a fault that is no longer there",
    GpuCordoned => "the operator cordoned a GPU: new pods do not get it, and pods that hold it keep it",
    GpuUncordoned => "the operator uncordoned a GPU",
    CordonInvalid => "an annotation cordons a GPU that the node does not have",
    NvmlClosed => "the plugin keeps NVML closed, so that a GPU of the node can be reset",
    RemediationMatched => "a rule of remediation matches a GPU, and only reports it",
    RemediationApplied => "a rule of remediation acted on a GPU or its node",
    RemediationHeldBack => "a limit, a disruption budget, a pod or another program's mark holds back what a rule of remediation would do",
    RemediationFailed => "what a rule of remediation does failed; it is tried again",
    RemediationWithdrawn => "the fault, the rule or the cordon is gone, and what the rule did has ended",
    RemediationReset => "a rule of remediation had a GPU reset, and the GPU is healthy",
    RemediationResetFailed => "a GPU was not reset, or is not healthy after the reset; it stays cordoned",
    GpuDrained => "a GPU is drained by a rule of remediation or for a MIG layout: a pod is evicted, or no pod holds it",
    MigLayoutApplied => "every GPU has the MIG instances of the layout that the node's label chooses",
    MigLayoutWaits => "GPUs wait until they are idle, and get their MIG layout then",
    MigLayoutFailed => "a GPU cannot get its MIG layout, or the layout is not known",
    MigDrainHeldBack => "a disruption budget, a pod or a missing right holds back the drain of a GPU for its MIG layout",
    GrantRefused => "the grant of a pod cannot be followed",
    AllocationDeviates => "kubelet allocated another set than the one granted",
    ConfigInvalid => "the plugin's configuration is refused",
    Serving => "the plugin serves every device",
    Degraded => "the plugin serves, and part of its information is missing",
    NoDevices => "the plugin has no device to serve",
    NotRegistered => "the plugin is not registered with kubelet",
    PodsUnknown => "the pods of the node are not known yet",
    Stopped => "the plugin has stopped",
}

impl Serialize for Reason {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl<'de> Deserialize<'de> for Reason {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// A text that is no reason of the table.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no reason")]
pub struct UnknownReason(String);

impl FromStr for Reason {
    type Err = UnknownReason;

    fn from_str(text: &str) -> Result<Self, UnknownReason> {
        let found = Self::ALL.iter().find(|reason| reason.as_str() == text);
        found.copied().ok_or_else(|| UnknownReason(text.to_owned()))
    }
}

/// Reads the reason of an object. A reason that another version wrote and this one does not know is none: the object
/// stays readable.
pub(crate) fn known<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Reason>, D::Error> {
    let text = Option::<String>::deserialize(deserializer)?;
    Ok(text.and_then(|text| text.parse().ok()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MAX_MESSAGE;

    #[test]
    fn every_reason_is_camel_case_with_one_short_sentence() {
        for reason in Reason::ALL {
            let name = reason.as_str();
            assert!(name.starts_with(|c: char| c.is_ascii_uppercase()), "{name}");
            assert!(name.chars().all(|c| c.is_ascii_alphanumeric()), "{name}");
            let text = reason.text();
            assert!(text.len() <= MAX_MESSAGE && !text.ends_with('.'), "{name}: {text}");
        }
    }

    #[test]
    fn reason_is_read_as_it_is_written() {
        for reason in Reason::ALL {
            assert_eq!(reason.as_str().parse(), Ok(*reason));
        }
        assert!("waits for room".parse::<Reason>().is_err());
    }
}
