//! What members, owner and object of a gang declare together: its terms, or why there are none yet. `terms::resolve` puts it together, and
//! only when a declaration changes: a thousand members declare the same.

use std::collections::BTreeSet;
use std::sync::Arc;

use gantry_api::{GangSpec, names};

use super::owners::{Ancestry, AncestryEnd, MAX_DEPTH, Owner};
use super::types::Settings;
use crate::integrations::value::{MOST_FAULTS, fault};
use crate::key::Integration;
use crate::membership::{Disruption, Membership, OwnerFacts, OwnerRef};
use crate::quorum::{Quorum, Selection};
use crate::terms::{Defaults, Fault, OwnerState, PodDeclarations, Terms, TermsResolution, resolve};

/// Jobs that a message about a shared gang name lists.
const MAX_LISTED_JOBS: usize = 3;
/// PodGroups with pods that a tree of groups may have.
const MAX_GROUPS: usize = 256;

/// The terms of a gang, as far as they are known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Resolution {
    Terms(Arc<Terms>),
    /// Not enough is declared yet, and why.
    Unknown(Arc<str>),
    /// The declarations contradict each other, or cannot be followed.
    Invalid(Vec<Fault>),
}

/// What is counted of a member's declaration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Declaration {
    pub(super) membership: Arc<Membership>,
    /// The member has ended well: of two jobs that use one gang name it counts for neither.
    pub(super) ended: bool,
    /// The member asks for no devices: it is in no slice.
    pub(super) light: bool,
}

/// The declarations of a gang and the terms that follow from them.
#[derive(Debug, Clone)]
pub(super) struct Agreement {
    declared: PodDeclarations,
    resolution: Resolution,
    /// The last valid terms: a decided gang continues by them.
    last_valid: Option<Arc<Terms>>,
    spec: Option<GangSpec>,
    /// What is wrong with the object: its spec, or that it belongs to another gang.
    object_fault: Option<Fault>,
    /// It has more members than are supported.
    size_fault: Option<Fault>,
    /// More gangs exist than are supported.
    count_fault: Option<Fault>,
    /// The owner that declares the size.
    owner: Option<OwnerRef>,
    /// The owner that creates the pods, if that is another one.
    creator: Option<OwnerRef>,
    /// The other groups of its tree of groups, or as far as they are known those above its PodGroup.
    groups: Vec<OwnerRef>,
    /// The groups of its tree that were chosen, while it has a reservation.
    chosen: Option<Selection>,
    /// The terms before groups were chosen.
    unchosen: Option<Arc<Terms>>,
    /// The owners are followed while no member names them.
    retains_owners: bool,
    /// An owner that has ended or is gone: lost members are not recreated.
    finished: Option<OwnerRef>,
    /// An owner that is suspended: lost members are not recreated before it resumes.
    suspended: Option<OwnerRef>,
    /// What the owner that declares the size states, if it was read and exists.
    declares: Option<Arc<OwnerFacts>>,
    /// What the owner that creates the pods states.
    creates: Option<Arc<OwnerFacts>>,
    /// How members may be evicted for others: together if any group of its tree states that.
    disruption: Option<Disruption>,
    /// The owner that declares the size, or a group of its tree, forbids to preempt.
    never_preempts: bool,
    /// kube-scheduler schedules all pods of the owner that declares the size, or of a group of its tree, in one cycle.
    scheduled_whole: bool,
    /// Why kube-scheduler does not schedule the owner that declares the size, or a group of its tree, as a whole.
    unscheduled: Option<(OwnerRef, Arc<str>)>,
    /// Members' declarations have changed since the terms were resolved.
    redeclared: bool,
    /// The owner, the object or a limit has changed since then.
    stale: bool,
}

impl Agreement {
    pub(super) fn new() -> Self {
        Self {
            declared: PodDeclarations::default(),
            resolution: Resolution::Unknown("no size is declared".into()),
            last_valid: None,
            spec: None,
            object_fault: None,
            size_fault: None,
            count_fault: None,
            owner: None,
            creator: None,
            groups: Vec::new(),
            chosen: None,
            unchosen: None,
            retains_owners: false,
            finished: None,
            suspended: None,
            declares: None,
            creates: None,
            disruption: None,
            never_preempts: false,
            scheduled_whole: false,
            unscheduled: None,
            redeclared: false,
            stale: true,
        }
    }

    pub(super) fn resolution(&self) -> &Resolution {
        &self.resolution
    }

