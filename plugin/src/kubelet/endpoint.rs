//! One resource's life with kubelet: serve on a socket, register it, do both anew whenever kubelet or the socket was replaced, and
//! register again where kubelet does not read what is served. Serves first and registers second, for kubelet dials back before it answers.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use gantry_api::ResourceName;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::Kubelet;
use super::attention::Attention;
use super::directory::View;
use super::register::{self, RegisterError};
use super::rivalry::Rivalry;
use super::service::DeviceList;
use super::serving::{Serving, inode};
use crate::recurring::Recurring;

/// Waits between attempts to register: short at first, for kubelet admits its first pods a second after its socket appears.
const BACK_OFF: [Duration; 6] = [
    Duration::from_millis(5),
    Duration::from_millis(20),
    Duration::from_millis(50),
    Duration::from_millis(100),
    Duration::from_millis(250),
    Duration::from_millis(500),
];
/// And when those are spent.
const LONGEST: Duration = Duration::from_secs(1);
/// The wait after a socket could not be bound.
const UNBOUND: Duration = Duration::from_millis(200);

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
        let mut life = Life {
            path: self.directory.join(self.socket_name()),
            endpoint: &self,
            views,
            servers: Vec::new(),
            registered_with: 0,
            placed_for: 0,
            attention: Attention::default(),
            rivalry: Rivalry::default(),
            unserved: Recurring::default(),
            rivalled: Recurring::default(),
            unread: Recurring::default(),
        };
        shutdown.run_until_cancelled(life.lead()).await;
        life.end().await;
    }

    fn socket_name(&self) -> String {
        socket_name(&self.resource)
    }

    /// Registers, again and again until kubelet has accepted.
    async fn register(&self, kubelet: &Path, path: &Path, view: View, views: watch::Receiver<View>) {
        // Of this kubelet: another one's refusal is news, be it for the same reason.
        let mut refused = Recurring::default();
        let name = self.socket_name();
        for attempt in 0.. {
            match register::register(kubelet, &name, &self.resource).await {
                Ok(took) => {
                    info!(resource = %self.resource, socket = %path.display(), kubelet = view.kubelet, took_ms = took.as_secs_f64() * 1e3, "registered with kubelet");
                    self.kubelet.observed.registered(&self.resource);
                    return;
                }
                Err(error) => {
                    self.kubelet.observed.registration_failed(&self.resource);
                    // Kubelet's socket file outlives kubelet: nobody listening is the usual state between two kubelets.
                    if attempt == 0 && matches!(error, RegisterError::Connect { .. }) {
                        debug!(%error, "kubelet does not answer yet");
                    } else if refused.tells(&error.reason(), Instant::now()) {
                        warn!(resource = %self.resource, error = error.reason(), attempt, "cannot register with kubelet, trying again");
                    }
                    let pause = BACK_OFF.get(attempt).copied().unwrap_or(LONGEST);
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

/// An endpoint between its start and its end.
struct Life<'e> {
    endpoint: &'e Endpoint,
    path: PathBuf,
    views: watch::Receiver<View>,
    /// The last one has the socket; those before it have clients left.
    servers: Vec<Serving>,
    /// Which kubelet has accepted the resource, counted from 1.
    registered_with: u64,
    /// For which kubelet the socket was put in its place last.
    placed_for: u64,
    attention: Attention,
    rivalry: Rivalry,
    unserved: Recurring,
    rivalled: Recurring,
    unread: Recurring,
}

/// How the socket's place was found.
struct Place {
    /// The socket is to be bound anew.
    is_due: bool,
    /// It was bound, and another program's lies there.
    is_lost: bool,
    /// When it may be taken back, if it is lost.
    take_back: Option<Instant>,
}

impl Life<'_> {
    /// Does what is due, for ever or until there are no views any more.
    async fn lead(&mut self) {
        loop {
            let view = *self.views.borrow_and_update();
            self.count_streams();
            let place = self.look(view);
            let now = Instant::now();
            if place.is_due && place.take_back.is_none_or(|at| at <= now) {
                self.begin(view, place.is_lost).await;
            } else if !place.is_lost && self.attention.due().is_some_and(|due| due <= now) {
                self.begin_again(view).await;
            } else {
                // While another's socket is there, kubelet reads that one.
                let due = place.take_back.or(self.attention.due());
                let due = due.map(tokio::time::Instant::from_std);
                tokio::select! {
                    changed = self.views.changed() => if changed.is_err() { return },
                    () = maybe(self.servers.last_mut().map(Serving::streams_change)) => {}
                    () = maybe(due.map(tokio::time::sleep_until)) => {}
                }
            }
        }
    }

    fn count_streams(&mut self) {
        self.servers.retain(|server| !server.is_over());
        if let Some(server) = self.servers.last_mut() {
            let streams = server.streams();
            self.attention.counted(streams, Instant::now());
            let observed = &self.endpoint.kubelet.observed;
            observed.streams(&self.endpoint.resource, streams);
        }
    }

    /// Looks whose socket is there, and tells of a rival's.
    fn look(&mut self, view: View) -> Place {
        let Endpoint {
            resource, kubelet, ..
        } = self.endpoint;
        let there = inode(&self.path);
        let is_own = self.servers.last().is_some_and(|server| server.inode() == there);
        let is_due = if kubelet.socket.is_some() {
            view.present && (view.kubelet != self.registered_with || !is_own)
        } else {
            !is_own
        };
        // Gone is wiped, by kubelet or by a person; another one in its place is another program's.
        let is_rivalled = !self.servers.is_empty() && !is_own && there.is_some();
        if is_rivalled {
            kubelet.observed.rival(resource);
            if self.rivalled.tells("replaced", Instant::now()) {
                warn!(
                    %resource, socket = %self.path.display(),
                    "another program has put its socket in the place of this one's: is there a second device plugin on this node, such as NVIDIA's? kubelet asks the one that registered last; the place is taken back, ever more rarely if it goes on"
                );
            }
        }
        // For a new kubelet the first place is taken at once: before it came there was none to lose.
        let is_lost = is_due && is_rivalled && self.placed_for == view.kubelet;
        Place {
            is_due,
            is_lost,
            take_back: is_lost.then(|| self.rivalry.lost(Instant::now())),
        }
    }

    /// Serves on a fresh socket and registers it.
    async fn begin(&mut self, view: View, was_lost: bool) {
        let Endpoint {
            resource, kubelet, ..
        } = self.endpoint;
        if view.kubelet != self.registered_with && kubelet.socket.is_some() {
            // The old kubelet is gone, and its connections with it. Where only our socket went, kubelet is alive and reads the old
            // stream: ending that would mark the new registration's devices unhealthy.
            self.servers.drain(..).for_each(|server| server.stop());
            self.attention = Attention::default();
        }
        let stop = CancellationToken::new();
        let service = kubelet.service(resource.clone(), self.endpoint.lists.clone(), stop.clone());
        match Serving::start(&self.path, service, stop) {
            Ok(serving) => {
                // No path leads to their sockets any more.
                self.servers.iter().for_each(Serving::retire);
                self.servers.push(serving);
                self.rivalry.placed(was_lost, Instant::now());
                self.placed_for = view.kubelet;
                self.unserved.over();
            }
            Err(error) => {
                if self.unserved.tells(&error.to_string(), Instant::now()) {
                    warn!(%resource, socket = %self.path.display(), %error, "cannot serve, trying again");
                }
                tokio::time::sleep(UNBOUND).await;
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
                info!(%resource, socket = %self.path.display(), "serving, unregistered as told");
                kubelet.observed.registered(resource);
            }
        }
    }

    /// Registers what is served already, for kubelet does not read it.
    async fn begin_again(&mut self, view: View) {
        let Endpoint {
            resource, kubelet, ..
        } = self.endpoint;
        kubelet.observed.unread(resource);
        if self.unread.tells("unread", Instant::now()) {
            warn!(%resource, "kubelet does not read the device list of this resource, which makes its devices count as gone; registering again");
        }
        self.attention.again(Instant::now());
        // Without its socket kubelet is about to come or to go; a new one is told as such.
        if view.present
            && let Some(socket) = &kubelet.socket
        {
            self.register(socket, view).await;
        }
    }

    /// Registers; not if kubelet is replaced or our socket wiped meanwhile, for then the answer no longer matters.
    async fn register(&mut self, kubelet: &Path, view: View) -> bool {
        let own = self.servers.last().and_then(Serving::inode);
        tokio::select! {
            () = self.endpoint.register(kubelet, &self.path, view, self.views.clone()) => {}
            () = superseded(&self.path, own, view, self.views.clone()) => return false,
        }
        // Kubelet has turned to the newest socket; what it still reads elsewhere will end.
        let streams = self.servers.last().map_or(0, Serving::open);
        self.attention.registered(streams, Instant::now());
        true
    }

    /// Removes the socket if it is still ours, ends the streams, and waits for the clients a moment. In this order: while it is listened
    /// on, no successor's socket can have its inode number.
    async fn end(self) {
        let own = self.servers.last().and_then(Serving::inode);
        if own.is_some()
            && inode(&self.path) == own
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            debug!(%error, socket = %self.path.display(), "cannot remove this plugin's socket");
        }
        self.servers.iter().for_each(Serving::stop);
        for server in self.servers {
            server.ended().await;
        }
        let Endpoint {
            resource, kubelet, ..
        } = self.endpoint;
        kubelet.observed.unregistered(resource);
        info!(%resource, "stopped serving");
    }
}

/// File name of a resource's socket, which no other resource has. For NVIDIA's resources it is the one that NVIDIA's plugin
/// uses, so that either takes over from the other.
fn socket_name(resource: &ResourceName) -> String {
    match resource.as_str().strip_prefix("nvidia.com/") {
        Some(name) => format!("nvidia-{name}.sock"),
        None => format!("gantry-{}.sock", resource.as_str().replace('/', "-")),
    }
}

/// Awaits what there may be to await.
async fn maybe(future: Option<impl Future<Output = ()>>) {
    match future {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}

/// Waits until `view` is no longer what to act on.
async fn superseded(path: &Path, own: Option<u64>, view: View, mut views: watch::Receiver<View>) {
    let outdated = |seen: &View| seen.kubelet != view.kubelet || !seen.present || inode(path) != own;
    if views.wait_for(outdated).await.is_err() {
        std::future::pending::<()>().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_are_called_as_nvidias_plugin_calls_them() {
        let names = [
            "nvidia.com/gpu",
            "nvidia.com/gpu.shared",
            "nvidia.com/mig-1g.5gb.me",
            "example.org/gpu",
        ];
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
}
