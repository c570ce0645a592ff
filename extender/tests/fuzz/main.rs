//! No body, pod, GpuNode or grant makes the extender panic or lose count of its devices: the seeds of `fuzz/`, and changed seeds.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod entry;

use std::path::Path;

use proptest::prelude::*;

/// Runs an input, and returns whether it is accepted.
type Target = fn(&[u8]) -> bool;

/// The seeds of a target.
fn seeds(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds").join(target);
    let files = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let seeds: Vec<Vec<u8>> = files.map(|file| std::fs::read(file.unwrap().path()).unwrap()).collect();
    assert!(!seeds.is_empty(), "{target} has no seeds");
    seeds
}

/// A seed with some bytes replaced, inserted and removed.
fn changed(target: &str) -> impl Strategy<Value = Vec<u8>> {
    let change = (any::<prop::sample::Index>(), 0..3_u8, any::<u8>());
    (prop::sample::select(seeds(target)), prop::collection::vec(change, 0..6)).prop_map(
        |(mut seed, changes)| {
            for (at, kind, byte) in changes {
                let at = at.index(seed.len().max(1));
                match kind {
                    0 if at < seed.len() => seed[at] = byte,
                    1 => seed.insert(at.min(seed.len()), byte),
                    _ if at < seed.len() => drop(seed.remove(at)),
                    _ => {}
                }
            }
            seed
        },
    )
}

fn grants(bytes: &[u8]) -> bool {
    entry::grants(&String::from_utf8_lossy(bytes))
}

#[test]
fn seeds_violate_no_invariant() {
    // With the least number of seeds that are accepted: a fuzzer that begins with refused input finds little.
    let targets: [(&str, Target, usize); 4] = [
        ("requests", entry::requests, 4),
        ("pods", entry::pods, 5),
        ("gpu_nodes", entry::gpu_nodes, 1),
        ("grants", grants, 3),
    ];
    for (target, run, accepted) in targets {
        assert!(seeds(target).iter().filter(|seed| run(seed)).count() >= accepted, "{target}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    #[test]
    fn changed_requests_violate_no_invariant(body in changed("requests")) {
        entry::requests(&body);
    }

    #[test]
    fn changed_pods_violate_no_invariant(pod in changed("pods")) {
        entry::pods(&pod);
    }

    #[test]
    fn changed_gpu_nodes_violate_no_invariant(node in changed("gpu_nodes")) {
        entry::gpu_nodes(&node);
    }

    #[test]
    fn changed_grants_violate_no_invariant(grant in changed("grants")) {
        grants(&grant);
    }
}
