//! Supervises background tasks. If one panics, all are shut down in order and the process exits with an error, so that kubelet restarts it.
//! A daemon that lost a task would otherwise pass its probes and silently leave a part of its work undone.

use std::future::Future;

use tokio::task::{JoinError, JoinSet};
use tokio_util::sync::CancellationToken;

/// Why a daemon stops early.
#[derive(Debug, thiserror::Error)]
pub enum TaskFailure {
    /// A task has panicked.
    #[error("a task of the daemon panicked")]
    Panicked(#[source] JoinError),
    /// A task that must run until shutdown has ended.
    #[error("a task of the daemon ended by itself")]
    EndedEarly,
}

/// Tasks that may end before the daemon does, but must not panic. Dropping this aborts them.
#[derive(Debug)]
pub struct Tasks {
    running: JoinSet<Result<(), TaskFailure>>,
    shutdown: CancellationToken,
    failure: Option<TaskFailure>,
}

impl Tasks {
    /// No tasks yet. `shutdown` ends them, and is cancelled if one panics.
    pub fn new(shutdown: CancellationToken) -> Self {
        Self { running: JoinSet::new(), shutdown, failure: None }
    }

    /// Starts a task.
    pub fn spawn(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        self.spawn_group(async move {
            task.await;
            Ok(())
        });
    }

    /// Starts a task that supervises tasks of its own and returns how they ended.
    pub fn spawn_group(&mut self, task: impl Future<Output = Result<(), TaskFailure>> + Send + 'static) {
        self.running.spawn(task);
    }

    /// Waits until a task panics and shutdown of the others has begun. Does not return otherwise.
    pub async fn join_failed(&mut self) {
        while let Some(ended) = self.running.join_next().await {
            if self.record(ended) {
                return;
            }
        }
        std::future::pending::<()>().await;
    }

    /// Waits until all tasks have ended.
    ///
    /// # Errors
    /// The first panic.
    pub async fn join_all(mut self) -> Result<(), TaskFailure> {
        while let Some(ended) = self.running.join_next().await {
            self.record(ended);
        }
        self.failure.map_or(Ok(()), Err)
    }

    fn record(&mut self, ended: Result<Result<(), TaskFailure>, JoinError>) -> bool {
        let Err(failure) = ended.unwrap_or_else(|error| Err(TaskFailure::Panicked(error))) else {
            return false;
        };
        self.failure.get_or_insert(failure);
        self.shutdown.cancel();
        true
    }
}

/// Runs `serving` together with `tasks`, all of which must run until `shutdown`: if one ends early, all are shut down. `release` ends the tasks
/// that are needed until `serving` has finished its last call.
///
/// # Errors
/// The failure of a task, or else that of `serving`.
pub async fn serve_with_tasks<E: From<TaskFailure>>(
    serving: impl Future<Output = Result<(), E>>,
    mut tasks: JoinSet<()>,
    shutdown: &CancellationToken,
    release: &CancellationToken,
) -> Result<(), E> {
    let mut serving = std::pin::pin!(serving);
    let mut failed = None;
    let ended = loop {
        tokio::select! {
            ended = &mut serving => break ended,
            Some(task) = tasks.join_next() => {
                if task.is_err() || !shutdown.is_cancelled() {
                    failed = failed.or(Some(task));
                    shutdown.cancel();
                }
            }
        }
    };
    release.cancel();
    while let Some(task) = tasks.join_next().await {
        if task.is_err() {
            failed = failed.or(Some(task));
        }
    }
    match failed {
        Some(Err(error)) => Err(TaskFailure::Panicked(error).into()),
        Some(Ok(())) => Err(TaskFailure::EndedEarly.into()),
        None => ended,
    }
}

#[cfg(test)]
#[path = "supervise/tests.rs"]
mod tests;
