//! Forms of the text that no recorded file has, and the messages of refused texts.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

#[path = "support/print.rs"]
mod print;

use gantry_smi::{GpuLine, Hints, TopoProblem, TopoText, read_machine};
use gantry_topology::{Gpu, IdList, Link, Machine, MachineParts, Nic, PathClass, PathMatrix};

use print::printed;

fn read(text: &str) -> TopoText {
    TopoText::parse(text).unwrap_or_else(|problem| panic!("{problem}\n{text}"))
}

fn link(text: &TopoText, a: usize, b: usize) -> String {
    text.links()[a][b].to_string()
}

/// CPU list, NUMA nodes, memory's NUMA node of each GPU, `-` where unknown.
fn values(text: &TopoText) -> Vec<[&str; 3]> {
    let shown = |value: &Option<IdList>| value.as_ref().map_or("-", |list| list.as_str()).to_owned();
    let line = |gpu: &GpuLine| [shown(&gpu.cpus), shown(&gpu.numa), shown(&gpu.memory_numa)];
    text.gpus().iter().map(|gpu| line(gpu).map(|value| &*Box::leak(value.into_boxed_str()))).collect()
}

#[test]
fn single_gpu_without_values_is_read() {
    let alone = read("GPU0\nGPU0 X\n");
    assert_eq!((alone.gpus().len(), alone.nics().len()), (1, 0));
    assert_eq!(values(&alone), [["-", "-", "-"]]);
}

#[test]
fn single_gpu_without_affinity_is_read() {
    let alone = read("\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t\t\t\tN/A\n");
    assert_eq!(values(&alone), [["-", "-", "-"]]);
}

/// With several rows, the others show that values are missing; here there is none.
#[test]
fn single_row_with_missing_last_value_is_refused() {
    let whole = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t16-31,48-63\t1\t\tN/A";
    assert_eq!(values(&read(whole)), [["16-31,48-63", "1", "-"]]);
    assert_eq!(values(&read(&format!("{whole}\n"))), [["16-31,48-63", "1", "-"]]);
    for cut in ["GPU0\t X ", "\t16", "\t16-31,48-63", "\t1"] {
        let text = &whole[..whole.rfind(cut).unwrap() + cut.len()];
        let refused = TopoText::parse(text).unwrap_err();
        assert_eq!(refused.line, 2, "{text:?}: {refused}");
    }
}

#[test]
fn memory_numa_node_is_read() {
    let grace = read("\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-71\t0\t\t1\n");
    assert_eq!(values(&grace), [["0-71", "0", "1"]]);
    let machine = read_machine(&printed(&grace)).unwrap();
    assert_eq!(machine.gpus()[0].memory_numa, Some(1));
}

#[test]
fn memory_numa_node_alone_is_read() {
    let text = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n\
                GPU0\t X \tNV6\t\t\t\t2\nGPU1\tNV6\t X \t\t\t\t10\n";
    assert_eq!(values(&read(text)), [["-", "-", "2"], ["-", "-", "10"]]);
}

#[test]
fn lists_with_memory_nodes_of_gpus_locate_sockets() {
    let lists = |lists: [&str; 4]| {
        let cpus = ["0-71", "0-71", "72-143", "72-143"];
        let mut text = "\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\n".to_owned();
        for gpu in 0..4 {
            let cells: Vec<&str> = (0..4).map(|other| if other == gpu { "X" } else { "NV18" }).collect();
            text.push_str(&format!("GPU{gpu}\t{}\t{}\t{}\n", cells.join("\t"), cpus[gpu], lists[gpu]));
        }
        let machine = read_machine(&text).unwrap();
        let pairs = [(0, 1), (0, 2), (2, 3)];
        pairs.map(|(a, b)| machine.paths().get(a, b).as_str())
    };
    let apart = ["NODE", "SYS", "NODE"];
    assert_eq!(lists(["0", "0", "1", "1"]), apart);
    assert_eq!(lists(["0,2-17", "0,2-17", "1,18-33", "1,18-33"]), apart);
    assert_eq!(lists(["0-1", "0-1", "0-1", "0-1"]), ["SYS", "SYS", "SYS"], "that tells nothing");
}

