//! The real controllers of JobSet, LeaderWorkerSet and PyTorchJob for a cluster, with their webhooks for one namespace.
//! Built once per state of `components/controllers`, whose go.mod contains the versions; nothing of theirs is copied
//! here.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::components::{self, GO_ENV, MODULES};
use crate::error::file;
use crate::host::eprint_line;
use crate::pki::{self, Authority};
use crate::wait::until;
use crate::{BUSYBOX_IMAGE, Cluster, Program, Result};

/// The name of the process next to the API server.
pub const CONTROLLERS: &str = "controllers";

const MODULE: &str = "controllers";
const READY: &str = "http://127.0.0.1:9444/readyz";
const READY_LIMIT: Duration = Duration::from_secs(180);
const WEBHOOK_PORT: u16 = 9443;

/// CRDs in the controllers' modules: the module, and the file in it. The last is the PodGroup of the coscheduling
/// plugin, whose controller only counts and is not needed.
const CRDS: [(&str, &str); 4] = [
    ("sigs.k8s.io/jobset", "config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml"),
    ("sigs.k8s.io/lws", "config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml"),
    ("github.com/kubeflow/training-operator", "manifests/base/crds/kubeflow.org_pytorchjobs.yaml"),
    ("sigs.k8s.io/scheduler-plugins", "config/crd/bases/scheduling.x-k8s.io_podgroups.yaml"),
];

/// Webhooks that the controllers rely on: path, API group, version, resource. LeaderWorkerSet's for pods writes the
/// labels of groups and ranks.
const WEBHOOKS: [(&str, &str, &str, &str); 3] = [
    ("/mutate-jobset-x-k8s-io-v1alpha2-jobset", "jobset.x-k8s.io", "v1alpha2", "jobsets"),
    (
        "/mutate-leaderworkerset-x-k8s-io-v1-leaderworkerset",
        "leaderworkerset.x-k8s.io",
        "v1",
        "leaderworkersets",
    ),
    ("/mutate--v1-pod", "", "v1", "pods"),
];

impl Cluster {
    /// Installs the controllers' resources, which a cluster has before anybody makes one.
    ///
    /// # Errors
    /// The controllers cannot be built, or the API server refuses a resource.
    pub async fn install_controllers(&self) -> Result<()> {
        let folder = locate_or_build()?;
        for (_, path) in CRDS {
            let crd = folder.join(name_of(path)).display().to_string();
            // Too large for the annotation of a client-side apply.
            self.kubectl(&["apply", "--server-side", "-f", &crd]).await?;
        }
        Ok(())
    }

    /// Starts the controllers. Their webhooks see one namespace only: the rest of the cluster must not depend on them.
    ///
    /// # Errors
    /// They cannot be built or do not start.
    pub async fn start_controllers(&self, namespace: &str) -> Result<()> {
        self.stop_controllers().await?;
        let folder = locate_or_build()?;
        let certs = self.control().folder().join("controllers");
        let authority = Authority::create(&certs)?;
        authority.server("tls", &["127.0.0.1"])?;
        let inits = certs.join("pytorch-init.yaml");
        fs::write(&inits, init_containers().to_string()).map_err(file("write", &inits))?;
        let program = Program::new(
            CONTROLLERS,
            folder.join(CONTROLLERS),
            [
                format!("--kubeconfig={}", self.kubeconfig().display()),
                format!("--certs={}", certs.display()),
                format!("--port={WEBHOOK_PORT}"),
                format!("--pytorch-init={}", inits.display()),
            ],
        );
        let daemon = self.control().run(program).await?;
        until("controllers ready", READY_LIMIT, async || {
            daemon.check().map_err(|error| error.to_string())?;
            let probe = ["busybox", "wget", "-q", "-O", "-", READY];
            let answer = self.control().exec(&probe).await;
            answer.map_err(|error| error.to_string())
        })
        .await?;
        let path = certs.join("ca.crt");
        let pem = fs::read(&path).map_err(file("read", &path))?;
        let hooks = webhooks(namespace, &pki::base64(&pem)).to_string();
        self.kubectl_with_input(&["apply", "-f", "-"], &hooks).await?;
        Ok(())
    }

