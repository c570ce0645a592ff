//! Whether a library file is complete. The loader maps a file without this check, and a process that touches a page beyond
//! the end of a file is killed by SIGBUS: the driver's installer may be writing the file now.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

/// Length of a 64-bit ELF header.
const HEADER: usize = 64;
/// Lengths of an entry of the program and section header tables.
const PROGRAM_ENTRY: u64 = 56;
const SECTION_ENTRY: u64 = 64;
/// A loaded segment, and the one with the loader's own table.
const LOAD: u32 = 1;
const DYNAMIC: u32 = 2;
/// More program headers than any library has.
const MAX_ENTRIES: u16 = 256;

/// Why a library file must not be loaded.
#[derive(Debug, thiserror::Error)]
pub(super) enum ImageError {
    #[error("the file cannot be read: {0}")]
    Read(#[from] io::Error),
    #[error("it is no regular file")]
    NoFile,
    #[error("it is no ELF file; it may be being installed")]
    NoElf,
    #[error(
        "the file is incomplete: it has {size} bytes of at least {needed}; it may be being installed, and is tried again"
    )]
    Short { size: u64, needed: u64 },
    #[error(
        "the file is incomplete: parts of it are not written yet; it may be being installed, and is tried again"
    )]
    Hollow,
}

/// Checks that the file at `path` is as long as its headers state, and that its tables are written.
pub(super) fn check(path: &Path) -> Result<(), ImageError> {
    // Opening a FIFO waits for a writer.
    if !std::fs::metadata(path)?.is_file() {
        return Err(ImageError::NoFile);
    }
    let mut file = File::open(path)?;
    let size = file.metadata()?.len();
    let mut header = [0; HEADER];
    if size < HEADER as u64 {
        return Err(ImageError::Short { size, needed: HEADER as u64 });
    }
    file.read_exact(&mut header)?;
    if header.iter().all(|byte| *byte == 0) {
        return Err(ImageError::Hollow);
    }
    // 64 bits, little endian; the loader refuses other files by itself.
    if !header.starts_with(b"\x7fELF\x02\x01") {
        return if header.starts_with(b"\x7fELF") { Ok(()) } else { Err(ImageError::NoElf) };
    }
    let programs = Table { at: long(&header, 32), entries: half(&header, 56), entry: PROGRAM_ENTRY };
    let sections = Table { at: long(&header, 40), entries: half(&header, 60), entry: SECTION_ENTRY };
    let mut needed = programs.end().max(sections.end());
    let mut dynamic = None;
    if programs.end() <= size {
        for entry in 0..u64::from(programs.entries.min(MAX_ENTRIES)) {
            let mut program = [0; PROGRAM_ENTRY as usize];
            file.seek(SeekFrom::Start(programs.at + entry * PROGRAM_ENTRY))?;
            file.read_exact(&mut program)?;
            let (kind, offset, length) = (word(&program, 0), long(&program, 8), long(&program, 32));
            if kind == LOAD || kind == DYNAMIC {
                needed = needed.max(offset.saturating_add(length));
            }
            if kind == DYNAMIC && length > 0 {
                dynamic = Some(offset);
            }
        }
    }
    if size < needed {
        return Err(ImageError::Short { size, needed });
    }
    // An installer that sets the length first and fills the file later leaves zeros. The first section is empty by
    // definition; the others, and the loader's table, are not.
    let second = (sections.at != 0 && sections.entries > 1).then(|| sections.at + SECTION_ENTRY);
    for (place, length) in [(second, SECTION_ENTRY as usize), (dynamic, 16)] {
        let Some(place) = place else { continue };
        let mut bytes = vec![0; length];
        file.seek(SeekFrom::Start(place))?;
        file.read_exact(&mut bytes)?;
        if bytes.iter().all(|byte| *byte == 0) {
            return Err(ImageError::Hollow);
        }
    }
    Ok(())
}

/// A table of headers.
struct Table {
    at: u64,
    entries: u16,
    entry: u64,
}

impl Table {
    /// The first byte behind it.
    fn end(&self) -> u64 {
        if self.at == 0 { 0 } else { self.at.saturating_add(u64::from(self.entries) * self.entry) }
    }
}

fn bytes<const N: usize>(of: &[u8], at: usize) -> [u8; N] {
    of.get(at..at + N).and_then(|bytes| bytes.try_into().ok()).unwrap_or([0; N])
}

fn half(of: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes(of, at))
}

fn word(of: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes(of, at))
}

fn long(of: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes(of, at))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A complete library: the program that runs this test is an ELF file of the same form.
    fn whole() -> Vec<u8> {
        std::fs::read(std::env::current_exe().unwrap()).unwrap()
    }

    fn checked(content: &[u8]) -> Result<(), ImageError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libnvidia-ml.so.1");
        std::fs::write(&path, content).unwrap();
        check(&path)
    }

    #[test]
    fn file_is_complete_at_its_full_length_only() {
        let whole = whole();
        checked(&whole).unwrap();
        for length in [0, 1, 63, 64, 3000, whole.len() / 2, whole.len() - 4096, whole.len() - 1] {
            assert!(checked(&whole[..length]).is_err(), "{length}");
        }
    }

    #[test]
    fn file_of_full_length_with_unwritten_parts_is_incomplete() {
        let mut hollow = whole();
        let half = hollow.len() / 2;
        hollow[half..].fill(0);
        assert!(matches!(checked(&hollow), Err(ImageError::Hollow)));
        hollow.fill(0);
        assert!(matches!(checked(&hollow), Err(ImageError::Hollow)));
    }

    #[test]
    fn other_files_are_named() {
        assert!(matches!(checked(&[b'#'; 100]), Err(ImageError::NoElf)));
        assert!(matches!(check(Path::new("/dev/null")), Err(ImageError::NoFile)));
        assert!(matches!(check(Path::new("/nowhere/libnvidia-ml.so.1")), Err(ImageError::Read(_))));
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("libnvidia-ml.so.1");
        let mode = rustix::fs::Mode::from_raw_mode(0o644);
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        assert!(matches!(check(&fifo), Err(ImageError::NoFile)), "it has no writer");
    }

    #[test]
    fn absurd_headers_are_refused_without_overflow() {
        let mut absurd = whole();
        absurd[32..40].fill(0xff);
        assert!(matches!(checked(&absurd), Err(ImageError::Short { .. })));
    }
}
