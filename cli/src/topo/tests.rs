use std::path::PathBuf;

use clap::Parser;
use gantry_smi::Hints;

use super::*;

/// The command line of `gantry topo` alone.
#[derive(Debug, Parser)]
struct Alone {
    #[command(flatten)]
    topo: TopoArgs,
}

const PLAIN: Screen = Screen { columns: 100, color: false };

fn fixture(name: &str) -> String {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../topology/fixtures/topologies");
    format!("{folder}/{name}.txt")
}

fn topo(arguments: &[&str]) -> anyhow::Result<String> {
    let args = Alone::try_parse_from(["topo"].iter().chain(arguments))?.topo;
    Ok(output(&args, &args.source.seen()?, PLAIN)?.to_string())
}

#[test]
fn report_matches_snapshot() {
    let reports: Vec<String> =
        ["v100-sxm2-8gpu-cubemesh-1mlx5", "dgx-a100-8gpu-10nic", "rtxpro6000-2gpu-node"]
            .map(|name| topo(&["--from", &fixture(name)]).unwrap())
            .into();
    insta::assert_snapshot!(reports.join("\n================\n\n"));
}

#[test]
fn json_matches_snapshot() {
    insta::assert_snapshot!(topo(&["--json", "--from", &fixture("a40-8gpu-4bridgepairs-2nic")]).unwrap());
}

/// The lines beneath a heading of a report.
fn section<'a>(report: &'a str, title: &str) -> &'a str {
    let (_, rest) = report.split_once(&format!("\n{title}\n")).unwrap();
    rest.split("\n\n").next().unwrap()
}

#[test]
fn mig_instances_are_shown() {
    let from = concat!(env!("CARGO_MANIFEST_DIR"), "/../simulator/machines/dgx-a100-mig.yaml");
    let text = topo(&["--from", from]).unwrap();
    insta::assert_snapshot!(section(&text, "MIG"));
    assert!(!text.contains("Warnings"), "{text}");
    let json: serde_json::Value = serde_json::from_str(&topo(&["--json", "--from", from]).unwrap()).unwrap();
    assert_eq!(json["gpus"][0]["mig"], serde_json::json!({"enabled": false, "instances": []}));
    let first = &json["gpus"][4]["mig"]["instances"][0];
    assert_eq!(
        (&first["profile"], &first["start"], &first["size"]),
        (&"1g.5gb".into(), &0.into(), &1.into())
    );
    assert!(first["devices"][0]["uuid"].as_str().unwrap().starts_with("MIG-"));
    assert_eq!(json["warnings"], serde_json::json!([]));
}

#[test]
fn impossible_mig_instances_have_a_warning() {
    let file = |profile: &str, start: u8| {
        format!(
            "gpus:\n- index: 0\n  model: NVIDIA A100-SXM4-40GB\n  mig:\n    enabled: true\n    instances:\n    \
             - {{id: 1, profile: {profile}, start: {start}, size: 4}}\npaths:\n- X\n"
        )
    };
    let folder = tempfile::tempdir().unwrap();
    let mut said = String::new();
    for (profile, start) in [("9g.99gb", 0), ("3g.20gb", 2)] {
        let path = folder.path().join("machine.yaml");
        std::fs::write(&path, file(profile, start)).unwrap();
        let path = path.to_str().unwrap();
        let text = topo(&["--from", path]).unwrap();
        said.push_str(&format!("{}\n", section(&text, "Warnings").trim_end()));
        let json: serde_json::Value =
            serde_json::from_str(&topo(&["--json", "--from", path]).unwrap()).unwrap();
        assert_eq!(json["warnings"].as_array().unwrap().len(), 1);
    }
    insta::assert_snapshot!(said);
}

#[test]
fn guessed_bandwidths_have_a_warning() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("topo.txt");
    std::fs::write(&path, "\tGPU0\tGPU1\nGPU0\t X \tNV18\nGPU1\tNV18\t X \n").unwrap();
    let from = ["--from", path.to_str().unwrap()];
    let text = topo(&from).unwrap();
    assert_eq!(
        section(&text, "Warnings").trim(),
        "bandwidths are a guess from the number of links: the GPU model is unknown; set --model for a topology text, or `model` of a GPU in a \
         machine file"
    );
    let json: serde_json::Value =
        serde_json::from_str(&topo(&[&["--json"], &from[..]].concat()).unwrap()).unwrap();
    assert_eq!(json["warnings"].as_array().unwrap().len(), 1);
    let odd = topo(&[&from[..], &["--model", "Z9000"]].concat()).unwrap();
    insta::assert_snapshot!(section(&odd, "Warnings").trim(), @"bandwidths are a guess from the number of links: the rates of Z9000 are unknown");
    let named = topo(&[&from[..], &["--model", "H100"]].concat()).unwrap();
    assert!(!named.contains("Warnings"), "{named}");
}

