//! What containers lack on the node as it is now: device nodes, libraries, hooks. Pure, over a snapshot of the host.

use std::collections::BTreeSet;
use std::path::Path;

use super::driver::{Flaw, InstalledDriver, UnusableLibrary};
use super::host::Host;
use super::uses_cdi;
use crate::allocate::{NodeFlaw, Nodes, capability_node, gpu_node};
use crate::inventory::{Device, Inventory};
use gantry_config::Config;

/// Nodes without which CUDA does not start, and how they are created.
const REQUIRED: [(&str, &str); 2] = [
    ("nvidiactl", "run nvidia-smi or nvidia-modprobe -c 0 on the node"),
    ("nvidia-uvm", "load the module (modprobe nvidia_uvm; nvidia-modprobe -u -c 0)"),
];

/// Folders that the loader of most images searches.
const LOADER_FOLDERS: [&str; 7] = [
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "usr/lib",
];

/// Why a container could not use `device`; `None` if it could. `mismatch` as by [`mismatch`].
pub(super) fn of_device(
    config: &Config,
    nodes: &Nodes,
    device: &Device,
    mismatch: Option<&str>,
) -> Option<String> {
    if let Some(mismatch) = mismatch {
        return Some(mismatch.to_owned());
    }
    // Otherwise the container runtime creates the nodes.
    if !hands_out_nodes(config) {
        return None;
    }
    if let Some((name, flaw, remedy)) = required_with_flaws(nodes).next() {
        return Some(format!(
            "/dev/{name} {flaw}, and containers cannot use CUDA; {}{remedy}",
            first_step(&flaw)
        ));
    }
    // The runtime finds the GPU by its UUID unless kubelet is to pass the nodes.
    if device.minor.is_none() && config.pass_device_specs {
        return Some(NO_MINOR.to_owned());
    }
    let of_gpu = device.minor.and_then(|minor| Some((minor, nodes.flaw(&gpu_node(minor))?)));
    if let Some((minor, flaw)) = of_gpu {
        return Some(format!(
            "/dev/{} {flaw}; {}run nvidia-modprobe -c {minor} there",
            gpu_node(minor),
            first_step(&flaw)
        ));
    }
    let mut caps = device.slice.iter().filter_map(|slice| slice.caps).flatten().map(capability_node);
    let (cap, flaw) = caps.find_map(|name| nodes.flaw(&name).map(|flaw| (name, flaw)))?;
    Some(format!(
        "/dev/{cap}, which opens the MIG device, {flaw}; {}run nvidia-modprobe -f for its file in \
         /proc/driver/nvidia/capabilities there",
        first_step(&flaw)
    ))
}

/// Why no node can be handed out for a GPU without a minor number.
pub(super) const NO_MINOR: &str = "NVML does not report the minor number of the GPU, so that its device node is unknown; \
                                   see dmesg for NVRM and Xid; drain the GPU and run nvidia-smi --gpu-reset, or reboot the node";

/// The nodes of [`REQUIRED`] with a flaw, each with the remedy.
fn required_with_flaws(nodes: &Nodes) -> impl Iterator<Item = (&'static str, NodeFlaw, &'static str)> {
    REQUIRED.iter().filter_map(|(name, remedy)| Some((*name, nodes.flaw(name)?, *remedy)))
}

/// What precedes the remedy: tools do not replace what is in the place of a node.
fn first_step(flaw: &NodeFlaw) -> &'static str {
    match flaw {
        NodeFlaw::Missing | NodeFlaw::NoDriver(_) => "",
        NodeFlaw::NotDevice | NodeFlaw::OtherNumbers { .. } => "remove it, and ",
    }
}

/// Whether the node's device nodes are handed to containers by this plugin, and not by the container runtime.
fn hands_out_nodes(config: &Config) -> bool {
    config.pass_device_specs || uses_cdi(config)
}

/// That the driver's libraries are not those of the running kernel module: CUDA refuses to start in new containers.
pub(super) fn mismatch(installed: &InstalledDriver, kernel: &str) -> Option<String> {
    let joined =
        |versions: &BTreeSet<String>| versions.iter().map(String::as_str).collect::<Vec<_>>().join(" and ");
    match installed {
        InstalledDriver::Nothing | InstalledDriver::Same => None,
        InstalledDriver::Other(versions) => Some(format!(
            "the driver's libraries are of {}, the kernel driver is {kernel}: drain the node and reload the kernel module, or \
             reboot",
            joined(versions)
        )),
        InstalledDriver::Removed => Some(format!(
            "the driver's libraries were removed, the kernel driver is {kernel}: install the libraries of {kernel} again"
        )),
        InstalledDriver::Partial(lacking) => {
            let of = |lacking: &UnusableLibrary| {
                let flaw = match lacking.flaw {
                    Flaw::Missing => "is missing",
                    Flaw::Dangling => "is a dangling link",
                    Flaw::Empty => "is empty or no file",
                };
                let others = match lacking.others.is_empty() {
                    true => String::new(),
                    false => format!(" and {} is there", joined(&lacking.others)),
                };
                format!("{} {flaw}{others}", lacking.name)
            };
            let has_others = lacking.iter().any(|lacking| !lacking.others.is_empty());
            let reload =
                if has_others { ", or drain the node and reload the kernel module, or reboot" } else { "" };
            Some(format!(
                "the driver's libraries are incomplete: {}; the kernel driver is {kernel}: install the libraries of {kernel} \
                 again{reload}",
                lacking.iter().map(of).collect::<Vec<_>>().join(", ")
            ))
        }
    }
}

