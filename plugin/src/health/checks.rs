//! The operator's exceptions: which Xids do not count. Read from one text, the form NVIDIA's plugin takes in
//! `DP_DISABLE_HEALTHCHECKS`, so that manifests need not change.

use std::collections::BTreeSet;
use std::str::FromStr;

/// Which Xids make a GPU unhealthy, as far as the operator decides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HealthChecks {
    /// No Xid is watched. A GPU that is lost and a driver that is gone still count: such a GPU cannot be used.
    Off,
    /// All are watched but these.
    Except(BTreeSet<u64>),
}

/// A word that is none of those allowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{word:?} is no health check; write all, xids, or Xid numbers with commas, such as 48,79")]
pub struct HealthChecksError {
    /// The word.
    pub word: String,
}

impl HealthChecks {
    /// Whether Xid `code` is watched.
    pub fn watches(&self, code: u64) -> bool {
        match self {
            Self::Off => false,
            Self::Except(codes) => !codes.contains(&code),
        }
    }
}

impl Default for HealthChecks {
    /// All Xids are watched.
    fn default() -> Self {
        Self::Except(BTreeSet::new())
    }
}

impl FromStr for HealthChecks {
    type Err = HealthChecksError;

    /// Reads which checks are disabled: `all`, `xids` (the same, there are no others), Xid numbers, or nothing.
    fn from_str(text: &str) -> Result<Self, HealthChecksError> {
        let mut codes = BTreeSet::new();
        let mut off = false;
        for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
            match word.to_ascii_lowercase().as_str() {
                "all" | "xids" => off = true,
                number => {
                    codes.insert(number.parse().map_err(|_| HealthChecksError {
                        word: word.to_owned(),
                    })?);
                }
            }
        }
        Ok(if off { Self::Off } else { Self::Except(codes) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_disabled_watches_all() {
        assert_eq!("".parse(), Ok(HealthChecks::default()));
        assert!(HealthChecks::default().watches(79));
    }

    #[test]
    fn numbers_disable_themselves_alone() {
        let checks: HealthChecks = " 48, 79 ,".parse().unwrap();
        assert!(!checks.watches(48) && !checks.watches(79) && checks.watches(74));
    }

    #[test]
    fn all_and_xids_disable_every_xid() {
        for text in ["all", "xids", "XIDS,48"] {
            assert_eq!(text.parse(), Ok(HealthChecks::Off), "{text}");
        }
        assert!(!HealthChecks::Off.watches(79));
    }

    #[test]
    fn a_word_that_is_no_check_is_named() {
        let error = "48,ecc".parse::<HealthChecks>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "\"ecc\" is no health check; write all, xids, or Xid numbers with commas, such as 48,79"
        );
    }
}
