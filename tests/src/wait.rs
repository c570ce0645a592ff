//! Waiting for a condition that something outside this process brings about.
//! Every wait names what it waits for, has a limit, and tells what was last seen when the limit passed.

use std::fmt::Display;
use std::time::{Duration, Instant};

use crate::{Error, Result};

const BETWEEN_LOOKS: Duration = Duration::from_millis(25);

/// Looks until `probe` gives a value, at most for `limit`. The probe's `Err` says what it saw instead.
///
/// # Errors
/// [`Error::Timeout`] with the last thing seen.
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
            return Err(Error::Timeout {
                what: what.to_string(),
                limit,
                last,
            });
        }
        tokio::time::sleep(BETWEEN_LOOKS).await;
    }
}
