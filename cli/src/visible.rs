//! Protects terminals and logs from control characters: names, values and messages in output come from pods, nodes and
//! servers.

use std::fmt::{self, Write as _};
use std::io::{self, Write};
use std::ops::Deref;

use gantry_api::text::is_control;
use tracing_subscriber::fmt::MakeWriter;

/// Output in which every control character is written as `\uXXXX`, which in a JSON string means the same. Line ends and
/// tabs stay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Visible(String);

impl Visible {
    /// Escapes every control character of `text` but line ends and tabs.
    pub(crate) fn new(text: &str) -> Self {
        Self(escape(text, false))
    }

    /// Keeps the codes that set a color too: they move no cursor and hide nothing.
    pub(crate) fn colored(text: &str) -> Self {
        Self(escape(text, true))
    }
}

impl Deref for Visible {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Visible {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn escape(text: &str, colors: bool) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut rest = text.chars();
    loop {
        if colors && let Some(after) = after_color(rest.as_str()) {
            shown.extend(rest.as_str().strip_suffix(after));
            rest = after.chars();
            continue;
        }
        let Some(ch) = rest.next() else {
            return shown;
        };
        if is_control(ch) && ch != '\n' && ch != '\t' {
            // Writing to a string cannot fail. Characters above U+FFFF are two escapes in JSON.
            let mut units = [0; 2];
            for unit in ch.encode_utf16(&mut units) {
                let _ = write!(shown, "\\u{unit:04x}");
            }
        } else {
            shown.push(ch);
        }
    }
}

/// The text behind the color code at its beginning.
fn after_color(text: &str) -> Option<&str> {
    let parameters = text.strip_prefix("\u{1b}[")?;
    parameters.trim_start_matches(|ch: char| ch.is_ascii_digit() || ch == ';').strip_prefix('m')
}

/// Writes each log event to standard error on one line.
pub(crate) struct LogWriter {
    /// Whether color codes are kept.
    pub(crate) colors: bool,
}

impl Write for LogWriter {
    /// `event` is a whole event: the formatter writes it at once.
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        io::stderr().write_all(one_event(event, self.colors).as_bytes())?;
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

impl MakeWriter<'_> for LogWriter {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        Self { colors: self.colors }
    }
}

fn one_event(event: &[u8], colors: bool) -> String {
    let event = String::from_utf8_lossy(event);
    let line = event.strip_suffix('\n').unwrap_or(&event);
    escape(line, colors).replace('\n', "\\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        let text = "A100\u{1b}[2J\u{7}\r\u{9b}31m\u{202e}\u{7f}\u{e0001}\tGPU0 ══ é\n";
        let shown = "A100\\u001b[2J\\u0007\\u000d\\u009b31m\\u202e\\u007f\\udb40\\udc01\tGPU0 ══ é\n";
        assert_eq!(&*Visible::new(text), shown);
        assert_eq!(&*Visible::colored(text), shown);
    }

    #[test]
    fn color_codes_are_kept_if_allowed() {
        let text = "\u{1b}[1;32mNVLink\u{1b}[0m \u{1b}[2K\u{1b}";
        assert_eq!(&*Visible::colored(text), "\u{1b}[1;32mNVLink\u{1b}[0m \\u001b[2K\\u001b");
        assert_eq!(&*Visible::new(text), "\\u001b[1;32mNVLink\\u001b[0m \\u001b[2K\\u001b");
    }

    /// A pod's `spec.schedulerName` may hold line ends and escape codes, which would forge lines of the log.
    #[test]
    fn log_event_is_one_line() {
        let event = b"WARN scheduler=x\nERROR \x1b[2Jforged\n";
        assert_eq!(one_event(event, false), "WARN scheduler=x\\nERROR \\u001b[2Jforged\n");
    }
}
