//! `gantry evidence gpu`: what speaks for the replacement of a board, as the plugins keep it. Reads GpuNodes; writes nothing.

use std::fmt::Write as _;

use anyhow::anyhow;
use gantry_api::xid::Table;
use gantry_api::{GpuEvidence, GpuNode};
use gantry_topology::Gpu;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{Api, ResourceExt as _};
use serde::Serialize;

use super::target;
use super::{EvidenceArgs, EvidenceCommand, EvidenceForm};
use crate::map::list;
use crate::output::{json, yaml};
use crate::runtime::{BadInput, print};
use crate::visible::Visible;

/// Runs `gantry evidence`.
///
/// # Errors
/// The cluster cannot be read, or has no such GPU.
pub(crate) async fn evidence(args: EvidenceArgs) -> anyhow::Result<()> {
    let EvidenceCommand::Gpu(options) = args.what;
    let client = options.cluster.connect().await?;
    let nodes = list(Api::<GpuNode>::all(client), "GpuNodes").await?;
    let records = records(&nodes, &options.gpus)?;
    let out = match options.output {
        EvidenceForm::Text => text(&records),
        EvidenceForm::Json => json(&records)?,
        EvidenceForm::Yaml => yaml(&records)?,
    };
    print(&Visible::new(&out))
}

/// One GPU, with the evidence about it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Record {
    node: String,
    /// UUID of the GPU.
    gpu: String,
    /// Its index; `None` if it is no longer in the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<String>,
    /// Serial number of the board.
    #[serde(skip_serializing_if = "Option::is_none")]
    serial: Option<String>,
    /// `None` if nothing was seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    evidence: Option<GpuEvidence>,
}

/// Every GPU of these nodes, also those that have left them.
fn all(nodes: &[GpuNode]) -> Vec<Record> {
    let mut found = Vec::new();
    for node in nodes {
        let name = node.name_any();
        let entries = node.status.as_ref().map_or(&[][..], |status| &status.evidence);
        let gpus = node.spec.machine.gpus().iter();
        let present: Vec<(&Gpu, String)> =
            gpus.filter_map(|gpu| Some((gpu, gpu.uuid.as_ref()?.to_string()))).collect();
        for (gpu, uuid) in &present {
            let evidence = entries.iter().find(|entry| entry.gpu == *uuid).cloned();
            found.push(Record {
                node: name.clone(),
                gpu: uuid.clone(),
                index: Some(gpu.index),
                model: gpu.model.clone(),
                serial: gpu.serial.clone().or_else(|| evidence.as_ref()?.serial.clone()),
                evidence,
            });
        }
        for entry in entries.iter().filter(|entry| !present.iter().any(|(_, uuid)| *uuid == entry.gpu)) {
            found.push(Record {
                node: name.clone(),
                gpu: entry.gpu.clone(),
                index: None,
                model: None,
                serial: entry.serial.clone(),
                evidence: Some(entry.clone()),
            });
        }
    }
    found
}

/// The GPUs that the operator names; without a name those with evidence. A board that was moved has a record by node.
fn records(nodes: &[GpuNode], words: &[String]) -> Result<Vec<Record>, BadInput> {
    let all = all(nodes);
    if words.is_empty() {
        return Ok(all.into_iter().filter(|record| record.evidence.is_some()).collect());
    }
    let mut chosen = Vec::new();
    for word in words {
        let named = all.iter().filter(|record| record.gpu == *word || record.serial.as_ref() == Some(word));
        let mut found: Vec<Record> = named.cloned().collect();
        if found.is_empty() && word.len() > 3 && word.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(BadInput(anyhow!("no board has the serial number {word}")));
        }
        if found.is_empty() {
            let target = target::find(nodes, word)?;
            found = all.iter().filter(|record| record.gpu == target.uuid.as_str()).cloned().collect();
        }
        found.retain(|record| !chosen.contains(record));
        chosen.extend(found);
    }
    Ok(chosen)
}

