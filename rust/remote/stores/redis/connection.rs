//! Connections that speak RESP, the protocol of Redis.

use crate::num::{to_u64, to_usize};
use crate::remote::credentials::redis::Credentials;
use crate::remote::stores::connections::CONNECT_TIMEOUT;
use crate::remote::stores::http_error::{Progress, stalled};
use crate::remote::stores::{Attempt, Failure, FailureClass};
use crate::remote::stores::{addresses, http_error};
use crate::remote::transfer::{body, runtime};
use bytes::{Bytes, BytesMut};
use rustix::net::sockopt::set_tcp_user_timeout;
use rustls::pki_types::ServerName;
use std::io::{self, Cursor};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, lookup_host};
use tokio::runtime::Builder;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

/// Number of bytes that one system call may read.
const READ_BYTES: usize = 256 << 10;
/// Number of bytes that are written at once, and counted then.
const WRITE_BYTES: usize = 256 << 10;
/// Largest line of a reply, and largest text that is read as a whole: a key of a listing.
const TEXT_BYTES_MAX: usize = 64 << 10;

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// Open connection after its handshakes.
pub(super) struct Connection {
    stream: Box<dyn Stream>,
    /// Bytes that arrived and were not used.
    buffer: BytesMut,
    /// Time without a byte after which the connection counts as lost. The kernel ends a connection on which the server
    /// takes nothing for this time.
    stall: Duration,
    /// Bytes that have arrived since the last commands.
    progress: Progress,
}

/// Beginning of a reply.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Reply {
    Text(String),
    Integer(u64),
    /// Number of bytes, which follow.
    Bulk(u64),
    /// Number of replies, which follow.
    Array(u64),
}

impl Connection {
    fn new(stream: Box<dyn Stream>, stall: Duration) -> Connection {
        Connection { stream, buffer: BytesMut::new(), stall, progress: Progress::new(stall) }
    }

    /// Connects, and passes the credentials on.
    pub(super) async fn open(credentials: &Credentials, stall: Duration) -> Attempt<Connection> {
        let late = |_| Failure::new(FailureClass::Transient, "the server did not accept a connection in time");
        let stream = timeout(CONNECT_TIMEOUT, connect(credentials, stall)).await.map_err(late)??;
        let mut connection = Connection::new(stream, stall);
        let Credentials { user, password, database, .. } = credentials;
        if !password.is_empty() {
            let command: &[&str] = if user.is_empty() { &["AUTH", password] } else { &["AUTH", user, password] };
            connection.send(&[command]).await?;
            connection.reply().await.map_err(without_command)?;
        }
        if *database > 0 {
            connection.send(&[&["SELECT", &database.to_string()]]).await?;
            connection.reply().await?;
        }
        Ok(connection)
    }

    /// Gives the connection to later requests on the same runtime. No reply may be missing.
    pub(super) fn keep(self, credentials: &Arc<Credentials>) {
        if let Some(runtime) = runtime::client().filter(|_| self.buffer.is_empty()) {
            runtime.idle().keep(credentials.clone(), Box::new(self));
        }
    }

    pub(super) async fn send(&mut self, commands: &[&[&str]]) -> Attempt<()> {
        let mut bytes = Vec::new();
        commands.iter().for_each(|command| encode(&mut bytes, command, None));
        self.progress = Progress::new(self.stall);
        self.write(&bytes).await
    }

    async fn write(&mut self, bytes: &[u8]) -> Attempt<()> {
        for piece in bytes.chunks(WRITE_BYTES) {
            let written = async { self.stream.write_all(piece).await.and(self.stream.flush().await) };
            written.await.map_err(|error| http_error::failure_of(&error))?;
            runtime::add_sent(to_u64(piece.len()));
        }
        Ok(())
    }

    /// Sends commands that are run without other clients' commands in between. Their replies are the next ones.
    pub(super) async fn transact(&mut self, commands: &[&[&str]]) -> Attempt<()> {
        let begin: &[&str] = &["MULTI"];
        let end: &[&str] = &["EXEC"];
        let all: Vec<&[&str]> = [begin].into_iter().chain(commands.iter().copied()).chain([end]).collect();
        self.send(&all).await?;
        self.begin_replies(commands.len()).await
    }

    /// Sends a command whose last word has these bytes, and others. They are run like the commands of
    /// [`transact`](Connection::transact).
    pub(super) async fn transact_with(&mut self, first: &[&str], bytes: &[u8], others: &[&[&str]]) -> Attempt<()> {
        let since = Instant::now();
        let mut begin = Vec::new();
        encode(&mut begin, &["MULTI"], None);
        encode(&mut begin, first, Some(bytes.len()));
        self.write(&begin).await?;
        self.write(bytes).await?;
        let mut end = b"\r\n".to_vec();
        others.iter().for_each(|command| encode(&mut end, command, None));
        encode(&mut end, &["EXEC"], None);
        self.write(&end).await?;
        self.progress = Progress::new(body::answer_time(since.elapsed()));
        self.begin_replies(others.len() + 1).await
    }

