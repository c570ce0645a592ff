//! Kubernetes Events of both daemons. kube's `Recorder` is not used: it gives each attempt another name, so that an Event of which only the
//! response was lost is there twice; it counts Events of one reason as one whatever their notes are; and its names can be too long.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use gantry_api::{ObjectMessage, Reason};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::{Event, EventSeries};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::time::Instant;

use crate::{Backoff, LogThrottle, chain};

/// Longest name that the API server accepts.
const MAX_NAME: usize = 253;
/// Time limit of one request.
const TIMEOUT: Duration = Duration::from_secs(5);
/// An Event like one written in this time before is counted in that one's series, as client-go does it.
const SERIES: Duration = Duration::from_secs(6 * 60);
/// Written Events that are remembered for that.
const MAX_REMEMBERED: usize = 64;
/// Attempts per Event.
const ATTEMPTS: u32 = 5;
/// Events that wait for another attempt.
const MAX_WAITING: usize = 1024;

/// The content of an Event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Why, for programs.
    pub reason: Reason,
    /// What the daemon did or tried, in CamelCase.
    pub action: &'static str,
    /// Something is wrong.
    pub warning: bool,
    /// Two sentences at most.
    pub note: ObjectMessage,
}

/// The object that an Event is about, in a namespace.
pub fn object((api_version, kind): (&str, &str), namespace: &str, name: &str, uid: &str) -> ObjectReference {
    ObjectReference {
        namespace: Some(namespace.to_owned()),
        ..cluster_object((api_version, kind), name, uid)
    }
}

/// The object of no namespace that an Event is about.
pub fn cluster_object((api_version, kind): (&str, &str), name: &str, uid: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some(api_version.to_owned()),
        kind: Some(kind.to_owned()),
        name: Some(name.to_owned()),
        uid: Some(uid.to_owned()),
        ..ObjectReference::default()
    }
}

/// How an attempt to write an Event ended.
#[derive(Debug, PartialEq, Eq)]
pub enum Attempt {
    /// The Event is there.
    Written,
    /// The API server did not take it now, or it is not known whether it did.
    Later(String),
    /// The API server refuses it.
    Refused(String),
    /// Its namespace is being deleted.
    NamespaceEnds,
}

/// Writes the Events of a daemon. Identical ones are counted in a series.
pub struct EventRecorder {
    client: Client,
    controller: &'static str,
    instance: String,
    /// Oldest first.
    written: VecDeque<(Instant, Event)>,
    failures: LogThrottle,
}

impl EventRecorder {
    /// Reports as `controller`; `instance` distinguishes its processes.
    pub fn new(client: Client, controller: &'static str, instance: impl Into<String>) -> Self {
        Self {
            client,
            controller,
            instance: instance.into(),
            written: VecDeque::new(),
            failures: LogThrottle::default(),
        }
    }

    /// The Event with this message, to be attempted as often as is needed: its name stays.
    pub fn event(&self, about: ObjectReference, message: Message) -> Event {
        let now = Timestamp::now();
        Event {
            metadata: ObjectMeta {
                name: Some(name(about.name.as_deref().unwrap_or(self.controller), now)),
                namespace: Some(about.namespace.clone().unwrap_or_else(|| "default".to_owned())),
                ..ObjectMeta::default()
            },
            event_time: Some(MicroTime(now)),
            action: Some(message.action.to_owned()),
            reason: Some(message.reason.to_string()),
            type_: Some(if message.warning { "Warning" } else { "Normal" }.to_owned()),
            note: Some(message.note.into()),
            regarding: Some(about),
            reporting_controller: Some(self.controller.to_owned()),
            reporting_instance: Some(self.instance.clone()),
            ..Event::default()
        }
    }

