//! The `gantry.dev` API: the objects through which the two daemons communicate, and which users read.
//!
//! Custom resources, the grant annotation and every name under `gantry.dev`. Plain types and their checks; no I/O, no
//! clients, no decisions.
#![forbid(unsafe_code)]

pub mod condition;
pub mod cordon;
mod described;
pub mod evidence;
pub mod gang;
pub mod gpunode;
pub mod grant;
pub mod ids;
pub mod names;
pub mod placement;
pub mod quantity;
pub mod reason;
mod schema;
pub mod slim;
pub mod text;
pub mod xid;

pub use condition::ConditionType;
pub use cordon::{Cordon, Cordons};
pub use evidence::{GpuEvidence, RemappedRowsEvidence, ResetEvidence, XidEvidence};
pub use gang::{
    Continuation, DecidedReservation, Decision, Gang, GangLevel, GangPhase, GangRails, GangRepair, GangSpec,
    GangStatus, ReservedDevices,
};
pub use gpunode::{
    Deviation, DeviceHealth, DeviceStatus, FaultEvidence, GpuClock, GpuFault, GpuNode, GpuNodeSpec,
    GpuNodeStatus, GpuProblem, Holder, HolderState, KubeletTopology, MigDrain, NumaNodeCpus, NumaNodeMemory,
    Provenance, ResourceKind, ResourceStatus, SharingPolicy, Slice, TopologyManagerPolicy,
    TopologyManagerScope,
};
pub use grant::{ContainerGrant, ContainerShare, Grant, GrantError};
pub use ids::{DeviceId, NodeName, PodUid, ResourceName};
pub use placement::Placement;
pub use reason::Reason;
pub use text::{MAX_MESSAGE, ObjectMessage, one_line};
