//! The real Kueue for a cluster: its manager as a program beside the API server, its resources and webhooks as its own
//! chart renders them. Built once per state of `components/kueue`, whose go.mod contains the version.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use crate::components::{self, GO_ENV, MODULES};
use crate::error::file;
use crate::helm::Helm;
use crate::pki::{self, Authority};
use crate::wait::until;
use crate::{Cluster, Error, Program, Result};

const KUEUE: &str = "kueue";
const PACKAGE: &str = "sigs.k8s.io/kueue/cmd/kueue";
const WEBHOOK_PORT: u16 = 9445;
const READY: &str = "http://127.0.0.1:9446/readyz";
const READY_LIMIT: Duration = Duration::from_secs(180);
/// What of the chart is applied. The manager and its rights are a program's here.
const APPLIED: [&str; 3] =
    ["CustomResourceDefinition", "MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"];

impl Cluster {
    /// Installs Kueue's resources and webhooks, and starts its manager. Webhooks of namespaced objects see one namespace
    /// only: the rest of the cluster must not depend on them.
    ///
    /// # Errors
    /// It cannot be built or rendered, the API server refuses a resource, or the manager does not get ready.
    pub async fn start_kueue(&self, namespace: &str) -> Result<()> {
        let program = components::program(KUEUE, PACKAGE, "", &["go.mod", "go.sum"])?;
        let certs = self.control().folder().join(KUEUE);
        let authority = Authority::create(&certs)?;
        authority.server("tls", &["127.0.0.1"])?;
        let config = certs.join("config.yaml");
        fs::write(&config, configuration(&certs).to_string()).map_err(file("write", &config))?;
        let path = certs.join("ca.crt");
        let pem = fs::read(&path).map_err(file("read", &path))?;
        let objects = objects(&rendered()?, namespace, &pki::base64(&pem))?;
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": objects }).to_string();
        // Too large for the annotation of a client-side apply.
        self.kubectl_with_input(&["apply", "--server-side", "--force-conflicts", "-f", "-"], &list).await?;
        self.kubectl(&["wait", "--for=condition=Established", "crd", "--all", "--timeout=60s"]).await?;
        let etc = certs.join("etc");
        let metrics = etc.join("kueue/metrics/certs");
        fs::create_dir_all(&metrics).map_err(file("create", &metrics))?;
        for name in ["tls.crt", "tls.key"] {
            fs::copy(certs.join(name), metrics.join(name)).map_err(file("copy", &metrics))?;
        }
        let args = [
            "--mount".to_owned(),
            "sh".to_owned(),
            "-c".to_owned(),
            // It reads the certificate of its metrics there only, also where it serves none.
            "mount --bind \"$0\" /etc && exec \"$@\"".to_owned(),
            etc.display().to_string(),
            program.display().to_string(),
            format!("--kubeconfig={}", self.kubeconfig().display()),
            format!("--config={}", config.display()),
            // An aggregated API, which needs a Service.
            "--feature-gates=VisibilityOnDemand=false".to_owned(),
        ];
        let daemon = self.control().run(Program::new(KUEUE, "/usr/bin/unshare", args)).await?;
        until("Kueue ready", READY_LIMIT, async || {
            daemon.check().map_err(|error| error.to_string())?;
            let probe = ["busybox", "wget", "-q", "-O", "-", READY];
            self.control().exec(&probe).await.map_err(|error| error.to_string())
        })
        .await?;
        Ok(())
    }

    /// Stops Kueue for good, and removes its webhooks, which nothing serves any more.
    ///
    /// # Errors
    /// It does not end, or the API server refuses.
    pub async fn stop_kueue(&self) -> Result<()> {
        for kind in ["mutatingwebhookconfiguration", "validatingwebhookconfiguration"] {
            let name =
                format!("kueue-{}-webhook-configuration", kind.trim_end_matches("webhookconfiguration"));
            self.kubectl(&["delete", kind, &name, "--ignore-not-found"]).await?;
        }
        self.control().daemon(KUEUE)?.stop().await?;
        self.control().forget(KUEUE)
    }
}

/// The manager's configuration: Jobs alone, and ports and certificates of this cluster.
fn configuration(certs: &Path) -> Value {
    json!({
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "health": { "healthProbeBindAddress": "127.0.0.1:9446" },
        "metrics": { "bindAddress": "0" },
        "webhook": { "host": "127.0.0.1", "port": WEBHOOK_PORT, "certDir": certs },
        "internalCertManagement": { "enable": false },
        "leaderElection": { "leaderElect": false },
        "integrations": { "frameworks": ["batch/job"] },
    })
}

/// What Kueue's chart renders.
fn rendered() -> Result<String> {
    let mut go = Command::new("go");
    go.current_dir(Path::new(MODULES).join(KUEUE)).envs(GO_ENV);
    go.args(["list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/kueue"]);
    let folder = PathBuf::from(String::from_utf8_lossy(&components::run(go)?).trim());
    let chart = folder.join("charts/kueue").display().to_string();
    Helm::locate_or_build(4)?.output(None, &["template", KUEUE, &chart, "--namespace", "kueue-system"])
}

/// The objects of the chart that are [`APPLIED`], with a URL in place of the Service, which does not exist here.
fn objects(text: &str, namespace: &str, authority: &str) -> Result<Vec<Value>> {
    let unreadable = |error: serde_saphyr::Error| Error::Unreadable {
        what: "Kueue's chart".to_owned(),
        reason: error.to_string(),
    };
    let mut objects: Vec<Value> = serde_saphyr::from_multiple(text).map_err(unreadable)?;
    objects.retain(|object| object["kind"].as_str().is_some_and(|kind| APPLIED.contains(&kind)));
    let client = |config: &mut Value| {
        let path = config["service"]["path"].as_str().unwrap_or_default();
        let url = format!("https://127.0.0.1:{WEBHOOK_PORT}{path}");
        *config = json!({ "url": url, "caBundle": authority });
    };
    for object in &mut objects {
        let webhooks = object.get_mut("webhooks").and_then(Value::as_array_mut);
        for webhook in webhooks.into_iter().flatten() {
            client(&mut webhook["clientConfig"]);
            webhook["namespaceSelector"] =
                json!({ "matchLabels": { "kubernetes.io/metadata.name": namespace } });
        }
        if let Some(conversion) = object.pointer_mut("/spec/conversion/webhook/clientConfig") {
            client(conversion);
        }
    }
    Ok(objects)
}
