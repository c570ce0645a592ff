//! What people say with our own annotations, and what is wrong with it.

use std::time::Duration;

use serde_json::{Value, json};

use super::*;
use crate::terms::{Rails, Repair, TopologyRequest};

fn plain(annotations: Value) -> Option<Membership> {
    let mut pod = json!({"metadata": {"name": "train-7", "uid": "u7"}});
    pod["metadata"]["annotations"] = annotations;
    claimed(&pod)
}

#[test]
fn plain_pods_name_their_gang_and_all_they_wish_of_it() {
    let membership = plain(json!({
        "gantry.dev/gang": "train",
        "gantry.dev/gang-min": "8",
        "gantry.dev/gang-max": "12",
        "gantry.dev/gang-required-level": "rack",
        "gantry.dev/gang-slice-size": "4",
        "gantry.dev/gang-repair": "restart",
        "gantry.dev/gang-arrival-seconds": "90",
        "gantry.dev/gang-rank": "3",
        "gantry.dev/checkpointed": "true",
    }))
    .unwrap();
    assert_eq!(gang(&membership), (Integration::Annotation, "train", ""));
    assert_eq!((membership.size, membership.rank), (stated(8, None), Some(3)));
    assert_eq!(membership.size_source, "annotation gantry.dev/gang-min");
    let options = &membership.options;
    assert_eq!((options.max, options.slice, options.repair), (Some(12), Some(4), Some(Repair::Restart)));
    let arrival = options.arrival.map(|arrival| arrival.time);
    assert_eq!((arrival, options.checkpointed), (Some(Duration::from_secs(90)), Some(true)));
    assert_eq!(options.level, Some(TopologyRequest { level: "rack".into(), required: true }));
    assert!(faults(&membership).is_empty());
}

