//! The order in which the linker lays the program's functions out: those that a plugin runs at rest side by side, then those that only its
//! start runs, then the others, so that what stays resident of it is what it goes on running. They are found by running one under valgrind,
//! in the demo and on a real Kubernetes. Knows nothing of what the functions do.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::ci;
use crate::run::{cargo, output, root, run, target};

/// For how long it runs: under valgrind everything takes some fifty times as long.
const PLAYED: Duration = Duration::from_secs(180);
/// How much of that is its start, with the first of all that it does again and again.
const STARTING: Duration = Duration::from_secs(60);
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
    let ran = |part: fn(&Profile) -> &str| -> BTreeSet<&str> {
        let texts = profiles.iter().map(part);
        texts.flat_map(executed).collect()
    };
    let symbols = output(Command::new("nm").arg(&program))?;
    let functions = functions(&symbols);
    let at_rest = sections(&ran(|profile| &profile.at_rest), &functions);
    let at_start = sections(&ran(|profile| &profile.starting), &functions);
    if at_rest.is_empty() {
        bail!(
            "no function that ran has a name in {}: cli/order.ld stays as it is",
            program.display()
        );
    }
    let path = root().join("cli/order.ld");
    fs::write(&path, script(&at_rest, &at_start)).with_context(|| format!("writing {}", path.display()))?;
    let only_at_start = at_start.difference(&at_rest).count();
    println!(
        "\nwrote {}: {} at rest, {only_at_start} at the start alone",
        path.display(),
        at_rest.len()
    );
    Ok(())
}

/// Plays in the demo, where much comes and goes, and on a real Kubernetes, which is asked by TLS: the profiles.
fn play(program: &Path) -> Result<[Profile; 2]> {
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

/// What a plugin ran, as callgrind writes it.
struct Profile {
    starting: String,
    at_rest: String,
}

/// Lets one under valgrind take the place of a plugin that runs, entered by `inside`: what it ran.
fn profile(plugin: &Plugin, inside: &[&str]) -> Result<Profile> {
    let path = target()?.join("callgrind.order");
    // The first dump that is asked for; a dump starts the counters anew.
    let first = path.with_added_extension("1");
    for left_over in [&path, &first] {
        // What an earlier play left must not be taken for this one's.
        drop(fs::remove_file(left_over));
    }
    let signal = |name: &str| run(Command::new("kill").args([name, &plugin.pid]));
    // One that only stands still would keep its connection to kubelet; the demo ends with any that has gone.
    signal(if inside.is_empty() { "-STOP" } else { "-KILL" })?;
    let played = run_in_two_parts(plugin, inside, &path);
    if inside.is_empty() {
        signal("-CONT")?;
    }
    played.context("is valgrind installed?")?;
    let read = |path: &Path| -> Result<String> {
        let profile = fs::read(path).with_context(|| format!("reading {}", path.display()))?;
        Ok(String::from_utf8_lossy(&profile).into_owned())
    };
    Ok(Profile {
        starting: read(&first)?,
        at_rest: read(&path)?,
    })
}

/// Runs the plugin's command under valgrind, and has its counters written and set back once it has started.
fn run_in_two_parts(plugin: &Plugin, inside: &[&str], path: &Path) -> Result<()> {
    let out = format!("--callgrind-out-file={}", path.display());
    let seconds = PLAYED.as_secs().to_string();
    let words = inside.iter().copied().chain(["env", "-i"]);
    let words = words.chain(plugin.variables.iter().map(String::as_str));
    let words = words.chain(["timeout", "--preserve-status", "--signal=INT", &seconds]);
    let words = words.chain(["valgrind", "--tool=callgrind", "--demangle=no", "--quiet", &out]);
    let mut playing = command(words.chain(plugin.words.iter().map(String::as_str)))?
        .spawn()
        .context("starting valgrind")?;
    std::thread::sleep(STARTING);
    let dumped = command(inside.iter().copied().chain(["callgrind_control", "--dump"]))
        .and_then(|mut dump| run(&mut dump));
    let status = playing.wait()?;
    if !status.success() {
        bail!("the plugin ended with {status}");
    }
    dumped
}

fn command<'a>(mut words: impl Iterator<Item = &'a str>) -> Result<Command> {
    let mut command = Command::new(words.next().context("no words")?);
    command.args(words);
    Ok(command)
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

/// The names of functions, as patterns. Of a function that is alone with its path, the path counts: it stays what it is when the
/// compiler or a dependency is another. Those that exist for several types are told apart by their hashes alone.
fn sections(executed: &BTreeSet<&str>, functions: &[&str]) -> BTreeSet<String> {
    let mut alike: BTreeMap<&str, usize> = BTreeMap::new();
    for name in functions {
        *alike.entry(stem(name)).or_default() += 1;
    }
    let own: BTreeSet<&str> = functions.iter().copied().collect();
    executed
        .intersection(&own)
        .filter(|name| name.starts_with("_ZN") || name.starts_with("_R"))
        .map(|name| match name.split_once(".llvm.") {
            _ if stem(name) != *name && alike.get(stem(name)) == Some(&1) => format!("{}17h*", stem(name)),
            Some((name, _)) => format!("{name}*"),
            None => (*name).to_owned(),
        })
        .collect()
}

/// What the linker is told. A section goes where it is named first.
fn script(at_rest: &BTreeSet<String>, at_start: &BTreeSet<String>) -> String {
    let mut script = "/* The functions that a plugin runs, side by side. Written by `cargo xtask order`. */\nSECTIONS {\n  .text.plugin : {\n".to_owned();
    let mut group = |title: &str, sections: &mut dyn Iterator<Item = &String>| {
        script += &format!("    /* {title} */\n");
        for section in sections {
            // Functions that are said to be cold lie in sections of another name.
            script += &format!("    *(.text.{section} .text.unlikely.{section})\n");
        }
    };
    group("At rest.", &mut at_rest.iter());
    group("At the start alone.", &mut at_start.difference(at_rest));
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
        let sections = sections(&executed(profile), &functions(symbols));
        let sections: Vec<&str> = sections.iter().map(String::as_str).collect();
        assert_eq!(
            sections,
            [
                "_ZN1a3run17h*",
                "_ZN1b4drop17h1111111111111111E*",
                "_ZN1c3own17h*"
            ]
        );
    }

    #[test]
    fn what_runs_at_rest_comes_before_what_only_the_start_runs() {
        let named = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let script = script(&named(&["beat", "wait"]), &named(&["argue", "wait"]));
        let sections: Vec<&str> = script
            .lines()
            .filter(|line| line.contains("*("))
            .map(str::trim)
            .collect();
        assert_eq!(
            sections,
            [
                "*(.text.beat .text.unlikely.beat)",
                "*(.text.wait .text.unlikely.wait)",
                "*(.text.argue .text.unlikely.argue)"
            ]
        );
    }
}
