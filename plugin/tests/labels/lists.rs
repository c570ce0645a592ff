//! GPUs excluded by the lists of a configuration are in no label.

use gantry_config::{Config, MigStrategy, Selector};
use gantry_plugin::labels::Labels;
use gantry_topology::Machine;

use super::{cut, get, in_clique, machine, models, of, plain, strategy};

/// Labels of a machine with GPUs excluded by the lists of a configuration.
fn listed(machine: &Machine, allow: &[Selector], deny: &[Selector]) -> Labels {
    let config = Config { allow: allow.to_vec(), deny: deny.to_vec(), ..strategy(MigStrategy::Mixed) };
    plain(machine, &config)
}

#[test]
fn excluded_gpus_are_in_no_label() {
    let mixed = models(&["NVIDIA L4", "NVIDIA L4", "NVIDIA L4", "NVIDIA A100"]);
    let model = |model: &str| Selector::Model(model.to_owned());
    let denied = listed(&mixed, &[], &[model("NVIDIA L4")]);
    for (key, value) in [
        ("nvidia.com/gpu.product", Some("NVIDIA-A100")),
        ("nvidia.com/gpu.count", Some("1")),
        ("nvidia.com/gpu.memory", Some("1011")),
        ("nvidia.com/gpu.replicas", Some("1")),
        ("gantry.dev/gpu-count.NVIDIA-A100", Some("1")),
        ("gantry.dev/gpu-count.NVIDIA-L4", None),
        ("gantry.dev/gpu-memory.NVIDIA-L4", None),
    ] {
        assert_eq!(get(&denied, key), value, "{key}");
    }
    assert_eq!(listed(&mixed, &[Selector::Index(3)], &[]), denied);
    assert_eq!(
        listed(&mixed, &[], &[model("*")]),
        plain(&of([]), &Config::default()),
        "as on a node without GPUs"
    );
    assert_eq!(listed(&mixed, &[], &[model("*")]), Labels::new(), "not even its machine's type");
}

#[test]
fn link_and_clique_labels_cover_allowed_gpus_only() {
    let dgx = machine("dgx-a100");
    let seven = listed(&dgx, &[], &[Selector::Index(0)]);
    assert_eq!(get(&seven, "gantry.dev/nvlink.size"), Some("7"));
    let one = listed(&dgx, &[Selector::Index(5)], &[]);
    assert_eq!(get(&one, "gantry.dev/nvlink.size"), Some("1"));
    assert_eq!(get(&one, "gantry.dev/nvlink.islands"), Some("0"));
    assert_eq!(get(&one, "gantry.dev/gpu.numa-nodes"), Some("1"));
    let cliques = of([in_clique(1), in_clique(1), in_clique(2)]);
    let rest = listed(&cliques, &[Selector::Index(2)], &[]);
    assert_eq!(get(&rest, "nvidia.com/gpu.clique"), Some("7b968a6d-c8aa-45e1-9e07-e1e51be99c31.2"));
    assert_eq!(get(&rest, "gantry.dev/fabric.clique"), Some("2"));
}

#[test]
fn gpu_counts_if_lists_allow_one_of_its_mig_devices() {
    let machine = cut(machine("dgx-a100"), |gpu| match gpu {
        0 | 1 => Some(&["1g.5gb", "1g.5gb"]),
        2 => Some(&[]),
        _ => None,
    });
    let uuid = |uuid: &str| Selector::Uuid(uuid.to_owned());
    let count = |allow: &[Selector], deny: &[Selector]| {
        let labels = listed(&machine, allow, deny);
        get(&labels, "nvidia.com/gpu.count").map(str::to_owned)
    };
    let (first, second) = (uuid("MIG-00000000"), uuid("mig-00000001"));
    assert_eq!(count(&[], std::slice::from_ref(&first)).as_deref(), Some("8"));
    assert_eq!(count(&[], &[first.clone(), second]).as_deref(), Some("7"));
    assert_eq!(count(std::slice::from_ref(&first), &[]).as_deref(), Some("1"));
    assert_eq!(
        count(&[first, Selector::Index(2)], &[]).as_deref(),
        Some("2"),
        "one that is not cut yet is named by its index"
    );
}
