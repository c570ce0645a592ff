//! The kubelet stand-in as a device plugin and a pod see it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use futures::{Stream, StreamExt as _};
use gantry_proto::deviceplugin::device_plugin_server::{DevicePlugin, DevicePluginServer};
use gantry_proto::deviceplugin::registration_client::RegistrationClient;
use gantry_proto::deviceplugin::*;
use gantry_proto::podresources::ListPodResourcesRequest;
use gantry_proto::podresources::pod_resources_lister_client::PodResourcesListerClient;
use gantry_sim_cluster::kubelet::{Folders, Kubelet, KubeletError};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, WatchEvent, WatchParams};
use kube::runtime::wait::await_condition;
use serde_json::json;
use support::{Cluster, gpu_pod, phase};
use tempfile::TempDir;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio_stream::wrappers::{UnixListenerStream, WatchStream};
use tonic::transport::{Endpoint, Server};
use tonic::{Request, Response, Status};

const GPU: &str = "nvidia.com/gpu";

/// A plugin whose preferences the test sets.
#[derive(Clone)]
struct Plugin {
    devices: watch::Sender<Vec<Device>>,
    prefer: Arc<Mutex<Vec<String>>>,
    asked: Arc<Mutex<Vec<ContainerPreferredAllocationRequest>>>,
    fail_allocate: bool,
}

#[tonic::async_trait]
impl DevicePlugin for Plugin {
    type ListAndWatchStream = Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(options()))
    }

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let lists = WatchStream::new(self.devices.subscribe());
        Ok(Response::new(Box::pin(lists.map(|devices| Ok(ListAndWatchResponse { devices })))))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        self.asked.lock().unwrap().extend(request.into_inner().container_requests);
        let device_ids = self.prefer.lock().unwrap().clone();
        Ok(Response::new(PreferredAllocationResponse {
            container_responses: vec![ContainerPreferredAllocationResponse { device_ids }],
        }))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        if self.fail_allocate {
            return Err(Status::unavailable("no"));
        }
        let asked = request.into_inner().container_requests;
        let answer = |request: &ContainerAllocateRequest| {
            let mut ids = request.device_ids.clone();
            ids.sort();
            ContainerAllocateResponse {
                envs: [("NVIDIA_VISIBLE_DEVICES".to_owned(), ids.join(","))].into(),
                ..ContainerAllocateResponse::default()
            }
        };
        Ok(Response::new(AllocateResponse { container_responses: asked.iter().map(answer).collect() }))
    }

    async fn pre_start_container(
        &self,
        _: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        Ok(Response::new(PreStartContainerResponse {}))
    }
}

fn options() -> DevicePluginOptions {
    DevicePluginOptions { get_preferred_allocation_available: true, ..DevicePluginOptions::default() }
}

fn list(healthy: &[(&str, bool)]) -> Vec<Device> {
    healthy
        .iter()
        .map(|(id, healthy)| Device {
            id: (*id).to_owned(),
            health: if *healthy { "Healthy" } else { "Unhealthy" }.to_owned(),
            topology: None,
        })
        .collect()
}

struct Node1 {
    cluster: Cluster,
    kubelet: Kubelet,
    plugin: Plugin,
    _folder: TempDir,
}

impl Node1 {
    async fn start() -> Self {
        Self::with(false).await
    }

    /// One node with four GPUs.
    async fn with(fail_allocate: bool) -> Self {
        let cluster = Cluster::start().await;
        let folder = tempfile::tempdir().unwrap();
        let labels = BTreeMap::new();
        let kubelet =
            Kubelet::start(cluster.client.clone(), "n1", &labels, folder.path(), cluster.stop.clone());
        let kubelet = kubelet.await.unwrap();
        let plugin = Plugin {
            devices: watch::Sender::new(list(&[("a", true), ("b", true), ("c", true), ("d", true)])),
            prefer: Arc::default(),
            asked: Arc::default(),
            fail_allocate,
        };
        let node = Self { cluster, kubelet, plugin, _folder: folder };
        node.serve_and_register().await;
        node.allocatable("4").await;
        node
    }

    async fn serve_and_register(&self) {
        let folder = &self.kubelet.folders().device_plugins;
        let listener = UnixListener::bind(folder.join("p.sock")).unwrap();
        let service = Server::builder().add_service(DevicePluginServer::new(self.plugin.clone()));
        tokio::spawn(service.serve_with_incoming(UnixListenerStream::new(listener)));
        let request = RegisterRequest {
            version: "v1beta1".into(),
            endpoint: "p.sock".into(),
            resource_name: GPU.into(),
            options: Some(options()),
        };
        self.register(request).await.unwrap();
    }

