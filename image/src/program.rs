//! What a program or library of Linux needs at its start: the loader, libraries and their versions.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use object::elf::{self, FileHeader64};
use object::read::elf::{FileHeader, ProgramHeader};
use object::{Endianness, StringTable};

use crate::{Arch, Entry, Tree};

/// The needs of an ELF file, and the versions that it defines.
#[derive(Debug, Default)]
pub(crate) struct Program {
    pub(crate) arch: Option<Arch>,
    interpreter: Option<String>,
    libraries: BTreeSet<String>,
    /// Library and version.
    versions: BTreeSet<(String, String)>,
    defines: BTreeSet<String>,
}

impl Program {
    pub(crate) fn read(data: &[u8]) -> Result<Self> {
        let header = FileHeader64::<Endianness>::parse(data).context("not an ELF file of 64 bits")?;
        let endian = header.endian()?;
        let machine = header.e_machine(endian);
        let mut program =
            Self { arch: Arch::ALL.into_iter().find(|arch| arch.machine() == machine), ..Self::default() };
        for segment in header.program_headers(endian, data)? {
            if let Some(path) = segment.interpreter(endian, data)? {
                program.interpreter = Some(text(path));
            }
        }
        let sections = header.sections(endian, data)?;
        let string = |strings: &StringTable<'_>, offset: u32| {
            strings.get(offset).map(text).map_err(|()| anyhow::anyhow!("a name is outside of its table"))
        };
        if let Some((entries, link)) = sections.dynamic(endian, data)? {
            let strings = sections.strings(endian, data, link)?;
            for entry in entries.iter().filter(|entry| entry.d_tag.get(endian) == elf::DT_NEEDED) {
                let offset =
                    u32::try_from(entry.d_val.get(endian)).context("a name is outside of its table")?;
                program.libraries.insert(string(&strings, offset)?);
            }
        }
        if let Some((mut needs, link)) = sections.gnu_verneed(endian, data)? {
            let strings = sections.strings(endian, data, link)?;
            while let Some((need, mut versions)) = needs.next()? {
                let library = string(&strings, need.vn_file.get(endian))?;
                while let Some(version) = versions.next()? {
                    let is_weak = version.vna_flags.get(endian) & elf::VER_FLG_WEAK != 0;
                    if !is_weak {
                        let name = string(&strings, version.vna_name.get(endian))?;
                        program.versions.insert((library.clone(), name));
                    }
                }
            }
        }
        if let Some((mut definitions, link)) = sections.gnu_verdef(endian, data)? {
            let strings = sections.strings(endian, data, link)?;
            while let Some((_, mut names)) = definitions.next()? {
                if let Some(name) = names.next()? {
                    program.defines.insert(string(&strings, name.vda_name.get(endian))?);
                }
            }
        }
        Ok(program)
    }

    /// What this program needs and `tree` lacks, in words.
    pub(crate) fn lacks(&self, tree: &Tree, arch: Arch) -> Result<Vec<String>> {
        let mut lacks = Vec::new();
        if self.arch != Some(arch) {
            let own = self.arch.map_or("another architecture", Arch::name);
            return Ok(vec![format!("it is for {own}, and the image for {arch}")]);
        }
        if self.interpreter.as_deref().is_some_and(|loader| loader != arch.loader()) {
            lacks.push(format!("the loader {}", self.interpreter.as_deref().unwrap_or_default()));
        }
        let folder = format!("usr/lib/{}", arch.triplet());
        for library in &self.libraries {
            let Some(Entry::File { bytes, .. }) = tree.get(&format!("{folder}/{library}")) else {
                lacks.push(format!("the library {library}"));
                continue;
            };
            let there = Self::read(bytes).with_context(|| library.clone())?;
            let needed = self.versions.iter().filter(|(of, _)| of == library);
            let absent = needed.filter(|(_, version)| !there.defines.contains(version));
            lacks.extend(absent.map(|(library, version)| format!("the version {version} of {library}")));
        }
        Ok(lacks)
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The C library of the machine that the test runs on, found as the loader of this test finds it.
    fn libraries() -> Option<(Arch, Tree)> {
        let arch = Arch::host().ok()?;
        let mut tree = Tree::new();
        let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
        let paths: BTreeSet<&str> =
            maps.lines().filter_map(|line| line.split_once('/').map(|(_, path)| path)).collect();
        for path in paths.iter().filter(|path| path.contains(".so")) {
            let name = path.rsplit('/').next()?;
            let bytes = std::fs::read(format!("/{path}")).ok()?;
            tree.file(&format!("usr/lib/{}/{name}", arch.triplet()), bytes).ok()?;
        }
        Some((arch, tree))
    }

    #[test]
    fn running_program_lacks_nothing_of_its_machine() {
        let Some((arch, tree)) = libraries() else { return };
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let program = Program::read(&own).unwrap();
        assert!(program.libraries.contains("libc.so.6"), "{program:?}");
        assert_eq!(program.lacks(&tree, arch).unwrap(), [""; 0]);
    }

    #[test]
    fn missing_library_version_and_architecture_are_named() {
        let Some((arch, tree)) = libraries() else { return };
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let mut program = Program::read(&own).unwrap();
        let all = program.lacks(&Tree::new(), arch).unwrap();
        assert!(all.contains(&"the library libc.so.6".to_owned()), "{all:?}");
        program.versions.insert(("libc.so.6".to_owned(), "GLIBC_9.9".to_owned()));
        assert_eq!(program.lacks(&tree, arch).unwrap(), ["the version GLIBC_9.9 of libc.so.6"]);
        let other = if arch == Arch::Amd64 { Arch::Arm64 } else { Arch::Amd64 };
        let wrong = format!("it is for {arch}, and the image for {other}");
        assert_eq!(program.lacks(&tree, other).unwrap(), [wrong]);
        assert!(Program::read(b"#!/bin/sh\n").is_err());
    }
}
