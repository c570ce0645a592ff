//! Reports as text for a terminal. Formats the report and decides nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use gantry_api::{Placement, one_line};
use gantry_extender::index::{FitFailure, NodeReport, PodReport, UnhealthyGpu};

use super::gangs::{some, why_at, why_there};

/// Nodes listed.
const NAMED: usize = 20;
/// Pods listed per node.
const ENDS: usize = 4;

/// A pod's report; `wide` shortens no list.
pub(crate) fn pod(report: &PodReport, wide: bool) -> String {
    let (named, listed) = if wide { (usize::MAX, usize::MAX) } else { (NAMED, ENDS) };
    let mut out = format!("pod {}/{} requests {}\n", report.namespace, report.name, report.asks);
    if let Some(gang) = &report.gang {
        line(&mut out, &format!("member of {gang}"));
    }
    if let Some(scheduler) = &report.scheduled_by {
        line(
            &mut out,
            &format!(
                "scheduled by {scheduler}; no pod shows that this scheduler calls Gantry: see --scheduler-name"
            ),
        );
    }
    if let Some(gate) = &report.gate {
        line(&mut out, &format!("kept from its scheduler by scheduling gate {gate}"));
    }
    if let Some(bound) = &report.bound {
        let words = if bound.words.is_empty() { "no device that Gantry manages" } else { &bound.words };
        line(&mut out, &format!("bound to {}: {words}", bound.node));
        for id in &bound.devices {
            line(&mut out, &format!("  {id}"));
        }
        for gpu in &bound.unhealthy {
            line(&mut out, &format!("GPU {} is unhealthy: {}", gpu.gpu, gpu.reason));
        }
        responses(&mut out, "", &bound.unhealthy);
        if let Some(placement) = &bound.placement {
            why(&mut out, placement);
        }
        match (&report.gang_compared, bound.placement.as_ref().and_then(|placement| placement.gang.as_ref()))
        {
            (Some(compared), _) => why_there(&mut out, compared),
            // The Gang is gone or cannot be read: the annotation has the level that decided.
            (None, Some(gang)) => {
                line(&mut out, &gang.to_string());
                gang.level.iter().for_each(|level| why_at(&mut out, level));
            }
            (None, None) => {}
        }
        return out;
    }
    let (fit, waits): (Vec<&NodeReport>, Vec<&NodeReport>) =
        report.nodes.iter().partition(|node| node.lack.is_none());
    let is_ruled_out = |node: &&NodeReport| node.lack.as_ref().is_some_and(FitFailure::is_misfit);
    let (ruled_out, waits): (Vec<&NodeReport>, Vec<&NodeReport>) = waits.into_iter().partition(is_ruled_out);
    if report.nodes.is_empty() {
        line(&mut out, "no node has this resource");
    }
    if !fit.is_empty() {
        line(&mut out, &format!("fits now on {} of {} nodes:", fit.len(), report.nodes.len()));
        for node in fit.iter().take(named) {
            let bandwidth =
                node.bandwidth_gbs.map_or_else(String::new, |gbs| format!(": {gbs:.0} GB/s among them"));
            line(&mut out, &format!("  {}{bandwidth}", node.node));
        }
        more(&mut out, fit.len(), named);
        let why = match (&report.gang, report.gang_reason) {
            (Some(_), Some(reason)) if reason.is_of_missing_members() => {
                "it waits for the rest of its gang: see `gantry explain gang`"
            }
            (Some(_), _) => "it is placed with its gang as a whole: see `gantry explain gang`",
            (None, _) if report.gate.is_some() => "it is placed once the gate is removed",
            (None, _) => "if it still waits, the reason is not a device: see `kubectl describe pod`",
        };
        line(&mut out, why);
    }
    if !report.gangs_with_undecided_reservations.is_empty() {
        let gangs = some(&report.gangs_with_undecided_reservations, listed);
        line(&mut out, &format!("reservations not shown here are held for gang(s) {gangs}"));
    }
    if !waits.is_empty() {
        line(&mut out, &format!("does not fit now on {} of {} nodes:", waits.len(), report.nodes.len()));
        for node in waits.iter().take(named) {
            let lacks = node.lacks.as_deref().unwrap_or_default();
            line(&mut out, &format!("  {}: {lacks}{}{}", node.node, ends(node, listed), kept(node, listed)));
            responses(&mut out, "    ", &node.unhealthy);
        }
        more(&mut out, waits.len(), named);
    }
    if !ruled_out.is_empty() {
        line(&mut out, &format!("ruled out on {} of {} nodes:", ruled_out.len(), report.nodes.len()));
        for node in ruled_out.iter().take(named) {
            line(&mut out, &format!("  {}: {}", node.node, node.lacks.as_deref().unwrap_or_default()));
        }
        more(&mut out, ruled_out.len(), named);
    }
    out
}

