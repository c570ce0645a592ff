//! Where the demo's text goes: standard output, with colours only where a terminal shows them and nobody has set `NO_COLOR`.

use std::fmt::Display;
use std::io::{IsTerminal, Write};

/// Standard output as a page for people.
#[derive(Debug, Clone, Copy)]
pub(super) struct Screen {
    /// Whether colours and redrawing are welcome.
    pub(super) terminal: bool,
    /// Columns.
    pub(super) columns: usize,
}

/// How words look on a terminal; the parameters of the SGR code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Look(pub(super) &'static str);

impl Look {
    pub(super) const PLAIN: Self = Self("");
    pub(super) const STRONG: Self = Self("1");
    pub(super) const FAINT: Self = Self("2");
    pub(super) const GOOD: Self = Self("32");
    pub(super) const BAD: Self = Self("1;31");
    pub(super) const WARN: Self = Self("33");
}

impl Screen {
    /// Standard output as it is.
    pub(super) fn of_stdout() -> Self {
        let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let dumb = std::env::var("TERM").is_ok_and(|term| term == "dumb");
        let terminal = std::io::stdout().is_terminal() && !set("NO_COLOR") && !dumb;
        let columns = terminal_size::terminal_size().map_or(100, |(width, _)| usize::from(width.0));
        Self {
            terminal,
            columns: columns.clamp(60, 160),
        }
    }

    /// Words in a look, or bare where there are no colours.
    pub(super) fn styled(self, look: Look, words: impl Display) -> String {
        if self.terminal && look != Look::PLAIN {
            format!("\x1b[{}m{words}\x1b[0m", look.0)
        } else {
            words.to_string()
        }
    }

    /// One line.
    pub(super) fn line(self, text: impl Display) {
        // A reader that has left wants no more text.
        let _ = writeln!(std::io::stdout(), "{text}");
    }

    /// A heading.
    pub(super) fn heading(self, text: &str) {
        self.line("");
        self.line(self.styled(Look::STRONG, text));
    }

    /// A page that replaces what stood on the terminal.
    pub(super) fn page(self, text: &str) {
        let clear = if self.terminal { "\x1b[H\x1b[2J" } else { "" };
        let mut out = std::io::stdout();
        let _ = write!(out, "{clear}{text}");
        let _ = out.flush();
    }

    /// Text in lines no longer than the screen, each indented.
    pub(super) fn paragraph(self, indent: &str, look: Look, text: &str) {
        let width = self.columns.saturating_sub(indent.chars().count()).max(20);
        let mut line = String::new();
        for word in text.split_whitespace() {
            if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > width {
                self.line(format!("{indent}{}", self.styled(look, &line)));
                line.clear();
            }
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
        if !line.is_empty() {
            self.line(format!("{indent}{}", self.styled(look, &line)));
        }
    }
}
