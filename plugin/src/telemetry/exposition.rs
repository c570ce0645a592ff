//! The samples as text in the Prometheus format 0.0.4, with the labels of dcgm-exporter.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use gantry_topology::{GpuUuid, Machine, PcieAddress};

use super::field::{Field, Values};
use super::reader::GpuSample;
use crate::handover::{Holding, Listing};

/// What the labels are taken from.
#[derive(Debug, Clone, Copy)]
pub struct Labels<'a> {
    /// Name of the node.
    pub host: &'a str,
    pub machine: &'a Machine,
    /// The devices that containers hold; `None` to name no pod.
    pub holders: Option<&'a Listing>,
}

/// The last Xid of each GPU, with its meaning.
pub type LastXids = BTreeMap<GpuUuid, (u64, String)>;

/// The text of all samples. `xids` is `None` if Xids are not watched.
pub fn exposition(samples: &[GpuSample], labels: &Labels<'_>, xids: Option<&LastXids>) -> String {
    let holders = labels.holders.map(sole_holders).unwrap_or_default();
    let series: Vec<(String, &Values)> =
        samples.iter().flat_map(|sample| series(sample, labels, &holders)).collect();
    let mut text = String::new();
    for field in Field::ALL {
        let mut lines = String::new();
        match (field, xids) {
            (Field::Xid, Some(xids)) => {
                for (sample, labels) in
                    samples.iter().map(|sample| (sample, gpu_labels(sample, labels, &holders)))
                {
                    let none = (0, "No Error".to_owned());
                    let (xid, meaning) = xids.get(&sample.uuid).unwrap_or(&none);
                    let meaning = escaped(meaning);
                    // Writing to a String cannot fail, here and below.
                    _ = writeln!(
                        lines,
                        "{}{{{labels},err_code=\"{xid}\",err_msg=\"{meaning}\"}} {xid}",
                        field.name()
                    );
                }
            }
            _ => {
                for (labels, values) in &series {
                    if let Some(value) = values.get(*field) {
                        _ = writeln!(lines, "{}{{{labels}}} {value}", field.name());
                    }
                }
            }
        }
        if !lines.is_empty() {
            let (name, kind, help) = (field.name(), field.kind(), field.help());
            _ = write!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n{lines}");
        }
    }
    text
}

/// The labels and values of a GPU and its GPU instances.
fn series<'a>(
    sample: &'a GpuSample,
    labels: &Labels<'_>,
    holders: &BTreeMap<&str, Option<&Holding>>,
) -> Vec<(String, &'a Values)> {
    let gpu = labels.machine.gpus().iter().find(|gpu| gpu.uuid.as_ref() == Some(&sample.uuid));
    let instances = gpu.and_then(|gpu| gpu.mig.as_ref()).map_or(&[][..], |mig| &mig.instances);
    let of_instances = sample.instances.iter().map(|(id, values)| {
        let mut text = board_labels(sample, labels);
        let instance = instances.iter().find(|instance| instance.id == *id);
        if let Some(instance) = instance {
            push(&mut text, "GPU_I_PROFILE", &instance.profile);
        }
        push(&mut text, "GPU_I_ID", &id.to_string());
        let devices = instance.map_or(&[][..], |instance| &instance.compute).iter();
        push_holder(&mut text, devices.map(|device| device.uuid.as_str()), holders);
        (text, values)
    });
    std::iter::once((gpu_labels(sample, labels, holders), &sample.gpu)).chain(of_instances).collect()
}

fn gpu_labels(sample: &GpuSample, labels: &Labels<'_>, holders: &BTreeMap<&str, Option<&Holding>>) -> String {
    let mut text = board_labels(sample, labels);
    push_holder(&mut text, std::iter::once(sample.uuid.as_str()), holders);
    text
}

fn board_labels(sample: &GpuSample, labels: &Labels<'_>) -> String {
    let gpu = labels.machine.gpus().iter().find(|gpu| gpu.uuid.as_ref() == Some(&sample.uuid));
    let index = sample.index.to_string();
    let mut text = String::new();
    push(&mut text, "gpu", &index);
    push(&mut text, "UUID", sample.uuid.as_str());
    let bus_id = gpu.and_then(|gpu| gpu.bus_id.as_ref()).map(nvml_form).unwrap_or_default();
    push(&mut text, "pci_bus_id", &bus_id);
    push(&mut text, "device", &format!("nvidia{index}"));
    push(&mut text, "modelName", gpu.and_then(|gpu| gpu.model.as_deref()).unwrap_or_default());
    push(&mut text, "Hostname", labels.host);
    if let Some(driver) = &labels.machine.host().driver {
        push(&mut text, "DCGM_FI_DRIVER_VERSION", driver);
    }
    text
}

