//! `gantry topo` and `gantry choose` as scripts use them: stable JSON fields, exit codes, errors that name the place.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::process::Stdio;

use serde_json::Value;
use support::{command, gantry, machine, piped};

fn json(words: &[&str]) -> Value {
    let run = gantry(words);
    assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{words:?}");
    serde_json::from_str(&run.stdout).unwrap()
}

#[test]
fn topo_prints_matrix_and_bandwidths_of_a_machine_file() {
    let file = machine("dgx1-v100.yaml");
    let topo = json(&["topo", "--from", &file, "--json"]);
    assert_eq!(topo["gpus"].as_array().unwrap().len(), 8);
    assert_eq!(topo["nics"].as_array().unwrap().len(), 4);
    assert_eq!(topo["matrix"][0][3], "NV2");
    assert_eq!(topo["matrix"][0][5], "SYS");
    assert_eq!(topo["matrix"][0][0], "X");
    let bandwidth = |a: usize, b: usize| topo["bandwidth_gbs"][a][b].as_f64().unwrap();
    assert_eq!(bandwidth(0, 3), 2.0 * bandwidth(0, 1), "two NVLinks carry twice what one carries");
}

#[test]
fn topo_reads_its_own_output() {
    let file = machine("a40-8x-bridged.yaml");
    let text = gantry(&["topo", "--from", &file]);
    assert_eq!(text.code, 0);
    let matrix = json(&["topo", "--from", &file, "--json"])["matrix"].clone();
    let written = gantry(&["topo", "--from", &file, "--machine-file", "-"]);
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("copy.yaml");
    std::fs::write(&copy, written.stdout).unwrap();
    assert_eq!(json(&["topo", "--from", copy.to_str().unwrap(), "--json"])["matrix"], matrix);
}

#[test]
fn topo_reads_standard_input() {
    let text = std::fs::read_to_string(machine("workstation-2x.yaml")).unwrap();
    let run = piped(&["topo", "--from", "-", "--json"], &text);
    let topo: Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!(topo["gpus"].as_array().unwrap().len(), 2);
}

#[test]
fn choose_takes_a_bridged_pair_with_its_reason() {
    let file = machine("a40-8x-bridged.yaml");
    let choice = json(&["choose", "--from", &file, "--size", "2", "--free", "1,2,3,5,6", "--json"]);
    assert_eq!(choice["gpus"], serde_json::json!([2, 3]));
    assert!(choice["bandwidth_gbs"].as_f64().unwrap() > 0.0);
    assert!(choice["remainder"].as_f64().is_some());
    assert!(choice["reason"].as_str().unwrap().contains("NVLink"), "{}", choice["reason"]);
    let must = json(&["choose", "--from", &file, "--size", "2", "--must", "5", "--json"]);
    assert_eq!(must["gpus"], serde_json::json!([4, 5]));
}

#[test]
fn too_few_free_gpus_is_a_failure_not_bad_input() {
    let file = machine("workstation-2x.yaml");
    let run = gantry(&["choose", "--from", &file, "--size", "2", "--free", "0"]);
    assert_eq!((run.code, run.stdout.as_str()), (1, ""));
    insta::assert_snapshot!(run.stderr, @"gantry: 2 GPUs are asked, but only 1 are free: 0");
}

