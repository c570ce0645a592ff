//! Waiting for an external condition. Every wait has a description and a time limit, and reports the last state when
//! the limit has passed.

use std::fmt::Display;
use std::time::{Duration, Instant};

use crate::{Error, Result};

const BETWEEN_LOOKS: Duration = Duration::from_millis(25);

/// Calls `probe` until it returns a value, for `limit` at most. The probe's `Err` describes the present state.
///
/// # Errors
/// [`Error::Timeout`] with the last state.
pub async fn until<T, E: Display>(
    what: impl Display,
    limit: Duration,
    mut probe: impl AsyncFnMut() -> std::result::Result<T, E>,
) -> Result<T> {
    let start = Instant::now();
    loop {
        let last = match probe().await {
            Ok(value) => return Ok(value),
            Err(seen) => seen.to_string(),
        };
        if start.elapsed() > limit {
            return Err(Error::Timeout { what: what.to_string(), limit, last });
        }
        tokio::time::sleep(BETWEEN_LOOKS).await;
    }
}
