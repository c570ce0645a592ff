//! What stands before every line of a text and is no part of it: marks of a quotation, or what a tool puts there that shows the output
//! of another, such as the container, the host or the time. Tells it from the text; reads nothing of the text.

/// What stands before every line.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Front {
    Nothing,
    /// `> `, so many times.
    Quotes(usize),
    /// Anything else, without the blank behind it. With a time of day in it, its numbers differ from line to line.
    Tag {
        tag: Vec<char>,
        timed: bool,
    },
}

impl Front {
    /// What stands before every line of `text` that is not blank.
    pub(super) fn of(text: &str) -> Self {
        let said = || text.split(['\n', '\r']).filter(|line| !line.trim().is_empty());
        let quotes = said().map(|line| quoted(line, usize::MAX).0).min().unwrap_or(0);
        if quotes > 0 {
            return Self::Quotes(quotes);
        }
        let Some(tag) = said().find_map(before_row) else {
            return Self::Nothing;
        };
        let timed = has_time(tag);
        let tag: Vec<char> = tag.chars().collect();
        let everywhere = !tag.is_empty() && said().all(|line| behind(&tag, timed, line).is_some());
        if everywhere {
            Self::Tag { tag, timed }
        } else {
            Self::Nothing
        }
    }

    /// How many characters of `line` it takes, a blank behind it included.
    pub(super) fn length(&self, line: &str) -> usize {
        match self {
            Self::Nothing => 0,
            Self::Quotes(most) => quoted(line, *most).1,
            Self::Tag { tag, timed } => behind(tag, *timed, line).map_or(0, |length| {
                let blank = line.chars().nth(length) == Some(' ');
                length + usize::from(blank)
            }),
        }
    }
}

/// Whether something other than a quotation's marks stands before every line.
pub(crate) fn is_tagged(text: &str) -> bool {
    matches!(Front::of(text), Front::Tag { .. })
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

/// Where a line goes on behind `tag`, in characters. A number in a tag with a time stands for any.
fn behind(tag: &[char], timed: bool, line: &str) -> Option<usize> {
    let line: Vec<char> = line.chars().collect();
    let (mut at, mut expected) = (0, 0);
    while let Some(&due) = tag.get(expected) {
        let number = |chars: &[char], from: usize| -> usize {
            let digits = chars.iter().skip(from).take_while(|ch| ch.is_ascii_digit());
            digits.count()
        };
        if timed && due.is_ascii_digit() {
            let digits = number(&line, at);
            if digits == 0 {
                return None;
            }
            at += digits;
            expected += number(tag, expected);
        } else if line.get(at) == Some(&due) {
            at += 1;
            expected += 1;
        } else {
            return None;
        }
    }
    Some(at)
}

/// Whether `12:34:56` stands in it.
fn has_time(tag: &str) -> bool {
    let shape: Vec<char> = tag
        .chars()
        .map(|ch| if ch.is_ascii_digit() { '0' } else { ch })
        .collect();
    shape
        .windows(8)
        .any(|window| window.iter().copied().eq("00:00:00".chars()))
}