#[test]
fn nics_of_other_vendors_are_read() {
    for name in [
        "hfi1_0",
        "bnxt_re0",
        "irdma0",
        "rocep23s0f0",
        "ibp5s0",
        "rdmap16s27",
        "efa_0",
        "mlx5_bond_0",
        "mlx5_GPU0",
    ] {
        let text = read(&format!("\tGPU0\t{name}\tCPU Affinity\nGPU0\t X \tPIX\t0-7\n{name}\tPIX\t X \t\n"));
        assert_eq!(text.nics()[0].name, name);
        assert_eq!(link(&text, 1, 0), "PIX");
    }
}

#[test]
fn sixteen_gpus_with_two_digits_are_read() {
    let names: Vec<String> = (0..16).map(|gpu| format!("GPU{gpu}")).collect();
    let mut text = format!("\t{}\tCPU Affinity\n", names.join("\t"));
    for row in 0..16 {
        let cells: Vec<&str> = (0..16).map(|column| if row == column { " X " } else { "NV6" }).collect();
        text.push_str(&format!("GPU{row}\t{}\t0-23,48-71\n", cells.join("\t")));
    }
    let dgx2 = read(&text);
    assert_eq!(dgx2.gpus().len(), 16);
    assert_eq!(read(&text.replace("\tGPU", "GPU").replacen("GPU0", "\tGPU0", 1)), dgx2);
    let machine = read_machine(&text).unwrap();
    assert_eq!((machine.switch_links(15), machine.nvlinks().len()), (6, 0));
}

#[test]
fn glued_label_link_and_value_are_separated() {
    let plain =
        read("GPU0 GPU1 NIC0 CPU Affinity\nGPU0 X NV2 SYS 0-7\nGPU1 NV2 X NODE 8-15\nNIC0 SYS NODE X\n");
    let glued = read("GPU0GPU1NIC0CPU Affinity\nGPU0 XNV2SYS0-7\nGPU1NV2XNODE 8-15\nNIC0SYSNODEX\n");
    assert_eq!(glued, plain);
}

#[test]
fn glued_nic_names_are_separated() {
    let text = read("GPU0mlx5_0mlx5_1CPU Affinity\nGPU0 X PIX SYS 0-7\nmlx5_0 PIX X SYS\nmlx5_1 SYS SYS X\n");
    assert_eq!(text.nics()[1].name, "mlx5_1");
}

#[test]
fn titles_in_other_spellings_are_read() {
    for header in [
        "GPU0 CPUAffinity NUMAAffinity GPU NUMA ID",
        "GPU0 CPU AFFINITY CPU NUMA Affinity GPU NUMA ID",
        "GPU0\tcpu affinity\tNuma  Affinity\tGPU  NUMA  ID",
    ] {
        assert_eq!(values(&read(&format!("{header}\nGPU0 X 0-7 0 N/A\n"))), [["0-7", "0", "-"]]);
    }
}

#[test]
fn gpu_with_lost_links_is_on_pcie() {
    let names: Vec<String> = (0..8).map(|gpu| format!("GPU{gpu}")).collect();
    let mut text = format!("{}\n", names.join(" "));
    for row in 0..8 {
        let cell = |column| match (row, column) {
            (a, b) if a == b => "X",
            (2, _) | (_, 2) => "NODE",
            _ => "NV18",
        };
        let cells: Vec<&str> = (0..8).map(cell).collect();
        text.push_str(&format!("GPU{row} {}\n", cells.join(" ")));
    }
    let machine = read_machine(&text).unwrap();
    let links: Vec<u8> = (0..8).map(|gpu| machine.switch_links(gpu)).collect();
    assert_eq!(links, [18, 18, 0, 18, 18, 18, 18, 18]);
    assert_eq!(machine.link(2, 3), Link::Pcie(PathClass::Node));
}

