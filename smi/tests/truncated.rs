//! Truncated texts: the end of a value, a cell, columns, the end of a device. None is read as another machine.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use gantry_smi::TopoText;

fn read(text: &str) -> TopoText {
    TopoText::parse(text).unwrap_or_else(|problem| panic!("{problem}\n{text}"))
}

/// Where a text is refused.
fn refused(text: &str) -> (usize, usize) {
    match TopoText::parse(text) {
        Ok(read) => panic!("read as\n{}\nfrom\n{text}", read.aligned()),
        Err(problem) => (problem.line, problem.column),
    }
}

/// CPU list and NUMA nodes of each GPU, `-` where unknown.
fn values(text: &TopoText) -> Vec<String> {
    let shown =
        |value: &Option<gantry_topology::IdList>| value.as_ref().map_or("-", |list| list.as_str()).to_owned();
    let gpus = text.gpus().iter();
    gpus.map(|gpu| format!("{} {}", shown(&gpu.cpus), shown(&gpu.numa))).collect()
}

#[test]
fn text_ending_in_value_unlike_other_rows_is_refused() {
    let text = |first: &str, last: &str| {
        format!("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tSYS\t{first}\nGPU1\tSYS\t X \t{last}")
    };
    for (first, last, cut) in [
        ("0-13", "14-27", "14"),
        ("0-13,28-41", "14-27,42-55", "14-27,42"),
        ("0-13,28-41", "14-27,42-55", "14-27"),
        ("0,2,4", "1,3,5", "1,3"),
    ] {
        assert_eq!(refused(&text(first, cut)), (3, 14), "{cut}");
        assert_eq!(read(&text(first, last)), read(&text(first, &format!("{last}\n"))));
        // A line end completes the value.
        assert_eq!(read(&text(first, &format!("{cut}\n"))).gpus()[1].cpus, cut.parse().ok());
    }
}

#[test]
fn text_ending_in_memory_node_of_other_gpu_is_refused() {
    let text = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n\
                GPU0\t X \tNV18\t0-71\t0\t\t2\nGPU1\tNV18\t X \t72-143\t1\t\t26";
    let nodes = |text: &str| -> Vec<String> {
        let gpus = read(text).gpus().to_vec();
        gpus.into_iter().filter_map(|gpu| gpu.memory_numa).map(|list| list.as_str().to_owned()).collect()
    };
    assert_eq!(nodes(text), ["2", "26"]);
    let cut = text.strip_suffix('6').unwrap();
    assert_eq!(refused(cut), (3, 25));
    assert_eq!(nodes(&format!("{cut}\n")), ["2", "2"]);
}

#[test]
fn lost_value_between_double_tabs_moves_no_other_value() {
    let header = "\t\tGPU0\tGPU1\t\tCPU Affinity\tNUMA Affinity\n";
    let whole = format!("{header}GPU0\t X \t\tSYS\t\t0-23\t\t0\nGPU1\tSYS\t\t X \t\t24-47\t\t1\n");
    assert_eq!(values(&read(&whole)), ["0-23 0", "24-47 1"]);
    assert_eq!(refused(&whole.replace("24-47\t\t1", "24-47")), (3, 16));
    let all = whole.replace("24-47\t\t1", "24-47").replace("0-23\t\t0", "0-23");
    assert_eq!(refused(&all), (2, 16));
    // Two tabs before the values alone.
    let header = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\n";
    let whole = format!("{header}GPU0\t X \tSYS\t\t0-23\t\t0\nGPU1\tSYS\t X \t\t24-47\t\t1\n");
    assert_eq!(values(&read(&whole)), ["0-23 0", "24-47 1"]);
    assert_eq!(refused(&whole.replace("24-47\t\t1", "24-47")), (3, 15));
    // With a tab for each cell, as nvidia-smi prints them, blank cells are certain.
    let printed = format!("{header}GPU0\t X \tSYS\t0-23\t0\nGPU1\tSYS\t X \t\t1\n");
    assert_eq!(values(&read(&printed)), ["0-23 0", "- 1"]);
}

#[test]
fn title_split_by_blanks_is_refused() {
    let rows = "GPU0 X SYS 0-17,3        6-53\nGPU1 SYS X 18-35,5        4-71\n";
    let torn = format!("GPU0 GPU1 CPU Affi        nity NUMA Affinity\n{rows}");
    assert_eq!(refused(&torn).0, 1);
    let whole = rows.replace("        ", "").replace('\n', " 0\n");
    for titles in
        ["CPU Affinity NUMA Affinity", "CPUAffinity  NUMAAffinity", "CPU   affinity  NUMA  affinity"]
    {
        let text = format!("GPU0 GPU1 {titles}\n{whole}");
        assert_eq!(values(&read(&text)), ["0-17,36-53 0", "18-35,54-71 0"]);
    }
}

#[test]
fn text_clipped_at_columns_is_refused() {
    assert_eq!(refused("     GPU0 \nGPU0     X\nGPU1    NO\nGPU2    SY\n"), (3, 1));
    assert_eq!(refused("     GPU0 \nGPU0     X\nNIC0    PI\n"), (3, 1));
    assert_eq!(refused("GPU0 GPU1 \nGPU0    X  SYS\nGPU1  SYS    X\nGPU2    S\n"), (4, 1));
}

#[test]
fn text_ending_in_lone_nic_without_number_is_refused() {
    let text = "GPU0 NIC0\nGPU0 X SYS\nNIC0 SYS X\n\nNIC Legend:\n\n  NIC0: ";
    for cut in ["mlx5_", "mlx", "ml", "mlx5_bond_"] {
        assert_eq!(refused(&format!("{text}{cut}")), (7, 3), "{cut}");
        // A line end completes the device.
        let ended = read(&format!("{text}{cut}\n"));
        assert_eq!(ended.nics()[0].device.as_deref(), Some(cut));
    }
    let whole = read(&format!("{text}mlx5_0"));
    assert_eq!(whole.nics()[0].device.as_deref(), Some("mlx5_0"));
}

#[test]
fn number_with_leading_zero_is_refused() {
    let text = |cpus: &str| format!("GPU0 CPU Affinity\nGPU0 X {cpus}\n");
    for cpus in ["023", "0-03", "00", "0-15,064-79"] {
        assert_eq!(refused(&text(cpus)), (2, 8), "{cpus}");
    }
    assert_eq!(values(&read(&text("0,10-20"))), ["0,10-20 -"]);
}
