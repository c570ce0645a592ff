//! Kubelet's calls: any bytes as a request to the real service, without the socket.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, LazyLock};

use gantry_api::DeviceHealth;
use gantry_config::{Config, Strategy};
use gantry_plugin::allocate::{Access, Facts, Nodes, Responder};
use gantry_plugin::cdi::{Entries, Host, Kind, Names, specs};
use gantry_plugin::handover::{Handover, SharedHandover};
use gantry_plugin::inventory::{Device, Inventory, Slice};
use gantry_plugin::kubelet::Kubelet;
use gantry_plugin::nccl::TopologyFiles;
use gantry_plugin::observe::Observations;
use gantry_proto::deviceplugin::device_plugin_server::DevicePluginServer;
use gantry_proto::deviceplugin::{
    AllocateRequest, AllocateResponse, ContainerAllocateResponse, ContainerPreferredAllocationRequest,
    DevicePluginOptions, Empty, PreStartContainerRequest, PreferredAllocationRequest,
    PreferredAllocationResponse,
};
use gantry_topology::choice::Table;
use gantry_topology::{Gpu, Machine, MachineParts, PathClass, PathMatrix};
use http_body_util::{BodyExt, Full};
use prost::Message;
use prost::bytes::Bytes;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::Code;
use tower::Service;

/// The unary calls of kubelet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    Allocate,
    Prefer,
    PreStart,
    Options,
}

impl Call {
    pub const ALL: [Self; 4] = [Self::Allocate, Self::Prefer, Self::PreStart, Self::Options];

    fn path(self) -> &'static str {
        match self {
            Self::Allocate => "/v1beta1.DevicePlugin/Allocate",
            Self::Prefer => "/v1beta1.DevicePlugin/GetPreferredAllocation",
            Self::PreStart => "/v1beta1.DevicePlugin/PreStartContainer",
            Self::Options => "/v1beta1.DevicePlugin/GetDevicePluginOptions",
        }
    }
}

/// The resources of the node: whole GPUs, replicas limited to one per container, MIG devices.
pub const RESOURCES: [&str; 3] = ["nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb"];

/// One call of any bytes: the first byte selects call and resource, and whether the rest is a message or a wire frame.
pub fn bytes(input: &[u8]) {
    let Some((choice, rest)) = input.split_first() else {
        return;
    };
    let call = Call::ALL[usize::from(choice & 3)];
    let resource = RESOURCES[usize::from(choice >> 2 & 3) % RESOURCES.len()];
    if choice & 0x80 == 0 {
        message(resource, call, rest);
    } else {
        // Every call gets a response.
        let _ = Node::new(resource).call(call, rest);
    }
}

/// One call with any bytes as its message.
pub fn message(resource: &str, call: Call, message: &[u8]) {
    let mut wire = vec![0];
    wire.extend(u32::try_from(message.len()).unwrap().to_be_bytes());
    wire.extend(message);
    let mut node = Node::new(resource);
    let answer = node.call(call, &wire);
    let mut served = BTreeSet::new();
    match call {
        Call::Allocate => match AllocateRequest::decode(message) {
            Ok(request) => served = allocated(&node, &request, answer),
            Err(_) => assert!(answer.is_err()),
        },
        Call::Prefer => match PreferredAllocationRequest::decode(message) {
            Ok(request) => preferred(&node, &request, &answer.unwrap()),
            Err(_) => assert!(answer.is_err()),
        },
        Call::PreStart => assert_eq!(answer.is_ok(), PreStartContainerRequest::decode(message).is_ok()),
        Call::Options => {
            let options = answer.map(|answer| DevicePluginOptions::decode(answer).unwrap());
            let reported =
                DevicePluginOptions { pre_start_required: false, get_preferred_allocation_available: true };
            assert_eq!(options.ok(), Empty::decode(message).ok().map(|Empty {}| reported));
        }
    }
    let (holders, _, deviations) = node.handover.status_snapshot();
    assert_eq!(deviations, 0, "nobody was promised anything");
    for holder in holders {
        assert!(holder.uid.is_none() && !holder.devices.is_empty(), "no pod is known: {holder:?}");
        let held = holder.devices.iter().all(|device| served.contains(device.as_str()));
        assert!(held, "{holder:?} of {served:?}");
    }
}

/// Either exactly the requested devices are allocated, or none. Returns them.
fn allocated(node: &Node, request: &AllocateRequest, answer: Result<Bytes, Code>) -> BTreeSet<String> {
    let containers: Option<Vec<Vec<&Device>>> =
        request.container_requests.iter().map(|container| node.asked(&container.device_ids)).collect();
    match (containers, answer) {
        (Some(containers), Ok(answer)) => {
            let answers = AllocateResponse::decode(answer).unwrap().container_responses;
            assert_eq!(answers.len(), containers.len());
            for (devices, answer) in containers.iter().zip(&answers) {
                given(devices, answer);
            }
            let asked = request.container_requests.iter();
            asked.flat_map(|container| container.device_ids.clone()).collect()
        }
        (None, Err(code)) => {
            assert_eq!(code, Code::InvalidArgument);
            BTreeSet::new()
        }
        (asked, answer) => panic!("{asked:?} was answered with {answer:?}"),
    }
}

