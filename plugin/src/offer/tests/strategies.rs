//! The offer of each MIG strategy, and what it leaves out.

use super::super::*;
use super::{cut, excluded, expect, hardware, model, offered, whole, with};
use gantry_config::MigStrategy;

#[test]
fn default_config_offers_every_gpu_whole() {
    let boards = [whole(), model("NVIDIA T4"), model("NVIDIA DGX Display"), model("DGX Display")];
    assert_eq!(offered(&boards, &Config::default()), expect(&[("nvidia.com/gpu", &["GPU-0", "GPU-1"])]));
    assert_eq!(excluded(&boards, &Config::default()), []);
    let inventory = offer(&hardware(&boards), &Config::default());
    assert_eq!(inventory.resources[&ResourceName::from("nvidia.com/gpu")], Terms::default());
}

#[test]
fn unknown_or_absent_hardware_is_offered_as_such() {
    assert_eq!(offer(&Hardware::starting(), &Config::default()), Inventory::starting());
    assert_eq!(offer(&Hardware::absent("none"), &Config::default()), Inventory::absent("none"));
}

#[test]
fn strategy_none_leaves_out_gpus_with_mig_on() {
    let boards = [whole(), cut(&["1g.5gb"]), cut(&[])];
    assert_eq!(offered(&boards, &Config::default()), expect(&[("nvidia.com/gpu", &["GPU-0"])]));
    insta::assert_debug_snapshot!(excluded(&boards, &Config::default()));
}

#[test]
fn mixed_offers_profiles_and_whole_gpus() {
    let boards =
        [whole(), cut(&["3g.20gb", "1g.5gb+me", "1g.5gb"]), cut(&["1c.3g.20gb", "2c.3g.20gb"]), cut(&[])];
    assert_eq!(
        offered(&boards, &with(MigStrategy::Mixed)),
        expect(&[
            ("nvidia.com/gpu", &["GPU-0"]),
            ("nvidia.com/mig-1c.3g.20gb", &["MIG-20"]),
            ("nvidia.com/mig-1g.5gb", &["MIG-12"]),
            ("nvidia.com/mig-1g.5gb.me", &["MIG-11"]),
            ("nvidia.com/mig-2c.3g.20gb", &["MIG-21"]),
            ("nvidia.com/mig-3g.20gb", &["MIG-10"]),
        ])
    );
    insta::assert_debug_snapshot!(excluded(&boards, &with(MigStrategy::Mixed)));
    let inventory = offer(&hardware(&boards), &with(MigStrategy::Mixed));
    let terms = inventory.resources[&ResourceName::from("nvidia.com/mig-1g.5gb")];
    assert!(terms.slices && !terms.replicated && terms.sharing == SharedDevices::Packed);
}

#[test]
fn mig_devices_follow_policy_and_default_to_packed() {
    let sharing = |strategy, policy| {
        let config = Config { shared_devices: policy, ..with(strategy) };
        let inventory = offer(&hardware(&[cut(&["1g.5gb"]), cut(&["1g.5gb"])]), &config);
        let terms: Vec<Terms> = inventory.resources.values().copied().collect();
        terms[0].sharing
    };
    for strategy in [MigStrategy::Mixed, MigStrategy::Single] {
        assert_eq!(sharing(strategy, None), SharedDevices::Packed);
        for policy in [SharedDevices::Distributed, SharedDevices::Packed] {
            assert_eq!(sharing(strategy, Some(policy)), policy);
        }
    }
}

#[test]
fn single_offers_slices_as_gpus() {
    let boards = [cut(&["3g.20gb", "3g.20gb"]), cut(&["3g.20gb"])];
    assert_eq!(
        offered(&boards, &with(MigStrategy::Single)),
        expect(&[("nvidia.com/gpu", &["MIG-00", "MIG-01", "MIG-10"])])
    );
    let uncut = [whole(), whole()];
    assert_eq!(
        offered(&uncut, &with(MigStrategy::Single)),
        expect(&[("nvidia.com/gpu", &["GPU-0", "GPU-1"])])
    );
}

#[test]
fn single_leaves_out_gpus_of_another_kind() {
    let boards = [
        cut(&["1g.5gb", "1g.5gb"]),
        cut(&["3g.20gb", "1g.5gb"]),
        cut(&[]),
        whole(),
        cut(&["1g.5gb"]),
        cut(&["2g.10gb"]),
    ];
    assert_eq!(
        offered(&boards, &with(MigStrategy::Single)),
        expect(&[("nvidia.com/gpu", &["MIG-00", "MIG-01", "MIG-40"])])
    );
    insta::assert_debug_snapshot!(excluded(&boards, &with(MigStrategy::Single)));
}

#[test]
fn single_keeps_seven_gpus_if_one_has_mig_on() {
    let boards = [whole(), cut(&["1g.5gb"]), whole()];
    assert_eq!(
        offered(&boards, &with(MigStrategy::Single)),
        expect(&[("nvidia.com/gpu", &["GPU-0", "GPU-2"])])
    );
}