#[test]
fn separate_nvswitch_islands_have_no_links_between() {
    for (gpus, island, links) in [(8, 4, 18), (16, 8, 6), (8, 4, 12)] {
        let names: Vec<String> = (0..gpus).map(|gpu| format!("GPU{gpu}")).collect();
        let mut text = format!("{}\n", names.join(" "));
        for row in 0..gpus {
            let cell = |column| match (row, column) {
                (a, b) if a == b => "X".to_owned(),
                (a, b) if a / island == b / island => format!("NV{links}"),
                _ => "SYS".to_owned(),
            };
            let cells: Vec<String> = (0..gpus).map(cell).collect();
            text.push_str(&format!("GPU{row} {}\n", cells.join(" ")));
        }
        let machine = read_machine(&text).unwrap();
        for (a, b) in (0..gpus).flat_map(|a| (0..a).map(move |b| (a, b))) {
            assert_eq!(machine.link(a, b), read(&text).links()[a][b], "GPU{a} and GPU{b}");
        }
        let islands: Vec<u8> = (0..gpus).map(|gpu| machine.switch_island(gpu)).collect();
        assert_eq!((islands[0], islands[gpus - 1]), (0, 1));
    }
}

#[test]
fn notice_about_hidden_nics_is_kept() {
    let text = "3 NICs found in the topology, only displaying 1 in the matrix.\n\
                \tGPU0\tNIC0\nGPU0\t X \tPIX\nNIC0\tPIX\t X \n\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n";
    let shown = read(text);
    assert_eq!((shown.nics_found(), shown.nics().len()), (Some(3), 1));
    assert_eq!(read(&printed(&shown)), shown);
}

#[test]
fn escape_codes_are_skipped() {
    let plain = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tPHB\t0-7\nGPU1\tPHB\t X \t0-7\n";
    for (on, off) in
        [("\u{1b}[4m", "\u{1b}[0m"), ("\u{1b}[1;4m", "\u{1b}(B\u{1b}[m"), ("\u{1b}[K", "\u{1b}=\u{1b}")]
    {
        let text = plain.replacen("GPU0", &format!("{on}GPU0"), 1);
        let text = text.replacen("Affinity", &format!("Affinity{off}"), 1);
        assert_eq!(read(&text), read(plain), "{on:?}");
    }
}

/// Line ends of any system.
#[test]
fn line_ends_of_any_system_are_read() {
    let text = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tSYS\t0-7\nGPU1\tSYS\t X \t8-15\n";
    for end in ["\r", "\r\n", "\r\r\n"] {
        assert_eq!(read(&text.replace('\n', end)), read(text), "{end:?}");
    }
}

/// Disks (`topo -nvme`), other programs' output and further matrices are not part of the output of `topo -m`.
#[test]
fn lines_beside_matrix_and_legends_are_refused() {
    let matrix = "GPU0 GPU1 CPU Affinity\nGPU0 X SYS 0-7,16\nGPU1 SYS X 0-7\n\nLegend:\n\n  X    = Self\n";
    for before in ["$ nvidia-smi topo -m\n", "Our node:\n", "```\n", "> GPU0 GPU1\n", "| GPU0 | GPU1 |\n"] {
        let refused = TopoText::parse(&format!("{before}{matrix}")).expect_err(before);
        assert_eq!((refused.line, refused.column), (1, 1), "{before:?}: {refused}");
    }
    for behind in
        ["```\n", "me@node:~$ ", "SYS is slow.\n", "GPU0 NVIDIA L4\n", "GPU0 GPU1\nGPU0 X SYS\nGPU1 SYS X\n"]
    {
        let refused = TopoText::parse(&format!("{matrix}{behind}")).expect_err(behind);
        assert_eq!((refused.line, refused.column), (8, 1), "{behind:?}: {refused}");
    }
    let disk = TopoText::parse("GPU0 NVMe0\nGPU0 X PIX\nNVMe0 PIX X\n").unwrap_err();
    assert_eq!((disk.line, disk.column), (1, 6), "{disk}");
}

#[test]
fn legend_of_old_driver_is_read() {
    let text = "GPU0 GPU1\nGPU0 X SOC\nGPU1 SOC X\nLegend:\n X   = Self\n SOC  = Path traverses a socket-level link (e.g. QPI)\n \
                PSB  = Connection traversing a single on-board PCIe switch\n\
                SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)\n";
    assert_eq!(link(&read(text), 0, 1), "SOC");
}

