//! A cluster played at random against the index: binds with every outcome, watch events late and out of order among
//! objects, kubelet swapping sets, pods killed while their processes live on, restarts of the extender. One question at
//! every step: was a device granted that somebody has?

use std::collections::BTreeMap;
use std::time::Duration;

use gantry_topology::GpuSet;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::granted;
use crate::fixtures::{Cluster, bound, bridged, gpu_node, holder, pod, quarantined, set, target};
use crate::index::{BindGrant, Outcome, Source};
use gantry_planner::decide::Options;

const NODES: [&str; 2] = ["n0", "n1"];
/// Time goes in half seconds. Longest that a process outlives a forced deletion, and that the plugin's word lags.
const PROCESS_LIVES: u64 = 6;
const PLUGIN_LAGS: u64 = 2;
const HALF: Duration = Duration::from_millis(500);

#[derive(Debug, Clone, Copy)]
enum Step {
    /// A pod is created and bound to a node; the bind ends like this.
    Bind { node: usize, gpus: u32, ends: Ends },
    /// The watch delivers the newest state of a pod.
    Deliver(usize),
    /// The plugin writes what is true now.
    Publish(usize),
    /// A client deletes the GpuNode.
    DeleteObject(usize),
    /// The GpuNode is as the plugin wrote it last.
    RestoreObject(usize),
    /// A pod ends by itself.
    Finish(usize),
    /// A pod is deleted by force; its process lives on.
    Kill(usize),
    /// Two pods of one node have got each other's sets, and the plugin says so.
    Swap(usize, usize),
    /// Time passes.
    Wait(u64),
    /// The pod watch starts over with a list.
    Relist,
    /// The extender is killed and started.
    Restart,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Ends {
    Bound,
    Failed,
    /// No answer, but it was done.
    UnsureBound,
    /// No answer, and it was not done.
    UnsureFailed,
}

fn step() -> impl Strategy<Value = Step> {
    let ends = prop::sample::select(vec![
        Ends::Bound,
        Ends::Bound,
        Ends::Bound,
        Ends::Failed,
        Ends::UnsureBound,
        Ends::UnsureFailed,
    ]);
    prop_oneof![
        6 => (0..2usize, 1..5u32, ends).prop_map(|(node, gpus, ends)| Step::Bind { node, gpus, ends }),
        6 => any::<usize>().prop_map(Step::Deliver),
        3 => (0..2usize).prop_map(Step::Publish),
        1 => (0..2usize).prop_map(Step::DeleteObject),
        1 => (0..2usize).prop_map(Step::RestoreObject),
        3 => any::<usize>().prop_map(Step::Finish),
        3 => any::<usize>().prop_map(Step::Kill),
        2 => any::<(usize, usize)>().prop_map(|(a, b)| Step::Swap(a, b)),
        3 => (1..9u64).prop_map(Step::Wait),
        1 => Just(Step::Relist),
        1 => Just(Step::Restart),
    ]
}

/// A pod as it really is.
#[derive(Debug, Clone)]
struct Real {
    uid: String,
    node: usize,
    gpus: GpuSet,
    object: Value,
    /// Whether the API has it.
    exists: bool,
    /// Whether the watch has delivered its newest state.
    delivered: bool,
    /// When its process is gone.
    dies: Option<u64>,
}

struct World {
    cluster: Cluster,
    now: u64,
    pods: Vec<Real>,
    published: BTreeMap<usize, Value>,
    made: usize,
}

impl World {
    fn new() -> Self {
        let mut world = Self {
            cluster: Cluster::cold(Options::default()),
            now: 0,
            pods: Vec::new(),
            published: BTreeMap::new(),
            made: 0,
        };
        for node in 0..NODES.len() {
            world.write(node);
        }
        world.start();
        world
    }

    /// What the plugin of a node would write now.
    fn write(&mut self, node: usize) {
        let mut object = gpu_node(NODES[node], &bridged());
        let mut holders = Vec::new();
        for pod in self.pods.iter().filter(|pod| pod.node == node) {
            if pod.dies.is_none_or(|dies| dies > self.now) {
                let held = holder(NODES[node], &pod.uid, Some(&pod.uid), &pod.gpus.to_string());
                holders.push(if pod.exists { held } else { quarantined(held) });
            }
        }
        object["status"]["holders"] = json!(holders);
        self.published.insert(node, object);
    }

    fn start(&mut self) {
        let before = std::mem::replace(&mut self.cluster, Cluster::cold(Options::default()));
        *self.cluster.now.lock().unwrap() = before.now();
        let cluster = &self.cluster;
        cluster.list(Source::Nodes, |cluster| {
            for name in NODES {
                cluster.node(name, 8);
            }
        });
        cluster.list(Source::GpuNodes, |cluster| {
            for object in self.published.values() {
                cluster.inventory(object);
            }
        });
        self.relist();
    }

    fn relist(&mut self) {
        let pods = &self.pods;
        self.cluster.list(Source::Pods, |cluster| {
            for pod in pods.iter().filter(|pod| pod.exists) {
                cluster.pod(&pod.object);
            }
        });
        for pod in &mut self.pods {
            pod.delivered = true;
        }
    }

    fn wait(&mut self, halves: u64) {
        for _ in 0..halves {
            self.now += 1;
            if self.now.is_multiple_of(PLUGIN_LAGS) {
                (0..NODES.len()).for_each(|node| self.publish(node));
            }
            let now = self.cluster.now() + HALF;
            *self.cluster.now.lock().unwrap() = now;
            self.cluster.store.update(|index| index.tick(now, now));
        }
    }

