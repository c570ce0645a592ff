//! Which nodes fit a pod, and why the others do not. A node fits if every device that the pod asks for is free. Devices
//! held between prioritize and bind only count in the score.

use super::{Candidates, ForeignNodes, NodeRefusal, Options, refusal};
use crate::request::{Ask, Request};
use crate::snapshot::{BackfillReservation, Class, NOMINATED, NodeIx, NominatedRequests, Snapshot, Standing};

/// The verdict, by position among the candidates.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filtered {
    /// Nodes that fit.
    pub passed: Vec<u32>,
    /// Nodes that do not fit, each with the number of its reason.
    pub refused: Vec<(u32, u32)>,
    /// The reasons. Alike nodes share one, so that kube-scheduler counts them together.
    pub reasons: Vec<String>,
    /// A candidate is a node object that the snapshot does not have: the question is a simulation.
    pub simulated: bool,
}

/// Filters `candidates`, found at `nodes` of the snapshot, for a pod that asks `request`.
pub fn filter(
    snapshot: &Snapshot,
    options: Options,
    request: &Request,
    candidates: &impl Candidates,
    nodes: &[Option<NodeIx>],
) -> Filtered {
    let mut answer = Filtered { passed: Vec::with_capacity(nodes.len()), ..Filtered::default() };
    // By class: not judged yet, fits, or the number of the reason.
    let mut by_class: Vec<Option<Result<(), u32>>> = vec![None; snapshot.classes.len()];
    for (position, node) in (0u32..).zip(nodes) {
        let verdict = match node.and_then(|node| snapshot.class(node)) {
            Some(class) => match by_class.get(class.0 as usize).copied().flatten() {
                Some(known) => known,
                None => {
                    let standing = snapshot.classes.get(class.0 as usize);
                    let verdict =
                        standing.map_or(Ok(()), |standing| judge_standing(standing, options, request));
                    let verdict = verdict.map_err(|reason| answer.reason(reason));
                    if let Some(slot) = by_class.get_mut(class.0 as usize) {
                        *slot = Some(verdict);
                    }
                    verdict
                }
            },
            None => {
                answer.simulated = answer.simulated || candidates.are_objects();
                judge_unknown(request, candidates, position as usize).map_err(|reason| answer.reason(reason))
            }
        };
        match verdict {
            Ok(()) => answer.passed.push(position),
            Err(reason) => answer.refused.push((position, reason)),
        }
    }
    answer
}

impl Filtered {
    /// The same reason for every candidate.
    pub fn all_refused(candidates: usize, reason: String) -> Self {
        let candidates = u32::try_from(candidates).unwrap_or(u32::MAX);
        Self {
            refused: (0..candidates).map(|position| (position, 0)).collect(),
            reasons: vec![reason],
            ..Self::default()
        }
    }

    /// Every candidate passes.
    pub fn all_passed(candidates: usize) -> Self {
        Self { passed: (0..u32::try_from(candidates).unwrap_or(u32::MAX)).collect(), ..Self::default() }
    }

    /// Refuses nodes that passed and are in a backfill reservation. `nodes` are the candidates' numbers.
    pub fn keep_off(&mut self, kept: &BackfillReservation, nodes: &[Option<NodeIx>]) {
        self.refuse_where(nodes, |node| kept.has(node), || kept.words());
    }

    /// Refuses nodes that passed and do not hold the pod in addition to the nominated pods of higher priority.
    pub fn leave_nominated(
        &mut self,
        promised: &NominatedRequests,
        snapshot: &Snapshot,
        nodes: &[Option<NodeIx>],
        (priority, request): (i32, &Request),
    ) {
        let is_promised = |node| match snapshot.standing(node) {
            Standing::Ours(class) => !promised.leaves(node, class, priority, request),
            Standing::Foreign { .. } | Standing::Gone => false,
        };
        self.refuse_where(nodes, is_promised, || NOMINATED.to_owned());
    }

    /// Refuses nodes that passed and for which `is_off` holds.
    fn refuse_where(
        &mut self,
        nodes: &[Option<NodeIx>],
        is_off: impl Fn(NodeIx) -> bool,
        why: impl FnOnce() -> String,
    ) {
        let is_off = |position: &mut u32| {
            let node = nodes.get(*position as usize).copied().flatten();
            node.is_some_and(&is_off)
        };
        let off: Vec<u32> = self.passed.extract_if(.., is_off).collect();
        if !off.is_empty() {
            let reason = self.reason(why());
            self.refused.extend(off.into_iter().map(|position| (position, reason)));
        }
    }

    fn reason(&mut self, reason: String) -> u32 {
        let position = self.reasons.iter().position(|known| *known == reason).unwrap_or_else(|| {
            self.reasons.push(reason);
            self.reasons.len() - 1
        });
        u32::try_from(position).unwrap_or(u32::MAX)
    }
}

fn judge_standing(standing: &Standing, options: Options, request: &Request) -> Result<(), String> {
    match standing {
        Standing::Gone => Err(refusal::UNKNOWN_NODE.to_owned()),
        Standing::Foreign { .. } => match options.foreign {
            ForeignNodes::Allow => Ok(()),
            ForeignNodes::Refuse => Err(refusal::FOREIGN_NODE.to_owned()),
        },
        Standing::Ours(class) => judge(class, request).map_err(|miss| miss.of_nodes()),
    }
}

/// Whether a node of a class fits a pod, or why not.
pub fn judge(class: &Class, request: &Request) -> Result<(), NodeRefusal> {
    if let Some(reason) = &class.not_ready {
        return Err(NodeRefusal::NotReady(reason.to_string()));
    }
    for ask in &request.asks {
        let Some((_, pool)) = class.pool(ask.resource.as_str()) else {
            return Err(NodeRefusal::NotServed(ask.resource.clone()));
        };
        if let Some(miss) = too_many(pool.max_request, ask) {
            return Err(miss);
        }
        if pool.free.len() < ask.devices as usize {
            return Err(NodeRefusal::Short(refusal::shortage(pool, ask.devices)));
        }
    }
    Ok(())
}

/// Whether a container asks for more than `max`, the most that kubelet gives to one container. Kubelet would fail the
/// pod for good.
pub fn too_many(max: Option<u32>, ask: &Ask) -> Option<NodeRefusal> {
    let max = max?;
    let (container, asked) = ask.most()?;
    (asked > max).then(|| NodeRefusal::TooMany {
        resource: ask.resource.clone(),
        max,
        container: container.to_owned(),
        asked,
    })
}

/// A node that the snapshot does not have. An object is invented by a simulation: empty, with only its count known. A
/// name alone is a new node: it is refused until its plugin has published it.
fn judge_unknown(request: &Request, candidates: &impl Candidates, position: usize) -> Result<(), String> {
    if !candidates.are_objects() {
        return Err(refusal::UNKNOWN_NODE.to_owned());
    }
    for ask in &request.asks {
        let advertised = candidates.advertised(position, ask.resource.as_str()).unwrap_or(0);
        if advertised < ask.devices {
            return Err(refusal::too_small(&ask.resource, advertised, ask.devices));
        }
    }
    Ok(())
}
