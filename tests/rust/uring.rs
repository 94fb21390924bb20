//! Direct reads that are refused, short, failing, or past the end of a file.

use crate::files;
use crate::scripted_kernel::{Event, Script, Scripted};
use fst::error::{Error, Kind};
use fst::options::{Options, ReaderChoice};
use fst::os::retry::Check;
use fst::plan::Read;
use fst::reader::uring::Rings;
use fst::reader::{self, Opened, ReaderKind};
use fst::staging::{Request, pool};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use tempfile::TempDir;

const FILE_BYTES: usize = 3 << 20;
/// Bytes of one request.
const REQUEST_BYTES: u64 = 512 << 10;

struct Trial {
    _directory: TempDir,
    path: PathBuf,
    bytes: Vec<u8>,
    script: Arc<Script>,
    opened: Opened,
}

impl Trial {
    /// Opens a reader on a scripted kernel, of a file that is not cached if its file system supports that.
    fn new(reader: ReaderChoice, script: Script) -> Trial {
        let (directory, path) = files::new_path("x.safetensors");
        let bytes = files::pattern(8, FILE_BYTES);
        std::fs::write(&path, &bytes).unwrap();
        files::make_cold(&path);
        let script = Arc::new(script);
        let options = Options { reader, threads: 1, queue_depth: 3, ..Options::default() };
        let rings = Arc::new(Rings::new(Scripted(Arc::clone(&script)), &options));
        let opened = reader::open(&options, &files::source(&path), &rings).unwrap();
        Trial { _directory: directory, path, bytes, script, opened }
    }

    /// Sets the outcomes of the next requests and waits.
    fn expect(&self, requests: impl IntoIterator<Item = Event>, waits: impl IntoIterator<Item = Event>) {
        self.script.offsets.lock().unwrap().clear();
        self.script.requests.lock().unwrap().extend(requests);
        self.script.waits.lock().unwrap().extend(waits);
    }

    /// Reads a range as planned, with room to widen it, and checks the bytes.
    fn fill(&self, begin: usize, length: usize) -> Result<(), Error> {
        self.fill_unless(begin, length, &|| Ok(()))
    }

    fn fill_unless(&self, begin: usize, length: usize, check: Check<'_>) -> Result<(), Error> {
        let request = Request { bytes: FILE_BYTES + 8192, node: None, staging_bytes: 256 << 20 };
        let mut slot = pool::take(&request, &|| Ok(())).unwrap().unwrap();
        slot.bytes_mut().fill(0xAA);
        let slot_begin = begin % 512;
        let read = Read { offset: begin as u64, slot_begin, length };
        self.opened.reader.fill(&[read], slot.bytes_mut(), check)?;
        assert!(slot.bytes_mut()[slot_begin..][..length] == self.bytes[begin..begin + length]);
        Ok(())
    }

    fn offsets(&self) -> Vec<u64> {
        self.script.offsets.lock().unwrap().clone()
    }
}

fn direct() -> Trial {
    let trial = Trial::new(ReaderChoice::Uring, Script::default());
    assert_eq!(trial.opened.chosen().kind, ReaderKind::Uring);
    trial
}

#[test]
fn first_and_last_block_need_no_requests_of_their_own() {
    let trial = direct();
    trial.expect([], []);
    trial.fill(700, (2 << 20) + 1).unwrap();
    // Five requests from the block in which the read begins, and at most the queue depth in flight.
    assert_eq!(trial.offsets(), (0..5).map(|index| 512 + index * REQUEST_BYTES).collect::<Vec<_>>());
    assert_eq!(trial.script.in_flight_peak.load(Ordering::Relaxed), 3);
    assert_eq!(trial.script.rings.load(Ordering::Relaxed), 1);
}

#[test]
fn short_interrupted_and_refused_reads_are_completed() {
    let transient = [libc::EINTR, libc::EAGAIN, libc::EBUSY].map(Event::Fails);
    // Outcomes of the requests and of the waits, and the number of requests if they are repeated on the ring.
    for (requests, waits, repeated) in [
        ([0, 1, 2].map(Event::Short), &[][..], None),
        ([511, 512, 513].map(Event::Short), &[][..], None),
        ([4096, 100_000, 524_287].map(Event::Short), &[][..], None),
        (transient, &transient[..], Some(5 + 3)),
        // Refused after the probe, so that the bytes come through the page cache.
        ([Event::Succeeds, Event::Fails(libc::EINVAL), Event::Fails(libc::EOPNOTSUPP)], &[][..], None),
    ] {
        let trial = direct();
        trial.expect(requests, waits.iter().copied());
        trial.fill(700, 2 << 20).unwrap();
        assert_eq!(trial.script.settled.load(Ordering::Relaxed), 0);
        assert!(repeated.is_none_or(|count| trial.offsets().len() == count), "{:?}", trial.offsets());
    }
}

