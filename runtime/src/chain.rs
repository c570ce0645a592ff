//! An error in one line, for logs and for texts that people read.

/// An error and everything that brought it about, in one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let reason = error.to_string();
        // Many say their source's words themselves, some in the middle of their own.
        if !text.contains(&reason) {
            text = format!("{text}: {reason}");
        }
        source = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{words}")]
    struct Link {
        words: &'static str,
        source: Option<Box<Link>>,
    }

    fn said(words: &[&'static str]) -> String {
        let link = |source, words: &&'static str| Some(Box::new(Link { words, source }));
        chain(&words.iter().rev().fold(None, link).unwrap())
    }

    #[test]
    fn causes_follow_what_they_brought_about() {
        assert_eq!(
            said(&["no way in", "no socket", "not found"]),
            "no way in: no socket: not found"
        );
    }

    #[test]
    fn a_cause_that_is_said_already_is_not_said_again() {
        assert_eq!(
            said(&["no way in: no socket", "no socket"]),
            "no way in: no socket"
        );
        assert_eq!(
            said(&["no way in (no socket), again", "no socket"]),
            "no way in (no socket), again"
        );
    }
}
