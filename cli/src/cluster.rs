//! How a command finds its cluster, and the settings of the extender there.

use std::io::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::anyhow;
use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser as _};
use clap_complete::ArgValueCompleter;
use gantry_extender::PublishedSettings;
use gantry_runtime::{ConnectError, chain};
use kube::Client;

use crate::complete;
use crate::runtime::BadInput;
use crate::visible::Visible;

/// Longest silence of the API server within a response.
const SILENCE: Duration = Duration::from_secs(10);

/// Options of the commands that read a cluster.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct ClusterArgs {
    /// Kubeconfig file [default: KUBECONFIG, or ~/.kube/config]
    #[arg(long, env = "KUBECONFIG", value_name = "FILE", global = true, value_parser = OsStringValueParser::new().map(PathBuf::from))]
    pub(crate) kubeconfig: Option<PathBuf>,

    /// Context of the kubeconfig [default: the current one]
    #[arg(long, value_name = "NAME", global = true, add = ArgValueCompleter::new(complete::contexts))]
    pub(crate) context: Option<String>,
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

    /// A client of the cluster. Its default namespace is that of the context.
    ///
    /// # Errors
    /// The kubeconfig is missing or wrong, or lacks the context.
    pub(crate) async fn connect(&self) -> anyhow::Result<Client> {
        self.connect_for(SILENCE).await
    }

    /// As [`connect`](Self::connect), for an API server that may be silent for that long.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub(crate) async fn connect_for(&self, silence: Duration) -> anyhow::Result<Client> {
        let kubeconfig = self.kubeconfig()?;
        let client =
            gantry_runtime::connect_to(kubeconfig.as_deref(), self.context.as_deref(), silence).await;
        client.map_err(|error| match error {
            ConnectError::Context { .. } | ConnectError::NoKubeconfig(_) => BadInput(error.into()).into(),
            error => error.into(),
        })
    }
}

/// Where Gantry is installed.
#[derive(Debug, Clone, Args)]
pub(crate) struct SystemArgs {
    /// Namespace that Gantry is installed in
    #[arg(
        long,
        env = "GANTRY_SYSTEM_NAMESPACE",
        value_name = "NAMESPACE",
        default_value = "gantry-system",
        global = true,
        add = ArgValueCompleter::new(complete::namespaces)
    )]
    pub(crate) system_namespace: String,
}

impl SystemArgs {
    /// The settings that the leading extender publishes. Where none are published, those of its defaults. Where they
    /// cannot be read, the same, with a warning.
    pub(crate) async fn settings(&self, client: Client) -> PublishedSettings {
        match PublishedSettings::read(client, &self.system_namespace).await {
            Ok(settings) => settings.unwrap_or_default(),
            // Whatever is read next fails for the same reason.
            Err(error) if is_unreachable(&error) => PublishedSettings::default(),
            Err(error) => {
                let error = chain(error.as_ref());
                let text = format!(
                    "gantry: the settings of the extender cannot be read, its defaults are used: {error}"
                );
                // There is no other place to report a closed standard error.
                let _ = writeln!(std::io::stderr(), "{}", Visible::new(&text));
                PublishedSettings::default()
            }
        }
    }
}

/// Whether the API server did not respond at all.
fn is_unreachable(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let failed = cause.downcast_ref::<kube::Error>();
        cause.is::<tokio::time::error::Elapsed>()
            || failed.is_some_and(|error| !matches!(error, kube::Error::Api(_) | kube::Error::SerdeError(_)))
    })
}

/// kubectl's default kubeconfig.
fn home_kubeconfig() -> Option<PathBuf> {
    let path = PathBuf::from(std::env::var_os("HOME")?).join(".kube/config");
    path.is_file().then_some(path)
}
