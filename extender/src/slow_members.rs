//! Slow members: names the member of a running gang with GPUs that run slower than those of the rest. All members of a
//! training job wait for the slowest. An Event on the pod and on the Gang and a metric report it; nothing acts on it.
//!
//! `compare` is pure and decides; `clocks` keeps what GpuNodes report.

mod clocks;
mod compare;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use gantry_api::{NodeName, PodUid, Reason};
use gantry_gang::GangKey;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::event;
use crate::gang::events::Events;
use crate::index::Store;
use crate::metrics::Metrics;
use crate::pod::PodFacts;
use compare::{GpuSpeed, Slow};

pub(crate) use clocks::ClusterClocks;

/// Interval of comparisons. GpuNodes report clocks once a minute.
const INTERVAL: Duration = Duration::from_secs(5);
/// Nodes that are read under one lock of the index.
const NODES: usize = 64;

/// What is compared, and for how long a member must be slow.
#[derive(Debug, Clone)]
pub(crate) struct SlowMemberSettings {
    /// The clocks of all nodes.
    pub(crate) clocks: Arc<ClusterClocks>,
    /// How long a member must be slower than the others before it is named.
    pub(crate) after: Duration,
}

/// A gang and the member of it.
type MemberKey = (Arc<GangKey>, PodUid);

/// Members that are slow now, each with the time since when and whether it is named.
#[derive(Debug, Default)]
struct SlowSince(BTreeMap<MemberKey, (Instant, bool)>);

impl SlowSince {
    /// Records the members that are slow now. Returns those that are to be named now.
    fn record(&mut self, slow: &BTreeSet<MemberKey>, now: Instant, after: Duration) -> BTreeSet<MemberKey> {
        self.0.retain(|key, _| slow.contains(key));
        let mut due = BTreeSet::new();
        for key in slow {
            let (since, is_named) = self.0.entry(key.clone()).or_insert((now, false));
            if !*is_named && now.duration_since(*since) >= after {
                *is_named = true;
                due.insert(key.clone());
            }
        }
        due
    }

    /// Named members, by namespace.
    fn named(&self) -> BTreeMap<Arc<str>, usize> {
        let mut counts = BTreeMap::new();
        for ((gang, _), _) in self.0.iter().filter(|(_, (_, is_named))| *is_named) {
            *counts.entry(Arc::clone(&gang.namespace)).or_default() += 1;
        }
        counts
    }
}

/// A member with the GPUs that it holds.
struct Member {
    pod: Arc<PodFacts>,
    gpus: Vec<GpuSpeed>,
}

/// Compares the members of all gangs until `until`.
pub(crate) async fn run(
    settings: SlowMemberSettings,
    store: Arc<Store>,
    events: Events,
    metrics: Arc<Metrics>,
    until: CancellationToken,
) {
    let mut known = SlowSince::default();
    while until.run_until_cancelled(tokio::time::sleep(INTERVAL)).await.is_some() {
        let gangs = members(&store, &settings.clocks);
        let mut slow = BTreeMap::new();
        for (gang, members) in &gangs {
            let speeds: Vec<&[GpuSpeed]> = members.values().map(|member| &*member.gpus).collect();
            let found = compare::slow(&speeds);
            for (member, slow_member) in members.values().zip(found) {
                if let Some(slow_member) = slow_member {
                    slow.insert((Arc::clone(gang), member.pod.uid.clone()), (&member.pod, slow_member));
                }
            }
        }
        let due = known.record(&slow.keys().cloned().collect(), Instant::now(), settings.after);
        for key in due {
            if let Some((pod, slow_member)) = slow.get(&key) {
                report(&events, &key.0, pod, slow_member);
            }
        }
        metrics.slow_members(&known.named());
    }
    // The next leader counts them.
    metrics.slow_members(&BTreeMap::new());
}

fn report(events: &Events, gang: &GangKey, pod: &PodFacts, slow: &Slow<'_>) {
    tracing::info!(pod = %format!("{}/{}", pod.namespace, pod.name), %gang, "a member of a gang is slow: {slow}");
    let message = |text: String| event::message(Reason::MemberSlow, true, text);
    events.pod(&pod.namespace, &pod.name, &pod.uid, message(slow.to_string()));
    events.gang(gang, message(format!("{}: {slow}", pod.name)));
}

/// The members of each gang with the clocks of their GPUs.
fn members(store: &Store, clocks: &ClusterClocks) -> BTreeMap<Arc<GangKey>, BTreeMap<PodUid, Member>> {
    let nodes = clocks.all();
    let names: Vec<&NodeName> = nodes.keys().collect();
    let mut gangs: BTreeMap<Arc<GangKey>, BTreeMap<PodUid, Member>> = BTreeMap::new();
    for chunk in names.chunks(NODES) {
        let held = store.read(|index| {
            let of = |name: &&NodeName| ((*name).clone(), index.gang_gpus(name.as_str()));
            chunk.iter().map(of).collect::<Vec<_>>()
        });
        for (node, held) in held {
            for (gang, pod, gpu) in held {
                let clock =
                    nodes.get(&node).and_then(|clocks| clocks.0.iter().find(|clock| clock.index == gpu));
                let Some(clock) = clock else { continue };
                let members = gangs.entry(gang).or_default();
                let member =
                    members.entry(pod.uid.clone()).or_insert_with(|| Member { pod, gpus: Vec::new() });
                member.gpus.push(GpuSpeed { node: node.clone(), clock: clock.clone() });
            }
        }
    }
    gangs
}

#[cfg(test)]
mod tests;
