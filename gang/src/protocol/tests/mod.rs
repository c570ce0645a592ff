//! Specifications: given these calls, then that. One file per concern.

mod aside;
mod beyond;
mod bulk;
mod cluster;
mod collecting;
mod decided;
mod elastic;
mod idle;
mod lower;
mod main_path;
mod parked;
mod planning;
mod random;
mod recovery;
mod rerun;
mod short;
mod status;
mod stuck;
mod unasked;
mod world;
