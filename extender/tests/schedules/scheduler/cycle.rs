//! One pod's turn: kube-scheduler's own count, filter and prioritize, and what becomes of the answer.

use super::*;

impl World {
    /// One pod is scheduled.
    pub(crate) fn cycle(&mut self, life: u32) {
        if life != self.scheduler.life {
            return;
        }
        self.scheduler.cycles = false;
        let next = self
            .scheduler
            .pods
            .values()
            .filter(|known| known.state == State::Active)
            .min_by_key(|known| {
                (std::cmp::Reverse(known.pod.priority), known.pod.created, known.pod.uid.clone())
            })
            .map(|known| Arc::clone(&known.pod));
        let Some(pod) = next else {
            return;
        };
        self.schedule(&pod);
        self.want_cycle();
    }

    fn schedule(&mut self, pod: &Arc<Pod>) {
        let mut nodes: Vec<String> = self.fitting(pod);
        if nodes.is_empty() {
            let all = self.scheduler.nodes.len();
            let words = format!("0/{all} nodes are available: {all} Insufficient nvidia.com/gpu.");
            self.park(&pod.uid, false, words);
            self.make_room(pod, &[]);
            return;
        }
        let nominated = self.scheduler.pods.get(&pod.uid);
        let nominated = nominated.and_then(|known| known.nominated.clone());
        if let Some(node) = nominated.filter(|node| nodes.contains(node)) {
            // Alone, before all others.
            match self.ask(pod, std::slice::from_ref(&node)) {
                Some(Err(_)) => {}
                Some(Ok(_)) => {
                    self.played(Played::NominatedBound);
                    return self.assume(pod, &node);
                }
                None => return,
            }
        }
        if self.scheduler.samples && self.is_restless() && nodes.len() > 1 {
            let keep = self.dice.index(nodes.len());
            let dropped = self.dice.mille(400);
            nodes = nodes
                .into_iter()
                .enumerate()
                .filter(|(at, _)| *at == keep || !dropped)
                .map(|(_, name)| name)
                .collect();
        }
        let placements = self.placements(pod, &nodes);
        self.probe(pod, &placements.0);
        let Some(passed) = self.ask(pod, &nodes) else {
            return;
        };
        self.probe(pod, &placements.1);
        if passed.is_ok() && self.lacks_volume(pod) {
            self.played(Played::VolumeMissing);
            return self.back_off(&pod.uid);
        }
        match &passed {
            Err(words) => {
                self.park(&pod.uid, true, words.clone());
                self.make_room(pod, &nodes);
            }
            Ok(passed) if passed.len() == 1 => self.assume(pod, &passed[0]),
            Ok(passed) => {
                let asked = body(pod, passed);
                let best = self.ask_prioritize(asked.as_bytes(), passed);
                self.assume(pod, &best);
            }
        }
    }

    /// Placements of a PodGroup cycle before and after the one that has all nodes: each has one node. None outside such a cycle.
    fn placements(&mut self, pod: &Pod, nodes: &[String]) -> (Vec<String>, Vec<String>) {
        let is_native = pod.gang.as_ref().is_some_and(|claim| claim.group.is_some());
        if !self.plan.placements || !is_native || nodes.len() < 2 {
            return <_>::default();
        }
        let (before, after) = nodes.split_at(self.dice.index(nodes.len() + 1));
        (before.to_vec(), after.to_vec())
    }

    /// Calls filter for placements, of which none is taken.
    fn probe(&mut self, pod: &Arc<Pod>, placements: &[String]) {
        for node in placements {
            self.played(Played::PlacementTried);
            let asked = body(pod, std::slice::from_ref(node));
            let Some((run, _)) = self.ask_filter(asked.as_bytes()) else {
                return;
            };
            self.note(format_args!("filter {} at {run}, placement {node}", pod.uid));
        }
    }

    /// Asks filter about some nodes: which of them pass, or why none does; `None` if there was no answer.
    fn ask(&mut self, pod: &Arc<Pod>, nodes: &[String]) -> Option<Result<Vec<String>, String>> {
        let now = self.now;
        if let Some(known) = self.scheduler.pods.get_mut(&pod.uid) {
            known.asked.push_back(now);
            while known.asked.front().is_some_and(|at| at + 5_000 < now) {
                known.asked.pop_front();
            }
            if known.asked.len() > STORM {
                self.wrong(format!(
                    "a storm: filter is called for pod {} again and again ({})",
                    pod.uid, pod.message
                ));
                return None;
            }
        }
        let asked = body(pod, nodes);
        let Some((run, answer)) = self.ask_filter(asked.as_bytes()) else {
            self.back_off(&pod.uid);
            return None;
        };
        let answer: Value = serde_json::from_slice(&answer).unwrap();
        if answer["Error"].as_str().is_some_and(|error| !error.is_empty()) {
            self.note(format_args!("filter {} at {run}: {}", pod.uid, answer["Error"]));
            self.back_off(&pod.uid);
            return None;
        }
        let passed = answer["NodeNames"].as_array().cloned().unwrap_or_default();
        let passed: Vec<String> = passed.iter().filter_map(|name| Some(name.as_str()?.to_owned())).collect();
        self.note(format_args!("filter {} at {run}: {passed:?}", pod.uid));
        if passed.iter().any(|name| !nodes.contains(name)) {
            self.wrong(format!("filter of pod {} names a node that was not offered: {passed:?}", pod.uid));
            return None;
        }
        if passed.is_empty() {
            let mut words: BTreeMap<&str, u32> = BTreeMap::new();
            let refused = answer["FailedAndUnresolvableNodes"].as_object();
            for (_, text) in refused.into_iter().flatten() {
                *words.entry(text.as_str().unwrap_or_default()).or_default() += 1;
            }
            let words: Vec<String> =
                words.into_iter().map(|(text, count)| format!("{count} {text}")).collect();
            return Some(Err(words.join(", ")));
        }
        Some(Ok(passed))
    }

    /// Nodes with enough devices by the scheduler's own count.
    fn fitting(&self, pod: &Pod) -> Vec<String> {
        let scheduler = &self.scheduler;
        let fit = scheduler.nodes.keys().filter(|node| {
            let left = scheduler.left_for(pod, node, |_| true);
            left >= i64::from(pod.gpus)
        });
        fit.cloned().collect()
    }
}

impl Scheduler {
    /// What is left of a node for a pod, by its own count, if of the pods there only some stay. Pods of no lower priority for which room is
    /// being made there count as if they were there.
    pub(super) fn left_for(&self, pod: &Pod, node: &str, stays: impl Fn(&Pod) -> bool) -> i64 {
        let all = self.nodes.get(node).copied().unwrap_or_default();
        let taken = self.pods.values().filter(|known| {
            let other = &known.pod;
            match known.node() {
                Some(there) => there == node && stays(other),
                None => {
                    let nominated = known.nominated.as_deref() == Some(node);
                    nominated && other.uid != pod.uid && other.priority >= pod.priority
                }
            }
        });
        let taken: u32 = taken.map(|known| known.pod.gpus).sum();
        i64::from(all) - i64::from(taken)
    }
}

/// What kube-scheduler sends for filter and prioritize.
fn body(pod: &Pod, nodes: &[String]) -> String {
    let nodes = serde_json::to_string(nodes).unwrap();
    format!(r#"{{"Pod":{},"Nodes":null,"NodeNames":{nodes}}}"#, pod.text())
}