    /// The resolved terms, also where the object or a limit keeps the gang from being planned.
    pub(super) fn resolved(&self) -> Option<&Arc<Terms>> {
        match &self.resolution {
            Resolution::Terms(terms) => Some(terms),
            Resolution::Unknown(_) | Resolution::Invalid(_) => None,
        }
    }

    /// The terms, if they are known and the gang is valid.
    pub(super) fn terms(&self) -> Option<&Arc<Terms>> {
        let faulty = self.own_faults().next().is_some();
        self.resolved().filter(|_| !faulty)
    }

    /// The terms by which a gang continues once it has begun: the last valid ones.
    pub(super) fn working_terms(&self) -> Option<&Arc<Terms>> {
        self.resolved().or(self.last_valid.as_ref())
    }

    pub(super) fn is_invalid(&self) -> bool {
        let faulty = self.own_faults().next().is_some();
        faulty || matches!(self.resolution, Resolution::Invalid(_))
    }

    /// What makes it invalid, the first the most important.
    pub(super) fn faults(&self) -> impl Iterator<Item = &Fault> {
        let of_terms = match &self.resolution {
            Resolution::Invalid(faults) => faults.as_slice(),
            Resolution::Terms(_) | Resolution::Unknown(_) => &[],
        };
        self.own_faults().chain(of_terms)
    }

    /// Faults that no declaration of size causes.
    fn own_faults(&self) -> impl Iterator<Item = &Fault> {
        let faults = self.object_fault.iter().chain(&self.size_fault);
        faults.chain(&self.count_fault)
    }

    /// The owners that are followed.
    pub(super) fn owners(&self) -> impl Iterator<Item = &OwnerRef> {
        self.owner.iter().chain(&self.creator).chain(&self.groups)
    }

    /// The owner that creates the pods, if it is of a recognised kind.
    pub(super) fn creator(&self) -> Option<&OwnerRef> {
        let owner = self.owner.as_ref().filter(|owner| owner.kind.makes_pods());
        owner.or(self.creator.as_ref())
    }

    /// What that owner states, if it was read and exists.
    pub(super) fn creator_facts(&self) -> Option<&Arc<OwnerFacts>> {
        self.creates.as_ref()
    }

    /// The owner that declares the size, and what it states, if it was read and exists.
    pub(super) fn declaring_owner(&self) -> Option<(&OwnerRef, &Arc<OwnerFacts>)> {
        self.owner.as_ref().zip(self.declares.as_ref())
    }

    /// How members may be evicted for others, where an owner states that.
    pub(super) fn disruption(&self) -> Option<Disruption> {
        self.disruption
    }

    /// Whether its owners forbid to preempt for it.
    pub(super) fn never_preempts(&self) -> bool {
        self.never_preempts
    }

    /// Whether kube-scheduler schedules all pods of the gang, or of a group of it, in one cycle.
    pub(super) fn is_scheduled_whole(&self) -> bool {
        self.scheduled_whole
    }

    /// The group that kube-scheduler does not schedule as a whole, and why: the owner, or one of its tree.
    pub(super) fn unscheduled(&self) -> Option<&(OwnerRef, Arc<str>)> {
        self.unscheduled.as_ref()
    }

    /// An owner that has ended or is gone: lost members are not recreated.
    pub(super) fn finished_owner(&self) -> Option<&OwnerRef> {
        self.finished.as_ref()
    }

    /// An owner that is suspended: lost members are not recreated before it resumes.
    pub(super) fn suspended_owner(&self) -> Option<&OwnerRef> {
        self.suspended.as_ref()
    }

    /// The owners are followed from now on while no member names them, or no longer. `creator`: the one that an earlier process followed.
    pub(super) fn retain_owners(&mut self, retain: bool, creator: Option<OwnerRef>) {
        self.stale |= self.retains_owners != retain || creator.is_some();
        self.retains_owners = retain;
        if creator.is_some() && self.creator() != creator.as_ref() {
            self.creator = creator;
        }
    }

    /// Other integrations that claim the pods too, in the order of precedence.
    pub(super) fn other_integrations(&self) -> impl Iterator<Item = Integration> {
        self.declared.also()
    }

    /// Several jobs have pods that have not ended, and no declaration states that they belong together.
    pub(super) fn is_undeclared_mix(&self, terms: &Terms) -> bool {
        let declared = self.spec.as_ref().is_some_and(|spec| spec.min_member.is_some())
            || (terms.min < terms.max && terms.max < u32::MAX);
        self.declared.is_mixed() && !declared
    }

    /// The declaration of a member counts from now on in place of the one `before`.
    pub(super) fn replace(&mut self, before: Option<&Declaration>, now: Option<&Declaration>) {
        if let Some(now) = now {
            self.add(now);
        }
        if let Some(before) = before {
            self.remove(before);
        }
    }

