//! No kind and no UUID from a driver gives a CDI name that a runtime would refuse.

use proptest::prelude::*;

use super::entry::cdi::names;

/// Kinds, almost kinds, and arbitrary text.
fn kind() -> impl Strategy<Value = String> {
    prop_oneof![
        "[a-z]([a-z.-]{0,6}[a-z0-9])?/[a-z]([a-z_-]{0,6}[a-z0-9])?",
        "[a-z./_=-]{0,12}",
        prop::sample::select(vec!["a.com/gds", "imex-channel/gpu", "a/b/c", "a=b/c", "gpu"])
            .prop_map(str::to_owned),
        any::<String>(),
    ]
}

/// UUIDs, other device names, and arbitrary text.
fn uuid() -> impl Strategy<Value = String> {
    prop_oneof![
        "(GPU|MIG-GPU)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}(/[0-9]/[0-9])?",
        prop::sample::select(vec!["all", "", "0", "GPU-2", "1:0", "GPU-2/1/0", "-", ",", "::"])
            .prop_map(str::to_owned),
        any::<String>(),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

    #[test]
    fn any_kind_and_uuid_give_valid_cdi_names(kind in kind(), uuid in uuid()) {
        names(&kind, &uuid);
    }
}
