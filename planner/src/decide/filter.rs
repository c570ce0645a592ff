//! Which nodes can take a pod, and why the others cannot. A node passes if every device the pod asks for is free there now;
//! GPUs held for pods between prioritize and bind do not make a node fail, they only count in the score.

use super::{Candidates, ForeignNodes, Miss, Options, words};
use crate::request::{Ask, Request};
use crate::snapshot::{Class, KeptNodes, NodeIx, PROMISED, Promised, Snapshot, Standing};

/// The answer, by position among the candidates.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filtered {
    /// Nodes that can take the pod.
    pub passed: Vec<u32>,
    /// Nodes that cannot, each with the number of its reason.
    pub refused: Vec<(u32, u32)>,
    /// The reasons. Alike nodes share one, so that kube-scheduler counts them together.
    pub reasons: Vec<String>,
    /// A candidate is unknown to the cluster: this is a simulation, and must leave no trace.
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
    let mut answer = Filtered {
        passed: Vec::with_capacity(nodes.len()),
        ..Filtered::default()
    };
    // By class: not asked yet, or passes, or the number of the reason.
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
        Self {
            passed: (0..u32::try_from(candidates).unwrap_or(u32::MAX)).collect(),
            ..Self::default()
        }
    }

    /// Refuses those that passed and are kept for a gang. `nodes` are the candidates' numbers.
    pub fn keep_off(&mut self, kept: &KeptNodes, nodes: &[Option<NodeIx>]) {
        self.refuse_where(nodes, |node| kept.has(node), || kept.words());
    }

    /// Refuses those that passed and have too little for a pod of a priority beside what is promised to others.
    pub fn leave_promised(
        &mut self,
        promised: &Promised,
        snapshot: &Snapshot,
        nodes: &[Option<NodeIx>],
        (priority, request): (i32, &Request),
    ) {
        let is_promised = |node| match snapshot.standing(node) {
            Standing::Ours(class) => !promised.leaves(node, class, priority, request),
            Standing::Foreign { .. } | Standing::Gone => false,
        };
        self.refuse_where(nodes, is_promised, || PROMISED.to_owned());
    }

    /// Refuses those that passed and are on such nodes.
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
            self.refused
                .extend(off.into_iter().map(|position| (position, reason)));
        }
    }

    fn reason(&mut self, reason: String) -> u32 {
        let position = self
            .reasons
            .iter()
            .position(|known| *known == reason)
            .unwrap_or_else(|| {
                self.reasons.push(reason);
                self.reasons.len() - 1
            });
        u32::try_from(position).unwrap_or(u32::MAX)
    }
}

fn judge_standing(standing: &Standing, options: Options, request: &Request) -> Result<(), String> {
    match standing {
        Standing::Gone => Err(words::UNKNOWN_NODE.to_owned()),
        Standing::Foreign { .. } => match options.foreign {
            ForeignNodes::Allow => Ok(()),
            ForeignNodes::Refuse => Err(words::FOREIGN_NODE.to_owned()),
        },
        Standing::Ours(class) => judge(class, request).map_err(|miss| miss.of_nodes()),
    }
}

/// Whether a node of a class can take a pod, or why not.
pub fn judge(class: &Class, request: &Request) -> Result<(), Miss> {
    if let Some(reason) = &class.not_ready {
        return Err(Miss::NotReady(reason.to_string()));
    }
    for ask in &request.asks {
        let Some((_, pool)) = class.pool(ask.resource.as_str()) else {
            return Err(Miss::NotServed(ask.resource.clone()));
        };
        if let Some(miss) = too_many(pool.max_request, ask) {
            return Err(miss);
        }
        if pool.free.len() < ask.devices as usize {
            return Err(Miss::Short(words::shortage(pool, ask.devices)));
        }
    }
    Ok(())
}

/// Whether a container asks for more of a resource than `max`, what kubelet would give to one: it would fail the pod, for good.
pub fn too_many(max: Option<u32>, ask: &Ask) -> Option<Miss> {
    let max = max?;
    let (container, asked) = ask.most()?;
    (asked > max).then(|| Miss::TooMany {
        resource: ask.resource.clone(),
        max,
        container: container.to_owned(),
        asked,
    })
}

/// A node the cache does not know. An object is a simulation's invention: an empty node of which only the count is known. A name
/// alone is a node that has just come: it is refused, and asked about again when its plugin has published it.
fn judge_unknown(request: &Request, candidates: &impl Candidates, position: usize) -> Result<(), String> {
    if !candidates.are_objects() {
        return Err(words::UNKNOWN_NODE.to_owned());
    }
    for ask in &request.asks {
        let advertised = candidates
            .advertised(position, ask.resource.as_str())
            .unwrap_or(0);
        if advertised < ask.devices {
            return Err(words::too_small(&ask.resource, advertised, ask.devices));
        }
    }
    Ok(())
}
