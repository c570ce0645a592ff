//! The device plugins that have registered: their connections, their device lists, and the two services that they use.
//! Kubelet dials the plugin before it answers Register, then reads its list until the stream ends.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use gantry_proto::deviceplugin::device_plugin_client::DevicePluginClient;
use gantry_proto::deviceplugin::registration_server::Registration;
use gantry_proto::deviceplugin::{self as v1beta1, Empty, RegisterRequest};
use gantry_proto::podresources::pod_resources_lister_server::PodResourcesLister;
use gantry_proto::podresources::{
    AllocatableResourcesRequest, AllocatableResourcesResponse, ContainerDevices, ContainerResources,
    GetPodResourcesRequest, GetPodResourcesResponse, ListPodResourcesRequest, ListPodResourcesResponse,
    PodResources,
};
use gantry_proto::{DEVICE_PLUGIN_VERSION, HEALTHY};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Response, Status};

use super::devices::{Devices, PodDevices, Role};

/// Connections to plugins, and what they advertise.
#[derive(Debug)]
pub(super) struct Plugins {
    folder: PathBuf,
    /// What is advertised and held; shared with admission and pod resources.
    pub(super) devices: Mutex<Devices>,
    endpoints: Mutex<BTreeMap<String, Plugin>>,
    /// Counts changes of any list.
    changed: watch::Sender<u64>,
    stop: CancellationToken,
}

/// One registered plugin.
#[derive(Debug, Clone)]
pub(super) struct Plugin {
    pub(super) client: DevicePluginClient<Channel>,
    pub(super) options: v1beta1::DevicePluginOptions,
    /// Ends the reading of its list when a newer one takes its place.
    replaced: CancellationToken,
}

impl Plugins {
    pub(super) fn new(folder: &Path, stop: CancellationToken) -> Self {
        Self {
            folder: folder.to_owned(),
            devices: Mutex::default(),
            endpoints: Mutex::default(),
            changed: watch::Sender::new(0),
            stop,
        }
    }

    pub(super) fn get(&self, resource: &str) -> Option<Plugin> {
        self.endpoints.lock().unwrap_or_else(PoisonError::into_inner).get(resource).cloned()
    }

    /// Changes whenever a device list does.
    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Works on the devices. The lock is held for no I/O.
    pub(super) fn with_devices<T>(&self, work: impl FnOnce(&mut Devices) -> T) -> T {
        work(&mut self.devices.lock().unwrap_or_else(PoisonError::into_inner))
    }

    async fn register(self: &Arc<Self>, request: RegisterRequest) -> Result<(), Status> {
        let resource = request.resource_name;
        if request.version != DEVICE_PLUGIN_VERSION {
            return Err(Status::unknown(format!(
                "requested API version {:?} is not supported by kubelet. Supported version is {DEVICE_PLUGIN_VERSION:?}",
                request.version
            )));
        }
        if !resource.contains('/') || resource.starts_with("kubernetes.io/") {
            return Err(Status::unknown(format!("the ResourceName {resource:?} is invalid")));
        }
        if request.endpoint.contains('/') {
            return Err(Status::unknown(format!("the endpoint {:?} is no file name", request.endpoint)));
        }
        let socket = self.folder.join(&request.endpoint);
        let dial = Endpoint::try_from(format!("unix://{}", socket.display()))
            .map_err(|error| Status::unknown(format!("endpoint {}: {error}", request.endpoint)))?;
        let channel = dial
            .connect()
            .await
            .map_err(|error| Status::unknown(format!("failed to dial {}: {error}", socket.display())))?;
        let plugin = Plugin {
            client: DevicePluginClient::new(channel),
            options: request.options.unwrap_or_default(),
            replaced: self.stop.child_token(),
        };
        let former = {
            let mut endpoints = self.endpoints.lock().unwrap_or_else(PoisonError::into_inner);
            endpoints.insert(resource.clone(), plugin.clone())
        };
        if let Some(former) = former {
            former.replaced.cancel();
        }
        tracing::debug!(%resource, socket = %socket.display(), "device plugin registered");
        let plugins = Arc::clone(self);
        tokio::spawn(async move {
            let replaced = plugin.replaced.clone();
            tokio::select! {
                () = plugins.listen(&resource, plugin) => {}
                () = replaced.cancelled() => {}
            }
        });
        Ok(())
    }

