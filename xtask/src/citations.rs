//! Tests that documents name as proof must be there: a renamed test would leave a claim without one.

use anyhow::{Context, Result, bail};

use crate::run::root;

/// The documents that name tests, as `file::name` or, after another in the same cell, `::name`.
const DOCUMENTS: [&str; 1] = ["COMPATIBILITY.md"];

/// Fails if a document names a test that is not in the file it names.
pub(crate) fn check() -> Result<()> {
    let mut missing = Vec::new();
    let mut count = 0;
    for document in DOCUMENTS {
        let text = std::fs::read_to_string(root().join(document))
            .with_context(|| format!("cannot read {document}"))?;
        for citation in citations(&text) {
            count += 1;
            let source = std::fs::read_to_string(root().join(citation.file)).unwrap_or_default();
            if !source.contains(&format!("fn {}(", citation.name)) {
                missing.push(format!("{document}: {}::{}", citation.file, citation.name));
            }
        }
    }
    if !missing.is_empty() {
        bail!("documents name tests that are not there:\n{}", missing.join("\n"));
    }
    println!("all {count} tests that documents name are there");
    Ok(())
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
}