#[test]
fn reads_that_are_repeated_for_ever_end_with_the_check() {
    for code in [libc::EINTR, libc::EAGAIN, libc::EBUSY] {
        for is_request in [false, true] {
            let trial = direct();
            let Script { endless_request, endless_wait, .. } = &*trial.script;
            if is_request { endless_request } else { endless_wait }.store(code, Ordering::Relaxed);
            let error = trial.fill_unless(700, 2 << 20, &files::fails_after(4)).unwrap_err();
            assert_eq!(error.kind(), Kind::Interrupted);
            // No request writes to the slot any more.
            assert_eq!(trial.script.settled.load(Ordering::Relaxed), 1);
        }
    }
}

#[test]
fn a_ring_that_fails_is_dropped_after_it_has_settled() {
    let trial = direct();
    trial.expect([], [Event::Succeeds, Event::Fails(libc::EPERM)]);
    trial.fill(700, 2 << 20).unwrap();
    assert_eq!(trial.script.settled.load(Ordering::Relaxed), 1);
    // The next chunk has a new ring.
    trial.fill(0, 2 << 20).unwrap();
    assert_eq!(trial.script.rings.load(Ordering::Relaxed), 2);
}

#[test]
fn an_error_names_the_first_byte_that_could_not_be_read() {
    let trial = direct();
    // The third and the second request fail, and complete in this order.
    trial.expect([Event::Succeeds, Event::Fails(libc::EIO), Event::Fails(libc::EIO)], []);
    let error = trial.fill(700, 2 << 20).unwrap_err();
    assert_eq!(error.kind(), Kind::Io);
    let (text, byte) = (error.to_string(), format!("byte {}:", 512 + REQUEST_BYTES));
    assert!(text.contains("x.safetensors") && text.contains(&byte) && text.contains("os error 5"), "{text}");
    // The first request also covers bytes before the read, which the error must not name.
    trial.expect([Event::Fails(libc::EIO)], []);
    assert!(trial.fill(700, 2 << 20).unwrap_err().to_string().contains("byte 700:"));
    // The ring has no request left and is used again.
    trial.fill(700, 2 << 20).unwrap();
    assert_eq!(trial.script.rings.load(Ordering::Relaxed), 1);
}

#[test]
fn a_file_truncated_during_the_load_ends_at_its_new_length() {
    for length in [0, 5, 700, 4096, 1_000_000] {
        let trial = direct();
        std::fs::OpenOptions::new().write(true).open(&trial.path).unwrap().set_len(length).unwrap();
        // A later request fails with another error. The error names the first missing byte.
        trial.expect([Event::Succeeds, Event::Succeeds, Event::Succeeds, Event::Fails(libc::EIO)], []);
        let text = trial.fill(100, 2 << 20).unwrap_err().to_string();
        assert!(text.contains(&format!("byte {}:", length.max(100))) && text.contains("early"), "{length}: {text}");
    }
}

#[test]
fn refused_direct_reads_fall_back_to_the_page_cache() {
    let refusals = [
        (Script { open: Some(libc::EACCES), ..Script::default() }, "os error 13"),
        (Script { open: Some(libc::ENOENT), ..Script::default() }, "os error 2"),
        (Script { open: Some(libc::EINVAL), ..Script::default() }, "os error 22"),
        (Script { ring: Some(libc::EPERM), ..Script::default() }, "os error 1"),
        (Script { ring: Some(libc::ENOSYS), ..Script::default() }, "os error 38"),
        (Script { ring: Some(libc::ENOMEM), ..Script::default() }, "os error 12"),
        (Script { has_no_direct_reads: true, ..Script::default() }, "page cache"),
        (Script { requests: Mutex::new([Event::Fails(libc::EINVAL)].into()), ..Script::default() }, "os error 22"),
        (Script { requests: Mutex::new([Event::Fails(libc::EIO)].into()), ..Script::default() }, "os error 5"),
        (Script { requests: Mutex::new([Event::Short(100)].into()), ..Script::default() }, "fewer bytes than"),
        (Script { waits: Mutex::new([Event::Fails(libc::EPERM)].into()), ..Script::default() }, "os error 1"),
    ];
    for (script, reason) in refusals {
        let trial = Trial::new(ReaderChoice::Uring, script);
        let chosen = trial.opened.chosen();
        assert_eq!(chosen.kind, ReaderKind::Pread);
        assert!(chosen.why.contains(reason), "{}", chosen.why);
        trial.fill(700, 2 << 20).unwrap();
    }
}
