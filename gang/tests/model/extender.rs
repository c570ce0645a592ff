//! What an extender knows and does. It plans one gang after the other on the devices it does not keep, keeps them until it knows that
//! the gang is over, and writes before it binds.

use crate::cluster::{
    Call, Cluster, DEVICES, GANGS, MEMBERS, Request, Rules, Slot, Slots, gang_of, member_of, pod_of,
};
use crate::events::Event;

/// An extender.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Extender {
    /// Killed.
    Down,
    /// It runs, and does not lead.
    Standby,
    /// It believes that it leads: since it got the Lease for the `term`th time that it went to anybody.
    Leader { term: u8, minds: [Mind; GANGS] },
}

/// What a leader knows of a gang, and whether the version of the object that it saw or wrote last is the newest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Mind {
    /// Its object has not been read since this run leads. Nothing is planned while there is one such.
    Unread,
    /// It has no place.
    Waiting { newest: bool },
    /// Places are kept, and these pods have called.
    Planned { newest: bool, at: [u8; MEMBERS], called: [Option<u8>; MEMBERS] },
    /// The decision is being written.
    Writing { slots: Slots, doubt: bool },
    /// It may not have been written. The places are kept. `doubt`: a write of it may still succeed.
    Unknown { slots: Slots, doubt: bool },
    /// Decided.
    Decided { newest: bool, slots: Slots },
    /// Over.
    Over,
}

impl Mind {
    fn keeps(&self, device: u8) -> bool {
        match self {
            Self::Planned { at, .. } => at.contains(&device),
            Self::Writing { slots, .. } | Self::Unknown { slots, .. } | Self::Decided { slots, .. } => {
                slots.iter().any(|slot| slot.device == device)
            }
            Self::Unread | Self::Waiting { .. } | Self::Over => false,
        }
    }
}

impl Extender {
    pub(crate) fn leads(&self) -> bool {
        matches!(self, Self::Leader { .. })
    }

    /// Whether it leads and has not read everything.
    pub(crate) fn has_unread(&self) -> bool {
        matches!(self, Self::Leader { minds, .. } if minds.contains(&Mind::Unread))
    }

    pub(crate) fn keeps_anything(&self) -> bool {
        match self {
            Self::Leader { minds, .. } => {
                (0..DEVICES).any(|device| minds.iter().any(|mind| mind.keeps(device)))
            }
            Self::Down | Self::Standby => false,
        }
    }

    /// What filter answers for a pod: its place, if it has one. Nothing follows from it.
    pub(crate) fn answer(&self, pod: u8) -> Option<u8> {
        let Self::Leader { minds, .. } = self else {
            return None;
        };
        match minds[gang_of(pod)] {
            Mind::Planned { at, .. } => Some(at[member_of(pod)]),
            Mind::Decided { slots, .. } => Some(slots[member_of(pod)].device),
            _ => None,
        }
    }

    /// The object of a gang was written, perhaps by another.
    pub(crate) fn outdate(&mut self, gang: usize) {
        if let Some(Mind::Waiting { newest } | Mind::Planned { newest, .. } | Mind::Decided { newest, .. }) =
            self.mind(gang)
        {
            *newest = false;
        }
    }

    fn mind(&mut self, gang: usize) -> Option<&mut Mind> {
        match self {
            Self::Leader { minds, .. } => Some(&mut minds[gang]),
            Self::Down | Self::Standby => None,
        }
    }
}

impl Cluster {
    /// What an extender may do or suffer.
    pub(crate) fn events_of(&self, extender: u8, events: &mut Vec<Event>) {
        let other_is_down = self.extenders[usize::from(1 - extender)] == Extender::Down;
        match self.extenders[usize::from(extender)] {
            Extender::Down => events.push(Event::Start(extender)),
            Extender::Standby => {
                if self.lease == extender || other_is_down {
                    events.push(Event::Acquire(extender));
                } else if self.left.leader_changes > 0 {
                    events.push(Event::TakeLease(extender));
                }
            }
            Extender::Leader { minds, .. } => {
                if self.lease != extender {
                    events.push(Event::StepDown(extender));
                }
                for gang in 0..2u8 {
                    self.events_of_gang(extender, gang, &minds, events);
                }
            }
        }
        if self.left.crashes > 0 && self.extenders[usize::from(extender)].leads() {
            events.push(Event::Crash(extender));
        }
    }

