//! How the program is linked.

fn main() {
    // At a fixed address, as Go's programs are. One that may lie anywhere has half a megabyte of constants that its loader writes addresses
    // into at every start: time before kubelet can be told, and memory that is the process's own from then on. Heap, stack and libraries lie
    // at random addresses all the same.
    let is_target = |name, value: &str| std::env::var(name).is_ok_and(|is| is == value);
    if is_target("CARGO_CFG_TARGET_OS", "linux") && is_target("CARGO_CFG_TARGET_ENV", "gnu") {
        println!("cargo:rustc-link-arg-bins=-no-pie");
    }
    println!("cargo:rerun-if-changed=build.rs");
}
