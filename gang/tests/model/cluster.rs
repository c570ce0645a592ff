//! The world of the model: an API server, kube-scheduler, requests under way, two extenders of which one leads, and what may fail.
//! One device per node; a member needs one, so that a place is a number.

use crate::extender::Extender;

pub(crate) const GANGS: usize = 2;
pub(crate) const MEMBERS: usize = 2;
pub(crate) const PODS: usize = GANGS * MEMBERS;
/// Every device is in one live grant at most.
pub(crate) const GRANTED_ONCE: &str = "no device is in two live grants";
/// What is bound stands in the decision, pod and place.
pub(crate) const AS_DECIDED: &str = "nothing is bound but as it is decided";
/// Every device is in one decision at most.
pub(crate) const DECIDED_ONCE: &str = "no device is in two decisions";
/// Enough for one gang.
pub(crate) const DEVICES: u8 = 2;

/// How often each thing may fail still.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) struct Faults {
    /// An extender is killed. What it has sent is under way.
    pub(crate) crashes: u8,
    /// The Lease goes to the other, while the former believes that it has it.
    pub(crate) leader_changes: u8,
    /// kube-scheduler is killed, and all its calls end.
    pub(crate) scheduler_restarts: u8,
    /// A request or its answer is lost, or its sender waits no longer, while it is under way still. (Late they all are: anything may happen
    /// between a request's sending and its execution.)
    pub(crate) lost: u8,
    /// A decision is refused: it may not be written, or cannot be as it is.
    pub(crate) refused: u8,
    /// Somebody else writes a gang object.
    pub(crate) foreign_writes: u8,
    /// A pod is deleted and made anew under its name.
    pub(crate) deletions: u8,
}

/// The safeguards of the protocol. Each can be left out, to see that it is needed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules {
    /// The decision is written before any Binding is sent.
    pub(crate) persist_first: bool,
    /// A decision is written only over the version that was read.
    pub(crate) version_checked: bool,
    /// A new leader writes every gang object before it plans.
    pub(crate) leader_marks: bool,
    /// A leader that finds a later one's mark in an object stops.
    pub(crate) marks_obeyed: bool,
    /// A later one's mark is told from an earlier one's.
    pub(crate) marks_ordered: bool,
    /// A Binding is for one UID.
    pub(crate) uid_checked: bool,
    /// A write without an answer is repeated as it was.
    pub(crate) unknown_repeated: bool,
    /// It is repeated until it succeeds, also if a repetition is refused.
    pub(crate) doubt_kept: bool,
    /// Decisions that are found are taken up.
    pub(crate) decisions_taken_up: bool,
    /// The pod that takes over a place is written into the decision before it is bound.
    pub(crate) replacements_written: bool,
    /// kube-scheduler is told that a pod is bound only when it is.
    pub(crate) honest: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            persist_first: true,
            version_checked: true,
            leader_marks: true,
            marks_obeyed: true,
            marks_ordered: true,
            uid_checked: true,
            unknown_repeated: true,
            doubt_kept: true,
            decisions_taken_up: true,
            replacements_written: true,
            honest: true,
        }
    }
}

/// What is checked.
#[derive(Debug, Clone)]
pub(crate) struct Protocol {
    pub(crate) faults: Faults,
    pub(crate) rules: Rules,
}

/// A pod as the API server has it. Its gang and its number in it follow from its index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Pod {
    pub(crate) uid: u8,
    /// The device of its grant, and with it its node.
    pub(crate) on: Option<u8>,
    pub(crate) ended: bool,
}

/// A gang object. Of its resourceVersion only this matters: whether what somebody has read or wants to write over is the newest.
/// What is outdated once is so for ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Object {
    /// The term of the leader whose mark it bears.
    pub(crate) mark: u8,
    pub(crate) decision: Option<Slots>,
}

/// A place for every member.
pub(crate) type Slots = [Slot; MEMBERS];

