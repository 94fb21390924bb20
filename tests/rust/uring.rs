//! Direct reads when they are refused, come short, fail, or end too early.

use crate::files;
use crate::kernel::{Event, Script, Scripted};
use fst::error::{Error, Kind};
use fst::options::{Options, ReaderChoice};
use fst::plan::Read;
use fst::reader::uring::Rings;
use fst::reader::{self, Opened, ReaderKind, SlotBuffer};
use fst::staging::{Request, pool};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use tempfile::TempDir;

const FILE_BYTES: usize = 3 << 20;
/// What is asked for at once.
const REQUEST_BYTES: u64 = 512 << 10;

struct Trial {
    _directory: TempDir,
    path: PathBuf,
    bytes: Vec<u8>,
    script: Arc<Script>,
    opened: Opened,
}

impl Trial {
    /// A file of which nothing is cached, if its file system can do that, and a reader of it on such a kernel.
    fn new(reader: ReaderChoice, script: Script) -> Trial {
        let directory = TempDir::new().unwrap();
        let path = directory.path().join("x.safetensors");
        let bytes = files::pattern(8, FILE_BYTES);
        std::fs::write(&path, &bytes).unwrap();
        files::make_cold(&path);
        let script = Arc::new(script);
        let options = Options { reader, threads: 1, queue_depth: 3, ..Options::default() };
        let rings = Arc::new(Rings::new(Scripted(Arc::clone(&script)), &options));
        let opened = reader::open(&options, &files::source(&path), &rings).unwrap();
        Trial { _directory: directory, path, bytes, script, opened }
    }

    /// From here on: what the requests and the waits that follow meet.
    fn expect(&self, answers: impl IntoIterator<Item = Event>, waits: impl IntoIterator<Item = Event>) {
        self.script.asked.lock().unwrap().clear();
        self.script.answers.lock().unwrap().extend(answers);
        self.script.waits.lock().unwrap().extend(waits);
    }

    /// A chunk as the plan lays it out, from `begin` on.
    fn fill(&self, begin: usize, length: usize) -> Result<(), Error> {
        let request = Request { bytes: FILE_BYTES + 8192, node: None, staging_bytes: 256 << 20 };
        let mut slot = pool::take(&request).unwrap().unwrap();
        slot.bytes_mut().fill(0xAA);
        let (id, slot_begin) = (slot.id(), begin % 512);
        let read = Read { offset: begin as u64, slot_begin, length };
        self.opened.reader.fill(&[read], SlotBuffer { id, bytes: slot.bytes_mut() })?;
        assert!(slot.bytes_mut()[slot_begin..][..length] == self.bytes[begin..begin + length]);
        Ok(())
    }

    fn asked(&self) -> Vec<u64> {
        self.script.asked.lock().unwrap().clone()
    }
}

fn direct() -> Trial {
    let trial = Trial::new(ReaderChoice::Uring, Script::default());
    assert_eq!(trial.opened.chosen().kind, ReaderKind::Uring);
    trial
}

#[test]
fn head_and_tail_come_with_the_rest() {
    let trial = direct();
    trial.expect([], []);
    trial.fill(700, (2 << 20) + 1).unwrap();
    // Five requests, from the block in which the read begins, of which no more than the depth at once.
    assert_eq!(trial.asked(), (0..5).map(|index| 512 + index * REQUEST_BYTES).collect::<Vec<_>>());
    assert_eq!(trial.script.in_flight_peak.load(Ordering::Relaxed), 3);
    assert_eq!(trial.script.rings.load(Ordering::Relaxed), 1);
}

#[test]
fn short_reads_are_resumed() {
    for counts in [[0, 1, 2], [511, 512, 513], [4096, 100_000, 524_287]] {
        let trial = direct();
        trial.expect(counts.map(Event::Short), []);
        trial.fill(700, 2 << 20).unwrap();
    }
}

