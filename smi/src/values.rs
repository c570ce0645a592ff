//! The values behind the links of a GPU's row: CPU list, NUMA nodes, NUMA node of its own memory. Assigns values to
//! columns where other cells are blank, and refuses a row with two readings.

use gantry_topology::IdList;

use crate::error::{TopoError, TopoProblem};
use crate::header::Title;
use crate::scan::{Glyph, next_tab_stop, skip_blanks, word_at};

/// The layout of a row on the screen, as its links show it. nvidia-smi ends every cell with a tab.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    /// Screen columns from which the tab stops of the row may count: those for which every link is at one. A whole text
    /// may be indented after its tabs became blanks.
    indents: Vec<usize>,
    /// Whether no two tabs are between two cells up to the last link: then each tab ends a cell.
    single_tabs: bool,
    /// The screen column where the last link ends.
    links_end: usize,
}

impl Layout {
    /// The layout of a row with these links. `glyphs` end with the last of them.
    pub(crate) fn of_links(label: Glyph, places: &[Glyph], glyphs: &[Glyph]) -> Self {
        // ` X ` begins with a blank.
        let is_at = |place: &Glyph, stop: usize| place.visual == stop || place.visual == stop + 1;
        let on_tab_stops = |indent: &usize| {
            let stops = (1..).map(|cell: usize| indent + 8 * cell);
            places.iter().zip(stops).all(|(place, stop)| is_at(place, stop))
        };
        let mut indents = vec![0, label.visual];
        indents.dedup();
        indents.retain(on_tab_stops);
        // Tabs before the first word indent the line.
        let mut gaps = glyphs.split(|glyph| !glyph.is_blank()).skip(1);
        Self {
            indents,
            single_tabs: gaps.all(|gap| count_tabs(gap) < 2),
            links_end: glyphs.last().map_or(0, |glyph| glyph.visual + 1),
        }
    }
}

/// A value as written.
#[derive(Debug, Clone)]
pub(crate) struct WrittenValue {
    pub(crate) column: usize,
    pub(crate) text: String,
    pub(crate) place: Glyph,
}

/// The values of one row.
#[derive(Debug, Clone, Default)]
pub(crate) struct Values {
    /// Every word behind the links, `N/A` included, in order.
    pub(crate) written: Vec<WrittenValue>,
    /// Tabs behind the last link: blank cells leave no other trace.
    tabs: usize,
    pub(crate) tab_use: TabUse,
}

/// The relation of the tabs between values to their columns.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum TabUse {
    #[default]
    Unknown,
    /// Every column has its value, but with other tabs than nvidia-smi prints.
    Irregular,
    /// Some cells are blank, and only the tabs show which.
    Columns,
}

impl Values {
    /// The number of columns up to the last value.
    pub(crate) fn width(&self) -> usize {
        self.written.last().map_or(0, |value| value.column + 1)
    }

    /// Whether tabs lead up to a column, which marks it as blank.
    pub(crate) fn tabs_reach(&self, titles: &[Title], column: usize) -> bool {
        self.tabs >= separators(titles, 0, column)
    }

    /// The value of a title; `None` where it is blank, `N/A` or has no column.
    pub(crate) fn get(&self, titles: &[Title], title: Title) -> Result<Option<IdList>, TopoError> {
        let is_its = |value: &&WrittenValue| titles.get(value.column) == Some(&title);
        match self.written.iter().find(is_its) {
            Some(value) if !is_unknown(&value.text) => value.text.parse().map(Some).map_err(|_| {
                value
                    .place
                    .refuse(TopoProblem::BadValue { column: title.as_str(), found: value.text.clone() })
            }),
            _ => Ok(None),
        }
    }
}

/// Linux reports -1 for a device near no NUMA node.
fn is_unknown(text: &str) -> bool {
    text.eq_ignore_ascii_case("N/A") || text == "-1"
}

/// Whether a value or `N/A` begins here.
pub(crate) fn begins_value(glyphs: &[Glyph], at: usize) -> bool {
    let word = word_at(glyphs, at);
    word.starts_with(|ch: char| ch.is_ascii_digit()) || is_unknown(&word)
}

/// The tabs that lead to `column` from the column `from` on: one each, but two before GPU NUMA ID, because the tab stop
/// of its title is one further.
fn separators(titles: &[Title], from: usize, column: usize) -> usize {
    let tabs = |index: usize| match titles.get(index) {
        Some(Title::MemoryNuma) if index > 0 => 2,
        _ => 1,
    };
    (from..=column).map(tabs).sum()
}

