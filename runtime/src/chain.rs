//! An error and its causes in one line, for logs and messages.

/// An error and its causes in one line: `cannot connect: connection refused`. A cause that the text contains already is left out.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let reason = error.to_string();
        // Many errors print their source themselves, some in the middle of their own text.
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
    #[error("{text}")]
    struct Link {
        text: &'static str,
        source: Option<Box<Link>>,
    }

    fn chained(texts: &[&'static str]) -> String {
        let link = |source, text: &&'static str| Some(Box::new(Link { text, source }));
        chain(&texts.iter().rev().fold(None, link).unwrap())
    }

    #[test]
    fn causes_follow_in_order() {
        assert_eq!(chained(&["no way in", "no socket", "not found"]), "no way in: no socket: not found");
    }

    #[test]
    fn cause_contained_in_the_text_is_not_repeated() {
        assert_eq!(chained(&["no way in: no socket", "no socket"]), "no way in: no socket");
        assert_eq!(chained(&["no way in (no socket), again", "no socket"]), "no way in (no socket), again");
    }
}
