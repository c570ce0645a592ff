//! The language lint: the words that CONTRIBUTING.md excludes, in comments, messages and Markdown; names outside the
//! glossary in the public API and the metrics; names of tests that are too long.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::process::Command;

use anyhow::{Context, Result, bail};
use regex_lite::Regex;

use crate::run::{output, root};
use crate::source::{Piece, Source};

/// Words that make a sentence hard to read: pronouns as subjects, and archaic adverbs.
const WORDS: &str = r"(?i)\b(who|whom|whose|whoever|nobody|somebody|anew|besides|whence|hence|thereof|(?:is|are) to be had)\b";
/// Names that were replaced: as words of identifiers and texts of the public API and the metrics.
const RETIRED: &str = r"\b(Collecting|Planned|Repairing|Hindered|Contested|GangHindered|GangContested|GangCollecting|GangPlanned|GangRepairing)\b|gang_places|[Dd]ialect|[Ee]armark";
/// Label values that were replaced; only as whole string literals, because they are English words.
const RETIRED_VALUES: [&str; 8] =
    ["alone", "undecided", "moot", "untouched", "Done", "collecting", "planned", "repairing"];
/// Paths that the glossary holds for.
const PUBLIC: [&str; 5] = [
    "api/src/",
    "plugin/src/observe/metrics.rs",
    "extender/src/metrics.rs",
    "docs/metrics.md",
    "manifests/crds.yaml",
];
/// The longest name of a test.
const NAME: usize = 60;
/// Hits in 1,000 words that are tolerated in each category.
const LIMITS: [(Category, f64); 3] =
    [(Category::Comments, 1.5), (Category::Messages, 1.5), (Category::Markdown, 1.5)];

/// Where prose stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Category {
    /// Comments of product code.
    Comments,
    /// String literals of product code.
    Messages,
    /// Markdown files.
    Markdown,
}

/// A place that breaks a rule.
#[derive(Debug, PartialEq, Eq)]
struct Hit {
    file: String,
    line: usize,
    what: String,
}

#[derive(Debug, Default)]
struct Findings {
    /// Words read and excluded words found, by category.
    prose: BTreeMap<Category, (usize, Vec<Hit>)>,
    long_names: Vec<Hit>,
    retired: Vec<Hit>,
}

/// Prints each hit in the files whose path contains `filter`, and the rates.
pub(crate) fn report(filter: &str) -> Result<()> {
    let findings = Findings::of_tree(filter)?;
    for hit in findings.all() {
        println!("{hit}");
    }
    println!("{findings}");
    Ok(())
}

/// Fails if a limit is exceeded, and prints the hits that count towards it.
pub(crate) fn check() -> Result<()> {
    let findings = Findings::of_tree("")?;
    let mut failed = false;
    let mut hold = |within: bool, hits: &[Hit]| {
        if !within {
            failed = true;
            hits.iter().for_each(|hit| println!("{hit}"));
        }
    };
    for (category, limit) in LIMITS {
        if let Some((_, hits)) = findings.prose.get(&category) {
            hold(findings.rate(category) <= limit, hits);
        }
    }
    hold(findings.long_names.is_empty(), &findings.long_names);
    hold(findings.retired.is_empty(), &findings.retired);
    println!("{findings}");
    if failed {
        bail!("the words above exceed a limit of xtask/src/words.rs; see CONTRIBUTING.md, Language");
    }
    Ok(())
}

impl Findings {
    fn of_tree(filter: &str) -> Result<Self> {
        let listed = output(Command::new("git").current_dir(root()).args([
            "ls-files",
            "--cached",
            "--others",
            "--exclude-standard",
        ]))?;
        let rules = Rules::new()?;
        let mut findings = Self::default();
        for file in listed.lines().filter(|file| file.contains(filter)) {
            // A file that was deleted is listed until that is committed.
            let path = root().join(file);
            if path.is_file() && [".rs", ".md", ".yaml"].iter().any(|end| file.ends_with(end)) {
                let text = fs::read_to_string(&path).with_context(|| format!("cannot read {file}"))?;
                findings.read(file, &text, &rules);
            }
        }
        Ok(findings)
    }

    fn read(&mut self, file: &str, text: &str, rules: &Rules) {
        let is_public = PUBLIC.iter().any(|path| file.starts_with(path));
        if !file.ends_with(".rs") {
            for (line, text) in (1..).zip(text.lines()) {
                if file.ends_with(".md") {
                    self.prose(Category::Markdown, file, line, text, rules);
                }
                if is_public {
                    self.names(file, line, text, rules);
                }
            }
            return;
        }
        let source = Source::new(text);
        for (line, name) in source.tests().filter(|(_, name)| name.len() > NAME) {
            self.long_names.push(Hit::new(file, line, format!("{name} has {} characters", name.len())));
        }
        if is_for_tests(file) {
            return;
        }
        for (line, piece) in source.product() {
            match piece {
                Piece::Comment(text) => self.prose(Category::Comments, file, line, text, rules),
                Piece::Text(text) => self.prose(Category::Messages, file, line, text, rules),
                Piece::Name(_) => {}
            }
            match piece {
                Piece::Text(text) | Piece::Name(text) if is_public => self.names(file, line, text, rules),
                _ => {}
            }
        }
    }

