//! Kubelet as a device plugin sees it: a registration socket in a directory that is wiped first, and a client that
//! dials back and opens the stream of device lists. It keeps no account of devices; that is for the tests.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use gantry_proto::deviceplugin::device_plugin_client::DevicePluginClient;
use gantry_proto::deviceplugin::registration_server::{Registration, RegistrationServer};
use gantry_proto::deviceplugin::{
    AllocateRequest, ContainerAllocateRequest, ContainerAllocateResponse,
    ContainerPreferredAllocationRequest, DevicePluginOptions, Empty, ListAndWatchResponse,
    PreferredAllocationRequest, RegisterRequest,
};
use gantry_proto::{AnyAuthority, HEALTHY, KUBELET_SOCKET};
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status, Streaming};

/// Everything awaited here takes milliseconds; this is for a machine under load.
const LIMIT: Duration = Duration::from_secs(30);

/// A kubelet's registration server. It ends when dropped, and leaves its socket, like a kubelet that was killed.
pub struct Kubelet {
    registrations: mpsc::UnboundedReceiver<Registered>,
    server: JoinHandle<()>,
    /// What reads the lists of those that registered.
    readers: Readers,
    directory: PathBuf,
}

type Readers = Arc<Mutex<JoinSet<()>>>;

/// The reader of the device lists of a registered plugin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lists {
    /// kubelet, at once, in addition to other readers.
    Read,
    /// The caller alone.
    Left,
}

/// A registration that was accepted.
#[derive(Debug, Clone)]
pub struct Registered {
    /// When it came in.
    pub at: Instant,
    /// The plugin's response.
    pub request: RegisterRequest,
}

/// One resource of a registered plugin.
#[derive(Debug, Clone)]
pub struct Served {
    /// The resource's name.
    pub resource: String,
    /// Where the plugin serves it.
    pub socket: PathBuf,
    client: DevicePluginClient<Channel>,
}

/// A device list, by ID: whether it is healthy, and its NUMA nodes.
pub type List = BTreeMap<String, (bool, Vec<i64>)>;

struct Registrar {
    directory: PathBuf,
    registrations: mpsc::UnboundedSender<Registered>,
    lists: Lists,
    readers: Readers,
}

#[tonic::async_trait]
impl Registration for Registrar {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let at = Instant::now();
        let request = request.into_inner();
        // The real one dials back before it answers.
        let client = dial(&self.directory.join(&request.endpoint))
            .await
            .map_err(|error| Status::unavailable(error.to_string()))?;
        if self.lists == Lists::Read {
            let mut readers = self.readers.lock().unwrap_or_else(PoisonError::into_inner);
            readers.spawn(read(client));
        }
        // The receiver is closed when the test is over.
        let _ = self.registrations.send(Registered { at, request });
        Ok(Response::new(Empty {}))
    }
}

/// Reads device lists to their end.
async fn read(mut client: DevicePluginClient<Channel>) {
    if let Ok(stream) = client.list_and_watch(Empty {}).await {
        let mut stream = stream.into_inner();
        while let Ok(Some(_)) = stream.message().await {}
    }
}

async fn dial(socket: &Path) -> Result<DevicePluginClient<Channel>, tonic::transport::Error> {
    let endpoint = Endpoint::try_from(format!("unix://{}", socket.display()))?;
    Ok(DevicePluginClient::new(endpoint.connect().await?))
}

/// Awaits what must come, with a limit.
async fn soon<T>(what: &str, future: impl Future<Output = T>) -> Result<T> {
    tokio::time::timeout(LIMIT, future).await.with_context(|| format!("waited {LIMIT:?} for {what}"))
}

impl Kubelet {
    /// Starts like the real one: everything in the directory is removed, then the socket is made.
    ///
    /// # Errors
    /// The directory cannot be used.
    pub fn start(directory: &Path) -> Result<Self> {
        Self::start_with(directory, Lists::Read)
    }

    /// As [`Kubelet::start`], but the caller reads the device lists: with two streams, NVIDIA's plugin sends each
    /// change to one of them.
    ///
    /// # Errors
    /// The directory cannot be used.
    pub fn start_unread(directory: &Path) -> Result<Self> {
        Self::start_with(directory, Lists::Left)
    }

    fn start_with(directory: &Path, lists: Lists) -> Result<Self> {
        for entry in std::fs::read_dir(directory)? {
            std::fs::remove_file(entry?.path())?;
        }
        let listener = UnixListener::bind(directory.join(KUBELET_SOCKET))?;
        let (sender, registrations) = mpsc::unbounded_channel();
        let readers = Readers::default();
        let registrar = Registrar {
            directory: directory.to_owned(),
            registrations: sender,
            lists,
            readers: Arc::clone(&readers),
        };
        let incoming = futures::stream::unfold(listener, async |listener| {
            // NVIDIA's program sends the path of the socket as authority.
            let accepted = listener.accept().await.map(|(stream, _)| AnyAuthority::new(stream));
            Some((accepted, listener))
        });
        let server =
            Server::builder().add_service(RegistrationServer::new(registrar)).serve_with_incoming(incoming);
        Ok(Self {
            registrations,
            // Its end is the test's end; a broken server shows as a registration that does not come.
            server: tokio::spawn(async move { drop(server.await) }),
            readers,
            directory: directory.to_owned(),
        })
    }

