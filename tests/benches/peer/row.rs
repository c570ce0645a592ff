//! The lines of the table, in the order in which they are printed.

use std::time::Duration;

/// One line of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Row {
    Floor,
    AllocateOne,
    AllocateEight,
    AllocateNodes,
    Callers,
    CallersTime,
    Preferred,
    PreferredReplicas,
    PreferredSlices,
    SharedOne,
    SharedAll,
    Register,
    RegisterMig,
    RegisterAgain,
    Xid(Mode),
    Memory(Mode, Moment),
}

/// What a plugin offers while its memory is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Mode {
    Whole,
    Slices,
    Replicas,
}

/// When memory is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Moment {
    AtRest,
    AfterCalls,
}

/// One measurement.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Sample {
    Time(Duration),
    /// Calls per second.
    Rate(f64),
    Bytes(u64),
}

impl Mode {
    pub(crate) const ALL: [Self; 3] = [Self::Whole, Self::Slices, Self::Replicas];
}

impl Row {
    pub(crate) const ALL: [Self; 23] = [
        Self::Floor,
        Self::AllocateOne,
        Self::AllocateEight,
        Self::AllocateNodes,
        Self::Callers,
        Self::CallersTime,
        Self::Preferred,
        Self::PreferredReplicas,
        Self::PreferredSlices,
        Self::SharedOne,
        Self::SharedAll,
        Self::Register,
        Self::RegisterMig,
        Self::RegisterAgain,
        Self::Xid(Mode::Whole),
        Self::Xid(Mode::Replicas),
        Self::Xid(Mode::Slices),
        Self::Memory(Mode::Whole, Moment::AtRest),
        Self::Memory(Mode::Slices, Moment::AtRest),
        Self::Memory(Mode::Replicas, Moment::AtRest),
        Self::Memory(Mode::Whole, Moment::AfterCalls),
        Self::Memory(Mode::Slices, Moment::AfterCalls),
        Self::Memory(Mode::Replicas, Moment::AfterCalls),
    ];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Floor => "empty call: GetDevicePluginOptions",
            Self::AllocateOne => "Allocate, 1 id",
            Self::AllocateEight => "Allocate, 8 ids",
            Self::AllocateNodes => "Allocate, 8 ids, with device nodes",
            Self::Callers => "Allocate, 8 callers at once, in all",
            Self::CallersTime => "Allocate, 8 callers at once, each call",
            Self::Preferred => "GetPreferredAllocation, 4 of 8",
            Self::PreferredReplicas => "GetPreferredAllocation, 2 of 80 replicas",
            Self::PreferredSlices => "GetPreferredAllocation, 2 of 56 slices",
            Self::SharedOne => "Allocate, 1 of 80 replicas",
            Self::SharedAll => "Allocate, 32 of 80 replicas",
            Self::Register => "exec to Register, 8 GPUs",
            Self::RegisterMig => "exec to Register, 56 MIG devices",
            Self::RegisterAgain => "kubelet.sock recreated to Register",
            Self::Xid(Mode::Whole) => "Xid to unhealthy on ListAndWatch",
            Self::Xid(Mode::Replicas) => "Xid to all 10 replicas unhealthy",
            Self::Xid(Mode::Slices) => "Xid to all 7 MIG devices unhealthy",
            Self::Memory(Mode::Whole, Moment::AtRest) => "resident at rest, 30 s after start, 8 GPUs",
            Self::Memory(Mode::Slices, Moment::AtRest) => "resident at rest, 56 MIG devices",
            Self::Memory(Mode::Replicas, Moment::AtRest) => "resident at rest, 80 replicas",
            Self::Memory(Mode::Whole, Moment::AfterCalls) => "resident after 13,000 calls, 8 GPUs",
            Self::Memory(Mode::Slices, Moment::AfterCalls) => "resident after 13,000 calls, 56 MIG devices",
            Self::Memory(Mode::Replicas, Moment::AfterCalls) => "resident after 13,000 calls, 80 replicas",
        }
    }
}
