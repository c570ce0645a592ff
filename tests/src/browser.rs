//! A real headless Chromium, driven by the DevTools protocol over its pipe: no port, and no WebSocket.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use base64::Engine as _;
use serde_json::{Value, json};

use crate::Unsupported;
use crate::host::install;

/// Names of the program, the smallest package first.
const PROGRAMS: [&str; 4] = ["chromium-headless-shell", "chromium", "google-chrome", "chromium-browser"];
/// The Debian package that is installed where there is none.
const PACKAGE: &str = "chromium-headless-shell";
/// Longest time for one command.
const COMMAND: Duration = Duration::from_secs(20);
/// Complaints that are kept: the first ones matter most.
const COMPLAINTS: usize = 20;
/// Longest time to end.
const END: Duration = Duration::from_secs(3);
/// Time between two looks at a condition.
const LOOK: Duration = Duration::from_millis(30);

/// The program: `$GANTRY_CHROMIUM`, or one of the machine's, or else the Debian package, which is installed.
///
/// # Errors
/// There is none, and it cannot be installed: why.
pub fn chromium() -> std::result::Result<PathBuf, Unsupported> {
    if let Some(named) = std::env::var_os("GANTRY_CHROMIUM") {
        return Ok(named.into());
    }
    if let Some(found) = installed() {
        return Ok(found);
    }
    if !rustix::process::geteuid().is_root() || !Path::new("/usr/bin/apt-get").exists() {
        return Err(Unsupported("no Chromium, and no root with apt-get to install it".to_owned()));
    }
    install(&[PACKAGE]).map_err(|error| Unsupported(format!("Chromium cannot be installed: {error}")))?;
    installed().ok_or_else(|| Unsupported(format!("package {PACKAGE} has no program of its name")))
}

fn installed() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    PROGRAMS
        .iter()
        .find_map(|name| folders.iter().map(|folder| folder.join(name)).find(|file| file.is_file()))
}

/// A browser with one page.
#[derive(Debug)]
pub struct Browser {
    child: Child,
    /// `None` while it ends.
    commands: Option<ChildStdin>,
    messages: Receiver<Value>,
    session: String,
    next: u64,
    /// What the page wrote to its console, and violations of its policy.
    complaints: Vec<String>,
}

impl Browser {
    /// Starts it with an empty page. `folder` holds its profile.
    ///
    /// # Errors
    /// It does not start.
    pub fn start(program: &Path, folder: &Path) -> Result<Self> {
        let mut child = Command::new("/bin/sh")
            // The protocol is spoken on descriptors 3 and 4.
            .args(["-c", "exec \"$@\" 3<&0 4>&1 0</dev/null 1>&2", "sh"])
            .arg(program)
            .args(["--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu"])
            .args([
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--hide-scrollbars",
                "--window-size=1280,900",
            ])
            .arg(format!("--user-data-dir={}", folder.display()))
            .env("HOME", folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("starting {}", program.display()))?;
        let commands = child.stdin.take();
        let output = child.stdout.take().context("no pipe from the browser")?;
        let (send, messages) = channel();
        thread::spawn(move || {
            for message in BufReader::new(output).split(0).map_while(std::result::Result::ok) {
                let Ok(message) = serde_json::from_slice(&message) else {
                    continue;
                };
                if send.send(message).is_err() {
                    return;
                }
            }
        });
        let (session, complaints) = (String::new(), Vec::new());
        let mut browser = Self { child, commands, messages, session, next: 0, complaints };
        let target = browser.command("Target.createTarget", &json!({"url": "about:blank"}))?;
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        let attached = browser.command("Target.attachToTarget", &attach)?;
        browser.session = attached["sessionId"].as_str().context("no session")?.to_owned();
        for domain in ["Page", "Runtime", "Log", "Accessibility"] {
            browser.command(&format!("{domain}.enable"), &json!({}))?;
        }
        Ok(browser)
    }

