//! Connections for the requests that wait for them.
//!
//! `reqwest` opens connections: by names and addresses, through proxies, and with TLS. hyper's client, to which it would
//! give them, receives bodies into buffers of its own. So a connection goes to the request that waits for it, and the client
//! is told that none was opened.

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use hyper::rt::{Read, Write};
use hyper_util::client::legacy::connect::Connection;
use std::cell::Cell;
use std::error::Error;
use std::future::Future;
use std::task::{Context, Poll};
use tower_service::Service;

tokio::task_local! {
    /// Connection that was opened for the request of a task.
    static OPENED: Cell<Option<Box<dyn Stream>>>;
}

/// Open connection, with or without TLS.
pub trait Stream: Read + Write + Send + Sync + Unpin {}

impl<T: Read + Write + Send + Sync + Unpin> Stream for T {}

/// Runs a request on a client whose connector is a [`Handover`]. Returns the connection that was opened for it, or the
/// result of the request if there is none.
pub(super) async fn open<T>(request: impl Future<Output = T>) -> Result<Box<dyn Stream>, T> {
    let request = async {
        let result = request.await;
        OPENED.with(Cell::take).ok_or(result)
    };
    OPENED.scope(Cell::default(), request).await
}

/// Connector that hands connections over, all but those to proxies that are told the whole URL.
#[derive(Clone)]
pub(super) struct Handover<S>(pub(super) S);

#[derive(Debug, thiserror::Error)]
#[error("the connection was handed over")]
struct HandedOver;

impl<R, S> Service<R> for Handover<S>
where
    S: Service<R, Error = Box<dyn Error + Send + Sync>>,
    S::Response: Connection + Stream + 'static,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: R) -> Self::Future {
        let opening = self.0.call(request);
        async move {
            let connection = opening.await?;
            if connection.connected().is_proxied() {
                return Ok(connection);
            }
            OPENED.with(|opened| opened.set(Some(Box::new(connection))));
            Err(HandedOver.into())
        }
        .boxed()
    }
}