    /// Reads what precedes the replies of a transaction with this number of commands.
    async fn begin_replies(&mut self, commands: usize) -> Attempt<()> {
        // "OK", and "QUEUED" for each command.
        for _ in 0..=commands {
            self.confirmation().await?;
        }
        if self.array().await? != to_u64(commands) {
            return Err(unexpected("another number of replies"));
        }
        Ok(())
    }

    /// Reads the beginning of a reply. An error of the server is a failure.
    pub(super) async fn reply(&mut self) -> Attempt<Reply> {
        let line = self.line().await?;
        let Some((kind, text)) = line.split_first() else { return Err(unexpected("an empty line")) };
        let text = String::from_utf8_lossy(text);
        let number = || text.parse::<u64>().map_err(|_| unexpected("no number"));
        match kind {
            b'+' => Ok(Reply::Text(text.into_owned())),
            b'-' => Err(failure_of(&text)),
            b':' => number().map(Reply::Integer),
            b'$' => number().map(Reply::Bulk),
            b'*' => number().map(Reply::Array),
            _ => Err(unexpected("another protocol")),
        }
    }

    pub(super) async fn integer(&mut self) -> Attempt<u64> {
        let Reply::Integer(number) = self.reply().await? else { return Err(unexpected("no number")) };
        Ok(number)
    }

    pub(super) async fn array(&mut self) -> Attempt<u64> {
        let Reply::Array(length) = self.reply().await? else { return Err(unexpected("no list")) };
        Ok(length)
    }

    /// Reads the text that confirms a command.
    pub(super) async fn confirmation(&mut self) -> Attempt<()> {
        let Reply::Text(_) = self.reply().await? else { return Err(unexpected("no text")) };
        Ok(())
    }

    pub(super) async fn bulk(&mut self) -> Attempt<Vec<u8>> {
        self.bulk_of(TEXT_BYTES_MAX).await
    }

    /// Reads a value of at most `bytes_max` bytes.
    pub(super) async fn bulk_of(&mut self, bytes_max: usize) -> Attempt<Vec<u8>> {
        let length = match self.reply().await? {
            Reply::Bulk(length) if to_usize(length) <= bytes_max => to_usize(length),
            _ => return Err(unexpected("no short value")),
        };
        let mut bytes = Vec::with_capacity(length);
        while bytes.len() < length {
            bytes.extend_from_slice(&self.frame(length - bytes.len()).await?);
        }
        self.end_of_bulk().await?;
        Ok(bytes)
    }

    /// Returns at least one and at most `bytes_max` bytes of a value.
    pub(super) async fn frame(&mut self, bytes_max: usize) -> Attempt<Bytes> {
        if self.buffer.is_empty() {
            self.receive().await?;
        }
        let length = self.buffer.len().min(bytes_max);
        Ok(self.buffer.split_to(length).freeze())
    }

    /// Reads what follows a value.
    pub(super) async fn end_of_bulk(&mut self) -> Attempt<()> {
        if self.line().await?.is_empty() { Ok(()) } else { Err(unexpected("a value that is too long")) }
    }

    async fn line(&mut self) -> Attempt<Bytes> {
        let mut searched = 0;
        loop {
            let rest = self.buffer.get(searched..).unwrap_or_default();
            if let Some(found) = rest.windows(2).position(|pair| pair == b"\r\n") {
                let line = self.buffer.split_to(searched + found + 2).freeze();
                return Ok(line.slice(..line.len() - 2));
            }
            searched = self.buffer.len().saturating_sub(1);
            if searched > TEXT_BYTES_MAX {
                return Err(unexpected("a line that is too long"));
            }
            self.receive().await?;
        }
    }

    async fn receive(&mut self) -> Attempt<()> {
        // Reuses the memory if no frame needs it any more.
        self.buffer.reserve(READ_BYTES);
        let length = |read: &io::Result<usize>| *read.as_ref().unwrap_or(&0);
        let read = self.progress.receive(self.stream.read_buf(&mut self.buffer), length).await.ok_or_else(stalled)?;
        match read.map_err(|error| http_error::failure_of(&error))? {
            0 => Err(Failure::new(FailureClass::Transient, "the server closed the connection")),
            _ => Ok(()),
        }
    }
}

