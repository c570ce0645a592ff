//! The releases of Kubernetes that a cluster can have, and how their settings differ.

use std::fmt;

use crate::components::default_release;
use crate::{Error, Result};

/// The variable that names the minor version of Kubernetes, such as `1.34`.
const VARIABLE: &str = "GANTRY_KUBERNETES";

/// The releases beside the default one, a line each.
const RELEASES: &str = include_str!("../components/kubernetes/releases");

/// A release of Kubernetes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kubernetes {
    release: String,
    minor: u32,
}

/// Feature gates of CompositePodGroups, in addition to those of PodGroups.
pub const COMPOSITE_GATES: [&str; 2] = ["TopologyAwareWorkloadScheduling=true", "CompositePodGroup=true"];

/// What older minor versions of Kubernetes do not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Feature {
    /// Groups of pods as objects of `scheduling.k8s.io`, by the feature gate `GenericWorkload`.
    NativeGroups,
    /// PodGroups of `scheduling.k8s.io`.
    PodGroups,
    /// PodGroups of `scheduling.k8s.io/v1beta1`.
    BetaPodGroups,
    /// CompositePodGroups of `scheduling.k8s.io/v1alpha3`, by the feature gate `CompositePodGroup`.
    CompositePodGroups,
    /// `spec.scheduling` of Jobs, by the feature gate `WorkloadWithJob`.
    JobScheduling,
    /// `status.features` of Nodes.
    NodeFeatures,
    /// `status.declaredFeatures` of Nodes.
    DeclaredFeatures,
    /// MutatingAdmissionPolicies.
    MutatingAdmissionPolicies,
    /// MutatingAdmissionPolicies without a feature gate, of `admissionregistration.k8s.io/v1`.
    StableMutatingAdmissionPolicies,
    /// A kubelet that reads the pods of its own node only.
    OwnPodsOnly,
    /// A kubelet that no longer lists the devices of a pod that ended as the last one on its node. Kubernetes 1.31 was not
    /// tried.
    DropsEndedPods,
    /// kubelet's setting `failCgroupV1`.
    FailCgroupV1,
    /// Service account tokens that are bound to a node, without a feature gate.
    NodeBoundTokens,
}

impl Feature {
    /// The first minor version that has it.
    fn since(self) -> u32 {
        match self {
            Self::BetaPodGroups | Self::CompositePodGroups | Self::JobScheduling => 37,
            Self::PodGroups | Self::StableMutatingAdmissionPolicies | Self::DeclaredFeatures => 36,
            Self::NativeGroups => 35,
            Self::MutatingAdmissionPolicies => 34,
            Self::OwnPodsOnly | Self::DropsEndedPods => 32,
            Self::FailCgroupV1 | Self::NodeBoundTokens | Self::NodeFeatures => 31,
        }
    }
}

impl Kubernetes {
    /// The release of the minor version that `GANTRY_KUBERNETES` names, or the default one.
    ///
    /// # Errors
    /// The variable has another value than a known minor version.
    pub fn selected() -> Result<Self> {
        match std::env::var(VARIABLE) {
            Ok(minor) => Self::of_minor(&minor),
            Err(_) => Self::new(&default_release()?),
        }
    }

    /// The known release of a minor version such as `1.34`.
    ///
    /// # Errors
    /// None is known; the error names those that are.
    fn of_minor(minor: &str) -> Result<Self> {
        let mut known = vec![Self::new(&default_release()?)?];
        for release in RELEASES.lines() {
            known.push(Self::new(release)?);
        }
        match known.iter().find(|kubernetes| kubernetes.to_string() == minor) {
            Some(kubernetes) => Ok(kubernetes.clone()),
            None => Err(Error::UnknownKubernetes {
                value: minor.to_owned(),
                known: known.iter().map(Self::to_string).collect::<Vec<_>>().join(", "),
            }),
        }
    }

    fn new(release: &str) -> Result<Self> {
        let minor = release.strip_prefix("v1.").and_then(|rest| rest.split('.').next());
        match minor.and_then(|minor| minor.parse().ok()) {
            Some(minor) => Ok(Self { release: release.to_owned(), minor }),
            None => Err(Error::UnknownKubernetes { value: release.to_owned(), known: "v1.x.y".to_owned() }),
        }
    }

    /// The release, as `v1.x.y`.
    #[must_use]
    pub fn release(&self) -> &str {
        &self.release
    }

    /// The second part of the version.
    pub(crate) fn minor(&self) -> u32 {
        self.minor
    }

    /// Whether this is the release of `components/kubernetes/go.mod`, which CI uses.
    ///
    /// # Errors
    /// That file cannot be read.
    pub fn is_default(&self) -> Result<bool> {
        Ok(self.release == default_release()?)
    }

