//! What the rules have counted and done on a node: an annotation of its GpuNode, so that the next leader continues from
//! it.

use gantry_config::RemediationAction;
use gantry_topology::GpuUuid;
use serde::{Deserialize, Serialize};

/// Most entries of a node. The oldest go first.
const MAX_ENTRIES: usize = 128;
/// Most resets of a GPU that rules begin within [`RESETS_WITHIN`] seconds.
pub(super) const MAX_RESETS: usize = 3;
/// A day.
const RESETS_WITHIN: i64 = 24 * 3600;

/// What rules have counted and done on a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Record(Vec<Entry>);

/// One rule and one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Entry {
    /// Name of the rule.
    pub(crate) rule: String,
    /// The GPU.
    pub(crate) gpu: GpuUuid,
    /// When faults that match began, in Unix seconds, ascending.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) seen: Vec<i64>,
    /// When actions were taken within the last hour, in Unix seconds. Events do not count.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) actions: Vec<i64>,
    /// When resets were begun within the last day, in Unix seconds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) resets: Vec<i64>,
    /// The last action.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) acted: Option<TakenAction>,
    /// What a dry run has counted and reported. Not written: a dry run changes nothing.
    #[serde(skip)]
    pub(crate) dry_run: DryRun,
}

/// What a dry run has counted and reported.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct DryRun {
    /// When faults that match began, in Unix seconds, ascending.
    pub(crate) seen: Vec<i64>,
    /// When the fault began that was reported last.
    pub(crate) reported: Option<i64>,
}

impl Entry {
    /// The entry of a rule that has neither counted nor done anything.
    pub(crate) fn new(rule: String, gpu: GpuUuid) -> Self {
        Self {
            rule,
            gpu,
            seen: Vec::new(),
            actions: Vec::new(),
            resets: Vec::new(),
            acted: None,
            dry_run: DryRun::default(),
        }
    }

    /// Whether the GPU is being drained and reset.
    pub(super) fn is_resetting(&self) -> bool {
        let acted = self.acted.as_ref();
        acted.is_some_and(|acted| acted.active && acted.action == RemediationAction::Reset)
    }

    /// The reset that was begun and has not ended.
    pub(super) fn reset_in_flight(&self) -> Option<&Reset> {
        let reset = self.acted.as_ref().filter(|_| self.is_resetting())?.reset.as_ref()?;
        reset.failed.is_none().then_some(reset)
    }

    /// Begins a reset, which treats the faults that began until `newest`, too.
    pub(super) fn begin_reset(&mut self, newest: Option<i64>, now: i64) {
        self.resets.retain(|at| now.saturating_sub(*at) < RESETS_WITHIN);
        self.resets.push(now);
        if let Some(acted) = &mut self.acted {
            acted.onset = acted.onset.max(newest.unwrap_or(acted.onset));
            acted.reset = Some(Reset { at: now, created: false, failed: None });
        }
    }

    /// Changes the reset, if there is one.
    pub(super) fn change_reset(&mut self, change: impl FnOnce(&mut Reset)) {
        if let Some(reset) = self.acted.as_mut().and_then(|acted| acted.reset.as_mut()) {
            change(reset);
        }
    }

    /// Ends the drain, and the reset.
    pub(super) fn end(&mut self) {
        if let Some(acted) = &mut self.acted {
            (acted.active, acted.reset) = (false, None);
        }
    }

    fn is_empty(&self) -> bool {
        self.seen.is_empty() && self.actions.is_empty() && self.resets.is_empty() && self.acted.is_none()
    }
}

/// An action that was taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TakenAction {
    /// The action.
    pub(crate) action: RemediationAction,
    /// When, in Unix seconds.
    pub(crate) at: i64,
    /// When the fault began that it was taken for.
    pub(crate) onset: i64,
    /// A drain or a reset goes on, or what was set on the Node is still set.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) active: bool,
    /// The last reset, if the action is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reset: Option<Reset>,
}

/// One reset. Its Job is named by the GPU and `at`, so that every leader finds it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Reset {
    /// When it was begun, in Unix seconds.
    pub(crate) at: i64,
    /// Whether its Job was created. Without the Job it has ended then.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) created: bool,
    /// When it failed, in Unix seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) failed: Option<i64>,
}

impl Record {
    /// Reads the annotation. A text of another form is no record: limits bound what is done again.
    pub(crate) fn read(text: &str) -> Self {
        let mut read: Self = serde_json::from_str(text)
            .inspect_err(|error| tracing::warn!(%error, "the record of remediation rules cannot be read"))
            .unwrap_or_default();
        read.bound();
        read
    }

