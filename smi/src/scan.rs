//! The characters of a text with their places, without terminal escape codes, so that every error can name line and
//! column.

use crate::error::{TopoError, TopoProblem};

/// A character and its place.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Glyph {
    pub(crate) ch: char,
    /// Line and column from 1, the column in characters of the original text.
    pub(crate) line: usize,
    pub(crate) column: usize,
    /// Column from 0 as a terminal shows it, with tab stops every 8 columns.
    pub(crate) visual: usize,
}

impl Glyph {
    pub(crate) fn is_blank(self) -> bool {
        self.ch.is_whitespace()
    }

    pub(crate) fn refuse(self, problem: TopoProblem) -> TopoError {
        TopoError { line: self.line, column: self.column, problem }
    }
}

/// One line of the text.
#[derive(Debug, Clone)]
pub(crate) struct Line {
    pub(crate) glyphs: Vec<Glyph>,
    /// A blank behind the line: the place where a missing word is reported.
    pub(crate) end: Glyph,
    /// Whether a line end follows. Without one, the last word may be truncated.
    pub(crate) terminated: bool,
}

impl Line {
    /// The words of the line with single blanks between.
    pub(crate) fn text(&self) -> String {
        let text: String = self.glyphs.iter().map(|glyph| glyph.ch).collect();
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    pub(crate) fn refuse_at_start(&self, problem: TopoProblem) -> TopoError {
        let first = self.glyphs.iter().copied().find(|glyph| !glyph.is_blank());
        first.unwrap_or(self.end).refuse(problem)
    }
}

/// The characters from `start` up to the next blank.
pub(crate) fn word_at(glyphs: &[Glyph], start: usize) -> String {
    let word = glyphs.iter().skip(start).take_while(|glyph| !glyph.is_blank());
    word.map(|glyph| glyph.ch).collect()
}

/// The position of the first character from `start` on that is not blank, or the length.
pub(crate) fn skip_blanks(glyphs: &[Glyph], start: usize) -> usize {
    let blanks = glyphs.iter().skip(start).position(|glyph| !glyph.is_blank());
    blanks.map_or(glyphs.len(), |blanks| start + blanks)
}

/// Splits a text into lines. A line ends with a line feed, a carriage return, or both.
pub(crate) fn lines(text: &str) -> Vec<Line> {
    let mut lines = Vec::new();
    let mut rest = text;
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
        lines.push(one_line(line, lines.len() + 1, terminated));
    }
    lines
}

fn one_line(text: &str, line: usize, terminated: bool) -> Line {
    let chars: Vec<char> = text.chars().collect();
    let mut glyphs = Vec::with_capacity(chars.len());
    let mut visual = 0;
    let mut at = 0;
    while let Some(&ch) = chars.get(at) {
        let escape = escape_length(chars.get(at..).unwrap_or_default());
        if escape > 0 {
            at += escape;
            continue;
        }
        glyphs.push(Glyph { ch, line, column: at + 1, visual });
        visual = if ch == '\t' { next_tab_stop(visual) } else { visual + 1 };
        at += 1;
    }
    let end = Glyph { ch: ' ', line, column: chars.len() + 1, visual };
    Line { glyphs, end, terminated }
}

/// The tab stop after a column.
pub(crate) fn next_tab_stop(visual: usize) -> usize {
    (visual / 8 + 1) * 8
}

/// The length of the terminal escape code that `chars` begin with: `ESC [ ... m` and its kind, or a byte order mark. 0
/// for any other character.
fn escape_length(chars: &[char]) -> usize {
    match chars {
        ['\u{1b}', '[', rest @ ..] => {
            let is_parameter = |ch: &&char| ('\u{20}'..='\u{3f}').contains(*ch);
            let parameters = rest.iter().take_while(is_parameter).count();
            2 + parameters + usize::from(rest.len() > parameters)
        }
        ['\u{1b}', '(' | ')', _, ..] => 3,
        ['\u{1b}', _, ..] => 2,
        ['\u{1b}' | '\u{feff}', ..] => 1,
        _ => 0,
    }
}
