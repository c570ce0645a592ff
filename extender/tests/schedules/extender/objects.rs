//! The writer of Gang objects, as the real one goes: one request per object at a time, deletions before decisions before statuses, a status
//! a second, growing pauses after failures, read again after what may have failed.

use super::*;

/// Between two statuses of one gang.
const BETWEEN: u64 = 1_000;
/// After a first write that failed; each further one waits twice as long.
const AGAIN: u64 = 200;
/// The longest such wait.
const LONGEST: u64 = 10_000;

impl Writer {
    fn pause(&mut self, failed: bool, now: u64) {
        if failed {
            self.due = now + (AGAIN << self.failed.min(16)).min(LONGEST);
            self.failed += 1;
        } else {
            (self.due, self.failed) = (0, 0);
        }
    }

    /// What to do next with the object.
    fn next(&mut self, name: String) -> Option<What> {
        let known = self.known.clone();
        if self.reads {
            return Some(What::Get { name });
        }
        if std::mem::take(&mut self.forget)
            && let Some(known) = &known
        {
            let uid = known.uid.clone();
            return Some(What::Remove { name, uid });
        }
        if self.commit.is_none() && self.status.is_none() {
            return None;
        }
        let Some(known) = known else {
            return Some(What::Create { name });
        };
        let (uid, over) = (known.uid.clone(), known.rv);
        if let Some(decision) = self.commit.take() {
            // The newest status goes along.
            let status = self.status.take().unwrap_or_else(|| Arc::clone(&known.status));
            let id = decision.id.clone();
            let mut status = GangStatus { decision: Some(decision), ..GangStatus::clone(&status) };
            if let Some(key) = &self.key {
                status.name = key.name.to_string();
                status.integration = key.integration.as_str().to_owned();
                status.incarnation = key.incarnation.to_string();
            }
            let status = Arc::new(status);
            let decision = Some(id);
            return Some(What::Put { name, uid, over, status, decision });
        }
        let status = self.status.take()?;
        Some(What::Put { name, uid, over, status, decision: None })
    }

    /// Whether the status to be written is what the object says already.
    fn says_what_is(&self) -> bool {
        let first = !self.reads && !self.forget && self.commit.is_none();
        let known = self.known.as_ref();
        first && known.is_some_and(|known| self.status.as_deref() == Some(&*known.status))
    }
}

impl World {
    pub(super) fn writer(&mut self, run: u32, name: &str, key: &Arc<GangKey>) -> &mut Writer {
        let writer = self.writer_of(run, name);
        writer.key = Some(Arc::clone(key));
        writer
    }

    pub(super) fn writer_of(&mut self, run: u32, name: &str) -> &mut Writer {
        let process = self.extenders.running.get_mut(&run).unwrap();
        let known = process.objects.get(name).cloned();
        process.writers.entry(name.to_owned()).or_insert_with(|| Writer { known, ..Writer::default() })
    }

    fn free_writer(&mut self, run: u32, name: &str) -> Option<&mut Writer> {
        let writer = self.extenders.running.get_mut(&run)?.writers.get_mut(name)?;
        writer.busy = false;
        Some(writer)
    }

    /// The next write of a Gang object.
    pub(crate) fn write_gang(&mut self, run: u32, name: &str) {
        let event = Event::WriteGang { run, name: name.to_owned() };
        if self.is_paused(run, &event) {
            return;
        }
        let now = self.now;
        let Some(process) = self.extenders.running.get_mut(&run) else {
            return;
        };
        // Only who leads writes, and it looks before each write.
        if !process.leads(now) {
            return;
        }
        let Some(writer) = process.writers.get_mut(name) else {
            return;
        };
        if writer.busy {
            return;
        }
        let urgent = writer.commit.is_some() && writer.failed == 0;
        if !urgent && writer.due > now {
            let due = writer.due;
            if std::mem::replace(&mut writer.waits_for, due) != due {
                self.at(due, event);
            }
            return;
        }
        if writer.says_what_is() {
            writer.status = None;
            // Nobody writes it, so no watch shows it.
            if let Some(known) = writer.known.clone() {
                self.see_gang(run, &known);
            }
            return;
        }
        if let Some(what) = writer.next(name.to_owned()) {
            writer.busy = true;
            self.send(run, what);
        }
    }