    /// The value of the annotation; `None` without anything to keep.
    pub(crate) fn written(&self) -> Option<String> {
        let kept: Vec<&Entry> = self.0.iter().filter(|entry| !entry.is_empty()).collect();
        (!kept.is_empty()).then(|| serde_json::to_string(&kept).ok()).flatten()
    }

    /// What a rule has done to a GPU.
    pub(crate) fn get(&self, rule: &str, gpu: &GpuUuid) -> Option<&Entry> {
        self.0.iter().find(|entry| entry.rule == rule && entry.gpu == *gpu)
    }

    /// Resets of a GPU that rules have begun within the last day.
    pub(super) fn resets(&self, gpu: &GpuUuid, now: i64) -> usize {
        let own = self.0.iter().filter(|entry| entry.gpu == *gpu);
        own.flat_map(|entry| &entry.resets).filter(|at| now.saturating_sub(**at) < RESETS_WITHIN).count()
    }

    /// All entries, oldest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.0.iter()
    }

    /// Sets what a rule has counted and done to a GPU.
    pub(crate) fn set(&mut self, entry: Entry) {
        self.0.retain(|known| known.rule != entry.rule || known.gpu != entry.gpu);
        self.0.push(entry);
        self.bound();
    }

    /// What goes on is forgotten last.
    fn bound(&mut self) {
        let is_over = |entry: &Entry| entry.acted.as_ref().is_none_or(|acted| !acted.active);
        while self.0.len() > MAX_ENTRIES {
            let first = self.0.iter().position(is_over).unwrap_or_default();
            self.0.remove(first);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(rule: &str) -> Entry {
        let acted =
            TakenAction { action: RemediationAction::Drain, at: 9, onset: 7, active: true, reset: None };
        let new = Entry::new(rule.to_owned(), "GPU-a".parse().unwrap());
        Entry { seen: vec![5, 7], actions: vec![9], acted: Some(acted), ..new }
    }

    #[test]
    fn record_round_trips_without_dry_runs() {
        let mut record = Record::default();
        assert_eq!(record.written(), None);
        let dry_run = DryRun { seen: vec![5], reported: Some(5) };
        record.set(Entry { dry_run, ..Entry::new("dry".to_owned(), "GPU-a".parse().unwrap()) });
        assert_eq!(record.written(), None);
        record.set(entry("real"));
        let text = record.written().unwrap();
        assert_eq!(
            text,
            r#"[{"rule":"real","gpu":"GPU-a","seen":[5,7],"actions":[9],"acted":{"action":"drain","at":9,"onset":7,"active":true}}]"#
        );
        assert_eq!(Record::read(&text).iter().collect::<Vec<_>>(), [&entry("real")]);
    }

    /// A new leader finds the Job by the record.
    #[test]
    fn record_keeps_a_reset_until_it_has_ended() {
        let acted =
            TakenAction { action: RemediationAction::Reset, at: 9, onset: 7, active: true, reset: None };
        let mut entry = Entry { acted: Some(acted), ..entry("real") };
        assert!(entry.is_resetting() && entry.reset_in_flight().is_none());
        entry.begin_reset(Some(5), 20);
        let mut record = Record::default();
        record.set(entry.clone());
        let text = record.written().unwrap();
        assert!(
            text.contains(
                r#""resets":[20],"acted":{"action":"reset","at":9,"onset":7,"active":true,"reset":{"at":20}"#
            ),
            "{text}"
        );
        assert_eq!(Record::read(&text), record);
        entry.change_reset(|reset| reset.created = true);
        assert!(entry.reset_in_flight().unwrap().created);
        entry.change_reset(|reset| reset.failed = Some(30));
        assert!(entry.is_resetting() && entry.reset_in_flight().is_none());
        entry.begin_reset(Some(19), 20 + RESETS_WITHIN);
        assert_eq!(entry.acted.as_ref().unwrap().onset, 19);
        assert_eq!(entry.resets, [20 + RESETS_WITHIN], "the first is a day ago");
        entry.end();
        assert!(!entry.is_resetting() && entry.reset_in_flight().is_none());
        record.set(entry);
        assert_eq!(record.resets(&"GPU-a".parse().unwrap(), 21 + RESETS_WITHIN), 1);
        assert_eq!(record.resets(&"GPU-b".parse().unwrap(), 21 + RESETS_WITHIN), 0);
    }

    #[test]
    fn record_is_bounded_and_damage_is_no_record() {
        let mut record = Record::default();
        (0..1000).for_each(|at| record.set(entry(&at.to_string())));
        assert_eq!(record.iter().count(), MAX_ENTRIES);
        assert!(record.get("999", &"GPU-a".parse().unwrap()).is_some());
        for text in ["", "{}", "[{\"rule\":3}]", "[{\"rule\":\"a\",\"gpu\":\"MIG-a\"}]"] {
            assert_eq!(Record::read(text), Record::default(), "{text}");
        }
    }
}
