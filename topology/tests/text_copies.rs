//! Copies of the output as people show them: their own words before a broken header, a quotation between other words, tags of
//! tools on the output alone, tables with rules, blocks of issue trackers.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests fail by panicking"
)]

use gantry_topology::text::{TopoText, has_matrix, parse};

fn read(text: &str) -> TopoText {
    assert!(
        gantry_topology::read(text).is_ok(),
        "{:?}\n{text}",
        gantry_topology::read(text)
    );
    parse(text).unwrap_or_else(|problem| panic!("{problem}\n{text}"))
}

#[test]
fn words_may_stand_before_a_header_that_is_cut_or_broken() {
    let rows = "GPU0 X SYS 0-7 0\nGPU1 SYS X 8-15 1\n";
    let whole = read(&format!("GPU0 GPU1 CPU Affinity NUMA Affinity\n{rows}"));
    for header in [
        "GPU0 GPU1 CPU Affinity NUMA",
        "GPU0\nGPU1 CPU Affinity NUMA Affinity",
        "GPU0 GPU1 CPU Affi\nnity NUMA Affinity",
        "GPU0 GPU1 CPU\nAffinity\nNUMA Affinity",
        "GPU0GPU1CPU Affinity\tNUMA Affinity",
    ] {
        for words in [
            "",
            "Our node:\n",
            "GPU0 and GPU1 are far from each other.\n\n",
            "Our node\nis this:\n",
        ] {
            let text = format!("{words}{header}\n{rows}");
            assert_eq!(read(&text), whole, "{text}");
            assert!(has_matrix(&text), "{text}");
        }
    }
    let alone = "GPU0 CPU Aff\ninity\nGPU0 X 0-7\n";
    assert_eq!(read(&format!("Our node:\n{alone}")), read(alone));
}

/// What a text is with a mark before every line of it.
fn marked(mark: &str, text: &str) -> String {
    text.lines().map(|line| format!("{mark}{line}\n")).collect()
}

const TEXT: &str = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tSYS\t\t0\nGPU1\tSYS\t X \t\t1\n\nLegend:\n\n  X    = Self\n";

#[test]
fn a_quotation_among_other_words_is_read_without_its_marks() {
    let quoted = marked("> ", TEXT);
    for text in [
        format!("I get:\n{quoted}"),
        format!("{quoted}\nWhy is it SYS?\n"),
        format!("On Mon, 6 May 2024 Bob wrote:\n\n{quoted}\n"),
        format!("On Mon, 6 May 2024 Bob wrote:\n> Hello,\n{quoted}Thank you.\n\n> Bye\n"),
        format!("Bob:\n{}", marked(">> ", TEXT)),
    ] {
        assert_eq!(read(&text), read(TEXT), "{text}");
    }
}

#[test]
fn a_tag_on_the_output_alone_is_no_part_of_it() {
    for (before, tag, behind) in [
        (
            "Attaching to cuda-1\n",
            "cuda-1  | ",
            "cuda-1 exited with code 0\n",
        ),
        (
            "-- Logs begin at Mon 2024-05-06 08:00:00 UTC. --\n",
            "May 06 11:22:08 node1 topo[12]: ",
            "",
        ),
        ("srun: job 123 queued and waiting for resources\n", "0: ", ""),
        (
            "$ kubectl logs --prefix -l app=topo\n",
            "[pod/topo-x/main] ",
            "$ \n",
        ),
    ] {
        let text = format!("{before}{}{behind}", marked(tag, TEXT));
        assert_eq!(read(&text), read(TEXT), "{text}");
    }
}

