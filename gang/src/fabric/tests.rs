use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

fn node(name: &str, labels: &[(&str, &str)]) -> NodeFacts {
    NodeFacts {
        name: name.into(),
        labels: labels.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect(),
        ..NodeFacts::default()
    }
}

fn levels(text: &str) -> Levels {
    Levels::parse(text).unwrap()
}

/// The tree as lines.
fn drawn(fabric: &Fabric) -> String {
    fn draw(fabric: &Fabric, domain: DomainIx, depth: usize, out: &mut String) {
        let here = fabric.domain(domain).unwrap();
        out.push_str(&format!("{}{} {:?}\n", "  ".repeat(depth), fabric.words(domain), here.nodes));
        for child in &here.children {
            draw(fabric, *child, depth + 1, out);
        }
    }
    let mut out = String::new();
    draw(fabric, Fabric::ROOT, 0, &mut out);
    out
}

#[test]
fn racks_are_distinct_by_zone_and_unlabelled_nodes_stay_apart() {
    // Racks of the same name in two zones are two domains. Nodes without a rack label do not share a rack
    // with each other.
    let nodes = [
        node("n0", &[("z", "b"), ("r", "1")]),
        node("n1", &[("z", "a"), ("r", "1")]),
        node("n2", &[("z", "a"), ("r", "1")]),
        node("n3", &[("z", "a")]),
        node("n4", &[]),
        node("n5", &[("r", "1")]),
        node("n6", &[("z", "a")]),
        node("n7", &[("r", "1")]),
        node("n8", &[("r", "2")]),
    ];
    let gone = [None];
    let fabric = Fabric::build(levels("zone=z,rack=r"), nodes.iter().map(Some).chain(gone));
    assert_eq!(
        drawn(&fabric),
        "cluster []
  zone of rack 1 []
    rack 1 [5, 7]
  zone of rack 2 []
    rack 2 [8]
  zone a []
    rack 1 [1, 2]
    node n3 [3]
    node n6 [6]
  zone b []
    rack 1 [0]
  node n4 []
    node n4 [4]
"
    );
    assert_eq!(fabric.of_node[9], Fabric::ROOT);
    assert_eq!(fabric.nodes_in(Fabric::ROOT), [5, 7, 8, 1, 2, 3, 6, 0, 4]);
    let at = |node: usize| fabric.of_node[node];
    assert_eq!(fabric.words(fabric.common(at(1), at(2))), "rack 1");
    assert_eq!(fabric.words(fabric.common(at(1), at(3))), "zone a");
    assert_eq!(fabric.words(fabric.common(at(5), at(7))), "rack 1");
    for other in [0, 1, 4, 8] {
        assert_eq!(fabric.words(fabric.common(at(5), at(other))), "cluster");
    }
    assert_eq!(fabric.words(fabric.common(at(0), at(1))), "cluster");
    assert_eq!(fabric.of_node_at(3, 0), fabric.of_node_at(1, 0));
}

#[test]
fn a_block_that_lacks_a_tier_keeps_those_below_it() {
    let tier = |tier: &str| format!("fabric.topograph.run/tier-{tier}");
    let (spine, block, leaf) = (tier("2"), tier("1"), tier("0"));
    let two: [(&str, &[(&str, &str)]); 6] = [
        ("a0", &[(&spine, "s"), (&block, "a"), (&leaf, "a-l0")]),
        ("b0", &[(&block, "b"), (&leaf, "b-l0")]),
        ("b1", &[(&block, "b"), (&leaf, "b-l0")]),
        ("b2", &[(&block, "b"), (&leaf, "b-l1")]),
        // A leaf without its block, and its like under a spine.
        ("c0", &[(&leaf, "b-l0")]),
        ("c1", &[(&spine, "s"), (&leaf, "b-l0")]),
    ];
    let nodes = two.map(|(name, labels)| node(name, labels));
    let fabric = Fabric::build(levels("topograph"), nodes.iter().map(Some));
    assert_eq!(
        drawn(&fabric),
        "cluster []
  tier-2 of tier-1 b []
    tier-1 b []
      tier-0 b-l0 [1, 2]
      tier-0 b-l1 [3]
  tier-2 of tier-0 b-l0 []
    tier-1 of tier-0 b-l0 []
      tier-0 b-l0 [4]
  tier-2 s []
    tier-1 a []
      tier-0 a-l0 [0]
    tier-1 of tier-0 b-l0 []
      tier-0 b-l0 [5]
"
    );
    let names: Vec<&str> = fabric.of_level(0).map(|tier| &*fabric.domain(tier).unwrap().name).collect();
    assert_eq!(names, ["tier-1 b", "tier-0 b-l0", "s"]);
}

