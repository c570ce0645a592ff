//! Does to pods what gangs need: gates removed, pods evicted as budgets allow, pods deleted for a restart. Each write names the pod's UID,
//! so that it never meets another of the name. A pod that is gone is done; what fails is tried again, later and later.

mod action;

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use gantry_api::{PodUid, names};
use gantry_gang::GangKey;
use gantry_gang::protocol::{Blocker, Work};
use gantry_runtime::Backoff;
use gantry_runtime::events::Message;
use kube::Client;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use action::{Action, End, Pod, hindrance, message_of, perform};

use super::events::Events;
use crate::index::Store;
use crate::metrics::{Metrics, Write};

/// Writes on their way at once.
const AT_ONCE: usize = 32;
/// Pauses after failed attempts.
const RETRY: Backoff = Backoff::new(Duration::from_millis(500), LONGEST);
/// The longest wait between two tries.
const LONGEST: Duration = Duration::from_secs(10);
/// After so many tries a write is given up: what it was for is asked for again, or is over.
const TRIES: u32 = 20;
/// So often it is tried to mark a pod before it is deleted; then it is deleted without.
const MARKS: u32 = 3;

/// What is to be done, and what of it may be.
#[derive(Debug)]
pub struct Orders {
    /// The work, as it comes.
    pub taken: UnboundedReceiver<Work>,
    /// Whether gates may be removed.
    pub gates: bool,
}

/// Works until `shutdown`.
pub async fn run(
    client: Client,
    store: Arc<Store>,
    events: Events,
    metrics: Arc<Metrics>,
    orders: Orders,
    shutdown: CancellationToken,
) {
    let mut worker = Worker {
        client,
        store,
        events,
        metrics,
        orders,
        open: BTreeMap::new(),
        forbidden: BTreeSet::new(),
        running: FuturesUnordered::new(),
    };
    let _: Option<Infallible> = shutdown.run_until_cancelled(worker.work()).await;
}

/// An action that is not done yet.
struct OpenAction {
    due: Instant,
    failed: u32,
    /// A budget was in its way when it was tried last.
    budget: bool,
    busy: bool,
    /// Tries to mark it that are left; 0 once it is marked, or cannot be.
    marks: u32,
}

struct Worker {
    client: Client,
    store: Arc<Store>,
    events: Events,
    metrics: Arc<Metrics>,
    orders: Orders,
    open: BTreeMap<(PodUid, Action), OpenAction>,
    /// What may not be done, and for which gang: reported once, until it is done after all.
    forbidden: BTreeSet<(Arc<GangKey>, &'static str)>,
    running: FuturesUnordered<BoxFuture<'static, (Pod, Action, End)>>,
}

impl Worker {
    async fn work(&mut self) -> Infallible {
        loop {
            let due = self.start();
            tokio::select! {
                order = self.orders.taken.recv() => match order {
                    Some(order) => self.order(order),
                    // Whoever orders has ended, and so will this.
                    None => std::future::pending().await,
                },
                Some((pod, action, end)) = self.running.next() => self.ended(&pod, action, &end),
                () = sleep_until(due) => {}
            }
        }
    }

    fn order(&mut self, order: Work) {
        let (pods, action) = match order {
            Work::Ungate(pods) if self.orders.gates => (pods, Action::Ungate),
            Work::Ungate(pods) => {
                tracing::warn!(
                    pods = pods.len(),
                    "members have the scheduling gate {}, and --gates is not set",
                    names::GANG_GATE
                );
                return;
            }
            Work::Evict { pods, by } => (pods, Action::Evict(by)),
            Work::EvictRest { pods, of, to } => (pods, Action::EvictRest { of, to }),
            Work::Delete { pods, why } => (pods, Action::Delete(why)),
            // Done elsewhere.
            Work::Commit { .. } | Work::Activate(_) | Work::Bind(_) | Work::DeleteObject { .. } => return,
        };
        let due = Instant::now();
        for uid in pods {
            self.open.entry((uid, action.clone())).or_insert(OpenAction {
                due,
                failed: 0,
                budget: false,
                busy: false,
                marks: MARKS,
            });
        }
    }

    /// Starts what is due. Returns when the next is.
    fn start(&mut self) -> Option<Instant> {
        let now = Instant::now();
        let mut next: Option<Instant> = None;
        let mut moot = Vec::new();
        for ((uid, action), open) in &mut self.open {
            if open.busy {
                continue;
            }
            if open.due > now {
                next = Some(next.map_or(open.due, |next| next.min(open.due)));
                continue;
            }
            if self.running.len() >= AT_ONCE {
                // The next that ends makes room.
                break;
            }
            let Some(pod) = find(&self.store, uid, action) else {
                moot.push((uid.clone(), action.clone()));
                continue;
            };
            open.busy = true;
            let (client, action, marks) = (self.client.clone(), action.clone(), open.marks);
            let memory = Arc::clone(self.store.memory());
            self.running.push(Box::pin(async move {
                let end = perform(&client, &memory, &pod, &action, marks).await;
                (pod, action, end)
            }));
        }
        for key in moot {
            self.over(&key);
        }
        next
    }

