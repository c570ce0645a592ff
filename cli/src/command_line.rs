//! The command line as NVIDIA's programs and manifests use it, around clap:
//! - Long options with one dash, as NVIDIA's programs accept them: `-mig-strategy=single`. Several letters after one
//!   dash are always a name, never a short option with a value: `-oneshoot` does not name a file `neshoot`. clap checks
//!   whether the option exists.
//! - Empty environment variables count as not set, because manifests often contain them. `gantry_config` handles empty
//!   variables of NVIDIA's settings.
//! - An error about the value of an environment variable names the variable. clap names only the option.

use std::ffi::{OsStr, OsString};

use clap::error::{ContextKind, ContextValue};
use clap::{Arg, Command};

/// The commands that replace NVIDIA's programs.
const COMMANDS: [&str; 2] = ["plugin", "labels"];

/// The command line with every `-name` written as `--name`.
pub(crate) fn with_double_dashes(line: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut commanded = false;
    let mut over = false;
    line.into_iter()
        .enumerate()
        .map(|(place, word)| {
            let Some(text) = word.to_str().filter(|_| place > 0 && !over) else {
                return word;
            };
            if text == "--" {
                over = true;
                return word;
            }
            if !commanded {
                commanded = COMMANDS.contains(&text);
                return word;
            }
            match text.strip_prefix('-') {
                Some(option) if is_named(option) => format!("--{option}").into(),
                _ => word,
            }
        })
        .collect()
}

/// Whether an option has a name of more than one letter; one letter is a short option.
fn is_named(option: &str) -> bool {
    let name = option.split('=').next().unwrap_or(option);
    let word = name.chars().all(|ch| ch.is_ascii_alphanumeric() || ch == '-' || ch == '_');
    word && name.len() > 1 && name.starts_with(|ch: char| ch.is_ascii_alphabetic())
}

/// Variables with a meaning when empty: no socket to register with.
const MEANT: [&str; 1] = ["KUBELET_SOCKET"];

pub(crate) fn without_empty_variables(command: Command) -> Command {
    let empty: Vec<OsString> = std::env::vars_os()
        .filter(|(name, value)| value.is_empty() && !MEANT.iter().any(|meant| name == meant))
        .map(|(name, _)| name)
        .collect();
    match empty.is_empty() {
        true => command,
        false => without_variables(command, &empty),
    }
}

fn without_variables(command: Command, names: &[OsString]) -> Command {
    let is_named = |name: &OsStr| names.iter().any(|other| other == name);
    let unset = |argument: Arg| match argument.get_env().is_some_and(is_named) {
        true => argument.env(None),
        false => argument,
    };
    command.mut_args(unset).mut_subcommands(|command| without_variables(command, names))
}

/// `error` of parsing `line`, with the variable's name if the value came from one.
pub(crate) fn naming_variable(
    mut error: clap::Error,
    command: &mut Command,
    line: &[OsString],
) -> clap::Error {
    // Arguments have names only after the command is built.
    command.build();
    if let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg)
        && let Some(variable) = variable(command, option, line)
    {
        let both = format!("environment variable {variable} ({option})");
        error.insert(ContextKind::InvalidArg, ContextValue::String(both));
    }
    error
}

/// The variable that set `option`: its variable, if it is set and `line` does not contain the option.
fn variable(command: &Command, option: &str, line: &[OsString]) -> Option<String> {
    let words = || line.iter().skip(1).filter_map(|word| word.to_str());
    let subcommand = words().find_map(|word| command.find_subcommand(word));
    let own = subcommand.into_iter().flat_map(Command::get_arguments);
    let argument = own.chain(command.get_arguments()).find(|argument| argument.to_string() == option)?;
    let variable = argument.get_env().filter(|name| std::env::var_os(name).is_some())?;
    let is_written = words().any(|word| is_of(argument, word));
    (!is_written).then(|| variable.to_string_lossy().into_owned())
}

/// Whether a word of a command line is this option, with its value or without.
fn is_of(argument: &Arg, word: &str) -> bool {
    let aliases = argument.get_all_aliases().unwrap_or_default();
    let names = argument.get_long().into_iter().chain(aliases);
    let word = word.split('=').next().unwrap_or(word);
    names
        .map(|name| format!("--{name}"))
        .chain(argument.get_short().map(|short| format!("-{short}")))
        .any(|name| name == word)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn doubled_line(line: &str) -> String {
        let line = line.split(' ').map(OsString::from);
        let words = with_double_dashes(line);
        let words: Vec<&str> = words.iter().map(|word| word.to_str().unwrap()).collect();
        words.join(" ")
    }

    #[test]
    fn one_dash_is_accepted_as_by_nvidias_programs() {
        assert_eq!(
            doubled_line("gantry plugin -mig-strategy single -pass-device-specs=true --node-name n"),
            "gantry plugin --mig-strategy single --pass-device-specs=true --node-name n"
        );
        assert_eq!(
            doubled_line("gantry labels -no-timestamp -output /dev/null"),
            "gantry labels --no-timestamp --output /dev/null"
        );
    }

    #[test]
    fn unknown_name_is_not_a_short_option() {
        assert_eq!(
            doubled_line("gantry plugin -oneshoot -host-path=/usr/lib/nvidia -logtostderr"),
            "gantry plugin --oneshoot --host-path=/usr/lib/nvidia --logtostderr"
        );
    }

    #[test]
    fn nothing_else_is_touched() {
        for line in [
            "gantry topo -from machine.yaml",
            "gantry plugin -h",
            "gantry labels -o=out -o out -o/tmp/out",
            "gantry plugin --imex-channel-ids -1",
            "gantry labels -- -no-timestamp",
            "-mig-strategy plugin",
        ] {
            assert_eq!(doubled_line(line), line);
        }
    }
}
