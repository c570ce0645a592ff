//! Pods: what is kept of one, as JSON and as the extender reads it.

use std::fmt::{self, Write};
use std::sync::{Arc, OnceLock};

use gantry_api::{Grant, names};
use gantry_extender::pod::PodFacts;
use serde_json::Value;

use crate::world::BEGIN;

/// How far a pod is, as `status.phase` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Pending,
    Running,
    Succeeded,
    Failed,
}

/// A pod.
#[derive(Debug, Clone)]
pub(crate) struct Pod {
    pub(crate) uid: String,
    pub(crate) name: String,
    pub(crate) rv: u64,
    pub(crate) gpus: u32,
    pub(crate) gang: Option<Claim>,
    pub(crate) priority: i32,
    /// Its `preemptionPolicy` is not `Never`.
    pub(crate) preempts: bool,
    /// Milliseconds since the beginning.
    pub(crate) created: u64,
    pub(crate) node: Option<String>,
    pub(crate) bound: u64,
    /// When the Binding was sent that was carried out.
    pub(crate) sent: u64,
    pub(crate) grant: Option<Arc<str>>,
    pub(crate) phase: Phase,
    /// kube-scheduler's word why it is not scheduled.
    pub(crate) message: String,
    /// Pokes, in the form of a condition.
    pub(crate) pokes: u64,
    /// `allocatedResourcesStatus`.
    pub(crate) allocated: Vec<String>,
    pub(crate) leaving: bool,
    /// While it is: when it has to be gone.
    pub(crate) ends: u64,
    /// kube-scheduler has stopped it for another.
    pub(crate) preempted: bool,
    /// `nominatedNodeName`: where kube-scheduler is making room for it.
    pub(crate) nominated: Option<String>,
    /// What keeps it out of kube-scheduler's queue.
    pub(crate) gates: Vec<Gate>,
    /// It had gates when it was made.
    pub(crate) was_gated: bool,
    pub(crate) job: usize,
    pub(crate) read: Read,
}

/// A scheduling gate, by who removes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gate {
    /// The extender, once the gang is complete.
    Ours,
    /// Somebody else, in his own time.
    Quota,
}

/// What was read of this version of a pod: many look at it, and it is worked out once.
#[derive(Debug, Default)]
pub(crate) struct Read {
    /// Of the version before, which may say the same.
    before: Option<(Arc<str>, Arc<PodFacts>)>,
    text: OnceLock<Arc<str>>,
    facts: OnceLock<Arc<PodFacts>>,
    granted: OnceLock<Vec<String>>,
}

/// A pod is copied to be changed.
impl Clone for Read {
    fn clone(&self) -> Self {
        self.next()
    }
}

impl Read {
    /// For the version after this one.
    pub(super) fn next(&self) -> Self {
        let before = match (self.text.get(), self.facts.get()) {
            (Some(text), Some(facts)) => Some((Arc::clone(text), Arc::clone(facts))),
            _ => self.before.clone(),
        };
        Self { before, ..Self::default() }
    }
}

/// What a pod says of its gang.
#[derive(Debug, Clone)]
pub(crate) struct Claim {
    pub(crate) gang: String,
    /// Its PodGroup, if that belongs to a tree of groups, which states the rest.
    pub(crate) group: Option<String>,
    /// All that the Job of the gang's name has, if that is not said.
    pub(crate) min: Option<u32>,
    pub(crate) max: Option<u32>,
    pub(crate) spares: Option<u32>,
    pub(crate) repair: Option<&'static str>,
}

impl Pod {
    pub(crate) fn is_live(&self) -> bool {
        matches!(self.phase, Phase::Pending | Phase::Running)
    }

    /// As the API server sends it.
    pub(crate) fn text(&self) -> &str {
        self.read.text.get_or_init(|| {
            let mut text = String::with_capacity(1024);
            // Writing to a String cannot fail.
            let _ = self.write(&mut text);
            text.into()
        })
    }

    /// As the extender reads it.
    pub(crate) fn facts(&self) -> &PodFacts {
        self.read.facts.get_or_init(|| match &self.read.before {
            Some((text, facts)) if **text == *self.text() => Arc::clone(facts),
            _ => Arc::new(crate::extender::read_pod(self.text())),
        })
    }

    /// The devices that it is granted.
    pub(crate) fn granted(&self) -> &[String] {
        self.read.granted.get_or_init(|| {
            let grant = self.grant.as_deref();
            let Some(grant) = grant.and_then(|text| serde_json::from_str::<Grant>(text).ok()) else {
                return Vec::new();
            };
            let held = grant.held("nvidia.com/gpu");
            held.iter().map(ToString::to_string).collect()
        })
    }

    /// Whether kubelet has given it other devices than it was granted, by its own word.
    pub(crate) fn was_given_others(&self) -> bool {
        let granted = self.granted();
        !self.allocated.iter().all(|id| granted.contains(id))
    }

