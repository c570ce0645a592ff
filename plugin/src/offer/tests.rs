use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gantry_api::DeviceHealth;
use gantry_topology::{ComputeInstance, Gpu, GpuInstance, Machine, MachineParts, Mig, PathClass, PathMatrix};
use proptest::prelude::*;

use super::*;
use crate::config::{DeviceRef, MigStrategy, Replicated, ResourcePattern, Selector, SharedOf, TimeSlicing};
use crate::inventory::units;

/// How a GPU of a test is: its model and its MIG devices.
#[derive(Debug, Clone)]
struct Board {
    model: &'static str,
    mig: Option<Vec<&'static str>>,
}

fn whole() -> Board {
    Board {
        model: "NVIDIA A100-SXM4-40GB",
        mig: None,
    }
}

fn model(model: &'static str) -> Board {
    Board { model, mig: None }
}

/// A GPU with MIG on and these MIG devices, each in a GPU instance of its own unless it is a part (`1c.`) of the one before.
fn cut(profiles: &[&'static str]) -> Board {
    Board {
        mig: Some(profiles.to_vec()),
        ..whole()
    }
}

fn mig(gpu: usize, profiles: &[&str]) -> Mig {
    let mut instances: Vec<GpuInstance> = Vec::new();
    for (at, profile) in profiles.iter().enumerate() {
        let parent = profile.split_once("c.").map_or(*profile, |(_, parent)| parent);
        let compute = ComputeInstance {
            id: 0,
            uuid: format!("MIG-{gpu}{at}").parse().unwrap(),
            profile: (*profile).to_owned(),
            attributes: None,
        };
        match instances.last_mut() {
            Some(last) if parent != *profile && last.profile == parent => {
                let id = last.compute.len() as u32;
                last.compute.push(ComputeInstance { id, ..compute });
            }
            _ => instances.push(GpuInstance {
                id: at as u32 + 1,
                profile: parent.to_owned(),
                start: at as u8,
                size: 1,
                compute: vec![compute],
            }),
        }
    }
    Mig {
        enabled: true,
        instances,
    }
}

fn hardware(boards: &[Board]) -> Hardware {
    let gpus: Vec<Gpu> = boards
        .iter()
        .enumerate()
        .map(|(index, board)| Gpu {
            index: index as u8,
            uuid: Some(format!("GPU-{index}").parse().unwrap()),
            bus_id: Some(format!("0000:{index:02x}:00.0").parse().unwrap()),
            model: Some(board.model.to_owned()),
            mig: board.mig.as_ref().map(|profiles| mig(index, profiles)),
            ..Gpu::default()
        })
        .collect();
    let machine = Machine::new(MachineParts {
        paths: PathMatrix::from_fn(gpus.len(), |_, _| PathClass::Sys),
        gpus,
        ..MachineParts::default()
    })
    .unwrap();
    let healthy = DeviceHealth {
        healthy: true,
        reason: None,
    };
    let units = units(
        &machine,
        |gpu| Some(gpu.index),
        |_, _| healthy.clone(),
        |_, _, _| None,
    );
    Hardware::ready(Arc::new(machine), units)
}

fn with(strategy: MigStrategy) -> Config {
    Config {
        mig_strategy: strategy,
        ..Config::default()
    }
}

fn sharing(resources: Vec<Replicated>) -> Config {
    Config {
        mig_strategy: MigStrategy::Mixed,
        time_slicing: Some(TimeSlicing {
            rename_by_default: false,
            fail_requests_greater_than_one: false,
            resources,
        }),
        ..Config::default()
    }
}

fn share(name: &str, devices: SharedOf, replicas: u16, rename: Option<&str>) -> Replicated {
    Replicated {
        name: name.into(),
        rename: rename.map(Into::into),
        devices,
        replicas,
    }
}

/// Resources with their device IDs.
fn offered(boards: &[Board], config: &Config) -> BTreeMap<String, Vec<String>> {
    let mut resources: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for device in offer(&hardware(boards), config).devices {
        let ids = resources.entry(device.resource.to_string()).or_default();
        ids.push(device.id.to_string());
    }
    resources
}

fn expect(resources: &[(&str, &[&str])]) -> BTreeMap<String, Vec<String>> {
    let owned = |ids: &&[&str]| ids.iter().map(ToString::to_string).collect();
    resources
        .iter()
        .map(|(name, ids)| ((*name).to_owned(), owned(ids)))
        .collect()
}

fn left_out(boards: &[Board], config: &Config) -> Vec<(u8, String)> {
    let inventory = offer(&hardware(boards), config);
    inventory
        .left_out
        .into_iter()
        .map(|left_out| (left_out.gpu, left_out.reason))
        .collect()
}

fn problems(boards: &[Board], config: &Config) -> Vec<String> {
    offer(&hardware(boards), config).problems
}

#[test]
fn by_default_every_gpu_is_offered_whole() {
    let boards = [
        whole(),
        model("NVIDIA T4"),
        model("NVIDIA DGX Display"),
        model("DGX Display"),
    ];
    assert_eq!(
        offered(&boards, &Config::default()),
        expect(&[("nvidia.com/gpu", &["GPU-0", "GPU-1"])])
    );
    assert_eq!(left_out(&boards, &Config::default()), []);
    let inventory = offer(&hardware(&boards), &Config::default());
    assert_eq!(
        inventory.resources[&ResourceName::from("nvidia.com/gpu")],
        Terms::default()
    );
}

#[test]
fn what_is_not_known_yet_or_not_there_is_offered_as_that() {
    assert_eq!(
        offer(&Hardware::starting(), &Config::default()),
        Inventory::starting()
    );
    assert_eq!(
        offer(&Hardware::absent("none"), &Config::default()),
        Inventory::absent("none")
    );
}

#[test]
fn without_a_strategy_a_gpu_with_mig_on_is_left_out_and_the_rest_served() {
    let boards = [whole(), cut(&["1g.5gb"]), cut(&[])];
    assert_eq!(
        offered(&boards, &Config::default()),
        expect(&[("nvidia.com/gpu", &["GPU-0"])])
    );
    insta::assert_debug_snapshot!(left_out(&boards, &Config::default()));
}

#[test]
fn mixed_names_slices_by_profile_beside_whole_gpus() {
    let boards = [
        whole(),
        cut(&["3g.20gb", "1g.5gb+me", "1g.5gb"]),
        cut(&["1c.3g.20gb", "2c.3g.20gb"]),
        cut(&[]),
    ];
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
    insta::assert_debug_snapshot!(left_out(&boards, &with(MigStrategy::Mixed)));
    let inventory = offer(&hardware(&boards), &with(MigStrategy::Mixed));
    let terms = inventory.resources[&ResourceName::from("nvidia.com/mig-1g.5gb")];
    assert!(terms.slices && !terms.replicated && terms.sharing == SharedDevices::Packed);
}

#[test]
fn mig_devices_are_laid_as_the_policy_says_and_packed_where_it_says_nothing() {
    let sharing = |strategy, policy| {
        let config = Config {
            shared_devices: policy,
            ..with(strategy)
        };
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
fn single_serves_slices_under_the_name_of_gpus() {
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
fn single_leaves_out_what_is_unlike_the_rest() {
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
    insta::assert_debug_snapshot!(left_out(&boards, &with(MigStrategy::Single)));
}

#[test]
fn single_keeps_seven_gpus_where_one_has_mig_on_by_mistake() {
    let boards = [whole(), cut(&["1g.5gb"]), whole()];
    assert_eq!(
        offered(&boards, &with(MigStrategy::Single)),
        expect(&[("nvidia.com/gpu", &["GPU-0", "GPU-2"])])
    );
}

#[test]
fn patterns_name_gpus_by_model_and_slices_by_profile() {
    let pattern = |pattern: &str, name: &str| ResourcePattern {
        pattern: pattern.to_owned(),
        name: name.into(),
    };
    let boards = [
        whole(),
        model("NVIDIA T4"),
        model("NVIDIA L4"),
        cut(&["1g.5gb", "1g.5gb+me", "2g.10gb"]),
    ];
    let config = Config {
        gpu_patterns: vec![
            pattern("*A100*", "nvidia.com/a100"),
            pattern("NVIDIA T4", "nvidia.com/small"),
        ],
        mig_patterns: vec![
            pattern("1g.5gb", "nvidia.com/mig-small"),
            pattern("1g*", "nvidia.com/mig-media"),
        ],
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
    assert_eq!(left_out(&boards, &config), [], "what matches none keeps its name");

    let single = Config {
        mig_strategy: MigStrategy::Single,
        ..config
    };
    assert_eq!(
        offered(&[cut(&["2g.10gb"])], &single),
        expect(&[("nvidia.com/a100", &["MIG-00"])]),
        "a slice that no pattern matches is called like its GPU"
    );
}

#[test]
fn a_pattern_names_profiles_as_nvml_and_resources_and_labels_spell_them() {
    let profiles = [
        "1g.5gb",
        "1g.5gb+me",
        "1g.24gb+gfx",
        "1g.24gb+me.all",
        "2g.48gb-me",
    ];
    // The devices that a pattern names, by their places.
    let named = |pattern: &str| -> Vec<usize> {
        let config = Config {
            mig_patterns: vec![ResourcePattern {
                pattern: pattern.to_owned(),
                name: "nvidia.com/small".into(),
            }],
            ..with(MigStrategy::Mixed)
        };
        let told = problems(&[cut(&profiles)], &config);
        let resources = offered(&[cut(&profiles)], &config);
        let ids = resources.get("nvidia.com/small").cloned().unwrap_or_default();
        assert_eq!(told.is_empty(), ids.len() == 1, "{pattern}: {told:?}");
        let places = ids.iter().map(|id| id.strip_prefix("MIG-0").unwrap());
        places.map(|place| place.parse().unwrap()).collect()
    };
    for (place, spellings) in [
        &[
            "1g.5gb",
            "MIG 1g.5gb",
            "mig-1g.5gb",
            "MIG-1g.5gb",
            "nvidia.com/mig-1g.5gb",
        ][..],
        &[
            "1g.5gb+me",
            "1g.5gb.me",
            "MIG 1g.5gb+me",
            "mig-1g.5gb.me",
            "*5gb.me",
        ],
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
    assert_eq!(
        named("1g.5gb-me"),
        [0; 0],
        "without media engines, which is another profile"
    );
    assert_eq!(named("MIG *"), [0, 1, 2, 3, 4]);
}

#[test]
fn one_name_for_gpus_and_mig_devices_or_for_several_profiles_is_told() {
    let boards = [whole(), cut(&["1g.5gb", "1g.5gb", "2g.10gb"])];
    let named = |pattern: &str, name: &str| Config {
        mig_patterns: vec![ResourcePattern {
            pattern: pattern.to_owned(),
            name: name.into(),
        }],
        ..with(MigStrategy::Mixed)
    };
    let apart = "name them apart in resources.mig, or in a rename of sharing.timeSlicing";
    assert_eq!(
        problems(&boards, &named("1g.5gb", "nvidia.com/gpu")),
        [format!(
            "nvidia.com/gpu names whole GPUs and MIG devices (1g.5gb), and a pod cannot tell which it gets; {apart}"
        )]
    );
    assert_eq!(
        problems(&boards, &named("*", "nvidia.com/slice")),
        [format!(
            "nvidia.com/slice names MIG devices of several profiles (1g.5gb, 2g.10gb), and a pod cannot tell which it gets; {apart}"
        )]
    );
    let renamed = share("nvidia.com/mig-1g.5gb", SharedOf::All, 2, Some("nvidia.com/gpu"));
    assert_eq!(problems(&boards, &sharing(vec![renamed])).len(), 2);
    assert!(problems(&boards, &named("1g.5gb", "nvidia.com/small")).is_empty());
    assert!(problems(&boards, &with(MigStrategy::Single)).is_empty());
}

#[test]
fn lists_name_models_in_any_case() {
    let boards = [whole(), model("NVIDIA T4"), cut(&["1g.5gb", "1g.5gb"])];
    let config = Config {
        deny: vec![
            Selector::Model("nvidia t4*".to_owned()),
            Selector::Uuid("MIG-21".to_owned()),
        ],
        ..with(MigStrategy::Mixed)
    };
    assert_eq!(
        offered(&boards, &config),
        expect(&[
            ("nvidia.com/gpu", &["GPU-0"]),
            ("nvidia.com/mig-1g.5gb", &["MIG-20"])
        ])
    );
}

#[test]
fn lists_say_which_gpus_are_served() {
    let boards = [whole(), whole(), model("NVIDIA T4"), cut(&["1g.5gb", "1g.5gb"])];
    let config = Config {
        allow: vec![
            Selector::Model("*A100*".to_owned()),
            Selector::Index(2),
            Selector::Index(9),
        ],
        deny: vec![
            Selector::BusId("0000:01:00.0".parse().unwrap()),
            Selector::Uuid("MIG-31".to_owned()),
        ],
        ..with(MigStrategy::Mixed)
    };
    assert_eq!(
        offered(&boards, &config),
        expect(&[
            ("nvidia.com/gpu", &["GPU-0", "GPU-2"]),
            ("nvidia.com/mig-1g.5gb", &["MIG-30"])
        ])
    );
    insta::assert_debug_snapshot!((left_out(&boards, &config), problems(&boards, &config)));
}

#[test]
fn replicas_have_numbered_ids_and_the_uuid_of_their_device() {
    let config = sharing(vec![share("nvidia.com/gpu", SharedOf::All, 2, None)]);
    assert_eq!(
        offered(&[whole(), whole()], &config),
        expect(&[(
            "nvidia.com/gpu",
            &["GPU-0::0", "GPU-0::1", "GPU-1::0", "GPU-1::1"]
        )])
    );
    let inventory = offer(&hardware(&[whole()]), &config);
    assert_eq!(inventory.devices[1].uuid, "GPU-0");
    assert_eq!(inventory.devices[1].replica, Some(1));
    assert!(inventory.resources[&ResourceName::from("nvidia.com/gpu")].replicated);
}

#[test]
fn a_node_can_have_shared_and_whole_gpus() {
    let boards = [whole(), whole(), whole(), cut(&["1g.5gb", "1g.5gb"])];
    let listed = |list: &[DeviceRef]| SharedOf::Listed(list.to_vec());
    let config = sharing(vec![
        share(
            "nvidia.com/gpu",
            listed(&[DeviceRef::Gpu(1)]),
            2,
            Some("nvidia.com/gpu-shared"),
        ),
        share(
            "nvidia.com/gpu",
            listed(&[DeviceRef::Uuid("GPU-2".to_owned())]),
            3,
            Some("nvidia.com/gpu-third"),
        ),
        share(
            "nvidia.com/mig-1g.5gb",
            listed(&[DeviceRef::Mig(3, 1)]),
            2,
            Some("nvidia.com/mig-shared"),
        ),
    ]);
    assert_eq!(
        offered(&boards, &config),
        expect(&[
            ("nvidia.com/gpu", &["GPU-0"]),
            ("nvidia.com/gpu-shared", &["GPU-1::0", "GPU-1::1"]),
            ("nvidia.com/gpu-third", &["GPU-2::0", "GPU-2::1", "GPU-2::2"]),
            ("nvidia.com/mig-1g.5gb", &["MIG-30"]),
            ("nvidia.com/mig-shared", &["MIG-31::0", "MIG-31::1"]),
        ])
    );
    assert_eq!(problems(&boards, &config), Vec::<String>::new());
    let first = sharing(vec![share(
        "nvidia.com/gpu",
        SharedOf::Count(1),
        2,
        Some("nvidia.com/half"),
    )]);
    assert_eq!(
        offered(&boards[..2], &first),
        expect(&[
            ("nvidia.com/gpu", &["GPU-1"]),
            ("nvidia.com/half", &["GPU-0::0", "GPU-0::1"])
        ])
    );
}

#[test]
fn shared_resources_may_be_renamed_as_a_whole() {
    let mut config = sharing(vec![share("nvidia.com/gpu", SharedOf::All, 2, None)]);
    if let Some(slicing) = &mut config.time_slicing {
        slicing.rename_by_default = true;
        slicing.fail_requests_greater_than_one = true;
    }
    config.shared_devices = Some(SharedDevices::Packed);
    assert_eq!(
        offered(&[whole()], &config),
        expect(&[("nvidia.com/gpu.shared", &["GPU-0::0", "GPU-0::1"])])
    );
    let terms = offer(&hardware(&[whole()]), &config).resources[&ResourceName::from("nvidia.com/gpu.shared")];
    assert_eq!(
        terms,
        Terms {
            sharing: SharedDevices::Packed,
            replicated: true,
            fail_requests_greater_than_one: true,
            slices: false
        }
    );
}

#[test]
fn an_entry_whose_devices_are_not_here_is_told_so_and_nothing_else() {
    let listed = |gpus: &[u8]| SharedOf::Listed(gpus.iter().copied().map(DeviceRef::Gpu).collect());
    let boards = [whole(), whole(), whole(), whole()];
    let absent = share("nvidia.com/gpu", listed(&[7]), 4, None);
    let told = |entry: usize| {
        format!("sharing.timeSlicing.resources[{entry}] (nvidia.com/gpu): none of its devices here is 7")
    };
    assert_eq!(problems(&boards, &sharing(vec![absent.clone()])), [told(0)]);
    let all = share("nvidia.com/gpu", SharedOf::All, 2, None);
    assert_eq!(problems(&boards, &sharing(vec![all.clone(), absent])), [told(1)]);
    // One that is here and taken, and one that is not: both are true.
    let both = share("nvidia.com/gpu", listed(&[0, 7]), 4, None);
    assert_eq!(
        problems(&boards, &sharing(vec![all, both])),
        [
            told(1),
            "sharing.timeSlicing.resources[1] (nvidia.com/gpu): all devices it names are shared by an earlier entry".to_owned()
        ]
    );
}

#[test]
fn an_entry_that_means_nothing_here_is_a_problem_and_no_more() {
    let config = sharing(vec![
        share("nvidia.com/mig-1g.5gb", SharedOf::All, 2, None),
        share(
            "nvidia.com/gpu",
            SharedOf::Listed(vec![DeviceRef::Gpu(0), DeviceRef::Gpu(7)]),
            2,
            None,
        ),
        share("nvidia.com/gpu", SharedOf::Count(5), 2, None),
        share("nvidia.com/gpu", SharedOf::All, 2, None),
    ]);
    let mut patterns = Config {
        gpu_patterns: vec![ResourcePattern {
            pattern: "*H100*".to_owned(),
            name: "nvidia.com/h100".into(),
        }],
        ..with(MigStrategy::Mixed)
    };
    patterns.mig_patterns.clone_from(&patterns.gpu_patterns);
    let boards = [whole(), whole()];
    insta::assert_debug_snapshot!((problems(&boards, &config), problems(&boards, &patterns)));
    let mixture = sharing(vec![share("nvidia.com/gpu", SharedOf::Count(1), 2, None)]);
    insta::assert_debug_snapshot!(problems(&boards, &mixture));
}

#[test]
fn no_more_is_offered_than_kubelet_takes_in_one_message() {
    use gantry_proto::deviceplugin::{Device, ListAndWatchResponse, NumaNode, TopologyInfo};
    use prost::Message;

    let config = |replicas| sharing(vec![share("nvidia.com/gpu", SharedOf::All, replicas, None)]);
    let one = offer(&hardware(&[whole()]), &config(16384));
    assert_eq!((one.devices.len(), one.problems.len()), (16384, 0));

    let boards: Vec<Board> = (0..8).map(|_| whole()).collect();
    let inventory = offer(&hardware(&boards), &config(u16::MAX));
    let longest = |device: &crate::inventory::Device| Device {
        // The longest name that NVIDIA has had for a MIG device, and the longest number of a replica.
        id: format!(
            "MIG-GPU-01234567-89ab-cdef-0123-456789abcdef/13/7::{:0>5}",
            device.replica.unwrap()
        ),
        health: "Unhealthy".to_owned(),
        topology: Some(TopologyInfo {
            nodes: vec![NumaNode { id: 255 }],
        }),
    };
    let list = ListAndWatchResponse {
        devices: inventory.devices.iter().map(longest).collect(),
    };
    assert!(list.encoded_len() < 4 << 20, "{} bytes", list.encoded_len());
    assert_eq!(inventory.devices.len(), 49152);
    assert_eq!(
        inventory.problems,
        [
            "sharing.timeSlicing.resources[0] (nvidia.com/gpu): 65535 replicas of each of 8 devices are more than the 49152 devices that one message to kubelet holds; 6144 are offered"
        ]
    );
}

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

fn entry() -> impl Strategy<Value = Replicated> {
    let name = prop::sample::select(vec!["nvidia.com/gpu", "nvidia.com/mig-1g.5gb", "nvidia.com/odd"]);
    let rename = prop::sample::select(vec![None, Some("nvidia.com/gpu"), Some("nvidia.com/x")]);
    let devices = prop_oneof![
        Just(SharedOf::All),
        (1u16..4).prop_map(SharedOf::Count),
        prop::collection::vec(reference(), 1..4).prop_map(SharedOf::Listed),
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
    (
        strategy,
        patterns.clone(),
        patterns,
        entries,
        any::<bool>(),
        selectors(),
        selectors(),
    )
        .prop_map(
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

        let left_out: BTreeSet<u8> = inventory.left_out.iter().map(|left_out| left_out.gpu).collect();
        for unit in &hardware.units {
            let devices: Vec<_> = inventory.devices.iter().filter(|device| device.uuid == unit.id.as_str()).collect();
            let resources: BTreeSet<_> = devices.iter().map(|device| &device.resource).collect();
            prop_assert!(resources.len() <= 1, "one name each: {resources:?}");
            let numbers: Vec<Option<u16>> = devices.iter().map(|device| device.replica).collect();
            let whole = numbers == [None];
            let shared = numbers.len() > 1 && numbers == (0..numbers.len() as u16).map(Some).collect::<Vec<_>>();
            let board = boards[usize::from(unit.gpu)].model;
            prop_assert!(
                whole || shared || (numbers.is_empty() && (left_out.contains(&unit.gpu) || board == "NVIDIA DGX Display")),
                "{numbers:?}"
            );
        }
        for gpu in hardware.machine.gpus() {
            let offered = inventory.devices.iter().any(|device| device.gpu == gpu.index);
            let display = gpu.model.as_deref() == Some("NVIDIA DGX Display");
            prop_assert!(display != (offered || left_out.contains(&gpu.index)), "every GPU is accounted for");
        }
        prop_assert!(inventory.left_out.iter().all(|left_out| !left_out.reason.is_empty()));
        let named: BTreeSet<_> = inventory.devices.iter().map(|device| &device.resource).collect();
        prop_assert_eq!(named, inventory.resources.keys().collect::<BTreeSet<_>>());
    }

    #[test]
    fn of_equal_hardware_and_configuration_equal_offers_are_made(
        boards in prop::collection::vec(board(), 0..6),
        config in any_config(),
    ) {
        let mut shuffled = hardware(&boards);
        shuffled.units.reverse();
        let straight = offer(&hardware(&boards), &Config { time_slicing: None, ..config.clone() });
        prop_assert_eq!(offer(&shuffled, &Config { time_slicing: None, ..config }), straight);
    }
}
