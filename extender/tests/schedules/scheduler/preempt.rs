//! kube-scheduler's own preemption: whom it would stop on which node by its own count, what the extender makes of that, and the nominated
//! node.

use std::cmp::Reverse;

use super::*;

/// Of a thousand deletions of victims so many fail while things fail.
const FAILS: u64 = 50;

impl World {
    /// A pod has found no node: others of lower priority are stopped for it where that helps. Not on nodes that the extender `refused`.
    pub(super) fn make_room(&mut self, pod: &Arc<Pod>, refused: &[String]) {
        if !self.plan.preemption || !pod.preempts || self.waits_for_victims(pod, refused) {
            return;
        }
        let scheduler = &self.scheduler;
        let nodes = scheduler.nodes.keys().filter(|node| !refused.contains(node));
        let offers: BTreeMap<String, Vec<String>> =
            nodes.filter_map(|node| Some((node.clone(), scheduler.victims_on(pod, node)?))).collect();
        if offers.is_empty() {
            self.nominate(&pod.uid, None);
            return;
        }
        let offers = self.offer_victims(pod, &offers);
        let Some((node, victims)) = self.scheduler.best(&offers) else {
            return;
        };
        self.played(Played::PodPreempts);
        self.note(format_args!("{victims:?} are stopped on {node} for pod {}", pod.uid));
        self.nominate(&pod.uid, Some(&node));
        self.denominate_lower(pod, &node);
        let life = self.scheduler.life;
        for uid in victims {
            let Some(name) = self.scheduler.pods.get(&uid).map(|known| known.pod.name.clone()) else {
                continue;
            };
            if let Some(known) = self.scheduler.pods.get_mut(&pod.uid) {
                known.stopping.insert(uid.clone());
            }
            let by = pod.uid.clone();
            self.soon(1, 10, Event::StopVictim { life, name, uid, by });
        }
    }

    /// Whether who was stopped for a pod is still on its way out, where room is made for it.
    fn waits_for_victims(&self, pod: &Pod, refused: &[String]) -> bool {
        let pods = &self.scheduler.pods;
        let Some(node) = pods.get(&pod.uid).and_then(|known| known.nominated.as_ref()) else {
            return false;
        };
        let leaves = |known: &Known| {
            let other = &known.pod;
            known.node() == Some(node) && other.priority < pod.priority && other.leaving && other.preempted
        };
        !refused.contains(node) && pods.values().any(leaves)
    }

