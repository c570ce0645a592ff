//! Listen addresses: `ADDRESS:PORT`, `:PORT` as Go programs accept it, or `localhost:PORT`. No other name is resolved: its address may change
//! and may belong to another host.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use socket2::{Domain, Socket, Type};
use tokio::net::TcpListener;

/// Reads `ADDRESS:PORT`. Without an address, all addresses of this host.
///
/// # Errors
/// The text has none of these forms.
pub fn address(text: &str) -> Result<SocketAddr, String> {
    let port = |text: &str| text.parse::<u16>().ok();
    let address = match text.rsplit_once(':') {
        Some(("", rest)) => port(rest).map(|port| (unspecified(), port).into()),
        Some((host, rest)) if host.eq_ignore_ascii_case("localhost") => {
            port(rest).map(|port| (loopback(), port).into())
        }
        _ => text.parse().ok(),
    };
    address.ok_or_else(|| {
        "write ADDRESS:PORT, such as 0.0.0.0:9410 or [::]:9410, :9410 for all addresses, or localhost:9410".to_owned()
    })
}

/// Connections that wait to be accepted.
const BACKLOG: i32 = 1024;

/// Listens on `address`. `[::]` takes IPv4 too, whatever the node's `net.ipv6.bindv6only`; on a kernel without IPv6 it is
/// `0.0.0.0`.
///
/// # Errors
/// The address is in use or not of this host.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    match bind_one(address) {
        Err(error) if is_all_ipv6(&address) && is_no_ipv6(&error) => {
            bind_one((Ipv4Addr::UNSPECIFIED, address.port()).into())
        }
        bound => bound,
    }
}

fn bind_one(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.set_reuse_address(true)?;
    if is_all_ipv6(&address) {
        socket.set_only_v6(false)?;
    }
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}

fn is_all_ipv6(address: &SocketAddr) -> bool {
    address.is_ipv6() && address.ip().is_unspecified()
}

/// Whether the kernel has no IPv6, or has it switched off.
fn is_no_ipv6(error: &io::Error) -> bool {
    let codes = [libc::EAFNOSUPPORT, libc::EADDRNOTAVAIL, libc::EPROTONOSUPPORT];
    error.raw_os_error().is_some_and(|code| codes.contains(&code))
}

/// This host itself: IPv4's address, or IPv6's where there is no IPv4.
fn loopback() -> IpAddr {
    match UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)) {
        Ok(_) => Ipv4Addr::LOCALHOST.into(),
        Err(_) => Ipv6Addr::LOCALHOST.into(),
    }
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

    /// Kubelet probes the pod's address, of IPv6 in an IPv6-only cluster.
    #[tokio::test]
    async fn all_addresses_are_of_both_families() {
        let listener = bind(address(":0").unwrap()).unwrap();
        let bound = listener.local_addr().unwrap();
        let mut hosts: Vec<IpAddr> = vec![Ipv4Addr::LOCALHOST.into()];
        if UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).is_ok() {
            hosts.push(Ipv6Addr::LOCALHOST.into());
        }
        for host in hosts {
            let client = tokio::net::TcpStream::connect((host, bound.port()));
            let (client, accepted) = tokio::join!(client, listener.accept());
            client.unwrap();
            accepted.unwrap();
        }
        let twice = bind(bound).unwrap_err();
        assert_eq!(twice.kind(), io::ErrorKind::AddrInUse);
    }

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
            assert_eq!(
                refused,
                "write ADDRESS:PORT, such as 0.0.0.0:9410 or [::]:9410, :9410 for all addresses, or localhost:9410",
                "{wrong}"
            );
        }
    }
}
