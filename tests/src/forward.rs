//! Lets programs outside the cluster's namespaces reach its API server on this machine's loopback.
//! It copies bytes and knows nothing of what passes.

use std::fs::File;
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::Result;
use crate::error::file;

/// Accepts on `127.0.0.1:<port>` here and connects to the same address within the network namespace `namespace`
/// (a file such as `/proc/<pid>/ns/net`). Returns only on failure.
///
/// # Errors
/// The port is taken, or the namespace cannot be entered.
pub fn forward(port: u16, namespace: &Path) -> Result<()> {
    // A socket belongs to the namespace it was made in: listen first, then move.
    let address = (Ipv4Addr::LOCALHOST, port);
    let listener = TcpListener::bind(address).map_err(file("listen on port for", namespace))?;
    let target = File::open(namespace).map_err(file("open", namespace))?;
    move_into_link_name_space(
        std::os::fd::AsFd::as_fd(&target),
        Some(LinkNameSpaceType::Network),
    )
    .map_err(|errno| file("enter", namespace)(errno.into()))?;
    for accepted in listener.incoming() {
        let Ok(outside) = accepted else { continue };
        // New threads inherit the namespace of the thread that starts them.
        thread::spawn(move || {
            if let Ok(inside) = TcpStream::connect(address) {
                join(outside, inside);
            }
        });
    }
    Ok(())
}

fn join(one: TcpStream, other: TcpStream) {
    let (Ok(one_again), Ok(other_again)) = (one.try_clone(), other.try_clone()) else {
        return;
    };
    let _ = one.set_nodelay(true);
    let _ = other.set_nodelay(true);
    let back = thread::spawn(move || copy(other_again, one_again));
    copy(one, other);
    let _ = back.join();
}

/// Copies one direction to its end, then tells both sides.
fn copy(mut from: TcpStream, mut to: TcpStream) {
    let _ = std::io::copy(&mut from, &mut to);
    let _ = to.shutdown(Shutdown::Write);
    let _ = from.shutdown(Shutdown::Read);
}