fn text(records: &[Record]) -> String {
    let mut out = String::new();
    if records.is_empty() {
        out.push_str("no GPU has raised an Xid, remapped memory or needed a reset\n");
    }
    for record in records {
        let Record { node, gpu, index, model, serial, evidence } = record;
        // Writing to a string cannot fail.
        let _ = match index {
            Some(index) => write!(out, "{node} GPU {index} ({gpu})"),
            None => write!(out, "{node} ({gpu}, no longer in the node)"),
        };
        for word in [model.clone(), serial.as_ref().map(|serial| format!("serial number {serial}"))] {
            out.extend(word.map(|word| format!(", {word}")));
        }
        let Some(evidence) = evidence else {
            out.push_str(": nothing was seen\n");
            continue;
        };
        let _ = writeln!(out, ", since {}:", time(&evidence.since));
        for xid in &evidence.xids {
            let _ = writeln!(out, "  {}; {}, last {}", describe(xid.xid), times(xid.count), time(&xid.last));
        }
        if let Some(rows) = &evidence.remapped_rows {
            let failed = if rows.failed { "; the remapping of a row failed" } else { "" };
            let _ = writeln!(
                out,
                "  remapped rows: {} for correctable and {} for uncorrectable errors, since {}{failed}",
                rows.correctable,
                rows.uncorrectable,
                time(&rows.since)
            );
        }
        if let Some(resets) = &evidence.resets {
            let _ =
                writeln!(out, "  reset after a fault; {}, last {}", times(resets.count), time(&resets.last));
        }
    }
    out
}

fn time(time: &Time) -> String {
    format!("{:.0}", time.0)
}

fn times(count: u64) -> String {
    if count == 1 { "once".to_owned() } else { format!("{count} times") }
}

fn describe(xid: u64) -> String {
    Table::built_in().describe(xid)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A node of four GPUs, and the evidence about GPU 1 and about a board that was taken out.
    fn node(name: &str) -> GpuNode {
        let machine = include_str!("../../../simulator/machines/l4-4x-pcie.yaml");
        let mut machine: serde_json::Value = serde_saphyr::from_str(machine).unwrap();
        for (index, gpu) in machine["gpus"].as_array_mut().unwrap().iter_mut().enumerate() {
            gpu["uuid"] = format!("GPU-{name}-{index}").into();
            gpu["serial"] = format!("10000{index}").into();
        }
        let then = "2026-11-02T10:00:00Z";
        serde_json::from_value(serde_json::json!({
            "apiVersion": "gantry.dev/v1alpha1", "kind": "GpuNode", "metadata": {"name": name},
            "spec": {"machine": machine},
            "status": {"evidence": [
                {"gpu": format!("GPU-{name}-1"), "serial": "100001", "since": then,
                 "xids": [{"xid": 48, "count": 1, "last": then}, {"xid": 79, "count": 3, "last": "2026-11-05T10:00:00Z"}],
                 "remappedRows": {"correctable": 0, "uncorrectable": 8, "failed": true, "since": then},
                 "resets": {"count": 2, "last": "2026-11-05T10:00:00Z"}},
                {"gpu": "GPU-gone", "serial": "777777", "since": then,
                 "xids": [{"xid": 79, "count": 1, "last": then}]},
            ]},
        }))
        .unwrap()
    }

    fn shown(words: &[&str]) -> Result<String, String> {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        records(&[node("a")], &words).map(|records| text(&records)).map_err(|error| error.to_string())
    }

    #[test]
    fn evidence_is_shown_by_index_uuid_and_serial() {
        let broken = "a GPU 1 (GPU-a-1), NVIDIA L4, serial number 100001, since 2026-11-02T10:00:00Z:
  Xid 48: Double Bit ECC Error; once, last 2026-11-02T10:00:00Z
  Xid 79: GPU has fallen off the bus; 3 times, last 2026-11-05T10:00:00Z
  remapped rows: 0 for correctable and 8 for uncorrectable errors, since 2026-11-02T10:00:00Z; the remapping of a row failed
  reset after a fault; 2 times, last 2026-11-05T10:00:00Z
";
        for word in ["a/1", "GPU-a-1", "100001"] {
            assert_eq!(shown(&[word]), Ok(broken.to_owned()), "{word}");
        }
        let gone = "a (GPU-gone, no longer in the node), serial number 777777, since 2026-11-02T10:00:00Z:
  Xid 79: GPU has fallen off the bus; once, last 2026-11-02T10:00:00Z
";
        for word in ["GPU-gone", "777777"] {
            assert_eq!(shown(&[word]), Ok(gone.to_owned()), "{word}");
        }
        assert_eq!(shown(&[]), Ok(format!("{broken}{gone}")));
        assert_eq!(shown(&["a/1", "GPU-a-1"]), Ok(broken.to_owned()), "named twice, shown once");
        assert_eq!(
            shown(&["a/0"]),
            Ok("a GPU 0 (GPU-a-0), NVIDIA L4, serial number 100000: nothing was seen\n".to_owned())
        );
    }

    #[test]
    fn unknown_gpu_and_serial_are_errors() {
        assert_eq!(shown(&["123456"]), Err("no board has the serial number 123456".to_owned()));
        assert_eq!(shown(&["b/1"]), Err("no node with GPUs is called b; did you mean a?".to_owned()));
    }
}
