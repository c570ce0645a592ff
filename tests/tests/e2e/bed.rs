//! The cluster that the scenarios run on, and what they ask of it again and again.
//! It brings broken parts back after each scenario; it judges nothing.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use gantry_e2e::gantry::{self, manifests};
use gantry_e2e::{Cluster, ClusterOptions, until};
use k8s_openapi::api::core::v1::{Namespace, Pod, ServiceAccount};
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, Client};
use tokio::sync::OnceCell;

use crate::gpus::Gpus;
use crate::records;

const CLEAN_LIMIT: Duration = Duration::from_secs(180);

/// Shortens waits of kube-scheduler, in addition to the printed configuration: the retry of unschedulable pods and
/// the takeover of a killed predecessor's lease. These waits would be most of a scenario's time.
const HURRY: &str = "
podInitialBackoffSeconds: 1
podMaxBackoffSeconds: 1
leaderElection: {leaseDuration: 6s, renewDeadline: 5s, retryPeriod: 500ms}
";

/// Writes the configuration of kube-scheduler with [`HURRY`] and returns its path.
fn hurried_scheduler() -> Result<PathBuf> {
    let binary = gantry::binary().context("no gantry beside this test: cargo build -p gantry")?;
    let path = std::env::temp_dir().join("gantry-e2e-scheduler.yaml");
    gantry::write_scheduler_config(&binary, "nvidia.com/gpu,nvidia.com/gpu.shared", &path)?;
    let config = fs::read_to_string(&path)?;
    fs::write(&path, config + HURRY)?;
    Ok(path)
}

/// The shared cluster.
pub(crate) struct Bed {
    cluster: Cluster,
    gpus: OnceCell<Gpus>,
    /// Counts names that must be new.
    named: AtomicUsize,
    /// Held for the run, so that two runs at once wait for each other.
    _lock: File,
}

impl Bed {
    /// Brings the cluster up from the manifests, without the daemons.
    pub(crate) async fn up() -> Result<Self> {
        let lock_path = std::env::temp_dir().join("gantry-e2e.lock");
        let lock = File::create(&lock_path).context("lock file")?;
        lock.lock().context("waiting for another run")?;
        let mut options = ClusterOptions::new(env!("CARGO_BIN_EXE_gantry-cluster"));
        options.folder = std::env::temp_dir().join("gantry-e2e");
        options.port = 16444;
        options.scheduler_config = Some(hurried_scheduler()?);
        let cluster = Cluster::up(options).await?;
        cluster.install(&manifests()).await?;
        let restart = manifests().join("extender-restart.yaml").display().to_string();
        cluster.kubectl(&["apply", "-f", &restart]).await?;
        Ok(Self { cluster, gpus: OnceCell::new(), named: AtomicUsize::new(0), _lock: lock })
    }

    /// Ends the cluster.
    pub(crate) async fn down(self) -> Result<()> {
        Ok(self.cluster.down().await?)
    }

    /// The cluster itself.
    pub(crate) fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// The simulated GPUs and the daemons; the first call starts them.
    pub(crate) async fn gpus(&self) -> Result<&Gpus> {
        self.gpus.get_or_try_init(|| Gpus::start(&self.cluster)).await
    }

    /// A client with all rights.
    pub(crate) fn client(&self) -> Client {
        self.cluster.client()
    }

    /// The folder with the logs.
    pub(crate) fn folder(&self) -> &Path {
        self.cluster.folder()
    }

    /// Makes a namespace that no other scenario has had: one that is being removed cannot be made again for seconds.
    pub(crate) async fn another_namespace(&self, prefix: &str) -> Result<Api<Pod>> {
        let number = self.named.fetch_add(1, Ordering::Relaxed);
        self.namespace(&format!("{prefix}-{number}")).await
    }

    /// Makes a namespace for a scenario and waits until pods can be made in it.
    pub(crate) async fn namespace(&self, name: &str) -> Result<Api<Pod>> {
        let namespace = Namespace {
            metadata: kube::api::ObjectMeta { name: Some(name.to_owned()), ..Default::default() },
            ..Default::default()
        };
        Api::<Namespace>::all(self.client()).create(&PostParams::default(), &namespace).await?;
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client(), name);
        until(format!("service account of {name}"), CLEAN_LIMIT, async || accounts.get("default").await)
            .await?;
        Ok(Api::namespaced(self.client(), name))
    }

    /// Starts again what a scenario stopped, and removes its pods.
    pub(crate) async fn restore(&self) -> Result<()> {
        self.revive().await?;
        self.cluster.wait_until_ready().await?;
        self.clear_namespaces().await?;
        records::clear(&self.cluster);
        match self.gpus.get() {
            Some(gpus) => gpus.restore(&self.cluster).await,
            None => Ok(()),
        }
    }

    /// Starts the programs that have ended, as a service manager would: kube-scheduler ends when it has lost its lease.
    pub(crate) async fn revive(&self) -> Result<()> {
        self.revive_control().await?;
        for node in self.cluster.nodes() {
            for name in node.sandbox().programs() {
                if !node.program(&name)?.is_running() {
                    node.sandbox().run_again(&name).await?;
                }
            }
        }
        Ok(())
    }

    /// The same, of the control plane and the extender alone.
    pub(crate) async fn revive_control(&self) -> Result<()> {
        let control = self.cluster.control();
        // These first: everything else waits for them.
        let mut names = vec!["etcd".to_owned(), "kube-apiserver".to_owned()];
        names.extend(control.programs());
        for name in names {
            if !control.daemon(&name)?.is_running() {
                self.cluster.start_again(&name).await?;
            }
        }
        Ok(())
    }

    /// Removes the pods of the scenarios and starts to remove their namespaces. The end of that, at least five seconds
    /// later, is not awaited.
    pub(crate) async fn clear_namespaces(&self) -> Result<()> {
        let namespaces: Api<Namespace> = Api::all(self.client());
        let ours = |name: Option<&str>| name.is_some_and(|name| name.starts_with("e2e-"));
        for namespace in namespaces.list(&ListParams::default()).await? {
            let name = namespace.metadata.name.unwrap_or_default();
            if !ours(Some(&name)) || namespace.metadata.deletion_timestamp.is_some() {
                continue;
            }
            // The namespace first: from then on no controller makes pods in it. It would leave the pods their grace
            // periods.
            namespaces.delete(&name, &DeleteParams::default()).await?;
            let pods: Api<Pod> = Api::namespaced(self.client(), &name);
            pods.delete_collection(&DeleteParams::default().grace_period(1), &ListParams::default()).await?;
        }
        let pods: Api<Pod> = Api::all(self.client());
        until("pods of scenarios gone", CLEAN_LIMIT, async || {
            let left = pods.list(&ListParams::default()).await.map_err(|error| error.to_string())?;
            match left.iter().map(|pod| &pod.metadata).find(|pod| ours(pod.namespace.as_deref())) {
                Some(pod) => Err(format!("{:?} in {:?}", pod.name, pod.namespace)),
                None => Ok(()),
            }
        })
        .await?;
        Ok(())
    }
}
