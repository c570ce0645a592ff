//! The machine graph and the choice of GPUs: pure functions on values.
