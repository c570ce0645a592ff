//! What is compared: kube-scheduler's configuration in each case, and the extender that goes with it. Everything that
//! the configurations do not differ in on purpose is the same.

use std::fmt;
use std::path::Path;

use anyhow::{Context, Result};
use gantry_e2e::gantry::EXTENDER;
use gantry_e2e::{Cluster, Daemon, Program, until};
use serde_json::{Value, json};

use crate::load;

/// One case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Case {
    /// No extender, every node scored: what kube-scheduler alone does with the same sampling.
    Stock,
    /// An extender that lets every node pass, prefers the first, and binds.
    Floor,
    /// `gantry extender`, configured as in the manifests.
    Gantry,
}

impl Case {
    pub(crate) const ALL: [Self; 3] = [Self::Stock, Self::Floor, Self::Gantry];

    /// Writes kube-scheduler's configuration: that of the manifests, without its extender for [`Self::Stock`], and with
    /// a client that is not the limit.
    pub(crate) fn write_config(self, path: &Path) -> Result<()> {
        let source = load::root().join("manifests/kube-scheduler-config.yaml");
        let text = std::fs::read_to_string(&source).with_context(|| source.display().to_string())?;
        let mut config: Value = serde_saphyr::from_str(&text)?;
        config["leaderElection"] = json!({ "leaderElect": false });
        config["clientConnection"]["qps"] = json!(10_000);
        config["clientConnection"]["burst"] = json!(20_000);
        if self == Self::Stock
            && let Some(config) = config.as_object_mut()
        {
            config.remove("extenders");
        }
        std::fs::write(path, config.to_string()).with_context(|| path.display().to_string())
    }

    /// Starts the extender of this case next to kube-scheduler, Gantry's with additional arguments, and waits until it
    /// is ready.
    pub(crate) async fn start_extender(
        self,
        cluster: &Cluster,
        gantry: &Path,
        extra: &[String],
    ) -> Result<Option<Daemon>> {
        let daemon = match self {
            Self::Stock => return Ok(None),
            Self::Floor => {
                let kubeconfig = cluster.kubeconfig().display().to_string();
                let own = std::env::current_exe()?;
                let args = ["floor", "--kubeconfig", &kubeconfig];
                cluster.control().run(Program::new("floor", own, args)).await?
            }
            Self::Gantry => cluster.start_replica(gantry, EXTENDER, None, extra).await?,
        };
        until(format!("{self} ready"), load::LIMIT, async || {
            daemon.check().map_err(|error| error.to_string())?;
            let probe = ["busybox", "wget", "-q", "-O", "-", "http://127.0.0.1:8010/readyz"];
            cluster.control().exec(&probe).await.map(drop).map_err(|error| error.to_string())
        })
        .await?;
        Ok(Some(daemon))
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Stock => "no extender",
            Self::Floor => "extender that answers at once",
            Self::Gantry => "gantry extender",
        })
    }
}
