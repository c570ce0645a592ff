//! Empty environment variables count as not set, because manifests often contain them. `gantry_config` handles empty variables of NVIDIA's
//! settings.

use std::ffi::{OsStr, OsString};

use clap::{Arg, Command};

/// Variables with a meaning when empty: no socket to register with.
const MEANT: [&str; 1] = ["KUBELET_SOCKET"];

/// The command without the empty variables.
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
