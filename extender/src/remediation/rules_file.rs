//! The file with the rules. It is read again while the extender runs; a file that cannot be read leaves the rules before it
//! in effect.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gantry_config::source::text_of;
use gantry_config::{Problems, RemediationRules};

/// Why the file cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RulesFileError {
    /// It cannot be read.
    #[error("--remediation-rules: cannot read {path}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        source: io::Error,
    },
    /// Its text is no rules.
    #[error("--remediation-rules")]
    Invalid(#[from] Problems),
}

/// The rules in effect, and where they are from.
#[derive(Debug, Clone)]
pub(crate) struct RulesFile {
    path: PathBuf,
    rules: Arc<RemediationRules>,
    /// The text that was read last, also if it is no rules; `None` if it could not be read.
    text: Option<String>,
}

/// What a new look at the file has found.
#[derive(Debug)]
pub(crate) enum RulesChange {
    /// The text is the same, or still cannot be read.
    Unchanged,
    /// Other rules are in effect.
    Changed,
    /// The file has become unusable. Reported once.
    Failed(RulesFileError),
}

impl RulesFile {
    /// Reads the rules.
    ///
    /// # Errors
    /// See [`RulesFileError`].
    pub(crate) fn open(path: &Path) -> Result<Self, RulesFileError> {
        let text = read(path)?;
        let rules = Arc::new(parse(path, &text)?);
        Ok(Self { path: path.to_owned(), rules, text: Some(text) })
    }

    /// The rules in effect.
    pub(crate) fn rules(&self) -> &Arc<RemediationRules> {
        &self.rules
    }

    /// Reads the file again.
    pub(crate) fn reread(&mut self) -> RulesChange {
        let text = match read(&self.path) {
            Ok(text) => text,
            Err(error) => {
                return match self.text.take() {
                    Some(_) => RulesChange::Failed(error),
                    None => RulesChange::Unchanged,
                };
            }
        };
        if self.text.as_ref() == Some(&text) {
            return RulesChange::Unchanged;
        }
        let parsed = parse(&self.path, &text);
        self.text = Some(text);
        match parsed {
            Ok(rules) => {
                self.rules = Arc::new(rules);
                RulesChange::Changed
            }
            Err(error) => RulesChange::Failed(error),
        }
    }
}

fn read(path: &Path) -> Result<String, RulesFileError> {
    text_of(path).map_err(|source| RulesFileError::Read { path: path.to_owned(), source })
}

fn parse(path: &Path, text: &str) -> Result<RemediationRules, RulesFileError> {
    Ok(RemediationRules::read(&path.display().to_string(), text)?)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn rules(name: &str) -> String {
        format!("version: v1\nrules: [{{name: {name}, match: {{xids: [79]}}, action: cordon}}]\n")
    }

    fn names(file: &RulesFile) -> Vec<&str> {
        file.rules().rules.iter().map(|rule| rule.name.as_str()).collect()
    }

    /// A failure is reported once, and does not end what was in effect before.
    #[test]
    fn rules_before_a_bad_change_stay_in_effect() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rules.yaml");
        fs::write(&path, rules("a")).unwrap();
        let mut file = RulesFile::open(&path).unwrap();
        assert!(matches!(file.reread(), RulesChange::Unchanged));
        fs::write(&path, rules("b")).unwrap();
        assert!(matches!(file.reread(), RulesChange::Changed));
        assert_eq!(names(&file), ["b"]);
        fs::write(&path, rules("c").replace("cordon", "cordn")).unwrap();
        let RulesChange::Failed(error) = file.reread() else { panic!("a wrong action is accepted") };
        let text = gantry_runtime::chain(&error);
        insta::assert_snapshot!(text.replace(folder.path().to_str().unwrap(), ""), @r#"--remediation-rules: /rules.yaml: line 2: rules[0].action: "cordn" is not allowed; allowed: event, cordon, drain, reset, taint, condition, reboot; did you mean "cordon"?"#);
        assert!(matches!(file.reread(), RulesChange::Unchanged));
        fs::remove_file(&path).unwrap();
        assert!(matches!(file.reread(), RulesChange::Failed(RulesFileError::Read { .. })));
        assert!(matches!(file.reread(), RulesChange::Unchanged));
        assert_eq!(names(&file), ["b"]);
        fs::write(&path, rules("b")).unwrap();
        assert!(matches!(file.reread(), RulesChange::Changed));
    }

    #[test]
    fn long_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rules.yaml");
        fs::write(&path, " ".repeat(1 << 21)).unwrap();
        let text = gantry_runtime::chain(&RulesFile::open(&path).unwrap_err());
        insta::assert_snapshot!(text.replace(folder.path().to_str().unwrap(), ""), @"--remediation-rules: cannot read /rules.yaml: it is longer than 1048576 bytes");
    }
}
