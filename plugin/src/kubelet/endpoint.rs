//! One resource at kubelet: serves it on a socket and registers it. Repeats both when kubelet or the socket was
//! replaced, and registers again if kubelet does not read the list. Serves before it registers, because kubelet
//! connects back before it returns.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use gantry_api::ResourceName;
use gantry_proto::DEVICE_PLUGIN_VERSION;
use gantry_proto::deviceplugin::registration_client::RegistrationClient;
use gantry_proto::deviceplugin::{DevicePluginOptions, RegisterRequest};
use gantry_runtime::{Backoff, chain};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::Kubelet;
use super::access;
use super::directory::View;
use super::service::DeviceList;
use super::serving::{SocketServer, inode};
use super::stream_monitor::StreamMonitor;
use gantry_runtime::LogThrottle;

/// Pauses between attempts to register: short at first, because kubelet admits its first pods a second after
/// its socket appears.
const RETRY: Backoff = Backoff::new(Duration::from_millis(5), Duration::from_secs(1));
/// The pause after a socket could not be bound.
const BIND_PAUSE: Duration = Duration::from_millis(200);

/// Serves and registers one resource.
#[derive(Debug)]
pub(super) struct Endpoint {
    pub(super) resource: ResourceName,
    pub(super) directory: PathBuf,
    pub(super) lists: watch::Receiver<DeviceList>,
    pub(super) kubelet: Kubelet,
}

impl Endpoint {
    /// Keeps the resource registered until `shutdown`, then ends the streams and removes the socket.
    pub(super) async fn run(self, views: watch::Receiver<View>, shutdown: CancellationToken) {
        let mut running = RunningEndpoint {
            path: self.directory.join(self.socket_name()),
            endpoint: &self,
            views,
            servers: Vec::new(),
            registered_with: 0,
            bound_for: 0,
            monitor: StreamMonitor::default(),
            contention: SocketContention::default(),
            is_read: false,
            serve_log: LogThrottle::default(),
            contention_log: LogThrottle::default(),
            unread_log: LogThrottle::default(),
        };
        shutdown.run_until_cancelled(running.run()).await;
        running.stop().await;
    }

    fn socket_name(&self) -> String {
        socket_name(&self.resource)
    }

    /// Registers repeatedly until kubelet accepts.
    async fn register(&self, kubelet: &Path, path: &Path, view: View, views: watch::Receiver<View>) {
        // One throttle per kubelet: a refusal by another kubelet is logged at once.
        let mut refused = LogThrottle::default();
        let name = self.socket_name();
        let mut backoff = RETRY;
        loop {
            match register(kubelet, &name, &self.resource).await {
                Ok(took) => {
                    info!(resource = %self.resource, socket = %path.display(), kubelet = view.kubelet, took_ms = took.as_secs_f64() * 1e3, "registered with kubelet");
                    self.kubelet.observed.registered(&self.resource);
                    return;
                }
                Err(error) => {
                    self.kubelet.observed.registration_failed(&self.resource, error.reason());
                    // Kubelet's socket file survives kubelet: a refused connection is normal between two
                    // kubelets.
                    if backoff.failures() == 0 && matches!(error, RegisterError::Connect { .. }) {
                        debug!(%error, "kubelet does not respond yet");
                    } else if refused.should_log(&error.reason(), Instant::now()) {
                        warn!(resource = %self.resource, error = error.reason(), attempts = backoff.failures() + 1, "cannot register with kubelet, trying again");
                    }
                    let pause = backoff.fail();
                    let mut views = views.clone();
                    tokio::select! {
                        () = tokio::time::sleep(pause) => {}
                        _ = views.wait_for(|seen| seen.kubelet != view.kubelet) => {}
                    }
                }
            }
        }
    }
}

struct RunningEndpoint<'e> {
    endpoint: &'e Endpoint,
    path: PathBuf,
    views: watch::Receiver<View>,
    /// The last server has the socket; the others still have clients.
    servers: Vec<SocketServer>,
    /// The kubelet that accepted the resource, counted from 1.
    registered_with: u64,
    /// The kubelet for which the socket was last bound.
    bound_for: u64,
    monitor: StreamMonitor,
    contention: SocketContention,
    /// Whether kubelet reads the list.
    is_read: bool,
    serve_log: LogThrottle,
    contention_log: LogThrottle,
    unread_log: LogThrottle,
}

