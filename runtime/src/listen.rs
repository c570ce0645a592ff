//! The address that a daemon listens on, as people write it: an address and a port, a port alone as Go's programs take it, or this host's
//! name for itself. No other name is looked up: what it stands for may change, and may be somebody else.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

/// Reads `ADDRESS:PORT`. Without address: every one of this host.
///
/// # Errors
/// It is none of these forms.
pub fn address(text: &str) -> Result<SocketAddr, String> {
    let port = |text: &str| text.parse::<u16>().ok();
    let known = match text.rsplit_once(':') {
        Some(("", rest)) => port(rest).map(|port| (everywhere(), port).into()),
        Some((host, rest)) if host.eq_ignore_ascii_case("localhost") => {
            port(rest).map(|port| (Ipv4Addr::LOCALHOST, port).into())
        }
        _ => text.parse().ok(),
    };
    known.ok_or_else(|| {
        "write ADDRESS:PORT, such as 0.0.0.0:9410 or [::]:9410, :9410 for all addresses, or localhost:9410".to_owned()
    })
}

/// Every address of this host: of both kinds where there are both, as Linux takes `[::]`. A kernel may be started without IPv6.
fn everywhere() -> IpAddr {
    match UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)) {
        Ok(_) => Ipv6Addr::UNSPECIFIED.into(),
        Err(_) => Ipv4Addr::UNSPECIFIED.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_alone_means_every_address_and_localhost_this_host() {
        let all = address(":9410").unwrap();
        assert!(all.ip().is_unspecified(), "{all}");
        assert_eq!(all.port(), 9410);
        assert_eq!(address("localhost:0").unwrap().to_string(), "127.0.0.1:0");
        assert_eq!(address("[::1]:80").unwrap().to_string(), "[::1]:80");
        assert_eq!(address("127.0.0.1:80").unwrap().to_string(), "127.0.0.1:80");
        for wrong in [
            "",
            ":",
            "80",
            "::1",
            "[::1]",
            "localhost",
            "node:80",
            ":65536",
            "1.2.3.4:x",
            " :80",
        ] {
            let refused = address(wrong).unwrap_err();
            assert!(refused.contains(":9410 for all addresses"), "{wrong}: {refused}");
        }
    }
}
