//! Puts together what pods, their owner and the Gang object declare. Precedence, highest first: the object, the pods, the owner.
//! Contradictions are named and never guessed at.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use gantry_api::{GangSpec, names};

use super::declared::{MAX_LISTED, PodDeclarations, Tally};
use super::{Authority, Ceilings, Fault, Rails, Repair, Terms, TopologyRequest};
use crate::counted::{are, members};
use crate::fabric::{Levels, NODE, Scope};
use crate::integrations::value::{
    MOST_MEMBERS, MOST_SPARES, fault, level, nearest, shown, unknown as unknown_name,
};
use crate::membership::{ArrivalTime, GangOptions, OwnerFacts, OwnerRef, TopologyHint};

/// What is known of the object that states how large a gang is.
#[derive(Debug, Clone, Copy)]
pub enum OwnerState<'a> {
    /// No pod names one.
    NotNeeded,
    /// It was not looked for yet.
    Unread,
    /// It does not exist, its kind is not served, or it may not be read.
    Missing,
    /// What it states.
    Read(&'a OwnerFacts),
}

/// What holds where nothing is declared.
#[derive(Debug, Clone, Copy)]
pub struct Defaults<'a> {
    /// How long members may take to arrive.
    pub arrival: Duration,
    /// How long reservations are kept while the owner creates all members again.
    pub restart_hold: Duration,
    /// What to do when a member is lost.
    pub repair: Repair,
    pub levels: &'a Levels,
    pub ceilings: &'a Ceilings,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TermsResolution {
    Terms(Terms),
    /// Something is missing that may yet come. In words that stay the same while it is.
    NotYet(Arc<str>),
    /// It contradicts itself or cannot be followed: sorted, each once.
    Invalid(Vec<Fault>),
}

/// The terms of the gang with these declarations. Neither their order nor how many state the same makes a difference, nor do their ranks.
pub fn resolve(
    declared: &PodDeclarations,
    owner: OwnerState<'_>,
    object: Option<&GangSpec>,
    defaults: &Defaults<'_>,
) -> TermsResolution {
    let mut faults = BTreeSet::new();
    declared.contradictions(&mut faults);
    let none = OwnerFacts::default();
    let facts = match owner {
        OwnerState::Read(facts) => facts,
        _ => &none,
    };
    faults.extend(facts.faults.iter().cloned());
    sub_groups(declared, facts, &mut faults);
    let object = object.cloned().unwrap_or_default();
    object_sizes(&object, &mut faults);
    if matches!(owner, OwnerState::Unread) && faults.is_empty() {
        return TermsResolution::NotYet(declared.missing(owner, facts));
    }
    let of_owner = Share::of(declared, facts);
    let minimum = declared.minimum(&object, owner, &of_owner, &mut faults);
    let mut options = declared.options(&object, facts, defaults, &mut faults);
    let repair = options.repair.unwrap_or(defaults.repair);
    if let Some(spares) = options.spares.filter(|spares| *spares > 0 && repair == Repair::Ignore) {
        let words = format!(
            "{spares} spare reservations are for replacements of lost members, and by {} `ignore` none is replaced; \
             write 0, or another repair",
            names::GANG_REPAIR_ANNOTATION
        );
        faults.insert(fault(declared.spares_source(&object), words));
    }
    let lowered = declared.lower(&object, owner, facts, &mut options, defaults.ceilings);
    let total = match of_owner.at_most {
        Some(most) => Some(most),
        None => declared.totals.first().copied().or(of_owner.total),
    };
    let Some(minimum) = minimum else {
        return match faults.is_empty() {
            true => TermsResolution::NotYet(declared.missing(owner, facts)),
            false => TermsResolution::Invalid(first_faults(faults)),
        };
    };
    let Minimum { min, singles, authority, decided_by } = minimum;
    let roles: u64 = of_owner.by_role.iter().map(|(_, count)| u64::from(*count)).sum();
    let unseen = of_owner.by_role.iter().any(|(role, _)| !declared.roles.has(role));
    let light = LightMembers {
        count: declared.light(&of_owner.by_role),
        of_min: unseen && roles <= u64::from(min),
        of_total: unseen,
    };
    sizes(min, total, &light, &options, &decided_by, &mut faults);
    if !faults.is_empty() {
        return TermsResolution::Invalid(first_faults(faults));
    }
    let level = options.level.or_else(|| {
        options.hint.as_ref().map(|hint| TopologyRequest { level: Arc::clone(&hint.label), required: false })
    });
    // Another system's slices are followed where they can be.
    let hinted = options.hint.and_then(|hint| hint.slice);
    let hinted = hinted.filter(|slice| {
        light.slices_min(*slice, min) && total.is_none_or(|total| light.slices_total(*slice, total))
    });
    // The person's word may be less than the sum of what the owner wants of each role.
    TermsResolution::Terms(Terms {
        min,
        singles,
        max: options.max.unwrap_or(u32::MAX),
        total,
        by_role: if roles <= u64::from(min) { of_owner.by_role } else { Vec::new() },
        quorum: None,
        level,
        slice: options.slice.or(hinted),
        rails: options.rails.unwrap_or_default(),
        spares: options.spares.unwrap_or_default(),
        repair,
        repair_by: match object.repair {
            Some(_) => Authority::Object,
            // What the pods leave out, the owner decides.
            None if declared.repairs.first().is_none() && facts.options.repair.is_some() => Authority::Object,
            None => Authority::Pods,
        },
        arrival: options.arrival.map_or(defaults.arrival, |arrival| arrival.time),
        restart_hold: options.restart_hold.unwrap_or(defaults.restart_hold),
        checkpointed: options.checkpointed.unwrap_or(false),
        lowered,
        unread: declared.unread(owner),
        authority,
        decided_by,
    })
}

