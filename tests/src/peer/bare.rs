//! A minimal device plugin on grpc-go with precomputed replies: a lower bound for every plugin in Go. Built once per
//! state of `components/bare`, whose go.mod contains the versions.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

use crate::components::{self, GO_ENV, MODULES};

const MODULE: &str = "bare";

/// The program, made first where it is missing.
///
/// # Errors
/// There is no Go, or it does not build.
pub(super) fn locate_or_build() -> Result<PathBuf> {
    let folder = Path::new(MODULES).join(MODULE);
    let cache = components::cache_root();
    let program = cache.join(format!("{MODULE}-{}", key(&folder)?));
    if program.exists() {
        return Ok(program);
    }
    fs::create_dir_all(&cache).with_context(|| format!("cannot create {}", cache.display()))?;
    let lock = File::create(cache.join("components.lock"))?;
    lock.lock()?;
    if !program.exists() {
        let part = program.with_extension("part");
        let mut go = Command::new("go");
        go.current_dir(&folder)
            .envs(GO_ENV)
            .args(["build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w", "-o"])
            .arg(&part)
            .arg(".");
        components::run(go)?;
        fs::rename(&part, &program)?;
    }
    Ok(program)
}

/// A name for everything that decides what is built.
fn key(folder: &Path) -> Result<String> {
    let mut hash = Sha256::new();
    for name in ["go.mod", "go.sum", "main.go"] {
        let path = folder.join(name);
        hash.update(fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?);
    }
    hash.update(format!("{GO_ENV:?}"));
    hash.update(components::go_release()?);
    let digest = hash.finalize();
    Ok(digest.iter().take(6).map(|byte| format!("{byte:02x}")).collect())
}
