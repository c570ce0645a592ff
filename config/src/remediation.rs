//! The rules of remediation: what the extender does about faults of GPUs, and within which limits. The file is read
//! strictly; without a file nothing is done.

use std::collections::BTreeSet;
use std::time::Duration;

use gantry_api::gpunode::PROBLEM_CAUSES;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::problem::Problems;
use crate::strict::{StrictReader, is_label_value, kind};
use crate::tree::{Branch, Node};
use crate::value::go_duration;

/// The version of the file.
const VERSION: &str = "v1";
/// Most rules of a file. Each is a label of metrics.
const MAX_RULES: usize = 64;
/// Most occurrences that a rate may count. The extender keeps their times on the GpuNode.
const MAX_COUNT: u64 = 16;
/// The longest window of a rate.
const MAX_WINDOW: Duration = Duration::from_secs(30 * 24 * 3600);
/// The largest Xid that a rule may name.
const MAX_XID: u64 = 9999;

/// The rules of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemediationRules {
    /// The limits of all rules together.
    pub limits: RemediationLimits,
    /// In the order of the file: earlier rules act first.
    pub rules: Vec<RemediationRule>,
}

/// What all rules together may withhold, and how often they may act.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemediationLimits {
    /// Nodes with a withheld GPU at once.
    pub nodes: Share,
    /// Withheld GPUs at once.
    pub gpus: Share,
    /// Actions within an hour.
    pub actions_per_hour: u32,
}

/// A number, or a part of what exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Share {
    Count(u32),
    Percent(u8),
}

/// What is done about a fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemediationRule {
    /// Its name in Events, metrics and annotations.
    pub name: String,
    /// Xids that match.
    pub xids: BTreeSet<u64>,
    /// Causes that match: [`PROBLEM_CAUSES`].
    pub causes: BTreeSet<String>,
    /// Faults of the GPU within the window before the action is taken.
    pub count: usize,
    /// The window of `count`.
    pub window: Duration,
    /// What is done.
    pub action: RemediationAction,
    /// Whether the action is only reported.
    pub dry_run: bool,
}

/// What a rule does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RemediationAction {
    /// Records an Event.
    Event,
    /// Withholds the GPU from new pods.
    Cordon,
    /// Cordons the GPU and evicts the pods that hold it.
    Drain,
    /// Drains the GPU, and has it reset once no pod holds it.
    Reset,
    /// Taints the Node, so that no new pod comes to it.
    Taint,
    /// Sets a condition of the Node.
    Condition,
    /// Requests a reboot by a condition of the Node.
    Reboot,
}

impl RemediationAction {
    /// Every action, by the word of the file.
    const ALL: [Self; 7] =
        [Self::Event, Self::Cordon, Self::Drain, Self::Reset, Self::Taint, Self::Condition, Self::Reboot];

    /// The word of the file.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Event => "event",
            Self::Cordon => "cordon",
            Self::Drain => "drain",
            Self::Reset => "reset",
            Self::Taint => "taint",
            Self::Condition => "condition",
            Self::Reboot => "reboot",
        }
    }
}

impl Share {
    /// The number of `total`. A percentage is rounded down, to 1 at least.
    pub fn of(self, total: usize) -> usize {
        match self {
            Self::Count(count) => count as usize,
            Self::Percent(0) => 0,
            Self::Percent(percent) => (total * usize::from(percent) / 100).max(1),
        }
    }
}

impl Default for RemediationLimits {
    fn default() -> Self {
        Self { nodes: Share::Percent(10), gpus: Share::Percent(10), actions_per_hour: 10 }
    }
}

impl RemediationRules {
    /// Reads the text of a file, YAML or JSON, called `source` in problems.
    ///
    /// # Errors
    /// All problems of the file.
    pub fn read(source: &str, text: &str) -> Result<Self, Problems> {
        StrictReader::read(source, text, |reader, root| Reader(reader).file(root))
    }
}

/// Reads the rules of a file.
struct Reader<'r>(&'r mut StrictReader);

