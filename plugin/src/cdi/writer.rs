//! Keeps the specifications on disk up to date, and publishes devices and configurations once their specifications exist. Each file is
//! replaced in one step, and removed at the end.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use gantry_api::DeviceHealth;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::driver::InstalledDriver;
use super::host::{self, Host};
use super::kind::{Class, Kind};
use super::lacks;
use super::names::{Entries, Names};
use super::spec::Spec;
use super::uses_cdi;
use crate::allocate::Access;
use crate::inventory::{Device, Inventory, State};
use crate::kubelet::with_remedy;
use crate::nccl::{Topology, TopologyFiles};
use crate::observe::Observations;
use gantry_config::{Config, Strategy};

/// Interval for reading the device nodes: the unified memory module may be loaded late.
const LOOK: Duration = Duration::from_secs(5);
/// Interval for searching the driver's files.
const LOOK_AT_DRIVER: Duration = Duration::from_mins(1);

/// Where specifications are written, and where this process sees the host.
#[derive(Debug, Clone)]
pub struct Writer {
    /// Directory that runtimes read.
    pub root: PathBuf,
    /// The kind of the devices.
    pub kind: Kind,
    /// Where this process sees `/dev`.
    pub dev_root: PathBuf,
    /// Where this process sees `/sys`.
    pub sys_root: PathBuf,
    /// Where this process sees `/proc`.
    pub proc_root: PathBuf,
    /// The topology files for NCCL.
    pub nccl: TopologyFiles,
}

/// The input and output of the writer.
#[derive(Debug)]
pub struct Channels {
    /// The devices of the node.
    pub inventory: watch::Receiver<Arc<Inventory>>,
    pub config: watch::Receiver<Arc<Config>>,
    /// The devices that containers can be given.
    pub passed: watch::Sender<Arc<Inventory>>,
    /// The snapshot for Allocate.
    pub access: watch::Sender<Arc<Access>>,
}

impl Channels {
    /// Publishes `inventory` as far as the written specifications serve it.
    fn pass(&self, inventory: &Arc<Inventory>, mismatch: Option<&str>) {
        let usable = usable(inventory, &self.access.borrow(), mismatch);
        self.passed.send_if_modified(|current| {
            let changed = *current != usable;
            *current = usable;
            changed
        });
    }
}

/// The state of the writer.
#[derive(Debug, Default)]
struct Progress {
    host: Host,
    names: Names,
    looked: Option<(Instant, Arc<Config>, Arc<gantry_topology::Machine>)>,
    /// The inode of each file that this run wrote.
    written: BTreeMap<Class, u64>,
    problem: Option<String>,
    /// The driver's libraries, and when they were compared with the running driver.
    installed: Option<(Instant, InstalledDriver)>,
    /// The driver root of that comparison.
    compared_root: PathBuf,
    /// That the libraries are of another driver than the running one.
    mismatch: Option<String>,
    lacks: Vec<String>,
    /// The topology for NCCL, and why its files cannot be written.
    topology: Option<Arc<Topology>>,
    nccl_problem: Option<String>,
    /// Whether devices were ever published.
    passed: bool,
}

impl Writer {
    /// Publishes each inventory once its specifications are on disk: kubelet must not be offered a device that no runtime can resolve.
    /// After the first one they are published even if writing fails, because health must not wait. Devices without a specification are
    /// then unhealthy, if containers could get them by CDI alone.
    ///
    /// A configuration takes effect for Allocate once its specifications exist.
    pub async fn gate(
        self,
        mut channels: Channels,
        observed: Arc<Observations>,
        shutdown: CancellationToken,
    ) {
        let mut progress = Progress::default();
        let mut configured = true;
        loop {
            let inventory = Arc::clone(&channels.inventory.borrow_and_update());
            let config = Arc::clone(&channels.config.borrow_and_update());
            if progress.passed && channels.passed.borrow().has_the_devices_of(&inventory) {
                // Health is not in specifications and does not wait for the host to be read: kubelet gets it now.
                channels.pass(&inventory, progress.mismatch.as_deref());
                tokio::task::yield_now().await;
            }
            self.compare_versions(&mut progress, &config, &inventory).await;
            self.refresh(&mut progress, &config, &inventory).await;
            self.read_topology(&mut progress, &config, &inventory).await;
            let in_force = self.keep(&mut progress, &config, &inventory, &channels.access);
            observed.cdi(progress.problem.clone());
            if in_force || progress.passed || inventory.state != State::Ready {
                progress.passed |= inventory.state == State::Ready;
                channels.pass(&inventory, progress.mismatch.as_deref());
            }
            progress.report_lacks(&config, &inventory, &observed);
            tokio::select! {
                () = shutdown.cancelled() => break,
                changed = channels.inventory.changed() => if changed.is_err() { break },
                changed = channels.config.changed(), if configured => configured = changed.is_ok(),
                () = tokio::time::sleep(LOOK) => {}
            }
        }
        for (class, inode) in &progress.written {
            // A file with another inode belongs to a successor.
            if fs::symlink_metadata(self.path(*class)).is_ok_and(|now| now.ino() == *inode) {
                self.remove(*class);
            }
        }
    }

