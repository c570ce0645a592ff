use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::fixtures::{Cluster, bridged};
use gantry_planner::decide::Options;

#[test]
fn index_is_unusable_after_a_panic() {
    let cluster = Cluster::new(Options::default());
    cluster.add("n", &bridged());
    let store = &cluster.store;
    let panics = |call: &dyn Fn()| catch_unwind(AssertUnwindSafe(call)).is_err();
    assert!(!store.is_broken());
    assert!(panics(&|| store.update(|_| panic!("a bug, midway"))));
    assert!(store.is_broken());
    assert!(panics(&|| store.update(|_| ())));
    assert!(panics(&|| store.read(|_| ())));
}
