//! The site: the pages of docs/ and of the root, and the files that they link to, as a book. Links between pages stay as
//! they are in the repository, because the source folder of the book has the same paths.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use clap::Args;

use crate::ci::tool;
use crate::run::{output, root, run, target};

const MDBOOK: &str = "0.5.4";

/// Options of `cargo xtask site`.
#[derive(Args)]
pub(crate) struct SiteArgs {
    /// Folder to write [default: site/ of the target directory]
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
}

/// Builds the site.
pub(crate) fn run_task(args: &SiteArgs) -> Result<()> {
    let folder = args.output.clone().map_or_else(|| Ok(target()?.join("site")), anyhow::Ok)?;
    build(&folder)?;
    println!("{}/index.html", folder.display());
    Ok(())
}

/// Builds the site into a folder.
pub(crate) fn build(folder: &Path) -> Result<()> {
    let work = target()?.join("site-source");
    if work.exists() {
        fs::remove_dir_all(&work).with_context(|| format!("cannot remove {}", work.display()))?;
    }
    let tracked = output(Command::new("git").current_dir(root()).args(["ls-files", "-z", "*.md"]))?;
    let pages: Vec<&str> = tracked.split('\0').filter(|page| is_of_the_site(page)).collect();
    let mut files: BTreeSet<PathBuf> = pages.iter().map(PathBuf::from).collect();
    for page in &pages {
        let text = fs::read_to_string(root().join(page)).with_context(|| (*page).to_owned())?;
        files.extend(links(&text).filter_map(|link| resolved(Path::new(page), link)));
    }
    let source = work.join("src");
    for file in files {
        let from = root().join(&file);
        if from.is_file() {
            let to = source.join(&file);
            fs::create_dir_all(to.parent().unwrap_or(&source))?;
            fs::copy(&from, &to).with_context(|| format!("cannot copy {}", file.display()))?;
        }
    }
    for page in &pages {
        let to = source.join(page);
        let text = fs::read_to_string(&to).with_context(|| to.display().to_string())?;
        fs::write(&to, with_pages_of_the_site(&text))?;
    }
    let summary = fs::read_to_string(root().join("docs/SUMMARY.md")).context("docs/SUMMARY.md")?;
    fs::write(source.join("SUMMARY.md"), from_root(&summary))?;
    fs::copy(root().join("docs/book.toml"), work.join("book.toml")).context("docs/book.toml")?;
    run(Command::new(tool("mdbook", MDBOOK)?).arg("build").arg(&work).arg("--dest-dir").arg(folder))?;
    let broken = broken_links(folder)?;
    ensure!(broken.is_empty(), "the site has links to nothing:\n{}", broken.join("\n"));
    Ok(())
}

/// A page with the names that mdBook gives: the README is the first page, and the contents are one of its own.
fn with_pages_of_the_site(text: &str) -> String {
    text.replace("](docs/SUMMARY.md", "](toc.html").replace("](README.md", "](index.html")
}

/// The links of a built site that lead to no file, or to no heading of it.
fn broken_links(site: &Path) -> Result<Vec<String>> {
    let mut pages = BTreeMap::new();
    read_pages(site, &mut pages)?;
    let mut broken = Vec::new();
    // The page for printing has all pages at one place, so their links do not lead anywhere from there.
    for (page, text) in pages.iter().filter(|(page, _)| !page.ends_with("print.html")) {
        for link in attributes(text, "href") {
            let (path, heading) = link.split_once('#').unwrap_or((link, ""));
            if path.contains(':') {
                continue;
            }
            let target = if path.is_empty() { Some(page.clone()) } else { resolved(page, path) };
            let is_there = target.is_some_and(|target| match pages.get(&target) {
                Some(text) => heading.is_empty() || attributes(text, "id").any(|id| id == heading),
                None => site.join(target).exists(),
            });
            if !is_there {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    Ok(broken)
}

/// The HTML files below the site's folder, by path from there.
fn read_pages(site: &Path, pages: &mut BTreeMap<PathBuf, String>) -> Result<()> {
    let mut folders = vec![site.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "html") {
                let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
                pages.insert(path.strip_prefix(site)?.to_owned(), text);
            }
        }
    }
    Ok(())
}

/// The values of an attribute in a page. mdBook writes quotes around each, and escapes no character of a path.
fn attributes<'a>(html: &'a str, name: &str) -> impl Iterator<Item = &'a str> {
    let start = format!(" {name}=\"");
    let values: Vec<&str> = html.split(&start).skip(1).filter_map(|rest| rest.split('"').next()).collect();
    values.into_iter()
}

fn is_of_the_site(page: &str) -> bool {
    !page.is_empty() && page != "docs/SUMMARY.md" && (page.starts_with("docs/") || !page.contains('/'))
}

/// The contents with paths as from the root: they are written as from docs/.
fn from_root(summary: &str) -> String {
    summary.replace("](", "](docs/").replace("](docs/../", "](")
}

/// The targets of a page's links to other files.
fn links(text: &str) -> impl Iterator<Item = &str> {
    let prose = text.split("```").step_by(2);
    prose
        .flat_map(|prose| prose.split("](").skip(1))
        .filter_map(|rest| rest.split([')', '#']).next())
        .filter(|link| !link.is_empty() && !link.contains(':'))
}

/// A link of a page as a path from the root; `None` if it leaves the repository.
fn resolved(page: &Path, link: &str) -> Option<PathBuf> {
    let mut path = page.parent()?.to_owned();
    for part in link.split('/') {
        match part {
            ".." => {
                if !path.pop() {
                    return None;
                }
            }
            "." | "" => {}
            part => path.push(part),
        }
    }
    Some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_have_paths_from_the_root() {
        assert_eq!(
            from_root("[a](../README.md)\n- [b](how-to/b.md)\n"),
            "[a](README.md)\n- [b](docs/how-to/b.md)\n"
        );
    }

    #[test]
    fn links_are_paths_from_the_root() {
        let text = "[a](../install.md#x) [b](https://x.y) [c](#z)\n```\n[d](e.md)\n```\n[f](../../LICENSE)";
        let page = Path::new("docs/how-to/page.md");
        let found: Vec<PathBuf> = links(text).filter_map(|link| resolved(page, link)).collect();
        assert_eq!(found, ["docs/install.md", "LICENSE"].map(PathBuf::from));
        assert_eq!(resolved(Path::new("a.md"), "../b"), None);
    }

    #[test]
    fn links_to_nothing_are_found() {
        let site = tempfile::tempdir().unwrap();
        fs::create_dir(site.path().join("docs")).unwrap();
        let write = |page: &str, text: &str| fs::write(site.path().join(page), text).unwrap();
        write(
            "index.html",
            r##"<a href="docs/a.html#x">a</a><a href="#no">b</a><a href="https://x.y/z">c</a>"##,
        );
        write("docs/a.html", r##"<h1 id="x"><a href="../index.html">a</a><a href="../b.html">b</a></h1>"##);
        assert_eq!(broken_links(site.path()).unwrap(), ["docs/a.html: ../b.html", "index.html: #no"]);
    }
}
