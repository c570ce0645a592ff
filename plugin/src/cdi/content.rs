//! The content of the specifications. A pure function of inventory, configuration and host.

use std::collections::BTreeSet;
use std::path::Path;

use super::File;
use super::host::Host;
use super::kind::{ALL, Class, Kind};
use super::names::Names;
use super::spec::{Device, Edits, Hook, Mount, Node, Spec};
use crate::allocate::{IMEX_CHANNEL, VISIBLE_DEVICES, capability_node, gpu_node};
use crate::inventory::{self, Inventory};
use gantry_config::{CdiFeature, CdiHook, Config};

const READ_ONLY: &[&str] = &["ro", "nosuid", "nodev", "rbind", "rprivate"];
const SOCKET: &[&str] = &["nosuid", "nodev", "rbind", "rprivate", "noexec"];

/// The specification of GPUs and MIG devices, with the common edits of their containers: control nodes, driver files, hooks.
pub(super) fn gpus(
    kind: &Kind,
    config: &Config,
    inventory: &Inventory,
    host: &Host,
    names: &Names,
) -> Option<Spec> {
    let mut all = Edits::default();
    let mut devices = Vec::new();
    for entry in names.entries(inventory, config.device_id_strategy) {
        let container_edits = device_edits(config, inventory, host, &entry.device);
        if entry.offered {
            all.unite(&container_edits);
        }
        devices.push(Device { name: entry.name.to_owned(), container_edits });
    }
    devices.push(Device { name: ALL.to_owned(), container_edits: all });
    Spec::new(kind.of(Class::Gpu), common(config, host), devices)
}

fn device_edits(config: &Config, inventory: &Inventory, host: &Host, device: &inventory::Device) -> Edits {
    // Without its own node no other node is useful.
    let Some(minor) = device.minor else {
        return Edits::default();
    };
    let mut names = vec![gpu_node(minor)];
    let mut displays: &[String] = &[];
    if let Some(slice) = &device.slice {
        names.extend(slice.caps.iter().flatten().map(|cap| capability_node(*cap)));
    }
    if device.slice.as_ref().is_none_or(|slice| slice.profile.contains("gfx")) {
        displays = host.displays.get(&device.gpu).map_or(&[], Vec::as_slice);
    }
    names.extend_from_slice(displays);
    let mut edits = nodes(config, host, names);
    let address = inventory.machine.gpus().get(usize::from(device.gpu)).and_then(|gpu| gpu.bus_id.as_ref());
    if let Some(address) = address {
        let link = |name: &String| {
            let node = name.strip_prefix("dri/")?;
            let role = if node.starts_with("render") { "render" } else { "card" };
            Some((format!("../{node}"), format!("/dev/dri/by-path/pci-{address}-{role}")))
        };
        edits.hooks = links(config, host, displays.iter().filter_map(link)).into_iter().collect();
    }
    edits
}

/// Device nodes by name, with their known properties.
fn nodes(config: &Config, host: &Host, names: impl IntoIterator<Item = String>) -> Edits {
    let mut edits = Edits::default();
    let groups = !config.cdi_feature_flags.contains(&CdiFeature::NoAdditionalGidsForDeviceNodes);
    for name in names {
        let facts = host.nodes.get(&name);
        let numbers = facts.and_then(|facts| facts.numbers);
        let known = facts.filter(|_| numbers.is_some());
        let group = known.map(|facts| facts.gid).filter(|gid| *gid != 0);
        edits.device_nodes.push(Node {
            host_path: (config.dev_root != Path::new("/")).then(|| config.dev_root.join("dev").join(&name)),
            path: format!("/dev/{name}"),
            kind: numbers.map(|_| "c"),
            major: numbers.map(|(major, _)| major),
            minor: numbers.map(|(_, minor)| minor),
            file_mode: known.map(|facts| facts.mode),
            permissions: "rwm",
            gid: group,
        });
        // A node that is not open to all users is open to its group.
        if let (Some(gid), Some(facts)) = (group, known)
            && groups
            && facts.mode & 0o006 != 0o006
            && !edits.additional_gids.contains(&gid)
        {
            edits.additional_gids.push(gid);
        }
    }
    edits
}

