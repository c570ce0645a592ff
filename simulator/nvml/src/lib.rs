//! A simulated `libnvidia-ml.so.1`, driven by a machine file.
//!
//! Built as a shared library it serves any NVML client: it looks for `machine.yaml` beside itself (or where
//! `GANTRY_SIM_MACHINE` points), so that several machines can live in one process. Linked as a Rust library it offers
//! [`control`], which changes a machine while clients run on it; [`companion`], which lays down the `/proc`, `/sys` and `/dev`
//! entries that NVML alone does not give; and [`install()`], which puts all of it into one folder.
//!
//! ```text
//! machine.yaml -> facts (everything NVML reports, filled in) -> library -> abi (the C functions) -> any NVML client
//! Controller -> control.yaml + control.shm ------------------^
//! ```
//!
//! The simulator depends only on the machine graph of the project, and is independent of its client.
#![allow(
    unsafe_code,
    reason = "the C ABI of NVML, and memory shared between processes; each block says why it is sound"
)]
#![allow(missing_docs, reason = "a comment says what a name does not")]

mod abi;
pub mod companion;
pub mod control;
pub mod facts;
mod install;
mod library;

pub use install::{
    InstallError, InstalledMachine, LIBRARY_NAME, MACHINE_FILE, PlacedMachine, install, install_text,
    library_path, place,
};

/// The names of NVML's functions, as its header lists them. The position of a name is its slot in the call counters.
pub mod names {
    include!(concat!(env!("OUT_DIR"), "/names.rs"));

    /// The slot of the function `name`, if NVML has it.
    pub fn slot(name: &str) -> Option<usize> {
        NAMES.binary_search(&name).ok()
    }

    /// The slot of a name known when the library is built; a name that is not in the list does not compile.
    pub(crate) const fn slot_of(name: &str) -> usize {
        let (mut low, mut high) = (0, NAMES.len());
        while low < high {
            let middle = low + (high - low) / 2;
            match compare(NAMES[middle].as_bytes(), name.as_bytes()) {
                0 => return middle,
                1 => low = middle + 1,
                _ => high = middle,
            }
        }
        // Evaluated at compile time only: every caller is a `const`.
        #[expect(clippy::panic, reason = "a compile error, never a run-time one")]
        {
            panic!("no such NVML function")
        }
    }

    /// 0 if the texts are equal, 1 if `a` stands before `b`, 2 if after it.
    const fn compare(a: &[u8], b: &[u8]) -> u8 {
        let mut at = 0;
        while at < a.len() && at < b.len() {
            if a[at] != b[at] {
                return if a[at] < b[at] { 1 } else { 2 };
            }
            at += 1;
        }
        if a.len() == b.len() {
            0
        } else if a.len() < b.len() {
            1
        } else {
            2
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn every_name_has_its_own_slot() {
            for (position, name) in NAMES.iter().enumerate() {
                assert_eq!(slot(name), Some(position));
                assert_eq!(slot_of(name), position);
            }
            assert_eq!(slot("nvmlNoSuchThing"), None);
        }
    }
}