#[test]
fn json_of_recorded_files_has_stable_fields() {
    let folder = PathBuf::from(fixture("x")).parent().unwrap().to_owned();
    let mut read = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let Ok(text) = topo(&["--json", "--from", path.to_str().unwrap()]) else {
            assert!(path.to_str().unwrap().contains("truncated"), "{}", path.display());
            continue;
        };
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let gpus = json["gpus"].as_array().unwrap().len();
        let nics = json["nics"].as_array().unwrap().len();
        for (field, columns) in [("matrix", gpus), ("bandwidth_gbs", gpus), ("nic_matrix", nics)] {
            let rows = json[field].as_array().unwrap();
            assert_eq!(rows.len(), gpus, "{field}");
            assert!(rows.iter().all(|row| row.as_array().unwrap().len() == columns), "{field}");
        }
        for a in 0..gpus {
            assert_eq!((&json["matrix"][a][a], &json["bandwidth_gbs"][a][a]), (&"X".into(), &0.0.into()));
            for b in 0..gpus {
                assert_eq!(json["matrix"][a][b], json["matrix"][b][a]);
                assert!(a == b || json["bandwidth_gbs"][a][b].as_f64().unwrap() > 0.0);
            }
        }
        read += 1;
    }
    assert_eq!(read, 39);
}

#[test]
fn old_link_names_are_kept() {
    let text = topo(&["--json", "--from", &fixture("p40-8gpu-pix-pxb-1mlx5-soc")]).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&json["nic_matrix"][0][0], &json["matrix"][0][4]), (&"SOC".into(), &"PXB".into()));
}

#[test]
fn machine_file_written_and_read_is_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let from = fixture("dgx-h200-8gpu-12nic");
    let json = topo(&["--json", "--from", &from]).unwrap();
    for name in ["machine.yaml", "machine.json"] {
        let file = folder.path().join(name);
        let file = file.to_str().unwrap();
        assert_eq!(topo(&["--json", "--from", &from, "--machine-file", file]).unwrap(), json);
        assert_eq!(topo(&["--json", "--from", file]).unwrap(), json, "{name}");
    }
    let yaml = topo(&["--from", &from, "--machine-file", "-"]).unwrap();
    assert_eq!(yaml, std::fs::read_to_string(folder.path().join("machine.yaml")).unwrap());
}

#[test]
fn model_hint_raises_bandwidth() {
    let from = fixture("a100-4gpu-4numa-2pairs");
    let of = |arguments: &[&str]| -> f64 {
        let text = topo(&[&["--json", "--from", &from], arguments].concat()).unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        json["bandwidth_gbs"][0][1].as_f64().unwrap()
    };
    assert!(of(&["--model", "NVIDIA H100 NVL"]) > of(&["--model", "NVIDIA A100 80GB PCIe"]));
}

#[test]
fn utf16_file_is_read() {
    let text = "\tGPU0\tGPU1\r\nGPU0\t X \tPHB\r\nGPU1\tPHB\t X \r\n";
    let little: Vec<u8> =
        std::iter::once(0xfeff).chain(text.encode_utf16()).flat_map(u16::to_le_bytes).collect();
    let big: Vec<u8> =
        std::iter::once(0xfeff).chain(text.encode_utf16()).flat_map(u16::to_be_bytes).collect();
    let utf8 = source::parse(text.as_bytes(), "text", &Hints::default()).unwrap().machine;
    for bytes in [little, big] {
        assert_eq!(source::parse(bytes.as_slice(), "text", &Hints::default()).unwrap().machine, utf8);
    }
}

