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
