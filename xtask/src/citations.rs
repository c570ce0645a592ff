//! Tests that documents name as proof must be there: a renamed test would leave a claim without one. And every item of COMPATIBILITY.md
//! has a row in the document that names the tests.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::run::root;

/// What is claimed: tables whose first column names an item.
const ITEMS: &str = "COMPATIBILITY.md";
/// The tests of each item, as `file::name` or, after another in the same cell, `::name`.
const TESTS: &str = "docs/compatibility-tests.md";

/// Fails if a document names a test that is not in the file it names, or something there that is no test; or if the two do not have the
/// same items.
pub(crate) fn check() -> Result<()> {
    let text = |document: &str| {
        std::fs::read_to_string(root().join(document)).with_context(|| format!("cannot read {document}"))
    };
    let (claims, proofs) = (text(ITEMS)?, text(TESTS)?);
    let mut missing = Vec::new();
    let mut count = 0;
    for (document, text) in [(ITEMS, &claims), (TESTS, &proofs)] {
        for citation in citations(text) {
            count += 1;
            let read = |file: &Path| std::fs::read_to_string(root().join(file)).unwrap_or_default();
            let file = Path::new(citation.file);
            let main =
                read(&file.with_file_name("main.rs")) + scenarios(&read(&file.with_file_name("mod.rs")));
            if !is_test(&read(file), citation.name) && !is_trial(&read(file), &main, &citation) {
                missing.push(format!("{document}: {}::{}", citation.file, citation.name));
            }
        }
    }
    if !missing.is_empty() {
        bail!(
            "documents name tests that are not there, or that are no tests:\n{}",
            missing.join("\n")
        );
    }
    let differences = differences(&claims, &proofs);
    if !differences.is_empty() {
        bail!(
            "{ITEMS} and {TESTS} do not have the same items:\n{}",
            differences.join("\n")
        );
    }
    println!("all {count} tests that documents name are there");
    Ok(())
}

/// The items that only one of the two documents has.
fn differences(claims: &str, proofs: &str) -> Vec<String> {
    let (claims, proofs) = (items(claims), items(proofs));
    let only =
        |document: &str, (section, item): &(&str, &str)| format!("only in {document}, {section}: {item}");
    let claimed = claims.difference(&proofs).map(|item| only(ITEMS, item));
    let proved = proofs.difference(&claims).map(|item| only(TESTS, item));
    claimed.chain(proved).collect()
}

/// What stands in the first column of tables, each after the title of its section.
fn items(text: &str) -> BTreeSet<(&str, &str)> {
    let mut section = "";
    let mut found = BTreeSet::new();
    for line in text.lines() {
        if line.starts_with('#') {
            section = line.trim_start_matches('#').trim();
        } else if let Some((item, _)) = line.strip_prefix("| ").and_then(|row| row.split_once(" |"))
            && item != "item"
        {
            found.insert((section, item));
        }
    }
    found
}

/// A test that a document names.
#[derive(Debug, PartialEq, Eq)]
struct Citation<'t> {
    file: &'t str,
    name: &'t str,
}

fn citations(text: &str) -> Vec<Citation<'_>> {
    let mut found = Vec::new();
    for line in text.lines() {
        let mut file = None;
        for word in line.split([' ', ',', '|', '(', ')']) {
            let Some((path, name)) = word.split_once("::") else {
                continue;
            };
            if path.ends_with(".rs") {
                file = Some(path);
            }
            if let Some(file) = file.filter(|_| path.is_empty() || path.ends_with(".rs")) {
                found.push(Citation { file, name });
            }
        }
    }
    found
}

/// Whether `source` has a function of this name that is marked as a test; those of proptest are marked alike.
fn is_test(source: &str, name: &str) -> bool {
    let definition = format!("fn {name}(");
    let lines: Vec<&str> = source.lines().map(str::trim).collect();
    lines.iter().enumerate().any(|(at, line)| {
        line.contains(&definition)
            && lines[..at]
                .iter()
                .rev()
                .take_while(|above| above.starts_with('#') || above.starts_with("//"))
                .any(|above| *above == "#[test]" || above.starts_with("#[tokio::test"))
    })
}

