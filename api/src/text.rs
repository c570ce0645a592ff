//! Text of others on its way to objects, logs and terminals. Names, values and messages that pods, nodes and servers send
//! may contain line breaks, escape codes and characters that turn the direction of a line: written out as they are, they
//! forge log lines and control terminals.

use std::borrow::Cow;
use std::fmt::{self, Write as _};
use std::ops::Deref;
use std::sync::Arc;

/// Longest [`ObjectMessage`], in bytes.
pub const MAX_MESSAGE: usize = 250;

/// Whether a character is written as `\u{..}`: a control character, one that turns or breaks a line, or one without
/// width.
pub fn is_control(ch: char) -> bool {
    ch.is_control()
        || matches!(ch,
            '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{e0000}'..='\u{e007f}')
}

/// `text` on one line: every character of [`is_control`] is written as an escape, such as `\n` or `\u{1b}`.
pub fn one_line(text: &str) -> Cow<'_, str> {
    if !text.contains(is_control) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 8);
    for ch in text.chars() {
        match is_control(ch) {
            // Not `escape_default`, which escapes quotes and letters such as `ü` too. Writing to a string cannot fail.
            true if matches!(ch, '\n' | '\r' | '\t') => shown.extend(ch.escape_default()),
            true => drop(write!(shown, "\\u{{{:x}}}", u32::from(ch))),
            false => shown.push(ch),
        }
    }
    Cow::Owned(shown)
}

/// A message on an object: of a condition, a status or an Event. One line without control characters, of at most
/// [`MAX_MESSAGE`] bytes; a truncated one ends in `...`.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectMessage(String);

impl ObjectMessage {
    /// Escapes and truncates `text`.
    pub fn new(text: impl AsRef<str>) -> Self {
        const CUT: &str = "...";
        let mut message = one_line(text.as_ref()).into_owned();
        if message.len() > MAX_MESSAGE {
            message.truncate(message.floor_char_boundary(MAX_MESSAGE - CUT.len()));
            message.push_str(CUT);
        }
        Self(message)
    }
}

impl Deref for ObjectMessage {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ObjectMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<ObjectMessage> for Arc<str> {
    fn from(message: ObjectMessage) -> Self {
        message.0.into()
    }
}

impl From<ObjectMessage> for String {
    fn from(message: ObjectMessage) -> Self {
        message.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_written_out() {
        assert_eq!(one_line("müller \"a\" 'b' \\"), "müller \"a\" 'b' \\");
        assert_eq!(
            one_line("a\nb\u{1b}[2Jc\u{202e}d\u{9b}e\0\t"),
            "a\\nb\\u{1b}[2Jc\\u{202e}d\\u{9b}e\\u{0}\\t"
        );
        assert!(matches!(one_line("plain"), Cow::Borrowed("plain")));
    }

    #[test]
    fn message_is_one_bounded_line() {
        let message = ObjectMessage::new("\n".repeat(500));
        assert!(message.len() <= MAX_MESSAGE && message.ends_with("..."), "{message}");
        assert_eq!(ObjectMessage::new("ü".repeat(200)).len(), 249);
    }
}