/// Appends a command. Its last word has `payload` bytes, which follow, if they are stated.
fn encode(bytes: &mut Vec<u8>, command: &[&str], payload: Option<usize>) {
    let words = command.len() + usize::from(payload.is_some());
    bytes.extend_from_slice(format!("*{words}\r\n").as_bytes());
    for word in command {
        bytes.extend_from_slice(format!("${}\r\n{word}\r\n", word.len()).as_bytes());
    }
    if let Some(payload) = payload {
        bytes.extend_from_slice(format!("${payload}\r\n").as_bytes());
    }
}

/// Returns a connection to a server that sends these bytes, and closes it.
fn answering(bytes: &[u8]) -> Connection {
    let stream = tokio::io::join(Cursor::new(bytes.to_vec()), tokio::io::sink());
    Connection::new(Box::new(stream), Duration::from_secs(1))
}

/// Reads all answers of a server, as values with their lengths, up to the first that is not valid.
pub fn read_answers(bytes: &[u8]) {
    let mut connection = answering(bytes);
    let Ok(runtime) = Builder::new_current_thread().enable_time().build() else { return };
    runtime.block_on(async {
        while let Ok(reply) = connection.reply().await {
            if let Reply::Bulk(mut missing) = reply {
                while missing > 0 {
                    let Ok(frame) = connection.frame(to_usize(missing)).await else { return };
                    missing -= to_u64(frame.len());
                }
                if connection.end_of_bulk().await.is_err() {
                    return;
                }
            }
        }
    });
}

async fn connect(credentials: &Credentials, stall: Duration) -> Attempt<Box<dyn Stream>> {
    let Credentials { host, port, .. } = credentials;
    let found = lookup_host((host.as_str(), *port)).await.map_err(|error| http_error::failure_of(&error))?;
    let mut found: Vec<_> = found.collect();
    addresses::sort(&mut found).await;
    let plain = TcpStream::connect(found.as_slice()).await.map_err(|error| http_error::failure_of(&error))?;
    plain.set_nodelay(true).map_err(|error| http_error::failure_of(&error))?;
    let milliseconds = u32::try_from(stall.as_millis()).unwrap_or(u32::MAX);
    set_tcp_user_timeout(&plain, milliseconds).map_err(|error| http_error::failure_of(&error))?;
    if !credentials.is_tls {
        return Ok(Box::new(plain));
    }
    let name = ServerName::try_from(host.clone())
        .map_err(|_| Failure::new(FailureClass::Invalid, "the host has no name that a certificate can have"))?;
    let tls = credentials.trust.config().map_err(|error| Failure::new(FailureClass::Permanent, error.to_string()))?;
    let secure = TlsConnector::from(tls).connect(name, plain).await;
    Ok(Box::new(secure.map_err(|error| http_error::failure_of(&error))?))
}

/// Returns the failure for an answer that the protocol does not have at this place.
pub(super) fn unexpected(what: &str) -> Failure {
    let message =
        format!("the server answered with {what}; check that it is Redis, and whether it expects TLS (rediss://)");
    Failure::new(FailureClass::Permanent, message)
}

/// Returns the failure that an error of the server stands for. Its first word is a code.
fn failure_of(text: &str) -> Failure {
    let code = text.split(' ').next().unwrap_or_default();
    let (class, message) = match code {
        "NOAUTH" | "WRONGPASS" | "NOPERM" | "DENIED" => return denied(code),
        "WRONGTYPE" => {
            (FailureClass::Permanent, "the key has a value of another type; the bytes of a file are a string".into())
        }
        "LOADING" | "BUSY" | "TRYAGAIN" | "MASTERDOWN" | "CLUSTERDOWN" => {
            (FailureClass::Transient, format!("the server is not ready ({code})"))
        }
        "MOVED" | "ASK" | "CROSSSLOT" => (
            FailureClass::Permanent,
            format!("another server of a cluster has the key ({text}); give the address of that server"),
        ),
        _ if text.contains("exceeds maximum allowed size") => (
            FailureClass::Permanent,
            "the file is too long for a value of this server (its option proto-max-bulk-len, 512 MB by default); save it \
             in shards with max_shard_bytes"
                .into(),
        ),
        "OOM" => (FailureClass::Permanent, "the server has no memory for the file (its option maxmemory)".into()),
        _ if text.contains("max number of clients") => {
            (FailureClass::RateLimited(None), "the server has too many connections".into())
        }
        _ => (FailureClass::Permanent, format!("the server refused a command: {text}")),
    };
    Failure::new(class, message)
}

fn denied(code: &str) -> Failure {
    let message = format!(
        "the server refuses access ({code}); check the user and the password: in the URL, set by fst.storage.configure, \
         or in REDISCLI_AUTH"
    );
    Failure::new(FailureClass::Denied, message)
}

/// Replaces a refusal of credentials, whose text may repeat them.
fn without_command(failure: Failure) -> Failure {
    if failure.is_transient() { failure } else { denied("AUTH") }
}
