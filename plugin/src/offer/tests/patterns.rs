//! Names by pattern: of GPUs by their model, of slices by their profile.

use super::super::*;
use super::{cut, excluded, expect, model, offered, problems, share, sharing, whole, with};
use gantry_config::{MigStrategy, ReplicatedDevices, ResourcePattern};

#[test]
fn patterns_name_gpus_by_model_and_slices_by_profile() {
    let pattern =
        |pattern: &str, name: &str| ResourcePattern { pattern: pattern.to_owned(), name: name.into() };
    let boards = [whole(), model("NVIDIA T4"), model("NVIDIA L4"), cut(&["1g.5gb", "1g.5gb+me", "2g.10gb"])];
    let config = Config {
        gpu_patterns: vec![pattern("*A100*", "nvidia.com/a100"), pattern("NVIDIA T4", "nvidia.com/small")],
        mig_patterns: vec![pattern("1g.5gb", "nvidia.com/mig-small"), pattern("1g*", "nvidia.com/mig-media")],
        ..with(MigStrategy::Mixed)
    };
    assert_eq!(
        offered(&boards, &config),
        expect(&[
            ("nvidia.com/a100", &["GPU-0"]),
            ("nvidia.com/gpu", &["GPU-2"]),
            ("nvidia.com/mig-2g.10gb", &["MIG-32"]),
            ("nvidia.com/mig-media", &["MIG-31"]),
            ("nvidia.com/mig-small", &["MIG-30"]),
            ("nvidia.com/small", &["GPU-1"]),
        ])
    );
    assert_eq!(excluded(&boards, &config), [], "what matches none keeps its name");

    let single = Config { mig_strategy: MigStrategy::Single, ..config };
    assert_eq!(
        offered(&[cut(&["2g.10gb"])], &single),
        expect(&[("nvidia.com/a100", &["MIG-00"])]),
        "a slice that no pattern matches is called like its GPU"
    );
}

#[test]
fn mig_pattern_matches_every_spelling_of_a_profile() {
    let profiles = ["1g.5gb", "1g.5gb+me", "1g.24gb+gfx", "1g.24gb+me.all", "2g.48gb-me"];
    // The devices that a pattern names, by their places.
    let named = |pattern: &str| -> Vec<usize> {
        let config = Config {
            mig_patterns: vec![ResourcePattern {
                pattern: pattern.to_owned(),
                name: "nvidia.com/small".into(),
            }],
            ..with(MigStrategy::Mixed)
        };
        let reported = problems(&[cut(&profiles)], &config);
        let resources = offered(&[cut(&profiles)], &config);
        let ids = resources.get("nvidia.com/small").cloned().unwrap_or_default();
        assert_eq!(reported.is_empty(), ids.len() == 1, "{pattern}: {reported:?}");
        let places = ids.iter().map(|id| id.strip_prefix("MIG-0").unwrap());
        places.map(|place| place.parse().unwrap()).collect()
    };
    for (place, spellings) in [
        &["1g.5gb", "MIG 1g.5gb", "mig-1g.5gb", "MIG-1g.5gb", "nvidia.com/mig-1g.5gb"][..],
        &["1g.5gb+me", "1g.5gb.me", "MIG 1g.5gb+me", "mig-1g.5gb.me", "*5gb.me"],
        &["1g.24gb+gfx", "1g.24gb.gfx", "*.gfx"],
        &["1g.24gb+me.all", "1g.24gb.me.all", "MIG *me.all"],
        &["2g.48gb-me", "MIG 2g.48gb-me", "mig-2g*"],
    ]
    .into_iter()
    .enumerate()
    {
        for spelling in spellings {
            assert_eq!(named(spelling), [place], "{spelling}");
        }
    }
    assert_eq!(named("1g.5gb-me"), [0; 0], "without media engines, which is another profile");
    assert_eq!(named("MIG *"), [0, 1, 2, 3, 4]);
}

#[test]
fn name_shared_by_different_devices_is_reported() {
    let boards = [whole(), cut(&["1g.5gb", "1g.5gb", "2g.10gb"])];
    let named = |pattern: &str, name: &str| Config {
        mig_patterns: vec![ResourcePattern { pattern: pattern.to_owned(), name: name.into() }],
        ..with(MigStrategy::Mixed)
    };
    let apart = "name them apart in resources.mig, or in a rename of sharing.timeSlicing";
    assert_eq!(
        problems(&boards, &named("1g.5gb", "nvidia.com/gpu")),
        [format!(
            "nvidia.com/gpu names whole GPUs and MIG devices (1g.5gb), and a pod cannot know which it gets; {apart}"
        )]
    );
    assert_eq!(
        problems(&boards, &named("*", "nvidia.com/slice")),
        [format!(
            "nvidia.com/slice names MIG devices of several profiles (1g.5gb, 2g.10gb), and a pod cannot know which it gets; {apart}"
        )]
    );
    let renamed = share("nvidia.com/mig-1g.5gb", ReplicatedDevices::All, 2, Some("nvidia.com/gpu"));
    assert_eq!(problems(&boards, &sharing(vec![renamed])).len(), 2);
    assert!(problems(&boards, &named("1g.5gb", "nvidia.com/small")).is_empty());
    assert!(problems(&boards, &with(MigStrategy::Single)).is_empty());
}
