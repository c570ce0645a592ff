//! A machine from either form: recognition of the form, and the errors of malformed texts.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

#[path = "support/files.rs"]
mod files;

use gantry_smi::{Hints, ReadError};
use gantry_topology::read as file;
use gantry_topology::{Machine, read::to_yaml};
use proptest::prelude::*;

fn read(text: &str) -> Result<Machine, ReadError> {
    gantry_smi::read(text, &Hints::default())
}

#[test]
fn machine_from_text_yaml_and_json_is_the_same() {
    for (name, text) in files::complete() {
        let machine = read(&text).unwrap_or_else(|problem| panic!("{name}: {problem}"));
        let yaml = to_yaml(&machine).unwrap();
        assert_eq!(read(&yaml).unwrap(), machine, "{name} as YAML");
        let json = serde_json::to_string_pretty(&machine).unwrap();
        assert_eq!(read(&json).unwrap(), machine, "{name} as JSON");
        let tabbed = json.replace("  ", "\t");
        assert_eq!(read(&tabbed).unwrap(), machine, "{name} as JSON with tabs");
    }
}

/// Every case: its defect, and the text.
const REFUSED: &[(&str, &str)] = &[
    ("nothing", "\n# only a comment\n"),
    ("prose", "# my machine\nEight GPUs and a cat.\n"),
    ("prose with a colon", "The machine: eight GPUs.\n"),
    ("a cut matrix", "\tGPU0\tGPU1\nGPU0\t X \tNV4\n"),
    ("a row alone", "GPU0 X NV4\n"),
    ("a field misspelt", "gpus:\n- index: 0\n  modle: A100\npaths:\n- X\n"),
    ("an unknown field", "gpus:\n- index: 0\ncolour: red\npaths:\n- X\n"),
    (
        "a field misspelt in JSON",
        "{\"gpus\": [{\"index\": 0, \"busID\": \"0000:07:00.0\"}], \"paths\": [\"X\"]}",
    ),
    ("a word for a number", "gpus:\n- index: zero\npaths:\n- X\n"),
    ("a number too large", "gpus:\n- index: 300\npaths:\n- X\n"),
    ("a negative number", "gpus:\n- {index: -1, minor: 0}\npaths:\n- X\n"),
    ("a part of a number", "gpus:\n- index: 1.5 # two halves\npaths:\n- X\n"),
    ("a number too large in JSON", "{\n  \"gpus\": [{\"index\": 300}],\n  \"paths\": [\"X\"]\n}"),
    ("a text for a number in JSON", "{\"gpus\":[{\"index\":\"0\"}],\"paths\":[\"X\"]}"),
    (
        "far too many links",
        "gpus:\n- index: 0\n- index: 1\nnvlinks:\n- gpus: [0, 1]\n  links: 999\npaths:\n- X PIX\n- PIX X\n",
    ),
    (
        "too many links",
        "gpus:\n- index: 0\n- index: 1\nnvlinks:\n- gpus: [0, 1]\n  links: 99\npaths:\n- X PIX\n- PIX X\n",
    ),
    (
        "a GPU number too large",
        "gpus:\n- index: 0\n- index: 1\nnvlinks:\n- gpus: [0, 500]\n  links: 9\npaths:\n- X PIX\n- PIX X\n",
    ),
    ("an NVLink of the future", "gpus:\n- index: 0\n  nvlink: {version: 9}\npaths:\n- X\n"),
    ("two documents", "gpus:\n- index: 0\npaths:\n- X\n---\ngpus:\n- index: 0\npaths:\n- X\n"),
    ("no GPUs", "gpus: []\npaths: []\n"),
    ("no GPUs at all", "gpus:\npaths: []\n"),
    ("no GPUs in JSON", "{\"gpus\":[],\"paths\":[]}"),
    ("a missing field", "gpus:\n- index: 0\n"),
    ("a malformed UUID", "gpus:\n- index: 0\n  uuid: A100\npaths:\n- X\n"),
    ("an asymmetric matrix", "gpus:\n- index: 0\n- index: 1\npaths:\n- X PIX\n- SYS X\n"),
    ("an unknown path class", "gpus:\n- index: 0\n- index: 1\npaths:\n- X NVL\n- NVL X\n"),
    ("a matrix of another size", "gpus:\n- index: 0\npaths:\n- X PIX\n- PIX X\n"),
    ("an index out of order", "gpus:\n- index: 1\npaths:\n- X\n"),
    (
        "a bundle to nowhere",
        "gpus:\n- index: 0\n- index: 1\nnvlinks:\n- gpus: [0, 5]\n  links: 4\npaths:\n- X PIX\n- PIX X\n",
    ),
    ("a field twice", "gpus: []\ngpus: []\npaths: []\n"),
    ("broken YAML", "gpus: [\n- index: 0\n"),
    ("broken JSON", "{\"gpus\": [,]}"),
    ("cut JSON", "{\"gpus\": [{\"index\": 0}"),
    ("a map for a list", "gpus: {}\npaths:\n- X\n"),
    ("a list for a text", "gpus:\n- index: 0\n  model: [A100]\npaths:\n- X\n"),
    ("a number for a row", "gpus:\n- index: 0\npaths: [0]\n"),
    ("a map for a row", "gpus:\n- index: 0\npaths: [{X: X}]\n"),
    ("text behind JSON", "{\"gpus\": [], \"paths\": []} and more"),
];

