//! Options written with one dash, as NVIDIA's programs also take them: `-mig-strategy=single`. Only names that the command knows are
//! touched; everything else stays for clap to judge.

use std::ffi::OsString;

use clap::Command;

/// The commands that stand in for programs of NVIDIA's.
const COMMANDS: [&str; 2] = ["plugin", "labels"];

/// The command line with every `-name` of a long option of its command written as `--name`.
pub(crate) fn doubled(command: &Command, line: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut names: Option<Vec<&str>> = None;
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
            let Some(names) = &names else {
                let found = COMMANDS.contains(&text).then(|| command.find_subcommand(text));
                names = found.flatten().map(long_names);
                return word;
            };
            match text.strip_prefix('-') {
                Some(option) if names.contains(&option.split('=').next().unwrap_or(option)) => {
                    format!("--{option}").into()
                }
                _ => word,
            }
        })
        .collect()
}

/// Names of more than one letter: of one letter is a short option.
fn long_names(command: &Command) -> Vec<&str> {
    let options = command.get_arguments();
    let names = options.flat_map(|option| {
        let aliases = option.get_all_aliases().unwrap_or_default();
        option.get_long().into_iter().chain(aliases)
    });
    names.filter(|name| name.len() > 1).collect()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn doubled_line(line: &str) -> String {
        let line = line.split(' ').map(OsString::from);
        let words = doubled(&crate::Cli::command(), line);
        let words: Vec<&str> = words.iter().map(|word| word.to_str().unwrap()).collect();
        words.join(" ")
    }

    #[test]
    fn one_dash_does_where_nvidias_programs_take_it() {
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
    fn nothing_else_is_touched() {
        for line in [
            "gantry topo -from machine.yaml",
            "gantry plugin -mig-stratgy single",
            "gantry plugin -h",
            "gantry labels -- -no-timestamp",
            "-mig-strategy plugin",
        ] {
            assert_eq!(doubled_line(line), line);
        }
    }
}
