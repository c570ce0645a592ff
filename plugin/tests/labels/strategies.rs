//! Labels of GPUs with MIG devices by MIG strategy.

use gantry_config::{Config, MigStrategy, Selector};

use gantry_topology::{Gpu, Machine, PathClass, PathMatrix};

use super::{cut, get, labels_of, machine, offered, plain, shared, strategy, text};

#[test]
fn equal_mig_devices_count_as_gpus_with_single() {
    let machine = cut(machine("dgx-a100"), |_| Some(&["1g.5gb"; 7]));
    let config = strategy(MigStrategy::Single);
    let whole = plain(&machine, &config);
    let mixed = Config { mig_strategy: MigStrategy::Single, ..shared(2) };
    let shared = labels_of(&offered(&machine, "nvidia.com/gpu", 2), &mixed);
    insta::assert_snapshot!(format!(
        "{}\n# two replicas of each\n{}",
        text(&whole, &["nvidia.com/gpu", "nvidia.com/mig"]),
        text(&shared, &["nvidia.com/gpu.product", "nvidia.com/gpu.replicas", "nvidia.com/gpu.sharing"]),
    ));
}

#[test]
fn mixed_labels_each_profile() {
    let machine = cut(machine("dgx-a100"), |gpu| match gpu {
        0 => Some(&["1g.5gb", "1g.5gb", "2g.10gb", "1g.5gb+me"]),
        1 => Some(&["3g.20gb", "3g.20gb"]),
        2 => Some(&[]),
        _ => None,
    });
    let labels = plain(&machine, &strategy(MigStrategy::Mixed));
    insta::assert_snapshot!(text(&labels, &["nvidia.com/gpu", "nvidia.com/mig"]));
}

/// The profiles of a GPU; `None`: MIG is off.
type CutOf = fn(u8) -> Option<&'static [&'static str]>;

/// Product, count, replicas and memory with the strategy `single` of a DGX A100 with this MIG layout.
fn single(profiles: CutOf) -> [String; 4] {
    let machine = cut(machine("dgx-a100"), profiles);
    let labels = plain(&machine, &strategy(MigStrategy::Single));
    assert_eq!(get(&labels, "nvidia.com/mig.strategy"), Some("single"));
    assert_eq!(get(&labels, "nvidia.com/gpu.family"), Some("ampere"));
    ["product", "count", "replicas", "memory"]
        .map(|key| get(&labels, &format!("nvidia.com/gpu.{key}")).unwrap_or("").to_owned())
}

#[test]
fn single_labels_the_offered_devices() {
    let slices = "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb";
    let cases: [(&str, CutOf, [&str; 3]); 4] = [
        (
            "a GPU with MIG on and no instance is left out",
            |gpu| match gpu {
                3 => Some(&[]),
                _ => Some(&["1g.5gb", "1g.5gb"]),
            },
            [slices, "14", "1"],
        ),
        ("so is one with MIG off", |gpu| (gpu != 0).then_some(&["1g.5gb"]), [slices, "7", "1"]),
        (
            "and one of two profiles",
            |gpu| match gpu {
                0 => Some(&["1g.5gb", "2g.10gb"]),
                _ => Some(&["1g.5gb"]),
            },
            [slices, "7", "1"],
        ),
        (
            "and those that are cut where most are whole",
            |gpu| (gpu > 4).then_some(&["1g.5gb"]),
            ["NVIDIA-A100-SXM4-40GB", "5", "1"],
        ),
    ];
    for (what, profiles, expected) in cases {
        let [product, count, replicas, memory] = single(profiles);
        assert_eq!([product, count, replicas], expected, "{what}");
        assert_ne!(memory, "0", "{what}");
    }
}

#[test]
fn single_strategy_without_offer_is_labelled_invalid() {
    let cases: [(&str, CutOf); 2] = [
        ("no instance anywhere", |_| Some(&[])),
        ("each GPU of two profiles", |_| Some(&["1g.5gb", "2g.10gb"])),
    ];
    for (what, profiles) in cases {
        assert_eq!(single(profiles), ["NVIDIA-A100-SXM4-40GB-MIG-INVALID", "0", "0", "0"], "{what}");
    }
}

#[test]
fn mixed_counts_offered_devices_only() {
    let machine = cut(machine("dgx-a100"), |gpu| match gpu {
        0 | 1 => Some(&["1g.5gb", "1g.5gb"]),
        2 => Some(&["3g.20gb"]),
        _ => None,
    });
    let config =
        Config { deny: vec![Selector::Index(0), Selector::Index(2)], ..strategy(MigStrategy::Mixed) };
    let labels = plain(&machine, &config);
    assert_eq!(get(&labels, "nvidia.com/mig-1g.5gb.count"), Some("2"));
    assert_eq!(get(&labels, "nvidia.com/mig-3g.20gb.count"), None);
    assert_eq!(get(&labels, "nvidia.com/mig-3g.20gb.product"), None);
}

#[test]
fn gpu_with_mig_on_counts_unshared_without_strategy() {
    let machine = cut(machine("dgx-a100"), |_| Some(&["1g.5gb"]));
    let labels = plain(&machine, &shared(4));
    assert_eq!(get(&labels, "nvidia.com/gpu.product"), Some("NVIDIA-A100-SXM4-40GB"));
    assert_eq!(get(&labels, "nvidia.com/gpu.count"), Some("8"));
    assert_eq!(get(&labels, "nvidia.com/gpu.replicas"), Some("0"));
    assert_eq!(get(&labels, "nvidia.com/mig.capable"), Some("true"));
    assert_eq!(get(&labels, "nvidia.com/mig.strategy"), None);
}

#[test]
fn gpu_without_model_does_not_lead() {
    for (what, profiles) in
        [("beside GPUs that are cut", Some(&["1g.5gb"; 7][..])), ("beside one GPU that is whole", None)]
    {
        let mut parts = cut(machine("dgx-a100"), |_| profiles).into_parts();
        let left = if profiles.is_some() { 8 } else { 2 };
        parts.gpus.truncate(left);
        parts.nics.clear();
        parts.nvlinks.clear();
        parts.paths = PathMatrix::from_fn(left, |_, _| PathClass::Sys);
        parts.gpus[0] = Gpu::default();
        let machine = Machine::new(parts).unwrap();
        let labels = plain(&machine, &strategy(MigStrategy::Mixed));
        assert_eq!(get(&labels, "nvidia.com/gpu.product"), Some("NVIDIA-A100-SXM4-40GB"), "{what}");
    }
}
