//! Prints a topology text as nvidia-smi prints it, tab for tab, to test that it is read back as the same text.

use std::fmt::Write as _;

use gantry_smi::TopoText;
use gantry_topology::{IdList, Link, PathClass};

/// The legend, in nvidia-smi's words and order.
const LEGEND: [(&str, &str); 7] = [
    ("X", "Self"),
    ("SYS", "Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)"),
    (
        "NODE",
        "Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node",
    ),
    ("PHB", "Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)"),
    ("PXB", "Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)"),
    ("PIX", "Connection traversing at most a single PCIe bridge"),
    ("NV#", "Connection traversing a bonded set of # NVLinks"),
];

/// The entry of old drivers for SYS.
const OLD_LEGEND: (&str, &str) =
    ("SOC", "Connection traversing PCIe as well as the SMP link between CPU sockets (e.g. QPI)");

/// The output of `nvidia-smi topo -m` with the content of `text`.
pub(crate) fn printed(text: &TopoText) -> String {
    let mut out = String::new();
    if let Some(found) = text.nics_found() {
        let shown = text.nics().len();
        writeln!(out, "{found} NICs found in the topology, only displaying {shown} in the matrix.").unwrap();
    }
    let gpus = (0..text.gpus().len()).map(|gpu| format!("GPU{gpu}"));
    let names: Vec<String> = gpus.chain(text.nics().iter().map(|nic| nic.name.clone())).collect();
    for title in names.iter().map(String::as_str).chain(["CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]) {
        write!(out, "\t{title}").unwrap();
    }
    out.push('\n');
    for (index, (name, row)) in names.iter().zip(text.links()).enumerate() {
        out.push_str(name);
        for link in row {
            match link {
                Link::Itself => out.push_str("\t X "),
                link => write!(out, "\t{link}").unwrap(),
            }
        }
        match text.gpus().get(index) {
            Some(gpu) => {
                let cpus = gpu.cpus.as_ref().map_or("", IdList::as_str);
                let numa = gpu.numa.as_ref().map_or("N/A", IdList::as_str);
                let memory_numa = gpu.memory_numa.as_ref().map_or("N/A", IdList::as_str);
                writeln!(out, "\t{cpus}\t{numa}\t\t{memory_numa}").unwrap();
            }
            None => out.push_str("\t\t\t\t\n"),
        }
    }
    out.push_str("\nLegend:\n\n");
    let is_old = text.links().iter().flatten().any(|link| *link == Link::Pcie(PathClass::Soc));
    for (name, meaning) in LEGEND {
        writeln!(out, "  {name:<4} = {meaning}").unwrap();
        if name == "X" && is_old {
            writeln!(out, "  {:<4} = {}", OLD_LEGEND.0, OLD_LEGEND.1).unwrap();
        }
    }
    if text.nics().iter().any(|nic| nic.device.is_some()) {
        out.push_str("\nNIC Legend:\n\n");
        for nic in text.nics() {
            writeln!(out, "  {}: {}", nic.name, nic.device.as_deref().unwrap_or(&nic.name)).unwrap();
        }
    }
    out
}