    fn add(&mut self, declaration: &Declaration) {
        self.redeclared |= self.declared.add(&declaration.membership);
        if declaration.ended {
            self.redeclared |= self.declared.end(&declaration.membership);
        }
        self.count_light(declaration, true);
        // How many declare it matters only where two jobs use one gang name.
        self.redeclared |= self.declared.is_mixed();
    }

    fn remove(&mut self, declaration: &Declaration) {
        if declaration.ended {
            self.redeclared |= self.declared.unend(&declaration.membership);
        }
        self.count_light(declaration, false);
        self.redeclared |= self.declared.remove(&declaration.membership);
        self.redeclared |= self.declared.is_mixed();
    }

    /// How many members ask for no devices matters for slices.
    fn count_light(&mut self, declaration: &Declaration, more: bool) {
        let membership = &declaration.membership;
        self.redeclared |= declaration.light || self.declared.has_light(&membership.role);
        if declaration.light {
            self.declared.lighten(membership, more);
        }
    }

    /// No declaration of an earlier incarnation counts any more.
    pub(super) fn forget_members(&mut self) {
        self.declared = PodDeclarations::default();
        self.redeclared = false;
    }

    /// Something other than the members' declarations has changed.
    pub(super) fn invalidate(&mut self) {
        self.stale = true;
    }

    pub(super) fn set_spec(&mut self, spec: Option<&Result<GangSpec, Fault>>) {
        self.object_fault = spec.and_then(|spec| spec.as_ref().err().cloned());
        self.spec = spec.and_then(|spec| spec.as_ref().ok().cloned());
        self.stale = true;
    }

    pub(super) fn set_object_fault(&mut self, fault: Option<Fault>) {
        self.object_fault = fault;
        self.stale = true;
    }

    pub(super) fn set_size_fault(&mut self, fault: Option<Fault>) {
        self.size_fault = fault;
    }

    pub(super) fn set_count_fault(&mut self, fault: Option<Fault>) {
        self.count_fault = fault;
    }

    /// Whether the terms have to be resolved again. Asked once for every change.
    pub(super) fn take_stale(&mut self) -> bool {
        let redeclared = std::mem::take(&mut self.redeclared);
        std::mem::take(&mut self.stale) || redeclared
    }