    fn events_of_gang(&self, extender: u8, gang: u8, minds: &[Mind; GANGS], events: &mut Vec<Event>) {
        let over = self.is_over(usize::from(gang));
        match minds[usize::from(gang)] {
            Mind::Unread | Mind::Unknown { .. } => events.push(Event::ReadObject { extender, gang }),
            Mind::Waiting { .. } => {
                if !minds.contains(&Mind::Unread) && !over {
                    events.push(Event::Plan { extender, gang });
                }
            }
            Mind::Planned { called, .. } => {
                if called.iter().all(Option::is_some) {
                    events.push(Event::Commit { extender, gang });
                }
                events.push(Event::GiveUp { extender, gang });
                for (member, uid) in called.into_iter().enumerate() {
                    let pod = pod_of(usize::from(gang), member);
                    let open = self.calls[usize::from(pod)] == Call::Open { extender };
                    if uid.is_some_and(|uid| !open || uid != self.pods[usize::from(pod)].uid) {
                        events.push(Event::SeeCallEnd { extender, pod });
                    }
                }
            }
            Mind::Decided { .. } if over => events.push(Event::Forget { extender, gang }),
            Mind::Writing { .. } | Mind::Decided { .. } | Mind::Over => {}
        }
    }

    pub(crate) fn extender_does(&mut self, event: Event, rules: &Rules) -> Option<()> {
        match event {
            Event::Acquire(extender) => self.lead(extender),
            Event::TakeLease(extender) => {
                self.left.leader_changes -= 1;
                self.lead(extender);
            }
            Event::StepDown(extender) => self.step_down(extender),
            Event::Crash(extender) => {
                self.left.crashes -= 1;
                self.hang_up(extender, None);
                self.extenders[usize::from(extender)] = Extender::Down;
            }
            Event::Start(extender) => self.extenders[usize::from(extender)] = Extender::Standby,
            Event::ReadObject { extender, gang } => self.read_object(extender, gang, rules),
            Event::Plan { extender, gang } => self.plan(extender, gang)?,
            Event::GiveUp { extender, gang } => {
                self.hang_up(extender, Some(gang));
                let mind = self.extenders[usize::from(extender)].mind(usize::from(gang))?;
                if let Mind::Planned { newest, .. } = *mind {
                    *mind = Mind::Waiting { newest };
                }
            }
            Event::SeeCallEnd { extender, pod } => {
                let mind = self.extenders[usize::from(extender)].mind(gang_of(pod))?;
                if let Mind::Planned { called, .. } = mind {
                    called[member_of(pod)] = None;
                }
            }
            Event::Commit { extender, gang } => self.commit(extender, gang, rules)?,
            Event::Forget { extender, gang } => {
                *self.extenders[usize::from(extender)].mind(usize::from(gang))? = Mind::Over;
            }
            Event::CallBind { pod, extender } => self.called(pod, extender, rules)?,
            _ => return None,
        }
        Some(())
    }

    fn lead(&mut self, extender: u8) {
        self.lease = extender;
        self.terms += 1;
        self.extenders[usize::from(extender)] =
            Extender::Leader { term: self.terms, minds: [Mind::Unread; GANGS] };
    }

    fn step_down(&mut self, extender: u8) {
        self.hang_up(extender, None);
        self.extenders[usize::from(extender)] = Extender::Standby;
    }

    /// Calls at an extender end with an error.
    fn hang_up(&mut self, extender: u8, gang: Option<u8>) {
        for pod in 0..4u8 {
            if gang.is_none_or(|gang| gang_of(pod) == usize::from(gang))
                && self.calls[usize::from(pod)] == (Call::Open { extender })
            {
                self.calls[usize::from(pod)] = Call::None;
            }
        }
    }