#[test]
fn interrupted_and_busy_reads_are_repeated() {
    let trial = direct();
    let later = [libc::EINTR, libc::EAGAIN, libc::EBUSY].map(Event::Fails);
    trial.expect(later, later);
    trial.fill(700, 2 << 20).unwrap();
    assert_eq!(trial.asked().len(), 5 + later.len());
    assert_eq!(trial.script.settled.load(Ordering::Relaxed), 0);
}

#[test]
fn a_read_refused_after_the_probe_goes_through_the_page_cache() {
    let trial = direct();
    trial.expect([Event::Goes, Event::Fails(libc::EINVAL), Event::Fails(libc::EOPNOTSUPP)], []);
    trial.fill(700, 2 << 20).unwrap();
}

#[test]
fn a_ring_that_fails_is_given_up_when_the_kernel_writes_no_more() {
    let trial = direct();
    trial.expect([], [Event::Goes, Event::Fails(libc::EPERM)]);
    trial.fill(700, 2 << 20).unwrap();
    assert_eq!(trial.script.settled.load(Ordering::Relaxed), 1);
    // The next chunk has a new one.
    trial.fill(0, 2 << 20).unwrap();
    assert_eq!(trial.script.rings.load(Ordering::Relaxed), 2);
}

#[test]
fn an_error_names_the_first_byte_that_could_not_be_read() {
    let trial = direct();
    // The third and the second request of four fail, and are answered in this order.
    trial.expect([Event::Goes, Event::Fails(libc::EIO), Event::Fails(libc::EIO)], []);
    let error = trial.fill(700, 2 << 20).unwrap_err();
    assert_eq!(error.kind(), Kind::Io);
    let (text, byte) = (error.to_string(), format!("byte {}:", 512 + REQUEST_BYTES));
    assert!(text.contains("x.safetensors") && text.contains(&byte) && text.contains("os error 5"), "{text}");
    // The first request holds bytes that nobody asked for, which are not to blame.
    trial.expect([Event::Fails(libc::EIO)], []);
    assert!(trial.fill(700, 2 << 20).unwrap_err().to_string().contains("byte 700:"));
    // The ring has nothing left to do and serves on.
    trial.fill(700, 2 << 20).unwrap();
    assert_eq!(trial.script.rings.load(Ordering::Relaxed), 1);
}

#[test]
fn a_file_cut_during_the_load_ends_where_it_was_cut() {
    for length in [0, 5, 700, 4096, 1_000_000] {
        let trial = direct();
        std::fs::OpenOptions::new().write(true).open(&trial.path).unwrap().set_len(length).unwrap();
        // A later request fails otherwise; the earlier byte is the one to tell.
        trial.expect([Event::Goes, Event::Goes, Event::Goes, Event::Fails(libc::EIO)], []);
        let text = trial.fill(100, 2 << 20).unwrap_err().to_string();
        assert!(text.contains(&format!("byte {}:", length.max(100))) && text.contains("early"), "{length}: {text}");
    }
}

#[test]
fn where_direct_reads_are_refused_the_page_cache_serves() {
    let refusals = [
        (Script { open: Some(libc::EACCES), ..Script::default() }, "os error 13"),
        (Script { open: Some(libc::ENOENT), ..Script::default() }, "os error 2"),
        (Script { open: Some(libc::EINVAL), ..Script::default() }, "os error 22"),
        (Script { ring: Some(libc::EPERM), ..Script::default() }, "os error 1"),
        (Script { ring: Some(libc::ENOSYS), ..Script::default() }, "os error 38"),
        (Script { ring: Some(libc::ENOMEM), ..Script::default() }, "os error 12"),
        (Script { has_no_direct_reads: true, ..Script::default() }, "page cache"),
        (Script { answers: Mutex::new([Event::Fails(libc::EINVAL)].into()), ..Script::default() }, "os error 22"),
        (Script { answers: Mutex::new([Event::Fails(libc::EIO)].into()), ..Script::default() }, "os error 5"),
        (Script { answers: Mutex::new([Event::Short(100)].into()), ..Script::default() }, "fewer bytes than"),
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
