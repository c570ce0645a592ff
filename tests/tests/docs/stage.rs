//! The cluster of the stories: two nodes of sixteen GPUs, in one of the chart's shapes.

use std::cell::{Cell, RefCell, RefMut};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use gantry_e2e::components::Components;
use gantry_e2e::controllers::CONTROLLERS;
use gantry_e2e::gantry::{self, NAMESPACE};
use gantry_e2e::hardware::Hardware;
use gantry_e2e::helm::Helm;
use gantry_e2e::{BUSYBOX_IMAGE, Cluster, ClusterOptions, NodeOptions, SCHEDULER_IMAGE, until};
use tempfile::TempDir;

use crate::commands::root;
use crate::reader::{LIMIT, Reader};
use crate::stories::Story;

/// What is installed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shape {
    Nothing,
    Alone,
    Own,
    Existing,
    /// Something, as a story has left it.
    Changed,
}

/// The machine of both nodes.
const MACHINE: &str = "dgx2-16x-v100";
/// The GPUs of a node.
pub(crate) const GPUS: usize = 16;
/// What `nvidia-smi topo -m` prints.
const TOPOLOGY: &str = "topology/fixtures/topologies/dgx-h200-8gpu-12nic.txt";
/// The label of the first node.
pub(crate) const CONTROL_PLANE: &str = "node-role.kubernetes.io/control-plane";
/// The file of a home with what commands export.
const EXPORTED: &str = ".exported";
/// The image that the pages name, and the names of others that samples use.
const IMAGE: &str = "registry.example/gantry";
const BUSYBOX_NAMES: [&str; 2] =
    ["docker.io/library/busybox:1.36", "docker.io/nvidia/cuda:12.8.0-base-ubuntu24.04"];

/// The cluster, and the programs that a reader has.
pub(crate) struct Stage {
    cluster: Cluster,
    hardware: RefCell<Vec<Hardware>>,
    shape: Cell<Shape>,
    /// The configuration with which the cluster's kube-scheduler calls the extender.
    scheduler_config: RefCell<Option<String>>,
    /// The folder of programs, and of files of the stage.
    folder: TempDir,
}

impl Stage {
    pub(crate) async fn up() -> Result<Self> {
        let binary = gantry::binary().context("no gantry beside this test: cargo build -p gantry")?;
        let folder = tempfile::tempdir()?;
        let components = Components::locate_or_build()?;
        let bin = folder.path().join("bin");
        fs::create_dir(&bin)?;
        for name in ["charts", "manifests"] {
            symlink(root().join(name), folder.path().join(name))?;
        }
        symlink(&binary, bin.join("gantry"))?;
        symlink(Helm::locate_or_build(4)?.program(), bin.join("helm"))?;
        symlink(components.path("kubectl"), bin.join("kubectl"))?;
        let smi = bin.join("nvidia-smi");
        fs::write(&smi, format!("#!/bin/sh\nexec cat '{}'\n", root().join(TOPOLOGY).display()))?;
        fs::set_permissions(&smi, fs::Permissions::from_mode(0o755))?;

        let mut options = ClusterOptions::new(env!("CARGO_BIN_EXE_gantry-cluster"));
        options.folder = std::env::temp_dir().join("gantry-docs");
        options.port = 16450;
        options.nodes = ["node-1", "node-2"].map(NodeOptions::new).into();
        options.pods = Some(binary);
        let cluster = Cluster::up(options).await?;
        let own = format!("docker.io/library/gantry:{}", env!("CARGO_PKG_VERSION"));
        let named = format!("{IMAGE}:{}", env!("CARGO_PKG_VERSION"));
        let scheduler = SCHEDULER_IMAGE.replace(":test", &format!(":{}", components.kubernetes().release()));
        let mut hardware = Vec::new();
        for node in cluster.nodes() {
            let ctr = async |args: &[&str]| {
                node.exec(&[&["ctr", "--namespace", "k8s.io", "images"], args].concat()).await
            };
            ctr(&["tag", &own, &named]).await?;
            // A command that forgets the registry finds no image.
            ctr(&["rm", &own]).await?;
            ctr(&["tag", SCHEDULER_IMAGE, &scheduler]).await?;
            for name in BUSYBOX_NAMES {
                ctr(&["tag", BUSYBOX_IMAGE, name]).await?;
            }
            let machine = folder.path().join(format!("{}.yaml", node.name()));
            let text = fs::read_to_string(gantry::machine_file(MACHINE))?;
            let is_first = hardware.is_empty();
            fs::write(&machine, if is_first { text } else { with_other_uuids(&text) })?;
            hardware.push(Hardware::install(node, &machine)?);
        }
        cluster.kubectl(&["label", "node", "node-1", &format!("{CONTROL_PLANE}=")]).await?;
        for namespace in ["monitoring", "nvidia", "research"] {
            cluster.kubectl(&["create", "namespace", namespace]).await?;
        }
        let (hardware, shape) = (RefCell::new(hardware), Cell::new(Shape::Nothing));
        Ok(Self { cluster, hardware, shape, scheduler_config: RefCell::default(), folder })
    }

