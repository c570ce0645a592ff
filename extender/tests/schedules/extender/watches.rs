//! What the watches of an extender bring: late, in order within a source, sometimes broken and listed anew.

use super::*;

impl World {
    pub(crate) fn tell_extenders(&mut self, change: &Change) {
        let source = change.source();
        let runs: Vec<u32> = self.extenders.running.keys().copied().collect();
        for run in runs {
            let lag = self.lag();
            let now = self.now;
            let Some(process) = self.extenders.running.get_mut(&run) else {
                continue;
            };
            let inbox = process.inbox.entry(source).or_default();
            if !inbox.open {
                continue;
            }
            inbox.changes.push_back(change.clone());
            inbox.last = inbox.last.max(now + lag);
            let at = inbox.last;
            self.at(at, Event::Watch { run, source });
        }
    }

    pub(crate) fn watch_brings(&mut self, run: u32, source: Source) {
        if self.is_paused(run, &Event::Watch { run, source }) {
            return;
        }
        let now = self.now;
        let Some(process) = self.extenders.running.get_mut(&run) else {
            return;
        };
        process.contact = now;
        let change = process.inbox.entry(source).or_default().changes.pop_front();
        if let Some(change) = change {
            self.tell(run, &change);
        }
    }

    /// A watch begins with a list.
    pub(crate) fn relist(&mut self, run: u32, source: Source) {
        if self.is_paused(run, &Event::Relist { run, source }) {
            return;
        }
        if self.now < self.stalled {
            self.at(self.stalled + 10, Event::Relist { run, source });
            return;
        }
        let (now, instant) = (self.now, self.instant());
        let objects = self.api.list(source);
        let Some(process) = self.extenders.running.get_mut(&run) else {
            return;
        };
        process.contact = now;
        let inbox = process.inbox.entry(source).or_default();
        inbox.changes.clear();
        inbox.open = true;
        if source == Source::Gangs {
            process.objects.clear();
        }
        self.update(run, |index| index.list_begins(instant, source));
        for object in &objects {
            self.tell(run, object);
        }
        self.update(run, |index| index.list_ends(instant, source));
    }

    pub(crate) fn break_some_watch(&mut self) {
        let runs: Vec<u32> = self.extenders.running.keys().copied().collect();
        if !runs.is_empty() {
            let run = runs[self.dice.index(runs.len())];
            let source = Source::ALL[self.dice.index(Source::ALL.len())];
            self.note(format_args!(
                "the watch of {} breaks at extender {run}",
                source.as_str()
            ));
            if let Some(process) = self.extenders.running.get_mut(&run) {
                let inbox = process.inbox.entry(source).or_default();
                inbox.open = false;
                inbox.changes.clear();
            }
            self.soon(10, 3_000, Event::Relist { run, source });
        }
    }

    pub(super) fn tell(&mut self, run: u32, change: &Change) {
        let instant = self.instant();
        match change {
            Change::Pod(pod) | Change::PodGone(pod) => {
                let gone = matches!(change, Change::PodGone(_));
                let read = serde_json::from_value(pod.json()).unwrap();
                let Some(process) = self.extenders.running.get_mut(&run) else {
                    return;
                };
                let Some(Seen::Facts(facts)) = process.reader.read(read) else {
                    return;
                };
                self.update(run, |index| {
                    if gone {
                        let uid = facts.uid.clone();
                        index.pod_deleted(instant, &uid, Some(*facts));
                    } else {
                        index.pod_applied(*facts);
                    }
                });
            }
            Change::Node(name, gpus) => {
                let gpus = gpus.to_string();
                let node = json!({"metadata": {"name": name}, "status": {"allocatable":
                    {"nvidia.com/gpu": gpus, "cpu": "64", "memory": "256Gi", "pods": "110", "ephemeral-storage": "100Gi"}}});
                let node = serde_json::from_value(node).unwrap();
                let facts = index::described(&watched(), &node, &mut Words::default());
                let advertised = index::advertised(&watched(), &node);
                self.update(run, |index| {
                    index.node_applied(&name.as_str().into(), advertised);
                    index.node_described(Arc::new(facts));
                });
            }
            Change::NodeGone(name) => {
                self.update(run, |index| index.node_deleted(name));
            }
            Change::GpuNode(name, object) => {
                let node = serde_json::from_value((**object).clone()).unwrap();
                let Some(process) = self.extenders.running.get_mut(&run) else {
                    return;
                };
                let inventory = index::inventory(&watched(), node, &mut process.kinds).unwrap();
                self.update(run, |index| {
                    index.inventory_applied(&name.as_str().into(), inventory);
                });
            }
            Change::GpuNodeGone(name) => {
                self.update(run, |index| index.inventory_deleted(name));
            }
            Change::Gang(gang) => self.see_gang(run, gang),
            Change::GangGone(name) => {
                if let Some(process) = self.extenders.running.get_mut(&run) {
                    process.objects.remove(name);
                    if let Some(writer) = process.writers.get_mut(name) {
                        writer.known = None;
                    }
                }
                self.update(run, |index| index.gang_object_gone("default", name));
            }
        }
    }

    /// A Gang object, by a watch or an answer.
    pub(super) fn see_gang(&mut self, run: u32, gang: &Arc<Gang>) {
        if let Some(process) = self.extenders.running.get_mut(&run) {
            let newer = |known: &Arc<Gang>| known.rv < gang.rv;
            if process.objects.get(&gang.name).is_none_or(newer) {
                process.objects.insert(gang.name.clone(), Arc::clone(gang));
            }
            if let Some(writer) = process.writers.get_mut(&gang.name)
                && writer.known.as_ref().is_none_or(newer)
            {
                writer.known = Some(Arc::clone(gang));
            }
        }
        let object = Object {
            uid: gang.uid.as_str().into(),
            resource_version: gang.rv.to_string().into(),
            ours: gang.ours,
            spec: Ok(gang.spec.clone()),
            status: gang.status.clone(),
        };
        self.update(run, |index| index.gang_object_seen("default", &gang.name, object));
    }

    // Time.
}
