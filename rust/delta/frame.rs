//! zstd frames, decoded in parts. A frame that decodes to more than is expected takes no more memory or time.

use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};
use zstd_safe::{DCtx, DParameter, InBuffer, OutBuffer, find_frame_compressed_size, get_error_name};

/// Logarithm of the largest window of a frame in bytes: 8 MiB. Level 1, which all writers of the format use, has 512 KiB.
const WINDOW_LOG_MAX: u32 = 23;

/// Memory of a decoder beside its window, in bytes: tables, and buffers for a block of input and of output.
const DECODER_BYTES: u64 = 512 << 10;

/// First bytes of a frame.
const MAGIC: [u8; 4] = 0xfd2f_b528_u32.to_le_bytes();

/// Reader of the content of one frame.
pub struct FrameReader<'a> {
    content: Content<'a>,
    /// Number of bytes that were read.
    read: u64,
    /// Number of bytes after the frame.
    following: usize,
}

enum Content<'a> {
    /// All bytes, which are no more than the window would be.
    Whole(Vec<u8>),
    /// A decoder with a window that is smaller than the content.
    Stream { context: DCtx<'static>, input: InBuffer<'a>, is_complete: bool },
}

/// Step of a decoder.
enum Step {
    /// Some bytes were decoded.
    Bytes(usize),
    /// The frame has no more bytes.
    End,
}

/// Returns the memory that a reader of the frame takes, in bytes. `content_bytes` is as for [`FrameReader::new`].
pub fn memory_bytes(frame: &[u8], content_bytes: u64) -> u64 {
    DECODER_BYTES + window_bytes(frame).unwrap_or(0).min(content_bytes)
}

/// Returns the window that a frame requests, in bytes, or `None` if its header is not valid.
fn window_bytes(frame: &[u8]) -> Option<u64> {
    let (&descriptor, fields) = frame.strip_prefix(&MAGIC)?.split_first()?;
    let first = u64::from(*fields.first()?);
    if descriptor & 0x20 == 0 {
        let base = 1 << (10 + (first >> 3));
        return Some(base + base / 8 * (first & 7));
    }
    // A single segment has the size of the content, after the id of a dictionary, in place of a window.
    let dictionary_bytes = [0, 1, 2, 4].get(usize::from(descriptor & 3))?;
    let size = fields.get(*dictionary_bytes..)?;
    match descriptor >> 6 {
        0 => size.first().map(|&byte| byte.into()),
        1 => size.first_chunk().map(|&bytes| u64::from(u16::from_le_bytes(bytes)) + 256),
        2 => size.first_chunk().map(|&bytes| u32::from_le_bytes(bytes).into()),
        _ => size.first_chunk().map(|&bytes| u64::from_le_bytes(bytes)),
    }
}

impl<'a> FrameReader<'a> {
    /// Creates a reader of the frame, whose content may have up to `content_bytes`. Fails with `malformed` if the frame
    /// requests a window of more than 8 MiB; `out-of-memory` if there is none for a decoder.
    pub fn new(frame: &'a [u8], content_bytes: u64) -> Result<FrameReader<'a>> {
        let window = window_bytes(frame).unwrap_or(0);
        if window > 1 << WINDOW_LOG_MAX {
            return Err(malformed(format!(
                "the frame needs a window of {window} bytes to decode, but at most {} are supported; compress it at \
                 level 1 of zstd, as other writers of the format do",
                1 << WINDOW_LOG_MAX
            )));
        }
        let refused = || Error::new(Kind::OutOfMemory, "no memory for a zstd decoder");
        let mut context = DCtx::try_create().ok_or_else(refused)?;
        // Otherwise the stream says why the frame is not valid.
        if window >= content_bytes
            && let Ok(end) = find_frame_compressed_size(frame)
            && let Some((frame, rest)) = frame.split_at_checked(end)
        {
            let mut content = Vec::with_capacity(to_usize(content_bytes));
            if context.decompress(&mut content, frame).is_ok() {
                return Ok(FrameReader { content: Content::Whole(content), read: 0, following: rest.len() });
            }
            context = DCtx::try_create().ok_or_else(refused)?;
        }
        context.set_parameter(DParameter::WindowLogMax(WINDOW_LOG_MAX)).map_err(invalid)?;
        let content = Content::Stream { context, input: InBuffer::around(frame), is_complete: false };
        Ok(FrameReader { content, read: 0, following: 0 })
    }

    /// Fills `into` with the next bytes. Fails with `malformed` if the frame is not valid, or ends before.
    pub fn read(&mut self, into: &mut [u8]) -> Result<()> {
        let mut filled = 0;
        while filled < into.len() {
            match self.step(into.get_mut(filled..).unwrap_or_default())? {
                Step::Bytes(bytes) => filled += bytes,
                Step::End => {
                    let (has, needs) = (self.read, self.read - to_u64(filled) + to_u64(into.len()));
                    return Err(malformed(format!("the frame decodes to {has} bytes; at least {needs} were expected")));
                }
            }
        }
        Ok(())
    }

    /// Checks that the frame has no more content, and that nothing follows it.
    pub fn finish(mut self) -> Result<()> {
        if let Step::Bytes(_) = self.step(&mut [0])? {
            return Err(malformed(format!("the frame decodes to more than the {} expected bytes", self.read - 1)));
        }
        let following = match &self.content {
            Content::Whole(_) => self.following,
            Content::Stream { input, .. } => input.src.len() - input.pos(),
        };
        if following > 0 {
            return Err(malformed(format!("{following} bytes follow the frame; a tensor has one frame only")));
        }
        Ok(())
    }

    /// Decodes at least one byte, unless the frame is complete.
    fn step(&mut self, into: &mut [u8]) -> Result<Step> {
        let bytes = match &mut self.content {
            Content::Whole(content) => {
                let left = content.get(to_usize(self.read)..).unwrap_or_default();
                let count = left.len().min(into.len());
                if let (Some(into), Some(bytes)) = (into.get_mut(..count), left.get(..count)) {
                    into.copy_from_slice(bytes);
                }
                count
            }
            Content::Stream { context, input, is_complete } => {
                let mut output = OutBuffer::around(into);
                while output.pos() == 0 && !*is_complete {
                    let before = input.pos();
                    *is_complete = context.decompress_stream(&mut output, input).map_err(invalid)? == 0;
                    if output.pos() == 0 && input.pos() == before && !*is_complete {
                        return Err(malformed("the frame is incomplete".to_owned()));
                    }
                }
                output.pos()
            }
        };
        self.read += to_u64(bytes);
        Ok(if bytes > 0 { Step::Bytes(bytes) } else { Step::End })
    }
}

fn invalid(code: usize) -> Error {
    malformed(format!("not a valid zstd frame: {}", get_error_name(code)))
}

fn malformed(message: String) -> Error {
    Error::new(Kind::Malformed, message)
}
