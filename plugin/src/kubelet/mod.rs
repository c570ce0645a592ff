//! The unix sockets to kubelet: registration, the device plugin service, and PodResources. A thin translation
//! to the hand-over and the inventory; it decides nothing and makes no NVML call.

mod access;
mod directory;
mod endpoint;
mod podresources;
mod service;
mod serving;
mod stream_monitor;

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
use crate::observe::Observations;

pub(crate) use access::with_remedy;
pub use directory::Directory;
pub use podresources::poll as poll_pod_resources;
pub use service::{DeviceList, DevicePluginService};

/// Inputs of the kubelet side.
#[derive(Debug, Clone)]
pub struct Kubelet {
    /// Kubelet's device plugin directory, which contains the plugins' sockets.
    pub directory: PathBuf,
    /// Kubelet's registration socket; `None` to serve without registration.
    pub socket: Option<PathBuf>,
    pub inventory: watch::Receiver<Arc<Inventory>>,
    /// Selects the devices of each pod.
    pub handover: Arc<SharedHandover>,
    /// What a container needs to use its devices.
    pub responder: Arc<Responder>,
    /// Counters and readiness.
    pub observed: Arc<Observations>,
}

impl Kubelet {
    /// The service of one resource, on no socket yet. It sends `lists` until `stop`.
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

    /// Serves and registers every resource of the inventory until `shutdown`; then ends the streams and removes
    /// the sockets. A resource is registered when an inventory first has it. If its devices disappear, it stays
    /// with an empty list, because kubelet keeps a resource after its plugin left.
    ///
    /// # Errors
    /// When one of the tasks panicked; all tasks end then, in the same order.
    pub async fn run(mut self, shutdown: CancellationToken) -> Result<(), TaskFailure> {
        let mut tasks = Tasks::new(shutdown.clone());
        let (directory, events) =
            Directory::new(self.directory.clone(), self.socket.clone(), &self.handover, &self.observed);
        tasks.spawn(directory.watch(shutdown.clone()));
        let mut resources: BTreeMap<ResourceName, watch::Sender<service::DeviceList>> = BTreeMap::new();
        let mut freed = self.handover.freed();
        loop {
            let inventory = Arc::clone(&self.inventory.borrow_and_update());
            for (resource, list) in service::lists(&inventory, resources.keys()) {
                let Some(sender) = resources.get(&resource) else {
                    info!(%resource, devices = list.len(), "resource found; it is served once kubelet reads its devices");
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
                tracing::warn!(%reason, "no GPU to serve; discovery keeps trying");
            }
            tokio::select! {
                () = shutdown.cancelled() => break,
                () = tasks.join_failed() => break,
                changed = self.inventory.changed() => if changed.is_err() {
                    shutdown.cancelled().await;
                    break;
                },
                // Kubelet writes its checkpoint when it receives a list, not when a pod ends. Without a new
                // list, a restarted kubelet would refuse waiting pods because of devices that its checkpoint
                // still shows as held.
                Ok(()) = freed.changed() => resources.values().for_each(|list| list.send_modify(|_| {})),
            }
        }
        tasks.join_all().await
    }
}
