//! HTTP server for the files of a directory, which misbehaves when it is told to.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

/// Deviation of one answer from what a client expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerFault {
    /// The connection is closed after half the body.
    Cut,
    /// Nothing follows half the body.
    Stall,
    /// Status 503.
    Unavailable,
    /// Status 200 and the whole file.
    WholeFile,
    /// A neighbour of the range.
    WrongRange,
    /// Another ETag.
    OtherVersion,
}

pub struct RangeServer {
    pub address: SocketAddr,
}

/// Returns the fault of an answer with these bytes of a file.
type Rule = dyn Fn(&Range<usize>) -> Option<ServerFault> + Send + Sync;

impl RangeServer {
    /// Starts a server that lives as long as the process.
    pub fn start(
        directory: &Path,
        rule: impl Fn(&Range<usize>) -> Option<ServerFault> + Send + Sync + 'static,
    ) -> RangeServer {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let rule: Arc<Rule> = Arc::new(rule);
        let directory = directory.to_path_buf();
        thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                let (directory, rule) = (directory.clone(), Arc::clone(&rule));
                thread::spawn(move || serve(&connection, &directory, &*rule));
            }
        });
        RangeServer { address }
    }

    pub fn url(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("http://{}/{name}", self.address))
    }
}

/// Answers the requests of one connection.
fn serve(mut connection: &TcpStream, directory: &Path, rule: &Rule) -> Option<()> {
    let mut lines = BufReader::new(connection).lines();
    loop {
        let head: Vec<String> = lines.by_ref().map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
        let name = head.first()?.split(' ').nth(1)?.trim_start_matches('/').to_owned();
        let value = |header: &str| {
            head.iter()
                .find_map(|line| line.to_ascii_lowercase().strip_prefix(header).map(|rest| rest.trim().to_owned()))
        };
        let range = value("range: bytes=")?;
        let (first, last) = range.split_once('-')?;
        let file = File::open(directory.join(name)).ok()?;
        let length = usize::try_from(file.metadata().ok()?.len()).ok()?;
        let begin: usize = first.parse().ok()?;
        let mut range = begin..(last.parse::<usize>().ok()? + 1).min(length);
        let fault = rule(&range);
        let mut status = "206 Partial Content";
        let mut tag = 1;
        match fault {
            Some(ServerFault::Unavailable) => {
                connection.write_all(b"HTTP/1.1 503 Busy\r\nRetry-After: 0\r\nContent-Length: 0\r\n\r\n").ok()?;
                continue;
            }
            Some(ServerFault::WholeFile) => (status, range) = ("200 OK", 0..length),
            Some(ServerFault::WrongRange) => range = range.start - 1..range.end - 1,
            Some(ServerFault::OtherVersion) => tag = 2,
            Some(ServerFault::Cut | ServerFault::Stall) | None => {}
        }
        let mut body = vec![0; range.len()];
        file.read_exact_at(&mut body, u64::try_from(range.start).ok()?).ok()?;
        let mut answer = format!("HTTP/1.1 {status}\r\nETag: \"{tag}\"\r\nContent-Length: {}\r\n", body.len());
        if status.starts_with("206") {
            answer += &format!("Content-Range: bytes {}-{}/{}\r\n", range.start, range.end - 1, length);
        }
        connection.write_all(format!("{answer}\r\n").as_bytes()).ok()?;
        if matches!(fault, Some(ServerFault::Cut | ServerFault::Stall)) {
            connection.write_all(body.get(..body.len() / 2)?).ok()?;
            if fault == Some(ServerFault::Stall) {
                // Returns when the client closes the connection.
                let _ = connection.read(&mut [0]);
            }
            return None;
        }
        connection.write_all(&body).ok()?;
    }
}