#[test]
fn unreadable_input_is_refused_with_place() {
    let cases: [&[u8]; 5] = [
        b"",
        b"\xffnothing",
        b"GPU0 GPU1\nGPU0 X SYS\nGPU1 PIX X\n",
        b"gpus:\n- index: 0\n  modle: A100\npaths:\n- X\n",
        &vec![b'#'; 5 << 20],
    ];
    let messages: Vec<String> = cases
        .iter()
        .map(|bytes| format!("{:#}", source::parse(*bytes, "topo.txt", &Hints::default()).unwrap_err()))
        .collect();
    insta::assert_snapshot!(messages.join("\n"));
    let missing = topo(&["--from", "/nonexistent/topo.txt"]).unwrap_err();
    assert!(missing.to_string().contains("/nonexistent/topo.txt"), "{missing}");
}

#[test]
fn gpunode_is_read_in_every_form_of_kubectl() {
    let node = serde_json::json!({
        "apiVersion": "gantry.dev/v1alpha1", "kind": "GpuNode", "metadata": {"name": "node-1"},
        "spec": {"machine": {"gpus": [{"index": 0}], "paths": ["X"]}},
    });
    let list = |nodes: &[&serde_json::Value]| serde_json::json!({"apiVersion": "v1", "kind": "List", "items": nodes, "metadata": {"resourceVersion": ""}});
    let gpus = |text: &str| {
        source::parse(text.as_bytes(), "node", &Hints::default()).map(|seen| seen.machine.gpus().len())
    };
    for value in [&node, &list(&[&node])] {
        for text in [
            value.to_string(),
            serde_json::to_string_pretty(value).unwrap(),
            serde_saphyr::to_string(value).unwrap(),
        ] {
            assert_eq!(gpus(&text).unwrap(), 1, "{text}");
        }
    }
    let mut other = node.clone();
    other["metadata"]["name"] = "node-2".into();
    let refused =
        [list(&[]), list(&[&node, &other])].map(|list| format!("{:#}", gpus(&list.to_string()).unwrap_err()));
    insta::assert_snapshot!(refused.join("\n"), @r"
    node: the list holds no GpuNode; is the name right?
    node: the list holds 2 GpuNodes (node-1, node-2); give one, such as of `kubectl get gpunode node-1 -o yaml`
    ");
}

#[test]
fn svg_and_dot_are_printed_instead_of_text() {
    let from = fixture("v100-sxm2-8gpu-cubemesh-1mlx5");
    let picture = topo(&["--svg", "--from", &from]).unwrap();
    assert!(picture.starts_with("<svg ") && picture.ends_with("</svg>\n"), "{picture}");
    assert!(picture.contains(">NV2 40 GB/s<"), "{picture}");
    let graph = topo(&["--dot", "--from", &from]).unwrap();
    assert!(graph.starts_with("graph ") && graph.ends_with("}\n"), "{graph}");
    assert!(graph.contains("0 -- 3 [ label=\"NV2 40 GB/s\""), "{graph}");
    assert!(topo(&["--svg", "--dot", "--from", &from]).is_err());
    assert!(topo(&["--svg", "--json", "--from", &from]).is_err());
}

#[test]
fn control_characters_in_names_are_escaped() {
    let file = r#"{
        "name": "box\u001b]0;title\u0007", "gpus": [{"index": 0, "model": "A100\u001b[2J\u009b1m"}],
        "nics": [{"name": "ib0\u202e", "device": "mlx5\u007f"}], "paths": ["X PIX", "PIX X"]
    }"#;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("machine.json");
    std::fs::write(&path, file).unwrap();
    let path = path.to_str().unwrap();
    for arguments in [&["--json"] as &[&str], &[], &["--machine-file", "-"]] {
        let text = topo(&[&["--from", path], arguments].concat()).unwrap();
        let raw = text.chars().find(|ch| ch.is_control() && *ch != '\n' || *ch == '\u{202e}');
        assert_eq!(raw, None, "{text}");
    }
    let json: serde_json::Value = serde_json::from_str(&topo(&["--json", "--from", path]).unwrap()).unwrap();
    assert_eq!(json["gpus"][0]["model"], "A100\u{1b}[2J\u{9b}1m", "JSON says the same");
    let file = topo(&["--from", path, "--machine-file", "-"]).unwrap();
    let again = source::parse(file.as_bytes(), "file", &Hints::default()).unwrap();
    assert_eq!(again.machine.gpus()[0].model.as_deref(), Some("A100\u{1b}[2J\u{9b}1m"));
}

