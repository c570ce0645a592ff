//! What NVIDIA's k8s-device-plugin 0.20.0 does towards kubelet, as its documentation and its source say: the referee where its
//! program is not at hand, and held against the program where it is. Written from those facts alone, not from Gantry's code.

use gantry_nvml_sim::facts::{Facts as Hardware, GpuFacts};

use super::facts::Facts;
use super::setting::{Setting, Strategy};

/// Vendor and class of the CDI devices; the vendor keeps them apart from those of NVIDIA's container toolkit.
const CDI_KIND: &str = "k8s.device-plugin.nvidia.com/gpu";
/// What a container's device list is called where it is told by mounts.
const MOUNTS: &str = "/var/run/nvidia-container-devices";

/// What NVIDIA's plugin shows on whole GPUs under a setting.
pub fn documented(hardware: &Hardware, setting: &Setting) -> Facts {
    let mut facts = Facts::new();
    let renamed = setting.sharing.is_some_and(|sharing| sharing.rename);
    let name = if renamed { "gpu.shared" } else { "gpu" };
    let resource = format!("nvidia.com/{name}");
    let mut tell = |item: String, value: String| drop(facts.insert(format!("{resource} {item}"), value));
    tell("version".into(), "v1beta1".into());
    tell("socket".into(), format!("nvidia-{name}.sock"));
    for item in ["options", "options, asked"] {
        tell(item.into(), "pre-start false, preferred true".into());
    }
    let devices = devices(hardware, setting);
    for (id, gpu) in &devices {
        let numa: Vec<u32> = gpu.numa.into_iter().collect();
        tell(format!("device {id}"), format!("healthy true, numa {numa:?}"));
    }
    for size in [1, 2] {
        tell(
            format!("prefer {size}"),
            format!("{size} devices, the one that must be among them: true"),
        );
    }
    let two = &devices[..devices.len().min(2)];
    for (label, some) in [("one", &devices[..1]), ("two", two), ("all", &devices)] {
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
    if setting.strategies().iter().any(|strategy| strategy.is_cdi()) {
        specification(&mut facts, hardware, setting);
    }
    facts
}

/// Kubelet's IDs, in order, each with its GPU.
fn devices<'a>(hardware: &'a Hardware, setting: &Setting) -> Vec<(String, &'a GpuFacts)> {
    let mut devices = Vec::new();
    for gpu in &hardware.gpus {
        match setting.sharing {
            None => devices.push((gpu.uuid.clone(), gpu)),
            Some(sharing) => {
                devices.extend((0..sharing.replicas).map(|number| (format!("{}::{number}", gpu.uuid), gpu)));
            }
        }
    }
    devices.sort_unstable_by(|one, other| one.0.cmp(&other.0));
    devices
}

/// What a GPU is called towards the runtime.
fn name(gpu: &GpuFacts, setting: &Setting) -> String {
    if setting.index_ids {
        gpu.index.to_string()
    } else {
        gpu.uuid.clone()
    }
}

fn allocated(
    devices: &[(String, &GpuFacts)],
    setting: &Setting,
    resource: &str,
) -> Vec<(&'static str, String)> {
    if devices.len() > 1 && setting.sharing.is_some_and(|sharing| sharing.one_only) {
        let found = devices.len();
        let text = format!(
            "invalid allocation request for \"{resource}\": invalid request: maximum request size for shared resources is 1; found {found}"
        );
        return vec![("refused", text)];
    }
    // Replicas of one GPU are one GPU to the container.
    let mut names: Vec<String> = devices.iter().map(|(_, gpu)| name(gpu, setting)).collect();
    names.sort_unstable();
    names.dedup();
    let strategies = setting.strategies();
    let has = |strategy| strategies.contains(&strategy);
    let mut answer = Vec::new();
    if has(Strategy::VolumeMounts) {
        answer.push(("env NVIDIA_VISIBLE_DEVICES", MOUNTS.to_owned()));
        let mounts: Vec<String> = names
            .iter()
            .map(|name| format!("/dev/null on {MOUNTS}/{name}, read-only false"))
            .collect();
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
        // Two replicas of one GPU repeat its node.
        let own = devices.iter().map(|(_, gpu)| format!("nvidia{}", gpu.minor));
        let mut nodes: Vec<String> = control.into_iter().map(str::to_owned).chain(own).collect();
        nodes.sort_unstable();
        let nodes = nodes.iter().map(|node| format!("/dev/{node} as /dev/{node} rw"));
        answer.push(("device nodes", nodes.collect::<Vec<_>>().join(",")));
    }
    answer
}

/// The CDI specification. The libraries that it mounts are the machine's, and are left out here.
fn specification(facts: &mut Facts, hardware: &Hardware, setting: &Setting) {
    let mut tell = |item: &str, value: String| drop(facts.insert(format!("CDI {item}"), value));
    tell("kind", CDI_KIND.to_owned());
    tell("file", format!("{}.json", CDI_KIND.replace('/', "-")));
    tell("env NVIDIA_VISIBLE_DEVICES", "void".to_owned());
    let control = [
        "/dev/nvidia-modeset",
        "/dev/nvidia-uvm",
        "/dev/nvidia-uvm-tools",
        "/dev/nvidiactl",
    ];
    tell("common device nodes", control.join(","));
    for gpu in &hardware.gpus {
        tell(
            &format!("device {}", name(gpu, setting)),
            format!("/dev/nvidia{}", gpu.minor),
        );
    }
}