    /// Tries once to write an Event. `repeated`: an attempt before this one may have succeeded.
    pub async fn attempt(&mut self, event: &Event, repeated: bool) -> Attempt {
        let namespace = event.metadata.namespace.as_deref().unwrap_or("default");
        let events: Api<Event> = Api::namespaced(self.client.clone(), namespace);
        let written = match self.series(event) {
            Some(known) => {
                let count = known.series.as_ref().map_or(2, |series| series.count + 1);
                let series = EventSeries { count, last_observed_time: MicroTime(Timestamp::now()) };
                let counted = Event { series: Some(series), ..known };
                let patch = Patch::Merge(json!({"series": counted.series}));
                let name = counted.metadata.name.clone().unwrap_or_default();
                match limited(events.patch(&name, &PatchParams::default(), &patch)).await {
                    // Deleted meanwhile, or the role has no right to patch: it is a new Event then.
                    Err(kube::Error::Api(status)) if matches!(status.code, 403 | 404) => {
                        limited(events.create(&PostParams::default(), event)).await.map(|_| event.clone())
                    }
                    patched => patched.map(|_| counted),
                }
            }
            None => limited(events.create(&PostParams::default(), event)).await.map(|_| event.clone()),
        };
        match written {
            Ok(event) => {
                self.remember(event);
                self.failures.reset();
                Attempt::Written
            }
            Err(error) => match &error {
                kube::Error::Api(status)
                    if status.code == 403 && status.message.contains("is being terminated") =>
                {
                    Attempt::NamespaceEnds
                }
                kube::Error::Api(status) if status.code == 409 && repeated => Attempt::Written,
                kube::Error::Api(status) if !matches!(status.code, 408 | 429 | 500..) => {
                    Attempt::Refused(chain(&error))
                }
                _ => Attempt::Later(chain(&error)),
            },
        }
    }

    /// Writes an Event, with a few attempts within ten seconds or so; returns whether it is there. A failure is logged.
    pub async fn record(&mut self, about: ObjectReference, message: Message) -> bool {
        let event = self.event(about, message);
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(5));
        loop {
            let error = match self.attempt(&event, backoff.failures() > 0).await {
                Attempt::Written => return true,
                Attempt::NamespaceEnds => return false,
                Attempt::Later(error) if backoff.failures() + 1 < ATTEMPTS => {
                    tracing::debug!(%error, reason = event.reason, "Event not written yet");
                    tokio::time::sleep(backoff.fail()).await;
                    continue;
                }
                Attempt::Later(error) | Attempt::Refused(error) => error,
            };
            self.log_failure(&event, &error);
            return false;
        }
    }

    /// Logs that an Event is given up. A right that is missing fails for every Event, and is logged now and then.
    fn log_failure(&mut self, event: &Event, error: &str) {
        let kind = error.split(" in the namespace ").next().unwrap_or(error);
        let (namespace, reason) = (event.metadata.namespace.as_deref(), event.reason.as_deref());
        if self.failures.should_log(kind, Instant::now().into_std()) {
            tracing::warn!(%error, namespace, reason, "Event not written");
        } else {
            tracing::debug!(%error, namespace, reason, "Event not written");
        }
    }

    /// An Event with the same message about the same object, written shortly before.
    fn series(&mut self, event: &Event) -> Option<Event> {
        self.written.retain(|(at, _)| at.elapsed() < SERIES);
        self.written.iter().find(|(_, known)| is_like(known, event)).map(|(_, known)| known.clone())
    }

    fn remember(&mut self, event: Event) {
        self.written.retain(|(_, known)| known.metadata.name != event.metadata.name);
        if self.written.len() >= MAX_REMEMBERED {
            self.written.pop_front();
        }
        self.written.push_back((Instant::now(), event));
    }
}

/// Writes many Events one after the other. An Event that the API server does not take now waits for later attempts and does not keep the
/// next ones back; so does one over the rate. Of too many that wait the newest are dropped.
pub struct EventWriter {
    recorder: EventRecorder,
    rate: Rate,
    /// By when they are due, and in the order in which they came.
    waiting: BTreeMap<(Instant, u64), UnwrittenEvent>,
    sequence: u64,
    /// Events written, and dropped or refused, since [`Self::take_counts`].
    counts: (u64, u64),
}