    /// Whether this release has a feature.
    #[must_use]
    pub fn has(&self, feature: Feature) -> bool {
        self.minor >= feature.since()
    }

    /// The version of `scheduling.k8s.io` that has the native groups.
    #[must_use]
    pub fn native_groups(&self) -> Option<&'static str> {
        [
            (Feature::BetaPodGroups, "scheduling.k8s.io/v1beta1"),
            (Feature::PodGroups, "scheduling.k8s.io/v1alpha2"),
            (Feature::NativeGroups, "scheduling.k8s.io/v1alpha1"),
        ]
        .into_iter()
        .find_map(|(feature, version)| self.has(feature).then_some(version))
    }

    /// The version of `admissionregistration.k8s.io` that has MutatingAdmissionPolicies.
    #[must_use]
    pub fn mutating_policies(&self) -> Option<&'static str> {
        [
            (Feature::StableMutatingAdmissionPolicies, "admissionregistration.k8s.io/v1"),
            (Feature::MutatingAdmissionPolicies, "admissionregistration.k8s.io/v1beta1"),
        ]
        .into_iter()
        .find_map(|(feature, version)| self.has(feature).then_some(version))
    }

    /// Arguments of kube-apiserver that not every release takes.
    pub(crate) fn api_server_args(&self) -> Vec<String> {
        let (mut gates, mut apis) = (Vec::new(), Vec::new());
        if let Some(version) = self.native_groups() {
            gates.push("GenericWorkload=true");
            apis.push(version);
        }
        if self.has(Feature::CompositePodGroups) {
            gates.extend(COMPOSITE_GATES);
            apis.push("scheduling.k8s.io/v1alpha3");
        }
        if self.has(Feature::JobScheduling) {
            gates.push("WorkloadWithJob=true");
        }
        if let Some(version) = self.mutating_policies()
            && !self.has(Feature::StableMutatingAdmissionPolicies)
        {
            gates.push("MutatingAdmissionPolicy=true");
            apis.push(version);
        }
        if !self.has(Feature::NodeBoundTokens) {
            // Tests bind the plugin's token to its node, because the plugin has no pod.
            gates.extend([
                "ServiceAccountTokenNodeBinding=true",
                "ServiceAccountTokenNodeBindingValidation=true",
            ]);
        }
        let apis: Vec<String> = apis.iter().map(|version| format!("{version}=true")).collect();
        [("--feature-gates", gates.join(",")), ("--runtime-config", apis.join(","))]
            .into_iter()
            .filter(|(_, values)| !values.is_empty())
            .map(|(flag, values)| format!("{flag}={values}"))
            .collect()
    }
}

/// The minor version, as `1.x`.
impl fmt::Display for Kubernetes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "1.{}", self.minor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minor_versions_have_one_release_each() {
        let default = Kubernetes::new(&default_release().unwrap()).unwrap();
        assert!(default.is_default().unwrap());
        assert_eq!(Kubernetes::of_minor(&default.to_string()).unwrap(), default);
        let mut minors = vec![default.minor];
        for release in RELEASES.lines() {
            let kubernetes = Kubernetes::new(release).unwrap();
            assert_eq!(Kubernetes::of_minor(&kubernetes.to_string()).unwrap(), kubernetes);
            assert!(!kubernetes.is_default().unwrap());
            assert!(!minors.contains(&kubernetes.minor), "{release}");
            minors.push(kubernetes.minor);
        }
    }

    #[test]
    fn unknown_version_names_the_known_ones() {
        for value in ["1.29", "v1.34", "1.34.4", "", "1", "1.99999999999"] {
            let error = Kubernetes::of_minor(value).unwrap_err().to_string();
            assert!(error.contains(&format!("{value:?}")) && error.contains("1.37, 1.36"), "{error}");
        }
    }

    #[test]
    fn settings_follow_the_version() {
        let args = |release: &str| Kubernetes::new(release).unwrap().api_server_args();
        assert_eq!(
            args("v1.37.1"),
            [
                "--feature-gates=GenericWorkload=true,TopologyAwareWorkloadScheduling=true,CompositePodGroup=true,WorkloadWithJob=true",
                "--runtime-config=scheduling.k8s.io/v1beta1=true,scheduling.k8s.io/v1alpha3=true",
            ]
        );
        assert_eq!(
            args("v1.35.4"),
            [
                "--feature-gates=GenericWorkload=true,MutatingAdmissionPolicy=true",
                "--runtime-config=scheduling.k8s.io/v1alpha1=true,admissionregistration.k8s.io/v1beta1=true",
            ]
        );
        assert!(args("v1.32.13").is_empty());
        assert!(args("v1.30.14").concat().contains("ServiceAccountTokenNodeBinding=true"));
    }
}