/// The end-to-end scenarios that the head of their folder lists, each as `module::name`.
fn scenarios(head: &str) -> &str {
    head.split_once("scenarios![\n")
        .and_then(|(_, rest)| rest.split_once("\n    ]"))
        .map_or("", |(list, _)| list)
}

/// Whether it is played by a test program of our own (`harness = false`): listed among the stories of its file, given to a trial by
/// the program's main file, or one of the scenarios.
fn is_trial(source: &str, main: &str, citation: &Citation<'_>) -> bool {
    let name = citation.name;
    let is_there = source.contains(&format!("fn {name}("));
    let listed = source
        .split_once("stories![")
        .and_then(|(_, rest)| rest.split_once(']'))
        .is_some_and(|(list, _)| list.split(',').any(|story| story.trim() == name));
    let module = Path::new(citation.file).file_stem().unwrap_or_default();
    let called = format!("{}::{name}", module.to_string_lossy());
    let given = main.lines().any(|line| {
        let mut words = line.split(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':'));
        words.any(|word| word == called)
    });
    is_there && (listed || given)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_names_several_tests_of_one_file() {
        assert_eq!(
            citations("| x `a::b` | same | p/a.rs::one, ::two |\n| y | | q/b.rs::three (reads back) |"),
            [("p/a.rs", "one"), ("p/a.rs", "two"), ("q/b.rs", "three")]
                .map(|(file, name)| Citation { file, name })
        );
    }

    #[test]
    fn an_item_stands_in_both_documents_under_the_same_title() {
        let claims = "# x\n### One\n| item | Gantry | note |\n|---|---|---|\n| a `b` | same | |\n| c | missing | no |\n";
        let proofs = |c: &str| format!("## One\n| item | test |\n|---|---|\n| a `b` | p/a.rs::one |\n{c}");
        assert_eq!(
            differences(claims, &proofs("| c | none |\n")),
            Vec::<String>::new()
        );
        assert_eq!(
            differences(claims, &proofs("## Two\n| c | none |\n")),
            [
                "only in COMPATIBILITY.md, One: c",
                "only in docs/compatibility-tests.md, Two: c"
            ]
        );
    }

    #[test]
    fn a_test_is_marked_as_one() {
        let source = "
            #[test]
            fn plain() {}
            /// What it is for.
            #[tokio::test(flavor = \"multi_thread\")]
            #[ignore]
            async fn of_tokio() {}
            fn helper() {}
            #[inline]
            fn helps_too() { plain() }
        ";
        for (name, expected) in [
            ("plain", true),
            ("of_tokio", true),
            ("helper", false),
            ("helps_too", false),
            ("nowhere", false),
        ] {
            assert_eq!(is_test(source, name), expected, "{name}");
        }
    }

    #[test]
    fn a_scenario_is_listed_in_the_head_of_its_folder() {
        let head =
            "use other::two;\nvec\n    scenarios![\n        ways::one,\n        else_where::two,\n    ]\n";
        let file = "tests/tests/e2e/scenarios/ways.rs";
        let is = |name| is_trial("fn one(\nfn two(", scenarios(head), &Citation { file, name });
        assert_eq!(["one", "two", "three"].map(is), [true, false, false]);
        assert_eq!(scenarios("ways::one"), "");
    }

    #[test]
    fn a_story_is_listed_in_its_file_or_given_to_a_trial() {
        let source = "stories![one, two,]\nfn one() {}\nfn three() {}\nfn four() {}";
        let main =
            "trial(\"a name\", true, async move || tales::three(1).await)\nother::four, tales::four_more";
        let is = |name| {
            let file = "tests/tests/e2e/tales.rs";
            is_trial(source, main, &Citation { file, name })
        };
        assert_eq!(
            ["one", "two", "three", "four"].map(is),
            [true, false, true, false]
        );
    }
}