/// Keeps the NVIDIA runtime from adding devices a second time.
fn void() -> String {
    format!("{VISIBLE_DEVICES}=void")
}

fn common(config: &Config, host: &Host) -> Edits {
    let driver = &host.driver;
    let mut edits = nodes(config, host, host.nodes.control().map(str::to_owned));
    edits.env.push(void());
    let cuda = driver.libraries.iter().find(|library| {
        let name = library.file.path.file_name().unwrap_or_default();
        name.to_string_lossy().starts_with("libcuda.so.")
    });
    if let Some(folder) = cuda.and_then(|cuda| cuda.file.path.parent()) {
        edits.env.push(format!("NVIDIA_CTK_LIBCUDA_DIR=/{}", folder.display()));
    }
    mounts(config, host, &mut edits);
    if driver.libraries.is_empty() {
        edits.hooks.extend(node_hook(config, host));
        return edits;
    }
    let folders: BTreeSet<String> = driver
        .libraries
        .iter()
        .filter_map(|library| library.file.path.parent())
        .map(|folder| format!("/{}", folder.display()))
        .collect();
    let compatibility = driver.version.iter().map(|version| format!("--host-driver-version={version}"));
    let hooks = [
        links(config, host, library_links(host)),
        hook(config, host, CdiHook::EnableCudaCompat, compatibility),
        hook(
            config,
            host,
            CdiHook::UpdateLdcache,
            folders.into_iter().flat_map(|folder| ["--folder".to_owned(), folder]),
        ),
        node_hook(config, host),
    ];
    edits.hooks.extend(hooks.into_iter().flatten());
    edits
}

fn node_hook(config: &Config, host: &Host) -> Option<Hook> {
    hook(config, host, CdiHook::DisableDeviceNodeModification, [])
}

/// The driver's files, mounted at their paths below the driver's root.
fn mounts(config: &Config, host: &Host, edits: &mut Edits) {
    let driver = &host.driver;
    let mount = |file, options| mount(config, file, options);
    // The cache has the names that programs are linked to.
    let cache = hook(config, host, CdiHook::UpdateLdcache, []).is_some();
    for library in &driver.libraries {
        let file = mount(&library.file, READ_ONLY);
        if !cache {
            let aliases = library.links.iter().map(|link| Mount {
                container_path: file.container_path.with_file_name(link),
                ..file.clone()
            });
            edits.mounts.extend(aliases);
        }
        edits.mounts.push(file);
    }
    let files = [&driver.firmware, &driver.binaries, &driver.graphics];
    edits.mounts.extend(files.into_iter().flatten().map(|file| mount(file, READ_ONLY)));
    if !config.cdi_feature_flags.contains(&CdiFeature::DisableIpcDiscoverer) {
        edits.mounts.extend(driver.sockets.iter().map(|file| mount(file, SOCKET)));
    }
}

fn mount(config: &Config, file: &File, options: &'static [&'static str]) -> Mount {
    Mount {
        host_path: config.driver_root.join(&file.real),
        container_path: Path::new("/").join(&file.path),
        options,
    }
}

/// The links that the loader's cache does not create.
fn library_links(host: &Host) -> Vec<(String, String)> {
    let version = host.driver.version.as_deref().unwrap_or_default();
    let known = [
        ("libcuda.so", "libcuda.so.1".to_owned(), "libcuda.so"),
        ("libnvidia-opticalflow.so", "libnvidia-opticalflow.so.1".to_owned(), "libnvidia-opticalflow.so"),
        ("libGLX_nvidia.so", format!("libGLX_nvidia.so.{version}"), "libGLX_indirect.so.0"),
        (
            "libnvidia-vulkan-producer.so",
            format!("libnvidia-vulkan-producer.so.{version}"),
            "libnvidia-vulkan-producer.so",
        ),
        ("libnvidia-allocator.so", "../libnvidia-allocator.so.1".to_owned(), "gbm/nvidia-drm_gbm.so"),
    ];
    let mut links = Vec::new();
    for library in &host.driver.libraries {
        let path = &library.file.path;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let Some(folder) = path.parent() else { continue };
        for (stem, target, link) in &known {
            if name == format!("{stem}.{version}") {
                links.push((target.clone(), format!("/{}/{link}", folder.display())));
            }
        }
    }
    links
}

