//! The flags for the place of the configuration, including those of NVIDIA's config-manager.

use std::path::PathBuf;

use clap::builder::NonEmptyStringValueParser;
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, FromArgMatches};

use super::Strictness;
use super::settings::boolean;
use super::source::{Choice, Configs, Fallback};

/// The label that NVIDIA's config-manager reads.
const LABEL: &str = "nvidia.com/device-plugin.config";

/// Where the configuration is.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Config file")]
pub struct ConfigArgs {
    /// Which settings are given as flags. The first field, because clap drops the origin of a value once it is read.
    #[command(flatten)]
    pub origins: Origins,

    /// Config file, YAML or JSON, watched for changes. Several configurations take precedence over it, unless they are named by variables
    /// and the file by this flag
    #[arg(long, env = "CONFIG_FILE", value_name = "FILE")]
    pub config_file: Option<String>,

    /// ConfigMap with several configurations, of which a label of the node chooses one; watched for changes
    #[arg(long, env = "GANTRY_CONFIG_MAP", value_name = "NAMESPACE/NAME", value_parser = config_map)]
    pub config_map: Option<Configs>,

    /// Folder with several configurations instead, such as a mounted ConfigMap
    #[arg(long, alias = "config-file-srcdir", env = "CONFIG_FILE_SRCDIR", value_name = "DIR")]
    pub config_dir: Option<String>,

    /// Label of the node that names its configuration
    #[arg(
        long,
        alias = "node-label",
        env = "NODE_LABEL",
        value_name = "LABEL",
        value_parser = NonEmptyStringValueParser::new(),
        default_value = LABEL
    )]
    pub config_label: String,

    /// Configuration of nodes without the label
    #[arg(long, env = "DEFAULT_CONFIG", value_name = "NAME")]
    pub default_config: Option<String>,

    /// Fallbacks for nodes without the label if there is no default: the configuration called default, the only one, or none
    #[arg(
        long,
        env = "FALLBACK_STRATEGIES",
        value_name = "named|single|empty",
        value_delimiter = ',',
        default_value = "named,single"
    )]
    pub fallback_strategies: Vec<Fallback>,

    /// How unknown keys are treated.
    #[command(flatten)]
    pub leniency: Leniency,

    /// Read this config file (- is standard input) or the manifest of a ConfigMap, print the effective configuration or all problems, and
    /// exit
    #[arg(long, value_name = "FILE")]
    pub check_config: Option<PathBuf>,
}

/// The limits on requests to the API server of NVIDIA's gpu-feature-discovery and config-manager. They are accepted, so that command
/// lines and manifests of these programs work, and have no effect.
#[derive(Debug, Clone, Default, PartialEq, Args)]
pub struct ApiRate {
    /// No effect, because Gantry sends few requests to the API server (NVIDIA's flag)
    #[arg(long, env = "KUBE_API_QPS", value_name = "NUMBER")]
    pub kube_api_qps: Option<f64>,

    /// No effect, as --kube-api-qps
    #[arg(long, env = "KUBE_API_BURST", value_name = "NUMBER")]
    pub kube_api_burst: Option<i64>,
}

/// Which settings are flags: a flag overrides a variable, also of another setting.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Origins {
    /// The one config file.
    file: bool,
    /// Several configurations.
    configs: bool,
    /// Those of a folder.
    folder: bool,
}

impl FromArgMatches for Origins {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let is_flag = |name: &str| matches.value_source(name) == Some(ValueSource::CommandLine);
        let (map, folder) = (is_flag("config_map"), is_flag("config_dir"));
        let names_folder = filled(matches.get_one::<String>("config_dir")).is_some();
        if matches.contains_id("config_map") && names_folder && map == folder {
            return Err(clap::Error::raw(
                ErrorKind::ArgumentConflict,
                "--config-map and --config-dir (the variables GANTRY_CONFIG_MAP and CONFIG_FILE_SRCDIR) both say where the configurations are; \
                 give one\n",
            ));
        }
        Ok(Self { file: is_flag("config_file"), configs: map || folder, folder: folder && names_folder })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for Origins {
    /// Has no flag of its own.
    fn augment_args(command: clap::Command) -> clap::Command {
        command
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        command
    }
}

/// How unknown keys of the config file are treated.
#[derive(Debug, Clone, Copy, Default, Args)]
pub struct Leniency {
    /// Warn of unknown keys of the config file instead of refusing it; NVIDIA's plugin ignores them
    #[arg(
        long,
        env = "GANTRY_LENIENT_CONFIG",
        value_name = "true|false",
        num_args = 0..=1,
        require_equals = true,
        default_value = "false",
        default_missing_value = "true",
        value_parser = lenient
    )]
    pub lenient_config: bool,
}

impl Leniency {
    /// The setting for the reader.
    pub const fn strictness(self) -> Strictness {
        match self.lenient_config {
            true => Strictness::Lenient,
            false => Strictness::Strict,
        }
    }
}

impl Default for ConfigArgs {
    fn default() -> Self {
        Self {
            config_file: None,
            config_map: None,
            config_dir: None,
            config_label: LABEL.to_owned(),
            default_config: None,
            fallback_strategies: vec![Fallback::Named, Fallback::Single],
            leniency: Leniency::default(),
            origins: Origins::default(),
            check_config: None,
        }
    }
}

impl ConfigArgs {
    /// The one config file, if there is one.
    pub fn file(&self) -> Option<PathBuf> {
        self.check_config.clone().or_else(|| filled(self.config_file.as_ref()))
    }

    /// The several configurations, unless a flag names one file instead.
    pub fn configs(&self) -> Option<Configs> {
        let Origins { file, configs, folder } = self.origins;
        if file && !configs && filled(self.config_file.as_ref()).is_some() {
            return None;
        }
        match &self.config_map {
            Some(map) if !folder => Some(map.clone()),
            _ => filled(self.config_dir.as_ref()).map(Configs::Folder),
        }
    }

    /// A warning about a config file that is not read, because several configurations are given in the same way.
    pub fn unread(&self) -> Option<String> {
        let Origins { file, configs, .. } = self.origins;
        filled(self.config_file.as_ref()).filter(|_| file == configs)?;
        let name = if file { "--config-file" } else { "CONFIG_FILE" };
        let from = match self.configs()? {
            Configs::Folder(folder) => format!("the folder {}", folder.display()),
            Configs::ConfigMap { namespace, name } => format!("the ConfigMap {namespace}/{name}"),
        };
        Some(format!("{name} is not read: the node's label chooses from {from}"))
    }

    /// Which configuration counts on a node without the label.
    pub fn choice(&self) -> Choice {
        Choice { default: self.default_config.clone(), fallbacks: self.fallback_strategies.clone() }
    }
}

/// An empty variable counts as unset.
fn filled(text: Option<&String>) -> Option<PathBuf> {
    text.filter(|text| !text.is_empty()).map(PathBuf::from)
}

fn lenient(text: &str) -> Result<bool, String> {
    match text {
        "" => Ok(false),
        text => boolean(text).ok_or_else(|| format!("{text:?} is not allowed; write true or false")),
    }
}

fn config_map(text: &str) -> Result<Configs, String> {
    match text.split_once('/') {
        Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() && !name.contains('/') => {
            Ok(Configs::ConfigMap { namespace: namespace.to_owned(), name: name.to_owned() })
        }
        _ => Err(format!(
            "{text:?} names no ConfigMap; write NAMESPACE/NAME, such as gpu-operator/device-plugin-config"
        )),
    }
}
