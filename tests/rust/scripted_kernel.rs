//! Linux kernel whose direct reads follow a script.

use fst::os::local_file::LocalFile;
use fst::reader::ring::{Request, Ring, RingKernel};
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Alignment of direct reads, in bytes.
pub const ALIGNMENT: usize = 512;

/// Outcome of a request or a wait.
#[derive(Clone, Copy, Debug)]
pub enum Event {
    Succeeds,
    /// At most this many bytes are read.
    Short(usize),
    Fails(i32),
}

/// Script of a test, and a record of what happened.
#[derive(Default)]
pub struct Script {
    pub open: Option<i32>,
    /// Copy of the file, if direct reads must not bring its pages into the page cache.
    pub twin: Option<PathBuf>,
    pub ring: Option<i32>,
    pub has_no_direct_reads: bool,
    /// Outcomes of the first requests. Later ones succeed.
    pub requests: Mutex<VecDeque<Event>>,
    /// Outcomes of the first waits.
    pub waits: Mutex<VecDeque<Event>>,
    /// Error of every later request or wait, or 0.
    pub endless_request: AtomicI32,
    pub endless_wait: AtomicI32,
    /// First byte of each request.
    pub offsets: Mutex<Vec<u64>>,
    pub rings: AtomicUsize,
    pub in_flight_peak: AtomicUsize,
    pub settled: AtomicUsize,
}

pub struct Scripted(pub Arc<Script>);

impl RingKernel for Scripted {
    type Ring = ScriptedRing;

    fn open(&self, source: &LocalFile) -> io::Result<File> {
        match (self.0.open, &self.0.twin) {
            (Some(code), _) => Err(io::Error::from_raw_os_error(code)),
            (None, Some(twin)) => File::open(twin),
            (None, None) => source.file.try_clone(),
        }
    }

    fn alignment(&self, _: &LocalFile) -> Option<u64> {
        Some(if self.0.has_no_direct_reads { 0 } else { ALIGNMENT as u64 })
    }

    fn depth(&self, _: &LocalFile) -> Option<usize> {
        None
    }

    fn ring(&self, entries: u32) -> io::Result<ScriptedRing> {
        if let Some(code) = self.0.ring {
            return Err(io::Error::from_raw_os_error(code));
        }
        self.0.rings.fetch_add(1, Ordering::Relaxed);
        Ok(ScriptedRing {
            script: Arc::clone(&self.0),
            room: entries as usize,
            queue: Vec::new(),
            completions: Vec::new(),
        })
    }
}

fn later(endless: &AtomicI32) -> Event {
    match endless.load(Ordering::Relaxed) {
        0 => Event::Succeeds,
        code => Event::Fails(code),
    }
}

struct QueuedRead {
    file: File,
    tag: usize,
    offset: u64,
    address: usize,
    length: usize,
}

pub struct ScriptedRing {
    script: Arc<Script>,
    room: usize,
    queue: Vec<QueuedRead>,
    completions: Vec<(usize, io::Result<usize>)>,
}

impl ScriptedRing {
    /// Performs all queued reads, which complete in reverse order.
    fn serve(&mut self) {
        self.script.in_flight_peak.fetch_max(self.queue.len(), Ordering::Relaxed);
        for read in self.queue.drain(..) {
            self.script.offsets.lock().unwrap().push(read.offset);
            let later = later(&self.script.endless_request);
            let most = match self.script.requests.lock().unwrap().pop_front().unwrap_or(later) {
                Event::Succeeds => read.length,
                Event::Short(count) => count.min(read.length),
                Event::Fails(code) => {
                    self.completions.push((read.tag, Err(io::Error::from_raw_os_error(code))));
                    continue;
                }
            };
            // SAFETY: the caller of `push` promised that this memory may be written until the request completes.
            let memory = unsafe {
                std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(read.address), read.length)
            };
            let mut count = 0;
            while count < most {
                match read.file.read_at(&mut memory[count..most], read.offset + count as u64).unwrap() {
                    0 => break,
                    more => count += more,
                }
            }
            // After a short read, the rest of the memory is undefined.
            memory[count..].fill(0xBB);
            self.completions.push((read.tag, Ok(count)));
        }
    }
}

impl Ring for ScriptedRing {
    unsafe fn push(&mut self, file: &File, request: Request) -> io::Result<()> {
        let Request { tag, offset, memory, length } = request;
        let length = length as usize;
        assert_eq!((offset as usize % ALIGNMENT, memory.addr() % ALIGNMENT, length % ALIGNMENT), (0, 0, 0));
        assert!(length > 0 && self.queue.len() < self.room);
        let file = file.try_clone()?;
        self.queue.push(QueuedRead { file, tag, offset, address: memory.expose_provenance(), length });
        Ok(())
    }

    fn wait(&mut self) -> io::Result<()> {
        let later = later(&self.script.endless_wait);
        if let Event::Fails(code) = self.script.waits.lock().unwrap().pop_front().unwrap_or(later) {
            return Err(io::Error::from_raw_os_error(code));
        }
        self.serve();
        Ok(())
    }

    fn completion(&mut self) -> Option<(usize, io::Result<usize>)> {
        self.completions.pop()
    }

    fn settle(&mut self) {
        // The kernel completes the requests in flight, and writes.
        self.serve();
        self.script.settled.fetch_add(1, Ordering::Relaxed);
    }
}