/// Reads the values from `start` on. There are no more of them than titles.
pub(crate) fn read(
    titles: &[Title],
    glyphs: &[Glyph],
    start: usize,
    layout: &Layout,
) -> Result<Values, TopoError> {
    let words = words(glyphs, start);
    let tabs = count_tabs(glyphs.get(start..).unwrap_or_default());
    let all: Vec<usize> = (0..titles.len()).collect();
    let (columns, tab_use) = if words.len() < titles.len() {
        assign(titles, glyphs, start, layout, &words)?
    } else if tabs > 0 && !fits_tabs(titles, glyphs, start, &words, &all) {
        (all, TabUse::Irregular)
    } else {
        (all, TabUse::Unknown)
    };
    let written = columns.into_iter().zip(words);
    let written = written.map(|(column, (_, text, place))| WrittenValue { column, text, place });
    Ok(Values { written: written.collect(), tabs, tab_use })
}

/// The first value behind the links beyond the number of titles.
pub(crate) fn surplus(titles: usize, glyphs: &[Glyph], start: usize) -> Option<(Glyph, String)> {
    let word = words(glyphs, start).into_iter().nth(titles);
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

fn count_tabs(glyphs: &[Glyph]) -> usize {
    glyphs.iter().filter(|glyph| glyph.ch == '\t').count()
}

/// The columns of fewer words than titles: by the tabs between them, else by their place on the screen.
fn assign(
    titles: &[Title],
    glyphs: &[Glyph],
    start: usize,
    layout: &Layout,
    words: &[Word],
) -> Result<(Vec<usize>, TabUse), TopoError> {
    let Some((_, found, first)) = words.first() else {
        return Ok((Vec::new(), TabUse::Unknown));
    };
    let masks = (0u32..1 << titles.len()).filter(|mask| mask.count_ones() as usize == words.len());
    let columns = |mask: u32| (0..titles.len()).filter(move |index| mask >> index & 1 == 1);
    let choices: Vec<Vec<usize>> = masks.map(|mask| columns(mask).collect()).collect();
    let only = |fits: &dyn Fn(&[usize]) -> bool| {
        let mut fitting = choices.iter().filter(|choice| fits(choice));
        fitting.next().filter(|_| fitting.next().is_none()).cloned()
    };
    let by_tabs = only(&|choice| layout.single_tabs && fits_tabs(titles, glyphs, start, words, choice));
    if let Some(chosen) = by_tabs {
        return Ok((chosen, TabUse::Columns));
    }
    let by_screen = only(&|choice| {
        let mut indents = layout.indents.iter();
        indents.any(|indent| fits_screen(titles, layout.links_end, *indent, words, choice))
    });
    by_screen.map(|chosen| (chosen, TabUse::Unknown)).ok_or_else(|| first.refuse(ambiguous(titles, found)))
}

/// The problem of a row whose first value `found` may belong to more than one column.
pub(crate) fn ambiguous(titles: &[Title], found: &str) -> TopoProblem {
    let titles: Vec<&str> = titles.iter().map(|title| title.as_str()).collect();
    TopoProblem::AmbiguousValue { found: found.to_owned(), columns: titles.join(", ") }
}

fn fits_tabs(titles: &[Title], glyphs: &[Glyph], start: usize, words: &[Word], choice: &[usize]) -> bool {
    let mut from = start;
    let mut column = 0;
    words.iter().zip(choice).all(|((at, text, _), chosen)| {
        let gap = glyphs.get(from..*at).unwrap_or_default();
        let fits = count_tabs(gap) == separators(titles, column, *chosen);
        from = at + text.chars().count();
        column = chosen + 1;
        fits
    })
}

fn fits_screen(titles: &[Title], links_end: usize, indent: usize, words: &[Word], choice: &[usize]) -> bool {
    let mut screen = links_end.saturating_sub(indent);
    let mut column = 0;
    words.iter().zip(choice).all(|((_, text, place), chosen)| {
        for _ in 0..separators(titles, column, *chosen) {
            screen = next_tab_stop(screen);
        }
        let fits = place.visual == indent + screen;
        screen += text.chars().count();
        column = chosen + 1;
        fits
    })
}
