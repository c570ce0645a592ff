//! Standard output as a page.

use std::io::{self, IsTerminal as _};

/// The terminal, or another output.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Screen {
    /// Characters in a line.
    pub(crate) columns: usize,
    pub(crate) color: bool,
}

impl Screen {
    /// As wide as `COLUMNS` says, or `columns`. Colors only on a terminal that has them, unless `NO_COLOR` is set
    /// (<https://no-color.org>).
    pub(crate) fn of_stdout(columns: usize) -> Self {
        let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        let named = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
        Self {
            columns: named.unwrap_or(columns),
            color: io::stdout().is_terminal() && !set("NO_COLOR") && !dumb,
        }
    }
}
