//! Forms of the text that no stored file has but machines and people make, and what is refused, as people read it.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests fail by panicking"
)]

use gantry_topology::text::{GpuLine, TopoText, parse, read_machine};
use gantry_topology::{Gpu, IdList, Link, Machine, MachineParts, Nic, PathClass, PathMatrix};

fn read(text: &str) -> TopoText {
    parse(text).unwrap_or_else(|problem| panic!("{problem}\n{text}"))
}

fn link(text: &TopoText, a: usize, b: usize) -> String {
    text.links()[a][b].to_string()
}

/// CPU list, NUMA nodes, memory's NUMA node of each GPU, `-` where unknown.
fn values(text: &TopoText) -> Vec<[&str; 3]> {
    let shown = |value: &Option<IdList>| value.as_ref().map_or("-", |list| list.as_str()).to_owned();
    let line = |gpu: &GpuLine| [shown(&gpu.cpus), shown(&gpu.numa), shown(&gpu.memory_numa)];
    text.gpus()
        .iter()
        .map(|gpu| line(gpu).map(|value| &*Box::leak(value.into_boxed_str())))
        .collect()
}

#[test]
fn one_gpu_without_anything_else() {
    let alone = read("GPU0\nGPU0 X\n");
    assert_eq!((alone.gpus().len(), alone.nics().len()), (1, 0));
    assert_eq!(values(&alone), [["-", "-", "-"]]);
}

#[test]
fn one_gpu_in_a_virtual_machine_without_affinity() {
    let alone = read("\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t\t\t\tN/A\n");
    assert_eq!(values(&alone), [["-", "-", "-"]]);
}

/// Other rows would tell that values are lacking; here there is none.
#[test]
fn a_text_that_ends_in_its_only_row_before_every_value_is_there_is_refused() {
    let whole = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t16-31,48-63\t1\t\tN/A";
    assert_eq!(values(&read(whole)), [["16-31,48-63", "1", "-"]]);
    assert_eq!(values(&read(&format!("{whole}\n"))), [["16-31,48-63", "1", "-"]]);
    for cut in ["GPU0\t X ", "\t16", "\t16-31,48-63", "\t1"] {
        let text = &whole[..whole.rfind(cut).unwrap() + cut.len()];
        let refused = parse(text).unwrap_err();
        assert_eq!(refused.line, 2, "{text:?}: {refused}");
    }
}

#[test]
fn a_gpu_whose_memory_is_a_numa_node() {
    let grace = read("\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-71\t0\t\t1\n");
    assert_eq!(values(&grace), [["0-71", "0", "1"]]);
    let machine = read_machine(&grace.to_string()).unwrap();
    assert_eq!(machine.gpus()[0].memory_numa, Some(1));
}

#[test]
fn only_the_memory_node_is_known() {
    let text = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n\
                GPU0\t X \tNV6\t\t\t\t2\nGPU1\tNV6\t X \t\t\t\t10\n";
    assert_eq!(values(&read(text)), [["-", "-", "2"], ["-", "-", "10"]]);
}

#[test]
fn nodes_of_memory_of_gpus_stand_in_the_lists_of_their_sockets() {
    let lists = |lists: [&str; 4]| {
        let cpus = ["0-71", "0-71", "72-143", "72-143"];
        let mut text = "\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\n".to_owned();
        for gpu in 0..4 {
            let cells: Vec<&str> = (0..4)
                .map(|other| if other == gpu { "X" } else { "NV18" })
                .collect();
            text.push_str(&format!(
                "GPU{gpu}\t{}\t{}\t{}\n",
                cells.join("\t"),
                cpus[gpu],
                lists[gpu]
            ));
        }
        let machine = read_machine(&text).unwrap();
        let pairs = [(0, 1), (0, 2), (2, 3)];
        pairs.map(|(a, b)| machine.paths().get(a, b).as_str())
    };
    let apart = ["NODE", "SYS", "NODE"];
    assert_eq!(lists(["0", "0", "1", "1"]), apart);
    assert_eq!(lists(["0,2-17", "0,2-17", "1,18-33", "1,18-33"]), apart);
    assert_eq!(
        lists(["0-1", "0-1", "0-1", "0-1"]),
        ["SYS", "SYS", "SYS"],
        "that tells nothing"
    );
}

#[test]
fn nics_of_other_makers() {
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
        let text = read(&format!(
            "\tGPU0\t{name}\tCPU Affinity\nGPU0\t X \tPIX\t0-7\n{name}\tPIX\t X \t\n"
        ));
        assert_eq!(text.nics()[0].name, name);
        assert_eq!(link(&text, 1, 0), "PIX");
    }
}

#[test]
fn sixteen_gpus_have_two_digits() {
    let names: Vec<String> = (0..16).map(|gpu| format!("GPU{gpu}")).collect();
    let mut text = format!("\t{}\tCPU Affinity\n", names.join("\t"));
    for row in 0..16 {
        let cells: Vec<&str> = (0..16)
            .map(|column| if row == column { " X " } else { "NV6" })
            .collect();
        text.push_str(&format!("GPU{row}\t{}\t0-23,48-71\n", cells.join("\t")));
    }
    let dgx2 = read(&text);
    assert_eq!(dgx2.gpus().len(), 16);
    assert_eq!(
        read(&text.replace("\tGPU", "GPU").replacen("GPU0", "\tGPU0", 1)),
        dgx2
    );
    let machine = read_machine(&text).unwrap();
    assert_eq!((machine.switch_links(15), machine.nvlinks().len()), (6, 0));
}

#[test]
fn glued_cells_between_a_label_a_link_and_a_value() {
    let plain =
        read("GPU0 GPU1 NIC0 CPU Affinity\nGPU0 X NV2 SYS 0-7\nGPU1 NV2 X NODE 8-15\nNIC0 SYS NODE X\n");
    let glued = read("GPU0GPU1NIC0CPU Affinity\nGPU0 XNV2SYS0-7\nGPU1NV2XNODE 8-15\nNIC0SYSNODEX\n");
    assert_eq!(glued, plain);
}

#[test]
fn glued_names_of_nics() {
    let text = read("GPU0mlx5_0mlx5_1CPU Affinity\nGPU0 X PIX SYS 0-7\nmlx5_0 PIX X SYS\nmlx5_1 SYS SYS X\n");
    assert_eq!(text.nics()[1].name, "mlx5_1");
}

