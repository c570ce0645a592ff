use std::sync::Mutex;

use http::{Method, Request, Response};
use kube::client::Body;
use proptest::prelude::*;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tower_test::mock;

use super::*;

/// What becomes of a request.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Link {
    Good,
    /// It is done, and the answer never comes.
    Deaf,
    /// It never gets there.
    Dead,
    /// It is answered with an error, and not done.
    Refused,
    /// It is done after so many milliseconds, whether or not anybody still waits.
    Slow(u64),
}

/// An API server with one Lease.
#[derive(Debug, Default)]
struct Api {
    lease: Mutex<Option<Value>>,
    version: Mutex<u64>,
    writes: Mutex<u64>,
}

impl Api {
    fn answer(&self, method: &Method, body: &[u8]) -> (u16, Value) {
        let mut lease = self.lease.lock().unwrap();
        match (method, &*lease) {
            (&Method::GET, Some(lease)) => return (200, lease.clone()),
            (&Method::GET | &Method::PUT, None) => return status(404),
            (&Method::POST, Some(_)) => return status(409),
            _ => {}
        }
        let mut written: Value = serde_json::from_slice(body).unwrap();
        let known = lease.as_ref().map(|lease| lease["metadata"]["resourceVersion"].clone());
        if known.is_some_and(|known| known != written["metadata"]["resourceVersion"]) {
            return status(409);
        }
        let mut version = self.version.lock().unwrap();
        *version += 1;
        *self.writes.lock().unwrap() += 1;
        written["metadata"]["resourceVersion"] = version.to_string().into();
        *lease = Some(written.clone());
        (200, written)
    }

    fn holder(&self) -> String {
        let lease = self.lease.lock().unwrap();
        let holder = lease.as_ref().and_then(|lease| lease["spec"]["holderIdentity"].as_str());
        holder.unwrap_or_default().to_owned()
    }
}

fn status(code: u16) -> (u16, Value) {
    let body = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "X", "message": "no", "code": code});
    (code, body)
}

/// One extender that stands for election.
struct Candidate {
    leadership: Arc<Leadership>,
    link: Arc<Mutex<Link>>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Candidate {
    fn start(api: &Arc<Api>, identity: &str) -> Self {
        let (service, mut requests) = mock::pair::<Request<Body>, Response<Body>>();
        let link = Arc::new(Mutex::new(Link::Good));
        let (api, mode) = (Arc::clone(api), Arc::clone(&link));
        tokio::spawn(async move {
            let mut unanswered = Vec::new();
            while let Some((request, send)) = requests.next_request().await {
                let (head, body) = request.into_parts();
                let body = body.collect_bytes().await.unwrap();
                let respond = |(code, body): (u16, Value)| {
                    let body = Body::from(body.to_string().into_bytes());
                    Response::builder().status(code).body(body).unwrap()
                };
                let link = *mode.lock().unwrap();
                match link {
                    Link::Good => send.send_response(respond(api.answer(&head.method, &body))),
                    Link::Deaf => {
                        api.answer(&head.method, &body);
                        unanswered.push(send);
                    }
                    Link::Dead => unanswered.push(send),
                    Link::Refused => send.send_response(respond(status(500))),
                    Link::Slow(millis) => {
                        let api = Arc::clone(&api);
                        tokio::spawn(async move {
                            tokio::time::sleep(Duration::from_millis(millis)).await;
                            send.send_response(respond(api.answer(&head.method, &body)));
                        });
                    }
                }
            }
        });
        let settings = Settings {
            namespace: "gantry-system".into(),
            name: "gantry-extender".into(),
            identity: identity.into(),
            duration: Duration::from_secs(6),
            renew_deadline: Duration::from_secs(4),
            published: "{}".to_owned(),
        };
        let leadership = Arc::new(Leadership::follower());
        let stop = CancellationToken::new();
        let client = Client::new(service, "default");
        // What watches do: they forget, read anew, and enter.
        let enters = Arc::clone(&leadership);
        tokio::spawn(async move {
            let mut term = None;
            loop {
                term = enters.changed(term).await;
                if let Some(term) = term {
                    enters.enter(term);
                }
            }
        });
        let task = tokio::spawn(run(client, settings, Arc::clone(&leadership), stop.clone()));
        Self { leadership, link, stop, task }
    }

    fn set(&self, link: Link) {
        *self.link.lock().unwrap() = link;
    }

    async fn leads_within(&self, limit: Duration) -> Duration {
        let began = Instant::now();
        tokio::time::timeout(limit, self.leadership.entered()).await.expect("it never leads");
        began.elapsed()
    }
}

const MINUTE: Duration = Duration::from_secs(60);

#[tokio::test(start_paused = true)]
async fn the_first_leads_and_goes_on_leading() {
    let api = Arc::new(Api::default());
    let a = Candidate::start(&api, "a");
    assert!(!a.leadership.leads());
    a.leads_within(Duration::from_secs(1)).await;
    let b = Candidate::start(&api, "b");
    let term = a.leadership.term();
    for _ in 0..600 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(a.leadership.leads());
        assert!(!b.leadership.leads());
    }
    assert_eq!(a.leadership.term(), term);
    assert_eq!(b.leadership.why_not(), "this extender does not lead, a does");
    let writes = *api.writes.lock().unwrap();
    assert!((55..=65).contains(&writes), "one a second: {writes}");
}

