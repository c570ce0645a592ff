//! Accepts long options with one dash, as NVIDIA's programs do: `-mig-strategy=single`. Several letters after one dash are always a name, never
//! a short option with a value: `-oneshoot` does not name a file `neshoot`. clap checks whether the option exists.

use std::ffi::OsString;

/// The commands that replace NVIDIA's programs.
const COMMANDS: [&str; 2] = ["plugin", "labels"];

/// The command line with every `-name` written as `--name`.
pub(crate) fn doubled(line: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
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
    let word = name
        .chars()
        .all(|ch| ch.is_ascii_alphanumeric() || ch == '-' || ch == '_');
    word && name.len() > 1 && name.starts_with(|ch: char| ch.is_ascii_alphabetic())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn doubled_line(line: &str) -> String {
        let line = line.split(' ').map(OsString::from);
        let words = doubled(line);
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
