//! What the read-only HTTP servers share, which know no clients: by which names they may be called, how often clients may
//! call, all of them together, and responses in JSON.

use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use axum::body::Bytes;
use axum::extract::Request;
use axum::response::{IntoResponse as _, Response};
use gantry_runtime::http::text;
use http::{HeaderValue, StatusCode, header};
use serde::Serialize;

/// A bucket of permits that fills again with time.
#[derive(Debug)]
pub(crate) struct Rate {
    per_second: f64,
    most: f64,
    left: Mutex<(Instant, f64)>,
}

impl Rate {
    /// So many a second, and so many at once.
    pub(crate) fn new((per_second, most): (f64, f64)) -> Self {
        Self { per_second, most, left: Mutex::new((Instant::now(), most)) }
    }

    /// Takes a permit; false if there is none.
    pub(crate) fn take(&self) -> bool {
        self.take_at(Instant::now())
    }

    fn take_at(&self, now: Instant) -> bool {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let (since, permits) = *left;
        let passed = now.saturating_duration_since(since).as_secs_f64();
        let permits = (permits + passed * self.per_second).min(self.most);
        let is_taken = permits >= 1.0;
        *left = (now, if is_taken { permits - 1.0 } else { permits });
        is_taken
    }
}

/// The name or address by which a client calls, without port.
pub(crate) fn host_of(request: &Request) -> Option<&str> {
    let header = request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
    let host = header.or_else(|| request.uri().authority().map(|authority| authority.as_str()))?;
    Some(match host.strip_prefix('[') {
        Some(address) => address.split_once(']')?.0,
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    })
}

/// Whether a server may be called so: by an address, `localhost`, or one of these names. A name of another site that leads
/// to this address would let that site read the responses through a browser.
pub(crate) fn is_known(host: Option<&str>, hosts: &[String]) -> bool {
    host.is_some_and(|host| {
        host.parse::<IpAddr>().is_ok()
            || host.eq_ignore_ascii_case("localhost")
            || hosts.iter().any(|known| known.eq_ignore_ascii_case(host))
    })
}

/// 429: the client is to try again.
pub(crate) fn too_many(message: &str) -> Response {
    let mut response = text(StatusCode::TOO_MANY_REQUESTS, message);
    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    response
}

/// 200 with a value as JSON.
pub(crate) fn json(value: &impl Serialize) -> Response {
    match serde_json::to_vec(value) {
        Ok(bytes) => json_bytes(bytes.into()),
        Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    }
}

/// 200 with JSON.
pub(crate) fn json_bytes(bytes: Bytes) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], bytes).into_response()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn permits_come_back_with_time_up_to_the_most() {
        let rate = Rate::new((2.0, 3.0));
        let begin = Instant::now();
        let taken = |at: Duration| (0..10).filter(|_| rate.take_at(begin + at)).count();
        assert_eq!(taken(Duration::ZERO), 3);
        assert_eq!(taken(Duration::from_millis(1600)), 3, "2 a second, and one that came before");
        assert_eq!(taken(Duration::from_secs(600)), 3);
    }
}