/// State of the socket file.
struct SocketState {
    /// The socket must be bound again.
    is_due: bool,
    /// The socket was bound, and another program's socket is in its socket.
    is_lost: bool,
    /// When to replace the other program's socket.
    take_back: Option<Instant>,
}

impl RunningEndpoint<'_> {
    /// Acts on changes until the views end.
    async fn run(&mut self) {
        loop {
            let view = *self.views.borrow_and_update();
            self.count_streams();
            let socket = self.check_socket(view);
            let now = Instant::now();
            if socket.is_due && socket.take_back.is_none_or(|at| at <= now) {
                self.serve_and_register(view, socket.is_lost).await;
            } else if !socket.is_lost && self.monitor.due().is_some_and(|due| due <= now) {
                self.register_again(view).await;
            } else {
                // While another program's socket is in place, kubelet reads that one.
                let due = socket.take_back.or(self.monitor.due());
                let due = due.map(tokio::time::Instant::from_std);
                tokio::select! {
                    changed = self.views.changed() => if changed.is_err() { return },
                    () = maybe(self.servers.last_mut().map(SocketServer::streams_change)) => {}
                    () = maybe(due.map(tokio::time::sleep_until)) => {}
                }
            }
        }
    }

    fn count_streams(&mut self) {
        self.servers.retain(|server| !server.is_over());
        if let Some(server) = self.servers.last_mut() {
            let streams = server.streams();
            self.monitor.set_streams(streams, Instant::now());
            let Endpoint { resource, kubelet, lists, .. } = self.endpoint;
            kubelet.observed.streams(resource, streams);
            if streams > 0 && !self.is_read {
                info!(%resource, devices = lists.borrow().len(), "serving resource: kubelet reads its devices");
            }
            self.is_read = streams > 0;
        }
    }

    /// Checks the socket file, and reports another program's socket.
    fn check_socket(&mut self, view: View) -> SocketState {
        let Endpoint { resource, kubelet, .. } = self.endpoint;
        let there = inode(&self.path);
        let is_own = self.servers.last().is_some_and(|server| server.inode() == there);
        let is_due = if kubelet.socket.is_some() {
            view.present && (view.kubelet != self.registered_with || !is_own)
        } else {
            !is_own
        };
        // A missing socket was removed by kubelet or the operator; a different one is another program's.
        let is_contended = !self.servers.is_empty() && !is_own && there.is_some();
        if is_contended {
            kubelet.observed.socket_contended(resource);
            if self.contention_log.should_log("replaced", Instant::now()) {
                warn!(
                    %resource, socket = %self.path.display(),
                    "another program replaced this plugin's socket: check for a second device plugin on this node, such as NVIDIA's. Kubelet uses the plugin that registered last; this plugin takes the socket back, with growing pauses"
                );
            }
        }
        // For a new kubelet the socket is bound at once: contention counts per kubelet.
        let is_lost = is_due && is_contended && self.bound_for == view.kubelet;
        SocketState { is_due, is_lost, take_back: is_lost.then(|| self.contention.lost(Instant::now())) }
    }

    /// Serves on a new socket and registers it.
    async fn serve_and_register(&mut self, view: View, was_lost: bool) {
        let Endpoint { resource, kubelet, .. } = self.endpoint;
        if view.kubelet != self.registered_with && kubelet.socket.is_some() {
            // The old kubelet and its connections are gone. If only our socket was removed, kubelet still reads
            // the old stream, and ending it would mark the devices unhealthy.
            self.servers.drain(..).for_each(|server| server.stop());
            self.monitor = StreamMonitor::default();
        }
        let stop = CancellationToken::new();
        let service = kubelet.service(resource.clone(), self.endpoint.lists.clone(), stop.clone());
        match SocketServer::start(&self.path, service, stop) {
            Ok(serving) => {
                // Their sockets have no path any more.
                self.servers.iter().for_each(SocketServer::retire);
                self.servers.push(serving);
                self.contention.bound(was_lost, Instant::now());
                self.bound_for = view.kubelet;
                self.serve_log.reset();
            }
            Err(error) => {
                let problem = access::with_remedy(&error);
                if self.serve_log.should_log(&problem, Instant::now()) {
                    warn!(%resource, socket = %self.path.display(), "cannot serve on the socket, trying again: {problem}");
                }
                let problem = format!("cannot create the socket {}: {problem}", self.path.display());
                kubelet.observed.not_registered(resource, problem);
                tokio::time::sleep(BIND_PAUSE).await;
                return;
            }
        }
        match &kubelet.socket {
            Some(socket) => {
                if self.register(socket, view).await {
                    self.registered_with = view.kubelet;
                }
            }
            None => {
                info!(%resource, socket = %self.path.display(), "serving without registration, as configured");
                kubelet.observed.served(resource);
            }
        }
    }

    /// Registers the served resource again, because kubelet does not read its list.
    async fn register_again(&mut self, view: View) {
        let Endpoint { resource, kubelet, .. } = self.endpoint;
        kubelet.observed.list_unread(resource);
        if self.unread_log.should_log("unread_log", Instant::now()) {
            warn!(%resource, "kubelet does not read the device list of this resource and counts its devices as gone; registering again");
        }
        self.monitor.registered_again(Instant::now());
        // Without its socket kubelet is starting or stopping; a new kubelet gets a new registration.
        if view.present
            && let Some(socket) = &kubelet.socket
        {
            self.register(socket, view).await;
        }
    }

    /// Registers, until kubelet is replaced or our socket is removed, which make the result irrelevant.
    async fn register(&mut self, kubelet: &Path, view: View) -> bool {
        let own = self.servers.last().and_then(SocketServer::inode);
        tokio::select! {
            () = self.endpoint.register(kubelet, &self.path, view, self.views.clone()) => {}
            () = superseded(&self.path, own, view, self.views.clone()) => return false,
        }
        // Kubelet now uses the newest socket; its other streams will end.
        let streams = self.servers.last().map_or(0, SocketServer::open);
        self.monitor.registered(streams, Instant::now());
        true
    }

    /// Removes our socket, ends the streams, and waits shortly for clients. In this order, because a socket
    /// that is still listened on keeps its inode number.
    async fn stop(self) {
        let own = self.servers.last().and_then(SocketServer::inode);
        if own.is_some()
            && inode(&self.path) == own
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            debug!(%error, socket = %self.path.display(), "cannot remove this plugin's socket");
        }
        self.servers.iter().for_each(SocketServer::stop);
        for server in self.servers {
            server.ended().await;
        }
        let Endpoint { resource, kubelet, .. } = self.endpoint;
        kubelet.observed.unregistered(resource);
        info!(%resource, "stopped serving");
    }
}

