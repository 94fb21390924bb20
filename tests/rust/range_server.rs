//! HTTP server for the files of a directory, which cuts some answers off in the middle.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

pub struct RangeServer {
    pub address: SocketAddr,
}

impl RangeServer {
    /// Starts a server that lives as long as the process. Of the answers, every `cut_every`-th ends after half its body.
    pub fn start(directory: &Path, cut_every: usize) -> RangeServer {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let answers = Arc::new(AtomicUsize::new(0));
        let directory = directory.to_path_buf();
        thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                let (directory, answers) = (directory.clone(), Arc::clone(&answers));
                thread::spawn(move || serve(&connection, &directory, &answers, cut_every));
            }
        });
        RangeServer { address }
    }

    pub fn url(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("http://{}/{name}", self.address))
    }
}

/// Answers the requests of one connection.
fn serve(connection: &TcpStream, directory: &Path, answers: &AtomicUsize, cut_every: usize) -> Option<()> {
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
        let bytes = fs::read(directory.join(name)).ok()?;
        let begin: usize = first.parse().ok()?;
        let end = (last.parse::<usize>().ok()? + 1).min(bytes.len());
        let mut connection = connection;
        let body = bytes.get(begin..end)?;
        let answer = format!(
            "HTTP/1.1 206 Partial Content\r\nETag: \"1\"\r\nContent-Length: {}\r\nContent-Range: bytes {begin}-{}/{}\r\n\r\n",
            body.len(),
            end - 1,
            bytes.len()
        );
        connection.write_all(answer.as_bytes()).ok()?;
        if (answers.fetch_add(1, Ordering::Relaxed) + 1).is_multiple_of(cut_every) {
            connection.write_all(body.get(..body.len() / 2)?).ok()?;
            return None;
        }
        connection.write_all(body).ok()?;
    }
}
