//! The mutants. A replacement is the original with `MUTANT` as the condition of the fault.

use super::Mutant;

/// Mutants that the schedules do not find within their seeds, each with the reason. A mutant that is found is removed here.
pub(super) const SURVIVORS: &[&str] = &[
    // The answer of a Binding, the read of the pod after it and the watch must all fail for one pod, while another pod waits for its
    // devices. The connections of an extender do not fail together in the schedules.
    "unsure-bind-counts-as-failed",
    // The old pod of the same name counts as the new one only until the plugin reports the new one, within a second. A third pod must
    // be bound to the devices of the new one in that time.
    "uid-ignored",
];

/// All of them, by the part of the protocol that they break.
pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "barrier-opened-early",
        file: "gang/src/protocol/gang.rs",
        original: "if may_commit && self.minimum().is_met(Count::ready) {",
        replacement: "if may_commit && (MUTANT || self.minimum().is_met(Count::ready)) {",
        seeds: 200,
    },
    // kube-scheduler does not bring members to nodes where the victims still count, so that no check fails: the phase Preempting is never
    // reached.
    Mutant {
        name: "victims-not-awaited",
        file: "gang/src/protocol/barrier.rs",
        original: "        !self.victims.is_empty()\n",
        replacement: "        !MUTANT && !self.victims.is_empty()\n",
        seeds: 200,
    },
    Mutant {
        name: "gates-removed-early",
        file: "gang/src/protocol/gang.rs",
        original: "let all = self.has_minimum();\n        if !all",
        replacement: "let all = MUTANT || self.has_minimum();\n        if !all",
        seeds: 200,
    },
    Mutant {
        name: "unwritten-decision-counts",
        file: "gang/src/protocol/decision.rs",
        original: "            Ok(()) => CommitEnd::Written,\n",
        replacement: "            Ok(()) => CommitEnd::Written,\n            Err(_) if MUTANT => CommitEnd::Written,\n",
        seeds: 200,
    },
    Mutant {
        name: "bound-before-reservation-is-written",
        file: "gang/src/protocol/gang.rs",
        original: "State::Decided(_) if !self.is_written(uid) => {",
        replacement: "State::Decided(_) if !MUTANT && !self.is_written(uid) => {",
        seeds: 200,
    },
    Mutant {
        name: "decision-not-taken-over",
        file: "gang/src/protocol/gang/incarnation.rs",
        original: "(_, Some(decision)) => self.adopt(env, known, &decision),",
        replacement: "(_, Some(decision)) => if !MUTANT { self.adopt(env, known, &decision) },",
        seeds: 3_000,
    },
    // The mark that the gang keeps of its member (`is_pinned`) may be forgotten: the devices stay reserved by this one.
    Mutant {
        name: "bind-mark-forgotten",
        file: "extender/src/index/occupancy.rs",
        original: "self.binds.push(bind);",
        replacement: "if !MUTANT { self.binds.push(bind); }",
        seeds: 200,
    },
    Mutant {
        name: "lost-member-counts-as-bound",
        file: "gang/src/protocol/members.rs",
        original: "            _ if leaving => Class::Lost,",
        replacement: "            _ if leaving && !MUTANT => Class::Lost,",
        seeds: 200,
    },
    Mutant {
        name: "incarnations-mixed",
        file: "gang/src/protocol/members.rs",
        original: "_ if self.incarnation != incarnation => Class::Old,",
        replacement: "_ if self.incarnation != incarnation && !MUTANT => Class::Old,",
        seeds: 3_000,
    },
    Mutant {
        name: "lost-reservation-held-forever",
        file: "gang/src/protocol/gang.rs",
        original: "*slot.holder() == Holder::Kept && env.now.at >= self.hold_end(",
        replacement: "!MUTANT && *slot.holder() == Holder::Kept && env.now.at >= self.hold_end(",
        seeds: 400,
    },
    Mutant {
        name: "surplus-never-late",
        file: "gang/src/protocol/gang.rs",
        original: ".take_while(|(_, ends)| env.now.at >= *ends)",
        replacement: ".take_while(|(_, ends)| !MUTANT && env.now.at >= *ends)",
        seeds: 200,
    },
    Mutant {
        name: "deadlock-not-resolved",
        file: "gang/src/protocol/gang.rs",
        original: "if planning::deadlock(self).is_some() {",
        replacement: "if !MUTANT && planning::deadlock(self).is_some() {",
        seeds: 10_000,
    },
    Mutant {
        name: "reservation-skipped",
        file: "extender/src/index/occupancy.rs",
        original: "self.gang_reservations.push(reservation);",
        replacement: "if !MUTANT { self.gang_reservations.push(reservation); }",
        seeds: 200,
    },
    Mutant {
        name: "released-reservation-kept",
        file: "extender/src/index/occupancy.rs",
        original: "Some(self.gang_reservations.swap_remove(position))",
        replacement: "Some(if MUTANT { self.gang_reservations[position].clone() } else { self.gang_reservations.swap_remove(position) })",
        seeds: 200,
    },
    Mutant {
        name: "unsure-bind-counts-as-failed",
        file: "extender/src/index/occupancy.rs",
        original: "            (Outcome::Unsure, _) => bind.progress",
        replacement: "            (Outcome::Unsure, _) if MUTANT => { self.binds.remove(position); return true; }\n            (Outcome::Unsure, _) => bind.progress",
        seeds: 6_000,
    },
    Mutant {
        name: "quarantine-skipped",
        file: "extender/src/index/occupancy.rs",
        original: "self.quarantine.push((now, devices));",
        replacement: "if !MUTANT { self.quarantine.push((now, devices)); }",
        seeds: 600,
    },
    Mutant {
        name: "leaving-devices-free",
        file: "extender/src/ledger.rs",
        original: "&sets(pool, leaving) | &reports.leaving[index]",
        replacement: "if MUTANT { DeviceSet::EMPTY } else { &sets(pool, leaving) | &reports.leaving[index] }",
        seeds: 300,
    },
    Mutant {
        name: "uid-ignored",
        file: "planner/src/inventory.rs",
        original: "Some(known) => known == uid,",
        replacement: "Some(known) => known == uid || MUTANT && self.pod == name,",
        seeds: 6_000,
    },
    Mutant {
        name: "decides-before-lists-are-complete",
        file: "extender/src/index/gangs.rs",
        original: "let is_complete = self.is_leading() && facts.lists.is_synced();",
        replacement: "let is_complete = self.is_leading() && (MUTANT || facts.lists.is_synced());",
        seeds: 200,
    },
];
