//! Reads pods. Equal values are stored once: pods of one controller have the same needs, and a cluster of a hundred
//! thousand pods has few controllers.

use std::collections::{BTreeMap, HashSet};
use std::hash::Hash;
use std::sync::Arc;

use gantry_gang::{Needs, Resources};

use super::other_pod::{OtherPod, PodProfile};
use super::{PodFacts, SlimPod};
use crate::watched::WatchedResources;

/// Interned values. Unused ones are dropped as the set grows.
#[derive(Debug)]
pub struct Interner<T: ?Sized> {
    known: HashSet<Arc<T>>,
    /// Size at which unused values are dropped next.
    limit: usize,
}

/// Interned texts.
pub type TextInterner = Interner<str>;

/// Size below which nothing is dropped.
const FEW: usize = 1024;

impl<T: ?Sized> Default for Interner<T> {
    fn default() -> Self {
        Self { known: HashSet::new(), limit: FEW }
    }
}

impl<T: ?Sized + Eq + Hash> Interner<T> {
    /// Drops unused values.
    pub fn sweep(&mut self) {
        self.known.retain(|known| Arc::strong_count(known) > 1);
        if self.known.capacity() > 4 * self.known.len().max(FEW) {
            self.known.shrink_to(self.known.len() * 2);
        }
        self.limit = (self.known.len() * 2).max(FEW);
    }

    fn keep(&mut self, value: Arc<T>) -> Arc<T> {
        if self.known.len() >= self.limit {
            self.sweep();
        }
        self.known.insert(Arc::clone(&value));
        value
    }
}

impl TextInterner {
    /// The interned text.
    pub fn of(&mut self, text: &str) -> Arc<str> {
        match self.known.get(text) {
            Some(known) => Arc::clone(known),
            None => self.keep(text.into()),
        }
    }
}

impl<T: Eq + Hash> Interner<T> {
    /// The interned value.
    pub fn one(&mut self, value: T) -> Arc<T> {
        match self.known.get(&value) {
            Some(known) => Arc::clone(known),
            None => self.keep(Arc::new(value)),
        }
    }
}

/// Reads pods.
#[derive(Debug)]
pub struct Reader {
    pub(super) watched: WatchedResources,
    pub(super) words: TextInterner,
    pub(super) needs: Interner<Needs>,
    pub(super) profiles: Interner<PodProfile>,
    pub(super) loads: Interner<Resources>,
}

/// A parsed pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ParsedPod {
    /// A pod that requests watched resources.
    Facts(Box<PodFacts>),
    /// Any other pod.
    OtherPod(Box<OtherPod>),
}

impl ParsedPod {
    /// About how many bytes are kept of the pod, if it shares nothing with others; 0 if nothing is kept of it.
    pub(crate) fn weight(&self) -> usize {
        match self {
            Self::Facts(pod) => weight::facts(pod),
            Self::OtherPod(pod) => weight::other_pod(pod),
        }
    }

    /// What has to be known of a pod that is not kept: the devices that it holds. Others do not keep away from it, and
    /// no gang counts it.
    pub(crate) fn into_least(self) -> Self {
        let profile = |profile: &PodProfile| {
            Arc::new(PodProfile { namespace: Arc::clone(&profile.namespace), ..PodProfile::default() })
        };
        match self {
            Self::Facts(pod) => Self::Facts(Box::new(PodFacts {
                profile: profile(&pod.profile),
                needs: Arc::new(Needs {
                    resources: basic(&pod.needs.resources),
                    namespace: Arc::clone(&pod.namespace),
                    ..Needs::default()
                }),
                membership: None,
                scheduler_message: None,
                rejected: None,
                volume_claims: Vec::new(),
                insufficient: Vec::new(),
                written: Arc::default(),
                ..*pod
            })),
            Self::OtherPod(pod) => Self::OtherPod(Box::new(OtherPod {
                profile: profile(&pod.profile),
                load: Arc::new(basic(&pod.load)),
                membership: None,
                written: Arc::default(),
                ..*pod
            })),
        }
    }
}

/// CPU, memory and pods alone.
fn basic(resources: &Resources) -> Resources {
    Resources { others: BTreeMap::new(), ..resources.clone() }
}

/// Bytes of what is kept of pods. Interned texts are counted for each pod that has them.
mod weight {
    use std::fmt::{Debug, Write};

    use gantry_gang::Membership;
    use gantry_gang::needs::{HostPort, NodeTerm, PodTerm, Requirement, Spread, Toleration, TolerationValue};
    use gantry_gang::protocol::Stage;
    use gantry_planner::request::{Ask, NumaDemand, Request};

    use super::{Arc, BTreeMap, Needs, OtherPod, PodFacts, PodProfile, Resources};

    /// The values of fixed size, their allocations, and the entries of the tables.
    const FACTS: usize = 1536;
    const OTHER_POD: usize = 640;
    const MEMBER: usize = 512;
    /// A text with its allocation and its entry among the interned ones.
    const TEXT: usize = 72;
    /// An entry of a map or an element of a list, without its texts.
    const ENTRY: usize = 32;

    pub(super) fn facts(pod: &PodFacts) -> usize {
        let request = pod.request.as_ref().map_or(TEXT, |asked| request(asked));
        let ids = pod
            .allocated
            .iter()
            .map(|(resource, id)| 2 * ENTRY + resource.as_str().len() + id.as_str().len());
        FACTS
            + pod.name.len()
            + request
            + pod.written.bytes()
            + needs(&pod.needs)
            + profile(&pod.profile)
            + pod.grant.as_deref().map_or(0, str::len)
            + pod.scheduler_message.as_deref().map_or(0, text)
            + pod.rejected.as_deref().map_or(0, text)
            + pod.volume_claims.iter().map(|claim| text(claim)).sum::<usize>()
            + pod.insufficient.len() * ENTRY
            + ids.sum::<usize>()
            + membership(pod.membership.as_deref())
    }

