//! The picture of a machine for the terminal, of recorded machines.
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

use gantry_topology::Machine;
use gantry_topology::draw::Picture;

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
    let pictures: Vec<String> = names
        .iter()
        .map(|name| format!("== {name}\n{}", Picture::of(&machine(name))))
        .collect();
    insta::assert_snapshot!(pictures.join("\n"));
}

#[test]
fn notes_are_drawn_beside_their_gpus() {
    let machine = machine("a40-8gpu-4bridgepairs-2nic");
    let picture = Picture::of(&machine)
        .note(0, "team-a/train-0")
        .note(1, "team-a/train-0")
        .note(99, "nowhere");
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
            let boxes: Vec<&str> = picture
                .lines()
                .filter(|line| line.contains(['│', '╭', '╰']))
                .collect();
            let words: Vec<&str> = boxes.iter().flat_map(|line| line.split_whitespace()).collect();
            for gpu in 0..machine.gpus().len() {
                let name = format!("GPU{gpu}");
                assert_eq!(
                    words.iter().filter(|word| **word == name).count(),
                    1,
                    "{name}\n{picture}"
                );
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
