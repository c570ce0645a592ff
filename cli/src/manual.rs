//! `gantry man`: the manual pages and the reference of the command line, one for the program and one for each command that is not hidden.

use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Args, Command};

use crate::runtime::print;
use crate::visible::Visible;

/// Options of `gantry man`.
#[derive(Debug, Clone, Args)]
pub(crate) struct ManArgs {
    /// Folder to write the pages to
    #[arg(required_unless_present = "markdown")]
    folder: Option<PathBuf>,

    /// Print the help of every command as one page of Markdown instead
    #[arg(long, conflicts_with = "folder")]
    markdown: bool,
}

const HEAD: &str = "\
# Commands and options

Made by `cargo xtask generate` from the help of the program. Do not edit. [command-line.md](command-line.md) explains what
the commands have in common.
";
/// Characters in a line of the page of Markdown.
const COLUMNS: usize = 80;

/// Writes the pages.
///
/// # Errors
/// A page cannot be written.
pub(crate) fn run(args: &ManArgs, program: Command) -> anyhow::Result<()> {
    let program = program.disable_help_subcommand(true);
    let Some(path) = &args.folder else {
        return print(&Visible::new(&markdown(program)));
    };
    let folder = path.display();
    std::fs::create_dir_all(path).with_context(|| format!("cannot create {folder}"))?;
    clap_mangen::generate_to(program, path).with_context(|| format!("cannot write the pages to {folder}"))
}

/// The help of the program and of every command that is not hidden.
fn markdown(program: Command) -> String {
    let mut program = program.term_width(COLUMNS);
    program.build();
    let mut page = HEAD.to_owned();
    section(&mut page, "gantry", &mut program);
    page
}

fn section(page: &mut String, name: &str, command: &mut Command) {
    let help = command.render_long_help().to_string();
    let help: String = help.lines().map(|line| format!("{}\n", line.trim_end())).collect();
    // A String takes every write.
    let _ = write!(page, "\n## {name}\n\n```text\n{help}```\n");
    for command in command.get_subcommands_mut().filter(|command| !command.is_hide_set()) {
        let name = format!("{name} {}", command.get_name());
        section(page, &name, command);
    }
}
