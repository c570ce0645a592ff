//! Calls of bind: the pod is assumed on its node until the answer is there, or the time limit.

use super::*;

/// A bind call that was not answered before is given up.
const HTTP_TIMEOUT: u64 = 30_000;

impl World {
    /// A pod is assumed on a node, and bind is called.
    pub(super) fn assume(&mut self, pod: &Arc<Pod>, node: &str) {
        self.scheduler.next_call += 1;
        let call = self.scheduler.next_call;
        if let Some(known) = self.scheduler.pods.get_mut(&pod.uid) {
            known.state = State::Assumed { node: node.to_owned(), call: Some(call) };
        }
        let Some(run) = self.leader() else {
            self.call_failed(&pod.uid);
            return;
        };
        self.scheduler
            .calls
            .insert(call, Call { life: self.scheduler.life, uid: pod.uid.clone(), run, task: None });
        self.after(HTTP_TIMEOUT, Event::CallTimesOut { call });
        self.note(format_args!("bind {} to {node} at {run}", pod.uid));
        let task = self.bind_called(run, call, pod, node);
        if let Some(known) = self.scheduler.calls.get_mut(&call) {
            known.task = Some(task);
        }
    }

    pub(crate) fn call_times_out(&mut self, call: u64) {
        if let Some(Call { run, task: Some(task), .. }) = self.scheduler.calls.get(&call) {
            let (run, task) = (*run, *task);
            self.played(Played::CallTimedOut);
            self.note(format_args!("bind call {call} times out"));
            self.soon(1, 5, Event::CallHungUp { run, task });
            self.call_answered(call, Some("time-out"));
        }
    }

    pub(crate) fn call_answered(&mut self, call: u64, error: Option<&str>) {
        let Some(Call { uid, life, .. }) = self.scheduler.calls.remove(&call) else {
            return;
        };
        if life != self.scheduler.life {
            return;
        }
        let Some(known) = self.scheduler.pods.get_mut(&uid) else {
            return;
        };
        match (&mut known.state, error) {
            (State::Assumed { call: of, .. }, None) if *of == Some(call) => {
                *of = None;
                known.attempts = 0;
            }
            (State::Assumed { call: of, .. }, Some(_)) if *of == Some(call) => self.call_failed(&uid),
            _ => {}
        }
    }

    /// An assumed pod is forgotten: the others may go where it was to be.
    pub(super) fn call_failed(&mut self, uid: &str) {
        self.back_off(uid);
        self.wake_parked(true);
    }

    /// The calls of an extender that was killed end at once.
    pub(crate) fn calls_end(&mut self, run: u32) {
        let calls: Vec<u64> = self
            .scheduler
            .calls
            .iter()
            .filter(|(_, call)| call.run == run)
            .map(|(number, _)| *number)
            .collect();
        for call in calls {
            let error = Some("EOF".to_owned());
            self.soon(1, 5, Event::CallAnswered { call, error });
        }
    }
}
