//! How long a reservation waits for a pod: that of a lost member for its replacement, and that of a member beyond the minimum for its
//! arrival.

use std::collections::BTreeMap;

use gantry_api::{DeviceId, GangPhase, PodUid};
use gantry_extender::index::{GangView, MemberStage, PlaceView};

use crate::api::Pod;
use crate::coverage::Played;
use crate::jobs::Job;
use crate::world::World;

/// Milliseconds between two looks. A reservation that is released for a reason that may pass is made again after two seconds at least.
const LOOKS: u64 = 1_000;
/// After a longer pause between two looks a reservation may be another one.
const GAP: u64 = 1_500;
/// Milliseconds that a member beyond the minimum may take to arrive: the extender's default.
const ARRIVAL: u64 = 60_000;
/// Milliseconds for which reservations are kept while the owner of a gang creates all of its pods again: the extender's default.
const RESTART_HOLD: u64 = 120_000;
/// Milliseconds that an extender may take to release a reservation.
const RELEASE: u64 = 60_000;
/// Milliseconds that the volume of a pod takes to be there.
const VOLUME: u64 = 250_000;

/// A reservation that waits for a pod.
#[derive(Debug)]
struct Waiting {
    run: u32,
    job: String,
    /// Its member. `None`: it is kept for the replacement of one that was lost.
    pod: Option<PodUid>,
    /// Pods that were made for the job by then.
    made: u32,
    since: u64,
}

/// The reservations of the leader that wait for pods, each by its first device.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    all: BTreeMap<DeviceId, Waiting>,
    looked: u64,
}

impl World {
    /// No reservation waits for longer than it may. Looks at schedules with actors that let one wait.
    pub(crate) fn check_waiting(&mut self) {
        let is_late = self.plan.slow_owners || self.plan.late_volumes;
        if !is_late || self.now < self.waits.looked + LOOKS {
            return;
        }
        let mut before = std::mem::take(&mut self.waits);
        if self.now > before.looked + GAP {
            before.all.clear();
        }
        self.waits.looked = self.now;
        let Some(process) = self.leader().and_then(|run| self.extenders.running.get(&run)) else {
            return;
        };
        let mut wrong = None;
        for job in self.jobs.all.iter().filter(|job| job.is_gang) {
            let Some(view) = process.view(&job.gang) else { continue };
            for place in &view.places {
                let (Some(most), Some(device)) = (self.longest_wait(&view, place), place.devices.first())
                else {
                    continue;
                };
                let (run, pod, made) = (process.run, place.pod.clone(), job.made());
                let mut waiting = Waiting { run, job: job.name.clone(), pod, made, since: self.now };
                if let Some(before) = before.all.get(device).filter(|before| before.is_same(&waiting)) {
                    waiting.since = before.since;
                }
                if self.now > waiting.since + most {
                    wrong = Some(format!("{device} is reserved for too long: {waiting:?}, {view:?}"));
                }
                self.waits.all.insert(device.clone(), waiting);
            }
        }
        if let Some(wrong) = wrong {
            self.wrong(wrong);
        }
    }

    /// Milliseconds for which a reservation may wait as it does; `None` if that has no limit.
    fn longest_wait(&self, view: &GangView, place: &PlaceView) -> Option<u64> {
        if place.bound || place.spare {
            return None;
        }
        let Some(uid) = &place.pod else {
            return Some(self.plan.hold.max(RESTART_HOLD) + RELEASE);
        };
        let comes = |stage| matches!(stage, MemberStage::Pending | MemberStage::Gated);
        let is_coming = view.members.iter().any(|member| member.uid == *uid && comes(member.stage));
        // A gang of which nothing is repaired is bound with fewer than its minimum, too.
        let settled = view
            .members
            .iter()
            .filter(|member| matches!(member.stage, MemberStage::Bound | MemberStage::Succeeded));
        let is_whole = view.phase == GangPhase::Bound && settled.count() >= view.min as usize;
        (is_coming && is_whole).then_some(ARRIVAL + RELEASE)
    }

    /// Whether kube-scheduler cannot reserve the volume of a pod yet: that of one member beyond the minimum.
    pub(crate) fn lacks_volume(&self, pod: &Pod) -> bool {
        let job: &Job = &self.jobs.all[pod.job];
        let is_last = job.number_of(&pod.name) == Some(job.members.len() - 1);
        self.plan.late_volumes && job.is_elastic() && is_last && self.now < pod.created + VOLUME
    }

    /// Milliseconds after which a controller makes the replacement of a lost pod. Some are slow, where reservations are kept for seconds.
    pub(crate) fn replaces_after(&mut self, is_lost: bool) -> u64 {
        let is_slow = is_lost && self.plan.slow_owners && self.plan.is_short_of_patience();
        if is_slow && self.dice.mille(300) {
            self.played(Played::OwnerSlow);
            return self.dice.range(250_000, 400_000);
        }
        self.dice.range(0, 1_500)
    }
}

impl Waiting {
    /// Whether this is what another look has shown.
    fn is_same(&self, other: &Self) -> bool {
        (self.run, &self.job, &self.pod, self.made) == (other.run, &other.job, &other.pod, other.made)
    }
}
