//! The settings with a flag: their table (key in the file, flags, variables, default and meaning), from which the command line, the
//! environment and the reference are generated, and their values as layers over the file, by the rules of NVIDIA's plugin
//! (urfave/cli). A flag overrides a variable, and a variable overrides the file. The first set variable of a setting counts.

use std::sync::LazyLock;

use clap::error::ErrorKind;
use clap::{Arg, ArgAction, ArgMatches, Command};
use serde_json::Value;

use super::{Fault, Layer, Problem, Problems, Strictness, load};

/// A setting with a flag, a variable and a key in the file, in this order of precedence.
#[derive(Debug, Clone)]
pub struct Setting {
    /// Dotted path of its key in the file.
    pub key: &'static str,
    /// Its flags without dashes, the first one first in the help.
    pub flags: Vec<&'static str>,
    /// Its short flag.
    pub short: Option<char>,
    /// Its variables; the first set one counts.
    pub env: Vec<&'static str>,
    /// How its text is read.
    pub kind: Kind,
    /// Its default, as a user would write it.
    pub default: &'static str,
    /// Its meaning, in one sentence without a full stop.
    pub help: &'static str,
    /// Whether it belongs to the node labels.
    pub labels: bool,
}

/// Keys that gpu-feature-discovery shares with the plugin, in addition to those of the labels.
const SHARED: [&str; 4] = [
    "flags.migStrategy",
    "flags.failOnInitError",
    "flags.deviceDiscoveryStrategy",
    "flags.plugin.containerDriverRoot",
];

/// The program of a set of flags and variables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Program {
    /// NVIDIA's k8s-device-plugin, and its gpu-feature-discovery in the same process.
    Plugin,
    /// NVIDIA's gpu-feature-discovery alone.
    Gfd,
}

impl Program {
    pub fn settings(self) -> impl Iterator<Item = &'static Setting> {
        SETTINGS
            .iter()
            .filter(move |setting| self == Self::Plugin || setting.labels || SHARED.contains(&setting.key))
    }

    /// The variables of a setting; the first set one counts. Those of gpu-feature-discovery come first for that program.
    pub fn variables(self, setting: &Setting) -> Vec<&'static str> {
        let mut names = setting.env.clone();
        if self == Self::Gfd {
            names.sort_by_key(|name| !name.starts_with("GFD_"));
        }
        names
    }
}

/// The type of a flag or variable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A boolean as in Go: 1, t, T, true, True, TRUE and the same for false; a flag alone is true, an empty variable false.
    Bool,
    /// Text; an empty variable counts as not set.
    Text,
    /// Text that may be empty.
    TextOrEmpty,
    /// Texts with commas, the flag also several times; an empty variable counts as not set.
    List,
    /// Numbers with commas.
    Numbers,
}

/// All settings in the order of the file, from `data/settings.txt`.
pub static SETTINGS: LazyLock<Vec<Setting>> = LazyLock::new(|| rows().filter_map(Setting::read).collect());

/// The rows of the table, without comments.
fn rows() -> impl Iterator<Item = &'static str> {
    include_str!("../data/settings.txt").lines().filter(|line| !line.starts_with('#'))
}

impl Setting {
    /// Reads a row of the table.
    fn read(row: &'static str) -> Option<Self> {
        let cells: Vec<&str> = row.split(" | ").map(|cell| if cell == "-" { "" } else { cell }).collect();
        let &[key, flags, env, kind, labels, default, help] = cells.as_slice() else {
            return None;
        };
        let (short, flags): (Vec<&str>, Vec<&str>) = flags.split(' ').partition(|flag| flag.len() == 1);
        Some(Self {
            key,
            flags,
            short: short.first().and_then(|short| short.chars().next()),
            env: env.split(' ').collect(),
            kind: match kind {
                "bool" => Kind::Bool,
                "text" => Kind::Text,
                "text-or-empty" => Kind::TextOrEmpty,
                "list" => Kind::List,
                "numbers" => Kind::Numbers,
                _ => return None,
            },
            default,
            help,
            labels: labels == "labels",
        })
    }
}

