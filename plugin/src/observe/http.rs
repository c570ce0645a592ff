//! /metrics, /healthz, /readyz and /settledz over HTTP/1.1. Serves what is counted; takes nothing in.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use gantry_runtime::exposition;
use http::{Method, Request, Response, StatusCode, header};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::task::AbortHandle;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::{Observed, Readiness};

/// A scraper that does not finish its request head in this time is cut off.
const HEAD_DEADLINE: std::time::Duration = std::time::Duration::from_secs(5);
/// Waits between attempts to listen, for instance while an older process still has the port.
const RETRY: std::time::Duration = std::time::Duration::from_secs(1);

/// Most connections at once: whoever reaches the port must not take the files that serving kubelet needs.
const MOST: usize = 64;

/// Serves on `address` until `shutdown`. An address that cannot be had is tried again: GPUs matter more than metrics.
pub async fn serve(address: SocketAddr, observed: Arc<Observed>, shutdown: CancellationToken) {
    let mut warned = false;
    let listener = loop {
        match TcpListener::bind(address).await {
            Ok(listener) => break listener,
            Err(error) if !warned => {
                warn!(%address, %error, "cannot serve metrics and probes, trying on");
                warned = true;
            }
            Err(_) => {}
        }
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(RETRY) => {}
        }
    };
    info!(address = %listener.local_addr().unwrap_or(address), "serving /metrics, /healthz, /readyz and /settledz");
    let mut connections = Connections::default();
    loop {
        let stream = tokio::select! {
            () = shutdown.cancelled() => return,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    debug!(%error, "cannot accept a connection");
                    tokio::time::sleep(RETRY).await;
                    continue;
                }
            },
        };
        let observed = Arc::clone(&observed);
        let connection = tokio::spawn(async move {
            let service = service_fn(move |request: Request<Incoming>| {
                let response = answer(&request, &observed);
                async move { Ok::<_, Infallible>(response) }
            });
            let served = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_DEADLINE)
                .serve_connection(TokioIo::new(stream), service)
                .await;
            if let Err(error) = served {
                debug!(%error, "a probe's connection ended");
            }
        });
        connections.add(connection.abort_handle());
    }
}

/// The connections there are, oldest first.
#[derive(Debug, Default)]
struct Connections(VecDeque<AbortHandle>);

impl Connections {
    /// One more. Of too many the oldest ends: a probe asks at once and is answered at once.
    fn add(&mut self, connection: AbortHandle) {
        self.0.retain(|known| !known.is_finished());
        if self.0.len() >= MOST
            && let Some(oldest) = self.0.pop_front()
        {
            oldest.abort();
        }
        self.0.push_back(connection);
    }
}

fn answer<B>(request: &Request<B>, observed: &Observed) -> Response<String> {
    if request.method() != Method::GET && request.method() != Method::HEAD {
        return text(StatusCode::METHOD_NOT_ALLOWED, "only GET is served\n".to_owned());
    }
    match request.uri().path() {
        "/healthz" => liveness(observed),
        "/readyz" => {
            let readiness = observed.readiness();
            standing(&readiness, readiness.missing().is_empty())
        }
        "/settledz" => {
            let readiness = observed.readiness();
            standing(&readiness, readiness.is_settled())
        }
        "/metrics" => match observed.metrics().text() {
            Ok(page) => {
                let accept = request.headers().get(header::ACCEPT);
                let (form, page) = exposition::page(page, accept.and_then(|accept| accept.to_str().ok()));
                let mut response = text(StatusCode::OK, page);
                let form = http::HeaderValue::from_static(form);
                response.headers_mut().insert(header::CONTENT_TYPE, form);
                response
            }
            Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
        },
        _ => text(
            StatusCode::NOT_FOUND,
            "only /metrics, /healthz, /readyz and /settledz are served\n".to_owned(),
        ),
    }
}

/// The runtime has one thread: an answer is itself its proof of life. What remains is the thread that asks NVML.
fn liveness(observed: &Observed) -> Response<String> {
    let readiness = observed.readiness();
    if !readiness.dead {
        return text(StatusCode::OK, "ok\n".to_owned());
    }
    let reason = readiness
        .nvml
        .unwrap_or_else(|| "NVML cannot be asked".to_owned());
    text(
        StatusCode::SERVICE_UNAVAILABLE,
        format!("a new process is worth a try: {reason}\n"),
    )
}

/// What is missing and what is degraded, well or not.
fn standing(readiness: &Readiness, well: bool) -> Response<String> {
    let missing = readiness.missing();
    let mut body = String::new();
    for line in &missing {
        body.push_str("not ready: ");
        body.push_str(line);
        body.push('\n');
    }
    if missing.is_empty() {
        body.push_str("ready\n");
    }
    for line in readiness.degraded() {
        body.push_str("degraded: ");
        body.push_str(&line);
        body.push('\n');
    }
    let status = if well {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    text(status, body)
}

fn text(status: StatusCode, body: String) -> Response<String> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        http::HeaderValue::from_static("text/plain; charset=utf-8"),
    );
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_that_takes_no_open_metrics_gets_prometheus_text() {
        let observed = Observed::default();
        let get = |accept: &str| {
            let request = Request::get("/metrics").header(header::ACCEPT, accept).body(());
            let response = answer(&request.unwrap(), &observed);
            let form = response.headers()[header::CONTENT_TYPE]
                .to_str()
                .unwrap()
                .to_owned();
            (form, response.into_body())
        };
        let (form, page) = get("text/plain;version=0.0.4");
        assert_eq!(form, "text/plain; version=0.0.4; charset=utf-8");
        assert!(
            page.contains("# TYPE gantry_plugin_deviations_total counter\n"),
            "{page}"
        );
        assert!(!page.contains("# EOF"), "{page}");
        let (form, page) = get("*/*");
        assert!(form.starts_with("application/openmetrics-text;"), "{form}");
        assert!(page.ends_with("# EOF\n"), "{page}");
    }

    #[tokio::test]
    async fn of_too_many_connections_the_oldest_end() {
        let mut connections = Connections::default();
        let mut tasks: VecDeque<_> = (0..MOST + 2)
            .map(|_| tokio::spawn(std::future::pending::<()>()))
            .collect();
        for task in &tasks {
            connections.add(task.abort_handle());
        }
        for task in tasks.drain(..2) {
            assert!(task.await.unwrap_err().is_cancelled());
        }
        assert!(tasks.iter().all(|task| !task.is_finished()));
    }
}