    /// Path of a class's specification.
    pub fn path(&self, class: Class) -> PathBuf {
        self.root.join(self.kind.file(class))
    }

    /// Compares the driver's libraries with the running driver.
    async fn compare_versions(&self, progress: &mut Progress, config: &Arc<Config>, inventory: &Inventory) {
        let Some(kernel) =
            inventory.machine.host().driver.clone().filter(|_| inventory.state == State::Ready)
        else {
            return;
        };
        // Without any library every folder is listed, and there is nothing to compare.
        let is_recent = |(at, known): &(Instant, InstalledDriver)| {
            *known == InstalledDriver::Nothing && at.elapsed() < LOOK_AT_DRIVER
        };
        if progress.installed.as_ref().is_some_and(is_recent) {
            return;
        }
        let root = config.container_driver_root.clone();
        let version = kernel.clone();
        let Ok(installed) = tokio::task::spawn_blocking(move || InstalledDriver::of(&root, &version)).await
        else {
            return;
        };
        let same_root = progress.compared_root == config.container_driver_root;
        let earlier = progress.installed.as_ref().filter(|_| same_root).map(|(_, known)| known);
        let installed = installed.after(earlier);
        progress.compared_root.clone_from(&config.container_driver_root);
        if progress.installed.as_ref().is_some_and(|(_, known)| *known != installed) {
            // The files found before are not there any more.
            progress.looked = None;
        }
        progress.mismatch = lacks::mismatch(&installed, &kernel);
        progress.installed = Some((Instant::now(), installed));
    }

    /// Reads the host again if it is due or something changed.
    async fn refresh(&self, progress: &mut Progress, config: &Arc<Config>, inventory: &Inventory) {
        let is_same = progress
            .looked
            .as_ref()
            .filter(|(_, known, machine)| known == config && *machine == inventory.machine);
        let driver = is_same
            .filter(|(at, ..)| at.elapsed() < LOOK_AT_DRIVER && !progress.host.driver.libraries.is_empty())
            .map(|_| progress.host.driver.clone());
        if !uses_cdi(config) {
            progress.looked = None;
            let (config, dev, proc) = (Arc::clone(config), self.dev_root.clone(), self.proc_root.clone());
            // A GPU with 7 MIG devices has some 16 nodes; kubelet's calls must not wait for them.
            let looking = tokio::task::spawn_blocking(move || host::nodes(&config, &dev).with_majors(&proc));
            if let Ok(nodes) = looking.await {
                progress.host.nodes = nodes;
            }
            return;
        }
        if driver.is_none() {
            progress.looked = Some((Instant::now(), Arc::clone(config), Arc::clone(&inventory.machine)));
        }
        let (config, machine) = (Arc::clone(config), Arc::clone(&inventory.machine));
        let (dev, sys, proc) = (self.dev_root.clone(), self.sys_root.clone(), self.proc_root.clone());
        let looking = tokio::task::spawn_blocking(move || {
            let driver = driver.unwrap_or_else(|| {
                let driver = host::driver(&config, &machine, &sys);
                // Listing the driver's folders allocated a name for each file.
                gantry_runtime::memory::trim();
                driver
            });
            let mut host = Host::read_with_driver(driver, &config, &machine, &dev, &sys);
            host.nodes = host.nodes.with_majors(&proc);
            host
        });
        // It fails only when the runtime ends.
        if let Ok(host) = looking.await {
            progress.host = host;
        }
    }

