//! Writes a topology text: as nvidia-smi writes it today, tab for tab, or with columns aligned for a terminal. Nothing is
//! inferred or left out, so that what is written reads back as the same text.

use std::fmt;

use super::TopoText;
use super::words::Title;
use crate::machine::{IdList, Link, PathClass};

/// Meanings of the link names, in nvidia-smi's words and order.
const LEGEND: [(&str, &str); 7] = [
    ("X", "Self"),
    (
        "SYS",
        "Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)",
    ),
    (
        "NODE",
        "Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node",
    ),
    (
        "PHB",
        "Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)",
    ),
    (
        "PXB",
        "Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)",
    ),
    ("PIX", "Connection traversing at most a single PCIe bridge"),
    ("NV#", "Connection traversing a bonded set of # NVLinks"),
];

/// What old drivers wrote for SYS.
const OLD_LEGEND: (&str, &str) = (
    "SOC",
    "Connection traversing PCIe as well as the SMP link between CPU sockets (e.g. QPI)",
);

impl fmt::Display for TopoText {
    /// As `nvidia-smi topo -m` writes it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(found) = self.nics_found {
            let shown = self.nics.len();
            writeln!(
                f,
                "{found} NICs found in the topology, only displaying {shown} in the matrix."
            )?;
        }
        for index in 0..self.links.len() {
            write!(f, "\t{}", self.device_name(index))?;
        }
        for title in Title::ALL {
            write!(f, "\t{}", title.as_str())?;
        }
        writeln!(f)?;
        for (index, row) in self.links.iter().enumerate() {
            f.write_str(&self.device_name(index))?;
            for link in row {
                match link {
                    Link::Itself => f.write_str("\t X ")?,
                    link => write!(f, "\t{link}")?,
                }
            }
            match self.gpus.get(index) {
                Some(gpu) => {
                    let cpus = gpu.cpus.as_ref().map_or("", IdList::as_str);
                    let numa = gpu.numa.as_ref().map_or("N/A", IdList::as_str);
                    let memory_numa = gpu.memory_numa.as_ref().map_or("N/A", IdList::as_str);
                    writeln!(f, "\t{cpus}\t{numa}\t\t{memory_numa}")?;
                }
                None => writeln!(f, "\t\t\t\t")?,
            }
        }
        self.write_legends(f)
    }
}

impl TopoText {
    /// The name that heads a device's column.
    pub(super) fn device_name(&self, index: usize) -> String {
        match index
            .checked_sub(self.gpus.len())
            .and_then(|nic| self.nics.get(nic))
        {
            Some(nic) => nic.name.clone(),
            None => format!("GPU{index}"),
        }
    }

    fn write_legends(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("\nLegend:\n\n")?;
        for (name, meaning) in LEGEND {
            writeln!(f, "  {name:<4} = {meaning}")?;
            if name == "X"
                && self
                    .links
                    .iter()
                    .flatten()
                    .any(|link| *link == Link::Pcie(PathClass::Soc))
            {
                writeln!(f, "  {:<4} = {}", OLD_LEGEND.0, OLD_LEGEND.1)?;
            }
        }
        if self.nics.iter().any(|nic| nic.device.is_some()) {
            f.write_str("\nNIC Legend:\n\n")?;
            for nic in &self.nics {
                writeln!(
                    f,
                    "  {}: {}",
                    nic.name,
                    nic.device.as_deref().unwrap_or(&nic.name)
                )?;
            }
        }
        Ok(())
    }

    /// The matrix for a terminal: columns aligned, no legend, columns that say nothing left out.
    pub fn aligned(&self) -> String {
        let shown = |title: Title| {
            let value = move |index: usize| self.gpus.get(index).and_then(|gpu| gpu.value(title));
            (0..self.gpus.len())
                .any(|index| value(index).is_some())
                .then_some((title, value))
        };
        let tail: Vec<_> = Title::ALL.into_iter().filter_map(shown).collect();
        let mut table: Vec<Vec<String>> = Vec::with_capacity(self.links.len() + 1);
        let names = (0..self.links.len()).map(|index| self.device_name(index));
        let titles = tail.iter().map(|(title, _)| title.as_str().to_owned());
        table.push(
            std::iter::once(String::new())
                .chain(names)
                .chain(titles)
                .collect(),
        );
        for (index, row) in self.links.iter().enumerate() {
            let mut cells = vec![self.device_name(index)];
            cells.extend(row.iter().map(Link::to_string));
            if index < self.gpus.len() {
                let values = tail.iter().map(|(_, value)| value(index));
                cells.extend(values.map(|value| value.map_or("N/A", IdList::as_str).to_owned()));
            }
            table.push(cells);
        }
        let columns = table.first().map_or(0, Vec::len);
        let widths: Vec<usize> = (0..columns)
            .map(|column| {
                table
                    .iter()
                    .filter_map(|row| row.get(column))
                    .map(String::len)
                    .max()
                    .unwrap_or(0)
            })
            .collect();
        let mut text = String::new();
        for row in table {
            let cells: Vec<String> = row
                .iter()
                .zip(&widths)
                .map(|(cell, width)| format!("{cell:<width$}"))
                .collect();
            text.push_str(cells.join("  ").trim_end());
            text.push('\n');
        }
        text
    }
}