/// A text as an editor shows it: tabs turned into blanks up to every `stop`th column, then indented.
fn spread(text: &str, stop: usize, indent: usize) -> String {
    let mut spread = String::new();
    for line in text.lines() {
        let mut shown = String::new();
        for ch in line.chars() {
            match ch {
                '\t' => shown.push_str(&" ".repeat(stop - shown.chars().count() % stop)),
                ch => shown.push(ch),
            }
        }
        spread.push_str(&format!("{}{shown}\n", " ".repeat(indent)));
    }
    spread
}

#[test]
fn blank_cells_of_indented_copy_stay_blank() {
    let two = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\n";
    let three = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n";
    for (header, values) in [
        (two, "\t\t0"),
        (two, "\t0-7"),
        (three, "\t\t0"),
        (three, "\t\t0\t\tN/A"),
        (three, "\t0-7\t\t\t2"),
        (three, "\t\t\t\t2"),
        (three, "\t0-15,128-143\t\t\t2"),
    ] {
        let text = format!("{header}GPU0\t X \tSYS{values}\nGPU1\tSYS\t X {values}\n");
        let whole = read(&text);
        for indent in 0..9 {
            assert_eq!(read(&spread(&text, 8, indent)), whole, "{values:?} indented by {indent}");
            let tabs: String = text.lines().map(|line| format!("{}{line}\n", " ".repeat(indent))).collect();
            assert_eq!(read(&tabs), whole, "{values:?} with tabs, indented by {indent}");
            for stop in [2, 4] {
                if let Ok(other) = TopoText::parse(&spread(&text, stop, indent)) {
                    assert_eq!(other, whole, "{values:?} with tabs of {stop}, indented by {indent}");
                }
            }
        }
    }
}

#[test]
fn device_name_with_special_meaning_reads_back() {
    for device in [
        "$",
        "#",
        "a>",
        "K%[K",
        "Legend:",
        "|",
        "a NIC1: b",
        "NIC0:",
        "NIC1: ",
        "[0m",
        "a\nb",
        "\u{1b}[0m",
        "",
    ] {
        let machine = Machine::new(MachineParts {
            gpus: vec![Gpu::default()],
            nics: vec![Nic { name: "mlx5_0".into(), device: Some(device.into()), ..Nic::default() }],
            paths: PathMatrix::from_fn(2, |_, _| PathClass::Pix),
            ..MachineParts::default()
        })
        .unwrap();
        let text = TopoText::from(&machine);
        assert_eq!(read(&printed(&text)), text, "{device:?}");
    }
}

#[test]
fn failure_of_nvidia_smi_is_reported() {
    for message in [
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA driver is installed and running.",
        "Failed to initialize NVML: Driver/library version mismatch",
        "Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error",
        "No devices were found",
    ] {
        let refused = gantry_smi::read(&format!("{message}\n\n"), &Hints::default());
        let refused = refused.unwrap_err().to_string();
        let expected = format!("nvidia-smi failed and printed no topology: {message}");
        assert!(refused.ends_with(&expected), "{refused}");
    }
}

/// Every range of one list against every range of the other would take hours here.
#[test]
fn long_numa_lists_are_compared_by_ranges() {
    let near = ["0-8000"; 580].join(",");
    let far = ["9000-16383"; 370].join(",");
    let text = |[low, high]: [&str; 2]| {
        let names: Vec<String> = (0..32).map(|gpu| format!("GPU{gpu}")).collect();
        let mut text = format!("{} CPU Affinity NUMA Affinity\n", names.join(" "));
        for row in 0..32 {
            let cell = |column| if column == row { "X" } else { "NV18" };
            let cells: Vec<&str> = (0..32).map(cell).collect();
            let list = if row < 16 { low } else { high };
            text.push_str(&format!("GPU{row} {} 0-7 {list}\n", cells.join(" ")));
        }
        text
    };
    let path = |text: &str| read_machine(text).unwrap().paths().get(0, 1);
    assert_eq!(path(&text([&near, &near])), PathClass::Sys, "all are on all nodes");
    let halves = text([&near, &far]);
    assert_eq!(path(&halves), PathClass::Node);
    assert_eq!(read_machine(&halves).unwrap().paths().get(0, 16), PathClass::Sys);
}

