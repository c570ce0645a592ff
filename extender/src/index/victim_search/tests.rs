use super::*;
use crate::fixtures::{
    Cluster, bound, gpu_node, grant, holder, member, plain, pod, quarantined, request, set,
};
use gantry_planner::decide::Options;
use serde_json::{Value, json};

fn ranked(name: &str, gpus: u32, priority: i32, set: &str) -> Value {
    let mut pod = bound(pod(name, gpus), "n", 1, Some(set));
    pod["spec"]["priority"] = json!(priority);
    pod
}

fn uid(name: &str) -> String {
    let pod = pod(name, 1);
    pod["metadata"]["uid"].as_str().unwrap().to_owned()
}

fn offer(node: &str, victims: &[&str]) -> Offer {
    Offer {
        node: node.to_owned(),
        victims: victims.iter().map(|name| uid(name)).collect(),
        budgets_broken: 0,
    }
}

fn answer(cluster: &Cluster, gpus: u32, priority: i32, offers: Vec<Offer>) -> Vec<Offer> {
    let asks = request(gpus);
    let uid = uid("asks").into();
    cluster.store.update(|index| index.preemptable(&uid, &asks, priority, offers))
}

#[test]
fn offer_is_returned_with_victims_that_free_devices() {
    let cluster = Cluster::new(Options::default());
    cluster.add("n", &plain(4));
    cluster.pod(&ranked("low", 4, 0, "0-3"));
    let offers = vec![offer("n", &["low"])];
    assert_eq!(answer(&cluster, 2, 10, offers.clone()), offers);
}

#[test]
fn fewest_and_least_important_victims_are_chosen() {
    let cluster = Cluster::new(Options::default());
    cluster.add("n", &plain(4));
    cluster.pod(&ranked("high", 1, 50, "0"));
    cluster.pod(&ranked("low", 1, 0, "1"));
    cluster.pod(&ranked("middle", 2, 5, "2-3"));
    assert_eq!(answer(&cluster, 1, 10, vec![offer("n", &[])]), [offer("n", &["low"])]);
    assert_eq!(answer(&cluster, 2, 10, vec![offer("n", &[])]), [offer("n", &["middle"])]);
    assert_eq!(answer(&cluster, 3, 10, vec![offer("n", &[])]), [offer("n", &["middle", "low"])]);
    // Nobody of the same or a higher priority is stopped.
    assert_eq!(answer(&cluster, 4, 10, vec![offer("n", &[])]), []);
}

/// kube-scheduler compares nodes by the priority of the first victim that each is offered with.
#[test]
fn highest_priority_victim_comes_first() {
    let cluster = Cluster::new(Options::default());
    cluster.add("n", &plain(4));
    cluster.pod(&ranked("low", 2, 0, "0-1"));
    cluster.pod(&ranked("middle", 2, 5, "2-3"));
    assert_eq!(answer(&cluster, 4, 10, vec![offer("n", &["low"])]), [offer("n", &["middle", "low"])]);
}

fn budget(app: &str, allowed: i32) -> crate::index::Disruptions {
    let object = json!({
        "metadata": {"namespace": "default", "name": app},
        "spec": {"selector": {"matchLabels": {"app": app}}},
        "status": {"disruptionsAllowed": allowed, "currentHealthy": 1, "desiredHealthy": 1, "expectedPods": 1},
    });
    crate::index::Disruptions::read(&serde_json::from_value(object).unwrap())
}

/// A node of four GPUs and pods that have one each: `prot` of app `prot` and two that no budget covers.
fn protected(cluster: &Cluster, node: &str) {
    cluster.add(node, &plain(4));
    for (name, priority, gpu) in [("prot", 0, "0"), ("prot-too", 0, "1"), ("free", 5, "2"), ("last", 6, "3")]
    {
        let mut pod = bound(pod(&format!("{name}-{node}"), 1), node, 1, Some(gpu));
        pod["spec"]["priority"] = json!(priority);
        if name.starts_with("prot") {
            pod["metadata"]["labels"] = json!({"app": "prot"});
        }
        cluster.pod(&pod);
    }
}

fn breaking(node: &str, victims: &[&str], budgets_broken: i64) -> Offer {
    Offer { budgets_broken, ..offer(node, victims) }
}

