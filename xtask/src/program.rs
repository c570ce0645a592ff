//! The program as it is shipped: without simulators, and without the paths of this machine. Off Linux it has the commands
//! that need no node.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};
use gantry_image::Arch;

use crate::ci::tool;
use crate::run::{cargo, output, root, run, target};

/// Links for macOS without Apple's tools.
const ZIGBUILD: &str = "0.24.1";
/// Links for Windows.
const MINGW: &str = "x86_64-w64-mingw32-gcc";

/// What a program is built for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Platform {
    Linux(Arch),
    Macos(Arch),
    /// On amd64; Windows runs it on arm64 too.
    Windows,
}

impl Platform {
    /// Those of a release.
    pub(crate) const ALL: [Self; 5] = [
        Self::Linux(Arch::Amd64),
        Self::Linux(Arch::Arm64),
        Self::Macos(Arch::Amd64),
        Self::Macos(Arch::Arm64),
        Self::Windows,
    ];

    /// Kubernetes' name of the operating system.
    pub(crate) fn os(self) -> &'static str {
        match self {
            Self::Linux(_) => "linux",
            Self::Macos(_) => "darwin",
            Self::Windows => "windows",
        }
    }

    pub(crate) fn arch(self) -> Arch {
        match self {
            Self::Linux(arch) | Self::Macos(arch) => arch,
            Self::Windows => Arch::Amd64,
        }
    }

    /// The end of a program's name.
    pub(crate) fn suffix(self) -> &'static str {
        if self == Self::Windows { ".exe" } else { "" }
    }

    /// Rust's name of the target.
    fn target(self) -> &'static str {
        match self {
            Self::Linux(arch) => arch.target(),
            Self::Macos(Arch::Amd64) => "x86_64-apple-darwin",
            Self::Macos(Arch::Arm64) => "aarch64-apple-darwin",
            Self::Windows => "x86_64-pc-windows-gnu",
        }
    }

    /// The compiler that links for another platform than this one, and the Debian package that has it.
    fn linker(self) -> Option<(String, String)> {
        match self {
            Self::Linux(arch) => Some((format!("{}-gcc", arch.triplet()), format!("gcc-{}", arch.triplet()))),
            Self::Macos(_) => None,
            Self::Windows => Some((MINGW.to_owned(), "gcc-mingw-w64-x86-64".to_owned())),
        }
    }
}

/// Builds the program, and returns its path.
pub(crate) fn build(platform: Platform) -> Result<PathBuf> {
    let triple = platform.target();
    let is_foreign = platform != Platform::Linux(Arch::host()?);
    if is_foreign {
        run(Command::new("rustup").args(["target", "add", triple]))?;
    }
    let words = ["--release", "--locked", "--package", "gantry", "--no-default-features", "--target", triple];
    let mut command = match platform {
        Platform::Macos(_) => zigbuild()?,
        Platform::Linux(_) | Platform::Windows => cargo(&["build"]),
    };
    command.args(words);
    if is_foreign && let Some((linker, package)) = platform.linker() {
        if !runs(&linker, "--version") {
            bail!("no {linker}, which links programs for {triple}: apt-get install {package}");
        }
        command.env(format!("CARGO_TARGET_{}_LINKER", triple.replace('-', "_").to_uppercase()), linker);
    }
    let folder = target()?.join("image");
    command.arg("--target-dir").arg(&folder);
    let renamed = renamed()?;
    let map = |flag: &str| {
        let flags = renamed.iter().map(|(path, name)| format!("{flag}={}={name}", path.display()));
        flags.collect::<Vec<_>>().join(" ")
    };
    command.env("RUSTFLAGS", map("--remap-path-prefix"));
    command.env(format!("CFLAGS_{}", triple.replace('-', "_")), map("-ffile-prefix-map"));
    if let Some(commit) = revision() {
        command.env("GANTRY_COMMIT", commit);
    }
    run(&mut command)?;
    Ok(folder.join(triple).join("release").join(format!("gantry{}", platform.suffix())))
}

/// `cargo zigbuild`, which is installed; zig itself is a package of Python.
fn zigbuild() -> Result<Command> {
    let is_there = runs("zig", "version")
        || Command::new("python3")
            .args(["-m", "ziglang", "version"])
            .output()
            .is_ok_and(|found| found.status.success());
    if !is_there {
        bail!("no zig, which links programs for macOS: pip install ziglang");
    }
    let mut command = Command::new(tool("cargo-zigbuild", ZIGBUILD)?);
    command.arg("zigbuild").current_dir(root());
    Ok(command)
}

fn runs(program: &str, argument: &str) -> bool {
    Command::new(program).arg(argument).output().is_ok_and(|output| output.status.success())
}

/// Folders of this machine, and their names in the program.
fn renamed() -> Result<[(PathBuf, &'static str); 2]> {
    let home =
        std::env::var("CARGO_HOME").or_else(|_| std::env::var("HOME").map(|home| format!("{home}/.cargo")));
    let crates = PathBuf::from(home.context("neither CARGO_HOME nor HOME is set")?).join("registry/src");
    Ok([(root(), "gantry"), (crates, "crates")])
}

/// The commit, if this is a repository.
pub(crate) fn revision() -> Option<String> {
    let commit = output(Command::new("git").current_dir(root()).args(["rev-parse", "HEAD"])).ok()?;
    Some(commit.trim().to_owned())
}