/// Why a pod has its node and devices.
fn why(out: &mut String, placement: &Placement) {
    for sentence in &placement.devices {
        line(out, sentence);
    }
    let Some(compared) = &placement.compared else {
        return;
    };
    match compared.nodes {
        0 | 1 => line(out, "no other node fitted"),
        nodes => line(out, &format!("chosen among {nodes} nodes that fitted; of the others the best:")),
    }
    for other in &compared.others {
        line(out, &format!("  {other}"));
    }
}

/// What the operator should do about the Xids of GPUs.
fn responses(out: &mut String, indent: &str, unhealthy: &[UnhealthyGpu]) {
    let mut known: BTreeMap<u64, (&str, BTreeSet<u8>)> = BTreeMap::new();
    for (gpu, xid) in unhealthy.iter().flat_map(|gpu| gpu.xids.iter().map(|xid| (gpu.gpu, xid))) {
        if let Some(response) = &xid.response {
            known.entry(xid.xid).or_insert((response, BTreeSet::new())).1.insert(gpu);
        }
    }
    for (xid, (response, gpus)) in known {
        let gpus: Vec<String> = gpus.iter().map(u8::to_string).collect();
        line(out, &format!("{indent}response to Xid {xid} of GPU {}: {response}", gpus.join(",")));
    }
}

/// The pods that would have to end on a node.
fn ends(node: &NodeReport, listed: usize) -> String {
    let pods = &node.would_have_to_end;
    match pods.len() {
        0 => String::new(),
        1 => format!("; fits when {} ends", pods[0]),
        count if count <= listed => format!("; fits when {} end", pods.join(" and ")),
        count => format!("; fits when {} and {} more end", pods[..listed].join(", "), count - listed),
    }
}

/// The gangs with reservations on a node.
fn kept(node: &NodeReport, listed: usize) -> String {
    let named: Vec<String> = node.reserved_for_gangs.iter().map(ToString::to_string).collect();
    if named.is_empty() {
        return String::new();
    }
    format!("; has {}", some(&named, listed))
}

fn more(out: &mut String, count: usize, named: usize) {
    if count > named {
        line(out, &format!("  and {} more", count - named));
    }
}

fn line(out: &mut String, text: &str) {
    // Writing into a String cannot fail.
    let _ = writeln!(out, "{}", one_line(text));
}

#[cfg(test)]
mod tests {
    use gantry_api::Reason;
    use gantry_extender::index::PodNode;

    use super::*;

    fn node(name: &str, lacks: Option<&str>, gbs: Option<f64>, ends: &[&str]) -> NodeReport {
        NodeReport {
            node: name.into(),
            lacks: lacks.map(str::to_owned),
            lack: lacks.map(|text| FitFailure::Unmet { text: text.to_owned() }),
            bandwidth_gbs: gbs,
            would_have_to_end: ends.iter().map(|name| (*name).to_owned()).collect(),
            reserved_for_gangs: Vec::new(),
            unhealthy: Vec::new(),
        }
    }

