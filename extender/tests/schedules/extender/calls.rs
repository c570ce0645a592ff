//! kube-scheduler's calls to an extender: filter and prioritize by the real service, bind with its barrier and its time limits.

use super::*;

/// Why a member leaves that has waited as long as it may.
const ALONE: &str = "its members did not all come";

impl World {
    pub(crate) fn ask_filter(&mut self, body: &[u8]) -> Option<(u32, Vec<u8>)> {
        let run = self.leader()?;
        let process = self.extenders.running.get(&run)?;
        let answer = process.service.filter(body).ok()?;
        self.follow_up(run);
        Some((run, answer))
    }

    pub(crate) fn ask_preempt(&mut self, body: &[u8]) -> Option<Vec<u8>> {
        let run = self.leader()?;
        let answer = self.extenders.running.get(&run)?.service.preempt(body).ok()?;
        self.follow_up(run);
        Some(answer)
    }

    /// The best of some nodes, by the extender's word.
    pub(crate) fn ask_prioritize(&mut self, body: &[u8], nodes: &[String]) -> String {
        let scores = self.leader().and_then(|run| {
            let answer = self.extenders.running.get(&run)?.service.prioritize(body).ok()?;
            self.follow_up(run);
            serde_json::from_slice::<serde_json::Value>(&answer).ok()
        });
        let scores = scores.unwrap_or_default();
        let score = |node: &String| {
            let found = scores.as_array().into_iter().flatten().find(|score| score["Host"] == **node);
            found.and_then(|score| score["Score"].as_i64()).unwrap_or_default()
        };
        let best = nodes.iter().map(&score).max().unwrap_or_default();
        let best: Vec<&String> = nodes.iter().filter(|node| score(node) == best).collect();
        best[self.dice.index(best.len())].clone()
    }

    pub(crate) fn bind_called(&mut self, run: u32, call: u64, pod: &Arc<Pod>, node: &str) -> u64 {
        let target = Target {
            uid: pod.uid.as_str().into(),
            namespace: "default".to_owned(),
            name: pod.name.clone(),
            node: node.into(),
        };
        self.begin_bind(run, target, Some(call))
    }

    /// A bind that kube-scheduler called for, or one for a member that had come and left.
    pub(super) fn begin_bind(&mut self, run: u32, target: Target, call: Option<u64>) -> u64 {
        self.extenders.arrived.insert((run, target.uid.to_string()), target.node.clone());
        self.extenders.next_task += 1;
        let number = self.extenders.next_task;
        let task = Task {
            target,
            own: call.is_none(),
            call,
            stage: Stage::Reading,
            deadline: self.now + self.extenders.barrier,
        };
        if let Some(process) = self.extenders.running.get_mut(&run) {
            process.tasks.insert(number, task);
        }
        self.admit(run, number, false);
        number
    }

    /// Asks the index what becomes of a bind.
    pub(super) fn admit(&mut self, run: u32, number: u64, was_read: bool) {
        let Some(task) = self.task(run, number) else {
            return;
        };
        let (target, waited, deadline) =
            (task.target.clone(), matches!(task.stage, Stage::Waiting), task.deadline);
        let Some(process) = self.extenders.running.get(&run) else {
            return;
        };
        let admitted = process.store.bind(&target, None);
        match admitted {
            Err(BindError::UnknownPod(_)) if !was_read && !waited => {
                let name = target.name;
                self.send(run, What::ReadPod { task: number, name });
            }
            Err(error) => self.end(run, number, Err(error.to_string())),
            Ok(BindStep::Single(reserved)) => self.begin_writing(run, number, &reserved, false),
            Ok(BindStep::Member(reserved)) => {
                let deadline = self.now + BIND;
                if let Some(task) = self.task(run, number) {
                    task.deadline = deadline;
                }
                self.after(BIND / 3, Event::MemberAnswer { run, task: number });
                self.begin_writing(run, number, &reserved, true);
            }
            Ok(BindStep::Wait(_)) if self.now >= deadline => {
                self.end(run, number, Err(ALONE.to_owned()));
            }
            Ok(BindStep::Wait(_)) => {
                if let Some(task) = self.task(run, number) {
                    task.stage = Stage::Waiting;
                }
                if !waited {
                    // It asks twice at least: the gang may have moved between the first and the notification.
                    self.want_to_ask(run);
                }
                let polls = self
                    .extenders
                    .running
                    .get_mut(&run)
                    .is_some_and(|process| std::mem::replace(&mut process.polls, true));
                if !polls {
                    self.after(500, Event::Poll { run });
                }
            }
        }
        self.follow_up_quietly(run);
    }

    /// What follows from a question: not that others ask again, unless there was work.
    pub(super) fn follow_up_quietly(&mut self, run: u32) {
        let Some(process) = self.extenders.running.get(&run) else {
            return;
        };
        let due = process.store.read(|index| index.has_work() || index.has_called() || index.has_deferred());
        if due {
            self.follow_up(run);
        }
    }

    pub(super) fn task(&mut self, run: u32, number: u64) -> Option<&mut Task> {
        self.extenders.running.get_mut(&run)?.tasks.get_mut(&number)
    }