#[test]
fn numa_lists_in_other_notation_are_equal() {
    let text = |node: &str| {
        format!("GPU0 GPU1 CPU Affinity NUMA Affinity\nGPU0 X NV4 0-7 {node}\nGPU1 NV4 X 0-7 {node}\n")
    };
    for (list, class) in [("3", PathClass::Node), ("3,3", PathClass::Node), ("3-4", PathClass::Sys)] {
        let machine = read_machine(&text(list)).unwrap();
        assert_eq!(machine.paths().get(0, 1), class, "{list}");
    }
}

#[test]
fn nic_legend_cut_within_last_device_is_refused() {
    let nics = |devices: &[&str]| {
        let names: Vec<String> = (0..devices.len()).map(|nic| format!("NIC{nic}")).collect();
        let mut text = format!("GPU0 {}\nGPU0 X{}\n", names.join(" "), " SYS".repeat(devices.len()));
        for row in 0..devices.len() {
            let cell = |column| if column == row { "X" } else { "PIX" };
            let cells: Vec<&str> = (0..devices.len()).map(cell).collect();
            text.push_str(&format!("NIC{row} SYS {}\n", cells.join(" ")));
        }
        let entries: Vec<String> =
            names.iter().zip(devices).map(|(name, device)| format!("  {name}: {device}")).collect();
        format!("{text}\nNIC Legend:\n\n{}", entries.join("\n"))
    };
    for cut in [
        ["mlx5_0", "mlx5_1", "mlx5_1"],
        ["mlx5_0", "mlx5_1", "mlx5_"],
        ["mlx5_0", "mlx5_1", "mlx"],
        ["mlx5_0", "mlx5_1", "mlx5_b"],
        ["rocep23s0f0", "rocep23s0f1", "rocep177s0"],
        ["rocep23s0f0", "rocep23s0f1", "rocep177s0f"],
    ] {
        let text = nics(&cut);
        let refused = TopoText::parse(&text).expect_err(cut[2]);
        assert_eq!(refused.line, 11, "{refused}");
        assert!(matches!(refused.problem, TopoProblem::LegendCutDevice { .. }), "{refused}");
        // A line end completes the device.
        assert_eq!(read(&format!("{text}\n")).nics()[2].device.as_deref(), Some(cut[2]));
    }
    for whole in [
        ["mlx5_0", "mlx5_1", "mlx5_2"],
        ["mlx5_0", "mlx5_1", "mlx5_bond_0"],
        ["mlx5_bond_0", "mlx5_1", "mlx5_2"],
        ["rocep23s0f0", "rocep24s0", "rocep177s0"],
        ["one", "two", "three"],
    ] {
        assert_eq!(read(&nics(&whole)).nics()[2].device.as_deref(), Some(whole[2]));
    }
}

#[test]
fn very_long_header_is_refused_quickly() {
    let gpus: String = (0..32).map(|gpu| format!("GPU{gpu}")).collect();
    let nics: String = (0..128).map(|nic| format!("NIC{nic}")).collect();
    let more = "NIC9".repeat(250_000);
    let refused = TopoText::parse(&format!("{gpus}{nics}{more}\nGPU0 X SYS\n")).unwrap_err();
    assert_eq!(refused.to_string(), "line 1, column 809: column NIC9 occurs twice");
}

#[test]
fn psb_is_read_as_pix() {
    let text = "      GPU0 GPU1 GPU2 GPU3\nGPU0     X  PSB  PHB  PHB\nGPU1   PSB    X  PHB  PHB\n\
                GPU2   PHB  PHB    X  PSB\nGPU3   PHB  PHB  PSB    X\n";
    assert_eq!(read(text), read(&text.replace("PSB", "PIX")));
    let glued = "GPU0 GPU1\nGPU0 XPSB\nGPU1 PSBX\n";
    assert_eq!(link(&read(glued), 0, 1), "PIX");
}

