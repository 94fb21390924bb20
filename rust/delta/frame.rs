//! zstd frames, decoded in parts. A frame that decodes to more than is expected takes no more memory or time.

use crate::error::{Error, Kind, Result};
use crate::num::to_u64;
use zstd_safe::{DCtx, DParameter, InBuffer, OutBuffer, get_error_name};

/// Logarithm of the largest window of a frame in bytes: 128 MiB, the limit of zstd's own decoder. Level 1 uses 512 KiB.
const WINDOW_LOG_MAX: u32 = 27;

/// Reader of the content of one frame.
pub struct FrameReader<'a> {
    context: DCtx<'static>,
    input: InBuffer<'a>,
    /// Number of bytes that were read.
    read: u64,
    is_complete: bool,
}

/// Step of a decoder.
enum Step {
    /// Some bytes were decoded.
    Bytes(usize),
    /// The frame has no more bytes.
    End,
}

impl<'a> FrameReader<'a> {
    /// Creates a reader of the frame.
    ///
    /// # Errors
    /// `out-of-memory` if there is none for a decoder.
    pub fn new(frame: &'a [u8]) -> Result<FrameReader<'a>> {
        let refused = || Error::new(Kind::OutOfMemory, "no memory for a zstd decoder");
        let mut context = DCtx::try_create().ok_or_else(refused)?;
        context.set_parameter(DParameter::WindowLogMax(WINDOW_LOG_MAX)).map_err(invalid)?;
        Ok(FrameReader { context, input: InBuffer::around(frame), read: 0, is_complete: false })
    }

    /// Fills `into` with the next bytes.
    ///
    /// # Errors
    /// `malformed` if the frame is not valid, or ends before.
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
    ///
    /// # Errors
    /// `malformed`.
    pub fn finish(mut self) -> Result<()> {
        if let Step::Bytes(_) = self.step(&mut [0])? {
            return Err(malformed(format!("the frame decodes to more than the {} expected bytes", self.read - 1)));
        }
        let (end, length) = (self.input.pos(), self.input.src.len());
        if end < length {
            return Err(malformed(format!("{} bytes follow the frame; a tensor has one frame only", length - end)));
        }
        Ok(())
    }

    /// Decodes at least one byte, unless the frame is complete.
    fn step(&mut self, into: &mut [u8]) -> Result<Step> {
        let mut output = OutBuffer::around(into);
        while output.pos() == 0 {
            if self.is_complete {
                return Ok(Step::End);
            }
            let before = self.input.pos();
            self.is_complete = self.context.decompress_stream(&mut output, &mut self.input).map_err(invalid)? == 0;
            if output.pos() == 0 && self.input.pos() == before && !self.is_complete {
                return Err(malformed("the frame is incomplete".to_owned()));
            }
        }
        self.read += to_u64(output.pos());
        Ok(Step::Bytes(output.pos()))
    }
}

fn invalid(code: usize) -> Error {
    malformed(format!("not a valid zstd frame: {}", get_error_name(code)))
}

fn malformed(message: String) -> Error {
    Error::new(Kind::Malformed, message)
}