/// Adds the container that alone holds the devices. Values of a GPU or GPU instance that several containers share are
/// attributed to none of them.
fn push_holder<'a>(
    text: &mut String,
    devices: impl Iterator<Item = &'a str>,
    holders: &BTreeMap<&str, Option<&Holding>>,
) {
    let mut found: Option<&Holding> = None;
    for holder in devices.filter_map(|device| holders.get(device)) {
        match (holder, found) {
            (Some(holder), None) => found = Some(holder),
            (Some(holder), Some(other)) if is_same(holder, other) => {}
            _ => return,
        }
    }
    if let Some(Holding { namespace, pod, container, .. }) = found {
        push(text, "container", container);
        push(text, "namespace", namespace);
        push(text, "pod", pod);
    }
}

/// The container that holds each device, by its UUID; `None` for a device that several hold.
fn sole_holders(listing: &Listing) -> BTreeMap<&str, Option<&Holding>> {
    let mut holders: BTreeMap<&str, Option<&Holding>> = BTreeMap::new();
    for (holding, devices) in &listing.0 {
        for device in devices {
            let holder = holders.entry(device.unit()).or_insert(Some(holding));
            if holder.is_some_and(|other| !is_same(holding, other)) {
                *holder = None;
            }
        }
    }
    holders
}

fn is_same(one: &Holding, other: &Holding) -> bool {
    (&one.namespace, &one.pod, &one.container) == (&other.namespace, &other.pod, &other.container)
}

/// A PCIe address as NVML and dcgm-exporter write it: `00000000:07:00.0`.
fn nvml_form(address: &PcieAddress) -> String {
    let text = address.as_str().to_ascii_uppercase();
    match text.split_once(':') {
        Some((domain, rest)) => format!("{domain:0>8}:{rest}"),
        None => text,
    }
}

fn push(text: &mut String, label: &str, value: &str) {
    let comma = if text.is_empty() { "" } else { "," };
    _ = write!(text, "{comma}{label}=\"{}\"", escaped(value));
}

fn escaped(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n")
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use gantry_api::DeviceId;
    use gantry_topology::{Gpu, MachineParts, PathClass, PathMatrix};

    use super::*;

    fn machine() -> Machine {
        let gpu = Gpu {
            uuid: "GPU-0".parse().ok(),
            bus_id: "0000:3b:00.0".parse().ok(),
            model: Some("A \"quoted\" \\ name".to_owned()),
            ..Gpu::default()
        };
        let paths = PathMatrix::from_fn(1, |_, _| PathClass::Sys);
        Machine::new(MachineParts { gpus: vec![gpu], paths, ..MachineParts::default() }).unwrap()
    }

    fn sample() -> GpuSample {
        let mut gpu = Values::default();
        gpu.set(Field::Celsius, 40.0);
        let uuid = "GPU-0".parse().unwrap();
        GpuSample { index: 0, uuid, taken: Instant::now(), gpu, instances: BTreeMap::new() }
    }

    fn held(by: &[(&str, &str, &str)]) -> Listing {
        let holding = |(pod, container, resource): &(&str, &str, &str)| Holding {
            namespace: "ml".to_owned(),
            pod: (*pod).to_owned(),
            container: (*container).to_owned(),
            resource: (*resource).into(),
        };
        let devices = |number: usize| [DeviceId::from(format!("GPU-0::{number}").as_str())].into();
        Listing(by.iter().enumerate().map(|(number, by)| (holding(by), devices(number))).collect())
    }

    fn text(holders: Option<&Listing>) -> String {
        exposition(&[sample()], &Labels { host: "n", machine: &machine(), holders }, None)
    }

    #[test]
    fn labels_are_escaped_and_addresses_in_nvml_form() {
        let line = "DCGM_FI_DEV_GPU_TEMP{gpu=\"0\",UUID=\"GPU-0\",pci_bus_id=\"00000000:3B:00.0\",device=\"nvidia0\",\
                    modelName=\"A \\\"quoted\\\" \\\\ name\",Hostname=\"n\"} 40";
        assert_eq!(text(None).lines().last().unwrap(), line);
    }

    /// A value that two containers share belongs to neither; two resources of one container are one holder.
    #[test]
    fn only_a_sole_holder_is_named() {
        let sole = held(&[("a", "main", "nvidia.com/gpu")]);
        let holder = "container=\"main\",namespace=\"ml\",pod=\"a\"";
        assert!(text(Some(&sole)).contains(holder));
        assert!(!text(None).contains("pod="));
        let shared = held(&[("a", "main", "nvidia.com/gpu"), ("b", "main", "nvidia.com/gpu")]);
        assert!(!text(Some(&shared)).contains("pod="));
        let same = held(&[("a", "main", "nvidia.com/gpu"), ("a", "main", "nvidia.com/other")]);
        assert!(text(Some(&same)).contains(holder));
    }
}
