//! A kernel whose direct reads go as a test says.

use fst::reader::ring::{Request, Ring, RingKernel};
use fst::source::Source;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// What a direct read wants of this kernel.
pub const ALIGNMENT: usize = 512;

/// What happens to one request, or to one wait.
#[derive(Clone, Copy, Debug)]
pub enum Event {
    Goes,
    /// At most so many bytes come.
    Short(usize),
    Fails(i32),
}

/// What a test says, and what it may ask afterwards.
#[derive(Default)]
pub struct Script {
    pub open: Option<i32>,
    /// A file with the same bytes, where direct reads must not bring pages of the one itself into the page cache.
    pub twin: Option<PathBuf>,
    pub ring: Option<i32>,
    pub has_no_direct_reads: bool,
    /// Each for one answer, in the order of the requests; then all goes.
    pub answers: Mutex<VecDeque<Event>>,
    /// Each for one wait.
    pub waits: Mutex<VecDeque<Event>>,
    /// Where in the file requests begin.
    pub asked: Mutex<Vec<u64>>,
    pub rings: AtomicUsize,
    pub in_flight_peak: AtomicUsize,
    pub settled: AtomicUsize,
}

pub struct Scripted(pub Arc<Script>);

impl RingKernel for Scripted {
    type Ring = ScriptedRing;

    fn open(&self, source: &Source) -> io::Result<File> {
        match (self.0.open, &self.0.twin) {
            (Some(code), _) => Err(io::Error::from_raw_os_error(code)),
            (None, Some(twin)) => File::open(twin),
            (None, None) => source.file.try_clone(),
        }
    }

    fn alignment(&self, _: &Source) -> Option<u64> {
        Some(if self.0.has_no_direct_reads { 0 } else { ALIGNMENT as u64 })
    }

    fn depth(&self, _: &Source) -> Option<usize> {
        None
    }

    fn ring(&self, entries: u32) -> io::Result<ScriptedRing> {
        if let Some(code) = self.0.ring {
            return Err(io::Error::from_raw_os_error(code));
        }
        self.0.rings.fetch_add(1, Ordering::Relaxed);
        Ok(ScriptedRing { script: Arc::clone(&self.0), room: entries as usize, noted: Vec::new(), answers: Vec::new() })
    }
}

struct Noted {
    file: File,
    tag: usize,
    offset: u64,
    address: usize,
    length: usize,
}

pub struct ScriptedRing {
    script: Arc<Script>,
    room: usize,
    noted: Vec<Noted>,
    answers: Vec<(usize, io::Result<usize>)>,
}

impl ScriptedRing {
    /// Reads, and answers the last request first.
    fn serve(&mut self) {
        self.script.in_flight_peak.fetch_max(self.noted.len(), Ordering::Relaxed);
        for noted in self.noted.drain(..) {
            self.script.asked.lock().unwrap().push(noted.offset);
            let most = match self.script.answers.lock().unwrap().pop_front().unwrap_or(Event::Goes) {
                Event::Goes => noted.length,
                Event::Short(count) => count.min(noted.length),
                Event::Fails(code) => {
                    self.answers.push((noted.tag, Err(io::Error::from_raw_os_error(code))));
                    continue;
                }
            };
            // SAFETY: who pushed the request promised that this memory may be written until it is answered.
            let memory = unsafe {
                std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(noted.address), noted.length)
            };
            let mut count = 0;
            while count < most {
                match noted.file.read_at(&mut memory[count..most], noted.offset + count as u64).unwrap() {
                    0 => break,
                    more => count += more,
                }
            }
            // What a short read leaves in the rest of the memory is not defined.
            memory[count..].fill(0xBB);
            self.answers.push((noted.tag, Ok(count)));
        }
    }
}

impl Ring for ScriptedRing {
    unsafe fn push(&mut self, file: &File, request: Request) -> io::Result<()> {
        let Request { tag, offset, memory, length } = request;
        let length = length as usize;
        assert_eq!((offset as usize % ALIGNMENT, memory.addr() % ALIGNMENT, length % ALIGNMENT), (0, 0, 0));
        assert!(length > 0 && self.noted.len() < self.room);
        let file = file.try_clone()?;
        self.noted.push(Noted { file, tag, offset, address: memory.expose_provenance(), length });
        Ok(())
    }

    fn wait(&mut self) -> io::Result<()> {
        match self.script.waits.lock().unwrap().pop_front() {
            Some(Event::Fails(code)) => return Err(io::Error::from_raw_os_error(code)),
            Some(Event::Goes | Event::Short(_)) | None => {}
        }
        self.serve();
        Ok(())
    }

    fn completion(&mut self) -> Option<(usize, io::Result<usize>)> {
        self.answers.pop()
    }

    fn settle(&mut self) {
        // The kernel ends what it has begun, and writes.
        self.serve();
        self.script.settled.fetch_add(1, Ordering::Relaxed);
    }
}
