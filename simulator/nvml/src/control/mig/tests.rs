use std::collections::BTreeSet;

use gantry_topology::{Gpu, Machine, MachineParts, PathClass, PathMatrix};
use proptest::prelude::*;

use super::*;
use crate::facts::{Facts, Product};

fn gpu(model: &str) -> GpuFacts {
    let machine = Machine::new(MachineParts {
        gpus: vec![Gpu { model: Some(model.to_owned()), ..Gpu::default() }],
        paths: PathMatrix::from_fn(1, |_, _| PathClass::Sys),
        ..MachineParts::default()
    });
    Facts::of(&machine.unwrap()).unwrap().gpus.remove(0)
}

fn pieces(texts: &[&str]) -> Vec<Piece> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

/// Models that can be cut.
fn models() -> Vec<&'static str> {
    let all = Product::all().iter().map(|product| product.name);
    all.filter(|model| gpu(model).profiles.is_some()).collect()
}

fn change() -> impl Strategy<Value = MigChange> {
    prop_oneof![
        any::<bool>().prop_map(MigChange::Mode),
        (0_u32..70, prop::option::of(0_u8..12))
            .prop_map(|(profile, start)| MigChange::CreateGpu { profile, start }),
        (0_u32..15).prop_map(|id| MigChange::DestroyGpu { id }),
        (0_u32..15, 1_u8..8).prop_map(|(gpu_instance, slices)| MigChange::CreateCompute {
            gpu_instance,
            slices,
            start: None
        }),
        (0_u32..15, 0_u32..4).prop_map(|(gpu_instance, id)| MigChange::DestroyCompute { gpu_instance, id }),
        Just(MigChange::Recut(Vec::new())),
    ]
}

proptest! {
    #[test]
    fn any_change_keeps_a_valid_layout(
        model in any::<prop::sample::Index>(),
        changes in prop::collection::vec(change(), 0..60),
    ) {
        let models = models();
        let gpu = gpu(models[model.index(models.len())]);
        let profiles = gpu.profiles.as_ref().unwrap();
        let mut now = apply(&gpu, None, &MigChange::Recut(Vec::new())).unwrap().mig;
        for change in changes {
            let Ok(applied) = apply(&gpu, Some(&now), &change) else { continue };
            now = applied.mig;
            prop_assert!(now.enabled || now.instances.is_empty());
            prop_assert!(MigLayout::of(profiles, &now, "mig").is_ok(), "{:?}", now);
            let ids: BTreeSet<u32> = now.instances.iter().map(|instance| instance.id).collect();
            prop_assert_eq!(ids.len(), now.instances.len());
            let compute = now.instances.iter().flat_map(|instance| &instance.compute);
            let uuids: BTreeSet<&str> = compute.clone().map(|compute| compute.uuid.as_str()).collect();
            prop_assert_eq!(uuids.len(), compute.count());
            for instance in &now.instances {
                let profile = profiles.profile(&instance.profile).unwrap();
                prop_assert_eq!(placements_of(profile, instance).len(), instance.compute.len());
            }
        }
    }
}

#[test]
fn pieces_without_a_start_are_put_where_all_of_them_fit() {
    let gpu = gpu("NVIDIA A100-SXM4-40GB");
    let recut = |texts: &[&str]| {
        let applied = apply(&gpu, None, &MigChange::Recut(pieces(texts)));
        let starts = |mig: Mig| -> Vec<(String, u8)> {
            let instances = mig.instances.into_iter();
            instances.map(|instance| (instance.profile, instance.start)).collect()
        };
        applied.map(|applied| starts(applied.mig)).map_err(|refusal| refusal.to_string())
    };
    let at = |profile: &str, start: u8| (profile.to_owned(), start);
    assert_eq!(
        recut(&["1g.5gb", "3g.20gb", "2g.10gb"]),
        Ok(vec![at("3g.20gb", 0), at("2g.10gb", 4), at("1g.5gb", 6)]).map(|mut all| {
            all.sort_by_key(|(_, start)| *start);
            all
        })
    );
    assert_eq!(recut(&["3g.20gb", "1g.5gb@1"]), Ok(vec![at("1g.5gb", 1), at("3g.20gb", 4)]));
    assert!(recut(&["4g.20gb", "4g.20gb"]).is_err());
}

#[test]
fn compute_instances_are_laid_side_by_side_whatever_their_order() {
    let gpu = gpu("NVIDIA A100-SXM4-40GB");
    let profiles = gpu.profiles.as_ref().unwrap();
    let places = |piece: &str| -> Vec<(u8, u8)> {
        let applied = apply(&gpu, None, &MigChange::Recut(pieces(&[piece]))).unwrap();
        let instance = &applied.mig.instances[0];
        let profile = profiles.profile(&instance.profile).unwrap();
        let all = placements_of(profile, instance).into_iter();
        all.map(|(_, start, slices)| (start, slices)).collect()
    };
    assert_eq!(places("3g.20gb=2c,1c"), [(0, 2), (2, 1)]);
    assert_eq!(places("3g.20gb=1c,2c"), [(2, 1), (0, 2)]);
    assert_eq!(places("7g.40gb=3c,4c"), [(4, 3), (0, 4)]);
    assert_eq!(places("7g.40gb=3c,2c,2c"), [(4, 3), (0, 2), (2, 2)]);
    assert_eq!(places("7g.40gb=1c,1c,1c"), [(0, 1), (1, 1), (2, 1)]);
}

#[test]
fn a_piece_is_read_from_text() {
    let piece: Piece = "3g.20gb@4=1c,2c".parse().unwrap();
    assert_eq!((piece.start, piece.compute), (Some(4), vec![1, 2]));
    for wrong in ["", "@4", "3g.20gb@x", "3g.20gb=1", "3g.20gb=c"] {
        assert!(wrong.parse::<Piece>().is_err(), "{wrong}");
    }
}

#[test]
fn every_product_that_is_said_to_have_mig_has_profiles() {
    for product in Product::all() {
        assert_eq!(gpu(product.name).profiles.is_some(), product.mig, "{}", product.name);
    }
}
