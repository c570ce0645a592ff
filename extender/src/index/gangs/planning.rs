//! Plans gangs, one at a time, on the snapshot just published: whoever is next by the state machine's word gets a place as a whole, or a reason.

use std::collections::BTreeMap;
use std::sync::Arc;

use gantry_api::ResourceName;
use gantry_gang::protocol::{Placement, Refused, Wanted};
use gantry_gang::Terms;

use crate::gang::terrain::{Exact, Shape, Terrain};
use crate::gang::{plan, preempt};
use crate::index::Index;
use crate::snapshot::{NodeIx, Snapshot, Standing};

/// Refused gangs for which victims are looked for before room grows again: it costs many plans, and whoever is further back in the queue would
/// be behind those anyway.
const PREEMPTIONS: u32 = 4;

/// How often victims were looked for since room grew.
#[derive(Debug, Default)]
pub(super) struct Tries {
    room: u64,
    count: u32,
}

impl Tries {
    fn another(&mut self, room: u64) -> bool {
        if self.room != room {
            *self = Self { room, count: 0 };
        }
        self.count += 1;
        self.count <= PREEMPTIONS
    }
}

/// How many devices of each resource are free in a snapshot, counted once for each.
#[derive(Debug, Default)]
pub(super) struct Free {
    generation: Option<u64>,
    devices: BTreeMap<ResourceName, u64>,
}

impl Free {
    fn of(&mut self, snapshot: &Snapshot) -> &BTreeMap<ResourceName, u64> {
        if self.generation != Some(snapshot.generation) {
            self.generation = Some(snapshot.generation);
            self.devices.clear();
            let mut nodes = vec![0u64; snapshot.classes.len()];
            for class in &snapshot.nodes {
                if let Some(count) = nodes.get_mut(class.0 as usize) {
                    *count += 1;
                }
            }
            for (standing, count) in snapshot.classes.iter().zip(nodes) {
                let Standing::Ours(class) = &**standing else {
                    continue;
                };
                for pool in &class.pools {
                    *self.devices.entry(pool.resource.clone()).or_default() += count * pool.free.len() as u64;
                }
            }
        }
        &self.devices
    }
}

/// What a gang asks for, as far as the words of a refusal go by it.
pub(super) type Asked = (Arc<Terms>, usize, u32);

fn asked_for(wanted: &Wanted) -> Asked {
    (Arc::clone(&wanted.terms), wanted.members.len(), wanted.must)
}

impl Index {
    /// Plans the gang that is next; false if none is to be planned now.
    pub fn plan_next(&mut self) -> bool {
        if !self.gangs.leading || !self.is_synced() {
            return false;
        }
        let Some(wanted) = self.gangs.core.next(self.now, self.gangs.room) else {
            return false;
        };
        if wanted.without.is_empty() {
            // With a clean slate.
            self.gangs.offers.forget(&wanted.gang);
        }
        let mut result = match self.too_little(&wanted) {
            Some(refused) => Err(refused),
            None => self.plan_beside_kept(&wanted),
        };
        if let Err(refused) = &result {
            let tried = self.gangs.tries.another(self.gangs.room);
            let hopeless = refused.hopeless;
            match tried.then(|| self.preempt(&wanted, hopeless)).flatten() {
                Some(placement) => result = Ok(placement),
                None => {
                    if !hopeless {
                        self.gangs.prey.refused(self.gangs.room, wanted.priority);
                    }
                    self.refused(&wanted, hopeless);
                }
            }
        }
        match &result {
            Ok(_) => self.gangs.asked.remove(&wanted.gang),
            Err(_) => self
                .gangs
                .asked
                .insert(Arc::clone(&wanted.gang), asked_for(&wanted)),
        };
        self.gangs.core.placed(self.now, &wanted.gang, result);
        true
    }

