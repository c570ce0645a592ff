//! The settings that change decisions, as an annotation of the extender's Lease: `gantry explain` and `gantry map` read
//! them there, so that no flag is repeated. Values are the texts of the extender's options.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::ValueEnum;
use gantry_api::names;
use gantry_gang::{Ceilings, Levels};
use gantry_planner::decide::{ForeignNodes, Options, Policy};
use gantry_planner::placement::PlacementDefaults;
use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, Client};
use serde::{Deserialize, Serialize};

use crate::args::{Args, required_levels};
use crate::offline::Terms;

/// Time limit of the read.
const READ: Duration = Duration::from_secs(10);

/// The settings of an extender.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PublishedSettings {
    /// The version of the leader; empty if nothing was published.
    pub version: String,
    /// The commit that the leader was built from, where the build knew it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// `--resource`.
    pub resources: Vec<String>,
    /// `--scheduler-name`.
    pub scheduler_names: Vec<String>,
    /// `--foreign-nodes`.
    pub foreign_nodes: String,
    /// `--policy`.
    pub policy: String,
    /// `--fabric`, as `name=label`.
    pub fabric: String,
    /// `--gang-required-levels`.
    pub gang_required_levels: String,
    /// `--gang-arrival-max`, in seconds.
    pub gang_arrival_max: u64,
    /// `--gang-restart-hold-max`, in seconds.
    pub gang_restart_hold_max: u64,
    /// `--gang-spares-max`.
    pub gang_spares_max: u32,
    /// `--gates`.
    pub gates: bool,
    /// `--request-default`.
    pub request_defaults: Vec<String>,
    /// `--model-cost-order`.
    pub model_cost_order: Vec<String>,
    /// Where the leader answers `gantry explain`; absent if it does not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub explain: Option<ExplainPort>,
}

/// A port of loopback in the pod of the leader.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExplainPort {
    /// `--pod-name`.
    pub pod: String,
    /// The port of `--explain-listen`.
    pub port: u16,
}

impl Default for PublishedSettings {
    /// The extender's defaults.
    fn default() -> Self {
        Self {
            version: String::new(),
            commit: None,
            resources: vec![names::GPU_RESOURCE.to_owned()],
            scheduler_names: vec![names::DEFAULT_SCHEDULER.to_owned()],
            foreign_nodes: word(&ForeignNodes::default()),
            policy: word(&Policy::default()),
            fabric: String::new(),
            gang_required_levels: "all".to_owned(),
            gang_arrival_max: Ceilings::default().arrival.as_secs(),
            gang_restart_hold_max: Ceilings::default().restart_hold.as_secs(),
            gang_spares_max: Ceilings::default().spares,
            gates: false,
            request_defaults: Vec::new(),
            model_cost_order: Vec::new(),
            explain: None,
        }
    }
}

impl PublishedSettings {
    /// The settings of these options.
    ///
    /// # Errors
    /// The options contradict each other.
    pub fn of(args: &Args) -> anyhow::Result<Self> {
        let ceilings = args.gangs.ceilings()?;
        let levels = args.gangs.fabric.0.iter();
        let levels: Vec<String> = levels.map(|level| format!("{}={}", level.name, level.label)).collect();
        Ok(Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            commit: gantry_runtime::COMMIT.map(str::to_owned),
            resources: args.resources.clone(),
            scheduler_names: args.schedulers.clone(),
            foreign_nodes: word(&args.foreign_nodes),
            policy: word(&args.policy),
            fabric: levels.join(","),
            gang_required_levels: args.gangs.gang_required_levels.clone(),
            gang_arrival_max: ceilings.arrival.as_secs(),
            gang_restart_hold_max: ceilings.restart_hold.as_secs(),
            gang_spares_max: ceilings.spares,
            gates: args.gangs.gates,
            request_defaults: args.request_defaults.clone(),
            model_cost_order: args.model_cost_order.clone(),
            explain: args
                .pod_name
                .clone()
                .zip(args.explain_listen)
                .map(|(pod, listen)| ExplainPort { pod, port: listen.port() }),
        })
    }

    /// Replaces `--foreign-nodes`.
    pub fn set_foreign_nodes(&mut self, foreign: ForeignNodes) {
        self.foreign_nodes = word(&foreign);
    }

    /// Replaces `--policy`.
    pub fn set_policy(&mut self, policy: Policy) {
        self.policy = word(&policy);
    }

    /// The settings that a Lease carries; `None` if it carries none.
    ///
    /// # Errors
    /// The annotation cannot be read.
    pub fn of_lease(lease: &Lease) -> anyhow::Result<Option<Self>> {
        let annotations = lease.metadata.annotations.as_ref();
        let Some(text) = annotations.and_then(|all| all.get(names::SETTINGS_ANNOTATION)) else {
            return Ok(None);
        };
        serde_json::from_str(text)
            .with_context(|| format!("annotation {}", names::SETTINGS_ANNOTATION))
            .map(Some)
    }

    /// The settings that the leader publishes in this namespace; `None` without a Lease or without the annotation.
    ///
    /// # Errors
    /// The Lease cannot be read.
    pub async fn read(client: Client, namespace: &str) -> anyhow::Result<Option<Self>> {
        let name = names::EXTENDER;
        let leases = Api::<Lease>::namespaced(client, namespace);
        let lease = tokio::time::timeout(READ, leases.get_opt(name)).await;
        let lease = lease.with_context(|| format!("no response within {} s", READ.as_secs()));
        let lease = lease.and_then(|lease| Ok(lease?));
        let lease = lease.with_context(|| format!("Lease {namespace}/{name}"))?;
        lease.as_ref().map_or(Ok(None), Self::of_lease)
    }

    /// The annotation's value.
    ///
    /// # Errors
    /// None in practice: the settings are texts and numbers.
    pub(crate) fn to_annotation(&self) -> anyhow::Result<String> {
        serde_json::to_string(self).context("writing the settings as JSON")
    }

    /// The settings for decisions about a cluster that is read once.
    ///
    /// # Errors
    /// A value is not allowed.
    pub fn terms(&self) -> anyhow::Result<Terms> {
        let fabric = Levels::parse(&self.fabric).with_context(|| format!("--fabric {:?}", self.fabric))?;
        let defaults = PlacementDefaults::read(self.request_defaults.iter().map(String::as_str));
        Ok(Terms {
            resources: self.resources.iter().map(|name| name.as_str().into()).collect(),
            options: Options {
                foreign: value("--foreign-nodes", &self.foreign_nodes)?,
                policy: value("--policy", &self.policy)?,
                ..Options::default()
            },
            ceilings: Ceilings {
                required_levels: required_levels(&self.gang_required_levels, &fabric)?,
                arrival: Duration::from_secs(self.gang_arrival_max),
                restart_hold: Duration::from_secs(self.gang_restart_hold_max),
                spares: self.gang_spares_max,
            },
            fabric,
            gates: self.gates,
            schedulers: self.scheduler_names.iter().map(|name| Arc::from(name.as_str())).collect(),
            defaults: defaults.context("--request-default")?,
            model_cost_order: self.model_cost_order.clone(),
        })
    }
}

