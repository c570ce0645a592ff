//! MIG placements against brute force, and the table against what is known of the products.
#![allow(clippy::unwrap_used, reason = "a test stops at what is wrong")]

use gantry_topology::mig::{Catalogue, MigLayout, Product, Profile};
use gantry_topology::{ComputeInstance, GpuInstance, Machine, Mig};
use proptest::prelude::*;

/// Whether instances (profile, start) are legal, by the rules, without `MigLayout`.
fn legal(product: &Product, instances: &[(&Profile, u8)]) -> bool {
    let whole = product.whole().unwrap();
    let total = |count: &dyn Fn(&Profile) -> u32| instances.iter().map(|(p, _)| count(p)).sum::<u32>();
    let placed = instances.iter().all(|(p, start)| p.starts.contains(start));
    let apart = (0..16_u8).all(|unit| {
        let covers = |(p, start): &&(&Profile, u8)| (*start..*start + p.size).contains(&unit);
        instances.iter().filter(covers).count() <= 1
    });
    let few = product.profiles.iter().all(|profile| {
        instances.iter().filter(|(p, _)| p.id == profile.id).count() <= usize::from(profile.max_instances)
    });
    placed
        && apart
        && few
        && total(&|p| u32::from(p.compute)) <= u32::from(whole.compute)
        && total(&|p| p.engines.decoders) <= whole.engines.decoders
        && total(&|p| p.engines.encoders) <= whole.engines.encoders
        && total(&|p| p.engines.jpeg) <= whole.engines.jpeg
        && total(&|p| p.engines.ofa) <= whole.engines.ofa
}

/// The most instances of `profile` that can be added, by trying every subset of its starts.
fn most(product: &Product, instances: &[(&Profile, u8)], profile: &Profile) -> u32 {
    (0_u32..1 << profile.starts.len())
        .filter(|subset| {
            let chosen = (0..profile.starts.len()).filter(|bit| subset >> bit & 1 == 1);
            let mut with = instances.to_vec();
            with.extend(chosen.map(|bit| (profile, profile.starts[bit])));
            legal(product, &with)
        })
        .map(u32::count_ones)
        .max()
        .unwrap_or(0)
}

proptest! {
    #[test]
    fn possible_additions_match_brute_force(
        product in any::<prop::sample::Index>(),
        steps in prop::collection::vec((any::<prop::sample::Index>(), 0_u8..12), 0..10),
    ) {
        let catalogue = Catalogue::built_in();
        let product = product.get(catalogue.products());
        let mut cut = MigLayout::empty(product);
        let mut instances: Vec<(&Profile, u8)> = Vec::new();
        for (profile, start) in &steps {
            let profile = profile.get(&product.profiles);
            let mut with = instances.clone();
            with.push((profile, *start));
            prop_assert_eq!(cut.add(profile, *start).is_ok(), legal(product, &with));
            if legal(product, &with) {
                instances = with;
            }
        }
        for profile in &product.profiles {
            let possible: Vec<u8> = (0..16)
                .filter(|start| {
                    let mut with = instances.clone();
                    with.push((profile, *start));
                    legal(product, &with)
                })
                .collect();
            prop_assert_eq!(cut.possible(profile), possible);
            prop_assert_eq!(u32::from(cut.remaining(profile)), most(product, &instances, profile));
        }
    }
}

#[test]
fn empty_gpu_holds_nvidias_maximum_of_each_profile() {
    for product in Catalogue::built_in().products() {
        for profile in &product.profiles {
            let remaining = MigLayout::empty(product).remaining(profile);
            assert_eq!(remaining, profile.max_instances, "{} {}", product.name, profile.name);
        }
    }
}

#[test]
fn names_have_memory_in_eighths_rounded_up() {
    for product in Catalogue::built_in().products() {
        let total = 2_u64.pow(20) * product.memory_mib;
        for profile in &product.profiles {
            let share = (profile.memory_mib << 20) as f64 / total as f64;
            let gb = (share * 8.0).ceil() / 8.0 * total.div_ceil(1 << 30) as f64;
            let name = format!("{}g.{}gb", profile.compute, gb.round());
            assert!(profile.name.starts_with(&name), "{} {}: {name}", product.name, profile.name);
        }
    }
}

