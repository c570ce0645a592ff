//! Newtypes for identifiers of Kubernetes objects and devices, kept as written.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Makes a cheap-to-clone string newtype.
macro_rules! name_type {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(Arc<str>);

        impl $name {
            /// The identifier as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                Self(text.into())
            }
        }

        impl From<String> for $name {
            fn from(text: String) -> Self {
                Self(text.into())
            }
        }

        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl schemars::JsonSchema for $name {
            fn schema_name() -> std::borrow::Cow<'static, str> {
                stringify!($name).into()
            }

            fn inline_schema() -> bool {
                true
            }

            fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
                String::json_schema(generator)
            }
        }
    };
}

name_type!(
    /// What kubelet counts: the UUID of a GPU or MIG device, or a replica of either.
    DeviceId
);
impl DeviceId {
    /// Replica number `number` of the GPU or MIG device `unit`: `<unit>::<number>`, as NVIDIA's plugin writes it.
    pub fn replica(unit: &str, number: u16) -> Self {
        format!("{unit}::{number}").into()
    }

    /// UUID of the GPU or MIG device, without the number of a replica.
    pub fn unit(&self) -> &str {
        self.0.split_once("::").map_or(&*self.0, |(unit, _)| unit)
    }
}

name_type!(
    /// Name of a node.
    NodeName
);
name_type!(
    /// UID of a pod. Names are reused, UIDs are not.
    PodUid
);
name_type!(
    /// Name of an extended resource, such as `nvidia.com/gpu`.
    ResourceName
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replica_id_names_its_device() {
        assert_eq!(DeviceId::replica("GPU-1", 3).as_str(), "GPU-1::3");
        assert_eq!(DeviceId::replica("GPU-1", 3).unit(), "GPU-1");
        assert_eq!(DeviceId::from("MIG-2").unit(), "MIG-2");
    }
}