#[test]
fn whom_no_budget_protects_goes_first_whatever_its_priority() {
    let cluster = Cluster::new(Options::default());
    protected(&cluster, "n");
    let tell = |budgets| cluster.store.update(|index| index.budgets_seen(budgets));
    tell(Some(vec![budget("prot", 0)]));
    let asked = |gpus| answer(&cluster, gpus, 1000, vec![offer("n", &[])]);
    assert_eq!(asked(1), [breaking("n", &["free-n"], 0)]);
    assert_eq!(asked(2), [breaking("n", &["last-n", "free-n"], 0)]);
    assert_eq!(asked(3), [breaking("n", &["last-n", "free-n", "prot-n"], 1)]);
    assert_eq!(asked(4)[0].budgets_broken, 2);
    // As many as a budget allows are not protected by it.
    tell(Some(vec![budget("prot", 1)]));
    assert_eq!(asked(1), [breaking("n", &["prot-n"], 0)]);
    assert_eq!(asked(2), [breaking("n", &["free-n", "prot-n"], 0)]);
    assert_eq!(asked(4)[0].budgets_broken, 1);
    // Whom kube-scheduler names counts against it before, and is counted by kube-scheduler.
    let named = vec![offer("n", &["prot-too-n"])];
    assert_eq!(answer(&cluster, 2, 1000, named), [breaking("n", &["free-n", "prot-too-n"], 0)]);
    // While no budgets are known every pod may be protected.
    tell(None);
    assert_eq!(asked(2), [breaking("n", &["prot-n", "prot-too-n"], 2)]);
}

#[test]
fn nodes_where_fewer_budgets_are_broken_are_offered_back_alone() {
    let cluster = Cluster::new(Options::default());
    protected(&cluster, "n");
    protected(&cluster, "other");
    cluster.store.update(|index| index.budgets_seen(Some(vec![budget("prot", 0)])));
    let offers = vec![breaking("n", &["prot-n"], 1), offer("other", &[])];
    assert_eq!(answer(&cluster, 2, 1000, offers), [breaking("other", &["last-other", "free-other"], 0)]);
}

#[test]
fn a_gang_of_which_two_pods_go_is_broken_once() {
    let cluster = Cluster::new(Options::default());
    let mut offers = Vec::new();
    for (node, gangs) in [("n", ["a", "b"]), ("m", ["c", "c"])] {
        cluster.add(node, &plain(4));
        let mut names = Vec::new();
        for (gang, gpus) in gangs.into_iter().zip(["0-1", "2-3"]) {
            let name = format!("{gang}-{gpus}");
            let mut pod = bound(member(&name, 2, gang, 1), node, 1, None);
            pod["metadata"]["annotations"][gantry_api::names::GRANT_ANNOTATION] =
                grant(&name.as_str().into(), node, set(gpus)).into();
            cluster.pod(&pod);
            names.push(name);
        }
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        offers.push(offer(node, &names));
    }
    let broken = offers[1].clone();
    assert_eq!(answer(&cluster, 4, 10, offers), [broken]);
}

#[test]
fn no_more_victims_while_devices_are_being_released() {
    let cluster = Cluster::new(Options::default());
    cluster.add("n", &plain(4));
    cluster.add("other", &plain(4));
    let victim = ranked("victim", 4, 0, "0-3");
    cluster.pod(&victim);
    let mut spared = bound(pod("spared", 4), "other", 1, Some("0-3"));
    spared["spec"]["priority"] = json!(0);
    cluster.pod(&spared);
    cluster.pod(&pod("asks", 4));
    let both = vec![offer("n", &["victim"]), offer("other", &["spared"])];
    assert_eq!(answer(&cluster, 4, 10, both.clone()), both);
    // kube-scheduler chose the first. It is gone, its processes perhaps are not, and to kube-scheduler nothing is to be
    // had there.
    cluster.gone(&victim);
    let rest = vec![offer("other", &["spared"])];
    assert_eq!(answer(&cluster, 4, 10, rest.clone()), []);
    // Once they are given back, whatever kube-scheduler then asks is answered as ever.
    cluster.wait(6);
    assert_eq!(answer(&cluster, 4, 10, rest.clone()), rest);
}