/// What containers lack, for the operator. Every line is about all devices.
pub(super) fn of_node(
    config: &Config,
    inventory: &Inventory,
    host: &Host,
    mismatch: Option<&str>,
) -> Vec<String> {
    let cdi = uses_cdi(config);
    let bare = cdi && host.driver.libraries.is_empty() && mismatch.is_none();
    let mut lacks: Vec<String> = mismatch.map(str::to_owned).into_iter().collect();
    // A host without any node shows that the runtime keeps them elsewhere.
    let is_seen = host.nodes.starting("nvidia").next().is_some();
    for (name, flaw, remedy) in required_with_flaws(&host.nodes) {
        let step = first_step(&flaw);
        if hands_out_nodes(config) {
            lacks.push(format!("/dev/{name} {flaw}, and containers cannot use CUDA; {step}{remedy}"));
        } else if is_seen {
            lacks.push(format!(
                "/dev/{name} {flaw}: containers can use CUDA only if their runtime creates it; {step}{remedy}"
            ));
        }
    }
    if hands_out_nodes(config) {
        let of_gpus = inventory.devices.iter().filter_map(|device| device.minor.map(gpu_node));
        let caps = inventory.devices.iter().filter_map(|device| device.slice.as_ref()?.caps);
        let wanted: BTreeSet<String> = of_gpus.chain(caps.flatten().map(capability_node)).collect();
        let flaws = wanted.iter().filter_map(|name| Some((name, host.nodes.flaw(name)?)));
        let flaws: Vec<String> = flaws.map(|(name, flaw)| format!("/dev/{name} {flaw}")).collect();
        if !flaws.is_empty() {
            lacks
                .push(format!("{}: the devices behind are unhealthy; see nvidia-modprobe", flaws.join(", ")));
        }
    }
    if bare {
        lacks.push(
            "no driver library was found under the container driver root (--container-driver-root): containers get device nodes by CDI and no library".to_owned(),
        );
    }
    if cdi && !bare && !host.hooks {
        lacks.push(match unsearched_folder(host) {
            Some(folder) => format!(
                "the driver's libraries lie in /{folder}, which the loader of most images does not search, and the CDI hook program (--nvidia-cdi-hook-path) is not seen on the host: containers do not find libcuda.so.1; install NVIDIA's container toolkit and name its nvidia-cdi-hook"
            ),
            None => "the CDI hook program (--nvidia-cdi-hook-path) is not seen on the host: libraries are mounted under the names programs are linked to, and no hook is run".to_owned(),
        });
    }
    if cdi && config.gds && host.driver.lacks_storage() {
        lacks.push(
            "GPUDirect Storage is on (gdsEnabled), and etc/cufile.json and run/udev are not both found under the container driver root (--container-driver-root): by CDI containers get only the one that is".to_owned(),
        );
    }
    if config.imex.channel && !host.nodes.has_imex_channel() {
        lacks.push(
            "there is no IMEX channel 0 (/dev/nvidia-caps-imex-channels/channel0): containers get none"
                .to_owned(),
        );
    }
    lacks
}

/// The folder of the driver's libraries, if no usual loader searches it.
fn unsearched_folder(host: &Host) -> Option<String> {
    let mut folders = host.driver.libraries.iter().filter_map(|library| library.file.path.parent());
    let is_searched = |folder: &Path| LOADER_FOLDERS.iter().any(|known| Path::new(known) == folder);
    if folders.clone().any(is_searched) {
        return None;
    }
    Some(folders.next()?.display().to_string())
}

#[cfg(test)]
mod tests {
    use gantry_config::Strategy;

    use super::super::driver::{Driver, File, Library};
    use super::*;
    use crate::allocate::Facts;
    use crate::inventory::{Hardware, State};

    fn nodes(names: &[&str]) -> Nodes {
        let facts = Facts { numbers: None, mode: 0o666, gid: 0 };
        names.iter().map(|name| ((*name).to_owned(), facts)).collect()
    }

