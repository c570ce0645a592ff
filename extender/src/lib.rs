//! The scheduler extender: filter, prioritize and bind over immutable snapshots.
