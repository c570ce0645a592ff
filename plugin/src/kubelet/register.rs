//! The Register call to kubelet.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use gantry_api::ResourceName;
use gantry_proto::DEVICE_PLUGIN_VERSION;
use gantry_proto::deviceplugin::registration_client::RegistrationClient;
use gantry_proto::deviceplugin::{DevicePluginOptions, RegisterRequest};
use gantry_runtime::chain;
use tonic::transport::Endpoint;

/// Time limit: kubelet connects back for up to 10 s before it returns.
const DEADLINE: Duration = Duration::from_secs(12);

/// The plugin options, in the registration and in GetDevicePluginOptions.
pub(super) const OPTIONS: DevicePluginOptions =
    DevicePluginOptions { pre_start_required: false, get_preferred_allocation_available: true };

/// Why a resource could not be registered.
#[derive(Debug, thiserror::Error)]
pub(super) enum RegisterError {
    /// The path cannot be used as an address.
    #[error("{} is not a usable socket path", path.display())]
    Address {
        path: PathBuf,
        #[source]
        source: tonic::transport::Error,
    },
    /// Kubelet does not listen.
    #[error("cannot connect to kubelet on {}", path.display())]
    Connect {
        path: PathBuf,
        #[source]
        source: tonic::transport::Error,
    },
    /// Kubelet returned an error.
    #[error("kubelet refused {resource}: {}", status.message())]
    Refused {
        resource: ResourceName,
        #[source]
        status: tonic::Status,
    },
}

impl RegisterError {
    /// The whole cause chain in one line.
    pub(super) fn reason(&self) -> String {
        match self {
            // The message already contains the status.
            Self::Refused { .. } => self.to_string(),
            Self::Address { .. } | Self::Connect { .. } => chain(self),
        }
    }
}

/// Registers the resource served on the socket `endpoint` at the kubelet on socket `kubelet`. Returns the
/// duration.
pub(super) async fn register(
    kubelet: &Path,
    endpoint: &str,
    resource: &ResourceName,
) -> Result<Duration, RegisterError> {
    let began = Instant::now();
    let channel = Endpoint::try_from(format!("unix://{}", kubelet.display()))
        .map_err(|source| RegisterError::Address { path: kubelet.to_owned(), source })?
        .timeout(DEADLINE)
        .connect()
        .await
        .map_err(|source| RegisterError::Connect { path: kubelet.to_owned(), source })?;
    RegistrationClient::new(channel)
        .register(RegisterRequest {
            version: DEVICE_PLUGIN_VERSION.to_owned(),
            endpoint: endpoint.to_owned(),
            resource_name: resource.to_string(),
            options: Some(OPTIONS),
        })
        .await
        .map_err(|status| RegisterError::Refused { resource: resource.clone(), status })?;
    Ok(began.elapsed())
}
