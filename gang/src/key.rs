//! The name of a gang, and the convention by which its pods declare that they belong together. Only names; what they mean stands in
//! `integration`.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use gantry_api::GangStatus;

use crate::integrations::value;

/// The conventions by which pods declare that they are a gang, in the order in which they are tried: the first that finds one wins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Integration {
    /// `spec.schedulingGroup` with a PodGroup of scheduling.k8s.io (Kubernetes 1.36 and later).
    PodGroup,
    /// `spec.workloadRef` with a Workload of scheduling.k8s.io (Kubernetes 1.35).
    Workload,
    /// Our own annotation.
    Annotation,
    /// The coscheduling plugin of scheduler-plugins: label and PodGroup of scheduling.x-k8s.io.
    Coscheduling,
    /// Volcano: annotation and PodGroup of scheduling.volcano.sh.
    Volcano,
    /// Koordinator: annotations.
    Koordinator,
    /// Kueue's groups of plain pods: label and annotation.
    Kueue,
    /// KAI: annotation and PodGroup of scheduling.run.ai.
    Kai,
    /// Grove: label and PodGang of scheduler.grove.io.
    Grove,
    /// LeaderWorkerSet: one gang per group.
    LeaderWorkerSet,
    /// JobSet, also under Kubeflow's TrainJob.
    JobSet,
    /// Kubeflow's PyTorchJob, TFJob, MPIJob and the like.
    Kubeflow,
    /// Ray clusters.
    Ray,
    /// A batch Job with pods that ask to be a gang.
    Job,
}

impl Integration {
    /// All of them, in the order in which they are asked.
    pub const ALL: [Self; 14] = [
        Self::PodGroup,
        Self::Workload,
        Self::Annotation,
        Self::Coscheduling,
        Self::Volcano,
        Self::Koordinator,
        Self::Kueue,
        Self::Kai,
        Self::Grove,
        Self::LeaderWorkerSet,
        Self::JobSet,
        Self::Kubeflow,
        Self::Ray,
        Self::Job,
    ];

    /// The convention of that name; the inverse of [`Self::as_str`].
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|integration| integration.as_str() == name)
    }

    /// Its name in messages, metrics and `kubectl get gangs`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::PodGroup => "PodGroup",
            Self::Workload => "Workload",
            Self::Annotation => "Annotation",
            Self::Coscheduling => "Coscheduling",
            Self::Volcano => "Volcano",
            Self::Koordinator => "Koordinator",
            Self::Kueue => "Kueue",
            Self::Kai => "KAI",
            Self::Grove => "Grove",
            Self::LeaderWorkerSet => "LeaderWorkerSet",
            Self::JobSet => "JobSet",
            Self::Kubeflow => "Kubeflow",
            Self::Ray => "Ray",
            Self::Job => "Job",
        }
    }
}

impl fmt::Display for Integration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// What distinguishes one gang from every other, of now and of before.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GangKey {
    /// Namespace of its pods.
    pub namespace: Arc<str>,
    /// What people call it: the name of the job or group.
    pub name: Arc<str>,
    /// By which convention.
    pub integration: Integration,
    /// Distinguishes it from one of the same name before it: the UID of the owner, the attempt of a restart. Empty where the convention has
    /// nothing of the kind.
    pub incarnation: Arc<str>,
}

impl GangKey {
    /// The gang that the status of a `Gang` object in a namespace is about; `None` where it states nothing yet, or an unknown convention.
    pub fn of_status(namespace: &Arc<str>, status: &GangStatus) -> Option<Self> {
        let named = Some(status).filter(|status| !status.name.is_empty())?;
        Some(Self {
            namespace: Arc::clone(namespace),
            name: named.name.as_str().into(),
            integration: Integration::named(&named.integration)?,
            incarnation: named.incarnation.as_str().into(),
        })
    }

    /// Whether one owner creates it again and again as gangs of their own.
    pub(crate) fn has_successors(&self) -> bool {
        matches!(self.integration, Integration::JobSet | Integration::LeaderWorkerSet)
    }

    /// Whether another gang has the same name by the same convention.
    pub(crate) fn is_named_like(&self, other: &Self) -> bool {
        (&self.namespace, &self.name, self.integration) == (&other.namespace, &other.name, other.integration)
    }

    /// Whether both are incarnations of what one owner creates again and again, or the same.
    pub fn is_incarnation_of(&self, other: &Self) -> bool {
        self.is_named_like(other) && self.lineage() == other.lineage()
    }

    /// What all incarnations that one owner creates have in common.
    fn lineage(&self) -> &str {
        match self.integration {
            // UID of the set, and the attempt.
            Integration::JobSet => self.incarnation.rsplit_once('/').map_or("", |(uid, _)| uid),
            // The revision of the template.
            Integration::LeaderWorkerSet => "",
            _ => &self.incarnation,
        }
    }

