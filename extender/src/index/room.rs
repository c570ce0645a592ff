//! What nodes have besides devices: what they say of themselves, what is left of it, and which pods are where. Kept up to date event by
//! event, for a hundred thousand pods are not counted again for every plan. Decides nothing.

mod barred;
mod feed;

pub(super) use barred::concerns;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use gantry_api::PodUid;
use gantry_gang::needs::{NodeTerm, PodTerm, Requirement};
use gantry_gang::protocol::Stage;
use gantry_gang::{Fabric, Needs, NodeFacts, Resources};
use gantry_planner::input::Room;

use crate::pod::{OtherPod, PodProfile, Shared};
use crate::snapshot::NodeIx;

/// So many labels that terms are about are no matter.
const FEW: usize = 64;

/// What the index knows of nodes and pods besides devices.
#[derive(Debug, Default)]
pub(super) struct Rooms {
    /// By number of node.
    rooms: Vec<Room>,
    /// How many pods are on each, by its number.
    counts: Vec<u32>,
    fabric: Fabric,
    /// The fabric is not that of the nodes any more.
    stale: bool,
    pods: HashMap<PodUid, There>,
    /// Where pods of each kind are, and how many.
    by_profile: HashMap<ProfileRef, BTreeMap<NodeIx, u32>>,
    /// Those of them that keep others off.
    with_anti_affinity: HashSet<ProfileRef>,
    /// Labels that terms are about: those of required affinity and anti-affinity, and of spreading, of any pod there was of late.
    about: BTreeSet<Arc<str>>,
    /// How many there were when they were last gathered from the pods that are there.
    gathered: usize,
    /// There are others: needs that were worked out before have not the same labels.
    relabelled: bool,
    needs: Shared<Needs>,
    /// Nodes on which more fits now.
    gained: BTreeSet<NodeIx>,
    /// Grows whenever a pod that is watched comes or goes.
    moves: u64,
    /// How many of the others that may be stopped are of each priority.
    by_priority: BTreeMap<i32, u32>,
    /// Nodes on which less may fit now, and whether it is by what they say of themselves.
    narrowed: BTreeMap<NodeIx, bool>,
}

/// A pod, and where it is.
#[derive(Debug)]
struct There {
    /// `None` before it is bound.
    node: Option<NodeIx>,
    load: Load,
    profile: Arc<PodProfile>,
    /// It asks for something that is watched, and is kept elsewhere too.
    watched: bool,
    /// All of it, if it is not kept elsewhere and belongs to a gang.
    claiming: Option<Arc<OtherPod>>,
    /// If it is not kept elsewhere and may be stopped by itself.
    stoppable: Option<Box<Stoppable>>,
}

/// What is kept of a pod without devices in case it has to be stopped. Most are of DaemonSets, of which nothing is.
#[derive(Debug)]
pub(super) struct Stoppable {
    /// Its name.
    pub(super) name: Arc<str>,
    /// `spec.priority`.
    pub(super) priority: i32,
    /// When it was created, in seconds since 1970.
    pub(super) created: i64,
    /// If it is being deleted: when it has to be gone, in seconds since 1970.
    pub(super) ends: Option<i64>,
}

impl Stoppable {
    fn of(pod: &OtherPod) -> Option<Box<Self>> {
        let stoppable = !pod.stays && pod.claim.is_none() && matches!(pod.stage, Stage::Bound(_));
        stoppable.then(|| {
            Box::new(Self {
                name: Arc::clone(&pod.name),
                priority: pod.priority,
                created: pod.created,
                ends: pod.ends,
            })
        })
    }
}

/// A pod without devices that may be stopped, where it is, what it takes there and what kind of pod it is.
pub(super) struct Loose<'r> {
    pub(super) uid: &'r PodUid,
    pub(super) node: NodeIx,
    pub(super) load: &'r Resources,
    pub(super) profile: &'r Arc<PodProfile>,
    pub(super) what: &'r Stoppable,
}

/// What a pod takes of its node.
#[derive(Debug, Clone, PartialEq)]
enum Load {
    Alone(Arc<Resources>),
    Among(Arc<Needs>),
}

impl Load {
    fn resources(&self) -> &Resources {
        match self {
            Self::Alone(resources) => resources,
            Self::Among(needs) => &needs.resources,
        }
    }
}

/// One kind of pods, by identity: equal ones are one already, or count as two, which is as good.
#[derive(Debug, Clone)]
struct ProfileRef(Arc<PodProfile>);

impl PartialEq for ProfileRef {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for ProfileRef {}

impl std::hash::Hash for ProfileRef {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        Arc::as_ptr(&self.0).hash(state);
    }
}

impl Rooms {
    fn room(&mut self, node: NodeIx) -> &mut Room {
        let index = node.0 as usize;
        if self.rooms.len() <= index {
            self.rooms.resize_with(index + 1, Room::default);
            self.counts.resize(index + 1, 0);
        }
        &mut self.rooms[index]
    }

