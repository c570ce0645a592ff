//! The order in which the linker lays the program's functions out: those that a plugin runs come first, side by side, so that what is resident of it
//! is what it runs. They are found by running one under valgrind, in the demo and on a real Kubernetes. Knows nothing of what the functions do.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::ci;
use crate::run::{cargo, output, root, run, target};

/// For how long it runs, in seconds: under valgrind everything takes some fifty times as long.
const SECONDS: &str = "100";
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
    let profiles = play(&program)?;
    let ran: BTreeSet<&str> = profiles.iter().flat_map(|profile| executed(profile)).collect();
    let symbols = output(Command::new("nm").arg(&program))?;
    let sections = sections(&ran, &functions(&symbols));
    if sections.is_empty() {
        bail!(
            "no function that ran has a name in {}: cli/order.ld stays as it is",
            program.display()
        );
    }
    let path = root().join("cli/order.ld");
    fs::write(&path, script(&sections)).with_context(|| format!("writing {}", path.display()))?;
    println!("\nwrote {}", path.display());
    Ok(())
}

/// Plays in the demo, where much comes and goes, and on a real Kubernetes, which is asked by TLS: the profiles.
fn play(program: &Path) -> Result<[String; 2]> {
    let demo = Command::new(program)
        .args(["demo", "--watch"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn();
    let mut demo = Demo(demo.context("starting the demo")?);
    let in_demo = profile(&plugin(program, "--node-name=hgx")?, &[]);
    demo.end();
    let in_demo = in_demo?;
    let cluster = |task: &str| ci::cluster(Some(program), &[task.to_owned()]);
    cluster("up")?;
    let on_node = plugin(program, "/node-1/").and_then(|plugin| {
        let first = output(Command::new("pgrep").args(["-f", "^/bin/sh -eu .*/node-1/init.sh"]))?;
        let inside = [
            "nsenter",
            "--target",
            first.trim(),
            "--mount",
            "--uts",
            "--ipc",
            "--net",
            "--pid",
            "--",
        ];
        profile(&plugin, &inside)
    });
    cluster("down")?;
    Ok([in_demo, on_node?])
}

/// A plugin that runs.
struct Plugin {
    pid: String,
    words: Vec<String>,
    variables: Vec<String>,
}

/// The plugin of which a word has `mark` in it, once there is one.
fn plugin(program: &Path, mark: &str) -> Result<Plugin> {
    let since = Instant::now();
    let listed = |pid: &str, what: &str| -> Vec<String> {
        let text = fs::read_to_string(format!("/proc/{pid}/{what}")).unwrap_or_default();
        text.split_terminator('\0').map(str::to_owned).collect()
    };
    while since.elapsed() < START {
        let pids = output(Command::new("pgrep").args(["-x", "gantry"])).unwrap_or_default();
        for pid in pids.lines() {
            let words = listed(pid, "cmdline");
            let is_ours = words.first().is_some_and(|first| Path::new(first) == program);
            if is_ours
                && words.iter().any(|word| word == "plugin")
                && words.iter().any(|word| word.contains(mark))
            {
                let own = words.into_iter().skip_while(|word| word != "plugin");
                return Ok(Plugin {
                    pid: pid.to_owned(),
                    words: std::iter::once(program.display().to_string())
                        .chain(own)
                        .collect(),
                    variables: listed(pid, "environ"),
                });
            }
        }
        std::thread::sleep(Duration::from_secs(1));
    }
    bail!("no plugin with {mark}")
}

/// Lets one under valgrind take the place of a plugin that runs, entered by `inside`: what it ran.
fn profile(plugin: &Plugin, inside: &[&str]) -> Result<String> {
    let path = target()?.join("callgrind.order");
    // What an earlier play left must not be taken for this one's.
    drop(fs::remove_file(&path));
    let out = format!("--callgrind-out-file={}", path.display());
    let signal = |name: &str| run(Command::new("kill").args([name, &plugin.pid]));
    // One that only stands still would keep its connection to kubelet; the demo ends with any that has gone.
    signal(if inside.is_empty() { "-STOP" } else { "-KILL" })?;
    let words = inside.iter().copied().chain(["env", "-i"]);
    let words = words.chain(plugin.variables.iter().map(String::as_str));
    let words = words.chain(["timeout", "--preserve-status", "--signal=INT", SECONDS]);
    let words = words.chain(["valgrind", "--tool=callgrind", "--demangle=no", "--quiet", &out]);
    let words: Vec<&str> = words.chain(plugin.words.iter().map(String::as_str)).collect();
    let (first, others) = words.split_first().context("no words")?;
    let played = run(Command::new(first).args(others));
    if inside.is_empty() {
        signal("-CONT")?;
    }
    played.context("is valgrind installed?")?;
    let profile = fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
    Ok(String::from_utf8_lossy(&profile).into_owned())
}

/// The demo, for as long as this lives.
struct Demo(Child);

impl Demo {
    /// It ends its own children; what it could not is told by it.
    fn end(&mut self) {
        drop(
            Command::new("kill")
                .args(["-INT", &self.0.id().to_string()])
                .status(),
        );
        drop(self.0.wait());
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            self.end();
        }
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

/// The sections of functions, as patterns. Of a function that is alone with its path, the path counts: it stays what it is when the compiler or a dependency
/// is another. Those that exist for several types are told apart by their hashes alone.
fn sections(executed: &BTreeSet<&str>, functions: &[&str]) -> BTreeSet<String> {
    let mut alike: BTreeMap<&str, usize> = BTreeMap::new();
    for name in functions {
        *alike.entry(stem(name)).or_default() += 1;
    }
    let own: BTreeSet<&str> = functions.iter().copied().collect();
    let sections = executed
        .intersection(&own)
        .filter(|name| name.starts_with("_ZN") || name.starts_with("_R"))
        .map(|name| match name.split_once(".llvm.") {
            _ if stem(name) != *name && alike.get(stem(name)) == Some(&1) => format!("{}17h*", stem(name)),
            Some((name, _)) => format!("{name}*"),
            None => (*name).to_owned(),
        })
        .map(|name| format!(".text.{name}"));
    sections.collect()
}

/// What the linker is told.
fn script(sections: &BTreeSet<String>) -> String {
    let mut script = "/* The functions that a plugin runs, side by side. Written by `cargo xtask order`. */\nSECTIONS {\n  .text.plugin : {\n".to_owned();
    for section in sections {
        script += &format!("    *({section})\n");
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
        let script = script(&sections(&executed(profile), &functions(symbols)));
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
