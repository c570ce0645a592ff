//! The queue, refusals, back-off, time limits: what becomes of a gang before the decision.

mod arriving;
mod offered;
mod places;
mod preempting;
mod queue;
mod spares;
mod unknown;