    /// A pod is there as it is now, in place of what was known of it.
    fn put(&mut self, uid: PodUid, there: There) {
        self.learn(selectors(&there.profile.apart_from));
        let before = self.pods.get(&uid);
        let same = before.is_some_and(|before| {
            before.node == there.node && before.load == there.load && before.profile == there.profile
        });
        if same {
            let priority = there.stoppable.as_ref().map(|what| what.priority);
            let before = self.pods.get_mut(&uid).and_then(|known| {
                known.claiming = there.claiming;
                std::mem::replace(&mut known.stoppable, there.stoppable)
            });
            self.uncount(before.map(|what| what.priority));
            self.count(priority);
            return;
        }
        self.remove(&uid);
        self.moves += u64::from(there.watched);
        self.count(there.stoppable.as_ref().map(|what| what.priority));
        if let Some(node) = there.node {
            self.room(node).left.sub(there.load.resources());
            self.narrowed.entry(node).or_default();
            self.counts[node.0 as usize] += 1;
            let profile = ProfileRef(Arc::clone(&there.profile));
            if !there.profile.apart_from.is_empty() {
                self.with_anti_affinity.insert(profile.clone());
            }
            *self
                .by_profile
                .entry(profile)
                .or_default()
                .entry(node)
                .or_default() += 1;
        }
        self.pods.insert(uid, there);
    }

    /// One more that may be stopped.
    fn count(&mut self, priority: Option<i32>) {
        if let Some(priority) = priority {
            *self.by_priority.entry(priority).or_default() += 1;
        }
    }

    /// One fewer.
    fn uncount(&mut self, priority: Option<i32>) {
        if let Some(priority) = priority
            && let Some(count) = self.by_priority.get_mut(&priority)
        {
            *count -= 1;
            if *count == 0 {
                self.by_priority.remove(&priority);
            }
        }
    }

    fn remove(&mut self, uid: &PodUid) {
        let Some(there) = self.pods.remove(uid) else {
            return;
        };
        self.moves += u64::from(there.watched);
        self.uncount(there.stoppable.as_ref().map(|what| what.priority));
        let Some(node) = there.node else {
            return;
        };
        self.room(node).left.add(there.load.resources());
        self.counts[node.0 as usize] -= 1;
        self.gained.insert(node);
        let profile = ProfileRef(there.profile);
        if let Some(nodes) = self.by_profile.get_mut(&profile) {
            if let Some(count) = nodes.get_mut(&node) {
                *count -= 1;
                if *count == 0 {
                    nodes.remove(&node);
                }
            }
            if nodes.is_empty() {
                self.by_profile.remove(&profile);
                self.with_anti_affinity.remove(&profile);
            }
        }
    }

    /// A node says this of itself now; `None` if it is gone. Whether that is anything new.
    fn describe(&mut self, node: NodeIx, facts: Option<Arc<NodeFacts>>) -> bool {
        let before = self.room(node).facts.clone();
        if before == facts {
            return false;
        }
        let agree = self.fabric.levels.agree(before.as_deref(), facts.as_deref());
        self.stale |= !agree;
        let room = self.room(node);
        if let Some(before) = &before {
            room.left.sub(&before.allocatable);
        }
        if let Some(now) = &facts {
            room.left.add(&now.allocatable);
        }
        room.facts = facts;
        self.gained.insert(node);
        self.narrowed.insert(node, true);
        true
    }