#[test]
fn node_kept_for_a_gang_has_no_victims_for_a_pod() {
    let cluster =
        Cluster::new(Options { patience: std::time::Duration::from_secs(60), ..Options::default() });
    cluster.add("n", &plain(4));
    cluster.add("other", &plain(4));
    let low = whole(&cluster, "low", "n");
    for number in 0..2 {
        let mut member = member(&format!("g-{number}"), 4, "g", 2);
        member["spec"]["priority"] = json!(10);
        member["spec"]["preemptionPolicy"] = json!("Never");
        cluster.pod(&member);
    }
    cluster.wait(2).wait(30).wait(31);
    assert_eq!(cluster.store.snapshot().kept.as_ref().unwrap().nodes().count(), 2);
    let asked = |priority| answer(&cluster, 4, priority, vec![offer("n", &["low"])]);
    // Filter lets none of no higher priority there.
    assert_eq!(asked(10), []);
    assert_eq!(asked(11), [offer("n", &["low"])]);
    cluster.add("third", &plain(4));
    whole(&cluster, "spared", "third");
    cluster.pod(&pod("asks", 4)).gone(&low);
    let asked = |priority| answer(&cluster, 4, priority, vec![offer("third", &["spared"])]);
    assert_eq!(asked(10), [offer("third", &["spared"])]);
    assert_eq!(asked(11), []);
}

#[test]
fn victim_does_not_free_devices_reserved_for_a_gang() {
    let cluster = Cluster::new(Options::default());
    cluster.add("n", &plain(4));
    cluster.pod(&ranked("half", 2, 0, "0-1"));
    cluster.pod(&ranked("rest", 2, 0, "2-3"));
    let mut member = member("g-0", 2, "g", 1);
    member["spec"]["priority"] = json!(10);
    cluster.pod(&member).wait(2);
    let view = cluster.store.read(|index| index.gang_view("default", "g")).unwrap();
    assert_eq!(view.phase, gantry_api::GangPhase::Preempting);
    let both = vec![offer("n", &["half", "rest"])];
    assert_eq!(answer(&cluster, 4, 100, both.clone()), []);
    assert_eq!(answer(&cluster, 2, 100, both.clone()), both);
}

#[test]
fn nobody_is_stopped_for_a_device_that_is_sick() {
    let cluster = Cluster::new(Options::default());
    cluster.add("n", &plain(2));
    let mut node = gpu_node("n", &plain(2));
    node["status"]["devices"][0]["healthy"] = false.into();
    cluster.inventory(&node);
    cluster.pod(&ranked("sick", 1, 0, "0"));
    cluster.pod(&ranked("sound", 1, 5, "1"));
    let asked = answer(&cluster, 1, 10, vec![offer("n", &[])]);
    assert_eq!(asked, [offer("n", &["sound"])]);
}

/// A pod that has all of a node.
fn whole(cluster: &Cluster, name: &str, node: &str) -> Value {
    let mut pod = bound(pod(name, 4), node, 1, Some("0-3"));
    pod["spec"]["priority"] = json!(0);
    cluster.pod(&pod);
    pod
}

/// A node, and another that a pod has which need not be stopped.
fn beside_spared() -> Cluster {
    let cluster = Cluster::new(Options::default());
    cluster.add("n", &plain(4));
    cluster.add("other", &plain(4));
    whole(&cluster, "spared", "other");
    cluster
}

#[test]
fn pod_waits_again_after_another_got_the_devices() {
    let cluster = beside_spared();
    cluster.pod(&pod("asks", 4));
    let rest = || vec![offer("other", &["spared"])];
    let first = whole(&cluster, "first", "n");
    cluster.gone(&first);
    assert_eq!(answer(&cluster, 4, 10, rest()), []);
    cluster.wait(6);
    let second = whole(&cluster, "second", "n");
    cluster.wait(30);
    // kube-scheduler asks again when it no longer sees the second one.
    cluster.gone(&second);
    assert_eq!(answer(&cluster, 4, 10, rest()), []);
}

