//! Random histories of pods, kubelet and plugin against a model of kubelet: no pod is steered to devices meant for
//! another, and a restart at any point gives the same status.

use std::collections::VecDeque;

use gantry_api::HolderState;
use proptest::prelude::*;

use super::*;

const GPUS: u8 = 8;

/// An event of a history.
#[derive(Debug, Clone)]
enum Action {
    /// The scheduler binds a pod with a grant: devices of the init container, devices of the app.
    Bind {
        init: usize,
        app: usize,
        pick: u64,
    },
    /// A user sets a pod's node by hand.
    Stray {
        count: usize,
    },
    /// Kubelet admits the next pod; `late`: before the watch has shown it.
    Admit {
        late: bool,
        pick: u64,
    },
    /// A pod's containers end.
    Finish(usize),
    /// A pod is deleted and ends in time.
    Delete(usize),
    /// A pod is force-deleted; its process keeps running.
    Force(usize),
    /// The processes of force-deleted pods end.
    Reap,
    /// The watch catches up.
    Deliver,
    /// PodResources is read.
    List,
    RestartPlugin,
    RestartKubelet,
}

fn orderly() -> impl Strategy<Value = Action> {
    prop_oneof![
        6 => (0..3usize, 1..4usize, any::<u64>()).prop_map(|(init, app, pick)| Action::Bind { init, app, pick }),
        2 => (1..4usize).prop_map(|count| Action::Stray { count }),
        8 => any::<u64>().prop_map(|pick| Action::Admit { late: false, pick }),
        2 => any::<usize>().prop_map(Action::Finish),
        1 => any::<usize>().prop_map(Action::Delete),
        1 => any::<usize>().prop_map(Action::Force),
        1 => Just(Action::Reap),
        2 => Just(Action::Deliver),
        2 => Just(Action::List),
        1 => Just(Action::RestartPlugin),
        1 => Just(Action::RestartKubelet),
    ]
}

fn disorderly() -> impl Strategy<Value = Action> {
    prop_oneof![
        3 => orderly(),
        1 => any::<u64>().prop_map(|pick| Action::Admit { late: true, pick }),
    ]
}

/// A pending notification of the watch.
#[derive(Debug, Clone)]
enum Event {
    Seen(ObservedPod),
    Gone { uid: PodUid, finished: bool },
}

/// A pod in the API server and in kubelet.
#[derive(Debug, Clone)]
struct Live {
    seen: ObservedPod,
    init: usize,
    app: usize,
    granted: Option<Devices>,
    admitted: bool,
    /// By container, in kubelet's state.
    held: BTreeMap<&'static str, Devices>,
}

impl Live {
    fn devices(&self) -> Devices {
        self.held.values().flatten().cloned().collect()
    }
}

struct World {
    plugin: Handover,
    pods: BTreeMap<PodUid, Live>,
    /// Bound and not yet admitted, in kubelet's order.
    queue: Vec<PodUid>,
    events: VecDeque<Event>,
    zombies: BTreeMap<PodUid, Devices>,
    count: u64,
    orderly: bool,
}

impl World {
    fn new(orderly: bool) -> Self {
        Self {
            plugin: node(),
            pods: BTreeMap::new(),
            queue: Vec::new(),
            events: VecDeque::new(),
            zombies: BTreeMap::new(),
            count: 0,
            orderly,
        }
    }

    fn act(&mut self, action: &Action) -> Result<(), TestCaseError> {
        match action {
            Action::Bind { init, app, pick } => self.bind(*init, *app, *pick),
            Action::Stray { count } => self.create(0, *count, None),
            Action::Admit { late, pick } => self.admit(*late, *pick)?,
            Action::Finish(which) => self.end(*which, true, false),
            Action::Delete(which) => self.end(*which, false, false),
            Action::Force(which) => self.end(*which, false, true),
            Action::Reap => self.reap(),
            Action::Deliver => self.deliver(),
            Action::List => {
                // A list comes at least 0.1 s after an allocation; the watch is never that late.
                self.deliver();
                self.list();
            }
            Action::RestartPlugin => self.restart_plugin()?,
            Action::RestartKubelet => {
                self.deliver();
                let created = |uid: &PodUid| self.pods[uid].seen.created;
                let mut queue = self.queue.clone();
                queue.sort_by_key(created);
                self.queue = queue;
                self.plugin.kubelet_restarted();
                self.list();
                // Existing pods are admitted in one go; later ones in the order of bindings again.
                for pick in 0..self.queue.len() {
                    self.admit(false, u64::try_from(pick).unwrap())?;
                }
            }
        }
        Ok(())
    }

    /// As in the extender: a set outside all live grants and published holders.
    fn bind(&mut self, init: usize, app: usize, pick: u64) {
        self.deliver();
        let mut free = set(0..GPUS);
        for holder in self.plugin.holders() {
            for device in &holder.devices {
                free.remove(device);
            }
        }
        for device in self.pods.values().filter_map(|pod| pod.granted.as_ref()).flatten() {
            free.remove(device);
        }
        let size = init.max(app);
        if free.len() >= size {
            let granted = choose(&free, size, pick);
            self.create(init, app, Some(granted));
        }
    }

