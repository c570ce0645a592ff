//! The text output of `gantry topo`: the picture, the matrix on request, and lists of NVLinks, MIG instances, NUMA nodes and NICs.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use gantry_smi::TopoText;
use gantry_topology::bandwidth::LinkRate;
use gantry_topology::draw::Picture;
use gantry_topology::machine::GpuInstance;
use gantry_topology::{GpuSet, IdList, Machine, Nic, PathClass, Rates};

use super::Screen;
use super::source::{Complaint, SourceData, warnings};

/// The whole report; the matrix is wide, and part of it on request.
pub(super) fn report(seen: &SourceData, screen: Screen, matrix: bool) -> String {
    let machine = &seen.machine;
    let picture = Picture::of(machine).columns(screen.columns).color(screen.color);
    let mut sections = vec![String::new()];
    let mut section = |title: &str, body: String| {
        if !body.is_empty() {
            let title = if screen.color { format!("\u{1b}[1m{title}\u{1b}[0m") } else { title.to_owned() };
            sections.push(format!("{title}\n{body}"));
        }
    };
    section("Health", seen.complaints.as_ref().map(health).unwrap_or_default());
    section("Warnings", lines(warnings(machine)));
    section("Degraded", lines(degraded(machine)));
    if matrix {
        section("Links", TopoText::from(machine).aligned());
    }
    section("NVLink", nvlink(machine));
    section("MIG", mig(machine));
    section("NUMA", numa(machine));
    section("NICs", nics(machine));
    format!("{picture}{}", sections.join("\n"))
}

fn health(complaints: &BTreeSet<Complaint>) -> String {
    if complaints.is_empty() {
        return "  nothing is known to be wrong\n".to_owned();
    }
    let mut text = String::new();
    for complaint in complaints {
        let part = complaint.profile.as_ref().map(|profile| format!(" {profile}")).unwrap_or_default();
        let since = complaint.since.as_ref().map(|since| format!(", since {since}")).unwrap_or_default();
        let _ = writeln!(text, "  GPU{}{part}  {}{since}", complaint.gpu, complaint.reason);
    }
    text
}

/// What GPUs and pairs of them lack.
fn degraded(machine: &Machine) -> Vec<String> {
    let of_gpu =
        |gpu: usize| machine.degradations(gpu).into_iter().map(move |lack| format!("GPU{gpu}  {lack}"));
    let pairs = machine.no_peer_access().iter().map(|refusal| {
        let [a, b] = refusal.gpus;
        format!("GPU{a} to GPU{b}  no peer-to-peer access: {}", refusal.status)
    });
    (0..machine.gpus().len()).flat_map(of_gpu).chain(pairs).collect()
}

fn nvlink(machine: &Machine) -> String {
    let rates = Rates::of(machine);
    let mut switched: BTreeMap<(Reverse<u8>, u8), Vec<usize>> = BTreeMap::new();
    for gpu in 0..machine.gpus().len() {
        let links = machine.switch_links(gpu);
        if links > 0 {
            let island = machine.switch_island(gpu);
            switched.entry((Reverse(links), island)).or_default().push(gpu);
        }
    }
    let mut lines: Vec<(String, u8, LinkRate)> = switched
        .into_iter()
        .map(|((Reverse(links), _), gpus)| {
            let rate = gpus.first().map_or(LinkRate::default(), |gpu| rates.nvlink_of(*gpu));
            (format!("{} to NVSwitch", gpu_list(&gpus)), links, rate)
        })
        .collect();
    for bundle in machine.nvlinks() {
        let [a, b] = bundle.gpus.map(usize::from);
        let rate = rates.nvlink_of(a).min(rates.nvlink_of(b));
        lines.push((format!("GPU{a} to GPU{b}"), bundle.links, rate));
    }
    let width = lines.iter().map(|(ends, _, _)| ends.chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for (ends, links, rate) in lines {
        let rate = rate.times(u32::from(links));
        let [effective, raw] = [rate.effective, rate.raw].map(|mbs| f64::from(mbs) / 1000.0);
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "  {ends:<width$}  NV{links:<2}  {effective} GB/s per direction ({raw} by the data sheet)"
        );
    }
    text
}

fn lines(lines: Vec<String>) -> String {
    lines.into_iter().map(|line| format!("  {line}\n")).collect()
}

/// The layouts of the GPUs with MIG on.
fn mig(machine: &Machine) -> String {
    let layouts = machine.gpus().iter().filter_map(|gpu| {
        let mig = gpu.mig.as_ref().filter(|mig| mig.enabled)?;
        let instances: Vec<String> = mig.instances.iter().map(instance).collect();
        let instances =
            if instances.is_empty() { "on, without instances".to_owned() } else { instances.join(", ") };
        Some(format!("GPU{}  {instances}", gpu.index))
    });
    lines(layouts.collect())
}

/// `3g.20gb at 4`; with its MIG devices where it is not one of its own size.
fn instance(instance: &GpuInstance) -> String {
    let place = format!("{} at {}", instance.profile, instance.start);
    match instance.compute.as_slice() {
        [only] if only.profile == instance.profile => place,
        [] => format!("{place} (no MIG device)"),
        several => {
            let profiles: Vec<&str> = several.iter().map(|compute| compute.profile.as_str()).collect();
            format!("{place} ({})", profiles.join(", "))
        }
    }
}

fn numa(machine: &Machine) -> String {
    let nodes = machine.numa_nodes().into_iter();
    let nodes: Vec<(&str, GpuSet)> =
        nodes.map(|(node, gpus)| (node.map_or("unknown", IdList::as_str), gpus)).collect();
    let width = nodes.iter().map(|(node, _)| node.len()).max().unwrap_or(0);
    let mut text = String::new();
    for (node, gpus) in nodes {
        let _ = writeln!(text, "  node {node:<width$}  {}", gpu_list(&gpus.iter().collect::<Vec<_>>()));
    }
    text
}

fn nics(machine: &Machine) -> String {
    let name = |nic: &Nic| match &nic.device {
        Some(device) if *device != nic.name => format!("{} ({device})", nic.name),
        _ => nic.name.clone(),
    };
    let width = machine.nics().iter().map(|nic| name(nic).chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for (index, nic) in machine.nics().iter().enumerate() {
        let gpus = machine.gpus().len();
        let class = |gpu: usize| machine.paths().get(gpu, gpus + index);
        let nearest = (0..gpus).map(class).min().filter(|class| !class.crosses_sockets());
        let near = match nearest {
            Some(nearest) => near_gpus(nearest, (0..gpus).filter(|gpu| class(*gpu) == nearest)),
            None => "near no GPU".to_owned(),
        };
        let _ = writeln!(text, "  {:<width$}  {near}", name(nic));
    }
    text
}

fn near_gpus(class: PathClass, gpus: impl Iterator<Item = usize>) -> String {
    format!("{class} to {}", gpu_list(&gpus.collect::<Vec<_>>()))
}

fn gpu_list(gpus: &[usize]) -> String {
    let names: Vec<String> = gpus.iter().map(|gpu| format!("GPU{gpu}")).collect();
    match names.as_slice() {
        [first, .., last]
            if names.len() > 2 && gpus.windows(2).all(|pair| matches!(*pair, [a, b] if b == a + 1)) =>
        {
            format!("{first}-{}", last.trim_start_matches("GPU"))
        }
        names => names.join(" "),
    }
}