#[test]
fn quotes_that_are_part_of_a_value_are_shown_as_they_stand() {
    let min = |text: &str| {
        let membership = plain(json!({"gantry.dev/gang": "train", "gantry.dev/gang-min": text})).unwrap();
        faults(&membership).join("\n")
    };
    // A value with both kinds of quotes has no other form than the third.
    let values = ["\"3\"", "'3'", "'3\"", "3\n\"", "5000000000"];
    insta::assert_snapshot!(values.map(min).join("\n"), @r#"
    annotation gantry.dev/gang-min: '"3"' is no whole number from 1 to 20000, or `all` where the owner says how many there are
    annotation gantry.dev/gang-min: "'3'" is no whole number from 1 to 20000, or `all` where the owner says how many there are
    annotation gantry.dev/gang-min: "'3\"" is no whole number from 1 to 20000, or `all` where the owner says how many there are
    annotation gantry.dev/gang-min: '3\n"' is no whole number from 1 to 20000, or `all` where the owner says how many there are
    annotation gantry.dev/gang-min: "5000000000" is no whole number from 1 to 20000, or `all` where the owner says how many there are
    "#);
}

#[test]
fn a_plain_pods_ordinal_is_its_rank() {
    assert_eq!(plain(json!({"gantry.dev/gang": "train"})).unwrap().rank, Some(7));
    let made = json!({"metadata": {"name": "train-77777", "annotations": {"gantry.dev/gang": "train"},
        "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "train", "uid": "r", "controller": true}]}});
    assert_eq!(claimed(&made).unwrap().rank, None, "a hash is no ordinal");
}

#[test]
fn every_mistake_is_named_with_what_is_allowed() {
    let membership = plain(json!({
        "gantry.dev/gang": "Train_1",
        "gantry.dev/gang-min": "0",
        "gantry.dev/gang-max": "+4",
        "gantry.dev/gang-required-level": "",
        "gantry.dev/gang-preferred-level": "rack",
        "gantry.dev/gang-repair": "restrat",
        "gantry.dev/gang-arrival-seconds": "1h",
        "gantry.dev/gang-rank": "-1",
        "gantry.dev/gang-slice-size": "99999999999999999999",
        "gantry.dev/checkpointed": "yes",
    }))
    .unwrap();
    insta::assert_snapshot!(faults(&membership).join("\n"), @r#"
    annotation gantry.dev/checkpointed: "yes" is none of true, false
    annotation gantry.dev/gang: "Train_1" is no name of a gang: at most 63 small letters, digits, `-` and `.`, a letter or digit at both ends of each part between dots; or `none`
    annotation gantry.dev/gang-arrival-seconds: "1h" is no whole number from 1 to 3600
    annotation gantry.dev/gang-max: "+4" is no whole number from 1 to 20000
    annotation gantry.dev/gang-min: "0" is no whole number from 1 to 20000, or `all` where the owner says how many there are
    annotation gantry.dev/gang-rank: "-1" is no whole number from 0 to 100000
    annotation gantry.dev/gang-repair: "restrat" is none of hold, restart, ignore; did you mean `restart`?
    annotation gantry.dev/gang-required-level: "" is neither the name of a level nor a node label
    annotation gantry.dev/gang-required-level: gantry.dev/gang-preferred-level is given too: a gang has one level; remove one of the two
    annotation gantry.dev/gang-slice-size: "99999999999999999999" is no whole number from 1 to 20000
    "#);
}

#[test]
fn spares_are_a_number_within_bounds() {
    let read = |text: &str| {
        let membership = plain(json!({"gantry.dev/gang": "train", "gantry.dev/gang-spares": text})).unwrap();
        (membership.options.spares, faults(&membership).join("; "))
    };
    assert_eq!(read("0"), (Some(0), String::new()));
    assert_eq!(read("64"), (Some(64), String::new()));
    insta::assert_snapshot!(read("65").1, @r#"annotation gantry.dev/gang-spares: "65" is no whole number from 0 to 64"#);
    insta::assert_snapshot!(read("one").1, @r#"annotation gantry.dev/gang-spares: "one" is no whole number from 0 to 64"#);
}

#[test]
fn rails_are_preferred_required_or_any() {
    let read = |annotations: &[(&str, &str)]| {
        let mut all = json!({"gantry.dev/gang": "train"});
        for (name, text) in annotations {
            all[format!("gantry.dev/gang-{name}")] = (*text).into();
        }
        let membership = plain(all).unwrap();
        (membership.options.rails, faults(&membership).join("; "))
    };
    let valid = |rails| (Some(rails), String::new());
    assert_eq!(read(&[("rails", "same")]), valid(Rails::Same));
    assert_eq!(read(&[("rails", "any")]), valid(Rails::Any));
    assert_eq!(read(&[("required-rails", "same")]), valid(Rails::RequireSame));
    assert_eq!(read(&[("required-rails", "any"), ("rails", "same")]), valid(Rails::Same));
    assert_eq!(read(&[("required-rails", "any")]), (None, String::new()));
    insta::assert_snapshot!(read(&[("rails", "smae")]).1, @r#"annotation gantry.dev/gang-rails: "smae" is none of same, any; did you mean `same`?"#);
    insta::assert_snapshot!(read(&[("rails", "any"), ("required-rails", "same")]).1, @"annotation gantry.dev/gang-rails: `any` contradicts gantry.dev/gang-required-rails, which is `same`; remove one of the two");
}

#[test]
fn gang_name_parts_start_and_end_with_letter_or_digit() {
    let fault = |name| faults(&plain(json!({"gantry.dev/gang": name})).unwrap()).join("; ");
    insta::assert_snapshot!(["a..b", "a.-b", "a-.b", "a.", ".a", "-a", "a-"].map(fault).join("\n"), @r#"
    annotation gantry.dev/gang: "a..b" is no name of a gang: at most 63 small letters, digits, `-` and `.`, a letter or digit at both ends of each part between dots; or `none`
    annotation gantry.dev/gang: "a.-b" is no name of a gang: at most 63 small letters, digits, `-` and `.`, a letter or digit at both ends of each part between dots; or `none`
    annotation gantry.dev/gang: "a-.b" is no name of a gang: at most 63 small letters, digits, `-` and `.`, a letter or digit at both ends of each part between dots; or `none`
    annotation gantry.dev/gang: "a." is no name of a gang: at most 63 small letters, digits, `-` and `.`, a letter or digit at both ends of each part between dots; or `none`
    annotation gantry.dev/gang: ".a" is no name of a gang: at most 63 small letters, digits, `-` and `.`, a letter or digit at both ends of each part between dots; or `none`
    annotation gantry.dev/gang: "-a" is no name of a gang: at most 63 small letters, digits, `-` and `.`, a letter or digit at both ends of each part between dots; or `none`
    annotation gantry.dev/gang: "a-" is no name of a gang: at most 63 small letters, digits, `-` and `.`, a letter or digit at both ends of each part between dots; or `none`
    "#);
    for name in ["a", "a.b", "a-b.c--d", "0"] {
        assert_eq!(faults(&plain(json!({"gantry.dev/gang": name})).unwrap()), [""; 0], "{name}");
    }
}

#[test]
fn a_long_value_is_cut_and_line_breaks_are_shown() {
    let membership =
        plain(json!({"gantry.dev/gang": "train", "gantry.dev/gang-repair": "x\n".repeat(500)})).unwrap();
    let words = faults(&membership).join("");
    assert!(words.len() < 300 && !words.contains('\n'), "{words}");
}

fn none_with(more: &str, text: &str) -> Option<Membership> {
    claimed(&json!({"metadata": {
        "name": "train-7",
        "uid": "u7",
        "labels": {"scheduling.x-k8s.io/pod-group": "train"},
        "annotations": {"gantry.dev/gang": "none", more: text},
    }}))
}

#[test]
fn none_keeps_a_pod_out_of_any_gang() {
    for more in ["other", "gantry.dev/checkpointed"] {
        assert_eq!(none_with(more, "true"), None);
    }
}

#[test]
fn none_and_a_word_about_the_gang_contradict_each_other() {
    for more in ["gantry.dev/gang-min", "gantry.dev/gang-repair"] {
        for text in ["nonsense", "all"] {
            assert_eq!(none_with(more, text).unwrap().faults.len(), 1, "{more}: {text}");
        }
        let membership = none_with(more, "4").unwrap();
        assert_eq!(
            gang(&membership),
            (Integration::Annotation, "train-7", "u7"),
            "of no other gang, and waits"
        );
        assert!(membership.also.is_empty() && membership.owner.is_none());
        assert_eq!(
            faults(&membership),
            [format!(
                "annotation gantry.dev/gang: `none` keeps the pod out of every gang, and {more} only makes sense on a pod of a gang: remove one of the two"
            )]
        );
    }
}

#[test]
fn gang_annotation_without_gang_name_is_a_fault_not_ignored() {
    // An annotation that has a meaning only in a gang makes the pod a gang of its own, which waits. It is not
    // ignored.
    for (name, text) in [("gantry.dev/gang-min", "4"), ("gantry.dev/gang-repair", "hold")] {
        let membership = plain(json!({name: text})).unwrap();
        assert_eq!(
            gang(&membership),
            (Integration::Annotation, "train-7", "u7"),
            "a gang of its own, that waits"
        );
        assert!(!membership.faults.is_empty(), "{name}");
    }
    assert_eq!(plain(json!({"gantry.dev/grant": "{}"})), None);
}

#[test]
fn a_persons_number_goes_before_that_of_any_convention() {
    let kueue = |annotations: Value| {
        claimed(&json!({"metadata": {"labels": {"kueue.x-k8s.io/pod-group-name": "sample"}, "annotations": annotations}})).unwrap()
    };
    let total = "kueue.x-k8s.io/pod-group-total-count";
    let fewer = kueue(json!({total: "8", "gantry.dev/gang-min": "6"}));
    assert_eq!((gang(&fewer).0, fewer.size), (Integration::Kueue, stated(6, Some(8))));
    assert_eq!(fewer.size_source, "annotation gantry.dev/gang-min");
    let all = kueue(json!({total: "8", "gantry.dev/gang-min": "all"}));
    assert_eq!(all.size, stated(8, Some(8)));
}

#[test]
fn pod_group_gives_the_minimum_and_job_the_total() {
    let pod = |kind: &str, api: &str, more: Value| {
        let mut pod = json!({"metadata": {
            "labels": {"scheduling.x-k8s.io/pod-group": "pg"},
            "annotations": {"gantry.dev/gang-min": "all"},
            "ownerReferences": [{"apiVersion": api, "kind": kind, "name": "j", "uid": "u1", "controller": true}],
        }});
        for (name, text) in more.as_object().into_iter().flatten() {
            pod["metadata"]["labels"][name] = text.clone();
        }
        claimed(&pod).unwrap()
    };
    let job = pod("Job", "batch/v1", json!({}));
    assert_eq!(gang(&job), (Integration::Coscheduling, "pg", ""));
    assert_eq!((job.size, job.owner), (Size::All, owner(OwnerKind::Job, "j", "")));
    let torch = pod(
        "PyTorchJob",
        "kubeflow.org/v1",
        json!({"training.kubeflow.org/job-name": "j", "training.kubeflow.org/replica-type": "worker"}),
    );
    assert_eq!(torch.owner, owner(OwnerKind::PyTorchJob, "j", ""));
    assert_eq!(&*torch.role, "worker", "it says how many of each role there are");
    // Nobody else says it: the PodGroup is asked.
    let workflow = pod("Workflow", "argoproj.io/v1alpha1", json!({}));
    assert_eq!(workflow.owner, owner(OwnerKind::CoschedulingPodGroup, "pg", ""));
    // What Kubernetes makes for a Job that says nothing itself.
    let basic = json!({
        "metadata": {
            "annotations": {"gantry.dev/gang-min": "all"},
            "ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "u1", "controller": true}],
        },
        "spec": {"schedulingGroup": {"podGroupName": "j-x2"}},
    });
    let basic = claimed(&basic).unwrap();
    assert_eq!((basic.size, basic.owner), (Size::All, owner(OwnerKind::Job, "j", "")));
}

#[test]
fn all_needs_somebody_who_says_how_many_there_are() {
    let alone = plain(json!({"gantry.dev/gang": "train", "gantry.dev/gang-min": "all"})).unwrap();
    assert_eq!(
        faults(&alone),
        [
            "annotation gantry.dev/gang-min: `all` needs an owner that says how many there are, such as a Job or a JobSet; write a number"
        ]
    );
    let of_job_set = claimed(&json!({"metadata": {
        "labels": {"jobset.sigs.k8s.io/jobset-name": "js"},
        "annotations": {"gantry.dev/gang": "train", "gantry.dev/gang-min": "all"},
    }}))
    .unwrap();
    assert_eq!(gang(&of_job_set).1, "train");
    assert_eq!((of_job_set.size, of_job_set.owner), (Size::All, owner(OwnerKind::JobSet, "js", "")));
}

#[test]
fn every_annotation_and_convention_is_documented() {
    let page = include_str!("../../../../docs/gangs.md");
    for name in super::super::own::KNOWN {
        assert!(page.contains(&format!("| `{name}` |")), "{name}");
    }
    let page = include_str!("../../../../docs/gangs-recognition.md");
    for kind in
        ["Job", "PyTorchJob", "TFJob", "MPIJob", "XGBoostJob", "PaddleJob", "JAXJob", "RayCluster", "JobSet"]
    {
        assert!(page.contains(kind), "{kind}");
    }
}

#[test]
fn a_gang_by_a_mere_name_remembers_which_job_made_the_pod() {
    let made = |labels: Value, kind: &str, api: &str| {
        let pod = json!({"metadata": {
            "labels": labels,
            "annotations": {"gantry.dev/gang": "train", "gantry.dev/gang-min": "4"},
            "ownerReferences": [{"apiVersion": api, "kind": kind, "name": "train-a", "uid": "u1", "controller": true}],
        }});
        let membership = claimed(&pod).unwrap();
        assert_eq!(gang(&membership), (Integration::Annotation, "train", ""));
        membership.maker.map(|maker| format!("{maker} {}", maker.uid))
    };
    assert_eq!(made(json!({}), "Job", "batch/v1").as_deref(), Some("Job train-a u1"));
    // Of a JobSet the jobs are parts, and so are its roles and its restarts.
    let of_set = json!({
        "jobset.sigs.k8s.io/jobset-name": "js", "jobset.sigs.k8s.io/jobset-uid": "u9",
        "jobset.sigs.k8s.io/restart-attempt": "2", "jobset.sigs.k8s.io/replicatedjob-name": "workers",
    });
    assert_eq!(made(of_set, "Job", "batch/v1").as_deref(), Some("JobSet js u9"));
    let torch = json!({"training.kubeflow.org/job-name": "pt"});
    let torch = made(torch, "PyTorchJob", "kubeflow.org/v1");
    assert_eq!(torch.as_deref(), Some("PyTorchJob pt u1"));
    let set = made(json!({}), "StatefulSet", "apps/v1");
    assert_eq!(set.as_deref(), Some("StatefulSet train-a u1"));
    // Each group of a LeaderWorkerSet has one of its own.
    for revision in ["", "7c9d"] {
        let group = json!({
            "leaderworkerset.sigs.k8s.io/name": "llama", "leaderworkerset.sigs.k8s.io/group-index": "1",
            "leaderworkerset.sigs.k8s.io/template-revision-hash": revision,
        });
        assert_eq!(made(group, "StatefulSet", "apps/v1"), None, "{revision}");
    }
    // What goes on for ever makes its pods by something new at every rollout.
    assert_eq!(made(json!({}), "ReplicaSet", "apps/v1"), None);
    // Where an object is the gang, whoever made the pods belongs to it.
    let by_object = json!({"metadata": {
        "labels": {"scheduling.x-k8s.io/pod-group": "train"},
        "ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": "train-a", "uid": "u1", "controller": true}],
    }});
    assert_eq!(claimed(&by_object).unwrap().maker, None);
}

#[test]
fn controller_uid_distinguishes_otherwise_equal_incarnations() {
    // The UID of the controller is read where no other field distinguishes this incarnation from the next.
    let made_by = |metadata: Value| {
        let membership = claimed(&json!({"metadata": metadata})).unwrap();
        membership.made_by.map(|uid| uid.to_string())
    };
    let by = |kind: &str, api: &str| json!([{"apiVersion": api, "kind": kind, "name": "j", "uid": "u1", "controller": true}]);
    let group = json!({"scheduling.x-k8s.io/pod-group": "train"});
    let name = json!({"gantry.dev/gang": "train"});
    assert_eq!(
        made_by(json!({"labels": group, "ownerReferences": by("Job", "batch/v1")})),
        Some("u1".to_owned())
    );
    assert_eq!(
        made_by(json!({"annotations": name, "ownerReferences": by("Workflow", "argoproj.io/v1alpha1")})),
        Some("u1".to_owned())
    );
    assert_eq!(made_by(json!({"labels": group})), None);
    // The Jobs of a JobSet are parts of one whole.
    let of_set = json!({
        "scheduling.x-k8s.io/pod-group": "train", "jobset.sigs.k8s.io/jobset-name": "js", "jobset.sigs.k8s.io/jobset-uid": "u9",
    });
    assert_eq!(
        made_by(json!({"labels": of_set, "ownerReferences": by("Job", "batch/v1")})),
        Some("u9".to_owned())
    );
    // A Job that is the gang is told from the next one by that.
    let asks = json!({"gantry.dev/gang-min": "2"});
    assert_eq!(made_by(json!({"annotations": asks, "ownerReferences": by("Job", "batch/v1")})), None);
    // The launcher of an MPIJob does not know the whole.
    let launcher =
        json!({"training.kubeflow.org/job-name": "mpi", "training.kubeflow.org/job-role": "launcher"});
    assert_eq!(made_by(json!({"labels": launcher, "ownerReferences": by("Job", "batch/v1")})), None);
}

fn labelled(labels: &Value, annotations: &Value) -> Option<Membership> {
    claimed(
        &json!({"metadata": {"name": "train-7", "uid": "u7", "labels": labels, "annotations": annotations}}),
    )
}

/// Misspelled names and labels are refused at admission (`manifests/guard.yaml`); a pod that has them all the same is a single pod.
#[test]
fn guard_policy_names_every_annotation_of_gangs() {
    let policy = include_str!("../../../../manifests/guard.yaml");
    for name in super::super::own::KNOWN {
        assert!(policy.contains(&format!("'{name}'")), "{name}");
    }
    let train = json!({"gantry.dev/gang": "train"});
    assert_eq!(labelled(&train, &json!({})), None, "only annotations are read");
    assert_eq!(plain(json!({"gantry.dev/gangs": "train"})), None);
}

#[test]
fn what_else_is_in_our_domain_makes_no_gang() {
    for name in ["grant", "mig", "gpu", "role", "run-for", "checkpointed", "managed-by"] {
        let words = json!({format!("gantry.dev/{name}"): "true"});
        assert_eq!(labelled(&words, &json!({})), None, "{name}");
        assert_eq!(plain(words), None, "{name}");
    }
}
