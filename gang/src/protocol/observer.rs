//! Shows tests the events of every state machine of a thread. The feature `observer` compiles it; the shipped program
//! does not contain it.

use std::cell::Cell;

use super::event::GangEvent;

thread_local! {
    static OBSERVER: Cell<Option<fn(&GangEvent<'_>)>> = const { Cell::new(None) };
}

/// From here on `observer` is called with each event of this thread, before it is handled.
pub fn observe(observer: fn(&GangEvent<'_>)) {
    OBSERVER.set(Some(observer));
}

pub(super) fn handled(event: &GangEvent<'_>) {
    if let Some(observer) = OBSERVER.get() {
        observer(event);
    }
}
