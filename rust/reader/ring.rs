//! What the kernel does for direct reads: a file opened a second time, and
//! rings of io_uring(7). All that can refuse or fail stands here, behind
//! traits, so that tests can be the kernel.

use crate::source::Source;
use io_uring::{EnterFlags, IoUring, opcode, types};
use rustix::fs::{AtFlags, StatxFlags, major, minor, statx};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

/// An operating system that can read past its page cache.
pub trait RingKernel: Send + Sync {
    /// Its rings.
    type Ring: Ring;

    /// The source's file once more, for reads past the page cache.
    ///
    /// # Errors
    /// `EINVAL` from file systems that have no such reads; what `/proc` says where it is not to be used.
    fn open(&self, source: &Source) -> io::Result<File>;

    /// Multiples of how many bytes such reads want, in the file and in memory; 0 where there are no such reads, and
    /// `None` where the kernel cannot say.
    fn alignment(&self, source: &Source) -> Option<u64>;

    /// How many requests the disk that holds the file takes at once, where the kernel can say.
    fn depth(&self, source: &Source) -> Option<usize>;

    /// A ring with room for this many requests.
    ///
    /// # Errors
    /// `ENOSYS`, `EPERM` where containers refuse it, `ENOMEM`.
    fn ring(&self, entries: u32) -> io::Result<Self::Ring>;
}

/// Requests to the kernel, and its answers.
pub trait Ring: Send {
    /// Notes a request, which [`Ring::wait`] hands to the kernel. There is room for as many as the ring was made for.
    ///
    /// # Errors
    /// When there is no room.
    ///
    /// # Safety
    /// `request.memory` must be valid to write, and nobody else may use it, until the request has been answered or
    /// [`Ring::settle`] has returned; `file` must stay open as long.
    unsafe fn push(&mut self, file: &File, request: Request) -> io::Result<()>;

    /// Hands over what has been noted, and sleeps until there is an answer.
    ///
    /// # Errors
    /// `EINTR`, or that the kernel lacks memory; what was asked for stays asked for.
    fn wait(&mut self) -> io::Result<()>;

    /// An answer: which request, and how many bytes were read or why none.
    fn answer(&mut self) -> Option<(usize, io::Result<usize>)>;

    /// Sleeps until the kernel writes to no memory of any request. The ring is of no use afterwards.
    fn settle(&mut self);
}

/// A read past the page cache.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Names it in its answer.
    pub tag: usize,
    /// The first byte in the file.
    pub offset: u64,
    /// Where the bytes go.
    pub memory: *mut u8,
    /// How many.
    pub length: u32,
}

/// How long a kernel that is out of memory for requests is left alone.
pub const BUSY_WAIT: Duration = Duration::from_millis(1);

/// This machine's.
#[derive(Debug, Default)]
pub struct Linux;

impl RingKernel for Linux {
    type Ring = LinuxRing;

    fn open(&self, source: &Source) -> io::Result<File> {
        source.reopen_direct()
    }

    fn alignment(&self, source: &Source) -> Option<u64> {
        let stat = statx(&source.file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
        let is_known = StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::DIOALIGN);
        is_known.then(|| match stat.stx_dio_offset_align {
            0 => 0,
            offset_alignment => u64::from(offset_alignment.max(stat.stx_dio_mem_align)),
        })
    }

    fn depth(&self, source: &Source) -> Option<usize> {
        let device = source.file.metadata().ok()?.dev();
        let disk = format!("/sys/dev/block/{}:{}", major(device), minor(device));
        // A partition has no queue of its own; it stands in the directory of its disk.
        let queue = ["queue", "../queue"].map(|queue| std::fs::read_to_string(format!("{disk}/{queue}/nr_requests")));
        queue.into_iter().flatten().next()?.trim().parse().ok()
    }

    fn ring(&self, entries: u32) -> io::Result<LinuxRing> {
        // A forked child must not share the queues.
        let ring = IoUring::builder().dontfork().build(entries)?;
        Ok(LinuxRing { ring, unanswered: 0 })
    }
}

/// A ring of io_uring.
pub struct LinuxRing {
    ring: IoUring,
    /// Requests that were noted and have not been answered.
    unanswered: usize,
}

impl Ring for LinuxRing {
    unsafe fn push(&mut self, file: &File, request: Request) -> io::Result<()> {
        let entry = opcode::Read::new(types::Fd(file.as_raw_fd()), request.memory, request.length)
            .offset(request.offset)
            .build()
            .user_data(u64::try_from(request.tag).unwrap_or(u64::MAX));
        // SAFETY: the caller's promise.
        unsafe { self.ring.submission().push(&entry) }.map_err(io::Error::other)?;
        self.unanswered += 1;
        Ok(())
    }

    fn wait(&mut self) -> io::Result<()> {
        self.ring.submit_and_wait(1).map(drop)
    }

    fn answer(&mut self) -> Option<(usize, io::Result<usize>)> {
        let entry = self.ring.completion().next()?;
        self.unanswered -= 1;
        let result =
            usize::try_from(entry.result()).map_err(|_| io::Error::from_raw_os_error(entry.result().saturating_neg()));
        Some((usize::try_from(entry.user_data()).unwrap_or(usize::MAX), result))
    }

    fn settle(&mut self) {
        // What the kernel has not taken it will not write.
        let taken = |ring: &mut LinuxRing| ring.unanswered.saturating_sub(ring.ring.submission().len());
        while taken(self) > 0 {
            if self.answer().is_none() {
                // Any system call lets answers in; without more to submit this one only waits.
                // SAFETY: the call passes no pointer. `libc::sigset_t` is only the type of the absent signal mask.
                let waited =
                    unsafe { self.ring.submitter().enter::<libc::sigset_t>(0, 1, EnterFlags::GETEVENTS.bits(), None) };
                if waited.is_err() {
                    std::thread::sleep(BUSY_WAIT);
                }
            }
        }
    }
}