    /// Reads the topology for NCCL if containers get it and the machine is another one. Writes the file of all GPUs, which
    /// shows whether files can be written.
    async fn read_topology(&self, progress: &mut Progress, config: &Config, inventory: &Inventory) {
        if !config.nccl_topology {
            (progress.topology, progress.nccl_problem) = (None, None);
            return;
        }
        let is_known = progress.topology.as_ref().is_some_and(|known| known.is_of(&inventory.machine));
        if inventory.state != State::Ready || (is_known && progress.nccl_problem.is_none()) {
            return;
        }
        let (machine, files) = (Arc::clone(&inventory.machine), self.nccl.clone());
        let (sys, proc) = (self.sys_root.clone(), self.proc_root.clone());
        let reading = tokio::task::spawn_blocking(move || {
            let topology = Topology::read(&machine, &sys, &proc);
            let all = topology.all();
            let problem = match files.write(&topology, &all) {
                Ok(Some(_)) => None,
                Ok(None) => Some(
                    "containers get no NCCL topology file: the PCIe position of a GPU is unknown".to_owned(),
                ),
                Err(error) => Some(format!(
                    "containers get no NCCL topology file: {} cannot be written: {}",
                    files.path(&all).display(),
                    with_remedy(&error)
                )),
            };
            (topology, problem)
        });
        if let Ok((topology, problem)) = reading.await {
            (progress.topology, progress.nccl_problem) = (Some(Arc::new(topology)), problem);
        }
    }

    /// Writes changed specifications and publishes the snapshot for Allocate. Returns whether `config` is in force.
    fn keep(
        &self,
        progress: &mut Progress,
        config: &Arc<Config>,
        inventory: &Inventory,
        access: &watch::Sender<Arc<Access>>,
    ) -> bool {
        if inventory.state != State::Ready && uses_cdi(config) {
            // The devices are unknown: the written specifications stay.
            return false;
        }
        if uses_cdi(config) {
            progress.names.learn(inventory, config.device_id_strategy);
        }
        let specs = super::specs(&self.kind, config, inventory, &progress.host, &progress.names);
        let mut there = BTreeMap::new();
        let mut failed = BTreeMap::new();
        for (class, spec) in specs {
            match self.write(class, &spec, &mut progress.written) {
                Ok(()) => {
                    there.insert(class, spec);
                }
                Err(error) => {
                    let path = self.path(class);
                    failed.insert(
                        class,
                        format!(
                            "the CDI specification {} cannot be written: {}",
                            path.display(),
                            with_remedy(&error)
                        ),
                    );
                }
            }
        }
        let problem = failed.values().next().cloned();
        if let Some(text) = problem.as_ref().filter(|_| progress.problem != problem) {
            warn!("{text}");
        }
        progress.problem = problem;
        // The specification of GPUs is required; others are left out of the responses.
        let refused = failed.contains_key(&Class::Gpu);
        let nodes = Arc::new(progress.host.nodes.clone());
        let next = if refused {
            Access { nodes, ..(**access.borrow()).clone() }
        } else {
            // Specifications of this run stay until its end: kubelet restarts the containers of running pods with the names they were
            // given, also after the configuration changed.
            for class in Class::ALL {
                if !there.contains_key(&class) && !progress.written.contains_key(&class) {
                    self.remove(class);
                }
            }
            Access {
                config: Arc::clone(config),
                topology: progress.topology.clone(),
                nodes,
                entries: Arc::new(Entries::of(
                    &self.kind,
                    &there,
                    &progress.names,
                    config.device_id_strategy,
                )),
            }
        };
        access.send_if_modified(|current| {
            let changed = **current != next;
            if changed {
                *current = Arc::new(next);
            }
            changed
        });
        !refused
    }

    /// Writes a specification that this run has not written yet or that differs on disk.
    fn write(&self, class: Class, spec: &Spec, written: &mut BTreeMap<Class, u64>) -> io::Result<()> {
        let (path, text) = (self.path(class), spec.text());
        if written.contains_key(&class) && fs::read(&path).is_ok_and(|there| there == text.as_bytes()) {
            return Ok(());
        }
        fs::create_dir_all(&self.root)?;
        let inode = replace(&path, &text)?;
        info!(path = %path.display(), devices = spec.names().count(), "CDI specification written");
        written.insert(class, inode);
        Ok(())
    }