    async fn register(&self, request: RegisterRequest) -> Result<(), Status> {
        let socket = self.kubelet.folders().device_plugins.join("kubelet.sock");
        let dial = Endpoint::try_from(format!("unix://{}", socket.display())).unwrap();
        let channel = dial.connect().await.unwrap();
        RegistrationClient::new(channel).register(request).await.map(drop)
    }

    async fn allocatable(&self, wanted: &'static str) {
        let nodes: Api<Node> = Api::all(self.cluster.client.clone());
        let has = move |node: Option<&Node>| {
            let status = node.and_then(|node| node.status.as_ref());
            let amounts = status.and_then(|status| status.allocatable.as_ref());
            amounts.and_then(|amounts| amounts.get(GPU)).is_some_and(|amount| amount.0 == wanted)
        };
        await_condition(nodes, "n1", has).await.unwrap();
    }

    /// A pod that is bound as it is created.
    async fn bound(&self, mut pod: serde_json::Value) -> Pod {
        pod["spec"]["nodeName"] = "n1".into();
        self.cluster.create(pod).await
    }

    fn env(&self, pod: &Pod) -> String {
        self.kubelet.processes(&pod.uid().unwrap())[0].env["NVIDIA_VISIBLE_DEVICES"].clone()
    }

    async fn listed(&self) -> Vec<(String, Vec<String>)> {
        let socket = self.kubelet.folders().pod_resources_socket.clone();
        let dial = Endpoint::try_from(format!("unix://{}", socket.display())).unwrap();
        let mut client = PodResourcesListerClient::new(dial.connect().await.unwrap());
        let answer = client.list(ListPodResourcesRequest {}).await.unwrap().into_inner();
        let ids = |containers: Vec<gantry_proto::podresources::ContainerResources>| {
            let devices = containers.into_iter().flat_map(|container| container.devices);
            devices.flat_map(|device| device.device_ids).collect()
        };
        let pods = answer.pod_resources.into_iter();
        pods.map(|pod| (pod.name, ids(pod.containers))).collect()
    }

    fn cgroup_of(&self, pod: &Pod) -> std::path::PathBuf {
        let name = format!("kubepods/besteffort/pod{}", pod.uid().unwrap());
        self.kubelet.folders().cgroups.join(name)
    }
}

#[tokio::test]
async fn bound_pod_gets_the_preferred_devices_everywhere() {
    let node = Node1::start().await;
    *node.plugin.prefer.lock().unwrap() = vec!["d".into(), "b".into()];
    let pod = node.bound(gpu_pod("p", 2)).await;
    let running = node.cluster.wait("p", phase("Running")).await;
    assert_eq!(node.env(&pod), "b,d");
    assert_eq!(node.listed().await, [("p".to_owned(), vec!["b".to_owned(), "d".to_owned()])]);
    let status = serde_json::to_value(running.status.unwrap()).unwrap();
    let resources = &status["containerStatuses"][0]["allocatedResourcesStatus"][0];
    assert_eq!(resources["name"], GPU);
    assert_eq!(resources["resources"][1], json!({"resourceID": "d", "health": "Healthy"}));
    let asked = node.plugin.asked.lock().unwrap()[0].clone();
    assert_eq!((asked.available_device_ids.len(), asked.allocation_size), (4, 2));
    assert!(node.cgroup_of(&pod).join("main/cgroup.procs").exists());
}

#[tokio::test]
async fn pod_without_free_devices_fails_with_kubelets_message() {
    let node = Node1::start().await;
    node.bound(gpu_pod("p", 3)).await;
    node.cluster.wait("p", phase("Running")).await;
    node.bound(gpu_pod("q", 2)).await;
    let failed = node.cluster.wait("q", phase("Failed")).await.status.unwrap();
    assert_eq!(failed.reason.as_deref(), Some("UnexpectedAdmissionError"));
    assert_eq!(
        failed.message.as_deref(),
        Some(
            "Pod was rejected: Allocate failed due to requested number of devices unavailable for nvidia.com/gpu. \
             Requested: 2, Available: 1, which is unexpected"
        )
    );
}

#[tokio::test]
async fn allocate_error_fails_pod_and_frees_devices() {
    let node = Node1::with(true).await;
    node.bound(gpu_pod("p", 2)).await;
    let failed = node.cluster.wait("p", phase("Failed")).await.status.unwrap();
    assert_eq!(failed.reason.as_deref(), Some("UnexpectedAdmissionError"));
    assert_eq!(node.listed().await, []);
}

