//! Builds Kubernetes, etcd and containerd from the Go modules in `components/`, once per state of those modules.
//! The go.mod files name the versions; nothing of theirs is copied here. Another release of Kubernetes is built from a
//! module that is made of the go.mod and go.sum of that release.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::error::file;
use crate::host::eprint_line;
use crate::{Error, Kubernetes, Result};

/// The folder with the Go modules.
pub(crate) const MODULES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/components");

/// Go settings that change what is built. The JSON experiment breaks the API server's OpenAPI v2 document.
pub(crate) const GO_ENV: [(&str, &str); 3] =
    [("GOEXPERIMENT", "nojsonv2"), ("GOTOOLCHAIN", "local"), ("CGO_ENABLED", "0")];

const CONTAINERD: &str = "github.com/containerd/containerd/v2";
const KUBERNETES: &str = "k8s.io/kubernetes";
/// The module of Kubernetes' programs, and their etcd.
const KUBERNETES_MODULE: &str = "kubernetes";
const CONTAINERD_MODULE: &str = "containerd";

/// The components in the order they are built: module folder, main package, name of the binary.
const BUILDS: [(&str, &str, &str); 9] = [
    ("containerd", "github.com/containerd/containerd/v2/cmd/containerd", "containerd"),
    (
        "containerd",
        "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
        "containerd-shim-runc-v2",
    ),
    ("containerd", "github.com/containerd/containerd/v2/cmd/ctr", "ctr"),
    ("kubernetes", "k8s.io/kubernetes/cmd/kube-apiserver", "kube-apiserver"),
    ("kubernetes", "k8s.io/kubernetes/cmd/kube-scheduler", "kube-scheduler"),
    ("kubernetes", "k8s.io/kubernetes/cmd/kubelet", "kubelet"),
    ("kubernetes", "k8s.io/kubernetes/cmd/kube-controller-manager", "kube-controller-manager"),
    ("kubernetes", "k8s.io/kubernetes/cmd/kubectl", "kubectl"),
    ("kubernetes", "go.etcd.io/etcd/server/v3", "etcd"),
];

/// A folder of built components.
#[derive(Debug, Clone)]
pub struct Components {
    folder: PathBuf,
    kubernetes: Kubernetes,
}

impl Components {
    /// Finds the components of the selected Kubernetes in the cache, or builds them, which takes minutes.
    ///
    /// # Errors
    /// `go build` failed, or `GANTRY_KUBERNETES` names an unknown version.
    pub fn locate_or_build() -> Result<Self> {
        let kubernetes = Kubernetes::selected()?;
        let containerd = version_of("containerd", CONTAINERD)?;
        let cache = cache_root();
        let folder = if kubernetes.is_default()? {
            default_folder()?
        } else {
            let release = kubernetes.release();
            cache.join(format!("components-{release}-{}", key(&[CONTAINERD_MODULE], release)?))
        };
        let components = Self { folder, kubernetes };
        if components.folder.join("etcd").exists() {
            return Ok(components);
        }
        fs::create_dir_all(&cache).map_err(file("create", &cache))?;
        let lock_path = cache.join("components.lock");
        let lock = File::create(&lock_path).map_err(file("create", &lock_path))?;
        lock.lock().map_err(file("lock", &lock_path))?;
        if !components.folder.join("etcd").exists() {
            components.build(&containerd)?;
        }
        Ok(components)
    }

    /// The path of a binary.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// The folder with all binaries.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The Kubernetes of these programs.
    #[must_use]
    pub fn kubernetes(&self) -> &Kubernetes {
        &self.kubernetes
    }

