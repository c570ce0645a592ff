//! The one call a plugin makes to kubelet: Register.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use gantry_api::ResourceName;
use gantry_proto::DEVICE_PLUGIN_VERSION;
use gantry_proto::deviceplugin::registration_client::RegistrationClient;
use gantry_proto::deviceplugin::{DevicePluginOptions, RegisterRequest};
use gantry_runtime::chain;
use tonic::transport::Endpoint;

/// Kubelet dials back for up to 10 s before it answers; more than that is no answer.
const DEADLINE: Duration = Duration::from_secs(12);

/// What a registration says of the plugin, and what it answers when asked again.
pub(super) const OPTIONS: DevicePluginOptions = DevicePluginOptions {
    pre_start_required: false,
    get_preferred_allocation_available: true,
};

/// Why kubelet could not be told of a resource.
#[derive(Debug, thiserror::Error)]
pub(super) enum RegisterError {
    /// The path cannot be written as an address.
    #[error("{} is no usable socket path", path.display())]
    Address {
        path: PathBuf,
        #[source]
        source: tonic::transport::Error,
    },
    /// Nobody listens, or not yet.
    #[error("cannot connect to kubelet on {}", path.display())]
    Connect {
        path: PathBuf,
        #[source]
        source: tonic::transport::Error,
    },
    /// Kubelet answered with an error; its text says why.
    #[error("kubelet refused {resource}: {}", status.message())]
    Refused {
        resource: ResourceName,
        #[source]
        status: tonic::Status,
    },
}

impl RegisterError {
    /// Everything there is to say of it, in one line.
    pub(super) fn reason(&self) -> String {
        match self {
            // It says all of the status that is for people.
            Self::Refused { .. } => self.to_string(),
            Self::Address { .. } | Self::Connect { .. } => chain(self),
        }
    }
}

/// Tells the kubelet that listens on `kubelet` of the resource served on the socket named `endpoint`. Returns how long it took.
pub(super) async fn register(
    kubelet: &Path,
    endpoint: &str,
    resource: &ResourceName,
) -> Result<Duration, RegisterError> {
    let began = Instant::now();
    let channel = Endpoint::try_from(format!("unix://{}", kubelet.display()))
        .map_err(|source| RegisterError::Address {
            path: kubelet.to_owned(),
            source,
        })?
        .timeout(DEADLINE)
        .connect()
        .await
        .map_err(|source| RegisterError::Connect {
            path: kubelet.to_owned(),
            source,
        })?;
    RegistrationClient::new(channel)
        .register(RegisterRequest {
            version: DEVICE_PLUGIN_VERSION.to_owned(),
            endpoint: endpoint.to_owned(),
            resource_name: resource.to_string(),
            options: Some(OPTIONS),
        })
        .await
        .map_err(|status| RegisterError::Refused {
            resource: resource.clone(),
            status,
        })?;
    Ok(began.elapsed())
}
