//! Requests to the services of AWS that issue keys.

use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use object_store::client::{HttpClient, HttpRequest};
use reqwest::StatusCode;
use std::error::Error;
use std::time::Duration;

/// Number of times that a request is sent before its failure is an error.
const ATTEMPTS: u32 = 3;
/// Delay before the second attempt. It doubles for each further one.
const DELAY: Duration = Duration::from_millis(200);
/// Time limit of an attempt.
const LIMIT: Duration = Duration::from_secs(20);
/// Upper bound for the size of an answer. Answers take a few KB.
const ANSWER_BYTES_MAX: usize = 1 << 20;

/// Sends a request and returns the status and the body of the answer. Repeats it after failures that may pass.
///
/// # Errors
/// Text with the host and the reason, if no answer arrives. It has neither the URL nor the headers of the request.
pub(super) async fn send(http: &HttpClient, request: &HttpRequest) -> Result<(StatusCode, Bytes), String> {
    let mut attempt = 1;
    let mut delay = DELAY;
    loop {
        let answer = match tokio::time::timeout(LIMIT, send_once(http, request.clone())).await {
            Ok(answer) => answer,
            Err(_) => Err(format!("not within {} s", LIMIT.as_secs())),
        };
        let may_pass = match &answer {
            Ok((status, _)) => status.is_server_error() || *status == StatusCode::TOO_MANY_REQUESTS,
            Err(_) => true,
        };
        if attempt == ATTEMPTS || !may_pass {
            let host = request.uri().authority().map_or("", |authority| authority.as_str());
            return answer.map_err(|problem| format!("no answer from {host}: {problem}"));
        }
        attempt += 1;
        tokio::time::sleep(delay).await;
        delay *= 2;
    }
}

async fn send_once(http: &HttpClient, request: HttpRequest) -> Result<(StatusCode, Bytes), String> {
    let response = http.execute(request).await.map_err(|error| reasons(&error))?;
    let status = response.status();
    let mut body = BytesMut::new();
    let mut frames = response.into_body().bytes_stream();
    while let Some(frame) = frames.next().await {
        body.extend_from_slice(&frame.map_err(|error| reasons(&error))?);
        if body.len() > ANSWER_BYTES_MAX {
            return Err(format!("the answer has more than {ANSWER_BYTES_MAX} bytes"));
        }
    }
    Ok((status, body.freeze()))
}

/// Returns the text of an error and of its last cause, which names the failed system call or certificate.
fn reasons(error: &object_store::client::HttpError) -> String {
    let mut last = error.source();
    while let Some(cause) = last.and_then(|cause| cause.source()) {
        last = Some(cause);
    }
    match last.map(ToString::to_string).filter(|last| !error.to_string().contains(last)) {
        Some(last) => format!("{error}: {last}"),
        None => error.to_string(),
    }
}
