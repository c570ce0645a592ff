//! From a decision to devices set aside: a hold when prioritize has named a winner, a reservation with its grant when bind comes. All
//! of it in one step of the index, on the account of that moment; nothing is written to the cluster here.

use std::sync::Arc;
use std::time::Instant;

use gantry_api::{Grant, GrantError, NodeName, PodUid};

use super::binds::{Came, Pending, Reservation};
use super::entry::Entry;
use super::{HOLD, Index};
use crate::decide::{self, ForeignNodes};
use crate::devices::DeviceSet;
use crate::inventory::Held;
use crate::layout::Layout;
use crate::ledger::Devices;
use crate::request::Request;
use crate::snapshot::{Hold, NodeIx};

/// Holds kept at most. Beyond that scores know less of what is on its way; nothing else suffers.
const MAX_HOLDS: usize = 4096;

/// A pod and the node that kube-scheduler wants it on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// UID of the pod.
    pub uid: PodUid,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The node.
    pub node: NodeName,
}

/// What a bind may write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reserved {
    /// The pod is on that node already: an earlier bind has done it.
    AlreadyBound,
    /// Nothing to grant: the pod asks for nothing of ours, or the node is not ours to account.
    Plain,
    /// This grant; its devices are set aside until [`Index::finish`].
    Grant {
        /// [`Grant::plan`].
        plan: String,
        /// The annotation.
        annotation: Arc<str>,
    },
}

/// Why a bind may not be tried.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BindError {
    /// The cache does not have the pod and nobody has said what it asks for.
    #[error("pod {0} is not known")]
    UnknownPod(PodUid),
    /// The UID belongs to another pod.
    #[error("pod UID {uid} is that of {actual}, not of {asked}")]
    OtherName {
        /// The UID.
        uid: PodUid,
        /// Namespace and name of the pod that has it.
        actual: String,
        /// Namespace and name that were asked for.
        asked: String,
    },
    /// The pod is bound to another node.
    #[error("pod is bound to node {0} already")]
    BoundElsewhere(NodeName),
    /// No such node.
    #[error("node {0} does not exist")]
    NoSuchNode(NodeName),
    /// The node publishes no inventory and that is not allowed.
    #[error("node {0} has no Gantry plugin")]
    ForeignNode(NodeName),
    /// What the pod asks for cannot be read.
    #[error("{0}")]
    Request(String),
    /// Its gang does not let it, in the gang's words.
    #[error("{0}")]
    Gang(Arc<str>),
    /// The devices are not free any more.
    #[error("node {node}: {reason}")]
    NotFree {
        /// The node.
        node: NodeName,
        /// In words of GPUs.
        reason: String,
    },
    /// The grant cannot be written.
    #[error("grant cannot be written")]
    Grant(#[source] GrantError),
}

impl Index {
    /// Holds the best devices of `node` for a pod that prioritize, or a filter with one survivor, has most likely sent there. Replaces an
    /// earlier hold of the pod.
    pub fn hold(&mut self, now: Instant, uid: &PodUid, request: &Arc<Request>, node: &str) {
        self.drop_hold(uid);
        let bound = self.pods.get(uid).is_some_and(|pod| pod.node.is_some());
        let Some(ix) = self.names.get(node) else {
            return;
        };
        if bound || self.binds.pending.len() >= MAX_HOLDS {
            return;
        }
        self.refresh(ix);
        let Some(layouts) = self.lay(ix, request, &[]) else {
            return;
        };
        let devices = self.by_pool(ix, request, &layouts);
        let pending = Pending {
            until: now + HOLD,
            request: Arc::clone(request),
            layouts,
        };
        self.binds.pending.insert(uid.clone(), pending);
        let hold = Hold { node: ix, devices };
        Arc::make_mut(&mut self.binds.holds).insert(uid.clone(), hold);
        self.dirty.push(ix);
        self.changed = true;
    }

    /// What a pod asks for, if a hold remembers it.
    pub fn held_request(&self, uid: &str) -> Option<Arc<Request>> {
        self.binds
            .pending
            .get(uid)
            .map(|pending| Arc::clone(&pending.request))
    }

    /// Sets devices aside for a bind and writes its grant. `request` is what the pod asks for where neither the cache nor a hold
    /// knows. A repeated bind of the same pod to the same node gets the same grant, so that either may succeed.
    ///
    /// # Errors
    /// See [`BindError`]; then nothing is set aside.
    pub fn reserve(&mut self, target: &Target, request: Option<Arc<Request>>) -> Result<Reserved, BindError> {
        let request = self.check_pod(target, request)?;
        let Some(request) = request.map(|request| request.of(&self.managed.managed())) else {
            return Ok(Reserved::AlreadyBound);
        };
        let Some(ix) = self.names.get(target.node.as_str()) else {
            return Err(BindError::NoSuchNode(target.node.clone()));
        };
        // The account must be of this moment: facts that came since the last snapshot count.
        self.refresh(ix);
        let Some(entry) = self
            .entries
            .get_mut(ix.0 as usize)
            .filter(|entry| entry.advertised.is_some())
        else {
            return Err(BindError::NoSuchNode(target.node.clone()));
        };
        if request.is_empty() {
            return Ok(Reserved::Plain);
        }
        let Some(inventory) = &entry.inventory else {
            return match self.options.foreign {
                ForeignNodes::Allow => Ok(Reserved::Plain),
                ForeignNodes::Refuse => Err(BindError::ForeignNode(target.node.clone())),
            };
        };
        if let Some(reason) = &inventory.not_ready {
            return Err(BindError::NotFree {
                node: target.node.clone(),
                reason: decide::plugin_not_ready(reason),
            });
        }
        if let Some(known) = entry.again(target) {
            return known;
        }
        let layouts = self.layouts_for(ix, target, &request)?;
        self.set_aside(ix, target, &request, &layouts)
    }