#[test]
fn refusal_names_place_and_allowed_values() {
    let mut report = String::new();
    for (case, text) in REFUSED {
        let refused = read(text).expect_err(case);
        report.push_str(&format!("{case}\n    {refused}\n"));
    }
    insta::assert_snapshot!(report);
}

#[test]
fn path_row_may_be_a_list_of_words() {
    let of_texts = read("gpus: [{index: 0}, {index: 1}]\npaths:\n- X PIX\n- PIX X\n").unwrap();
    for text in [
        "gpus: [{index: 0}, {index: 1}]\npaths: [[X, PIX], [PIX, X]]\n",
        r#"{"gpus": [{"index": 0}, {"index": 1}], "paths": [["X", "PIX"], ["PIX", "X"]]}"#,
    ] {
        assert_eq!(read(text).unwrap(), of_texts);
    }
}

#[test]
fn model_hint_with_machine_file_is_refused() {
    let hints = Hints { model: Some("A100".to_owned()) };
    for text in ["gpus: [{index: 0}]\npaths: [X]\n", r#"{"gpus": [{"index": 0}], "paths": ["X"]}"#] {
        let refused = gantry_smi::read(text, &hints).unwrap_err();
        assert_eq!(refused, ReadError::NeedlessModel { model: "A100".to_owned() });
    }
    let machine = gantry_smi::read("\tGPU0\tCPU Affinity\nGPU0\t X \t0-7\n", &hints).unwrap();
    assert_eq!(machine.gpus()[0].model.as_deref(), Some("A100"));
}

#[test]
fn misspelt_field_names_the_nearest() {
    let refused = read("gpus:\n- index: 0\n  modle: A100\npaths:\n- X\n").unwrap_err();
    let ReadError::File(file::ReadError::UnknownField { line, column, nearest, .. }) = refused else {
        panic!("{refused}");
    };
    assert_eq!((line, column, nearest.as_deref()), (3, 3, Some("model")));
}

proptest! {
    #[test]
    fn arbitrary_text_never_panics(text in "\\PC*|gpus:\\PC*|\\{\\PC*|[ a-z0-9:\\[\\]{}&*|>'\"!\n-]{0,200}") {
        let _ = read(&text);
    }

    #[test]
    fn cut_machine_file_never_panics(file in 0usize..39, at in any::<prop::sample::Index>(), json in any::<bool>()) {
        let (_, text) = files::complete().swap_remove(file);
        let machine = read(&text).unwrap();
        let written = if json {
            serde_json::to_string(&machine).unwrap()
        } else {
            to_yaml(&machine).unwrap()
        };
        let mut cut = at.index(written.len());
        while !written.is_char_boundary(cut) {
            cut -= 1;
        }
        // Without its last line end alone, a file still says the same.
        match read(&written[..cut]) {
            Ok(read) => prop_assert_eq!((read, &written[cut..]), (machine, "\n")),
            Err(refused) => prop_assert!(!refused.to_string().is_empty()),
        }
    }
}
