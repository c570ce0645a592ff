//! Gangs as text for a terminal. Formats the report and decides nothing.

use std::fmt::Write as _;

use gantry_api::placement::{ComparedFabric, ComparedLevel};
use gantry_api::{GangPhase, one_line};
use gantry_extender::index::{GangReport, GangState, MemberView, ReportedStatus, Trial};
use gantry_planner::plan::LevelDiagnosis;

/// Members listed.
const MEMBERS: usize = 64;
/// Pods listed that would have to end.
const ENDS: usize = 8;
/// Reasons listed per level.
const REASONS: usize = 4;

/// A gang, at `now` in seconds since 1970; `wide` shortens no list.
pub(crate) fn gang(report: &GangReport, now: i64, wide: bool) -> String {
    let (members, ends) = if wide { (usize::MAX, usize::MAX) } else { (MEMBERS, ENDS) };
    let gang = &report.gang;
    let mut out = format!("gang {}/{}: ", gang.namespace, gang.name);
    match &gang.status {
        Some(status) => reported(&mut out, status),
        None => line(&mut out, "no status from the extender yet"),
    }
    if let Some(compared) = gang.status.as_ref().and_then(|status| status.compared.as_ref()) {
        why_there(&mut out, compared);
    }
    let decided = gang.decided_by.as_deref().unwrap_or("not known yet");
    let size = match gang.min {
        0 => format!("size: {} members exist; the minimum is not known yet", gang.exist),
        min if gang.exist > min => {
            let exist = gang.exist;
            format!("size: {exist} members exist, minimum {min}; source: {decided}")
        }
        min => format!("size: {} of {min} members exist; source: {decided}", gang.exist),
    };
    line(&mut out, &size);
    line(&mut out, &format!("integration: {}; Gang object: {}", gang.integration, gang.object));
    if let Some(at) = gang.bound_at {
        line(&mut out, &format!("bound: {} ago", age(now - at)));
    }
    if let Some(since) = gang.waiting_since {
        let waits = format!("waits: {}, priority {}", age(now - since), gang.priority);
        line(&mut out, &waits);
    }
    if let Some(position) = gang.position {
        let behind = match report.ahead.is_empty() {
            true => String::new(),
            false => format!(", behind {}", some(&report.ahead, ends)),
        };
        line(&mut out, &format!("position in the queue: {position}{behind}"));
    }
    if_planned_now(&mut out, report, ends);
    line(&mut out, "members:");
    for member in gang.members.iter().take(members) {
        line(&mut out, &format!("  {}", member_line(gang, member)));
    }
    if gang.members.len() > members {
        line(&mut out, &format!("  and {} more", gang.members.len() - members));
    }
    for spare in gang.reservations.iter().filter(|place| place.spare) {
        let lent = match &spare.lent_to[..] {
            [] => "idle".to_owned(),
            pods => format!("lent to {}", pods.join(", ")),
        };
        line(&mut out, &format!("spare reservation: {} of {}, {lent}", spare.words, spare.node));
    }
    let kept = gang.reservations.iter().filter(|place| place.pod.is_none() && !place.spare).count();
    if kept > 0 {
        line(&mut out, &format!("{kept} reservations are held for future members"));
    }
    out
}

/// The gang's status as the extender reports it.
fn reported(out: &mut String, status: &ReportedStatus) {
    let mut head = format!("{:?}", status.phase);
    for part in [&status.domain, &status.rails].into_iter().filter(|part| !part.is_empty()) {
        let _ = write!(head, ", {part}");
    }
    line(out, &head);
    let reason = status.reason.map_or_else(String::new, |reason| format!("{reason}: "));
    line(out, &format!("the extender reports: {reason}{}", status.message));
    if let Some(why) = status.blocked.as_ref().filter(|why| **why != status.message) {
        line(out, &format!("  blocked: {why}"));
    }
    if let Some(members) = &status.slow_members {
        line(out, &format!("  slow: {members}"));
    }
    match status.failed_attempts {
        0 => {}
        1 => line(out, "  1 failed attempt"),
        failed_attempts => line(out, &format!("  {failed_attempts} failed attempts")),
    }
}

/// Why a gang is in its part of the fabric, level by level.
pub(super) fn why_there(out: &mut String, compared: &ComparedFabric) {
    line(out, &format!("why there: {} members were planned {}:", compared.members, compared.counted));
    compared.levels.iter().for_each(|level| why_at(out, level));
}

/// One level of that.
pub(super) fn why_at(out: &mut String, level: &ComparedLevel) {
    match &level.chosen {
        Some(chosen) => line(out, &format!("  {chosen}: {level}")),
        None => line(out, &format!("  {level}")),
    }
    for other in &level.others {
        line(out, &format!("    {other}"));
    }
}