struct Minimum {
    min: u32,
    /// No number is declared, and the owner declares independent pods.
    singles: bool,
    authority: Authority,
    decided_by: Arc<str>,
}

/// What of the owner's word is about this gang: all of it, or where each role is a gang of its own, that of its role.
struct Share {
    min: Option<u32>,
    total: Option<u32>,
    by_role: Vec<(Arc<str>, u32)>,
    /// The pods' own word may be about more than this gang.
    at_most: Option<u32>,
    /// The authority: only the pods show which of its roles have begun.
    authority: Authority,
}

impl Share {
    fn of(declared: &PodDeclarations, facts: &OwnerFacts) -> Self {
        if !facts.apart {
            return Self {
                min: facts.min,
                total: facts.total,
                by_role: facts.by_role.clone(),
                at_most: None,
                authority: Authority::Object,
            };
        }
        // Before its roles are separated, the gang is as large as the roles that have begun.
        let begun: Vec<u32> = facts
            .by_role
            .iter()
            .filter(|(role, _)| declared.roles.has(role))
            .map(|(_, count)| *count)
            .collect();
        let sum =
            (!begun.is_empty()).then(|| begun.iter().fold(0_u32, |sum, count| sum.saturating_add(*count)));
        Self { min: sum, total: sum, by_role: Vec::new(), at_most: sum, authority: Authority::Pods }
    }
}

impl PodDeclarations {
    /// What the pods contradict one another about.
    fn contradictions(&self, faults: &mut BTreeSet<Fault>) {
        faults.extend(self.faults.few().cloned());
        if self.totals.len() > 1 {
            faults.insert(disagree("how many members there will be", &self.totals));
        }
        if self.all > 0 && self.owners.len() > 1 {
            faults.insert(disagree("whose pods `all` are", &self.owners));
        }
    }

    fn minimum(
        &self,
        object: &GangSpec,
        owner: OwnerState<'_>,
        share: &Share,
        faults: &mut BTreeSet<Fault>,
    ) -> Option<Minimum> {
        if let Some(min) = object.min_member {
            return Some(Minimum {
                min,
                singles: false,
                authority: Authority::Object,
                decided_by: format!("minMember of Gang {}", self.object_name).into(),
            });
        }
        let owner_name = || self.owner().map_or_else(String::new, |owner| format!(" of {owner}"));
        if self.stated.len() > 1 {
            faults.insert(disagree("how many members are needed", &self.stated));
        }
        let place = self.places.last().copied().unwrap_or_default();
        if self.all > 0 {
            let Some(mut all) = share.total.or(self.totals.first().copied()) else {
                self.all_undeclared(owner, faults);
                return None;
            };
            if let OwnerState::Read(facts) = owner
                && let Some(left) = facts.left().filter(|left| share.total.is_some() && *left > 0)
            {
                all = all.min(left);
            }
            if self.stated.first().is_some_and(|stated| *stated != all) {
                let mut words: Vec<String> = self.stated.few().map(ToString::to_string).collect();
                words.truncate(MAX_LISTED - 1);
                words.push(format!("all, which is {all}"));
                faults.insert(disagreement("how many members are needed", &words));
            }
            return Some(Minimum {
                min: all,
                singles: false,
                authority: match share.total {
                    Some(_) => share.authority,
                    None => Authority::Pods,
                },
                decided_by: format!("{place} of its pods: all{}", owner_name()).into(),
            });
        }
        if let Some(stated) = self.stated.first() {
            // Not all state it, and for the others the owner's number counts: one pod must not undo that.
            if self.some_state()
                && let (OwnerState::Read(facts), Some(min)) = (owner, share.min)
                && !facts.singles
                && min != *stated
            {
                let by_owner = format!("{min} by {}{}", facts.source, owner_name());
                let words = [stated.to_string(), by_owner];
                faults.insert(disagreement("how many members are needed", &words));
            }
            return Some(Minimum {
                min: share.at_most.map_or(*stated, |most| most.min(*stated)),
                singles: false,
                authority: Authority::Pods,
                decided_by: format!("{place} of its pods").into(),
            });
        }
        let OwnerState::Read(facts) = owner else {
            return None;
        };
        Some(Minimum {
            min: share.min?,
            singles: facts.singles,
            authority: share.authority,
            decided_by: format!("{}{}", facts.source, owner_name()).into(),
        })
    }

