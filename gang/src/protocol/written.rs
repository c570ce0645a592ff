//! What the object says of who has which place, and how certain that is. A place that a member was given after the decision counts only
//! once it is written down; a watch that lags, or a write that is on its way, must not make an older word count again. Decides nothing.

use std::collections::BTreeMap;

use gantry_api::{DecidedReservation, Decision, PodUid};

type Places = BTreeMap<PodUid, DecidedReservation>;

/// Places by what was said last and by what the object showed last. Each change of who has which place has a number, which stands in the
/// decision.
#[derive(Debug, Clone)]
pub(super) struct Written {
    /// What was last said, to be written.
    said: Places,
    /// The number of that.
    revision: u64,
    /// Since which number members have the places that they have; of the others, since before this process.
    since: BTreeMap<PodUid, u64>,
    /// What the object showed last.
    shown: Places,
    shown_revision: u64,
}

impl Written {
    /// A decision that is in the object.
    pub(super) fn new(decision: &Decision) -> Self {
        let places = by_pod(decision);
        Self {
            said: places.clone(),
            revision: decision.revision,
            since: BTreeMap::new(),
            shown: places,
            shown_revision: decision.revision,
        }
    }

    pub(super) fn revision(&self) -> u64 {
        self.revision
    }

    /// This is said from now on, and on its way into the object. Numbers it.
    pub(super) fn say(&mut self, decision: &mut Decision) {
        let places = by_pod(decision);
        let next = self.revision + 1;
        let mut moved = false;
        for (uid, slot) in &places {
            if !self.said.get(uid).is_some_and(|said| is_same(said, slot)) {
                self.since.insert(uid.clone(), next);
                moved = true;
            }
        }
        // Who has lost its place may get it again: an object of before says so already.
        moved |= self.said.keys().any(|uid| !places.contains_key(uid));
        self.since.retain(|uid, _| places.contains_key(uid));
        if moved {
            self.revision = next;
        }
        self.said = places;
        decision.revision = self.revision;
    }

    /// The object shows this. False if somebody else has written it over what was said: then it has to be said again.
    pub(super) fn show(&mut self, decision: &Decision) -> bool {
        self.shown_revision = decision.revision;
        // It is shown anew with every word of the status, and seldom says anything else.
        if !says(&self.shown, decision, |a, b| a == b) {
            self.shown = by_pod(decision);
        }
        let ours = decision.revision < self.revision
            || decision.revision == self.revision && says(&self.said, decision, is_same);
        if !ours {
            self.revision = decision.revision;
            self.said.clear();
        }
        ours
    }

    /// Whether the object says of a member that it has this place, and nothing that is on its way says otherwise.
    pub(super) fn has(&self, uid: &PodUid, slot: &DecidedReservation) -> bool {
        let since = self.since.get(uid).copied().unwrap_or_default();
        let says = |places: &Places| places.get(uid).is_some_and(|known| is_same(known, slot));
        says(&self.said) && says(&self.shown) && self.shown_revision >= since
    }

    /// Whether the object names a member, or may name it any moment: of what is on its way whoever takes over may find it written.
    pub(super) fn names(&self, uid: &PodUid) -> bool {
        self.shown.contains_key(uid) || self.said.contains_key(uid)
    }
}

fn is_same(a: &DecidedReservation, b: &DecidedReservation) -> bool {
    a.node == b.node && a.devices == b.devices
}

/// The places of a decision by who has them.
fn by_pod(decision: &Decision) -> Places {
    let slots = decision.reservations.iter();
    slots
        .filter_map(|slot| Some((slot.pod.clone()?, slot.clone())))
        .collect()
}

