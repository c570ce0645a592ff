//! A node with simulated GPUs on which either plugin runs as shipped: in a mount namespace of its own, where the usual
//! paths lead into the node's folder. NVIDIA's plugin needs that, for it takes no other paths; ours is treated alike.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use gantry_nvml_sim::InstalledMachine;
use gantry_nvml_sim::control::{Controller, MigChange, Piece, apply};
use gantry_nvml_sim::facts::Facts;
use gantry_topology::Machine;
use rustix::process::{Pid, Signal, kill_process};

use super::setting::Setting;

/// Mounts the node's folder over the usual paths, reports that, and becomes the plugin on request.
const LAY_DOWN: &str = include_str!("node.sh");
/// The folder with NVIDIA's programs, if they were built.
const NVIDIA_VARIABLE: &str = "GANTRY_NVIDIA_BIN";

fn machine_file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../simulator/machines/{name}.yaml"))
}

/// One of the programs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Plugin {
    /// Ours.
    Gantry(PathBuf),
    /// NVIDIA's k8s-device-plugin.
    Nvidia(PathBuf),
    /// The minimal plugin on grpc-go, for benchmarks: it reads no GPU and sends constant replies.
    Bare(PathBuf),
}

/// A node's folder and its simulated machine.
pub struct Node {
    folder: tempfile::TempDir,
    installed: InstalledMachine,
}

/// A plugin that was started on a node. It is killed when dropped.
pub struct Process {
    child: Child,
    gate: Option<ChildStdin>,
    log: PathBuf,
}

/// Checks whether this machine can run nodes.
///
/// # Errors
/// Names what is missing.
pub fn supported() -> Result<()> {
    ensure!(rustix::process::geteuid().is_root(), "not root, which mounts need");
    let trial = Command::new("unshare")
        .args(["--mount", "sh", "-c", "mount -t tmpfs none /mnt"])
        .output()
        .context("no program unshare")?;
    ensure!(
        trial.status.success(),
        "no mounts in new namespaces: {}",
        String::from_utf8_lossy(&trial.stderr).trim()
    );
    Ok(())
}

impl Plugin {
    /// The `gantry` program: `$GANTRY_BINARY`, or the one that cargo built next to the running program.
    ///
    /// # Errors
    /// There is none.
    pub fn gantry() -> Result<Self> {
        crate::gantry::binary()
            .map(Self::Gantry)
            .context("no gantry program; build it with `cargo build` or name it in GANTRY_BINARY")
    }

    /// NVIDIA's program in the folder `$GANTRY_NVIDIA_BIN`, if the variable is set.
    pub fn nvidia() -> Option<Self> {
        let folder = std::env::var_os(NVIDIA_VARIABLE).filter(|folder| !folder.is_empty())?;
        Some(Self::Nvidia(Path::new(&folder).join("nvidia-device-plugin")))
    }

    /// The least plugin on grpc-go, built on the first call.
    ///
    /// # Errors
    /// There is no Go, or it does not build.
    pub fn bare() -> Result<Self> {
        Ok(Self::Bare(super::bare::locate_or_build()?))
    }

    fn words(&self) -> Vec<&str> {
        match self {
            Self::Gantry(_) => vec!["plugin", "--no-cluster", "--listen=127.0.0.1:0"],
            Self::Nvidia(_) | Self::Bare(_) => Vec::new(),
        }
    }

    fn path(&self) -> &Path {
        match self {
            Self::Gantry(path) | Self::Nvidia(path) | Self::Bare(path) => path,
        }
    }
}

