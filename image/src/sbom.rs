//! The list of what is in an image (SBOM), as CycloneDX 1.5.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::Arch;
use crate::archive::time;
use crate::debian::Package;

/// A crate or a package.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Component {
    name: String,
    version: String,
    /// The package URL; crates of the project have none.
    purl: Option<String>,
    license: Option<String>,
    sha256: Option<String>,
}

impl Component {
    pub(crate) fn of_package(package: &Package) -> Self {
        let (name, arch) = (&package.name, package.arch);
        // In a package URL a plus sign must be written by its code.
        let version = package.version.replace('+', "%2B");
        Self {
            name: name.clone(),
            version: package.version.clone(),
            purl: Some(format!("pkg:deb/debian/{name}@{version}?arch={arch}&distro=debian-13")),
            license: None,
            sha256: Some(package.sha256.clone()),
        }
    }

    fn to_json(&self) -> Value {
        let mut value = json!({
            "type": "library",
            "bom-ref": self.purl.clone().unwrap_or_else(|| format!("{}@{}", self.name, self.version)),
            "name": self.name,
            "version": self.version,
        });
        if let Some(purl) = &self.purl {
            value["purl"] = json!(purl);
        }
        if let Some(license) = &self.license {
            value["licenses"] = json!([{ "expression": license }]);
        }
        if let Some(sha256) = &self.sha256 {
            value["hashes"] = json!([{ "alg": "SHA-256", "content": sha256 }]);
        }
        value
    }
}

/// The crates that are linked into the shipped program for an architecture, by `cargo tree` in the workspace `root`.
///
/// # Errors
/// cargo fails, or Cargo.lock lacks a crate.
pub fn crates(root: &Path, arch: Arch) -> Result<Vec<Component>> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(root).args(["tree", "--locked", "--package=gantry", "--no-default-features"]);
    cargo.args([
        "--edges=normal,no-proc-macro",
        "--prefix=none",
        "--format={p}\t{l}",
        "--target",
        arch.target(),
    ]);
    let output = cargo.output().context("cannot start cargo")?;
    ensure!(output.status.success(), "cargo tree: {}", String::from_utf8_lossy(&output.stderr).trim());
    let lock = std::fs::read_to_string(root.join("Cargo.lock")).context("Cargo.lock")?;
    read_tree(&String::from_utf8(output.stdout)?, &checksums(&lock)?)
}

/// SHA-256 by name and version; `None` of a crate of the project.
type Checksums = BTreeMap<(String, String), Option<String>>;

fn checksums(lock: &str) -> Result<Checksums> {
    let lock: toml::Table = lock.parse().context("Cargo.lock")?;
    let packages =
        lock.get("package").and_then(toml::Value::as_array).context("Cargo.lock has no packages")?;
    let text = |package: &toml::Value, key| package.get(key).and_then(toml::Value::as_str).map(str::to_owned);
    let all = packages.iter().map(|package| {
        let name = text(package, "name").context("Cargo.lock: a package without a name")?;
        let version = text(package, "version").context("Cargo.lock: a package without a version")?;
        Ok(((name, version), text(package, "checksum")))
    });
    all.collect()
}

/// Reads lines such as `anyhow v1.0.1<tab>MIT OR Apache-2.0 (*)`.
fn read_tree(tree: &str, checksums: &Checksums) -> Result<Vec<Component>> {
    let mut components = Vec::new();
    for line in tree.lines() {
        let (package, license) = line.split_once('\t').with_context(|| format!("cargo tree: {line:?}"))?;
        let mut words = package.split(' ');
        let name = words.next().unwrap_or_default().to_owned();
        let version = words.next().and_then(|version| version.strip_prefix('v'));
        let version = version.with_context(|| format!("cargo tree: {line:?} has no version"))?.to_owned();
        let sha256 = checksums
            .get(&(name.clone(), version.clone()))
            .with_context(|| format!("Cargo.lock does not have {name} {version}"))?
            .clone();
        let license = license.trim_end_matches(" (*)").replace('/', " OR ");
        components.push(Component {
            purl: sha256.is_some().then(|| format!("pkg:cargo/{name}@{version}")),
            license: (!license.is_empty()).then_some(license),
            name,
            version,
            sha256,
        });
    }
    components.sort();
    components.dedup();
    Ok(components)
}

/// The document of gantry in that version, made at `epoch`.
pub(crate) fn document(version: &str, epoch: u64, mut components: Vec<Component>) -> Result<Vec<u8>> {
    components.sort();
    let mut document = json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "timestamp": time(epoch)?,
            "component": {
                "type": "container",
                "bom-ref": "gantry-image",
                "name": "gantry",
                "version": version,
                "licenses": [{ "expression": "Apache-2.0" }],
            },
        },
        "components": components.iter().map(Component::to_json).collect::<Vec<_>>(),
    });
    document.sort_all_objects();
    Ok(serde_json::to_vec_pretty(&document)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCK: &str = r#"
version = 4
[[package]]
name = "gantry"
version = "0.1.0"
[[package]]
name = "libc"
version = "0.2.1"
source = "registry+https://github.com/rust-lang/crates.io-index"
checksum = "ab"
"#;

    #[test]
    fn crates_have_license_and_checksum_once() {
        let tree = "gantry v0.1.0 (/src/cli)\tApache-2.0\nlibc v0.2.1\tMIT/Apache-2.0\nlibc v0.2.1\tMIT/Apache-2.0 (*)\n";
        let components = read_tree(tree, &checksums(LOCK).unwrap()).unwrap();
        let [own, libc] = &components[..] else { panic!("{components:?}") };
        assert_eq!((own.purl.as_deref(), own.sha256.as_deref()), (None, None));
        assert_eq!(libc.purl.as_deref(), Some("pkg:cargo/libc@0.2.1"));
        assert_eq!(libc.license.as_deref(), Some("MIT OR Apache-2.0"));
        assert_eq!(libc.sha256.as_deref(), Some("ab"));
        for wrong in ["libc v9.9.9\tMIT", "libc\tMIT", "libc v0.2.1"] {
            assert!(read_tree(wrong, &checksums(LOCK).unwrap()).is_err(), "{wrong}");
        }
    }

    /// The workspace itself: the shipped program has no simulator, and every outside crate a checksum.
    #[test]
    fn shipped_program_is_listed_without_simulators() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        for arch in Arch::ALL {
            let all = crates(&root, arch).unwrap();
            let names: Vec<&str> = all.iter().map(|component| component.name.as_str()).collect();
            assert!(names.contains(&"gantry-plugin") && names.contains(&"tokio"), "{names:?}");
            assert!(!names.contains(&"gantry-nvml-sim"));
            let outside = all.iter().filter(|component| !component.name.starts_with("gantry"));
            assert!(outside.clone().count() > 50);
            assert!(
                outside.clone().all(|component| component.sha256.is_some() && component.license.is_some())
            );
        }
    }

    #[test]
    fn document_does_not_depend_on_the_order() {
        let tree = "gantry v0.1.0\tApache-2.0\nlibc v0.2.1\tMIT\n";
        let mut components = read_tree(tree, &checksums(LOCK).unwrap()).unwrap();
        let one = document("0.1.0", 0, components.clone()).unwrap();
        components.reverse();
        assert_eq!(document("0.1.0", 0, components).unwrap(), one);
        let value: Value = serde_json::from_slice(&one).unwrap();
        assert_eq!(value["metadata"]["timestamp"], "1970-01-01T00:00:00Z");
        assert_eq!(value["components"][1]["hashes"][0]["content"], "ab");
    }
}
