//! Properties for any hardware and configuration.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::super::*;
use super::{Board, hardware, share};
use gantry_config::{
    DeviceRef, MigStrategy, ReplicatedDevices, ReplicatedResource, ResourcePattern, Selector, TimeSlicing,
};

fn board() -> impl Strategy<Value = Board> {
    let profile = prop::sample::select(vec!["1g.5gb", "1g.5gb+me", "2g.10gb", "1c.2g.10gb", "3g.20gb"]);
    let model = prop::sample::select(vec!["NVIDIA A100-SXM4-40GB", "NVIDIA T4", "NVIDIA DGX Display"]);
    let mig = prop_oneof![2 => Just(None), 3 => prop::collection::vec(profile, 0..5).prop_map(Some)];
    (model, mig).prop_map(|(model, mig)| Board { model, mig })
}

fn reference() -> impl Strategy<Value = DeviceRef> {
    prop_oneof![
        (0u8..6).prop_map(DeviceRef::Gpu),
        (0u8..6, 0u8..3).prop_map(|(gpu, mig)| DeviceRef::Mig(gpu, mig)),
        (0u8..6).prop_map(|gpu| DeviceRef::Uuid(format!("GPU-{gpu}"))),
        (0u8..6, 0u8..3).prop_map(|(gpu, mig)| DeviceRef::Uuid(format!("MIG-{gpu}{mig}"))),
    ]
}

fn entry() -> impl Strategy<Value = ReplicatedResource> {
    let name = prop::sample::select(vec!["nvidia.com/gpu", "nvidia.com/mig-1g.5gb", "nvidia.com/odd"]);
    let rename = prop::sample::select(vec![None, Some("nvidia.com/gpu"), Some("nvidia.com/x")]);
    let devices = prop_oneof![
        Just(ReplicatedDevices::All),
        (1u16..4).prop_map(ReplicatedDevices::Count),
        prop::collection::vec(reference(), 1..4).prop_map(ReplicatedDevices::Listed),
    ];
    (name, devices, 2u16..5, rename)
        .prop_map(|(name, devices, replicas, rename)| share(name, devices, replicas, rename))
}

fn selectors() -> impl Strategy<Value = Vec<Selector>> {
    let selector = prop_oneof![
        (0u8..6).prop_map(Selector::Index),
        (0u8..6, 0u8..3).prop_map(|(gpu, mig)| Selector::Uuid(format!("MIG-{gpu}{mig}"))),
        Just(Selector::Model("*A100*".to_owned())),
    ];
    prop::collection::vec(selector, 0..3)
}

fn any_config() -> impl Strategy<Value = Config> {
    let strategy = prop::sample::select(vec![MigStrategy::None, MigStrategy::Single, MigStrategy::Mixed]);
    let pattern = prop::sample::select(vec!["*", "NVIDIA T4", "1g*", "2g.10gb"]);
    let patterns = prop::collection::vec(
        pattern.prop_map(|pattern| ResourcePattern {
            pattern: pattern.to_owned(),
            name: format!("nvidia.com/p{}", pattern.len()).as_str().into(),
        }),
        0..3,
    );
    let entries = prop::collection::vec(entry(), 0..4);
    (strategy, patterns.clone(), patterns, entries, any::<bool>(), selectors(), selectors()).prop_map(
        |(mig_strategy, gpu_patterns, mig_patterns, resources, rename_by_default, allow, deny)| Config {
            mig_strategy,
            gpu_patterns,
            mig_patterns,
            time_slicing: Some(TimeSlicing {
                rename_by_default,
                fail_requests_greater_than_one: false,
                resources,
            }),
            allow,
            deny,
            ..Config::default()
        },
    )
}

proptest! {
    #[test]
    fn every_unit_is_offered_once_or_left_out_with_a_reason(
        boards in prop::collection::vec(board(), 0..6),
        config in any_config(),
    ) {
        let hardware = hardware(&boards);
        let inventory = offer(&hardware, &config);
        let ids: BTreeSet<_> = inventory.devices.iter().map(|device| &device.id).collect();
        prop_assert_eq!(ids.len(), inventory.devices.len(), "no ID twice");

        let excluded: BTreeSet<u8> = inventory.excluded.iter().map(|excluded| excluded.gpu).collect();
        for unit in &hardware.units {
            let devices: Vec<_> = inventory.devices.iter().filter(|device| device.uuid == unit.id.as_str()).collect();
            let resources: BTreeSet<_> = devices.iter().map(|device| &device.resource).collect();
            prop_assert!(resources.len() <= 1, "one name each: {resources:?}");
            let numbers: Vec<Option<u16>> = devices.iter().map(|device| device.replica).collect();
            let whole = numbers == [None];
            let shared = numbers.len() > 1 && numbers == (0..numbers.len() as u16).map(Some).collect::<Vec<_>>();
            let board = boards[usize::from(unit.gpu)].model;
            prop_assert!(
                whole || shared || (numbers.is_empty() && (excluded.contains(&unit.gpu) || board == "NVIDIA DGX Display")),
                "{numbers:?}"
            );
        }
        for gpu in hardware.machine.gpus() {
            let offered = inventory.devices.iter().any(|device| device.gpu == gpu.index);
            let display = gpu.model.as_deref() == Some("NVIDIA DGX Display");
            prop_assert!(display != (offered || excluded.contains(&gpu.index)), "every GPU is accounted for");
        }
        prop_assert!(inventory.excluded.iter().all(|excluded| !excluded.reason.is_empty()));
        let named: BTreeSet<_> = inventory.devices.iter().map(|device| &device.resource).collect();
        prop_assert_eq!(named, inventory.resources.keys().collect::<BTreeSet<_>>());
    }

    #[test]
    fn equal_input_gives_equal_offers(
        boards in prop::collection::vec(board(), 0..6),
        config in any_config(),
    ) {
        let mut shuffled = hardware(&boards);
        shuffled.units.reverse();
        let straight = offer(&hardware(&boards), &Config { time_slicing: None, ..config.clone() });
        prop_assert_eq!(offer(&shuffled, &Config { time_slicing: None, ..config }), straight);
    }
}
