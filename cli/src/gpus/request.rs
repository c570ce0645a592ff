//! Requests of commands that take minutes: an API server that restarts meanwhile does not end them.

use std::time::Duration;

use anyhow::anyhow;
use gantry_runtime::chain;

use super::TIMEOUT;

/// Pause before a request is sent again.
const PAUSE: Duration = Duration::from_secs(1);
/// Requests in a row that may fail, while the API server restarts.
const FAILURES: u32 = 5;

/// Sends a request, again while the API server does not respond.
pub(super) async fn tried<T>(request: impl AsyncFn() -> kube::Result<T>) -> anyhow::Result<T> {
    let mut failures = 0;
    loop {
        let answer = tokio::time::timeout(TIMEOUT, request()).await;
        let error = match answer {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(kube::Error::Api(status))) if status.code == 403 => {
                return Err(anyhow!("{}; the ClusterRole gantry-operator has the right", status.message));
            }
            Ok(Err(kube::Error::Api(status))) if status.code < 500 && status.code != 429 => {
                return Err(anyhow!("{}", status.message));
            }
            Ok(Err(error)) => chain(&error),
            Err(_) => format!("no response within {} s", TIMEOUT.as_secs()),
        };
        failures += 1;
        if failures >= FAILURES {
            return Err(anyhow!("the API server does not respond: {error}"));
        }
        tokio::time::sleep(PAUSE).await;
    }
}
