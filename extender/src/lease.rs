//! Leader election of several extenders by a Lease of coordination.k8s.io. Only the leader answers and writes; the
//! standby replicas keep their caches warm. Clocks of two machines are never compared. A leader that cannot renew
//! stands down before its Lease expires.

mod leadership;
mod record;

use std::sync::Arc;
use std::time::Duration;

use gantry_runtime::{Backoff, chain};
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub use leadership::{Leadership, Term};
pub use record::Settings;

use record::{Intent, ObservedLease, Renewal};

/// Time limit for releasing the Lease: the process is about to exit, and the Lease expires soon after.
const RELEASE: Duration = Duration::from_secs(3);
/// Time limit of one such request.
const RELEASE_ATTEMPT: Duration = Duration::from_secs(1);
/// Pauses between attempts to release the Lease.
const RELEASE_RETRY: Backoff = Backoff::new(Duration::from_millis(100), RELEASE);

/// Takes part in the election until `stop`, then releases the Lease, so that another replica leads at once.
/// `leadership` shows the result.
pub async fn run(client: Client, settings: Settings, leadership: Arc<Leadership>, stop: CancellationToken) {
    let mut elector = Elector {
        leases: Api::namespaced(client, &settings.namespace),
        settings,
        leadership,
        seen: None,
        until: None,
    };
    loop {
        let work = async {
            let began = Instant::now();
            let pause = elector.step().await;
            tokio::time::sleep_until(began + pause).await;
        };
        if stop.run_until_cancelled(work).await.is_none() {
            break;
        }
    }
    elector.release().await;
}

/// Why a request for the Lease failed.
enum LeaseFailure {
    /// There is no Lease.
    Missing,
    /// Another client wrote or created it meanwhile.
    Conflict,
    /// The request may or may not have been carried out.
    Other(String),
}

struct Elector {
    leases: Api<Lease>,
    settings: Settings,
    leadership: Arc<Leadership>,
    /// The Lease as last observed; `None` if it must be read first.
    seen: Option<ObservedLease>,
    /// Until when this process leads, if it does.
    until: Option<Instant>,
}

impl Elector {
    /// Reads or renews the Lease once. Returns how long after its start the next step is due.
    async fn step(&mut self) -> Duration {
        match self.until {
            Some(until) if Instant::now() < until => self.renew(until).await,
            Some(_) => {
                tracing::warn!(lease = %self.settings.name, "lease not renewed in time, standing down");
                self.lose(String::new());
                Duration::ZERO
            }
            None => {
                self.look().await;
                self.settings.look_every()
            }
        }
    }

    /// A standby replica reads the Lease, and takes it if allowed.
    async fn look(&mut self) {
        let sent = Instant::now();
        let limit = sent + self.settings.attempt();
        match limited(limit, self.leases.get(&self.settings.name)).await {
            Ok(lease) => self.saw(lease),
            Err(LeaseFailure::Missing) => {
                let lease = self.settings.fresh();
                let params = PostParams::default();
                match limited(limit, self.leases.create(&params, &lease)).await {
                    Ok(lease) => self.won(lease, sent),
                    Err(LeaseFailure::Other(error)) => self.trouble(&error),
                    Err(LeaseFailure::Missing | LeaseFailure::Conflict) => {}
                }
                return;
            }
            Err(LeaseFailure::Conflict) => return,
            Err(LeaseFailure::Other(error)) => return self.trouble(&error),
        }
        let Some(seen) = &self.seen else {
            return;
        };
        self.leadership.follow(seen.holder());
        let insists = self.leadership.is_called_though_it_follows(sent);
        match self.settings.intent(seen, insists, Instant::now()) {
            Intent::Wait => {}
            Intent::Take(lease) => {
                let sent = Instant::now();
                match self.write(&lease, limit).await {
                    Ok(lease) => self.won(lease, sent),
                    Err(LeaseFailure::Other(error)) => self.trouble(&error),
                    Err(LeaseFailure::Missing | LeaseFailure::Conflict) => {}
                }
            }
            Intent::Ask(lease) => {
                tracing::info!(leader = %seen.holder(), "called though another leads, asking for the lease");
                // A failure is retried as long as kube-scheduler calls.
                if let Ok(lease) = self.write(&lease, limit).await {
                    self.saw(lease);
                }
            }
        }
    }

