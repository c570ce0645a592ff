//! The settings of a plugin in a test. Both programs get them by NVIDIA's environment variables and config file only.

use std::fmt::Write;

/// The settings of a plugin. The default sets nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Setting {
    /// Device list strategies; empty: not set, which means `envvar`.
    pub strategies: Vec<Strategy>,
    /// Whether device nodes are passed by kubelet as well.
    pub pass_device_specs: bool,
    /// Whether devices are called by index towards the runtime, not by UUID.
    pub index_ids: bool,
    /// Time slicing of `nvidia.com/gpu`.
    pub sharing: Option<Sharing>,
    /// How MIG devices are advertised, if at all.
    pub mig: Option<Mig>,
    /// Whether flags are set in the config file, not in the environment.
    pub in_file: bool,
    /// Lines added to the config file as they are.
    pub extra: &'static str,
    /// Environment variables added as they are.
    pub env: &'static [(&'static str, &'static str)],
}

/// Time slicing of all whole GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sharing {
    /// Replicas of each GPU.
    pub replicas: u16,
    /// Whether the resource becomes `nvidia.com/gpu.shared`.
    pub rename: bool,
    /// Whether a container may have one replica only.
    pub one_only: bool,
}

/// NVIDIA's MIG strategies but `none`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mig {
    /// Under the name of whole GPUs.
    Single,
    /// Each profile under its own name.
    Mixed,
}

impl Mig {
    const fn word(self) -> &'static str {
        match self {
            Self::Single => "single",
            Self::Mixed => "mixed",
        }
    }
}

/// NVIDIA's device list strategies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strategy {
    /// `NVIDIA_VISIBLE_DEVICES`.
    Envvar,
    /// Mounts that name the devices.
    VolumeMounts,
    /// CDI names in an annotation.
    CdiAnnotations,
    /// CDI names in the CRI.
    CdiCri,
}

impl Strategy {
    /// Its name.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Envvar => "envvar",
            Self::VolumeMounts => "volume-mounts",
            Self::CdiAnnotations => "cdi-annotations",
            Self::CdiCri => "cdi-cri",
        }
    }

    /// Whether it works by CDI.
    pub const fn is_cdi(self) -> bool {
        matches!(self, Self::CdiAnnotations | Self::CdiCri)
    }
}

impl Setting {
    /// The strategies in force.
    pub fn strategies(&self) -> &[Strategy] {
        if self.strategies.is_empty() { &[Strategy::Envvar] } else { &self.strategies }
    }

    fn words(&self) -> Vec<&'static str> {
        self.strategies.iter().map(|strategy| strategy.word()).collect()
    }

    /// The environment variables of these settings.
    pub(super) fn env(&self) -> Vec<(&'static str, String)> {
        let added = self.env.iter();
        let mut env: Vec<(&str, String)> = added.map(|(name, value)| (*name, (*value).to_owned())).collect();
        if self.in_file {
            return env;
        }
        if !self.strategies.is_empty() {
            env.push(("DEVICE_LIST_STRATEGY", self.words().join(",")));
        }
        if let Some(mig) = self.mig {
            env.push(("MIG_STRATEGY", mig.word().to_owned()));
        }
        if self.pass_device_specs {
            env.push(("PASS_DEVICE_SPECS", "true".to_owned()));
        }
        if self.index_ids {
            env.push(("DEVICE_ID_STRATEGY", "index".to_owned()));
        }
        env
    }

    /// The config file, if one is needed.
    pub fn config_file(&self) -> Option<String> {
        if !self.in_file && self.sharing.is_none() && self.extra.is_empty() {
            return None;
        }
        let mut text = String::from("version: v1\n");
        if self.in_file {
            let strategies = self.words();
            let mig = self.mig.map_or("none", Mig::word);
            let _ = write!(text, "flags:\n  migStrategy: {mig}\n  plugin:\n");
            if !strategies.is_empty() {
                let _ = writeln!(text, "    deviceListStrategy: [{}]", strategies.join(", "));
            }
            let _ = writeln!(text, "    passDeviceSpecs: {}", self.pass_device_specs);
            let id = if self.index_ids { "index" } else { "uuid" };
            let _ = writeln!(text, "    deviceIDStrategy: {id}");
        }
        if let Some(sharing) = self.sharing {
            let _ = write!(
                text,
                "sharing:\n  timeSlicing:\n    renameByDefault: {}\n    failRequestsGreaterThanOne: {}\n    \
                 resources:\n    - name: nvidia.com/gpu\n      replicas: {}\n",
                sharing.rename, sharing.one_only, sharing.replicas
            );
        }
        text += self.extra;
        Some(text)
    }
}
