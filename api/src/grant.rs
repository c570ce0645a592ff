//! The grant: the exact devices of each container of a pod, as the extender writes it into the Binding and the plugin
//! reads it.
//!
//! The API server checks neither size nor content of a Binding's annotations, and every client that may edit pods may
//! write one. So each reader checks a grant in full: version, size, pod, node, shape.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::ids::{DeviceId, NodeName, PodUid, ResourceName};

/// The exact devices of each container of one pod on one node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Grant {
    /// Format version, [`Grant::VERSION`].
    pub version: u32,
    /// Unique per decision. After a conflict it identifies the extender's own Binding.
    pub plan: String,
    /// The pod of the grant. A grant copied to another pod is void.
    pub pod: PodUid,
    /// The node whose devices these are.
    pub node: NodeName,
    /// The containers that request devices, in the order in which kubelet allocates: init containers, then app
    /// containers.
    pub containers: Vec<ContainerGrant>,
}

/// The devices of one container, of one resource.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerGrant {
    /// Name of the container.
    pub name: String,
    /// The resource.
    pub resource: ResourceName,
    /// Which devices.
    #[serde(flatten)]
    pub share: ContainerShare,
}

/// The devices of a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ContainerShare {
    /// Exactly these, sorted.
    Devices(Vec<DeviceId>),
    /// This many of the devices of the pod's init containers. Kubelet reuses them without a call to the plugin.
    AnyOfHeld(u32),
}

/// Why an annotation is not a valid grant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GrantError {
    /// Longer than the API server allows an annotation to be anywhere but in a Binding.
    #[error("grant of {size} bytes, at most {max} are allowed")]
    TooLarge {
        /// Bytes found.
        size: usize,
        /// Bytes allowed.
        max: usize,
    },
    /// Not JSON of this shape.
    #[error("grant is not readable: {0}")]
    Malformed(String),
    /// Written by a newer or foreign program.
    #[error("grant has version {found}, {expected} is understood")]
    Version {
        /// Version found.
        found: u32,
        /// Version understood.
        expected: u32,
    },
    /// Decided for another pod: a copied annotation.
    #[error("grant was decided for pod {granted}, this is {actual}")]
    OtherPod {
        /// UID in the grant.
        granted: PodUid,
        /// UID of the pod that carries it.
        actual: PodUid,
    },
    /// Decided for another node.
    #[error("grant was decided for node {granted}, the pod is on {actual}")]
    OtherNode {
        /// Node in the grant.
        granted: NodeName,
        /// Node of the pod.
        actual: NodeName,
    },
    /// A container's devices repeat, are empty, or a share of what is held has nothing to share.
    #[error("grant of container {container:?}: {problem}")]
    Shape {
        /// Name of the container.
        container: String,
        /// What is wrong.
        problem: &'static str,
    },
}

impl Grant {
    /// The format this code writes and reads.
    pub const VERSION: u32 = 1;
    /// Most bytes of a grant: far below the API server's 256 KiB for all annotations of a pod, far above 16 devices x
    /// 100 containers.
    pub const MAX_BYTES: usize = 64 * 1024;

    /// Reads and checks the annotation of pod `pod` on node `node`.
    ///
    /// # Errors
    /// See [`GrantError`]: a grant that fails one check is void.
    pub fn parse(annotation: &str, pod: &PodUid, node: &NodeName) -> Result<Self, GrantError> {
        if annotation.len() > Self::MAX_BYTES {
            return Err(GrantError::TooLarge { size: annotation.len(), max: Self::MAX_BYTES });
        }
        let grant: Self =
            serde_json::from_str(annotation).map_err(|error| GrantError::Malformed(error.to_string()))?;
        if grant.version != Self::VERSION {
            return Err(GrantError::Version { found: grant.version, expected: Self::VERSION });
        }
        if grant.pod != *pod {
            return Err(GrantError::OtherPod { granted: grant.pod, actual: pod.clone() });
        }
        if grant.node != *node {
            return Err(GrantError::OtherNode { granted: grant.node, actual: node.clone() });
        }
        grant.check_shape()?;
        Ok(grant)
    }

