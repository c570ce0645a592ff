//! Requests of an extender to the API server: sent, carried out, answered, lost; and what the sender makes of the answer.

use super::*;

/// Milliseconds after which the connection of a late request is lost.
const BREAKS: u64 = 20;

impl What {
    /// Binds go on when a term of leadership ends; all else that writes to the cluster ends with it and is begun anew with the next.
    fn is_for_a_bind(&self) -> bool {
        matches!(self, Self::ReadPod { .. } | Self::Bind { .. } | Self::Look { .. })
    }
}

impl World {
    pub(super) fn send(&mut self, run: u32, what: What) {
        self.next_request += 1;
        let request = self.next_request;
        let fenced_by_time = match &what {
            What::Bind { target, .. } => !self.is_written_down(target),
            _ => false,
        };
        let gives_up = self.now
            + match what {
                What::Bind { .. } => BIND,
                What::Action { .. } => actions::TIMEOUT,
                _ => REQUEST,
            };
        let limit = match &what {
            What::Bind { .. } => self.extenders.running.get(&run).map_or(0, |process| process.leads_until),
            _ => u64::MAX,
        };
        self.requests.insert(
            request,
            Request { run, what, limit, lost: false, by: run, sent: self.now, outcome: None },
        );
        let mut arrives = self.now + self.dice.range(1, 6);
        if self.is_restless() {
            match self.dice.below(100) {
                // It is lost, and the connection with it.
                0 | 1 => {
                    self.note_fate(request, "is lost");
                    self.played(Played::RequestLost);
                    self.soon(1, 50, Event::Reply { request, lost: true });
                    return;
                }
                // It is done, and the answer is lost.
                2 | 3 => {
                    self.note_fate(request, "loses its answer");
                    self.played(Played::AnswerLost);
                    self.at(arrives, Event::Execute { request });
                    self.at(arrives + 5, Event::Reply { request, lost: true });
                    return;
                }
                // It is late. What stands in no decision is fenced by nothing but time: see README.md.
                4 => {
                    let late = self.dice.range(10, if fenced_by_time { 3_000 } else { 40_000 });
                    arrives += late;
                    self.note_fate(request, format_args!("is {late} ms late"));
                    // Of some the connection is lost first, and a Binding of a single pod with it. Not by the dice, so that the
                    // other schedules stay as they are.
                    if late.is_multiple_of(3) {
                        self.at(self.now + BREAKS, Event::Reply { request, lost: true });
                    }
                    self.played(Played::RequestLate);
                }
                _ => {}
            }
        }
        if arrives < self.stalled {
            arrives = self.stalled + self.dice.range(1, 50);
        }
        self.at(arrives, Event::Execute { request });
        self.at(gives_up, Event::Reply { request, lost: true });
    }

    fn note_fate(&mut self, request: u64, fate: impl fmt::Display) {
        if let Some(Request { run, what, .. }) = self.requests.get(&request) {
            let text = format!("{run}'s {what:?} {fate}");
            self.note(format_args!("{text}"));
        }
    }

    /// The API servers end: what has not been carried out never is.
    pub(crate) fn lose_requests(&mut self) {
        let open = self.requests.iter_mut().filter(|(_, request)| request.outcome.is_none());
        let lost: Vec<u64> = open
            .map(|(number, request)| {
                request.lost = true;
                *number
            })
            .collect();
        for request in lost {
            self.soon(1, 50, Event::Reply { request, lost: true });
        }
    }