    /// What the extender makes of the victims.
    fn offer_victims(
        &mut self,
        pod: &Pod,
        offers: &BTreeMap<String, Vec<String>>,
    ) -> BTreeMap<String, Vec<String>> {
        let nodes = offers.iter().map(|(node, victims)| {
            let pods: Vec<Value> = victims.iter().map(|uid| json!({"UID": uid})).collect();
            (node.clone(), json!({"Pods": pods, "NumPDBViolations": 0}))
        });
        let nodes = Value::from(nodes.collect::<serde_json::Map<_, _>>());
        let body =
            format!(r#"{{"Pod":{},"NodeNameToVictims":null,"NodeNameToMetaVictims":{nodes}}}"#, pod.text());
        let Some(answer) = self.ask_preempt(body.as_bytes()) else {
            return BTreeMap::new();
        };
        let answer: Value = serde_json::from_slice(&answer).unwrap();
        let mut taken = BTreeMap::new();
        for (node, victims) in answer["NodeNameToMetaVictims"].as_object().into_iter().flatten() {
            let victims = victims["Pods"].as_array().into_iter().flatten();
            let victims: Vec<String> =
                victims.filter_map(|victim| Some(victim["UID"].as_str()?.to_owned())).collect();
            self.check_offer(pod, node, &victims, offers);
            let here = |uid: &String| {
                let known = self.scheduler.pods.get(uid);
                known.is_some_and(|known| known.node() == Some(node))
            };
            if !victims.iter().all(here) {
                // It has heard of pods there that kube-scheduler has not: an error, and nobody is stopped.
                return BTreeMap::new();
            }
            taken.insert(node.clone(), victims);
        }
        if taken.is_empty() {
            self.played(Played::PreemptRefused);
        }
        taken
    }

    /// Of the extender's answer: nodes that were offered, and pods of lower priority there; for members of gangs none.
    fn check_offer(
        &mut self,
        pod: &Pod,
        node: &str,
        victims: &[String],
        offers: &BTreeMap<String, Vec<String>>,
    ) {
        let uid = &pod.uid;
        let priority = |victim: &String| {
            let there = self.api.pods.values().find(|other| other.uid == *victim);
            there.map_or(i32::MIN, |other| other.priority)
        };
        let important = victims.iter().find(|victim| priority(victim) >= pod.priority);
        let wrong = if pod.gang.is_some() {
            format!("{victims:?} are stopped for pod {uid}, one member of a gang")
        } else if victims.is_empty() || !offers.contains_key(node) {
            format!("preempt of pod {uid} names {node} with {victims:?}, and {offers:?} was offered")
        } else if let Some(other) = important {
            format!("pod {other} is stopped for pod {uid}, of no higher priority")
        } else {
            return;
        };
        self.wrong(wrong);
    }

    /// Where room is being made for a pod, as everybody may see.
    fn nominate(&mut self, uid: &str, node: Option<&str>) {
        let node = node.map(str::to_owned);
        let Some(known) = self.scheduler.pods.get_mut(uid) else {
            return;
        };
        if known.nominated == node {
            return;
        }
        known.nominated.clone_from(&node);
        let name = known.pod.name.clone();
        if self.now >= self.stalled {
            self.api.change_pod(&name, uid, |pod| pod.nominated = node);
        }
    }

    /// Pods of lower priority for which room was being made on a node have to look elsewhere.
    fn denominate_lower(&mut self, pod: &Pod, node: &str) {
        let pods = self.scheduler.pods.iter();
        let lower: Vec<String> = pods
            .filter(|(_, known)| {
                known.nominated.as_deref() == Some(node) && known.pod.priority < pod.priority
            })
            .map(|(uid, _)| uid.clone())
            .collect();
        for uid in lower {
            self.nominate(&uid, None);
        }
    }

    pub(crate) fn stop_victim(&mut self, life: u32, name: &str, uid: &str, by: &str) {
        if life != self.scheduler.life {
            return;
        }
        if self.now < self.stalled {
            let (name, uid, by) = (name.to_owned(), uid.to_owned(), by.to_owned());
            self.at(self.stalled + 10, Event::StopVictim { life, name, uid, by });
            return;
        }
        let fails = self.is_restless() && self.dice.mille(FAILS);
        if let Some(pod) = self.api.pod(name, uid).cloned().filter(|_| !fails) {
            self.note_preempted(&pod);
            self.api.change_pod(name, uid, |pod| pod.preempted = true);
            self.delete_pod(name, uid, false);
        }
        let Some(known) = self.scheduler.pods.get_mut(by) else {
            return;
        };
        known.stopping.remove(uid);
        if fails && matches!(known.state, State::Parked { .. }) {
            self.nominate(by, None);
            self.back_off(by);
        }
    }
}

impl Scheduler {
    /// Whom a pod takes on a node by its own count: of the pods of lower priority those that cannot stay, the most important stay first.
    fn victims_on(&self, pod: &Pod, node: &str) -> Option<Vec<String>> {
        let there = self.pods.values().filter(|known| known.node() == Some(node));
        let mut lower: Vec<&Known> = there.filter(|known| known.pod.priority < pod.priority).collect();
        lower.sort_by_key(|known| (Reverse(known.pod.priority), known.pod.bound, known.pod.uid.clone()));
        let fits = |gone: &BTreeSet<&str>| {
            self.left_for(pod, node, |other| !gone.contains(other.uid.as_str())) >= i64::from(pod.gpus)
        };
        let mut gone: BTreeSet<&str> = lower.iter().map(|known| known.pod.uid.as_str()).collect();
        if !fits(&gone) {
            return None;
        }
        for known in lower {
            let uid = known.pod.uid.as_str();
            gone.remove(uid);
            if !fits(&gone) {
                gone.insert(uid);
            }
        }
        let victims: Vec<String> = gone.into_iter().map(str::to_owned).collect();
        (!victims.is_empty()).then_some(victims)
    }

    /// The node where least is lost.
    fn best(&self, offers: &BTreeMap<String, Vec<String>>) -> Option<(String, Vec<String>)> {
        let best = offers.iter().min_by_key(|(_, victims)| {
            let priority = |uid: &String| self.pods.get(uid).map_or(0, |known| known.pod.priority);
            let highest = victims.iter().map(priority).max();
            let sum: i64 = victims.iter().map(|uid| i64::from(priority(uid)) + 1).sum();
            (highest, sum, victims.len())
        });
        best.map(|(node, victims)| (node.clone(), victims.clone()))
    }
}
