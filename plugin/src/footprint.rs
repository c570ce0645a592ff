//! Hands what only the start needed back to the kernel: code and constants (relocation, command line, the first reading of NVML), and
//! memory that was freed. Linux maps sixteen pages for each one touched and keeps them while memory is plenty, which is most of what an
//! idle plugin would count for. It frees nothing that holds a value, and does nothing where `/proc` does not tell.
#![allow(
    unsafe_code,
    reason = "giving up mapped pages is unsafe in general, see `Mapping::give_up` for why it is not here; the allocator is set by C functions"
)]

use std::ffi::c_void;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::time::Duration;

use rustix::mm::{Advice, madvise};
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::nvml;

/// How long after the start the node is at rest: registered, the machine read, the choice table made.
const SETTLED: Duration = Duration::from_secs(10);
/// How long after that the first beats of all that goes on at rest are over too, which map more than the further ones need.
const AT_REST: Duration = Duration::from_secs(12);
/// How long to wait where NVML is just being loaded or unloaded.
const AGAIN: Duration = Duration::from_secs(5);

/// Has all threads allocate from one heap, instead of one each with free memory of its own. To be called before the first thread is made;
/// the plugin's threads seldom allocate at once.
pub(crate) fn one_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: a call that takes numbers only, and may be made at any time; heaps that there are already stay in use.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Waits until the start is over, then gives its code and its free memory back; once more when what that left to do is done too.
pub(crate) async fn settle(shutdown: CancellationToken) {
    for mut wait in [SETTLED, AT_REST] {
        loop {
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = tokio::time::sleep(wait) => {}
            }
            // A range that was read may belong to another mapping once NVML's library was loaded or unloaded.
            if nvml::unless_loading(hand_back).is_some() {
                break;
            }
            wait = AGAIN;
        }
    }
}

fn hand_back() {
    match File::open("/proc/self/smaps").and_then(|smaps| of_files(BufReader::new(smaps))) {
        Ok(mappings) => {
            let kilobytes: u64 = mappings.iter().map(|mapping| mapping.resident).sum();
            mappings.iter().for_each(Mapping::give_up);
            debug!(kilobytes, "handed back what the start had mapped");
        }
        Err(error) => debug!(%error, "the own mappings cannot be read"),
    }
    give_up_free_memory();
}

/// Hands back the pages of the heap that hold nothing.
pub(crate) fn give_up_free_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: a call that takes a number only; the allocator locks its heaps, and touches nothing that is allocated.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// A mapping of a program's or a library's code or constants, as its file has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Mapping {
    start: usize,
    length: usize,
    /// Resident KiB.
    resident: u64,
}

impl Mapping {
    /// Unmaps its pages. The next access to one maps it again, from the page cache.
    fn give_up(&self) {
        // SAFETY: the range is a private mapping of a file that cannot be written through and has no page of its own (`of_files` made
        // sure), so every page is the file's and comes back as it was. It is still that mapping: libraries come and go with NVML alone,
        // which is neither loaded nor unloaded meanwhile (`settle` made sure). Nothing in this process makes such a mapping writable
        // later: nothing is compiled or patched at run time, and constants that the loader had to relocate have pages of their own.
        let outcome = unsafe {
            madvise(
                std::ptr::without_provenance_mut::<c_void>(self.start),
                self.length,
                Advice::LinuxDontNeed,
            )
        };
        if let Err(error) = outcome {
            debug!(%error, "a mapping stays resident");
        }
    }
}

/// The mappings in `/proc/self/smaps` that are files' and no more: not writable, and no page differs from the file's. Read line by line:
/// the whole text would need more memory than some modules do.
fn of_files(smaps: impl BufRead) -> io::Result<Vec<Mapping>> {
    let mut found = Vec::new();
    let mut current: Option<Mapping> = None;
    let mut pure = false;
    for line in smaps.lines() {
        let line = line?;
        if let Some(mapping) = header(&line) {
            found.extend(current.filter(|_| pure));
            pure = false;
            current = mapping;
        } else if let (Some(mapping), Some((field, value))) = (&mut current, line.split_once(':')) {
            let kilobytes = value.trim().strip_suffix(" kB").and_then(|n| n.parse().ok());
            match (field, kilobytes) {
                ("Rss", Some(kilobytes)) => mapping.resident = kilobytes,
                ("Anonymous", Some(kilobytes)) => pure = kilobytes == 0,
                _ => {}
            }
        }
    }
    found.extend(current.filter(|_| pure));
    Ok(found)
}

/// Reads a mapping's first line. `None`: this is no first line; `Some(None)`: it is no file's, or can be written.
fn header(line: &str) -> Option<Option<Mapping>> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let start = usize::from_str_radix(start, 16).ok()?;
    let end = usize::from_str_radix(end, 16).ok()?;
    let is_constant = matches!(words.next()?, "r-xp" | "r--p");
    let is_file = words.nth(3).is_some_and(|path| path.starts_with('/'));
    Some(
        end.checked_sub(start)
            .filter(|_| is_constant && is_file)
            .map(|length| Mapping {
                start,
                length,
                resident: 0,
            }),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
55d0c0000000-55d0c0400000 r--p 00000000 08:01 77 /usr/bin/gantry
Rss:                 400 kB
Anonymous:             0 kB
55d0c0400000-55d0c0e00000 r-xp 00400000 08:01 77 /usr/bin/gantry
Size:              10240 kB
Rss:                6400 kB
Private_Dirty:         0 kB
Anonymous:             0 kB
VmFlags: rd ex mr mw me
7f0000000000-7f0000200000 r-xp 00000000 08:01 78 /usr/lib/patched.so
Rss:                 100 kB
Anonymous:             4 kB
7f0000300000-7f0000310000 r--p 00200000 08:01 78 /usr/lib/relocated.so
Rss:                  64 kB
Anonymous:            64 kB
7f0000400000-7f0000500000 rwxp 00000000 00:00 0
Rss:                   4 kB
Anonymous:             4 kB
7ffd00000000-7ffd00002000 r-xp 00000000 00:00 0 [vdso]
Rss:                   8 kB
Anonymous:             0 kB
";

    #[test]
    fn only_what_is_as_its_file_has_it_is_handed_back() {
        assert_eq!(
            of_files(SMAPS.as_bytes()).unwrap(),
            [
                Mapping {
                    start: 0x55d0_c000_0000,
                    length: 0x40_0000,
                    resident: 400
                },
                Mapping {
                    start: 0x55d0_c040_0000,
                    length: 0xa0_0000,
                    resident: 6400
                }
            ]
        );
    }

    #[test]
    fn the_own_program_is_handed_back_and_goes_on_working() {
        one_heap();
        let smaps = File::open("/proc/self/smaps").unwrap();
        let mappings = of_files(BufReader::new(smaps)).unwrap();
        let here = only_what_is_as_its_file_has_it_is_handed_back as *const () as usize;
        assert!(
            mappings
                .iter()
                .any(|mapping| (mapping.start..mapping.start + mapping.length).contains(&here)),
            "{mappings:?}"
        );
        mappings.iter().for_each(Mapping::give_up);
        let kept = vec![7u8; 1 << 20];
        drop(vec![1u8; 1 << 20]);
        give_up_free_memory();
        assert!(kept.iter().all(|byte| *byte == 7));
        only_what_is_as_its_file_has_it_is_handed_back();
    }
}
