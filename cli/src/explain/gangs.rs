//! Gangs as text for a terminal. No decisions: everything said here stands in the report.

use std::fmt::Write as _;

use gantry_extender::gang::plan::Tried;
use gantry_extender::index::{GangReport, GangView, MemberView};

/// Members named one by one.
const MEMBERS: usize = 64;
/// Pods named that would have to end.
const ENDS: usize = 8;
/// Reasons named per level.
const REASONS: usize = 4;

/// A gang, at `now` in seconds since 1970.
pub(crate) fn gang(report: &GangReport, now: i64) -> String {
    let gang = &report.gang;
    let mut out = format!("gang {}/{}: {:?}", gang.namespace, gang.name, gang.phase);
    if !gang.domain.is_empty() {
        let _ = write!(out, ", {}", gang.domain);
    }
    out.push('\n');
    let decided = gang.decided_by.as_deref().unwrap_or("nobody yet");
    let size = match gang.min {
        0 => format!(
            "size: {} members exist; how many are needed is not known",
            gang.exist
        ),
        min => format!(
            "size: {} of {min} members exist; decided by {decided}",
            gang.exist
        ),
    };
    line(&mut out, &size);
    line(
        &mut out,
        &format!("convention: {}; Gang object: {}", gang.dialect, gang.object),
    );
    match gang.bound_at {
        Some(at) => line(&mut out, &format!("bound: {} ago", age(now - at))),
        None => line(
            &mut out,
            &format!(
                "waits: {}, priority {}: {}",
                age(now - gang.waiting_since),
                gang.priority,
                reason(gang)
            ),
        ),
    }
    if let Some(position) = gang.position {
        let behind = match report.ahead.is_empty() {
            true => String::new(),
            false => format!(", behind {}", some(&report.ahead, ENDS)),
        };
        line(&mut out, &format!("place in the queue: {position}{behind}"));
    }
    if gang.has_nodes_kept {
        line(&mut out, "nodes are kept free for it until it fits");
    }
    if let Some(tried) = &report.tried {
        line(
            &mut out,
            &format!("tried for {}, of which {} must fit:", tried.members, tried.must),
        );
        for level in &tried.levels {
            tried_level(&mut out, level);
        }
        if tried.hopeless {
            line(&mut out, "it would not fit if nothing else were on the cluster");
        }
    }
    if !report.would_have_to_end.is_empty() {
        line(
            &mut out,
            &format!("fits when {} ended", some(&report.would_have_to_end, ENDS)),
        );
    }
    line(&mut out, "members:");
    for member in gang.members.iter().take(MEMBERS) {
        line(&mut out, &format!("  {}", member_line(gang, member)));
    }
    if gang.members.len() > MEMBERS {
        line(&mut out, &format!("  and {} more", gang.members.len() - MEMBERS));
    }
    let kept = gang.places.iter().filter(|place| place.pod.is_none()).count();
    if kept > 0 {
        line(&mut out, &format!("{kept} places are kept for members to come"));
    }
    out
}

/// The queue, at `now` in seconds since 1970.
pub(crate) fn queue(waiting: &[GangView], now: i64) -> String {
    if waiting.is_empty() {
        return "no gang waits for a place\n".to_owned();
    }
    let mut out = String::new();
    for (at, gang) in waiting.iter().enumerate() {
        let text = format!(
            "{:>3}  {}/{}  priority {}  waits {}  {}",
            at + 1,
            gang.namespace,
            gang.name,
            gang.priority,
            age(now - gang.waiting_since),
            reason(gang)
        );
        line(&mut out, &text);
    }
    out
}

/// Why it waits, without the name that stands before it already.
fn reason(gang: &GangView) -> &str {
    let name = format!("gang {}/{}", gang.namespace, gang.name);
    let rest = gang.reason.strip_prefix(&name);
    rest.map_or(&*gang.reason, |rest| rest.trim_start_matches(':').trim_start())
}

fn tried_level(out: &mut String, level: &Tried) {
    let best = match level.best.is_empty() {
        true => String::new(),
        false => format!(", best {} of {}", level.best, level.domains),
    };
    let mut text = format!("  {}{best}: {} of {} fit", level.level, level.fits, level.wanted);
    if level.empty != level.fits {
        let _ = write!(text, ", {} if it were empty", level.empty);
    }
    for stock in &level.devices {
        let _ = write!(
            text,
            "; {} of {} {} free",
            stock.free, stock.total, stock.resource
        );
        if stock.healthy < stock.total {
            let _ = write!(text, " ({} healthy)", stock.healthy);
        }
        let _ = write!(text, ", {} asked", stock.asked);
    }
    line(out, &text);
    for (reason, nodes) in level.reasons.iter().take(REASONS) {
        line(out, &format!("    {nodes} node(s): {reason}"));
    }
}

fn member_line(gang: &GangView, member: &MemberView) -> String {
    let mut text = String::new();
    if let Some(rank) = member.rank {
        let _ = write!(text, "rank {rank}  ");
    }
    if !member.role.is_empty() {
        let _ = write!(text, "{}  ", member.role);
    }
    let _ = write!(text, "{}  {}", member.name, member.stage);
    let place = gang
        .places
        .iter()
        .find(|place| place.pod.as_ref() == Some(&member.uid));
    match (place, &member.node) {
        (Some(place), _) => {
            let _ = write!(text, "  {} {}", place.node, place.words);
        }
        (None, Some(node)) => {
            let _ = write!(text, "  {node}");
        }
        (None, None) => {}
    }
    text
}

/// Names, the first few of them.
fn some(names: &[String], most: usize) -> String {
    match names.len() {
        count if count <= most => names.join(", "),
        count => format!("{} and {} more", names[..most].join(", "), count - most),
    }
}

/// `42 s`, `5 min`, `3 h`.
fn age(seconds: i64) -> String {
    match seconds {
        ..=119 => format!("{} s", seconds.max(0)),
        120..=7199 => format!("{} min", seconds / 60),
        _ => format!("{} h", seconds / 3600),
    }
}

fn line(out: &mut String, text: &str) {
    // Writing into a String cannot fail.
    let _ = writeln!(out, "{text}");
}