    fn build(&self, containerd: &str) -> Result<()> {
        let mut part = self.folder.clone().into_os_string();
        part.push(".part");
        let part = PathBuf::from(part);
        // containerd is the same for all releases of Kubernetes.
        let built = default_folder()?;
        fs::create_dir_all(&part).map_err(file("create", &part))?;
        let (release, minor) = (self.kubernetes.release(), self.kubernetes.minor());
        let kubernetes_flags = format!(
            "-s -w -X k8s.io/component-base/version.gitVersion={release} \
             -X k8s.io/client-go/pkg/version.gitVersion={release} \
             -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor={minor} \
             -X k8s.io/component-base/version.gitTreeState=clean"
        );
        let containerd_flags =
            format!("-s -w -X {CONTAINERD}/version.Version={}", containerd.trim_start_matches('v'));
        eprint_line(&format!(
            "building Kubernetes {release} and containerd {containerd} into {} (some minutes, once)",
            self.folder.display()
        ));
        let other_release = if self.kubernetes.is_default()? {
            None
        } else {
            Some(write_module(release, &part.join("module"))?)
        };
        for (count, (module, package, binary)) in BUILDS.iter().enumerate() {
            let start = Instant::now();
            let is_containerd = *module == CONTAINERD_MODULE;
            if is_containerd && built.join(binary).exists() {
                fs::copy(built.join(binary), part.join(binary)).map_err(file("copy", &built.join(binary)))?;
                continue;
            }
            let flags = if is_containerd { &containerd_flags } else { &kubernetes_flags };
            let mut go = Command::new("go");
            go.arg("build");
            match &other_release {
                Some(folder) if *module == KUBERNETES_MODULE => go.current_dir(folder).arg("-mod=mod"),
                _ => go.current_dir(Path::new(MODULES).join(module)),
            };
            go.envs(GO_ENV)
                .args(["-trimpath", "-buildvcs=false", "-ldflags", flags, "-o"])
                .arg(part.join(binary))
                .arg(package);
            run(go)?;
            eprint_line(&format!(
                "  {} of {}: {binary}, {:.0} s",
                count + 1,
                BUILDS.len(),
                start.elapsed().as_secs_f64()
            ));
        }
        fs::rename(&part, &self.folder).map_err(file("rename", &part))
    }
}

/// A program of a Go module in `components/`, built with build tags once per state of its `sources`, which decide what
/// is built.
///
/// # Errors
/// There is no Go, or it does not build.
pub(crate) fn program(module: &str, package: &str, tags: &str, sources: &[&str]) -> Result<PathBuf> {
    let folder = Path::new(MODULES).join(module);
    let mut hash = Sha256::new();
    for name in sources {
        hash.update(read(&folder.join(name))?);
    }
    hash.update(format!("{GO_ENV:?}{package}{tags}"));
    hash.update(go_release()?);
    let cache = cache_root();
    let program = cache.join(format!("{module}-{}", short(hash)));
    if program.exists() {
        return Ok(program);
    }
    fs::create_dir_all(&cache).map_err(file("create", &cache))?;
    let lock_path = cache.join("components.lock");
    let lock = File::create(&lock_path).map_err(file("create", &lock_path))?;
    lock.lock().map_err(file("lock", &lock_path))?;
    if !program.exists() {
        eprint_line(&format!("building {package} into {} (once)", program.display()));
        let part = program.with_extension("part");
        let mut go = Command::new("go");
        go.current_dir(&folder)
            .envs(GO_ENV)
            .args(["build", "-trimpath", "-buildvcs=false", "-tags", tags, "-ldflags", "-s -w", "-o"])
            .arg(&part)
            .arg(package);
        run(go)?;
        fs::rename(&part, &program).map_err(file("rename", &part))?;
    }
    Ok(program)
}

/// The folder of the components that CI uses.
fn default_folder() -> Result<PathBuf> {
    Ok(cache_root().join(format!("components-{}", key(&[KUBERNETES_MODULE, CONTAINERD_MODULE], "")?)))
}

/// A hash as a part of a file's name.
fn short(hash: Sha256) -> String {
    hash.finalize().iter().take(6).map(|byte| format!("{byte:02x}")).collect()
}

/// Where built components are kept: `$GANTRY_CACHE`, or `~/.cache/gantry`.
pub(crate) fn cache_root() -> PathBuf {
    if let Some(cache) = std::env::var_os("GANTRY_CACHE") {
        return cache.into();
    }
    let home = std::env::var_os("HOME").unwrap_or_else(|| "/root".into());
    Path::new(&home).join(".cache/gantry")
}

/// Writes the module of a release of Kubernetes to a folder: its own go.mod and go.sum, in which the modules that lie in
/// its repository become published ones. Go's checksum database has the sums of these.
fn write_module(release: &str, folder: &Path) -> Result<PathBuf> {
    let mut go = Command::new("go");
    go.args(["mod", "download", "-json", &format!("{KUBERNETES}@{release}")]).envs(GO_ENV);
    let answer = run(go)?;
    let answer: Value =
        serde_json::from_slice(&answer).map_err(|source| Error::Json { path: KUBERNETES.into(), source })?;
    let source = Path::new(answer["Dir"].as_str().unwrap_or_default());
    let text = String::from_utf8_lossy(&read(&source.join("go.mod"))?).into_owned();
    fs::create_dir_all(folder).map_err(file("create", folder))?;
    for (name, text) in
        [("go.mod", published_module(&text, release).into_bytes()), ("go.sum", read(&source.join("go.sum"))?)]
    {
        let path = folder.join(name);
        fs::write(&path, text).map_err(file("write", &path))?;
    }
    Ok(folder.to_path_buf())
}

