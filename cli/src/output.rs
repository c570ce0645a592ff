//! Forms of output as kubectl has them, and output that is written again when it changes.

use std::io::{IsTerminal as _, Write as _};

use anyhow::Context as _;
use clap::ValueEnum;
use serde::Serialize;

use crate::runtime::print;
use crate::visible::Visible;

/// Form of the output of a command that reads objects.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Lines for a terminal
    #[default]
    Text,
    /// The same without shortened lists
    Wide,
    /// JSON
    Json,
    /// YAML
    Yaml,
    /// The names of the objects, for other commands
    Name,
}

/// A value as JSON.
pub(crate) fn json(value: &impl Serialize) -> anyhow::Result<String> {
    let mut text = serde_json::to_string_pretty(value).context("writing JSON")?;
    text.push('\n');
    Ok(text)
}

/// A value as YAML, with the fields of its JSON.
pub(crate) fn yaml(value: &impl Serialize) -> anyhow::Result<String> {
    let value = serde_json::to_value(value).context("writing YAML")?;
    serde_saphyr::to_string(&value).context("writing YAML")
}

/// Lines of text that fit: lines that are longer than `columns` continue on further lines, two characters further in.
pub(crate) fn wrapped(text: &str, columns: Option<usize>) -> String {
    let Some(columns) = columns else {
        return text.to_owned();
    };
    let mut out = String::with_capacity(text.len());
    for line in text.lines() {
        let indent = " ".repeat(line.len() - line.trim_start_matches(' ').len() + 2);
        let indent = if indent.len() > columns / 2 { "  " } else { &indent };
        // The first line keeps its own indentation.
        let options = textwrap::Options::new(columns).break_words(false).subsequent_indent(indent);
        out.push_str(&textwrap::fill(line, options));
        out.push('\n');
    }
    out
}

/// Output that is written when it differs from the one before: over it on a terminal, after it elsewhere.
#[derive(Debug, Default)]
pub(crate) struct Screenful {
    shown: Option<Visible>,
}

impl Screenful {
    /// Writes the output if it is new.
    ///
    /// # Errors
    /// Standard output cannot be written.
    pub(crate) fn show(&mut self, output: Visible) -> anyhow::Result<()> {
        if self.shown.as_ref() == Some(&output) {
            return Ok(());
        }
        let mut stdout = std::io::stdout();
        if stdout.is_terminal() {
            // Clears the screen and what was scrolled off it.
            let _ = stdout.write_all(b"\x1b[H\x1b[2J\x1b[3J");
        } else if self.shown.is_some() {
            let _ = stdout.write_all(b"\n");
        }
        print(&output)?;
        stdout.flush().context("cannot write to standard output")?;
        self.shown = Some(output);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_continue_further_in() {
        let text = "short\n  n1: 3 of 8 GPUs free, 4 asked; fits when default/a ends\n";
        assert_eq!(wrapped(text, None), text);
        assert_eq!(wrapped(text, Some(80)), text);
        assert_eq!(
            wrapped(text, Some(40)),
            "short\n  n1: 3 of 8 GPUs free, 4 asked; fits\n    when default/a ends\n"
        );
        let word = "x".repeat(50);
        assert_eq!(wrapped(&word, Some(40)), format!("{word}\n"), "a name stays whole");
    }
}