/// Every case: its defect, and the text.
const REFUSED: &[(&str, &str)] = &[
    ("nothing", ""),
    ("a comment alone", "# machine: 8x A100\n\n"),
    ("prose", "The GPUs are connected by NVLink.\n"),
    ("a machine file", "gpus:\n- index: 0\n"),
    ("a row without header", "GPU0 X NV4\nGPU1 NV4 X\n"),
    ("a NIC's row without header", "mlx5_0 SYS X\n"),
    ("a header without rows", "\tGPU0\tGPU1\tCPU Affinity\n"),
    ("a header, then the legend", "GPU0 GPU1\n\nLegend:\n\n  X = Self\n"),
    ("a missing row", "GPU0 GPU1 GPU2\nGPU0 X SYS SYS\nGPU2 SYS SYS X\n"),
    ("a missing last row", "GPU0 GPU1\nGPU0 X SYS\n\nLegend:\n"),
    ("a row twice", "GPU0 GPU1\nGPU0 X SYS\nGPU0 X SYS\n"),
    ("a row too many", "GPU0 GPU1\nGPU0 X SYS\nGPU1 SYS X\nGPU2 SYS SYS X\n"),
    ("a row too many, among the others", "GPU0 GPU1\nGPU0 X SYS\nGPU7 SYS X\n"),
    ("the matrix twice", "GPU0 GPU1\nGPU0 X SYS\nGPU1 SYS X\n\tGPU0 GPU1\nGPU0 X SYS\nGPU1 SYS X\n"),
    ("a cut row", "GPU0 GPU1 GPU2\nGPU0 X SYS SYS\nGPU1 SYS\nGPU2 SYS SYS X\n"),
    ("a row that goes on with its values", "GPU0 GPU1 CPU Affinity\nGPU0 X 0-7\nGPU1 SYS X 0-7\n"),
    (
        "unknown links",
        "GPU0 GPU1 GPU2 CPU Affinity\nGPU0 X N/A SYS 0-7\nGPU1 N/A X SYS 0-7\nGPU2 SYS SYS X 0-7\n",
    ),
    ("a cut word", "GPU0 GPU1\nGPU0 X SYS\nGPU1 SY"),
    ("an unknown link", "GPU0 GPU1\nGPU0 X NVB\nGPU1 NVB X\n"),
    ("an unknown link, glued", "GPU0 GPU1\nGPU0 X PIXIE\nGPU1 PIX X\n"),
    ("a link in lower case", "GPU0 GPU1\nGPU0 X sys\nGPU1 sys X\n"),
    ("too many links", "GPU0 GPU1\nGPU0 X NV37\nGPU1 NV37 X\n"),
    ("no links", "GPU0 GPU1\nGPU0 X NV0\nGPU1 NV0 X\n"),
    ("links without number", "GPU0 GPU1\nGPU0 X NV#\nGPU1 NV# X\n"),
    ("the peer-to-peer matrix", " \tGPU0\tGPU1\t\n GPU0\tX\tOK\t\n GPU1\tOK\tX\t\n"),
    ("unknown links of two GPUs", "GPU0 GPU1 CPU Affinity\nGPU0 X N/A 0-7\nGPU1 N/A X 0-7\n"),
    ("X off the diagonal", "GPU0 GPU1\nGPU0 X X\nGPU1 X X\n"),
    ("no X on the diagonal", "GPU0 GPU1\nGPU0 SYS SYS\nGPU1 SYS X\n"),
    ("halves that disagree", "GPU0 GPU1\nGPU0 X PIX\nGPU1 PXB X\n"),
    ("link counts that disagree", "\tGPU0\tGPU1\nGPU0\t X \tNV12\nGPU1\tNV11\t X \n"),
    ("an NVLink to a NIC", "GPU0 NIC0\nGPU0 X NV4\nNIC0 NV4 X\n"),
    (
        "more links than a GPU can have",
        "GPU0 GPU1 GPU2 GPU3\nGPU0 X NV18 NV18 NV18\nGPU1 NV18 X NV18 NV18\nGPU2 NV18 NV18 X SYS\nGPU3 NV18 NV18 SYS X\n",
    ),
    ("a link too many", "GPU0 GPU1\nGPU0 X SYS SYS\nGPU1 SYS X\n"),
    ("a value too many", "GPU0 GPU1 CPU Affinity\nGPU0 X SYS 0-7 0\nGPU1 SYS X 0-7 0\n"),
    ("a value without column", "GPU0 GPU1\nGPU0 X SYS 0-7\nGPU1 SYS X 0-7\n"),
    ("a value behind a NIC", "GPU0 NIC0 CPU Affinity\nGPU0 X SYS 0-7\nNIC0 SYS X 0-7\n"),
    ("no CPU list", "GPU0 CPU Affinity\nGPU0 X 7-0\n"),
    ("no NUMA node", "GPU0 CPU Affinity NUMA Affinity\nGPU0 X 0-7 zero\n"),
    (
        "a row that ends before the others",
        "GPU0 GPU1 CPU Affinity NUMA Affinity\nGPU0 X SYS 0-7 0\nGPU1 SYS X 0-7\n",
    ),
    ("a text that ends in a value", "GPU0 GPU1 CPU Affinity\nGPU0 X SYS 0-15\nGPU1 SYS X 0-1"),
    (
        "a value of an unclear column",
        "GPU0 GPU1 CPU Affinity NUMA Affinity\nGPU0 X SYS                                     0\nGPU1 SYS X                                     0\n",
    ),
    ("an unknown column", "GPU0 GPU1 Power Affinity\nGPU0 X SYS\nGPU1 SYS X\n"),
    ("a GPU twice", "GPU0 GPU1 GPU1\nGPU0 X SYS SYS\n"),
    ("a GPU left out", "GPU0 GPU2\nGPU0 X SYS\nGPU2 SYS X\n"),
    ("a GPU behind a NIC", "GPU0 NIC0 GPU1\nGPU0 X SYS SYS\n"),
    ("NICs alone", "NIC0 NIC1\nNIC0 X PIX\nNIC1 PIX X\n"),
    ("a NIC twice", "GPU0 mlx5_0 mlx5_0\nGPU0 X SYS SYS\n"),
    ("a title twice", "GPU0 CPU Affinity CPU Affinity\nGPU0 X 0 0\n"),
    (
        "a NIC legend that is cut",
        "GPU0 NIC0 NIC1\nGPU0 X SYS SYS\nNIC0 SYS X PIX\nNIC1 SYS PIX X\nNIC Legend:\n NIC0: mlx5_0\n",
    ),
    (
        "a NIC legend with a stranger",
        "GPU0 NIC0\nGPU0 X SYS\nNIC0 SYS X\nNIC Legend:\n NIC0: mlx5_0\n NIC1: mlx5_1\n",
    ),
    (
        "a NIC explained twice",
        "GPU0 NIC0\nGPU0 X SYS\nNIC0 SYS X\nNIC Legend:\n NIC0: mlx5_0\n NIC0: mlx5_1\n",
    ),
    (
        "a notice that miscounts",
        "9 NICs found in the topology, only displaying 2 in the matrix.\nGPU0 NIC0\nGPU0 X SYS\nNIC0 SYS X\n",
    ),
];

