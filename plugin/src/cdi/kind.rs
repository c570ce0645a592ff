//! The names of CDI devices: `vendor/class=name`, and the characters of each part.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::inventory::Device;
use gantry_config::DeviceIdStrategy;

/// Vendor of the CDI devices of NVIDIA's k8s-device-plugin. Distinct from `nvidia.com`, which NVIDIA's toolkit writes: two
/// different specifications of one kind make a runtime use neither.
pub const VENDOR: &str = "k8s.device-plugin.nvidia.com";
/// Name of the device that means all of its class.
pub const ALL: &str = "all";

/// The classes of devices; each has a specification of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// GPUs and MIG devices, with the common edits of their containers.
    Gpu,
    /// Import/export memory channels.
    ImexChannel,
    /// GPUDirect RDMA copy.
    Gdrcopy,
    /// GPUDirect Storage.
    Gds,
    /// Mellanox OFED.
    Mofed,
}

impl Class {
    /// All of them, in the order in which a container names them.
    pub const ALL: [Self; 5] = [Self::Gpu, Self::ImexChannel, Self::Gdrcopy, Self::Gds, Self::Mofed];
}

/// Vendor and class of the GPUs; the other classes have the same vendor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kind {
    vendor: String,
    gpu: String,
}

/// A text that is no `vendor/class`.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "{text:?} is no CDI kind: {problem}; it is vendor/class of letters, digits, '-', '_' and, in the vendor, '.', as in {VENDOR}/gpu"
)]
pub struct KindError {
    text: String,
    problem: &'static str,
}

impl Default for Kind {
    fn default() -> Self {
        Self { vendor: VENDOR.to_owned(), gpu: "gpu".to_owned() }
    }
}

impl FromStr for Kind {
    type Err = KindError;

    fn from_str(text: &str) -> Result<Self, KindError> {
        let refuse = |problem| KindError { text: text.to_owned(), problem };
        let (vendor, class) = text.split_once('/').ok_or_else(|| refuse("it has no '/'"))?;
        if !word(vendor, "-_.") {
            return Err(refuse("the vendor is none"));
        }
        if !word(class, "-_") {
            return Err(refuse("the class is none"));
        }
        if Class::ALL[1..].iter().any(|other| Self::default().class(*other) == class) {
            return Err(refuse("the class is that of another specification"));
        }
        Ok(Self { vendor: vendor.to_owned(), gpu: class.to_owned() })
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/{}", self.vendor, self.gpu)
    }
}

impl Kind {
    /// `vendor/class` of a class.
    pub fn of(&self, class: Class) -> String {
        format!("{}/{}", self.vendor, self.class(class))
    }

    /// The file of a class's specification.
    pub fn file(&self, class: Class) -> String {
        format!("{}-{}.json", self.vendor, self.class(class))
    }

    /// The name for a runtime: `vendor/class=name`.
    pub fn qualified(&self, class: Class, name: &str) -> String {
        format!("{}/{}={name}", self.vendor, self.class(class))
    }

    fn class(&self, class: Class) -> &str {
        match class {
            Class::Gpu => &self.gpu,
            Class::ImexChannel => "imex-channel",
            Class::Gdrcopy => "gdrcopy",
            Class::Gds => "gds",
            Class::Mofed => "mofed",
        }
    }
}

/// Whether a text begins with a letter, ends with a letter or digit, and has only these and `more` between.
fn word(text: &str, more: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_alphabetic())
        && text.ends_with(|last: char| last.is_ascii_alphanumeric())
        && text.chars().all(|char| char.is_ascii_alphanumeric() || more.contains(char))
}

/// The ID of a device for the NVIDIA runtime. Indices are NVML's current ones: after a GPU was removed, the following ones have other
/// indices. If the index is unknown, the UUID means the same device to every runtime.
pub fn runtime_id(device: &Device, strategy: DeviceIdStrategy) -> String {
    let index = match strategy {
        DeviceIdStrategy::Uuid => None,
        DeviceIdStrategy::Index => device.nvml_index,
    };
    index.map_or_else(|| device.uuid.clone(), |gpu| indexed(gpu, device))
}

/// The preferred name of a device in our specification, if it is free: see [`super::Names`]. Its index is the GPU's place, which stays
/// while another GPU is lost.
pub(super) fn entry_name(device: &Device, strategy: DeviceIdStrategy) -> String {
    device_name(&match strategy {
        DeviceIdStrategy::Uuid => device.uuid.clone(),
        DeviceIdStrategy::Index => indexed(device.gpu, device),
    })
}

fn indexed(gpu: u8, device: &Device) -> String {
    match &device.slice {
        None => gpu.to_string(),
        Some(slice) => format!("{gpu}:{}", slice.index),
    }
}

