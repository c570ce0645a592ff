use std::sync::{Arc, Mutex};

use http::{Method, Request, Response};
use kube::client::Body;
use serde_json::Value;
use tower_test::mock;

use super::*;

/// No response, but an error of the connection.
const BROKEN: u16 = 0;

/// Method and body of each request that an API server received.
type Requests = Arc<Mutex<Vec<(Method, String, Value)>>>;

/// A recorder, and an API server that returns these codes in turn and then the last for ever.
fn recorder(codes: &'static [u16]) -> (EventRecorder, Requests) {
    let (service, mut api) = mock::pair::<Request<Body>, Response<Body>>();
    let requests = Requests::default();
    let received = Arc::clone(&requests);
    tokio::spawn(async move {
        while let Some((request, send)) = api.next_request().await {
            let (method, path) = (request.method().clone(), request.uri().path().to_owned());
            let body = request.into_body().collect_bytes().await.unwrap();
            let body: Value = serde_json::from_slice(&body).unwrap();
            let at = {
                let mut received = received.lock().unwrap();
                received.push((method, path, body.clone()));
                (received.len() - 1).min(codes.len() - 1)
            };
            let answer = match codes[at] {
                200..300 => body,
                BROKEN => {
                    send.send_error("the connection was reset");
                    continue;
                }
                code => {
                    json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "no", "reason": "X", "code": code})
                }
            };
            let body = Body::from(answer.to_string().into_bytes());
            send.send_response(Response::builder().status(codes[at]).body(body).unwrap());
        }
    });
    (EventRecorder::new(Client::new(service, "default"), "gantry-test", "node-1"), requests)
}

fn message(note: &str) -> Message {
    Message {
        reason: Reason::GpuUnhealthy,
        action: "CheckHealth",
        warning: true,
        note: ObjectMessage::new(note),
    }
}

fn node() -> ObjectReference {
    cluster_object(("v1", "Node"), "node-1", "node-1")
}

fn names(requests: &Requests) -> Vec<String> {
    let requests = requests.lock().unwrap();
    let name = |(_, _, body): &(Method, String, Value)| body["metadata"]["name"].as_str().unwrap().to_owned();
    requests.iter().map(name).collect()
}

#[tokio::test]
async fn event_names_its_object_and_its_reporter() {
    let (mut recorder, requests) = recorder(&[201]);
    let about = object(("v1", "Pod"), "ml", "train-0", "uid");
    assert!(recorder.record(about, message("Xid 79")).await);
    let requests = requests.lock().unwrap();
    let (method, path, event) = &requests[0];
    assert_eq!((method, path.as_str()), (&Method::POST, "/apis/events.k8s.io/v1/namespaces/ml/events"));
    assert_eq!(event["regarding"]["uid"], "uid");
    assert_eq!(event["reason"], "GpuUnhealthy");
    assert_eq!(event["type"], "Warning");
    assert_eq!(event["note"], "Xid 79");
    assert_eq!(event["reportingController"], "gantry-test");
    assert_eq!(event["reportingInstance"], "node-1");
    assert!(event["eventTime"].is_string());
}

#[tokio::test(start_paused = true)]
async fn record_retries_under_one_name_what_may_pass() {
    for (codes, written, attempts) in [
        (&[201][..], true, 1),
        (&[429, 503, 504, 201], true, 4),
        (&[BROKEN, 201], true, 2),
        // The response to the first attempt was lost.
        (&[504, 409], true, 2),
        (&[503], false, ATTEMPTS as usize),
        (&[403, 201], false, 1),
        (&[422, 201], false, 1),
    ] {
        let (mut recorder, requests) = recorder(codes);
        assert_eq!(recorder.record(node(), message("x")).await, written, "{codes:?}");
        let names = names(&requests);
        assert_eq!(names.len(), attempts, "{codes:?}");
        assert!(names.iter().all(|name| *name == names[0]), "{names:?}");
    }
}

/// Writes so many Events of different pods, with all their retries: the names of all attempts, and how many were written and dropped.
async fn write_all(count: usize, codes: &'static [u16]) -> (Vec<String>, (u64, u64)) {
    let (recorder, requests) = recorder(codes);
    let mut writer = EventWriter::new(recorder, 1024, 20);
    for number in 0..count {
        let name = format!("p-{number}");
        writer.write(object(("v1", "Pod"), "ml", &name, &name), message("evicted")).await;
    }
    while let Some(due) = writer.due() {
        tokio::time::sleep_until(due).await;
        writer.retry().await;
    }
    (names(&requests), writer.take_counts())
}