#[test]
fn sources_exclude_each_other() {
    assert!(topo(&["--from", "x", "--nvml"]).is_err());
    assert!(topo(&["--model", "A100"]).is_err());
}

#[test]
fn missing_nvml_error_names_from_option() {
    let message = topo(&["--nvml-library", "/nonexistent/libnvidia-ml.so.1"]).unwrap_err().to_string();
    insta::assert_snapshot!(message, @"cannot read this node's machine; --from FILE reads a machine file or the output of nvidia-smi topo -m");
}

#[test]
fn gpunode_faults_are_shown() {
    let machine: serde_json::Value = serde_json::to_value(
        source::parse(
            std::fs::read(fixture("dgx-a100-8gpu-10nic")).unwrap().as_slice(),
            "fixture",
            &Hints::default(),
        )
        .unwrap()
        .machine,
    )
    .unwrap();
    let mut machine = machine;
    machine["gpus"][3]["uuid"] = "GPU-3".into();
    machine["gpus"][4]["uuid"] = "GPU-4".into();
    machine["gpus"][6]["uuid"] = "GPU-6".into();
    let device = |gpu: u8, slice: serde_json::Value, sick: Option<&str>| {
        serde_json::json!({
            "id": format!("GPU-{gpu}"), "resource": "nvidia.com/gpu", "gpu": gpu, "slice": slice,
            "healthy": sick.is_none(), "reason": sick,
        })
    };
    let none = serde_json::Value::Null;
    let off = "Xid 79: GPU has fallen off the bus";
    let node = serde_json::json!({
        "apiVersion": "gantry.dev/v1alpha1",
        "kind": "GpuNode",
        "metadata": {"name": "node-1"},
        "spec": {"machine": machine},
        "status": {
            "devices": [
                device(0, none.clone(), None),
                device(3, none.clone(), Some(off)),
                device(4, none, Some("Xid 74: NVLINK Error; 2 of 12 NVLinks down")),
                device(5, serde_json::json!({"profile": "1g.10gb", "start": 0, "size": 1}), Some("Xid 94")),
            ],
            "faults": [{
                "gpu": "GPU-3", "xid": 79, "class": "RESET", "reason": off, "since": "2026-11-20T10:00:00Z", "bootId": "b", "evidence": {}
            }, {
                "gpu": "GPU-4", "xid": 74, "class": "link", "reason": "Xid 74: NVLINK Error", "since": "2026-11-20T11:00:00Z"
            }],
            "problems": [
                {"gpu": "GPU-4", "cause": "nvlinks-down", "since": "2026-11-20T11:00:00Z"},
                {"gpu": "GPU-6", "cause": "nvlinks-down", "since": "2026-11-20T12:00:00Z"},
            ],
        },
    });
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("node.json");
    let path = path.to_str().unwrap();
    std::fs::write(path, serde_json::to_string_pretty(&node).unwrap()).unwrap();
    let text = topo(&["--from", path]).unwrap();
    let health = text.split("Health\n").nth(1).unwrap().split("\n\n").next().unwrap();
    insta::assert_snapshot!(health, @r"
      GPU3  Xid 79: GPU has fallen off the bus, since 2026-11-20T10:00:00Z
      GPU4  Xid 74: NVLINK Error; 2 of 12 NVLinks down, since 2026-11-20T11:00:00Z
      GPU5 1g.10gb  Xid 94
      GPU6  nvlinks-down, since 2026-11-20T12:00:00Z
    ");
    // `gantry choose` leaves these out; degraded GPUs are allocated, and MIG devices are none of its business.
    let seen = source::parse(node.to_string().as_bytes(), "node", &Hints::default()).unwrap();
    let withheld: Vec<u8> = seen.withheld.keys().copied().collect();
    assert_eq!(withheld, [1, 2, 3, 4, 6, 7]);
    assert_eq!(seen.withheld[&3], off);
    insta::assert_snapshot!(seen.withheld[&1], @"the node's plugin does not serve it");
    let json: serde_json::Value = serde_json::from_str(&topo(&["--json", "--from", path]).unwrap()).unwrap();
    assert_eq!(json["health"].as_array().unwrap().len(), 4);
    assert_eq!(json["health"][0]["reason"], off);
}