    /// Reads a gang's object and puts this leader's mark on it, over the version read, until that succeeds: as good as in one step.
    fn read_object(&mut self, extender: u8, gang: u8, rules: &Rules) {
        let Extender::Leader { term, minds } = self.extenders[usize::from(extender)] else {
            return;
        };
        let mind = minds[usize::from(gang)];
        let mark = self.objects[usize::from(gang)].mark;
        let later = if rules.marks_ordered { mark > term } else { mark != term && mind != Mind::Unread };
        if later && rules.marks_obeyed && rules.leader_marks {
            self.step_down(extender);
            return;
        }
        let over = self.is_over(usize::from(gang));
        if mind == Mind::Unread && rules.leader_marks && !over {
            self.outdate(usize::from(gang));
            self.objects[usize::from(gang)].mark = term;
        }
        let decision = self.objects[usize::from(gang)].decision.filter(|_| rules.decisions_taken_up);
        let newest = true;
        let new = match (decision, mind) {
            _ if over => Mind::Over,
            (Some(slots), _) => Mind::Decided { newest, slots },
            (None, Mind::Unknown { slots, doubt }) if rules.unknown_repeated => {
                self.send(Request::Decide { term, gang, newest, slots, doubt });
                Mind::Writing { slots, doubt }
            }
            (None, _) => Mind::Waiting { newest },
        };
        if matches!(new, Mind::Waiting { .. }) {
            self.hang_up(extender, Some(gang));
        }
        if let Some(mind) = self.extenders[usize::from(extender)].mind(usize::from(gang)) {
            *mind = new;
        }
    }

    /// The first devices that this extender does not keep, and it alone: what others have it knows from the objects.
    fn plan(&mut self, extender: u8, gang: u8) -> Option<()> {
        let Extender::Leader { minds, .. } = &mut self.extenders[usize::from(extender)] else {
            return None;
        };
        let Mind::Waiting { newest } = minds[usize::from(gang)] else {
            return None;
        };
        let mut free = (0..DEVICES).filter(|device| !minds.iter().any(|mind| mind.keeps(*device)));
        let at = [free.next()?, free.next()?];
        drop(free);
        minds[usize::from(gang)] = Mind::Planned { newest, at, called: [None; MEMBERS] };
        Some(())
    }

    /// kube-scheduler calls bind for a pod.
    fn called(&mut self, pod: u8, extender: u8, rules: &Rules) -> Option<()> {
        let Call::Chosen(device) = self.calls[usize::from(pod)] else {
            return None;
        };
        let uid = self.pods[usize::from(pod)].uid;
        let (gang, member) = (gang_of(pod), member_of(pod));
        // Until something better is known: an error.
        self.calls[usize::from(pod)] = Call::None;
        let Extender::Leader { term, minds } = &mut self.extenders[usize::from(extender)] else {
            return Some(());
        };
        match &mut minds[gang] {
            Mind::Planned { at, called, .. } if at[member] == device => {
                called[member] = Some(uid);
                self.calls[usize::from(pod)] = Call::Open { extender };
            }
            Mind::Decided { slots, .. }
                if slots[member].device == device
                    && (slots[member].uid == uid || !rules.replacements_written) =>
            {
                self.calls[usize::from(pod)] =
                    if rules.honest { Call::Open { extender } } else { Call::Believed };
                self.send(Request::Bind { pod, uid, device });
            }
            Mind::Writing { slots, .. } | Mind::Unknown { slots, .. }
                if slots[member] == (Slot { device, uid }) =>
            {
                self.calls[usize::from(pod)] = Call::Open { extender };
                // A replacement of its sibling is being written: its own place is written already.
                let written = self.objects[gang].decision;
                if written.is_some_and(|slots| slots[member] == (Slot { device, uid })) {
                    self.send(Request::Bind { pod, uid, device });
                }
            }
            mind => {
                // The place of a pod that is gone: this one takes it over.
                if let Mind::Decided { newest, slots } = *mind
                    && slots[member].device == device
                {
                    let mut slots = slots;
                    slots[member].uid = uid;
                    let (gang, doubt) = (u8::try_from(gang).unwrap(), false);
                    *mind = Mind::Writing { slots, doubt };
                    let request = Request::Decide { term: *term, gang, newest, slots, doubt };
                    self.calls[usize::from(pod)] = Call::Open { extender };
                    self.send(request);
                }
            }
        }
        Some(())
    }