/// Whether a decision says just this of who has which place.
fn says(
    places: &Places,
    decision: &Decision,
    same: impl Fn(&DecidedReservation, &DecidedReservation) -> bool,
) -> bool {
    let mut named = 0;
    let all = decision.reservations.iter().all(|slot| {
        let known = slot.pod.as_ref().map(|pod| places.get(pod));
        named += usize::from(known.is_some());
        known.is_none_or(|known| known.is_some_and(|known| same(known, slot)))
    });
    all && named == places.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn slot(node: u8, pod: Option<u8>) -> DecidedReservation {
        DecidedReservation {
            node: format!("n{node}").as_str().into(),
            devices: Vec::new(),
            rank: None,
            ordinal: None,
            role: String::new(),
            pod_name: String::new(),
            pod: pod.map(|pod| format!("p{pod}").as_str().into()),
        }
    }

    fn decision(slots: &[(u8, Option<u8>)]) -> Decision {
        Decision {
            id: "d".into(),
            revision: 0,
            min: 1,
            domain: String::new(),
            reservations: slots.iter().map(|(node, pod)| slot(*node, *pod)).collect(),
        }
    }

    fn has(written: &Written, pod: u8, node: u8) -> bool {
        written.has(&format!("p{pod}").as_str().into(), &slot(node, Some(pod)))
    }

    #[test]
    fn two_that_trade_places_there_and_back_wait_until_the_last_trade_is_shown() {
        let mut first = decision(&[(0, Some(0)), (1, Some(1))]);
        let mut written = Written::new(&first);
        assert!(has(&written, 0, 0) && has(&written, 1, 1));
        let mut traded = decision(&[(1, Some(0)), (0, Some(1))]);
        written.say(&mut traded);
        assert!(!has(&written, 0, 1) && !has(&written, 0, 0), "it is on its way");
        let back = first.clone();
        written.say(&mut first);
        assert!(!has(&written, 0, 0), "the trade may be written yet");
        assert!(written.show(&back), "a watch that lags");
        assert!(!has(&written, 0, 0) && !has(&written, 1, 1));
        assert!(written.show(&traded));
        assert!(
            !has(&written, 0, 0) && !has(&written, 0, 1),
            "it is to be said otherwise"
        );
        assert!(written.show(&first));
        assert!(has(&written, 0, 0) && has(&written, 1, 1));
    }

    #[test]
    fn who_keeps_its_place_does_not_wait_for_the_trades_of_others() {
        let mut written = Written::new(&decision(&[(0, Some(0)), (1, Some(1)), (2, Some(2))]));
        written.say(&mut decision(&[(1, Some(0)), (0, Some(1)), (2, Some(2))]));
        assert!(has(&written, 2, 2));
        assert!(!has(&written, 0, 1));
    }

    #[test]
    fn who_loses_its_place_and_gets_it_again_waits() {
        let first = decision(&[(0, Some(0)), (1, Some(1))]);
        let mut written = Written::new(&first);
        written.say(&mut decision(&[(1, Some(1))]));
        assert!(!has(&written, 0, 0), "nobody has said that it has one");
        let mut again = decision(&[(0, Some(0)), (1, Some(1))]);
        written.say(&mut again);
        assert!(written.show(&first));
        assert!(
            !has(&written, 0, 0),
            "the object may be about to say that it has none"
        );
        assert!(has(&written, 1, 1));
        assert!(written.show(&again));
        assert!(has(&written, 0, 0));
    }

    #[test]
    fn who_is_being_written_down_is_named_already() {
        let mut written = Written::new(&decision(&[(0, Some(0))]));
        let mut more = decision(&[(0, Some(0)), (1, Some(1))]);
        assert!(!written.names(&"p1".into()));
        written.say(&mut more);
        assert!(written.names(&"p1".into()), "the write may have come through");
        written.say(&mut decision(&[(0, Some(0))]));
        assert!(!written.names(&"p1".into()));
        assert!(written.show(&more));
        assert!(written.names(&"p1".into()));
    }

    #[test]
    fn what_a_process_before_wrote_late_is_said_over() {
        let mut written = Written::new(&decision(&[(0, Some(0)), (1, Some(1))]));
        let mut theirs = decision(&[(1, Some(0)), (0, Some(1))]);
        theirs.revision = 1;
        assert!(!written.show(&theirs));
        assert!(!has(&written, 0, 0));
        let mut ours = decision(&[(0, Some(0)), (1, Some(1))]);
        written.say(&mut ours);
        assert!(ours.revision > theirs.revision);
        assert!(!has(&written, 0, 0));
        assert!(written.show(&ours));
        assert!(has(&written, 0, 0) && has(&written, 1, 1));
    }

    proptest! {
        #[test]
        fn what_is_written_is_known_without_copying_it(
            before in prop::collection::btree_map(0..4_u8, 0..3_u8, 0..4),
            now in prop::collection::btree_map(0..4_u8, 0..3_u8, 0..4),
            kept in 0..2_u8,
        ) {
            let slots = |of: &BTreeMap<u8, u8>| {
                let mut slots: Vec<_> = of.iter().map(|(pod, node)| (*node, Some(*pod))).collect();
                slots.extend((0..kept).map(|node| (node, None)));
                decision(&slots)
            };
            let written = by_pod(&slots(&before));
            prop_assert_eq!(says(&written, &slots(&now), |a, b| a == b), before == now);
            prop_assert!(says(&written, &slots(&before), is_same));
        }

        /// Whatever is said, however late it is shown: once a member has its place by this, no later state of the object up to what was
        /// said last has it anywhere else.
        #[test]
        fn nobody_has_a_place_of_which_the_object_may_yet_say_otherwise(
            said in prop::collection::vec(prop::collection::btree_map(0..3_u8, 0..3_u8, 1..4), 1..6),
            shown in 0..6_usize,
        ) {
            let slots = |of: &BTreeMap<u8, u8>| {
                decision(&of.iter().map(|(pod, node)| (*node, Some(*pod))).collect::<Vec<_>>())
            };
            let mut written = Written::new(&slots(&said[0]));
            let mut states = vec![slots(&said[0])];
            for places in &said[1..] {
                let mut next = slots(places);
                written.say(&mut next);
                states.push(next);
            }
            let at = shown.min(states.len() - 1);
            written.show(&states[at]);
            for (pod, node) in &said[said.len() - 1] {
                if has(&written, *pod, *node) {
                    for later in &said[at..] {
                        prop_assert_eq!(later.get(pod), Some(node));
                    }
                }
            }
        }
    }
}
