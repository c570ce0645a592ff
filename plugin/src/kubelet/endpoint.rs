//! One resource's life with kubelet: serve on a socket, register it, do both anew whenever kubelet or the socket was replaced, and
//! register again where kubelet does not read what is served. Serves first and registers second, for kubelet dials back before it answers.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use gantry_api::ResourceName;
use gantry_proto::deviceplugin::device_plugin_server::DevicePluginServer;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::Kubelet;
use super::attention::Attention;
use super::directory::View;
use super::register::{self, RegisterError};
use super::rivalry::Rivalry;
use super::server;
use super::service::DeviceList;
use crate::recurring::Recurring;

/// How long a stopping server may take to end its streams. A client that never speaks would otherwise keep it for ever.
const DRAIN: Duration = Duration::from_secs(2);
/// Waits between attempts to register: short at first, for kubelet admits its first pods a second after its socket appears.
const BACK_OFF: [Duration; 7] = [
    Duration::from_millis(5),
    Duration::from_millis(20),
    Duration::from_millis(50),
    Duration::from_millis(100),
    Duration::from_millis(250),
    Duration::from_millis(500),
    Duration::from_secs(1),
];

/// Serves and registers one resource.
#[derive(Debug)]
pub(super) struct Endpoint {
    pub(super) resource: ResourceName,
    pub(super) directory: PathBuf,
    pub(super) lists: watch::Receiver<DeviceList>,
    pub(super) kubelet: Kubelet,
}

/// A server on one socket file.
#[derive(Debug)]
struct Serving {
    /// Ends the streams too.
    stop: CancellationToken,
    /// Ends the listening: streams that are open go on, and the server ends with the last connection.
    retire: CancellationToken,
    task: JoinHandle<()>,
    inode: Option<u64>,
    /// How many streams of lists are open.
    streams: watch::Receiver<usize>,
}

impl Serving {
    /// Waits until the number of open streams is another one than was last looked at.
    async fn streams_change(&mut self) {
        if self.streams.changed().await.is_err() {
            // The server has ended, and has closed its socket, which is looked for elsewhere.
            std::future::pending::<()>().await;
        }
    }
}

impl Endpoint {
    /// Keeps the resource registered until `shutdown`, then ends the streams and removes the socket.
    pub(super) async fn run(self, mut views: watch::Receiver<View>, shutdown: CancellationToken) {
        let path = self.directory.join(self.socket_name());
        let mut servers: Vec<Serving> = Vec::new();
        let mut registered_with = 0;
        let mut placed_for = 0;
        let mut unserved = Recurring::default();
        let mut told = Recurring::default();
        let mut unread = Recurring::default();
        let mut attention = Attention::default();
        let mut rivalry = Rivalry::default();
        loop {
            let view = *views.borrow_and_update();
            servers.retain(|server| !server.task.is_finished());
            if let Some(server) = servers.last_mut() {
                let streams = *server.streams.borrow_and_update();
                attention.counted(streams, Instant::now());
                self.kubelet.observed.streams(&self.resource, streams);
            }
            let own_socket = servers.last().is_some_and(|server| server.inode == inode(&path));
            let due = if self.kubelet.socket.is_some() {
                view.present && (view.kubelet != registered_with || !own_socket)
            } else {
                !own_socket
            };
            // Gone is wiped, by kubelet or by a person; another one in its place is another program's.
            let rivalled = !servers.is_empty() && !own_socket && inode(&path).is_some();
            // For a new kubelet the first place is taken at once: before it came there was none to lose.
            let lost = due && rivalled && placed_for == view.kubelet;
            let take_back = lost.then(|| rivalry.lost(Instant::now()));
            if rivalled {
                self.kubelet.observed.rival(&self.resource);
                if told.tells("replaced", Instant::now()) {
                    warn!(
                        resource = %self.resource, socket = %path.display(),
                        "another program has put its socket in the place of this one's: is there a second device plugin on this node, such as NVIDIA's? kubelet asks the one that registered last; the place is taken back, ever more rarely if it goes on"
                    );
                }
            }
            if due && take_back.is_none_or(|at| at <= Instant::now()) {
                if view.kubelet != registered_with && self.kubelet.socket.is_some() {
                    // The old kubelet is gone, and its connections with it. Where only our socket went, kubelet is alive and
                    // reads the old stream: ending that would mark the new registration's devices unhealthy.
                    servers.drain(..).for_each(|server| server.stop.cancel());
                    attention = Attention::default();
                }
                match self.serve(&path) {
                    Ok(serving) => {
                        // No path leads to their sockets any more.
                        servers.iter().for_each(|server| server.retire.cancel());
                        servers.push(serving);
                        rivalry.placed(lost, Instant::now());
                        placed_for = view.kubelet;
                        unserved.over();
                    }
                    Err(error) => {
                        if unserved.tells(&error.to_string(), Instant::now()) {
                            warn!(resource = %self.resource, socket = %path.display(), %error, "cannot serve, trying again");
                        }
                        tokio::select! {
                            () = shutdown.cancelled() => break,
                            () = tokio::time::sleep(Duration::from_millis(200)) => continue,
                        }
                    }
                }
                let Some(kubelet) = &self.kubelet.socket else {
                    info!(resource = %self.resource, socket = %path.display(), "serving, unregistered as told");
                    self.kubelet.observed.registered(&self.resource);
                    continue;
                };
                tokio::select! {
                    () = shutdown.cancelled() => break,
                    () = self.register(kubelet, &path, view, views.clone()) => {
                        registered_with = view.kubelet;
                        attention.registered(open(&servers), Instant::now());
                    }
                    // Kubelet was replaced or our socket wiped while it was being told: the answer no longer matters.
                    () = superseded(&path, servers.last().and_then(|server| server.inode), view, views.clone()) => {}
                }
                continue;
            }
            let now = Instant::now();
            if !lost
                && let Some(kubelet) = &self.kubelet.socket
                && attention.due().is_some_and(|due| due <= now)
            {
                self.kubelet.observed.unread(&self.resource);
                if unread.tells("unread", now) {
                    warn!(resource = %self.resource, "kubelet does not read the device list of this resource, which makes its devices count as gone; registering again");
                }
                attention.again(now);
                // Without its socket kubelet is about to come or to go; a new one is told above.
                if view.present {
                    tokio::select! {
                        () = shutdown.cancelled() => break,
                        () = self.register(kubelet, &path, view, views.clone()) => attention.registered(open(&servers), Instant::now()),
                        () = superseded(&path, servers.last().and_then(|server| server.inode), view, views.clone()) => {}
                    }
                }
                continue;
            }
            // While another's socket is there, kubelet reads that one.
            let due = take_back.or(attention.due()).map(tokio::time::Instant::from_std);
            tokio::select! {
                () = shutdown.cancelled() => break,
                changed = views.changed() => if changed.is_err() { break },
                () = maybe(servers.last_mut().map(Serving::streams_change)) => {}
                () = maybe(due.map(tokio::time::sleep_until)) => {}
            }
        }
        self.stop(&path, servers).await;
    }

