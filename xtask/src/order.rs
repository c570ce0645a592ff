//! The order in which the linker lays the program's functions out: those that a plugin runs come first, side by side, so that what is resident of it
//! is what it runs. They are found by running one under valgrind. Knows nothing of what the functions do.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::run::{cargo, output, root, run, target};

/// The node of the demo whose plugin is looked at: eight GPUs, and much comes and goes.
const NODE: &str = "--node-name=hgx";
/// For how long it runs, in seconds: under valgrind everything takes some fifty times as long.
const SECONDS: &str = "150";
/// Until its plugins run.
const START: Duration = Duration::from_secs(60);

/// Writes `cli/order.ld`.
pub(crate) fn write() -> Result<()> {
    let mut build = cargo(&[
        "build",
        "--release",
        "--locked",
        "-p",
        "gantry",
        "-p",
        "gantry-nvml-sim",
    ]);
    run(build.env("GANTRY_KEEP_SYMBOLS", "1"))?;
    let program = target()?.join("release/gantry");
    let profile = target()?.join("callgrind.order");
    play(&program, &profile)?;
    let profile = fs::read(&profile).with_context(|| format!("reading {}", profile.display()))?;
    let symbols = output(Command::new("nm").arg(&program))?;
    let script = script(
        &executed(&String::from_utf8_lossy(&profile)),
        &functions(&symbols),
    );
    let path = root().join("cli/order.ld");
    fs::write(&path, script).with_context(|| format!("writing {}", path.display()))?;
    println!("\nwrote {}", path.display());
    Ok(())
}

/// Lets a plugin under valgrind take the place of one of the demo's, with the demo's API server and kubelet.
fn play(program: &Path, profile: &Path) -> Result<()> {
    let mut demo = Command::new(program);
    demo.args(["demo", "--watch"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null());
    let mut demo = Demo(demo.spawn().context("starting the demo")?);
    let (pid, arguments) = demo.plugin()?;
    run(Command::new("kill").args(["-STOP", &pid]))?;
    let mut valgrind = Command::new("timeout");
    valgrind
        .args(["--preserve-status", "--signal=INT", SECONDS, "valgrind"])
        .args(["--tool=callgrind", "--demangle=no", "--quiet"])
        .arg(format!("--callgrind-out-file={}", profile.display()))
        .arg(program)
        .args(arguments);
    let played = run(&mut valgrind);
    run(Command::new("kill").args(["-CONT", &pid]))?;
    played.context("is valgrind installed?")
}

/// The demo, for as long as this lives.
struct Demo(Child);

impl Demo {
    /// Process and arguments of the plugin of [`NODE`].
    fn plugin(&mut self) -> Result<(String, Vec<String>)> {
        let since = Instant::now();
        while since.elapsed() < START {
            if let Some(ended) = self.0.try_wait()? {
                bail!("the demo ended with {ended}");
            }
            let children =
                output(Command::new("pgrep").args(["-P", &self.0.id().to_string()])).unwrap_or_default();
            for pid in children.lines() {
                let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                let words: Vec<String> = line.split_terminator('\0').map(str::to_owned).collect();
                if words.iter().any(|word| word == NODE) {
                    let own = words.into_iter().skip_while(|word| word != "plugin");
                    return Ok((pid.to_owned(), own.collect()));
                }
            }
            std::thread::sleep(Duration::from_secs(1));
        }
        bail!("no plugin with {NODE} among the demo's processes")
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        // It ends its own children; what it could not is told by it.
        drop(
            Command::new("kill")
                .args(["-INT", &self.0.id().to_string()])
                .status(),
        );
        drop(self.0.wait());
    }
}

/// The functions in a profile of callgrind: `fn=(12) name` and `cfn=(12) name`, the name where it stands first.
fn executed(profile: &str) -> BTreeSet<&str> {
    let names = profile.lines().filter_map(|line| {
        let (_, name) = line
            .strip_prefix('c')
            .unwrap_or(line)
            .strip_prefix("fn=(")?
            .split_once(") ")?;
        // A function that calls itself is counted by depth.
        name.split('\'').next()
    });
    names.collect()
}

/// The functions in what `nm` prints: `address type name`.
fn functions(symbols: &str) -> Vec<&str> {
    let words = symbols
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>());
    let named = words.filter_map(|words| match words.as_slice() {
        [_, kind, name] if "tTwW".contains(kind) => Some(*name),
        _ => None,
    });
    named.collect()
}

/// A name without the hash that the compiler made of types, versions and itself, `17h` and sixteen digits; all of it where it has none.
fn stem(name: &str) -> &str {
    let hashed = name.rsplit_once("17h").filter(|(_, hash)| {
        let digits = hash.find('E').map(|end| &hash[..end]);
        digits
            .is_some_and(|digits| digits.len() == 16 && digits.chars().all(|digit| digit.is_ascii_hexdigit()))
    });
    hashed.map_or(name, |(stem, _)| stem)
}

/// What the linker is told. Of a function that is alone with its path, the path counts: it stays what it is when the compiler or a dependency
/// is another. Those that exist for several types are told apart by their hashes alone.
fn script(executed: &BTreeSet<&str>, functions: &[&str]) -> String {
    let mut alike: BTreeMap<&str, usize> = BTreeMap::new();
    for name in functions {
        *alike.entry(stem(name)).or_default() += 1;
    }
    let own: BTreeSet<&str> = functions.iter().copied().collect();
    let sections: BTreeSet<String> = executed
        .intersection(&own)
        .filter(|name| name.starts_with("_ZN") || name.starts_with("_R"))
        .map(|name| match name.split_once(".llvm.") {
            _ if stem(name) != *name && alike.get(stem(name)) == Some(&1) => format!("{}17h*", stem(name)),
            Some((name, _)) => format!("{name}*"),
            None => (*name).to_owned(),
        })
        .collect();
    let mut script = "/* The functions that a plugin runs, side by side. Written by `cargo xtask order`. */\nSECTIONS {\n  .text.plugin : {\n".to_owned();
    for section in sections {
        script += &format!("    *(.text.{section})\n");
    }
    script + "  }\n} INSERT BEFORE .text;\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_of_one_path_are_told_apart_by_their_hash_and_the_others_are_not() {
        let profile = "ob=(1) /gantry\nfn=(1) _ZN1a3run17h0123456789abcdefE\ncfn=(2) _ZN1b4drop17h1111111111111111E.llvm.42\nfn=(1)\n\
                       cfn=(3) _ZN1c3own17h3333333333333333E'2\ncfn=(4) malloc\nfn=(5) _ZN1d9elsewhere17h4444444444444444E\n";
        let symbols = "0001 t _ZN1a3run17h0123456789abcdefE\n0002 t _ZN1b4drop17h1111111111111111E.llvm.42\n\
                       0003 T _ZN1b4drop17h2222222222222222E\n0004 t _ZN1c3own17h3333333333333333E\n U malloc\n0005 d _ZN1e4data17h5E\n";
        let script = script(&executed(profile), &functions(symbols));
        let sections: Vec<&str> = script
            .lines()
            .filter(|line| line.contains("*("))
            .map(str::trim)
            .collect();
        assert_eq!(
            sections,
            [
                "*(.text._ZN1a3run17h*)",
                "*(.text._ZN1b4drop17h1111111111111111E*)",
                "*(.text._ZN1c3own17h*)"
            ]
        );
    }
}