    pub(super) fn other_pod(pod: &OtherPod) -> usize {
        if !matches!(pod.stage, Stage::Bound(_)) && pod.membership.is_none() {
            return 0;
        }
        OTHER_POD
            + pod.name.len()
            + pod.written.bytes()
            + resources(&pod.load)
            + profile(&pod.profile)
            + membership(pod.membership.as_deref())
    }

    fn text(text: &str) -> usize {
        TEXT + text.len()
    }

    fn request(request: &Request) -> usize {
        let name = |name: &Arc<str>| TEXT + name.len();
        let containers = request.asks.iter().flat_map(|ask| &ask.containers);
        let containers =
            containers.map(|container| 2 * ENTRY + name(&container.name) + 8 * container.blocks.len());
        let numa = |ask: &Ask| ask.numa.len() * size_of::<NumaDemand>();
        let asks = request.asks.iter().map(|ask| TEXT + ENTRY + 4 * ask.blocks.len() + numa(ask));
        asks.sum::<usize>() + containers.sum::<usize>() + request.order.iter().map(name).sum::<usize>()
    }

    fn membership(membership: Option<&Membership>) -> usize {
        membership.map_or(0, |membership| MEMBER + written(membership))
    }

    /// The length of a value as it is printed.
    fn written(value: &impl Debug) -> usize {
        struct Length(usize);
        impl Write for Length {
            fn write_str(&mut self, text: &str) -> std::fmt::Result {
                self.0 += text.len();
                Ok(())
            }
        }
        let mut length = Length(0);
        // It never fails.
        let _ = write!(length, "{value:?}");
        length.0
    }

    fn profile(profile: &PodProfile) -> usize {
        // Terms of one pod about others have an index.
        labels(&profile.labels) + 2 * pod_terms(&profile.apart_from) + host_ports(&profile.host_ports)
    }

    fn needs(needs: &Needs) -> usize {
        let preferred = needs.preferred.iter().map(|(_, term)| ENTRY + node_term(term));
        resources(&needs.resources)
            + labels(&needs.selector)
            + needs.affinity.iter().map(node_term).sum::<usize>()
            + preferred.sum::<usize>()
            + needs.tolerations.iter().map(toleration).sum::<usize>()
            + pod_terms(&needs.apart_from)
            + pod_terms(&needs.together_with)
            + needs.spread.iter().map(spread).sum::<usize>()
            + host_ports(&needs.host_ports)
    }

    fn resources(resources: &Resources) -> usize {
        resources.others.keys().map(|name| ENTRY + text(name)).sum()
    }

    fn labels(labels: &BTreeMap<Arc<str>, Arc<str>>) -> usize {
        labels.iter().map(|(key, value)| ENTRY + text(key) + text(value)).sum()
    }

    fn host_ports(ports: &[HostPort]) -> usize {
        ports.iter().map(|(_, address, _)| 2 * ENTRY + text(address)).sum()
    }

    fn requirements(all: &[Requirement]) -> usize {
        let one = |one: &Requirement| {
            let values = one.values.iter().map(|value| 16 + text(value));
            2 * ENTRY + text(&one.key) + values.sum::<usize>()
        };
        all.iter().map(one).sum()
    }

    fn node_term(term: &NodeTerm) -> usize {
        2 * ENTRY + requirements(&term.labels) + requirements(&term.names)
    }

    fn toleration(toleration: &Toleration) -> usize {
        let value = match &toleration.value {
            TolerationValue::Equal(value) => text(value),
            _ => 0,
        };
        2 * ENTRY + text(&toleration.key) + value
    }

    fn pod_terms(terms: &[PodTerm]) -> usize {
        let one = |term: &PodTerm| {
            let namespaces = term.namespaces.iter().flatten().map(|name| 16 + text(name));
            4 * ENTRY + requirements(&term.selector) + text(&term.topology_key) + namespaces.sum::<usize>()
        };
        terms.iter().map(one).sum()
    }

    fn spread(spread: &Spread) -> usize {
        4 * ENTRY + requirements(&spread.selector) + text(&spread.topology_key)
    }
}

impl Reader {
    /// A reader for the given watched resources.
    pub fn new(watched: WatchedResources) -> Self {
        Self {
            watched,
            words: TextInterner::default(),
            needs: Interner::default(),
            profiles: Interner::default(),
            loads: Interner::default(),
        }
    }

    /// Drops values that no pod has any more: profiles and needs first, because they have texts.
    pub fn sweep(&mut self) {
        self.needs.sweep();
        self.profiles.sweep();
        self.loads.sweep();
        self.words.sweep();
    }

    /// Reads a pod. `None` if it has no UID.
    pub fn read(&mut self, pod: SlimPod) -> Option<ParsedPod> {
        match self.request(&pod) {
            Some(request) => Some(ParsedPod::Facts(Box::new(self.facts(pod, request)?))),
            None => Some(ParsedPod::OtherPod(Box::new(self.other_pod(pod)?))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_are_one_and_those_that_nobody_has_are_dropped() {
        let mut words = TextInterner::default();
        let kept = words.of("kept");
        assert!(Arc::ptr_eq(&kept, &words.of("kept")));
        for number in 0..10 * FEW {
            words.of(&number.to_string());
        }
        assert!(words.known.len() <= FEW, "{}", words.known.len());
        assert!(Arc::ptr_eq(&kept, &words.of("kept")));
    }
}
