//! Gangs in the index: pods become members, reserved devices are withheld from other pods, gangs are planned on the snapshot that was
//! published last.
//! The state machine (crate `gantry-gang`) decides; this module gives it events and carries out its commands. No I/O, no clock.
//!
//! ```text
//! pods (members.rs) ─────────────────┐                 ┌─> reservations (reservation_tracker.rs) ──> ledger
//! owners, Gang objects (objects.rs) ─┼─> machine.rs ───┼─> work (work.rs)
//! plans (planning.rs, reclaim.rs) ───┘                 └─> views (view.rs), replies (verbs.rs)
//! ```

mod backfill;
mod deadlock;
mod lost_reservations;
mod machine;
mod member_grant;
mod members;
mod objects;
mod plan_input;
mod planning;
mod reclaim;
mod report;
mod reservation_tracker;
mod shapes;
mod spares;
mod state;
mod verbs;
mod view;
mod withheld;
mod work;

use std::collections::HashSet;
use std::sync::Arc;

use gantry_api::{PodUid, ResourceName};
use gantry_gang::needs::Toleration;
use gantry_gang::protocol::{
    BindEnd, GangEvent, Gangs, Moment, Object, Placement, PlanRequest, Refusal, Settings, ShapeId,
};
use gantry_gang::{Membership, Needs, OwnerFacts, OwnerRef};

pub(super) use member_grant::{available, layouts_within};
pub use report::GangReport;
pub use state::{GangState, ReportedStatus, Trial};
pub(super) use verbs::goes_by_itself;
pub use verbs::{ActivatedMember, AwaitedGang, MembershipState};
pub use view::{GangTotals, GangView, GangViews, MemberStage, MemberView, PlaceView};
pub use withheld::GangReservations;
pub(super) use withheld::ReservationHolders;

use self::backfill::{Backfill, BackfillReservations};
use self::deadlock::Deadlock;
use self::machine::Machine;
use self::members::{MemberTable, PodReporter};
use self::objects::GangObjects;
use self::plan_input::{Offers, PlanSource};
use self::reclaim::{Reclaim, ReclaimOutcome};
use self::report::GangInspection;
use self::reservation_tracker::ReservationTracker;
use self::shapes::Shapes;
use self::spares::Lending;
use self::work::WorkQueue;
use super::facts::Facts;
use super::node::Node;
use super::node_table::Renumbering;
use crate::pod::{OtherPod, PodFacts};
use gantry_planner::snapshot::{BackfillReservation, NodeIx};

/// The state of gangs in the index: routes events to the types that own its parts.
#[derive(Debug)]
pub(super) struct GangIndex {
    machine: Machine,
    /// Whether gangs are planned.
    planning: bool,
    /// The process only looks: the times of waiting and of reservations are known to the extender alone.
    only_looks: bool,
    /// Whether the state machine has received that all lists are complete.
    synced: bool,
    members: MemberTable,
    objects: GangObjects,
    shapes: Shapes,
    reservations: ReservationTracker,
    /// Finds victims for gangs that do not fit.
    reclaim: Reclaim,
    offers: Offers,
    backfill: Backfill,
    deadlock: Deadlock,
    work: WorkQueue,
    /// Something changed that a snapshot shows.
    changed: bool,
}

impl GangIndex {
    pub(super) fn new(settings: Settings) -> Self {
        Self {
            machine: Machine::new(settings),
            planning: true,
            only_looks: false,
            synced: false,
            members: MemberTable::default(),
            objects: GangObjects::default(),
            shapes: Shapes::default(),
            reservations: ReservationTracker::default(),
            reclaim: Reclaim::default(),
            offers: Offers::default(),
            backfill: Backfill::default(),
            deadlock: Deadlock::default(),
            work: WorkQueue::default(),
            changed: false,
        }
    }

    /// Sets whether gangs are planned. A command that only looks may list the waiting gangs first.
    pub(super) fn set_planning(&mut self, planning: bool) {
        self.planning = planning;
    }