/// An Event that is not known to be written.
#[derive(Debug)]
struct UnwrittenEvent {
    event: Event,
    attempts: u32,
}

impl EventWriter {
    /// Between the attempts for one Event.
    const BACKOFF: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(16));

    /// Sends up to `burst` Events at once, and `per_second` after those.
    pub fn new(recorder: EventRecorder, burst: u32, per_second: u32) -> Self {
        Self {
            recorder,
            rate: Rate::new(burst, per_second),
            waiting: BTreeMap::new(),
            sequence: 0,
            counts: (0, 0),
        }
    }

    /// When an Event is due for another attempt.
    pub fn due(&self) -> Option<Instant> {
        self.waiting.first_key_value().map(|((due, _), _)| *due)
    }

    /// Whether the next Event over the rate is dropped.
    pub fn is_full(&self) -> bool {
        self.waiting.len() >= MAX_WAITING
    }

    /// Writes an Event with this message.
    pub async fn write(&mut self, about: ObjectReference, message: Message) {
        let event = self.recorder.event(about, message);
        self.attempt(UnwrittenEvent { event, attempts: 0 }).await;
    }

    /// Tries one Event again that is due. Only one: new Events must not wait for all of the old.
    pub async fn retry(&mut self) {
        if self.due().is_some_and(|due| due <= Instant::now())
            && let Some((_, waiting)) = self.waiting.pop_first()
        {
            self.attempt(waiting).await;
        }
    }

    /// Events written, and dropped or refused, since the last call.
    pub fn take_counts(&mut self) -> (u64, u64) {
        std::mem::take(&mut self.counts)
    }

    async fn attempt(&mut self, mut next: UnwrittenEvent) {
        let (due, error) = match self.rate.take(Instant::now()) {
            Err(due) => (due, "over the rate".to_owned()),
            Ok(()) => {
                let ended = self.recorder.attempt(&next.event, next.attempts > 0).await;
                next.attempts += 1;
                match ended {
                    Attempt::Written => {
                        self.counts.0 += 1;
                        return;
                    }
                    Attempt::Later(error) if next.attempts < ATTEMPTS => {
                        (Instant::now() + Self::BACKOFF.after(next.attempts), error)
                    }
                    Attempt::Later(error) | Attempt::Refused(error) => return self.dropped(&next, &error),
                    Attempt::NamespaceEnds => {
                        self.counts.1 += 1;
                        return;
                    }
                }
            }
        };
        if self.is_full() {
            return self.dropped(&next, &error);
        }
        tracing::debug!(%error, reason = next.event.reason, "Event not written yet");
        self.sequence += 1;
        self.waiting.insert((due, self.sequence), next);
    }

    fn dropped(&mut self, event: &UnwrittenEvent, error: &str) {
        self.recorder.log_failure(&event.event, error);
        self.counts.1 += 1;
    }
}

/// Writes Events that must outlast an API server that is away. They are written in the order in which they came, each until the
/// API server takes it. An Event replaces one like it that waits, so that a flapping object does not displace others.
pub struct KeptEvents {
    recorder: EventRecorder,
    rate: Rate,
    backoff: Backoff,
    /// Most Events that wait. Of more the oldest are dropped.
    most: usize,
    /// Oldest first.
    waiting: VecDeque<KeptEvent>,
    /// When the first one is due, if an attempt failed or was over the rate.
    due: Option<Instant>,
}

/// An Event that waits for the API server.
#[derive(Debug)]
struct KeptEvent {
    event: Event,
    /// An attempt was begun.
    is_attempted: bool,
    refusals: u32,
}

impl KeptEvents {
    /// Keeps up to `most` Events. Sends up to `burst` of them at once, and `per_second` after those.
    pub fn new(recorder: EventRecorder, most: usize, burst: u32, per_second: u32) -> Self {
        Self {
            recorder,
            rate: Rate::new(burst, per_second),
            backoff: Backoff::new(Duration::from_secs(1), Duration::from_secs(16)).with_jitter(),
            most,
            waiting: VecDeque::new(),
            due: None,
        }
    }

