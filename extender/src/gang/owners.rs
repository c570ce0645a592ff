//! Keeps the gangs told of the objects that say how large they are: one watch for each kind that is needed, begun when
//! the first gang needs it. Kinds that are not installed or may not be read count as missing, and are looked for again.
//! Decides nothing.

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
use follow::News;
use table::{OwnerTable, Place, Told};

/// Between two looks at which owners are wanted.
const LOOK: Duration = Duration::from_millis(200);
/// Questions about single objects at once.
const QUESTIONS: usize = 8;
/// News that may wait to be taken. Each may be an object of a megabyte.
const NEWS: usize = 4;

/// Watches until `shutdown`. `wanted` says which owners are needed now; `seen` is told what each says, or `None` where
/// there is none.
pub async fn run(
    client: Client,
    wanted: impl Fn() -> Vec<WatchedOwner>,
    seen: impl Fn(&OwnerRef, Option<Arc<OwnerFacts>>),
    memory: Arc<ObjectMemory>,
    shutdown: CancellationToken,
) {
    let (tell, mut news) = mpsc::channel(NEWS);
    let mut watcher = OwnerWatcher {
        client,
        memory,
        table: OwnerTable::default(),
        tell,
        tasks: JoinSet::new(),
        following: BTreeMap::new(),
        resources: BTreeMap::new(),
        questions: JoinSet::new(),
        unasked: VecDeque::new(),
    };
    let mut look = tokio::time::interval(LOOK);
    look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let told = tokio::select! {
            () = shutdown.cancelled() => return,
            _ = look.tick() => watcher.want(wanted()),
            // The watcher keeps the other end.
            Some(news) = news.recv() => watcher.take(news),
            Some(answer) = watcher.questions.join_next() => match answer {
                Ok((place, object)) => watcher.table.answered(Instant::now().into_std(), &place, object),
                // Cancelled with the kind, or a bug of ours: the owner is asked for again when it is next wanted.
                Err(_) => Told::new(),
            },
        };
        for (owner, facts) in told {
            seen(&owner, facts);
        }
        watcher.ask();
    }
}

/// The table of owners, and the tasks that ask for it. All of them end with it.
struct OwnerWatcher {
    client: Client,
    memory: Arc<ObjectMemory>,
    table: OwnerTable,
    tell: mpsc::Sender<News>,
    tasks: JoinSet<()>,
    following: BTreeMap<OwnerKind, AbortHandle>,
    resources: BTreeMap<OwnerKind, ApiResource>,
    questions: JoinSet<(Place, Result<Option<Value>, ()>)>,
    unasked: VecDeque<Place>,
}

impl OwnerWatcher {
    fn want(&mut self, wanted: Vec<WatchedOwner>) -> Told {
        let (changes, told) = self.table.want(Instant::now().into_std(), wanted);
        for kind in changes.end {
            self.resources.remove(&kind);
            if let Some(task) = self.following.remove(&kind) {
                task.abort();
            }
        }
        for kind in changes.begin {
            let task = follow::follow(self.client.clone(), kind, Arc::clone(&self.memory), self.tell.clone());
            self.following.insert(kind, self.tasks.spawn(task));
        }
        // The handles of those that were ended.
        while self.tasks.try_join_next().is_some() {}
        told
    }

    fn take(&mut self, news: News) -> Told {
        match news {
            News::Begins(kind, resource) => {
                self.resources.insert(kind, resource);
                self.table.list_begins(kind);
                Told::new()
            }
            News::Ends(kind) => {
                self.table.list_ends(kind);
                Told::new()
            }
            News::Seen(place, object) => self.table.seen(&place, &object),
            News::Gone(place) => self.table.gone(&place),
            News::Absent(kind) => self.table.absent(kind),
        }
    }

    fn ask(&mut self) {
        self.unasked.extend(self.table.ask(Instant::now().into_std()));
        while self.questions.len() < QUESTIONS {
            let Some(place) = self.unasked.pop_front() else {
                return;
            };
            let Some(resource) = self.resources.get(&place.0).cloned() else {
                // Its kind is no longer watched, because nobody wants it.
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
