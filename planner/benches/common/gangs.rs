//! Gangs for programs that plan. They may not plan themselves.

use std::sync::Arc;

use gantry_gang::protocol::{MemberRequest, PlanRequest, ShapeId};
use gantry_gang::terms::{Authority, Rails};
use gantry_gang::{GangKey, Integration, Repair, Terms, TopologyRequest};

/// A gang of members of 1, 2, 4 or 8 GPUs, the shapes 0 to 3, in one part of `level` if that is given.
pub(crate) fn gang(members: u32, gpus: u32, level: Option<&str>) -> PlanRequest {
    PlanRequest {
        gang: Arc::new(GangKey {
            namespace: "ml".into(),
            name: "train".into(),
            integration: Integration::Annotation,
            incarnation: "".into(),
        }),
        terms: Arc::new(Terms {
            min: members,
            singles: false,
            max: members,
            total: None,
            by_role: Vec::new(),
            quorum: None,
            level: level.map(|level| TopologyRequest { level: level.into(), required: true }),
            slice: None,
            rails: Rails::Same,
            spares: 0,
            repair: Repair::Hold,
            repair_by: Authority::Pods,
            arrival: std::time::Duration::from_secs(60),
            restart_hold: std::time::Duration::ZERO,
            checkpointed: false,
            lowered: Vec::new(),
            unread: None,
            authority: Authority::Pods,
            decided_by: "the program".into(),
        }),
        members: (0..members)
            .map(|rank| MemberRequest {
                uid: format!("7bd4b3a0-5d5c-4f0c-9f0e-{rank:012}").as_str().into(),
                shape: ShapeId(gpus.trailing_zeros()),
                rank: Some(rank),
                role: "".into(),
            })
            .collect(),
        must: members,
        placed: Vec::new(),
        spares: Vec::new(),
        without: Vec::new(),
        priority: 0,
        completes: false,
        resumes: false,
        others: Vec::new(),
    }
}
