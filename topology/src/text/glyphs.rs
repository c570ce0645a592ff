//! Text as it is read: printable characters with their places, escape codes and invisible characters taken out. Every error can
//! so name line and column of the text that was given. Knows nothing of matrices.

use super::error::{TopoError, TopoProblem};
use super::front::Front;

/// A character and where it stands.
#[derive(Debug, Clone, Copy)]
pub(super) struct Glyph {
    pub(super) ch: char,
    /// Line and column from 1, the column in characters of the original text.
    pub(super) line: usize,
    pub(super) column: usize,
    /// Column from 0 as a terminal shows it, tabs expanded to 8.
    pub(super) visual: usize,
}

impl Glyph {
    pub(super) fn is_blank(self) -> bool {
        self.ch.is_whitespace()
    }

    pub(super) fn refuse(self, problem: TopoProblem) -> TopoError {
        TopoError {
            line: self.line,
            column: self.column,
            problem,
        }
    }
}

/// One line of the text.
#[derive(Debug, Clone)]
pub(super) struct Line {
    pub(super) glyphs: Vec<Glyph>,
    /// A blank at the end of the line: where a missing word is reported.
    pub(super) end: Glyph,
    /// Whether a line end surely ends it: the last line of a text may lack it, and the last above a shell's prompt may be cut.
    pub(super) terminated: bool,
}

impl Line {
    /// The words of the line with single blanks between.
    pub(super) fn text(&self) -> String {
        let text: String = self.glyphs.iter().map(|glyph| glyph.ch).collect();
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    /// The first character that is not blank.
    pub(super) fn first(&self) -> Option<Glyph> {
        self.glyphs.iter().copied().find(|glyph| !glyph.is_blank())
    }

    pub(super) fn refuse_at_start(&self, problem: TopoProblem) -> TopoError {
        self.first().unwrap_or(self.end).refuse(problem)
    }
}

/// A run of characters up to the next blank.
pub(super) fn word_at(glyphs: &[Glyph], start: usize) -> String {
    glyphs
        .iter()
        .skip(start)
        .take_while(|glyph| !glyph.is_blank())
        .map(|glyph| glyph.ch)
        .collect()
}

/// The position of the first character from `start` on that is not blank, or the length.
pub(super) fn skip_blanks(glyphs: &[Glyph], start: usize) -> usize {
    glyphs
        .iter()
        .skip(start)
        .position(|glyph| !glyph.is_blank())
        .map_or(glyphs.len(), |offset| start + offset)
}

/// Splits a text into lines of glyphs. A line ends with a line feed, carriage returns before it or not, or with one of these alone.
/// What stands before every line is no part of it.
pub(super) fn lines(text: &str) -> Vec<Line> {
    let front = Front::of(text);
    let mut lines = Vec::new();
    let mut rest = text;
    let mut number = 1;
    while !rest.is_empty() {
        let (line, terminated) = match rest.find(['\n', '\r']) {
            Some(end) => {
                let (line, after) = rest.split_at(end);
                let windows = after.trim_start_matches('\r').strip_prefix('\n');
                rest = windows.or_else(|| after.get(1..)).unwrap_or_default();
                (line, true)
            }
            None => (std::mem::take(&mut rest), false),
        };
        lines.push(one_line(line, front.length(line), number, terminated));
        number += 1;
    }
    lines
}

/// The line `text` without its first `front` characters.
fn one_line(text: &str, front: usize, number: usize, terminated: bool) -> Line {
    let chars: Vec<char> = text.chars().collect();
    let mut glyphs = Vec::with_capacity(chars.len());
    let mut visual = 0;
    let mut at = front;
    while let Some(&ch) = chars.get(at) {
        let escape = escape_length(chars.get(at..).unwrap_or_default());
        if escape > 0 {
            at += escape;
            continue;
        }
        glyphs.push(Glyph {
            ch,
            line: number,
            column: at + 1,
            visual,
        });
        visual = if ch == '\t' {
            next_tab_stop(visual)
        } else {
            visual + 1
        };
        at += 1;
    }
    let end = Glyph {
        ch: ' ',
        line: number,
        column: chars.len() + 1,
        visual,
    };
    Line {
        glyphs,
        end,
        terminated,
    }
}

/// The tab stop after a column.
pub(super) fn next_tab_stop(visual: usize) -> usize {
    (visual / 8 + 1) * 8
}

/// Forms that an escape character takes when a text is copied from a web page, a log or `cat -v`.
const ESCAPES_AS_TEXT: [&str; 7] = ["^[", "\\e", "\\033", "\\x1b", "\\x1B", "\\u001b", "\u{241b}"];

/// How many characters at the start of `chars` print nothing: a terminal escape code, whole or with its escape character lost in
/// copying, or an invisible character. 0 if the first one is to be read.
fn escape_length(chars: &[char]) -> usize {
    match chars {
        ['\u{1b}', '[', rest @ ..] | ['\u{9b}', rest @ ..] => {
            let introducer = chars.len() - rest.len();
            let parameters = rest
                .iter()
                .take_while(|ch| ('\u{20}'..='\u{3f}').contains(*ch))
                .count();
            let last = usize::from(rest.get(parameters).is_some());
            introducer + parameters + last
        }
        ['\u{1b}', ']', rest @ ..] => {
            let body = rest
                .iter()
                .take_while(|ch| !matches!(ch, '\u{7}' | '\u{1b}'))
                .count();
            let ended = match rest.get(body..) {
                Some(['\u{7}', ..]) => 1,
                Some(['\u{1b}', '\\', ..]) => 2,
                _ => 0,
            };
            2 + body + ended
        }
        ['\u{1b}', '(' | ')', _, ..] => 3,
        ['\u{1b}', _, ..] => 2,
        ['\u{1b}'] | ['\u{200b}'..='\u{200d}' | '\u{2060}' | '\u{feff}', ..] => 1,
        _ => lost_escape_length(chars),
    }
}

/// `[4m` and its like without the escape character, or with one written out.
fn lost_escape_length(chars: &[char]) -> usize {
    let prefix = ESCAPES_AS_TEXT
        .iter()
        .chain(std::iter::once(&"\u{fffd}"))
        .map(|form| {
            form.chars().count()
                * usize::from(form.chars().eq(chars.iter().copied().take(form.chars().count())))
        })
        .max()
        .unwrap_or(0);
    let Some(['[', rest @ ..]) = chars.get(prefix..) else {
        return 0;
    };
    let parameters = rest
        .iter()
        .take_while(|ch| ch.is_ascii_digit() || **ch == ';')
        .count();
    match rest.get(parameters) {
        Some('m' | 'K') => prefix + 1 + parameters + 1,
        _ => 0,
    }
}
