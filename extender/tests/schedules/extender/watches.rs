//! What the watches of an extender bring: late, in order within a source, sometimes broken and listed anew. What has come when it looks is
//! told to the index in one change, as the real shell does.

use super::*;

/// A list comes in one piece; so often of a thousand, one object at a time.
const PIECEMEAL: u64 = 100;

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
            let inbox = process.inbox(source);
            if !inbox.open {
                continue;
            }
            let (until, by) = inbox.behind;
            let behind = if now < until { by } else { 0 };
            inbox.last = inbox.last.max(now + lag + behind);
            let at = inbox.last;
            let first = inbox.changes.back().is_none_or(|(last, _)| *last < at);
            inbox.changes.push_back((at, change.clone()));
            if first {
                self.at(at, Event::Watch { run, source });
            }
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
        let changes = &mut process.inbox(source).changes;
        let come = changes.iter().take_while(|(at, _)| *at <= now).count();
        let changes: Vec<Change> = changes.drain(..come).map(|(_, change)| change).collect();
        self.tell(run, &changes);
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
        let instant = self.instant();
        let objects = self.api.list(source);
        let piecemeal = self.dice.mille(PIECEMEAL);
        let Some(process) = self.extenders.running.get_mut(&run) else {
            return;
        };
        let inbox = process.inbox(source);
        inbox.changes.clear();
        inbox.open = true;
        process.listed.insert(source);
        if source == Source::Gangs {
            // Also versions that are newer: a restored etcd shows older ones.
            process.objects.clear();
            process.writers.values_mut().for_each(|writer| writer.known = None);
        }
        if piecemeal {
            self.update(run, |index| index.list_begins(instant, source));
            for object in &objects {
                self.tell(run, std::slice::from_ref(object));
            }
            self.note_missing(run, source, &objects);
            self.update(run, |index| index.list_ends(instant, source));
        } else {
            self.tell_list(run, source, &objects);
        }
    }

    /// All watches of all extenders begin again.
    pub(crate) fn relist_all(&mut self) {
        let runs: Vec<u32> = self.extenders.running.keys().copied().collect();
        for run in runs {
            for source in Source::ALL {
                self.extenders.close(run, source);
                self.after(1, Event::Relist { run, source });
            }
        }
    }

    fn tell_list(&mut self, run: u32, source: Source, objects: &[Change]) {
        let instant = self.instant();
        self.note_told(run, objects);
        self.note_missing(run, source, objects);
        self.update(run, |index| {
            index.list_begins(instant, source);
            for object in objects {
                apply(index, instant, object);
            }
            index.list_ends(instant, source);
        });
    }

    pub(crate) fn break_some_watch(&mut self) {
        let runs: Vec<u32> = self.extenders.running.keys().copied().collect();
        if !runs.is_empty() {
            let run = runs[self.dice.index(runs.len())];
            let source = Source::ALL[self.dice.index(Source::ALL.len())];
            self.played(Played::WatchBroken);
            self.note(format_args!("the watch of {} breaks at extender {run}", source.as_str()));
            self.extenders.close(run, source);
            self.soon(10, 3_000, Event::Relist { run, source });
        }
    }

    /// What has come is told to the index.
    fn tell(&mut self, run: u32, changes: &[Change]) {
        if changes.is_empty() {
            return;
        }
        let instant = self.instant();
        self.note_told(run, changes);
        let changes = self.newest(run, changes);
        self.update(run, |index| {
            for change in &changes {
                apply(index, instant, change);
            }
        });
    }

    /// The changes, with the newest versions of Gang objects that the process knows: a write may have overtaken the watch.
    fn newest(&self, run: u32, changes: &[Change]) -> Vec<Change> {
        let process = self.extenders.running.get(&run);
        let newest = |change: &Change| match change {
            Change::Gang(gang) => {
                process.and_then(|process| process.objects.get(&gang.name)).cloned().map(Change::Gang)
            }
            _ => None,
        };
        changes.iter().map(|change| newest(change).unwrap_or_else(|| change.clone())).collect()
    }

    /// Keeps the newest version of each Gang object, and in mind what was told of pods.
    fn note_told(&mut self, run: u32, changes: &[Change]) {
        let Some(process) = self.extenders.running.get_mut(&run) else {
            return;
        };
        for change in changes {
            match change {
                Change::Gang(gang) => process.saw(gang),
                Change::GangGone(name) => {
                    process.objects.remove(name);
                    if let Some(writer) = process.writers.get_mut(name) {
                        writer.known = None;
                    }
                }
                Change::Pod(pod) if pod.node.is_some() => {
                    let key = (run, pod.uid.clone());
                    let is_new = self.extenders.knew.insert(key.clone());
                    if !is_new && (pod.leaving || !pod.is_live()) {
                        self.extenders.gone.insert(key);
                    }
                }
                Change::PodGone(pod) => {
                    let key = (run, pod.uid.clone());
                    self.extenders.gone.extend(self.extenders.knew.get(&key).cloned());
                }
                _ => {}
            }
        }
    }

    /// A list of pods does not have some that the process has seen bound.
    fn note_missing(&mut self, run: u32, source: Source, objects: &[Change]) {
        if source != Source::Pods {
            return;
        }
        let is_listed =
            |uid: &str| objects.iter().any(|object| matches!(object, Change::Pod(pod) if pod.uid == uid));
        let missing = self.extenders.knew.iter().filter(|(by, uid)| *by == run && !is_listed(uid));
        self.extenders.gone.extend(missing.cloned());
    }

    /// A Gang object, as an answer shows it.
    pub(super) fn see_gang(&mut self, run: u32, gang: &Arc<Gang>) {
        if let Some(process) = self.extenders.running.get_mut(&run) {
            process.saw(gang);
        }
        self.update(run, |index| {
            index.gang_object_seen("default", &gang.name, object(gang));
        });
    }
}

