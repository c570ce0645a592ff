//! Answers to `gantry explain`: reports on a pod, a gang and the queue, by the index. The command asks the extender for
//! them ([`http`]), or reads the cluster into an index of its own ([`crate::offline`]).

pub mod http;

use std::sync::Arc;
use std::time::Duration;

use gantry_gang::GangKey;

use crate::index::{GangReport, GangState, NodeReport, PodReport, Store};
use crate::pod::PodFacts;

/// Nodes looked at under one lock.
const NODES: usize = 64;
/// Gangs reported on under one lock.
const GANGS: usize = 64;
/// Pause between two locks.
const PAUSE: Duration = Duration::from_micros(100);
/// The largest edit distance of a suggested name.
const NEAR: usize = 2;
/// Names listed if none is close.
const SHOWN: usize = 8;

/// Why there is no report.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReportError {
    /// There is no such pod or gang; with a suggestion.
    #[error("{0}")]
    Unknown(String),
    /// What the pod asks for cannot be read.
    #[error("{0}")]
    Unreadable(String),
}

/// The report on a pod. `resources` are named if there is no such pod.
///
/// # Errors
/// There is no such pod, or what it asks for cannot be read.
pub fn pod(
    store: &Store,
    resources: &[impl AsRef<str>],
    namespace: &str,
    name: &str,
) -> Result<PodReport, ReportError> {
    let found = store.read(|index| {
        let pod = index.find_pod(namespace, name)?;
        Some((Arc::clone(pod), index.inspect(pod)))
    });
    let Some((pod, report)) = found else {
        let hint = Names::of_pods(store, namespace, name).hint(namespace, name);
        let resources: Vec<&str> = resources.iter().map(AsRef::as_ref).collect();
        return Err(ReportError::Unknown(format!(
            "no pod {name} in namespace {namespace} that requests {} or another managed resource{hint}",
            resources.join(", ")
        )));
    };
    let mut report =
        report.map_err(|error| ReportError::Unreadable(format!("pod {namespace}/{name}: {error}")))?;
    if report.bound.is_none() {
        report.set_nodes(nodes(store, &pod));
    }
    Ok(report)
}

/// Every node for a pod that waits: some under one lock, so that no decision waits for all of them.
fn nodes(store: &Store, pod: &PodFacts) -> Vec<NodeReport> {
    let (mut nodes, mut next, mut renumbered) = (Vec::new(), Some(0), None);
    while let Some(from) = next {
        let part = store.read(|index| index.inspect_nodes(pod, from, NODES));
        if *renumbered.get_or_insert(part.renumbered) != part.renumbered {
            return store.read(|index| index.inspect_nodes(pod, 0, usize::MAX)).nodes;
        }
        nodes.extend(part.nodes);
        next = part.next;
        // The lock is not fair: without a pause this thread takes it again before one that waits for it.
        std::thread::sleep(PAUSE);
    }
    nodes
}

/// The report on a gang. `queue` is the order of waiting gangs.
///
/// # Errors
/// There is no such gang.
pub fn gang(
    store: &Store,
    queue: &[Arc<GangKey>],
    namespace: &str,
    name: &str,
) -> Result<GangReport, ReportError> {
    store.read(|index| index.inspect_gang(queue, namespace, name)).ok_or_else(|| {
        let hint = Names::of_gangs(store, namespace, name).hint(namespace, name);
        ReportError::Unknown(format!("no gang {name} in namespace {namespace}{hint}"))
    })
}

/// The waiting gangs: first `queue`, the order in which they are planned, then those that wait by their status only.
pub fn queue(store: &Store, queue: &[Arc<GangKey>]) -> Vec<GangState> {
    let others = store.read(|index| index.gangs().waiting_outside(queue));
    let queued = queue.iter().zip(1..).map(|(key, position)| (key, Some(position)));
    let keys: Vec<_> = queued.chain(others.iter().map(|key| (key, None))).collect();
    let mut gangs = Vec::with_capacity(keys.len());
    for part in keys.chunks(GANGS) {
        let part = part.iter();
        store.read(|index| {
            gangs.extend(part.filter_map(|(key, position)| index.gangs().state(key, *position)));
        });
        std::thread::sleep(PAUSE);
    }
    gangs
}

/// What there is in place of a name that does not exist.
struct Names {
    /// A namespace that has this name.
    elsewhere: Option<Arc<str>>,
    /// The names of the namespace that was asked for.
    known: Vec<String>,
}

impl Names {
    fn of_pods(store: &Store, namespace: &str, name: &str) -> Self {
        store.read(|index| Self {
            elsewhere: index.namespace_of_pod(name).cloned(),
            known: index.pod_names(namespace),
        })
    }

    fn of_gangs(store: &Store, namespace: &str, name: &str) -> Self {
        store.read(|index| Self {
            elsewhere: index.gangs().namespace_of(name).cloned(),
            known: index.gangs().names(namespace),
        })
    }

    /// A suggestion: the same name in another namespace, the nearest name, or the existing ones.
    fn hint(&self, namespace: &str, name: &str) -> String {
        if let Some(space) = &self.elsewhere {
            return format!("; there is one in namespace {space}: add -n {space}");
        }
        let distance = |known: &String| match known.len().abs_diff(name.len()) {
            0..=NEAR => strsim::damerau_levenshtein(known, name),
            // At least: the exact distance takes long for many long names.
            more => more,
        };
        match self.known.iter().min_by_key(|known| distance(known)) {
            None => format!("; there is none at all in namespace {namespace}"),
            Some(near) if distance(near) <= NEAR => format!("; did you mean {near}?"),
            Some(_) if self.known.len() > SHOWN => {
                let (shown, more) = self.known.split_at(SHOWN);
                format!("; there are {} and {} more", shown.join(", "), more.len())
            }
            Some(_) => format!("; there are {}", self.known.join(", ")),
        }
    }
}
