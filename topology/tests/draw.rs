//! The picture of a machine for the terminal, of recorded machines.
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

use gantry_topology::draw::{Picture, dot, svg};
use gantry_topology::{Gpu, Machine, MachineParts, Nic, PathClass, PathMatrix};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/topologies");

fn machine(name: &str) -> Machine {
    let text = std::fs::read_to_string(format!("{FOLDER}/{name}.txt")).unwrap();
    gantry_smi::read_machine(&text).unwrap()
}

#[test]
fn machines_match_recorded_pictures() {
    let names = [
        "rtx3090-2gpu-nv4",
        "a40-8gpu-4bridgepairs-2nic",
        "dgx-a100-8gpu-10nic",
        "dgx-h200-8gpu-12nic",
        "v100-sxm2-8gpu-cubemesh-1mlx5",
        "rtxpro6000-8gpu-microchip-3level",
        "leonardo-4xa100-nv4-4nic",
        "workstation-5gpu-uneven-numa",
    ];
    let pictures: Vec<String> =
        names.iter().map(|name| format!("== {name}\n{}", Picture::of(&machine(name)))).collect();
    insta::assert_snapshot!(pictures.join("\n"));
}

#[test]
fn notes_are_drawn_beside_their_gpus() {
    let machine = machine("a40-8gpu-4bridgepairs-2nic");
    let picture =
        Picture::of(&machine).note(0, "team-a/train-0").note(1, "team-a/train-0").note(99, "nowhere");
    insta::assert_snapshot!(picture);
}

#[test]
fn every_device_is_drawn_once() {
    for entry in std::fs::read_dir(FOLDER).unwrap() {
        let text = std::fs::read_to_string(entry.unwrap().path()).unwrap();
        let Ok(machine) = gantry_smi::read_machine(&text) else {
            continue;
        };
        for columns in [0, 60, 100, 200] {
            let picture = Picture::of(&machine).columns(columns).to_string();
            let boxes: Vec<&str> = picture.lines().filter(|line| line.contains(['│', '╭', '╰'])).collect();
            let words: Vec<&str> = boxes.iter().flat_map(|line| line.split_whitespace()).collect();
            for gpu in 0..machine.gpus().len() {
                let name = format!("GPU{gpu}");
                assert_eq!(words.iter().filter(|word| **word == name).count(), 1, "{name}\n{picture}");
            }
            for nic in machine.nics() {
                let drawn = words.iter().filter(|word| **word == nic.name).count();
                assert_eq!(drawn, 1, "{}\n{picture}", nic.name);
            }
        }
    }
}

#[test]
fn colors_change_no_character() {
    let machine = machine("dgx-a100-8gpu-10nic");
    let plain = Picture::of(&machine).to_string();
    let colored = Picture::of(&machine).color(true).to_string();
    assert!(!plain.contains('\u{1b}'));
    let mut bare = String::new();
    for part in colored.split('\u{1b}') {
        let code = part.starts_with('[').then(|| part.find('m')).flatten();
        bare.push_str(code.map_or(part, |end| &part[end + 1..]));
    }
    assert_eq!(bare, plain);
}

/// A DGX-1V: a cube mesh of NVLinks. And a server with PCIe switches only.
const OUTLINED: [&str; 2] = ["v100-sxm2-8gpu-cubemesh-1mlx5", "titanv-8gpu-pix-phb-sys"];

#[test]
fn dot_of_dgx1v_and_pcie_server_matches_snapshot() {
    let graphs = OUTLINED.map(|name| dot(&machine(name)));
    insta::assert_snapshot!(graphs.join("\n"));
}

#[test]
fn svg_of_dgx1v_matches_snapshot() {
    insta::assert_snapshot!(svg(&machine(OUTLINED[0])));
}

#[test]
fn svg_of_pcie_server_matches_snapshot() {
    insta::assert_snapshot!(svg(&machine(OUTLINED[1])));
}

/// Names come from files and the cluster.
#[test]
fn names_with_markup_are_escaped() {
    let machine = Machine::new(MachineParts {
        name: Some("box\"]; }".into()),
        gpus: vec![Gpu { model: Some("<b>&'A100'\u{1b}[2J\"\\".into()), ..Gpu::default() }],
        nics: vec![Nic { name: "</svg>".into(), ..Nic::default() }],
        paths: PathMatrix::from_fn(2, |_, _| PathClass::Pix),
        ..MachineParts::default()
    })
    .unwrap();
    let picture = svg(&machine);
    assert!(picture.contains("&lt;b&gt;&amp;&#39;A100&#39;\u{fffd}[2J&quot;\\"), "{picture}");
    assert!(picture.contains("&lt;/svg&gt;"), "{picture}");
    assert_eq!(picture.matches("</svg>").count(), 1, "{picture}");
    let graph = dot(&machine);
    assert!(graph.starts_with("graph \"box\\\"]; }\" {"), "{graph}");
    assert!(graph.contains("GPU0\\n<b>&'A100' [2J\\\"\\\\\""), "{graph}");
}

#[test]
fn every_device_is_in_dot_and_svg_once() {
    for entry in std::fs::read_dir(FOLDER).unwrap() {
        let text = std::fs::read_to_string(entry.unwrap().path()).unwrap();
        let Ok(machine) = gantry_smi::read_machine(&text) else {
            continue;
        };
        let (graph, picture) = (dot(&machine), svg(&machine));
        for gpu in 0..machine.gpus().len() {
            assert_eq!(picture.matches(&format!(">GPU{gpu}<")).count(), 1, "{picture}");
            let node = graph.matches(&format!("label=\"GPU{gpu}\\n")).count();
            let plain = graph.matches(&format!("label=\"GPU{gpu}\"")).count();
            assert_eq!(node + plain, 1, "{graph}");
        }
        for nic in machine.nics() {
            assert_eq!(graph.matches(&format!("label=\"{}\"", nic.name)).count(), 1, "{graph}");
        }
    }
}
