//! Blocks of text side by side and framed. Colors are separate from the characters, so that widths are exact.

use std::fmt;

/// The style of a run of characters on a terminal with colors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Style {
    Plain,
    Strong,
    Faint,
    Gpu,
    Nic,
    NvLink,
    Numa,
    Switch,
}

impl Style {
    /// Parameters of the terminal's SGR code; the 16 basic colors, which the user of the terminal chooses.
    const fn code(self) -> &'static str {
        match self {
            Self::Plain => "",
            Self::Strong => "1",
            Self::Faint | Self::Switch => "2",
            Self::Gpu => "1;32",
            Self::Nic => "36",
            Self::NvLink => "33",
            Self::Numa => "34",
        }
    }
}

/// A line of styled runs.
#[derive(Debug, Clone, Default)]
pub(super) struct Row(Vec<(Style, String)>);

impl Row {
    pub(super) fn push(&mut self, style: Style, text: String) {
        self.0.push((style, text));
    }

    pub(super) fn append(&mut self, mut other: Self) {
        self.0.append(&mut other.0);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Columns it takes.
    pub(super) fn width(&self) -> usize {
        self.0.iter().map(|(_, text)| text.chars().count()).sum()
    }

    fn pad(&mut self, width: usize) {
        let missing = width.saturating_sub(self.width());
        if missing > 0 {
            self.push(Style::Plain, " ".repeat(missing));
        }
    }
}

pub(super) fn row_of(style: Style, text: String) -> Row {
    Row(vec![(style, text)])
}

/// A rectangle of rows.
#[derive(Debug, Clone)]
pub(super) struct Block {
    rows: Vec<Row>,
    width: usize,
}

impl Block {
    pub(super) fn new(rows: Vec<Row>) -> Self {
        let width = rows.iter().map(Row::width).max().unwrap_or(0);
        Self { rows, width }
    }
}

/// Rows in a frame with a title in its upper edge.
pub(super) fn framed(title: &str, rows: Vec<Row>, style: Style) -> Block {
    let title = if title.is_empty() { String::new() } else { format!(" {title} ") };
    let title_width = title.chars().count();
    let inner = rows.iter().map(Row::width).max().unwrap_or(0).max(title_width);
    let mut framed = vec![row_of(style, format!("╭─{title}{}╮", "─".repeat(inner + 1 - title_width)))];
    for mut row in rows {
        row.pad(inner);
        let mut line = row_of(style, "│ ".to_owned());
        line.append(row);
        line.push(style, " │".to_owned());
        framed.push(line);
    }
    framed.push(row_of(style, format!("╰{}╯", "─".repeat(inner + 2))));
    Block::new(framed)
}

/// Blocks beside each other, going on beneath where `columns` are full.
pub(super) fn beside(blocks: Vec<Block>, columns: usize) -> Vec<Row> {
    let mut rows = Vec::new();
    let mut shelf: Vec<Block> = Vec::new();
    let mut used = 0;
    for block in blocks {
        if !shelf.is_empty() && used + 1 + block.width > columns {
            rows.extend(one_shelf(std::mem::take(&mut shelf)));
            used = 0;
        }
        used += block.width + usize::from(!shelf.is_empty());
        shelf.push(block);
    }
    rows.extend(one_shelf(shelf));
    rows
}

fn one_shelf(blocks: Vec<Block>) -> Vec<Row> {
    let height = blocks.iter().map(|block| block.rows.len()).max().unwrap_or(0);
    let mut rows = vec![Row::default(); height];
    let mut from = 0;
    for block in blocks {
        let to = from + block.width;
        for (row, part) in rows.iter_mut().zip(block.rows) {
            row.pad(from);
            row.append(part);
        }
        from = to + 1;
    }
    rows
}

/// Writes a row and a line end, with colors or without.
pub(super) fn write_row(f: &mut fmt::Formatter<'_>, row: &Row, color: bool) -> fmt::Result {
    for (style, text) in &row.0 {
        if color && *style != Style::Plain {
            write!(f, "\u{1b}[{}m{text}\u{1b}[0m", style.code())?;
        } else {
            f.write_str(text)?;
        }
    }
    f.write_str("\n")
}
