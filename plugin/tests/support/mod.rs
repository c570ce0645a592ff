//! A kubelet for tests, as strict as the real one: it empties its directory before it listens, connects back before it
//! answers a registration, and then opens the stream of device lists.

#![allow(dead_code, unreachable_pub, missing_docs)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

pub mod door;
pub mod log;
pub mod probes;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use gantry_api::{DeviceHealth, DeviceId, GpuNode, GpuNodeStatus};
use gantry_config::{ApiRate, ConfigArgs, Overrides};
use gantry_plugin::Args;
use gantry_plugin::health::{FabricCheck, XidList};
use gantry_plugin::inventory::{Device, Inventory};
use gantry_plugin::labels::LabelsArgs;
use gantry_proto::deviceplugin::device_plugin_client::DevicePluginClient;
use gantry_proto::deviceplugin::registration_server::{Registration, RegistrationServer};
use gantry_proto::deviceplugin::{
    AllocateRequest, ContainerAllocateRequest, ContainerAllocateResponse,
    ContainerPreferredAllocationRequest, Empty, ListAndWatchResponse, PreferredAllocationRequest,
    RegisterRequest,
};
use gantry_proto::podresources::pod_resources_lister_server::{PodResourcesLister, PodResourcesListerServer};
use gantry_proto::podresources::{
    AllocatableResourcesRequest, AllocatableResourcesResponse, ContainerDevices, ContainerResources,
    GetPodResourcesRequest, GetPodResourcesResponse, ListPodResourcesRequest, ListPodResourcesResponse,
    PodResources,
};
use gantry_topology::{Gpu, Machine, MachineParts, NvLinkBundle, PathClass, PathMatrix};
use tokio::net::UnixListener;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status, Streaming};

/// Far above all waits, for a machine under load.
pub const SOON: Duration = Duration::from_secs(20);

/// Awaits with a time limit.
pub async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(SOON, future).await {
        Ok(value) => value,
        Err(_) => panic!("waited {SOON:?} for {what}"),
    }
}

/// Awaits a status of the node's GpuNode for which `holds` is true.
pub async fn gpu_node_status(
    client: &kube::Client,
    node: &str,
    what: &str,
    holds: impl Fn(&GpuNodeStatus) -> bool,
) -> GpuNodeStatus {
    let api = kube::Api::<GpuNode>::all(client.clone());
    let wait = async {
        loop {
            let node = api.get_opt(node).await.unwrap();
            if let Some(status) = node.and_then(|node| node.status).filter(|status| holds(status)) {
                return status;
            }
            probes::a_moment().await;
        }
    };
    soon(what, wait).await
}

pub struct FakeKubelet {
    directory: PathBuf,
    registrations: mpsc::UnboundedReceiver<RegisterRequest>,
    refusal: Arc<Mutex<Option<String>>>,
    watching: Arc<Mutex<Watching>>,
    stop: CancellationToken,
}

struct Registrar {
    directory: PathBuf,
    registrations: mpsc::UnboundedSender<RegisterRequest>,
    refusal: Arc<Mutex<Option<String>>>,
    watching: Arc<Mutex<Watching>>,
    stop: CancellationToken,
}

/// The streams of device lists that a kubelet reads.
#[derive(Default)]
struct Watching {
    /// Whether it opens none.
    unwilling: bool,
    /// Ends them, by resource.
    streams: Vec<(String, CancellationToken)>,
}

#[tonic::async_trait]
impl Registration for Registrar {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let request = request.into_inner();
        let client = dial(&self.directory.join(&request.endpoint))
            .await
            .map_err(|error| Status::unavailable(error.to_string()))?;
        let resource = request.resource_name.clone();
        let _ = self.registrations.send(request);
        match self.refusal.lock().unwrap().as_ref() {
            Some(reason) => Err(Status::unknown(reason)),
            None => {
                self.watch(resource, client);
                Ok(Response::new(Empty {}))
            }
        }
    }
}

