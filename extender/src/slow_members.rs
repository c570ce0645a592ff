//! Slow members: names the member of a running gang if the clocks, power or throttling of its GPUs stand out. All members of a
//! training job wait for the slowest. An Event on the pod and on the Gang, a condition of the Gang and a metric report it;
//! nothing acts on it.
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
use compare::{GpuSpeed, Sign, SlowFinding};

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

/// A member that is slow now.
#[derive(Debug)]
struct SlowMember {
    since: Instant,
    /// What stood out, and its pod and why it is slow, as it was named. Clocks that change a little do not change the text.
    named: Option<SignText>,
}

/// What stands out of a member, and its text.
type SignText = (Sign, Arc<str>);

/// Members that are slow now.
#[derive(Debug, Default)]
struct SlowSince(BTreeMap<MemberKey, SlowMember>);

impl SlowSince {
    /// Records the members that are slow now, each with its text. Returns those that are to be named now.
    fn record(
        &mut self,
        slow: &BTreeMap<MemberKey, SignText>,
        now: Instant,
        after: Duration,
    ) -> BTreeSet<MemberKey> {
        self.0.retain(|key, _| slow.contains_key(key));
        let mut due = BTreeSet::new();
        for (key, named) in slow {
            let member = self.0.entry(key.clone()).or_insert(SlowMember { since: now, named: None });
            if member.named.is_none() && now.duration_since(member.since) >= after {
                member.named = Some(named.clone());
                due.insert(key.clone());
            }
        }
        due
    }

    /// What the condition of each gang with named members states.
    fn of_gangs(&self) -> BTreeMap<Arc<GangKey>, Arc<str>> {
        let mut all: BTreeMap<Arc<GangKey>, Vec<Arc<str>>> = BTreeMap::new();
        for ((gang, _), member) in &self.0 {
            let named = member.named.iter().map(|(_, text)| Arc::clone(text));
            named.for_each(|text| all.entry(Arc::clone(gang)).or_default().push(text));
        }
        let text = |mut members: Vec<Arc<str>>| -> Arc<str> {
            members.sort();
            let more = members.len().saturating_sub(1);
            let first = members.first().map_or("", |text| text);
            match more {
                0 => first.into(),
                1 => format!("{first}; and 1 more member").into(),
                _ => format!("{first}; and {more} more members").into(),
            }
        };
        all.into_iter().map(|(gang, members)| (gang, text(members))).collect()
    }

    /// Named members, by namespace.
    fn named(&self) -> BTreeMap<Arc<str>, usize> {
        let mut counts = BTreeMap::new();
        for ((gang, _), _) in self.0.iter().filter(|(_, member)| member.named.is_some()) {
            *counts.entry(Arc::clone(&gang.namespace)).or_default() += 1;
        }
        counts
    }

    /// Named members, by what stands out.
    fn signs(&self) -> BTreeMap<&'static str, usize> {
        let mut counts: BTreeMap<_, usize> = Sign::ALL.map(|sign| (sign.as_str(), 0)).into();
        for (sign, _) in self.0.values().filter_map(|member| member.named.as_ref()) {
            *counts.entry(sign.as_str()).or_default() += 1;
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
    let mut published = BTreeMap::new();
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
        let text = |(key, (pod, why)): (&MemberKey, &(&Arc<PodFacts>, SlowFinding<'_>))| {
            (key.clone(), (why.sign, Arc::from(format!("{}: {why}", pod.name))))
        };
        let due = known.record(&slow.iter().map(text).collect(), Instant::now(), settings.after);
        for key in due {
            if let Some((pod, slow_member)) = slow.get(&key) {
                report(&events, &key.0, pod, slow_member);
            }
        }
        metrics.slow_members(&known.named(), &known.signs());
        publish(&store, &mut published, known.of_gangs());
    }
    // The next leader counts them.
    metrics.slow_members(&BTreeMap::new(), &SlowSince::default().signs());
}

/// Writes changes into the conditions of gangs.
fn publish(
    store: &Store,
    published: &mut BTreeMap<Arc<GangKey>, Arc<str>>,
    now: BTreeMap<Arc<GangKey>, Arc<str>>,
) {
    let ended = published.keys().filter(|gang| !now.contains_key(*gang)).map(|gang| (gang, None));
    let changed = now.iter().filter(|(gang, text)| published.get(*gang) != Some(text));
    let changed = changed.map(|(gang, text)| (gang, Some(Arc::clone(text))));
    for (gang, members) in ended.chain(changed) {
        store.update(|index| index.members_slow(gang, members));
    }
    *published = now;
}

fn report(events: &Events, gang: &GangKey, pod: &PodFacts, slow: &SlowFinding<'_>) {
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
