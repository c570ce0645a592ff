//! A minimal device plugin on grpc-go with precomputed replies: a lower bound for every plugin in Go. Built once per
//! state of `components/bare`, whose go.mod contains the versions.

use std::path::PathBuf;

use crate::Result;
use crate::components;

/// The program, made first where it is missing.
///
/// # Errors
/// There is no Go, or it does not build.
pub(super) fn locate_or_build() -> Result<PathBuf> {
    components::program("bare", ".", "", &["go.mod", "go.sum", "main.go"])
}
