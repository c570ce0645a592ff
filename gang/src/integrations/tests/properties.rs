//! Whatever anybody writes on a pod: an answer, the same every time, and short.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::super::{Controller, PodView, WorkloadRef, membership};

/// Every label and annotation that is looked at, and some that are not.
const NAMES: [&str; 45] = [
    "gantry.dev/gang",
    "gantry.dev/gang-min",
    "gantry.dev/gang-max",
    "gantry.dev/gang-slice-size",
    "gantry.dev/gang-rails",
    "gantry.dev/gang-spares",
    "gantry.dev/gang-required-rails",
    "gantry.dev/gang-required-level",
    "gantry.dev/gang-preferred-level",
    "gantry.dev/gang-repair",
    "gantry.dev/gang-rank",
    "gantry.dev/gang-arrival-seconds",
    "gantry.dev/checkpointed",
    "gantry.dev/gang-",
    "gantry.dev/Gang",
    "gantry.dev/min-member",
    "gantry.dev/",
    "scheduling.x-k8s.io/pod-group",
    "pod-group.scheduling.sigs.k8s.io",
    "pod-group.scheduling.sigs.k8s.io/name",
    "pod-group.scheduling.sigs.k8s.io/min-available",
    "scheduling.volcano.sh/group-name",
    "scheduling.volcano.sh/group-min-member",
    "volcano.sh/task-index",
    "gang.scheduling.koordinator.sh/name",
    "gang.scheduling.koordinator.sh/min-available",
    "gang.scheduling.koordinator.sh/total-number",
    "gang.scheduling.koordinator.sh/waiting-time",
    "kueue.x-k8s.io/pod-group-name",
    "kueue.x-k8s.io/pod-group-total-count",
    "kueue.x-k8s.io/podset-slice-required-topology",
    "kueue.x-k8s.io/podset-slice-size",
    "pod-group-name",
    "leaderworkerset.sigs.k8s.io/name",
    "leaderworkerset.sigs.k8s.io/group-index",
    "leaderworkerset.sigs.k8s.io/worker-index",
    "leaderworkerset.sigs.k8s.io/size",
    "leaderworkerset.sigs.k8s.io/exclusive-topology",
    "jobset.sigs.k8s.io/jobset-name",
    "jobset.sigs.k8s.io/replicatedjob-name",
    "jobset.sigs.k8s.io/job-global-index",
    "alpha.jobset.sigs.k8s.io/exclusive-topology",
    "batch.kubernetes.io/job-completion-index",
    "training.kubeflow.org/job-name",
    "ray.io/cluster",
];

fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<String>(),
        "[ -~]{0,300}",
        "[a-z0-9.-]{1,300}",
        (0..9_999_999_999_u64).prop_map(|number| number.to_string()),
        prop::sample::select(vec![
            "",
            "all",
            "none",
            "true",
            "hold",
            "1h",
            "1.5.5s",
            "1e9h",
            "9999999999999h",
            "µ",
            "rack"
        ])
        .prop_map(str::to_owned),
    ]
}

fn words() -> impl Strategy<Value = BTreeMap<String, String>> {
    prop::collection::btree_map(prop::sample::select(NAMES.to_vec()).prop_map(str::to_owned), text(), 0..12)
}

proptest! {
    #[test]
    fn any_words_on_a_pod_give_an_answer_that_is_short_and_stays(
        labels in words(), annotations in words(), name in any::<String>(), group in proptest::option::of(any::<String>()),
        kind in prop::sample::select(vec!["Job", "PyTorchJob", "RayCluster", "StatefulSet", "X"]),
        version in prop::sample::select(vec!["batch/v1", "kubeflow.org/v1", "ray.io/v1", "apps/v1"]),
    ) {
        let pod = PodView {
            namespace: "ml",
            name: &name,
            uid: "u",
            labels: Some(&labels),
            annotations: Some(&annotations),
            controller: Some(Controller { api_version: version, kind, name: &name, uid: "c" }),
            scheduling_group: group.as_deref(),
            workload: group.as_deref().map(|name| WorkloadRef { name, pod_group: name, replica_key: Some(name) }),
        };
        let said = membership(&pod);
        prop_assert_eq!(&said, &membership(&pod));
        if let Some(said) = said {
            for fault in &said.faults {
                prop_assert!(fault.to_string().len() < 700, "{}", fault);
            }
            let texts = [&said.key.name, &said.key.incarnation, &said.role];
            prop_assert!(texts.iter().all(|text| text.len() < 700), "{:?}", said);
            if let Some(owner) = &said.owner {
                let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
                prop_assert!(owner.name.len() <= 253 && owner.name.chars().all(plain), "{:?}", owner);
            }
            prop_assert!(!said.also.contains(&said.key.integration));
        }
    }
}
