//! Judges the state of one GPU: which values make it unhealthy, and which prove a reset since a fault. Pure.

use gantry_api::FaultEvidence;

use super::{Cause, HealthChecks, Proof};
use crate::nvml::RecoveryAction;

/// State of a GPU as the GPU and the kernel report it. `None`: not reported.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Vitals {
    /// Uncorrected memory errors since the driver was loaded or the GPU reset.
    pub uncorrected: Option<u64>,
    /// Whether the GPU can remap memory rows (Ampere and later).
    pub remaps_rows: bool,
    /// Whether memory rows (before Ampere: pages) wait for a reset to be retired.
    pub repair_pending: Option<bool>,
    /// Whether remapping a row failed.
    pub repair_failed: Option<bool>,
    /// The recovery action that the driver requests.
    pub action: Option<RecoveryAction>,
    /// The kernel's number of the GPU's binding to its driver.
    pub binding: Option<u64>,
    /// The calls that failed.
    pub failed: Failed,
}

/// Calls that failed. A GPU that does not support a value is not a failure.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Failed {
    /// The call for uncorrected errors.
    pub uncorrected: bool,
    /// The calls for rows or pages that wait to be retired.
    pub repair: bool,
    /// The call for the recovery action.
    pub action: bool,
}

/// Xids with an equivalent state in NVML: disabling one disables the other.
const UNCORRECTED: u64 = 48;
const REPAIR: u64 = 63;
const REPAIR_FAILED: u64 = 64;
const ACTION_CHANGED: u64 = 154;

impl Vitals {
    /// The current state: a failed call keeps the value of `before`, unless the kernel has bound the GPU again
    /// since.
    pub fn over(self, before: Option<&Self>) -> Self {
        let is_bound_anew = |before: &Self| match (before.binding, self.binding) {
            (Some(before), Some(now)) => before != now,
            _ => false,
        };
        let Some(before) = before.filter(|before| !is_bound_anew(before)) else {
            return self;
        };
        let mut known = self;
        if self.failed.uncorrected {
            known.uncorrected = before.uncorrected;
            known.failed.uncorrected = before.failed.uncorrected;
        }
        if self.failed.repair {
            known.remaps_rows = before.remaps_rows;
            known.repair_pending = before.repair_pending;
            known.repair_failed = before.repair_failed;
            known.failed.repair = before.failed.repair;
        }
        if self.failed.action {
            known.action = before.action;
            known.failed.action = before.failed.action;
        }
        known
    }

    /// The present problems, with their reasons.
    ///
    /// Uncorrected errors alone count only on GPUs that cannot remap rows. Newer GPUs contain errors, and
    /// report by a pending repair or a recovery action whether a reset is needed.
    pub fn complaints(&self, checks: &HealthChecks) -> Vec<(Cause, String)> {
        let mut complaints = Vec::new();
        let mut add = |xid: u64, cause: Cause, reason: String| {
            if checks.watches(xid) {
                complaints.push((cause, reason));
            }
        };
        if self.repair_failed == Some(true) {
            add(
                REPAIR_FAILED,
                Cause::RepairFailed,
                "memory: remapping a row failed; run NVIDIA's field diagnostics and replace the board"
                    .to_owned(),
            );
        }
        if let Some(action) = self.action.and_then(action_text) {
            add(ACTION_CHANGED, Cause::RecoveryAction, format!("the driver requests {action}"));
        }
        if self.repair_pending == Some(true) {
            let (what, remedy) = match self.remaps_rows {
                true => ("rows wait to be remapped", "drain the GPU and run nvidia-smi --gpu-reset"),
                false => ("pages wait to be retired", "drain the node and reload the driver"),
            };
            add(REPAIR, Cause::RepairPending, format!("memory: {what}; {remedy}"));
        }
        // Only a GPU that reported that it cannot remap rows.
        let is_contained = self.remaps_rows || self.failed.repair;
        if let Some(count) = self.uncorrected.filter(|count| *count > 0 && !is_contained) {
            let errors = if count == 1 { "error" } else { "errors" };
            add(
                UNCORRECTED,
                Cause::Uncorrected,
                format!(
                    "memory: {count} uncorrected ECC {errors}; drain the GPU and run nvidia-smi --gpu-reset"
                ),
            );
        }
        complaints
    }

    /// Adds these vitals to the evidence of a fault.
    pub fn add_to(&self, evidence: &mut FaultEvidence) {
        evidence.binding = evidence.binding.or(self.binding);
        evidence.uncorrected = evidence.uncorrected.max(self.uncorrected);
        evidence.repair_pending |= self.repair_pending == Some(true);
        evidence.reset_asked |= self.action.is_some_and(asks_for_reset);
    }

    /// Returns the proof, if these vitals show a reset since `evidence`. Earlier values in `known` prove
    /// nothing, but can contradict a proof.
    pub fn proof(&self, known: &Self, evidence: &FaultEvidence) -> Option<Proof> {
        if let (Some(before), Some(now)) = (evidence.binding, self.binding)
            && before != now
        {
            return Some(Proof::Rebound);
        }
        let still_asks = known.action.is_some_and(asks_for_reset) || known.repair_pending == Some(true);
        if still_asks {
            return None;
        }
        if evidence.reset_asked && self.action == Some(RecoveryAction::None) {
            return Some(Proof::ActionCleared);
        }
        if evidence.repair_pending && self.repair_pending == Some(false) {
            return Some(Proof::Repaired);
        }
        match (evidence.uncorrected, self.uncorrected) {
            (Some(before), Some(now)) if now < before => Some(Proof::CountersReset),
            _ => None,
        }
    }
}

