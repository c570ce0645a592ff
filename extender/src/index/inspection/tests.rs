use super::*;
use crate::fixtures::{Cluster, bound, bridged, plain, pod};
use gantry_planner::decide::Options;

fn report(cluster: &Cluster, name: &str) -> PodReport {
    cluster.store.read(|index| {
        let pod = index.find_pod("default", name).unwrap();
        index.inspect(pod).unwrap()
    })
}

/// Node, what it lacks, who would have to end.
fn lines(report: &PodReport) -> Vec<(String, Option<String>, Vec<String>)> {
    let line =
        |node: &NodeReport| (node.node.to_string(), node.lacks.clone(), node.would_have_to_end.clone());
    report.nodes.iter().map(line).collect()
}

#[test]
fn waiting_pod_report_has_all_nodes_and_fewest_victims() {
    let cluster = Cluster::new(Options::default());
    cluster.add("full", &plain(8)).add("small", &plain(2)).add("busy", &plain(8));
    cluster.pod(&bound(pod("a", 1), "full", 1, Some("0")));
    cluster.pod(&bound(pod("b", 6), "full", 2, Some("1-6")));
    cluster.pod(&bound(pod("c", 1), "full", 3, Some("7")));
    cluster.pod(&bound(pod("d", 3), "busy", 4, Some("0-2")));
    cluster.pod(&bound(pod("e", 3), "busy", 5, Some("3-5")));
    cluster.pod(&pod("waits", 7));

    let report = report(&cluster, "waits");
    assert_eq!(report.asks, "7 nvidia.com/gpu");
    assert_eq!(report.bound, None);
    let words = |free: &str| Some(format!("{free} GPUs free, 7 asked"));
    assert_eq!(
        lines(&report),
        [
            ("busy".to_owned(), words("2 of 8"), vec!["default/d".to_owned(), "default/e".to_owned()]),
            ("full".to_owned(), words("0 of 8"), vec!["default/b".to_owned(), "default/a".to_owned()]),
            ("small".to_owned(), words("2 of 2"), vec![]),
        ]
    );
}

#[test]
fn nodes_where_it_fits_come_first_the_fastest_before_the_others() {
    let cluster = Cluster::new(Options::default());
    cluster.add("pcie", &plain(4)).add("bridged", &bridged());
    cluster.pod(&pod("waits", 2));

    let report = report(&cluster, "waits");
    let nodes: Vec<&str> = report.nodes.iter().map(|node| node.node.as_str()).collect();
    assert_eq!(nodes, ["bridged", "pcie"]);
    assert!(report.nodes.iter().all(|node| node.lacks.is_none()));
    assert!(report.nodes[0].bandwidth_gbs > report.nodes[1].bandwidth_gbs);
}

#[test]
fn a_bound_pod_shows_what_it_holds() {
    let cluster = Cluster::new(Options::default());
    cluster.add("n", &plain(4));
    cluster.pod(&bound(pod("a", 2), "n", 1, Some("1,3")));

    let report = report(&cluster, "a");
    assert_eq!(report.nodes, []);
    let bound = report.bound.unwrap();
    assert_eq!((bound.node.as_str(), bound.words.as_str()), ("n", "GPU 1,3"));
    assert_eq!(bound.devices.len(), 2);
}

#[test]
fn pod_report_names_another_scheduler_until_bound() {
    let cluster = Cluster::new(Options::default());
    cluster.add("n", &plain(4));
    let mut theirs = pod("a", 2);
    theirs["spec"]["schedulerName"] = "koord-scheduler".into();
    cluster.pod(&theirs).pod(&pod("ours", 2));
    let by = |name: &str| report(&cluster, name).scheduled_by;
    assert_eq!(by("a").as_deref(), Some("koord-scheduler"));
    assert_eq!(by("ours"), None);
    cluster.pod(&bound(theirs, "n", 1, Some("0-1")));
    assert_eq!(by("a"), None);
}

#[test]
fn node_report_names_the_insufficient_resource() {
    let cluster = Cluster::new(Options::default());
    cluster.add("n1", &plain(8)).add("n2", &plain(8));
    let mut hungry = pod("hungry", 4);
    hungry["spec"]["containers"][0]["resources"]["requests"] = serde_json::json!({"cpu": "100"});
    cluster.pod(&hungry);
    let mut picky = pod("picky", 4);
    picky["spec"]["nodeSelector"] = serde_json::json!({"disk": "nvme"});
    cluster.pod(&picky);
    for (name, words) in
        [("hungry", "CPU is short"), ("picky", "the pod's node selector or affinity does not match")]
    {
        let lack = |node: &str| (node.to_owned(), Some(words.to_owned()), vec![]);
        assert_eq!(lines(&report(&cluster, name)), [lack("n1"), lack("n2")]);
    }
}
