//! The MIG strategy and the names of resources. A GPU that breaks the strategy is left out, where NVIDIA's plugin exits: one GPU in MIG
//! mode by mistake does not cost a node the other seven.

use std::collections::{BTreeMap, BTreeSet};

use gantry_api::{ResourceName, names};
use gantry_topology::Gpu;

use super::selection;
use crate::inventory::Unit;
use gantry_config::{Config, MigStrategy, ResourcePattern, spelled};

/// The names of units on this node.
pub(super) struct UnitNames<'c> {
    config: &'c Config,
    /// GPUs with unknown MIG devices.
    mig_unknown: &'c BTreeSet<u8>,
    /// The kind that [`MigStrategy::Single`] serves.
    kind: Option<Kind>,
}

/// The kind that all units of a GPU have in common.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    /// MIG devices of this profile.
    Slices(String),
    Whole,
}

/// A process without the rights of plugin-mig.yaml may see no MIG device although some exist.
const NO_INSTANCES: &str = "MIG is on and no MIG device is visible: if nvidia-smi -L on the node shows some, label the node gantry.dev/mig=true (manifests/plugin-mig.yaml), because this process may lack the right to see them; otherwise create some (nvidia-smi mig -cgi), or turn MIG off";
const UNKNOWN_INSTANCES: &str = "MIG is on, and NVML does not report the MIG devices: label the node gantry.dev/mig=true (manifests/plugin-mig.yaml) if this process lacks the right; the log has the error of NVML";

impl<'c> UnitNames<'c> {
    /// Names by `config` for the units that may be served. Patterns that match nothing go to `problems`.
    pub(super) fn new(
        config: &'c Config,
        mig_unknown: &'c BTreeSet<u8>,
        candidates: &[(&Gpu, Vec<&Unit>)],
        problems: &mut Vec<String>,
    ) -> Self {
        for (position, entry) in config.gpu_patterns.iter().enumerate() {
            let mut models = candidates.iter().map(|(gpu, _)| model(gpu));
            // A final * may match nothing.
            if entry.pattern != "*" && !models.any(|model| selection::matches(&entry.pattern, model)) {
                problems.push(format!(
                    "resources.gpus[{position}]: no GPU that may be served here is of model {:?}, so that {} is not offered by it",
                    entry.pattern, entry.name
                ));
            }
        }
        for (position, entry) in config.mig_patterns.iter().enumerate() {
            let units = candidates.iter().flat_map(|(_, units)| units);
            let slices = units.filter_map(|unit| unit.slice.as_ref());
            let mut matching =
                slices.filter(|slice| selection::matches_profile(&entry.pattern, &slice.profile));
            if spelled(&entry.pattern) != "*" && matching.next().is_none() {
                problems.push(format!(
                    "resources.mig[{position}]: no MIG device here has profile {:?}, so that {} is not offered by it",
                    entry.pattern, entry.name
                ));
            }
        }
        Self {
            config,
            mig_unknown,
            kind: (config.mig_strategy == MigStrategy::Single).then(|| most_frequent(candidates)).flatten(),
        }
    }

    /// Whether the strategy serves this GPU with these units; otherwise the reason.
    pub(super) fn serves(&self, gpu: &Gpu, units: &[&Unit]) -> Result<(), String> {
        let cut = gpu.mig.as_ref().is_some_and(|mig| mig.enabled);
        match self.config.mig_strategy {
            MigStrategy::None if cut => Err(
                "MIG is on, so that nothing runs on the GPU as a whole: set the MIG strategy to single or mixed, or turn MIG off"
                    .to_owned(),
            ),
            MigStrategy::Single | MigStrategy::Mixed if cut && units.is_empty() => {
                let unknown = self.mig_unknown.contains(&gpu.index);
                Err(if unknown { UNKNOWN_INSTANCES } else { NO_INSTANCES }.to_owned())
            }
            MigStrategy::None | MigStrategy::Mixed => Ok(()),
            MigStrategy::Single => match (kind(units), &self.kind) {
                (Some(own), Some(served)) if own == *served => Ok(()),
                (Some(own), Some(served)) => Err(format!(
                    "the MIG strategy single serves one kind of device: most GPUs here are {served}, this one is {own}; cut it alike, or set the strategy to mixed"
                )),
                (None, _) | (_, None) => Err(format!(
                    "the MIG strategy single serves one kind of device, and this GPU is cut into several ({}); cut it into one, or set the strategy to mixed",
                    profiles(units)
                )),
            },
        }
    }

    /// The resource of a unit: of the first pattern that matches, otherwise the default.
    pub(super) fn resource(&self, gpu: &Gpu, unit: &Unit) -> ResourceName {
        let Some(slice) = &unit.slice else {
            return self.whole(gpu);
        };
        let profile = slice.profile.as_str();
        if let Some(name) = named(&self.config.mig_patterns, profile, selection::matches_profile) {
            return name;
        }
        match self.config.mig_strategy {
            MigStrategy::Single | MigStrategy::None => self.whole(gpu),
            MigStrategy::Mixed => format!("{PREFIX}mig-{}", spelled(profile)).into(),
        }
    }

    /// The resource of a whole GPU, also of a MIG device under its name.
    fn whole(&self, gpu: &Gpu) -> ResourceName {
        named(&self.config.gpu_patterns, model(gpu), selection::matches)
            .unwrap_or_else(|| names::GPU_RESOURCE.into())
    }
}

/// The domain of NVIDIA's resources.
const PREFIX: &str = "nvidia.com/";

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Whole => f.write_str("not cut"),
            Self::Slices(profile) => write!(f, "cut into {profile}"),
        }
    }
}

/// The most frequent kind; MIG devices before whole GPUs at equal counts, because the strategy is about them.
fn most_frequent(candidates: &[(&Gpu, Vec<&Unit>)]) -> Option<Kind> {
    let mut counts: BTreeMap<Kind, usize> = BTreeMap::new();
    for kind in candidates.iter().filter_map(|(_, units)| kind(units)) {
        *counts.entry(kind).or_default() += 1;
    }
    let most = counts.values().copied().max()?;
    counts.into_iter().find(|(_, count)| *count == most).map(|(kind, _)| kind)
}

/// The common kind of these units; `None` if they differ or there is none.
fn kind(units: &[&Unit]) -> Option<Kind> {
    let of = |unit: &&Unit| match &unit.slice {
        None => Kind::Whole,
        Some(slice) => Kind::Slices(slice.profile.clone()),
    };
    let first = of(units.first()?);
    units.iter().all(|unit| of(unit) == first).then_some(first)
}

fn profiles(units: &[&Unit]) -> String {
    let slices = units.iter().filter_map(|unit| unit.slice.as_ref());
    let profiles: std::collections::BTreeSet<&str> = slices.map(|slice| slice.profile.as_str()).collect();
    profiles.into_iter().collect::<Vec<_>>().join(", ")
}

fn named(
    patterns: &[ResourcePattern],
    text: &str,
    matches: impl Fn(&str, &str) -> bool,
) -> Option<ResourceName> {
    let first = patterns.iter().find(|entry| matches(&entry.pattern, text));
    first.map(|entry| entry.name.clone())
}

fn model(gpu: &Gpu) -> &str {
    gpu.model.as_deref().unwrap_or_default()
}