/// The go.mod of Kubernetes as that of a module which builds its programs from published modules: `k8s.io/api v0.x.y`
/// belongs to the release `v1.x.y`.
fn published_module(text: &str, release: &str) -> String {
    let staged = release.replacen("v1.", "v0.", 1);
    let mut module = String::new();
    for line in text.lines() {
        let line = match line.split_once("=> ./staging/src/") {
            Some((name, path)) => format!("{name}=> {path} {staged}"),
            None if line.starts_with("module ") => "module gantry.dev/tests/components/kubernetes".to_owned(),
            // What lies in the repository is required in no version.
            None => {
                let words = line.split(' ').map(|word| if word == "v0.0.0" { &*staged } else { word });
                words.collect::<Vec<_>>().join(" ")
            }
        };
        module += &line;
        module.push('\n');
    }
    format!("{module}\nrequire {KUBERNETES} {release}\n")
}

/// A name for everything that decides what is built: the module files, another release than theirs, the recipe and the
/// Go release.
fn key(modules: &[&str], other_release: &str) -> Result<String> {
    let mut hash = Sha256::new();
    for module in modules {
        for name in ["go.mod", "go.sum"] {
            hash.update(read(&Path::new(MODULES).join(module).join(name))?);
        }
    }
    hash.update(format!("{other_release}{GO_ENV:?}{BUILDS:?}"));
    hash.update(go_release()?);
    Ok(short(hash))
}

/// What `go` calls its own release, and the flags that it builds with unless told otherwise.
pub(crate) fn go_release() -> Result<Vec<u8>> {
    let mut go = Command::new("go");
    go.args(["env", "GOVERSION", "GOFLAGS"]).envs(GO_ENV);
    run(go)
}

/// The release of Kubernetes that the module requires.
pub(crate) fn default_release() -> Result<String> {
    version_of(KUBERNETES_MODULE, KUBERNETES)
}

/// The version that a module's go.mod requires of `dependency`.
fn version_of(module: &str, dependency: &str) -> Result<String> {
    let path = Path::new(MODULES).join(module).join("go.mod");
    let text = String::from_utf8_lossy(&read(&path)?).into_owned();
    text.lines()
        .filter_map(|line| line.trim().strip_prefix(dependency)?.strip_prefix(' '))
        .filter_map(|rest| rest.split_whitespace().next())
        .find(|version| version.starts_with('v'))
        .map(str::to_owned)
        .ok_or_else(|| Error::File {
            action: "find the version in",
            path,
            source: std::io::Error::other(format!("no line requires {dependency}")),
        })
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).map_err(file("read", path))
}

/// Runs a command to its end and returns what it wrote to standard output.
pub(crate) fn run(mut command: Command) -> Result<Vec<u8>> {
    let output = command.output().map_err(|source| {
        let program = command.get_program().to_string_lossy().into_owned();
        Error::Start { program, source }
    })?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    Err(Error::Command {
        command: format!("{command:?}"),
        status: output.status,
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_go_mod() {
        assert!(default_release().unwrap().starts_with("v1."));
        assert!(version_of("containerd", CONTAINERD).unwrap().starts_with("v2."));
        assert!(version_of(KUBERNETES_MODULE, "example.org/none").is_err());
    }

    #[test]
    fn module_of_release_requires_published_modules() {
        let text = "module k8s.io/kubernetes\n\ngo 1.24.0\n\nrequire (\n\tk8s.io/api v0.0.0\n\tk8s.io/utils v0.0.0-2026 // indirect\n)\n\n\
                    replace (\n\tk8s.io/api => ./staging/src/k8s.io/api\n)\n";
        let module = published_module(text, "v1.34.4");
        assert_eq!(
            module,
            "module gantry.dev/tests/components/kubernetes\n\ngo 1.24.0\n\nrequire (\n\tk8s.io/api v0.34.4\n\tk8s.io/utils v0.0.0-2026 // indirect\n)\n\n\
             replace (\n\tk8s.io/api => k8s.io/api v0.34.4\n)\n\nrequire k8s.io/kubernetes v1.34.4\n"
        );
    }
}
