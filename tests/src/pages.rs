//! The project's pages: README.md and docs/, with their blocks of code.

use std::fs;
use std::path::{Path, PathBuf};

use pulldown_cmark::{CodeBlockKind, Event, Parser, Tag, TagEnd};

use crate::Result;
use crate::error::file;

/// A block of code of a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// The line of the fence. The first line of the text is the next one.
    pub line: usize,
    /// The language that the fence names; empty without one.
    pub language: String,
    /// The code, without the indentation of the list that it is in.
    pub text: String,
}

/// The fenced blocks of a page, in their order.
#[must_use]
pub fn blocks(page: &str) -> Vec<Block> {
    let mut found = Vec::new();
    let mut open: Option<Block> = None;
    for (event, range) in Parser::new(page).into_offset_iter() {
        match event {
            Event::Start(Tag::CodeBlock(CodeBlockKind::Fenced(language))) => {
                let line = page[..range.start].matches('\n').count() + 1;
                open = Some(Block { line, language: language.to_string(), text: String::new() });
            }
            Event::Text(text) => open.iter_mut().for_each(|block| block.text.push_str(&text)),
            Event::End(TagEnd::CodeBlock) => found.extend(open.take()),
            _ => {}
        }
    }
    found
}

/// All files below a folder, sorted.
///
/// # Errors
/// A folder cannot be read.
pub fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(file("read", folder))? {
        let path = entry.map_err(file("read", folder))?.path();
        if path.is_dir() { found.extend(files(&path)?) } else { found.push(path) }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_have_lines_and_no_indentation() {
        let page = "# a\n\n```console\n$ b \\\n    c\n```\n1. d\n\n   ```yaml\n   e:\n     f: 1\n   ```\n";
        let block = |line, language: &str, text: &str| Block {
            line,
            language: language.to_owned(),
            text: text.to_owned(),
        };
        assert_eq!(blocks(page), [block(3, "console", "$ b \\\n    c\n"), block(9, "yaml", "e:\n  f: 1\n")]);
    }
}