impl Registrar {
    /// Reads the lists of a resource until stopped.
    fn watch(&self, resource: String, mut client: DevicePluginClient<Channel>) {
        let mut watching = self.watching.lock().unwrap();
        if watching.unwilling {
            return;
        }
        let end = self.stop.child_token();
        watching.streams.push((resource, end.clone()));
        tokio::spawn(async move {
            let read = async {
                let Ok(stream) = client.list_and_watch(Empty {}).await else {
                    return;
                };
                let mut stream = stream.into_inner();
                while let Ok(Some(_)) = stream.message().await {}
            };
            end.run_until_cancelled(read).await;
        });
    }
}

async fn dial(socket: &Path) -> Result<DevicePluginClient<Channel>, tonic::transport::Error> {
    let channel = Endpoint::try_from(format!("unix://{}", socket.display()))?.connect().await?;
    Ok(DevicePluginClient::new(channel))
}

impl FakeKubelet {
    /// Starts like the real one: removes everything in the directory, then creates the socket.
    pub fn start(directory: &Path) -> Self {
        for entry in std::fs::read_dir(directory).unwrap() {
            std::fs::remove_file(entry.unwrap().path()).unwrap();
        }
        let listener = UnixListener::bind(directory.join("kubelet.sock")).unwrap();
        let (sender, registrations) = mpsc::unbounded_channel();
        let refusal = Arc::default();
        let watching: Arc<Mutex<Watching>> = Arc::default();
        let stop = CancellationToken::new();
        let registrar = Registrar {
            directory: directory.to_owned(),
            registrations: sender,
            refusal: Arc::clone(&refusal),
            watching: Arc::clone(&watching),
            stop: stop.clone(),
        };
        let server = Server::builder()
            .add_service(RegistrationServer::new(registrar))
            .serve_with_incoming(UnixListenerStream::new(listener));
        let stopped = stop.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = stopped.cancelled() => {}
                served = server => served.unwrap(),
            }
        });
        Self { directory: directory.to_owned(), registrations, refusal, watching, stop }
    }

    /// Ends like a killed kubelet: connections break, the socket file stays.
    pub fn kill(self) {
        self.stop.cancel();
    }

    pub async fn registration(&mut self) -> RegisterRequest {
        soon("a registration", self.registrations.recv()).await.unwrap()
    }

    /// Refuses or accepts registrations; they are recorded in both cases.
    pub fn refuses(&self, reason: Option<&str>) {
        *self.refusal.lock().unwrap() = reason.map(str::to_owned);
    }

    /// Opens no streams for later registrations, or opens them again.
    pub fn watches(&self, watches: bool) {
        self.watching.lock().unwrap().unwilling = !watches;
    }

    /// Ends its streams of a resource's lists. Both sockets stay in place.
    pub fn hangs_up(&self, resource: &str) {
        let mut watching = self.watching.lock().unwrap();
        watching.streams.retain(|(of, end)| {
            if of == resource {
                end.cancel();
            }
            of != resource
        });
    }

    /// Whether no recorded registration is left.
    pub fn registered_nothing(&mut self) -> bool {
        self.registrations.try_recv().is_err()
    }

    /// The plugin of the next registration.
    pub async fn plugin(&mut self) -> Plugin {
        let registration = self.registration().await;
        Plugin::dial(&self.directory.join(registration.endpoint)).await
    }
}

