//! /metrics, /healthz, /readyz and /settledz over HTTP/1.1.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use gantry_runtime::http::{self, Endpoints};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{Observed, Readiness};

/// Pause between attempts to listen, for instance while an older process still has the port.
const RETRY: Duration = Duration::from_secs(1);

/// Serves on `address` until `shutdown`. An address that is in use is tried again: serving GPUs matters more than metrics.
pub async fn serve(address: SocketAddr, observed: Arc<Observed>, shutdown: CancellationToken) {
    let mut warned = false;
    let listener = loop {
        match TcpListener::bind(address).await {
            Ok(listener) => break listener,
            Err(error) if !warned => {
                warn!(%address, %error, "cannot serve metrics and probes, trying again");
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
    http::serve(listener, router(&observed), &shutdown).await;
}

fn router(observed: &Arc<Observed>) -> Router {
    let probe = |report: fn(&Readiness) -> Result<String, String>| {
        let observed = Arc::clone(observed);
        move || report(&observed.readiness())
    };
    let metrics = Arc::clone(observed);
    Endpoints::default()
        .probe("/healthz", probe(liveness))
        .probe("/readyz", probe(|readiness| report(readiness, readiness.missing().is_empty())))
        .probe("/settledz", probe(|readiness| report(readiness, readiness.is_settled())))
        .metrics(move || metrics.metrics().text())
        .into_router()
}

/// The runtime has one thread, so a response proves that it is alive. The thread that owns NVML is what remains to check.
fn liveness(readiness: &Readiness) -> Result<String, String> {
    if !readiness.dead {
        return Ok("ok".to_owned());
    }
    let reason = readiness.nvml.as_deref().unwrap_or("NVML does not respond");
    Err(format!("a restart may help: {reason}"))
}

/// What is missing and what is degraded, one line each.
fn report(readiness: &Readiness, succeeds: bool) -> Result<String, String> {
    let missing = readiness.missing();
    let mut lines: Vec<String> = missing.iter().map(|line| format!("not ready: {line}")).collect();
    if missing.is_empty() {
        lines.push("ready".to_owned());
    }
    lines.extend(readiness.degraded().iter().map(|line| format!("degraded: {line}")));
    let text = lines.join("\n");
    if succeeds { Ok(text) } else { Err(text) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_lists_what_is_missing_and_degraded() {
        let mut readiness = Readiness {
            devices: Some("libnvidia-ml.so.1 is missing".into()),
            pod_resources: Some(false),
            ..Readiness::default()
        };
        assert_eq!(
            report(&readiness, false).unwrap_err().lines().collect::<Vec<_>>(),
            [
                "not ready: no devices: libnvidia-ml.so.1 is missing",
                "degraded: kubelet's pod resources cannot be read: holders are derived from grants and allocations only",
            ]
        );
        readiness.pod_resources = None;
        readiness.devices = None;
        assert_eq!(report(&readiness, true).unwrap(), "not ready: no resource is served yet");
    }

    #[test]
    fn liveness_fails_only_when_a_restart_may_help() {
        let mut readiness = Readiness { nvml: Some("driver stopped".into()), ..Readiness::default() };
        assert_eq!(liveness(&readiness).unwrap(), "ok");
        readiness.dead = true;
        assert_eq!(liveness(&readiness).unwrap_err(), "a restart may help: driver stopped");
    }
}