/// A place, and which pod has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Slot {
    pub(crate) device: u8,
    pub(crate) uid: u8,
}

/// A pod in kube-scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Call {
    /// In the queue.
    None,
    /// Filter has named a node; bind has not been called.
    Chosen(u8),
    /// Bind is called at this extender and not answered.
    Open { extender: u8 },
    /// It was told that the pod is bound. It does not try again.
    Believed,
}

/// A request under way to the API server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Request {
    /// A decision, over the newest version or one that was it. `doubt`: an earlier write of it may still succeed.
    Decide { term: u8, gang: u8, newest: bool, slots: Slots, doubt: bool },
    /// A Binding.
    Bind { pod: u8, uid: u8, device: u8 },
}

/// All there is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Cluster {
    pub(crate) pods: [Pod; PODS],
    pub(crate) objects: [Object; GANGS],
    /// Who has the Lease.
    pub(crate) lease: u8,
    pub(crate) extenders: [Extender; 2],
    pub(crate) calls: [Call; PODS],
    /// Sorted.
    pub(crate) requests: Vec<Request>,
    /// How often the Lease went to somebody.
    pub(crate) terms: u8,
    pub(crate) left: Faults,
}

pub(crate) fn gang_of(pod: u8) -> usize {
    usize::from(pod) / MEMBERS
}

pub(crate) fn member_of(pod: u8) -> usize {
    usize::from(pod) % MEMBERS
}

pub(crate) fn pod_of(gang: usize, member: usize) -> u8 {
    u8::try_from(gang * MEMBERS + member).unwrap()
}

impl Cluster {
    pub(crate) fn new(left: Faults) -> Self {
        Self {
            pods: [Pod { uid: 0, on: None, ended: false }; PODS],
            objects: [Object { mark: 0, decision: None }; GANGS],
            lease: 0,
            extenders: [Extender::Standby; 2],
            calls: [Call::None; PODS],
            requests: Vec::new(),
            terms: 0,
            left,
        }
    }

    pub(crate) fn send(&mut self, request: Request) {
        if let Err(at) = self.requests.binary_search(&request) {
            self.requests.insert(at, request);
        }
    }

    /// Whether all pods of a gang have ended.
    pub(crate) fn is_over(&self, gang: usize) -> bool {
        (0..MEMBERS).all(|member| self.pods[usize::from(pod_of(gang, member))].ended)
    }

    /// All have run, and nobody keeps anything.
    pub(crate) fn is_done(&self) -> bool {
        self.pods.iter().all(|pod| pod.ended)
            && self.extenders.iter().all(|extender| !extender.keeps_anything())
    }

    /// Live grants are of different devices.
    pub(crate) fn grants_are_disjoint(&self) -> bool {
        let mut taken = [false; DEVICES as usize];
        self.pods
            .iter()
            .filter(|pod| !pod.ended)
            .filter_map(|pod| pod.on)
            .all(|device| !std::mem::replace(&mut taken[usize::from(device)], true))
    }

    /// What is bound is bound as it was decided.
    pub(crate) fn bound_as_decided(&self) -> bool {
        (0..PODS).all(|at| {
            let pod = self.pods[at];
            let number = u8::try_from(at).unwrap();
            let Some(device) = pod.on.filter(|_| !pod.ended) else {
                return true;
            };
            let slot = self.objects[gang_of(number)].decision.map(|slots| slots[member_of(number)]);
            slot == Some(Slot { device, uid: pod.uid })
        })
    }

    /// Decisions of gangs that are not over are of different devices.
    pub(crate) fn decisions_are_disjoint(&self) -> bool {
        let mut taken = [false; DEVICES as usize];
        (0..GANGS)
            .filter(|gang| !self.is_over(*gang))
            .filter_map(|gang| self.objects[gang].decision)
            .flatten()
            .all(|slot| !std::mem::replace(&mut taken[usize::from(slot.device)], true))
    }
}
