//! The cordon of a GPU: an annotation of its `GpuNode`, so that `kubectl annotate` sets and removes it like `gantry cordon
//! gpu`. New pods do not get a cordoned GPU; pods that hold it keep it.

use std::collections::BTreeMap;
use std::fmt;

use gantry_topology::GpuUuid;
use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::names::{self, CORDON_ANNOTATION_PREFIX};
use crate::text::ObjectMessage;

/// Most bytes of the name of a client that is kept.
const MAX_BY: usize = 64;

/// Why a GPU is cordoned. As the value of the annotation: JSON, or the reason as plain text.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Cordon {
    /// Why, as the operator wrote it. May be empty.
    #[serde(default)]
    pub reason: String,
    /// The user that set it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
    /// When it was set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
}

impl Cordon {
    /// Reads the value of the annotation. Every text is a cordon: one that is not JSON of this form is the reason.
    pub fn read(value: &str) -> Self {
        let read: Option<Self> =
            value.trim_start().starts_with('{').then(|| serde_json::from_str(value).ok()).flatten();
        let read = read.unwrap_or_else(|| Self { reason: value.trim().to_owned(), ..Self::default() });
        let by = read.by.map(|by| ObjectMessage::new(by).chars().take(MAX_BY).collect());
        Self { reason: ObjectMessage::new(read.reason).into(), by, since: read.since }
    }

    /// The value of the annotation.
    pub fn written(&self) -> String {
        // A struct of strings is always representable.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// The cordon of a rule of remediation, for this fault.
    pub fn of_rule(rule: &str, fault: &str, since: Timestamp) -> Self {
        Self {
            reason: format!("{}{fault}", beginning_of_rule(rule)),
            by: Some(names::EXTENDER.to_owned()),
            since: Some(since),
        }
    }

    /// Whether this rule of remediation set it.
    pub fn is_of_rule(&self, rule: &str) -> bool {
        self.by.as_deref() == Some(names::EXTENDER) && self.reason.starts_with(&beginning_of_rule(rule))
    }

    /// The name of the annotation that cordons this GPU.
    pub fn annotation(gpu: &GpuUuid) -> String {
        format!("{CORDON_ANNOTATION_PREFIX}{gpu}")
    }
}

fn beginning_of_rule(rule: &str) -> String {
    format!("rule {rule}: ")
}

/// Such as `cordoned by alice: the fan fails`, as an [`ObjectMessage`]: the reason by which its devices are
/// unhealthy.
impl fmt::Display for Cordon {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = "cordoned".to_owned();
        if let Some(by) = self.by.as_deref().filter(|by| !by.is_empty()) {
            text.push_str(&format!(" by {by}"));
        }
        if !self.reason.is_empty() {
            text.push_str(&format!(": {}", self.reason));
        }
        f.write_str(&ObjectMessage::new(text))
    }
}

/// The cordoned GPUs of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cordons(BTreeMap<GpuUuid, Cordon>);

impl Cordons {
    /// Most GPUs of a node that are read.
    const MAX: usize = 64;

    /// Reads the annotations of a `GpuNode`. An annotation that does not name a GPU is ignored.
    pub fn of(annotations: Option<&BTreeMap<String, String>>) -> Self {
        let all = annotations.into_iter().flatten();
        let cordons = all.filter_map(|(name, value)| {
            let gpu = name.strip_prefix(CORDON_ANNOTATION_PREFIX)?.parse().ok()?;
            Some((gpu, Cordon::read(value)))
        });
        Self(cordons.take(Self::MAX).collect())
    }

    /// The cordon of a GPU, if it is cordoned.
    pub fn get(&self, gpu: &GpuUuid) -> Option<&Cordon> {
        self.0.get(gpu)
    }

    /// All, by UUID.
    pub fn iter(&self) -> impl Iterator<Item = (&GpuUuid, &Cordon)> {
        self.0.iter()
    }

