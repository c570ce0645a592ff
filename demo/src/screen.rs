//! The demo's output: standard output, in colour if it is a terminal and `NO_COLOR` is not set.

use std::fmt::Display;
use std::io::{IsTerminal, Write};

/// Standard output as a page for people.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Screen {
    /// Whether colours and redrawing are welcome.
    pub(crate) terminal: bool,
    pub(crate) columns: usize,
}

/// How words look on a terminal; the parameters of the SGR code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Style(pub(crate) &'static str);

impl Style {
    pub(crate) const PLAIN: Self = Self("");
    pub(crate) const STRONG: Self = Self("1");
    pub(crate) const FAINT: Self = Self("2");
    pub(crate) const GOOD: Self = Self("32");
    pub(crate) const BAD: Self = Self("1;31");
    pub(crate) const WARN: Self = Self("33");
}

impl Screen {
    /// Standard output as it is.
    pub(crate) fn of_stdout() -> Self {
        let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let dumb = std::env::var("TERM").is_ok_and(|term| term == "dumb");
        let terminal = std::io::stdout().is_terminal() && !set("NO_COLOR") && !dumb;
        let columns = terminal_size::terminal_size().map_or(100, |(width, _)| usize::from(width.0));
        Self { terminal, columns: columns.clamp(60, 160) }
    }

    /// Words in a look, or bare where there are no colours.
    pub(crate) fn styled(self, look: Style, words: impl Display) -> String {
        if self.terminal && look != Style::PLAIN {
            format!("\x1b[{}m{words}\x1b[0m", look.0)
        } else {
            words.to_string()
        }
    }

    pub(crate) fn line(self, text: impl Display) {
        // A closed pipe is no error of the demo.
        let _ = writeln!(std::io::stdout(), "{text}");
    }

    pub(crate) fn heading(self, text: &str) {
        self.line("");
        self.line(self.styled(Style::STRONG, text));
    }

    /// A page that replaces what stood on the terminal.
    pub(crate) fn page(self, text: &str) {
        let clear = if self.terminal { "\x1b[H\x1b[2J" } else { "" };
        let mut out = std::io::stdout();
        let _ = write!(out, "{clear}{text}");
        let _ = out.flush();
    }

    /// Text in lines no longer than the screen, each indented.
    pub(crate) fn paragraph(self, indent: &str, look: Style, text: &str) {
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
