//! Requests to the services of AWS that issue keys.

use crate::remote::http::collect;
use crate::remote::http_error::failure_of;
use crate::remote::store::{Attempt, Failure, FailureClass};
use crate::remote::transport::Transport;
use object_store::client::{HttpRequest, HttpService};
use reqwest::StatusCode;
use std::time::Duration;

/// Number of times that a request is sent before its failure is an error.
const ATTEMPTS: u32 = 3;
/// Delay before the second attempt. It doubles for each further one.
const DELAY: Duration = Duration::from_millis(200);
/// Time limit of an attempt.
const LIMIT: Duration = Duration::from_secs(20);
/// Upper bound for the size of an answer. Answers take a few KB.
const ANSWER_BYTES_MAX: u64 = 1 << 20;

/// Sends a request and returns the status and the body of the answer. Repeats it after failures that may pass.
///
/// # Errors
/// Text with the host and the reason, if no answer arrives. It has neither the URL nor the headers of the request.
pub(super) async fn send(request: &HttpRequest) -> Result<(StatusCode, Vec<u8>), String> {
    let (mut attempt, mut delay) = (1, DELAY);
    loop {
        let late = |_| Err(Failure::new(FailureClass::Transient, format!("not within {} s", LIMIT.as_secs())));
        match tokio::time::timeout(LIMIT, send_once(request.clone())).await.unwrap_or_else(late) {
            Ok(answer) => return Ok(answer),
            Err(failure) if attempt == ATTEMPTS || !failure.is_transient() => {
                let host = request.uri().authority().map_or("", |authority| authority.as_str());
                return Err(format!("no answer from {host}: {}", failure.message));
            }
            Err(_) => tokio::time::sleep(delay).await,
        }
        attempt += 1;
        delay *= 2;
    }
}

async fn send_once(request: HttpRequest) -> Attempt<(StatusCode, Vec<u8>)> {
    let response = Transport::default().call(request).await.map_err(|error| failure_of(&error))?;
    Ok((response.status(), collect(response, ANSWER_BYTES_MAX).await?))
}
