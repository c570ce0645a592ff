//! The reader of `nvidia-smi topo -m` output against real texts: what each file says is read exactly, and printed back.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests fail by panicking"
)]

#[path = "text/files.rs"]
mod files;
#[path = "text/plain.rs"]
mod plain;

use std::fmt::Write as _;

use gantry_topology::text::{Hints, TopoText, parse, read_machine};
use gantry_topology::{IdList, Link, PathClass};

/// Files whose cells are glued, which splitting at blanks cannot read.
const GLUED: [&str; 2] = ["dgx-b200-8gpu-16nic-gluedcells", "dgx1-p100-8gpu-4ib-soc"];

#[test]
fn every_complete_file_is_read_as_splitting_at_blanks_reads_it() {
    let files = files::complete();
    assert_eq!(files.len(), 39);
    for (name, text) in files {
        if GLUED.contains(&name.as_str()) {
            continue;
        }
        let expected = plain::read(&text);
        let read = parse(&text).unwrap_or_else(|problem| panic!("{name}: {problem}"));
        let matrix: Vec<Vec<String>> = read
            .links()
            .iter()
            .map(|row| row.iter().map(Link::to_string).collect())
            .collect();
        assert_eq!(matrix, expected.links, "{name}");
        let names: Vec<&str> = read.nics().iter().map(|nic| nic.name.as_str()).collect();
        assert_eq!(names, expected.nics, "{name}");
        assert_eq!(read.gpus().len(), expected.gpus, "{name}");
        let devices: Vec<&str> = read
            .nics()
            .iter()
            .filter_map(|nic| nic.device.as_deref())
            .collect();
        assert_eq!(devices, expected.devices, "{name}");
        for (gpu, values) in read.gpus().iter().zip(&expected.values) {
            let written: Vec<&str> = [&gpu.cpus, &gpu.numa, &gpu.memory_numa]
                .into_iter()
                .flatten()
                .map(IdList::as_str)
                .collect();
            assert_eq!(&written, values, "{name}");
        }
    }
}

#[test]
fn every_complete_file_is_read_as_recorded() {
    let mut report = String::new();
    for (name, text) in files::complete() {
        let read = parse(&text).unwrap_or_else(|problem| panic!("{name}: {problem}"));
        writeln!(report, "== {name}\n{}", read.aligned()).unwrap();
    }
    insta::assert_snapshot!(report);
}

/// What was read as a Markdown table: `thin` without blanks around the cells.
fn markdown(text: &TopoText, thin: bool) -> String {
    let names: Vec<String> = (0..text.gpus().len())
        .map(|gpu| format!("GPU{gpu}"))
        .chain(text.nics().iter().map(|nic| nic.name.clone()))
        .collect();
    let titles = ["CPU Affinity", "NUMA Affinity", "GPU NUMA ID"].map(str::to_owned);
    let mut rows = vec![[vec![String::new()], names.clone(), titles.to_vec()].concat()];
    rows.push(vec![if thin { "-" } else { ":---:" }.to_owned(); rows[0].len()]);
    for (device, (name, links)) in names.iter().zip(text.links()).enumerate() {
        let mut row = vec![name.clone()];
        row.extend(links.iter().map(Link::to_string));
        let gpu = text.gpus().get(device).cloned().unwrap_or_default();
        let values = [gpu.cpus, gpu.numa, gpu.memory_numa];
        row.extend(values.map(|value| value.map_or(String::new(), |list| list.as_str().to_owned())));
        rows.push(row);
    }
    let gap = if thin { "" } else { " " };
    let line = |row: &Vec<String>| format!("|{gap}{}{gap}|\n", row.join(&format!("{gap}|{gap}")));
    rows.iter().map(line).collect()
}

#[test]
fn every_complete_file_is_read_the_same_from_a_markdown_table() {
    for (name, text) in files::complete() {
        let read = parse(&text).unwrap();
        for thin in [false, true] {
            let table = markdown(&read, thin);
            let again = parse(&table).unwrap_or_else(|problem| panic!("{name}: {problem}\n{table}"));
            assert_eq!(again.links(), read.links(), "{name}");
            assert_eq!(again.gpus(), read.gpus(), "{name}\n{table}");
            assert!(gantry_topology::read(&table).is_ok(), "{name}");
        }
    }
}

