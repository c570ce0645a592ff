//! The parser against recorded texts: every file is read exactly, and printed back.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

#[path = "support/files.rs"]
mod files;
#[path = "support/plain.rs"]
mod plain;
#[path = "support/print.rs"]
mod print;

use std::fmt::Write as _;

use gantry_smi::{Hints, TopoText, read_machine};
use gantry_topology::{IdList, Link, PathClass};

use print::printed;

/// Files whose cells are glued, which splitting at blanks cannot read.
const GLUED: [&str; 2] = ["dgx-b200-8gpu-16nic-gluedcells", "dgx1-p100-8gpu-4ib-soc"];

#[test]
fn complete_files_match_split_at_blanks() {
    let files = files::complete();
    assert_eq!(files.len(), 39);
    for (name, text) in files {
        if GLUED.contains(&name.as_str()) {
            continue;
        }
        let expected = plain::read(&text);
        let read = TopoText::parse(&text).unwrap_or_else(|problem| panic!("{name}: {problem}"));
        let matrix: Vec<Vec<String>> =
            read.links().iter().map(|row| row.iter().map(Link::to_string).collect()).collect();
        assert_eq!(matrix, expected.links, "{name}");
        let names: Vec<&str> = read.nics().iter().map(|nic| nic.name.as_str()).collect();
        assert_eq!(names, expected.nics, "{name}");
        assert_eq!(read.gpus().len(), expected.gpus, "{name}");
        let devices: Vec<&str> = read.nics().iter().filter_map(|nic| nic.device.as_deref()).collect();
        assert_eq!(devices, expected.devices, "{name}");
        for (gpu, values) in read.gpus().iter().zip(&expected.values) {
            let written: Vec<&str> =
                [&gpu.cpus, &gpu.numa, &gpu.memory_numa].into_iter().flatten().map(IdList::as_str).collect();
            assert_eq!(&written, values, "{name}");
        }
    }
}

#[test]
fn complete_files_match_recorded_reading() {
    let mut report = String::new();
    for (name, text) in files::complete() {
        let read = TopoText::parse(&text).unwrap_or_else(|problem| panic!("{name}: {problem}"));
        writeln!(report, "== {name}\n{}", read.aligned()).unwrap();
    }
    insta::assert_snapshot!(report);
}

#[test]
fn complete_files_match_recorded_machines() {
    let mut report = String::new();
    for (name, text) in files::complete() {
        let machine = read_machine(&text).unwrap_or_else(|problem| panic!("{name}: {problem}"));
        let model = machine.gpus()[0].model.as_deref().unwrap_or("unknown");
        let switch: Vec<u8> = (0..machine.gpus().len()).map(|gpu| machine.switch_links(gpu)).collect();
        writeln!(
            report,
            "== {name}\nmodel {model}, bundles {}, switch links {switch:?}",
            machine.nvlinks().len()
        )
        .unwrap();
        for row in Vec::<String>::from(machine.paths().clone()) {
            writeln!(report, "  {row}").unwrap();
        }
    }
    insta::assert_snapshot!(report);
}

