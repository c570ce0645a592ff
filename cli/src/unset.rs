//! Variables that are set to nothing, as manifests do that have nothing to say, count as not set. What NVIDIA's settings make of an
//! empty variable stands in `gantry_config`.

use std::ffi::{OsStr, OsString};

use clap::{Arg, Command};

/// Variables that say something by being empty: no socket to register with.
const MEANT: [&str; 1] = ["KUBELET_SOCKET"];

/// The command without the variables that are set to nothing.
pub(crate) fn without_empty(command: Command) -> Command {
    let empty: Vec<OsString> = std::env::vars_os()
        .filter(|(name, value)| value.is_empty() && !MEANT.iter().any(|meant| name == meant))
        .map(|(name, _)| name)
        .collect();
    match empty.is_empty() {
        true => command,
        false => without(command, &empty),
    }
}

fn without(command: Command, names: &[OsString]) -> Command {
    let is_named = |name: &OsStr| names.iter().any(|other| other == name);
    let unset = |argument: Arg| match argument.get_env().is_some_and(is_named) {
        true => argument.env(None),
        false => argument,
    };
    command
        .mut_args(unset)
        .mut_subcommands(|command| without(command, names))
}
