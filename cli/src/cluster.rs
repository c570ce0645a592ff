//! How a command finds its cluster.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::anyhow;
use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser as _};
use kube::Client;

use crate::runtime::BadInput;

/// Longest silence of the API server within a response.
const SILENCE: Duration = Duration::from_secs(10);

/// Options of the commands that read a cluster.
#[derive(Debug, Clone, Args)]
pub(crate) struct ClusterArgs {
    /// Kubeconfig file [default: KUBECONFIG, or ~/.kube/config]
    #[arg(long, env = "KUBECONFIG", value_name = "FILE", global = true, value_parser = OsStringValueParser::new().map(PathBuf::from))]
    kubeconfig: Option<PathBuf>,
}

impl ClusterArgs {
    /// The kubeconfig; none for the service account of the pod that this runs in.
    ///
    /// # Errors
    /// The named file does not exist.
    pub(crate) fn kubeconfig(&self) -> anyhow::Result<Option<PathBuf>> {
        // Empty means not set, as for kubectl.
        let named = self.kubeconfig.clone().filter(|path| !path.as_os_str().is_empty());
        if let Some(paths) = &named {
            let exists = |path: PathBuf| path.exists() && !path.is_dir();
            // The variable may list several.
            if !exists(paths.clone()) && !std::env::split_paths(paths).any(exists) {
                let place = paths.display();
                let wrong = match paths.is_dir() {
                    true => anyhow!("{place} is a folder; name the kubeconfig file in it"),
                    false => anyhow!("there is no kubeconfig {place}"),
                };
                return Err(BadInput(wrong).into());
            }
        }
        Ok(named.or_else(home_kubeconfig))
    }

    /// A client of the cluster.
    ///
    /// # Errors
    /// The kubeconfig is missing or wrong.
    pub(crate) async fn connect(&self) -> anyhow::Result<Client> {
        Ok(gantry_runtime::connect(self.kubeconfig()?.as_deref(), SILENCE).await?)
    }
}

/// kubectl's default kubeconfig.
fn home_kubeconfig() -> Option<PathBuf> {
    let path = PathBuf::from(std::env::var_os("HOME")?).join(".kube/config");
    path.is_file().then_some(path)
}