#[test]
fn refusal_names_place_and_allowed_values() {
    let mut report = String::new();
    for (case, text) in REFUSED {
        let refused = TopoText::parse(text).expect_err(case);
        report.push_str(&format!("{case}\n    {refused}\n"));
    }
    insta::assert_snapshot!(report);
}

#[test]
fn place_counts_characters_of_the_given_text() {
    let refused =
        TopoText::parse("\t\u{1b}[4mGPU0\tGPU1\u{1b}[0m\nGPU0\t X \tPIQ\nGPU1\tPIX\t X \n").unwrap_err();
    assert_eq!((refused.line, refused.column), (2, 10));
    let refused = TopoText::parse("\u{1b}[4mGPU0 GPUX\u{1b}[0m\n").unwrap_err();
    assert_eq!((refused.line, refused.column), (1, 10));
}

#[test]
fn more_devices_than_allowed_are_refused() {
    let gpus: Vec<String> = (0..33).map(|gpu| format!("GPU{gpu}")).collect();
    let problem = |text: &str| TopoText::parse(text).unwrap_err().problem;
    assert_eq!(problem(&gpus.join(" ")), TopoProblem::TooMany { kind: "GPUs", limit: 32 });
    let nics: Vec<String> = (0..129).map(|nic| format!("NIC{nic}")).collect();
    let header = format!("GPU0 {}", nics.join(" "));
    assert_eq!(problem(&header), TopoProblem::TooMany { kind: "NICs", limit: 128 });
    let long = "#\n".repeat(1 << 20);
    assert_eq!(problem(&long), TopoProblem::TooLong { bytes: long.len(), limit: 1_048_576 });
}