    /// This process is a command that only looks.
    pub(super) fn only_look(&mut self) {
        self.only_looks = true;
    }

    /// Whether this process is a command that only looks.
    pub(super) fn only_looks(&self) -> bool {
        self.only_looks
    }

    /// Whether this process decides.
    pub(super) fn is_leading(&self) -> bool {
        self.machine.is_leading()
    }

    /// The gangs as the state machine knows them.
    pub(super) fn gangs(&self) -> &Gangs {
        self.machine.gangs()
    }

    /// What is known of gangs.
    pub(super) fn views<'a>(&'a self, facts: &'a Facts) -> GangViews<'a> {
        GangViews::new(self, facts)
    }

    /// The causes of gangs' states.
    pub(super) fn inspection<'a>(&'a self, facts: &'a Facts) -> GangInspection<'a> {
        GangInspection::new(self, facts)
    }

    /// The gangs that have reservations.
    pub(super) fn holders<'a>(&'a self, facts: &'a Facts) -> ReservationHolders<'a> {
        ReservationHolders::new(self.gangs(), facts, self.only_looks)
    }

    /// The devices of spare reservations that are lent.
    pub(super) fn lending<'a>(&'a self, facts: &'a Facts) -> Lending<'a> {
        Lending::new(self.gangs(), facts)
    }

    /// Where the reservations of gangs are.
    pub(super) fn reservations(&self) -> &ReservationTracker {
        &self.reservations
    }

    /// The backfill reservation for decisions about single pods.
    pub(super) fn backfill_reservation(&self) -> Option<&Arc<BackfillReservation>> {
        self.backfill_reservations().for_singles()
    }

    /// The work that is to be done.
    pub(super) fn work(&self) -> &WorkQueue {
        &self.work
    }

    /// The work that is to be done, to take it.
    pub(super) fn work_mut(&mut self) -> &mut WorkQueue {
        &mut self.work
    }