    /// The leader renews the Lease, or yields it to the replica that kube-scheduler calls instead.
    async fn renew(&mut self, until: Instant) -> Duration {
        let again = self.settings.look_every();
        let sent = Instant::now();
        let limit = until.min(sent + self.settings.attempt());
        if self.seen.is_none() {
            match limited(limit, self.leases.get(&self.settings.name)).await {
                Ok(lease) => self.saw(lease),
                // Deleted by the operator: a new Lease has no holder to wait for.
                Err(LeaseFailure::Missing) => {
                    self.lose(String::new());
                    return Duration::ZERO;
                }
                Err(LeaseFailure::Conflict) => return again,
                Err(LeaseFailure::Other(error)) => {
                    self.trouble(&error);
                    return again;
                }
            }
        }
        let Some(seen) = &self.seen else {
            return again;
        };
        if seen.holder() != self.settings.identity {
            let holder = seen.holder().to_owned();
            tracing::warn!(leader = %holder, "another holds the lease, standing down");
            self.lose(holder);
            return again;
        }
        let busy = self.leadership.is_called(sent);
        match self.settings.renewal(seen, busy) {
            Renewal::Renew(lease) => {
                let sent = Instant::now();
                match self.write(&lease, limit).await {
                    Ok(lease) => {
                        self.saw(lease);
                        let until = sent + self.settings.renew_deadline;
                        self.until = Some(until);
                        self.leadership.extend(until);
                        self.settings.renew_every()
                    }
                    Err(LeaseFailure::Conflict | LeaseFailure::Missing) => {
                        self.seen = None;
                        Duration::ZERO
                    }
                    Err(LeaseFailure::Other(error)) => {
                        self.trouble(&error);
                        // The renewal may have been written.
                        self.seen = None;
                        again
                    }
                }
            }
            Renewal::Yield(lease) => {
                tracing::info!("kube-scheduler calls another extender, giving the lease to it");
                // This process stops deciding before the other one may lead.
                self.lose(String::new());
                if let Ok(lease) = self.write(&lease, limit).await {
                    self.saw(lease);
                }
                again
            }
        }
    }

    async fn write(&self, lease: &Lease, limit: Instant) -> Result<Lease, LeaseFailure> {
        let params = PostParams::default();
        limited(limit, self.leases.replace(&self.settings.name, &params, lease)).await
    }

    fn saw(&mut self, lease: Lease) {
        self.seen = Some(ObservedLease::new(lease, self.seen.take(), Instant::now()));
    }

    fn won(&mut self, lease: Lease, sent: Instant) {
        self.saw(lease);
        let until = sent + self.settings.renew_deadline;
        self.until = Some(until);
        self.leadership.win(&self.settings.identity, until);
        tracing::info!(lease = %self.settings.name, identity = %self.settings.identity, "leads");
    }

    fn lose(&mut self, holder: String) {
        self.until = None;
        self.leadership.lose(holder);
    }

    fn trouble(&self, error: &str) {
        let Settings { namespace, name, .. } = &self.settings;
        tracing::warn!(%namespace, %name, %error, "cannot read or write the lease");
        self.leadership.trouble(format!("cannot read or write Lease {namespace}/{name}: {error}"));
    }

    /// Releases the Lease, if this process holds it. If that fails, it expires.
    async fn release(&mut self) {
        let led = self.until.take().is_some();
        self.leadership.lose(String::new());
        if !led {
            return;
        }
        let limit = Instant::now() + RELEASE;
        let mut backoff = RELEASE_RETRY;
        loop {
            let pause = backoff.fail();
            match self.try_release(limit.min(Instant::now() + RELEASE_ATTEMPT)).await {
                Ok(()) => return,
                Err(error) if Instant::now() + pause < limit => {
                    tracing::debug!(lease = %self.settings.name, %error, "cannot release the lease yet");
                }
                Err(error) => {
                    tracing::warn!(lease = %self.settings.name, %error, "cannot release the lease; it expires");
                    return;
                }
            }
            tokio::time::sleep(pause).await;
        }
    }

    /// Fails if this process may still hold the Lease. The known version may be outdated by a request that was in
    /// flight.
    async fn try_release(&mut self, limit: Instant) -> Result<(), String> {
        let seen = match self.seen.take() {
            Some(seen) => seen,
            None => match limited(limit, self.leases.get(&self.settings.name)).await {
                Ok(lease) => ObservedLease::new(lease, None, Instant::now()),
                Err(LeaseFailure::Missing) => return Ok(()),
                Err(LeaseFailure::Conflict) => return Err("it cannot be read".to_owned()),
                Err(LeaseFailure::Other(error)) => return Err(error),
            },
        };
        if seen.holder() != self.settings.identity {
            return Ok(());
        }
        match self.write(&self.settings.released(&seen), limit).await {
            Ok(_) => {
                tracing::info!(lease = %self.settings.name, "lease released");
                Ok(())
            }
            Err(LeaseFailure::Missing) => Ok(()),
            Err(LeaseFailure::Conflict) => Err("another client wrote it meanwhile".to_owned()),
            Err(LeaseFailure::Other(error)) => Err(error),
        }
    }
}

async fn limited(
    limit: Instant,
    request: impl Future<Output = Result<Lease, kube::Error>>,
) -> Result<Lease, LeaseFailure> {
    match tokio::time::timeout_at(limit, request).await {
        Ok(Ok(lease)) => Ok(lease),
        Ok(Err(kube::Error::Api(status))) if status.code == 404 => Err(LeaseFailure::Missing),
        Ok(Err(kube::Error::Api(status))) if status.code == 409 => Err(LeaseFailure::Conflict),
        Ok(Err(error)) => Err(LeaseFailure::Other(chain(&error))),
        Err(_) => Err(LeaseFailure::Other("no answer in time".to_owned())),
    }
}

#[cfg(test)]
mod tests;
