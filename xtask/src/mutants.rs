//! Planted faults that the random schedules must find: in a copy of the tree, each fault is compiled in and switched on by a variable. The
//! copy is built once; the product contains nothing of this.

mod list;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::run::{cargo, output, root, run, target};
use list::MUTANTS;

/// Names the fault that is switched on.
const VARIABLE: &str = "GANTRY_MUTANT";
/// Stands in [`Mutant::replacement`] for the condition that the fault is switched on.
const SWITCH: &str = "MUTANT";

/// One fault, as a replacement of text that a file contains once.
struct Mutant {
    name: &'static str,
    file: &'static str,
    original: &'static str,
    replacement: &'static str,
    /// Random schedules, from seed 0, of which one must fail.
    seeds: u32,
}

impl Mutant {
    /// The text of its file with the fault in it.
    fn apply(&self, text: &str) -> Result<String> {
        let (name, file) = (self.name, self.file);
        let found = text.matches(self.original).count();
        ensure!(
            found == 1,
            "mutant {name}: {file} contains its original text {found} times, expected once; \
             adapt xtask/src/mutants/list.rs to the changed code"
        );
        ensure!(
            self.replacement.contains(SWITCH),
            "mutant {name}: the replacement does not contain {SWITCH}"
        );
        let switched = self.replacement.replace(SWITCH, &format!("crate::is_mutant({name:?})"));
        Ok(text.replace(self.original, &switched))
    }

    /// The folder of its crate.
    fn package(&self) -> &'static str {
        self.file.split('/').next().unwrap_or_default()
    }
}

/// Checks that every mutant still applies.
pub(crate) fn check() -> Result<()> {
    for mutant in MUTANTS {
        let text = fs::read_to_string(root().join(mutant.file)).with_context(|| mutant.file.to_owned())?;
        mutant.apply(&text)?;
    }
    Ok(())
}

/// Runs the schedules without a mutant, where none may fail, and with each mutant whose name contains `filter`, where one must.
pub(crate) fn find(filter: &str) -> Result<()> {
    check()?;
    let chosen: Vec<&Mutant> = MUTANTS.iter().filter(|mutant| mutant.name.contains(filter)).collect();
    ensure!(!chosen.is_empty(), "no mutant has {filter:?} in its name");
    let folder = target()?.join("mutants");
    plant(&folder)?;
    run(schedules(&folder).arg("--no-run"))?;
    let seeds = chosen.iter().map(|mutant| mutant.seeds).max().unwrap_or_default();
    ensure!(!fails(&folder, "", seeds)?, "the schedules fail without a mutant");
    let mut missed = Vec::new();
    for mutant in chosen {
        let found = fails(&folder, mutant.name, mutant.seeds)?;
        println!("{}: {}", mutant.name, if found { "found" } else { "not found" });
        missed.extend((!found).then_some(mutant.name));
    }
    if !missed.is_empty() {
        bail!("the schedules do not find these mutants: {}", missed.join(", "));
    }
    Ok(())
}

/// Copies the tree to a folder, with all mutants in it. Files that are the same already are left alone, so that cargo builds the rest only.
fn plant(folder: &Path) -> Result<()> {
    let files = output(Command::new("git").current_dir(root()).args([
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
    ]))?;
    let packages: BTreeSet<&str> = MUTANTS.iter().map(Mutant::package).collect();
    for file in files.lines() {
        let Ok(mut bytes) = fs::read(root().join(file)) else {
            // It is deleted and git does not know it yet.
            continue;
        };
        let is_library = file.strip_suffix("/src/lib.rs").is_some_and(|package| packages.contains(package));
        let mutants: Vec<&Mutant> = MUTANTS.iter().filter(|mutant| mutant.file == file).collect();
        if is_library || !mutants.is_empty() {
            let mut text = String::from_utf8(bytes).with_context(|| file.to_owned())?;
            for mutant in mutants {
                text = mutant.apply(&text)?;
            }
            if is_library {
                text += SWITCH_FUNCTION;
            }
            bytes = text.into();
        }
        let to = folder.join(file);
        if fs::read(&to).ok().as_ref() != Some(&bytes) {
            fs::create_dir_all(to.parent().context("a file without a folder")?)?;
            fs::write(&to, bytes).with_context(|| to.display().to_string())?;
        }
    }
    Ok(())
}

/// What is added to each crate that has a mutant.
const SWITCH_FUNCTION: &str = "
#[allow(missing_docs, unreachable_pub, dead_code)]
pub(crate) fn is_mutant(name: &str) -> bool {
    static ON: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    ON.get_or_init(|| std::env::var(\"GANTRY_MUTANT\").unwrap_or_default()) == name
}
";

/// The command that builds or runs the schedules in the copy.
fn schedules(folder: &Path) -> Command {
    let mut command = cargo(&["test", "--locked", "--package", "gantry-extender", "--test", "schedules"]);
    command.current_dir(folder);
    command
}

/// Whether one of the first `seeds` schedules fails.
fn fails(folder: &Path, mutant: &str, seeds: u32) -> Result<bool> {
    let mut command = schedules(folder);
    command.arg("faults").env(VARIABLE, mutant).env("GANTRY_SCHEDULES", seeds.to_string());
    let done = command.output().context("cargo test")?;
    let text = String::from_utf8_lossy(&done.stdout);
    let failure = text.lines().find(|line| line.starts_with("seed "));
    if let Some(failure) = failure {
        println!("  {}", failure.chars().take(160).collect::<String>());
    }
    ensure!(
        done.status.success() || failure.is_some(),
        "the schedules end without a failed seed:\n{text}{}",
        String::from_utf8_lossy(&done.stderr)
    );
    Ok(failure.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mutants_apply_to_the_tree() {
        check().unwrap();
    }

    #[test]
    fn mutant_with_changed_original_names_file_and_list() {
        let error = MUTANTS[0].apply("other text").unwrap_err().to_string();
        assert!(error.contains(MUTANTS[0].file) && error.contains("list.rs"), "{error}");
    }

    #[test]
    fn mutants_have_distinct_names() {
        let names: BTreeSet<&str> = MUTANTS.iter().map(|mutant| mutant.name).collect();
        assert_eq!(names.len(), MUTANTS.len());
    }
}
