//! Patterns of a configuration: `*` stands for anything, and the whole text must match.

use gantry_config::spelled;

/// Whether `pattern` matches the whole of `text`.
pub(super) fn matches(pattern: &str, text: &str) -> bool {
    let Some((head, rest)) = pattern.split_once('*') else {
        return pattern == text;
    };
    let Some(mut text) = text.strip_prefix(head) else {
        return false;
    };
    let mut parts = rest.split('*').peekable();
    // Each part at its earliest place, the last one at the end: if any assignment matches, this one does.
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return text.ends_with(part);
        }
        match text.find(part) {
            Some(at) => text = &text[at + part.len()..],
            None => return false,
        }
    }
    true
}

/// Whether `pattern` matches a MIG profile, in any spelling of the two.
pub(super) fn matches_profile(pattern: &str, profile: &str) -> bool {
    matches(&spelled(pattern), &spelled(profile))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn pattern_matches_the_whole_text() {
        assert!(matches("*", "") && matches("*", "NVIDIA A100"));
        assert!(matches("1g.10gb", "1g.10gb"));
        assert!(!matches("1g.10gb", "1g.10gb+me"), "anchored at the end");
        assert!(!matches("A100*", "NVIDIA A100"), "and at the beginning");
        assert!(matches("*A100*80GB", "NVIDIA A100-SXM4-80GB"));
        assert!(!matches("a*a", "a"), "no character counts twice");
        assert!(!matches("", "x") && matches("", ""));
    }

    /// The definition: `*` matches nothing, or one more character.
    fn by_definition(pattern: &[u8], text: &[u8]) -> bool {
        match pattern.split_first() {
            None => text.is_empty(),
            Some((b'*', rest)) => {
                by_definition(rest, text) || (!text.is_empty() && by_definition(pattern, &text[1..]))
            }
            Some((first, rest)) => text.first() == Some(first) && by_definition(rest, &text[1..]),
        }
    }

    proptest! {
        #[test]
        fn matches_agrees_with_the_definition(pattern in "[ab*]{0,6}", text in "[ab]{0,8}") {
            prop_assert_eq!(matches(&pattern, &text), by_definition(pattern.as_bytes(), text.as_bytes()));
        }
    }
}