    /// The annotation's text.
    ///
    /// # Errors
    /// The grant is one that [`Grant::parse`] refuses.
    pub fn to_annotation(&self) -> Result<String, GrantError> {
        self.check_shape()?;
        let text = serde_json::to_string(self).map_err(|error| GrantError::Malformed(error.to_string()))?;
        if text.len() > Self::MAX_BYTES {
            return Err(GrantError::TooLarge { size: text.len(), max: Self::MAX_BYTES });
        }
        Ok(text)
    }

    /// Every device of `resource` that the pod holds: the union over its containers.
    pub fn held(&self, resource: &str) -> BTreeSet<DeviceId> {
        self.containers
            .iter()
            .filter(|container| container.resource.as_str() == resource)
            .flat_map(|container| match &container.share {
                ContainerShare::Devices(devices) => devices.as_slice(),
                ContainerShare::AnyOfHeld(_) => &[],
            })
            .cloned()
            .collect()
    }

    /// The resources of the granted devices.
    pub fn resources(&self) -> BTreeSet<ResourceName> {
        self.containers.iter().map(|container| container.resource.clone()).collect()
    }

    fn check_shape(&self) -> Result<(), GrantError> {
        for container in &self.containers {
            let refuse = |problem| Err(GrantError::Shape { container: container.name.clone(), problem });
            match &container.share {
                ContainerShare::Devices(devices) if devices.is_empty() => return refuse("no device"),
                ContainerShare::Devices(devices) => {
                    if devices.iter().collect::<BTreeSet<_>>().len() != devices.len() {
                        return refuse("a device is named twice");
                    }
                }
                ContainerShare::AnyOfHeld(count) => {
                    let held = self.held(container.resource.as_str()).len();
                    if *count == 0 || usize::try_from(*count).is_ok_and(|count| count > held) {
                        return refuse("shares more than the pod holds, or nothing");
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn grant() -> Grant {
        Grant {
            version: Grant::VERSION,
            plan: "p-1".into(),
            pod: "uid-1".into(),
            node: "node-1".into(),
            containers: vec![
                ContainerGrant {
                    name: "fetch".into(),
                    resource: "nvidia.com/gpu".into(),
                    share: ContainerShare::Devices(vec!["GPU-a".into(), "GPU-b".into()]),
                },
                ContainerGrant {
                    name: "train".into(),
                    resource: "nvidia.com/gpu".into(),
                    share: ContainerShare::AnyOfHeld(1),
                },
            ],
        }
    }

    #[test]
    fn grant_round_trips_through_the_annotation() {
        let text = grant().to_annotation().unwrap();
        insta::assert_snapshot!(text, @r#"{"version":1,"plan":"p-1","pod":"uid-1","node":"node-1","containers":[{"name":"fetch","resource":"nvidia.com/gpu","devices":["GPU-a","GPU-b"]},{"name":"train","resource":"nvidia.com/gpu","anyOfHeld":1}]}"#);
        assert_eq!(Grant::parse(&text, &"uid-1".into(), &"node-1".into()).unwrap(), grant());
    }

    #[test]
    fn grant_of_another_pod_or_node_is_void() {
        let text = grant().to_annotation().unwrap();
        assert!(matches!(
            Grant::parse(&text, &"uid-2".into(), &"node-1".into()),
            Err(GrantError::OtherPod { .. })
        ));
        assert!(matches!(
            Grant::parse(&text, &"uid-1".into(), &"node-2".into()),
            Err(GrantError::OtherNode { .. })
        ));
    }

    #[test]
    fn duplicate_device_is_refused() {
        let mut forged = grant();
        forged.containers[0].share = ContainerShare::Devices(vec!["GPU-a".into(), "GPU-a".into()]);
        assert_eq!(
            forged.to_annotation().unwrap_err().to_string(),
            r#"grant of container "fetch": a device is named twice"#
        );
    }

    #[test]
    fn oversized_annotation_is_refused() {
        let huge = " ".repeat(Grant::MAX_BYTES + 1);
        assert!(matches!(
            Grant::parse(&huge, &"uid-1".into(), &"node-1".into()),
            Err(GrantError::TooLarge { .. })
        ));
    }

    proptest! {
        #[test]
        fn arbitrary_text_does_not_panic(text in ".{0,400}") {
            let _ = Grant::parse(&text, &"uid-1".into(), &"node-1".into());
        }
    }
}