    /// Sends a command of the protocol and returns its result.
    ///
    /// # Errors
    /// The browser refuses it, or does not respond in time.
    pub fn command(&mut self, method: &str, parameters: &Value) -> Result<Value> {
        self.next += 1;
        let id = self.next;
        let mut message = json!({"id": id, "method": method, "params": parameters});
        if !self.session.is_empty() {
            message["sessionId"] = self.session.as_str().into();
        }
        let mut bytes = serde_json::to_vec(&message)?;
        bytes.push(0);
        let commands = self.commands.as_mut().context("no pipe to the browser")?;
        commands.write_all(&bytes).context("writing to the browser")?;
        commands.flush()?;
        let deadline = Instant::now() + COMMAND;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let message = self
                .messages
                .recv_timeout(left)
                .map_err(|error| anyhow!("{method}: no response: {error}"))?;
            if message["id"] == id {
                ensure!(message["error"].is_null(), "{method}: {}", message["error"]);
                return Ok(message["result"].clone());
            }
            self.record(&message);
        }
    }

    fn record(&mut self, message: &Value) {
        let complaint = match message["method"].as_str() {
            Some("Runtime.exceptionThrown") => message["params"]["exceptionDetails"].to_string(),
            Some("Log.entryAdded") => message["params"]["entry"].to_string(),
            Some("Runtime.consoleAPICalled") => message["params"]["args"].to_string(),
            _ => return,
        };
        self.complaints.push(complaint);
        self.complaints.truncate(COMPLAINTS);
    }

    /// Takes what the page complained of so far: exceptions, console, failed requests, violations of its policy.
    pub fn take_complaints(&mut self) -> Vec<String> {
        std::mem::take(&mut self.complaints)
    }

    /// Opens an address.
    ///
    /// # Errors
    /// It cannot be loaded.
    pub fn open(&mut self, url: &str) -> Result<()> {
        // A new document even if only the fragment differs.
        self.command("Page.navigate", &json!({"url": "about:blank"}))?;
        let navigated = self.command("Page.navigate", &json!({"url": url}))?;
        ensure!(navigated["errorText"].is_null(), "{url}: {}", navigated["errorText"]);
        Ok(())
    }

    /// The value of an expression in the page.
    ///
    /// # Errors
    /// It throws.
    pub fn evaluate(&mut self, expression: &str) -> Result<Value> {
        let parameters = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let evaluated = self.command("Runtime.evaluate", &parameters)?;
        let thrown = &evaluated["exceptionDetails"];
        ensure!(thrown.is_null(), "{expression}: {}", thrown["exception"]["description"]);
        Ok(evaluated["result"]["value"].clone())
    }

    /// Waits until an expression is true, and returns its value.
    ///
    /// # Errors
    /// It is not in time; with the text of the page.
    pub fn wait(&mut self, expression: &str, limit: Duration) -> Result<Value> {
        let begin = Instant::now();
        loop {
            // While a document is replaced, there is none.
            let value = self.evaluate(expression);
            match value {
                Ok(value) if !matches!(value, Value::Null | Value::Bool(false)) => return Ok(value),
                _ if begin.elapsed() < limit => thread::sleep(LOOK),
                value => {
                    let page = self.evaluate("document.body.innerText.slice(0, 2000)")?;
                    let complaints = self.take_complaints();
                    bail!(
                        "{expression} is {value:?} after {limit:?}; page: {page}; complaints: {complaints:?}"
                    );
                }
            }
        }
    }

    /// Clicks the middle of the element of a selector with the mouse.
    ///
    /// # Errors
    /// There is no such element, or another one covers it.
    pub fn click(&mut self, selector: &str) -> Result<()> {
        let selector = serde_json::to_string(selector)?;
        let place = self.evaluate(&format!(
            "(() => {{ const found = document.querySelector({selector}); if (!found) return null;
              found.scrollIntoView({{block: 'center'}}); const box = found.getClientRects()[0];
              const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
              return found.contains(document.elementFromPoint(x, y)) ? {{x, y}} : null; }})()"
        ))?;
        ensure!(!place.is_null(), "{selector} is not there, or covered");
        for kind in ["mousePressed", "mouseReleased"] {
            let (x, y) = (&place["x"], &place["y"]);
            let event = json!({"type": kind, "x": x, "y": y, "button": "left", "clickCount": 1});
            self.command("Input.dispatchMouseEvent", &event)?;
        }
        Ok(())
    }

    /// Presses a key: `Tab`, `Enter`, `Escape`, or a space.
    ///
    /// # Errors
    /// The browser does not respond.
    pub fn press(&mut self, key: &str) -> Result<()> {
        let (code, text) = match key {
            "Tab" => (9, ""),
            "Enter" => (13, "\r"),
            "Escape" => (27, ""),
            " " => (32, " "),
            other => bail!("key {other:?} is not known here"),
        };
        let down = if text.is_empty() { "rawKeyDown" } else { "keyDown" };
        for kind in [down, "keyUp"] {
            let mut event = json!({"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code});
            if kind == "keyDown" {
                event["text"] = text.into();
            }
            self.command("Input.dispatchKeyEvent", &event)?;
        }
        Ok(())
    }

    /// Types text.
    ///
    /// # Errors
    /// The browser does not respond.
    pub fn write(&mut self, text: &str) -> Result<()> {
        self.command("Input.insertText", &json!({"text": text})).map(drop)
    }

    /// Writes a picture of what the window shows.
    ///
    /// # Errors
    /// It cannot be taken or written.
    pub fn screenshot(&mut self, path: &Path) -> Result<()> {
        let shot = self.command("Page.captureScreenshot", &json!({"format": "png"}))?;
        let data = shot["data"].as_str().context("no picture")?;
        let bytes = base64::engine::general_purpose::STANDARD.decode(data)?;
        std::fs::write(path, bytes).with_context(|| format!("writing {}", path.display()))
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // It ends with its pipe, and its own children with it. A hanging one is killed.
        self.commands = None;
        let begin = Instant::now();
        while begin.elapsed() < END && matches!(self.child.try_wait(), Ok(None)) {
            thread::sleep(LOOK);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
