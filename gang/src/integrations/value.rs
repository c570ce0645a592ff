//! Reads the values that users write, and reports what is wrong with one: what it is, what is allowed, what was perhaps meant.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use crate::membership::{ArrivalTime, TopologyHint};
use crate::terms::Fault;

/// Members of one gang that are kept at most, unless set otherwise; a minimum above it could never be reached.
pub(crate) const MOST_MEMBERS: u32 = 20_000;

/// Spare reservations that a gang may ask for at most, of each role.
pub(crate) const MOST_SPARES: u32 = 64;

/// Longest piece of a value that a message repeats, in characters.
const SHOWN: usize = 60;
/// Most faults that are kept of one pod or object.
pub(crate) const MOST_FAULTS: usize = 16;
/// Longest place and words of a fault, in bytes: objects may hold megabytes, and a fault is reported for every node.
const PLACE: usize = 320;
const WORDS: usize = 600;

pub(crate) fn fault(place: impl Into<Arc<str>>, words: impl Into<Arc<str>>) -> Fault {
    Fault { place: truncate(place.into(), PLACE), words: truncate(words.into(), WORDS) }
}

/// A text of at most so many bytes; one that was longer ends in dots.
pub(crate) fn truncate(text: Arc<str>, most: usize) -> Arc<str> {
    if text.len() <= most {
        return text;
    }
    let end = text.floor_char_boundary(most.saturating_sub('…'.len_utf8()));
    format!("{}…", &text[..end]).into()
}

/// A whole number in digits.
pub(crate) fn number(
    place: impl Into<Arc<str>>,
    text: &str,
    allowed: RangeInclusive<u32>,
) -> Result<u32, Fault> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse() {
        Ok(number) if digits && allowed.contains(&number) => Ok(number),
        _ => Err(fault(
            place,
            format!("{} is no whole number from {} to {}", shown(text), allowed.start(), allowed.end()),
        )),
    }
}

/// A time that members may take to arrive: none at all means no limit of one's own.
pub(crate) fn arrival(time: Duration, source: &'static str) -> Option<ArrivalTime> {
    (!time.is_zero()).then(|| ArrivalTime { time: time.max(Duration::from_secs(1)), source })
}

/// The name of a gang, which is that of its object too.
pub(crate) fn name(text: &str) -> Result<(), String> {
    if text.len() <= 63 && is_object_name(text) {
        return Ok(());
    }
    Err(format!(
        "{} is no name of a gang: at most 63 small letters, digits, `-` and `.`, a letter or digit at both ends of each part between dots; or `none`",
        shown(text)
    ))
}

/// Whether an object of Kubernetes may be called so: a DNS subdomain. Nothing else is ever written into a path of the API server.
pub fn is_object_name(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    text.len() <= 253
        && text.split('.').all(|label| {
            label.starts_with(plain) && label.ends_with(plain) && label.chars().all(|c| plain(c) || c == '-')
        })
}

/// Whether it may be the value of a label, though not an empty one.
fn is_label_value(text: &str) -> bool {
    let ends = |c: char| c.is_ascii_alphanumeric();
    text.len() <= 63
        && text.starts_with(ends)
        && text.ends_with(ends)
        && text.chars().all(|c| ends(c) || matches!(c, '-' | '_' | '.'))
}

/// The name of an object, as written; `what`: the kind of object.
pub(crate) fn object_name(place: &str, what: &str, text: &str) -> Result<(), Fault> {
    if is_object_name(text) {
        return Ok(());
    }
    Err(fault(
        place,
        format!(
            "{} can be no name of a {what}: at most 253 small letters, digits, `-` and `.`, a letter or digit at both ends of each part between dots",
            shown(text)
        ),
    ))
}

/// What people or controllers call something that is no object.
pub(crate) fn word(place: &str, text: &str) -> Result<(), Fault> {
    if is_label_value(text) || is_object_name(text) {
        return Ok(());
    }
    Err(fault(
        place,
        format!(
            "{} is no name: at most 63 letters, digits, `-`, `_` and `.`, a letter or digit first and last; or at most 253 small letters, digits, `-` and `.`",
            shown(text)
        ),
    ))
}

/// The substitute for an invalid name of a gang: short, without line breaks, and never the name of another.
pub(crate) fn stand_in(text: &str) -> String {
    let short: String = text.chars().take(SHOWN).collect();
    let dots = if short.len() < text.len() { "…" } else { "" };
    format!("{}{dots}", short.escape_debug())
}

/// The name of a level, or the node label that makes it.
pub(crate) fn level(text: &str) -> Result<Arc<str>, String> {
    let label = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '/');
    if text.is_empty() || text.len() > 317 || !text.chars().all(label) {
        return Err(format!("{} is neither the name of a level nor a node label", shown(text)));
    }
    Ok(text.into())
}

/// What another system keeps together; a label that can be none means nothing.
pub(crate) fn hint(label: &str, slice: Option<u32>) -> Option<TopologyHint> {
    let label = level(label).ok()?;
    Some(TopologyHint { label, slice })
}

/// A value where only a few words are allowed.
pub fn not_one_of(text: &str, words: &[&str]) -> String {
    format!("{} is none of {}{}", shown(text), words.join(", "), meant(text, words))
}

/// A name that is not known.
pub(crate) fn unknown(what: &str, text: &str, known: &[&str]) -> String {
    format!("no {what}; there are {}{}", known.join(", "), meant(text, known))
}

fn meant(text: &str, words: &[&str]) -> String {
    nearest(text, words).map_or_else(String::new, |word| format!("; did you mean `{word}`?"))
}

/// The word that was perhaps meant.
pub(crate) fn nearest<'a>(text: &str, words: &[&'a str]) -> Option<&'a str> {
    if text.len() > SHOWN {
        return None;
    }
    let text = text.to_ascii_lowercase();
    words
        .iter()
        .map(|word| (strsim::damerau_levenshtein(&text, word), *word))
        .min()
        .filter(|(distance, word)| *distance <= word.len().max(3) / 3)
        .map(|(_, word)| word)
}

/// A value as messages repeat it: quoted, without line breaks, not too long. Quotes that are part of it stand as they are, where that can
/// be.
pub fn shown(text: &str) -> String {
    let quoted = format!("{:?}", short(text));
    let inner = &quoted[1..quoted.len() - 1];
    if text.contains('"') && !text.contains('\'') {
        return format!("'{}'", inner.replace("\\\"", "\""));
    }
    quoted
}

/// The beginning of a text, as much as messages repeat of it.
pub(crate) fn short(text: &str) -> String {
    let mut short: String = text.chars().take(SHOWN).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}
