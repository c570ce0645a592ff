//! Standard output as a page.

use std::io::{self, IsTerminal as _};

/// Characters in a line at least.
const NARROWEST: usize = 40;

fn named_columns() -> Option<usize> {
    std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok())
}

/// The terminal, or another output.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Screen {
    /// Characters in a line.
    pub(crate) columns: usize,
    pub(crate) color: bool,
}

impl Screen {
    /// Characters in a line of text: those of the terminal, or as `COLUMNS` sets; none where text is not to be wrapped,
    /// as in a file.
    pub(crate) fn line() -> Option<usize> {
        let terminal = terminal_size::terminal_size().map(|(width, _)| width.0.into());
        let terminal = terminal.filter(|_| io::stdout().is_terminal());
        named_columns().or(terminal).map(|columns: usize| columns.max(NARROWEST))
    }

    /// As wide as `COLUMNS` sets, or `columns`. Colors only on a terminal that has them, unless `NO_COLOR` is set
    /// (<https://no-color.org>).
    pub(crate) fn of_stdout(columns: usize) -> Self {
        let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        Self {
            columns: named_columns().unwrap_or(columns),
            color: io::stdout().is_terminal() && !set("NO_COLOR") && !dumb,
        }
    }
}
