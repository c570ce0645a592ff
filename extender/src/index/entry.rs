//! One node in the index: the facts its account is made of, and the account.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use gantry_api::{DeviceId, NodeName, PodUid, ResourceName};
use gantry_gang::GangKey;
use gantry_gang::protocol::ShapeId;

use super::binds::Reservation;
use super::{QUARANTINE, QUARANTINE_AFTER_A_GAP, QUARANTINE_WITHOUT_TRUTH};
use crate::devices::DeviceSet;
use crate::inventory::{self, Inventory};
use crate::ledger::{self, Account, Devices, Fault};
use crate::pod::PodFacts;
use crate::snapshot::{Class, Pool, Remembered, Standing};

/// One node.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) name: NodeName,
    /// What kubelet advertises; `None` if there is no Node object.
    pub(super) advertised: Option<Vec<(ResourceName, u32)>>,
    /// What the plugin published; `None` if there is no GpuNode.
    pub(super) inventory: Option<Inventory>,
    /// Live pods bound to it.
    pub(super) pods: Vec<PodUid>,
    /// Binds whose pods do not show them yet.
    pub(super) reservations: Vec<Reservation>,
    /// Places kept for gangs.
    pub(super) places: Vec<KeptPlace>,
    /// What pods held that vanished without their end being seen, and since when.
    pub(super) leaving: Vec<(Instant, Devices)>,
    /// Devices here of pods that are gone, whose processes perhaps are not, and since when. Each by itself: beside one that is never given
    /// back others are, a moment after their pods are gone.
    pub(super) lingering: HashMap<DeviceId, Instant>,
    pub(super) account: Account,
}

/// A place for one member of a gang, kept until a pod shows that it has it, or the gang gives it up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct KeptPlace {
    pub(super) gang: Arc<GangKey>,
    /// Which of the gang's places.
    pub(super) slot: u32,
    /// Of the members it is for, if that is known.
    pub(super) shape: Option<ShapeId>,
    pub(super) devices: Devices,
    /// The member that has it.
    pub(super) pod: Option<PodUid>,
}

impl Entry {
    pub(super) fn new(name: NodeName) -> Self {
        Self {
            name,
            advertised: None,
            inventory: None,
            pods: Vec::new(),
            reservations: Vec::new(),
            places: Vec::new(),
            leaving: Vec::new(),
            lingering: HashMap::new(),
            account: Account::default(),
        }
    }

    /// The account is of this time.
    pub(super) fn mark_lingering(&mut self, now: Instant) {
        let before = std::mem::take(&mut self.lingering);
        let pools = self.inventory.iter().flat_map(|inventory| &inventory.pools);
        for (pool, balance) in pools.zip(&self.account.pools) {
            if balance.leaving.is_empty() {
                continue;
            }
            for id in pool.ids_of(&(&balance.leaving - &balance.held)) {
                let since = before.get(&id).copied().unwrap_or(now);
                self.lingering.insert(id, since);
            }
        }
    }

    /// Healthy devices by pool that pods which are gone give back any moment, to nobody in particular: those of which `soon` says so, by
    /// since when they linger.
    pub(super) fn returning(&self, mut soon: impl FnMut(Instant) -> bool) -> Vec<Vec<DeviceId>> {
        let Some(inventory) = self.inventory.as_ref().filter(|_| !self.lingering.is_empty()) else {
            return Vec::new();
        };
        let pools = inventory.pools.iter().zip(&self.account.pools);
        let returning = pools.map(|(pool, balance)| {
            let mut leaving = &balance.leaving & &pool.healthy;
            leaving.remove(&balance.held);
            leaving.remove(&balance.reserved);
            let mut ids = pool.ids_of(&leaving);
            ids.retain(|id| self.lingering.get(id).is_some_and(|since| soon(*since)));
            ids
        });
        returning.collect()
    }

    /// Works out the account; returns the faults that are new.
    pub(super) fn settle(&mut self, pods: &HashMap<PodUid, Arc<PodFacts>>) -> Vec<Fault> {
        let Some(inventory) = &self.inventory else {
            self.account = Account::default();
            return Vec::new();
        };
        let mut live: Vec<&PodFacts> = self
            .pods
            .iter()
            .filter_map(|uid| pods.get(uid))
            .map(|pod| &**pod)
            .collect();
        live.sort_by(|a, b| a.order(b));
        let reserved: Vec<&Devices> = self
            .reservations
            .iter()
            .map(|reservation| &reservation.devices)
            // What a member is being bound with is in both, and counts once.
            .chain(self.places.iter().map(|place| &place.devices))
            .collect();
        let leaving: Vec<&Devices> = self.leaving.iter().map(|(_, devices)| devices).collect();
        let account = ledger::settle(&self.name, inventory, &live, &reserved, &leaving);
        let before = std::mem::replace(&mut self.account, account);
        let new = self
            .account
            .faults
            .iter()
            .filter(|fault| !before.faults.contains(fault));
        new.cloned().collect()
    }

    /// Whether a place is kept here that no pod has.
    pub(super) fn has_idle(&self) -> bool {
        self.places.iter().any(|place| place.pod.is_none())
    }

