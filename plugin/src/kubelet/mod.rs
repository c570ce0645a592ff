//! Everything that is said with kubelet over its unix sockets: registration, the device plugin service, and the question who
//! holds what. Thin translation to and from the hand-over and the inventory; nothing is decided here, and no call asks NVML.

mod attention;
mod directory;
mod endpoint;
mod podresources;
mod register;
mod rivalry;
mod server;
mod service;
mod serving;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use gantry_api::ResourceName;
use gantry_runtime::supervise::{TaskFailure, Tasks};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::allocate::Responder;
use crate::handover::SharedHandover;
use crate::inventory::{Inventory, State};
use crate::observe::Observed;

pub use directory::Directory;
pub use podresources::poll as poll_pod_resources;
pub use service::{DeviceList, DevicePluginService};

/// What the kubelet side is built from.
#[derive(Debug, Clone)]
pub struct Kubelet {
    /// Kubelet's device plugin directory, where it looks for our sockets.
    pub directory: PathBuf,
    /// Kubelet's registration socket; `None` to serve whoever calls, and register nothing.
    pub socket: Option<PathBuf>,
    /// The devices.
    pub inventory: watch::Receiver<Arc<Inventory>>,
    /// Who gets which.
    pub handover: Arc<SharedHandover>,
    /// What a container needs to use them.
    pub responder: Arc<Responder>,
    /// Counters and readiness.
    pub observed: Arc<Observed>,
}

impl Kubelet {
    /// What kubelet calls for one resource, on no socket yet. `lists` is what it is told of, until `stop`.
    pub fn service(
        &self,
        resource: ResourceName,
        lists: watch::Receiver<DeviceList>,
        stop: CancellationToken,
    ) -> DevicePluginService {
        DevicePluginService {
            resource,
            lists,
            inventory: self.inventory.clone(),
            handover: Arc::clone(&self.handover),
            responder: Arc::clone(&self.responder),
            stop,
            streams: watch::Sender::new(0),
        }
    }

    /// Serves and registers every resource that the inventory has, until `shutdown`; then ends the streams and removes the
    /// sockets. A resource is registered from the first inventory that has it; should its devices go, it stays with an empty
    /// list, for kubelet keeps a resource whose plugin leaves.
    ///
    /// # Errors
    /// What serves one of them, or watches kubelet, has panicked: all ends then, in the same order.
    pub async fn run(mut self, shutdown: CancellationToken) -> Result<(), TaskFailure> {
        let mut tasks = Tasks::new(shutdown.clone());
        let (directory, events) = Directory::new(
            self.directory.clone(),
            self.socket.clone(),
            Arc::clone(&self.handover),
        );
        tasks.spawn(directory.watch(shutdown.clone()));
        let mut resources: BTreeMap<ResourceName, watch::Sender<service::DeviceList>> = BTreeMap::new();
        let mut freed = self.handover.freed();
        loop {
            let inventory = Arc::clone(&self.inventory.borrow_and_update());
            for (resource, list) in service::lists(&inventory, resources.keys()) {
                let Some(sender) = resources.get(&resource) else {
                    info!(%resource, devices = list.len(), "serving resource");
                    let (sender, lists) = watch::channel(list);
                    let endpoint = endpoint::Endpoint {
                        resource: resource.clone(),
                        directory: self.directory.clone(),
                        lists,
                        kubelet: self.clone(),
                    };
                    tasks.spawn(endpoint.run(events.clone(), shutdown.clone()));
                    resources.insert(resource, sender);
                    continue;
                };
                sender.send_if_modified(|current| {
                    let changed = *current != list;
                    *current = list;
                    changed
                });
            }
            if let State::Absent(reason) = &inventory.state {
                tracing::warn!(%reason, "no GPU to serve; still looking");
            }
            tokio::select! {
                () = shutdown.cancelled() => break,
                () = tasks.join_failed() => break,
                changed = self.inventory.changed() => if changed.is_err() {
                    shutdown.cancelled().await;
                    break;
                },
                // Kubelet writes down who holds what when it is sent a list, and not when a pod ends. Started again, it would refuse pods
                // that wait for devices which by its notes are held.
                Ok(()) = freed.changed() => resources.values().for_each(|list| list.send_modify(|_| {})),
            }
        }
        tasks.join_all().await
    }
}