fn given(devices: &[&Device], answer: &ContainerAllocateResponse) {
    let mut uuids: Vec<&str> = Vec::new();
    for device in devices {
        if !uuids.contains(&device.uuid.as_str()) {
            uuids.push(&device.uuid);
        }
    }
    assert_eq!(answer.envs["NVIDIA_VISIBLE_DEVICES"], uuids.join(","));
    let names: Vec<&str> = answer.cdi_devices.iter().map(|device| device.name.as_str()).collect();
    let qualified: Vec<String> =
        uuids.iter().map(|uuid| format!("k8s.device-plugin.nvidia.com/gpu={uuid}")).collect();
    assert_eq!(names, qualified);
    let mut nodes = BTreeSet::from(["/dev/nvidiactl".to_owned()]);
    for device in devices {
        nodes.extend(device.minor.map(|minor| format!("/dev/nvidia{minor}")));
        let caps = device.slice.iter().flat_map(|slice| slice.caps.into_iter().flatten());
        nodes.extend(caps.map(|cap| format!("/dev/nvidia-caps/nvidia-cap{cap}")));
    }
    let passed: Vec<String> = answer.devices.iter().map(|node| node.container_path.clone()).collect();
    assert_eq!(passed.len(), nodes.len(), "each once: {passed:?}");
    assert_eq!(passed.into_iter().collect::<BTreeSet<_>>(), nodes);
    assert!(answer.mounts.is_empty() && answer.annotations.is_empty());
}

/// The preferred set has the requested size if possible: required devices first, the others from the offer.
fn preferred(node: &Node, request: &PreferredAllocationRequest, answer: &Bytes) {
    let answers = PreferredAllocationResponse::decode(answer.clone()).unwrap().container_responses;
    assert_eq!(answers.len(), request.container_requests.len());
    for (request, answer) in request.container_requests.iter().zip(&answers) {
        let ContainerPreferredAllocationRequest {
            available_device_ids,
            must_include_device_ids,
            allocation_size,
        } = request;
        let size = usize::try_from(*allocation_size).unwrap_or(0);
        let must: BTreeSet<&str> = must_include_device_ids.iter().map(String::as_str).collect();
        let known = available_device_ids.iter().map(String::as_str).filter(|id| node.has(id));
        let can: BTreeSet<&str> = known.chain(must.iter().copied()).collect();
        let chosen: BTreeSet<&str> = answer.device_ids.iter().map(String::as_str).collect();
        assert_eq!(chosen.len(), answer.device_ids.len(), "each once");
        assert_eq!(chosen.len(), size.min(can.len()), "{request:?}: {chosen:?}");
        assert!(chosen.is_subset(&can), "{request:?}: {chosen:?}");
        assert!(must.len() > size || must.is_subset(&chosen), "{request:?}: {chosen:?}");
    }
}

/// A new node, and one of its resources.
struct Node {
    handover: Arc<SharedHandover>,
    server: DevicePluginServer<gantry_plugin::kubelet::DevicePluginService>,
    resource: String,
}

impl Node {
    fn new(resource: &str) -> Self {
        let fixed = &*FIXED;
        let observed = Arc::<Observations>::default();
        let handover =
            Arc::new(SharedHandover::new(Handover::new("node-1".into()), Arc::clone(&observed), None));
        handover.inventory(&fixed.inventory);
        handover.table(Some(Arc::clone(&fixed.table)));
        let kubelet = Kubelet {
            directory: "/nowhere".into(),
            socket: None,
            inventory: watch::channel(Arc::clone(&fixed.inventory)).1,
            handover: Arc::clone(&handover),
            responder: Arc::new(Responder::new(
                watch::channel(Arc::clone(&fixed.access)).1,
                TopologyFiles::at(Path::new("/nonexistent")),
            )),
            observed,
        };
        let lists = watch::channel(Arc::from([])).1;
        let service = kubelet.service(resource.into(), lists, CancellationToken::new());
        Self { handover, server: DevicePluginServer::new(service), resource: resource.to_owned() }
    }

