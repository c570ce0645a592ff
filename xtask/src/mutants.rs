//! Planted faults that the random schedules must find: in a copy of the tree, each fault is compiled in and switched on by a variable. The
//! copy is built once; the product contains nothing of this.

mod list;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, anyhow, bail, ensure};

use crate::run::{cargo, output, root, target};
use list::{MUTANTS, SURVIVORS};

/// Names the fault that is switched on.
const VARIABLE: &str = "GANTRY_MUTANT";
/// Stands in [`Mutant::replacement`] for the condition that the fault is switched on.
const SWITCH: &str = "MUTANT";

/// Longest time of the schedules with one mutant, in seconds.
const LIMIT_SECONDS: u32 = 600;
/// The exit status of timeout(1) at its limit.
const TIMED_OUT: i32 = 124;

/// One fault, as a replacement of text that a file contains once.
struct Mutant {
    name: &'static str,
    file: &'static str,
    original: &'static str,
    replacement: &'static str,
    /// Random schedules, from seed 0, of which one must fail: about three times as many as it took, and at least 200. In
    /// fewer a mutant may change by chance what is reached.
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

/// Runs the schedules without a mutant, where none may fail, and with each mutant whose name contains `filter`, where one
/// must, except for the survivors.
pub(crate) fn find(filter: &str) -> Result<()> {
    check()?;
    let chosen: Vec<&Mutant> = MUTANTS.iter().filter(|mutant| mutant.name.contains(filter)).collect();
    ensure!(!chosen.is_empty(), "no mutant has {filter:?} in its name");
    let folder = target()?.join("mutants");
    plant(&folder)?;
    let schedules = Schedules::build(&folder)?;
    let seeds = chosen.iter().map(|mutant| mutant.seeds).max().unwrap_or_default();
    if let Some(failure) = schedules.fail("", seeds)? {
        bail!("the schedules fail without a mutant: {failure}");
    }
    let next = AtomicUsize::new(0);
    let work = || -> Result<Vec<String>> {
        let mut wrong = Vec::new();
        while let Some(mutant) = chosen.get(next.fetch_add(1, Ordering::Relaxed)) {
            let (name, seeds) = (mutant.name, mutant.seeds);
            let survives = SURVIVORS.contains(&name);
            match schedules.fail(name, seeds)? {
                Some(failure) => {
                    println!("{name}: found: {failure}");
                    wrong.extend(survives.then(|| format!("{name} is found; remove it from SURVIVORS")));
                }
                None => {
                    println!("{name}: survives {seeds} seeds");
                    wrong.extend((!survives).then(|| format!("{name} survives {seeds} seeds")));
                }
            }
        }
        Ok(wrong)
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let wrong: Result<Vec<_>> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let ends = workers.into_iter().map(|worker| worker.join());
        ends.map(|end| end.map_err(|_| anyhow!("a worker panicked"))?).collect()
    });
    let wrong = wrong?.concat();
    ensure!(wrong.is_empty(), "mutants: {}", wrong.join("; "));
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

/// The schedules of the copy, with all mutants in one program.
struct Schedules(PathBuf);

impl Schedules {
    fn build(folder: &Path) -> Result<Self> {
        let mut command = cargo(&["test", "--locked", "--package", "gantry-extender", "--test", "schedules"]);
        // Fast code, in less time than a release build takes.
        command.current_dir(folder).args(["--profile", "bench"]);
        command.args(["--no-run", "--message-format=json-render-diagnostics"]);
        let built = output(&mut command)?;
        let mut programs = built.lines().filter_map(|line| {
            let message: serde_json::Value = serde_json::from_str(line).ok()?;
            let is_test = message["target"]["name"] == "schedules";
            message["executable"].as_str().filter(|_| is_test).map(PathBuf::from)
        });
        Ok(Self(programs.next_back().context("cargo built no program of the schedules")?))
    }

    /// How the first `seeds` schedules fail with a mutant, if they do: also by a panic, by what never happens, and by
    /// no end.
    fn fail(&self, mutant: &str, seeds: u32) -> Result<Option<String>> {
        let mut command = Command::new("timeout");
        command.arg(LIMIT_SECONDS.to_string()).arg(&self.0).arg("faults");
        command.env(VARIABLE, mutant).env("GANTRY_SCHEDULES", seeds.to_string());
        let done = command.output().context("timeout")?;
        if done.status.success() {
            return Ok(None);
        }
        if done.status.code() == Some(TIMED_OUT) {
            return Ok(Some(format!("no end within {LIMIT_SECONDS} s")));
        }
        let text = String::from_utf8_lossy(&done.stdout);
        let failure =
            failure(&text).with_context(|| format!("mutant {mutant:?} ends with {}", done.status))?;
        Ok(Some(failure.chars().take(160).collect()))
    }
}

/// How a test failed: its failed seed, or else its first panic.
fn failure(text: &str) -> Option<&str> {
    let seed = text.lines().find(|line| line.starts_with("seed "));
    let mut lines =
        text.lines().skip_while(|line| !line.contains("' panicked at ") && !line.contains(") panicked at "));
    seed.or_else(|| lines.nth(1))
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
    fn failure_is_a_seed_or_the_first_panic() {
        let seed = "thread 'a' (7) panicked at x.rs:1:1:\nboom\nthread 'b' panicked at y.rs\nseed 3: twice\n";
        assert_eq!(failure(seed), Some("seed 3: twice"));
        assert_eq!(failure("...\nthread 'a' (7) panicked at x.rs:1:1:\nboom\nmore"), Some("boom"));
        assert_eq!(failure("ok"), None);
    }

    #[test]
    fn mutants_have_distinct_names() {
        let names: BTreeSet<&str> = MUTANTS.iter().map(|mutant| mutant.name).collect();
        assert_eq!(names.len(), MUTANTS.len());
        assert!(SURVIVORS.iter().all(|name| names.contains(name)));
    }
}
