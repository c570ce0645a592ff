//! Writes Events. What the API server has no time for is written a little later, a few times and as many as can be kept; then it is left
//! out. Each is sent under one name, so that none is there twice.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use gantry_runtime::chain;
use k8s_openapi::api::events::v1::Event;
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::time::Instant;

use crate::metrics::{Metrics, Outcome};
use crate::watch::is_ending;

/// Events that wait to be written again.
const WAITING: usize = 1024;
/// Time limit of one write.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Between the first try and the second; each further one waits twice as long.
const AGAIN: Duration = Duration::from_secs(1);
/// So often one is tried.
const TRIES: u32 = 5;

/// Writes Events, those again that were not taken.
pub(super) struct Writer {
    client: Client,
    metrics: Arc<Metrics>,
    /// By when they are due, and in the order in which they came.
    unsent: BTreeMap<(Instant, u64), Unsent>,
    /// How many have come in here.
    came: u64,
}

/// An Event that is not known to be written.
struct Unsent {
    event: Event,
    tried: u32,
}

/// How a try ended.
enum Sent {
    Yes,
    /// Not now, or nobody knows.
    Later(String),
    Never(String),
    /// Its namespace is on its way out.
    Moot,
}

impl Writer {
    pub(super) fn new(client: Client, metrics: Arc<Metrics>) -> Self {
        Self {
            client,
            metrics,
            unsent: BTreeMap::new(),
            came: 0,
        }
    }

    /// When one is to be tried again.
    pub(super) fn due(&self) -> Option<Instant> {
        self.unsent.first_key_value().map(|((due, _), _)| *due)
    }

    /// Writes an Event.
    pub(super) async fn write(&mut self, event: Event) {
        self.attempt(Unsent { event, tried: 0 }).await;
    }

    /// Tries one again that is due: only one, for new ones are not to wait for all the old.
    pub(super) async fn again(&mut self) {
        if self.due().is_some_and(|due| due <= Instant::now())
            && let Some((_, unsent)) = self.unsent.pop_first()
        {
            self.attempt(unsent).await;
        }
    }

    async fn attempt(&mut self, unsent: Unsent) {
        let Unsent { event, tried } = unsent;
        let namespace = event.metadata.namespace.clone().unwrap_or_default();
        let outcome = match self.send(&event, &namespace, tried).await {
            Sent::Yes => "published",
            Sent::Later(error) if tried + 1 < TRIES && self.unsent.len() < WAITING => {
                tracing::debug!(%namespace, %error, "cannot publish event yet");
                let due = Instant::now() + AGAIN * 2u32.pow(tried);
                self.came += 1;
                let tried = tried + 1;
                self.unsent.insert((due, self.came), Unsent { event, tried });
                return;
            }
            Sent::Later(error) | Sent::Never(error) => {
                tracing::warn!(%namespace, %error, "cannot publish event");
                "failed"
            }
            Sent::Moot => "failed",
        };
        self.metrics.events.get_or_create(&Outcome { outcome }).inc();
    }

