//! The project's pages: every file and every heading that a page links to exists, and the contents of the site have
//! every page.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The pages of a folder.
fn pages_of(folder: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
    files.filter(|path| path.extension().is_some_and(|extension| extension == "md")).collect()
}

/// The pages below docs/.
fn pages_of_docs() -> Vec<PathBuf> {
    let mut folders = vec![root().join("docs")];
    let mut pages = Vec::new();
    while let Some(folder) = folders.pop() {
        pages.extend(pages_of(&folder));
        let inner = std::fs::read_dir(&folder).unwrap().map(|file| file.unwrap().path());
        folders.extend(inner.filter(|path| path.is_dir()));
    }
    pages
}

/// The pages: those of the root, of docs/ and of tests/.
fn pages() -> Vec<PathBuf> {
    [pages_of(&root()), pages_of_docs(), pages_of(&root().join("tests"))].concat()
}

/// The text of a page without blocks of code.
fn prose(path: &Path) -> String {
    let text = std::fs::read_to_string(path).unwrap();
    text.split("```").step_by(2).collect()
}

/// The targets of `[text](target)` that are no addresses.
fn links(prose: &str) -> Vec<String> {
    let targets = prose.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
    let targets = targets.map(|(target, _)| target.to_owned());
    targets.filter(|target| !target.contains("://") && !target.starts_with("mailto:")).collect()
}

/// The anchors of a page's headings, as GitHub makes them.
fn anchors(path: &Path) -> BTreeSet<String> {
    let headings = prose(path);
    let headings = headings
        .lines()
        .filter_map(|line| line.trim_start_matches('#').strip_prefix(' ').filter(|_| line.starts_with('#')));
    headings
        .map(|heading| {
            let kept = heading.to_lowercase().replace(' ', "-");
            kept.chars().filter(|ch| ch.is_alphanumeric() || ['-', '_'].contains(ch)).collect()
        })
        .collect()
}

/// A page that the contents lack is on no site; `links_between_pages_lead_somewhere` finds a page that is missing.
#[test]
fn contents_have_every_page_once() {
    let summary = root().join("docs/SUMMARY.md");
    let mut listed = BTreeSet::new();
    for link in links(&prose(&summary)) {
        let page = root().join("docs").join(&link).canonicalize().unwrap();
        assert!(listed.insert(page), "{link} is listed twice");
    }
    let all: BTreeSet<PathBuf> = pages_of_docs()
        .into_iter()
        .filter(|page| *page != summary)
        .chain(pages_of(&root()))
        .map(|page| page.canonicalize().unwrap())
        .collect();
    let missing: Vec<&PathBuf> = all.difference(&listed).collect();
    assert!(missing.is_empty(), "docs/SUMMARY.md lacks {missing:?}");
    assert!(listed.len() > 60, "{} pages", listed.len());
}

#[test]
fn links_between_pages_lead_somewhere() {
    let mut broken = Vec::new();
    let mut count = 0;
    for page in pages() {
        for link in links(&prose(&page)) {
            count += 1;
            let (file, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = match file {
                "" => page.clone(),
                file => page.parent().unwrap().join(file),
            };
            let has_anchor = || anchor.is_empty() || anchors(&target).contains(anchor);
            if !target.exists() || !has_anchor() {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(count > 100, "{count} links found");
    assert!(broken.is_empty(), "broken links:\n{}", broken.join("\n"));
}
