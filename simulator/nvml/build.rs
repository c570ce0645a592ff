//! Names the shared library and writes what follows from the list of NVML's names: the table of names, and a function that
//! answers "not supported" for each one that `src/abi` does not define.

use std::collections::BTreeSet;
use std::error::Error;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnvidia-ml.so.1");
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=names.txt");
    println!("cargo:rerun-if-changed=src/abi");

    let names = fs::read_to_string("names.txt")?;
    let names: BTreeSet<&str> = names.lines().filter(|line| !line.is_empty()).collect();
    let defined = defined_in(Path::new("src/abi"))?;
    if let Some(unknown) = defined.iter().find(|name| !names.contains(name.as_str())) {
        return Err(format!("src/abi defines {unknown}, which names.txt does not list").into());
    }

    let mut table =
        format!("/// Every function of NVML, sorted.\npub const NAMES: [&str; {}] = [\n", names.len());
    let mut stubs = String::new();
    for (slot, name) in names.iter().enumerate() {
        writeln!(table, "    {name:?},")?;
        if !defined.contains(*name) {
            writeln!(
                stubs,
                "/// Not simulated: answers that it is not supported.\n#[unsafe(no_mangle)]\n\
                 pub extern \"C\" fn {name}() -> nvml_wrapper_sys::bindings::nvmlReturn_t {{\n    \
                 crate::abi::call::not_simulated({slot})\n}}"
            )?;
        }
    }
    table.push_str("];\n");

    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("names.rs"), table)?;
    fs::write(out.join("stubs.rs"), stubs)?;
    Ok(())
}

/// The NVML functions that the sources of `dir` define: every `fn nvml...(`.
fn defined_in(dir: &Path) -> Result<BTreeSet<String>, Box<dyn Error>> {
    let mut defined = BTreeSet::new();
    for entry in fs::read_dir(dir)? {
        let text = fs::read_to_string(entry?.path())?;
        for after in text.split("fn nvml").skip(1) {
            let tail: String = after.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
            if after[tail.len()..].starts_with('(') {
                defined.insert(format!("nvml{tail}"));
            }
        }
    }
    Ok(defined)
}