    fn config(way: Strategy, pass_device_specs: bool) -> Config {
        Config { device_list_strategy: vec![way], pass_device_specs, ..Config::default() }
    }

    /// One GPU of minor 3.
    fn inventory() -> Inventory {
        use gantry_topology::{Gpu, Machine, MachineParts, PathClass, PathMatrix};
        let gpu = Gpu { index: 0, uuid: "GPU-0".parse().ok(), minor: Some(3), ..Gpu::default() };
        let parts = MachineParts {
            gpus: vec![gpu],
            paths: PathMatrix::from_fn(1, |_, _| PathClass::Sys),
            ..MachineParts::default()
        };
        let hardware = Hardware::of(std::sync::Arc::new(Machine::new(parts).unwrap()));
        let inventory = crate::offer::offer(&hardware, &Config::default());
        assert_eq!(inventory.state, State::Ready);
        inventory
    }

    /// Nothing loads nvidia_uvm on a host that runs CUDA in containers only.
    #[test]
    fn missing_nodes_make_handed_out_devices_unusable() {
        let inventory = inventory();
        let device = &inventory.devices[0];
        let reason = |config: &Config, names: &[&str]| of_device(config, &nodes(names), device, None);
        let mut reasons = Vec::new();
        for config in [config(Strategy::CdiCri, false), config(Strategy::Envvar, true)] {
            assert_eq!(reason(&config, &["nvidiactl", "nvidia-uvm", "nvidia3"]), None);
            let there = [["nvidiactl", "nvidia3"], ["nvidia-uvm", "nvidia3"], ["nvidiactl", "nvidia-uvm"]];
            reasons.extend(there.map(|names| reason(&config, &names).unwrap()));
            let unknown = Device { minor: None, ..device.clone() };
            let without = of_device(&config, &nodes(&["nvidiactl", "nvidia-uvm"]), &unknown, None);
            assert_eq!(without.is_some(), config.pass_device_specs, "{without:?}");
        }
        insta::assert_snapshot!(reasons.join("\n"), @r"
        /dev/nvidia-uvm is missing on the node, and containers cannot use CUDA; load the module (modprobe nvidia_uvm; nvidia-modprobe -u -c 0)
        /dev/nvidiactl is missing on the node, and containers cannot use CUDA; run nvidia-smi or nvidia-modprobe -c 0 on the node
        /dev/nvidia3 is missing on the node; run nvidia-modprobe -c 3 there
        /dev/nvidia-uvm is missing on the node, and containers cannot use CUDA; load the module (modprobe nvidia_uvm; nvidia-modprobe -u -c 0)
        /dev/nvidiactl is missing on the node, and containers cannot use CUDA; run nvidia-smi or nvidia-modprobe -c 0 on the node
        /dev/nvidia3 is missing on the node; run nvidia-modprobe -c 3 there
        ");
        let by_runtime = config(Strategy::Envvar, false);
        assert_eq!(reason(&by_runtime, &[]), None, "the runtime creates them");
        let host = Host { nodes: nodes(&["nvidiactl", "nvidia3"]), ..Host::default() };
        let lacks = of_node(&by_runtime, &inventory, &host, None);
        assert_eq!(lacks.len(), 1, "{lacks:?}");
        insta::assert_snapshot!(lacks[0], @"/dev/nvidia-uvm is missing on the node: containers can use CUDA only if their runtime creates it; load the module (modprobe nvidia_uvm; nvidia-modprobe -u -c 0)");
        assert!(
            of_node(&by_runtime, &inventory, &Host::default(), None).is_empty(),
            "no node is visible here"
        );
    }

    /// Talos and Container-Optimized OS keep the driver outside the folders of the loader.
    #[test]
    fn libraries_outside_loader_folders_are_reported() {
        let host = |folder: &str, hooks| {
            let path = Path::new(folder).join("libcuda.so.570.1");
            let file = File { real: path.clone(), path };
            let driver = Driver { libraries: vec![Library { file, links: Vec::new() }], ..Driver::default() };
            Host { nodes: nodes(&["nvidiactl", "nvidia-uvm", "nvidia3"]), driver, hooks, ..Host::default() }
        };
        let lacks = |folder, hooks| {
            of_node(&config(Strategy::CdiCri, false), &inventory(), &host(folder, hooks), None)
        };
        insta::assert_snapshot!(lacks("usr/local/glibc/usr/lib", false).join("\n"), @"the driver's libraries lie in /usr/local/glibc/usr/lib, which the loader of most images does not search, and the CDI hook program (--nvidia-cdi-hook-path) is not seen on the host: containers do not find libcuda.so.1; install NVIDIA's container toolkit and name its nvidia-cdi-hook");
        assert!(
            lacks("home/kubernetes/bin/nvidia/lib64", true).is_empty(),
            "the hook updates the loader's cache"
        );
        insta::assert_snapshot!(lacks("usr/lib64", false).join("\n"), @"the CDI hook program (--nvidia-cdi-hook-path) is not seen on the host: libraries are mounted under the names programs are linked to, and no hook is run");
    }

    #[test]
    fn replaced_libraries_are_named_with_both_versions() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("usr/lib64");
        std::fs::create_dir_all(&folder).unwrap();
        let put = |name: &str| std::fs::write(folder.join(name), "x").unwrap();
        let now = || mismatch(&InstalledDriver::of(root.path(), "550.144.03"), "550.144.03");
        assert_eq!(InstalledDriver::of(root.path(), "550.144.03"), InstalledDriver::Nothing);
        put("libcuda.so.1");
        assert_eq!(now(), None, "a name without the driver's version");
        put("libcuda.so.550.144.03");
        assert_eq!(now(), None);
        put("libcuda.so.550.163.01");
        assert_eq!(now(), None, "both are there");
        std::fs::remove_file(folder.join("libcuda.so.550.144.03")).unwrap();
        let text = now().unwrap();
        insta::assert_snapshot!(text, @"the driver's libraries are of 550.163.01, the kernel driver is 550.144.03: drain the node and reload the kernel module, or reboot");
        let device = &inventory().devices[0];
        let by_runtime = config(Strategy::Envvar, false);
        assert_eq!(of_device(&by_runtime, &nodes(&[]), device, Some(&text)), Some(text));
    }

