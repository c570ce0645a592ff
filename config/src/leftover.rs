//! What a copy of a config file brings along from where it was copied: a code fence, the shell's lines, a template's braces. Looked for
//! only in what is not well-formed, to say more of it than a reader of YAML can.

/// The first such line of `text`, from 1, and what it is; of the lines to `last` alone, where a reader stumbled, if that is known.
pub fn leftover(text: &str, last: Option<u64>) -> Option<(u64, &'static str)> {
    let lines = (1..).zip(text.lines());
    lines
        .take_while(|(number, _)| last.is_none_or(|last| *number <= last))
        .filter_map(|(number, line)| Some((number, kind(without_comment(line))?)))
        .next()
}

/// The line, from 1, at which a reader of YAML stumbled, if it says.
pub fn line_of(error: &serde_saphyr::Error) -> Option<u64> {
    let place = error.location()?;
    Some(place.line()).filter(|line| *line > 0)
}

fn without_comment(line: &str) -> &str {
    let starts = |at: usize| line[..at].ends_with(char::is_whitespace) || at == 0;
    let comment = line.match_indices('#').map(|(at, _)| at).find(|at| starts(*at));
    comment.map_or(line, |at| &line[..at])
}

fn kind(line: &str) -> Option<&'static str> {
    let bare = line.trim();
    let is_table = bare.starts_with('[')
        && bare.ends_with(']')
        && bare.contains('.')
        && !bare.contains([',', '"', '\'', ' ']);
    if bare.starts_with("```") {
        return Some("``` is the fence of a code block; leave it out");
    }
    if bare.starts_with("$ ") || bare.contains("<<") && !bare.contains("<<:") {
        return Some("this is a line for a shell; give what stands between such lines");
    }
    if bare == "..." && line.starts_with(char::is_whitespace) {
        return Some("... stands for more in an example; leave it out");
    }
    if bare.contains("{{") {
        return Some("{{ begins an expression of a template; give what the template makes");
    }
    is_table.then_some("this is TOML; write YAML or JSON")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stands_in_a_comment_or_behind_the_readers_line_is_none() {
        let text = "# rendered from {{ .Values }}\nversion: v1 # {{ or <<EOF\nflags:\n\tmigStrategy: none\n{{ end }}\n";
        assert_eq!(leftover(text, Some(4)), None);
        assert_eq!(leftover(text, None).map(|(line, _)| line), Some(5));
        assert_eq!(leftover("a: {{ .b }}\n", Some(1)).map(|(line, _)| line), Some(1));
        assert_eq!(
            leftover("a: b#{{ c }}\n", None).map(|(line, _)| line),
            Some(1),
            "no comment"
        );
    }
}
