//! Points a Service to this process while it leads, by the Service's single EndpointSlice. A pod can so be ready as
//! soon as it is able to lead, which a rollout waits for, while only the leader gets calls. `lease` decides which
//! process leads.

use std::net::IpAddr;
use std::time::Duration;

use gantry_api::names;
use gantry_runtime::chain;
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointConditions, EndpointPort, EndpointSlice};
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};
use tokio_util::sync::CancellationToken;

/// Kubernetes' labels for the Service of a slice, and for its manager.
const SERVICE_LABEL: &str = "kubernetes.io/service-name";
const MANAGER_LABEL: &str = "endpointslice.kubernetes.io/managed-by";

/// Period of the checks of a slice: another client may change or delete it.
const LOOK: Duration = Duration::from_secs(10);
/// Pause between two attempts.
const AGAIN: Duration = Duration::from_millis(500);
/// Time limit of one request.
const TIMEOUT: Duration = Duration::from_secs(2);

/// The Service, and the address that it points to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Settings {
    /// The Service's namespace.
    pub namespace: String,
    /// The Service, which has no selector.
    pub service: String,
    /// This process's address, as the Service's clients reach it.
    pub address: IpAddr,
    /// The port it listens on.
    pub port: u16,
}

/// Keeps the Service pointing here until `until`. It is not reset then: the next leader overwrites it.
pub(crate) async fn run(client: Client, settings: Settings, until: CancellationToken) {
    let slices: Api<EndpointSlice> = Api::namespaced(client, &settings.namespace);
    let mut is_reported = false;
    let keep = async {
        loop {
            let pause = match tokio::time::timeout(TIMEOUT, settings.announce(&slices)).await {
                Ok(Ok(written)) => {
                    if written {
                        tracing::info!(service = %settings.service, address = %settings.address, "the Service leads here");
                    }
                    is_reported = false;
                    LOOK
                }
                Ok(Err(kube::Error::Api(status))) if status.code == 409 => AGAIN,
                failed => {
                    let error = match failed {
                        Ok(Err(error)) => chain(&error),
                        _ => "no answer in time".to_owned(),
                    };
                    if !std::mem::replace(&mut is_reported, true) {
                        tracing::warn!(service = %settings.service, %error, "cannot lead the Service here, trying again");
                    }
                    AGAIN
                }
            };
            tokio::time::sleep(pause).await;
        }
    };
    until.run_until_cancelled(keep).await.unwrap_or(());
}

impl Settings {
    /// Writes the slice if it differs. The write carries the version that was read, so that a late one changes nothing.
    async fn announce(&self, slices: &Api<EndpointSlice>) -> kube::Result<bool> {
        let wanted = self.slice();
        let name = wanted.metadata.name.clone().unwrap_or_default();
        let params = PostParams::default();
        match slices.get(&name).await {
            Err(kube::Error::Api(status)) if status.code == 404 => slices.create(&params, &wanted).await?,
            Err(error) => return Err(error),
            Ok(found) if leads_alike(&found, &wanted) => return Ok(false),
            Ok(found) => {
                let version = found.metadata.resource_version;
                let mut wanted = wanted;
                wanted.metadata.resource_version = version;
                slices.replace(&name, &params, &wanted).await?
            }
        };
        Ok(true)
    }

    /// The slice that points here. Its address type is immutable and therefore part of its name.
    fn slice(&self) -> EndpointSlice {
        let kind = if self.address.is_ipv4() { "IPv4" } else { "IPv6" };
        let labels = [(SERVICE_LABEL, self.service.as_str()), (MANAGER_LABEL, names::EXTENDER)];
        EndpointSlice {
            metadata: ObjectMeta {
                name: Some(format!("{}-{}", self.service, kind.to_ascii_lowercase())),
                namespace: Some(self.namespace.clone()),
                labels: Some(labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into()),
                ..ObjectMeta::default()
            },
            address_type: kind.to_owned(),
            endpoints: vec![Endpoint {
                addresses: vec![self.address.to_string()],
                conditions: Some(EndpointConditions {
                    ready: Some(true),
                    serving: Some(true),
                    terminating: Some(false),
                }),
                ..Endpoint::default()
            }],
            // Without a name, like the port of the Service.
            ports: Some(vec![EndpointPort {
                port: Some(i32::from(self.port)),
                protocol: Some("TCP".to_owned()),
                ..EndpointPort::default()
            }]),
        }
    }
}

/// Whether both slices send clients to the same address.
fn leads_alike(found: &EndpointSlice, wanted: &EndpointSlice) -> bool {
    let labelled = |slice: &EndpointSlice| {
        let labels = slice.metadata.labels.as_ref();
        labels.and_then(|labels| labels.get(SERVICE_LABEL)).cloned()
    };
    let ends = |slice: &EndpointSlice| -> Vec<(Vec<String>, Option<EndpointConditions>)> {
        let ends = slice.endpoints.iter();
        ends.map(|end| (end.addresses.clone(), end.conditions.clone())).collect()
    };
    let ports = |slice: &EndpointSlice| -> Vec<(Option<i32>, String)> {
        let ports = slice.ports.iter().flatten();
        ports.map(|port| (port.port, port.name.clone().unwrap_or_default())).collect()
    };
    labelled(found) == labelled(wanted) && ends(found) == ends(wanted) && ports(found) == ports(wanted)
}

#[cfg(test)]
mod tests;
