//! What may happen in the model, and what comes of it. What is asked of every state stands at the end.

use stateright::{Model, Property};

use crate::cluster::{
    AS_DECIDED, Call, Cluster, DECIDED_ONCE, GRANTED_ONCE, MEMBERS, Object, PODS, Pod, Protocol, Request,
    Rules, pod_of,
};

/// What may happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Event {
    // kube-scheduler
    Filter { pod: u8, extender: u8 },
    CallBind { pod: u8, extender: u8 },
    TimeOut { pod: u8 },
    // an extender
    Acquire(u8),
    StepDown(u8),
    Start(u8),
    ReadObject { extender: u8, gang: u8 },
    Plan { extender: u8, gang: u8 },
    GiveUp { extender: u8, gang: u8 },
    SeeCallEnd { extender: u8, pod: u8 },
    Commit { extender: u8, gang: u8 },
    Forget { extender: u8, gang: u8 },
    // the API server
    Execute(Request),
    // the workload
    Finish(u8),
    // faults
    LoseAnswer(Request),
    LoseRequest(Request),
    StopWaiting(Request),
    Refuse(Request),
    Crash(u8),
    TakeLease(u8),
    RestartScheduler,
    WriteObject(u8),
    Delete(u8),
}

impl Event {
    /// Whether it needs something to go wrong.
    pub(crate) fn is_fault(self) -> bool {
        matches!(
            self,
            Self::LoseAnswer(_)
                | Self::LoseRequest(_)
                | Self::StopWaiting(_)
                | Self::Refuse(_)
                | Self::Crash(_)
                | Self::TakeLease(_)
                | Self::RestartScheduler
                | Self::WriteObject(_)
                | Self::Delete(_)
        )
    }
}

impl Cluster {
    fn events(&self, events: &mut Vec<Event>) {
        for pod in 0..4u8 {
            match self.calls[usize::from(pod)] {
                Call::None => {
                    for extender in 0..2u8 {
                        if self.pods[usize::from(pod)].on.is_none()
                            && self.extenders[usize::from(extender)].answer(pod).is_some()
                        {
                            events.push(Event::Filter { pod, extender });
                        }
                    }
                }
                Call::Chosen(_) => {
                    for extender in 0..2u8 {
                        if self.extenders[usize::from(extender)].leads() {
                            events.push(Event::CallBind { pod, extender });
                        }
                    }
                    events.push(Event::TimeOut { pod });
                }
                Call::Open { .. } => events.push(Event::TimeOut { pod }),
                Call::Believed => {}
            }
            if self.left.deletions > 0 && !self.pods[usize::from(pod)].ended {
                events.push(Event::Delete(pod));
            }
        }
        for extender in 0..2u8 {
            self.events_of(extender, events);
        }
        for gang in 0..2u8 {
            let all_run = (0..MEMBERS)
                .all(|member| self.pods[usize::from(pod_of(usize::from(gang), member))].on.is_some());
            if all_run && !self.is_over(usize::from(gang)) {
                events.push(Event::Finish(gang));
            }
            if self.left.foreign_writes > 0 {
                events.push(Event::WriteObject(gang));
            }
        }
        for request in &self.requests {
            events.push(Event::Execute(*request));
            if self.left.lost > 0 {
                events.push(Event::LoseAnswer(*request));
                events.push(Event::LoseRequest(*request));
                events.push(Event::StopWaiting(*request));
            }
            if self.left.refused > 0 && matches!(request, Request::Decide { .. }) {
                events.push(Event::Refuse(*request));
            }
        }
        if self.left.scheduler_restarts > 0 {
            events.push(Event::RestartScheduler);
        }
    }