    fn socket_name(&self) -> String {
        socket_name(&self.resource)
    }

    /// Binds a fresh socket at `path` and serves on it.
    fn serve(&self, path: &Path) -> io::Result<Serving> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        let inode = inode(path);
        let stop = CancellationToken::new();
        let service = self
            .kubelet
            .service(self.resource.clone(), self.lists.clone(), stop.clone());
        let streams = service.streams.subscribe();
        let retire = stop.child_token();
        let server = server::serve(
            listener,
            DevicePluginServer::new(service),
            retire.clone(),
            stop.clone(),
        );
        let deadline = stop.clone();
        let task = tokio::spawn(async move {
            let drained = async {
                deadline.cancelled().await;
                tokio::time::sleep(DRAIN).await;
            };
            tokio::select! {
                () = server => {}
                () = drained => debug!("a client kept its connection beyond the deadline"),
            }
        });
        Ok(Serving {
            stop,
            retire,
            task,
            inode,
            streams,
        })
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
                    let pause = BACK_OFF
                        .get(attempt)
                        .or(BACK_OFF.last())
                        .copied()
                        .unwrap_or(DRAIN);
                    let mut views = views.clone();
                    tokio::select! {
                        () = tokio::time::sleep(pause) => {}
                        _ = views.wait_for(|seen| seen.kubelet != view.kubelet) => {}
                    }
                }
            }
        }
    }

    /// Ends the streams, waits for the clients a moment, and removes the socket if it is still ours.
    async fn stop(&self, path: &Path, servers: Vec<Serving>) {
        let own = servers.last().and_then(|server| server.inode);
        for server in &servers {
            server.stop.cancel();
        }
        for server in servers {
            if let Err(error) = server.task.await {
                warn!(%error, "device plugin server failed");
            }
        }
        if own.is_some()
            && inode(path) == own
            && let Err(error) = std::fs::remove_file(path)
        {
            debug!(%error, socket = %path.display(), "cannot remove the own socket");
        }
        self.kubelet.observed.unregistered(&self.resource);
        info!(resource = %self.resource, "stopped serving");
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

/// How many streams are open on the newest socket. Kubelet has turned to that one; what it still reads elsewhere will end.
fn open(servers: &[Serving]) -> usize {
    servers.last().map_or(0, |server| *server.streams.borrow())
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

fn inode(path: &Path) -> Option<u64> {
    use std::os::unix::fs::MetadataExt;
    std::fs::symlink_metadata(path)
        .ok()
        .map(|metadata| metadata.ino())
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