#[test]
fn bad_input_is_named_with_position_and_exits_with_2() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let good = std::fs::read_to_string(machine("a40-8x-bridged.yaml")).unwrap();
    let truncated = write("truncated.txt", "\tGPU0\tGPU1\nGPU0\t X \tNV4\n");
    let contradictory =
        write("contradictory.yaml", &good.replace("gpus: [0, 1], links: 4", "gpus: [0, 9], links: 4"));
    let absent = folder.path().join("absent.yaml").display().to_string();
    let file = machine("a40-8x-bridged.yaml");
    let node = write("node.yaml", "apiVersion: v1\nkind: Node\nmetadata: {name: a}\n");
    let gpu_node =
        write("gpunode.yaml", "kind: GpuNode\nspec:\n  machine:\n    gpus:\n    - indx: 0\n    paths: [X]\n");
    let text = write("topo.txt", "\tGPU0\tGPU1\nGPU0\t X \tNV4\nGPU1\tNV4\t X \n");
    let mut texts = String::new();
    for words in [
        vec!["choose", "--size", "1", "--from", truncated.as_str()],
        vec!["topo", "--from", node.as_str()],
        vec!["topo", "--from", gpu_node.as_str()],
        vec!["topo", "--from", file.as_str(), "--model", "A100"],
        vec!["topo", "--from", text.as_str(), "--model", ""],
        vec!["choose", "--from", text.as_str(), "--size", "two"],
        vec!["topo", "--from", truncated.as_str()],
        vec!["choose", "--size", "1", "--from", contradictory.as_str()],
        vec!["choose", "--size", "1", "--from", absent.as_str()],
        vec!["choose", "--size", "2", "--from", file.as_str(), "--free", "0,x"],
        vec!["choose", "--size", "2", "--from", file.as_str(), "--free", "0,99"],
        vec!["choose", "--size", "2", "--from", file.as_str(), "--free", "0,1", "--must", "2"],
        vec!["choose", "--from", file.as_str()],
    ] {
        let run = gantry(&words);
        assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{words:?}: {}", run.stderr);
        texts.push_str(&run.stderr);
    }
    let texts = texts.replace(folder.path().to_str().unwrap(), "").replace(&file, "/a40-8x-bridged.yaml");
    insta::assert_snapshot!(texts, @r#"
    gantry: /truncated.txt: line 3, column 1: row GPU1 is missing: the header names 2 devices and each needs its row; is the text truncated?
    gantry: /node.yaml: this is an object of kind Node; give a GpuNode, such as of `kubectl get gpunode NODE -o yaml`
    gantry: /gpunode.yaml: no GpuNode: line 4, column 5: missing field `index`
    gantry: /a40-8x-bridged.yaml: model "A100" is given, but only the output of `nvidia-smi topo -m` needs one; omit it
    error: a value is required for '--model <NAME>' but none was supplied

    For more information, try '--help'.
    error: invalid value 'two' for '--size <K>': write a whole number, 1 to 32

    For more information, try '--help'.
    gantry: /truncated.txt: line 3, column 1: row GPU1 is missing: the header names 2 devices and each needs its row; is the text truncated?
    gantry: /contradictory.yaml: nvlinks[0].gpus: GPU 9 does not exist, there are 8
    gantry: cannot open /absent.yaml: No such file or directory (os error 2)
    error: invalid value '0,x' for '--free <LIST>': "x" is no GPU index; write indices and ranges with commas, such as 0,2,3 or 0-3

    For more information, try '--help'.
    error: invalid value '0,99' for '--free <LIST>': GPU 99 is beyond the most a machine may have, 32

    For more information, try '--help'.
    gantry: --must: GPU 2 is not free; free are 0,1
    error: the following required arguments were not provided:
      --size <K>

    Usage: gantry choose --size <K> --from <FILE>

    For more information, try '--help'.
    "#);
}

#[test]
fn node_without_gpus_writes_no_machine_file() {
    let folder = tempfile::tempdir().unwrap();
    let node = folder.path().join("node.yaml");
    let file = folder.path().join("machine.yaml");
    std::fs::write(
        &node,
        "apiVersion: gantry.dev/v1alpha1\nkind: GpuNode\nmetadata: {name: a}\nspec:\n  machine:\n    gpus: []\n    paths: []\n",
    )
    .unwrap();
    let from = node.display().to_string();
    let shown = gantry(&["topo", "--from", &from]);
    assert_eq!(shown.code, 0, "{}", shown.stderr);
    let refused = gantry(&["topo", "--from", &from, "--machine-file", &file.display().to_string()]);
    assert_eq!(refused.code, 2, "{}", refused.stdout);
    insta::assert_snapshot!(refused.stderr.replace(folder.path().to_str().unwrap(), ""), @"gantry: no GPU is known of this node, so there is no machine to write");
    assert!(!file.exists());
}

#[test]
fn unknown_model_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("topo.txt");
    std::fs::write(&path, "\tGPU0\tGPU1\nGPU0\t X \tNV4\nGPU1\tNV4\t X \n").unwrap();
    let said = |model: &str| {
        let run = gantry(&["topo", "--from", &path.display().to_string(), "--model", model]);
        assert_eq!(run.code, 0, "{}", run.stderr);
        run.stderr
    };
    assert_eq!(said("NVIDIA A100-SXM4-80GB"), "");
    insta::assert_snapshot!(said("H10O").split_once("WARN ").unwrap().1, @r#"gantry::topo::source: --model "H10O": its rates are unknown and are guessed from its links; did you mean H100?"#);
    insta::assert_snapshot!(said("Instinct MI300X").split_once("WARN ").unwrap().1, @r#"gantry::topo::source: --model "Instinct MI300X": its rates are unknown and are guessed from its links"#);
}

#[test]
fn closed_output_is_no_failure() {
    let file = machine("dgx1-v100.yaml");
    let mut child = command(&["topo", "--from", &file]).stdout(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    assert!(child.wait().unwrap().success());
}
