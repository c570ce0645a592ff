//! Acts as a Service, because there is no kube-proxy: a port that directs new connections to a ready backend. Like
//! kube-proxy it keeps existing connections, also when their backend is no longer ready.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::error::file;
use crate::forward::join;
use crate::sandbox::Sandbox;
use crate::{Daemon, Program, Result};

/// Name of the process.
pub const SERVICE: &str = "extender-service";

/// Between two looks at a backend. Kubelet looks less often; how long a fail-over takes is not measured through this.
const BETWEEN_PROBES: Duration = Duration::from_millis(100);
const PROBE_LIMIT: Duration = Duration::from_secs(1);

/// Starts the program `tool` so that it serves a port of the sandbox in front of backends there.
///
/// # Errors
/// It cannot be started.
pub async fn start(place: &Sandbox, tool: &str, listen: &str, backends: &[&str]) -> Result<Daemon> {
    let mut args = vec!["service".to_owned(), format!("--listen={listen}")];
    args.extend(backends.iter().map(|backend| format!("--backend={backend}")));
    place.run(Program::new(SERVICE, tool, args)).await
}

/// Serves until killed. A connection that finds no backend ready is closed at once.
///
/// # Errors
/// The port cannot be listened on.
pub fn serve(listen: SocketAddr, backends: &[SocketAddr]) -> Result<()> {
    let listener =
        TcpListener::bind(listen).map_err(file("listen for", std::path::Path::new(&listen.to_string())))?;
    let backends: Vec<(SocketAddr, Arc<AtomicBool>)> =
        backends.iter().map(|address| (*address, Arc::new(AtomicBool::new(false)))).collect();
    for (address, ready) in &backends {
        let (address, ready) = (*address, Arc::clone(ready));
        thread::spawn(move || {
            loop {
                ready.store(probe(address).unwrap_or(false), Ordering::Relaxed);
                thread::sleep(BETWEEN_PROBES);
            }
        });
    }
    for accepted in listener.incoming() {
        let Ok(client) = accepted else { continue };
        let mut ready = backends.iter().filter(|(_, ready)| ready.load(Ordering::Relaxed));
        if let Some((address, _)) = ready.next() {
            let address = *address;
            thread::spawn(move || {
                if let Ok(backend) = TcpStream::connect(address) {
                    join(client, backend);
                }
            });
        }
    }
    Ok(())
}

/// Whether a backend answers its readiness probe with 200.
fn probe(address: SocketAddr) -> std::io::Result<bool> {
    let mut stream = TcpStream::connect_timeout(&address, PROBE_LIMIT)?;
    stream.set_read_timeout(Some(PROBE_LIMIT))?;
    stream.write_all(b"GET /readyz HTTP/1.1\r\nHost: backend\r\nConnection: close\r\n\r\n")?;
    let mut status = [0; 12];
    stream.read_exact(&mut status)?;
    Ok(status.ends_with(b" 200"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that answers each connection with one text.
    fn answering(text: &'static str) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut request = [0; 16];
                stream.read_exact(&mut request).unwrap();
                stream.write_all(text.as_bytes()).unwrap();
            }
        });
        address
    }

    #[test]
    fn backend_without_ok_response_is_not_ready() {
        assert!(probe(answering("HTTP/1.1 200 OK\r\n\r\n")).unwrap());
        assert!(!probe(answering("HTTP/1.1 503 Service Unavailable\r\n\r\n")).unwrap());
        let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        assert!(probe(nobody).is_err());
    }
}
