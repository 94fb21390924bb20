//! A request without a body, and its answer.
//!
//! hyper sends the request and reads the head of the answer. A body of known length can be received from the connection
//! itself, into the memory that it is for ([`Rest`]). Other bodies arrive in buffers of hyper's.

use super::Attempt;
use super::connections::{Idle, Reader, USER_AGENT};
use super::handover::{self, Stream};
use super::http_error::{self, HttpResult, Progress, stalled};
use crate::num::to_u64;
use crate::os::mutex::Mutex;
use crate::remote::transfer::body;
use bytes::Bytes;
use futures_util::FutureExt;
use http::header::{self, HeaderValue};
use http::{Response, Uri, Version};
use http_body_util::{BodyExt, Empty};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::client::conn::http1::{self, Connection, Parts};
use hyper::rt::{Read, ReadBuf};
use hyper_util::rt::TokioIo;
use object_store::client::{HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody};
use std::future::{Future, poll_fn};
use std::io::{self, Cursor, ErrorKind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncReadExt, BufReader, Chain, Take};
use tokio::task::yield_now;
use tokio::time::timeout;

/// Shorter destinations are filled from a buffer of this size, so that small tensors share a system call.
const BUFFER_BYTES: usize = 128 << 10;

/// Sends a request, and returns the answer once it has begun. Fails if that takes longer than `stall`. The body is among
/// the extensions, too, unless a proxy on the way is told the whole URL.
pub(super) async fn send(reader: &Arc<Reader>, request: HttpRequest, stall: Duration) -> HttpResult<HttpResponse> {
    let origin = origin(request.uri());
    let stream = match open_connection(&reader.idle, &origin).await {
        Some(stream) => stream,
        None => match handover::open(body::send_empty(&reader.client, request.clone())).await {
            Ok(stream) => stream,
            Err(answer) => return answer,
        },
    };
    let late = |_| HttpError::new(HttpErrorKind::Timeout, io::Error::from(ErrorKind::TimedOut));
    let (response, protocol) = timeout(stall, exchange(stream, request)).await.map_err(late)??;
    let (mut parts, incoming) = response.into_parts();
    let ends =
        parts.headers.get_all(header::CONNECTION).iter().any(|value| value.as_bytes().eq_ignore_ascii_case(b"close"));
    let place = (parts.version == Version::HTTP_11 && !ends).then(|| Place { reader: Arc::clone(reader), origin });
    let body = Unreceived(Arc::new(Mutex::new(Some(Answering { protocol, incoming, place, stall }))));
    parts.extensions.insert(body.clone());
    Ok(Response::from_parts(parts, HttpResponseBody::new(body)))
}

fn origin(uri: &Uri) -> String {
    format!("{}://{}", uri.scheme_str().unwrap_or_default(), uri.authority().map_or("", |authority| authority.as_str()))
}

/// Takes a connection that is still open. The runtime has not run since its last request.
async fn open_connection(idle: &Idle<String, Box<dyn Stream>>, origin: &str) -> Option<Box<dyn Stream>> {
    loop {
        let mut stream = idle.take(|known| known == origin)?;
        yield_now().await;
        let mut byte = [0];
        let mut unexpected = ReadBuf::new(&mut byte);
        let news = poll_fn(|cx| Poll::Ready(Pin::new(&mut stream).poll_read(cx, unexpected.unfilled())));
        if news.await.is_pending() {
            return Some(stream);
        }
    }
}

/// Protocol on a connection during one request.
struct Protocol {
    connection: Connection<Box<dyn Stream>, Empty<Bytes>>,
    is_ended: bool,
}

impl Protocol {
    /// Sends and receives what is possible now. Errors reach the response or its body.
    fn run(&mut self, cx: &mut Context<'_>) {
        self.is_ended = self.is_ended || self.connection.poll_without_shutdown(cx).is_ready();
    }
}

async fn exchange(stream: Box<dyn Stream>, request: HttpRequest) -> HttpResult<(Response<Incoming>, Protocol)> {
    let failed = |error: hyper::Error| HttpError::new(HttpErrorKind::Unknown, error);
    let (mut sender, connection) = http1::handshake(stream).await.map_err(failed)?;
    let mut protocol = Protocol { connection, is_ended: false };
    let mut response = pin!(sender.send_request(of_origin(request)));
    let response = poll_fn(|cx| {
        protocol.run(cx);
        match response.as_mut().poll(cx) {
            Poll::Pending if protocol.is_ended => {
                Poll::Ready(Err(HttpError::new(HttpErrorKind::Unknown, io::Error::from(ErrorKind::ConnectionReset))))
            }
            response => response.map_err(failed),
        }
    });
    Ok((response.await?, protocol))
}