    pub(super) fn create_ended(&mut self, run: u32, name: String, answer: Option<Answer>) {
        let now = self.now;
        let Some(writer) = self.free_writer(run, &name) else {
            return;
        };
        match answer {
            Some(Answer::Gang(Status::Done, Some(gang))) => {
                writer.known = Some(gang);
                self.write_gang(run, &name);
                return;
            }
            _ => {
                writer.reads = true;
                writer.pause(true, now);
            }
        }
        self.after(0, Event::WriteGang { run, name });
    }

    pub(super) fn get_ended(&mut self, run: u32, name: String, answer: Option<Answer>) {
        let now = self.now;
        let Some(writer) = self.free_writer(run, &name) else {
            return;
        };
        let Some(Answer::Gang(_, shown)) = answer else {
            writer.pause(true, now);
            self.after(0, Event::WriteGang { run, name });
            return;
        };
        writer.reads = false;
        let before = writer.known.as_ref().and_then(|known| known.status.decision.as_ref());
        let doubt = writer.doubt.take();
        // A decision that was not known: what was to be written is of before it.
        let decision = shown.as_ref().and_then(|gang| gang.status.decision.as_ref());
        let news = decision.is_some_and(|shown| {
            before.is_none_or(|before| before.id != shown.id) || doubt.as_ref() == Some(&shown.id)
        });
        if news {
            writer.status.take_if(|status| status.decision.is_none());
        }
        writer.known = None;
        match shown {
            Some(gang) => self.see_gang(run, &gang),
            None => {
                self.update(run, |index| index.gang_object_gone("default", &name));
            }
        }
        self.after(0, Event::WriteGang { run, name });
    }

    pub(super) fn remove_ended(&mut self, run: u32, name: String, answer: Option<Answer>) {
        let now = self.now;
        let Some(writer) = self.free_writer(run, &name) else {
            return;
        };
        match answer {
            Some(_) => {
                writer.known = None;
                writer.pause(false, now);
            }
            None => {
                writer.forget = true;
                writer.pause(true, now);
            }
        }
        self.after(0, Event::WriteGang { run, name });
    }

    pub(super) fn put_ended(
        &mut self,
        run: u32,
        name: String,
        status: Arc<GangStatus>,
        decision: Option<String>,
        answer: Option<Answer>,
    ) {
        let now = self.now;
        let Some(writer) = self.free_writer(run, &name) else {
            return;
        };
        let key = writer.key.clone();
        let result = match answer {
            Some(Answer::Gang(Status::Done, gang)) => {
                writer.known = gang;
                Ok(())
            }
            Some(_) => Err(CommitFailure::Conflict),
            None => Err(CommitFailure::Unknown),
        };
        writer.pause(result.is_err(), now);
        match &decision {
            Some(id) => {
                // What was to be written before the decision is old, however that ended.
                writer.status.take_if(|status| {
                    let of = status.decision.as_ref();
                    of.is_none_or(|of| of.id != *id)
                });
                writer.reads = result.is_err();
                writer.doubt = result.is_err().then(|| id.clone());
            }
            None if result.is_err() => {
                writer.reads |= result == Err(CommitFailure::Conflict);
                writer.status.get_or_insert(status);
            }
            None => writer.due = now + BETWEEN,
        }
        if let (Some(id), Some(key)) = (&decision, key) {
            if result == Err(CommitFailure::Unknown) {
                self.extenders.doubted.insert((run, id.clone()));
            }
            self.update(run, |index| index.committed(&key, id, result));
        }
        self.after(0, Event::WriteGang { run, name });
    }
}