    fn backfill_reservations(&self) -> BackfillReservations<'_> {
        BackfillReservations { deadlock: self.deadlock.reservation(), head: self.backfill.reservation() }
    }

    fn plan_source<'a>(&'a self, facts: &'a Facts) -> PlanSource<'a> {
        PlanSource::new(facts, &self.shapes, &self.offers, self.backfill_reservations())
    }

    /// What members of gangs tolerate, each once.
    pub(super) fn tolerations(&self) -> Vec<Toleration> {
        self.shapes.tolerations()
    }

    /// The needs of pods that are known from a call of kube-scheduler only.
    pub(super) fn reported_needs(&self) -> impl Iterator<Item = &Needs> {
        self.members.reported_needs()
    }

    /// Whether a pod that only kube-scheduler has reported asks for a resource.
    pub(super) fn ask_for(&self, resource: &ResourceName) -> bool {
        self.members.ask_for(resource)
    }

    /// A pod that is known from a call of kube-scheduler only.
    pub(super) fn reported(&self, uid: &PodUid) -> Option<&Arc<PodFacts>> {
        self.members.reported(uid.as_str())
    }

    /// Namespace and name of a pod that is known.
    pub(super) fn address_of(&self, facts: &Facts, uid: &PodUid) -> Option<(Arc<str>, Arc<str>)> {
        self.members.address_of(facts, uid)
    }

    /// Whether something changed that a snapshot shows, since this was last called.
    pub(super) fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    /// This process decides from now on: gangs are adopted from what the cluster shows, written decisions included.
    pub(super) fn lead(&mut self, facts: &mut Facts) {
        if self.machine.set_leading(true) {
            self.start_over(facts);
        }
    }

    /// This process no longer decides: reservations of undecided gangs are released, and no call is answered and no gang planned until
    /// [`GangIndex::lead`].
    pub(super) fn stand_down(&mut self, facts: &mut Facts) {
        if self.machine.set_leading(false) {
            self.start_over(facts);
        }
    }

    /// Lists must be complete again before gangs are decided.
    pub(super) fn unsync(&mut self, facts: &mut Facts) {
        if std::mem::take(&mut self.synced) && self.is_leading() {
            self.start_over(facts);
        }
    }

    /// Forgets the state of gangs and builds it again from what the cluster shows. Work that is not done yet is produced again.
    fn start_over(&mut self, facts: &mut Facts) {
        if self.reservations.release_all(facts, &self.shapes) {
            self.gained();
        }
        let opened = [self.deadlock.end(), self.backfill.release()];
        opened.into_iter().flatten().for_each(|kept| self.open(facts, &kept));
        self.work.note_moved(self.machine.gangs().views().map(|view| Arc::clone(view.key())));
        self.machine.restart();
        self.synced = false;
        self.members.restart();
        self.offers.clear();
        self.work.restart();
        self.reclaim.restart();
        if self.is_leading() {
            self.report_everything(facts);
        }
    }

    /// Gives the state machine everything again.
    fn report_everything(&mut self, facts: &Facts) {
        let now = facts.clock.now();
        for (owner, facts) in self.objects.owners() {
            self.machine.handle(now, GangEvent::OwnerSeen { owner, facts: facts.clone() });
        }
        for ((namespace, name), object) in self.objects.iter() {
            let event = GangEvent::ObjectSeen { namespace, name, object: Box::new(object.clone()) };
            self.machine.handle(now, event);
        }
        self.reporter(facts).report_all();
    }

    /// Pods that were refused because of nodes kept for a gang are worth another plan.
    fn open(&mut self, facts: &mut Facts, kept: &BackfillReservation) {
        for node in kept.nodes() {
            facts.unschedulable.gained(node);
        }
        self.gained();
        self.changed = true;
    }

    /// The reservations on a node must be checked: something about it changed.
    pub(super) fn suspect(&mut self, node: NodeIx) {
        self.reservations.suspect(node);
    }

    /// Devices came free, or nodes changed: refused gangs are planned again.
    pub(super) fn gained(&mut self) {
        self.reclaim.grow();
    }

    /// Disruption budgets allow more: refused gangs are planned again soon.
    pub(super) fn unprotected(&mut self) {
        self.reclaim.budgets_grew();
    }

    /// The totals, labels or taints of nodes changed: the texts of refusals may be outdated.
    pub(super) fn reshaped(&mut self) {
        self.reclaim.reshape();
    }

    /// A pod is on its node from now on.
    pub(super) fn pod_came(&mut self, pod: &PodFacts) {
        if pod.is_live() && !pod.leaving {
            self.reclaim.candidate_came(pod.priority);
        }
    }

    /// A reservation on a node is orphaned now: refused gangs are worth another plan.
    pub(super) fn reservation_orphaned(&mut self, node: &Node) {
        let kept = node.occupancy().gang_reservations().iter().filter(|place| place.pod.is_none());
        let priorities = kept.filter_map(|place| Some(self.gangs().view(&place.gang)?.priority()));
        if let Some(lowest) = priorities.min() {
            self.reclaim.candidate_came(lowest);
        }
    }

    pub(super) fn renumber(&mut self, renumbering: &Renumbering) {
        self.reservations.renumber(renumbering);
        self.backfill.renumber(renumbering);
        self.deadlock.renumber(renumbering);
        // Recorded again soon.
        self.offers.clear();
    }

    /// Handles an event. [`GangIndex::collect`] carries out its results.
    pub(super) fn handle(&mut self, now: Moment, event: GangEvent<'_>) {
        self.machine.handle(now, event);
    }

    fn reporter<'a>(&'a mut self, facts: &'a Facts) -> PodReporter<'a> {
        PodReporter {
            machine: &mut self.machine,
            members: &mut self.members,
            shapes: &mut self.shapes,
            objects: &self.objects,
            work: &mut self.work,
            facts,
        }
    }

    /// A pod was observed.
    pub(super) fn pod_seen(&mut self, facts: &Facts, pod: &PodFacts) {
        let waits = pod.node.is_none() && pod.membership.is_some();
        if waits && facts.schedulers.unknown_scheduler_of(pod).is_none() {
            self.members.note_waiting(&pod.uid);
        }
        self.reporter(facts).report(pod);
    }

    /// The scheduler of a pod turned out to call this extender.
    pub(super) fn report_pod(&mut self, facts: &Facts, pod: &PodFacts) {
        self.reporter(facts).report(pod);
    }

    /// A pod that requests no devices was observed.
    pub(super) fn other_pod_seen(&mut self, facts: &Facts, pod: &OtherPod) {
        self.reporter(facts).report_other(pod);
    }

    /// A pod is known from a call of kube-scheduler only: the watch may be behind.
    pub(super) fn pod_called(&mut self, facts: &mut Facts, mut pod: PodFacts) {
        let known = facts.pods.contains(&pod.uid) || self.members.has_departed(&pod.uid);
        if known || pod.membership.is_none() || !self.is_leading() {
            return;
        }
        // Without this it would have another shape than equal pods that the watch has shown.
        facts.complete_needs(&mut pod);
        self.reporter(facts).report_called(pod);
    }

    /// The watch shows the deletion of a pod.
    pub(super) fn pod_gone(&mut self, facts: &Facts, uid: &PodUid) {
        let is_member = facts.pods.get(uid).is_some_and(|pod| pod.membership.is_some());
        self.members.depart(facts.clock.now().at, uid, is_member);
        self.reporter(facts).report_gone(uid);
    }

    /// A list of all pods is complete: members that it does not contain are deleted.
    pub(super) fn pods_listed(&mut self, facts: &Facts, listed: &HashSet<Arc<str>>) {
        for uid in self.members.missing_from(listed) {
            self.reporter(facts).report_gone(&uid);
        }
    }

    /// Members that binds found deleted before `since` and that the watch still shows.
    pub(super) fn gone_before(&self, since: std::time::Instant) -> impl Iterator<Item = PodUid> {
        self.members.gone_before(since)
    }

    /// A pod that lost its gang's annotation and is bound or being bound still belongs to that gang: other members run
    /// with it.
    pub(super) fn keep_membership(&self, uid: &PodUid, membership: &mut Option<Arc<Membership>>) {
        if membership.is_none() {
            *membership = self.gangs().bound_membership(uid).cloned();
        }
    }

    /// Whether the object of a decided gang shows the reservation of a member. True for any other pod.
    pub(super) fn is_written(&self, uid: &PodUid) -> bool {
        let gang = self.gangs().goes_with(uid).and_then(|gang| self.gangs().view(gang));
        gang.is_none_or(|gang| gang.is_written(uid))
    }

    /// An owner that defines the size of a gang; `None` if there is none of the name.
    pub(super) fn owner_seen(&mut self, now: Moment, owner: &OwnerRef, facts: Option<Arc<OwnerFacts>>) {
        if self.objects.set_owner(owner, facts.clone()) {
            // From here on its gangs may be victims.
            self.unprotected();
        }
        self.machine.observe(now, GangEvent::OwnerSeen { owner, facts });
    }

    /// A Gang object was seen.
    pub(super) fn object_seen(&mut self, now: Moment, namespace: &str, name: &str, object: Object) {
        if self.is_leading() {
            let event = GangEvent::ObjectSeen { namespace, name, object: Box::new(object.clone()) };
            self.machine.handle(now, event);
        }
        // A member waits until its reservation is written.
        let decided = self.objects.set(namespace, name, object);
        self.work.note_moved(decided.map(Arc::new));
    }

    /// A Gang object was deleted.
    pub(super) fn object_gone(&mut self, now: Moment, namespace: &str, name: &str) {
        self.objects.remove(namespace, name);
        // Also for an object that was not known: a waiting bind needs the event.
        self.machine.observe(now, GangEvent::ObjectGone { namespace, name });
    }

    /// A list of Gang objects is complete.
    pub(super) fn objects_listed(&mut self, now: Moment, listed: &HashSet<Arc<str>>) {
        for (namespace, name) in self.objects.missing_from(listed) {
            self.object_gone(now, &namespace, &name);
        }
    }

    /// Gives the state machine what follows from the facts since the last time.
    pub(super) fn settle(&mut self, facts: &mut Facts) {
        if self.shapes.manage(facts.nodes.resources().managed()) && self.is_leading() {
            self.reporter(facts).report_all();
        }
        let now = facts.clock.now();
        let is_complete = self.is_leading() && facts.lists.is_synced();
        if is_complete && !std::mem::replace(&mut self.synced, true) {
            self.reporter(facts).report_ungranted();
            // Bindings that an earlier term of leadership may still be sending: their members keep the reservations of the decision.
            for uid in facts.reservations.pods_with_binds() {
                self.machine.handle(now, GangEvent::BindEnded { pod: &uid, outcome: BindEnd::Unsure });
            }
            self.machine.handle(now, GangEvent::Synced);
        }
        let overdue = self.reclaim.take_overdue(now.unix);
        let end = facts.end_nominations();
        if facts.take_resources_gained() || end || overdue {
            self.gained();
        }
        self.collect(facts);
    }

    /// Carries out the commands of the state machine, or leaves them to the part that does.
    fn collect(&mut self, facts: &mut Facts) {
        for change in self.machine.take_slot_changes() {
            self.work.note_moved([Arc::clone(&change.gang)]);
            let change = self.reservations.change(change, facts, &self.shapes);
            if change.has_released {
                self.gained();
            }
            if let Some(node) = change.node.and_then(|node| facts.nodes.get(node)) {
                self.reservation_orphaned(node);
            }
        }
        if self.work.add(self.machine.take_work()) {
            let gangs = self.machine.gangs();
            self.reclaim.retain(|gang| gangs.view(gang).is_some());
            self.offers.retain(|gang| gangs.view(gang).is_some());
        }
        self.work.add_statuses(self.machine.take_statuses());
    }

    /// Reports lost reservations to the state machine, once the facts are complete.
    pub(super) fn check_reservations(&mut self, facts: &mut Facts) {
        if facts.lists.is_synced() {
            self.reservations.check(&mut self.machine, facts, &self.shapes);
            self.collect(facts);
        }
    }

    /// Keeps nodes free for the first gang of the queue, or opens them.
    pub(super) fn keep_backfill(&mut self, facts: &mut Facts) {
        if !self.backfill.take_due() || !self.is_leading() || !facts.lists.is_synced() {
            return;
        }
        let source = PlanSource::new(facts, &self.shapes, &self.offers, BackfillReservations::default());
        let change = self.backfill.check(&self.machine, source);
        if let Some(kept) = change.opened {
            self.open(facts, &kept);
        }
        if change.has_new_head {
            self.gained();
        }
        self.changed |= change.has_reserved;
    }

    /// Advances the time of gangs.
    pub(super) fn tick(&mut self, facts: &mut Facts) {
        let now = facts.clock.now();
        for uid in self.members.expire(now.at) {
            self.reporter(facts).report_gone(&uid);
        }
        let wanted = self.gangs().watched_owners().into_iter();
        let read: HashSet<OwnerRef> =
            wanted.filter_map(|wanted| (!wanted.unread).then_some(wanted.owner)).collect();
        self.objects.retain_owners(&read);
        self.sweep_shapes(facts);
        self.machine.observe(now, GangEvent::Tick);
        self.reservations.tick();
        if let Some(kept) = self.deadlock.follow(now.at, self.machine.gangs()) {
            self.open(facts, &kept);
        }
        if self.holders(facts).are_outdated() {
            self.reshaped();
        }
        self.backfill.tick();
        self.reclaim.tick(now.at, &facts.published);
    }

    fn sweep_shapes(&mut self, facts: &Facts) {
        if !self.shapes.are_many() {
            return;
        }
        let nodes = facts.nodes.iter();
        let reserved = nodes.flat_map(|(_, node)| node.occupancy().gang_reservations());
        let mut used: HashSet<ShapeId> = reserved.filter_map(|place| place.shape).collect();
        let pods = facts.pods.iter().chain(self.members.all_reported());
        for pod in pods.filter(|pod| pod.membership.is_some()) {
            if let Ok(request) = &pod.request {
                used.insert(self.shapes.of(request, &pod.needs));
            }
        }
        self.shapes.sweep(&used);
    }

    fn may_plan(&self, facts: &Facts) -> bool {
        self.planning && self.is_leading() && facts.lists.is_synced()
    }

    /// Whether [`GangIndex::plan_next`] has something to do.
    pub(super) fn has_unplanned(&self, facts: &Facts) -> bool {
        self.may_plan(facts) && self.gangs().has_next(self.reclaim.growth())
    }

    /// Plans the next gang on the snapshot that was published last: it gets reservations as a whole, or a refusal. False if none is to
    /// be planned now.
    pub(super) fn plan_next(&mut self, facts: &Facts) -> bool {
        if !self.may_plan(facts) {
            return false;
        }
        let (now, growth) = (facts.clock.now(), self.reclaim.growth());
        let Some(wanted) = self.machine.next(now, growth) else {
            self.reclaim.all_planned();
            self.deadlock.all_planned(growth);
            return false;
        };
        if wanted.without.is_empty() {
            self.offers.forget(&wanted.gang);
        }
        let (result, is_released) = self.plan(facts, &wanted);
        let still_degraded = wanted.completes && result.is_err();
        self.machine.handle(now, GangEvent::Planned { gang: &wanted.gang, result });
        if is_released {
            self.reclaim.note_released(self.machine.gangs(), &wanted);
        }
        if still_degraded {
            let reservations = BackfillReservations { deadlock: None, head: self.backfill.reservation() };
            let source = PlanSource::new(facts, &self.shapes, &self.offers, reservations);
            let growth = self.reclaim.growth();
            self.changed |= self.deadlock.resolve(&mut self.machine, source, growth);
        }
        true
    }

    /// The plan of a gang. Also returns whether others have released reservations for it.
    fn plan(&mut self, facts: &Facts, wanted: &PlanRequest) -> (Result<Placement, Refusal>, bool) {
        let backfill =
            BackfillReservations { deadlock: self.deadlock.reservation(), head: self.backfill.reservation() };
        let source = PlanSource::new(facts, &self.shapes, &self.offers, backfill);
        self.reclaim.begin();
        let (planned, fits_backfill) =
            match self.reclaim.repeated_refusal(self.machine.gangs(), source, wanted) {
                Some(refused) => (Err(refused), false),
                None => planning::plan_beside_backfill(source, wanted),
            };
        let reclaimed = match &planned {
            Err(refused) if !refused.is_hopeless() => self.reclaim.find(&mut self.machine, source, wanted),
            _ => ReclaimOutcome::Nothing,
        };
        let holders = ReservationHolders::new(self.machine.gangs(), facts, self.only_looks);
        let planned = planned.map_err(|refused| holders.complete(refused, wanted, source));
        let is_released = matches!(reclaimed, ReclaimOutcome::Released(_));
        let waits = matches!(reclaimed, ReclaimOutcome::Terminating);
        let result = match (planned, reclaimed) {
            (Err(_), ReclaimOutcome::Released(placement) | ReclaimOutcome::Preempted(placement)) => {
                Ok(placement)
            }
            (Err(_), ReclaimOutcome::Terminating) => Err(Refusal::PodsTerminating),
            (planned, _) => planned,
        };
        if let Err(refused) = &result
            && !refused.is_hopeless()
        {
            self.reclaim.refused(wanted);
            self.backfill.refused(wanted);
        }
        // A refusal because of terminating pods or a backfill reservation does not stay true for long.
        let is_stable = !waits && !fits_backfill;
        self.reclaim.planned(wanted, result.is_ok(), is_stable, &facts.published);
        (result, is_released)
    }
}

#[cfg(test)]
mod tests;
