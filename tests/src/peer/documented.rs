//! The behaviour of NVIDIA's k8s-device-plugin 0.20.0 towards kubelet, from its documentation and source. It is the
//! reference if NVIDIA's program is not available, and is compared with the program if it is. Written independently of
//! Gantry's code.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use gantry_nvml_sim::facts::GpuFacts;

use super::facts::Facts;
use super::node::Node;
use super::setting::{Mig, Setting, Strategy};

/// Vendor and class of the CDI devices; the vendor keeps them apart from those of NVIDIA's container toolkit.
const CDI_KIND: &str = "k8s.device-plugin.nvidia.com/gpu";
/// The value of a container's device list variable if devices are passed by mounts.
const MOUNTS: &str = "/var/run/nvidia-container-devices";

/// A device as kubelet counts it.
#[derive(Debug, Clone)]
struct Device {
    /// Kubelet's ID of it.
    id: String,
    /// What it is called towards the runtime.
    name: String,
    numa: Option<u32>,
    /// Its own device nodes.
    nodes: Vec<String>,
}

/// What NVIDIA's plugin shows on a node under a setting.
///
/// # Errors
/// The node's files cannot be read.
pub fn documented(node: &Node, setting: &Setting) -> Result<Facts> {
    let mut facts = Facts::new();
    for (name, devices) in resources(node, setting)? {
        resource(&mut facts, &name, &devices, setting);
    }
    if setting.strategies().iter().any(|strategy| strategy.is_cdi()) {
        specification(&mut facts, node, setting);
    }
    Ok(facts)
}

fn resource(facts: &mut Facts, name: &str, devices: &[Device], setting: &Setting) {
    let resource = format!("nvidia.com/{name}");
    let mut tell = |item: String, value: String| drop(facts.insert(format!("{resource} {item}"), value));
    tell("version".into(), "v1beta1".into());
    tell("socket".into(), format!("nvidia-{name}.sock"));
    for item in ["options", "options, asked"] {
        tell(item.into(), "pre-start false, preferred true".into());
    }
    for device in devices {
        let numa: Vec<u32> = device.numa.into_iter().collect();
        tell(format!("device {}", device.id), format!("healthy true, numa {numa:?}"));
    }
    for size in 1..=devices.len().min(2) {
        tell(format!("prefer {size}"), format!("{size} devices, the one that must be among them: true"));
    }
    let two = &devices[..devices.len().min(2)];
    for (label, some) in [("one", &devices[..1]), ("two", two), ("all", devices)] {
        for (item, value) in allocated(some, setting, &resource) {
            tell(format!("allocate {label}: {item}"), value);
        }
    }
    tell(
        "allocate unknown: refused".into(),
        format!(
            "invalid allocation request for \"{resource}\": invalid request: unknown device: GPU-unknown"
        ),
    );
}

/// Devices by resource, in the order of kubelet's IDs. Whole GPUs may be shared; MIG devices are not here.
fn resources(node: &Node, setting: &Setting) -> Result<BTreeMap<String, Vec<Device>>> {
    let mut resources: BTreeMap<String, Vec<Device>> = BTreeMap::new();
    let state = node.controller().state()?;
    for gpu in &node.hardware().gpus {
        let cut = state.layout(gpu).filter(|mig| mig.enabled);
        let (Some(mig), Some(cut)) = (setting.mig, cut) else {
            whole(&mut resources, gpu, setting);
            continue;
        };
        let minors = minors(node)?;
        let slices = cut.instances.iter().flat_map(|instance| {
            let compute = instance.compute.iter();
            compute.map(move |compute| (instance, compute))
        });
        for (number, (instance, compute)) in slices.enumerate() {
            let name = match mig {
                Mig::Single => "gpu".to_owned(),
                Mig::Mixed => format!("mig-{}", instance.profile.replace('+', ".")),
            };
            let uuid = compute.uuid.to_string();
            let way = format!("gpu{}/gi{}", gpu.minor, instance.id);
            let cap = |way: String| {
                let minor = minors.get(&way).with_context(|| format!("no minor of {way}"))?;
                anyhow::Ok(format!("nvidia-caps/nvidia-cap{minor}"))
            };
            let device = Device {
                name: if setting.index_ids { format!("{}:{number}", gpu.index) } else { uuid.clone() },
                id: uuid,
                numa: gpu.numa,
                nodes: vec![
                    format!("nvidia{}", gpu.minor),
                    cap(format!("{way}/access"))?,
                    cap(format!("{way}/ci{}/access", compute.id))?,
                ],
            };
            resources.entry(name).or_default().push(device);
        }
    }
    for devices in resources.values_mut() {
        devices.sort_unstable_by(|one, other| one.id.cmp(&other.id));
    }
    Ok(resources)
}