    /// Follows a plugin's device list to its end.
    async fn listen(&self, resource: &str, mut plugin: Plugin) {
        let result = async {
            let mut stream = plugin.client.list_and_watch(Empty {}).await?.into_inner();
            while let Some(list) = stream.message().await? {
                let devices = list.devices.into_iter().map(|device| (device.id, device.health == HEALTHY));
                let devices = devices.collect();
                self.with_devices(|all| all.advertise(resource, devices));
                self.changed.send_modify(|count| *count += 1);
            }
            Ok::<_, Status>(())
        }
        .await;
        tracing::debug!(resource, ?result, "device list ended");
        self.endpoints.lock().unwrap_or_else(PoisonError::into_inner).remove(resource);
        self.with_devices(|all| all.plugin_lost(resource));
        self.changed.send_modify(|count| *count += 1);
    }
}

/// The Registration service on kubelet.sock.
#[derive(Debug, Clone)]
pub(super) struct RegistrationService(pub(super) Arc<Plugins>);

#[tonic::async_trait]
impl Registration for RegistrationService {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        self.0.register(request.into_inner()).await?;
        Ok(Response::new(Empty {}))
    }
}

/// The service on pod-resources/kubelet.sock: devices by container, as the device manager records them. Ordinary init
/// containers are never listed, as with the real kubelet.
#[derive(Debug, Clone)]
pub(super) struct PodResourcesService(pub(super) Arc<Plugins>);

#[tonic::async_trait]
impl PodResourcesLister for PodResourcesService {
    async fn list(
        &self,
        _: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        let pod_resources = self.0.with_devices(|devices| devices.pods().values().map(listed).collect());
        Ok(Response::new(ListPodResourcesResponse { pod_resources }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<AllocatableResourcesRequest>,
    ) -> Result<Response<AllocatableResourcesResponse>, Status> {
        let devices =
            self.0.with_devices(|devices| devices.all().map(|(resource, id)| one(resource, id)).collect());
        // No CPU manager is simulated.
        Ok(Response::new(AllocatableResourcesResponse { devices, cpu_ids: Vec::new(), memory: Vec::new() }))
    }

    async fn get(
        &self,
        request: Request<GetPodResourcesRequest>,
    ) -> Result<Response<GetPodResourcesResponse>, Status> {
        let wanted = request.into_inner();
        let found = self.0.with_devices(|devices| {
            let mut pods = devices.pods().values();
            pods.find(|pod| pod.name == wanted.pod_name && pod.namespace == wanted.pod_namespace).map(listed)
        });
        match found {
            Some(pod) => Ok(Response::new(GetPodResourcesResponse { pod_resources: Some(pod) })),
            None => Err(Status::unknown(format!(
                "pod {} in namespace {} not found",
                wanted.pod_name, wanted.pod_namespace
            ))),
        }
    }
}

fn listed(pod: &PodDevices) -> PodResources {
    let mut containers: BTreeMap<&str, Vec<ContainerDevices>> = BTreeMap::new();
    for held in pod.containers.iter().filter(|held| held.role != Role::Init) {
        let devices = held.ids.iter().map(|id| one(&held.resource, id));
        containers.entry(&held.container).or_default().extend(devices);
    }
    PodResources {
        name: pod.name.clone(),
        namespace: pod.namespace.clone(),
        containers: containers
            .into_iter()
            .map(|(name, devices)| ContainerResources {
                name: name.to_owned(),
                devices,
                cpu_ids: Vec::new(),
                memory: Vec::new(),
            })
            .collect(),
    }
}

/// One entry per device, as kubelet writes it.
fn one(resource: &str, id: &str) -> ContainerDevices {
    ContainerDevices { resource_name: resource.to_owned(), device_ids: vec![id.to_owned()], topology: None }
}