    pub(crate) fn ask_again(&mut self, run: u32) {
        if self.is_paused(run, &Event::AskAgain { run }) {
            return;
        }
        let Some(process) = self.extenders.running.get_mut(&run) else {
            return;
        };
        process.asks = false;
        self.ask_all(run);
    }

    pub(crate) fn poll(&mut self, run: u32) {
        if self.is_paused(run, &Event::Poll { run }) {
            return;
        }
        if let Some(process) = self.extenders.running.get_mut(&run) {
            process.polls = false;
        }
        self.ask_all(run);
    }

    pub(super) fn ask_all(&mut self, run: u32) {
        let Some(process) = self.extenders.running.get_mut(&run) else {
            return;
        };
        let waiting: Vec<u64> = process
            .tasks
            .iter()
            .filter(|(_, task)| matches!(task.stage, Stage::Waiting))
            .map(|(number, _)| *number)
            .collect();
        for number in waiting {
            self.admit(run, number, true);
        }
    }

    pub(super) fn begin_writing(&mut self, run: u32, number: u64, reserved: &BindGrant, member: bool) {
        let grant = match reserved {
            BindGrant::AlreadyBound => {
                self.end(run, number, Ok(()));
                return;
            }
            BindGrant::Plain => None,
            BindGrant::Grant { annotation, .. } => Some(Arc::clone(annotation)),
        };
        if let Some(task) = self.task(run, number) {
            let target = task.target.clone();
            task.stage = Stage::Writing(Writing { grant, member, pause: 200 });
            if member {
                self.check_written(&target);
            }
        }
        self.post(run, number);
    }

    pub(super) fn post(&mut self, run: u32, number: u64) {
        let Some(task) = self.task(run, number) else {
            return;
        };
        let Stage::Writing(writing) = &task.stage else {
            return;
        };
        let what = What::Bind {
            task: number,
            target: task.target.clone(),
            grant: writing.grant.clone(),
            member: writing.member,
        };
        self.send(run, what);
    }

    pub(crate) fn retry(&mut self, run: u32, number: u64) {
        if self.is_paused(run, &Event::Retry { run, task: number }) {
            return;
        }
        let Some(target) = self.task(run, number).map(|task| task.target.clone()) else {
            return;
        };
        match self.update(run, |index| index.may_repeat(&target)) {
            Some(Ok(())) => self.post(run, number),
            _ => self.end(run, number, Err("no answer".to_owned())),
        }
    }

    /// kube-scheduler must hear something about a member before it gives up.
    pub(crate) fn member_answer(&mut self, run: u32, number: u64) {
        let call = self.task(run, number).and_then(|task| task.call.take());
        if let Some(call) = call {
            let error = Some("no answer in time".to_owned());
            self.soon(1, 3, Event::CallAnswered { call, error });
        }
    }

    pub(crate) fn hung_up(&mut self, run: u32, number: u64) {
        let Some(task) = self.task(run, number) else {
            return;
        };
        task.call = None;
        match &task.stage {
            // It is carried out by a task of its own.
            Stage::Writing(writing) if writing.member => {}
            _ => self.end(run, number, Err("hung up".to_owned())),
        }
    }

    /// A bind has ended, or nobody waits for it any more.
    pub(super) fn end(&mut self, run: u32, number: u64, result: Result<(), String>) {
        let instant = self.instant();
        let Some(process) = self.extenders.running.get_mut(&run) else {
            return;
        };
        let Some(task) = process.tasks.remove(&number) else {
            return;
        };
        let uid = task.target.uid.clone();
        if let Some(call) = task.call {
            if result.is_ok() {
                self.check_done(&task.target);
            }
            let error = result.as_ref().err().cloned();
            self.note(format_args!("bind {uid}: {result:?}"));
            self.soon(1, 3, Event::CallAnswered { call, error });
        }
        match &task.stage {
            Stage::Reading => {}
            Stage::Waiting if result.as_ref().is_err_and(|error| error == ALONE) => {
                self.update(run, |index| index.gave_up(&uid));
            }
            Stage::Waiting => {
                self.update(run, |index| index.withdraw(&uid));
            }
            Stage::Writing(writing) => {
                let granted = writing.grant.is_some();
                let member = writing.member;
                let (outcome, end) = match &result {
                    Ok(()) => (Outcome::Bound, BindEnd::Bound),
                    Err(error) => match error.as_str() {
                        "no answer" | "hung up" => (Outcome::Unsure, BindEnd::Unsure),
                        "gone" => (Outcome::Failed, BindEnd::Gone),
                        "bound by another" => (Outcome::Failed, BindEnd::Unsure),
                        _ => (Outcome::Failed, BindEnd::Failed),
                    },
                };
                if member && granted {
                    self.update(run, |index| index.bind_ended(&uid, end));
                }
                if granted {
                    self.update(run, |index| index.finish(instant, &task.target, outcome));
                }
            }
        }
        if task.own && result.is_err() {
            self.update(run, |index| index.bring_again(&uid));
        }
    }

    /// "Done" is answered only where it is.
    pub(super) fn check_done(&mut self, target: &Target) {
        let there = self.api.pod(&target.name, target.uid.as_str());
        if there.is_some_and(|pod| pod.node.as_deref() != Some(target.node.as_str())) {
            self.wrong(format!("bind of pod {} is answered as done, and it is not bound", target.uid));
        }
    }

    // Requests.
}
