//! What stands behind the links of a GPU's row: CPU list, NUMA nodes, NUMA node of its own memory. Finds which column a value
//! belongs to where others are blank; never guesses between two.

use super::error::{TopoError, TopoProblem};
use super::glyphs::{Glyph, next_tab_stop, skip_blanks, word_at};
use super::words::Title;
use crate::machine::IdList;

/// A column behind the devices, and where its title begins on the screen.
#[derive(Debug, Clone, Copy)]
pub(super) struct Column {
    pub(super) title: Title,
    pub(super) from: usize,
}

/// How the cells of a row lie on the screen, as far as its links show.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    /// Screen columns from which the tab stops of the row may count: those for which every link stands on one.
    pub(super) indents: Vec<usize>,
    /// Whether every link stands beneath its column's name: a table drawn by hand.
    pub(super) below_titles: bool,
    /// Whether no two tabs stand between two cells up to the last link: then each ends one cell, as nvidia-smi's do.
    pub(super) single_tabs: bool,
}

/// A value as it was written.
#[derive(Debug, Clone)]
pub(super) struct Written {
    pub(super) column: usize,
    pub(super) text: String,
    pub(super) place: Glyph,
}

/// The values of one row.
#[derive(Debug, Clone, Default)]
pub(super) struct Values {
    /// Everything that stands there, `N/A` too, in order.
    pub(super) written: Vec<Written>,
    /// Tabs behind the last link: blank cells leave no other trace.
    pub(super) tabs: usize,
    /// What the tabs before the values say.
    pub(super) told: Told,
}

/// What the tabs between values say of their columns.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Told {
    /// Nothing.
    #[default]
    Nothing,
    /// Every column has its value, but not the tabs before it that nvidia-smi prints: here they mean something else.
    Otherwise,
    /// Some cells are blank, and tabs alone say which.
    Columns,
}

impl Values {
    /// How many columns are surely there: up to the last value written.
    pub(super) fn width(&self) -> usize {
        self.written.last().map_or(0, |value| value.column + 1)
    }

    /// Whether tabs lead up to a column, so that it is blank on purpose.
    pub(super) fn tabs_reach(&self, columns: &[Column], column: usize) -> bool {
        self.tabs >= separators(columns, 0, column)
    }

    /// The value of a title; `None` where it is blank, `N/A` or has no column.
    pub(super) fn get(&self, columns: &[Column], title: Title) -> Result<Option<IdList>, TopoError> {
        let value = self.written.iter().find(|value| {
            columns
                .get(value.column)
                .is_some_and(|column| column.title == title)
        });
        match value {
            Some(value) if !is_unknown(&value.text) => value.text.parse().map(Some).map_err(|_| {
                value.place.refuse(TopoProblem::BadValue {
                    column: title.as_str(),
                    found: value.text.clone(),
                    allowed: "numbers up to 16383 and ranges with commas, such as 0-15,128-143",
                })
            }),
            _ => Ok(None),
        }
    }
}

/// Kernels say -1 where a device is near no NUMA node.
fn is_unknown(text: &str) -> bool {
    text.eq_ignore_ascii_case("N/A") || text == "-1"
}

/// Whether a word is a value as it should be, or `N/A`.
pub(super) fn is_value(text: &str) -> bool {
    is_unknown(text) || text.parse::<IdList>().is_ok()
}

/// Whether a value, or `N/A`, begins here: what tells a row that ends early from a misspelt link.
pub(super) fn begins_value(glyphs: &[Glyph], at: usize) -> bool {
    let word = word_at(glyphs, at);
    word.starts_with(|ch: char| ch.is_ascii_digit()) || is_unknown(&word)
}

/// The tabs that lead to `column` from the column `from` on: one each, but two before GPU NUMA ID, whose title's tab stop lies
/// one further.
fn separators(columns: &[Column], from: usize, column: usize) -> usize {
    (from..=column)
        .map(|index| match columns.get(index) {
            Some(column) if column.title == Title::MemoryNuma && index > 0 => 2,
            _ => 1,
        })
        .sum()
}

/// Reads the values from `start` on, of which there are no more than columns. `links_end` is the screen column where the last link ends.
pub(super) fn read(
    columns: &[Column],
    glyphs: &[Glyph],
    start: usize,
    links_end: usize,
    layout: &Layout,
) -> Result<Values, TopoError> {
    let words = words(glyphs, start);
    let tabs = count_tabs(glyphs, start, glyphs.len());
    let all: Vec<usize> = (0..columns.len()).collect();
    let (placed, told) = if words.len() < columns.len() {
        place(columns, glyphs, start, links_end, layout, &words)?
    } else if tabs > 0 && !fits_tabs(columns, glyphs, start, &words, &all) {
        (all, Told::Otherwise)
    } else {
        (all, Told::Nothing)
    };
    let written = placed
        .into_iter()
        .zip(words)
        .map(|(column, (_, text, place))| Written { column, text, place })
        .collect();
    Ok(Values { written, tabs, told })
}

