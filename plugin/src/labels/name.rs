//! Names and values that Kubernetes accepts as labels, for any name of a product, machine or driver. A value that is too long is
//! truncated in the middle: its end, which has the MIG profile and the sharing, stays.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// Longest value, and longest name without its domain (Kubernetes' API conventions).
pub const LONGEST: usize = 63;

/// A label's key, `domain/name`; valid by construction.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LabelName(Arc<str>);

impl LabelName {
    /// The key of `name` in `domain`, which must be a DNS name. Characters that a name may not have are left out.
    pub fn new(domain: &str, name: &str) -> Self {
        Self(format!("{domain}/{}", value(name)).into())
    }

    /// The key as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for LabelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// Labels by key, each value one that Kubernetes accepts.
pub type Labels = BTreeMap<LabelName, String>;

/// `text` as a label value: letters, digits, `-`, `_` and `.` stay, blanks become one `-`, anything else is dropped, as in NVIDIA's
/// gpu-feature-discovery. In addition it begins and ends with a letter or digit and is no longer than [`LONGEST`].
pub fn value(text: &str) -> String {
    value_with(text, "")
}

/// [`value`] of `text` and `suffix` together. `text` is truncated if necessary; `suffix` must be valid and short.
pub fn value_with(text: &str, suffix: &str) -> String {
    let kept: String =
        text.chars().filter(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ' ')).collect();
    let words: Vec<&str> = kept.split_whitespace().collect();
    let mut joined = words.join("-");
    // Only ASCII is left, so a byte is a character.
    joined.truncate(LONGEST.saturating_sub(suffix.len()));
    format!("{}{suffix}", joined.trim_end_matches(is_edge)).trim_matches(is_edge).to_owned()
}

/// Whether a character may be inside a name or value, but not at its ends.
fn is_edge(c: char) -> bool {
    !c.is_ascii_alphanumeric()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn product_names_are_spelled_as_in_nvidias_labels() {
        assert_eq!(value("NVIDIA A100-SXM4-40GB"), "NVIDIA-A100-SXM4-40GB");
        assert_eq!(value("NVIDIA  H100   80GB HBM3 "), "NVIDIA-H100-80GB-HBM3");
        assert_eq!(value("NVIDIA GeForce RTX™ 4090 (24 GB)"), "NVIDIA-GeForce-RTX-4090-24-GB");
    }

    #[test]
    fn long_product_is_truncated_before_its_suffix() {
        let product = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition";
        let label = value_with(product, "-MIG-1g.24gb-SHARED");
        assert_eq!(label, "NVIDIA-RTX-PRO-6000-Blackwell-Max-Q-Workstat-MIG-1g.24gb-SHARED");
        assert_eq!(label.len(), LONGEST);
    }

    #[test]
    fn truncated_value_ends_with_letter_or_digit() {
        let label = value(&format!("{} b", "a".repeat(62)));
        assert_eq!(label, "a".repeat(62));
        assert_eq!(value("-._x_.-"), "x");
        assert_eq!(value("(™)"), "");
    }

    /// The check of `kube-apiserver`.
    fn accepted(text: &str) -> bool {
        let ends = text.chars().next().zip(text.chars().last());
        text.len() <= 63
            && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
            && ends.is_none_or(|(first, last)| first.is_ascii_alphanumeric() && last.is_ascii_alphanumeric())
    }

    proptest! {
        #[test]
        fn value_of_any_text_is_accepted(text in "\\PC{0,90}", shared in any::<bool>()) {
            let made = value_with(&text, if shared { "-SHARED" } else { "" });
            prop_assert!(accepted(&made), "{made:?}");
            prop_assert!(!shared || made.ends_with("SHARED"), "{made:?}");
            let again = value(&made);
            prop_assert_eq!(again, made);
        }
    }
}
