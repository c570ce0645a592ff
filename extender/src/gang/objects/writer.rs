//! Writes the status and the decision of each gang to its object: one write per object at a time, the newest status
//! only, decisions before all else. A decision counts as written once the API server has returned it; after any other
//! result the object is read again first.

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

/// Time between two statuses of one gang. Changes in between are written with the next status.
const BETWEEN: Duration = Duration::from_secs(1);
/// Most writes of statuses at once.
const AT_ONCE: usize = 32;
/// Pauses after writes that failed.
const RETRY: Backoff = Backoff::new(Duration::from_millis(200), LONGEST);
/// The longest such pause.
const LONGEST: Duration = Duration::from_secs(10);
/// Attempts of a deletion, and of a refused status without a decision. The next change is written nevertheless.
const TRIES: u32 = 6;

/// Writes until `shutdown`. Work that is not about Gang objects goes to `others`.
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

/// The work on one object.
#[derive(Default)]
struct PendingWrites {
    busy: bool,
    /// The decision to write, with its gang.
    commit: Option<(Arc<GangKey>, Decision)>,
    /// The object is to be deleted: its gang has ended.
    forget: bool,
    /// The object must be read before anything else.
    read: bool,
    /// The newest status, not written yet.
    status: Option<GangStatus>,
    /// The last status that metrics and Events report. Its write may be running, so that the object is older.
    reported: Option<GangStatus>,
    /// The decision that was written without success, or with an unknown result.
    unconfirmed: Option<String>,
    /// No request before that time. A decision that has not failed yet does not wait.
    due: Option<Instant>,
    failed: u32,
    /// The last error. A repeated error is logged once.
    logged: Option<String>,
}

/// One write or read.
enum Job {
    Read,
    Commit(Arc<GangKey>, Decision),
    Forget,
    Status(Box<GangStatus>),
}