    /// The words of its last refusal, for a gang that was refused before and asks for more devices than are free at all: on a full cluster
    /// most of a long queue needs no plan to be told so again.
    fn too_little(&mut self, wanted: &Wanted) -> Option<Refused> {
        // Only for what it was refused for: the words say that.
        if self.gangs.asked.get(&wanted.gang) != Some(&asked_for(wanted)) {
            return None;
        }
        let refused = self.gangs.core.view(&wanted.gang)?.refused()?.clone();
        if refused.hopeless {
            // That goes by more than devices; and nobody is stopped for one whom nothing would help.
            return None;
        }
        let snapshot = &self.published;
        let free = self.gangs.free.of(snapshot);
        let must = usize::try_from(wanted.must).unwrap_or(usize::MAX);
        let mut asked: BTreeMap<&ResourceName, Vec<u64>> = BTreeMap::new();
        for member in &wanted.members {
            let shape = self.gangs.shapes.list().get(member.shape.0 as usize)?;
            for ask in &shape.request.asks {
                let devices = u64::from(ask.devices);
                asked.entry(&ask.resource).or_default().push(devices);
            }
        }
        let short = asked.into_iter().any(|(resource, mut devices)| {
            // Those of its members that ask for least; members that ask for none of it may be among those that must be placed.
            let without = wanted.members.len().saturating_sub(devices.len());
            devices.sort_unstable();
            let least: u64 = devices.iter().take(must.saturating_sub(without)).sum();
            least > free.get(resource).copied().unwrap_or_default()
        });
        short.then_some(refused)
    }

    /// Where a gang goes without the nodes that are kept for another. If those are all it lacks, it is told so.
    fn plan_beside_kept(&self, wanted: &Wanted) -> Result<Placement, Refused> {
        let result = self.on_terrain(Some(wanted), |terrain| plan::plan(terrain, wanted));
        let Some(kept) = self.kept_from(wanted).filter(|_| result.is_err()) else {
            return result;
        };
        self.on_terrain(None, |terrain| plan::plan(terrain, wanted))?;
        let reason: Arc<str> = format!(
            "does not fit beside the nodes kept for gang {}, which waits",
            kept.gang
        )
        .into();
        Err(Refused {
            message: Arc::clone(&reason),
            reason,
            hopeless: false,
        })
    }

    /// Where a gang goes once others were stopped for it. Not while nodes are kept for one before it.
    fn preempt(&self, wanted: &Wanted, hopeless: bool) -> Option<Placement> {
        if hopeless || self.kept_from(wanted).is_some() || !self.may_preempt(wanted) {
            return None;
        }
        let occupants = self.occupants();
        self.on_terrain(Some(wanted), |terrain| {
            preempt::preempt(terrain, wanted, &occupants)
        })
    }

    /// What a plan is made from, for `gang`: nodes kept for another are barred for it, and to a shape whose planned nodes were not offered all
    /// that were not; what kube-scheduler makes free for pods that are no less important is not free.
    pub(super) fn on_terrain<R>(&self, gang: Option<&Wanted>, make: impl FnOnce(&Terrain<'_>) -> R) -> R {
        let kept = gang.and_then(|gang| self.kept_from(gang));
        let barred = |shape: &Shape| {
            let mut barred = self.barred(&shape.needs);
            if let Some(gang) = gang {
                self.gangs.offers.narrow(&gang.gang, shape, &mut barred);
            }
            if let Some(kept) = kept {
                barred.nodes.extend(kept.nodes());
                barred.nodes.sort_unstable();
                barred.nodes.dedup();
            }
            barred
        };
        let nominated = gang
            .map(|gang| self.beside_nominated(gang.priority))
            .unwrap_or_default();
        let classes = nominated.iter().map(|(node, exact)| (*node, &exact.class));
        let beside = (!nominated.is_empty()).then(|| self.published.with(classes));
        let exact = |node: NodeIx| nominated.get(&node).cloned().or_else(|| self.exact(node));
        make(&Terrain {
            snapshot: beside.as_ref().unwrap_or(&self.published),
            rooms: self.rooms(),
            fabric: self.fabric(),
            shapes: self.gangs.shapes.list(),
            barred: &barred,
            exact: &exact,
        })
    }

    pub(super) fn exact(&self, node: NodeIx) -> Option<Exact<'_>> {
        let entry = self.entries.get(node.0 as usize)?;
        let inventory = entry.inventory.as_ref()?;
        Some(Exact {
            class: entry.exact(&self.binds.held_on(node))?,
            ids: inventory.pools.iter().map(crate::inventory::Pool::ids).collect(),
        })
    }
}