    fn prose(&mut self, category: Category, file: &str, first: usize, text: &str, rules: &Rules) {
        let (words, hits) = self.prose.entry(category).or_default();
        *words += rules.word.find_iter(text).count();
        hits.extend(rules.excluded.find_iter(text).map(|found| {
            let line = first + text[..found.start()].matches('\n').count();
            Hit::new(file, line, found.as_str().to_owned())
        }));
    }

    fn names(&mut self, file: &str, line: usize, text: &str, rules: &Rules) {
        let found = rules.retired.find(text).map(|found| found.as_str());
        let value = RETIRED_VALUES.into_iter().find(|value| text == *value);
        let hit = found.or(value);
        self.retired.extend(hit.map(|name| Hit::new(file, line, format!("{name} is a retired name"))));
    }

    /// Hits in 1,000 words.
    fn rate(&self, category: Category) -> f64 {
        let Some((words, hits)) = self.prose.get(&category) else {
            return 0.0;
        };
        #[expect(clippy::cast_precision_loss, reason = "far fewer words than 2^52")]
        let rate = 1000.0 * hits.len() as f64 / (*words).max(1) as f64;
        rate
    }

    fn all(&self) -> impl Iterator<Item = &Hit> {
        let prose = self.prose.values().flat_map(|(_, hits)| hits);
        prose.chain(&self.long_names).chain(&self.retired)
    }
}

impl fmt::Display for Findings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (category, limit) in LIMITS {
            let (words, hits) =
                self.prose.get(&category).map_or((0, 0), |(words, hits)| (*words, hits.len()));
            let rate = self.rate(category);
            writeln!(
                f,
                "{category:?}: {hits} excluded words in {words}, {rate:.2} in 1,000 (limit {limit})"
            )?;
        }
        writeln!(f, "tests with a name longer than {NAME} characters: {}", self.long_names.len())?;
        write!(f, "retired names in the API and the metrics: {}", self.retired.len())
    }
}

impl Hit {
    fn new(file: &str, line: usize, what: String) -> Self {
        Self { file: file.to_owned(), line, what }
    }
}

impl fmt::Display for Hit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file, self.line, self.what)
    }
}

struct Rules {
    word: Regex,
    excluded: Regex,
    retired: Regex,
}

impl Rules {
    fn new() -> Result<Self> {
        Ok(Self {
            word: Regex::new("[A-Za-z]+")?,
            excluded: Regex::new(WORDS)?,
            retired: Regex::new(RETIRED)?,
        })
    }
}

/// Whether a file of Rust is no product code.
fn is_for_tests(file: &str) -> bool {
    let mut parts = file.split('/').rev();
    let name = parts.next().unwrap_or_default();
    matches!(name, "tests.rs" | "fixtures.rs")
        || name.ends_with("_tests.rs")
        || parts.any(|folder| matches!(folder, "tests" | "fuzz"))
        // The lint itself lists the words.
        || file == "xtask/src/words.rs"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(file: &str, text: &str) -> Findings {
        let mut findings = Findings::default();
        findings.read(file, text, &Rules::new().unwrap());
        findings
    }

    fn hits(findings: &Findings) -> Vec<String> {
        findings.all().map(Hit::to_string).collect()
    }

    #[test]
    fn product_code_is_searched_for_words_and_tests_are_not() {
        let text = "/// Whoever asks.\nfn f() {\n    // There is room.\n    g(\"one\\\n       nobody has\"); // anew\n}\n\n\
                    #[cfg(test)]\nmod tests {\n    // Whose?\n}\n";
        let found = findings("a/src/lib.rs", text);
        assert_eq!(
            hits(&found),
            ["a/src/lib.rs:1: Whoever", "a/src/lib.rs:5: anew", "a/src/lib.rs:5: nobody"]
        );
        assert!((found.rate(Category::Messages) - 1000.0 / 3.0).abs() < 1.0);
        assert!(hits(&findings("a/tests/b.rs", text)).is_empty());
    }

    #[test]
    fn names_are_checked_in_the_api_and_metrics_only() {
        let text =
            "enum Phase { Planned }\nconst NAME: &str = \"gantry_gang_places\";\nlet label = \"moot\";\n";
        assert_eq!(
            hits(&findings("api/src/gang.rs", text)),
            [
                "api/src/gang.rs:1: Planned is a retired name",
                "api/src/gang.rs:2: gang_places is a retired name",
                "api/src/gang.rs:3: moot is a retired name"
            ]
        );
        assert!(hits(&findings("gang/src/lib.rs", text)).is_empty());
    }

    #[test]
    fn test_names_are_measured_in_every_file() {
        let long = "x".repeat(61);
        let text = format!(
            "#[tokio::test(start_paused = true)]\n#[ignore]\nasync fn {long}() {{}}\nfn {long}() {{}}\n"
        );
        assert_eq!(
            hits(&findings("a/tests/b.rs", &text)),
            [format!("a/tests/b.rs:3: {long} has 61 characters")]
        );
    }
}
