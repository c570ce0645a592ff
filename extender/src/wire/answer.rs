//! Answers to kube-scheduler, written straight into one buffer: 5,000 names and reasons are copied, not serialised one by one.
//! Go reads absent values as well as null ones; what Go would write is written. Reasons and errors quote text of pods and nodes:
//! kube-scheduler copies them into conditions and Events, so control characters are escaped here.

use super::CandidateNodes;
use gantry_api::one_line;
use gantry_planner::decide::{Candidates, FilterVerdict};

/// `ExtenderFilterResult`: nodes that pass in the form they came in, refused ones with their reasons.
///
/// Every refusal is "unresolvable". kube-scheduler has counted devices before it asks, so on a node refused here preemption finds
/// that the pod fits without victims, and fails with an error instead of helping.
pub fn filter_answer(candidates: &CandidateNodes<'_>, filtered: &FilterVerdict) -> Vec<u8> {
    let name = longest(candidates) + 4;
    let mut out =
        Vec::with_capacity(256 + name * filtered.passed.len() + (name + 96) * filtered.refused.len());
    match candidates {
        CandidateNodes::Names(names) => {
            out.extend_from_slice(br#"{"Nodes":null,"NodeNames":["#);
            let name = |position: &u32| names.get(*position as usize).map_or("", |name| name.as_str());
            if let Some((first, others)) = filtered.passed.split_first() {
                out.push(b'"');
                within_quotes(&mut out, name(first));
                for other in others {
                    out.extend_from_slice(br#"",""#);
                    within_quotes(&mut out, name(other));
                }
                out.push(b'"');
            }
            out.push(b']');
        }
        CandidateNodes::Objects(nodes) => {
            out.extend_from_slice(br#"{"Nodes":{"metadata":{},"items":["#);
            separated(&mut out, &filtered.passed, |out, &position| {
                out.extend_from_slice(nodes.get(position as usize).map_or("{}", |node| node.raw).as_bytes());
            });
            out.extend_from_slice(br#"]},"NodeNames":null"#);
        }
    }
    let reasons: Vec<Vec<u8>> = filtered
        .reasons
        .iter()
        .map(|reason| {
            let mut written = Vec::with_capacity(reason.len() + 2);
            string(&mut written, &one_line(reason));
            written
        })
        .collect();
    out.extend_from_slice(br#","FailedNodes":{},"FailedAndUnresolvableNodes":{"#);
    separated(&mut out, &filtered.refused, |out, &(position, reason)| {
        string(out, candidates.name(position as usize));
        out.push(b':');
        out.extend_from_slice(reasons.get(reason as usize).map_or(b"\"\"", Vec::as_slice));
    });
    out.extend_from_slice(br#"},"Error":""}"#);
    out
}

/// `ExtenderFilterResult` that fails the whole cycle: kube-scheduler tries again after a back-off.
pub fn filter_error(error: &str) -> Vec<u8> {
    let mut out =
        br#"{"Nodes":null,"NodeNames":null,"FailedNodes":null,"FailedAndUnresolvableNodes":null,"Error":"#
            .to_vec();
    string(&mut out, &one_line(error));
    out.push(b'}');
    out
}

/// The most nodes that are listed with a score of 0: as many as Kubernetes is tested with.
const LISTED: usize = 5_000;

/// `HostPriorityList`: 10 for the winner, 0 for everyone else, so that kube-scheduler has no tie to break at random.
///
/// To kube-scheduler a node that is not listed has 0, too. Of very many nodes the winner alone is listed: writing and reading a
/// zero for each would take longer than the decision.
pub fn priorities_answer(candidates: &CandidateNodes<'_>, winner: Option<u32>) -> Vec<u8> {
    let winner = winner.map(|winner| winner as usize);
    let listed = match candidates.len() {
        0..=LISTED => 0..candidates.len(),
        _ => winner.map_or(0..0, |winner| winner..winner + 1),
    };
    let mut out = Vec::with_capacity((longest(candidates) + 24) * listed.len() + 64);
    out.push(b'[');
    // All that stands between two names is one piece.
    let mut between: &[u8] = br#"{"Host":""#;
    let mut end: &[u8] = b"";
    for position in listed {
        out.extend_from_slice(between);
        within_quotes(&mut out, candidates.name(position));
        // The most that an extender may give a node is 10.
        if winner == Some(position) {
            (between, end) = (br#"","Score":10},{"Host":""#, br#"","Score":10}"#);
        } else {
            (between, end) = (br#"","Score":0},{"Host":""#, br#"","Score":0}"#);
        }
    }
    out.extend_from_slice(end);
    out.push(b']');
    out
}

/// `ExtenderBindingResult`: an empty error means that the Binding exists.
pub fn bind_answer(error: Option<&str>) -> Vec<u8> {
    let mut out = br#"{"Error":"#.to_vec();
    string(&mut out, &one_line(error.unwrap_or_default()));
    out.push(b'}');
    out
}

/// About the longest name, by a sample: room for the answer is asked for once.
fn longest(candidates: &CandidateNodes<'_>) -> usize {
    let sample = (0..candidates.len()).step_by(candidates.len() / 16 + 1);
    sample.map(|position| candidates.name(position).len()).max().unwrap_or(0)
}

fn separated<T>(out: &mut Vec<u8>, items: &[T], mut write: impl FnMut(&mut Vec<u8>, &T)) {
    for (position, item) in items.iter().enumerate() {
        if position > 0 {
            out.push(b',');
        }
        write(out, item);
    }
}

/// A JSON string.
fn string(out: &mut Vec<u8>, text: &str) {
    out.push(b'"');
    within_quotes(out, text);
    out.push(b'"');
}

/// What of a JSON string stands between its quotes. Names and almost all reasons need no escape and are copied.
fn within_quotes(out: &mut Vec<u8>, text: &str) {
    // Every byte is looked at, whatever the one before was: the compiler makes vector instructions of that.
    let escapes =
        text.bytes().fold(false, |found, byte| found | (byte < 0x20) | (byte == b'"') | (byte == b'\\'));
    if !escapes {
        out.extend_from_slice(text.as_bytes());
    } else {
        let quoted = serde_json::Value::from(text).to_string();
        let within = quoted.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
        out.extend_from_slice(within.unwrap_or_default().as_bytes());
    }
}