fn whole(resources: &mut BTreeMap<String, Vec<Device>>, gpu: &GpuFacts, setting: &Setting) {
    let device = |id: String| Device {
        id,
        name: name(gpu, setting),
        numa: gpu.numa,
        nodes: vec![format!("nvidia{}", gpu.minor)],
    };
    let renamed = setting.sharing.is_some_and(|sharing| sharing.rename);
    let name = if renamed { "gpu.shared" } else { "gpu" };
    let devices = resources.entry(name.to_owned()).or_default();
    match setting.sharing {
        None => devices.push(device(gpu.uuid.clone())),
        Some(sharing) => {
            let replica = |number| device(format!("{}::{number}", gpu.uuid));
            devices.extend((0..sharing.replicas).map(replica));
        }
    }
}

/// The driver's list of the minors of capability nodes, by what each is for.
fn minors(node: &Node) -> Result<BTreeMap<String, u32>> {
    let path = node.proc().join("driver/nvidia-caps/mig-minors");
    let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let entries = text.lines().filter_map(|line| line.split_once(' '));
    entries.map(|(way, minor)| Ok((way.to_owned(), minor.trim().parse()?))).collect()
}

/// What a GPU is called towards the runtime.
fn name(gpu: &GpuFacts, setting: &Setting) -> String {
    if setting.index_ids { gpu.index.to_string() } else { gpu.uuid.clone() }
}

fn allocated(devices: &[Device], setting: &Setting, resource: &str) -> Vec<(&'static str, String)> {
    if devices.len() > 1 && setting.sharing.is_some_and(|sharing| sharing.one_only) {
        let found = devices.len();
        let text = format!(
            "invalid allocation request for \"{resource}\": invalid request: maximum request size for shared \
             resources is 1; found {found}"
        );
        return vec![("refused", text)];
    }
    // Replicas of one GPU are one GPU to the container.
    let mut names: Vec<String> = devices.iter().map(|device| device.name.clone()).collect();
    names.sort_unstable();
    names.dedup();
    let strategies = setting.strategies();
    let has = |strategy| strategies.contains(&strategy);
    let mut answer = Vec::new();
    if has(Strategy::VolumeMounts) {
        answer.push(("env NVIDIA_VISIBLE_DEVICES", MOUNTS.to_owned()));
        let mount = |name: &String| format!("/dev/null on {MOUNTS}/{name}, read-only false");
        let mounts: Vec<String> = names.iter().map(mount).collect();
        answer.push(("mounts", mounts.join(",")));
    } else if has(Strategy::Envvar) {
        answer.push(("env NVIDIA_VISIBLE_DEVICES", names.join(",")));
    }
    if has(Strategy::CdiAnnotations) {
        answer.push(("annotation key", "cdi.k8s.io/nvidia-device-plugin".to_owned()));
        answer.push(("annotation", names.join(",")));
    }
    if has(Strategy::CdiCri) {
        answer.push(("CDI names", names.join(",")));
    }
    if setting.pass_device_specs && strategies.iter().any(|strategy| !strategy.is_cdi()) {
        let control = ["nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools", "nvidiactl"];
        // Two devices of one GPU repeat its node.
        let own = devices.iter().flat_map(|device| device.nodes.iter().cloned());
        let nodes = control.into_iter().map(str::to_owned).chain(own);
        let mut nodes: Vec<String> = nodes.map(|node| format!("/dev/{node} as /dev/{node} rw")).collect();
        let all = nodes.len();
        nodes.sort_unstable();
        nodes.dedup();
        if nodes.len() < all {
            answer.push(("device nodes repeated", "true".to_owned()));
        }
        answer.push(("device nodes", nodes.join(",")));
    }
    answer
}

/// Where the node's driver libraries are, below the driver root.
const LIBRARIES: &str = "/usr/lib/x86_64-linux-gnu";

/// The CDI specification of whole GPUs. The libraries that it mounts are the machine's, and are left out here.
fn specification(facts: &mut Facts, node: &Node, setting: &Setting) {
    let mut tell = |item: &str, value: String| drop(facts.insert(format!("CDI {item}"), value));
    tell("kind", CDI_KIND.to_owned());
    tell("file", format!("{}.json", CDI_KIND.replace('/', "-")));
    tell("env NVIDIA_VISIBLE_DEVICES", "void".to_owned());
    tell("env NVIDIA_CTK_LIBCUDA_DIR", LIBRARIES.to_owned());
    let control = ["/dev/nvidia-modeset", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidiactl"];
    tell("common device nodes", control.join(","));
    for gpu in &node.hardware().gpus {
        tell(&format!("device {}", name(gpu, setting)), format!("/dev/nvidia{}", gpu.minor));
    }
}
