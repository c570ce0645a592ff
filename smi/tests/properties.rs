//! Properties of the parser on arbitrary text, every file cut at every place or changed, every machine printed. It may
//! refuse a text; it never panics and never reads a cut or changed matrix as another.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

#[path = "support/files.rs"]
mod files;
#[path = "support/print.rs"]
mod print;

use gantry_smi::{Hints, TopoText};
use gantry_topology::{
    Gpu, IdList, Link, Machine, MachineParts, Nic, NvLinkBundle, NvLinkPorts, PathClass, PathMatrix,
};
use proptest::prelude::*;

use print::printed;

#[test]
fn text_cut_anywhere_is_refused_or_reads_as_whole_matrix() {
    for (name, text) in files::complete() {
        let whole = TopoText::parse(&text).unwrap();
        for form in [text.clone(), files::expand_tabs(&text), text.replace('\n', "\r\n")] {
            for cut in 0..form.len() {
                if let Ok(read) = TopoText::parse(&form[..cut]) {
                    assert_eq!(read.links(), whole.links(), "{name} cut at {cut}");
                    assert_eq!(read.gpus(), whole.gpus(), "{name} cut at {cut}");
                    let names =
                        |text: &TopoText| text.nics().iter().map(|nic| nic.name.clone()).collect::<Vec<_>>();
                    assert_eq!(names(&read), names(&whole), "{name} cut at {cut}");
                }
            }
        }
    }
}

#[test]
fn text_without_one_row_is_refused() {
    for (name, text) in files::complete() {
        let lines: Vec<&str> = text.lines().collect();
        let devices = TopoText::parse(&text).unwrap().links().len();
        for row in 2..2 + devices {
            let rest: Vec<&str> = lines[..row].iter().chain(&lines[row + 1..]).copied().collect();
            TopoText::parse(&rest.join("\n")).expect_err(&format!("{name} without line {}", row + 1));
        }
    }
}

#[test]
fn text_with_a_row_twice_is_refused() {
    for (name, text) in files::complete() {
        let lines: Vec<&str> = text.lines().collect();
        let devices = TopoText::parse(&text).unwrap().links().len();
        for row in 2..2 + devices {
            let doubled: Vec<&str> = lines[..=row].iter().chain(&lines[row..]).copied().collect();
            TopoText::parse(&doubled.join("\n")).expect_err(&format!("{name} with line {} twice", row + 1));
        }
    }
}

#[test]
fn text_with_changed_link_is_refused_at_link_or_mirror() {
    let files = files::complete();
    for (name, text) in files.iter().filter(|(name, _)| !name.contains("glued")) {
        for (at, word) in ["PIX", "PXB", "PHB", "NODE", "SYS", "SOC", "NV12", "NV18"]
            .into_iter()
            .flat_map(|word| text.match_indices(word))
        {
            let matrix_ends = text.find("Legend").unwrap_or(text.len());
            let line = text[..at].matches('\n').count() + 1;
            if at > matrix_ends || line < 3 {
                continue;
            }
            let other = if word == "PHB" { "PXB" } else { "PHB" };
            let changed = format!("{}{other}{}", &text[..at], &text[at + word.len()..]);
            let refused =
                TopoText::parse(&changed).expect_err(&format!("{name}: {word} at {at} became {other}"));
            assert!(refused.problem.to_string().contains(other), "{name}: {refused}");
        }
    }
}

#[test]
fn copies_in_other_forms_read_the_same() {
    for (name, text) in files::complete() {
        let whole = TopoText::parse(&text).unwrap();
        let forms = [
            text.replace('\n', "\r\n"),
            format!("\u{feff}{text}"),
            files::expand_tabs(&text),
            text.lines().map(|line| format!("    {line}   \n")).collect(),
            files::expand_tabs(&text).lines().map(|line| format!("    {line}\n")).collect(),
            text.lines().map(|line| format!("{}\n", line.trim_end())).collect(),
            text.lines().map(|line| format!("\u{1b}[0m{line}\u{1b}[K\n")).collect(),
            text.replace("\t X ", "\tX"),
            text.replace('\n', "\n\n"),
        ];
        for (form, copy) in forms.iter().enumerate() {
            let read =
                TopoText::parse(copy).unwrap_or_else(|problem| panic!("{name}, form {form}: {problem}"));
            assert_eq!(read, whole, "{name}, form {form}");
        }
    }
}