#[test]
fn products_are_found_by_name_and_by_device_id() {
    let catalogue = Catalogue::built_in();
    let named = |model: &str, memory_mib| {
        let product = catalogue.by_model(model, memory_mib);
        product.map(|product| product.name.clone())
    };
    for (model, memory_mib, product) in [
        ("NVIDIA A30", None, Some("A30-24GB")),
        ("NVIDIA A100-SXM4-40GB", None, Some("A100-40GB")),
        ("NVIDIA A100-PCIE-40GB", Some(40_536), Some("A100-40GB")),
        ("NVIDIA A100-SXM-64GB", Some(65_536), Some("A100-64GB")),
        ("NVIDIA A100 80GB PCIe", Some(81_251), Some("A100-80GB")),
        ("NVIDIA A800-SXM4-80GB", None, Some("A100-80GB")),
        ("NVIDIA H100 80GB HBM3", Some(81_559), Some("H100-80GB")),
        ("NVIDIA H100 PCIe", Some(81_559), Some("H100-80GB")),
        ("NVIDIA H100", None, Some("H100-80GB")),
        ("NVIDIA H100", Some(65_247), Some("H100-64GB")),
        ("NVIDIA H100", Some(95_830), Some("H100-NVL-94GB")),
        ("NVIDIA H100", Some(97_871), Some("GH200-96GB")),
        ("NVIDIA H100", Some(120_000), None),
        ("NVIDIA H100 NVL", Some(95_830), Some("H100-NVL-94GB")),
        ("NVIDIA GH200 480GB", Some(97_871), Some("GH200-96GB")),
        ("NVIDIA GH200 144G HBM3e", Some(146_831), Some("GH200-144GB")),
        ("NVIDIA H20", Some(97_871), Some("H20-96GB")),
        ("NVIDIA H20-3e", Some(143_771), Some("H20-141GB")),
        ("NVIDIA H20-3e", None, Some("H20-141GB")),
        ("NVIDIA H200", None, Some("H200-141GB")),
        ("NVIDIA H200 NVL", Some(143_771), Some("H200-141GB")),
        ("NVIDIA B200", Some(183_359), Some("B200-180GB")),
        ("NVIDIA GB200", None, Some("GB200-186GB")),
        ("NVIDIA GB200", Some(189_471), Some("GB200-186GB")),
        ("NVIDIA GB200", Some(193_000), Some("GB200-189GB")),
        ("NVIDIA B300 SXM6 AC", Some(275_040), Some("B300-269GB")),
        ("NVIDIA GB300", None, Some("GB300-278GB")),
        ("NVIDIA GB300", Some(284_208), Some("GB300-278GB")),
        ("NVIDIA GB300", Some(256_703), Some("GB300-251GB")),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", Some(97_887), Some("RTX-PRO-6000-Blackwell-96GB")),
        (
            "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
            Some(97_887),
            Some("RTX-PRO-6000-Blackwell-96GB"),
        ),
        ("NVIDIA RTX PRO 5000 Blackwell", Some(48_935), None),
        ("NVIDIA L4", None, None),
        ("NVIDIA A40", None, None),
        ("NVIDIA A100", None, None),
    ] {
        assert_eq!(named(model, memory_mib).as_deref(), product, "{model} {memory_mib:?}");
    }
    let by_id = |id| catalogue.by_device_id(id).map(|product| product.name.clone());
    assert_eq!(by_id(0x20b7).as_deref(), Some("A30-24GB"));
    assert_eq!(by_id(0x2330).as_deref(), Some("H100-80GB"));
    assert_eq!(by_id(0x27b8), None);
}

#[test]
fn instance_ids_match_the_driver() {
    let catalogue = Catalogue::built_in();
    let a100 = catalogue.by_model("NVIDIA A100-SXM4-40GB", None).unwrap();
    let id = |profile: &str, start| a100.instance_id(a100.profile(profile).unwrap(), start);
    assert_eq!(id("7g.40gb", 0), 0);
    assert_eq!((id("3g.20gb", 0), id("3g.20gb", 4)), (1, 2));
    assert_eq!((id("2g.10gb", 0), id("2g.10gb", 4)), (3, 5));
    assert_eq!((id("1g.5gb", 0), id("1g.5gb", 6)), (7, 13));
}

#[test]
fn compute_instance_shares_engines() {
    let catalogue = Catalogue::built_in();
    let h100 = catalogue.by_model("NVIDIA H100 80GB HBM3", None).unwrap();
    let profile = h100.profile("3g.40gb").unwrap();
    let whole = h100.attributes(profile, 3);
    assert_eq!((whole.multiprocessors, whole.gpu_slices, whole.compute_slices), (60, 3, 3));
    let part = h100.attributes(profile, 1);
    assert_eq!((part.multiprocessors, part.gpu_slices, part.compute_slices), (16, 3, 1));
    assert_eq!((part.memory_mib, part.copy_engines, part.jpeg), (40_448, 3, 3));
}

