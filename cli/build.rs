//! How the program is linked.

use std::env;
use std::path::Path;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=order.ld");
    println!("cargo:rerun-if-env-changed={SYMBOLS}");
    let is_target = |name, value: &str| env::var(name).is_ok_and(|is| is == value);
    if !(is_target("CARGO_CFG_TARGET_OS", "linux") && is_target("CARGO_CFG_TARGET_ENV", "gnu")) {
        return;
    }
    // At a fixed address, as Go's programs are. One that may lie anywhere has half a megabyte of constants that its loader writes addresses
    // into at every start: time before kubelet can be told, and memory that is the process's own from then on. Heap, stack and libraries
    // lie at random addresses all the same.
    println!("cargo:rustc-link-arg-bins=-no-pie");
    // What a plugin runs lies together: the kernel maps sixteen pages around each that is touched, and a resident program counts for them.
    // The names are those of one kind of machine; another linker than Rust's own may not understand the file.
    let order = Path::new(&env::var("CARGO_MANIFEST_DIR").unwrap_or_default()).join("order.ld");
    if is_target("PROFILE", "release")
        && is_target("CARGO_CFG_TARGET_ARCH", "x86_64")
        && !has_a_linker_of_choice()
    {
        println!("cargo:rustc-link-arg-bins=-Wl,-T,{}", order.display());
    }
    // `cargo xtask order` wants names of functions. Another `strip` in the profile would give every function another name.
    if env::var_os(SYMBOLS).is_some() {
        println!("cargo:rustc-link-arg-bins=-Wl,--strip-debug");
    }
}

/// Set where the program is to keep its symbols.
const SYMBOLS: &str = "GANTRY_KEEP_SYMBOLS";

/// Whether somebody has chosen another linker.
fn has_a_linker_of_choice() -> bool {
    let flags = env::var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default();
    env::var_os("RUSTC_LINKER").is_some() || ["linker", "fuse-ld"].iter().any(|word| flags.contains(word))
}
