//! A reader of one page: runs its commands in their order, in a folder with what a checkout has.

use std::collections::VecDeque;
use std::fs;
use std::path::Path;
use std::process::Child;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use gantry_e2e::until;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::commands::{self, Command, root};
use crate::stage::Stage;

/// The time in which a command must show what its page promises.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);

/// What a reader fills in, in the order of replacement.
const PLACEHOLDERS: [(&str, &str); 14] = [
    ("cargo run -- ", "gantry "),
    ("<registry>/gantry", "registry.example/gantry"),
    ("<node>", "node-1"),
    ("<other nodes>", "node-2"),
    ("<node with MIG>", "node-2"),
    ("<node for HAMi>", "node-1"),
    ("<node for MPS>", "node-2"),
    ("<namespace>", "research"),
    ("<namespace of Prometheus>", "monitoring"),
    ("<namespace of the proxy>", "monitoring"),
    ("<pod>", "stuck"),
    ("GPU-5ab8c0de-...", "<uuid>"),
    ("GPU-5ab8...", "<uuid>"),
    (" /etc/", " etc/"),
];

/// The page, with the commands that are left.
pub(crate) struct Reader<'a> {
    stage: &'a Stage,
    page: &'static str,
    left: VecDeque<Command>,
    filled: Vec<(&'static str, String)>,
    folder: TempDir,
}

