//! Judges the state of one GPU: which values make it unhealthy, and which prove a reset since a fault. Pure.

use gantry_api::FaultEvidence;

use super::{Cause, FabricCheck, HealthChecks, Proof};
use crate::nvml::{ComputeMode, FabricHealth, FabricStep, RecoveryAction, RemappedRows};

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
    /// Memory rows that were remapped in the life of the board (Ampere and later).
    pub remapped: Option<RemappedRows>,
    /// The recovery action that the driver requests.
    pub action: Option<RecoveryAction>,
    /// The kernel's number of the GPU's binding to its driver.
    pub binding: Option<u64>,
    /// Registration with the NVLink fabric, and the health of the connection.
    pub fabric: Option<(FabricStep, FabricHealth)>,
    /// Which processes may compute on the GPU.
    pub compute_mode: Option<ComputeMode>,
    /// The calls that failed.
    pub failed: FailedCalls,
}

/// Calls that failed. A GPU that does not support a value is not a failure.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FailedCalls {
    /// The call for uncorrected errors.
    pub uncorrected: bool,
    /// The calls for rows or pages that wait to be retired.
    pub repair: bool,
    /// The call for the recovery action.
    pub action: bool,
    /// The call for the NVLink fabric.
    pub fabric: bool,
    /// The call for the compute mode.
    pub compute_mode: bool,
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
            known.remapped = before.remapped;
            known.failed.repair = before.failed.repair;
        }
        if self.failed.action {
            known.action = before.action;
            known.failed.action = before.failed.action;
        }
        if self.failed.fabric {
            known.fabric = before.fabric;
            known.failed.fabric = before.failed.fabric;
        }
        if self.failed.compute_mode {
            known.compute_mode = before.compute_mode;
            known.failed.compute_mode = before.failed.compute_mode;
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
        if self.compute_mode == Some(ComputeMode::Prohibited) {
            let reason =
                "compute mode PROHIBITED: no process may use CUDA on the GPU; run nvidia-smi -c DEFAULT";
            complaints.push((Cause::ComputeMode, reason.to_owned()));
        }
        if checks.fabric == FabricCheck::Unhealthy {
            complaints.extend(self.fabric_fault(checks));
        }
        complaints
    }

    /// What is wrong without making the GPU unhealthy, with the reasons.
    pub fn notices(&self, checks: &HealthChecks) -> Vec<(Cause, String)> {
        let mut notices = Vec::new();
        if checks.fabric == FabricCheck::Degraded {
            notices.extend(self.fabric_fault(checks));
        }
        let Some((_, health)) = self.fabric.filter(|_| checks.fabric != FabricCheck::Ignore) else {
            return notices;
        };
        let limits = [
            (health.degraded_bandwidth, "fewer links carry traffic than there are"),
            (health.recovering, "routes or accesses are being recovered"),
            (health.limited, "its capacity is limited"),
        ];
        let limits: Vec<&str> =
            limits.into_iter().filter(|(is_set, _)| *is_set).map(|(_, text)| text).collect();
        if !limits.is_empty() {
            let text = limits.join(", ");
            notices.push((
                Cause::Fabric,
                format!("NVLink fabric: {text}; see nvidia-smi -q (Fabric) and the fabric manager's log"),
            ));
        }
        notices
    }

    /// Why CUDA cannot use the GPU for lack of the NVLink fabric.
    fn fabric_fault(&self, checks: &HealthChecks) -> Option<(Cause, String)> {
        let (step, health) = self.fabric?;
        let text = match step {
            FabricStep::None => return None,
            FabricStep::NotStarted => {
                "the fabric manager has not registered the GPU, and CUDA fails with error 802; start \
                 nvidia-fabricmanager in the driver's version"
                    .to_owned()
            }
            // The fabric manager registers a GPU only when its partition is activated.
            FabricStep::InProgress if checks.shared_fabric => return None,
            FabricStep::InProgress => "the registration of the GPU is in progress, and CUDA fails with error 802 until \
                 it ends; if this lasts, see the log of nvidia-fabricmanager"
                .to_owned(),
            FabricStep::Failed(code) => format!(
                "the registration of the GPU failed ({code}), and CUDA fails with error 802; see the log of \
                 nvidia-fabricmanager and restart it"
            ),
            FabricStep::Completed if health.route_unhealthy => {
                "the routes to other GPUs are broken; see the log of nvidia-fabricmanager, then reset the GPUs".to_owned()
            }
            FabricStep::Completed => match health.misconfigured {
                Some(number) => format!(
                    "wrong configuration ({}); correct it, and restart nvidia-fabricmanager",
                    misconfiguration(number)
                ),
                None if health.unhealthy => {
                    "NVML calls it unhealthy; see nvidia-smi -q (Fabric) and the log of nvidia-fabricmanager".to_owned()
                }
                None => return None,
            },
        };
        Some((Cause::Fabric, format!("NVLink fabric: {text}")))
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

/// NVML's number of a wrong configuration as text.
fn misconfiguration(number: u32) -> String {
    match number {
        2 => "system GUIDs differ".to_owned(),
        3 => "chassis serial numbers differ".to_owned(),
        4 => "the GPU is in no partition".to_owned(),
        5 => "too few NVLinks are up".to_owned(),
        other => format!("NVML's number {other}"),
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
    use crate::nvml::Code;

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
        remapped: None,
        action: None,
        binding: Some(7),
        fabric: None,
        compute_mode: None,
        failed: NONE,
    };

    const NONE: FailedCalls =
        FailedCalls { uncorrected: false, repair: false, action: false, fabric: false, compute_mode: false };

    /// CUDA answers 802 before the fabric manager has registered a GPU (HGX boards).
    #[test]
    fn fabric_that_is_not_ready_makes_gpu_unhealthy() {
        let of = |step, health| Vitals { fabric: Some((step, health)), ..AMPERE };
        let fine = FabricHealth::default();
        let all = HealthChecks::default();
        let mut reasons = Vec::new();
        for step in [FabricStep::NotStarted, FabricStep::InProgress, FabricStep::Failed(Code::Unknown)] {
            let complaints = of(step, fine).complaints(&all);
            assert_eq!(complaints.len(), 1, "{step:?}");
            reasons.push(complaints[0].1.to_string());
            let degraded = HealthChecks { fabric: FabricCheck::Degraded, ..HealthChecks::default() };
            assert_eq!(of(step, fine).complaints(&degraded), []);
            assert_eq!(of(step, fine).notices(&degraded), complaints);
            let ignored = HealthChecks { fabric: FabricCheck::Ignore, ..HealthChecks::default() };
            assert!(
                of(step, fine).complaints(&ignored).is_empty() && of(step, fine).notices(&ignored).is_empty()
            );
        }
        insta::assert_snapshot!(reasons.join("\n"), @r"
        NVLink fabric: the fabric manager has not registered the GPU, and CUDA fails with error 802; start nvidia-fabricmanager in the driver's version
        NVLink fabric: the registration of the GPU is in progress, and CUDA fails with error 802 until it ends; if this lasts, see the log of nvidia-fabricmanager
        NVLink fabric: the registration of the GPU failed (the driver reports an internal error (NVML error 999)), and CUDA fails with error 802; see the log of nvidia-fabricmanager and restart it
        ");
        for step in [FabricStep::None, FabricStep::Completed] {
            assert_eq!(of(step, fine).complaints(&all), [], "{step:?}");
        }
        let broken = FabricHealth { route_unhealthy: true, ..fine };
        assert_eq!(causes(of(FabricStep::Completed, broken), &all), [Cause::Fabric]);
        let alone = FabricHealth { misconfigured: Some(4), ..fine };
        insta::assert_snapshot!(of(FabricStep::Completed, alone).complaints(&all)[0].1, @"NVLink fabric: wrong configuration (the GPU is in no partition); correct it, and restart nvidia-fabricmanager");
        let slow = of(FabricStep::Completed, FabricHealth { degraded_bandwidth: true, ..fine });
        assert_eq!((slow.complaints(&all).len(), slow.notices(&all).len()), (0, 1));
    }

    /// With FABRIC_MODE=1 the fabric manager registers a GPU when its partition is activated.
    #[test]
    fn shared_fabric_in_progress_is_normal() {
        let shared = HealthChecks { shared_fabric: true, ..HealthChecks::default() };
        let of = |step| Vitals { fabric: Some((step, FabricHealth::default())), ..AMPERE };
        assert_eq!(of(FabricStep::InProgress).complaints(&shared), []);
        assert_eq!(causes(of(FabricStep::NotStarted), &shared), [Cause::Fabric]);
    }

    #[test]
    fn prohibited_compute_mode_makes_gpu_unhealthy() {
        let of = |mode| Vitals { compute_mode: Some(mode), ..AMPERE };
        let all = HealthChecks::default();
        assert_eq!(causes(of(ComputeMode::Prohibited), &all), [Cause::ComputeMode]);
        assert_eq!(causes(of(ComputeMode::Exclusive), &all), [], "one process may use it");
    }

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
