//! Writes what became of gangs, and what was decided: one write per object at a time, the newest status only, decisions
//! before all else. A decision is told to be written only once the API server has shown it; after any other end the
//! object is read again first.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use gantry_api::{Decision, GangStatus};
use gantry_gang::GangKey;
use gantry_gang::protocol::{CommitFailure, Object, Work};
use gantry_runtime::Backoff;
use kube::Client;
use tokio::sync::mpsc::UnboundedSender;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::requests::{self, Failure};
use super::{Name, Objects};
use crate::gang::events::Events;
use crate::index::Store;
use crate::metrics::{Metrics, Outcome};

/// Between two statuses of one gang: what changes meanwhile is written with the next.
const BETWEEN: Duration = Duration::from_secs(1);
/// Statuses on their way at once.
const AT_ONCE: usize = 32;
/// Pauses after writes that failed.
const RETRY: Backoff = Backoff::new(Duration::from_millis(200), LONGEST);
/// The longest such wait.
const LONGEST: Duration = Duration::from_secs(10);
/// Tries of a removal, and of a status that is refused and has nothing to say of a decision. The next change is written
/// all the same.
const TRIES: u32 = 6;

/// Writes until `shutdown`. Other work than on Gang objects goes to `others`.
pub async fn run(
    client: Client,
    store: Arc<Store>,
    objects: Arc<Objects>,
    events: Events,
    metrics: Arc<Metrics>,
    others: UnboundedSender<Work>,
    shutdown: CancellationToken,
) {
    let mut writer = Writer {
        client,
        store,
        objects,
        events,
        metrics,
        others,
        pending: BTreeMap::new(),
        running: FuturesUnordered::new(),
        statuses: 0,
    };
    let _: Option<Infallible> = shutdown.run_until_cancelled(writer.work()).await;
}

/// What is to be done with one object.
#[derive(Default)]
struct PendingWrites {
    busy: bool,
    /// A decision to be written, with its gang.
    commit: Option<(Arc<GangKey>, Decision)>,
    /// The gang that had it is over.
    forget: bool,
    /// The object has to be read before anything else.
    read: bool,
    /// The newest status.
    status: Option<GangStatus>,
    /// What was told of the last one, which may be on its way: the object shows an older one then.
    told: Option<GangStatus>,
    /// The decision whose write has failed, or may have.
    doubt: Option<String>,
    /// Nothing before that time; a decision that has not failed yet does not wait.
    due: Option<Instant>,
    failed: u32,
    /// Why it could not be written or read the last time: what lasts is said once.
    said: Option<String>,
}

/// One write or read.
enum Job {
    Read,
    Commit(Arc<GangKey>, Decision),
    Forget,
    Status(Box<GangStatus>),
}

struct Ended {
    name: Name,
    job: Job,
    /// The object as it is now; `None` if there is none.
    result: Result<Option<Object>, Failure>,
}

struct Writer {
    client: Client,
    store: Arc<Store>,
    objects: Arc<Objects>,
    events: Events,
    metrics: Arc<Metrics>,
    others: UnboundedSender<Work>,
    pending: BTreeMap<Name, PendingWrites>,
    running: FuturesUnordered<BoxFuture<'static, Ended>>,
    /// Statuses among those running.
    statuses: usize,
}

impl Writer {
    async fn work(&mut self) -> Infallible {
        self.take();
        loop {
            let due = self.start();
            let store = Arc::clone(&self.store);
            tokio::select! {
                () = store.work() => self.take(),
                Some(ended) = self.running.next() => self.ended(ended),
                () = sleep_until(due) => {}
            }
        }
    }

    fn take(&mut self) {
        let (work, statuses) = self.store.update(|index| (index.take_work(), index.take_statuses()));
        for work in work {
            match work {
                Work::Commit { gang, decision } => {
                    let writes = self.pending.entry(name(&gang)).or_default();
                    writes.commit = Some((gang, decision));
                }
                Work::DeleteObject { namespace, name } => {
                    let writes = self.pending.entry(Name { namespace, name }).or_default();
                    writes.status = None;
                    writes.forget = true;
                }
                other => {
                    // Nobody takes it any more only when all of this ends.
                    let _ = self.others.send(other);
                }
            }
        }
        for (gang, status) in statuses {
            let name = name(&gang);
            let known = self.objects.get(&name).map(|object| object.status);
            let writes = self.pending.entry(name).or_default();
            let before = writes.told.replace(step(&status)).or(known);
            self.metrics.gang_moved(before.as_ref(), &status);
            self.events.gang_moved(&gang, before.as_ref(), &status);
            writes.status = Some(status);
        }
    }