fn asks_for_reset(action: RecoveryAction) -> bool {
    matches!(action, RecoveryAction::Reset | RecoveryAction::Reboot | RecoveryAction::DrainAndReset)
}

/// Description of the action; `None` if there is none.
fn action_text(action: RecoveryAction) -> Option<&'static str> {
    match action {
        RecoveryAction::None => None,
        RecoveryAction::Reset => Some("a reset of the GPU; drain it and run nvidia-smi --gpu-reset"),
        RecoveryAction::Reboot => Some("a reboot of the node"),
        RecoveryAction::DrainPeers => {
            Some("the end of all peer-to-peer work; end the jobs that span its GPUs")
        }
        RecoveryAction::DrainAndReset => Some("a reset of the GPU once its work has ended"),
        RecoveryAction::Other(_) => Some("an action unknown to this version; see nvidia-smi -q"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn causes(vitals: Vitals, checks: &HealthChecks) -> Vec<Cause> {
        vitals.complaints(checks).into_iter().map(|(cause, _)| cause).collect()
    }

    fn disabled(text: &str) -> HealthChecks {
        HealthChecks { disabled: text.parse().unwrap(), ..HealthChecks::default() }
    }

    const AMPERE: Vitals = Vitals {
        uncorrected: Some(0),
        remaps_rows: true,
        repair_pending: Some(false),
        repair_failed: Some(false),
        action: None,
        binding: Some(7),
        failed: NONE,
    };

    const NONE: Failed = Failed { uncorrected: false, repair: false, action: false };

    impl Vitals {
        /// The proof without earlier values.
        fn proof_alone(&self, evidence: &FaultEvidence) -> Option<Proof> {
            self.proof(self, evidence)
        }
    }

    #[test]
    fn problems_follow_vitals() {
        let all = HealthChecks::default();
        assert_eq!(causes(Vitals::default(), &all), []);
        assert_eq!(causes(AMPERE, &all), []);
        let pending = Vitals { repair_pending: Some(true), ..AMPERE };
        assert_eq!(causes(pending, &all), [Cause::RepairPending]);
        assert_eq!(causes(pending, &disabled("63")), []);
        let failed = Vitals { repair_failed: Some(true), action: Some(RecoveryAction::Reset), ..pending };
        assert_eq!(causes(failed, &all), [Cause::RepairFailed, Cause::RecoveryAction, Cause::RepairPending]);
        assert_eq!(causes(failed, &disabled("all")), []);
    }

    #[test]
    fn uncorrected_errors_count_if_rows_cannot_be_remapped() {
        let all = HealthChecks::default();
        let contained = Vitals { uncorrected: Some(3), ..AMPERE };
        assert_eq!(causes(contained, &all), []);
        let volta = Vitals { uncorrected: Some(1), repair_pending: Some(false), ..Vitals::default() };
        assert_eq!(
            volta.complaints(&all),
            [(
                Cause::Uncorrected,
                "memory: 1 uncorrected ECC error; drain the GPU and run nvidia-smi --gpu-reset".to_owned()
            )]
        );
    }

    #[test]
    fn only_reset_evidence_proves_reset() {
        let evidence = |seen: &[Vitals]| {
            let mut evidence = FaultEvidence::default();
            for vitals in seen {
                vitals.add_to(&mut evidence);
            }
            evidence
        };
        let with_action = |action| Vitals { action: Some(action), ..AMPERE };
        let pending = Vitals { repair_pending: Some(true), ..AMPERE };
        let counted = Vitals { uncorrected: Some(2), ..AMPERE };
        assert_eq!(AMPERE.proof_alone(&evidence(&[AMPERE])), None, "it only goes on");
        let bound = Vitals { binding: Some(8), ..AMPERE };
        assert_eq!(bound.proof_alone(&evidence(&[AMPERE])), Some(Proof::Rebound));
        let asked = evidence(&[with_action(RecoveryAction::Reset)]);
        assert_eq!(with_action(RecoveryAction::None).proof_alone(&asked), Some(Proof::ActionCleared));
        assert_eq!(with_action(RecoveryAction::Reboot).proof_alone(&asked), None, "it requests more");
        assert_eq!(AMPERE.proof_alone(&asked), None, "silence is no answer");
        let drained = evidence(&[with_action(RecoveryAction::DrainPeers)]);
        assert_eq!(with_action(RecoveryAction::None).proof_alone(&drained), None, "no reset was requested");
        assert_eq!(AMPERE.proof_alone(&evidence(&[pending])), Some(Proof::Repaired));
        assert_eq!(AMPERE.proof_alone(&evidence(&[counted])), Some(Proof::CountersReset));
        assert_eq!(
            pending.proof_alone(&evidence(&[counted])),
            None,
            "counters that were cleared by hand repair nothing"
        );
        assert_eq!(Vitals::default().proof_alone(&evidence(&[counted, pending])), None);
    }
}
