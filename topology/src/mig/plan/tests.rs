use proptest::prelude::*;

use super::super::{Catalogue, Engines};
use super::*;

fn product(name: &str) -> Product {
    Catalogue::built_in().products().iter().find(|product| product.name == name).unwrap().clone()
}

fn wanted(text: &str) -> BTreeMap<String, u8> {
    let entries = text.split(' ').filter(|entry| !entry.is_empty()).map(|entry| {
        let (count, name) = entry.split_once('x').unwrap();
        (name.to_owned(), count.parse().unwrap())
    });
    entries.collect()
}

fn present(product: &Product, id: u32, name: &str, start: u8, held: bool) -> PresentInstance {
    let profile = product.profile(name).unwrap();
    PresentInstance { id, profile: profile.id, start, compute: vec![profile.compute], held }
}

fn created(plan: &MigPlan) -> Vec<String> {
    let instances = plan.create.iter();
    instances.map(|new| format!("{}@{}={:?}", new.name, new.start, new.compute)).collect()
}

#[test]
fn empty_gpu_gets_the_largest_first() {
    let product = product("A100-40GB");
    let plan = plan(&product, &[], &wanted("2x1g.5gb 1x2g.10gb 1x3g.20gb")).unwrap();
    // Beside 3g.20gb at 0 only one 1g.5gb would find a place.
    assert_eq!(created(&plan), ["3g.20gb@4=[3]", "2g.10gb@0=[2]", "1g.5gb@2=[1]", "1g.5gb@3=[1]"]);
}

#[test]
fn wanted_instances_that_exist_are_kept() {
    let product = product("A100-40GB");
    let now = [present(&product, 1, "3g.20gb", 4, false), present(&product, 9, "1g.5gb", 0, true)];
    let all = wanted("1x3g.20gb 1x1g.5gb");
    assert!(plan(&product, &now, &all).unwrap().is_empty());
    let plan = plan(&product, &now, &wanted("1x3g.20gb 2x1g.5gb")).unwrap();
    assert_eq!((plan.destroy.len(), created(&plan)), (0, vec!["1g.5gb@1=[1]".to_owned()]));
}

#[test]
fn held_instance_stays_or_the_plan_is_refused() {
    let product = product("A100-40GB");
    let held = present(&product, 13, "1g.5gb", 6, true);
    let error = plan(&product, std::slice::from_ref(&held), &wanted("1x7g.40gb")).unwrap_err();
    assert_eq!(
        error.to_string(),
        "1g.5gb at 6 must stay, because it is in use, and leaves no room for 1x 7g.40gb"
    );
    let around =
        plan(&product, &[held, present(&product, 1, "3g.20gb", 0, false)], &wanted("7x1g.5gb")).unwrap();
    assert_eq!((around.destroy, around.create.len()), (vec![1], 6));
}

#[test]
fn compute_instances_share_gpu_instances() {
    let product = product("A100-40GB");
    let plan_of = |text: &str| created(&plan(&product, &[], &wanted(text)).unwrap());
    assert_eq!(plan_of("4x1c.3g.20gb"), ["3g.20gb@0=[1]", "3g.20gb@4=[1, 1, 1]"]);
    assert_eq!(plan_of("1x1c.3g.20gb 1x2c.3g.20gb 1x3g.20gb"), ["3g.20gb@0=[2, 1]", "3g.20gb@4=[3]"]);
    let error = plan(&product, &[], &wanted("1x2c.2g.10gb")).unwrap_err();
    assert_eq!(error.to_string(), "2g.10gb has no compute instances of 2 slices: write 2g.10gb, 1c.2g.10gb");
}

#[test]
fn errors_name_profile_placement_and_what_is_possible() {
    let a100 = product("A100-40GB");
    let error = plan(&a100, &[], &wanted("3x3g.20gb")).unwrap_err();
    assert_eq!(
        error.to_string(),
        "A100-40GB cannot hold 3x 3g.20gb: beside 3g.20gb at 0, 3g.20gb at 4, no placement is left for 3g.20gb, which may start \
         at 0, 4; alone, a GPU holds 2 of it"
    );
    let error = plan(&a100, &[], &wanted("1x1g.10gb+me")).unwrap_err().to_string();
    assert!(
        error.starts_with(
            "A100-40GB has no profile \"1g.10gb+me\"; the nearest is 1g.10gb; it has 1g.5gb, 1g.5gb+me, "
        ),
        "{error}"
    );
}