    /// Remembers which labels terms are about.
    fn learn<'t>(&mut self, selectors: impl Iterator<Item = &'t Vec<Requirement>>) {
        for required in selectors.flatten() {
            if !self.about.contains(&required.key) {
                self.about.insert(Arc::clone(&required.key));
                self.relabelled = true;
            }
        }
    }

    /// Forgets labels that no term is about any more, once they may be the larger half: where each run has a label of its own they would
    /// grow without end. `heard` are the needs of pods that are not there yet.
    fn forget<'n>(&mut self, heard: impl Iterator<Item = &'n Needs>) {
        let before = self.about.len();
        if before <= FEW.max(self.gathered * 2) {
            return;
        }
        let mut about = BTreeSet::new();
        let mut gather = |required: &Requirement| {
            if !about.contains(&required.key) {
                about.insert(Arc::clone(&required.key));
            }
        };
        heard.flat_map(all_selectors).flatten().for_each(&mut gather);
        for there in self.pods.values() {
            selectors(&there.profile.apart_from)
                .flatten()
                .for_each(&mut gather);
            if let Load::Among(needs) = &there.load {
                all_selectors(needs).flatten().for_each(&mut gather);
            }
        }
        self.about = about;
        self.gathered = self.about.len();
        self.relabelled |= self.gathered < before;
    }

    /// A pod's needs with where its volumes can be reached, and with those of its labels that terms are about. All others would only make
    /// equal pods differ: many controllers number theirs by a label.
    fn completed(
        &mut self,
        needs: &Arc<Needs>,
        profile: &PodProfile,
        volumes: Vec<Arc<Vec<NodeTerm>>>,
    ) -> Arc<Needs> {
        self.learn(all_selectors(needs));
        let about = profile.labels.iter().filter(|(key, _)| self.about.contains(*key));
        let labels: BTreeMap<_, _> = about
            .map(|(key, value)| (Arc::clone(key), Arc::clone(value)))
            .collect();
        if *needs.labels == labels && needs.volumes == volumes {
            return Arc::clone(needs);
        }
        self.needs.one(Needs {
            labels: Arc::new(labels),
            volumes,
            ..Needs::clone(needs)
        })
    }

    /// A number that grows whenever a pod that is watched comes or goes.
    pub(super) fn moves(&self) -> u64 {
        self.moves
    }

    /// Whether any pod without devices is of lower priority, and may be stopped.
    pub(super) fn has_below(&self, priority: i32) -> bool {
        self.by_priority
            .keys()
            .next()
            .is_some_and(|lowest| *lowest < priority)
    }

    /// The pods without devices that are of lower priority, and may be stopped.
    pub(super) fn below(&self, priority: i32) -> impl Iterator<Item = Loose<'_>> {
        let any = self.has_below(priority).then(|| self.loose());
        let lower = move |pod: &Loose<'_>| pod.what.priority < priority && pod.what.ends.is_none();
        any.into_iter().flatten().filter(lower)
    }

    /// The pods without devices that might be stopped, or are being stopped.
    pub(super) fn loose(&self) -> impl Iterator<Item = Loose<'_>> {
        self.pods.iter().filter_map(|(uid, there)| {
            Some(Loose {
                uid,
                node: there.node?,
                load: there.load.resources(),
                profile: &there.profile,
                what: there.stoppable.as_deref()?,
            })
        })
    }

    /// Whether any pod is on a node.
    pub(super) fn is_used(&self, node: NodeIx) -> bool {
        self.counts.get(node.0 as usize).is_some_and(|count| *count > 0)
    }

    /// Nodes have other numbers now, so many in all. Those of nodes that are used are among them.
    pub(super) fn renumber(&mut self, renumbered: &HashMap<NodeIx, NodeIx>, nodes: usize) {
        let (rooms, counts) = (std::mem::take(&mut self.rooms), std::mem::take(&mut self.counts));
        for ((number, room), count) in (0..).map(NodeIx).zip(rooms).zip(counts) {
            if let Some(new) = renumbered.get(&number) {
                *self.room(*new) = room;
                self.counts[new.0 as usize] = count;
            }
        }
        for there in self.pods.values_mut() {
            there.node = there.node.and_then(|node| renumbered.get(&node).copied());
        }
        let anew = |node: &NodeIx| renumbered.get(node).copied();
        for nodes in self.by_profile.values_mut() {
            let counted = std::mem::take(nodes).into_iter();
            *nodes = counted
                .filter_map(|(node, count)| Some((anew(&node)?, count)))
                .collect();
        }
        self.gained = self.gained.iter().filter_map(anew).collect();
        let narrowed = std::mem::take(&mut self.narrowed).into_iter();
        self.narrowed = narrowed
            .filter_map(|(node, told)| Some((anew(&node)?, told)))
            .collect();
        self.stale = true;
        self.settle(nodes, true);
    }

    /// Brings the rooms to the number of nodes, and the fabric up to date if that is worth while now. Whether it was not.
    fn settle(&mut self, nodes: usize, build: bool) -> bool {
        if let Some(last) = nodes.checked_sub(1).and_then(|last| u32::try_from(last).ok()) {
            self.room(NodeIx(last));
        }
        let stale = build && std::mem::take(&mut self.stale);
        if stale {
            let levels = std::mem::take(&mut self.fabric.levels);
            self.fabric = Fabric::build(levels, self.rooms.iter().map(|room| room.facts.as_deref()));
        }
        // Numbers of nodes of which nothing is known are not in the fabric, which is the same as before.
        self.fabric.of_node.resize(self.rooms.len(), Fabric::ROOT);
        stale
    }
}

/// What terms find pods by.
fn selectors(terms: &[PodTerm]) -> impl Iterator<Item = &Vec<Requirement>> {
    terms.iter().map(|term| &term.selector)
}

/// What the terms of a pod with these needs find others by.
fn all_selectors(needs: &Needs) -> impl Iterator<Item = &Vec<Requirement>> {
    let terms = selectors(&needs.apart_from).chain(selectors(&needs.together_with));
    terms.chain(needs.spread.iter().map(|spread| &spread.selector))
}

#[cfg(test)]
mod tests;