    /// A request is carried out.
    pub(crate) fn execute(&mut self, request: u64) {
        let Some(known) = self.requests.get(&request) else {
            return;
        };
        let Request { run, by, sent, limit, .. } = *known;
        let what = known.what.clone();
        if known.lost {
            return;
        }
        if self.now > limit {
            self.played(Played::BindingTooLate);
            self.note(format_args!("{run}'s Binding comes after its term of leadership"));
            return;
        }

        let alive = self.extenders.running.contains_key(&run);
        let outcome = match &what {
            What::ReadPod { name, .. } | What::Look { name, .. } => {
                Answer::Pod(self.api.pods.get(name).cloned())
            }
            What::Bind { target, grant, member, .. } => {
                if !alive && !self.is_written_down(target) {
                    // Its connection is gone, and so is what it had not delivered.
                    return;
                }
                self.check_binding(target, grant.as_ref(), *member, (by, sent));
                let status = self.api.bind(
                    &target.name,
                    target.uid.as_str(),
                    target.node.as_str(),
                    grant.as_ref(),
                    (sent, self.now),
                );
                self.played(match (&status, member) {
                    (Status::Done, true) => Played::MemberBound,
                    (Status::Done, false) => Played::SingleBound,
                    _ => Played::BindingRefused,
                });
                if status == Status::Done {
                    self.extenders.knew.insert((by, target.uid.to_string()));
                    if let Some(pod) = self.api.pod(&target.name, target.uid.as_str()).cloned() {
                        self.note_continued(pod.job, pod.granted());
                    }
                }
                let granted = grant.as_deref().unwrap_or_default();
                self.note(format_args!(
                    "Binding of {} to {} with {granted}: {status:?}",
                    target.uid, target.node
                ));
                Answer::Status(status)
            }
            What::Create { name } => {
                let status = self.api.create_gang(name);
                Answer::Gang(status, self.api.gangs.get(name).cloned())
            }
            What::Get { name } => Answer::Gang(Status::Done, self.api.gangs.get(name).cloned()),
            What::Put { name, uid, over, status, decision } => {
                let before = self.api.gangs.get(name).cloned();
                let done = self.api.write_status(name, uid, *over, status);
                if decision.is_some() {
                    self.played(match done {
                        Status::Done => Played::DecisionWritten,
                        _ => Played::DecisionRefused,
                    });
                }
                if done == Status::Done {
                    for uid in &status.unreserved {
                        self.bound_unlisted.remove(uid.as_str());
                    }
                    let is_done = self.jobs.of_gang(&status.name).is_none_or(|job| job.is_done());
                    if status.phase == GangPhase::Finished && !is_done {
                        self.finished_early.insert(status.name.clone());
                    }
                }
                if done == Status::Done && decision.is_some() {
                    self.check_kept(before.as_deref(), status);
                }
                let (what, places) = (decision.as_deref().unwrap_or("status"), Places(status));
                self.note(format_args!("{run} writes {name} over v{over}, {what},{places}: {done:?}"));
                self.check_decisions();
                Answer::Gang(done, self.api.gangs.get(name).cloned())
            }
            What::Remove { name, uid } => {
                let status = self.api.remove_gang(name, uid);
                Answer::Gang(status, self.api.gangs.get(name).cloned())
            }
            What::Poke { pod, .. } => {
                let found = self.api.pods.values().find(|known| known.uid == pod.as_str()).cloned();
                Answer::Status(match found {
                    Some(found) => self.api.change_pod(&found.name, &found.uid, |pod| pod.pokes += 1),
                    None => Status::Missing,
                })
            }
            What::Action { name, uid, action } => Answer::Status(self.perform(by, name, uid, action)),
        };
        if let Some(known) = self.requests.get_mut(&request) {
            known.outcome = Some(outcome);
        }
        self.soon(1, 4, Event::Reply { request, lost: false });
    }

    /// The sender hears how its request ended, or stops to wait.
    pub(crate) fn reply(&mut self, request: u64, lost: bool) {
        let Some(Request { run, .. }) = self.requests.get(&request) else {
            return;
        };
        let run = *run;
        if self.extenders.running.contains_key(&run) && self.is_paused(run, &Event::Reply { request, lost }) {
            return;
        }
        let Some(known) = self.requests.get_mut(&request) else {
            return;
        };
        let lives = self.extenders.running.contains_key(&run);
        let (what, answer) = if lost && known.outcome.is_none() && lives {
            // It may be carried out still; nobody will hear of it.
            known.run = 0;
            (known.what.clone(), None)
        } else {
            let Some(known) = self.requests.remove(&request) else {
                return;
            };
            (known.what, known.outcome.filter(|_| !lost))
        };
        let term_began = self.extenders.running.get(&run).map_or(0, |process| process.term_began);
        let ended = request <= term_began && !what.is_for_a_bind();
        if lives && !ended {
            self.heard(run, what, answer);
        }
    }

