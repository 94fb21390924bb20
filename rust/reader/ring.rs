//! Direct reads by the kernel: a file that is opened with O_DIRECT, and rings of io_uring(7).
//!
//! Everything that can be refused or fail is behind two traits, so that tests can replace the kernel.

use crate::num::{to_u64, to_usize};
use crate::os::local_file::LocalFile;
use crate::os::retry::BUSY_WAIT;
use io_uring::{EnterFlags, IoUring, opcode, types};
use rustix::fs::{AtFlags, StatxFlags, major, minor, statx};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;

/// Kernel with reads past its page cache.
pub trait RingKernel: Send + Sync {
    /// Type of its rings.
    type Ring: Ring;

    /// Opens the file of a source again, for direct reads. Fails with `EINVAL` if the file system has no direct reads,
    /// and the errors of `/proc` if it cannot be used.
    fn open(&self, source: &LocalFile) -> io::Result<File>;

    /// Returns the alignment of direct reads in the file and in memory, in bytes.
    ///
    /// Returns 0 if the file has no direct reads, and `None` if the kernel does not say.
    fn alignment(&self, source: &LocalFile) -> Option<u64>;

    /// Returns how many requests the disk that holds the file accepts at once, or `None` if the kernel does not say.
    fn depth(&self, source: &LocalFile) -> Option<usize>;

    /// Creates a ring with room for `entries` requests. Fails with `ENOSYS`, `EPERM` in containers that refuse rings,
    /// `ENOMEM`.
    fn ring(&self, entries: u32) -> io::Result<Self::Ring>;
}

/// Queue of requests to the kernel, and of their completions.
pub trait Ring: Send {
    /// Queues a request, which [`Ring::wait`] submits. There is room for as many as the ring was created for.
    ///
    /// # Errors
    /// If there is no room.
    ///
    /// # Safety
    /// `request.memory` must be valid for writes, and nothing else may use it, until the request has completed or
    /// [`Ring::settle`] has returned. `file` must stay open as long.
    unsafe fn push(&mut self, file: &File, request: Request) -> io::Result<()>;

    /// Submits the queued requests and waits until a request has completed. Fails with `EINTR`, or that the kernel
    /// lacks memory. The requests remain queued or in flight.
    fn wait(&mut self) -> io::Result<()>;

    /// Returns a completion: the tag of its request, and the number of bytes that were read or the error.
    fn completion(&mut self) -> Option<(usize, io::Result<usize>)>;

    /// Waits until no request writes to memory any more. The ring cannot be used afterwards.
    fn settle(&mut self);
}

/// One direct read.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Number that its completion carries.
    pub tag: usize,
    /// First byte in the file.
    pub offset: u64,
    /// Memory for the bytes.
    pub memory: *mut u8,
    /// Number of bytes.
    pub length: u32,
}

/// The Linux kernel of this machine.
#[derive(Debug, Default)]
pub struct Linux;

impl RingKernel for Linux {
    type Ring = LinuxRing;

    fn open(&self, source: &LocalFile) -> io::Result<File> {
        source.reopen_direct()
    }

    fn alignment(&self, source: &LocalFile) -> Option<u64> {
        let file = statx(&source.file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
        let has_alignment = file.stx_mask & StatxFlags::DIOALIGN.bits() != 0;
        has_alignment.then(|| match file.stx_dio_offset_align {
            0 => 0,
            offset_alignment => u64::from(offset_alignment.max(file.stx_dio_mem_align)),
        })
    }

    fn depth(&self, source: &LocalFile) -> Option<usize> {
        let device = source.file.metadata().ok()?.dev();
        let disk = format!("/sys/dev/block/{}:{}", major(device), minor(device));
        // A partition has no queue of its own. It is in the directory of its disk.
        let queue = ["queue", "../queue"].map(|queue| std::fs::read_to_string(format!("{disk}/{queue}/nr_requests")));
        queue.into_iter().flatten().next()?.trim().parse().ok()
    }

    fn ring(&self, entries: u32) -> io::Result<LinuxRing> {
        // A forked child must not share the queues.
        let ring = IoUring::builder().dontfork().build(entries)?;
        Ok(LinuxRing { ring, pending: 0 })
    }
}

/// Ring of io_uring.
pub struct LinuxRing {
    ring: IoUring,
    /// Requests that were queued and have not completed.
    pending: usize,
}

impl Ring for LinuxRing {
    unsafe fn push(&mut self, file: &File, request: Request) -> io::Result<()> {
        let entry = opcode::Read::new(types::Fd(file.as_raw_fd()), request.memory, request.length)
            .offset(request.offset)
            .build()
            .user_data(to_u64(request.tag));
        // SAFETY: the caller's promise.
        unsafe { self.ring.submission().push(&entry) }.map_err(io::Error::other)?;
        self.pending += 1;
        Ok(())
    }

    fn wait(&mut self) -> io::Result<()> {
        self.ring.submit_and_wait(1).map(drop)
    }

    fn completion(&mut self) -> Option<(usize, io::Result<usize>)> {
        let entry = self.ring.completion().next()?;
        self.pending -= 1;
        let result =
            usize::try_from(entry.result()).map_err(|_| io::Error::from_raw_os_error(entry.result().saturating_neg()));
        Some((to_usize(entry.user_data()), result))
    }

    fn settle(&mut self) {
        // Requests that were not submitted write nothing.
        let in_flight = |ring: &mut LinuxRing| ring.pending.saturating_sub(ring.ring.submission().len());
        while in_flight(self) > 0 {
            if self.completion().is_none() {
                // With nothing to submit, this call only waits for a completion.
                // SAFETY: no argument is a pointer.
                let waited =
                    unsafe { self.ring.submitter().enter::<libc::sigset_t>(0, 1, EnterFlags::GETEVENTS.bits(), None) };
                if waited.is_err() {
                    std::thread::sleep(BUSY_WAIT);
                }
            }
        }
    }
}