#[test]
fn a_row_without_the_tag_of_the_others_or_with_another_is_no_row_of_theirs() {
    let rows = [
        "GPU0 GPU1 NIC0",
        "GPU0 X SYS PIX",
        "GPU1 SYS X SYS",
        "NIC0 PIX SYS X",
    ];
    for tag in ["> ", "node1: ", "0: "] {
        for other in ["", "node2: ", "1: ", ">> "] {
            for odd in 0..rows.len() {
                let line = |(at, row): (usize, &&str)| match at == odd {
                    true => format!("{other}{row}\n"),
                    false => format!("{tag}{row}\n"),
                };
                let text: String = rows.iter().enumerate().map(line).collect();
                assert!(parse(&text).is_err(), "{text}");
                assert!(parse(&format!("I get:\n{text}")).is_err(), "{text}");
            }
        }
    }
    let two = "I get:\nnode1: GPU0 GPU1\nnode1: GPU0 X SYS\nnode1: GPU1 SYS X\nnode2: GPU0 GPU1\nnode2: GPU0 X PIX\nnode2: GPU1 PIX X\n";
    assert!(parse(two).is_err());
    // Comments of a machine file show what it was made from.
    let file = "# GPU0 GPU1\n# GPU0 X SYS\n# GPU1 SYS X\ngpus: [{index: 0}]\npaths: [X]\n";
    assert_eq!(gantry_topology::read(file).unwrap().gpus().len(), 1);
}

#[test]
fn rules_between_the_rows_of_a_table_are_no_rows() {
    let markdown = "| | GPU0 | GPU1 | CPU Affinity |\n|---|---|---|---|\n| GPU0 | X | SYS | 0-7 |\n| GPU1 | SYS | X | 8-15 |\n";
    let grid = "+------+------+------+--------------+\n|      | GPU0 | GPU1 | CPU Affinity |\n+======+======+======+==============+\n\
                | GPU0 | X    | SYS  | 0-7          |\n+------+------+------+--------------+\n\
                | GPU1 | SYS  | X    | 8-15         |\n+------+------+------+--------------+\n";
    let org = "|      | GPU0 | GPU1 | CPU Affinity |\n|------+------+------+--------------|\n\
               | GPU0 | X    | SYS  | 0-7          |\n| GPU1 | SYS  | X    | 8-15         |\n";
    for table in [grid, org] {
        assert_eq!(read(table), read(markdown), "{table}");
        assert_eq!(
            read(&format!("Our node:\n\n{table}\nIt is slow.\n")),
            read(markdown)
        );
    }
    let lacking = grid.replace("| SYS  | X    |", "|      | X    |");
    assert_eq!(parse(&lacking).unwrap_err().line, 6);
}

#[test]
fn bars_that_a_web_page_leaves_behind_lines_need_not_stand_behind_all() {
    let matrix = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tSYS\t0-7\nGPU1\tSYS\t X \t8-15\n";
    let barred = matrix.replace('\n', " | |\n");
    for text in [
        format!("{barred}\nIt is slow.\n"),
        format!("Our node:\n{barred}"),
        barred.replacen(" | |", "", 1),
    ] {
        assert_eq!(read(&text), read(matrix), "{text}");
    }
}

#[test]
fn blocks_of_an_issue_tracker_are_no_json() {
    let matrix = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tSYS\t0-7,16-23\nGPU1\tSYS\t X \t0-7,16\n";
    for (begin, end) in [
        ("{noformat}", "{noformat}"),
        ("{code}", "{code}"),
        ("{code:title=node1|theme=Eclipse}", "{code}"),
    ] {
        assert_eq!(
            read(&format!("{begin}\n{matrix}{end}\n")),
            read(matrix),
            "{begin}"
        );
    }
    assert!(gantry_topology::read("{\n\"gpus\": [{\"index\": 0}],\n\"paths\": [\"X\"]\n}").is_ok());
}

/// What stands behind the matrix, a megabyte of numbers perhaps, is not put together with its last row.
#[test]
fn a_row_is_broken_over_a_thousand_lines_at_most() {
    let text = |lines: usize| format!("GPU0 CPU Affinity\nGPU0 X 0,\n{}0\n", "0,\n".repeat(lines));
    assert_eq!(
        read(&text(500)).gpus()[0].cpus,
        format!("0,{}0", "0,".repeat(500)).parse().ok()
    );
    assert!(parse(&text(1500)).is_err());
}