/// Words that `--device-list-strategy` accepts in addition to NVIDIA's: kubelet passes the device nodes.
const DEVICE_NODES: [&str; 2] = ["device-nodes", "pass-device-specs"];

/// The values of flags and environment, checked.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Overrides(Vec<Layer>);

impl Overrides {
    /// Reads the variables of `program` through `env`, and the values of each flag in their order through `flags`.
    ///
    /// # Errors
    /// Every value that is not allowed.
    pub fn read(
        program: Program,
        env: impl Fn(&str) -> Option<String>,
        flags: impl Fn(&Setting) -> Vec<String>,
    ) -> Result<Self, Problems> {
        let mut layers = Vec::new();
        let mut problems = Vec::new();
        for setting in program.settings() {
            let is_unset = |text: &str| {
                text.is_empty() && matches!(setting.kind, Kind::Text | Kind::List | Kind::Numbers)
            };
            let value = |name: &&'static str| {
                let text = env(name).filter(|text| !is_unset(text))?;
                Some((*name, text))
            };
            if let Some((name, text)) = program.variables(setting).iter().find_map(value) {
                let text =
                    if text.is_empty() && setting.kind == Kind::Bool { "false".to_owned() } else { text };
                add_layer(setting, name.to_owned(), &[text], &mut layers, &mut problems);
            }
        }
        for setting in program.settings() {
            let texts = flags(setting);
            if !texts.is_empty() {
                let name = setting.flags.first().copied().unwrap_or_default();
                add_layer(setting, format!("--{name}"), &texts, &mut layers, &mut problems);
            }
        }
        if let Err(wrong) = load("", "", &layers, Strictness::Strict) {
            problems.extend(wrong.list);
        }
        if problems.is_empty() {
            return Ok(Self(layers));
        }
        problems.sort();
        problems.dedup();
        Err(Problems { source: source(&problems).to_owned(), list: problems })
    }

    /// The layers, the lowest first.
    pub fn layers(&self) -> &[Layer] {
        &self.0
    }
}

/// The source of the problems: flags begin with dashes, variables do not.
fn source(problems: &[Problem]) -> &'static str {
    let (flags, variables): (Vec<_>, Vec<_>) =
        problems.iter().partition(|problem| problem.at.starts_with("--"));
    match (flags.is_empty(), variables.is_empty()) {
        (false, false) => "command line and environment",
        (true, false) => "environment",
        (_, true) => "command line",
    }
}

/// Adds the value of `setting` that the flag or variable `origin` gives as `texts`.
fn add_layer(
    setting: &Setting,
    origin: String,
    texts: &[String],
    layers: &mut Vec<Layer>,
    problems: &mut Vec<Problem>,
) {
    let last = texts.last().map_or("", String::as_str);
    let words =
        || texts.iter().flat_map(|text| text.split(',')).map(str::trim).filter(|word| !word.is_empty());
    let value = match setting.kind {
        Kind::Bool => match boolean(last) {
            Some(value) => Value::Bool(value),
            None => {
                problems.push(Problem {
                    line: None,
                    at: origin,
                    fault: Fault::Invalid(format!("{last:?} is not allowed; write true or false")),
                });
                return;
            }
        },
        Kind::Text | Kind::TextOrEmpty => Value::from(last),
        Kind::Numbers => {
            words().map(|word| word.parse::<u64>().map_or(Value::from(word), Value::from)).collect()
        }
        Kind::List if setting.key == "flags.plugin.deviceListStrategy" => {
            let (nodes, ways): (Vec<&str>, Vec<&str>) = words().partition(|word| DEVICE_NODES.contains(word));
            if !nodes.is_empty() {
                layers.push(Layer {
                    key: "flags.plugin.passDeviceSpecs",
                    origin: origin.clone(),
                    value: Value::Bool(true),
                });
                if ways.is_empty() {
                    return;
                }
            }
            Value::from(ways)
        }
        Kind::List => words().map(Value::from).collect(),
    };
    layers.push(Layer { key: setting.key, origin, value });
}

