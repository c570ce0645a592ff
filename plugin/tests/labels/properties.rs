//! Properties for any GPUs: their order does not matter, and Kubernetes accepts every label.

use gantry_config::{Config, MigStrategy};
use gantry_plugin::labels::{Facts, Host, labels};
use gantry_topology::Gpu;
use proptest::prelude::*;

use super::{cut, labels_of, models, of, offered, plain, shared};

/// The rule of `kube-apiserver` for a label's value, and for its name after the domain.
fn accepted(text: &str) -> bool {
    let ends = text.chars().next().zip(text.chars().last());
    text.len() <= 63
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        && ends.is_none_or(|(first, last)| first.is_ascii_alphanumeric() && last.is_ascii_alphanumeric())
}

proptest! {
    #[test]
    fn labels_do_not_depend_on_gpu_order(
        order in Just([0usize, 0, 0, 1, 1, 2, 2, 2, 2]).prop_shuffle(),
        devices in any::<prop::sample::Index>(),
    ) {
        let names = ["NVIDIA A40", "Tesla T4", "NVIDIA A100-PCIE-40GB"];
        let machine = models(&order.map(|model| names[model]));
        let expected = plain(&models(&[0, 0, 0, 1, 1, 2, 2, 2, 2].map(|model| names[model])), &Config::default());
        let mut inventory = offered(&machine, "nvidia.com/gpu", 1);
        prop_assert_eq!(&labels_of(&inventory, &Config::default()), &expected);
        let turn = devices.index(inventory.devices.len());
        inventory.devices.rotate_left(turn);
        prop_assert_eq!(&labels_of(&inventory, &Config::default()), &expected);
    }

    #[test]
    fn labels_are_valid_and_bounded_in_number(
        models in prop::collection::vec("\\PC{0,80}", 1..20),
        machine_type in "\\PC{0,80}",
        replicas in 1u16..3,
        single in any::<bool>(),
    ) {
        let gpus = models.iter().map(|model| Gpu { model: Some(model.clone()), ..Gpu::default() });
        let machine = match single {
            true => cut(of(gpus), |_| Some(&["1g.10gb+me"])),
            false => of(gpus),
        };
        let inventory = offered(&machine, "nvidia.com/gpu", replicas);
        let config = Config { mig_strategy: MigStrategy::Single, ..shared(2) };
        let host = Host { machine_type: Some(machine_type), ..Host::default() };
        let made = labels(&Facts { inventory: &inventory, config: &config, host: &host, watched: true, timestamp: Some(1) });
        for (name, value) in &made {
            let (domain, name) = name.as_str().split_once('/').unwrap();
            prop_assert!(["nvidia.com", "gantry.dev"].contains(&domain));
            prop_assert!(!name.is_empty() && accepted(name), "{name:?}");
            prop_assert!(accepted(value), "{name}={value:?}");
        }
        prop_assert!(made.keys().filter(|name| name.as_str().starts_with("gantry.dev/")).count() <= 26);
    }
}
