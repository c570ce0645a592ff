//! How the program is linked.

fn main() {
    // Twenty thousand relocations in a tenth of the space (RELR): as many pages less to read at each start. glibc 2.36 and
    // later understand it.
    println!("cargo:rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    println!("cargo:rerun-if-changed=build.rs");
}
