//! ARCHITECTURE.md is the map of the code: every module stands on it, and nothing that is not there. Modules for tests need no place.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::run::root;

/// The map.
const DOCUMENT: &str = "ARCHITECTURE.md";
/// The crates with modules. Each has a section of its name, whose table names them in its first column: as `plan`, `gang/plan` or
/// `gang/plan/{fill, pack}`.
const CRATES: [&str; 10] = [
    "topology",
    "api",
    "client",
    "gang",
    "plugin",
    "extender",
    "cli",
    "simulator/nvml",
    "simulator/cluster",
    "xtask",
];

/// Fails if a module is not on the map, or the map has one that is not there.
pub(crate) fn check() -> Result<()> {
    let text =
        std::fs::read_to_string(root().join(DOCUMENT)).with_context(|| format!("cannot read {DOCUMENT}"))?;
    let (mut count, mut wrong) = (0, Vec::new());
    for name in CRATES {
        let there = modules(&root().join(name).join("src"))?;
        count += there.len();
        wrong.extend(differences(name, &there, &named(&text, name)));
    }
    if !wrong.is_empty() {
        bail!("the map of the code is not right:\n{}", wrong.join("\n"));
    }
    println!("all {count} modules have their place in {DOCUMENT}");
    Ok(())
}

fn differences(name: &str, there: &BTreeSet<String>, named: &BTreeSet<String>) -> Vec<String> {
    let missing = there.difference(named).map(|module| {
        format!("{DOCUMENT}, section {name}: `{module}` is missing; give it a place in the first column, with what its head says it is for")
    });
    let gone = named.difference(there).map(|module| {
        format!(
            "{DOCUMENT}, section {name}: there is no module `{module}`; take it out, or write its new name"
        )
    });
    missing.chain(gone).collect()
}

/// The modules of a crate that are no tests, as paths from its root.
fn modules(src: &Path) -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    for name in ["lib.rs", "main.rs"] {
        if src.join(name).exists() {
            walk(&src.join(name), src, "", &mut found)?;
        }
    }
    Ok(found)
}

/// Adds the modules that `file` declares, whose own files lie in `folder`.
fn walk(file: &Path, folder: &Path, at: &str, found: &mut BTreeSet<String>) -> Result<()> {
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    for name in declared(&text) {
        let path = format!("{at}{name}");
        let below = folder.join(name);
        let beside = folder.join(format!("{name}.rs"));
        let own = if beside.exists() {
            beside
        } else {
            below.join("mod.rs")
        };
        walk(&own, &below, &format!("{path}/"), found)?;
        found.insert(path);
    }
    Ok(())
}

/// The modules that a file declares and that are not for tests.
fn declared(text: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut for_tests = false;
    for line in text.lines() {
        if line.starts_with("#[") {
            for_tests |= line.contains("cfg(test)");
            continue;
        }
        let rest = ["", "pub ", "pub(crate) ", "pub(super) "]
            .iter()
            .find_map(|reach| line.strip_prefix(reach)?.strip_prefix("mod "));
        let name = rest.and_then(|rest| rest.strip_suffix(';'));
        found.extend(name.filter(|_| !for_tests));
        for_tests = false;
    }
    found
}

/// The modules that the section of a crate names.
fn named(text: &str, name: &str) -> BTreeSet<String> {
    let heading = format!("### {name}");
    let section = text
        .lines()
        .skip_while(|line| line.split(':').next() != Some(heading.as_str()))
        .skip(1)
        .take_while(|line| !line.starts_with('#'));
    let cells = section.filter_map(|line| line.strip_prefix("| ")?.split(" |").next());
    cells
        .flat_map(|cell| cell.split('`').skip(1).step_by(2))
        .flat_map(expanded)
        .collect()
}

/// `a/{b, c}` as `a/b` and `a/c`.
fn expanded(written: &str) -> Vec<String> {
    match written.split_once('{') {
        Some((before, list)) => list
            .trim_end_matches('}')
            .split(',')
            .map(|name| format!("{before}{}", name.trim()))
            .collect(),
        None => vec![written.to_owned()],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAP: &str = "\
### gang: all of it or none of it

| module | what |
|---|---|
| `key` | names, not `this` |
| `protocol`, `protocol/{gangs, slots}` | life |

### gangway

| `other` | something |
";

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn the_first_column_of_a_section_names_modules() {
        assert_eq!(
            named(MAP, "gang"),
            set(&["key", "protocol", "protocol/gangs", "protocol/slots"])
        );
        assert_eq!(named(MAP, "gangway"), set(&["other"]));
        assert!(named(MAP, "plugin").is_empty());
    }

    #[test]
    fn modules_for_tests_need_no_place() {
        let text = "pub mod args;\nmod plan;\n#[cfg(test)]\nmod fixtures;\npub(crate) mod work;\n#[cfg(test)]\n#[path = \"x.rs\"]\nmod tests;\nuse mod_x;\n";
        assert_eq!(declared(text), ["args", "plan", "work"]);
    }

    #[test]
    fn what_is_missing_and_what_is_gone_is_said() {
        let told = differences("gang", &set(&["key", "room"]), &named(MAP, "gang"));
        assert_eq!(told.len(), 4);
        assert!(told[0].contains("section gang: `room` is missing"), "{told:?}");
        assert!(told[1].contains("there is no module `protocol`"), "{told:?}");
    }

    #[test]
    fn this_crates_own_modules_are_found() {
        let found = modules(&root().join("xtask/src")).unwrap();
        assert!(found.contains("map") && found.contains("ci"), "{found:?}");
        let nested = modules(&root().join("gang/src")).unwrap();
        assert!(nested.contains("dialect/owner/jobs"), "{nested:?}");
    }
}