    pub(crate) async fn down(self) -> Result<()> {
        Ok(self.cluster.down().await?)
    }

    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.cluster.kubeconfig()
    }

    pub(crate) fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// The simulated GPUs of a node.
    pub(crate) fn hardware(&self, node: usize) -> RefMut<'_, Hardware> {
        RefMut::map(self.hardware.borrow_mut(), |all| &mut all[node])
    }

    /// Plays a story in its shape.
    pub(crate) async fn play(&self, story: &Story) -> Result<()> {
        self.empty()?;
        self.bring(story.shape).await.with_context(|| format!("the shape {:?}", story.shape))?;
        let mut reader = Reader::open(self, story.page)?;
        let outcome = (story.play)(self, &mut reader).await;
        self.shape.set(if outcome.is_ok() { story.after } else { Shape::Changed });
        match outcome {
            Ok(()) => reader.close(),
            Err(error) => anyhow::bail!("{error:#}\n{}", self.state()),
        }
    }

    /// Brings the cluster into a shape.
    pub(crate) async fn bring(&self, shape: Shape) -> Result<()> {
        if self.shape.get() == shape {
            return Ok(());
        }
        if shape == Shape::Nothing || self.shape.get() == Shape::Changed {
            self.clear().await?;
        }
        self.restore_scheduler().await?;
        let mode = match shape {
            Shape::Nothing | Shape::Changed => return Ok(()),
            Shape::Alone => "none",
            Shape::Own => "own",
            Shape::Existing => "existing",
        };
        self.sh("kubectl label node --all gantry.dev/gpu=true --overwrite")?;
        self.sh(&format!(
            "helm upgrade --install gantry charts/gantry -n {NAMESPACE} --create-namespace --reset-values --wait \
             --set image.repository={IMAGE} --set scheduler.mode={mode}"
        ))?;
        if shape == Shape::Existing {
            let config = self.sh("gantry scheduler-config --resource nvidia.com/gpu")?;
            self.call_extender(&config).await?;
        }
        self.serves(&[("node-1", GPUS), ("node-2", GPUS)]).await?;
        self.shape.set(shape);
        Ok(())
    }

    /// Removes the pods of stories.
    pub(crate) fn empty(&self) -> Result<()> {
        if self.has_controllers() {
            self.sh("kubectl delete jobsets,leaderworkersets,pytorchjobs --all")?;
        }
        self.sh("for namespace in default research; do\n\
             kubectl -n $namespace delete jobs --all --cascade=orphan\n\
             kubectl -n $namespace delete pods --all --now\ndone")?;
        Ok(())
    }

    /// Removes what stories and shapes leave.
    async fn clear(&self) -> Result<()> {
        self.restore_scheduler().await?;
        self.sh(&format!(
            "helm uninstall gantry -n {NAMESPACE} --wait --ignore-not-found\n\
             kubectl delete crd gpunodes.gantry.dev gangs.gantry.dev --ignore-not-found\n\
             kubectl delete namespace {NAMESPACE} --ignore-not-found\n\
             kubectl uncordon node-1\n\
             kubectl label node node-1 --overwrite {CONTROL_PLANE}=\n\
             kubectl label node --all gantry.dev/gpu- gantry.dev/mig- nvidia.com/mig.config- gpu- nvidia.com/gpu.deploy.device-plugin-"
        ))?;
        self.shape.set(Shape::Nothing);
        Ok(())
    }

    /// Moves the cluster's kube-scheduler to the node of the control plane, with a configuration that calls the extender.
    pub(crate) async fn call_extender(&self, config: &str) -> Result<()> {
        self.restore_scheduler().await?;
        self.cluster.move_scheduler(&self.cluster.nodes()[0], config).await?;
        *self.scheduler_config.borrow_mut() = Some(config.to_owned());
        Ok(())
    }

    /// The configuration of the cluster's kube-scheduler, if it calls the extender.
    pub(crate) fn scheduler_config(&self) -> Option<String> {
        self.scheduler_config.borrow().clone()
    }

    /// Gives the cluster its stock kube-scheduler.
    pub(crate) async fn restore_scheduler(&self) -> Result<()> {
        if self.scheduler_config.take().is_none() {
            return Ok(());
        }
        let node = &self.cluster.nodes()[0];
        node.program("kube-scheduler")?.stop().await?;
        node.sandbox().forget("kube-scheduler")?;
        self.cluster.start_again("kube-scheduler").await?;
        Ok(())
    }

    /// Starts the controllers of jobs, unless they run.
    pub(crate) async fn start_controllers(&self) -> Result<()> {
        if !self.has_controllers() {
            self.cluster.install_controllers().await?;
            self.cluster.start_controllers("default").await?;
        }
        Ok(())
    }

    fn has_controllers(&self) -> bool {
        self.cluster.control().programs().iter().any(|name| name == CONTROLLERS)
    }

    /// Waits until nodes offer so many GPUs.
    pub(crate) async fn serves(&self, nodes: &[(&str, usize)]) -> Result<()> {
        for (node, count) in nodes {
            self.prints(
                &format!("kubectl get node {node} -o jsonpath='[{{.status.allocatable.nvidia\\.com/gpu}}]'"),
                &format!("[{count}]"),
            )
            .await?;
        }
        Ok(())
    }

    /// Waits until a command of the stage prints a text.
    pub(crate) async fn prints(&self, command: &str, text: &str) -> Result<String> {
        let printed = until(format!("`{command}` prints {text:?}"), LIMIT, async || match self.sh(command) {
            Ok(printed) if printed.contains(text) => Ok(printed),
            Ok(printed) => Err(printed),
            Err(error) => Err(format!("{error:#}")),
        });
        Ok(printed.await?)
    }

    /// Runs a command of the stage, not of a page, which must succeed.
    pub(crate) fn sh(&self, text: &str) -> Result<String> {
        let output = self.shell(self.folder.path(), &format!("set -e\n{text}")).output()?;
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(output.status.success(), "`{text}`: {}\n{printed}", output.status);
        Ok(printed)
    }

    /// A shell line in a folder, which is also its home. It ends within [`LIMIT`], and prints errors on standard output.
    /// What it exports holds for the next one there.
    pub(crate) fn shell(&self, home: &Path, text: &str) -> Command {
        let script = format!(
            "exec 2>&1\nset -o pipefail\nif [ -f ~/{EXPORTED} ]; then . ~/{EXPORTED}; fi\n\
             {text}\nstatus=$?\nexport -p > ~/{EXPORTED}\nexit $status\n"
        );
        let mut command = Command::new("timeout");
        let path = format!(
            "{}:{}:/usr/sbin:/usr/bin:/sbin:/bin",
            self.folder.path().join("bin").display(),
            home.join(".local/bin").display()
        );
        command
            .args(["--kill-after=5", &LIMIT.as_secs().to_string(), "/bin/bash", "-c", &script])
            .current_dir(home)
            .env_clear()
            .envs([("HOME", home), ("KUBECONFIG", &self.cluster.kubeconfig())])
            .env("PATH", path)
            .stdin(Stdio::null());
        command
    }

    /// What an operator would look at after a failure.
    fn state(&self) -> String {
        let commands = format!(
            "kubectl get pods -A -o wide\nkubectl get gangs -A\nkubectl get events -A | tail -30\n\
             kubectl logs -n {NAMESPACE} -l app.kubernetes.io/part-of=gantry --all-containers --tail=15"
        );
        let output = self.shell(self.folder.path(), &commands).output();
        output.map_or_else(
            |error| error.to_string(),
            |output| String::from_utf8_lossy(&output.stdout).into_owned(),
        )
    }
}

/// The machine again, because no GPU is in two nodes.
fn with_other_uuids(text: &str) -> String {
    let other = |line: &str| match line.split_once("uuid: GPU-") {
        Some((before, uuid)) => format!("{before}uuid: GPU-0{}{}\n", &uuid[..7], &uuid[8..]),
        None => format!("{line}\n"),
    };
    text.lines().map(other).collect()
}
