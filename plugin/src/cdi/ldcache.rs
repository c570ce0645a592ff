//! Parses the dynamic loader's cache, `/etc/ld.so.cache`, as glibc's ldconfig writes it on 64-bit machines. The bytes are not trusted:
//! an incomplete cache is refused.
//!
//! ```text
//! [ld.so-1.7.0, entries of 12 bytes, padding to 8]     up to glibc 2.31, left out since
//! glibc-ld.so.cache1.1, number of entries, length of strings, byte order, 19 bytes more
//! entries of 24 bytes: flags, place of the name, place of the path, 12 bytes more
//! strings, each ended by a zero byte; places count from glibc-ld.so.cache1.1
//! ```

use std::path::Path;

const OLDER: &[u8] = b"ld.so-1.7.0";
const MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
/// Lengths of the older header and its entries, and of the newer ones.
const OLDER_HEADER: usize = 16;
const OLDER_ENTRY: usize = 12;
const HEADER: usize = 48;
const ENTRY: usize = 24;
/// The bits of an entry's flags that name the machine.
const MACHINE: u32 = 0xff00;
/// x86-64 and 64-bit Arm, the machines of containers with GPUs.
const MACHINES: [u32; 2] = [0x0300, 0x0a00];

/// The paths of 64-bit libraries with names that begin with `prefix`, in the order of the cache. `None`: these bytes are no cache.
pub(super) fn paths<'b>(bytes: &'b [u8], prefix: &str) -> Option<Vec<&'b Path>> {
    let cache = match bytes.starts_with(OLDER) {
        true => bytes.get(behind_older(bytes)?..)?,
        false => bytes,
    };
    if !cache.starts_with(MAGIC) {
        return None;
    }
    let entries = place(cache, MAGIC.len())?.checked_mul(ENTRY)?;
    // Two bits: 0 is unknown (before glibc 2.33), 2 is little-endian, as the machines above are.
    if !matches!(cache.get(MAGIC.len() + 8)? & 3, 0 | 2) {
        return None;
    }
    let end = HEADER.checked_add(entries)?.checked_add(place(cache, MAGIC.len() + 4)?)?;
    let cache = cache.get(..end)?;
    let mut found = Vec::new();
    for entry in cache.get(HEADER..HEADER + entries)?.chunks_exact(ENTRY) {
        let name = text(cache, place(entry, 4)?)?;
        let path = text(cache, place(entry, 8)?)?;
        if MACHINES.contains(&(word(entry, 0)? & MACHINE)) && name.starts_with(prefix.as_bytes()) {
            // A path that is not Unicode cannot be in a specification.
            let path = str::from_utf8(path).ok().map(Path::new);
            found.extend(path.filter(|path| path.is_absolute()));
        }
    }
    Some(found)
}

/// Where the newer cache begins after an older one.
fn behind_older(bytes: &[u8]) -> Option<usize> {
    let entries = place(bytes, OLDER_HEADER - 4)?.checked_mul(OLDER_ENTRY)?;
    OLDER_HEADER.checked_add(entries)?.checked_next_multiple_of(8)
}

/// The string that begins at `at`.
fn text(cache: &[u8], at: usize) -> Option<&[u8]> {
    let rest = cache.get(at..)?;
    rest.get(..rest.iter().position(|byte| *byte == 0)?)
}

fn place(bytes: &[u8], at: usize) -> Option<usize> {
    usize::try_from(word(bytes, at)?).ok()
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let word = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(word.try_into().ok()?))
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A cache as ldconfig writes it of libraries with these flags at these paths.
    pub(in crate::cdi) fn cache(entries: &[(u32, &str)]) -> Vec<u8> {
        let mut bytes = b"glibc-ld.so.cache1.1".to_vec();
        let mut strings = Vec::new();
        let start = 48 + 24 * entries.len();
        let mut places = Vec::new();
        for (flags, path) in entries {
            let value = start + strings.len();
            let key = value + path.rfind('/').map_or(0, |slash| slash + 1);
            strings.extend_from_slice(path.as_bytes());
            strings.push(0);
            places.push([*flags, key as u32, value as u32]);
        }
        let header = [entries.len() as u32, strings.len() as u32, 2, 0, 0, 0, 0];
        bytes.extend(header.iter().flat_map(|word| word.to_le_bytes()));
        for place in places {
            bytes.extend(place.iter().flat_map(|word| word.to_le_bytes()));
            bytes.extend([0; 12]);
        }
        bytes.extend(strings);
        bytes
    }

    const X86: u32 = 0x0303;

    fn found(bytes: &[u8]) -> Option<Vec<&str>> {
        let paths = paths(bytes, "libcuda.so.")?;
        Some(paths.into_iter().map(|path| path.to_str().unwrap()).collect())
    }

    fn sample() -> Vec<u8> {
        cache(&[
            (X86, "/usr/lib64/libc.so.6"),
            (X86, "/opt/nvidia/lib/libcuda.so.1"),
            (0x0003, "/opt/nvidia/lib32/libcuda.so.1"),
            (0x0a03, "/opt/arm/libcuda.so.1"),
            (X86, "relative/libcuda.so.1"),
            (X86, "/opt/nvidia/lib/libcuda.so"),
        ])
    }

    const FOUND: [&str; 2] = ["/opt/nvidia/lib/libcuda.so.1", "/opt/arm/libcuda.so.1"];

    #[test]
    fn libraries_of_64_bits_are_found_by_name() {
        assert_eq!(found(&sample()).as_deref(), Some(&FOUND[..]));
        assert_eq!(found(&cache(&[])), Some(Vec::new()));
    }

    #[test]
    fn cache_after_an_older_one_is_read() {
        for entries in 0..4_u8 {
            let mut bytes = b"ld.so-1.7.0\0".to_vec();
            bytes.extend([entries, 0, 0, 0]);
            bytes.resize((16 + 12 * usize::from(entries)).next_multiple_of(8), 0);
            bytes.extend(sample());
            assert_eq!(found(&bytes).as_deref(), Some(&FOUND[..]), "{entries}");
        }
    }

    #[test]
    fn incomplete_cache_is_refused() {
        let whole = sample();
        for length in 0..whole.len() {
            assert_eq!(found(&whole[..length]), None, "{length} bytes of {}", whole.len());
        }
        let with = |at: usize, bytes: &[u8]| {
            let mut changed = whole.clone();
            changed[at..at + bytes.len()].copy_from_slice(bytes);
            changed
        };
        for (what, bytes) in [
            ("another form", with(17, b"1.2")),
            ("the other byte order", with(28, &[3])),
            ("more entries than there are", with(20, &[0xff; 4])),
            ("more strings than there are", with(24, &[0xff; 4])),
            ("a name behind the end", with(48 + 4, &[0xff; 4])),
            ("a path behind the end", with(48 + 8, &[0xff; 4])),
        ] {
            assert_eq!(found(&bytes), None, "{what}");
        }
    }

    /// The cache of this machine, if it has one: the form is not only ours.
    #[test]
    fn cache_of_this_machine_is_read() {
        let Ok(bytes) = std::fs::read("/etc/ld.so.cache") else {
            return;
        };
        assert!(!paths(&bytes, "libc.so.").unwrap().is_empty());
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_do_not_panic(at in 0..200_usize, bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let mut cache = sample();
            cache.splice(at..(at + bytes.len()).min(cache.len()).max(at), bytes);
            let _ = paths(&cache, "libcuda.so.");
        }
    }
}
