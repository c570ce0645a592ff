//! What stands around a matrix that was copied: the shell's prompt, a code fence, the command, a date, a notice of NICs that are not shown.
//! Tells it from rows; reads none.

use super::glyphs::{Line, skip_blanks, word_at};
use super::legend;
use super::words::numbered;

/// Takes the marks off the lines that close a block of text and are glued to its last word.
pub(super) fn drop_closing_marks(lines: &mut [Line]) {
    for line in lines {
        let text: String = line.glyphs.iter().map(|glyph| glyph.ch).collect();
        let whole = text.trim_end();
        let kept = without_closing_marks(whole);
        if !kept.trim().is_empty() && kept.len() < whole.len() {
            line.glyphs.truncate(kept.chars().count());
            // They may stand in the place of an end that is lacking.
            line.terminated = false;
        }
    }
}

/// A line before a code fence, Python's quotes and tags of a web page at its end.
fn without_closing_marks(line: &str) -> &str {
    let mut kept = line;
    loop {
        let marks = ["\"\"\"", "</pre>", "</code>"];
        let fence = Some(kept.trim_end_matches('`')).filter(|_| kept.ends_with("```"));
        match fence.or_else(|| marks.iter().find_map(|mark| kept.strip_suffix(mark))) {
            Some(before) => kept = before,
            None => return kept,
        }
    }
}

/// Takes the shell's next prompt off the end, which comes along when a terminal is copied.
pub(super) fn drop_prompt(lines: &mut Vec<Line>) {
    let Some(last) = lines.iter().rposition(|line| line.first().is_some()) else {
        return;
    };
    let is_prompt = lines.get(last).is_some_and(|line| {
        let text = line.text();
        let of_the_matrix = numbered(&text, "GPU").or(numbered(&text, "NIC")).is_some();
        text.ends_with(['$', '#', '>']) && !of_the_matrix && !explains_a_row(&text, lines)
    });
    if is_prompt {
        lines.truncate(last);
        // What was copied may have been cut before the prompt came: a value at the end may go on, unless a blank ends it.
        let above = lines.iter_mut().rfind(|line| line.first().is_some());
        if let Some(above) = above
            && above.glyphs.last().is_some_and(|glyph| !glyph.is_blank())
        {
            above.terminated = false;
        }
    }
}

/// `mlx5_0: device`, where `mlx5_0` has a row: an entry of the NICs' legend, whatever its device is called.
fn explains_a_row(text: &str, lines: &[Line]) -> bool {
    text.split_once(": ").is_some_and(|(name, _)| {
        let label = |line: &Line| word_at(&line.glyphs, skip_blanks(&line.glyphs, 0));
        lines.iter().any(|line| label(line) == name)
    })
}

/// Lines that no row runs over.
pub(super) fn is_boundary(line: &Line) -> bool {
    let text = line.text();
    is_frame(&text) || text.starts_with('#') || legend::is_heading(&text)
}

/// Blank lines, and what people and programs put around the output: a code fence, the command, a heading, the date.
pub(super) fn is_frame(text: &str) -> bool {
    let lower = text.to_ascii_lowercase();
    text.is_empty()
        || ["```", "{noformat", "{code"]
            .iter()
            .any(|fence| text.starts_with(fence))
        || is_command(text)
        || is_topologys_heading(&lower)
        || is_date(text)
        || of_other_programs(&lower)
}

/// `GPU topology:`, as people write it: also `gpu topolocy:`.
fn is_topologys_heading(lower: &str) -> bool {
    let words = lower.strip_suffix(':').map(|words| words.split_whitespace());
    words.is_some_and(|words| {
        words.clone().count() <= 3 && words.last().is_some_and(|last| last.starts_with("topolo"))
    })
}

/// What kubectl says before a command's output, what programs that report on a machine print beside the matrix (`sglang.check_env`), and
/// nvidia-smi's own warning, which goes to another stream and may come anywhere.
fn of_other_programs(lower: &str) -> bool {
    [
        "defaulted container ",
        "hypervisor vendor:",
        "ulimit soft:",
        "warning: inforom",
    ]
    .iter()
    .any(|begin| lower.starts_with(begin))
}

/// Whether a line ends in the command that prints a matrix, whatever the shell does with its output.
pub(crate) fn is_command(text: &str) -> bool {
    let after = ["nvidia-smi topo", "nvidia-smi.exe topo"]
        .into_iter()
        .find_map(|command| text.split_once(command));
    let Some((_, options)) = after else {
        return false;
    };
    let mut before = " ";
    for word in options.split_whitespace() {
        let for_the_shell = word.starts_with(['|', '>', '<', '&', ';']) || word.starts_with("2>");
        let capabilities = before == "-p2p" && word.chars().all(|ch| "rwnap".contains(ch));
        if for_the_shell || before.ends_with(';') {
            return true;
        }
        if !(word.starts_with('-') || capabilities) {
            return false;
        }
        before = word;
    }
    options.is_empty() || options.starts_with(' ')
}

/// What `date` prints: a day of the week, and among the rest the time of day.
fn is_date(text: &str) -> bool {
    let mut words = text.split(' ');
    let days = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"];
    let is_time = |word: &str| {
        let parts: Vec<&str> = word.split(':').collect();
        let number = |part: &&str| part.len() == 2 && part.chars().all(|ch| ch.is_ascii_digit());
        parts.len() == 3 && parts.iter().all(number)
    };
    words.next().is_some_and(|day| days.contains(&day)) && words.any(is_time)
}

/// The notice of a machine with more NICs than the matrix shows: how many there are, how many it shows.
pub(super) fn hidden_nics(text: &str) -> Option<(usize, usize)> {
    if !text.contains("found in the topology") {
        return None;
    }
    let mut numbers = text.split_whitespace().filter_map(|word| word.parse().ok());
    Some((numbers.next()?, numbers.next()?))
}
