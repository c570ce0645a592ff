//! Kubelet's configuration file, as far as the choice of devices depends on it: the Topology Manager, and how the CPU
//! manager gives CPUs. What its flags set over the file is not known here.

use std::path::Path;

use gantry_api::{KubeletTopology, TopologyManagerPolicy, TopologyManagerScope};
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::{Error as ValueError, StrDeserializer};

/// The longest file that is read, in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// What is read of kubelet's configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KubeletConfig {
    /// Its Topology Manager.
    pub topology: KubeletTopology,
    /// The CPU manager aligns CPUs by socket (`align-by-socket`), not by NUMA node.
    pub aligns_cpus_by_socket: bool,
    /// The CPU manager gives whole cores only (`full-pcpus-only`).
    pub gives_whole_cores: bool,
}

impl KubeletConfig {
    /// Whether kubelet refuses pods by the CPUs of each NUMA node, if its CPU manager is static. The choice of that is not
    /// read here: kubelet lists allocatable CPUs only then.
    pub fn refuses_by_cpus(&self) -> bool {
        self.topology.policy.refuses() && !self.aligns_cpus_by_socket
    }

    /// The same by the memory of each NUMA node, if its memory manager is static.
    pub fn refuses_by_memory(&self) -> bool {
        self.topology.policy.refuses()
    }
}

/// The fields of a `KubeletConfiguration` that are read.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct KubeletFields {
    topology_manager_policy: Option<String>,
    topology_manager_scope: Option<String>,
    topology_manager_policy_options: Options,
    cpu_manager_policy_options: CpuOptions,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
struct CpuOptions {
    align_by_socket: Option<String>,
    full_pcpus_only: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
struct Options {
    prefer_closest_numa_nodes: Option<String>,
    max_allowable_numa_nodes: Option<String>,
}

/// Why the file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KubeletConfigError {
    /// It cannot be read.
    #[error("cannot be read")]
    Read(#[from] std::io::Error),
    /// It is longer than any configuration.
    #[error("has {0} bytes, at most {MAX_BYTES} are read")]
    TooLong(u64),
    /// It is no YAML or JSON of this form.
    #[error("{0}")]
    Malformed(String),
    /// A value that kubelet does not know.
    #[error("{field}: {value:?} is not allowed; allowed are {allowed}")]
    Value {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// The allowed values.
        allowed: &'static str,
    },
}

/// Reads the file at `path`.
///
/// # Errors
/// See [`KubeletConfigError`].
pub fn read(path: &Path) -> Result<KubeletConfig, KubeletConfigError> {
    let length = std::fs::metadata(path)?.len();
    if length > MAX_BYTES {
        return Err(KubeletConfigError::TooLong(length));
    }
    parse(&std::fs::read_to_string(path)?)
}

fn parse(text: &str) -> Result<KubeletConfig, KubeletConfigError> {
    let written: KubeletFields = match text.trim().is_empty() {
        true => KubeletFields::default(),
        false => serde_saphyr::from_str(text)
            .map_err(|error| KubeletConfigError::Malformed(error.without_snippet().to_string()))?,
    };
    let policy = one_of::<TopologyManagerPolicy>(
        "topologyManagerPolicy",
        written.topology_manager_policy,
        "none, best-effort, restricted, single-numa-node",
    )?;
    let scope = one_of::<TopologyManagerScope>(
        "topologyManagerScope",
        written.topology_manager_scope,
        "container, pod",
    )?;
    let options = written.topology_manager_policy_options;
    let parsed = |field, value: Option<String>, allowed| match value {
        None => Ok(None),
        Some(value) => match value.parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(KubeletConfigError::Value { field, value, allowed }),
        },
    };
    let closest = options.prefer_closest_numa_nodes;
    let topology = KubeletTopology {
        policy,
        scope,
        prefer_closest_numa_nodes: closest.is_some_and(|written| written == "true"),
        max_allowable_numa_nodes: parsed(
            "topologyManagerPolicyOptions.max-allowable-numa-nodes",
            options.max_allowable_numa_nodes,
            "whole numbers",
        )?,
    };
    let cpus = written.cpu_manager_policy_options;
    let is_true = |written: Option<String>| written.is_some_and(|written| written == "true");
    Ok(KubeletConfig {
        topology,
        aligns_cpus_by_socket: is_true(cpus.align_by_socket),
        gives_whole_cores: is_true(cpus.full_pcpus_only),
    })
}

/// The value of a field with few words, kubelet's default where it is absent or empty.
fn one_of<T: for<'de> Deserialize<'de> + Default>(
    field: &'static str,
    value: Option<String>,
    allowed: &'static str,
) -> Result<T, KubeletConfigError> {
    let Some(value) = value.filter(|value| !value.is_empty()) else {
        return Ok(T::default());
    };
    let word: StrDeserializer<'_, ValueError> = value.as_str().into_deserializer();
    T::deserialize(word).map_err(|_| KubeletConfigError::Value { field, value: value.clone(), allowed })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topology_manager_is_read() {
        let text = "kind: KubeletConfiguration\ntopologyManagerPolicy: single-numa-node\ntopologyManagerScope: pod\n\
                    topologyManagerPolicyOptions:\n  prefer-closest-numa-nodes: \"true\"\n  max-allowable-numa-nodes: \"16\"\n";
        let expected = KubeletTopology {
            policy: TopologyManagerPolicy::SingleNumaNode,
            scope: TopologyManagerScope::Pod,
            prefer_closest_numa_nodes: true,
            max_allowable_numa_nodes: Some(16),
        };
        assert_eq!(parse(text).unwrap().topology, expected);
        assert_eq!(parse("{\"kind\": \"KubeletConfiguration\"}").unwrap(), KubeletConfig::default());
        assert_eq!(parse("").unwrap(), KubeletConfig::default());
    }

    /// With `align-by-socket` a NUMA node is not the unit by which CPUs are aligned.
    #[test]
    fn cpus_count_under_refusing_policies_by_numa_node() {
        let refuses = |text: &str| parse(text).unwrap().refuses_by_cpus();
        assert!(refuses("topologyManagerPolicy: restricted\ncpuManagerPolicy: static\n"));
        let whole =
            "topologyManagerPolicy: single-numa-node\ncpuManagerPolicyOptions: {full-pcpus-only: \"true\"}\n";
        assert!(refuses(whole));
        assert!(parse(whole).unwrap().gives_whole_cores);
        assert!(!refuses("topologyManagerPolicy: best-effort\ncpuManagerPolicy: static\n"));
        assert!(!refuses(
            "topologyManagerPolicy: restricted\ncpuManagerPolicyOptions: {align-by-socket: \"true\"}\n"
        ));
    }

    #[test]
    fn unknown_values_name_field_and_allowed() {
        let refused = |text: &str| parse(text).unwrap_err().to_string();
        assert_eq!(
            refused("topologyManagerPolicy: strict\n"),
            "topologyManagerPolicy: \"strict\" is not allowed; allowed are none, best-effort, restricted, single-numa-node"
        );
        assert_eq!(
            refused("topologyManagerScope: node\n"),
            "topologyManagerScope: \"node\" is not allowed; allowed are container, pod"
        );
        assert!(
            refused("topologyManagerPolicyOptions:\n  max-allowable-numa-nodes: many\n").contains("\"many\"")
        );
        assert!(!refused("topologyManagerPolicy: [").is_empty());
    }

    #[test]
    fn missing_file_is_an_error() {
        let error = read(Path::new("/nonexistent/config.yaml")).unwrap_err();
        assert!(matches!(error, KubeletConfigError::Read(_)));
    }
}