    pub(super) fn heard(&mut self, run: u32, what: What, answer: Option<Answer>) {
        match what {
            What::ReadPod { task, .. } => self.pod_read(run, task, answer),
            What::Bind { task, target, .. } => match answer {
                Some(Answer::Status(Status::Done)) => self.end(run, task, Ok(())),
                Some(Answer::Status(Status::Missing)) => self.end(run, task, Err("gone".to_owned())),
                answer => {
                    let after_conflict = answer.is_some();
                    if self.task(run, task).is_some() {
                        self.send(run, What::Look { task, name: target.name, after_conflict });
                    }
                }
            },
            What::Look { task, after_conflict, .. } => self.looked(run, task, after_conflict, answer),
            What::Create { name } => self.create_ended(run, name, answer),
            What::Get { name } => self.get_ended(run, name, answer),
            What::Put { name, status, decision, .. } => self.put_ended(run, name, status, decision, answer),
            What::Remove { name, .. } => self.remove_ended(run, name, answer),
            What::Poke { pod, cause } => {
                let failed = !matches!(answer, Some(Answer::Status(_)));
                if failed {
                    self.poke_again(run, pod, cause);
                }
            }
            What::Action { uid, action, .. } => self.deed_ended(run, &uid, &action, answer),
        }
    }

    pub(super) fn poke_again(&mut self, run: u32, pod: PodUid, cause: Cause) {
        match &cause {
            Cause::Freed(parked) => {
                let parked = parked.clone();
                self.update(run, |index| index.requeue(pod.clone(), parked));
            }
            Cause::Called => {}
        }
        self.send(run, What::Poke { pod, cause });
    }

    pub(super) fn pod_read(&mut self, run: u32, task: u64, answer: Option<Answer>) {
        let Some(known) = self.task(run, task) else {
            return;
        };
        let uid = known.target.uid.clone();
        let Some(Answer::Pod(pod)) = answer else {
            return self.end(run, task, Err("no answer".to_owned()));
        };
        let Some(pod) = pod.filter(|pod| pod.uid == uid.as_str()) else {
            return self.end(run, task, Err("gone".to_owned()));
        };
        let facts = pod.facts().clone();
        let Some(process) = self.extenders.running.get_mut(&run) else {
            return;
        };
        let request = facts.request.clone().unwrap();
        let target = process.tasks[&task].target.clone();
        process.store.update(|index| index.observe_called(facts));
        if pod.gang.is_none() {
            // What it asks for is known by now.
            let read = ReadPod { request, facts: None };
            let admitted = process.store.bind(&target, Some(read));
            match admitted {
                Ok(BindStep::Single(reserved)) => self.begin_writing(run, task, &reserved, false),
                Ok(_) => self.end(run, task, Err("a gang after all".to_owned())),
                Err(error) => self.end(run, task, Err(error.to_string())),
            }
            self.follow_up_quietly(run);
            return;
        }
        self.admit(run, task, true);
    }

    /// After a conflict, or no answer: has the pod our Binding?
    pub(super) fn looked(&mut self, run: u32, task: u64, after_conflict: bool, answer: Option<Answer>) {
        let Some(known) = self.task(run, task) else {
            return;
        };
        let target = known.target.clone();
        let Stage::Writing(writing) = known.stage.clone() else {
            return;
        };
        let deadline = known.deadline;
        let result = match answer {
            Some(Answer::Pod(pod)) => match pod.filter(|pod| pod.uid == target.uid.as_str()) {
                None => Err("gone"),
                Some(pod) => match pod.node.as_deref() {
                    None if after_conflict => Err("rejected"),
                    None => Err("no answer"),
                    Some(node)
                        if node == target.node.as_str()
                            && (writing.grant.is_none() || pod.grant == writing.grant) =>
                    {
                        Ok(())
                    }
                    Some(_) => Err("bound by another"),
                },
            },
            _ => Err("no answer"),
        };
        let again = result == Err("no answer") && writing.member && self.now + writing.pause < deadline;
        if again {
            if let Some(task) = self.task(run, task) {
                task.stage = Stage::Writing(Writing { pause: writing.pause * 2, ..writing });
            }
            self.after(writing.pause, Event::Retry { run, task });
        } else {
            self.end(run, task, result.map_err(str::to_owned));
        }
    }

    // Gang objects.
}

/// The places of a decision, for the log.
struct Places<'a>(&'a GangStatus);

impl fmt::Display for Places<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slots = self.0.decision.iter().flat_map(|decision| &decision.reservations);
        if self.0.decision.is_none() {
            f.write_str(" no decision")?;
        }
        if self.0.completed > 0 {
            write!(f, " {} completed;", self.0.completed)?;
        }
        for slot in slots {
            let pod = slot.pod.as_ref().map_or("nobody", |pod| pod.as_str());
            let ids = slot.devices.iter().flat_map(|devices| &devices.ids);
            write!(f, " {pod}")?;
            for id in ids {
                write!(f, " {id}")?;
            }
            f.write_str(";")?;
        }
        Ok(())
    }
}
