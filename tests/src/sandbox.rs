//! One machine made of namespaces: its own mounts, network, processes and host name, and the programs that run in it.
//! Everything in it dies with its first process, so a crashed run leaves nothing that a later one cannot clean.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

use crate::error::file;
use crate::wait::until;
use crate::{Error, Result};

/// Lays down the mounts of a sandbox and then stays as its first process.
const INIT: &str = include_str!("sandbox/init.sh");
const START_LIMIT: Duration = Duration::from_secs(20);
const STOP_LIMIT: Duration = Duration::from_secs(20);
const KILL_LIMIT: Duration = Duration::from_secs(60);

/// A program to run in a sandbox.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Program {
    /// The name it is started, stopped and logged under.
    pub name: String,
    /// The executable.
    pub path: PathBuf,
    /// Its arguments.
    pub args: Vec<String>,
    /// Environment variables beyond the sandbox's own.
    pub env: BTreeMap<String, String>,
}

impl Program {
    /// A program named after nothing but its arguments.
    #[must_use]
    pub fn new(
        name: &str,
        path: impl Into<PathBuf>,
        args: impl IntoIterator<Item = impl Into<String>>,
    ) -> Self {
        Self {
            name: name.to_owned(),
            path: path.into(),
            args: args.into_iter().map(Into::into).collect(),
            env: BTreeMap::new(),
        }
    }

    /// The same with an environment variable set.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl Into<String>) -> Self {
        self.env.insert(name.to_owned(), value.into());
        self
    }
}

/// A running or ended program of a sandbox.
#[derive(Debug, Clone)]
pub struct Daemon {
    name: String,
    log: PathBuf,
    process: Process,
}

impl Daemon {
    /// The file with everything the program wrote, over all its starts.
    #[must_use]
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Whether it still runs.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.process.is_running()
    }

    /// The process id, as this machine (not the sandbox) counts.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.process.pid
    }

    /// Ends it at once (KILL) and waits until it is gone.
    ///
    /// # Errors
    /// It does not go.
    pub async fn kill(&self) -> Result<()> {
        self.process.end(&self.name, Signal::KILL, KILL_LIMIT).await
    }

    /// Asks it to end (TERM), and kills it if it has not ended in the time that service managers give.
    ///
    /// # Errors
    /// It does not go.
    pub async fn stop(&self) -> Result<()> {
        match self.process.end(&self.name, Signal::TERM, STOP_LIMIT).await {
            Err(Error::Timeout { .. }) => self.kill().await,
            outcome => outcome,
        }
    }

    /// Errors with the end of the log when the program has ended.
    ///
    /// # Errors
    /// [`Error::Ended`].
    pub fn check(&self) -> Result<()> {
        if self.is_running() {
            return Ok(());
        }
        Err(Error::Ended { name: self.name.clone(), log: self.log.clone(), tail: tail(&self.log) })
    }
}

/// A machine made of namespaces.
#[derive(Debug, Clone)]
pub struct Sandbox {
    name: String,
    folder: PathBuf,
    path: String,
    init: Process,
}

/// What a later process needs to find a sandbox again.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    holder: Process,
    init: Process,
    path: String,
}

/// What a later process needs to find or restart a program.
#[derive(Debug, Serialize, Deserialize)]
struct ProgramRecord {
    process: Process,
    program: Program,
}

impl Sandbox {
    /// Makes the namespaces and mounts. `folder` holds everything the sandbox writes; its last part is the host name.
    /// `path` is the search path for programs within.
    ///
    /// # Errors
    /// The kernel refuses a namespace or a mount.
    pub async fn start(folder: &Path, path: &str) -> Result<Self> {
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        for part in ["log", "run"] {
            fs::create_dir_all(folder.join(part)).map_err(file("create", folder))?;
        }
        let script = folder.join("init.sh");
        fs::write(&script, INIT).map_err(file("write", &script))?;
        let log = folder.join("log/init.log");
        let ready = folder.join("run/ready");
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"])
            .args(["--propagation", "private", "--", "/bin/sh", "-eu"])
            .arg(&script)
            .env_clear()
            .envs([("PATH", path), ("NAME", &name)])
            .env("FOLDER", folder);
        let holder = launch(command, &log)?;
        let init = until(format!("namespaces of {name}"), START_LIMIT, async || {
            if !holder.is_running() {
                return Err(format!("it ended: {}", tail(&log)));
            }
            if ready.exists() { holder.child() } else { Err("mounts not laid down yet".to_owned()) }
        })
        .await?;
        let record = Record { holder, init, path: path.to_owned() };
        write_json(&folder.join("sandbox.json"), &record)?;
        Ok(Self { name, folder: folder.to_path_buf(), path: path.to_owned(), init })
    }