    /// Stops the controllers for good, if they run: a program that is only stopped is started again with the others.
    ///
    /// # Errors
    /// They do not end.
    pub async fn stop_controllers(&self) -> Result<()> {
        let control = self.control();
        if !control.programs().iter().any(|name| name == CONTROLLERS) {
            return Ok(());
        }
        control.daemon(CONTROLLERS)?.stop().await?;
        control.forget(CONTROLLERS)
    }
}

/// The init container of PyTorchJob's workers. The original waits for the master's DNS name, and there is no DNS here.
fn init_containers() -> Value {
    json!([{
        "name": "init-pytorch",
        "image": BUSYBOX_IMAGE,
        "imagePullPolicy": "Never",
        "command": ["true"],
    }])
}

fn webhooks(namespace: &str, authority: &str) -> Value {
    let hook = |(path, group, version, resource): (&str, &str, &str, &str)| {
        json!({
            "name": format!("{resource}.controllers.gantry.dev"),
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
            "failurePolicy": "Fail",
            "clientConfig": { "url": format!("https://127.0.0.1:{WEBHOOK_PORT}{path}"), "caBundle": authority },
            "namespaceSelector": { "matchLabels": { "kubernetes.io/metadata.name": namespace } },
            "rules": [{
                "apiGroups": [group],
                "apiVersions": [version],
                "operations": ["CREATE"],
                "resources": [resource],
            }],
        })
    };
    json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": { "name": CONTROLLERS },
        "webhooks": WEBHOOKS.map(hook),
    })
}

/// The folder with the program and the resources, made first where it is missing.
fn locate_or_build() -> Result<PathBuf> {
    let cache = components::cache_root();
    let folder = cache.join(format!("{CONTROLLERS}-{}", key()?));
    if folder.join(CONTROLLERS).exists() {
        return Ok(folder);
    }
    fs::create_dir_all(&cache).map_err(file("create", &cache))?;
    let lock_path = cache.join("components.lock");
    let lock = File::create(&lock_path).map_err(file("create", &lock_path))?;
    lock.lock().map_err(file("lock", &lock_path))?;
    if !folder.join(CONTROLLERS).exists() {
        build(&folder)?;
    }
    Ok(folder)
}

fn build(folder: &Path) -> Result<()> {
    eprint_line(&format!("building the controllers of gangs into {} (some minutes, once)", folder.display()));
    let part = folder.with_extension("part");
    fs::create_dir_all(&part).map_err(file("create", &part))?;
    let mut go = go();
    go.args(["build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w", "-o"])
        .arg(part.join(CONTROLLERS))
        .arg(".");
    components::run(go)?;
    for (module, path) in CRDS {
        let mut list = self::go();
        list.args(["list", "-m", "-f", "{{.Dir}}", module]);
        let from = String::from_utf8_lossy(&components::run(list)?).trim().to_owned();
        let from = Path::new(&from).join(path);
        // Modules lie in the cache read-only, and so would their copies.
        let text = fs::read(&from).map_err(file("read", &from))?;
        let to = part.join(name_of(path));
        fs::write(&to, text).map_err(file("write", &to))?;
    }
    fs::rename(&part, folder).map_err(file("rename", &part))
}

fn go() -> Command {
    let mut go = Command::new("go");
    go.current_dir(Path::new(MODULES).join(MODULE)).envs(GO_ENV);
    go
}

/// A name for everything that decides what is built.
fn key() -> Result<String> {
    let mut hash = Sha256::new();
    for name in ["go.mod", "go.sum", "main.go"] {
        let path = Path::new(MODULES).join(MODULE).join(name);
        hash.update(fs::read(&path).map_err(file("read", &path))?);
    }
    hash.update(format!("{GO_ENV:?}{CRDS:?}"));
    hash.update(components::go_release()?);
    let digest = hash.finalize();
    Ok(digest.iter().take(6).map(|byte| format!("{byte:02x}")).collect())
}

fn name_of(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn webhooks_are_limited_to_one_namespace() {
        let all = webhooks("jobs", "QQ==");
        for hook in all["webhooks"].as_array().unwrap() {
            assert_eq!(hook["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"], "jobs");
            assert_eq!(hook["clientConfig"]["caBundle"], "QQ==");
        }
    }
}
