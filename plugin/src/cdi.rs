//! The CDI specification: what a runtime adds to a container for each device. Written whole or not at all, kept in step with the
//! inventory, removed at the end. Device nodes only: driver libraries come from the image or from NVIDIA's own specification.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::allocate::{VISIBLE_DEVICES, control_nodes, gpu_node, host_path};
use crate::inventory::{Inventory, State};
use crate::observe::Observed;

/// The oldest version that knows `hostPath`.
const VERSION: &str = "0.5.0";
/// How often control nodes are looked for: the unified memory module may be loaded late.
const LOOK: Duration = Duration::from_secs(5);

/// Where the specification is written and what it is made of.
#[derive(Debug, Clone)]
pub struct Writer {
    /// Directory that runtimes read.
    pub root: PathBuf,
    /// Vendor and class.
    pub kind: String,
    /// Where this process sees `/dev`.
    pub dev_root: PathBuf,
    /// Host directory whose `dev` the nodes come from.
    pub driver_root: PathBuf,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Spec<'a> {
    cdi_version: &'a str,
    kind: &'a str,
    container_edits: Edits,
    devices: Vec<Device>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Device {
    name: String,
    container_edits: Edits,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Edits {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    env: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    device_nodes: Vec<Node>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Node {
    path: String,
    host_path: String,
}

impl Writer {
    /// Passes inventories on, each once its specification is on disk: kubelet must not be offered a device that no runtime can
    /// resolve. After the first one they pass on even if writing fails, for health must not wait.
    pub async fn gate(
        self,
        mut inventories: watch::Receiver<Arc<Inventory>>,
        passed: watch::Sender<Arc<Inventory>>,
        observed: Arc<Observed>,
        shutdown: CancellationToken,
    ) {
        let mut written: Option<String> = None;
        let mut warned = false;
        loop {
            let inventory = Arc::clone(&inventories.borrow_and_update());
            if inventory.state == State::Ready {
                let text = self.text(&inventory);
                let stands = written.as_ref() == Some(&text) && self.path().exists();
                match if stands { Ok(()) } else { self.write(&text) } {
                    Ok(()) => {
                        if !stands {
                            info!(path = %self.path().display(), devices = inventory.devices.len(), "CDI specification written");
                        }
                        written = Some(text);
                        warned = false;
                        observed.cdi(None);
                    }
                    Err(error) => {
                        let problem = format!(
                            "the CDI specification {} cannot be written: {error}",
                            self.path().display()
                        );
                        if !warned {
                            warn!("{problem}");
                            warned = true;
                        }
                        observed.cdi(Some(problem));
                    }
                }
            }
            if written.is_some() || inventory.state != State::Ready {
                passed.send_if_modified(|current| {
                    let changed = *current != inventory;
                    *current = Arc::clone(&inventory);
                    changed
                });
            }
            tokio::select! {
                () = shutdown.cancelled() => break,
                changed = inventories.changed() => if changed.is_err() { break },
                () = tokio::time::sleep(LOOK) => {}
            }
        }
        if written.is_some()
            && let Err(error) = std::fs::remove_file(self.path())
        {
            warn!(path = %self.path().display(), %error, "the CDI specification cannot be removed");
        }
    }

    /// Path of the specification.
    pub fn path(&self) -> PathBuf {
        self.root.join(format!("{}.json", self.kind.replace('/', "-")))
    }

    fn text(&self, inventory: &Inventory) -> String {
        let node = |name: String| Node {
            path: format!("/dev/{name}"),
            host_path: host_path(&self.driver_root, &name).display().to_string(),
        };
        // Replicas of one GPU are one CDI device.
        let devices: BTreeMap<&str, Option<u32>> = inventory
            .devices
            .iter()
            .map(|device| (device.uuid.as_str(), device.minor))
            .collect();
        let spec = Spec {
            cdi_version: VERSION,
            kind: &self.kind,
            container_edits: Edits {
                // Keeps the NVIDIA runtime from adding devices a second time.
                env: vec![format!("{VISIBLE_DEVICES}=void")],
                device_nodes: control_nodes(&self.dev_root)
                    .map(str::to_owned)
                    .map(node)
                    .collect(),
            },
            devices: devices
                .into_iter()
                .map(|(uuid, minor)| Device {
                    name: uuid.to_owned(),
                    container_edits: Edits {
                        env: Vec::new(),
                        device_nodes: minor.map(gpu_node).map(node).into_iter().collect(),
                    },
                })
                .collect(),
        };
        // Strings and lists of strings: nothing in it can fail to be written.
        serde_json::to_string_pretty(&spec).unwrap_or_default()
    }

    /// Writes beside and renames over: a runtime reads the old text or the new one.
    fn write(&self, text: &str) -> io::Result<()> {
        std::fs::create_dir_all(&self.root)?;
        let path = self.path();
        // Runtimes read *.json and *.yaml only.
        let beside = hidden(&path);
        std::fs::write(&beside, text)?;
        std::fs::rename(&beside, &path).inspect_err(|_| {
            let _ = std::fs::remove_file(&beside);
        })
    }
}

fn hidden(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}.new", std::process::id()))
}

#[cfg(test)]
mod tests {
    use gantry_api::DeviceHealth;
    use gantry_topology::{Machine, MachineParts};

    use super::*;

    fn inventory(gpus: u8) -> Inventory {
        let device = |gpu: u8| crate::inventory::Device {
            id: format!("GPU-{gpu}").into(),
            resource: "nvidia.com/gpu".into(),
            gpu,
            uuid: format!("GPU-{gpu}"),
            health: DeviceHealth {
                healthy: true,
                reason: None,
            },
            minor: Some(gpu.into()),
            numa: None,
            slice: None,
            replica: None,
        };
        let machine = Arc::new(Machine::new(MachineParts::default()).unwrap());
        Inventory::ready(machine, (0..gpus).map(device).collect())
    }

    fn writer(root: &Path) -> Writer {
        Writer {
            root: root.join("cdi"),
            kind: "gantry.dev/gpu".into(),
            dev_root: root.join("dev"),
            driver_root: "/run/nvidia/driver".into(),
        }
    }

    #[test]
    fn a_specification_reads_like_this() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("dev")).unwrap();
        std::fs::write(root.path().join("dev/nvidiactl"), "").unwrap();
        insta::assert_snapshot!(writer(root.path()).text(&inventory(1)), @r#"
        {
          "cdiVersion": "0.5.0",
          "kind": "gantry.dev/gpu",
          "containerEdits": {
            "env": [
              "NVIDIA_VISIBLE_DEVICES=void"
            ],
            "deviceNodes": [
              {
                "path": "/dev/nvidiactl",
                "hostPath": "/run/nvidia/driver/dev/nvidiactl"
              }
            ]
          },
          "devices": [
            {
              "name": "GPU-0",
              "containerEdits": {
                "deviceNodes": [
                  {
                    "path": "/dev/nvidia0",
                    "hostPath": "/run/nvidia/driver/dev/nvidia0"
                  }
                ]
              }
            }
          ]
        }
        "#);
    }

    #[tokio::test]
    async fn it_is_written_before_devices_are_passed_on_and_removed_at_the_end() {
        let root = tempfile::tempdir().unwrap();
        let writer = writer(root.path());
        let path = writer.path();
        let (_publish, inventories) = watch::channel(Arc::new(inventory(2)));
        let (passed, mut gated) = Inventory::channel();
        let shutdown = CancellationToken::new();
        let gate = tokio::spawn(writer.gate(inventories, passed, Arc::default(), shutdown.clone()));
        let inventory = gated
            .wait_for(|inventory| inventory.state == State::Ready)
            .await
            .unwrap()
            .clone();
        assert_eq!(inventory.devices.len(), 2);
        assert!(std::fs::read_to_string(&path).unwrap().contains("GPU-1"));
        shutdown.cancel();
        gate.await.unwrap();
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn devices_that_no_runtime_could_resolve_are_held_back() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("cdi"), "a file where the directory should be").unwrap();
        let (_publish, inventories) = watch::channel(Arc::new(inventory(2)));
        let (passed, gated) = Inventory::channel();
        let observed = Arc::new(Observed::default());
        let mut readiness = observed.changes();
        let gate = writer(root.path()).gate(
            inventories,
            passed,
            Arc::clone(&observed),
            CancellationToken::new(),
        );
        let gate = tokio::spawn(gate);
        let missing = readiness
            .wait_for(|readiness| readiness.cdi.is_some())
            .await
            .unwrap()
            .missing();
        assert!(missing[0].contains("cannot be written"), "{missing:?}");
        assert_eq!(gated.borrow().state, State::Starting);
        gate.abort();
    }
}
