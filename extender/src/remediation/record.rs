//! What the rules have counted and done on a node: an annotation of its GpuNode, so that the next leader continues from
//! it.

use gantry_config::RemediationAction;
use gantry_topology::GpuUuid;
use serde::{Deserialize, Serialize};

/// Most entries of a node. The oldest go first.
const MAX_ENTRIES: usize = 128;

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
    /// The last action.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) acted: Option<Acted>,
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
        Self { rule, gpu, seen: Vec::new(), actions: Vec::new(), acted: None, dry_run: DryRun::default() }
    }

    fn is_empty(&self) -> bool {
        self.seen.is_empty() && self.actions.is_empty() && self.acted.is_none()
    }
}

/// An action that was taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Acted {
    /// The action.
    pub(crate) action: RemediationAction,
    /// When, in Unix seconds.
    pub(crate) at: i64,
    /// When the fault began that it was taken for.
    pub(crate) onset: i64,
    /// A drain goes on, or what was set on the Node is still set.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) active: bool,
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

    fn bound(&mut self) {
        let surplus = self.0.len().saturating_sub(MAX_ENTRIES);
        self.0.drain(..surplus);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(rule: &str) -> Entry {
        let acted = Acted { action: RemediationAction::Drain, at: 9, onset: 7, active: true };
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
