//! Specifications: given these calls, then that. One file per concern.

mod main_path;
mod world;
