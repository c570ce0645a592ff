//! What a copy of a config file brings along from where it was copied: a code fence, the shell's lines, a template's braces. Looked for
//! only in what is not well-formed, to say more of it than a reader of YAML can.

/// The first such line of `text`, from 1, and what it is.
pub fn leftover(text: &str) -> Option<(u64, &'static str)> {
    let lines = (1..).zip(text.lines());
    lines
        .filter_map(|(number, line)| Some((number, kind(line)?)))
        .next()
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