    /// Finds a sandbox that another process started.
    ///
    /// # Errors
    /// There is none in the folder, or it has ended.
    pub fn attach(folder: &Path) -> Result<Self> {
        let record: Record = read_json(&folder.join("sandbox.json"))?;
        if !record.init.is_running() {
            return Err(Error::NoCluster(folder.to_path_buf()));
        }
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Self { name, folder: folder.to_path_buf(), path: record.path, init: record.init })
    }

    /// Ends everything in the sandbox of that folder, if there is one.
    pub(crate) async fn end(folder: &Path) -> Result<()> {
        let Ok(record) = read_json::<Record>(&folder.join("sandbox.json")) else {
            return Ok(());
        };
        let name = folder.display().to_string();
        record.init.end(&name, Signal::KILL, KILL_LIMIT).await?;
        record.holder.end(&name, Signal::KILL, KILL_LIMIT).await
    }

    /// The sandbox's name, which is its host name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The folder with all files of the sandbox.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The process id of the sandbox's first process, as this machine counts.
    #[must_use]
    pub fn init_pid(&self) -> i32 {
        self.init.pid
    }

    /// A file or folder of the sandbox's own `/`, seen from outside.
    #[must_use]
    pub fn file(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        let inner = path.strip_prefix("/").unwrap_or(path);
        PathBuf::from(format!("/proc/{}/root", self.init.pid)).join(inner)
    }

    /// Runs a command in the sandbox to its end and returns what it wrote to standard output.
    ///
    /// # Errors
    /// [`Error::Command`] when it fails.
    pub async fn exec(&self, argv: &[&str]) -> Result<String> {
        self.exec_with_input(argv, "").await
    }

    /// The same with a text on standard input.
    ///
    /// # Errors
    /// [`Error::Command`] when it fails.
    pub async fn exec_with_input(&self, argv: &[&str], input: &str) -> Result<String> {
        let mut command = self.enter();
        command
            .args(argv)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        output_of(command, &argv.join(" "), input).await
    }

    /// Starts a long-running program, or starts it again.
    ///
    /// # Errors
    /// It cannot be started.
    pub async fn run(&self, program: Program) -> Result<Daemon> {
        let log = self.log(&program.name);
        let mut command = self.enter();
        command.arg(&program.path).args(&program.args).envs(&program.env);
        let entered = launch(command, &log)?;
        // nsenter forks to get into the process namespace; its child is the program.
        let process = until(format!("start of {}", program.name), START_LIMIT, async || {
            if !entered.is_running() {
                return Err(tail(&log));
            }
            entered.child()
        })
        .await?;
        let name = program.name.clone();
        write_json(&self.program_record(&name), &ProgramRecord { process, program })?;
        Ok(Daemon { name, log, process })
    }

    /// A program that was started here before.
    ///
    /// # Errors
    /// [`Error::UnknownProgram`] with the names there are.
    pub fn daemon(&self, name: &str) -> Result<Daemon> {
        let record = self.record_of(name)?;
        Ok(Daemon { name: name.to_owned(), log: self.log(name), process: record.process })
    }

    /// Starts a program again as it was started before.
    ///
    /// # Errors
    /// It is unknown or cannot be started.
    pub async fn run_again(&self, name: &str) -> Result<Daemon> {
        let record = self.record_of(name)?;
        self.run(record.program).await
    }

    /// How a program was started last.
    ///
    /// # Errors
    /// [`Error::UnknownProgram`] with the names there are.
    pub fn program(&self, name: &str) -> Result<Program> {
        Ok(self.record_of(name)?.program)
    }

    /// Forgets a program that has ended, so that it is not restarted.
    ///
    /// # Errors
    /// Its record cannot be removed.
    pub fn forget(&self, name: &str) -> Result<()> {
        let record = self.program_record(name);
        fs::remove_file(&record).map_err(file("remove", &record))
    }

    /// The names of all programs started here, ended ones included.
    #[must_use]
    pub fn programs(&self) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.folder.join("run")) else {
            return Vec::new();
        };
        let mut names: Vec<String> = entries
            .filter_map(|entry| Some(entry.ok()?.file_name().to_str()?.strip_suffix(".json")?.to_owned()))
            .collect();
        names.sort();
        names
    }

    fn record_of(&self, name: &str) -> Result<ProgramRecord> {
        read_json(&self.program_record(name)).map_err(|_| Error::UnknownProgram {
            name: name.to_owned(),
            sandbox: self.name.clone(),
            known: self.programs().join(", "),
        })
    }

    fn program_record(&self, name: &str) -> PathBuf {
        self.folder.join(format!("run/{name}.json"))
    }

    fn log(&self, name: &str) -> PathBuf {
        self.folder.join(format!("log/{name}.log"))
    }

    fn enter(&self) -> Command {
        let mut command = Command::new("nsenter");
        command
            .args(["--target", &self.init.pid.to_string()])
            .args(["--mount", "--uts", "--ipc", "--net", "--pid", "--"])
            .env_clear()
            .envs([("PATH", self.path.as_str()), ("HOME", "/root"), ("LANG", "C")]);
        command
    }
}