    /// An owner that was read and does not declare a total will not do so later.
    fn all_undeclared(&self, owner: OwnerState<'_>, faults: &mut BTreeSet<Fault>) {
        if let (Some(name), OwnerState::Read(facts)) = (self.owner(), owner)
            && facts.total.is_none()
            && facts.faults.is_empty()
        {
            faults.insert(fault(
                format!("annotation {}", names::GANG_MIN_ANNOTATION),
                format!(
                    "`all` needs an owner that says how many there are, and {name} does not; write a number"
                ),
            ));
        }
    }

    /// See [`Terms::unread`].
    fn unread(&self, owner: OwnerState<'_>) -> Option<OwnerRef> {
        let missing = matches!(owner, OwnerState::Missing);
        let owner = self.owner().filter(|owner| missing && owner.kind.may_start_apart());
        owner.cloned()
    }

    /// Why there is no minimum.
    fn missing(&self, owner: OwnerState<'_>, facts: &OwnerFacts) -> Arc<str> {
        match (self.owner(), owner) {
            (Some(name), OwnerState::Unread) => format!("{name} was not read yet").into(),
            (Some(name), OwnerState::Missing) => {
                format!(
                    "{name}, which declares how many members are needed, does not exist or may not be read ({})",
                    name.kind.versions()
                )
                .into()
            }
            (Some(name), _) if facts.total.is_none() => {
                format!("{name} does not declare yet how many members are needed").into()
            }
            _ => format!(
                "the number of members needed is not declared: set annotation gantry.dev/gang-min on its pods, or minMember of Gang {}",
                self.object_name
            )
            .into(),
        }
    }