    /// All have called: the decision goes out.
    fn commit(&mut self, extender: u8, gang: u8, rules: &Rules) -> Option<()> {
        let Extender::Leader { term, minds } = &mut self.extenders[usize::from(extender)] else {
            return None;
        };
        let Mind::Planned { newest, at, called } = minds[usize::from(gang)] else {
            return None;
        };
        let slot = |member: usize| Some(Slot { device: at[member], uid: called[member]? });
        let slots = [slot(0)?, slot(1)?];
        minds[usize::from(gang)] = Mind::Writing { slots, doubt: false };
        let request = Request::Decide { term: *term, gang, newest, slots, doubt: false };
        self.send(request);
        if !rules.persist_first {
            self.bind_all(gang, slots);
        }
        Some(())
    }

    fn bind_all(&mut self, gang: u8, slots: Slots) {
        for (member, slot) in slots.into_iter().enumerate() {
            let pod = pod_of(usize::from(gang), member);
            // What it knows to be bound it leaves; what it does not know the API server refuses.
            if self.pods[usize::from(pod)].on.is_none() {
                self.send(Request::Bind { pod, uid: slot.uid, device: slot.device });
            }
        }
    }

    /// The answer to a decision's write: it is done, or another was faster.
    pub(crate) fn decided(&mut self, request: Request, done: bool) {
        let Request::Decide { gang, slots, doubt, .. } = request else {
            return;
        };
        let Some(mind) = self.writer(request) else {
            return;
        };
        if done {
            *mind = Mind::Decided { newest: true, slots };
            self.bind_all(gang, slots);
        } else {
            *mind = Mind::Unknown { slots, doubt };
        }
    }

    /// A decision is refused. The first of a gang gives its places back, unless a write of it may still succeed; a later one, of which some
    /// may be bound, is looked after.
    pub(crate) fn refused(&mut self, request: Request, rules: &Rules) {
        let Request::Decide { gang, newest, doubt, .. } = request else {
            return;
        };
        let first = self.objects[usize::from(gang)].decision.is_none();
        if !first || doubt && rules.doubt_kept {
            self.unanswered(request);
            return;
        }
        let Some(mind) = self.writer(request) else {
            return;
        };
        *mind = Mind::Waiting { newest };
        let of_term = |extender: &&Extender| matches!((extender, request), (Extender::Leader { term, .. }, Request::Decide { term: sent, .. }) if *term == sent);
        let at = self.extenders.iter().position(|extender| of_term(&extender));
        if let Some(at) = at.and_then(|at| u8::try_from(at).ok()) {
            self.hang_up(at, Some(gang));
        }
    }

    /// A request was lost, or its answer.
    pub(crate) fn unanswered(&mut self, request: Request) {
        if let Request::Decide { slots, .. } = request
            && let Some(mind) = self.writer(request)
        {
            *mind = Mind::Unknown { slots, doubt: true };
        }
    }

    /// What the sender of a decision's write knows of the gang, if it waits for the answer still.
    pub(crate) fn writer(&mut self, request: Request) -> Option<&mut Mind> {
        let Request::Decide { term, gang, slots, doubt, .. } = request else {
            return None;
        };
        self.extenders.iter_mut().find_map(|extender| match extender {
            Extender::Leader { term: known, minds } if *known == term => {
                let mind = &mut minds[usize::from(gang)];
                (*mind == Mind::Writing { slots, doubt }).then_some(mind)
            }
            _ => None,
        })
    }
}
