use std::sync::{Arc, Mutex};

use http::{Method, Request, Response};
use kube::client::Body;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tower_test::mock;

use super::*;

/// An API server with one EndpointSlice.
#[derive(Default)]
struct Server {
    slice: Mutex<Option<Value>>,
    writes: Mutex<Vec<Method>>,
    /// So many requests are refused first.
    refusals: Mutex<u32>,
}

impl Server {
    fn answer(&self, method: &Method, body: &[u8]) -> (u16, Value) {
        let mut refusals = self.refusals.lock().unwrap();
        if *refusals > 0 {
            *refusals -= 1;
            return status(403);
        }
        let mut slice = self.slice.lock().unwrap();
        if method == Method::GET {
            return slice.clone().map_or_else(|| status(404), |slice| (200, slice));
        }
        let mut written: Value = serde_json::from_slice(body).unwrap();
        let version = &slice.as_ref().map(|slice| slice["metadata"]["resourceVersion"].clone());
        if version.as_ref().is_some_and(|version| *version != written["metadata"]["resourceVersion"]) {
            return status(409);
        }
        let mut writes = self.writes.lock().unwrap();
        writes.push(method.clone());
        written["metadata"]["resourceVersion"] = writes.len().to_string().into();
        *slice = Some(written.clone());
        (200, written)
    }

    fn leads_to(&self) -> Value {
        let slice = self.slice.lock().unwrap();
        slice.as_ref().map_or(Value::Null, |slice| slice["endpoints"][0]["addresses"].clone())
    }
}

fn status(code: u16) -> (u16, Value) {
    let body = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "X", "message": "no", "code": code});
    (code, body)
}

/// A leader at an address, and the token that ends its time.
fn leader(server: &Arc<Server>, address: &str) -> (JoinHandle<()>, CancellationToken) {
    let (service, mut requests) = mock::pair::<Request<Body>, Response<Body>>();
    let server = Arc::clone(server);
    tokio::spawn(async move {
        while let Some((request, send)) = requests.next_request().await {
            let (head, body) = request.into_parts();
            let (code, body) = server.answer(&head.method, &body.collect_bytes().await.unwrap());
            let body = Body::from(body.to_string().into_bytes());
            send.send_response(Response::builder().status(code).body(body).unwrap());
        }
    });
    let settings = Settings {
        namespace: "gantry-system".into(),
        service: "gantry-extender-leader".into(),
        address: address.parse().unwrap(),
        port: 8010,
    };
    let until = CancellationToken::new();
    let task = tokio::spawn(run(Client::new(service, "default"), settings, until.clone()));
    (task, until)
}

async fn leads_to(server: &Server, address: &str) {
    while server.leads_to() != json!([address]) {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn the_service_leads_to_who_leads() {
    let server = Arc::new(Server::default());
    let (first, ends) = leader(&server, "10.0.0.1");
    leads_to(&server, "10.0.0.1").await;
    // As long as all is well nothing is written.
    tokio::time::sleep(LOOK * 5).await;
    assert_eq!(*server.writes.lock().unwrap(), [Method::POST]);
    ends.cancel();
    first.await.unwrap();
    assert_eq!(
        server.leads_to(),
        json!(["10.0.0.1"]),
        "nobody leads yet: nothing is gained by an empty Service"
    );

    let (_second, _ends) = leader(&server, "10.0.0.2");
    leads_to(&server, "10.0.0.2").await;
    let slice = server.slice.lock().unwrap().clone().unwrap();
    insta::assert_snapshot!(serde_json::to_string_pretty(&slice).unwrap());
}

#[tokio::test(start_paused = true)]
async fn changed_or_deleted_slice_is_written_again() {
    let server = Arc::new(Server::default());
    *server.refusals.lock().unwrap() = 3;
    let (_task, _ends) = leader(&server, "fd00::1");
    leads_to(&server, "fd00::1").await;
    let changes: [fn(&mut Value); 4] = [
        |slice| slice["endpoints"] = json!([]),
        |slice| slice["ports"][0]["port"] = 1.into(),
        |slice| slice["metadata"]["labels"] = json!({}),
        |slice| slice["endpoints"][0]["conditions"]["ready"] = false.into(),
    ];
    for (count, change) in changes.into_iter().enumerate() {
        change(server.slice.lock().unwrap().as_mut().unwrap());
        while server.writes.lock().unwrap().len() < count + 2 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        leads_to(&server, "fd00::1").await;
    }
    *server.slice.lock().unwrap() = None;
    leads_to(&server, "fd00::1").await;
    assert_eq!(
        server.slice.lock().unwrap().as_ref().unwrap()["metadata"]["name"],
        "gantry-extender-leader-ipv6"
    );
}