#[tokio::test(start_paused = true)]
async fn standby_takes_over_only_after_the_lease_expires() {
    let api = Arc::new(Api::default());
    let a = Candidate::start(&api, "a");
    a.leads_within(MINUTE).await;
    let b = Candidate::start(&api, "b");
    tokio::time::sleep(Duration::from_secs(10)).await;
    a.task.abort();
    let took = b.leads_within(MINUTE).await;
    assert!(took >= Duration::from_secs(5), "{took:?}");
    assert!(took <= Duration::from_secs(7), "{took:?}");
    assert!(!a.leadership.leads(), "it has ended by itself");
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_stops_in_order_is_followed_within_a_second() {
    let api = Arc::new(Api::default());
    let a = Candidate::start(&api, "a");
    a.leads_within(MINUTE).await;
    let b = Candidate::start(&api, "b");
    tokio::time::sleep(Duration::from_secs(10)).await;
    a.stop.cancel();
    let took = b.leads_within(MINUTE).await;
    assert!(took < Duration::from_secs(1), "{took:?}");
    a.task.await.unwrap();
    assert!(!a.leadership.leads());
}

#[tokio::test(start_paused = true)]
async fn release_of_the_lease_is_retried() {
    for link in [Link::Refused, Link::Dead, Link::Deaf] {
        let api = Arc::new(Api::default());
        let a = Candidate::start(&api, "a");
        a.leads_within(MINUTE).await;
        let b = Candidate::start(&api, "b");
        tokio::time::sleep(Duration::from_secs(10)).await;
        a.set(link);
        a.stop.cancel();
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert!(!a.leadership.leads(), "{link:?}");
        a.set(Link::Good);
        let took = b.leads_within(MINUTE).await;
        assert!(took < Duration::from_secs(2), "{link:?}: {took:?}");
        a.task.await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn failing_release_is_given_up_soon() {
    for link in [Link::Refused, Link::Dead] {
        let api = Arc::new(Api::default());
        let a = Candidate::start(&api, "a");
        a.leads_within(MINUTE).await;
        a.set(link);
        let began = Instant::now();
        a.stop.cancel();
        a.task.await.unwrap();
        assert!(began.elapsed() <= Duration::from_secs(3), "{link:?}");
        assert_eq!(api.holder(), "a");
    }
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_cannot_renew_ends_before_its_lease_does() {
    let mut reasons = Vec::new();
    for link in [Link::Dead, Link::Refused, Link::Deaf] {
        let api = Arc::new(Api::default());
        let a = Candidate::start(&api, "a");
        let b = Candidate::start(&api, "b");
        a.leads_within(MINUTE).await;
        tokio::time::sleep(Duration::from_secs(10)).await;
        let term = a.leadership.term().unwrap();
        a.set(link);
        let cut = Instant::now();
        a.leadership.ended(term).await;
        assert!(cut.elapsed() <= Duration::from_secs(4), "{link:?}");
        assert!(!a.leadership.leads());
        assert!(!b.leadership.leads(), "{link:?}: the lease is not over yet");
        if link == Link::Deaf {
            // Its writes arrive: to the others it lives.
            continue;
        }
        b.leads_within(MINUTE).await;
        assert!(!a.leadership.leads());
        // Without the cause.
        reasons.push(a.leadership.why_not().split(": ").next().unwrap().to_owned());
    }
    insta::assert_snapshot!(reasons.join("\n"), @r"
    cannot read or write Lease gantry-system/gantry-extender
    cannot read or write Lease gantry-system/gantry-extender
    ");
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_somebody_else_wrote_or_deleted_is_lost_at_once() {
    let api = Arc::new(Api::default());
    let a = Candidate::start(&api, "a");
    a.leads_within(MINUTE).await;
    let term = a.leadership.term().unwrap();
    {
        let mut lease = api.lease.lock().unwrap();
        let lease = lease.as_mut().unwrap();
        lease["spec"]["holderIdentity"] = "kubectl".into();
        lease["metadata"]["resourceVersion"] = "999".into();
    }
    let began = Instant::now();
    a.leadership.ended(term).await;
    assert!(began.elapsed() <= Duration::from_secs(1));
    assert_eq!(a.leadership.why_not(), "this extender does not lead, kubectl does");

    a.leads_within(MINUTE).await;
    let term = a.leadership.term().unwrap();
    *api.lease.lock().unwrap() = None;
    a.leadership.ended(term).await;
    a.leads_within(MINUTE).await;
    assert_eq!(api.holder(), "a");
}

#[tokio::test(start_paused = true)]
async fn leadership_goes_to_the_extender_that_kube_scheduler_calls() {
    let api = Arc::new(Api::default());
    let a = Candidate::start(&api, "a");
    a.leads_within(MINUTE).await;
    let b = Candidate::start(&api, "b");
    // Both are called, or the other is called once: it stays.
    for _ in 0..20 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        drop(a.leadership.called());
        drop(b.leadership.called());
        assert!(a.leadership.leads());
    }
    tokio::time::sleep(MINUTE).await;
    drop(b.leadership.called());
    tokio::time::sleep(MINUTE).await;
    assert!(a.leadership.leads());
    // kube-scheduler has moved to b.
    let began = Instant::now();
    while !b.leadership.leads() {
        assert!(began.elapsed() < MINUTE);
        drop(b.leadership.called());
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    assert!(began.elapsed() <= Duration::from_secs(5), "{:?}", began.elapsed());
    assert!(!a.leadership.leads());
    tokio::time::sleep(MINUTE).await;
    assert!(b.leadership.leads());
}

#[tokio::test(start_paused = true)]
async fn nothing_is_answered_before_what_was_known_is_forgotten() {
    let leadership = Leadership::follower();
    leadership.win("a", Instant::now() + Duration::from_secs(4));
    let term = leadership.changed(None).await.unwrap();
    assert!(!leadership.leads());
    leadership.enter(term);
    assert!(leadership.leads());
    leadership.lose(String::new());
    leadership.win("a", Instant::now() + Duration::from_secs(4));
    leadership.enter(term);
    assert!(!leadership.leads(), "that was another term");
    assert_ne!(leadership.changed(Some(term)).await, Some(term));
}

fn link() -> impl Strategy<Value = Link> {
    prop_oneof![
        6 => Just(Link::Good),
        1 => Just(Link::Deaf),
        1 => Just(Link::Dead),
        1 => Just(Link::Refused),
        1 => (0u64..1900).prop_map(Link::Slow),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever becomes of their requests: never two at once, and one in the end.
    #[test]
    fn never_do_two_lead(plan in prop::collection::vec((0usize..3, link(), 0u64..5000), 1..40)) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        runtime.block_on(async move {
            let api = Arc::new(Api::default());
            let candidates: Vec<Candidate> =
                ["a", "b", "c"].iter().map(|name| Candidate::start(&api, name)).collect();
            let leading = || candidates.iter().filter(|one| one.leadership.leads()).count();
            for (who, link, millis) in plan {
                candidates[who].set(link);
                let until = Instant::now() + Duration::from_millis(millis);
                while Instant::now() < until {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    assert!(leading() <= 1);
                }
            }
            for one in &candidates {
                one.set(Link::Good);
            }
            for _ in 0..1000 {
                tokio::time::sleep(Duration::from_millis(20)).await;
                assert!(leading() <= 1);
            }
            assert_eq!(leading(), 1);
        });
    }
}
