//! Tools that are not part of the toolchain: pinned versions, installed once into a cache folder.

use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::run::{cargo, run};

/// The version of cargo-deny that checks licences and bans.
const CARGO_DENY: &str = "0.20.2";

/// Where built tools are kept between runs: `$GANTRY_CACHE` or `~/.cache/gantry`.
pub(crate) fn cache() -> Result<PathBuf> {
    if let Some(folder) = std::env::var_os("GANTRY_CACHE") {
        return Ok(folder.into());
    }
    let home = std::env::var_os("HOME").context("neither GANTRY_CACHE nor HOME is set")?;
    Ok(PathBuf::from(home).join(".cache/gantry"))
}

/// Path of cargo-deny, installed if it is not there yet.
pub(crate) fn cargo_deny() -> Result<PathBuf> {
    let folder = cache()?.join("tools").join(format!("cargo-deny-{CARGO_DENY}"));
    let program = folder.join("bin/cargo-deny");
    if !program.exists() {
        let folder = folder.to_str().context("the cache folder's path is not UTF-8")?;
        run(&mut cargo(&[
            "install",
            "cargo-deny",
            "--locked",
            "--version",
            CARGO_DENY,
            "--root",
            folder,
        ]))?;
    }
    Ok(program)
}