    /// Follows the owners that the declarations name: of several the first by name, and all groups of a tree. Returns those that are not
    /// followed any more.
    pub(super) fn follow_owners<'a>(
        &mut self,
        find: impl Fn(&OwnerRef) -> Option<&'a Owner>,
    ) -> Vec<OwnerRef> {
        if self.retains_owners && self.declared.is_empty() {
            return Vec::new();
        }
        let mut before: Vec<OwnerRef> = self.owners().cloned().collect();
        self.owner = self.declared.owner().cloned();
        self.creator =
            self.declared.creator().filter(|creator| Some(*creator) != self.owner.as_ref()).cloned();
        let mut groups: BTreeSet<OwnerRef> = self.declared.trees(MAX_GROUPS).flatten().cloned().collect();
        if groups.is_empty()
            && let Some(owner) = &self.owner
        {
            groups.extend(Ancestry::of(owner, &find).groups);
        }
        let others = groups.into_iter().filter(|group| Some(group) != self.owner.as_ref());
        self.groups = others.collect();
        before.retain(|before| self.owners().all(|owner| owner != before));
        before
    }

    /// Resolves the terms. `None` while there is no declaration: then what was resolved before stays.
    pub(super) fn resolve<'a>(
        &mut self,
        find: impl Fn(&OwnerRef) -> Option<&'a Owner>,
        settings: &Settings,
    ) -> Option<Resolution> {
        let is = |of: fn(&Owner) -> bool| {
            let mut owners = self.owner.iter().chain(&self.creator);
            owners.find(|owner| find(owner).is_some_and(of)).cloned()
        };
        (self.finished, self.suspended) = (is(Owner::is_finished), is(Owner::is_suspended));
        self.creates = self.creator().and_then(&find).and_then(Owner::facts).cloned();
        let owner = self.owner.as_ref().and_then(&find);
        self.declares = owner.and_then(Owner::facts).cloned();
        let of_groups = self.groups.iter().filter_map(|group| find(group)?.facts());
        let declared: Vec<&Arc<OwnerFacts>> = self.declares.iter().chain(of_groups).collect();
        self.never_preempts = declared.iter().any(|facts| facts.never_preempts);
        let is_whole = declared.iter().any(|facts| facts.disruption == Some(Disruption::All));
        self.scheduled_whole = declared.iter().any(|facts| facts.scheduled_whole);
        self.disruption = match &self.declares {
            _ if is_whole => Some(Disruption::All),
            Some(facts) => facts.disruption,
            None => None,
        };
        let mut groups = self.owner.iter().chain(&self.groups);
        self.unscheduled = groups.find_map(|group| {
            let why = find(group)?.facts()?.unscheduled.clone()?;
            Some((group.clone(), why))
        });
        if self.declared.is_empty() {
            return None;
        }
        let tree = match self.tree(&find) {
            Ok(tree) => tree,
            Err(resolution) => return Some(resolution),
        };
        let owner = match owner.map(Owner::known) {
            None => OwnerState::NotNeeded,
            Some(None) => OwnerState::Unread,
            Some(Some(None)) => OwnerState::Missing,
            Some(Some(Some(facts))) => OwnerState::Read(facts),
        };
        let owner = tree.as_ref().map_or(owner, |(facts, _)| OwnerState::Read(facts));
        let defaults = Defaults {
            arrival: settings.arrival,
            restart_hold: settings.restart_hold,
            repair: settings.repair,
            levels: &settings.levels,
            ceilings: &settings.ceilings,
        };
        Some(match resolve(&self.declared, owner, self.spec.as_ref(), &defaults) {
            TermsResolution::Terms(terms) => match self.shared_name(&terms) {
                None => {
                    let quorum = tree.map(|(_, quorum)| Arc::new(quorum));
                    Resolution::Terms(Arc::new(Terms { quorum, ..terms }))
                }
                Some(fault) => Resolution::Invalid(vec![fault]),
            },
            TermsResolution::NotYet(why) => Resolution::Unknown(why),
            TermsResolution::Invalid(faults) => Resolution::Invalid(faults),
        })
    }

    /// What the groups of its tree state together, and which of them are needed. `None` if it has no tree.
    ///
    /// # Errors
    /// A group is not known yet, or the tree cannot be followed.
    fn tree<'a>(
        &self,
        find: &impl Fn(&OwnerRef) -> Option<&'a Owner>,
    ) -> Result<Option<(OwnerFacts, Quorum)>, Resolution> {
        let Some(root) = self.declared.trees(1).next().and_then(|path| path.first()) else {
            let alone =
                self.owner.as_ref().filter(|owner| find(owner).is_some_and(|it| it.facts().is_some()));
            return alone.map_or(Ok(()), |owner| ancestors_known(&Ancestry::of(owner, find))).map(|()| None);
        };
        if self.declared.groups() > MAX_GROUPS {
            let words = format!(
                "pods of {} PodGroups belong to the tree; at most {MAX_GROUPS} are placed together",
                self.declared.groups()
            );
            return Err(Resolution::Invalid(vec![fault(root.to_string(), words)]));
        }
        let facts_of = |group: &OwnerRef| match find(group).map(Owner::known) {
            None | Some(None) => Err(unread(group)),
            Some(Some(None)) => Err(missing(group)),
            Some(Some(Some(facts))) => Ok(facts),
        };
        let mut all = OwnerFacts::clone(facts_of(root)?);
        let mut faults: BTreeSet<Fault> = all.faults.drain(..).collect();
        let min_of = |group: &OwnerRef, facts: &OwnerFacts| (Arc::clone(&group.name), facts.min.unwrap_or(1));
        let mut quorum = Quorum::root(&root.name, all.min.unwrap_or(1));
        for path in self.declared.trees(MAX_GROUPS) {
            let mut below = Vec::with_capacity(MAX_DEPTH);
            for group in path.iter().skip(1) {
                let facts = facts_of(group)?;
                below.push(min_of(group, facts));
                faults.extend(facts.faults.iter().cloned());
                let has_level = facts.options.level.is_some() || !facts.levels.is_empty();
                if has_level && (&facts.options.level, &facts.levels) != (&all.options.level, &all.levels) {
                    let words = format!(
                        "a group below the root of a tree cannot have a constraint of its own; {root} may have it"
                    );
                    faults.insert(fault(Arc::clone(&facts.level_source), words));
                }
            }
            quorum.add(&below);
        }
        let sized =
            self.declared.states_size() || self.spec.as_ref().is_some_and(|it| it.min_member.is_some());
        if sized {
            let words = format!(
                "{root} states how many groups are needed: remove {} of its pods, and minMember of its Gang",
                names::GANG_MIN_ANNOTATION
            );
            faults.insert(fault("size", words));
        }
        if !faults.is_empty() {
            return Err(Resolution::Invalid(faults.into_iter().take(MOST_FAULTS).collect()));
        }
        let chosen = self
            .chosen
            .as_ref()
            .map(|chosen| chosen.values().fold(0, |sum: u32, min| sum.saturating_add(*min)));
        let Some(least) = quorum.least().or(chosen) else {
            let (name, min, exist) = quorum.short_of_groups().unwrap_or((&root.name, 0, 0));
            let why = format!(
                "CompositePodGroup {name} needs {min} groups (spec.schedulingPolicy.gang.minGroupCount), and {exist} have pods"
            );
            return Err(Resolution::Unknown(why.into()));
        };
        all.min = Some(least);
        all.parent = None;
        Ok(Some((all, quorum)))
    }

    /// Its pods belong to groups of a tree of groups.
    pub(super) fn has_tree(&self) -> bool {
        self.declared.trees(1).next().is_some()
    }

    /// These groups of its tree were chosen, or none are any more.
    pub(super) fn choose(&mut self, chosen: Option<Selection>) {
        if self.chosen == chosen {
            return;
        }
        self.chosen = chosen;
        self.stale = true;
        if let Some(terms) = self.unchosen.clone() {
            self.set(Resolution::Terms(terms));
        }
    }

    /// What was chosen of a resolution.
    fn narrow(&mut self, resolution: Resolution) -> Resolution {
        let Resolution::Terms(terms) = resolution else {
            return resolution;
        };
        self.unchosen = terms.quorum.is_some().then(|| Arc::clone(&terms));
        match self.chosen.as_ref().filter(|_| terms.quorum.is_some()) {
            Some(chosen) => Resolution::Terms(Arc::new(terms.of_groups(chosen))),
            None => Resolution::Terms(terms),
        }
    }

    /// Takes over what was resolved. Whether it is new.
    pub(super) fn set(&mut self, resolution: Resolution) -> bool {
        let resolution = self.narrow(resolution);
        if self.resolution == resolution {
            return false;
        }
        if let Resolution::Terms(terms) = &resolution {
            self.last_valid = Some(terms.clone());
        }
        self.resolution = resolution;
        true
    }

    /// Two gangs of one name: several jobs have pods, and more than are needed. Bound together half of each might run. The user can declare
    /// that they belong together, by how many members there may be.
    fn shared_name(&self, terms: &Terms) -> Option<Fault> {
        (self.is_undeclared_mix(terms) && self.declared.made() > terms.min).then(|| {
            let (jobs, count) = self.declared.makers();
            let mut names: Vec<String> = jobs.take(MAX_LISTED_JOBS).map(ToString::to_string).collect();
            if count > MAX_LISTED_JOBS {
                names.push("others".to_owned());
            }
            let words = format!(
                "{} give their gangs one name, and have more than the {} members that it takes: give each a name of its own; or, if they belong together, say how many members there may be ({}), or minMember in the Gang",
                names.join(", "),
                terms.min,
                names::GANG_MAX_ANNOTATION
            );
            Fault { place: "pods".into(), words: words.into() }
        })
    }
}