    /// Whether a Binding that was sent with what was reserved may be sent once more.
    ///
    /// # Errors
    /// Another pod has its devices by now, by kubelet's word.
    pub fn may_repeat(&mut self, target: &Target) -> Result<(), BindError> {
        let Some(ix) = self.names.get(target.node.as_str()) else {
            return Err(BindError::NoSuchNode(target.node.clone()));
        };
        self.refresh(ix);
        let entry = self.entries.get(ix.0 as usize);
        let known = entry.and_then(|entry| Some((entry, entry.position(&target.uid)?)));
        known.map_or(Ok(()), |(entry, position)| {
            entry.still_has(target, &entry.reservations[position].devices)
        })
    }

    /// Sets the devices of layouts aside for a bind and writes its grant.
    pub(super) fn set_aside(
        &mut self,
        ix: NodeIx,
        target: &Target,
        request: &Request,
        layouts: &[Layout],
    ) -> Result<Reserved, BindError> {
        self.binds.plans += 1;
        let plan = format!("{}-{}", self.binds.run, self.binds.plans);
        let (annotation, devices) = self.write(ix, target, request, layouts, &plan)?;
        if let Some(entry) = self.entries.get_mut(ix.0 as usize) {
            entry.reservations.push(Reservation {
                uid: target.uid.clone(),
                plan: plan.clone(),
                annotation: Arc::clone(&annotation),
                devices,
                calls: 1,
                came: Came::Nothing,
            });
            self.binds
                .reserved
                .entry(target.uid.clone())
                .or_default()
                .push(ix);
        }
        self.drop_hold(&target.uid);
        self.dirty.push(ix);
        Ok(Reserved::Grant { plan, annotation })
    }

    /// Checks what is known of the pod; what it asks for, or `None` if it is on that node already.
    pub(super) fn check_pod(
        &self,
        target: &Target,
        request: Option<Arc<Request>>,
    ) -> Result<Option<Arc<Request>>, BindError> {
        if let Some(pod) = self.pods.get(&target.uid) {
            if *pod.namespace != *target.namespace || *pod.name != *target.name {
                return Err(BindError::OtherName {
                    uid: target.uid.clone(),
                    actual: format!("{}/{}", pod.namespace, pod.name),
                    asked: format!("{}/{}", target.namespace, target.name),
                });
            }
            return match (&pod.node, &pod.request) {
                (Some(node), _) if *node == target.node => Ok(None),
                (Some(node), _) => Err(BindError::BoundElsewhere(node.clone())),
                (None, Ok(request)) => Ok(Some(Arc::clone(request))),
                (None, Err(error)) => Err(BindError::Request(error.to_string())),
            };
        }
        let request = request.or_else(|| self.held_request(target.uid.as_str()));
        request.map_or_else(
            || Err(BindError::UnknownPod(target.uid.clone())),
            |request| Ok(Some(request)),
        )
    }

    /// The held layouts if they are still free, or else the best that is.
    fn layouts_for(&self, ix: NodeIx, target: &Target, request: &Request) -> Result<Vec<Layout>, BindError> {
        let hold = self.binds.holds.get(&target.uid).filter(|hold| hold.node == ix);
        if let (Some(hold), Some(pending)) = (hold, self.binds.pending.get(&target.uid))
            && *pending.request == *request
            && self.all_free(ix, &hold.devices)
        {
            return Ok(pending.layouts.clone());
        }
        let own = hold.map_or(&[][..], |hold| hold.devices.as_slice());
        self.lay(ix, request, own).ok_or_else(|| BindError::NotFree {
            node: target.node.clone(),
            reason: self.shortage(ix, request),
        })
    }

    fn all_free(&self, ix: NodeIx, devices: &[DeviceSet]) -> bool {
        let Some(entry) = self.entries.get(ix.0 as usize) else {
            return false;
        };
        devices.iter().enumerate().all(|(pool, devices)| {
            let balance = entry.account.pools.get(pool);
            balance.is_some_and(|balance| devices.is_subset(&balance.free))
        })
    }