    fn report(bound: Option<PodNode>, nodes: Vec<NodeReport>) -> PodReport {
        PodReport {
            namespace: "default".into(),
            name: "trainer-0".into(),
            asks: "4 nvidia.com/gpu".to_owned(),
            gang: None,
            gang_reason: None,
            gang_compared: None,
            gangs_with_undecided_reservations: Vec::new(),
            scheduled_by: None,
            gate: None,
            bound,
            nodes,
        }
    }

    #[test]
    fn a_pod_that_waits() {
        let many = ["default/a", "default/b", "default/c", "default/d", "default/e"];
        let nodes = vec![
            node("n1", Some("3 of 8 GPUs free, 4 asked"), None, &["default/a"]),
            node("n2", Some("0 of 8 GPUs free, 4 asked"), None, &many),
            node("n3", Some("2 of 2 GPUs free, 4 asked"), None, &[]),
        ];
        insta::assert_snapshot!(pod(&report(None, nodes), false), @r"
        pod default/trainer-0 requests 4 nvidia.com/gpu
        does not fit now on 3 of 3 nodes:
          n1: 3 of 8 GPUs free, 4 asked; fits when default/a ends
          n2: 0 of 8 GPUs free, 4 asked; fits when default/a, default/b, default/c, default/d and 1 more end
          n3: 2 of 2 GPUs free, 4 asked
        ");
    }

    #[test]
    fn a_pod_that_fits() {
        let nodes = vec![
            node("n1", None, Some(300.0), &[]),
            node("n2", Some("0 of 8 GPUs free, 4 asked"), None, &["default/a", "default/b"]),
        ];
        insta::assert_snapshot!(pod(&report(None, nodes), false), @r"
        pod default/trainer-0 requests 4 nvidia.com/gpu
        fits now on 1 of 2 nodes:
          n1: 300 GB/s among them
        if it still waits, the reason is not a device: see `kubectl describe pod`
        does not fit now on 1 of 2 nodes:
          n2: 0 of 8 GPUs free, 4 asked; fits when default/a and default/b end
        ");
    }

    #[test]
    fn a_member_of_a_gang_that_waits() {
        let mut member = report(None, vec![node("n1", None, Some(300.0), &[])]);
        member.gang = Some("gang default/train: Pending: 3 of 4 members exist".into());
        member.gang_reason = Some(Reason::WaitingForMembers);
        member.gangs_with_undecided_reservations = vec!["default/other".to_owned()];
        insta::assert_snapshot!(pod(&member, false), @r"
        pod default/trainer-0 requests 4 nvidia.com/gpu
        member of gang default/train: Pending: 3 of 4 members exist
        fits now on 1 of 1 nodes:
          n1: 300 GB/s among them
        it waits for the rest of its gang: see `gantry explain gang`
        reservations not shown here are held for gang(s) default/other
        ");
    }

    #[test]
    fn pod_of_another_scheduler() {
        let mut theirs = report(None, vec![node("n1", None, None, &[])]);
        theirs.scheduled_by = Some("koord-scheduler".into());
        insta::assert_snapshot!(pod(&theirs, false), @r"
        pod default/trainer-0 requests 4 nvidia.com/gpu
        scheduled by koord-scheduler; no pod shows that this scheduler calls Gantry: see --scheduler-name
        fits now on 1 of 1 nodes:
          n1
        if it still waits, the reason is not a device: see `kubectl describe pod`
        ");
    }

    #[test]
    fn gated_pod_waits_for_the_removal_of_its_gate() {
        let mut gated = report(None, vec![node("n1", None, None, &[])]);
        gated.gate = Some("example.com/quota".into());
        insta::assert_snapshot!(pod(&gated, false), @r"
        pod default/trainer-0 requests 4 nvidia.com/gpu
        kept from its scheduler by scheduling gate example.com/quota
        fits now on 1 of 1 nodes:
          n1
        it is placed once the gate is removed
        ");
    }

    #[test]
    fn a_pod_that_is_bound() {
        let bound = PodNode {
            node: "n1".into(),
            devices: vec!["GPU-1".into(), "GPU-2".into()],
            words: "GPU 0-1".to_owned(),
            unhealthy: Vec::new(),
            placement: None,
        };
        insta::assert_snapshot!(pod(&report(Some(bound.clone()), Vec::new()), false), @r"
        pod default/trainer-0 requests 4 nvidia.com/gpu
        bound to n1: GPU 0-1
          GPU-1
          GPU-2
        ");
        let placement = serde_json::from_str(
            r#"{"devices": ["GPUs 0,1: over NVLink, 48 GB/s, the most that is free (80 GB/s on the empty machine); leaves none free"],
                "compared": {"nodes": 5, "others": [
                    {"node": "n2", "alike": 3, "loss": {"reason": "Bandwidth", "gbs": 24.0, "chosenGbs": 48.0}},
                    {"node": "n5", "alike": 1, "loss": {"reason": "Reserved"}}]}}"#,
        );
        let explained = PodNode { placement: placement.unwrap(), ..bound };
        insta::assert_snapshot!(pod(&report(Some(explained), Vec::new()), false), @r"
        pod default/trainer-0 requests 4 nvidia.com/gpu
        bound to n1: GPU 0-1
          GPU-1
          GPU-2
        GPUs 0,1: over NVLink, 48 GB/s, the most that is free (80 GB/s on the empty machine); leaves none free
        chosen among 5 nodes that fitted; of the others the best:
          n2 and 2 alike: 24 instead of 48 GB/s
          n5: its devices are about to go to other pods
        ");
    }

    /// The Gang has all levels; where it is gone, the annotation has the one that decided.
    #[test]
    fn bound_member_shows_why_its_gang_is_there() {
        let rack = r#"{"level": "rack", "domains": 12, "holding": 2, "used": 1, "chosen": "rack r7", "others": [
            {"domain": "rack r3", "reason": "LeftOver", "value": 4, "chosenValue": 0},
            {"domain": "rack r4", "reason": "Members", "value": 6, "chosenValue": 8}]}"#;
        let placement = format!(
            r#"{{"devices": ["GPUs 0,1: over NVLink"], "gang": {{"object": "train", "domain": "rack r7", "level": {rack}}}}}"#
        );
        let node = r#"{"level": "node", "domains": 40, "holding": 0, "used": 4, "others": [
            {"domain": "n1", "reason": "Members", "value": 2, "chosenValue": 8}]}"#;
        let bound = PodNode {
            node: "n1".into(),
            devices: Vec::new(),
            words: "GPU 0-1".to_owned(),
            unhealthy: Vec::new(),
            placement: serde_json::from_str(&placement).unwrap(),
        };
        let mut member = report(Some(bound), Vec::new());
        insta::assert_snapshot!(pod(&member, false), @r"
        pod default/trainer-0 requests 4 nvidia.com/gpu
        bound to n1: GPU 0-1
        GPUs 0,1: over NVLink
        Placed with gang train in rack r7
          rack r7: the best of 2 racks that hold the gang
            rack r3: room for 4 more members instead of 0
            rack r4: 6 of 8 members fit
        ");
        let compared = format!(r#"{{"members": 8, "counted": "OnRails", "levels": [{node}, {rack}]}}"#);
        member.gang_compared = serde_json::from_str(&compared).unwrap();
        insta::assert_snapshot!(pod(&member, false), @r"
        pod default/trainer-0 requests 4 nvidia.com/gpu
        bound to n1: GPU 0-1
        GPUs 0,1: over NVLink
        why there: 8 members were planned by the free devices on the rails that the gang uses:
          none of 40 nodes holds the gang, which uses 4
            n1: 2 of 8 members fit
          rack r7: the best of 2 racks that hold the gang
            rack r3: room for 4 more members instead of 0
            rack r4: 6 of 8 members fit
        ");
    }
}
