//! Secret keys, and their derivation from strings. Keys are overwritten in memory when they are dropped.

use super::wipe::with_wiped_stack;
use crate::error::{Error, Kind, Result};
use crate::num::to_usize;
use crate::os::mutex::Mutex;
use crate::os::per_process::PerProcess;
use crate::os::sigint::{POLL_INTERVAL, Watch};
use argon2::{Algorithm, Argon2, Block, Params, Version};
use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use zeroize::Zeroizing;

/// Size of a key in bytes.
pub const KEY_BYTES: usize = 32;
/// Size of a salt in bytes.
pub const SALT_BYTES: usize = 16;

/// Smallest memory of a derivation, in bytes.
pub const MEMLIMIT_MIN: u64 = 8 << 10;
/// Largest memory of a derivation, in bytes, as in libsodium's highest preset. The number comes from the file.
pub const MEMLIMIT_MAX: u64 = 1 << 30;
/// Upper bound for the memory of a derivation times its passes, in bytes, as in libsodium's highest preset, about six
/// seconds of one core. There is one lane.
pub const WORK_BYTES_MAX: u64 = 4 << 30;

/// Permit of the only derivation in the process that computes, because of its memory.
static PERMIT: PerProcess<Mutex<()>> = PerProcess::new(Mutex::default);

/// Secret key on the heap, where it does not move. Clones share it.
#[derive(Clone)]
pub struct Key(Arc<Zeroizing<[u8; KEY_BYTES]>>);

impl Key {
    /// Copies a key. Fails with `invalid-argument` if it has another size than [`KEY_BYTES`].
    pub fn new(bytes: &[u8]) -> Result<Key> {
        if bytes.len() != KEY_BYTES {
            let message = format!("the key has {} bytes, but must have {KEY_BYTES}", bytes.len());
            return Err(Error::new(Kind::InvalidArgument, message));
        }
        Key::with(|key| {
            key.copy_from_slice(bytes);
            Ok(())
        })
    }

    /// Creates a key in place. The stack of `fill` is overwritten.
    pub(crate) fn with(fill: impl FnOnce(&mut [u8; KEY_BYTES]) -> Result<()>) -> Result<Key> {
        let mut key = Arc::new(Zeroizing::new([0; KEY_BYTES]));
        let bytes = Arc::get_mut(&mut key).ok_or_else(|| Error::new(Kind::Internal, "the new key is shared"))?;
        with_wiped_stack(|| fill(bytes))?;
        Ok(Key(key))
    }

    /// Returns the secret bytes.
    pub fn secret(&self) -> &[u8; KEY_BYTES] {
        &self.0
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Key(hidden)")
    }
}

/// Derivation of a key from a string with Argon2id, as in libsodium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Derivation {
    /// Number of passes over the memory.
    pub opslimit: u64,
    /// Size of the memory in bytes.
    pub memlimit: u64,
    /// Salt.
    pub salt: [u8; SALT_BYTES],
}

impl Derivation {
    /// Checks the limits. Fails with `invalid-argument` if a limit is out of bounds.
    pub fn check(&self) -> Result<()> {
        let Derivation { opslimit, memlimit, .. } = *self;
        if !is_accepted(opslimit, memlimit) {
            let message = format!(
                "the key has opslimit {opslimit} and memlimit {memlimit}; accepted are an opslimit of at least 1, a memlimit \
                 of {MEMLIMIT_MIN} to {MEMLIMIT_MAX} bytes, and a product of at most {WORK_BYTES_MAX}"
            );
            return Err(Error::new(Kind::InvalidArgument, message));
        }
        Ok(())
    }

    /// Derives the key of a string, on another thread, since nothing can end the computation. After Ctrl-C, the call
    /// returns at once, and the thread ends later. Until then it has its memory, and other derivations wait for it.
    /// Fails with `out-of-memory` if the memory is not available.
    pub fn key(&self, string: &[u8]) -> Result<Key> {
        self.check()?;
        let watch = Watch::begin();
        let (derivation, own_string) = (*self, copied(string));
        let (sender, receiver) = mpsc::sync_channel(1);
        let caller = Arc::new(());
        let waits = Arc::downgrade(&caller);
        let compute = move || {
            let _permit = PERMIT.get().lock();
            if waits.strong_count() > 0 {
                // Nobody takes the key after Ctrl-C.
                sender.send(derivation.compute(&own_string)).ok();
            }
        };
        if let Err(error) = thread::Builder::new().name("fst".into()).spawn(compute) {
            tracing::debug!(%error, "cannot start a thread to derive a key");
            return self.compute(string);
        }
        loop {
            match receiver.recv_timeout(POLL_INTERVAL) {
                Ok(key) => return key,
                Err(RecvTimeoutError::Timeout) => watch.check()?,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::new(Kind::Internal, "the thread that derives a key ended"));
                }
            }
        }
    }

    fn compute(&self, string: &[u8]) -> Result<Key> {
        let refused = |error: argon2::Error| Error::new(Kind::InvalidArgument, format!("no key is derived: {error}"));
        let number = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
        let params = Params::new(number(self.memlimit >> 10), number(self.opslimit), 1, Some(KEY_BYTES));
        let params = params.map_err(refused)?;
        let blocks = params.block_count();
        let mut memory: Vec<Block> = Vec::new();
        memory.try_reserve_exact(blocks).map_err(|_| {
            let message = format!("no memory of {} bytes to derive the key", to_usize(self.memlimit));
            Error::new(Kind::OutOfMemory, message)
        })?;
        memory.resize(blocks, Block::default());
        let mut memory = Zeroizing::new(memory);
        let argon2 = Argon2::new(Algorithm::Argon2id, Version::V0x13, params);
        let derive = |key: &mut [u8; KEY_BYTES]| {
            argon2.hash_password_into_with_memory(string, &self.salt, key, &mut **memory).map_err(refused)
        };
        Key::with(derive)
    }
}

fn is_accepted(passes: u64, memory_bytes: u64) -> bool {
    let work_bytes = passes.checked_mul(memory_bytes);
    work_bytes.is_some_and(|bytes| (1..=WORK_BYTES_MAX).contains(&bytes))
        && (MEMLIMIT_MIN..=MEMLIMIT_MAX).contains(&memory_bytes)
}

/// Checks the limits of Argon2id. The error is the message of an error.
pub(super) fn check_limits(passes: u64, memory_bytes: u64) -> std::result::Result<(), String> {
    // More passes than a `u32` has would be too much work.
    if !is_accepted(passes, memory_bytes) || !memory_bytes.is_multiple_of(1024) {
        return Err(format!(
            "Argon2id with {passes} passes and {memory_bytes} bytes of memory; accepted are {MEMLIMIT_MIN} to \
             {MEMLIMIT_MAX} bytes in multiples of 1024, at least 1 pass, and a product of at most {WORK_BYTES_MAX}"
        ));
    }
    Ok(())
}

pub(super) fn copied(string: &[u8]) -> Zeroizing<Vec<u8>> {
    with_wiped_stack(|| Zeroizing::new(string.to_vec()))
}