/// File name of a resource's socket, unique per resource. For NVIDIA's resources it is the name that NVIDIA's
/// plugin uses, so that either plugin can replace the other.
fn socket_name(resource: &ResourceName) -> String {
    match resource.as_str().strip_prefix("nvidia.com/") {
        Some(name) => format!("nvidia-{name}.sock"),
        None => format!("gantry-{}.sock", resource.as_str().replace('/', "-")),
    }
}

/// Awaits `future`, or for ever without one.
async fn maybe(future: Option<impl Future<Output = ()>>) {
    match future {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}

/// Waits until `view` is outdated.
async fn superseded(path: &Path, own: Option<u64>, view: View, mut views: watch::Receiver<View>) {
    let outdated = |seen: &View| seen.kubelet != view.kubelet || !seen.present || inode(path) != own;
    if views.wait_for(outdated).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Time limit: kubelet connects back for up to 10 s before it returns.
const DEADLINE: Duration = Duration::from_secs(12);

/// The plugin options, in the registration and in GetDevicePluginOptions.
pub(super) const OPTIONS: DevicePluginOptions =
    DevicePluginOptions { pre_start_required: false, get_preferred_allocation_available: true };

/// Why a resource could not be registered.
#[derive(Debug, thiserror::Error)]
enum RegisterError {
    /// The path cannot be used as an address.
    #[error("{} is not a usable socket path", path.display())]
    Address {
        path: PathBuf,
        #[source]
        source: tonic::transport::Error,
    },
    /// Kubelet does not listen.
    #[error("cannot connect to kubelet on {}", path.display())]
    Connect {
        path: PathBuf,
        #[source]
        source: tonic::transport::Error,
    },
    /// Kubelet returned an error.
    #[error("kubelet refused {resource}: {}", status.message())]
    Refused {
        resource: ResourceName,
        #[source]
        status: tonic::Status,
    },
}

impl RegisterError {
    /// The whole cause chain in one line.
    fn reason(&self) -> String {
        match self {
            // The message already contains the status.
            Self::Refused { .. } => self.to_string(),
            Self::Address { .. } | Self::Connect { .. } => {
                format!("{}{}", chain(self), access::remedy_of(self))
            }
        }
    }
}

/// Registers the resource served on the socket `endpoint` at the kubelet on socket `kubelet`. Returns the
/// duration.
async fn register(
    kubelet: &Path,
    endpoint: &str,
    resource: &ResourceName,
) -> Result<Duration, RegisterError> {
    let began = Instant::now();
    let channel = tonic::transport::Endpoint::try_from(format!("unix://{}", kubelet.display()))
        .map_err(|source| RegisterError::Address { path: kubelet.to_owned(), source })?
        .timeout(DEADLINE)
        .connect()
        .await
        .map_err(|source| RegisterError::Connect { path: kubelet.to_owned(), source })?;
    RegistrationClient::new(channel)
        .register(RegisterRequest {
            version: DEVICE_PLUGIN_VERSION.to_owned(),
            endpoint: endpoint.to_owned(),
            resource_name: resource.to_string(),
            options: Some(OPTIONS),
        })
        .await
        .map_err(|status| RegisterError::Refused { resource: resource.clone(), status })?;
    Ok(began.elapsed())
}

/// Pauses from the second time on.
const PAUSES: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
/// A socket that stayed in place for this long: the next loss counts as the first again.
const STABLE: Duration = Duration::from_secs(120);

/// Contention for one resource's socket.
#[derive(Debug, Default)]
struct SocketContention {
    /// Number of times the socket was taken back without [`STABLE`] in between.
    times: u32,
    /// When our socket was last bound.
    bound: Option<Instant>,
    /// Since when another program's socket is known to be there.
    lost: Option<Instant>,
}

impl SocketContention {
    /// Records that our socket was bound; `from_other` if it replaced another program's.
    fn bound(&mut self, from_other: bool, now: Instant) {
        let stable = self
            .bound
            .zip(self.lost.or(Some(now)))
            .is_none_or(|(bound, lost)| lost.saturating_duration_since(bound) >= STABLE);
        if stable {
            self.times = 0;
        }
        if from_other {
            self.times = self.times.saturating_add(1);
        }
        self.bound = Some(now);
        self.lost = None;
    }

    /// Records another program's socket. Returns when to take the socket back: `now`, or later.
    fn lost(&mut self, now: Instant) -> Instant {
        let lost = *self.lost.get_or_insert(now);
        let stable = self.bound.is_none_or(|bound| lost.saturating_duration_since(bound) >= STABLE);
        match self.times {
            0 => lost,
            _ if stable => lost,
            times => lost + PAUSES.after(times),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_names_match_nvidia_plugin() {
        let names =
            ["nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.5gb.me", "example.org/gpu"];
        assert_eq!(
            names.map(|name| socket_name(&name.into())),
            [
                "nvidia-gpu.sock",
                "nvidia-gpu.shared.sock",
                "nvidia-mig-1g.5gb.me.sock",
                "gantry-example.org-gpu.sock"
            ]
        );
    }

    /// The pauses in seconds before our socket is taken back from a program that replaces it after `stands`
    /// seconds.
    fn pauses(times: usize, stands: u64) -> Vec<u64> {
        let mut now = Instant::now();
        let mut contention = SocketContention::default();
        contention.bound(false, now);
        let mut pauses = Vec::new();
        for _ in 0..times {
            now += Duration::from_secs(stands);
            let due = contention.lost(now);
            assert_eq!(
                contention.lost(now + Duration::from_millis(500)),
                due,
                "looking again puts nothing off"
            );
            pauses.push((due - now).as_secs());
            now = due;
            contention.bound(true, now);
        }
        pauses
    }

    #[test]
    fn repeated_contention_grows_pauses() {
        assert_eq!(pauses(9, 0), [0, 1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(pauses(100, 5)[99], 60, "no pause overflows");
    }

    #[test]
    fn stable_socket_is_taken_back_at_once() {
        assert_eq!(pauses(3, 3600), [0, 0, 0]);
    }

    #[test]
    fn removed_socket_is_no_contention() {
        let mut now = Instant::now();
        let mut contention = SocketContention::default();
        for _ in 0..9 {
            now += Duration::from_secs(1);
            contention.bound(false, now);
        }
        assert_eq!(contention.lost(now), now);
    }
}