impl Reader<'_> {
    fn file(&mut self, root: &Node) -> RemediationRules {
        let mut read = RemediationRules { limits: RemediationLimits::default(), rules: Vec::new() };
        let keys = ["version", "dryRun", "limits", "rules"];
        let Some(found) = self.0.keys(root, &keys, &["version", "rules"]) else {
            return read;
        };
        if let Some(version) = found.get("version")
            && version.value() != VERSION
        {
            let text = format!("{} is not a version that is read; write {VERSION}", version.value());
            self.0.invalid(version, text);
        }
        let dry_run = found.get("dryRun").and_then(|node| self.0.switch(node)).unwrap_or(true);
        if let Some(limits) = found.get("limits") {
            read.limits = self.limits(limits);
        }
        let rules = found.get("rules").map_or(&[][..], |node| self.0.list(node));
        if let Some(over) = rules.get(MAX_RULES) {
            self.0.invalid(over, format!("is one rule too many; a file has {MAX_RULES} at most"));
        }
        for node in rules.iter().take(MAX_RULES) {
            let Some(rule) = self.rule(node, dry_run) else {
                continue;
            };
            if read.rules.iter().any(|known| known.name == rule.name) {
                self.0.invalid(node, format!("has the name {:?} of an earlier rule", rule.name));
            }
            read.rules.push(rule);
        }
        read
    }

    fn limits(&mut self, node: &Node) -> RemediationLimits {
        let mut limits = RemediationLimits::default();
        let Some(found) = self.0.keys(node, &["nodes", "gpus", "actionsPerHour"], &[]) else {
            return limits;
        };
        if let Some(share) = found.get("nodes").and_then(|node| self.share(node)) {
            limits.nodes = share;
        }
        if let Some(share) = found.get("gpus").and_then(|node| self.share(node)) {
            limits.gpus = share;
        }
        if let Some(count) = found.get("actionsPerHour").and_then(|node| self.0.number(node, 0, 10_000)) {
            limits.actions_per_hour = u32::try_from(count).unwrap_or(u32::MAX);
        }
        limits
    }

    fn share(&mut self, node: &Node) -> Option<Share> {
        let share = match &node.branch {
            Branch::Leaf(Value::String(text)) => {
                let percent = text.strip_suffix('%').and_then(|number| number.parse().ok());
                percent.filter(|percent| *percent <= 100).map(Share::Percent)
            }
            Branch::Leaf(value) => {
                value.as_u64().and_then(|count| u32::try_from(count).ok()).map(Share::Count)
            }
            _ => None,
        };
        if share.is_none() {
            let text = format!("is {}, allowed is a whole number, or a share from 0% to 100%", kind(node));
            self.0.invalid(node, text);
        }
        share
    }

    fn rule(&mut self, node: &Node, dry_run: bool) -> Option<RemediationRule> {
        let keys = ["name", "match", "rate", "action", "dryRun"];
        let found = self.0.keys(node, &keys, &["name", "match", "action"])?;
        let name = found.get("name").and_then(|node| self.name(node));
        let matched = found.get("match").and_then(|node| self.matches(node));
        let rate = found.get("rate").map_or(Some((1, MAX_WINDOW)), |node| self.rate(node));
        let actions = RemediationAction::ALL.map(RemediationAction::as_str);
        let action = found.get("action").and_then(|node| self.0.word(node, &actions));
        let action = RemediationAction::ALL.into_iter().find(|known| Some(known.as_str()) == action);
        let dry_run = found.get("dryRun").map_or(Some(dry_run), |node| self.0.switch(node));
        let (xids, causes) = matched?;
        let (count, window) = rate?;
        Some(RemediationRule { name: name?, xids, causes, count, window, action: action?, dry_run: dry_run? })
    }

    fn name(&mut self, node: &Node) -> Option<String> {
        match &node.branch {
            Branch::Leaf(Value::String(name)) if is_label_value(name) => Some(name.clone()),
            _ => {
                let text = "is no name of a rule: at most 63 letters, digits, -, _ and ., with a letter or digit at both ends";
                self.0.invalid(node, format!("{} {text}", kind(node)));
                None
            }
        }
    }

    fn matches(&mut self, node: &Node) -> Option<(BTreeSet<u64>, BTreeSet<String>)> {
        let found = self.0.keys(node, &["xids", "causes"], &[])?;
        if found.is_empty() {
            self.0.invalid(node, "matches nothing; write xids, causes or both");
        }
        let xids = found.get("xids").map_or(&[][..], |node| self.0.list(node));
        let xids = xids.iter().filter_map(|node| self.0.number(node, 1, MAX_XID)).collect();
        let causes = found.get("causes").map_or(&[][..], |node| self.0.list(node));
        let causes = causes.iter().filter_map(|node| self.0.word(node, &PROBLEM_CAUSES));
        Some((xids, causes.map(str::to_owned).collect()))
    }

    fn rate(&mut self, node: &Node) -> Option<(usize, Duration)> {
        let found = self.0.keys(node, &["count", "window"], &["count", "window"])?;
        let count = found.get("count").and_then(|node| self.0.number(node, 1, MAX_COUNT));
        let window = found.get("window").and_then(|node| self.window(node));
        Some((usize::try_from(count?).ok()?, window?))
    }

    fn window(&mut self, node: &Node) -> Option<Duration> {
        let window = match &node.branch {
            Branch::Leaf(Value::String(text)) => go_duration(text).map(Duration::from_nanos),
            _ => None,
        };
        let window = window.filter(|window| (Duration::from_secs(1)..=MAX_WINDOW).contains(window));
        if window.is_none() {
            self.0.invalid(
                node,
                format!("is {}, allowed are durations from 1s to 720h, such as 24h", kind(node)),
            );
        }
        window
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(text: &str) -> Result<RemediationRules, String> {
        RemediationRules::read("rules.yaml", text).map_err(|problems| problems.to_string())
    }

    fn problem(rule: &str) -> String {
        read(&format!("version: v1\nrules:\n- {rule}\n")).unwrap_err()
    }

    #[test]
    fn rules_are_read_with_their_defaults() {
        let rules = read(
            "version: v1\ndryRun: false\nlimits: {nodes: 2, gpus: 5%, actionsPerHour: 3}\nrules:\n\
             - {name: off-the-bus, match: {xids: [79], causes: [lost]}, rate: {count: 2, window: 24h}, action: drain}\n\
             - {name: hot, match: {causes: [throttled-thermal]}, action: event, dryRun: true}\n",
        )
        .unwrap();
        let limits =
            RemediationLimits { nodes: Share::Count(2), gpus: Share::Percent(5), actions_per_hour: 3 };
        assert_eq!(rules.limits, limits);
        let [first, second] = &rules.rules[..] else { panic!("{rules:?}") };
        assert_eq!((first.count, first.window), (2, Duration::from_secs(24 * 3600)));
        assert_eq!((first.action, first.dry_run), (RemediationAction::Drain, false));
        assert!(first.xids.contains(&79) && first.causes.contains("lost"));
        assert_eq!((second.count, second.action, second.dry_run), (1, RemediationAction::Event, true));
    }

    /// A first file must not empty nodes.
    #[test]
    fn rule_without_dry_run_only_reports() {
        let rules = read("version: v1\nrules: [{name: a, match: {xids: [79]}, action: drain}]").unwrap();
        assert!(rules.rules[0].dry_run);
        assert_eq!(rules.limits, RemediationLimits::default());
    }

    #[test]
    fn problem_names_line_key_value_and_nearest() {
        let rules = [
            "{name: a, match: {xids: [79]}, action: cordn}",
            "{name: a, match: {xids: [0]}, action: event}",
            "{name: a, match: {causes: [losst]}, action: event}",
            "{name: a, match: {}, action: event}",
            "{name: a, match: {xids: []}, action: event}",
            "{name: a b, match: {xids: [79]}, action: event}",
            "{name: a, match: {xids: [79]}, rate: {count: 99, window: 1h}, action: event}",
            "{name: a, match: {xids: [79]}, rate: {count: 2, window: 1y}, action: event}",
            "{name: a, match: {xids: [79]}, rate: {count: 2}, action: event}",
            "{name: a, match: {xids: [79]}, action: event, dryrun: true}",
            "{name: a, match: {xids: [79]}, action: event, dryRun: 1}",
            "{name: a, action: event}",
        ];
        insta::assert_snapshot!(rules.map(problem).join("\n"), @r#"
        rules.yaml: line 3: rules[0].action: "cordn" is not allowed; allowed: event, cordon, drain, reset, taint, condition, reboot; did you mean "cordon"?
        rules.yaml: line 3: rules[0].match.xids[0]: is 0, allowed are whole numbers from 1 to 9999
        rules.yaml: line 3: rules[0].match.causes[0]: "losst" is not allowed; allowed: xid-fatal, xid-resettable, xid-link, xid-mig-instance, xid-application, ecc-uncorrected, memory-repair-pending, memory-repair-failed, nvlinks-down, fabric, compute-mode, query-failed, lost, recovery-action, nvml, driver, throttled-thermal, throttled-power-brake, throttled-hardware; did you mean "lost"?
        rules.yaml: line 3: rules[0].match: matches nothing; write xids, causes or both
        rules.yaml: line 3: rules[0].match.xids: is an empty list, and must be a list with at least one item
        rules.yaml: line 3: rules[0].name: "a b" is no name of a rule: at most 63 letters, digits, -, _ and ., with a letter or digit at both ends
        rules.yaml: line 3: rules[0].rate.count: is 99, allowed are whole numbers from 1 to 16
        rules.yaml: line 3: rules[0].rate.window: is "1y", allowed are durations from 1s to 720h, such as 24h
        rules.yaml: line 3: rules[0].rate: window is missing
        rules.yaml: line 3: rules[0].dryrun: there is no such key; allowed: name, match, rate, action, dryRun; did you mean "dryRun"?
        rules.yaml: line 3: rules[0].dryRun: is 1, allowed is true or false
        rules.yaml: line 3: rules[0]: match is missing
        "#);
        let twice = problem(
            "{name: a, match: {xids: [79]}, action: event}\n- {name: a, match: {xids: [48]}, action: event}",
        );
        insta::assert_snapshot!(twice, @r#"rules.yaml: line 4: rules[1]: has the name "a" of an earlier rule"#);
        let files = [
            "version: v2\nrules: [{name: a, match: {xids: [79]}, action: event}]",
            "version: v1\nrules: []",
            "version: v1\nlimits: {gpus: 101%}\nrules: [{name: a, match: {xids: [1]}, action: event}]",
            "[]",
            "version: v1\nrules: 3\n---\nversion: v1",
        ];
        insta::assert_snapshot!(files.map(|text| read(text).unwrap_err()).join("\n"), @r#"
        rules.yaml: line 1: version: "v2" is not a version that is read; write v1
        rules.yaml: line 2: rules: is an empty list, and must be a list with at least one item
        rules.yaml: line 2: limits.gpus: is "101%", allowed is a whole number, or a share from 0% to 100%
        rules.yaml: line 1: is an empty list, and must be a map with version, dryRun, limits, rules
        rules.yaml: 2 problems: line 2: rules: is 3, and must be a list with at least one item; line 4: another YAML document begins here; the file is one document
        "#);
    }

    #[test]
    fn share_of_something_is_at_least_one() {
        assert_eq!([0, 5, 100, 1000].map(|total| Share::Percent(10).of(total)), [1, 1, 10, 100]);
        assert_eq!(Share::Percent(0).of(100), 0);
        assert_eq!(Share::Count(3).of(1), 3);
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "\\PC{0,200}") {
            let _ = read(&text);
        }
    }
}
