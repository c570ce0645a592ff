//! A CDI specification as its JSON has it, with the oldest version of CDI that has its content. Plain data.

use std::path::PathBuf;

use serde::Serialize;

/// A specification: devices of one kind, and the edits common to every container of any of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Spec {
    cdi_version: &'static str,
    kind: String,
    #[serde(skip_serializing_if = "Edits::is_empty")]
    container_edits: Edits,
    devices: Vec<Device>,
}

/// One device by name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Device {
    /// Its name in its kind.
    pub name: String,
    /// What it adds to a container.
    pub container_edits: Edits,
}

/// What is added to a container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Edits {
    /// `NAME=value`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<Node>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
    /// Programs run on the host while the container is made.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<Hook>,
    /// Groups the container's process is put into.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub additional_gids: Vec<u32>,
}

/// A device node. The runtime reads missing properties on the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Node {
    /// In the container.
    pub path: String,
    /// On the host, where that differs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_path: Option<PathBuf>,
    /// `c`, with the numbers.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub major: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minor: Option<u32>,
    /// Permission bits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file_mode: Option<u32>,
    /// The permissions in the container's device control group.
    pub permissions: &'static str,
    /// Owning group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Mount {
    pub host_path: PathBuf,
    pub container_path: PathBuf,
    /// As mount(8) has them.
    pub options: &'static [&'static str],
}

/// A program that is run while a container is made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Hook {
    /// When, as the OCI runtime specification calls it.
    pub hook_name: &'static str,
    /// The program, on the host.
    pub path: PathBuf,
    /// Its arguments, its own name first.
    pub args: Vec<String>,
}

impl Edits {
    /// Whether nothing is added.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Adds the edits of `other` that are missing.
    pub fn unite(&mut self, other: &Self) {
        extend(&mut self.env, &other.env);
        extend(&mut self.device_nodes, &other.device_nodes);
        extend(&mut self.mounts, &other.mounts);
        extend(&mut self.hooks, &other.hooks);
        extend(&mut self.additional_gids, &other.additional_gids);
    }
}

fn extend<T: Clone + PartialEq>(to: &mut Vec<T>, from: &[T]) {
    for item in from {
        if !to.contains(item) {
            to.push(item.clone());
        }
    }
}

impl Spec {
    /// A specification, or `None` if no device adds anything, because runtimes refuse one without devices. They refuse devices without
    /// edits too, which are left out. The first device with a name counts.
    pub fn new(
        kind: String,
        container_edits: Edits,
        devices: impl IntoIterator<Item = Device>,
    ) -> Option<Self> {
        let mut with_edits: Vec<Device> = Vec::new();
        for device in devices {
            if !device.container_edits.is_empty() && with_edits.iter().all(|known| known.name != device.name)
            {
                with_edits.push(device);
            }
        }
        if with_edits.is_empty() {
            return None;
        }
        let cdi_version = oldest_version(&container_edits, &with_edits);
        Some(Self { cdi_version, kind, container_edits, devices: with_edits })
    }

    /// Its devices' names.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.devices.iter().map(|device| device.name.as_str())
    }

    /// Its JSON.
    pub fn text(&self) -> String {
        // Only a path that is not Unicode could fail, and none is accepted.
        serde_json::to_string_pretty(self).unwrap_or_default()
    }
}

/// The oldest version that is sufficient, because runtimes refuse versions that they do not know.
fn oldest_version(common: &Edits, devices: &[Device]) -> &'static str {
    let mut edits = std::iter::once(common).chain(devices.iter().map(|device| &device.container_edits));
    if edits.clone().any(|edits| !edits.additional_gids.is_empty()) {
        return "0.7.0";
    }
    let digit_first = |device: &Device| device.name.starts_with(|first: char| first.is_ascii_digit());
    let host_path = |edits: &Edits| edits.device_nodes.iter().any(|node| node.host_path.is_some());
    if devices.iter().any(digit_first) || edits.any(host_path) {
        return "0.5.0";
    }
    "0.3.0"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(host_path: Option<&str>) -> Edits {
        Edits {
            device_nodes: vec![Node {
                path: "/dev/nvidia0".into(),
                host_path: host_path.map(PathBuf::from),
                kind: None,
                major: None,
                minor: None,
                file_mode: None,
                permissions: "rwm",
                gid: None,
            }],
            ..Edits::default()
        }
    }

    fn device(name: &str, container_edits: Edits) -> Device {
        Device { name: name.into(), container_edits }
    }

    fn version(edits: Edits, devices: Vec<Device>) -> &'static str {
        Spec::new("a.com/gpu".into(), edits, devices).unwrap().cdi_version
    }

    #[test]
    fn version_is_the_oldest_with_the_content() {
        let plain = || device("GPU-0", node(None));
        assert_eq!(version(Edits::default(), vec![plain()]), "0.3.0");
        assert_eq!(version(Edits::default(), vec![device("0", node(None))]), "0.5.0");
        assert_eq!(version(node(Some("/run/driver/dev/nvidiactl")), vec![plain()]), "0.5.0");
        let groups = Edits { additional_gids: vec![44], ..node(Some("/x")) };
        assert_eq!(version(Edits::default(), vec![plain(), device("1", groups)]), "0.7.0");
    }

    #[test]
    fn devices_without_edits_or_with_a_used_name_are_dropped() {
        let kind = || "a.com/gpu".to_owned();
        assert_eq!(Spec::new(kind(), node(None), []), None);
        assert_eq!(Spec::new(kind(), node(None), [device("GPU-0", Edits::default())]), None);
        let twice = [device("GPU-0", node(None)), device("GPU-0", node(Some("/x")))];
        let spec = Spec::new(kind(), Edits::default(), twice).unwrap();
        assert_eq!(spec.devices, [device("GPU-0", node(None))]);
    }
}
