//! CDI names: from the operator's kind, from NVML's device names, and in responses to kubelet.

use std::collections::BTreeSet;
use std::sync::Arc;

use gantry_config::{Config, DeviceIdStrategy, Strategy};
use gantry_plugin::allocate::{Access, Nodes, answer};
use gantry_plugin::cdi::{Class, Entries, Host, Kind, Names, device_name, specs};
use gantry_plugin::inventory::Inventory;

use super::kubelet::{device, machine, slice};

/// Any text as `--cdi-kind`, and as the UUIDs of a GPU and its MIG device.
pub fn names(kind: &str, uuid: &str) {
    assert!(is_name(&device_name(uuid)), "{uuid:?}");
    let Ok(kind) = check_kind(kind) else { return };
    let devices = vec![device(0, uuid), slice(1, 0, &format!("{uuid}/1/0")), device(2, "GPU-2")];
    let inventory = Inventory::ready(machine(), devices);
    for strategy in [DeviceIdStrategy::Uuid, DeviceIdStrategy::Index] {
        let config = Arc::new(Config {
            device_id_strategy: strategy,
            device_list_strategy: vec![Strategy::CdiAnnotations, Strategy::CdiCri],
            ..Config::default()
        });
        let mut names = Names::default();
        names.learn(&inventory, strategy);
        let written = specs(&kind, &config, &inventory, &Host::default(), &names);
        let mut known = BTreeSet::new();
        for (class, spec) in &written {
            serde_json::from_str::<serde_json::Value>(&spec.text()).unwrap();
            for name in spec.names() {
                assert!(is_name(name), "{name:?}");
                let qualified = kind.qualified(*class, name);
                assert!(is_qualified(&qualified), "{qualified:?}");
                assert!(known.insert(qualified), "{name:?} twice");
            }
        }
        let access = Access {
            config,
            nodes: Arc::new(Nodes::default()),
            entries: Arc::new(Entries::of(&kind, &written, &names, strategy)),
            topology: None,
        };
        let answer = answer(&access, &inventory.devices.iter().collect::<Vec<_>>());
        let given: Vec<String> = answer.cdi_devices.into_iter().map(|device| device.name).collect();
        assert!(!given.is_empty());
        assert!(given.iter().all(|name| known.contains(name)), "{given:?}");
        let annotated: Vec<&str> = answer.annotations.values().flat_map(|names| names.split(',')).collect();
        assert_eq!(annotated, given, "each can be reported from the next");
    }
}

/// An accepted kind is valid, and so are the kinds and file names of every class.
fn check_kind(text: &str) -> Result<Kind, ()> {
    let kind: Kind = text.parse().map_err(|error| assert!(!format!("{error}").is_empty()))?;
    assert_eq!(kind.to_string(), text);
    let (mut kinds, mut files) = (BTreeSet::new(), BTreeSet::new());
    for class in Class::ALL {
        assert!(is_kind(&kind.of(class)), "{:?}", kind.of(class));
        assert!(kinds.insert(kind.of(class)) && files.insert(kind.file(class)), "{text:?}");
        assert!(!kind.file(class).contains('/') && !kind.file(class).starts_with('.'));
    }
    Ok(kind)
}

/// CDI's grammar from its specification, independent of our code.
fn is_qualified(text: &str) -> bool {
    text.split_once('=').is_some_and(|(kind, name)| is_kind(kind) && is_name(name))
}

fn is_kind(text: &str) -> bool {
    text.split_once('/')
        .is_some_and(|(vendor, class)| is_word(vendor, b"_-.", false) && is_word(class, b"_-", false))
}

fn is_name(text: &str) -> bool {
    is_word(text, b"_-.:", true)
}

fn is_word(text: &str, inside: &[u8], digit_first: bool) -> bool {
    let bytes = text.as_bytes();
    let (Some(first), Some(last)) = (bytes.first(), bytes.last()) else {
        return false;
    };
    (first.is_ascii_alphabetic() || digit_first && first.is_ascii_digit())
        && last.is_ascii_alphanumeric()
        && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || inside.contains(byte))
}