    fn options(
        &self,
        object: &GangSpec,
        facts: &OwnerFacts,
        defaults: &Defaults<'_>,
        faults: &mut BTreeSet<Fault>,
    ) -> GangOptions {
        let owner = &facts.options;
        if object.level.is_none() && self.levels.len() > 1 {
            faults.insert(disagree("in which level they are", &self.levels));
        }
        if object.slice_size.is_none() && self.slices.len() > 1 {
            faults.insert(disagree("what size slices have", &self.slices));
        }
        if object.max_member.is_none() && self.most.len() > 1 {
            faults.insert(disagree("how many members there are at most", &self.most));
        }
        if object.rails.is_none() && self.rails.len() > 1 {
            let words: Vec<String> = self.rails.few().map(|it| it.as_str().to_owned()).collect();
            faults.insert(disagreement("which rails they take", &words));
        }
        if object.spares.is_none() && self.spares.len() > 1 {
            faults.insert(disagree("how many spare reservations they have", &self.spares));
        }
        if object.repair.is_none() && self.repairs.len() > 1 {
            let words: Vec<String> = self.repairs.few().map(|it| it.as_str().to_owned()).collect();
            faults.insert(disagreement("what to do when a member is lost", &words));
        }
        if object.arrival_seconds.is_none()
            && self.arrivals.first().map(|it| it.time) != self.arrivals.last().map(|it| it.time)
        {
            let words: Vec<String> = self.arrivals.few().map(|it| format!("{:?}", it.time)).collect();
            faults.insert(disagreement("how long members may take", &words));
        }
        if object.restart_hold_seconds.is_none() && self.restart_holds.len() > 1 {
            let words: Vec<String> = self.restart_holds.few().map(|it| format!("{it:?}")).collect();
            faults.insert(disagreement("how long reservations are kept over a restart", &words));
        }
        let mut options = GangOptions {
            level: object
                .level
                .as_ref()
                .map(|level| TopologyRequest { level: level.name.as_str().into(), required: level.required })
                .or_else(|| self.levels.first().cloned())
                .or_else(|| narrowest(&facts.levels, defaults.levels))
                .or_else(|| owner.level.clone()),
            hint: None,
            slice: object.slice_size.or_else(|| self.slices.first().copied()).or(owner.slice),
            max: object.max_member.or_else(|| self.most.first().copied()).or(owner.max),
            rails: object.rails.map(Rails::from).or_else(|| self.rails.first().copied()),
            spares: object.spares.or_else(|| self.spares.first().copied()),
            repair: object
                .repair
                .map(Repair::from)
                .or_else(|| self.repairs.first().copied())
                .or(owner.repair),
            arrival: object
                .arrival_seconds
                .map(|seconds| ArrivalTime {
                    time: Duration::from_secs(seconds.into()),
                    source: "spec.arrivalSeconds",
                })
                .or_else(|| self.arrivals.first().copied())
                .or(owner.arrival),
            restart_hold: object
                .restart_hold_seconds
                .map(|seconds| Duration::from_secs(seconds.into()))
                .or_else(|| self.restart_holds.first().copied()),
            // A gang is stopped as a whole: not while one of its members cannot be.
            checkpointed: self.checkpointed.first().copied().or(owner.checkpointed),
        };
        match &mut options.level {
            Some(level) => match known(&level.level, defaults.levels) {
                Some(name) => level.level = name,
                None => {
                    let place = self.level_source(object, facts);
                    faults.insert(fault(place, unknown(&level.level, defaults.levels)));
                }
            },
            None => options.hint = self.hint(owner, defaults.levels),
        }
        options
    }

    /// Lowers what is above the operator's ceilings to them, and states each such value.
    fn lower(
        &self,
        object: &GangSpec,
        owner: OwnerState<'_>,
        facts: &OwnerFacts,
        options: &mut GangOptions,
        ceilings: &Ceilings,
    ) -> Vec<Fault> {
        let mut lowered = Vec::new();
        if let Some(arrival) = options.arrival.as_mut().filter(|it| it.time > ceilings.arrival) {
            let place = match (object.arrival_seconds, self.arrivals.first(), self.owner(), owner) {
                (Some(_), ..) => format!("{} of Gang {}", arrival.source, self.object_name),
                (None, None, Some(name), OwnerState::Read(_)) => format!("{} of {name}", arrival.source),
                _ => arrival.source.to_owned(),
            };
            let (asked, most) = (arrival.time.as_secs(), ceilings.arrival.as_secs());
            let words = format!(
                "{asked} s is above the operator's limit of {most} s (--gang-arrival-max); {most} s applies"
            );
            lowered.push(fault(place, words));
            arrival.time = ceilings.arrival;
        }
        if let Some(hold) = options.restart_hold.as_mut().filter(|hold| **hold > ceilings.restart_hold) {
            let place = match object.restart_hold_seconds {
                Some(_) => format!("spec.restartHoldSeconds of Gang {}", self.object_name),
                None => format!("annotation {}", names::GANG_RESTART_HOLD_ANNOTATION),
            };
            let (asked, most) = (hold.as_secs(), ceilings.restart_hold.as_secs());
            let words = format!(
                "{asked} s is above the operator's limit of {most} s (--gang-restart-hold-max); {most} s applies"
            );
            lowered.push(fault(place, words));
            *hold = ceilings.restart_hold;
        }
        if let Some(spares) = options.spares.as_mut().filter(|spares| **spares > ceilings.spares) {
            let most = ceilings.spares;
            let words = format!(
                "{spares} is above the operator's limit of {most} (--gang-spares-max); {most} applies"
            );
            lowered.push(fault(self.spares_source(object), words));
            *spares = most;
        }
        if let (Some(level), Some(allowed)) = (&mut options.level, &ceilings.required_levels)
            && level.required
            && !allowed.contains(&level.level)
        {
            let names: Vec<&str> = allowed.iter().map(|name| &**name).collect();
            let words = format!(
                "the operator does not let gangs require {} (--gang-required-levels has {}); it is preferred",
                level.level,
                if names.is_empty() { "none".to_owned() } else { names.join(", ") }
            );
            lowered.push(fault(self.level_source(object, facts), words));
            level.required = false;
        }
        lowered
    }