/// `id` as the name of a CDI device. Drivers before 470 have slashes in the UUIDs of MIG devices, which CDI does not allow.
pub fn device_name(id: &str) -> String {
    let allowed = |char: char| char.is_ascii_alphanumeric() || "-_.:".contains(char);
    let name: String = id.chars().map(|char| if allowed(char) { char } else { '-' }).collect();
    let name = name.trim_matches(|edge: char| !edge.is_ascii_alphanumeric());
    if name.is_empty() { "unnamed".to_owned() } else { name.to_owned() }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_are_those_of_nvidias_plugin() {
        let kind = Kind::default();
        assert_eq!(kind.to_string(), "k8s.device-plugin.nvidia.com/gpu");
        assert_eq!(
            Class::ALL.map(|class| kind.file(class)),
            [
                "k8s.device-plugin.nvidia.com-gpu.json",
                "k8s.device-plugin.nvidia.com-imex-channel.json",
                "k8s.device-plugin.nvidia.com-gdrcopy.json",
                "k8s.device-plugin.nvidia.com-gds.json",
                "k8s.device-plugin.nvidia.com-mofed.json",
            ]
        );
        assert_eq!(kind.qualified(Class::ImexChannel, "0"), "k8s.device-plugin.nvidia.com/imex-channel=0");
    }

    #[test]
    fn own_kind_changes_all_classes() {
        let kind: Kind = "example.com/accelerator".parse().unwrap();
        assert_eq!(kind.of(Class::Gpu), "example.com/accelerator");
        assert_eq!(kind.of(Class::Gds), "example.com/gds");
    }

    #[test]
    fn invalid_kind_is_refused_with_a_reason() {
        let refused = |text: &str| text.parse::<Kind>().unwrap_err().to_string();
        let wrong = ["gpu", "/gpu", "-a.com/gpu", "a.com/", "a.com/g=pu", "a.com/gds"];
        insta::assert_snapshot!(wrong.map(refused).join("\n"), @r#"
        "gpu" is no CDI kind: it has no '/'; it is vendor/class of letters, digits, '-', '_' and, in the vendor, '.', as in k8s.device-plugin.nvidia.com/gpu
        "/gpu" is no CDI kind: the vendor is none; it is vendor/class of letters, digits, '-', '_' and, in the vendor, '.', as in k8s.device-plugin.nvidia.com/gpu
        "-a.com/gpu" is no CDI kind: the vendor is none; it is vendor/class of letters, digits, '-', '_' and, in the vendor, '.', as in k8s.device-plugin.nvidia.com/gpu
        "a.com/" is no CDI kind: the class is none; it is vendor/class of letters, digits, '-', '_' and, in the vendor, '.', as in k8s.device-plugin.nvidia.com/gpu
        "a.com/g=pu" is no CDI kind: the class is none; it is vendor/class of letters, digits, '-', '_' and, in the vendor, '.', as in k8s.device-plugin.nvidia.com/gpu
        "a.com/gds" is no CDI kind: the class is that of another specification; it is vendor/class of letters, digits, '-', '_' and, in the vendor, '.', as in k8s.device-plugin.nvidia.com/gpu
        "#);
    }

    #[test]
    fn slashes_of_old_mig_uuids_become_dashes() {
        assert_eq!(
            device_name("MIG-GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f/7/0"),
            "MIG-GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f-7-0"
        );
    }

    proptest! {
        #[test]
        fn device_name_is_allowed_by_cdi(id in ".{0,40}") {
            let name = device_name(&id);
            prop_assert!(name.starts_with(|first: char| first.is_ascii_alphanumeric()));
            prop_assert!(name.ends_with(|last: char| last.is_ascii_alphanumeric()));
            prop_assert!(name.chars().all(|char| char.is_ascii_alphanumeric() || "-_.:".contains(char)));
        }

        #[test]
        fn allowed_name_stays(id in "[A-Za-z0-9]([A-Za-z0-9_.:-]{0,30}[A-Za-z0-9])?") {
            prop_assert_eq!(device_name(&id), id);
        }

        #[test]
        fn kind_is_parsed_as_displayed(vendor in "[a-z]([a-z0-9_.-]{0,20}[a-z0-9])?", class in "[a-z]([a-z0-9_-]{0,20}[a-z0-9])?") {
            let text = format!("{vendor}/{class}");
            match text.parse::<Kind>() {
                Ok(kind) => prop_assert_eq!(kind.to_string(), text),
                Err(error) => prop_assert!(["imex-channel", "gdrcopy", "gds", "mofed"].contains(&class.as_str()), "{}", error),
            }
        }

        #[test]
        fn arbitrary_text_does_not_panic(text in ".{0,60}") {
            let _ = text.parse::<Kind>();
        }
    }
}
