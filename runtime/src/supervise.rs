//! Tasks of a daemon, each of which is needed: if one panics, all end in order, and the daemon with an error, to be started anew. Without
//! that a daemon goes on, answers its probes, and does a part of its work no more.

use std::future::Future;

use tokio::task::{JoinError, JoinSet};
use tokio_util::sync::CancellationToken;

/// Why a daemon ends before its time.
#[derive(Debug, thiserror::Error)]
pub enum Fallen {
    /// A task has panicked.
    #[error("a task of the daemon panicked")]
    Badly(#[source] JoinError),
    /// A task that is needed to the end has ended.
    #[error("a task of the daemon ended by itself")]
    Early,
}

/// Tasks that may end before the daemon does, and may not panic. Dropped, they are aborted.
#[derive(Debug)]
pub struct Tasks {
    running: JoinSet<Result<(), Fallen>>,
    shutdown: CancellationToken,
    fallen: Option<Fallen>,
}

impl Tasks {
    /// None yet. `shutdown` ends them, and is cancelled if one panics.
    pub fn new(shutdown: CancellationToken) -> Self {
        Self {
            running: JoinSet::new(),
            shutdown,
            fallen: None,
        }
    }

    /// Has a task run beside the others.
    pub fn spawn(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        self.spawn_group(async move {
            task.await;
            Ok(())
        });
    }

    /// The same for one that has tasks of its own, and tells how they ended.
    pub fn spawn_group(&mut self, task: impl Future<Output = Result<(), Fallen>> + Send + 'static) {
        self.running.spawn(task);
    }

    /// Waits until one panics, which asks the others to end. Comes back for nothing else.
    pub async fn fall(&mut self) {
        while let Some(ended) = self.running.join_next().await {
            if self.note(ended) {
                return;
            }
        }
        std::future::pending::<()>().await;
    }

    /// Waits until all have ended.
    ///
    /// # Errors
    /// One has panicked: the first of them.
    pub async fn end(mut self) -> Result<(), Fallen> {
        while let Some(ended) = self.running.join_next().await {
            self.note(ended);
        }
        self.fallen.map_or(Ok(()), Err)
    }

    fn note(&mut self, ended: Result<Result<(), Fallen>, JoinError>) -> bool {
        let Err(fallen) = ended.unwrap_or_else(|error| Err(Fallen::Badly(error))) else {
            return false;
        };
        self.fallen.get_or_insert(fallen);
        self.shutdown.cancel();
        true
    }
}

/// Serves, with `tasks` beside it. Each of them is needed to the end: if one ends before its time all of it does. `release` ends those that
/// are needed until the last call is answered.
///
/// # Errors
/// What a task ended of before its time, or else what `serving` ended of.
pub async fn beside<E: From<Fallen>>(
    serving: impl Future<Output = Result<(), E>>,
    mut tasks: JoinSet<()>,
    shutdown: &CancellationToken,
    release: &CancellationToken,
) -> Result<(), E> {
    let mut serving = std::pin::pin!(serving);
    let mut fallen = None;
    let ended = loop {
        tokio::select! {
            ended = &mut serving => break ended,
            Some(task) = tasks.join_next() => {
                if task.is_err() || !shutdown.is_cancelled() {
                    fallen = fallen.or(Some(task));
                    shutdown.cancel();
                }
            }
        }
    };
    release.cancel();
    while let Some(task) = tasks.join_next().await {
        if task.is_err() {
            fallen = fallen.or(Some(task));
        }
    }
    match fallen {
        Some(Err(error)) => Err(Fallen::Badly(error).into()),
        Some(Ok(())) => Err(Fallen::Early.into()),
        None => ended,
    }
}

#[cfg(test)]
#[path = "supervise/tests.rs"]
mod tests;
