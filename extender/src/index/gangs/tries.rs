//! For which of the gangs that were refused it is tried to make room, which costs many plans each. Decides nothing else.

use std::collections::BTreeSet;
use std::sync::Arc;

use gantry_gang::GangKey;

/// Gangs for which it is tried before room grows again.
const TRIES: u32 = 4;

/// For whom it was tried since room grew. The first in the queue have a try each time, and each of the others has its turn: what those
/// before it wait for may never come.
#[derive(Debug, Default)]
pub(super) struct Tries {
    room: u64,
    count: u32,
    /// Somebody had none in this room who has had none before.
    left_out: bool,
    /// Who had one since all that wait had theirs.
    had: BTreeSet<Arc<GangKey>>,
}

impl Tries {
    /// Whether a gang has one more. The last is for one that has had none.
    pub(super) fn another(&mut self, room: u64, gang: &Arc<GangKey>) -> bool {
        self.enter(room);
        let again = self.had.contains(gang);
        let has = self.count + u32::from(again) < TRIES;
        if has {
            self.count += 1;
            self.had.insert(Arc::clone(gang));
        }
        self.left_out |= !has && !again;
        has
    }

    /// All that wait were planned in this room.
    pub(super) fn through(&mut self, room: u64) {
        self.enter(room);
        if !self.left_out {
            self.had.clear();
        }
    }

    fn enter(&mut self, room: u64) {
        if self.room != room {
            (self.room, self.count, self.left_out) = (room, 0, false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gantry_gang::Dialect;

    #[test]
    fn first_gangs_search_every_time_and_others_in_turn() {
        let gangs: Vec<Arc<GangKey>> = (0..12)
            .map(|number| {
                Arc::new(GangKey {
                    namespace: "ns".into(),
                    name: format!("g{number:02}").into(),
                    dialect: Dialect::Annotation,
                    incarnation: "".into(),
                })
            })
            .collect();
        let mut tries = Tries::default();
        let mut had = BTreeSet::new();
        for room in 1..=18 {
            // Room may grow again before all of them were planned.
            let planned = if room % 2 == 0 { gangs.len() } else { 2 };
            let now: Vec<usize> = (0..planned)
                .filter(|number| tries.another(room, &gangs[*number]))
                .collect();
            if planned == gangs.len() {
                tries.through(room);
                tries.through(room);
                assert!(now.starts_with(&[0, 1, 2]), "{now:?}");
            }
            assert!(now.len() <= TRIES as usize, "{now:?}");
            had.extend(now);
        }
        assert_eq!(had.len(), gangs.len());
        // Few have one each time.
        let mut tries = Tries::default();
        for room in 1..=9 {
            assert!(gangs[..4].iter().all(|gang| tries.another(room, gang)));
            tries.through(room);
        }
    }
}
