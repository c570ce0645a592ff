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
    let defined = named_in(Path::new("src/abi"))?;

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

/// The words in the code of the folder `dir`, without comments: a name of NVML among them is one that it defines.
fn named_in(dir: &Path) -> Result<BTreeSet<String>, Box<dyn Error>> {
    let mut named = BTreeSet::new();
    for entry in fs::read_dir(dir)? {
        let text = fs::read_to_string(entry?.path())?;
        let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        let words = code.flat_map(|line| line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_'));
        named.extend(words.map(str::to_owned));
    }
    Ok(named)
}