/// Whether a PodGroup is known to belong to no tree of groups, or to which.
///
/// # Errors
/// Its parents are not known yet, or make no tree.
fn ancestors_known(ancestry: &Ancestry) -> Result<(), Resolution> {
    const PARENT: &str = "spec.parentCompositePodGroupName";
    let Some(last) = ancestry.groups.last() else {
        return Ok(());
    };
    let names = || {
        let names: Vec<&str> = ancestry.groups.iter().map(|group| &*group.name).collect();
        names.join(", ")
    };
    match ancestry.end {
        AncestryEnd::Root => Ok(()),
        AncestryEnd::Unread => Err(unread(last)),
        AncestryEnd::Missing => Err(missing(last)),
        AncestryEnd::Cycle => {
            let words =
                format!("a parent is its own ancestor ({}); one of them must have no parent", names());
            Err(Resolution::Invalid(vec![fault(format!("{PARENT} of {last}"), words)]))
        }
        AncestryEnd::TooDeep => {
            let words =
                format!("the tree is deeper than the {MAX_DEPTH} groups that are allowed ({}, ...)", names());
            Err(Resolution::Invalid(vec![fault(format!("{PARENT} of {last}"), words)]))
        }
    }
}

fn unread(group: &OwnerRef) -> Resolution {
    Resolution::Unknown(format!("{group} was not read yet").into())
}

fn missing(group: &OwnerRef) -> Resolution {
    let why = format!(
        "{group}, which says what is needed together, does not exist or may not be read ({})",
        group.kind.versions()
    );
    Resolution::Unknown(why.into())
}
