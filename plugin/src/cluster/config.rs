//! Tells of a wrong configuration where people look for it: a Warning on the Node. It runs before there is a configuration, so it
//! has a way to the API server of its own, sought only once there is something to tell.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use gantry_api::NodeName;
use kube::runtime::events::{Event, EventType};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::events::Teller;
use super::{Pauses, connect};
use gantry_config::source::Report;

/// Shortest time between two Events, for a file that is wrong in another way each time.
const SHORTEST: Duration = Duration::from_secs(5);
/// Longest part of the problems that an Event has; the API server refuses notes of more than 1024 bytes.
const MOST_TEXT: usize = 800;

/// Tells until `shutdown`, or until nobody reports any more.
pub(crate) async fn tell_of_problems(
    node: NodeName,
    kubeconfig: Option<PathBuf>,
    mut reports: watch::Receiver<Report>,
    shutdown: CancellationToken,
) {
    let tell = async {
        let mut told: Option<Arc<str>> = None;
        let mut teller: Option<Teller> = None;
        let mut pauses = Pauses::default();
        loop {
            let report = reports.borrow_and_update().clone();
            if let Some(problem) = report.problem.as_ref().filter(|now| told.as_ref() != Some(now)) {
                if teller.is_none() {
                    teller = connected(&node, kubeconfig.as_deref()).await;
                }
                let event = event(problem, report.loads > 0);
                if let Some(teller) = &mut teller
                    && teller.tell(event).await
                {
                    told = report.problem;
                    pauses.reset();
                    tokio::time::sleep(SHORTEST).await;
                } else {
                    // With the API server away there may be another problem, or none, once it is back.
                    tokio::time::sleep(pauses.next()).await;
                }
                continue;
            }
            told = report.problem;
            if reports.changed().await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = shutdown.cancelled() => {}
        () = tell => {}
    }
}

async fn connected(node: &NodeName, kubeconfig: Option<&Path>) -> Option<Teller> {
    match connect(kubeconfig).await {
        Ok(client) => Some(Teller::new(client, node)),
        Err(error) => {
            debug!(%error, "no way to the API server to tell of the configuration");
            None
        }
    }
}

fn event(problem: &str, serves: bool) -> Event {
    let end = if problem.len() > MOST_TEXT {
        problem.floor_char_boundary(MOST_TEXT)
    } else {
        problem.len()
    };
    let more = if end < problem.len() { " ..." } else { "" };
    let consequence = if serves {
        "the last good configuration stays in effect"
    } else {
        "no GPU is served until it is set right"
    };
    Event {
        type_: EventType::Warning,
        reason: "ConfigInvalid".to_owned(),
        note: Some(format!("{}{more}; {consequence}", &problem[..end])),
        action: "ReadConfig".to_owned(),
        secondary: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_says_what_is_wrong_and_what_that_means() {
        let note = |problem: &str, serves| event(problem, serves).note.unwrap();
        assert_eq!(
            note("a.yaml:3: flags.migStrategy: x", true),
            "a.yaml:3: flags.migStrategy: x; the last good configuration stays in effect"
        );
        let long = note(&"\u{e4}".repeat(4096), false);
        assert!(long.len() <= 1024, "{} bytes", long.len());
        assert!(
            long.ends_with(" ...; no GPU is served until it is set right"),
            "{long}"
        );
    }
}