/// Whether these instances are legal together, without [`MigLayout`].
fn is_legal(product: &Product, instances: &[(&Profile, u8)]) -> bool {
    let whole = product.whole().unwrap();
    let units = instances.iter().flat_map(|(profile, start)| *start..start + profile.size);
    let mut units: Vec<u8> = units.collect();
    let taken = units.len();
    units.sort_unstable();
    units.dedup();
    let sum =
        |of: fn(&Engines) -> u32| instances.iter().map(|(profile, _)| of(&profile.engines)).sum::<u32>();
    let within = |of: fn(&Engines) -> u32| sum(of) <= of(&whole.engines);
    let most = |profile: &Profile| {
        instances.iter().filter(|(other, _)| other.id == profile.id).count()
            <= usize::from(profile.max_instances)
    };
    units.len() == taken
        && instances.iter().all(|(profile, start)| profile.starts.contains(start) && most(profile))
        && instances.iter().map(|(profile, _)| u32::from(profile.compute)).sum::<u32>()
            <= u32::from(whole.compute)
        && within(|engines| engines.decoders)
        && within(|engines| engines.encoders)
        && within(|engines| engines.jpeg)
        && within(|engines| engines.ofa)
}

/// Every legal arrangement of these profiles, by trying every start of every one.
fn arrangements<'p>(product: &'p Product, profiles: &[&'p Profile]) -> Vec<Vec<(&'p Profile, u8)>> {
    let mut all: Vec<Vec<(&Profile, u8)>> = vec![Vec::new()];
    for profile in profiles {
        all = all
            .into_iter()
            .flat_map(|before| {
                let with = profile.starts.iter().map(move |start| {
                    let mut with = before.clone();
                    with.push((*profile, *start));
                    with
                });
                with.filter(|with| is_legal(product, with)).collect::<Vec<_>>()
            })
            .collect();
    }
    all
}

/// A product, the positions of wanted profiles, and present instances: position, choice of a start, held.
fn cases() -> impl Strategy<Value = (usize, Vec<usize>, Vec<(usize, usize, bool)>)> {
    let products = Catalogue::built_in().products().len();
    let wanted = prop::collection::vec(0..16usize, 0..6);
    let present = prop::collection::vec((0..16usize, 0..8usize, prop::bool::weighted(0.2)), 0..6);
    (0..products, wanted, present)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    /// A plan exists exactly if some arrangement is legal and keeps what is held; it keeps as much as the best one, and
    /// its steps can be carried out in their order.
    #[test]
    fn plan_equals_brute_force((product, positions, instances) in cases()) {
        let catalogue = Catalogue::built_in();
        let product = &catalogue.products()[product];
        let profile = |position: usize| &product.profiles[position % product.profiles.len()];
        let mut now: Vec<PresentInstance> = Vec::new();
        let mut placed: Vec<(&Profile, u8)> = Vec::new();
        for (id, (position, start, held)) in instances.into_iter().enumerate() {
            let profile = profile(position);
            let start = profile.starts[start % profile.starts.len()];
            placed.push((profile, start));
            if is_legal(product, &placed) {
                now.push(PresentInstance { id: id as u32, profile: profile.id, start, compute: vec![profile.compute], held });
            } else {
                placed.pop();
            }
        }
        let profiles: Vec<&Profile> = positions.iter().map(|position| profile(*position)).collect();
        let mut wanted: BTreeMap<String, u8> = BTreeMap::new();
        for profile in &profiles {
            *wanted.entry(profile.name.clone()).or_default() += 1;
        }
        let is_in = |arrangement: &[(&Profile, u8)], instance: &PresentInstance| {
            arrangement.iter().any(|(profile, start)| profile.id == instance.profile && *start == instance.start)
        };
        let all = arrangements(product, &profiles);
        let most_kept = all
            .iter()
            .filter(|arrangement| now.iter().filter(|instance| instance.held).all(|instance| is_in(arrangement, instance)))
            .map(|arrangement| now.iter().filter(|instance| is_in(arrangement, instance)).count())
            .max();
        match (plan(product, &now, &wanted), most_kept) {
            (Err(MigPlanError::Held { .. }), None) => prop_assert!(!all.is_empty()),
            (Err(MigPlanError::Impossible { .. }), None) => prop_assert!(all.is_empty()),
            (Ok(plan), Some(most)) => {
                prop_assert_eq!(now.len() - plan.destroy.len(), most);
                prop_assert!(now.iter().all(|instance| !instance.held || !plan.destroy.contains(&instance.id)));
                let stays = now.iter().filter(|instance| !plan.destroy.contains(&instance.id));
                let mut state: Vec<(&Profile, u8)> = stays
                    .map(|instance| (product.profile_by_id(instance.profile).unwrap(), instance.start))
                    .collect();
                for new in &plan.create {
                    state.push((product.profile_by_id(new.profile).unwrap(), new.start));
                    prop_assert!(is_legal(product, &state), "{:?}", plan);
                }
                let mut names: Vec<&str> = state.iter().map(|(profile, _)| profile.name.as_str()).collect();
                let mut expected: Vec<&str> = profiles.iter().map(|profile| profile.name.as_str()).collect();
                names.sort_unstable();
                expected.sort_unstable();
                prop_assert_eq!(names, expected);
            }
            (plan, most) => prop_assert!(false, "{:?}, brute force keeps {:?}", plan, most),
        }
    }
}
