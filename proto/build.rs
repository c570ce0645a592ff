//! Turns the protocol files into Rust, in OUT_DIR, without protoc.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    const FILES: [&str; 2] = ["proto/deviceplugin_v1beta1.proto", "proto/podresources_v1.proto"];
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(FILES, ["proto"])?;
    tonic_prost_build::configure()
        // Sorted maps: equal answers are equal bytes.
        .btree_map(".")
        .emit_rerun_if_changed(false)
        .compile_fds(descriptors)?;
    Ok(())
}