    /// Starts what is due. Returns when the next is.
    fn start(&mut self) -> Option<Instant> {
        let now = Instant::now();
        let mut next: Option<Instant> = None;
        let mut started = Vec::new();
        let mut same = Vec::new();
        for (name, writes) in &mut self.pending {
            if writes.busy {
                continue;
            }
            let urgent = writes.commit.is_some() && writes.failed == 0;
            if !urgent
                && let Some(due) = writes.due
                && due > now
            {
                next = Some(next.map_or(due, |next| next.min(due)));
                continue;
            }
            let known = self.objects.get(name);
            if writes.says_what_is(known.as_ref()) {
                writes.status = None;
                same.extend(known.clone().map(|known| (name.clone(), known)));
            }
            if let Some((job, status)) = writes.next(known.as_ref(), self.statuses < AT_ONCE) {
                self.statuses += usize::from(matches!(job, Job::Status(_)));
                writes.busy = true;
                started.push((name.clone(), job, status, known));
            }
        }
        for (name, job, status, known) in started {
            let client = self.client.clone();
            self.running.push(Box::pin(perform(client, name, job, status, known)));
        }
        self.pending.retain(|_, writes| !writes.is_idle(now));
        // Nobody writes it, so no watch shows it: a place that was changed and changed back is written down all the
        // same.
        for (name, object) in same {
            self.tell(&name, Some(object));
        }
        next
    }

    fn ended(&mut self, ended: Ended) {
        let Ended { name, job, result } = ended;
        let now = Instant::now();
        self.statuses -= usize::from(matches!(job, Job::Status(_)));
        let before = self.objects.get(&name).and_then(|known| known.status.decision);
        match &result {
            Ok(Some(object)) => {
                self.objects.saw(&name, object.clone());
            }
            Ok(None) | Err(Failure::Missing) => {
                if let Some(known) = self.objects.get(&name) {
                    self.objects.gone(&name, &known.uid);
                }
            }
            Err(_) => {}
        }
        let writes = self.pending.entry(name.clone()).or_default();
        writes.busy = false;
        let outcome = match &result {
            Ok(_) => "done",
            Err(Failure::Conflict | Failure::Missing) => "conflict",
            Err(Failure::Refused(_)) => "refused",
            Err(Failure::Unknown(_)) => "unknown",
        };
        match &result {
            Err(Failure::Refused(error) | Failure::Unknown(error)) if writes.said.as_ref() == Some(error) => {
                tracing::debug!(gang = %name.name, namespace = %name.namespace, %error, "still cannot write or read Gang");
            }
            Err(Failure::Refused(error) | Failure::Unknown(error)) => {
                tracing::warn!(gang = %name.name, namespace = %name.namespace, %error, "cannot write or read Gang");
                writes.said = Some(error.clone());
            }
            Err(Failure::Conflict | Failure::Missing) => {}
            Ok(_) => writes.said = None,
        }
        let failed = result.is_err();
        match job {
            Job::Commit(gang, decision) => {
                self.metrics.commits.get_or_create(&Outcome { outcome }).inc();
                let told = match &result {
                    Ok(_) => Ok(()),
                    Err(Failure::Unknown(_)) => Err(CommitFailure::Unknown),
                    Err(Failure::Refused(words)) => Err(CommitFailure::Refused(words.as_str().into())),
                    Err(Failure::Conflict | Failure::Missing) => Err(CommitFailure::Conflict),
                };
                writes.decided(&decision);
                // After a refusal the object is as it was: a read, which may be refused too, must not hold up the next
                // try.
                writes.read = matches!(&told, Err(CommitFailure::Conflict | CommitFailure::Unknown));
                writes.doubt = writes.read.then(|| decision.id.clone());
                writes.pause(failed, now);
                let id = &decision.id;
                self.store.update(|index| index.committed(&gang, id, told));
            }
            Job::Read => match result {
                Ok(object) => {
                    writes.read = false;
                    // A decision that was not known: what was to be written is of before it.
                    let shown = object.as_ref().and_then(|object| object.status.decision.as_ref());
                    let doubt = writes.doubt.take();
                    let news = shown.is_some_and(|shown| {
                        before.is_none_or(|before| before.id != shown.id) || doubt.as_ref() == Some(&shown.id)
                    });
                    if news {
                        writes.status.take_if(|status| status.decision.is_none());
                    }
                    self.tell(&name, object);
                }
                Err(Failure::Missing) => {
                    writes.read = false;
                    self.tell(&name, None);
                }
                Err(_) => writes.pause(true, now),
            },
            Job::Forget => match result {
                Err(Failure::Refused(_) | Failure::Unknown(_)) if writes.failed < TRIES => {
                    writes.forget = true;
                    writes.pause(true, now);
                }
                _ => writes.pause(false, now),
            },
            Job::Status(status) => {
                match &result {
                    Ok(_) => {}
                    // Where a decision is said, or one is shown that is over, members wait for the word and whoever
                    // takes over goes by it.
                    Err(Failure::Refused(_))
                        if writes.failed >= TRIES && status.decision.is_none() && before.is_none() =>
                    {
                        writes.failed = 0;
                    }
                    Err(failure) => {
                        writes.read |= matches!(failure, Failure::Conflict | Failure::Missing);
                        writes.status.get_or_insert(*status);
                    }
                }
                writes.pause(failed, now);
                if !failed {
                    writes.due = Some(now + BETWEEN);
                }
            }
        }
    }

