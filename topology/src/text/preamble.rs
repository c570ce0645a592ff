//! What stands before the matrix: comments, the notice of NICs that are not shown, legends, and words of people and of other programs, which are
//! passed over if a matrix is still to come. Finds where the matrix begins; reads none.

use super::MAX_TEXT_BYTES;
use super::around::{drop_closing_marks, hidden_nics, is_boundary, is_frame};
use super::glyphs::{Glyph, Line, lines, skip_blanks, word_at};
use super::legend;
use super::parse::{header_of, is_header, is_row, is_row_of_some, may_name_a_gpu};
use super::row::after_label;
use super::table;
use super::words::numbered;

/// What was said before the header.
#[derive(Default)]
pub(super) struct Preamble {
    /// What a `# machine:` comment says.
    pub(super) description: Option<String>,
    /// NICs found and NICs shown, from the notice about hidden ones, and where it stands.
    pub(super) nics_found: Option<(usize, usize, Glyph)>,
    /// The legends, where they stand before the matrix.
    pub(super) legend: Vec<Line>,
}

/// Reads what stands before the header, and tells in which line that is, or should be.
pub(super) fn read(lines: &[Line]) -> (Preamble, usize) {
    let matrix = last_matrix(lines);
    let is_matrix_from = |line: usize| matrix.is_some_and(|matrix| line <= matrix);
    let before = lines.get(..matrix.unwrap_or(0)).unwrap_or_default();
    let last_row = before.iter().rposition(is_row_of_some);
    // Between the matrix and what looks like another's header stands no row: it is a list of GPUs.
    let is_list = |at: usize, line: &Line| {
        is_matrix_from(at + 1) && last_row.is_none_or(|row| row < at) && may_name_a_gpu(line)
    };
    // One GPU's peer-to-peer matrix is told from the matrix by what that has behind the GPU.
    let names_more = |line: &Line| is_header(line) && line.text() != "GPU0";
    let last_wide = lines.iter().rposition(names_more);
    let mut preamble = Preamble::default();
    let mut at = 0;
    while let Some(line) = lines.get(at) {
        let text = line.text();
        let rest = lines.get(at..).unwrap_or_default();
        let others = legend::peer_to_peer_lines(rest, text.split(' ').count());
        let told_apart = others > 2 || last_wide.is_some_and(|wide| at + others <= wide);
        if others > 0 && told_apart && is_matrix_from(at + others) {
            at += others;
            continue;
        }
        if matrix == Some(at) {
            break;
        }
        if let Some(comment) = text.strip_prefix('#') {
            if let Some(description) = comment.trim().strip_prefix("machine:")
                && preamble.description.is_none()
            {
                let said = description.split(" | ").next().unwrap_or_default().trim();
                preamble.description = Some(said.to_owned()).filter(|said| !said.is_empty());
            }
        } else if let Some((found, shown)) = hidden_nics(&text) {
            preamble.nics_found = Some((found, shown, line.first().unwrap_or(line.end)));
        } else if legend::is_heading(&text) || !preamble.legend.is_empty() && !begins_matrix(line) {
            preamble.legend.push(line.clone());
        } else if !is_frame(&text) && (begins_matrix(line) && !is_list(at, line) || !is_matrix_from(at)) {
            break;
        }
        at += 1;
    }
    (preamble, at)
}

/// Whether a header and the row of GPU0 stand somewhere in a text: it is a topology text, whatever else is in it.
pub(super) fn has_matrix(text: &str) -> bool {
    if text.len() > MAX_TEXT_BYTES {
        return false;
    }
    let mut lines = table::lay_out(lines(text));
    drop_closing_marks(&mut lines);
    last_matrix(&lines).is_some()
}

/// Where the last of the matrices begins that have a header and, right behind it, the row of GPU0.
fn last_matrix(lines: &[Line]) -> Option<usize> {
    let is_first = |(_, line): &(usize, &Line)| {
        let start = skip_blanks(&line.glyphs, 0);
        is_row(line) && after_label(&line.glyphs, start, "GPU0").is_some()
    };
    let rows = lines.iter().enumerate().filter(is_first);
    rows.rev().find_map(|(row, _)| header_above(lines.get(..row)?))
}

/// The most lines that a header is looked for on.
const MOST_LINES: usize = 64;

/// Where the header begins that `lines` end with, blank lines behind it or not. A terminal may have broken it over several lines.
fn header_above(lines: &[Line]) -> Option<usize> {
    let last = lines.iter().rposition(|line| line.first().is_some())?;
    let at = (0..=last)
        .rev()
        .take(MOST_LINES)
        .take_while(|at| {
            lines
                .get(*at)
                .is_some_and(|line| !is_row(line) && !is_boundary(line))
        })
        .find(|at| lines.get(*at).is_some_and(names_gpu0_first))?;
    let parts: Vec<&Line> = lines.get(at..=last)?.iter().collect();
    header_of(&parts)
        .is_ok_and(|header| header.gpus > 0)
        .then_some(at)
}

/// Whether the first word of a line is GPU0, with other names glued to it or not.
fn names_gpu0_first(line: &Line) -> bool {
    let word = word_at(&line.glyphs, skip_blanks(&line.glyphs, 0));
    numbered(&word, "GPU").is_some_and(|(number, _)| number == 0)
}

/// Whether a line ends what stands before the matrix: the header does, and a row without one.
fn begins_matrix(line: &Line) -> bool {
    let text = line.text();
    let mut words = text.split(' ');
    let is_gpu = |word: &str| numbered(word, "GPU").is_some();
    let names_columns = words.next().is_some_and(is_gpu) && words.next().is_none_or(is_gpu);
    names_columns || is_header(line) || is_row_of_some(line)
}
