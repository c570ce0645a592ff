//! The writer of Gang objects: one write per object at a time, decisions before all else, read again after a failure.

use super::*;

impl World {
    pub(super) fn writer(&mut self, run: u32, name: &str, key: &Arc<GangKey>) -> &mut Writer {
        let writer = self.writer_of(run, name);
        writer.key = Some(Arc::clone(key));
        writer
    }

    pub(super) fn writer_of(&mut self, run: u32, name: &str) -> &mut Writer {
        let process = self.extenders.running.get_mut(&run).unwrap();
        let known = process.objects.get(name).cloned();
        process.writers.entry(name.to_owned()).or_insert_with(|| Writer {
            known,
            ..Writer::default()
        })
    }

    pub(super) fn free_writer(&mut self, run: u32, name: &str) -> Option<&mut Writer> {
        let writer = self.extenders.running.get_mut(&run)?.writers.get_mut(name)?;
        writer.busy = false;
        Some(writer)
    }

    /// The next write of a Gang object: first the decision, one request at a time.
    pub(crate) fn write_gang(&mut self, run: u32, name: &str) {
        let event = Event::WriteGang {
            run,
            name: name.to_owned(),
        };
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
        if writer.busy
            || (writer.commit.is_none() && writer.status.is_none() && !writer.forget && !writer.reads)
        {
            return;
        }
        let name = name.to_owned();
        let known = writer.known.clone();
        // An object that is over goes before a gang of its name is written: what arrives late must not delete that one's.
        let forget = !writer.reads && std::mem::take(&mut writer.forget);
        let what = match (known, writer.reads) {
            (_, true) => What::Get { name },
            (Some(known), false) if forget => What::Remove {
                name,
                uid: known.uid.clone(),
            },
            (None, false) => {
                if writer.commit.is_none() && writer.status.is_none() {
                    return;
                }
                What::Create { name }
            }
            (Some(known), false) if writer.commit.is_some() => {
                let decision = writer.commit.clone();
                let id = decision.as_ref().map(|decision| decision.id.clone());
                let key = writer.key.clone().unwrap();
                let mut status = writer.last.as_deref().cloned().unwrap_or_default();
                status.name = key.name.to_string();
                status.dialect = key.dialect.as_str().to_owned();
                status.incarnation = key.incarnation.to_string();
                status.phase = GangPhase::Committing;
                status.decision = decision;
                What::Put {
                    name,
                    uid: known.uid.clone(),
                    over: known.rv,
                    status: Arc::new(status),
                    decision: id,
                }
            }
            (Some(known), false) => {
                let Some(status) = writer.status.clone() else {
                    return;
                };
                What::Put {
                    name,
                    uid: known.uid.clone(),
                    over: known.rv,
                    status,
                    decision: None,
                }
            }
        };
        writer.busy = true;
        self.send(run, what);
    }

    pub(super) fn put_ended(
        &mut self,
        run: u32,
        name: String,
        decision: Option<String>,
        answer: Option<Answer>,
    ) {
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
        writer.reads = result.is_err();
        match &decision {
            Some(id) => {
                if writer.commit.as_ref().is_some_and(|commit| commit.id == *id) {
                    writer.commit = None;
                }
            }
            None if result.is_ok() => {
                let written = writer.known.as_ref().map(|known| Arc::clone(&known.status));
                if writer.status == written {
                    writer.status = None;
                }
            }
            None => {}
        }
        if let (Some(id), Some(key)) = (&decision, key) {
            self.update(run, |index| index.committed(&key, id, result));
        }
        self.soon(1, 100, Event::WriteGang { run, name });
    }
}