    /// Tells what was read.
    fn tell(&self, name: &Name, object: Option<Object>) {
        let newest = object.map(|object| self.objects.saw(name, object));
        self.store.update(|index| match newest {
            Some(object) => index.gang_object_seen(&name.namespace, &name.name, object),
            None => index.gang_object_gone(&name.namespace, &name.name),
        });
    }
}

impl PendingWrites {
    /// Whether the status to be written is what the object says already, and nothing is to be done before.
    fn says_what_is(&self, known: Option<&Object>) -> bool {
        let first = !self.read && !self.forget && self.commit.is_none();
        first && known.is_some_and(|known| self.status.as_ref() == Some(&known.status))
    }

    /// What to do next with the object, of which `known` is the newest version, and the status to be written with it.
    fn next(&mut self, known: Option<&Object>, room: bool) -> Option<(Job, GangStatus)> {
        if self.read {
            return Some((Job::Read, GangStatus::default()));
        }
        if std::mem::take(&mut self.forget) && known.is_some_and(|known| known.ours) {
            return Some((Job::Forget, GangStatus::default()));
        }
        if let Some((gang, decision)) = self.commit.take() {
            // The newest status goes along: it is one write.
            let status = self.status.take();
            let status = status.or_else(|| known.map(|known| known.status.clone()));
            // Where the first try has failed, no status may be there to go along; whose decision it is must be said all
            // the same, or whoever takes over does not know it.
            let status = GangStatus {
                decision: Some(decision.clone()),
                // What was kept for it is its own from here on.
                continuation: None,
                name: gang.name.to_string(),
                integration: gang.integration.as_str().to_owned(),
                incarnation: gang.incarnation.to_string(),
                ..status.unwrap_or_default()
            };
            return Some((Job::Commit(gang, decision), status));
        }
        if !room {
            return None;
        }
        let status = self.status.take()?;
        Some((Job::Status(Box::new(status.clone())), status))
    }

    /// The write of a decision has ended, one way or the other: what was to be written before it is old. What was said
    /// since the watch has shown it is not, and is not said again.
    fn decided(&mut self, decision: &Decision) {
        self.status.take_if(|status| {
            let of = status.decision.as_ref();
            of.is_none_or(|of| of.id != decision.id)
        });
    }

    fn pause(&mut self, failed: bool, now: Instant) {
        if failed {
            self.failed += 1;
            self.due = Some(now + RETRY.after(self.failed));
        } else {
            self.due = None;
            self.failed = 0;
        }
    }

    fn is_idle(&self, now: Instant) -> bool {
        let nothing = self.commit.is_none() && self.status.is_none() && !self.forget && !self.read;
        // One that failed is remembered for a while: it may be asked for again at once.
        let rest = if self.failed > 0 { LONGEST } else { Duration::ZERO };
        nothing && !self.busy && self.due.is_none_or(|due| due + rest <= now)
    }
}

async fn perform(client: Client, name: Name, job: Job, status: GangStatus, known: Option<Object>) -> Ended {
    let result = match &job {
        Job::Read => requests::read(&client, &name).await.map(Some),
        Job::Commit(..) | Job::Status(_) => write(&client, &name, known, &status).await.map(Some),
        Job::Forget => match &known {
            Some(known) => requests::delete(&client, &name, &known.uid).await.map(|()| None),
            None => Ok(None),
        },
    };
    Ended { name, job, result }
}

async fn write(
    client: &Client,
    name: &Name,
    known: Option<Object>,
    status: &GangStatus,
) -> Result<Object, Failure> {
    let known = match known {
        Some(known) => known,
        None => {
            let made = requests::create(client, name).await?;
            if made.status.decision.is_some() {
                // It was there, and is somebody's: it has to be looked at first.
                return Err(Failure::Conflict);
            }
            made
        }
    };
    requests::write_status(client, name, &known, status).await
}

/// What the next status is compared with, to tell what has become of the gang: phase, words and conditions, and not its
/// decision, which is large.
fn step(status: &GangStatus) -> GangStatus {
    GangStatus {
        phase: status.phase,
        reason: status.reason,
        message: status.message.clone(),
        restarting: status.restarting,
        continuation: status.continuation.clone(),
        waiting_since: status.waiting_since.clone(),
        conditions: status.conditions.clone(),
        ..GangStatus::default()
    }
}

fn name(gang: &GangKey) -> Name {
    Name { namespace: Arc::clone(&gang.namespace), name: gang.object_name().into() }
}

async fn sleep_until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;
