//! Keys from the program of `credential_process`.

use super::files::Place;
use super::ini::split_words;
use super::refresh::{self, KeySource, Keys, parse_date};
use crate::error::{Kind, Result};
use async_trait::async_trait;
use serde::Deserialize;
use std::io::{self, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

/// Time limit of a program. A program may ask a server or the user.
pub const LIMIT: Duration = Duration::from_secs(60);
/// Upper bound for the size of each output of a program. The keys take less than 10 KB.
const OUTPUT_BYTES_MAX: u64 = 1 << 20;
/// Interval of the checks whether a program has ended.
const INTERVAL: Duration = Duration::from_millis(5);
/// Upper bound for the length of the program's messages in an error, in characters.
const MESSAGE_CHARS_MAX: usize = 1000;

pub(super) struct CredentialProcess {
    pub(super) place: Place,
    pub(super) command: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Answer {
    version: u32,
    access_key_id: String,
    secret_access_key: String,
    session_token: Option<String>,
    expiration: Option<String>,
}

#[async_trait]
impl KeySource for CredentialProcess {
    async fn fetch(&self) -> Result<Keys> {
        const KEY: &str = "credential_process";
        let denied = |message: &str| self.place.error(Kind::PermissionDenied, KEY, message);
        let stdout = run(&self.command, LIMIT).await.map_err(|problem| denied(&problem))?;
        // Errors of serde_json quote values, which may be secrets.
        let Ok(answer) = serde_json::from_slice::<Answer>(&stdout) else {
            return Err(denied(
                "the program wrote no JSON with \"Version\": 1, \"AccessKeyId\" and \"SecretAccessKey\"; run it in a \
                 terminal to see its output",
            ));
        };
        if answer.version != 1 {
            return Err(denied(&format!("the program wrote version {} of its format; expected 1", answer.version)));
        }
        let expires = match answer.expiration.as_deref().map(|text| parse_date(text).ok_or(())).transpose() {
            Ok(expires) => expires,
            Err(()) => return Err(denied("the program wrote an \"Expiration\" that is not a date in RFC 3339")),
        };
        let texts = (answer.access_key_id, answer.secret_access_key, answer.session_token);
        Ok(Keys { credential: Arc::new(refresh::checked(&self.place, KEY, texts)?), expires })
    }
}

/// Runs a command and returns its standard output. As with the AWS CLI, the command is split into words as by a shell,
/// but no shell runs it.
///
/// # Errors
/// Text that names the program and has its messages, but neither its arguments nor its output, which may have secrets.
pub async fn run(command: &str, limit: Duration) -> std::result::Result<Vec<u8>, String> {
    let words = split_words(command).ok_or("the command has a quote that is not closed, or ends with a backslash")?;
    let (program, arguments) = words.split_first().ok_or("the command is empty")?;
    let cannot_run = |error: io::Error| format!("cannot run {program:?}: {error}");
    let mut child = Command::new(program)
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map(Running)
        .map_err(cannot_run)?;
    let stdout = read(child.0.stdout.take()).map_err(cannot_run)?;
    let stderr = read(child.0.stderr.take()).map_err(cannot_run)?;
    let started = Instant::now();
    let (mut status, mut out, mut messages) = (None, None, None);
    loop {
        status = status.or(child.0.try_wait().map_err(cannot_run)?);
        out = out.or_else(|| stdout.try_recv().ok());
        messages = messages.or_else(|| stderr.try_recv().ok());
        if let (Some(status), Some(_), Some(messages)) = (status, &out, &messages) {
            let status: ExitStatus = status;
            if status.success() {
                return Ok(out.unwrap_or_default());
            }
            let messages = String::from_utf8_lossy(messages);
            let messages: String = messages.trim().chars().take(MESSAGE_CHARS_MAX).collect();
            return Err(match messages.is_empty() {
                true => format!("{program:?} failed without a message: {status}"),
                false => format!("{program:?} failed: {status}: {messages}"),
            });
        }
        if started.elapsed() >= limit {
            return Err(format!("{program:?} did not end within {} s", limit.as_secs_f32()));
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

/// Process that is ended if the load that waits for it ends.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // Neither has an effect on a process that has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Reads an output of a process on a thread. The thread is not joined: a grandchild may hold the pipe open for ever.
fn read(pipe: Option<impl Read + Send + 'static>) -> io::Result<Receiver<Vec<u8>>> {
    let (sender, receiver) = mpsc::channel();
    std::thread::Builder::new().name("fst-process".into()).spawn(move || {
        let mut bytes = Vec::new();
        // What was read before a failure is judged by its reader.
        let _ = pipe.map(|pipe| pipe.take(OUTPUT_BYTES_MAX).read_to_end(&mut bytes));
        let _ = sender.send(bytes);
    })?;
    Ok(receiver)
}
