//! The cluster's DNS, which knows the one Service that daemons need: the API server's.

use std::net::{SocketAddr, UdpSocket};
use std::path::Path;

use crate::Result;
use crate::error::file;
use crate::settings::SERVICE_ADDRESS;

/// Name of the process.
pub(crate) const NAMES: &str = "names";

/// The name that is known.
const KNOWN: &str = "kubernetes.default.svc.cluster.local";
const SECONDS_VALID: u32 = 30;
/// Bytes of a message's header.
const HEADER: usize = 12;
/// Type and class of an IPv4 address.
const ADDRESS: [u8; 4] = [0, 1, 0, 1];
/// The flags of a response, with the codes for success and for an unknown name.
const FOUND: [u8; 2] = [0x84, 0];
const UNKNOWN: [u8; 2] = [0x84, 3];

/// Serves until killed.
///
/// # Errors
/// The port cannot be listened on.
pub fn serve(listen: SocketAddr) -> Result<()> {
    let address = listen.to_string();
    let failed = |action| file(action, Path::new(&address));
    let socket = UdpSocket::bind(listen).map_err(failed("listen for"))?;
    let mut query = [0; 512];
    loop {
        let (length, client) = socket.recv_from(&mut query).map_err(failed("receive from"))?;
        if let Some(response) = respond(&query[..length]) {
            // A client that is gone asks no more.
            let _ = socket.send_to(&response, client);
        }
    }
}

/// The response to a query of one question; `None` for what is no query.
fn respond(query: &[u8]) -> Option<Vec<u8>> {
    let (mut at, mut labels) = (HEADER, Vec::new());
    loop {
        let length = usize::from(*query.get(at)?);
        at += 1;
        if length == 0 {
            break;
        }
        labels.push(str::from_utf8(query.get(at..at + length)?).ok()?.to_ascii_lowercase());
        at += length;
    }
    let asked = query.get(at..at + ADDRESS.len())?;
    let question = query.get(HEADER..at + ADDRESS.len())?;
    let is_known = labels.join(".") == KNOWN;
    // Of another type the known name has nothing: success without an answer.
    let answers = u8::from(is_known && asked == ADDRESS);
    let mut response = query.get(..2)?.to_vec();
    response.extend(if is_known { FOUND } else { UNKNOWN });
    response.extend([0, 1, 0, answers, 0, 0, 0, 0]);
    response.extend(question);
    if answers > 0 {
        let address: std::net::Ipv4Addr = SERVICE_ADDRESS.parse().ok()?;
        // The name is that of the question.
        response.extend([0xc0, 12]);
        response.extend(ADDRESS);
        response.extend(SECONDS_VALID.to_be_bytes());
        response.extend([0, 4]);
        response.extend(address.octets());
    }
    Some(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query(name: &str, kind: u8) -> Vec<u8> {
        let mut query = vec![7, 9, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        for label in name.split('.') {
            query.push(u8::try_from(label.len()).unwrap());
            query.extend(label.bytes());
        }
        query.extend([0, 0, kind, 0, 1]);
        query
    }

    #[test]
    fn api_server_has_an_address_and_other_names_do_not() {
        let found = respond(&query(KNOWN, 1)).unwrap();
        assert_eq!(found[..8], [7, 9, 0x84, 0, 0, 1, 0, 1]);
        assert_eq!(found[found.len() - 4..], [10, 96, 0, 1]);
        let no_ipv6 = respond(&query(KNOWN, 28)).unwrap();
        assert_eq!(no_ipv6[2..8], [0x84, 0, 0, 1, 0, 0]);
        let unknown = respond(&query("kubernetes.default.svc.e2e.svc.cluster.local", 1)).unwrap();
        assert_eq!(unknown[2..8], [0x84, 3, 0, 1, 0, 0]);
    }

    #[test]
    fn truncated_query_gets_no_response() {
        let whole = query(KNOWN, 1);
        assert!((0..whole.len()).all(|length| respond(&whole[..length]).is_none()));
    }
}