impl Node {
    /// A node with the machine of `simulator/machines/<name>.yaml`.
    ///
    /// # Errors
    /// The machine file's, or the folder cannot be written.
    pub fn of(name: &str) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let installed = gantry_nvml_sim::install(&machine_file(name), &folder.path().join("gpus"))?;
        Self::with(folder, installed)
    }

    /// The machine `simulator/machines/NAME.yaml` with every GPU cut into `pieces` (`1g.5gb`), by its machine file: of
    /// a GPU cut at run time the simulator reads the cut again with every event, which takes it milliseconds.
    ///
    /// # Errors
    /// As [`Node::of`]; when a GPU cannot be cut so.
    pub fn cut(name: &str, pieces: &[&str]) -> Result<Self> {
        let file = machine_file(name);
        let machine = gantry_topology::read(&std::fs::read_to_string(&file)?)?;
        let facts = Facts::of(&machine)?;
        let mut parts = machine.into_parts();
        let pieces: Vec<Piece> = pieces.iter().map(|piece| piece.parse()).collect::<Result<_, _>>()?;
        for (gpu, facts) in parts.gpus.iter_mut().zip(&facts.gpus) {
            gpu.mig = Some(apply(facts, None, &MigChange::Recut(pieces.clone()))?.mig);
        }
        let text = gantry_topology::read::to_yaml(&Machine::new(parts)?)?;
        let folder = tempfile::tempdir()?;
        let installed = gantry_nvml_sim::install_text(&text, &file, &folder.path().join("gpus"))?;
        Self::with(folder, installed)
    }

    fn with(folder: tempfile::TempDir, installed: InstalledMachine) -> Result<Self> {
        for own in ["lib/kubelet/device-plugins", "run/cdi", "dev", "etc"] {
            std::fs::create_dir_all(folder.path().join(own))?;
        }
        // NVIDIA's program writes no CDI specification without them. Their content does not matter to it.
        let libraries = folder.path().join("run/driver/usr/lib/x86_64-linux-gnu");
        std::fs::create_dir_all(&libraries)?;
        for name in ["libcuda", "libnvidia-ml"] {
            let file = format!("{name}.so.{}", installed.facts.driver);
            std::fs::copy(&installed.library, libraries.join(file))?;
        }
        Ok(Self { folder, installed })
    }

    /// The directory where kubelet and plugins meet, as seen from here.
    pub fn plugins(&self) -> PathBuf {
        self.folder.path().join("lib/kubelet/device-plugins")
    }

    /// The directory of CDI specifications, as seen from here.
    pub fn cdi(&self) -> PathBuf {
        self.folder.path().join("run/cdi")
    }

    /// What stands for `/proc`, as seen from here.
    pub fn proc(&self) -> &Path {
        &self.installed.layout.proc
    }

    /// The machine's facts in the simulated library.
    pub fn hardware(&self) -> &gantry_nvml_sim::facts::Facts {
        &self.installed.facts
    }

    /// The hand that breaks and mends the hardware.
    pub fn controller(&self) -> &Controller {
        &self.installed.controller
    }

    /// Makes everything ready to start a plugin; [`Process::go`] starts it.
    ///
    /// # Errors
    /// The namespace cannot be had.
    pub fn prepare(&self, plugin: &Plugin, setting: &Setting) -> Result<Process> {
        let folder = self.folder.path();
        let log = folder.join("log");
        let output = std::fs::File::options().create(true).append(true).open(&log)?;
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "sh", "-c", LAY_DOWN, "sh"])
            .arg(plugin.path())
            .args(plugin.words())
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("FOLDER", folder)
            .env("LD_LIBRARY_PATH", folder.join("gpus"))
            .env("CONTAINER_DRIVER_ROOT", "/run/driver")
            .envs(setting.env())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(output);
        if let Some(text) = setting.config_file() {
            self.write_config(&text)?;
            command.env("CONFIG_FILE", "/run/config.yaml");
        }
        let mut child = command.spawn().context("cannot start unshare")?;
        let gate = child.stdin.take();
        let mut said = String::new();
        if let Some(output) = child.stdout.take() {
            BufReader::new(output).read_line(&mut said)?;
        }
        let process = Process { child, gate, log };
        ensure!(said.trim() == "ready", "no namespace: {}", process.log());
        Ok(process)
    }

    /// Writes the config file, in place of the one there is.
    ///
    /// # Errors
    /// The system's.
    pub fn write_config(&self, text: &str) -> Result<()> {
        // Under the node's /run, for the rest of the file system is the machine's. Renamed, for a plugin may be
        // watching it.
        let folder = self.folder.path().join("run");
        std::fs::write(folder.join("config.new"), text)?;
        Ok(std::fs::rename(folder.join("config.new"), folder.join("config.yaml"))?)
    }

    /// Starts a plugin.
    ///
    /// # Errors
    /// As [`Node::prepare`].
    pub fn start(&self, plugin: &Plugin, setting: &Setting) -> Result<Process> {
        let mut process = self.prepare(plugin, setting)?;
        process.go()?;
        Ok(process)
    }
}

impl Process {
    /// Lets the plugin that was made ready start.
    ///
    /// # Errors
    /// It has ended.
    pub fn go(&mut self) -> Result<()> {
        if let Some(mut gate) = self.gate.take() {
            gate.write_all(b"go\n")?;
        }
        Ok(())
    }

    /// What it has written so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Whether it still runs.
    ///
    /// # Errors
    /// The system's.
    pub fn lives(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }

    /// Resident memory in bytes.
    ///
    /// # Errors
    /// It has ended.
    pub fn resident(&self) -> Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.split_whitespace().next());
        let kib: u64 = kib.context("no VmRSS: the process has ended")?.parse()?;
        Ok(kib * 1024)
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// The system's.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) else {
            bail!("no process id");
        };
        Ok(kill_process(pid, signal)?)
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// The system's.
    pub fn wait(&mut self) -> Result<std::process::ExitStatus> {
        Ok(self.child.wait()?)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Gone already is what is wanted.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
