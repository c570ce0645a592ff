use gantry_gang::{NodeFacts, Resources, Taint, TaintEffect};
use proptest::prelude::*;

use super::*;
use crate::answers;
use crate::fixtures::{Cluster, bound, bridged, member, plain, pod};
use gantry_planner::decide::Options;

fn report(cluster: &Cluster, name: &str) -> PodReport {
    answers::pod(&cluster.store, &["nvidia.com/gpu"], "default", name).unwrap()
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

/// A node, and the pods on it: GPUs and CPU of each, and whether it is a member of gang `g`, which needs all of its members.
#[derive(Debug, Clone)]
struct NodeCase {
    pods: Vec<(u32, i64, bool)>,
    pool: u8,
    tainted: bool,
    cordoned: bool,
    serves: bool,
}

const CPU: i64 = 64;

prop_compose! {
    fn node_case()(
        pods in prop::collection::vec((1u32..5, 0i64..40, prop::bool::weighted(0.4)), 0..4),
        pool in 0u8..2,
        tainted in prop::bool::weighted(0.15),
        cordoned in prop::bool::weighted(0.1),
        serves in prop::bool::weighted(0.85),
    ) -> NodeCase {
        let mut left = (8, CPU);
        let pods = pods.into_iter().filter(|(gpus, cpu, _)| {
            let fits = *gpus <= left.0 && *cpu <= left.1;
            left = if fits { (left.0 - gpus, left.1 - cpu) } else { left };
            fits
        });
        NodeCase { pods: pods.collect(), pool, tainted, cordoned, serves }
    }
}

impl NodeCase {
    /// GPUs and CPU left once some pods have ended.
    fn left(&self, ended: &[usize]) -> (u32, i64) {
        let pods = self.pods.iter().enumerate().filter(|(number, _)| !ended.contains(number));
        pods.fold((8, CPU), |(gpus, cpu), (_, pod)| (gpus - pod.0, cpu - pod.1))
    }

    fn members(&self) -> impl Iterator<Item = usize> {
        self.pods.iter().enumerate().filter(|(_, pod)| pod.2).map(|(number, _)| number)
    }

    fn build(&self, cluster: &Cluster, name: &str, members: u32) {
        cluster.add(name, &plain(8));
        let facts = NodeFacts {
            name: name.into(),
            labels: [("pool".into(), self.pool.to_string().into())].into(),
            allocatable: Resources {
                milli_cpu: CPU * 1000,
                memory: 1 << 40,
                pods: 110,
                ..Resources::default()
            },
            unschedulable: self.cordoned,
            taints: match self.tainted {
                true => {
                    vec![Taint { key: "dedicated".into(), value: "".into(), effect: TaintEffect::NoSchedule }]
                }
                false => Vec::new(),
            },
        };
        cluster.store.update(|index| index.node_described(facts.into()));
        if !self.serves {
            let mut node = crate::fixtures::gpu_node(name, &plain(8));
            node["status"]["conditions"] = serde_json::json!([{
                "type": "Ready", "status": "False", "reason": "NotRegistered", "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }]);
            cluster.inventory(&node);
        }
        let mut first = 0;
        for (number, (gpus, cpu, is_member)) in self.pods.iter().enumerate() {
            let pod_name = format!("{name}-{number}");
            let mut pod = asking(&pod_name, *gpus, *cpu);
            if *is_member {
                pod["metadata"]["annotations"] =
                    member(&pod_name, *gpus, "g", members)["metadata"]["annotations"].clone();
            }
            pod["spec"]["nodeName"] = name.into();
            let devices = format!("{first}-{}", first + gpus - 1);
            let annotations = pod["metadata"]["annotations"].clone();
            let mut pod = bound(pod, name, u32::try_from(number).unwrap() + 1, Some(&devices));
            if let (Some(all), Some(of_gang)) =
                (pod["metadata"]["annotations"].as_object_mut(), annotations.as_object())
            {
                all.extend(of_gang.clone());
            }
            cluster.pod(&pod);
            first += gpus;
        }
    }
}

fn asking(name: &str, gpus: u32, cpu: i64) -> serde_json::Value {
    let mut pod = pod(name, gpus);
    pod["spec"]["containers"][0]["resources"]["requests"] = serde_json::json!({"cpu": cpu.to_string()});
    pod
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Held against a judge: labels and taints first, then the plugin, devices, CPU; pods that would have to end suffice,
    /// each of them is needed, none is named where no end of pods helps, and members of a gang only with all others: the
    /// devices of one that ends stay reserved.
    #[test]
    fn pod_report_states_only_what_is_true(
        nodes in prop::collection::vec(node_case(), 1..4),
        gpus in 1u32..9,
        cpu in 0i64..70,
        pool in prop::option::weighted(0.4, 0u8..2),
    ) {
        let cluster = Cluster::new(Options::default());
        let numbered = nodes.iter().enumerate();
        let members: Vec<String> = numbered
            .flat_map(|(number, node)| node.members().map(move |pod| format!("default/n{number}-{pod}")))
            .collect();
        for (number, node) in nodes.iter().enumerate() {
            node.build(&cluster, &format!("n{number}"), u32::try_from(members.len()).unwrap());
        }
        let mut waits = asking("waits", gpus, cpu);
        if let Some(pool) = pool {
            waits["spec"]["nodeSelector"] = serde_json::json!({"pool": pool.to_string()});
        }
        cluster.pod(&waits);
        let report = report(&cluster, "waits");
        prop_assert_eq!(report.nodes.len(), nodes.len());
        for found in &report.nodes {
            let node = &nodes[found.node.as_str()[1..].parse::<usize>().unwrap()];
            let is_ruled_out = node.cordoned || node.tainted || pool.is_some_and(|pool| pool != node.pool);
            let (free, left) = node.left(&[]);
            prop_assert_eq!(found.lacks.is_some(), found.lack.is_some());
            match &found.lack {
                Some(lack) if lack.is_misfit() => prop_assert!(is_ruled_out),
                _ if is_ruled_out => prop_assert!(false, "{:?}", found),
                Some(FitFailure::PluginNotReady { reason }) => {
                    prop_assert!(!node.serves);
                    prop_assert_eq!(&**reason, "NotRegistered");
                }
                Some(FitFailure::Devices { free: stated, reserved, asked, .. }) => {
                    prop_assert_eq!((*stated, *reserved, *asked), (free as usize, 0, gpus));
                    prop_assert!(node.serves && free < gpus);
                }
                Some(FitFailure::Resource { .. }) => prop_assert!(node.serves && free >= gpus && left < cpu),
                None => prop_assert!(node.serves && free >= gpus && left >= cpu),
                other => prop_assert!(false, "{:?}", other),
            }
            let fits = |ended: &[usize]| {
                let (free, left) = node.left(ended);
                free >= gpus && left >= cpu
            };
            let named = |pod: &String| found.would_have_to_end.contains(pod);
            prop_assert!(members.iter().all(named) || !members.iter().any(named), "{:?}", found);
            let here = format!("default/{}-", found.node);
            let number = |pod: &String| pod.strip_prefix(&here).map(|number| number.parse::<usize>().unwrap());
            let ended: Vec<usize> = found.would_have_to_end.iter().filter_map(number).collect();
            let all: Vec<usize> = (0..node.pods.len()).collect();
            let helps = found.lack.is_some() && !is_ruled_out && node.serves && fits(&all);
            prop_assert_eq!(!ended.is_empty(), helps, "{:?}", found);
            if helps {
                prop_assert!(fits(&ended));
                for spared in &ended {
                    let is_spared =
                        |pod: &usize| pod == spared || node.pods[*pod].2 && node.pods[*spared].2;
                    let others: Vec<usize> = ended.iter().copied().filter(|pod| !is_spared(pod)).collect();
                    prop_assert!(!fits(&others), "{} need not end: {:?}", spared, found);
                }
            }
        }
    }
}