/// A boolean as Go's `strconv.ParseBool` reads it.
pub fn boolean(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

/// [`Overrides`] for the replacement of NVIDIA's gpu-feature-discovery: its settings, with its own variables before the plugin's.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GfdOverrides(Overrides);

impl GfdOverrides {
    /// The layers, the lowest first.
    pub fn layers(&self) -> &[Layer] {
        self.0.layers()
    }
}

impl Overrides {
    fn of_matches(program: Program, matches: &ArgMatches) -> Result<Self, clap::Error> {
        let env = |name: &str| std::env::var_os(name).map(|text| text.to_string_lossy().into_owned());
        let flags = |setting: &Setting| {
            let values = matches.get_many::<String>(setting.key);
            values.map_or(Vec::new(), |values| values.cloned().collect())
        };
        Self::read(program, env, flags)
            .map_err(|problems| clap::Error::raw(ErrorKind::ValueValidation, format!("{problems}\n")))
    }
}

/// Implements clap's traits for the flags of a program.
macro_rules! arguments {
    ($type:ty, $program:expr, $make:expr) => {
        impl clap::FromArgMatches for $type {
            fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
                Overrides::of_matches($program, matches).map($make)
            }

            fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
                *self = Self::from_arg_matches(matches)?;
                Ok(())
            }
        }

        impl clap::Args for $type {
            fn augment_args(command: Command) -> Command {
                $program.settings().map(|setting| argument($program, setting)).fold(command, Command::arg)
            }

            fn augment_args_for_update(command: Command) -> Command {
                Self::augment_args(command)
            }
        }
    };
}

arguments!(Overrides, Program::Plugin, |overrides| overrides);
arguments!(GfdOverrides, Program::Gfd, GfdOverrides);

fn argument(program: Program, setting: &Setting) -> Arg {
    let mut flags = setting.flags.iter().copied();
    let main = flags.next().unwrap_or_default();
    let mut help = format!("{} [env: {}]", setting.help, program.variables(setting).join(", "));
    if !setting.default.is_empty() {
        help = format!("{help} [default: {}]", setting.default);
    }
    let mut argument = Arg::new(setting.key)
        .long(main)
        .visible_aliases(flags.collect::<Vec<_>>())
        // The last of several values counts, as with NVIDIA's plugin; lists grow.
        .action(ArgAction::Append)
        .help(help)
        .help_heading(match (program, setting.labels) {
            (Program::Gfd, _) => "NVIDIA's GPU feature discovery",
            (Program::Plugin, true) => "Node labels (NVIDIA's GPU feature discovery)",
            (Program::Plugin, false) => "NVIDIA's device plugin",
        });
    if let Some(short) = setting.short {
        argument = argument.short(short);
    }
    match setting.kind {
        Kind::Bool => argument
            .value_name("true|false")
            .num_args(0..=1)
            .require_equals(true)
            .default_missing_value("true"),
        Kind::Text => argument.value_name("VALUE"),
        Kind::TextOrEmpty => argument.value_name("FILE"),
        Kind::List => argument.value_name("WORDS"),
        Kind::Numbers => argument.value_name("NUMBERS"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_a_setting() {
        assert_eq!(SETTINGS.len(), rows().count());
        for (position, setting) in SETTINGS.iter().enumerate() {
            assert!(!setting.help.is_empty() && !setting.flags.is_empty(), "{}", setting.key);
            let earlier = &SETTINGS[..position];
            assert!(earlier.iter().all(|other| other.key != setting.key && other.flags != setting.flags));
        }
    }
}
