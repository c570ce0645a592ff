//! What a gang is called, and by which convention its pods say that they belong together. Only names; what they mean stands in
//! `dialect`.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use gantry_api::GangStatus;

/// The conventions by which pods say that they are a gang, in the order in which they are asked: the first that says something wins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Dialect {
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
    /// LeaderWorkerSet: one gang per group.
    LeaderWorkerSet,
    /// JobSet, also under Kubeflow's TrainJob.
    JobSet,
    /// Kubeflow's PyTorchJob, TFJob, MPIJob and the like.
    Kubeflow,
    /// Ray clusters.
    Ray,
    /// A batch Job whose pods ask to be a gang.
    Job,
}

impl Dialect {
    /// All of them, in the order in which they are asked.
    pub const ALL: [Self; 13] = [
        Self::PodGroup,
        Self::Workload,
        Self::Annotation,
        Self::Coscheduling,
        Self::Volcano,
        Self::Koordinator,
        Self::Kueue,
        Self::Kai,
        Self::LeaderWorkerSet,
        Self::JobSet,
        Self::Kubeflow,
        Self::Ray,
        Self::Job,
    ];

    /// The convention of that name; the inverse of [`Self::as_str`].
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dialect| dialect.as_str() == name)
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
            Self::LeaderWorkerSet => "LeaderWorkerSet",
            Self::JobSet => "JobSet",
            Self::Kubeflow => "Kubeflow",
            Self::Ray => "Ray",
            Self::Job => "Job",
        }
    }
}

impl fmt::Display for Dialect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// What tells one gang from every other, of now and of before.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GangKey {
    /// Namespace of its pods.
    pub namespace: Arc<str>,
    /// What people call it: the name of the job or group.
    pub name: Arc<str>,
    /// By which convention.
    pub dialect: Dialect,
    /// What tells it from one of the same name before it: the UID of the owner, the attempt of a restart. Empty where the convention has
    /// nothing of the kind.
    pub incarnation: Arc<str>,
}

impl GangKey {
    /// The gang that the status of a `Gang` object in a namespace is about; `None` where it says nothing yet, or an unknown convention.
    pub fn of_status(namespace: &Arc<str>, status: &GangStatus) -> Option<Self> {
        let named = Some(status).filter(|status| !status.name.is_empty())?;
        Some(Self {
            namespace: Arc::clone(namespace),
            name: named.name.as_str().into(),
            dialect: Dialect::named(&named.dialect)?,
            incarnation: named.incarnation.as_str().into(),
        })
    }

    /// The name of its `Gang` object. A gang by our own annotation goes by its own name, so that a person can write the object first; any other by its
    /// name and five letters that tell conventions and incarnations apart. Always a legal name.
    pub fn object_name(&self) -> String {
        let mut name: String = self
            .name
            .chars()
            .map(|c| {
                if c.is_ascii_alphanumeric() || c == '-' || c == '.' {
                    c.to_ascii_lowercase()
                } else {
                    '-'
                }
            })
            .take(200)
            .collect();
        let plain = self.dialect == Dialect::Annotation && self.incarnation.is_empty() && *name == *self.name;
        if !plain {
            let mut hasher = Fnv(0xcbf2_9ce4_8422_2325);
            (self.dialect.as_str(), &*self.incarnation, &*self.name).hash(&mut hasher);
            name.push('-');
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

    fn key(dialect: Dialect, name: &str, incarnation: &str) -> GangKey {
        GangKey {
            namespace: "default".into(),
            name: name.into(),
            dialect,
            incarnation: incarnation.into(),
        }
    }

    #[test]
    fn a_gang_of_our_own_annotation_goes_by_its_name() {
        assert_eq!(key(Dialect::Annotation, "train", "").object_name(), "train");
    }

    #[test]
    fn conventions_and_incarnations_of_one_name_have_objects_of_their_own() {
        let names: std::collections::BTreeSet<String> = [
            key(Dialect::Annotation, "train", ""),
            key(Dialect::JobSet, "train", ""),
            key(Dialect::JobSet, "train", "1"),
            key(Dialect::JobSet, "train", "2"),
        ]
        .iter()
        .map(GangKey::object_name)
        .collect();
        assert_eq!(names.len(), 4, "{names:?}");
        assert!(names.iter().all(|name| name.starts_with("train")));
    }

    #[test]
    fn any_name_makes_a_legal_one() {
        for name in ["Train_1", "-x", "ä", "", &"x".repeat(300)] {
            let made = key(Dialect::Kueue, name, "uid").object_name();
            assert!(made.len() <= 253, "{made}");
            assert!(made.starts_with(|c: char| c.is_ascii_alphanumeric()), "{made}");
            assert!(made.ends_with(|c: char| c.is_ascii_alphanumeric()), "{made}");
            assert!(
                made.chars()
                    .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.'),
                "{made}"
            );
        }
    }
}
