//! A connection to a server that a test can block, so that later requests are read but never answered, or shut.

use std::net::SocketAddr;

use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::soon;

/// What becomes of connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Passage {
    Open,
    Blocked,
    Shut,
}

/// Forwards connections until it is blocked or shut.
pub struct Door {
    passage: watch::Sender<Passage>,
    /// Number of connections with an unanswered request.
    unanswered: watch::Receiver<usize>,
}

impl Door {
    /// Opens at an unused address.
    pub async fn open(address: SocketAddr, server: SocketAddr) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let (passage, state) = watch::channel(Passage::Open);
        let (count, unanswered) = watch::channel(0);
        tokio::spawn(async move {
            loop {
                let (visitor, _) = listener.accept().await.unwrap();
                tokio::spawn(pass(visitor, server, state.clone(), count.clone()));
            }
        });
        Self { passage, unanswered }
    }

    pub fn block(&self) {
        self.passage.send_replace(Passage::Blocked);
    }

    /// Ends every connection, also those that are made later.
    pub fn shut(&self) {
        self.passage.send_replace(Passage::Shut);
    }

    /// Forwards connections again.
    pub fn reopen(&self) {
        self.passage.send_replace(Passage::Open);
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
    mut passage: watch::Receiver<Passage>,
    unanswered: watch::Sender<usize>,
) {
    // At the end of a test the server may stop before its clients.
    let Ok(mut server) = TcpStream::connect(server).await else {
        return;
    };
    tokio::select! {
        biased;
        closed = passage.wait_for(|passage| *passage != Passage::Open) => {
            if closed.is_ok_and(|passage| *passage == Passage::Shut) {
                return;
            }
        }
        _ = tokio::io::copy_bidirectional(&mut visitor, &mut server) => return,
    }
    let (mut first, mut read) = (true, [0; 4096]);
    while visitor.read(&mut read).await.is_ok_and(|count| count > 0) {
        if std::mem::take(&mut first) {
            unanswered.send_modify(|count| *count += 1);
        }
    }
}
