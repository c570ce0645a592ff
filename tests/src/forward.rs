//! Forwards a port of this machine's loopback to the API server in the cluster's namespaces. It copies bytes unread.

use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::Result;
use crate::error::file;

/// How long another program, such as the forwarder of a cluster just taken down, may still hold the port.
const PORT_LIMIT: Duration = Duration::from_secs(5);

/// Accepts on `127.0.0.1:<port>` here and connects to the same address within the network namespace of the process
/// `owner`. Ends when that process does.
///
/// # Errors
/// The port is taken, there is no such process, or its namespace cannot be entered.
pub fn forward(port: u16, owner: i32) -> Result<()> {
    let namespace = PathBuf::from(format!("/proc/{owner}/ns/net"));
    let wrong = |errno: Errno| file("enter", &namespace)(errno.into());
    let target = File::open(&namespace).map_err(file("open", &namespace))?;
    let owner = Pid::from_raw(owner).ok_or_else(|| wrong(Errno::SRCH))?;
    let owner = pidfd_open(owner, PidfdFlags::empty()).map_err(wrong)?;

    // A socket belongs to the namespace it was made in: listen first, then move.
    let address = (Ipv4Addr::LOCALHOST, port);
    let listener = listen(address).map_err(file("listen on the API server's port for", &namespace))?;
    move_into_link_name_space(target.as_fd(), Some(LinkNameSpaceType::Network)).map_err(wrong)?;
    thread::spawn(move || {
        for accepted in listener.incoming() {
            let Ok(outside) = accepted else { continue };
            // New threads inherit the namespace of the thread that starts them.
            thread::spawn(move || {
                if let Ok(inside) = TcpStream::connect(address) {
                    join(outside, inside);
                }
            });
        }
    });
    // A process descriptor becomes readable when its process has ended.
    poll(&mut [PollFd::new(&owner, PollFlags::IN)], None).map(drop).map_err(wrong)
}

fn listen(address: (Ipv4Addr, u16)) -> io::Result<TcpListener> {
    let start = Instant::now();
    loop {
        match TcpListener::bind(address) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && start.elapsed() < PORT_LIMIT => {
                thread::sleep(Duration::from_millis(20));
            }
            outcome => return outcome,
        }
    }
}

/// Copies both ways between two connections until both are at their end.
pub(crate) fn join(one: TcpStream, other: TcpStream) {
    let (Ok(one_again), Ok(other_again)) = (one.try_clone(), other.try_clone()) else {
        return;
    };
    let _ = one.set_nodelay(true);
    let _ = other.set_nodelay(true);
    let back = thread::spawn(move || copy(other_again, one_again));
    copy(one, other);
    let _ = back.join();
}

/// Copies one direction to its end, then closes both sides.
fn copy(mut from: TcpStream, mut to: TcpStream) {
    let _ = std::io::copy(&mut from, &mut to);
    let _ = to.shutdown(Shutdown::Write);
    let _ = from.shutdown(Shutdown::Read);
}
