//! The project's image, made of libraries that this test runs on.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use gantry_image::check::{self, Rules};
use gantry_image::debian::Package;
use gantry_image::{Arch, Archive, Compression, Entry, Image, Layer, Tree, gantry, sbom};

const EPOCH: u64 = 1_700_000_000;

/// Everything that this process has loaded, as a package.
fn libraries() -> Package {
    let arch = Arch::host().unwrap();
    let mut files = BTreeMap::new();
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    for path in maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..])) {
        let name = path.rsplit('/').next().unwrap();
        if name.contains(".so") {
            let file = Entry::File { is_executable: true, bytes: fs::read(path).unwrap() };
            files.insert(format!("usr/lib/{}/{name}", arch.triplet()), file);
        }
    }
    let link = |target: &str| Entry::Link(target.to_owned());
    files.insert("lib".to_owned(), link("usr/lib"));
    if arch == Arch::Amd64 {
        files.insert("lib64".to_owned(), link("usr/lib64"));
        let loader = link("../lib/x86_64-linux-gnu/ld-linux-x86-64.so.2");
        files.insert("usr/lib64/ld-linux-x86-64.so.2".to_owned(), loader);
    } else {
        let loader = link("aarch64-linux-gnu/ld-linux-aarch64.so.1");
        files.insert("usr/lib/ld-linux-aarch64.so.1".to_owned(), loader);
    }
    Package {
        name: "libc6".to_owned(),
        version: "2.41-12+deb13u5".to_owned(),
        arch,
        sha256: "00".repeat(32),
        control: "Package: libc6\n".to_owned(),
        files,
    }
}

/// The part of a Rust program that is the smallest ELF file with needs of its own.
fn program() -> Vec<u8> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let mut paths = maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..]));
    fs::read(paths.find(|path| path.contains("libgcc_s")).unwrap()).unwrap()
}

fn build(compression: Compression) -> anyhow::Result<(Image, Vec<u8>)> {
    let packages = [libraries()];
    let program = program();
    gantry::image(gantry::Recipe {
        arch: Arch::host().unwrap(),
        program: &program,
        version: "0.1.0",
        revision: Some("c0ffee"),
        source: None,
        license: "a licence",
        crates: sbom::crates(&Path::new(env!("CARGO_MANIFEST_DIR")).join(".."), Arch::host().unwrap())
            .unwrap(),
        packages: &packages,
        epoch: EPOCH,
        compression,
    })
}

fn write(image: &Image, path: &Path) {
    let mut archive = Archive::new();
    archive.add("docker.io/library/gantry:0.1.0", std::slice::from_ref(image)).unwrap();
    archive.write(path).unwrap();
}

#[test]
fn equal_input_gives_equal_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = ["one.tar", "two.tar"].map(|name| {
        let path = folder.path().join(name);
        write(&build(Compression::Gzip).unwrap().0, &path);
        fs::read(path).unwrap()
    });
    assert!(bytes[0] == bytes[1], "two builds differ");
}

#[test]
fn intact_image_passes_and_lists_its_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image.tar");
    for compression in [Compression::Gzip, Compression::None] {
        write(&build(compression).unwrap().0, &path);
        let found = check::archive(&path, &Rules::default()).unwrap();
        let [image] = &found[..] else { panic!("{found:?}") };
        assert_eq!(
            (image.arch, image.name.as_str()),
            (Arch::host().unwrap(), "docker.io/library/gantry:0.1.0")
        );
        for expected in [gantry::PROGRAM, gantry::SBOM, "etc/passwd", "var/lib/dpkg/status.d/libc6"] {
            assert!(image.paths.iter().any(|path| path == expected), "{expected}: {:?}", image.paths);
        }
        assert_eq!(image.stored < image.bytes, compression == Compression::Gzip);
    }
}

#[test]
fn faulty_image_is_refused_with_every_reason() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image.tar");
    let (intact, _) = build(Compression::None).unwrap();
    let refusal = |image: &Image, rules: &Rules| {
        write(image, &path);
        format!("{:#}", check::archive(&path, rules).unwrap_err())
    };

    let mut shell = Tree::new();
    shell.program("bin/sh", "#!").unwrap();
    let mut image = intact.clone();
    image.layers.push(Layer::new(&shell, EPOCH + 1, Compression::None, "a shell").unwrap());
    image.config.set_user(Some("root".to_owned()));
    image.config.set_labels(None);
    let refused = refusal(&image, &Rules::default());
    for reason in [
        "bin/sh is not expected",
        "bin/sh can be executed",
        "bin/sh is not of the image's time",
        "the user is Some(\"root\")",
        "org.opencontainers.image.version is missing",
    ] {
        assert!(refused.contains(reason), "{reason}: {refused}");
    }

    let rules = Rules { max_bytes: Some(1000), excluded: vec!["GLIBC_2.".to_owned()] };
    let refused = refusal(&intact, &rules);
    assert!(refused.contains("more than 1000") && refused.contains("contains the text"), "{refused}");
}

#[test]
fn changed_archive_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image.tar");
    write(&build(Compression::None).unwrap().0, &path);
    let mut bytes = fs::read(&path).unwrap();
    let at = bytes.windows(9).position(|window| window == b"a licence").unwrap();
    bytes[at] = b'A';
    fs::write(&path, &bytes).unwrap();
    let refused = format!("{:#}", check::archive(&path, &Rules::default()).unwrap_err());
    let digest = refused.split(' ').find(|word| word.len() == 64).unwrap();
    assert_eq!(refused, format!("docker.io/library/gantry:0.1.0: the blob {digest} has another digest"));
    fs::write(&path, b"no archive").unwrap();
    assert!(check::archive(&path, &Rules::default()).is_err());
}

/// A program that would die at its start is refused before an image is made of it.
#[test]
fn program_without_its_library_is_refused() {
    let mut package = libraries();
    package.files.retain(|path, _| !path.contains("libc.so"));
    let program = program();
    let outcome = gantry::image(gantry::Recipe {
        arch: Arch::host().unwrap(),
        program: &program,
        version: "0.1.0",
        revision: None,
        source: None,
        license: "",
        crates: Vec::new(),
        packages: &[package],
        epoch: 0,
        compression: Compression::None,
    });
    let refused = outcome.unwrap_err().to_string();
    assert!(refused.contains("the library libc.so.6"), "{refused}");
}

/// An archive of two architectures is read as a whole: the second image has the libraries of the first.
#[test]
fn image_of_another_architecture_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image.tar");
    let (own, _) = build(Compression::None).unwrap();
    let other = Arch::ALL.into_iter().find(|arch| *arch != own.arch).unwrap();
    let mut archive = Archive::new();
    archive.add("docker.io/library/gantry:0.1.0", &[own.clone(), Image { arch: other, ..own }]).unwrap();
    archive.write(&path).unwrap();
    let refused = format!("{:#}", check::archive(&path, &Rules::default()).unwrap_err());
    assert!(refused.contains(&format!("the image for {other}: ")), "{refused}");
    assert!(refused.contains(&format!("and the image for {other}")), "{refused}");
}