    fn lay(&self, ix: NodeIx, request: &Request, own: &[DeviceSet]) -> Option<Vec<Layout>> {
        let entry = self.entries.get(ix.0 as usize)?;
        let class = entry.exact(&self.binds.held_on(ix))?;
        decide::judge(&class, request).ok()?;
        decide::score(&class, request, own, self.options.policy).map(|(_, layouts)| layouts)
    }

    fn shortage(&self, ix: NodeIx, request: &Request) -> String {
        let class = self.entries.get(ix.0 as usize).and_then(|entry| entry.exact(&[]));
        let Some(class) = class else {
            return "no inventory".to_owned();
        };
        decide::judge(&class, request).err().map_or_else(
            || "the devices that are free do not fit the containers".to_owned(),
            |miss| miss.of_one_node(),
        )
    }

    fn by_pool(&self, ix: NodeIx, request: &Request, layouts: &[Layout]) -> Vec<DeviceSet> {
        let entry = self.entries.get(ix.0 as usize);
        let Some(inventory) = entry.and_then(|entry| entry.inventory.as_ref()) else {
            return Vec::new();
        };
        let mut devices = vec![DeviceSet::EMPTY; inventory.pools.len()];
        for (ask, layout) in request.asks.iter().zip(layouts) {
            if let Some((pool, _)) = inventory.pool(ask.resource.as_str()) {
                devices[pool].add(&layout.devices);
            }
        }
        devices
    }

    fn write(
        &self,
        ix: NodeIx,
        target: &Target,
        request: &Request,
        layouts: &[Layout],
        plan: &str,
    ) -> Result<(Arc<str>, Devices), BindError> {
        let inventory = self
            .entries
            .get(ix.0 as usize)
            .and_then(|entry| entry.inventory.as_ref());
        let mut containers = Vec::new();
        let mut devices: Devices = Vec::new();
        for (ask, layout) in request.asks.iter().zip(layouts) {
            let pool = inventory.and_then(|inventory| inventory.pool(ask.resource.as_str()));
            let grants = pool.and_then(|(_, pool)| layout.grants(ask, pool.ids()));
            let (Some((_, pool)), Some(grants)) = (pool, grants) else {
                return Err(BindError::NoSuchNode(target.node.clone()));
            };
            containers.extend(grants);
            devices.push((ask.resource.clone(), pool.ids_of(&layout.devices)));
        }
        // The plugin follows kubelet's order: all init containers before all app containers, whatever the resource.
        if request.asks.len() > 1 {
            containers.sort_by_key(|grant| request.order.iter().position(|name| **name == *grant.name));
        }
        let grant = Grant {
            version: Grant::VERSION,
            plan: plan.to_owned(),
            pod: target.uid.clone(),
            node: target.node.clone(),
            containers,
        };
        let annotation = grant.to_annotation().map_err(BindError::Grant)?;
        Ok((annotation.into(), devices))
    }
}

impl Entry {
    /// The grant that a bind of the pod here has already; one more call is on its way for it. An error if kubelet has given its devices to
    /// another pod meanwhile, in place of some that fell sick: the first Binding cannot be called back, but it is not to be tried again.
    pub(super) fn again(&mut self, target: &Target) -> Option<Result<Reserved, BindError>> {
        let position = self.position(&target.uid)?;
        if let Err(error) = self.still_has(target, &self.reservations[position].devices) {
            return Some(Err(error));
        }
        let known = &mut self.reservations[position];
        known.calls += 1;
        Some(Ok(Reserved::Grant {
            plan: known.plan.clone(),
            annotation: Arc::clone(&known.annotation),
        }))
    }

    /// Whether what a pod was granted is still to be had by it.
    fn still_has(&self, target: &Target, devices: &Devices) -> Result<(), BindError> {
        if !self.has_given_away(target, devices) {
            return Ok(());
        }
        Err(BindError::NotFree {
            node: target.node.clone(),
            reason: "kubelet has given what the pod was granted to another".to_owned(),
        })
    }

    /// Whether another pod than this one has any of these devices, or had them and may have processes that still do.
    fn has_given_away(&self, target: &Target, devices: &Devices) -> bool {
        let Some(inventory) = &self.inventory else {
            return false;
        };
        devices.iter().any(|(resource, ids)| {
            let Some((index, pool)) = inventory.pool(resource.as_str()) else {
                return false;
            };
            let mut others = DeviceSet::EMPTY;
            for (_, held) in self.account.pods.iter().filter(|(uid, _)| *uid != target.uid) {
                if let Some(held) = held.get(index) {
                    others.add(held);
                }
            }
            for (resource, ids) in self.leaving.iter().flat_map(|(_, devices)| devices) {
                others.add(&pool.taken(resource, ids));
            }
            // The pod itself may be there already, and its plugin be quicker than its own watch.
            let own = |held: &Held| match &held.uid {
                Some(uid) => *uid == target.uid,
                None => held.namespace == target.namespace && held.pod == target.name,
            };
            for held in inventory
                .holders
                .iter()
                .filter(|held| held.pool == index && !own(held))
            {
                others.add(&held.devices);
            }
            !(&pool.find(ids).0 & &others).is_empty()
        })
    }
}
