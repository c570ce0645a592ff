//! What GpuNodes report of the health of GPUs, as the rules of remediation read it.

use std::sync::Arc;

use gantry_api::{Cordons, names};
use gantry_topology::GpuUuid;
use jiff::Timestamp;
use serde::Deserialize;

use super::record::Record;
use crate::index::{PartialGpuNode, read_part};
use crate::per_node::{self, FromGpuNode, PerNode};

/// The health of a node's GPUs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct NodeHealth {
    /// GPUs with a known UUID.
    pub(crate) gpus: Vec<GpuHealth>,
    /// What rules have counted and done here.
    pub(crate) record: Record,
    /// What another program does with the node ([`crate::index::mark`]). It is a mark of the Node, not of the GpuNode.
    pub(crate) mark: Option<Arc<str>>,
}

/// The health of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GpuHealth {
    /// Its index on the node.
    pub(crate) index: u8,
    /// Its UUID.
    pub(crate) uuid: GpuUuid,
    /// Whether it is cordoned, by whatever client.
    pub(crate) cordoned: bool,
    /// What is wrong with it.
    pub(crate) problems: Vec<Problem>,
}

/// A problem of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Problem {
    /// One of [`gantry_api::gpunode::PROBLEM_CAUSES`].
    pub(crate) cause: String,
    /// The Xid, if it is one.
    pub(crate) xid: Option<u64>,
    /// When it began, in Unix seconds.
    pub(crate) since: i64,
    /// Whether it is an event that leaves the GPU healthy, and no state that lasts: an Xid of an application.
    pub(crate) is_event: bool,
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.xid {
            Some(xid) => write!(f, "Xid {xid}"),
            None => f.write_str(&self.cause),
        }
    }
}

/// The class of the Xids that leave a GPU healthy.
const HARMLESS: &str = "application";

#[derive(Default, Deserialize)]
struct Status {
    #[serde(default)]
    faults: Vec<ReportedProblem>,
    #[serde(default)]
    problems: Vec<ReportedProblem>,
    #[serde(default)]
    evidence: Vec<GpuXids>,
}

/// The Xids of a GPU.
#[derive(Deserialize)]
struct GpuXids {
    gpu: String,
    #[serde(default)]
    xids: Vec<CountedXid>,
}

#[derive(Deserialize)]
struct CountedXid {
    xid: u64,
    last: Timestamp,
    #[serde(default)]
    judged: String,
}

/// A fault or another problem.
#[derive(Deserialize)]
struct ReportedProblem {
    gpu: String,
    #[serde(default)]
    xid: Option<u64>,
    #[serde(default)]
    class: String,
    #[serde(default)]
    cause: String,
    since: Timestamp,
}

impl NodeHealth {
    /// The health; `None` if the GpuNode cannot be read.
    fn of(node: &PartialGpuNode) -> Option<Self> {
        let gpus = per_node::gpus(node)?;
        let status = match &node.status {
            Some(status) => read_part(status).ok()?,
            None => Status::default(),
        };
        let annotations = node.metadata.annotations.as_ref();
        let cordons = Cordons::of(annotations);
        let record = annotations.and_then(|all| all.get(names::REMEDIATION_ANNOTATION));
        let problems_of = |uuid: &GpuUuid| {
            let all = status.faults.iter().chain(&status.problems);
            let own = all.filter(|known| known.gpu == uuid.as_str());
            let lasting = own.map(|known| Problem {
                cause: if known.xid.is_some() { format!("xid-{}", known.class) } else { known.cause.clone() },
                xid: known.xid,
                since: known.since.as_second(),
                is_event: false,
            });
            let counted = status.evidence.iter().filter(|known| known.gpu == uuid.as_str());
            let events = counted.flat_map(|known| &known.xids).filter(|known| known.judged == HARMLESS);
            let events = events.map(|known| Problem {
                cause: format!("xid-{HARMLESS}"),
                xid: Some(known.xid),
                since: known.last.as_second(),
                is_event: true,
            });
            lasting.chain(events).collect()
        };
        let gpus = gpus.into_iter().filter_map(|gpu| {
            let uuid = gpu.uuid?;
            let (cordoned, problems) = (cordons.get(&uuid).is_some(), problems_of(&uuid));
            Some(GpuHealth { index: gpu.index, uuid, cordoned, problems })
        });
        let record = record.map(|text| Record::read(text)).unwrap_or_default();
        Some(Self { gpus: gpus.collect(), record, mark: None })
    }
}

impl FromGpuNode for NodeHealth {
    /// A node that cannot be read has no GPUs: nothing is done to it.
    fn read(node: &PartialGpuNode) -> Option<Self> {
        Some(Self::of(node).unwrap_or_default())
    }
}

/// The health of all nodes.
pub(crate) type ClusterHealth = PerNode<NodeHealth>;

#[cfg(test)]
mod tests {
    use gantry_api::NodeName;
    use serde_json::json;

    use super::*;

    #[test]
    fn health_has_faults_problems_cordons_and_record() {
        let node: PartialGpuNode = serde_json::from_value(json!({
            "metadata": {"name": "n", "annotations": {
                "gantry.dev/cordon-GPU-b": "the fan fails",
                "gantry.dev/remediation": r#"[{"rule":"r","gpu":"GPU-a","seen":[5]}]"#,
            }},
            "spec": {"machine": {"gpus": [{"index": 0, "uuid": "GPU-a"}, {"index": 1, "uuid": "GPU-b"}, {"index": 2}]}},
            "status": {
                "faults": [{"gpu": "GPU-a", "xid": 79, "class": "fatal", "reason": "", "since": "1970-01-01T00:00:07Z"}],
                "problems": [{"gpu": "GPU-b", "cause": "nvlinks-down", "since": "1970-01-01T00:00:08Z"}],
                "evidence": [{"gpu": "GPU-b", "since": "1970-01-01T00:00:01Z", "xids": [
                    {"xid": 48, "count": 1, "last": "1970-01-01T00:00:05Z", "judged": "mig-instance"},
                    {"xid": 94, "count": 3, "last": "1970-01-01T00:00:09Z", "judged": "application"},
                    {"xid": 31, "count": 1, "last": "1970-01-01T00:00:09Z"},
                ]}],
            },
        }))
        .unwrap();
        let health = NodeHealth::of(&node).unwrap();
        let [a, b] = &health.gpus[..] else { panic!("{health:?}") };
        assert_eq!((a.index, a.cordoned, b.index, b.cordoned), (0, false, 1, true));
        let problem =
            |cause: &str, xid, since, is_event| Problem { cause: cause.to_owned(), xid, since, is_event };
        assert_eq!(a.problems, [problem("xid-fatal", Some(79), 7, false)]);
        // Xids that are faults count as faults only, and those that are not watched not at all.
        let expected =
            [problem("nvlinks-down", None, 8, false), problem("xid-application", Some(94), 9, true)];
        assert_eq!(b.problems, expected);
        assert_eq!(health.record.get("r", &a.uuid).unwrap().seen, [5]);
    }

    #[test]
    fn node_that_cannot_be_read_has_no_gpus() {
        let all = ClusterHealth::default();
        let node: PartialGpuNode =
            serde_json::from_value(json!({"metadata": {"name": "n"}, "spec": 3})).unwrap();
        all.observe(&"n".into(), &node);
        assert_eq!(*all.all()[&NodeName::from("n")], NodeHealth::default());
        all.forget(&"n".into());
        assert!(all.all().is_empty());
    }
}
