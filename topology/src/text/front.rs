//! What stands before every line of a text and is no part of it: marks of a quotation, or what a tool puts there that shows the output
//! of another, such as the container, the host or the time. Tells it from the text; reads nothing of the text.

use crate::machine::PathClass;

/// What stands before every line, or every line of the matrix.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Front {
    Nothing,
    /// `> `, so many times.
    Quotes(usize),
    /// Anything else, without the blank behind it.
    Tag(Vec<Mark>),
}

/// A character of a tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mark {
    Same(char),
    /// A digit of a time or a date: its number is another one in every line.
    Time,
}

impl Front {
    /// What stands before every line of `text` that is not blank, or before every line of its matrix.
    pub(super) fn of(text: &str) -> Self {
        let said = || text.split(['\n', '\r']).filter(|line| !line.trim().is_empty());
        let quotes = said().map(|line| quoted(line, usize::MAX).0).min().unwrap_or(0);
        if quotes > 0 {
            return Self::Quotes(quotes);
        }
        let tag = said().find_map(before_row).map(marks).unwrap_or_default();
        let everywhere = said().all(|line| behind(&tag, line).is_some());
        let is_whole = || everywhere || is_on_the_matrix(&tag, &said().collect::<Vec<_>>());
        if !tag.is_empty() && is_whole() {
            Self::Tag(tag)
        } else {
            Self::Nothing
        }
    }

    /// How many characters of `line` it takes, a blank behind it included.
    pub(super) fn length(&self, line: &str) -> usize {
        match self {
            Self::Nothing => 0,
            Self::Quotes(most) => quoted(line, *most).1,
            Self::Tag(tag) => behind(tag, line).map_or(0, |length| {
                let blank = line.chars().nth(length) == Some(' ');
                length + usize::from(blank)
            }),
        }
    }
}

/// Whether `tag` stands before every line of the matrix, from its header to its last row, and no line of one has another tag or none.
/// Other lines are words around it. A comment's mark is no tag there: what has none then is no comment.
fn is_on_the_matrix(tag: &[Mark], said: &[&str]) -> bool {
    let rest = |line: &str| -> Option<String> { Some(line.chars().skip(behind(tag, line)?).collect()) };
    let is_row =
        |line: &&str| rest(line).is_some_and(|rest| rest.split_whitespace().nth(1).is_some_and(is_link));
    let first = said.iter().position(|line| before_row(line).is_some());
    let header = first.and_then(|row| row.checked_sub(1));
    let rows = header.zip(said.iter().rposition(is_row));
    let matrix = rows
        .and_then(|(header, last)| said.get(header..=last))
        .unwrap_or_default();
    let mut untagged = said.iter().filter(|line| behind(tag, line).is_none());
    let is_comment = tag.iter().find(|mark| **mark != Mark::Same(' ')) == Some(&Mark::Same('#'));
    !is_comment
        && !matrix.is_empty()
        && matrix.iter().all(|line| behind(tag, line).is_some())
        && !untagged.any(|line| may_be_of_a_matrix(line))
}

/// Whether a device and a link, two links or two devices stand side by side anywhere in a line.
fn may_be_of_a_matrix(line: &str) -> bool {
    let is_device = |word: &str| {
        let number = word.strip_prefix("GPU").or_else(|| word.strip_prefix("NIC"));
        number.is_some_and(|number| number.starts_with(|ch: char| ch.is_ascii_digit()))
    };
    let words: Vec<&str> = line.split_whitespace().collect();
    words.windows(2).any(|pair| match pair {
        [a, b] => is_device(a) && (is_device(b) || is_link(b)) || is_link(a) && is_link(b),
        _ => false,
    })
}

/// Whether a word is a link.
fn is_link(word: &str) -> bool {
    let links = word.strip_prefix("NV");
    let counted = |links: &str| !links.is_empty() && links.chars().all(|ch| ch.is_ascii_digit());
    let mut classes = PathClass::ALL.iter().map(|class| class.as_str());
    word == "X" || links.is_some_and(counted) || classes.any(|class| class == word)
}

/// Whether something other than a quotation's marks stands before every line.
pub(crate) fn is_tagged(text: &str) -> bool {
    matches!(Front::of(text), Front::Tag(_))
}

/// The marks of a quotation at the start of a line, as mail and web pages put them before every line: `> `, and once more for a
/// quotation of one. How many there are of `most`, and how many characters they take.
fn quoted(line: &str, most: usize) -> (usize, usize) {
    let mut rest = line;
    let mut marks = 0;
    while marks < most
        && let Some(after) = rest.strip_prefix('>')
    {
        rest = after.strip_prefix(' ').unwrap_or(after);
        marks += 1;
    }
    // Marks and blanks have one byte each.
    (marks, line.len() - rest.len())
}

/// What stands before the row of the first GPU, if this is that row.
fn before_row(line: &str) -> Option<&str> {
    let (before, cells) = line.split_once("GPU0")?;
    let cells = cells.trim_start().strip_prefix('X')?;
    let is_row = cells.is_empty() || cells.starts_with(char::is_whitespace);
    is_row.then(|| before.trim_end())
}

/// The characters of a tag, told apart word by word.
fn marks(tag: &str) -> Vec<Mark> {
    let mark = |word: &str| {
        let timed = is_time(word);
        let mark = move |ch: char| match ch {
            '0'..='9' if timed => Mark::Time,
            ch => Mark::Same(ch),
        };
        word.chars().map(mark).collect::<Vec<Mark>>()
    };
    tag.split_inclusive(char::is_whitespace).flat_map(mark).collect()
}

/// Whether `12:34:56` stands in a word, or it is a date of numbers.
fn is_time(word: &str) -> bool {
    let shape: Vec<char> = word
        .trim_end()
        .chars()
        .map(|ch| if ch.is_ascii_digit() { '0' } else { ch })
        .collect();
    let time = shape
        .windows(8)
        .any(|window| window.iter().copied().eq("00:00:00".chars()));
    let date = shape.contains(&'0') && shape.iter().any(|ch| "-/".contains(*ch));
    time || date && shape.iter().all(|ch| "0-/".contains(*ch))
}

/// Where a line goes on behind `tag`, in characters.
fn behind(tag: &[Mark], line: &str) -> Option<usize> {
    let mut line = line.chars().enumerate().peekable();
    let mut at = 0;
    let mut before = None;
    for mark in tag {
        match mark {
            // The number was taken with its first digit.
            Mark::Time if before == Some(Mark::Time) => {}
            Mark::Time => {
                at = line.next_if(|(_, ch)| ch.is_ascii_digit())?.0 + 1;
                while let Some((digit, _)) = line.next_if(|(_, ch)| ch.is_ascii_digit()) {
                    at = digit + 1;
                }
            }
            Mark::Same(due) => at = line.next_if(|(_, ch)| ch == due)?.0 + 1,
        }
        before = Some(*mark);
    }
    Some(at)
}