    /// Whether no GPU is cordoned.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::text::MAX_MESSAGE;

    fn gpu(name: &str) -> GpuUuid {
        name.parse().unwrap()
    }

    #[test]
    fn annotation_is_json_or_plain_text() {
        let whole = Cordon {
            reason: "the fan fails".to_owned(),
            by: Some("alice".to_owned()),
            since: Some("2026-11-26T03:30:00Z".parse().unwrap()),
        };
        assert_eq!(
            whole.written(),
            r#"{"reason":"the fan fails","by":"alice","since":"2026-11-26T03:30:00Z"}"#
        );
        assert_eq!(Cordon::read(&whole.written()), whole);
        assert_eq!(whole.to_string(), "cordoned by alice: the fan fails");
        let plain = Cordon::read(" the fan fails ");
        assert_eq!((plain.reason.as_str(), plain.by.as_deref()), ("the fan fails", None));
        assert_eq!(plain.to_string(), "cordoned: the fan fails");
        assert_eq!(Cordon::read("").to_string(), "cordoned");
        // Not of this form: still a cordon.
        assert_eq!(Cordon::read(r#"{"reason": 3}"#).reason, r#"{"reason": 3}"#);
    }

    /// A reset by a rule returns a GPU only if the cordon is the rule's own: the operator's cordon stays, and so does that
    /// of another rule, also of one with a longer name.
    #[test]
    fn cordon_of_a_rule_is_of_that_rule_only() {
        let since = "2026-11-26T03:30:00Z".parse().unwrap();
        let cordon = Cordon::read(&Cordon::of_rule("r", "Xid 79", since).written());
        assert_eq!(cordon.to_string(), "cordoned by gantry-extender: rule r: Xid 79");
        assert!(cordon.is_of_rule("r"));
        assert!(!cordon.is_of_rule("r2") && !cordon.is_of_rule("") && !cordon.is_of_rule("r: Xid"));
        assert!(!Cordon::of_rule("r2", "Xid 79", since).is_of_rule("r"));
        for text in [
            r#"{"reason":"rule r: Xid 79","by":"alice"}"#,
            "rule r: Xid 79",
            "cordoned by gantry-extender: rule r: x",
        ] {
            assert!(!Cordon::read(text).is_of_rule("r"), "{text}");
        }
    }

    #[test]
    fn node_has_the_cordons_of_its_annotations() {
        let annotations = [
            ("gantry.dev/cordon-GPU-a", "x"),
            ("gantry.dev/cordon-MIG-b", "y"),
            ("gantry.dev/cordon-", "z"),
            ("gantry.dev/lift-quarantine", "GPU-c"),
        ];
        let annotations = annotations.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let cordons = Cordons::of(Some(&annotations));
        assert_eq!(cordons.iter().map(|(gpu, _)| gpu.as_str()).collect::<Vec<_>>(), ["GPU-a"]);
        assert_eq!(cordons.get(&gpu("GPU-a")).unwrap().reason, "x");
        assert_eq!(Cordon::annotation(&gpu("GPU-a")), "gantry.dev/cordon-GPU-a");
        assert!(Cordons::of(None).is_empty());
    }

    #[test]
    fn annotation_of_nvml_uuid_has_valid_length() {
        let name = Cordon::annotation(&gpu("GPU-00112233-4455-6677-8899-aabbccddeeff"));
        assert!(name.split_once('/').unwrap().1.len() <= 63, "{name}");
    }

    proptest! {
        /// No text of a client reaches an object or a terminal with control characters, or without bound.
        #[test]
        fn every_text_is_a_bounded_cordon(reason in ".*", by in ".*") {
            for value in [reason.clone(), Cordon { reason, by: Some(by), since: None }.written()] {
                let text = Cordon::read(&value).to_string();
                prop_assert!(text.starts_with("cordoned") && text.len() <= MAX_MESSAGE);
                prop_assert!(!text.chars().any(char::is_control));
            }
        }
    }
}