    /// What happens, or `None` where nothing would change.
    pub(crate) fn after(&self, event: Event, rules: &Rules) -> Option<Self> {
        let mut next = self.clone();
        match event {
            Event::Filter { pod, extender } => {
                let place = self.extenders[usize::from(extender)].answer(pod)?;
                next.calls[usize::from(pod)] = Call::Chosen(place);
            }
            Event::TimeOut { pod } => next.calls[usize::from(pod)] = Call::None,
            Event::Execute(request) => next.execute(request, true, rules),
            Event::LoseAnswer(request) => {
                next.left.lost -= 1;
                next.execute(request, false, rules);
            }
            Event::LoseRequest(request) => {
                next.left.lost -= 1;
                next.requests.retain(|known| *known != request);
                next.unanswered(request);
            }
            Event::StopWaiting(request) => {
                next.left.lost -= 1;
                next.unanswered(request);
            }
            Event::Refuse(request) => {
                next.left.refused -= 1;
                next.requests.retain(|known| *known != request);
                next.refused(request, rules);
            }
            Event::Finish(gang) => {
                for member in 0..MEMBERS {
                    next.pods[usize::from(pod_of(usize::from(gang), member))] =
                        Pod { uid: 0, on: None, ended: true };
                }
                next.objects[usize::from(gang)].decision = None;
            }
            Event::RestartScheduler => {
                next.left.scheduler_restarts -= 1;
                next.calls = [Call::None; PODS];
            }
            Event::WriteObject(gang) => {
                next.left.foreign_writes -= 1;
                next.outdate(usize::from(gang));
            }
            Event::Delete(pod) => {
                next.left.deletions -= 1;
                let uid = self.pods[usize::from(pod)].uid + 1;
                next.pods[usize::from(pod)] = Pod { uid, on: None, ended: false };
                next.calls[usize::from(pod)] = Call::None;
            }
            _ => next.extender_does(event, rules)?,
        }
        next.drop_what_is_nothing(rules);
        (next != *self).then_some(next)
    }

    /// An object was written: what is known of it is outdated.
    pub(crate) fn outdate(&mut self, gang: usize) {
        for extender in &mut self.extenders {
            extender.outdate(gang);
        }
        for request in &mut self.requests {
            if let Request::Decide { gang: of, newest, .. } = request
                && usize::from(*of) == gang
            {
                *newest = false;
            }
        }
        self.requests.sort_unstable();
        self.requests.dedup();
    }

    /// Leaves out what can change nothing any more, so that states that behave alike are one.
    fn drop_what_is_nothing(&mut self, rules: &Rules) {
        for (pod, call) in self.pods.iter().zip(&mut self.calls) {
            if pod.on.is_some() || pod.ended {
                *call = Call::None;
            }
        }
        if !(rules.uid_checked && rules.version_checked) {
            return;
        }
        let mut requests = std::mem::take(&mut self.requests);
        requests.retain(|request| match *request {
            Request::Bind { pod, uid, .. } => {
                let pod = self.pods[usize::from(pod)];
                pod.uid == uid && pod.on.is_none() && !pod.ended
            }
            Request::Decide { newest, .. } => newest || self.writer(*request).is_some(),
        });
        self.requests = requests;
    }

    /// The API server carries a request out, and its sender perhaps hears of it.
    fn execute(&mut self, request: Request, answered: bool, rules: &Rules) {
        self.requests.retain(|known| *known != request);
        match request {
            Request::Decide { term, gang, newest, slots, .. } => {
                let done = newest || !rules.version_checked;
                if done {
                    self.outdate(usize::from(gang));
                    self.objects[usize::from(gang)] = Object { mark: term, decision: Some(slots) };
                }
                if answered {
                    self.decided(request, done);
                } else {
                    self.unanswered(request);
                }
            }
            Request::Bind { pod, uid, device } => {
                let there = &mut self.pods[usize::from(pod)];
                let same = there.uid == uid || !rules.uid_checked;
                if same && there.on.is_none() && !there.ended {
                    there.on = Some(device);
                }
                if answered && there.uid == uid && matches!(self.calls[usize::from(pod)], Call::Open { .. }) {
                    self.calls[usize::from(pod)] =
                        if there.on.is_some() { Call::Believed } else { Call::None };
                }
            }
        }
    }
}

impl Model for Protocol {
    type State = Cluster;
    type Action = Event;

    fn init_states(&self) -> Vec<Cluster> {
        vec![Cluster::new(self.faults)]
    }

    fn actions(&self, state: &Cluster, actions: &mut Vec<Event>) {
        state.events(actions);
    }

    fn next_state(&self, state: &Cluster, event: Event) -> Option<Cluster> {
        state.after(event, &self.rules)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(GRANTED_ONCE, |_, state: &Cluster| state.grants_are_disjoint()),
            Property::always(AS_DECIDED, |_, state: &Cluster| state.bound_as_decided()),
            Property::always(DECIDED_ONCE, |_, state: &Cluster| state.decisions_are_disjoint()),
            Property::sometimes("both gangs run, and nothing is kept", |_, state: &Cluster| state.is_done()),
        ]
    }
}
