//! Texts that lost something: the end of a value, a cell, columns, a device's last letters. None is read as another machine.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests fail by panicking"
)]

use gantry_topology::text::{TopoText, parse};

fn read(text: &str) -> TopoText {
    parse(text).unwrap_or_else(|problem| panic!("{problem}\n{text}"))
}

/// Where a text is refused.
fn refused(text: &str) -> (usize, usize) {
    match parse(text) {
        Ok(read) => panic!("read as\n{}\nfrom\n{text}", read.aligned()),
        Err(problem) => (problem.line, problem.column),
    }
}

#[test]
fn a_text_that_ends_in_a_value_unlike_those_of_the_other_rows_is_refused() {
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
        assert_eq!(
            refused(&format!("{}\nme@node:~$ ", text(first, cut))),
            (3, 14),
            "{cut}"
        );
        assert_eq!(read(&text(first, last)), read(&text(first, &format!("{last}\n"))));
        // A line end says that the value is whole.
        assert_eq!(
            read(&text(first, &format!("{cut}\n"))).gpus()[1].cpus,
            cut.parse().ok()
        );
    }
}

#[test]
fn a_text_that_ends_in_the_memory_node_of_another_gpu_is_refused() {
    let text = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n\
                GPU0\t X \tNV18\t0-71\t0\t\t2\nGPU1\tNV18\t X \t72-143\t1\t\t26";
    let nodes = |text: &str| -> Vec<String> {
        let gpus = read(text).gpus().to_vec();
        gpus.into_iter()
            .filter_map(|gpu| gpu.memory_numa)
            .map(|list| list.as_str().to_owned())
            .collect()
    };
    assert_eq!(nodes(text), ["2", "26"]);
    let cut = text.strip_suffix('6').unwrap();
    assert_eq!(refused(cut), (3, 25));
    assert_eq!(nodes(&format!("{cut}\n")), ["2", "2"]);
}