/// The first value behind the links for which there is no column.
pub(super) fn surplus(columns: &[Column], glyphs: &[Glyph], start: usize) -> Option<(Glyph, String)> {
    let word = words(glyphs, start).into_iter().nth(columns.len());
    word.map(|(_, text, place)| (place, text))
}

/// A word: position, text, place.
type Word = (usize, String, Glyph);

fn words(glyphs: &[Glyph], start: usize) -> Vec<Word> {
    let mut words = Vec::new();
    let mut at = skip_blanks(glyphs, start);
    while let Some(place) = glyphs.get(at).copied() {
        let text = word_at(glyphs, at);
        let after = at + text.chars().count();
        words.push((at, text, place));
        at = skip_blanks(glyphs, after);
    }
    words
}

fn count_tabs(glyphs: &[Glyph], from: usize, to: usize) -> usize {
    let gap = glyphs.get(from..to).unwrap_or_default();
    gap.iter().filter(|glyph| glyph.ch == '\t').count()
}

/// Which columns fewer words than columns belong to: by the tabs between them, else by where a terminal shows them, as
/// nvidia-smi lays them out; else by the titles right above them, in a table whose links stand so too.
fn place(
    columns: &[Column],
    glyphs: &[Glyph],
    start: usize,
    links_end: usize,
    layout: &Layout,
    words: &[Word],
) -> Result<(Vec<usize>, Told), TopoError> {
    let Some((_, found, first)) = words.first() else {
        return Ok((Vec::new(), Told::Nothing));
    };
    let choices: Vec<Vec<usize>> = (0u32..1 << columns.len())
        .filter(|mask| mask.count_ones() as usize == words.len())
        .map(|mask| {
            (0..columns.len())
                .filter(|index| mask >> index & 1 == 1)
                .collect()
        })
        .collect();
    let only = |fits: &dyn Fn(&[usize]) -> bool| {
        let mut fitting = choices.iter().filter(|choice| fits(choice));
        fitting.next().filter(|_| fitting.next().is_none()).cloned()
    };
    let by_tabs = || only(&|choice| layout.single_tabs && fits_tabs(columns, glyphs, start, words, choice));
    let by_screen = || {
        only(&|choice| {
            let mut indents = layout.indents.iter();
            indents.any(|indent| fits_screen(columns, links_end, *indent, words, choice))
        })
    };
    let by_titles = || only(&|choice| layout.below_titles && fits_titles(columns, words, choice));
    let chosen = by_tabs().map(|chosen| (chosen, Told::Columns)).or_else(|| {
        let seen = by_screen().or_else(by_titles);
        seen.map(|chosen| (chosen, Told::Nothing))
    });
    if let Some(chosen) = chosen {
        return Ok(chosen);
    }
    Err(first.refuse(ambiguous(columns, found)))
}

/// Why a row is refused in which `found`, its first value, may belong to more than one column.
pub(super) fn ambiguous(columns: &[Column], found: &str) -> TopoProblem {
    let titles: Vec<&str> = columns.iter().map(|column| column.title.as_str()).collect();
    TopoProblem::AmbiguousValue {
        found: found.to_owned(),
        columns: titles.join(", "),
    }
}

fn fits_tabs(columns: &[Column], glyphs: &[Glyph], start: usize, words: &[Word], choice: &[usize]) -> bool {
    let mut from = start;
    let mut column = 0;
    words.iter().zip(choice).all(|((at, text, _), chosen)| {
        let fits = count_tabs(glyphs, from, *at) == separators(columns, column, *chosen);
        from = at + text.chars().count();
        column = chosen + 1;
        fits
    })
}

fn fits_screen(
    columns: &[Column],
    links_end: usize,
    indent: usize,
    words: &[Word],
    choice: &[usize],
) -> bool {
    let mut screen = links_end.saturating_sub(indent);
    let mut column = 0;
    words.iter().zip(choice).all(|((_, text, place), chosen)| {
        for _ in 0..separators(columns, column, *chosen) {
            screen = next_tab_stop(screen);
        }
        let fits = place.visual == indent + screen;
        screen += text.chars().count();
        column = chosen + 1;
        fits
    })
}

fn fits_titles(columns: &[Column], words: &[Word], choice: &[usize]) -> bool {
    words.iter().zip(choice).all(|((_, _, place), chosen)| {
        columns
            .get(*chosen)
            .is_some_and(|column| column.from == place.visual)
    })
}
