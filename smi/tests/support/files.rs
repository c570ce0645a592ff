//! The recorded texts, by name.

use std::fs;
use std::path::PathBuf;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../topology/fixtures/topologies")
}

/// All files whose name begins with `truncated-`, or all others.
fn files(truncated: bool) -> Vec<(String, String)> {
    let mut files: Vec<(String, String)> = fs::read_dir(folder())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "txt"))
        .map(|path| {
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            (name, fs::read_to_string(&path).unwrap())
        })
        .filter(|(name, _)| name.starts_with("truncated-") == truncated)
        .collect();
    files.sort();
    files
}

/// The complete matrices.
pub(crate) fn complete() -> Vec<(String, String)> {
    files(false)
}

/// The incomplete ones.
#[allow(dead_code, reason = "each test program uses a part")]
pub(crate) fn truncated() -> Vec<(String, String)> {
    files(true)
}

/// One file.
#[allow(dead_code, reason = "each test program uses a part")]
pub(crate) fn named(name: &str) -> String {
    fs::read_to_string(folder().join(format!("{name}.txt"))).unwrap()
}

/// The text with blanks in place of tabs, as a terminal shows it.
#[allow(dead_code, reason = "each test program uses a part")]
pub(crate) fn expand_tabs(text: &str) -> String {
    let mut expanded = String::new();
    for line in text.lines() {
        let mut width = 0;
        for ch in line.chars() {
            let step = if ch == '\t' { 8 - width % 8 } else { 1 };
            expanded.extend(std::iter::repeat_n(if ch == '\t' { ' ' } else { ch }, step));
            width += step;
        }
        expanded.push('\n');
    }
    expanded
}