#[test]
fn media_engines_are_allocated_once() {
    let catalogue = Catalogue::built_in();
    let rtx = catalogue.by_model("NVIDIA RTX PRO 6000 Blackwell Server Edition", None).unwrap();
    let mut cut = MigLayout::empty(rtx);
    cut.add(rtx.profile("1g.24gb+me.all").unwrap(), 0).unwrap();
    assert_eq!(cut.remaining(rtx.profile("1g.24gb").unwrap()), 0);
    assert_eq!(cut.remaining(rtx.profile("1g.24gb-me").unwrap()), 3);
    assert_eq!(cut.possible(rtx.profile("2g.48gb-me").unwrap()), [6]);
    let refused = cut.add(rtx.profile("1g.24gb+me").unwrap(), 3).unwrap_err();
    assert_eq!(refused.to_string(), "not enough video decoders are left for 1g.24gb+me");
}

/// What the check says of one A100 with these instances (profile, start, size, compute instances).
fn checked(instances: &[(&str, u8, u8, &[&str])]) -> String {
    let mig = Mig {
        enabled: true,
        instances: (0_u32..)
            .zip(instances)
            .map(|(id, (profile, start, size, compute))| GpuInstance {
                id,
                profile: (*profile).to_owned(),
                start: *start,
                size: *size,
                compute: (0_u32..)
                    .zip(*compute)
                    .map(|(compute_id, profile)| ComputeInstance {
                        id: compute_id,
                        uuid: format!("MIG-{id}-{compute_id}").parse().unwrap(),
                        profile: (*profile).to_owned(),
                        attributes: None,
                    })
                    .collect(),
            })
            .collect(),
    };
    let catalogue = Catalogue::built_in();
    let product = catalogue.by_model("NVIDIA A100-SXM4-40GB", None).unwrap();
    match MigLayout::of(product, &mig, "gpus[0].mig") {
        Ok(_) => "legal".to_owned(),
        Err(error) => error.to_string(),
    }
}

#[test]
fn illegal_layout_is_refused_with_allowed_starts() {
    assert_eq!(
        checked(&[("4g.20gb", 0, 4, &["4g.20gb"]), ("3g.20gb", 4, 4, &["1c.3g.20gb", "2c.3g.20gb"])]),
        "legal"
    );
    assert_eq!(
        checked(&[("3g.20gbb", 0, 4, &[])]),
        "gpus[0].mig.instances[0].profile: A100-40GB has no profile \"3g.20gbb\"; the nearest is 3g.20gb"
    );
    assert_eq!(
        checked(&[("1g.5gb", 0, 1, &[]), ("3g.20gb", 1, 4, &[])]),
        "gpus[0].mig.instances[1].start: 3g.20gb may start at 0, 4, not at 1"
    );
    assert_eq!(
        checked(&[("1g.5gb", 0, 1, &[]), ("3g.20gb", 0, 4, &[])]),
        "gpus[0].mig.instances[1].start: 3g.20gb at 0 overlaps another instance; beside the others it may start at 4"
    );
    assert_eq!(checked(&[("3g.20gb", 0, 3, &[])]), "gpus[0].mig.instances[0].size: is 3, 3g.20gb covers 4");
    assert_eq!(
        checked(&[("1g.5gb+me", 0, 1, &[]), ("1g.5gb+me", 1, 1, &[])]),
        "gpus[0].mig.instances[1].start: a GPU has at most 1 of 1g.5gb+me"
    );
    assert_eq!(
        checked(&[("3g.20gb", 0, 4, &["1c.2g.10gb"])]),
        "gpus[0].mig.instances[0].compute[0].profile: \"1c.2g.10gb\", allowed is 3g.20gb, 1c.3g.20gb, 2c.3g.20gb"
    );
    assert_eq!(
        checked(&[("3g.20gb", 0, 4, &["2c.3g.20gb", "2c.3g.20gb"])]),
        "gpus[0].mig.instances[0].compute[1].profile: the compute instances have more than 3 slices"
    );
}

#[test]
fn machine_layouts_are_checked_per_gpu() {
    let text = |model: &str, start: u8| {
        format!(
            "{{\"gpus\": [{{\"index\": 0, \"model\": \"{model}\", \"mig\": {{\"enabled\": true, \"instances\": \
             [{{\"id\": 1, \"profile\": \"3g.20gb\", \"start\": {start}, \"size\": 4}}]}}}}], \"paths\": [\"X\"]}}"
        )
    };
    let check = |text: String| {
        let machine: Machine = serde_json::from_str(&text).unwrap();
        gantry_topology::mig::check_machine(&Catalogue::built_in(), &machine)
            .map_err(|error| error.to_string())
    };
    assert_eq!(check(text("NVIDIA A100-SXM4-40GB", 4)), Ok(()));
    assert_eq!(
        check(text("NVIDIA A100-SXM4-40GB", 2)).unwrap_err(),
        "gpus[0].mig.instances[0].start: 3g.20gb may start at 0, 4, not at 2"
    );
    assert_eq!(check(text("NVIDIA Unheard-of", 2)), Ok(()), "nothing is known of it");
}