#[test]
fn a_pod_does_not_wait_for_ever_for_what_others_get() {
    let cluster = beside_spared();
    cluster.pod(&pod("asks", 4));
    let rest = || vec![offer("other", &["spared"])];
    let turn = |number: usize| {
        let one = whole(&cluster, &format!("p{number}"), "n");
        cluster.gone(&one);
        let answered = answer(&cluster, 4, 10, rest());
        cluster.wait(6);
        !answered.is_empty()
    };
    let stopped: Vec<usize> = (0..22).filter(|number| turn(*number)).collect();
    // Once others are stopped for it, it waits anew for what they leave.
    assert_eq!(stopped, [10, 21]);
}

#[test]
fn leaving_victim_on_nominated_node_is_waited_for() {
    let cluster = beside_spared();
    let first = ranked("first", 2, 0, "0-1");
    let mut second = ranked("second", 2, 0, "2-3");
    second["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:30Z".into();
    cluster.pod(&first).pod(&second).gone(&first);
    let mut asks = pod("asks", 4);
    cluster.pod(&asks);
    let rest = || vec![offer("other", &["spared"])];
    // They are nobody's victims for all that is known, and may take their time.
    assert_eq!(answer(&cluster, 4, 10, rest()), rest());
    asks["status"]["nominatedNodeName"] = "n".into();
    cluster.pod(&asks);
    assert_eq!(answer(&cluster, 4, 10, rest()), []);
    cluster.gone(&second);
    assert_eq!(answer(&cluster, 4, 10, rest()), []);
}

#[test]
fn stuck_device_does_not_end_the_wait_for_victims() {
    let cluster = Cluster::new(Options::default());
    cluster.add("n", &plain(4));
    cluster.add("other", &plain(4));
    let mut node = gpu_node("n", &plain(4));
    node["status"]["holders"] = json!([quarantined(holder("n", "stuck", None, "3"))]);
    cluster.inventory(&node);
    whole(&cluster, "spared", "other");
    cluster.pod(&pod("asks", 3));
    cluster.wait(30);
    let victim = ranked("victim", 3, 0, "0-2");
    cluster.pod(&victim).gone(&victim);
    let rest = vec![offer("other", &["spared"])];
    assert_eq!(answer(&cluster, 3, 10, rest), []);
}

#[test]
fn stuck_devices_are_not_waited_for_forever() {
    let cluster = Cluster::new(Options::default());
    cluster.add("n", &plain(4));
    cluster.add("other", &plain(4));
    let mut node = gpu_node("n", &plain(4));
    node["status"]["holders"] = json!([quarantined(holder("n", "stuck", None, "0-3"))]);
    cluster.inventory(&node);
    let mut spared = bound(pod("spared", 4), "other", 1, Some("0-3"));
    spared["spec"]["priority"] = json!(0);
    cluster.pod(&spared);
    cluster.pod(&pod("asks", 4));
    let offers = vec![offer("other", &["spared"])];
    assert_eq!(answer(&cluster, 4, 10, offers.clone()), []);
    cluster.wait(11);
    assert_eq!(answer(&cluster, 4, 10, offers.clone()), offers);
}

#[test]
fn nodes_that_are_not_known_are_not_offered_back() {
    let cluster = Cluster::new(Options::default());
    cluster.add("n", &plain(4));
    assert_eq!(answer(&cluster, 1, 10, vec![offer("gone", &["low"])]), []);
}

/// Its gang would get the devices back at once, for it goes before the pod.
#[test]
fn member_of_a_more_important_gang_is_no_victim() {
    let cluster = Cluster::new(Options::default());
    cluster.add("n", &plain(4));
    for (name, priority, gpus) in [("g-0", 0, "0-1"), ("g-1", 100, "2-3")] {
        let mut member = bound(member(name, 2, "g", 2), "n", 1, None);
        member["metadata"]["annotations"][gantry_api::names::GRANT_ANNOTATION] =
            grant(&name.into(), "n", set(gpus)).into();
        member["spec"]["priority"] = json!(priority);
        cluster.pod(&member);
    }
    cluster.wait(2);
    let low = vec![offer("n", &["g-0"])];
    assert_eq!(answer(&cluster, 2, 10, low.clone()), []);
    assert_eq!(answer(&cluster, 2, 10, vec![offer("n", &[])]), []);
    assert_eq!(answer(&cluster, 2, 101, low.clone()), low);
}
