//! Publishes the owners of gangs, which define the sizes of gangs: one watch for each kind that is needed, from the first
//! gang that needs it. Kinds that are not installed or may not be read count as missing, and are tried again. Decides
//! nothing.

mod follow;
mod table;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use gantry_gang::protocol::WatchedOwner;
use gantry_gang::{OwnerFacts, OwnerKind, OwnerRef};
use kube::Client;
use kube::api::ApiResource;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::object_memory::ObjectMemory;
use follow::WatchReport;
use table::{OwnerKey, OwnerTable, Updates};

/// Interval at which the wanted owners are read.
const LOOK: Duration = Duration::from_millis(200);
/// Most requests for single objects at once.
const QUESTIONS: usize = 8;
/// Events of watches in the queue. Each may be an object of a megabyte.
const EVENTS: usize = 4;

/// Watches until `shutdown`. `wanted` returns the owners that are needed now; `seen` receives the facts of each, or `None`
/// if it does not exist.
pub async fn run(
    client: Client,
    wanted: impl Fn() -> Vec<WatchedOwner>,
    seen: impl Fn(&OwnerRef, Option<Arc<OwnerFacts>>),
    memory: Arc<ObjectMemory>,
    shutdown: CancellationToken,
) {
    let (sender, mut events) = mpsc::channel(EVENTS);
    let mut watcher = OwnerWatcher {
        client,
        memory,
        table: OwnerTable::default(),
        sender,
        tasks: JoinSet::new(),
        following: BTreeMap::new(),
        resources: BTreeMap::new(),
        questions: JoinSet::new(),
        unasked: VecDeque::new(),
    };
    let mut look = tokio::time::interval(LOOK);
    look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let updates = tokio::select! {
            () = shutdown.cancelled() => return,
            _ = look.tick() => watcher.want(wanted()),
            // The watcher holds a sender.
            Some(event) = events.recv() => watcher.take(event),
            Some(answer) = watcher.questions.join_next() => match answer {
                Ok((place, object)) => watcher.table.read_ended(Instant::now().into_std(), &place, object),
                // Cancelled with the kind, or a panic: the owner is read again when it is wanted next.
                Err(_) => Updates::new(),
            },
        };
        for (owner, facts) in updates {
            seen(&owner, facts);
        }
        watcher.ask();
    }
}

/// The table of owners, and the tasks that watch and read for it. They end with it.
struct OwnerWatcher {
    client: Client,
    memory: Arc<ObjectMemory>,
    table: OwnerTable,
    sender: mpsc::Sender<WatchReport>,
    tasks: JoinSet<()>,
    following: BTreeMap<OwnerKind, AbortHandle>,
    resources: BTreeMap<OwnerKind, ApiResource>,
    questions: JoinSet<(OwnerKey, Result<Option<Value>, ()>)>,
    unasked: VecDeque<OwnerKey>,
}

impl OwnerWatcher {
    fn want(&mut self, wanted: Vec<WatchedOwner>) -> Updates {
        let (changes, updates) = self.table.want(Instant::now().into_std(), wanted);
        for kind in changes.end {
            self.resources.remove(&kind);
            if let Some(task) = self.following.remove(&kind) {
                task.abort();
            }
        }
        for kind in changes.begin {
            let task =
                follow::follow(self.client.clone(), kind, Arc::clone(&self.memory), self.sender.clone());
            self.following.insert(kind, self.tasks.spawn(task));
        }
        // The handles of the tasks that were ended.
        while self.tasks.try_join_next().is_some() {}
        updates
    }

    fn take(&mut self, event: WatchReport) -> Updates {
        match event {
            WatchReport::Begins(kind, resource) => {
                self.resources.insert(kind, resource);
                self.table.list_begins(kind);
                Updates::new()
            }
            WatchReport::Ends(kind) => {
                self.table.list_ends(kind);
                Updates::new()
            }
            WatchReport::Seen(place, object) => self.table.seen(&place, &object),
            WatchReport::Gone(place) => self.table.gone(&place),
            WatchReport::Absent(kind) => self.table.absent(kind),
        }
    }

    fn ask(&mut self) {
        self.unasked.extend(self.table.take_unread(Instant::now().into_std()));
        while self.questions.len() < QUESTIONS {
            let Some(place) = self.unasked.pop_front() else {
                return;
            };
            let Some(resource) = self.resources.get(&place.0).cloned() else {
                // Its kind is no longer watched, because no gang needs it.
                continue;
            };
            let (client, memory) = (self.client.clone(), Arc::clone(&self.memory));
            self.questions.spawn(async move {
                let object = follow::ask(&client, &resource, &place, &memory).await;
                (place, object)
            });
        }
    }
}

#[cfg(test)]
mod tests;