#[test]
fn titles_in_other_spellings() {
    for header in [
        "GPU0 CPUAffinity NUMAAffinity GPU NUMA ID",
        "GPU0 CPU AFFINITY CPU NUMA Affinity GPU NUMA ID",
        "GPU0\tcpu affinity\tNuma  Affinity\tGPU  NUMA  ID",
        "GPU0 CPU_Affinity NUMA_Affinity GPU_NUMA_ID",
        "GPU0 CPU-Affinity NUMA-Affinity GPU-NUMA-ID",
        "GPU0 CPU_Affinity NUMA_Affinity GPU_NU",
    ] {
        assert_eq!(
            values(&read(&format!("{header}\nGPU0 X 0-7 0 N/A\n"))),
            [["0-7", "0", "-"]]
        );
    }
}

#[test]
fn escape_codes_that_lost_their_escape() {
    let plain = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tPHB\t0-7\nGPU1\tPHB\t X \t0-7\n";
    for (on, off) in [
        ("\u{1b}[4m", "\u{1b}[0m"),
        ("[4m", "[0m"),
        ("^[[4m", "^[[0m"),
        ("\u{241b}[4m", "\u{241b}[0m"),
        ("\\x1b[4m", "\\x1b[0m"),
        ("\u{1b}[1;4m", "\u{1b}(B\u{1b}[m"),
        ("\u{fffd}[4m", "\u{fffd}[m"),
        ("\u{1b}]0;title\u{7}", "\u{1b}[K"),
    ] {
        let text = plain.replacen("GPU0", &format!("{on}GPU0"), 1).replacen(
            "Affinity",
            &format!("Affinity{off}"),
            1,
        );
        assert_eq!(read(&text), read(plain), "{on:?}");
    }
}

#[test]
fn blanks_of_a_web_page() {
    let plain = "GPU0 GPU1\nGPU0 X PHB\nGPU1 PHB X\n";
    assert_eq!(read(&plain.replace(' ', "\u{a0}\u{a0}")), read(plain));
    assert_eq!(read(&plain.replace("GPU", "\u{200b}GPU")), read(plain));
}

