//! What a GPU's board has shown so far: the evidence for its replacement. The plugin keeps it in `GpuNode.status` over its own
//! restarts and those of the node.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Evidence about one GPU. A GPU without an Xid, a remapped row or a reset has none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuEvidence {
    /// UUID of the GPU.
    pub gpu: String,
    /// Serial number of its board. Absent where the board has none, or could not be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// When the first of it was seen.
    pub since: Time,
    /// Xids by number: the latest ones, at most 32.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = Self::MAX_XIDS))]
    pub xids: Vec<XidEvidence>,
    /// Memory rows that were remapped in the life of the board, as last read. Absent before Ampere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remapped_rows: Option<RemappedRowsEvidence>,
    /// Resets that ended a fault of the GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resets: Option<ResetEvidence>,
}

impl GpuEvidence {
    /// Most GPUs of a node with evidence. GPUs that are no longer in the node go first.
    pub const MAX_GPUS: usize = 64;
    /// Most Xids of a GPU that are kept.
    pub const MAX_XIDS: usize = 32;

    /// The last time at which something was added.
    pub fn last(&self) -> &Time {
        let xids = self.xids.iter().map(|xid| &xid.last);
        let rows = self.remapped_rows.iter().map(|rows| &rows.since);
        let resets = self.resets.iter().map(|resets| &resets.last);
        xids.chain(rows).chain(resets).max_by_key(|time| time.0).unwrap_or(&self.since)
    }
}

/// How often an Xid was raised.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct XidEvidence {
    /// The Xid.
    pub xid: u64,
    /// How often.
    pub count: u64,
    /// The last time.
    pub last: Time,
    /// Class of the Xid by the plugin's settings; empty if it is not watched.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub judged: String,
}

/// Remapped memory rows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RemappedRowsEvidence {
    /// Rows remapped for correctable errors.
    pub correctable: u32,
    /// Rows remapped for uncorrectable errors.
    pub uncorrectable: u32,
    /// Whether the remapping of a row has failed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub failed: bool,
    /// Since when these numbers are as they are.
    pub since: Time,
}

/// Resets of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ResetEvidence {
    /// How many.
    pub count: u64,
    /// The last one.
    pub last: Time,
}