    /// What the node is to decisions about many, with `held` devices (by pool) about to go to pods.
    pub(super) fn standing(&self, held: &[DeviceSet]) -> Standing {
        match (&self.inventory, &self.advertised) {
            (Some(inventory), _) => {
                Standing::Ours(self.class(inventory, held, |pool, set| pool.shape.canonical(&set)))
            }
            (None, Some(advertised)) => Standing::Foreign {
                advertised: advertised.clone(),
            },
            (None, None) => Standing::Gone,
        }
    }

    /// The class of this one node, each device by itself; `None` without an inventory.
    pub(super) fn exact(&self, held: &[DeviceSet]) -> Option<Class> {
        let inventory = self.inventory.as_ref()?;
        Some(self.class(inventory, held, |_, set| set))
    }

    fn class(
        &self,
        inventory: &Inventory,
        held: &[DeviceSet],
        seen: impl Fn(&inventory::Pool, DeviceSet) -> DeviceSet,
    ) -> Class {
        let pools = inventory.pools.iter().zip(&self.account.pools).enumerate();
        let pools = pools.map(|(index, (pool, balance))| {
            let mut open = balance.free.clone();
            if let Some(held) = held.get(index) {
                open.remove(held);
            }
            let unhealthy = &pool.all - &pool.healthy;
            let mut leaving = &balance.leaving - &balance.held;
            leaving.remove(&unhealthy);
            Pool {
                resource: pool.resource.clone(),
                shape: pool.shape.clone(),
                max_request: pool.max_request,
                devices: pool.all.len(),
                free: seen(pool, balance.free.clone()),
                open: seen(pool, open),
                unhealthy: unhealthy.len(),
                sick: pool.sick.clone(),
                leaving: leaving.len(),
                advertised: self.advertises(&pool.resource),
            }
        });
        Class {
            kind: Arc::clone(&inventory.kind),
            pools: pools.collect(),
            not_ready: inventory.not_ready.clone(),
            scores: Remembered::default(),
        }
    }

    pub(super) fn advertises(&self, resource: &ResourceName) -> Option<u32> {
        let advertised = self.advertised.as_ref()?;
        let found = advertised.iter().find(|(known, _)| known == resource);
        Some(found.map_or(0, |(_, count)| *count))
    }

    /// Whether devices have come free since `before`.
    pub(super) fn gained(&self, before: &[DeviceSet]) -> bool {
        self.account.pools.iter().enumerate().any(|(index, balance)| {
            let before = before.get(index);
            before.map_or(!balance.free.is_empty(), |before| !balance.free.is_subset(before))
        })
    }

    /// A pod is gone. If its end was not seen, what it held stays taken for a while.
    pub(super) fn remove_pod(&mut self, now: Instant, pod: &PodFacts) {
        self.pods.retain(|uid| *uid != pod.uid);
        if pod.stopped || pod.terminal {
            return;
        }
        let held = self.account.pods.iter().find(|(uid, _)| *uid == pod.uid);
        if let (Some(inventory), Some((_, held))) = (&self.inventory, held) {
            let devices: Devices = inventory
                .pools
                .iter()
                .zip(held)
                .map(|(pool, devices)| (pool.resource.clone(), pool.ids_of(devices)))
                .collect();
            self.leaving.push((now, devices));
        }
    }

    /// Forgets what has left for good: the quarantine is over by facts newer than its end, and the plugin knows the truth (what it still
    /// lists as held is taken by that). The API server has answered `steady`ly since then: before, the plugin may not have been able to
    /// write. True if anything was forgotten.
    pub(super) fn forget_left(&mut self, now: Instant, contact: Instant, steady: Instant) -> bool {
        let ready = self
            .inventory
            .as_ref()
            .is_none_or(|inventory| inventory.not_ready.is_none());
        let before = self.leaving.len();
        let told = contact.saturating_duration_since(steady) >= QUARANTINE_AFTER_A_GAP;
        self.leaving.retain(|(since, _)| {
            let over = told && contact.saturating_duration_since(*since) >= QUARANTINE;
            let long_over = now.saturating_duration_since(*since) >= QUARANTINE_WITHOUT_TRUTH;
            !(over && (ready || long_over))
        });
        self.leaving.len() != before
    }

    /// Whether nothing is known of it any more.
    pub(super) fn is_gone(&self) -> bool {
        self.advertised.is_none()
            && self.inventory.is_none()
            && self.pods.is_empty()
            && self.reservations.is_empty()
            && self.places.is_empty()
            && self.leaving.is_empty()
    }
}

/// What became of all devices of the cluster.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Nodes with an inventory.
    pub nodes: usize,
    /// Nodes without.
    pub foreign: usize,
    /// Nobody's, and healthy.
    pub free: usize,
    /// Live pods'.
    pub held: usize,
    /// Of binds in flight, and kept for gangs.
    pub reserved: usize,
    /// Of pods that are gone, whose processes perhaps are not.
    pub leaving: usize,
    /// Not to be given out.
    pub unhealthy: usize,
}

impl Totals {
    pub(super) fn add(&mut self, entry: &Entry) {
        let Some(inventory) = &entry.inventory else {
            self.foreign += usize::from(entry.advertised.is_some());
            return;
        };
        self.nodes += 1;
        for (pool, balance) in inventory.pools.iter().zip(&entry.account.pools) {
            self.free += balance.free.len();
            self.held += balance.held.len();
            self.reserved += (&balance.reserved - &balance.held).len();
            self.leaving += (&balance.leaving - &balance.held).len();
            self.unhealthy += (&pool.all - &pool.healthy).len();
        }
    }
}
