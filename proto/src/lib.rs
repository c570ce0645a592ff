//! The gRPC APIs of kubelet, client and server side: device plugin v1beta1 and pod resources v1.
//!
//! Generated from `proto/*.proto` at build time; beside them names, constants and [`AnyAuthority`]. What the calls mean and in which order
//! kubelet makes them is the plugin's business.
#![forbid(unsafe_code)]

mod authority;

pub use authority::AnyAuthority;

/// Registration with kubelet and the device plugin service.
pub mod deviceplugin {
    #![allow(missing_docs, clippy::all, unreachable_pub)]
    tonic::include_proto!("v1beta1");
}

/// The devices of each container, as kubelet reports them.
pub mod podresources {
    #![allow(missing_docs, clippy::all, unreachable_pub)]
    tonic::include_proto!("v1");
}

/// The API version in a registration.
pub const DEVICE_PLUGIN_VERSION: &str = "v1beta1";
/// File name of kubelet's registration socket in the device plugin directory.
pub const KUBELET_SOCKET: &str = "kubelet.sock";
/// [`deviceplugin::Device::health`] of a device that may be given out.
pub const HEALTHY: &str = "Healthy";
/// [`deviceplugin::Device::health`] of a device that may not.
pub const UNHEALTHY: &str = "Unhealthy";

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::deviceplugin::{ContainerAllocateResponse, RegisterRequest};

    /// The bytes kubelet expects, by hand from the published field numbers: a renumbered field would pass every test in which
    /// both ends are ours.
    #[test]
    fn fields_travel_under_kubelets_numbers() {
        let request = RegisterRequest {
            version: "v".into(),
            endpoint: "e".into(),
            resource_name: "r".into(),
            options: None,
        };
        assert_eq!(request.encode_to_vec(), [0x0a, 1, b'v', 0x12, 1, b'e', 0x1a, 1, b'r']);
    }

    #[test]
    fn equal_responses_encode_to_equal_bytes() {
        let answer = |keys: [&str; 2]| ContainerAllocateResponse {
            envs: keys.into_iter().map(|key| (key.into(), "1".into())).collect(),
            ..Default::default()
        };
        assert_eq!(answer(["a", "b"]).encode_to_vec(), answer(["b", "a"]).encode_to_vec());
    }
}
