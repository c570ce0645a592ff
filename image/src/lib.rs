//! Container images as OCI archives, put together without a container engine and without a shell.
//!
//! [`gantry`] makes the project's image from a program and Debian packages, and [`check`] verifies what is in an
//! archive. Equal input gives equal bytes. Only [`debian`] reads from the network, and what it reads is pinned.
#![allow(missing_docs, reason = "a comment says what a name does not")]

pub mod arch;
pub mod archive;
pub mod check;
pub mod debian;
pub mod gantry;
mod program;
pub mod sbom;
mod tree;

pub use arch::Arch;
pub use archive::{Archive, Compression, Image, Layer};
pub use oci_spec::image::{Config, ConfigBuilder};
pub use tree::{Entry, Tree};

/// SHA-256 as lower-case hexadecimal digits.
pub fn sha256(bytes: &[u8]) -> String {
    use sha2::{Digest, Sha256};
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn digest_of_known_bytes_is_the_published_one() {
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(super::sha256(b""), empty);
    }
}