#[tokio::test(start_paused = true)]
async fn writer_retries_later_under_the_same_name() {
    let (names, counts) = write_all(1, &[429, 503, 504, BROKEN, 201]).await;
    assert_eq!((names.len(), counts), (5, (1, 0)));
    assert!(names.iter().all(|name| *name == names[0]), "{names:?}");
    let (names, counts) = write_all(1, &[504, 409]).await;
    assert_eq!((names.len(), counts), (2, (1, 0)), "only the response was lost");
}

#[tokio::test(start_paused = true)]
async fn writer_drops_after_some_attempts_or_when_refused() {
    let (names, counts) = write_all(1, &[503]).await;
    assert_eq!((names.len(), counts), (5, (0, 1)));
    for refused in [&[403][..], &[404], &[409], &[422]] {
        let (names, counts) = write_all(1, refused).await;
        assert_eq!((names.len(), counts), (1, (0, 1)), "{refused:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn delayed_event_does_not_delay_others() {
    const CODES: [u16; 501] = {
        let mut codes = [429; 501];
        codes[500] = 201;
        codes
    };
    let (names, counts) = write_all(1000, &CODES).await;
    assert_eq!((names.len(), counts), (1500, (1000, 0)));
    let again = &names[1000..];
    assert!(again.iter().all(|name| names[..500].contains(name)), "{again:?}");
}

#[tokio::test(start_paused = true)]
async fn identical_events_are_counted_in_a_series() {
    let (mut recorder, requests) = recorder(&[201]);
    for note in ["a", "a", "b", "a"] {
        assert!(recorder.record(node(), message(note)).await);
    }
    tokio::time::advance(SERIES).await;
    assert!(recorder.record(node(), message("a")).await);
    let requests = requests.lock().unwrap();
    let methods: Vec<&str> = requests.iter().map(|(method, _, _)| method.as_str()).collect();
    assert_eq!(methods, ["POST", "PATCH", "POST", "PATCH", "POST"]);
    assert_eq!(requests[1].2["series"]["count"], 2);
    assert_eq!(requests[3].2["series"]["count"], 3);
}

#[tokio::test(start_paused = true)]
async fn series_that_cannot_be_counted_is_a_new_event() {
    for code in [403, 404] {
        let codes: &'static [u16] = if code == 403 { &[201, 403, 201] } else { &[201, 404, 201] };
        let (mut recorder, requests) = recorder(codes);
        assert!(recorder.record(node(), message("a")).await);
        assert!(recorder.record(node(), message("a")).await);
        let requests = requests.lock().unwrap();
        assert_eq!(requests.len(), 3);
        assert_ne!(requests[0].2["metadata"]["name"], requests[2].2["metadata"]["name"]);
    }
}

#[tokio::test(start_paused = true)]
async fn waiting_events_and_rate_are_bounded() {
    let (recorder, requests) = recorder(&[503]);
    let mut writer = EventWriter::new(recorder, 2000, 1);
    for number in 0..MAX_WAITING + 3 {
        writer.write(node(), message(&number.to_string())).await;
    }
    assert_eq!(writer.waiting.len(), MAX_WAITING);
    assert_eq!(writer.take_counts(), (0, 3));
    assert_eq!(requests.lock().unwrap().len(), MAX_WAITING + 3);
}

#[tokio::test(start_paused = true)]
async fn events_over_the_rate_are_written_later() {
    let (recorder, requests) = recorder(&[201]);
    let mut writer = EventWriter::new(recorder, 20, 2);
    for number in 0..25 {
        writer.write(node(), message(&number.to_string())).await;
    }
    assert_eq!(requests.lock().unwrap().len(), 20);
    let began = Instant::now();
    while let Some(due) = writer.due() {
        tokio::time::sleep_until(due).await;
        writer.retry().await;
    }
    assert_eq!(requests.lock().unwrap().len(), 25);
    assert_eq!(writer.take_counts(), (25, 0));
    assert_eq!(began.elapsed().as_millis(), 2500);
}

/// Adds Events and writes them for a while: the notes of all requests, and how many attempts succeeded.
async fn write_kept(
    notes: &[&str],
    most: usize,
    codes: &'static [u16],
    limit: Duration,
) -> (Vec<String>, usize) {
    let (recorder, requests) = recorder(codes);
    let mut events = KeptEvents::new(recorder, most, 1024, 20);
    for note in notes {
        events.add(node(), message(note));
    }
    let mut written = 0;
    let writing = async {
        loop {
            written += usize::from(events.write_next().await);
        }
    };
    let _: Result<(), _> = tokio::time::timeout(limit, writing).await;
    assert!(events.waiting.is_empty() || limit < Duration::from_secs(600), "{:?}", events.waiting);
    let requests = requests.lock().unwrap();
    let note = |body: &Value| body["note"].as_str().unwrap().to_owned();
    (requests.iter().map(|(_, _, body)| note(body)).collect(), written)
}

/// The API server is away for minutes, far longer than the attempts for other Events last.
#[tokio::test(start_paused = true)]
async fn kept_events_are_written_once_api_server_is_back() {
    const CODES: [u16; 31] = {
        let mut codes = [BROKEN; 31];
        codes[10] = 503;
        codes[30] = 201;
        codes
    };
    let minutes = Duration::from_secs(4 * 60);
    let (notes, written) = write_kept(&["a", "b"], 9, &CODES, minutes).await;
    assert!(notes.len() < 20 && notes.iter().all(|note| note == "a"), "only the first is tried: {notes:?}");
    assert_eq!(written, 0);
    let (notes, written) = write_kept(&["a", "b"], 9, &CODES, Duration::from_secs(3600)).await;
    assert_eq!((&notes[30..], written), (&["a".to_owned(), "b".to_owned()][..], 2));
}

#[tokio::test(start_paused = true)]
async fn kept_events_are_bounded_and_the_newest_last() {
    let hour = Duration::from_secs(3600);
    let (notes, written) = write_kept(&["a", "b", "a", "c", "b"], 9, &[201], hour).await;
    assert_eq!((notes, written), (["a", "c", "b"].map(str::to_owned).to_vec(), 3));
    let (notes, written) = write_kept(&["a", "b", "c", "d"], 3, &[201], hour).await;
    assert_eq!((notes, written), (["b", "c", "d"].map(str::to_owned).to_vec(), 3), "the oldest is dropped");
}

/// The rights may be unknown to an API server that starts. A right that is missing must not keep Events for ever.
#[tokio::test(start_paused = true)]
async fn kept_event_is_dropped_after_some_refusals() {
    let hour = Duration::from_secs(3600);
    let (notes, written) = write_kept(&["a", "b"], 9, &[BROKEN, 403, 403, 201], hour).await;
    assert_eq!((notes, written), (["a", "a", "a", "a", "b"].map(str::to_owned).to_vec(), 2));
    let (notes, written) = write_kept(&["a", "b"], 9, &[403], hour).await;
    assert_eq!((notes.len(), written), (2 * ATTEMPTS as usize, 0));
}

/// The daemon turns to something else while a request is under way; the Event is there once nevertheless.
#[tokio::test(start_paused = true)]
async fn dropped_attempt_for_a_kept_event_is_repeated() {
    let (recorder, requests) = recorder(&[201, 409]);
    let mut events = KeptEvents::new(recorder, 9, 1024, 20);
    events.add(node(), message("a"));
    {
        let mut attempt = std::pin::pin!(events.write_next());
        // The request is sent, the response not read.
        assert!(futures::poll!(&mut attempt).is_pending());
        while requests.lock().unwrap().is_empty() {
            tokio::task::yield_now().await;
        }
    }
    assert!(events.write_next().await);
    let names = names(&requests);
    assert!(names.len() == 2 && names[0] == names[1], "{names:?}");
}

#[test]
fn event_name_is_valid_for_any_object_name() {
    let now = Timestamp::from_second(1_767_225_600).unwrap();
    assert_eq!(name("a", now), "a.18867251edfa0000");
    let long = name(&"a".repeat(253), now);
    assert_eq!(long.len(), 253);
    assert!(long.ends_with("a.18867251edfa0000"), "{long}");
    // What stands where it is truncated must not end a part of a name.
    let odd = format!("{}.-.-{}", "a".repeat(232), "b".repeat(17));
    assert_eq!(name(&odd, now), format!("{}.18867251edfa0000", "a".repeat(232)));
    assert!(name(&"\u{e4}".repeat(200), now).len() <= 253);
}