impl Drop for FakeKubelet {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Kubelet's PodResources service, with a list that the test sets: pod, container, devices.
#[derive(Clone, Default)]
pub struct Truth(Arc<Mutex<Vec<PodResources>>>, Arc<AtomicUsize>);

impl Truth {
    /// Waits until the list was read this many times in total.
    pub async fn was_read(&self, times: usize) {
        let read = async {
            while self.1.load(Ordering::SeqCst) < times {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        soon("a read of the pod resources", read).await;
    }

    pub fn serve(&self, socket: &Path) {
        let listener = UnixListener::bind(socket).unwrap();
        let server = Server::builder()
            .add_service(PodResourcesListerServer::new(self.clone()))
            .serve_with_incoming(UnixListenerStream::new(listener));
        tokio::spawn(async move { server.await.unwrap() });
    }

    pub fn set(&self, pod: &str, container: &str, devices: impl IntoIterator<Item = String>) {
        let mut list = self.0.lock().unwrap();
        list.retain(|known| known.name != pod);
        list.push(PodResources {
            name: pod.into(),
            namespace: "default".into(),
            containers: vec![ContainerResources {
                name: container.into(),
                // One entry per device, like the real one.
                devices: devices
                    .into_iter()
                    .map(|id| ContainerDevices {
                        resource_name: "nvidia.com/gpu".into(),
                        device_ids: vec![id],
                        topology: None,
                    })
                    .collect(),
                cpu_ids: Vec::new(),
                memory: Vec::new(),
            }],
        });
    }

    pub fn remove(&self, pod: &str) {
        self.0.lock().unwrap().retain(|known| known.name != pod);
    }
}

#[tonic::async_trait]
impl PodResourcesLister for Truth {
    async fn list(
        &self,
        _: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        let pod_resources = self.0.lock().unwrap().clone();
        self.1.fetch_add(1, Ordering::SeqCst);
        Ok(Response::new(ListPodResourcesResponse { pod_resources }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<AllocatableResourcesRequest>,
    ) -> Result<Response<AllocatableResourcesResponse>, Status> {
        Err(Status::unimplemented("not asked for"))
    }

    async fn get(
        &self,
        _: Request<GetPodResourcesRequest>,
    ) -> Result<Response<GetPodResourcesResponse>, Status> {
        Err(Status::unimplemented("not asked for"))
    }
}

/// Kubelet's view of a registered plugin.
pub struct Plugin {
    pub client: DevicePluginClient<Channel>,
}

impl Plugin {
    pub async fn dial(socket: &Path) -> Self {
        Self { client: dial(socket).await.unwrap() }
    }

    pub async fn watch(&mut self) -> Streaming<ListAndWatchResponse> {
        self.client.list_and_watch(Empty {}).await.unwrap().into_inner()
    }

    pub async fn prefer(&mut self, offered: &[&str], must: &[&str], size: i32) -> BTreeSet<String> {
        let request = PreferredAllocationRequest {
            container_requests: vec![ContainerPreferredAllocationRequest {
                available_device_ids: strings(offered),
                must_include_device_ids: strings(must),
                allocation_size: size,
            }],
        };
        let response = self.client.get_preferred_allocation(request).await.unwrap();
        let mut containers = response.into_inner().container_responses;
        assert_eq!(containers.len(), 1);
        containers.remove(0).device_ids.into_iter().collect()
    }

    /// [`Plugin::prefer`] for a plugin that has just started and may not have its choice table: repeated until it
    /// returns `wanted`.
    pub async fn comes_to_prefer(&mut self, offered: &[&str], size: i32, wanted: BTreeSet<String>) {
        let asking = async { while self.prefer(offered, &[], size).await != wanted {} };
        soon(&format!("{wanted:?} to be preferred"), asking).await;
    }

    pub async fn allocate(&mut self, ids: &[&str]) -> Result<ContainerAllocateResponse, Status> {
        let request = AllocateRequest {
            container_requests: vec![ContainerAllocateRequest { device_ids: strings(ids) }],
        };
        let mut containers = self.client.allocate(request).await?.into_inner().container_responses;
        assert_eq!(containers.len(), 1);
        Ok(containers.remove(0))
    }
}

fn strings(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

/// Eight GPUs in NVLink pairs: 0-1, 2-3, 4-5, 6-7.
pub fn pairs(gpus: u8) -> Arc<Machine> {
    let parts = MachineParts {
        gpus: (0..gpus)
            .map(|index| Gpu {
                index,
                uuid: Some(uuid(index).parse().unwrap()),
                minor: Some(index.into()),
                model: Some("NVIDIA A40".into()),
                ..Gpu::default()
            })
            .collect(),
        nvlinks: (0..gpus / 2)
            .map(|pair| NvLinkBundle { gpus: [2 * pair, 2 * pair + 1], links: 4 })
            .collect(),
        paths: PathMatrix::from_fn(gpus.into(), |_, _| PathClass::Sys),
        ..MachineParts::default()
    };
    Arc::new(Machine::new(parts).unwrap())
}

/// An unused address that no other process uses: each process has its own loopback address, each call its own port.
/// Connections come from 127.0.0.1.
pub fn own_address() -> SocketAddr {
    static PORTS: AtomicU16 = AtomicU16::new(20_000);
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    let own = std::net::Ipv4Addr::new(127, 1 + (high & 0x7f), middle, low);
    (own, PORTS.fetch_add(1, Ordering::Relaxed)).into()
}

pub fn uuid(index: u8) -> String {
    format!("GPU-{index:08x}-0000-0000-0000-000000000000")
}

pub fn inventory(gpus: u8) -> Inventory {
    inventory_of(gpus, |_| DeviceHealth { healthy: true, reason: None })
}

pub fn inventory_of(gpus: u8, health: impl Fn(u8) -> DeviceHealth) -> Inventory {
    let devices = (0..gpus)
        .map(|gpu| Device {
            id: DeviceId::from(uuid(gpu)),
            resource: "nvidia.com/gpu".into(),
            gpu,
            nvml_index: Some(gpu),
            uuid: uuid(gpu),
            health: health(gpu),
            minor: Some(gpu.into()),
            numa: Some(u32::from(gpu) / 4),
            slice: None,
            replica: None,
        })
        .collect();
    Inventory::ready(pairs(gpus), devices)
}

/// A plugin in the test process, on the test's runtime.
pub struct Node {
    pub directory: tempfile::TempDir,
    pub inventory: watch::Sender<Arc<Inventory>>,
    pub shutdown: CancellationToken,
    daemon: Option<tokio::task::JoinHandle<anyhow::Result<()>>>,
    args: Args,
}

impl Node {
    /// A node with these GPUs; its kubelet is not started.
    pub fn new(gpus: u8) -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("device-plugins")).unwrap();
        let args = Args {
            node_name: Some("node-1".into()),
            kubeconfig: None,
            pod_kubeconfig: None,
            kubelet_config: None,
            mig_layouts: None,
            no_cluster: true,
            api_rate: ApiRate::default(),
            device_plugin_dir: directory.path().join("device-plugins"),
            pod_resources_socket: directory.path().join("pod-resources.sock"),
            nvml_library: "none".into(),
            proc_root: directory.path().into(),
            sys_root: directory.path().into(),
            dev_root: directory.path().join("dev"),
            cgroup_root: directory.path().join("cgroup"),
            cdi_root: directory.path().join("cdi"),
            nccl_root: directory.path().join("nccl"),
            cdi_kind: "gantry.dev/gpu".parse().unwrap(),
            listen: ([127, 0, 0, 1], 0).into(),
            dcgm_metrics: false,
            dcgm_interval: 1,
            resource_name: None,
            kubelet_socket: None,
            config: ConfigArgs::default(),
            overrides: Overrides::default(),
            labels: LabelsArgs::default(),
            disable_health_checks: XidList::default(),
            enable_health_checks: XidList::default(),
            fabric_check: FabricCheck::default(),
            fabric_mode: None,
        };
        Self {
            inventory: watch::Sender::new(Arc::new(inventory(gpus))),
            directory,
            shutdown: CancellationToken::new(),
            daemon: None,
            args,
        }
    }

    pub fn with(mut self, change: impl FnOnce(&mut Args)) -> Self {
        change(&mut self.args);
        self
    }

    /// The lists it receives.
    pub fn args(&self) -> &Args {
        &self.args
    }

    /// Starts the daemon.
    pub fn boot(&mut self) {
        self.shutdown = CancellationToken::new();
        let serve =
            gantry_plugin::serve(self.args.clone(), self.inventory.subscribe(), self.shutdown.clone());
        self.daemon = Some(tokio::spawn(serve));
    }

    /// Stops the daemon and waits for its end.
    pub async fn stop(&mut self) {
        self.shutdown.cancel();
        if let Some(daemon) = self.daemon.take() {
            soon("the daemon's end", daemon).await.unwrap().unwrap();
        }
    }

    /// An unused address for the probes.
    pub fn listen(&mut self) -> SocketAddr {
        self.args.listen = own_address();
        self.args.listen
    }

    pub fn truth(&self) -> Truth {
        let truth = Truth::default();
        truth.serve(&self.args.pod_resources_socket);
        truth
    }

    pub fn plugins(&self) -> PathBuf {
        self.directory.path().join("device-plugins")
    }

    pub fn kubelet(&self) -> FakeKubelet {
        FakeKubelet::start(&self.plugins())
    }

    pub fn socket(&self) -> PathBuf {
        self.plugins().join("nvidia-gpu.sock")
    }
}