#[test]
fn a_level_that_no_node_knows_is_passed_over() {
    let nodes = [node("n0", &[("r", "1")]), node("n1", &[("r", "1")])];
    let fabric = Fabric::build(levels("zone=z,rack=r"), nodes.iter().map(Some));
    assert_eq!(drawn(&fabric), "cluster []\n  rack 1 [0, 1]\n");
    assert!(!fabric.in_use(0) && fabric.in_use(1));
    assert_eq!(fabric.of_level(1).collect::<Vec<_>>(), [DomainIx(1)]);
}

#[test]
fn without_levels_the_cluster_is_one_domain() {
    let nodes = [node("n0", &[]), node("n1", &[])];
    let fabric = Fabric::build(Levels::default(), nodes.iter().map(Some));
    assert_eq!(drawn(&fabric), "cluster [0, 1]\n");
    assert_eq!(Fabric::default().domains.len(), 1);
}

#[test]
fn presets_and_levels_of_ones_own_are_combined() {
    let names = |text: &str| levels(text).0.iter().map(|level| level.name.to_string()).collect::<Vec<_>>();
    assert_eq!(names("aws,nvlink"), ["layer-1", "layer-2", "layer-3", "clique"]);
    assert_eq!(names(" zone , row = example.com/row,nvlink"), ["zone", "row", "clique"]);
    assert_eq!(names("topograph"), ["tier-2", "tier-1", "tier-0", "domain", "sub-domain"]);
    let old = levels("topograph-old");
    let labels: Vec<&str> = old.0.iter().map(|level| &*level.label).collect();
    assert_eq!(
        labels,
        ["datacenter", "spine", "block", "accelerator"]
            .map(|level| format!("network.topology.nvidia.com/{level}"))
    );
    assert_eq!(names("zone-rack"), ["zone", "rack"]);
    assert_eq!(names("gke"), ["block", "subblock", "host"]);
    assert_eq!(names("oci"), ["network-block", "rack"]);
    assert_eq!(names(""), [""; 0]);
}

#[test]
fn what_is_not_understood_is_refused_with_the_nearest_name() {
    for (text, words) in [
        (
            "nvlnk",
            "\"nvlnk\" is neither a preset (topograph, topograph-old, aws, gke, oci, nvlink, zone, zone-rack) nor written name=label; did you mean nvlink?",
        ),
        (
            "zone,",
            "\"\" is neither a preset (topograph, topograph-old, aws, gke, oci, nvlink, zone, zone-rack) nor written name=label",
        ),
        (
            "Rack=r",
            "\"Rack\" in \"Rack=r\" is no name of a level: write lower-case letters, digits and dashes, and not \"node\" or \"cluster\", which every fabric has",
        ),
        (
            "node=n",
            "\"node\" in \"node=n\" is no name of a level: write lower-case letters, digits and dashes, and not \"node\" or \"cluster\", which every fabric has",
        ),
        (
            "rack=a/b/c",
            "\"a/b/c\" in \"rack=a/b/c\" is no label of a node; write one such as topology.kubernetes.io/zone",
        ),
        (
            "oci,rack=r",
            "two levels are called rack: oci.oraclecloud.com/host.rack_id and r; name one of them otherwise, with name=label",
        ),
        (
            "zone,zone-rack",
            "the label topology.kubernetes.io/zone makes two levels, zone and zone; leave one of them out",
        ),
    ] {
        assert_eq!(Levels::parse(text).unwrap_err().to_string(), words);
    }
}

#[test]
fn a_level_is_found_by_name_or_label() {
    let levels = levels("zone-rack,nvlink");
    assert_eq!(levels.find("rack"), Ok(Scope::Level(1)));
    assert_eq!(levels.find("nvidia.com/gpu.clique"), Ok(Scope::Level(2)));
    assert_eq!(levels.find("kubernetes.io/hostname"), Ok(Scope::Node));
    assert_eq!(levels.find("node"), Ok(Scope::Node));
    assert_eq!(
        levels.find("rak").unwrap_err().to_string(),
        "there is no level \"rak\" of the fabric; levels are zone, rack, clique, node; did you mean rack?"
    );
    assert_eq!(
        levels.find("nvidia.com/gpu.cliqe").unwrap_err().near.as_deref(),
        Some("nvidia.com/gpu.clique")
    );
    assert_eq!(levels.find("continent").unwrap_err().near, None);
}

#[test]
fn only_labels_of_levels_make_a_fabric_another() {
    let levels = levels("zone=z");
    let before = node("n", &[("z", "a"), ("other", "1")]);
    assert!(levels.agree(Some(&before), Some(&node("n", &[("z", "a")]))));
    assert!(!levels.agree(Some(&before), Some(&node("n", &[("z", "b")]))));
    assert!(!levels.agree(Some(&before), None));
}