    fn create(&mut self, init: usize, app: usize, granted: Option<Devices>) {
        // The scheduler counts requests, including those of unplanned pods.
        let committed: usize = self.pods.values().map(|pod| pod.init.max(pod.app)).sum();
        if committed + init.max(app) > usize::from(GPUS) {
            return;
        }
        self.count += 1;
        let name = format!("pod-{}", self.count);
        let containers = match &granted {
            None => vec![asking("app", app)],
            Some(devices) => {
                let exactly = |name: &str, count| Container {
                    name: name.into(),
                    count,
                    share: Some(ContainerShare::Devices(devices.iter().take(count).cloned().collect())),
                };
                let last = match u32::try_from(app) {
                    Ok(count) if init > app => of_held("app", count),
                    _ => exactly("app", app),
                };
                let first = (init > 0).then(|| exactly("init", init));
                first.into_iter().chain([last]).collect()
            }
        };
        let mut seen = pod(&name, &containers);
        // The order of creation differs from that of binding.
        seen.created = i64::try_from(self.count % 3).unwrap();
        seen.revision = self.count;
        self.queue.push(seen.uid.clone());
        self.events.push_back(Event::Seen(seen.clone()));
        let live = Live { init, app, granted, admitted: false, held: BTreeMap::new(), seen };
        self.pods.insert(live.seen.uid.clone(), live);
    }

    /// Kubelet admits the next pod, container by container.
    fn admit(&mut self, late: bool, pick: u64) -> Result<(), TestCaseError> {
        if !late {
            self.deliver();
        }
        if self.queue.is_empty() {
            return Ok(());
        }
        let uid = self.queue.remove(0);
        let Some(live) = self.pods.get(&uid).cloned() else {
            return Ok(());
        };
        let mut reusable = Devices::new();
        for (container, count) in [("init", live.init), ("app", live.app)] {
            if count == 0 {
                continue;
            }
            let given = if reusable.len() >= count {
                choose(&reusable, count, pick)
            } else {
                let mut offered = set(0..GPUS);
                for device in self.pods.values().flat_map(Live::devices) {
                    offered.remove(&device);
                }
                offered.extend(reusable.iter().cloned());
                if offered.len() < count {
                    self.reject(&uid);
                    return Ok(());
                }
                let ask = request(&offered, &reusable, count);
                let answer = self.plugin.prefer(&[ask], WaitFor::default()).unwrap().remove(0);
                self.check(&live, count, &offered, &answer)?;
                answer.devices
            };
            self.plugin.allocate(&GPU.into(), &given, NOW);
            if container == "init" {
                reusable.clone_from(&given);
            }
            if let Some(pod) = self.pods.get_mut(&uid) {
                pod.held.insert(container, given);
            }
        }
        if let Some(pod) = self.pods.get_mut(&uid) {
            pod.admitted = true;
            pod.seen.started = true;
            self.count += 1;
            pod.seen.revision = self.count;
            self.events.push_back(Event::Seen(pod.seen.clone()));
        }
        Ok(())
    }

    /// The invariant, and the exact grant if everything is in order.
    fn check(
        &self,
        asker: &Live,
        count: usize,
        offered: &Devices,
        answer: &Preference,
    ) -> Result<(), TestCaseError> {
        prop_assert_eq!(answer.devices.len(), count);
        prop_assert!(answer.devices.is_subset(offered));
        let undelivered: BTreeSet<&PodUid> = self
            .events
            .iter()
            .filter_map(|event| match event {
                Event::Seen(seen) => Some(&seen.uid),
                Event::Gone { .. } => None,
            })
            .collect();
        for other in self.pods.values() {
            let waits = !other.admitted && other.seen.uid != asker.seen.uid;
            if let (true, Some(granted)) = (waits && !undelivered.contains(&other.seen.uid), &other.granted) {
                prop_assert!(
                    answer.basis == Basis::Forced || answer.devices.is_disjoint(granted),
                    "{} was steered to {:?}, granted to {}",
                    asker.seen.name,
                    answer,
                    other.seen.name
                );
            }
        }
        if let (true, Some(granted)) = (self.orderly, &asker.granted)
            && granted.is_subset(offered)
        {
            prop_assert!(
                answer.devices.is_subset(granted),
                "{} was granted {:?} and steered to {:?}",
                asker.seen.name,
                granted,
                answer
            );
        }
        Ok(())
    }

    fn reject(&mut self, uid: &PodUid) {
        self.pods.remove(uid);
        self.events.push_back(Event::Gone { uid: uid.clone(), finished: true });
        if self.orderly {
            self.deliver();
        }
    }

    fn end(&mut self, which: usize, finished: bool, forced: bool) {
        let candidates: Vec<PodUid> = self
            .pods
            .iter()
            .filter(|(_, pod)| pod.admitted || !finished)
            .map(|(uid, _)| uid.clone())
            .collect();
        if candidates.is_empty() {
            return;
        }
        let uid = candidates[which % candidates.len()].clone();
        if let Some(pod) = self.pods.remove(&uid)
            && forced
            && pod.admitted
        {
            self.zombies.insert(uid.clone(), pod.devices());
        }
        self.queue.retain(|waiting| *waiting != uid);
        self.events.push_back(Event::Gone { uid, finished });
    }

