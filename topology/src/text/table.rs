//! A matrix that was written as a Markdown table, as issue trackers and wikis show one: each cell is put where a terminal would show it,
//! beneath its title, and what draws the table is taken out, rules between rows too. Knows nothing of matrices; other lines stay as they are.

use super::glyphs::{Glyph, Line};

/// Blanks between two columns.
const GAP: usize = 2;

/// Lays out every table among `lines`.
pub(super) fn lay_out(mut lines: Vec<Line>) -> Vec<Line> {
    let said = lines.iter().filter(|line| line.first().is_some()).count();
    let barred = lines.iter().filter(|line| line.text().ends_with('|')).count();
    // Words of people around what was copied bear none.
    if barred * 2 > said {
        lines.iter_mut().for_each(drop_bars);
    }
    if !lines.iter().any(is_row) {
        return lines;
    }
    let is_drawn = |line: &Line| is_row(line) || is_rule(line);
    let runs = lines.chunk_by(|a, b| is_drawn(a) == is_drawn(b));
    runs.flat_map(|run| {
        // A rule above the first row is left: it may head anything.
        let rows = run.iter().position(is_row).unwrap_or(run.len());
        let (above, rows) = run.split_at(rows);
        let rows: Vec<&Line> = rows.iter().filter(|line| !is_rule(line)).collect();
        [above.to_vec(), table(&rows)].concat()
    })
    .collect()
}

/// `GPU0 X NV18 | |`: what a web page's own table leaves behind every line.
fn drop_bars(line: &mut Line) {
    let is_bar = |glyph: &Glyph| glyph.ch == '|';
    let text = line
        .glyphs
        .iter()
        .rposition(|glyph| !glyph.is_blank() && !is_bar(glyph));
    if let Some(text) = text
        && !line.first().is_some_and(|first| is_bar(&first))
        && line.glyphs.iter().skip(text).any(is_bar)
    {
        line.glyphs.truncate(text + 1);
    }
}

/// `| GPU0 | X | NV18 |`.
fn is_row(line: &Line) -> bool {
    let text = line.text();
    text.len() > 2 && text.starts_with('|') && text.ends_with('|')
}

/// `+------+-----+`, `|------+-----|`, `+======+=====+`.
fn is_rule(line: &Line) -> bool {
    let text = line.text();
    text.len() > 2
        && text.starts_with(['+', '|'])
        && text.contains(['-', '='])
        && text.chars().all(|ch| "+-=|".contains(ch))
}

/// The rows of a table as lines, without the one that parts the titles from the rest.
fn table(lines: &[&Line]) -> Vec<Line> {
    let rows: Vec<(&Line, Vec<&[Glyph]>)> = lines
        .iter()
        .map(|line| (*line, cells(line)))
        .filter(|(_, cells)| !parts_titles(cells))
        .collect();
    let mut widths: Vec<usize> = Vec::new();
    for (_, cells) in &rows {
        widths.resize(widths.len().max(cells.len()), 0);
        for (width, cell) in widths.iter_mut().zip(cells) {
            *width = cell.len().max(*width);
        }
    }
    let mut next = 0;
    let starts: Vec<usize> = widths
        .into_iter()
        .map(|width| {
            let start = next;
            next += width + GAP;
            start
        })
        .collect();
    rows.into_iter()
        .map(|(line, cells)| Line {
            glyphs: if cells.len() == starts.len() {
                with_blank_end(beneath(&starts, &cells), &cells)
            } else {
                beneath(&starts, &cells)
            },
            ..line.clone()
        })
        .collect()
}

/// What stands between the bars, without blanks and marks of emphasis around it.
fn cells(line: &Line) -> Vec<&[Glyph]> {
    let between = line.glyphs.split(|glyph| glyph.ch == '|').skip(1);
    let mut cells: Vec<&[Glyph]> = between.map(trimmed).collect();
    // Behind the last bar.
    cells.pop();
    cells
}

fn trimmed(cell: &[Glyph]) -> &[Glyph] {
    let is_said = |glyph: &Glyph| !glyph.is_blank() && !"*`".contains(glyph.ch);
    let first = cell.iter().position(is_said);
    let last = cell.iter().rposition(is_said);
    first
        .zip(last)
        .and_then(|(first, last)| cell.get(first..=last))
        .unwrap_or_default()
}

/// `|---|:-:|`.
fn parts_titles(cells: &[&[Glyph]]) -> bool {
    cells
        .iter()
        .all(|cell| !cell.is_empty() && cell.iter().all(|glyph| "-:".contains(glyph.ch)))
}

/// The cells on one line, each from where its column starts on the screen, and a blank behind each.
fn beneath(starts: &[usize], cells: &[&[Glyph]]) -> Vec<Glyph> {
    let mut glyphs = Vec::new();
    for (start, cell) in starts.iter().zip(cells) {
        glyphs.extend(cell.iter().enumerate().map(|(offset, glyph)| Glyph {
            visual: start + offset,
            ..*glyph
        }));
        glyphs.extend(
            glyphs
                .last()
                .copied()
                .filter(|_| !cell.is_empty())
                .map(|last| Glyph {
                    ch: ' ',
                    visual: last.visual + 1,
                    ..last
                }),
        );
    }
    glyphs
}

/// The line with tabs for the blank cells that a whole row ends with: the bars say, as nvidia-smi's tabs do, that nothing is cut.
fn with_blank_end(mut glyphs: Vec<Glyph>, cells: &[&[Glyph]]) -> Vec<Glyph> {
    if let (Some(last), Some([])) = (glyphs.last().copied(), cells.last()) {
        // There is at most one cell with two tabs before it: these reach past the last.
        glyphs.extend((1..=cells.len() + 1).map(|tab| Glyph {
            ch: '\t',
            visual: last.visual + tab,
            ..last
        }));
    }
    glyphs
}
