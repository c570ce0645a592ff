//! Reports a wrong configuration as a Warning on the Node. Runs before there is a configuration, so it creates its own
//! API client when there is something to report.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use gantry_api::{NodeName, Reason};
use gantry_runtime::chain;
use gantry_runtime::events::Message;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::events::NodeEventRecorder;
use super::{RETRY, connect};
use gantry_config::source::Report;

/// Shortest interval of two Events, for a file with a changing problem.
const MIN_INTERVAL: Duration = Duration::from_secs(5);
/// Longest part of the problems in an Event; the API server rejects notes of more than 1024 bytes.
const MAX_PROBLEM: usize = 800;

/// Reports until `shutdown`, or until the sender of reports is gone.
pub(crate) async fn report_problems(
    node: NodeName,
    kubeconfig: Option<PathBuf>,
    mut reports: watch::Receiver<Report>,
    shutdown: CancellationToken,
) {
    let report = async {
        let mut reported: Option<Arc<str>> = None;
        let mut recorder: Option<NodeEventRecorder> = None;
        let mut backoff = RETRY;
        loop {
            let report = reports.borrow_and_update().clone();
            if let Some(problem) = report.problem.as_ref().filter(|now| reported.as_ref() != Some(now)) {
                if recorder.is_none() {
                    recorder = connected(&node, kubeconfig.as_deref()).await;
                }
                let message = message(problem, report.loads > 0);
                if let Some(recorder) = &mut recorder
                    && recorder.record(message).await
                {
                    reported = report.problem;
                    backoff.reset();
                    tokio::time::sleep(MIN_INTERVAL).await;
                } else {
                    // While the API server was away the problem may have changed or been solved.
                    tokio::time::sleep(backoff.fail()).await;
                }
                continue;
            }
            reported = report.problem;
            if reports.changed().await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = shutdown.cancelled() => {}
        () = report => {}
    }
}

async fn connected(node: &NodeName, kubeconfig: Option<&Path>) -> Option<NodeEventRecorder> {
    match connect(kubeconfig).await {
        Ok(client) => Some(NodeEventRecorder::new(client, node)),
        Err(error) => {
            debug!(error = %chain(&error), "cannot connect to the API server to report the configuration");
            None
        }
    }
}

fn message(problem: &str, serves: bool) -> Message {
    let end =
        if problem.len() > MAX_PROBLEM { problem.floor_char_boundary(MAX_PROBLEM) } else { problem.len() };
    let more = if end < problem.len() { " ..." } else { "" };
    let consequence = if serves {
        "the last valid configuration stays in effect"
    } else {
        "no GPU is served until it is corrected"
    };
    Message {
        reason: Reason::ConfigInvalid,
        action: "ReadConfig",
        warning: true,
        note: format!("{}{more}; {consequence}", &problem[..end]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn config_event_has_problem_and_consequence() {
        let note = |problem: &str, serves| message(problem, serves).note;
        assert_eq!(
            note("a.yaml:3: flags.migStrategy: x", true),
            "a.yaml:3: flags.migStrategy: x; the last valid configuration stays in effect"
        );
        let long = note(&"\u{e4}".repeat(4096), false);
        assert!(long.len() <= 1024, "{} bytes", long.len());
        assert!(long.ends_with(" ...; no GPU is served until it is corrected"), "{long}");
    }
}