#[test]
fn machines_are_inferred_as_recorded() {
    let mut report = String::new();
    for (name, text) in files::complete() {
        let machine = read_machine(&text).unwrap_or_else(|problem| panic!("{name}: {problem}"));
        let model = machine.gpus()[0].model.as_deref().unwrap_or("unknown");
        let switch: Vec<u8> = (0..machine.gpus().len())
            .map(|gpu| machine.switch_links(gpu))
            .collect();
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
        writeln!(report, "{name}: {}", parse(&text).unwrap_err()).unwrap();
    }
    insta::assert_snapshot!(report, @r#"
    truncated-8gpu-76nics-limited-display: line 6, column 1: row GPU2 is missing; the header names 64 devices and each needs its row; is the text cut?
    truncated-b200-8gpu-broken-nvlink: line 2, column 1: row GPU0 without a header line; a line such as "GPU0 GPU1 CPU Affinity" must name the columns first
    truncated-dgx2-16gpu: line 8, column 1: row GPU5 is missing; the header names 26 devices and each needs its row; is the text cut?
    "#);
}

#[test]
fn every_file_is_printed_as_the_tool_prints_it_and_read_back() {
    for (name, text) in files::complete() {
        let body: String = text.lines().skip(1).map(|line| format!("{line}\n")).collect();
        let read = parse(&body).unwrap();
        let printed = read.to_string();
        assert_eq!(parse(&printed).unwrap(), read, "{name}");
        assert_eq!(parse(&read.aligned()).unwrap().links(), read.links(), "{name}");
        let machine = read.clone().into_machine(&Hints::default()).unwrap();
        assert_eq!(TopoText::from(&machine), read, "{name}");
    }
}

#[test]
fn a_text_of_todays_tool_is_printed_character_by_character() {
    for name in ["hgx-a800-8gpu-8nic", "dgx-h200-8gpu-12nic"] {
        let text = files::named(name);
        let body: String = text.lines().skip(1).map(|line| format!("{line}\n")).collect();
        // The files have lost the tabs at the end of NIC rows and the blank behind X.
        let trimmed = |text: &str| text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n");
        assert_eq!(
            trimmed(&parse(&body).unwrap().to_string()),
            trimmed(&body),
            "{name}"
        );
    }
}

#[test]
fn glued_cells_come_apart() {
    let b200 = parse(&files::named(GLUED[0])).unwrap();
    let cell = |row: usize, column: usize| b200.links()[row][column].to_string();
    assert_eq!((cell(2, 16), cell(2, 17)), ("PXB".into(), "NODE".into()));
    assert_eq!((cell(4, 16), cell(4, 17)), ("SYS".into(), "SYS".into()));
    assert_eq!((cell(16, 16), cell(16, 17)), ("X".into(), "NODE".into()));
    assert_eq!(b200.nics().len(), 16);

    let p100 = parse(&files::named(GLUED[1])).unwrap();
    let names: Vec<&str> = p100.nics().iter().map(|nic| nic.name.as_str()).collect();
    assert_eq!(
        (p100.gpus().len(), names),
        (8, vec!["mlx5_0", "mlx5_2", "mlx5_1", "mlx5_3"])
    );
    assert_eq!(p100.links()[0][5], Link::Pcie(PathClass::Soc));
    assert_eq!(p100.gpus()[0].cpus.as_ref().map(IdList::as_str), Some("1-1"));
}

#[test]
fn a_blank_cell_is_unknown_and_shifts_nothing() {
    let slurm = files::named("slurm-4xa100-nv4-3nic-blank-affinity");
    let expanded = files::expand_tabs(&slurm);
    assert!(!expanded.contains('\t'));
    for text in [slurm, expanded] {
        let gpus = parse(&text).unwrap();
        let values: Vec<(Option<&str>, Option<&str>)> = gpus
            .gpus()
            .iter()
            .map(|gpu| {
                (
                    gpu.cpus.as_ref().map(IdList::as_str),
                    gpu.numa.as_ref().map(IdList::as_str),
                )
            })
            .collect();
        let expected = [
            (Some("0"), Some("0")),
            (Some("0"), Some("0")),
            (None, Some("1")),
            (None, Some("1")),
        ];
        assert_eq!(values, expected);
    }
}

#[test]
fn the_machine_comment_names_model_and_machine() {
    let machine = read_machine(&files::named("hgx-a800-8gpu-8nic")).unwrap();
    assert!(
        machine.name().starts_with("8x A800-SXM4-80GB (NV8)"),
        "{}",
        machine.name()
    );
    assert!(
        machine
            .gpus()
            .iter()
            .all(|gpu| gpu.model.as_deref() == Some("A800"))
    );
    let mixed = read_machine(&files::named("workstation-5gpu-uneven-numa")).unwrap();
    assert!(mixed.gpus().iter().all(|gpu| gpu.model.is_none()));
}

#[test]
fn a_hint_overrides_the_comment() {
    let text = parse(&files::named("hgx-h100-8gpu-nonic")).unwrap();
    let hints = Hints {
        model: Some("NVIDIA B200".into()),
    };
    let machine = text.into_machine(&hints).unwrap();
    assert_eq!(machine.gpus()[7].model.as_deref(), Some("NVIDIA B200"));
    assert_eq!(machine.gpus()[7].nvlink.unwrap().version, Some(5));
}
