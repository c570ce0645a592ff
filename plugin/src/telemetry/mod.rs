//! What the GPUs are doing: load, memory, heat, power, clocks, errors, traffic and profiling counters, under the names of
//! NVIDIA's dcgm-exporter. Read at an interval and published as text; decides nothing.

mod exposition;
mod field;
mod once;
mod reader;
mod sampler;

pub use exposition::{Labels, LastXids, exposition};
pub use field::{Field, Values};
pub use once::{OnceError, read_once};
pub use reader::GpuSample;
pub use sampler::{SamplerSource, SamplerTiming, Samples};