#[tokio::test]
async fn a_finished_pod_frees_its_devices() {
    let node = Node1::start().await;
    let mut pod = gpu_pod("p", 4);
    pod["metadata"]["annotations"] = json!({"sim.gantry.dev/run-for": "1ms"});
    let pod = node.bound(pod).await;
    node.cluster.wait("p", phase("Succeeded")).await;
    assert_eq!(node.listed().await, []);
    assert!(!node.cgroup_of(&pod).exists());
    node.bound(gpu_pod("q", 4)).await;
    node.cluster.wait("q", phase("Running")).await;
}

#[tokio::test]
async fn deleted_pod_is_removed_after_its_processes() {
    let node = Node1::start().await;
    let pod = node.bound(gpu_pod("p", 1)).await;
    node.cluster.wait("p", phase("Running")).await;
    let pods = node.cluster.pods();
    let version = pods.get("p").await.unwrap().resource_version().unwrap();
    let mut events = pods.watch(&WatchParams::default(), &version).await.unwrap().boxed();
    pods.delete("p", &DeleteParams::default()).await.unwrap();
    let last = loop {
        if let Some(WatchEvent::Deleted(pod)) = events.next().await.transpose().unwrap() {
            break pod;
        }
    };
    let phase = last.status.and_then(|status| status.phase);
    assert_eq!(phase.as_deref(), Some("Succeeded"), "it was seen to end before it went");
    assert!(!node.cgroup_of(&pod).exists());
    assert_eq!(node.listed().await, []);
}

#[tokio::test]
async fn force_deleted_pod_loses_devices_before_its_processes() {
    let node = Node1::start().await;
    let mut pod = gpu_pod("p", 4);
    pod["metadata"]["annotations"] = json!({"sim.gantry.dev/outlive": "3600s"});
    let pod = node.bound(pod).await;
    node.cluster.wait("p", phase("Running")).await;
    node.cluster.pods().delete("p", &DeleteParams::default().grace_period(0)).await.unwrap();
    node.bound(gpu_pod("q", 4)).await;
    node.cluster.wait("q", phase("Running")).await;
    assert!(node.cgroup_of(&pod).join("main/cgroup.procs").exists(), "its processes are still there");
    node.kubelet.kill(&pod.uid().unwrap());
    while node.cgroup_of(&pod).exists() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn app_reuses_devices_of_its_init_container() {
    let node = Node1::start().await;
    let limits = json!({"limits": {GPU: "2"}});
    let pod = json!({
        "metadata": {"name": "p"},
        "spec": {
            "initContainers": [{"name": "init", "image": "x", "resources": limits}],
            "containers": [{"name": "main", "image": "x", "resources": limits}],
        },
    });
    let pod = node.bound(pod).await;
    node.cluster.wait("p", phase("Running")).await;
    let processes = node.kubelet.processes(&pod.uid().unwrap());
    assert_eq!(processes[0].devices, processes[1].devices);
    assert_eq!(node.plugin.asked.lock().unwrap().len(), 1, "the plugin is not asked again");
}

#[tokio::test]
async fn health_changes_reach_the_node() {
    let node = Node1::start().await;
    node.plugin.devices.send_replace(list(&[("a", true), ("b", false), ("c", true), ("d", true)]));
    node.allocatable("3").await;
}

#[tokio::test]
async fn registration_with_wrong_version_or_socket_is_refused() {
    let node = Node1::start().await;
    let wrong = RegisterRequest {
        version: "v1alpha".into(),
        endpoint: "p.sock".into(),
        resource_name: GPU.into(),
        options: None,
    };
    assert!(node.register(wrong.clone()).await.unwrap_err().message().contains("v1beta1"));
    let nobody_listens =
        RegisterRequest { version: "v1beta1".into(), endpoint: "absent.sock".into(), ..wrong };
    assert!(node.register(nobody_listens).await.unwrap_err().message().contains("failed to dial"));
}

#[tokio::test]
async fn too_long_socket_path_is_refused_at_the_start() {
    let cluster = Cluster::start().await;
    let root = std::path::Path::new("/tmp").join("x".repeat(100));
    let started =
        Kubelet::start(cluster.client.clone(), "n1", &BTreeMap::new(), &root, cluster.stop.clone()).await;
    assert!(matches!(started, Err(KubeletError::PathTooLong { length: 108.., .. })));
    assert!(!Folders::under(&root).device_plugins.exists());
}
