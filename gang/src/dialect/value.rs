//! Reads the values that people write, and says what is wrong with one: what it is, what is allowed, what was perhaps meant.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use crate::terms::Fault;

/// No gang is larger.
pub(crate) const MOST_MEMBERS: u32 = 100_000;

/// Longest piece of a value that a message repeats.
const SHOWN: usize = 60;

pub(crate) fn fault(place: impl Into<Arc<str>>, words: impl Into<Arc<str>>) -> Fault {
    Fault {
        place: place.into(),
        words: words.into(),
    }
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
            format!(
                "{} is no whole number from {} to {}",
                shown(text),
                allowed.start(),
                allowed.end()
            ),
        )),
    }
}

/// A time that members may take to arrive: none at all means no limit of one's own.
pub(crate) fn arrival(time: Duration) -> Option<Duration> {
    (!time.is_zero()).then(|| time.clamp(Duration::from_secs(1), Duration::from_secs(3600)))
}

/// The name of a gang.
pub(crate) fn name(text: &str) -> Result<(), String> {
    let ends = |c: Option<char>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    let legal = text.len() <= 63
        && ends(text.chars().next())
        && ends(text.chars().next_back())
        && text
            .chars()
            .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.');
    if legal {
        return Ok(());
    }
    Err(format!(
        "{} is no name of a gang: at most 63 small letters, digits, `-` and `.`, a letter or digit first and last; or `none`",
        shown(text)
    ))
}

/// The name of a level, or the node label that makes it.
pub(crate) fn level(text: &str) -> Result<Arc<str>, String> {
    let label = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '/');
    if text.is_empty() || text.len() > 317 || !text.chars().all(label) {
        return Err(format!(
            "{} is neither the name of a level nor a node label",
            shown(text)
        ));
    }
    Ok(text.into())
}

/// A value where only a few words are allowed.
pub(crate) fn not_one_of(text: &str, words: &[&str]) -> String {
    format!(
        "{} is none of {}{}",
        shown(text),
        words.join(", "),
        meant(text, words)
    )
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

/// A value as messages repeat it: quoted, without line breaks, not too long.
pub(crate) fn shown(text: &str) -> String {
    let mut short: String = text.chars().take(SHOWN).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    format!("{short:?}")
}