/// The result of a plan made now.
fn if_planned_now(out: &mut String, report: &GangReport, ends: usize) {
    let gang = &report.gang;
    let trial = gang.if_planned_now.as_ref();
    if trial.is_none() && report.tried.is_none() {
        return;
    }
    let status = gang.status.as_ref();
    let words = match trial {
        Some(trial) if status.is_some_and(|status| is_the_same(status, trial)) => "the same".to_owned(),
        Some(trial) => trial_words(trial),
        None => "members without a reservation would still have none".to_owned(),
    };
    line(out, &format!("if planned now: {words}"));
    if trial.is_some_and(|trial| trial.has_backfill_reservation) {
        line(out, "  nodes are kept free for it (backfill reservation)");
    }
    if let Some(tried) = &report.tried {
        line(out, &format!("  tried for {}, of which {} must fit:", tried.members, tried.must));
        for level in &tried.levels {
            tried_level(out, level);
        }
        if tried.hopeless {
            line(out, "  it would not fit in an empty cluster");
        }
    }
    if !report.would_have_to_end.is_empty() {
        let pods = some(&report.would_have_to_end, ends);
        line(out, &format!("  fits when {pods} ended"));
    }
    if !report.reserved_for_gangs.is_empty() {
        let kept: Vec<String> = report.reserved_for_gangs.iter().map(ToString::to_string).collect();
        line(out, &format!("  {}", some(&kept, ends)));
    }
}

fn is_the_same(status: &ReportedStatus, trial: &Trial) -> bool {
    status.phase == trial.phase && status.message == trial.message
}

fn trial_words(trial: &Trial) -> String {
    let mut words = format!("{:?}", trial.phase);
    for part in [&trial.domain, &trial.rails].into_iter().filter(|part| !part.is_empty()) {
        let _ = write!(words, ", {part}");
    }
    // These reservations exist in this plan only: no member has arrived at one.
    let _ = match trial.phase {
        GangPhase::Reserved => write!(words, ": it would get its reservations"),
        GangPhase::Preempting => write!(
            words,
            ", if the extender may evict pods (extender-preempt.yaml): {}: {}",
            trial.reason, trial.message
        ),
        _ => write!(words, ": {}: {}", trial.reason, trial.message),
    };
    words
}

/// The queue, at `now` in seconds since 1970.
pub(crate) fn queue(waiting: &[GangState], now: i64) -> String {
    if waiting.is_empty() {
        return "no gang waits for GPUs\n".to_owned();
    }
    let mut out = String::new();
    for gang in waiting {
        let position = gang.position.map_or_else(|| "-".to_owned(), |at| at.to_string());
        let words = match (&gang.status, &gang.if_planned_now) {
            (Some(status), _) => format!("{:?}: {}", status.phase, status.message),
            (None, Some(trial)) => format!("if planned now: {}", trial_words(trial)),
            (None, None) => String::new(),
        };
        let waits = gang.waiting_since.map_or(0, |since| now - since);
        let text = format!(
            "{position:>3}  {}/{}  priority {}  waits {}  {words}",
            gang.namespace,
            gang.name,
            gang.priority,
            age(waits),
        );
        line(&mut out, &text);
    }
    out
}

fn tried_level(out: &mut String, level: &LevelDiagnosis) {
    let best = match level.best.is_empty() {
        true => String::new(),
        false => format!(", best {} of {}", level.best, level.domains),
    };
    let mut text = match level.fits < level.must {
        true => format!("    {}{best}: {} of {} that must fit", level.level, level.fits, level.must),
        false => format!("    {}{best}: {} of {} fit", level.level, level.fits, level.wanted),
    };
    if level.empty != level.fits {
        let _ = write!(text, ", {} if it were empty", level.empty);
    }
    for stock in &level.devices {
        let _ = write!(text, "; {} of {} {} free", stock.free, stock.total, stock.resource);
        if stock.reserved > 0 {
            let _ = write!(text, ", {} idle and reserved", stock.reserved);
        }
        if stock.healthy < stock.total {
            let _ = write!(text, " ({} healthy)", stock.healthy);
        }
        let _ = write!(text, ", {} asked{}", stock.asked, level.asked_for());
    }
    line(out, &text);
    for (reason, nodes) in level.reasons.iter().take(REASONS) {
        line(out, &format!("      {nodes} node(s): {reason}"));
    }
}

fn member_line(gang: &GangState, member: &MemberView) -> String {
    let mut text = String::new();
    if let Some(rank) = member.rank {
        let _ = write!(text, "rank {rank}  ");
    }
    if !member.role.is_empty() {
        let _ = write!(text, "{}  ", member.role);
    }
    let _ = write!(text, "{}  {}", member.name, member.stage);
    let place = gang.reservations.iter().find(|place| place.pod.as_ref() == Some(&member.uid));
    match (place, &member.node) {
        (Some(place), _) => {
            let would = if place.decided || place.bound { "" } else { "would go to " };
            let _ = write!(text, "  {would}{} {}", place.node, place.words);
        }
        (None, Some(node)) => {
            let _ = write!(text, "  {node}");
        }
        (None, None) => {}
    }
    text
}

/// The first few names.
pub(super) fn some(names: &[String], most: usize) -> String {
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
    let _ = writeln!(out, "{}", one_line(text));
}
