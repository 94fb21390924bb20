//! zstd frames, decoded in parts. A frame that decodes to more than is expected takes no more memory or time.

use super::BLOCK_BYTES;
use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};
use std::rc::Rc;
use zstd_safe::{DCtx, DParameter, InBuffer, OutBuffer};
use zstd_safe::{find_frame_compressed_size, get_error_name, get_frame_content_size};

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
    /// All bytes, which are no more than the windows of the readers would be.
    Whole(Rc<Vec<u8>>),
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

/// Returns the memory that [`FrameReader::pair`] takes, in bytes.
pub fn pair_memory_bytes(frame: &[u8], content_bytes: u64) -> u64 {
    match shared_bytes(frame, content_bytes) {
        Some(bytes) => DECODER_BYTES + bytes,
        None => 2 * memory_bytes(frame, content_bytes),
    }
}

/// Returns the size of the content of a frame that two readers share.
fn shared_bytes(frame: &[u8], content_bytes: u64) -> Option<u64> {
    let stated = get_frame_content_size(frame).ok().flatten()?;
    Some(stated).filter(|&stated| stated <= content_bytes.min(1 << WINDOW_LOG_MAX))
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
        if window >= content_bytes
            && let Some(whole) = FrameReader::whole(frame, content_bytes)?
        {
            return Ok(whole);
        }
        let mut context = new_context()?;
        context.set_parameter(DParameter::WindowLogMax(WINDOW_LOG_MAX)).map_err(invalid)?;
        let content = Content::Stream { context, input: InBuffer::around(frame), is_complete: false };
        Ok(FrameReader { content, read: 0, following: 0 })
    }

    /// Creates two readers of the frame, as [`FrameReader::new`] does. If it states a content of up to 8 MiB, the frame is
    /// decoded once for both.
    pub fn pair(frame: &'a [u8], content_bytes: u64) -> Result<(FrameReader<'a>, FrameReader<'a>)> {
        if let Some(bytes) = shared_bytes(frame, content_bytes)
            && let Some(FrameReader { content: Content::Whole(content), following, .. }) =
                FrameReader::whole(frame, bytes)?
        {
            let reader = || FrameReader { content: Content::Whole(Rc::clone(&content)), read: 0, following };
            return Ok((reader(), reader()));
        }
        Ok((FrameReader::new(frame, content_bytes)?, FrameReader::new(frame, content_bytes)?))
    }

    /// Decodes the frame, whose content has up to `content_bytes`. Returns `None` for a frame that is not valid, of which a
    /// stream says why.
    fn whole(frame: &[u8], content_bytes: u64) -> Result<Option<FrameReader<'a>>> {
        let end = find_frame_compressed_size(frame).ok();
        let Some((frame, rest)) = end.and_then(|end| frame.split_at_checked(end)) else { return Ok(None) };
        let mut content = Vec::with_capacity(to_usize(content_bytes));
        let is_valid = new_context()?.decompress(&mut content, frame).is_ok();
        let content = Content::Whole(Rc::new(content));
        Ok(is_valid.then(|| FrameReader { content, read: 0, following: rest.len() }))
    }

    /// Passes over the next bytes. Fails as [`FrameReader::read`] does.
    pub fn skip(&mut self, mut bytes: u64) -> Result<()> {
        if let Content::Whole(content) = &self.content
            && self.read + bytes <= to_u64(content.len())
        {
            self.read += bytes;
            return Ok(());
        }
        let mut skipped = vec![0; BLOCK_BYTES];
        while bytes > 0 {
            let part = bytes.min(to_u64(BLOCK_BYTES));
            self.read(skipped.get_mut(..to_usize(part)).unwrap_or_default())?;
            bytes -= part;
        }
        Ok(())
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

fn new_context() -> Result<DCtx<'static>> {
    DCtx::try_create().ok_or_else(|| Error::new(Kind::OutOfMemory, "no memory for a zstd decoder"))
}

fn invalid(code: usize) -> Error {
    malformed(format!("not a valid zstd frame: {}", get_error_name(code)))
}

fn malformed(message: String) -> Error {
    Error::new(Kind::Malformed, message)
}