    /// Where the number of spare reservations stands that counts.
    fn spares_source(&self, object: &GangSpec) -> String {
        match object.spares {
            Some(_) => format!("spec.spares of Gang {}", self.object_name),
            None => format!("annotation {}", names::GANG_SPARES_ANNOTATION),
        }
    }

    /// Where the level stands that counts.
    fn level_source(&self, object: &GangSpec, facts: &OwnerFacts) -> Arc<str> {
        let of_pods = self.levels.first().map(|level| match level.required {
            true => names::GANG_REQUIRED_LEVEL_ANNOTATION,
            false => names::GANG_PREFERRED_LEVEL_ANNOTATION,
        });
        match (&object.level, of_pods) {
            (Some(_), _) => format!("spec.level of Gang {}", self.object_name).into(),
            (None, Some(name)) => format!("annotation {name}").into(),
            (None, None) => Arc::clone(&facts.level_source),
        }
    }

    /// A level that another system keeps to, under our name for it. All that have a hint must have the same.
    fn hint(&self, owner: &GangOptions, levels: &Levels) -> Option<TopologyHint> {
        let first = self.hints.first().or(owner.hint.as_ref())?;
        if self.hints.len() > 1 || owner.hint.as_ref().is_some_and(|hint| hint != first) {
            return None;
        }
        // One node is tried first anyway.
        let label = known(&first.label, levels).filter(|level| **level != *NODE)?;
        Some(TopologyHint { label, slice: first.slice })
    }
}

fn disagree<T: Display + Ord + Clone>(about: &str, words: &Tally<T>) -> Fault {
    let words: Vec<String> = words.few().map(ToString::to_string).collect();
    disagreement(about, &words)
}

fn disagreement(about: &str, words: &[String]) -> Fault {
    fault("pods", format!("they disagree about {about}: {}; all must say the same", words.join(", ")))
}

fn first_faults(faults: BTreeSet<Fault>) -> Vec<Fault> {
    faults.into_iter().take(MAX_LISTED).collect()
}

// Contradictions between numbers and names.

/// Most names that are listed of those that there are.
const LISTED: usize = 64;

/// What the schema of the Gang object forbids, for a cluster with an older schema or none.
fn object_sizes(object: &GangSpec, faults: &mut BTreeSet<Fault>) {
    let counts = [
        ("minMember", object.min_member),
        ("maxMember", object.max_member),
        ("sliceSize", object.slice_size),
        ("spares", object.spares),
        ("arrivalSeconds", object.arrival_seconds),
        ("restartHoldSeconds", object.restart_hold_seconds),
    ];
    for (field, count) in counts {
        let (least, most) = match field {
            "arrivalSeconds" => (1, 3600),
            "restartHoldSeconds" => (0, 3600),
            "spares" => (0, MOST_SPARES),
            _ => (1, MOST_MEMBERS),
        };
        if let Some(count) = count.filter(|count| !(least..=most).contains(count)) {
            faults.insert(fault(
                format!("spec.{field} of the Gang"),
                format!("{count} is not from {least} to {most}"),
            ));
        }
    }
}

/// Sub-groups that pods name and their owner does not have: such a pod counts for none of the minimums that there are.
fn sub_groups(declared: &PodDeclarations, facts: &OwnerFacts, faults: &mut BTreeSet<Fault>) {
    let Some(there) = &facts.sub_groups else {
        return;
    };
    let known: Vec<&str> = there.names.iter().take(LISTED).map(|name| &**name).collect();
    for role in declared.roles.beyond(&there.names) {
        // What KAI calls the whole where there are none.
        let whole = role.is_empty() || known.is_empty() && **role == *"default";
        if whole {
            continue;
        }
        let what = format!("sub-group {role}, which its pods name");
        let words = match known.is_empty() {
            true => format!("no {what}; there are none"),
            false => unknown_name(&what, role, &known),
        };
        faults.insert(fault(Arc::clone(&there.source), words));
    }
}

/// What is known of the members that ask for no devices. They lie nowhere: slices are of the others.
#[derive(Debug, Clone, Copy)]
struct LightMembers {
    /// So many of them are known.
    count: u32,
    /// Members of a role without any pod yet are needed, and may be such.
    of_min: bool,
    /// The same of all that there will be.
    of_total: bool,
}