impl Extenders {
    /// A watch ends. What it has not brought is lost.
    fn close(&mut self, run: u32, source: Source) {
        if let Some(process) = self.running.get_mut(&run) {
            let inbox = process.inbox(source);
            inbox.open = false;
            inbox.changes.clear();
        }
    }
}

impl Process {
    pub(super) fn inbox(&mut self, source: Source) -> &mut Inbox {
        self.inbox.entry(source).or_default()
    }

    fn saw(&mut self, gang: &Arc<Gang>) {
        let newer = |known: &Arc<Gang>| known.rv < gang.rv;
        if self.objects.get(&gang.name).is_none_or(newer) {
            self.objects.insert(gang.name.clone(), Arc::clone(gang));
        }
        if let Some(writer) = self.writers.get_mut(&gang.name)
            && writer.known.as_ref().is_none_or(newer)
        {
            writer.known = Some(Arc::clone(gang));
        }
    }
}

fn apply(index: &mut Index, instant: Instant, change: &Change) {
    match change {
        Change::Pod(pod) => index.pod_applied(pod.facts().clone()),
        Change::PodGone(pod) => {
            let facts = pod.facts().clone();
            let uid = facts.uid.clone();
            index.pod_deleted(instant, &uid, Some(facts));
        }
        Change::Node(name, gpus) => {
            let (advertised, facts) = read_node(name, *gpus);
            index.node_applied(&name.as_str().into(), advertised);
            index.node_described(facts);
        }
        Change::NodeGone(name) => index.node_deleted(name),
        Change::GpuNode(name, object) => {
            index.inventory_applied(&name.as_str().into(), object.inventory().clone());
        }
        Change::GpuNodeGone(name) => index.inventory_deleted(name),
        Change::Gang(gang) => index.gang_object_seen("default", &gang.name, object(gang)),
        Change::GangGone(name) => index.gang_object_gone("default", name),
    }
}

fn object(gang: &Gang) -> Object {
    Object {
        uid: gang.uid.as_str().into(),
        resource_version: gang.rv.to_string().into(),
        ours: gang.ours,
        spec: Ok(gang.spec.clone()),
        status: GangStatus::clone(&gang.status),
    }
}
