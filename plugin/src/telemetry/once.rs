//! One reading of this node, for the command line.

use std::time::Duration;

use super::exposition::{Labels, exposition};
use super::reader::Reader;
use crate::discover::{self, DiscoverError, NvmlOptions};
use crate::nvml::{Nvml, NvmlError};

/// Why this node cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum OnceError {
    #[error(transparent)]
    Discover(#[from] DiscoverError),
    #[error(transparent)]
    Nvml(#[from] NvmlError),
}

/// Reads every GPU of this node twice, `between` apart, and returns the metrics and what could not be read.
///
/// # Errors
/// NVML cannot be loaded, or the node has no GPU.
pub fn read_once(
    options: &NvmlOptions,
    host: &str,
    between: Duration,
) -> Result<(String, Vec<String>), OnceError> {
    let nvml = Nvml::load(&options.library)?;
    let machine = discover::read(&nvml, options)?.machine;
    let mut reader = Reader::new(&nvml);
    let count = nvml.device_count()?;
    for index in 0..count {
        // What fails now fails again below, where it is reported.
        let _ = reader.read(index);
    }
    std::thread::sleep(between);
    let (mut samples, mut problems) = (Vec::new(), Vec::new());
    for index in 0..count {
        match reader.read(index) {
            Ok(sample) => samples.push(sample),
            Err(error) => problems.push(format!("GPU {index} cannot be read: {error}")),
        }
    }
    Ok((exposition(&samples, &Labels { host, machine: &machine, holders: None }, None), problems))
}
