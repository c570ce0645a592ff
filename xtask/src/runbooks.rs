//! The sections of `docs/runbooks/`: one for every reason and every condition type. A heading names what it is about:
//! `## Bound, GangBound` two reasons, `## Condition Spares: SparesMissing` a condition type and a reason,
//! `## Conditions Reserved, Bound` two condition types.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Context as _, Result, ensure};
use gantry_api::{ConditionType, Reason};

use crate::run::root;

/// The pages, below `docs/`.
const PAGES: [&str; 3] = ["runbooks/gangs.md", "runbooks/pods.md", "runbooks/nodes.md"];

/// What a section is about.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Topic {
    Condition(String),
    Reason(String),
}

impl fmt::Display for Topic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Condition(name) => write!(f, "condition {name}"),
            Self::Reason(name) => write!(f, "reason {name}"),
        }
    }
}

impl From<Reason> for Topic {
    fn from(reason: Reason) -> Self {
        Self::Reason(reason.to_string())
    }
}

impl From<ConditionType> for Topic {
    fn from(condition: ConditionType) -> Self {
        Self::Condition(condition.to_string())
    }
}

/// Where each topic is explained: a page below `docs/`, with the anchor of the section.
#[derive(Debug, Default)]
pub(crate) struct Sections(BTreeMap<Topic, String>);

impl Sections {
    /// Reads the pages. Fails if a reason or a condition type has no section or two, and if a section names something
    /// else.
    pub(crate) fn read() -> Result<Self> {
        let mut sections = Self::default();
        for page in PAGES {
            let path = root().join("docs").join(page);
            let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            sections.add(page, &text)?;
        }
        sections.check()?;
        Ok(sections)
    }

    fn add(&mut self, page: &str, text: &str) -> Result<()> {
        let prose = text.split("```").step_by(2);
        for heading in prose.flat_map(str::lines).filter_map(|line| line.strip_prefix("## ")) {
            let target = format!("{page}#{}", anchor(heading));
            for topic in topics(heading) {
                let other = self.0.insert(topic.clone(), target.clone());
                ensure!(
                    other.is_none(),
                    "docs/{target} is the second section of {topic}, after docs/{}",
                    other.unwrap_or_default()
                );
            }
        }
        Ok(())
    }

    fn check(&self) -> Result<()> {
        let reasons = Reason::ALL.iter().map(|reason| Topic::from(*reason));
        let conditions = ConditionType::ALL.iter().map(|condition| Topic::from(*condition));
        let known: Vec<Topic> = reasons.chain(conditions).collect();
        let names =
            |topics: Vec<&Topic>| topics.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let missing: Vec<&Topic> = known.iter().filter(|topic| !self.0.contains_key(topic)).collect();
        ensure!(missing.is_empty(), "docs/runbooks/ has no section of {}", names(missing));
        let unknown: Vec<&Topic> = self.0.keys().filter(|topic| !known.contains(topic)).collect();
        ensure!(
            unknown.is_empty(),
            "docs/runbooks/ has sections of what api/src/reason.rs and api/src/condition.rs lack: {}",
            names(unknown)
        );
        Ok(())
    }

    /// The section of a reason.
    pub(crate) fn of_reason(&self, reason: Reason) -> &str {
        self.of(&reason.into())
    }

    /// The section of a condition type.
    pub(crate) fn of_condition(&self, condition: ConditionType) -> &str {
        self.of(&condition.into())
    }

    fn of(&self, topic: &Topic) -> &str {
        self.0.get(topic).map_or("", String::as_str)
    }
}

/// What a heading names.
fn topics(heading: &str) -> Vec<Topic> {
    let conditions = heading.strip_prefix("Conditions ").or_else(|| heading.strip_prefix("Condition "));
    let (conditions, reasons) = match conditions {
        Some(names) => names.split_once(": ").unwrap_or((names, "")),
        None => ("", heading),
    };
    let list = |names: &str| -> Vec<String> {
        names.split(", ").filter(|name| !name.is_empty()).map(str::to_owned).collect()
    };
    let conditions = list(conditions).into_iter().map(Topic::Condition);
    conditions.chain(list(reasons).into_iter().map(Topic::Reason)).collect()
}

/// The anchor that GitHub and mdBook make of a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.to_lowercase().replace(' ', "-");
    kept.chars().filter(|ch| ch.is_alphanumeric() || ['-', '_'].contains(ch)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_and_condition_has_one_section() {
        Sections::read().unwrap();
    }

    #[test]
    fn heading_names_reasons_and_conditions() {
        let shown = |heading| topics(heading).iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(shown("Bound, GangBound"), ["reason Bound", "reason GangBound"]);
        assert_eq!(shown("Conditions Reserved, Bound"), ["condition Reserved", "condition Bound"]);
        assert_eq!(
            shown("Condition Spares: SparesReserved, SparesMissing"),
            ["condition Spares", "reason SparesReserved", "reason SparesMissing"]
        );
        assert_eq!(
            anchor("Condition gantry.dev/GpusFreed: GpusFreed"),
            "condition-gantrydevgpusfreed-gpusfreed"
        );
    }

    /// A page with a section for everything, but for what `change` makes of its headings.
    fn read(change: impl Fn(&str) -> String) -> Result<()> {
        let reasons = Reason::ALL.iter().map(ToString::to_string);
        let conditions = ConditionType::ALL.iter().map(|condition| format!("Condition {condition}"));
        let headings = reasons.chain(conditions).map(|heading| format!("## {heading}\n"));
        let mut sections = Sections::default();
        sections.add("p.md", &change(&headings.collect::<String>()))?;
        sections.check()
    }

    #[test]
    fn missing_unknown_and_double_sections_are_named() {
        read(str::to_owned).unwrap();
        let error = |change: &dyn Fn(&str) -> String| read(change).unwrap_err().to_string();
        let missing = error(&|page| page.replace("## Backoff\n", ""));
        assert_eq!(missing, "docs/runbooks/ has no section of reason Backoff");
        let missing = error(&|page| page.replace("## Condition Spares\n", "## Spare parts\n"));
        assert_eq!(missing, "docs/runbooks/ has no section of condition Spares");
        let unknown = error(&|page| format!("{page}## Condition Spares2: Backof\n"));
        assert_eq!(
            unknown,
            "docs/runbooks/ has sections of what api/src/reason.rs and api/src/condition.rs lack: condition Spares2, reason Backof"
        );
        let double = error(&|page| format!("{page}## Backoff\n"));
        assert_eq!(
            double,
            "docs/p.md#backoff is the second section of reason Backoff, after docs/p.md#backoff"
        );
        // What stands in a block of code is no section.
        read(|page| format!("{page}```\n## Nothing\n```\n")).unwrap();
    }
}