    /// The index of the group that it is, where its owner has several that are gangs of their own.
    pub(crate) fn group_index(&self) -> Option<u32> {
        if self.integration != Integration::LeaderWorkerSet {
            return None;
        }
        let group = self.name.split('/').next()?;
        group.rsplit_once('-')?.1.parse().ok()
    }

    /// The name of its `Gang` object. A gang by our own annotation goes by its own name, so that the user can write the object first; any
    /// other by its name and five letters that distinguish conventions and incarnations. Always a legal name.
    pub fn object_name(&self) -> String {
        let legal = value::name(&self.name).is_ok();
        let plain = self.integration == Integration::Annotation && self.incarnation.is_empty() && legal;
        let mut name = String::new();
        for c in self.name.chars().take(200) {
            let kept = c.is_ascii_alphanumeric() || c == '.';
            push(&mut name, if kept { c.to_ascii_lowercase() } else { '-' });
        }
        if !plain {
            let mut hasher = Fnv(0xcbf2_9ce4_8422_2325);
            (self.integration.as_str(), &*self.incarnation, &*self.name).hash(&mut hasher);
            push(&mut name, '-');
            // Letters and digits that cannot be taken for one another.
            let alphabet = b"bcdfghjklmnpqrstvwxz2456789";
            let mut rest = hasher.finish();
            for _ in 0..5 {
                let letter = usize::try_from(rest % 27).unwrap_or_default();
                name.push(char::from(alphabet[letter]));
                rest /= 27;
            }
        }
        if !name.starts_with(|c: char| c.is_ascii_alphanumeric()) {
            name.insert(0, 'g');
        }
        name
    }
}

/// Adds to the name of an object. Each part of it between dots has a letter or digit at both ends: of what stands between two of those only
/// a lone dot stays one.
fn push(name: &mut String, c: char) {
    let lone = !name.ends_with(['-', '.']);
    if !lone && !c.is_ascii_alphanumeric() {
        if name.ends_with('.') {
            name.pop();
            name.push('-');
        }
        name.push('-');
    } else {
        name.push(c);
    }
}

impl fmt::Display for GangKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// FNV-1a: the name must be the same in every process and every version.
struct Fnv(u64);

impl Hasher for Fnv {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::integrations::value::is_object_name;

    fn key(integration: Integration, name: &str, incarnation: &str) -> GangKey {
        GangKey {
            namespace: "default".into(),
            name: name.into(),
            integration,
            incarnation: incarnation.into(),
        }
    }

    #[test]
    fn a_gang_of_our_own_annotation_goes_by_its_name() {
        assert_eq!(key(Integration::Annotation, "train", "").object_name(), "train");
    }

    #[test]
    fn object_names_differ_by_integration_and_incarnation() {
        let names: std::collections::BTreeSet<String> = [
            key(Integration::Annotation, "train", ""),
            key(Integration::JobSet, "train", ""),
            key(Integration::JobSet, "train", "1"),
            key(Integration::JobSet, "train", "2"),
        ]
        .iter()
        .map(GangKey::object_name)
        .collect();
        assert_eq!(names.len(), 4, "{names:?}");
        assert!(names.iter().all(|name| name.starts_with("train")));
    }

    #[test]
    fn any_name_makes_a_legal_one_of_its_own() {
        let cut_at_a_dot = format!("{}.{}", "x".repeat(199), "x".repeat(99));
        let names = [
            "Train_1",
            "-x",
            ".x",
            "x-",
            "x.",
            "ä",
            "",
            "a..b",
            "a.-b",
            "a-.b",
            "a._b",
            "a_.b",
            "a.b",
            "a--b",
            "a...b",
            "..",
            "-.-",
            &"x".repeat(300),
            &".".repeat(300),
            &cut_at_a_dot,
        ];
        let mut seen = std::collections::BTreeSet::new();
        for integration in [Integration::Kueue, Integration::Annotation] {
            for name in names {
                for incarnation in ["", "uid"] {
                    let made = key(integration, name, incarnation).object_name();
                    assert!(is_object_name(&made), "{integration} {name:?}: {made}");
                    assert!(seen.insert(made.clone()), "{integration} {name:?}: {made} is another's");
                }
            }
        }
    }

    #[test]
    fn what_was_a_legal_name_before_has_not_changed() {
        assert_eq!(key(Integration::Kueue, "train.a-b", "").object_name(), "train.a-b-zp692");
    }

    proptest::proptest! {
        #[test]
        fn whatever_it_is_called_its_object_has_a_legal_name(
            name in proptest::prop_oneof!["[a._-]{0,8}", "[ -~]{0,260}", proptest::prelude::any::<String>()],
            integration in proptest::sample::select(Integration::ALL.to_vec()),
        ) {
            let made = key(integration, &name, "").object_name();
            proptest::prop_assert!(is_object_name(&made), "{}", made);
        }
    }
}