    /// The next registration.
    ///
    /// # Errors
    /// None comes.
    pub async fn registration(&mut self) -> Result<Registered> {
        soon("a registration", self.registrations.recv()).await?.context("the registration server ended")
    }

    /// The next registration's resource, ready to be asked.
    ///
    /// # Errors
    /// None comes, or it cannot be dialled.
    pub async fn served(&mut self) -> Result<Served> {
        let registered = self.registration().await?;
        self.dial(&registered.request).await
    }

    /// Connects to a registered resource.
    ///
    /// # Errors
    /// Its socket accepts no connection.
    pub async fn dial(&self, request: &RegisterRequest) -> Result<Served> {
        let socket = self.directory.join(&request.endpoint);
        let client = dial(&socket).await.with_context(|| format!("dialling {}", socket.display()))?;
        Ok(Served { resource: request.resource_name.clone(), socket, client })
    }

    /// Ends the streams of device lists that it reads, as after an error of the connection; both sockets stay as they
    /// are.
    pub fn hang_up(&self) {
        let mut readers = self.readers.lock().unwrap_or_else(PoisonError::into_inner);
        readers.abort_all();
    }

    /// Discards the registrations that were not taken.
    pub fn forget(&mut self) {
        while self.registrations.try_recv().is_ok() {}
    }

    /// Whether there is a registration that was not taken.
    pub fn is_called(&self) -> bool {
        !self.registrations.is_empty()
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        self.server.abort();
        self.hang_up();
    }
}

impl Served {
    /// The options that the plugin returns.
    ///
    /// # Errors
    /// The plugin's.
    pub async fn options(&self) -> Result<DevicePluginOptions> {
        let mut client = self.client.clone();
        let answer = soon("options", client.get_device_plugin_options(Empty {})).await?;
        Ok(answer?.into_inner())
    }

    /// Opens the stream of device lists.
    ///
    /// # Errors
    /// The plugin's.
    pub async fn watch(&self) -> Result<Streaming<ListAndWatchResponse>> {
        let mut client = self.client.clone();
        let answer = soon("the stream of lists", client.list_and_watch(Empty {})).await?;
        Ok(answer?.into_inner())
    }

    /// Reads a stream until a list satisfies the condition.
    ///
    /// # Errors
    /// No such list arrives; the error contains the last one.
    pub async fn list_until(
        stream: &mut Streaming<ListAndWatchResponse>,
        wanted: impl Fn(&List) -> bool,
    ) -> Result<List> {
        let mut last = List::new();
        let read = async {
            while let Some(message) = stream.message().await? {
                last = list(message);
                if wanted(&last) {
                    return anyhow::Ok(last.clone());
                }
            }
            bail!("the stream ended")
        };
        let outcome = tokio::time::timeout(LIMIT, read).await;
        match outcome {
            Ok(outcome) => outcome,
            Err(_) => bail!("waited {LIMIT:?} for a list; the last one was {last:?}"),
        }
    }

    /// The next list of a stream, whenever it comes; `None` once the stream is over.
    pub async fn next_list(stream: &mut Streaming<ListAndWatchResponse>) -> Option<List> {
        stream.message().await.ok().flatten().map(list)
    }

    /// The first list of a fresh stream.
    ///
    /// # Errors
    /// The plugin's.
    pub async fn list(&self) -> Result<List> {
        Self::list_until(&mut self.watch().await?, |_| true).await
    }

    /// Asks for devices.
    ///
    /// # Errors
    /// The plugin's status, as it is.
    pub async fn allocate(&self, ids: &[String]) -> Result<ContainerAllocateResponse, Status> {
        let request = AllocateRequest {
            container_requests: vec![ContainerAllocateRequest { device_ids: ids.to_vec() }],
        };
        let answer = self.client.clone().allocate(request).await?.into_inner();
        let mut containers = answer.container_responses;
        match (containers.pop(), containers.is_empty()) {
            (Some(one), true) => Ok(one),
            _ => Err(Status::internal("not one answer for one container")),
        }
    }

    /// Asks which devices are preferred.
    ///
    /// # Errors
    /// The plugin's status, as it is.
    pub async fn prefer(
        &self,
        offered: &[String],
        must: &[String],
        size: usize,
    ) -> Result<Vec<String>, Status> {
        let request = PreferredAllocationRequest {
            container_requests: vec![ContainerPreferredAllocationRequest {
                available_device_ids: offered.to_vec(),
                must_include_device_ids: must.to_vec(),
                allocation_size: i32::try_from(size).unwrap_or(i32::MAX),
            }],
        };
        let answer = self.client.clone().get_preferred_allocation(request).await?;
        let mut containers = answer.into_inner().container_responses;
        Ok(containers.pop().map(|one| one.device_ids).unwrap_or_default())
    }
}

/// A list as a value that can be compared.
fn list(message: ListAndWatchResponse) -> List {
    let entry = |device: gantry_proto::deviceplugin::Device| {
        let mut numa: Vec<i64> =
            device.topology.into_iter().flat_map(|topology| topology.nodes).map(|node| node.id).collect();
        numa.sort_unstable();
        (device.id, (device.health == HEALTHY, numa))
    };
    message.devices.into_iter().map(entry).collect()
}