    /// Adds an Event with this message, to be written by [`Self::write_next`].
    pub fn add(&mut self, about: ObjectReference, message: Message) {
        let event = self.recorder.event(about, message);
        self.waiting.retain(|kept| !is_like(&kept.event, &event));
        self.waiting.push_back(KeptEvent { event, is_attempted: false, refusals: 0 });
        while self.waiting.len() > self.most
            && let Some(dropped) = self.waiting.pop_front()
        {
            self.recorder.log_failure(&dropped.event, "too many Events wait for the API server");
        }
    }

    /// Waits until the first Event is due and tries to write it; returns whether it is there. Without Events it waits for
    /// ever. May be dropped at any time.
    pub async fn write_next(&mut self) -> bool {
        loop {
            if self.waiting.is_empty() {
                std::future::pending::<()>().await;
            }
            if let Some(due) = self.due {
                tokio::time::sleep_until(due).await;
            }
            self.due = self.rate.take(Instant::now()).err();
            if self.due.is_none() {
                break;
            }
        }
        let Some(first) = self.waiting.front_mut() else {
            return false;
        };
        let is_repeated = std::mem::replace(&mut first.is_attempted, true);
        let error = match self.recorder.attempt(&first.event, is_repeated).await {
            Attempt::Written => {
                self.waiting.pop_front();
                self.backoff.reset();
                return true;
            }
            Attempt::NamespaceEnds => {
                self.waiting.pop_front();
                return false;
            }
            Attempt::Later(error) => error,
            // An API server that starts refuses what it allows a little later.
            Attempt::Refused(error) => {
                first.refusals += 1;
                error
            }
        };
        if first.refusals >= ATTEMPTS {
            self.recorder.log_failure(&first.event, &error);
            self.waiting.pop_front();
            self.backoff.reset();
        } else {
            tracing::debug!(%error, reason = first.event.reason, "Event not written yet");
            self.due = Some(Instant::now() + self.backoff.fail());
        }
        false
    }
}

/// Whether two Events have the same message about the same object.
fn is_like(a: &Event, b: &Event) -> bool {
    a.regarding == b.regarding && a.reason == b.reason && a.note == b.note
}

/// A token bucket.
#[derive(Debug)]
struct Rate {
    burst: u32,
    interval: Duration,
    /// When the bucket would be full again.
    full: Option<Instant>,
}

impl Rate {
    fn new(burst: u32, per_second: u32) -> Self {
        let interval = Duration::from_secs(1) / per_second.max(1);
        Self { burst, interval, full: None }
    }

    /// Takes a token, or returns when there is one.
    fn take(&mut self, now: Instant) -> Result<(), Instant> {
        let full = self.full.unwrap_or(now).max(now) + self.interval;
        let latest = now + self.interval * self.burst;
        if full > latest {
            return Err(now + (full - latest));
        }
        self.full = Some(full);
        Ok(())
    }
}

async fn limited<T>(request: impl Future<Output = Result<T, kube::Error>>) -> Result<T, kube::Error> {
    let timed_out = |_| Err(kube::Error::Service("no response in time".into()));
    tokio::time::timeout(TIMEOUT, request).await.unwrap_or_else(timed_out)
}

/// A name for an Event about an object of this name, which may itself be as long as names may be.
fn name(about: &str, now: Timestamp) -> String {
    let moment = format!("{:x}", now.as_nanosecond());
    let about = &about[..about.floor_char_boundary(MAX_NAME.saturating_sub(moment.len() + 1))];
    // A part of a name ends with a letter or digit.
    let about = about.trim_end_matches(['-', '.']);
    format!("{about}.{moment}")
}

#[cfg(test)]
#[path = "events/tests.rs"]
mod tests;