#[test]
fn truncated_files_are_refused_with_line_and_column() {
    let mut report = String::new();
    for (name, text) in files::truncated() {
        writeln!(report, "{name}: {}", TopoText::parse(&text).unwrap_err()).unwrap();
    }
    insta::assert_snapshot!(report, @r#"
    truncated-8gpu-76nics-limited-display: line 6, column 1: row GPU2 is missing: the header names 64 devices and each needs its row; is the text truncated?
    truncated-b200-8gpu-broken-nvlink: line 2, column 1: row GPU0 without a header line; a line such as "GPU0 GPU1 CPU Affinity" must name the columns first
    truncated-dgx2-16gpu: line 8, column 1: row GPU5 is missing: the header names 26 devices and each needs its row; is the text truncated?
    "#);
}

#[test]
fn complete_files_printed_again_read_the_same() {
    for (name, text) in files::complete() {
        let body: String = text.lines().skip(1).map(|line| format!("{line}\n")).collect();
        let read = TopoText::parse(&body).unwrap();
        assert_eq!(TopoText::parse(&printed(&read)).unwrap(), read, "{name}");
        assert_eq!(TopoText::parse(&read.aligned()).unwrap().links(), read.links(), "{name}");
        let machine = read.clone().into_machine(&Hints::default()).unwrap();
        assert_eq!(TopoText::from(&machine), read, "{name}");
    }
}

#[test]
fn files_of_current_driver_print_identically() {
    for name in ["hgx-a800-8gpu-8nic", "dgx-h200-8gpu-12nic"] {
        let text = files::named(name);
        let body: String = text.lines().skip(1).map(|line| format!("{line}\n")).collect();
        // The files have lost the tabs at the end of NIC rows and the blank behind X.
        let trimmed = |text: &str| text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n");
        assert_eq!(trimmed(&printed(&TopoText::parse(&body).unwrap())), trimmed(&body), "{name}");
    }
}

#[test]
fn glued_cells_are_separated() {
    let b200 = TopoText::parse(&files::named(GLUED[0])).unwrap();
    let cell = |row: usize, column: usize| b200.links()[row][column].to_string();
    assert_eq!((cell(2, 16), cell(2, 17)), ("PXB".into(), "NODE".into()));
    assert_eq!((cell(4, 16), cell(4, 17)), ("SYS".into(), "SYS".into()));
    assert_eq!((cell(16, 16), cell(16, 17)), ("X".into(), "NODE".into()));
    assert_eq!(b200.nics().len(), 16);

    let p100 = TopoText::parse(&files::named(GLUED[1])).unwrap();
    let names: Vec<&str> = p100.nics().iter().map(|nic| nic.name.as_str()).collect();
    assert_eq!((p100.gpus().len(), names), (8, vec!["mlx5_0", "mlx5_2", "mlx5_1", "mlx5_3"]));
    assert_eq!(p100.links()[0][5], Link::Pcie(PathClass::Soc));
    assert_eq!(p100.gpus()[0].cpus.as_ref().map(IdList::as_str), Some("1-1"));
}

#[test]
fn blank_cell_is_unknown_and_shifts_no_value() {
    let slurm = files::named("slurm-4xa100-nv4-3nic-blank-affinity");
    let expanded = files::expand_tabs(&slurm);
    assert!(!expanded.contains('\t'));
    for text in [slurm, expanded] {
        let gpus = TopoText::parse(&text).unwrap();
        let values: Vec<(Option<&str>, Option<&str>)> = gpus
            .gpus()
            .iter()
            .map(|gpu| (gpu.cpus.as_ref().map(IdList::as_str), gpu.numa.as_ref().map(IdList::as_str)))
            .collect();
        let expected = [(Some("0"), Some("0")), (Some("0"), Some("0")), (None, Some("1")), (None, Some("1"))];
        assert_eq!(values, expected);
    }
}

#[test]
fn machine_comment_names_model_and_machine() {
    let machine = read_machine(&files::named("hgx-a800-8gpu-8nic")).unwrap();
    assert!(machine.name().starts_with("8x A800-SXM4-80GB (NV8)"), "{}", machine.name());
    assert!(machine.gpus().iter().all(|gpu| gpu.model.as_deref() == Some("A800")));
    let mixed = read_machine(&files::named("workstation-5gpu-uneven-numa")).unwrap();
    assert!(mixed.gpus().iter().all(|gpu| gpu.model.is_none()));
}

#[test]
fn model_hint_overrides_comment() {
    let text = TopoText::parse(&files::named("hgx-h100-8gpu-nonic")).unwrap();
    let hints = Hints { model: Some("NVIDIA B200".into()) };
    let machine = text.into_machine(&hints).unwrap();
    assert_eq!(machine.gpus()[7].model.as_deref(), Some("NVIDIA B200"));
    assert_eq!(machine.gpus()[7].nvlink.unwrap().version, Some(5));
}
