//! The cluster that the scenarios run on, and what they ask of it again and again.
//! It brings broken parts back after each scenario; it judges nothing.

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use gantry_e2e::gantry::manifests;
use gantry_e2e::{Cluster, ClusterOptions, until};
use k8s_openapi::api::core::v1::{Namespace, Pod, ServiceAccount};
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, Client};
use tokio::sync::OnceCell;

use crate::gpus::Gpus;
use crate::records;

const CLEAN_LIMIT: Duration = Duration::from_secs(60);

/// The shared cluster.
pub(crate) struct Bed {
    cluster: Cluster,
    gpus: OnceCell<Gpus>,
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
        options.scheduler_config = Some(manifests().join("kube-scheduler-config.yaml"));
        let cluster = Cluster::up(options).await?;
        cluster.install(&manifests()).await?;
        Ok(Self {
            cluster,
            gpus: OnceCell::new(),
            _lock: lock,
        })
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

    /// Makes a namespace for a scenario and waits until pods can be made in it.
    pub(crate) async fn namespace(&self, name: &str) -> Result<Api<Pod>> {
        let namespace = Namespace {
            metadata: kube::api::ObjectMeta {
                name: Some(name.to_owned()),
                ..Default::default()
            },
            ..Default::default()
        };
        Api::<Namespace>::all(self.client())
            .create(&PostParams::default(), &namespace)
            .await?;
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client(), name);
        until(format!("service account of {name}"), CLEAN_LIMIT, async || {
            accounts.get("default").await
        })
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
        let control = self.cluster.control();
        // These first: everything else waits for them.
        let mut names = vec!["etcd".to_owned(), "kube-apiserver".to_owned()];
        names.extend(control.programs());
        for name in names {
            if !control.daemon(&name)?.is_running() {
                self.cluster.start_again(&name).await?;
            }
        }
        for node in self.cluster.nodes() {
            for name in node.sandbox().programs() {
                if !node.program(&name)?.is_running() {
                    node.sandbox().run_again(&name).await?;
                }
            }
        }
        Ok(())
    }

    async fn clear_namespaces(&self) -> Result<()> {
        let namespaces: Api<Namespace> = Api::all(self.client());
        let ours = |name: &str| name.starts_with("e2e-");
        for namespace in namespaces.list(&ListParams::default()).await? {
            let name = namespace.metadata.name.unwrap_or_default();
            if ours(&name) {
                // Pods first and at once: a namespace's own deletion waits for their grace periods.
                let pods: Api<Pod> = Api::namespaced(self.client(), &name);
                pods.delete_collection(&DeleteParams::default().grace_period(1), &ListParams::default())
                    .await?;
                namespaces.delete(&name, &DeleteParams::default()).await?;
            }
        }
        until("namespaces of scenarios gone", CLEAN_LIMIT, async || {
            let left = namespaces
                .list(&ListParams::default())
                .await
                .map_err(|error| error.to_string())?;
            let names: Vec<String> = left
                .into_iter()
                .filter_map(|namespace| namespace.metadata.name)
                .collect();
            match names.iter().find(|name| ours(name)) {
                Some(name) => Err(name.clone()),
                None => Ok(()),
            }
        })
        .await?;
        Ok(())
    }
}