/// Runs a command of this machine (not of a sandbox) to its end.
pub(crate) async fn host_command(argv: &[&str]) -> Result<String> {
    let (program, args) = argv.split_first().map_or(("true", argv), |(first, rest)| (*first, rest));
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    output_of(command, &argv.join(" "), "").await
}

async fn output_of(mut command: Command, line: &str, input: &str) -> Result<String> {
    let start = |source| Error::Start { program: line.to_owned(), source };
    let mut child = command.spawn().map_err(start)?;
    if let Some(mut stdin) = child.stdin.take() {
        // A command that reads nothing closes the pipe; that is no failure of it.
        let _ = stdin.write_all(input.as_bytes()).await;
    }
    let output = child.wait_with_output().await.map_err(start)?;
    if !output.status.success() {
        return Err(Error::Command {
            command: line.to_owned(),
            status: output.status,
            stderr: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        });
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Starts a process that outlives this one, with its output appended to a log.
pub(crate) fn launch(mut command: Command, log: &Path) -> Result<Process> {
    let open = || File::options().create(true).append(true).open(log).map_err(file("open", log));
    let program = command.as_std().get_program().to_string_lossy().into_owned();
    let child = command
        .stdin(Stdio::null())
        .stdout(open()?)
        .stderr(open()?)
        .process_group(0)
        .spawn()
        .map_err(|source| Error::Start { program: program.clone(), source })?;
    let pid = child.id().and_then(|id| i32::try_from(id).ok()).unwrap_or_default();
    Process::of(pid).ok_or_else(|| Error::Ended { name: program, log: log.to_path_buf(), tail: tail(log) })
}

/// A process of this machine, distinguished from a later one with the same id by its start time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Process {
    pid: i32,
    /// Clock ticks since the machine's boot.
    started: u64,
}

impl Process {
    fn of(pid: i32) -> Option<Self> {
        let (_, started) = stat(pid)?;
        Some(Self { pid, started })
    }

    pub(crate) fn is_running(&self) -> bool {
        match stat(self.pid) {
            // A killed process is a zombie as soon as its first thread is gone; the others may still hold its sockets.
            Some(('Z', started)) => started == self.started && threads(self.pid) > 1,
            Some((_, started)) => started == self.started,
            None => false,
        }
    }

    /// Its only child.
    fn child(&self) -> std::result::Result<Self, String> {
        let path = format!("/proc/{0}/task/{0}/children", self.pid);
        let children = fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
        let first = children.split_whitespace().next().and_then(|pid| pid.parse().ok());
        first.and_then(Self::of).ok_or_else(|| format!("process {} has no child yet", self.pid))
    }

    pub(crate) async fn end(&self, name: &str, signal: Signal, limit: Duration) -> Result<()> {
        if let (true, Some(pid)) = (self.is_running(), Pid::from_raw(self.pid)) {
            let _ = kill_process(pid, signal);
        }
        until(
            format!("end of {name}"),
            limit,
            async || {
                if self.is_running() { Err("it still runs") } else { Ok(()) }
            },
        )
        .await
    }
}

/// A process's state letter and start time.
fn stat(pid: i32) -> Option<(char, u64)> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The program's name is in parentheses and may hold anything: count from its end.
    let (_, rest) = text.rsplit_once(')')?;
    let mut fields = rest.split_whitespace();
    let state = fields.next()?.chars().next()?;
    let started = fields.nth(18)?.parse().ok()?;
    Some((state, started))
}

fn threads(pid: i32) -> usize {
    fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count)
}

/// The last lines of a log.
pub(crate) fn tail(log: &Path) -> String {
    let text = fs::read(log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(12)..].join("\n")
}

fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_vec_pretty(value)
        .map_err(|source| Error::Json { path: path.to_path_buf(), source })?;
    fs::write(path, text).map_err(file("write", path))
}

fn read_json<T: for<'a> Deserialize<'a>>(path: &Path) -> Result<T> {
    let bytes = fs::read(path).map_err(file("read", path))?;
    serde_json::from_slice(&bytes).map_err(|source| Error::Json { path: path.to_path_buf(), source })
}
