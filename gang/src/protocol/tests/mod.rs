//! Specifications: given these calls, then that. One file per concern.

mod aside;
mod bulk;
mod cluster;
mod collecting;
mod continuity;
mod decided;
mod elastic;
mod idle;
mod limits;
mod lower;
mod main_path;
mod parked;
mod planning;
mod random;
mod reasons;
mod recovery;
mod rerun;
mod rollout;
mod short;
mod status;
mod stuck;
mod trees;
mod wait_reason;
mod world;
