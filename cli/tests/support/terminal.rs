//! The program in a pseudo terminal, with an emulator that has its screen.

use std::fs::File;
use std::io::{Read, Write};
use std::num::NonZeroU16;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

/// Longest time until the screen is as it should be, and until the program ends.
const LIMIT: Duration = Duration::from_secs(20);
/// Pause between two looks.
const LOOK: Duration = Duration::from_millis(20);

/// A terminal in which the program runs.
pub struct Terminal {
    /// The side of the operator.
    outside: File,
    /// Keeps the terminal after the program's end, so that its settings can be read.
    inside: File,
    program: Mutex<Child>,
    screen: Arc<Mutex<vt100::Parser>>,
    modes: LocalModes,
}

fn size((rows, columns): (u16, u16)) -> (NonZeroU16, NonZeroU16) {
    (NonZeroU16::new(rows).unwrap(), NonZeroU16::new(columns).unwrap())
}

impl Terminal {
    /// Runs `gantry` in a window of so many rows and columns.
    pub fn run(words: &[&str], window: (u16, u16)) -> Self {
        let outside = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&outside).unwrap();
        unlockpt(&outside).unwrap();
        let name = ptsname(&outside, Vec::new()).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let inside = File::from(rustix::fs::open(&name, flags, Mode::empty()).unwrap());
        let outside = File::from(outside);
        set_size(&outside, window);
        let modes = tcgetattr(&inside).unwrap().local_modes;

        // The program gets the terminal as its own: it gets the signal of a new size, and never sees that of the test.
        let mut command = Command::new("setsid");
        command.arg("--ctty").arg(env!("CARGO_BIN_EXE_gantry")).args(words).env_clear();
        command.env("TERM", "xterm-256color").envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
        let end = || Stdio::from(inside.try_clone().unwrap());
        let program = command.stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();

        let (rows, columns) = size(window);
        let screen = Arc::new(Mutex::new(vt100::Parser::new(rows, columns, 0)));
        let (drawn, mut output) = (Arc::clone(&screen), outside.try_clone().unwrap());
        std::thread::spawn(move || {
            let mut read = [0; 4096];
            // It ends when the last end inside is closed.
            while let Ok(count @ 1..) = output.read(&mut read) {
                drawn.lock().unwrap().process(&read[..count]);
            }
        });
        Self { outside, inside, program: Mutex::new(program), screen, modes }
    }

    /// Types text.
    pub fn press(&self, text: &str) {
        (&self.outside).write_all(text.as_bytes()).unwrap();
    }

    /// Changes the size of the window.
    pub fn resize(&self, window: (u16, u16)) {
        let (rows, columns) = size(window);
        self.screen.lock().unwrap().screen_mut().set_size(rows, columns);
        set_size(&self.outside, window);
    }

    /// Waits until the rows of the screen are as they should be.
    pub fn shows(&self, what: &str, is_so: impl Fn(&[String]) -> bool) {
        let began = Instant::now();
        loop {
            let lines = self.lines();
            if is_so(&lines) {
                return;
            }
            assert!(began.elapsed() < LIMIT, "{what} is not shown:\n{}", lines.join("\n"));
            std::thread::sleep(LOOK);
        }
    }

    fn lines(&self) -> Vec<String> {
        let parser = self.screen.lock().unwrap();
        let (_, columns) = parser.screen().size();
        parser.screen().rows(0, columns.get()).map(|line| line.trim_end().to_owned()).collect()
    }

    /// Whether the program has taken the whole screen, and the keys without their echo.
    pub fn is_full_screen(&self) -> bool {
        let is_raw = !self.local_modes().intersects(LocalModes::ICANON | LocalModes::ECHO);
        is_raw && self.screen.lock().unwrap().screen().alternate_screen()
    }

    fn local_modes(&self) -> LocalModes {
        tcgetattr(&self.inside).unwrap().local_modes
    }

    /// Sends SIGTERM.
    pub fn terminate(&self) {
        let program = Pid::from_child(&self.program.lock().unwrap());
        kill_process(program, Signal::TERM).unwrap();
    }

    /// Waits for the program's end, which must leave the terminal as it was, and without a message.
    pub fn ends_in_order(self) {
        let began = Instant::now();
        let ended = loop {
            if let Some(ended) = self.program.lock().unwrap().try_wait().unwrap() {
                break ended;
            }
            assert!(began.elapsed() < LIMIT, "it does not end:\n{}", self.lines().join("\n"));
            std::thread::sleep(LOOK);
        };
        assert_eq!(ended.code(), Some(0), "{}", self.lines().join("\n"));
        assert_eq!(self.local_modes(), self.modes, "the terminal's settings");
        // What it wrote last may still be on its way.
        self.shows("the empty screen of before", |lines| lines.iter().all(String::is_empty));
        let parser = self.screen.lock().unwrap();
        assert!(!parser.screen().alternate_screen() && !parser.screen().hide_cursor());
    }
}

impl Drop for Terminal {
    /// A test that failed leaves no program behind.
    fn drop(&mut self) {
        let mut program = self.program.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let _ = program.kill();
        let _ = program.wait();
    }
}

fn set_size(terminal: &File, (rows, columns): (u16, u16)) {
    let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(terminal, size).unwrap();
}