struct FinishedJob {
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
    running: FuturesUnordered<BoxFuture<'static, FinishedJob>>,
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
                    // The receiver is gone only at shutdown.
                    let _ = self.others.send(other);
                }
            }
        }
        for (gang, status) in statuses {
            let name = name(&gang);
            let known = self.objects.get(&name).map(|object| object.status);
            let writes = self.pending.entry(name).or_default();
            let before = writes.reported.replace(step(&status)).or(known);
            self.metrics.gang_moved(before.as_ref(), &status);
            self.events.gang_moved(&gang, before.as_ref(), &status);
            writes.status = Some(status);
        }
    }

    /// Starts the requests that are due. Returns the time of the next one.
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
            if writes.is_written(known.as_ref()) {
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
        // Without a write no watch event follows: a reservation that was changed and changed back counts as written.
        for (name, object) in same {
            self.publish(&name, Some(object));
        }
        next
    }

    fn ended(&mut self, ended: FinishedJob) {
        let FinishedJob { name, job, result } = ended;
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
            Err(Failure::Refused(error) | Failure::Unknown(error))
                if writes.logged.as_ref() == Some(error) =>
            {
                tracing::debug!(gang = %name.name, namespace = %name.namespace, %error, "still cannot write or read Gang");
            }
            Err(Failure::Refused(error) | Failure::Unknown(error)) => {
                tracing::warn!(gang = %name.name, namespace = %name.namespace, %error, "cannot write or read Gang");
                writes.logged = Some(error.clone());
            }
            Err(Failure::Conflict | Failure::Missing) => {}
            Ok(_) => writes.logged = None,
        }
        let failed = result.is_err();
        match job {
            Job::Commit(gang, decision) => {
                self.metrics.commits.get_or_create(&Outcome { outcome }).inc();
                let written = match &result {
                    Ok(_) => Ok(()),
                    Err(Failure::Unknown(_)) => Err(CommitFailure::Unknown),
                    Err(Failure::Refused(words)) => Err(CommitFailure::Refused(words.as_str().into())),
                    Err(Failure::Conflict | Failure::Missing) => Err(CommitFailure::Conflict),
                };
                writes.decided(&decision);
                // After a refusal the object is unchanged. A read may be refused too, and must not delay the next attempt.
                writes.read = matches!(&written, Err(CommitFailure::Conflict | CommitFailure::Unknown));
                writes.unconfirmed = writes.read.then(|| decision.id.clone());
                writes.pause(failed, now);
                let id = &decision.id;
                self.store.update(|index| index.committed(&gang, id, written));
            }
            Job::Read => match result {
                Ok(object) => {
                    writes.read = false;
                    // A decision that was not known: the waiting status is older than it.
                    let shown = object.as_ref().and_then(|object| object.status.decision.as_ref());
                    let unconfirmed = writes.unconfirmed.take();
                    let is_new = shown.is_some_and(|shown| {
                        before.is_none_or(|before| before.id != shown.id)
                            || unconfirmed.as_ref() == Some(&shown.id)
                    });
                    if is_new {
                        writes.status.take_if(|status| status.decision.is_none());
                    }
                    self.publish(&name, object);
                }
                Err(Failure::Missing) => {
                    writes.read = false;
                    self.publish(&name, None);
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
                    // A status with a decision, or one that removes a decision, is always repeated: members wait for it, and
                    // the next leader reads it.
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

    /// Gives the index the object as it was read.
    fn publish(&self, name: &Name, object: Option<Object>) {
        let newest = object.map(|object| self.objects.saw(name, object));
        self.store.update(|index| match newest {
            Some(object) => index.gang_object_seen(&name.namespace, &name.name, object),
            None => index.gang_object_gone(&name.namespace, &name.name),
        });
    }
}

impl PendingWrites {
    /// Whether the object has the status to write already, and no other request comes first.
    fn is_written(&self, known: Option<&Object>) -> bool {
        let first = !self.read && !self.forget && self.commit.is_none();
        first && known.is_some_and(|known| self.status.as_ref() == Some(&known.status))
    }

    /// The next request about the object, of which `known` is the newest version, and the status to write with it.
    fn next(&mut self, known: Option<&Object>, may_write: bool) -> Option<(Job, GangStatus)> {
        if self.read {
            return Some((Job::Read, GangStatus::default()));
        }
        if std::mem::take(&mut self.forget) && known.is_some_and(|known| known.ours) {
            return Some((Job::Forget, GangStatus::default()));
        }
        if let Some((gang, decision)) = self.commit.take() {
            // The newest status is part of the same write.
            let status = self.status.take();
            let status = status.or_else(|| known.map(|known| known.status.clone()));
            // After a failed attempt there may be no newer status. The decision must name its gang nevertheless: the next
            // leader reads it.
            let status = GangStatus {
                decision: Some(decision.clone()),
                // The devices reserved for the restart are the gang's own from here on.
                continuation: None,
                name: gang.name.to_string(),
                integration: gang.integration.as_str().to_owned(),
                incarnation: gang.incarnation.to_string(),
                ..status.unwrap_or_default()
            };
            return Some((Job::Commit(gang, decision), status));
        }
        if !may_write {
            return None;
        }
        let status = self.status.take()?;
        Some((Job::Status(Box::new(status.clone())), status))
    }

    /// The write of a decision has ended, with any result: a waiting status without this decision is outdated.
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
        // The count of failures is kept for a while, because the same request may come again at once.
        let rest = if self.failed > 0 { LONGEST } else { Duration::ZERO };
        nothing && !self.busy && self.due.is_none_or(|due| due + rest <= now)
    }
}

async fn perform(
    client: Client,
    name: Name,
    job: Job,
    status: GangStatus,
    known: Option<Object>,
) -> FinishedJob {
    let result = match &job {
        Job::Read => requests::read(&client, &name).await.map(Some),
        Job::Commit(..) | Job::Status(_) => write(&client, &name, known, &status).await.map(Some),
        Job::Forget => match &known {
            Some(known) => requests::delete(&client, &name, &known.uid).await.map(|()| None),
            None => Ok(None),
        },
    };
    FinishedJob { name, job, result }
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
                // The object exists with a decision of another incarnation: it must be read first.
                return Err(Failure::Conflict);
            }
            made
        }
    };
    requests::write_status(client, name, &known, status).await
}

/// The part of a status that metrics and Events compare with the next one: phase, texts and conditions, without the
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
