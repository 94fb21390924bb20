//! Order of the addresses of a host: those that accept connections first.
//!
//! A connection tries the addresses of a name one after the other, and gives each a part of its time. An address that does
//! not answer would cost that time for each connection. So new addresses are tried side by side, and silent ones come last.

use crate::os::mutex::Mutex;
use crate::os::per_process::PerProcess;
use futures_util::future::select_ok;
use http::Uri;
use std::collections::HashMap;
use std::future::Future;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio::time::sleep;

/// Time after which the next address is tried, too.
const HEAD_START: Duration = Duration::from_millis(50);
/// Time for which the result of a trial is used.
const KNOWN_TIME: Duration = Duration::from_secs(60);

/// Whether addresses accept connections, and when that was found out.
type Known = HashMap<SocketAddr, (Instant, bool)>;

static KNOWN: PerProcess<Mutex<Known>> = PerProcess::new(Mutex::default);

tokio::task_local! {
    /// Host and port of the request that a task sends.
    static TARGET: (String, u16);
}

/// Sends a request to a URI. Connections that open meanwhile know the port of its host.
pub async fn with_target<F: Future>(uri: &Uri, request: F) -> F::Output {
    let port = uri.port_u16().unwrap_or(if uri.scheme_str() == Some("https") { 443 } else { 80 });
    TARGET.scope((uri.host().unwrap_or_default().to_owned(), port), request).await
}

/// Returns the port of a host, if the request is for this host, and not for another one behind its proxy.
pub(super) fn port_of(name: &str) -> Option<u16> {
    TARGET.try_with(|(host, port)| host.eq_ignore_ascii_case(name).then_some(*port)).ok().flatten()
}

/// Puts an address that accepts connections first, and silent ones last. Waits until one accepts, or all refuse.
pub(super) async fn sort(addresses: &mut [SocketAddr]) {
    addresses.sort_by_key(|address| known(address) == Some(false));
    let is_known = addresses.first().is_none_or(|first| known(first) == Some(true));
    if is_known || addresses.len() == 1 {
        return;
    }
    let attempts = addresses.iter().enumerate().zip(0..).map(|((index, address), before)| {
        Box::pin(async move {
            sleep(HEAD_START * before).await;
            TcpStream::connect(address).await.map(|_| index)
        })
    });
    let Ok((first, _)) = select_ok(attempts).await else { return };
    let mut known = KNOWN.get().lock();
    known.retain(|_, (since, _)| since.elapsed() < KNOWN_TIME);
    known.extend(
        addresses.iter().take(first + 1).enumerate().map(|(i, address)| (*address, (Instant::now(), i == first))),
    );
    drop(known);
    addresses.rotate_left(first);
}

fn known(address: &SocketAddr) -> Option<bool> {
    let known = KNOWN.get().lock();
    known.get(address).filter(|(since, _)| since.elapsed() < KNOWN_TIME).map(|(_, accepts)| *accepts)
}
