//! Runtimes with their connections, for requests.
//!
//! A thread that needs bytes runs the request itself, on a current-thread runtime with connections of its own. TLS and
//! copies therefore use as many cores as threads are reading, and no queue is between a thread and its bytes. Free runtimes
//! wait in the process's pool with their connections open, for the next load.

use crate::error::{Error, Kind, Result};
use crate::os::mutex::Mutex;
use crate::os::per_process::PerProcess;
use crate::os::retry::Check;
use crate::remote::stores::connections::{Client, IDLE_TIMEOUT};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, Handle};
use tokio::time::timeout;

/// Interval at which a waiting thread looks for Ctrl-C.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

static RUNTIMES: PerProcess<Mutex<Vec<Runtime>>> = PerProcess::new(Mutex::default);

thread_local! {
    /// Connections of the runtime that this thread runs requests on.
    static CLIENT: RefCell<Option<Client>> = const { RefCell::new(None) };
    /// Whether the runtime of this thread is not used again.
    static IS_DISCARDED: Cell<bool> = const { Cell::new(false) };
    /// Bytes of bodies that the connections of this thread's runtime have taken, and that were not asked for since.
    static SENT: Cell<u64> = const { Cell::new(0) };
}

pub(super) struct Runtime {
    runtime: Option<tokio::runtime::Runtime>,
    client: Client,
    /// Rest of an answer that nobody needs, and the time since when.
    rest: Option<(BoxFuture<'static, ()>, Instant)>,
}

impl Runtime {
    /// Takes the runtime that was used last, whose connections are the likeliest to be open, or creates one. Fails with
    /// `out-of-memory` if no runtime can be created; `invalid-argument` for the settings of connections.
    pub(super) fn take() -> Result<Runtime> {
        let free = RUNTIMES.get().lock().pop();
        if let Some(runtime) = free.filter(|runtime| runtime.client.is_current()) {
            return Ok(runtime);
        }
        let built = Builder::new_current_thread().enable_all().thread_keep_alive(Duration::from_millis(10)).build();
        let refused = |error| Error::new(Kind::OutOfMemory, format!("cannot create a runtime for requests: {error}"));
        Ok(Runtime { runtime: Some(built.map_err(refused)?), client: Client::new()?, rest: None })
    }

    pub(super) fn free(self) {
        RUNTIMES.get().lock().push(self);
    }

    /// Gives the runtime to later requests, the first of which receives the rest of an answer unless it is late. The
    /// connection is then free for that request.
    pub(super) fn free_after(mut self, rest: impl Future<Output = ()> + Send + 'static) {
        self.rest = Some((rest.boxed(), Instant::now()));
        self.free();
    }

    /// Runs requests on this thread, as [`block_on`] does. Also returns the runtime, unless it was discarded.
    pub(super) fn run<T: Send>(
        self,
        check: Check<'_>,
        request: impl Future<Output = Result<T>> + Send,
    ) -> (Option<Runtime>, Result<T>) {
        // A thread that runs a runtime of its own cannot run another.
        if Handle::try_current().is_ok() {
            self.run_on_another_thread(check, request)
        } else {
            self.run_here(check, request)
        }
    }

    fn run_on_another_thread<T: Send>(
        self,
        check: Check<'_>,
        request: impl Future<Output = Result<T>> + Send,
    ) -> (Option<Runtime>, Result<T>) {
        let is_ended = AtomicBool::new(false);
        thread::scope(|scope| {
            let run = scope.spawn(|| {
                let ended = || Err(Error::new(Kind::Interrupted, "the load ended"));
                self.run_here(&|| if is_ended.load(Ordering::Relaxed) { ended() } else { Ok(()) }, request)
            });
            let mut checked = Ok(());
            while checked.is_ok() && !run.is_finished() {
                thread::sleep(Duration::from_millis(1));
                checked = check();
            }
            is_ended.store(checked.is_err(), Ordering::Relaxed);
            let panicked = |_| (None, Err(Error::new(Kind::Internal, "a request panicked")));
            let (runtime, result) = run.join().unwrap_or_else(panicked);
            (runtime, checked.and(result))
        })
    }

    fn run_here<T>(
        mut self,
        check: Check<'_>,
        request: impl Future<Output = Result<T>>,
    ) -> (Option<Runtime>, Result<T>) {
        CLIENT.with_borrow_mut(|client| *client = Some(self.client.clone()));
        IS_DISCARDED.set(false);
        SENT.set(0);
        let rest = self.rest.take().filter(|(_, since)| since.elapsed() < IDLE_TIMEOUT);
        let result = match &self.runtime {
            Some(runtime) => runtime.block_on(async {
                if let Some((rest, _)) = rest {
                    // If it is late, its connection is closed.
                    let _ = timeout(POLL_INTERVAL, rest).await;
                }
                let mut request = pin!(request);
                loop {
                    match timeout(POLL_INTERVAL, &mut request).await {
                        Ok(result) => return result,
                        Err(_) => check().inspect_err(|_| discard())?,
                    }
                }
            }),
            None => Err(Error::new(Kind::Internal, "a runtime that has ended")),
        };
        CLIENT.with_borrow_mut(|client| *client = None);
        ((!IS_DISCARDED.get()).then_some(self), result)
    }
}

impl Drop for Runtime {
    /// Does not wait for a thread of the runtime, which may be looking up a name.
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Runs requests on this thread. Ends them with the error of `check`, which is called from time to time.
pub fn block_on<T: Send>(check: Check<'_>, request: impl Future<Output = Result<T>> + Send) -> Result<T> {
    let (runtime, result) = Runtime::take()?.run(check, request);
    if let Some(runtime) = runtime {
        runtime.free();
    }
    result
}

pub(in crate::remote) fn client() -> Option<Client> {
    CLIENT.with_borrow(Clone::clone)
}

/// Counts bytes of a body that a connection of the runtime of this thread has taken.
pub(in crate::remote) fn add_sent(bytes: u64) {
    SENT.set(SENT.get().saturating_add(bytes));
}

/// Returns the number of bytes that were sent on this thread since the last call.
pub(super) fn take_sent() -> u64 {
    SENT.take()
}

/// Closes the connections of the runtime of this thread once its request ends. Connections of a request that has failed
/// or was ended may hold memory of the request.
pub(super) fn discard() {
    IS_DISCARDED.set(true);
}

/// Closes the connections that no request uses.
pub(in crate::remote) fn release() {
    let runtimes = std::mem::take(&mut *RUNTIMES.get().lock());
    drop(runtimes);
}
