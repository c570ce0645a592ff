//! From pods as JobSet leaves them to gangs: a JobSet that starts its jobs in order is a gang for each of them, as soon as that is known.

#![allow(clippy::unwrap_used, reason = "a test that cannot be told is a test that fails")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use gantry_gang::integrations::{self, PodView};
use gantry_gang::protocol::{GangEvent, Gangs, Member, Moment, Settings, ShapeId, Stage, WatchedOwner};
use gantry_gang::{OwnerKind, OwnerRef};
use serde_json::json;

fn member(job: &str, index: u32) -> Member {
    let labels: BTreeMap<String, String> = [
        ("jobset.sigs.k8s.io/jobset-name", "train".to_owned()),
        ("jobset.sigs.k8s.io/jobset-uid", "u".to_owned()),
        ("jobset.sigs.k8s.io/restart-attempt", "0".to_owned()),
        ("jobset.sigs.k8s.io/replicatedjob-name", job.to_owned()),
        ("batch.kubernetes.io/job-completion-index", index.to_string()),
    ]
    .map(|(name, text)| (name.to_owned(), text))
    .into();
    let name = format!("train-{job}-0-{index}");
    let membership = integrations::membership(&PodView {
        namespace: "ml",
        name: &name,
        uid: &name,
        labels: Some(&labels),
        ..PodView::default()
    });
    Member {
        uid: name.as_str().into(),
        name: name.as_str().into(),
        membership: Arc::new(membership.unwrap()),
        shape: Some(ShapeId(0)),
        asks: [("nvidia.com/gpu".into(), 1)].into(),
        priority: 0,
        created: 0,
        stage: Stage::Pending,
        leaving: false,
        preempted: false,
        refused: false,
        rejected: None,
        elsewhere: None,
        preempts: true,
        holds: Default::default(),
    }
}

fn job_set(order: &str) -> (OwnerRef, serde_json::Value) {
    let owner =
        OwnerRef { kind: OwnerKind::JobSet, namespace: "ml".into(), name: "train".into(), part: "".into() };
    let object = json!({"metadata": {"name": "train"}, "spec": {
        "startupPolicy": {"startupPolicyOrder": order},
        "replicatedJobs": [
            {"name": "driver", "template": {"spec": {}}},
            {"name": "workers", "template": {"spec": {"parallelism": 2, "completions": 2}}},
        ],
    }});
    (owner, object)
}

/// Gangs with their minimums and how many members each has.
fn gangs(order: &str, known_first: bool) -> Vec<(String, u32, usize)> {
    let now = Moment { at: Instant::now(), unix: 0 };
    let mut gangs = Gangs::new(Settings::default());
    gangs.handle(now, GangEvent::Synced);
    let (owner, object) = job_set(order);
    let facts = Arc::new(integrations::read(owner.kind, &owner.part, &object));
    gangs.handle(now, GangEvent::MemberSeen(member("driver", 0)));
    if known_first {
        gangs.handle(now, GangEvent::OwnerSeen { owner: &owner, facts: Some(facts.clone()) });
    }
    gangs.handle(now, GangEvent::MemberSeen(member("workers", 0)));
    gangs.handle(now, GangEvent::MemberSeen(member("workers", 1)));
    let wanted = WatchedOwner { owner: owner.clone(), unread: !known_first };
    assert_eq!(gangs.watched_owners(), [wanted]);
    if !known_first {
        gangs.handle(now, GangEvent::OwnerSeen { owner: &owner, facts: Some(facts) });
    }
    let mut found: Vec<_> = gangs
        .views()
        .map(|view| {
            (view.key().name.to_string(), view.terms().map_or(0, |terms| terms.min), view.members().count())
        })
        .collect();
    found.sort();
    found
}

#[test]
fn job_set_started_in_order_has_one_gang_per_job() {
    for known_first in [true, false] {
        let expected = [("train/driver".to_owned(), 1, 1), ("train/workers".to_owned(), 2, 2)];
        assert_eq!(gangs("InOrder", known_first), expected, "known first: {known_first}");
    }
}

#[test]
fn a_job_set_that_starts_at_once_is_one_gang() {
    for known_first in [true, false] {
        assert_eq!(
            gangs("AnyOrder", known_first),
            [("train".to_owned(), 3, 3)],
            "known first: {known_first}"
        );
    }
}