impl<'a> Reader<'a> {
    pub(crate) fn open(stage: &'a Stage, page: &'static str) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        for name in ["charts", "manifests", "simulator"] {
            std::os::unix::fs::symlink(root().join(name), folder.path().join(name))?;
        }
        for name in [".local/bin", "etc/kubernetes", "etc/rancher/k3s"] {
            fs::create_dir_all(folder.path().join(name))?;
        }
        if let Some(config) = stage.scheduler_config() {
            fs::write(folder.path().join("etc/kubernetes/kube-scheduler-config.yaml"), config)?;
        }
        let left = commands::of_page(page)?.into_iter().filter(|command| !command.is_listed()).collect();
        Ok(Self { stage, page, left, filled: Vec::new(), folder })
    }

    /// Fills in a placeholder of this page.
    pub(crate) fn fill(&mut self, placeholder: &'static str, text: impl Into<String>) {
        self.filled.push((placeholder, text.into()));
    }

    /// Exports a variable for all commands.
    pub(crate) fn export(&self, name: &str, value: &Path) -> Result<()> {
        let output =
            self.stage.shell(self.folder.path(), &format!("export {name}='{}'", value.display())).output()?;
        ensure!(output.status.success(), "{name}");
        Ok(())
    }

    /// A file that a command has written.
    pub(crate) fn file(&self, name: &str) -> Result<String> {
        fs::read_to_string(self.folder.path().join(name)).with_context(|| format!("{}: {name}", self.page))
    }

    /// Runs the commands up to the next that begins with `start`, each once; returns what that prints.
    pub(crate) async fn run(&mut self, start: &str) -> Result<String> {
        let command = self.next(start)?;
        self.once(&command)
    }

    /// The same, but repeats the last until it succeeds and prints all of `texts`.
    pub(crate) async fn shows(&mut self, start: &str, texts: &[&str]) -> Result<String> {
        let command = self.next(start)?;
        let what = format!("{}: `{}` prints {texts:?}", command.place, command.text);
        let shown = until(what, LIMIT, async || {
            let outcome = self.once(&command).map_err(|error| format!("{error:#}"));
            match outcome {
                Ok(text) if texts.iter().all(|expected| text.contains(expected)) => Ok(text),
                Ok(other) | Err(other) => {
                    tokio::time::sleep(Duration::from_millis(500)).await;
                    Err(other)
                }
            }
        });
        Ok(shown.await?)
    }

    /// The same for a command that does not end.
    pub(crate) async fn watch(&mut self, start: &str, text: &str) -> Result<Watch> {
        let command = self.next(start)?;
        self.prepare(&command)?;
        let log = self.folder.path().join("watched");
        let script = self.filled_in(&command.text);
        let child = self
            .stage
            .shell(self.folder.path(), &script)
            .stdout(fs::File::create(&log)?)
            .spawn()
            .with_context(|| command.place.clone())?;
        let mut watch = Watch { child, log, what: format!("{}: `{}`", command.place, command.text) };
        watch.until(text).await?;
        Ok(watch)
    }

    /// Runs the other commands of the page, each once.
    pub(crate) async fn rest(&mut self) -> Result<()> {
        while let Some(command) = self.left.pop_front() {
            self.once(&command)?;
        }
        Ok(())
    }

    /// The command that begins with `start`; those before it are run.
    fn next(&mut self, start: &str) -> Result<Command> {
        let is_there = self.left.iter().any(|command| command.text.starts_with(start));
        ensure!(is_there, "{} has no `{start}` from here on: {:#?}", self.page, self.left);
        while let Some(command) = self.left.pop_front() {
            if command.text.starts_with(start) {
                return Ok(command);
            }
            self.once(&command)?;
        }
        bail!("{}: no command is left", self.page)
    }

    fn once(&self, command: &Command) -> Result<String> {
        self.prepare(command)?;
        let text = self.filled_in(&command.text);
        let output = self.stage.shell(self.folder.path(), &text).output()?;
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(output.status.success(), "{}: `{text}`: {}\n{printed}", command.place, output.status);
        Ok(printed)
    }

    /// Writes the page's last YAML block into the file that a command reads and that is not there.
    fn prepare(&self, command: &Command) -> Result<()> {
        let words: Vec<&str> = command.text.split_whitespace().collect();
        let written = words
            .windows(2)
            .filter(|pair| pair[0] != ">")
            .map(|pair| pair[1].rsplit('=').next().unwrap_or_default());
        for name in written.filter(|word| word.ends_with(".yaml") && !word.contains('/')) {
            let path = self.folder.path().join(name);
            if let (false, Some(yaml)) = (path.exists(), &command.yaml) {
                fs::write(&path, yaml)?;
            }
        }
        Ok(())
    }

    fn filled_in(&self, text: &str) -> String {
        let of_page = self.filled.iter().map(|(placeholder, text)| (*placeholder, text.as_str()));
        of_page.fold(with_placeholders(text), |text, (placeholder, value)| text.replace(placeholder, value))
    }

    /// Fails for commands that the story has left out.
    pub(crate) fn close(self) -> Result<()> {
        let left: Vec<&str> = self.left.iter().map(|command| command.place.as_str()).collect();
        ensure!(left.is_empty(), "the story leaves out {left:?}");
        Ok(())
    }
}

/// A text with [`PLACEHOLDERS`] filled in.
pub(crate) fn with_placeholders(text: &str) -> String {
    PLACEHOLDERS
        .into_iter()
        .fold(text.to_owned(), |text, (placeholder, value)| text.replace(placeholder, value))
}

/// A command that runs until this is dropped.
pub(crate) struct Watch {
    child: Child,
    log: std::path::PathBuf,
    what: String,
}

impl Watch {
    /// Waits until it has printed a text; returns all that it has printed.
    pub(crate) async fn until(&mut self, text: &str) -> Result<String> {
        let printed = until(format!("{} prints {text:?}", self.what), LIMIT, async || {
            let printed = read(&self.log);
            if printed.contains(text) { Ok(printed) } else { Err(printed) }
        });
        Ok(printed.await?)
    }
}

fn read(path: &Path) -> String {
    fs::read(path).map_or_else(|error| error.to_string(), |text| String::from_utf8_lossy(&text).into_owned())
}

impl Drop for Watch {
    fn drop(&mut self) {
        // `timeout` passes it on to the group of the command.
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        let _ = pid.map(|pid| kill_process(pid, Signal::TERM));
        let _ = self.child.wait();
    }
}
