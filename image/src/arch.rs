//! The processor architectures of an image.

use std::fmt;
use std::str::FromStr;

use anyhow::{Result, bail};

/// An architecture, by the name that OCI and Debian share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Arch {
    Amd64,
    Arm64,
}

impl Arch {
    pub const ALL: [Self; 2] = [Self::Amd64, Self::Arm64];

    /// That of this program.
    ///
    /// # Errors
    /// There is no image for it.
    pub fn host() -> Result<Self> {
        match std::env::consts::ARCH {
            "x86_64" => Ok(Self::Amd64),
            "aarch64" => Ok(Self::Arm64),
            other => bail!("no image for the architecture {other}; there are amd64 and arm64"),
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    /// Debian's name of the folder of its libraries, and the prefix of its cross compiler.
    pub fn triplet(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64-linux-gnu",
            Self::Arm64 => "aarch64-linux-gnu",
        }
    }

    /// Rust's name of the target.
    pub fn target(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64-unknown-linux-gnu",
            Self::Arm64 => "aarch64-unknown-linux-gnu",
        }
    }

    /// Path of the loader that programs name.
    pub(crate) fn loader(self) -> &'static str {
        match self {
            Self::Amd64 => "/lib64/ld-linux-x86-64.so.2",
            Self::Arm64 => "/lib/ld-linux-aarch64.so.1",
        }
    }

    pub(crate) fn machine(self) -> u16 {
        match self {
            Self::Amd64 => object::elf::EM_X86_64,
            Self::Arm64 => object::elf::EM_AARCH64,
        }
    }

    pub(crate) fn oci(self) -> oci_spec::image::Arch {
        match self {
            Self::Amd64 => oci_spec::image::Arch::Amd64,
            Self::Arm64 => oci_spec::image::Arch::ARM64,
        }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Arch {
    type Err = anyhow::Error;

    fn from_str(name: &str) -> Result<Self> {
        match Self::ALL.into_iter().find(|arch| arch.name() == name) {
            Some(arch) => Ok(arch),
            None => bail!("{name:?} is not an architecture of the image; there are amd64 and arm64"),
        }
    }
}
