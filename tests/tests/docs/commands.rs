//! The commands of the pages: each `$` line of a `console` block, with its continuation lines.

use std::fs;
use std::path::PathBuf;
use std::process::Command as Process;

use anyhow::{Context, Result, ensure};
use gantry_e2e::gantry::{self, manifests};
use gantry_e2e::pages;

use crate::reader::with_placeholders;
use crate::stories::STORIES;

/// Commands that no story runs, by their beginning, with the reason. Those of `gantry` and `cargo xtask` are parsed.
const NOT_RUN: [(&str, &str); 11] = [
    ("cargo install --locked --path cli", "compiles the program for minutes; CI compiles it"),
    ("cargo xtask ci", "runs this test"),
    (
        "cargo xtask image",
        "compiles the program for minutes; the cluster here has the same image of another build",
    ),
    ("cargo build && cargo test", "measures for minutes"),
    ("ctr", "brings an image to a node; the cluster here is made by it"),
    ("gantry reset gpu", "runs the driver's nvidia-smi, which the simulated driver does not have"),
    ("kind", "needs kind, which needs a container engine"),
    ("kubectl krew", "needs krew and a release"),
    ("oc", "needs OpenShift"),
    ("podman", "needs a container engine"),
    ("skopeo", "needs a registry"),
];

/// A command of a page.
#[derive(Debug, Clone)]
pub(crate) struct Command {
    pub(crate) place: String,
    /// As the page has it, without the comment at its end.
    pub(crate) text: String,
    /// The YAML block that the page has last shown.
    pub(crate) yaml: Option<String>,
}

impl Command {
    /// Whether it is one of [`NOT_RUN`].
    pub(crate) fn is_listed(&self) -> bool {
        NOT_RUN.iter().any(|(start, _)| self.begins_with(start))
    }

    fn begins_with(&self, start: &str) -> bool {
        self.text.strip_prefix(start).is_some_and(|rest| rest.is_empty() || rest.starts_with(' '))
    }
}

/// The project's folder.
pub(crate) fn root() -> PathBuf {
    manifests().join("..")
}

/// README.md and the pages of docs/, as paths from the root.
fn all_pages() -> Result<Vec<String>> {
    let root = root();
    let mut pages = vec!["README.md".to_owned()];
    let below = pages::files(&root.join("docs"))?;
    let paths = below.iter().filter_map(|path| path.strip_prefix(&root).ok()?.to_str());
    pages.extend(paths.filter(|path| path.ends_with(".md")).map(str::to_owned));
    Ok(pages)
}

/// The commands of a page, in their order.
pub(crate) fn of_page(page: &str) -> Result<Vec<Command>> {
    let text = fs::read_to_string(root().join(page)).with_context(|| page.to_owned())?;
    let mut commands: Vec<Command> = Vec::new();
    let mut yaml = None;
    for block in pages::blocks(&text) {
        let is_console = block.language == "console";
        let mut continues = false;
        for (number, line) in block.text.lines().enumerate() {
            let place = format!("{page}:{}", block.line + 1 + number);
            if let (true, Some(command)) = (continues, commands.last_mut()) {
                command.text.push('\n');
                command.text.push_str(line);
            } else if let Some(text) = line.strip_prefix("$ ") {
                ensure!(is_console, "{place}: a command outside a `console` block");
                commands.push(Command { place, text: text.to_owned(), yaml: yaml.clone() });
            } else {
                let word = line.split(' ').next().unwrap_or_default();
                let is_command =
                    block.language.is_empty() && ["kubectl", "helm", "gantry", "cargo"].contains(&word);
                ensure!(!is_command, "{place}: a command outside a `console` block, or without `$`");
                continue;
            }
            continues = line.ends_with('\\');
        }
        if block.language == "yaml" {
            yaml = Some(block.text);
        }
    }
    for command in &mut commands {
        if let Some((text, _)) = command.text.rsplit_once("  #") {
            command.text = text.trim_end().to_owned();
        }
    }
    Ok(commands)
}

fn all() -> Result<Vec<Command>> {
    let pages = all_pages()?.into_iter().map(|page| of_page(&page)).collect::<Result<Vec<_>>>()?;
    Ok(pages.concat())
}

/// A page with a story has its commands run, because a story that leaves one out fails.
pub(crate) fn every_command_is_run_or_listed() -> Result<()> {
    let commands = all()?;
    ensure!(commands.len() > 100, "only {} commands were found", commands.len());
    let has_story = |command: &&Command| {
        STORIES.iter().any(|story| command.place.starts_with(&format!("{}:", story.page)))
    };
    let (of_stories, others): (Vec<&Command>, Vec<&Command>) = commands.iter().partition(has_story);
    let left: Vec<String> = others
        .into_iter()
        .filter(|command| !command.is_listed())
        .map(|command| format!("{}: {}", command.place, command.text))
        .collect();
    ensure!(left.is_empty(), "neither run by a story nor listed with a reason:\n{}", left.join("\n"));
    for (start, _) in NOT_RUN {
        let is_used = commands.iter().any(|command| command.begins_with(start));
        ensure!(is_used, "the list of commands that are not run has `{start}`, and no page has");
    }
    for story in &STORIES {
        let page = format!("{}:", story.page);
        let runs = of_stories.iter().any(|command| command.place.starts_with(&page) && !command.is_listed());
        ensure!(runs, "the story of {} has no command to run", story.page);
    }
    Ok(())
}

/// The command line of every `gantry` and `cargo xtask` is read by the program, with `--help` at its end so that nothing is
/// done; bash reads all the others.
pub(crate) fn listed_commands_parse() -> Result<()> {
    let gantry = gantry::binary().context("no gantry beside this test: cargo build -p gantry")?;
    let xtask = gantry.with_file_name("xtask");
    ensure!(xtask.exists(), "no xtask beside gantry: cargo build -p xtask");
    let folder = tempfile::tempdir()?;
    for command in all()?.iter().filter(|command| command.is_listed()) {
        let script = format!(
            "set -eo pipefail\n\
             command_not_found_handle() {{ return 0; }}\n\
             gantry() {{ '{}' \"$@\" --help; }}\n\
             cargo() {{ if [ \"$1\" = xtask ]; then shift; '{}' \"$@\" --help; fi; }}\n{}",
            gantry.display(),
            xtask.display(),
            with_placeholders(&command.text)
        );
        let bash = ["/bin/bash", "-c", &script];
        let output = Process::new(bash[0])
            .args(&bash[1..])
            .current_dir(&folder)
            .env("PATH", folder.path())
            .output()?;
        ensure!(
            output.status.success(),
            "{}: {}\n{}",
            command.place,
            command.text,
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(())
}