    fn publish(&mut self, node: usize) {
        self.write(node);
        self.cluster.inventory(&self.published[&node]);
    }

    /// GPUs of a node that a process uses or may use from now on.
    fn used(&self, node: usize) -> GpuSet {
        let alive =
            self.pods.iter().filter(|pod| pod.node == node && pod.dies.is_none_or(|dies| dies > self.now));
        alive.fold(GpuSet::EMPTY, |used, pod| used | pod.gpus)
    }

    fn bind(&mut self, node: usize, gpus: u32, ends: Ends) -> Result<(), TestCaseError> {
        self.made += 1;
        let name = format!("p{}", self.made);
        let pending = pod(&name, gpus);
        self.cluster.pod(&pending);
        let target = target(&name, NODES[node]);
        let now = self.cluster.now();
        let Ok(reserved) = self.cluster.store.update(|index| index.reserve(&target, None)) else {
            return Ok(());
        };
        let BindGrant::Grant { annotation, .. } = &reserved else {
            // There is no GpuNode to grant from.
            self.cluster.store.update(|index| index.finish(now, &target, Outcome::Failed));
            return Ok(());
        };
        let gpus = set(&granted(&reserved));
        let used = self.used(node);
        prop_assert!(
            (gpus & used).is_empty(),
            "{name} is granted {gpus} of {}, {used} are used",
            NODES[node]
        );
        let outcome = match ends {
            Ends::Bound => Outcome::Bound,
            Ends::Failed => Outcome::Failed,
            Ends::UnsureBound | Ends::UnsureFailed => Outcome::Unsure,
        };
        self.cluster.store.update(|index| index.finish(now, &target, outcome));
        if matches!(ends, Ends::Bound | Ends::UnsureBound) {
            let at = u32::try_from(self.now / 2).unwrap();
            let mut object = bound(pending, NODES[node], at, None);
            object["metadata"]["annotations"] = json!({"gantry.dev/grant": &**annotation});
            self.pods.push(Real {
                uid: name,
                node,
                gpus,
                object,
                exists: true,
                delivered: false,
                dies: None,
            });
        }
        Ok(())
    }

    fn deliver(&mut self, pod: usize) {
        let pod = &mut self.pods[pod];
        if pod.exists {
            self.cluster.pod(&pod.object);
        } else if !pod.delivered {
            self.cluster.gone(&pod.object);
        }
        pod.delivered = true;
    }

    fn finish(&mut self, pod: usize) {
        let now = self.now;
        let pod = &mut self.pods[pod];
        if pod.exists && pod.dies.is_none() {
            pod.dies = Some(now);
            pod.object["status"]["phase"] = "Succeeded".into();
            pod.delivered = false;
        }
    }

    fn kill(&mut self, pod: usize) {
        let now = self.now;
        let real = &mut self.pods[pod];
        if !real.exists || real.dies.is_some() {
            return;
        }
        real.exists = false;
        real.dies = Some(now + PROCESS_LIVES);
        real.delivered = false;
    }

    fn swap(&mut self, a: usize, b: usize) {
        let fits = |pod: &Real| pod.exists && pod.dies.is_none();
        let (one, other) = (&self.pods[a], &self.pods[b]);
        if a == b
            || !fits(one)
            || !fits(other)
            || one.node != other.node
            || one.gpus.len() != other.gpus.len()
        {
            return;
        }
        let (one, other) = (one.gpus, other.gpus);
        self.pods[a].gpus = other;
        self.pods[b].gpus = one;
        self.publish(self.pods[a].node);
    }

    fn play(&mut self, step: Step) -> Result<(), TestCaseError> {
        let pods = self.pods.len();
        match step {
            Step::Bind { node, gpus, ends } => self.bind(node, gpus, ends)?,
            Step::Publish(node) => self.publish(node),
            Step::DeleteObject(node) => {
                self.cluster.store.update(|index| index.inventory_deleted(NODES[node]));
            }
            Step::RestoreObject(node) => {
                self.cluster.inventory(&self.published[&node]);
            }
            Step::Wait(seconds) => self.wait(seconds),
            Step::Relist => self.relist(),
            // It takes longer than the plugin lags. What was bound and killed by force within that lag is known to the
            // plugin alone.
            Step::Restart => {
                (0..NODES.len()).for_each(|node| self.write(node));
                self.start();
            }
            _ if pods == 0 => {}
            Step::Deliver(pod) => self.deliver(pod % pods),
            Step::Finish(pod) => self.finish(pod % pods),
            Step::Kill(pod) => self.kill(pod % pods),
            Step::Swap(a, b) => self.swap(a % pods, b % pods),
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn no_device_is_granted_that_somebody_has(steps in prop::collection::vec(step(), 1..60)) {
        let mut world = World::new();
        for step in steps {
            world.play(step)?;
        }
        // Nothing is lost either: once everybody has said what there is, all is free but what is used.
        world.relist();
        world.wait(160);
        for (number, node) in NODES.into_iter().enumerate() {
            prop_assert_eq!(world.cluster.free(node), (GpuSet::first(8) - world.used(number)).to_string());
        }
        // Nothing leaks: once all have ended and everybody has said so, all is free.
        for pod in 0..world.pods.len() {
            world.finish(pod);
            world.deliver(pod);
        }
        world.wait(160);
        for node in NODES {
            prop_assert_eq!(world.cluster.free(node), "0,1,2,3,4,5,6,7");
        }
    }
}
