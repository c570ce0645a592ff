//! The `gantry` binary.
fn main() {}