    /// The message of the response, or its status.
    fn call(&mut self, call: Call, wire: &[u8]) -> Result<Bytes, Code> {
        let request = http::Request::post(call.path())
            .header("content-type", "application/grpc")
            .body(Full::new(Bytes::copy_from_slice(wire)))
            .unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let (mut headers, body) = runtime.block_on(async {
            let response = self.server.call(request).await.unwrap();
            let (parts, body) = response.into_parts();
            (parts.headers, body.collect().await.unwrap())
        });
        headers.extend(body.trailers().cloned().unwrap_or_default());
        let status = headers.get("grpc-status").unwrap().as_bytes();
        match Code::from_bytes(status) {
            Code::Ok => Ok(body.to_bytes().slice(5..)),
            code => Err(code),
        }
    }

    fn has(&self, id: &str) -> bool {
        let mut devices = FIXED.inventory.devices.iter();
        devices.any(|device| device.resource.as_str() == self.resource && device.id.as_str() == id)
    }

    /// The devices with these IDs, of this resource or, as in an earlier list, of another; `None` if an ID is unknown
    /// or the limit per container is exceeded.
    fn asked(&self, ids: &[String]) -> Option<Vec<&'static Device>> {
        let (mut devices, mut distinct, mut replicas) = (Vec::new(), BTreeSet::new(), false);
        for id in ids {
            let (unit, replica) = match id.split_once("::") {
                Some((unit, replica)) => (unit, Some(replica)),
                None => (id.as_str(), None),
            };
            if replica.is_some_and(|replica| replica.parse::<u16>().is_err()) {
                return None;
            }
            let device = FIXED.inventory.devices.iter().find(|device| device.uuid == unit)?;
            distinct.insert(id);
            replicas |= replica.is_some();
            devices.push(device);
        }
        let one_at_most = self.resource == RESOURCES[1] && replicas;
        (!one_at_most || distinct.len() < 2).then_some(devices)
    }
}

/// The parts shared by all calls.
struct Fixed {
    inventory: Arc<Inventory>,
    table: Arc<Table>,
    access: Arc<Access>,
}

static FIXED: LazyLock<Fixed> = LazyLock::new(|| {
    let mut devices = vec![device(0, "GPU-a"), device(1, "GPU-b"), device(2, "GPU-c")];
    devices.extend((0..3).map(|replica| Device {
        id: format!("GPU-d::{replica}").into(),
        resource: RESOURCES[1].into(),
        replica: Some(replica),
        ..device(3, "GPU-d")
    }));
    devices.extend((0..4).map(|index| slice(4, index, &format!("MIG-{index}"))));
    let mut inventory = Inventory::ready(machine(), devices);
    if let Some(terms) = inventory.resources.get_mut(RESOURCES[1]) {
        terms.fail_requests_greater_than_one = true;
    }
    let config = Arc::new(Config {
        device_list_strategy: vec![Strategy::Envvar, Strategy::CdiCri],
        pass_device_specs: true,
        ..Config::default()
    });
    let strategy = config.device_id_strategy;
    let mut names = Names::default();
    names.learn(&inventory, strategy);
    let kind = Kind::default();
    let written = specs(&kind, &config, &inventory, &Host::default(), &names);
    let control = Facts { numbers: None, mode: 0o666, gid: 0 };
    let access = Access {
        config,
        nodes: Arc::new([("nvidiactl".to_owned(), control)].into_iter().collect::<Nodes>()),
        entries: Arc::new(Entries::of(&kind, &written, &names, strategy)),
        topology: None,
    };
    Fixed {
        table: Arc::new(Table::build(&inventory.machine)),
        inventory: Arc::new(inventory),
        access: Arc::new(access),
    }
});

/// A GPU.
pub fn device(gpu: u8, uuid: &str) -> Device {
    Device {
        id: uuid.into(),
        resource: RESOURCES[0].into(),
        gpu,
        nvml_index: Some(gpu),
        uuid: uuid.to_owned(),
        health: DeviceHealth { healthy: true, reason: None },
        minor: Some(gpu.into()),
        numa: None,
        slice: None,
        replica: None,
    }
}

/// A MIG device.
pub fn slice(gpu: u8, index: u8, uuid: &str) -> Device {
    let cap = 100 * u32::from(gpu) + 2 * u32::from(index);
    Device {
        resource: RESOURCES[2].into(),
        slice: Some(Arc::new(Slice {
            index,
            gpu_instance: u32::from(index) + 1,
            compute_instance: 0,
            profile: "1g.10gb".into(),
            start: index,
            size: 1,
            caps: Some([cap, cap + 1]),
        })),
        ..device(gpu, uuid)
    }
}

/// Five GPUs.
pub fn machine() -> Arc<Machine> {
    let parts = MachineParts {
        gpus: (0..5).map(|index| Gpu { index, minor: Some(index.into()), ..Gpu::default() }).collect(),
        paths: PathMatrix::from_fn(5, |_, _| PathClass::Sys),
        ..MachineParts::default()
    };
    Arc::new(Machine::new(parts).unwrap())
}
