//! Listen addresses: `ADDRESS:PORT`, `:PORT` as Go programs accept it, or `localhost:PORT`. No other name is resolved: its address may change
//! and may belong to another host.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

/// Reads `ADDRESS:PORT`. Without an address, all addresses of this host.
///
/// # Errors
/// The text has none of these forms.
pub fn address(text: &str) -> Result<SocketAddr, String> {
    let port = |text: &str| text.parse::<u16>().ok();
    let address = match text.rsplit_once(':') {
        Some(("", rest)) => port(rest).map(|port| (unspecified(), port).into()),
        Some((host, rest)) if host.eq_ignore_ascii_case("localhost") => {
            port(rest).map(|port| (Ipv4Addr::LOCALHOST, port).into())
        }
        _ => text.parse().ok(),
    };
    address.ok_or_else(|| {
        "write ADDRESS:PORT, such as 0.0.0.0:9410 or [::]:9410, :9410 for all addresses, or localhost:9410".to_owned()
    })
}

/// All addresses of this host. Linux takes `[::]` for IPv4 and IPv6; a kernel without IPv6 has `0.0.0.0` only.
fn unspecified() -> IpAddr {
    match UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)) {
        Ok(_) => Ipv6Addr::UNSPECIFIED.into(),
        Err(_) => Ipv4Addr::UNSPECIFIED.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn port_alone_means_all_addresses() {
        let all = address(":9410").unwrap();
        assert!(all.ip().is_unspecified(), "{all}");
        assert_eq!(all.port(), 9410);
        assert_eq!(address("localhost:0").unwrap().to_string(), "127.0.0.1:0");
        assert_eq!(address("[::1]:80").unwrap().to_string(), "[::1]:80");
        assert_eq!(address("127.0.0.1:80").unwrap().to_string(), "127.0.0.1:80");
        for wrong in ["", ":", "80", "::1", "[::1]", "localhost", "node:80", ":65536", "1.2.3.4:x", " :80"] {
            let refused = address(wrong).unwrap_err();
            assert!(refused.contains(":9410 for all addresses"), "{wrong}: {refused}");
        }
    }
}
