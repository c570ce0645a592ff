//! A config file is one YAML document. What stands behind the first one is told, if it is anything: whoever wrote it expects it to
//! count. Finds where documents begin; what is in them is read elsewhere.

use gantry_api::ResourceName;

use super::read::{self, MAX_BYTES};
use super::{Fault, Layer, Loaded, Problem, Problems, Strictness};

/// Reads `text`, YAML or JSON, called `source` in problems, and lays `layers` over it, the last one topmost. Empty documents behind the
/// first one mean nothing; others are a mistake, or a warning where that is `strictness`, and never count.
///
/// # Errors
/// Everything that is wrong with it.
pub fn load(source: &str, text: &str, layers: &[Layer], strictness: Strictness) -> Result<Loaded, Problems> {
    load_naming(source, text, layers, strictness, None)
}

/// [`load`] where whole GPUs may be called `gpu_resource`, whatever the file says.
pub(super) fn load_naming(
    source: &str,
    text: &str,
    layers: &[Layer],
    strictness: Strictness,
    gpu_resource: Option<&ResourceName>,
) -> Result<Loaded, Problems> {
    if text.len() > MAX_BYTES {
        return read::load(source, text, layers, strictness, gpu_resource);
    }
    let documents = Documents::of(text);
    let loaded = read::load(source, documents.first, layers, strictness, gpu_resource);
    let Some(line) = documents.more else {
        return loaded;
    };
    let problem = Problem {
        line: Some(line),
        at: String::new(),
        fault: Fault::Invalid(
            "another YAML document begins here (behind --- or ...), and only the first one counts; a config file is one document"
                .to_owned(),
        ),
    };
    match (loaded, strictness) {
        (Ok(mut loaded), Strictness::Lenient) => {
            loaded.warnings.push(problem);
            Ok(loaded)
        }
        (Ok(_), Strictness::Strict) => Err(Problems {
            source: source.to_owned(),
            list: vec![problem],
        }),
        (Err(problems), Strictness::Lenient) => Err(problems),
        (Err(mut problems), Strictness::Strict) => {
            problems.list.push(problem);
            problems.list.sort();
            Err(problems)
        }
    }
}

/// A text cut into its first YAML document and the rest.
#[derive(Debug, PartialEq, Eq)]
struct Documents<'t> {
    /// The first one, with what stands before it.
    first: &'t str,
    /// The line where there is something behind it.
    more: Option<u64>,
}

/// A line of YAML, as far as it takes to tell documents apart. `---` and `...` at its beginning end a document wherever they stand,
/// even within a text of several lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Line {
    /// Nothing, a comment, or a directive (`%YAML 1.1`), which is one only before a document begins.
    Empty,
    /// `---`, and whether there is something behind it.
    Begin { more: bool },
    /// `...`
    End,
    /// Anything else.
    Content,
}

impl<'t> Documents<'t> {
    fn of(text: &'t str) -> Self {
        let body = text.strip_prefix('\u{feff}').unwrap_or(text);
        let mut at = text.len() - body.len();
        // Where the first document ends.
        let mut end = None;
        let (mut begun, mut more) = (false, None);
        for (index, line) in body.split_inclusive('\n').enumerate() {
            let kind = Line::of(line, begun && end.is_none());
            let is_something = matches!(kind, Line::Content | Line::Begin { more: true });
            match kind {
                Line::Begin { .. } if end.is_none() && begun => end = Some(at),
                Line::End if end.is_none() && begun => end = Some(at),
                Line::Begin { .. } | Line::Content if end.is_none() => begun = true,
                _ => {}
            }
            if end.is_some() && is_something {
                more = u64::try_from(index + 1).ok();
                break;
            }
            at += line.len();
        }
        Self {
            first: end.map_or(text, |end| &text[..end]),
            more,
        }
    }
}

impl Line {
    fn of(line: &str, in_document: bool) -> Self {
        let marked = |mark: &str| {
            let rest = line.strip_prefix(mark)?;
            rest.chars()
                .next()
                .is_none_or(char::is_whitespace)
                .then_some(rest)
        };
        let is_empty = |text: &str| {
            let text = text.trim();
            text.is_empty() || text.starts_with('#')
        };
        if let Some(rest) = marked("---") {
            return Self::Begin {
                more: !is_empty(rest),
            };
        }
        match marked("...") {
            Some(_) => Self::End,
            None if is_empty(line) || (!in_document && line.starts_with('%')) => Self::Empty,
            None => Self::Content,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The first document of a text, and the line at which another begins.
    fn cut(text: &str) -> (&str, Option<u64>) {
        let Documents { first, more } = Documents::of(text);
        (first, more)
    }

    #[test]
    fn a_text_is_cut_where_its_first_document_ends() {
        for whole in [
            "",
            "a: 1\n",
            "---\na: 1",
            "--- {a: 1}\n",
            "# c\n\n%YAML 1.1\n---\na: 1\n",
            "\u{feff}---\na: 1\n",
            "a: |\n  ---\n  b\n",
            "---a: 1\n",
            "...\na: 1\n",
        ] {
            assert_eq!(cut(whole), (whole, None), "{whole:?}");
        }
        for empty in [
            "---",
            "---\n",
            "---\n---\n",
            "...\n",
            "--- # c\n...\n---\n",
            "...\n\n# c\n",
            "---\r\n",
        ] {
            let text = format!("a: 1\n{empty}");
            assert_eq!(cut(&text), ("a: 1\n", None), "{text:?}");
        }
        assert_eq!(cut("a: 1\n---\nb: 2\n"), ("a: 1\n", Some(3)));
        assert_eq!(cut("a: 1\n--- b\n"), ("a: 1\n", Some(2)));
        assert_eq!(cut("---\n---\nb: 2\n"), ("---\n", Some(3)));
        assert_eq!(
            cut("--- a\n...\n# c\n%YAML 1.1\n---\n\nb: 2\n---\n"),
            ("--- a\n", Some(7))
        );
    }

    proptest! {
        #[test]
        fn what_is_cut_off_begins_with_a_mark(text in "(---|\\.\\.\\.|a: 1|# c|%Y|| |\r){0,1}(\n(---|\\.\\.\\.|a: 1|# c|%Y|| |--- b)){0,8}") {
            let documents = Documents::of(&text);
            let rest = text.strip_prefix(documents.first).unwrap();
            prop_assert!(rest.is_empty() || rest.starts_with("---") || rest.starts_with("..."), "{rest:?}");
            prop_assert!(!rest.is_empty() || documents.more.is_none());
            // What is left is one document, and stays it.
            prop_assert_eq!(Documents::of(documents.first), Documents { first: documents.first, more: None });
        }
    }
}