    async fn send(&self, event: &Event, namespace: &str, tried: u32) -> Sent {
        let events: Api<Event> = Api::namespaced(self.client.clone(), namespace);
        let params = PostParams::default();
        match tokio::time::timeout(TIMEOUT, events.create(&params, event)).await {
            Ok(Ok(_)) => Sent::Yes,
            Ok(Err(error)) if is_ending(&error) => Sent::Moot,
            Ok(Err(error)) => match &error {
                // An earlier try got there, though not its answer.
                kube::Error::Api(status) if status.code == 409 && tried > 0 => Sent::Yes,
                kube::Error::Api(status) if !matches!(status.code, 408 | 429 | 500..) => {
                    Sent::Never(chain(&error))
                }
                _ => Sent::Later(chain(&error)),
            },
            Err(_) => Sent::Later("no answer in time".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::{Value, json};
    use tokio_util::sync::CancellationToken;
    use tower_test::mock;

    use super::super::{Events, Message, run};
    use super::*;

    /// No answer, but an error of the connection.
    const BROKEN: u16 = 0;

    /// Tells of so many pods, while the API server answers by these codes and then well: the names under which Events came, and how many
    /// were published and how many failed.
    async fn told(pods: usize, codes: Vec<u16>) -> (Vec<String>, u64, u64) {
        let (service, mut api) = mock::pair::<Request<Body>, Response<Body>>();
        let names: Arc<Mutex<Vec<String>>> = Arc::default();
        let (came, mut codes) = (Arc::clone(&names), codes.into_iter());
        tokio::spawn(async move {
            while let Some((request, send)) = api.next_request().await {
                let body = request.into_body().collect_bytes().await.unwrap();
                let body: Value = serde_json::from_slice(&body).unwrap();
                let name = body["metadata"]["name"].as_str().unwrap().to_owned();
                came.lock().unwrap().push(name);
                let (code, answer) = match codes.next() {
                    Some(BROKEN) => {
                        send.send_error("the connection was reset");
                        continue;
                    }
                    Some(code) => {
                        let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "no", "reason": "X", "code": code});
                        (code, status)
                    }
                    None => (201, body),
                };
                let body = Body::from(answer.to_string().into_bytes());
                send.send_response(Response::builder().status(code).body(body).unwrap());
            }
        });
        let (events, mailbox) = Events::new();
        let metrics = Arc::new(Metrics::new());
        let stop = CancellationToken::new();
        let client = Client::new(service, "default");
        let task = run(
            client,
            Arc::default(),
            mailbox,
            Arc::clone(&metrics),
            stop.clone(),
        );
        let task = tokio::spawn(task);
        for number in 0..pods {
            let message = Message {
                reason: "Preempted",
                warning: true,
                note: "evicted".to_owned(),
            };
            let name = format!("p-{number}");
            events.pod(
                &"ml".into(),
                &name.as_str().into(),
                &name.as_str().into(),
                message,
            );
        }
        let count = |outcome| metrics.events.get_or_create(&Outcome { outcome }).get();
        let ended = async {
            while count("published") + count("failed") < pods as u64 {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            // Nothing comes after that.
            tokio::time::sleep(Duration::from_secs(60)).await;
        };
        tokio::time::timeout(Duration::from_secs(3600), ended)
            .await
            .unwrap();
        stop.cancel();
        task.await.unwrap();
        let names = names.lock().unwrap().clone();
        (names, count("published"), count("failed"))
    }

    #[tokio::test(start_paused = true)]
    async fn an_event_that_the_api_server_has_no_time_for_is_written_later_under_the_same_name() {
        let (names, published, failed) = told(1, vec![429, 503, 504, BROKEN]).await;
        assert_eq!((names.len(), published, failed), (5, 1, 0));
        assert!(names.iter().all(|name| *name == names[0]), "{names:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn an_event_that_is_there_though_its_writing_was_not_answered_well_is_published() {
        let (names, published, failed) = told(1, vec![504, 409]).await;
        assert_eq!((names.len(), published, failed), (2, 1, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn an_event_is_given_up_after_some_tries_and_at_once_if_it_is_refused() {
        let (names, published, failed) = told(1, vec![503; 20]).await;
        assert_eq!((names.len(), published, failed), (5, 0, 1));
        for code in [403, 404, 409, 422] {
            let (names, published, failed) = told(1, vec![code]).await;
            assert_eq!((names.len(), published, failed), (1, 0, 1), "{code}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_is_put_off_does_not_keep_others_from_being_written() {
        // As many are told at once as nearly fill the mailbox; half of them are put off once.
        let (names, published, failed) = told(1000, vec![429; 500]).await;
        assert_eq!((names.len(), published, failed), (1500, 1000, 0));
        let again = &names[1000..];
        assert!(again.iter().all(|name| names[..500].contains(name)), "{again:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn no_more_wait_than_can_be_kept() {
        let (service, mut api) = mock::pair::<Request<Body>, Response<Body>>();
        tokio::spawn(async move {
            while let Some((_, send)) = api.next_request().await {
                send.send_response(Response::builder().status(503).body(Body::empty()).unwrap());
            }
        });
        let metrics = Arc::new(Metrics::new());
        let mut writer = Writer::new(Client::new(service, "default"), Arc::clone(&metrics));
        for _ in 0..WAITING + 3 {
            writer.write(Event::default()).await;
        }
        assert_eq!(writer.unsent.len(), WAITING);
        let outcome = "failed";
        assert_eq!(metrics.events.get_or_create(&Outcome { outcome }).get(), 3);
    }
}