/// Returns the request as a server gets it that is not a proxy.
fn of_origin(request: HttpRequest) -> http::Request<Empty<Bytes>> {
    let (mut parts, _) = request.into_parts();
    // Without the user and password that an authority may begin with.
    let host = parts.uri.authority().and_then(|authority| authority.as_str().rsplit('@').next());
    if let Some(host) = host.and_then(|host| HeaderValue::from_str(host).ok()) {
        parts.headers.entry(header::HOST).or_insert(host);
    }
    parts.headers.entry(header::USER_AGENT).or_insert(HeaderValue::from_static(USER_AGENT));
    parts.headers.entry(header::ACCEPT).or_insert(HeaderValue::from_static("*/*"));
    let path = parts.uri.path_and_query().cloned();
    parts.uri = path.map_or_else(Uri::default, Uri::from);
    http::Request::from_parts(parts, Empty::new())
}

/// Idle connections to which one returns after its answer.
struct Place {
    reader: Arc<Reader>,
    origin: String,
}

impl Place {
    fn keep(self, stream: Box<dyn Stream>) {
        self.reader.idle.keep(self.origin, stream);
    }
}

struct Answering {
    protocol: Protocol,
    incoming: Incoming,
    /// `None` if the server ends the connection after the answer.
    place: Option<Place>,
    stall: Duration,
}

/// Body of an answer. Nothing is left of it for others once its [`Rest`] was taken.
#[derive(Clone)]
pub struct Unreceived(Arc<Mutex<Option<Answering>>>);

impl Body for Unreceived {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<HttpResult<Frame<Bytes>>>> {
        let mut slot = self.0.lock();
        let Some(answering) = &mut *slot else { return Poll::Ready(None) };
        answering.protocol.run(cx);
        let frame = ready!(Pin::new(&mut answering.incoming).poll_frame(cx));
        if frame.is_none()
            && let Some(Answering { protocol, place: Some(place), .. }) = slot.take()
        {
            let parts = protocol.connection.into_parts();
            if parts.read_buf.is_empty() {
                place.keep(parts.io);
            }
        }
        Poll::Ready(frame.map(|frame| frame.map_err(|error| HttpError::new(HttpErrorKind::Unknown, error))))
    }

    fn size_hint(&self) -> SizeHint {
        self.0.lock().as_ref().map_or_else(|| SizeHint::with_exact(0), |answering| answering.incoming.size_hint())
    }
}

impl Unreceived {
    /// Takes the rest of the body. `None` if its length is unknown, or all of it has been received.
    pub fn take(&self) -> Option<Rest> {
        let mut slot = self.0.lock();
        let left = slot.as_ref()?.incoming.size_hint().exact()?;
        let Answering { protocol, mut incoming, place, stall } = slot.take()?;
        // Bytes that arrived with the head.
        let mut begin = Vec::new();
        while let Some(Some(Ok(frame))) = incoming.frame().now_or_never() {
            begin.extend_from_slice(frame.data_ref().map_or(&[], |data| data));
        }
        let Parts { io, read_buf, .. } = protocol.connection.into_parts();
        begin.extend_from_slice(&read_buf);
        let place = place.filter(|_| to_u64(begin.len()) <= left);
        let all = Cursor::new(begin).chain(TokioIo::new(io)).take(left);
        let progress = Progress::new(stall);
        Some(Rest { stream: BufReader::with_capacity(BUFFER_BYTES, all), left, progress, place })
    }
}

/// Bytes that arrived with the head of an answer, and those on the connection.
type Remaining = Take<Chain<Cursor<Vec<u8>>, TokioIo<Box<dyn Stream>>>>;

/// Rest of a body of known length, on its connection.
pub struct Rest {
    stream: BufReader<Remaining>,
    left: u64,
    progress: Progress,
    place: Option<Place>,
}

impl Rest {
    /// Returns the number of bytes that have not been received.
    pub fn left(&self) -> u64 {
        self.left
    }

    /// Receives some of the next bytes, and returns their number.
    pub async fn receive(&mut self, into: &mut [u8]) -> Attempt<usize> {
        let received = self.progress.receive(self.stream.read(into), |count| *count.as_ref().unwrap_or(&0)).await;
        let count = match received.ok_or_else(stalled)? {
            Ok(0) => Err(io::Error::new(ErrorKind::UnexpectedEof, "end of file before message length reached")),
            result => result,
        };
        let count = count.map_err(|error| http_error::failure_of(&error))?;
        self.left -= to_u64(count);
        Ok(count)
    }

    /// Leaves the connection to the next request. All bytes have been received.
    pub fn end(self) {
        if let Some(place) = self.place {
            let (_, io) = self.stream.into_inner().into_inner().into_inner();
            place.keep(io.into_inner());
        }
    }
}
