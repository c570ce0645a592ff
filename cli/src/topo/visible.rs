//! Protects the terminal from control characters in names and reasons.

use std::fmt::Write as _;

/// The text with every control character written out as `\uXXXX`, which in a JSON string means the same. Line ends and
/// tabs stay, and with `colors` the codes that set a colour: they move no cursor and hide nothing.
pub(crate) fn visible(text: &str, colors: bool) -> String {
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
        if controls(ch) {
            // Writing to a string cannot fail.
            let _ = write!(shown, "\\u{:04x}", u32::from(ch));
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

/// Control characters, and those that turn the direction of a line.
fn controls(ch: char) -> bool {
    let turns = matches!(ch, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    (ch.is_control() && ch != '\n' && ch != '\t') || turns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        let text = "A100\u{1b}[2J\u{7}\r\u{9b}31m\u{202e}\u{7f}\tGPU0 ══ é\n";
        let shown = "A100\\u001b[2J\\u0007\\u000d\\u009b31m\\u202e\\u007f\tGPU0 ══ é\n";
        assert_eq!(visible(text, false), shown);
        assert_eq!(visible(text, true), shown);
    }

    #[test]
    fn color_codes_are_kept_if_allowed() {
        let text = "\u{1b}[1;32mNVLink\u{1b}[0m \u{1b}[2K\u{1b}";
        assert_eq!(visible(text, true), "\u{1b}[1;32mNVLink\u{1b}[0m \\u001b[2K\\u001b");
        assert_eq!(visible(text, false), "\\u001b[1;32mNVLink\\u001b[0m \\u001b[2K\\u001b");
    }
}
