//! Reads probes and metrics of a daemon.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::soon;

/// Interval of reads of what cannot be awaited.
pub async fn a_moment() {
    tokio::time::sleep(std::time::Duration::from_millis(10)).await;
}

/// The first response that contains `part`: status and body.
pub async fn awaited(address: SocketAddr, path: &str, part: &str) -> (u16, String) {
    let answer = async {
        loop {
            let (code, body) = get(address, path).await;
            if body.contains(part) {
                return (code, body);
            }
            a_moment().await;
        }
    };
    soon(part, answer).await
}

/// Status and body, once the server listens.
pub async fn get(address: SocketAddr, path: &str) -> (u16, String) {
    let connect = async {
        loop {
            match TcpStream::connect(address).await {
                Ok(stream) => return stream,
                Err(_) => a_moment().await,
            }
        }
    };
    let mut stream = soon("a listener", connect).await;
    let request = format!("GET {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}