    fn remove(&self, class: Class) {
        let path = self.path(class);
        match fs::remove_file(&path) {
            Ok(()) => info!(path = %path.display(), "CDI specification removed"),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                warn!(path = %path.display(), %error, "a CDI specification of ours cannot be removed");
            }
        }
    }
}

impl Progress {
    /// Reports what containers lack, and logs each line once.
    fn report_lacks(&mut self, config: &Config, inventory: &Inventory, observed: &Observations) {
        let lacks = match inventory.state {
            State::Ready => {
                let mut lacks = lacks::of_node(config, inventory, &self.host, self.mismatch.as_deref());
                lacks.extend(self.nccl_problem.clone());
                lacks
            }
            _ => Vec::new(),
        };
        for lack in lacks.iter().filter(|lack| !self.lacks.contains(lack)) {
            warn!("{lack}");
        }
        observed.lacks(lacks.clone());
        self.lacks = lacks;
    }
}

/// The inventory, in which devices are unhealthy that containers could not use: without a specification if containers get
/// devices by CDI alone, without device nodes, or with libraries of another driver (`mismatch`).
fn usable(inventory: &Arc<Inventory>, access: &Access, mismatch: Option<&str>) -> Arc<Inventory> {
    let by_cdi_alone = access.config.device_list_strategy.iter().all(|way: &Strategy| way.is_cdi());
    let reason = |device: &Device| {
        if by_cdi_alone && !access.entries.have(device) {
            let is_known = device.minor.is_some();
            let reason = if is_known { "its CDI specification is not written yet" } else { lacks::NO_MINOR };
            return Some(reason.to_owned());
        }
        lacks::of_device(&access.config, &access.nodes, device, mismatch)
    };
    let mut usable = Cow::Borrowed(&**inventory);
    for at in 0..inventory.devices.len() {
        let reason = inventory.devices.get(at).filter(|device| device.health.healthy).and_then(reason);
        if let Some(device) = reason.is_some().then(|| usable.to_mut().devices.get_mut(at)).flatten() {
            device.health = DeviceHealth { healthy: false, reason };
        }
    }
    match usable {
        Cow::Borrowed(_) => Arc::clone(inventory),
        Cow::Owned(changed) => Arc::new(changed),
    }
}

/// Replaces a file in one step, so that a runtime reads the old text or the new one. Returns the inode of the new file.
pub(crate) fn replace(path: &Path, text: &str) -> io::Result<u64> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    // Runtimes read *.json and *.yaml only.
    let beside = path.with_file_name(format!(".{name}.{}.new", std::process::id()));
    let write = || {
        let mut file =
            fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o644).open(&beside)?;
        file.write_all(text.as_bytes())?;
        // The umask may have removed bits; runtimes of other users read the file.
        file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644))?;
        let inode = file.metadata()?.ino();
        fs::rename(&beside, path)?;
        Ok(inode)
    };
    write().inspect_err(|_| {
        let _ = fs::remove_file(&beside);
    })
}

#[cfg(test)]
mod tests {
    use super::super::driver::{Driver, File};
    use super::*;

    #[test]
    fn missing_gds_files_warn_with_cdi_only() {
        let file = |path: &str| File { path: path.into(), real: path.into() };
        let both = [file("etc/cufile.json"), file("run/udev")];
        let warned = |way: Strategy, gds: bool, storage: &[File]| {
            let mut progress = Progress::default();
            progress.host.driver = Driver { storage: storage.to_vec(), ..Driver::default() };
            let config = Config { device_list_strategy: vec![way], gds, ..Config::default() };
            let inventory = Inventory { state: State::Ready, ..Inventory::starting() };
            progress.report_lacks(&config, &inventory, &Observations::default());
            let mut lacks = progress.lacks.iter();
            lacks.any(|lack| lack.contains("etc/cufile.json"))
        };
        assert!(warned(Strategy::CdiCri, true, &[]));
        assert!(warned(Strategy::CdiAnnotations, true, &both[1..]));
        assert!(!warned(Strategy::CdiCri, true, &both));
        assert!(!warned(Strategy::CdiCri, false, &[]), "not configured");
        assert!(!warned(Strategy::Envvar, true, &[]), "the NVIDIA runtime finds them");
    }
}
