//! An API server with GpuNodes.

use std::path::PathBuf;

use gantry_api::GpuNode;
use gantry_sim_cluster::api::{ApiOptions, ApiServer};
use kube::Client;
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

/// The API server. It ends with this.
pub struct Cluster {
    pub client: Client,
    folder: tempfile::TempDir,
    stop: CancellationToken,
}

impl Cluster {
    /// With the nodes `a` and `b` of four GPUs without links. `holders` has those of a node's devices, by the node's name.
    pub async fn start(holders: impl Fn(&str) -> Value) -> Self {
        let cluster = Self::empty().await;
        for name in ["a", "b"] {
            cluster.add_gpu_node(name, "l4-4x-pcie.yaml", holders(name)).await;
        }
        cluster
    }

    /// Without nodes.
    pub async fn empty() -> Self {
        let stop = CancellationToken::new();
        let server = ApiServer::start(&ApiOptions::default(), stop.clone()).await.unwrap();
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("kubeconfig"), server.kubeconfig()).unwrap();
        Self { client: server.client().unwrap(), folder, stop }
    }

    /// The kubeconfig file.
    pub fn kubeconfig(&self) -> PathBuf {
        self.folder.path().join("kubeconfig")
    }

    /// Ends the API server.
    pub fn stop(&self) {
        self.stop.cancel();
    }

    /// Adds a GpuNode of a machine file. Its devices are named after the hexadecimal digits of its name and the GPU:
    /// `GPU-a-0`.
    pub async fn add_gpu_node(&self, name: &str, machine: &str, holders: Value) {
        let digits: String = name.chars().filter(char::is_ascii_hexdigit).collect();
        let machine = std::fs::read_to_string(super::machine(machine)).unwrap();
        let mut machine: Value = serde_saphyr::from_str(&machine).unwrap();
        for (index, gpu) in machine["gpus"].as_array_mut().unwrap().iter_mut().enumerate() {
            gpu["uuid"] = format!("GPU-{digits}-{index}").into();
        }
        let gpus = machine["gpus"].as_array().unwrap().len();
        let object = json!({
            "apiVersion": "gantry.dev/v1alpha1",
            "kind": "GpuNode",
            "metadata": {"name": name},
            "spec": {"machine": machine},
        });
        let gpu_nodes: Api<GpuNode> = Api::all(self.client.clone());
        let made: GpuNode = serde_json::from_value(object).unwrap();
        gpu_nodes.create(&PostParams::default(), &made).await.unwrap();
        let device = |index: usize| {
            let id = format!("GPU-{digits}-{index}");
            json!({"id": id, "resource": "nvidia.com/gpu", "gpu": index, "healthy": true})
        };
        let devices: Vec<Value> = (0..gpus).map(device).collect();
        let status = json!({"status": {"devices": devices, "holders": holders}});
        gpu_nodes.patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.stop();
    }
}
