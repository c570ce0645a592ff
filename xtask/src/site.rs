//! The site: the pages of docs/ and of the root, and the files that they link to, as a book. Links between pages stay as
//! they are in the repository, because the source folder of the book has the same paths.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
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
    let summary = fs::read_to_string(root().join("docs/SUMMARY.md")).context("docs/SUMMARY.md")?;
    fs::write(source.join("SUMMARY.md"), from_root(&summary))?;
    fs::copy(root().join("docs/book.toml"), work.join("book.toml")).context("docs/book.toml")?;
    run(Command::new(tool("mdbook", MDBOOK)?).arg("build").arg(&work).arg("--dest-dir").arg(folder))
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
}
