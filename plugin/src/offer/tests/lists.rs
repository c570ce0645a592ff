//! The allow and deny lists.

use super::super::*;
use super::{cut, excluded, expect, model, offered, problems, whole, with};
use gantry_config::{MigStrategy, Selector};

#[test]
fn lists_match_models_in_any_case() {
    let boards = [whole(), model("NVIDIA T4"), cut(&["1g.5gb", "1g.5gb"])];
    let config = Config {
        deny: vec![Selector::Model("nvidia t4*".to_owned()), Selector::Uuid("MIG-21".to_owned())],
        ..with(MigStrategy::Mixed)
    };
    assert_eq!(
        offered(&boards, &config),
        expect(&[("nvidia.com/gpu", &["GPU-0"]), ("nvidia.com/mig-1g.5gb", &["MIG-20"])])
    );
}

#[test]
fn allow_and_deny_lists_select_gpus() {
    let boards = [whole(), whole(), model("NVIDIA T4"), cut(&["1g.5gb", "1g.5gb"])];
    let config = Config {
        allow: vec![Selector::Model("*A100*".to_owned()), Selector::Index(2), Selector::Index(9)],
        deny: vec![Selector::BusId("0000:01:00.0".parse().unwrap()), Selector::Uuid("MIG-31".to_owned())],
        ..with(MigStrategy::Mixed)
    };
    assert_eq!(
        offered(&boards, &config),
        expect(&[("nvidia.com/gpu", &["GPU-0", "GPU-2"]), ("nvidia.com/mig-1g.5gb", &["MIG-30"])])
    );
    insta::assert_debug_snapshot!((excluded(&boards, &config), problems(&boards, &config)));
}