    fn reap(&mut self) {
        self.zombies.clear();
        self.look();
    }

    /// Effect of the control group scan.
    fn look(&mut self) {
        for uid in self.plugin.quarantined() {
            if !self.zombies.contains_key(&uid) {
                self.plugin.processes_gone(&uid);
            }
        }
    }

    fn deliver(&mut self) {
        while let Some(event) = self.events.pop_front() {
            match event {
                Event::Seen(seen) => self.plugin.observe(seen),
                Event::Gone { uid, finished } => self.plugin.remove_pod(&uid, finished),
            }
        }
        self.look();
    }

    fn truth(&self) -> Vec<(String, Devices)> {
        self.pods
            .values()
            .filter_map(|pod| Some((pod.seen.name.clone(), pod.held.get("app")?.clone())))
            .collect()
    }

    fn list(&mut self) {
        let truth = self.truth();
        report(&mut self.plugin, &truth);
    }

    fn restart_plugin(&mut self) -> Result<(), TestCaseError> {
        self.deliver();
        let published = self.plugin.holders();
        let mut plugin = Handover::new(NODE.into());
        let inventory = inventory(GPUS);
        plugin.inventory(&inventory);
        plugin.table(Some(Arc::new(Table::build(&inventory.machine))));
        plugin.sync(self.pods.values().map(|pod| pod.seen.clone()).collect());
        plugin.adopt(&published);
        // The old instance receives what the new one receives; unattributed sets are dropped after two lists.
        self.list();
        self.list();
        let before = status_snapshot(&self.plugin);
        self.plugin = plugin;
        self.look();
        self.list();
        // If the watch was late, only the next list shows the owner of a set: a restart before it loses what an init
        // container got instead of its grant.
        if self.orderly {
            prop_assert_eq!(status_snapshot(&self.plugin), before);
        }
        self.check_account()
    }

    /// Every device in use is in the status, under its true holder.
    fn check_account(&mut self) -> Result<(), TestCaseError> {
        self.deliver();
        self.list();
        let status_snapshot = status_snapshot(&self.plugin);
        for pod in self.pods.values().filter(|pod| pod.admitted) {
            let known = status_snapshot.get(&(pod.seen.uid.clone(), false)).cloned().unwrap_or_default();
            let app = &pod.held["app"];
            prop_assert!(app.is_subset(&known), "{} holds {:?}, known is {:?}", pod.seen.name, app, known);
        }
        // A pod that was force-deleted before any list showed it leaves no trace if the watch is late.
        for (uid, devices) in self.zombies.iter().filter(|_| self.orderly) {
            let known = status_snapshot.get(&(uid.clone(), true)).cloned().unwrap_or_default();
            prop_assert!(devices.is_subset(&known), "{} still uses {:?}, known is {:?}", uid, devices, known);
        }
        Ok(())
    }
}

fn report(plugin: &mut Handover, truth: &[(String, Devices)]) {
    let holdings: Vec<(&str, &str, Devices)> =
        truth.iter().map(|(pod, devices)| (pod.as_str(), "app", devices.clone())).collect();
    plugin.list(&holdings);
}

/// Holders, and whether they are in quarantine.
fn status_snapshot(plugin: &Handover) -> BTreeMap<(PodUid, bool), Devices> {
    let mut status_snapshot: BTreeMap<(PodUid, bool), Devices> = BTreeMap::new();
    for holder in plugin.holders() {
        let uid = holder.uid.clone().unwrap_or_else(|| PodUid::from(""));
        status_snapshot
            .entry((uid, holder.state == HolderState::Quarantined))
            .or_default()
            .extend(holder.devices);
    }
    status_snapshot
}

/// `count` elements of `from`, selected by `pick`.
fn choose(from: &Devices, count: usize, mut pick: u64) -> Devices {
    let mut from: Vec<DeviceId> = from.iter().cloned().collect();
    let mut chosen = Devices::new();
    while chosen.len() < count && !from.is_empty() {
        pick = pick.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let position = usize::try_from(pick >> 33).unwrap() % from.len();
        chosen.insert(from.swap_remove(position));
    }
    chosen
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, failure_persistence: None, ..ProptestConfig::default() })]

    /// If the watch keeps up, every pod is steered to its own grant through all changes and restarts.
    #[test]
    fn timely_watch_gives_every_pod_its_grant(actions in prop::collection::vec(orderly(), 1..40)) {
        let mut world = World::new(true);
        for action in &actions {
            world.act(action)?;
        }
        world.check_account()?;
        prop_assert_eq!(world.plugin.deviations_total(), 0);
    }

    /// If it does not, no pod is steered to devices of a waiting pod, and the status follows PodResources.
    #[test]
    fn late_watch_keeps_grants_of_waiting_pods(actions in prop::collection::vec(disorderly(), 1..40)) {
        let mut world = World::new(false);
        for action in &actions {
            world.act(action)?;
        }
        world.check_account()?;
    }
}