    fn write(&self, out: &mut String) -> fmt::Result {
        let Self { name, uid, .. } = self;
        let created = time(self.created);
        write!(
            out,
            r#"{{"metadata":{{"name":"{name}","namespace":"default","uid":"{uid}","creationTimestamp":"{created}""#
        )?;
        if self.leaving {
            let ends = time(self.ends);
            write!(out, r#","deletionTimestamp":"{ends}""#)?;
        }
        self.write_annotations(out)?;
        if let Some(Claim { gang, min: None, .. }) = &self.gang {
            write!(
                out,
                r#","ownerReferences":[{{"apiVersion":"batch/v1","kind":"Job","name":"{gang}","uid":"job-{gang}","controller":true}}]"#
            )?;
        }
        let Self { gpus, priority, .. } = self;
        let asked = format!(r#"{{"nvidia.com/gpu":"{gpus}"}}"#);
        write!(
            out,
            r#"}},"spec":{{"containers":[{{"name":"main","resources":{{"limits":{asked},"requests":{asked}}}}}],"priority":{priority}"#
        )?;
        if !self.preempts {
            out.push_str(r#","preemptionPolicy":"Never""#);
        }
        if let Some(group) = self.gang.as_ref().and_then(|claim| claim.group.as_ref()) {
            write!(out, r#","schedulingGroup":{{"podGroupName":"{group}"}}"#)?;
        }
        if let Some(node) = &self.node {
            write!(out, r#","nodeName":"{node}""#)?;
        }
        for (number, gate) in self.gates.iter().enumerate() {
            out.push_str(if number > 0 { "," } else { r#","schedulingGates":["# });
            let name = match gate {
                Gate::Ours => names::GANG_GATE,
                Gate::Quota => "example.com/quota",
            };
            write!(out, r#"{{"name":"{name}"}}"#)?;
        }
        if !self.gates.is_empty() {
            out.push(']');
        }
        write!(out, r#"}},"status":{{"phase":"{:?}","#, self.phase)?;
        if let Some(node) = &self.nominated {
            write!(out, r#""nominatedNodeName":"{node}","#)?;
        }
        out.push_str(r#""conditions":["#);
        if self.node.is_some() {
            let bound = time(self.bound);
            write!(out, r#"{{"type":"PodScheduled","status":"True","lastTransitionTime":"{bound}"}}"#)?;
        } else if !self.message.is_empty() {
            let message = Value::from(self.message.as_str());
            write!(
                out,
                r#"{{"type":"PodScheduled","status":"False","reason":"Unschedulable","message":{message},"lastTransitionTime":"{created}"}}"#
            )?;
        } else if self.was_gated {
            // It stays until kube-scheduler has something else to say.
            write!(
                out,
                r#"{{"type":"PodScheduled","status":"False","reason":"SchedulingGated","message":"Scheduling is blocked due to non-empty scheduling gates"}}"#
            )?;
        }
        if self.preempted {
            let comma = if out.ends_with('[') { "" } else { "," };
            write!(
                out,
                r#"{comma}{{"type":"DisruptionTarget","status":"True","reason":"PreemptionByScheduler"}}"#
            )?;
        }
        out.push_str(r#"],"containerStatuses":["#);
        if !self.allocated.is_empty() || !self.is_live() {
            let state = match self.phase {
                Phase::Running | Phase::Pending => "running",
                Phase::Succeeded | Phase::Failed => "terminated",
            };
            write!(
                out,
                r#"{{"name":"main","state":{{"{state}":{{}}}},"allocatedResourcesStatus":[{{"name":"nvidia.com/gpu","resources":["#
            )?;
            for (number, id) in self.allocated.iter().enumerate() {
                let comma = if number > 0 { "," } else { "" };
                write!(out, r#"{comma}{{"resourceID":"{id}","health":"Healthy"}}"#)?;
            }
            out.push_str("]}]}");
        }
        out.push_str("]}}");
        Ok(())
    }

    fn write_annotations(&self, out: &mut String) -> fmt::Result {
        let claim = self.gang.as_ref();
        let sized = claim.filter(|claim| claim.group.is_none());
        let texts = [
            ("gang", sized.map(|claim| claim.gang.clone())),
            ("gang-min", sized.map(|claim| claim.min.map_or("all".to_owned(), |min| min.to_string()))),
            ("gang-max", sized.and_then(|claim| Some(claim.max?.to_string()))),
            ("gang-spares", claim.and_then(|claim| Some(claim.spares?.to_string()))),
            ("gang-repair", claim.and_then(|claim| Some(claim.repair?.to_owned()))),
            ("grant", self.grant.as_deref().map(str::to_owned)),
        ];
        let mut before = r#","annotations":{"#;
        for (key, text) in texts {
            if let Some(text) = text {
                write!(out, r#"{before}"gantry.dev/{key}":{}"#, Value::from(text))?;
                before = ",";
            }
        }
        if before == "," {
            out.push('}');
        }
        Ok(())
    }
}

/// A moment as the API server writes it: whole seconds.
fn time(at: u64) -> String {
    let seconds = BEGIN + i64::try_from(at / 1000).unwrap();
    jiff::Timestamp::from_second(seconds).unwrap().to_string()
}
