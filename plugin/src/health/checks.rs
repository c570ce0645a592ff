//! The operator's selection of Xids, read from two variables with the syntax and meaning of
//! `DP_DISABLE_HEALTHCHECKS` and `DP_ENABLE_HEALTHCHECKS` of NVIDIA's plugin.

use std::collections::BTreeSet;
use std::str::FromStr;

use super::Class;

/// A list of Xids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum XidList {
    All,
    Some(BTreeSet<u64>),
}

/// A word that is not allowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{word:?} is not a health check; write all, xids, or Xid numbers separated by commas, such as 48,79")]
pub struct XidListError {
    pub word: String,
}

/// Selects the Xids that make a GPU unhealthy.
///
/// An enabled Xid always counts, even an application Xid and even if all are disabled. A disabled Xid does not
/// count. Any other Xid counts by its class.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HealthChecks {
    /// `DP_DISABLE_HEALTHCHECKS`.
    pub disabled: XidList,
    /// `DP_ENABLE_HEALTHCHECKS`.
    pub enabled: XidList,
    /// What a GPU counts as that the NVLink fabric does not serve.
    pub fabric: FabricCheck,
    /// Whether the fabric manager serves partitions (`FABRIC_MODE=1`), so that a registration in progress is normal.
    pub shared_fabric: bool,
}

/// What a GPU counts as that the NVLink fabric does not serve.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum FabricCheck {
    /// It is not allocated
    #[default]
    Unhealthy,
    /// It is reported only
    Degraded,
    /// It is not looked at
    Ignore,
}

impl HealthChecks {
    /// Whether no Xid is watched: all are disabled and none enabled. A lost GPU or a missing driver still
    /// counts, because such a GPU cannot be used.
    pub fn is_off(&self) -> bool {
        self.disabled == XidList::All && self.enabled.is_empty()
    }

    /// The effective class of Xid `code` with class `class`; `None` if it is not watched.
    pub fn judge(&self, code: u64, class: Class) -> Option<Class> {
        if self.enabled.contains(code) {
            // An application Xid leaves no known damage, but the operator enabled it.
            return Some(match class {
                Class::Application => Class::Resettable,
                Class::Link { .. } => Class::Link { reset: true },
                class => class,
            });
        }
        (!self.disabled.contains(code)).then_some(class)
    }

    /// Whether Xid `code` is watched, where NVML also reports its condition as a state.
    pub fn watches(&self, code: u64) -> bool {
        self.judge(code, Class::Resettable).is_some()
    }
}

impl XidList {
    /// Whether `code` is listed.
    pub fn contains(&self, code: u64) -> bool {
        match self {
            Self::All => true,
            Self::Some(codes) => codes.contains(&code),
        }
    }

    /// Whether nothing is listed.
    pub fn is_empty(&self) -> bool {
        match self {
            Self::All => false,
            Self::Some(codes) => codes.is_empty(),
        }
    }
}

impl Default for XidList {
    fn default() -> Self {
        Self::Some(BTreeSet::new())
    }
}

impl FromStr for XidList {
    type Err = XidListError;

    /// Parses `all`, `xids` (equivalent, because there are no other checks), Xid numbers, or nothing.
    fn from_str(text: &str) -> Result<Self, XidListError> {
        let mut codes = BTreeSet::new();
        let mut all = false;
        for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
            match word.to_ascii_lowercase().as_str() {
                "all" | "xids" => all = true,
                number => {
                    codes.insert(number.parse().map_err(|_| XidListError { word: word.to_owned() })?);
                }
            }
        }
        Ok(if all { Self::All } else { Self::Some(codes) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checks(disabled: &str, enabled: &str) -> HealthChecks {
        HealthChecks {
            disabled: disabled.parse().unwrap(),
            enabled: enabled.parse().unwrap(),
            ..HealthChecks::default()
        }
    }

    /// The unhealthy ones of a few Xids of each class.
    fn unhealthy(checks: &HealthChecks) -> Vec<u64> {
        let classes = [
            (13, Class::Application),
            (31, Class::Application),
            (48, Class::MigInstance),
            (74, Class::Link { reset: false }),
            (79, Class::Fatal),
            (95, Class::Resettable),
        ];
        let counts = |(code, class)| checks.judge(code, class).is_some_and(Class::is_unhealthy);
        classes.into_iter().filter(|one| counts(*one)).map(|(code, _)| code).collect()
    }

    #[test]
    fn check_lists_combine_as_nvidia_documents() {
        for (disabled, enabled, expected) in [
            ("", "", &[48, 79, 95][..]),
            (" 48, 79 ,", "", &[95]),
            ("all", "", &[]),
            ("xids", "", &[]),
            ("XIDS,48", "", &[]),
            // Enabling overrides disabling and the class.
            ("48", "48", &[48, 79, 95]),
            ("", "13", &[13, 48, 79, 95]),
            // All disabled and some enabled: only those are watched.
            ("all", "48", &[48]),
            ("all", "31,79", &[31, 79]),
            ("all", "all", &[13, 31, 48, 74, 79, 95]),
            ("48", "all", &[13, 31, 48, 74, 79, 95]),
        ] {
            assert_eq!(unhealthy(&checks(disabled, enabled)), expected, "-{disabled:?} +{enabled:?}");
        }
    }

    #[test]
    fn checks_are_off_if_all_disabled_and_none_enabled() {
        assert!(checks("all", "").is_off() && checks("xids", " ").is_off());
        assert!(!checks("all", "48").is_off());
        assert!(!checks("all", "all").is_off());
        assert!(!checks("48", "").is_off());
        assert!(!HealthChecks::default().is_off());
    }

    #[test]
    fn invalid_check_is_named() {
        let error = "48,ecc".parse::<XidList>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "\"ecc\" is not a health check; write all, xids, or Xid numbers separated by commas, such as 48,79"
        );
    }
}