/// The specifications of memory channels and GPUDirect, from the nodes that exist. A class without nodes has none.
pub(super) fn others(kind: &Kind, config: &Config, host: &Host) -> Vec<(Class, Spec)> {
    let starting = |prefixes: &[&'static str]| -> Vec<String> {
        prefixes.iter().flat_map(|prefix| host.nodes.starting(prefix)).map(str::to_owned).collect()
    };
    let wanted = [
        (config.imex.channel, Class::ImexChannel, "0", &[IMEX_CHANNEL][..]),
        (config.gdrcopy, Class::Gdrcopy, ALL, &["gdrdrv"]),
        (config.gds, Class::Gds, ALL, &["nvidia-fs"]),
        (config.mofed, Class::Mofed, ALL, &["infiniband/rdma_cm", "infiniband/uverbs"]),
    ];
    wanted
        .into_iter()
        .filter(|(on, ..)| *on)
        .filter_map(|(_, class, name, prefixes)| {
            let found = starting(prefixes)
                .into_iter()
                // channel0 is also a prefix of channel01.
                .filter(|node| class != Class::ImexChannel || node == IMEX_CHANNEL);
            let device = Device { name: name.to_owned(), container_edits: nodes(config, host, found) };
            let common = Edits {
                env: vec![void()],
                mounts: if class == Class::Gds { storage(config, host) } else { Vec::new() },
                ..Edits::default()
            };
            Some((class, Spec::new(kind.of(class), common, [device])?))
        })
        .collect()
}

fn storage(config: &Config, host: &Host) -> Vec<Mount> {
    let files = host.driver.storage.iter();
    files.map(|file| mount(config, file, READ_ONLY)).collect()
}

/// A hook of NVIDIA's toolkit with these arguments. `None` if it is disabled or its program is not on the host: a runtime fails every
/// container on a hook that it cannot run.
fn hook(
    config: &Config,
    host: &Host,
    hook: CdiHook,
    arguments: impl IntoIterator<Item = String>,
) -> Option<Hook> {
    let off = &config.cdi_disabled_hooks;
    if !host.hooks || off.contains(&CdiHook::All) || off.contains(&hook) {
        return None;
    }
    let name = match hook {
        CdiHook::CreateSymlinks => "create-symlinks",
        CdiHook::UpdateLdcache => "update-ldcache",
        CdiHook::EnableCudaCompat => "enable-cuda-compat",
        CdiHook::DisableDeviceNodeModification => "disable-device-node-modification",
        // This plugin does not write these.
        CdiHook::All | CdiHook::Chmod | CdiHook::UpdateApplicationProfile => return None,
    };
    let program = config.cdi_hook_path.file_name()?.to_str()?;
    // The hooks are either a program of their own or a command of the toolkit.
    let command = (program == "nvidia-ctk").then_some("hook");
    Some(Hook {
        hook_name: "createContainer",
        path: config.cdi_hook_path.clone(),
        args: [program]
            .into_iter()
            .chain(command)
            .chain([name])
            .map(str::to_owned)
            .chain(arguments)
            .collect(),
    })
}

/// `--link target::link` for every pair; `None` without pairs.
fn links(config: &Config, host: &Host, pairs: impl IntoIterator<Item = (String, String)>) -> Option<Hook> {
    let arguments: Vec<String> = pairs
        .into_iter()
        .flat_map(|(target, link)| ["--link".to_owned(), format!("{target}::{link}")])
        .collect();
    if arguments.is_empty() {
        return None;
    }
    hook(config, host, CdiHook::CreateSymlinks, arguments)
}
