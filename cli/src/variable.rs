//! Names the environment variable in an error about its value. clap names only the option, also if the value came from the variable.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue};
use clap::{Arg, Command};

/// `error` of parsing `line`, with the variable's name if the value came from one.
pub(crate) fn named(mut error: clap::Error, command: &mut Command, line: &[OsString]) -> clap::Error {
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
    let argument = own
        .chain(command.get_arguments())
        .find(|argument| argument.to_string() == option)?;
    let variable = argument
        .get_env()
        .filter(|name| std::env::var_os(name).is_some())?;
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
