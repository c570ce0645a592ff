//! A connection to a server that a test can open and block: later requests are read but never answered.

use std::net::SocketAddr;

use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::soon;

/// Forwards connections until it is blocked.
pub struct Door {
    blocked: watch::Sender<bool>,
    /// Number of connections with an unanswered request.
    unanswered: watch::Receiver<usize>,
}

impl Door {
    /// Opens at an unused address.
    pub async fn open(address: SocketAddr, server: SocketAddr) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let (blocked, is_blocked) = watch::channel(false);
        let (count, unanswered) = watch::channel(0);
        tokio::spawn(async move {
            loop {
                let (visitor, _) = listener.accept().await.unwrap();
                tokio::spawn(pass(visitor, server, is_blocked.clone(), count.clone()));
            }
        });
        Self { blocked, unanswered }
    }

    pub fn block(&self) {
        self.blocked.send_replace(true);
    }

    /// Waits for this number of unanswered requests.
    pub async fn is_tried(&self, requests: usize) {
        let mut unanswered = self.unanswered.clone();
        let tried = unanswered.wait_for(|count| *count >= requests);
        drop(soon("requests", tried).await.unwrap());
    }
}

async fn pass(
    mut visitor: TcpStream,
    server: SocketAddr,
    mut blocked: watch::Receiver<bool>,
    unanswered: watch::Sender<usize>,
) {
    // At the end of a test the server may stop before its clients.
    let Ok(mut server) = TcpStream::connect(server).await else {
        return;
    };
    tokio::select! {
        biased;
        _ = blocked.wait_for(|blocked| *blocked) => {}
        _ = tokio::io::copy_bidirectional(&mut visitor, &mut server) => return,
    }
    let (mut first, mut read) = (true, [0; 4096]);
    while visitor.read(&mut read).await.is_ok_and(|count| count > 0) {
        if std::mem::take(&mut first) {
            unanswered.send_modify(|count| *count += 1);
        }
    }
}