fn any_nodes() -> impl Strategy<Value = Vec<Option<NodeFacts>>> {
    let label = |key: &'static str| prop::option::of((Just(key), prop::sample::select(vec!["1", "2", "n1"])));
    let labels = (label("z"), label("r"), label("c"));
    prop::collection::vec(prop::option::weighted(0.9, labels), 0..30).prop_map(|all| {
        let read = |(number, labels): (usize, Option<(_, _, _)>)| {
            labels.map(|(zone, rack, clique)| {
                let labels: Vec<(&str, &str)> = [zone, rack, clique].into_iter().flatten().collect();
                node(&format!("n{number}"), &labels)
            })
        };
        all.into_iter().enumerate().map(read).collect()
    })
}

proptest! {
    #[test]
    fn the_tree_is_one(nodes in any_nodes()) {
        let fabric = Fabric::build(levels("zone=z,rack=r,clique=c"), nodes.iter().map(Option::as_ref));
        // Each node that is there is in exactly one leaf, the one that is said; no inner domain has any.
        let mut seen = BTreeSet::new();
        for (number, domain) in fabric.domains.iter().enumerate() {
            let here = DomainIx(u32::try_from(number).unwrap());
            prop_assert!(domain.children.is_empty() || domain.nodes.is_empty());
            for node in &domain.nodes {
                prop_assert!(seen.insert(*node), "node {} is in two leaves", node);
                prop_assert_eq!(fabric.of_node[*node as usize], here);
            }
            prop_assert_eq!(domain.parent.is_none(), number == 0);
            if let Some(parent) = domain.parent {
                prop_assert!(parent < here, "parents come first");
                let parent = fabric.domain(parent).unwrap();
                prop_assert_eq!(parent.children.iter().filter(|child| **child == here).count(), 1);
                prop_assert!(parent.level < domain.level);
            }
            prop_assert!(number == 0 || !fabric.nodes_in(here).is_empty(), "a domain is empty");
        }
        let there: BTreeSet<u32> = (0..).zip(&nodes).filter(|(_, node)| node.is_some()).map(|(number, _)| number).collect();
        prop_assert_eq!(seen, there);
    }

    #[test]
    fn domain_is_shared_iff_its_label_and_all_above_agree(nodes in any_nodes()) {
        // Two nodes share a domain exactly if they share its label, or one below it, and agree about every
        // label above.
        let levels = levels("zone=z,rack=r,clique=c");
        let fabric = Fabric::build(levels.clone(), nodes.iter().map(Option::as_ref));
        for (a, one) in (0..).zip(&nodes) {
            for (b, other) in (0..).zip(&nodes) {
                let (Some(one), Some(other)) = (one, other) else { continue };
                let value = |node: &NodeFacts, level: usize| node.labels.get(&levels.0[level].label).cloned();
                let agree = |level: usize| value(one, level) == value(other, level);
                let meet = |level: usize| value(one, level).is_some() && (0..=level).all(agree);
                for level in (0..3).filter(|level| fabric.in_use(*level)) {
                    let shared = a == b || (level..3).any(meet);
                    prop_assert_eq!(fabric.of_node_at(a, level) == fabric.of_node_at(b, level), shared);
                }
            }
        }
    }

    #[test]
    fn a_domain_is_known_by_what_its_nodes_have_in_common(nodes in any_nodes()) {
        let levels = levels("zone=z,rack=r,clique=c");
        let fabric = Fabric::build(levels.clone(), nodes.iter().map(Option::as_ref));
        let mut named = BTreeSet::new();
        for (number, domain) in (0..).map(DomainIx).zip(&fabric.domains) {
            let Some(level) = domain.level else { continue };
            let within = fabric.nodes_in(number);
            for node in &within {
                let node = nodes[*node as usize].as_ref().unwrap();
                let value = |level: usize| node.labels.get(&levels.0[level].label);
                let name = match domain.by {
                    DomainIdentity::Label => value(level).unwrap().to_string(),
                    DomainIdentity::Smaller(by) => {
                        prop_assert!(by > level && (level..by).all(|level| value(level).is_none()));
                        format!("{} {}", levels.0[by].name, value(by).unwrap())
                    }
                    DomainIdentity::Node => {
                        prop_assert!(within.len() == 1 && (level..3).all(|level| value(level).is_none()));
                        node.name.to_string()
                    }
                };
                prop_assert_eq!(&*domain.name, &*name);
            }
            // Nobody would know two of the same words under one parent apart.
            prop_assert!(named.insert((domain.parent, fabric.words(number))));
        }
    }
}

#[test]
fn item_for_a_label_is_what_the_option_takes() {
    for (label, item) in [
        ("topology.kubernetes.io/zone", Some("zone")),
        ("topology.kubernetes.io/rack", Some("zone-rack")),
        ("nvidia.com/gpu.clique", Some("nvlink")),
        ("example.com/Rack_row.a", Some("rack-row-a=example.com/Rack_row.a")),
        ("example.com/node", Some("level=example.com/node")),
        ("rack", None),
        ("example.com/", None),
    ] {
        assert_eq!(Levels::item_for(label).as_deref(), item);
        if let Some(item) = item {
            assert!(levels(item).find(label).is_ok(), "{item}");
        }
    }
}