impl LightMembers {
    /// Whether slices of that size may make up those that are needed.
    fn slices_min(&self, slice: u32, min: u32) -> bool {
        self.of_min && slice > 0 || divides(slice, min.saturating_sub(self.count))
    }

    /// Whether they may make up all that there will be.
    fn slices_total(&self, slice: u32, total: u32) -> bool {
        self.of_total && slice > 0 || divides(slice, total.saturating_sub(self.count))
    }

    /// So many members, without those of them that ask for no devices.
    fn heavy(&self, count: u32) -> String {
        match self.count {
            0 => format!("{count}"),
            light => format!("{} with devices of the {count}", count.saturating_sub(light)),
        }
    }
}

/// Contradictions between numbers.
fn sizes(
    min: u32,
    total: Option<u32>,
    light: &LightMembers,
    options: &GangOptions,
    decided_by: &str,
    faults: &mut BTreeSet<Fault>,
) {
    let mut wrong = |words: String| {
        faults.insert(fault("size", words));
    };
    if min == 0 {
        wrong(format!("{decided_by} is 0: at least 1 member is needed"));
    }
    if min > MOST_MEMBERS {
        wrong(format!("{min} members are needed ({decided_by}), and a gang has {MOST_MEMBERS} at most"));
    }
    if let Some(total) = total.filter(|total| min > *total) {
        wrong(format!("{} {} needed ({decided_by}), but there will be {total} only", members(min), are(min)));
    }
    if let Some(max) = options.max.filter(|max| min > *max) {
        wrong(format!("{} {} needed ({decided_by}), but there may be {max} at most", members(min), are(min)));
    }
    let Some(slice) = options.slice else {
        return;
    };
    match &options.level {
        None => wrong(format!(
            "slices of {slice} members are asked for, but no level in which each is to be; name one"
        )),
        Some(options) if *options.level == *NODE => wrong(format!(
            "slices of {slice} members are asked for, each on one node: slices are planned for in levels above the node only"
        )),
        Some(_) => {}
    }
    if !light.slices_min(slice, min) {
        wrong(format!(
            "slices of {slice} members do not make up the {} that are needed ({decided_by})",
            light.heavy(min)
        ));
    }
    if let Some(total) = total.filter(|total| !light.slices_total(slice, *total)) {
        wrong(format!(
            "slices of {slice} members do not make up the {} that there will be",
            light.heavy(total)
        ));
    }
}

fn divides(slice: u32, count: u32) -> bool {
    count.checked_rem(slice) == Some(0)
}

/// Our name for a level that is called by its name or its node label.
fn known(name: &str, levels: &Levels) -> Option<Arc<str>> {
    // Owners may name anything at any length.
    let name = level(name).ok()?;
    match levels.find(&name).ok()? {
        Scope::Level(level) => levels.0.get(level).map(|level| Arc::clone(&level.name)),
        Scope::Node => Some(NODE.into()),
    }
}

/// The narrowest of the levels that an owner requires: domains are nested, so that one within it is within all. One that is not known comes
/// before.
fn narrowest(required: &[Arc<str>], levels: &Levels) -> Option<TopologyRequest> {
    let width = |name: &Arc<str>| {
        let name = known(name, levels)?;
        Some(levels.0.iter().position(|level| level.name == name).unwrap_or(usize::MAX))
    };
    let unknown = required.iter().find(|name| width(name).is_none());
    let level = unknown.or_else(|| required.iter().max_by_key(|name| width(name)))?;
    Some(TopologyRequest { level: Arc::clone(level), required: true })
}

/// Longest item of `--fabric` that a message has, in bytes.
const LONGEST_ITEM: usize = 80;

fn unknown(name: &str, levels: &Levels) -> String {
    let adds =
        |item: String| format!("; the operator adds it with the item {item} (docs/gangs-placement.md)");
    let item = Levels::item_for(name).filter(|item| item.len() <= LONGEST_ITEM);
    let adds = item.map_or_else(String::new, adds);
    if levels.0.is_empty() {
        return format!(
            "{} is not among the levels given with --fabric; there is {NODE} alone{adds}",
            shown(name)
        );
    }
    let names = levels.0.iter().map(|level| &*level.name);
    let names: Vec<&str> = names.chain([NODE]).collect();
    let meant = nearest(name, &names).map_or(adds, |level| format!("; did you mean `{level}`?"));
    format!(
        "{} is not among the levels given with --fabric; there are {}{meant}",
        shown(name),
        names.join(", ")
    )
}

#[cfg(test)]
mod tests;