    fn ended(&mut self, pod: &Pod, action: Action, end: &End) {
        let outcome = match end {
            End::Done => "done",
            End::Moot => "obsolete",
            End::Budget(_) => "budget",
            End::Forbidden(_) => "forbidden",
            End::Failed(_) | End::Unmarked(_) => "failed",
        };
        let write = Write { verb: action.label(), outcome };
        self.metrics.gang_writes.get_or_create(&write).inc();
        let key = (pod.uid.clone(), action);
        let failed = self.open.get(&key).map_or(0, |open| open.failed);
        let action = &key.1;
        match end {
            End::Done => {
                self.allowed(pod, action);
                if let Some(message) = message_of(action) {
                    self.events.pod(&pod.namespace, &pod.name, &pod.uid, message);
                }
            }
            End::Moot => {}
            End::Forbidden(why) => self.forbidden(pod, action, why),
            End::Budget(why) | End::Failed(why) | End::Unmarked(why) if failed == 0 => {
                tracing::warn!(pod = %pod.name, namespace = %pod.namespace, what = action.label(), %why, "cannot do it yet, trying again");
            }
            End::Budget(why) | End::Failed(why) | End::Unmarked(why) => {
                tracing::debug!(pod = %pod.name, namespace = %pod.namespace, what = action.label(), %why, failed, "cannot do it yet");
            }
        }
        let budget = match end {
            End::Budget(why) => {
                self.kept_by_budget(pod, action, why, failed == 0);
                true
            }
            _ => false,
        };
        if matches!(end, End::Done | End::Moot) {
            self.over(&key);
        } else if failed + 1 >= TRIES {
            // What is in the way stays reported: it was not done.
            self.open.remove(&key);
        } else if let Some(open) = self.open.get_mut(&key) {
            open.busy = false;
            open.failed += 1;
            open.due = Instant::now() + RETRY.after(open.failed);
            open.budget = budget;
            open.marks = match end {
                End::Unmarked(_) => open.marks.saturating_sub(1),
                _ => 0,
            };
        }
    }

    /// The gang that an action is for.
    fn gang(&self, pod: &Pod, action: &Action) -> Option<Arc<GangKey>> {
        match action {
            Action::Evict(gang) | Action::EvictRest { of: gang, .. } => Some(Arc::clone(gang)),
            Action::Ungate | Action::Delete(_) => {
                self.store.read(|index| index.gangs().of_pod(&pod.uid).cloned())
            }
        }
    }

    /// Reports that a budget does not let a pod go: in an Event the first time, and in the gang's status as long as it is so.
    fn kept_by_budget(&self, pod: &Pod, action: &Action, why: &str, first: bool) {
        let Some(gang) = self.gang(pod, action) else {
            return;
        };
        let message = hindrance(pod, action, why);
        self.report_in_status(&gang, Blocker::Budget, &message);
        if first {
            self.events.gang(&gang, message);
        }
    }

    /// Reports in the gang's status what hinders it, unless it is reported already.
    fn report_in_status(&self, gang: &GangKey, what: Blocker, message: &Message) {
        if !self.store.read(|index| index.gangs().is_blocked(gang, what)) {
            let note: Arc<str> = (*message.note).into();
            self.store.update(|index| index.hindered(gang, what, Some(note)));
        }
    }

    /// Nothing more is to be done. No budget is in the gang's way once none is in that of any of its pods.
    fn over(&mut self, key: &(PodUid, Action)) {
        self.open.remove(key);
        let (_, action) = key;
        let (Action::Evict(gang) | Action::EvictRest { of: gang, .. }) = action else {
            return;
        };
        let still = |((_, of), open): (&(PodUid, Action), &OpenAction)| of == action && open.budget;
        let reported = self.store.read(|index| index.gangs().is_blocked(gang, Blocker::Budget));
        if reported && !self.open.iter().any(still) {
            self.store.update(|index| index.hindered(gang, Blocker::Budget, None));
        }
    }

    /// Reports once for a gang that a right is missing, in its status as long as it is.
    fn forbidden(&mut self, pod: &Pod, action: &Action, why: &str) {
        let why = format!("{why}; {} gives that right", action.right());
        let message = hindrance(pod, action, &why);
        let known = self.gang(pod, action).map(|gang| (gang, action.label()));
        // Each time: a gang that was made again is not hindered yet.
        if let Some((gang, _)) = &known {
            self.report_in_status(gang, action.hindrance(), &message);
        }
        if known.as_ref().is_some_and(|known| self.forbidden.contains(known)) {
            tracing::debug!(pod = %pod.name, namespace = %pod.namespace, what = action.label(), %why, "still forbidden");
            return;
        }
        tracing::warn!(pod = %pod.name, namespace = %pod.namespace, what = action.label(), %why, "forbidden, trying again");
        let Some((gang, label)) = known else { return };
        self.events.gang(&gang, message);
        self.forbidden.insert((gang, label));
    }

    /// It was done: the right is there.
    fn allowed(&mut self, pod: &Pod, action: &Action) {
        if self.forbidden.is_empty() {
            return;
        }
        if let Some(gang) = self.gang(pod, action)
            && self.forbidden.remove(&(Arc::clone(&gang), action.label()))
        {
            self.store.update(|index| index.hindered(&gang, action.hindrance(), None));
        }
        // Of gangs that are over.
        let store = &self.store;
        self.forbidden.retain(|(gang, _)| store.read(|index| index.gangs().knows(gang)));
    }
}

/// `None` if it is gone, or the gang for which it is to be evicted does not wait for that any more: it has given up, or is gone itself.
fn find(store: &Store, uid: &PodUid, action: &Action) -> Option<Pod> {
    store.read(|index| {
        let wanted = match action {
            Action::Evict(by) => index.gangs().waits_for(by, uid),
            Action::EvictRest { of, .. } => index.gangs().is_rest_of(of, uid),
            Action::Ungate | Action::Delete(_) => true,
        };
        if !wanted {
            return None;
        }
        let (namespace, name) = index.pod_address(uid)?;
        Some(Pod { uid: uid.clone(), namespace, name })
    })
}

async fn sleep_until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;
