//! Why members wait that kube-scheduler never asks about: a gate of ours keeps them from it, or its own count has refused them first. In
//! the words that they would be told, so that somebody else can tell them. Reads only.

use std::sync::Arc;

use gantry_api::PodUid;

use super::Gangs;
use super::gang::Gang;
use super::gangs::Belongs;
use super::members::Kept;
use super::types::Stage;

/// Why a member waits for its gang.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WaitReason {
    /// What the gang or the pod says of it contradicts itself, or cannot be followed.
    Invalid(Arc<str>),
    /// It is to wait.
    Waits(Arc<str>),
}

impl WaitReason {
    /// In words.
    pub fn text(&self) -> &Arc<str> {
        match self {
            Self::Invalid(text) | Self::Waits(text) => text,
        }
    }
}

impl Gangs {
    /// Why a pod waits for its gang; `None` where it does not: it has a place that nobody has to leave for it, is bound, ends or has ended,
    /// goes by itself, or is another scheduler's.
    pub fn wait_reason(&self, uid: &PodUid) -> Option<WaitReason> {
        match self.of_pod.get(uid)? {
            Belongs::Beyond(text) => Some(WaitReason::Waits(text.clone())),
            Belongs::To(key) => {
                let gang = self.gangs.get(key).filter(|gang| !gang.lets_go(uid))?;
                gang.wait_reason(gang.members.get(uid)?)
            }
        }
    }
}

impl Gang {
    fn wait_reason(&self, kept: &Kept) -> Option<WaitReason> {
        let waits = matches!(kept.member.stage, Stage::Pending | Stage::Gated { .. });
        let ours = kept.lives() && kept.member.elsewhere.is_none();
        if !waits || !ours || kept.slot.is_some() && !self.preempts() {
            return None;
        }
        let text = self.not_going(kept).unwrap_or_else(|| self.text.clone());
        Some(
            match self.is_invalid() || !kept.member.membership.faults.is_empty() {
                true => WaitReason::Invalid(text),
                false => WaitReason::Waits(text),
            },
        )
    }
}