#[test]
fn a_gpu_that_lost_its_links_stays_on_pcie() {
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
fn nvswitches_that_join_only_some_gpus_give_no_links_between_the_others() {
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
fn the_notice_about_hidden_nics_is_kept() {
    let text = "3 NICs found in the topology, only displaying 1 in the matrix.\n\
                \tGPU0\tNIC0\nGPU0\t X \tPIX\nNIC0\tPIX\t X \n\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n";
    let shown = read(text);
    assert_eq!((shown.nics_found(), shown.nics().len()), (Some(3), 1));
    assert_eq!(read(&shown.to_string()), shown);
}

#[test]
fn old_legends_and_broken_legends() {
    let text = "GPU0 GPU1\nGPU0 X SOC\nGPU1 SOC X\nLegend:\n X   = Self\n SOC  = Path traverses a socket-level link (e.g. QPI)\n \
                PSB  = Connection traversing a single on-board PCIe switch\n\
                SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA\n nodes (e.g., QPI/UPI)\n";
    assert_eq!(link(&read(text), 0, 1), "SOC");
}

#[test]
fn values_below_titles_of_a_hand_made_table() {
    let text = "      GPU0  GPU1  CPU Affinity  NUMA Affinity\n\
                GPU0  X     PIX   0-7           0\n\
                GPU1  PIX   X                   1\n";
    assert_eq!(values(&read(text)), [["0-7", "0", "-"], ["-", "1", "-"]]);
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
fn blank_cells_stay_blank_in_an_indented_copy_and_no_value_moves_into_one() {
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
            assert_eq!(
                read(&spread(&text, 8, indent)),
                whole,
                "{values:?} indented by {indent}"
            );
            let tabs: String = text
                .lines()
                .map(|line| format!("{}{line}\n", " ".repeat(indent)))
                .collect();
            assert_eq!(read(&tabs), whole, "{values:?} with tabs, indented by {indent}");
            for stop in [2, 4] {
                if let Ok(other) = parse(&spread(&text, stop, indent)) {
                    assert_eq!(
                        other, whole,
                        "{values:?} with tabs of {stop}, indented by {indent}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_value_that_a_terminal_broke_is_not_read_as_two_where_a_cell_is_blank() {
    let header = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n";
    let text =
        |row: &str| format!("{header}GPU0\t X \tNODE\t0-15,64-127,200-255\t1\t\t2\nGPU1\tNODE\t X \t{row}\n");
    let whole = read(&text("0-15,64-127,200-255\t\t\tN/A"));
    assert_eq!(values(&whole)[1], ["0-15,64-127,200-255", "-", "-"]);
    for broken in [
        "0-15,64-127,2\n00-255\t\t\tN/A",
        "0-15,64-127,\n200-255\t\t\tN/A",
        "0-15,64-1\n27,200-255    N/A",
    ] {
        let refused = parse(&text(broken)).expect_err(broken);
        assert_eq!(refused.line, 3, "{broken:?}: {refused}");
    }
    // No value goes over the break: what is read is the only way to read it.
    let broken = read(&text("0-15,64-127,200-255\t1\nN/A"));
    assert_eq!(values(&broken)[1], ["0-15,64-127,200-255", "1", "-"]);
}

#[test]
fn what_a_terminal_has_around_the_output_changes_nothing() {
    let bare = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tSYS\t0-7\t0\nGPU1\tSYS\t X \t8-15\t1\n";
    let legend = "\nLegend:\n\n  X    = Self\n";
    for text in [bare.to_owned(), format!("{bare}{legend}")] {
        let whole = read(&text);
        for prompt in [
            "$ ",
            "# ",
            "root@node:~# ",
            "[me@node ~]$ ",
            "sh-5.1$\n",
            "PS C:\\Users\\me>",
            "\nroot@node:~# \n\n",
        ] {
            assert_eq!(read(&format!("{text}{prompt}")), whole, "{prompt:?}");
        }
        for date in ["Tue Mar  5 10:11:12 2024", "Tue 05 Mar 2024 10:11:12 AM UTC"] {
            assert_eq!(read(&format!("{date}\n{text}")), whole, "{date:?}");
        }
        for before in [
            "Defaulted container \"nvidia-device-plugin-ctr\" out of: nvidia-device-plugin-ctr, toolkit-validation (init)",
            "NVIDIA Topology:",
            "gpu topolocy:",
        ] {
            assert_eq!(read(&format!("{before}\n{text}")), whole, "{before:?}");
        }
        let reported = format!("{text}\nHypervisor vendor:: KVM\nulimit soft: 1048576\n");
        assert_eq!(read(&reported), whole);
        for end in ["\r", "\r\n", "\r\r\n"] {
            assert_eq!(read(&text.replace('\n', end)), whole, "{end:?}");
            let machine = gantry_topology::read(&format!("# a comment\n{text}").replace('\n', end));
            assert_eq!(machine.unwrap().gpus().len(), 2, "{end:?}");
        }
    }
    let cut = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tSYS\t0-7,16-23\nGPU1\tSYS\t X \t0-7,16";
    for prompt in ["", "\nme@node:~$ ", "\n\nme@node:~$ \n"] {
        let refused = parse(&format!("{cut}{prompt}")).unwrap_err();
        let place = (refused.line, refused.column);
        assert_eq!(place, (3, 14), "{prompt:?}: {refused}");
    }
    // A blank behind it says that the value is whole, as tabs say that a cell is blank.
    assert_eq!(values(&read(&format!("{cut} \nme@node:~$ ")))[1][0], "0-7,16");
    let blank = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tSYS\t0-7\nGPU1\tSYS\t X \t\n";
    assert_eq!(read(&format!("{blank}me@node:~$ ")), read(blank));
    for typed in ["root@node:~# exit", "logout", "As you can see, SYS is slow."] {
        assert_eq!(read(&format!("{bare}{typed}")), read(bare), "{typed:?}");
        // Right behind a value they may have come in the place of its end.
        let refused = parse(&format!("{cut}\n{typed}")).unwrap_err();
        let place = (refused.line, refused.column);
        assert_eq!(place, (3, 14), "{typed:?}: {refused}");
        assert_eq!(values(&read(&format!("{cut}\n\n{typed}")))[1][0], "0-7,16");
    }
}

#[test]
fn a_device_name_that_looks_like_something_else_is_printed_readably() {
    for device in [
        "$",
        "#",
        "a>",
        "K%[K",
        "nvidia-smi topo -m",
        "Legend:",
        "|",
        "| |",
        "| a |",
        "a NIC1: b",
        "a NIC0: b",
        "NIC0:",
        "NIC1: ",
        "[0m",
        "a\nb",
        "",
    ] {
        let machine = Machine::new(MachineParts {
            gpus: vec![Gpu::default()],
            nics: vec![Nic {
                name: "mlx5_0".into(),
                device: Some(device.into()),
                ..Nic::default()
            }],
            paths: PathMatrix::from_fn(2, |_, _| PathClass::Pix),
            ..MachineParts::default()
        })
        .unwrap();
        let text = TopoText::from(&machine);
        assert_eq!(read(&text.to_string()), text, "{device:?}");
    }
}

#[test]
fn a_header_cut_within_its_last_title_is_read_and_a_value_cut_with_it_is_unknown() {
    let rows = "GPU0     X      NV18    0-51,104-155    0\nGPU1    NV18     X      0-51,104-155    0\n";
    let text = |titles: &str, rows: &str| format!("        GPU0    GPU1    {titles}\n{rows}");
    let whole = read(&text("CPU Affinity    NUMA Affinity", rows));
    for titles in [
        "CPU Affinity    NUMA",
        "CPU Affinity    NUMA Affi",
        "CPU AffinityNUMA Aff",
    ] {
        assert_eq!(read(&text(titles, rows)), whole, "{titles:?}");
    }
    let three = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU\nGPU0\t X \t0-71\t0\t\t2\n";
    assert_eq!(values(&read(three)), [["0-71", "0", "2"]]);
    // All lines cut at one place: what a row's last value goes on with is not known.
    let cut = "GPU0     X      NV18    0-51,104\nGPU1    NV18     X      0-51,104\n";
    assert_eq!(values(&read(&text("CPU Affi", cut))), [["-", "-", "-"]; 2]);
    assert_eq!(
        values(&read(&text("CPU Affinity    N", rows)))[0],
        ["0-51,104-155", "-", "-"]
    );
    let ended = "GPU0     X      NV18    0-51\nGPU1    NV18     X      0-51\n";
    assert_eq!(values(&read(&text("CPU Affi", ended))), [["0-51", "-", "-"]; 2]);
    for titles in [
        "CPU Affinity    NUMB",
        "CPU Affinity    CPU Affi",
        "GPU",
        "CPU Affinity    GPU1",
    ] {
        assert!(parse(&text(titles, ended)).is_err(), "{titles:?}");
    }
}

#[test]
fn a_legend_before_the_matrix_says_what_it_says_behind_it() {
    let matrix = "\tGPU0\tNIC0\tCPU Affinity\nGPU0\t X \tPIX\t0-7\nNIC0\tPIX\t X \t\n";
    let nics = "NIC Legend:\n\n  NIC0: mlx5_bond_0\n\n";
    let links =
        "Legend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP\ninterconnect\n\n";
    let whole = read(&format!("{matrix}\n{links}{nics}"));
    assert_eq!(whole.nics()[0].device.as_deref(), Some("mlx5_bond_0"));
    for text in [
        format!("{nics}{matrix}"),
        format!("{links}{nics}{matrix}"),
        format!("{nics}# a comment\n{matrix}\n{links}"),
        format!("$ nvidia-smi topo -m\n{nics}```\n{matrix}```\n"),
    ] {
        assert_eq!(read(&text), whole, "{text}");
        assert!(gantry_topology::read(&text).is_ok(), "{text}");
    }
    let twice = parse(&format!("{nics}{matrix}\n{nics}")).unwrap_err();
    assert_eq!(
        twice.to_string(),
        "line 11, column 3: the NIC legend names NIC0 twice"
    );
    let stranger = parse(&format!("NIC Legend:\n NIC7: mlx5_7\n{matrix}")).unwrap_err();
    assert_eq!((stranger.line, stranger.column), (2, 2), "{stranger}");
    assert_eq!(
        read(&format!("{nics}As you can see, there is one NIC.\n{matrix}")),
        whole
    );
}

#[test]
fn a_text_of_which_every_line_is_quoted_is_read_as_the_text() {
    let text = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tSYS\t\t0\nGPU1\tSYS\t X \t\t1\n\nLegend:\n\n  X    = Self\n";
    let quoted = |mark: &str, blank: &str| -> String {
        let line = |line: &str| match line {
            "" => format!("{blank}\n"),
            line => format!("{mark}{line}\n"),
        };
        text.lines().map(line).collect()
    };
    for (mark, blank) in [
        ("> ", ">"),
        ("> ", "> "),
        (">", ">"),
        ("> ", ""),
        (">> ", ">>"),
        ("> > ", "> >"),
    ] {
        let copy = quoted(mark, blank);
        assert_eq!(read(&copy), read(text), "{mark:?}");
        assert!(gantry_topology::read(&copy).is_ok(), "{mark:?}");
    }
    let refused = parse("> GPU0 GPU1\n> GPU0 X SYS\n> GPU1 PIX X\n").unwrap_err();
    assert_eq!((refused.line, refused.column), (3, 8), "{refused}");
    assert!(parse("> GPU0 GPU1\nGPU0 X SYS\n> GPU1 SYS X\n").is_err());
}

#[test]
fn what_tools_put_before_every_line_is_no_part_of_the_text() {
    let text = "\tGPU0\tNIC0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tSYS\t\t0\nNIC0\tSYS\t X \n\nLegend:\n\n  X    = Self\n\nNIC Legend:\n\n  NIC0: mlx5_0\n";
    let tagged = |tag: &dyn Fn(usize) -> String, blank: bool| -> String {
        let line = |(number, line): (usize, &str)| match line {
            "" if blank => format!("{}\n", tag(number).trim_end()),
            line => format!("{}{line}\n", tag(number)),
        };
        text.lines().enumerate().map(line).collect()
    };
    let always = |tag: &'static str| move |_: usize| tag.to_owned();
    let tags: [&dyn Fn(usize) -> String; 10] = [
        &always("[pod/cuda-7d9f/main] "),
        &always("0: "),
        &always("node1: "),
        &always("[1,0]<stdout>:"),
        &always("cuda-1  | "),
        &always("+"),
        &always("# "),
        &always("| "),
        &|number| format!("2024-05-06T11:22:{:02}.{}45Z ", number + 8, number * 7),
        &|number| format!("[pod/a1/b] 2024-05-06T11:22:{:02}Z INFO ", number + 8),
    ];
    for tag in tags {
        for blank in [false, true] {
            let copy = tagged(tag, blank);
            assert_eq!(read(&copy), read(text), "{copy}");
            assert!(gantry_topology::read(&copy).is_ok(), "{copy}");
        }
    }
    let untagged_blanks = tagged(&always("0: "), true).replace("0:\n", "\n");
    assert_eq!(read(&untagged_blanks), read(text));
    let refused = parse("0: GPU0 GPU1\n0: GPU0 X SYS\n0: GPU1 PIX X\n").unwrap_err();
    assert_eq!((refused.line, refused.column), (3, 9), "{refused}");
}

#[test]
fn lines_of_several_machines_are_not_read_as_one() {
    let text = "node1: GPU0 GPU1\nnode1: GPU0 X SYS\nnode2: GPU0 GPU1\nnode2: GPU0 X PIX\nnode1: GPU1 SYS X\nnode2: GPU1 PIX X\n";
    for text in [text.to_owned(), text.replace("node", "")] {
        let refused = parse(&text).unwrap_err();
        assert_eq!((refused.line, refused.column), (1, 1), "{refused}");
        assert!(parse(&text.replace(' ', "\t")).is_err());
    }
    // Only a time and a date are others in every line.
    let timed = "gpu1 10:00:00 GPU0 GPU1\ngpu1 10:00:01 GPU0 X SYS\ngpu1 10:01:02 GPU1 SYS X\n";
    assert_eq!(read(timed).gpus().len(), 2);
    assert!(parse(&timed.replace("gpu1 10:01", "gpu2 10:01")).is_err());
}

#[test]
fn a_command_may_go_on_behind_its_options() {
    let matrix = "\tGPU0\tGPU1\nGPU0\t X \tSYS\nGPU1\tSYS\t X \n";
    for command in [
        "$ nvidia-smi topo -m | tee topo.txt",
        "$ sudo nvidia-smi topo -m 2>/dev/null",
        "PS C:\\Users\\me> nvidia-smi.exe topo -m",
        "nvidia-smi topo --matrix; date",
        "$ nvidia-smi topo -m 2>&1 && nvidia-smi nvlink -s",
        "$ nvidia-smi topo -m > topo.txt; cat topo.txt",
    ] {
        let text = format!("{command}\n{matrix}");
        assert_eq!(read(&text), read(matrix), "{command}");
        assert!(gantry_topology::read(&text).is_ok(), "{command}");
    }
}

#[test]
fn what_people_and_other_programs_say_around_the_matrix_is_passed_over() {
    let bare = "\tGPU0\tGPU1\tNIC0\tCPU Affinity\nGPU0\t X \tNV18\tPIX\t0-7\nGPU1\tNV18\t X \tSYS\t8-15\nNIC0\tPIX\tSYS\t X \t\n";
    let nics = "\nNIC Legend:\n\n  NIC0: mlx5_0\n";
    let whole = read(&format!("{bare}{nics}"));
    for before in [
        "The command `nvidia-smi topo -m` says:",
        "CUDA available: True\nGPU 0,1: NVIDIA B300 SXM6 AC\n\nGPU topology:",
        "GPU0 and GPU1 are joined by NVLink, the PIX link goes to the NIC:\n",
        "| NVIDIA-SMI 535.54.03    Driver Version: 535.54.03 |\n| GPU  Name   Persistence-M|\n+----+",
        "---\n~~~",
        "apiVersion: apps/v1\nkind: Deployment\n---",
    ] {
        let text = format!("{before}\n{bare}{nics}");
        assert_eq!(read(&text), whole, "{before}");
    }
    for behind in [
        "```\n**Legend:**\nSYS is slow.",
        "\n自身（对角线）",
        "\nArchitecture:    x86_64\nCPU(s):  16",
        "\n--------------------------\nNVIDIA_VISIBLE_DEVICES=all\n",
        "[root@5900X ~]# \n```\n",
        "$ nvcc --version\nGPU0 is an H100, and GPU1 too",
        "\nNVMe0\tNVMe1\nGPU0\tPHB\tPHB\nGPU1\tSYS\tSYS\n\nLegend:\n\n  X    = Self\n\nNVMe Legend:\n\n  NVMe0: nvme0n1\n",
        "\nkind: Deployment\n",
    ] {
        let text = format!("{bare}{nics}{behind}");
        assert_eq!(read(&text), whole, "{behind}");
    }
    // nvidia-smi's own warning, which goes to another stream, may come anywhere.
    let warning = "WARNING: infoROM is corrupted at gpu 0000:3B:00.0\n";
    let within = nics.replace("  NIC0", &format!("{warning}  NIC0"));
    assert_eq!(read(&format!("{bare}{within}")), whole);
    let rows = "GPU0 GPU1 CPU Affinity\nGPU0 X SYS 0-7,16-23\nGPU1 SYS X 0-7,16\n";
    assert_eq!(values(&read(&format!("{rows}{warning}")))[1][0], "0-7,16");
    let quoted = bare.replace('\n', " | |\n");
    assert_eq!(read(&quoted).links(), whole.links(), "{quoted}");
}

#[test]
fn disks_are_left_out() {
    let text = "\tGPU0\tGPU1\tNIC0\tNVMe0\tNVMe1\tCPU Affinity\nGPU0\t X \tSYS\tPIX\tPIX\tSYS\t0-31\nGPU1\tSYS\t X \tSYS\tSYS\tPIX\t32-63\n\
                NIC0\tPIX\tSYS\t X \tPIX\tSYS\t\nNVMe0\tPIX\tSYS\tPIX\t X \tSYS\t\nNVMe1\tSYS\tPIX\tSYS\tSYS\t X \t\n\n\
                NIC Legend:\n\n  NIC0: mlx5_0\n\nNVMe Legend:\n\n  NVMe0: nvme0n1\n  NVMe1: nvme1n1\n";
    let read = read(text);
    assert_eq!((read.gpus().len(), read.nics().len()), (2, 1));
    assert_eq!(read.nics()[0].device.as_deref(), Some("mlx5_0"));
    assert_eq!(read.links().len(), 3);
    assert!(read.links().iter().all(|row| row.len() == 3));
    assert_eq!(link(&read, 2, 0), "PIX");
}

#[test]
fn entries_of_the_nics_legend_may_share_a_line() {
    let text = "GPU0 NIC0 NIC1\nGPU0 X SYS SYS\nNIC0 SYS X PIX\nNIC1 SYS PIX X\n\nNIC Legend:\n\nNIC0: rocep177s0f0    NIC1: rocep177s0f1\n";
    let devices: Vec<Option<String>> = read(text).nics().iter().map(|nic| nic.device.clone()).collect();
    assert_eq!(
        devices,
        [Some("rocep177s0f0".to_owned()), Some("rocep177s0f1".to_owned())]
    );
}

#[test]
fn a_failure_of_nvidia_smi_is_told_as_its_own() {
    for said in [
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA driver is installed and running.",
        "Failed to initialize NVML: Driver/library version mismatch",
        "Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error",
        "No devices were found",
        "bash: nvidia-smi: command not found",
        "/bin/sh: 1: nvidia-smi: not found",
        "sudo: nvidia-smi: command not found",
        "exec: \"nvidia-smi\": executable file not found in $PATH",
        "nvidia-smi : The term 'nvidia-smi' is not recognized as the name of a cmdlet, function, script file, or operable program.",
    ] {
        for text in [format!("{said}\n\n"), format!("$ nvidia-smi topo -m\n{said}\n")] {
            let refused = gantry_topology::read(&text).unwrap_err().to_string();
            let told = format!("nvidia-smi failed and printed no topology; it says: {said}");
            assert!(refused.ends_with(&told), "{refused}");
        }
    }
}

#[test]
fn the_peer_to_peer_matrix_beside_the_matrix_changes_nothing() {
    let matrix = "\tGPU0\tGPU1\tNIC0\nGPU0\t X \tSYS\tPIX\nGPU1\tSYS\t X \tSYS\nNIC0\tPIX\tSYS\t X \n";
    let nics = "\nNIC Legend:\n\n  NIC0: mlx5_0\n";
    let peers = " \tGPU0\tGPU1\t\n GPU0\tX\tGNS\t\n GPU1\tGNS\tX\t\n";
    let words = "\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n  GNS  = GPU not supported\n  NS   = Not supported\n  U    = Unknown\n";
    for behind in [
        format!("\n{peers}"),
        format!("{nics}\n{peers}{words}"),
        format!("{nics}$ nvidia-smi topo -p2p r\n{peers}{words}\n$ nvidia-smi topo -p2p w\n{peers}{words}$ "),
        format!("\n{peers}{words}{nics}"),
    ] {
        let text = format!("{matrix}{behind}");
        assert_eq!(read(&text).links(), read(matrix).links(), "{text}");
        let device = read(&text).nics()[0].device.clone();
        assert_eq!(device.is_some(), behind.contains("NIC Legend"), "{text}");
    }
    for before in [
        peers.to_owned(),
        format!("$ nvidia-smi topo -p2p r\n{peers}{words}\n$ nvidia-smi topo -m\n"),
    ] {
        let text = format!("{before}{matrix}");
        assert_eq!(read(&text), read(matrix), "{text}");
    }
}

/// Every range of one list against every range of the other would take hours here.
#[test]
fn long_lists_of_numa_nodes_are_compared_by_their_ends() {
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
    assert_eq!(
        path(&text([&near, &near])),
        PathClass::Sys,
        "all are on all nodes"
    );
    let halves = text([&near, &far]);
    assert_eq!(path(&halves), PathClass::Node);
    assert_eq!(read_machine(&halves).unwrap().paths().get(0, 16), PathClass::Sys);
}

#[test]
fn numa_nodes_are_the_same_however_their_list_is_written() {
    let text = |node: &str| {
        format!("GPU0 GPU1 CPU Affinity NUMA Affinity\nGPU0 X NV4 0-7 {node}\nGPU1 NV4 X 0-7 {node}\n")
    };
    for (list, class) in [
        ("3", PathClass::Node),
        ("3,3", PathClass::Node),
        ("3-4", PathClass::Sys),
    ] {
        let machine = read_machine(&text(list)).unwrap();
        assert_eq!(machine.paths().get(0, 1), class, "{list}");
    }
}

#[test]
fn a_legend_of_nics_that_is_cut_within_its_last_device_is_refused() {
    let nics = |devices: &[&str]| {
        let names: Vec<String> = (0..devices.len()).map(|nic| format!("NIC{nic}")).collect();
        let mut text = format!(
            "GPU0 {}\nGPU0 X{}\n",
            names.join(" "),
            " SYS".repeat(devices.len())
        );
        for row in 0..devices.len() {
            let cell = |column| if column == row { "X" } else { "PIX" };
            let cells: Vec<&str> = (0..devices.len()).map(cell).collect();
            text.push_str(&format!("NIC{row} SYS {}\n", cells.join(" ")));
        }
        let entries: Vec<String> = names
            .iter()
            .zip(devices)
            .map(|(name, device)| format!("  {name}: {device}"))
            .collect();
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
        for end in ["", "\nme@node:~$ "] {
            let refused = parse(&format!("{text}{end}")).expect_err(cut[2]);
            assert_eq!(refused.line, 11, "{refused}");
            assert!(refused.to_string().contains("is the text cut?"), "{refused}");
        }
        // A line end says that the device is whole.
        assert_eq!(
            read(&format!("{text}\n")).nics()[2].device.as_deref(),
            Some(cut[2])
        );
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
fn a_header_of_names_without_end_is_refused_as_any_other() {
    let gpus: String = (0..32).map(|gpu| format!("GPU{gpu}")).collect();
    let nics: String = (0..128).map(|nic| format!("NIC{nic}")).collect();
    let more = "NIC9".repeat(250_000);
    let refused = parse(&format!("{gpus}{nics}{more}\nGPU0 X SYS\n")).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "line 1, column 809: column NIC9 stands twice"
    );
}

#[test]
fn blank_cells_at_the_end_of_a_markdown_tables_row_are_blank() {
    let text = "| | GPU0 | GPU1 | CPU Affinity | NUMA Affinity | GPU NUMA ID |\n|---|---|---|---|---|---|\n\
                | GPU0 | X | SYS | | 0 | 2 |\n| GPU1 | SYS | X | 0-7 | | |\n";
    assert_eq!(values(&read(text)), [["-", "0", "2"], ["0-7", "-", "-"]]);
    let none = text.replace("| 0-7 | | |", "| | | |");
    assert_eq!(values(&read(&none))[1], ["-", "-", "-"]);
    for lacking in ["| 0-7 | |", "| 0-7 |"] {
        let refused = parse(&text.replace("| 0-7 | | |", lacking)).unwrap_err();
        assert_eq!(refused.line, 4, "{lacking}: {refused}");
    }
}

#[test]
fn a_single_switch_on_the_same_board_is_a_single_switch() {
    let text = "      GPU0 GPU1 GPU2 GPU3\nGPU0     X  PSB  PHB  PHB\nGPU1   PSB    X  PHB  PHB\n\
                GPU2   PHB  PHB    X  PSB\nGPU3   PHB  PHB  PSB    X\n";
    assert_eq!(read(text), read(&text.replace("PSB", "PIX")));
    let glued = "GPU0 GPU1\nGPU0 XPSB\nGPU1 PSBX\n";
    assert_eq!(link(&read(glued), 0, 1), "PIX");
}

#[test]
fn one_gpus_peer_to_peer_matrix_beside_the_matrix_changes_nothing() {
    let matrix = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-7\t0\t\tN/A\n";
    let peers = " \tGPU0\t\n GPU0\tX\t\n\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n  CNS  = Chipset not supported\n";
    for text in [
        format!("{matrix}\nLegend:\n\n  X    = Self\n\n{peers}"),
        format!("{matrix}{peers}{peers}"),
        format!("$ nvidia-smi topo -p2p r\n{peers}$ nvidia-smi topo -m\n{matrix}"),
        format!("{peers}\n{matrix}\n{peers}"),
    ] {
        assert_eq!(read(&text), read(matrix), "{text}");
    }
    let twice = parse(&format!("{matrix}\n{matrix}")).unwrap_err();
    assert_eq!((twice.line, twice.column), (4, 2), "{twice}");
    let alike = "GPU0\nGPU0 X\n";
    assert!(parse(&format!("{alike}\n{alike}")).is_err());
}

#[test]
fn a_list_of_gpus_beside_the_matrix_is_no_part_of_it() {
    let matrix = "\tGPU0\tGPU1\tNIC0\tCPU Affinity\nGPU0\t X \tNODE\tPIX\t0-7\nGPU1\tNODE\t X \tSYS\t0-7\nNIC0\tPIX\tSYS\t X \t\n";
    for list in [
        "GPU0 NVIDIA L4\nGPU1 NVIDIA L4\n",
        "GPU0\n  L4\nGPU1\n  L4\n",
        "GPU0:\n  L4\n",
        "GPU0 A100-SXM4\nNIC0 ConnectX-6\n",
        "GPU0 NVIDIA A40-48Q\n\nGPU1 NVIDIA A40-48Q\n",
    ] {
        for text in [
            format!("{list}\n{matrix}"),
            format!("{list}{matrix}"),
            format!("{matrix}\n{list}"),
            format!("{matrix}\n{list}\n{list}"),
            format!("{list}\n{matrix}\n{list}"),
        ] {
            assert_eq!(read(&text), read(matrix), "{text}");
        }
    }
    for (behind, line) in [
        ("GPU0 GPU1 CPU Affinity\n", 6),
        ("GPU0 CPU Affinity\n", 6),
        ("GPU0 NIC0\n", 6),
        ("GPU0\nGPU0 X\n", 6),
        ("GPU0 mlx5_0\n\nGPU0 X SY", 6),
        ("GPU1 NODE X\n", 6),
        ("GPU0 NVIDIA L4\nGPU1 NODE X PIX 0-7\n", 7),
    ] {
        let refused = parse(&format!("{matrix}\n{behind}")).expect_err(behind);
        assert_eq!(refused.line, line, "{behind:?}: {refused}");
    }
    for before in [
        "GPU0 GPU1 CPU Affinity\n",
        "GPU0 mlx5_0\n\nGPU0 X SYS\n",
        "GPU0 L4\nGPU1 NODE X SYS 0-7\n",
        "GPU0GPU1\n",
    ] {
        assert!(parse(&format!("{before}\n{matrix}")).is_err(), "{before:?}");
    }
}

/// Every case: what is wrong with it, and the text.
const REFUSED: &[(&str, &str)] = &[
    ("nothing", ""),
    ("a comment alone", "# machine: 8x A100\n\n"),
    ("prose", "The GPUs are connected by NVLink.\n"),
    ("a machine file", "gpus:\n- index: 0\n"),
    ("a row without header", "GPU0 X NV4\nGPU1 NV4 X\n"),
    ("a NIC's row without header", "mlx5_0 SYS X\n"),
    ("a header without rows", "\tGPU0\tGPU1\tCPU Affinity\n"),
    (
        "a header, then the legend",
        "GPU0 GPU1\n\nLegend:\n\n  X = Self\n",
    ),
    (
        "a missing row",
        "GPU0 GPU1 GPU2\nGPU0 X SYS SYS\nGPU2 SYS SYS X\n",
    ),
    ("a missing last row", "GPU0 GPU1\nGPU0 X SYS\n\nLegend:\n"),
    ("a row twice", "GPU0 GPU1\nGPU0 X SYS\nGPU0 X SYS\n"),
    (
        "a row too many",
        "GPU0 GPU1\nGPU0 X SYS\nGPU1 SYS X\nGPU2 SYS SYS X\n",
    ),
    (
        "a row too many, among the others",
        "GPU0 GPU1\nGPU0 X SYS\nGPU7 SYS X\n",
    ),
    (
        "the matrix twice",
        "GPU0 GPU1\nGPU0 X SYS\nGPU1 SYS X\n\tGPU0 GPU1\nGPU0 X SYS\nGPU1 SYS X\n",
    ),
    (
        "a cut row",
        "GPU0 GPU1 GPU2\nGPU0 X SYS SYS\nGPU1 SYS\nGPU2 SYS SYS X\n",
    ),
    (
        "a row that goes on with its values",
        "GPU0 GPU1 CPU Affinity\nGPU0 X 0-7\nGPU1 SYS X 0-7\n",
    ),
    (
        "unknown links",
        "GPU0 GPU1 GPU2 CPU Affinity\nGPU0 X N/A SYS 0-7\nGPU1 N/A X SYS 0-7\nGPU2 SYS SYS X 0-7\n",
    ),
    (
        "unknown links alone",
        "GPU0 GPU1 GPU2 GPU3 GPU4 CPU Affinity\nGPU0 X N/A N/A N/A N/A N/A\n",
    ),
    ("a cut word", "GPU0 GPU1\nGPU0 X SYS\nGPU1 SY"),
    ("an unknown link", "GPU0 GPU1\nGPU0 X NVB\nGPU1 NVB X\n"),
    ("an unknown link, glued", "GPU0 GPU1\nGPU0 X PIXIE\nGPU1 PIX X\n"),
    ("a link in lower case", "GPU0 GPU1\nGPU0 X sys\nGPU1 sys X\n"),
    ("too many links", "GPU0 GPU1\nGPU0 X NV37\nGPU1 NV37 X\n"),
    ("no links", "GPU0 GPU1\nGPU0 X NV0\nGPU1 NV0 X\n"),
    ("links without number", "GPU0 GPU1\nGPU0 X NV#\nGPU1 NV# X\n"),
    (
        "the peer-to-peer matrix",
        " \tGPU0\tGPU1\t\n GPU0\tX\tOK\t\n GPU1\tOK\tX\t\n",
    ),
    (
        "ROCm's matrix",
        "       GPU0         GPU1         \nGPU0   0            XGMI         \nGPU1   XGMI         0            \n",
    ),
    ("MetaX's matrix", "\tGPU0\tGPU1\nGPU0\tX\tMX\nGPU1\tMX\tX\n"),
    (
        "Moore Threads' matrix",
        "        GPU0    GPU1\nGPU0    X       MT2\nGPU1    MT2     X\n",
    ),
    (
        "Huawei's matrix",
        "\t   NPU0       NPU1       CPU Affinity\nNPU0       X          HCCS       144-167\nNPU1       HCCS       X          144-167\n",
    ),
    (
        "ROCm's matrix with its heading",
        "\n============================ ROCm System Management Interface ============================\n================================ Weight between two GPUs =================================\n       GPU0         GPU1         \nGPU0   0            15           \nGPU1   15           0            \n",
    ),
    (
        "the table of nvidia-smi",
        "Tue Mar  5 10:11:12 2024\n+-----------------------------------------------------------------------------+\n| NVIDIA-SMI 535.54.03              Driver Version: 535.54.03    CUDA Version: 12.2     |\n",
    ),
    (
        "a list of GPUs",
        "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-4404041a-04cf-1ccf-9e70-f139a9b1e23c)\n",
    ),
    ("the command alone", "$ nvidia-smi topo -m\n"),
    (
        "the peer-to-peer matrix with its command",
        "$ nvidia-smi topo -p2p r\n \tGPU0\tGPU1\t\n GPU0\tX\tGNS\t\n GPU1\tGNS\tX\t\n",
    ),
    (
        "a part of the peer-to-peer matrix behind the matrix",
        "GPU0 GPU1\nGPU0 X SYS\nGPU1 SYS X\n\n \tGPU0\tGPU1\t\n GPU0\tX\tNS\t\n",
    ),
    (
        "another machine's peer-to-peer matrix behind the matrix",
        "GPU0 GPU1\nGPU0 X SYS\nGPU1 SYS X\n\n \tGPU0\tGPU1\tGPU2\t\n GPU0\tX\tNS\tNS\t\n GPU1\tNS\tX\tNS\t\n GPU2\tNS\tNS\tX\t\n",
    ),
    (
        "a Markdown table that lacks a cell",
        "| | GPU0 | GPU1 |\n|---|---|---|\n| GPU0 | X | SYS |\n| GPU1 | | X |\n",
    ),
    (
        "a Markdown table with a cell too many",
        "| | GPU0 | GPU1 |\n|---|---|---|\n| GPU0 | X | SYS | 0 |\n| GPU1 | SYS | X | |\n",
    ),
    (
        "a cut matrix before a whole one",
        "GPU0 GPU1\nGPU0 X SYS\n\nOr rather:\nGPU0 GPU1\nGPU0 X SYS\nGPU1 SYS X\n",
    ),
    (
        "the end of a matrix before a whole one",
        "GPU1 SYS X\n\nOr rather:\nGPU0 GPU1\nGPU0 X SYS\nGPU1 SYS X\n",
    ),
    (
        "unknown links of two GPUs",
        "GPU0 GPU1 CPU Affinity\nGPU0 X N/A 0-7\nGPU1 N/A X 0-7\n",
    ),
    ("X off the diagonal", "GPU0 GPU1\nGPU0 X X\nGPU1 X X\n"),
    ("no X on the diagonal", "GPU0 GPU1\nGPU0 SYS SYS\nGPU1 SYS X\n"),
    ("halves that disagree", "GPU0 GPU1\nGPU0 X PIX\nGPU1 PXB X\n"),
    (
        "link counts that disagree",
        "\tGPU0\tGPU1\nGPU0\t X \tNV12\nGPU1\tNV11\t X \n",
    ),
    ("an NVLink to a NIC", "GPU0 NIC0\nGPU0 X NV4\nNIC0 NV4 X\n"),
    (
        "more links than a GPU can have",
        "GPU0 GPU1 GPU2 GPU3\nGPU0 X NV18 NV18 NV18\nGPU1 NV18 X NV18 NV18\nGPU2 NV18 NV18 X SYS\nGPU3 NV18 NV18 SYS X\n",
    ),
    ("a link too many", "GPU0 GPU1\nGPU0 X SYS SYS\nGPU1 SYS X\n"),
    (
        "a value too many",
        "GPU0 GPU1 CPU Affinity\nGPU0 X SYS 0-7 0\nGPU1 SYS X 0-7 0\n",
    ),
    (
        "a value without column",
        "GPU0 GPU1\nGPU0 X SYS 0-7\nGPU1 SYS X 0-7\n",
    ),
    (
        "a value behind a NIC",
        "GPU0 NIC0 CPU Affinity\nGPU0 X SYS 0-7\nNIC0 SYS X 0-7\n",
    ),
    ("no CPU list", "GPU0 CPU Affinity\nGPU0 X 7-0\n"),
    (
        "no NUMA node",
        "GPU0 CPU Affinity NUMA Affinity\nGPU0 X 0-7 zero\n",
    ),
    (
        "a row that ends before the others",
        "GPU0 GPU1 CPU Affinity NUMA Affinity\nGPU0 X SYS 0-7 0\nGPU1 SYS X 0-7\n",
    ),
    (
        "a text that ends in a value",
        "GPU0 GPU1 CPU Affinity\nGPU0 X SYS 0-15\nGPU1 SYS X 0-1",
    ),
    (
        "a value of an unclear column",
        "GPU0 GPU1 CPU Affinity NUMA Affinity\nGPU0 X SYS                                     0\nGPU1 SYS X                                     0\n",
    ),
    (
        "a column nobody knows",
        "GPU0 GPU1 Power Affinity\nGPU0 X SYS\nGPU1 SYS X\n",
    ),
    ("a GPU twice", "GPU0 GPU1 GPU1\nGPU0 X SYS SYS\n"),
    ("a GPU left out", "GPU0 GPU2\nGPU0 X SYS\nGPU2 SYS X\n"),
    ("a GPU behind a NIC", "GPU0 NIC0 GPU1\nGPU0 X SYS SYS\n"),
    ("NICs alone", "NIC0 NIC1\nNIC0 X PIX\nNIC1 PIX X\n"),
    ("a NIC twice", "GPU0 mlx5_0 mlx5_0\nGPU0 X SYS SYS\n"),
    ("a title twice", "GPU0 CPU Affinity CPU Affinity\nGPU0 X 0 0\n"),
    (
        "prose right behind a value",
        "GPU0 GPU1 CPU Affinity\nGPU0 X SYS 0-7,16-23\nGPU1 SYS X 0-7,16\nAs you can see, SYS is slow.\n",
    ),
    (
        "another matrix behind prose",
        "GPU0 GPU1\nGPU0 X SYS\nGPU1 SYS X\n\nThe other machine:\nGPU0 GPU1\nGPU0 X SYS\nGPU1 SYS X\n",
    ),
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
fn what_is_refused_says_where_and_what_is_allowed() {
    let mut report = String::new();
    for (case, text) in REFUSED {
        let refused = parse(text).expect_err(case);
        report.push_str(&format!("{case}\n    {refused}\n"));
    }
    insta::assert_snapshot!(report);
}

#[test]
fn a_place_counts_characters_of_the_text_as_given() {
    let refused = parse("\t\u{1b}[4mGPU0\tGPU1\u{1b}[0m\nGPU0\t X \tPIQ\nGPU1\tPIX\t X \n").unwrap_err();
    assert_eq!((refused.line, refused.column), (2, 10));
    let refused = parse("\u{1b}[4mGPU0 GPUX\u{1b}[0m\n").unwrap_err();
    assert_eq!((refused.line, refused.column), (1, 10));
}

#[test]
fn more_devices_than_a_machine_may_have_are_refused() {
    let gpus: Vec<String> = (0..33).map(|gpu| format!("GPU{gpu}")).collect();
    assert!(
        parse(&gpus.join(" "))
            .unwrap_err()
            .to_string()
            .contains("more than 32 GPUs")
    );
    let nics: Vec<String> = (0..129).map(|nic| format!("NIC{nic}")).collect();
    let header = format!("GPU0 {}", nics.join(" "));
    assert!(
        parse(&header)
            .unwrap_err()
            .to_string()
            .contains("more than 128 NICs")
    );
    let long = "#\n".repeat(1 << 20);
    assert!(
        parse(&long)
            .unwrap_err()
            .to_string()
            .contains("at most 1048576 are read")
    );
}