/// The word of an option's value.
fn word(value: &impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// The value of an option's word.
fn value<T: ValueEnum>(option: &str, word: &str) -> anyhow::Result<T> {
    T::from_str(word, false).map_err(|error| anyhow::anyhow!("{option} {word:?}: {error}"))
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, FromArgMatches as _};

    use super::*;

    fn published(words: &[&str]) -> PublishedSettings {
        let command = Args::augment_args(clap::Command::new("extender").no_binary_name(true));
        let matches = command.try_get_matches_from(words).unwrap();
        PublishedSettings::of(&Args::from_arg_matches(&matches).unwrap()).unwrap()
    }

    fn lease(text: &str) -> Lease {
        let annotations = [(names::SETTINGS_ANNOTATION.to_owned(), text.to_owned())];
        let mut lease = Lease::default();
        lease.metadata.annotations = Some(annotations.into());
        lease
    }

    #[test]
    fn defaults_are_those_of_the_options() {
        let of_options = PublishedSettings { version: String::new(), commit: None, ..published(&[]) };
        assert_eq!(of_options, PublishedSettings::default());
    }

    #[test]
    fn settings_survive_the_annotation() {
        let words = [
            "--resource=nvidia.com/gpu,example.com/gpu",
            "--scheduler-name=gantry",
            "--foreign-nodes=refuse",
            "--policy=spread",
            "--fabric=zone,rack=example.com/rack",
            "--gang-required-levels=rack",
            "--gang-arrival-max=900",
            "--gang-spares-max=2",
            "--gates",
            "--request-default=research/economy=true",
            "--model-cost-order=L4,A100",
            "--explain-listen=127.0.0.1:8013",
            "--pod-name=gantry-extender-x",
        ];
        let settings = published(&words);
        let read = PublishedSettings::of_lease(&lease(&settings.to_annotation().unwrap())).unwrap().unwrap();
        assert_eq!(read, settings);
        let terms = read.terms().unwrap();
        assert_eq!(terms.resources.len(), 2);
        assert_eq!((terms.options.foreign, terms.options.policy), (ForeignNodes::Refuse, Policy::Spread));
        assert_eq!(terms.fabric, Levels::parse("zone,rack=example.com/rack").unwrap());
        assert_eq!(terms.ceilings.required_levels, Some(vec!["rack".into()]));
        assert_eq!(terms.ceilings.arrival.as_secs(), 900);
        assert_eq!(terms.ceilings.spares, 2);
        assert!(terms.gates);
        let explain = ExplainPort { pod: "gantry-extender-x".to_owned(), port: 8013 };
        assert_eq!(read.explain, Some(explain));
        assert_eq!(*terms.schedulers, ["gantry".into()]);
    }

    /// Of a release with more settings, or with fewer.
    #[test]
    fn settings_of_other_releases_are_read() {
        let read =
            PublishedSettings::of_lease(&lease(r#"{"policy": "spread", "more": 1}"#)).unwrap().unwrap();
        let expected = PublishedSettings { policy: "spread".to_owned(), ..PublishedSettings::default() };
        assert_eq!(read, expected);
        assert_eq!(PublishedSettings::of_lease(&Lease::default()).unwrap(), None);
        let error = PublishedSettings::of_lease(&lease("{")).unwrap_err();
        insta::assert_snapshot!(error, @"annotation gantry.dev/settings");
        let settings = PublishedSettings { policy: "sprad".to_owned(), ..PublishedSettings::default() };
        insta::assert_snapshot!(settings.terms().unwrap_err(), @r#"--policy "sprad": invalid variant: sprad"#);
    }
}