proptest! {
    #[test]
    fn arbitrary_text_never_panics(text in "\\PC*") {
        let _ = TopoText::parse(&text);
    }

    #[test]
    fn arbitrary_words_of_the_format_never_panic(words in prop::collection::vec(
        prop::sample::select(vec![
            "GPU0", "GPU1", "GPU2", "NIC0", "mlx5_0", "X", " X ", "NV1", "NV18", "NV99", "PIX", "SYS", "NODE", "SOC",
            "CPU Affinity", "NUMA Affinity", "GPU NUMA ID", "0-5", "N/A", "\t", "\t", "\t", " ", "\n", "\n", "\r\n",
            "Legend:", "NIC Legend:", "NIC0: mlx5_0", "X = Self", "#", "\u{1b}[4m", "[0m", "\u{1b}", "```",
        ]),
        0..80,
    )) {
        if let Ok(read) = TopoText::parse(&words.concat()) {
            prop_assert_eq!(TopoText::parse(&printed(&read)).unwrap(), read);
        }
    }

    #[test]
    fn changed_file_is_refused_or_symmetric(
        file in 0usize..39,
        at in any::<prop::sample::Index>(),
        removed in 0usize..40,
        inserted in "[\\t\\n X0-9A-Z,/:=-]{0,6}",
    ) {
        let (_, text) = files::complete().swap_remove(file);
        let from = at.index(text.len());
        let to = (from + removed).min(text.len());
        let changed = format!("{}{inserted}{}", &text[..from], &text[to..]);
        if let Ok(read) = TopoText::parse(&changed) {
            let links = read.links();
            for (a, row) in links.iter().enumerate() {
                prop_assert_eq!(row.len(), links.len());
                for (b, link) in row.iter().enumerate() {
                    prop_assert_eq!(*link, links[b][a]);
                    prop_assert_eq!(*link == Link::Itself, a == b);
                }
            }
            let machine = read.clone().into_machine(&Hints::default());
            prop_assert!(machine.is_ok(), "{:?}", machine);
            let again = TopoText::parse(&printed(&read)).unwrap();
            prop_assert_eq!(again.links(), read.links());
        }
    }

    #[test]
    fn machine_printed_and_read_is_the_same(machine in machines()) {
        let text = TopoText::from(&machine);
        let printed = printed(&text);
        let read = TopoText::parse(&printed);
        prop_assert!(read.is_ok(), "{:?}\n{}", read, printed);
        let read = read.unwrap();
        prop_assert_eq!(&read, &text);
        let again = read.into_machine(&Hints::default()).unwrap();
        let devices = machine.gpus().len() + machine.nics().len();
        for a in 0..devices {
            for b in 0..devices {
                prop_assert_eq!(machine.link(a, b), again.link(a, b));
            }
        }
        for (a, b) in machine.gpus().iter().zip(again.gpus()) {
            prop_assert_eq!((&a.cpus, &a.numa, a.memory_numa), (&b.cpus, &b.numa, b.memory_numa));
        }
    }
}

fn classes() -> impl Strategy<Value = PathClass> {
    prop::sample::select(PathClass::ALL.to_vec())
}

fn lists() -> impl Strategy<Value = Option<IdList>> {
    prop::option::of(
        prop::sample::select(vec!["0", "1", "0-1", "0,2,4", "0-15,128-143", "16383", "7-7"])
            .prop_map(|list| list.parse().unwrap()),
    )
}

/// Machines with direct links or a switch, NICs of any name, values known or not.
fn machines() -> impl Strategy<Value = Machine> {
    let nic = (
        ".{1,12}|mlx5_[0-9]|NIC[0-9]|GPU[0-9]|bnxt_re[0-9]|hfi1_0",
        prop::option::of(".{0,12}|[$#>]{1,2}|[\\[0-9mK\\\\x^]{1,6}|nvidia-smi topo -m|Legend:|a: b"),
    );
    (1usize..=12, prop::collection::vec(nic, 0..5), 0u8..=2)
        .prop_flat_map(|(gpus, nics, kind)| {
            let devices = gpus + nics.len();
            (
                (Just((gpus, nics, kind)), any::<bool>()),
                prop::collection::vec(classes(), devices * devices),
                prop::collection::vec(prop_oneof![4 => Just(0u8), 1 => 1u8..=3], gpus * gpus),
                prop::collection::vec((lists(), lists(), prop::option::of(0u16..16_383)), gpus),
                1u8..=18,
            )
        })
        .prop_filter_map(
            "NIC names are unique",
            |(((gpus, nics, kind), apart), classes, links, values, switch)| {
                let devices = gpus + nics.len();
                let mut parts = MachineParts {
                    paths: PathMatrix::from_fn(devices, |row, column| classes[row * devices + column]),
                    ..MachineParts::default()
                };
                for (index, (cpus, numa, memory_numa)) in values.into_iter().enumerate() {
                    parts.gpus.push(Gpu {
                        index: u8::try_from(index).unwrap(),
                        cpus,
                        numa,
                        memory_numa,
                        nvlink: (kind == 2).then_some(NvLinkPorts {
                            version: None,
                            switch_links: switch,
                            island: u8::from(apart && index >= gpus / 2),
                        }),
                        ..Gpu::default()
                    });
                }
                if kind == 1 {
                    for row in 0..gpus {
                        for column in 0..row {
                            let count = links[row * gpus + column];
                            if count > 0 {
                                let gpus = [column, row].map(|index| u8::try_from(index).unwrap());
                                parts.nvlinks.push(NvLinkBundle { gpus, links: count });
                            }
                        }
                    }
                }
                for (name, device) in nics {
                    parts.nics.push(Nic { name, device, ..Nic::default() });
                }
                Machine::new(parts).ok()
            },
        )
}