    /// An upgrade that failed half way, a full disk, a package without its links.
    #[test]
    fn partly_replaced_driver_is_named_by_library() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("usr/lib64");
        let text = |entries: &[(&str, &str)]| {
            let _ = std::fs::remove_dir_all(&folder);
            std::fs::create_dir_all(&folder).unwrap();
            for (name, content) in entries {
                match content.strip_prefix("-> ") {
                    Some(target) => std::os::unix::fs::symlink(target, folder.join(name)).unwrap(),
                    None => std::fs::write(folder.join(name), content).unwrap(),
                }
            }
            mismatch(&InstalledDriver::of(root.path(), "550.144.03"), "550.144.03")
        };
        let (cuda, ml) = ("libcuda.so.550.144.03", "libnvidia-ml.so.550.144.03");
        let (new_cuda, new_ml) = ("libcuda.so.550.163.01", "libnvidia-ml.so.550.163.01");
        assert_eq!(text(&[(cuda, "x"), (ml, "x")]), None);
        assert_eq!(text(&[(cuda, "x"), (ml, "x"), (new_cuda, "x")]), None, "both are there");
        let cases: [&[(&str, &str)]; 7] = [
            &[(ml, "x")],
            &[(ml, "x"), (new_cuda, "x")],
            &[(ml, "x"), (cuda, "-> /nowhere")],
            &[(ml, "x"), (cuda, "")],
            &[(cuda, "x"), (new_ml, "x")],
            &[(cuda, "x"), (ml, "-> gone")],
            &[(new_cuda, "x"), (cuda, "-> /nowhere")],
        ];
        insta::assert_snapshot!(cases.map(|entries| text(entries).unwrap()).join("\n"), @r"
        the driver's libraries are incomplete: libcuda.so.550.144.03 is missing; the kernel driver is 550.144.03: install the libraries of 550.144.03 again
        the driver's libraries are incomplete: libcuda.so.550.144.03 is missing and 550.163.01 is there; the kernel driver is 550.144.03: install the libraries of 550.144.03 again, or drain the node and reload the kernel module, or reboot
        the driver's libraries are incomplete: libcuda.so.550.144.03 is a dangling link; the kernel driver is 550.144.03: install the libraries of 550.144.03 again
        the driver's libraries are incomplete: libcuda.so.550.144.03 is empty or no file; the kernel driver is 550.144.03: install the libraries of 550.144.03 again
        the driver's libraries are incomplete: libnvidia-ml.so.550.144.03 is missing and 550.163.01 is there; the kernel driver is 550.144.03: install the libraries of 550.144.03 again, or drain the node and reload the kernel module, or reboot
        the driver's libraries are incomplete: libnvidia-ml.so.550.144.03 is a dangling link; the kernel driver is 550.144.03: install the libraries of 550.144.03 again
        the driver's libraries are incomplete: libcuda.so.550.144.03 is a dangling link and 550.163.01 is there, libnvidia-ml.so.550.144.03 is missing; the kernel driver is 550.144.03: install the libraries of 550.144.03 again, or drain the node and reload the kernel module, or reboot
        ");
    }
}
